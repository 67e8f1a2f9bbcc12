"""Run a step for `ackpt.audit`: watched, with or without its checkpointing and offload, and undone afterwards.

`intercepted` replaces what torch's and this package's checkpointing look up in their own modules, so it does not matter
under which name a model imported them. `Watch` records regions, calls of modules, saved tensors and offload. `Undo`
puts back everything that a step changes.
"""

import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing import guards, reentrant, rng
from ackpt.checkpointing.reachable import MODULE_FIELDS, PLAIN, ReachableState, bound, global_names
from ackpt.checkpointing.region import Region
from ackpt.core.autograd_state import version
from ackpt.metering.resident import storages_of
from ackpt.planner.parts.module_blocks import UndoableState
from ackpt.planner.step.planned_step import PlannedStep

from .print_saved import calls_seen_by, referred, source_line

TORCH, REENTRANT, ACKPT = "torch", "torch, reentrant", "ackpt"
_CONTAINERS, _DEPTH = (list, tuple, dict, set, frozenset, deque), 5
WRAPPED = "_checkpoint_wrapped_module"


def named_modules(roots: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module), without what torch's checkpoint wrapper adds to paths."""
    for prefix, root in roots.items():
        for name, module in root.named_modules(prefix=prefix):
            yield ".".join(part for part in name.split(".") if part != WRAPPED), module


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, on any devices, are equal bit for bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    as_bytes = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))  # nan equals itself
    return torch.equal(one, other) or torch.equal(*as_bytes)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of a tensor subclass, such as a sharded one, where it is."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return tensor.detach().to("cpu", copy=True) if is_plain else tensor.detach().clone()


