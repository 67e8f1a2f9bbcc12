"""Errors that other libraries read."""

import copy
import pickle

import pytest

from ackpt import BudgetError


def test_a_budget_error_reduces_the_batch_size_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    tried = []

    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 7:
            raise BudgetError("too small", 5, "1GiB")
        return batch_size

    assert accelerate.utils.find_executable_batch_size(train, starting_batch_size=9)() == 7 and tried == [9, 8, 7]


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_budget_error_says_its_message_alone(copied):
    error = copied(BudgetError("too small", 5, "1GiB"))
    assert (str(error), error.least_bytes, error.budget) == ("too small", 5, "1GiB")
    assert isinstance(error, ValueError) and len(error.args) == 1
