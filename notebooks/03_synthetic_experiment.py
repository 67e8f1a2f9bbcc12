# %% [markdown]
# # The synthetic experiment
#
# After this chapter you can say how high the peak of a training step is for any sequence length, plain and
# checkpointed, to the byte and before it runs, and you can read a published table of peaks with the same formula.

# %% [markdown]
# ## Goals
#
# - Repeat a published experiment, scaled down so that two CPU cores can do it.
# - Derive the peak of both methods: a slope in bytes per token, and what stands under it.
# - Find the length from which the boundaries, and not the gradients, decide the checkpointed peak.
# - Pay the price: how many floating-point operations, how much time.
# - Predict the published sizes from shapes alone, and explain where the published figures differ.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $T$ | tokens in the batch: here one sequence, so its length |
# | $L$ | blocks |
# | $d$, $f$, $h$ | width of the model, width inside the MLP, number of heads |
# | $P_\text{block}$, $P$ | parameters of one block, of the model |
# | $A$ | numbers that one block keeps per token from its forward to its backward |
#
# The *boundary* of a checkpointed block is its input: the one thing kept of it between forward and backward.

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
# A Transformer learns to reproduce random input: mean squared error, AdamW, one sequence a batch, packed variable-length
# attention. It was published for $d = 1024$ and sequences of 2048 to 16384 tokens on a GPU. We divide $d$, $f$ and the
# lengths by 16 and keep the 12 blocks. Weights and activations then both shrink by $16^2$, so the picture stays the same.
# (A head is 16 wide, an eighth of the published one: narrower ones are slow on a CPU.)

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
# Every length is run by both methods, from the same weights, on the same batches. In a terminal the same run is
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
# Checkpointing must not change what is learned. The losses of all steps, compared as they are, without a tolerance:

# %%
for T in lengths:
    plain, recomputed = (runs[m, T]["losses"] for m in methods)
    print(f"T = {T:4}  losses equal at all {len(plain)} steps: {plain == recomputed}")

# %% [markdown]
# ## The peak by hand
#
# **Without checkpointing** {doc}`01_where_memory_goes` found that one block keeps $A = 10 d + 2 f + 3 h + 2$ numbers per
# token, its own input among them, and that the peak comes soon after backward begins. To get the peak to the byte we need
# the exact moment: the backward of the last block's down-projection. By then the last norm and the loss have given
# back what they kept, and what is alive per token is
#
# - $L A$ numbers: what the blocks keep, and the input,
# - $d$ for the gradient that has arrived, $f$ for the gradient that leaves,
# - $d$ for the loss, which on the CPU lies in a storage as large as its input.
#
# $$ s_\text{plain} = 4 \, (L A + 2 d + f) \text{ bytes per token} $$
#
# Under it stands what no token changes: parameters and Adam states, $12 P$ bytes and a step count for each of the
# $8 L + 1$ parameter tensors, and two gradients, of the last norm and of this down-projection.

# %%
d, f, L = config.dim, config.ff_dim, config.layers
h = config.model().heads
A = 10 * d + 2 * f + 3 * h + 2
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d
always = 12 * P + 4 * (8 * L + 1) + 8  # 8: the two offsets of the packed sequence
gradients = 4 * (1 + d + d * f)  # 1: the gradient of the loss


# %%
def plain_peak(T):
    return always + gradients + 4 * T * (L * A + 2 * d + f)


# %% [markdown]
# **With checkpointed blocks** the forward keeps boundaries only, $d$ numbers each. Backward takes the blocks in turn, from
# $L$ down to $1$, and computes each again just before it is needed. At the turn of block $i$ there are, per token,
#
# - $i \, d$ for the boundaries of blocks $1$ to $i$; those behind have been given back,
# - $A - d$ for the one block that is whole, and $d$ for its output,
# - $d + f$ for the two gradients and $d$ for the loss, as before,
#
# and the gradients of the $L - i$ blocks behind are complete:
#
# $$ \text{peak}_i = \underbrace{4 \, T \, \bigl(A + (i + 2) \, d + f\bigr)}_{\text{falls from turn to turn}}
#    + \underbrace{4 \, (L - i) \, P_\text{block}}_{\text{rises}} + \dots $$
#
# From one turn to the next a boundary goes, $4 \, T d$ bytes, and the gradient of a block comes, $4 \, P_\text{block}$ bytes.
# Whichever is larger decides where the peak lies: at the first turn of backward or at the last.


