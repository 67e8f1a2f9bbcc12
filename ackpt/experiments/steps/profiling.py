"""A torch profiler trace and TensorBoard scalars of every method: ``tensorboard --logdir FOLDER`` reads both."""

from __future__ import annotations

from pathlib import Path

import torch

STEPS = 3


class MissingPackage(ValueError):
    """An optional dependency is not installed; the message holds the line that installs it."""


class Profiles:
    """Writes into one sub-folder per method and sequence length.

    Raises `MissingPackage` if the package tensorboard is not installed.
    """

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackage(
                f'--profile-dir writes TensorBoard files and needs tensorboard ({error}): pip install "ackpt[profile]"'
            ) from error
        self._writer = SummaryWriter
        self.folder = folder

    def scalars(self, name: str, losses: list[float], peak_bytes: int) -> None:
        """The loss of every step and the peak of one."""
        with self._writer(str(self.folder / name)) as writer:
            for step, loss in enumerate(losses):
                writer.add_scalar("loss", loss, step)
            writer.add_scalar("peak_bytes", peak_bytes, 0)

    def trace(self, name: str, step_fn) -> None:
        """A profiler trace of a few steps, with memory and shapes."""
        from torch.profiler import profile, tensorboard_trace_handler

        handler = tensorboard_trace_handler(str(self.folder / name), worker_name="ackpt")
        with profile(on_trace_ready=handler, profile_memory=True, record_shapes=True) as profiler:
            for _ in range(STEPS):
                step_fn()
                profiler.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
