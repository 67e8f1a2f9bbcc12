"""Patches of torch that make captured operations bit-equal to eager ones, with the result sizes of the real kernels.

`eager_settings.like_eager` enters all of them for one capture; `python_kernels` replaces one operation. Every
module names its reason, the place in torch that makes it necessary, and the test that fails without it. All are needed
by torch 2.11 to 2.13, unless the module says otherwise.
"""
