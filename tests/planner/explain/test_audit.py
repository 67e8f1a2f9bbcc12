"""`ackpt.audit`: what it measures and restores, which input it refuses, and that sound models have no finding."""

import functools
import gc
import random
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from audited_models import WIDTH, Block, Custom, Net, batch, by_reentrant, by_torch, kinds, llama, lora, plain, tokens
from conftest import model_of, raises
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import ackpt
from ackpt.planner.explain.audit import _equality


def test_the_audit_restores_model_optimizer_and_random_states():
    net, x = Net(by_torch, make=lambda: Block(nn.BatchNorm1d(4 * WIDTH), nn.Dropout(0.1))), batch()
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    losses = []

    def step():
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item() + random.random())

    step()
    net.stem.weight.grad = None
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = [value.clone() for each in optimizer.state.values() for value in each.values()]
    gradients = [p.grad if p.grad is None else (p.grad, p.grad.clone()) for p in net.parameters()]
    streams = torch.get_rng_state(), random.getstate(), schedule.state_dict(), list(losses)
    audit = ackpt.audit(step, resident=[net, optimizer])
    assert audit.notes == () and "statistics" in [finding.kind for finding in audit.findings]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(map(torch.equal, state, (value for each in optimizer.state.values() for value in each.values())))
    for parameter, gradient in zip(net.parameters(), gradients):
        assert parameter.grad is None if gradient is None else parameter.grad is gradient[0]
        assert gradient is None or torch.equal(*gradient)
    assert torch.equal(torch.get_rng_state(), streams[0]) and random.getstate() == streams[1]
    assert schedule.state_dict() == streams[2] and losses == streams[3]
    assert not net._forward_hooks and not torch.nn.modules.module._global_forward_hooks
    step()  # and the next step runs


def test_a_step_that_is_a_method_restores_its_object():
    class Trainer:
        def __init__(self):
            self.net, self.x, self.steps, self.losses = Net(by_torch), batch(), 0, []
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def step(self):
            self.steps += 1
            loss = self.net(self.x)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    trainer = Trainer()
    assert kinds(trainer.step) == []
    assert (trainer.steps, trainer.losses, len(trainer.optimizer.state)) == (0, [], 0)
    assert all(parameter.grad is None for parameter in trainer.net.parameters())


STEPS = 0


def test_counters_of_a_step_are_restored():
    net, x, steps = Net(by_torch), batch(), 0

    def step():
        nonlocal steps
        global STEPS
        steps, STEPS = steps + 1, STEPS + 1
        net(x).backward()

    assert kinds(step) == [] and steps == STEPS == 0


def test_the_audit_keeps_no_tensor_of_the_step():
    net = Net(by_torch)
    reference, audit = weakref.ref(net), ackpt.audit(net, batch())
    del net
    gc.collect()
    assert reference() is None and audit.ok


def test_a_step_that_cannot_be_repeated_is_noted(seeded):
    net, batches = Net(by_torch), iter([batch() for _ in range(20)])
    audit = ackpt.audit(lambda: net(next(batches)).backward())
    assert audit.ok and "two equal runs" in audit.notes[0]


def test_another_kind_of_checkpointing_is_noted():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            ctx.save_for_backward(x)
            return function(x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                ctx.function(x).backward(gradient)
            return None, x.grad

    audit = ackpt.audit(Net(Own.apply), batch(), compare_budget=False)
    assert audit.ok and audit.notes[0].startswith("an unknown kind of checkpointing recomputes 4 x blocks.*")


@pytest.mark.parametrize(
    ("error", "said", "args"),
    [
        (TypeError, "needs a batch", lambda: (Net(plain),)),
        (TypeError, "takes no batch", lambda: (lambda: None, batch())),
        (TypeError, "got int", lambda: (3,)),
        (ValueError, "found no model", lambda: (lambda: None,)),
        (ValueError, "runs no backward", lambda: (nn.Identity(), batch())),
        (TypeError, "before torch.compile", lambda: (torch.compile(Net(plain), backend="eager"), batch())),
    ],
)
def test_bad_input_is_refused(error, said, args):
    raises(error, said, lambda: ackpt.audit(*args()))


def test_inputs_by_keyword_are_refused():
    with pytest.raises(TypeError, match=r"inputs of a model as one batch: audit\(model, {'x': x, 'y': y}\)"):
        ackpt.audit(Net(plain), x=batch(), y=3)


def test_a_step_without_checkpointing_says_so():
    audit = ackpt.audit(Net(plain), batch(), compare_budget=False)
    assert audit.ok and audit.regions == ()
    assert "region          none: nothing in this step runs under checkpointing" in str(audit)
    assert str(audit).startswith("audit           Net: no checkpointing found") and not audit.notes


def test_a_model_without_a_loss_says_what_is_differentiated():
    class Outputs(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x), "hidden": x.tanh(), "gates": super().forward(x).sum(1)}

    said = r"no single loss, so all outputs that require grad are differentiated, of shapes \[4, 8\], \[4\], with fixed"
    (note,) = ackpt.audit(Outputs(8, 8), torch.ones(4, 8), compare_budget=False).notes
    assert re.search(said, note)


