"""The chunks of a head: fixed ones by their rules, and those that budgets choose."""

import pytest

from ackpt.core.errors import BudgetError
from experiments.head_chunks import HeadPlan, liger_size, plans, table

FIELDS = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
FIELDS |= {"num_key_value_heads": 1, "use_cache": False}


@pytest.mark.parametrize(
    ("shapes", "size"), [((4096, 3584, 152064), 128), ((16384, 4096, 32000), 2048), ((100, 64, 64), 100)]
)
def test_the_documented_size_of_ligers_chunks(shapes, size):
    assert liger_size(*shapes) == size


def test_smaller_budgets_choose_more_chunks_with_fewer_bytes():
    found = plans(["60%", "30%", "1%"], FIELDS, layers=1, tokens=64)
    baseline, large, small, refused = found
    # In fp32: a copy, its log-softmax, gradient.
    assert baseline.head_bytes == 3 * 4 * 64 * 1024 and baseline.chunks == 1
    assert 1 < large.chunks < small.chunks and isinstance(refused, BudgetError)
    for each in (large, small):
        assert isinstance(each, HeadPlan) and each.head_bytes <= baseline.head_bytes / each.chunks
        assert each.dynamic_peak_bytes <= 0.6 * baseline.dynamic_peak_bytes
    lines = table(found, 64, FIELDS).splitlines()
    assert lines[2].split() == ["TRL", "chunked_nll", "64", "1", "256.0", "KiB", "1.33"]
    assert lines[-1].split() == ["1%", "infeasible"]
