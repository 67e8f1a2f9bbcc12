"""What an optimizer adds to a step: its state, and what its step takes for a while; found without running it."""

import inspect

import pytest
import torch
from conftest import model_of, raises
from torch import nn

import ackpt
from ackpt.graph import TraceError, simulate
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.run_alone import run_counted
from ackpt.planner.capture.optimizer_state import optimizer_bytes
from ackpt.planner.costs.profiles import profile
from ackpt.planner.schedule.schedule import everything

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE, SMALL = 4 * 100, 4 * 15  # bytes of the parameters
BOTH = LARGE + SMALL
FROZEN = 4 * 7
COUNTS = 2 * 4  # of steps, one for each parameter
NUMBER = 8 + 4  # a tensor of a Python number, and the same in the dtype of the other tensor


NO_STEP = {"Optimizer", "LBFGS", "SparseAdam"}  # the last two need more than dense gradients


def parameters():
    return [nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(7), False)]


# (optimizer, its options, bytes of its state, bytes that its step takes beside)
CASES = [
    (torch.optim.SGD, {}, 0, 0),
    (torch.optim.SGD, {"momentum": 0.9}, BOTH, NUMBER),
    (torch.optim.AdamW, {"foreach": False}, 2 * BOTH + COUNTS, 2 * LARGE + NUMBER),  # one parameter after the other
    (torch.optim.AdamW, {"foreach": True}, 2 * BOTH + COUNTS, BOTH + NUMBER),  # all at once
    (torch.optim.AdamW, {"fused": True}, 2 * BOTH + COUNTS, NUMBER),
    (torch.optim.AdamW, {"amsgrad": True}, 3 * BOTH + COUNTS, 2 * LARGE + NUMBER),
    (torch.optim.Adagrad, {}, BOTH + COUNTS + FROZEN + 4, LARGE + SMALL + NUMBER),  # it has state for all it is given
    (torch.optim.RMSprop, {"foreach": True}, BOTH + COUNTS, BOTH + NUMBER),
]


@pytest.mark.parametrize(("kind", "options", "state", "step"), CASES)
def test_state_and_step_are_counted_by_hand(kind, options, state, step):
    assert optimizer_bytes(kind(parameters(), lr=0.1, **options)) == (state, step)


KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind.__name__ not in NO_STEP]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_optimizer_step_allocates_the_planned_bytes(kind, options):
    if not set(options) <= set(inspect.signature(kind).parameters):
        return
    low = [nn.Parameter(torch.zeros(6, 6, dtype=torch.bfloat16)), nn.Parameter(torch.ones(()))]
    leaves = [leaf for leaf in [*parameters(), *low] if leaf.dim() == 2 or kind is not torch.optim.Muon]
    late = {"t0": 1} if kind is torch.optim.ASGD else {}
    optimizer = kind(leaves, lr=0.1, **options, **late)
    state, step = optimizer_bytes(optimizer)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf) if leaf.requires_grad else None
    gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    measured = ackpt.measure(optimizer.step, resident=(optimizer, *leaves), warmup=8, repeats=0)  # RAdam has a warmup
    assert measured.dynamic_peak_bytes - gradients == step
    assert measured.resident_bytes - sum(leaf.nbytes for leaf in leaves) == state


@pytest.mark.parametrize("holds_loss", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_the_smallest_budget_includes_the_loss_and_numbers_of_the_optimizer(kind, holds_loss):
    """The plan also counts the gradient of the loss, 4 bytes, which a caller may hold."""
    model, x = model_of(lambda self, x: self.layer(x).square().mean(), layer=nn.Linear(64, 64)), torch.randn(4, 64)
    optimizer = kind(model.parameters())
    with pytest.raises(ackpt.BudgetError) as infeasible:
        ackpt.apply_budget(model, x, budget=1, optimizer=optimizer)
    ackpt.apply_budget(model, x, budget=infeasible.value.least_bytes, optimizer=optimizer)

    def train():
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        if not holds_loss:
            del loss
        optimizer.step()

    measured = ackpt.measure(train, resident=(model, optimizer, x), repeats=0).peak_bytes
    assert measured == infeasible.value.least_bytes - (4 if holds_loss else 8)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_simulated_step_leaves_nothing_allocated(kind):
    optimizer = kind(parameters())
    optimizer_bytes(optimizer)  # fills caches
    with no_collection():
        assert run_counted(lambda: optimizer_bytes(optimizer))[1] == 0


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(("kind", "options"), [case[:2] for case in CASES])
def test_bytes_are_the_same_after_a_step(kind, options, on_cpu):
    leaves = parameters()
    optimizer = kind(leaves, lr=0.1, **options)
    expected = optimizer_bytes(optimizer, on_cpu)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf) if leaf.requires_grad else None
    optimizer.step()
    before = [value.clone() for value in tensors(optimizer)]
    assert optimizer_bytes(optimizer, on_cpu) == expected
    assert all(map(torch.equal, before, tensors(optimizer)))  # nothing has run


