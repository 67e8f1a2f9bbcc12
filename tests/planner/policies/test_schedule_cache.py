"""A cache on disk: the same plan with and without it, no second search, and damaged files replaced with a warning."""

import dataclasses
import functools
import gzip
import multiprocessing
import pickle

import pytest
import torch
from forked import start_method
from torch import nn

import ackpt
from ackpt.planner.policies import auto, manual
from ackpt.planner.policies.search import schedule_cache


def model(width=16, depth=3):
    layers = [(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for _ in range(depth)]
    return nn.Sequential(*(layer for block in layers for layer in block))


X = torch.ones(64, 8)


@functools.cache
def captured():
    return ackpt.trace(model(), X)


def graph():
    """The graph of the model, as another capture has it: searches are remembered for a graph, not for equal ones."""
    return dataclasses.replace(captured())


@pytest.fixture
def searches(monkeypatch):
    """The number of searches so far, in a list of one."""
    count = [0]

    def counting(function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            count[0] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(auto, "candidates", counting(auto.candidates))
    monkeypatch.setattr(manual, "schedule", counting(manual.schedule))
    return count


def test_a_second_run_does_not_search_and_has_the_same_plan(tmp_path, searches):
    folder = tmp_path / "new" / "cache"
    plans = [ackpt.compile(model(), X, budget=0.75, cache=cache).plan for cache in (None, folder, folder, str(folder))]
    assert searches == [2]  # without the cache, and the first time with it
    assert len({plan.save(tmp_path / "plan.json").read_text() for plan in plans}) == 1 and plans[0].cost > 0
    assert len(list(folder.iterdir())) == 1


def test_one_search_of_auto_serves_all_budgets(tmp_path, searches):
    for budget in (0.9, 0.8, 0.75, "1MB"):
        plan = ackpt.plan(graph(), budget, cache=tmp_path)
        assert plan == ackpt.plan(graph(), budget)
    assert searches[0] == 1 + 3  # the last budget needs no search


def test_other_policies_are_stored_for_their_limit_and_options(tmp_path, searches):
    for budget, name in ((1.0, "tanh"), (1.0, "tanh"), (0.99, "tanh"), (0.99, "tanh_1"), (1.0, "tanh")):
        options = {"fates": {name: "recomputed"}}
        plan = ackpt.plan(graph(), budget, "manual", cache=tmp_path, **options)
        assert plan == ackpt.plan(graph(), budget, "manual", **options)
    assert searches[0] == 3 + 5


def test_lengths_of_a_dynamic_capture(tmp_path, searches):
    plans = []
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        step = ackpt.compile(model(), X, budget=0.75, cache=cache)
        plans.append([step.prepare(torch.ones(rows, 8)) for rows in (64, 48, 128, 32)])
    assert plans[0] == plans[1] == plans[2]
    assert searches[0] == 2  # without a cache, and to fill it: the fixed capture's search serves the dynamic one, too


@pytest.mark.parametrize("change", ["width", "profile", "torch", "ackpt", "module names", "optimizer"])
def test_the_key_has_every_input_of_a_search(tmp_path, monkeypatch, change):
    def planned(net, **kwargs):
        optimizer = kwargs.pop("optimizer", None)
        ackpt.plan(ackpt.trace(net, X, optimizer=optimizer), 0.75, cache=tmp_path, **kwargs)
        return len(list(tmp_path.iterdir()))

    net = model()
    assert planned(net) == 1 and planned(net) == 1
    if change == "width":
        assert planned(model(width=24)) == 2
    elif change == "profile":
        assert planned(net, profile=ackpt.profile(ackpt.trace(net, X), "h200", workspace="measured")) == 2
    elif change == "module names":
        assert planned(nn.Sequential(net)) == 2
    elif change == "optimizer":
        assert planned(net, optimizer=torch.optim.Adam(net.parameters())) == 2
    else:
        monkeypatch.setattr(torch if change == "torch" else schedule_cache, "__version__", "0.0.1")
        assert planned(net) == 2


DAMAGES = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "text": lambda data: b"a plan",
    "other JSON": lambda data: gzip.compress(b"[1, 2]"),
    "a pickle": lambda data: pickle.dumps({"schema": "ackpt.schedules"}),
    "changed": lambda data: gzip.compress(gzip.decompress(data).replace(b'"saved": [', b'"saved": [0, ', 1)),
    "another version": lambda data: gzip.compress(gzip.decompress(data).replace(b'"version": 1', b'"version": 0', 1)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_replaced_with_one_warning(tmp_path, searches, damage):
    expected = ackpt.plan(graph(), 0.75, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    intact = file.read_bytes()
    file.write_bytes(DAMAGES[damage](intact))
    assert file.read_bytes() != intact
    with pytest.warns(UserWarning, match=f"{file.name} is damaged .* ignored and replaced") as warned:
        assert ackpt.plan(graph(), 0.75, cache=tmp_path) == expected
    assert len(warned) == 1 and searches == [2]
    assert file.read_bytes() == intact  # the same bytes, in one step
    assert ackpt.plan(graph(), 0.75, cache=tmp_path) == expected and searches == [2]


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for cache in (file, file / "below"):
        with pytest.raises(ackpt.RecordError, match=r"cache='.*file.*' is not a writable folder.*leave cache out"):
            ackpt.compile(model(), X, budget=0.75, cache=cache)
        net = model()
        with pytest.raises(ackpt.RecordError, match="cache="):
            ackpt.apply_budget(net, X, 0.75, cache=cache)
        assert net._compiled_call_impl is None
    with pytest.raises(TypeError, match="cache must be a folder.*got int"):
        ackpt.compile(model(), X, budget=0.75, cache=3)  # pyright: ignore
    with pytest.raises(TypeError, match="'cache' is not an option of a policy: pass it as an argument"):
        ackpt.compile(model(), X, budget=0.75, options={"cache": str(tmp_path)})


def test_a_file_that_cannot_be_written_later_is_a_warning(tmp_path, monkeypatch):
    def full(path, data):
        raise ackpt.RecordError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(schedule_cache, "write_bytes_atomic", full)
    with pytest.warns(UserWarning, match="not in the cache: cannot write .*No space left"):
        plan = ackpt.plan(graph(), 0.75, cache=tmp_path)
    assert plan == ackpt.plan(graph(), 0.75)


def _run(folder, start, plans):
    start.wait()
    plans.put(ackpt.compile(model(), X, budget=0.75, cache=folder).plan.cost)


def test_processes_share_a_folder(tmp_path):
    context = multiprocessing.get_context(start_method())
    start, plans = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_run, args=(str(tmp_path), start, plans)) for _ in range(2)]
    for process in processes:
        process.start()
    costs = {plans.get(timeout=300) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert costs == {ackpt.plan(graph(), 0.75).cost}
    assert [file.suffix for file in tmp_path.iterdir()] == [".gz"]  # and no temporary file
