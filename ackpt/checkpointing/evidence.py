"""Compare the two runs of a region, and store what comparisons have shown about its function.

``Path`` is how a run computed its outputs: by the calls of a ``Recorder``, or by ``Evidence``, which is what its graph
shows. ``check_same_path`` raises an error if the recomputation took a different path than the forward. ``Subject``
stores whether evidence suffices for a function, and which of its calls are dead.
"""

import functools
import itertools
import math
import re
import types
import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import resolve_name

from ackpt.core.autograd_state import phase
from ackpt.core.errors import CheckpointError

from .dead_calls import DeadCalls, Liveness, top_hooks
from .guards import PLAIN_TENSORS, is_equal, name_of
from .reachable import Graph
from .rng import MEMORY

#: A small region is recorded until this number of its recomputations have been compared call by call.
RECORDED_RUNS = 3
#: The bytes of the inputs and constants of a small region at most, and of the pieces in which outputs are hashed. For
#: larger ones, leaving out dead calls saves more time than the record of calls takes.
SMALL_BYTES = 1 << 18


# Nodes of casts and views. After a view is written in place, its next node is one of ``as_strided``, or for a subclass,
# such as the result of a dead call, one of the view (``torch/csrc/autograd/variable.cpp``, ``grad_fn``).
_VIEWS = (
    "ToCopy AsStrided Alias Diagonal Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze T Transpose "
    "Unbind Unfold Unsqueeze View ViewAsComplex ViewAsReal"
)
_UNCOMPARED = {f"{name}Backward{n}" for n in range(5) for name in _VIEWS.split()}


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
    regions = [] if REGION_NODES.isdisjoint(kinds) else [n.region.path for n in graph.nodes if type(n) in REGION_NODES]
    return Evidence(kinds, graph.links, [*map(id, graph.ends)], list(map(_hash, outputs)), regions, graph.order)


def number_ends(evidence, starts, leaves) -> None:
    """Replace the ids of tensors in ``ends`` by numbers: of the inputs, by id, and of the leaves, from -1 downwards."""
    numbers = dict(zip(starts, itertools.count())) | dict(zip(map(id, leaves), itertools.count(-1, -1)))
    evidence.ends[:] = map(numbers.get, evidence.ends)


REGION_NODES: set[type] = set()  # the class of the nodes of regions, which have an attribute `region`


def names_of(graph: Graph) -> dict[int, str]:
    """The names of a graph's nodes, by their sequence number."""
    return {node._sequence_nr(): node.name() for node in graph.nodes}


def checksum(tensor: torch.Tensor) -> Any:
    """A number that tells two outputs apart, on the tensor's device; None for one without plain bytes."""
    if tensor.is_cpu or tensor.is_meta or type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return _hash(tensor)
    words = tensor.detach().contiguous().flatten().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
    return words.sum(dtype=torch.int64)


def _hash(tensor: torch.Tensor) -> int | None:
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    tensor = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if tensor.nbytes <= SMALL_BYTES:
        return hash(MEMORY[address:end])
    return hash(tuple([hash(MEMORY[at : min(at + SMALL_BYTES, end)]) for at in range(address, end, SMALL_BYTES)]))


def is_same(before: Evidence, now: Evidence) -> bool:
    """Whether two runs took the same path as far as their evidence shows."""
    if before.kinds != now.kinds and node_names(before.kinds) != node_names(now.kinds):
        return False
    return before[1:5] == now[1:5] and (before.order == now.order or _ranks(before.order) == _ranks(now.order))


def node_names(kinds: list[type]) -> list[str]:
    """The names of classes of nodes, without differences that dispatch modes cause."""
    # `reshape` makes a view under a mode: ``isTensorSubclassLike`` in ``aten/src/ATen/native/TensorShape.cpp``.
    return [kind.__name__.replace("ReshapeAlias", "View") for kind in kinds]


