"""The head of a language model in chunks of tokens: equal up to roundings of sums, within the planned bytes."""

import copy

import pytest
import torch
import transformers
from conftest import measured_step, raises
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.graph import rewrite, simulate
from ackpt.planner.capture.chunked_head import chunked
from ackpt.planner.policies.chains.blocks import coarse_chain, fine_chain
from ackpt.planner.policies.chains.substitutes import substituted
from ackpt.planner.schedule.schedule import everything

WORDS = 96
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "use_cache": False}
IDS = torch.randint(WORDS, (3, 8), generator=torch.Generator().manual_seed(0))
LABELS = IDS.where(torch.arange(8) % 3 > 0, -100)
BATCH = {"input_ids": IDS, "labels": LABELS}
FP32 = 4e-6  # the largest difference of a gradient from eager's, as a fraction of its largest element


class Own(nn.Module):
    """A model with a loss of its own, ``loss(logits [3, 8, 96], targets [3, 8])``."""

    def __init__(self, loss, bias=False):
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=bias), loss

    def forward(self, tokens, targets):
        return self.loss(self.head(self.embedding(tokens).tanh()), targets)


def flat(logits, targets, **options):
    return F.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1), **options)


def gathered(logits, targets):
    counted = (targets != -100).float()
    log = logits.float().log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(log * counted).sum() / counted.sum()


def normalizer(logits, targets):
    """Log-sum-exp written out."""
    log = logits - logits.logsumexp(-1, keepdim=True)
    chosen = log.gather(-1, targets.clamp(min=0).unsqueeze(-1))[..., 0:1].squeeze(-1)
    return -torch.where(targets == -100, 0.0, chosen).sum() / 20


def entropy_bonus(logits, targets):
    log = logits.log_softmax(-1)
    return flat(logits, targets) - 0.1 * -(log.exp() * log).sum(-1).mean()


def of_targets(logits, targets):
    return logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def clipped(logits, targets):
    """PPO's loss, with an advantage for each sequence."""
    advantages, counted = torch.linspace(-1, 1, logits.shape[0])[:, None], (targets != -100).float()
    ratio = (of_targets(logits, targets) + 4).exp()
    chosen = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(chosen * counted).sum() / counted.sum()


def teacher(logits):
    return torch.linspace(-2, 2, logits.numel()).sin().view_as(logits)


def reverse_kl(logits, targets):
    log = logits[:, :-1].log_softmax(-1)
    return (log.exp() * (log - teacher(logits)[:, :-1].log_softmax(-1))).sum(-1).mean()


def preferred(logits, targets):
    """DPO's loss: sums over sequences."""
    sums = (of_targets(logits[:, :-1], targets[:, 1:]) * (targets[:, 1:] != -100)).sum(-1)
    return -F.logsigmoid(0.1 * (sums[:1] - sums[1:])).mean()


def transducer(logits, targets):
    """Like RNN-T's: a lattice of tokens, and a recursion over the results of all of them."""
    lattice = logits.log_softmax(-1)
    paths = lattice[..., 0].cumsum(1).logsumexp(2) + lattice[..., 1].cumsum(2)[..., -1]
    return -paths[:, -1].mean()