# %%
def turn(T, i):
    return always + gradients + 4 * T * (A + (i + 2) * d + f) + 4 * (L - i) * P_block


def checkpoint_peak(T):
    return max(turn(T, 1), turn(T, L))


# %% [markdown]
# Measured peak minus the formula, in bytes, for every length:

# %%
for m, formula in zip(methods, (plain_peak, checkpoint_peak)):
    print(f"{m:10}", [peak - formula(T) for T, peak in zip(lengths, peaks[m])])

# %% [markdown]
# ## Two slopes and a bend
#
# The formulas with their numbers filled in:

# %%
T_star = P_block / d
s_plain = 4 * (L * A + 2 * d + f)
s_below, s_above = (4 * (A + (i + 2) * d + f) for i in (1, L))
print("bytes per token")
print(f"plain:                4 x ({L} x {A} + 2 x {d} + {f}) = {s_plain:6}")
print(f"checkpointed, T < T*: 4 x ({A} + 3 x {d} + {f})      = {s_below:6}")
print(f"checkpointed, T > T*: 4 x ({A} + {L + 2} x {d} + {f})     = {s_above:6}")
print(f"T* = P_block / d = {T_star:.0f} tokens")

# %% [markdown]
# And measured, from each length to the next, in bytes per token:

# %%
for (i, a), (j, b) in pairwise(enumerate(lengths)):
    plain, recomputed = ((peaks[m][j] - peaks[m][i]) / (b - a) for m in methods)
    print(f"{a:4} -> {b:4}:  plain {plain:8.1f}  checkpointed {recomputed:7.1f}")

# %% [markdown]
# The last step crosses the bend, so the checkpointed slope there is a mixture. What makes the difference of the slopes:
# without checkpointing every block costs $4 A$ bytes per token, with it a boundary costs $4 d$, or, below the bend,
# nothing at all, because the boundaries have made room for the gradients by the time the peak comes.

# %%
print(f"a block keeps {4 * A} bytes per token, its boundary {4 * d}: {A / d:.1f} times less")

# %% alt="Peak memory over tokens. Plain: a steep straight line. Checkpointed: a line that rises many times slower and bends upwards a little at 768 tokens. Measured points lie on the predicted lines."
ticks = (128, 256, 512, 768, 1024)
figure = plots.line_plot(
    ticks,
    measured={m: [runs[m, T]["peak_bytes"] if T in lengths else None for T in ticks] for m in methods},
    predicted={
        "baseline": [plain_peak(T) for T in ticks],
        "checkpoint": [checkpoint_peak(T) for T in ticks],
    },
    title=f"Checkpointed, a token costs {s_below:,} bytes instead of {s_plain:,}, and "
    f"{s_above:,} from {T_star:.0f} tokens on",
    xlabel="tokens in the sequence",
)
path = plots.save(figure, "results/figures/03_peak_over_tokens.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Up to $T^* = P_\text{block} / d$ tokens, which is $12 d$ for $f = 4 d$, the checkpointed peak lies at the *end* of
# backward and depends on one block only: more layers cost their parameters and nothing else. Beyond, it lies at the
# beginning, and every layer adds its boundary.
# :::

# %% [markdown]
# ## The two steps side by side
#
# The same step at the longest sequence, from left to right, on one axis of bytes.

# %% alt="Live memory of two training steps side by side. Baseline: activations rise in a ramp to the peak where backward begins, and fall. Checkpoint: a low staircase of boundaries in the forward, then one tooth per block in backward, each as high as one block, a quarter of the baseline's height in all."
longest = lengths[-1]
share = runs["checkpoint", longest]["peak_bytes"] / runs["baseline", longest]["peak_bytes"]
figure = report.timelines_plot(
    [record for record in records if record.config["seq_len"] == longest],
    f"{L} boundaries and one block at a time: {share:.0%} of the plain peak",
)
path = plots.save(figure, "results/figures/03_side_by_side.png")
figure

# %% [markdown]
# - The ramp on the left has $L$ equal pieces, one block each; what they keep waits for backward.
# - On the right the ramp has shrunk to a staircase of boundaries. The forward of each block leaves a spike: it computes
#   all that the plain one computes, and drops it at once.
# - Each tooth behind the dashed line is one recomputed block. The teeth lose height slowly: a boundary goes with each, the
#   gradient of a block comes.
#
# Below the bend the teeth would gain height instead. The peaks, and what they cost:

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
    "saved": "saved, %",
    "flops": "FLOPs, ratio",
}
caption = (
    "Measured peaks of one step on the CPU, and the floating-point operations of checkpoint over those of baseline."
)
table = markdown_table(rows, columns, caption, "tab-synthetic")
path = write_text_atomic("results/tables/03_synthetic.md", table)

