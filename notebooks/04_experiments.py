# %% [markdown]
# # The synthetic experiment
#
# **How does the peak of a Transformer grow with the sequence length, with and without checkpointing?**

# %% [markdown]
# ```{figure} ../../results/figures/03_peak_over_tokens.png
# :alt: Peak memory over tokens. Baseline: a steep straight line. Checkpointed: a line that rises six to nine times more slowly and bends upwards a little at 768 tokens. The measured points are on the predicted lines.
# :class: dark-light
#
# Peak over the length of the sequence, measured and derived, without and with checkpointed blocks.
# ```
#
# After this chapter you can predict the peak of a training step for any sequence length, without and with checkpointed
# blocks, to the byte and before it runs.
#
# :::{admonition} Symbols of this chapter
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $T$ | tokens in the batch; a batch is one sequence here, so $T$ is its length |
# | $L$ | blocks |
# | $d$, $f$, $h$ | width of the model, width inside the MLP, number of heads |
# | $P_\text{block}$, $P$ | parameters of one block, of the model |
# | $A$ | elements that one block saves per token, from its forward to its backward |
# :::
#
# The *boundary* of a checkpointed block is its input, the only tensor of the block that is saved from forward to
# backward.

# %%
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.metering import plots
from ackpt.models import Transformer, TransformerConfig
from ackpt.models.transformer import Block
from experiments import synthetic
from experiments.graph_profile import orders_plot
from experiments.published import Predictions, reference
from experiments.published import rows as published_figures
from experiments.published.block_bytes import WORKSPACES, saved_per_token, with_fused_norms
from experiments.reports import training as report
from experiments.reports.figures import line_plot
from experiments.reports.gpu_records import gpu_records
from experiments.results import environment, load_reference, markdown_table, write_text_atomic
from experiments.steps.predicted import predict_experiment

torch.set_num_threads(2)
SOURCE = "notebooks/03_synthetic_experiment.py"

# %% [markdown]
# ## The experiment
#
# A Transformer learns to reproduce random input: mean squared error, AdamW, one sequence per batch. The published
# experiment has $d = 1024$ and sequences of 2048 to 16384 tokens, and runs on a GPU. We divide $d$, $f$ and the lengths
# by 16 and keep the 12 blocks. Weights and activations then both shrink by $16^2$, so their ratio stays the same. (A
# head is 16 wide, an eighth of the published width: narrower heads are slow on a CPU.)
#
# The sequences of a batch are *packed*: they follow each other in one matrix of $T$ rows without padding, and `offsets`
# says where each begins. A block takes the matrix, the offsets and the length of the longest sequence. With
# `ackpt.checkpoint`, each block is a region: its activations are dropped in the forward and recomputed in backward
# ({doc}`02_reentrant_checkpoint`).

# %%
config = TransformerConfig(dim=64, ff_dim=256, layers=12, head_dim=16)


