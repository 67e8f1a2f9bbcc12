"""Record the plain values that a model's code reads outside its modules, and compare them at every call.

Such a value becomes a constant of the captured step. The capture therefore records which functions run, and finds the
values by the names in their code. Every call compares them, as it compares the attributes of modules. Not covered are
chains longer than ``cfg.model.scale``, objects in containers, containers of more than a hundred items, and what
properties and C extensions return.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import types
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from ackpt.errors import TraceError, warn

from .attributes import repeated_draws
from .closures_that_ran import Closures
from .value_walk import Value, Walk, closes_over, is_of_model, said

_CHECKPOINT = torch.utils.checkpoint._checkpoint_without_reentrant_generator.__code__
# The functions that seed. In regions the forward seeds again for the recomputation, which torch.seed does differently.
_SEEDING = {"seed": "", "manual_seed": "", "set_rng_state": ", as torch.random.fork_rng does"}
_REGIONS = "Plan with regions=True, which runs the forward itself. "
_RANDOM = os.path.abspath(torch.random.__file__)
_FOLDER = os.path.dirname(_RANDOM) + os.sep
_WRAPPERS = _RANDOM, _FOLDER + "_compile.py", _FOLDER + "_dynamo" + os.sep, contextlib.__file__  # for fork_rng


class Reads:
    """The values outside of a model's modules that its code reads when the model is called with `leaves`."""

    def __init__(self, model: nn.Module, leaves):
        self._roots = model, [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self._codes: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
        self._closures: Closures | None = Closures()  # until `finish`: later forwards run on tensors with data
        self._values: list[Value] = []
        self._watching: Any = None
        self._settles = True
        self._changed: list[tuple[dict, str, Any, Any, TraceError]] = []  # namespace, name, before, now, refusal
        self.has_checkpoints = False  # whether the model calls torch's own

    @contextlib.contextmanager
    def watched(self):
        """Watch the model's forward run inside; on exit, restore the plain values and RNG states that it changed.

        Raises:
            TraceError: if the forward seeds torch's generator, draws from a generator object, or changes a value,
                which the message names. A change that the capture may still `settle` is not an error, unless it is in
                a list or dict.
        """
        walk = self._walk()
        seen: dict[int, types.CodeType] = {}
        closing: set[int] = set()
        seeds: list[tuple[str, torch.Tensor]] = []  # saved on demand: an earlier copy would be measured
        # The garbage collector may call these at any moment; what runs inside them is not the model's.
        collectors = {id(callback.__code__) for callback in gc.callbacks if hasattr(callback, "__code__")}
        collecting = 0

        def called(frame, event, _):
            nonlocal collecting
            if collectors and event in ("call", "return") and id(frame.f_code) in collectors:
                collecting += 1 if event == "call" else -1
            if event != "call" or collecting > 0:
                return
            if id(code := frame.f_code) in closing and self._closures is not None:
                self._closures.add(frame)
            if id(code) in seen:
                return
            if code.co_name in _SEEDING and code.co_filename == _RANDOM:
                if _is_by_model(frame):
                    seeds.append((code.co_name, torch.default_generator.get_state()))
                return  # every call of these counts
            seen[id(code)] = code  # kept alive, so that its id is not reused
            if is_of_model(code.co_filename) and code.co_name != "<module>":
                self._codes[id(code)] = code, frame.f_globals
                walk.enter(code, frame.f_globals)
                for name in code.co_freevars:
                    walk.add(frame.f_locals.get(name), f"{name!r} of {said(code)}")
                if closes_over(code):
                    closing.add(id(code))
                    if self._closures is not None:
                        self._closures.add(frame)

        try:
            with _on_every_call(called) as self._watching:
                yield
        finally:
            self._watching = None
            if self._closures is not None:
                self._closures.ended()
            self.has_checkpoints |= id(_CHECKPOINT) in seen
            changed, others = walk.restored()
            drawn = walk.drawn_from()
            if seeds:
                torch.set_rng_state(seeds[0][1])
        if seeds:
            name, _ = seeds[0]
            raise TraceError(
                f"the forward calls torch.{name}{_SEEDING[name]}, which a captured step would not repeat. "
                f"{'' if name == 'seed' else _REGIONS}Draw such numbers once and store them in a buffer, or pass them "
                "as an argument."
            )
        if drawn:
            raise repeated_draws(drawn[0])
        if others:
            raise _refused(*others[0])
        refusals = [
            (value.namespace, value.name, value.was, now, _refused(value.label, value.was, now))
            for value, now in changed
        ]
        if refusals and not self.may_settle(refusals):
            raise refusals[0][-1]

    def start(self) -> None:
        """Call this before every forward."""
        if self._settles:
            self._changed = []

    @contextlib.contextmanager
    def watched_backward(self):
        """Inside, a backward of the model's own functions is `watched`, too, and may not change anything.

        Raises:
            TraceError: naming what it changes.
        """
        apply = torch.autograd.function.BackwardCFunction.apply

        def watched(node, *gradients):
            try:
                with self.watched():
                    return apply(node, *gradients)
            except TraceError as error:
                error.reason, error.can_split = error.reason or str(error), True
                raise

        with mock.patch.object(torch.autograd.function.BackwardCFunction, "apply", watched):
            yield

    def may_settle(self, changed: list[tuple]) -> bool:
        """Note ``(namespace, name, before, now, refusal)`` of the values that the first forward has changed.

        Returns:
            False for a later forward, or if there are none.

        Raises:
            TraceError: the refusal of the first change, if a later forward changes the same value again.
        """
        for namespace, name, *_ in changed if not self._settles else ():
            for first, first_name, *_, refusal in self._changed:
                if getattr(first, "cell", first) is getattr(namespace, "cell", namespace) and first_name == name:
                    raise refusal
        self._changed += changed if self._settles else []
        return self._settles and bool(changed)

    @property
    def is_settled(self) -> bool:
        """Whether the last forward changed none of the values."""
        return not self._changed

    @contextlib.contextmanager
    def settle(self):
        """Capture the step again inside, with the values as the model's first call left them.

        Many transformers models record in their configuration which kind of labels they receive, or in an attribute
        what they have computed. The new capture must equal the first one. Yields the error to raise otherwise. After an
        error, the original values are restored.

        Raises:
            TraceError: if the forward changes such a value again.
        """
        changed, self._settles = self._changed, False
        try:
            for namespace, name, _, now, _ in changed:
                namespace[name] = now
            yield changed[0][-1]
        except BaseException:
            for namespace, name, was, _, _ in changed:
                namespace[name] = was
            raise

    @contextlib.contextmanager
    def paused(self):
        """Stop watching inside, while torch's own code runs."""
        if self._watching is None:
            yield
            return
        hook, called = self._watching
        hook(None)
        try:
            yield
        finally:
            hook(called)

    def finish(self) -> None:
        """Call this once after the capture: it records the values that `are_same` compares with."""
        if self.has_checkpoints:
            warn_of_checkpoints()
        assert self._closures is not None
        walk = self._walk()
        walk.close_over(self._closures.functions())
        self._values = list(walk.values.values())
        self._closures = None
        self._codes.clear()

    def are_same(self) -> bool:
        """Whether all values are the same as at the end of the capture."""
        return not any(value.is_changed() for value in self._values)

    def first_change(self) -> str:
        """The first value that differs from the end of the capture, in words; empty if all are the same."""
        return next((value.label for value in self._values if value.is_changed()), "")

    def _walk(self) -> Walk:
        walk = Walk(*self._roots)
        for code, namespace in list(self._codes.values()):
            walk.enter(code, namespace)
        return walk


def warn_of_checkpoints() -> None:
    """Warn that the model calls torch's own checkpoint, which its plan ignores."""
    warn(
        "The model calls torch.utils.checkpoint itself. The plan alone decides what is recomputed, and a fractional "
        "budget is relative to the peak without torch's checkpointing, which differs from the model's own peak.",
    )


def _is_by_model(frame) -> bool:
    """Whether the model's code made this call, either directly or through torch's wrappers of the function."""
    while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and is_of_model(frame.f_code.co_filename)


def _refused(label: str, was, now) -> TraceError:
    return TraceError(
        f"the forward changes {label} from {was!r} to {now!r}, which a captured step would not repeat. Count in a "
        "buffer, in place, or outside of the model; if it changes only once, call the model once before it is captured."
    )


@contextlib.contextmanager
def _on_every_call(called):
    """Run ``called(frame, event, argument)`` at every call inside; yields ``(hook, called)`` to pause and resume."""
    previous: Any = sys.getprofile()
    is_free = previous is None or callable(previous) or hasattr(previous, "enable")
    hook: Any = sys.setprofile if is_free else sys.settrace
    was: Any = previous if is_free else sys.gettrace()
    hook(called)
    try:
        yield hook, called
    finally:
        hook(was if was is None or callable(was) else None)
        if was is not None and not callable(was):  # a hook written in C, such as cProfile's
            was.enable()