class Undo:
    """All that a step may change, copied to host memory: `restore` puts it back, `left` says what differs then."""

    def __init__(self, step, modules: dict[str, nn.Module], given):
        objects = [value for _, value in referred(step)]
        reachable = ReachableState(step, (*modules.values(),))
        self.state = UndoableState(reachable)
        named = {id(t): (name, t) for name, t in given if isinstance(t, torch.Tensor)}
        named |= {id(t): (name, t) for t, name in reachable.tensors.values()}
        for path, module in named_modules(modules):
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            named |= {id(tensor): (f"{path}.{name}".lstrip("."), tensor) for name, tensor in own}
        self.named: dict[str, torch.Tensor] = {}
        for name, tensor in named.values():
            self.named[f"{name} ({len(self.named)})" if name in self.named else name] = tensor
        self.leaves = {name: t for name, t in self.named.items() if t.is_leaf and t.requires_grad}
        self.grads = [(t, t.grad, None if t.grad is None else copied(t.grad)) for t in self.leaves.values()]
        optimizers = {id(o): o for o in (*dict(given).values(), *objects) if isinstance(o, torch.optim.Optimizer)}
        self.optimizers = [
            (each, {p: dict(state) for p, state in each.state.items()}, [dict(group) for group in each.param_groups])
            for each in optimizers.values()
        ]
        states = tree_leaves([[*states.values()] for _, states, _ in self.optimizers])
        kept = [*self.named.items(), *(("of an optimizer", leaf) for leaf in states if isinstance(leaf, torch.Tensor))]
        self.tensors = [(name, tensor, copied(tensor)) for name, tensor in kept]
        others = [o for o in objects if not isinstance(o, (nn.Module, torch.optim.Optimizer, type))]
        self.others = [(o, copy.deepcopy(o.state_dict())) for o in others if hasattr(o, "load_state_dict")]
        # Of a method's object, such as a trainer, and of the step's closure.
        attributes = [vars(o) for o in others if o is getattr(step, "__self__", None) and hasattr(o, "__dict__")]
        self.containers = [(o, o.copy()) for o in (*others, *attributes) if type(o) in (list, dict, set)]
        function = getattr(step, "__func__", step)
        self.cells = [
            (cell, cell.cell_contents) for cell in getattr(function, "__closure__", None) or () if bound(cell)
        ]
        written = global_names(function.__code__)[1] if isinstance(function, types.FunctionType) else ()
        self.globals = [(function.__globals__, name, function.__globals__.get(name)) for name in written]
        self.failed: set[str] = set()
        self.streams = rng.snapshot(reachable.streams)
        self.places = {id(vars(module)): path for path, module in named_modules(modules)}
        self.reachable = reachable
        changeable: list[Any] = []
        for _, _, value in _bindings_of(reachable):
            _fact(value, changeable)
        self.containers += [(each, copy.copy(each)) for each in changeable if hasattr(each, "clear")]

    def restore(self) -> None:
        torch.clear_autocast_cache()
        self.state.undo()
        for optimizer, states, groups in self.optimizers:
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
            for group, values in zip(optimizer.param_groups, groups):
                guards.fill(group, values)
        for each, state in self.others:
            try:
                each.load_state_dict(copy.deepcopy(state))
            except Exception as error:
                self.failed.add(f"{type(each).__name__}: {error}")
        for container, items in self.containers:
            guards.fill(container, items)
        for cell, value in self.cells:
            cell.cell_contents = value
        for namespace, name, value in self.globals:
            namespace[name] = value
        for tensor, gradient, _ in self.grads:
            tensor.grad = gradient
        values = [*((t, value) for _, t, value in self.tensors), *((g, v) for _, g, v in self.grads if g is not None)]
        for tensor, value in values:
            if not same(tensor, value) and tensor.shape == value.shape:
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                    tensor.copy_(value)
        for stream, state in self.streams:
            stream.set(state)

    def left(self) -> tuple[str, ...]:
        words = [f"tensor {name}" for name, tensor, value in self.tensors if not same(tensor, value)]
        moved = (s.name for s, state in self.streams if s.comparable(s.get()) != s.comparable(state))
        return (*words, *(f"random numbers of {name}" for name in moved), *sorted(self.failed))

    def values(self) -> dict[str, Any]:
        """What the step has left, by a label: gradients, parameters, buffers, optimizer state, RNG, attributes."""
        values: dict[str, Any] = {}
        for name, tensor in self.named.items():
            if self.optimizers or name not in self.leaves:
                values[f"{'parameter' if name in self.leaves else 'buffer'} {name}"] = copied(tensor)
            if name in self.leaves and tensor.grad is not None:
                values[f"gradient {name}"] = copied(tensor.grad)
        names = {id(tensor): name for name, tensor in self.named.items()}
        states = [item for optimizer, *_ in self.optimizers for item in optimizer.state.items()]
        for name, key, value in ((names.get(id(p), ""), *item) for p, state in states for item in state.items()):
            values |= {f"{key} {name}": copied(value)} if isinstance(value, torch.Tensor) else {}
        values |= {f"random {stream.name}": stream.comparable(stream.get()) for stream, _ in self.streams}
        for names, key, _ in _bindings_of(self.reachable):  # those that the step has added, too
            value = names.get(key)
            if type(value) in PLAIN or isinstance(value, _CONTAINERS):
                values[f"attribute {f'{self.places.get(id(names), str())}.{key}'.lstrip('.')}"] = _fact(value, [])
        return values


