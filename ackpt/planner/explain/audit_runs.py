"""Run a step for `ackpt.audit`: watched, with or without its checkpointing and offload, and undone afterwards.

`intercepted` replaces what torch's and this package's checkpointing look up in their own modules, so it does not matter
under which name a model imported them. `Watch` records regions, calls of modules, saved tensors and offload. `Undo`
puts back everything that a step changes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing import reentrant, rng
from ackpt.checkpointing.closures import bound
from ackpt.checkpointing.guards import MutableState, fill
from ackpt.checkpointing.reachable import PLAIN, ReachableState, global_names
from ackpt.checkpointing.region import Region
from ackpt.core.autograd_state import version
from ackpt.metering.resident import storages_of
from ackpt.planner.step.planned_step import PlannedStep

from .print_saved import _source, _storage

TORCH, REENTRANT, ACKPT = "torch", "torch, reentrant", "ackpt"
_WRAPPED = "_checkpoint_wrapped_module"
_OWN_HOOKS = (torch_checkpoint._checkpoint_hook, torch_checkpoint._recomputation_hook)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def in_backward() -> bool:
    """Whether this thread runs a backward; what calls a module there recomputes it."""
    return torch._C._current_graph_task_id() != -1


def path_of(name: str) -> str:
    """The path of a module without the parts that torch's checkpoint wrapper adds."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def referred(function, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function's code refers to: closure, globals, the object that a method belongs to."""
    if isinstance(function, functools.partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield "argument", value
            yield from referred(value, depth - 1) if depth else ()
        return
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        if not isinstance(function.__self__, nn.Module):
            yield from vars(function.__self__).items() if hasattr(function.__self__, "__dict__") else ()
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    values = [(name, cell.cell_contents) for name, cell in cells if bound(cell)]
    names = (name for name in global_names(function.__code__)[0] if name in function.__globals__)
    for name, value in (*values, *((name, function.__globals__[name]) for name in names)):
        yield name, value
        if depth and isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            yield from referred(value, depth - 1)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, on any devices, are equal bit for bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    return torch.equal(one, other) or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of a tensor subclass, such as a sharded one, where it is."""
    is_plain = type(tensor) in _PLAIN_TENSORS
    return tensor.detach().to("cpu", copy=True) if is_plain else tensor.detach().clone()


class Undo:
    """All that a step may change, copied to host memory: `restore` puts it back, `left` says what differs then."""

    def __init__(self, step, modules: dict[str, nn.Module], holders):
        objects = [value for _, value in referred(step)]
        self.reachable = ReachableState(step, (*modules.values(),))
        self.state = MutableState(self.reachable)
        named = {id(t): (name, t) for name, t in holders if isinstance(t, torch.Tensor)}
        named |= {id(t): (name, t) for t, name in self.reachable.tensors.values()}
        for path, module in modules.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                named[id(tensor)] = (path_of(f"{path}.{name}" if path else name), tensor)
        self.named = dict(named.values())
        self.leaves = {name: t for name, t in named.values() if t.is_leaf and t.requires_grad}
        self.grads = [(t, t.grad, None if t.grad is None else copied(t.grad)) for t in self.leaves.values()]
        optimizers = {id(o): o for _, o in (*holders, *enumerate(objects)) if isinstance(o, torch.optim.Optimizer)}
        self.optimizers = [
            (each, {p: dict(state) for p, state in each.state.items()}, [dict(group) for group in each.param_groups])
            for each in optimizers.values()
        ]
        states = (leaf for _, states, _ in self.optimizers for leaf in tree_leaves([*states.values()]))
        kept = [*named.values(), *(("of an optimizer", leaf) for leaf in states if isinstance(leaf, torch.Tensor))]
        self.tensors = [(name, tensor, copied(tensor)) for name, tensor in kept if not tensor.is_meta]
        # Schedules, scalers, averages of weights.
        others = [o for o in objects if not isinstance(o, (nn.Module, torch.optim.Optimizer, type))]
        self.others = [(o, copy.deepcopy(o.state_dict())) for o in others if hasattr(o, "load_state_dict")]
        self.containers = [(o, o.copy()) for o in others if type(o) in (list, dict, set)]
        self.streams = rng.snapshot(self.reachable.streams)
        places = {id(vars(m)): path_of(name) for p, root in modules.items() for name, m in root.named_modules(prefix=p)}
        self.counters = [
            (f"{places.get(id(names), '')}.{key}".removeprefix("."), names, key)
            for names, key, value in self.reachable.bindings
            if type(value) in (int, float)
        ]

    def restore(self) -> None:
        """Put everything back, in place, without incrementing version counters."""
        torch.clear_autocast_cache()
        self.state.undo()
        for optimizer, states, groups in self.optimizers:
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
            for group, values in zip(optimizer.param_groups, groups):
                fill(group, values)
        for each, state in self.others:
            each.load_state_dict(copy.deepcopy(state))
        for container, items in self.containers:
            fill(container, items)
        for _, tensor, value in self.tensors:
            _put_back(tensor, value)
        for tensor, gradient, value in self.grads:
            tensor.grad = gradient
            if gradient is not None:
                _put_back(gradient, value)
        for stream, state in self.streams:
            stream.set(state)

    def left(self) -> tuple[str, ...]:
        """What differs after `restore`, in words."""
        words = [f"tensor {name}" for name, tensor, value in self.tensors if not same(tensor, value)]
        words += [f"random numbers of {s.name}" for s, state in self.streams if _comparable(s) != s.comparable(state)]
        return tuple(words)

    def values(self) -> dict[str, Any]:
        """What the step has left, by a label: gradients, parameters, buffers, optimizer state, RNG, attributes."""
        values: dict[str, Any] = {}
        for name, tensor in self.named.items():
            if tensor.grad is not None and name in self.leaves:
                values[f"gradient {name}"] = copied(tensor.grad)
            values[f"{'parameter' if name in self.leaves else 'buffer'} {name}"] = copied(tensor)
        names = {id(tensor): name for name, tensor in self.named.items()}
        for optimizer, *_ in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors = ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))
                values |= {f"{key} {names.get(id(parameter), 'of an optimizer')}": copied(t) for key, t in tensors}
        values |= {f"random {stream.name}": _comparable(stream) for stream, _ in self.streams}
        return values | {f"attribute {label}": names.get(key) for label, names, key in self.counters}


