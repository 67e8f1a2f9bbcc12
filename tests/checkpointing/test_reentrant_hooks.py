"""Hooks on tensors, parameters and modules fire as often, and with the same gradients, as without checkpoint."""

from functools import partial

import pytest
import torch
from conftest import assert_equal, batch, plain_call, raises, seed, total
from torch import nn

import ackpt


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def remember(heard, name):
    return lambda grad: heard.append((name, grad.clone()))


def assert_same_heard(scenario):
    """The hooks of `scenario(call, heard)` get the same arguments without and with checkpoint."""
    plain, checkpointed = [], []
    for call, heard in ((plain_call, plain), (ackpt.checkpoint, checkpointed)):
        seed()
        scenario(call, heard)
    assert [name for name, _ in plain] == [name for name, _ in checkpointed]
    assert_equal([value for _, value in plain], [value for _, value in checkpointed], "heard")
    assert plain


def on_parameters(call, heard):
    model, x = layers(), batch()
    for name, parameter in model.named_parameters():
        parameter.register_hook(remember(heard, name))
    total(call(model, x)).backward()
    heard.sort(key=lambda item: item[0])


def after_accumulation(call, heard):
    model, x = layers(), batch()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: heard.append((name, p.grad.clone())))
    total(call(model, x)).backward()
    total(call(model, x)).backward()
    heard.sort(key=lambda item: item[0])


def on_a_shared_parameter(call, heard):
    first, second, x = layers(), layers(), batch()
    second[0].weight = first[0].weight
    first[0].weight.register_hook(remember(heard, "hook"))
    first[0].weight.register_post_accumulate_grad_hook(lambda p: heard.append(("after", p.grad.clone())))
    total(call(second, call(first, x))).backward()


def on_several_parameters_at_once(call, heard):
    model, x = layers(), batch()
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda grads: heard.extend(("multi", grad.clone()) for grad in grads)
    )
    total(call(model, x)).backward()


def that_changes_the_gradient(call, heard):
    model, x = layers(), batch()
    model[0].weight.register_hook(lambda grad: grad * 2)
    x.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    total(call(model, x)).backward()
    heard += [("weight", model[0].weight.grad), ("x", x.grad)]


def on_input_and_output(call, heard):
    model, x = layers(), batch()
    h = x * 1.5
    h.retain_grad()
    h.register_hook(remember(heard, "input"))
    y = call(model, h)
    y.retain_grad()
    y.register_hook(remember(heard, "output"))
    total(y).backward()
    heard += [("h", h.grad), ("y", y.grad)]


def on_a_closed_over_tensor(call, heard):
    model, x = layers(), batch()
    h = x * 1.5
    h.retain_grad()
    h.register_hook(remember(heard, "closed over"))
    for _ in range(2):
        total(call(lambda x: model(x) * h, x)).backward(retain_graph=True)
        heard.append(("h", h.grad.clone()))


def on_an_intermediate(call, heard):
    model, x = layers(), batch()

    def function(x):
        h = model[0](x)
        h.register_hook(remember(heard, "inside"))
        x.register_hook(remember(heard, "x inside"))
        return model[1:](h)

    total(call(function, x)).backward()


def full_backward_hooks_inside(call, heard):
    model, x = layers(), batch()
    model[2].register_full_backward_hook(lambda module, gin, gout: heard.extend([("in", gin[0]), ("out", gout[0])]))
    model[0].register_full_backward_pre_hook(lambda module, gout: heard.append(("before", gout[0])))
    total(call(model, x)).backward()


def backward_hooks_on_nodes(call, heard):
    model, x = layers(), batch()
    y = call(model, x)
    y.grad_fn.register_prehook(lambda grads: heard.append(("node", grads[0].clone())))
    total(y).backward()


def that_removes_itself(call, heard):
    model, x = layers(), batch()

    def hook(grad):
        heard.append(("once", grad.clone()))
        handle.remove()

    handle = model[0].weight.register_hook(hook)
    total(call(model, x)).backward()
    total(call(model, x)).backward()


