"""A stand-in for a GPU: the device "cuda" is the CPU, and ``torch.cuda`` is a simulated allocator that notes its calls.

What experiments do differently on a GPU then runs on a CPU, with device "cuda" in their configurations and records.
"""

import contextlib
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode


class Allocator:
    """Replaces torch.cuda without a GPU: a step tells it what a GPU would have allocated."""

    def __init__(self, patch, capability=(7, 5)):
        self.live, self.peak, self.events, self.history, self.recording = 1000, 1000, [0, 0], [], False
        self.emptied: list[int] = []  # after how many allocations the cache was
        self.fractions: list[float] = []
        about = {"name": "a stand-in", "major": capability[0], "minor": capability[1], "total_memory": 2**34}
        about |= {"multi_processor_count": 40, "clock_rate": 1.6e6, "memory_clock_rate": 5e6, "memory_bus_width": 256}
        replaced = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device": lambda index: contextlib.nullcontext(),
            "synchronize": lambda *_: None,
            "empty_cache": lambda: self.emptied.append(self.events[0]),
            "memory_allocated": lambda: self.live,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", self.live),
            "memory_stats": self.statistics,
            "mem_get_info": lambda: (2**34, 2**34),
            "set_per_process_memory_fraction": self.fractions.append,
            "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
            "get_device_capability": lambda device=None: capability,
            "get_device_properties": lambda device=None: SimpleNamespace(**about),
            "get_device_name": lambda device=None: about["name"],
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *_: None,
            "Event": Event,
        }
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        patch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [self.history]})
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.recording, raising=False)

    def record(self, enabled, **options):
        self.recording = enabled is not None
        if options.get("clear_history"):
            self.history.clear()

    def note(self, action, address, size):
        self.live += size if action == "alloc" else -size
        self.peak = max(self.peak, self.live)
        self.events[action != "alloc"] += 1
        if self.recording:
            self.history.append({"action": action, "addr": address, "size": size})

    def statistics(self):
        return {
            "allocation.all.allocated": self.events[0],
            "allocation.all.freed": self.events[1],
            "allocated_bytes.all.peak": self.peak,
            "requested_bytes.all.peak": self.peak - 1,
            "reserved_bytes.all.peak": 2 * self.peak,
        }


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1500.0  # milliseconds


class OnTheCpu(TorchFunctionMode):
    """Inside, tensors that are asked for on "cuda", or in page-locked memory, are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_here, args), **kwargs)


def _here(value):
    named = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if named else value
