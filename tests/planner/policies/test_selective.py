"""Policy selective: the peaks of torch's checkpoint around every n-th block, to the byte; bit-equal steps."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_as_eager, measured_step, raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ackpt
from ackpt.planner.policies.selective import blocks

pytestmark = pytest.mark.usefixtures("one_thread")

ATEN = torch.ops.aten
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default
BLOCKS, BATCH, LENGTH, WIDTH = 4, 2, 32, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model; every block that `chosen` names is called through torch's checkpoint."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.chosen, self.options = (), {}

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for number, block in enumerate(self.blocks):
            if number in self.chosen:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, **self.options)
            else:
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def every_second_product():
    """torchtitan's choice, with products counted separately in forward and recomputation."""
    counts = {False: 0, True: 0}

    def policy(context, operation, *args, **kwargs):
        counts[context.is_recompute] += operation is ATEN.mm.default
        is_kept = operation is ATTENTION or (operation is ATEN.mm.default and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CONTEXTS = {
    "inputs": None,
    "matmuls": partial(create_selective_checkpoint_contexts, [ATEN.mm.default, ATTENTION]),
    "every-second-matmul": every_second_product,
}


@pytest.fixture(scope="module")
def given():
    torch.manual_seed(0)
    return Model(), torch.randint(0, 50, (BATCH, LENGTH)), torch.randint(0, 50, (BATCH, LENGTH))


@pytest.fixture(scope="module")
def graph(given):
    return ackpt.trace(*given)


@pytest.mark.parametrize("save", CONTEXTS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_peak_is_the_measured_one_of_torchs_checkpoint(given, graph, n, save):
    model, *batch = given
    model.chosen = range(0, BLOCKS, n)
    model.options = {} if CONTEXTS[save] is None else {"context_fn": CONTEXTS[save]}
    try:
        measured = measured_step(model, model, *batch).peak_bytes
    finally:
        model.chosen = ()
    plan = ackpt.plan(graph, policy="selective", every_n_layers=n, save=save)
    # torch also keeps the result of the last product of each block, which no recomputation reads.
    unread = len(range(0, BLOCKS, n)) * 4 * BATCH * LENGTH * WIDTH if save == "matmuls" else 0
    assert plan.peak_bytes == measured - unread


def test_saved_products_are_not_recomputed(graph):
    plans = {save: ackpt.plan(graph, policy="selective", save=save) for save in CONTEXTS}
    assert plans["matmuls"].recompute_flops == 0
    products = 2 * BATCH * LENGTH * WIDTH * WIDTH
    assert plans["every-second-matmul"].recompute_flops == BLOCKS * products  # `out`; nothing reads that of `down`
    assert plans["inputs"].recompute_flops > BLOCKS * 8 * products


@pytest.mark.parametrize("save", CONTEXTS)
def test_the_step_is_bit_equal_and_its_peak_the_planned_one(given, save):
    model, *batch = given
    step = ackpt.compile(model, *batch, policy="selective", options={"every_n_layers": 2, "save": save})
    assert_as_eager(model, step, *batch)
    assert measured_step(model, step, *batch).peak_bytes == step.plan.peak_bytes


def test_the_inputs_of_blocks_are_offloaded(graph):
    profile = ackpt.profile(graph, "h200")
    plan = ackpt.plan(graph, policy="selective", offload=True, profile=profile)
    stays = ackpt.plan(graph, policy="selective", profile=profile)
    offloaded = [name for name, fate in plan.fates.items() if fate == "offloaded"]
    assert len(offloaded) == BLOCKS
    assert stays.saved_bytes - plan.saved_bytes == BLOCKS * 4 * BATCH * LENGTH * WIDTH


def test_blocks_are_the_inner_members_of_lists():
    stage = [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))) for _ in range(2)]
    found = blocks(ackpt.trace(nn.Sequential(*stage, nn.Linear(4, 1)), torch.ones(2, 4)))
    assert found == ("0.0", "0.1", "1.0", "1.1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_layers": 0}, "every_n_layers must be a whole number of at least 1, got 0"),
        ({"every_n_layers": True}, "every_n_layers must be a whole number of at least 1, got True"),
        ({"save": "matmul"}, r"save must be one of inputs, .*, got 'matmul' \(did you mean 'matmuls'\?\)"),
        ({"offload": True}, "policy 'selective' offloads, but the profile of 'cpu' has no times of copies"),
    ],
)
def test_wrong_options_are_refused(graph, options, message):
    raises(ValueError, message, lambda: ackpt.plan(graph, policy="selective", **options))


def test_a_model_without_repeated_blocks():
    graph = ackpt.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.ones(2, 4))
    with pytest.raises(ValueError, match="checkpoints repeated blocks, and this model has none.*'full' or 'auto'"):
        ackpt.plan(graph, policy="selective")


@pytest.mark.parametrize("save", ["matmuls", "every-second-matmul"])
def test_predictions_follow_torchs_selective_contexts(save):
    peaks = []
    for find in (partial(ackpt.measure, repeats=0), partial(ackpt.predict, round_to=1)):
        with FakeTensorMode() if find.func is ackpt.predict else torch.device("cpu"):
            model, ids = Model(), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        model.chosen, model.options = range(BLOCKS), {"context_fn": CONTEXTS[save]}

        def step(model=model, ids=ids):
            model.zero_grad(set_to_none=True)
            model(ids, ids).backward()

        peaks.append(find(step, resident=(model, ids)).peak_bytes)
    assert peaks[0] == peaks[1]
