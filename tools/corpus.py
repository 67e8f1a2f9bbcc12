"""Plan a fixed set of models with every policy and compare the results with the recorded ones.

    python tools/corpus.py                 compare with tests/corpus.json and print every difference
    python tools/corpus.py --only unet     the same for one model; may be repeated
    python tools/corpus.py --record        write tests/corpus.json; with --times, new times, too

Compared are hashes of the graph and of every schedule, simulated and measured peaks, costs, lower bounds, smallest
feasible budgets, and whether outputs, gradients, buffers and the RNG state are those of the unplanned step. Only public
names of ackpt are used, and no hash depends on a node's name, a module's path or a line, so that the record survives a
reorganization of the code. The exit status is 0 if nothing is worse. A changed schedule is not worse if neither its
peak nor its cost is higher. CPU times of import, capture and planning are printed as ratios and never compared;
they are those of the first record until --record --times renews them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from corpus_compare import compare  # noqa: E402
from corpus_models import MODELS  # noqa: E402
from corpus_record import environment, import_time, record  # noqa: E402

from ackpt.core.files import write_text_atomic  # noqa: E402

FILE = ROOT / "tests" / "corpus.json"
_SCHEMA = {"schema": "ackpt.corpus", "version": 1}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the file instead of comparing with it")
    parser.add_argument("--times", action="store_true", help="with --record: renew the recorded CPU times, too")
    parser.add_argument("--only", action="append", choices=list(MODELS), metavar="NAME", help="only this model")
    parser.add_argument("--file", type=Path, default=FILE, help="the recorded file (tests/corpus.json)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = given.only or list(MODELS)
    if given.record:
        return _record(given.file, names, given.times)
    return _compare(given.file, names)


def load(path: Path = FILE) -> dict[str, Any]:
    """The recorded file; raises ValueError if it is of another version."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if {key: data.get(key) for key in _SCHEMA} != _SCHEMA:
        raise ValueError(f"{path} is not a corpus of this version ({_SCHEMA}); run python tools/corpus.py --record")
    return data


def _record(path: Path, names: list[str], renew_times: bool) -> int:
    before = load(path) if path.exists() else {}
    if before and len(names) < len(MODELS) and before["environment"] != environment():
        sys.exit(f"{path} was recorded in another environment: record all models together, without --only")
    models, times = dict(before.get("models", {})), dict(before.get("seconds_ratio", {}))
    if renew_times or "import" not in times:
        times["import"] = import_time()
    for name in names:
        models[name], seconds = record(name)
        if renew_times or name not in times:
            times[name] = seconds
        print(f"{name}: recorded", flush=True)
    data = {
        **_SCHEMA,
        "environment": environment(),
        "seconds_ratio": {name: times[name] for name in ("import", *MODELS) if name in times},
        "models": {name: models[name] for name in MODELS if name in models},
    }
    write_text_atomic(path, _text(data) + "\n")
    return 0


def _text(data: dict[str, Any], indent: str = "") -> str:
    """JSON with a line for every dict that holds no other."""
    if not any(isinstance(value, dict) for value in data.values()):
        return json.dumps(data)
    lines = [
        f"{indent} {json.dumps(key)}: {_text(value, indent + ' ') if isinstance(value, dict) else json.dumps(value)}"
        for key, value in data.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _compare(path: Path, names: list[str]) -> int:
    recorded = load(path)
    here, there = environment(), recorded["environment"]
    if here["versions"] != there["versions"]:
        print(f"{path} was recorded with {there['versions']}, but this is {here['versions']}: install those versions")
        return 2
    if here["cpu"] != there["cpu"]:
        print(f"recorded on {there['cpu']}: hashes of computed values are not compared on {here['cpu']}")
    counts = {"worse": 0, "changed, not worse": 0}
    times: dict[str, Any] = {"import": import_time()}
    for name in names:
        if name not in recorded["models"]:
            print(f"worse: {name}: not in {path}; run python tools/corpus.py --record --only {name}")
            counts["worse"] += 1
            continue
        then = recorded["models"][name]
        now, times[name] = record(name, then)
        differences = compare(name, then, now, same_cpu=here["cpu"] == there["cpu"])
        for verdict, text in differences:
            counts[verdict] += 1
            print(f"{verdict}: {text}")
        print(f"{name}: {len(differences)} differences", flush=True)
    _print_times(recorded["seconds_ratio"], times)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["worse"] > 0)


def _print_times(then: dict[str, Any], now: dict[str, Any]) -> None:
    """CPU times of now as ratios to the recorded ones, both in units of the same loop."""
    print(f"time of import ackpt: {now['import'] / then['import']:.2f} of the recorded one")
    shared = [name for name in now if name != "import" and name in then]
    for stage in ("capture", "planning"):
        if total := sum(then[name][stage] for name in shared):
            print(f"time of {stage}: {sum(now[name][stage] for name in shared) / total:.2f} of the recorded one")


if __name__ == "__main__":
    sys.exit(main())
