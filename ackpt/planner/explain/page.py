"""Render an `Explanation` as one HTML page.

The page needs no network, follows the reader's light or dark theme, and is readable on a phone.
"""

from html import escape
from itertools import accumulate

from ackpt.core import __version__
from ackpt.metering.meter import memory_format
from ackpt.planner.schedule.allocations import LIVE

from .saved import SavedLine, StepMemory, by_equal_blocks, cost_text, grouped, live_rows, where_text

_POINTS = 600  # of the timeline
_WIDTH, _HEIGHT = 720, 260
# The colors of the kinds are those of `experiments.reports.plots.COLORS`, which needs matplotlib.
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1c2430; --faint: #525c6a; --line: #d5dae1; --bar: #dbe7f5;
  --parameters: #4a6fc4; --buffers: #8fa8dd; --inputs: #55b3d9; --optimizer: #8e5cc4; --gradients: #d1568f;
  --saved: #eb9a2d; --outputs: #8b8d98; --recomputed: #a8552a; --temporaries: #2fa58c; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181e; --text: #e4e8ee; --faint: #a9b4c2; --line: #343c48; --bar: #22364f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.4rem; line-height: 1.25; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .faint, td small { color: var(--faint); }
code { font-size: .9em; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; border-top: 1px solid var(--line); }
th { font-weight: 600; border-top: 0; } td:not(:last-child) { white-space: nowrap; font-variant-numeric: tabular-nums; }
td:last-child, summary, details p { overflow-wrap: anywhere; }
td:last-child { min-width: 9rem; }
svg { display: block; width: 100%; height: 16rem; border: 1px solid var(--line); }
ul.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; list-style: none; padding: 0; margin: .5rem 0; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
details { border-left: 1px solid var(--line); padding-left: .75rem; }
details details, details p { margin-left: .25rem; }
summary, details p { padding: .15rem .25rem;
  background: linear-gradient(90deg, var(--bar) var(--share), transparent var(--share)); }
summary { cursor: pointer; } summary b, details p b { font-variant-numeric: tabular-nums; font-weight: 600; }
summary:focus-visible { outline: 2px solid var(--parameters); }
"""


def page(explanation: StepMemory) -> str:
    """The page as text."""
    plan = explanation.plan
    title = f"Peak memory of one training step: {memory_format(plan.peak_bytes)}"
    baseline, at_peak = sum(line.bytes for line in explanation.saved), explanation.at_peak
    legend = [
        f'<li><i style="background: var(--{kind})"></i>{kind}: {memory_format(at_peak.get(kind, 0))} at the peak</li>'
        for kind in live_series(explanation)
    ]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(explanation.types.get("", "model"))}, policy {escape(plan.policy)}, '
        f"{'FLOPs' if explanation.profile.seconds is None else 'seconds of ' + escape(explanation.profile.device)}, "
        f"ackpt {escape(__version__)}</p>",
        f"<p>The peak is reached at <code>{escape(plan.peak_node)}</code>.</p>",
        f"<p>{escape(explanation.views)}</p>" if explanation.views else "",
        "<h2>Live memory over the step</h2>",
        timeline_svg(explanation),
        f'<ul class="legend">{"".join(legend)}</ul>',
        "<h2>What would reduce the peak</h2>",
        _suggestions(explanation),
        "<h2>Largest at the peak</h2>",
        _table(
            ("bytes", "kind", "what"),
            [(memory_format(size), kind, escape(description)) for size, kind, description in live_rows(explanation)],
        ),
        f"<h2>Saved for backward by module: {memory_format(baseline)}</h2>",
        '<p class="faint">Open a module to see its parts and the source lines that save activations.</p>',
        module_tree(explanation.saved, explanation.types),
        "<h2>Saved for backward by block</h2>",
        _table(
            ("bytes", "block"),
            [
                (memory_format(size), escape(name or "the model itself"))
                for name, size in by_equal_blocks(explanation.by_block)
            ],
        ),
        "<h2>Saved for backward by module type</h2>",
        _table(("bytes", "type"), [(memory_format(size), escape(name)) for name, size in explanation.by_type.items()]),
        "<h2>Cost of recomputing</h2>",
        _table(
            ("bytes", "to recompute", "where"),
            [
                (memory_format(sum(line.bytes for line in group)), cost_text(group), escape(where_text(group)))
                for group in grouped(explanation.saved)
            ],
        ),
    ]
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
    )
    return f"{head}<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"


def timeline_svg(explanation: StepMemory) -> str:
    """Live bytes by kind after every allocation and free, stacked; the peak and the start of backward are marked."""
    plan = explanation.plan
    count, peak = len(plan.timeline.live), plan.timeline.peak_index
    series = live_series(explanation)
    indices = sorted({*range(0, count, max(1, count // _POINTS)), count - 1, peak, plan.timeline.boundary or 0})

    def x(index: int) -> float:
        return round(_WIDTH * index / max(1, count - 1), 1)

    def y(size: int) -> float:
        return round(_HEIGHT * (1 - size / max(1, plan.peak_bytes) * 0.96), 1)

    below = [0] * count
    shapes = []
    for kind, sizes in series.items():
        above = [low + size for low, size in zip(below, sizes)]
        line = [f"{x(i)},{y(above[i])}" for i in indices] + [f"{x(i)},{y(below[i])}" for i in reversed(indices)]
        shapes.append(f'<polygon points="{" ".join(line)}" style="fill: var(--{kind})"><title>{kind}</title></polygon>')
        below = above
    boundary = "" if plan.timeline.boundary is None else _rule(x(plan.timeline.boundary), "4 4", "backward starts")
    label = (
        f"Live bytes over {count - 1} allocations and frees. The peak, {memory_format(plan.peak_bytes)}, is reached "
        f"at {plan.peak_node}."
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}{boundary}{_rule(x(peak), '', 'the peak')}</svg>\n"
        f'<p class="faint">Allocations and frees in order, from 0 to {memory_format(plan.peak_bytes)}. The solid line '
        "marks the peak, the dashed line the start of backward.</p>"
    )


def live_series(explanation: StepMemory) -> dict[str, list[int]]:
    """Bytes by kind at every entry of the plan's timeline; kinds that are always 0 are left out."""
    count = len(explanation.plan.timeline.live)
    changes = {kind: [0] * (count + 1) for kind in LIVE}
    for block in explanation.allocations:
        changes[block.kind][block.begin] += block.bytes
        if block.end is not None:
            changes[block.kind][block.end] -= block.bytes
    return {kind: list(accumulate(steps[:count])) for kind, steps in changes.items() if any(steps)}


