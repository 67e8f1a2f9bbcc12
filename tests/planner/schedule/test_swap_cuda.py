"""The operations of copies on a GPU, over simulated streams: every access is ordered, and each order is needed."""

import pytest
import torch
from simulated_cuda import EventBeforeTheCopy, Machine, SimulatedTransport, Span

from ackpt.planner.schedule import added_operations as copies

SHAPE = (4, 8)
LAYOUT = (torch.device("cpu"), torch.float32, SHAPE, (8, 1), 0)  # where the machine's memory really lies


class Pinned(Span):
    def numel(self):
        return self.data.numel()


class Setting:
    def __init__(self, monkeypatch, kind=SimulatedTransport):
        self.machine, self.buffers = Machine(), []
        transport = kind(self.machine)
        monkeypatch.setattr(copies, "_transport", lambda *_: transport)
        monkeypatch.setattr(copies, "_pinned", self.pinned)

    def pinned(self, size):
        """Torch takes page-locked memory back only behind the copies that use it; here it is kept."""
        span = self.machine.host_memory(size)
        self.buffers.append(span)
        return Pinned(span.machine, span.block, span.data)

    def computed(self, value: float) -> torch.Tensor:
        """A tensor that the computing stream has filled."""
        storage = self.machine.allocate(4 * 32)
        found = torch.empty(0).set_(storage, 0, SHAPE, LAYOUT[3])
        found.fill_(value)
        self.machine.launch(writes=[storage])
        return found

    def read(self, tensor):
        self.machine.launch(reads=[tensor.untyped_storage()])


def step(setting: Setting, waits_out=True, waits_in=True):
    """Two tensors leave and come back; the memory of the first goes to the second, and both blocks are used again."""
    hosts = []
    for value in (1.0, 2.0):
        source = setting.computed(value)
        moved = copies.offload(source)
        hosts.append(copies.wait(moved, source) if waits_out else moved[0])
        del source
    setting.computed(3.0)
    found = []
    for host in reversed(hosts):
        moved = copies.prefetch(host, *LAYOUT)
        back = copies.wait(moved, host) if waits_in else moved[0]
        setting.read(back)
        found.append(back)
    assert [set(back.flatten().tolist()) for back in found] == [{2.0}, {1.0}]
    assert all(back.shape == SHAPE for back in found)
    return setting.machine.races


def test_copies_are_ordered_with_computing(monkeypatch):
    setting = Setting(monkeypatch)
    assert step(setting) == []
    assert setting.machine.reused > 0 and setting.machine.host_waits == 0  # the host goes on


@pytest.mark.parametrize("left_out", ["waits_out", "waits_in"])
def test_without_a_wait_there_is_a_race(monkeypatch, left_out):
    assert step(Setting(monkeypatch), **{left_out: False})


def test_an_event_before_its_copy_is_a_race(monkeypatch):
    assert step(Setting(monkeypatch, EventBeforeTheCopy))


def test_pageable_memory_replaces_memory_that_cannot_be_pinned_with_a_warning(monkeypatch):
    def refuses(*_, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("no page-locked memory")
        return empty(*_, **kwargs)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", refuses)
    copies._warn.cache_clear()
    with pytest.warns(UserWarning, match="pinning host memory failed \\(no page-locked memory\\)"):
        assert copies._pinned(16).numel() == 16
    assert copies._pinned(16).numel() == 16  # said once


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_bytes_come_back_and_the_memory_is_given_back():
    whole = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    expected, layout = whole.cpu(), (whole.device, whole.dtype, whole.shape, whole.stride(), 0)
    before = torch.cuda.memory_allocated()
    moved = copies.offload(whole)
    host = copies.wait(moved, whole)
    del moved, whole
    assert host.is_pinned() and before - torch.cuda.memory_allocated() == 4 << 20
    moved = copies.prefetch(host, *layout)
    assert torch.equal(copies.wait(moved, host).cpu(), expected)
