# %% [markdown]
# # A language model
#
# After this chapter you know why checkpointing the blocks is only half of the work for a language model, and how to
# compute its loss without ever allocating all logits.

# %% [markdown]
# ## Goals
#
# - Train a language model on real text with four methods, and see that they learn the same.
# - Derive the memory of the vocabulary head, tokens times vocabulary times copies, and measure it.
# - Compute the loss in chunks, so that never all logits are live at once, without additional FLOPs.
# - Derive the peak of all four methods, to the byte.
# - Predict the peaks at the published sizes. The goal is at most 5200 MB where 15977 MB were published.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $T$ | tokens in the batch; a batch is one sequence here, so $T$ is its length |
# | $V$ | entries in the model's vocabulary |
# | $k$, $r$ | chunks of the loss, and tokens in a chunk: $r = \lceil T / k \rceil$ |
# | $L$, $d$, $f$, $h$ | blocks; width of the model, of the MLP; heads |
# | $P_\text{block}$, $P$ | parameters of one block, of the model |
# | $A$ | elements that one block saves per token, from {doc}`01_where_memory_goes` |

# %%
import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

import ackpt
from ackpt import plots
from ackpt.data import corpus_fingerprint, embedded_corpus, token_stream, train_tokenizer
from ackpt.experiments import lm
from ackpt.experiments.reports import training as report
from ackpt.experiments.reports.figures import stacked_plot
from ackpt.experiments.reports.gpu_records import gpu_records
from ackpt.experiments.steps.predicted import predict_experiment
from ackpt.experiments.steps.training import adamw, configure, one_step
from ackpt.metering.meter import measure
from ackpt.results import load_reference, markdown_table, write_text_atomic

torch.set_num_threads(2)
SOURCE = "notebooks/04_language_model.py"
config = replace(lm.CPU, steps=20)

# %% [markdown]
# ## The text
#
# The published experiment reads wikitext-103. This page reads a text that needs no network: the *embedded* corpus, the
# language reference in Python's standard library (`pydoc_data.topics`). The text depends on the version of Python, so
# we print its fingerprint.

# %%
text = embedded_corpus()
print(f"{len(text):,} characters, {len(text.encode()):,} bytes")
print("sha256", corpus_fingerprint(text))

# %% [markdown]
# The tokenizer uses byte-pair encoding over bytes and is trained on the same corpus.

# %%
tokenizer = train_tokenizer(text, config.tokenizer_vocab)
ids = tokenizer.encode("A class definition is an executable statement.").ids
[tokenizer.decode([i]) for i in ids]

# %%
stream = token_stream(config.dataset, config.tokenizer_vocab)
print(f"{len(stream):,} tokens, {len(text) / len(stream):.2f} characters each")

# %% [markdown]
# We compare the losses with two values. A model that knows nothing assigns the same probability to all $V$ tokens, and
# its loss is $\ln V$. A model that knows how often each token occurs, but ignores the context, has the entropy of these
# frequencies as its loss.

# %%
frequency = torch.bincount(stream).double() / len(stream)
frequency = frequency[frequency > 0]
entropy = float(-(frequency * frequency.log()).sum())
print(f"ln V = {math.log(config.vocab_size):.4f}, entropy of the frequencies = {entropy:.4f} nats")

# %% [markdown]
# :::{admonition} wikitext
# :class: note
# `ackpt lm --dataset wikitext` streams wikitext-103-raw-v1 from the Hugging Face hub, and `--dataset-path FOLDER` reads
# a local copy (parquet or arrow). If neither is available, the command stops with an error; it never replaces one
# corpus by another.
# :::

# %% [markdown]
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
# of $V \times d$ weights after them. Embedding and head are not tied. On the command line, the run of this page is
# `ackpt lm`.

# %%
records = [record for group in lm.run_lm(config, SOURCE) for record in group]
for record in records:
    path = record.save(f"results/cpu/04_{report.file_name(record)}")

# %%
lengths, methods = config.seq_lens, config.methods
runs = {(r.config["method"], r.config["seq_len"]): r.metrics for r in records}

# %% [markdown]
# Checkpointing leaves the loss of every step equal to the last bit. The chunked loss sums in another order, so it may
# differ in the last digits of fp32. The two methods with a chunked loss again agree to the last bit.

