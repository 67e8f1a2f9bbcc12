"""The call that the Trainer of transformers makes, so that `ackpt.apply_budget` captures it at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_ITEMS = "num_items_in_batch"


def as_trainer_calls(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """`batch` as the Trainer passes it to `model`, if the program has imported the Trainer; else as it is.

    The Trainer adds ``num_items_in_batch`` (``_get_num_items_in_batch`` in transformers/trainer.py, 5.24) for a model
    of transformers whose forward has ``**kwargs``, or that sets ``accepts_loss_kwargs``. It is the number of labels,
    divided by the number of ranks with the same batch; its value does not matter for a capture. ``import transformers``
    alone does not import the Trainer.
    """
    modules = sys.modules
    if "transformers.trainer" not in modules or not isinstance(batch.get("labels"), torch.Tensor) or _ITEMS in batch:
        return dict(batch)
    unwrapped: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if not isinstance(unwrapped, modules["transformers.modeling_utils"].PreTrainedModel):
        return dict(batch)
    accepts = getattr(unwrapped, "accepts_loss_kwargs", None)
    if accepts is None:
        parameters = inspect.signature(unwrapped.forward).parameters.values()
        accepts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {**batch, _ITEMS: torch.ones((), device=batch["labels"].device)} if accepts else dict(batch)
