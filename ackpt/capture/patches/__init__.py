"""Patches of torch that make captured operations equal to eager ones to the bit. Each module gives its reason.

`eager_settings` enters them all for a capture. `python_kernels` is how one operation is replaced.
"""
