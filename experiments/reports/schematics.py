"""Schematics as figures: stills of the animated ones for readers without JavaScript, and five that are not animated.

A still shows the frame at which its animation stops.
"""

from __future__ import annotations

import re

from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from experiments.reports import plots
from experiments.widgets import explorer

from .tables import MIB

_STATES = {"s": ("activations", "saved activation"), "r": ("recomputed", "recomputed activation")}
_STATES |= {"t": ("temporaries", "live for a moment")}
LANES = {"f": plots.COLORS["resident"], "r": plots.COLORS["recomputed"], "b": plots.COLORS["gradients"]}
LANES |= {"out": "#2b7d6a", "in": plots.COLORS["optimizer"]}
_LINE = {"color": plots.TEXT, "linewidth": 1}
_DASHED = {**_LINE, "linestyle": (0, (4, 3))}


def chain_figure(data: dict):
    """For each variant its graph at the peak, and below it live memory over the step, of `chain_steps`' data."""
    variants = data["variants"]
    with plots.style.context("default"):
        figure = plots._Figure(figsize=(7.2, 2.6 * len(variants)), layout="constrained")
        axes = figure.subplots(2 * len(variants), 1, height_ratios=[2, 3] * len(variants), squeeze=False)[:, 0]
        for one, graph, memory in zip(variants, axes[::2], axes[1::2], strict=True):
            frame = _peak(one)
            _nodes(graph, data, one, frame)
            title = f"{one['label']}: peak {one['peak_bytes'] / MIB:.2f} MiB"
            if one["peak_bytes"] != data["baseline"]["peak_bytes"]:
                title += f", {one['peak_bytes'] / data['baseline']['peak_bytes']:.0%} of the baseline's"
            if one["recompute_flops"]:
                title += f"; {one['recompute_flops'] / data['baseline']['flops']:.0%} of its FLOPs recomputed"
            graph.set_title(title, loc="left", fontsize=10, fontweight="bold", color=plots.TEXT)
            plots._style(memory)
            memory.set_ylabel("live MiB", color=plots.TEXT, fontsize=9)
            _stacked(memory, data["categories"], [one["live"][name] for name in data["categories"]])
            memory.axhline(one["peak_bytes"] / MIB, color=plots.TEXT, linewidth=1, linestyle=(0, (6, 3)))
            memory.axvline(frame + 0.5, color=plots.TEXT, linewidth=1.4)
            memory.set_ylim(0, 1.05 * data["baseline"]["peak_bytes"] / MIB)
            memory.set_xlim(0, len(one["phases"]))
        axes[-1].set_xlabel("operations, in order; the line marks the peak, shown above", color=plots.TEXT, fontsize=9)
        handles = [_dot(plots.COLORS[color], label) for color, label in _STATES.values()]
        handles += [_dot("none", "dropped or not live"), Patch(color=plots.COLORS["gradients"], label="gradient")]
        return _with_legend(figure, handles)


def publish(data: dict, name: str) -> None:
    """Write the data of a schematic to ``results/explorer/NAME.json`` and its still to ``results/figures/NAME.png``."""
    figures = {"graph": chain_figure, "stack": stack_figure, "lanes": lanes_figure}
    explorer.save(data, f"results/explorer/{name}.json")
    plots.save(figures[data["kind"]](data), f"results/figures/{name}.png")


def _peak(one: dict) -> int:
    """The frame of the peak."""
    return [sum(sizes) for sizes in zip(*one["live"].values())].index(one["peak_bytes"])


def _nodes(axes, data: dict, one: dict, frame: int) -> None:
    axes.set_axis_off()
    axes.set_ylim(-0.5, 1.4)
    for reader, read in data["reads"]:
        axes.plot([read, reader], [1, 0], color=plots.TEXT, linewidth=0.6, zorder=1)
    for first, second in data["chain"]:
        axes.plot([first, second], [1, 1], color=plots.TEXT, linewidth=0.6, zorder=1)
        axes.plot([first, second], [0, 0], color=plots.TEXT, linewidth=0.6, zorder=1)
    done = {column for phase, column in list(zip(one["phases"], one["at"]))[: frame + 1] if phase == "b"}
    look = {"edgecolors": plots.TEXT, "linewidths": 1, "zorder": 2}
    for column, state in enumerate(one["states"][frame]):
        color = plots.COLORS[_STATES[state][0]] if state in _STATES else "none"
        axes.scatter(column, 1, 60, color, **look)
        axes.scatter(column, 0, 50, plots.COLORS["gradients"] if column in done else "none", marker="s", **look)
    axes.text(-1, 1, "forward", ha="right", va="center", fontsize=8, color=plots.TEXT)
    axes.text(-1, 0, "backward", ha="right", va="center", fontsize=8, color=plots.TEXT)


