"""Try regions and plans on small models of transformers, diffusers, monai, torch_geometric, x-transformers and torch.

    python tools/tested_models.py                          all models that have no entry in the record yet
    python tools/tested_models.py --library transformers   those of one library; may be repeated
    python tools/tested_models.py --only "transformers bert"   one model, also if it has an entry; may be repeated
    python tools/tested_models.py --again                  all models, also those that have an entry

Each model runs in its own process with a time limit. The record is written after every model, so that the command can
be interrupted and continued; every entry has its own commit, version of the library and date. Libraries that are not
installed are named and skipped; their entries stay.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import multiprocessing
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tested_transformers  # noqa: E402
import torch  # noqa: E402
from tested_libraries import LIBRARIES  # noqa: E402
from tested_models_run import NotBuilt, record  # noqa: E402

from experiments.results import Record, environment  # noqa: E402

FILE = ROOT / "results" / "models" / "tested_models.json"
EXPERIMENT = "tested-models"
SECONDS, MEMORY = 100, 12 << 30  # CPU seconds and bytes of one model


def names() -> list[str]:
    """``"library model"`` of all models."""
    others = [f"{library} {name}" for library, models in LIBRARIES.items() for name in models]
    return others + [f"transformers {name}" for name in tested_transformers.TYPES]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=names(), metavar="NAME", help="only this model")
    parser.add_argument("--library", action="append", choices=[*LIBRARIES, "transformers"], help="only this library")
    parser.add_argument("--again", action="store_true", help="run models that have an entry, too")
    parser.add_argument("--file", type=Path, default=FILE, help="the record (results/models/tested_models.json)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # processes are forked, which a pool of threads does not survive
    here = environment(command="python tools/tested_models.py")
    entries = dict(Record.load(given.file).metrics) if given.file.exists() else {}
    entries = {name: entry for name, entry in entries.items() if name in names()}
    wanted = given.only or [name for name in names() if given.library is None or name.split()[0] in given.library]
    installed = {library: _version(library) for library in dict.fromkeys(name.split()[0] for name in wanted)}
    for library in (library for library, version in installed.items() if version is None):
        print(f"{library} is not installed: its models are skipped")
    _warm_up(installed)
    for name in wanted:
        version = installed[name.split()[0]]
        if version is None or (name in entries and not (given.again or given.only)):
            continue
        start = time.perf_counter()
        entry = _in_a_process(name)
        entries[name] = {**entry, "version": version, "commit": here["commit"], "date": here["date"]}
        Record(EXPERIMENT, {"seconds": SECONDS}, dict(sorted(entries.items())), here).save(given.file)
        print(f"{name}: {_summary(entry)} ({time.perf_counter() - start:.0f} s)", flush=True)
    bad = [name for name in wanted if name in entries and is_defect(entries[name])]
    print(f"{len(entries)} models in {given.file}; crashes and wrong numbers: {', '.join(bad) or 'none'}")
    return int(bool(bad))


def is_defect(entry: dict[str, Any]) -> bool:
    """Whether an entry has a crash, other gradients under a plan, or a measured peak above the promised one."""
    if "not_built" in entry:
        return False
    plan = entry["plan"]
    exceeds = plan["outcome"] == "equal" and plan["measured_bytes"] > plan["promised_bytes"]
    return plan["outcome"] in ("crash", "different") or entry["regions"]["outcome"] == "crash" or exceeds


def build(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """``(model, args, kwargs)`` of a name."""
    library, _, model = name.partition(" ")
    if library == "transformers":
        found, batch = tested_transformers.build(model)
        return found, (), batch
    return LIBRARIES[library][model]()


def _version(library: str) -> str | None:
    """The installed version; None if the library cannot be imported."""
    try:
        importlib.import_module(library)
        return importlib.metadata.version(library)
    except ImportError:
        return None


def _warm_up(libraries: Iterable[str]) -> None:
    """Import what every capture needs once, before processes are forked."""
    record(LIBRARIES["torch"]["MLP"])
    if "transformers" in libraries:
        model, args, kwargs = build("transformers bert")
        model(*args, **kwargs).loss.backward()


def _in_a_process(name: str) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        timed_out = process.exitcode == -signal.SIGXCPU
        reason = f"needs more than {SECONDS} s of CPU time" if timed_out else f"ended with exit code {process.exitcode}"
        failure = {"outcome": "crash", "error": "process", "message": reason}
        return {"parameters": None, "regions": failure, "plan": failure}
    finally:
        process.join()


def _run(name: str, connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SECONDS, -1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    try:
        connection.send(record(lambda: build(name)))
    except NotBuilt as error:
        connection.send({"not_built": str(error)})


def _summary(entry: dict[str, Any]) -> str:
    if "not_built" in entry:
        return f"not built: {entry['not_built']}"
    return ", ".join(_words(part, entry[part]) for part in ("regions", "plan"))


def _words(part: str, found: dict[str, Any]) -> str:
    text = f"{part} {found['outcome']}"
    if found.get("difference"):
        text += f" by {found['difference']:.1e}"
    if found.get("in_parts"):
        text += " in parts"
    if found["outcome"] == "equal" and part == "plan" and found["measured_bytes"] != found["promised_bytes"]:
        text += f", {found['measured_bytes']} bytes measured, {found['promised_bytes']} promised"
    return text + (f": {found['error']}: {found['message']}" if "message" in found else "")


if __name__ == "__main__":
    sys.exit(main())
