"""Record the plain values that a model's code reads outside its modules, and compare them at every call.

Such a value becomes a constant of the captured step. The capture therefore records which functions run, and finds the
values by the names in their code. Not covered are containers of more than a hundred items, and what properties and C
extensions return.
"""

import contextlib
import contextvars
import gc
import os
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from ackpt.checkpointing.reachable import bound, tensors_in
from ackpt.core.errors import TraceError, warn

from .attributes import Change, plain
from .kept_tensors import Kept, NotConstant
from .source_lines import not_repeated
from .value_walk import Value, Walk, closes_over, drawn, functions_of, is_of_model

_CHECKPOINT = torch.utils.checkpoint._CheckpointFrame.__init__.__code__
# The functions that seed. In regions the forward seeds again for the recomputation, which torch.seed does differently.
_SEEDING = {"seed": "", "manual_seed": "", "set_rng_state": ", as torch.random.fork_rng does"}
_ADDING_HOOKS = {"register_hook", "register_prehook", "setup_input_hook", "setup_output_hook"}
_RANDOM = os.path.abspath(torch.random.__file__)
_FOLDER = os.path.dirname(_RANDOM) + os.sep
_WRAPPERS = _RANDOM, _FOLDER + "_compile.py", _FOLDER + "_dynamo" + os.sep, contextlib.__file__  # for fork_rng


