"""Known devices, GPUs by name: peak rates from their vendors' data sheets, and their memory as torch reports it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ackpt.core.errors import did_you_mean


@dataclass(frozen=True)
class Device:
    """Peak rates of a device.

    ``memory_bytes``: as torch reports them, from ``memory_source``. ``flops_per_second``: by dtype, for dense matrices,
    accumulated in float32; ``"float32"`` is without TF32, as torch multiplies matrices by default.
    ``memory_bytes_per_second``: of its own memory; ``link_bytes_per_second``: to or from the host, in one direction,
    which is half of the figure in data sheets that add both directions. ``source``: the document with the rates.
    ``by_operation``: measured rates of operations by their names and dtypes, as
    `ackpt.planner.costs.calibration` finds them: FLOP/s where torch counts FLOPs, else elements of the largest tensor
    per second. ``seconds_per_call``: the least time of any operation.

    Example:
        >>> mine = Device("mine", 8 * 10**9, {"float32": 1e12}, 100e9, 10e9, source="a guess")
        >>> mine.seconds(flops=10**9, bytes=10**6, dtype="float32")
        0.001
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    link_bytes_per_second: float
    source: str
    by_operation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds_per_call: float = 0.0
    memory_source: str = field(default="", repr=False, compare=False)

    def seconds(self, flops: int, bytes: int, dtype: str, operation: str = "", elements: int = 0) -> float:
        """Run time of an operation that computes `flops` in `dtype` and moves `bytes` to or from memory.

        The longer of both, as in the roofline model (Williams et al. 2009). If the rate of the `operation` was
        measured, it counts instead: for its FLOPs, or for its `elements` if it has no FLOPs. A dtype that was not
        measured counts as float32.

        Raises:
            ValueError: if the data sheet has no rate for the dtype.

        Example:
            >>> device("h200").seconds(flops=0, bytes=4_800_000_000, dtype="bfloat16")
            0.001
        """
        rates = self.by_operation.get(operation, {})
        if rate := rates.get(dtype) or rates.get("float32"):
            return self.seconds_per_call + (flops or elements) / rate
        computing = 0.0
        if flops:
            if dtype not in self.flops_per_second:
                dtypes = ", ".join(self.flops_per_second)
                raise ValueError(f"{self.name} has no rate for {dtype}; trace the model in one of {dtypes}")
            computing = flops / self.flops_per_second[dtype]
        return self.seconds_per_call + max(computing, bytes / self.memory_bytes_per_second)


def with_all_dtypes(device: Device) -> Device:
    """`device` with a rate for every dtype: others count as float32, as bfloat16 does on a T4."""
    dtypes = [str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)]
    by_dtype = dict.fromkeys(dtypes, device.flops_per_second["float32"])
    return replace(device, flops_per_second={**by_dtype, **device.flops_per_second})


def _rates(half: float, single: float, double: float = 0.0, bfloat16: bool = True) -> dict[str, float]:
    """FLOP/s by dtype, from TFLOP/s."""
    rates = {"bfloat16": half * bfloat16, "float16": half, "float32": single, "float64": double}
    return {dtype: 1e12 * rate for dtype, rate in rates.items() if rate}


