"""Run a model's code on tensors without data: what it needs to take its usual path, and what it must not leave.

`packed_sequences` answers a question of transformers about values; `holders` removes what caches would keep.
"""