@pytest.mark.parametrize("rows", [1, 2, 4, 512])
def test_an_effect_is_judged_where_regions_are_larger_than_random_states(rows):
    audit = ackpt.audit(Custom([nn.Sequential(*(Block() for _ in range(6)))]), batch(rows), compare_budget=False)
    is_judged = rows * WIDTH * 4 * 6 * 9 > 10 * torch.get_rng_state().nbytes
    assert [finding.kind for finding in audit.findings] == ["no_effect"] * is_judged
    assert ("effect          not judged" in str(audit)) is not is_judged


def test_a_region_that_no_backward_reaches_and_a_single_difference():
    class Unused(Net):
        def forward(self, x):
            self.run(self.blocks[0], x)
            return self.head(x).square().mean()

    assert "(torch): saves 0 B, is not recomputed" in str(ackpt.audit(Unused(by_torch), batch(), compare_budget=False))
    text = _equality(SimpleNamespace(differences={"gradient w": 0.5}, arises_in=""))
    assert text == "no, 1 value differs: gradient w differs by up to 0.5"


def test_saved_tensors_hooks_around_the_audit_are_refused():
    with save_on_cpu(), pytest.raises(ValueError, match="inside the step"):
        ackpt.audit(Net(plain), batch())


def test_a_step_that_is_wrong_itself_raises_its_error():
    raises(RuntimeError, "mat1 and mat2", lambda: ackpt.audit(Net(by_torch), torch.ones(2, 3)))


def test_regions_bytes_and_flops_are_measured():
    net, x = Net(by_torch), batch(256)
    audit = ackpt.audit(net, x)
    assert [(r.modules, r.recomputations) for r in audit.regions] == [((f"blocks.{n}",), 1) for n in range(4)]
    row = 256 * WIDTH * 4
    assert {r.saved_bytes for r in audit.regions} == {row}
    assert {r.dropped_bytes for r in audit.regions} == {row + 2 * 4 * row}
    assert audit.measured.peak_bytes < audit.baseline.peak_bytes
    assert audit.baseline_saved_bytes - audit.saved_bytes == 4 * (8 * row - torch.get_rng_state().nbytes)
    assert audit.recompute_flops == 4 * 2 * 256 * WIDTH * 4 * WIDTH  # early stop leaves the second product out
    assert audit.plan.peak_bytes <= audit.measured.peak_bytes
    assert "4 x blocks.* (torch)" in str(audit) and "no findings" in str(audit)


def test_the_inputs_of_ackpts_regions_are_their_saved_bytes():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))
    ackpt.apply_activation_checkpointing(model)
    audit = ackpt.audit(model, torch.randn(512, 32), compare_budget=False)
    assert [region.saved_bytes for region in audit.regions] == [0, 65_536, 65_536]  # the first one's is the batch


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


def test_seconds_are_measured_and_plans_show_their_peaks():
    audit = ackpt.audit(Net(plain), batch())
    assert audit.measured.seconds.median > 0 and audit.baseline.seconds.median > 0
    peaks, costs = zip(*audit.curve)
    assert 2 <= len(peaks) <= 3 and sorted(peaks, reverse=True) == list(peaks) and sorted(costs) == list(costs)
    least = ackpt.plan(ackpt.trace(Net(plain), batch()), peaks[-1])  # the smallest feasible budget
    assert least.peak_bytes == peaks[-1] and abs(least.cost - costs[-1]) < 0.2
    text = str(audit)
    assert re.search(r"step time +\S+ s, baseline \S+ s \([+-]\d+%\), measured", text)
    assert re.search(r"plans +peak and added time: .* at \+", text) and "no checkpointing at all" in text
