"""What the models refuse: ids that an embedding or a loss could not look up."""

from __future__ import annotations

import torch
from torch import Tensor

from ackpt.models.transformer import is_readable

IGNORE_INDEX = -100  # F.cross_entropy's default


def require_ids(name: str, ids: Tensor, shape: torch.Size, below: int, why: str, ignore: int | None = None) -> None:
    """ValueError unless `ids` are int64 of `shape`, each in [0, below) or equal to `ignore`; `why` ends the message.

    Values are read on the CPU only, where that costs no synchronisation, and not off meta or fake tensors.
    """
    if ids.dtype != torch.int64 or ids.shape != shape:
        raise ValueError(f"{name} must be int64 of shape {list(shape)}, got {ids.dtype} {list(ids.shape)}")
    if ids.device.type != "cpu" or not is_readable(ids):
        return
    if ignore is not None:
        ids = ids[ids != ignore]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < below:
        ignored = "" if ignore is None else f" (and {ignore}, to be ignored)"
        raise ValueError(
            f"{name} holds values from {int(ids.min())} to {int(ids.max())}, "
            f"allowed are 0 to {below - 1}{ignored}: {why}"
        )
