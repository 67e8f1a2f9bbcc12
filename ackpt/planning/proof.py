"""Check a rewritten module independently: run it on fake tensors and count the live bytes after every operation.

It is independent of the schedule and the simulator: aliases come from the storages that the operations return
(`fake_results`), and lifetimes from the last use of every value in the module's code.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ackpt.capture.fake_results import FakeResults, Value, storages_in

from .copy_operations import offload
from .rng_replay import run_again, run_and_save

IS_SIZE = "ackpt_is_size"  # in the meta of nodes that compute sizes, not tensors


class RewriteError(RuntimeError):
    """The rewritten modules allocate other bytes than simulated: a fault of ackpt, which is never run silently.

    Example:
        >>> issubclass(RewriteError, RuntimeError)
        True
    """


def live_after(
    root: fx.GraphModule,
    graph: fx.Graph,
    results: FakeResults,
    arguments,
    uncounted,
    held: int,
    state_bytes: int,
    hosted: set[int],
) -> tuple[list[tuple[int, int]], list]:
    """Live bytes on the device and in host memory right after every operation of `graph`, before its arguments are
    freed, and the outputs.

    Args:
        root: the module that `graph` belongs to.
        graph: one half of a rewritten step.
        results: of the operations of its graph.
        arguments: values for its placeholders, and values of `results` for those that are tensors.
        uncounted: storages that belong to the caller.
        held: bytes that the caller keeps all the time, besides the arguments.
        state_bytes: of the generator's state that is saved while an operation replays another one.
        hosted: storages in host memory; those that `graph` returns are added.
    """
    live: list[tuple[int, int]] = []
    values: dict[fx.Node, Any] = {}
    users: dict[int, int] = {}  # storage -> how many values use it
    total, in_host = held, 0
    last = _last_uses(graph)
    given = iter(arguments)

    def change(value, by: int):
        nonlocal total, in_host
        for storage, size in storages_in(value).items():
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

    for node in graph.nodes:
        if node.op == "output":
            return live, [None if a is None else values[a] for a in node.args[0]]
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = results.given(node.target, getattr(root, node.target))
            continue
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = _result(node, results, args, kwargs)
            if node.target is offload:
                hosted.update(storages_in(values[node]))
        change(values[node], +1)
        if node.op != "placeholder" and not node.meta.get(IS_SIZE) and not _unpacks_state(node):
            live.append((total + (state_bytes if node.target is run_again else 0), in_host))
        for used in last.get(node, ()):
            change(values.pop(used), -1)
    raise RewriteError("a rewritten module has no output")


def _result(node: fx.Node, results: FakeResults, args, kwargs) -> Any:
    operation: Any = node.target
    if operation is operator.getitem:
        return args[0][args[1]]
    if node.meta.get(IS_SIZE):
        return operation(*(each.layout.example if isinstance(each, Value) else each for each in args))
    return results.run(operation, args, kwargs)


def _unpacks_state(node: fx.Node) -> bool:
    """Whether a node only unpacks the pair of a random operation's result and its generator's state."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is run_and_save


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the values that the module's code drops after it."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        # Constants belong to the module; arguments that nothing reads live until the end.
        if not node.users and node.op not in ("placeholder", "output", "get_attr"):
            last.setdefault(node, []).append(node)
        for used in node.all_input_nodes:
            if used not in seen and used.op != "get_attr":
                seen.add(used)
                if node.op != "output":
                    last.setdefault(node, []).append(used)
    return last
