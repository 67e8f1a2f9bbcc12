import json
import subprocess
from pathlib import Path

import pytest
from conftest import raises

from experiments import provenance, results
from experiments.results import Record, RecordError, environment, load_records, load_reference, markdown_table


@pytest.fixture
def record():
    config = {"layers": 2, "dims": [1, 2], "name": "größe", "rate": 3e-4, "flag": True, "nothing": None}
    return Record("demo", config, {"peak_bytes": 4096, "seconds_step": 0.1}, environment("cpu", "ackpt demo"))


def test_round_trip_to_the_byte(record, tmp_path):
    path = record.save(tmp_path / "new" / "folder" / "demo.json")
    assert Record.load(path) == record
    first = path.read_bytes()
    Record.load(path).save(path)
    assert path.read_bytes() == first
    assert first.endswith(b"}\n") and "größe".encode() in first
    assert list(json.loads(first)) == ["config", "environment", "experiment", "metrics", "schema", "version"]
    assert [file.name for file in path.parent.iterdir()] == ["demo.json"]  # no temporary file stays


def test_load_records(record, tmp_path):
    other = Record("other", {}, {}, record.environment)
    record.save(tmp_path / "b.json")
    other.save(tmp_path / "a.json")
    (tmp_path / "notes.txt").write_text("no record")
    assert load_records(tmp_path) == [other, record]
    assert load_records(tmp_path, "demo") == [record]
    raises(RecordError, "there is no folder", lambda: load_records(tmp_path / "absent"))


class TestBadFiles:
    def load(self, path, text):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(RecordError) as caught:
            Record.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    def test_truncated(self, record, tmp_path):
        path = record.save(tmp_path / "demo.json")
        assert "truncated or not JSON" in self.load(path, path.read_bytes()[:-20])
        assert "truncated or not JSON" in self.load(path, "")

    def test_foreign(self, tmp_path):
        for text in ('{"a": 1}', "[]", "3", '{"schema": "ackpt.reference", "version": 1}'):
            assert "not a file of the kind ackpt.record" in self.load(tmp_path / "x.json", text)
        assert "is not a text file" in self.load(tmp_path / "x.json", b"\x89PNG\xff")

    def test_version(self, record, tmp_path):
        data = record.to_json() | {"version": 2}
        assert "has version 2" in self.load(tmp_path / "x.json", json.dumps(data))

    @pytest.mark.parametrize("field", ["experiment", "config", "metrics", "environment"])
    def test_missing_field(self, record, tmp_path, field):
        data = record.to_json()
        del data[field]
        assert f"the field '{field}' is missing" in self.load(tmp_path / "x.json", json.dumps(data))

    def test_ill_typed_fields(self, record, tmp_path):
        good = record.to_json()
        for changes, message in (
            ({"metrics": []}, "the field 'metrics' is a list"),
            ({"experiment": 3}, "the field 'experiment' is a int"),
            ({"experiment": ""}, "the field 'experiment' is empty"),
            ({"environment": good["environment"] | {"threads": "2"}}, "the field 'environment.threads' is a str"),
            ({"environment": good["environment"] | {"threads": True}}, "the field 'environment.threads' is a bool"),
            ({"environment": {}}, "the field 'environment.device' is missing"),
            ({"metrics": {"x": float("nan")}}, "metrics.x is nan"),
        ):
            assert message in self.load(tmp_path / "x.json", json.dumps(good | changes))

    def test_absent(self, tmp_path):
        raises(RecordError, "cannot read .*absent.json: No such file", lambda: Record.load(tmp_path / "absent.json"))
        raises(RecordError, "cannot read", lambda: Record.load(tmp_path))


@pytest.mark.parametrize(
    "metrics, message",
    [
        ({"x": float("inf")}, "metrics.x is inf"),
        ({"x": [1, {"y": (1, 2)}]}, r"metrics.x\[1\].y is a tuple"),
        ({1: 2}, "the key 1 is a int"),
        ({"x": object()}, "metrics.x is a object"),
    ],
)
def test_values_that_json_cannot_hold(metrics, message):
    raises(RecordError, message, lambda: Record("demo", {}, metrics, environment()))


class TestTable:
    def test_complete_directive(self):
        rows = [{"n": 4, "who": "a|b", "x": 1.5, "y": None}, {"n": 8, "who": "c", "x": None, "y": None}]
        text = markdown_table(rows, {"n": "n", "who": "who", "x": "MiB", "y": "s"}, "Peaks by n.", "tab-peaks")
        assert text == (
            ":::{table} Peaks by n.\n"
            ":name: tab-peaks\n"
            "\n"
            "| n | who | MiB |\n"
            "|---:|:---|---:|\n"
            "| 4 | a\\|b | 1.5 |\n"
            "| 8 | c | *not yet measured* |\n"
            ":::\n"
            '*Not shown, because not yet measured: "s".*\n'
        )

    def test_numbers_as_text_are_aligned_to_the_right(self):
        rows = [{"a": "14,064.5", "b": "+0.1 %", "c": "8B, 8"}, {"a": "–", "b": "**-3 %**", "c": "2"}]
        rows[0] |= {"d": "1.5 to 8.3", "e": "2.5%, 1.7 ms"}
        rows[1] |= {"d": "≥ 82.1", "e": "infeasible"}
        assert "|---:|---:|:---|---:|---:|" in markdown_table(rows, dict(zip("abcde", "abcde")), "c", "t")


class TestReferences:
    def test_all_of_them(self):
        names = sorted(file.stem for file in results.REFERENCES.glob("*.json"))
        assert names == ["bert", "lm", "mu-two-resnet", "offload", "published-peaks", "published-ratios", "synthetic"]
        for name in names:
            reference = load_reference(name)
            assert reference["name"] == name and reference["source"].startswith("published figures")
            text = Path(results.REFERENCES, f"{name}.json").read_text(encoding="utf-8")
            assert text == json.dumps(reference, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def test_unknown(self):
        raises(RecordError, "no reference figures named 'x' .*known: bert, lm", lambda: load_reference("x"))

    def test_bad(self, tmp_path):
        good = load_reference("lm")
        for changes, message in (
            ({"schema": "ackpt.record"}, "not a file of the kind ackpt.reference"),
            ({"rows": {}}, "the field 'rows' is a dict"),
            ({"rows": [{"length": 1}]}, "row 0 is not an object with keys out of"),
            ({"source": 1}, "the field 'source' is a int"),
        ):
            (tmp_path / "lm.json").write_text(json.dumps(good | changes))
            raises(RecordError, message, lambda: load_reference("lm", tmp_path))


class TestEnvironment:
    def git(self, folder, *arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)

    def test_commit_of_the_packages_checkout_only(self, tmp_path, monkeypatch):
        package = tmp_path / "ackpt"
        package.mkdir()
        file = package / "provenance.py"
        file.write_text("")
        monkeypatch.setattr(provenance, "__file__", str(file))
        assert environment()["commit"] is None  # no checkout at all
        self.git(tmp_path, "init", "-q")
        (tmp_path / "other").write_text("")
        self.git(tmp_path, "add", "other")
        self.git(tmp_path, "commit", "-q", "-m", "x")
        assert environment()["commit"] is None  # in somebody's checkout, but not part of it
        self.git(tmp_path, "add", "ackpt")
        self.git(tmp_path, "commit", "-q", "-m", "y")
        commit = environment()["commit"]
        assert commit is not None and len(commit) == 40
        (tmp_path / "other").write_text("changed")
        (tmp_path / "results").write_text("new")
        assert environment()["commit"] == commit
        file.write_text("# changed")
        assert environment()["commit"] == f"{commit}-dirty"
