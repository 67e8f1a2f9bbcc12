"""The planner as the backend ``"ackpt"`` of ``torch.compile``."""
