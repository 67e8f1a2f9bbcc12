"""The operations of a step's graph, its live bytes in several orders, and a comparison with measured bytes."""

from __future__ import annotations

import random
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ackpt import plan
from ackpt.metering.meter import measure
from ackpt.metering.timeline import Timeline
from ackpt.planner.costs.profiles import profile as profiled
from ackpt.planner.schedule.plan import RECOMPUTED
from ackpt.planner.schedule.schedule import COMPUTE, everything
from ackpt.planner.schedule.simulator import simulate, step_peaks
from experiments.steps.captured_step import CapturedStep

_DESCRIBED = ("id", "name", "target", "phase", "module", "source")
_COSTS = ("flops", "bytes_in", "bytes_out", "workspace_bytes", "seconds")
LABEL = 0.21  # width of a label of a peak, relative to the axis


def operations(graph, first_of_backward: str) -> list[dict[str, Any]]:
    """The operations of a graph of `make_fx` that allocate a storage, in order, without views, parameters and inputs.

    Each has its ``name``, the ``bytes`` that it allocates, ``reads``: the operations whose storages it reads, and
    ``is_backward``: whether it is `first_of_backward` or comes after it.
    """
    owner: dict[int, str | None] = {}
    found, is_backward = [], False
    for node in graph.nodes:
        tensors = [t for t in tree_leaves(node.meta.get("val")) if torch.is_tensor(t)]
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        fresh = {storage: size for storage, size in sizes.items() if storage not in owner}
        is_backward |= node.name == first_of_backward
        if node.op == "placeholder":
            owner.update(dict.fromkeys(fresh))
        elif node.op == "call_function" and fresh:
            owner.update(dict.fromkeys(fresh, node.name))
            read = [t for source in node.all_input_nodes for t in tree_leaves(source.meta["val"])]
            owners = (owner[t.untyped_storage()._cdata] for t in read)
            reads = {name for name in owners if name is not None}
            size = sum(fresh.values())
            found.append({"name": node.name, "bytes": size, "reads": sorted(reads), "is_backward": is_backward})
    return found


def node_rows(graph, profile) -> list[dict[str, Any]]:
    """The operation of each node with its costs, and its liveness in the baseline, empty where it does not apply.

    ``live_bytes``: while it runs, with its workspace; their maximum is the dynamic peak. ``last_fw_access``,
    ``first_bw_access``: of what it allocates. ``recompute_ratio``: these bytes per second of the node.
    """
    baseline = everything(graph)
    ran = [step.id for step in (*baseline.forward, *baseline.backward) if step.kind == COMPUTE]
    live = dict(zip(ran, chain(*step_peaks(graph, baseline, profile.workspace_bytes))))
    rows: list[dict[str, Any]] = []
    for node in graph.nodes:
        row: dict[str, Any] = {name: getattr(node, name) for name in _DESCRIBED}
        row |= {name: values[node.id] for name in _COSTS if (values := getattr(profile, name)) is not None}
        made = [graph.storages[storage] for storage in graph.analysis.allocated.get(node.id, ())]
        size, seconds = sum(each.bytes for each in made), profile.seconds[node.id] if profile.seconds else 0
        row["live_bytes"] = live.get(node.id, "")
        for name in ("last_fw_access", "first_bw_access"):
            accesses = [getattr(each, name) for each in made]
            row[name] = max((each for each in accesses if each is not None), default="")
        row["recompute_ratio"] = size / seconds if size and seconds else ""
        rows.append(row)
    return rows


