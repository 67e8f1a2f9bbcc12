# %% [markdown]
# # The synthetic experiment and the language model
#
# **Once the blocks are checkpointed, what fills the memory of a training step?**

# %% [markdown]
# ```{figure} ../../results/figures/04_at_the_peak.png
# :alt: Stacked bars of the memory at the peak for four methods, from the bottom: parameters, optimizer, gradients, activations, recomputed activations, temporaries, logits. Logits are the largest part of baseline, nearly everything above parameters and optimizer with checkpoint, a thin slice with chunked-loss, and absent with both.
# :class: dark-light
#
# Memory at the peak of one step, with four methods: only the loss in chunks removes the logits.
# ```
#
# After this chapter you can predict the peak of a training step for any sequence length, without and with checkpointed
# blocks, to the byte and before it runs. You know which tensors are left when the blocks of a language model are
# checkpointed, and how to compute its loss without ever allocating all logits.
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
# | $V$ | entries in the model's vocabulary |
# | $k$, $r$ | chunks of the loss, and tokens in a chunk: $r = \lceil T / k \rceil$ |
# :::
#
# The *boundary* of a checkpointed block is its input, the only tensor of the block that is saved from forward to
# backward.

# %%
import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.metering import plots
from ackpt.models import LanguageModel, Transformer, TransformerConfig
from ackpt.models.transformer import Block
from experiments import lm, synthetic
from experiments.data import packed_batches, token_stream
from experiments.graph_profile import orders_plot
from experiments.published import Predictions, reference
from experiments.published import rows as published_figures
from experiments.published.block_bytes import WORKSPACES, saved_per_token, with_fused_norms
from experiments.reports import training as report
from experiments.reports.figures import line_plot, losses_plot, stacked_plot
from experiments.reports.gpu_records import gpu_records
from experiments.results import environment, load_reference, markdown_table, write_text_atomic
from experiments.steps.predicted import predict_experiment

torch.set_num_threads(2)
SOURCE = "notebooks/04_experiments.py"

# %% [markdown]
# ## The synthetic experiment
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
# ### The peak by hand
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
# ### Two slopes and a bend
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
path = plots.save(figure, "results/figures/04_peak_over_tokens.png")
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
# ### The two steps side by side
#
# The same step at the longest sequence, with both methods on one memory axis. Before you look, sketch the second one:
# how many teeth, and do they rise or fall?

# %% tags=["hide-input"] alt="Live memory of two training steps side by side. Baseline: activations rise in a ramp to the peak, where backward begins, and fall. Checkpoint: a low staircase of boundaries in the forward, then one tooth of recomputed activations per block in backward. Its peak is a quarter of the baseline's."
longest = {method: runs[method, lengths[-1]] for method in methods}
figure = orders_plot({m: run.timeline for m, run in longest.items()}, "", longest["baseline"].resident_bytes)
path = plots.save(figure, "results/figures/04_side_by_side.png")
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
path = write_text_atomic("results/tables/04_synthetic.md", markdown_table(rows, columns, caption, "tab-synthetic"))

# %% [markdown]
# ```{include} ../../results/tables/04_synthetic.md
# ```

# %% [markdown]
# ### FLOPs and time
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
# ### Peaks from shapes alone
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
# ### The published table
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
path = plots.save(figure, "results/figures/04_published_profiles.png")
figure

# %% [markdown]
# *The published profiles at 16,384 tokens, predicted from shapes. Each step first frees the gradients of the previous
# one. The baseline's peak is in the loss, the checkpointed peak in the block that backward recomputes last. The last
# rise is the optimizer's temporary. Recomputed activations count as temporaries here.*

# %% tags=["hide-input"]
published = synthetic.GPU
predictions = [record for group in predict_experiment(published, SOURCE) for record in group]
for record in predictions:
    path = record.save(f"results/cpu/04_{report.file_name(record)}")
