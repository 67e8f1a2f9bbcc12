"""Schedules: their simulation, and the FX modules that run them. Policies choose the schedules.

Read `schedule` first, then `simulator`, which computes the live bytes after every step. `plan` holds a checked schedule
with its peak and cost. `rewriting` translates the schedule into two listings of operations (`listing`), from which it
makes code or FX modules, and `proof` checks the listings independently.
"""
