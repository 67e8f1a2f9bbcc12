"""The captures of one `PlannedStep`, and which of them runs a given call.

A call is looked up by its facts and its sizes (`call_facts`). New sizes first ask the captures with dynamic dimensions;
if sizes differ from earlier ones in some dimensions, the step is captured once more with these dimensions dynamic. A
model that cannot be captured as one graph is planned in parts.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ackpt.core.errors import BudgetError, TraceError
from ackpt.core.history import History
from ackpt.core.progress import shown
from ackpt.planner.capture.aot import CAPTURING, Capture, capture
from ackpt.planner.capture.call_facts import Call, Facts, Sizes, WatchedModel, call_of, changed_setting
from ackpt.planner.capture.dynamic_sizes import LARGEST, SMALLEST, Dimension, is_sized, layout, operations_in
from ackpt.planner.capture.inspection.calls import (
    another_plan,
    described,
    differences,
    named_leaves,
    other_bytes,
    sliced,
)
from ackpt.planner.capture.inspection.model_checks import is_tensor, warn_of_hooks
from ackpt.planner.parts.planned_regions import PlannedRegions
from ackpt.planner.request import Request, declared, declared_bounds, named_dimensions, undeclared_equals
from ackpt.planner.schedule.plan import Plan, PlanError
from ackpt.planner.schedule.rewriting import RewriteError

from .compiled_schedule import backward_node, before_backward, fates_of_outputs, withheld
from .plans import CapturedStep, PlanAt, plan_function, saved_dimensions
from .uncovered import Room, Uncovered

_MOST_CAPTURES = 64
_MOST_DYNAMIC = 8  # of one group; sizes that none of them serves are then captured one by one
_MOST_ALONE = 3  # captures with dynamic dimensions, one after the other, that served one size each
_PASS_AS_TENSOR = "Pass what changes at every step as a tensor, or change it once per epoch."
_VALUES = "the values of its arguments"
_ONE_BRANCH = "Prepare batches that take few branches there, for example by padding all of them."
_FEW_SIZES = "Pad the batches to a few sizes, or change the model there."
_LET_DYNAMIC = "Leave dynamic at None, so that one capture serves several sizes."


@dataclass(frozen=True)
class Variant:
    """What runs calls of some sizes: ``run`` with the inputs of ``captured``.

    ``make_plan`` returns the `Plan`. ``fates``: by index, the outputs that are no inputs, from `fates_of_outputs`.
    ``withheld``: by place, outputs that are not computed.
    """

    captured: Capture
    run: Callable[[Sequence[torch.Tensor]], list[Any]]
    make_plan: Callable[[], Plan]
    uncovered: Uncovered
    fates: Mapping[int, str] = field(default_factory=dict)
    withheld: Mapping[int, Any] = field(default_factory=dict)

    def outputs(self, call: Call) -> Any:
        """The outputs of the planned step."""
        with CAPTURING:
            inputs = self.captured.inputs(call.modules, call.leaves)
        arguments = inputs[len(inputs) - len(self.captured.given) :]
        returned = self.uncovered.begin(inputs, arguments, lambda: self._room)
        outputs = self.run(inputs)
        if returned is not None and (node := backward_node(outputs)) is not None:
            before_backward(node, [returned(node, {at: (outputs[at], fate) for at, fate in self.fates.items()})])
        return self.captured.outputs(outputs, self.withheld)

    @cached_property
    def _room(self) -> Room | None:
        return Room.of(self.make_plan())


@dataclass
class _Group:
    """The variants of calls with equal facts.

    ``variants``: by the sizes of calls, the latest first; several where values differ that the code reads.
    ``captures``: those with dynamic dimensions, which may serve other sizes, the latest first, each with what it runs
    there. ``refused``: dimensions that cannot be dynamic; ``suspected``: those that the model fixed at a size that may
    be special, such as the length of a whole table; ``refusal``: the latest reason. ``fixed_plans``: sizes and plans
    of the latest capture without dynamic dimensions, whose search serves the first one with some.
    """

    variants: dict[Sizes, list[Variant]] = field(default_factory=dict)
    captures: list[tuple[CapturedStep, PlanAt]] = field(default_factory=list)
    refused: set[Dimension] = field(default_factory=set)
    suspected: set[Dimension] = field(default_factory=set)
    refusal: str = ""
    fixed_plans: tuple[Sizes, PlanAt] | None = None

    @property
    def alone(self) -> list[tuple[Sizes, Variant]]:
        """The variants that have a capture of their own, with their sizes."""
        pairs = ((sizes, variant) for sizes, variants in self.variants.items() for variant in variants)
        return [(sizes, variant) for sizes, variant in pairs if variant.captured.symbols is None]

    def __len__(self) -> int:
        return len(self.alone) + len(self.captures)

    def number_served(self, step: CapturedStep) -> int:
        """The number of sizes that a capture with dynamic dimensions runs."""
        return sum(variant.captured is step.captured for each in self.variants.values() for variant in each)

    def hand_over(self, variant: Variant, sizes: Sizes, other: "_Group") -> None:
        """Move the capture that was made last, which runs `variant` only, to `other`."""
        self.variants[sizes].remove(variant)
        if not self.variants[sizes]:
            del self.variants[sizes]
        other.variants.setdefault(sizes, []).insert(0, variant)
        if self.captures and self.captures[0][0].captured is variant.captured:
            other.captures.insert(0, self.captures.pop(0))
        other.fixed_plans, self.fixed_plans = self.fixed_plans, None
        other.refused |= self.refused
        other.suspected |= self.suspected
        other.refusal = self.refusal or other.refusal

    def drop_first(self) -> None:
        """Drop the variant with a capture of its own that was made first."""
        sizes = self.alone[0][0]
        first = [each for each in self.variants[sizes] if each.captured.symbols is None][-1]
        self.variants[sizes] = [each for each in self.variants[sizes] if each is not first]
        if not self.variants[sizes]:
            del self.variants[sizes]


class Variants:
    """The captures of one step, and what runs each call.

    `uncovered`: the memory that plans do not count; `opaque`: why the model is planned in parts from the first call on.
    """

    def __init__(self, model: nn.Module, request: Request, uncovered: Uncovered, opaque: str | None):
        self.model, self.request, self.uncovered = model, request, uncovered
        self.history = History()
        self._watched: WatchedModel | None = None
        self._groups: dict[Facts, _Group] = {}
        self._last: tuple[Facts, dict[str, str], Variant] | None = None  # no call, which would keep its tensors
        self._plan: tuple[Variant, Plan] | None = None
        self._regions: PlannedRegions | None = None
        if opaque is not None or request.regions:
            reason = opaque or "regions=True"
            self._regions = PlannedRegions(model, request, self.history, None, reason, uncovered.note_outputs)

    @property
    def plan(self) -> Any:
        """The `Plan` of the last call, or its `RegionsPlan`."""
        if self._regions is not None:
            return self._regions.plan
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

    def serving(self, call: Call) -> Any:
        """What serves `call`; captures and plans if nothing does yet.

        From the first call on that is not one graph, the model is planned in parts.
        """
        if self._regions is not None:
            return self._regions.serving(call)
        try:
            with CAPTURING:
                return self._variant_for(call)
        except TraceError as error:
            if not error.can_split:
                raise
            if not self.request.may_plan_in_parts:
                if hint := self.request.in_parts_hint:
                    error.args = (f"{str(error).rstrip('.')}. {hint}",)
                raise
            note_outputs = self.uncovered.note_outputs
            regions = PlannedRegions(self.model, self.request, self.history, error, error.reason, note_outputs)
            planned = regions.serving(call)
            self._regions = regions
            return planned

    def without_gradients(self, run: Callable[[], Any]) -> Any:
        """The outputs of `run`, a call of the model without gradients."""
        return (self.uncovered if self._regions is None else self._regions).without_gradients(run)

    def _variant_for(self, call: Call) -> Variant:
        group = self._groups.pop(call.facts, None) or _Group()
        self._groups[call.facts] = group  # now the one that was used last
        existing = group.variants.get(call.sizes, ())
        variant = next((each for each in existing if each.captured.serves(call.leaves)), None)
        if variant is None:
            with shown(), _disable_current_modes():  # a mode that observes the step must not see captures
                variant = self._new_variant(group, call)
            if variant.captured.reads.is_after_first_call:  # which may have set attributes of the model
                facts = self.call(call.args, call.kwargs).facts
                if facts != call.facts:  # the others were captured with the attributes as they were
                    after = self._groups.pop(facts, None) or _Group()
                    group.hand_over(variant, call.sizes, after)
                    if not group.variants:
                        del self._groups[call.facts]
                    self._groups[facts] = after
                if self._last is not None:
                    self._last = facts, self._last[1], self._last[2]
            self._drop_oldest()
        elif self._last is not None and variant is not self._last[-1]:
            self._last = (*self._last[:-1], variant)
        return variant

    def _new_variant(self, group: _Group, call: Call) -> Variant:
        declared_bounds(self.request.dynamic, self.model, call)  # only to raise for a size outside of the bounds
        made_for = described(self.model, call.args, call.kwargs, self.request.differentiate)
        cause, group_of_causes = self._cause(call, made_for)
        try:
            variant = self._variant_of_existing_capture(group, call, cause)
            if variant is None:
                variant = self._variant_of_new_capture(group, call, cause, group_of_causes)
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
        if self.request.on_plan is not None:
            self.request.on_plan(self.plan)
        return variant

    def _variant_of_existing_capture(self, group: _Group, call: Call, cause: str) -> Variant | None:
        """A variant for new sizes of a capture with dynamic dimensions."""
        start = time.perf_counter()
        for step, plan_at in group.captures:
            assert step.captured.symbols is not None
            sizes = step.captured.symbols.values_in(call.sizes)
            if sizes is None or not step.captured.serves(call.leaves):
                continue
            variant = self._add_variant(group, step, plan_at, call, sizes)
            self.history.add("plan", cause, time.perf_counter() - start)
            return variant
        return None

    def _variant_of_new_capture(self, group: _Group, call: Call, cause: str, group_of_causes: str) -> Variant:
        start = time.perf_counter()
        dimensions = self._dimensions(group, call)
        if dimensions:
            try:
                return self._variant_of_new_dynamic_capture(group, call, cause, dimensions)
            except (TraceError, RewriteError) as error:
                if dimensions & named_dimensions(self.request.dynamic, self.model, call):
                    raise
                if dimensions & self._dimensions_of_plan(call):
                    raise PlanError(f"this plan cannot serve these sizes, because {str(error).rstrip('.')}.") from error
                group.refused |= dimensions
                group.refusal = str(error)
                self.history.add("refused", f"dynamic dimensions of {cause}: {error}", time.perf_counter() - start)
                start = time.perf_counter()
        with self._capture(call) as captured:
            step = CapturedStep(captured, call, self.model, self.request.loop, self.request.compiler == "eager")
            plan_at = plan_function(step, self.request)
            variant = self._add_variant(group, step, plan_at, call, ())
            group.fixed_plans = None if self.request.dynamic is False else (call.sizes, plan_at)
        seconds = time.perf_counter() - start
        self.history.add("capture", cause, seconds, group=group_of_causes, advice=self._advice(group, group_of_causes))
        return variant

    def _advice(self, group: _Group, cause: str) -> str:
        """How to avoid captures of calls of `group`, one for each."""
        if cause == _VALUES:
            return _ONE_BRANCH
        if len({sizes for sizes, _ in group.alone}) == 1:
            return _PASS_AS_TENSOR
        if self.request.dynamic is False:
            return _LET_DYNAMIC
        return f"One capture cannot serve all: {group.refusal}. {_FEW_SIZES}" if group.refusal else _PASS_AS_TENSOR

    def _variant_of_new_dynamic_capture(
        self, group: _Group, call: Call, cause: str, dimensions: set[Dimension]
    ) -> Variant:
        start = time.perf_counter()
        with self._capture(call, sorted(dimensions)) as captured:
            step = CapturedStep(captured, call, self.model, self.request.loop)
        symbols, sizes = captured.symbols, step.sizes
        assert symbols is not None
        if fixed := symbols.fixed():
            named = named_dimensions(self.request.dynamic, self.model, call)
            if named := {each: line for each, line in fixed.items() if each in named}:
                hint = undeclared_equals(self.request.dynamic, self.model, call, named)
                raise TraceError(
                    f"the model works for one size only of {_said(named, call)}. {hint or 'Leave'} it out of dynamic, "
                    "or change that line so that it does not compare or convert the size."
                )
            group.refused |= set(fixed) & group.suspected
            group.suspected |= set(fixed)
            group.refusal = f"the model works for one size only of {_said(fixed, call)}"
            self.history.add("refused", f"one size only of {_said(fixed, call)}", time.perf_counter() - start)
        elif line := symbols.converted():
            group.refusal = f"the model converts a number that it computes from a size{line}"
        if not symbols.holds(sizes):
            raise TraceError(f"torch computes the sizes {list(sizes)} differently if they are symbols")
        answers = [branch.answer for branch in captured.branches]
        alone = ((layouts, each, [branch.answer for branch in each.captured.branches]) for layouts, each in group.alone)
        same = [(layouts, each) for layouts, each, others in alone if others == answers]
        earlier = {at: each for layouts, each in same if (at := symbols.values_in(layouts)) is not None}
        _require_equal_captures(step, earlier)
        bounds = declared_bounds(self.request.dynamic, self.model, call)
        largest = tuple((bounds.get(each) or (0, size))[1] for each, size in zip(step.dimensions, sizes))
        expected = [each for each in (sizes, largest, *earlier) if symbols.holds(each)]
        fixed_plans, group.fixed_plans = group.fixed_plans, None
        same_plans = None if fixed_plans is None else (symbols.values_in(fixed_plans[0]), fixed_plans[1])
        plan_at = plan_function(step, self.request, expected, same_plans)
        group.captures.insert(0, (step, plan_at))
        try:
            variant = self._add_variant(group, step, plan_at, call, sizes)
        except RewriteError:
            group.captures.pop(0)
            raise
        gc.collect()  # what the capture and the search left, which would otherwise take time in a later step
        self.history.add("dynamic capture", cause, time.perf_counter() - start)
        return variant

    @contextlib.contextmanager
    def _capture(self, call: Call, dimensions: Sequence[Dimension] = ()) -> Iterator[Capture]:
        model, request = self.model, self.request
        with capture(model, call.args, call.kwargs, request.differentiate, request.outputs, dimensions) as captured:
            if request.loop.loss is None:
                self.uncovered.note_outputs(captured.tangents)
            yield captured

    def _add_variant(
        self, group: _Group, step: CapturedStep, plan_at: PlanAt, call: Call, sizes: tuple[int, ...]
    ) -> Variant:
        """Choose and compile the schedule for `call`, whose dynamic dimensions have these sizes; add it to `group`."""
        choice = plan_at(sizes)
        run = self._checked(step.compiled(choice.schedule, sizes, choice.head_chunks), call)
        graph = step.in_chunks(choice.head_chunks)
        fates = fates_of_outputs(graph, choice.schedule)
        variant = Variant(step.captured, run, choice.plan, self.uncovered, fates, withheld(graph))
        group.variants.setdefault(call.sizes, []).insert(0, variant)
        return variant

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
        latest = [group.number_served(step) for step, _ in group.captures[:_MOST_ALONE]]
        if len(group.captures) >= _MOST_DYNAMIC or latest == [1] * _MOST_ALONE or self.request.is_captured_by_size:
            return set()
        chosen = declared(self.request.dynamic, self.model, call)
        if self.request.dynamic is not False:
            chosen |= self._dimensions_of_plan(call)
            changing = {dimension for step, _ in group.captures for dimension in step.dimensions}
            for sizes, _ in group.alone:
                changing |= _differing(sizes, call)
            are_all = self.request.dynamic is None  # declared otherwise, for tensors
            chosen |= {each for each in changing if are_all or not is_tensor(call.leaves[each.leaf])}
        sizes = {each: layout(call.leaves[each.leaf])[0][each.dim] for each in chosen - group.refused}
        return {each for each, size in sizes.items() if SMALLEST <= size <= LARGEST}

    def _dimensions_of_plan(self, call: Call) -> set[Dimension]:
        """The dimensions of `call` that must be dynamic for the plan of the request to serve it."""
        return set() if self.request.plan is None else saved_dimensions(self.request.plan, call)

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
        return self._changed_layout(variant, call), "the layout of a tensor"

    def _changed_layout(self, variant: Variant, call: Call) -> str:
        """The first argument whose memory is laid out otherwise than in the calls of `variant`, and what to pass."""
        variants = ((sizes, each) for group in self._groups.values() for sizes, each in group.variants.items())
        sizes = next((sizes for sizes, each in variants if any(one is variant for one in each)), call.sizes)
        names = [name for name, leaf in named_leaves(call.args, call.kwargs) if is_sized(leaf)]
        for name, (_, was, unused), (_, now, now_unused) in zip(names, sizes, call.sizes):
            if unused != now_unused:
                before, after = (
                    f"a slice of a tensor with {each} more bytes" if each else "a tensor of its own"
                    for each in (unused, now_unused)
                )
                return f"argument {name} is {after}, and was {before}: pass the clone() of a slice"
            if was != now:
                return f"the strides of argument {name} changed from {was} to {now}: pass its contiguous()"
        return "the memory that tensors share changed"

    def _drop_oldest(self) -> None:
        """Keep at most so many captures: of those for calls with other facts, the ones that were used last."""
        while len(self._groups) > 1 and sum(map(len, self._groups.values())) > _MOST_CAPTURES:
            self._groups.pop(next(iter(self._groups)))
        (*_, latest) = self._groups.values()
        while len(latest) > _MOST_CAPTURES:
            latest.drop_first()


def _differing(sizes: Sizes, call: Call) -> set[Dimension]:
    """The dimensions in which `call` has other sizes than `sizes`, unless one of them is less than 2."""
    places = [at for at, leaf in enumerate(call.leaves) if is_sized(leaf)]
    found = set()
    for at, (was, *_), (now, *_) in zip(places, sizes, call.sizes):
        pairs = enumerate(zip(was, now))
        found |= {Dimension(at, dim) for dim, (one, other) in pairs if one != other and min(one, other) >= SMALLEST}
    return found


def _require_equal_captures(step: CapturedStep, earlier: Mapping[tuple[int, ...], Variant]) -> None:
    """Raise a TraceError if `step` differs from one of the captures `earlier`, given by its sizes, at these sizes.

    A symbol is not an ``int`` and has no digits, so code that checks for either takes another branch without a guard.
    """
    assert step.module is not None
    for sizes, variant in earlier.items():
        one, other = operations_in(step.module.at(sizes)), operations_in(variant.captured.joint.graph_module)
        for (text, line), (expected, _) in zip_longest(one, other, fillvalue=("", "")):
            if text != expected:
                raise TraceError(
                    f"the model computes something else if a size is a symbol{line and f', first at {line}'}: the code "
                    "may check isinstance(size, int), or convert the size to a string"
                )


def _said(fixed: Mapping[Dimension, str], call: Call) -> str:
    names = [name for name, _ in named_leaves(call.args, call.kwargs)]
    tensors = {at for at, leaf in enumerate(call.leaves) if is_tensor(leaf)}
    words = {each: f"dimension {each.dim} of " if each.leaf in tensors else "" for each in fixed}
    return ", ".join(f"{words[each]}argument {names[each.leaf]}{line}" for each, line in fixed.items())
