# %% [markdown]
# # The reentrant checkpoint, from scratch
#
# **What does a checkpoint save, where do common implementations go wrong, and what does a correct one cost?**

# %% [markdown]
# ```{figure} ../../results/figures/02_autograd.png
# :alt: Three rows of boxes, the nodes of autograd's graph for four sines and a sum, with arrows from the loss to the leaf. Without a region, each of four sine nodes has a tensor below it: the first the input x, the others saved activations. With a region, after the forward, one wide node replaces the four and saves x alone. In its backward, a graph of four sine nodes exists again, with x and three recomputed activations.
# :class: dark-light
#
# The graph that autograd records, without and with a checkpoint: a region is one node, which saves its input and runs
# the function again in backward.
# ```
#
# After this chapter you can write activation checkpointing in thirty lines of plain PyTorch and predict its peak to the
# byte. You know why random numbers, autocast and in-place updates need care, and what correct gradients cost.
#
# :::{admonition} Symbols of this chapter
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $f$ | the *region*: a function whose activations are dropped in the forward and recomputed in the backward |
# | $x$, $y$ | its input and output, $y = f(x)$ |
# | $\bar x$, $\bar y$ | gradients of the loss with respect to them |
# | $n$ | layers of a chain; the output of each is an *activation* |
# | $k$ | regions into which the chain is cut |
# | $\ell_i$ | layers in region $i$; $\ell_1 + \dots + \ell_k = n$ |
# | $S$ | bytes of one activation |
# :::

# %%
import torch
import torch.nn.functional as F
from torch import nn

import ackpt

generator = torch.manual_seed(0)

# %% tags=["hide-input"]
import functools

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ackpt.metering import plots
from ackpt.metering.meter import compare_seconds, measure, memory_format
from ackpt.models import Block, Transformer, TransformerConfig
from experiments.pitfalls.checkpoints import verdicts
from experiments.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)


def measured(function, *resident):
    """Measure one step: forward, sum, backward."""

    def step():
        x.grad = None
        function(x).sum().backward()

    return measure(step, resident=[x, *resident], warmup=0, repeats=0)


# %% [markdown]
# ## Ten lines
#
# Backward through $y = f(x)$ computes $\bar x = J^\top \bar y$, where $J$ is the derivative of $f$ at $x$. PyTorch
# never forms $J$. It multiplies by the derivative of one operation after another, and each operation inside $f$ saves
# the tensors that its own derivative needs. But all of them are functions of $x$. A checkpoint therefore saves $x$ and
# nothing else, and recomputes everything inside $f$ when $\bar y$ arrives. An `autograd.Function` implements this rule:


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
# The forward runs without a graph, so it saves no intermediate tensor. The backward turns the saved input into a new
# leaf, reruns the function with a graph, and backpropagates the gradient through it. That second backward runs *inside*
# the first one and enters the autograd engine again, so the checkpoint is called *reentrant*.
#
# Compare four sines in a row with and without a checkpoint:


# %%
def four_sines(x):
    return x.sin().sin().sin().sin()


def checkpointed(x):
    return TenLines.apply(four_sines, x)


x = torch.ones(2**14, requires_grad=True)
gradients = [torch.autograd.grad(run(x).sum(), x)[0] for run in (four_sines, checkpointed)]
torch.equal(*gradients)

# %% [markdown]
# The gradients are bit-identical. What has changed is autograd's graph, the chain of nodes from the loss back to $x$:

# %% tags=["hide-input"] alt="Three rows of boxes, the nodes of autograd's graph for four sines and a sum, with arrows from the loss to the leaf. Without a region, each of four sine nodes has a tensor below it: the first the input x, the others saved activations. With a region, after the forward, one wide node replaces the four and saves x alone. In its backward, a graph of four sine nodes exists again, with x and three recomputed activations."
from experiments.reports import schematics
from experiments.widgets.autograd_graphs import autograd_graphs

figure = schematics.autograd_figure(autograd_graphs())
path = plots.save(figure, "results/figures/02_autograd.png")
figure

