"""Metering: the bytes, FLOPs and seconds of a training step, measured or predicted.

Read `meter` first (`measure`), then `timeline`, the main type: live bytes by category after every event.
`prediction` derives the same timeline from shapes alone, for the CPU or for a GPU that this machine does not have.
`kernel_memory`, `autograd_engine`, `cuda_choices` and `without_data` make predicted bytes equal measured ones, and
`gpus` has the model of the caching allocator that gives what a GPU reserves.
"""
