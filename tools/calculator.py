"""Compute the grid of the memory calculator, ``results/calculator/grid.json``, and the sample of settings beside it.

python tools/calculator.py                        all models, and then the sample
python tools/calculator.py --only gpt2 vit-l16    these models again; the others stay as they are
python tools/calculator.py --sample 60            only the sample: so many random settings, planned as a whole
python tools/calculator.py --only gpt2 --sample 5 so many settings of these models, beside the rest of the sample
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

from experiments.calculator import grid, sample
from experiments.calculator.presets import PRESETS
from experiments.provenance import environment
from experiments.results import write_text_atomic

FOLDER = Path("results/calculator")
SETTINGS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the grid of the memory calculator.")
    parser.add_argument("--only", nargs="+", choices=[preset.name for preset in PRESETS], help="models to compute")
    parser.add_argument("--sample", type=int, metavar="N", help="plan N random settings, and nothing else")
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    if arguments.sample is None:
        write_grid(arguments.out / "grid.json", arguments.only)
    if arguments.only is None or arguments.sample is not None:
        data = json.loads((arguments.out / "grid.json").read_text(encoding="utf-8"))
        write_sample(arguments.out / "sample.json", data, arguments.sample or SETTINGS, arguments.only)


def write_grid(path: Path, only) -> None:
    """Compute the models one by one, and write the file after each, so that nothing is lost."""
    before = json.loads(path.read_text(encoding="utf-8"))["presets"] if path.exists() else []
    entries = {entry["name"]: entry for entry in before}
    known: dict = {}
    for preset in PRESETS:
        if only is not None and preset.name not in only:
            continue
        start = time.monotonic()
        entries[preset.name] = grid.entry_of(preset, known)
        print(f"{preset.name}: {time.monotonic() - start:.0f} s", flush=True)
        write(path, {**grid.header(), "presets": [entries[p.name] for p in PRESETS if p.name in entries]})
        gc.collect()


def write_sample(path: Path, data: dict, count: int, only) -> None:
    """Plan `count` settings of the models in `only`, all by default; samples of other models stay."""
    presets = [preset for preset in data["presets"] if only is None or preset["name"] in only]
    names, rows = [preset["name"] for preset in presets], []
    before = [] if only is None else json.loads(path.read_text(encoding="utf-8"))["samples"]
    others = [group for group in before if group["presets"] != names]
    for row in sample.planned({**data, "presets": presets}, count):
        rows.append(row)
        print(f"{len(rows)}/{count}: {row['setting']}", flush=True)
        samples = [*others, {"presets": names, "rows": rows}]
        write(path, {"schema": "ackpt.calculator-sample", "version": 2, "samples": samples})


def write(path: Path, data: dict) -> None:
    made = {"command": "nox -s calculator", "environment": environment()}
    schema = {key: data.pop(key) for key in ("schema", "version")}
    write_text_atomic(path, json.dumps({**schema, "made": made, **data}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
