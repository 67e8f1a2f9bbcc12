"""Planning and steps leave the user's objects as the model's own step does, and backward keeps the budget or raises."""

import contextlib
import dataclasses

import pytest
import torch
from conftest import assert_equal, model_of, raises
from torch import nn
from torch.func import functional_call

import ackpt

pytestmark = [
    pytest.mark.usefixtures("one_thread", "seeded"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch hides it elsewhere
]


def body(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


UPSTREAM = {
    "saves nothing": lambda data, outer: data + outer,
    "saves its result": lambda data, outer: torch.tanh(data + outer),
    "a leaf": lambda data, outer: outer.expand(len(data), 8).detach().requires_grad_(),
}
MODELS = {"plain": (body, "1GiB"), "writes into its input": (lambda: body(nn.ReLU(inplace=True)), "1GiB")}


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_flow_into_the_graph_of_an_argument(name, upstream, dynamic):
    if name == "writes into its input" and upstream != "saves nothing":
        pytest.skip("eager mode refuses it")
    make, budget = MODELS[name]
    model, outer, batches = make(), nn.Parameter(torch.ones(8)), [torch.randn(rows, 8) for rows in (4, 6, 9, 9)]

    def gradients(call):
        found = []
        for batch in batches:
            model.zero_grad()
            outer.grad = None
            x = UPSTREAM[upstream](batch, outer)
            call(x).square().mean().backward()
            found += [outer.grad, x.grad if x.is_leaf else None, *(p.grad for p in model.parameters())]
        return [each for each in found if each is not None]

    expected = gradients(model)
    step = ackpt.compile(model, UPSTREAM[upstream](batches[0], outer), budget=budget, dynamic=dynamic)
    assert_equal(expected, gradients(step), "gradient")


STEPS = (8, 6, 9, 4)  # the third captures the step with dynamic sizes


def rows(count):
    return torch.linspace(-1, 1, count * 16).view(count, 16)


def layers(*, last=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, last))


def budgeted(model, x):
    ackpt.apply_budget(model, x, budget="1MiB")
    return model


def of_fraction(model, x):
    return ackpt.compile(model, x, budget=1.0)


def every_size(model, x):
    return ackpt.compile(model, x, budget="1MiB", dynamic=False)


def as_backend(model, x):
    return torch.compile(model, backend="ackpt", options={"budget": 1.0})


PREPARED = [budgeted, of_fraction, every_size, as_backend]


def trained_by_hooks(register, prepare):
    """Parameters after steps whose hooks run the optimizers, and how often a hook ran."""
    model, calls, kept = layers(), [], []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def step(*_, optimizer=optimizer):
            calls.append(1)
            optimizer.step()
            optimizer.zero_grad()

        kept.append(register(parameter, step))
    call = prepare(model, torch.zeros(8, 16))
    for count in STEPS:
        call(rows(count)).square().mean().backward()
    return [p.detach() for p in model.parameters()], len(calls)


def of_accumulator(parameter, step):
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    accumulator.register_hook(step)
    return accumulator


def after_accumulation(parameter, step):
    return parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.filterwarnings("ignore:the budget '1MiB' does not count the state of SGD")
@pytest.mark.parametrize("prepare", PREPARED)
@pytest.mark.parametrize("register", [of_accumulator, after_accumulation])
def test_hooks_of_parameters_run_once_a_step(register, prepare):
    expected, calls = trained_by_hooks(register, lambda model, x: model)
    found, times = trained_by_hooks(register, prepare)
    assert calls == times == 16
    assert_equal(expected, found, "parameter")


def of_all_outputs(model, x):
    return ackpt.compile(model, x, policy="full", differentiate="all")


def test_hooks_of_unused_parameters_do_not_run():
    def calls_of_hooks(prepare):
        torch.manual_seed(0)
        model = model_of(
            lambda self, x: ((self.linear(x) * self.statistic.detach()).sum(), self.returned),
            linear=nn.Linear(16, 4),
            statistic=nn.Parameter(torch.ones(4)),
            returned=nn.Parameter(torch.ones(4)),
        )
        calls = {}
        accumulators = {name: p.expand_as(p).grad_fn.next_functions[0][0] for name, p in model.named_parameters()}
        for name, accumulator in accumulators.items():
            accumulator.register_prehook(lambda gradients, name=name: calls.update({name: calls.get(name, 0) + 1}))
        call = prepare(model, torch.zeros(8, 16))
        for count in STEPS:
            model.zero_grad()
            loss, returned = call(rows(count))
            (loss + returned.sum()).backward()
        return calls, [parameter.grad for parameter in model.parameters()]

    (expected, gradients), (calls, of_plan) = map(calls_of_hooks, (lambda model, x: model, of_all_outputs))
    assert expected == calls == {"linear.weight": 4, "linear.bias": 4, "returned": 4}
    assert_equal(gradients, of_plan, "gradient")


class Fused(torch.autograd.Function):
    """Adds the weight's gradient to an attribute of it in backward, and counts its calls in a global."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        Fused.calls += 1
        ctx.weight.main_grad.add_(gradient.t() @ x)
        return gradient @ ctx.weight, None


def test_a_function_that_writes_into_an_attribute_of_a_parameter_is_refused_without_a_trace():
    weight = nn.Parameter(torch.randn(16, 16) / 4)
    weight.main_grad = torch.zeros(16, 16)
    fusing = model_of(lambda self, x: x + Fused.apply(x, self.weight).tanh(), weight=weight)
    model, x = nn.Sequential(fusing, nn.Linear(16, 1)), rows(8)
    model[1].weight.grad = torch.ones(1, 16)
    with pytest.raises(ackpt.TraceError):
        ackpt.compile(model, x, policy="full")
    assert not model[0].weight.main_grad.any() and type(model[0].weight.main_grad) is torch.Tensor
    assert torch.equal(model[1].weight.grad, torch.ones(1, 16)) and model[0].weight.grad is None
    model(x).sum().backward()
    assert model[0].weight.main_grad.any()


COUNTED = {"calls": 0}


def count_in_a_dict(ctx):
    COUNTED["calls"] += 1


def count_in_the_class(ctx):
    Effect.calls += 1


def count_at_the_parameter(ctx):
    ctx.weight.calls = getattr(ctx.weight, "calls", 0) + 1


class Effect(torch.autograd.Function):
    calls, kind = 0, count_in_a_dict

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        Effect.kind(ctx)
        return gradient * ctx.weight, None


@pytest.mark.parametrize("kind", [count_in_a_dict, count_in_the_class, count_at_the_parameter])
def test_a_backward_with_effects_outside_of_the_graph_is_refused(monkeypatch, kind):
    monkeypatch.setattr(Effect, "kind", kind)
    model = model_of(
        lambda self, x: self.layer(Effect.apply(x, self.weight)).square().mean(),
        weight=nn.Parameter(torch.ones(16)),
        layer=nn.Linear(16, 1),
    )
    with pytest.raises(ackpt.TraceError, match="calls'.* which a captured step would not repeat"):
        ackpt.compile(model, rows(4), policy="full")
    assert COUNTED["calls"] == Effect.calls == 0 and not hasattr(model.weight, "calls")


@pytest.mark.parametrize("prepare", PREPARED)
def test_fast_weights_have_their_own_gradients(prepare):
    def gradients(prepare):
        model = layers()
        call = prepare(model, rows(8))
        found = []
        for count in STEPS:
            fast = {name: parameter - 0.1 for name, parameter in model.named_parameters()}
            model.zero_grad()
            functional_call(call, fast, (rows(count),)).square().mean().backward()
            found += [parameter.grad for parameter in model.parameters()]
        return found

    def named(model, x):
        call = prepare(model, x)
        if isinstance(call, torch._dynamo.eval_frame.OptimizedModule):
            return nn.ModuleDict({"_": call})["_"]._orig_mod  # functional_call names parameters of the model itself
        return call

    assert_equal(gradients(lambda model, x: model), gradients(named), "gradient")


@pytest.mark.parametrize("prepare", [budgeted, of_fraction])
def test_gradients_and_random_numbers_are_as_before_after_planning(prepare):
    model = nn.Sequential(layers(last=16), nn.Dropout(0.5), nn.BatchNorm1d(16))
    model[0][0].weight.grad = torch.ones(64, 16)
    before = [*(tensor.clone() for tensor in model.state_dict().values()), torch.get_rng_state()]
    call = prepare(model, rows(8))
    for count in STEPS[1:]:
        if hasattr(call, "prepare"):
            call.prepare(rows(count))
    assert_equal(before, [*model.state_dict().values(), torch.get_rng_state()], "state")
    assert torch.equal(model[0][0].weight.grad, torch.ones(64, 16)) and model[0][2].weight.grad is None


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_ddp_with_a_static_graph_is_bit_equal(tmp_path):
    def gradients(prepare):
        model = layers()
        prepare(model, torch.zeros(4, 16))
        call, found = nn.parallel.DistributedDataParallel(model, static_graph=True), []
        for count in (5, 4, 7, 4):
            call(rows(count)).square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return found

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        expected = gradients(lambda model, x: model)
        found = gradients(lambda model, x: ackpt.apply_budget(model, x, budget="1MiB", accumulation=True))
    finally:
        torch.distributed.destroy_process_group()
    assert_equal(expected, found, "gradient")


def test_no_copy_of_the_parameters_at_a_new_size():
    """Planning allocates less than the parameters take, as the profiler of torch's allocator counts it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))
    step = ackpt.compile(model, torch.randn(8, 512), budget="20MiB", dynamic={"input": {0: (2, 64)}})
    x = torch.randn(16, 512)
    with torch.profiler.profile(profile_memory=True) as profiled:
        step.prepare(x)
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak < 512 * 512 * 4


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)), nn.Linear(64, 1))