class Reads:
    """The values outside of a model's modules that its code reads when the model is called with `leaves`."""

    def __init__(self, model: nn.Module, leaves):
        self._roots = model, [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self._codes: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
        self._closures: set[tuple[int, ...]] = set()  # ids of the code of functions that ran, and what they close over
        self._values: list[Value] = []
        self._watching: Any = None
        self.kept = Kept()
        self._is_first_capture = True
        self._changed: list[Change] = []
        self.is_after_first_call = False  # whether the values are as the model's first call would have left them
        self.places: list[Callable[[], bool]] = []  # see `ackpt.planner.capture.inspection.kept_tensors.places`
        self._has_hooks = False  # whether the forward adds hooks to its tensors or nodes
        self.has_checkpoints = False  # whether the model calls torch's own
        self._generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]

    @contextlib.contextmanager
    def watched(self, arguments=None):
        """Watch the model's forward run inside; on exit, restore the values and RNG states that it changed.

        Changes are refused unless this is the first capture, after which `after_first_call` may repeat it; so are
        tensors among its `arguments` that it stores, since every call has others. None: it is a backward.
        """
        if arguments is not None:
            gc.collect(0)  # the youngest generation then contains just what the forward and its backward create
        walk = self._walk(runs=True)
        seen: dict[int, types.CodeType] = {}
        seeds: list[tuple[str, torch.Tensor]] = []  # saved on demand: an earlier copy would be measured
        # The garbage collector may call these at any moment; what runs inside them is not the model's.
        collectors = {id(callback.__code__) for callback in gc.callbacks if hasattr(callback, "__code__")}
        collecting = 0

        def called(frame, event, function):
            nonlocal collecting
            if collectors and event in ("call", "return") and id(frame.f_code) in collectors:
                collecting += 1 if event == "call" else -1
            if event == "c_call" and function.__name__ in _ADDING_HOOKS:  # to a node
                self._has_hooks = True
            if event != "call" or collecting > 0:
                return
            if id(code := frame.f_code) in self._codes and closes_over(code):
                self._closures.add(walk.closure_of(frame))
            if id(code) in seen:
                return
            if code.co_name in _SEEDING and code.co_filename == _RANDOM:
                if _is_by_model(frame):
                    seeds.append((code.co_name, torch.default_generator.get_state()))
                return  # every call of these counts
            seen[id(code)] = code  # kept alive, so that its id is not reused
            self._has_hooks |= code.co_name in _ADDING_HOOKS
            if is_of_model(code.co_filename) and code.co_name != "<module>":
                self._codes[id(code)] = code, frame.f_globals
                walk.enter(code, frame.f_globals)
                self._closures.add(walk.closure_of(frame))
                walk.enter_closure(frame)

        try:
            with on_every_call(called) as self._watching:
                yield
        finally:
            self._watching = None
            self.has_checkpoints |= id(_CHECKPOINT) in seen
            changed = walk.restored()
            refused = [*walk.refused, *map(drawn, walk.drawn_from())]
            self._generators += walk.generators()
            if seeds:
                torch.set_rng_state(seeds[0][1])
        if seeds:
            name, _ = seeds[0]
            message = (
                f"the forward calls torch.{name}{_SEEDING[name]}, which a captured step would not repeat. Draw such "
                "numbers once and store them in a buffer, or pass them as an argument"
            )
            raise TraceError(f"{message}.") if name == "seed" else not_repeated(message)
        if refused:
            raise not_repeated(refused[0])
        given = set(map(id, arguments or ()))
        if stored := next((change for change in changed if not given.isdisjoint(tensors_in([change.now]))), None):
            raise not_repeated(stored.refusal)
        if changed and not self._is_first_capture:  # name what the first capture has changed, too, if it did
            keys = {change.key for change in changed}
            raise not_repeated(next((each for each in self._changed if each.key in keys), changed[0]).refusal)
        self._changed += changed

    def refuse_new_generators(self, module: torch.fx.GraphModule) -> None:
        """Refuse a captured `module` that draws from a generator of the forward's own: every step would draw on."""
        constants = [getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
        drawn = [each for each in constants if isinstance(each, torch.Generator)]
        if not all(any(_are_same(known, each) for known in self._generators) for each in drawn):
            raise not_repeated(
                "the forward draws random numbers from a torch.Generator that it creates, which a captured step would "
                "not repeat. Create it before, and store it in an attribute of the model"
            )

    def start(self) -> None:
        """Call this before every forward: it removes what the one before has left."""
        self.kept.start(lambda: self._changed.clear() if self._is_first_capture else None)

    @contextlib.contextmanager
    def watched_backward(self, modes):
        """Inside, a backward of the model's own functions is `watched`, and all of it if the forward adds hooks.

        `modes`: makes a context for the former, which torch runs without the forward's modes of functions.
        """
        grad, function = torch.autograd.grad, torch.autograd.function.BackwardCFunction

        def watched(run, context):
            def watching(*args, **kwargs):
                is_watched = self._watching is not None or (run is grad and not self._has_hooks)
                with contextlib.nullcontext() if is_watched else self.watched(), context():
                    return run(*args, **kwargs)

            return watching

        with mock.patch.object(function, "apply", watched(function.apply, modes)):
            with mock.patch.object(torch.autograd, "grad", watched(grad, contextlib.nullcontext)):
                yield

    def is_stable(self) -> bool:
        """Whether later calls read the same: the latest forward changed nothing, and nothing keeps its tensors."""
        return not self._changed and not self.kept.alive()

    @contextlib.contextmanager
    def after_first_call(self, mode):
        """Capture the step again inside, with the values and tensors as the model's first call would have left them.

        Many transformers models record in their configuration which kind of labels they receive, or in an attribute
        what they have computed; others fill a cache. The new capture must compute the same. Yields the error to raise
        otherwise. `mode`: a context in which to compute the tensors.
        """
        tensors = self.kept.alive()
        error = not_repeated(self._changed[0].refusal if self._changed else _kept_message(tensors[0][1]))
        is_constant = False
        with contextlib.suppress(NotConstant):
            self.kept.give_data([tensor for tensor, _ in tensors], mode)
            is_constant = True
        del tensors  # the error may outlive them
        if not is_constant:
            raise error
        self._is_first_capture, self.is_after_first_call = False, True
        for change in self._changed:
            change.repeat()
        yield error
        if again := self.kept.alive():
            raise not_repeated(_kept_message(again[0][1]))

    def undo(self) -> None:
        """Leave everything that the model's code keeps as it was before the capture."""
        if not self._is_first_capture:
            for change in reversed(self._changed):
                change.revert()
        self._changed, self._is_first_capture, self.is_after_first_call = [], True, False
        self.kept.forget()

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
        walk = self._walk()
        for function in functions_of([code for code, _ in self._codes.values() if closes_over(code)]):
            values = (cell.cell_contents if bound(cell) else None for cell in function.__closure__ or ())
            if (id(function.__code__), *map(id, values)) in self._closures:  # others have the code, but did not run
                walk.close_over([function])
        self._values = list(walk.values.values())
        for value in self._values:
            value.original = value.owner = None
        self.kept.finish()
        self._changed.clear()
        self._codes.clear()
        self._closures.clear()

    def are_same(self) -> bool:
        """Whether all values are the same as at the end of the capture."""
        return not any(value.is_changed() for value in self._values) and all(is_same() for is_same in self.places)

    def first_change(self) -> str:
        """The first value that differs from the end of the capture, in words; empty if all are the same."""
        return next((value.label for value in self._values if value.is_changed()), "")

    def _walk(self, runs: bool = False) -> Walk:
        walk = Walk(*self._roots, runs)
        for code, namespace in list(self._codes.values()):
            walk.enter(code, namespace)
        return walk


def warn_of_checkpoints() -> None:
    """Warn that the model calls torch's own checkpoint, which its plan ignores."""
    warn(
        "The model calls torch.utils.checkpoint itself. The plan alone decides what is recomputed: running statistics "
        "of batch norms change once per step, not twice as in torch's checkpoint, and a fractional budget is relative "
        "to the peak without torch's checkpointing, which differs from the model's own peak."
    )


def in_own_context(call):
    """``call()``, after which context variables and torch's default dtype and device must be what they were before."""
    before, context = contextvars.copy_context(), contextvars.copy_context()
    dtype, device = torch.get_default_dtype(), _default_device()
    left = ""
    try:
        result = context.run(call)
    finally:
        if torch.get_default_dtype() != dtype:
            left = "dtype"
            torch.set_default_dtype(dtype)
        if _default_device() != device:
            left = "device"
            torch.set_default_device(device)
    if left:
        raise not_repeated(
            f"the forward changes torch's default {left} and does not restore it, which a captured step would not do. "
            "Set it before the forward, restore it there in a finally block"
        )
    for variable, value in context.items():
        was = before.get(variable)
        if was is not value and (plain(value) not in (None, plain(was)) or tensors_in([value])):
            raise not_repeated(
                f"the forward sets the context variable {variable.name!r}, which a captured step would not do. Set it "
                "before the forward, or store what it contains in a buffer"
            )
    return result


def _default_device() -> torch.device | None:
    """The device of ``torch.set_default_device``, without the tensor that torch's own function creates."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _are_same(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether these are one generator, of which the graph has another Python object."""
    state, seed = one.get_state(), other.initial_seed() ^ 1
    one.manual_seed(seed)
    try:
        return other.initial_seed() == seed
    finally:
        one.set_state(state)


def _is_by_model(frame) -> bool:
    """Whether the model's code made this call, either directly or through torch's wrappers of the function."""
    while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and is_of_model(frame.f_code.co_filename)


def _kept_message(made: str) -> str:
    """The refusal of a tensor that something keeps; `made`: where the model's code made it."""
    return (
        f"the model's code stores a tensor that it computes {made}: in a hook, a global or another object, which a "
        "captured step would not do. Return the tensor as an output of the model, remove the hook by its handle's "
        "remove()"
    )


@contextlib.contextmanager
def on_every_call(called):
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