TWICE = (preferred, transducer)  # backward reads what sums over tokens lead to: logits are computed again
WEIGHT = torch.linspace(0.5, 2, WORDS)
OWN = {
    "shifted": lambda logits, targets: flat(logits[..., :-1, :].contiguous(), targets[..., 1:]),
    "mean_of_tokens": lambda logits, targets: flat(logits, targets, reduction="none").mean(),
    "capped": lambda logits, targets: flat(30 * torch.tanh(logits / 30), targets, reduction="sum") / 7 + 1,
    "weighted": lambda logits, targets: flat(logits, targets, weight=WEIGHT),
    "smoothed": lambda logits, targets: flat(logits, targets, label_smoothing=0.1, weight=WEIGHT),
    "z_loss": lambda logits, targets: flat(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean(),
    "squared": lambda logits, targets: logits.softmax(-1).square().mean() + logits.var(-1).mean(),
    "forward_kl": lambda logits, targets: F.kl_div(
        logits.log_softmax(-1), (30 * teacher(logits)).softmax(-1), reduction="batchmean"
    ),
    **{each.__name__: each for each in (flat, gathered, normalizer, entropy_bonus, clipped, reverse_kl, *TWICE)},
}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def bert():
    sizes = {name: size for name, size in SIZES.items() if name != "use_cache"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def gemma():
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=5.0)
    return transformers.Gemma2ForCausalLM(config)


MODELS = {"llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "bert": bert, "gemma": gemma}


def built(name):
    torch.manual_seed(0)
    if name in MODELS:
        return MODELS[name](), dict(BATCH, **({"num_items_in_batch": torch.tensor(11)} if name == "gemma" else {}))
    shape = (3, 2, 4) if name == "transducer" else (3, 8)
    return Own(OWN[name.removesuffix("-bias")], name.endswith("-bias")), (IDS.view(shape), LABELS.view(shape))


def loss_of(model, batch):
    outputs = model(*batch) if isinstance(batch, tuple) else model(**batch)
    return outputs.mean() if isinstance(outputs, torch.Tensor) else outputs.loss


def gradients(model, batch, autocast=False):
    """The loss, and the gradients of three times the loss."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model, batch)
    (3 * loss).backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def difference(one, other) -> float:
    """The largest difference of two sets of gradients, as a fraction of the largest element of the same gradient.

    Gradients that are roundings themselves, as those of keys' biases, count as a thousandth of the largest.
    """
    assert one.keys() == other.keys()
    sizes = {name: each.abs().max().item() for name, each in other.items()}
    least = 1e-3 * max(sizes.values())
    return max((one[name] - other[name]).abs().max().item() / max(size, least) for name, size in sizes.items())


@pytest.mark.parametrize("name", [*MODELS, *OWN, "flat-bias", "shifted-bias"])
@pytest.mark.parametrize("count", [3, 24])
def test_every_number_of_chunks_keeps_its_bytes(name, count):
    model, batch = built(name)
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    graph = ackpt.trace(model, *args, **kwargs)
    small = chunked(graph, count)
    rewrite(small, everything(small))  # raises if another number of bytes is live after any operation
    profiles = [ackpt.profile(each, workspace="measured") for each in (graph, small)]
    before, after = (simulate(one, its, everything(one)) for one, its in zip((graph, small), profiles))
    assert small.head_chunks >= (min(count, 6) if name == "transducer" else count)
    assert after.peak_bytes <= before.peak_bytes
    again = 2 * IDS.numel() * 16 * WORDS if name in [each.__name__ for each in TWICE] else 0
    assert after.flops == before.flops + again  # otherwise no product runs twice


@pytest.mark.parametrize("name", [*MODELS, *OWN, "flat-bias", "shifted-bias"])
def test_the_step_differs_by_roundings_and_keeps_its_peak(name):
    model, batch = built(name)
    loss, expected = gradients(model, batch)
    step = ackpt.apply_budget(model, batch, "1GiB", chunk_head=True)
    assert step.plan.head_chunks > 1 and f"{step.plan.head_chunks} chunks of tokens" in step.plan.note
    planned_loss, planned = gradients(model, batch)
    assert abs(planned_loss - loss) <= 5e-7 * abs(loss)
    assert difference(planned, expected) < FP32
    assert measured_step(model, loss_of, model, batch).dynamic_peak_bytes == step.plan.dynamic_peak_bytes


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_in_half_precision_it_is_as_far_from_single_precision_as_eager_is(name, how):
    model, batch = built(name)
    _, exact = gradients(model, batch)
    model = model.to(torch.bfloat16) if how == "bfloat16" else model
    _, expected = gradients(model, batch, how == "autocast")
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        ackpt.apply_budget(model, batch, "1GiB", chunk_head=True)
    _, planned = gradients(model, batch, how == "autocast")
    exact = {name: each.to(expected[name].dtype) for name, each in exact.items()}
    assert difference(planned, exact) < 1.5 * difference(expected, exact)
    assert 0 < difference(planned, expected) < 0.05


def test_without_a_token_that_counts_gradients_are_zero_as_in_eager():
    model, (tokens, targets) = built("flat")
    targets = torch.full_like(targets, -100)
    _, expected = gradients(model, (tokens, targets))
    ackpt.apply_budget(model, (tokens, targets), "1GiB", chunk_head=True)
    loss, planned = gradients(model, (tokens, targets))
    assert loss.isnan() and all(torch.equal(planned[name], expected[name]) for name in expected)
    assert not any(each.any() for each in planned.values())


def test_a_second_backward_gives_the_same_gradients():
    model, batch = built("flat-bias")
    ackpt.apply_budget(model, batch, "1GiB", chunk_head=True)
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    first = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    (2 * loss).backward()
    assert all(torch.equal(each.grad, 2 * first[name]) for name, each in model.named_parameters())


def test_frozen_parts_get_no_gradient():
    for frozen in ("embedding", "head"):
        model, batch = built("flat-bias")
        getattr(model, frozen).requires_grad_(False)
        _, expected = gradients(model, batch)
        ackpt.apply_budget(model, batch, "1GiB", chunk_head=True)
        _, planned = gradients(model, batch)
        assert difference(planned, expected) < FP32


def large(loss=flat):
    torch.manual_seed(0)
    model = Own(loss)
    return model, (IDS.repeat(1, 8)[:2, :32].contiguous(), LABELS.repeat(1, 8)[:2, :32].contiguous())


def test_the_budget_decides_how_many_chunks_there_are():
    model, batch = large()
    with pytest.raises(ackpt.BudgetError):
        ackpt.compile(model, *batch, budget=0.5)
    assert ackpt.compile(model, *batch, budget=0.99, chunk_head="auto").plan.head_chunks == 1
    counts = [ackpt.compile(model, *batch, budget=share, chunk_head="auto").plan.head_chunks for share in (0.6, 0.4)]
    assert 1 < counts[0] < counts[1]
    plan = ackpt.compile(model, *batch, budget=0.4, chunk_head=True).plan
    assert plan.head_chunks == counts[1] and plan.dynamic_peak_bytes <= 0.4 * plan.baseline_dynamic_peak_bytes
    with pytest.raises(ackpt.BudgetError, match="smallest feasible budget"):
        ackpt.compile(model, *batch, budget=0.05, chunk_head=True)


@pytest.mark.parametrize("cut", [fine_chain, coarse_chain])
def test_what_chunks_add_up_in_is_saved_in_every_schedule(cut):
    """The gradient of the head's weight: the first chunk allocates it, later ones add to it."""
    model, batch = built("llama")
    graph = chunked(ackpt.trace(model, **batch), 3)
    profile = ackpt.profile(graph)
    found = substituted(graph, cut(graph), profile)
    assert len({simulate(graph, profile, each).peak_bytes for each in found}) > 1


def test_another_size_has_its_own_capture():
    model, batch = large()
    step = ackpt.apply_budget(model, batch, 0.5, chunk_head=True)
    shorter = tuple(each[:, :20].contiguous() for each in batch)
    _, planned = gradients(model, shorter)
    assert step.plan.head_chunks > 1 and [event.kind for event in step.history] == ["capture", "capture"]
    ackpt.remove_budget(model)
    assert difference(planned, gradients(model, shorter)[1]) < FP32


def test_a_saved_plan_has_its_chunks(tmp_path):
    model, batch = large()
    plan = ackpt.compile(model, *batch, budget=0.5, chunk_head=True).plan
    plan.save(tmp_path / "plan.json")
    step = ackpt.compile(model, *batch, plan=ackpt.Plan.load(tmp_path / "plan.json"))
    assert step.plan.head_chunks == plan.head_chunks > 1
    step(*batch).backward()
    raises(ackpt.PlanError, "valid only for the sizes", lambda: step(*(each[:, :20].contiguous() for each in batch)))


def test_reading_the_missing_logits_is_an_error():
    model, batch = built("llama")
    ackpt.apply_budget(model, batch, "1GiB", chunk_head=True)
    outputs = model(**batch)
    assert outputs.logits.shape == (3, 8, WORDS) and outputs.logits.dtype == torch.float32
    assert outputs.logits.float() is outputs.logits and "chunk_head" in repr(outputs.logits)
    for read in (lambda x: x.argmax(-1), lambda x: x[0], lambda x: torch.softmax(x, -1), lambda x: x + 1):
        with pytest.raises(RuntimeError, match="does not compute: its head runs in chunks"):
            read(outputs.logits)
    outputs.loss.backward()
    with torch.no_grad():
        assert model(**batch).logits.argmax(-1).shape == (3, 8)


def cumulated(logits, targets):
    return flat(logits.cumsum(1), targets)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda logits, targets: flat(F.dropout(logits, 0.1), targets), "random"),
        (lambda logits, targets: F.cross_entropy(logits.mT, targets), "mixes tokens with other dimensions"),
        (cumulated, "along the dimension of the tokens.*aten.cumsum"),
        (lambda logits, targets: flat(logits - logits.mean(), targets), "reads a sum over all tokens.*aten.sub"),
        (lambda logits, targets: flat(logits.softmax(0), targets), "along the dimension of the tokens.*aten._softmax"),
        (lambda logits, targets: flat(logits[1:], targets[1:]), "leaves out sequences.*aten.slice"),
        (lambda logits, targets: flat(logits[:, ::2], targets[:, ::2]), "every other token.*aten.slice"),
        (lambda logits, targets: flat(logits.flip(1), targets), "along the dimension of the tokens.*aten.flip"),
        (lambda logits, targets: flat(logits * logits[:, :1], targets), "combines rows of different tokens.*aten.mul"),
        (lambda logits, targets: flat(logits.renorm(2, -1, 1.0), targets), "not known to compute"),
        (lambda logits, targets: (logits.transpose(1, 2) @ logits).mean(), "no linear layer.*aten.bmm"),
    ],
)
def test_unknown_heads_are_refused_by_name(loss, named):
    model, batch = large(loss)
    with pytest.raises(ackpt.TraceError, match=f"chunk_head cannot split the head of this model.*{named}"):
        ackpt.compile(model, *batch, budget=0.9, chunk_head=True)


