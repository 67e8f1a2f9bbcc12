"""The captures of one `PlannedStep`, and which of them runs a given call.

A call is looked up by its facts and its sizes (`call_facts`). New sizes first ask the captures with dynamic dimensions;
if sizes differ from earlier ones in some dimensions, the step is captured once more with these dimensions dynamic.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ackpt.core.errors import BudgetError, TraceError
from ackpt.core.progress import shown
from ackpt.planner.capture.aot import CAPTURING, Capture, capture
from ackpt.planner.capture.dynamic_sizes import LARGEST, SMALLEST, Dimension, layout, operations_in
from ackpt.planner.capture.inspection.calls import (
    another_plan,
    described,
    differences,
    named_leaves,
    other_bytes,
    sliced,
)
from ackpt.planner.capture.inspection.model_checks import is_tensor, warn_of_hooks
from ackpt.planner.capture.optimizer_state import Loop
from ackpt.planner.capture.tracing import captured_graph
from ackpt.planner.schedule.plan import Plan, PlanError
from ackpt.planner.schedule.rewriting import RewriteError

from .backward_checks import gradient_strides
from .call_facts import Call, Facts, Sizes, call_of, changed_setting
from .choices import Planner
from .compiled_schedule import compiled_schedule, dropped_places
from .dynamic_dimensions import DynamicArgument, declared, declared_bounds, differing, named_dimensions
from .dynamic_step import DynamicStep
from .history import History
from .model_facts import WatchedModel
from .variant import Variant

_MOST_CAPTURES = 64
_MOST_DYNAMIC = 8  # of one group; sizes that none of them serves are then captured one by one
_MOST_ALONE = 3  # captures with dynamic dimensions, one after the other, that served one size each
_PASS_AS_TENSOR = "Pass what changes at every step as a tensor, or change it once per epoch."
_VALUES = "the values of its arguments"
_ONE_BRANCH = "Prepare batches that take few branches there, for example by padding all of them."
_FEW_SIZES = "Pad the batches to a few sizes, or change the model there."
_LET_DYNAMIC = "Leave dynamic at None, so that one capture serves several sizes."


@dataclass
class _Group:
    """The variants of calls with equal facts.

    ``fixed``: those of a capture of their own, by their sizes; several where values differ that the code reads.
    ``dynamic``: captures with dynamic dimensions, the latest first, with a variant for every sizes that occurred.
    ``refused``: dimensions that cannot be dynamic; ``suspected``: those that the model fixed at a size that may be
    special, such as the length of a whole table; ``refusal``: the latest reason.
    """

    fixed: dict[Sizes, list[Variant]] = field(default_factory=dict)
    dynamic: list[tuple[DynamicStep, dict[tuple[int, ...], Variant]]] = field(default_factory=list)
    refused: set[Dimension] = field(default_factory=set)
    suspected: set[Dimension] = field(default_factory=set)
    refusal: str = ""


class Variants:
    """The captures of one step, and what runs each call.

    Args:
        model, planner, differentiate, outputs, loop: of the step.
        dynamic: which dimensions become dynamic, see `ackpt.compile`.
        on_plan: called with every new plan.
        returns: called before planning with the shapes of the captured outputs that get a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: Planner,
        differentiate: str,
        outputs: str,
        loop: Loop,
        dynamic: DynamicArgument,
        on_plan: Callable[[Any], Any] | None = None,
        returns: Callable[[list[tuple[int, ...]]], None] = lambda shapes: None,
    ):
        self.model, self.planner, self.loop, self.dynamic = model, planner, loop, dynamic
        self.differentiate, self.outputs, self.on_plan, self.returns = differentiate, outputs, on_plan, returns
        self.history = History()
        self._watched: WatchedModel | None = None
        self._groups: dict[Facts, _Group] = {}
        self._last: tuple[Facts, dict[str, str], Variant] | None = None  # no call, which would keep its tensors
        self._plan: tuple[Variant, Plan] | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the last call."""
        if self._last is None:
            raise AttributeError("this step has not been planned yet")
        variant = self._last[-1]
        if self._plan is None or self._plan[0] is not variant:
            self._plan = variant, variant.make_plan()
        return self._plan[1]

    def call(self, args, kwargs) -> Call:
        """A call of the model with these arguments."""
        with CAPTURING:
            if self._watched is None:
                self._watched = WatchedModel(self.model)
            return call_of(self._watched, args, kwargs)

    def of(self, call: Call) -> Variant:
        """The variant that serves `call`; captures and plans if none does yet."""
        with CAPTURING:
            return self._of(call)

    def _of(self, call: Call) -> Variant:
        group = self._groups.pop(call.facts, None) or _Group()
        self._groups[call.facts] = group  # now the one that was used last
        variant = self._known(group, call)
        if variant is None:
            with shown(), _disable_current_modes():  # a mode that observes the step must not see captures
                variant = self._new(group, call)
            if variant.captured.reads.is_settled:  # attributes of the model are as after its first call
                facts = self.call(call.args, call.kwargs).facts
                self._groups[facts] = self._groups.pop(call.facts)
                if self._last is not None:
                    self._last = facts, self._last[1], self._last[2]
        elif self._last is not None and variant is not self._last[-1]:
            self._last = (*self._last[:-1], variant)
        self._drop_oldest()
        return variant

    def _known(self, group: _Group, call: Call) -> Variant | None:
        for variant in group.fixed.get(call.sizes, ()):
            if variant.captured.serves(call.leaves):
                return variant
        served = _served_by(group, call)
        variant = None if served is None else served[1].get(served[2])
        return None if variant is None or (variant.stopgap is not None and variant.stopgap.better()) else variant

    def _new(self, group: _Group, call: Call) -> Variant:
        declared_bounds(self.dynamic, self.model, call)  # raises for a size outside of them
        made_for = described(self.model, call.args, call.kwargs, self.differentiate)
        cause, group_of_causes = self._cause(call, made_for)
        try:
            variant = self._served(group, call, cause)
            if variant is None:
                variant = self._captured(group, call, cause, group_of_causes)
                warn_of_hooks(self.model)
        except (BudgetError, PlanError) as error:
            was = None if self._last is None else self._last[1]
            if isinstance(error, PlanError):
                if was is None:
                    raise
                raise PlanError(f"{error} {another_plan(was, made_for, cause)}") from None
            earlier = "" if was is None else other_bytes(was, made_for, error.budget, cause)
            said = " ".join(filter(None, (str(error), sliced(call.args, call.kwargs), earlier)))
            raise BudgetError(said, error.least_bytes, error.budget) from None
        self._last = call.facts, made_for, variant
        if self.on_plan is not None:
            self.on_plan(self.plan)
        return variant

    def _served(self, group: _Group, call: Call, cause: str) -> Variant | None:
        """A variant for new sizes of a capture with dynamic dimensions."""
        served = _served_by(group, call)
        if served is None:
            return None
        start = time.perf_counter()
        step, variants, values = served
        if values in variants:
            cause = "a cheaper schedule pays for compiling it"
        variants[values] = self._chosen(step, call, values)
        self.history.add("plan", cause, time.perf_counter() - start)
        return variants[values]

    def _captured(self, group: _Group, call: Call, cause: str, group_of_causes: str) -> Variant:
        start = time.perf_counter()
        dimensions = self._dimensions(group, call)
        if dimensions:
            try:
                return self._captured_dynamic(group, call, cause, dimensions)
            except (TraceError, RewriteError) as error:
                if dimensions & named_dimensions(self.dynamic, self.model, call):
                    raise
                if dimensions & self.planner.dimensions(call):
                    raise PlanError(f"this plan cannot serve these sizes, because {str(error).rstrip('.')}.") from error
                group.refused |= dimensions
                group.refusal = str(error)
                self.history.add("refused", f"dynamic dimensions of {cause}: {error}", time.perf_counter() - start)
                start = time.perf_counter()
        with capture(self.model, call.args, call.kwargs, self.differentiate, self.outputs) as captured:
            self.returns(captured.gradient_shapes)
            graph = captured_graph(captured, self.model, self.loop)
            plan = self.planner(graph)
            step, strides = compiled_schedule(captured, graph, plan.schedule), gradient_strides(graph.analysis)
            run = self._checked(lambda inputs: step(inputs, strides), call)
            dropped = dropped_places(graph, plan.schedule)
            variant = Variant(captured, run, lambda: plan, dropped, self.loop.accumulation)
        group.fixed.setdefault(call.sizes, []).insert(0, variant)
        seconds = time.perf_counter() - start
        self.history.add("capture", cause, seconds, group=group_of_causes, advice=self._advice(group, group_of_causes))
        return variant

    def _advice(self, group: _Group, cause: str) -> str:
        """How to avoid captures of calls of `group`, one for each."""
        if cause == _VALUES:
            return _ONE_BRANCH
        if len(group.fixed) == 1:
            return _PASS_AS_TENSOR
        if self.dynamic is False:
            return _LET_DYNAMIC
        return f"One capture cannot serve all: {group.refusal}. {_FEW_SIZES}" if group.refusal else _PASS_AS_TENSOR

    def _captured_dynamic(self, group: _Group, call: Call, cause: str, dimensions: set[Dimension]) -> Variant:
        start = time.perf_counter()
        ordered = sorted(dimensions)
        with capture(self.model, call.args, call.kwargs, self.differentiate, self.outputs, ordered) as captured:
            self.returns(captured.gradient_shapes)
            step = DynamicStep(captured, call, self.model, self.loop)
        if fixed := step.symbols.fixed():
            named = named_dimensions(self.dynamic, self.model, call)
            if named := {each: line for each, line in fixed.items() if each in named}:
                raise TraceError(
                    f"the model works for one size only of {_said(named, call)}. Leave it out of dynamic, or change "
                    "that line so that it does not compare or convert the size."
                )
            group.refused |= set(fixed) & group.suspected
            group.suspected |= set(fixed)
            group.refusal = f"the model works for one size only of {_said(fixed, call)}"
            self.history.add("refused", f"one size only of {_said(fixed, call)}", time.perf_counter() - start)
        elif line := step.symbols.converted():
            group.refusal = f"the model converts a number that it computes from a size{line}"
        values = step.symbols.values(call.leaves)
        if not step.symbols.holds(values):
            raise TraceError(f"torch computes the sizes {list(values)} differently if they are symbols")
        served = ((step.symbols.values_in(sizes), variant) for sizes, all_ in group.fixed.items() for variant in all_)
        same = [(sizes, variant) for sizes, variant in served if _branches_alike(variant.captured, step.captured)]
        earlier = {sizes: variant for sizes, variant in same if sizes is not None}
        _require_equal_captures(step, earlier)
        bounds = declared_bounds(self.dynamic, self.model, call)
        largest = tuple((bounds.get(each) or (0, size))[1] for each, size in zip(step.symbols.dimensions, values))
        step.search_at = [each for each in (values, largest, *earlier) if step.symbols.holds(each)]
        step.choose = self.planner.for_sizes(step)
        variants: dict[tuple[int, ...], Variant] = {}
        group.dynamic.insert(0, (step, variants))
        try:
            variants[values] = self._chosen(step, call, values)
        except RewriteError:
            group.dynamic.pop(0)
            raise
        gc.collect()  # what the capture and the search left, which would otherwise take time in a later step
        self.history.add("dynamic capture", cause, time.perf_counter() - start)
        return variants[values]

    def _chosen(self, step: DynamicStep, call: Call, values: tuple[int, ...]) -> Variant:
        """What runs `call`, whose dynamic dimensions have the sizes `values`."""
        assert step.choose is not None
        choice = step.choose(values)
        run = self._checked(step.run(choice.schedule, values), call)
        dropped = dropped_places(step.reference, choice.schedule)
        return Variant(step.captured, run, choice.plan, dropped, self.loop.accumulation, choice.stopgap)

    def _checked(self, run, call: Call):
        """`run`, or a function that raises if either the model or the call has no data."""
        own = any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers()))
        leaves = named_leaves(call.args, call.kwargs)
        names = [name for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        if own and not all(leaf.is_meta for leaf in filter(is_tensor, call.leaves)):
            reason = (
                "the model is on the meta device, so that it can be planned, but not run on data: call "
                "model.to_empty(device=...) and load its state first"
            )
        elif names and not own:
            reason = (
                f"argument {names[0]} is on the meta device, so that the step can be planned, but not run: the model "
                "has data; call it with tensors that have data, too"
            )
        else:
            return run

        def refused(inputs):
            raise TraceError(reason)

        return refused

    def _dimensions(self, group: _Group, call: Call) -> set[Dimension]:
        """The dimensions to capture as dynamic: those that are declared, and those in which earlier calls differ."""
        latest = [len(variants) for _, variants in group.dynamic[:_MOST_ALONE]]
        if not self.planner.serves_sizes or len(group.dynamic) >= _MOST_DYNAMIC or latest == [1] * _MOST_ALONE:
            return set()
        chosen = declared(self.dynamic, self.model, call)
        if self.dynamic is not False:
            chosen |= self.planner.dimensions(call)
            changing = {dimension for step, _ in group.dynamic for dimension in step.symbols.dimensions}
            for sizes in group.fixed:
                changing |= differing(sizes, call)
            are_all = self.dynamic is None  # declared otherwise, for tensors
            chosen |= {each for each in changing if are_all or not is_tensor(call.leaves[each.leaf])}
        sizes = {each: layout(call.leaves[each.leaf])[0][each.dim] for each in chosen - group.refused}
        return {each for each, size in sizes.items() if SMALLEST <= size <= LARGEST}

    def _cause(self, call: Call, made_for: dict[str, str]) -> tuple[str, str]:
        """Why `call` needs something new, in words, and what changed, as a name under which such causes are counted."""
        if self._last is None:
            return "first call", ""
        was, words, variant = self._last
        changes = differences(words, made_for)
        attribute = call.facts.model.change_since(was.model, call.modules)
        if label := "" if attribute else variant.captured.first_change():
            return "; ".join([f"{label} changed", *changes]), label  # a capture for all sizes is not valid then
        if changes:
            names = ", ".join(change.partition(" changed from ")[0] for change in changes)
            return "; ".join([*changes, *(attribute or ())[:1]]), names
        if attribute:
            return attribute
        if setting := changed_setting(was, call.facts):
            return setting, setting
        if branch := variant.captured.other_branch(call.leaves):
            return f"the branch that the model takes by its arguments' values changed{branch.line}", _VALUES
        return "the layout of a tensor changed", "the layout of a tensor"

    def _drop_oldest(self) -> None:
        """Keep at most so many captures: of those for calls with other facts, the ones that were used last."""
        while len(self._groups) > 1 and sum(map(_captures, self._groups.values())) > _MOST_CAPTURES:
            self._groups.pop(next(iter(self._groups)))
        (*_, latest) = self._groups.values()
        while len(latest.fixed) > 1 and _captures(latest) > _MOST_CAPTURES:
            latest.fixed.pop(next(iter(latest.fixed)))


def _served_by(group: _Group, call: Call) -> tuple[DynamicStep, dict[tuple[int, ...], Variant], tuple[int, ...]] | None:
    """The capture with dynamic dimensions that is valid for `call`, its variants, and the sizes of these dimensions."""
    for step, variants in group.dynamic:
        values = step.symbols.values_in(call.sizes)
        if values is not None and step.captured.serves(call.leaves):
            return step, variants, values
    return None


def _require_equal_captures(step: DynamicStep, earlier: Mapping[tuple[int, ...], Variant]) -> None:
    """Raise a TraceError if `step` differs from one of the captures `earlier`, given by its sizes, at these sizes.

    A symbol is not an ``int`` and has no digits, so code that checks for either takes another branch without a guard.
    """
    for values, variant in earlier.items():
        one, other = operations_in(step.module.at(values)), operations_in(variant.captured.joint.graph_module)
        for (text, line), (expected, _) in zip_longest(one, other, fillvalue=("", "")):
            if text != expected:
                raise TraceError(
                    f"the model computes something else if a size is a symbol{line and f', first at {line}'}: the code "
                    "may check isinstance(size, int), or convert the size to a string"
                )


def _branches_alike(one: Capture, other: Capture) -> bool:
    """Whether the model took the same branches in two captures."""
    return [branch.answer for branch in one.branches] == [branch.answer for branch in other.branches]


def _captures(group: _Group) -> int:
    return sum(map(len, group.fixed.values())) + len(group.dynamic)


def _said(fixed: Mapping[Dimension, str], call: Call) -> str:
    names = [name for name, _ in named_leaves(call.args, call.kwargs)]
    tensors = {at for at, leaf in enumerate(call.leaves) if is_tensor(leaf)}
    words = {each: f"dimension {each.dim} of " if each.leaf in tensors else "" for each in fixed}
    return ", ".join(f"{words[each]}argument {names[each.leaf]}{line}" for each, line in fixed.items())
