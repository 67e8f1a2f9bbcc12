"""The blocks of a model, and how one runs as a region or as it is.

A block is a repeated block, as `ackpt.apply_activation_checkpointing` chooses them, or a module at the same level that
is more than one operation. While a forward of the model runs, the plan stands in for the ``forward`` of every block, so
hooks of blocks run as usual.
"""

import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from ackpt.checkpointing import guards
from ackpt.checkpointing.guards import MutableState, version
from ackpt.checkpointing.reachable import ReachableState
from ackpt.checkpointing.rng import drawn_from, snapshot
from ackpt.checkpointing.standing_in import StandIn
from ackpt.checkpointing.tree import Tensors, strip_arguments
from ackpt.checkpointing.wrapping import callable_members, repeated_blocks
from ackpt.planner.capture.inspection.model_checks import is_opaque

_SMALL = 1 << 20  # bytes; arguments up to this size are copied, in case a block changes them
_DEPTH = 8  # of containers and objects in arguments


class Block:
    """A module that runs as a region or as it is, as long as this exists.

    ``refused``: why it cannot be a region, empty if it can. ``has_run``: whether it has run as a region. ``kind``:
    equal for blocks that probably allocate alike.
    """

    def __init__(self, path: str, module: nn.Module):
        self.path, self.module = path, module
        self.refused = ""
        self.has_run = False
        self.kind = type(module), *(tuple(each.shape) for each in module.parameters())
        self._stand_in = StandIn(type(module), None)

    @property
    def gradient_bytes(self) -> int:
        return sum(each.nbytes for each in self.module.parameters() if each.requires_grad)

    def __repr__(self) -> str:
        return f"module {self.path!r} ({type(self.module).__name__})"


def blocks_of(model: nn.Module) -> list[Block]:
    """The blocks of `model`, none inside another."""
    repeated = repeated_blocks(model)
    chosen = dict(_blocks_in(model, "", repeated, set()))
    while len(chosen) == 1 and not chosen.keys() & repeated.keys():
        ((path, module),) = chosen.items()
        inner = dict(_blocks_in(module, path, repeated, set()))
        if not inner:
            break
        chosen = inner
    return [Block(path, module) for path, module in chosen.items() if not is_opaque(model, path)]


def _blocks_in(module: nn.Module, path: str, repeated: Mapping[str, nn.Module], seen: set[int]):
    for child_path, child in callable_members(module, path):
        if id(child) in seen:
            continue
        seen.add(id(child))
        if child_path in repeated:
            yield child_path, child
        elif any(each.startswith(f"{child_path}.") for each in repeated):
            yield from _blocks_in(child, child_path, repeated, seen)
        elif any(True for _ in child.children()) or isinstance(child, nn.RNNBase) or not _is_of_torch(child):
            yield child_path, child


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module without submodules is one operation of torch, which saves as much as a region of it would."""
    if isinstance(module, torch.jit.ScriptModule):  # whose forward cannot be read
        return True
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.")


class UndoableState(MutableState):
    """What a run can change, for a run that is undone and not repeated; `after_forward` is not called."""

    def undo(self) -> None:
        """Restore the values from before the run."""
        bindings, contents = self._changes()
        guards._bind(bindings)
        guards._fill(contents)
        with torch.no_grad():
            for tensor, _, mark, copy in self._before:
                if copy is None or (version(tensor) == mark and guards.is_equal(tensor, copy)):
                    continue
                with torch.autograd._unsafe_preserve_version_counter(tensor):
                    guards._set(tensor, copy)


class _Body(threading.local):
    """How the body of a region runs in this thread.

    ``first``: a context for the first forward; None for recomputations. ``live``: what counts recomputations; ``run``:
    the recorded call, whose recomputation gives its cost.
    """

    first: AbstractContextManager | None = None
    live: Any = None
    run: Any = None


in_thread = _Body()


def run_body(forward, *args, **kwargs) -> Any:
    """Run a block as the body of a region, with what `in_thread` says."""
    first, in_thread.first = in_thread.first, None
    if first is None:
        live, run = in_thread.live, in_thread.run
        if live is None:
            return forward(*args, **kwargs)
        cost = live.cost
        result = live.recomputed(forward, *args, **kwargs)
        if run is not None:
            run.cost = live.cost - cost
        return result
    with first:
        return forward(*args, **kwargs)


class Undo:
    """The state that a block can change, for a second run of a block that cannot be a region.

    Random numbers, buffers and attributes of modules; containers, objects and small tensors among the arguments.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple, kwargs: dict):
        reachable = ReachableState(forward, strip_arguments((*args, *kwargs.values()), Tensors())[0])
        self._state = UndoableState(reachable)
        self._streams = snapshot(reachable.streams)
        if not torch._C._are_functorch_transforms_active():  # whose tensors hide their bytes
            # As bytes: while the block runs, torch has allocated what its region needs, and no more.
            self._streams = [(at, bytearray(s.numpy()) if torch.is_tensor(s) else s) for at, s in self._streams]
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._save([args, kwargs], 0, set())

    def _save(self, value: Any, depth: int, seen: set[int]) -> None:
        if id(value) in seen or depth > _DEPTH:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not value.requires_grad and not value.is_inference() and value.layout is torch.strided:
                copy = value.clone() if value.nbytes <= _SMALL else None
                self._tensors.append((value, version(value), copy))
        elif isinstance(value, (list, tuple, dict)):
            if not isinstance(value, tuple):
                self._contents.append((value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                self._save(item, depth + 1, seen)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            self._save(vars(value), depth + 1, seen)

    def undo(self) -> bool:
        """Restore everything; False if a large argument was changed, of which there is no copy."""
        tensor = partial(torch.frombuffer, dtype=torch.uint8)
        states = [(each, tensor(state) if isinstance(state, bytearray) else state) for each, state in self._streams]
        for stream, state in drawn_from(states):
            stream.set(state)
        self._state.undo()
        for container, items in self._contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(items)
        changed = [(tensor, copy) for tensor, before, copy in self._tensors if version(tensor) != before]
        with torch.no_grad():
            for tensor, copy in changed:
                if copy is not None:
                    with torch.autograd._unsafe_preserve_version_counter(tensor):
                        tensor.copy_(copy)
        return all(copy is not None for _, copy in changed)


def first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.partition(". ")[0].rstrip(".")


def free(error: BaseException | None) -> None:
    """Free what the frames of an error and its causes refer to."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
