"""Files are written in one step, into what a path names, or not at all."""

import concurrent.futures
import contextlib
import os
import stat
import subprocess
import sys
import threading

import pytest
from conftest import raises

import ackpt
from ackpt.core import machine
from ackpt.core.files import RecordError, check_writable, write_text_atomic


def test_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = write_text_atomic(tmp_path / "x.txt", "old\n")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    raises(RecordError, "cannot write .*x.txt: No space left", lambda: write_text_atomic(path, "new\n"))
    assert path.read_text() == "old\n"
    assert [file.name for file in tmp_path.iterdir()] == ["x.txt"]


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "link to a link", "two names", "long name"])
def test_what_a_path_names_is_written_and_stays_what_it_is(tmp_path, kind):
    path, file = tmp_path / "path", tmp_path / "folder" / ("x" * (250 if kind == "long name" else 1))
    if kind != "dangling link":
        write_text_atomic(file, "an old and longer text")
        file.chmod(0o600)
    if kind == "link to a link":
        (tmp_path / "second").symlink_to(file)
        path.symlink_to("second")
    elif "link" in kind:
        path.symlink_to(file)
    elif kind == "two names":
        path.hardlink_to(file)
    else:
        path = file
    before = path.lstat()
    assert check_writable(path) == path
    assert write_text_atomic(path, "new") == path
    assert (path.read_text(), file.read_text()) == ("new", "new")
    assert path.lstat().st_mode == before.st_mode
    assert len([*file.parent.iterdir()]) == 1
    assert kind == "dangling link" or stat.S_IMODE(file.stat().st_mode) == 0o600


def test_devices_and_pipes_are_written_through(tmp_path):
    write_text_atomic(os.devnull, "text")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    raises(RecordError, "no process reads from it", lambda: write_text_atomic(pipe, "text"))
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    thread.start()
    while not read:  # until the thread reads
        with contextlib.suppress(RecordError):
            write_text_atomic(pipe, "x" * 300_000)  # more than a pipe holds
            thread.join()
    assert read == ["x" * 300_000] and stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's names of open files")
@pytest.mark.parametrize("to", ["a file", "a pipe"])
def test_standard_output_is_written_in_order(tmp_path, to):
    code = "from ackpt.core.files import *\nprint(1)\nwrite_text_atomic('/dev/stdout', '2\\n')\nprint(3)"
    with open(tmp_path / "out.txt", "w+") as file:
        file.write("0\n")
        file.flush()
        target = file if to == "a file" else subprocess.PIPE
        run = subprocess.run([sys.executable, "-c", code], stdout=target, text=True, check=True)
        file.seek(0)
        assert (file.read() if to == "a file" else "0\n" + run.stdout) == "0\n1\n2\n3\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder", "is a folder: name a file in it"),
        ("link", "is a folder: name a file in it"),
        ("loop", "Too many levels"),
        ("file/x", "Not a directory; name a file that can be written"),
        ("read_only", "Permission denied"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null byte"),
    ],
)
@pytest.mark.parametrize("write", [check_writable, lambda path: write_text_atomic(path, "text")])
def test_what_cannot_be_written_is_one_error(tmp_path, monkeypatch, write, name, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "read_only").write_text("old")
    names = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: "read_only" not in str(path))  # for root, it is true
    raises(RecordError, words, lambda: write(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == names and (tmp_path / "read_only").read_text() == "old"


def test_two_writers_leave_one_whole_file(tmp_path):
    path, torn = tmp_path / "folder" / "x.txt", []

    def write(letter):
        for _ in range(100):
            check_writable(path)
            write_text_atomic(path, letter * 5000)
            text = path.read_text()
            torn.extend([text] if len(text) != 5000 or len(set(text)) != 1 else [])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(write, "ab"))
    assert not torn and [file.name for file in path.parent.iterdir()] == ["x.txt"]


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue May", "580.159.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04"),
        ("nothing of the kind", None),
    ],
)
def test_the_driver_version_is_parsed(text, version):
    assert machine._driver_in(text) == version


def test_without_metadata_the_version_is_that_of_the_source(monkeypatch):
    def absent(name):
        raise machine.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "version", absent)
    assert machine.machine()["ackpt"] == ackpt.__version__
