"""What pyright says of a package's symbols, and which of it concerns public names."""

from check_types import incomplete
from conftest import raises


def symbol(name, category="function", problem=None, **more):
    error = {"file": "a.py", "severity": "error", "message": str(problem), "range": {"start": {"line": 6}}}
    known = {"isTypeKnown": problem is None, "isTypeAmbiguous": False}
    return {"name": name, "category": category, "diagnostics": [error] if problem else [], **known, **more}


SYMBOLS = [
    symbol("p.inner.f", problem="no annotation", alternateNames=["p.f"]),
    symbol("p.inner.hidden", problem="no annotation"),
    symbol("p.C", "class"),
    symbol("p.C.method", "method", problem="no return type"),
    symbol("p.g", alternateNames=["p.inner.g"]),
    symbol("p.g.something", problem="of a module that is called like a function"),
]


def test_missing_types_of_public_names_and_members_are_named():
    assert incomplete(SYMBOLS, ["p.f", "p.C", "p.g"]) == [
        "a.py:7: p.inner.f: no annotation",
        "a.py:7: p.C.method: no return type",
    ]


def test_a_name_that_pyright_does_not_know_is_an_error():
    raises(ValueError, "pyright does not know p.gone", lambda: incomplete(SYMBOLS, ["p.g", "p.gone"]))
