"""Check that a region's recomputation repeats its forward.

``Recorder`` watches one run. It records every call whose result requires grad, with its numbers, flags and shapes. It
notes the tensors and generators that the run reads and did not make, and copies what a call is about to write, which
``guards.py`` restores. That takes longer than the calls themselves where tensors are small. So a small region is
recorded in its first runs only, and always if it reads what ``ReachableState`` does not find. Its later runs are
compared by ``Evidence``: what their graphs show of all that gradients depend on. ``check_same_path`` raises an error if
the recomputation took a different path than the forward.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import os
import re
import sys
import types
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode, resolve_name

from ackpt.core import autograd_state
from ackpt.core.autograd_state import phase, version
from ackpt.core.errors import CheckpointError

from .dead_calls import DESCRIBING
from .evidence import Evidence, difference_between, is_same, other_nodes
from .guards import changed_between, is_equal, memory, name_of
from .reachable import _TORCH
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
_EQUAL_TO_ITSELF = ATOMS - {float, complex}
_CALL = nn.Module._call_impl.__code__
# Nodes of casts and views. After a view is written in place, its next node is one of ``as_strided``, or for a subclass,
# such as the result of a dead call, one of the view (``torch/csrc/autograd/variable.cpp``, ``grad_fn``).
_VIEWS = (
    "ToCopy AsStrided Alias Diagonal Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T Transpose "
    "Unbind Unfold Unsqueeze View ViewAsComplex ViewAsReal"
)
_UNCOMPARED = {f"{name}Backward{n}" for n in range(5) for name in _VIEWS.split()}
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


class Call(NamedTuple):
    """One call of a torch function: its arguments in comparable form, and the shape and dtype of its result."""

    function: Any
    values: tuple
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        if self.function is _region:
            return f"a region of {_text(self.values[0][0])}"
        name = resolve_name(self.function) or getattr(self.function, "__name__", repr(self.function))
        args, kwargs = self.values
        given = [*map(_text, args), *(f"{key}={_text(value)}" for key, value in kwargs)]
        return f"{name}({', '.join(given)}) -> {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


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
    ``kind``: a hash of the calls: their functions, which calls or inputs their arguments come from, and the nodes and
    dtypes of their results.
    `copies_writes`: False in a recomputation and under FSDP, whose own tensors change between forward and backward.
    """

    def __init__(self, expected: Recorder | None = None, named=None, refused=None, wanted=(), copies_writes=False):
        super().__init__()
        self.copies_writes = copies_writes
        self.calls: list[tuple[int, Call, list]] = []
        self.inputs: dict[int, int | None] = {}
        self.results: list[tuple[tuple[int, int], weakref.ref]] = []
        self.reads: dict[int, _Read] = {}
        self.streams: dict[int, tuple[weakref.ref, torch.Tensor | None]] = {}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.overwritten: set[int | None] = set()
        self.written: set[int | None] = set()
        self.kept: dict[tuple[int, int], torch.Tensor] = {}
        self.different: tuple[Call, str, nn.Module | None] | None = None
        self.named: dict = (named if expected is None else expected.named) or {}
        self._made: dict[int, tuple[weakref.ref, dict[int, _Read]]] = {}
        self._storages: set[int | None] = set()
        self._copied: set = set()
        self._refused: dict = refused or {}
        self._wanted = wanted
        self.dead_calls: Any = None  # a `Liveness` or `Skipping`, which then makes the calls
        self.kind = 1
        self._makers: dict[int, tuple[weakref.ref, int]] = {}  # a tensor and `kind` when it was made, by its id
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

    def record_region(self, inner: Path, outputs) -> None:
        """Record a nested region, which is one node of this region's graph, with its path and its outputs."""
        call = Call(_region, ((inner,), ()), outputs[0].shape, outputs[0].dtype)
        self._note_makers(outputs)
        self._add(outputs[0].grad_fn._sequence_nr(), call, [], outputs)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # Dynamo is tracing this method; compiled code is not recorded
            return func(*args, **kwargs)
        started = torch.autograd._get_sequence_nr()
        values = _flat((*args, *kwargs.values()))
        effect = _effect_of(func)
        describes = effect is None and getattr(func, "__name__", "") in DESCRIBING
        sources: list = []
        if not describes:
            with torch._C.DisableTorchFunction():  # otherwise, outer regions would record every attribute access here
                sources = [None if type(value) in ATOMS else self._source(value) for value in values]
                if effect is not None or kwargs:
                    self._prepare(effect, values, args, kwargs)
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
            self._record(func, args, kwargs, values, result, started, sources or [*map(self._source, values)])
        return result

    def record_inputs(self, tensors) -> None:
        """Record the positions of the tensors that the function is called with; one that is passed twice gets none."""
        ids = [id(tensor) for tensor in tensors]
        self._note_makers(tensors)
        self.inputs = {key: position if ids.count(key) == 1 else None for position, key in enumerate(ids)}

    def _note_makers(self, tensors) -> None:
        for at, tensor in enumerate(tensors):
            self._makers[id(tensor)] = weakref.ref(tensor), self.kind + at

    def _note_kind(self, func, values, results, facts) -> None:
        made_by: list = []
        for value in values:
            made = self._makers.get(id(value))
            made_by.append(made is not None and made[0]() is value and made[1])
        self.kind = hash((self.kind, func, facts, *made_by))
        self._note_makers(results)

    def forget(self) -> None:
        """Drop the references to tensors that the recomputation does not need, when the run's graph has been freed."""
        self.results, self._makers, self.dead_calls, self.streams = [], {}, None, {}
        self._made = {key: pair for key, pair in self._made.items() if pair[0]() is not None}
        for read in self.reads.values():
            read.is_new = read.is_new or read.value is None
        self.reads = {key: read for key, read in self.reads.items() if read.value is not None}
        self.named = {
            key: pair for key, pair in self.named.items() if pair[0].is_leaf and type(pair[0]) is not torch.Tensor
        }

    def left_results(self):
        """Yield the results with a graph that are still alive, although the run's graph should have been freed, from
        the last on, each with its place: (index of the call, index of the result)."""
        for place, result in reversed(self.results):
            if (tensor := result()) is not None and tensor.requires_grad:
                yield place, tensor

    def _prepare(self, effect, values, args, kwargs) -> None:
        """Note what a call may write, and copy it if the run has not made it."""
        if effect is _MAX_NORM:
            if kwargs.get("max_norm") is not None:
                self.overwritten.update(memory(each) for each in values if isinstance(each, nn.Parameter))
            return
        if effect is _FIRST or kwargs.get("inplace"):
            written = _flat(args[:1] or kwargs.values())
        else:
            written = values if effect is not None else _flat((kwargs.get("out"),))
        for value in written:
            if not isinstance(value, torch.Tensor):
                continue
            while is_functorch_wrapped_tensor(value):  # inside torch.func.grad or vmap
                value = get_unwrapped(value)
            storage = memory(value)
            (self.written if effect is _SILENT else self.overwritten).add(storage)
            if not self.copies_writes or storage not in self._storages or value.requires_grad:
                continue
            if isinstance(value, nn.Parameter) or (storage and value.numel() and not value.untyped_storage().nbytes()):
                continue  # a parameter is refused, and one without memory, such as a released one, has no value
            view = None if storage is None else (storage, value.storage_offset(), value.shape, value.stride())
            if self._copied.isdisjoint((id(value), view)) and not value.is_inference():
                self._copied.update((id(value), view or id(value)))
                self.copies.append((value, value.detach().clone()))

    def _record(self, func, args, kwargs, values, result, started, sources) -> None:
        tensor, results = result, [result]
        if not isinstance(result, torch.Tensor):
            results = [each for each in _flat((result,)) if isinstance(each, torch.Tensor)]
            tensor = args[0] if func is _SET_ITEM else next((each for each in results if each.requires_grad), None)
            results = results or ([] if tensor is None else [tensor])
        node = None if tensor is None else tensor.grad_fn
        if self._expected is None:
            self._note_kind(func, values, results, None if tensor is None else (type(node), tensor.dtype))
        for each in results:
            if each.grad_fn is None and id(each) not in self.inputs and id(each) not in self.reads:
                self._made[id(each)] = weakref.ref(each), _reads_in(sources)
        if tensor is None or node is None:
            return
        number = node._sequence_nr()
        if number < started:  # an existing tensor, such as `contiguous` may return
            return
        given = tuple([(key, self._plain(value)) for key, value in kwargs.items()]) if kwargs else ()
        call = Call(func, (self._plain(args), given), tensor.shape, tensor.dtype)
        self._add(number, call, sources, results)
        if self._expected is not None and self.different is None:
            at = len(self.calls) - 1
            if at >= len(self._expected.calls) or self._expected.calls[at][1] != call:
                self.different = call, *_caller()

    def _add(self, number, call, sources, results) -> None:
        at = len(self.calls)
        self.calls.append((number, call, sources))
        for position, tensor in enumerate(results):
            self.results.append(((at, position), weakref.ref(tensor)))
            if (at, position) in self._wanted:
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
        if type(value) in ATOMS or isinstance(value, numbers.Number):
            return value if value == value else math.nan  # one object, as tuples with the same one are equal
        if type(value) is slice:
            return slice, *self._plain((value.start, value.stop, value.step))
        return type(value)

    def _source(self, value):
        """Where an argument comes from: an input's position, (number of its autograd node, output index), a `_Read`, or
        the reads that a tensor without gradients was made from; None if unknown."""
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
            if made is not None and made[0]() is value:
                return made[1]
            read = None if recorder is None else recorder.reads.get(key)
            if read is not None and read.value is value:
                self.reads[key] = read
                return read
        if (node := value.grad_fn) is not None and node._sequence_nr() >= self._began:
            return node._sequence_nr(), value.output_nr
        return self._read(value)

    def _read(self, value) -> _Read:
        key = id(value)
        read = self.reads.get(key)
        if read is None or read.value is not value:
            tensor, name = self.named.get(key, (None, ""))
            is_named = tensor is value and value.grad_fn is None
            is_new = self._expected is not None or self._is_inside
            if not is_new and self._outer is not None:  # an outer region that is recorded says whether it has made it
                source = self._outer._source(value)
                is_new = type(source) is not _Read or source.is_new
            read = _Read(value if is_named else weakref.ref(value), name, is_new, version(value))
            self._storages.add(memory(value))
            self.reads[key] = read
        return read


