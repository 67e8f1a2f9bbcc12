"""Choose and run the plan of each call.

Read `planned_step` first, then `variants`, which finds or makes the `variant` that serves a call. `compiled_schedule`
turns a captured step and a schedule into an autograd function, whose code is `generated_code`; `dynamic_step` is a
capture that serves many sizes. `choices` says what a step asks of planning, and when it changes to a cheaper schedule.
`eager_step` simulates the model's own step.
"""
