"""The data of schematics and of the explorer are those of the schedules, of the simulator and of plans."""

import json
from pathlib import Path

import pytest

import ackpt
from ackpt.core.errors import BudgetError
from ackpt.models import TransformerConfig
from experiments.frontier import FrontierConfig, run_frontier
from experiments.steps.frontier_models import workload
from experiments.widgets import explorer
from experiments.widgets.autograd_graphs import OPERATIONS, autograd_graphs
from experiments.widgets.block_stack import CONFIG, TOKENS, block_stack
from experiments.widgets.chain_steps import DIM, LAYERS, ROWS, VARIANTS, chain_steps
from experiments.widgets.gather_lanes import BLOCKS, gather_lanes
from experiments.widgets.offload_lanes import BUCKETS, offload_lanes

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")
S = 4 * ROWS * DIM  # bytes of an activation of the chain
WEIGHT = 4 * DIM * DIM


@pytest.fixture(scope="module")
def chain():
    return chain_steps()


@pytest.fixture(scope="module")
def lanes():
    return offload_lanes(TransformerConfig(dim=64, ff_dim=256, layers=4, head_dim=32), tokens=1024)


@pytest.fixture(scope="module")
def gathers():
    return gather_lanes()


def test_the_bytes_of_every_frame_follow_from_its_states(chain):
    for one in chain["variants"]:
        saved, recomputed, gradients = (one["live"][name] for name in ("activations", "recomputed", "gradients"))
        for frame, states in enumerate(one["states"]):
            assert saved[frame] == S * states.count("s") and recomputed[frame] == S * states.count("r")
            done = {c for phase, c in zip(one["phases"][: frame + 1], one["at"]) if phase == "b"}
            weights = sum(column % 2 == 0 for column in done)
            # The frame shows the moment when most is live: the gradient of its own weight may come later.
            assert gradients[frame] in (WEIGHT * weights, WEIGHT * (weights - 1))
        assert max(map(sum, zip(*one["live"].values(), strict=True))) == one["peak_bytes"]


def test_the_variants_save_and_recompute_what_their_names_say(chain):
    variants = {one["name"]: one for one in chain["variants"]}
    assert list(variants) == list(VARIANTS)
    begins = {name: one["states"][one["phases"].index("g")] for name, one in variants.items()}
    count = {name: one["phases"].count("r") for name, one in variants.items()}
    assert begins["baseline"] == "s" * 2 * LAYERS and count["baseline"] == 0
    assert begins["per-block"] == "ds" * LAYERS and count["per-block"] == LAYERS
    assert begins["sqrt"] == "ddddds" * 3 + "s" * 6 and count["sqrt"] == 3 * 5
    # Revolve has the lowest peak and recomputes most; the plan recomputes less than sqrt(n) within the same peak.
    peaks = {name: one["peak_bytes"] for name, one in variants.items()}
    assert peaks["revolve"] < peaks["sqrt"] == peaks["plan"] < peaks["per-block"] < peaks["baseline"]
    assert 3 * peaks["revolve"] <= peaks["baseline"]
    again = {name: one["recompute_flops"] for name, one in variants.items()}
    assert again["baseline"] == 0 < again["plan"] < again["sqrt"] < again["per-block"] < again["revolve"]
    assert again["per-block"] == LAYERS * 2 * ROWS * DIM * DIM


def test_the_stack_has_the_elements_of_the_chapters_formula():
    data = block_stack()
    d, f, h = CONFIG.dim, CONFIG.ff_dim, CONFIG.heads
    assert sum(layer["elements"] for layer in data["layers"]) == 10 * d + 2 * f + 3 * h + 2
    assert all(layer["bytes"] == 4 * TOKENS * layer["elements"] for layer in data["layers"])
    values = {"d": d, "3 d": 3 * d, "f": f, "h": h, "1": 1}
    assert all(values[layer["symbol"]] == layer["elements"] for layer in data["layers"])
    kinds = [kind for kind, _ in data["frames"]]
    count = len(data["layers"])
    assert kinds == ["save"] * count + ["free"] * count
    assert [layer for _, layer in data["frames"][:count]] == [*range(count)]
    assert sorted(layer for _, layer in data["frames"][count:]) == [*range(count)]
    assert len({layer["label"] for layer in data["layers"]}) == count


def test_the_lanes_add_up_to_the_step(lanes):
    for one in lanes["variants"]:
        computing = sum(end - start for *_, start, end in one["compute"])
        waiting = sum(end - start for start, end in one["waits"])
        assert waiting == pytest.approx(one["exposed_seconds"], abs=1e-7)
        assert computing + waiting == pytest.approx(one["seconds"], abs=1e-6)
        assert max(one["device"]) == one["peak_bytes"] and max(one["host"]) == one["host_bytes"]
        assert len(one["device"]) == len(one["host"]) == BUCKETS
        for lane in (one["compute"], [each for each in one["copies"] if each[0] == "out"]):
            assert all(before[3] <= after[2] + 1e-9 for before, after in zip(lane, lane[1:]))


def test_overlap_adds_no_time_and_everything_else_does(lanes):
    overlap, wait, everything = lanes["variants"]
    without = lanes["without"]
    assert overlap["seconds"] <= wait["seconds"] < everything["seconds"]
    assert max(one["peak_bytes"] for one in lanes["variants"]) <= without["peak_bytes"]
    page = json.loads((ROOT / "results" / "explorer" / "05_lanes.json").read_text(encoding="utf-8"))
    overlap, wait, everything = page["variants"]
    assert overlap["exposed_seconds"] == 0 < wait["exposed_seconds"] < everything["exposed_seconds"]
    assert overlap["seconds"] == page["without"]["seconds"] and 2 * overlap["seconds"] < everything["seconds"]
    assert max(one["peak_bytes"] for one in page["variants"]) < 0.8 * page["without"]["peak_bytes"]
    assert {work[0] for work in everything["compute"]} == {"f", "b"}  # nothing is recomputed


