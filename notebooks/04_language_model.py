# %% [markdown]
# # A language model
#
# **Why do the logits, not the blocks, fill the memory of a language model?**

# %% [markdown]
# ```{figure} ../../results/figures/04_at_the_peak.png
# :alt: Stacked bars of the memory at the peak for four methods, from the bottom: parameters, optimizer, gradients, activations, recomputed activations, temporaries, logits. Logits are the largest part of baseline, nearly everything above parameters and optimizer with checkpoint, a thin slice with chunked-loss, and absent with both.
# :class: dark-light
#
# Memory at the peak of one step, with four methods: only the loss in chunks removes the logits.
# ```
#
# After this chapter you know why checkpointing the blocks is only half of the work for a language model, and how to
# compute its loss without ever allocating all logits.
#
# :::{admonition} Symbols of this chapter
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $T$ | tokens in the batch; a batch is one sequence here, so $T$ is its length |
# | $V$ | entries in the model's vocabulary |
# | $k$, $r$ | chunks of the loss, and tokens in a chunk: $r = \lceil T / k \rceil$ |
# | $L$, $d$, $f$, $h$ | blocks; width of the model, of the MLP; heads |
# | $P_\text{block}$, $P$ | parameters of one block, of the model |
# | $A$ | elements that one block saves per token, from {doc}`01_where_memory_goes` |
# :::

# %%
import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

import ackpt
from ackpt.metering import plots
from ackpt.models import LanguageModel, TransformerConfig
from experiments import lm
from experiments.data import packed_batches, token_stream
from experiments.published import Predictions, reference
from experiments.published import rows as published_figures
from experiments.published.block_bytes import WORKSPACES, saved_per_token, with_fused_norms
from experiments.reports import training as report
from experiments.reports.figures import losses_plot, stacked_plot
from experiments.reports.gpu_records import gpu_records
from experiments.results import environment, load_reference, markdown_table, write_text_atomic
from experiments.steps.predicted import predict_experiment

torch.set_num_threads(2)
SOURCE = "notebooks/04_language_model.py"

# %% [markdown]
# ## The text
#
# The published experiment reads wikitext-103. This page reads a text that needs no network: the *embedded* corpus, the
# names of Unicode's characters, which are the same in every version of Python (LATIN SMALL LETTER A WITH GRAVE). A
# tokenizer for byte-pair encoding is trained on the same text, and we cut random windows of $T + 1$ tokens: the model
# reads the first $T$ and predicts the last $T$.

# %%
config = TransformerConfig(dim=128, ff_dim=512, layers=4, head_dim=32, vocab_size=4096)
T, V, k = 512, config.vocab_size, 8
stream = token_stream("embedded", V)
batches = list(packed_batches(stream, T, batch_size=1, steps=10))
print(f"{len(stream):,} tokens; the first batch reads {batches[0].tokens[:4].tolist()}...")
print(f"and predicts {batches[0].targets[:4].tolist()}...")

# %% [markdown]
# `python -m experiments lm --dataset wikitext` runs the same experiment on wikitext-103 from the Hugging Face hub.
#
# ## Four methods
#
# | method | blocks | loss |
# |---|---|---|
# | `baseline` | all activations saved | all logits at once |
# | `checkpoint` | recomputed in backward | all logits at once |
# | `chunked-loss` | all activations saved | in $k$ chunks |
# | `checkpoint+chunked-loss` | recomputed in backward | in $k$ chunks |
#
# The model is that of {doc}`03_synthetic_experiment` with causal attention, an embedding before the blocks, and a head
# of $V \times d$ weights after them. The head computes the *logits*, one score per token and entry of the vocabulary.
# Embedding and head are not tied. (`cu_seqlens` are the offsets of the packed sequences.)


