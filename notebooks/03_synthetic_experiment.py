# %% [markdown]
# # The synthetic experiment
#
# After this chapter you can predict the peak of a training step for any sequence length, without and with checkpointed
# blocks, to the byte and before it runs. You can also analyze a published table of peaks with the same formulas.

# %% [markdown]
# ## Goals
#
# - Repeat a published experiment, scaled down to run on two CPU cores.
# - Derive the peak of both methods: a slope in bytes per token above a fixed floor.
# - Find the sequence length from which the boundaries, not the gradients, decide the checkpointed peak.
# - Count the cost in floating-point operations, and measure it in time.
# - Predict the peaks at the published sizes from shapes alone, and explain where the published figures differ.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $T$ | tokens in the batch; a batch is one sequence here, so $T$ is its length |
# | $L$ | blocks |
# | $d$, $f$, $h$ | width of the model, width inside the MLP, number of heads |
# | $P_\text{block}$, $P$ | parameters of one block, of the model |
# | $A$ | elements that one block saves per token, from its forward to its backward |
#
# The *boundary* of a checkpointed block is its input, the only tensor of the block that is saved from forward to
# backward.

# %%
from dataclasses import replace
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt import plots
from ackpt.experiments import synthetic
from ackpt.experiments.reports import training as report
from ackpt.experiments.reports.gpu_records import gpu_records
from ackpt.experiments.steps.predicted import predict_experiment
from ackpt.experiments.steps.training import configure, one_step
from ackpt.metering.prediction import predict
from ackpt.results import load_reference, markdown_table, write_text_atomic

torch.set_num_threads(2)
SOURCE = "notebooks/03_synthetic_experiment.py"

# %% [markdown]
# ## The experiment
#
# A Transformer learns to reproduce random input: mean squared error, AdamW, one sequence per batch, packed
# variable-length attention. The published experiment has $d = 1024$ and sequences of 2048 to 16384 tokens, and runs on
# a GPU. We divide $d$, $f$ and the lengths by 16 and keep the 12 blocks. Weights and activations then both shrink by
# $16^2$, so their ratio stays the same. (A head is 16 wide, an eighth of the published width: narrower heads are slow
# on a CPU.)

# %%
published = synthetic.GPU
config = replace(
    published,
    dim=published.dim // 16,
    ff_dim=published.ff_dim // 16,
    head_dim=16,
    seq_lens=(128, 256, 512, 1024),
    steps=6,
    device="cpu",
    dtype="float32",
)

# %% [markdown]
# Both methods run at every length, from the same weights, on the same batches. On the command line, the same run is
#
# ```bash
# ackpt synthetic --dim 64 --ff-dim 256 --head-dim 16 --layers 12 --seq-len 128 256 512 1024
# ```

# %%
records = [record for group in synthetic.run_synthetic(config, SOURCE) for record in group]
for record in records:
    path = record.save(f"results/cpu/03_{report.file_name(record)}")

# %%
lengths, methods = config.seq_lens, config.methods
runs = {(r.config["method"], r.config["seq_len"]): r.metrics for r in records}
peaks = {m: [runs[m, T]["peak_bytes"] for T in lengths] for m in methods}

# %% [markdown]
# Checkpointing must not change what the model learns. We compare the losses of all steps without a tolerance:

# %%
for T in lengths:
    base, recomputed = (runs[m, T]["losses"] for m in methods)
    print(f"T = {T:4}  losses equal at all {len(base)} steps: {base == recomputed}")

# %% [markdown]
# ## The peak by hand
#
# **Without checkpointing.** {doc}`01_where_memory_goes` found that one block saves $A = 10 d + 2 f + 3 h + 2$ elements
# per token, including its own input, and that the peak comes soon after backward begins. To predict the peak to the
# byte, we need the exact moment: the backward of the last block's down-projection. By then the backward of the loss and
# of the last norm has freed what these saved, and the live elements per token are
#
# - $L A$ that the blocks saved, including the model's input,
# - $d$ for the incoming gradient and $f$ for the outgoing gradient,
# - $d$ for the loss, whose storage on the CPU is as large as its input.
#
# $$ s_\text{baseline} = 4 \, (L A + 2 d + f) \text{ bytes per token} $$
#
# The floor does not depend on $T$. It consists of parameters and Adam states ($12 P$ bytes), a step count for each of
# the $8 L + 1$ parameter tensors, and two gradients: those of the last norm and of this down-projection.