@contextlib.contextmanager
def data_restored(replaced: list[tuple[torch.Tensor, torch.Tensor]]):
    """Inside, tensors have the ``.data`` that the forward replaced: pairs of a tensor and its former data."""
    present = [(tensor, tensor.data) for tensor, _ in replaced]
    try:
        for tensor, old in replaced:
            tensor.data = old
        yield
    finally:
        for tensor, data in present:
            tensor.data = data


def _reads_in(sources) -> dict[int, _Read]:
    """The reads among `sources`, and those that tensors among them were made from, by id."""
    reads: dict[int, _Read] = {}
    for source in sources:
        if type(source) is _Read:
            reads[id(source)] = source
        elif type(source) is dict:
            reads.update(source)
    return reads


_region = object()  # in place of a function, in the `Call` of a nested region


class Path:
    """How a run computed a region's outputs from its inputs.

    ``evidence``: the `Evidence` of a small region. Of a recorded run, ``nodes``: the names of the graph's nodes, but
    for views, and casts, as autocast casts a leaf once and any other tensor once per use; ``calls``: those that an
    output depends on; ``sources``: for each call, where its arguments come from: an input's position, (index of a call,
    index of its result), a tensor from outside, those that it was made from without gradients, or None if unknown.
    """

    def __init__(self, recorder: Recorder | None, names: dict[int, str], evidence: Evidence | None):
        self.evidence: Any = evidence
        self.nodes: Any = None
        self.calls: Any = None
        self.sources: Any = None
        if recorder is None:
            return
        calls = [made for made in recorder.calls if made[0] in names]
        numbers = {number: at for at, (number, _, _) in enumerate(calls)}

        self.nodes = [name for name in names.values() if name not in _UNCOMPARED]
        self.calls = [call for _, call, _ in calls]
        self.sources = [[*sources] for _, _, sources in calls]
        for sources in self.sources:
            for at, source in enumerate(sources):
                if type(source) is tuple:
                    sources[at] = (numbers[source[0]], source[1]) if source[0] in numbers else None
                elif type(source) is dict:
                    sources[at] = [*source.values()]

    def __eq__(self, other):
        if self.calls is not None and other.calls is not None:
            alike = (self.nodes, self.calls) == (other.nodes, other.calls)
            pairs = zip(self.sources, other.sources)
            return alike and all(mine == its or all(map(_may_be_one, mine, its)) for mine, its in pairs)
        return self.evidence is None or other.evidence is None or is_same(self.evidence, other.evidence)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def has_other_calls(self, other: Path) -> bool:
        """Whether the functions or their plain arguments differ, which leaving out dead calls cannot cause."""
        pairs = zip(self.calls, other.calls)
        return any(a.function != b.function or (a.function is not _region and a.values != b.values) for a, b in pairs)


