"""Peak rates of known devices, from their vendors' data sheets; enough to model run times without the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ackpt.errors import did_you_mean


@dataclass(frozen=True)
class Device:
    """Peak rates of a device.

    ``memory_bytes``: nominal; what a process can use is less by the driver's share. ``flops_per_second``: by dtype,
    dense, accumulated in float32, without what only sparse matrices reach; ``"float32"`` is without TF32, as torch
    multiplies matrices unless told otherwise. ``memory_bytes_per_second``: of its own memory;
    ``link_bytes_per_second``: to and from the host, in one direction, half of what data sheets add up. ``source``:
    the document the figures are from.

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

    def seconds(self, flops: int, bytes: int, dtype: str) -> float:
        """Least run time of an operation that computes `flops` in `dtype` and moves `bytes` to or from memory.

        The longer of both, as in the roofline model (Williams et al. 2009); launches cost nothing.

        Raises:
            ValueError: if the data sheet has no rate for the dtype.

        Example:
            >>> device("h200").seconds(flops=0, bytes=4_800_000_000, dtype="bfloat16")
            0.001
        """
        computing = 0.0
        if flops:
            if dtype not in self.flops_per_second:
                dtypes = ", ".join(self.flops_per_second)
                raise ValueError(f"{self.name} has no rate for {dtype}; trace the model in one of {dtypes}")
            computing = flops / self.flops_per_second[dtype]
        return max(computing, bytes / self.memory_bytes_per_second)


_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "float64": 67e12}

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "h100-80g",
            80 * 10**9,
            _HOPPER,
            3.35e12,
            64e9,
            "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: half of the rates with sparsity, PCIe Gen5 128 GB/s",
        ),
        Device(
            "h200",
            141 * 10**9,
            _HOPPER,
            4.8e12,
            64e9,
            "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM: half of the rates with sparsity, PCIe Gen5 128 GB/s",
        ),
        Device(
            "a100-40g",
            40 * 10**9,
            {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
            1.555e12,
            32e9,
            "NVIDIA A100 Tensor Core GPU data sheet, A100 40GB: PCIe Gen4 64 GB/s",
        ),
        Device(
            "t4",
            16 * 10**9,
            {"float16": 65e12, "float32": 8.1e12},
            300e9,
            16e9,
            "NVIDIA T4 Tensor Core GPU data sheet: PCIe Gen3 x16 32 GB/s; no bfloat16",
        ),
        Device(
            "rtx3090",
            24 * 10**9,
            {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12},
            936e9,
            32e9,
            "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A: FP32 accumulate, PCIe Gen 4 x16",
        ),
    )
}


def device(name: str) -> Device:
    """The device called `name`.

    Raises:
        ValueError: for an unknown name; lists the known ones.

    Example:
        >>> device("h200").memory_bytes
        141000000000
    """
    if name not in DEVICES:
        raise ValueError(
            f"no rates are known for device {name!r}{did_you_mean(name, DEVICES)}, only for {', '.join(DEVICES)}"
        )
    return DEVICES[name]
