"""A budget after ``fully_shard`` in several processes: bytes as predicted, gradients as without, or an error."""

import gc
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import in_processes
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ackpt
from ackpt.metering.timeline import MeterError

MIXED = {"mp_policy": MixedPrecisionPolicy(torch.float64, torch.float64)}  # whose products take no scratch memory


class Block(nn.Module):
    """A residual block that knows its number."""

    def __init__(self, width, number, collective=False):
        super().__init__()
        self.number, self.collective = number, collective
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        if self.collective:
            import torch.distributed._functional_collectives as functional

            x = x + functional.all_reduce(x.detach(), "sum", dist.group.WORLD).mean()
        return x + self.drop(self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x)))))


class Model(nn.Module):
    """Embedding, blocks and a head; returns the loss."""

    def __init__(self, width=32, depth=3, twice=False, collective=False):
        super().__init__()
        self.twice = twice
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width, number, collective) for number in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for block in [*self.blocks, *(self.blocks if self.twice else ())]:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Pair(nn.Module):
    """A block that passes two tensors on, so that it is recomputed as a whole or not at all."""

    def __init__(self, width, number):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, y):
        return torch.tanh(self.one(x)) + y, torch.tanh(self.other(y))


class Pairs(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair(32, number) for number in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        y = x.sin()
        for block in self.blocks:
            x, y = block(x, y)
        return nn.functional.cross_entropy(self.head(x + y).flatten(0, 1), ids.flatten())


def sharded(model: Any = None, root: Any = None, **options) -> Any:
    torch.manual_seed(0)
    model = Model() if model is None else model() if isinstance(model, type) else model
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **(options if root is None else root))


def batch(rank, rows=8, length=24):
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(rank))


def step_of(model, ids, micro=1):
    """Loss and gradients of a step, of `micro` micro-batches of which only the last one reduces."""
    torch.manual_seed(dist.get_rank())
    model.zero_grad(set_to_none=True)
    for number in range(micro):
        model.set_requires_gradient_sync(number == micro - 1)
        loss = model(ids)
        loss.backward()
    return [loss.detach(), *(each.grad.to_local() for each in model.parameters())]


def measured(model, ids):
    """The smallest of some measured peaks: threads of gloo free some buffers late."""

    def step():
        model.zero_grad(set_to_none=True)
        model(ids).backward()

    step()
    model.zero_grad(set_to_none=True)
    gc.collect()
    found = [ackpt.measure(step, "cpu", resident=[model, ids], warmup=0, repeats=0) for _ in range(8)]
    return min(each.dynamic_peak_bytes for each in found), found[0].resident_bytes


def is_kept(make, rank, budget, exact=True):
    """Whether gradients are bit-equal with a budget, and the measured bytes those of the plan."""
    ids, model = batch(rank), make()
    step = ackpt.apply_budget(model, ids, budget)
    plan = step.plan
    assert all(map(torch.equal, step_of(make(), ids), step_of(model, ids))), "gradients differ"
    peak, resident = measured(model, ids)
    assert (resident, plan.peak_bytes >= peak + resident) == (plan.resident_bytes, True), (peak, resident, plan)
    assert not exact or peak == plan.dynamic_peak_bytes, (peak, plan.dynamic_peak_bytes)
    assert plan is step.plan and len(step.history) == 1
    return plan


def prefetching():
    model = sharded()
    for one, other in zip(model.blocks, model.blocks[1:]):
        one.set_modules_to_forward_prefetch([other])
    return model


def from_meta():
    with torch.device("meta"):
        model = sharded(Model())
    return model


def on_one_rank(**options):
    """Every process is the only rank of its own mesh."""
    return sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("alone", "shards"))["shards"], **options)


WAYS = {
    "one rank": on_one_rank,
    "float32": lambda: sharded(),
    "float64 gathered": lambda: sharded(**MIXED),
    "kept": lambda: sharded(reshard_after_forward=False),
    "root resharded": lambda: sharded(root={"reshard_after_forward": True}),
    "prefetch": prefetching,
}


def on_two_hosts():
    return sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "shards")))


OF_FOUR = {"replicated": on_two_hosts}


def alike(rank):
    """Blocks that differ in an index alone share a capture; one that is changed gets its own."""
    model, other, ids = sharded(), sharded(), batch(rank)
    step = ackpt.apply_budget(model, ids, 0.6)
    assert all(map(torch.equal, step_of(other, ids), step_of(model, ids)))
    made = step._active.made
    assert len(made) == len(set(step._active.row) - {0}) and all(len(each) == 1 for each in made.values())
    before = sum(map(len, made.values()))
    model.blocks[1].drop.p = other.blocks[1].drop.p = 0.3
    assert all(map(torch.equal, step_of(other, ids), step_of(model, ids)))
    assert sum(map(len, made.values())) == before + 1, (step._active.row, made.keys())