@dataclass(eq=False)
class AuditedRegion:
    """One region of a step: the paths of its modules, and its kind: ``"torch"``, ``"torch, reentrant"`` or ``"ackpt"``.

    ``inputs`` and ``dropped``: bytes by storage, of its inputs, and of what it would save without checkpointing.
    ``calls``: for each run, the first one in the forward, the modules that were called, with hashes of their results.
    ``drew``: the random number streams that it drew from. ``changed``: what its recomputation read with another value.

    Example:
        >>> from ackpt.planner.explain.audit_runs import AuditedRegion
        >>> region = AuditedRegion("torch", ("blocks.0",), {1: 1024})
        >>> region.saved_bytes, region.dropped_bytes, region.recomputations
        (1024, 0, 0)
    """

    kind: str
    modules: tuple[str, ...]
    inputs: dict[int, int]
    replays_random: bool = True
    dropped: dict[int, int] = field(default_factory=dict)
    inner: "list[AuditedRegion]" = field(default_factory=list)
    calls: list[list[tuple[str, Any]]] = field(default_factory=list)
    drew: tuple[str, ...] = ()
    changed: list[str] = field(default_factory=list)
    facts: Any = field(default=None, repr=False)  # what it reads, once its forward has ended

    @property
    def saved_bytes(self) -> int:
        return sum(self.inputs.values())

    @property
    def dropped_bytes(self) -> int:
        return sum(self.dropped.values())

    @property
    def recomputations(self) -> int:
        return max(0, len(self.calls) - 1)


@dataclass
class Context:
    """What one kind of ``saved_tensors_hooks`` did: bytes that it saw, copied, freed on the device, and loaded back.

    ``least``: its threshold, if it has one. ``on_cpu``: whether all was on the CPU, where hooks for a GPU do nothing.
    """

    name: str
    least: int | None = None
    seen: int = 0
    largest: int = 0
    copied: int = 0
    moved: int = 0
    loaded: int = 0
    on_cpu: bool = True
    packed: list[tuple[weakref.ref, int]] = field(default_factory=list)


@dataclass(frozen=True)
class SavedOutside:
    """A tensor that a step saves for backward, with the module and the line of code; ``regions``: those around it.

    Example:
        >>> from ackpt.planner.explain.audit_runs import SavedOutside
        >>> SavedOutside(2048, "float32[16, 32]", "head", "model.py:7").bytes
        2048
    """

    bytes: int
    tensor: str
    module: str
    source: str
    storage: int = 0
    regions: tuple[AuditedRegion, ...] = ()


