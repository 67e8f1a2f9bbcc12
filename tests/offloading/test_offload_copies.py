"""Counted copies: each storage is copied once, and no storage that should stay on the device."""

import copy
import pickle

import pytest
import torch
from conftest import Case, assert_equal, assert_same, model_of, plain_call, run_step
from offload_helpers import MODES, SIDE, SIZE, assert_empty, block, blocks, counts, fresh, gradients, matrix, offload
from torch import nn

import ackpt


def saved_in(chosen, function, x):
    """Run forward and backward of `function` over an intermediate result; returns the counts of its copies."""
    expected = run_step(lambda: Case(lambda x: function(x * 2), (x.clone().requires_grad_(),)), plain_call)
    chosen.engine.reset_stats()
    around = lambda: chosen  # noqa: E731
    got = run_step(lambda: Case(lambda x: function(x * 2), (x.clone().requires_grad_(),)), plain_call, around=around)
    assert_same(expected, got)
    assert_empty(chosen.engine)
    return counts(chosen.engine, "copies_out", "bytes_out", "copies_in", "bytes_in", "shared")


def squares(parts):
    return sum(part.square().sum() for part in parts)


ONE_STORAGE = {
    "the tensor itself": lambda y: [y, y, y],
    "views": lambda y: [y, y.t(), y.view(-1), y.unsqueeze(0).expand(2, -1, -1)],
    "columns": lambda y: y.unbind(1)[:4],
    "the whole, then parts": lambda y: [y, *y.chunk(4)],
}