def replans(rank):
    """Larger batches, evaluation, another budget and its removal; the ranks have other lengths."""
    model, ids = sharded(), batch(rank, length=16 + 4 * rank)
    names = [*model.state_dict()]
    step = ackpt.apply_budget(model, ids, 0.7)
    first = step.plan
    longer = batch(rank, length=32)
    assert all(map(torch.equal, step_of(sharded(), longer), step_of(model, longer)))
    assert step.plan.peak_bytes > first.peak_bytes and len(step.history) == 2
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), sharded().eval()(ids))
    model.train().reshard()
    ackpt.apply_budget(model, ids, 0.8)
    ackpt.remove_budget(model)
    assert all(map(torch.equal, step_of(sharded(), ids), step_of(model, ids)))
    assert [*model.state_dict()] == names and not any("ackpt" in name for name in vars(model))


def optimizer(rank):
    """The optimizer's state and step count, and clipping works."""
    model, ids = sharded(), batch(rank)
    adamw = torch.optim.AdamW(model.parameters(), foreach=True)
    step = ackpt.apply_budget(model, ids, 0.7, optimizer=adamw)
    named = ackpt.apply_budget(model, ids, 0.7, optimizer="adamw").plan
    assert named.resident["optimizer"] == step.plan.resident["optimizer"] > step.plan.resident["parameters"]
    step_of(model, ids)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()


def whole_blocks(rank):
    """Blocks that pass two tensors on are recomputed as a whole."""
    plan = is_kept(lambda: sharded(Pairs), rank, 0.9)
    assert {run.choice for run in plan.runs} == {"plain", "per-block"}


def accumulates(rank):
    """Micro-batches whose gradients are not reduced count with accumulation=True, and raise an error without."""
    model, ids = sharded(), batch(rank)
    plain = ackpt.apply_budget(model, ids, 0.7).plan
    with pytest.raises(ackpt.BudgetError, match="give accumulation=True"):
        step_of(model, ids, micro=2)
    model = sharded()
    model.set_requires_gradient_sync(False)
    step = ackpt.apply_budget(model, ids, 0.7, accumulation=True)
    assert step.plan.resident_bytes > plain.resident_bytes
    assert all(map(torch.equal, step_of(sharded(), ids, micro=3), step_of(model, ids, micro=3)))


def infeasible(rank):
    """All ranks raise an error if the batch of one is too large, at first and later."""
    model, small, large = sharded(), batch(rank), batch(rank, rows=64)
    least = ackpt.apply_budget(model, small, "1GiB").plan.peak_bytes
    said = "cannot keep the budget|larger batch" if rank else "rank 1 has no plan within the budget"
    with pytest.raises(ackpt.BudgetError, match=said) as raised:
        ackpt.apply_budget(sharded(), large if rank else small, least)
    of_all = raised.value.least_bytes
    assert of_all > least and str(of_all) in str(raised.value)
    ackpt.apply_budget(sharded(), large if rank else small, of_all)
    ackpt.apply_budget(model, small, least)
    model(small)
    with pytest.raises(ackpt.BudgetError, match=said):
        model(large if rank else small)


def meta(rank):
    """Planned before it has data."""
    model, ids = from_meta(), batch(rank)
    step = ackpt.apply_budget(model, ids, 0.6)
    model.to_empty(device="cpu")
    for each in model.parameters():
        nn.init.normal_(each, std=0.02)
    step_of(model, ids)
    assert len(step.history) == 1


def with_gradients(rank):
    """`ackpt.measure` of a sharded model that has gradients."""
    model, ids = sharded(), batch(rank)
    model(ids).backward()
    found = ackpt.measure(lambda: model(ids).backward(), "cpu", resident=[model, ids], warmup=0, repeats=0)
    shards = [each.to_local() for each in model.parameters()]
    assert found.categories.get("parameters", 0) == sum(each.untyped_storage().nbytes() for each in shards)


def callback(rank):
    """The Trainer's callback plans the model that the Trainer has sharded."""
    pytest.importorskip("transformers")
    model, ids = sharded(), batch(rank)
    budget = ackpt.AckptCallback(0.7)
    args = SimpleNamespace(gradient_accumulation_steps=1, fp16=False, max_grad_norm=1.0)
    budget.on_train_begin(args, None, None, model, torch.optim.AdamW(model.parameters()))
    assert all(map(torch.equal, step_of(sharded(), ids), step_of(model, ids)))
    assert budget.step.plan.recompute_flops > 0 and budget.step.plan.resident["optimizer"] > 0
    budget.on_train_end(args, None, None, model)


