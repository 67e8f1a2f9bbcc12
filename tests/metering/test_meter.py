"""``measure`` and ``count_flops`` against bytes and FLOPs counted by hand."""

import functools
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import function_of, raises
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ackpt
from ackpt.metering import cpu_meter as meter_cpu
from ackpt.metering.flops import UncountedFlops, count_flops, formula
from ackpt.metering.meter import Measurement, MeterError, Seconds, compare_seconds, measure, memory_format
from ackpt.metering.resident import Resident

N, D, FP32 = 32, 64, 4
WEIGHT, BIAS, HIDDEN = D * D * FP32, D * FP32, N * D * FP32


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(D, D), torch.nn.GELU())))


@pytest.fixture
def x(model):
    return torch.randn(N, D)


def consistent(measured: Measurement) -> bool:
    timeline = measured.timeline
    sums = tuple(map(sum, zip(*timeline.categories.values())))
    return (
        sums == timeline.live
        and min(map(min, timeline.categories.values())) >= 0
        and sum(measured.categories.values()) == measured.peak_bytes
    )


def test_hand_counted_step(model, x):
    """Linear + GELU: in the backward of layer i, the activations of earlier layers and its own tensors are live."""

    def step():
        model(x).sum().backward()
        model.zero_grad()

    measured = measure(step, resident=(model, x), repeats=0)
    assert measured.resident_bytes == 4 * (WEIGHT + BIAS) + HIDDEN
    live, boundary = measured.timeline.live, measured.timeline.boundary
    # Each layer leaves its output before and after GELU; the last one's after lives only until the sum has read it.
    # The sum and the gradient of it are one fp32 number each.
    assert live[boundary] == 7 * HIDDEN + 2 * FP32
    assert measured.timeline.at(boundary) == {"activations": live[boundary], "gradients": 0, "temporaries": 0}
    assert live[0] == live[-1] == 0
    assert consistent(measured)
    assert measured.device == "cpu" and measured.allocator == {} and measured.seconds is None


def test_repeats_to_the_byte(model, x):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    first, *others = (measure(step, resident=(model, optimizer, x), repeats=0) for _ in range(3))
    assert all(other == first for other in others)
    assert first.resident_bytes == 3 * 4 * (WEIGHT + BIAS) + 8 * FP32 + HIDDEN  # AdamW counts steps in fp32
    assert first.timeline.live[0] == 4 * (WEIGHT + BIAS)  # the gradients of the step before ...
    assert min(first.timeline.live) < WEIGHT  # ... are gone after zero_grad
    assert consistent(first)


def test_a_leaf_with_an_undefined_gradient_is_allowed():
    undefined = function_of(lambda ctx, x, unused: x * 2, lambda ctx, gradient: (gradient * 2, None))
    x, unused = torch.ones(8, requires_grad=True), torch.ones(4, requires_grad=True)

    def step():
        x.grad = None
        undefined.apply(x, unused).sum().backward()

    measured = measure(step, "cpu", resident=(x, unused), repeats=0)
    assert unused.grad is None
    assert measured.categories["gradients"] == 8 * FP32 and consistent(measured)


def test_agrees_with_the_allocators_own_counter(model, x):
    seen = []
    actions = meter_cpu._actions

    def noting(results, marks):
        events, stack = [], results.experimental_event_tree()
        while stack:
            event = stack.pop()
            stack += event.children
            events.append(event)
        events.sort(key=lambda event: event.start_time_ns)
        allocations = [event.typed[1] for event in events if event.name == "[memory]"]
        # The allocator's running total moves by the size of each event, so none is lost or out of order.
        for before, event in zip(allocations, allocations[1:]):
            seen.append(event.total_allocated - before.total_allocated == event.alloc_size)
        return actions(results, marks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter_cpu, "_actions", noting)
        measure(lambda: model(x).sum().backward(), resident=(model, x), repeats=0)
    assert len(seen) > 50 and all(seen)


def test_gradients_that_remain_count_as_gradients(model, x):
    measured = measure(lambda: model(x).sum().backward(), resident=[[model, [x]]], repeats=0)
    gradients = 4 * (WEIGHT + BIAS)
    assert measured.timeline.live[0] == measured.timeline.live[-1] == gradients  # accumulated in place
    assert set(measured.timeline.categories["gradients"]) == {gradients}
    model.zero_grad()
    fresh = measure(lambda: model(x).sum().backward(), resident=(model, x), warmup=0, repeats=0)
    assert fresh.timeline.live[0] == 0 and fresh.timeline.at(-1)["gradients"] == fresh.timeline.live[-1] == gradients