# %% [markdown]
# *Autograd's graph without a region, and with a region of `ackpt.checkpoint`. The region is a single node that saves
# its input; its backward builds the inner graph and frees it at the end.*
#
# Predict the saved bytes when backward begins. A sine saves its input. The first input is $x$, which is allocated
# anyway, so the baseline saves three activations of $S$ bytes and the checkpoint none. The other 8 bytes are the loss
# and its gradient, the 1 with which backward begins.

# %%
S = x.nbytes
for run in (four_sines, checkpointed):
    timeline = measured(run).timeline
    saved_bytes = timeline.at(timeline.boundary)["activations"]
    print(f"{saved_bytes:,} bytes saved; 3 S = {3 * S:,}")

# %% [markdown]
# The price is recomputation. In backward, each of the two gradients of a matrix product costs as much as the product,
# so a baseline step costs three forwards and a checkpointed step four:

# %%
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
rows = torch.randn(128, 64, requires_grad=True)
baseline_flops = ackpt.count_flops(lambda: mlp(rows).sum().backward())
ackpt.count_flops(lambda: ackpt.checkpoint(mlp, rows).sum().backward()) / baseline_flops

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A checkpoint saves the region's input in place of its activations, at the price of one more forward: a third more
# arithmetic for the checkpointed part of the step.
# :::

# %% tags=["hide-input"]
from experiments.reports.figures import line_plot
from experiments.widgets.chain_steps import chain_steps

schematics.publish(chain_steps(["baseline", "per-block"]), "02_chain")

# %% [markdown]
# The animation compares the baseline with per-block checkpointing on a chain of 12 layers, each a linear operation and a
# GELU. The activation between the two is dropped in the forward and recomputed just before the layer's backward.
#
# ```{schematic-explorer} ../../results/explorer/02_chain.json
# :image: ../../results/figures/02_chain.png
# :alt: The forward of a chain as a row of circles and its backward as a row of squares below, with live memory over the operations of one step, for two schedules. The baseline saves every circle. Per-block checkpointing saves every second circle and recomputes each of the others just before the square that reads it. Its peak is a little more than half of the baseline's.
# :start: per-block
# ```

# %% [markdown]
# ## The peak of a chain
#
# A single region around all layers gains nothing: its recomputation holds all $n$ activations again. One region per
# layer saves all $n$ inputs. The optimum is in between. Cut a chain of $n$ layers, each of which saves its input, into
# $k$ regions ({cite:t}`chen2016` call them segments). During the backward of region $i$, these tensors are live:
#
# - the $i - 1$ *boundaries*, which are the inputs of the regions 2 to $i$ (the input of the first is $x$);
# - the $\ell_i$ activations that the region has just recomputed;
# - two gradients, of the current layer's output and of its input.
#
# The last region needs one tensor less, because the gradient of `sum()` is a single 1, broadcast. The loss and its
# gradient add 8 bytes. So the peak is $k$ boundaries and $n / k$ activations, to the byte:
#
# $$ \text{peak} = S \cdot \max\Bigl( \max_{i < k} \, (i - 1 + \ell_i + 2),\; k - 1 + \ell_k + 1 \Bigr) + 8 \text{ bytes}.
#    $$
#
# For $k \ge 2$ equal regions this is $k + n / k$ activations. The minimum is $2 \sqrt n$ activations at $k = \sqrt n$,
# for one more forward of the chain.


# %%
def predicted_peak(lengths):
    *first, last = lengths
    return S * max([i + length + 2 for i, length in enumerate(first)] + [len(first) + last + 1]) + 8


def chain(lengths, a):
    for length in lengths:
        region = nn.Sequential(*[nn.SiLU()] * length)
        a = ackpt.checkpoint(region, a)
    return a


