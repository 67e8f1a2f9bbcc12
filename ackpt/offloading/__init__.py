"""Offload: storages that autograd saves wait in host memory or on disk until backward needs them.

Read `saved_tensors` first: it is the context manager and its options. `engine` decides what is copied when,
`placeholders` stand for the saved tensors, `store` holds the bytes, and a transport copies them (CPU threads or CUDA
streams). `pays` answers whether offload can overlap with compute at all.
"""
