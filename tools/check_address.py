"""Does the repository's address stand in one place? The README's links repeat it, and `tests/test_readme.py` compares.

Executed notebooks hold it too, but `nox -s reproduce` wrote them and `check_notebooks` compares them with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from address import ROOT, repository_address

_NOT_IN = (":!README.md", ":!book/notebooks", ":!book/colab")


def places(root: Path = ROOT) -> list[str]:
    """`file:line` of every tracked mention of the address outside of the README and the executed notebooks."""
    bare = repository_address(root).removeprefix("https://")
    command = ["git", "grep", "-n", "-I", "--fixed-strings", bare, "--", ".", *_NOT_IN]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if result.returncode > 1:
        raise OSError(f"needs a git checkout: {result.stderr.strip()}")
    return [":".join(line.split(":")[:2]) for line in result.stdout.splitlines()]


def main() -> int:
    """Command line: `python tools/check_address.py`."""
    found = places()
    print("repository address: " + ", ".join(found))
    return 0 if len(found) == 1 and found[0].startswith("pyproject.toml:") else 1


if __name__ == "__main__":
    sys.exit(main())
