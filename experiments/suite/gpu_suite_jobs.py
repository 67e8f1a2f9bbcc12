"""The jobs of the suite: the published configurations for a GPU, most important first, and the same small for a CPU.

Minutes are estimates for one H200, a T4 or one core of a CPU; they apply until a job of that experiment is measured.
The first five jobs take less than eight minutes on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.cli.selftest import failed, run_selftest
from ackpt.metering.meter import measure
from experiments import batch_size, bert, lm, offload, synthetic
from experiments.batch_size import BatchSizeConfig
from experiments.bert import BertStepConfig
from experiments.frontier import EXPERIMENT as FRONTIER
from experiments.frontier import FrontierConfig, predict_frontier, run_frontier
from experiments.lm import LMConfig
from experiments.offload import OffloadConfig
from experiments.published import STEPS as PUBLISHED
from experiments.published import reference
from experiments.reports.frontier import broken_promises
from experiments.results import Record, environment
from experiments.steps.offload_methods import OURS
from experiments.steps.predicted import predict_experiment
from experiments.steps.settings import on_this_gpu, record_config, record_metrics
from experiments.steps.training import METHODS
from experiments.synthetic import SyntheticConfig

from .gpu_suite import WHOLE, Job

TIERS = ("cpu", "t4", "full")
SELFTEST = "selftest"
REFERENCES = ("reference-synthetic", "reference-language-model", "reference-offload", "reference-resnet")
EXPERIMENTS = (SELFTEST, "synthetic", "lm", "offload", "batch-size", "bert", "frontier", *REFERENCES)
STEPS = ("baseline", "per-block", "auto@per-block", "auto@0.5", "auto@0.4", "auto@0.33")
RESNET = ("baseline", "per-block", "mu-two@per-block", "auto@per-block")  # of the table in chapter 8
SEARCHED = ("baseline", "per-block", "auto")
BOUNDARIES = (*OURS[:4], "save_on_cpu", "offload_wrapper")  # the other methods offload all activations
OFFLOADS = ("baseline", "ckpt_classic", "ckpt_async_offload", "save_on_cpu")
TRANSFORMER = {"layers": 12, "dim": 1024, "heads": 16, "ff_dim": 4096, "vocab_size": 8192, "batch_size": 8}


def jobs(tier: str, only=EXPERIMENTS) -> list[Job]:
    """The jobs of one of `TIERS` that belong to the experiments named, most important first.

    A GPU without attention in bfloat16 runs ours in float16, and no published model that computes in bfloat16.
    ``"t4"``: as such a GPU, with the time that a T4 needs.

    Raises:
        ValueError: for a name that is not in `EXPERIMENTS`, and for an empty list.
    """
    if not only:
        raise ValueError(f"give at least one experiment: {', '.join(EXPERIMENTS)}")
    for name in only:
        if name not in EXPERIMENTS:
            raise ValueError(f"unknown experiment {name!r}: choose from {', '.join(EXPERIMENTS)}")
    chosen = [job for job in (cpu_jobs() if tier == "cpu" else gpu_jobs()) if job.experiment in only]
    if tier == "t4":
        chosen = [replace(job, minutes=0.5 + 6 * job.minutes) for job in chosen]
    halve = partial(on_this_gpu, capability=(7, 5) if tier == "t4" else None)
    halved = [job if job.experiment == SELFTEST else replace(job, config=halve(job.config)) for job in chosen]
    return [job for job, given in zip(halved, chosen) if job == given or job.experiment not in REFERENCES]


def gpu_jobs() -> list[Job]:
    shares = {"budgets": (0.6, 0.4, 0.3, 0.25), "settings": (1.0, 0.5, 0.0)}
    front = {**shares, "policies": ("auto", "full", "chen-sqrt", "revolve", "rotor", "min-cut"), "device": "cuda"}
    inductor = {**front, "policies": ("auto",), "compiler": "inductor"}
    short = {**front, "budgets": (0.6, 0.4), "policies": ("auto", "full"), "peers": ("checkpoint", "selective")}
    deterministic = replace(lm.GPU, seq_lens=(2048,), steps=100, dtype="float32")
    return [
        _selftest("cuda", 0.5),
        _synthetic(replace(synthetic.GPU, seq_lens=(16384,)), 0.7),
        _lm(replace(lm.GPU, seq_lens=(8192,), methods=METHODS[:2]), 2.0),
        _offload(offload.GPU, 1.5),
        _frontier(FrontierConfig("transformer", TRANSFORMER, **short, dtype="bfloat16"), 2.5, suffix="-short"),
        _bert(replace(bert.GPU, methods=(*bert.METHODS, "auto@per-block")), 2.0),
        *(_synthetic(replace(synthetic.GPU, seq_lens=(length,)), 0.5) for length in (12288, 8192, 4096, 2048)),
        *(_lm(replace(lm.GPU, seq_lens=(length,), methods=METHODS[:2]), 1.2) for length in (4096, 2048)),
        *(
            _steps(batch_size.configuration("gpu", "resnet152", batches=(n,), methods=RESNET, trains=False), 1.5)
            for n in (64, 32, 16, 8, 4)
        ),
        *(
            _lm(replace(lm.GPU, seq_lens=(length,), methods=METHODS[2:]), 1.5, "-chunked")
            for length in (8192, 4096, 2048)
        ),
        *(
            _synthetic(replace(synthetic.GPU, seq_lens=(length,), methods=synthetic.KNOWN[1:]), 0.7, "-more")
            for length in (16384, 8192)
        ),
        *(_reference(ReferenceConfig(REFERENCES[0], _both(n)), 0.5) for n in (16384, 12288, 8192, 4096, 2048)),
        *(_reference(ReferenceConfig(REFERENCES[1], _both(n)), 0.5) for n in (8192, 4096, 2048)),
        _reference(ReferenceConfig(REFERENCES[2], BY_METHOD, "float16"), 1.0),
        *(_reference(ReferenceConfig(REFERENCES[3], ({"batch": n},), "float32"), 0.3) for n in (64, 32, 16, 8, 4)),
        replace(_lm(deterministic, 1.5, "-float32-deterministic"), deterministic=True),
        _steps(batch_size.configuration("gpu", "resnet50", batches=(64,), methods=STEPS), 2.0),
        _frontier(FrontierConfig("transformer", TRANSFORMER, **front, dtype="bfloat16"), 5.0),
        _offload(replace(offload.GPU, total_tokens=48_000, methods=BOUNDARIES), 1.5),
        _offload(replace(offload.GPU, total_tokens=96_000, methods=BOUNDARIES), 2.0),
        _steps(batch_size.configuration("gpu", "transformer", batches=(32,), methods=STEPS), 2.0),
        _largest(batch_size.configuration("gpu", "resnet50", batches=(16, 64), methods=SEARCHED), 3.0),
        _largest(batch_size.configuration("gpu", "bert-large", batches=(4, 16), methods=SEARCHED), 4.0),
        _largest(batch_size.configuration("gpu", "transformer", batches=(8, 32), methods=SEARCHED), 3.0),
        _largest(batch_size.configuration("gpu", "resnet152", batches=(16, 64), methods=SEARCHED), 6.0),
        _frontier(FrontierConfig("resnet50", {"batch_size": 32, "image_size": 224}, **front), 6.0),
        _frontier(FrontierConfig("transformer", TRANSFORMER, **inductor, dtype="bfloat16"), 6.0),
    ]


def cpu_jobs() -> list[Job]:
    sizes: dict[str, Any] = {"dim": 32, "ff_dim": 64, "layers": 2, "head_dim": 16}
    text = LMConfig((24,), 2, 3, **sizes, vocab_size=300, tokenizer_vocab=300, loss_chunks=4)
    twice = replace(text, methods=METHODS[:2])
    small: dict[str, Any] = {"total_tokens": 256, "batch_size": 4, "steps": 1, "min_bytes": 1024, "methods": OFFLOADS}
    bert_fields = {"dim": 32, "ff_dim": 64, "layers": 2, "heads": 2, "vocab_size": 96}
    packed = {"seq_len": 16, "fields": sizes}
    front = {"layers": 2, "dim": 32, "heads": 2, "ff_dim": 64, "vocab_size": 64, "seq_len": 32}
    shares = {"policies": ("full",), "budgets": (0.9,), "peers": ("checkpoint", "selective")}
    return [
        _selftest("cpu", 0.5),
        _synthetic(SyntheticConfig((48,), 1, 3, **sizes, methods=synthetic.KNOWN), 0.1, tier="cpu"),
        _lm(text, 0.1, tier="cpu"),
        _offload(OffloadConfig(**sizes, **small), 0.1, "cpu"),
        _bert(BertStepConfig(2, 24, bert_fields, "cpu", "float32", methods=("baseline", "per-block")), 0.1, "cpu"),
        _steps(BatchSizeConfig("transformer", (4,), **packed, methods=("baseline", "per-block", "full")), 0.1, "cpu"),
        _frontier(FrontierConfig("transformer", front, **shares), 0.2, "cpu"),
        replace(_lm(twice, 0.1, "-float32-deterministic", "cpu"), deterministic=True),
        *(
            _reference(replace(each, device="cpu", fields=TINY), 0.1, "cpu")
            for each in (
                *(ReferenceConfig(step, _both(32)) for step in REFERENCES[:2]),
                ReferenceConfig(REFERENCES[2], BY_METHOD, "float16"),
                ReferenceConfig(REFERENCES[3], ({"batch": 1},), "float32"),
            )
        ),
        _largest(BatchSizeConfig("transformer", (1, 4), **packed, methods=("baseline",)), 0.1, "cpu"),
    ]


ROUNDS = {"cpu": 1, "gpu": 10}


@dataclass(frozen=True)
class _Selftest:
    """The configuration of ``ackpt selftest``, which looks for its device only when it runs."""

    device: str


def _selftest(device: str, minutes: float) -> Job:
    def run(config, command, failures):
        report = run_selftest(config.device, command)
        where = environment(config.device, command)
        yield [Record(SELFTEST, {**report["config"], "method": SELFTEST}, report["metrics"], where)]
        if broken := failed(report):
            failures.reasons[WHOLE] = "; ".join(broken)

    return Job(SELFTEST, SELFTEST, _Selftest(device), minutes, run, lambda config: {})


@dataclass(frozen=True)
class ReferenceConfig:
    """A published step, built again from its source: `runs` are sizes as in `published.rows`, `fields` of `Build`."""

    step: str
    runs: tuple[dict[str, Any], ...]
    dtype: str = "bfloat16"
    device: str = "cuda"
    fields: dict[str, Any] = field(default_factory=dict)


TINY = {"width": 128, "ff": 128, "layers": 2, "vocabulary": 300, "lengths": [8, 24], "depths": [1, 1, 1, 1]}
TINY |= {"image": 32}
BY_METHOD = tuple({"method": method} for method in OURS[:4])


def _both(tokens: int) -> tuple[dict[str, Any], ...]:
    return tuple({"tokens": tokens, "method": method} for method in METHODS[:2])


def _reference(config: ReferenceConfig, minutes: float, tier: str = "gpu") -> Job:
    def steps(config, **of_build):
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in config.fields.items()}
        build = reference.Build(**fields, **of_build)
        yield from ((sizes, partial(PUBLISHED[config.step], **sizes, build=build)) for sizes in config.runs)

    def run(config, command, failures):
        for sizes, make in steps(config, attend=reference.attend_for_real, device=config.device):
            method = sizes.get("method", "baseline")
            with failures.of(method):
                step = make()
                found = measure(step.run, config.device, resident=step.resident, repeats=ROUNDS[tier])
                settings = record_config(config, method=method, sizes=sizes)
                del settings["runs"]
                assert found.seconds is not None
                metrics = record_metrics(found) | {"seconds_step": found.seconds.to_json()}
                yield [Record(config.step, settings, metrics, environment(config.device, command))]

    def predict(config):
        # For a GPU by the published kernel's allocations, which torch's may exceed.
        how, device = ({}, "h100-80g") if config.device == "cuda" else ({"attend": reference.attend_for_real}, "cpu")
        peaks = {}
        for sizes, make in steps(config, **how):
            with FakeTensorMode():
                step = make()
            found = ackpt.predict(step.run, resident=step.resident, device=device)
            peaks[sizes.get("method", "baseline")] = found.peak_bytes
        return peaks

    numbers = [str(size) for size in config.runs[0].values() if isinstance(size, int)]
    return Job("-".join([config.step, *numbers]), config.step, config, minutes, run, predict)


def _synthetic(config: SyntheticConfig, minutes: float, suffix: str = "", tier: str = "gpu") -> Job:
    def run(config, command, failures):
        return synthetic.run_synthetic(config, command, ROUNDS[tier], failures=failures)

    return Job(f"synthetic-L{config.seq_lens[0]}{suffix}", "synthetic", config, minutes, run, _predict_training)


def _lm(config: LMConfig, minutes: float, suffix: str = "", tier: str = "gpu") -> Job:
    def run(config, command, failures):
        return lm.run_lm(config, command, ROUNDS[tier], failures=failures)

    return Job(f"lm-L{config.seq_lens[0]}{suffix}", "lm", config, minutes, run, _predict_training)


def _predict_training(config) -> dict[str, int]:
    return _peaks(record for group in predict_experiment(config) for record in group)


def _offload(config: OffloadConfig, minutes: float, tier: str = "gpu") -> Job:
    def run(config, command, failures):
        yield offload.run_offload(config, command, ROUNDS[tier], failures)

    def predict(config):
        return _peaks(offload.predict_offload(config))

    return Job(f"offload-T{config.total_tokens}", "offload", config, minutes, run, predict)


def _bert(config: BertStepConfig, minutes: float, tier: str = "gpu") -> Job:
    def run(config, command, failures):
        yield next(bert.run_bert(config, command, ROUNDS[tier], failures=failures))

    def predict(config):
        return _peaks(bert.predicted(config))

    return Job(f"bert-B{config.batch_size}", "bert", config, minutes, run, predict)


def _steps(config: BatchSizeConfig, minutes: float, tier: str = "gpu") -> Job:
    def run(config, command, failures):
        return batch_size.compare_steps(config, command, ROUNDS[tier], failures)

    def predict(config):
        return _peaks(batch_size.predicted(config))

    return Job(f"batch-size-{config.model}-B{config.batches[0]}", "batch-size", config, minutes, run, predict)


def _largest(config: BatchSizeConfig, minutes: float, tier: str = "gpu") -> Job:
    def run(config, command, failures):
        return batch_size.search_largest(config, command, failures)

    def predict(config):
        predictions = batch_size.predicted(replace(config, batches=config.batches[-1:], methods=("baseline",)))
        return {f"{name} at {config.batches[-1]}": peak for name, peak in _peaks(predictions).items()}

    return Job(f"largest-batch-{config.model}", "batch-size", config, minutes, run, predict)


def _frontier(config: FrontierConfig, minutes: float, tier: str = "gpu", suffix: str = "") -> Job:
    def run(config, command, failures):
        record = run_frontier(config, command, ROUNDS[tier], failures)
        if config.device == "cpu" and (broken := broken_promises(record)):
            failures.reasons[WHOLE] = "; ".join(broken)
        yield [record]

    name = f"{FRONTIER}-{config.model}" + ("" if config.compiler == "eager" else f"-{config.compiler}") + suffix
    return Job(name, FRONTIER, config, minutes, run, predict_frontier)


def _peaks(records) -> dict[str, int]:
    """``{method: peak bytes}`` of the records that have a peak."""
    return {r.config["method"]: r.metrics["peak_bytes"] for r in records if "peak_bytes" in r.metrics}