def _rule(x: float, dashes: str, title: str) -> str:
    return (
        f'<line x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}" style="stroke: var(--text)" stroke-width="1.5" '
        f'vector-effect="non-scaling-stroke" stroke-dasharray="{dashes}"><title>{title}</title></line>'
    )


def _suggestions(explanation: StepMemory) -> str:
    rows = []
    for each in explanation.suggestions:
        cost = "" if each.cost is None else f", recomputation {each.cost:.1%} of the step"
        text = (
            f"{escape(each.title)}: peak {memory_format(each.peak_bytes)}{cost}<br><code>{escape(each.fix)}</code><br>"
            f"<small>{escape(each.how)}</small>"
        )
        rows.append((f"-{memory_format(each.saved_bytes)}", text))
    table = _table(("saving", "change"), rows) if rows else "<p>None of the changes that were simulated.</p>"
    left = "".join(f'<p class="faint">Not computed: {escape(reason)}</p>' for reason in explanation.not_computed)
    return table + left


def _table(heads, rows) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def module_tree(lines: tuple[SavedLine, ...], types) -> str:
    """Nested ``details``: every module with the bytes that it and its parts save, and the lines that save them."""
    below: dict[str, int] = {"": 0}
    children: dict[str, list[str]] = {}
    for line in lines:
        parts = line.module.split(".") if line.module else []
        below[""] += line.bytes
        for length in range(1, len(parts) + 1):
            name, parent = ".".join(parts[:length]), ".".join(parts[: length - 1])
            if name not in below:
                children.setdefault(parent, []).append(name)
            below[name] = below.get(name, 0) + line.bytes
    lines_of: dict[str, list[SavedLine]] = {}
    for line in lines:
        lines_of.setdefault(line.module, []).append(line)
    whole = max(1, below[""])

    def share(size: int) -> str:
        return f'style="--share: {100 * size / whole:.1f}%"'

    def branch(name: str) -> str:
        inner = [branch(child) for child in sorted(children.get(name, ()), key=lambda child: -below[child])]
        for line in lines_of.get(name, ()):
            where = where_text([line]).removeprefix(name or "the model itself")
            inner.append(
                f"<p {share(line.bytes)}><b>{memory_format(line.bytes)}</b> {escape(where.strip())} "
                f'<span class="faint">recompute: {cost_text([line])}</span></p>'
            )
        label = f"{escape(name or 'the model')} <span class='faint'>{escape(types.get(name, ''))}</span>"
        is_open = " open" if not name else ""
        summary = f"<summary {share(below[name])}><b>{memory_format(below[name])}</b> {label}</summary>"
        return f"<details{is_open}>{summary}{''.join(inner)}</details>"

    return branch("")
