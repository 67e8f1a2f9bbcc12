# %% [markdown]
# # What PyTorch offers
#
# **How do PyTorch's own tools save memory, what do they cost, and when are they silently wrong?**

# %% [markdown]
# ```{figure} ../../results/figures/03_timelines.png
# :alt: Live memory of one step in four panels of equal width. Compiled by Inductor, it rises to a peak where backward begins. With PyTorch's memory budget at 0.5, about half as much is saved when backward begins, and memory rises a little above that. At 0.2, much less is saved, but in backward memory climbs to a peak above that of 0.5. The plan stays low in both halves and has the lowest peak.
# :class: dark-light
#
# Why PyTorch's memory budget bounds no peak: it bounds the bytes that are saved when backward begins (circle). The peak
# (triangle) comes later, when recomputed tensors are live. From a budget of 0.5 to 0.2, saved bytes fall and the peak
# rises. A plan of `ackpt` bounds the peak. (MiB, measured on a CPU. Inductor, `torch.compile`'s backend, compiles the
# first three steps; their recomputed tensors count as temporaries.)
# ```
#
# None of PyTorch's tools bounds the peak, and most of them are silently wrong on some steps. This chapter rebuilds them
# in a few lines each, measures them, and shows these steps. All tensors are in fp32, and all results come from this
# version of torch:

# %% tags=["hide-input"]
import contextlib
import itertools
import textwrap
import warnings
from functools import partial

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import aot_function, default_partition, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ackpt
from ackpt.metering.meter import memory_format
from experiments.graph_profile import panels_plot
from experiments.reports import plots
from experiments.results import Record, environment, markdown_table, write_text_atomic

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that transformers does not show
warnings.filterwarnings("ignore", message="FLOPs cannot be counted")  # those of Inductor's rows are counted below
warnings.filterwarnings("ignore", message="no output of")  # the losses of these small models are sums outside of them
torch.set_num_threads(2)
torch.__version__.partition("+")[0]

# %% [markdown]
# A small Transformer of $L$ blocks learns to reproduce its $T$ tokens. It calls each block through `run`, which a
# checkpoint can replace.

