"""Peaks of an experiment from shapes alone: the published sizes on a GPU that is not there.

The very step of the experiment runs on tensors without data; ``ackpt.predict`` follows their storages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from ackpt.predict import predict
from ackpt.results import Record, environment

from . import lm, synthetic
from .methods import configure
from .settings import record_config, record_metrics
from .training import adamw, one_step


def predict_experiment(config, command: str = ""):
    """Predict every sequence length and method of a configuration; yields a list of Records per length.

    The records' experiment is named ``<experiment>-predicted``; their metrics hold bytes and FLOPs, no losses and no
    times. The step is one of training: forward, backward, AdamW with its states in place.
    """
    make: Any = lm.task if isinstance(config, lm.LMConfig) else synthetic.task
    for seq_len in config.seq_lens:
        task = make(replace(config, device="cpu"), seq_len)  # fake tensors lie on the CPU
        settings = record_config(config, seq_len=seq_len)
        where = environment("cpu", command)
        methods = tqdm(config.methods, desc=f"predict L={seq_len}", unit="method", disable=None, leave=False)
        yield [
            Record(f"{task.experiment}-predicted", {**settings, "method": method}, peaks, where)
            for method in methods
            for peaks in [_predict(task, config.device, method)]
        ]


def _predict(task, device, method) -> dict:
    with FakeTensorMode():
        model = task.build()
        batch = task.example()
    configure(model, method)
    optimizer = adamw(model, task.learning_rate)
    predicted = predict(
        lambda: one_step(task, model, optimizer, batch, method),
        resident=(model, optimizer, *task.tensors(batch)),
        device=device,
    )
    return record_metrics(predicted)
