"""`ackpt.audit`: one model per kind of report, each found and named; sound models of all tools without a finding."""

import functools
import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import ackpt
from ackpt.planner.explain.audit import _equality

WIDTH = 32


class Block(nn.Module):
    def __init__(self, *middle, width=WIDTH):
        super().__init__()
        self.up, self.middle = nn.Linear(width, 4 * width), nn.Sequential(*(middle or (nn.GELU(),)))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.middle(self.up(x)))


class Net(nn.Module):
    """Blocks, each called by ``run(block, x)``."""

    def __init__(self, run, blocks=4, make=Block):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)
        self.run = run

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x).square().mean()


def plain(block, x):
    return block(x)


by_torch = functools.partial(checkpoint, use_reentrant=False)
by_reentrant = functools.partial(checkpoint, use_reentrant=True)


def batch(rows=64):
    return torch.randn(rows, WIDTH)


def kinds(*args, **kwargs):
    return [finding.kind for finding in ackpt.audit(*args, compare_budget=False, **kwargs).findings]


def only(*args, **kwargs):
    """The only finding."""
    (finding,) = ackpt.audit(*args, compare_budget=False, **kwargs).findings
    return finding


# Sound ones


class Custom(nn.Module):
    """As a library wraps a function that it makes: neither a module nor a method of one."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        def forward_of(block):
            return lambda *inputs: block(*inputs)

        for block in self.blocks:
            x = checkpoint(forward_of(block), x, use_reentrant=False)
        return x.square().mean()


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


def compiled():
    return ackpt.compile(Net(plain), batch(), budget=0.7)


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


class Taught(nn.Module):
    """A teacher without gradients, checkpointed too."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Net(by_torch), Net(by_torch)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).square()


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
    "taught": Taught,
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
    "ackpt compile": compiled,
    "batch norm by ackpt": lambda: Net(ackpt.checkpoint, make=lambda: Block(nn.BatchNorm1d(4 * WIDTH), nn.GELU())),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_has_no_finding(name):
    torch.manual_seed(0)
    model = SOUND[name]()
    audit = ackpt.audit(model, batch(), compare_budget=False)
    assert audit.findings == () and audit.ok and audit.differences == {} and audit.notes == ()


def llama(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=0.1, **options)
    return transformers.LlamaForCausalLM(config).train()


def tokens():
    ids = torch.randint(64, (2, 16))
    return {"input_ids": ids, "labels": ids}


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)).train()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_transformers_switch(use_reentrant, every_n_layers):
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant}, every_n_layers=every_n_layers)
    audit = ackpt.audit(model, tokens(), compare_budget=False)
    layers = [0, 1, 2][::every_n_layers]
    assert audit.findings == () and [r.modules for r in audit.regions] == [(f"model.layers.{n}",) for n in layers]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_peft_with_the_switch(use_reentrant):
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert kinds(lora(model), tokens()) == []


def test_transformers_and_ackpt():
    model = llama(use_cache=False)
    ackpt.apply_activation_checkpointing(model)
    assert kinds(model, tokens()) == []


def test_accelerate():
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


# One per report


def test_dropout_that_is_drawn_again():  # OLMo-core 828
    run = functools.partial(by_torch, preserve_rng_state=False)
    found = only(Net(run, make=lambda: Block(nn.GELU(), nn.Dropout(0.5))), batch())
    assert (found.kind, found.module) == ("random", "blocks.0") and "preserve_rng_state" in found.fix


class Noise(nn.Module):
    def forward(self, x):
        return x * random.random()


@pytest.mark.parametrize("run", [by_torch, by_reentrant])
def test_random_numbers_of_python(run):
    found = only(Net(run, make=lambda: Block(nn.GELU(), Noise())), batch())
    assert found.kind == "random" and "Python's random" in found.message


class Generated(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator)


def test_random_numbers_of_other_generators():
    assert "a torch.Generator" in only(Net(by_torch, make=lambda: Block(Generated())), batch()).message
    assert kinds(Net(ackpt.checkpoint, make=lambda: Block(Generated())), batch()) == []
    without = functools.partial(ackpt.checkpoint, preserve_rng_state=False)
    assert kinds(Net(without, make=lambda: Block(Generated())), batch()) == ["random"]


@pytest.mark.parametrize("run", [by_torch, by_reentrant])
def test_running_statistics_that_are_updated_twice(run):
    found = only(Net(run, make=lambda: Block(nn.BatchNorm1d(4 * WIDTH), nn.GELU())), batch())
    assert (found.kind, found.module[:7]) == ("statistics", "blocks.") and "middle.0.running" in found.message


