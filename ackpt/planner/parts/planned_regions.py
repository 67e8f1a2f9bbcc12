"""Run and check the steps of a model that is planned in regions.

Nothing runs before training. The first step of a call checkpoints all blocks and is recorded while it runs; when its
backward has ended, `Record` gives the blocks to save from then on. Every step is counted: a forward that exceeds the
budget raises at once, a backward at its end, when all gradients are complete.
"""

import contextlib
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ackpt.checkpointing.reachable import tensors_in
from ackpt.checkpointing.reentrant import APPLY, checkpoint
from ackpt.checkpointing.standing_in import as_it_is, call_own, locally
from ackpt.checkpointing.tree import strip_result
from ackpt.core.autograd_state import phase
from ackpt.core.budget import dynamic_limit, is_share, readable
from ackpt.core.errors import BudgetError, CheckpointError, TraceError, warn
from ackpt.core.history import History
from ackpt.core.progress import shown
from ackpt.metering.meter import memory_format
from ackpt.metering.resident import Resident
from ackpt.planner.capture.call_facts import Call, Sizes
from ackpt.planner.capture.inspection.calls import described
from ackpt.planner.capture.inspection.model_checks import has_data, is_tensor
from ackpt.planner.capture.inspection.source_lines import running_modules
from ackpt.planner.capture.optimizer_state import CUDA_BLOCK, loop_bytes
from ackpt.planner.choose import cannot_keep
from ackpt.planner.request import Request

from .live_bytes import RNG_STATE_BYTES, AllocatedBytes, Backward, LiveBytes, _top_hooks, with_peak
from .module_blocks import Block, Undo, blocks_of, first_sentence, free, in_thread, run_body
from .regions_plan import (
    CHECKPOINTED,
    SAVED,
    Need,
    Record,
    RegionsPlan,
    Run,
    SavedStorages,
    Segment,
    first_forward,
    hold_outputs,
    is_within,
    recorded_run,
)

_MOST_SIZES = 10_000  # of steps whose backward need not be counted again
_REGION = "_RecomputeBackward"  # the autograd node of a region
_FIX = "Use smaller batches or give a larger budget; on_exceed='warn' lets such steps run."
_DROP = (
    "call backward() before the next forward, drop outputs of the model before backward, and call "
    "optimizer.zero_grad(), or give accumulation=True if you accumulate gradients."
)


@dataclass(eq=False)
class _Planned:
    """The plan of calls with sizes up to ``sizes``.

    ``step_bytes``: what the optimizer's step allocates in addition to gradients. ``start_bytes``: what earlier steps
    had left allocated before the first step. ``record``: of the first step, while it runs. ``finished``: that record,
    and what the optimizer's step takes in all, until the next step shows what each leaves allocated. ``saved``: the
    blocks to save, None before the plan is made. ``calls``: by path and number, the calls of blocks so far, and
    ``is_outgrown``: whether the last step added some to those of the first. ``needs``: by kind of block.
    ``room_bytes``: by path and number of a call of a block, the most live bytes at its start with which it is saved.
    ``backwards``: by the sizes in a forward, the live bytes when its backward began, and their peak in this backward.
    """

    regions: "PlannedRegions"
    sizes: Sizes
    plan: RegionsPlan
    step_bytes: int
    start_bytes: int = 0
    record: Record | None = None
    finished: tuple[Record, int] | None = None
    saved: set[str] | None = None
    calls: set[tuple[str, int]] = field(default_factory=set)
    is_outgrown: bool = False
    needs: dict[Any, Need] = field(default_factory=dict)
    room_bytes: dict[tuple[str, int], int] = field(default_factory=dict)
    backwards: dict[Any, tuple[int, int]] = field(default_factory=dict)

    def outputs(self, call: Call) -> Any:
        return self.regions.run(self, call)

    def outgrows(self, block: Block, number: int) -> bool:
        """Whether this call of `block` is the first one that no earlier step had: the next step is recorded again."""
        if self.saved is None or self.plan.limit_bytes is None or (block.path, number) in self.calls:
            return False
        self.calls.add((block.path, number))
        self.is_outgrown = True
        return True

    def is_saved(self, block: Block, number: int) -> bool:
        """Whether a call of `block` is to save its activations; `number` calls came before in this forward."""
        if self.regions.saves_all:
            return True
        if self.saved is None or block.path not in self.saved:
            return False
        if self.plan.limit_bytes is None:
            return True
        room = self.room_bytes.get((block.path, number))
        return room is not None and self.regions.live.bytes <= room


