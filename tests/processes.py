"""The same scenarios in two processes that talk over gloo."""

import datetime
import traceback
import warnings

import torch
from forked import start_method
from torch import distributed as dist
from torch import multiprocessing

LIMIT = datetime.timedelta(seconds=60)


def in_two_processes(scenario, names, folder) -> list[dict]:
    """``scenario(name, rank, folder)`` for every name in both processes: each one's ``{name: result}``.

    An assertion or runtime error is that scenario's result, as text.
    """
    arguments = scenario, list(names), str(folder)
    multiprocessing.start_processes(_work, arguments, nprocs=2, start_method=start_method())
    return [torch.load(folder / str(rank)) for rank in range(2)]


def _work(rank, scenario, names, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=LIMIT)
    results = {}
    for name in names:
        try:
            results[name] = scenario(name, rank, folder)
        except (AssertionError, RuntimeError):
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()
