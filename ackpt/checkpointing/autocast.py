"""The autocast state of a region's forward, for its recomputation, and of operations that dispatch modes call."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Autocast:
    """The autocast state of all devices in this thread, to be restored in a recomputation; ``off``: autocast disabled.

    `restored` sets the switches directly, because ``torch.autocast("cuda")`` disables itself without a GPU, for example
    when `predict` runs a step from shapes alone.
    """

    __slots__ = ("modes", "cache")

    def __init__(self, off: bool = False):
        is_on = torch.is_autocast_enabled
        self.modes = [(name, not off and is_on(name), torch.get_autocast_dtype(name)) for name in _DEVICES]
        self.cache = torch.is_autocast_cache_enabled()

    def _apply(self):
        for name, enabled, dtype in self.modes:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    @contextlib.contextmanager
    def restored(self):
        """Apply this state in the body, and the present one after it."""
        present = Autocast()
        torch.autocast_increment_nesting()
        self._apply()
        # A cached cast made outside the region has its autograd history there; the recomputation needs its own cast.
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            present._apply()


AUTOCAST_OFF = Autocast(off=True)

_OF_TORCH = {"aten", "prim", "prims", "ackpt_graph", "higher_order"}
_has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportAttributeAccessIssue]


def autocast_of(func: Any) -> tuple[tuple[str, torch.dtype], ...]:
    """In a dispatch mode, ``((device, dtype), ...)``: the autocast under which eager runs the kernel of `func`.

    Only operations of others than torch have one; those with a kernel for autocast run below it.
    """
    if func.namespace in _OF_TORCH:
        return ()
    # Torch excludes autocast in a mode, and so in kernels that it calls (`pythonFallback` in PythonFallbackKernel.cpp).
    with enable_reentrant_dispatch():
        modes = [(device, dtype) for device, is_on, dtype in Autocast().modes if is_on]
    return tuple(each for each in modes if not _has_kernel(func.name(), f"Autocast{each[0].upper()}"))


def as_in_eager(func: Any) -> Any:
    """In a dispatch mode, a function that runs `func` under the autocast of eager mode."""
    autocast = autocast_of(func)
    return partial(run_under, func, autocast) if autocast else func


def run_under(operation: Any, autocast: tuple[tuple[str, torch.dtype], ...], *args: Any, **kwargs: Any) -> Any:
    """``operation(*args, **kwargs)`` under `autocast`, from `autocast_of`."""
    with contextlib.ExitStack() as stack:
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        return operation(*args, **kwargs)