# %%
for T in lengths:
    base, ckpt, chunked, both = (runs[m, T]["losses"] for m in methods)
    off = max(abs(a - b) for a, b in zip(base, chunked))
    print(f"T = {T}: baseline == checkpoint at all {len(base)} steps: {base == ckpt}")
    print(f"         chunked-loss == checkpoint+chunked-loss: {chunked == both}")
    print(f"         chunked-loss within 0.00001 of baseline: {off < 1e-5}")

# %% tags=["hide-input"]
shown = sorted({1, 5, 10, config.steps})
rows = [{"method": m} | {f"step {n}": f"{runs[m, lengths[-1]]['losses'][n - 1]:.4f}" for n in shown} for m in methods]
columns = {name: name for name in rows[0]}
caption = f"Losses (nats per token) of the four methods at {lengths[-1]} tokens, to four decimal places."
table = markdown_table(rows, columns, caption, "tab-lm-losses")
path = write_text_atomic("results/tables/04_losses.md", table)

# %% [markdown]
# ```{include} ../../results/tables/04_losses.md
# ```

# %% alt="Loss over twenty steps for two sequence lengths: both fall from the logarithm of the vocabulary size, a dashed line at 8.3 nats, towards the entropy of the token frequencies, a dashed line at 6.2 nats, and cover about a third of the distance."
steps = range(1, config.steps + 1)
losses = {T: runs["baseline", T]["losses"] for T in lengths}
agree = sum(a == b for T in lengths for a, b in zip(losses[T], runs["checkpoint", T]["losses"]))
figure = plots.line_plot(
    steps,
    measured={f"{T} tokens": losses[T] for T in lengths},
    predicted={
        "ln V": [math.log(config.vocab_size)] * len(steps),
        "entropy of the\nfrequencies": [entropy] * len(steps),
    },
    title=f"The model learns from real text, and checkpointing leaves {agree} of "
    f"{len(lengths) * len(steps)} losses equal to the last bit",
    xlabel="step",
    ylabel="loss (nats per token)",
    unit=1,
)
axes = figure.axes[0]
axes.set_ylim(math.floor(entropy), math.log(config.vocab_size) + 0.2)
axes.set_yticks([6, 7, 8])
path = plots.save(figure, "results/figures/04_losses.png")
figure

# %% [markdown]
# Does the model learn more than frequencies? We train for 150 steps with a larger learning rate. If the loss falls
# below the entropy of the frequencies, the model must be using the context. (Over 150 steps, a difference in the last
# bit of a sum grows into the second decimal place of the loss, and processors differ in that bit. The tests therefore
# compare this loss with the entropy, not with the loss on this page.)

# %% tags=["nbval-ignore-output"]
lean = "checkpoint+chunked-loss"
longer = lm.task(replace(config, steps=150), 256)
model = longer.build()
configure(model, lean)
optimizer = adamw(model, 1e-3)
late = [one_step(longer, model, optimizer, longer.batch(i), lean) for i in range(150)]
assert sum(late[-20:]) / 20 < entropy
print(f"mean loss of the last 20 steps: {sum(late[-20:]) / 20:.2f} nats")


# %% tags=["nbval-ignore-output"]
def likely(prompt):
    ids = torch.tensor(tokenizer.encode(prompt).ids)
    offsets = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        logits = model(ids, offsets, len(ids))[-1]
    return [tokenizer.decode([i]) for i in logits.topk(3).indices]


{prompt: likely(prompt) for prompt in ("It is", "instead of")}

# %% [markdown]
# ## What the head costs
#
# The head computes $V$ logits from the $d$ elements of each token, one for each entry of the vocabulary. No other
# tensor in the model is as wide: GPT-2's vocabulary has 50257 entries. The loss of the baseline allocates three tensors
# of $T V$ elements that are live together when backward begins:
#
# 1. the log-probabilities, saved by the forward (the logits themselves are freed by then),
# 2. the gradient with respect to the log-probabilities,
# 3. the gradient with respect to the logits.
#
# $$ \text{head} = T \cdot V \cdot 4 \text{ bytes} \cdot 3 \text{ copies} $$
#
# We measure the head alone, without a model:

# %%
d, V, T, k = config.dim, config.vocab_size, lengths[-1], config.loss_chunks
states = torch.randn(T, d, requires_grad=True)
head = torch.nn.Linear(d, V, bias=False)
targets = torch.randint(V, (T,))


# %%
def baseline_head():
    states.grad = head.weight.grad = None
    F.cross_entropy(head(states), targets).backward()


