"""Patches of torch that make captured operations bit-equal to eager ones, with the result sizes of the real kernels.

Read `eager_settings` first: `like_eager` enters them for one capture. `python_kernels` replaces operations, `kernels`
their results on fake tensors, `size_arithmetic` computes symbolic sizes. Every part names its reason, the place in
torch that makes it necessary, and the test that fails without it. All are needed by torch 2.11 to 2.13, unless the part
says otherwise.
"""