def _may_be_one(before, now) -> bool:
    """Whether an argument may have come from the same source in two runs."""
    if before is None or now is None or (type(before) is list) != (type(now) is list):  # it may come from a cache
        return True
    return before == now


def check_same_path(forward: Path, recomputed: Path, recorder: Recorder | None, function) -> None:
    """Raise a CheckpointError with the first operation that differs if two runs took different paths."""
    if forward == recomputed:
        return
    if forward.calls is None or recomputed.calls is None:
        for before, now in zip(forward.evidence.regions, recomputed.evidence.regions):
            check_same_path(before, now, recorder, function)
        raise _other_path(function, difference_between(forward.evidence, recomputed.evidence))
    index = next((i for i, (a, b) in enumerate(zip(forward.calls, recomputed.calls)) if a != b), None)
    if index is None and len(forward.calls) == len(recomputed.calls):
        for at, sources in enumerate(zip(forward.sources, recomputed.sources)):
            for before, now in zip(*sources):
                if not _may_be_one(before, now):
                    change = f"was given {_source_text(before)} in the forward and is given {_source_text(now)} now"
                    raise _other_path(function, f"operation {at + 1}, {forward.calls[at]}, {change}")
        raise _other_path(function, other_nodes(forward.nodes, recomputed.nodes))
    index = min(len(forward.calls), len(recomputed.calls)) if index is None else index
    expected = forward.calls[index] if index < len(forward.calls) else "absent"
    call = recomputed.calls[index] if index < len(recomputed.calls) else None
    if isinstance(expected, Call) and isinstance(call, Call) and expected.function is call.function is _region:
        (before,), (now,) = expected.values[0], call.values[0]
        return check_same_path(before, now, recorder, function)
    caller = ""
    if recorder is not None and recorder.different is not None and recorder.different[0] is call:
        caller = _caller_text(*recorder.different[1:], function)
    difference = f"operation {index + 1} was {expected} in the forward and is {call or 'absent'} now{caller}"
    if isinstance(expected, Call) and call is not None and call[:2] == expected[:2]:
        difference = (
            f"operation {index + 1} was {expected} in the forward, and the same operation{caller} gives the shape "
            f"{list(call.shape)} {str(call.dtype).removeprefix('torch.')} now, because it was given other values"
        )
    raise _other_path(function, difference)