# %%
T, L, d, h, V = 512, 3, 128, 4, 256


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, d), nn.Linear(d, V)
        options = {
            "dropout": 0.0,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
        }
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, h, 4 * d, **options)
            for _ in range(L)
        )

    def forward(self, tokens, run=nn.Module.__call__):
        x = self.embed(tokens)
        for block in self.blocks:
            x = run(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


generator = torch.manual_seed(0)
model, tokens = Model(), torch.randint(V, (8, T // 8))


def step(forward=model, **arguments):
    model.zero_grad()
    forward(tokens, **arguments).backward()


def gradients(train):
    train()
    return [parameter.grad.clone() for parameter in model.parameters()]


baseline = gradients(step)

# %% [markdown]
# ## Checkpointing a block, in two designs
#
# Both designs save a block's input and recompute the rest in backward. {doc}`02_reentrant_checkpoint` implements the
# *reentrant* one, `use_reentrant=True`, in ten lines. The *non-reentrant* one, `use_reentrant=False`, runs the block
# with a graph, but saves a number in place of each tensor. It uses `saved_tensors_hooks(pack, unpack)`: autograd saves
# what `pack` returns for a tensor, and calls `unpack` with it when backward reads the tensor. Here, `unpack` recomputes
# the block; the tensors that the block saves this time are numbered in the same order:


# %%
def non_reentrant(
    function,
    *args,
    context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()),
):
    forward, recomputing = context_fn()
    numbers, tensors = itertools.count(), {}

    def unpack(number):
        if number not in tensors:
            saved = []
            with (
                torch.enable_grad(),
                recomputing,
                saved_tensors_hooks(saved.append, lambda nothing: nothing),
            ):
                function(*args)
            tensors.update(enumerate(saved))
        return tensors.pop(number)

    with forward, saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return function(*args)


reentrant, torch_non_reentrant = (
    partial(checkpoint, use_reentrant=value) for value in (True, False)
)
for run in (non_reentrant, torch_non_reentrant, reentrant):
    assert all(
        map(torch.equal, gradients(partial(step, run=run)), baseline)
    )

# %% [markdown]
# The non-reentrant form keeps the real graph, so gradients accumulate and hooks run as without a checkpoint. It assumes
# that the recomputation saves the same tensors in the same order; PyTorch compares shapes and dtypes only.
#
# ## Selective checkpointing
#
# Matrix products and attention are expensive; the other operations are cheap. *Selective* checkpointing saves the
# outputs of listed operations in a block's forward, and reuses them in its recomputation. A `TorchDispatchMode` does
# this: PyTorch calls its `__torch_dispatch__` in place of every operation below autograd:

# %%
aten = torch.ops.aten
EXPENSIVE = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Stored(TorchDispatchMode):
    def __init__(self, outputs, recomputing):
        super().__init__()
        self.outputs, self.recomputing = outputs, recomputing

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.recomputing and operation in EXPENSIVE:
            return self.outputs.pop(0)
        output = operation(*args, **(kwargs or {}))
        if operation in EXPENSIVE:
            self.outputs.append(
                tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            )
        return output


def two_modes():
    outputs = []
    return Stored(outputs, recomputing=False), Stored(
        outputs, recomputing=True
    )


torch_selective = partial(
    torch_non_reentrant,
    context_fn=partial(create_selective_checkpoint_contexts, EXPENSIVE),
)
for run in (partial(non_reentrant, context_fn=two_modes), torch_selective):
    assert all(
        map(torch.equal, gradients(partial(step, run=run)), baseline)
    )

# %% [markdown]
# ## Saving to the CPU
#
# `save_on_cpu` recomputes nothing. Its hooks copy each saved tensor to host memory, and back when backward reads it.
# Here, NumPy arrays stand in for host memory, because `ackpt.measure` counts only torch's allocator:

# %%
to_host = saved_tensors_hooks(
    lambda tensor: tensor.numpy(force=True).copy(), torch.tensor
)


def on_host(run, *args):
    with to_host:
        return run(*args)


# the inputs of blocks go to the host, the rest is recomputed
offloaded = partial(
    on_host, torch_non_reentrant
)
for train in (partial(on_host, step), partial(step, run=offloaded)):
    assert all(map(torch.equal, gradients(train), baseline))

# %% [markdown]
# {doc}`05_offload` shows where this tool loses time.
#
# ## The min-cut partitioner and the memory budget
#
# `torch.compile` captures forward and backward as one graph and cuts it. The tensors that cross the cut are saved.
# Autograd's own cut saves what each operation needs. The *minimum cut* saves the fewest bytes from which cheap
# operations can recompute the rest. The number of tensors that each cut saves for three elementwise operations:


# %%
def crossing(partition):
    def count(graph, _):
        (output,) = graph.graph.find_nodes(op="output")
        # all outputs of the forward but its result
        numbers.append(
            len(output.args[0]) - 1
        )
        return graph

    numbers = []
    function = aot_function(
        lambda x: x.relu().square().sin(),
        count,
        lambda graph, _: graph,
        partition,
    )
    function(torch.ones(4, requires_grad=True))
    return numbers[0]


by_cut = {
    "autograd": crossing(default_partition),
    "minimum": crossing(min_cut_rematerialization_partition),
}
assert by_cut["minimum"] < by_cut["autograd"]
by_cut

# %% [markdown]
# For the model above, both save about the same bytes ({ref}`table below <tab-torch-tools>`): the minimum cut recomputes
# neither matrix products nor, by default, the tensors that they read in backward, such as outputs of norms and GELU.
#
# The *memory budget*, `torch._functorch.config.activation_memory_budget`, is a number between 0, which saves only
# inputs, and 1, which saves the minimum cut. In between, a knapsack picks tensors to recompute until the saved bytes
# fit that fraction of the minimum cut. The budget must be set while `torch.compile` compiles, here with Inductor:


# %%
def compiled(budget, compiler=compile_fx):
    def backend(
        graph, inputs
    ):  # another one in each call: for one backend, Dynamo compiles once
        return compiler(graph, inputs)

    with functorch_config.patch(activation_memory_budget=budget):
        forward = torch.compile(model, backend=backend)
        step(forward)
    return partial(step, forward)


# %% [markdown]
# ## Checkpointing in transformers
#
# `model.activation_checkpointing_enable()` of `transformers` (before version 5.23: `gradient_checkpointing_enable`)
# makes every layer call its forward through torch's non-reentrant checkpoint. `every_n_layers=2` selects every second
# layer. The equivalent code in plain torch has the same peak, to the byte:

# %%
import transformers

sizes = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
config = transformers.LlamaConfig(
    vocab_size=V, num_hidden_layers=L, use_cache=False, **sizes
)
llama = transformers.LlamaForCausalLM(config)


def llama_step():
    llama.zero_grad()
    llama(input_ids=tokens, labels=tokens).loss.backward()


def llama_peak():
    return ackpt.measure(
        llama_step, resident=[llama, tokens], warmup=0, repeats=0
    ).dynamic_peak_bytes


peaks = {"baseline": llama_peak()}
llama.activation_checkpointing_enable(every_n_layers=2)
peaks["every_n_layers=2"] = llama_peak()
llama.activation_checkpointing_disable()
for layer in llama.model.layers[::2]:
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
assert llama_peak() == peaks["every_n_layers=2"]
for layer in llama.model.layers[::2]:
    del layer.forward
{name: memory_format(size) for name, size in peaks.items()}

# %% [markdown]
# `offload=True` puts `save_on_cpu` around each checkpoint. The Trainer makes the same calls for
# `TrainingArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})`.
#
# ## What each tool saves and costs
#
# *Saved* bytes are the activations live when backward begins. FLOPs count matrix products and attention; those of
# Inductor's rows are counted with a backend that cuts the same graph and runs operations one by one. The last rows show
# `ackpt`: a region around every block, and plans for 0.75 and 0.45 of the baseline's dynamic peak. A *plan* says what
# is saved, and when the rest is recomputed ({doc}`07_graph_profiler`). Gradients equal the baseline's to the last bit,
# in Inductor's rows up to rounding.


# %% tags=["hide-input"]
def every_second(block, x):
    return torch_non_reentrant(block, x) if list(model.blocks).index(block) % 2 == 0 else block(x)


def planned(budget):
    return partial(step, ackpt.compile(model, tokens, budget=budget))


ways = {
    "baseline": lambda: step,
    "reentrant": lambda: partial(step, run=reentrant),
    "non-reentrant": lambda: partial(step, run=torch_non_reentrant),
    "every second block": lambda: partial(step, run=every_second),
    "selective": lambda: partial(step, run=torch_selective),
    "`save_on_cpu`": lambda: partial(on_host, step),
    "non-reentrant, `save_on_cpu`": lambda: partial(step, run=offloaded),
    "Inductor": lambda: compiled(1.0),
    "Inductor, memory budget 0.5": lambda: compiled(0.5),
    "Inductor, memory budget 0.2": lambda: compiled(0.2),
    "`ackpt` regions": lambda: partial(step, run=ackpt.checkpoint),
    "`ackpt` plan, 0.75": lambda: planned(0.75),
    "`ackpt` plan, 0.45": lambda: planned(0.45),
}
steps, measured, flops = {}, {}, {}
for name, make in ways.items():
    train = steps[name] = make()
    one = measured[name] = ackpt.measure(train, resident=[model, tokens], repeats=0)
    by_inductor = name.startswith("Inductor")
    same = torch.allclose if by_inductor else torch.equal
    assert all(map(same, gradients(train), baseline))
    flops[name] = one.flops
    if by_inductor:
        budget = float(name[-3:]) if "budget" in name else 1.0
        flops[name] = ackpt.count_flops(compiled(budget, aot_eager_decomp_partition))
saved = {name: one.timeline.at(one.timeline.boundary)["activations"] for name, one in measured.items()}
peak = {name: one.dynamic_peak_bytes for name, one in measured.items()}
rows = [
    {
        "tool": name,
        "saved": f"{saved[name] / 2**20:.1f}",
        "peak": f"{peak[name] / 2**20:.1f}",
        "share": round(100 * peak[name] / peak["baseline"]),
        "flops": round(100 * (flops[name] / flops["baseline"] - 1)),
    }
    for name in ways
]
columns = {"tool": "tool", "saved": "saved, MiB", "peak": "dynamic peak, MiB"}
columns |= {"share": "of the baseline's peak, %", "flops": "recomputed FLOPs, %"}
caption = f"One step of a Transformer with {L} blocks, with PyTorch's tools and with `ackpt`, measured."
path = write_text_atomic("results/tables/03_tools.md", markdown_table(rows, columns, caption, "tab-torch-tools"))
half, fifth, plan = "Inductor, memory budget 0.5", "Inductor, memory budget 0.2", "`ackpt` plan, 0.45"
assert saved[fifth] < saved[half] and peak[fifth] > peak[half] > peak[plan] and flops[plan] < flops[fifth]
assert min(peak, key=peak.get) == "`save_on_cpu`"
assert peak["non-reentrant, `save_on_cpu`"] == peak["non-reentrant"]
assert flops["`ackpt` plan, 0.75"] == flops["selective"] == flops["baseline"]
assert flops["`ackpt` regions"] == flops["non-reentrant"] < flops["reentrant"]

# %% [markdown]
# ```{include} ../../results/tables/03_tools.md
# ```
#
# - *Non-reentrant* and `ackpt` regions recompute less than *reentrant*: they stop at the last saved tensor.
# - *Selective* recomputes no matrix product, but 83 % of the baseline's peak remain. It is not measurably faster than
#   *non-reentrant* (the ranges below overlap), because it handles every operation in Python.
# - `save_on_cpu` recomputes nothing and has the lowest peak. Its price is copies. It does not help *non-reentrant*,
#   which peaks in the first block's backward: no other block's input is live there.
# - The *memory budget* bounds saved bytes, not the peak. At 0.2 it recomputes more than at 0.5 and peaks higher,
#   because many recomputed tensors are live together. {doc}`07_graph_profiler` shows three peaks of one saved set.
# - The *plan* of 0.45 has a lower peak than both memory budgets, and recomputes less than that of 0.2.

# %% tags=["hide-input"]
drawn = {"Inductor": "Inductor"}
drawn |= {half: "PyTorch's memory\nbudget 0.5", fifth: "PyTorch's memory\nbudget 0.2", plan: "plan of 0.45"}
figure = panels_plot({label: measured[name].timeline for name, label in drawn.items()}, "")
path = plots.save(figure, "results/figures/03_timelines.png")  # the figure at the top of this chapter

# %% [markdown]
# We time steps relative to the baseline, those with a memory budget relative to Inductor: median and range of five
# rounds. On a GPU, copies to the host cost more than NumPy's copies do here.

# %% tags=["measured-time", "nbval-ignore-output"]
for reference in ("baseline", "Inductor"):
    print(f"relative to {reference}:")
    chosen = [
        n
        for n in steps
        if n.startswith("Inductor") == (reference == "Inductor")
    ]
    for name in chosen[1:]:
        ratio = ackpt.compare_seconds(
            {n: steps[n] for n in (reference, name)}
        ).ratios[name]
        print(
            f"  {name:30} x {ratio.median:.2f}  "
            f"({ratio.low:.2f} to {ratio.high:.2f})"
        )

# %% [markdown]
# ## The bug museum
#
# Each exhibit is one training step. *Wrong* means a result other than the baseline's, without error. {ref}`Chapter 2
# <tab-pitfalls>` has more.

# %% tags=["hide-input"]
calls = {"baseline": nn.Module.__call__, "reentrant": reentrant, "non-reentrant": torch_non_reentrant}
calls["ackpt"] = ackpt.checkpoint
museum = []


def exhibit(name, experiment, tools=calls, failure="wrong"):
    """Run the experiment with each tool; return the verdicts of the tools whose result is not the baseline's."""
    verdicts, truth = {}, None
    for tool, call in tools.items():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = experiment(call)
            truth = result if tool == "baseline" else truth
            verdicts[tool] = "right" if result == truth else failure
        except (RuntimeError, ValueError, ackpt.CheckpointError, ackpt.OffloadError) as error:
            result, verdicts[tool] = type(error).__name__, "error"
            result += textwrap.shorten(f": {error}".partition(". ")[0], 90, placeholder=" ...")
        line = f"{tool:17} {verdicts[tool]:9} {result}"
        print(textwrap.fill(line, 76, subsequent_indent=28 * " ", replace_whitespace=False))
    museum.extend([name, tool, verdict] for tool, verdict in verdicts.items() if tool != "baseline")
    return {tool: verdict for tool, verdict in verdicts.items() if verdict != "right"}


# %% [markdown]
# ### A shared block under data parallelism
#
# `DistributedDataParallel` averages each gradient over the processes as soon as it is complete. This model runs one
# block twice. One process is enough to see what would be sent:

# %%
dist.init_process_group(
    "gloo", store=dist.HashStore(), rank=0, world_size=1
)


class Twice(nn.Module):
    def __init__(self, call, below):
        super().__init__()
        self.call, self.below, self.block = (
            call,
            below(),
            nn.Linear(4, 4, bias=False),
        )

    def forward(self, x):
        return self.call(
            self.block, self.call(self.block, self.below(x))
        ).sum()


def sent_and_seen(call, below=nn.Identity):
    sent, module = [], Twice(call, below)
    parallel = DistributedDataParallel(module)
    parallel.register_comm_hook(
        None,
        lambda _, bucket: (
            sent.append(bucket.buffer().clone())
            or allreduce_hook(None, bucket)
        ),
    )
    parallel(torch.ones(2, 4, requires_grad=True)).backward()
    return [
        round(sum(t.sum().item() for t in each), 4)
        for each in (sent, [p.grad for p in module.parameters()])
    ]


assert exhibit("a shared block under DDP", sent_and_seen) == {
    "reentrant": "wrong"
}

# %% [markdown]
# DDP would send the first number; the optimizer uses the second. A reentrant backward computes the gradient in two
# parts. DDP averages only the first part, so the parameters of the processes diverge. If another layer's gradient is
# still missing, DDP raises an error at the second part:

# %%
with_layer_below = partial(sent_and_seen, below=partial(nn.Linear, 4, 4))
assert exhibit(
    "a shared block above another layer, under DDP", with_layer_below
) == {"reentrant": "error"}
dist.destroy_process_group()

# %% [markdown]
# ### A frozen embedding
#
# As in most LoRA setups, the embedding is frozen. Which of the three blocks get a gradient, and does the head?


# %%
def frozen_embedding(call):
    embed, head = nn.Embedding(8, 4).requires_grad_(False), nn.Linear(4, 1)
    blocks = [nn.Linear(4, 4) for _ in range(3)]
    x = embed(torch.arange(8))
    for block in blocks:
        x = call(block, x)
    head(x).sum().backward()
    return [layer.weight.grad is not None for layer in [*blocks, head]]


assert exhibit("a frozen embedding", frozen_embedding) == {
    "reentrant": "wrong"
}

# %% [markdown]
# In the reentrant form, only the head learns, and PyTorch only warns ({doc}`02_reentrant_checkpoint` explains why).
#
# ### A mask that changes before backward
#
# A model stores the mask of its batch in an attribute. Two forwards precede one backward, as in contrastive learning:


# %%
class Masked(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * self.mask).sin()


def two_batches(call):
    layer, losses = Masked(4, 4), []
    for mask in ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]):
        layer.mask = torch.tensor(mask)
        losses.append(
            call(layer, torch.ones(2, 4, requires_grad=True)).sum()
        )
    sum(losses).backward()
    return [round(row, 3) for row in layer.weight.grad.sum(1).tolist()]


