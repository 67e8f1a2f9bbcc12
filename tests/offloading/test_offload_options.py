"""The ``offload=`` option of a model: by name or object, in copies and pickles, applied and removed."""

import copy
import pickle

import pytest
import torch
from conftest import assert_equal
from offload_helpers import MODES, SIDE, assert_empty, block, blocks, counts, gradients, matrix, offload
from torch import nn

import ackpt


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_by_name_is_the_default_offload(mode):
    model, x = blocks(3), torch.randn(1 << 10, SIDE)  # as large as min_bytes is, or larger
    chosen = ackpt.offload_saved_tensors(mode)
    chosen.engine.reset_stats()
    other = copy.deepcopy(model)
    assert ackpt.apply_activation_checkpointing(other, offload=mode) == ["0", "1", "2"]
    torch.manual_seed(0)
    model(x).sum().backward()
    torch.manual_seed(0)
    other(x).sum().backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()], "gradient")
    # The batch and two boundaries are saved; the newest one stays.
    assert counts(chosen.engine, "copies_out", "bytes_out") == {"copies_out": 2, "bytes_out": 2 * 4 * SIDE << 10}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("how", ["sync", "async", "object"])
def test_copies_and_pickles_of_a_model_stay_offloaded(how, clone):
    model = nn.Sequential(*(block().eval() for _ in range(4)))
    chosen = offload("async") if how == "object" else how
    ackpt.apply_activation_checkpointing(model, offload=chosen)
    other, x = clone(model), torch.ones(1 << 10, SIDE)
    engine = offload("async").engine
    found = []
    for each in (model, other):
        engine.reset_stats()
        each(x).sum().backward()
        # By name, the newest one stays.
        assert counts(engine, "copies_out") == {"copies_out": 4 if how == "object" else 3}
        found.append(gradients(each))
        assert_empty(engine)
    assert_equal(*found, "gradient")
    assert ackpt.remove_activation_checkpointing(other) == ["0", "1", "2", "3"]
    engine.reset_stats()
    other(x).sum().backward()
    assert counts(engine, "copies_out") == {"copies_out": 0}


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda chosen: pickle.loads(pickle.dumps(chosen))])
def test_copies_of_an_offload_use_the_same_engine(clone):
    chosen = ackpt.offload_saved_tensors("sync", min_bytes=7, keep_last=3, lookahead_bytes=5)
    other = clone(chosen)
    assert other.engine is chosen.engine
    assert (other.min_bytes, other.keep_last, other.lookahead) == (7, 3, 0)
    assert repr(other) == repr(chosen) == "<ackpt offload: sync, store='host'>"


def test_offload_is_switched_by_applying_again():
    model, engine = blocks(3).eval(), offload("sync").engine
    for chosen, copies in ((offload("sync"), 2), (None, 0), (offload("async", keep_last=1), 1)):
        ackpt.apply_activation_checkpointing(model, offload=chosen)
        engine.reset_stats()
        model(matrix().requires_grad_()).sum().backward()
        assert counts(engine, "copies_out") == {"copies_out": copies}