def _source_text(source) -> str:
    if isinstance(source, int):
        return f"input {source + 1} of the region"
    if isinstance(source, (_Read, list)):
        return (
            str(source) if isinstance(source, _Read) else f"what is made from {', '.join(map(str, source)) or 'none'}"
        )
    number, output = source
    return f"the result of operation {number + 1}" + (f" (number {output + 1})" if output else "")


def _other_path(function, difference: str) -> CheckpointError:
    return CheckpointError(
        f"the recompute of a checkpointed region ({name_of(function)}) took another path than its forward: "
        f"{difference}. The gradient would be that of another function. Make the function do the same both times: look "
        "for a counter, a dict or list entry, an environment variable or a random number that changes in between, or a "
        "dispatch mode (FlopCounterMode, for example) around one of the two, which can change torch's kernels. Code "
        "that must act once per step can ask ackpt.is_recomputing()."
    )


class _Read:
    """A tensor that a run reads and did not make.

    `value`: the tensor; a weak reference if no name leads to it. ``is_new``: whether it may exist for one run only. In
    the first run it is gone at the end, because the run has made it by a call that a recorder does not see, or an outer
    region has made it; in the recomputation, the first run did not read it. Two of these compare equal. ``version``: at
    the first read.
    """

    def __init__(self, value, name: str, is_new: bool, version: int):
        self._value, self.name, self.is_new, self.version = value, name, is_new, version

    @property
    def value(self):
        return self._value() if type(self._value) is weakref.ref else self._value

    def __eq__(self, other):
        if type(other) is not _Read or (self.is_new and other.is_new):
            return type(other) is _Read
        tensors = [self.value, other.value]
        if any(each is None or each.requires_grad or isinstance(each, nn.Parameter) for each in tensors):
            return tensors[0] is not None and tensors[0] is tensors[1]
        return is_equal(*tensors)  # for example, masks that both runs have made and stored

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return "a new tensor" if self.is_new else f"tensor at {id(self.value):#x}"

    def __str__(self) -> str:
        value = self.value
        kind = "parameter" if value is None or isinstance(value, nn.Parameter) else "tensor"
        if self.name:
            return f"{kind} {self.name!r}"
        return f"a new {kind}" if value is None or self.is_new else f"a {kind} of shape {list(value.shape)}"


def _text(value) -> str:
    if value is None:
        return "..."
    if isinstance(value, tuple) and value[:1] == (slice,):
        return ":".join("" if end is None else str(end) for end in value[1:]).removesuffix(":")
    if isinstance(value, _Read):
        return str(value)
    if isinstance(value, Path):
        return f"{len(value.calls)} operations"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value)


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


def _caller_text(line: str, module: nn.Module | None, function) -> str:
    location = f" at {line}" if line else ""
    if module is None:
        return location
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    names = {id(part): name for name, part in owner.named_modules()} if isinstance(owner, nn.Module) else {}
    name = names.get(id(module))
    return f"{location}, in {f'module {name!r} ' if name else ''}({type(module).__name__})"
