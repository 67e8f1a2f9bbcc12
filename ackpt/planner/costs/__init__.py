"""Costs: a `Profile` gives seconds, FLOPs, bytes and workspace of every operation of a graph.

Read `profiles` first. `operation_costs` counts from shapes; `devices` holds the rates of known GPUs, and `calibration`
measures those of this CPU. `operation_runs` and `workspace` measure by running operations one at a time, both through
`ackpt.metering.run_alone`.
"""
