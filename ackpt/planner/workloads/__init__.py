"""Workloads: training steps of named models, built from shapes alone, and their plans.

Read `step_request` first. ``ackpt plan``, the planner for sharded steps and ``ackpt selftest`` build on this package.
"""
