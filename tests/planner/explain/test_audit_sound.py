"""`ackpt.audit` finds nothing in sound models of all tools."""

import functools

import pytest
import torch
from audited_models import WIDTH, Block, Custom, Net, batch, by_reentrant, by_torch, kinds, llama, lora, plain, tokens
from conftest import model_of
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import ackpt


def wrapped(**options):
    net = Net(plain)
    wrap = functools.partial(wrappers.checkpoint_wrapper, **options)
    wrappers.apply_activation_checkpointing(net, wrap, check_fn=lambda module: isinstance(module, Block))
    return net


def by_ackpt(**options):
    net = Net(plain, make=lambda: Block(nn.GELU(), nn.Dropout(0.1)))
    ackpt.apply_activation_checkpointing(net, **options)
    return net


def budgeted():
    net = Net(plain, make=lambda: Block(nn.GELU(), nn.Dropout(0.1)))
    ackpt.apply_budget(net, batch(), budget=0.7)
    return net


def selective(block, x):
    operations = [torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, operations)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def every_other(block, x):
    every_other.count += 1
    return by_torch(block, x) if every_other.count % 2 else block(x)


every_other.count = 0


def offloaded(block, x):
    with ackpt.offload_saved_tensors(min_bytes=0):
        return block(x)


def saved_on_cpu(block, x):
    with save_on_cpu(pin_memory=True):
        return by_torch(block, x)


class Sequence(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.chain, self.run = nn.Sequential(*(Block() for _ in range(6))), run

    def forward(self, x):
        return self.run(self.chain, 3, x).square().mean()


class Recursive(Net):
    """Regions inside regions, each of several blocks."""

    def forward(self, x):
        return self.head(self.halves(self.stem(x), [*self.blocks])).square().mean()

    def halves(self, x, blocks):
        if len(blocks) == 1:
            return blocks[0](x)
        for half in (blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]):
            x = self.run(self.halves, x, half)
        return x


class Shared(Net):
    def forward(self, x):
        for _ in range(4):
            x = self.run(self.blocks[0], x)
        return x.square().mean()


def taught():
    """A teacher without gradients, checkpointed too."""

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).square()

    return model_of(forward, student=Net(by_torch), teacher=Net(by_torch))


class Timm(nn.Module):
    """As timm's ``checkpoint_seq``, two blocks at a time."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(4)))
        self.grad_checkpointing = True

    def forward(self, x):
        def run_function(start, end, functions):
            def forward(y):
                for function in functions[start : end + 1]:
                    y = function(y)
                return y

            return forward

        x = self.stem(x)
        for start in (0, 2):
            x = by_reentrant(run_function(start, start + 1, [*self.blocks]), x)
        return x.square().mean()


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


SOUND = {
    "baseline": lambda: Net(plain),
    "torch": lambda: Net(by_torch, make=lambda: Block(nn.GELU(), nn.Dropout(0.1))),
    "torch reentrant": lambda: Net(by_reentrant, make=lambda: Block(nn.GELU(), nn.Dropout(0.1))),
    "torch selective": lambda: Net(selective),
    "functions": lambda: Custom(Net(plain).blocks),
    "every other": lambda: Net(every_other),
    "torch sequential": lambda: Sequence(functools.partial(checkpoint_sequential, use_reentrant=False)),
    "recursive": lambda: Recursive(by_torch, blocks=8),
    "shared": lambda: Shared(by_torch),
    "taught": taught,
    "timm": Timm,
    "autocast": lambda: Autocast(by_torch),
    "autocast reentrant": lambda: Autocast(by_reentrant),
    "torch wrapper": wrapped,
    "torch reentrant wrapper": lambda: wrapped(checkpoint_impl=wrappers.CheckpointImpl.REENTRANT),
    "save_on_cpu": lambda: Net(saved_on_cpu),
    "ackpt": by_ackpt,
    "ackpt offload": lambda: by_ackpt(offload=ackpt.offload_saved_tensors(min_bytes=0)),
    "ackpt sequential": lambda: Sequence(ackpt.checkpoint_sequential),
    "ackpt offload of saved tensors": lambda: Net(offloaded),
    "ackpt budget": budgeted,
    "ackpt compile": lambda: ackpt.compile(Net(plain), batch(), budget=0.7),
    "batch norm by ackpt": lambda: Net(ackpt.checkpoint, make=lambda: Block(nn.BatchNorm1d(4 * WIDTH), nn.GELU())),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_has_no_finding(name):
    model = SOUND[name]()
    audit = ackpt.audit(model, batch(), compare_budget=False)
    assert audit.findings == () and audit.ok and audit.differences == {} and audit.notes == ()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_the_switch_of_transformers_is_sound(use_reentrant, every_n_layers):
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant}, every_n_layers=every_n_layers)
    audit = ackpt.audit(model, tokens(), compare_budget=False)
    layers = [0, 1, 2][::every_n_layers]
    assert audit.findings == () and [r.modules for r in audit.regions] == [(f"model.layers.{n}",) for n in layers]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_adapters_with_the_switch_of_transformers_are_sound(use_reentrant):
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert kinds(lora(model), tokens()) == []


def test_a_model_of_transformers_with_regions_is_sound():
    model = llama(use_cache=False)
    ackpt.apply_activation_checkpointing(model)
    assert kinds(model, tokens()) == []


def test_a_step_of_accelerate_is_sound():
    accelerate = pytest.importorskip("accelerate")
    net, x = Net(by_torch), batch()
    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def step():
        with accelerator.accumulate(net):
            accelerator.backward(net(x))
            optimizer.step()
            optimizer.zero_grad()

    assert kinds(step) == []
