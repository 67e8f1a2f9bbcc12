"""The output of ``ackpt plan``, as text and with --json as plain data: of one plan, of a rank, of several sizes."""

import contextlib
import dataclasses
from dataclasses import dataclass, replace
from functools import partial

import torch

import ackpt
from ackpt.core.budget import readable
from ackpt.core.errors import BudgetError, TraceError, did_you_mean
from ackpt.core.progress import about, shown, stage
from ackpt.metering.meter import memory_format
from ackpt.planner.explain.explanation import Explanation, explained
from ackpt.planner.sharding.planner import ShardedPlan
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig, Planned, in_chunks, run_plan
from ackpt.planner.workloads.step_request import TrainingStep, optimizer_kind, training_step

from .command_line import UsageError

LARGEST = 10
# Of the predicted reserved bytes: a step of vit-large reserved 5.69 GB where 4.71 GB are predicted, the largest of the
# errors of 60 published figures of whole steps (chapter 11).
MEASURED_ERROR = 0.21
# The same of one rank: predictions of published tables (pytorch/torchtitan) are from 4 % too low to 5 % too high.
ERROR_OF_A_RANK = 0.08
ON_A_GPU = (
    "captured on CPU tensors with the attention, dropout and autocast of a GPU; blocks are multiples of 512 bytes; "
    "not included: workspaces of convolutions, of sorting and of memory-efficient attention"
)
ON_A_CPU = "as the CPU runs it; not included: workspaces of operations"


def text(planned: Planned) -> str:
    """Whether the step fits the device, the step, its peak by category, the plan and the ten largest activations."""
    config, plan = planned.config, planned.plan
    dtype = dtype_name(config.step.dtype)
    mixed = "" if config.autocast == "float32" else f", autocast to {config.autocast}"
    optimizer = "" if config.optimizer == "none" else f" and {config.optimizer}"
    optimizer += ", clipped gradients" if config.clipping else ""
    optimizer += ", a scaled loss" if config.scaling else ""
    optimizer += ", earlier gradients exist" if config.accumulation else ""
    lines = [
        f"model             {config.step.model}: {type(planned.step.model).__name__.removeprefix('_')}, "
        f"{planned.step.parameters:,} parameters in {dtype}{mixed}",
        f"inputs            {', '.join(f'{name} {shape}' for name, shape in _inputs(planned.step).items())}",
        f"step              forward, backward{optimizer}, {note(planned)}",
        f"at the peak       {sizes_text(planned.at_peak())}",
        f"peak by phase     {sizes_text(planned.by_phase())}",
    ]
    if (seconds := planned.seconds()) is not None:
        rates = "at the peak rates of the data sheet"
        lines.append(f"modelled time     {seconds:.3g} s at least for forward and backward, {rates}")
    lines.append(plan.table())
    return "\n".join([*_verdict(planned), *lines])


def how_it_runs(planned: Planned, path: str) -> str:
    """The file of the plan, and the call that runs it; `ackpt.compile` runs no plan for the profile of a GPU."""
    if planned.device is not None:
        return (
            f"written to {path}: the plan of a step on {planned.device.name}, for reading and comparing; ackpt.compile "
            "runs only plans written without --device-profile"
        )
    inputs = {name: "..." if isinstance(value, torch.Tensor) else value for name, value in planned.step.inputs.items()}
    given = ", ".join(f"{name}={value}" for name, value in inputs.items())
    cast = planned.config.autocast
    where = "" if cast == "float32" else f", within torch.autocast('cpu', torch.{cast})"
    return f"written to {path}; run it by ackpt.compile(model, plan=ackpt.Plan.load({path!r}), {given}){where}"


def explanation(planned: Planned) -> Explanation:
    """The memory of the planned step by category."""
    kind, model = optimizer_kind(planned.config.optimizer), planned.step.model
    optimizer = None if kind is None else kind(model.parameters())
    chunks = partial(in_chunks, planned.graph, planned.device)
    return explained(planned.graph, planned.profile, planned.plan, model, optimizer, chunks)


