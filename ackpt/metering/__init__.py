"""Metering: the bytes, FLOPs and seconds of a training step, measured or predicted.

Read `meter` first (`measure`), then `timeline`, the main type: live bytes by category after every event.
`prediction` derives the same timeline from shapes alone, for the CPU or for a GPU that this machine does not have.
`storages` follows its operations, and `kernel_memory`, `autograd_engine`, `cuda_choices` and `without_data` make
predicted bytes equal measured ones. `caching_allocator` and `gpus` give what a GPU reserves.
"""
