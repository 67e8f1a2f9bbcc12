# %% [markdown]
# # What do the logits cost?
#
# **Once the blocks are checkpointed, what fills the memory of a training step?**

# %% [markdown]
# ```{figure} ../../results/figures/04_at_the_peak.png
# :alt: Stacked bars of the memory at the peak for four methods, from the bottom: parameters, optimizer, gradients, activations, recomputed activations, temporaries, logits. Logits are the largest part of baseline, nearly everything above parameters and optimizer with checkpoint, a thin slice with chunked-loss, and absent with both.
# :class: dark-light
#
# Memory at the peak of one step on a CPU, with four methods: only the loss in chunks reduces the logits.
# ```
#
# The logits fill the memory: with a large vocabulary, they need as much as all blocks together, and checkpointing does
# not reduce them. A loss in chunks of tokens reduces them, without recomputing anything.

# %% tags=["hide-input"]
import math
import warnings
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.models import LanguageModel, TransformerConfig
from experiments import head_chunks, lm
from experiments.data import packed_batches, token_stream
from experiments.graph_profile import orders_plot
from experiments.published import reference
from experiments.reports import plots
from experiments.reports import training as report
from experiments.reports.figures import logits_plot, losses_plot, stacked_plot
from experiments.reports.gpu_records import gpu_records
from experiments.results import environment, markdown_table, write_text_atomic
from experiments.steps.predicted import predict_experiment
from experiments.suite.chapters import measure_here

torch.set_num_threads(2)
warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that transformers does not show
SOURCE = "notebooks/04_logits.py"

# %% [markdown]
# On a GPU, the next two cells also run the published experiments, for at most `minutes` ({doc}`12_your_gpu`).

# %% tags=["parameters", "hide-input"]
device, tier, dataset, minutes = "auto", "auto", "embedded", 10

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
measure_here(
    "lm", device=device, tier=tier, dataset=dataset, minutes=minutes
)

# %% [markdown]
# ## A language model
#
# The published experiment (see Sources) reads wikitext-103. This page needs no network: its corpus, `embedded`,
# consists of the names of Unicode's characters, on which a byte-pair encoding is trained. The model reads $T$ tokens
# and predicts the next one at each position.

# %%
lm_config = TransformerConfig(
    dim=128, ff_dim=512, layers=4, head_dim=32, vocab_size=4096
)
T, V, chunks = 512, lm_config.vocab_size, 8
stream = token_stream("embedded", V)
batches = list(packed_batches(stream, T, batch_size=1, steps=10))
print(
    f"{len(stream):,} tokens; the first batch "
    f"reads {batches[0].tokens[:4].tolist()}..."
)
print(f"and predicts {batches[0].targets[:4].tolist()}...")

# %% [markdown]
# The model has causal attention, an embedding before its $L$ blocks of width $d$, and after them a head of $V \times d$
# weights for a vocabulary of $V$ entries. The head computes the *logits*, one score per token and entry. We compare the
# baseline, checkpointed blocks, a loss in chunks, and both together.

# %%
def forward(model, x, offsets, longest, method):
    for block in model.blocks:
        if "checkpoint" in method:
            x = ackpt.checkpoint(block, x, offsets, longest)
        else:
            x = block(x, offsets, longest)
    return model.norm(x)


def loss_of(model, batch, method):
    x = forward(
        model,
        model.embedding(batch.tokens),
        batch.cu_seqlens,
        batch.max_seqlen,
        method,
    )
    if "chunked-loss" in method:
        return ackpt.chunked_cross_entropy(
            x, model.head.weight, batch.targets, chunks=chunks
        )
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

    def metered(meter, batch):
        return meter(
            partial(step, batch),
            resident=(
                model,
                optimizer,
                batch.tokens,
                batch.targets,
                batch.cu_seqlens,
            ),
        )

    return step, metered


# %% [markdown]
# A model that knows nothing assigns the same probability to all $V$ tokens; its loss is $\ln V$.

