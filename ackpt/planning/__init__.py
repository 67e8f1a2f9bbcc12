"""Planning, the stages check and run: schedules, their exact simulation, and the step that runs as planned.

Read `schedule` first, then `simulator`, which computes the live bytes after every step. `plan` holds a checked schedule
with its peak and cost. `rewriting` translates the schedule into two FX modules, `proof` checks the modules
independently, and `planned_step` runs them.
"""
