"""Errors of offload: bad arguments are named; a full store fails the step and leaves no file; training can continue."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from conftest import assert_equal, raises, raises_cleanly
from offload_helpers import MODES, SIZE, assert_empty, blocks, counts, gradients, matrix
from torch import nn

import ackpt
from ackpt.offloading.transport import transport_for

BAD_VALUES = [-1, -(1 << 40), True, False, 1.0, 0.5, "1", None, torch.tensor(1)]
SIZES = ["min_bytes", "keep_last", "lookahead_bytes", "max_pinned_bytes"]


@pytest.mark.parametrize("value", BAD_VALUES)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_must_be_whole_numbers(name, value):
    if value is None and name in ("lookahead_bytes", "max_pinned_bytes"):
        assert ackpt.offload_saved_tensors(**{name: None}).engine is ackpt.offload_saved_tensors().engine
        return
    with pytest.raises(ValueError, match=f"{name} must be a whole number, 0 or more; got"):
        ackpt.offload_saved_tensors(**{name: value})


BAD_CHOICES = [
    ({"mode": "later"}, "mode='later' is unknown: choose 'sync' or 'async'"),
    ({"mode": ["sync"]}, r"mode=\['sync'\] is unknown"),
    ({"store": "tape"}, "store='tape' is unknown: choose 'host' or 'disk'"),
    ({"store": "disk"}, "store='disk' needs folder="),
    ({"folder": "/nowhere"}, "folder='/nowhere' is only used with store='disk'; store is 'host'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CHOICES)
def test_unknown_modes_and_stores_name_the_choices(options, message):
    raises(ValueError, message, lambda: ackpt.offload_saved_tensors(**options))


@pytest.mark.parametrize("offload", ["later", "SYNC", "", True, 1, ackpt.offload_saved_tensors, nn.Identity()])
def test_an_unknown_offload_is_refused_everywhere(offload):
    layers = blocks(2)
    for call in (
        lambda: ackpt.checkpoint(layers, matrix(), offload=offload),
        lambda: ackpt.checkpoint_sequential(layers, 2, matrix(), offload=offload),
        lambda: ackpt.apply_activation_checkpointing(layers, offload=offload),
    ):
        with raises_cleanly(ValueError, "offload=.* is unknown: choose None, 'sync', 'async', or pass"):
            call()
    assert ackpt.remove_activation_checkpointing(layers) == []


def test_unusable_folders_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for folder, reason in ((tmp_path / "missing", "No such file"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(ackpt.OffloadError, match=f"store='disk' cannot hold .*{folder.name}.*{reason}") as raised:
            ackpt.offload_saved_tensors(store="disk", folder=folder)
        assert "Name a folder that exists" in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "missing").mkdir()
    assert ackpt.offload_saved_tensors(store="disk", folder=tmp_path / "missing").engine.stats()["stored"] == 0


def test_a_step_on_a_device_without_streams_is_refused(monkeypatch, tmp_path):
    """Simulated: the engine requests the transport when the first tensor of a device is saved."""
    chosen = ackpt.offload_saved_tensors("async", "disk", min_bytes=0, folder=tmp_path)
    monkeypatch.setattr("ackpt.offloading.engine.transport_for", lambda device: transport_for(torch.device("xpu")))
    x = matrix().requires_grad_()
    with raises_cleanly(ackpt.OffloadError, "tensors on xpu cannot be offloaded"):
        with chosen:
            (x * 2).sin()
    monkeypatch.undo()
    with chosen:
        y = (x * 2).sin()
    y.sum().backward()
    del y
    assert_empty(chosen.engine)


def step_with_offload(model, x, chosen, way):
    if way == "regions":
        ackpt.apply_activation_checkpointing(model, offload=chosen)
        loss = model(x).sum()
    else:
        with chosen:
            loss = model(x).sum()
    loss.backward()
    return gradients(model, x)


def without_offload(model, x):
    ackpt.remove_activation_checkpointing(model)
    model(x).sum().backward()
    return gradients(model, x)


@pytest.fixture
def fills_up(monkeypatch):
    """Simulates a disk with space for this many more bytes."""

    def limit(room):
        def fallocate(descriptor, offset, size):
            nonlocal room
            if size > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            room -= size
            os.ftruncate(descriptor, size)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)

    yield limit
    monkeypatch.undo()


@pytest.mark.parametrize("room", [0, 1, 2])
@pytest.mark.parametrize("way", ["regions", "saved tensors"])
@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_fails_the_step_and_nothing_else(mode, way, room, fills_up, tmp_path):
    model, x = blocks(5).eval(), matrix().requires_grad_()
    expected = without_offload(model, x)
    chosen = ackpt.offload_saved_tensors(mode, "disk", min_bytes=0, keep_last=0, folder=tmp_path)
    fills_up(room * SIZE)
    for _ in range(2):
        with raises_cleanly(ackpt.OffloadError, f"cannot hold .* bytes in folder .*{tmp_path.name}.*No space left"):
            step_with_offload(model, x, chosen, way)
    assert gradients(model, x) == [None] * len(expected)
    gc.collect()  # pytest keeps the frames of an error in a cycle
    assert_empty(chosen.engine)
    assert counts(chosen.engine, "pool_bytes")["pool_bytes"] <= room * SIZE
    assert list(tmp_path.iterdir()) == []
    assert_equal(expected, without_offload(model, x), "gradient")
    fills_up(1 << 30)
    assert_equal(expected, step_with_offload(model, x, chosen, way), "gradient")
    assert_empty(chosen.engine)


@pytest.mark.parametrize("how", ["killed", "exit in mid-step", "error in mid-step"])
def test_no_file_remains_when_a_process_ends_during_a_step(how, tmp_path):
    code = """
        import os, sys
        import torch, ackpt

        x = torch.ones(1 << 15, requires_grad=True)
        with ackpt.offload_saved_tensors("async", "disk", min_bytes=0, keep_last=0, folder=sys.argv[1]) as engine:
            y = x
            for _ in range(8):
                y = y.sin()
            mapped = sum(sys.argv[1] in line for line in open("/proc/self/maps"))
            print(engine.stats()["stored"], mapped, flush=True)
            if sys.argv[2] == "killed":
                sys.stdin.read()
            sys.exit(3) if sys.argv[2].startswith("exit") else None
            raise KeyError("in mid-step")
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(tmp_path), how]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, text=True, **pipes)
    stored, mapped = map(int, process.stdout.readline().split())
    assert stored == 7 and mapped >= 3  # there are files, without names
    assert list(tmp_path.iterdir()) == []
    if how == "killed":
        process.kill()
    _, err = process.communicate()
    assert process.returncode == {"k": -signal.SIGKILL, "e": 3}.get(how[0] if "error" not in how else "", 1)
    assert ("KeyError: 'in mid-step'" in err) == ("error" in how)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["", 3, b"", ["x"]])
