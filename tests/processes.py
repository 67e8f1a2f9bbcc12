"""The same scenarios in several processes that talk over gloo."""

import datetime
import traceback
import warnings

import torch
from forked import start_method
from torch import distributed as dist
from torch import multiprocessing

LIMIT = datetime.timedelta(seconds=60)


def shard(model):
    from torch.distributed.fsdp import fully_shard

    for block in getattr(model, "blocks", model):
        fully_shard(block)
    return fully_shard(model)


def in_processes(scenario, names, folder, count=2) -> list[dict]:
    """``scenario(name, rank, folder)`` for every name in `count` processes: each one's ``{name: result}``.

    An assertion or runtime error is that scenario's result, as text.
    """
    arguments = scenario, list(names), str(folder), count
    multiprocessing.start_processes(_work, arguments, nprocs=count, start_method=start_method())
    return [torch.load(folder / str(rank)) for rank in range(count)]


def _work(rank, scenario, names, folder, count):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=LIMIT)
    results = {}
    for name in names:
        try:
            results[name] = scenario(name, rank, folder)
        except (AssertionError, RuntimeError):
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()
