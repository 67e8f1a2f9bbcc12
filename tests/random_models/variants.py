"""The ways to run a model with the package: each takes a model and a first batch; what it returns is called instead."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

import ackpt

from .model import Spec

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Variant:
    """A name, what prepares the model, and what is promised: ``budget`` a share of the baseline's peak.

    ``plans``: a planned step, whose peak is promised; ``recomputes``: regions, which group sums of gradients repeat and
    repeat side effects in lists and dicts.
    """

    name: str
    prepare: Callable
    plans: bool = False
    recomputes: bool = False
    budget: float | None = None


def plain(model, args, kwargs):
    """The unmodified model."""
    return model


def variants(spec: Spec) -> list[Variant]:
    """All variants for a model, their random choices drawn from its seed."""
    draw = random.Random(spec.seed)
    mode = draw.choice(["sync", "async"])
    seeds = [draw.randrange(10**6) for _ in range(3)]
    budget, policy = round(draw.uniform(0.4, 1.0), 2), draw.choice(["none", "full"])
    return [
        Variant("regions", functools.partial(_regions, None, None), recomputes=True),
        Variant("regions at random", functools.partial(_regions, seeds[0], None), recomputes=True),
        Variant(
            f"regions offloaded ({mode})",
            functools.partial(_regions, draw.choice([None, seeds[1]]), mode),
            recomputes=True,
        ),
        Variant("checkpoint", functools.partial(_checkpoint, seeds[2], draw.choice([None, mode])), recomputes=True),
        Variant(f"offload ({mode})", functools.partial(_offload, mode)),
        Variant(f"plan {policy}", functools.partial(_plan, None, policy), plans=True),
        Variant(f"plan in place {budget}", functools.partial(_in_place, budget), plans=True, budget=budget),
        Variant(f"plan auto {budget}", functools.partial(_plan, budget, "auto"), plans=True, budget=budget),
    ]


def _offloader(mode):
    return mode if mode is None else ackpt.offload_saved_tensors(mode, min_bytes=0)


def _regions(seed: int | None, mode, model, args, kwargs):
    """Regions of the default choice, or with a seed those of modules at random."""
    choice = None
    if seed is not None:
        draw = random.Random(seed)
        fitting = [name for name, module in model.named_modules() if name and not isinstance(module, _WITHOUT_FORWARD)]
        choice = [name for name in fitting if draw.random() < 0.25] or [draw.choice(fitting)]
    ackpt.apply_activation_checkpointing(model, choice, offload=_offloader(mode))
    return model


def _checkpoint(seed: int, mode, model, args, kwargs):
    """`ackpt.checkpoint` around random stretches of the blocks, as bound methods, closures, partials or modules."""
    draw = random.Random(seed)
    count = len(model.blocks)
    offload = _offloader(mode)
    if draw.random() < 0.2:
        segments = draw.choice([None, 1, count])
        model.chain = lambda x: ackpt.checkpoint_sequential(list(model.blocks), segments, x, offload=offload)
        return model
    start = draw.randrange(count)
    end = draw.randint(start + 1, count)
    how = draw.choice(["method", "closure", "partial", "keyword"])

    def middle(x):
        if how == "method":
            return ackpt.checkpoint(model.call, start, end, x, offload=offload)
        if how == "closure":
            return ackpt.checkpoint(lambda: model.call(start, end, x), offload=offload)
        if how == "partial":
            return ackpt.checkpoint(functools.partial(model.call, start, end), x, offload=offload)
        return ackpt.checkpoint(model.call, start, end=end, x=x, offload=offload)

    model.chain = lambda x: model.call(end, count, middle(model.call(0, start, x)))
    return model


def _offload(mode, model, args, kwargs):
    offload = _offloader(mode)

    def call(*args, **kwargs):
        with offload:
            return model(*args, **kwargs)

    return call


def _plan(budget, policy, model, args, kwargs):
    """A planned step; under the smallest feasible budget where `budget` is refused."""
    try:
        return ackpt.compile(model, *args, budget=budget, policy=policy, **kwargs)
    except ackpt.BudgetError as error:
        return ackpt.compile(model, *args, budget=error.least_bytes, policy=policy, **kwargs)


class _InPlace:
    """A model with a plan in place, called by its forward; ``plan``: its plan."""

    def __init__(self, step, model):
        self.step, self.model = step, model

    def __call__(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)

    @property
    def plan(self):
        return self.step.plan


def _in_place(budget, model, args, kwargs):
    """`ackpt.apply_budget`, also under the smallest feasible budget, and calls of the model's forward."""
    inputs = args[0] if len(args) == 1 else args
    try:
        return _InPlace(ackpt.apply_budget(model, inputs, budget, **kwargs), model)
    except ackpt.BudgetError as error:
        return _InPlace(ackpt.apply_budget(model, inputs, error.least_bytes, **kwargs), model)
