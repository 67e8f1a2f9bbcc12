"""The timeline of a CUDA memory history, tested without a GPU."""

import torch
from conftest import raises
from stand_in_gpu import Allocator

from ackpt.metering import cuda_meter as meter_cuda
from ackpt.metering import meter

HISTORY = [
    {"action": "segment_alloc", "addr": 4096, "size": 2 << 20},
    {"action": "alloc", "addr": 4096, "size": 1000},
    {"action": "alloc", "addr": 8192, "size": 512},
    {"action": "free_requested", "addr": 8192, "size": 512},
    {"action": "free_completed", "addr": 8192, "size": 512},
    {"action": "alloc", "addr": 8192, "size": 1},
    {"action": "free_requested", "addr": 64, "size": 4},
    {"action": "snapshot", "addr": 0, "size": 0},
]


def test_allocator_actions_are_read():
    marks = [(3, ("backward",)), (4, ("mark", 8192, "gradients"))]
    assert list(meter_cuda.actions(HISTORY, marks)) == [
        ("alloc", 4096, 1024),
        ("alloc", 8192, 512),
        ("free", 8192),
        ("backward",),
        ("alloc", 8192, 512),
        ("mark", 8192, "gradients"),
        ("free", 64),
    ]
    assert list(meter_cuda.actions([], [(0, ("backward",))])) == [("backward",)]


def test_measure_reads_a_simulated_allocator(monkeypatch):
    allocator = Allocator(monkeypatch)
    x = torch.ones(2, requires_grad=True)

    def step():
        allocator.note("alloc", 1, 4096)
        allocator.note("alloc", 2, 1024)
        allocator.note("free_requested", 2, 1024)
        x.sum().backward()
        allocator.note("alloc", 2, 2048)
        allocator.note("free_requested", 1, 4096)
        allocator.note("free_requested", 2, 2048)

    engine = torch.autograd._engine_run_backward
    measured = meter.measure(step, "cuda", warmup=1, repeats=2)
    assert measured.timeline.live == (0, 4096, 5120, 4096, 6144, 2048, 0)
    assert measured.timeline.boundary == 3
    assert measured.peak_bytes == 1000 + 6144
    assert measured.categories["other"] == measured.resident_bytes == 1000
    assert (measured.categories["activations"], measured.categories["temporaries"]) == (4096, 2048)
    assert measured.allocator == {"requested_peak_bytes": 7143, "reserved_peak_bytes": 2 * 7144}
    assert allocator.emptied == [0]  # what others left there would count as reserved
    assert measured.seconds.samples == (1.5, 1.5)
    assert torch.autograd._engine_run_backward is engine and not allocator.recording


def test_gradients_are_found_by_their_addresses(monkeypatch):
    allocator = Allocator(monkeypatch)
    x = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))

    def step():
        allocator.note("alloc", 1, 512)
        x.square().sum().backward()
        allocator.note("free_requested", 1, 512)

    x.register_hook(lambda grad: allocator.note("alloc", grad.data_ptr(), 512))
    measured = meter.measure(step, "cuda", resident=(x,), warmup=0, repeats=0)
    assert measured.timeline.at(measured.timeline.peak_index)["gradients"] == 512
    assert measured.categories["parameters"] + measured.categories["inputs"] == 512
    x.register_hook(lambda grad: grad.mul_(1))
    again = meter.measure(step, "cuda", resident=(x,), warmup=0, repeats=0)
    assert again.timeline.live[0] == 512  # a gradient that exists before the step


def test_a_history_that_is_being_recorded_is_refused(monkeypatch):
    Allocator(monkeypatch).recording = True
    raises(meter.MeterError, "memory history is being recorded", lambda: meter.measure(lambda: None, "cuda"))