# %% alt="Peak memory against the number of regions for a chain of 64 layers: measured points are on the predicted curve, which falls steeply, has its minimum at 8 regions and rises slowly again."
ks = [1, 2, 4, 8, 16, 32]
cuts = [[64 // k] * k for k in ks]
runs = [measured(functools.partial(chain, lengths)) for lengths in cuts]
peaks = [run.dynamic_peak_bytes for run in runs]
formula = [predicted_peak(lengths) for lengths in cuts]
figure = line_plot(ks, {"64 layers": peaks}, {"64 layers": formula}, "", xlabel="regions")
path = plots.save(figure, "results/figures/02_segments.png")
figure

# %% [markdown]
# *The peak of a chain of 64 layers is lowest with 8 regions, the square root of 64. Prediction and measurement agree to
# the byte:*

# %%
[peak - prediction for peak, prediction in zip(peaks, formula)]

# %% [markdown]
# The timeline of the step with 8 regions shows the mechanism. The teeth on the left are first forwards: each region
# drops its activations when it ends, and its output becomes a boundary. (The ten lines would not show these teeth:
# `ackpt.checkpoint` runs the first forward with a graph, for reasons given below.) The teeth on the right are
# recomputations.

# %% alt="Live memory of a chain of 64 layers in 8 regions: eight teeth that rise step by step during the forward and, after the start of backward, eight teeth that are a little higher and step down."
figure = plots.timeline_plot(runs[3].timeline, "")
path = plots.save(figure, "results/figures/02_timeline.png")
figure

# %% [markdown]
# *The forward of a chain with 8 regions leaves seven boundaries. The recomputation of each region needs a little more
# memory than its first forward.*
#
# :::{admonition} Takeaway
# :class: tip
# With $\sqrt n$ regions, the memory of $n$ layers falls from $n$ activations to $2 \sqrt n$: boundaries, one region and
# two gradients.
# :::

# %% [markdown]
# ## What the ten lines get wrong
#
# A chain of sines is a pure function of one tensor. Real regions have parameters, draw random numbers, and run under
# autocast. Four short steps show what can go wrong.
#
# ### Parameters and inputs without grad
#
# The input of a model's first layer is data, which needs no gradient. The layer's parameters do need one:

# %%
linear, data = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
y = TenLines.apply(linear, data)
y.requires_grad

# %% [markdown]
# The output does not require grad, because no input of the `autograd.Function` does. The layer never learns, and
# nothing warns. The fix: also make the parameters inputs of the function. Then they get their gradients through the
# outer graph.
#
# ### Why one input must require grad
#
# PyTorch's reentrant checkpoint passes only the tensors in its arguments to the `autograd.Function`. Its backward calls
# `backward` on the recomputed output, which adds to the `.grad` of the parameters directly. Autograd runs that backward
# only if the output requires grad, and the output requires grad only if one of these inputs does. This is what the
# warning "None of the inputs have requires_grad=True. Gradients will be None" says. The inputs of a first layer are
# data, and those of a model with frozen embeddings do not require grad either, so their regions train nothing.
# `enable_input_require_grads` of transformers is a way around it.
#
# ### In-place updates before backward
#
# An optimizer step between a forward and its backward happens in adversarial training and in pipelines. The gradient of
# the input must be the weight that the forward used:

# %%
linear, data = nn.Linear(1, 1, bias=False), torch.ones(1, 1, requires_grad=True)
y = TenLines.apply(linear, data)
weight_in_forward = linear.weight.item()
with torch.no_grad():
    linear.weight.mul_(10)
y.backward()
data.grad.item() / weight_in_forward

# %% [markdown]
# The recomputation uses the new weight. Without a checkpoint, autograd raises an error: each tensor counts its in-place
# changes, and autograd compares that count for every saved tensor. The fix: also save the parameters with
# `save_for_backward`. This needs no memory, since they are allocated anyway.
#
# ### Random numbers
#
# The recomputation must draw the random numbers of the forward. With dropout, exactly the elements that the forward did
# not drop must get a gradient:

# %%
x = torch.ones(8, requires_grad=True)
y = TenLines.apply(F.dropout, x)
y.sum().backward()
y.tolist(), x.grad.tolist()

# %% [markdown]
# The gradient belongs to a different dropout mask. The fix: save the state of the random number generator, and set it
# for the recomputation.
#
# ### Autocast
#
# The forward runs inside `torch.autocast`; backward is called outside, as PyTorch recommends. In which dtypes does the
# product run?

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
# The recomputation runs in fp32, so it computes a different function. The fix: save the autocast settings as well.
#
# ## Thirty lines
#
# The four fixes together:


# %%
class ThirtyLines(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        ctx.rng_state = torch.get_rng_state()
        ctx.autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors  # raises an error if one has changed in place
        x = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", *ctx.autocast):
            torch.set_rng_state(ctx.rng_state)
            y = ctx.function(x)
        inputs = [x, *parameters]
        gradients = iter(torch.autograd.grad(y, [t for t in inputs if t.requires_grad], grad))
        return None, *(next(gradients) if t.requires_grad else None for t in inputs)


def checkpoint(function, x):
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    return ThirtyLines.apply(function, x, *parameters)


# %% [markdown]
# (On a GPU, also save the state of its generator and its autocast settings.) All gradients of a small model with dropout
# under autocast now equal the baseline's, although its input is data:

# %%
model, data = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64)), torch.randn(8, 64)
results = []
for run in (model, functools.partial(checkpoint, model)):
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(data)
    results.append(torch.autograd.grad(y.float().sum(), [*model.parameters()]))
[torch.equal(a, b) for a, b in zip(*results)]

# %% [markdown]
# ## What thirty lines still miss
#
# The table shows the results of 19 steps like those above with five checkpoints. {doc}`../pitfalls` explains the steps
# and has their code. PyTorch's reentrant form is a full version of the ten lines. Its non-reentrant form is another
# design: it intercepts every tensor that autograd would save, drops it, and recomputes the region when backward first
# reads one. Without a checkpoint, the third step raises an error, so *error* is the correct outcome there.

# %% tags=["hide-input"]
torch_checkpoints = {
    "torch reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "torch non-reentrant": functools.partial(torch_checkpoint, use_reentrant=False),
}
pitfalls = verdicts(
    {"ten lines": TenLines.apply, "thirty lines": checkpoint, **torch_checkpoints, "ackpt": ackpt.checkpoint}
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
# In two rows, torch's non-reentrant checkpoint is right where `ackpt` raises an error: it recomputes inside of autograd's
# own graph, which can be differentiated again, and it reads the tensors that the recomputation saves, not its outputs.
#
# A recomputation is correct only if it repeats the forward. `ackpt.checkpoint` is the thirty lines with these
# additions:
#
# - **The first forward runs in grad mode**, and its graph is dropped when the region ends. So code that checks the grad
#   mode takes the same path as without a checkpoint. The graph also shows which outputs require grad and which
#   parameters the region uses, even those that it reaches through a closure.
# - **Every random number stream** that the region draws from is replayed: torch's, Python's, NumPy's, and your own
#   generators. A region that draws no random numbers saves no state.
# - **State changes once per step.** For the recomputation, buffers such as BatchNorm's statistics get their old values
#   back, and afterwards the new ones. The mode of each module is also restored.
# - **A closure's variables** are saved with the region, so a lambda in a loop calls the layer that it called in the
#   forward.
# - **Tensors in dicts, lists, tuples, dataclasses and keyword arguments** are inputs of the autograd node.
# - **Both runs are compared**, operation by operation, with their numeric arguments. A branch that is taken differently
#   or a changed setting raises an error.
#
# ### A case that no checkpoint detects
#
# One case stays wrong: the region builds a tensor from a Python value, as in `torch.tensor(scale)`, and the value
# changes before backward. Both runs look alike. The fix is to pass the setting as an argument, because a region saves
# its arguments.
#
# :::{admonition} Takeaway
# :class: tip
# A recomputation must see the forward's inputs, parameters, buffers, random numbers, dtypes and code. A checkpoint that
# cannot repeat the forward must raise an error, because a wrong gradient looks like any other.
# :::

# %% [markdown]
# ## Nested regions
#
# The recomputation of a region holds all of its activations, unless the region contains regions itself. Cut the chain
# into $k$ outer regions of $m$ inner regions with $\ell$ layers each. The peak comes in the last outer region, when the
# boundaries of both levels, the activations of one *inner* region, the recomputed output of the outer region and one
# gradient are live:
#
# $$ (k - 1) + (m - 1) + \ell + 2 = k + m + \ell, \qquad n = k \, m \, \ell . $$
#
# This sum is smallest at $k = m = \ell = \sqrt[3] n$. The price: every layer runs once in the forward, once for its outer
# region and once for its inner region.

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
        a = ackpt.checkpoint(function, a)
    return a


x = torch.ones(2**14, requires_grad=True)
outer = functools.partial(nested, 4, inner)
nested_peak = measured(functools.partial(nested, 4, outer)).dynamic_peak_bytes
print(f"4 x 4 x 4 layers: peak {nested_peak:,} bytes = {4 + 4 + 4} S + {nested_peak - 12 * S}, {len(calls)} = 3 n forwards")

# %% [markdown]
# With one level, the 64 layers needed $16 \, S$ and $2 n$ forwards. Exercise 2 nests further.
#
# ## A whole model
#
# `apply_activation_checkpointing` makes every repeated block of a model a region. The model's code, the names of its
# parameters and its gradients stay the same:

# %%
T, d, L = 512, 128, 6
config = TransformerConfig(dim=d, ff_dim=4 * d, layers=L, head_dim=64)
model, data = Transformer(config), torch.randn(T, d)
offsets = torch.arange(0, T + 1, 128, dtype=torch.int32)  # four sequences of 128 tokens


def step():
    model.zero_grad()
    F.mse_loss(model(data, offsets, 128), data).backward()


step()
expected = [parameter.grad.clone() for parameter in model.parameters()]
baseline = measure(step, resident=[model, data, offsets], warmup=0, repeats=0)
ackpt.apply_activation_checkpointing(model)
per_block = measure(step, resident=[model, data, offsets], warmup=0, repeats=0)
all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected))

