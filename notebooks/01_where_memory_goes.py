# %% [markdown]
# # Where training memory goes
#
# **What occupies memory during one training step, and when?**

# %% [markdown]
# ```{figure} ../../results/figures/01_one_step.png
# :alt: Stacked live memory over the allocations of one training step: resident bytes are a constant band, activations rise in a straight line until backward begins and then fall, gradients grow from zero; the peak comes soon after backward begins.
# :class: dark-light
#
# Live memory of one training step, one allocation or free after another: activations rise until backward begins,
# gradients until it ends.
# ```
#
# Activations are largest when backward begins, gradients when it ends, so the peak is less than the sum of both maxima:
# it comes soon after backward begins. This chapter predicts resident memory and saved activations to the byte.
#
# - **Far left:** `zero_grad` frees the gradients of the previous step.
# - **Up to the dashed line,** the forward: every operation saves what its backward will read.
# - **Right of it,** backward reads the activations in reverse order and frees them, while the gradients grow to their
#   full size. The sawtooth on top shows *temporaries*, such as gradients of activations, each freed after its last use.
# - **At the end,** the optimizer updates the parameters. Its fused kernel allocates nothing.
#
# A *storage* is the memory that a tensor refers to. Several tensors (views) can share one storage, so we count the
# bytes of storages, here in fp32: 4 bytes per element. Parameters, optimizer state and inputs are *resident*; all other
# memory is *dynamic*. The *peak* is the largest number of bytes allocated at one time, and the *dynamic peak* the
# largest number of dynamic bytes.

# %% tags=["hide-input"]
import torch
import torch.nn.functional as F

import ackpt
from ackpt.metering.meter import memory_format
from ackpt.models import PUBLISHED, Block, Transformer, TransformerConfig
from experiments.reports import plots
from experiments.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)

# %% [markdown]
# A small Transformer of $L$ blocks learns to reproduce its input of $T$ tokens, each of width $d$: four sequences of
# 256, concatenated without padding. `sequences` says where each one starts.

# %%
config = TransformerConfig(dim=256, ff_dim=1024, layers=4, head_dim=64)
T, L, d, f, h = 1024, config.layers, config.dim, config.ff_dim, config.heads
model = Transformer(config)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
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
# A block has four square matrices for attention (queries, keys, values, output), two matrices for the MLP of hidden
# width $f$, two norms of width $d$, and two of width $d / h$ for the queries and keys of $h$ heads. The model has $P$
# parameters. One of its blocks has
#
# $$ P_\text{block} = 4 d^2 + 2 d f + 2 d + 2 \tfrac{d}{h} $$

# %%
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d  # plus the norm after the last block
print(f"P = {P:,}, counted {sum(p.numel() for p in model.parameters()):,}")

# %% [markdown]
# Every parameter needs three more elements: its gradient and AdamW's two running averages. The parameters and the
# averages, $12 P$ bytes, are resident. The gradients, $4 P$ bytes, are dynamic, because `zero_grad` frees them and
# backward allocates them again.
#
# `ackpt.measure` runs the step a few times and reads the allocator's events. The input `x` is resident, too.

# %%
measured = ackpt.measure(step, resident=[model, optimizer, x], repeats=0)
resident = {"parameters": 4 * P, "optimizer": 8 * P, "inputs": 4 * T * d}
for name, size in resident.items():
    print(
        f"{name:10}  predicted {size:>10,}  "
        f"measured {measured.categories[name]:>10,}"
    )
counters = 4 * len(list(model.parameters()))
assert measured.categories["optimizer"] == 8 * P + counters

# %% [markdown]
# The optimizer holds a few more bytes than predicted: AdamW stores a 4-byte step counter for each parameter tensor.