# %%
lm_methods = (
    "baseline",
    "checkpoint",
    "chunked-loss",
    "checkpoint+chunked-loss",
)
lm_runs, lm_steps, lm_losses = {}, {}, {}
measure = partial(ackpt.measure, repeats=0)
print(f"ln V = {math.log(V):.4f}")
for method in lm_methods:
    lm_steps[method], metered = build_lm(method)
    lm_losses[method] = [
        float(lm_steps[method](batch)) for batch in batches
    ]
    lm_runs[method] = metered(measure, batches[0])
    print(
        f"{method:24} losses {lm_losses[method][0]:.4f} "
        f"... {lm_losses[method][-1]:.4f}"
    )

# %% [markdown]
# Checkpointed losses equal the baseline's, bit for bit. The chunked loss sums in another order, so its last digits may
# differ.

# %%
base, checkpointed, chunked, both = lm_losses.values()
print(f"checkpoint equal to baseline: {base == checkpointed}")
print(f"checkpoint+chunked-loss equal to chunked-loss: {chunked == both}")
print(
    "chunked-loss within 0.00001 of baseline: "
    f"{max(abs(a - b) for a, b in zip(base, chunked)) < 1e-5}"
)

# %% [markdown]
# We run the experiment of `python -m experiments lm` with a smaller model at three lengths:

# %%
small = replace(
    lm.CPU,
    seq_lens=(128, 256, 512),
    steps=120,
    methods=lm_methods[:2],
    dim=64,
    ff_dim=256,
    head_dim=16,
)
small = replace(small, vocab_size=2048, tokenizer_vocab=2048)
curves = {}
for records in lm.run_lm(small, timed_rounds=0):
    name = f"{records[0].config['seq_len']} tokens"
    curves[name] = {
        record.config["method"]: record.metrics["losses"]
        for record in records
    }
    differences = {a - b for a, b in zip(*curves[name].values())}
    print(
        f"{name}: {len(curves[name]['baseline'])} "
        f"steps, differences {differences}"
    )

# %% tags=["hide-input"] alt="Loss over the training steps at three lengths, in three pairs of axes. In each, the loss falls, and the dashed curve with checkpointing coincides with the baseline's."
figure = losses_plot(report.measured_losses(gpu_records("lm")) or curves, "")
path = plots.save(figure, "results/figures/04_losses.png")
figure

# %% [markdown]
# *Loss without and with checkpointing. On a CPU, both are equal to the last bit at every step.*
#
# ## What the head costs

# %% tags=["hide-input"] alt="Two rectangles of the same height, 8,192 tokens. The hidden states are a thin strip of 1,024 elements per token. The logits are 49 times as wide, and an eighth of their height is filled: one chunk."
figure = logits_plot(8192, lm.GPU.dim, lm.GPU.vocab_size, lm.GPU.loss_chunks)
path = plots.save(figure, "results/figures/04_logits.png")
figure

# %% [markdown]
# *Hidden states and logits of the published language model, drawn to scale. A loss in chunks allocates only the filled
# part at a time.*
#
# ```{margin}
# The logits themselves are freed by then.
# ```
#
# When backward begins, the baseline's loss has three tensors of $T V$ elements: the log-probabilities, their gradient,
# and the gradient of the logits.
#
# $$ \text{head} = T \cdot V \cdot 4 \text{ bytes} \cdot 3 \text{ copies} $$
#
# We measure the head alone; the other 8 bytes are the loss and its gradient:

# %%
d_lm = lm_config.dim
hidden = torch.randn(T, d_lm, requires_grad=True)
head = torch.nn.Linear(d_lm, V, bias=False)
targets = torch.randint(V, (T,))


def baseline_head():
    hidden.grad = head.weight.grad = None
    F.cross_entropy(head(hidden), targets).backward()


baseline = ackpt.measure(
    baseline_head, resident=[hidden, head, targets], repeats=0
)
print(f"{T} x {V} x 4 bytes x 3 copies = {T * V * 4 * 3:,}")
print(f"measured {baseline.dynamic_peak_bytes:>32,}")

