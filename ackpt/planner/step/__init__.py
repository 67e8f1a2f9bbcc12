"""Run a model's calls as planned: capture new calls, choose and compile their schedules, and check each backward.

Read `planned_step` first, then `variants`, which finds or makes the `Variant` that serves a call. `plans` has a capture
with its graph at all sizes that it serves, and chooses its schedule there, also that of a plan from a file.
`compiled_schedule` turns a captured step and a schedule into an autograd function and checks its backward, and
`uncovered` warns of memory outside of the plan.
"""
