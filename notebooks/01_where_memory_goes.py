# %% [markdown]
# # Where training memory goes
#
# **What occupies memory during one training step, and when?**

# %% [markdown]
# ```{figure} ../../results/figures/01_one_step.png
# :alt: Stacked live memory over the allocations of one training step: resident bytes are a constant band, activations rise in a straight line until backward begins and then fall, gradients grow from zero; the peak is at the start of backward.
# :class: dark-light
#
# Live memory of one training step: activations rise until backward begins, gradients until it ends.
# ```
#
# After this chapter you can predict the memory of one training step of a Transformer: how many bytes are live, what
# they hold, and when. You can also check every line of that prediction against the allocator.
#
# :::{admonition} Symbols of this chapter
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $T$ | tokens in a batch, all sequences together |
# | $L$ | Transformer blocks |
# | $d$, $f$ | width of the model, width inside the MLP |
# | $h$ | attention heads; each is $d / h$ wide |
# | $P$ | parameters |
# | $A$ | elements that one block saves per token, from its forward to its backward |
# :::
#
# All tensors are fp32 here: 4 bytes per element. A *storage* is the memory that a tensor refers to. Several tensors
# (views) can share one storage, so we count the bytes of storages. Memory that is allocated before and after a step is
# *resident*; what the step allocates is *dynamic*. The *peak* is the largest number of bytes allocated at one time, and
# the *dynamic peak* the largest number of dynamic bytes.

# %%
import torch
import torch.nn.functional as F

import ackpt
from ackpt.metering import plots
from ackpt.metering.meter import memory_format
from ackpt.models import PUBLISHED, Block, Transformer, TransformerConfig
from experiments.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)

# %% [markdown]
# In this chapter's training step, a small Transformer learns to reproduce its input: four sequences of 256 tokens. The
# sequences are *packed*: their tokens are concatenated into one tensor of $T$ rows, without padding, and `sequences`
# says where each one starts.

# %%
config = TransformerConfig(dim=256, ff_dim=1024, layers=4, head_dim=64)
T, L, d, f, h = 1024, config.layers, config.dim, config.ff_dim, config.heads
model = Transformer(config)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(T, d)
sequences = torch.arange(0, T + 1, 256, dtype=torch.int32)


def step():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x, sequences, max_seqlen=256), x)
    loss.backward()
    optimizer.step()


# %% [markdown]
# ## Parameters, gradients and optimizer: 16 bytes per parameter
#
# A block has four square matrices for attention (queries, keys, values, output), two matrices for the MLP, and four
# norms, two of width $d$ and two of the width of a head:
#
# $$ P_\text{block} = 4 d^2 + 2 d f + 2 d + 2 \tfrac{d}{h} $$

# %%
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d  # plus the norm after the last block
print(f"P = {P:,}, counted {sum(p.numel() for p in model.parameters()):,}")

# %% [markdown]
# Every parameter needs three more tensors of its size: its gradient and AdamW's two running averages. That makes $4 P$
# elements, or $16 P$ bytes in fp32, independent of the batch. Of these 16 bytes per parameter, 12 are resident: the
# parameter itself and the two averages persist from step to step. The other 4, the gradient, are dynamic, because
# `zero_grad` frees the gradients and backward allocates them again.
#
# `ackpt.measure` runs the step a few times and reads the allocator's events. Inputs also count as resident.

# %%
measured = ackpt.measure(step, resident=[model, optimizer, x], repeats=0)
resident = {"parameters": 4 * P, "optimizer": 8 * P, "inputs": 4 * T * d}
for name, size in resident.items():
    print(f"{name:10}  predicted {size:>10,}  measured {measured.categories[name]:>10,}")
counters = 4 * len(list(model.parameters()))
assert measured.categories["optimizer"] == 8 * P + counters

# %% [markdown]
# The optimizer holds a few more bytes than predicted: AdamW stores a 4-byte step counter for each parameter tensor.

