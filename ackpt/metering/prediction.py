"""The peak of a training step from shapes alone, for models that do not fit and GPUs that are not there.

The step runs on fake or meta tensors under a dispatch mode that sees every operation below autograd: each storage
that an output brings along is born there, and dies when its last tensor does. The same engine drops the same saved
tensors at the same moments as in a real step, so births and deaths come in the real order.

What it does not see: memory that an operation takes and gives back inside itself (CPU flash attention's buffers per
thread, cuBLAS workspaces, the sorting in an embedding's backward), what an allocator adds beyond `round_to`, and the
states of random numbers that checkpointed regions with dropout keep (5 kB each).
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

from .cpu_losses import LOSSES, in_whole_memory
from .cpu_meter import no_collection
from .cuda_choices import cuda_choices
from .flops import UncountedFlops, count_flops
from .gradient_sums import EngineSums
from .meter import Measurement, assemble, check_step
from .resident import Item, Resident, rounded, storages_of
from .store_meter import store_watched
from .timeline import MeterError, build_timeline

_LIFT = torch.ops.aten.lift_fresh.default
_TO_COPY = torch.ops.aten._to_copy.default
# Attention that no fused kernel computes; on a CPU that with dropout, which is what follows it then.
_MATH_ATTENTION = torch.ops.aten._safe_softmax.default
_DROPOUT = torch.ops.aten.native_dropout.default, torch.ops.aten.empty_like.default
_DETACH = torch.ops.aten.detach.default  # between them, of what autograd saves


def predict(
    step_fn: Callable[[], object],
    *,
    resident: Iterable[Item] = (),
    device: str = "cpu",
    warmup: int = 1,
    round_to: int | None = None,
) -> Measurement:
    """Follow the bytes of one step on tensors without data.

    Args:
        step_fn: called without arguments; one forward and backward, with or without an optimizer step.
        resident: modules, optimizers and tensors, all made under ``FakeTensorMode`` on its CPU, or on ``"meta"``.
            Prefer the first: on ``"meta"`` torch takes a few operations apart, and then predicts too much for them.
        device: the device whose step is predicted. ``"cuda"`` makes torch choose as it does on a GPU (fused kernels,
            autocast's rules), so that no GPU and no CUDA build is needed; see ``predict_cuda``.
        warmup: steps before, so that gradients and optimizer state exist as they would in the measured step.
        round_to: bytes to which every block is rounded up; by default 512 on CUDA, 1 on the CPU.

    Returns:
        A `Measurement` without seconds; all sizes in bytes. Not in it is what an operation takes only while it runs,
        as convolutions do on a CPU: `ackpt.plan` measures that, with a graph captured from a model that has data.

    Raises:
        MeterError: for a device other than CPU and CUDA, for resident tensors that have data or lie on a fake GPU,
            for autocast on meta tensors, which it does not touch, for attention on them, which is not fused there, for
            a step that fails on them, and for code that Inductor generated.

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
    # A GPU holds nothing of the numbers that the step keeps on the CPU: an optimizer's count of steps, say.
    storages = _Storages(round_to, follow_real=device == "cpu")
    fake_mode = detect_fake_mode([tensor for _, tensor in owned.tensors()])
    choices = cuda_choices() if device == "cuda" else contextlib.nullcontext()
    with fake_mode or _explained_on_meta(), _NoAutocastOnMeta(), choices, storages:
        for _ in range(warmup):
            step_fn()
        gc.collect()
        held = owned.bytes(storages.counts, round_to)
        with store_watched(storages.actions.append) as store, storages.recording(owned), no_collection():
            try:
                flops = count_flops(storages.after_learning(step_fn))
            except UncountedFlops as error:
                raise MeterError(
                    "a step that Inductor compiled cannot be predicted: its code allocates by itself. Predict the "
                    'model before torch.compile, or compile it with the backend "ackpt" or "aot_eager"'
                ) from error
        after = owned.backed(storages.counts, lambda storage: storage._cdata)
    timeline = build_timeline(settled(storages.actions, storages.casts), storages.before, after)
    peaks = {"store_peak_bytes": store.peak_bytes} if store.peak_bytes else {}
    return assemble(f"{device} (predicted)", timeline, held, flops=flops, allocator=peaks)


def settled(actions, casts):
    """The actions, with frees in a row of blocks that were born at the places `casts` in the order of their births.

    Autocast drops its casts of the weights all at once, in the order of a hash table, which differs from run to run.
    """
    born: dict[int, int] = {}
    row: list[tuple] = []

    def in_order():
        loose = [place for place, free in enumerate(row) if born.get(free[1]) in casts]
        for place, free in zip(loose, sorted((row[place] for place in loose), key=lambda free: born[free[1]])):
            row[place] = free
        yield from row
        row.clear()

    for place, action in enumerate(actions):
        if action[0] == "free":
            row.append(action)
            continue
        yield from in_order()
        if action[0] == "alloc":
            born[action[1]] = place
        yield action
    yield from in_order()


_FAKE = "make the model, its inputs and the optimizer under FakeTensorMode instead"


@contextlib.contextmanager
def _explained_on_meta():
    """What torch cannot do on a meta device leaves as an error that names the way out."""
    try:
        yield
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        said = str(error).splitlines()[0].rstrip(".!")
        raise MeterError(f"the step does not run on meta tensors, {_FAKE}. Torch says: {said}") from error


def _check(category, tensor):
    if isinstance(tensor, FakeTensor):
        if tensor.device.type != "cpu":
            raise MeterError(
                f"a resident tensor lies on a fake {tensor.device}, where backward ends the process unless that GPU "
                "is there: make it on FakeTensorMode's CPU and say device='cuda'"
            )
    elif tensor.device.type != "meta" and not (category == "optimizer" and tensor.numel() == 1):
        raise MeterError(
            f"a resident tensor ({category}, {list(tensor.shape)}) has data: make it under FakeTensorMode or on "
            "device='meta', or use measure()"
        )


class _Storages(TorchDispatchMode):
    """Follows the births and deaths of the storages that operations bring along."""

    def __init__(self, round_to: int, follow_real: bool):
        super().__init__()
        self.round_to = round_to
        self.follow_real = follow_real
        self.active = self.backward = False
        self.actions: list[tuple] = []
        self.casts: set[int] = set()  # places of allocations in `actions`
        self.before: dict[int, tuple[str, int]] = {}
        self._followed: dict[int, tuple[weakref.ref, int]] = {}
        self._follows_attention = False
        self._sums = EngineSums()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles as it does without this mode, and what it compiled runs under it."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._follows_attention and func not in (*_DROPOUT, _DETACH):
            raise MeterError(f"attention on meta tensors is not that of any device: {_FAKE}")
        # Where a GPU is imitated, attention is its own choice.
        is_attention = self.follow_real and func is _MATH_ATTENTION and any(tensor.is_meta for tensor in given)
        self._follows_attention = is_attention or (self._follows_attention and func is _DETACH)
        if self.active and not self.backward and torch._C._current_graph_task_id() != -1:
            self.backward = True
            self.actions.append(("backward",))
        if self.active and self._sums.in_place(func, args):
            func = torch.ops.aten.add_.Tensor
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            # A random number state, an optimizer's count of steps: values that the step reads, so they stay real.
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if func in LOSSES:
            result = in_whole_memory(result, *args)
        if self.active:
            known = {storage._cdata for tensor in given for storage in storages_of(tensor)} if func != _LIFT else ()
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    before = len(self.actions)
                    self._see(tensor, known)
                    if func is _TO_COPY:
                        self.casts.update(range(before, len(self.actions)))
        return result

    def _see(self, tensor, known):
        if not self.counts(tensor):
            return
        for storage in storages_of(tensor):
            key, size = storage._cdata, rounded(storage.nbytes(), self.round_to)
            if key not in self._followed:
                if key not in known and size:
                    self.actions.append(("alloc", key, size))
                    self._follow(storage, size)
                    self._sums.born(key)
            elif self._followed[key][1] != size:  # resized in place
                self.actions += [("free", key), ("alloc", key, size)]
                self._follow(storage, size)

    def counts(self, tensor) -> bool:
        return self.follow_real or isinstance(tensor, FakeTensor) or tensor.is_meta

    def _follow(self, storage, size):
        self._followed[storage._cdata] = (weakref.ref(storage, lambda _, key=storage._cdata: self._died(key)), size)

    def _died(self, key):
        del self._followed[key]
        self._sums.died(key)
        self.actions.append(("free", key))

    def after_learning(self, step_fn):
        """`step_fn`, preceded by what `EngineSums` learns under the same modes; that leaves no actions."""

        def step():
            self._sums.learn()
            self.actions.clear()
            self.backward = False
            return step_fn()

        return step

    @contextlib.contextmanager
    def recording(self, owned):
        """Record inside; gradients that exist already are followed as such."""
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
    """An error where a step on meta tensors relies on autocast, which passes them by."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
                raise MeterError(f"autocast does nothing to meta tensors: {_FAKE}")
        return func(*args, **(kwargs or {}))