# %% [markdown]
# As in {doc}`01_where_memory_goes`, we predict the saved bytes of the checkpointed step from the inputs of the blocks,
# the last norm and the loss; the first block's input is the data. The last line subtracts this prediction from the
# measurement:

# %%
for name, run in {"baseline": baseline, "checkpointed": per_block}.items():
    saved_bytes = run.timeline.at(run.timeline.boundary)["activations"]
    peak = memory_format(run.dynamic_peak_bytes)
    print(f"{name:12} saved {memory_format(saved_bytes)}, dynamic peak {peak}")
saved_bytes - 4 * (T * ((L - 1) * d + d + 1 + d) + T * d + 1)

# %% [markdown]
# ## What a region costs
#
# The additions of `ackpt.checkpoint` take time per region and per operation, whatever the sizes of the tensors. To make
# this time visible, the next cell times a tiny region, two linear layers of width 8, and a Transformer block with 512
# tokens. The contenders take turns in rounds, and the cell prints the medians of each round's ratios of processor time
# to the baseline. The times themselves depend on the machine and its load.

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
    print(f"{name}: processor time of a forward and a backward")
    for label, ratio in compare_seconds(steps, repeats=7, clock="processor").ratios.items():
        print(f"  {label:20} {ratio.median:.2f} times the baseline")