@pytest.mark.parametrize("parts", ONE_STORAGE)
@pytest.mark.parametrize("mode", MODES)
def test_one_storage_is_copied_once(mode, parts):
    found = saved_in(offload(mode), lambda y: squares(ONE_STORAGE[parts](y)), matrix())
    assert (found["copies_out"], found["bytes_out"]) == (1, SIZE)
    assert found["shared"] >= 2
    if parts == "the tensor itself":  # operations that run one after the other bring it back once
        assert (found["copies_in"], found["shared"]) == (1, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_chunks_of_one_storage_are_copied_once_each(mode, count):
    found = saved_in(offload(mode), lambda y: squares(y.view(-1)[: SIDE * 24].chunk(count)), matrix())
    assert found["bytes_out"] <= SIZE and found["bytes_in"] <= count * SIZE
    if count > 2:  # each chunk reaches over less than half, and is a copy of its own
        assert found["bytes_out"] == SIDE * 24 * 4 >= found["bytes_in"]


@pytest.mark.parametrize("mode", MODES)
def test_less_than_half_of_a_storage_is_copied_by_itself(mode):
    found = saved_in(offload(mode), lambda y: squares([y.view(-1)[: SIDE * SIDE // 4], y]), matrix())
    assert (found["copies_out"], found["bytes_out"]) == (2, SIZE + SIZE // 4)


@pytest.mark.parametrize("mode", MODES)
def test_an_input_of_several_regions_is_copied_once(mode):
    chosen = fresh(mode)
    x = matrix().requires_grad_()
    h, mask = x * 2, matrix().gt(0)
    loss = sum(ackpt.checkpoint(lambda a, m: (a * m).sin(), h, mask, offload=chosen).sum() for _ in range(3))
    del h, mask
    assert counts(chosen.engine, "copies_out", "shared") == {"copies_out": 2, "shared": 4}
    loss.backward()
    expected, x.grad = x.grad, None
    h, mask = x * 2, matrix().gt(0)
    sum((h * mask).sin().sum() for _ in range(3)).backward()
    assert torch.equal(x.grad, expected)
    del loss
    assert_empty(chosen.engine)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(matrix(0.1))
        self.frozen = nn.Parameter(matrix(0.2), requires_grad=False)
        self.register_buffer("rope", matrix(0.3))
        self.register_buffer("cache", matrix(0.4), persistent=False)

    def forms(self):
        yield from (self.w, self.w.t(), self.w.detach(), self.w.detach().t(), self.w[:, :SIDE].view(SIDE, SIDE))
        yield from (self.frozen, self.frozen.t(), self.frozen.data, self.rope, self.rope.t(), self.rope.detach()[:])
        yield from (self.cache.expand(SIDE, SIDE), self.cache.view(-1).view(SIDE, SIDE))

    def forward(self, x):
        for form in self.forms():
            x = (x @ form) * form
        return x


def outer():
    return model_of(
        lambda self, x: self.inner(x * self.rope) * self.inner.rope.t(), inner=Weights(), rope=nn.Buffer(matrix(0.5))
    )


@pytest.mark.parametrize("model", [Weights, outer])
@pytest.mark.parametrize("mode", MODES)
def test_parameters_and_buffers_are_never_copied(mode, model):
    model, x = model(), matrix()
    chosen = fresh(mode)
    with chosen:
        y = model(x.requires_grad_())
    # Two activations each for the forms that require grad: what meets w in a product and a matrix product.
    forms = sum(form.requires_grad for form in Weights().forms())
    saved = 2 * forms - (type(model) is Weights)  # there the first matrix product meets the caller's own leaf
    assert counts(chosen.engine, "copies_out") == {"copies_out": saved}
    y.sum().backward()
    expected = model.get_parameter("w" if type(model) is Weights else "inner.w").grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(expected, model.get_parameter("w" if type(model) is Weights else "inner.w").grad)
    del y
    assert_empty(chosen.engine)


@pytest.mark.parametrize("inside", ["region", "context"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_buffers_are_known_in_a_recompute_too(checkpointed, inside):
    def forward(self, x):
        x = self.linear(x)
        if self.inside == "region":
            return ackpt.checkpoint(lambda a, rope: (a * rope).sin(), x, self.rope, offload=offload("sync"))
        with offload("sync"):
            return (x * self.rope).sin()

    model = nn.Sequential(
        *(model_of(forward, linear=nn.Linear(SIDE, SIDE), inside=inside, rope=nn.Buffer(matrix())) for _ in range(3))
    )
    engine = offload("sync").engine
    if checkpointed:
        ackpt.apply_activation_checkpointing(model, ["0", "1", "2"])
    engine.reset_stats()
    model(matrix()).sum().backward()
    assert counts(engine, "copies_out") == {"copies_out": 3}
    assert_empty(engine)


@pytest.mark.parametrize("mode", MODES)
def test_leaves_that_require_grad_stay(mode):
    chosen = fresh(mode)
    x, w = matrix().requires_grad_(), nn.Parameter(matrix())
    with chosen:
        loss = (x.t() * w.t() * x.view(-1).view(SIDE, SIDE)).sum()
    assert counts(chosen.engine, "copies_out") == {"copies_out": 1}  # the first product
    loss.backward()


def sines(x, length):
    for _ in range(length):
        x = x.sin()
    return x.sum()


@pytest.mark.parametrize("keep_last", [0, 1, 3, 9, 99])
@pytest.mark.parametrize("mode", MODES)
def test_the_tail_stays_and_copies_are_counted(mode, keep_last):
    chosen = fresh(mode, keep_last=keep_last)
    x = matrix().requires_grad_()
    with chosen:
        loss = sines(x, 9)  # saves x, which stays anyway, and eight results
    copies = max(0, 8 - keep_last)
    stored = dict.fromkeys(["copies_out", "stored"], copies)
    stored |= dict.fromkeys(["bytes_out", "store_bytes", "store_peak_bytes"], copies * SIZE)
    assert counts(chosen.engine, *stored, "copies_in") == {**stored, "copies_in": 0}
    loss.backward()
    found = counts(chosen.engine, "copies_in", "bytes_in", "found", "just_in_time")
    assert (found["copies_in"], found["bytes_in"]) == (min(copies, found["copies_in"]), found["copies_in"] * SIZE)
    assert found["found"] + found["just_in_time"] == 8
    if mode == "sync":
        assert found["copies_in"] == found["just_in_time"] == copies
    else:  # whatever is still on its way out need not come back; the first one cannot be foreseen
        assert copies - 1 <= found["copies_in"] <= copies
        assert found["just_in_time"] == 0
    assert_empty(chosen.engine)


@pytest.mark.parametrize(("min_bytes", "copies"), [(0, 3), (1, 3), (400, 3), (401, 2), (4096, 2), (4097, 1), (9000, 0)])
def test_smaller_storages_stay(min_bytes, copies):
    chosen = fresh("sync", min_bytes=min_bytes)
    leaves = [torch.ones(size, requires_grad=True) for size in (100, 1024, 2048)]
    with chosen:
        loss = sum((leaf * 2).square().sum() for leaf in leaves)
    assert counts(chosen.engine, "copies_out") == {"copies_out": copies}
    loss.backward()
    assert all(torch.equal(leaf.grad, torch.full_like(leaf, 8)) for leaf in leaves)


def test_a_part_counts_with_its_own_bytes():
    chosen = fresh("sync", min_bytes=1000)
    x = torch.ones(4096, requires_grad=True)
    with chosen:
        y = x * 2
        loss = y[:100].square().sum() + y[1024:1536].square().sum()
    assert counts(chosen.engine, "copies_out", "bytes_out") == {"copies_out": 1, "bytes_out": 2048}
    loss.backward()
    assert x.grad.sum() == 8 * 612


ROWS = {
    "expanded row": (lambda x: x[:1].expand(32, 16), 64),
    "row of a larger tensor": (lambda x: x[3:4].expand(32, 16), 64),
    "expanded number": (lambda x: x[0, 0].expand(32, 16), 4),
    "column": (lambda x: x[:, :1].expand(32, 16), 32 * 64),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_view_is_copied_from_its_first_to_its_last_element(name):
    view, size = ROWS[name]
    chosen = fresh("sync")
    weight, x = torch.ones(32, 16, requires_grad=True), torch.arange(512.0).reshape(32, 16)
    with chosen:
        loss = (view(x.clone()) * weight).sum()
    assert counts(chosen.engine, "copies_out", "bytes_out") == {"copies_out": 1, "bytes_out": size}
    loss.backward()
    assert torch.equal(weight.grad, view(x))


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