# %%
def loss_of(model, batch, method):
    x = model.embedding(batch.tokens)
    for block in model.blocks:
        if "checkpoint" in method:
            x = ackpt.checkpoint(block, x, batch.cu_seqlens, batch.max_seqlen)
        else:
            x = block(x, batch.cu_seqlens, batch.max_seqlen)
    x = model.norm(x)
    if "chunked-loss" in method:
        return ackpt.chunked_cross_entropy(x, model.head.weight, batch.targets, chunks=k)
    return F.cross_entropy(model.head(x), batch.targets)


# %%
def build(method, tied=False):
    torch.manual_seed(0)
    model = LanguageModel(config)
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
methods = ("baseline", "checkpoint", "chunked-loss", "checkpoint+chunked-loss")
runs, steps, losses = {}, {}, {}
print(f"ln V = {math.log(V):.4f}")
for method in methods:
    steps[method], measure = build(method)
    losses[method] = [float(steps[method](batch)) for batch in batches]
    runs[method] = measure(batches[0])
    print(f"{method:24} losses {losses[method][0]:.4f} ... {losses[method][-1]:.4f}")

# %% [markdown]
# Checkpointing leaves the loss of every step equal to the last bit. The chunked loss sums in another order, so it may
# differ in the last digits of fp32. The two methods with a chunked loss again agree to the last bit.

# %%
base, checkpointed, chunked, both = losses.values()
print(f"checkpoint equal to baseline: {base == checkpointed}")
print(f"checkpoint+chunked-loss equal to chunked-loss: {chunked == both}")
print(f"chunked-loss within 0.00001 of baseline: {max(abs(a - b) for a, b in zip(base, chunked)) < 1e-5}")

# %% [markdown]
# The published experiment shows the losses at three lengths. We draw the same curves for a smaller model, with the
# experiment of `python -m experiments lm`:

# %%
small = replace(lm.CPU, seq_lens=(128, 256, 512), steps=120, methods=methods[:2], dim=64, ff_dim=256, head_dim=16)
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
# {doc}`13_predictions` shows why the published losses cannot be compared with those of other language models.
#
# ## What the head costs
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
d = config.dim
states = torch.randn(T, d, requires_grad=True)
head = torch.nn.Linear(d, V, bias=False)
targets = torch.randint(V, (T,))


def baseline_head():
    states.grad = head.weight.grad = None
    F.cross_entropy(head(states), targets).backward()


baseline = ackpt.measure(baseline_head, resident=[states, head, targets], repeats=0)
print(f"{T} x {V} x 4 bytes x 3 copies = {T * V * 4 * 3:,}")
print(f"measured {baseline.dynamic_peak_bytes:>32,}")

# %% [markdown]
# (The additional 8 bytes are the loss and its gradient.)
#
# ## The logits, in chunks
#
# The forward can already compute the gradient of the cross-entropy. For one token with logits $z$ and target $y$, it is
#
# $$ \frac{\partial \ell}{\partial z} = \operatorname{softmax}(z) - e_y. $$
#
# So as soon as a token's logits are computed, we can also compute their gradient, and from it the token's contribution
# to the gradients of its hidden state and of the weight. In plain PyTorch:


# %%
def chunked_loss(states, weight, targets, k):
    """The mean loss and the gradients of states and weight; the logits of one chunk at a time."""
    loss, grad_weight, grad_states = 0, torch.zeros_like(weight), []
    for x, y in zip(states.chunk(k), targets.chunk(k)):
        logits = x @ weight.T
        loss += F.cross_entropy(logits, y, reduction="sum") / len(targets)
        grad = logits.softmax(-1)
        grad[range(len(y)), y] -= 1
        grad /= len(targets)
        grad_states.append(grad @ weight)
        grad_weight += grad.T @ x
    return loss, torch.cat(grad_states), grad_weight


with torch.no_grad():
    loss, *by_chunks = chunked_loss(states, head.weight, targets, k)
for ours, grad in zip(by_chunks, (states.grad, head.weight.grad)):
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
    return 4 * V * d + 4 * T * d + 8 * r * V + T + 8 * r + 8


def chunked_head(k):
    states.grad = head.weight.grad = None
    ackpt.chunked_cross_entropy(states, head.weight, targets, chunks=k).backward()


