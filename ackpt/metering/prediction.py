"""Predict the memory of a training step from shapes alone, for models that do not fit and GPUs that are not there.

The step runs on fake or meta tensors under a dispatch mode that sees every operation below autograd. A storage in the
outputs of an operation counts as allocated there, and as freed when its last tensor is freed. Autograd's engine drops
saved tensors at the same points as in a real step, so allocations and frees have the real order.

On the CPU, `kernel_memory` measures the workspace of single operations on made-up data. For a GPU, the actions drive a
model of PyTorch's caching allocator, from loading the model on, without what `kernel_memory` lists.
"""

import contextlib
import gc
import traceback
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ackpt.core import autograd_state
from ackpt.core.progress import shown

from .autograd_engine import InPlace, SavedNumbers
from .cpu_meter import no_collection
from .cuda_choices import cuda_choices
from .cuda_meter import modeled
from .flops import UncountedFlops, count_flops
from .gpus import BLOCK, AllocatorSettings, Gpu, gpu
from .kernel_memory import LOSSES, MATMULS, Workspaces, cuda_results, cuda_temporaries, in_whole_memory
from .meter import Measurement, assemble, check_step
from .resident import Item, Resident, rounded, storages_of
from .timeline import MeterError, build_timeline, store_watched
from .without_data import Made, found_packed

FAKE = "make the model, its inputs and the optimizer under FakeTensorMode instead"
_LIFT = torch.ops.aten.lift_fresh.default
_TO_COPY = torch.ops.aten._to_copy.default
# The sign of attention without a fused kernel. On a CPU attention with dropout has none, and dropout follows.
_MATH_ATTENTION = torch.ops.aten._safe_softmax.default
_DROPOUT = torch.ops.aten.native_dropout.default, torch.ops.aten.empty_like.default
_VALUE = torch.ops.aten._local_scalar_dense.default
# The count of steps that optimizers read: RAdam and ASGD allocate more after their first steps.
LATE = 10_000_000
_EMPTY = torch.ops.aten.empty.memory_format
_DETACH = torch.ops.aten.detach.default  # between these two, for tensors that autograd saves