# %% [markdown]
# The tiny region shows this time: there, every checkpoint takes several times as long as the baseline. For the block,
# nearly all of the added time is recomputation. PyTorch's non-reentrant checkpoint recomputes less, because it stops as soon as backward has all the
# tensors that it reads: it skips the last matrix product of the block.
#
# :::{admonition} Takeaway
# :class: tip
# The checks take the same time per region, whatever its size; the recomputation costs a forward per region. For regions
# as large as a Transformer block, the recomputation dominates: make regions large, and leave the guarantees on.
# :::

# %% tags=["hide-input"]
metrics = {"chain": [{"regions": k, "peak_bytes": peak} for k, peak in zip(ks, peaks)], "pitfalls": pitfalls}
metrics["nested_peak_bytes"] = nested_peak
metrics["model_dynamic_peak_bytes"] = {"baseline": baseline.dynamic_peak_bytes}
metrics["model_dynamic_peak_bytes"]["checkpointed"] = per_block.dynamic_peak_bytes
sizes = {"activation_bytes": S, "chain_layers": 64, "model": {"tokens": T, "dim": d, "layers": L}}
where = environment("cpu", "notebooks/02_reentrant_checkpoint.py")
path = Record("reentrant_checkpoint", sizes, metrics, where).save("results/cpu/02_reentrant_checkpoint.json")

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: regions of different lengths
# :class: note
# Four equal regions of a chain of 16 layers peak at $8 S$. But while an early region runs backward, only a few
# boundaries are live. Find lengths that peak at $7 S$, and measure them. How does the smallest peak grow with $n$?
# :::


