"""What `ackpt.audit` finds wrong in two watched runs of a step: rules known from users' reports, each with its fix."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ackpt.checkpointing.wrapping import is_checkpointed, repeated_blocks
from ackpt.metering.meter import Measurement, memory_format
from ackpt.planner.capture.short_names import modules_text, pattern

from .audit_runs import ACKPT, REENTRANT, WRAPPED, AuditedRegion, SavedOutside, Watch, named_modules

_SWITCHES = ("gradient_checkpointing", "grad_checkpointing", "use_checkpoint")
_LEAST_BYTES = 1 << 20  # that the head saves: in a tiny model, it always saves the most
_STATE_BYTES = torch.get_rng_state().nbytes
_APPLY = "ackpt.apply_activation_checkpointing(model)"


@dataclass(frozen=True)
class Finding:
    """Something wrong with a step's checkpointing or offload; ``module``: its path, "" for the whole step.

    ``kind``: ``"error"``, ``"no_gradients"``, ``"random"``, ``"statistics"``, ``"twice"``, ``"changed"`` or
    ``"different"`` for wrong results; ``"evaluation"``, ``"cache"``, ``"offload"``, ``"no_effect"``, ``"nested"``,
    ``"children"``, ``"not_covered"`` or ``"head"`` for an effect that is missing.

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
    """A step as it is (``watch``, ``measured``), and where all is a plain call (``plain``, ``baseline``).

    ``differences``: the largest one by label; None where a gradient is missing. ``error``: of the step as it is.
    """

    modules: dict[str, nn.Module]
    watch: Watch
    plain: Watch
    differences: dict[str, float | None]
    error: str
    measured: Measurement | None
    baseline: Measurement

    @property
    def regions(self) -> list[AuditedRegion]:
        """All regions, each followed by those inside it; what they would save is known from the plain run."""
        regions = flat(self.watch.regions)
        for region, plain in zip(regions, flat(self.plain.regions)):
            region.dropped = plain.dropped
        return regions

    @property
    def saved(self) -> list[SavedOutside]:
        return self.plain.saved or []


def flat(regions: list[AuditedRegion]) -> list[AuditedRegion]:
    return [each for region in regions for each in (region, *flat(region.inner))]


def findings(seen: Seen) -> tuple[Finding, ...]:
    """All findings, those about wrong results first."""
    rules = (_missing, _results, _switched, _offload, _nested, _children, _effect, _coverage, _head)
    return tuple(finding for rule in (rules[:2] if seen.error else rules) for finding in rule(seen))


def _missing(seen: Seen) -> Iterator[Finding]:
    missing = sorted(label.partition(" ")[2] for label, size in seen.differences.items() if size is None)
    if missing or "does not require grad" in seen.error:
        region = next((region for region in seen.regions if region.kind == REENTRANT), None)
        names = f"{len(missing)} parameters have no gradient, such as {missing[0]}" if missing else seen.error
        has_switch = any(hasattr(root, "enable_input_require_grads") for root in seen.modules.values())
        yield Finding(
            "no_gradients",
            f"{names}: with use_reentrant=True, a region needs an input that requires grad",
            f"{'call model.enable_input_require_grads(), or ' * has_switch}pass use_reentrant=False",
            "" if region is None else text_of(region),
        )


def _results(seen: Seen) -> Iterator[Finding]:
    """Differences, or an error, by their causes."""
    labels = sorted(label for label, size in seen.differences.items() if size is not None)
    causes = [*_causes(seen, labels)]
    if seen.error and "does not require grad" not in seen.error:
        cause = causes[0] if causes else Finding("", "", f"make the recomputation repeat the forward, or use {_APPLY}")
        text = f"the step fails, and runs without checkpointing and offload: {seen.error}"
        yield Finding("error", f"{text}; {cause.message}".rstrip("; "), cause.fix, cause.module)
    elif labels and not causes:
        module = arises_in(seen)
        label = next(label for kind in ("output", "gradient", "") for label in labels if label.startswith(kind))
        size = f" by up to {seen.differences[label]:.3g}"
        yield Finding(
            "different",
            f"{label} differs{size}" + f", first in module {module!r}" * bool(module),
            f"make the recomputation repeat the forward, or use {_APPLY}",
            module,
        )
    elif not seen.error:
        yield from causes


