"""Measure the rates of this machine's CPU, once, and store them in a file.

Data sheets of CPUs do not say how fast torch's kernels run: an operation that draws random numbers takes as long as
tens of additions of the same size. So each kind of operation runs once on example arguments.
"""

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import ackpt.planner.capture.patches.python_kernels  # noqa: F401 (defines ackpt_graph::dropout_noise)
from ackpt.core.files import RecordError, check_writable, read_json, write_text_atomic
from ackpt.core.machine import machine
from ackpt.core.progress import shown
from ackpt.metering.flops import formula
from ackpt.metering.run_alone import in_own_thread
from ackpt.planner.capture.mask_bits import packed_bytes
from ackpt.planner.costs.devices import Device, with_all_dtypes
from ackpt.planner.costs.operation_costs import elements

aten: Any = torch.ops.aten
_ROWS, _COLUMNS = 1024, 512
_IMAGE = (4, 32, 32, 32)
_HEADS = (2, 8, 128, 64)


@dataclass(frozen=True)
class Example:
    """One operation: ``arguments`` makes its positional arguments for a dtype; ``counts_bytes``: as its work."""

    overload: Any
    arguments: Callable[[torch.dtype], tuple]
    keywords: dict[str, Any]
    counts_bytes: bool = False

    @property
    def name(self) -> str:
        return self.overload.overloadpacket.__name__

    def work(self, arguments, keywords, result) -> int:
        """What its rate counts: FLOPs, or else elements of the largest tensor, or bytes."""
        if self.counts_bytes:
            return sum(leaf.nbytes for leaf in tree_leaves((arguments, result)) if isinstance(leaf, Tensor))
        count = formula(self.overload.overloadpacket)
        return elements(arguments, keywords, result) if count is None else count(*arguments, **keywords, out_val=result)


