"""The autocast state of all devices, recorded in the forward and restored for the recomputation."""

from __future__ import annotations

import contextlib

import torch

_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Autocast:
    """A snapshot of the autocast switches, dtypes and weight-cache flag of this thread.

    `restored` sets the switches directly, because ``torch.autocast("cuda")`` disables itself without a GPU, for example
    when `predict` runs a step from shapes alone.
    """

    __slots__ = ("modes", "cache")

    def __init__(self):
        self.modes = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in _DEVICES]
        self.cache = torch.is_autocast_cache_enabled()

    def _apply(self):
        for name, enabled, dtype in self.modes:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    @contextlib.contextmanager
    def restored(self):
        """Apply this snapshot in the body, and the present state after it."""
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


any_enabled = torch._C._is_any_autocast_enabled


class _Off(Autocast):
    """Autocast switched off everywhere, for a region whose forward ran without it."""

    def __init__(self):
        super().__init__()
        self.modes = [(name, False, dtype) for name, _, dtype in self.modes]


OFF = _Off()
