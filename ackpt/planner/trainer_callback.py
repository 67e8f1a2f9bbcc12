"""`AckptCallback`: a memory budget as a callback of the Trainer of transformers."""

from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback

from ackpt.checkpointing.standing_in import remove_from
from ackpt.planner.api import step_of
from ackpt.planner.request import Request
from ackpt.planner.step.planned_step import in_place_of, put_in_place


class AckptCallback(TrainerCallback):
    """Give the model of a Trainer a memory budget while it trains: ``Trainer(..., callbacks=[AckptCallback("6GiB")])``.

    The first training step is captured and planned when it runs, for the call, the precision, the optimizer, the
    clipping and the accumulation of the Trainer. ``step`` is the `PlannedStep` of the latest training, or the
    `ShardedStep` if the Trainer has sharded the model with FSDP2.

    Args:
        budget: as in `ackpt.apply_budget`.
        options: other keywords of `ackpt.apply_budget`, such as ``slowdown`` or ``chunk_head``.

    Raises:
        ValueError: when training begins, if the model has a budget already.
        BudgetError, TraceError: in the first training step, as `ackpt.apply_budget` does.

    Example:
        >>> from ackpt import AckptCallback
        >>> AckptCallback("6GiB", chunk_head=True).keywords
        {'budget': '6GiB', 'chunk_head': True}
    """

    def __init__(self, budget: float | str | None = None, **options: Any):
        self.keywords: dict[str, Any] = {"budget": budget, **options}
        Request.from_keywords(**self.keywords)  # refuses invalid ones before the Trainer begins
        self.step: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Put a step in place that is planned at its first call."""
        if model is None:
            return
        self.on_train_end(args, state, control, model)  # an earlier training may have ended with an error
        if in_place_of(model) is not None:
            raise ValueError(
                "the model has a budget already: leave out AckptCallback, or call ackpt.remove_budget(model)"
            )
        accumulates = args.gradient_accumulation_steps > 1
        given = {"optimizer": optimizer, "accumulation": accumulates}
        request = Request.from_keywords(**{**given, **self.keywords})
        scales, clips = args.fp16, (args.max_grad_norm or 0) > 0
        loop = request.loop._replace(clipping=clips, scaling=scales, scales_loss=scales)
        self.step = step_of(model, replace(request, loop=loop))
        put_in_place(self.step)
        torch._dynamo.reset()  # what was compiled before has the model's own operations in it

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the step away."""
        if model is not None and self.step is not None and in_place_of(model) is self.step:
            remove_from(model)
