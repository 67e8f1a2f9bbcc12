"""torch's own tools that fit a step into memory, each called as its documentation says.

``checkpoint``: ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`` around every block. ``selective``:
the same with ``create_selective_checkpoint_contexts``, which saves the results of matrix products, convolutions and
attention. ``memory-budget``: ``torch._functorch.config.activation_memory_budget``, a fraction between saving only
inputs (0) and all activations that backward needs (1), under ``torch.compile``. Its backend partitions the graph and
runs the parts operation by operation, so that they can be counted. With the compiler ``"inductor"``, Inductor compiles
the step of every tool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from experiments.steps.workload import Workload

CHECKPOINT, SELECTIVE, MEMORY_BUDGET = "checkpoint", "selective", "memory-budget"
PEERS = (CHECKPOINT, SELECTIVE, MEMORY_BUDGET)
_ATEN = torch.ops.aten
KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]


@contextlib.contextmanager
def peer(name: str, workload: Workload, setting: float | None = None, compiler: str = "eager") -> Iterator[Callable]:
    """Gives the function to call instead of the model; it is valid inside the context only.

    Args:
        setting: of ``memory-budget``, between 0 and 1; the others have none.
        compiler: ``"eager"`` or ``"inductor"``.
    """
    with fresh_dynamo() if compiler == "inductor" or name == MEMORY_BUDGET else contextlib.nullcontext():
        model = by_inductor(workload.model) if compiler == "inductor" else workload.model
        if name == MEMORY_BUDGET:
            if compiler == "eager":
                model = torch.compile(workload.model, backend="aot_eager_decomp_partition")
            with functorch_config.patch(activation_memory_budget=setting):
                yield model
        else:
            options = {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)} if name == SELECTIVE else {}
            # The same objects in every call: Dynamo would recompile for new ones.
            wraps = [partial(checkpoint, block.forward, use_reentrant=False, **options) for block in workload.blocks]
            yield partial(_checkpointed, workload, model, wraps)


def by_inductor(model: nn.Module) -> Callable:
    """The model as Inductor compiles it; every result has its own code, because Dynamo caches by code."""
    from torch._inductor.compile_fx import compile_fx

    return torch.compile(model, backend=lambda graph, inputs: compile_fx(graph, inputs))


def _checkpointed(workload: Workload, model: Callable, wraps, *args):
    """The model's forward with every block called through `checkpoint`."""
    for block, wrapped in zip(workload.blocks, wraps, strict=True):
        block.forward = wrapped
    try:
        return model(*args)
    finally:
        for block in workload.blocks:
            del block.forward


@contextlib.contextmanager
def fresh_dynamo():
    """Reset Dynamo before and after: its compiled code stays attached to the model, whatever the setting was."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
