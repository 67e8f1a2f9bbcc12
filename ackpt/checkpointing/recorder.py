"""Check that a region's recomputation repeats its forward.

``Recorder`` watches one run. It records every call whose result requires grad, with its numbers, flags and shapes. It
also records the storages that a call may write without bumping a version counter; ``guards.py`` restores these buffers.
That takes longer than the calls themselves where tensors are small. So a small region is recorded in its first runs
only, and its later runs are compared by ``Evidence``: what their graphs show of all that gradients depend on.
``check_same_path`` raises an error if the recomputation took a different path than the forward.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import re
import sys
import types
import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from ackpt.core.autograd_state import phase
from ackpt.core.errors import CheckpointError

from .guards import PLAIN_TENSORS, changed_between, memory, name_of
from .reachable import _TORCH, Graph
from .rng import MEMORY
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


def _flat(values):
    """Yield `values`, with each list or tuple replaced by its items."""
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)


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
# Methods and attributes (`__get__`) that do not depend on a tensor's elements, if they return no tensor.
_DESCRIBING = frozenset(
    "__get__ __len__ dim size numel stride element_size storage_offset get_device is_contiguous is_floating_point "
    "is_complex".split()
)
_IN_PLACE, _MAX_NORM = "in place", "max_norm"
# Calls that need more than recording, by function: one look-up per call.
_EFFECTS = {
    **{getattr(torch.Tensor, name): _IN_PLACE for name in dir(torch.Tensor) if re.fullmatch("[^_].*[^_]_", name)},
    **dict.fromkeys(_MAY_WRITE, "may write"),
    _SET_ITEM: _IN_PLACE,
    F.embedding: _MAX_NORM,
    F.embedding_bag: _MAX_NORM,
}


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
    ``_source`` of every argument. ``written``: storages that may have been written without a new version;
    ``overwritten``: those of tensors that calls changed in place.
    """

    def __init__(self, expected: Recorder | None = None, named=None, refused=None):
        super().__init__()
        self.calls: list[tuple[int, Call, list]] = []
        self.inputs: dict[int, int] = {}
        self.results: list[weakref.ref] = []
        self.written: set[int | None] = set()
        self.overwritten: set[int | None] = set()
        self.parameters: dict[int, _Parameter] = {}
        self.different: tuple[Call, str, nn.Module | None] | None = None
        self.named: dict = (named if expected is None else expected.named) or {}
        self._refused: dict = refused or {}
        self._expected = None if expected is None else expected.calls
        existing = () if expected is None else expected.parameters.values()
        self._existing = {id(each.value): each for each in existing if each.value is not None}

    def __enter__(self):
        self._outer, phase.recorder = phase.recorder, self
        return super().__enter__()

    def __exit__(self, *error):
        phase.recorder = self._outer
        return super().__exit__(*error)

    def record_region(self, inner: Path, output) -> None:
        """Record a nested region, which is one node of this region's graph, with its path and its output."""
        call = Call(_region, ((inner,), ()), output.shape, output.dtype)
        self.calls.append((output.grad_fn._sequence_nr(), call, []))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # Dynamo is tracing this method; compiled code is not recorded
            return func(*args, **kwargs)
        started = torch.autograd._get_sequence_nr()
        result = func(*args, **kwargs)
        if self._refused and (func.__name__ not in _DESCRIBING or isinstance(result, torch.Tensor)):
            for value in _flat((*args, *kwargs.values())):
                if id(value) in self._refused:
                    raise changed_between(*self._refused[id(value)])
        with torch._C.DisableTorchFunction():  # otherwise, outer regions would record every attribute access here
            self._record(func, args, kwargs, result, started)
        return result

    def record_inputs(self, tensors) -> None:
        """Record the positions of the tensors that the function is called with; one that is passed twice gets none."""
        ids = [id(tensor) for tensor in tensors]
        self.inputs = {key: position for position, key in enumerate(ids) if ids.count(key) == 1}

    def forget(self) -> None:
        """Drop the references to tensors that the recomputation does not need."""
        self.results = []
        self.named = {
            key: pair for key, pair in self.named.items() if pair[0].is_leaf and type(pair[0]) is not torch.Tensor
        }

    def left_results(self) -> list[torch.Tensor]:
        """The results with a graph that are still alive, although the run's graph should have been freed."""
        tensors = (result() for result in self.results)
        return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]

    def _record(self, func, args, kwargs, result, started) -> None:
        if (effect := _EFFECTS.get(func)) is not None:
            self._note(effect, args, kwargs)
        tensor = result
        if not isinstance(result, torch.Tensor):
            tensor = args[0] if func is _SET_ITEM else _first_with_grad(result)
        if tensor is None or not tensor.requires_grad or (node := tensor.grad_fn) is None:
            return
        number = node._sequence_nr()
        if number < started:  # an existing tensor, such as `contiguous` may return
            return
        plain = self._plain
        values = tuple(map(plain, args)), tuple([(key, plain(value)) for key, value in kwargs.items()])
        call = Call(func, values, tensor.shape, tensor.dtype)
        self.calls.append((number, call, [self._source(value) for value in _flat((*args, *kwargs.values()))]))
        self.results.append(weakref.ref(tensor))
        if self._expected is not None and self.different is None:
            at = len(self.calls) - 1
            if at >= len(self._expected) or self._expected[at][1] != call:
                self.different = call, *_caller()

    def _note(self, effect, args, kwargs) -> None:
        if effect is _IN_PLACE:
            self.overwritten.add(memory(args[0]))
        elif effect is not _MAX_NORM:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            self.written.update(map(memory, tensors))
        elif kwargs.get("max_norm") is not None:
            self.overwritten.update(
                memory(each) for each in (*args, *kwargs.values()) if isinstance(each, nn.Parameter)
            )

    def _plain(self, value):
        """The part of `value` to compare: a plain value, a parameter, None for another tensor, else the type."""
        if type(value) in ATOMS or isinstance(value, numbers.Number):
            return value
        if isinstance(value, torch.Tensor):
            # The class of Parameter has a slow check.
            is_parameter = type(value) is not torch.Tensor and isinstance(value, nn.Parameter)
            return self._parameter(value) if is_parameter else None
        if isinstance(value, (list, tuple)):
            return tuple(map(self._plain, value))
        if type(value) is slice:
            return slice, self._plain(value.start), self._plain(value.stop), self._plain(value.step)
        return type(value)

    def _parameter(self, value):
        parameter = self.parameters.get(id(value)) or self._existing.get(id(value))
        if parameter is None:
            unnamed = weakref.ref(value) if self._expected is None else None
            parameter = _Parameter(*self.named.get(id(value), (unnamed,)))
        self.parameters[id(value)] = parameter
        return parameter

    def _source(self, value):
        """Where an argument comes from: (number of its autograd node, output index), an input's position, or None."""
        if not isinstance(value, torch.Tensor):
            return None
        position = self.inputs.get(id(value))
        if position is not None or (node := value.grad_fn) is None:
            return position
        return node._sequence_nr(), value.output_nr