def orders_plot(steps: dict[str, Timeline], title: str, resident_bytes: int | dict[str, int]):
    """A Figure of the live memory of one step in several orders, side by side; `resident_bytes` of all, or of each.

    In every step the peak is marked, and a dashed line shows where backward begins.
    """
    from matplotlib.lines import Line2D

    from experiments.reports import plots

    with plots.style.context("default"):
        figure, axes = plots._axes(title, "allocations and frees of one step, in order", "live memory (MiB)")
        pitch = round(1.12 * max(len(step.live) for step in steps.values()))
        below = resident_bytes if isinstance(resident_bytes, dict) else dict.fromkeys(steps, resident_bytes)
        highest = max(below[name] + step.peak_bytes for name, step in steps.items()) / plots.MIB
        axes.set_xlim(0, pitch * len(steps))
        axes.set_ylim(0, highest * 1.15)
        dashed = {"color": plots.TEXT, "linewidth": 1, "linestyle": (0, (4, 3))}
        handles = {}
        for index, (name, step) in enumerate(steps.items()):
            start, width = pitch * index, pitch * len(steps)
            handles |= plots.stack(axes, start, step, below[name])
            peak, at = (below[name] + step.peak_bytes) / plots.MIB, start + step.peak_index
            label = LABEL * width
            fits = "left" if at + label <= start + pitch else "right" if at - label >= start else "center"
            plots._mark_peak(axes, at, peak, fits)
            axes.axvline(start + (step.boundary or 0), **dashed)
        axes.set_xticks([pitch * index + len(step.live) / 2 for index, step in enumerate(steps.values())], [*steps])
        axes.tick_params(axis="x", length=0)
        shown = {"backward begins": Line2D([], [], **dashed), **plots.as_stacked(handles)}
        return plots._finished(figure, [*shown.values()], [*shown])


def overlaid_plot(predicted: dict[str, dict], measured: dict[str, dict]):
    """A Figure with a panel per method that was measured: predicted live memory by category, measured memory as a line.

    Args:
        predicted, measured: metrics of records by method. The line is as wide as the prediction.
    """
    from matplotlib.lines import Line2D

    from experiments.reports import plots

    both = {name: (predicted[name], metrics) for name, metrics in measured.items() if name in predicted}
    with plots.style.context("default"):
        figure, only = plots._axes("", "", "")
        only.remove()
        handles, look = {}, {"color": plots.TEXT, "linewidth": 1.4}
        for axes, (name, pair) in zip(figure.subplots(1, len(both), sharey=True, squeeze=False)[0], both.items()):
            expected, real = (Timeline.from_json(metrics["timeline"]) for metrics in pair)
            plots._style(axes)
            handles |= plots.stack(axes, 0, expected, pair[0]["resident_bytes"])
            x = [index * len(expected.live) / len(real.live) for index in range(len(real.live))]
            axes.plot(x, [(pair[1]["resident_bytes"] + live) / plots.MIB for live in real.live], **look)
            axes.set_title(name, fontsize=8.5, color=plots.TEXT)
            axes.set_xticks([])
        figure.axes[0].set_ylabel("live memory (MiB)", color=plots.TEXT, fontsize=9)
        shown = {"measured": Line2D([], [], **look), **plots.as_stacked(handles)}
        legend = {"frameon": False, "labelcolor": plots.TEXT, "fontsize": 8.5, "ncols": 4}
        figure.legend([*shown.values()], [*shown], loc="outside lower center", **legend)
        return plots._finished(figure, [], [])