figures = load_reference("synthetic")
stored = Predictions()
configured = [stored.of(row) for row in published_figures() if row["step"] == "reference-synthetic"]
rows = report.published_rows(figures, configured, predictions, gpu_records("synthetic"), digits=4)
caption = (
    "Peaks of the synthetic experiment: as published, predicted for the published model, and predicted for ours. "
    "Predictions are from shapes alone."
)
table = markdown_table(rows, report.PUBLISHED, caption, "tab-synthetic-published")
path = write_text_atomic("results/tables/04_synthetic_published.md", table)
caption = "Published seconds of 14 steps of the synthetic experiment, and the ratio of checkpoint to baseline."
table = markdown_table(report.published_times(figures), report.TIMES, caption, "tab-synthetic-times")
path = write_text_atomic("results/tables/04_synthetic_times.md", table)
print(f"largest error: {max(abs(row['predicted'] - row['bytes']) for row in configured)} bytes")

# %% [markdown]
# ```{include} ../../results/tables/04_synthetic_published.md
# ```
#
# A published peak is `torch.cuda.max_memory_allocated` over 14 steps. The source divides it by $1024^2$ and prints MB;
# we write MiB. Our model needs less in every row; the appendix lists the causes. The seconds of the next table include
# a profiler and the export of its trace. {doc}`11_predictions` predicts the ratios:
#
# ```{include} ../../results/tables/04_synthetic_times.md
# ```
#
# :::{admonition} Takeaway
# :class: tip
# To compare two runs of "the same" model, compare slope and floor. Additional copies in the blocks change the slope,
# and the optimizer's temporaries change the floor. A single peak does not separate these causes.
# :::

# %% [markdown]
# ## The language model
#
# ### The text
#
# The published experiment reads wikitext-103. This page reads a text that needs no network: the *embedded* corpus, the
# names of Unicode's characters, which are the same in every version of Python (LATIN SMALL LETTER A WITH GRAVE). A
# tokenizer for byte-pair encoding is trained on the same text, and we cut random windows of $T + 1$ tokens: the model
# reads the first $T$ and predicts the last $T$.

# %%
lm_config = TransformerConfig(dim=128, ff_dim=512, layers=4, head_dim=32, vocab_size=4096)
T, V, k = 512, lm_config.vocab_size, 8
stream = token_stream("embedded", V)
batches = list(packed_batches(stream, T, batch_size=1, steps=10))
print(f"{len(stream):,} tokens; the first batch reads {batches[0].tokens[:4].tolist()}...")
print(f"and predicts {batches[0].targets[:4].tolist()}...")

# %% [markdown]
# `python -m experiments lm --dataset wikitext` runs the same experiment on wikitext-103 from the Hugging Face hub.
#
# ### Four methods
#
# | method | blocks | loss |
# |---|---|---|
# | `baseline` | all activations saved | all logits at once |
# | `checkpoint` | recomputed in backward | all logits at once |
# | `chunked-loss` | all activations saved | in $k$ chunks |
# | `checkpoint+chunked-loss` | recomputed in backward | in $k$ chunks |
#
# The model is that of the synthetic experiment with causal attention, an embedding before the blocks, and a head
# of $V \times d$ weights after them. The head computes the *logits*, one score per token and entry of the vocabulary.
# Embedding and head are not tied. (`cu_seqlens` are the offsets of the packed sequences.)


# %%
def loss_of(model, batch, method):
    x = forward(model, model.embedding(batch.tokens), batch.cu_seqlens, batch.max_seqlen, method)
    if "chunked-loss" in method:
        return ackpt.chunked_cross_entropy(x, model.head.weight, batch.targets, chunks=k)
    return F.cross_entropy(model.head(x), batch.targets)


# %%
def build_lm(method, tied=False):
    torch.manual_seed(0)
    model = LanguageModel(lm_config)
    if tied:  # for an exercise
        model.head.weight = model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(batch):
        loss = loss_of(model, batch, method)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def measure(batch):
        resident = (model, optimizer, batch.tokens, batch.targets, batch.cu_seqlens)
        return ackpt.measure(partial(step, batch), resident=resident, repeats=0)

    return step, measure


# %% [markdown]
# We train for ten steps with each method, and measure one further step. A model that knows nothing assigns the same
# probability to all $V$ tokens, and its loss is $\ln V$.