class PlannedRegions:
    """The plans of a step in regions; runs each call. Policy ``"full"`` checkpoints all blocks, ``"none"`` saves all.

    `error`: of the capture; None if the user asked for regions or the model contains a scripted module. `reason`: why
    the model is not one graph. `note_outputs`: called with the outputs that get a gradient in the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        history: History,
        error: TraceError | None,
        reason: object,
        note_outputs: Callable[[list[torch.Tensor]], None],
    ):
        self.model, self.request, self.history, self.reason = model, request, history, str(reason)
        self.note_outputs = note_outputs
        self.budget, self.policy, self.loop = request.budget, request.policy, request.loop
        self.is_share = self.budget is not None and is_share(self.budget)
        self.saves_all = self.policy == "none" or (self.budget is None and self.policy != "full")
        self.blocks = blocks_of(self.model)
        tensors = (*self.model.parameters(), *self.model.buffers())
        self.on_cpu = not any(tensor.is_cuda for tensor in tensors)
        self.live: Any = (LiveBytes if self.on_cpu else AllocatedBytes)(self._backward_ended)
        self._error = error
        self.forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()  # whose graphs exist
        self._planned: dict[Any, list[_Planned]] = {}
        self._last: _Planned | None = None
        self._lock = threading.RLock()  # `live` counts one forward at a time

    @property
    def plan(self) -> RegionsPlan:
        """The plan of the last call."""
        if self._last is None:
            raise AttributeError("this step has not been planned yet")
        return self._last.plan

    def serving(self, call: Call) -> _Planned:
        """The plan for `call`; calls that are larger than earlier ones, or differ in other ways, get a new plan."""
        facts = call.facts
        tensors = tuple(leaf if isinstance(leaf, tuple) else type(leaf) for leaf in facts.leaves)
        key = facts.spec, tensors, tuple(facts.model.tensors), tuple(facts.model.training), facts.autocast
        plans = self._planned.setdefault(key, [])
        planned = next((each for each in plans if is_within(call.sizes, each.sizes)), None)
        if planned is None:
            planned = self._new(call)
            plans.append(planned)
        self._last = planned
        return planned

    def _new(self, call: Call) -> _Planned:
        if not has_data(self.model, call.leaves):
            raise self._error or TraceError(
                f"{self.reason}, so it is planned from its first training step, which fake and meta tensors do not "
                "allow: give a model and a batch with data"
            )
        gradient_bytes = sum(each.nbytes for each in self.model.parameters() if each.requires_grad)
        loop = loop_bytes(self.model, self.loop, gradient_bytes, self.on_cpu)
        resident = Resident((self.model, *filter(is_tensor, call.leaves)))
        resident_bytes = sum(resident.bytes(lambda _: True, 1 if self.on_cpu else CUDA_BLOCK).values())
        optimizer_step_bytes = loop.pop("optimizer_step_bytes")
        resident_bytes += sum(loop.values())
        is_known = self.budget is not None and not self.is_share
        limit = dynamic_limit(self.budget, 0, resident_bytes) if is_known else None
        plan = RegionsPlan(
            fates=self._fates(()),
            reasons={},
            resident_bytes=resident_bytes,
            note=self.reason,
            made_for=described(self.model, call.args, call.kwargs, self.request.differentiate),
            limit_bytes=limit,
            peak_bytes=None if limit is None else limit + resident_bytes,
        )
        return _Planned(self, call.sizes, plan, optimizer_step_bytes)

    def _fates(self, saved) -> dict[str, str]:
        is_saved = {each.path: self.saves_all or each.path in saved or bool(each.refused) for each in self.blocks}
        return {path: SAVED if saves else CHECKPOINTED for path, saves in is_saved.items()}

    def run(self, planned: _Planned, call: Call) -> Any:
        """The model's outputs, with blocks saved and checkpointed as planned."""
        with self._lock:
            record = self._record(planned)
            if record is not None and not record.forwards:
                first = self._new(call)  # a smaller call may come first
                planned.sizes, planned.plan, planned.step_bytes = call.sizes, first.plan, first.step_bytes
            forward = _Forward(self, planned, record)
            runs = {id(block.module): partial(forward.run, block) for block in self.blocks}
            with locally(runs), forward.counted():
                outputs = call_own(self.model, *call.args, **call.kwargs)
            tensors = tensors_in([outputs]).values()  # also those in a dataclass
            leaves = [each for each in tensors if each.grad_fn is not None]
            forward.watch(leaves)
        if record is not None:
            self.note_outputs(leaves)
        return outputs

    def without_gradients(self, run: Callable[[], Any]) -> Any:
        """The outputs of `run`, a call without gradients; it counts if the backward of an earlier call is to come."""
        pending = next((each for each in self.forwards if not each.is_reached), None)
        if pending is None or (limit := pending.planned.plan.limit_bytes) is None:
            return run()
        live = self.live.bytes
        outputs, peak = with_peak(run, next(self.model.parameters()).device)
        if (size := live + peak) > limit:
            moment = "in a forward without gradients before the backward of an earlier forward,"
            pending.is_alone = False
            pending.report(self._exceeds(size, pending.planned, moment))
        return outputs

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of parameters that exist now."""
        return [each.grad for each in self.model.parameters() if each.is_leaf and each.grad is not None]

    def _record(self, planned: _Planned) -> Record | None:
        """The record of the first step, which this forward continues or begins; None for later steps."""
        record = planned.record
        if record is not None and record.is_reached:
            self._finish(planned)
        if planned.saved is not None and not planned.is_outgrown:
            return None
        planned.saved, planned.is_outgrown = None, False
        if record is None or all(forward() is None for forward in record.forwards):
            self.live.segment_peak()
            planned.record = Record()
        return planned.record

    def _backward_ended(self, backward: Backward) -> None:
        """Plan after the first step; raise if this backward exceeded the budget."""
        if self.on_cpu:
            self.live.gradients(self.gradients())
        forwards: list[_Forward] = backward.forwards
        for planned in dict.fromkeys(each.planned for each in forwards):
            record = planned.record
            if record is not None and all(each() is None or each().is_reached for each in record.forwards):  # type: ignore[union-attr]
                self._finish(planned)
        size, node = backward.most
        first = forwards[0]
        if len(forwards) == 1 and first.is_counted:
            if len(first.planned.backwards) >= _MOST_SIZES:
                first.planned.backwards.clear()
            first.planned.backwards[first.key] = first.begin_bytes, size
        limit = first.planned.plan.limit_bytes
        if limit is not None and size > limit and first.is_bounded:
            moment = f"in backward, at {node}," if node else "in backward"
            first.report(self._exceeds(size, first.planned, moment) + " All gradients of this step are complete.")

    def _finish(self, planned: _Planned) -> None:
        """Make the plan from the first step's record; report if all blocks checkpointed exceed the budget."""
        record, planned.record = planned.record, None
        assert record is not None
        record.end()
        record.segments.append(Segment(self.live.segment_peak()))
        after = self.live.bytes + planned.step_bytes if planned.step_bytes else 0
        self.plan_from(planned, record, after)
        planned.finished = record, after
        limit, least, resident = planned.plan.limit_bytes, planned.plan.least_peak_bytes, planned.plan.resident_bytes
        if limit is not None and least is not None and least - resident > limit:
            self.request.report(
                f"the first step shows that planned regions {cannot_keep(self.budget, limit, resident)}"
                f"With all blocks checkpointed, the peak of this step is {readable(least)} ({least} bytes), which is "
                f"the smallest feasible budget. The model is not one graph: {self.reason}.",
                least,
            )

    def plan_from(self, planned: _Planned, record: Record, after: int, lasting: int = 0) -> None:
        """Make the plan from the record of the first step; `lasting`: what it leaves allocated for the next step."""
        start = time.perf_counter()
        held, costs = record.held_bytes(), record.costs()
        least, baseline = (max(record.peak_bytes(saved) + lasting, after) for saved in ((), held))
        resident = planned.plan.resident_bytes
        limit = dynamic_limit(self.budget, baseline, resident)
        others = self._others(planned, record)
        chosen = set(held) if limit is None else record.chosen(limit - lasting, others)
        saved = set() if self.policy == "full" else chosen
        peak = record.peak_bytes(saved) + lasting
        if limit is not None:
            entries, room = record.entry_bytes(saved), max(0, limit - lasting - record.peak_bytes(saved, others))
            planned.room_bytes = {key: live + lasting + room for key, live in entries.items()}
        planned.saved = saved
        planned.plan = replace(
            planned.plan,
            fates=self._fates(saved),
            reasons={block.path: block.refused for block in self.blocks if block.refused},
            limit_bytes=limit,
            peak_bytes=resident + max(peak, after),
            least_peak_bytes=resident + least,
            baseline_peak_bytes=resident + baseline,
            saved_bytes=sum(held[path] for path in saved),
            cost=sum(costs[path] for path in costs if path not in saved) / (3 * record.cost or 1.0),
        )
        self.history.add("regions", f"{self.reason}; {planned.plan!r}", time.perf_counter() - start)
        if self.request.on_plan is not None:
            self.request.on_plan(planned.plan)

    def _others(self, planned: _Planned, record: Record) -> Need:
        """What the blocks need that `record` lacks, if blocks like them have run: another step may not skip them."""
        needs, calls = record.needs(), record.calls()
        planned.calls |= calls
        planned.needs |= {block.kind: needs[block.path] for block in self.blocks if block.path in needs}
        others = [each for each in self.blocks if not (each.refused or (each.path, 0) in calls)]
        pairs = [(each, planned.needs[each.kind]) for each in others if each.kind in planned.needs]
        growth = (max(need.growth_bytes, each.gradient_bytes) for each, need in pairs)
        return Need(sum(growth), max((need.peak_bytes for _, need in pairs), default=0))

    def _exceeds(self, size: int, planned: _Planned, moment: str) -> str:
        plan = planned.plan
        limit = plan.limit_bytes or 0
        earlier = "all blocks are checkpointed" if plan.baseline_peak_bytes is None else (
            f"its plan has a peak of {memory_format(plan.dynamic_peak_bytes or 0)}"
        )  # fmt: skip
        return (
            f"this step allocates {memory_format(size)} ({size} bytes) {moment} but at most {memory_format(limit)} "
            f"({limit} bytes) keep the budget {self.budget!r}: {earlier}. {_FIX}"
        )


