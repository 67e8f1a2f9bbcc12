# %% [markdown]
# # The reentrant checkpoint, from scratch
#
# After this chapter you can write activation checkpointing in ten lines and predict its peak to the byte. You know a
# dozen ways in which ten lines silently give wrong gradients, and what correct gradients cost.

# %% [markdown]
# ## Goals
#
# - Write the ten lines, and derive what they save, what they recompute and what that costs.
# - Predict the peak of a chain of $n$ layers in $k$ segments, and check it to the byte.
# - See every pitfall fail, in the ten lines and in PyTorch's own checkpoint, and see how `ackpt.checkpoint` avoids it.
# - Apply checkpointing to chains, to whole models, and to the loss head of a language model.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $f$ | the *region*: any function whose activations are dropped and recomputed |
# | $x$, $y$ | its input and output, $y = f(x)$ |
# | $\bar x$, $\bar y$ | gradients of the loss with respect to them |
# | $n$ | layers of a chain; each output is an *activation* |
# | $k$ | segments into which the chain is cut |
# | $\ell_i$ | layers in segment $i$; $\ell_1 + \dots + \ell_k = n$ |
# | $S$ | bytes of one activation |

# %%
import functools
import random
import textwrap
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ackpt
from ackpt import plots
from ackpt.checkpointing.sequential import segment_lengths
from ackpt.metering.meter import compare_seconds, measure, memory_format
from ackpt.models import Block, Transformer, TransformerConfig
from ackpt.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)

# %% [markdown]
# ## Ten lines
#
# Backward through $y = f(x)$ computes $\bar x = J^\top \bar y$, where $J$ is the derivative of $f$ at $x$. PyTorch
# never forms $J$: every operation inside $f$ saves what its own factor needs. But everything saved is a function of
# $x$, so it can be recomputed from $x$ when $\bar y$ arrives:
#
# - **saved:** $x$ and nothing else;
# - **recomputed:** everything inside $f$, just before it is needed;
# - **the price:** one more forward of $f$.
#
# An `autograd.Function` implements this rule:


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
# the first one and enters the autograd engine again: the checkpoint is *reentrant*. The idea is that of Chen et al.
# 2016 ([arXiv:1604.06174](https://arxiv.org/abs/1604.06174)).
#
# Compare four sines in a row with and without a checkpoint:


# %%
def four_sines(x):
    return x.sin().sin().sin().sin()


x = torch.ones(2**14, requires_grad=True)
plain_grad = torch.autograd.grad(four_sines(x).sum(), x)[0]
ten_lines_grad = torch.autograd.grad(TenLines.apply(four_sines, x).sum(), x)[0]
torch.equal(plain_grad, ten_lines_grad)

# %% [markdown]
# The gradients are bit-identical. Next, compare the saved bytes when backward begins. A sine saves its input. The first
# input is $x$, which is resident, so the baseline saves three activations of $S$ bytes and the checkpoint none. The
# other 8 bytes are the loss and its gradient, the 1 with which backward begins.

# %%
S = x.untyped_storage().nbytes()
for run in (four_sines, functools.partial(TenLines.apply, four_sines)):
    measurement = measure(lambda: run(x).sum().backward(), resident=[x])  # noqa: B023
    kept = measurement.timeline.at(measurement.timeline.boundary)["activations"]
    print(f"{kept:,} bytes saved; 3 S = {3 * S:,}")

# %% [markdown]
# The price is recomputation. In backward, each of the two gradients of a matrix product costs as much as the product,
# so a baseline step costs three forwards and a checkpointed step four:

# %%
mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
rows = torch.randn(128, 64, requires_grad=True)
plain_flops = ackpt.count_flops(lambda: mlp(rows).sum().backward())
ackpt.count_flops(lambda: ackpt.checkpoint(mlp, rows).sum().backward()) / plain_flops

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A checkpoint saves the region's input in place of its activations, at the price of one more forward: a third more
# arithmetic for the checkpointed part of the step.
# :::

# %% [markdown]
# ## The peak of a chain
#
# A single region around all layers gains nothing: its recomputation holds all $n$ activations again. One region per
# layer saves all $n$ inputs. The optimum is in between. Cut a chain of $n$ equal layers, each of which saves its input,
# into $k$ segments. The last segment is not checkpointed, because its backward follows immediately.
#
# During the backward of segment $i$, the live activations are:
#
# - the $i - 1$ *boundaries*, which are the inputs of the segments 2 to $i$ (the input of the first is resident);
# - its own $\ell_i$ activations, just recomputed.
#
# With $k$ equal segments the last one sets the peak:
#
# $$ k - 1 + \frac{n}{k}, \qquad \text{least at } k = \sqrt n: \quad 2 \sqrt n - 1 . $$
#
# This is the count of Chen et al. The allocator also counts gradients. A recomputed segment needs two: the gradient of
# its output and the gradient that the current layer computes. In the last segment, with a sum as the loss, the first
# gradient is a single number, and each later one replaces an activation that has just been freed. So
#
# $$ \text{peak} = S \cdot \max\Bigl( \max_{i < k} \, (i - 1 + \ell_i + 2),\; k - 1 + \ell_k \Bigr) + 8 \text{ bytes}, $$
#
# where the 8 bytes are the loss and its gradient.