def test_a_folder_is_a_path(folder):
    with pytest.raises(ValueError, match="folder must be the path of a folder, got"):
        ackpt.offload_saved_tensors(store="disk", folder=folder)


def test_deleted_folders_are_forgotten(tmp_path):
    def used(name):
        folder = tmp_path / name
        folder.mkdir()
        context = ackpt.offload_saved_tensors(store="disk", folder=folder, min_bytes=0)
        with context:
            loss = blocks(2)(matrix()).sum()
        loss.backward()
        shutil.rmtree(folder)
        return weakref.ref(context.engine)

    engines = [used(f"folder{place}") for place in range(3)]
    ackpt.offload_saved_tensors(store="disk", folder=tmp_path)
    gc.collect()
    assert [engine() for engine in engines] == [None] * 3


def test_a_disk_store_takes_few_files(tmp_path):
    engine = ackpt.offload_saved_tensors(store="disk", folder=tmp_path, min_bytes=0, keep_last=0).engine
    before = len(os.listdir("/proc/self/fd"))
    buffers = [engine._folder.allocate(4096) for _ in range(2000)]
    assert len(os.listdir("/proc/self/fd")) - before <= 12
    assert len({buffer.data_ptr() for buffer in buffers}) == 2000


@pytest.mark.parametrize("in_place", [False, True])
def test_a_dropout_mask_written_after_it_was_saved_is_refused(in_place):
    x = torch.randn(8, 8, requires_grad=True)
    with ackpt.offload_saved_tensors("sync", min_bytes=0, keep_last=0):
        loss = torch.nn.functional.rrelu(x * 2, training=True, inplace=in_place).sin().sum()
    raises(ackpt.OffloadError, "rrelu", loss.backward)
    with ackpt.offload_saved_tensors("sync", min_bytes=0, keep_last=0):
        torch.nn.functional.rrelu(x * 2, inplace=in_place).sin().sum().backward()
