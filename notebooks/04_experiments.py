# %% [markdown]
# # How large will the peak be?
#
# **How large is the peak of a Transformer's step, and how does it grow with the length?**

# %% [markdown]
# ```{figure} ../../results/figures/04_side_by_side.png
# :alt: Live memory of two training steps side by side. Baseline: activations rise in a ramp to the peak, where backward begins, and fall. Checkpoint: a low staircase of boundaries in the forward, then one tooth of recomputed activations per block in backward. Its peak is a quarter of the baseline's.
# :class: dark-light
#
# Live memory of one training step at 1,024 tokens, without and with checkpointed blocks: the peak falls to a quarter.
# ```
#
# Both peaks follow from the sizes of the model, to the byte. The baseline's peak grows with every token in every layer.
# Up to a certain length, the checkpointed peak grows only as if the model had one layer.

# %% tags=["hide-input"]
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.models import Transformer, TransformerConfig
from experiments import synthetic
from experiments.graph_profile import orders_plot
from experiments.reports import plots
from experiments.reports import training as report
from experiments.reports.figures import line_plot
from experiments.results import environment, markdown_table, write_text_atomic
from experiments.steps.predicted import predict_experiment
from experiments.suite.chapters import measure_here

torch.set_num_threads(2)
SOURCE = "notebooks/04_experiments.py"

# %% [markdown]
# On a GPU, the next two cells also run the published experiment, for at most `minutes`; {doc}`14_published` shows it.

# %% tags=["parameters", "hide-input"]
device, tier, dataset, minutes = "auto", "auto", "embedded", 10

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
measure_here(
    "synthetic", device=device, tier=tier, dataset=dataset, minutes=minutes
)

# %% [markdown]
# A Transformer learns to reproduce random input: mean squared error, AdamW, one sequence of $T$ tokens per batch. The
# experiment was published for a GPU, with $L = 12$ blocks of width $d = 1024$, $f = 4096$ in the MLP, and sequences of
# 2,048 to 16,384 tokens. We divide $d$, $f$ and $T$ by 16, so weights and activations shrink 256-fold.
#
# Sequences are concatenated: a batch is one matrix of $T$ rows without padding, and `offsets` says where each begins.
# With `ackpt.checkpoint`, each block is a region ({doc}`02_reentrant_checkpoint`).

# %%
config = TransformerConfig(dim=64, ff_dim=256, layers=12, head_dim=16)


def forward(model, x, offsets, longest, method):
    for block in model.blocks:
        if "checkpoint" in method:
            x = ackpt.checkpoint(block, x, offsets, longest)
        else:
            x = block(x, offsets, longest)
    return model.norm(x)


# %% [markdown]
# The training step is plain PyTorch:


