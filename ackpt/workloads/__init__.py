"""Workloads: training steps of named models, made from shapes alone, and their plans.

Read `named_models` first. ``ackpt plan``, the planner for sharded steps and the experiments all start here.
"""