# %% [markdown]
# ## What the forward saves
#
# Why does the forward save anything? Take the smallest case, a linear layer $y = x W^\top$. Given the gradient
# $\partial \ell / \partial y$, the layer computes two gradients:
#
# $$ \frac{\partial \ell}{\partial x} = \frac{\partial \ell}{\partial y} W,
#    \qquad
#    \frac{\partial \ell}{\partial W} = \Bigl(\frac{\partial \ell}{\partial y}\Bigr)^{\!\top} x. $$
#
# The second gradient needs the layer's *input*. The input therefore stays live from the layer's forward to its
# backward, longest for the first layers. An addition saves nothing; a nonlinear function such as GELU saves its input.
#
# **The MLP.** Up-projection, GELU and down-projection have inputs of width $d$, $f$ and $f$: $d + 2 f$ elements per
# token.
#
# **The whole block**, operation by operation:
#
# | operation | what its backward reads | elements per token |
# |---|---|--:|
# | norm before attention | its input; one scale per token | $d + 1$ |
# | query, key, value projection | its input | $d$ |
# | norm of queries and keys | their inputs, which are views of the output of `qkv`, so all $3 d$ stay; one scale per head for queries, one for keys | $3 d + 2 h$ |
# | attention | normalized queries and keys; its output; one sum per head | $3 d + h$ |
# | output projection | its input: the attention's output, counted above | $0$ |
# | norm before the MLP | its input; one scale per token | $d + 1$ |
# | up-projection | its input | $d$ |
# | GELU | its input | $f$ |
# | down-projection | its input | $f$ |
#
# $$ A = 10 d + 2 f + 3 h + 2 $$
#
# Attention computes a score for every pair of tokens, yet the formula has no $T^2$ term. PyTorch's fused attention
# kernel (FlashAttention) saves one element per query and head, and recomputes the scores in backward. It is a
# checkpoint in miniature.
#
# The next cell measures one block. `timeline.boundary` is the moment between forward and backward, and `.at` gives the
# live bytes of each category. `backward(x)` passes `x` as the gradient of the output, so no memory is allocated for it.

# %%
A = 10 * d + 2 * f + 3 * h + 2
block = Block(config)
alone = ackpt.measure(lambda: block(x, sequences, 256).backward(x), resident=[block, x], repeats=0)
counted = alone.timeline.at(alone.timeline.boundary)["activations"]
print(f"predicted {4 * T * A:,}  measured {counted:,}")

# %% [markdown]
# The totals agree by luck: the formula counts the input, which is resident here, and the measurement counts the output,
# which has the same size.
#
# `ackpt.print_saved` lists what autograd saves, tensor by tensor, with the operation, the module and the source line.
# Compare it with the table above: each row appears here with 4 bytes per element. The queries, keys and values are
# three views of one storage, 1 MiB each. The list also contains tensors that need no further memory: parameters, the
# input, and views of storages that are already listed.

# %%
ackpt.print_saved(block, x, sequences, 256)

# %% tags=["hide-input"]
from experiments.reports import schematics
from experiments.widgets.block_stack import block_stack

schematics.publish(block_stack(), "01_stack")

# %% [markdown]
# The animation stacks these tensors, and the input of the block, in the order in which the forward saves them; together
# they have $A$ elements per token, and backward frees them from the top.
#
# ```{schematic-explorer} ../../results/explorer/01_stack.json
# :image: ../../results/figures/01_stack.png
# :alt: A stack of the 15 tensors that one Transformer block saves, each as high as it has elements per token. The forward builds the stack from the input of the block at the bottom to the output of GELU at the top, and backward removes it from the top. The output of the up-projection and the output of GELU are nearly half of it.
# ```

# %% [markdown]
# **The whole model.** $L$ blocks save $A$ elements per token each, but the first block's input is resident. The last
# norm saves its input and one scale per token, and the loss saves the norm's output: $L A + d + 1$ elements per token
# in all.

# %%
predicted = 4 * T * (L * A + d + 1)
counted = measured.timeline.at(measured.timeline.boundary)["activations"]
print(f"predicted {predicted:,}  measured {counted:,}  missing {counted - predicted:,}")

# %% [markdown]
# The prediction is 1 MiB and 4 bytes too low. The 4 bytes are the gradient of the loss, the single 1 with which
# backward begins. The 1 MiB is the loss itself: it is a scalar, but on the CPU `mse_loss` returns it in a storage as
# large as its input. If your count is off, look for such a hidden buffer.

# %%
loss = F.mse_loss(model(x, sequences, max_seqlen=256), x)
loss_bytes = loss.untyped_storage().nbytes()
print(f"{loss.numel()} element in {loss_bytes:,} bytes; still missing: {counted - predicted - loss_bytes}")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A step needs $16 P$ bytes for parameters, gradients and optimizer state, of which $12 P$ are resident. The activations
# that the forward saves need $4 T (L A + d + 1)$ bytes. The first part does not depend on the batch, and the second
# does not depend on the optimizer.
# :::