baseline = measure(baseline_head, resident=[states, head, targets], repeats=0)
print(f"{T} x {V} x 4 bytes x 3 copies = {T * V * 4 * 3:,}")
print(f"measured {baseline.dynamic_peak_bytes:>32,}")

# %% [markdown]
# (The additional 8 bytes are the loss and its gradient.)
#
# ## The logits, in chunks
#
# The gradient of the cross-entropy can be computed in the forward already. For one token with logits $z$ and target
# $y$, it is
#
# $$ \frac{\partial \ell}{\partial z} = \operatorname{softmax}(z) - e_y. $$
#
# So as soon as a token's logits are computed, we can also compute their gradient, and from it the token's contribution
# to the gradients of its hidden state and of the weight. `ackpt.chunked_cross_entropy` processes $r$ tokens at a time:
# it computes logits, loss and gradients, and frees the logits before the next chunk. Backward only multiplies by the
# gradient of the loss.
#
# The chunked head allocates the gradients of the weight and of the hidden states, which every method needs, and the
# logits of one chunk in two copies, because `logsumexp` makes a copy internally:
#
# $$ \text{chunked head} = 4 \, V d + 4 \, T d + 2 \cdot 4 \, r V \text{ bytes} $$
#
# It also allocates a mask of $T$ bytes, two elements for each row of a chunk, and two for the loss.


# %%
def chunked_bytes(T, V, k):
    r = math.ceil(T / k)
    return 4 * V * d + 4 * T * d + 8 * r * V + T + 8 * r + 8


# %%
def chunked_head(k):
    states.grad = head.weight.grad = None
    ackpt.chunked_cross_entropy(states, head.weight, targets, chunks=k).backward()


# %%
for n in (2, 4, 8, 16, 32):
    run = measure(partial(chunked_head, n), resident=[states, head, targets], repeats=0)
    size, more = run.dynamic_peak_bytes, run.flops - baseline.flops
    off = size - chunked_bytes(T, V, n)
    print(f"{n:2} chunks: {size:>10,} bytes, formula off by {off}, {more} more FLOPs")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# The logits are the one activation whose gradient is known in the forward already. Chunking the loss therefore does not
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
# With both, the peak moves to a moment without logits: the end of backward, in the recomputed first block, when the
# gradients of all other blocks are complete, as in {doc}`03_synthetic_experiment`.

# %%
f, L, h = config.ff_dim, config.layers, config.model().heads
A = 10 * d + 2 * f + 3 * h + 2
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d + 2 * V * d


# %%
def by_hand(method, T):
    resident = 12 * P + 4 * (8 * L + 3) + 8 * (T + 1) + 8  # parameters and Adam states, step counts, ids, offsets
    saved = 4 * T * ((L * d if "checkpoint" in method else L * A) + 2 * d + 1)
    if "chunked" not in method:
        return resident + saved + 12 * T * V + 8
    if method == "chunked-loss":
        return resident + saved + chunked_bytes(T, V, k)
    gradients = 4 * (V * d + d + (L - 1) * P_block + d * f)
    return resident + gradients + 4 * T * (A + 2 * d + f) + 8


# %%
for m in methods:
    off = [runs[m, T]["peak_bytes"] - by_hand(m, T) for T in lengths]
    print(f"{m:24} measured - by hand: {off} bytes")

# %% tags=["hide-input"]
rows = []
for m in methods:
    row = {"method": m}
    for n in lengths:
        peak, base = runs[m, n]["peak_bytes"], runs["baseline", n]["peak_bytes"]
        row |= {f"{n}": round(peak / 2**20, 1), f"saved {n}": round(100 - 100 * peak / base, 1)}
    flops = runs[m, lengths[-1]]["flops"] / runs["baseline", lengths[-1]]["flops"]
    rows.append(row | {"flops": round(flops, 4)})
columns = {"method": "method"}
for n in lengths:
    columns |= {f"{n}": f"{n} tokens, MiB", f"saved {n}": "reduction, %"}
columns["flops"] = f"FLOPs at {lengths[-1]}, ratio"
caption = f"Measured peaks of one training step on the CPU (vocabulary {V}, {k} chunks); FLOPs relative to baseline."
table = markdown_table(rows, columns, caption, "tab-lm")
path = write_text_atomic("results/tables/04_lm.md", table)

# %% [markdown]
# ```{include} ../../results/tables/04_lm.md
# ```
#
# What is live at the peak of each method? The meter distinguishes activations, recomputed ones and temporaries. The
# formulas above give the part that is logits:

# %%
r = math.ceil(T / k)
logits = {"baseline": 12 * T * V, "checkpoint": 12 * T * V, "chunked-loss": 8 * r * V}
for m in methods:
    size, peak = logits.get(m, 0), runs[m, T]["peak_bytes"]
    print(f"{m:24} logits {size:>10,} of {peak:>10,} bytes: {size / peak:.0%}")

# %% alt="Stacked bars of the memory at the peak for four methods, from the bottom: parameters, optimizer, gradients, activations, recomputed activations, temporaries, logits. Logits are the largest part of baseline, nearly everything above parameters and optimizer with checkpoint, a thin slice with chunked-loss, and absent with both."
names = ("parameters", "inputs", "optimizer", "gradients", "activations", "recomputed", "temporaries")
parts = {name: [runs[m, T]["categories"][name] for m in methods] for name in names}
parts["logits"] = [logits.get(m, 0) for m in methods]
for place, m in enumerate(methods):
    waiting = 0 if "chunked" in m else 4 * T * V
    parts["activations"][place] -= waiting
    parts["temporaries"][place] -= logits.get(m, 0) - waiting
share = logits["checkpoint"] / runs["checkpoint", T]["dynamic_peak_bytes"]
before, after = (runs[m, T]["peak_bytes"] / 2**20 for m in ("checkpoint", lean))
figure = stacked_plot(
    methods,
    parts,
    f"Logits are {share:.0%} of the dynamic memory at the checkpointed peak; "
    f"chunking the loss lowers that peak from {before:.1f} to {after:.1f} MiB",
)
path = plots.save(figure, "results/figures/04_at_the_peak.png")
figure

# %% [markdown]
# Neither method is enough alone. Checkpointing leaves the logits, chunking leaves the activations of the blocks, and
# what is left determines the peak. With both, only one block or one chunk is live at a time.
#
# ## FLOPs and time
#
# A matrix of $n$ weights costs $2 n$ FLOPs per token in forward and twice that in backward, so the head costs
# $3 \cdot 2 \, T V d$, in chunks or in one piece. Checkpointing adds one forward of the blocks, but none of the head.

# %%
for n in lengths:
    head_flops = 6 * n * V * d
    forward = 2 * n * L * (4 * d**2 + 2 * d * f) + 4 * n**2 * L * d
    flops = {m: runs[m, n]["flops"] for m in methods}
    chunking = flops["chunked-loss"] - flops["baseline"]
    checkpointing = flops["checkpoint"] - flops["baseline"]
    print(f"T = {n}: the head is {head_flops / flops['baseline']:.0%} of the baseline")
    print(f"  chunking adds {chunking} FLOPs, checkpointing {checkpointing:,}")
    print(f"  which is one forward of the blocks: {checkpointing == forward}")

# %% [markdown]
# Each line below gives the time of the median step on this machine, and the ratio to the baseline of the same round:
# median, lowest and highest. (The median of ratios need not be the ratio of the medians.)

# %% tags=["measured-time", "nbval-ignore-output"]
for m in methods:
    for n in lengths:
        ratio, step = runs[m, n]["seconds_ratio"], runs[m, n]["seconds_step"]["median"]
        spread = f"x {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        print(f"{m:24} T = {n}: {1e3 * step:6.1f} ms, {spread}")

# %% [markdown]
# ## The published sizes
#
# The published model has GPT-2's vocabulary and 12 blocks of width 1024. We count its parameters:

# %%
published = lm.GPU
D, FF, W = published.dim, published.ff_dim, published.vocab_size
H, layers = published.model().heads, published.layers
N = layers * (4 * D**2 + 2 * D * FF + 2 * D + 2 * (D // H)) + D + 2 * W * D
print(f"{N:,} parameters; with gradients and Adam states")
print(f"{16 * N:,} bytes = {16 * N / 2**20:.1f} MiB")

# %% [markdown]
# The peaks are predicted from shapes alone. First we check the prediction at the longest sequence measured above:
# predicted minus measured, in bytes.

# %%
(shapes,) = predict_experiment(replace(config, seq_lens=(T,)), SOURCE)
for record in shapes:
    m = record.config["method"]
    print(f"{m:24} {record.metrics['peak_bytes'] - runs[m, T]['peak_bytes']:10,}")

# %% [markdown]
# Both differences have a known cause. The ids and the targets of a real batch share one storage of $T + 1$ elements,
# while the prediction allocates them separately: $8 (T - 1)$ bytes more. The copy that `logsumexp` allocates internally
# cannot be seen from shapes: if the peak is in the chunked head, the prediction is up to $4 r V$ bytes too low.

# %%
8 * (T - 1), -4 * r * V

# %%
predicted = [record for group in predict_experiment(published, SOURCE) for record in group]
for record in predicted:
    path = record.save(f"results/cpu/04_{report.file_name(record)}")

# %% tags=["hide-input"]
gpu = gpu_records("lm", dtype="bfloat16")
reference = load_reference("lm")
rows = report.published_rows(reference, predicted, gpu)
for row in rows:
    row["published"] = row["published"] or "–"
columns = {
    "seq_len": "tokens",
    "method": "method",
    "published": "published by others, MB",
    "predicted": "ours, predicted, MiB",
    "measured": "ours, measured, MiB",
}
caption = (
    "Peaks of the language model at the published sizes: as printed by others, and for our model. Predictions are from "
    "shapes alone: nothing was run."
)
table = markdown_table(rows, columns, caption, "tab-lm-published")
path = write_text_atomic("results/tables/04_published.md", table)

# %% [markdown]
# ```{include} ../../results/tables/04_published.md
# ```

# %% alt="Bars of the peak at three sequence lengths: published baseline, predicted baseline, published checkpoint, predicted checkpoint, predicted checkpoint with chunked loss. The last is almost equal at all lengths, a quarter of the published baseline at the longest."
theirs = {(row["method"], row["seq_len"]): row["peak"] * 2**20 for row in reference["rows"]}
ours = {(p.config["method"], p.config["seq_len"]): p.metrics["peak_bytes"] for p in predicted}
long = published.seq_lens
best = ours["checkpoint+chunked-loss", long[-1]]
figure = plots.bar_plot(
    long,
    {
        "baseline, published": [theirs["baseline", n] for n in long],
        "baseline, predicted": [ours["baseline", n] for n in long],
        "checkpoint, published": [theirs["checkpoint", n] for n in long],
        "checkpoint, predicted": [ours["checkpoint", n] for n in long],
        "both, predicted": [ours["checkpoint+chunked-loss", n] for n in long],
    },
    f"With both, the predicted peak at {long[-1]} tokens is "
    f"{best / theirs['baseline', long[-1]]:.0%} of the published baseline and "
    f"{best / theirs['checkpoint', long[-1]]:.0%} of the published checkpoint",
    xlabel="tokens in the sequence",
)
path = plots.save(figure, "results/figures/04_published.png")
figure

# %% [markdown]
# **The goal** was a peak of at most 5200 MB at 8192 tokens. To the prediction we add the copy that it may miss:

# %%
missed = 4 * math.ceil(long[-1] / published.loss_chunks) * W
for name, size in {"predicted": best, "predicted, plus the copy": best + missed}.items():
    print(f"{name:28} {size / 1e6:.0f} MB = {size / 2**20:.0f} MiB: {size <= 5200e6}")

# %%
print(f"weights, gradients and Adam states: {16 * N / best:.0%} of the predicted peak")

# %% [markdown]
# To lower the peak further, one would have to reduce these.
#
# ### The slopes, ours and theirs
#
# As in {doc}`03_synthetic_experiment`, a slope is the memory of one more token. In bf16 a block saves
# $24 d + 4 f + 12 h + 8$ bytes per token, and its boundary has $4 d$. When backward begins, three tensors of the
# logits' shape are live: the log-probabilities in bf16, a copy of them in fp32 for the loss, and the gradient in fp32.
# That makes 10 bytes per logit.


# %%
def slope(peak, method):
    return (peak[method, long[-1]] - peak[method, long[0]]) / (long[-1] - long[0])


block_bytes = 24 * D + 4 * FF + 12 * H + 8
hand = {"baseline": layers * block_bytes + 10 * W, "checkpoint": layers * 4 * D + 10 * W}
for m, size in hand.items():
    print(f"{m}, bytes per token: blocks and logits by hand {size:,}")
    print(f"  predicted {slope(ours, m):,.0f}, published {slope(theirs, m):,.0f}")

# %% [markdown]
# Subtract the boundaries from the published slope of `checkpoint`, and divide the rest by the size of the vocabulary:

# %%
print(f"{(slope(theirs, 'checkpoint') - layers * 4 * D) / W:.2f} bytes per logit")

# %% [markdown]
# Sixteen bytes per logit correspond to four copies in fp32. At 8192 tokens, they are most of the published memory with
# checkpointed blocks.
#
# The formulas also show when a vocabulary is large. Blocks and logits need the same memory per token if
# $10 V = L \, (24 d + 4 f + 12 h + 8)$. With checkpointed blocks, we compare the logits with the boundaries instead:

# %%
print(f"V = {layers * block_bytes / 10:,.0f}; GPT-2 has {W:,}")
print(f"logits / boundaries = {10 * W / (layers * 4 * D):.1f}")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# With GPT-2's vocabulary, the logits need as much memory as all twelve blocks. Once the blocks are checkpointed, they
# need ten times as much as the boundaries. Chunk the loss first: it adds no FLOPs.
# :::

# %% [markdown]
# The numbers of this page were measured here:

# %% tags=["measured-time", "nbval-ignore-output"]
records[0].environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: a larger vocabulary
# :class: note
# Current models have vocabularies of 128 000 entries and more. With $V = 128\,256$ and 8192 tokens, how many GiB do the
# weights, gradients and Adam states of the published model need, and how many do its logits? Predict the peaks of
# `checkpoint` and `checkpoint+chunked-loss`.
# :::

# %% tags=["solution"]
larger = replace(
    published,
    vocab_size=128_256,
    seq_lens=(8192,),
    methods=("checkpoint", "checkpoint+chunked-loss"),
)
print(f"weights, gradients, Adam: {16 * (N + 2 * D * (128_256 - W)) / 2**30:.1f} GiB")
print(f"logits: {10 * 128_256 * 8192 / 2**30:.1f} GiB")
(answers,) = predict_experiment(larger)
for record in answers:
    print(f"{record.config['method']:24} {record.metrics['peak_bytes'] / 2**30:.1f} GiB")

# %% [markdown]
# :::{admonition} Exercise 2: how many chunks?
# :class: note
# For the published model at 8192 tokens with checkpointed blocks: from how many chunks on does the peak stop falling,
# and why? Predict the peak for 2, 4, 8 and 16 chunks.
# :::

# %% tags=["solution"]
for n in (2, 4, 8, 16):
    ask = replace(published, loss_chunks=n, seq_lens=(8192,), methods=(lean,))
    ((answer,),) = predict_experiment(ask)
    print(f"{n:2} chunks: {answer.metrics['peak_bytes'] / 2**20:7.1f} MiB")

# %% [markdown]
# Once a chunk is smaller than what a later moment of the step needs, the peak moves to that moment: the recomputed
# first block, with nearly all gradients complete. More chunks then only make the matrix products smaller.
#
# :::{admonition} Exercise 3: one matrix for both ends
# :class: note
# Many models *tie* the embedding and the head: both use one matrix of $V d$ elements. By how much does that lower the
# peak of `checkpoint+chunked-loss` for the model of this page? Predict it before you measure it, and consider when each
# gradient is allocated.
# :::

# %% tags=["solution"]
task = lm.task(config, T)


def peak(tied):
    model = task.build()
    if tied:
        model.head.weight = model.embedding.weight
    configure(model, lean)
    optimizer, batch = adamw(model, 3e-4), task.batch(0)
    owned = (model, optimizer, *task.tensors(batch))
    step = partial(one_step, task, model, optimizer, batch, lean)
    return measure(step, resident=owned, repeats=0).peak_bytes


print(f"measured {peak(False) - peak(True):,}; 12 V d + 4 = {12 * V * d + 4:,}")

# %% [markdown]
# The peak falls by one weight and its two Adam averages, 12 bytes per element, and by one step count. It does not fall
# by a gradient: tied or not, at the peak the head's gradient is live and the embedding's is not yet allocated.
#
# ## What we have seen
#
# - Four methods learn the same from real text. Checkpointing changes no bit of the losses; chunking the loss changes
#   only the order of a sum.
# - The logits cost tokens times vocabulary times copies: 12 bytes per logit in fp32, 10 in bf16 here, and 16 in the
#   published runs.
# - The gradient of the logits is known as soon as the logits are, so the loss can be computed in chunks, without
#   additional FLOPs.
# - Checkpointed blocks and a chunked loss belong together. At the published size and 8192 tokens, they are predicted to
#   need about a quarter of the published baseline, and most of that is weights, gradients and Adam states.
#
# ## Sources
#
# - {cite:t}`merity2016`: wikitext-103, the text of the published runs.
# - {cite:t}`sennrich2016`: byte-pair encoding, which the tokenizer uses.
