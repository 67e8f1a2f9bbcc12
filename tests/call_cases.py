"""Ways to call a model, and kinds of outputs: each a function that builds a `Case` afresh."""

import collections
from types import FunctionType

import torch
import torch.nn.functional as F
from conftest import Case
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

Pair = collections.namedtuple("Pair", "first second")


class Two(nn.Module):
    """Two layers, a batch norm and a dropout, called as `function` says."""

    def __init__(self, function: FunctionType):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def x(grad=False):
    return torch.randn(3, 4, requires_grad=grad)


def case(function, *args, change=None, also=(), **kwargs):
    model = Two(function)
    if change:
        change(model)
    return Case(model, args, kwargs, also=[model, also])


def aliases(m, x):
    y = m.a(x).tanh()
    return y, y.t(), y, y[1:]


def no_gradient(m, x):
    y = m.a(x)
    return y, y.argmax(-1), y.detach() * 2, y > 0


def output_object(m, x):
    h = m.dropout(m.norm(m.a(x)))
    return SequenceClassifierOutput(loss=m.b(h).square().mean(), logits=h)


def in_place(m, x):
    x.add_(1)
    return m.b(x.tanh()), x


def set_item(m, x):
    h = m.a(x)
    h[0] = m.b(x)[1]
    return h.tanh()


def views_of_one(grad):
    base = torch.randn(6, 4, requires_grad=grad)
    return case(lambda m, x, y: m.a(x).tanh() * m.b(y), base[:3], base[2:5], also=base)


def same_twice(grad):
    value = x(grad)
    return case(lambda m, x, y: m.a(x).tanh() * m.b(y), value, value)


def tie(m):
    m.b.weight = m.a.weight


def freeze_first(m):
    m.a.requires_grad_(False)


def freeze_last(m):
    m.b.requires_grad_(False)


def hooks(m):
    m.a.weight.register_hook(lambda gradient: gradient * 2)

    def triple(parameter):
        parameter.grad.mul_(3)

    m.b.bias.register_post_accumulate_grad_hook(triple)


def chain(m, x):
    return m.b(m.dropout(m.norm(m.a(x)).tanh()))


def options(m, *, x, scale=None, flag=False, name="a", count=1):
    return m.a(x) * (scale if flag else count) if name == "b" else m.b(x)


def nested(m, values, count, missing=None):
    return m.a(values["x"][0]).tanh() * count + m.b(values["y"])


CASES = {
    "tuple": lambda: case(lambda m, x: (m.a(x), m.b(x).tanh()), x()),
    "nested outputs": lambda: case(lambda m, x: {"p": [m.a(x), (m.b(x).tanh(),)], "q": x.sum()}, x()),
    "named tuple": lambda: case(lambda m, x: Pair(m.a(x), m.b(x)), x()),
    "output object": lambda: case(output_object, x()),
    "constants among outputs": lambda: case(lambda m, x: (None, m.a(x), 3, "text", True, 2.5), x()),
    "input returned": lambda: case(lambda m, x: (m.a(x), x, x.t()), x()),
    "input with a gradient returned": lambda: case(lambda m, x: (m.a(x), x, x[0]), x(True)),
    "parameter returned": lambda: case(lambda m, x: (m.a(x), m.b.weight, m.b.bias[None]), x()),
    "aliases": lambda: case(aliases, x()),
    "outputs without a gradient": lambda: case(no_gradient, x()),
    "keywords": lambda: case(options, x=x(), scale=torch.rand(4), flag=True, name="b"),
    "nested arguments": lambda: case(nested, {"x": [x(True), 1], "y": x()}, 3),
    "same tensor twice": lambda: same_twice(False),
    "same tensor twice with a gradient": lambda: same_twice(True),
    "views of one storage": lambda: views_of_one(False),
    "views of one storage with a gradient": lambda: views_of_one(True),
    "input with a gradient": lambda: case(chain, x(True)),
    "input not contiguous": lambda: case(chain, torch.randn(4, 3).t()),
    "input changed in place": lambda: case(in_place, x()),
    "scalar input": lambda: case(lambda m, x, t: chain(m, x) * t, x(), torch.tensor(2.0, requires_grad=True)),
    "double precision": lambda: case(chain, x().double(), change=nn.Module.double),
    "frozen first": lambda: case(chain, x(), change=freeze_first),
    "frozen last": lambda: case(chain, x(True), change=freeze_last),
    "tied": lambda: case(chain, x(), change=tie),
    "unused": lambda: case(lambda m, x: m.a(x).tanh(), x()),
    "hooks of parameters": lambda: case(chain, x(), change=hooks),
    "evaluation": lambda: case(chain, x(), change=nn.Module.eval),
    "set item": lambda: case(set_item, x()),
    "random numbers": lambda: case(lambda m, x: m.a(x) * torch.rand(4) + torch.randn_like(x) * m.b(x), x()),
    "attention": lambda: case(lambda m, x: F.scaled_dot_product_attention(m.a(x), m.b(x), x, dropout_p=0.3), x()[None]),
    "no_grad inside": lambda: case(lambda m, x: m.b(x * torch.no_grad()(m.a)(x)), x()),
}
