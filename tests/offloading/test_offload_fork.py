"""Offload in a forked process: locks, threads and memory of parent and child do not interfere."""

import os
import textwrap

import pytest
from forked import output_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

HEAD = """
import os, signal, sys, tempfile, threading
import torch, ackpt

torch.set_num_threads(1)
folder = tempfile.mkdtemp()
store = {"store": sys.argv[1], **({"folder": folder} if sys.argv[1] == "disk" else {})}
offload = ackpt.offload_saved_tensors("async", min_bytes=0, keep_last=0, **store)

def forward(scale):
    x = torch.full((1 << 14,), float(scale), requires_grad=True)
    with offload:
        y = x
        for _ in range(6):
            y = y * 1.5
            y = y.square() / (1 + y)
    return x, y.sum()

def gradient(scale):
    x, loss = forward(scale)
    loss.backward()
    return x.grad

def child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs is ended, and seen
        try:
            os._exit(0 if work() else 1)
        except BaseException as error:
            print(type(error).__name__, error)
            sys.stdout.flush()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.fixture
def run_in_process(tmp_path):
    """A function that runs code in a process of its own and returns what it prints, in lines."""

    def run(code: str, store: str) -> list[str]:
        script = tmp_path / "code.py"
        script.write_text(HEAD + textwrap.dedent(code), encoding="utf-8")
        return output_of(script, store, folder=tmp_path, threads=1).splitlines()

    return run


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_child_trains_while_threads_of_its_parent_do(store, run_in_process):
    code = """
        wanted, stop = gradient(2), threading.Event()
        def busy():
            while not stop.is_set():
                gradient(3)
        thread = threading.Thread(target=busy)
        thread.start()
        print([child(lambda: torch.equal(gradient(2), wanted)) for _ in range(12)])
        stop.set()
        thread.join()
    """
    assert run_in_process(code, store) == [str([0] * 12)]


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_child_does_not_write_into_the_store_of_its_parent(store, run_in_process):
    code = """
        wanted = gradient(2)
        x, loss = forward(2)
        offload.engine.stats()
        gradient(5)
        print(child(lambda: globals().pop("loss") is not None and gradient(7) is not None))
        loss.backward()
        print(torch.equal(x.grad, wanted))
    """
    assert run_in_process(code, store) == ["0", "True"]


BACKWARD_IN_A_CHILD = """
    from ackpt.offloading import transport
    wanted = gradient(2)
    x, loss = forward(2)
    def work():
        loss.backward()
        return torch.equal(x.grad, wanted)
    print(child(work))
"""


def test_a_child_runs_backward_over_host_memory_of_its_parent(run_in_process):
    lines = run_in_process(BACKWARD_IN_A_CHILD, "host")
    assert lines[-1] in ("0", "2") and (lines[-1] == "0" or "forked" in lines[0])


def test_backward_over_the_files_of_the_parent_is_refused_in_a_child(run_in_process):
    message, code = run_in_process(BACKWARD_IN_A_CHILD, "disk")
    assert code == "2" and message.startswith("OffloadError") and "fork" in message
