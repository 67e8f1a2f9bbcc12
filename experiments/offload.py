"""The experiment ``offload``: memory and time of offload, with and without checkpointing, and of peers.

Published on a Colab T4 at dim 1024, 12 layers, 12 000 tokens in 48 packed sequences, fp16. A step is forward and
backward, without an optimizer; gradients stay allocated between steps, as the published figures imply.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from ackpt.metering.meter import compare_seconds, measure
from ackpt.metering.prediction import predict
from ackpt.models.transformer import Transformer, TransformerConfig
from ackpt.offloading.saved_tensors import MIN_BYTES
from ackpt.planner.workloads.step_request import autocast
from experiments.results import Record, environment
from experiments.steps.failures import STRICT
from experiments.steps.gradients import TOLERANCE, GradientsDiffer, require_equal
from experiments.steps.offload_methods import KEEPS_ALL, METHODS, OURS, Method, cannot_run, make_method
from experiments.steps.profiling import traced
from experiments.steps.settings import (
    LOSS_SCALE,
    Prepared,
    block_bytes,
    free_host_bytes,
    record_config,
    record_metrics,
    require_positive,
)

EXPERIMENT = "offload"
WITHOUT_COPIES = ("baseline", "ckpt_classic")


@dataclass(frozen=True)
class OffloadConfig:
    """Sizes and settings. `batch_size` sequences share `total_tokens`; `steps` are compared with the baseline's."""

    total_tokens: int = 2048
    batch_size: int = 8
    layers: int = 6
    dim: int = 128
    ff_dim: int = 512
    head_dim: int = 64
    steps: int = 3
    device: str = "cpu"
    dtype: str = "float32"
    min_bytes: int = MIN_BYTES
    seed: int = 0
    methods: tuple[str, ...] = METHODS

    def __post_init__(self):
        require_positive(self, "total_tokens", "batch_size", "steps")
        if self.batch_size > self.total_tokens:
            raise ValueError(f"{self.batch_size} sequences cannot share {self.total_tokens} tokens: one each at least")
        if self.min_bytes < 0:
            raise ValueError(f"min_bytes must be 0 or more, got {self.min_bytes}")
        if not self.methods or set(self.methods) - set(METHODS):
            wrong = next((repr(method) for method in self.methods if method not in METHODS), "none")
            raise ValueError(f"unknown method {wrong}: choose from {', '.join(METHODS)}")
        self.model()

    def model(self) -> TransformerConfig:
        return TransformerConfig(dim=self.dim, ff_dim=self.ff_dim, layers=self.layers, head_dim=self.head_dim)

    def lengths(self) -> list[int]:
        """Tokens of each sequence; they differ by one at most."""
        short, longer = divmod(self.total_tokens, self.batch_size)
        return [short + 1] * longer + [short] * (self.batch_size - longer)


CPU = OffloadConfig()
GPU = OffloadConfig(
    total_tokens=12_000, batch_size=48, layers=12, dim=1024, ff_dim=4096, device="cuda", dtype="float16"
)


def make_batch(config: OffloadConfig, step: int):
    """``(x [total_tokens, dim], cu_seqlens)`` of one step, the same for every method."""
    generator = torch.Generator().manual_seed(config.seed * 100_003 + step)
    x = torch.randn(config.total_tokens, config.dim, generator=generator)
    return x.to(config.device), _offsets(config).to(config.device)