def difference_between(before: Evidence, now: Evidence) -> str:
    """The difference between two runs, for an error."""
    names = [node_names(each.kinds) for each in (before, now)]
    if Counter(names[0]) != Counter(names[1]):
        return other_nodes(*names)
    for name, what in zip(Evidence._fields, ("operations", "arguments", "inputs", "values in its outputs", "regions")):
        if getattr(before, name) != getattr(now, name):
            return f"the same operations have other {what}"
    return "the same operations have another order"


def _ranks(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class Subject:
    """Facts about the regions of one function or module.

    ``passed``: how many recomputations have passed a comparison of all calls, with equal `Evidence`. ``kinds``: the
    classes of their nodes. ``counts``: of the tensors that names reach. ``changes_unseen``: whether buffers change
    where no recorder sees it; None before the first run. ``dead``: the dead calls of each kind of run; ``learns``:
    whether the next run finds out its own; ``skips``: whether recomputations leave out dead calls.
    """

    def __init__(self, reference):
        self.reference, self.passed, self.kinds, self.counts = reference, 0.0, set(), set()
        self.changes_unseen: bool | None = None
        self.dead: dict[Any, DeadCalls] = {}
        self.learns = self.skips = True

    def dead_calls(self, region, inputs, leaves) -> DeadCalls | None:
        """The dead calls of a region whose first run on `inputs` was recorded, and whose graph ends at `leaves`."""
        recorder = region.recorder
        needs_grad = *region.needs_grad, *(leaf.requires_grad for leaf in leaves)
        modes = None if region.autocast is None else tuple(region.autocast.modes)
        layouts = tuple([(each.dtype, each.is_contiguous()) for each in inputs])
        wiring: Any = ()
        if (path := region.path) is not None:  # which inputs and calls the arguments come from
            sources = (each if type(each) in (int, tuple) else None for each in itertools.chain(*path.sources))
            wiring = *path.nodes, *(call.dtype for call in path.calls), *sources
        key = recorder.kind, wiring, needs_grad, layouts, modes, tuple(place for place, _, _ in region.left_facts)
        for saved in recorder.liveness.saved if recorder.liveness is not None else ():
            saved.tensor = None  # hooks of FlopCounterMode refer to the graph's nodes until the garbage collection
        dead = self.dead.get(key)
        if dead is None and recorder.liveness is not None:
            outputs = *region.output_values[: len(region.node_outputs)], *filter(torch.is_tensor, region.other_outputs)
            dead = self.dead[key] = recorder.liveness.dead(inputs, outputs, region.left, region.opaque)
            self.learns = False
        elif dead is None:
            self.learns = len(self.dead) < _MOST_KINDS
        return dead

    def add(self, before: Evidence | None, now: Evidence | None, is_repeatable: bool) -> None:
        """Take note of the evidence of two recorded runs with equal calls."""
        if before is None or now is None:
            return
        if not is_repeatable or any(map(is_opaque, before.kinds)) or None in before.values or not is_same(before, now):
            self.passed = -math.inf  # its values are others each time, or the evidence does not show all that it does
        self.passed += 1
        self.kinds.update(before.kinds)


_MOST_KINDS = 16  # of runs of one function
# The nodes of operations of torch, rather than of functions in Python or C++.
_NODE = re.compile(r"\w+Backward\d+|CopySlices|CopyBackwards")


def is_opaque(kind: type) -> bool:
    """Whether nodes of this class belong to functions in Python or C++, which may read any tensor."""
    return kind not in REGION_NODES and not _NODE.fullmatch(kind.__name__)


def opaque_nodes(graph: Graph, liveness: Liveness) -> list[int]:
    """The sequence numbers of a graph's nodes that may read tensors where `liveness` does not see it."""
    nodes = (node for node in graph.nodes if type(node) not in REGION_NODES)
    return [n._sequence_nr() for n in nodes if is_opaque(type(n)) or not liveness.has_made(n)]


def is_small(region, reachable) -> bool:
    """Whether all tensors are small and on the CPU, so that graphs without a record of calls can be compared."""
    if not (
        region.guarantees.exact_graph and region.preserve_rng_state and region.autocast is phase.leaves_behind is None
    ):
        return False
    if torch._C._len_torch_dispatch_stack() or top_hooks(False) is not None:  # hooks may change the inputs
        return False
    size = 0
    for tensor in region.inputs:
        if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        size += tensor.nbytes
    for tensor, _ in reachable.tensors.values():
        if tensor.grad_fn is not None:
            return False
        if not tensor.requires_grad:
            size += tensor.nbytes
    return size <= SMALL_BYTES


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


def other_nodes(before, now) -> str:
    """The names that only one of two graphs has, for an error."""
    missing, extra = Counter(before) - Counter(now), Counter(now) - Counter(before)
    return f"only the forward has {', '.join(missing) or 'none'}, only the recompute {', '.join(extra) or 'none'}"


class Call(NamedTuple):
    """One call of a torch function: its arguments in comparable form, and the shape and dtype of its result."""

    function: Any
    values: tuple
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        if self.function is REGION:
            return f"a region of {_text(self.values[0][0])}"
        name = resolve_name(self.function) or getattr(self.function, "__name__", repr(self.function))
        args, kwargs = self.values
        given = [*map(_text, args), *(f"{key}={_text(value)}" for key, value in kwargs)]
        return f"{name}({', '.join(given)}) -> {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def bits_of(tensor: torch.Tensor) -> Any:
    """A number that tells the bits of a tensor from others; None if it has none that can be read."""
    if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor):
        return None
    return checksum(tensor) if tensor.untyped_storage().nbytes() else None