# %%
d, f, L = config.dim, config.ff_dim, config.layers
h = config.model().heads
A = 10 * d + 2 * f + 3 * h + 2
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d
resident = 12 * P + 4 * (8 * L + 1) + 8  # 8: the two offsets of the packed sequence
gradients = 4 * (1 + d + d * f)  # 1: the gradient of the loss


# %%
def baseline_peak(T):
    return resident + gradients + 4 * T * (L * A + 2 * d + f)


# %% [markdown]
# **With checkpointed blocks** the forward saves only boundaries, $d$ elements per token each. Backward processes the
# blocks from $L$ down to $1$, and recomputes each just before its own backward. While it processes block $i$, the live
# elements per token are
#
# - $i \, d$ for the boundaries of blocks $1$ to $i$; the later ones are already freed,
# - $A - d$ for the recomputed block, and $d$ for its output,
# - $d + f$ for the two gradients and $d$ for the loss, as before.
#
# In addition, the gradients of the $L - i$ later blocks are complete:
#
# $$ \text{peak}_i = \underbrace{4 \, T \, \bigl(A + (i + 2) \, d + f\bigr)}_{\text{falls from block to block}}
#    + \underbrace{4 \, (L - i) \, P_\text{block}}_{\text{rises}} + \dots $$
#
# From one block to the next, a boundary of $4 \, T d$ bytes is freed, and the gradients of a block,
# $4 \, P_\text{block}$ bytes, are allocated. If the boundary is larger, the peak comes at the beginning of backward,
# otherwise at the end.


# %%
def peak_at_block(T, i):
    return resident + gradients + 4 * T * (A + (i + 2) * d + f) + 4 * (L - i) * P_block


def checkpoint_peak(T):
    return max(peak_at_block(T, 1), peak_at_block(T, L))


# %% [markdown]
# Measured peak minus the formula, in bytes, at every length:

# %%
for m, formula in zip(methods, (baseline_peak, checkpoint_peak)):
    print(f"{m:10}", [peak - formula(T) for T, peak in zip(lengths, peaks[m])])

# %% [markdown]
# ## Two slopes and a bend
#
# The formulas with the sizes of our model:

# %%
T_star = P_block / d
s_baseline = 4 * (L * A + 2 * d + f)
s_below, s_above = (4 * (A + (i + 2) * d + f) for i in (1, L))
print("bytes per token")
print(f"baseline:             4 x ({L} x {A} + 2 x {d} + {f}) = {s_baseline:6}")
print(f"checkpointed, T < T*: 4 x ({A} + 3 x {d} + {f})      = {s_below:6}")
print(f"checkpointed, T > T*: 4 x ({A} + {L + 2} x {d} + {f})     = {s_above:6}")
print(f"T* = P_block / d = {T_star:.0f} tokens")

# %% [markdown]
# The measured slopes from each length to the next, in bytes per token:

# %%
for (i, a), (j, b) in pairwise(enumerate(lengths)):
    base, recomputed = ((peaks[m][j] - peaks[m][i]) / (b - a) for m in methods)
    print(f"{a:4} -> {b:4}:  baseline {base:8.1f}  checkpointed {recomputed:7.1f}")

# %% [markdown]
# The last interval contains the bend, so its checkpointed slope is a mixture of both slopes. Without checkpointing,
# every block adds $4 A$ bytes per token to the slope. With checkpointing, it adds the $4 d$ bytes of its boundary, but
# only beyond the bend. Below the bend, the peak comes after the boundaries are freed, when gradients have taken their
# place.

# %%
print(f"a block saves {4 * A} bytes per token, its boundary {4 * d}: {A / d:.1f} times fewer")

