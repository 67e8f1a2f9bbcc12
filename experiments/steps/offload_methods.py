"""The methods of the experiment ``offload``: ackpt's, and peers, each called as its documentation says.

All work on the same model object: a method is switched on, runs a step, and the next one is switched on.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ackpt.checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from ackpt.models.transformer import Block
from ackpt.offloading.saved_tensors import Offload, offload_saved_tensors

from .failures import described

OURS = ("baseline", "ckpt_classic", "ckpt_sync_offload", "ckpt_async_offload", "offload_sync", "offload_async")
PEERS = ("save_on_cpu", "offload_wrapper", "trl", "transformers")
METHODS = OURS + PEERS
KEEPS_ALL = ("offload_sync", "offload_async", "trl")  # they offload everything that the baseline saves
STORES_IN_TORCH = ("offload_wrapper",)  # on a CPU its store counts as device memory
MODULES = {"trl": "trl.models.activation_offloading", "transformers": "transformers.modeling_layers"}


@dataclass(frozen=True)
class Method:
    """A method on one model: `switch_on` it, then call `forward(x, cu_seqlens, max_seqlen)`.

    ``around_forward`` and ``around_step`` are contexts for forward and loss, and for the backward as well. ``offload``
    is the ackpt object whose engine counts, if there is one.
    """

    forward: Callable
    switch_on: Callable[[], object]
    around_forward: Callable[[], Any] = contextlib.nullcontext
    around_step: Callable[[], Any] = contextlib.nullcontext
    offload: Offload | None = None


def cannot_run(method: str, device: str, shapes_only: bool = False) -> str | None:
    """Why a method cannot run here, or None."""
    if method in PEERS and shapes_only:
        return "a peer's copies cannot be followed on tensors without data"
    if method not in MODULES:
        return None
    if device != "cuda":
        return "needs a CUDA GPU"
    try:
        importlib.import_module(MODULES[method])
    except Exception as error:  # what breaks a package is often another one, such as a torchvision of another torch
        return f"{MODULES[method]} cannot be imported ({described(error)}): pip install -U {method}"
    return None


def make_method(name: str, model, device: str, min_bytes: int) -> Method:
    """The method of that name on `model`."""
    without = _switch(model)  # without checkpointing
    if name == "baseline":
        return Method(model, without)
    if name == "ckpt_classic":
        return Method(model, _switch(model, checkpointed=True))
    if name in OURS:
        offload = offload_saved_tensors("sync" if "sync" in name.split("_") else "async", min_bytes=min_bytes)
        if name.startswith("ckpt"):
            return Method(model, _switch(model, True, offload), offload=offload)
        return Method(model, without, around_forward=lambda: offload, offload=offload)
    if name == "save_on_cpu":
        return Method(_save_on_cpu(model, device), without)
    if name == "offload_wrapper":
        return Method(_offload_wrapper(model), without)
    if name == "trl":
        return _trl(model, without)
    return Method(_transformers(model, offload=True), without)


def _switch(model, checkpointed=False, offload=None):
    def switch_on():
        if checkpointed:
            apply_activation_checkpointing(model, Block, offload=offload)
        else:
            remove_activation_checkpointing(model)

    return switch_on


def _save_on_cpu(model, device):
    """``with save_on_cpu(pin_memory=True): checkpoint(block, x)``; it does not copy tensors that are on the CPU."""

    def forward(x, *rest):
        for block in model.blocks:
            with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
                x = torch_checkpoint(block, x, *rest, use_reentrant=False)
        return model.norm(x)

    return forward


def _offload_wrapper(model):
    """torch.distributed's offload wrapper around its checkpoint wrapper: the inputs of the blocks are offloaded."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    blocks = [offload_wrapper(checkpoint_wrapper(block)) for block in model.blocks]

    def forward(x, *rest):
        for block in blocks:
            x = block(x, *rest)
        return model.norm(x)

    return forward


def _trl(model, switch_on) -> Method:
    """TRL's ``with OffloadActivations(): model(x).sum().backward()``, without recompute."""
    from trl.models.activation_offloading import OffloadActivations  # pyright: ignore[reportMissingImports]

    context = OffloadActivations()
    context.update_model_params(model)
    return Method(model, switch_on, around_step=lambda: context)


def _transformers(model, offload: bool):
    """The checkpointing of transformers; it works only on its own models, so the blocks become layers of one."""
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x, *rest):
            return self.block(x, *rest)

    class Model(PreTrainedModel):
        main_input_name = "x"  # not token ids, whose embedding would be asked for gradients
        supports_gradient_checkpointing = True

        def __init__(self):
            super().__init__(PreTrainedConfig())
            self.layers = torch.nn.ModuleList(map(Layer, model.blocks))

        def forward(self, x, *rest):
            for layer in self.layers:
                x = layer(x, *rest)
            return model.norm(x)

    wrapped = Model()
    if hasattr(wrapped, "activation_checkpointing_enable"):
        wrapped.activation_checkpointing_enable(offload=offload)
    else:
        wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return wrapped.train()