# %% [markdown]
# ## What the forward saves
#
# Take the smallest case, a linear layer $y = x W^\top$. Its backward gets $\bar y$ and computes two gradients; a bar
# marks a gradient of the loss:
#
# $$ \bar x = \bar y\, W, \qquad \bar W = \bar y^{\top} x. $$
#
# The second one needs the layer's *input*, which therefore stays live from the layer's forward to its backward, longest
# for the first layers. An addition saves nothing; a nonlinear function such as GELU saves its input. So the operations
# of an MLP save inputs of width $d$, $f$ and $f$: $d + 2 f$ elements per token.
#
# **The whole block**, operation by operation, compared with blocks of GPT-2 and Llama from `transformers`:
#
# :::{table} What a block saves for its backward, in elements per token.
# :class: wide-second
#
# | operation | what its backward reads | this block | GPT-2 | Llama |
# |---|---|--:|--:|--:|
# | two norms | input; one scale per token (GPT-2: also its mean; Llama: also a scaled copy of the input) | $2 d + 2$ | $2 d + 4$ | $4 d + 2$ |
# | query, key, value projection | input | $d$ | $d$ | $d$ |
# | norms of queries and keys | inputs: views of the projection's output, so all $3 d$ are saved; one scale per head for queries, one for keys | $3 d + 2 h$ | | |
# | attention | queries, keys and, if not yet counted, values; output; one sum per head | $3 d + h$ | $4 d + h$ | $4 d + h$ |
# | up-projection | input | $d$ | $d$ | $d$ |
# | GELU; in Llama SiLU and product | inputs | $f$ | $f$ | $3 f$ |
# | down-projection | input | $f$ | $f$ | $f$ |
# | $A$ | all elements that the block saves per token | $10 d + 2 f + 3 h + 2$ | $8 d + 2 f + h + 4$ | $10 d + 4 f + h + 2$ |
#
# :::
#
# ```{margin}
# The output projection reads the output of attention, which is counted. Llama has as many heads for keys and values as
# for queries here.
# ```
#
# Attention computes a score for every pair of tokens in a sequence, yet no row contains the length of a sequence: the
# fused kernel (FlashAttention) saves one sum per query and head, and recomputes the scores in backward.
#
# The next cell measures the three blocks. `timeline.boundary` is the moment when backward begins, and `.at` gives the
# live bytes of each category.

# %% tags=["hide-input"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that transformers does not show
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

no_dropout = {"resid_pdrop": 0, "attn_pdrop": 0, "attn_implementation": "sdpa"}
# This GELU is one operation; GPT-2's default, gelu_new, runs as several and saves more.
gpt2 = GPT2Config(n_embd=d, n_inner=f, n_head=h, activation_function="gelu_pytorch_tanh", **no_dropout)
llama = LlamaConfig(hidden_size=d, intermediate_size=f, num_attention_heads=h, attn_implementation="sdpa")
batch = x.view(4, 256, d).clone().requires_grad_()
rotations = LlamaRotaryEmbedding(llama)(batch, torch.arange(256)[None])


def saved_by_block(block, x, **more):
    def forward_and_backward():
        y = block(x, **more)
        (y[0] if isinstance(y, tuple) else y).backward(x.detach())  # this gradient needs no memory of its own

    run = ackpt.measure(forward_and_backward, resident=[block, x, *rotations], repeats=0)
    return run.timeline.at(run.timeline.boundary)["activations"]


# %%
A = 10 * d + 2 * f + 3 * h + 2
block = Block(config)
counted = {
    "this block": saved_by_block(
        block, x, cu_seqlens=sequences, max_seqlen=256
    ),
    "GPT-2": saved_by_block(GPT2Block(gpt2, 0), batch),
    "Llama": saved_by_block(
        LlamaDecoderLayer(llama, 0), batch, position_embeddings=rotations
    ),
}
elements = [A, 8 * d + 2 * f + h + 4, 10 * d + 4 * f + h + 2]
for (name, size), per_token in zip(counted.items(), elements):
    print(f"{name:10}  predicted {4 * T * per_token:,}  measured {size:,}")

# %% [markdown]
# Two errors cancel: $A$ counts the block's input, the meter its output. Both have $T d$ elements.
#
# `ackpt.print_saved` lists what autograd saves, tensor by tensor, with the operation, the module and the source line:

# %% tags=["hide-output"]
ackpt.print_saved(block, x, sequences, 256)

# %% tags=["hide-input"]
from experiments.reports import schematics
from experiments.widgets.block_stack import block_stack

schematics.publish(block_stack(), "01_stack")

# %% [markdown]
# The animation stacks these tensors and the block's input in the order in which the forward saves them:
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
print(
    f"predicted {predicted:,}  measured "
    f"{counted:,}  missing {counted - predicted:,}"
)

# %% [markdown]
# The prediction is 1 MiB and 4 bytes too low. The 4 bytes are the gradient of the loss, a single 1. The 1 MiB is the
# loss itself: `mse_loss` returns its scalar in a storage as large as its input.

# %%
loss = F.mse_loss(model(x, sequences, max_seqlen=256), x)
loss_bytes = loss.untyped_storage().nbytes()
print(
    f"{loss.numel()} element in {loss_bytes:,} bytes; "
    f"still missing: {counted - predicted - loss_bytes}"
)

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A step needs $16 P$ bytes for parameters, gradients and optimizer state, and $4 T (L A + d + 1)$ bytes for the
# activations that its forward saves. The first part does not depend on the batch, nor the second on the optimizer.
# :::

# %% tags=["hide-input"]
from experiments.reports.figures import line_plot

figure = plots.timeline_plot(measured.timeline.thinned(1000), "", measured.resident_bytes)
path = plots.save(figure, "results/figures/01_one_step.png")  # the figure at the top of this chapter

