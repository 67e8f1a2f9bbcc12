"""Metering: how many bytes, FLOPs and seconds a training step takes, measured or predicted.

Read `meter` first (`measure`), then `timeline`, the main type: live bytes by category after every event.
`prediction` derives the same timeline from shapes alone, for the CPU or a GPU that is not there.
"""
