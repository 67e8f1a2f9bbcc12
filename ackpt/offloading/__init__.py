"""Offload: copy the tensors that autograd saves to host memory or disk in forward, and back for backward.

Read `saved_tensors` first: the context manager, its options and its hooks. `engine` decides which storages are copied
and when. `store` allocates host memory or files, and a `transport` copies bytes to and from it (CPU threads or CUDA
streams). `pays` estimates whether the copies overlap with compute. Planned steps run
their own copies by schedule: see `ackpt.planner.schedule.added_operations`.
"""