def _causes(seen: Seen, labels: list[str]) -> Iterator[Finding]:
    kinds = {label.partition(" ")[0] for label in labels}
    values = bool(seen.error) or bool(kinds - {"buffer", "attribute"})
    drawing = [(region, lost) for region in seen.regions if (lost := _not_replayed(region))]
    for region, lost in drawing[:1] if values else ():
        how = "torch's checkpoint does not replay them" if region.replays_random else "preserve_rng_state=False"
        fix = f"use {_APPLY}" if lost != ["torch"] else "leave preserve_rng_state out"
        text = f"the recomputation draws other random numbers from {lost[0]}: {how}"
        yield Finding("random", f"{text_of(region)}: {text}", fix, text_of(region))
    for kind, name, fix in (
        ("statistics", "buffer", ""),
        ("twice", "attribute", "change it outside of the region, or "),
    ):
        found = sorted((la for la in labels if la.startswith(f"{name} ")), key=lambda label: "running" not in label)
        if found:
            text = f"{found[0]} differs after the step, because the recomputation updates it again"
            text += ", as the running statistics of a BatchNorm" * (kind == "statistics")
            path = found[0].partition(" ")[2].rpartition(".")[0]
            yield Finding(kind, text, f"{fix}use {_APPLY}, which updates it once", path)
    changed = [region for region in seen.regions if region.changed]
    if values and changed and not drawing and (seen.error or arises_in(seen) or not any(r.calls[0] for r in changed)):
        text = f"{text_of(changed[0])}: what it reads changed before the recomputation, such as {changed[0].changed[0]}"
        yield Finding("changed", text, f"pass it as an argument, or use {_APPLY}", text_of(changed[0]))


def _not_replayed(region: AuditedRegion) -> list[str]:
    lost = [name for name in region.drew if name != "torch" and region.kind != ACKPT]
    return lost if region.replays_random else [*region.drew]


def arises_in(seen: Seen) -> str:
    """The first module whose forward, or else whose recomputation, has another result; "" if no module has."""
    pairs = [*zip(seen.plain.calls, seen.watch.calls)]
    pairs += [pair for r in seen.regions for again in r.calls[1:] for pair in zip(r.calls[0], again)]
    return next((first[0] or "the model itself" for first, second in pairs if first != second), "")


def _switched(seen: Seen) -> Iterator[Finding]:
    """Checkpointing is switched on, and no region runs, or a cache defeats it."""
    on = [
        (path, module)
        for path, module in named_modules(seen.modules)
        if is_checkpointed(module)
        or hasattr(module, WRAPPED)
        or any(vars(module).get(name) is True for name in _SWITCHES)
    ]
    modules = {
        f"model.{path}".rstrip("."): getattr(module, "config", None) for path, module in named_modules(seen.modules)
    }
    keeps_cache = [path for path, config in modules.items() if getattr(config, "use_cache", False) is True]
    found = None
    if on and not seen.regions and not any(module.training for _, module in on):
        found = "evaluation", "are in evaluation mode and skip it", "call model.train() before the step"
    elif seen.watch.has_cache and (on or seen.regions):
        found = "cache", "return a cache of keys and values (use_cache)", "call the model with use_cache=False"
    elif on and not seen.regions and seen.watch.without_grad:
        found = "no_effect", "run under no_grad only", "call them with gradients on"
    elif on and not seen.regions and keeps_cache:
        found = "cache", "skip it for a cache of keys and values", f"set {keeps_cache[0]}.config.use_cache = False"
    elif on and not seen.regions:
        found = "no_effect", "do not run as regions", f"use {_APPLY}, which checks that they do"
    if found is not None:
        kind, text, fix = found
        count = len(on) or len(seen.regions)
        yield Finding(kind, f"{count} modules that are to be checkpointed {text}", fix, on[0][0] if on else "")


def _offload(seen: Seen) -> Iterator[Finding]:
    for context in seen.watch.contexts.values():
        size, least, name = memory_format(context.seen), context.least, context.name
        if not context.seen:
            text, fix = "is entered, but no activation is saved inside", "enter it around the forward, not backward"
        elif context.moved:
            continue
        elif context.copied:
            text, fix = f"copies {size}, but the originals are not freed", "drop what else refers to them"
        elif least is not None and least > context.largest:
            text = f"keeps all {size} on the device: no tensor reaches its threshold of {memory_format(least)}"
            fix = f"lower the threshold; the largest tensor has {memory_format(context.largest)}"
        elif not context.on_cpu:
            text, fix = f"keeps all {size} on the device", "use ackpt.offload_saved_tensors()"
        else:
            continue
        yield Finding("offload", f"{name} {text}", fix)


def _nested(seen: Seen) -> Iterator[Finding]:
    for region in seen.regions:
        if len(region.inner) == 1 and region.inner[0].dropped_bytes >= 0.9 * region.dropped_bytes > 0:
            text = f"{text_of(region)}: a region around the same region, so it is recomputed twice"
            yield Finding("nested", text, "switch one of the two off", text_of(region))
            return


def _children(seen: Seen) -> Iterator[Finding]:
    for block in blocks_of(seen):
        inside = [r for r in seen.regions if r.modules and all(_is_in(m, block) and m != block for m in r.modules)]
        saved = [each for each in seen.saved if _is_in(each.module, block)]
        total, dropped = _sum(saved), _union(region.dropped for region in inside)
        left = sum(_union(r.inputs for r in inside).values()) + _sum(s for s in saved if s.storage not in dropped)
        if len(inside) > 1 and sum(dropped.values()) >= 0.5 * total and left >= 0.4 * total:
            text = (
                f"{block}: {len(inside)} regions inside, not the block: {memory_format(left)} of {memory_format(total)}"
            )
            yield Finding("children", f"{text} stay saved", f"wrap the blocks: {_APPLY}", block)
            return


