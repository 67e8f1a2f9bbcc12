"""`PlannedRegions`: choose regions and planned modules by measuring real steps, and check every step against a bound.

It replaces `Variants` in a `PlannedStep` whose model cannot be captured as one graph.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ackpt.budget import dynamic_limit, is_share, readable
from ackpt.capture.inspection.calls import described
from ackpt.capture.inspection.model_checks import own_call
from ackpt.capture.inspection.tensors import has_data, is_tensor
from ackpt.capture.inspection.transformers_caches import flatten_outputs
from ackpt.capture.optimizer_state import loop_bytes, scaled_loss_bytes
from ackpt.capture.outputs import dropped_before_backward, gradients_before_backward, without_gradient
from ackpt.errors import BudgetError, TraceError, warn
from ackpt.metering.meter import memory_format
from ackpt.metering.resident import storages_of
from ackpt.running.call_facts import Call, Sizes
from ackpt.running.planned_step import PlannedStep
from ackpt.running.variants import Variants

from .calls import GuardedCall, PlannedCall, RegionCall, installed
from .ladder import Choices, Combination, needed_bytes
from .live_bytes import LiveBytes
from .measured_step import MeasuredStep, backward, first_difference
from .parts import Parts
from .regions_plan import RegionsPlan
from .saved_bytes import SavedBytes
from .search import Measured, Search, choices_of, seeds, unless_out_of_memory
from .step_profile import StepProfile, sums_differently

_LARGER = "Plan with the batch that needs the most, or give a larger budget; on_exceed='warn' lets such steps run."
_MOST_SIZES = 10_000  # of steps that need not be counted again
_CALL = nn.Module._call_impl.__code__


class _Served(NamedTuple):
    """What runs calls with sizes up to ``sizes``: ``run`` and ``outputs`` are the same function of a call."""

    sizes: Sizes
    plan: RegionsPlan
    outputs: Callable[[Call], Any]

    @property
    def run(self) -> Callable[[Call], Any]:
        return self.outputs


class PlannedRegions:
    """The plans of a step in parts, and what runs each call.

    Args:
        variants: of the step, whose capture as one graph was refused.
        budget, policy: as in `ackpt.compile`; ``"full"`` is the combination with the lowest peak.
        part: makes the planned step of a module, from the module and its budget as a fraction.
        warns: whether a step that exceeds its bound gives a warning instead of an error.
        error: of the capture; None if the user asked for regions or the model contains a scripted module.
        reason: why the model is not one graph.
    """

    def __init__(
        self,
        variants: Variants,
        budget: float | str | None,
        policy: str,
        part: Callable[[nn.Module, float], PlannedStep],
        warns: bool,
        error: TraceError | None,
        reason: str,
    ):
        self.model, self.planner, self.loop = variants.model, variants.planner, variants.loop
        self.differentiate, self.outputs, self.dynamic = variants.differentiate, variants.outputs, variants.dynamic
        self.history, self.call, self.on_plan = variants.history, variants.call, variants.on_plan
        self.budget, self.policy, self.warns, self.reason = budget, policy, warns, reason
        self._part, self._error = part, error
        self._served: dict[Any, list[_Served]] = {}
        self._last: _Served | None = None
        self._steps: dict[tuple[str, float], PlannedStep] = {}
        self._lock = threading.RLock()  # the calls of modules are replaced while a forward runs

    @property
    def plan(self) -> RegionsPlan:
        """The plan of the last call."""
        if self._last is None:
            raise AttributeError("this step has not been planned yet")
        return self._last.plan

    def of(self, call: Call) -> _Served:
        """What runs `call`; plans if it is larger than all calls so far, or differs in other ways than its sizes."""
        facts = call.facts
        tensors = tuple(leaf if isinstance(leaf, tuple) else type(leaf) for leaf in facts.leaves)
        key = facts.spec, tensors, tuple(facts.model.tensors), tuple(facts.model.training), facts.autocast
        plans = self._served.setdefault(key, [])
        served = next((each for each in plans if _is_within(call.sizes, each.sizes)), None)
        if served is None:
            start = time.perf_counter()
            with self._lock:
                served = self._planned(call)
            cause = f"{self.reason}; {served.plan!r}"
            self.history.add("regions", cause, time.perf_counter() - start)
            plans.append(served)
            self._last = served
            if self.on_plan is not None:
                self.on_plan(served.plan)
        self._last = served
        return served

    def _planned(self, call: Call) -> _Served:
        """Measure the step of `call` in several combinations, and choose the cheapest one within the budget."""
        if not has_data(self.model, call.leaves):
            raise self._error or TraceError(
                f"{self.reason}, so its parts are planned by measuring real steps, which fake and meta tensors do not "
                "allow: give a model and a batch with data"
            )
        step = MeasuredStep(self.model, call.args, call.kwargs, self.differentiate, self.outputs)
        choices, whole_cost = self._profiled(step)
        baseline = unless_out_of_memory(
            lambda: max((step.measured(seed=seed) for seed in seeds(step)), key=lambda run: run.dynamic_peak_bytes)
        )
        if baseline is None and self.budget is not None and is_share(self.budget):
            raise BudgetError(
                f"the budget {self.budget!r} is a fraction of the peak of the model's own step, which runs out of "
                "memory: give bytes, such as '6GiB'",
                None,
                self.budget,
            )
        gradient_bytes = sum(each.nbytes for each in self.model.parameters() if each.requires_grad)
        state_bytes, step_bytes, accumulated_bytes = loop_bytes(self.model, self.loop, gradient_bytes, step.on_cpu)
        search = Search(step, choices, self.calls, step_bytes, self.budget is not None and step.on_cpu)
        baseline_bytes = 0 if baseline is None else search.dynamic_bytes(baseline)
        own = baseline or search.measured(Combination(0, 0.0, {})).measurement
        resident = own.resident_bytes + state_bytes + accumulated_bytes + scaled_loss_bytes(self.loop, step.on_cpu)
        limit = dynamic_limit(self.budget, baseline_bytes, resident)
        chosen = search.cheapest({"none": None, "full": 0}.get(self.policy, limit))
        if limit is not None and chosen.dynamic_bytes > limit:
            raise self._infeasible(chosen, limit, resident)
        calls = self.calls(chosen.combination)
        self._check_bits(step, calls)
        sizes, kernel_bytes = self._counted(step, calls, chosen) if limit is not None else (set(), None)
        plan = RegionsPlan(
            limit_bytes=limit,
            peak_bytes=resident + chosen.dynamic_bytes,
            resident_bytes=resident,
            baseline_peak_bytes=None if baseline is None else resident + baseline_bytes,
            fates={path: option.fate for path, option in chosen.combination.options.items()},
            saved_bytes=chosen.saved_bytes,
            bound_bytes=None if limit is None else chosen.saved_bytes + limit - chosen.dynamic_bytes,
            kernel_bytes=kernel_bytes,
            cost=chosen.combination.cost / (whole_cost or 1.0),
            timeline=chosen.measurement.timeline,
            note=self.reason,
            made_for=described(self.model, call.args, call.kwargs, self.differentiate),
        )
        if limit is not None:
            for each, needed in needed_bytes(choices, chosen.combination.options):
                module = self.model.get_submodule(each.path)
                calls[module] = GuardedCall(module, needed, each.argument_bytes)
        return _Served(call.sizes, plan, lambda call: self._outputs(call, plan, calls, sizes))

    def _counted(self, step: MeasuredStep, calls, chosen: Measured) -> tuple[set[Any], int | None]:
        """The sizes of the example's steps, and the part of the measured peak that `LiveBytes` does not count.

        None if the step is not on a CPU, where later steps are not counted.
        """
        if not step.on_cpu:
            return set(), None
        sizes, most = set(), 0
        for seed in seeds(step):
            live, saved = LiveBytes(), SavedBytes(step.tensors)
            with step.undone(seed):
                step.run(lambda: _counting(calls, saved, live))  # noqa: B023
            sizes.add((live.sizes, saved.most_bytes))
            most = max(most, live.most_bytes)
        return sizes, max(0, chosen.measurement.dynamic_peak_bytes - most)

    def _profiled(self, step: MeasuredStep) -> tuple[Choices, float]:
        """The options of every module, and the cost of the whole step."""
        parts = Parts(self.model, self._error)
        profile = StepProfile(self.model, step.tensors, parts)
        try:
            self._saved_bytes(step, None)
        except TraceError:
            raise
        except Exception as error:  # the model fails in eager mode too
            raise self._error or error from error
        seed = max(seeds(step), key=lambda seed: self._saved_bytes(step, seed)) if step.draws else None
        with step.undone(seed):
            outputs, roots = step.forward(profile.watching)
            differing = sums_differently(profile.root, roots)
            del outputs
            with profile.counting_backward():
                backward(roots)
        return choices_of(profile.root, parts, differing), profile.cost

    def _saved_bytes(self, step: MeasuredStep, seed: int | None) -> int:
        """What autograd saves in a forward with these random numbers."""
        counter = SavedBytes(step.tensors)
        with step.undone(seed):
            step.forward(counter.counting)
        return counter.most_bytes

    def calls(self, combination: Combination) -> dict[nn.Module, Callable]:
        """What the modules of a combination run instead of themselves."""
        calls: dict[nn.Module, Callable] = {}
        for path, option in combination.options.items():
            module = self.model.get_submodule(path)
            if option.share is None:
                calls[module] = RegionCall(module)
            else:
                key = path, option.share
                if key not in self._steps:
                    self._steps[key] = self._part(module, option.share)
                calls[module] = PlannedCall(self._steps[key], module, lambda why, path=path: self._refused(path, why))
        return calls

    def _refused(self, path: str, why: str) -> None:
        self.history.add("refused", f"a plan of module {path!r} for other arguments; it runs as a region: {why}", 0.0)

    def _check_bits(self, step: MeasuredStep, calls: dict[nn.Module, Callable]) -> None:
        """Raise if a result of the step in parts differs from the model's own in a bit."""
        if not step.on_cpu:
            return
        expected = step.results()
        name = first_difference(expected, step.results(lambda: _counting(calls, SavedBytes(step.tensors), LiveBytes())))
        if name is None:
            return
        if first_difference(expected, step.results()) is not None:
            raise TraceError(
                f"{self.reason}, and two steps of the model with the same random numbers give different results "
                f"({name}), so that its parts cannot be checked. Make the step reproducible, or use ackpt.checkpoint "
                "on its blocks."
            )
        raise TraceError(
            f"{self.reason}, and planned in parts, {name} differs from the model's own. Use "
            "ackpt.apply_activation_checkpointing with blocks of your choice, and please report this model."
        )

    def _infeasible(self, lowest: Measured, limit: int, resident: int) -> BudgetError:
        least = lowest.dynamic_bytes + resident
        return BudgetError(
            f"planned regions cannot keep the budget {self.budget!r}: it leaves {memory_format(max(0, limit))} for "
            f"what the step allocates, in addition to {memory_format(resident)} of parameters, buffers, inputs and "
            f"optimizer state. The smallest measured peak of the step in parts is {readable(least)} ({least} bytes). "
            f"The model is not one graph: {self.reason}.",
            least,
            self.budget,
        )

    def _outputs(self, call: Call, plan: RegionsPlan, calls: dict[nn.Module, Callable], sizes: set[Any]) -> Any:
        """The model's outputs, computed as planned; ``sizes``: of steps that were measured or counted.

        Raises:
            BudgetError: if autograd saves more bytes than the bound, or the forward allocates more than the budget.
        """
        is_reported = False

        def report(message: Callable[[], str]) -> None:
            nonlocal is_reported
            if not self.warns:
                raise BudgetError(message(), None, self.budget)
            if not is_reported:
                warn(message())
            is_reported = True

        live = None
        if plan.limit_bytes is not None and plan.kernel_bytes is not None:
            live = LiveBytes(
                plan.limit_bytes - plan.kernel_bytes,
                lambda size, node: report(lambda: self._allocates(size, node, plan)),
                lambda: _add(sizes, key),
            )
        resident = (*self.model.parameters(), *self.model.buffers(), *filter(is_tensor, call.leaves))
        counter = SavedBytes(resident, plan.bound_bytes, lambda size: report(lambda: self._saves(size, plan)))
        with self._lock, _counting(calls, counter, live):
            outputs = own_call(self.model)(*call.args, **call.kwargs)
        if live is not None and (key := (live.sizes, counter.most_bytes)) not in sizes:
            live.count_backward(flatten_outputs(outputs)[0])
        if plan.limit_bytes is not None:
            self._check_before_backward(outputs, counter, plan)
        return outputs

    def _check_before_backward(self, outputs, counter: SavedBytes, plan: RegionsPlan) -> None:
        """Raise in backward if there are gradients, or outputs that the caller holds, which the plan does not count."""
        leaves, _ = flatten_outputs(outputs)
        without = without_gradient(leaves, self.differentiate)
        tensors = [(at, leaf) for at, leaf in enumerate(leaves) if is_tensor(leaf)]
        root = next((leaf for at, leaf in tensors if leaf.grad_fn is not None and at not in without), None)
        live, limit = plan.timeline.live, plan.limit_bytes
        if root is None or limit is None:
            return
        if self.outputs == "drop":
            places = [
                at
                for at, leaf in tensors
                if (at in without or not leaf.requires_grad)
                and leaf.layout is torch.strided
                and not any(map(counter.counts, storages_of(leaf)))
            ]
            room = limit - max(live[plan.timeline.boundary or 0 :])
            dropped_before_backward(leaves, places, lambda: room, root.grad_fn)
        if not self.loop.accumulation:
            gradients_before_backward([root.grad_fn], list(self.model.parameters()), lambda: limit - max(live))

    def _saves(self, size: int, plan: RegionsPlan) -> str:
        bound = plan.bound_bytes or 0
        return (
            f"this step saves {memory_format(size)} for backward ({size} bytes) when it reaches {self._running()}, and "
            f"at most {memory_format(bound)} ({bound} bytes) keep the budget {self.budget!r}: the step was measured "
            f"with an example batch, in which autograd saved {memory_format(plan.saved_bytes)}. {_LARGER}"
        )

    def _allocates(self, size: int, node: str | None, plan: RegionsPlan) -> str:
        """`node`: of autograd, where the most is live; None in the forward."""
        limit, kernels = plan.limit_bytes or 0, plan.kernel_bytes or 0
        place = f"in backward, at {node}" if node is not None else f"when it reaches {self._running()}"
        inside = f", {kernels} of them inside of kernels, as measured" if kernels else ""
        return (
            f"this step allocates {memory_format(size + kernels)} ({size + kernels} bytes{inside}) {place}, and at "
            f"most {memory_format(limit)} ({limit} bytes) keep the budget {self.budget!r}: the example batch took "
            f"{memory_format(plan.dynamic_peak_bytes)}. {_LARGER}"
            + (" All gradients of this step are complete." if node is not None else "")
        )

    def _running(self) -> str:
        """The innermost module of the model that is running."""
        names = {id(module): name for name, module in self.model.named_modules() if name}
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL and (name := names.get(id(frame.f_locals["self"]))):
                return f"module {name!r} ({type(frame.f_locals['self']).__name__})"
            frame = frame.f_back
        return "the model's own forward"


@contextlib.contextmanager
def _counting(calls: dict[nn.Module, Callable], counter: SavedBytes, live: LiveBytes | None) -> Iterator[Any]:
    """Inside, a forward runs in parts and is counted; yields `live`."""
    with installed(calls), counter.counting(), contextlib.nullcontext() if live is None else live.counting():
        yield live


def _add(sizes: set[Any], key: Any) -> None:
    if len(sizes) >= _MOST_SIZES:
        sizes.clear()
    sizes.add(key)


def _is_within(sizes: Sizes, largest: Sizes) -> bool:
    """Whether no tensor is larger than the other call's in any dimension, or in the unused bytes of its storage."""
    pairs = zip(sizes, largest)
    return all(_at_most((*size, unused), (*most, most_unused)) for (size, _, unused), (most, _, most_unused) in pairs)


def _at_most(size: Sequence[int], most: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(size, most))
