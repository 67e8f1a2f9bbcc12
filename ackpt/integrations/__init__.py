"""Integrations: the planner as the backend ``"ackpt"`` of ``torch.compile``. Read `without_dynamo` first.

`options` checks what the user gives. `without_dynamo` runs a model as a planned step; `dynamo` hands plans to Inductor,
and `dynamo_calls` makes sure that no call of Inductor's code runs without its plan.
"""
