"""The overlap of copies with kernels, from traces whose answer is known."""

import torch

from experiments.steps.profiling import summary, traced


def event(cat, begin, end, name=""):
    return {"cat": cat, "name": name, "ts": begin, "dur": end - begin}


OUT, IN = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"


def test_copies_count_as_hidden_while_any_kernel_runs_and_once():
    kernels = [event("kernel", 0, 10), event("kernel", 5, 20), event("kernel", 40, 50)]
    copies = [event("gpu_memcpy", 10, 30, OUT), event("gpu_memcpy", 45, 65, IN)]
    others = [
        event("gpu_memcpy", 0, 99, "Memcpy DtoD (Device -> Device)"),
        event("cpu_op", 0, 99, "aten::mm"),
        {"ph": "M"},
    ]
    found = summary([*copies, *kernels, *others])
    assert found["copies"] == 2 and found["out"] == found["in"] == 20e-6
    assert found["hidden"] == 15e-6 and found["kernels"] == 30e-6 and found["hidden_share"] == 0.375


def test_a_step_without_a_gpu_has_a_trace_without_copies():
    calls = []
    found = traced(lambda: calls.append(torch.ones(4).sum()))
    assert len(calls) == 2 and found["copies"] == 0 and found["hidden_share"] is None