def forward(model, x, offsets, longest, method):
    for block in model.blocks:
        if method == "checkpoint":
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
        loss = F.mse_loss(forward(model, x, offsets, max(lengths), method), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (model, optimizer, offsets)


# %% [markdown]
# We train for four steps at every length with both methods, from the same weights and on the same batches. Then we
# measure the bytes and FLOPs of one further step.

# %%
lengths, methods = (256, 512, 1024), ("baseline", "checkpoint")
runs, steps = {}, {}
for T in lengths:
    losses = {}
    for method in methods:
        step, resident = build(method, T)
        losses[method] = [step(torch.randn(T, config.dim)) for _ in range(4)]
        x = torch.randn(T, config.dim)
        steps[method, T] = partial(step, x)
        runs[method, T] = ackpt.measure(steps[method, T], resident=(*resident, x), repeats=0)
    print(f"T = {T:4}  losses equal at all 4 steps: {losses['baseline'] == losses['checkpoint']}")

# %% [markdown]
# Checkpointing does not change what the model learns: we compare the losses without a tolerance.
#
# ## The peak by hand
#
# **Without checkpointing.** {doc}`01_where_memory_goes` found that one block saves $A = 10 d + 2 f + 3 h + 2$ elements
# per token, including its own input, and that the peak comes soon after backward begins. To predict the peak to the
# byte, we need the exact moment: the backward of the last block's down-projection. By then, backward has freed the
# tensors that the loss and the last norm saved. The live elements per token are
#
# - $L A$ that the blocks saved, including the model's input,
# - $d$ for the gradient of the down-projection's output and $f$ for that of its input,
# - $d$ for the loss, whose storage is as large as its input.
#
# $$ s_\text{baseline} = 4 \, (L A + 2 d + f) \text{ bytes per token} $$
#
# The floor does not depend on $T$. It consists of parameters and Adam states ($12 P$ bytes), a step count for each of
# the $8 L + 1$ parameter tensors, and two gradients: those of the last norm and of this down-projection.

# %%
d, f, h, L = config.dim, config.ff_dim, config.heads, config.layers
A = 10 * d + 2 * f + 3 * h + 2
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d
states = 12 * P + 4 * (8 * L + 1) + 8  # 8: the two offsets of the packed sequence
gradients = 4 * (1 + d + d * f)  # 1: the gradient of the loss


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
def baseline_peak(T):
    return states + gradients + 4 * T * (L * A + 2 * d + f)


def peak_at_block(T, i):
    return states + gradients + 4 * T * (A + (i + 2) * d + f) + 4 * (L - i) * P_block


def checkpoint_peak(T):
    return max(peak_at_block(T, 1), peak_at_block(T, L))


# %% [markdown]
# Measured peak minus the formula, in bytes, at every length:

# %%
for method, formula in zip(methods, (baseline_peak, checkpoint_peak)):
    print(f"{method:10}", [runs[method, T].peak_bytes - formula(T) for T in lengths])

# %% [markdown]
# ## Two slopes and a bend
#
# The formulas with the sizes of our model:

# %%
T_star = P_block / d
print("bytes per token")
print(f"baseline:             4 x ({L} x {A} + 2 x {d} + {f}) = {4 * (L * A + 2 * d + f):6}")
print(f"checkpointed, T < T*: 4 x ({A} + 3 x {d} + {f})      = {4 * (A + 3 * d + f):6}")
print(f"checkpointed, T > T*: 4 x ({A} + {L + 2} x {d} + {f})     = {4 * (A + (L + 2) * d + f):6}")
print(f"T* = P_block / d = {T_star:.0f} tokens")

# %% [markdown]
# Without checkpointing, every block adds $4 A$ bytes per token to the slope. With checkpointing, it adds the $4 d$
# bytes of its boundary, but only beyond the bend at $T^*$. Below the bend, the peak comes after the boundaries are
# freed, when gradients have taken their place.

# %% tags=["hide-input"] alt="Peak memory over tokens. Baseline: a steep straight line. Checkpointed: a line that rises six to nine times more slowly and bends upwards a little at 768 tokens. The measured points are on the predicted lines."
ticks = (256, 512, 768, 1024)
figure = line_plot(
    ticks,
    measured={m: [runs[m, T].peak_bytes if T in lengths else None for T in ticks] for m in methods},
    predicted={
        "baseline": [baseline_peak(T) for T in ticks],
        "checkpoint": [checkpoint_peak(T) for T in ticks],
    },
    title="",
    xlabel="tokens in the sequence",
)
path = plots.save(figure, "results/figures/03_peak_over_tokens.png")
figure

# %% [markdown]
# *Peak over the sequence length: measured (markers) and by the formulas (lines). With checkpointing, a token costs at
# most a sixth of the baseline's bytes; the slope increases a little at the bend near 770 tokens.*
#
# :::{admonition} Takeaway
# :class: tip
# Up to $T^* = P_\text{block} / d$ tokens, which is about $12 d$ for $f = 4 d$, the checkpointed peak comes at the *end*
# of backward. There, depth costs no activation memory at all: a further layer adds only its parameters, gradients and
# Adam states. Beyond $T^*$, the peak comes at the beginning of backward, and every layer adds its boundary.
# :::

# %% [markdown]
# ## The two steps side by side
#
# The same step at the longest sequence, with both methods on one memory axis. Before you look, sketch the second one:
# how many teeth, and do they rise or fall?

# %% tags=["hide-input"] alt="Live memory of two training steps side by side. Baseline: activations rise in a ramp to the peak, where backward begins, and fall. Checkpoint: a low staircase of boundaries in the forward, then one tooth of recomputed activations per block in backward. Its peak is a quarter of the baseline's."
longest = {method: runs[method, lengths[-1]] for method in methods}
figure = orders_plot({m: run.timeline for m, run in longest.items()}, "", longest["baseline"].resident_bytes)
path = plots.save(figure, "results/figures/03_side_by_side.png")
figure

# %% [markdown]
# *Live memory of one step. With boundaries and one recomputed block at a time, the peak is about a quarter of the
# baseline's.*
#
# - Without checkpointing, the ramp has $L$ equal pieces, one per block. The activations stay live until backward reads
#   them.
# - With checkpointing, the ramp shrinks to a staircase of boundaries. The forward of each block is a spike: it
#   allocates the same activations as the baseline and frees them at once.
# - Each tooth after the dashed line is one recomputed block. The teeth get lower slowly, because from each tooth to the
#   next a boundary is freed and the gradients of a block are added. Below the bend, they would get higher instead.

# %% tags=["hide-input"]
rows = []
for T in lengths:
    base, recomputed = (runs[method, T] for method in methods)
    row = {"T": T, "baseline": round(base.peak_bytes / 2**20, 1), "checkpoint": round(recomputed.peak_bytes / 2**20, 1)}
    row |= {"saved": round(100 - 100 * recomputed.peak_bytes / base.peak_bytes)}
    rows.append(row | {"flops": round(recomputed.flops / base.flops, 3)})
columns = {"T": "tokens", "baseline": "baseline, MiB", "checkpoint": "checkpoint, MiB"}
columns |= {"saved": "reduction, %", "flops": "FLOPs, ratio"}
caption = "Measured peaks of one step on the CPU, and the FLOPs of checkpoint divided by those of baseline."
path = write_text_atomic("results/tables/03_synthetic.md", markdown_table(rows, columns, caption, "tab-synthetic"))

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
    equal = [base, recomputed] == [runs[method, T].flops for method in methods]
    print(f"T = {T:4}: equal to the count: {equal}, ratio {recomputed / base:.4f}")

# %% [markdown]
# The well-known $4 / 3$ is the limit for short sequences and an upper bound. For long sequences attention dominates,
# and the ratio approaches $9 / 7$: the more expensive the backward, the smaller the share of recomputation.
#
# Time must be measured. Both methods take turns, and each round gives one ratio. We print the median of five rounds,
# with the lowest and the highest. On a quiet machine, expect ratios above those in FLOPs: operations without FLOPs also
# take time, and every region adds a fixed time ({doc}`02_reentrant_checkpoint`), which weighs most in short sequences.
# On a busy machine, the range is wide.

# %% tags=["measured-time", "nbval-ignore-output"]
for T in (lengths[0], lengths[-1]):
    ratio = ackpt.compare_seconds({m: steps[m, T] for m in methods}, repeats=5).ratios["checkpoint"]
    print(f"T = {T:4}: checkpointed x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")

# %% [markdown]
# ## Peaks from shapes alone
#
# The sizes of tensors follow from their shapes, so predicting a peak requires no real step. `ackpt.predict` runs the
# same step on *fake tensors*, which have shapes but no data, and follows their allocations and frees. The prediction
# equals the measurement to the byte. It even includes the loss, one element in a storage of $T d$ elements.

# %%
T = lengths[-1]
for method in methods:
    with FakeTensorMode():
        step, resident = build(method, T)
        x = torch.randn(T, d)
    predicted = ackpt.predict(partial(step, x), resident=(*resident, x))
    print(f"{method:10} predicted {predicted.peak_bytes:,}, measured {runs[method, T].peak_bytes:,} bytes")
    assert predicted.peak_bytes == runs[method, T].peak_bytes

# %% [markdown]
# ## The published table
#
# The published model differs from ours in its layers, its norm and its optimizer. `experiments.published` contains its
# step, with weights in fp32 and matrix products in bf16, so we can predict both models. We begin with the longest
# sequence:

# %%
profiles = {}
for method in methods:
    with FakeTensorMode():
        theirs = reference.reference_synthetic(tokens=16384, method=method)
    profiles[method] = ackpt.predict(theirs.run, resident=theirs.resident, device="h100-80g")
    print(f"{method:10} {profiles[method].peak_bytes / 2**20:,.4f} MiB")

# %% tags=["hide-input"] alt="Live memory of a published step at 16,384 tokens, side by side. Baseline: activations rise in a ramp to 14,065 MiB at the loss, just before backward begins, and fall while gradients accumulate. Checkpoint: boundaries rise slowly in the forward, then twelve teeth of about equal height follow in backward, with the peak of 3,727 MiB in the last one. Both end with a short rise in the optimizer."
below = {method: run.peak_bytes - run.timeline.peak_bytes for method, run in profiles.items()}
figure = orders_plot({method: run.timeline.thinned(1000) for method, run in profiles.items()}, "", below)
path = plots.save(figure, "results/figures/03_published_profiles.png")
figure

# %% [markdown]
# *The published profiles at 16,384 tokens, predicted from shapes. Each step first frees the gradients of the previous
# one. The baseline's peak is in the loss, the checkpointed peak in the block that backward recomputes last. The last
# rise is the optimizer's temporary. Recomputed activations count as temporaries here.*

# %% tags=["hide-input"]
published = synthetic.GPU
predictions = [record for group in predict_experiment(published, SOURCE) for record in group]
for record in predictions:
    path = record.save(f"results/cpu/03_{report.file_name(record)}")
figures = load_reference("synthetic")
stored = Predictions()
configured = [stored.of(row) for row in published_figures() if row["step"] == "reference-synthetic"]
rows = report.published_rows(figures, configured, predictions, gpu_records("synthetic"), digits=4)
caption = (
    "Peaks of the synthetic experiment: as published, predicted for the published model, and predicted for ours. "
    "Predictions are from shapes alone."
)
table = markdown_table(rows, report.PUBLISHED, caption, "tab-synthetic-published")
path = write_text_atomic("results/tables/03_published.md", table)
caption = "Published seconds of 14 steps of the synthetic experiment, and the ratio of checkpoint to baseline."
table = markdown_table(report.published_times(figures), report.TIMES, caption, "tab-synthetic-times")
path = write_text_atomic("results/tables/03_times.md", table)
print(f"largest error: {max(abs(row['predicted'] - row['bytes']) for row in configured)} bytes")

# %% [markdown]
# ```{include} ../../results/tables/03_published.md
# ```
#
# A published peak is `torch.cuda.max_memory_allocated` over 14 steps. The source divides it by $1024^2$ and prints MB;
# we write MiB. Our model needs less in every row; the appendix lists the causes. The seconds of the next table include
# a profiler and the export of its trace. {doc}`13_predictions` predicts the ratios:
#
# ```{include} ../../results/tables/03_times.md
# ```
#
# :::{admonition} Takeaway
# :class: tip
# To compare two runs of "the same" model, compare slope and floor. Additional copies in the blocks change the slope,
# and the optimizer's temporaries change the floor. A single peak does not separate these causes.
# :::

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: one sequence or two
# :class: note
# Pack two sequences of 512 tokens instead of one of 1024. How do the peak and the FLOPs change? Predict both before you
# run it.
# :::

# %% tags=["solution"]
x = torch.randn(1024, d)
matrices, attention = 2 * 1024 * L * (4 * d**2 + 2 * d * f), 4 * 1024**2 * L * d
for method, (a, b) in zip(methods, ((3, 3.5), (4, 4.5))):
    step, resident = build(method, 512, 512)
    pair, one = ackpt.measure(partial(step, x), resident=(*resident, x), repeats=0), runs[method, 1024]
    by_hand = (a * matrices + b * attention / 2) / (a * matrices + b * attention)
    print(f"{method:10} {pair.peak_bytes - one.peak_bytes} bytes more, FLOPs x {pair.flops / one.flops:.4f}, {by_hand:.4f}")

# %% [markdown]
# Memory depends on the number of tokens, not on where the sequences end. The 4 bytes are one more offset. Attention is
# quadratic in the length of a sequence, so two sequences of half the length cost half as much.
#
# :::{admonition} Exercise 2: the omitted length
# :class: note
# The figure has no measurement at 768 tokens. Measure it. By how much is the formula off? Hint: `predict` does not see
# what a kernel allocates internally.
# :::

# %% tags=["solution"]
x = torch.randn(768, d)
for method, formula in zip(methods, (baseline_peak, checkpoint_peak)):
    step, resident = build(method, 768)
    run = ackpt.measure(partial(step, x), resident=(*resident, x), repeats=0)
    print(f"{method:10} {run.peak_bytes - formula(768):,} bytes above the formula")

# %% [markdown]
# At 768 tokens or more, the CPU's attention kernel uses tiles of 256 queries instead of 64, against 512 keys each. Its
# backward allocates two tiles in fp32 for each of two threads: $2 \cdot 2 \cdot 256 \cdot 512 \cdot 4$ bytes, or 2 MiB.
# At 768 tokens, this lifts the attention of a block above its down-projection, where our formula expects the peak. At
# 1024 tokens, the peak is at the down-projection again.
#
# :::{admonition} Exercise 3: what fits
# :class: note
# A GPU has 24 GiB. How many tokens may a sequence have if you train the published model on this GPU, without and with
# checkpointed blocks? Estimate both from the table and the slopes, then check with `predict_experiment`. Mind the bend:
# for this model, it is between the last two lengths of the table.
# :::

# %% tags=["solution"]
ours = {(r.config["method"], r.config["seq_len"]): r.metrics["peak_bytes"] for r in predictions}
rises = {method: (ours[method, 8192] - ours[method, 2048]) / 6144 for method in methods}
rises["checkpoint"] += (L - 1) * 4 * published.dim  # beyond the bend, every further block adds its boundary
for method in methods:
    T = int(16384 + (24 * 2**30 - ours[method, 16384]) / rises[method]) // 256 * 256
    ((record,),) = predict_experiment(replace(published, seq_lens=(T,), methods=(method,)))
    free = (24 * 2**30 - record.metrics["peak_bytes"]) / rises[method]
    print(f"{method:10} {T:7,} tokens fit, with room for {free:.0f} more")

# %% [markdown]
# ## What we have seen
#
# - Above parameters and Adam states, the baseline needs $4 \, (L A + 2 d + f)$ bytes per token. With checkpointing, a
#   token costs one block, $4 \, (A + 3 d + f)$ bytes. Beyond $P_\text{block} / d$ tokens, it also costs a boundary,
#   $4 d$ bytes, for each further layer. Both were measured to the byte.
# - Per-block checkpointing costs at most a third more FLOPs, and less for longer sequences. The losses are equal to the
#   last bit.
# - Shapes alone give the peak, even for models and GPUs that are not available. The ten published peaks are predicted
#   to within two blocks of the allocator, 1024 bytes.

# %% [markdown]
# ## Appendix: what the published peaks contain
#
# From shapes, we compute the bytes that a block saves per token, and change one property of our block at a time:
#
# - The published blocks read and write bf16, because a linear layer under autocast comes first.
# - Queries, keys and values have separate projections. A copy stacks them for the attention kernel and replaces our
#   joint projection, so the sum stays the same.
# - The norm of torch 2.8 is not fused. Each of four norms saves its input and a product in fp32: $8 d$ bytes instead of
#   $2 d$.
#
# Once per step, the published model needs more for:
#
# - the last loss, which the loop's variable keeps during the next forward. `mse_loss` gives it a storage as large as
#   its input;
# - AdamW, which by default (`foreach`) allocates a temporary as large as all parameters, but only in the optimizer's
#   step;
# - the linear layers around the blocks and the biases, 16 bytes per parameter;
# - two workspaces of cuBLAS, which the prediction for our model leaves out.

# %% tags=["hide-input"]
D, FF, H = published.dim, published.ff_dim, published.model().heads
make_ours = partial(Block, published.model())
make_theirs = partial(reference.Block, D, FF, published.head_dim, reference.PackedFlashAttention.apply)


def call_ours(block, x, offsets):
    return block(x, offsets, len(x))


blocks = {
    "our block": saved_per_token(make_ours, D, torch.float32, call_ours),
    "blocks read and write bf16, not fp32": saved_per_token(make_ours, D, torch.bfloat16, call_ours),
    "separate projections and a stacked copy": saved_per_token(
        lambda: with_fused_norms(make_theirs()), D, torch.bfloat16
    ),
    "unfused norms": saved_per_token(make_theirs, D, torch.bfloat16),
}
A_theirs = blocks["unfused norms"]
P_theirs = sum(parameter.numel() for parameter in theirs.resident[0].parameters())
P_ours = L * (4 * D**2 + 2 * D * FF + 2 * D + 2 * (D // H)) + D
changes = [size - before for before, size in zip((0, *blocks.values()), blocks.values())]
rows = [{"cause": cause, "block": f"{change:+,}" if change else "0"} for cause, change in zip(blocks, changes)]
rows[0]["block"] = f"{changes[0]:,}"
rows += [{"cause": "sum: the published block", "block": f"{A_theirs:,}"}]
rows += [{"cause": "the loss of the last step", "token": f"{4 * D:+,}"}]
once = {
    "the temporary of AdamW": 4 * P_theirs,
    "more parameters": 16 * (P_theirs - P_ours),
    "workspaces of cuBLAS": WORKSPACES,
}
rows += [{"cause": cause, "once": f"{size / 2**20:+,.1f}"} for cause, size in once.items()]
columns = {"cause": "cause", "block": "bytes per token and block", "token": "bytes per token", "once": "once, MiB"}
rows = [{name: row.get(name, "") for name in columns} for row in rows]
caption = "Why the published peaks of the synthetic experiment are higher than our model's, from shapes."
path = write_text_atomic("results/tables/03_causes.md", markdown_table(rows, columns, caption, "tab-synthetic-causes"))

# %% [markdown]
# ```{include} ../../results/tables/03_causes.md
# ```
#
# With $P$ and $A$ of the published model, its peaks follow by hand. The baseline's peak is in the loss. It consists of
# weights, Adam states and bf16 copies of the weights ($14 P$), the workspaces, the blocks, and $26 d$ bytes per token:
# the input and the output in both dtypes, the last layer's input, the loss, a temporary of its size and the last step's
# loss. The checkpointed peak of short sequences is in the optimizer: $20 P$, the input and the loss ($8 d$). Above 4096
# tokens it is in the recomputed first block, with a slope of $A + 24 d$.

# %%
theirs = {(r["method"], r["seq_len"]): r["peak"] * 2**20 for r in figures["rows"]}
for T in published.seq_lens:
    by_hand = 14 * P_theirs + WORKSPACES + T * (L * A_theirs + 26 * D)
    print(f"baseline   {T:6,} tokens: published - by hand = {theirs['baseline', T] - by_hand:7,.0f} bytes")
for T in (2048, 4096):
    print(f"checkpoint {T:6,} tokens: {theirs['checkpoint', T] - (20 * P_theirs + WORKSPACES + 8 * D * T):7,.0f} bytes")
slope = (theirs["checkpoint", 16384] - theirs["checkpoint", 12288]) / 4096
print(f"slope of checkpoint above 12,288 tokens: {slope:,.0f}; A + 24 d = {A_theirs + 24 * D:,}")

# %% [markdown]
# The remaining difference of the baseline: autocast does not copy the weights of norms, and the allocator rounds up.
#
# The numbers of this page were measured here:

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
environment("cpu", SOURCE)

# %% [markdown]
# ## Sources
#
# - {cite:t}`chen2016`: checkpointing every block.
# - The published peaks and times are from the public repository `sashaboriskin/activation_checkpointing`, which ran on
#   torch 2.8 and flash-attn 2.8.3.
