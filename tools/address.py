"""Where does the project live, and what does it require? One answer, read from pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"
COLAB_FOLDER = "book/colab"  # the chapters in plain Markdown, see colab.py


def project(root: Path = ROOT) -> dict:
    """The table `[project]` of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def repository_address(root: Path = ROOT) -> str:
    """The address in `[project.urls] Repository`, without a trailing slash."""
    return project(root)["urls"]["Repository"].rstrip("/")


def colab_address(address: str, path: str) -> str:
    """The address that opens `path` of a GitHub repository in Colab."""
    owner_and_name = address.removeprefix("https://github.com/")
    return f"https://colab.research.google.com/github/{owner_and_name}/blob/{BRANCH}/{path}"