def _stacked(axes, names, series) -> None:
    bottom = [0.0] * (len(series[0]) + 1)
    for name, sizes in zip(names, series, strict=True):
        top = [low + size / MIB for low, size in zip(bottom, [*sizes, sizes[-1]])]
        axes.fill_between(range(len(top)), bottom, top, step="post", color=plots.COLORS[name], linewidth=0)
        bottom = top


def stack_figure(data: dict):
    """The stack of the tensors that a block saves, of `block_stack`'s data."""
    with plots.style.context("default"):
        figure, axes = plots._axes("", "", "elements per token")
        figure.set_size_inches(7.2, 4.6)
        below, rows = 0, len(data["layers"])
        total = sum(layer["elements"] for layer in data["layers"])
        for number, layer in enumerate(data["layers"]):
            color, size = plots.COLORS[layer["category"]], layer["elements"]
            axes.bar(0, size, 0.8, below, color=color, edgecolor=plots.TEXT, linewidth=0.8, align="edge")
            y = total * (number + 0.5) / rows
            axes.plot([0.8, 1.1], [below + size / 2, y], color=plots.TEXT, linewidth=0.6)
            symbol = layer["symbol"]
            text = layer["label"], symbol if symbol == str(size) else f"{symbol} = {size}"
            axes.text(1.15, y, text[0], va="center", fontsize=8.5, color=plots.TEXT)
            axes.text(3.6, y, text[1], va="center", ha="right", fontsize=8.5, color=plots.TEXT)
            below += size
        axes.set_xlim(0, 3.6)
        axes.set_ylim(0, total)
        axes.set_xticks([])
        axes.grid(False)
        return plots._finished(figure, [], [])


def lanes_figure(data: dict):
    """For each variant the lanes of compute and copies, and below them live memory, of `offload_lanes`' data."""
    variants = data["variants"]
    with plots.style.context("default"):
        figure = plots._Figure(figsize=(7.2, data.get("height", 2.5) * len(variants)), layout="constrained")
        axes = figure.subplots(2 * len(variants), 1, height_ratios=[2, 3] * len(variants), squeeze=False)[:, 0]
        for one, lanes, memory in zip(variants, axes[::2], axes[1::2], strict=True):
            for works, y in ((one["compute"], 1), (one["copies"], 0)):
                for what in LANES:
                    bars = [(1e3 * start, 1e3 * (end - start)) for kind, _, start, end in works if kind == what]
                    lanes.broken_barh(bars, (y, 0.8), color=LANES[what], linewidth=0)
            waiting = f"{1e3 * one['exposed_seconds']:.1f} ms of them waiting"
            title = f"{one['label']}: {1e3 * one['seconds']:.1f} ms, {waiting}"
            lanes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=plots.TEXT)
            for each in (lanes, memory):
                plots._style(each)
                each.set_xlim(0, 1e3 * data.get("seconds", one["seconds"]))
            lanes.grid(False)
            lanes.set_yticks([0.4, 1.4], ["copies", "compute"])
            lanes.set_ylim(-0.05, 1.85)
            lanes.set_xticks([])
            times = [1e3 * one["seconds"] * i / len(one["device"]) for i in range(len(one["device"]) + 1)]
            device, host = ([size / MIB for size in (*one[name], one[name][-1])] for name in ("device", "host"))
            memory.fill_between(times, device, step="post", color=plots.COLORS["other"], linewidth=0)
            memory.step(times, host, where="post", color=plots.TEXT, linewidth=1.4)
            memory.axhline(data["without"]["peak_bytes"] / MIB, color=plots.TEXT, linewidth=1, linestyle=(0, (2, 3)))
            memory.set_ylabel("live MiB", color=plots.TEXT, fontsize=9)
            memory.set_ylim(bottom=0)
        axes[-1].set_xlabel("time (ms)", color=plots.TEXT, fontsize=9)
        labels = {"f": "forward", "r": "recomputation", "b": "backward", "out": "copy out", "in": "copy in"}
        handles = [Patch(color=LANES[name], label=label) for name, label in labels.items()]
        handles += [Patch(color=plots.COLORS["other"], label="device memory")]
        handles += [Line2D([], [], color=plots.TEXT, label="host memory")]
        dotted = (0, (2, 3))
        handles += [
            Line2D([], [], color=plots.TEXT, linestyle=dotted, label=data.get("dotted", "device peak without offload"))
        ]
        return _with_legend(figure, handles)


