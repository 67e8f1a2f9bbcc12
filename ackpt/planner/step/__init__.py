"""Choose and run the plan of each call.

Read `planned_step` first, then `variants`, which finds or makes the `Variant` that serves a call. `runnable` is a
capture with the graph at all sizes that it serves; `plans` chooses its schedule at given sizes, also that of a plan
from a file. `compiled_schedule` turns a captured step and a schedule into an autograd function, whose code is
`generated_code`. `backward_checks` checks the function's backward, and `uncovered` warns of memory outside of the plan.
"""