def _comparable(stream):
    return stream.comparable(stream.get())


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not same(tensor, value) and tensor.shape == value.shape:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
            tensor.copy_(value)


@dataclass(eq=False)
class Run:
    """One region of a watched step: what it is, what it reads, and the module calls of each of its runs."""

    kind: str
    modules: tuple[str, ...]  # of which it is the forward; else those that it calls
    inputs: dict[int, int]  # bytes by storage
    replays_random: bool = True
    selective: bool = False
    parent: Run | None = None
    children: list[Run] = field(default_factory=list)
    calls: list[list[tuple[str, Any]]] = field(default_factory=list)  # of every run: (module, hash of its result)
    drew: tuple[str, ...] = ()  # the streams of random numbers that its forward drew from
    changed: list[str] = field(default_factory=list)  # what its recomputation read with another value
    dropped: dict[int, int] = field(default_factory=dict)  # bytes by storage that it saves where it is a plain call
    cursor: int = 0
    facts: _Facts | None = None  # from when its forward has ended

    @property
    def recomputations(self) -> int:
        return max(0, len(self.calls) - 1)


@dataclass
class Context:
    """What one kind of ``saved_tensors_hooks`` did in the step: bytes seen, moved off, and loaded back."""

    name: str
    entered: int = 0
    seen: int = 0
    copied: int = 0  # given as another tensor
    moved: int = 0  # of which the original was freed
    loaded: int = 0
    largest: int = 0
    least: int | None = None  # its threshold, if it has one
    on_cpu: bool = True  # all were on the CPU, where hooks for a GPU pass them on
    packed: list[tuple[weakref.ref, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Saved:
    """A tensor that the step saves for backward without checkpointing; `runs`: the regions around it."""

    storage: int
    bytes: int
    what: str
    module: str
    source: str
    runs: tuple[Run, ...]


class _Nothing:
    """An object without attributes."""


class _Node:
    """A saved tensor of a neutral run; it exists as long as autograd needs the tensor."""

    def __init__(self, tensor: torch.Tensor, module: str, source: str, runs: tuple[Run, ...]):
        self.tensor, self.module, self.source, self.runs = tensor, module, source, runs


class Watch:
    """Records a run of the step; if `quiet`, nothing. If `neutral`, checkpointing and offload are plain calls."""

    def __init__(self, modules: dict[str, nn.Module], neutral: bool, own_storages=frozenset(), quiet: bool = False):
        self.neutral, self.quiet = neutral, quiet
        self.names = {id(m): path_of(name) for p, root in modules.items() for name, m in root.named_modules(prefix=p)}
        self.own_storages = own_storages
        self.runs: list[Run] = []
        self.without_grad = 0
        self.calls: list[tuple[str, Any]] = []  # in the forward
        self.unknown: list[str] = []  # modules that ran in backward outside of every region
        self.contexts: dict[str, Context] = {}
        self.records: list[weakref.ref] = []
        self.saved: list[Saved] | None = None
        self.outputs: list[torch.Tensor] = []
        self.has_cache = False
        self._local = threading.local()
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    @property
    def _modules(self) -> list[str]:
        return self._local.__dict__.setdefault("modules", [])

    @property
    def _running(self) -> list[tuple[Run, list]]:
        return self._local.__dict__.setdefault("running", [])

    @contextlib.contextmanager
    def watching(self):
        """Record what runs in the body."""
        register = nn.modules.module
        handles = [
            register.register_module_forward_pre_hook(self._enter),
            register.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with intercepted(self), self._hooks if self.neutral else contextlib.nullcontext():
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module, args) -> None:
        self._modules.append(self.names.get(id(module), f"a {type(module).__name__}"))
        if in_backward() and not self._running:
            self.unknown.append(self._modules[-1])

    def _leave(self, module, args, output) -> None:
        path = self._modules.pop()
        if output is None:  # it failed, or a recomputation stopped early
            return
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        call = path, tuple(map(_digest, tensors))
        for _, calls in self._running:
            calls.append(call)
        if not in_backward():
            self.calls.append(call)
            self.keep_output(output)

    def keep_output(self, output) -> None:
        """Keep what a module returned, if no other module called it."""
        if not self._modules:
            self.outputs += [copied(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.has_cache |= bool(tree_leaves(vars(getattr(output, "past_key_values", None) or _Nothing())))

    @contextlib.contextmanager
    def region(self, function, args, kind: str, **options) -> Iterator[Run]:
        """A region's forward; within the recomputation of an outer region, the inner one's second run."""
        running = self._running
        if self.quiet:
            yield Run(kind, (), {})
            return
        if in_backward() and running:
            outer = running[-1][0]
            run = outer.children[outer.cursor] if outer.cursor < len(outer.children) else Run(kind, (), {})
            outer.cursor += 1
            with self._run(run):
                yield run
            return
        tensors = _tensors_of(function, args)
        inputs = {s._cdata: s.nbytes() for tensor in tensors for s in storages_of(tensor)}
        inputs = {key: size for key, size in inputs.items() if key not in self.own_storages}
        run = Run(kind, self._owners(function), inputs, parent=running[-1][0] if running else None, **options)
        (self.runs if run.parent is None else run.parent.children).append(run)
        reachable = ReachableState(function)
        facts, before = _Facts(function, reachable, tensors, self.names), rng.snapshot(reachable.streams)
        try:
            with self._run(run):
                yield run
        finally:
            run.drew = tuple(_stream_name(stream) for stream, _ in rng.drawn_from(before))
            run.facts = facts
            if not run.modules:
                called = [path for path, _ in run.calls[0]]
                run.modules = tuple(p for p in dict.fromkeys(called) if not any(p.startswith(f"{c}.") for c in called))

    @contextlib.contextmanager
    def _run(self, run: Run):
        calls: list[tuple[str, Any]] = []
        run.calls.append(calls)
        run.cursor = 0
        self._running.append((run, calls))
        try:
            yield
        finally:
            self._running.pop()

    def again(self, run: Run, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which reports its calls in backward as recomputations of `run`."""

        def call(*args, **kwargs):
            if not in_backward() or run.facts is None:
                return function(*args, **kwargs)
            with self.recomputing(run, _tensors_of(function, (args, kwargs))):
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def recomputing(self, run: Run, tensors=()):
        """A recomputation of a region; `tensors`: its arguments."""
        run.changed += [] if run.facts is None else run.facts.changes(tensors)
        with self._run(run):
            yield

    def _owners(self, function) -> tuple[str, ...]:
        """The module whose forward a region is."""
        while isinstance(function, functools.partial):
            of_module = [each for each in function.args[:1] if isinstance(each, nn.Module)]
            function = of_module[0] if of_module else function.func
        if isinstance(function, types.MethodType):
            function = function.__self__
        return (self.names[id(function)],) if id(function) in self.names else ()

    def _pack(self, tensor: torch.Tensor):
        module = self._modules[-1] if self._modules else ""
        node = _Node(tensor.detach(), module, _source(), tuple(run for run, _ in self._running))
        self.records.append(weakref.ref(node))
        return node

    def _unpack(self, node) -> torch.Tensor:
        if self.saved is None:
            self.saved = self._live()
        return node.tensor

    def _live(self) -> list[Saved]:
        """What is saved when backward begins, every storage once."""
        saved: dict[Any, Saved] = {}
        for node in filter(None, (record() for record in self.records)):
            key, tensor = _storage(node.tensor), node.tensor
            if key and key not in saved and not self.own_storages.intersection(key):
                shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                size = sum(storage.nbytes() for storage in storages_of(tensor))
                saved[key] = Saved(key[0], size, shape, node.module, node.source, node.runs)
            for run in node.runs if key and not self.own_storages.intersection(key) else ():
                run.dropped[key[0]] = sum(storage.nbytes() for storage in storages_of(tensor))
        self.records.clear()
        return [*saved.values()]

    def offload(self, hooks, enter) -> None:
        """Enter a user's ``saved_tensors_hooks``, and record what they do with the tensors."""
        owner = getattr(hooks.pack_hook, "__self__", hooks)
        name = "offload of ackpt" if type(owner).__module__.startswith("ackpt.") else type(owner).__name__
        context = self.contexts.setdefault(name, Context(name))
        context.entered += 1
        settings = (*vars(owner).items(), *vars(hooks).items(), *referred(hooks.pack_hook))
        context.least = next((value for key, value in settings if "min" in key and type(value) is int), context.least)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def packing(tensor):
            storages = storages_of(tensor)
            if not self.own_storages.isdisjoint(storage._cdata for storage in storages):
                return pack(tensor), None
            size = tensor.numel() * tensor.element_size()
            context.seen += size
            context.largest = max(context.largest, size)
            context.on_cpu &= tensor.device.type == "cpu"
            references = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
            context.packed += references
            packed = pack(tensor)
            others = [_storage(leaf) for leaf in tree_leaves(packed) if isinstance(leaf, torch.Tensor)]
            if others and not (isinstance(hooks, save_on_cpu) and tensor.device.type == "cpu"):
                context.copied += size if _storage(tensor) not in others else 0
            return packed, references

        def unpacking(packed):
            packed, references = packed
            self._begin_backward()
            tensor = unpack(packed)
            for reference, _ in references or ():
                context.loaded += tensor.numel() * tensor.element_size() if reference() is None else 0
            return tensor

        hooks.pack_hook, hooks.unpack_hook = packing, unpacking
        try:
            enter(hooks)
        finally:
            hooks.pack_hook, hooks.unpack_hook = pack, unpack

    def _begin_backward(self) -> None:
        """Count what was freed, because its bytes are elsewhere, when backward begins."""
        for context in self.contexts.values():
            context.moved += sum(size for reference, size in context.packed if reference() is None)
            context.packed.clear()


class _Facts:
    """The plain values and the versions of the tensors that a region's code reads, to compare in the recomputation."""

    def __init__(self, function, reachable: ReachableState, tensors, names):
        plain = [each for each in reachable.bindings if type(each[2]) in PLAIN]
        tensors_bound = [each for each in reachable.bindings if isinstance(each[2], torch.Tensor)]
        self._values = [*plain, *((names, key, weakref.ref(value)) for names, key, value in tensors_bound)]
        self._closure = function, {name: v for name, v in referred(function) if type(v) in PLAIN}
        self._state = [(name, weakref.ref(t), version(t)) for t, name in reachable.tensors.values()]
        self._places = {id(vars(m)): m for m in _modules_in(function)}
        self._names = names
        self._inputs = [version(tensor) for tensor in tensors]

    def changes(self, tensors) -> list[str]:
        changed = []
        for names, key, value in self._values:
            present, is_tensor = names.get(key), isinstance(value, weakref.ref)
            if present is value() if is_tensor else present is value or present == value:
                continue
            module = self._names.get(id(self._places.get(id(names))))
            where = f"attribute {key!r} of module {module!r}" if module is not None else f"{key!r}"
            how = "is another tensor" if is_tensor else f"was {value!r} in the forward and is {present!r}"
            changed.append(f"{where} {how} in the recomputation")
        function, closure = self._closure
        for name, present in referred(function):
            if name in closure and type(present) in PLAIN and present != closure.pop(name, present):
                changed.append(f"{name!r} of the region's code is {present!r} in the recomputation")
        for name, reference, before in self._state:
            tensor = reference()
            if tensor is not None and version(tensor) != before:
                changed.append(f"tensor {name!r} changed after the forward began")
        for number, (tensor, before) in enumerate(zip(tensors, self._inputs)):
            if version(tensor) != before:
                changed.append(f"input {number} of the region, of shape {list(tensor.shape)}, was changed in place")
        return changed


def _modules_in(function) -> Iterator[nn.Module]:
    values = [function, getattr(function, "__self__", None), *(value for _, value in referred(function))]
    for value in (each for each in values if isinstance(each, nn.Module)):
        yield from value.modules()


def _tensors_of(function, args) -> list[torch.Tensor]:
    """The tensors among the arguments of a region, and those that a partial function adds."""
    given = [args]
    while isinstance(function, functools.partial):
        given += [function.args, function.keywords]
        function = function.func
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _stream_name(stream) -> str:
    is_own = getattr(stream, "generator", None)
    devices = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_available() else ())]
    return stream.name if is_own is None or any(is_own is each for each in devices) else "a torch.Generator"


def _digest(tensor: torch.Tensor):
    """A value that differs where two tensors differ; None if it cannot be computed."""
    try:
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            total = flat.sum(dtype=torch.float64)
            return tuple(tensor.shape), tensor.dtype, torch.hash_tensor(flat).item(), total.view(torch.int64).item()
    except (RuntimeError, TypeError, NotImplementedError):
        return None


@contextlib.contextmanager
def intercepted(watch: Watch):
    """Let `watch` see regions and offload in the body; if it is neutral, they are plain calls."""
    generator, apply = (
        torch_checkpoint._checkpoint_without_reentrant_generator,
        torch_checkpoint.CheckpointFunction.apply,
    )
    enter, leave, forward = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__, PlannedStep.forward
    first_forward, recompute = Region.first_forward, Region.recompute
    signature, started = inspect.signature(generator), {}

    def non_reentrant(function, *rest, **kwargs):
        given = signature.bind(function, *rest, **kwargs).arguments
        if not torch.is_grad_enabled():
            watch.without_grad += 1
            yield
            return
        context_fn = given.get("context_fn", torch_checkpoint.noop_context_fn)
        options = {"selective": context_fn is not torch_checkpoint.noop_context_fn}
        options["replays_random"] = given.get("preserve_rng_state", True)
        with watch.region(function, (given.get("args"), kwargs), TORCH, **options) as run:
            if watch.neutral:  # contexts of a user may set a precision; those that save operations are left out
                context = context_fn()[0]
                with contextlib.nullcontext() if isinstance(context, TorchDispatchMode) else context:
                    yield
            else:
                yield from generator(watch.again(run, function), *rest, **kwargs)

    def reentrant_apply(function, preserve, *args):
        if not torch.is_grad_enabled():
            watch.without_grad += 1
            return function(*args)
        with watch.region(function, args, REENTRANT, replays_random=preserve) as run:
            return function(*args) if watch.neutral else apply(watch.again(run, function), preserve, *args)

    def plain(function, args, kwargs, preserve, offload):
        if isinstance(owner := getattr(function, "__self__", None), nn.Module):
            reentrant._modules_run.add(owner)
        with watch.region(function, (args, kwargs), ACKPT, replays_random=preserve):
            return function(*args, **kwargs)

    def first(region):
        with watch.region(region.function, region.inputs, ACKPT, replays_random=region.preserve_rng_state) as run:
            started[id(region)] = region, run
            return first_forward(region)

    def second(region, *args):
        run = started.get(id(region), (None, None))[1]
        with contextlib.nullcontext() if run is None else watch.recomputing(run):
            return recompute(region, *args)

    def entered(hooks):
        if hooks is watch._hooks or (isinstance(hooks, _OWN_HOOKS) and not watch.neutral):
            return enter(hooks)
        if not watch.neutral:
            watch.offload(hooks, enter)

    def left(hooks, *error):
        return leave(hooks, *error) if hooks is watch._hooks or not watch.neutral else None

    def planned(step, *args, **kwargs):
        model = step._ackpt_planned.model
        if watch.neutral:
            return model._call_impl(*args, **kwargs)
        hooks = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
        with contextlib.ExitStack() as stack:  # a capture must not see the watch
            for each in hooks:
                stack.enter_context(mock.patch.dict(each, clear=True))
            output = forward(step, *args, **kwargs)
        watch.keep_output(output)
        return output

    patches = [
        (torch_checkpoint, "_checkpoint_without_reentrant_generator", non_reentrant),
        (torch_checkpoint.CheckpointFunction, "apply", staticmethod(reentrant_apply)),
        *([(reentrant, "_run", plain), (reentrant, "_outside_dynamo", lambda: plain)] if watch.neutral else ()),
        *([] if watch.neutral else ((Region, "first_forward", first), (Region, "recompute", second))),
        (saved_tensors_hooks, "__enter__", entered),
        (saved_tensors_hooks, "__exit__", left),
        (PlannedStep, "forward", planned),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