def resumes(rank):
    """A checkpoint of two ranks, resumed on one: the same weights and optimizer's state, and the same next loss."""
    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    ids, losses = batch(0), []
    for make in (sharded, on_one_rank):
        model = make()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
        ackpt.apply_budget(model, ids, 0.7, optimizer=adamw)
        model.eval()  # without dropout
        if make is sharded:
            model(ids).backward()
            adamw.step()
            adamw.zero_grad()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, adamw)))
        if make is sharded:
            checkpoint.save(state, checkpoint_id=place[0])
        else:
            checkpoint.load(state, checkpoint_id=place[0], no_dist=True)
            set_state_dict(model, adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        model(ids).backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(model(ids).detach())
    assert torch.allclose(*losses, rtol=1e-5), losses  # sums over ranks are added in another order


def not_sharded_whole(rank):
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    return model


def tensor_parallel_inside(rank):
    model = Model()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel()})
    return sharded(model, mesh=mesh["data"])


def tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"wide": ColwiseParallel()})
    return model


def nested(rank):
    model = Model()
    for block in model.blocks:
        fully_shard(block.wide)
    return sharded(model)


def set_on_blocks(method, *values):
    def make(rank):
        model = sharded()
        getattr(model.blocks[0], method)(*values)
        return model

    return make


def backward_prefetch(rank):
    model = sharded()
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return model


def compiled(rank):
    model = sharded()
    model.blocks[1].compile(backend="eager")
    return model


def ignored(rank):
    model = Model()
    for block in model.blocks:
        fully_shard(block, ignored_params={block.norm.weight})
    return fully_shard(model, ignored_params={block.norm.weight for block in model.blocks})


REFUSED = {
    "fully_shard was not applied to the model itself": not_sharded_whole,
    "has no block that is sharded by itself": lambda rank: fully_shard(Model()),
    "holds DTensor parameters of tensor parallelism": tensor_parallel_inside,
    "parameters of tensor parallelism, whose ranks must choose alike": tensor_parallel,
    r"offloads its shards to the host \(CPUOffloadPolicy\)": lambda rank: sharded(
        offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    r"along another dimension than the first \(shard_placement_fn\)": lambda rank: sharded(
        shard_placement_fn=lambda each: Shard(each.dim() - 1)
    ),
    "is sharded with or inside of block blocks.0": nested,
    r"has a list of modules to prefetch in backward": backward_prefetch,
    r"has set_reshard_after_backward\(False\)": set_on_blocks("set_reshard_after_backward", False),
    "module 'blocks.1' is compiled": compiled,
    r"is not sharded \(ignored_params\)": ignored,
    "block blocks.0 runs more than once": lambda rank: sharded(Model(twice=True)),
    "calls a collective": lambda rank: sharded(Model(collective=True)),
}
OPTIONS = {"slowdown": 0.1, "regions": True, "chunk_head": True, "policy": "rotor", "dynamic": True}


def refuses(rank):
    """Every refusal by its name, on all ranks, before anything runs; other calls refuse a sharded model as well."""
    for message, make in REFUSED.items():
        model = make(rank)
        with pytest.raises((ValueError, TypeError), match=message):
            ackpt.apply_budget(model, batch(rank), 0.5)
    model = sharded()
    for name, value in OPTIONS.items():
        with pytest.raises(ValueError, match=name):
            ackpt.apply_budget(model, batch(rank), 0.5, **{name: value})
    for call in (ackpt.compile, ackpt.trace, ackpt.explain, ackpt.fits):
        with pytest.raises(TypeError, match="plans every rank of a model after fully_shard"):
            call(model, batch(rank))
    with pytest.raises(MeterError, match="is a DTensor, and a prediction runs no collectives"):
        ackpt.predict(lambda: model(batch(rank)).backward(), resident=[model])
    assert all(map(torch.equal, step_of(model, batch(rank)), step_of(sharded(), batch(rank))))
    assert all(isinstance(block, FSDPModule) for block in model.blocks)


SCENARIOS = (alike, whole_blocks, replans, optimizer, accumulates, infeasible, meta, with_gradients, callback)
SCENARIOS += (resumes, refuses)


def integer(rank):
    """FSDP2 reshards to a smaller mesh after the forward, which is refused on all ranks."""
    with pytest.raises(ValueError, match="integer reshard_after_forward: give True or False"):
        ackpt.apply_budget(sharded(reshard_after_forward=2), batch(rank), 0.5)


def scenario(name, rank, folder):
    """What `test_...` checks, in one of the processes; the name of a way is that of its checks."""
    try:
        if way := (WAYS | OF_FOUR).get(name):
            plain, planned = (is_kept(way, rank, budget) for budget in (1.0, 0.7))
            assert planned.recompute_flops > plain.recompute_flops == 0
        else:
            {each.__name__: each for each in (*SCENARIOS, integer)}[name](rank)
    except BaseException as error:  # an outcome of pytest.raises is none of Exception
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    names = [*WAYS, *(each.__name__ for each in SCENARIOS)]
    return in_processes(scenario, names, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*WAYS, *(each.__name__ for each in SCENARIOS)])
def test_a_sharded_model(results, name):
    assert [each[name] for each in results] == [None, None]


def test_a_model_on_four_ranks(tmp_path):
    assert in_processes(scenario, [*OF_FOUR, "integer"], tmp_path, 4) == [{"replicated": None, "integer": None}] * 4
