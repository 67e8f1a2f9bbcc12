"""Training steps whose copies can be observed: layers in an arena, a small network, and two ways to offload."""

import contextlib

import pytest
import torch
from late import Arena

import ackpt
from ackpt.offloading.engine import Engine
from ackpt.planner.schedule.listing import Listing, boxed, mapped

STEPS, LAYERS, SHAPE = 6, 6, (8, 512)
BYTES = 8 * 512 * 4


class Layer(torch.autograd.Function):
    """``x * x * weight - 0.5``; all its memory is of an arena."""

    @staticmethod
    def forward(ctx, x, weight, arena):
        ctx.save_for_backward(x, weight)
        ctx.arena = arena
        return torch.mul(x, x, out=arena.like(x)).mul_(weight).sub_(0.5)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        square = torch.mul(x, x, out=ctx.arena.like(x))
        to_weight = torch.mul(square, grad, out=ctx.arena.like(x)).sum(0)
        return torch.mul(x, grad, out=ctx.arena.like(x)).mul_(weight).mul_(2), to_weight, None


def in_regions(offload):
    """A call of each layer pair in a region whose inputs are offloaded."""
    return lambda function, x: ackpt.checkpoint(function, x, offload=offload)


def saved(offload):
    """A call that keeps everything; what it saves is offloaded."""

    def call(function, x):
        with offload:
            return function(x)

    return call


def plain(function, x):
    return function(x)


@contextlib.contextmanager
def one_forward(kind, offload):
    """The way to call layers in one forward."""
    if kind is in_regions:
        yield in_regions(offload)
    else:
        with offload:  # one entry, so that there is an order
            yield plain


class Training:
    """A few layers over an arena, the same in every run."""

    def __init__(self, arena):
        self.arena = arena
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.rand(SHAPE[1], generator=generator).add_(0.5).requires_grad_() for _ in range(LAYERS)]
        self.generator = generator

    def forward(self, call):
        x = self.arena.like(torch.empty(SHAPE))
        x.copy_(torch.rand(SHAPE, generator=self.generator))
        for index in range(0, LAYERS, 2):
            first, second = self.weights[index : index + 2]
            x = call(lambda x, a=first, b=second: Layer.apply(Layer.apply(x, a, self.arena), b, self.arena), x)
        return x.sum()

    def update(self):
        grads = [weight.grad for weight in self.weights]
        with torch.no_grad():
            for weight in self.weights:
                weight -= 0.01 * weight.grad
                weight.grad = None
        return grads

    def step(self, call):
        loss = self.forward(call)
        loss.backward()
        return [loss.detach(), *self.update()]


def train(kind=None, offload=None, arena=None, steps=STEPS):
    training = Training(arena or Arena())
    made = []
    for _ in range(steps):
        with one_forward(kind, offload) if kind else contextlib.nullcontext(plain) as call:
            loss = training.forward(call)
        loss.backward()
        made += [loss.detach(), *training.update()]
    return made


def differing(one, other) -> int:
    assert len(one) == len(other)
    return sum(not torch.equal(first, second) for first, second in zip(one, other))


KINDS = pytest.mark.parametrize("kind", [in_regions, saved], ids=["checkpoint", "saved tensors"])


def network():
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)) for _ in range(5)]
    return torch.nn.ModuleList(parts)


def run_network(kind, offload, steps=STEPS):
    blocks, made = network(), []
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(256, 64)
        with one_forward(kind, offload) if kind else contextlib.nullcontext(plain) as call:
            for block in blocks:
                x = call(block, x)
            loss = x.square().mean()
        loss.backward()
        made += [loss.detach(), *(parameter.grad.clone() for parameter in blocks.parameters())]
        optimizer.step()
    return made


def own_engine(mode="async", **options):
    offload = ackpt.offload_saved_tensors(mode, min_bytes=1024, **options)
    offload.engine = Engine("host")
    return offload


def run_boxed(gm, example_inputs):
    """A compiler for AOTAutograd: the module's operations one by one, arguments freed after their last use."""
    return boxed(gm, listing_of(gm))


def listing_of(module: torch.fx.GraphModule) -> Listing:
    listing, made = Listing(), {}
    for node in module.graph.nodes:
        args, kwargs = mapped((node.args, node.kwargs), made.__getitem__)
        made[node] = listing.add(node.op, node.target, args, kwargs, node.name, node.meta)
    return listing
