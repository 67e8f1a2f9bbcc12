"""Peak memory and latency against the batch size, with and without checkpointing; the largest batch within a limit.

Published for a ResNet, at batches of 4 to 64, by a reproduction of mu-TWO (Purandare et al., MLSys 2023). A batch
is measured if it fits the machine, and otherwise predicted from shapes; the experiment's name in the record says which.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from tqdm import tqdm

from ackpt.core.budget import from_text, is_share
from ackpt.core.errors import did_you_mean
from ackpt.metering.meter import compare_seconds
from experiments.results import Record, environment
from experiments.steps.failures import STRICT
from experiments.steps.gradients import require_equal
from experiments.steps.largest_batch import Largest, extrapolated, largest_on_cpu, largest_on_cuda, largest_predicted
from experiments.steps.named_steps import BASELINE, Method, NotRun, RunStep, Setting, method, needs_limit
from experiments.steps.settings import Prepared, on_this_gpu, record_config
from experiments.steps.step_shapes import Shapes, does_not_fit

EXPERIMENT = "batch-size"
LARGEST = "largest-batch"
PREDICTED = "-predicted"
AUTO_LIMIT = "auto"
METHODS = (BASELINE, "per-block", "auto@0.5", "auto")
MODELS = ("resnet18", "resnet50", "resnet152", "transformer", "bert-large")


@dataclass(frozen=True)
class BatchSizeConfig:
    """Sizes and settings. `limit`: bytes of the whole peak, or ``"auto"``, the baseline's peak at the middle batch.

    A method with a budget, such as ``"auto@0.5"``, is compared at every batch size. A policy without one, such as
    ``"auto"``, has the limit as its budget and takes part only in the search for the largest batch. All other methods
    take part in both.
    """

    model: str = "resnet50"
    batches: tuple[int, ...] = (4, 8, 16, 32, 64)
    limit: int | str = AUTO_LIMIT
    seq_len: int | None = None
    image_size: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    learning_rate: float = 1e-4
    seed: int = 0
    trains: bool = True
    methods: tuple[str, ...] = METHODS

    def __post_init__(self):
        _require_known(self.model)
        if not self.batches:
            raise ValueError("give at least one batch size")
        if not self.methods:
            raise ValueError(f"give at least one method, such as {', '.join(METHODS)}")
        if self.limit != AUTO_LIMIT and isinstance(self.limit, str):
            if is_share(self.limit):
                raise ValueError(f"the limit {self.limit!r} is no size in bytes: write a unit, as in '6GiB'")
        for name in self.methods:
            method(name)
        for batch_size in self.batches:
            self.setting(batch_size)

    def setting(self, batch_size: int) -> Setting:
        shared = (each.name for each in fields(Setting) if each.name != "batch_size")
        return Setting(batch_size=batch_size, **{name: getattr(self, name) for name in shared})


SMALL = {"dim": 128, "ff_dim": 512, "layers": 4}
SMALL_RESNET = {"width": 16, "num_classes": 100}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "resnet18": {"image_size": 64, "fields": SMALL_RESNET},
        "resnet50": {"image_size": 64, "fields": {**SMALL_RESNET, "depths": [1, 2, 2, 1]}},
        "resnet152": {"image_size": 64, "fields": SMALL_RESNET},
        "transformer": {"seq_len": 128, "fields": {**SMALL, "head_dim": 32}},
        "bert-large": {"seq_len": 128, "fields": {**SMALL, "heads": 4, "vocab_size": 4096}},
    },
    "gpu": {
        "resnet18": {"image_size": 224},
        "resnet50": {"image_size": 224},
        "resnet152": {"image_size": 224},
        "transformer": {"seq_len": 512, "dtype": "bfloat16"},
        "bert-large": {"seq_len": 512, "dtype": "bfloat16"},
    },
}


def configuration(tier: str = "cpu", model: str | None = None, **changes) -> BatchSizeConfig:
    """The configuration of a tier: cpu has small models, gpu the published sizes."""
    model = model or "resnet50"
    _require_known(model)
    if "fields" in changes:
        changes["fields"] = {**SIZES[tier][model].get("fields", {}), **changes["fields"]}
    config = BatchSizeConfig(
        **{"model": model, "device": "cpu" if tier == "cpu" else "cuda", **SIZES[tier][model], **changes}
    )
    return config if "dtype" in changes else on_this_gpu(config)


def _require_known(model: str) -> None:
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}{did_you_mean(model, MODELS)}: choose from {', '.join(MODELS)}")


def run_batch_size(config: BatchSizeConfig, command: str = "", timed_rounds: int = 3, predict_only: bool = False):
    """Run the experiment; yields lists of Records: one list per batch size, then one per method with its largest batch.

    Records of the experiment ``batch-size`` are measured; those of ``batch-size-predicted`` are not, for the reason in
    ``not_measured``; so are those of ``largest-batch`` and ``largest-batch-predicted``. The only metric of a method
    with an infeasible budget is ``not_run``, the reason. Times are in fields named ``seconds...``, sizes are bytes of
    the whole peak.

    Raises:
        GradientsDiffer: if a method's gradients are not those of the baseline; on the CPU they must be bit-equal.
    """
    shapes = _shapes(config)
    limit = _limit(config, shapes, predict_only)
    yield from _compared(config, limit, shapes, command, timed_rounds, predict_only, STRICT)
    yield from _searched(config, limit, shapes, command, predict_only, STRICT)


def compare_steps(config: BatchSizeConfig, command: str = "", timed_rounds: int = 3, failures=STRICT):
    """The lists of `run_batch_size` for the batch sizes, without the search; limit auto is predicted, not measured."""
    shapes = _shapes(config)
    yield from _compared(config, _limit(config, shapes, True), shapes, command, timed_rounds, False, failures)


def search_largest(config: BatchSizeConfig, command: str = "", failures=STRICT):
    """The lists of `run_batch_size` for the largest batches, one per method; the search starts from the batches."""
    shapes = _shapes(config)
    yield from _searched(config, _limit(config, shapes, False), shapes, command, False, failures)


def _shapes(config: BatchSizeConfig):
    return functools.lru_cache(maxsize=4)(lambda batch_size: Shapes(config.setting(batch_size)))


def _compared(config, limit, shapes, command, timed_rounds, predict_only, failures):
    where = environment("cpu" if predict_only else config.device, command)
    compared = [method(name, limit) for name in dict.fromkeys(config.methods) if not needs_limit(name)]
    for batch_size in tqdm(config.batches, desc="batch sizes", unit="batch", disable=None, leave=False):
        metrics = step_metrics(shapes(batch_size), compared, timed_rounds, predict_only, failures)
        settings = _settings(config, limit, batch_size=batch_size)
        names = [each.name for each in compared if each.name in metrics]
        yield [record(EXPERIMENT, {**settings, "method": name}, metrics[name], where) for name in names]


def _searched(config, limit, shapes, command, predict_only, failures):
    where = environment("cpu" if predict_only else config.device, command)
    searched = [method(name, limit) for name in dict.fromkeys(config.methods) if "@" not in name]
    for each in tqdm(searched, desc="largest batches", unit="method", disable=None, leave=False):
        settings = {**_settings(config, limit), "method": each.name}
        answers = []
        with failures.of(each.name):
            answers.append(
                record(LARGEST, settings, _answer(_largest(config, each, limit, shapes, predict_only)), where)
            )
        yield answers


def predicted(config: BatchSizeConfig, command: str = "") -> list[Record]:
    """The Records of all batch sizes from shapes alone; the largest batches are not searched."""
    groups = run_batch_size(config, command, predict_only=True)
    return [each for group in itertools.islice(groups, len(config.batches)) for each in group]


def record(experiment: str, settings: dict, metrics: dict, where: dict) -> Record:
    """The Record of a run, or of a prediction if the metrics have ``not_measured``."""
    return Record(experiment + (PREDICTED if "not_measured" in metrics else ""), settings, metrics, where)


def step_metrics(
    shapes: Shapes, methods, timed_rounds: int, predict_only: bool = False, failures=STRICT
) -> dict[str, dict]:
    """Metrics of one size by the methods' names: measured if the step fits the machine, else predicted.

    `failures` collects the methods that failed while they ran; they have no metrics.
    """
    setting = shapes.setting
    methods = [shapes.resolved(each) for each in methods]
    answers: dict[str, dict] = {}
    baseline = shapes.predicted(Method(BASELINE))
    baseline_fits = not predict_only and does_not_fit(baseline["peak_bytes"], setting.device) is None
    runs = []
    for each in methods:
        if baseline_fits:  # then the methods that save memory fit, too; their plans predict their peaks
            runs.append(each)
            continue
        try:
            metrics = baseline if each.name == BASELINE else shapes.predicted(each)
        except NotRun as error:
            answers[each.name] = {"not_run": str(error)}
            continue
        reason = "only predictions were asked for" if predict_only else None
        reason = reason or does_not_fit(metrics["peak_bytes"], setting.device)
        if reason is None:
            runs.append(each)
        else:
            answers[each.name] = {**metrics, "not_measured": reason}
    if runs:
        answers |= _measured(shapes, runs, baseline_fits, timed_rounds, failures)
    return {name: answers[name] for name in failures.without(answers)}


def _measured(shapes: Shapes, methods, baseline_fits: bool, timed_rounds: int, failures) -> dict[str, dict]:
    """Check gradients, measure and time the methods in one process, on one model."""
    run, answers = RunStep(shapes.setting), {}
    ready = []
    for each in methods:
        with failures.of(each.name):
            try:
                run.prepare(each)
                ready.append(each)
            except NotRun as error:
                answers[each.name] = {"not_run": str(error)}
    wanted = run.gradients(Method(BASELINE)) if baseline_fits else None
    exact = shapes.setting.device == "cpu"
    for each in ready:
        with failures.of(each.name):
            difference = None if wanted is None else require_equal(each.name, run.gradients(each), wanted, exact)
            answers[each.name] = {"gradients_difference": difference}
    wanted = None
    for each in (each for each in ready if each.name not in failures.reasons):
        with failures.of(each.name):
            planned = run.planned.get(each)
            predicted = planned.plan.peak_bytes if planned else shapes.predicted(each)["peak_bytes"]
            answers[each.name] |= run.measure(each) | {"predicted_peak_bytes": predicted}
            if planned:
                answers[each.name]["cost"] = planned.plan.cost
    ready = [each for each in ready if each.name not in failures.reasons]
    if timed_rounds and ready:
        by_name = {each.name: each for each in ready}
        steps = {name: functools.partial(run.step, each) for name, each in by_name.items()}
        steps = Prepared(steps, lambda name: run.switch(by_name[name]))
        comparison = compare_seconds(steps, timed_rounds, device=shapes.setting.device)
        times = comparison.to_json()
        for name in steps:
            ratio = {"reference": comparison.reference, **times["seconds_ratio"][name]}
            answers[name] |= {"seconds_step": times["seconds"][name], "seconds_ratio": ratio}
    return answers


def _limit(config: BatchSizeConfig, shapes, predict_only: bool) -> int:
    """The limit in bytes; on a GPU, ``"auto"`` refers to reserved memory, because torch can limit only that."""
    if config.limit != AUTO_LIMIT:
        return int(from_text(config.limit)) if isinstance(config.limit, str) else config.limit
    middle = shapes(sorted(config.batches)[len(config.batches) // 2])
    peak = middle.predicted(Method(BASELINE))["peak_bytes"]
    if predict_only or does_not_fit(peak, config.device):
        return peak
    measured = RunStep(middle.setting).measure(Method(BASELINE))
    return measured.get("reserved_peak_bytes", measured["peak_bytes"])


def _largest(config: BatchSizeConfig, each: Method, limit: int, shapes, predict_only: bool) -> Largest:
    if predict_only:
        return largest_predicted(each, limit, shapes, config.batches)
    if config.device == "cpu":
        return largest_on_cpu(each, limit, shapes, config.batches)
    peaks = {batch_size: shapes(batch_size).least_bytes(each) for batch_size in config.batches}
    return largest_on_cuda(config.setting(1), each, limit, extrapolated(peaks, limit))


def _answer(largest: Largest) -> dict:
    metrics: dict[str, Any] = {"largest_batch": largest.batch, "least_peak_bytes": largest.least_peak_bytes}
    if largest.one_peak_bytes is not None:
        metrics["one_peak_bytes"] = largest.one_peak_bytes
    if largest.measured_peak_bytes is not None:
        metrics["peak_bytes"] = largest.measured_peak_bytes
    elif largest.not_measured:
        metrics["not_measured"] = largest.not_measured
    return metrics


def _settings(config: BatchSizeConfig, limit: int, **more) -> dict:
    settings = record_config(replace(config, fields=dict(config.fields)), seq_len=config.seq_len, **more)
    settings = {name: value for name, value in settings.items() if name not in ("batches", "limit")}
    return {**settings, "limit_bytes": limit, "threads": torch.get_num_threads()}