# %% [markdown]
# ## When each byte is live
#
# Activations peak when backward begins, and gradients when it ends, so the peak is less than their sum. The figure
# shows one step from left to right, one allocation or free at a time.

# %% tags=["hide-input"] alt="Stacked live memory over the allocations of one training step: resident bytes are a constant band, activations rise in a straight line until backward begins and then fall, gradients grow from zero; the peak is at the start of backward."
figure = plots.timeline_plot(measured.timeline.thinned(1000), "", measured.resident_bytes)
path = plots.save(figure, "results/figures/01_one_step.png")
figure

# %% [markdown]
# *The step peaks when backward begins: nearly all activations are live, and few gradients.*
#
# - At the far left, `zero_grad` frees the gradients of the previous step.
# - During the forward, every operation saves what its backward will read, and no activation is freed.
# - Right of the dashed line, backward reads the activations in reverse order and frees them, while the gradients grow
#   to their full size. The sawtooth on top shows *temporaries*: tensors that are freed as soon as the next operation has
#   read them.
# - At the end, the optimizer updates one parameter tensor after another. The thin band of activations that remains is
#   the loss in its large storage.
#
# So the peak is not the sum of the parts. It comes just after backward begins, when almost no gradients exist:

# %%
for name, size in measured.categories.items():
    print(f"{name:12} {memory_format(size):>10}")
print(f"{'peak':12} {memory_format(measured.peak_bytes):>10}")

# %% tags=["hide-input"]
from experiments.reports.figures import bar_plot, line_plot
from experiments.widgets.chain_steps import chain_steps

schematics.publish(chain_steps(["baseline"]), "01_chain")

# %% [markdown]
# The animation shows the same triangle for a smaller model, operation by operation: a chain of 12 layers, each a linear
# operation and a GELU.
#
# ```{schematic-explorer} ../../results/explorer/01_chain.json
# :image: ../../results/figures/01_chain.png
# :alt: The forward of a chain as a row of circles and its backward as a row of squares below, with live memory over the operations of one step. The forward fills circle after circle, and all stay filled until backward begins. Backward runs from the last square to the first and empties the circle that each square has read. Live memory is a triangle whose tip is where backward begins.
# ```

# %% [markdown]
# ## Tokens or parameters?
#
# One block needs $16 P_\text{block}$ bytes for any batch, and saves $4 A$ bytes per token. The two are equal at
#
# $$ T^* = \frac{4 P_\text{block}}{A} $$
#
# tokens. For $f = 4 d$ this is about $\tfrac{8}{3} d$, whatever the number of blocks.

# %%
T_star = 4 * P_block / A
print(f"T* = {T_star:.0f} tokens; 8 d / 3 = {8 * d / 3:.0f}")


def saved_by(tokens):
    rows = x[:tokens]
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    run = ackpt.measure(
        lambda: model(rows, offsets, tokens).backward(rows),
        resident=[model, rows],
        warmup=0,
        repeats=0,
    )
    return run.timeline.at(run.timeline.boundary)["activations"]


tokens = [128, 512, 1024]
saved = [saved_by(n) for n in tokens]
formula = [4 * n * (L * A + d + 1) for n in tokens]
print("measured minus predicted bytes:", [a - b for a, b in zip(saved, formula)])

# %% tags=["hide-input"] alt="Memory over the number of tokens: the saved activations lie on the straight line of the formula and cross the constant 16 bytes per parameter near 680 tokens."
figure = line_plot(
    tokens,
    measured={"saved by the forward": saved},
    predicted={"saved by the forward": formula, "16 bytes per parameter": [16 * P] * len(tokens)},
    title="",
    xlabel="tokens",
    ylabel="memory (MiB)",
)
path = plots.save(figure, "results/figures/01_tokens.png")
figure

# %% [markdown]
# *Above $T^*$ tokens, the activations need more memory than parameters, gradients and optimizer state together.*
#
# :::{admonition} Takeaway
# :class: tip
# Parameters set a fixed cost, and every token adds to it. Beyond $\tfrac{8}{3} d$ tokens the activations are the larger
# part. A leaner optimizer lowers the fixed cost; only fewer or smaller saved activations lower the cost per token.
# :::

