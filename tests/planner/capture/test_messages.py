"""Errors that name what a user got wrong, or what a call was captured for and what differs in a later one."""

import traceback
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import assert_as_eager, model_of, raises
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import ackpt
from ackpt.planner.capture.inspection.calls import described, differences
from ackpt.planner.schedule.plan import PlanError

X = torch.ones(4, 8)


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("call", [ackpt.trace, ackpt.compile])
def test_different_dtypes_are_named_with_their_operation(call):
    with pytest.raises(ackpt.TraceError, match="addmm .*module '0'.* different dtypes, float16 and float32"):
        call(layers().half(), X)


def test_arguments_on_meta_for_a_model_with_data_are_refused():
    step = ackpt.compile(layers(), X, budget="1MiB")
    raises(ackpt.TraceError, "argument 0 is on the meta device.*the model has data", lambda: step(X.to("meta")))


SLICE, COLUMNS = torch.ones(6, 8)[:4], torch.ones(8, 4).t()


@pytest.mark.parametrize(
    ("example", "x", "cause"),
    [
        (X, SLICE, "argument 0 is a slice of a tensor with 64 more bytes, and was a tensor of its own: pass the clone"),
        (SLICE, X, "argument 0 is a tensor of its own, and was a slice of a tensor with 64 more bytes: pass the clone"),
        (X, COLUMNS, "the strides of argument 0 changed from (8, 1) to (1, 4): pass its contiguous()"),
    ],
    ids=["slice", "whole", "strides"],
)
def test_a_changed_layout_names_the_argument_and_the_fix(example, x, cause):
    step = ackpt.compile(layers(), example)
    step(x).sum().backward()
    assert step.history[-1].cause.startswith(cause)


def test_checkpointing_and_hooks_added_later_are_named_with_the_fix():
    model = layers()
    step = ackpt.compile(model, X)
    model._require_grads_hooks = []
    step(X)
    assert "_require_grads_hooks of the model changed; gradient_checkpointing=True changed" in step.history[-1].cause
    model[0].register_forward_hook(lambda *args: None)
    with pytest.warns(UserWarning, match="has a hook"):
        step(X)
    assert "_forward_hooks of 0 changed; to avoid replanning, register hooks once" in step.history[-1].cause


def test_an_error_of_the_model_names_the_arguments_of_its_call():
    class Ranked(nn.Linear):
        def forward(self, x, *others, scale=1):
            if x.dim() > 2:
                raise ValueError("give rows")
            return super().forward(x) * scale

    with pytest.raises((ValueError, RuntimeError)) as raised:
        ackpt.compile(Ranked(8, 8), X[None], [X], scale=2)
    said = "raised by Ranked.forward with x: float32 [1, 4, 8], others: list, scale: int"
    assert said in "".join(traceback.format_exception(raised.value)) and "give rows" in str(raised.value)
    raised = raises(RuntimeError, "same reduction dim", lambda: ackpt.compile(nn.Linear(8, 8), torch.ones(4, 7)))
    said = "raised by Linear.forward with input: float32 [4, 7]"
    assert said in "".join(traceback.format_exception(raised.value))


