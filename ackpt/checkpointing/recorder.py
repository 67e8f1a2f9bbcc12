"""Check that a region's recomputation repeats its forward.

``Recorder`` watches one run. It records every call whose result requires grad, with its numbers, flags and shapes. It
notes the tensors and generators that the run reads and did not make, and copies what a call is about to write, which
``guards.py`` restores. That takes longer than the calls themselves where tensors are small. So a small region is
recorded in its first runs only, and always if it reads what ``ReachableState`` does not find. Its later runs are
compared by ``Evidence``: what their graphs show of all that gradients depend on; see ``evidence.py``.
"""

import contextlib
import functools
import math
import numbers
import os
import re
import sys
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from ackpt.core import autograd_state
from ackpt.core.autograd_state import phase, version

from .dead_calls import DESCRIBING, RANDOM, Liveness
from .evidence import REGION, Call, Made, Path, Read, bits_of
from .guards import changed_between, memory
from .reachable import _TORCH, PLAIN
from .rng import drawn_from, seeds, state_mark, without
from .tree import ATOMS

# Kernels that write to an argument without bumping its version counter. Found by calling every aten operation whose
# schema has an argument named running_* (tests/checkpointing/test_recorder.py repeats this search).
_SILENT_WRITERS = (
    "batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats "
    "batch_norm_gather_stats batch_norm_gather_stats_with_counts _batch_norm_impl_index _native_batch_norm_legit "
    "_batch_norm_with_update fused_moving_avg_obs_fake_quant _fused_moving_avg_obs_fq_helper"
)
# Ways to get an alias through which a tensor can be written without autograd noticing.
_WRITABLE_ALIASES = ("numpy", "__array__", "untyped_storage", "storage", "data_ptr")
_SET_ITEM = torch.Tensor.__setitem__
_SINGLE = ATOMS - {torch.Size} | {torch.Tensor, nn.Parameter}
_EQUAL_TO_ITSELF = PLAIN - {float, complex, slice}
_CALL = nn.Module._call_impl.__code__
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = os.path.join(_OWN, "models") + os.sep  # counts as user code
_NOTEBOOK_CELL = re.compile(r"[\\/]ipykernel_\d+[\\/]|^<ipython-input-")


@functools.lru_cache(maxsize=4096)
def is_users(path: str) -> bool:
    """Whether a file is user code: it belongs to neither torch nor ackpt, or it is in ackpt/models."""
    return not path.startswith((_TORCH, _OWN)) or path.startswith(_MODELS)


def code_location(file: str, line: int) -> str:
    """The file and line for an error message; a notebook cell's file name is left out, as it changes every session."""
    return f"line {line} of a notebook cell" if _NOTEBOOK_CELL.search(file) else f"{file}:{line}"


def _flat(values) -> list:
    """`values`, with each list or tuple replaced by its items."""
    flat: list = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += value
        else:
            flat.append(value)
    return flat


def _spellings(names: str) -> set:
    """All functions with these names: in torch, in torch.nn.functional, and aten operators with their overloads."""
    functions: set[Any] = set()
    for name in names.split():
        functions.update(getattr(owner, name) for owner in (torch, F) if hasattr(owner, name))
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            functions.update((packet, *(getattr(packet, overload) for overload in packet.overloads())))
    return functions


_DATA: Any = torch.Tensor.data
_MAY_WRITE = {*_spellings(_SILENT_WRITERS), *(getattr(torch.Tensor, name) for name in _WRITABLE_ALIASES)}
_MAY_WRITE |= {_DATA.__get__, _DATA.__set__}
_NORMS = {F.batch_norm, F.instance_norm}
_FIRST, _ANY, _SILENT, _MAX_NORM = "first argument", "any argument", "any argument, silently", "max_norm"
_EFFECTS = {
    **dict.fromkeys((torch.Tensor.requires_grad_, torch.Tensor.detach_)),
    **dict.fromkeys(_MAY_WRITE, _SILENT),
    _SET_ITEM: _FIRST,
    F.embedding: _MAX_NORM,
    F.embedding_bag: _MAX_NORM,
}