def test_a_closure_that_changes_before_backward():  # pytorch's documentation
    class Closure(Net):
        def forward(self, x):
            x = self.stem(x)
            for scale, block in enumerate(self.blocks, 1):
                x = checkpoint(lambda y: block(y) * scale, x, use_reentrant=False)  # noqa: B023
            return self.head(x).square().mean()

    found = only(Closure(plain), batch())
    assert found.kind == "changed" and "'block'" in found.message and found.module == "blocks.0"


def test_an_attribute_that_changes_before_backward():  # peft 2826
    class Switch(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    class Adapters(Net):
        def forward(self, x):
            for block in self.blocks:
                block.middle[0].scale = 2.0
            loss = super().forward(x)
            for block in self.blocks:
                block.middle[0].scale = 1.0
            return loss

    found = only(Adapters(by_torch, make=lambda: Block(Switch())), batch())
    assert found.kind == "changed" and "'blocks.0.middle.0'" in found.message and "scale" in found.message


def test_a_counter_that_counts_twice():  # pytorch 196956
    class Counting(Block):
        calls = 0

        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    found = only(Net(by_torch, make=Counting), batch())
    assert found.kind == "twice" and "calls" in found.message


def test_reentrant_without_inputs_that_require_grad():  # peft 1142, trl 3089
    class Frozen(Net):
        def enable_input_require_grads(self):
            """As models of transformers have it."""

    net = Frozen(by_reentrant)
    net.stem.requires_grad_(False)
    audit = ackpt.audit(net, batch())
    (found,) = audit.findings
    assert (found.kind, found.module) == ("no_gradients", "blocks.0")
    assert "enable_input_require_grads" in found.fix and audit.differences["gradient blocks.0.up.weight"] is None


def test_children_wrapped_instead_of_blocks():  # accelerate 3897
    net = Net(plain)
    wrappers.apply_activation_checkpointing(net.blocks, check_fn=lambda m: isinstance(m, (nn.Linear, nn.GELU)))
    found = only(net, batch())
    assert (found.kind, found.module) == ("children", "blocks.0")


def test_a_vision_tower_that_is_never_wrapped():  # NeMo Automodel 2840
    class Both(Net):
        def __init__(self):
            super().__init__(by_torch)
            self.tower = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x):
            return super().forward(self.tower(x))

    found = only(Both(), batch())
    assert found.kind == "not_covered" and found.module == "tower.0" and "4 x tower.*" in found.message


def test_layers_of_another_kind_that_are_never_wrapped():  # NeMo Automodel 3192
    class Linear(Block):
        pass

    net = Net(lambda block, x: by_torch(block, x) if type(block) is Block else block(x))
    net.blocks.extend([Linear(), Linear()])
    audit = ackpt.audit(net, batch(), compare_budget=False)
    assert [f.kind for f in audit.findings] == ["not_covered"] and audit.not_regions == ("blocks.4", "blocks.5")


class Switched(nn.Module):
    """A model with a switch, as those of transformers and timm."""

    def __init__(self, use_cache=False):
        super().__init__()
        self.net = Net(plain)
        self.gradient_checkpointing = True
        self.config = type("Config", (), {"use_cache": use_cache})()

    def forward(self, x):
        on = self.gradient_checkpointing and self.training and not self.config.use_cache
        self.net.run = by_torch if on else plain
        return self.net(x)


def test_a_cache_that_switches_checkpointing_off():
    assert kinds(Switched(), batch()) == []
    found = only(Switched(use_cache=True), batch())
    assert found.kind == "cache" and "use_cache = False" in found.fix


def test_checkpointing_in_evaluation_mode():
    found = only(Switched().eval(), batch())
    assert found.kind == "evaluation" and "train()" in found.fix


def test_transformers_in_evaluation_mode():
    model = llama().eval()
    model.activation_checkpointing_enable()
    assert kinds(model, tokens()) == ["evaluation"]


