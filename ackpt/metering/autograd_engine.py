"""What autograd's engine does and no interface of torch shows: where a backward starts, and which sums are in place.

`around_backward` runs every backward within a context. Autograd has no hook for the start of a backward. But all of
torch's Python code enters the engine through one function, ``torch.autograd.graph._engine_run_backward``, which
``torch.autograd`` imports; `around_backward` replaces that name.

`EngineSums` recognizes the gradient sums that are made in place: a prediction must not count them as allocations. Where
several gradients meet, the engine adds each further one to the first in place, if nothing else references
the first (``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode it never does so
(``isTensorSubclassLike``): the mode sees the sum as an ``aten.add``. Remove it once
``tests/metering/test_predict_sums.py`` passes without it, that is, once modes see ``add_``.

Torch has no interface that distinguishes the engine's sums from others, and its reference counts include the references
of the modes that pass a tensor on. So `EngineSums.learn` first observes a sum that is known to be in place.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

_CALL_ENGINE = ("torch.autograd.graph", "ackpt.checkpointing.reentrant")  # the modules that enter autograd's engine
_ADD = torch.ops.aten.add.Tensor


@contextlib.contextmanager
def around_backward(context):
    """While this context is active, every backward that Python code starts runs within ``context()``."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run_backward(*args, **kwargs):
        with context():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run_backward
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


class EngineSums:
    """Recognizes the sums that the engine would make in place; before `learn` has run, it recognizes none."""

    def __init__(self):
        self._in_place_signature: tuple | None = None
        self._learning = False
        self._allocated_by: dict[int, int] = {}  # storage -> sequence number of the autograd node that allocated it

    def learn(self) -> None:
        """Observe one sum that the engine would make in place; call this under the same modes as the step."""
        x = torch.empty((), device="meta", requires_grad=True)
        y = x.sin()
        self._learning = True
        try:
            torch.autograd.grad(y.sin() + y.cos(), x)
        finally:
            self._learning = False

    def allocated(self, key: int) -> None:
        if node := torch._C._current_autograd_node():
            self._allocated_by[key] = node._sequence_nr()

    def freed(self, key: int) -> None:
        self._allocated_by.pop(key, None)

    def in_place(self, func, args) -> bool:
        """Whether this call is a sum of the engine that would be in place in a real step."""
        if func is not _ADD or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        first, second = args[:2]
        if not isinstance(second, torch.Tensor) or first.shape != second.shape:
            return False
        if first.layout != torch.strided or second.layout != torch.strided:
            return False
        storage = first.untyped_storage()
        signature = (_frames_from_engine(), first._use_count(), torch._C._storage_Use_Count(storage._cdata))
        if self._learning:
            self._in_place_signature = signature
        if signature != self._in_place_signature or first._is_zerotensor() or not is_dense(first):
            return False
        node = torch._C._current_autograd_node()
        if node is None or self._allocated_by.get(storage._cdata) != node._sequence_nr():
            return True
        # The running node allocated it: a temporary of its formula, unless two of its gradients go to the same target.
        return sums_own_gradients(node)


def _frames_from_engine() -> tuple | None:
    """The code of the frames between the engine and this call (only modes if the engine made it), or None."""
    codes, frame = [], sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") not in _CALL_ENGINE:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(codes) if frame is not None else None


def sums_own_gradients(autograd_node) -> bool:
    """Whether two gradients of an autograd node go to the same target, as those of ``x * x``."""
    targets = [target for target in autograd_node.next_functions if target[0] is not None]
    return len(set(targets)) < len(targets)


def is_dense(tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
