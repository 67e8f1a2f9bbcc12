"""Later steps of planned regions are counted to the byte: those above the budget raise or warn, all others run."""

import copy
import warnings

import pytest
import torch
import torch.utils.checkpoint
from branching_models import Adds, Tagger, built, feed_forward
from conftest import assert_as_eager, assert_equal, left_by, measured_step, model_of, seed
from planned_models import Residuals
from torch import nn

import ackpt
from ackpt.planner.parts.live_bytes import AllocatedBytes, LiveBytes

TOKENS, WIDTH, EXPERTS = 512, 16, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(feed_forward(WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return result


def routed(model, tokens: int, expert: int = 0):
    """Hooks of the routers that send so many tokens to one expert, and the others to all experts in turn."""

    def chooses(router, inputs, logits):
        chosen = torch.arange(len(logits)) % EXPERTS
        chosen[:tokens] = expert
        return logits + 100 * nn.functional.one_hot(chosen, EXPERTS)

    return [layer.router.register_forward_hook(chooses) for layer in model.blocks]


def without(hooks):
    for hook in hooks:
        hook.remove()


class Steps:
    """One step that raises above the budget and one that warns, both planned with an example batch."""

    def __init__(self, model, budget, example):
        self.model, self.example = model, example
        self.step = ackpt.compile(model, *example, budget=budget)
        self.warns = ackpt.compile(model, *example, budget=budget, on_exceed="warn")
        for each in (self.step, self.warns):
            left_by(model, each, *example)

    def exceeds(self, *args) -> bool:
        """Whether a step exceeds the budget as measured, which must be what ackpt says, with the model's own bits."""
        own = left_by(self.model, self.model, *args)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert_equal(left_by(self.model, self.warns, *args), own, "step")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measured = measured_step(self.model, self.warns, *args, warmup=0)
        exceeds = measured.dynamic_peak_bytes > self.step.plan.limit_bytes
        assert exceeds == bool(said) and len(said) <= 1
        if exceeds:
            with pytest.raises(ackpt.BudgetError, match="this step allocates .*on_exceed='warn'"):
                left_by(self.model, self.step, *args)
        else:
            assert_equal(left_by(self.model, self.step, *args), own, "step")
        return exceeds


@pytest.mark.parametrize("budget", [0.7, "100%"])
def test_experts_with_other_tokens(budget):
    model, x = Residuals(Experts() for _ in range(3)), torch.randn(TOKENS, WIDTH)
    steps = Steps(model, budget, (x,))
    found = [steps.exceeds(x + offset * torch.randn(WIDTH)) for offset in (0.3, 1.0, 2.0, 4.0)]
    for tokens, expert in ((128, 0), (300, 2), (TOKENS, 1)):
        hooks = routed(model, tokens, expert)
        found.append(steps.exceeds(x))
        without(hooks)
    assert not all(found)


@pytest.mark.parametrize("budget", [0.6, 0.9])
def test_packed_sequences_with_other_lengths(budget):
    model, ids = Tagger(), torch.randint(50, (8, 24))
    steps = Steps(model, budget, (ids, torch.arange(8) * 2 + 8))
    lengths = [[22] * 8, [22] + 7 * [1], [22, 22] + 6 * [3], 8 * [8], [24, *range(14, 21)], [24] * 8]
    found = [steps.exceeds(ids, torch.tensor(each)) for each in lengths]
    assert found[0] and found[-1] and not found[1]


def test_a_step_that_exceeds_the_budget_in_backward_has_complete_gradients():
    x, model = torch.randn(TOKENS, WIDTH), Residuals(Experts() for _ in range(3))
    probe = ackpt.compile(model, x, budget="1GiB")
    left_by(model, probe, x)
    step = ackpt.compile(model, x, budget=probe.plan.least_peak_bytes)
    left_by(model, step, x)
    hooks = routed(model, 300)
    expected = left_by(model, model, x)[1:]
    model.zero_grad()
    loss = step(x)
    with pytest.raises(ackpt.BudgetError, match=r"allocates .* in backward, at \w+Backward0, .* gradients .* complete"):
        loss.backward()
    assert all(map(torch.equal, (parameter.grad for parameter in model.parameters()), expected))
    without(hooks)


def counted_and_measured(model, batch) -> tuple[int, int]:
    """The peak of a step of the model as `LiveBytes` counts it, and as it is measured."""

    def step():
        model.zero_grad()
        outputs = model(**batch)
        (outputs if torch.is_tensor(outputs) else outputs["loss"]).backward()

    seed()
    measured = ackpt.measure(step, resident=(model, *batch.values()), warmup=0, repeats=0).dynamic_peak_bytes
    seed()
    model.zero_grad()
    live = LiveBytes(lambda backward: None)
    with live.forward():
        outputs = model(**batch)
    loss = outputs if torch.is_tensor(outputs) else outputs["loss"]
    loss.grad_fn.register_prehook(lambda gradients: live.begin(None) and None)
    live.count_backward([loss])
    loss.backward()
    return live.segment_peak(), measured


@pytest.mark.parametrize("name", ["Mixtral", "drop path", "packed LSTM", "matcher", "early exit"])
def test_counted_bytes_are_measured_bytes(name):
    counted, measured = counted_and_measured(*built(name))
    assert counted == measured


def many_uses(uses: int):
    """Uses one activation several times; the peak is in a backward after the first of its gradients have been summed.

    To count that step refers to storages, for which autograd's engine sums out of place; other steps sum in place."""

    def forward(self, x):
        x = self.layer(x)
        result = self.wide(x[::1]).sum()
        for use in range(1, self.uses):
            result = result + x[use:].sin().sum()
        return result

    return model_of(
        forward, layer=nn.Linear(16, 16), wide=nn.Sequential(nn.Linear(16, 80), nn.Tanh(), nn.Linear(80, 16)), uses=uses
    )


@pytest.mark.parametrize("uses", [3, 4])
def test_sums_of_gradients_count_until_they_are_read(uses):
    counted, measured = counted_and_measured(many_uses(uses), {"x": torch.randn(64, 16)})
    assert counted == measured


@pytest.mark.parametrize("uses", [2, 3])
def test_sums_of_gradients_of_a_weight_with_several_uses_count(uses):
    def forward(self, x):
        for _ in range(uses):
            x = self.layer(x).tanh()
        return x.sum()

    counted, measured = counted_and_measured(model_of(forward, layer=nn.Linear(64, 64)), {"x": torch.randn(8, 64)})
    assert counted == measured


class UsesThrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return x.sigmoid() + self.one(nn.functional.gelu(x)) + self.other(x.tanh())


def test_a_region_that_uses_its_input_several_times_before_a_saved_block_keeps_the_budget():
    def forward(self, x):
        for block in self.blocks:
            if x.sum() > -1e9:
                x = block(x)
        return x.square().mean()

    wide, narrow = nn.Linear(48, 192), nn.Linear(192, 48)
    blocks = [
        model_of(lambda self, x: x + self.layer(self.norm(x)), norm=nn.LayerNorm(48), layer=nn.Linear(48, 48)),
        model_of(lambda self, x: x + self.narrow(self.wide(x).relu()), wide=wide, narrow=narrow),
        UsesThrice(),
        model_of(lambda self, x: x + self.layer(self.norm(x)), norm=nn.LayerNorm(48), layer=nn.Linear(48, 48)),
    ]
    model, x = model_of(forward, blocks=nn.ModuleList(blocks)), torch.randn(256, 48)
    step = ackpt.compile(model, x, budget=0.9)
    for _ in range(3):
        model.zero_grad()
        assert measured_step(model, step, x, warmup=0).dynamic_peak_bytes <= step.plan.limit_bytes
    assert set(step.plan.fates.values()) == {"saved", "checkpointed"}


def test_running_statistics_change_once_while_the_first_step_is_measured():
    def forward(self, x):
        return self.norm(x).square().mean() if x.sum() < 1e9 else x.sum()

    model, x = model_of(forward, norm=nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), torch.randn(16, 8)
    eager = copy.deepcopy(model)
    eager(x)
    measured_step(model, ackpt.compile(model, x, budget="1MiB"), x, warmup=0)
    assert_equal([*eager.buffers()], [*model.buffers()], "buffer")


class Checkpoints(nn.Module):
    """A block that calls torch's checkpoint, which keeps states of random numbers; counts its runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))
        self.runs = 0

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        self.runs += 1
        return self.inner(x)


def test_torch_s_checkpoint_in_a_model_is_counted_and_runs_twice_a_step():
    model, batch = Adds(Checkpoints), {"x": torch.randn(64, 16)}
    counted, measured = counted_and_measured(model, batch)
    assert counted == measured and [block.runs for block in model.blocks] == [4, 4, 4]
    step = ackpt.compile(model, budget="1GiB", regions=True, **batch)
    left_by(model, step, *batch.values())
    for block in model.blocks:
        block.runs = 0
    assert measured_step(model, step, *batch.values(), warmup=0).dynamic_peak_bytes <= step.plan.dynamic_peak_bytes
    assert set(step.plan.fates.values()) == {"saved"} and [block.runs for block in model.blocks] == [2, 2, 2]


def test_regions_of_the_user_stay_regions():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(feed_forward() for _ in range(3))

        def forward(self, x):
            x = x[x.sum(1) > 0]
            for layer in self.layers:
                x = x + ackpt.checkpoint(self.twice, layer, x)
            return x.square().mean()

        def twice(self, layer, x):
            return layer(x[:, None].expand(-1, 2, -1).reshape(-1, 16)).unflatten(0, (-1, 2)).sum(1)

    torch.manual_seed(0)
    model, x = Own(), torch.randn(64, 16)
    step = ackpt.compile(model, x, budget="100%")
    for each in (x, -x, x.roll(1, 1)):
        assert_as_eager(model, step, each - 0.1)


def test_the_allocator_of_a_gpu_counts(monkeypatch):
    live, most = [1000], [9000]

    def allocate(size: int, peak: int = 0) -> None:
        live[0] += size
        most[0] = max(most[0], live[0] + peak)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: live[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: most.__setitem__(0, live[0]))
    counter, sizes, ended = AllocatedBytes(lambda backward: ended.append(backward.most[0])), [], []
    counter.exceeded = sizes.append
    counter.counts_cost, counter.bound = True, 700  # the first step resets the peak
    with counter.forward():
        counter.gradients([torch.zeros(10)])  # existed before the step
        allocate(300, peak=50)
        assert (counter.bytes, counter.segment_peak()) == (340, 390)
        allocate(-100)
        assert counter.segment_peak() == 340
    assert sizes == []
    loss = torch.ones((), requires_grad=True) * 2
    loss.grad_fn.register_prehook(lambda gradients: counter.begin(None) and allocate(50))
    loss.backward()
    assert ended == [290]
    counter.counts_cost, most[0] = False, 5000  # later steps do not
    with counter.forward():
        allocate(600, peak=150)
    assert sizes == [] and counter.segment_peak() == 0 and most[0] == 5000
    with counter.forward():
        allocate(600, peak=6000)
    assert sizes == [6600]


@pytest.mark.parametrize(("number", "size"), [(2.0, 8), (3, 8), (True, 1)])
def test_the_number_that_a_product_saves_counts_in_the_forward(number, size):
    live = LiveBytes(lambda backward: None)
    x = torch.ones(100, requires_grad=True)
    with live.forward():
        y = x.exp()
        before = live.bytes
        y.mul_(number)
        assert live.bytes == before + size
    assert live.bytes == before


def scales():
    return model_of(lambda self, x: 0.5 * (2 * self.layer(x / 3.0)).tanh(), layer=nn.Linear(16, 16))


def test_the_numbers_that_products_save_count_as_held_by_saved_blocks():
    model, batch = Adds(scales), {"x": torch.randn(64, 16)}
    step = ackpt.compile(model, budget="1GiB", regions=True, **batch)
    left_by(model, step, *batch.values())
    assert set(step.plan.fates.values()) == {"saved"}
    assert step.plan.saved_bytes == 3 * (2 * 64 * 16 * 4 + 3 * 8)


def test_the_numbers_that_products_save_count_while_they_are_recomputed():
    live, x = LiveBytes(lambda backward: None), torch.ones(100, requires_grad=True)
    counted = []

    def call():
        y = x.exp()
        counted.append(live.bytes)
        z = y * 2.0
        counted.append(live.bytes - z.nbytes)
        return z

    z = live.recomputed(call)
    assert counted == [400, 408] and live.bytes == 800
    del z


class Convolves(nn.Module):
    """Products with a sparse matrix, whose kernels allocate more than their results."""

    def __init__(self):
        super().__init__()
        # A layer that multiplies by a sparse matrix.
        self.layers = nn.ModuleList(
            model_of(
                lambda self, x, adjacency: torch.sparse.mm(adjacency, self.neighbors(x)).relu() + self.own(x),
                neighbors=nn.Linear(16, 16),
                own=nn.Linear(16, 16),
            )
            for _ in range(3)
        )

    def forward(self, x, edges):
        adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (len(x), len(x))).coalesce()
        for layer in self.layers:
            x = layer(x, adjacency)
        return x.square().mean()


def test_workspaces_of_sparse_products_count_while_the_first_step_is_measured():
    model, x, edges = Convolves(), torch.randn(500, 16), torch.randint(500, (2, 3000))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = ackpt.compile(model, x, edges, budget=0.9, on_exceed="warn")
        first, second = (measured_step(model, step, x, edges, warmup=0) for _ in range(2))
    assert second.peak_bytes <= step.plan.peak_bytes == step.plan.least_peak_bytes == first.peak_bytes