# %% [markdown]
# ## Recomputing activations
#
# Each token costs $L A$ elements because the activations of all blocks are live at once. But a block can be recomputed
# from its input, which has only $d$ elements per token. Activation checkpointing saves the inputs, drops the rest, and
# recomputes each block just before its backward. In plain PyTorch, the loop over the blocks becomes
#
# ```python
# for block in model.blocks:
#     x = torch.utils.checkpoint.checkpoint(block, x, sequences, 256, use_reentrant=False)
# ```
#
# `ackpt.apply_activation_checkpointing` does this in place; the next chapters build it. Before you run the cell,
# estimate the new peak: which bytes vanish, and when are most of the others live?

# %%
ackpt.apply_activation_checkpointing(model, Block)
checkpointed = ackpt.measure(step, resident=[model, optimizer, x], repeats=0)
print("peak", memory_format(measured.peak_bytes), "->", memory_format(checkpointed.peak_bytes))

# %% tags=["hide-input"] alt="Live memory of the same step with checkpointed blocks: activations grow by a small step per block, and during backward the memory rises and falls once per block, a row of teeth instead of one triangle."
figure = plots.timeline_plot(checkpointed.timeline.thinned(1000), "", checkpointed.resident_bytes)
path = plots.save(figure, "results/figures/01_one_step_checkpointed.png")
figure

# %% [markdown]
# *With checkpointing, the inner activations of at most one block are live at a time: teeth instead of a triangle.*
#
# The forward now saves the input of every block (the first is resident), the input of the last norm with its scale, the
# norm's output, and the loss. The teeth before the dashed line are activations that each block drops when it ends. The
# teeth after it are *recomputed* activations, which backward both allocates and frees. The peak has moved to the last
# tooth, where the gradients are nearly complete.

# %%
counted = checkpointed.timeline.at(checkpointed.timeline.boundary)["activations"]
print(f"predicted {4 * T * ((L + 1) * d + 1) + loss_bytes + 4:,}  measured {counted:,}")

# %% tags=["hide-input"]
runs = {"baseline": measured, "checkpointed": checkpointed}
names = [name for name in measured.categories if any(run.categories[name] for run in runs.values())]


def table_row(name, sizes):
    return {"what": name} | {label: round(size / 2**20, 1) for label, size in sizes.items()}


rows = [table_row(n, {label: run.categories[n] for label, run in runs.items()}) for n in names]
rows += [table_row("**peak**", {label: run.peak_bytes for label, run in runs.items()})]
columns = {"what": "at the peak", "baseline": "baseline, MiB", "checkpointed": "checkpointed, MiB"}
caption = "Memory at the peak of one training step, by category, without and with checkpointed blocks."
table = markdown_table(rows, columns, caption, "tab-one-step")
path = write_text_atomic("results/tables/01_one_step.md", table)

# %% [markdown]
# ```{include} ../../results/tables/01_one_step.md
# ```

# %% tags=["hide-input"] alt="Memory at the peak by category, for the baseline and the checkpointed step: parameters, inputs and optimizer are equal; with checkpointing, saved activations nearly vanish, recomputed ones appear, and gradients are larger."
figure = bar_plot(
    names,
    {label: [run.categories[name] for name in names] for label, run in runs.items()},
    "",
    ylabel="memory at the peak (MiB)",
)
path = plots.save(figure, "results/figures/01_at_the_peak.png")
figure

# %% [markdown]
# *Checkpointing lowers the peak because only one block's activations are live at a time: backward recomputes them.*
#
# The price is recomputation: every block runs its forward twice. A backward costs about two forwards, because each
# matrix product of the forward has two in backward, as in the formulas above. So the step grows from the FLOPs of
# three forwards to those of four, by a factor of at most $4 / 3$.

# %%
print(f"checkpointed / baseline = {checkpointed.flops / measured.flops:.4f} in FLOPs")

# %% [markdown]
# ## Other models, other lengths
#
# Counting the bytes of a step does not require running it: shapes are enough. The memory calculator on the
# [first page](../index.md) shows bars like these for models of up to 70 billion parameters, none of which
# runs. Try there:
#
# - Llama 3 8B from 1024 to 8192 tokens: which parts of the bar grow, and which do not?
# - The same model with LoRA: which parts disappear?
# - A budget between the smallest bar and the largest: how many of the step's FLOPs does the plan recompute?

