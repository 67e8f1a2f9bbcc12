"""Integrations: the planner behind other front ends. `dynamo` is the backend of ``torch.compile``."""