class Storages(TorchDispatchMode):
    """Records the allocations and frees of the storages in the outputs of operations."""

    def __init__(self, round_to: int, on: Gpu | None):
        super().__init__()
        self.round_to = round_to
        self.gpu = on
        self.follow_real = on is None
        self.optimizers: set[torch.optim.Optimizer] = set()  # whose step has run
        self._optimizers_running = 0
        self.active = self.backward = False
        self.actions: list[tuple] = []
        self.casts: set[int] = set()  # indices of their allocations in `actions`
        self.before: dict[int, tuple[str, int]] = {}
        self._followed: dict[int, tuple[weakref.ref, int]] = {}
        self._loaded: list[weakref.ref] = []
        self._states: dict[torch.Generator, torch.Tensor] = {}  # of the model's own generators, from before
        self._with_workspace: set[str] = set()  # threads that multiplied matrices
        self._follows_attention = False
        self._in_place = InPlace()
        self._numbers = SavedNumbers(self.actions)
        self.workspaces = Workspaces()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that Dynamo compiles the model and runs compiled code under this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._follows_attention and func not in (*_DROPOUT, _DETACH):
            raise MeterError(f"attention on meta tensors is not that of any device: {FAKE}")
        # Not for a GPU, for which `cuda_choices` chooses the kernel.
        is_attention = self.follow_real and func is _MATH_ATTENTION and any(tensor.is_meta for tensor in inputs)
        self._follows_attention = is_attention or (self._follows_attention and func is _DETACH)
        if self.active and not self.backward and torch._C._current_graph_task_id() != -1:
            self.backward = True
            self.actions.append(("backward",))
        if self.active:
            func = self._in_place.of(func, args)
            if func.namespace != "prim":  # which autograd calls while it adds a node
                self._numbers.follow()
        if func is _VALUE and self._optimizers_running and not self._is_real(inputs[0]):
            return float(LATE) if inputs[0].dtype.is_floating_point else LATE
        if inputs and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            # Tensors with values that the step reads, such as an RNG state or an optimizer's count of steps, stay real.
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func._schema.name
        if self.follow_real and draws:
            self._draw(next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None))
        if func in LOSSES:
            result = in_whole_memory(result, *args)
        if self.active:
            existing = {storage._cdata for tensor in inputs for storage in storages_of(tensor)} if func != _LIFT else ()
            taken = self.workspaces.of(func, args, kwargs, result) if self.gpu is None else None
            sizes = dict(enumerate(taken.results)) if taken else cuda_results(func, result) if self.gpu else {}
            for number, tensor in enumerate(tree_leaves(result)):
                if isinstance(tensor, torch.Tensor):
                    before = len(self.actions)
                    self._record(tensor, existing, func, sizes.get(number))
                    if func is _TO_COPY:
                        self.casts.update(range(before, len(self.actions)))
            if taken:
                self._temporaries([taken.workspace - self._numbers.saved(func, args)])
                self._numbers.save(func, args, result)
            elif self.gpu is not None and inputs and not any(map(self._is_real, inputs)):
                self._kernel(self.gpu, func, args, kwargs)
        return result

    def _draw(self, generator: torch.Generator | None) -> None:
        """Advance the generator of an operation, as in a real step, so that regions keep the state that they replay."""
        if generator is not None and generator not in self._states:
            self._states[generator] = generator.get_state()
        with _disable_current_modes():
            torch.rand(1, generator=generator, device=None if generator is None else generator.device)

    def _temporaries(self, sizes: list[int]) -> None:
        blocks = [(("temporary", number), rounded(size, self.round_to)) for number, size in enumerate(sizes) if size]
        self.actions += [("alloc", *block) for block in blocks]
        self.actions += [("free", key) for key, _ in blocks]

    def _kernel(self, on: Gpu, func, args, kwargs):
        """Record the memory that the kernel of a GPU allocates internally."""
        self._temporaries(cuda_temporaries(func, args, kwargs))
        thread = "main" if torch._C._current_graph_task_id() == -1 else "backward"
        if func in MATMULS and thread not in self._with_workspace:
            self._with_workspace.add(thread)
            self.actions.append(("workspace", thread, on.cublas_workspace_bytes))

    def _is_real(self, tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and not tensor.is_meta

    def _record(self, tensor, existing, func, real=None):
        """Follow the storages of a result; `real`: the dtype and bytes of the real one, None if it was not measured."""
        if not self.counts(tensor):
            return
        for storage in storages_of(tensor):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._followed:
                size = rounded(size if real is None else real[1], self.round_to)
                if key not in existing and size:
                    self.actions.append(("alloc", key, size))
                    self._follow(storage)
                    self._in_place.allocated(key, func)
            elif self._followed[key][1] != size:  # resized in place
                self.actions += [("free", key), ("alloc", key, rounded(size, self.round_to))]
                self._follow(storage)

    def counts(self, tensor) -> bool:
        return self.follow_real or not self._is_real(tensor)

    def _follow(self, storage):
        key = storage._cdata
        self._followed[key] = weakref.ref(storage, lambda _: self._freed(key)), storage.nbytes()

    def _freed(self, key):
        del self._followed[key]
        self._in_place.freed(key)
        self.actions.append(("free", key))

    def load(self, owned):
        """For a GPU, record actions from now on: first the allocation of all resident tensors."""
        if self.gpu is None:
            return
        self._in_place.learn()
        self.active = True
        for storage in owned.in_order_of_loading(self.counts):
            key, size = storage._cdata, rounded(storage.nbytes(), self.round_to)
            if size:
                self.actions.append(("alloc", key, size))
                freed = ("free", key)
                self._loaded.append(weakref.ref(storage, lambda _, freed=freed: self.actions.append(freed)))

    def after_learning(self, step_fn):
        """A function that lets `InPlace` learn under the step's modes, discards its actions, and runs the step."""

        def step():
            self._in_place.learn()
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
            self._follow(storage)
        _ = storage = None
        self.active = True
        try:
            with owned.gradients_noted(self.counts, lambda storage: storage._cdata, self.actions.append):
                yield
        finally:
            self.active = False

    @contextlib.contextmanager
    def hooks(self):
        """A context that follows RNG states and optimizers' steps; gradient scalers find no infinite gradients.

        At its end, the model's own generators have their states from before.
        """

        def starts(optimizer, *_):
            self.optimizers.add(optimizer)
            self._optimizers_running += 1
            self.actions.append(("optimizer",))

        def ends(*_):
            self._optimizers_running -= 1

        def step(scaler, optimizer, state, *args, **kwargs):
            return optimizer.step(*args, **kwargs)

        def followed(read, *generator):  # a state, which torch allocates below its dispatcher
            state = read(*generator)
            if self.active and torch._C._len_torch_dispatch_stack():  # else `Workspaces` asks
                with torch._C.DisableTorchFunction():  # the recorder of a region would take this for its code
                    self._record(state, (), _EMPTY)
            return state

        reads = [(module, "get_rng_state") for module in (torch, torch.random)]
        handles = [register_optimizer_step_pre_hook(starts), register_optimizer_step_post_hook(ends)]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", step))
                for module, name in (*reads, (autograd_state, "generator_state")):
                    read = partial(followed, getattr(module, name))
                    stack.enter_context(mock.patch.object(module, name, read))
                yield
        finally:
            for handle in handles:
                handle.remove()
            for generator, state in self._states.items():
                generator.set_state(state)


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
        round_to: round every block up to a multiple of this number of bytes, instead of modeling the allocator of a
            GPU. On the CPU, the default is 1.

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
        shown("predicting the step"),
        no_collection(),
        torch.random.fork_rng(()),
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
        f"{device} (predicted)", timeline, resident_bytes, peak, flops=flops, allocator=peaks, unknown_workspace=unknown
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
    except (DataDependentOutputException, DynamicOutputShapeException, AssertionError) as error:
        if isinstance(error, AssertionError) and "FakeTensor" not in str(error):
            raise
        operation = getattr(error, "func", None) or str(error).rpartition("Found in ")[2].partition("(")[0]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        frames = [frame for frame in frames if "/ackpt/metering/" not in frame.filename] or frames
        raise MeterError(
            f"the step needs the values of a tensor ({operation}) in {frames[-1].filename}:{frames[-1].lineno}, "
            f"`{frames[-1].line}`, but a prediction has shapes alone: give the step a number instead, or use measure()"
        ) from error


def _check(category, tensor):
    if hasattr(tensor, "_local_tensor"):
        raise MeterError(
            f"a resident tensor ({category}, {list(tensor.shape)}) is a DTensor, and a prediction runs no collectives: "
            "plan a model by ackpt.apply_budget after fully_shard, or by ackpt plan --fsdp, or use measure()"
        )
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
        torch.clear_autocast_cache()  # of the casts of weights, which an autocast around `predict` keeps
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