_SHEET = "Tensor Core GPU data sheet"
_SPARSE = "half of the rates with sparsity"
# GiB that torch reports for each GPU, as in public messages: "GPU 0 has a total capacity of 23.64 GiB". Drivers differ
# by up to 0.2 GiB. A card without a message uses the figure of a card with the same chip and data sheet memory.
_ISSUE = "https://github.com/"
_H100 = 79.11, f"{_ISSUE}NVIDIA-NeMo/RL/issues/2814"
_A100_40G = 39.39, f"{_ISSUE}bottlerocket-os/bottlerocket/pull/3873"
_A100_80G = 79.25, f"{_ISSUE}HiDream-ai/VAREdit/issues/6"
_V100_16G = 15.78, f"{_ISSUE}kchengiva/Shift-GCN/issues/34"
_REPORTED = {
    "h100-80g": _H100,
    "h100-pcie": _H100,
    "h200": (139.81, f"{_ISSUE}modelscope/ms-swift/issues/9191"),
    "b200": (178.35, f"{_ISSUE}pytorch/ao/pull/4002"),
    "a100-40g": _A100_40G,
    "a100-40g-pcie": _A100_40G,
    "a100-80g": _A100_80G,
    "a100-80g-pcie": _A100_80G,
    "v100-16g": _V100_16G,
    "v100-32g": (31.74, f"{_ISSUE}liucongg/ChatGLM-Finetuning/issues/73"),
    "v100-pcie": _V100_16G,
    "a10": (21.99, f"{_ISSUE}zai-org/CogVLM/issues/236"),
    "l4": (22.03, f"{_ISSUE}ArcInstitute/evo2/issues/190"),
    "l40s": (44.42, f"{_ISSUE}stepfun-ai/Step-Video-T2V/issues/8"),
    "t4": (14.74, f"{_ISSUE}zai-org/CogVideo/issues/741"),
    "rtx3090": (23.70, f"{_ISSUE}GaoLii/DSP/issues/10"),
    "rtx4090": (23.64, f"{_ISSUE}ali-vilab/VGen/issues/104"),
    "rtx5090": (31.37, f"{_ISSUE}Wan-Video/Wan2.1/issues/465"),
    "mi300x": (191.98, "https://rocm.blogs.amd.com/artificial-intelligence/gptq/README.html"),
}
# Rates, memory and link in GB/s, the name that torch.cuda.get_device_name returns, and the source of the rates. A new
# GPU also needs its compute capability in `ackpt.metering.gpus`.
_KNOWN = {
    "h100-80g": (_rates(989.4, 67, 67), 3350, 64, "NVIDIA H100 80GB HBM3", f"NVIDIA H100 {_SHEET}, SXM: {_SPARSE}"),
    "h100-pcie": (_rates(756.5, 51, 51), 2000, 64, "NVIDIA H100 PCIe", f"NVIDIA H100 {_SHEET}, PCIe: {_SPARSE}"),
    "h200": (_rates(989.4, 67, 67), 4800, 64, "NVIDIA H200", f"NVIDIA H200 {_SHEET}, SXM: {_SPARSE}"),
    "b200": (_rates(2250, 75, 37), 7700, 64, "NVIDIA B200", f"NVIDIA HGX B200 data sheet, an eighth: {_SPARSE}"),
    "a100-40g": (_rates(312, 19.5, 19.5), 1555, 32, "NVIDIA A100-SXM4-40GB", f"NVIDIA A100 {_SHEET}, 40GB"),
    "a100-40g-pcie": (_rates(312, 19.5, 19.5), 1555, 32, "NVIDIA A100-PCIE-40GB", f"NVIDIA A100 {_SHEET}, 40GB"),
    "a100-80g": (_rates(312, 19.5, 19.5), 2039, 32, "NVIDIA A100-SXM4-80GB", f"NVIDIA A100 {_SHEET}, 80GB SXM"),
    "a100-80g-pcie": (_rates(312, 19.5, 19.5), 1935, 32, "NVIDIA A100 80GB PCIe", f"NVIDIA A100 {_SHEET}, PCIe"),
    "v100-16g": (_rates(125, 15.7, 7.8, False), 900, 16, "Tesla V100-SXM2-16GB", "NVIDIA V100 data sheet, SXM2"),
    "v100-32g": (_rates(125, 15.7, 7.8, False), 900, 16, "Tesla V100-SXM2-32GB", "NVIDIA V100 data sheet, SXM2"),
    "v100-pcie": (_rates(112, 14, 7, False), 900, 16, "Tesla V100-PCIE-16GB", "NVIDIA V100 data sheet, PCIe"),
    "a10": (_rates(125, 31.2), 600, 32, "NVIDIA A10", f"NVIDIA A10 {_SHEET}: without sparsity"),
    "l4": (_rates(121, 30.3), 300, 32, "NVIDIA L4", f"NVIDIA L4 {_SHEET}: {_SPARSE}"),
    "l40s": (_rates(362, 91.6), 864, 32, "NVIDIA L40S", "NVIDIA L40S data sheet: without sparsity"),
    "t4": (_rates(65, 8.1, 0, False), 300, 16, "Tesla T4", f"NVIDIA T4 {_SHEET}: no bfloat16"),
    "rtx3090": (_rates(71, 35.6), 936, 32, "NVIDIA GeForce RTX 3090", "NVIDIA Ampere GA102 whitepaper, appendix A"),
    "rtx4090": (_rates(165.2, 82.6), 1008, 32, "NVIDIA GeForce RTX 4090", "NVIDIA Ada whitepaper, appendix A"),
    "rtx5090": (_rates(209.5, 104.8), 1792, 64, "NVIDIA GeForce RTX 5090", "NVIDIA RTX Blackwell whitepaper"),
    "mi300x": (_rates(1307.4, 163.4, 163.4), 5300, 64, "AMD Instinct MI300X", "AMD Instinct MI300X data sheet"),
}
DEVICES: dict[str, Device] = {
    name: Device(name, int(reported * 2**30), rates, memory * 1e9, link * 1e9, source, memory_source=url)
    for name, (rates, memory, link, _, source) in _KNOWN.items()
    for reported, url in [_REPORTED[name]]
}
_BY_TORCHS_NAME = {row[3]: DEVICES[name] for name, row in _KNOWN.items()}


# By compute capability: floating-point operations per multiprocessor and clock in half and in single precision (CUDA
# programming guide, arithmetic instructions; for half precision, what the whitepapers' rates are at their clocks).
_PER_CLOCK = {
    (7, 0): (1024, 128),
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (512, 256),
    (8, 9): (512, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (12, 0): (512, 256),
}
_GUESSED_LINK = 16e9  # PCIe 3.0 x16, the slowest link of the table


def rates_of(properties: Any) -> Device | None:
    """The rates of the GPU with the `properties` of ``torch.cuda.get_device_properties``; None if it is unknown."""
    if properties.name in _BY_TORCHS_NAME:
        return _BY_TORCHS_NAME[properties.name]
    per_clock = _PER_CLOCK.get((properties.major, properties.minor))
    if per_clock is None:
        return None
    clocks = properties.multi_processor_count * properties.clock_rate * 1e3
    half, single = (each * clocks / 1e12 for each in per_clock)
    bytes_per_second = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    rates = _rates(half, single, 0, properties.major >= 8)
    source = "torch.cuda.get_device_properties"
    return Device(properties.name, properties.total_memory, rates, bytes_per_second, _GUESSED_LINK, source)


def device(name: str) -> Device:
    """The device called `name`.

    Raises:
        ValueError: for an unknown name; lists the known ones.

    Example:
        >>> device("h200").memory_bytes
        150119844413
    """
    if name not in DEVICES:
        raise ValueError(
            f"no rates are known for device {name!r}{did_you_mean(name, DEVICES)}, only for {', '.join(DEVICES)}"
        )
    return DEVICES[name]