@functools.lru_cache(maxsize=4096)
def _effect_of(function) -> str | None:
    """The arguments that a function may write."""
    if function in _EFFECTS:
        return _EFFECTS[function]
    if re.fullmatch(r"\w*[^\W_]_(\..*)?", getattr(function, "__name__", "")):  # add_, _foreach_add_, init.normal_
        return _FIRST
    overloads = [getattr(function, name) for name in function.overloads()] if hasattr(function, "overloads") else ()
    schemas = [each._schema for each in overloads or (function,) if hasattr(each, "_schema")]
    return _ANY if any(schema.is_mutable for schema in schemas) else None


# Functions that draw from a default generator, beyond those of torch's operations that say so.
_DRAWING = {"gumbel_softmax", "multi_head_attention_forward", "fractional_max_pool2d", "fractional_max_pool3d"}


@functools.lru_cache(maxsize=4096)
def _may_draw(function) -> bool:
    """Whether a function may draw random numbers."""
    name = getattr(function, "__name__", "")
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    overloads = (getattr(packet, each) for each in packet.overloads()) if packet is not None else ()
    return name in _DRAWING or any(RANDOM in each.tags for each in overloads)


class Recorder(TorchFunctionMode):
    """Records the calls of one run of a region.

    `expected`: the recorder of the first run; ``different``: the first call that differs, with its line and module.
    `named`: ``{id: (tensor, name)}`` of what the first run can reach. `refused`: ``{id: change}`` of tensors that have
    changed since; a call that reads one raises. ``calls``: each with the number of its autograd node and the
    ``_source`` of every argument. ``reads``, ``streams``: the tensors that the run reads and did not make, and the
    generators that it uses, with their states from before (of the first run, until `forget`), by id. ``copies``:
    tensors among ``reads`` and views of them that calls may have written, with copies from before; ``replaced``: by id,
    those whose ``.data`` is assigned, with what it was; ``overwritten``: the storages that calls changed in place;
    ``written``: those that may have been written without a new version. ``kept``: the results at the places `wanted`.
    ``kind``: a hash of the called functions.
    `copies_writes`: False in a recomputation and under FSDP, whose own tensors change between forward and backward.
    """

    def __init__(self, expected: "Recorder | None" = None, named=None, refused=None, wanted=(), copies_writes=False):
        super().__init__()
        self.copies_writes = copies_writes
        self.calls: list[tuple[int, Call, list]] = []
        self.inputs: dict[int, int | None] = {}
        self.results: list[tuple[tuple[int, int], weakref.ref]] = []
        self.reads: dict[int, Read] = {}
        self.streams: dict[int, tuple[weakref.ref, torch.Tensor | None]] = {}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.overwritten: set[int | None] = set()
        self.written: set[int | None] = set()
        self.kept: dict[tuple[int, int], torch.Tensor] = {}
        self.different: tuple[Call, str, nn.Module | None] | None = None
        self.named: dict = (named if expected is None else expected.named) or {}
        self._made: dict[int, tuple[weakref.ref, weakref.ref, Made]] = {}
        self._storages: set[int | None] = set()
        self._writes: dict[weakref.ref, Made] = {}  # the last write into each storage of tensors without gradients
        self._seeds: Any = None
        self.before, self.drawn = [], []  # streams of torch with their states: not yet drawn from, and drawn from
        self._replays_generators = False
        self._copied: set = set()
        self._refused: dict = refused or {}
        self._wanted = wanted
        self.dead_calls: Any = None  # a `Liveness` or `Skipping`, which then makes the calls
        self.liveness: Liveness | None = None
        self.kind = 1
        self._began = torch.autograd._get_sequence_nr()
        self._expected = expected
        self._outer: Recorder | None = phase.recorder
        self._is_inside = self._outer is None and (phase.dropping or phase.recomputing)

    def __enter__(self):
        phase.recorder = self
        return super().__enter__()

    def __exit__(self, *error):
        phase.recorder = self._outer
        return super().__exit__(*error)

    def begin(self, replays_generators: bool) -> None:
        """Note the seeds with which the run begins, after its random numbers have been restored."""
        if self._seeds is None:
            self._seeds, self._replays_generators = seeds(), replays_generators

    def record_region(self, inner: Path, outputs) -> None:
        """Record a nested region, which is one node of this region's graph, with its path and its outputs."""
        call = Call(REGION, ((inner,), ()), outputs[0].shape, outputs[0].dtype)
        self._add(outputs[0].grad_fn._sequence_nr(), call, [], outputs)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # Dynamo is tracing this method; compiled code is not recorded
            return func(*args, **kwargs)
        started = torch.autograd._get_sequence_nr()
        values = [*args, *kwargs.values()]
        values = values if _SINGLE.issuperset(map(type, values)) else _flat(values)
        effect = _effect_of(func)
        describes = effect is None and getattr(func, "__name__", "") in DESCRIBING
        sources, written = [], []
        if not describes:
            self.kind = hash((self.kind, func))
            with torch._C.DisableTorchFunction():  # otherwise, outer regions would record every attribute access here
                sources = [None if type(value) in ATOMS else self._source(value) for value in values]
                if effect is not None or kwargs:
                    written = self._prepare(effect, values, args, kwargs)
                    if func in _NORMS and (kwargs.get("training") or kwargs.get("use_input_stats")):
                        for read in filter(None, map(self.reads.get, map(id, args[1:3]))):
                            read.uses -= 1  # the results do not depend on running statistics
                if func == _DATA.__set__ and self.copies_writes and memory(args[0]) in self._storages:
                    self.replaced.setdefault(id(args[0]), (args[0], args[0].detach()))
        if (dead_calls := self.dead_calls) is None:
            result = func(*args, **kwargs)
        else:
            result = dead_calls.run(func, args, kwargs)
        if describes and not isinstance(result, torch.Tensor):
            return result
        if self._refused:
            for value in values:
                if id(value) in self._refused:
                    raise changed_between(*self._refused[id(value)])
        with torch._C.DisableTorchFunction():
            sources = sources or [*map(self._source, values)]
            self._record(func, args, kwargs, values, result, started, sources, written)
        return result

    def record_inputs(self, tensors) -> None:
        """Record the positions of the tensors that the function is called with; one that is passed twice gets none."""
        ids = [id(tensor) for tensor in tensors]
        self.inputs = {key: position if ids.count(key) == 1 else None for position, key in enumerate(ids)}

    def forget(self) -> None:
        """Drop the references to tensors that the recomputation does not need, when the run's graph has been freed."""
        self.results, self.dead_calls, self.liveness, self.streams = [], None, None, {}
        self._made = {key: made for key, made in self._made.items() if made[0]() is not None}
        for read in self.reads.values():
            read.is_new = read.is_new or read.value is None
        self.reads = {key: read for key, read in self.reads.items() if read.value is not None}
        self.named = {
            key: pair for key, pair in self.named.items() if pair[0].is_leaf and type(pair[0]) is not torch.Tensor
        }

    def only_updated(self) -> set[int | None]:
        """The storages of running statistics that norms have updated, and that no call has read."""
        values = (read.value for read in self.reads.values() if read.uses)
        return {memory(tensor) for tensor, _ in self.copies} - {memory(each) for each in values if each is not None}

    def left_results(self):
        """Yield the results with a graph that are still alive, although the run's graph should have been freed, from
        the last on, each with its place: (index of the call, index of the result)."""
        for place, result in reversed(self.results):
            if (tensor := result()) is not None and tensor.requires_grad:
                yield place, tensor

    def _prepare(self, effect, values, args, kwargs) -> list[torch.Tensor]:
        """Note what a call may write, and copy it if the run has not made it; return it if the version changes, too."""
        if effect is _MAX_NORM:
            if kwargs.get("max_norm") is not None:
                self.overwritten.update(memory(each) for each in values if isinstance(each, nn.Parameter))
            return []
        if effect is _FIRST or kwargs.get("inplace"):
            written = _flat(args[:1] or kwargs.values())
        else:
            written = values if effect is not None else _flat((kwargs.get("out"),))
        written = [value for value in written if isinstance(value, torch.Tensor)]
        for value in written:
            while is_functorch_wrapped_tensor(value):  # inside torch.func.grad or vmap
                value = get_unwrapped(value)
            storage = memory(value)
            (self.written if effect is _SILENT else self.overwritten).add(storage)
            if not self.copies_writes or storage not in self._storages or value.requires_grad:
                continue
            if storage and value.numel() and not value.untyped_storage().nbytes():
                continue  # without memory, such as a released parameter, it has no value
            view = None if storage is None else (storage, value.storage_offset(), value.shape, value.stride())
            if self._copied.isdisjoint((id(value), view)) and not value.is_inference():
                self._copied.update((id(value), view or id(value)))
                self.copies.append((value, value.detach().clone()))
        return [] if effect is _SILENT else written

    def _record(self, func, args, kwargs, values, result, started, sources, written) -> None:
        tensor, results = result, [result]
        if not isinstance(result, torch.Tensor):
            results = [each for each in _flat((result,)) if isinstance(each, torch.Tensor)]
            tensor = args[0] if func is _SET_ITEM else next((each for each in results if each.requires_grad), None)
            results = results or ([] if tensor is None else [tensor])
        node = None if tensor is None else tensor.grad_fn
        constants = [each for each in (*results, *written) if each.grad_fn is None]
        is_in_graph = node is not None and node._sequence_nr() >= started  # `contiguous` may return an existing tensor
        if not (constants or is_in_graph):
            return
        given = tuple([(key, self._plain(value)) for key, value in kwargs.items()]) if kwargs else ()
        if self._seeds and _may_draw(func) and (written or result is not (args or [None])[0]):
            if func is not F.scaled_dot_product_attention or kwargs.get("dropout_p") or len(args) > 4:
                self.drawn += drawn_from(self.before)
                self.before = without(self.before, self.drawn)
            if (present := seeds()) != self._seeds:
                given += (("seeds", present),)
        shown: Any = constants[0] if tensor is None else tensor
        call = Call(func, (self._plain(args), given), shown.shape, shown.dtype)
        if constants:
            self._note_made(Made(call, sources), constants, written)
        if not is_in_graph:
            return
        self._add(node._sequence_nr(), call, sources, results)  # pyright: ignore[reportOptionalMemberAccess]
        if self._expected is not None and self.different is None:
            at = len(self.calls) - 1
            if at >= len(self._expected.calls) or self._expected.calls[at][1] != call:
                self.different = call, *_caller()

    def _note_made(self, made: Made, constants, written) -> None:
        for each in constants:
            read = self.reads.get(id(each))
            if id(each) not in self.inputs and (read is None or read.value is not each):
                self._made[id(each)] = weakref.ref(each), _storage_of(each), made
        for each in written:
            if not each.requires_grad and not isinstance(each, nn.Parameter):  # hooks gather a parameter at any time
                self._writes[_storage_of(each)] = made

    def _add(self, number, call, sources, results) -> None:
        at = len(self.calls)
        self.calls.append((number, call, sources))
        for position, tensor in enumerate(results):
            if self._expected is None:
                self.results.append(((at, position), weakref.ref(tensor)))
            elif (at, position) in self._wanted:
                self.kept[at, position] = tensor

    def _plain(self, value):
        """The part of `value` to compare: a plain value, a parameter, None for another tensor, else the type."""
        if isinstance(value, (list, tuple)):
            plain: list = []
            for each in value:  # most items take no call
                kind = type(each)
                item = None if kind is torch.Tensor else each if kind in _EQUAL_TO_ITSELF else self._plain(each)
                plain.append(item)
            return tuple(plain)
        if isinstance(value, torch.Tensor):  # the class of Parameter has a slow check
            return self._read(value) if type(value) is nn.Parameter or isinstance(value, nn.Parameter) else None
        if type(value) is slice:
            return slice, *self._plain((value.start, value.stop, value.step))
        if type(value) in PLAIN or isinstance(value, numbers.Number):
            return value if value == value else math.nan  # one object, as tuples with the same one are equal
        if isinstance(value, torch.Generator):
            return torch.Generator, state_mark(value) if self._replays_generators else None
        if type(value) is bytearray:
            return bytearray, hash(bytes(value))
        if hasattr(type(value), "tobytes"):  # of NumPy, for example
            return type(value), hash(value.tobytes())
        return type(value)

    def _source(self, value):
        """Where an argument comes from: an input's position, (number of its autograd node, output index), a `Read`, or
        a `Made`; None if unknown."""
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.Generator) and id(value) not in self.streams:
                state = autograd_state.generator_state(value) if self._expected is None else None
                self.streams[id(value)] = weakref.ref(value), state
            return None
        key = id(value)
        if key in self.inputs:
            return self.inputs[key]
        for recorder in (self, self._expected):
            made = None if recorder is None else recorder._made.get(key)
            if made is not None and made[0]() is value and made[1] == _storage_of(value):  # else, by `set_`
                return self._written(value, made[2])
            read = None if recorder is None else recorder.reads.get(key)
            if read is not None and read.value is value:
                self.reads[key] = read
                read.uses += 1
                return self._written(value, read)
        if (node := value.grad_fn) is not None and node._sequence_nr() >= self._began:
            return node._sequence_nr(), value.output_nr
        return self._written(value, self._read(value))

    def _written(self, value, source):
        """`source` of a value without gradients, with the last write into its memory."""
        write = self._writes.get(_storage_of(value)) if self._writes else None
        return source if write is None else Made(write.call, (source, write))

    def _read(self, value) -> Read:
        key = id(value)
        read = self.reads.get(key)
        if read is None or read.value is not value:
            tensor, name = self.named.get(key, (None, ""))
            is_named = tensor is value and value.grad_fn is None
            is_new = self._expected is not None or self._is_inside
            if not is_new and self._outer is not None:  # an outer region that is recorded says whether it has made it
                source = self._outer._source(value)
                is_new = type(source) is not Read or source.is_new
            mark = None if is_named or value.requires_grad else bits_of(value)
            read = Read(value if is_named else weakref.ref(value), name, is_new, version(value), mark)
            self._storages.add(memory(value))
            self.reads[key] = read
        return read


@contextlib.contextmanager
def data_restored(replaced: list[tuple[torch.Tensor, torch.Tensor]]):
    """Inside, tensors have the ``.data`` that the forward replaced: pairs of a tensor and its former data."""
    present = [(tensor, tensor.data) for tensor, _ in replaced]
    try:
        for tensor, old in replaced:
            tensor.data = old.clone()
        yield
    finally:
        for tensor, data in present:
            tensor.data = data


def _storage_of(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's storage, which equals others to it."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return weakref.ref(tensor.untyped_storage() if tensor.layout is torch.strided else tensor)


def _caller() -> tuple[str, nn.Module | None]:
    """The file and line in the user's code that made the call, and the innermost running module."""
    line, frame = "", sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        if not line and is_users(file):
            line = code_location(file, frame.f_lineno)
        if frame.f_code is _CALL:
            return line, frame.f_locals["self"]
        frame = frame.f_back
    return line, None