# %%
lm_methods = ("baseline", "checkpoint", "chunked-loss", "checkpoint+chunked-loss")
lm_runs, lm_steps, lm_losses = {}, {}, {}
print(f"ln V = {math.log(V):.4f}")
for method in lm_methods:
    lm_steps[method], measure = build_lm(method)
    lm_losses[method] = [float(lm_steps[method](batch)) for batch in batches]
    lm_runs[method] = measure(batches[0])
    print(f"{method:24} losses {lm_losses[method][0]:.4f} ... {lm_losses[method][-1]:.4f}")

# %% [markdown]
# Checkpointing leaves the loss of every step equal to the last bit. The chunked loss sums in another order, so it may
# differ in the last digits of fp32. The two methods with a chunked loss again agree to the last bit.

# %%
base, checkpointed, chunked, both = lm_losses.values()
print(f"checkpoint equal to baseline: {base == checkpointed}")
print(f"checkpoint+chunked-loss equal to chunked-loss: {chunked == both}")
print(f"chunked-loss within 0.00001 of baseline: {max(abs(a - b) for a, b in zip(base, chunked)) < 1e-5}")

# %% [markdown]
# The published experiment shows the losses at three lengths. We draw the same curves for a smaller model, with the
# experiment of `python -m experiments lm`:

# %%
small = replace(lm.CPU, seq_lens=(128, 256, 512), steps=120, methods=lm_methods[:2], dim=64, ff_dim=256, head_dim=16)
small = replace(small, vocab_size=2048, tokenizer_vocab=2048)
curves = {}
for records in lm.run_lm(small, timed_rounds=0):
    name = f"{records[0].config['seq_len']} tokens"
    curves[name] = {record.config["method"]: record.metrics["losses"] for record in records}
    differences = {a - b for a, b in zip(*curves[name].values())}
    print(f"{name}: {len(curves[name]['baseline'])} steps, differences {differences}")

# %% tags=["hide-input"] alt="Loss over 120 steps at 128, 256 and 512 tokens, in three pairs of axes. In each, the loss falls from 7.6 to between 6 and 6.5, and the dashed curve with checkpointing lies on the baseline's. Below, the difference is a straight line at zero."
figure = losses_plot(curves, "")
path = plots.save(figure, "results/figures/04_losses.png")
figure

# %% [markdown]
# *Loss without and with checkpointing. Their difference is exactly zero at every step.*
#
# {doc}`11_predictions` shows why the published losses cannot be compared with those of other language models.
#
# ### What the head costs
#
# The head computes $V$ logits from the $d$ elements of each token. No other tensor in the model is as wide: GPT-2's
# vocabulary has 50257 entries. The loss of the baseline allocates three tensors of $T V$ elements that are live
# together when backward begins:
#
# 1. the log-probabilities, saved by the forward (the logits themselves are freed by then),
# 2. the gradient with respect to the log-probabilities,
# 3. the gradient with respect to the logits.
#
# $$ \text{head} = T \cdot V \cdot 4 \text{ bytes} \cdot 3 \text{ copies} $$
#
# We measure the head alone, without a model:

# %%
d_lm = lm_config.dim
hidden = torch.randn(T, d_lm, requires_grad=True)
head = torch.nn.Linear(d_lm, V, bias=False)
targets = torch.randint(V, (T,))


def baseline_head():
    hidden.grad = head.weight.grad = None
    F.cross_entropy(head(hidden), targets).backward()


baseline = ackpt.measure(baseline_head, resident=[hidden, head, targets], repeats=0)
print(f"{T} x {V} x 4 bytes x 3 copies = {T * V * 4 * 3:,}")
print(f"measured {baseline.dynamic_peak_bytes:>32,}")

# %% [markdown]
# (The additional 8 bytes are the loss and its gradient.)
#
# ### The logits, in chunks
#
# The forward can already compute the gradient of the cross-entropy. For one token with logits $z$ and target $y$, it is
#
# $$ \frac{\partial \ell}{\partial z} = \operatorname{softmax}(z) - e_y. $$
#
# So as soon as a token's logits are computed, we can also compute their gradient, and from it the token's contribution
# to the gradients of its hidden state and of the weight. In plain PyTorch:


