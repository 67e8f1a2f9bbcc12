"""Is every public name typed completely, for whoever checks types against the package?

`pyright --verifytypes` looks at what is exported as a user's checker does. Its findings count for the names of the
API page and their members; the modules behind them may say less.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from public_names import public_names

PYRIGHT = ["pyright", "--verifytypes", "ackpt", "--ignoreexternal", "--outputjson"]


def verified() -> list[dict]:
    """What pyright says of every symbol of the package, which must be importable here."""
    # Not by --pythonpath: pyright 1.1.414 then looks for torch beside whatever `python` is on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    result = subprocess.run(PYRIGHT, capture_output=True, text=True, env={**os.environ, "PATH": path})
    try:
        return json.loads(result.stdout)["typeCompleteness"]["symbols"]
    except (ValueError, KeyError) as error:
        raise OSError(f"pyright did not verify the types: {result.stderr.strip() or result.stdout}") from error


def incomplete(symbols: list[dict], names: list[str]) -> list[str]:
    """`file:line: symbol: what is missing` for the public ones among `symbols`.

    Raises:
        ValueError: if one of `names` is not among them.
    """
    wanted = set(names)
    called = {symbol["name"]: {symbol["name"], *symbol.get("alternateNames", ())} for symbol in symbols}
    if unknown := wanted.difference(*called.values()):
        raise ValueError(f"pyright does not know {', '.join(sorted(unknown))}")
    public = {name for name, known_as in called.items() if wanted & known_as}
    classes = public.intersection(symbol["name"] for symbol in symbols if symbol["category"] == "class")
    found: dict[str, None] = {}
    for symbol in symbols:
        name = symbol["name"]
        if name not in public and name.rpartition(".")[0] not in classes:
            continue
        if symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]:
            continue
        for diagnostic in symbol["diagnostics"]:
            if diagnostic["severity"] == "error":
                line = f":{diagnostic['range']['start']['line'] + 1}" if "range" in diagnostic else ""
                found[f"{diagnostic['file']}{line}: {name}: {diagnostic['message']}"] = None
    return list(found)


def main() -> int:
    """Command line: `python tools/check_types.py`."""
    names = [name for name in public_names() if name.startswith("ackpt.")]
    found = incomplete(verified(), names)
    print("\n".join(found) or f"{len(names)} public names are typed completely")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