# %%
def build(method, *lengths):
    torch.manual_seed(0)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)

    def step(x):
        loss = F.mse_loss(
            forward(model, x, offsets, max(lengths), method), x
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (model, optimizer, offsets)


# %% [markdown]
# We train with both methods from the same weights, on the same batches, and measure one more step:

# %%
lengths, methods = (256, 512, 1024), ("baseline", "checkpoint")
runs, steps = {}, {}
for T in lengths:
    losses = {}
    for method in methods:
        step, resident = build(method, T)
        losses[method] = [
            step(torch.randn(T, config.dim)) for _ in range(4)
        ]
        x = torch.randn(T, config.dim)
        steps[method, T] = partial(step, x)
        runs[method, T] = ackpt.measure(
            steps[method, T], resident=(*resident, x), repeats=0
        )
    print(
        f"T = {T:4}  losses equal at all 4 steps: "
        f"{losses['baseline'] == losses['checkpoint']}"
    )

# %% [markdown]
# The losses are bit-identical.
#
# ## The two steps side by side

# %% tags=["hide-input"]
longest = {method: runs[method, lengths[-1]] for method in methods}
figure = orders_plot({m: run.timeline for m, run in longest.items()}, "", longest["baseline"].resident_bytes)
path = plots.save(figure, "results/figures/04_side_by_side.png")  # the figure at the top of this chapter

# %% [markdown]
# In the figure at the top:
#
# - The baseline's ramp has $L$ equal pieces, one per block, live until backward reads them.
# - With checkpointing, only the input of each block is saved, its *boundary*. The forward of a block is a spike.
# - Each tooth after the dashed line is one recomputed block.
#
# ## The peak by hand
#
# **Baseline.** A block saves $A = 10 d + 2 f + 3 h + 2$ elements per token, including its input, where $h$ counts the
# heads ({doc}`01_where_memory_goes`). The peak is early in backward, in the down-projection of the last block. There,
# the live elements per token are $L A$ of the blocks, $d + f$ for the gradients of the down-projection's output and
# input, and $d$ for the loss, whose storage is as large as its input:
#
# $$ \text{slope}_\text{baseline} = 4 \, (L A + 2 d + f) \text{ bytes per token} $$
#
# The rest, the *floor*, does not depend on $T$: $12 P$ bytes for the $P$ parameters with their Adam states, step
# counts, and the gradients that already exist, of the loss, the last norm and the down-projection.

# %%
def of_block(config):
    """A and P_block."""
    d, f, h = config.dim, config.ff_dim, config.heads
    return 10 * d + 2 * f + 3 * h + 2, 4 * d**2 + 2 * d * f + 2 * d + 2 * (
        d // h
    )


d, f, L = config.dim, config.ff_dim, config.layers
A, P_block = of_block(config)
P = L * P_block + d
states = 12 * P + 4 * (8 * L + 1) + 8  # 8: the two offsets of the sequence
gradients = 4 * (1 + d + d * f)  # 1: the gradient of the loss

# %% [markdown]
# **With checkpointed blocks**, backward processes the blocks from $L$ down to 1 and recomputes each first. At block
# $i$, the live elements per token are $i \, d$ for the boundaries of blocks 1 to $i$, $A - d$ for the recomputed block,
# and $2 d + f$ as before. (Its output is not recomputed: no backward reads it.) The gradients of the $L - i$ later
# blocks are complete. Each block has $P_\text{block}$ parameters, and the dots are the floor:
#
# $$ \text{peak}_i = \underbrace{4 \, T \, \bigl(A + (i + 1) \, d + f\bigr)}_{\text{falls from block to block}}
#    + \underbrace{4 \, (L - i) \, P_\text{block}}_{\text{rises}} + \dots $$
#
# Each block frees a boundary, $4 \, T d$ bytes, and allocates gradients, $4 \, P_\text{block}$ bytes. So the peak is at
# the beginning of backward if boundaries are larger, and otherwise at its end.

# %%
def baseline_peak(T):
    return states + gradients + 4 * T * (L * A + 2 * d + f)


def peak_at_block(T, i):
    return (
        states
        + gradients
        + 4 * T * (A + (i + 1) * d + f)
        + 4 * (L - i) * P_block
    )


def checkpoint_peak(T):
    return max(peak_at_block(T, 1), peak_at_block(T, L))


# %% [markdown]
# Measured peak minus the formula, in bytes, at every length:

# %%
for method, formula in zip(methods, (baseline_peak, checkpoint_peak)):
    print(
        f"{method:10}",
        [runs[method, T].peak_bytes - formula(T) for T in lengths],
    )

# %% [markdown]
# ## Two slopes and a bend
#
# With the sizes of our model:

# %%
T_bend = P_block / d
print("bytes per token")
print(
    f"baseline:                 4 x ({L} x {A} + "
    f"2 x {d} + {f}) = {4 * (L * A + 2 * d + f):6}"
)
print(
    f"checkpointed, T < T_bend: 4 x ({A} + 2 x "
    f"{d} + {f})      = {4 * (A + 2 * d + f):6}"
)
print(
    f"checkpointed, T > T_bend: 4 x ({A} + {L + 1} x "
    f"{d} + {f})     = {4 * (A + (L + 1) * d + f):6}"
)
print(f"T_bend = P_block / d = {T_bend:.0f} tokens")

# %% tags=["hide-input"] alt="Peak memory of the checkpointed step over 256 to 2,048 tokens. Three measured points are on the predicted line, which bends upwards at 770 tokens. A second dashed line continues its first part and is clearly lower at 2,048 tokens."
ticks = (256, 512, 770, 1024, 1536, 2048)
straight = [checkpoint_peak(256) + 4 * (A + 2 * d + f) * (T - 256) for T in ticks]
figure = line_plot(
    ticks,
    measured={"checkpoint": [runs["checkpoint", T].peak_bytes if T in lengths else None for T in ticks]},
    predicted={"checkpoint": [checkpoint_peak(T) for T in ticks], "slope below the bend": straight},
    title="",
    xlabel="tokens in the sequence",
)
path = plots.save(figure, "results/figures/04_peak_over_tokens.png")
figure

# %% [markdown]
# *The checkpointed peak bends at $T_\text{bend}$: from there on, each token also costs the boundaries of eleven more
# blocks.*
#
# :::{admonition} Takeaway
# :class: tip
# Up to $T_\text{bend} = P_\text{block} / d$ tokens, about $12 d$ for $f = 4 d$, depth costs no activation memory.
# Beyond, every layer adds its boundary.
# :::

# %% tags=["hide-input"]
rows = []
for T in lengths:
    base, recomputed = (runs[method, T] for method in methods)
    row = {"T": f"{T:,}", "baseline": round(base.peak_bytes / 2**20, 1), "checkpoint": round(recomputed.peak_bytes / 2**20, 1)}
    row |= {"saved": round(100 - 100 * recomputed.peak_bytes / base.peak_bytes)}
    rows.append(row | {"flops": round(recomputed.flops / base.flops, 3)})
columns = {"T": "tokens", "baseline": "baseline, MiB", "checkpoint": "checkpoint, MiB"}
columns |= {"saved": "reduction, %", "flops": "FLOPs, ratio"}
caption = "Measured peaks of one step on the CPU, and the FLOPs of checkpoint divided by those of baseline."
path = write_text_atomic("results/tables/04_synthetic.md", markdown_table(rows, columns, caption, "tab-synthetic"))

# %% [markdown]
# ```{include} ../../results/tables/04_synthetic.md
# ```

# %% [markdown]
# ## FLOPs and time
#
# The matrices of one block cost $2 \, (4 d^2 + 2 d f)$ FLOPs per token, and twice that in backward. Attention has two
# products of $T^2 d$ multiply-adds. Its backward costs two and a half times its forward, because the flash kernel
# recomputes the scores. A region does not recompute its last product, the down-projection:
#
# $$ F_\text{matrices} = 2 \, T L \, (4 d^2 + 2 d f), \qquad F_\text{last} = 2 \, T L \, d f, \qquad
#    F_\text{attention} = 4 \, T^2 L \, d, $$
#
# $$ \frac{\text{checkpointed}}{\text{baseline}} =
#    \frac{4 \, F_\text{matrices} - F_\text{last} + 4.5 \, F_\text{attention}}
#         {3 \, F_\text{matrices} + 3.5 \, F_\text{attention}} $$

# %%
for T in lengths:
    matrices, last, attention = (
        2 * T * L * (4 * d**2 + 2 * d * f),
        2 * T * L * d * f,
        4 * T**2 * L * d,
    )
    base, recomputed = (
        3 * matrices + 3.5 * attention,
        4 * matrices - last + 4.5 * attention,
    )
    equal = [base, recomputed] == [
        runs[method, T].flops for method in methods
    ]
    assert equal
    print(
        f"T = {T:4}: equal to the count: "
        f"{equal}, ratio {recomputed / base:.4f}"
    )

# %% [markdown]
# With $f = 4 d$, checkpointing costs $11 / 9$ of the FLOPs where matrices dominate, and $9 / 7$ where attention does. Its
# time ratio is higher here: these blocks are tiny, so the fixed time of each region ({doc}`02_reentrant_checkpoint`)
# matters. Ratios are medians of five rounds, with the lowest and the highest:

# %% tags=["measured-time", "nbval-ignore-output"]
for T in (lengths[0], lengths[-1]):
    ratio = ackpt.compare_seconds(
        {m: steps[m, T] for m in methods}, repeats=5
    ).ratios["checkpoint"]
    print(
        f"T = {T:4}: checkpointed x {ratio.median:.2f} "
        f"({ratio.low:.2f} to {ratio.high:.2f})"
    )

# %% [markdown]
# ## Peaks from shapes alone
#
# `ackpt.predict` runs the same step on *fake tensors*, which have shapes but no data, and follows their allocations and
# frees:

# %%
T = lengths[-1]
for method in methods:
    with FakeTensorMode():
        step, resident = build(method, T)
        x = torch.randn(T, d)
    predicted = ackpt.predict(partial(step, x), resident=(*resident, x))
    print(
        f"{method:10} predicted {predicted.peak_bytes:,}, "
        f"measured {runs[method, T].peak_bytes:,} bytes"
    )
    assert predicted.peak_bytes == runs[method, T].peak_bytes

# %% tags=["hide-input"]
for group in predict_experiment(synthetic.GPU, SOURCE):
    for record in group:  # for the tables of later pages
        path = record.save(f"results/cpu/04_{report.file_name(record)}")

# %% [markdown]
# The same holds for other people's models: we predict the ten published peaks of this experiment, on a GPU, to within
# 1,024 bytes. {doc}`14_published` has the table, and what its seconds measured.
#
# ## Exercises
#
# :::{admonition} Exercise 1: one sequence or two
# :class: note
# Concatenate two sequences of 512 tokens instead of one of 1,024. How do the peak and the FLOPs change? Predict, then
# measure.
# :::

# %% tags=["solution"]
x = torch.randn(1024, d)
last, attention = 2 * 1024 * L * d * f, 4 * 1024**2 * L * d
matrices = 2 * 1024 * L * (4 * d**2 + 2 * d * f)
for method, a, b in ("baseline", 3 * matrices, 3.5 * attention), ("checkpoint", 4 * matrices - last, 4.5 * attention):
    step, resident = build(method, 512, 512)
    pair, one = ackpt.measure(partial(step, x), resident=(*resident, x), repeats=0), runs[method, 1024]
    flops = f"FLOPs x {pair.flops / one.flops:.4f}, by hand {(a + b / 2) / (a + b):.4f}"
    print(f"{method:10} {pair.peak_bytes - one.peak_bytes} bytes more, {flops}")

# %% [markdown]
# Memory depends on the number of tokens, not on where the sequences end. The 4 bytes are one more offset. Attention is
# quadratic in the length, so two sequences of half the length need half its FLOPs.
#
# :::{admonition} Exercise 2: the omitted length
# :class: note
# Measure at 768 tokens. Why is the formula off? Hint: from this length on, the backward of the CPU's attention kernel
# allocates two fp32 tiles of $256 \times 512$ elements for each of two threads.
# :::

# %% tags=["solution"]
x = torch.randn(768, d)
for method, formula in zip(methods, (baseline_peak, checkpoint_peak)):
    step, resident = build(method, 768)
    run = ackpt.measure(partial(step, x), resident=(*resident, x), repeats=0)
    print(f"{method:10} {run.peak_bytes - formula(768):,} bytes above the formula")

# %% [markdown]
# The tiles, 2 MiB, lift the attention of a block above its down-projection, where the formula expects the peak. At
# 1,024 tokens, they no longer do.
#
# :::{admonition} Exercise 3: what fits, on paper
# :class: note
# Our step may take 24 MiB. How many tokens may a sequence have, without and with checkpointed blocks? The floor is
# 7.17 MB; the slopes are those printed above. Does the bend matter?
# :::

# %% tags=["solution"]
floor = states + gradients
print(f"floor {floor:,} bytes, so {24 * 2**20 - floor:,} bytes are left for tokens")
for method, slope in ("baseline", 4 * (L * A + 2 * d + f)), ("checkpoint", 4 * (A + (L + 1) * d + f)):
    fitting = (24 * 2**20 - floor) // slope
    step, resident = build(method, fitting)
    x = torch.randn(fitting, d)
    run = ackpt.measure(partial(step, x), resident=(*resident, x), repeats=0)
    print(f"{method:10} {fitting:5,} tokens, measured {run.peak_bytes / 2**20:.2f} MiB")

# %% [markdown]
# With checkpointing, the length is beyond the bend, so the larger slope counts, and no gradients of blocks: the peak is
# at the beginning of backward. Six times as many tokens fit.
#
# ## Summary
#
# You can now compute the peak of a Transformer by hand. {doc}`04_logits` adds the head of a language model.
#
# The numbers on this page were produced in this environment:

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
environment("cpu", SOURCE)

# %% [markdown]
# ## Sources
#
# - {cite:t}`chen2016`: checkpointing every block.
# - The experiment: repository `sashaboriskin/activation_checkpointing`.
