"""Run scripts in processes of their own that need not import torch and transformers again."""

import contextlib
import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path

import torch

# Takes a second or more to import. A server that has imported all of them, and run nothing, forks the processes.
_SLOW = (
    *("torch", "torch._inductor.compile_fx", "ackpt.planner.api", "accelerate", "peft"),
    *("torch.distributed.fsdp", "torch.nn.parallel"),
    *("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
)


def start_method() -> str:
    """How `multiprocessing` starts such processes here."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_SLOW))
    return "forkserver"


def output_of(script: Path, *arguments: str, folder: Path, threads: int | None = None, ranks: int = 0) -> str:
    """What a Python script prints, if it succeeds, run in `folder`; with `ranks`, by so many processes of one group."""
    context = multiprocessing.get_context(start_method())
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, environment in enumerate(_environments(ranks) if ranks else [{}]):
            logs = stack.enter_context(tempfile.TemporaryDirectory())
            given = str(script), arguments, str(folder), threads, logs, environment
            processes.append((context.Process(target=_run, args=given), logs))
            processes[rank][0].start()
        for process, _ in processes:
            process.join()
        for process, logs in processes:
            assert process.exitcode == 0, Path(logs, "2").read_text(encoding="utf-8")
        return "".join(Path(logs, "1").read_text(encoding="utf-8") for _, logs in processes)


def _environments(ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for each of the processes on one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    return [{**shared, "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)]


def _run(script, arguments, folder, threads, logs, environment):
    os.environ.update(environment)
    for number in (1, 2):  # stdout and stderr
        os.dup2(os.open(os.path.join(logs, str(number)), os.O_WRONLY | os.O_CREAT), number)
    gc.freeze()  # what the server imported is not collected
    torch.set_num_threads(threads or torch.get_num_threads())
    os.chdir(folder)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