# %%
def predicted_peak(lengths):
    recomputed = [before + length + 2 for before, length in enumerate(lengths[:-1])]
    return S * max([*recomputed, len(lengths) - 1 + lengths[-1]]) + 8


# %% [markdown]
# To check the formula, we use a chain of SiLU functions, each of which saves its input, and count the calls.

# %%
calls = []


def layer(a):
    calls.append(1)
    return F.silu(a)


# %%
def measured(function):
    def step():
        x.grad = None
        function(x).sum().backward()

    return measure(step, resident=[x], warmup=0, repeats=0)


def chain(n, segments):
    return functools.partial(ackpt.checkpoint_sequential, [layer] * n, segments)


# %%
chain_rows = []
for n in (16, 25, 64, 100):
    k = int(n**0.5)
    calls.clear()
    peak = measured(chain(n, k)).dynamic_peak_bytes
    row = {"n": n, "k": k, "extra": len(calls) - n, "chen": k - 1 + n // k}
    row |= {"predicted": predicted_peak(segment_lengths(n, k)), "measured": peak}
    chain_rows.append(row)

# %%
columns = {"n": "layers $n$", "k": "segments $k$", "extra": "extra forwards"}
columns |= {"chen": "activations, $k - 1 + n / k$"}
columns |= {"predicted": "predicted peak (bytes)", "measured": "measured peak (bytes)"}
caption = f"Chains of equal layers in $\\sqrt n$ segments; one activation is {S:,} bytes."
table = markdown_table(chain_rows, columns, caption, "tab-chain")
path = write_text_atomic("results/tables/02_chain.md", table)

# %% [markdown]
# ```{include} ../../results/tables/02_chain.md
# ```

# %%
[row["measured"] - row["predicted"] for row in chain_rows]

# %% [markdown]
# Prediction and measurement agree to the byte. There are $n - n / k$ extra forwards: every layer outside the last
# segment runs twice. (Chen et al. count $k - 1$ fewer, because the output of a segment is a saved boundary and need not
# be recomputed. Our regions, like PyTorch's, are recomputed as a whole.)
#
# Other numbers of segments give:

# %% alt="Peak memory over the number of segments for a chain of 64 layers: measured points lie on the predicted curve, which falls steeply, has its minimum near 8 segments and rises slowly again."
ks = [1, 2, 4, 6, 8, 10, 12, 16, 24, 32]
peaks = [measured(chain(64, k)).dynamic_peak_bytes for k in ks]
formula = [predicted_peak(segment_lengths(64, k)) for k in ks]
title = "A chain of 64 layers has the lowest peak in 6 to 10 segments, around the square root of 64"
figure = plots.line_plot(ks, {"64 layers": peaks}, {"64 layers": formula}, title, xlabel="segments")
path = plots.save(figure, "results/figures/02_segments.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# With $\sqrt n$ segments, the activations of $n$ layers fall from $n$ to about $2 \sqrt n$ at the cost of less than one
# more forward. Boundaries, one segment and two gradients give the peak to the byte.
# :::

# %% [markdown]
# ## What the ten lines get wrong
#
# Everything so far was a chain of pure functions of one tensor. A real region has parameters, random numbers, buffers,
# keyword arguments. Each of the next sections is one *experiment*: a small function that runs with each variant of
# checkpointing. The call without a checkpoint defines the correct result.


# %%
def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


variants = {
    "plain": plain,
    "ten lines": TenLines.apply,
    "torch reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "torch non-reentrant": functools.partial(torch_checkpoint, use_reentrant=False),
    "ackpt": ackpt.checkpoint,
}

# %% [markdown]
# `use_reentrant=True` is the full version of the ten lines. `use_reentrant=False` is another design: it intercepts
# every tensor that autograd would save, drops it, and recomputes the region when backward first reads a missing tensor.


# %%
def attempt(experiment, checkpoint):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return experiment(checkpoint)
        except (RuntimeError, TypeError, ValueError) as error:
            return error


def shown(result):
    if isinstance(result, Exception):
        first_line = str(result).splitlines()[0]
        result = f"{type(result).__name__}: {first_line.split(' Hint:')[0]}"
    indent = " " * 28
    return textwrap.fill(indent + str(result), 80, subsequent_indent=indent).lstrip()


# %%
verdicts = {}


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


def compare(pitfall, experiment):
    truth = attempt(experiment, plain)
    verdicts[pitfall] = {"pitfall": pitfall}
    for name, checkpoint in variants.items():
        result = attempt(experiment, checkpoint)
        verdict = "right" if result == truth else "wrong"
        if isinstance(result, Exception):
            verdict = "error"
        verdicts[pitfall][name] = verdict
        print(f"{name:20} {verdict:6} {shown(result)}")


# %% [markdown]
# ### Parameters
#
# A region with a linear layer. What is the gradient of its weight?


# %%
def weight_gradient(checkpoint):
    linear = nn.Linear(2, 1)
    checkpoint(linear, ones(1, 2)).sum().backward()
    grad = linear.weight.grad
    return grad if grad is None else grad.tolist()


compare("parameters", weight_gradient)

# %% [markdown]
# It is None, because the ten lines compute the gradient of $x$ only. PyTorch replaces the last line with a full
# `backward`, which accumulates into the `.grad` of every parameter. We adopt that and call the result *naive*:


# %%
class Naive(TenLines):
    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


names = ["plain", "naive", "torch reentrant", "torch non-reentrant", "ackpt"]
variants = {name: (variants | {"naive": Naive.apply})[name] for name in names}
compare("parameters", weight_gradient)

# %% [markdown]
# ### No input requires grad
#
# The input of a model's first layer is data, which needs no gradient; the layer's parameters do need one. Which
# parameters of this two-layer model get no gradient?


# %%
def first_layer(checkpoint):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    data = torch.ones(1, 2)
    model[1](checkpoint(model[0], data)).sum().backward()
    return [name for name, weight in model.named_parameters() if weight.grad is None]


compare("no input requires grad", first_layer)

# %% [markdown]
# If no input of an `autograd.Function` requires grad, neither does its output, and its backward is never called.
# PyTorch only warns, and the first layer does not learn.

# %% [markdown]
# ### A shared parameter with a hook
#
# Hooks on parameters implement clipping, logging, and the bookkeeping of data-parallel training. Here a hook clips the
# gradient of a weight to 1. The weight is used in two regions, and its gradient is 2, so the correct result is 1.


# %%
def clipped(checkpoint):
    w, x = ones(1), ones(1)
    w.register_hook(lambda grad: grad.clamp(max=1))
    h = checkpoint(lambda t: w * t, x)
    checkpoint(lambda t: w * t, h).backward()
    return w.grad.item()


compare("hook of a shared parameter", clipped)

# %% [markdown]
# The naive version enters the engine once per region, and each time only a *part* of the gradient reaches the weight.
# The hook fires twice and clips each part separately.
#
# Both failures have the same cause: the parameters are not inputs of the autograd node. In `ackpt` they are. After the
# first forward, `ackpt` walks the region's graph to its leaves and makes the parameters found there inputs of the node.
# Their gradients then flow through the outer graph, where the engine sums all parts before it calls a hook.

# %%
linear = nn.Linear(2, 3)
y = ackpt.checkpoint(linear, torch.ones(1, 2))  # the input requires no grad
ends = [node for node, _ in y.grad_fn.next_functions if node is not None]
y.grad_fn.name(), [node.variable.shape for node in ends]

# %% [markdown]
# ### A second derivative
#
# A gradient penalty differentiates a gradient: $h = x^2$, $y = h^3$, and the penalty $(dy/dx)^2 = (6 x^5)^2$. At
# $x = 2$ its derivative is $2 \cdot 192 \cdot 480 = 184320$.


# %%
def gradient_penalty(checkpoint):
    x = torch.tensor([2.0], requires_grad=True)
    checkpoint(lambda h: h**3, x**2).backward(create_graph=True)
    gradient, x.grad = x.grad, None
    (gradient**2).backward()
    return x.grad.item()


compare("create_graph=True", gradient_penalty)

# %% [markdown]
# The naive backward returns a gradient that was computed after a `detach`, so the second derivative treats it as a
# constant. The result is a fifth of the correct one, without any warning. A reentrant checkpoint cannot compute the
# correct value, but it can detect the case: grad mode is on in a backward that is itself being recorded.

# %% [markdown]
# ### A parameter changes before backward
#
# Two losses with an optimizer step between their backwards occur in adversarial training and in pipelines.


# %%
def changed_weight(checkpoint):
    linear, x = nn.Linear(1, 1, bias=False), ones(1, 1)
    y = checkpoint(linear, x)
    with torch.no_grad():
        linear.weight.mul_(10)
    y.sum().backward()
    return x.grad.item()


compare("parameter changed before backward", changed_weight)

# %% [markdown]
# Without a checkpoint, autograd raises: each tensor counts its in-place changes, and autograd checks that count for
# every saved tensor. A checkpoint that saves only $x$ records no count for the weight and recomputes with the new
# values. `ackpt` records the counts of all tensors that the region can reach, and compares them:

# %%
before = linear.weight._version
with torch.no_grad():
    linear.weight.mul_(10)
before, linear.weight._version

# %% [markdown]
# ### Random numbers
#
# The recomputation must draw the same random numbers as the forward. With dropout, exactly the elements that the
# forward did not drop must get a gradient:


# %%
def dropout(checkpoint):
    x = ones(8)
    y = checkpoint(F.dropout, x)
    y.sum().backward()
    return torch.equal(x.grad, y.detach())


compare("dropout", dropout)

# %% [markdown]
# Saving and restoring torch's generators fixes dropout. But Python, numpy and your own generators have random streams,
# too. Below, each of them multiplies $x = 1$ by a random number, so output and gradient must be equal:


# %%
def same_factor(checkpoint, draw):
    x = ones(1)
    y = checkpoint(lambda t: torch.tensor(draw()) * t, x)
    y.backward()
    return torch.equal(x.grad, y.detach())


def other_streams(checkpoint):
    own = torch.Generator().manual_seed(0)
    draws = {"Python": random.random, "numpy": np.random.rand}
    draws["own"] = lambda: torch.rand(1, generator=own).item()
    return {name: same_factor(checkpoint, draw) for name, draw in draws.items()}


compare("Python, numpy, own generator", other_streams)

# %% [markdown]
# Every stream has a state that can be read, compared and restored:

# %%
state = random.getstate()
first = random.random()
moved = random.getstate() != state
random.setstate(state)
moved, random.random() == first

# %% [markdown]
# `ackpt` reads the states of all streams that the region can reach, saves those that have changed by the end of the
# region, and restores them for the recomputation. A region that draws no random numbers saves no state.

# %% [markdown]
# ### Buffers that the forward updates
#
# BatchNorm in training mode updates its running mean and counts its batches, as a side effect of its forward.


# %%
def batch_norm(checkpoint):
    norm = nn.BatchNorm1d(1, momentum=0.5)
    x = torch.tensor([[1.0], [3.0]], requires_grad=True)
    checkpoint(norm, x).sum().backward()
    return norm.num_batches_tracked.item(), norm.running_mean.item()


compare("BatchNorm statistics", batch_norm)

# %% [markdown]
# The batch mean is 2 and the momentum one half, so one update gives 1 and two give 1.5. For the recomputation, `ackpt`
# restores the old values of the buffers that the region has changed; afterwards it restores the new ones.

# %% [markdown]
# ### Autocast
#
# The forward runs inside `torch.autocast`, and the backward is called outside. In which dtypes does the product run?


# %%
def product_types(checkpoint):
    linear, seen = nn.Linear(4, 4), set()

    def product(t):
        y = linear(t)
        seen.add(str(y.dtype))
        return y.float()

    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(product, ones(1, 4))
    y.sum().backward()
    return sorted(seen)


compare("autocast", product_types)

# %% [markdown]
# The naive recomputation runs in fp32, so it computes a different function. `ackpt` saves the autocast state with the
# region.

# %% [markdown]
# ### A loop variable
#
# A loop calls three layers, each through a `lambda`. A `lambda` looks up `layer` when it is called, and the
# recomputation calls it after the loop has ended. Which gradients do the three weights get?


# %%
def late_binding(checkpoint):
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    h = ones(1)
    for layer in layers:
        h = checkpoint(lambda t: layer(t), h)  # noqa: B023
    h.backward()
    grads = [layer.weight.grad for layer in layers]
    return [grad if grad is None else round(grad.item(), 4) for grad in grads]


compare("loop variable in a closure", late_binding)

# %% [markdown]
# Every recomputation runs the third layer. In the reentrant form, two layers never learn and the third accumulates the
# gradients of all three; the non-reentrant form recomputes the activations of the wrong layer. A closure stores its
# variables in *cells*, and the function refers to the cell, not to the value:


# %%
def make():
    scale = 1
    function = lambda: scale  # noqa: E731
    before = function.__closure__[0].cell_contents
    scale = 2
    return before, function.__closure__[0].cell_contents


make()

# %% [markdown]
# `ackpt` saves a copy of the function whose own cells hold the values at the time of the call.

# %% [markdown]
# ### The training mode changes before backward
#
# A validation step or a logged loss may call `model.eval()` between forward and backward. Without a checkpoint this is
# harmless, since dropout has already run. Is the gradient zero exactly where dropout zeroed the output?


# %%
def switched(checkpoint):
    drop, x = nn.Dropout(), ones(8)
    y = checkpoint(drop, x)
    drop.eval()
    y.sum().backward()
    return torch.equal(x.grad, y.detach())


compare("eval() before backward", switched)

# %% [markdown]
# `ackpt` records the mode of every module and restores it for the recomputation. It does the same for replaced
# parameters and for the globals that a function reads.

# %% [markdown]
# ### Keyword arguments, and tensors in dicts
#
# Tensors are not always positional arguments: a mask may be a keyword argument, and features may be in a dict.


# %%
def keyword(checkpoint):
    x = ones(1)
    checkpoint(lambda t, scale: t * scale, x, scale=3.0).backward()
    return x.grad.item()


compare("keyword argument", keyword)

# %% [markdown]
# Below, the region gets $h = w^3$ inside a dict, and $h$ is used once more outside: $y = h^2 + h$. At $w = 2$ the
# gradient is $(2 h + 1) \, 3 w^2 = 204$; the use outside alone contributes 12.


# %%
def features(checkpoint):
    w = torch.tensor([2.0], requires_grad=True)
    h = w**3
    (checkpoint(lambda features: features["h"] ** 2, {"h": h}) + h).backward()
    return w.grad.item()


compare("tensor in a dict", features)

# %% [markdown]
# An `autograd.Function` tracks only tensors that are direct arguments. `ackpt` extracts the tensors from dicts, lists,
# tuples and dataclasses, passes them to the node, and puts them back before it calls the function.

# %% [markdown]
# ### `ackpt` runs the first forward in grad mode
#
# The ten lines run the first forward under `no_grad`, the obvious way to avoid a graph. `ackpt` runs it in grad mode
# and drops the graph when the region ends, for three reasons. First, code may depend on grad mode. This PyTorch layer
# takes a fused path in eval mode when no gradient is needed. Is its output bit-identical to that of the baseline?


# %%
def same_output(checkpoint):
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 8, 64, requires_grad=True)
    return torch.equal(checkpoint(encoder, x), encoder(x))


compare("code that depends on grad mode", same_output)

# %% [markdown]
# Second, because the graph knows which outputs need a gradient and which do not. Under `no_grad` that is lost:


# %%
def needs_grad(checkpoint):
    outputs = checkpoint(lambda t: (t * 2, t.detach() * 3), ones(1))
    return [output.requires_grad for output in outputs]


compare("an output without grad", needs_grad)

# %% [markdown]
# Third, the leaves of the graph are the parameters that become inputs of the node, as shown above.
#
# The cost is memory during the first forward: a region holds all its activations until it ends. But its recomputation
# holds the same activations and two more gradients, so the peak does not change. In this timeline of 64 layers in 8
# segments, the teeth on the left are first forwards, and those on the right are recomputations:

# %% alt="Live memory of a chain of 64 layers in 8 segments: seven teeth that rise step by step during the forward, one last ramp, and after the start of backward seven teeth that are a little higher and step down."
title = "The first forward of a region needs less memory than its recomputation"
figure = plots.timeline_plot(measured(chain(64, 8)).timeline, title)
path = plots.save(figure, "results/figures/02_timeline.png")
figure

# %% [markdown]
# ### Regions that cannot be recomputed raise an error
#
# Two kinds of regions cannot be recomputed as a whole. Most variants raise, but their messages are not equally helpful.
# A region that overwrites its own input has lost the value that the recomputation needs:


# %%
def overwrites(checkpoint):
    x = ones(1)
    y = checkpoint(lambda t: t.mul_(2) * t, x * 3)
    y.backward()
    return x.grad.item()


compare("input overwritten", overwrites)


# %% [markdown]
# A function that behaves differently the second time is not the function to differentiate:


# %%
def another_function(checkpoint):
    x, runs = ones(2), []
    y = checkpoint(lambda t: runs.append(1) or t.exp()[: len(runs)], x)
    y.sum().backward()
    return [round(value, 4) for value in x.grad.tolist()]


compare("recompute returns another shape", another_function)

# %% [markdown]
# ### An outside value changes before backward
#
# A region may read values from outside: an entry of a dict, an attribute of your own object, a file, the clock. The
# recomputation reads them again, and if one has changed, it computes a different function.


# %%
def plain_python(checkpoint):
    x, settings = ones(1), {"scale": 2.0}
    y = checkpoint(lambda t: (t * settings["scale"]).sin(), x)
    settings["scale"] = 20.0
    y.backward()
    return round(x.grad.item(), 4)


compare("plain Python value changed", plain_python)

# %% [markdown]
# `ackpt` records the operations of both runs with their numeric arguments, and raises where they differ. A branch that
# is taken differently and a missing operation are therefore errors, too.
#
# ### A case that no checkpoint detects
#
# A number that is first turned into a constant tensor does not reach an operation of the graph as a number. No
# checkpoint detects that it has changed.


# %%
def constant_tensor(checkpoint):
    x, settings = ones(1), {"scale": 2.0}
    y = checkpoint(lambda t: (t * torch.tensor(settings["scale"])).sin(), x)
    settings["scale"] = 20.0
    y.backward()
    return round(x.grad.item(), 4)


compare("constant tensor from a changed value", constant_tensor)

# %% [markdown]
# The fix is to pass the value as an argument, because a region saves its arguments.


# %%
def passed_as_argument(checkpoint):
    x, scale = ones(1), 2.0
    y = checkpoint(lambda t, factor: (t * factor).sin(), x, scale)
    scale = 20.0
    y.backward()
    return round(x.grad.item(), 4)


[attempt(passed_as_argument, checkpoint) for checkpoint in (plain, ackpt.checkpoint)]

# %% [markdown]
# This table lists all experiments of the section:

# %%
columns = {"pitfall": "pitfall"} | {name: name for name in names}
bold = {"wrong": "**wrong**"}
pitfalls = [{key: bold.get(text, text) for key, text in row.items()} for row in verdicts.values()]
caption = "Does each checkpoint reproduce the result of the plain call? *Wrong* means a different result and no error."
table = markdown_table(pitfalls, columns, caption, "tab-pitfalls")
path = write_text_atomic("results/tables/02_pitfalls.md", table)

# %% [markdown]
# ```{include} ../../results/tables/02_pitfalls.md
# ```
#
# :::{admonition} Takeaway
# :class: tip
# A recomputation is correct only if it repeats the forward: the same inputs, parameters, buffers, random numbers,
# dtypes and code. A checkpoint must raise when it cannot repeat the forward, because a wrong gradient looks like any
# other.
# :::

# %% [markdown]
# ## What one region costs
#
# The guarantees are not free: `ackpt` walks the region's objects, records version counters and compares RNG states.
# That takes some microseconds per region, whatever the region computes. To make this time visible we use a tiny region,
# two linear layers of width 8. `ackpt.guarantees` switches the guarantees off one by one, and
# `preserve_rng_state=False` switches off the RNG states as in PyTorch. With all of them off, the algorithm is that of
# PyTorch's reentrant checkpoint: a first forward without a graph, and gradients accumulated inside the backward.

# %%
tiny = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
few = torch.randn(4, 8, requires_grad=True)


def fifty(checkpoint, **switches):
    def run():
        with ackpt.guarantees(**switches):
            for _ in range(50):
                checkpoint(tiny, few).sum().backward()

    return run


# %%
reentrant = variants["torch reentrant"]
no_rng = {"preserve_rng_state": False}
contenders = {
    "plain": fifty(plain),
    "torch reentrant": fifty(reentrant),
    "torch reentrant, no RNG": fifty(functools.partial(reentrant, **no_rng)),
    "torch non-reentrant": fifty(variants["torch non-reentrant"]),
    "ackpt": fifty(ackpt.checkpoint),
}

# %%
off = {"other_rng": False, "unchanged": False, "exact_graph": False}
contenders |= {
    "ackpt, other_rng=False": fifty(ackpt.checkpoint, other_rng=False),
    "ackpt, unchanged=False": fifty(ackpt.checkpoint, unchanged=False),
    "ackpt, exact_graph=False": fifty(ackpt.checkpoint, exact_graph=False),
    "ackpt, all off": fifty(ackpt.checkpoint, **off),
    "ackpt, all off, no RNG": fifty(functools.partial(ackpt.checkpoint, **no_rng), **off),
}

# %% [markdown]
# All contenders take turns in one process, in alternating order. Compare the *ratios*; the microseconds depend on the
# machine.

# %% tags=["measured-time", "nbval-ignore-output"]
times = compare_seconds(contenders, repeats=15, reference="torch reentrant")
print(f"{'one region, both ways':26} {'µs':>4}  ratio  (low to high)")
for name, ratio in times.ratios.items():
    microseconds = times.seconds[name].median / 50 * 1e6
    spread = f"({ratio.low:.2f} to {ratio.high:.2f})"
    print(f"{name:26} {microseconds:4.0f}  {ratio.median:5.2f}  {spread}")

# %% [markdown]
# `other_rng` covers the generators of Python, numpy and your own code. `unchanged` detects changed parameters and
# updates buffers only once. `exact_graph` runs the first forward with a graph, which finds the parameters. With all of
# them off, `ackpt` gives the same guarantees as PyTorch's reentrant form, so compare those lines, with RNG states and
# without. For scale, here is one block of the Transformer of the last chapter, with 512 tokens:

# %%
block = Block(TransformerConfig(dim=256, ff_dim=1024, head_dim=64))
tokens = torch.randn(512, 256, requires_grad=True)
whole = torch.tensor([0, 512], dtype=torch.int32)

# %% tags=["measured-time", "nbval-ignore-output"]
inputs = (tokens, whole, 512)
both = {"plain": lambda: block(*inputs).sum().backward()}
both["ackpt"] = lambda: ackpt.checkpoint(block, *inputs).sum().backward()
times = compare_seconds(both, repeats=10)
ratio = times.ratios["ackpt"].median
print(f"plain {times.seconds['plain'].median * 1e3:.1f} ms, checkpointed {ratio:.2f} times that")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# The guarantees cost microseconds per region, and the recomputation costs a forward per region. For regions as large as
# a Transformer block only the second matters: make regions large, and leave the guarantees on.
# :::

# %% [markdown]
# ## Segments of decreasing length
#
# `checkpoint_sequential` cuts a chain into segments. Equal lengths waste memory: only $i - 1$ boundaries are live
# during the backward of segment $i$, so early segments stay below the peak. With memory for $p$ activations, segment
# $i$ may have $p - (i - 1)$ layers, and the lengths decrease by one from segment to segment:
#
# $$ p + (p - 1) + \dots + 1 = \frac{p (p + 1)}{2} \ge n \quad\Longrightarrow\quad p \approx \sqrt{2 n}, $$
#
# compared with $2 \sqrt n$ for equal lengths: smaller by a factor of $\sqrt 2$. This is the default, `segments=None`.

# %%
segment_lengths(100, 10), segment_lengths(100)

# %% [markdown]
# The measured peaks again include two gradients:

# %% alt="Peak memory over the number of layers: equal segments and falling segments both grow like a square root, the falling ones lower by a fifth at 100 layers and more beyond; measured points lie on the predicted lines."
ns = [4, 16, 36, 64, 100, 144]
cuts = {"equal lengths": [int(n**0.5) for n in ns], "falling lengths": [None] * len(ns)}
peaks = {name: [measured(chain(n, k)).dynamic_peak_bytes for n, k in zip(ns, ks)] for name, ks in cuts.items()}
formula = {name: [predicted_peak(segment_lengths(n, k)) for n, k in zip(ns, ks)] for name, ks in cuts.items()}
saved = 1 - peaks["falling lengths"][-1] / peaks["equal lengths"][-1]
title = f"Segments of decreasing length lower the peak by {saved:.0%} at {ns[-1]} layers"
figure = plots.line_plot(ns, peaks, formula, title, xlabel="layers")
path = plots.save(figure, "results/figures/02_lengths.png")
figure

# %%
peaks == formula, [round((p - 8) / S) for p in peaks["falling lengths"]]

# %% [markdown]
# The price is a few more extra forwards, because the last segment, which is not recomputed, is shorter. At 100 layers:

# %%
for name, k in {"equal lengths": 10, "falling lengths": None}.items():
    calls.clear()
    run = measured(chain(100, k))
    last = segment_lengths(100, k)[-1]
    print(f"{name:15} {len(calls) - 100} = 100 - {last} extra forwards")

# %% [markdown]
# ## A whole model
#
# A model can be checkpointed without changing its code. `apply_activation_checkpointing` turns every repeated block
# into one region, and returns which:

# %%
T, d, L = 512, 128, 6
config = TransformerConfig(dim=d, ff_dim=4 * d, layers=L, head_dim=64)
model, data = Transformer(config), torch.randn(T, d)
offsets = torch.arange(0, T + 1, 128, dtype=torch.int32)


def step():
    model.zero_grad()
    F.mse_loss(model(data, offsets, 128), data).backward()


def measured_step():
    return measure(step, resident=[model, data, offsets], warmup=0, repeats=0)


# %%
step()
gradients = [parameter.grad.clone() for parameter in model.parameters()]
keys = list(model.state_dict())
model_runs = {"plain": measured_step()}
ackpt.apply_activation_checkpointing(model)

# %%
model_runs["checkpointed"] = measured_step()
for name, run in model_runs.items():
    kept = run.timeline.at(run.timeline.boundary)["activations"]
    peak = run.dynamic_peak_bytes
    print(f"{name:13} saved {memory_format(kept)}, dynamic peak {memory_format(peak)}")

# %% [markdown]
# The last chapter predicts the saved bytes: the inputs of all blocks except the first, which is resident; the input of
# the last norm and its scale; the norm's output; and the loss in a storage as large as its input, with its gradient.

# %%
kept - 4 * (T * ((L - 1) * d + d + 1 + d) + T * d + 1)

# %% [markdown]
# The gradients are bit-identical, the keys of the state dict do not change, and checkpointing can be removed:

# %%
pairs = zip(model.parameters(), gradients)
all(torch.equal(parameter.grad, grad) for parameter, grad in pairs)

# %%
len(keys), set(keys) ^ set(model.state_dict())

# %%
ackpt.remove_activation_checkpointing(model)

# %% [markdown]
# ## The loss head in chunks
#
# The last layer of a language model multiplies $N$ hidden states of width $D$ by a vocabulary of $V$ words, and
# cross-entropy turns each row of the $N \times V$ *logits* into one number. With a large vocabulary, the logits
# outweigh all blocks together. Checkpointing does not help, because the logits are the last tensor that the forward
# computes and the first that backward reads.

# %%
N, D, V = 512, 64, 4096
hidden = torch.randn(N, D, requires_grad=True)
head = (torch.randn(V, D) / 8).requires_grad_()
targets = torch.randint(V, (N,))
logits_bytes = 4 * N * V


def head_peak(loss_function):
    def step():
        hidden.grad = head.grad = None
        loss_function().backward()

    resident = [hidden, head, targets]
    return measure(step, resident=resident, warmup=0, repeats=0).dynamic_peak_bytes


# %%
whole_peak = head_peak(lambda: F.cross_entropy(hidden @ head.T, targets))
whole_peak - 3 * logits_bytes

# %% [markdown]
# The peak is three times the logits, plus 8 bytes. In backward, three tensors are live at once: the saved log
# probabilities, their gradient, and the gradient of the logits.
#
# But the rows are independent, so `chunked_cross_entropy` processes them in chunks. The gradient of a row's loss with
# respect to its logits follows from the logits themselves (softmax minus one-hot). The function therefore computes the
# gradients of hidden states and head immediately and frees the chunk. Nothing is recomputed, and the full logits never
# exist:

# %%
final = 4 * (N * D + V * D)  # the gradients of hidden states and head
chunked = functools.partial(ackpt.chunked_cross_entropy, hidden, head, targets)
head_peaks = {}
for chunks in (1, 2, 4, 8, 16):
    peak = head_peaks[chunks] = head_peak(functools.partial(chunked, chunks=chunks))
    rest = peak - 2 * logits_bytes // chunks - final
    print(f"{chunks:2} chunks: {memory_format(peak):>8}, two chunks of logits + gradients + {rest:,}")

# %% [markdown]
# The few bytes at the end of each line are a few numbers per row of a chunk. The loss and its gradients equal those of
# the unchunked computation, up to the rounding of sums in a different order:


# %%
def head_gradients(loss_function):
    hidden.grad = head.grad = None
    loss = loss_function()
    loss.backward()
    return loss.detach(), hidden.grad, head.grad


# %%
whole_result = head_gradients(lambda: F.cross_entropy(hidden @ head.T, targets))
chunked_result = head_gradients(chunked)
close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-7)
[close(a, b) for a, b in zip(whole_result, chunked_result)]

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Cut a chain into segments of decreasing length, a model at its blocks, and the loss head into chunks of rows. In each
# case the peak can be predicted without running the step.
# :::

