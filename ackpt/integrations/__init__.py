"""Integrations: the planner as a backend for other front ends. `dynamo` has the one for ``torch.compile``."""
