"""Predict the memory of a training step from shapes alone, for models that do not fit and GPUs that are not there.

The step runs on fake or meta tensors under a dispatch mode that sees every operation below autograd. A storage in the
outputs of an operation counts as allocated there, and as freed when its last tensor is freed. Autograd's engine drops
saved tensors at the same points as in a real step, so allocations and frees have the real order.

On the CPU, `kernel_memory` measures the workspace of single operations on made-up data. For a GPU, the actions drive a
model of PyTorch's caching allocator, from loading the model on. Not included: what `kernel_memory` lists for a GPU, and
the RNG states that checkpointed regions with dropout keep (5 kB each).
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .cpu_meter import no_collection
from .cuda_choices import cuda_choices
from .cuda_meter import BLOCK, modeled
from .flops import UncountedFlops, count_flops
from .gpus import AllocatorSettings, gpu
from .meter import Measurement, assemble, check_step
from .resident import Item, Resident
from .storages import FAKE, Storages, with_sorted_frees
from .timeline import MeterError, build_timeline, store_watched
from .without_data.holders import Made
from .without_data.packed_sequences import found_packed

_GRADIENT: Any = torch.Tensor.grad.__get__  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


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
        device: the device whose step is predicted: ``"cpu"``, a GPU by its name in
            ``ackpt.planner.costs.devices``, such as ``"t4"``, or ``"cuda"`` for one of compute capability 8.0. The step
            then uses the kernels and autocast rules of that GPU; neither a GPU nor a CUDA build of torch is needed (see
            ``ackpt/metering/cuda_choices.py``).
        warmup: number of steps before the predicted one, so that gradients and optimizer state exist as in the measured
            step.
        round_to: round every block up to multiples of so many bytes, instead of modeling the allocator of a GPU; on the
            CPU by default 1.

    What the step stores in variables of modules and classes, in containers and in caches of ``functools`` is removed
    from there at the end, so that no other step finds tensors without data.

    Returns:
        A `Measurement` without seconds; all sizes in bytes. For a GPU, ``peak_bytes`` is what
        ``torch.cuda.max_memory_allocated`` would return; the category "other" has the workspaces of cuBLAS and the
        bytes that blocks have beyond their tensors. ``allocator`` has ``reserved_peak_bytes``,
        ``largest_free_block_bytes`` at the end, and the peak of each phase; workspaces of convolutions are
        not included. On the CPU, ``unknown_workspace`` names the operations that may allocate more than predicted:
        those on more than 64 MiB whose workspace does not follow from their shapes, and those of other libraries.

    Raises:
        MeterError: for an unknown device; for resident tensors with data or on a fake GPU; for autocast on meta
            tensors, on which it has no effect; for attention on meta tensors, which is not fused; for a step that fails
            on meta tensors or reads their values; and for code that Inductor generated.

    Example:
        >>> import torch
        >>> from ackpt import predict
        >>> layer, x = torch.nn.Linear(1024, 1024, device="meta"), torch.empty(8, 1024, device="meta")
        >>> predict(lambda: layer(x).sum().backward(), resident=(layer, x)).categories["parameters"]
        4198400
    """
    on = None if device == "cpu" else gpu(device)
    check_step(step_fn)
    models_allocator = on is not None and round_to is None
    round_to = (1 if on is None else BLOCK) if round_to is None else round_to
    owned = Resident(resident)
    for category, tensor in owned.tensors():
        _check(category, tensor)
    # On a GPU, tensors that the step keeps on the CPU do not count, such as an optimizer's count of steps.
    storages = Storages(round_to, on)
    fake_mode = detect_fake_mode([tensor for _, tensor in owned.tensors()])
    choices = contextlib.nullcontext() if on is None else cuda_choices(on.capability)
    explained = contextlib.nullcontext() if fake_mode else _explained_on_meta()
    made = Made(module for item in owned.items if isinstance(item, torch.nn.Module) for module in item.modules())
    with (
        no_collection(),
        _values_explained(),
        _removed(made, owned, storages),
        fake_mode or explained,
        _Watch(made),
        found_packed(),
        choices,
        storages,
        storages.hooks(),
    ):
        storages.load(owned)
        loaded = len(storages.actions)
        for _ in range(warmup):
            step_fn()
        made.note_objects()
        gc.collect()
        before_step = storages.actions[:]
        resident_bytes = owned.bytes(storages.counts, round_to)
        with store_watched(storages.actions.append) as store, storages.recording(owned):
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
    peak = None
    if models_allocator:
        peaks |= modeled(before_step, loaded, storages.actions, AllocatorSettings.parsed())
        peak = peaks.pop("allocated_peak_bytes")
        listed = sum(resident_bytes.values()) + sum(size for _, size in storages.before.values())
        resident_bytes["other"] = peaks.pop("allocated_before_bytes") - listed
    unknown = tuple(sorted(storages.workspaces.unknown))
    return assemble(
        f"{device} (predicted)",
        timeline,
        resident_bytes,
        peak,
        flops=flops,
        allocator=peaks,
        unknown_workspace=unknown,
    )


@contextlib.contextmanager
def _explained_on_meta():
    """Turn errors of torch about the meta device into a MeterError that names the fix."""
    try:
        yield
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        message = str(error).splitlines()[0].rstrip(".!")
        raise MeterError(f"the step does not run on meta tensors, {FAKE}. Torch says: {message}") from error


@contextlib.contextmanager
def _values_explained():
    """Turn torch's errors about values that a prediction does not have into a MeterError that names the line."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        frames = [frame for frame in frames if "/ackpt/metering/" not in frame.filename] or frames
        raise MeterError(
            f"the step needs the values of a tensor ({error.func}) in {frames[-1].filename}:{frames[-1].lineno}, "
            f"`{frames[-1].line}`, but a prediction has shapes alone: give the step a number instead, or use measure()"
        ) from error


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


@contextlib.contextmanager
def _removed(made: Made, owned: Resident, storages: Storages):
    """Remove at the end what the step has left in caches; gradients and the state of optimizers stay."""
    try:
        yield
    finally:
        made.note_objects()
        states = tree_leaves([[*each.state.values()] for each in storages.optimizers])
        gradients = [leaf.grad for leaf in owned.trainable()]
        made.remove({*map(id, (*states, *gradients, *(tensor for _, tensor in owned.tensors())))})


class _Watch(TorchFunctionMode):
    """Notes what calls make, and raises an error for autocast on meta tensors, which it does not change."""

    def __init__(self, made: Made):
        super().__init__()
        self._made = made

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
                raise MeterError(f"autocast does nothing to meta tensors: {FAKE}")
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_dynamo_compiling() and func != _GRADIENT:  # Dynamo is tracing this method
            self._made.add(result, args)
        return result