for n in (2, 8, 32):
    run = ackpt.measure(partial(chunked_head, n), resident=[states, head, targets], repeats=0)
    off, more = run.dynamic_peak_bytes - chunked_bytes(T, V, n), run.flops - baseline.flops
    print(f"{n:2} chunks: {run.dynamic_peak_bytes:>10,} bytes, formula off by {off}, {more} more FLOPs")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# The logits are the one activation whose gradient is already known in the forward. Chunking the loss therefore does not
# trade time for memory: no operation runs twice.
# :::

# %% [markdown]
# ## The whole step
#
# Per token, the blocks save $L A$ elements, or with checkpointing only their boundaries, $L d$. The last norm saves its
# input and a scale, $d + 1$. Its output, $d$, is saved for the head's backward. With the loss in one piece, the peak is
# in the head, where all of these are live:
#
# $$ 4 \, T \, (L A + 2 d + 1) + 12 \, T V \qquad \text{or} \qquad 4 \, T \, (L d + 2 d + 1) + 12 \, T V. $$
#
# With the chunked loss alone, the peak stays in the head, with the bytes of the chunked head instead of $12 \, T V$.
# With both, no logits are live at the peak: it is now at the end of backward, with the first block recomputed and all
# other gradients present, as in {doc}`03_synthetic_experiment`.

# %%
f, L, h = config.ff_dim, config.layers, config.heads
A = 10 * d + 2 * f + 3 * h + 2
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d + 2 * V * d


def by_hand(method, T):
    resident = 12 * P + 4 * (8 * L + 3) + 8 * (T + 1) + 8  # parameters and Adam states, step counts, ids, offsets
    saved = 4 * T * ((L * d if "checkpoint" in method else L * A) + 2 * d + 1)
    if "chunked" not in method:
        return resident + saved + 12 * T * V + 8
    if method == "chunked-loss":
        return resident + saved + chunked_bytes(T, V, k)
    gradients = 4 * (V * d + d + (L - 1) * P_block + d * f)
    return resident + gradients + 4 * T * (A + 2 * d + f) + 8


for method in methods:
    print(f"{method:24} measured - by hand: {runs[method].peak_bytes - by_hand(method, T)} bytes")

# %% [markdown]
# Which lowers the peak more on its own, checkpointing or the chunked loss? Decide with the formulas, then look at the
# table:

# %% tags=["hide-input"]
base = runs["baseline"]
rows = [
    {
        "method": method,
        "peak": round(run.peak_bytes / 2**20, 1),
        "saved": round(100 - 100 * run.peak_bytes / base.peak_bytes),
        "flops": round(run.flops / base.flops, 3),
    }
    for method, run in runs.items()
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
parts = {name: [runs[m].categories[name] for m in methods] for name in names}
parts["logits"] = [logits.get(m, 0) for m in methods]
for place, m in enumerate(methods):
    saved_logits = 0 if "chunked" in m else 4 * T * V
    parts["activations"][place] -= saved_logits
    parts["temporaries"][place] -= logits.get(m, 0) - saved_logits
figure = stacked_plot(methods, parts, "")
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
# ## FLOPs and time
#
# A matrix of $n$ weights costs $2 n$ FLOPs per token in forward and twice that in backward, so the head costs
# $3 \cdot 2 \, T V d$, in chunks or in one piece. Checkpointing adds one forward of the blocks, but none of the head.

# %%
forward = 2 * T * L * (4 * d**2 + 2 * d * f) + 4 * T**2 * L * d
print(f"the head is {6 * T * V * d / base.flops:.0%} of the baseline")
print(f"chunking adds {runs['chunked-loss'].flops - base.flops} FLOPs")
print(f"checkpointing adds {runs['checkpoint'].flops - base.flops:,}; one forward of the blocks is {forward:,}")

# %% [markdown]
# The methods take turns, and each round gives one ratio to the baseline. We print median, lowest and highest.

# %% tags=["measured-time", "nbval-ignore-output"]
times = ackpt.compare_seconds({m: partial(step, batches[0]) for m, step in steps.items()}, repeats=5)
for method, ratio in times.ratios.items():
    print(f"{method:24} x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")

# %% [markdown]
# ## The published sizes
#
# The published model has GPT-2's vocabulary and 12 blocks of width 1024. Our chunked loss again has 8 chunks. We count
# the parameters of our model:

# %%
published = lm.GPU
D, FF, W = published.dim, published.ff_dim, published.vocab_size
H, layers = published.model().heads, published.layers
N = layers * (4 * D**2 + 2 * D * FF + 2 * D + 2 * (D // H)) + D + 2 * W * D
print(f"{N:,} parameters; weights, gradients and Adam states {16 * N:,} bytes")

# %% [markdown]
# As in {doc}`03_synthetic_experiment`, the peaks of both models are predicted from shapes. The prediction misses one
# hidden copy, inside `logsumexp`: if the peak is in the chunked head, add up to $4 r V$ bytes.

# %% tags=["hide-input"]
predicted = [record for group in predict_experiment(published, SOURCE) for record in group]
for record in predicted:
    path = record.save(f"results/cpu/04_{report.file_name(record)}")
figures = load_reference("lm")
stored = Predictions()
configured = [stored.of(row) for row in published_figures() if row["step"] == "reference-language-model"]
measured = gpu_records("lm", dtype="bfloat16")
caption = (
    "Peaks of the language model: as published, predicted for the published model, and predicted for ours. Predictions "
    "are from shapes alone."
)
rows = report.published_rows(figures, configured, predicted, measured)
table = markdown_table(rows, report.PUBLISHED, caption, "tab-lm-published")
path = write_text_atomic("results/tables/04_published.md", table)
caption = "Published seconds of 499 steps of the language model, and the ratio of checkpoint to baseline."
table = markdown_table(report.published_times(figures), report.TIMES, caption, "tab-lm-times")
path = write_text_atomic("results/tables/04_times.md", table)
rows = [
    {
        "seq_len": f"{record.config['seq_len']:,}",
        "method": record.config["method"],
        "predicted": f"{record.metrics['peak_bytes'] / 2**20:,.1f}",
        "measured": report.measured_peak(record, measured),
    }
    for record in predicted
    if "chunked-loss" in record.config["method"]
]
columns = {name: report.PUBLISHED[name] for name in rows[0]}
caption = "Our model with the loss in 8 chunks at the published sizes, predicted from shapes alone."
path = write_text_atomic("results/tables/04_chunked.md", markdown_table(rows, columns, caption, "tab-lm-chunked"))

# %% [markdown]
# ```{include} ../../results/tables/04_published.md
# ```
#
# The source's table says 500 steps. Its loop, `range(1, 500)` in `run_lm_model.py`, runs 499, and a published peak is
# the largest of all of them. The seconds include reading and tokenizing the text, and a profiler that records ten
# steps. {doc}`13_predictions` predicts the ratios:
#
# ```{include} ../../results/tables/04_times.md
# ```
#
# No figures were published for a chunked loss. We predict ours:
#
# ```{include} ../../results/tables/04_chunked.md
# ```
#
# **The goal** was a peak of at most 5200 MB at 8192 tokens. We add the copy that the prediction may miss:

# %%
ours = {(p.config["method"], p.config["seq_len"]): p.metrics["peak_bytes"] for p in predicted}
best = ours["checkpoint+chunked-loss", 8192]
missed = 4 * math.ceil(8192 / published.loss_chunks) * W
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
# :::{admonition} Exercise 1: a larger vocabulary
# :class: note
# Current models have vocabularies of 128 000 entries and more. With $V = 128\,256$ and 8192 tokens, how many GiB do the
# weights, gradients and Adam states of the published model need, and how many do its logits, at 10 bytes each? Predict
# the peaks of `checkpoint` and `checkpoint+chunked-loss`: which bytes are live in the head, and at the end of backward?
# :::

# %% tags=["solution"]
two = ("checkpoint", "checkpoint+chunked-loss")
larger = replace(published, vocab_size=128_256, seq_lens=(8192,), methods=two)
print(f"weights, gradients, Adam: {16 * (N + 2 * D * (128_256 - W)) / 2**30:.1f} GiB")
print(f"logits: {10 * 128_256 * 8192 / 2**30:.1f} GiB")
# Both peaks are in the head, so the second prediction may miss logsumexp's copy, 4 r V bytes or 0.5 GiB.
(answers,) = predict_experiment(larger)
for record in answers:
    print(f"{record.config['method']:24} {record.metrics['peak_bytes'] / 2**30:.1f} GiB")

# %% [markdown]
# :::{admonition} Exercise 2: how many chunks?
# :class: note
# For the published model at 8192 tokens with checkpointed blocks: at how many chunks does the predicted peak stop
# falling, and why? Predict the peak for 2, 4, 8 and 16 chunks.
# :::

# %% tags=["solution"]
for n in (2, 4, 8, 16):
    ask = replace(published, loss_chunks=n, seq_lens=(8192,), methods=two[1:])
    peak = best if n == published.loss_chunks else next(predict_experiment(ask))[0].metrics["peak_bytes"]
    print(f"{n:2} chunks: {peak / 2**20:7.1f} MiB")

# %% [markdown]
# Once the logits of a chunk are small enough, the peak moves to a later moment of the step: the recomputation of the
# first block, with nearly all gradients complete. More chunks then only make the matrix products smaller.
#
# :::{admonition} Exercise 3: one matrix for both ends
# :class: note
# Many models *tie* the embedding and the head: both use one matrix of $V d$ elements. By how much does that lower the
# peak of `checkpoint+chunked-loss` for the model of this page? Predict it before you measure it, and consider when each
# gradient is allocated.
# :::

# %% tags=["solution"]
_, measure = build("checkpoint+chunked-loss", tied=True)
tied = measure(batches[0]).peak_bytes
print(f"measured {runs['checkpoint+chunked-loss'].peak_bytes - tied:,}; 12 V d + 4 = {12 * V * d + 4:,}")

# %% [markdown]
# The peak falls by one weight and its two Adam averages, 12 bytes per element, and by one step count. It does not fall
# by a gradient: tied or not, at the peak the head's gradient is live and the embedding's is not yet allocated.
#
# ## What we have seen
#
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
# As in {doc}`03_synthetic_experiment`, we compute the causes from shapes. Here the blocks of both models read and write
# fp32.
#
# - Separate projections: autocast converts their common input three times.
# - The unfused norms save products in fp32. The final norm is applied after every block.
# - A logit needs 14 bytes in the loss: bf16, kept by the loop's variable (2), the log-probabilities and two gradients
#   in fp32 (4 each).
# - Gradients are never set to zero, so they are live in the loss.
# - Embedding and head share one weight, which saves 12 bytes per element.

# %% tags=["hide-input"]
make_theirs = partial(reference.Block, D, FF, published.head_dim, reference.PackedFlashAttention.apply)
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
path = write_text_atomic("results/tables/04_causes.md", markdown_table(rows, columns, caption, "tab-lm-causes"))

# %% [markdown]
# ```{include} ../../results/tables/04_causes.md
# ```
#
# All six published peaks are in the backward of the loss: weights, gradients and Adam states ($16 P$), the workspaces,
# bf16 copies of all weights (with checkpointing, only of the head), the blocks and norms, the logits, the head's input
# in bf16 and the ids.

# %%
saved_by_block = {"baseline": A_theirs, "checkpoint": 4 * D + norm}
copies = {"baseline": 2 * P_theirs, "checkpoint": 2 * W * D}
for row in figures["rows"]:
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
# - The published peaks and times are from the public repository `sashaboriskin/activation_checkpointing`.
# - {cite:t}`merity2016`: wikitext-103, the text of the published runs.
# - {cite:t}`sennrich2016`: byte-pair encoding, which the tokenizer uses.
