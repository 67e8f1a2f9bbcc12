"""Capture of a step as a GPU would run it, on a machine without a GPU.

A build of torch without CUDA cannot trace fake CUDA tensors, because autograd asks for the device. So CPU tensors are
captured with the dropout, attention and autocast of a GPU, as `ackpt.predict` does for an eager step.

Not imitated: the fused RMS norm of ``torch.nn.functional.rms_norm``, which is decomposed here as on the CPU, and the
float32 statistics of norms in half precision (2 bytes a row here, 4 on a GPU).
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch
import torch.nn.functional as F

from ackpt.metering.autograd_engine import around_backward
from ackpt.metering.cuda_choices import CudaChoices
from ackpt.metering.gpus import gpu

AS_ON = "h200"  # the GPU whose choice of kernels a prediction for CUDA follows
_HALF = (torch.float16, torch.bfloat16)


class CapturedCudaChoices(CudaChoices):
    """Calls as on a GPU while a step is captured; `capability`: its compute capability."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.rms_norm or func is torch.rms_norm:
            if torch.is_autocast_enabled("cpu"):
                args = [_widened(argument) for argument in args]
                kwargs = {name: _widened(argument) for name, argument in kwargs.items()}
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def kernels_of_a_gpu():
    """Inside, an eager step takes the operations that a captured step of a GPU has, also in recomputation."""
    choices = partial(CapturedCudaChoices, gpu(AS_ON).capability)
    with choices(), around_backward(choices):
        yield


def _widened(argument):
    low = isinstance(argument, torch.Tensor) and argument.dtype in _HALF
    return argument.float() if low else argument
