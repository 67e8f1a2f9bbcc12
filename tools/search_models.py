"""Search for breaches of the promise with random models: every difference that no error announces is a finding.

    python tools/search_models.py --minutes 60

Each seed is a model (see tests/random_models). It is trained unmodified, in regions, with offload and under plans; what
differs in outputs, gradients, buffers, attributes, random numbers or peak is printed, with the smallest model in which
it persists. The exit status is 1 if there was a finding. ``--only SEED`` checks one model and prints all its outcomes.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to search (60)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--only", type=int, metavar="SEED", help="check this seed alone and print every outcome")
    parser.add_argument("--parts", metavar="NAME", nargs="+", default=[], help="only models that have one of these")
    parser.add_argument("--without", metavar="NAME", nargs="+", default=[], help="only models that have none of these")
    parser.add_argument("--unreduced", action="store_true", help="print findings as they are, without reducing them")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.only is not None:
        return _only(given.only)
    return _search(given.seed, 60 * given.minutes, set(given.parts), set(given.without), not given.unreduced)


def _only(seed: int) -> int:
    from random_models import check, draw_spec

    spec = draw_spec(seed)
    outcomes = check(spec)
    print(spec)
    if outcomes is None:
        print("this model cannot be trained unmodified")
        return 0
    for outcome in outcomes:
        print(f"{outcome.kind:<11} {outcome.variant:<28} {outcome.text}")
    return int(any(outcome.kind == "finding" for outcome in outcomes))


def _search(first: int, seconds: float, wanted: set[str], unwanted: set[str], reduces: bool) -> int:
    from random_models import check, draw_spec, reduced

    start = said = time.monotonic()
    by_part: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    totals: collections.Counter = collections.Counter()
    findings: set[tuple[str, str]] = set()
    seed, models = first, 0
    while time.monotonic() - start < seconds:
        spec = draw_spec(seed)
        names = set(spec.names())
        fits = (not wanted or wanted & names) and not unwanted & names
        outcomes = check(spec) if fits else None
        models += outcomes is not None
        for outcome in outcomes or ():
            totals[outcome.kind] += 1
            way = "plan" if outcome.variant.startswith("plan") else "other"
            for name in names:
                by_part[name][f"{way} {outcome.kind}"] += 1
        for outcome in _one_of_each(outcomes or ()):
            smallest = reduced(spec, outcome) if reduces else spec
            if (outcome.variant.split()[0], str(smallest)) not in findings:
                findings.add((outcome.variant.split()[0], str(smallest)))
                print(f"FINDING seed {seed}, {outcome.variant}: {outcome.text}\n    {smallest!r}", flush=True)
        seed += 1
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{(said - start) / 60:.0f} min: {models} models, {dict(totals)}", flush=True)
    _summary(by_part, totals, models, first, seed)
    return int(bool(findings))


def _one_of_each(outcomes):
    """The first finding of regions, of offload and of plans: the others of a kind nearly always have its cause."""
    kinds: dict[str, Any] = {}
    for outcome in outcomes:
        if outcome.kind == "finding":
            kind = "region" if outcome.variant.startswith(("region", "checkpoint")) else outcome.variant.split()[0]
            kinds.setdefault(kind, outcome)
    return kinds.values()


def _summary(by_part, totals, models: int, first: int, end: int) -> None:
    kinds = ("equal", "regrouped", "announced", "refused", "finding")
    columns = [f"{way} {kind}" for way in ("other", "plan") for kind in kinds]
    columns = [column for column in columns if any(counts[column] for counts in by_part.values())]
    print(f"\n{models} models (seeds {first} to {end - 1}): {dict(totals)}")
    print("outcomes of the models with a part, of plans and of others (regions, offload)")
    print(f"{'':<24}" + "".join(f"{column:>17}" for column in columns))
    for name, counts in sorted(by_part.items()):
        never = "" if counts["other equal"] or counts["plan equal"] else " never equal"
        print(f"{name:<24}" + "".join(f"{counts[column]:>17}" for column in columns) + never)


if __name__ == "__main__":
    sys.exit(main())
