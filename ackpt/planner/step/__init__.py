"""Choose and run the plan of each call.

Read `planned_step` first, then `variants`, which finds or makes the `variant` that serves a call. `runnable` is a
capture with the graph at all sizes that it serves; `plans` chooses its schedule at given sizes. `compiled_schedule`
turns a captured step and a schedule into an autograd function, whose code is `generated_code`. `backward_checks` checks
the function's backward, `uncovered` warns of memory outside of the plan, and `saved_plan` runs a plan from a file.
"""