def test_gradients_dropped_in_the_step_are_recognised(model, x):
    def step():
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    measured = measure(step, resident=(model, x), warmup=0, repeats=0)
    assert max(measured.timeline.categories["gradients"]) == 4 * (WEIGHT + BIAS)


def test_new_optimizer_state_is_optimizer(model, x):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(x).sum().backward()
        optimizer.step()

    first = measure(step, resident=(model, optimizer, x), warmup=0, repeats=0)
    assert first.timeline.at(-1)["optimizer"] == 2 * 4 * (WEIGHT + BIAS) + 8 * FP32
    assert first.flops is None
    later = measure(step, resident=(model, optimizer, x), repeats=0)
    assert "optimizer" not in later.timeline.categories
    assert later.categories["optimizer"] == first.timeline.at(-1)["optimizer"]


def test_a_resident_storage_counts_once():
    layer = torch.nn.Linear(D, D, bias=False)
    layer.register_buffer("mask", torch.ones(D))
    tied = torch.nn.ModuleList([layer, torch.nn.Linear(D, D, bias=False)])
    tied[1].weight = layer.weight
    x = torch.ones(N, D)
    measured = measure(lambda: layer(x).sum().backward(), resident=(tied, layer, x, x[1:], x.t()), repeats=0)
    assert measured.categories["parameters"] == WEIGHT
    assert measured.categories["buffers"] == BIAS
    assert measured.categories["inputs"] == HIDDEN  # bytes of the storage, whatever the view


def test_a_batch_counts_as_its_tensors():
    ids, labels = torch.zeros(8), torch.zeros(4)
    batch = {"input_ids": ids, "labels": labels, "use_cache": False}
    sizes = [Resident(items).bytes(lambda tensor: True) for items in ([batch], [ids, labels])]
    assert sizes == 2 * [{"inputs": 48}]


def test_sparse_gradients():
    table = torch.nn.Embedding(10, D, sparse=True)
    index = torch.tensor([1, 3, 3])

    measured = measure(lambda: table(index).sum().backward(), resident=(table, index), warmup=0, repeats=0)
    assert measured.timeline.at(-1)["gradients"] > 0 and consistent(measured)


def test_a_failing_step_leaves_nothing_behind(model, x):
    def step():
        model(x).sum().backward()
        raise KeyError("from the step")

    raises(KeyError, "from the step", lambda: measure(step, resident=(model, x), warmup=0))
    assert not any(leaf._post_accumulate_grad_hooks for leaf in model.parameters())
    model.zero_grad()
    assert measure(lambda: model(x), resident=(model, x), repeats=0).dynamic_peak_bytes > 0


def test_seconds_and_flops_are_measured(model, x):
    measured = measure(lambda: model(x).sum().backward(), resident=(model, x), repeats=3)
    seconds = measured.seconds
    assert len(seconds.samples) == 3 and seconds.low <= seconds.median <= seconds.high
    assert measured.flops == 2 * N * D * D * (4 + 4 + 3)  # x needs no gradient
    data = measured.to_json()
    assert data["peak_bytes"] == measured.peak_bytes == data["resident_bytes"] + data["dynamic_peak_bytes"]
    assert [name for name in data if "second" in name] == ["seconds"]


def test_a_measurement_is_printed_without_its_timeline(model, x):
    measured = measure(lambda: model(x).sum().backward(), resident=(model, x), repeats=1)
    sizes = memory_format(measured.peak_bytes), memory_format(measured.resident_bytes)
    said = re.fullmatch(r"<Measurement on cpu: peak (.+), (.+) of it resident, \S+ ms, \S+ GFLOP>", repr(measured))
    assert said and said.groups() == sizes
    plain = replace(measured, seconds=None, flops=None)
    assert repr(plain) == f"<Measurement on cpu: peak {sizes[0]}, {sizes[1]} of it resident>"