@pytest.mark.parametrize(("budget", "is_kept"), [(0.7, False), ("10MB", True)])
def test_an_existing_gradient_of_an_argument_counts(budget, is_kept):
    model, x = deep(), torch.randn(256, 64, requires_grad=True)
    step = ackpt.compile(model, x, budget=budget)
    step(x).sum().backward()
    model.zero_grad()
    loss = step(x).sum()
    with contextlib.nullcontext() if is_kept else pytest.raises(ackpt.BudgetError, match="64.0 KiB of gradients"):
        loss.backward()


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))


def accumulated(step, model, x):
    for _ in range(2):
        step(x).sum().backward()


def twice_differentiated(step, model, x):
    torch.autograd.grad(step(x).sum(), next(model.parameters()), create_graph=True)


def retained(step, model, x):
    step(x).sum().backward(retain_graph=True)


def retained_and_repeated(step, model, x):
    loss = step(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


USES = [
    (accumulated, ackpt.BudgetError, "(back|for)ward begins while .* of gradients exist"),
    (twice_differentiated, RuntimeError, "create_graph=True: a planned step cannot be differentiated twice"),
    (retained, ackpt.BudgetError, "of activations stay allocated because of retain_graph=True"),
    (retained_and_repeated, ackpt.BudgetError, "retain_graph=True"),
]


@pytest.mark.parametrize(("use", "error", "message"), USES)
@pytest.mark.parametrize("recomputes", [True, False])
def test_a_step_that_would_exceed_the_budget_raises(use, error, message, recomputes):
    model, x = (deep(), torch.randn(256, 64)) if recomputes else (wide(), torch.randn(64, 64))
    budget = 0.7 if recomputes else ackpt.compile(model, x, budget="10MB").plan.peak_bytes
    step = ackpt.compile(model, x, budget=budget)
    assert bool(step.plan.recompute_flops) == recomputes
    raises(error, message, lambda: use(step, model, x))
    model.zero_grad()
    step(x).sum().backward()


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("use", [retained, retained_and_repeated, accumulated])
def test_room_in_the_budget_allows_retained_and_accumulated_gradients(use, recomputes):
    model, x = deep(), torch.randn(256, 64)
    step = ackpt.compile(model, x, budget=0.7 if recomputes else "10MB")
    if recomputes:
        step = ackpt.compile(model, x, plan=dataclasses.replace(step.plan, limit_bytes=10**7))
    assert bool(step.plan.recompute_flops) == recomputes
    expected = []
    for call in (model, step):
        model.zero_grad()
        use(call, model, x)
        expected.append([p.grad for p in model.parameters()])
    assert_equal(*expected, "gradient")


def make_outputs():
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden)
        return {"loss": logits.mean(), "hidden": hidden, "logits": logits, "name": "outputs"}

    return model_of(forward, first=nn.Linear(8, 16), last=nn.Linear(16, 32))


def test_only_the_loss_has_a_gradient():
    model, x = make_outputs(), torch.randn(64, 8)
    step = ackpt.compile(model, x, budget="10MB")
    outputs = step(x)
    assert outputs["name"] == "outputs" and torch.equal(outputs["logits"], model(x)["logits"])
    with pytest.raises(RuntimeError, match="backward reaches an output other than the loss"):
        (outputs["loss"] + outputs["logits"].sum()).backward()
    with torch.no_grad():
        assert not step(x)["logits"].requires_grad
    step(x)["loss"].backward()


def test_several_outputs_are_checked_when_backward_reaches_the_first_of_them():
    model, x = make_outputs(), torch.randn(64, 8)
    exact = ackpt.compile(model, x, budget="10MB", differentiate="all", outputs="keep").plan.peak_bytes
    step = ackpt.compile(model, x, budget=exact, differentiate="all", outputs="keep")

    def backward(call):
        outputs = call(x)
        (outputs["loss"] + outputs["hidden"].sum() + outputs["logits"].sum()).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = backward(model)
    model.zero_grad()
    assert_equal(expected, backward(step), "gradient")  # the head has its gradients before backward reaches "hidden"
    raises(ackpt.BudgetError, "of gradients exist", lambda: backward(step))
