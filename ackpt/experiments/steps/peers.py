"""torch's own tools that fit a step into memory, each called as its documentation says.

``checkpoint``: ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`` around every block. ``selective``:
the same with ``create_selective_checkpoint_contexts``, which keeps the results of matrix products, convolutions and
attention. ``memory-budget``: ``torch._functorch.config.activation_memory_budget``, a fraction between saving nothing
but inputs (0) and what backward needs (1), under ``torch.compile``. Its backend is the one that partitions the graph
and runs the parts operation by operation, so that they can be counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .frontier_models import Workload

CHECKPOINT, SELECTIVE, MEMORY_BUDGET = "checkpoint", "selective", "memory-budget"
PEERS = (CHECKPOINT, SELECTIVE, MEMORY_BUDGET)
INDUCTOR = "memory-budget-inductor"  # memory-budget with the code that Inductor generates for a GPU
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
def peer(name: str, workload: Workload, setting: float | None = None) -> Iterator[Callable]:
    """Gives the function to call instead of the model; it is valid inside the context only.

    Args:
        setting: of ``memory-budget`` and `INDUCTOR`, between 0 and 1; the others have none.
    """
    if name in (MEMORY_BUDGET, INDUCTOR):
        backend = "inductor" if name == INDUCTOR else "aot_eager_decomp_partition"
        with _memory_budget(workload.model, setting, backend) as call:
            yield call
    else:
        options = {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)} if name == SELECTIVE else {}
        yield partial(_checkpointed, workload, options)


def _checkpointed(workload: Workload, options, *args):
    """The model's forward with every block called through `checkpoint`."""
    for block in workload.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        return workload.model(*args)
    finally:
        for block in workload.blocks:
            del block.forward


@contextlib.contextmanager
def _memory_budget(model, setting, backend):
    from torch._functorch import config

    # What dynamo compiled stays with the code of the model, whatever the setting was.
    torch._dynamo.reset()
    try:
        with config.patch(activation_memory_budget=setting):
            yield torch.compile(model, backend=backend)
    finally:
        torch._dynamo.reset()