# %%
def chunked_loss(hidden, weight, targets, k):
    """The mean loss and the gradients of states and weight; the logits of one chunk at a time."""
    loss, grad_weight, grad_states = 0, torch.zeros_like(weight), []
    for x, y in zip(hidden.chunk(k), targets.chunk(k)):
        logits = x @ weight.T
        loss += F.cross_entropy(logits, y, reduction="sum") / len(targets)
        grad = logits.softmax(-1)
        grad[range(len(y)), y] -= 1
        grad /= len(targets)
        grad_states.append(grad @ weight)
        grad_weight += grad.T @ x
    return loss, torch.cat(grad_states), grad_weight


with torch.no_grad():
    loss, *by_chunks = chunked_loss(hidden, head.weight, targets, k)
for ours, grad in zip(by_chunks, (hidden.grad, head.weight.grad)):
    torch.testing.assert_close(ours, grad)

# %% [markdown]
# `ackpt.chunked_cross_entropy` is this loop as one differentiable function. Its backward only multiplies by the
# gradient of the loss. Its forward allocates the gradients of the weight and of the hidden states, which every method
# needs, and the logits of one chunk in two copies, because `logsumexp` makes a copy internally:
#
# $$ \text{chunked head} = 4 \, V d + 4 \, T d + 2 \cdot 4 \, r V \text{ bytes} $$
#
# It also allocates a mask of $T$ bytes, two elements for each row of a chunk, and two elements for the loss.


# %%
def chunked_bytes(T, V, k):
    r = math.ceil(T / k)
    return 4 * V * d_lm + 4 * T * d_lm + 8 * r * V + T + 8 * r + 8


def chunked_head(k):
    hidden.grad = head.weight.grad = None
    ackpt.chunked_cross_entropy(hidden, head.weight, targets, chunks=k).backward()


for n in (2, 8, 32):
    run = ackpt.measure(partial(chunked_head, n), resident=[hidden, head, targets], repeats=0)
    off, more = run.dynamic_peak_bytes - chunked_bytes(T, V, n), run.flops - baseline.flops
    print(f"{n:2} chunks: {run.dynamic_peak_bytes:>10,} bytes, formula off by {off}, {more} more FLOPs")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# The logits are the one activation whose gradient is already known in the forward. Chunking the loss therefore does not
# trade time for memory: no operation runs twice.
# :::

# %% [markdown]
# ### The whole step
#
# Per token, the blocks save $L A$ elements, or with checkpointing only their boundaries, $L d$. The last norm saves its
# input and a scale, $d + 1$. Its output, $d$, is saved for the head's backward. With the loss in one piece, the peak is
# in the head, where all of these are live:
#
# $$ 4 \, T \, (L A + 2 d + 1) + 12 \, T V \qquad \text{or} \qquad 4 \, T \, (L d + 2 d + 1) + 12 \, T V. $$
#
# With the chunked loss alone, the peak stays in the head, with the bytes of the chunked head instead of $12 \, T V$.
# With both, no logits are live at the peak: it is now at the end of backward, with the first block recomputed and all
# other gradients present.

# %%
f_lm, L_lm = lm_config.ff_dim, lm_config.layers
A_lm, P_block_lm = of_block(lm_config)
P_lm = L_lm * P_block_lm + d_lm + 2 * V * d_lm


def by_hand(method, T):
    resident = 12 * P_lm + 4 * (8 * L_lm + 3) + 8 * (T + 1) + 8  # parameters and Adam states, step counts, ids, offsets
    saved = 4 * T * ((L_lm * d_lm if "checkpoint" in method else L_lm * A_lm) + 2 * d_lm + 1)
    if "chunked" not in method:
        return resident + saved + 12 * T * V + 8
    if method == "chunked-loss":
        return resident + saved + chunked_bytes(T, V, k)
    gradients = 4 * (V * d_lm + d_lm + (L_lm - 1) * P_block_lm + d_lm * f_lm)
    return resident + gradients + 4 * T * (A_lm + 2 * d_lm + f_lm) + 8


for method in lm_methods:
    print(f"{method:24} measured - by hand: {lm_runs[method].peak_bytes - by_hand(method, T)} bytes")

