"""Check a rewritten module independently: run it on fake tensors and count the live bytes after every operation.

It is independent of the schedule and the simulator: aliases come from the storages that the operations return, and
lifetimes from the last use of every value in the module's code.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .copy_operations import offload
from .rng_replay import run_again, run_and_save

IS_SIZE = "ackpt_is_size"  # in the meta of nodes that compute sizes, not tensors


class RewriteError(RuntimeError):
    """The rewritten modules allocate other bytes than simulated: a fault of ackpt, which is never run silently.

    Example:
        >>> issubclass(RewriteError, RuntimeError)
        True
    """


def storages_in(value) -> list:
    """The storages of a tensor or of the tensors in a tuple, each once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return list({storage._cdata: storage for storage in storages}.values())


def live_after(
    module: fx.GraphModule, arguments, uncounted, held: int, state_bytes: int, hosted: set[int]
) -> tuple[list[tuple[int, int]], list]:
    """Live bytes on the device and in host memory right after every operation of `module`, before its arguments are
    freed, and the outputs.

    Args:
        module: one half of a rewritten step.
        arguments: fake tensors for its placeholders.
        uncounted: storages (``_cdata``) that belong to the caller.
        held: bytes that the caller keeps all the time, besides the arguments.
        state_bytes: of the generator's state that is saved while an operation replays another one.
        hosted: storages (``_cdata``) in host memory; those that `module` returns are added.
    """
    live: list[tuple[int, int]] = []
    values: dict[fx.Node, Any] = {}
    users: dict[int, int] = {}  # storage -> how many values use it
    sizes: dict[int, int] = {}
    total, in_host = held, 0
    last = _last_uses(module.graph)
    given = iter(arguments)

    def change(value, by: int):
        nonlocal total, in_host
        for storage in storages_in(value):
            key = storage._cdata
            if key in uncounted:
                continue
            before = users.get(key, 0)
            users[key] = before + by
            if before and users[key]:
                continue
            sizes.setdefault(key, storage.nbytes())
            if key in hosted:
                in_host += by * sizes[key]
            else:
                total += by * sizes[key]
            if not users[key]:
                del sizes[key]
                hosted.discard(key)

    for node in module.graph.nodes:
        if node.op == "output":
            return live, [None if a is None else values[a] for a in node.args[0]]
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
            continue
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            if node.target is offload:
                hosted.update(storage._cdata for storage in storages_in(values[node]))
        change(values[node], +1)
        if node.op != "placeholder" and not node.meta.get(IS_SIZE) and not _unpacks_state(node):
            live.append((total + (state_bytes if node.target is run_again else 0), in_host))
        for used in last.get(node, ()):
            change(values.pop(used), -1)
    raise RewriteError("a rewritten module has no output")


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
