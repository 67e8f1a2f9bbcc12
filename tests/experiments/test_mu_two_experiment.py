"""What the chapter on mu-TWO shows: choices and their consequences, and what the printed pseudocode does instead."""

from dataclasses import replace

import pytest
import torch
from conftest import model_of
from torch import nn

import ackpt
from ackpt.graph import simulate
from ackpt.models import LanguageModel, TransformerConfig
from ackpt.planner.policies.mu_two import evictions
from ackpt.planner.policies.search.frontier import costs
from experiments.mu_two import along_paths, choices, inactive_intervals, intermediates_of, name_of, printed_overhead
from experiments.reports import schematics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chain():
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    graph = ackpt.trace(nn.Sequential(*layers), torch.ones(64, 8))
    return graph, replace(ackpt.profile(graph, "t4"), swap_seconds=None)


@pytest.fixture(scope="module")
def language_model():
    config = TransformerConfig(dim=64, ff_dim=256, layers=2, head_dim=32, vocab_size=64)
    tokens = torch.randint(64, (1024,))
    call = tokens, torch.tensor([0, 1024], dtype=torch.int32), 1024, tokens
    graph = ackpt.trace(LanguageModel(config), *call)
    return graph, ackpt.profile(graph, "h200")


def test_choices_list_their_changes(chain):
    graph, profile = chain
    before, *made = choices(graph, profile)
    assert before.chosen is None and before.recomp_time == {} and before.saved_bytes == 3 * 64 * 8 * 4
    assert [choice.chosen for choice in made] == ["tanh", "tanh_2", "tanh_1"] and not any(c.is_swap for c in made)
    # The second is made from the first, which is gone: it runs both. It is read by the third once that is gone, too.
    one = before.total_recomp_time["tanh_1"]
    assert [c.total_recomp_time["tanh_1"] for c in made[:2]] == pytest.approx([2 * one, 4 * one])
    assert made[-1].recomp_time == pytest.approx({"tanh": one, "tanh_1": 2 * one, "tanh_2": 3 * one})
    assert made[-1].saved_bytes == 0 and len(choices(graph, profile, at_most=1)) == 2


def test_an_inactive_interval_lasts_for_the_inactive_time(language_model):
    data = inactive_intervals(*language_model)
    inactive = {name_of(language_model[0], i): i.inactive_time for i in intermediates_of(*language_model)}
    assert len(data["activations"]) > 10
    for row in data["activations"]:
        assert row["first"] < row["leaves"] < row["needed"] < row["last"] <= data["compute"][-1][2]
        assert row["needed"] - row["leaves"] == pytest.approx(inactive[row["name"]], rel=1e-6)
    phases = "".join(phase for phase, *_ in data["compute"])
    assert phases == phases.count("f") * "f" + phases.count("b") * "b"
    labels = [text.get_text() for text in schematics.inactive_figure(data).axes[0].get_yticklabels()]
    assert labels[0] == "compute" and labels[1].startswith(data["activations"][0]["name"])


def test_peaks_are_those_of_the_policy(chain):
    graph, profile = chain
    peaks = [simulate(graph, profile, schedule).peak_bytes for schedule in evictions(graph, profile)]
    found = choices(graph, profile)
    assert [peak for c in found[1:] for peak in (c.once_bytes, c.each_bytes)] == peaks
    baseline = found[0]
    assert baseline.printed_bytes == baseline.once_bytes == baseline.each_bytes


def test_the_printed_estimate_never_falls(chain):
    printed, once, each = (
        [getattr(choice, name) for choice in choices(*chain)] for name in ("printed_bytes", "once_bytes", "each_bytes")
    )
    assert printed == sorted(printed) and printed[-1] > printed[0]
    assert each[-1] < each[0] and each[-1] <= once[-1]


def test_the_printed_overhead_is_negative_if_compute_covers_more_than_the_copy(language_model):
    graph, profile = language_model
    run_time = costs(graph, profile)
    for each in intermediates_of(graph, profile):
        printed = printed_overhead(each, run_time, graph.boundary)
        hides = sum(run_time[graph.boundary : each.first_bw_access])
        assert (printed < 0) == (hides > each.swap_time)
        if printed > 0:
            assert printed == pytest.approx(each.swap_time - hides)


def test_paths_double_what_sets_add():
    def forward(self, x):
        x = self.linear(x)
        for _ in range(3):
            x = x.sin() * x.exp()
        return x.sigmoid()

    graph = ackpt.trace(model_of(forward, linear=nn.Linear(4, 4)), torch.ones(2, 4))
    every = intermediates_of(graph, ackpt.profile(graph, "t4"))
    by_name = {name_of(graph, each): each for each in every}
    paths = {name: along_paths(every, each) for name, each in by_name.items()}
    own = by_name["mul"].recomp_time
    assert paths["addmm"] == by_name["addmm"].recomp_time
    assert paths["mul"] == pytest.approx(own + paths["sin"] + paths["exp"])
    assert paths["mul_1"] == pytest.approx(own + 2 * (by_name["sin_1"].recomp_time + paths["mul"]))
