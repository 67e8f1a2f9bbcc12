"""Predict the memory of a training step from shapes alone, for models that do not fit and GPUs that are not there.

The step runs on fake or meta tensors under a dispatch mode that sees every operation below autograd. A storage in the
outputs of an operation counts as allocated there, and as freed when its last tensor is freed. Autograd's engine drops
saved tensors at the same points as in a real step, so allocations and frees have the real order.

Not included: workspaces, which an operation allocates and frees internally (CPU flash attention's buffers per thread,
cuBLAS workspaces, the sort in an embedding's backward); bytes that an allocator adds beyond `round_to`; and the RNG
states that checkpointed regions with dropout keep (5 kB each).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .autograd_engine import EngineSums
from .cpu_meter import no_collection
from .cuda_choices import cuda_choices
from .flops import UncountedFlops, count_flops
from .kernel_memory import LOSSES, in_whole_memory
from .meter import Measurement, assemble, check_step
from .resident import Item, Resident, rounded, storages_of
from .store_meter import store_watched
from .timeline import MeterError, build_timeline

_LIFT = torch.ops.aten.lift_fresh.default
_TO_COPY = torch.ops.aten._to_copy.default
# The sign of attention without a fused kernel. On a CPU attention with dropout has none, and dropout follows.
_MATH_ATTENTION = torch.ops.aten._safe_softmax.default
_DROPOUT = torch.ops.aten.native_dropout.default, torch.ops.aten.empty_like.default
_DETACH = torch.ops.aten.detach.default  # between these two, for tensors that autograd saves


def predict(
    step_fn: Callable[[], object],
    *,
    resident: Iterable[Item] = (),
    device: str = "cpu",
    warmup: int = 1,
    round_to: int | None = None,
) -> Measurement:
    """Predict the bytes of one step by running it on tensors without data.

    Args:
        step_fn: one forward and backward, with or without an optimizer step; called without arguments.
        resident: modules, optimizers and tensors, all created under ``FakeTensorMode`` on its CPU, or on ``"meta"``.
            Prefer the first: on ``"meta"`` torch decomposes some operations, whose predicted bytes are too large.
        device: the device whose step is predicted. For ``"cuda"`` the step uses the fused kernels and autocast rules of
            a GPU; neither a GPU nor a CUDA build of torch is needed (see ``ackpt/metering/cuda_choices.py``).
        warmup: number of steps before, so that gradients and optimizer state exist as in the measured step.
        round_to: bytes to which every block is rounded up; by default 512 on CUDA, 1 on the CPU.

    Returns:
        A `Measurement` without seconds; all sizes in bytes. It does not include workspaces, such as those of
        convolutions on a CPU. `ackpt.plan` measures them, for a graph captured from a model with data.

    Raises:
        MeterError: for a device other than CPU and CUDA; for resident tensors with data or on a fake GPU; for autocast
            on meta tensors, which it does not change; for attention on meta tensors, which is not fused; for a step
            that fails on meta tensors; and for code that Inductor generated.

    Example:
        >>> import torch
        >>> from ackpt import predict
        >>> layer, x = torch.nn.Linear(1024, 1024, device="meta"), torch.empty(8, 1024, device="meta")
        >>> predict(lambda: layer(x).sum().backward(), resident=(layer, x)).categories["parameters"]
        4198400
    """
    if device not in ("cpu", "cuda"):
        raise MeterError(f"device {device!r} cannot be predicted; 'cpu' and 'cuda' can")
    check_step(step_fn)
    round_to = (512 if device == "cuda" else 1) if round_to is None else round_to
    owned = Resident(resident)
    for category, tensor in owned.tensors():
        _check(category, tensor)
    # On a GPU, tensors that the step keeps on the CPU do not count, such as an optimizer's count of steps.
    storages = _Storages(round_to, follow_real=device == "cpu")
    fake_mode = detect_fake_mode([tensor for _, tensor in owned.tensors()])
    choices = cuda_choices() if device == "cuda" else contextlib.nullcontext()
    with fake_mode or _explained_on_meta(), _NoAutocastOnMeta(), choices, storages:
        for _ in range(warmup):
            step_fn()
        gc.collect()
        resident_bytes = owned.bytes(storages.counts, round_to)
        with store_watched(storages.actions.append) as store, storages.recording(owned), no_collection():
            try:
                flops = count_flops(storages.after_learning(step_fn))
            except UncountedFlops as error:
                raise MeterError(
                    "a step that Inductor compiled cannot be predicted: its code allocates by itself. Predict the "
                    'model before torch.compile, or compile it with the backend "ackpt" or "aot_eager"'
                ) from error
        after = owned.backed(storages.counts, lambda storage: storage._cdata)
    timeline = build_timeline(with_sorted_frees(storages.actions, storages.casts), storages.before, after)
    peaks = {"store_peak_bytes": store.peak_bytes} if store.peak_bytes else {}
    return assemble(f"{device} (predicted)", timeline, resident_bytes, flops=flops, allocator=peaks)


def with_sorted_frees(actions, casts):
    """The actions, with consecutive frees of casts sorted by their allocation; `casts` are indices of allocations.

    Autocast frees its casts of the weights together, in the order of a hash table, which differs from run to run.
    """
    allocated: dict[int, int] = {}  # key of a block -> index of its allocation
    frees: list[tuple] = []

    def in_order():
        unordered = [i for i, free in enumerate(frees) if allocated.get(free[1]) in casts]
        ordered = sorted((frees[i] for i in unordered), key=lambda free: allocated[free[1]])
        for i, free in zip(unordered, ordered):
            frees[i] = free
        yield from frees
        frees.clear()

    for index, action in enumerate(actions):
        if action[0] == "free":
            frees.append(action)
            continue
        yield from in_order()
        if action[0] == "alloc":
            allocated[action[1]] = index
        yield action
    yield from in_order()


_FAKE = "make the model, its inputs and the optimizer under FakeTensorMode instead"


@contextlib.contextmanager
def _explained_on_meta():
    """Turn errors of torch about the meta device into a MeterError that names the fix."""
    try:
        yield
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        message = str(error).splitlines()[0].rstrip(".!")
        raise MeterError(f"the step does not run on meta tensors, {_FAKE}. Torch says: {message}") from error


def _check(category, tensor):
    if isinstance(tensor, FakeTensor):
        if tensor.device.type != "cpu":
            raise MeterError(
                f"a resident tensor is on a fake {tensor.device}, where backward crashes the process if there is no "
                "such GPU: create it on FakeTensorMode's CPU and give device='cuda'"
            )
    elif tensor.device.type != "meta" and not (category == "optimizer" and tensor.numel() == 1):
        raise MeterError(
            f"a resident tensor ({category}, {list(tensor.shape)}) has data: make it under FakeTensorMode or on "
            "device='meta', or use measure()"
        )


class _Storages(TorchDispatchMode):
    """Records the allocations and frees of the storages in the outputs of operations."""

    def __init__(self, round_to: int, follow_real: bool):
        super().__init__()
        self.round_to = round_to
        self.follow_real = follow_real
        self.active = self.backward = False
        self.actions: list[tuple] = []
        self.casts: set[int] = set()  # indices of their allocations in `actions`
        self.before: dict[int, tuple[str, int]] = {}
        self._followed: dict[int, tuple[weakref.ref, int]] = {}
        self._follows_attention = False
        self._sums = EngineSums()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that Dynamo compiles the model and runs compiled code under this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._follows_attention and func not in (*_DROPOUT, _DETACH):
            raise MeterError(f"attention on meta tensors is not that of any device: {_FAKE}")
        # Not for a GPU, for which `attention_choices` chooses the kernel.
        is_attention = self.follow_real and func is _MATH_ATTENTION and any(tensor.is_meta for tensor in inputs)
        self._follows_attention = is_attention or (self._follows_attention and func is _DETACH)
        if self.active and not self.backward and torch._C._current_graph_task_id() != -1:
            self.backward = True
            self.actions.append(("backward",))
        if self.active and self._sums.in_place(func, args):
            func = torch.ops.aten.add_.Tensor
        if inputs and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            # Tensors with values that the step reads, such as an RNG state or an optimizer's count of steps, stay real.
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if func in LOSSES:
            result = in_whole_memory(result, *args)
        if self.active:
            existing = {storage._cdata for tensor in inputs for storage in storages_of(tensor)} if func != _LIFT else ()
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    before = len(self.actions)
                    self._record(tensor, existing)
                    if func is _TO_COPY:
                        self.casts.update(range(before, len(self.actions)))
        return result

    def _record(self, tensor, existing):
        if not self.counts(tensor):
            return
        for storage in storages_of(tensor):
            key, size = storage._cdata, rounded(storage.nbytes(), self.round_to)
            if key not in self._followed:
                if key not in existing and size:
                    self.actions.append(("alloc", key, size))
                    self._follow(storage, size)
                    self._sums.allocated(key)
            elif self._followed[key][1] != size:  # resized in place
                self.actions += [("free", key), ("alloc", key, size)]
                self._follow(storage, size)

    def counts(self, tensor) -> bool:
        return self.follow_real or isinstance(tensor, FakeTensor) or tensor.is_meta

    def _follow(self, storage, size):
        self._followed[storage._cdata] = (weakref.ref(storage, lambda _, key=storage._cdata: self._freed(key)), size)

    def _freed(self, key):
        del self._followed[key]
        self._sums.freed(key)
        self.actions.append(("free", key))

    def after_learning(self, step_fn):
        """A function that lets `EngineSums` learn under the step's modes, discards its actions, and runs the step."""

        def step():
            self._sums.learn()
            self.actions.clear()
            self.backward = False
            return step_fn()

        return step

    @contextlib.contextmanager
    def recording(self, owned):
        """A context that records actions; existing gradients are followed as gradients."""
        for _, storage in owned.gradients(self.counts):
            size = rounded(storage.nbytes(), self.round_to)
            self.before[storage._cdata] = ("gradients", size)
            self._follow(storage, size)
        _ = storage = None

        def complete(leaf):
            self.actions.extend(("mark", storage._cdata, "gradients") for storage in storages_of(leaf.grad))

        handles = [leaf.register_post_accumulate_grad_hook(complete) for leaf in owned.trainable()]
        self.active = True
        try:
            yield
        finally:
            self.active = False
            for handle in handles:
                handle.remove()


class _NoAutocastOnMeta(TorchFunctionMode):
    """Raises an error if a step on meta tensors relies on autocast, which does not change them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
                raise MeterError(f"autocast does nothing to meta tensors: {_FAKE}")
        return func(*args, **(kwargs or {}))