# %% [markdown]
# ## The loss in chunks
#
# The forward can already compute the gradient of the cross-entropy. A bar marks a gradient of the loss. For one token
# with logits $z$,
#
# $$ \bar z = \operatorname{softmax}(z) - \operatorname{onehot}(\text{target}). $$
#
# From $\bar z$ follow the gradient of the token's hidden state and the token's share of the weight's gradient:

# %%
def chunked_loss(hidden, weight, targets, chunks):
    """The mean loss, and the gradients of states and weight."""
    loss, grad_weight, grad_states = 0, torch.zeros_like(weight), []
    for x, y in zip(hidden.chunk(chunks), targets.chunk(chunks)):
        logits = x @ weight.T
        loss += F.cross_entropy(logits, y, reduction="sum") / len(targets)
        grad = logits.softmax(-1)
        grad[range(len(y)), y] -= 1
        grad /= len(targets)
        grad_states.append(grad @ weight)
        grad_weight += grad.T @ x
    return loss, torch.cat(grad_states), grad_weight


with torch.no_grad():
    loss, *by_chunks = chunked_loss(hidden, head.weight, targets, chunks)
for ours, grad in zip(by_chunks, (hidden.grad, head.weight.grad)):
    torch.testing.assert_close(ours, grad)

# %% [markdown]
# `ackpt.chunked_cross_entropy` is this loop as one differentiable function. It allocates the gradients of the weight
# and of the hidden states. For a chunk of $T_\text{chunk}$ tokens, it allocates the logits, which become $\bar z$ in
# place, and the product of $\bar z$ and the weight, the gradient of the chunk's hidden states:
#
# $$ \text{chunked head} = 4 \, V d + 4 \, T d + 4 \, T_\text{chunk} (V + d) \text{ bytes} $$
#
# The code also counts a mask and the loss.

# %%
def chunked_bytes(T, V, chunks):
    T_chunk = math.ceil(T / chunks)
    return 4 * V * d_lm + 4 * T * d_lm + 4 * T_chunk * (V + d_lm) + T + 8


def chunked_head(chunks):
    hidden.grad = head.weight.grad = None
    ackpt.chunked_cross_entropy(
        hidden, head.weight, targets, chunks=chunks
    ).backward()


for count in (2, 8, 32):
    run = ackpt.measure(
        partial(chunked_head, count),
        resident=[hidden, head, targets],
        repeats=0,
    )
    off, more = (
        run.dynamic_peak_bytes - chunked_bytes(T, V, count),
        run.flops - baseline.flops,
    )
    print(
        f"{count:2} chunks: {run.dynamic_peak_bytes:>10,} "
        f"bytes, formula off by {off}, {more} more FLOPs"
    )

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# The logits are the one activation whose gradient is already known in the forward. So a loss in chunks recomputes
# nothing.
# :::

# %% [markdown]
# ## How many chunks
#
# Libraries fix the size of a chunk. [TRL](https://github.com/huggingface/trl/pull/5575) takes 256 tokens and
# checkpoints each chunk, so one of the head's three products is recomputed.
# [Liger](https://github.com/linkedin/Liger-Kernel) computes the gradient in the forward, as above, and takes so many
# tokens that a chunk's logits are about as large as all hidden states. `chunk_head=True`
# ({doc}`../guides/chunked_head`) takes as few chunks as the budget needs. For the vocabulary and widths of Qwen2-7B,
# two layers and 4,096 tokens, from shapes alone:

# %% tags=["hide-input"]
whole, *planned = head_chunks.plans(["60%", "40%"])
size, width, entries = 4096, head_chunks.QWEN2_7B["hidden_size"], head_chunks.QWEN2_7B["vocab_size"]
fixed = [(one.name, one.size(size, width, entries), one.products) for one in head_chunks.FIXED]
rows = [{"head": name, "tokens": tokens, "products": f"{products:.2f}"} for name, tokens, products in fixed]
rows[0] |= {"share": f"{whole.share:.0%}", "time": "0.0%"}
for plan in planned:
    row = {"head": f"plan, budget {plan.budget}", "tokens": -(-size // plan.chunks), "products": "1.00"}
    rows.append(row | {"share": f"{plan.share:.0%}", "time": f"{plan.cost:.1%}"})
for row in rows:
    row |= {"chunks": -(-size // row["tokens"]), "logits": f"{4 * row['tokens'] * entries / 2**20:,.1f}"}
    row |= {"tokens": f"{row['tokens']:,}", "share": row.get("share", ""), "time": row.get("time", "")}
columns = {"head": "head", "tokens": "tokens in a chunk", "chunks": "chunks", "logits": "fp32 logits of a chunk, MiB"}
columns |= {"products": "matrix products, ratio", "share": "3 live copies of them, in % of dynamic peak", "time": "added time"}
caption = "The head in chunks, for 4,096 tokens: fixed chunks of two libraries, and plans within two budgets."
path = write_text_atomic("results/tables/04_head_chunks.md", markdown_table(rows, columns, caption, "tab-head-chunks"))

# %% [markdown]
# ```{include} ../../results/tables/04_head_chunks.md
# ```
#
# The rows of the libraries follow from their documented rules. Added time is modeled for an H200.
#
# Both libraries' chunks are smaller than either budget needs.

# %% [markdown]
# ## The whole step
#
# The blocks save $L A$ elements per token ({doc}`04_experiments`), or with checkpointing only their inputs, $L d$. The
# last norm saves its input and a scale, $d + 1$; its output, $d$, is the head's input. With the loss in one piece, the
# peak is in the head:
#
# $$ 4 \, T \, (L A + 2 d + 1) + 12 \, T V \qquad \text{or} \qquad 4 \, T \, (L d + 2 d + 1) + 12 \, T V. $$
#
# With the chunked loss alone, the bytes of the chunked head replace $12 \, T V$. With both, no logits are live at the
# peak: it is now at the end of backward, with the first block recomputed and the gradients of all later layers live.
# `ackpt.predict` agrees, also where the peak is in the head:

# %%
f_lm, L_lm = lm_config.ff_dim, lm_config.layers


def of_block(config):
    """A and P_block."""
    d, f, h = config.dim, config.ff_dim, config.heads
    return 10 * d + 2 * f + 3 * h + 2, 4 * d**2 + 2 * d * f + 2 * d + 2 * (
        d // h
    )


A_lm, P_block_lm = of_block(lm_config)
P_lm = L_lm * P_block_lm + d_lm + 2 * V * d_lm


def by_hand(method, T):
    # parameters and Adam states, step counts, ids, offsets
    resident = (
        12 * P_lm + 4 * (8 * L_lm + 3) + 8 * (T + 1) + 8
    )
    saved = (
        4
        * T
        * (
            (L_lm * d_lm if "checkpoint" in method else L_lm * A_lm)
            + 2 * d_lm
            + 1
        )
    )
    if "chunked" not in method:
        return resident + saved + 12 * T * V + 8
    if method == "chunked-loss":
        return resident + saved + chunked_bytes(T, V, chunks)
    gradients = 4 * (
        V * d_lm + d_lm + (L_lm - 1) * P_block_lm + d_lm * f_lm
    )
    return resident + gradients + 4 * T * (A_lm + d_lm + f_lm) + 8


for method in lm_methods:
    with FakeTensorMode():
        _, metered = build_lm(method)
        ids = torch.empty(T + 1, dtype=torch.int64)
        batch = replace(
            batches[0],
            tokens=ids[:-1],
            targets=ids[1:],
            cu_seqlens=torch.empty(2, dtype=torch.int32),
        )
    measured, predicted = (
        lm_runs[method].peak_bytes,
        metered(ackpt.predict, batch).peak_bytes,
    )
    residual = measured - by_hand(method, T)
    assert residual == 0 and measured == predicted
    print(
        f"{method:24} measured - by hand: {residual} "
        f"bytes, - predicted: {measured - predicted}"
    )

# %% [markdown]
# Which alone lowers the peak more, checkpointing or the chunked loss?

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
caption = f"Measured peaks of one training step on the CPU ({T} tokens, vocabulary {V:,}, {chunks} chunks)."
path = write_text_atomic("results/tables/04_lm.md", markdown_table(rows, columns, caption, "tab-lm"))

# %% [markdown]
# ```{include} ../../results/tables/04_lm.md
# ```
#
# Here, the chunked loss lowers it more (33 % against 27 %); at the published 8,192 tokens, checkpointing does (7,363
# against 7,731 MiB). Neither method is enough: checkpointing leaves the logits, chunking the activations (figure at the
# top).

# %% tags=["hide-input"]
logits = {"baseline": 12 * T * V, "checkpoint": 12 * T * V, "chunked-loss": 4 * math.ceil(T / chunks) * V}
names = ("parameters", "inputs", "optimizer", "gradients", "activations", "recomputed", "temporaries")
parts = {name: [lm_runs[m].categories[name] for m in lm_methods] for name in names}
parts["logits"] = [logits.get(m, 0) for m in lm_methods]
for index, m in enumerate(lm_methods):
    saved_logits = 0 if "chunked" in m else 4 * T * V
    parts["activations"][index] -= saved_logits
    parts["temporaries"][index] -= logits.get(m, 0) - saved_logits
figure = stacked_plot(lm_methods, parts, "")
path = plots.save(figure, "results/figures/04_at_the_peak.png")  # the figure at the top of this chapter

# %% [markdown]
# ## FLOPs and time of the four methods
#
# The head costs $3 \cdot 2 \, T V d$ FLOPs, in chunks or in one piece. Checkpointing adds one forward of the blocks,
# without the last product of each.

# %%
blocks_forward = (
    2 * T * L_lm * (4 * d_lm**2 + 2 * d_lm * f_lm) + 4 * T**2 * L_lm * d_lm
)
last_products = 2 * T * L_lm * d_lm * f_lm
print(f"the head is {6 * T * V * d_lm / base.flops:.0%} of the baseline")
print(f"chunking adds {lm_runs['chunked-loss'].flops - base.flops} FLOPs")
added = lm_runs["checkpoint"].flops - base.flops
print(
    f"checkpointing adds {added:,}; by hand "
    f"{blocks_forward - last_products:,}"
)

# %% [markdown]
# The times as ratios to the baseline's:

# %% tags=["measured-time", "nbval-ignore-output"]
times = ackpt.compare_seconds(
    {m: partial(step, batches[0]) for m, step in lm_steps.items()},
    repeats=5,
)
for method, ratio in times.ratios.items():
    print(
        f"{method:24} x {ratio.median:.2f} "
        f"({ratio.low:.2f} to {ratio.high:.2f})"
    )

# %% [markdown]
# ## The published language model
#
# At the published sizes, with GPT-2's vocabulary of 50,257 entries, our model has:

# %%
published_lm = lm.GPU
H, layers, vocabulary = (
    published_lm.model().heads,
    published_lm.layers,
    published_lm.vocab_size,
)
D, FF = published_lm.dim, published_lm.ff_dim
parameters = (
    layers * of_block(published_lm.model())[1] + D + 2 * vocabulary * D
)
print(
    f"{parameters:,} parameters; weights, gradients "
    f"and Adam states {16 * parameters / 2**20:,.0f} MiB"
)

# %% tags=["hide-input"]
lm_predictions = [record for group in predict_experiment(published_lm, SOURCE) for record in group]
for record in lm_predictions:
    path = record.save(f"results/cpu/04_{report.file_name(record)}")
measured = gpu_records("lm")
rows = [
    {
        "seq_len": f"{record.config['seq_len']:,}",
        "method": record.config["method"],
        "predicted": f"{record.metrics['peak_bytes'] / 2**20:,.1f}",
        **report.measured_figures(record, measured),
    }
    for record in lm_predictions
]
columns = {name: report.PUBLISHED[name] for name in rows[0]}
caption = "Our model at the published sizes, with the loss in one piece and in 8 chunks; predicted from shapes alone."
path = write_text_atomic("results/tables/04_chunked.md", markdown_table(rows, columns, caption, "tab-lm-chunked"))

# %% [markdown]
# The peak of `checkpoint` grows with the tokens, because the logits do. With checkpointing *and* a chunked loss, it
# hardly grows:
#
# ```{include} ../../results/tables/04_chunked.md
# ```
#
# {doc}`14_published` compares such predictions with published peaks: they agree within 0.014 %.

# %% tags=["hide-input"] alt="Live memory of a published step of the language model at 8,192 tokens, side by side. In both, the forward ends with a steep spike of logits, the peak, at about 16 GiB for the baseline and 10 GiB with checkpointing. Before it, memory rises in a ramp of activations for the baseline and in a low ramp of boundaries with checkpointing. After it, the baseline falls in a ramp, and checkpointing in twelve teeth."
lm_profiles = {}
for method in lm_methods[:2]:
    with FakeTensorMode():
        their_lm = reference.reference_language_model(tokens=8192, method=method)
    lm_profiles[method] = ackpt.predict(their_lm.run, resident=their_lm.resident, device="h100-80g")
below = {method: run.peak_bytes - run.timeline.peak_bytes for method, run in lm_profiles.items()}
figure = orders_plot({method: run.timeline.thinned(1000) for method, run in lm_profiles.items()}, "", below)
path = plots.save(figure, "results/figures/04_lm_profiles.png")
figure

# %% [markdown]
# *The published steps at 8,192 tokens, predicted from shapes. Checkpointing removes the ramp; the logits remain.*

# %%
lm_ours = {
    (p.config["method"], p.config["seq_len"]): p.metrics
    for p in lm_predictions
}
best = lm_ours["checkpoint+chunked-loss", 8192]
share = (
    sum(
        best["categories"][name]
        for name in ("parameters", "gradients", "optimizer")
    )
    / best["peak_bytes"]
)
print(
    "8,192 tokens: weights, gradients, Adam "
    f"states are {share:.0%} of the lowest peak"
)

# %% [markdown]
# At which vocabulary do the logits need as much memory as all blocks? Under autocast, $2 d + 3 h + 2$ of a block's $A$
# elements per token remain in fp32 (the inputs of the norms of attention and MLP, all norms' scales, the log-sum-exp of
# attention), and the others have 2 bytes each. So a block saves $24 d + 4 f + 12 h + 8$ bytes, and a boundary has $4
# d$. A logit needs 10, not 12: the log-probability in bf16, and its copy and gradient in fp32.

# %%
block_bytes = 24 * D + 4 * FF + 12 * H + 8
print(f"V = {layers * block_bytes / 10:,.0f}; GPT-2 has {vocabulary:,}")
print(
    "with checkpointed blocks, logits / boundaries "
    f"= {10 * vocabulary / (layers * 4 * D):.1f}"
)

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# With GPT-2's vocabulary, the logits need as much memory as all twelve blocks, and ten times as much as their
# boundaries. Chunk the loss first: it adds no FLOPs.
# :::

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: a larger vocabulary
# :class: note
# With $V = 128{,}256$ and 8,192 tokens, how many GiB do weights, gradients and Adam states of our model need, and how
# many do its logits need, at 10 bytes each? Predict the peaks of `checkpoint` and `checkpoint+chunked-loss`.
# :::

# %% tags=["solution"]
two = ("checkpoint", "checkpoint+chunked-loss")
larger = replace(published_lm, vocab_size=128_256, seq_lens=(8192,), methods=two)
elements, logits = parameters + 2 * D * (128_256 - vocabulary), 10 * 128_256 * 8192
print(f"weights, gradients, Adam: {16 * elements / 2**30:.1f} GiB; logits: {logits / 2**30:.1f} GiB")
# Their sum exceeds the peak of `checkpoint`: when backward begins, no weight has a gradient yet. Also live are the
# boundaries, the input of the last norm, and the head's input and weights in bf16.
by_hand = 12 * elements + logits + 8192 * D * (4 * layers + 4 + 2) + 2 * 128_256 * D
print(f"when backward begins: {by_hand / 2**30:.1f} GiB")
# Both peaks are in the head.
(answers,) = predict_experiment(larger)
for record in answers:
    print(f"{record.config['method']:24} {record.metrics['peak_bytes'] / 2**30:.1f} GiB")

# %% [markdown]
# :::{admonition} Exercise 2: how many chunks?
# :class: note
# At the published sizes and 8,192 tokens, with checkpointed blocks: a block saves 41,064 bytes per token, and a logit
# needs 10 bytes. From how many chunks on are the logits of a chunk smaller than one recomputed block? Estimate on paper.
# The solution predicts the peak for several numbers of chunks.
# :::

# %% tags=["solution"]
for count in (2, 4, 8, 16):
    ask = replace(published_lm, loss_chunks=count, seq_lens=(8192,), methods=two[1:])
    metrics = best if count == published_lm.loss_chunks else next(predict_experiment(ask))[0].metrics
    print(f"{count:2} chunks: {metrics['peak_bytes'] / 2**20:7.1f} MiB")

# %% [markdown]
# All logits have 12 times the bytes of a block, $10 \cdot 50{,}257 / 41{,}064$. The peak stops falling already at 8
# chunks: in the head, the gradients of the blocks are not allocated yet, and in the first block's backward, most
# gradients are complete.
#
# :::{admonition} Exercise 3: one matrix for both ends
# :class: note
# Many models *tie* embedding and head: both use one matrix of $V d$ elements. By how much does that lower the peak of
# `checkpoint+chunked-loss`? Consider when each gradient is allocated.
# :::

# %% tags=["solution"]
_, metered = build_lm("checkpoint+chunked-loss", tied=True)
tied = metered(measure, batches[0]).peak_bytes
print(f"measured {lm_runs['checkpoint+chunked-loss'].peak_bytes - tied:,}; 12 V d + 4 = {12 * V * d_lm + 4:,}")

# %% [markdown]
# The peak falls by one weight and its two Adam averages, 12 bytes per element, and by one step count, but not by a
# gradient: at the peak the head's gradient is live and the embedding's is not yet allocated.
#
# ## Llama 3 8B with its head in chunks

# %% tags=["hide-input"] alt="Four stacked bars. With the head in chunks, the peak is 62.2 GiB at an almost unchanged time, and gradients appear in the bar instead of logits."
from experiments.running_model import bars

figure = bars(4)
path = plots.save(figure, "results/figures/04_running_model.png")
figure

# %% [markdown]
# *The step of {doc}`chapter 1 <01_where_memory_goes>` with per-block checkpointing, and head and loss in 8 chunks of
# tokens; predicted.*
#
# With per-block checkpointing alone, logits took a third of the peak. In chunks, they take 0.1 GiB, and the peak moves
# to the end of backward: 62.2 GiB. Weights, nearly complete gradients and the state of AdamW are 58.6 GiB of it, and
# checkpointing reduces none of these.
#
# ## Summary
#
# - Logits cost tokens times vocabulary times 12 bytes in fp32, 10 under autocast; a loss in chunks allocates one chunk.
# - With checkpointed blocks, logits dominate dynamic memory. With a chunked loss too, at 8,192 tokens, 89 % of the
#   peak is weights, gradients and Adam states.
#
# You can now say whether the blocks of a model or its logits set the peak.
#
# The numbers on this page were produced in this environment:

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
environment("cpu", SOURCE)

# %% [markdown]
# ## Sources
#
# - The experiment: repository `sashaboriskin/activation_checkpointing`.
# - {cite:t}`merity2016`: wikitext-103. {cite:t}`sennrich2016`: byte-pair encoding.