def test_an_infeasible_budget_says_why_there_are_no_chunks():
    model, batch = large(cumulated)
    assert ackpt.compile(model, *batch, budget=0.999, chunk_head="auto").plan.head_chunks == 1
    with pytest.raises(ackpt.BudgetError, match="smallest feasible.*cannot split the head"):
        ackpt.compile(model, *batch, budget=0.1, chunk_head="auto")


def test_a_model_that_returns_logits_is_refused():
    with pytest.raises(ackpt.TraceError, match="a model that returns its loss"):
        ackpt.compile(nn.Linear(4, 4), torch.ones(2, 4), budget=0.9, chunk_head=True)


def test_a_model_may_return_small_results_for_each_token():
    """The loss is computed in the loop, as in reinforcement learning."""
    model, batch = large(of_targets)
    _, expected = gradients(model, batch)
    ackpt.apply_budget(model, batch, 0.8, chunk_head=True)
    assert difference(gradients(model, batch)[1], expected) < FP32


def test_in_float16_a_scaled_loss_is_scaled_before_the_backward_of_its_chunks():
    model, batch = large()
    exact = gradients(model, batch)[1]
    model = model.half()
    plan = ackpt.apply_budget(model, batch, "1GiB", chunk_head=True).plan
    loss_of(model, batch).mul(3 * 2**14).backward()
    planned = {name: each.grad.float() / 2**14 for name, each in model.named_parameters()}
    assert plan.head_chunks > 1 and difference(planned, exact) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_head": 8}, "must be True, False or 'auto'"),
        ({"budget": None}, "needs a budget"),
        ({"dynamic": True}, "leave dynamic out"),
        ({"regions": True}, "leave regions out"),
        ({"outputs": "keep"}, "leave outputs='keep' out"),
    ],
)
def test_options_that_exclude_it_are_refused_before_any_work(options, message):
    raises(ValueError, message, lambda: ackpt.compile(*large()[:1], **{"budget": 0.9, "chunk_head": True, **options}))


