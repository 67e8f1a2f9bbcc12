# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a user's type checker sees: run by pyright alone, in `nox -s lint`. Unused ignores are errors, too."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import ackpt
from ackpt import Plan
from ackpt.graph import JointGraph, PlannedStep, Profile, Schedule, Simulation, lower, simulate
from ackpt.metering.meter import Measurement
from ackpt.offloading.engine import Engine
from ackpt.offloading.saved_tensors import Offload


def double(x: Tensor) -> Tensor:
    return 2 * x


def halves(x: Tensor) -> tuple[Tensor, int]:
    return x / 2, 2


def part_one(model: nn.Module, x: Tensor) -> None:
    assert_type(ackpt.audit(model, x).ok, bool)
    assert_type(ackpt.audit(lambda: None, resident=[model]).findings[0].kind, str)
    ackpt.audit(3)  # pyright: ignore[reportArgumentType]
    assert_type(ackpt.checkpoint(double, x), Tensor)
    assert_type(ackpt.checkpoint(halves, x, offload="async"), tuple[Tensor, int])
    ackpt.checkpoint(double, x, offload="somewhere")  # pyright: ignore[reportArgumentType]
    ackpt.checkpoint(x)  # pyright: ignore[reportArgumentType]
    assert_type(ackpt.checkpoint_sequential([double, double], 2, x), Any)
    ackpt.checkpoint_sequential(nn.Sequential(model, model), input=x)
    assert_type(ackpt.apply_activation_checkpointing(model), list[str])
    ackpt.apply_activation_checkpointing(model, nn.Linear)
    ackpt.apply_activation_checkpointing(model, ["blocks.0", "blocks.1"])
    ackpt.apply_activation_checkpointing(model, lambda module: isinstance(module, (nn.Linear, nn.GELU)))
    ackpt.apply_activation_checkpointing(model, 3)  # pyright: ignore[reportArgumentType]
    assert_type(ackpt.remove_activation_checkpointing(model), list[str])
    assert_type(ackpt.chunked_cross_entropy(x, x, x, chunks=4), Tensor)
    with ackpt.guarantees(other_rng=False):
        assert_type(ackpt.is_recomputing(), bool)


def offloading(x: Tensor) -> None:
    offload = ackpt.offload_saved_tensors("async", min_bytes=1 << 20)
    assert_type(offload, Offload)
    with offload as engine:
        assert_type(engine, Engine)
    assert_type(engine.stats(), dict[str, int | float])
    assert_type(ackpt.checkpoint(double, x, offload=offload), Tensor)
    assert_type(ackpt.offload_pays(4096, {1024: 0.001}, bandwidth=2e9).overlapped_from, int | None)
    ackpt.offload_saved_tensors(store="cloud")  # pyright: ignore[reportArgumentType]


def part_two(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    assert_type(ackpt.apply_budget(model, {"x": x}, "6GiB", outputs="keep").plan, Plan)
    assert_type(ackpt.remove_budget(model), None)
    ackpt.apply_budget(model, x, "6GiB", outputs="all")  # pyright: ignore[reportArgumentType]
    graph = ackpt.trace(model, x, differentiate="all", optimizer=optimizer)
    assert_type(graph, JointGraph)
    profile = ackpt.profile(graph, "h200")
    assert_type(profile, Profile)
    plan = ackpt.plan(graph, budget=0.5, profile=profile)
    assert_type(plan, ackpt.Plan)
    assert_type(plan.fates, dict[str, str])
    assert_type(plan.peak_bytes, int)
    assert_type(plan.gap, float | None)
    assert_type(lower(graph, plan.schedule.saved), Schedule)
    assert_type(simulate(graph, profile, plan.schedule), Simulation)
    step = ackpt.compile(model, x, budget="6GiB", optimizer=optimizer)
    assert_type(step, PlannedStep)
    assert_type(step.plan, ackpt.Plan)
    assert_type(ackpt.Plan.load("plan.json"), ackpt.Plan)
    ackpt.plan(graph, budget=[1])  # pyright: ignore[reportArgumentType]
    ackpt.plan(model, budget=0.5)  # pyright: ignore[reportArgumentType]


def measuring(model: nn.Module, x: Tensor) -> None:
    def step() -> None:
        model(x).sum().backward()

    found = ackpt.measure(step, "cpu", resident=(model, x))
    assert_type(found, Measurement)
    assert_type(found.peak_bytes, int)
    assert_type(found.flops, int | None)
    if found.seconds is not None:
        assert_type(found.seconds.median, float)
    assert_type(ackpt.predict(step, resident=(model, x)), Measurement)
    assert_type(ackpt.count_flops(step), int)
    assert_type(ackpt.fits(model, [3, 9], batch_size=2).methods["none"].largest, int | None)
    ackpt.fits(model, [3, 9], batch_size="2")  # pyright: ignore[reportArgumentType]
    ackpt.measure(step, resident=("model",))  # pyright: ignore[reportArgumentType]


def errors(error: ackpt.BudgetError) -> None:
    assert_type(error.least_bytes, int | None)
    value: ValueError = error
    assert_type(value.args, tuple[Any, ...])
