"""The planner as the backend ``"ackpt"`` of ``torch.compile``.

Read `without_dynamo` first. `options` checks the user's options. `without_dynamo` runs a model as a planned step;
`dynamo` passes plans to Inductor, and `dynamo_calls` makes sure that no call of Inductor's code runs without its plan.
"""
