# %% [markdown]
# # The reentrant checkpoint, from scratch
#
# **What does a checkpoint save, where do common implementations go wrong, and what does a correct one cost?**

# %% [markdown]
# ```{figure} ../../results/figures/02_autograd.png
# :alt: Three rows of boxes, the nodes of autograd's graph for four sines and a sum, with arrows from the loss to the leaf. Without a region, each of four sine nodes has a tensor below it: the first the input x, the others saved activations. With a region, after the forward, one wide node replaces the four and saves x alone. In its backward, a graph of four sine nodes exists again, with x and three recomputed activations.
# :class: dark-light
#
# The graph that autograd records. A *region*, the part of a model that one checkpoint covers, is a single node: it
# saves its input. Its backward recomputes the function, builds the inner graph, and frees it at the end.
# ```
#
# A checkpoint saves the input of a region, and recomputes in backward the tensors that the derivatives need. Twenty
# lines of PyTorch do that, and $\sqrt n$ regions reduce the $n$ activations of a chain to $2 \sqrt n$. But if the
# recomputation differs from the forward in anything, gradients are silently wrong.

# %% tags=["hide-input"]
import torch
import torch.nn.functional as F
from torch import nn

import ackpt

generator = torch.manual_seed(0)

# %% tags=["hide-input"]
import functools
import gc
import warnings

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ackpt.metering.meter import compare_seconds, measure
from ackpt.models import Block, TransformerConfig
from experiments.pitfalls.checkpoints import verdicts
from experiments.reports import plots
from experiments.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)


def measured(function, *resident):
    """Measure one step: forward, sum, backward."""

    def step():
        x.grad = None
        function(x).sum().backward()

    gc.collect()  # what earlier cells have left
    return measure(step, resident=[x, *resident], warmup=0, repeats=0)


# %% [markdown]
# ## Ten lines
#
# A region computes $y = \phi(x)$. Its backward computes $\bar x = J^\top \bar y$, where a bar marks a gradient of the
# loss and $J$ is the derivative of $\phi$ at $x$. PyTorch multiplies by the derivative of one operation after another,
# and each operation saves the tensors that its own derivative needs. All these tensors are functions of $x$, so a
# checkpoint saves $x$ alone, and recomputes the rest when $\bar y$ arrives:


# %%
class TenLines(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, *torch.autograd.grad(y, [x], grad)


# %% [markdown]
# The forward runs without a graph, so it saves no intermediate tensor. The backward recomputes the function from a new
# leaf, with a graph, and backpropagates the gradient through it. That second backward enters the autograd engine again,
# *inside* the first one, so the checkpoint is called *reentrant*.
#
# Compare four sines in a row with and without a checkpoint:


# %%
def four_sines(x):
    return x.sin().sin().sin().sin()


def checkpointed(x):
    return TenLines.apply(four_sines, x)


x = torch.ones(2**14, requires_grad=True)
gradients = [
    torch.autograd.grad(run(x).sum(), x)[0]
    for run in (four_sines, checkpointed)
]
torch.equal(*gradients)

# %% [markdown]
# The gradients are bit-identical; autograd's graph differs (figure at the top).
#
# A sine saves its input. The first input is $x$, which is allocated anyway, so the baseline saves three activations of
# $S$ bytes each, and the checkpoint none. The other 8 bytes are the loss and its gradient.

# %% tags=["hide-input"]
from experiments.reports import schematics
from experiments.widgets.autograd_graphs import autograd_graphs

figure = schematics.autograd_figure(autograd_graphs())
path = plots.save(figure, "results/figures/02_autograd.png")  # the figure at the top of this chapter

# %%
S = x.nbytes


def saved_bytes(function, *resident):
    timeline = measured(function, *resident).timeline
    return timeline.at(timeline.boundary)["activations"]


for run in (four_sines, checkpointed):
    print(f"{saved_bytes(run):,} bytes saved; 3 S = {3 * S:,}")

# %% [markdown]
# The price is recomputation: a baseline step costs three forwards ({doc}`01_where_memory_goes`), with PyTorch's
# reentrant checkpoint four:

# %%
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
rows = torch.randn(128, 64, requires_grad=True)
baseline_flops = ackpt.count_flops(lambda: mlp(rows).sum().backward())
flops = ackpt.count_flops(
    lambda: torch_checkpoint(mlp, rows, use_reentrant=True).sum().backward()
)
round(flops / baseline_flops, 3)

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A checkpoint saves the region's input in place of its activations, for at most one more forward: a third more FLOPs in
# that part of the step.
# :::

# %% tags=["hide-input"]
from experiments.reports.figures import curves_plot
from experiments.widgets.chain_steps import chain_steps

schematics.publish(chain_steps(["baseline", "per-block"]), "02_chain")

# %% [markdown]
# The animation shows a chain of 12 layers, each a linear operation and a GELU, with and without one region per layer:
#
# ```{schematic-explorer} ../../results/explorer/02_chain.json
# :image: ../../results/figures/02_chain.png
# :alt: The forward of a chain as a row of circles and its backward as a row of squares below, with live memory over the operations of one step, for two schedules. The baseline saves every circle. Per-block checkpointing saves every second circle and recomputes each of the others just before the square that reads it. Its peak is a little more than half of the baseline's.
# :start: per-block
# ```

# %% [markdown]
# ## The peak of a chain
#
# A single region around all $n$ layers of a chain gains nothing: its forward and its backward need all activations. One
# region per layer saves all $n$ inputs. The optimum is in between: cut the chain into $k$ regions of $n / k$ layers
# ({cite:t}`chen2016` call them segments), here with $n = 64$ and $k = 8$:

# %%
def chain(lengths, a):
    for length in lengths:
        region = nn.Sequential(*[nn.SiLU()] * length)
        # the layers draw no random numbers
        a = ackpt.checkpoint(
            region, a, preserve_rng_state=False
        )
    return a


ks = [1, 2, 4, 8, 16, 32]
runs = {k: measured(functools.partial(chain, [64 // k] * k)) for k in ks}

# %% alt="Live memory of a chain of 64 layers in 8 regions: eight teeth that rise step by step during the forward and, after the start of backward, eight teeth that are a little higher and step down."
figure = plots.timeline_plot(runs[8].timeline, "")
path = plots.save(figure, "results/figures/02_timeline.png")
figure

# %% [markdown]
# ```{margin}
# `ackpt.checkpoint` runs the first forward with a graph, for reasons given below, hence the teeth on the left.
# ```
#
# *Left of the dashed line, each region drops its activations when it ends, and its output is saved as a boundary: the
# tensor that the next region reads. Right of it, each region is recomputed and then freed.*
#
# The peak is in the backward of the last region, the first that backward reaches: **$k - 1$ boundaries, $n / k - 1$
# recomputed activations and one gradient**. (Nothing reads the region's output again, and its gradient, the broadcast 1
# of `sum()`, needs no memory. The region before it reaches the same sum: one boundary fewer, but two gradients.) The
# loss and its gradient add 8 bytes:
#
# $$ \text{peak} = \Bigl( k + \frac{n}{k} - 1 \Bigr) S + 8 \text{ bytes} $$

# %% tags=["hide-input"] alt="Peak memory in activations against the number of regions, on a logarithmic axis, for a chain of 64 layers: measured points are on the curve k + n / k - 1, which falls steeply from 64, has its minimum of 15 at 8 regions and rises again to 33 at 32."
peaks = {k: run.dynamic_peak_bytes for k, run in runs.items()}
curve = {"64 layers": {k: k + 64 / k - 1 for k in (2 ** (step / 8) for step in range(41))}}
points = {"64 layers": {k: peak / S for k, peak in peaks.items()}}
figure = curves_plot(points, curve, "", xlabel="regions", ylabel="peak (activations)")
path = plots.save(figure, "results/figures/02_segments.png")
figure

# %% [markdown]
# *The peak is lowest with 8 regions, the square root of 64. Measured peak minus $(k + n / k - 1) S$, in bytes:*

# %%
[peak - (k + 64 // k - 1) * S for k, peak in peaks.items()]

# %% [markdown]
# So with $\sqrt n$ regions, $n$ activations become about $2 \sqrt n$, for one more forward of the chain.
# {doc}`06_sublinear_memory` reduces the peak further.

# %% [markdown]
# ## Why one input must require grad
#
# A model's first region has parameters, and its input is data, which needs no gradient. What does PyTorch's reentrant
# checkpoint, a full version of the ten lines, do here?

# %%
linear, data = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
with warnings.catch_warnings(record=True) as caught:
    y = torch_checkpoint(linear, data, use_reentrant=True)
print(y.requires_grad, [str(warning.message) for warning in caught])

# %% [markdown]
# Autograd makes a node for an `autograd.Function` only if one of its input tensors requires grad. The inputs here are
# the arguments of the call, not the parameters that the function uses. Without a node, the output does not require
# grad, backward never reaches the region, and its parameters do not learn. (The ten lines never train parameters; the
# longer version below, only a module's.)
#
# So one *input* must require grad. There are three ways out: call `x.requires_grad_()`, as `enable_input_require_grads`
# of `transformers` does on the output of frozen embeddings; use the non-reentrant form ({doc}`03_what_pytorch_offers`);
# or make the parameters inputs of the function, too. With the third, the node exists whenever a parameter requires
# grad, and the gradients of parameters pass through the outer graph.
#
# ## What else the ten lines get wrong
#
# ### In-place updates before backward
#
# GANs and asynchronous pipelines change a weight between a forward and its backward. This ratio must be 1:

# %%
linear, data = (
    nn.Linear(1, 1, bias=False),
    torch.ones(1, 1, requires_grad=True),
)
y = TenLines.apply(linear, data)
weight_in_forward = linear.weight.item()
with torch.no_grad():
    linear.weight.mul_(10)
y.backward()
data.grad.item() / weight_in_forward

# %% [markdown]
# The recomputation uses the new weight. Without a checkpoint, autograd raises an error, because it compares the version
# of every saved tensor. The fix: also save the parameters with `save_for_backward`. This needs no memory, since they
# are allocated anyway.
#
# ### Random numbers
#
# With dropout, exactly the elements that the forward did not drop must get a gradient:

# %%
x = torch.ones(8, requires_grad=True)
y = TenLines.apply(F.dropout, x)
y.sum().backward()
y.tolist(), x.grad.tolist()

# %% [markdown]
# The gradient belongs to another dropout mask. The fix: save the state of the random number generator, and set it for
# the recomputation inside `fork_rng`, which afterwards restores the current state.
#
# ### Autocast
#
# The forward runs inside `torch.autocast`, backward outside, as PyTorch recommends. In which dtype does each run
# compute the product?

# %%
dtypes = []


def product(t):
    y = linear(t)
    dtypes.append(y.dtype)
    return y.float()


with torch.autocast("cpu", torch.bfloat16):
    y = TenLines.apply(product, data)
y.backward()
dtypes

# %% [markdown]
# The recomputation runs in fp32. The fix: save the autocast settings.
#
# ## Twenty lines
#
# The four fixes together:


# %%
class TwentyLines(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        ctx.rng_state = torch.get_rng_state()
        enabled = torch.is_autocast_enabled("cpu")
        ctx.autocast = torch.get_autocast_dtype("cpu"), enabled
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        # raises an error if one of them has changed in place
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(x.requires_grad)
        autocast = torch.autocast("cpu", *ctx.autocast)
        with torch.enable_grad(), torch.random.fork_rng([]), autocast:
            torch.set_rng_state(ctx.rng_state)
            y = ctx.function(x)
        wanted = [t for t in (x, *parameters) if t.requires_grad]
        found = torch.autograd.grad(y, wanted, grad, allow_unused=True)
        gradients = dict(zip(map(id, wanted), found))
        return None, *(gradients.get(id(t)) for t in (x, *parameters))


def checkpoint(function, x):
    is_module = isinstance(function, nn.Module)
    parameters = function.parameters() if is_module else ()
    return TwentyLines.apply(function, x, *parameters)


# %% [markdown]
# (On a GPU, also save the state of its generator and its autocast settings.) All gradients of a small model with
# dropout under autocast now equal the baseline's:

# %%
model, data = (
    nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64)),
    torch.randn(8, 64),
)
results = []
for run in (model, functools.partial(checkpoint, model)):
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(data)
    results.append(
        torch.autograd.grad(y.float().sum(), [*model.parameters()])
    )
[torch.equal(a, b) for a, b in zip(*results)]

# %% [markdown]
# We train a model of two parts, each a region with a learning rate of its own, for 100 steps of SGD. All losses equal the
# baseline's:


# %%
def losses_of(run):
    torch.manual_seed(2)
    parts = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1)), nn.Linear(256, 64)
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(parts, (0.1, 0.01))]
    optimizer, losses = torch.optim.SGD(groups, momentum=0.9), []
    for _ in range(100):
        loss = (run(parts[1], run(parts[0], data)) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


losses = losses_of(lambda part, x: part(x))
print(f"from {losses[0]:.2f} to {losses[-1]:.2f}, equal: {losses_of(checkpoint) == losses}")

# %% [markdown]
# ## What twenty lines still miss
#
# The table shows 19 steps like those above with five checkpoints. {doc}`../pitfalls` explains them and has their code.
# PyTorch's non-reentrant form is another design ({doc}`03_what_pytorch_offers`). In the third row, *error* is correct:
# without a checkpoint, the step raises one.

# %% tags=["hide-input"]
torch_checkpoints = {
    "torch reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "torch non-reentrant": functools.partial(torch_checkpoint, use_reentrant=False),
}
pitfalls = verdicts(
    {"ten lines": TenLines.apply, "twenty lines": checkpoint, **torch_checkpoints, "ackpt": ackpt.checkpoint}
)
bold = {"wrong": "**wrong**"}
shown = [{key: bold.get(text, text) for key, text in row.items()} for row in pitfalls]
caption = "Does a checkpoint give the result of the call without it? *Wrong*: another result, and no error."
table = markdown_table(shown, {name: name for name in shown[0]}, caption, "tab-pitfalls")
path = write_text_atomic("results/tables/02_pitfalls.md", table)

# %% [markdown]
# ```{include} ../../results/tables/02_pitfalls.md
# ```
#
# In two rows, torch's non-reentrant checkpoint is right and `ackpt` raises an error. Torch's checkpoint recomputes
# inside autograd's own graph, and uses only the tensors that the recomputation saves, not its outputs.
#
# `ackpt.checkpoint` is the twenty lines with these additions:
#
# - **The first forward runs in grad mode**, and its graph is dropped when the region ends. So code that checks the grad
#   mode takes the same path as without a checkpoint, and the graph shows which parameters the region uses, even through
#   a closure.
# - **Every random number stream** that the region draws from is replayed: torch's, Python's, NumPy's, and your own
#   generators.
# - **State changes once per step.** Buffers such as BatchNorm's statistics get their old values for the recomputation,
#   and afterwards the new ones.
# - **A closure's variables** are saved, so a lambda in a loop calls the layer that it called in the forward.
# - **Tensors in dicts, lists, tuples, dataclasses and keyword arguments** are inputs of the autograd node.
# - **Both runs are compared**, operation by operation, with their numeric arguments. A difference raises an error, as
#   in the last two rows. Pass such a value as an argument, because a region saves its arguments.
#
# :::{admonition} Takeaway
# :class: tip
# A recomputation must see the forward's inputs, parameters, buffers, random numbers, dtypes and code. A checkpoint that
# cannot repeat the forward must raise an error, because a wrong gradient looks like any other.
# :::

# %% [markdown]
# ## Nested regions
#
# A region may contain regions. Cut the chain into $k$ regions of $k'$ inner regions with $\ell$ layers each. At the
# peak, the boundaries of both levels, the activations of one *inner* region except its output, and one gradient are
# live:
#
# $$ (k - 1) + (k' - 1) + (\ell - 1) + 1 = k + k' + \ell - 2, \qquad n = k \, k' \, \ell . $$
#
# This sum is smallest at $k = k' = \ell = \sqrt[3] n$. The price: the forward of every layer runs three times.

# %%
calls = []


def layer(a):
    calls.append(1)
    return F.silu(a)


def inner(a):
    for _ in range(4):
        a = layer(a)
    return a


def nested(regions, function, a):
    for _ in range(regions):
        a = ackpt.checkpoint(function, a, preserve_rng_state=False)
    return a


x = torch.ones(2**14, requires_grad=True)
outer = functools.partial(nested, 4, inner)
nested_peak = measured(
    functools.partial(nested, 4, outer)
).dynamic_peak_bytes
print(
    f"4 x 4 x 4 layers: peak {4 + 4 + 4 - 2} "
    f"S + {nested_peak - 10 * S} bytes"
)
print(f"{len(calls)} = 3 n forwards")

# %% [markdown]
# With one level, the 64 layers needed $15 \, S$ and $2 n$ forwards.

# %% [markdown]
# ## Operations that need no recomputation
#
# Backward reads the tensors that autograd saves, not everything that the forward computes. PyTorch's non-reentrant
# checkpoint ({doc}`03_what_pytorch_offers`) stops its recomputation at the last saved tensor. `ackpt` also leaves out
# earlier operations. An operation is *dead* if none of its outputs is saved, leaves the region, or is read by an
# operation that is not dead. The first forward finds the dead operations, and the recomputation leaves them out. This
# block computes its MLP and its attention in parallel, as GPT-J does:

# %% tags=["hide-input"] alt="Three rows of nine boxes, the operations of a block: norm, up, gelu, down, qkv, add, attn, out, add. In the row of the forward, a dot marks the outputs that backward reads: those of norm, up, gelu, qkv and attn. Torch's non-reentrant checkpoint recomputes the first seven operations and leaves out the last two. ackpt.checkpoint recomputes the five with a dot."
from experiments.widgets.region_calls import region_calls

calls_of_block = region_calls()
figure = schematics.region_figure(calls_of_block)
path = plots.save(figure, "results/figures/02_left_out.png")
figure

# %% [markdown]
# *The projection `down` and the first `add` run before the last saved tensor, so torch's checkpoint recomputes them,
# although backward does not read their outputs.* `ackpt` still builds their autograd nodes, on tensors without memory.
# Reading such a tensor raises an error. For small tensors, running an operation is faster than leaving it out: on a
# CPU, a region with inputs of at most 256 KiB recomputes everything.

# %% [markdown]
# ## What a region costs
#
# We time a tiny region, two linear layers of width 8, and a Transformer block with 512 tokens. The steps alternate, and
# each round gives a ratio to the baseline, in processor time:

# %% tags=["measured-time", "nbval-ignore-output", "hide-input"]
tiny, few = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
block = Block(TransformerConfig(dim=256, ff_dim=1024, head_dim=64))
inputs = torch.randn(512, 256, requires_grad=True), torch.tensor([0, 512], dtype=torch.int32), 512
contenders = {"baseline": lambda function, *inputs: function(*inputs), **torch_checkpoints, "ackpt": ackpt.checkpoint}


def repeated(times, call, *arguments):
    for _ in range(times):
        call(*arguments).sum().backward()


for name, times, arguments in (("tiny region", 20, (tiny, few)), ("Transformer block", 1, (block, *inputs))):
    steps = {label: functools.partial(repeated, times, call, *arguments) for label, call in contenders.items()}
    flops = {label: ackpt.count_flops(step) for label, step in steps.items()}
    print(f"{name}, relative to the baseline, median and range of 7 rounds")
    for label, ratio in compare_seconds(steps, repeats=7, clock="processor").ratios.items():
        time = f"time x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        print(f"  {label:20} {time:30} FLOPs x {flops[label] / flops['baseline']:.2f}")

# %% [markdown]
# For the tiny region, every checkpoint takes several times as long as the baseline. For the block, most of the added
# time is recomputation. The reentrant checkpoint recomputes the last matrix product of the block, which the others
# leave out.
#
# :::{admonition} Takeaway
# :class: tip
# The overhead is per region and per operation, whatever the sizes of the tensors. So make regions as large as a
# Transformer block.
# :::

# %% tags=["hide-input"]
metrics = {"chain": [{"regions": k, "peak_bytes": peak} for k, peak in peaks.items()], "pitfalls": pitfalls}
metrics["nested_peak_bytes"] = nested_peak
sizes = {"activation_bytes": S, "chain_layers": 64}
where = environment("cpu", "notebooks/02_reentrant_checkpoint.py")
path = Record("reentrant_checkpoint", sizes, metrics, where).save("results/cpu/02_reentrant_checkpoint.json")

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: regions of different lengths
# :class: note
# Four equal regions of a chain of 16 layers peak at $7 S$. But while an early region runs backward, only a few
# boundaries are live. Find lengths that peak at $6 S$, and measure them. How does the smallest peak grow with $n$?
# :::


# %% tags=["solution"]
# In the backward of region i < k, these are live: the boundaries of the regions 2 to i, the activations of the region
# except its output, and two gradients: i - 1 + length_i - 1 + 2. The last region needs one gradient, because that of
# sum() is a broadcast 1: k - 1 + length_k - 1 + 1. So a peak of p S allows p - i layers in region i and p - k + 1 in
# the last one. The lengths decrease by one, so they sum to about p^2 / 2. This must reach n, so p is about sqrt(2 n),
# not 2 sqrt(n).
def predicted_peak(lengths):
    *first, last = lengths
    return S * max([i + length + 1 for i, length in enumerate(first)] + [len(first) + last]) + 8


for lengths in ([4, 4, 4, 4], [5, 4, 3, 2, 2]):
    peak = measured(functools.partial(chain, lengths)).dynamic_peak_bytes
    print(lengths, f"predicted {predicted_peak(lengths):,}, measured {peak:,} = {peak // S} S + {peak % S}")

# %% [markdown]
# `ackpt.checkpoint_sequential` chooses such lengths by default. It recomputes all regions but the last.
#
# :::{admonition} Exercise 2: where to cut
# :class: note
# Take four MLPs in a row, each from width $d$ up to $4 d$, through a GELU, and back down. Cut the chain into four
# regions, once at the narrow activations and once at the wide ones (the very first layer is then outside all regions).
# What does the forward save in each case? Predict, then measure.
# :::

# %% tags=["solution"]
up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), rows
narrow = [nn.Sequential(up, nn.GELU(), down)] * 4
wide = [up, *[nn.Sequential(nn.GELU(), down, up)] * 3, nn.Sequential(nn.GELU(), down)]


def saved_by(regions):
    def forward(a):
        for region in regions:
            a = region(a) if region is up else ackpt.checkpoint(region, a)
        return a

    return saved_bytes(forward, up, down) - 8


size = 4 * len(rows) * 64  # bytes of one narrow activation
print(f"narrow: {saved_by(narrow):,} = 3 x {size:,}   (the first input is resident)")
print(f"wide:   {saved_by(wide):,} = 4 x {4 * size:,}")

# %% [markdown]
# ## Llama 3 8B with regions

# %% tags=["hide-input"] alt="Two stacked bars. With per-block checkpointing, the peak falls from 166.9 to 72.9 GiB, below the memory of the GPU; attention and MLPs are gone from it. The time rises from 1.32 to 1.64 seconds."
from experiments.running_model import bars

figure = bars(2)
path = plots.save(figure, "results/figures/02_running_model.png")
figure

# %% [markdown]
# *The step of {doc}`chapter 1 <01_where_memory_goes>` with per-block checkpointing: every block is a region;
# predicted.*
#
# The peak falls from 166.9 to 72.9 GiB, less than the GPU has. But the allocator reserves more than the step
# allocates, so {doc}`../out_of_memory` suggests a budget of 65 GiB. Only the input of each block is saved. The time
# rises by 25 %.
#
# ## Summary
#
# - A chain of $n$ layers needs about $2 \sqrt n$ activations with one level of regions, $3 \sqrt[3] n$ with two.
# - The ten lines and PyTorch's own checkpoints fail, mostly silently, wherever the recomputation differs from the
#   forward. `ackpt.checkpoint` repeats the forward or raises an error, except in {ref}`a few cases <not-guaranteed>`.
#   Its code is in `ackpt/checkpointing/reentrant.py` and `ackpt/checkpointing/region.py`.
#
# You can now write a checkpoint, and say when its recomputation differs from the forward.