# %% tags=["hide-input"]
where = environment("cpu", "notebooks/01_where_memory_goes.py")
setting = {"tokens": T, "dim": d, "ff_dim": f, "layers": L, "heads": h, "dtype": "float32"}
for label, run in runs.items():
    kept = run.timeline.at(run.timeline.boundary)["activations"]
    metrics = run.to_json() | {"kept_bytes": kept}
    record = Record("one_step", setting | {"method": label}, metrics, where)
    path = record.save(f"results/cpu/01_one_step_{label}.json")

# %% [markdown]
# The numbers on this page were measured here:

# %% tags=["measured-time", "nbval-ignore-output"]
where

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: the published model
# :class: note
# The reference experiments of this book train 12 blocks with $d = 1024$, $f = 4096$ and heads of width 128. How many
# GiB do parameters, gradients and optimizer state need, and how many do the activations of 8192 tokens need, all in
# fp32? Which of the two would you reduce? Check your $P$ by building the model on the `meta` device, which allocates no
# memory.
# :::

# %% tags=["solution"]
with torch.device("meta"):
    published = Transformer(PUBLISHED)
d1, f1, h1, L1 = PUBLISHED.dim, PUBLISHED.ff_dim, PUBLISHED.heads, PUBLISHED.layers
P1 = L1 * (4 * d1**2 + 2 * d1 * f1 + 2 * d1 + 2 * d1 // h1) + d1
A1 = 10 * d1 + 2 * f1 + 3 * h1 + 2
print("P =", P1, "counted on meta:", sum(p.numel() for p in published.parameters()))
print("16 P =", memory_format(16 * P1))
print("activations of 8192 tokens:", memory_format(4 * 8192 * (L1 * A1 + d1 + 1)))

# %% [markdown]
# The activations: they are three times as large, they grow with every token, and they can be recomputed. Parameters,
# gradients and optimizer state cannot.

# %% [markdown]
# :::{admonition} Exercise 2: another optimizer
# :class: note
# Replace AdamW with SGD without momentum. Which bytes of the step vanish, and by how much does the peak fall? Predict
# both before you measure.
# :::

# %% tags=["solution"]
switched_off = ackpt.remove_activation_checkpointing(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
sgd = ackpt.measure(step, resident=[model, optimizer, x], repeats=0)
print("predicted:", 8 * P + counters, "bytes, AdamW's averages and step counters")
print("measured: ", measured.peak_bytes - sgd.peak_bytes, "bytes")

# %% [markdown]
# :::{admonition} Exercise 3: a cheaper nonlinearity
# :class: note
# The backward of ReLU only needs to know where its *output* is positive. How many elements per token does an MLP with
# ReLU save, compared with $d + 2 f$ for GELU? Check it on a `torch.nn.Sequential` with two linear layers.
# :::


# %% tags=["solution"]
def kept_per_token(nonlinearity):
    up, down = torch.nn.Linear(d, f, bias=False), torch.nn.Linear(f, d, bias=False)
    mlp = torch.nn.Sequential(up, nonlinearity, down)
    run = ackpt.measure(lambda: mlp(x).backward(x), resident=[mlp, x], repeats=0)
    return run.timeline.at(run.timeline.boundary)["activations"] // (4 * T)


print("GELU:", kept_per_token(torch.nn.GELU()), "= d + 2 f =", d + 2 * f)
print("ReLU:", kept_per_token(torch.nn.ReLU()), "= d + f   =", d + f)

# %% [markdown]
# ReLU's output is also the input of the down-projection, so one storage serves both. (The $d$ here is the output of the
# MLP; its input is resident.)

# %% [markdown]
# ## What we have seen
#
# - A training step needs 16 bytes per parameter (fp32, AdamW), 12 of them resident, and $4 A$ bytes per token and
#   block, with $A = 10 d + 2 f + 3 h + 2$. We derived both on paper and measured them to the byte.
# - Activations rise until backward begins and fall while the gradients rise. The peak is at the start of backward.
# - Above $\tfrac{8}{3} d$ tokens, activations outweigh everything else. They are saved only to be read once more, and
#   they can be recomputed: that is the subject of the next chapters.
# - If your count is off, look for a hidden buffer; here it was a loss in a storage as large as its input.
#
# ## Sources
#
# - {cite:t}`korthikanti2022` count the activations of a block in the same way.
# - {cite:t}`zhang2019` introduce the norm that the blocks use.