def tensors(optimizer):
    return [value for own in optimizer.state.values() for value in own.values() if isinstance(value, torch.Tensor)]


# On a GPU a block has 512 bytes or a multiple: of every tensor here one.
ON_GPU = [
    (torch.optim.SGD, {"momentum": 0.9}, 2, 0),
    (torch.optim.AdamW, {}, 4, 2),  # counts of steps are in host memory; all parameters at once
    (torch.optim.AdamW, {"foreach": False}, 4, 3),
    (torch.optim.AdamW, {"fused": True}, 6, 0),  # with the counts
    (torch.optim.RMSprop, {}, 2, 2),
]


@pytest.mark.parametrize(("kind", "options", "state", "step"), ON_GPU)
def test_on_a_gpu_sizes_are_rounded_to_blocks(kind, options, state, step):
    found = optimizer_bytes(kind(parameters(), lr=0.1, **options), on_cpu=False)
    assert found == (512 * state, 512 * step)


def test_an_optimizer_of_another_model_and_objects_that_are_none_are_refused():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    for call in (ackpt.trace, ackpt.compile):
        with pytest.raises(TypeError, match="must be a torch.optim.Optimizer or a name such as .adamw., got list"):
            call(model, x, optimizer=parameters())
        with pytest.raises(ValueError, match="this SGD has none of the model's parameters"):
            call(model, x, optimizer=torch.optim.SGD(parameters()))
        call(model, x, optimizer=torch.optim.SGD([model.bias, *parameters()]))  # a head of its own, say


def test_a_step_that_needs_more_than_shapes_is_refused():
    said = r"the step of LBFGS cannot be simulated without data: .*closure.*a budget that leaves room"
    raises(TraceError, said, lambda: optimizer_bytes(torch.optim.LBFGS(parameters()[:2])))


def test_adafactor_reads_values_that_change_no_size():
    """A variance per row and column of a matrix, one per element of a vector (Shazeer and Stern 2018)."""
    assert optimizer_bytes(torch.optim.Adafactor(parameters()[:2]))[0] == 4 * (100 + 3 + 5) + COUNTS


def test_state_is_resident_and_the_step_is_part_of_the_peak():
    model, x = nn.Linear(64, 64, bias=False), torch.randn(1, 64)
    size = 4 * 64 * 64
    plain, trained = (ackpt.trace(model, x, optimizer=o) for o in (None, torch.optim.AdamW(model.parameters())))
    assert plain.hash == trained.hash
    one, other = (simulate(g, profile(g, workspace="given"), everything(g)) for g in (plain, trained))
    assert other.resident_bytes - one.resident_bytes == 2 * size + 4 == trained.bytes()["optimizer state"]
    # At the end of backward: the output, its gradient, the weight's gradient; then twice as much as that.
    assert one.peak_bytes == 4 * 64 + 4 * 64 + size
    assert other.peak_bytes == one.peak_bytes + 2 * size + NUMBER
    assert other.peak_node is None and one.peak_node is not None


class Wrapper(torch.optim.Optimizer):
    """Sets attributes of the optimizer that it wraps, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups, state = (
        property(lambda self, n=name: getattr(self.optimizer, n), lambda self, v, n=name: setattr(self.optimizer, n, v))
        for name in ("param_groups", "state")
    )


def test_a_wrapped_optimizer_keeps_its_parameters_and_state():
    parameters = [nn.Parameter(torch.ones(8, 8))]
    adamw = torch.optim.AdamW(parameters)
    groups, state = adamw.param_groups, adamw.state
    assert optimizer_bytes(Wrapper(adamw)) == optimizer_bytes(adamw)
    assert adamw.param_groups is groups and groups[0]["params"][0] is parameters[0] and adamw.state is state