def test_numpy_arguments_are_refused_by_name():
    array = numpy.ones((4, 8), dtype=numpy.float32)
    with pytest.raises(TypeError, match=r"argument 0 is a NumPy array.* torch.from_numpy\(array\)"):
        ackpt.compile(layers(), array)
    for plan in (ackpt.explain, ackpt.apply_budget):
        with pytest.raises(TypeError, match="argument input is a NumPy array"):
            plan(layers(), {"input": array})
    raises(TypeError, r"argument 0\[1\] is a NumPy array", lambda: ackpt.compile(layers(), [X, array]))
    raises(TypeError, "NumPy array.*torch.from_numpy", lambda: ackpt.trace(layers(), array))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_parallel_model_is_given_a_budget_before_it_is_wrapped(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(layers())
        before = r"Call ackpt.apply_budget\(model, ...\) before DistributedDataParallel\(model\)"
        raises(TypeError, before, lambda: ackpt.apply_budget(wrapped, X))
        sharded = FullyShardedDataParallel(nn.Sequential(layers(), layers()), device_id=torch.device("cpu"))
        said = "Call ackpt.apply_activation_checkpointing before FullyShardedDataParallel"
        raises(TypeError, said, lambda: ackpt.apply_budget(sharded, X))
        sharded = [FullyShardedDataParallel(layers(), device_id=torch.device("cpu")) for _ in range(2)]
        with pytest.raises(ValueError, match="module '0' is a FullyShardedDataParallel.*pass the class of the blocks"):
            ackpt.apply_activation_checkpointing(nn.Sequential(*sharded))
    finally:
        dist.destroy_process_group()


def test_a_model_in_evaluation_mode_is_named_before_its_step_is_planned():
    says = "the model is in evaluation mode, as from_pretrained returns it: Sequential is planned without dropout"
    for plan in (ackpt.compile, ackpt.apply_budget):
        with pytest.warns(UserWarning, match=says):
            plan(layers().eval(), X, budget=1.0)
    model = layers().eval()
    model[0].train()  # a part of it is enough
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ackpt.compile(model, X)


def test_an_infeasible_budget_names_inputs_that_are_views_of_more():
    data = torch.ones(400, 8)
    with pytest.raises(ackpt.BudgetError, match=r"argument input of shape \[4, 8\] is a view of 12.5 KiB.*its clone"):
        ackpt.apply_budget(layers(), {"input": data[:4]}, budget="500B")
    with pytest.raises(ackpt.BudgetError) as refused:
        ackpt.apply_budget(layers(), {"input": data[:4].clone()}, budget="500B")
    assert "is a view" not in str(refused.value)


class Seeds(nn.Linear):
    def __init__(self, seed):
        super().__init__(8, 8)
        self.seed = seed

    def forward(self, x):
        return super().forward(x) * self.seed()


def forked():
    with torch.random.fork_rng(devices=[]):
        return torch.rand(8)


@pytest.mark.parametrize(
    ("seed", "called"),
    [(lambda: torch.manual_seed(0) and torch.rand(8), "manual_seed"), (forked, "set_rng_state, as .*fork_rng does")],
)
def test_a_forward_that_seeds_is_refused_with_the_fix(seed, called):
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    model = Seeds(seed)
    with pytest.raises(ackpt.TraceError, match=f"the forward calls torch.{called}.* plan with regions=True"):
        ackpt.compile(model, x)
    assert_as_eager(model, ackpt.compile(model, x, budget=1.0, regions=True), x)


def test_a_forward_that_seeds_from_the_system_is_refused_with_a_budget_too():
    with pytest.raises(ackpt.TraceError, match="the forward calls torch.seed, .* as an argument.$"):
        ackpt.compile(Seeds(lambda: torch.seed() and torch.rand(8)), X, budget="1MiB")


SCALE = 2.0


def test_a_global_changed_since_a_saved_plan_is_named(monkeypatch):
    model = model_of(lambda self, x: self.layer(x).sum() * SCALE, layer=nn.Linear(8, 8))
    step = ackpt.compile(model, X, plan=ackpt.plan(ackpt.trace(model, X)))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    raises(ackpt.graph.PlanError, "Since then, global 'SCALE' of .*changed: change it back", lambda: step(X))


@torch.library.custom_op("ackpt_tests::without_shapes", mutates_args=())
def without_shapes(x: torch.Tensor) -> torch.Tensor:
    return x * 2


without_shapes.register_autograd(lambda context, gradient: gradient * 2)


class Custom(nn.Linear):
    def __init__(self, operation):
        super().__init__(8, 8)
        self.operation = operation

    def forward(self, x):
        return self.operation(super().forward(x)).tanh().sum()


def test_an_operation_of_a_library_without_a_fake_kernel_is_refused():
    with torch.library._scoped_library("ackpt_tests", "FRAGMENT") as library:
        library.define("packed(Tensor x) -> Tensor")
        library.impl("packed", lambda x: x * 2, "CPU")
        with pytest.raises(ackpt.TraceError, match="ackpt_tests.packed returns are not known at .*no fake kernel"):
            ackpt.compile(Custom(torch.ops.ackpt_tests.packed), X)


def test_an_operation_without_a_fake_kernel_is_refused_and_runs_in_a_region():
    said = "ackpt_tests::without_shapes returns are not known at .*no fake kernel"
    error = raises(ackpt.TraceError, said, lambda: ackpt.compile(Custom(without_shapes), X))
    assert "register_fake" in str(error.value) and "apply_activation_checkpointing" in str(error.value)
    ackpt.checkpoint(model := Custom(without_shapes), X).backward()
    assert model.weight.grad is not None


def test_a_hook_that_reads_values_is_refused_or_planned_in_parts():
    def hooked(register):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        getattr(model[0], register)(lambda module, *gradients: values.append(gradients[-1][0].mean().item()))
        return model

    def forward(self, x):
        hidden = self.layer(x)
        hidden.register_hook(lambda gradient: values.append(gradient.norm().item()))
        return hidden.sum()

    values = []
    for model, named in (
        (hooked("register_forward_hook"), "a hook of module '0'"),
        (hooked("register_full_backward_hook"), "a hook that runs in backward"),
        (hooked("register_full_backward_pre_hook"), "a hook that runs in backward"),
        (model_of(forward, layer=nn.Linear(4, 4)), "a hook that runs in backward"),
    ):
        x = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(ackpt.TraceError, match=f"^{named} looks at the values of a tensor at .*remove.*budget"):
            ackpt.compile(model, x)
        values.clear()
        model(x).sum().backward()
        expected = values[:], [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        step = ackpt.compile(model, x, budget="100%")  # in parts, which run the hooks
        assert step.plan.note.startswith(named)
        values.clear()
        step(x).sum().backward()
        found = values, [parameter.grad for parameter in model.parameters()]
        assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))