def to_json(planned: Planned, shown: Explanation | None = None) -> dict:
    """The same as plain data, with the explanation if it is `shown`; sizes in bytes."""
    config, plan = planned.config, planned.plan
    largest = sorted(plan.activations, key=lambda activation: -activation.bytes)[:LARGEST]
    data = {
        **plan_step(config, planned.step),
        "note": note(planned),
        "graph": planned.graph.hash,
        **plan_fields(plan),
        "at_peak": planned.at_peak(),
        "by_phase": planned.by_phase(),
        "largest": [dataclasses.asdict(activation) for activation in largest],
        "device": None,
        "fsdp": None,
    }
    if shown is not None:
        data["live_at_peak"] = shown.at_peak
        data["saved"] = [dataclasses.asdict(line) for line in shown.saved]
        data["suggestions"] = [dataclasses.asdict(suggestion) for suggestion in shown.suggestions]
        data["not_computed"] = list(shown.not_computed)
    if planned.device is not None:
        data["device"] = {
            "name": planned.device.name,
            "memory_bytes": planned.device.memory_bytes,
            "modelled_seconds": planned.seconds(),
            "fits": planned.memory is not None and planned.memory.fits,
            "memory": None if planned.memory is None else dataclasses.asdict(planned.memory),
            "smallest_budget_of_full": _least_of_full(planned),
        }
    return data


def plan_step(config: PlanConfig, step: TrainingStep) -> dict:
    """The planned step as plain data: the step and the options of its plan."""
    return {
        "model": config.step.model,
        "class": type(step.model).__name__.removeprefix("_"),
        "parameters": step.parameters,
        "inputs": _inputs(step),
        "fields": config.step.fields,
        "dtype": dtype_name(config.step.dtype),
        "autocast": config.autocast,
        "optimizer": config.optimizer,
        "accumulation": config.accumulation,
        "clipping": config.clipping,
        "scaling": config.scaling,
        "options": config.options,
        "budget": config.budget,
        "torch": torch.__version__,
    }


def plan_fields(plan) -> dict:
    """The figures of a plan as plain data; None for those that a sharded plan does not have."""
    names = "policy peak_bytes resident_bytes dynamic_peak_bytes baseline_peak_bytes saved_bytes flops recompute_flops"
    return {name: getattr(plan, name, None) for name in (*names.split(), "cost", "peak_node")}


def refused(error: BudgetError) -> dict:
    """A budget that was refused, as plain data."""
    return {"refused": str(error), "smallest_budget": error.least_bytes}


def note(planned: Planned) -> str:
    """How the step was captured, and which memory the figures leave out."""
    return ON_A_CPU if planned.device is None else ON_A_GPU


def sizes_text(categories: dict[str, int]) -> str:
    """Bytes by category in one line; empty categories are left out."""
    return ", ".join(f"{name} {memory_format(size)}" for name, size in categories.items() if size)


def _verdict(planned: Planned) -> list[str]:
    if planned.device is None or planned.memory is None:
        return []
    device, size, memory = planned.device, memory_format(planned.device.memory_bytes), planned.memory
    takes = memory_format(memory.reserved + memory.context)
    sizes = [
        f"on {device.name}: {memory_format(memory.allocated)} allocated, {memory_format(memory.reserved)} reserved, "
        f"{memory_format(memory.context)} context, {memory_format(memory.margin)} margin",
        "",
    ]
    if memory.margin >= MEASURED_ERROR * memory.reserved:
        return [f"fits {device.name}: {takes} of {size}", *sizes]
    if memory.fits:
        error = f"measured steps reserved up to {MEASURED_ERROR:.0%} more than predicted"
        return [f"may not fit {device.name}: {takes} of {size}; {error}", *sizes]
    lines = [f"does not fit {device.name}: {takes} of {size}"]
    try:
        other = planned.that_fits()
        return [*lines, f'add --budget "{other.config.budget}": {_that_fits(other)}', *sizes]
    except BudgetError as error:
        assert error.least_bytes is not None
        room = device.memory_bytes - memory.context
        lines.append(
            f"no plan fits: the one with the smallest peak reserves {readable(error.least_bytes)}, and the context "
            f"leaves {memory_format(room)}"
        )
    with contextlib.suppress(BudgetError, TraceError):
        other = planned.that_fits(chunk_head=True)
        lines.append(f'would help: --chunk-head --budget "{other.config.budget}": {_that_fits(other)}')
    # Up to three changes of the model or the loop with which the step fits, or else the one that saves most.
    best = sorted(explanation(planned).suggestions, key=lambda each: each.peak_bytes)
    within = [each for each in best if each.peak_bytes <= room][:3]
    for each in within or best[:1]:
        peak = f"{memory_format(each.peak_bytes)}{'' if within else ', not enough'}"
        lines.append(f"would help: {each.title}: peak {peak}; {each.fix}")
    return [*lines, *sizes]


