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
# Goal: predict the peak of a step for any length, by hand.

# %% tags=["hide-input"]
import warnings
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.models import Transformer, TransformerConfig
from ackpt.models.transformer import Block
from experiments import synthetic
from experiments.graph_profile import orders_plot, overlaid_plot
from experiments.published import Predictions, reference
from experiments.published import rows as published_figures
from experiments.published.block_bytes import WORKSPACES, saved_per_token, with_fused_norms
from experiments.reports import plots
from experiments.reports import training as report
from experiments.reports.figures import line_plot
from experiments.reports.gpu_records import gpu_records, with_measured
from experiments.results import environment, load_reference, markdown_table, write_text_atomic
from experiments.steps.predicted import predict_experiment, predicted_timelines
from experiments.suite.chapters import measure_here

torch.set_num_threads(2)
warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that transformers does not show
SOURCE = "notebooks/04_experiments.py"

# %% [markdown]
# With a GPU, for example on Colab, the next two cells also run the published experiment on it, within the limit of
# `minutes` ({doc}`12_your_gpu`). Without a GPU they do nothing.

# %% tags=["parameters"]
device, tier, dataset, minutes = "auto", "auto", "embedded", 10

# %% tags=["measured-time", "nbval-ignore-output"]
measure_here("synthetic", "reference-synthetic", device=device, tier=tier, dataset=dataset, minutes=minutes)

# %% [markdown]
# A Transformer learns to reproduce random input: mean squared error, AdamW, one sequence of $T$ tokens per batch. The
# published experiment (see Sources) has $L = 12$ blocks of width $d = 1024$ with $f = 4096$ in the MLP, sequences of
# 2,048 to 16,384 tokens, and runs on a GPU. We divide $d$, $f$ and $T$ by 16, so weights and activations shrink
# 256-fold.
#
# Sequences are *packed*: a batch is one matrix of $T$ rows without padding, and `offsets` says where each sequence
# begins. With `ackpt.checkpoint`, each block is a region ({doc}`02_reentrant_checkpoint`).

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
        loss = F.mse_loss(forward(model, x, offsets, max(lengths), method), x)
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
        losses[method] = [step(torch.randn(T, config.dim)) for _ in range(4)]
        x = torch.randn(T, config.dim)
        steps[method, T] = partial(step, x)
        runs[method, T] = ackpt.measure(steps[method, T], resident=(*resident, x), repeats=0)
    print(f"T = {T:4}  losses equal at all 4 steps: {losses['baseline'] == losses['checkpoint']}")

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
    return 10 * d + 2 * f + 3 * h + 2, 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)


d, f, L = config.dim, config.ff_dim, config.layers
A, P_block = of_block(config)
P = L * P_block + d
states = 12 * P + 4 * (8 * L + 1) + 8  # 8: the two offsets of the packed sequence
gradients = 4 * (1 + d + d * f)  # 1: the gradient of the loss

# %% [markdown]
# **With checkpointed blocks**, backward processes the blocks from $L$ down to 1 and recomputes each first. At block
# $i$, the live elements per token are $i \, d$ for the boundaries of blocks 1 to $i$, $A - d$ for the recomputed block
# and $d$ for its output, and $2 d + f$ as before. The gradients of the $L - i$ later blocks are complete. Each block
# has $P_\text{block}$ parameters, and the dots are the floor:
#
# $$ \text{peak}_i = \underbrace{4 \, T \, \bigl(A + (i + 2) \, d + f\bigr)}_{\text{falls from block to block}}
#    + \underbrace{4 \, (L - i) \, P_\text{block}}_{\text{rises}} + \dots $$
#
# Each block frees a boundary, $4 \, T d$ bytes, and allocates gradients, $4 \, P_\text{block}$ bytes. So the peak is at
# the beginning of backward if boundaries are larger, and otherwise at its end.

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
T_bend = P_block / d
print("bytes per token")
print(f"baseline:                 4 x ({L} x {A} + 2 x {d} + {f}) = {4 * (L * A + 2 * d + f):6}")
print(f"checkpointed, T < T_bend: 4 x ({A} + 3 x {d} + {f})      = {4 * (A + 3 * d + f):6}")
print(f"checkpointed, T > T_bend: 4 x ({A} + {L + 2} x {d} + {f})     = {4 * (A + (L + 2) * d + f):6}")
print(f"T_bend = P_block / d = {T_bend:.0f} tokens")