def test_model_arguments_called_policy_and_budget_reach_the_model():
    def forward(self, x, policy=1.0, budget=2.0):
        return (self.layer(x) * policy + budget).sum()

    model, x = model_of(forward, layer=nn.Linear(4, 4)), torch.ones(2, 4)
    expected = model(x, policy=3.0, budget=5.0)
    with pytest.raises(TypeError, match="policy= is a keyword of ackpt.compile, and got 3.0.*apply_budget"):
        ackpt.compile(model, x, policy=3.0)
    with pytest.warns(UserWarning, match="budget='1GiB' is the keyword of ackpt.compile.*keeps its default.*position"):
        ackpt.compile(model, x, budget="1GiB")
    step = ackpt.compile(model, x, 3.0, 5.0, budget="1GiB")
    assert torch.equal(step(x, policy=3.0, budget=5.0), expected)
    assert torch.equal(ackpt.checkpoint(model, x, policy=3.0, budget=5.0), expected)
    assert ackpt.plan(ackpt.trace(model, x, policy=3.0, budget=5.0)).peak_bytes == step.plan.peak_bytes
    ackpt.apply_budget(model, {"x": x, "policy": 3.0, "budget": 5.0}, budget="1GiB")
    assert torch.equal(model(x, policy=3.0, budget=5.0), expected)


HIGHER_ORDER = {
    "calls a higher-order operator at .*test_messages.py.*torch.where": lambda self, x: torch.cond(
        self.layer(x).sum() > 0, torch.sin, torch.cos, (self.layer(x),)
    ).sum(),
    "the model itself.*calls print, a higher-order operator with an effect": lambda self, x: (
        torch._higher_order_ops.print("{}", x.sum()) or self.layer(x).sum()
    ),
}


@pytest.mark.parametrize("said", HIGHER_ORDER, ids=["cond", "print"])
def test_higher_order_operators_are_refused(said):
    model = model_of(HIGHER_ORDER[said], layer=nn.Linear(8, 8))
    raises(ackpt.TraceError, said, lambda: ackpt.compile(model, X, policy="full"))


class Halved(nn.Linear):
    """Saves in half the bytes, so that its gradients differ in the third digit."""

    hooks = staticmethod(torch.autograd.graph.saved_tensors_hooks)

    def forward(self, x):
        with self.hooks(lambda saved: saved.bfloat16(), lambda saved: saved.float()):
            return super().forward(x).tanh().sum()


def test_saved_tensors_hooks_in_a_forward_are_refused():
    model = Halved(8, 8)
    for model.hooks in (Halved.hooks, type("Subclass", (Halved.hooks,), {})):
        with pytest.raises(ackpt.TraceError, match="saved_tensors_hooks at .*test_messages.py.*regions=True"):
            ackpt.compile(model, X, policy="full")
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):  # outside of the model
        ackpt.compile(layers(), X, policy="full")


