"""A random sample of the calculator's settings, with the figures that ``ackpt plan`` computes for the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict

from .choices import FIRST_BLOCKS
from .settings import Setting, by_formula, by_plan

SEED = 23
LARGEST_WHOLE = 2 * 10**9  # parameters; larger models are planned as ranks, from a few of their blocks
JOINED = ("activations", "temporaries")
LARGEST_TOKENS = 2**18  # of a batch


def drawn(data: dict, seed: int = SEED) -> Iterator[Setting]:
    """An infinite iterator of random settings: models, GPUs, sizes between those of the grid, ranks and policies."""
    dice = random.Random(seed)
    while True:
        preset = dice.choice(data["presets"])
        is_large = preset["modes"]["half"]["count"] > LARGEST_WHOLE
        alone = [1] * (0 if is_large else len(data["ranks"]))
        ranks = dice.choice([*alone, *data["ranks"]]) if preset.get("sharded") else 1
        mode = dice.choice(list(preset["modes"] if ranks == 1 else preset["sharded"]))
        kinds = (preset["modes"] if ranks == 1 else preset["sharded"])[mode]["formulas"]
        gpu = dice.choice([name for name, on in data["gpus"].items() if on["kind"] in kinds])
        length = dice.randrange(32, preset["longest"] + 1) if preset["longest"] else 0
        if dice.random() < 0.5:
            length = min(preset["longest"], 2 ** dice.randrange(7, 14))
        length -= length % data["multiples"].get(preset["name"], 1)
        largest = min(64, max(1, LARGEST_TOKENS // max(length, 1)))
        batch = dice.randint(1, largest)
        formulas = preset["formulas"][kinds["8.0"]]
        policy = dice.choice(list(formulas["peaks"]))
        blocks = dice.randint(2, formulas["blocks"] - 2) if policy == FIRST_BLOCKS else 0
        optimizer = dice.choice(data["optimizers"] if ranks == 1 else data["sharded_optimizers"])
        yield Setting(preset["name"], gpu, mode, optimizer, batch, length, ranks, policy, blocks)


def planned(data: dict, count: int) -> Iterator[dict]:
    """`count` of these with the figures of ``ackpt plan``."""
    settings = drawn(data)
    for _ in range(count):
        setting = next(settings)
        yield {"setting": asdict(setting), "planned": by_plan(setting)}


def rows_of(samples: dict) -> list[dict]:
    """The rows of all samples in the file that ``tools/calculator.py`` writes."""
    return [row for group in samples["samples"] for row in group["rows"]]


def difference(data: dict, row: dict) -> float:
    """The largest difference between the formulas and the plan in a row, as a fraction of the peak or of the FLOPs."""
    setting = Setting(**row["setting"])
    formula, plan = by_formula(data, setting), row["planned"]
    pairs = [(formula["peak_bytes"], plan["peak_bytes"])]
    one, other = _joined(formula["at_peak"]), _joined(plan["at_peak"])
    pairs += [(one.get(name, 0), other.get(name, 0)) for name in {*one, *other}]
    sizes = [abs(one - other) / plan["peak_bytes"] for one, other in pairs]
    flops = [abs(formula[name] - plan[name]) / plan["flops"] for name in ("flops", "recompute_flops")]
    return max(*sizes, *flops)


def _joined(at_peak: dict) -> dict:
    """Bytes by category; at two instants with the same peak, a block's last result may count differently."""
    rest = {name: size for name, size in at_peak.items() if name not in JOINED}
    return {**rest, "activations": sum(at_peak.get(name, 0) for name in JOINED)}