assert exhibit("a mask that changes", two_batches) == {
    "reentrant": "wrong",
    "non-reentrant": "wrong",
}

# %% [markdown]
# Both of PyTorch's forms recompute with the second mask, so half of the rows get no gradient. `ackpt` restores the
# attribute.
#
# ### A mixture of experts
#
# Each forward of the router adjusts every expert's bias by its load, so the recomputation chooses other experts.


# %%
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = (
            nn.Linear(8, 4),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
        )
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        scores, result = self.router(x), torch.zeros_like(x)
        chosen = (scores + self.bias).argmax(1)
        load = chosen.bincount(minlength=4).float()
        self.bias += 0.5 * (load.mean() - load).sign()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            result = result.index_add(
                0,
                rows,
                expert(x[rows]) * scores[rows, number, None].sigmoid(),
            )
        return result


def router_gradient(call):
    layer = Experts()
    call(
        layer, torch.randn(32, 8, requires_grad=True)
    ).square().sum().backward()
    return round(
        layer.router.weight.grad.abs().sum().item(), 3
    ), layer.bias.tolist()


assert exhibit("a mixture of experts", router_gradient) == {
    "reentrant": "wrong",
    "non-reentrant": "error",
}

# %% [markdown]
# In the reentrant form, the second update of the bias cancels the first. The non-reentrant form raises an error: the
# experts get different numbers of tokens. `ackpt` restores the bias for the recomputation.
#
# ### Dropout under a memory budget
#
# The gradient of an element must be zero exactly where dropout zeroed its output:


# %%
class Noisy(nn.Module):
    def forward(self, x):
        for _ in range(6):
            x = F.dropout(x.sin(), 0.2)
        return x


def within(budget):
    def forward(x):
        with functorch_config.patch(activation_memory_budget=budget):
            return torch.compile(
                Noisy(),
                backend=lambda graph, inputs: compile_fx(graph, inputs),
            )(x)

    return forward


def zeros_agree(forward):
    x = torch.ones(4096, requires_grad=True)
    y = forward(x)
    y.sum().backward()
    return torch.equal(y == 0, x.grad == 0)


tools = {"baseline": Noisy()} | {
    f"memory budget {budget}": within(budget) for budget in (1.0, 0.5, 0.0)
}
tools["ackpt"] = ackpt.compile(
    Noisy(), torch.ones(4096, requires_grad=True), budget=0.6
)
assert exhibit("dropout", zeros_agree, tools) == {
    "memory budget 0.0": "wrong"
}

# %% [markdown]
# At 0, Inductor recomputes the masks with other random numbers. `ackpt` replays the forward's.
#
# ### A choice that has no effect
#
# Selective checkpointing sees the operations below autograd, where `linear` has become `addmm` or `mm`. Does listing
# `linear`, or returning `MUST_CPU_OFFLOAD`, change anything?