# %% [markdown]
# Which lowers the peak more on its own, checkpointing or the chunked loss? Decide with the formulas, then look at the
# table:

# %% tags=["hide-input"]
base = lm_runs["baseline"]
rows = [
    {
        "method": method,
        "peak": round(run.peak_bytes / 2**20, 1),
        "saved": round(100 - 100 * run.peak_bytes / base.peak_bytes),
        "flops": round(run.flops / base.flops, 3),
    }
    for method, run in lm_runs.items()
]
columns = {"method": "method", "peak": "peak, MiB", "saved": "reduction, %", "flops": "FLOPs, ratio"}
caption = f"Measured peaks of one training step on the CPU ({T} tokens, vocabulary {V}, {k} chunks)."
path = write_text_atomic("results/tables/04_lm.md", markdown_table(rows, columns, caption, "tab-lm"))

# %% [markdown]
# ```{include} ../../results/tables/04_lm.md
# ```
#
# What is live at the peak of each method? `ackpt.measure` distinguishes saved activations, recomputed activations and
# temporaries. The formulas tell how many of these bytes are logits.

# %% tags=["hide-input"] alt="Stacked bars of the memory at the peak for four methods, from the bottom: parameters, optimizer, gradients, activations, recomputed activations, temporaries, logits. Logits are the largest part of baseline, nearly everything above parameters and optimizer with checkpoint, a thin slice with chunked-loss, and absent with both."
logits = {"baseline": 12 * T * V, "checkpoint": 12 * T * V, "chunked-loss": 8 * math.ceil(T / k) * V}
names = ("parameters", "inputs", "optimizer", "gradients", "activations", "recomputed", "temporaries")
parts = {name: [lm_runs[m].categories[name] for m in lm_methods] for name in names}
parts["logits"] = [logits.get(m, 0) for m in lm_methods]
for place, m in enumerate(lm_methods):
    saved_logits = 0 if "chunked" in m else 4 * T * V
    parts["activations"][place] -= saved_logits
    parts["temporaries"][place] -= logits.get(m, 0) - saved_logits
figure = stacked_plot(lm_methods, parts, "")
path = plots.save(figure, "results/figures/04_at_the_peak.png")
figure

# %% [markdown]
# *Memory at the peak. Logits are most of the dynamic memory at the checkpointed peak; chunking the loss removes nearly
# all of them.*
#
# Neither method is enough alone. Checkpointing leaves the logits and chunking leaves the activations of the blocks, and
# the remaining bytes determine the peak. With both, only the activations of one block or the logits of one chunk are
# live at a time.
#
# ### FLOPs and time of the four methods
#
# A matrix of $n$ weights costs $2 n$ FLOPs per token in forward and twice that in backward, so the head costs
# $3 \cdot 2 \, T V d$, in chunks or in one piece. Checkpointing adds one forward of the blocks, but none of the head.

# %%
blocks_forward = 2 * T * L_lm * (4 * d_lm**2 + 2 * d_lm * f_lm) + 4 * T**2 * L_lm * d_lm
print(f"the head is {6 * T * V * d_lm / base.flops:.0%} of the baseline")
print(f"chunking adds {lm_runs['chunked-loss'].flops - base.flops} FLOPs")
print(f"checkpointing adds {lm_runs['checkpoint'].flops - base.flops:,}; one forward of the blocks is {blocks_forward:,}")

# %% [markdown]
# The methods take turns, and each round gives one ratio to the baseline. We print median, lowest and highest.

# %% tags=["measured-time", "nbval-ignore-output"]
times = ackpt.compare_seconds({m: partial(step, batches[0]) for m, step in lm_steps.items()}, repeats=5)
for method, ratio in times.ratios.items():
    print(f"{method:24} x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")

# %% [markdown]
# ### The published language model
#
# The published model has GPT-2's vocabulary and 12 blocks of width 1024. Our chunked loss again has 8 chunks. We count
# the parameters of our model:

# %%
published_lm = lm.GPU
D, FF, W = published_lm.dim, published_lm.ff_dim, published_lm.vocab_size
H, layers = published_lm.model().heads, published_lm.layers
N = layers * of_block(published_lm.model())[1] + D + 2 * W * D
print(f"{N:,} parameters; weights, gradients and Adam states {16 * N:,} bytes")

