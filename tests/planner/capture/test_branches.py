"""A capture takes the branch that the values of integer arguments decide, and serves the calls that decide the same."""

import pytest
import torch
import transformers
from conftest import assert_as_eager, measured_step, model_of, raises
from torch import nn

import ackpt

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


def make_masked(decides=lambda mask: not mask.all()):
    """Branches on its mask, as transformers do; ``decides`` computes from the mask whether to apply it."""

    def forward(self, ids, mask):
        hidden = self.table(ids)
        if self.decides(mask):
            hidden = hidden.sin() * mask.unsqueeze(-1)
        return self.layer(hidden).square().mean()

    return model_of(forward, table=nn.Embedding(10, 8), layer=nn.Linear(8, 8), decides=decides)


def batch(length=6, masked=()):
    mask = torch.ones(4, length, dtype=torch.long)
    for row, column in masked:
        mask[row, column] = 0
    return torch.randint(10, (4, length)), mask


def check(step, model, *args, **kwargs):
    assert_as_eager(model, step, *args, **kwargs, loss=lambda outputs: getattr(outputs, "loss", outputs))


def kinds(step):
    return [event.kind for event in step.history]


def written_later(mask):
    """Of the copy, the first row is not read after the write; the mask itself is not written."""
    copied, is_full = mask.clone(), mask.all()
    copied.t()[:2] -= 1
    return bool(not is_full) or copied[:, 2:].sum() != copied.sum()


def written_data(mask):
    copied = mask * 2
    copied.data[:, 0] = 2
    copied[1:].clamp_(max=1)
    return copied.sum() < copied.numel() + copied.shape[1]


DECIDES = {
    "all": lambda mask: not mask.all(),
    "sum": lambda mask: mask.sum() != mask.numel(),
    "a view": lambda mask: mask.t()[-1].min() < 1,
    "a position": lambda mask: (mask.bool() & (torch.arange(mask.shape[1]) > 2)).sum() < 4 * (mask.shape[1] - 3),
    "a literal": lambda mask: 0 in mask[:, [-1, 0]] * torch.tensor([1, 1]),
    "two outputs": lambda mask: mask.float().min(dim=1).values.amin() < 0.5,
    "written later": written_later,
    "written data": written_data,
}


@pytest.mark.parametrize("name", DECIDES)
def test_every_call_takes_the_branch_of_its_values(name):
    model = make_masked(DECIDES[name])
    full, masked = batch(), batch(masked=[(0, -1), (3, -1)])
    step = ackpt.compile(model, *full, policy="full")
    for args in (full, masked, full, masked):
        check(step, model, *args)
    assert kinds(step) == ["capture"] * 2
    assert "takes by its arguments' values changed at " in step.history[1].cause
    for length in (8, 11, 9):
        for args in (batch(length), batch(length, [(0, -1), (2, -1)])):
            check(step, model, *args)
    assert kinds(step)[2:] == ["dynamic capture"] * 2 + ["plan"] * 4


def written(mask):
    """A random write into a view of the copy."""
    copied = mask.float()
    copied.t()[0].uniform_()
    return (copied > 0).all()


UNKNOWN = {
    "written at random": written,
    "random": lambda mask: (torch.rand_like(mask.float()) < mask).all(),
    "an integer": lambda mask: mask.sum().item() > 3,
    "a list": lambda mask: mask.sum(0).tolist()[0] > 3,
    "lists of truth values": lambda mask: (mask > 0).tolist()[0][0],
    "no truth value": lambda mask: mask.sum(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_reads_of_other_values_are_refused(name):
    with pytest.raises(ackpt.TraceError, match="looks at the values of a tensor at .*test_branches.py"):
        ackpt.trace(make_masked(UNKNOWN[name]), *batch())


def test_branches_on_floats_and_parameters_are_refused():
    model = make_masked()
    model.decides = lambda mask: (model.layer.weight.sum() > 0) & mask.all()
    raises(ackpt.TraceError, "looks at the values of a tensor", lambda: ackpt.trace(model, *batch()))
    ids, mask = batch()
    raises(ackpt.TraceError, "looks at the values of a tensor", lambda: ackpt.trace(make_masked(), ids, mask.float()))


def test_an_error_that_the_values_cause_is_the_models():
    def positive(mask):
        if mask.min() < 0:
            raise ValueError("a negative mask")
        return False

    model, (ids, mask) = make_masked(positive), batch()
    step = ackpt.compile(model, ids, mask, policy="full")
    raises(ValueError, "a negative mask", lambda: step(ids, mask - 2))
    check(step, model, ids, mask)


def test_the_warning_of_many_captures_names_the_fix():
    model = make_masked(lambda mask: sum(bool(row.all()) for row in mask) > 1)
    step = ackpt.compile(model, *batch(), policy="full")
    with pytest.warns(UserWarning, match="because the values of its arguments changed.*Prepare batches that take few"):
        for masked in ([(0, 0)], [(1, 0)], [(2, 0)], [(3, 0)]):
            step(*batch(masked=masked))


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
HF = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2)
    ),
}


@pytest.mark.parametrize("name", HF)
def test_masks_of_transformers_are_captured_per_branch(name):
    model = HF[name]().eval()
    batches = [
        {"input_ids": ids, "attention_mask": mask, "labels": ids} for ids, mask in (batch(8), batch(8, [(1, -1)]))
    ]
    step = ackpt.compile(model, **batches[0], policy="full")
    for given in batches:
        check(step, model, **given)
        measured = measured_step(model, step, loss=lambda outputs: outputs.loss, **given)
        assert measured.dynamic_peak_bytes == step.plan.dynamic_peak_bytes
    assert kinds(step) == ["capture"] * 2
    tied = name == "bert"
    assert (step.plan.note or "").startswith("gradients of bert.embeddings.word_embeddings.weight are sums" * tied)
    assert (step.plan.note is not None) == tied
