"""The book's still of what a region's recomputation leaves out: the operations of a block, and which run again."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ackpt

WIDTH, TOKENS = 64, 2048
_NAMES = {"native_layer_norm": "norm", "gelu": "gelu", "add": "add"}
_NAMES |= dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"), "attn")


class ParallelBlock(nn.Module):
    """MLP and attention side by side, as in GPT-J and PaLM; ``is_running``: whether its forward runs."""

    is_running = False

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ParallelBlock.is_running = True
        try:
            h = self.norm(x)
            mlp = self.down(F.gelu(self.up(h)))
            q, k, v = self.qkv(h).view(1, TOKENS, 3, 4, -1).permute(2, 0, 3, 1, 4)
            return x + mlp + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        finally:
            ParallelBlock.is_running = False


class _Log(TorchDispatchMode):
    def __init__(self, block: ParallelBlock):
        super().__init__()
        self.calls: list[tuple[str, int]] = []  # name, storage of the result
        self._weights = {p.data_ptr(): name.split(".")[0] for name, p in block.named_parameters() if p.dim() == 2}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = _NAMES.get(func.__name__.split(".")[0])
        if func is torch.ops.aten.addmm.default:
            name = self._weights[args[2].data_ptr()]
        if name is not None and ParallelBlock.is_running:
            tensor = result[0] if isinstance(result, tuple) else result
            self.calls.append((name, tensor.untyped_storage()._cdata))
        return result


def region_calls() -> dict:
    """The operations of a block's forward, and for each checkpoint those that its recomputation runs.

    Returns:
        Plain data: ``names`` of the operations, ``saved``: whether backward reads the result of each, and ``runs``: by
        label, whether each runs.
    """
    torch.manual_seed(0)
    block, x = ParallelBlock(), torch.randn(TOKENS, WIDTH, requires_grad=True)
    storages: set[int] = set()

    def pack(tensor):
        storages.add(tensor.untyped_storage()._cdata)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Log(block) as forward:
        loss = block(x).sum()
    names = [name for name, _ in forward.calls]
    saved = [storage in storages for _, storage in forward.calls]
    del loss
    runs = {"forward": [True] * len(names)}
    of_torch = functools.partial(checkpoint, use_reentrant=False)
    for label, call in (("torch non-reentrant", of_torch), ("ackpt.checkpoint", ackpt.checkpoint)):
        loss = call(block, x).sum()
        with _Log(block) as recomputation:
            loss.backward()
        remaining = [name for name, _ in recomputation.calls]
        runs[label] = [bool(remaining) and remaining[0] == name and bool(remaining.pop(0)) for name in names]
        assert not remaining, f"{label} recomputes {remaining}, which the forward has not run"
    return {"names": names, "saved": saved, "runs": runs}
