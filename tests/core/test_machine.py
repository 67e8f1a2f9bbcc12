"""What a record says of the machine."""

import pytest

import ackpt
from ackpt.core import machine


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


def test_the_environment_has_its_fields():
    here = machine.machine("cpu")
    assert here["device"] == "cpu" and here["threads"] >= 1 and here["device_name"]
    assert len(here["date"]) == len("2026-01-31")


def test_without_metadata_the_version_is_that_of_the_source(monkeypatch):
    def absent(name):
        raise machine.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "version", absent)
    assert machine.machine()["ackpt"] == ackpt.__version__
