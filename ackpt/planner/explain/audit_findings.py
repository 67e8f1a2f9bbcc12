"""What `ackpt.audit` finds wrong in two watched runs of a step: rules known from users' reports, each with its fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ackpt.checkpointing.wrapping import _Checkpointed, repeated_blocks
from ackpt.metering.meter import Measurement, memory_format
from ackpt.planner.capture.places import modules_text, pattern

from .audit_runs import ACKPT, REENTRANT, Run, Saved, Watch, path_of

_WRAPPED = "_checkpoint_wrapped_module"
_SWITCHES = ("gradient_checkpointing", "grad_checkpointing", "use_checkpoint")
_LEAST_SHARE = 0.1  # of all saved bytes: blocks that save less need no region
_LEAST_BYTES = 1 << 20  # that the head saves: in a tiny model, it always saves the most
_BY_ACKPT = "checkpoint with ackpt.apply_activation_checkpointing(model)"


@dataclass(frozen=True)
class Finding:
    """Something wrong with a step's checkpointing or offload; ``module``: its path, "" for the whole step.

    ``kind`` is one of ``"error"``, ``"no_gradients"``, ``"random"``, ``"statistics"``, ``"changed"``, ``"twice"``,
    ``"different"``, ``"no_effect"``, ``"evaluation"``, ``"cache"``, ``"children"``, ``"not_covered"``, ``"nested"``,
    ``"offload"`` and ``"head"``.

    Example:
        >>> from ackpt.planner.explain.audit_findings import Finding
        >>> print(Finding("cache", "config.use_cache is on", "set model.config.use_cache = False"))
        cache: config.use_cache is on. Fix: set model.config.use_cache = False
    """

    kind: str
    message: str
    fix: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}. Fix: {self.fix}"


class Seen(NamedTuple):
    """Two runs of a step: as it is, and neutral. ``differences``: from the second, by label; None: it is missing."""

    modules: Mapping[str, nn.Module]
    watch: Watch
    neutral: Watch
    differences: Mapping[str, float | None]
    measured: Measurement | None
    baseline: Measurement
    error: str

    @property
    def runs(self) -> list[Run]:
        """All regions, outer ones first, with what they save where they are plain calls."""
        return flat(self.watch.runs)


def flat(runs: list[Run]) -> list[Run]:
    """Regions and those inside them."""
    return [each for run in runs for each in (run, *flat(run.children))]


def findings(seen: Seen) -> tuple[Finding, ...]:
    """All findings, those about wrong results first."""
    for run, plain in zip(seen.runs, flat(seen.neutral.runs)):
        run.dropped = plain.dropped
    found = [*_results(seen)]
    if not seen.error:
        found += [*_without_regions(seen), *_offload(seen), *_regions(seen), *_coverage(seen), *_head(seen)]
    return tuple(found)


def _results(seen: Seen) -> Iterator[Finding]:
    labels = set(seen.differences)
    missing = [label.partition(" ")[2] for label in labels if seen.differences[label] is None]
    no_path = "does not require grad" in seen.error or bool(missing)
    if no_path:
        run = next((run for run in seen.runs if run.kind == REENTRANT), None)
        names = f"{len(missing)} parameters, such as {min(missing)}, have" if missing else "the loss has"
        enable = any(hasattr(m, "enable_input_require_grads") for m in seen.modules.values())
        yield Finding(
            "no_gradients",
            f"{names} no gradient: no input of the region requires grad, so use_reentrant=True cuts the graph there",
            f"{'call model.enable_input_require_grads(), or ' * enable}pass use_reentrant=False",
            text_of(run) if run else "",
        )
    causes = [*_causes(seen)]
    if seen.error and not no_path:
        more = f"; {causes[0].message}" if causes else ""
        yield Finding(
            "error",
            f"the step fails, but not without its checkpointing and offload: {seen.error}{more}",
            causes[0].fix if causes else f"make the region's code repeat its forward, or {_BY_ACKPT}",
            causes[0].module if causes else "",
        )
    elif labels - {label for label in labels if seen.differences[label] is None}:
        yield from causes or [_unknown_cause(seen)]


def _causes(seen: Seen) -> Iterator[Finding]:
    by_importance = sorted(seen.differences, key=lambda label: ("running" in label, label), reverse=True)
    labels = {label.partition(" ")[0]: label.partition(" ")[2] for label in reversed(by_importance)}
    values = bool(set(labels) - {"buffer", "attribute"}) or bool(seen.error)
    for run in seen.runs if values else ():
        lost = [name for name in run.drew if not run.replays_random or (run.kind != ACKPT and name != "torch")]
        if lost:
            how = "preserve_rng_state=False" if not run.replays_random else "torch's checkpoint does not replay them"
            fix = "leave preserve_rng_state out" if not run.replays_random and lost == ["torch"] else _BY_ACKPT
            yield Finding("random", _where(run, f"draws new random numbers from {lost[0]}: {how}"), fix, text_of(run))
            break
    if "buffer" in labels:
        name = labels["buffer"]
        where = name.rpartition(".")[0]
        yield Finding(
            "statistics",
            f"buffer {name} differs after the step, because the recomputation updates it again, as it does the running "
            "statistics of a BatchNorm",
            f"{_BY_ACKPT}, which updates it once",
            where,
        )
    if "attribute" in labels:
        name = labels["attribute"]
        yield Finding(
            "twice",
            f"attribute {name} differs after the step, because the recomputation changes it again",
            f"change it outside of the region, or {_BY_ACKPT}, which restores attributes",
            name.rpartition(".")[0],
        )
    for run in seen.runs if values else ():
        if run.changed and (seen.error or _mismatch(run) or not run.calls[0]):
            message = _where(run, f"reads something that changed before backward: {run.changed[0]}")
            yield Finding(
                "changed",
                message,
                f"pass it as an argument, or {_BY_ACKPT}, which refuses or restores it",
                text_of(run),
            )
            break


def _unknown_cause(seen: Seen) -> Finding:
    label = first_difference(seen)
    size = seen.differences.get(label)
    by = "" if size is None else f" by up to {size:.3g}"
    module = arises_in(seen)
    return Finding(
        "different",
        f"{label} differs{by} from the step without checkpointing and offload"
        + f", first in {module!r}" * bool(module),
        f"make the recomputation repeat the forward of that module, or {_BY_ACKPT}",
        module,
    )


def first_difference(seen: Seen) -> str:
    """The label of the largest difference: of outputs, else of gradients, else of anything."""
    order = sorted(seen.differences, key=lambda label: -(seen.differences[label] or 0.0))
    kinds = ("output", "gradient", "parameter", "")
    return next((label for kind in kinds for label in order if label.startswith(kind)), "")


def arises_in(seen: Seen) -> str:
    """The first module whose forward, or else whose recomputation, has another result."""
    for call, plain in zip(seen.watch.calls, seen.neutral.calls):
        if call != plain:
            return plain[0] or "the model itself"
    differing = ((run, _mismatch(run)) for run in seen.runs)
    return next((module for _, module in differing if module), "")


def _mismatch(run: Run) -> str:
    """The first module of a region whose recomputation has another result than its forward."""
    for calls in run.calls[1:]:
        for first, again in zip(run.calls[0], calls):
            if first != again:
                return first[0]
    return ""


def _without_regions(seen: Seen) -> Iterator[Finding]:
    """Checkpointing is switched on, and no region ran."""
    named = [(path_of(name), m) for p, root in seen.modules.items() for name, m in root.named_modules(prefix=p)]
    on = [(name, m) for name, m in named if isinstance(m, _Checkpointed) or hasattr(m, _WRAPPED) or _is_on(m)]
    configs = [getattr(m, "config", None) for m in seen.modules.values()]
    keeps = any(getattr(config, "use_cache", False) is True for config in configs)
    cache = "a cache of keys and values is on (use_cache), "
    where = on[0][0] if on else ""
    if on and not seen.runs and not any(module.training for _, module in on):
        text = f"checkpointing is switched on in {len(on)} modules, which are in evaluation mode and skip it"
        yield Finding("evaluation", text, "call model.train() before the step", where)
    elif (on or seen.runs) and seen.watch.has_cache:
        text = f"{cache}and the output keeps it until backward ends"
        yield Finding("cache", text, "call the model with use_cache=False")
    elif on and not seen.runs and seen.watch.without_grad:
        yield Finding("no_effect", "regions run only under no_grad", "call them with gradients on", where)
    elif on and not seen.runs and keeps:
        text = f"{cache}so the {len(on)} modules in which checkpointing is switched on skip it"
        yield Finding("cache", text, "set model.config.use_cache = False", where)
    elif on and not seen.runs:
        text = f"checkpointing is switched on in {len(on)} modules, but no region runs in this step"
        fix = f"call the modules that are wrapped, or {_BY_ACKPT}"
        yield Finding("no_effect", text, fix, where)


def _is_on(module: nn.Module) -> bool:
    return any(vars(module).get(name) is True for name in _SWITCHES)


def _offload(seen: Seen) -> Iterator[Finding]:
    for context in seen.watch.contexts.values():
        if not context.seen:
            text = f"{context.name} is entered {context.entered} times, but the step saves no activation inside"
            yield Finding("offload", text, "enter it around the forward, not around backward")
        elif context.moved:
            if context.copied > 2 * context.moved:
                text = (
                    f"{context.name} copies {memory_format(context.copied)}, and frees {memory_format(context.moved)}"
                )
                yield Finding("offload", text, "drop other references to the originals")
        elif context.copied:
            text = f"{context.name} copies {memory_format(context.copied)}, but the originals are not freed"
            yield Finding("offload", text, "drop other references to them, such as a list of packed tensors")
        elif context.least is not None and context.least > context.largest:
            text = (
                f"{context.name} offloads nothing: it leaves tensors below {memory_format(context.least)} on the "
                f"device, and the largest has {memory_format(context.largest)}"
            )
            yield Finding("offload", text, f"lower its threshold below {context.largest} bytes")
        elif not context.on_cpu:
            text = f"{context.name} sees {memory_format(context.seen)} of activations, and offloads none of them"
            yield Finding("offload", text, "use ackpt.offload_saved_tensors()")


def _regions(seen: Seen) -> Iterator[Finding]:
    """Regions that run, but save little."""
    for run in seen.runs:
        (inner,) = run.children if len(run.children) == 1 else (None,)
        if inner is not None and sum(inner.dropped.values()) >= 0.9 * sum(run.dropped.values()) > 0:
            text = _where(run, f"contains only the region {text_of(inner)}, which is recomputed twice")
            yield Finding("nested", text, "switch one of the two off", text_of(run))
            break
    blocks = _blocks(seen.modules)
    for block in blocks:
        inside = [run for run in seen.runs if run.modules and all(m.startswith(f"{block}.") for m in run.modules)]
        if len(inside) < 2:
            continue
        saved = [each for each in seen.neutral.saved or () if _is_in(each.module, block)]
        dropped = {key: size for run in inside for key, size in run.dropped.items()}
        total = sum(each.bytes for each in saved)
        inputs = {key: size for run in inside for key, size in run.inputs.items()}
        left = sum(inputs.values()) + sum(each.bytes for each in saved if each.storage not in dropped)
        if sum(dropped.values()) >= 0.5 * total and left >= 0.4 * total:
            text = f"{len(inside)} regions inside {block!r}, not the block, are wrapped: their inputs and the rest still save "
            text += f"{memory_format(left)} of {memory_format(total)}"
            yield Finding("children", text, "wrap the blocks: ackpt.apply_activation_checkpointing(model)", block)
            return
    outer = seen.watch.runs
    if outer and seen.measured is not None and not seen.watch.contexts:
        yield from _effect(seen, outer)


def _effect(seen: Seen, outer: list[Run]) -> Iterator[Finding]:
    assert seen.measured is not None
    dropped = sum({key: size for run in outer for key, size in run.dropped.items()}.values())
    where = modules_text(m for run in outer for m in run.modules)
    before, after = saved_bytes(seen.baseline), saved_bytes(seen.measured)
    at_peak = seen.baseline.timeline.at(seen.baseline.timeline.peak_index)
    gain = seen.baseline.peak_bytes - seen.measured.peak_bytes
    if dropped and before - after < 0.1 * dropped:
        text = f"the {len(outer)} regions ({where}) save {memory_format(after)}, {memory_format(before)} without them"
        yield Finding(
            "no_effect",
            text,
            "use larger regions: ackpt.apply_activation_checkpointing(model)",
            outer[0].modules[0] if outer[0].modules else "",
        )
    elif dropped and gain < 0.1 * dropped and at_peak.get("activations", 0) > 0.5 * sum(at_peak.values()):
        text = (
            f"the {len(outer)} regions ({where}) save {memory_format(before - after)} less, but the peak changes from "
            f"{memory_format(seen.baseline.peak_bytes)} to {memory_format(seen.measured.peak_bytes)}: recomputation "
            "brings everything back at once"
        )
        yield Finding(
            "no_effect", text, "use several regions: ackpt.apply_activation_checkpointing(model)", text_of(outer[0])
        )


def uncovered(seen: Seen) -> dict[str, list[str]]:
    """Repeated blocks none of which is a region, by a common name, while others are; those that save little are left out."""
    covered = {module for run in seen.runs for module in run.modules}
    groups: dict[tuple[str, type], list[tuple[str, bool, int]]] = {}
    saved = seen.neutral.saved or ()
    total = sum(each.bytes for each in saved)
    for block, kind in _blocks(seen.modules).items():
        is_region = any(_is_in(block, module) or _is_in(module, block) for module in covered)
        size = sum(each.bytes for each in saved if _is_in(each.module, block) and not each.runs)
        groups.setdefault((pattern(block), kind), []).append((block, is_region, size))
    return {
        modules_text(block for block, *_ in group): [block for block, *_ in group]
        for group in groups.values()
        if not any(is_region for _, is_region, _ in group) and sum(size for *_, size in group) > _LEAST_SHARE * total
    }


def _coverage(seen: Seen) -> Iterator[Finding]:
    if not seen.runs:
        return
    for name, blocks in uncovered(seen).items():
        saved = sum(s.bytes for s in seen.neutral.saved or () if any(_is_in(s.module, block) for block in blocks))
        text = f"{name}: no region, although other blocks are; {memory_format(saved)} stay saved"
        fix = f"checkpoint them, too: ackpt.apply_activation_checkpointing(model, {blocks!r})"
        yield Finding("not_covered", text, fix, blocks[0])


def _head(seen: Seen) -> Iterator[Finding]:
    outside = outside_of_regions(seen)
    if not seen.runs or not outside or seen.measured is None:
        return
    blocks = _blocks(seen.modules)
    by_place: dict[str, int] = {}
    for each in outside:
        if not any(_is_in(each.module, block) for block in blocks):
            by_place[each.module] = by_place.get(each.module, 0) + each.bytes
    size = sum(by_place.values())
    if size > max(_LEAST_BYTES, 0.5 * saved_bytes(seen.measured)):
        module = max(by_place, key=by_place.__getitem__)
        what = max((s for s in outside if s.module == module), key=lambda s: s.bytes)
        text = (
            f"{memory_format(size)} of the {memory_format(saved_bytes(seen.measured))} that are saved are outside of the "
            f"blocks, most of them in {module or 'the model itself'} ({what.what})"
        )
        yield Finding("head", text, "compute the head and the loss in chunks: ackpt.chunked_cross_entropy", module)


def outside_of_regions(seen: Seen) -> list[Saved]:
    """The tensors that are saved outside of regions, the largest first."""
    return sorted((each for each in seen.neutral.saved or () if not each.runs), key=lambda each: -each.bytes)


def saved_bytes(measured: Measurement) -> int:
    """The bytes of activations that are live when backward begins."""
    timeline = measured.timeline
    return 0 if timeline.boundary is None else timeline.at(timeline.boundary).get("activations", 0)


def _blocks(modules: Mapping[str, nn.Module]) -> dict[str, type]:
    """The repeated blocks by path, with their classes."""
    blocks = {}
    for prefix, root in modules.items():
        for name, module in repeated_blocks(root).items():
            path = path_of(f"{prefix}.{name}" if prefix else name)
            blocks[path] = type(getattr(module, _WRAPPED, module))
    return blocks


def _is_in(module: str, block: str) -> bool:
    return module == block or not block or module.startswith(f"{block}.")


def text_of(run: Run) -> str:
    """The modules of a region in words."""
    return modules_text(run.modules) if run.modules else "a function"


def _where(run: Run, what: str) -> str:
    return f"the region {text_of(run)} ({run.kind}) {what}"