# `reshape` makes the second under a dispatch mode, such as FlopCounterMode, and the first without one: its C++ in
# ``aten/src/ATen/native/TensorShape.cpp`` asks ``isTensorSubclassLike``.
_SAME_GRADIENT = {"ReshapeAliasBackward0": "ViewBackward0"}
_region = object()  # in place of a function, in the `Call` of a nested region


class Path:
    """How a run computed a region's outputs from its inputs.

    ``evidence``: the `Evidence` of a small region. Of a recorded run, ``nodes``: the names of the graph's nodes, but
    for casts, as autocast casts a leaf once and any other tensor once per use; ``calls``: those that an output depends
    on; ``sources``: for each call, where its arguments come from: an input's position, (index of a call, index of its
    result), or None if unknown.
    """

    def __init__(self, recorder: Recorder | None, graph: Graph, evidence: Evidence | None):
        self.evidence: Any = evidence
        self.nodes: Any = None
        self.calls: Any = None
        self.sources: Any = None
        if recorder is None:
            return
        names = {node._sequence_nr(): node.name() for node in graph.nodes}
        calls = [made for made in recorder.calls if made[0] in names]
        numbers = {number: at for at, (number, _, _) in enumerate(calls)}

        def source(of):
            if type(of) is tuple:
                return (numbers[of[0]], of[1]) if of[0] in numbers else None
            return of

        self.nodes = [_SAME_GRADIENT.get(name, name) for name in names.values() if name != "ToCopyBackward0"]
        self.calls = [call for _, call, _ in calls]
        self.sources = [list(map(source, sources)) for _, _, sources in calls]

    def __eq__(self, other):
        if self.calls is not None and other.calls is not None:
            return (self.nodes, self.calls, self.sources) == (other.nodes, other.calls, other.sources)
        return self.evidence is None or other.evidence is None or _is_same(self.evidence, other.evidence)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def check_same_path(forward: Path, recomputed: Path, recorder: Recorder | None, function) -> None:
    """Raise a CheckpointError with the first operation that differs if two runs took different paths."""
    if forward == recomputed:
        return
    if forward.calls is None or recomputed.calls is None:
        for before, now in zip(forward.evidence.regions, recomputed.evidence.regions):
            check_same_path(before, now, recorder, function)
        raise _other_path(function, _difference(forward.evidence, recomputed.evidence))
    pairs = enumerate(zip(forward.calls, recomputed.calls))
    index = next((i for i, (a, b) in pairs if a != b and repr(a) != repr(b)), None)  # repr, as nan != nan
    if index is None and len(forward.calls) == len(recomputed.calls):
        for at, sources in enumerate(zip(forward.sources, recomputed.sources)):
            for before, now in zip(*sources):
                if before != now and before is not None and now is not None:
                    change = f"was given {_source_text(before)} in the forward and is given {_source_text(now)} now"
                    raise _other_path(function, f"operation {at + 1}, {forward.calls[at]}, {change}")
        if forward.nodes == recomputed.nodes:
            return
        raise _other_path(function, _other_nodes(forward.nodes, recomputed.nodes))
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


