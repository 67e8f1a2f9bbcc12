"""The conftest.py of `nox -s notebooks`: kernels are forked from a server that has imported what notebooks import.

Each notebook would otherwise spend three seconds on imports. `nox -s reproduce` starts every kernel afresh.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time

from jupyter_client.provisioning import local_provisioner

_IMPORTS = "ipykernel.kernelapp", "transformers", "seaborn", "experiments.frontier"


class ForkedKernel:
    """The subset of the `subprocess.Popen` interface that `jupyter_client` uses, for a forked kernel."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], *, cwd: str | None, env: dict[str, str], **_):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_IMPORTS))
        self._process = context.Process(target=_run, args=(command, cwd, env))
        self._process.start()
        self.pid = self._process.pid or 0
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # signals go to its group
            time.sleep(0.01)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(command: list[str], cwd: str | None, env: dict[str, str]) -> None:
    """Run ``python -m MODULE ARGUMENTS`` in this process."""
    os.setsid()
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd or os.getcwd())
    module = command[command.index("-m") + 1]
    sys.argv = [module, *command[command.index(module) + 1 :]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_the_tests() -> None:
    """End this process when pytest has ended, even if pytest was killed."""
    tests = multiprocessing.parent_process()
    if tests is not None:
        tests.join()
        os._exit(1)


if sys.platform == "linux":
    local_provisioner.launch_kernel = ForkedKernel