def test_measuring_prints_nothing():
    program = (
        "import torch, ackpt\n"
        "model, x, kept = torch.nn.Linear(8, 8), torch.ones(4, 8), {}\n"
        "def step():\n"
        "    model.zero_grad()\n"
        "    kept['output'] = model(x)\n"  # the one of the step before dies here
        "    kept['output'].sum().backward()\n"
        "model(x).sum().backward()\n"
        "ackpt.measure(step, resident=(model, x))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestCompareSeconds:
    def test_the_clock_of_the_processor(self, monkeypatch):
        monkeypatch.setattr("time.process_time", iter([1.0, 3.0, 4.0, 5.0]).__next__)
        result = compare_seconds({"a": int, "b": int}, 1, clock="processor")
        assert result.seconds["a"].samples == (2.0,) and result.ratios["b"].samples == (0.5,)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        with pytest.raises(MeterError, match="does not see what a GPU does"):
            compare_seconds({"a": int}, device="cuda", clock="processor")

    def test_rounds_are_interleaved(self):
        calls = []
        functions = {name: lambda name=name: calls.append(name) for name in "ab"}
        result = compare_seconds(functions, repeats=2, reference="b")
        assert "".join(calls) == "ab" + "ab" + "ba"
        assert result.reference == "b" and set(result.ratios["b"].samples) == {1.0}
        assert len(result.seconds["a"].samples) == 2
        assert set(result.to_json()) == {"reference", "seconds", "seconds_ratio"}

    def test_spread(self):
        seconds = Seconds.of([3.0, 1.0, 2.0])
        assert (seconds.median, seconds.low, seconds.high, seconds.samples) == (2.0, 1.0, 3.0, (3.0, 1.0, 2.0))


def measure_in_a_profile():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        measure(lambda: None)


A_LOSS = r"as in lambda: model\(x\).sum\(\).backward\(\); got Tensor"
ERRORS = {
    "no GPU": (lambda: measure(lambda: None, "cuda"), MeterError, "sees no CUDA GPU"),
    "meta": (lambda: measure(lambda: None, resident=[torch.empty(2, device="meta")]), MeterError, r"predict\(\)"),
    "in a profile": (measure_in_a_profile, MeterError, "profiler is running"),
    "warmup": (lambda: measure(lambda: None, warmup=-1), ValueError, "warmup is -1"),
    "half a warmup": (lambda: measure(lambda: None, warmup=1.5), ValueError, "warmup is 1.5"),
    "repeats": (lambda: measure(lambda: None, repeats=-1), ValueError, "repeats is -1"),
    "a model as resident": (lambda: Resident(torch.nn.Linear(1, 1)), TypeError, "must be an iterable"),
    "resident of a set": (lambda: Resident([set()]), TypeError, "holds a set"),
    "measure of a loss": (lambda: ackpt.measure(torch.ones(())), TypeError, A_LOSS),
    "predict of a loss": (lambda: ackpt.predict(torch.ones(())), TypeError, A_LOSS),
    "no function": (lambda: compare_seconds({}), ValueError, "at least one function"),
    "reference": (lambda: compare_seconds({"a": int}, reference="c"), ValueError, "'c' is none of the functions: a"),
    "clock": (lambda: compare_seconds({"a": int}, clock="sun"), ValueError, "clock 'sun': choose wall or processor"),
    "no round": (lambda: compare_seconds({"a": int}, repeats=0), ValueError, "repeats is 0"),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_arguments_are_refused(call, error, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    raises(error, message, call)


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (333447168, "318.0 MiB"), (-(2**31), "-2.0 GiB")]
    + [(5 * 2**50, "5120.0 TiB")],
)
def test_bytes_are_printed_with_units(size, text):
    assert memory_format(size) == text


@pytest.fixture
def mlp_flops():
    return torch.nn.Sequential(*(torch.nn.Linear(D, D) for _ in range(4))), torch.randn(N, D)


def test_recompute_is_one_more_forward(mlp_flops):
    model, x = mlp_flops
    x.requires_grad_()
    forward = 4 * 2 * N * D * D
    assert count_flops(lambda: model(x)) == forward
    assert count_flops(lambda: model(x).sum().backward()) == 3 * forward
    assert count_flops(lambda: torch_checkpoint(model, x, use_reentrant=True).sum().backward()) == 4 * forward
    # These leave out the last layer, whose output backward does not read.
    for run in (functools.partial(torch_checkpoint, use_reentrant=False), ackpt.checkpoint):
        assert count_flops(lambda run=run: run(model, x).sum().backward()) == 4 * forward - forward // 4


def test_flash_attention_of_the_cpu_counts():
    batch, heads, length, dim = 2, 3, 16, 8
    q, k, v = (torch.randn(batch, heads, length, dim, requires_grad=True) for _ in range(3))
    products = 2 * batch * heads * length * length * dim
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * products
    # Backward forms the scores again, then the gradients of scores, v, q and k.
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward()) == 7 * products
    backward = formula("aten._scaled_dot_product_flash_attention_for_cpu_backward")
    assert backward is not None and backward(None, q, k, v) == 0  # as after an operation that gives no gradient