def test_a_cache_that_is_returned():  # FSDP's wrapper around the layers of transformers
    model = llama()
    layer = type(model.model.layers[0])
    wrappers.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    assert kinds(model, tokens()) == ["cache"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_without_input_gradients():  # peft 1142
    model = lora(llama())
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing, module._gradient_checkpointing_func = True, by_reentrant
    found = only(model, tokens())
    assert found.kind == "no_gradients" and "enable_input_require_grads" in found.fix and "lora_A" in found.message


def test_an_offload_that_is_entered_around_backward_only():
    net, x = Net(plain), batch()

    def step():
        loss = net(x)
        with ackpt.offload_saved_tensors(min_bytes=0):
            loss.backward()

    found = only(step, resident=[net])
    assert found.kind == "offload" and "around the forward" in found.fix


class OffloadActivations(saved_tensors_hooks):
    """As TRL's and torchtune's, on any device."""

    def __init__(self, min_offload_size=1024, keep=False):
        self.min_tensor_size_bytes, self.tracker, self.kept = min_offload_size, {}, []

        def pack(tensor):
            number = len(self.tracker)
            if keep:
                self.kept.append(tensor)
            is_large = tensor.numel() * tensor.element_size() >= self.min_tensor_size_bytes
            self.tracker[number] = tensor.clone() if is_large else tensor
            return number

        super().__init__(pack, lambda number: self.tracker.pop(number))


def with_offload(**options):
    net, x = Net(plain), batch()

    def step():
        with OffloadActivations(**options):
            loss = net(x)
        loss.backward()

    return step


def test_an_offload_below_its_threshold():  # trl 5738
    assert kinds(with_offload()) == []
    found = only(with_offload(min_offload_size=1 << 20))
    assert found.kind == "offload" and "1.0 MiB" in found.message


def test_an_offload_that_never_frees():  # axolotl 3638
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor.device, tensor.clone()

    net, x = Net(plain), batch()

    def step():
        with saved_tensors_hooks(pack, lambda packed: packed[1]):
            loss = net(x)
        loss.backward()

    found = only(step)
    assert found.kind == "offload" and "not freed" in found.message
    assert kept == []


def test_regions_inside_regions_of_the_same_blocks():
    found = only(Net(lambda block, x: by_torch(lambda y: by_torch(block, y), x)), batch())
    assert (found.kind, found.module) == ("nested", "blocks.0")


@pytest.mark.parametrize("wrap", [wrappers.apply_activation_checkpointing, ackpt.apply_activation_checkpointing])
def test_two_tools_around_the_same_blocks(wrap):
    net = Net(by_torch)
    wrap(net, check_fn=lambda module: isinstance(module, Block))
    assert kinds(net, batch()) == ["nested"]


def test_one_region_around_everything():  # pytorch 147449
    found = only(Custom([nn.Sequential(*(Block() for _ in range(6)))]), batch(512))
    assert found.kind == "no_effect" and "at once" in found.message


def test_a_head_that_saves_most():
    class Model(Net):
        def __init__(self):
            super().__init__(by_torch)
            self.head = nn.Linear(WIDTH, 4096)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = self.run(block, x)
            return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))

    found = only(Model(), batch(128))
    assert found.kind == "head" and "chunked_cross_entropy" in found.fix


def test_an_input_that_is_changed_in_place():  # TabPFN 1138, mamba.py 80
    class InPlace(Block):
        def forward(self, x):
            return super().forward(x.mul_(2))

    found = only(Net(lambda block, x: by_torch(block, x.clone()), make=InPlace), batch())
    assert (found.kind, found.module) == ("error", "blocks.0") or "modified by an inplace" in found.message


def test_a_recomputation_that_routes_other_tokens():  # pytorch 155171
    class Routed(Block):
        def forward(self, x):
            chosen = torch.rand(len(x)) < 0.5
            return x.index_put((chosen,), super().forward(x[chosen]))

    run = functools.partial(by_torch, preserve_rng_state=False)
    found = only(Net(run, make=Routed), batch())
    assert found.kind == "error" and "different metadata" in found.message and "random numbers" in found.message


# Restoring, arguments


def test_everything_is_as_before():
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


def test_a_method_of_a_trainer():
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


def test_counters_of_a_step():
    net, x, steps = Net(by_torch), batch(), 0

    def step():
        nonlocal steps
        global STEPS
        steps, STEPS = steps + 1, STEPS + 1
        net(x).backward()

    assert kinds(step) == [] and steps == STEPS == 0


def test_nothing_of_a_step_is_kept():
    net = Net(by_torch)
    reference, audit = weakref.ref(net), ackpt.audit(net, batch())
    del net
    gc.collect()
    assert reference() is None and audit.ok


def test_a_step_that_cannot_be_repeated_is_said():
    net, batches = Net(by_torch), iter([batch() for _ in range(20)])
    audit = ackpt.audit(lambda: net(next(batches)).backward())
    assert audit.ok and "two equal runs" in audit.notes[0]


def test_another_kind_of_checkpointing_is_said():
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
def test_bad_input(error, said, args):
    with pytest.raises(error, match=said):
        ackpt.audit(*args())


def test_inputs_by_keyword_are_refused():
    with pytest.raises(TypeError, match=r"inputs of a model as one batch: audit\(model, {'x': x, 'y': y}\)"):
        ackpt.audit(Net(plain), x=batch(), y=3)


def test_a_step_without_checkpointing_says_so():
    audit = ackpt.audit(Net(plain), batch(), compare_budget=False)
    assert audit.ok and audit.regions == ()
    assert "region          none: nothing in this step runs under checkpointing" in str(audit)


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


def test_inside_hooks_on_saved_tensors():
    with save_on_cpu(), pytest.raises(ValueError, match="inside the step"):
        ackpt.audit(Net(plain), batch())


def test_a_step_that_is_wrong_itself_raises_its_error():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ackpt.audit(Net(by_torch), torch.ones(2, 3))


def test_what_it_measures():
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
