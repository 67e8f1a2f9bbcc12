"""Check a rewritten module independently: run it on fake tensors and count the live bytes after every operation.

It is independent of the schedule and the simulator: aliases come from the storages that the operations return, and
lifetimes from the last use of every value in the module's code.

The storages that an operation returns follow from the layouts of its tensors (dtype, shape, strides, storage size) and
from its other arguments. If an equal operation has run already, in another layer or for another schedule, its result is
reused: running operations on fake tensors takes most of the time of a proof.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.schedule.added_operations import offload, run_again, run_and_save
from ackpt.planner.schedule.listing import Line, Listing, mapped


class Layout:
    """The properties that tensors of equal layouts share; `example` is one of them."""

    def __init__(self, example: torch.Tensor):
        self.example, self.bytes = example, example.untyped_storage().nbytes()


class Value(NamedTuple):
    """A tensor of a proof. ``storage``: the number of its storage."""

    layout: Layout
    storage: int


class FakeResults:
    """The results of the operations of one graph, by their arguments."""

    def __init__(self):
        self._layouts: dict[Any, Layout] = {}
        self._results: dict[Any, Any] = {}  # with places in `run`'s `given` for storages; larger ones are new storages
        self._given: dict[Any, Any] = {}
        self._numbers: dict[int, int] = {}
        self._storages = 0

    def given(self, key, tensor) -> Any:
        """The `Value` of a tensor of the graph, the same one for the same `key`; anything but a tensor is itself."""
        if key not in self._given:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()._cdata
                if storage not in self._numbers:
                    self._numbers[storage] = self._new_number()
                tensor = tensor.detach() if isinstance(tensor, FakeTensor) else tensor
                tensor = Value(self._layout(tensor), self._numbers[storage])
            self._given[key] = tensor
        return self._given[key]

    def run(self, operation, args, kwargs) -> Any:
        """The result of an operation, with a `Value` for every tensor."""
        given: list[int] = []
        key = operation, _key(args, given), _key(tuple(kwargs.items()), given) if kwargs else ()
        if key not in self._results:
            self._results[key] = self._computed(operation, args, kwargs, given)
        storages = list(given)

        def placed(value):
            while value.storage >= len(storages):
                storages.append(self._new_number())
            return Value(value.layout, storages[value.storage])

        return _mapped(self._results[key], Value, placed)

    def _computed(self, operation, args, kwargs, given: Sequence[int]) -> Any:
        places: dict[int, int] = {}  # by storage of an example
        examples: list[torch.Tensor] = []  # to keep their storages

        def example(value: Value) -> torch.Tensor:
            place, found = given.index(value.storage), value.layout.example
            if places.setdefault(found.untyped_storage()._cdata, place) != place:
                found = _with_own_storage(found)
                places[found.untyped_storage()._cdata] = place
            examples.append(found)
            return found

        args, kwargs = _mapped((args, kwargs), Value, example)
        results = operation(*args, **kwargs)
        count = len(given)

        def value(tensor: torch.Tensor) -> Value:
            nonlocal count
            storage = tensor.untyped_storage()._cdata
            if storage not in places:
                places[storage], count = count, count + 1
            return Value(self._layout(tensor), places[storage])

        return _mapped(results, torch.Tensor, value)

    def _layout(self, tensor: torch.Tensor) -> Layout:
        key = id(tensor)
        if isinstance(tensor, FakeTensor) and tensor.constant is None:  # the elements of others matter
            sizes = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
            bits = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
            key = tensor.dtype, tensor.device, tensor.layout, *sizes, *bits
        if key not in self._layouts:
            self._layouts[key] = Layout(tensor)
        return self._layouts[key]

    def _new_number(self) -> int:
        self._storages += 1
        return self._storages


def storages_in(value) -> dict[int, int]:
    """The bytes of the storage of a value, or of those in a tuple, by their numbers."""
    if isinstance(value, Value):
        return {value.storage: value.layout.bytes}
    found: dict[int, int] = {}
    for each in value if isinstance(value, (tuple, list)) else ():
        found |= storages_in(each)
    return found


@once_per_graph
def fake_results(graph: JointGraph) -> FakeResults:
    """The results of the operations of `graph` so far."""
    return FakeResults()


def _key(argument, given: list[int]) -> Any:
    """The properties of an argument that determine a result; appends the storages that were not `given` before."""
    if isinstance(argument, Value):
        if argument.storage not in given:
            given.append(argument.storage)
        return argument.layout, given.index(argument.storage)
    if isinstance(argument, (tuple, list)):
        return tuple(_key(each, given) for each in argument)
    return type(argument), argument  # 1, 1.0 and True are equal


def _mapped(value, kind: type, function) -> Any:
    """`value` with `function` called for everything of `kind` in it."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)):
        mapped = [_mapped(each, kind, function) for each in value]
        return tuple(mapped) if isinstance(value, tuple) else mapped
    if isinstance(value, dict):
        return {name: _mapped(each, kind, function) for name, each in value.items()}
    return value


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    size, device = tensor.untyped_storage().nbytes(), tensor.device
    storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    made = made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return made._neg_view() if tensor.is_neg() else made