def autograd_figure(data: dict):
    """The nodes of each graph in a row, from the leaf to the loss, over what they save, of `autograd_graphs`' data."""
    colors = {name: plots.COLORS[name] for name in ("inputs", "activations", "recomputed")}
    with plots.style.context("default"):
        figure = plots._Figure(figsize=(6.2, 1.5 * len(data["graphs"]) + 0.3), layout="constrained")
        for axes, graph in zip(figure.subplots(len(data["graphs"]), 1), data["graphs"], strict=True):
            axes.set_axis_off()
            axes.set_xlim(-0.1, max(sum(each["covers"]) for each in data["graphs"]) + 0.1)
            axes.set_ylim(-0.75, 1.1)
            axes.set_title(graph["label"], loc="left", fontsize=10.5, fontweight="bold", color=plots.TEXT)
            left = 0
            for name, saved, covers in zip(graph["names"], graph["saved"], graph["covers"], strict=True):
                if left:  # backward goes from the loss to the leaf
                    axes.annotate("", (left - 0.08, 0.6), (left + 0.08, 0.6), arrowprops={"arrowstyle": "-|>", **_LINE})
                box = {"facecolor": "none", "edgecolor": plots.TEXT, "linewidth": 1}
                axes.add_patch(Rectangle((left + 0.08, 0.2), covers - 0.16, 0.8, **box))
                text = "\n".join(re.split(r"(?<=[a-z])(?=Grad|Backward)", name))
                axes.text(left + covers / 2, 0.6, text, ha="center", va="center", fontsize=9, color=plots.TEXT)
                if saved:
                    at = left + covers / 2
                    axes.plot([at, at], [0.2, -0.4], color=plots.TEXT, linewidth=0.8, zorder=1)
                    axes.scatter(at, -0.4, 90, colors[saved], edgecolors=plots.TEXT, linewidths=1, zorder=2)
                left += covers
        labels = {"inputs": "input x, saved", "activations": "saved activation", "recomputed": "recomputed activation"}
        return _with_legend(figure, [_dot(colors[name], label) for name, label in labels.items()], columns=3)


def region_figure(data: dict):
    """The operations of a block in a row for its forward and for each recomputation, of `region_calls`' data."""
    look = {"edgecolor": plots.TEXT, "linewidth": 1}
    plain, left_out = ({"facecolor": "none", **look, "linestyle": line} for line in ("-", "--"))
    again, dot = {"facecolor": plots.COLORS["recomputed"], **look}, plots.COLORS["activations"]
    with plots.style.context("default"):
        figure = plots._Figure(figsize=(6.4, 2.7), layout="constrained")
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_xlim(0, len(data["names"]))
        axes.set_ylim(-0.2 - 2.3 * (len(data["runs"]) - 1), 1.8)
        for row, (label, runs) in enumerate(data["runs"].items()):
            y, ran = -2.3 * row, again if row else plain
            axes.text(0.08, y + 1.2, label, fontsize=10, fontweight="bold", color=plots.TEXT)
            for column, (name, is_read, runs_now) in enumerate(zip(data["names"], data["saved"], runs, strict=True)):
                axes.add_patch(Rectangle((column + 0.08, y), 0.84, 0.9, **(ran if runs_now else left_out)))
                color = "white" if row and runs_now else plots.TEXT
                axes.text(column + 0.5, y + 0.45, name, ha="center", va="center", fontsize=9, color=color)
                if is_read and not row:
                    axes.scatter(column + 0.5, -0.35, 60, dot, edgecolors=plots.TEXT, linewidths=1)
        handles = [_dot(dot, "backward reads the result"), Patch(**again, label="recomputed")]
        return _with_legend(figure, [*handles, Patch(**left_out, label="left out")], columns=3)


