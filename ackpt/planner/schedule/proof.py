"""Check a rewritten module independently: run it on fake tensors and count the live bytes after every operation.

It is independent of the schedule and the simulator: aliases come from the storages that the operations return
(`fake_results`), and lifetimes from the last use of every value in the module's code.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .added_operations import offload, run_again, run_and_save
from .fake_results import FakeResults, Value, storages_in
from .listing import Line, Listing, mapped


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
