"""Bytes that FSDP2 allocates in addition to activations: shards, gathered parameters, buffers of collectives.

``fully_shard`` on every block and then on the model makes one group of parameters of each block and one, the root, of
the rest. A group's parameters are gathered before it runs and freed afterwards, in the forward and again in the
backward; then its gradients are reduced to shards. The root stays gathered until the end of the step.

Source: ``torch/distributed/fsdp/_fully_shard`` of torch 2.13, ``_fsdp_param_group.py`` and ``_fsdp_collectives.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ackpt.metering.resident import rounded
from ackpt.planner.capture.optimizer_state import optimizer_bytes

COMMUNICATION = "collectives"
GATHERED, REDUCED, UNREDUCED = "gathered parameters", "gradients", "unreduced gradients"


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    ``ranks``: the number of processes. ``parameters``: dtype of the shards, of their gradients and of the optimizer's
    state; None is that of the model, in which parameters are gathered and the step computes. ``reduction``: dtype in
    which gradients are reduced; None is that of the model. ``block_bytes``: the allocator rounds up to multiples of it.
    ``gloo``: count the copies of the CPU's collectives; NCCL makes none.
    """

    ranks: int
    parameters: torch.dtype | None = None
    reduction: torch.dtype | None = None
    block_bytes: int = 1
    gloo: bool = False

    def __post_init__(self):
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int) or self.ranks < 2:
            raise ValueError(f"--fsdp {self.ranks!r}: shard over at least 2 ranks, or leave --fsdp out")


@dataclass(frozen=True)
class Weight:
    """One parameter: its name in the model, shape and dtype, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True

    def rows(self, ranks: int) -> int:
        """Rows of each rank's shard; the last ranks' are padded."""
        return -(-self.shape[0] // ranks)

    def sharded(self, ranks: int) -> int:
        """Elements of a shard."""
        return self.rows(ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together: those of the module `name`, ``""`` for the root."""

    name: str
    weights: tuple[Weight, ...]

    def shapes(self) -> tuple:
        """Shapes and dtypes of the parameters; groups in which they are equal need the same memory."""
        return tuple((weight.shape, weight.dtype, weight.trained) for weight in self.weights)


class GroupBytes:
    """Bytes that FSDP2 allocates for one group, on one rank.

    ``blocks``: of its parameters; ``shards``: their sum, which is resident. ``cast``: its shards in the model's dtype,
    0 if they have it. ``gather``: the buffer of an all-gather, ``unsharded``: the parameters that are copied out of it.
    ``reduce``: the buffer of a reduce-scatter, ``received``: what that returns, ``reduced``: the shards of the
    gradients, 0 if these are what it returns. ``scratch_gather``, ``scratch_reduce``, ``padded``: copies on the CPU.
    """

    def __init__(self, group: Group, sharding: Sharding):
        n = sharding.ranks

        def block(size: int) -> int:
            return rounded(size, sharding.block_bytes)

        shard_dtypes = [sharding.parameters or weight.dtype for weight in group.weights]
        trained = [weight for weight in group.weights if weight.trained]
        numbers = [weight.sharded(n) for weight in group.weights]
        computed = [weight.dtype.itemsize * size for weight, size in zip(group.weights, numbers)]
        casts = [size for size, weight, dtype in zip(computed, group.weights, shard_dtypes) if weight.dtype != dtype]
        returned = sum((sharding.reduction or weight.dtype).itemsize * weight.sharded(n) for weight in trained)
        wanted = sum((sharding.parameters or weight.dtype).itemsize * weight.sharded(n) for weight in trained)
        same = all((sharding.reduction or w.dtype) == (sharding.parameters or w.dtype) for w in trained)
        self.blocks = [block(dtype.itemsize * size) for dtype, size in zip(shard_dtypes, numbers)]
        self.shards = sum(self.blocks)
        self.cast = block(sum(casts))
        self.gather = block(n * sum(computed))
        self.unsharded = sum(block(n * size) for size in computed)
        self.reduce = block(n * returned)
        self.received = block(returned)
        self.reduced = 0 if same else block(wanted)
        self.scratch_gather = self.gather if sharding.gloo else 0
        self.scratch_reduce = self.reduce if sharding.gloo else 0
        uneven = (weight for weight in trained if weight.shape[0] % n)
        self.padded = sum(weight.dtype.itemsize * n * weight.sharded(n) for weight in uneven) if sharding.gloo else 0
        # What goes over the links, from or to each rank; the sum of both ways is twice that.
        self.gathered_from_others = (n - 1) * sum(computed)
        self.reduced_to_others = (n - 1) * returned


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that are sharded one by one: the members of the outermost lists of modules of one class.

    Raises:
        ValueError: if there is no such list of at least two.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(_within(name, other) for other in names):
            continue
        members = list(module.named_children())
        kinds = {type(member) for _, member in members}
        if len(members) > 1 and len(kinds) == 1 and all(list(member.parameters()) for _, member in members):
            names += [f"{name}.{number}" if name else number for number, _ in members]
    if not names:
        raise ValueError(
            f"--fsdp: {type(model).__name__} has no blocks to shard one by one, which are the members of an "
            "nn.ModuleList or nn.Sequential of modules of one class; leave --fsdp out"
        )
    return tuple(names)


def groups_of(model: nn.Module) -> tuple[Group, ...]:
    """The root's group and then one for each block, in the order of the model.

    Raises:
        ValueError: for a model without blocks, a parameter without dimensions, and one that two groups share.
    """
    blocks = blocks_of(model)
    owner: dict[int, str] = {}
    weights: dict[str, list[Weight]] = {name: [] for name in ("", *blocks)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if _within(name, block)), "")
        if id(parameter) in owner:
            if owner[id(parameter)] != block:
                one, other = (shared_by or "the model" for shared_by in (block, owner[id(parameter)]))
                raise ValueError(
                    f"--fsdp: parameter {name} is shared by {one} and {other}, which are sharded apart; FSDP refuses "
                    "that, too"
                )
            continue
        owner[id(parameter)] = block
        if not parameter.dim():
            raise ValueError(
                f"--fsdp: parameter {name} is a single number, which FSDP cannot shard: give it a dimension"
            )
        weights[block].append(Weight(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
    return tuple(Group(name, tuple(group_weights)) for name, group_weights in weights.items())


def sharded_optimizer(kind, groups: tuple[Group, ...], sharding: Sharding, on_cpu: bool) -> tuple[int, int]:
    """Bytes of one rank's state of an optimizer of the class `kind`, and the most that its step allocates in addition.

    Equal blocks add the same bytes each, so that two and three of them determine the sum for all.
    """
    if kind is None:
        return 0, 0

    def of(some: tuple[Group, ...]) -> tuple[int, int]:
        weights = [weight for group in some for weight in group.weights]
        return optimizer_bytes(kind([_shard(weight, sharding) for weight in weights]), on_cpu=on_cpu)

    blocks = len(groups) - 1
    if blocks < 4 or len({group.shapes() for group in groups[1:]}) > 1:
        return of(groups)
    two, three = of(groups[:3]), of(groups[:4])
    state, step = (fewer + (blocks - 2) * (more - fewer) for fewer, more in zip(two, three))
    return state, step


def _shard(weight: Weight, sharding: Sharding) -> nn.Parameter:
    shape = (weight.rows(sharding.ranks), *weight.shape[1:])
    return nn.Parameter(torch.empty(shape, dtype=sharding.parameters or weight.dtype, device="meta"), weight.trained)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