# %% [markdown]
# Again, the peaks of both models are predicted from shapes. The prediction misses one
# hidden copy, inside `logsumexp`: if the peak is in the chunked head, add up to $4 r V$ bytes.

# %% tags=["hide-input"]
lm_predictions = [record for group in predict_experiment(published_lm, SOURCE) for record in group]
for record in lm_predictions:
    path = record.save(f"results/cpu/04_{report.file_name(record)}")
lm_figures = load_reference("lm")
configured = [stored.of(row) for row in published_figures() if row["step"] == "reference-language-model"]
measured = gpu_records("lm", dtype="bfloat16")
caption = (
    "Peaks of the language model: as published, predicted for the published model, and predicted for ours. Predictions "
    "are from shapes alone."
)
rows = report.published_rows(lm_figures, configured, lm_predictions, measured)
table = markdown_table(rows, report.PUBLISHED, caption, "tab-lm-published")
path = write_text_atomic("results/tables/04_lm_published.md", table)
caption = "Published seconds of 499 steps of the language model, and the ratio of checkpoint to baseline."
table = markdown_table(report.published_times(lm_figures), report.TIMES, caption, "tab-lm-times")
path = write_text_atomic("results/tables/04_lm_times.md", table)
rows = [
    {
        "seq_len": f"{record.config['seq_len']:,}",
        "method": record.config["method"],
        "predicted": f"{record.metrics['peak_bytes'] / 2**20:,.1f}",
        "measured": report.measured_peak(record, measured),
    }
    for record in lm_predictions
    if "chunked-loss" in record.config["method"]
]
columns = {name: report.PUBLISHED[name] for name in rows[0]}
caption = "Our model with the loss in 8 chunks at the published sizes, predicted from shapes alone."
path = write_text_atomic("results/tables/04_chunked.md", markdown_table(rows, columns, caption, "tab-lm-chunked"))

# %% [markdown]
# ```{include} ../../results/tables/04_lm_published.md
# ```
#
# The source's table says 500 steps. Its loop, `range(1, 500)` in `run_lm_model.py`, runs 499, and a published peak is
# the largest of all of them. The seconds include reading and tokenizing the text, and a profiler that records ten
# steps. {doc}`11_predictions` predicts the ratios:
#
# ```{include} ../../results/tables/04_lm_times.md
# ```
#
# No figures were published for a chunked loss. We predict ours:
#
# ```{include} ../../results/tables/04_chunked.md
# ```
#
# **The goal** was a peak of at most 5200 MB at 8192 tokens. We add the copy that the prediction may miss:

# %%
lm_ours = {(p.config["method"], p.config["seq_len"]): p.metrics["peak_bytes"] for p in lm_predictions}
best = lm_ours["checkpoint+chunked-loss", 8192]
missed = 4 * math.ceil(8192 / published_lm.loss_chunks) * W
for name, size in {"predicted": best, "predicted, plus the copy": best + missed}.items():
    print(f"{name:28} {size / 1e6:.0f} MB = {size / 2**20:.0f} MiB: {size <= 5200e6}")
print(f"weights, gradients and Adam states: {16 * N / best:.0%} of the predicted peak")

# %% [markdown]
# To lower this peak much further, weights, gradients and Adam states must shrink.
#
# At which vocabulary do the logits need as much memory as all blocks? In bf16 a block saves $24 d + 4 f + 12 h + 8$
# bytes per token, and a boundary has $4 d$. The loss needs 10 bytes per logit when backward begins: the
# log-probabilities in bf16, a copy of them in fp32, and the gradient in fp32. Blocks and logits need the same memory if
# $10 V = L \, (24 d + 4 f + 12 h + 8)$:

