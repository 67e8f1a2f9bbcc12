"""The frozen corpus: two of its models match the record, and what is worse is told from what only changed."""

import copy
import json
from pathlib import Path

import corpus
import pytest
from corpus_compare import compare
from corpus_record import environment, record

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = {"budget": 100, "schedule": "aa", "peak_bytes": 90, "cost": 0.2, "lower_bound": 0.1}
RUN = {**PLAN, "measured_peak_bytes": 90, "bit_equal": True}
REFUSAL = {"budget": 10, "refused": 80}


@pytest.mark.parametrize("name", ["dropout", "tied"])
def test_a_model_is_captured_planned_and_run_as_recorded(name: str) -> None:
    recorded, here = corpus.load(), environment()
    if recorded["environment"]["versions"] != here["versions"]:
        pytest.skip(f"recorded with {recorded['environment']['versions']}, this is {here['versions']}")
    then = recorded["models"][name]
    now, _ = record(name, then)
    assert compare(name, then, now, same_cpu=recorded["environment"]["cpu"] == here["cpu"]) == []


def test_every_recorded_step_is_bit_equal_and_has_the_simulated_peak() -> None:
    entries = [
        (entry["bit_equal"], entry["measured_peak_bytes"] <= entry["peak_bytes"])
        for model in corpus.load()["models"].values()
        for budgets in model["plans"].values()
        for entry in budgets.values()
        if "bit_equal" in entry
    ]
    assert len(entries) > 200 and set(entries) == {(True, True)}


def model(entry: dict) -> dict:
    return {"graph": "bb", "unplanned": {"outputs": "cc"}, "plans": {"auto": {"75%": entry}}}


@pytest.mark.parametrize(
    "then, change, verdict",
    [
        (PLAN, {}, None),
        (PLAN, {"peak_bytes": 89}, "worse"),
        (PLAN, {"schedule": "dd"}, "changed, not worse"),
        (PLAN, {"schedule": "dd", "peak_bytes": 80, "cost": 0.1}, "changed, not worse"),
        (PLAN, {"schedule": "dd", "peak_bytes": 91, "cost": 0.1}, "worse"),
        (PLAN, {"schedule": "dd", "peak_bytes": 80, "cost": 0.21}, "worse"),
        (PLAN, {"schedule": "dd", "lower_bound": 0.05}, "worse"),
        (RUN, {"schedule": "dd"}, "changed, not worse"),
        (RUN, {"schedule": "dd", "bit_equal": False}, "worse"),
        (RUN, {"schedule": "dd", "measured_peak_bytes": 91}, "worse"),
        (RUN, {"bit_equal": False}, "worse"),
        (REFUSAL, {"refused": 79}, "changed, not worse"),
        (REFUSAL, {"refused": 81}, "worse"),
    ],
)
def test_worse_plans_are_told_from_changed_ones(then: dict, change: dict, verdict: str | None) -> None:
    found = compare("a", model(then), model({**then, **change}))
    assert [each for each, _ in found] == ([] if verdict is None else [verdict])


def test_a_new_refusal_is_a_loss_and_a_new_plan_is_none() -> None:
    assert [verdict for verdict, _ in compare("a", model(REFUSAL), model(PLAN))] == ["changed, not worse"]
    assert [verdict for verdict, _ in compare("a", model(PLAN), model(REFUSAL))] == ["worse"]
    assert [verdict for verdict, _ in compare("a", model(PLAN), {**model(PLAN), "plans": {}})] == ["worse"]


def test_computed_values_count_only_on_the_recorded_cpu() -> None:
    other = {**model(PLAN), "unplanned": {"outputs": "dd"}}
    assert [verdict for verdict, _ in compare("a", model(PLAN), other)] == ["worse"]
    assert compare("a", model(PLAN), other, same_cpu=False) == []


def test_the_command_records_compares_and_keeps_the_first_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    now, times = model(RUN), {"capture": 1.0, "planning": 2.0}
    monkeypatch.setattr(corpus, "record", lambda name, then=None: (copy.deepcopy(now), dict(times)))
    monkeypatch.setattr(corpus, "import_time", lambda: times["capture"])
    options = ["--file", str(tmp_path / "corpus.json"), "--only", "tied"]
    assert corpus.main([*options, "--record"]) == 0
    first = (tmp_path / "corpus.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.json"]
    times.update(capture=3.0)
    assert corpus.main([*options, "--record"]) == 0 and (tmp_path / "corpus.json").read_bytes() == first
    assert corpus.main(options) == 0 and "3.00" in capsys.readouterr().out
    assert corpus.main([*options, "--record", "--times"]) == 0
    assert corpus.main(options) == 0 and "3.00" not in capsys.readouterr().out
    entry = now["plans"]["auto"]["75%"]
    entry.update(schedule="dd")
    assert corpus.main(options) == 0 and "changed, not worse: tied, auto, 75%" in capsys.readouterr().out
    entry.update(cost=0.3)
    assert corpus.main(options) == 1 and "worse: tied, auto, 75%" in capsys.readouterr().out
    data = json.loads(first)
    data["environment"]["versions"]["torch"] = "1.0"
    (tmp_path / "corpus.json").write_text(json.dumps(data))
    assert corpus.main(options) == 2