def _that_fits(planned: Planned) -> str:
    reserved = memory_format(planned.reserved_bytes)
    return f"that plan reserves {reserved} and adds {planned.plan.cost:.1%} to the time of the step"


def _least_of_full(planned: Planned) -> int | None:
    """The peak of policy full, if the plan does not fit the device."""
    if planned.memory is None or planned.memory.fits:
        return None
    if planned.plan.policy == "full":
        return planned.plan.peak_bytes
    return ackpt.plan(planned.graph, policy="full", profile=planned.profile).peak_bytes


def _inputs(step: TrainingStep) -> dict[str, str]:
    tensors = {name: value for name, value in step.inputs.items() if isinstance(value, torch.Tensor)}
    return {name: f"{list(tensor.shape)} {dtype_name(tensor.dtype)}" for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


NOTE = (
    "each block and then the model given to fully_shard, parameters freed after the forward; simulated, not run; "
    "not included: memory of communication libraries and, in the peak, workspaces and fragmentation"
)


def run_sharded(config: PlanConfig, shardings: list[Sharding]) -> tuple[ShardedModel, list[ShardedPlan | BudgetError]]:
    """The plan for each number of ranks, or the error that refuses it; raises the last if all are refused."""
    with shown():
        stage(f"capturing {config.step.model}")
        model = ShardedModel(config)
    plans: list[ShardedPlan | BudgetError] = []
    for sharding in shardings:
        try:
            with about(f"{sharding} ranks"):
                plans.append(model.plan(sharding, config.budget, config.policy))
        except BudgetError as error:
            plans.append(error)
    if isinstance(plans[-1], BudgetError) and not any(isinstance(plan, ShardedPlan) for plan in plans):
        raise plans[-1]
    return model, plans


def sharded_text(model: ShardedModel, shardings: list[Sharding], plans) -> str:
    """The step, then each number of ranks, then the smallest number that fits, if several are asked for."""
    config, first = model.config, shardings[0]
    dtype = dtype_name(config.step.dtype)
    sharded = dtype_name(first.parameters) if first.parameters else dtype
    reduced = dtype_name(first.reduction) if first.reduction else dtype
    optimizer = "" if config.optimizer == "none" else f" and {config.optimizer}"
    lines = [
        f"model             {config.step.model}: {type(model.step.model).__name__}, {model.step.parameters:,} "
        f"parameters gathered in {dtype}, sharded in {sharded}, gradients reduced in {reduced}",
        f"blocks            {model.stands_for}: {model.groups[1].name} to {model.groups[-1].name}",
        f"step              forward, backward{optimizer}; {NOTE}",
    ]
    for sharding, plan in zip(shardings, plans):
        lines += ["", f"{sharding} ranks"]
        lines += _rank_lines(model, plan) if isinstance(plan, ShardedPlan) else [f"  {plan}"]
    if len(plans) > 1 and (config.budget is not None or model.device is not None):
        fewest = _fewest(model, shardings, plans)
        lines += ["", f"fewest that fit   {fewest} ranks" if fewest else "none of these fits"]
    return "\n".join(lines)


def rank_fits(model: ShardedModel, plan: ShardedPlan) -> bool:
    """Whether the plan fits the device, if one is given, with the largest measured error in the reserved bytes."""
    memory = model.memory(plan)
    return memory is None or memory.margin >= ERROR_OF_A_RANK * memory.reserved


def _fewest(model: ShardedModel, shardings: list[Sharding], plans) -> Sharding | None:
    """The smallest number of ranks for which a plan fits."""
    fit = [s for s, plan in zip(shardings, plans) if isinstance(plan, ShardedPlan) and rank_fits(model, plan)]
    return min(fit, key=lambda each: each.replicas * each.ranks, default=None)


def sharded_json(model: ShardedModel, shardings: list[Sharding], plans) -> dict:
    """The same as plain data, in the format of `to_json`; for several numbers of ranks, a sweep."""
    data = [
        {"ranks": sharding.replicas * sharding.ranks, **_rank_data(model, sharding, plan)}
        for sharding, plan in zip(shardings, plans)
    ]
    if len(data) == 1:
        return {name: value for name, value in data[0].items() if name != "ranks"}
    fewest = _fewest(model, shardings, plans)
    return {"sweep": "fsdp", "plans": data, "fewest": fewest and fewest.replicas * fewest.ranks}


def _rank_data(model: ShardedModel, sharding: Sharding, plan) -> dict:
    if isinstance(plan, BudgetError):
        return refused(plan)
    sent, device = plan.communication, None
    if model.device is not None and (memory := model.memory(plan)) is not None:
        device = {"name": model.device.name, "memory_bytes": model.device.memory_bytes, "fits": rank_fits(model, plan)}
        device |= {"modelled_seconds": None, "smallest_budget_of_full": None, "memory": dataclasses.asdict(memory)}
    return {
        **plan_step(model.config, model.step),
        "note": NOTE,
        "graph": None,
        **plan_fields(plan),
        "at_peak": plan.at_peak(),
        "by_phase": None,
        "largest": None,
        "device": device,
        "fsdp": {
            "ranks": sharding.ranks,
            "replicas": sharding.replicas,
            "all_gathers": sent.gathers,
            "received_bytes": sent.gathered_bytes,
            "reduce_scatters": sent.reduces,
            "sent_bytes": sent.reduced_bytes,
            "blocks": [
                {"count": run.count, "kept_bytes": run.kept_bytes, "recompute_flops": run.flops, "kept": [*run.names]}
                for run in plan.runs
            ],
        },
    }


def _rank_lines(model: ShardedModel, plan: ShardedPlan) -> list[str]:
    baseline, sent = plan.flops - plan.recompute_flops, plan.communication
    lines = [
        f"  peak            {memory_format(plan.peak_bytes)} per rank, "
        f"{memory_format(plan.resident_bytes)} of it resident (baseline: {memory_format(plan.baseline_peak_bytes)})",
        f"  at the peak     {sizes_text(plan.at_peak())}",
        f"  cost            {plan.cost:.1%} of the time of a rank's baseline step, which computes {baseline:.3g} FLOPs",
    ]
    for run in plan.runs:
        saved = f": {', '.join(dict.fromkeys(run.names))};" if run.names else " in addition to their inputs;"
        again = f"{saved} the rest is recomputed, {run.flops:.3g} FLOPs"
        kept = f"{memory_format(run.kept_bytes)} each{again if run.flops else ', all that backward reads'}"
        lines.append(f"  {run.count:>3} blocks      save {kept}")
    lines.append(
        f"  links           a rank receives {memory_format(sent.gathered_bytes)} in {sent.gathers} all-gathers and "
        f"sends {memory_format(sent.reduced_bytes)} in {sent.reduces} reduce-scatters"
    )
    if model.device is not None and (memory := model.memory(plan)) is not None:
        verdict = "fits" if rank_fits(model, plan) else "may not fit" if memory.fits else "does not fit"
        lines.append(
            f"  device          {verdict} {model.device.name}: "
            f"{memory_format(memory.reserved)} reserved and {memory_format(memory.context)} context of "
            f"{memory_format(model.device.memory_bytes)}; a measured rank reserved up to {ERROR_OF_A_RANK:.0%} more "
            "than predicted"
        )
    return lines


Rows = dict[int | str, Planned | BudgetError]
SIZES = {"batch_size": 1, "seq_len": 128, "image_size": 32}  # with the first values of --largest
DEVICE = "device_profile"


@dataclass(frozen=True)
class Sweep:
    """The option that changes, and its values; ``step``: of the sizes between them that are tried, too; 0: none.

    ``is_open``: the last value doubles while the step fits.
    """

    option: str
    values: tuple[int | str, ...]
    step: int = 0
    is_open: bool = False

    @classmethod
    def parsed(cls, text: str) -> "Sweep":
        """``seq_len=1024:16384`` doubles to 16384, ``batch_size=1:`` while the step fits; ``4,8`` is a list."""
        option, _, values = text.partition("=")
        option = option.replace("-", "_")
        if option not in (*SIZES, DEVICE):
            options = f"{', '.join(SIZES)} or {DEVICE}"
            raise UsageError(f"--sweep {text}: write {options}, =, and values{did_you_mean(option, (*SIZES, DEVICE))}")
        if option == DEVICE and values:
            return cls(option, tuple(values.split(",")))
        ends = values.split(":")
        if len(ends) == 2 and not ends[1] and ends[0].isdecimal() and int(ends[0]):
            return cls(option, (int(ends[0]),), int(ends[0]), is_open=True)
        try:
            numbers = [int(number) for number in (ends if len(ends) == 2 else values.split(","))]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < 1 or len(ends) == 2 and numbers[0] > numbers[1]:
            advice = f"a range as in {option}=1:64, small to large, or numbers as in {option}=4,8,12"
            raise UsageError(
                f"--sweep {text}: write {advice if option != DEVICE else f'devices as in {DEVICE}=l4,h100'}"
            )
        if len(ends) < 2:
            return cls(option, tuple(numbers))
        first, last = numbers
        doubled = [first << at for at in range((last // first).bit_length())]
        return cls(option, (*doubled, *([last] if last > doubled[-1] else [])), first)

    def changed(self, config: PlanConfig, value) -> PlanConfig:
        if self.option == DEVICE:
            return replace(config, device=value)
        return replace(config, step=replace(config.step, **{self.option: value}))

    def run(self, config: PlanConfig) -> Rows:
        """The plan for every value, or the error that refuses it, and those around the largest size that fits."""
        configs = {value: self.changed(config, value) for value in self.values}  # refuses unknown devices
        if self.option != DEVICE:
            training_step(configs[max(configs)].step)  # refuses a size before the first one is planned
        rows: Rows = {}

        def fits_with(value) -> bool:
            try:
                with about(f"{self.option.replace('_', ' ')} {value}"):
                    rows[value] = run_plan(self.changed(config, value))
            except BudgetError as error:
                rows[value] = error
            return fits(rows[value])

        results = {value: fits_with(value) for value in self.values}
        with contextlib.suppress(ValueError):  # a sequence may be longer than the model's positions
            while self.is_open and results[largest := max(results)]:
                results[2 * largest] = fits_with(2 * largest)
        sizes = {value: fit for value, fit in results.items() if isinstance(value, int)}
        largest = max((value for value, fit in sizes.items() if fit), default=0)
        too_large = [value for value in sizes if value > largest]
        if self.step and largest and too_large:
            below, above = largest // self.step, -(-min(too_large) // self.step)
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if fits_with(middle * self.step) else (below, middle)
        return {value: rows[value] for value in (sorted(rows) if self.step else rows)}

    def text(self, rows: Rows) -> str:
        """A table with one line per value, and the largest size that fits."""
        name = self.option.replace("_", " ")
        lines = [f"{name:<16}{'peak':>12}{'reserved':>12}{'added time':>12}  fits"]
        lines += [f"{value:<16}{_line(row)}" for value, row in rows.items()]
        largest = self._largest(rows)
        if largest is None and self.is_open:
            lines.append("none fits")
        elif largest is not None and not all(map(fits, rows.values())):
            lines.append(f"largest that fits: {name} {largest}")
        elif self.is_open:
            lines.append(f"largest that fits: {name} {largest}, and the model takes no larger one")
        return "\n".join(lines)

    def _largest(self, rows: Rows) -> int | str | None:
        if self.option not in SIZES:
            return None
        return max((value for value, row in rows.items() if fits(row)), default=None)  # pyright: ignore[reportArgumentType]

    def to_json(self, rows: Rows) -> dict:
        """The same as plain data: the format of a single plan for each value; sizes in bytes."""
        plans = [
            {self.option: value, **(to_json(row) if isinstance(row, Planned) else refused(row))}
            for value, row in rows.items()
        ]
        return {"sweep": self.option, "plans": plans, "largest": self._largest(rows)}


def fits(row: Planned | BudgetError) -> bool:
    """Whether there is a plan, and it fits the device, if there is one."""
    return isinstance(row, Planned) and (row.memory is None or row.memory.fits)


def _line(row: Planned | BudgetError) -> str:
    if isinstance(row, BudgetError):
        least = "" if row.least_bytes is None else f"; the smallest budget is {memory_format(row.least_bytes)}"
        return f"{'-':>12}{'-':>12}{'-':>12}  no{least}"
    plan, memory = row.plan, row.memory
    reserved = "-" if memory is None else memory_format(memory.reserved)
    verdict = "" if memory is None else f"{'yes' if memory.fits else 'no'}, {memory_format(memory.margin)} margin"
    return f"{memory_format(plan.peak_bytes):>12}{reserved:>12}{f'{plan.cost:.1%}':>12}  {verdict or 'yes'}"
