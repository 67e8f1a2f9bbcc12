"""Planning, the stages check and run: schedules, their exact simulation, and the step that runs as planned.

Read `schedule` first, then `simulator`: the live bytes after every step. `plan` holds a checked schedule with its
promise; `rewriting` turns it into two FX modules and `proof` checks those independently; `planned_step` runs them.
"""
