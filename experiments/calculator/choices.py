"""The choices of the calculator: ways of training, GPUs and policies, as ``ackpt plan`` takes them."""

from __future__ import annotations

from ackpt.metering.gpus import Gpu
from ackpt.planner.costs.devices import device
from ackpt.planner.sharding.sharding import Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import DTYPES, Lora, StepRequest, TrainingStep, training_step

from .polynomials import UNIT
from .presets import LORA_RANK, Preset

HALF, MIXED, SINGLE, LORA = "half", "mixed", "single", "lora"
MODES = {
    HALF: "16-bit parameters, all trained",
    MIXED: "32-bit parameters, all trained, autocast to 16 bits",
    SINGLE: "32-bit parameters, all trained",
    LORA: f"LoRA adapters (r = {LORA_RANK}) of a 16-bit model",
}
NONE, FIRST_BLOCKS, PER_BLOCK = "none", "first blocks", "per block"
POLICIES = (NONE, FIRST_BLOCKS, PER_BLOCK)
# One GPU for each way of choosing kernels. Only the first one's steps are captured at all sizes.
KINDS = {"8.0": "a100-80g", "9.0": "h100-80g", "8.9": "l4", "7.5": "t4"}


def kind_of(on: Gpu) -> str:
    """The name in `KINDS` of the GPUs that choose kernels like this one."""
    if on.capability in ((9, 0), (10, 0)):
        return "9.0"
    return "7.5" if on.capability < (8, 0) else "8.9" if on.capability >= (8, 6) and on.capability[0] != 9 else "8.0"


def plan_config(
    preset: Preset, mode: str, on: str, batch: int, length: int | None, layers: int | None = None, **more
) -> PlanConfig:
    """The request for ``ackpt plan``: the step of a model on the GPU called `on`."""
    half = "bfloat16" if "bfloat16" in device(on).flops_per_second else "float16"
    lora = Lora({"r": LORA_RANK, "target_modules": list(preset.lora)}) if mode == LORA else None
    fields = preset.fields if layers is None else {**preset.fields, preset.depth: layers}
    request = StepRequest(
        preset.model,
        batch,
        length if preset.has_tokens else None,
        fields=dict(fields),
        dtype=DTYPES[half if mode in (HALF, LORA) else "float32"],
        lora=lora,
    )
    return PlanConfig(request, autocast=half if mode == MIXED else "float32", device=on, **more)


def shardings(mode: str) -> dict[str, Sharding]:
    """Modes of sharded steps whose blocks compute as in `mode`; the number of ranks is a placeholder."""
    if mode == HALF:
        return {HALF: Sharding(2), MIXED: Sharding(2, DTYPES["float32"], DTYPES["float32"])}
    return {SINGLE: Sharding(2)} if mode == SINGLE else {}


def whole_step(preset: Preset, mode: str) -> TrainingStep:
    """The smallest step of the whole model, on the meta device."""
    return training_step(plan_config(preset, mode, KINDS["8.0"], 1, UNIT).step)
