"""What memory on a GPU depends on: compute capability, cuBLAS workspace, CUDA context, settings of the allocator.

Names are those of `ackpt.planner.costs.devices`. ``"cuda"`` is a GPU of compute capability 8.0.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from ackpt.core.errors import did_you_mean

from .timeline import MeterError

ANY = "cuda"
MIB = 2**20


class Gpu(NamedTuple):
    """A GPU as its memory sees it: `name`, and `capability`, its compute capability (major, minor).

    Example:
        >>> gpu("t4").capability, gpu("t4").cublas_workspace_bytes
        ((7, 5), 8519680)
    """

    name: str
    capability: tuple[int, int]

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes that every thread and stream that multiplies matrices allocates, once.

        ``parseChosenWorkspaceSize`` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp (2.13): by default 2 x 4096 KiB
        and 8 x 16 KiB, 32 MiB for compute capabilities 9, 10 and 12; ``CUBLAS_WORKSPACE_CONFIG`` lists other sizes as
        ``:KiB:count``. cuBLASLt uses the same block unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0`` is set.
        """
        pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if pairs:
            return sum(int(size) * int(count) for size, count in pairs) * 1024
        return 32 * MIB if self.capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024

    @property
    def context_bytes(self) -> int:
        """Bytes of the CUDA context of a process with lazy loading of kernels, which is torch's default.

        It depends on the GPU and on the versions of driver and CUDA. The largest known figure where none is known for
        the architecture.
        """
        return CONTEXTS.get(self.capability, max(CONTEXTS.values())) * MIB


# Compute capabilities: developer.nvidia.com/cuda-gpus. AMD's GPUs have none; torch gives 9.4 for MI300X (gfx942).
CAPABILITIES = {
    ANY: (8, 0),
    "h100-80g": (9, 0),
    "h100-pcie": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "a100-40g": (8, 0),
    "a100-40g-pcie": (8, 0),
    "a100-80g": (8, 0),
    "a100-80g-pcie": (8, 0),
    "v100-16g": (7, 0),
    "v100-32g": (7, 0),
    "v100-pcie": (7, 0),
    "a10": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "t4": (7, 5),
    "rtx3090": (8, 6),
    "rtx4090": (8, 9),
    "rtx5090": (12, 0),
    "mi300x": (9, 4),
}
# MiB of a context by compute capability, as published: T4 with CUDA 13.0 after a step (FitCheck, t4-sweep-2026-09-15);
# RTX 6000 Ada with CUDA 13.0 (unslothai/unsloth-zoo, pull request 1053); B200 (unslothai/unsloth, pull request 8669).
CONTEXTS = {(7, 5): 141, (8, 9): 426, (10, 0): 612}


def gpu(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
        MeterError: for an unknown name; lists the known ones.
    """
    if name not in CAPABILITIES:
        raise MeterError(
            f"device {name!r} cannot be predicted{did_you_mean(name, CAPABILITIES)}: choose 'cpu', or one of "
            f"{', '.join(CAPABILITIES)}"
        )
    return Gpu(name, CAPABILITIES[name])


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of ``PYTORCH_CUDA_ALLOC_CONF`` that change what is reserved.

    ``max_split_bytes``: blocks of this size and more are not split, and serve only requests of this size and more.
    ``gc_threshold``: the ``garbage_collection_threshold``, a fraction of `limit_bytes` above which unused segments are
    freed; 0: never. ``limit_bytes``: what the process may reserve; None for no limit.

    Example:
        >>> AllocatorSettings.parsed("max_split_size_mb:128,expandable_segments:True")
        AllocatorSettings(expandable_segments=True, max_split_bytes=134217728, gc_threshold=0.0, limit_bytes=None)
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    gc_threshold: float = 0.0
    limit_bytes: int | None = None

    @classmethod
    def parsed(cls, text: str | None = None) -> AllocatorSettings:
        """The settings in `text`, by default in the environment; options that do not change sizes are ignored."""
        if text is None:
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            text = next((os.environ[name] for name in names if name in os.environ), "")
        given = dict(part.strip().split(":", 1) for part in text.split(",") if ":" in part)
        split = given.get("max_split_size_mb")
        try:
            return cls(
                given.get("expandable_segments", "False").strip().lower() == "true",
                None if split is None else int(split) * MIB,
                float(given.get("garbage_collection_threshold", 0)),
            )
        except ValueError as error:
            raise MeterError(f"PYTORCH_CUDA_ALLOC_CONF={text!r} cannot be read: {error}") from error