def _effect(seen: Seen) -> Iterator[Finding]:
    regions, measured, baseline = seen.watch.regions, seen.measured, seen.baseline
    dropped = sum(_union(region.dropped for region in seen.regions).values())
    if not regions or measured is None or seen.watch.contexts or is_too_small(seen.regions) or any(_children(seen)):
        return
    before, after = saved_bytes(baseline), saved_bytes(measured)
    largest = max(region.dropped_bytes for region in regions)
    where = modules_text(module for region in regions for module in region.modules)
    if not dropped:
        text = f"{where}: backward reads nothing that these regions compute, as in frozen blocks"
        yield Finding("no_effect", text, "run them without checkpointing", text_of(regions[0]))
    elif before - after < 0.1 * dropped:
        text = f"{where}: the step saves {memory_format(after)}, and {memory_format(before)} without these regions"
        yield Finding("no_effect", text, f"use larger regions: {_APPLY}", text_of(regions[0]))
    elif baseline.peak_bytes - measured.peak_bytes < 0.1 * dropped and largest > 0.7 * dropped:
        peaks = f"{memory_format(measured.peak_bytes)}, and {memory_format(baseline.peak_bytes)}"
        text = f"{where}: the recomputation needs as much at once: the peak is {peaks} without these regions"
        yield Finding("no_effect", text, f"use smaller regions: {_APPLY}", text_of(regions[0]))


def is_too_small(regions: Iterable[AuditedRegion]) -> bool:
    """Whether the bytes in question are less than ten times the random number states that the regions may save."""
    regions = [*regions]
    size = sum(max(each.dropped_bytes, each.saved_bytes) for each in regions)
    return any(each.dropped_bytes for each in regions) and size < 10 * len(regions) * _STATE_BYTES


def not_covered(seen: Seen) -> list[list[str]]:
    """Repeated blocks of one kind none of which is a region, although others are; without those that save little."""
    modules = {module for region in seen.regions for module in region.modules}
    groups: dict[tuple[str, type], list[str]] = {}
    for block, kind in blocks_of(seen).items() if modules else ():
        groups.setdefault((pattern(block), kind), []).append(block)
    found = []
    for blocks in groups.values():
        is_covered = any(_is_in(block, module) or _is_in(module, block) for block in blocks for module in modules)
        if not is_covered and 10 * _sum(_within(outside_of_regions(seen), blocks)) > _sum(seen.saved):
            found.append(blocks)
    return found


def _coverage(seen: Seen) -> Iterator[Finding]:
    for blocks in not_covered(seen):
        size = memory_format(_sum(_within(seen.saved, blocks)))
        text = f"{modules_text(blocks)}: no regions, although other blocks are; {size} stay saved"
        fix = f"ackpt.apply_activation_checkpointing(model, {blocks!r}), or all: {_APPLY}"
        yield Finding("not_covered", text, fix, blocks[0])


def _head(seen: Seen) -> Iterator[Finding]:
    inside = {id(each) for each in _within(seen.saved, blocks_of(seen))}
    outside = [each for each in outside_of_regions(seen) if id(each) not in inside]
    if not seen.regions or seen.measured is None:
        return
    total, peak = saved_bytes(seen.measured), seen.measured.peak_bytes
    # One of about three copies is saved. Below this share, parameters and their gradients matter more.
    if _sum(outside) > max(_LEAST_BYTES, 0.5 * total, 0.22 * peak):
        module = outside[0].module
        text = f"{memory_format(_sum(outside))} of {memory_format(total)} are saved outside of the blocks, most by"
        text += f" {module or 'the model itself'} ({outside[0].tensor})"
        yield Finding("head", text, "compute the loss in chunks: ackpt.chunked_cross_entropy", module)


def outside_of_regions(seen: Seen) -> list[SavedOutside]:
    """The tensors that are saved outside of regions, the largest first."""
    return sorted((each for each in seen.saved if not each.regions), key=lambda each: -each.bytes)


def saved_bytes(measured: Measurement) -> int:
    """The bytes of activations that are live when backward begins."""
    boundary = measured.timeline.boundary
    return 0 if boundary is None else measured.timeline.at(boundary).get("activations", 0)


def blocks_of(seen: Seen) -> dict[str, type]:
    """The repeated blocks by path, with their classes."""
    ids = {id(block) for root in seen.modules.values() for block in repeated_blocks(root).values()}
    return {
        path: type(getattr(module, WRAPPED, module))
        for path, module in named_modules(seen.modules)
        if id(module) in ids
    }


def text_of(region: AuditedRegion) -> str:
    return modules_text(region.modules) if region.modules else "a function"


def _is_in(module: str, block: str) -> bool:
    return not block or f"{module}.".startswith(f"{block}.")


def _within(saved: Iterable[SavedOutside], blocks: Iterable[str]) -> list[SavedOutside]:
    blocks = [*blocks]
    return [each for each in saved if any(_is_in(each.module, block) for block in blocks)]


def _sum(saved: Iterable[SavedOutside]) -> int:
    return sum(each.bytes for each in saved)


def _union(sizes: Iterable[dict[int, int]]) -> dict[int, int]:
    return {key: size for each in sizes for key, size in each.items()}
