"""The allocations and frees of a step on tensors without data, from the storages in the results of its operations."""

from __future__ import annotations

import contextlib
import weakref
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .autograd_engine import InPlace, SavedNumbers
from .gpus import Gpu
from .kernel_memory import LOSSES, MATMULS, Workspaces, cuda_results, cuda_temporaries, in_whole_memory
from .resident import rounded, storages_of
from .timeline import MeterError

FAKE = "make the model, its inputs and the optimizer under FakeTensorMode instead"
_LIFT = torch.ops.aten.lift_fresh.default
_TO_COPY = torch.ops.aten._to_copy.default
# The sign of attention without a fused kernel. On a CPU attention with dropout has none, and dropout follows.
_MATH_ATTENTION = torch.ops.aten._safe_softmax.default
_DROPOUT = torch.ops.aten.native_dropout.default, torch.ops.aten.empty_like.default
_VALUE = torch.ops.aten._local_scalar_dense.default
# The count of steps that optimizers read: RAdam and ASGD allocate more after their first steps.
LATE = 10_000_000
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

    @contextlib.contextmanager
    def hooks(self):
        """A context that follows the steps of optimizers; gradient scalers find no infinite gradients."""

        def starts(optimizer, *_):
            self.optimizers.add(optimizer)
            self._optimizers_running += 1
            self.actions.append(("optimizer",))

        def ends(*_):
            self._optimizers_running -= 1

        def step(scaler, optimizer, state, *args, **kwargs):
            return optimizer.step(*args, **kwargs)

        handles = [register_optimizer_step_pre_hook(starts), register_optimizer_step_post_hook(ends)]
        try:
            with mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", step):
                yield
        finally:
            for handle in handles:
                handle.remove()


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