def gathers_figure(data: dict):
    """The running operations, below them the gathered parameters and their bytes, of `gather_lanes`' data."""
    groups = range(data["blocks"] + 1)
    runs = LANES | {"f": plots.COLORS["other"]}  # parameters have the color of the forward's lane
    with plots.style.context("default"):
        figure = plots._Figure(figsize=(6.2, 4.4), layout="constrained")
        lanes, memory = figure.subplots(2, 1, height_ratios=[5, 3])
        for what, _, begin, end in data["runs"]:
            lanes.broken_barh([(begin, end - begin)], (-0.4, 0.8), color=runs[what], linewidth=0)
        rows = ("buffers", "buffers", 1.02), ("gathered", "parameters", 0.6), ("reductions", "temporaries", 1.02)
        for what, color, y in rows:
            for group, begin, end in data[what]:
                bar = [(begin, end - begin)], (group + y, 0.4)
                lanes.broken_barh(*bar, color=plots.COLORS[color], linewidth=0)
        for axes in (lanes, memory):
            plots._style(axes)
            axes.tick_params(labelsize=9)
            axes.set_xlim(0, data["events"])
            axes.set_xticks([])
            axes.axvline(next(begin for what, _, begin, _ in data["runs"] if what == "b"), **_DASHED)
        lanes.grid(False)
        lanes.set_ylim(len(groups) + 0.6, -0.6)
        lanes.set_yticks([0, *(group + 1 for group in groups)], ["runs", "root", *(f"block {g}" for g in groups[1:])])
        bottom = [0.0] * len(data["live"]["gathered parameters"])
        shown = {"gathered parameters": "parameters", "buffers of gathers": "buffers"}
        shown["buffers of reductions"] = "temporaries"
        for name, color in shown.items():
            top = [low + size / 1024 for low, size in zip(bottom, data["live"][name], strict=True)]
            memory.fill_between(range(len(top)), bottom, top, step="post", color=plots.COLORS[color], linewidth=0)
            bottom = top
        memory.set_ylabel("live KiB", color=plots.TEXT, fontsize=9)
        memory.set_xlabel("allocations and frees of one step, in order", color=plots.TEXT, fontsize=9)
        labels = {"f": "forward", "r": "recomputation", "b": "backward"}
        handles = [Patch(color=runs[name], label=label) for name, label in labels.items()]
        handles += [Patch(color=plots.COLORS[color], label=name) for name, color in shown.items()]
        handles += [Line2D([], [], **_DASHED, label="backward begins")]
        return _with_legend(figure, handles, columns=3)


def joint_figure(operations: list[dict]):
    """The forward of a step from left to right, and its backward below it from right to left.

    Takes `graph_profile.operations`. What backward writes to a parameter's gradient is in the lowest row.
    """
    read = {name for each in operations for name in each["reads"]}
    forward = [each for each in operations if not each["is_backward"]]
    backward = [each for each in operations if each["is_backward"]]
    places = {each["name"]: (column, 2.0) for column, each in enumerate(forward)}
    column = len(forward)
    for each in backward:
        if each["name"] in read:
            places[each["name"]] = (column, 1.0)
            column -= 1
    written = [each for each in backward if each["name"] not in read]
    by_source = sorted(written, key=lambda each: (-places[_source(each, backward)][0], -backward.index(each)))
    places |= {each["name"]: (len(forward) - 2 - index, 0.0) for index, each in enumerate(by_source)}
    saved = {name for each in backward for name in each["reads"]} & {each["name"] for each in forward[:-1]}
    saved |= {forward[-1]["name"]}
    colors = {"saved": plots.COLORS["activations"], "gradient": plots.COLORS["gradients"]}
    with plots.style.context("default"):
        figure = plots._Figure(figsize=(6.4, 3.3), layout="constrained")
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_xlim(-0.95, len(forward) + 0.5)
        axes.set_ylim(-0.4, 2.4)
        for each in operations:
            x, y = places[each["name"]]
            for source in each["reads"]:
                from_x, from_y = places[source]
                look = {"arrowstyle": "-|>", "color": plots.TEXT, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
                if from_y == 2 and y < 2 and each["name"] != "ones_like":  # it takes from the loss only its shape
                    look |= {"color": colors["saved"], "linewidth": 2}
                start, end = (from_x, from_y - 0.26 if y < from_y else from_y), (x, y + 0.26 if y < from_y else y)
                if from_y == y:
                    side = 0.42 if x > from_x else -0.42
                    start, end = (from_x + side, y), (x - side, y)
                axes.annotate("", end, start, arrowprops=look, zorder=1)
            ground = colors["saved"] if each["name"] in saved else colors["gradient"] if y == 0 else plots.GROUND
            box = {"facecolor": ground, "edgecolor": plots.TEXT, "linewidth": 1, "zorder": 2}
            axes.add_patch(Rectangle((x - 0.42, y - 0.26), 0.84, 0.52, **box))
            text = re.sub(r"_(backward|forward)(_data)?$", r"\n\1", each["name"].lstrip("_"))
            text = f"{text}\n{each['bytes']} B"
            axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color="black", zorder=3, linespacing=1.1)
        for y, text in ((2, "forward"), (1, "backward"), (0, "gradients of\nparameters")):
            axes.text(-0.5, y, text, ha="right", va="center", fontsize=8, color=plots.TEXT)
        handles = [Patch(facecolor=colors["saved"], edgecolor=plots.TEXT, label="read again in backward: saved")]
        handles += [Patch(facecolor=plots.GROUND, edgecolor=plots.TEXT, label="freed after its last reader")]
        return _with_legend(figure, handles, columns=2)


