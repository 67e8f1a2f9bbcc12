"""Random models of library-like parts: in regions, with offload and planned they are what they are unmodified."""

import pytest
from random_models import check, compare, draw_spec
from random_models.compare import FINDING, difference
from random_models.model import Node, Spec
from random_models.part import CATALOG
from random_models.reduce import smallest
from random_models.training import train
from random_models.variants import plain, variants

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SEEDS = (1, 2, 5, 6, 7, 40, 45, 46, 49, 50, 55, 57, 58)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_differs_without_an_error(seed):
    outcomes = check(draw_spec(seed))
    assert outcomes
    assert [outcome for outcome in outcomes if outcome.kind == FINDING] == []


def test_the_step_in_which_regions_first_leave_calls_out_keeps_its_plan():
    experts = Node("Experts", 170), Node("SequentialSubclass", 558, (Node("Gated", 403), Node("CustomFunctions", 196)))
    spec = Spec(50042, "sequence", (experts, (Node("Gated", 78),)), gives="loss")
    outcomes = check(spec, only="plan in place 0.76")
    assert outcomes and [outcome.kind for outcome in outcomes] == ["equal"]


@pytest.mark.parametrize("name", CATALOG)
def test_every_part_trains_alike_twice(name):
    entry = CATALOG[name]
    inner = (Node("Linear", 1),) * entry.inner[0]
    for kind in entry.kinds:
        spec = Spec(0, kind, ((Node(name, 5, inner),),))
        assert difference(train(spec, plain, 2), train(spec, plain, 2)) is None


def test_a_difference_is_reported():
    spec = Spec(0, "sequence", ((Node("Linear", 1), Node("Noise", 2)),))
    other = Spec(1, "sequence", ((Node("Linear", 1), Node("Noise", 2)),))
    text = difference(train(spec, plain, 2), train(other, plain, 2))
    assert text is not None and text.startswith("step 0: output 0")


def test_a_model_that_fails_in_eager_is_skipped(monkeypatch):
    spec = Spec(0, "sequence", ((Node("Linear", 1),),))
    planned = next(variant for variant in variants(spec) if variant.plans)
    plain_fails = False

    def measured(_, prepare):
        if plain_fails or prepare is not plain:
            raise RuntimeError("Trying to backward through the graph a second time")
        return 0, None

    monkeypatch.setattr(compare, "measured_peak", measured)
    outcomes = check(spec, only=planned.name)
    assert outcomes is not None
    (outcome,) = outcomes
    assert outcome.kind == FINDING and "a second time" in outcome.text
    plain_fails = True
    assert check(spec, only=planned.name) is None


def test_a_finding_is_reduced_to_the_parts_it_needs():
    node = Node("CountsInBuffer", 0)
    spec = Spec(0, "image", ((Node("Linear", 1), Node("Residual", 2, (Node("Views", 3), node))), (node,)), takes="dict")
    found = smallest(spec, lambda smaller: "CountsInBuffer" in smaller.names() and "Views" in smaller.names())
    assert sorted(found.names()) == ["CountsInBuffer", "Views"] and found.takes == "tensors"
