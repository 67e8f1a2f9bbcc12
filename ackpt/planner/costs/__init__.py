"""Costs: a `Profile` gives seconds, FLOPs, bytes and workspace of every operation of a graph.

Read `profiles` first. `operation_costs` counts from shapes; `devices` holds the rates of known GPUs, and `calibration`
measures those of this CPU. `workspace` runs operations alone, through `ackpt.metering.run_alone`.
"""