# %% [markdown]
# The measured bytes of this chapter go into a record.

# %%
metrics = {"chain": chain_rows, "pitfalls": list(verdicts.values())}
metrics["model_dynamic_peak_bytes"] = {name: run.dynamic_peak_bytes for name, run in model_runs.items()}
metrics["head_dynamic_peak_bytes"] = {"whole": whole_peak} | {str(n): peak for n, peak in head_peaks.items()}
sizes = {"activation_bytes": S, "head": {"rows": N, "dim": D, "vocab_size": V}}
sizes["model"] = {"tokens": T, "dim": d, "layers": L}
where = environment("cpu", "notebooks/02_reentrant_checkpoint.py")
record = Record("reentrant_checkpoint", sizes, metrics, where)
path = record.save("results/cpu/02_reentrant_checkpoint.json")

# %% tags=["measured-time", "nbval-ignore-output"]
record.environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: a longer last segment
# :class: note
# For 16 layers, `segment_lengths` gives a peak of $8 S$. Like Chen et al., it counts activations only. According to the
# formula with gradients, the last segment may be longer. Find lengths that peak at $7 S$, and measure them.
# :::


# %% tags=["solution"]
# At most 7 - 2 - (i - 1) layers in segment i, and 7 - (k - 1) in the last: 5 + 4 + 3 + 4 = 16.
def cut(lengths, a):
    *parts, last = [nn.Sequential(*[nn.SiLU()] * length) for length in lengths]
    for part in parts:
        a = ackpt.checkpoint(part, a)
    return last(a)