# %% tags=["solution"]
# A peak of p S allows p - 2 - (i - 1) layers in region i, and p - 1 - (k - 1) in the last one. The lengths decrease by
# one from region to region, so they sum to about p^2 / 2. This must reach n, so p is about sqrt(2 n), not 2 sqrt(n).
for lengths in ([4, 4, 4, 4], [5, 4, 3, 2, 2]):
    peak = measured(functools.partial(chain, lengths)).dynamic_peak_bytes
    print(lengths, f"predicted {predicted_peak(lengths):,}, measured {peak:,} = {peak // S} S + {peak % S}")

# %% [markdown]
# `ackpt.checkpoint_sequential` chooses such lengths by default. It does not recompute the last segment.
#
# :::{admonition} Exercise 2: halves of halves
# :class: note
# Checkpoint the first half of a chain, then treat both halves in the same way, down to one layer. How do the peak and
# the number of forwards grow with $n$? Chen et al. prove $O(\log n)$ and $O(n \log n)$. Hint: every backward of a
# region holds the gradient of the region's output until it ends, so each level of nesting adds one live gradient.
# :::


# %% tags=["solution"]
# Each level adds one activation and one gradient, and runs half of the layers once more:
# 2 log2(n) + 1 activations, and n + n / 2 log2(n) forwards.
def halves(n, a):
    if n == 1:
        return layer(a)
    return halves(n - n // 2, ackpt.checkpoint(halves, n // 2, a))


for exponent in (1, 3, 5, 7):
    n = 2**exponent
    calls.clear()
    peak = measured(functools.partial(halves, n)).dynamic_peak_bytes
    forwards = n + n // 2 * exponent
    levels = f"{(peak - 8) / S:4.1f} = {2 * exponent + 1:2} S"
    print(f"n = {n:3}: peak {levels}, {len(calls):3} = {forwards:3} forwards")

# %% [markdown]
# :::{admonition} Exercise 3: where to cut
# :class: note
# Take four MLPs in a row, each from width $d$ up to $4 d$, through a GELU, and back down. Cut the chain into four
# regions, once at the narrow activations and once at the wide ones (the very first layer is then outside all regions).
# What does the forward save in each case? Predict, then measure.
# :::

# %% tags=["solution"]
up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), rows
narrow = [nn.Sequential(up, nn.GELU(), down)] * 4
wide = [up, *[nn.Sequential(nn.GELU(), down, up)] * 3, nn.Sequential(nn.GELU(), down)]


def saved_by(parts):
    def forward(a):
        for part in parts:
            a = part(a) if part is up else ackpt.checkpoint(part, a)
        return a

    timeline = measured(forward, up, down).timeline
    return timeline.at(timeline.boundary)["activations"] - 8


size = 4 * len(rows) * 64  # bytes of one narrow activation
print(f"narrow: {saved_by(narrow):,} = 3 x {size:,}   (the first input is resident)")
print(f"wide:   {saved_by(wide):,} = 4 x {4 * size:,}")

# %% [markdown]
# ## What we have seen
#
# - A reentrant checkpoint is ten lines: save the input, run without a graph, and rerun with a graph in backward.
# - A chain of $n$ layers then needs $2 \sqrt n$ activations, and $3 \sqrt[3] n$ with two levels of regions. The
#   formulas give the peaks to the byte.
# - The ten lines are wrong wherever the second run differs from the first. Thirty lines fix parameters, in-place
#   updates, torch's random numbers and autocast. Most of the remaining errors are silent, in PyTorch's own checkpoint,
#   too.
# - `ackpt.checkpoint` repeats what can be repeated and otherwise raises an error, except in the case that no checkpoint
#   detects. The code is in `ackpt/checkpointing/reentrant.py` and `ackpt/checkpointing/region.py`.
#   {doc}`03_what_pytorch_offers` shows more failures of PyTorch's own tools.
#
# ## Sources
#
# - {cite:t}`chen2016` introduce segments and their recursion.