class Made:
    """A tensor without gradients that a run makes by a `call` on ``reads`` and others; ``recipe``: a hash of all of its
    calls with their plain arguments, by which two of these are compared, and by the values of ``reads``."""

    def __init__(self, call: Call, sources):
        self.call, self.reads = call, dict[int, Read]()
        self.sources = [source for source in sources if type(source) is Made]
        recipes: list = [call.function, repr(call.values), call.dtype]
        for source in sources:
            if type(source) is Read:
                self.reads[id(source)] = source
            elif type(source) is Made:
                self.reads.update(source.reads)
            recipes.append(source.recipe if type(source) is Made else source if type(source) is int else None)
        self.recipe = hash(tuple(recipes))

    def __eq__(self, other):
        if type(other) is not Made or self.recipe != other.recipe:
            return False
        return [*self.reads.values()] == [*other.reads.values()]

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __str__(self) -> str:
        reads = f" on {', '.join(map(str, self.reads.values()))}" if self.reads else ""
        return f"the result of {self.call}{reads}"


class Read:
    """A tensor that a run reads and did not make.

    `value`: the tensor; a weak reference if no name leads to it. ``is_new``: whether it may exist for one run only. In
    the first run it is gone at the end, because the run has made it by a call that a recorder does not see, or an outer
    region has made it; in the recomputation, the first run did not read it. Two of these are compared by the `mark` of
    their bits. ``version``: at the first read; ``uses``: the number of calls whose results depend on it.
    """

    def __init__(self, value, name: str, is_new: bool, version: int, mark: Any = None):
        self._value, self.name, self.is_new, self.version, self.mark = value, name, is_new, version, mark
        self.uses = 1

    @property
    def value(self):
        return self._value() if type(self._value) is weakref.ref else self._value

    def __eq__(self, other):
        if type(other) is not Read or (self.is_new and other.is_new):
            if type(other) is not Read or self.mark is None or other.mark is None:
                return type(other) is Read
            return int(self.mark) == int(other.mark)
        tensors = [self.value, other.value]
        if any(each is None or each.requires_grad or isinstance(each, nn.Parameter) for each in tensors):
            return tensors[0] is not None and tensors[0] is tensors[1]
        return is_equal(*tensors)  # for example, masks that both runs have made and stored

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return "a tensor"

    def __str__(self) -> str:
        value = self.value
        is_parameter = isinstance(value, nn.Parameter) or (value is None and self.mark is None)
        kind = "parameter" if is_parameter else "tensor"
        if self.name:
            return f"{kind} {self.name!r}"
        return f"a new {kind}" if value is None or self.is_new else f"a {kind} of shape {list(value.shape)}"


