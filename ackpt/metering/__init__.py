"""Metering: the bytes, FLOPs and seconds of a training step, measured or predicted.

Read `meter` first (`measure`), then `timeline`, the main type: live bytes by category after every event.
`prediction` derives the same timeline from shapes alone, for the CPU or for a GPU that this machine does not have.
`cpu_losses`, `gradient_sums`, `cuda_choices` and `attention_choices` make predicted bytes equal measured ones.
"""