class RewriteError(RuntimeError):
    """The rewritten modules allocate other bytes than simulated. This is a bug in ackpt, and they do not run.

    Example:
        >>> issubclass(RewriteError, RuntimeError)
        True
    """


def live_after(
    root: fx.GraphModule,
    listing: Listing,
    results: FakeResults,
    arguments,
    uncounted,
    held: int,
    state_bytes: int,
    hosted: set[int],
) -> tuple[list[tuple[int, int]], list]:
    """The live bytes on the device and on the host after every operation of `listing`, and its outputs.

    `results`: of the operations of its graph; `arguments`: for its placeholders; `uncounted`: storages that belong to
    the caller; `held`: bytes that the caller keeps; `state_bytes`: of the generator's state that is saved while an
    operation replays another one; `hosted`: storages in host memory, to which those of the outputs are added.
    """
    live: list[tuple[int, int]] = []
    values: dict[Line, Any] = {}
    users: dict[int, int] = {}  # storage -> how many values use it
    total, in_host = held, 0
    last = _last_uses(listing)
    given = iter(arguments)

    def change(value, by: int):
        nonlocal total, in_host
        only_one = type(value) is Value
        for storage, size in ((value.storage, value.layout.bytes),) if only_one else storages_in(value).items():
            if storage in uncounted:
                continue
            before = users.get(storage, 0)
            users[storage] = before + by
            if before and users[storage]:
                continue
            if storage in hosted:
                in_host += by * size
            else:
                total += by * size
            if not users[storage]:
                hosted.discard(storage)

    for line in listing.lines:
        if line.op == "output":
            return live, [None if a is None else values[a] for a in line.args[0]]
        if line.op == "placeholder":
            values[line] = next(given)
        elif line.op == "get_attr":
            values[line] = results.given(line.target, getattr(root, line.target))
            continue
        else:
            args, kwargs = mapped((line.args, line.kwargs), values.__getitem__)
            values[line] = _result(line, results, args, kwargs)
            if line.target is offload:
                hosted.update(storages_in(values[line]))
        change(values[line], +1)
        if line.op != "placeholder" and not line.is_size and not _unpacks_state(line):
            live.append((total + (state_bytes if line.target is run_again else 0), in_host))
        for used in last.get(line, ()):
            change(values.pop(used), -1)
    raise RewriteError("a rewritten module has no output")


def _result(line: Line, results: FakeResults, args, kwargs) -> Any:
    operation: Any = line.target
    if operation is operator.getitem:
        return args[0][args[1]]
    if line.is_size:
        return operation(*(each.layout.example if isinstance(each, Value) else each for each in args))
    return results.run(operation, args, kwargs)


def _unpacks_state(line: Line) -> bool:
    """Whether a line only unpacks the pair of a random operation's result and its generator's state."""
    source = line.args[0] if line.target is operator.getitem else None
    return isinstance(source, Line) and source.target is run_and_save


def _last_uses(listing: Listing) -> dict[Line, list[Line]]:
    """By line, the values that the module's code drops after it."""
    last: dict[Line, list[Line]] = {}
    seen: set[Line] = set()
    for line in reversed(listing.lines):
        # Constants belong to the module; arguments that nothing reads live until the end.
        if line not in seen and line.op not in ("placeholder", "output", "get_attr"):
            last.setdefault(line, []).append(line)
        for used in line.inputs:
            if used not in seen and used.op != "get_attr":
                seen.add(used)
                if line.op != "output":
                    last.setdefault(line, []).append(used)
    return last
