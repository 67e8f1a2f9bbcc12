"""Parts of autograd's engine that torch does not expose: where a backward starts, and what it writes in place.

`around_backward` runs every backward within a context, `InPlace` recognizes what a real step computes in place, and
`SavedNumbers` follows the numbers that autograd saves as tensors.
"""

import contextlib
import sys
import weakref
from typing import Any

import torch
from torch.utils import flop_counter

_CALL_ENGINE = ("torch.autograd.graph", "ackpt.checkpointing.reentrant")  # the modules that enter autograd's engine
aten = torch.ops.aten
SAVE_NUMBERS = (aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor)
PRODUCTS = ("MulBackward0", "DivBackward0")
# Derivative formulas write in place into zeros that they allocate, except for tensor subclasses and under a mode: see
# areAnyTensorSubclassLike in torch's FunctionsManual.cpp and TensorAdvancedIndexing.cpp.
INTO_ZEROS = ("aten::index_add", "aten::scatter_add", "aten::scatter", "aten::index_put", "aten::put")
INTO_ZEROS += ("aten::masked_scatter",)
ZEROS = ("aten::new_zeros", "aten::zeros", "aten::zeros_like")


@contextlib.contextmanager
def around_backward(context):
    """While this context is active, every backward that Python code starts runs within ``context()``.

    Autograd has no hook for the start of a backward, but all of torch's Python code enters the engine through
    ``torch.autograd.graph._engine_run_backward``, which ``torch.autograd`` imports; this replaces that name.
    """
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


class InPlace:
    """Recognizes what backward would write in place in a real step; before `learn` has run, it recognizes nothing.

    These are what derivative formulas write into their own zeros, and sums of gradients: where several meet, the engine
    adds each further one to the first in place, if nothing else references the first (``can_accumulate_inplace`` in
    torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode it never does so (``isTensorSubclassLike``): the mode
    sees an ``aten.add``. Remove this once ``tests/metering/test_predict_sums.py`` passes without it.

    Torch has no interface that distinguishes the engine's sums from others, and its reference counts include the
    references of the modes that pass a tensor on. So `learn` first observes a sum that is known to be in place.
    """

    def __init__(self):
        self._zeros: set[int] = set()
        self._files_of_modes: set[str] = set()
        self._in_place_signature: tuple | None = None
        self._learning = False
        self._allocated_by: dict[int, int] = {}  # storage -> sequence number of the autograd node that allocated it

    def learn(self) -> None:
        """Observe one sum that the engine would make in place; call this under the same modes as the step."""
        self._learning = True
        try:
            with torch.autocast("cpu", enabled=False):  # which the modes refuse on the meta device
                x = torch.empty((), device="meta", requires_grad=True)
                y = x.sin()
                torch.autograd.grad(y.sin() + y.cos(), x)
        finally:
            self._learning = False

    def allocated(self, key: int, func) -> None:
        if node := torch._C._current_autograd_node():
            self._allocated_by[key] = node._sequence_nr()
            if func._schema.name in ZEROS:
                self._zeros.add(key)

    def freed(self, key: int) -> None:
        self._allocated_by.pop(key, None)
        self._zeros.discard(key)

    def of(self, func, args):
        """The operation that a real step would run: `func`, or its variant that writes in place."""
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return func
        frames = _frames_from_engine()
        if func is aten.add.Tensor and self._is_sum(frames, *args):
            return aten.add_.Tensor
        if func._schema.name in INTO_ZEROS and self._is_into_zeros(frames, args[0]):
            return getattr(getattr(aten, func.overloadpacket.__name__ + "_"), func._overloadname)
        return func

    def _is_into_zeros(self, frames, zeros) -> bool:
        key, node = zeros.untyped_storage()._cdata, torch._C._current_autograd_node()
        is_of_node = key in self._zeros and node is not None and self._allocated_by[key] == node._sequence_nr()
        return is_of_node and frames is not None and {code.co_filename for code in frames} <= self._files_of_modes

    def _is_sum(self, frames, first, second) -> bool:
        if not isinstance(second, torch.Tensor) or first.shape != second.shape:
            return False
        if first.layout != torch.strided or second.layout != torch.strided:
            return False
        storage = first.untyped_storage()
        signature = (frames, *references(first))
        if self._learning:
            self._in_place_signature = signature
            self._files_of_modes = {flop_counter.__file__, *(code.co_filename for code in frames or ())}
        if signature != self._in_place_signature or first._is_zerotensor() or not is_dense(first):
            return False
        node = torch._C._current_autograd_node()
        if node is None or self._allocated_by.get(storage._cdata) != node._sequence_nr():
            return True
        # The running node allocated it: a temporary of its formula, unless two of its gradients go to the same target.
        return sums_own_gradients(node)


class SavedNumbers:
    """Records the tensors that autograd saves of Python numbers, the second operands of products."""

    def __init__(self, actions: list[tuple]):
        self._actions = actions
        self._products: list[tuple[weakref.ref, int]] = []  # results whose autograd node does not exist yet
        self._count = 0

    def save(self, func, args, result) -> None:
        if func in SAVE_NUMBERS and torch.is_grad_enabled() and args[0].requires_grad and number_bytes(args[1]):
            self._products.append((weakref.ref(result), number_bytes(args[1])))

    def saved(self, func, args) -> int:
        """Bytes of the number that the derivative of a product reads: torch creates no new tensor for it."""
        node = torch._C._current_autograd_node()
        is_derivative = node is not None and func in SAVE_NUMBERS and node.name() in PRODUCTS
        return number_bytes(args[1]) if is_derivative and not torch.is_grad_enabled() else 0

    def follow(self) -> None:
        """Record the numbers of the products so far, once autograd has added their nodes."""
        waiting = []
        for reference, size in self._products:
            node = getattr(reference(), "grad_fn", None)
            if node is not None and node.name() in PRODUCTS:
                self._count += 1
                key = "number", self._count
                self._actions.append(("alloc", key, size))
                node.register_hook(_Release(self._actions, key))
            elif reference() is not None:
                waiting.append((reference, size))
        self._products = waiting


class _Release:
    """A hook owned by an autograd node: it runs before the node frees its saved tensors, or with the node."""

    def __init__(self, actions: list[tuple], key: tuple[str, int]):
        self._actions, self._key = actions, key

    def __call__(self, *_) -> None:
        if self._key is not None:
            self._actions.append(("free", self._key))
            self._key = None

    __del__ = __call__


def number_bytes(factor: Any) -> int:
    """Bytes of the tensor that torch creates from a number; 0 for a tensor."""
    if isinstance(factor, torch.Tensor):
        return 0
    return {bool: 1, complex: 16}.get(type(factor), 8)


def references(tensor: Any) -> tuple[int, int]:
    """How many references torch counts to a tensor and to its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


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


def is_dense(tensor, expanded: bool = False) -> bool:
    """Whether the elements fill their memory without gaps or overlaps; if `expanded`, they may repeat."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if expanded and not stride:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