def _offsets(config):
    return torch.tensor([0, *config.lengths()], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def one_step(config: OffloadConfig, model, method: Method, batch) -> None:
    """Run forward and backward; the gradients are overwritten in place."""
    x, cu_seqlens = batch
    model.zero_grad(set_to_none=False)
    with method.around_step():
        with method.around_forward(), autocast(config.device, config.dtype):
            loss = F.mse_loss(method.forward(x, cu_seqlens, max(config.lengths())).float(), x)
            loss = loss * LOSS_SCALE if config.dtype == "float16" else loss
        loss.backward()


def run_offload(config: OffloadConfig = CPU, command: str = "", timed_rounds: int = 5, failures=STRICT) -> list[Record]:
    """Check, measure and time every method of the configuration; one Record each, in order.

    The metrics of a method that could not run are ``not_run``, the reason. Times are in fields named ``seconds...``,
    sizes in bytes. `failures` collects the methods that failed, which have no Record. On the CPU one core is left to
    the copies.

    Raises:
        GradientsDiffer: if the gradients of a method of ackpt are not those of the baseline at any step; on the CPU
            they must be bit-equal.
    """
    with _a_core_for_copies(config.device):
        torch.manual_seed(config.seed)
        model = Transformer(config.model()).to(config.device)
        reasons = {name: cannot_run(name, config.device) for name in dict.fromkeys(config.methods)}
        baseline = make_method("baseline", model, config.device, config.min_bytes)
        metrics: dict[str, dict] = {"baseline": _measure(config, model, baseline)}
        room = free_host_bytes() if config.device == "cuda" else None
        for name in reasons:
            if room is not None and name in KEEPS_ALL and not reasons[name]:
                needed = metrics["baseline"]["categories"].get("activations", 0)
                if 2 * needed > room:  # buffers are pooled, and page-locked memory is allocated in powers of two
                    reasons[name] = f"its store needs {needed >> 20} MiB, too much for {room >> 20} MiB of free memory"
        names = [name for name, reason in reasons.items() if not reason]
        methods = {}
        for name in names:
            with failures.of(name):
                methods[name] = make_method(name, model, config.device, config.min_bytes)
        checked = _check(config, model, methods, failures)
        for name, method in _progress([(name, methods[name]) for name in failures.without(methods)], "measure"):
            with failures.of(name):
                metrics[name] = (metrics.get(name) or _measure(config, model, method)) | checked[name]
                if name not in OURS:
                    metrics[name]["store_peak_bytes"] = None  # a peer does not report it
        methods = {name: methods[name] for name in failures.without(methods)}
        for name, times in _time(config, model, methods, timed_rounds, failures).items():
            metrics[name].update(times)
        settings = record_config(config, threads=torch.get_num_threads())
        where = environment(config.device, command)
    return [
        Record(EXPERIMENT, {**settings, "method": name}, {"not_run": reason} if reason else metrics[name], where)
        for name, reason in reasons.items()
        if name not in failures.reasons
    ]


def predict_offload(config: OffloadConfig = GPU, command: str = "") -> list[Record]:
    """Peaks from shapes alone, as on `config.device`, which need not exist; one Record per method.

    The records' experiment is ``offload-predicted``; they hold bytes, copies and FLOPs, no times.
    """
    if config.total_tokens % config.batch_size:
        raise ValueError(
            f"a prediction needs sequences of equal length: {config.total_tokens} tokens are not a multiple of "
            f"{config.batch_size} sequences"
        )
    shapes = replace(config, device="cpu")  # fake tensors are on the CPU
    settings = record_config(config)
    where = environment("cpu", command)
    records = []
    for name in _progress(dict.fromkeys(config.methods), "predict"):
        reason = cannot_run(name, config.device, shapes_only=True)
        metrics = {"not_run": reason} if reason else _predict(shapes, config.device, name)
        records.append(Record(f"{EXPERIMENT}-predicted", {**settings, "method": name}, metrics, where))
    return records


def _predict(config, device, name) -> dict:
    with FakeTensorMode():
        model = Transformer(config.model())
        batch = torch.empty(config.total_tokens, config.dim), _offsets(config)
        for parameter in model.parameters():  # gradients exist before the step
            parameter.grad = torch.empty_like(parameter)
    method = make_method(name, model, config.device, config.min_bytes)
    method.switch_on()
    step = partial(one_step, config, model, method, batch)
    return _metrics(predict(step, resident=(model, *batch), device=device, warmup=0, round_to=block_bytes(device)))


def _metrics(measured) -> dict:
    return {
        **record_metrics(measured),
        "store_peak_bytes": measured.store_peak_bytes,
        "timeline": measured.timeline.thinned(600).to_json(),
    }


def _measure(config, model, method) -> dict:
    method.switch_on()
    batch = make_batch(config, 0)
    step = partial(one_step, config, model, method, batch)
    return _metrics(measure(step, config.device, resident=(model, *batch), warmup=1, repeats=0))


COUNTED = ("copies_out", "copies_in", "bytes_out", "bytes_in", "shared", "found", "just_in_time", "pageable_bytes")


def _check(config, model, methods, failures) -> dict[str, dict]:
    """Compare the gradients of every step with the baseline's; returns differences and the engine's counts.

    Batches differ from step to step, so that a stale buffer causes a difference.
    """
    checked: dict[str, dict] = {name: {"gradients_difference": 0.0} for name in methods}
    baseline = make_method("baseline", model, config.device, config.min_bytes)
    for step in range(config.steps):
        batch = make_batch(config, step)
        baseline.switch_on()
        one_step(config, model, baseline, batch)
        wanted = {name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters()}
        _require_finite(wanted)
        for name in _progress(failures.without(methods), f"check step {step + 1}"):
            with failures.of(name):
                stats = _one_counted_step(config, model, methods[name], batch)
                if stats is not None:
                    checked[name] |= {key: stats[key] for key in COUNTED}
                    if step:
                        checked[name]["pool_misses"] = checked[name].get("pool_misses", 0) + stats["pool_misses"]
                gradients = {parameter: value.grad.cpu() for parameter, value in model.named_parameters()}
                exact, tolerance = config.device == "cpu" and name in OURS, TOLERANCE if name in OURS else None
                worst = require_equal(name, gradients, wanted, exact, negligible=0, tolerance=tolerance)
                checked[name]["gradients_difference"] = max(checked[name]["gradients_difference"], worst)
    return checked


def _one_counted_step(config, model, method, batch) -> dict | None:
    method.switch_on()
    if method.offload is not None:
        method.offload.engine.reset_stats()
    one_step(config, model, method, batch)
    if config.device == "cuda":
        torch.cuda.synchronize()
    return None if method.offload is None else method.offload.engine.stats()


def _require_finite(gradients):
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise GradientsDiffer(f"baseline: the gradient of {name} is not finite, so nothing can be compared with it")


def _time(config, model, methods, rounds, failures) -> dict[str, dict]:
    """Seconds per step, interleaved, and seconds of the copies in further steps; on a GPU also by torch's profiler."""
    if not rounds or not methods:
        return {}
    batch = make_batch(config, 0)

    def switch_on(name):
        methods[name].switch_on()

    steps = {name: partial(one_step, config, model, method, batch) for name, method in methods.items()}
    comparison = compare_seconds(Prepared(steps, switch_on), rounds, device=config.device)
    times = comparison.to_json()
    timed = {}
    for name, method in methods.items():
        timed[name] = {
            "seconds_step": times["seconds"][name],
            "seconds_ratio": {"reference": comparison.reference, **times["seconds_ratio"][name]},
            "seconds_hidden_share": None,
        }
        if method.offload is not None:
            samples = comparison.seconds[name].samples
            timed[name] |= _copy_seconds([_one_counted_step(config, model, method, batch) for _ in samples])
        if config.device == "cuda" and name not in WITHOUT_COPIES:
            switch_on(name)
            with failures.of(f"the trace of {name}"):
                timed[name]["seconds_traced"] = traced(steps[name])
    return timed


def _copy_seconds(stats) -> dict:
    copying, stalled = (sum(each[key] for each in stats) / len(stats) for key in ("seconds_copying", "seconds_stalled"))
    # A wait may last longer than its copy, because the worker has to wake up.
    share = max(0.0, 1 - stalled / copying) if copying else None
    return {"seconds_copying": copying, "seconds_stalled": stalled, "seconds_hidden_share": share}


@contextlib.contextmanager
def _a_core_for_copies(device: str):
    """Inside, compute leaves one core of a multi-core CPU to the worker that copies."""
    threads = torch.get_num_threads()
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(min(threads, max(1, cores - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _progress(items, label: str):
    return tqdm(list(items), desc=label, unit="method", disable=None, leave=False)