class InferenceView(nn.Linear):
    def forward(self, x):
        with torch.inference_mode():
            first = x[0]
        return super().forward(x + first.clone()).sum()


def test_a_view_under_inference_mode_is_refused_with_the_fix():
    with pytest.raises(ackpt.TraceError, match=r"a view under torch.inference_mode.*first = x\[0\].*torch.no_grad"):
        ackpt.compile(InferenceView(8, 8), X)
    model = InferenceView(8, 8)
    assert torch.equal(ackpt.compile(model, X, budget="1MiB")(X), model(X))


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: 0 if weight.grad is None else weight.grad.norm(),
        lambda weight: setattr(weight, "grad", None) or 0,
        lambda weight: nn.utils.clip_grad_norm_([weight], 1.0),
    ],
)
@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_forward_that_reads_or_sets_gradients_is_refused(read, has_gradient):
    model = model_of(lambda self, x: self.layer(x).sum() + read(self.layer.weight), layer=nn.Linear(8, 8))
    gradient = torch.ones(8, 8) if has_gradient else None
    model.layer.weight.grad = gradient
    with pytest.raises(ackpt.TraceError, match=r"reads or sets the gradient of a tensor at .*test_messages.py:\d+"):
        ackpt.apply_budget(model, X, budget="1MiB")
    assert model.layer.weight.grad is gradient


def scaled(x, scale):
    x.scale = scale
    return x


def test_python_attributes_of_an_argument_are_refused_or_planned_in_parts():
    model = model_of(lambda self, x: self.layer(x).tanh().sum() * getattr(x, "scale", 1.0), layer=nn.Linear(8, 8))
    x = torch.ones(4, 8)
    x._mark = 3
    step = ackpt.compile(model, x, policy="full")
    assert torch.equal(step(x), model(x))
    with pytest.raises(ackpt.TraceError, match="argument 0 is a tensor with a Python attribute 'scale'"):
        step(scaled(torch.ones(4, 8), 3.0))
    assert torch.equal(step(torch.ones(4, 8)), model(x))
    in_parts = ackpt.compile(model, x, budget="1MiB")
    for batch in (x, scaled(torch.ones(4, 8), 3.0), x):
        assert torch.equal(in_parts(batch), model(batch))


# What a call was captured for, in words, and what an error says of a later call or of another plan's.


ROWS = torch.ones(64, 8)


class Block(nn.Linear):
    """What is dropped at random is kept for backward in training alone."""

    def forward(self, x):
        return x + nn.functional.dropout(super().forward(x).tanh().sin(), 0.5, self.training)