def test_grouped_query_attention_counts():
    heads, length, dim = 6, 16, 8
    q = torch.randn(2, heads, length, dim, requires_grad=True)
    k, v = (torch.randn(2, 2, length, dim, requires_grad=True) for _ in range(2))
    products = 2 * 2 * heads * length * length * dim

    def step():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    assert count_flops(step) == 2 * products
    assert count_flops(lambda: step().sum().backward()) == 7 * products


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("cold", [True, False])
    def test_a_planned_step_behind_torch_compile(self, mlp_flops, cold):
        """FLOPs include recomputation, and bytes are those of the plan, so it is not the uncompiled model that ran."""
        model, x = mlp_flops
        plans = []
        call = torch.compile(model, backend="ackpt", options={"policy": "full", "on_plan": plans.append})

        def step():
            model.zero_grad()
            call(x).sum().backward()

        if not cold:
            step()
        measured = ackpt.measure(step, resident=(model, x), repeats=0)
        assert len(plans) == 1
        plain = ackpt.measure(lambda: model(x).sum().backward(), resident=(model, x), repeats=0)
        assert measured.flops == plans[0].flops == plain.flops + plans[0].recompute_flops
        assert measured.dynamic_peak_bytes != plain.dynamic_peak_bytes

    def test_a_backend_is_called_once_and_runs_every_time(self, mlp_flops):
        model, x = mlp_flops
        seen = []

        def backend(gm, example_inputs):
            seen.append("compiles")

            def run(*args):
                seen.append("runs")
                return gm(*args)

            return run

        call = torch.compile(model, backend=backend)
        assert count_flops(lambda: call(x)) == count_flops(lambda: call(x)) == 4 * 2 * N * D * D
        call(x)
        assert seen == ["compiles", "runs", "runs", "runs"]

    def test_planning_a_new_shape_is_not_counted(self, mlp_flops):
        model, x = mlp_flops
        step = ackpt.compile(model, x[:2], policy="none", differentiate="all")
        expected = count_flops(lambda: model(x).sum().backward())
        assert count_flops(lambda: step(x).sum().backward()) == expected  # captures and plans
        assert count_flops(lambda: step(x).sum().backward()) == expected

    def test_code_of_inductor(self):
        """A single matrix product, which Inductor delegates to torch, so that no C++ is compiled."""
        x = torch.randn(N, D)
        call = torch.compile(lambda x: x @ x.t())
        raises(UncountedFlops, r"code that Inductor generated \(1 times\)", lambda: count_flops(lambda: call(x)))
        with pytest.warns(UserWarning, match="code that Inductor generated") as warned:
            measured = ackpt.measure(lambda: call(x), resident=(x,), repeats=0)
        assert measured.flops is None and measured.dynamic_peak_bytes == N * N * 4
        assert warned[0].filename == __file__
        assert count_flops(lambda: x @ x.t()) == 2 * N * N * D  # nothing of it stays


def test_operations_whose_library_comes_with_the_step():
    """`varlen_attn` brings its operators and their formulas when it is imported."""
    program = (
        "import torch, ackpt\n"
        "from ackpt.models import attention\n"
        "q = torch.zeros(16, 2, 8, dtype=torch.bfloat16, device='meta', requires_grad=True)\n"
        "cu_seqlens = torch.tensor([0, 8, 16], dtype=torch.int32, device='meta')\n"
        "print(ackpt.count_flops(lambda: attention(q, q, q, cu_seqlens, 8).sum().backward()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{7 * 2 * 2 * 2 * 8 * 8 * 8}\n", done.stderr  # sequences x heads x length x length x dim