# %% [markdown]
# ```{include} ../../results/tables/03_synthetic.md
# ```

# %% [markdown]
# ## The price
#
# Count a multiply-add as two operations. The matrices of one block cost $2 \, (4 d^2 + 2 d f)$ per token. Attention
# multiplies queries with keys and scores with values, two products of $T^2 d$ multiply-adds each. A matrix costs its
# forward twice more in backward; attention two and a half times, because the flash kernel computes the scores again.
#
# $$ F_\text{matrices} = 2 \, T L \, (4 d^2 + 2 d f), \qquad F_\text{attention} = 4 \, T^2 L \, d, $$
#
# $$ \frac{\text{checkpointed}}{\text{plain}} =
#    \frac{4 \, F_\text{matrices} + 4.5 \, F_\text{attention}}{3 \, F_\text{matrices} + 3.5 \, F_\text{attention}} $$

# %%
for T in lengths:
    matrices, attention = 2 * T * L * (4 * d**2 + 2 * d * f), 4 * T**2 * L * d
    plain, recomputed = 3 * matrices + 3.5 * attention, 4 * matrices + 4.5 * attention
    counted = [runs[m, T]["flops"] for m in methods]
    equal = [plain, recomputed] == counted
    print(f"T = {T:4}: equal to the count: {equal}, ratio {recomputed / plain:.4f}")

# %% [markdown]
# The famous $4 / 3$ is the limit for short sequences, and the most it can be. Long ones, where attention rules, go towards
# $9 / 7$: recomputing is cheaper where backward is dearer.
#
# Time is not a count. It is measured with both methods taking turns in one process, and the ratio is read within each
# round; here are the median of five rounds, the lowest and the highest.

# %% tags=["measured-time", "nbval-ignore-output"]
for T in lengths:
    ratio = runs["checkpoint", T]["seconds_ratio"]
    plain = runs["baseline", T]["seconds_step"]["median"]
    spread = f"x {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    print(f"T = {T:4}: plain {1e3 * plain:6.1f} ms, checkpointed {spread}")

# %% [markdown]
# ## The published sizes
#
# A peak depends on shapes alone, so it can be had without running anything: the very same step runs on tensors that have
# shapes and no data, and their births and deaths are followed. Can this be trusted? For sizes measured above it must give
# the measured bytes. Predicted minus measured, in bytes:

# %%
some = replace(config, seq_lens=(256, 1024))
shapes = [record for group in predict_experiment(some, SOURCE) for record in group]
for record in shapes:
    m, T = record.config["method"], record.config["seq_len"]
    off = record.metrics["peak_bytes"] - runs[m, T]["peak_bytes"]
    print(f"{m:10} T = {T:4}: {off}")