SCENARIOS = [
    on_parameters,
    after_accumulation,
    on_a_shared_parameter,
    on_several_parameters_at_once,
    that_changes_the_gradient,
    on_input_and_output,
    on_a_closed_over_tensor,
    on_an_intermediate,
    full_backward_hooks_inside,
    backward_hooks_on_nodes,
    that_removes_itself,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_tensor_and_module_hooks_fire_as_without_regions(scenario):
    assert_same_heard(scenario)


def test_forward_hooks_of_a_wrapped_module_fire_once_and_inner_ones_see_is_recomputing():
    model = nn.Sequential(layers(), layers())
    ackpt.apply_activation_checkpointing(model)
    heard = []
    for name in ("0", "0.1"):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: heard.append(("before", name, ackpt.is_recomputing())))
        module.register_forward_hook(lambda *_, name=name: heard.append(("after", name, ackpt.is_recomputing())))
    total(model(batch())).backward()
    once = [("before", "0", False), ("before", "0.1", False), ("after", "0.1", False), ("after", "0", False)]
    assert heard == [*once, ("before", "0.1", True), ("after", "0.1", True)]


def test_an_optimizer_step_inside_a_hook():
    """Each parameter is updated as soon as its gradient is there; no region that still runs may have read it."""

    def scenario(call, heard):
        blocks, x = nn.ModuleList(layers() for _ in range(3)), batch()
        for parameter in blocks.parameters():

            def step(parameter):
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            y = x
            for block in blocks:
                y = call(block, y)
            total(y).backward()
        heard += [("parameter", parameter.detach()) for parameter in blocks.parameters()]

    assert_same_heard(scenario)


def test_a_hook_that_raises_leaves_the_hooks_in_place():
    model, x = layers(), batch()
    heard = []

    def hook(grad):
        heard.append(grad)
        raise KeyError("from the hook")

    handle = model[0].weight.register_hook(hook)
    model[2].weight.register_hook(heard.append)
    raises(KeyError, "from the hook", lambda: total(ackpt.checkpoint(model, x)).backward())
    handle.remove()
    heard.clear()
    model.zero_grad()
    total(ackpt.checkpoint(model, x)).backward()
    assert len(heard) == 1 and torch.equal(heard[0], model[2].weight.grad)


def _halves(layer, x):
    x.register_hook(lambda gradient: gradient * 0.5)
    return x + layer(x)


def _several(layer, x):
    x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    x.register_hook(lambda gradient: None)
    x.register_hook(lambda gradient: gradient + 1)
    return x * layer(x)


def _one_removed(layer, x):
    x.register_hook(lambda gradient: gradient * 0).remove()
    return _halves(layer, x)


def _on_a_parameter(layer, x):
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return x + layer(x)


def _counts(layer, x):
    def count(bias):
        bias.grad.add_(1)

    layer.bias.register_post_accumulate_grad_hook(count)
    return x + layer(x)


def _retains(layer, x):
    x.retain_grad()
    layer.kept = x
    return x + layer(x)


REGISTERED = [_halves, _several, _one_removed, _on_a_parameter, _counts, _retains]


@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("function", REGISTERED)
def test_hooks_that_a_region_registers_on_its_input_or_parameters(function, depth, is_leaf):
    """They run once for the whole gradient, which has contributions from outside of the region."""

    def run(depth):
        torch.manual_seed(0)
        first, layer, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)
        call = partial(function, layer)
        for _ in range(depth):
            call = partial(ackpt.checkpoint, call)
        h = x.requires_grad_() if is_leaf else first(x)
        (call(h).sum() + h.sin().sum()).backward()
        kept = layer.kept.grad if function is _retains else None
        return [
            *(p.grad for p in (*first.parameters(), *layer.parameters())),
            x.grad,
            kept,
            h.grad if is_leaf else None,
        ]

    for one, other in zip(run(0), run(depth)):
        assert one is other is None or torch.equal(one, other)


def test_a_hook_on_an_input_can_be_removed_after_the_forward():
    handles = []

    def function(x):
        handles.append(x.register_hook(lambda gradient: gradient * 0))
        return x * 2

    x = torch.ones(2, requires_grad=True)
    y = ackpt.checkpoint(function, x)
    handles[0].remove()
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]