# %% tags=["hide-input"] alt="Peak memory of the checkpointed step over 256 to 2,048 tokens. Three measured points are on the predicted line, which bends upwards at 770 tokens. A second dashed line continues its first part and is clearly lower at 2,048 tokens."
ticks = (256, 512, 770, 1024, 1536, 2048)
straight = [checkpoint_peak(256) + 4 * (A + 3 * d + f) * (T - 256) for T in ticks]
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
# recomputes the scores.
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
# So checkpointing costs at most $4 / 3$ of the FLOPs, and $9 / 7$ where attention dominates. Its time ratio is higher
# here: these blocks are tiny, so the fixed time of each region ({doc}`02_reentrant_checkpoint`) matters. Ratios are
# medians of five rounds, with the lowest and the highest:

# %% tags=["measured-time", "nbval-ignore-output"]
for T in (lengths[0], lengths[-1]):
    ratio = ackpt.compare_seconds({m: steps[m, T] for m in methods}, repeats=5).ratios["checkpoint"]
    print(f"T = {T:4}: checkpointed x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")

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
    print(f"{method:10} predicted {predicted.peak_bytes:,}, measured {runs[method, T].peak_bytes:,} bytes")
    assert predicted.peak_bytes == runs[method, T].peak_bytes

# %% [markdown]
# ## Predicting the published peaks
#
# Do such predictions hold for another implementation, on a GPU? The published experiment has ten peaks. Its model has
# other layers, another norm and another AdamW than ours. `experiments.published` contains its step, with weights in
# fp32 and matrix products in bf16. We predict it at the longest sequence:

# %%
profiles = {}
for method in methods:
    with FakeTensorMode():
        theirs = reference.reference_synthetic(tokens=16384, method=method)
    profiles[method] = ackpt.predict(theirs.run, resident=theirs.resident, device="h100-80g")
    print(f"{method:10} {profiles[method].peak_bytes / 2**20:,.1f} MiB")

# %% tags=["hide-input"] alt="Live memory of a published step at 16,384 tokens, side by side. Baseline: activations rise in a ramp to 14,065 MiB at the loss, just before backward begins, and fall while gradients accumulate. Checkpoint: boundaries rise slowly in the forward, then twelve teeth of about equal height follow in backward, with the peak of 3,727 MiB in the last one. Both end with a short rise in the optimizer."
below = {method: run.peak_bytes - run.timeline.peak_bytes for method, run in profiles.items()}
figure = orders_plot({method: run.timeline.thinned(1000) for method, run in profiles.items()}, "", below)
path = plots.save(figure, "results/figures/04_published_profiles.png")
figure

# %% [markdown]
# *The published steps at 16,384 tokens, predicted from shapes. Recomputed activations count as temporaries; the last
# rise is the optimizer's temporary.*

# %% tags=["hide-input"]
published = synthetic.GPU
predictions = [record for group in predict_experiment(published, SOURCE) for record in group]
for record in predictions:
    path = record.save(f"results/cpu/04_{report.file_name(record)}")
figures = load_reference("synthetic")
stored = Predictions()
configured = [stored.of(row) for row in published_figures() if row["step"] == "reference-synthetic"]
configured = with_measured(configured, gpu_records("reference-synthetic"))
on_gpu = gpu_records("synthetic")
rows = report.published_rows(figures, configured, predictions, on_gpu)
if at_16k := {r.config["method"]: r.metrics for r in on_gpu if r.config["seq_len"] == 16384}:
    plots.save(overlaid_plot(predicted_timelines(published, 16384), at_16k), "results/figures/04_measured.png")
caption = (
    "The synthetic experiment: peaks as published, predicted from shapes for the published model, and predicted for "
    "ours; published seconds of 14 steps, and their ratio to the baseline's."
)
table = markdown_table(rows, report.PUBLISHED, caption, "tab-synthetic-published")
path = write_text_atomic("results/tables/04_synthetic_published.md", table)
print(f"largest error: {max(abs(row['predicted'] - row['bytes']) for row in configured):,} bytes")

# %% [markdown]
# All ten peaks, *published* and *predicted*, agree in every digit shown:
#
# ```{include} ../../results/tables/04_synthetic_published.md
# ```
#
# The GPU is unknown, and the seconds include a profiler. {doc}`11_predictions` discusses ratios and losses.
#
# Our baseline needs about a third less per token, because the published block saves more fp32 copies.