# %% [markdown]
# Everything is there to the byte; also the loss, which by its shape is one number and on the CPU has a storage of $T d$.
#
# Now the sizes as published, as on a GPU: fp32 weights, matrix products in bf16.

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
    "Peaks at the published sizes: as printed by others, predicted for our model from shapes alone (nothing was run), "
    "and measured with our model on a GPU."
)
table = markdown_table(rows, columns, caption, "tab-synthetic-published")
path = write_text_atomic("results/tables/03_published.md", table)

# %% [markdown]
# ```{include} ../../results/tables/03_published.md
# ```
#
# :::{admonition} With a GPU
# :class: note
# Two commands fill the last column: the run at the published sizes, and this chapter once more.
#
# ```bash
# ackpt synthetic --tier gpu --out results/gpu
# nox -s reproduce -- --only 03
# ```
#
# In Colab choose a runtime with a GPU, and run the first line in a cell of its own, with a `!` before it. From compute
# capability 8.0 on, packed sequences are one kernel; older GPUs take them one by one.
# :::
#
# Before comparing: what is an "MB" of the published figures? From 2048 to 4096 tokens their checkpointed peak grows by
# exactly 16.0000, and $16 \cdot 2^{20}$ bytes are $8 d$ bytes for each of the 2048 tokens. So it must be $2^{20}$ bytes.

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
    f"At {long[-1]} tokens checkpointing takes off {cut['published']:.0%} of the peak as "
    f"published, {cut['predicted']:.0%} as predicted for our model",
    xlabel="tokens in the sequence",
)
path = plots.save(figure, "results/figures/03_published.png")
figure

# %% [markdown]
# ## Why ours and theirs differ
#
# The formula can be read backwards, to see in the published peaks what was in memory. First the plain slope, per block. In
# bf16 a block of ours keeps the residual stream at the two norms in 4 bytes, all other activations in 2, and its scales
# and sums in 4:
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
# (The predicted slope also holds the input and what the peak's moment adds, shared by 12 blocks.) The published model
# keeps half as much again: $20 d$ bytes and a little more for every token and block, as much as five fp32 copies of the
# block's input. Operations that run in fp32 one by one, as unfused norms do, leave such copies, and a fused kernel does
# not; but which ones they were, the figures do not tell.
#
# Then the floor under the checkpointed peak:

# %%
D_block = 4 * D**2 + 2 * D * F + 2 * D + 2 * (D // H)  # parameters of a published block
P_published = L * D_block + D
at_no_tokens = theirs["checkpoint", 2048] - 2048 * slope(theirs, "checkpoint", 2048, 4096)
print(f"published, at no tokens: {at_no_tokens / 2**20:6.1f} MiB")
print(f"16 P:                    {16 * P_published / 2**20:6.1f} MiB")
print(f"20 P:                    {20 * P_published / 2**20:6.1f} MiB")

# %% [markdown]
# $16 P$ bytes are weights, gradients and Adam states. Theirs are about $4 P$ more, and torch's usual AdamW on a GPU
# explains them: it updates all parameters together (*foreach*) and makes a temporary as large as the model. Ours updates
# in one fused kernel without any. The prediction tells what the usual one would cost:

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
print(f"left:               {(peak - usual.peak_bytes) / 2**20:6.1f} MiB")

# %% [markdown]
# What is left is small, and some of it no prediction from shapes can see: workspaces of the libraries, for one.
#
# Last the bend. Ours comes at $P_\text{block} / d$ tokens, where a boundary, in fp32, weighs as much as a block's gradient.
# In the published peaks there is none between 8192 and 16384. Boundaries in bf16 would explain that: they weigh half, so
# the bend comes at twice the length.

# %%
print(f"bend at {D_block / D:,.0f} tokens, in bf16 at {2 * D_block / D:,.0f}")
print("slopes, bytes per token:")
for a, b in pairwise(long):
    rise = {name: slope(peak, "checkpoint", a, b) for name, peak in both.items()}
    print(f"{a:5} -> {b:5}", *(f"  {name} {size:7,.0f}" for name, size in rise.items()))

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Two runs of "the same" model can differ by half in their slope, through copies that operations leave, and by a model's
# size in their floor, through how the optimizer steps. Slopes and floors tell these apart; a single peak does not.
# :::

# %% [markdown]
# Where the numbers of this page were made:

# %% tags=["measured-time", "nbval-ignore-output"]
records[0].environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: one sequence or two
# :class: note
# Pack two sequences of 512 tokens instead of one of 1024. What happens to the peak, and what to the FLOPs? Predict both
# before you run it.
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
# Only tokens count for the bytes, wherever the sequences end; the 4 bytes are one more offset. Attention, which is
# quadratic in the length of a sequence, has half the work.
#
# :::{admonition} Exercise 2: the length that was left out
# :class: note
# The published lengths divided by 16 contain 768, and this page left it out. Measure it. How far is the formula off, and
# where does the peak lie? Hint: `predict` does not see memory that a kernel takes and gives back inside itself.
# :::

# %% tags=["solution"]
(odd,) = synthetic.run_synthetic(replace(config, seq_lens=(768,), steps=1), timed_rounds=0)
for record, formula in zip(odd, (plain_peak, checkpoint_peak)):
    print(f"{record.config['method']:10}", record.metrics["peak_bytes"] - formula(768))

# %% tags=["solution"]
from ackpt.metering.meter import measure
from ackpt.models import attention


def attend(q, k, v):
    offsets = torch.tensor([0, len(q)], dtype=torch.int32)
    return lambda: attention(q, k, v, offsets, len(q)).backward(q.detach())


def scratch(T):
    real = [torch.randn(T, h, d // h, requires_grad=True) for _ in "qkv"]
    with FakeTensorMode():
        shapes = [torch.randn(T, h, d // h, requires_grad=True) for _ in "qkv"]
    seen = predict(attend(*shapes), resident=shapes).peak_bytes
    return measure(attend(*real), resident=real, repeats=0).peak_bytes - seen


print({T: scratch(T) for T in (512, 640, 768, 1024)})

# %% [markdown]
# From 768 tokens on the CPU's attention kernel takes tiles of 256 queries instead of 64, against 512 keys each. Its
# backward holds two tiles in fp32 for each of two threads, $2 \cdot 2 \cdot 256 \cdot 512 \cdot 4$ bytes, or 2 MiB. At 768
# tokens that lifts the attention of a block above its down-projection, where our formula sees the peak. At 1024 the MLP has
# grown past it again, and at the published sizes nobody would notice 2 MiB.
#
# :::{admonition} Exercise 3: what fits
# :class: note
# A GPU has 24 GiB. How many tokens of one sequence can the published model be trained on, plain and checkpointed? Estimate
# both from the table and the slopes, then ask `predict_experiment`.
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
# - Plain, the peak is $4 \, (L A + 2 d + f)$ bytes per token above weights and Adam states; checkpointed it is the cost of
#   one block, $4 \, (A + 3 d + f)$, plus a boundary per layer, $4 d$, beyond $P_\text{block} / d$ tokens. Both were measured
#   to the byte.
# - Checkpointing every block costs at most a third more FLOPs, and less the longer the sequence. The losses do not change
#   by a bit.
# - A peak can be had from shapes alone, for models and GPUs that are not there, as exactly as the kernels keep no secret
#   memory.
# - Published peaks can be taken apart by slope and floor: more copies per token, and an optimizer with a temporary as large
#   as the model.
#
# ## Sources
#
# - {cite:t}`chen2016`: the checkpoint around every block.
# - The published peaks and times are from a reference experiment without a paper; what is known of it stands in the files
#   of `results/reference/`.