def panels_plot(steps: dict[str, Timeline], title: str):
    """A Figure with a panel per step, all equally wide: its live memory, its peak, and what it saves for backward.

    Example:
        >>> from ackpt.metering.timeline import Timeline
        >>> from experiments.graph_profile import panels_plot
        >>> live = (0, 2**20, 2**21, 0)
        >>> step = Timeline(live, {"activations": live}, boundary=1)
        >>> panels_plot({"plan": step}, "").axes[0].get_title()
        'plan\\nsaved 1.0, peak 2.0'
    """
    from matplotlib.lines import Line2D

    from experiments.reports import plots

    with plots.style.context("default"):
        figure, only = plots._axes(title, "", "")
        only.remove()
        panels = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
        looks = {"color": plots.TEXT, "linestyle": "none", "clip_on": False, "zorder": 5}
        dashed = {"color": plots.TEXT, "linewidth": 1, "linestyle": (0, (4, 3))}
        handles = {}
        for axes, (name, step) in zip(panels, steps.items(), strict=True):
            plots._style(axes)
            handles |= plots.stack(axes, 0, step, 0)
            boundary = step.boundary or 0
            saved = step.at(boundary)["activations"] / plots.MIB
            axes.axvline(boundary, **dashed)
            axes.plot([boundary], [saved], marker="o", markersize=6, **looks)
            axes.plot([step.peak_index], [step.peak_bytes / plots.MIB], marker="v", markersize=6, **looks)
            numbers = f"saved {saved:.1f}, peak {step.peak_bytes / plots.MIB:.1f}"
            axes.set_title(f"{name}\n{numbers}", fontsize=8.5, color=plots.TEXT)
            axes.set_xlim(0, max(1, len(step.live) - 1))
            axes.set_xticks([])
            axes.set_xlabel("allocations and frees", color=plots.TEXT, fontsize=9)
        panels[0].set_ylim(0, 1.1 * max(step.peak_bytes for step in steps.values()) / plots.MIB)
        panels[0].set_ylabel("live memory (MiB)", color=plots.TEXT, fontsize=9)
        shown = {
            "backward begins": Line2D([], [], **dashed),
            "peak": Line2D([], [], marker="v", **looks),
            "saved for backward": Line2D([], [], marker="o", **looks),
            **plots.as_stacked(handles),
        }
        legend = {"frameon": False, "labelcolor": plots.TEXT, "fontsize": 8.5, "ncols": 4}
        figure.legend([*shown.values()], [*shown], loc="outside lower center", **legend)
        return plots._finished(figure, [], [])


def random_fates(graph, seed: int) -> dict[str, str]:
    """Fates for the policy manual: for every operation that may be recomputed, a random choice decides."""
    analysis, coin, fates = graph.analysis, random.Random(seed), {}
    for producer in sorted({graph.storages[storage].producer for storage in analysis.savable}):
        siblings = sorted(analysis.allocated[producer] & analysis.savable)
        lies_in = {node for storage in siblings for node in graph.storages[storage].nodes}
        if not lies_in & analysis.not_recomputable.keys() and coin.random() < 0.5:
            fates.update({graph.nodes[analysis.base_of[storage]].name: RECOMPUTED for storage in siblings})
    return fates


def compare(
    model, args, kwargs, policies, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Predict and run a step by every policy; returns whether bytes and gradients agree.

    The plans are made from shapes alone, so they are the same on every machine. For the comparison with the allocator,
    they are simulated once more with measured workspaces.

    Args:
        model, args, kwargs: called on the CPU, returning a scalar loss.
        policies: ``"none"``, ``"full"`` or ``"manual"``, the last with `random_fates` by `seed`.
        dtype: bfloat16 runs the forward under autocast.

    Returns:
        For every policy ``peak_bytes``: the dynamic peak without workspaces; ``saved_bytes``; ``recompute_ratio``:
        FLOPs of recomputation over those of the baseline; ``off_bytes``: simulated minus measured dynamic peak;
        ``is_equal``: whether all gradients are bit-equal to the baseline's.
    """

    def autocast():
        return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)

    def gradients(module):
        model.zero_grad()
        torch.manual_seed(seed)
        with autocast():
            loss = module(*args, **kwargs)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    with autocast():
        captured = CapturedStep(model, *args, **kwargs)
    graph, costs = captured.graph, profiled(captured.graph)
    exact = profiled(graph, workspace="measured")
    baseline = gradients(model)
    resident = (model, *(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)))
    found = {}
    for policy in policies:
        options: dict[str, Any] = {"fates": random_fates(graph, seed)} if policy == "manual" else {}
        planned = plan(graph, policy=policy, profile=costs, **options)
        step = captured.planned(planned)
        pairs = zip(baseline, gradients(step), strict=True)
        is_equal = all(torch.equal(a, b) for a, b in pairs)
        measured = measure(partial(gradients, step), "cpu", resident=resident, repeats=0)
        found[policy] = {
            "peak_bytes": planned.dynamic_peak_bytes,
            "saved_bytes": planned.saved_bytes,
            "recompute_ratio": planned.recompute_flops / (planned.flops - planned.recompute_flops),
            "off_bytes": simulate(graph, exact, planned.schedule).peak_bytes - measured.dynamic_peak_bytes,
            "is_equal": is_equal,
        }
    return found