def _text(value) -> str:
    if value is None:
        return "..."
    if isinstance(value, tuple) and value[:1] == (slice,):
        return ":".join("" if end is None else str(end) for end in value[1:]).removesuffix(":")
    if isinstance(value, Read):
        return str(value)
    if isinstance(value, Path):
        return f"{len(value.calls)} operations"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value)


REGION = object()  # in place of a function, in the `Call` of a nested region


class Path:
    """How a run computed a region's outputs from its inputs.

    ``evidence``: the `Evidence` of a small region. Of a recorded run, ``nodes``: the names of the graph's nodes, but
    for views, and casts, as autocast casts a leaf once and any other tensor once per use; ``calls``: those that an
    output depends on; ``sources``: for each call, where its arguments come from: an input's position, (index of a call,
    index of its result), a `Read` or `Made`, or None if unknown.
    """

    def __init__(self, recorder, names: dict[int, str], evidence: Evidence | None):
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

    def __eq__(self, other):
        if self.calls is not None and other.calls is not None:
            alike = (self.nodes, self.calls) == (other.nodes, other.calls)
            pairs = zip(self.sources, other.sources)
            return alike and all(mine == its or all(map(_may_be_one, mine, its)) for mine, its in pairs)
        return self.evidence is None or other.evidence is None or is_same(self.evidence, other.evidence)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def has_other_calls(self, other: "Path") -> bool:
        """Whether the functions or their plain arguments differ, which leaving out dead calls cannot cause."""
        pairs = zip(self.calls, other.calls)
        if any(a.function != b.function or (a.function is not REGION and a.values != b.values) for a, b in pairs):
            return True
        return any(map(_is_other, itertools.chain(*self.sources), itertools.chain(*other.sources)))


def _is_other(before, now) -> bool:
    """Whether an argument was made from other numbers, or has other bits."""
    if type(before) is type(now) is Made:
        return before.recipe != now.recipe
    return type(before) is type(now) is Read and before.is_new and now.is_new and before != now


def _may_be_one(before, now) -> bool:
    """Whether an argument may have come from the same source in two runs."""
    if before is None or now is None or (type(before) is Made) != (type(now) is Made):  # it may come from a cache
        return True
    return before == now


def check_same_path(forward: Path, recomputed: Path, recorder, function) -> None:
    """Raise a CheckpointError with the first operation that differs if two runs took different paths."""
    if forward == recomputed:
        return
    if forward.calls is None or recomputed.calls is None:
        for before, now in zip(forward.evidence.regions, recomputed.evidence.regions):
            check_same_path(before, now, recorder, function)
        raise _other_path(function, difference_between(forward.evidence, recomputed.evidence))
    index = next((i for i, (a, b) in enumerate(zip(forward.calls, recomputed.calls)) if a != b), None)
    if index is None and len(forward.calls) == len(recomputed.calls):
        if sorted(forward.nodes) != sorted(recomputed.nodes):
            raise _other_path(function, other_nodes(forward.nodes, recomputed.nodes))
        for at, sources in enumerate(zip(forward.sources, recomputed.sources)):
            for before, now in zip(*sources):
                if not _may_be_one(before, now):
                    change = _source_change(before, now)
                    raise _other_path(function, f"operation {at + 1}, {forward.calls[at]}, {change}")
        raise _other_path(function, other_nodes(forward.nodes, recomputed.nodes))
    index = min(len(forward.calls), len(recomputed.calls)) if index is None else index
    expected = forward.calls[index] if index < len(forward.calls) else "absent"
    call = recomputed.calls[index] if index < len(recomputed.calls) else None
    if isinstance(expected, Call) and isinstance(call, Call) and expected.function is call.function is REGION:
        (before,), (now,) = expected.values[0], call.values[0]
        return check_same_path(before, now, recorder, function)
    caller = ""
    if recorder is not None and recorder.different is not None and recorder.different[0] is call:
        caller = _caller_text(recorder.different[1], recorder.different[2], function)
    difference = f"operation {index + 1} was {expected} in the forward and is {call or 'absent'} now{caller}"
    if isinstance(expected, Call) and call is not None and call[:2] == expected[:2]:
        difference = (
            f"operation {index + 1} was {expected} in the forward, and the same operation{caller} gives the shape "
            f"{list(call.shape)} {str(call.dtype).removeprefix('torch.')} now, because it was given other values"
        )
    raise _other_path(function, difference)


