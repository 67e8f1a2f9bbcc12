"""The autocast state with which a region's forward ran, for its recomputation."""

from __future__ import annotations

import contextlib

import torch

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