# %%
def offload_products(ctx, operation, *args, **kwargs):
    offload = operation in EXPENSIVE
    return (
        CheckpointPolicy.MUST_CPU_OFFLOAD
        if offload
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def some_effect(choice):
    if (
        choice is None
    ):  # a manual plan of ackpt: the fates of activations, by name
        ackpt.compile(
            model.head,
            torch.ones(2, d),
            policy="manual",
            options={"fates": {"linear": "saved"}},
        )
    contexts = partial(create_selective_checkpoint_contexts, choice)
    train = partial(
        step, run=partial(torch_non_reentrant, context_fn=contexts)
    )
    one = ackpt.measure(train, resident=[model, tokens], repeats=0)
    return (one.dynamic_peak_bytes, one.flops) != (
        peak["non-reentrant"],
        flops["non-reentrant"],
    )


tools = {
    "baseline": EXPENSIVE,
    "list [linear]": [aten.linear.default],
    "MUST_CPU_OFFLOAD": offload_products,
    "ackpt": None,
}
failures = {
    "list [linear]": "no effect",
    "MUST_CPU_OFFLOAD": "no effect",
    "ackpt": "error",
}
assert (
    exhibit(
        "a choice that has no effect",
        some_effect,
        tools,
        failure="no effect",
    )
    == failures
)

# %% [markdown]
# Both are ignored without a warning, and the step recomputes everything. A manual plan of `ackpt` raises an error if a
# name does not exist.
#
# ### A change that hooks hide
#
# A loop fills its batch buffer before backward. Autograd compares the versions of saved tensors, and raises an error.
# Under hooks it does not compare them, and on a CPU `save_on_cpu` makes no copy:


# %%
def early_fill(context):
    layer, batch = nn.Linear(4, 1, bias=False), torch.ones(2, 4)
    with context:
        loss = layer(batch).sum()
    batch.fill_(5)  # the next batch
    loss.backward()
    return layer.weight.grad.tolist()


tools = {
    "baseline": contextlib.nullcontext(),
    "save_on_cpu": save_on_cpu(),
    "ackpt": ackpt.offload_saved_tensors(),
}
failures = {"baseline": "error", "save_on_cpu": "wrong", "ackpt": "error"}
assert (
    exhibit("a batch that is filled early", early_fill, tools) == failures
)

# %% [markdown]
# Every element of the gradient should be 2. This is wrong on a CPU only: on a GPU, `save_on_cpu` does copy.
#
# ### Checkpointing that evaluation mode turns off
#
# `from_pretrained` returns a model in evaluation mode, and a loop of your own may forget `train()`:

# %%
llama.eval()
peaks = {"baseline": llama_peak()}
llama.activation_checkpointing_enable()
peaks["transformers"] = llama_peak()
llama.activation_checkpointing_disable()
ackpt.apply_activation_checkpointing(llama)
peaks["ackpt"] = llama_peak()
ackpt.remove_activation_checkpointing(llama)
assert peaks["ackpt"] < peaks["transformers"] == peaks["baseline"]
{name: memory_format(size) for name, size in peaks.items()}

# %% [markdown]
# In evaluation mode, the layers of `transformers` do not checkpoint, and no warning says so. The whole museum:

# %% tags=["hide-input"]
museum += [["evaluation mode", "transformers", "no effect"], ["evaluation mode", "ackpt", "right"]]
rows = {}
for name, tool, verdict in museum:
    row = rows.setdefault(name, {"exhibit": name, "fails": [], "ackpt": ""})
    if tool == "ackpt":
        row["ackpt"] = {"error": "raises"}.get(verdict, verdict)
    elif verdict != "right":
        row["fails"].append(f"{tool}: {'**wrong**' if verdict == 'wrong' else verdict}")
table = [{**row, "fails": ", ".join(row["fails"])} for row in rows.values()]
assert all(row["ackpt"] in ("right", "raises") and row["fails"] for row in table)
columns = {"exhibit": "exhibit", "fails": "what fails in PyTorch's tools", "ackpt": "`ackpt`"}
caption = "Training steps on which PyTorch's memory-saving tools fail. *Wrong*: another result, and no error."
path = write_text_atomic("results/tables/03_museum.md", markdown_table(table, columns, caption, "tab-museum"))
results = {name: {"dynamic_peak_bytes": peak[name], "flops": flops[name]} for name in measured}
sizes = {"tokens": T, "layers": L, "dim": d, "heads": h, "vocab_size": V}
where = environment("cpu", "notebooks/03_what_pytorch_offers.py")
record = Record("what_pytorch_offers", sizes, {"steps": results, "museum": museum}, where)
path = record.save("results/cpu/03_what_pytorch_offers.json")

# %% [markdown]
# ```{include} ../../results/tables/03_museum.md
# ```
#
# :::{admonition} Takeaway
# :class: tip
# Before you trust a tool that saves memory, check two things: the gradients of one step equal those without the tool,
# and the measured peak falls.
# :::
#
# ## Exercises
#
# :::{admonition} Exercise 1: predict before measuring
# :class: note
# How many more bytes does *selective* save per block than *non-reentrant*? A linear layer of width $d$ writes $d$
# elements per token; attention writes its output and one element per head. Which of these outputs is saved in vain?
# :::

# %% tags=["solution"]
# Queries, keys and values 3 d, attention d + h, out d, up 4 d, down d. The output of `down` is saved in vain: it is only
# added to the residual stream, and the backward of an addition reads nothing.
predicted = 4 * T * (3 * d + d + h + d + 4 * d + d)
difference = saved["selective"] - saved["non-reentrant"]
print(f"predicted {predicted:,}, measured {difference // L:,}, in vain {4 * T * d:,}")
assert difference == L * predicted

# %% [markdown]
# :::{admonition} Exercise 2: fix a script that runs out of memory
# :class: note
# This script accumulates the gradients of four small batches. Its dynamic peak must not exceed 8 MiB. First fix it
# without recomputing anything. Then reduce the peak to 5 MiB.
#
# ```python
# model.zero_grad()
# total = 0
# for batch in tokens.split(2):
#     total = total + model(batch) / 4
# total.backward()
# ```
# :::


# %% tags=["solution"]
# The graphs of all batches live until backward. With a backward per batch, there is one graph at a time.
def script(at_once, run=nn.Module.__call__):
    model.zero_grad()
    losses = []
    for batch in tokens.split(2):
        losses.append(model(batch, run) / 4)
        if not at_once:
            losses.pop().backward()
    if at_once:
        sum(losses).backward()


variants = {"script": (True,), "a backward per batch": (False,), "and checkpoints": (False, ackpt.checkpoint)}
for (name, arguments), most in zip(variants.items(), (16, 8, 5)):
    train = partial(script, *arguments)
    assert all(map(partial(torch.allclose, atol=1e-6), gradients(train), baseline))
    one = ackpt.measure(train, resident=[model, tokens], warmup=0, repeats=0)
    print(f"{name:20} {one.dynamic_peak_bytes / 2**20:.1f} MiB")
    assert most / 2 < one.dynamic_peak_bytes / 2**20 <= most

# %% [markdown]
# ## Llama 3 8B with selective checkpointing

# %% tags=["hide-input"] alt="Three stacked bars. With every second product saved, the peak is 95.9 GiB, above the memory of the GPU, and the time 1.49 seconds."
from experiments.running_model import bars

figure = bars(3)
path = plots.save(figure, "results/figures/03_running_model.png")
figure

# %% [markdown]
# *The step of {doc}`chapter 1 <01_where_memory_goes>`, if every block is a region that also saves the outputs of
# attention and of every second matrix product; predicted.*
#
# The step takes 13 % longer than the baseline, instead of 25 %, but needs 95.9 GiB: too much for this GPU. Such options
# offer a few fixed peaks, and possibly none that fits.
#
# You can now choose among PyTorch's tools, and recognize the steps in which they go wrong.