def test_a_budget_that_needs_no_chunks_changes_no_bit():
    model, batch = built("flat")
    copied = copy.deepcopy(model)
    assert ackpt.apply_budget(model, batch, "1GiB", chunk_head="auto").plan.note is None
    assert all(map(torch.equal, *(gradients(each, batch)[1].values() for each in (model, copied))))


def test_a_slowdown_bounds_the_cost_of_chunks_too():
    model, batch = large()
    with pytest.raises(ackpt.BudgetError, match="slowdown=0.001 allows 0.1%"):
        ackpt.compile(model, *batch, budget=0.5, slowdown=0.001, chunk_head=True)


def test_the_backend_of_torch_compile_has_the_option():
    model, batch = large()
    plans = []
    options = {"budget": 0.5, "chunk_head": True, "on_plan": plans.append}
    torch.compile(model, backend="ackpt", options=options)(*batch).backward()
    assert plans[0].head_chunks > 1
    with pytest.raises(ValueError, match="compiler='eager'"):
        torch.compile(model, backend="ackpt", options={**options, "compiler": "inductor"})(*batch)


def test_logits_may_be_a_sum_of_two_products():
    class Adapted(Own):
        def __init__(self):
            super().__init__(flat)
            self.low, self.high = nn.Linear(16, 2, bias=False), nn.Linear(2, WORDS, bias=False)

        def forward(self, tokens, targets):
            hidden = self.embedding(tokens)
            return flat(self.head(hidden) + self.high(self.low(hidden)), targets)

    model, batch = Adapted(), (IDS, LABELS)
    _, expected = gradients(model, batch)
    plan = ackpt.apply_budget(model, batch, 0.7, chunk_head=True).plan
    assert difference(gradients(model, batch)[1], expected) < FP32
    assert measured_step(model, loss_of, model, batch).dynamic_peak_bytes <= plan.dynamic_peak_bytes
