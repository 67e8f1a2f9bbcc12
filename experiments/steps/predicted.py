"""Peaks of ``synthetic`` and ``lm`` from shapes alone: the published sizes as on a GPU, on any machine.

The step of the experiment runs on tensors without data, and ``ackpt.predict`` follows their storages.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from ackpt.metering.prediction import predict
from experiments import lm, synthetic
from experiments.results import Record, environment

from .named_steps import Method, Setting
from .settings import block_bytes, record_config, record_metrics
from .step_shapes import Shapes
from .training import PLANNED, adamw, configure, make_states, one_step


def predict_experiment(config, command: str = ""):
    """Predict every sequence length and method of a configuration; yields a list of Records per length.

    The records' experiment is named ``<experiment>-predicted``; their metrics hold bytes and FLOPs, no losses and no
    times. The step is one of training: forward, backward, AdamW with its states in place. The budget of a plan is the
    predicted peak of checkpoint.
    """
    make: Any = lm.task if isinstance(config, lm.LMConfig) else synthetic.task
    for seq_len in config.seq_lens:
        task = make(replace(config, device="cpu"), seq_len)  # fake tensors are on the CPU
        settings = record_config(config, seq_len=seq_len)
        where = environment("cpu", command)
        methods = tqdm(config.methods, desc=f"predict L={seq_len}", unit="method", disable=None, leave=False)
        peaks: dict[str, dict] = {}
        for method in methods:
            if method == PLANNED:
                peaks[method] = _predict_plan(config, seq_len, peaks["checkpoint"]["peak_bytes"])
            else:
                peaks[method] = _predict(task, config.device, method)
        name = f"{task.experiment}-predicted"
        yield [Record(name, {**settings, "method": method}, metrics, where) for method, metrics in peaks.items()]


def _predict_plan(config, seq_len: int, budget_bytes: int) -> dict:
    """A plan of the same step within the budget."""
    name = "lm" if isinstance(config, lm.LMConfig) else "transformer"
    fields = {name: value for name, value in asdict(config.model()).items() if name != "causal"}
    sizes = {"seq_len": seq_len, "fields": fields, "device": config.device, "dtype": config.dtype}
    return Shapes(Setting(name, config.batch_size, **sizes)).predicted(Method(PLANNED, PLANNED, budget_bytes))


def predicted_timelines(config, seq_len: int) -> dict[str, dict]:
    """The metrics of the synthetic experiment at one length, with timelines, by method."""
    task = synthetic.task(replace(config, device="cpu"), seq_len)
    return {method: _predict(task, config.device, method, timeline=True) for method in config.methods}


def _predict(task, device, method, timeline: bool = False) -> dict:
    with FakeTensorMode():
        model = task.build()
        batch = task.example()
        optimizer = adamw(model, task.learning_rate)
        make_states(optimizer)
    configure(model, method)
    predicted = predict(
        lambda: one_step(task, model, optimizer, batch, method),
        resident=(model, optimizer, *task.tensors(batch)),
        device=device,
        warmup=0,
        round_to=block_bytes(device),
    )
    return record_metrics(predicted) | ({"timeline": predicted.timeline.thinned(600).to_json()} if timeline else {})