# %% tags=["hide-input"]
D, FF = published.dim, published.ff_dim
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
P_ours = L * of_block(published.model())[1] + D
changes = [size - before for before, size in zip((0, *blocks.values()), blocks.values())]
rows = [{"cause": cause, "block": f"{change:+,}" if change else "0"} for cause, change in zip(blocks, changes)]
rows[0]["block"] = f"{changes[0]:,}"
rows += [{"cause": "sum: the published block", "block": f"{A_theirs:,}"}]
theirs_at = {row["sizes"]["tokens"]: row["predicted"] for row in configured if row["sizes"]["method"] == "baseline"}
ours_at = {p.config["seq_len"]: p.metrics["peak_bytes"] for p in predictions if p.config["method"] == "baseline"}
per_token = [(peaks[16384] - peaks[12288]) // 4096 for peaks in (theirs_at, ours_at)]
outside = per_token[0] - per_token[1] - L * (A_theirs - changes[0]) - 4 * D
rows += [
    {"cause": "the loss of the last step", "token": f"{4 * D:+,}"},
    {"cause": "other tensors outside the blocks", "token": f"{outside:+,}"},
]
once = {
    "more parameters, with Adam states and bf16 copies": 14 * (P_theirs - P_ours),
    "workspaces of cuBLAS": WORKSPACES,
    "in the optimizer only: the temporary of AdamW": 4 * P_theirs,
}
rows += [{"cause": cause, "once": f"{size / 2**20:+,.1f}"} for cause, size in once.items()]
columns = {"cause": "cause", "block": "bytes per token and block", "token": "bytes per token", "once": "once, MiB"}
rows = [{name: row.get(name, "") for name in columns} for row in rows]
caption = "Why the published baseline of the synthetic experiment has a higher peak than ours, from shapes."
path = write_text_atomic("results/tables/04_synthetic_causes.md", markdown_table(rows, columns, caption, "tab-synthetic-causes"))

# %% [markdown]
# :::{admonition} Why the published peaks are higher
# :class: dropdown
#
# From our block to the published one, change by change:
#
# ```{include} ../../results/tables/04_synthetic_causes.md
# ```
#
# - The published blocks read and write bf16, because a linear layer under autocast comes first.
# - Separate projections and their stacked copy need the same bytes as our joint projection.
# - The norm of torch 2.8 is not fused: each of four norms saves its input and a product in fp32, $8 d$ bytes per token,
#   instead of its input in bf16, $2 d$.
# - AdamW (`foreach`) allocates a temporary as large as all parameters. Up to 4,096 tokens, the checkpointed peak is in
#   this step of the optimizer.
# :::
#
# ## Exercises
#
# :::{admonition} Exercise 1: one sequence or two
# :class: note
# Pack two sequences of 512 tokens instead of one of 1,024. How do the peak and the FLOPs change? Predict, then measure.
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
# :::{admonition} Exercise 3: what fits
# :class: note
# A GPU has 24 GiB. How many tokens may a sequence of our model have at the published sizes, without and with
# checkpointed blocks? Estimate both from {ref}`the table <tab-synthetic-published>`, then check with
# `predict_experiment`. Mind the bend between the last two lengths.
# :::

# %% tags=["solution"]
synthetic_ours = {(r.config["method"], r.config["seq_len"]): r.metrics["peak_bytes"] for r in predictions}
rises = {method: (synthetic_ours[method, 8192] - synthetic_ours[method, 2048]) / 6144 for method in methods}
rises["checkpoint"] += (L - 1) * 4 * published.dim  # beyond the bend, every further block adds its boundary
for method in methods:
    T = int(16384 + (24 * 2**30 - synthetic_ours[method, 16384]) / rises[method]) // 256 * 256
    ((record,),) = predict_experiment(replace(published, seq_lens=(T,), methods=(method,)))
    free = (24 * 2**30 - record.metrics["peak_bytes"]) / rises[method]
    print(f"{method:10} {T:7,} tokens fit, with room for {free:.0f} more")

# %% [markdown]
# ## Summary
#
# - At three lengths, both peaks follow from the sizes, to the byte. Beyond $P_\text{block} / d$ tokens, a checkpointed
#   step needs a boundary for every layer.
# - The ten published peaks of the synthetic experiment are predicted to within 1,024 bytes.
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
# - Published figures: repository `sashaboriskin/activation_checkpointing`, torch 2.8 and flash-attn 2.8.3.