# %% alt="Peak memory over tokens. Baseline: a steep straight line. Checkpointed: a line that rises many times more slowly and bends upwards a little at 768 tokens. The measured points are on the predicted lines."
ticks = (128, 256, 512, 768, 1024)
figure = plots.line_plot(
    ticks,
    measured={m: [runs[m, T]["peak_bytes"] if T in lengths else None for T in ticks] for m in methods},
    predicted={
        "baseline": [baseline_peak(T) for T in ticks],
        "checkpoint": [checkpoint_peak(T) for T in ticks],
    },
    title=f"With checkpointing, a token costs {s_below:,} bytes instead of {s_baseline:,}, and "
    f"{s_above:,} from {T_star:.0f} tokens on",
    xlabel="tokens in the sequence",
)
path = plots.save(figure, "results/figures/03_peak_over_tokens.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Up to $T^* = P_\text{block} / d$ tokens, which is about $12 d$ for $f = 4 d$, the checkpointed peak comes at the *end*
# of backward. Only one block's activations are live then, so each further layer adds only its parameters, gradients and
# Adam states. Beyond $T^*$, the peak comes at the beginning of backward, and every layer adds its boundary.
# :::

# %% [markdown]
# ## The two steps side by side
#
# The same step at the longest sequence, with both methods on one memory axis:

# %% alt="Live memory of two training steps side by side. Baseline: activations rise in a ramp to the peak, where backward begins, and fall. Checkpoint: a low staircase of boundaries in the forward, then one tooth per block in backward, each as high as one block. Its peak is a quarter of the baseline's."
longest = lengths[-1]
share = runs["checkpoint", longest]["peak_bytes"] / runs["baseline", longest]["peak_bytes"]
figure = report.timelines_plot(
    [record for record in records if record.config["seq_len"] == longest],
    f"With {L} boundaries and one block at a time, the peak is {share:.0%} of the baseline's",
)
path = plots.save(figure, "results/figures/03_side_by_side.png")
figure

# %% [markdown]
# - Without checkpointing, the ramp has $L$ equal pieces, one per block. The activations stay live until backward reads
#   them.
# - With checkpointing, the ramp shrinks to a staircase of boundaries. The forward of each block is a spike: it
#   allocates the same activations as the baseline and frees them at once.
# - Each tooth after the dashed line is one recomputed block. The teeth get lower slowly, because from each tooth to the
#   next a boundary is freed and the gradients of a block are added.
#
# Below the bend, the teeth would get higher instead. The table lists the peaks and the cost:

# %% tags=["hide-input"]
rows = [
    {
        "T": T,
        "plain": round(peaks["baseline"][i] / 2**20, 1),
        "checkpoint": round(peaks["checkpoint"][i] / 2**20, 1),
        "saved": round(100 - 100 * peaks["checkpoint"][i] / peaks["baseline"][i], 1),
        "flops": round(runs["checkpoint", T]["flops"] / runs["baseline", T]["flops"], 4),
    }
    for i, T in enumerate(lengths)
]
columns = {
    "T": "tokens",
    "plain": "baseline, MiB",
    "checkpoint": "checkpoint, MiB",
    "saved": "reduction, %",
    "flops": "FLOPs, ratio",
}
caption = "Measured peaks of one step on the CPU, and the FLOPs of checkpoint divided by those of baseline."
table = markdown_table(rows, columns, caption, "tab-synthetic")
path = write_text_atomic("results/tables/03_synthetic.md", table)

# %% [markdown]
# ```{include} ../../results/tables/03_synthetic.md
# ```

# %% [markdown]
# ## FLOPs and time
#
# Count a multiply-add as two operations. The matrices of one block cost $2 \, (4 d^2 + 2 d f)$ FLOPs per token.
# Attention multiplies queries with keys and scores with values: two products of $T^2 d$ multiply-adds each. The
# backward of a matrix costs twice its forward. The backward of attention costs two and a half times its forward,
# because the flash kernel recomputes the scores.
#
# $$ F_\text{matrices} = 2 \, T L \, (4 d^2 + 2 d f), \qquad F_\text{attention} = 4 \, T^2 L \, d, $$
#
# $$ \frac{\text{checkpointed}}{\text{baseline}} =
#    \frac{4 \, F_\text{matrices} + 4.5 \, F_\text{attention}}{3 \, F_\text{matrices} + 3.5 \, F_\text{attention}} $$

# %%
for T in lengths:
    matrices, attention = 2 * T * L * (4 * d**2 + 2 * d * f), 4 * T**2 * L * d
    base, recomputed = 3 * matrices + 3.5 * attention, 4 * matrices + 4.5 * attention
    counted = [runs[m, T]["flops"] for m in methods]
    equal = [base, recomputed] == counted
    print(f"T = {T:4}: equal to the count: {equal}, ratio {recomputed / base:.4f}")

# %% [markdown]
# The well-known $4 / 3$ is the limit for short sequences and an upper bound. For long sequences attention dominates,
# and the ratio approaches $9 / 7$: the more expensive the backward, the smaller the share of recomputation.
#
# Time must be measured. Both methods alternate in one process, and each round gives one ratio. The lines below show the
# median of five rounds, with the lowest and the highest.

# %% tags=["measured-time", "nbval-ignore-output"]
for T in lengths:
    ratio = runs["checkpoint", T]["seconds_ratio"]
    base = runs["baseline", T]["seconds_step"]["median"]
    spread = f"x {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    print(f"T = {T:4}: baseline {1e3 * base:6.1f} ms, checkpointed {spread}")

# %% [markdown]
# ## The published sizes
#
# A peak depends on shapes alone, so predicting it requires no real step. The same step runs on tensors that have shapes
# but no data, and the prediction follows their allocations and frees. At the sizes measured above, it must give the
# measured bytes. Predicted minus measured, in bytes:

# %%
some = replace(config, seq_lens=(256, 1024))
shapes = [record for group in predict_experiment(some, SOURCE) for record in group]
for record in shapes:
    m, T = record.config["method"], record.config["seq_len"]
    off = record.metrics["peak_bytes"] - runs[m, T]["peak_bytes"]
    print(f"{m:10} T = {T:4}: {off}")

# %% [markdown]
# The prediction is exact. It even includes the storage of the loss, which is one element but has a storage of $T d$
# elements on the CPU.
#
# Next, the published sizes, as on a GPU: fp32 weights, and matrix products in bf16.

# %%
predicted = [record for group in predict_experiment(published, SOURCE) for record in group]
for record in predicted:
    path = record.save(f"results/cpu/03_{report.file_name(record)}")

# %% tags=["hide-input"]
measured = gpu_records("synthetic")
reference = load_reference("synthetic")
rows = report.published_rows(reference, predicted, measured)
columns = {
    "seq_len": "tokens",
    "method": "method",
    "published": "published by others, MB",
    "predicted": "ours, predicted, MiB",
    "measured": "ours, measured, MiB",
}
caption = (
    "Peaks at the published sizes: as printed by others, and for our model. Predictions are from shapes alone: nothing "
    "was run."
)
table = markdown_table(rows, columns, caption, "tab-synthetic-published")
path = write_text_atomic("results/tables/03_published.md", table)

# %% [markdown]
# ```{include} ../../results/tables/03_published.md
# ```
#
# Before comparing: what does "MB" mean in the published figures? From 2048 to 4096 tokens, the published checkpointed
# peak grows by exactly 16.0000 MB. If an MB is $2^{20}$ bytes, that is exactly $8 d$ bytes for each of the 2048 tokens.
# We therefore read MB as $2^{20}$ bytes.

# %%
theirs = {(r["method"], r["seq_len"]): r["peak"] * 2**20 for r in reference["rows"]}
ours = {(r.config["method"], r.config["seq_len"]): r.metrics["peak_bytes"] for r in predicted}
D, F, H = published.dim, published.ff_dim, published.model().heads


def slope(peak, method, a, b):
    return (peak[method, b] - peak[method, a]) / (b - a)


slope(theirs, "checkpoint", 2048, 4096) / D

# %% alt="Bars of the peak at five sequence lengths: published baseline, predicted baseline, published checkpoint, predicted checkpoint. The published baseline is the highest everywhere; both checkpoint series stay nearly flat."
long = published.seq_lens
both = {"published": theirs, "predicted": ours}
cut = {name: 1 - peak["checkpoint", long[-1]] / peak["baseline", long[-1]] for name, peak in both.items()}
figure = plots.bar_plot(
    long,
    {f"{m}, {name}": [peak[m, T] for T in long] for m in methods for name, peak in both.items()},
    f"At {long[-1]} tokens, checkpointing lowers the published peak by {cut['published']:.0%} "
    f"and the predicted peak of our model by {cut['predicted']:.0%}",
    xlabel="tokens in the sequence",
)
path = plots.save(figure, "results/figures/03_published.png")
figure

# %% [markdown]
# ## Why ours and theirs differ
#
# We can read the formulas backwards to see what the published peaks contain. We begin with the slope of the baseline,
# per block. In bf16 our block saves the residual stream at the two norms in 4 bytes per element, all other activations
# in 2, and its scales and sums in 4:
#
# $$ \underbrace{2 \cdot 4 d}_\text{norms} + \underbrace{2 \cdot 2 d}_\text{into qkv, up} +
#    \underbrace{2 \cdot 3 d}_{q, k, v} + \underbrace{2 \cdot 3 d}_\text{attention} + \underbrace{2 \cdot 2 f}_\text{GELU, down} +
#    \underbrace{4 \, (3 h + 2)}_\text{scales, sums} = 24 d + 4 f + 12 h + 8 $$

# %%
by_hand = 24 * D + 4 * F + 12 * H + 8
per_block = {name: slope(peak, "baseline", 2048, 16384) / L for name, peak in both.items()}
for name, size in {"by hand": by_hand, **per_block}.items():
    print(f"{name:10} {size:8,.0f} bytes per token and block")

# %%
print(f"difference: {(per_block['published'] - per_block['predicted']) / D:.2f} d")

# %% [markdown]
# (The predicted slope also contains the input and the temporaries at the peak, divided by 12 blocks.) The published
# model saves about half as much again: $20 d$ bytes and a little more per token and block, as much as five fp32 copies
# of the block's input. A sequence of separate fp32 operations, such as an unfused norm, saves such copies, and a fused
# kernel does not. The figures do not tell which operations they were.
#
# Next, the floor of the checkpointed peak:

# %%
D_block = 4 * D**2 + 2 * D * F + 2 * D + 2 * (D // H)  # parameters of a published block
P_published = L * D_block + D
at_no_tokens = theirs["checkpoint", 2048] - 2048 * slope(theirs, "checkpoint", 2048, 4096)
print(f"published, extrapolated to 0 tokens: {at_no_tokens / 2**20:6.1f} MiB")
print(f"16 P:                                {16 * P_published / 2**20:6.1f} MiB")
print(f"20 P:                                {20 * P_published / 2**20:6.1f} MiB")

# %% [markdown]
# $16 P$ bytes are the weights, gradients and Adam states. The published floor is about $4 P$ higher. Torch's default
# AdamW on a GPU explains the difference: it updates all parameters together (*foreach*) and allocates a temporary as
# large as the model. Our fused kernel allocates none. The prediction shows what the default would cost:

# %%
task = synthetic.task(replace(published, device="cpu"), 2048)
with FakeTensorMode():
    model, batch = task.build(), task.example()
configure(model, "checkpoint")
foreach = torch.optim.AdamW(model.parameters(), foreach=True)


# %%
def foreach_step():
    one_step(task, model, foreach, batch, "checkpoint")


usual = predict(foreach_step, resident=(model, foreach, *batch), device="cuda")
peak = theirs["checkpoint", 2048]
print(f"predicted, fused:   {ours['checkpoint', 2048] / 2**20:6.1f} MiB at 2048 tokens")
print(f"predicted, foreach: {usual.peak_bytes / 2**20:6.1f} MiB")
print(f"published:          {peak / 2**20:6.1f} MiB")
print(f"unexplained:        {(peak - usual.peak_bytes) / 2**20:6.1f} MiB")

# %% [markdown]
# The unexplained part is small. A prediction from shapes cannot see some of it, such as the workspaces of libraries.
#
# Finally, the bend. Ours is at $P_\text{block} / d$ tokens, where an fp32 boundary is as large as a block's gradients.
# The published peaks have no bend between 8192 and 16384 tokens. Boundaries in bf16 would explain that: they are half
# as large, so the bend comes at twice the length.

# %%
print(f"bend at {D_block / D:,.0f} tokens, in bf16 at {2 * D_block / D:,.0f}")
print("slopes, bytes per token:")
for a, b in pairwise(long):
    rise = {name: slope(peak, "checkpoint", a, b) for name, peak in both.items()}
    print(f"{a:5} -> {b:5}", *(f"  {name} {size:7,.0f}" for name, size in rise.items()))

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Two runs of "the same" model can differ by half in their slope, because some operations save additional copies, and by
# the size of the model in their floor, because of the optimizer's implementation. Slope and floor separate these
# causes; a single peak does not.
# :::

# %% [markdown]
# The numbers of this page were measured here:

# %% tags=["measured-time", "nbval-ignore-output"]
records[0].environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: one sequence or two
# :class: note
# Pack two sequences of 512 tokens instead of one of 1024. How do the peak and the FLOPs change? Predict both before you
# run it.
# :::

# %% tags=["solution"]
packed = replace(config, seq_lens=(512,), batch_size=2, steps=1)
(pair,) = synthetic.run_synthetic(packed, timed_rounds=0)
for record in pair:
    one = runs[record.config["method"], 1024]
    more = record.metrics["peak_bytes"] - one["peak_bytes"]
    ratio = record.metrics["flops"] / one["flops"]
    print(f"{record.config['method']:10} {more} bytes more, FLOPs x {ratio:.4f}")

# %% tags=["solution"]
matrices, attention = 2 * 1024 * L * (4 * d**2 + 2 * d * f), 4 * 1024**2 * L * d
for a, b in ((3, 3.5), (4, 4.5)):
    print(f"{(a * matrices + b * attention / 2) / (a * matrices + b * attention):.4f}")

# %% [markdown]
# Memory depends on the number of tokens, not on where the sequences end. The 4 bytes are one more offset. Attention is
# quadratic in the length of a sequence, so two sequences of half the length cost half as much.
#
# :::{admonition} Exercise 2: the omitted length
# :class: note
# The published lengths divided by 16 include 768, which this page omits. Measure it. By how much is the formula off,
# and where is the peak? Hint: `predict` does not see a kernel's workspace.
# :::

# %% tags=["solution"]
(odd,) = synthetic.run_synthetic(replace(config, seq_lens=(768,), steps=1), timed_rounds=0)
for record, formula in zip(odd, (baseline_peak, checkpoint_peak)):
    print(f"{record.config['method']:10}", record.metrics["peak_bytes"] - formula(768))

# %% tags=["solution"]
from ackpt.metering.meter import measure
from ackpt.models import attention


def attend(q, k, v):
    offsets = torch.tensor([0, len(q)], dtype=torch.int32)
    return lambda: attention(q, k, v, offsets, len(q)).backward(q.detach())


def workspace(T):
    real = [torch.randn(T, h, d // h, requires_grad=True) for _ in "qkv"]
    with FakeTensorMode():
        shapes = [torch.randn(T, h, d // h, requires_grad=True) for _ in "qkv"]
    seen = predict(attend(*shapes), resident=shapes).peak_bytes
    return measure(attend(*real), resident=real, repeats=0).peak_bytes - seen


print({T: workspace(T) for T in (512, 640, 768, 1024)})

# %% [markdown]
# From 768 tokens on, the CPU's attention kernel uses tiles of 256 queries instead of 64, against 512 keys each. Its
# backward allocates two tiles in fp32 for each of two threads: $2 \cdot 2 \cdot 256 \cdot 512 \cdot 4$ bytes, or 2 MiB.
# At 768 tokens, this lifts the attention of a block above its down-projection, where our formula expects the peak. At
# 1024 tokens the MLP is larger again. At the published sizes, 2 MiB would not matter.
#
# :::{admonition} Exercise 3: what fits
# :class: note
# A GPU has 24 GiB. On how many tokens of one sequence can you train the published model, without and with checkpointed
# blocks? Estimate both from the table and the slopes, then check with `predict_experiment`.
# :::

# %% tags=["solution"]
room = 24 * 2**30
tooth = slope(ours, "checkpoint", 8192, 12288) + (L - 1) * 4 * D  # beyond the bend
rises = {"baseline": slope(ours, "baseline", 12288, 16384), "checkpoint": tooth}
fits = {m: int(16384 + (room - ours[m, 16384]) / rises[m]) // 256 * 256 for m in methods}
fits

# %% tags=["solution"]
for m, T in fits.items():
    ask = replace(published, seq_lens=(T, T + 256), methods=(m,))
    peak = [record.metrics["peak_bytes"] for (record,) in predict_experiment(ask)]
    print(f"{m:10} {T:7,} tokens fit: {peak[0] <= room}, {T + 256:,} fit: {peak[1] <= room}")

# %% [markdown]
# ## What we have seen
#
# - Above parameters and Adam states, the baseline needs $4 \, (L A + 2 d + f)$ bytes per token. With checkpointing, a
#   token costs one block, $4 \, (A + 3 d + f)$ bytes. Beyond $P_\text{block} / d$ tokens, it also costs a boundary,
#   $4 d$ bytes, for each further layer. Both were measured to the byte.
# - Per-block checkpointing costs at most a third more FLOPs, and less for longer sequences. The losses are equal to the
#   last bit.
# - Shapes alone give the peak, also for models and GPUs that are not available. The prediction is exact except for
#   memory that kernels allocate internally.
# - Slope and floor separate the causes of the published peaks: more copies per token, and an optimizer with a temporary
#   as large as the model.
#
# ## Sources
#
# - {cite:t}`chen2016`: checkpointing every block.
# - The published peaks and times are from a reference experiment without a paper. The files in `results/reference/`
#   say what is known about it.
