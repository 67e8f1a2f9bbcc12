"""`ShardedStep`: a budget for a model after ``fully_shard``, kept on every rank.

The model is captured once, as if it were not sharded, and planned block by block, see `planner`. A planned block runs
inside FSDP's hooks, in place of the block's forward, with the parameters that these hooks have gathered. It recomputes
nothing of other blocks and no collective, so ranks may choose different plans; all ranks raise an error, or none does.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ackpt.checkpointing import standing_in
from ackpt.core.budget import dynamic_limit
from ackpt.core.errors import BudgetError, TraceError
from ackpt.core.history import Event, History
from ackpt.core.progress import shown
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.aot import CAPTURING, Capture, capture
from ackpt.planner.capture.call_facts import Call, WatchedModel, call_of
from ackpt.planner.capture.inspection.attributes import attributes
from ackpt.planner.capture.inspection.calls import described
from ackpt.planner.capture.inspection.model_checks import check_model, is_tensor, warn_of_evaluation
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import NO_LOOP, check_optimizer, optimizer_of
from ackpt.planner.capture.tracing import captured_graph
from ackpt.planner.choose import plan_by_policy
from ackpt.planner.costs.profiles import profile
from ackpt.planner.request import Request
from ackpt.planner.schedule.schedule import lower
from ackpt.planner.step.uncovered import Uncovered
from ackpt.planner.step.variants import Variant, Variants

from .fully_sharded import (
    body_of,
    groups_of_sharded,
    has_unreduced,
    param_groups,
    settings_of,
    sharded_gradient_bytes,
    sharding_of,
    states_of,
    unreduced_bytes,
    unsharded_view,
    update_body,
)
from .planner import PLAIN, Blocks, Choice, ShardedPlan, Table, check_policy
from .sharding import ShardingError, optimizer_like

_MOST_PLANS = 64
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "fsdp")  # namespaces of torch's operations


class _Made(NamedTuple):
    """A planned block: its `variant` serves the calls of all blocks with the same operations as the block `number`."""

    number: int
    call: Call
    variant: Variant


class _Planned:
    """The plan of calls of one kind.

    ``signatures``: by the number of a block, what it computes, equal in alike blocks; ``made``: planned blocks by
    signature, places of saved results and sizes.
    """

    def __init__(self, captured: Capture, table: Table, row: tuple[int, ...], plan: ShardedPlan):
        self.captured, self.blocks, self.row, self.plan = captured, table.blocks, row, plan
        self.signatures = [_signature(table.blocks, number) for number in range(len(row))]
        self.made: dict[tuple, list[_Made]] = {}

    def choice(self, number: int) -> Choice:
        return self.blocks.choices[self.row[number]]


class ShardedStep:
    """The plans of a model that ``fully_shard`` has sharded; `ackpt.apply_budget` returns it. Keep calling the model.

    Every call with gradients begins with an all-reduce of one number between the hosts, so that all ranks raise an
    error if one of them has no plan within the budget. New sizes are captured and planned like the first ones.
    """

    def __init__(self, model: nn.Module, request: Request):
        self._ackpt_model, self._request, self._history = model, request, History()
        _require_options(request)
        check_optimizer(model, request.loop.optimizer)
        blocks = groups_of_sharded(model)[1:]
        self._blocks = [model, *(model.get_submodule(group.name) for group in blocks)]
        self._bodies = [body_of(block) for block in self._blocks[1:]]
        self._watched: dict[int, WatchedModel] = {}
        self._arguments = WatchedModel(nn.Module())  # of calls: the model's parameters are other objects inside of one
        self._attributes = [_of_modules(attributes(body.modules())) for body in (model, *self._bodies)]
        self._stand_ins = [standing_in.StandIn(kind, None) for kind in {type(block) for block in self._blocks[1:]}]
        self._plans: dict[Any, list[_Planned]] = {}
        self._dtypes: list[Any] = []
        self._active: _Planned | None = None
        meshes = [group.mesh_info.mesh.mesh for *_, state in states_of(model) for group in param_groups(state)]
        ranks = sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()})
        # Of its own, so that no collective of the training loop comes between; gloo needs no GPU to be idle.
        self._ranks = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    @property
    def plan(self) -> ShardedPlan:
        """The plan of this rank for the last call, or for the last `prepare`."""
        if self._active is None:
            raise AttributeError("this step has not been planned yet")
        return self._active.plan

    @property
    def history(self) -> list[Event]:
        """What was captured and planned so far, with causes."""
        return list(self._history)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'no plan yet' if self._active is None else self.plan})"

    def prepare(self, *args: Any, **kwargs: Any) -> ShardedPlan:
        """Capture and plan for these arguments without running anything; the plan. Call it on all ranks."""
        warn_of_evaluation(self._ackpt_model)
        self._dtypes = [getattr(leaf, "dtype", None) for leaf in tree_flatten((args, kwargs))[0]]
        self._serving(args, kwargs, runs=False)
        return self.plan

    @torch._dynamo.disable
    def _ackpt_run(self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The outputs of a call of ``model.forward``, in whose place this stands, inside of FSDP's hooks."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        planned = self._serving(*self._as_given(args, kwargs))
        runs = {
            id(block): functools.partial(self._run_block, planned, number)
            for number, block in enumerate(self._blocks)
            if number and planned.choice(number).name != PLAIN
        }
        with standing_in.locally(runs):
            return forward(*args, **kwargs)

    def _as_given(self, args, kwargs):
        """The arguments in the dtypes of the example, before FSDP2 cast them."""
        leaves, spec = tree_flatten((args, kwargs))
        if len(leaves) == len(self._dtypes):
            pairs = zip(leaves, self._dtypes)
            leaves = [
                leaf.to(d) if is_tensor(leaf) and d is not None and leaf.dtype != d else leaf for leaf, d in pairs
            ]
        return tree_unflatten(leaves, spec)

    def _serving(self, args, kwargs, runs: bool = True) -> _Planned:
        """The plan for a call, which `runs` now; all ranks raise an error if one of them does."""
        error = None
        try:
            planned = self._plan_of(args, kwargs)
            if runs:
                self._check_gradients(planned)
            self._active = planned
        except Exception as own:
            error = own
        least = getattr(error, "least_bytes", None) or 0
        agreed = torch.tensor([0 if error is None else dist.get_rank() + 1, least])
        dist.all_reduce(agreed, dist.ReduceOp.MAX, self._ranks)
        failed, least = agreed.tolist()
        if error is not None:
            raise error
        if failed and not least:
            raise TraceError(f"rank {failed - 1} cannot plan its step; its own error says why")
        if failed:
            raise BudgetError(
                f"rank {failed - 1} has no plan within the budget; its own error says why. The smallest feasible "
                f"budget of the ranks without a plan is {memory_format(least)} ({least} bytes)",
                least,
                self._request.budget,
            )
        assert self._active is not None
        return self._active

    def _plan_of(self, args, kwargs) -> _Planned:
        model = self._ackpt_model
        call = call_of(self._arguments, args, kwargs)
        key = call.facts, call.sizes, settings_of(model), tuple(module.training for module in model.modules())
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        planned = self._plans.setdefault(key, [])
        for each in planned:
            if each.captured.serves(call.leaves):
                return each
        start = time.perf_counter()
        with shown(), _disable_current_modes():
            planned.append(self._new_plan(args, kwargs))
        made_for = described(model, args, kwargs, self._request.differentiate)
        cause = "first call" if not list(self._history) else f"other arguments or settings: {made_for}"
        self._history.add("capture", cause, time.perf_counter() - start)
        return planned[-1]

    def _new_plan(self, args, kwargs) -> _Planned:
        model, request = self._ackpt_model, self._request
        groups, sharding = groups_of_sharded(model), sharding_of(model)
        view = unsharded_view(model, FakeTensorMode(allow_non_fake_inputs=True))
        check_model(view)
        with CAPTURING, capture(view, args, kwargs, request.differentiate, request.outputs) as captured:
            graph = captured_graph(captured, view, NO_LOOP)
        costs = profile(graph, request.device, workspace="measured" if graph.on_cpu else "given")
        blocks = Blocks(graph, costs, groups, has_regions=False)
        _refuse_collectives(blocks)
        optimizer = optimizer_of(model, request.loop.optimizer)
        kind = None if optimizer is None else optimizer_like(optimizer)
        table = Table(blocks, groups, sharding, kind, graph.on_cpu, request.loop.clipping)
        if request.loop.accumulation:
            unreduced = has_unreduced(model)
            earlier = unreduced_bytes(groups, sharding.reduction) if unreduced else table.gradients
            table.resident["accumulated gradients"] = earlier
        policy = "none" if request.budget is None and request.policy == "auto" else str(request.policy)
        row = table.chosen(request.budget, policy)
        return _Planned(captured, table, row, table.plan(row, policy))

    def _run_block(self, planned: _Planned, number: int, module, forward, args, kwargs) -> Any:
        """The outputs of a block in a call with the plan `planned`."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        choice = planned.choice(number)
        body = self._bodies[number - 1]
        update_body(body, module)
        with CAPTURING:
            watched = self._watched.setdefault(number, WatchedModel(body))
            call = call_of(watched, args, kwargs)
            places = _kept_places(planned.blocks, choice, number)
            made = planned.made.setdefault((planned.signatures[number], places, call.sizes), [])
            variant = next((each.variant for each in made if self._serves(each, number, call)), None)
            if variant is None:
                planner = functools.partial(_block_plan, planned.blocks, number, places)
                request = Request(planner=planner, differentiate="all", outputs="keep", dynamic=False)
                variant = Variants(body, request, Uncovered(body, request), None).serving(call)
                made.append(_Made(number, call, variant))
        return variant.outputs(call)

    def _serves(self, made: _Made, number: int, call: Call) -> bool:
        """Whether a planned block runs a call of the block `number`, which may differ in attributes as an index."""
        one, other = made.call.facts, call.facts
        is_alike = one._replace(model=other.model) == other and made.variant.captured.serves(call.leaves)
        if not is_alike or one.model == other.model:
            return is_alike
        planned = self._attributes[made.number], self._attributes[number]
        names = "structure", "tensors", "shared", "training"
        return tuple(_of_modules(each.model.attributes) for each in (one, other)) == planned and all(
            getattr(one.model, name) == getattr(other.model, name) for name in names
        )

    def _check_gradients(self, planned: _Planned) -> None:
        """Report gradients that exist, or will not be reduced, beyond those that the plan counts."""
        if (budget := self._request.budget) is None:
            return
        model, plan = self._ackpt_model, planned.plan
        unreduced = unreduced_bytes(planned.blocks.groups, plan.sharding.reduction) if has_unreduced(model) else 0
        more = sharded_gradient_bytes(model) + unreduced - plan.resident.get("accumulated gradients", 0)
        limit = dynamic_limit(budget, plan.baseline_bytes, plan.resident_bytes)
        if more > 0 and limit is not None and plan.dynamic_peak_bytes + more > limit:
            self._request.report(
                f"forward begins while {memory_format(more)} of gradients exist or are not reduced, with which the "
                f"step would exceed the budget {budget!r}: if you accumulate gradients, give accumulation=True; "
                "otherwise call optimizer.zero_grad() before the step",
                plan.peak_bytes + more,
            )