class _Forward:
    """One forward of the model, which lives as long as its graph.

    ``is_counted``: whether its backward is counted, too. ``is_bounded``: whether the limit holds. ``is_alone``: whether
    no other one ran between it and its backward. ``is_in_mode``: whether it ran under a dispatch mode, as its
    recomputations then do, because torch decomposes operations differently under one. ``key``: what its backward
    depends on. ``start_bytes``: what was live before it.
    """

    def __init__(self, regions: PlannedRegions, planned: _Planned, record: Record | None):
        self.regions, self.planned, self.live = regions, planned, regions.live
        self.record = None if record is None else weakref.ref(record)
        self.is_first = record is not None
        self.is_counted = self.is_first
        self.is_reached = self.is_reported = False
        self.is_bounded = self.is_alone = True
        self.is_in_mode = False
        self.start_bytes = self.begin_bytes = 0
        self.key: Any = None
        self._numbers: Counter[str] = Counter()
        self._checkpointed: list[str] = []  # the blocks that ran as regions
        self._in_block = False
        self.kept: Any = None
        self._hooks = _top_hooks(True)

    @contextlib.contextmanager
    def counted(self):
        """Count the forward that runs inside, if there is a budget or the step is recorded."""
        live, planned = self.live, self.planned
        live.counts_cost, live.bound, live.exceeded = self.is_first, planned.plan.limit_bytes, self._exceeded
        if live.bound is None and not self.is_first:
            yield
            return
        if (record := self._open_record()) is not None:
            record.forwards.append(weakref.ref(self))
        self.is_in_mode = self.regions.on_cpu or self.is_first
        cost = live.cost
        with live.forward(), shown("recording the first step") if self.is_first else contextlib.nullcontext():
            live.gradients(())
            self._count_lasting(record, live.bytes)
            # With accumulation=True, gradients of earlier steps are resident.
            live.gradients(self.regions.gradients(), counts=not self.regions.loop.accumulation)
            self.start_bytes = live.bytes
            for each in self.regions.forwards:
                if not each.is_reached:
                    self.is_alone = each.is_alone = False
            self.regions.forwards.add(self)
            if record is not None:
                planned.start_bytes = max(planned.start_bytes, live.bytes)
            yield
        if record is not None:
            record.cost += live.cost - cost
        self.key = live.sizes, tuple(self._checkpointed)
        self.is_counted = self.is_first or self.key not in planned.backwards

    def _count_lasting(self, record: Record | None, live_bytes: int) -> None:
        """Plan again if the first step has left tensors allocated, such as the states that a block keeps."""
        if record is not None:
            if len(record.forwards) == 1:
                record.start_bytes = live_bytes
        elif self.planned.finished is not None:
            (first, after), self.planned.finished = self.planned.finished, None
            if (lasting := live_bytes - first.start_bytes) > 0:
                self.regions.plan_from(self.planned, first, after, lasting)
                self.live.bound = self.planned.plan.limit_bytes
                self.planned.start_bytes += lasting

    def _open_record(self) -> Record | None:
        return None if self.record is None else self.record()

    def run(self, block: Block, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run `block`, whose own forward is `forward`, as planned."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        number = self._numbers[block.path]
        self._numbers[block.path] += 1
        if not (self._in_block or block.refused) and self.planned.outgrows(block, number) and self.regions.is_share:
            self.is_bounded, self.live.bound = False, None  # the fraction is of the baseline of another step
        if self._in_block or block.refused or self.planned.is_saved(block, number):
            return forward(*args, **kwargs)
        if phase.dropping or phase.recomputing or _top_hooks(True) != self._hooks:
            block.refused = "it is called within saved_tensors_hooks or a checkpoint of the model itself"
            return forward(*args, **kwargs)
        self._checkpointed.append(block.path)
        forward = as_it_is(module, forward)
        run = Run(block.path, number, self.live.bytes)
        if (record := self._open_record()) is not None:
            record.segments.append(Segment(self.live.segment_peak()))
        undo = None if block.has_run else Undo(forward, args, kwargs)
        self._in_block = True
        try:
            result = self._region(block, forward, run, args, kwargs)
            if undo is None or not phase.leaves_behind:
                block.has_run = True
                return result
            del result
            raise CheckpointError("it stores a tensor that it computes, such as a state or an output, in an object")
        except (BudgetError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if undo is None:
                if isinstance(error, CheckpointError):
                    raise self._left_out(block, error) from error
                raise
            if record is not None:
                record.forget(run)
            reason = first_sentence(error)
            if not undo.undo():
                raise self._left_out(block, error) from error
            free(error)
        finally:
            self._in_block, phase.leaves_behind = False, None
        result = forward(*args, **kwargs)  # raises an error again that regions did not cause
        block.refused = reason
        return result

    def _region(self, block: Block, forward: types.MethodType, run: Run, args: tuple, kwargs: dict) -> Any:
        live, record, storages = self.live, self._open_record(), SavedStorages()
        in_thread.first = first_forward(live) if record is None else recorded_run(live, record, run, storages)
        phase.leaves_behind = False if not block.has_run else None
        before = live.bytes
        try:
            # A region keeps the states from before its forward.
            with live.more(RNG_STATE_BYTES), live.without_numbers():
                body = types.MethodType(partial(run_body, forward.__func__), block.module)
                result = checkpoint(body, *args, **kwargs)
        finally:
            in_thread.first = None
        outputs = strip_result(result)[0]
        nodes = (each.grad_fn for each in outputs if type(each.grad_fn).__name__ == _REGION)
        node: Any = next(nodes, None)
        if node is not None and APPLY not in vars(node):  # which an output that is an argument has of another block
            setattr(node, APPLY, partial(self._backward_of, block, run, weakref.ref(node)))
            for _, state in node.region.streams:
                if is_tensor(state):
                    live.follow(state)
        if record is not None:
            run.held_bytes += before - live.bytes
            run.left_bytes = live.bytes - before
            record.segments.append(Segment(live.segment_peak(), run, None, run.held_bytes))
            hold_outputs(outputs, storages, (args, kwargs), live, weakref.ref(record), run)
        return result

    def _backward_of(self, block: Block, run: Run, reference, *gradients) -> Any:
        """The backward of a block that ran as a region."""
        node, record = reference(), self._open_record()
        region: Any = node.region
        if self.is_counted:  # AccumulateGrad copies some gradients
            self.live.accumulated(self.regions.model.parameters())
        shift = 0
        if record is not None and not run.is_over:
            run.is_over = True
            record.segments.append(Segment(self.live.segment_peak(), run, 0, -run.held_bytes))
            saved_bytes = self.live.bytes + run.held_bytes

            def recomputed() -> None:
                nonlocal shift
                shift = saved_bytes - self.live.bytes
                record.segments.append(Segment(self.live.segment_peak(), run, None))

            in_thread.run, region.recomputed = run, recomputed
            # The first recomputation without dead calls may have to run again, so it refers to its gradients till then.
            self.kept = [*gradients[0]] if region.can_skip and type(gradients[0]) is list else None
        before, in_thread.live = in_thread.live, self.live if self.is_in_mode else None
        self.live.watches = self.is_counted
        try:
            # The recomputation keeps the present states and buffers, and reads the states at its end.
            present = 2 * sum(state.nbytes for _, state in region.streams if is_tensor(state))
            with self.live.more(present + (region.state.restored_bytes() if region.state is not None else 0)):
                return getattr(type(node), APPLY)(node, *gradients)
        except CheckpointError as error:
            raise self._left_out(block, error) from error
        finally:
            if record is not None and region.recomputed is not None:
                record.segments.append(Segment(self.live.segment_peak(), run, shift))
            in_thread.live = before
            in_thread.run = region.recomputed = self.kept = None

    def _left_out(self, block: Block, error: Exception) -> CheckpointError:
        block.refused = first_sentence(error)
        self.planned.plan = replace(
            self.planned.plan,
            fates={**self.planned.plan.fates, block.path: SAVED},
            reasons={**self.planned.plan.reasons, block.path: block.refused},
        )
        return CheckpointError(f"{block!r} cannot be checkpointed, and is saved from the next step on: {error}")

    def watch(self, leaves: Sequence[Any]) -> None:
        """Check the backward that follows; ``leaves``: the model's outputs."""
        if self.key is None:
            return
        for node in dict.fromkeys(leaf.grad_fn for leaf in leaves):
            node.register_prehook(self._begins)
        if self.is_counted:
            self.live.count_backward(leaves)

    def _begins(self, gradients) -> None:
        is_first = self.live.begin(self)
        if self.is_reached:
            return
        self.is_reached = True
        if (record := self._open_record()) is not None:
            record.is_reached = True
        self.begin_bytes = self.live.bytes
        limit = self.planned.plan.limit_bytes
        if is_first and not self.is_counted and limit is not None and self.is_bounded:
            begin, most = self.planned.backwards.get(self.key, (0, 0))
            if (size := most + self.begin_bytes - begin) > limit:
                more = memory_format(self.begin_bytes - begin)
                message = self.regions._exceeds(size, self.planned, "in backward")
                self.report(f"{message} At its start, {more} more are live than in the same step before: {_DROP}")

    def _exceeded(self, size: int) -> None:
        regions, planned = self.regions, self.planned
        message = regions._exceeds(size, planned, f"when it reaches {self._running()},")
        least = None
        if planned.plan.baseline_peak_bytes is None and not regions.saves_all:
            least = planned.plan.resident_bytes + size
            message += f" The smallest feasible budget is larger than {readable(least)}."
        elif planned.plan.least_peak_bytes is not None:
            least = planned.plan.least_peak_bytes
        if self.start_bytes > planned.start_bytes:
            message += f" {memory_format(self.start_bytes)} of earlier forwards were still allocated before it: {_DROP}"
        self.report(message, least)

    def report(self, message: str, least_bytes: int | None = None) -> None:
        """Raise, or warn once in this step; warn, too, if several forwards exceed a fraction of one's baseline."""
        raises = self.regions.request.on_exceed == "raise" and (self.is_alone or not self.regions.is_share)
        if raises:
            raise BudgetError(message, least_bytes, self.regions.budget)
        if not self.is_reported:
            self.is_reported = True
            warn(message)

    def _running(self) -> str:
        """The innermost module of the model that is running."""
        names = {id(module): name for name, module in self.regions.model.named_modules() if name}
        running = ((names[id(module)], module) for module in running_modules() if id(module) in names)
        return next(
            (f"module {name!r} ({type(module).__name__})" for name, module in running), "the model's own forward"
        )
