"""Listings hold what fx graphs hold, and the code that is generated from them frees every value after its last use."""

import weakref

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ackpt.planner.schedule.listing import Line, Listing, boxed


def mixed(x, index):
    """Operations with lists, missing arguments, keywords, dtypes, constants and results that nothing reads."""
    table = torch.tensor([1.0, float("inf")])
    x.sort()
    picked = torch.ops.aten.index.Tensor(x, [None, index]).clamp(min=-1e-30).to(torch.float64)
    where = torch.where(picked > 0, picked, float("-inf")) + torch.full((2,), float("nan"), dtype=torch.float64).isnan()
    return where[1:, ::2], x.std(dim=[0], correction=0, keepdim=True), table


def captured() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    args = [torch.randn(3, 4), torch.tensor([0, 2])]
    return make_fx(mixed, tracing_mode="fake")(*args), args


def test_a_listing_is_turned_back_into_its_graph():
    module, args = captured()
    again = fx.GraphModule(module, Listing.from_graph(module.graph).graph())
    one, other = (
        [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in each.graph.nodes]
        for each in (module, again)
    )
    assert one == other
    assert all(map(torch.equal, again(*args), module(*args)))


def test_the_code_of_a_listing_gives_the_results_of_the_module():
    module, args = captured()
    given = list(args)
    results = boxed(module, Listing.from_graph(module.graph))(given)
    assert given == []
    assert all(map(torch.equal, results, module(*args)))


def test_the_code_frees_every_value_after_its_last_use():
    seen: list[weakref.ref] = []
    alive: list[list[bool]] = []

    def make(*others):
        alive.append([each() is not None for each in seen])
        made = torch.ones(2)
        seen.append(weakref.ref(made))
        return made

    first = Line("call_function", make)
    second = Line("call_function", make, (first,))
    unread = Line("call_function", make)
    third = Line("call_function", make, (second,))
    fourth = Line("call_function", make, ([third],), {})
    listing = Listing([first, second, unread, third, fourth, Line("output", "output", ((fourth,),))])
    (result,) = boxed(nn.Module(), listing)([])
    assert alive == [[], [True], [False, True], [False, True, False], [False, False, False, True]]
    assert [each() is result for each in seen] == [False, False, False, False, True]
