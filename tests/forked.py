"""Run scripts in processes of their own that need not import torch and transformers again."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

# Takes a second or more to import. A server that has imported all of them, and run nothing, forks the processes.
_SLOW = (
    *("torch", "torch._inductor.compile_fx", "ackpt.compiled", "accelerate", "lightning", "peft"),
    *("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
)


def start_method() -> str:
    """How `multiprocessing` starts such processes here."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_SLOW))
    return "forkserver"


def output_of(script: Path, *arguments: str, folder: Path, threads: int | None = None) -> str:
    """What a Python script prints, if it succeeds, run in `folder`."""
    context = multiprocessing.get_context(start_method())
    with tempfile.TemporaryDirectory() as logs:
        process = context.Process(target=_run, args=(str(script), arguments, str(folder), threads, logs))
        process.start()
        process.join()
        assert process.exitcode == 0, Path(logs, "2").read_text(encoding="utf-8")
        return Path(logs, "1").read_text(encoding="utf-8")


def _run(script, arguments, folder, threads, logs):
    for number in (1, 2):  # stdout and stderr
        os.dup2(os.open(os.path.join(logs, str(number)), os.O_WRONLY | os.O_CREAT), number)
    gc.freeze()  # what the server imported is not collected
    torch.set_num_threads(threads or torch.get_num_threads())
    os.chdir(folder)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