class Drops(nn.Linear):
    """In training a mask can be made again; in evaluation nothing is left to run again."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x).tanh(), 0.5, self.training)


def keywords():
    return model_of(lambda self, x, plans=None, **kwargs: self.inner(x).tanh().sin(), inner=nn.Linear(8, 8))


def blocks():
    return nn.Sequential(*(Block(8, 8) for _ in range(4)))


def test_a_call_is_described():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    model[0].bias.requires_grad_(False)
    model[1].eval()
    x = torch.ones(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = described(model, (x, [x, torch.ones(2, dtype=torch.int64)]), {"scale": 2.0, "note": "n" * 99})
    assert found == {
        "torch": torch.__version__,
        "model": "Sequential",
        "parameters": "72 in 2 tensors of float32, 64 trained",
        "mode": "training of 2 in 3 modules",
        "autocast": "bfloat16 on cpu",
        "differentiate": "loss",
        "argument 0": "float32 [4, 8]",
        "argument 1[0]": "the tensor that is 0, too",
        "argument 1[1]": "int64 [2]",
        "argument scale": "2.0",
        "argument note": f"'{'n' * 59}...",
    }
    meta = described(nn.Linear(8, 8, device="meta"), (torch.ones(4, 8, device="meta"),), {})
    assert differences(described(nn.Linear(8, 8), (x,), {}), meta) == []
    assert differences(None, meta) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: (model, ROWS.expand(2, 64, 8), {}),
            r"argument 0 changed from float32 \[64, 8\] to float32 \[2, 64, 8\]",
        ),
        (lambda model: (model.double(), ROWS, {}), "parameters changed from 288 in .* float32.* to 288 in .* float64"),
        (lambda model: (model.eval(), ROWS, {}), "mode changed from training to evaluation"),
        (lambda model: (model[:3], ROWS, {}), "parameters changed from 288 in 8 .* to 216 in 6"),
        (lambda model: (model, ROWS, {"differentiate": "all"}), None),
    ],
    ids=["dimensions", "dtype", "mode", "layers", "same graph"],
)
def test_a_plan_for_another_graph_names_the_difference(change, said):
    plan = ackpt.compile(blocks(), ROWS, policy="full").plan
    model, x, options = change(blocks())
    x = x.to(next(model.parameters()).dtype)
    if said is None:
        assert ackpt.compile(model, x, plan=plan, **options).plan is plan
        return
    raises(PlanError, f"made for another graph .*{said}", lambda: ackpt.compile(model, x, plan=plan, **options))


def test_a_model_that_computes_something_else_with_the_same_call_is_named():
    plan = ackpt.compile(nn.Sequential(Block(8, 8)), ROWS, policy="full").plan
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(PlanError, match="the call is the same, so the model's code or configuration differs"):
        ackpt.compile(model, ROWS, plan=plan)


def test_a_plan_and_a_later_call_with_other_arguments():
    step = ackpt.compile(blocks(), ROWS, policy="full")
    step = ackpt.compile(blocks(), ROWS, plan=step.plan)
    said = r"is a part of a larger tensor.*clone\(.*\) makes\. It matched.*drop_last=True"
    raises(PlanError, said, lambda: step(ROWS[:3]))
    step(ROWS[:3].clone())
    step.eval()
    raised = raises(PlanError, "mode changed from training to evaluation.*under torch.no_grad", lambda: step(ROWS))
    assert "drop_last" not in str(raised.value)
    with torch.no_grad():
        step(ROWS)
    step.train()
    step(ROWS).sum().backward()


def test_evaluation_with_gradients_is_not_explained_by_the_batch():
    step = ackpt.compile(nn.Sequential(*(Drops(8, 8) for _ in range(4))), ROWS, budget=0.86)
    step.eval()
    said = "mode changed from training to evaluation.*under torch.no_grad"
    raised = raises(ackpt.BudgetError, said, lambda: step(ROWS))
    assert "A fraction is relative" not in str(raised.value) and raised.value.least_bytes < step.plan.peak_bytes


def test_a_larger_batch_with_a_budget_in_bytes_is_not_explained_by_a_fraction():
    step = ackpt.compile(blocks(), ROWS, budget=32_000, policy="full")
    with pytest.raises(ackpt.BudgetError, match=r"to float32 \[65, 8\]. Give the budget that the largest") as raised:
        step(torch.ones(65, 8))
    assert "fraction is" not in str(raised.value)


@pytest.mark.parametrize("name", ["budgt", "budgets", "polcy", "optimiser", "option", "Budget"])
def test_a_misspelt_keyword_is_not_handed_to_the_model(name):
    for model in (keywords(), nn.Linear(8, 8)):
        with pytest.raises(TypeError, match=f"{name!r} is not a keyword of ackpt.compile.*: did you mean '"):
            ackpt.compile(model, ROWS, **{name: 0.5})


def test_a_keyword_that_the_forward_cannot_take_is_compared_with_those_of_compile():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'budjet' \(did you mean 'budget'\?\); its param"):
        ackpt.compile(nn.Linear(8, 8), ROWS, budjet=0.5)


def test_an_option_of_the_policy_among_the_keywords_is_named():
    with pytest.raises(TypeError, match="'every_n_layers' is an option of policy 'selective': give it as options=."):
        ackpt.compile(keywords(), ROWS, budget=0.5, policy="selective", every_n_layers=1)


def test_a_misspelt_option_of_a_plan_is_named():
    graph = ackpt.trace(blocks(), ROWS)
    for name, meant in [("budgt", "budget"), ("profil", "profile")]:
        with pytest.raises(TypeError, match=f"not an option of a plan; .*did you mean '{meant}'"):
            ackpt.plan(graph, **{name: 0.5})
    with pytest.raises(TypeError, match="knows .* .did you mean 'every_n_layers'"):
        ackpt.plan(graph, 0.5, "selective", every_n_layer=1)