def _source_change(before, now) -> str:
    if type(before) is type(now) is Made:
        for pair in zip(before.sources, now.sources):
            if pair[0] != pair[1] and before.call == now.call:
                return _source_change(*pair)
    texts = _source_text(before), _source_text(now)
    other = ", which has other values" if texts[0] == texts[1] else ""
    return f"was given {texts[0]} in the forward and is given {texts[1]} now{other}"


def _source_text(source) -> str:
    if isinstance(source, int):
        return f"input {source + 1} of the region"
    if isinstance(source, (Read, Made)):
        return str(source)
    number, output = source
    return f"the result of operation {number + 1}" + (f" (number {output + 1})" if output else "")


def _other_path(function, difference: str) -> CheckpointError:
    return CheckpointError(
        f"the recompute of a checkpointed region ({name_of(function)}) took another path than its forward: "
        f"{difference}. The gradient would be that of another function. Make the function do the same both times: look "
        "for a counter, an iterator, a dict or list entry, an environment variable or a random number that changes in "
        "between, or a dispatch mode (FlopCounterMode, for example) around one of the two, which can change torch's "
        "kernels. Code that must act once per step can ask ackpt.is_recomputing()."
    )


def _caller_text(line: str, module: nn.Module | None, function) -> str:
    location = f" at {line}" if line else ""
    if module is None:
        return location
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    names = {id(part): name for name, part in owner.named_modules()} if isinstance(owner, nn.Module) else {}
    name = names.get(id(module))
    return f"{location}, in {f'module {name!r} ' if name else ''}({type(module).__name__})"


def other_outputs(count: int, expected: dict, recomputed: list) -> CheckpointError:
    """The error for a recomputation whose number of outputs, or whose signatures by index, differ."""

    def described(shape, dtype, device, requires_grad):
        dtype = str(dtype).removeprefix("torch.")
        return f"shape {list(shape)} {dtype} on {device}{'' if requires_grad else ' without grad'}"

    different = [
        f"output {index}: {described(*signature)} in forward, {described(*recomputed[index])} in recompute"
        for index, signature in expected.items()
        if index < len(recomputed) and recomputed[index] != signature
    ]
    if len(recomputed) != count:
        different.insert(0, f"{count} tensors in forward, {len(recomputed)} in recompute")
    return CheckpointError(
        "the recompute of a checkpointed region returned other outputs than its forward ("
        + "; ".join(different)
        + "). The function must do the same both times: look for a condition on a counter, a flag, a cache or a random "
        "number that checkpoint() cannot replay."
    )


def other_left(function) -> CheckpointError:
    return CheckpointError(
        f"the forward of a checkpointed region ({name_of(function)}) stored a tensor that needs a gradient outside of "
        "its return value, and its recompute did not compute it again. Return the tensor, or compute it both times."
    )