# %% [markdown]
# ## When activations outweigh parameters
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
print(
    "measured minus predicted bytes:",
    [a - b for a, b in zip(saved, formula)],
)

# %% tags=["hide-input"] alt="Memory over the number of tokens: the saved activations are on the straight line of the formula and cross the constant 16 bytes per parameter near 670 tokens."
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
# *Above $T^*$ tokens, the activations need more memory than parameters, gradients and optimizer state together. A
# leaner optimizer lowers the constant; only fewer or smaller saved activations lower the slope.*

# %% [markdown]
# ## Recomputing activations
#
# Each token needs $L A$ elements because the activations of all blocks are live at once. But a block can be recomputed
# from its input, which has only $d$ elements per token. Activation checkpointing saves the inputs, drops the rest, and
# recomputes each block just before its backward. In plain PyTorch:
#
# ```python
# for block in model.blocks:
#     x = torch.utils.checkpoint.checkpoint(block, x, sequences, 256, use_reentrant=False)
# ```
#
# `ackpt.apply_activation_checkpointing` does this in place.

# %%
ackpt.apply_activation_checkpointing(model, Block)
checkpointed = ackpt.measure(
    step, resident=[model, optimizer, x], repeats=0
)
print(
    "peak",
    memory_format(measured.peak_bytes),
    "->",
    memory_format(checkpointed.peak_bytes),
)

# %% tags=["hide-input"] alt="Live memory of the same step with checkpointed blocks: activations grow by a small step per block, and during backward the memory rises and falls once per block, a row of teeth instead of one triangle."
figure = plots.timeline_plot(checkpointed.timeline.thinned(1000), "", checkpointed.resident_bytes)
path = plots.save(figure, "results/figures/01_one_step_checkpointed.png")
figure

# %% [markdown]
# *With checkpointing, the inner activations of at most one block are live at a time: teeth instead of a triangle.*
#
# The teeth before the dashed line (temporaries) are activations that each block drops. The teeth after it are
# *recomputed* activations. At this length, the peak is in the rightmost tooth: gradients are nearly complete. With more
# tokens, it is in the leftmost ({doc}`04_experiments`). When backward begins, only the inputs of blocks (the first is
# resident), the last norm's input and scale, its output, and the loss are live:

# %%
counted = checkpointed.timeline.at(checkpointed.timeline.boundary)[
    "activations"
]
print(
    f"predicted {4 * T * ((L + 1) * d + 1) + loss_bytes + 4:,} "
    f" measured {counted:,}"
)

# %% tags=["hide-input"]
runs = {"baseline": measured, "checkpointed": checkpointed}
names = [name for name in measured.categories if any(run.categories[name] for run in runs.values())]


def table_row(name, sizes):
    return {"category": name} | {label: round(size / 2**20, 1) for label, size in sizes.items()}


rows = [table_row(n, {label: run.categories[n] for label, run in runs.items()}) for n in names]
rows += [table_row("**peak**", {label: run.peak_bytes for label, run in runs.items()})]
columns = {"category": "at the peak", "baseline": "baseline, MiB", "checkpointed": "checkpointed, MiB"}
caption = "Memory at the peak of one training step, by category, without and with checkpointed blocks."
table = markdown_table(rows, columns, caption, "tab-one-step")
path = write_text_atomic("results/tables/01_one_step.md", table)

# %% [markdown]
# ```{include} ../../results/tables/01_one_step.md
# ```

# %% [markdown]
# The price is recomputation. A backward costs about two forwards, because each matrix product of the forward has two in
# backward. So the step grows from the FLOPs of three forwards to those of at most four, by a factor of at most $4 / 3$:

# %%
print(
    "checkpointed / baseline = "
    f"{checkpointed.flops / measured.flops:.4f} in FLOPs"
)

# %% [markdown]
# It is less here, because the last product of each block is not recomputed: no backward reads its result
# ({doc}`02_reentrant_checkpoint`).
#
# Shapes are enough to count the bytes of a step. The calculator on the [first page](../index.md) does it for models of
# up to 70 billion parameters. Try Llama 3 8B with 1,024 and 8,192 tokens, and with LoRA.

# %% tags=["hide-input"]
where = environment("cpu", "notebooks/01_where_memory_goes.py")
setting = {"tokens": T, "dim": d, "ff_dim": f, "layers": L, "heads": h, "dtype": "float32"}
for label, run in runs.items():
    saved_bytes = run.timeline.at(run.timeline.boundary)["activations"]
    metrics = run.to_json() | {"saved_bytes": saved_bytes}
    record = Record("one_step", setting | {"method": label}, metrics, where)
    path = record.save(f"results/cpu/01_one_step_{label}.json")

