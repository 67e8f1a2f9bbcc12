"""Random training steps on a simulated GPU, run by real autograd, with random streams and lifetimes of tensors."""

import contextlib
import random

import torch
from late import late_offload
from simulated_cuda import DEVICE, Machine, SimulatedTransport, join

SIZES = (256, 1024)  # elements


class Broken(Exception):
    """A step that breaks off."""


class Operation(torch.autograd.Function):
    """``sum(x * x) * weight`` over the first elements of its inputs, on the stream it was called on."""

    @staticmethod
    def forward(ctx, program, size, weight, *inputs):
        machine = program.machine
        ctx.save_for_backward(weight, *inputs)
        ctx.program, ctx.stream = program, machine.current_stream()
        ctx.ready_inputs = [program.ready[id(each)] for each in inputs]
        out = program.new(size)
        torch.mul(sum(each[0] * each[0] for each in inputs), weight, out=out[:1]), out[1:].fill_(0.25)
        machine.launch([each.untyped_storage() for each in inputs], [out.untyped_storage()])
        # Where the gradient of the output comes from, which the engine of autograd makes this node's stream wait for.
        ctx.ready = program.made = {}
        return out

    @staticmethod
    def backward(ctx, grad):
        program, machine = ctx.program, ctx.program.machine
        if program.fails_in == 0:
            raise Broken
        program.fails_in -= 1
        with machine.stream(ctx.stream):
            program.streams[ctx.stream] = True
            join(ctx.stream.clock, program.root)
            join(ctx.stream.clock, ctx.ready)
            weight, *inputs = ctx.saved_tensors
            program.use(inputs)
            machine.launch([each.untyped_storage() for each in inputs])
            program.scratch()
            grads = []
            for each in inputs:
                grads.append(torch.zeros_like(each))
                grads[-1][0] = 2 * each[0] * weight[0] * grad[0]
            to_weight = sum(each[:1] * each[:1] for each in inputs) * grad[0]
            program.checked += [each.detach().sum().item() for each in inputs]
            program.kept = inputs if program.rng.random() < 0.4 else []  # somebody may still have them for a while
            del inputs, each
            program.scratch()
            for ready in ctx.ready_inputs:
                join(ready, ctx.stream.clock)
        return None, None, to_weight, *grads


class Program:
    """Steps drawn from a seed; two programs of one seed differ in nothing but what `offload` does."""

    def __init__(self, seed, machine: Machine):
        self.rng = random.Random(seed)
        self.machine = machine
        self.ready: dict[int, dict] = {}
        self.made: dict = {}
        self.root: dict = {}  # when the gradient of the loss is there
        self.weight = torch.full((1,), 0.5, requires_grad=True)
        self.fails_in = -1
        self.kept: list = []
        self.streams: dict = {}  # those that backward ran on
        self.checked: list[float] = []  # sums of what backward was given

    def new(self, size) -> torch.Tensor:
        storage = self.machine.allocate(4 * size)
        return torch.empty(0).set_(storage, 0, (size,), (1,))

    def input(self) -> torch.Tensor:
        made = self.new(self.rng.choice(SIZES))
        made.fill_(0.125)[0] = self.rng.uniform(-1, 1)
        self.machine.launch(writes=[made.untyped_storage()])
        self.ready[id(made)] = {}
        return made

    def use(self, tensors):
        """What a program must do whose streams share a tensor: tell the allocator."""
        current = self.machine.current_stream()
        for each in tensors:
            self.machine.used_on(each.untyped_storage(), current)

    def operation(self, inputs) -> torch.Tensor:
        self.use(inputs)
        out = Operation.apply(self, self.rng.choice(SIZES), self.weight, *inputs)
        self.ready[id(out)] = self.made
        self.scratch()
        return out

    def scratch(self):
        """Memory that is written, and free again."""
        self.machine.launch(writes=[self.machine.allocate(4 * self.rng.choice(SIZES))])

    def forward(self, operations=12) -> torch.Tensor:
        """One stream, branches and all; some outputs are never used, some inputs die early."""
        alive = [self.input()]
        for _ in range(operations):
            inputs = self.rng.sample(alive, min(len(alive), self.rng.choice((1, 1, 2))))
            alive.append(self.operation(inputs))
            if len(alive) > 3:
                del alive[self.rng.randrange(len(alive) - 1)]
            if self.rng.random() < 0.1:
                self.machine.synchronize()
            del inputs
        return sum(each[0] for each in alive)

    def hopping_forward(self, streams, operations=12) -> torch.Tensor:
        """From stream to stream, each waiting for the one before."""
        x, before = self.input(), self.machine.current_stream()
        for _ in range(operations):
            stream = self.rng.choice(streams)
            stream.wait_stream(before)
            with self.machine.stream(stream):
                x = self.operation([x])
            before = stream
        self.machine.current_stream().wait_stream(before)
        return x[0]

    def forked_forward(self, streams, operations=3) -> torch.Tensor:
        """A branch on every stream, side by side, from one input that all of them save; joined in the end."""
        start = self.operation([self.input()])
        main = self.machine.current_stream()
        ends = {}
        for stream in streams:
            stream.wait_stream(main)
            ends[stream] = start
        for _ in range(operations):
            for stream in self.rng.sample(streams, len(streams)):
                with self.machine.stream(stream):
                    end = self.operation([ends[stream], start] if self.rng.random() < 0.5 else [start])
                    ends[stream] = end if self.rng.random() < 0.5 else self.operation([ends[stream], end])
        for stream in streams:
            main.wait_stream(stream)
        return sum(end[0] for end in ends.values())

    def backward(self, loss, **options):
        self.root = dict(self.machine.current_stream().clock)
        try:
            loss.backward(**options)
        finally:
            self.kept = []
            for stream in self.streams:  # as torch does in the end; the streams that copy are unknown to it
                self.machine.current_stream().wait_stream(stream)

    def step(self, forward, offload) -> list:
        """One step: losses and the gradient, or None if it broke off. `offload`: a context for the forward."""
        kind = self.rng.choice(("one", "one", "two", "twice", "dropped", "breaks off"))
        self.weight.grad = None
        losses = []
        for _ in range(2 if kind == "two" else 1):
            with offload:
                losses.append(forward())
        if kind == "breaks off":
            self.fails_in = self.rng.randrange(6)
        if kind != "dropped":
            for loss in losses:
                with contextlib.suppress(Broken):
                    if kind == "twice":
                        self.backward(loss, retain_graph=True)
                    self.backward(loss)
        self.fails_in = -1
        # Torch keeps nodes of a broken backward in its queue until the next.
        torch.zeros((), requires_grad=True).backward()
        made = [loss.item() for loss in losses]
        self.ready.clear()
        return [*made, None if self.weight.grad is None else self.weight.grad.item()]


def simulated_offload(machine, kind=SimulatedTransport, mode="async", **options):
    """An Offload whose engine takes the CPU's tensors for those of `machine`."""
    return late_offload(kind(machine), mode, machine.host_memory, **options)


def streams_of(machine, count):
    return [machine.Stream(DEVICE) for _ in range(count)]