for lengths in (segment_lengths(16), [5, 4, 3, 4]):
    peak = measured(functools.partial(cut, lengths)).dynamic_peak_bytes
    predicted = predicted_peak(lengths)
    print(lengths, f"predicted {predicted:,}, measured {peak:,} = {peak // S} S + {peak % S}")

# %% [markdown]
# :::{admonition} Exercise 2: halves of halves
# :class: note
# Regions nest. Checkpoint the first half of a chain, then treat both halves in the same way, down to one layer. How do
# the peak and the number of forwards grow with $n$? Chen et al. prove $O(\log n)$ and $O(n \log n)$.
# :::


# %% tags=["solution"]
# Each level adds one activation and one gradient, and runs half of the layers once more:
# 2 log2(n) + 1 activations, and n + n / 2 log2(n) forwards.
def halves(n, a):
    if n == 1:
        return layer(a)
    return halves(n - n // 2, ackpt.checkpoint(halves, n // 2, a))


for exponent in range(1, 8):
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
up, down = nn.Linear(64, 256), nn.Linear(256, 64)
narrow = [nn.Sequential(up, nn.GELU(), down)] * 4
wide = [up, *[nn.Sequential(nn.GELU(), down, up)] * 3, nn.Sequential(nn.GELU(), down)]


def kept_by(parts):
    def step():
        a = rows
        for part in parts:
            a = part(a) if part is up else ackpt.checkpoint(part, a)
        a.sum().backward()

    timeline = measure(step, resident=[up, down, rows], repeats=0).timeline
    return timeline.at(timeline.boundary)["activations"] - 8


number = 4 * len(rows) * 64  # bytes of one narrow activation
print(f"narrow: {kept_by(narrow):,} = 3 x {number:,}   (the first input is resident)")
print(f"wide:   {kept_by(wide):,} = 4 x {4 * number:,}")

# %% [markdown]
# ## What we have seen
#
# - A reentrant checkpoint is ten lines: save the input, run without a graph, and rerun with a graph in backward.
# - A chain of $n$ layers then needs $2 \sqrt n$ activations, $\sqrt{2 n}$ with segments of decreasing length, or
#   $2 \log_2 n$ with nested regions. Boundaries, one segment and two gradients give the peak to the byte.
# - The ten lines are wrong wherever the second run differs from the first: in parameters, random numbers, buffers,
#   dtypes or closures. Most of these errors are silent, in PyTorch's own checkpoint too.
# - `ackpt.checkpoint` repeats what can be repeated and raises otherwise. It runs the first forward in grad mode and
#   makes the parameters inputs of its node. The code is in `ackpt/checkpointing/reentrant.py` and
#   `ackpt/checkpointing/region.py`; every part of it should now be familiar.
# - The guarantees cost microseconds per region. A loss head needs no recomputation, only chunks.
#
# {doc}`12_what_pytorch_offers` measures PyTorch's own tools, and shows more failures.
#
# ## Sources
#
# - {cite:t}`chen2016` introduce segments and their recursion, and derive the counts that we compare with.
