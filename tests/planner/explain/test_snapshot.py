"""`Explanation.to_memory_viz`: torch's own reader accepts the snapshot, and its events are those of the plan."""

import pickle
import pickletools

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

import ackpt


def block():
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 8))


@pytest.fixture(scope="module", params=["none", "full"])
def written(request, tmp_path_factory):
    model = nn.Sequential(block(), block(), block())
    optimizer = torch.optim.AdamW(model.parameters())
    explanation = ackpt.explain(model, torch.ones(64, 8), policy=request.param, optimizer=optimizer)
    path = explanation.to_memory_viz(tmp_path_factory.mktemp("viz") / "step.pickle")
    return explanation, pickle.loads(path.read_bytes())


def test_events_give_the_peak_and_never_overlap(written):
    explanation, data = written
    live: dict[int, int] = {}
    peak = 0
    (segment,) = data["segments"]
    for event in data["device_traces"][0]:
        start, end = event["addr"], event["addr"] + event["size"]
        assert segment["address"] <= start and end <= segment["address"] + segment["total_size"]
        if event["action"] == "alloc":
            assert all(end <= other or other + size <= start for other, size in live.items())
            live[start] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(start) == event["size"]
        peak = max(peak, sum(live.values()))
    assert peak == explanation.plan.peak_bytes
    left = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert left == live and sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
    assert sum(live.values()) == explanation.plan.resident_bytes + explanation.plan.timeline.live[-1]


# What the page's own reader knows: `unpickle` in torch/utils/viz/MemoryViz.js.
OPCODES = set(
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE "
    "FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS "
    "SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3".split()
)


def test_the_page_knows_every_opcode(written, tmp_path):
    explanation, _ = written
    operations = list(pickletools.genops(explanation.to_memory_viz(tmp_path / "step.pickle").read_bytes()))
    assert {operation.name for operation, *_ in operations} <= OPCODES
    assert operations[0][1] == 4  # the newest protocol that it knows


def test_torch_reads_the_snapshot(written):
    explanation, data = written
    allocated = explanation.plan.resident_bytes + explanation.plan.timeline.live[-1]
    assert f"total_allocated: {_memory_viz.Bytes(allocated)}" in _memory_viz.segsum(data)
    allocs = sum(event["action"] == "alloc" for event in data["device_traces"][0])
    assert _memory_viz.trace(data).count(" = a[") == allocs == len([a for a in explanation.allocations if a.bytes])
    names = {event["frames"][0]["name"] for event in data["device_traces"][0] if event["action"] == "alloc"}
    assert "optimizer: state of the optimizer" in names and "parameters: 0.0.weight" in names
    assert ("recomputed: tanh (0.2)" in names) == (explanation.plan.policy == "full")
    assert "gradients: gradient of 2.3.bias" in _memory_viz.memory(data, format_flamegraph=lambda lines: lines)
    page = _memory_viz.trace_plot(data)
    assert "add_local_files" in page and len(page) > len(pickle.dumps(data))
    assert _memory_viz.segment_plot(data)