# %%
block_bytes = 24 * D + 4 * FF + 12 * H + 8
print(f"V = {layers * block_bytes / 10:,.0f}; GPT-2 has {W:,}")
print(f"with checkpointed blocks, logits / boundaries = {10 * W / (layers * 4 * D):.1f}")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# With GPT-2's vocabulary, the logits need as much memory as all twelve blocks. Once the blocks are checkpointed, the
# logits need ten times as much memory as the boundaries. Chunk the loss first: it adds no FLOPs.
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
# The figure of the two slopes has no measurement at 768 tokens. Measure it. By how much is the formula off? Hint:
# `predict` does not see what a kernel allocates internally.
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
synthetic_ours = {(r.config["method"], r.config["seq_len"]): r.metrics["peak_bytes"] for r in predictions}
rises = {method: (synthetic_ours[method, 8192] - synthetic_ours[method, 2048]) / 6144 for method in methods}
rises["checkpoint"] += (L - 1) * 4 * published.dim  # beyond the bend, every further block adds its boundary
for method in methods:
    T = int(16384 + (24 * 2**30 - synthetic_ours[method, 16384]) / rises[method]) // 256 * 256
    ((record,),) = predict_experiment(replace(published, seq_lens=(T,), methods=(method,)))
    free = (24 * 2**30 - record.metrics["peak_bytes"]) / rises[method]
    print(f"{method:10} {T:7,} tokens fit, with room for {free:.0f} more")

# %% [markdown]
# :::{admonition} Exercise 4: a larger vocabulary
# :class: note
# Current models have vocabularies of 128 000 entries and more. With $V = 128\,256$ and 8192 tokens, how many GiB do the
# weights, gradients and Adam states of the published model need, and how many do its logits, at 10 bytes each? Predict
# the peaks of `checkpoint` and `checkpoint+chunked-loss`: which bytes are live in the head, and at the end of backward?
# :::

# %% tags=["solution"]
two = ("checkpoint", "checkpoint+chunked-loss")
larger = replace(published_lm, vocab_size=128_256, seq_lens=(8192,), methods=two)
print(f"weights, gradients, Adam: {16 * (N + 2 * D * (128_256 - W)) / 2**30:.1f} GiB")
print(f"logits: {10 * 128_256 * 8192 / 2**30:.1f} GiB")
# Both peaks are in the head, so the second prediction may miss logsumexp's copy, 4 r V bytes or 0.5 GiB.
(answers,) = predict_experiment(larger)
for record in answers:
    print(f"{record.config['method']:24} {record.metrics['peak_bytes'] / 2**30:.1f} GiB")

# %% [markdown]
# :::{admonition} Exercise 5: how many chunks?
# :class: note
# For the published model at 8192 tokens with checkpointed blocks: at how many chunks does the predicted peak stop
# falling, and why? Predict the peak for 2, 4, 8 and 16 chunks.
# :::

# %% tags=["solution"]
for n in (2, 4, 8, 16):
    ask = replace(published_lm, loss_chunks=n, seq_lens=(8192,), methods=two[1:])
    peak = best if n == published_lm.loss_chunks else next(predict_experiment(ask))[0].metrics["peak_bytes"]
    print(f"{n:2} chunks: {peak / 2**20:7.1f} MiB")

# %% [markdown]
# Once the logits of a chunk are small enough, the peak moves to a later moment of the step: the recomputation of the
# first block, with nearly all gradients complete. More chunks then only make the matrix products smaller.
#
# :::{admonition} Exercise 6: one matrix for both ends
# :class: note
# Many models *tie* the embedding and the head: both use one matrix of $V d$ elements. By how much does that lower the
# peak of `checkpoint+chunked-loss` for the small language model? Predict it before you measure it, and consider when each
# gradient is allocated.
# :::

# %% tags=["solution"]
_, measure = build_lm("checkpoint+chunked-loss", tied=True)
tied = measure(batches[0]).peak_bytes
print(f"measured {lm_runs['checkpoint+chunked-loss'].peak_bytes - tied:,}; 12 V d + 4 = {12 * V * d_lm + 4:,}")

# %% [markdown]
# The peak falls by one weight and its two Adam averages, 12 bytes per element, and by one step count. It does not fall
# by a gradient: tied or not, at the peak the head's gradient is live and the embedding's is not yet allocated.

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
# - Four methods learn the same from real text. Checkpointing changes no bit of the losses; chunking the loss changes
#   only the order of a sum.
# - The logits cost tokens times vocabulary times copies: 12 bytes per logit in fp32, 10 in bf16 here.
# - The gradient of the logits is known as soon as the logits are, so the loss can be computed in chunks, without
#   additional FLOPs.
# - Checkpointed blocks and a chunked loss belong together. At the published size and 8192 tokens, they are predicted to
#   need about a quarter of the published baseline, and most of that is weights, gradients and Adam states.