def _of_modules(facts: tuple[tuple, ...]) -> tuple:
    """The facts that `attributes` returns, without those of tensors, which are DTensors between the steps."""
    return tuple(tuple(fact for fact in each if "." not in fact[0]) for each in facts)


def _require_options(request: Request) -> None:
    """Refuse options of `ackpt.apply_budget` that plan other steps than one of a sharded model."""
    check_policy(request.policy)
    given = {
        "plan=": request.plan is not None,
        "a budget of reserved bytes": request.is_reserved,
        "slowdown=": request.slowdown is not None,
        "regions=True": bool(request.regions),
        "chunk_head=": bool(request.chunk_head),
        "scaler=": request.loop.scaling,
        "loss=": request.loop.loss is not None,
        "dynamic=": request.dynamic not in (None, False),
        "options=": bool(request.options),
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ShardingError(f"{names[0]} is not supported for a model that fully_shard has sharded: leave it out")


def _refuse_collectives(blocks: Blocks) -> None:
    """Refuse blocks that call collectives, which some ranks would recompute and others not."""
    for node in blocks.graph.nodes[: blocks.graph.boundary]:
        if blocks.owners[node.id] and node.target.split(".")[0] in _COLLECTIVES:
            raise ShardingError(
                f"module {node.module!r} calls a collective ({node.target}) at {node.source}: ranks that recompute the "
                "block would wait for those that do not. Call it outside of the blocks"
            )


def _operations(blocks: Blocks, number: int):
    return [n for n in blocks.graph.nodes[: blocks.graph.boundary] if blocks.owners[n.id] == number and n.inputs]


def _signature(blocks: Blocks, number: int) -> tuple:
    """What the forward of a block computes: operations, constants, sizes, and the names of its parameters."""
    name, place, lines = blocks.groups[number].name, {}, []

    def placed(node: fx.Node) -> str:
        of_block = node.op == "placeholder" and f"'{name}." in str(node.meta.get("desc"))
        return (
            str(node.meta["desc"]).replace(f"'{name}.", "'") if of_block else f"%{place.setdefault(node, len(place))}"
        )

    for node in _operations(blocks, number):
        found = blocks.analysis.fx[node.id]
        lines.append(
            (node.target, str(fx.map_arg((found.args, found.kwargs), lambda each: placed(each))), placed(found))
        )
        lines.append(tuple(blocks.graph.storages[storage].bytes for storage in node.storages))
    return tuple(lines)


def _kept_places(blocks: Blocks, choice: Choice, number: int) -> frozenset[tuple[int, int]]:
    """The results that a choice saves in a block: places of operations in its forward, and of results in these."""
    place = {node.id: at for at, node in enumerate(_operations(blocks, number))}
    allocated, storages = blocks.analysis.allocated, blocks.graph.storages
    producers = [(storages[storage].producer, storage) for storage in choice.kept[number]]
    return frozenset((place[node], sorted(allocated[node]).index(storage)) for node, storage in producers)


def _block_plan(blocks: Blocks, number: int, places, graph: JointGraph):
    """The plan of a block's own graph that saves the results at `places`."""
    operations = [node for node in graph.nodes[: graph.boundary] if node.inputs]
    expected, name = [node.target for node in _operations(blocks, number)], blocks.groups[number].name
    own = [node.target for node in operations]
    casts = max(0, len(expected) - len(own))  # of its arguments, which FSDP2 makes before the block begins
    if expected[casts:] != own or not set(expected[:casts]) <= {"aten._to_copy.default"}:
        other = next((f"{a} and {b}" for a, b in zip(expected, own) if a != b), "one has more of them")
        raise TraceError(
            f"block {name} computes other operations than in the capture of the whole model ({other}), because "
            "something that is not an argument of the model has changed: call ackpt.apply_budget again after that"
        )
    saved = set(graph.analysis.must_be_saved)
    for place, index in places:
        if place >= casts:
            saved.add(sorted(graph.analysis.allocated[operations[place - casts].id])[index])
    schedule = lower(graph, saved)
    return plan_by_policy(graph, Request(policy=lambda *_, **__: schedule))