#: A small region is recorded until this number of its recomputations have been compared call by call.
RECORDED_RUNS = 3
#: The bytes of the inputs and constants of a small region at most, and the bytes of an output that are compared.
SMALL_BYTES = 1 << 20


class Evidence(NamedTuple):
    """What the graph of a run shows of its path: ``kinds``, the classes of its nodes; ``links`` between them, and
    ``ends``, the tensors at which it ends; ``order``, their sequence numbers, of which the ranks count; and ``values``,
    hashes of the bytes of the outputs. ``regions``: the paths of nested regions.

    Runs with the same evidence have the same gradients, unless a number or tensor differs and changes no bit of an
    output, for example in a branch that is multiplied by zero.
    """

    kinds: list[type]
    links: list
    ends: list
    values: list
    regions: list
    order: list[int]


def evidence_of(graph: Graph, outputs: list[torch.Tensor]) -> Evidence:
    """The `Evidence` of a run whose graph of `outputs` is `graph`, with the ids of the tensors in ``ends``."""
    kinds = list(map(type, graph.nodes))
    regions = [] if _REGIONS.isdisjoint(kinds) else [n.region.path for n in graph.nodes if type(n) in _REGIONS]
    return Evidence(kinds, graph.links, [*map(id, graph.ends)], list(map(_hash, outputs)), regions, graph.order)


_REGIONS: set[type] = set()  # the class of the nodes of regions, which have an attribute `region`


def _hash(tensor: torch.Tensor) -> int | None:
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    tensor = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    address = tensor.data_ptr()
    return hash(MEMORY[address : address + min(tensor.nbytes, SMALL_BYTES)])