def test_a_region_is_one_node_that_saves_its_input():
    without, within, inner = autograd_graphs()["graphs"]
    rest = OPERATIONS - 1
    assert without["names"] == ["AccumulateGrad", *["SinBackward0"] * OPERATIONS, "SumBackward0"]
    assert without["saved"] == [None, "inputs", *["activations"] * rest, None]
    assert within["names"] == ["AccumulateGrad", "RecomputeBackward", "SumBackward0"]
    assert within["saved"] == [None, "inputs", None] and within["covers"] == [1, OPERATIONS, 1]
    assert inner["names"] == without["names"][:-1]
    assert inner["saved"] == [None, "inputs", *["recomputed"] * rest]


def test_blocks_are_gathered_before_they_run_and_prefetched_in_backward(gathers):
    numbers = [*range(1, BLOCKS + 1)]
    order = [*numbers, *reversed(numbers)]
    *blocks, root = gathers["gathered"]
    assert [group for group, *_ in blocks] == order and root[0] == 0
    assert root[1] < blocks[0][1] and root[2] > blocks[-1][2]
    # Nothing of a block runs while its parameters are not there.
    runs = {(what, group): (begin, end) for what, group, begin, end in gathers["runs"] if group}
    for group, begin, end in blocks[BLOCKS:]:
        # The gather ends at the first event of the window, and the reduction follows the free.
        assert runs["r", group][0] + 1 == begin and begin < runs["b", group][0] < end < runs["b", group][1]
    buffers = gathers["buffers"][1:]
    assert [group for group, *_ in buffers] == order
    # The parameters are copied out of the buffer, which the forward keeps until the next gather.
    pairs = [*zip(blocks, buffers, strict=True)]
    assert all(allocated < begin < end <= freed for (_, begin, end), (_, allocated, freed) in pairs[:BLOCKS])
    assert all(allocated < begin and freed == begin + 1 for (_, begin, _), (_, allocated, freed) in pairs[BLOCKS:])
    early = {group: allocated for group, allocated, _ in buffers[BLOCKS:]}
    assert all(runs["r", group + 1][0] < early[group] < runs["r", group][0] for group in numbers[:-1])
    reductions = gathers["reductions"]
    assert [group for group, *_ in reductions] == [*reversed(numbers), 0]
    freed = {group: end for group, _, end in blocks[BLOCKS:]}
    assert all(freed[group] <= begin for group, begin, _ in reductions[:BLOCKS])
    assert [end <= begin for (*_, end), (_, begin, _) in zip(reductions, reductions[1:])] == [True] * BLOCKS
    assert [what for what, *_ in gathers["runs"]].count("r") == BLOCKS
    assert gathers["runs"][-1][-1] == gathers["events"]


SIZES = {"layers": 1, "dim": 16, "heads": 2, "ff_dim": 32, "vocab_size": 20, "seq_len": 24, "batch_size": 2}


@pytest.fixture(scope="module")
def step():
    config = FrontierConfig(sizes=SIZES, policies=("auto",), budgets=(0.5,), peers=("checkpoint",))
    record = run_frontier(config)
    work = workload(config.model, config.sizes, config.seed)
    graph = ackpt.trace(work.model, *work.args)
    profile = ackpt.profile(graph, workspace="measured")
    return graph, profile, record, explorer.explorer(graph, profile, record)


def test_every_budget_has_the_plan_that_is_made_for_it_or_is_refused(step):
    graph, profile, _, data = step
    assert [row["percent"] for row in data["budgets"]] == [*range(2, 101, 2)]
    for row in data["budgets"][::6]:
        if row["plan"] is None:
            with pytest.raises(BudgetError) as refused:
                ackpt.plan(graph, row["percent"] / 100, profile=profile)
            assert refused.value.least_bytes == data["baseline"]["resident_bytes"] + data["least_bytes"]
            continue
        plan, shown = ackpt.plan(graph, row["percent"] / 100, profile=profile), data["plans"][row["plan"]]
        assert shown["peak_bytes"] == plan.dynamic_peak_bytes <= plan.limit_bytes
        assert shown["recompute_flops"] == plan.recompute_flops and shown["saved_bytes"] == plan.saved_bytes
        assert shown["cost"] == plan.cost and row["lower_bound"] == plan.lower_bound
        fates = {"s": "saved", "r": "recomputed"}
        listed = zip(data["activations"], shown["fates"], strict=True)
        found = [(row["name"], row["module"], row["bytes"], fates[fate]) for row, fate in listed if fate != "-"]
        assert found == [(a.name, a.module, a.bytes, a.fate) for a in plan.activations]
    assert {row["plan"] is None for row in data["budgets"]} == {True, False}


def test_the_largest_live_bytes_are_the_peak(step):
    _, _, _, data = step
    for shown in data["plans"]:
        live = [sum(bucket) for bucket in zip(*shown["live"].values(), strict=True)]
        assert max(live) == shown["peak_bytes"] and len(live) <= explorer.BUCKETS
        assert 0 < shown["boundary"] < len(live)
