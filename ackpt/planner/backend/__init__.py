"""The planner as the backend ``"ackpt"`` of ``torch.compile``.

Read `without_dynamo` first, which runs a model as a planned step. `dynamo` passes plans to Inductor, and `dynamo_calls`
checks the user's options and makes sure that no call of Inductor's code runs without its plan.
"""