def _is_same(before: Evidence, now: Evidence) -> bool:
    if before.kinds != now.kinds and _names(before.kinds) != _names(now.kinds):
        return False
    return before[1:5] == now[1:5] and (before.order == now.order or _ranks(before.order) == _ranks(now.order))


def _names(kinds: list[type]) -> list[str]:
    return [_SAME_GRADIENT.get(kind.__name__, kind.__name__) for kind in kinds]


def _difference(before: Evidence, now: Evidence) -> str:
    """In what two runs differ, for an error."""
    names = [_names(each.kinds) for each in (before, now)]
    if Counter(names[0]) != Counter(names[1]):
        return _other_nodes(*names)
    for name, what in zip(Evidence._fields, ("operations", "arguments", "inputs", "values in its outputs", "regions")):
        if getattr(before, name) != getattr(now, name):
            return f"the same operations have other {what}"
    return "the same operations have another order"


def _ranks(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class Subject:
    """What is known of the regions of one function or module: how many recomputations have ``passed`` a comparison of
    all calls, with equal `Evidence`, and the ``kinds`` of their nodes."""

    def __init__(self, reference):
        self.reference, self.passed, self.kinds = reference, 0.0, set()

    def add(self, before: Evidence | None, now: Evidence | None, is_repeatable: bool) -> None:
        """Take note of the evidence of two recorded runs with equal calls."""
        if before is None or now is None:
            return
        opaque = (kind for kind in before.kinds if kind not in _REGIONS and not _NODE.fullmatch(kind.__name__))
        if not is_repeatable or any(opaque) or None in before.values or not _is_same(before, now):
            self.passed = -math.inf  # its values are others each time, or the evidence does not show all that it does
        self.passed += 1
        self.kinds.update(before.kinds)


_NODE = re.compile(r"\w+Backward\d+")  # of an operation of torch, rather than of a function in Python or C++
_subjects: dict[int, Subject] = {}  # by id of a function's code or of a module, until it is gone


def subject_of(function) -> Subject | None:
    """The `Subject` of a region's function; None if no weak reference to it is possible."""
    while type(function) is functools.partial:
        function = function.func
    if type(function) is types.MethodType:
        function = function.__self__ if isinstance(function.__self__, nn.Module) else function.__func__
    key = function.__code__ if type(function) is types.FunctionType else function
    place = id(key)
    if place not in _subjects and type(key).__weakrefoffset__:
        _subjects[place] = Subject(weakref.ref(key, lambda _: _subjects.pop(place, None)))
    return _subjects.get(place)


def _source_text(source) -> str:
    if isinstance(source, int):
        return f"input {source + 1} of the region"
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


def _other_nodes(before, now) -> str:
    missing, extra = Counter(before) - Counter(now), Counter(now) - Counter(before)
    return f"only the forward has {', '.join(missing) or 'none'}, only the recompute {', '.join(extra) or 'none'}"


def _first_with_grad(result):
    items = result if isinstance(result, (tuple, list)) else ()
    return next((item for item in items if isinstance(item, torch.Tensor) and item.requires_grad), None)


class _Parameter:
    """A parameter that a call received; those that the two runs of a region created compare equal.

    `value`: the parameter; a weak reference if no name leads to it; None if the recomputation created it.
    """

    def __init__(self, value, name: str = ""):
        self._value, self.name = value, name

    @property
    def value(self):
        return self._value() if type(self._value) is weakref.ref else self._value

    def __eq__(self, other):
        return type(other) is _Parameter and self.value is other.value

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"parameter at {id(self.value):#x}"

    def __str__(self) -> str:
        if self.value is None:
            return "a new parameter"
        return f"parameter {self.name!r}" if self.name else f"a parameter of shape {list(self.value.shape)}"


def _text(value) -> str:
    if value is None:
        return "..."
    if isinstance(value, tuple) and value[:1] == (slice,):
        return ":".join("" if end is None else str(end) for end in value[1:]).removesuffix(":")
    if isinstance(value, _Parameter):
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