class Watch:
    """Records a run of the step; if `quiet`, nothing. If `neutral`, checkpointing and offload are plain calls.

    ``calls``: of modules in the forward. ``unknown``: modules that backward ran outside of known regions. ``saved``:
    what a neutral run has saved when backward begins. ``outputs``: of the outermost modules.
    """

    def __init__(self, names: dict[int, str], neutral: bool, resident=frozenset(), quiet: bool = False):
        self.names, self.neutral, self.resident, self.quiet = names, neutral, resident, quiet
        self.regions: list[AuditedRegion] = []
        self.without_grad = 0
        self.calls: list[tuple[str, Any]] = []
        self.unknown: list[str] = []
        self.contexts: dict[str, Context] = {}
        self.saved: list[SavedOutside] | None = None
        self.outputs: list[torch.Tensor] = []
        self.has_cache = False
        self.records: list[weakref.ref] = []
        self.stack: list[str] = []  # of modules
        self.now: list[tuple[AuditedRegion, list]] = []  # regions that run, with the calls of this run
        self.hooks = saved_tensors_hooks(self._pack, self._unpack)

    @contextlib.contextmanager
    def watching(self):
        """Record what runs in the body."""
        hooks = self.hooks if self.neutral else contextlib.nullcontext()
        with calls_seen_by(self._enter, self._leave), intercepted(self), hooks:
            yield

    def _enter(self, module, args) -> None:
        path = self.names.get(id(module), f"a {type(module).__name__}")
        self.stack.append(path)
        self.unknown += [path] if _in_backward() and not self.now else []

    def _leave(self, module, args, output) -> None:
        path = self.stack.pop()
        if output is None:  # it failed, or a recomputation stopped early
            return
        call = path, tuple(_digest(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        for _, calls in self.now:
            calls.append(call)
        if not _in_backward():
            self.calls.append(call)
            self.keep_output(output)

    def keep_output(self, output) -> None:
        """Keep what a module returned, if no other module called it."""
        if not self.stack:
            self.outputs += [copied(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.has_cache |= bool(getattr(output, "past_key_values", None))

    @contextlib.contextmanager
    def region(self, function, args, kind: str, replays_random: bool):
        """A region's forward; in the recomputation of an outer region, an inner one's second run. Yields the region."""
        outer = self.now[-1][0] if self.now else None
        if self.quiet or (_in_backward() and outer is not None):
            inner = (each for each in (outer.inner if outer else ()) if outer and len(each.calls) < len(outer.calls))
            with self.running(next(inner, AuditedRegion(kind, (), {}))) as region:
                yield region
            return
        tensors = _tensors_of(function, args)
        sizes = {s._cdata: s.nbytes() for t in tensors for s in storages_of(t) if s._cdata not in self.resident}
        region = AuditedRegion(kind, self._owner(function), sizes, replays_random)
        (self.regions if outer is None else outer.inner).append(region)
        before = rng.snapshot(ReachableState(function).streams)
        read = functools.partial(_read, function, tensors, self.names)
        facts = read, read()
        try:
            with self.running(region):
                yield region
        finally:
            region.drew = tuple(_stream_name(stream) for stream, _ in rng.drawn_from(before))
            region.facts = facts  # a recomputation compares
            called = [path for path, _ in region.calls[0]] if region.calls else []
            inside = (path for path in dict.fromkeys(called) if not any(path.startswith(f"{p}.") for p in called))
            region.modules = region.modules or tuple(inside)

    @contextlib.contextmanager
    def running(self, region: AuditedRegion):
        """A run of a region: its forward, or a recomputation."""
        if region.facts is not None:
            before, now = region.facts[1], region.facts[0]()
            changed = ((label, value, now.get(label, value)) for label, value in before.items())
            changed = ((label, value, later) for label, value, later in changed if later != value)
            region.changed += [f"{name}: {x!r}, then {y!r}" if type(x) in PLAIN else name for name, x, y in changed]
        calls: list[tuple[str, Any]] = []
        region.calls.append(calls)
        self.now.append((region, calls))
        try:
            yield region
        finally:
            self.now.pop()

    def again(self, region: AuditedRegion, function):
        """`function`, which reports its calls in backward as recomputations of `region`."""

        def call(*args, **kwargs):
            with contextlib.nullcontext() if region.facts is None else self.running(region):
                return function(*args, **kwargs)

        return call

    def _owner(self, function) -> tuple[str, ...]:
        """The module whose forward a region is."""
        while isinstance(function, functools.partial):
            function = next((each for each in function.args[:1] if isinstance(each, nn.Module)), function.func)
        name = self.names.get(id(getattr(function, "__self__", function)))
        return () if name is None else (name,)

    def _pack(self, tensor: torch.Tensor):
        storage = next((s for s in storages_of(tensor) if s._cdata not in self.resident), None)
        saved = None
        if storage is not None:
            what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            place = self.stack[-1] if self.stack else "", source_line()
            saved = SavedOutside(storage.nbytes(), what, *place, storage._cdata, tuple(r for r, _ in self.now))
            self.records.append(weakref.ref(saved))
        return tensor.detach(), saved

    def _unpack(self, packed) -> torch.Tensor:
        if self.saved is None:  # a record exists as long as autograd needs its tensor
            records = [each for record in self.records if (each := record()) is not None]
            self.saved = [*{each.storage: each for each in reversed(records)}.values()]
            for each in records:
                for region in each.regions:
                    region.dropped[each.storage] = each.bytes
        return packed[0]

    def enter_offload(self, hooks, enter) -> None:
        """Enter a user's ``saved_tensors_hooks``, and record what they do with tensors."""
        owner = getattr(hooks.pack_hook, "__self__", hooks)
        name = "ackpt's offload" if type(owner).__module__.startswith("ackpt.") else type(owner).__name__
        context = self.contexts.setdefault(name, Context(name))
        settings = (*vars(owner).items(), *vars(hooks).items(), *referred(hooks.pack_hook))
        context.least = next((value for key, value in settings if "min" in key and type(value) is int), context.least)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def packing(tensor):
            storages, packed = storages_of(tensor), pack(tensor)
            references = [(weakref.ref(s), s.nbytes()) for s in storages if s._cdata not in self.resident]
            for _, size in references:
                context.packed += references
                context.seen += size
                context.largest = max(context.largest, tensor.numel() * tensor.element_size())
                context.on_cpu &= tensor.device.type == "cpu"
                others = [s for t in tree_leaves(packed) if isinstance(t, torch.Tensor) for s in storages_of(t)]
                is_copy = others and storages[0]._cdata not in {s._cdata for s in others}
                is_needless = context.on_cpu and isinstance(hooks, save_on_cpu)
                context.copied += size if is_copy and not is_needless else 0
            return packed, references

        def unpacking(packed):
            packed, references = packed
            for each in self.contexts.values():  # what is freed when backward begins
                each.moved += sum(size for reference, size in each.packed if reference() is None)
                each.packed.clear()
            context.loaded += sum(size for reference, size in references if reference() is None)
            return unpack(packed)

        hooks.pack_hook, hooks.unpack_hook = packing, unpacking
        try:
            enter(hooks)
        finally:
            hooks.pack_hook, hooks.unpack_hook = pack, unpack


def _read(function, tensors, names: dict[int, str]) -> dict[str, Any]:
    """What a region's code reads, by a label: plain values; modules and tensors as tuples that tell them apart."""
    reachable = ReachableState(function)
    values = [*referred(function), ("", function), ("", getattr(function, "__self__", None))]
    modules = [module for _, value in values if isinstance(value, nn.Module) for module in value.modules()]
    of = {id(vars(module)): f" of {names.get(id(module), '')!r}" for module in modules}
    read = {repr(name): (id(value),) for name, value in values if isinstance(value, nn.Module)}
    values += ((f"{key}{of.get(id(namespace), '')}", value) for namespace, key, value in _bindings_of(reachable))
    read |= {name: value for name, value in values if type(value) in PLAIN}
    inputs = ((tensor, f"input {number}") for number, tensor in enumerate(tensors))
    return read | {name: (id(tensor), version(tensor)) for tensor, name in (*reachable.tensors.values(), *inputs)}


def _fact(value, changeable: list[Any], depth: int = 0) -> Any:
    """A value to compare plain values by, also those in containers, which are added to `changeable`."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if depth > _DEPTH or not isinstance(value, _CONTAINERS):
        return repr(value) if type(value) in PLAIN else type(value).__name__
    changeable.append(value)
    facts = [_fact(item, changeable, depth + 1) for item in (value.items() if isinstance(value, dict) else value)]
    return sorted(map(repr, facts)) if isinstance(value, (set, frozenset)) else facts


def _bindings_of(reachable: ReachableState) -> Iterator[tuple[Any, Any, object]]:
    """``(namespace, name, value)`` of what code can read, without the fields that every module has."""
    yield from reachable.bindings
    for namespace in reachable.namespaces:
        hidden = MODULE_FIELDS - {"training"} if "_modules" in namespace else frozenset()
        yield from ((namespace, key, value) for key, value in namespace.items() if key not in hidden)


def _in_backward() -> bool:
    """Whether this thread runs a backward: what calls a module there recomputes it."""
    return torch._C._current_graph_task_id() != -1


def _tensors_of(function, args) -> list[torch.Tensor]:
    """The tensors among the arguments of a region, and those that a partial function adds."""
    given = [args]
    while isinstance(function, functools.partial):
        given += [function.args, function.keywords]
        function = function.func
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _stream_name(stream) -> str:
    devices = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_available() else ())]
    is_own = hasattr(stream, "generator") and not any(stream.generator is each for each in devices)
    return "a torch.Generator" if is_own else stream.name


def _digest(tensor: torch.Tensor):
    """A value that differs where two tensors differ; None if it cannot be computed."""
    try:
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            total = flat.sum(dtype=torch.float64).view(torch.int64)
            return tuple(tensor.shape), tensor.dtype, torch.hash_tensor(flat).item(), total.item()
    except (RuntimeError, TypeError):
        return None


@contextlib.contextmanager
def intercepted(watch: Watch):
    """Let `watch` see regions and offload in the body; if it is neutral, they are plain calls."""
    # What `checkpoint` of torch/utils/checkpoint.py looks up, in torch 2.11 to 2.14; it has no public hook.
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" * hasattr(torch_checkpoint, f"{name}_impl")  # from torch 2.14 on
    generator = getattr(torch_checkpoint, name)
    torch_reentrant = torch_checkpoint.CheckpointFunction
    enter, leave, run = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__, vars(PlannedStep)["_ackpt_run"]
    apply, first_forward, recompute = torch_reentrant.apply, Region.first_forward, Region.recompute
    signature = inspect.signature(generator)
    regions: dict[int, tuple[Region, AuditedRegion]] = {}

    def non_reentrant(function, *rest, **kwargs):
        given = signature.bind(function, *rest, **kwargs).arguments
        watch.without_grad += not torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            yield
            return
        arguments = given.get("args", ()), given.get("kwargs", {})
        with watch.region(function, arguments, TORCH, given.get("preserve_rng_state", True)) as region:
            if not watch.neutral:
                yield from generator(watch.again(region, function), *rest, **kwargs)
                return
            # A user's context may set a precision; one that saves chosen operations is left out.
            context = given.get("context_fn", torch_checkpoint.noop_context_fn)()[0]
            with contextlib.nullcontext() if isinstance(context, TorchDispatchMode) else context:
                yield

    def reentrant_apply(function, preserve, *args):
        watch.without_grad += not torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            return function(*args)
        with watch.region(function, args, REENTRANT, preserve) as region:
            return function(*args) if watch.neutral else apply(watch.again(region, function), preserve, *args)

    def plain(function, args, kwargs, preserve, offload, compiler=None):
        if isinstance(owner := getattr(function, "__self__", None), nn.Module):
            reentrant._modules_run.add(owner)  # it is called, as apply_activation_checkpointing checks
        with watch.region(function, (args, kwargs), ACKPT, preserve):
            return function(*args, **kwargs)

    def first(own):
        with watch.region(own.function, [*own.inputs], ACKPT, own.preserve_rng_state) as region:
            regions[id(own)] = own, region
            return first_forward(own)

    def second(own, *args):
        with watch.running(regions[id(own)][1]) if id(own) in regions else contextlib.nullcontext():
            return recompute(own, *args)

    def entered(hooks):
        if hooks is watch.hooks or (not watch.neutral and type(hooks).__module__ == torch_checkpoint.__name__):
            enter(hooks)
        elif not watch.neutral:
            watch.enter_offload(hooks, enter)

    def left(hooks, *error):
        if hooks is watch.hooks or not watch.neutral:
            leave(hooks, *error)

    def planned(step, model, own, args, kwargs):
        if watch.neutral:
            return own(*args, **kwargs)
        register = nn.modules.module
        hidden = mock.patch.dict(register._global_forward_pre_hooks, clear=True)
        with hidden, mock.patch.dict(register._global_forward_hooks, clear=True):  # a capture must not see the watch
            output = run(step, model, own, args, kwargs)
        watch.keep_output(output)
        return output

    patches = [
        (torch_checkpoint, name, non_reentrant),
        (torch_reentrant, "apply", staticmethod(reentrant_apply)),
        (saved_tensors_hooks, "__enter__", entered),
        (saved_tensors_hooks, "__exit__", left),
        (PlannedStep, "_ackpt_run", planned),
    ]
    if watch.neutral:
        patches += [(reentrant, "_run", plain)]
    else:
        patches += [(Region, "first_forward", first), (Region, "recompute", second)]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