# %% [markdown]
# Environment of these measurements:

# %% tags=["measured-time", "nbval-ignore-output"]
where

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: a larger model
# :class: note
# Our model at the published sizes ({doc}`04_experiments`) has 12 blocks with $d = 1024$, $f = 4096$ and heads of width
# 128. In fp32, how many GiB do parameters, gradients and optimizer state need, and how many the activations of 8192
# tokens? Which would you reduce? Check your $P$ by building the model on the `meta` device, which allocates no memory.
# :::

# %% tags=["solution"]
with torch.device("meta"):
    larger = Transformer(PUBLISHED)
d1, f1, h1, L1 = PUBLISHED.dim, PUBLISHED.ff_dim, PUBLISHED.heads, PUBLISHED.layers
P1 = L1 * (4 * d1**2 + 2 * d1 * f1 + 2 * d1 + 2 * d1 // h1) + d1
A1 = 10 * d1 + 2 * f1 + 3 * h1 + 2
print(f"P = {P1:,}, counted on meta: {sum(p.numel() for p in larger.parameters()):,}")
print("16 P =", memory_format(16 * P1))
print("activations of 8192 tokens:", memory_format(4 * 8192 * (L1 * A1 + d1 + 1)))

# %% [markdown]
# The activations: they need about three times as many bytes, grow with every token, and can be recomputed.

# %% [markdown]
# :::{admonition} Exercise 2: another optimizer
# :class: note
# Replace AdamW with SGD without momentum. Which bytes vanish, and by how much does the peak fall?
# :::

# %% tags=["solution"]
ackpt.remove_activation_checkpointing(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
sgd = ackpt.measure(step, resident=[model, optimizer, x], repeats=0)
print(f"predicted: {8 * P + counters:,} bytes, AdamW's averages and step counters")
print(f"measured:  {measured.peak_bytes - sgd.peak_bytes:,} bytes")

# %% [markdown]
# :::{admonition} Exercise 3: a cheaper nonlinearity
# :class: note
# The backward of ReLU only needs to know where its *output* is positive. How many elements per token does an MLP with
# ReLU save, compared with $d + 2 f$ for GELU? Check it on a `torch.nn.Sequential` with two linear layers.
# :::


# %% tags=["solution"]
def saved_per_token(nonlinearity):
    up, down = torch.nn.Linear(d, f, bias=False), torch.nn.Linear(f, d, bias=False)
    mlp = torch.nn.Sequential(up, nonlinearity, down)
    run = ackpt.measure(lambda: mlp(x).backward(x), resident=[mlp, x], repeats=0)
    return run.timeline.at(run.timeline.boundary)["activations"] // (4 * T)


print("GELU:", saved_per_token(torch.nn.GELU()), "= d + 2 f =", d + 2 * f)
print("ReLU:", saved_per_token(torch.nn.ReLU()), "= d + f   =", d + f)

# %% [markdown]
# ReLU's output is also the input of the down-projection, so one storage serves both.

# %% [markdown]
# ## A model for the whole book
#
# Most chapters end with the same step: Llama 3 8B in bf16, two sequences of 8,192 tokens, AdamW with fused kernels, on
# one H100 with 80 GB, of which torch reports 79.1 GiB. Nothing runs on a GPU: bytes follow from shapes, as in
# `ackpt plan`, and times from the rates of the GPU's data sheet.

# %% tags=["hide-input"] alt="One stacked bar. Weights and optimizer state take 45 GiB, logits 23, attention 10, MLPs 56, norms and residuals 33. The sum, 166.9 GiB, is more than twice the memory of the GPU."
from experiments.running_model import bars

figure = bars(1)
path = plots.save(figure, "results/figures/01_running_model.png")
figure

# %% [markdown]
# *Llama 3 8B: memory at the peak of a step, by kind, and the time of the step; predicted by `nox -s running`.*
#
# The baseline recomputes nothing and needs 166.9 GiB, more than twice the memory of the GPU. Weights and the state of
# AdamW take 45 GiB: in bf16, 6 bytes per parameter. The bar has no gradients, because the peak is where backward begins.
# Everything else is activations and logits; the MLPs alone need a third of the peak.
#
# ## Summary
#
# - A step needs 16 bytes per parameter (fp32, AdamW), 12 of them resident, and $4 A$ bytes per token and block.
# - With $f = 4 d$, activations outweigh the rest above about $\tfrac{8}{3} d$ tokens. They can be recomputed.
#
# You can now say which part of a step's memory grows with the batch, and compute it.
#
# ## Sources
#
# - {cite:t}`korthikanti2022` count the activations of a block in the same way.
# - {cite:t}`zhang2019` introduce RMSNorm, the blocks' norm.
