"""Random small programs: nested arguments, partly requiring grad, with dropout and nested regions."""

import random

import torch
from conftest import assert_equal, plain_call, seed, streams, tensors_in, total
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ackpt

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


OPERATIONS = {
    "sine": lambda tensors, layer: [tensor.sin() for tensor in tensors],
    "layer": lambda tensors, layer: [layer(tensor) for tensor in tensors],
    "dropout": lambda tensors, layer: [nn.functional.dropout(tensor, 0.4) for tensor in tensors],
    "product": lambda tensors, layer: [tensors[0] * tensor.cos() for tensor in tensors],
    "rotate": lambda tensors, layer: tensors[1:] + tensors[:1],
    "detach one": lambda tensors, layer: [tensors[0].detach(), *tensors[1:]],
    "view": lambda tensors, layer: [tensor.t().reshape(4, 3).t() for tensor in tensors],
    "in place": lambda tensors, layer: [tensor.clone().mul_(2).add_(1) for tensor in tensors],
    "drop one": lambda tensors, layer: tensors[:-1] if len(tensors) > 1 else tensors,
    "python": lambda tensors, layer: [tensor * random.random() for tensor in tensors],
    "weight": lambda tensors, layer: [tensor + layer.weight.sum(0) for tensor in tensors],
    "normalise": lambda tensors, layer: [nn.functional.layer_norm(tensor, (4,)) for tensor in tensors],
}

# A program is a list of operations and of regions, which are programs again.
PROGRAMS = st.recursive(
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=3),
    lambda inner: st.lists(inner | st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=3),
    max_leaves=6,
)
NEEDS = st.lists(st.booleans(), min_size=1, max_size=3)
FORMS = st.sampled_from(["list", "dict", "positional", "closure"])


def execute(program, tensors, layer, call, form):
    for step in program:
        if isinstance(step, str):
            tensors = OPERATIONS[step](tensors, layer)
        elif form == "list":
            tensors = call(lambda items, step=step: execute(step, items, layer, call, form), tensors)
        elif form == "dict":
            named = {str(place): tensor for place, tensor in enumerate(tensors)}

            def function(items, step=step):
                return dict(enumerate(execute(step, list(items.values()), layer, call, form)))

            tensors = list(call(function, items=named).values())
        elif form == "positional":
            tensors = list(call(lambda *items, step=step: tuple(execute(step, [*items], layer, call, form)), *tensors))
        else:
            held = list(tensors)
            tensors = call(lambda step=step, held=held: execute(step, held, layer, call, form))
    return tensors


def run_program(program, needs, form, call, frozen, passes):
    seed()
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.requires_grad_(not frozen)
    roots = [torch.randn(3, 4, requires_grad=need) for need in needs]
    history = [root * 1.5 if place % 2 else root for place, root in enumerate(roots)]
    out = call(lambda tensors: execute(program, tensors, layer, call, form), history)
    draws = [streams()]
    loss = total(out)
    for left in reversed(range(passes)):
        if loss.requires_grad:
            loss.backward(retain_graph=left > 0)
    outputs = [tensor.detach() for tensor in tensors_in(out)]
    flags = [tensor.requires_grad for tensor in tensors_in(out)]
    return outputs, flags, [*(root.grad for root in roots), layer.weight.grad], [*draws, streams()]


@quick
@given(PROGRAMS, NEEDS, FORMS, st.booleans(), st.integers(1, 2))
def test_a_random_program_gives_the_plain_results(program, needs, form, frozen, passes):
    plain = run_program(program, needs, form, plain_call, frozen, passes)
    checkpointed = run_program(program, needs, form, ackpt.checkpoint, frozen, passes)
    assert_equal(plain[0], checkpointed[0], "output")
    assert plain[1] == checkpointed[1]
    assert plain[3] == checkpointed[3]
    for one, other in zip(plain[2], checkpointed[2]):
        assert (one is None) == (other is None)
        if one is not None:  # sums of several uses are grouped per region, so the last bits may differ
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


SINGLE = ["sine", "dropout", "in place", "view", "python", "normalise"]
STRAIGHT = st.lists(st.sampled_from(SINGLE), min_size=1, max_size=4)


@quick
@given(st.lists(STRAIGHT, min_size=1, max_size=4), st.integers(1, 3))
def test_a_random_chain_is_equal_to_the_last_bit(chain, passes):
    plain = run_program(chain, [True], "positional", plain_call, True, passes)
    checkpointed = run_program(chain, [True], "positional", ackpt.checkpoint, True, passes)
    for one, other in zip((plain[0], plain[2]), (checkpointed[0], checkpointed[2])):
        assert_equal(one, other, "value")
    assert plain[1] == checkpointed[1] and plain[3] == checkpointed[3]