def _some(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.full(shape, 0.5, dtype=dtype)


def _example(overload, *arguments, **keywords) -> Example:
    """Arguments that are callable are called with the dtype."""

    def made(dtype: torch.dtype) -> tuple:
        return tuple(argument(dtype) if callable(argument) else argument for argument in arguments)

    return Example(overload, made, keywords)


_rows = _some(_ROWS, _COLUMNS)
_row = _some(_COLUMNS)
_matrix = _some(256, 256)
_column = _some(_ROWS, 1)
_images = _some(*_IMAGE)
_channel = _some(_IMAGE[1])
_kernel = _some(_IMAGE[1], _IMAGE[1], 3, 3)
_heads = _some(*_HEADS)
_log_sums = _some(*_HEADS[:2], _HEADS[2])
_PADDING = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups


def _ids(dtype: torch.dtype) -> Tensor:
    return torch.arange(_ROWS) % 16


def _wide_ids(dtype: torch.dtype) -> Tensor:
    return torch.arange(_COLUMNS).expand(_ROWS, -1).contiguous()


def _mask(dtype: torch.dtype) -> Tensor:
    return torch.ones(_ROWS, _COLUMNS, dtype=torch.bool)


_ELEMENTWISE = [
    *(aten.exp, aten.log, aten.tanh, aten.sigmoid, aten.erf, aten.sin, aten.cos, aten.rsqrt, aten.sqrt, aten.softplus),
    *(aten.gelu, aten.silu, aten.mish, aten.elu, aten.hardswish, aten.log1p, aten.expm1),
]
_BACKWARD = (aten.gelu_backward, aten.silu_backward, aten.hardswish_backward, aten.tanh_backward)

LAUNCH = _example(aten.add.Tensor, _some(1), _some(1))
_many = _some(2048, 1024)
BYTES = Example(aten.add.Tensor, lambda dtype: (_many(dtype), _many(dtype)), {}, counts_bytes=True)
OPERATIONS = (
    _example(aten.mm.default, _matrix, _matrix),
    _example(aten.addmm.default, _some(256), _matrix, _matrix),
    _example(aten.bmm.default, _some(16, 128, 64), _some(16, 64, 128)),
    _example(aten.convolution.default, _images, _kernel, _channel, *_PADDING),
    _example(aten.convolution_backward.default, _images, _images, _kernel, [_IMAGE[1]], *_PADDING, [True, True, True]),
    _example(aten._scaled_dot_product_flash_attention_for_cpu.default, _heads, _heads, _heads),
    _example(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(_heads, _heads, _heads, _heads, _heads, lambda _: _log_sums(torch.float32), 0.0, False),
    ),
    *(_example(packet.default, _rows) for packet in _ELEMENTWISE),
    *(_example(packet.default, _rows, _rows) for packet in _BACKWARD),
    _example(aten.pow.Tensor_Scalar, _rows, 3),
    _example(aten._softmax.default, _rows, -1, False),
    _example(aten._safe_softmax.default, _rows, -1),
    _example(aten._softmax_backward_data.default, _rows, _rows, -1, lambda dtype: dtype),
    _example(aten._log_softmax.default, _rows, -1, False),
    _example(aten._log_softmax_backward_data.default, _rows, _rows, -1, lambda dtype: dtype),
    _example(aten.native_layer_norm.default, _rows, [_COLUMNS], _row, _row, 1e-5),
    _example(
        aten.native_layer_norm_backward.default,
        *(_rows, _rows, [_COLUMNS], _column, _column, _row, _row, [True, True, True]),
    ),
    _example(aten.native_batch_norm.default, _images, _channel, _channel, _channel, _channel, True, 0.1, 1e-5),
    _example(
        aten._native_batch_norm_legit_functional.default,
        *(_images, _channel, _channel, _channel, _channel, True, 0.1, 1e-5),
    ),
    _example(
        aten.native_batch_norm_backward.default,
        *(_images, _images, _channel, _channel, _channel, _channel, _channel, True, 1e-5, [True, True, True]),
    ),
    _example(aten.native_dropout.default, _rows, 0.1, True),
    _example(torch.ops.ackpt_graph.dropout_noise.default, _rows, 0.1),
    _example(torch.ops.ackpt_graph.pack_bits.default, _rows),
    _example(
        torch.ops.ackpt_graph.unpack_bits.default,
        lambda _: torch.full((packed_bytes(_ROWS * _COLUMNS),), 85, dtype=torch.uint8),
        *([_ROWS, _COLUMNS], [_COLUMNS, 1], lambda dtype: dtype, 1),
    ),
    _example(aten.bernoulli.p, _rows, 0.9),
    _example(aten.rand_like.default, _rows),
    _example(aten.sum.dim_IntList, _rows, [0]),
    _example(aten.mean.dim, _rows, [-1]),
    _example(aten.var_mean.correction, _rows, [-1]),
    _example(aten.embedding.default, _some(16, _COLUMNS), _ids),
    _example(aten.embedding_dense_backward.default, _rows, _ids, 16, -1, False),
    _example(aten.index_select.default, _rows, 0, _ids),
    _example(aten.gather.default, _rows, 1, _wide_ids),
    _example(aten.scatter_add.default, _rows, 1, _wide_ids, _rows),
    _example(aten.where.self, _mask, _rows, _rows),
    _example(aten.masked_fill.Scalar, _rows, _mask, 0),
    _example(aten.clone.default, lambda dtype: _heads(dtype).transpose(1, 2), memory_format=torch.contiguous_format),
    _example(aten.cat.default, lambda dtype: [_images(dtype), _images(dtype)], 1),
    _example(aten.max_pool2d_with_indices.default, _images, [2, 2], [2, 2]),
    _example(aten.avg_pool2d.default, _images, [2, 2], [2, 2]),
    _example(aten.upsample_nearest2d.default, _images, [64, 64]),
)


VARIABLE = "ACKPT_CALIBRATION"
_SCHEMA = {"schema": "ackpt.calibration", "version": 1}
_DTYPES = (torch.float32, torch.bfloat16)
_MORE_DTYPES = (torch.float16, torch.float64)  # of operations with FLOPs; others count as in float32
_ROUNDS = 3  # over all operations: whatever else this machine does for a moment slows no operation in all of them
_SECONDS = 0.01  # per round, operation and dtype, after one call to warm up; at least `_RUNS` calls
_RUNS = 3
_LOG = logging.getLogger("ackpt")


class CalibrationError(ValueError):
    """A file of calibrated rates cannot be read; the message names the file and how to write it again.

    Example:
        >>> from ackpt.planner.costs.calibration import CalibrationError, load
        >>> try:
        ...     load("no/such/file.json")
        ... except CalibrationError:
        ...     print("there is no such file")
        there is no such file
    """


def this_cpu() -> Device:
    """The rates of this CPU with the current number of threads.

    Read from the file that the environment variable ``ACKPT_CALIBRATION`` names, if it is set. Otherwise from the
    user's cache folder, ``$XDG_CACHE_HOME/ackpt`` or ``~/.cache/ackpt``, in which the first call for a processor, a
    number of threads and a version of torch stores them; this takes a few seconds. Delete the file to measure again.

    Raises:
        CalibrationError: if the file that ``ACKPT_CALIBRATION`` names cannot be read.

    Example:
        >>> from ackpt.planner.costs.calibration import this_cpu
        >>> this_cpu().seconds_per_call < 0.001
        True
    """
    return _this_cpu(os.environ.get(VARIABLE, ""), torch.get_num_threads())


@functools.cache
def _this_cpu(given: str, threads: int) -> Device:
    if given:
        return load(given)
    machine = _machine()
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    path = Path(folder, "ackpt", f"cpu-{hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]}.json")
    if os.path.exists(path):  # Path.exists raises an error in a folder of another user
        try:
            data = _read(path)
            if data["machine"] == machine:
                return _device(data)
            reason = "it was measured on another machine or version of torch"
        except CalibrationError as error:
            reason = str(error)
        _LOG.warning("%s is not used, and this CPU is calibrated again: %s", path, reason)
    data = measured()
    try:
        if folder.startswith("~"):
            raise RecordError(f"there is no home folder; set HOME, XDG_CACHE_HOME or {VARIABLE}")
        write_text_atomic(path, json.dumps(data, indent=1) + "\n")
    except RecordError as error:
        _LOG.warning("the calibration of this CPU cannot be stored in %s, so each process measures it: %s", path, error)
    return _device(data)


def calibrate(path: str | os.PathLike[str]) -> Device:
    """Measure the rates of this CPU with the current number of threads, and write them to a file.

    Use the file on other machines with ``ACKPT_CALIBRATION=FILE``, so that they plan with the rates of this one.

    Raises:
        RecordError: if the file cannot be written; before anything is measured.

    Example:
        >>> import tempfile, ackpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ackpt.calibrate(f"{folder}/cpu.json").name
        'cpu'
    """
    check_writable(path)
    data = measured()
    write_text_atomic(path, json.dumps(data, indent=1) + "\n")
    return _device(data)


def load(path: str | os.PathLike[str]) -> Device:
    """The rates in a file that `calibrate` wrote, on any machine; raises CalibrationError if it cannot be read."""
    return _device(_read(Path(path)))


def measured() -> dict[str, Any]:
    """Plain data: the rates of this CPU, measured now, the machine and the day."""
    with shown("calibrating this CPU, once"):
        rates = in_own_thread(_measure)
    return {**_SCHEMA, "machine": _machine(), "date": machine()["date"], **rates}


def _measure() -> dict[str, Any]:
    by_operation: dict[str, dict[str, float]] = {example.name: {} for example in OPERATIONS}
    calls, bytes_per_second = [], []
    for _ in range(_ROUNDS):
        for example in OPERATIONS:
            best = by_operation[example.name]
            for dtype in _DTYPES + (formula(example.overload.overloadpacket) is not None) * _MORE_DTYPES:
                name = str(dtype).removeprefix("torch.")
                if (rate := _rate(example, dtype)) is not None:
                    best[name] = max(best.get(name, 0.0), rate)
        call, arguments = LAUNCH.overload, LAUNCH.arguments(torch.float32)
        calls.append(_fastest(lambda: call(*arguments)))  # noqa: B023
        bytes_per_second.append(_rate(BYTES, torch.float32))
    return {
        "seconds_per_call": float(f"{min(calls):.4g}"),
        "memory_bytes_per_second": max(bytes_per_second),
        "by_operation": by_operation,
    }


def _rate(example: Example, dtype: torch.dtype) -> float | None:
    """FLOP/s, or elements or bytes per second; None if the kernel does not exist for the dtype."""
    try:
        call, arguments, keywords = example.overload, example.arguments(dtype), example.keywords
        result = call(*arguments, **keywords)
    except (RuntimeError, NotImplementedError):
        return None
    work = example.work(arguments, keywords, result)
    return float(f"{work / _fastest(lambda: call(*arguments, **keywords)):.4g}")


def _fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls: the one that other processes disturbed least."""
    call()
    times: list[float] = []
    while len(times) < _RUNS or (sum(times) < _SECONDS and len(times) < 1000):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _machine() -> dict[str, Any]:
    where = machine()
    return {"processor": where["device_name"], "threads": where["threads"], "torch": where["torch"]}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_json(path, "calibration", CalibrationError)
    except OSError as error:
        raise CalibrationError(
            f"the calibration {path} cannot be read: {error.strerror}; write it with ackpt.calibrate(path)"
        ) from error
    schema = {key: data.get(key) for key in _SCHEMA} if isinstance(data, dict) else None
    if schema != _SCHEMA:
        raise CalibrationError(
            f"{path} is not a calibration of this version: expected {_SCHEMA}, got {schema}; write it again with "
            "ackpt.calibrate(path)"
        )
    try:
        _device(data)
        rates = [data["seconds_per_call"], data["memory_bytes_per_second"]]
        rates += [rate for by_dtype in data["by_operation"].values() for rate in by_dtype.values()]
        damage = "" if all(isinstance(r, float) and 0 < r < math.inf for r in rates) else "rates: not all are positive"
    except (KeyError, TypeError, AttributeError) as error:
        damage = f"{type(error).__name__}: {error}"
    if damage:
        raise CalibrationError(f"{path} is damaged ({damage}); write it again with ackpt.calibrate(path)")
    return data


def _device(data: dict[str, Any]) -> Device:
    machine = data["machine"]
    rates = Device(
        name="cpu",
        memory_bytes=0,
        flops_per_second=data["by_operation"]["mm"],
        memory_bytes_per_second=data["memory_bytes_per_second"],
        link_bytes_per_second=data["memory_bytes_per_second"],
        source=f"measured on {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}",
    )
    return with_all_dtypes(replace(rates, by_operation=data["by_operation"], seconds_per_call=data["seconds_per_call"]))