# %% [markdown]
# ## Appendix: what the published peaks contain
#
# ### The synthetic experiment's peaks
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
path = write_text_atomic("results/tables/04_synthetic_causes.md", markdown_table(rows, columns, caption, "tab-synthetic-causes"))

# %% [markdown]
# ```{include} ../../results/tables/04_synthetic_causes.md
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

# %% [markdown]
# ### The language model's peaks
#
# Again, we compute the causes from shapes. Here the blocks of both models read and write
# fp32.
#
# - Separate projections: autocast converts their common input three times.
# - The unfused norms save products in fp32. The final norm is applied after every block.
# - A logit needs 14 bytes in the loss: bf16, kept by the loop's variable (2), the log-probabilities and two gradients
#   in fp32 (4 each).
# - Gradients are never set to zero, so they are live in the loss.
# - Embedding and head share one weight, which saves 12 bytes per element.

# %% tags=["hide-input"]
norm = saved_per_token(partial(reference.UnfusedRMSNorm, D), D, torch.float32, lambda norm, x, offsets: norm(x))
separate = saved_per_token(lambda: with_fused_norms(make_theirs()), D, torch.float32)
unfused = saved_per_token(make_theirs, D, torch.float32)
P_theirs = reference.parameters_of_language_model()
A_theirs = unfused + norm
rows = [
    {"cause": "our block", "block": f"{block_bytes:,}"},
    {"cause": "separate projections", "block": f"{separate - block_bytes:+,}"},
    {"cause": "unfused norms", "block": f"{unfused - separate:+,}"},
    {"cause": "the final norm after every block", "block": f"{norm:+,}"},
    {"cause": "sum: the published block", "block": f"{A_theirs:,}"},
    {"cause": "logits, 14 bytes instead of 10", "token": f"{4 * W:+,}"},
    {"cause": "gradients are never set to zero", "once": f"{4 * P_theirs / 2**20:+,.1f}"},
    {"cause": "one weight for embedding and head", "once": f"{-12 * W * D / 2**20:+,.1f}"},
    {"cause": "workspaces of cuBLAS", "once": f"{WORKSPACES / 2**20:+,.1f}"},
]
columns = {"cause": "cause", "block": "bytes per token and block", "token": "bytes per token", "once": "once, MiB"}
rows = [{name: row.get(name, "") for name in columns} for row in rows]
caption = "Why the published baseline of the language model has a higher peak than ours, from shapes."
path = write_text_atomic("results/tables/04_lm_causes.md", markdown_table(rows, columns, caption, "tab-lm-causes"))

# %% [markdown]
# ```{include} ../../results/tables/04_lm_causes.md
# ```
#
# All six published peaks are in the backward of the loss: weights, gradients and Adam states ($16 P$), the workspaces,
# bf16 copies of all weights (with checkpointing, only of the head), the blocks and norms, the logits, the head's input
# in bf16 and the ids.

# %%
saved_by_block = {"baseline": A_theirs, "checkpoint": 4 * D + norm}
copies = {"baseline": 2 * P_theirs, "checkpoint": 2 * W * D}
for row in lm_figures["rows"]:
    m, per_token = row["method"], layers * saved_by_block[row["method"]] + 14 * W + 2 * D + 16
    by_hand = 16 * P_theirs + WORKSPACES + copies[m] + row["seq_len"] * per_token
    print(f"{m:10} {row['seq_len']:5,} tokens: published / by hand - 1 = {row['peak'] * 2**20 / by_hand - 1:+.5%}")

# %% [markdown]
# The differences are remainders of blocks that the allocator does not split. The prediction includes some of them.
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
# - {cite:t}`merity2016`: wikitext-103, the text of the published runs.
# - {cite:t}`sennrich2016`: byte-pair encoding, which the tokenizer uses.