def _source(operation: dict, backward: list[dict]) -> str:
    """The operation of backward that it reads."""
    names = {each["name"] for each in backward}
    return next(name for name in operation["reads"] if name in names)


def inactive_figure(data: dict):
    """The operations of a step, and below them when each activation is in use, of `mu_two.inactive_intervals`' data."""
    rows = data["activations"]
    with plots.style.context("default"):
        figure = plots._Figure(figsize=(6.4, 0.45 * len(rows) + 1.2), layout="constrained")
        axes = figure.subplots()
        plots._style(axes)
        axes.grid(False)
        for phase, start, end in data["compute"]:
            bar = [(1e6 * start, 1e6 * (end - start))]
            axes.broken_barh(bar, (-0.4, 0.7), color=LANES[phase], edgecolor=plots.GROUND, linewidth=0.6)
        saved = plots.COLORS["activations"]
        for y, row in enumerate(rows, 1):
            first, leaves, needed, last = (1e6 * row[name] for name in ("first", "leaves", "needed", "last"))
            place, look = (y - 0.4, 0.36), {"color": saved, "linewidth": 0}
            axes.broken_barh([(first, leaves - first), (needed, last - needed)], place, **look)
            axes.broken_barh([(leaves, needed - leaves)], place, **look, alpha=0.3)
            copy = 1e6 * row["copy"]
            back = max(leaves + copy, needed - copy)  # the copy back cannot begin before the copy out has ended
            for begin, kind in ((leaves, "out"), (back, "in")):
                axes.broken_barh([(begin, copy)], (y - 0.02, 0.2), color=LANES[kind], linewidth=0)
            again = 1e6 * row["recompute"]
            axes.broken_barh([(needed - again, again)], (y + 0.2, 0.2), color=LANES["r"], linewidth=0)
        labels = [f"{row['name']}, {row['bytes'] // 1024} KiB" for row in rows]
        axes.set_yticks(range(len(rows) + 1), ["compute", *labels])
        axes.set_ylim(len(rows) + 0.6, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("time (µs)", color=plots.TEXT, fontsize=9)
        handles = [Patch(color=LANES["f"], label="forward"), Patch(color=LANES["b"], label="backward")]
        handles += [Patch(color=saved, label="activation in use"), Patch(color=saved, alpha=0.3, label="inactive")]
        named = {"out": "copy out", "in": "copy back", "r": "recomputation"}
        handles += [Patch(color=LANES[name], label=label) for name, label in named.items()]
        return _with_legend(figure, handles)


def _dot(color: str, label: str) -> Line2D:
    look = {"markerfacecolor": color, "markeredgecolor": plots.TEXT, "markersize": 7}
    return Line2D([], [], linestyle="none", marker="o", label=label, **look)


def _with_legend(figure, handles, columns: int = 4):
    look = {"frameon": False, "labelcolor": plots.TEXT, "fontsize": 8.5}
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **look)
    figure.set_dpi(plots.DPI)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure
