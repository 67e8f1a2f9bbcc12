"""Planning, the stage check: schedules, their exact simulation, and the modules that run them.

Read `schedule` first, then `simulator`, which computes the live bytes after every step. `plan` holds a checked schedule
with its peak and cost. `rewriting` translates the schedule into two FX modules, and `proof` checks the
modules independently.
"""
