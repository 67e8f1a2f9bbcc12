"""Predictions, from shapes alone, of memory measurements that others published for GPUs.

The rows are facts in ``results/reference/published-peaks.json``: source, step, sizes, metric and bytes. `steps` names
the training steps, which `layers`, `losses`, `images`, `language` and `finetuning` build on fake tensors. `predictions`
predicts them and keeps the results in a file; read it first. `report` makes tables, the figure and the badge.
"""

from .predictions import Predictions, all_predicted, excluded, predicted_bytes, rows
from .steps import STEPS

__all__ = ["STEPS", "Predictions", "all_predicted", "excluded", "predicted_bytes", "rows"]
