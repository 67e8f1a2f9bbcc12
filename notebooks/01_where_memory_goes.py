# %% [markdown]
# # Where training memory goes
#
# After this chapter you can write down how many bytes one training step of a Transformer holds, what they are, and when,
# and then check every line of it against the allocator.

# %% [markdown]
# ## Goals
#
# - Split the memory of a step into what is always there and what comes and goes.
# - Derive both from the sizes of the model: 16 bytes for every parameter, and a sum of widths for every token.
# - Measure them, to the byte, and see at which moment the step is largest.
# - Know which of the two parts to attack, and from how many tokens on it is worth it.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $T$ | tokens in a batch, all sequences together |
# | $L$ | Transformer blocks |
# | $d$, $f$ | width of the model, width inside the MLP |
# | $h$ | attention heads; each is $d / h$ wide |
# | $P$ | parameters |
# | $A$ | numbers that one block keeps per token, from its forward to its backward |
#
# Numbers are stored in fp32 here: 4 bytes each. A *storage* is the piece of memory behind a tensor; several tensors
# (views) can share one, and it is storages that cost bytes.

# %%
import torch
import torch.nn.functional as F

import ackpt
from ackpt import plots
from ackpt.experiments.widgets import explorer, memory_bars
from ackpt.metering.meter import measure, memory_format
from ackpt.models import PUBLISHED, Block, Transformer, TransformerConfig
from ackpt.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)

# %% [markdown]
# The step of this chapter: a small Transformer learns to reproduce its input, four sequences of 256 tokens at a time.

# %%
config = TransformerConfig(dim=256, ff_dim=1024, layers=6, head_dim=64)
T, L, d, f, h = 1024, config.layers, config.dim, config.ff_dim, config.heads
model = Transformer(config)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(T, d)
sequences = torch.arange(0, T + 1, 256, dtype=torch.int32)  # where each begins


# %%
def step():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x, sequences, max_seqlen=256), x)
    loss.backward()
    optimizer.step()


# %% [markdown]
# ## What is always there: 16 bytes per parameter
#
# A block has four square matrices for attention (queries, keys, values, output), two for the MLP, and four norms, two of
# width $d$ and two of the width of a head:
#
# $$ P_\text{block} = 4 d^2 + 2 d f + 2 d + 2 \tfrac{d}{h} $$

# %%
P_block = 4 * d**2 + 2 * d * f + 2 * d + 2 * (d // h)
P = L * P_block + d  # and the norm after the last block
P, sum(p.numel() for p in model.parameters())

# %% [markdown]
# Every parameter brings three more numbers of its size: its gradient, and the two running averages that AdamW keeps.
# That makes $4 P$ numbers, so $16 P$ bytes in fp32, whatever the batch.
#
# Parameters, inputs and optimizer state stay from step to step: they are *resident*. `measure` runs the step a few times
# and reads the allocator's events.

# %%
measured = measure(step, resident=[model, optimizer, x], repeats=0)
resident = {"parameters": 4 * P, "optimizer": 8 * P, "inputs": 4 * T * d}
for name, size in resident.items():
    print(f"{name:10}  predicted {size:>10,}  measured {measured.categories[name]:>10,}")

# %% [markdown]
# The optimizer holds a few bytes more than predicted: AdamW counts its steps in one 4-byte number per parameter tensor.

# %%
measured.categories["optimizer"] - 8 * P, 4 * len(list(model.parameters()))

# %% [markdown]
# ## What the forward leaves behind
#
# Why is anything kept at all? Take the smallest case, a linear layer $y = x W^\top$. When the gradient
# $\partial \ell / \partial y$ arrives, the layer owes two gradients:
#
# $$ \frac{\partial \ell}{\partial x} = \frac{\partial \ell}{\partial y} W,
#    \qquad
#    \frac{\partial \ell}{\partial W} = \Bigl(\frac{\partial \ell}{\partial y}\Bigr)^{\!\top} x. $$
#
# The second one needs the layer's *input*. So the input stays from the forward of this layer to its backward, and the
# first layers wait longest. An addition needs nothing; GELU, as every nonlinear function, needs its input again.
#
# **The MLP.** Up-projection, GELU, down-projection: the inputs are $d$, $f$ and $f$ wide, so $d + 2 f$ numbers per token.
#
# **The whole block**, operation by operation:
#
# | operation | what its backward reads | numbers per token |
# |---|---|--:|
# | norm before attention | its input; one scale per token | $d + 1$ |
# | query, key, value projection | its input | $d$ |
# | norm of queries and keys | its input, inside one storage with the values; one scale per head, twice | $3 d + 2 h$ |
# | attention | normalised queries and keys; its output; one sum per head | $3 d + h$ |
# | output projection | its input: the attention's output, counted above | $0$ |
# | norm before the MLP | its input; one scale per token | $d + 1$ |
# | up-projection | its input | $d$ |
# | GELU | its input | $f$ |
# | down-projection | its input | $f$ |
#
# $$ A = 10 d + 2 f + 3 h + 2 $$
#
# Attention computes a score for every pair of tokens, but no $T^2$ stands here: the flash kernel keeps one number per
# query and head and computes the scores again in backward. It is a checkpoint in miniature.

# %%
A = 10 * d + 2 * f + 3 * h + 2
block = Block(config)
alone = measure(lambda: block(x, sequences, 256).backward(x), resident=[block, x], repeats=0)
counted = alone.timeline.at(alone.timeline.boundary)["activations"]
print(f"predicted {4 * T * A:,}  measured {counted:,}")

# %% [markdown]
# (The input of this one block is resident, but its output is alive, which would be the next block's input.)
#
# **The whole model.** $L$ blocks keep $A$ each, of which the first one's input is resident. The last norm keeps its input
# and one scale per token, and the loss keeps the norm's output: $L A + d + 1$ numbers per token in all.

# %%
predicted = 4 * T * (L * A + d + 1)
counted = measured.timeline.at(measured.timeline.boundary)["activations"]
print(f"predicted {predicted:,}  measured {counted:,}  missing {counted - predicted:,}")

# %% [markdown]
# A whole megabyte is missing, and four bytes. The four bytes are the gradient of the loss, a single 1, with which
# backward begins. The rest is a surprise that only exact counting finds: the loss is one number, but on the CPU
# `mse_loss` returns it in a storage as large as its input.

# %%
loss = F.mse_loss(model(x, sequences, max_seqlen=256), x)
loss.numel(), loss.untyped_storage().nbytes()

# %%
counted - predicted - loss.untyped_storage().nbytes()

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A step holds $16 P$ bytes for the parameters and what belongs to them, and $4 T (L A + d + 1)$ bytes that the forward
# keeps for the backward. The first part does not know the batch; the second does not know the optimizer.
# :::

# %% [markdown]
# ## When each byte is alive
#
# The two parts are never there whole at the same time. Here is the step from left to right, one allocation or free
# after the other.

# %% alt="Live memory over the allocations of one training step, stacked: resident bytes as a constant band, activations rising in a straight line until backward begins and falling afterwards, while the gradients grow from nothing; the peak is at the start of backward."
figure = plots.timeline_plot(
    measured.timeline.thinned(1000),
    "The step is largest when backward begins: all activations are there, gradients are not",
    measured.resident_bytes,
)
path = plots.save(figure, "results/figures/01_one_step.png")
figure

# %% [markdown]
# - At the far left, `zero_grad` gives back the gradients of the step before.
# - Then the forward: every operation adds what its backward will read, and nothing is given back.
# - Right of the dashed line, backward reads the activations in reverse and frees them, while the gradients grow to their
#   full size. The sawtooth on top are *temporaries*: results that the next operation consumes.
# - At the end the optimizer updates one parameter tensor after the other. The thin band of activations that stays is the
#   loss, still alive in its large storage.
#
# So the peak is not the sum of the parts. When it is reached, just after backward begins, almost no gradient exists:

# %%
for name, size in measured.categories.items():
    print(f"{name:12} {memory_format(size):>10}")
print(f"{'peak':12} {memory_format(measured.peak_bytes):>10}")

# %% [markdown]
# ## Tokens or parameters?
#
# One block owns $16 P_\text{block}$ bytes whatever the batch, and keeps $4 A$ bytes for every token. The tokens weigh as
# much as the parameters when there are
#
# $$ T^* = \frac{4 P_\text{block}}{A} $$
#
# of them; for $f = 4 d$ this is about $\tfrac{8}{3} d$. It does not depend on the number of blocks.

# %%
T_star = 4 * P_block / A
print(f"T* = {T_star:.0f} tokens; 8 d / 3 = {8 * d / 3:.0f}")


# %%
def kept_by(tokens):
    rows = x.repeat(2, 1)[:tokens]
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    run = measure(
        lambda: model(rows, offsets, tokens).backward(rows),
        resident=[model, rows],
        warmup=0,
        repeats=0,
    )
    return run.timeline.at(run.timeline.boundary)["activations"]


# %% [markdown]
# Measured minus predicted, from 128 to 2048 tokens:

# %%
tokens = [128, 256, 512, 1024, 2048]
kept = [kept_by(n) for n in tokens]
formula = [4 * n * (L * A + d + 1) for n in tokens]
[a - b for a, b in zip(kept, formula)]

# %% alt="Bytes over the number of tokens: the kept activations lie on the straight line of the formula and cross the constant 16 bytes per parameter near 680 tokens."
figure = plots.line_plot(
    tokens,
    measured={"kept by the forward": kept},
    predicted={"kept by the forward": formula, "16 bytes per parameter": [16 * P] * len(tokens)},
    title=f"From {T_star:.0f} tokens on, what the tokens leave behind outweighs the parameters",
    xlabel="tokens",
    ylabel="memory (MiB)",
)
path = plots.save(figure, "results/figures/01_tokens.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Parameters set a floor, tokens set the slope. Beyond $\tfrac{8}{3} d$ tokens the slope wins, and long sequences are
# always beyond it. A better optimizer lowers the floor; only keeping fewer activations lowers the slope.
# :::

# %% [markdown]
# ## What can be done about it
#
# The slope is $L A$ numbers per token, because all blocks wait for their backward at once. But a block can be computed
# again from its input, which is only $d$ numbers wide. Keep the inputs, forget the rest, and compute each block a second
# time just before its backward: this is activation checkpointing, and the next chapters build it.

# %%
ackpt.apply_activation_checkpointing(model, Block)

# %%
checkpointed = measure(step, resident=[model, optimizer, x], repeats=0)
print("peak", memory_format(measured.peak_bytes), "->", memory_format(checkpointed.peak_bytes))

# %% alt="The same step with checkpointed blocks: activations grow by a small step per block, and in backward one block after the other rises and falls, a row of teeth instead of one triangle."
figure = plots.timeline_plot(
    checkpointed.timeline.thinned(1000),
    "Checkpointed, the step never holds more than one block: teeth instead of a triangle",
    checkpointed.resident_bytes,
)
path = plots.save(figure, "results/figures/01_one_step_checkpointed.png")
figure

# %% [markdown]
# What the forward leaves is now the input of every block (the first one is resident), the input of the last norm with its
# scale, and the loss. The teeth are counted as temporaries, since they are born and die within backward. The peak has
# moved to the last tooth, where the gradients are nearly complete.

# %%
counted = checkpointed.timeline.at(checkpointed.timeline.boundary)["activations"]
counted, 4 * T * ((L + 1) * d + 1) + loss.untyped_storage().nbytes() + 4

# %% tags=["hide-input"]
runs = {"plain": measured, "checkpointed": checkpointed}
names = [name for name, size in measured.categories.items() if size]


def table_row(name, sizes):
    return {"what": name} | {label: round(size / 2**20, 1) for label, size in sizes.items()}


rows = [table_row(n, {label: run.categories[n] for label, run in runs.items()}) for n in names]
rows += [table_row("**peak**", {label: run.peak_bytes for label, run in runs.items()})]
columns = {"what": "at the peak", "plain": "plain, MiB", "checkpointed": "checkpointed, MiB"}
caption = "One training step at its peak, by what the bytes are."
table = markdown_table(rows, columns, caption, "tab-one-step")
path = write_text_atomic("results/tables/01_one_step.md", table)

# %% [markdown]
# ```{include} ../../results/tables/01_one_step.md
# ```

# %% alt="Bars of the bytes at the peak, plain and checkpointed, by category: parameters, inputs and optimizer are equal, activations nearly vanish, gradients and temporaries are larger."
saving = 1 - checkpointed.peak_bytes / measured.peak_bytes
figure = plots.bar_plot(
    names,
    {label: [run.categories[name] for name in names] for label, run in runs.items()},
    f"Checkpointing takes {saving:.0%} off the peak: activations nearly vanish",
    ylabel="memory at the peak (MiB)",
)
path = plots.save(figure, "results/figures/01_at_the_peak.png")
figure

# %% [markdown]
# The price is arithmetic: every block runs forward twice. A backward costs about two forwards, so the step grows from
# three to four.

# %%
print(f"checkpointed / plain = {checkpointed.flops / measured.flops:.4f} in FLOPs")

# %% [markdown]
# ## Other models, other lengths
#
# Nothing of this depends on running the step: shapes are enough to count its bytes. Here are more steps, none of which
# runs, under four policies that Part II derives. `none` is the baseline and `full` a checkpoint around blocks;
# `auto` recomputes the least that a budget asks for, and its lowest budget is the floor.

# %%
data = memory_bars.memory_bars()
path = explorer.save(data, "results/explorer/01_memory_bars.json")
steps = [each for one in data["models"] for each in one["steps"]]
exact = all(each["kept"]["bytes"] == each["plans"]["none"]["kept"]["bytes"] for each in steps)
print(f"{len(steps)} steps; what their forwards keep is what the formula says: {exact}")

# %% tags=["hide-input"]
bars = data["models"][0]["steps"][1]
shown = {data["policies"][name][0]: found["at_peak"] for name, found in bars["plans"].items() if found}
names = [name for name in data["categories"] if any(found.get(name) for found in shown.values())]
figure = plots.bar_plot(
    names,
    {label: [found.get(name, 0) for name in names] for label, found in shown.items()},
    "At the peak, policies differ in what is saved and in what is temporary",
    ylabel="memory at the peak (MiB)",
)
path = plots.save(figure, "results/figures/01_memory_bars.png")

# %% [markdown]
# Choose a model, a size and a policy; with a selector in focus, the arrow keys do. $T$ are the tokens of the whole batch,
# $V$ the words of the vocabulary, and $n$ the tensors among the parameters: AdamW counts the steps of each.
#
# ```{memory-explorer} ../../results/explorer/01_memory_bars.json
# :image: ../../results/figures/01_memory_bars.png
# :alt: Bars of the bytes at the peak by category, for the Transformer of this chapter at 1024 tokens per sequence, under four policies. Parameters, inputs and optimizer are equal; activations are largest with none, smaller with auto at half, and smallest with full and with the least of auto.
# ```
#
# Things to try. The Transformer from 256 to 4096 tokens: which part of the bar grows, and which does not? The language
# model at half of its peak: why must more of its FLOPs run again than of the Transformer's? ResNet-18: which part keeps
# most, and why is half of the baseline refused?

# %% [markdown]
# What was measured goes into records, with the place where it was measured.

# %% tags=["hide-input"]
where = environment("cpu", "notebooks/01_where_memory_goes.py")
setting = {"tokens": T, "dim": d, "ff_dim": f, "layers": L, "heads": h, "dtype": "float32"}
for label, run in runs.items():
    kept = run.timeline.at(run.timeline.boundary)["activations"]
    metrics = run.to_json() | {"kept_bytes": kept}
    record = Record("one_step", setting | {"method": label}, metrics, where)
    path = record.save(f"results/cpu/01_one_step_{label}.json")

# %% tags=["measured-time", "nbval-ignore-output"]
where

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: the published model
# :class: note
# The reference experiments of this book train 12 blocks with $d = 1024$, $f = 4096$ and heads of 128. How many GiB do the
# parameters and all that belongs to them take, and how many do 8192 tokens leave behind, all in fp32? Which of the two
# would you attack? Check your $P$ by building the model on the `meta` device, which has shapes and no memory.
# :::

# %% tags=["solution"]
with torch.device("meta"):
    published = Transformer(PUBLISHED)
d1, f1, h1, L1 = PUBLISHED.dim, PUBLISHED.ff_dim, PUBLISHED.heads, PUBLISHED.layers
P1 = L1 * (4 * d1**2 + 2 * d1 * f1 + 2 * d1 + 2 * d1 // h1) + d1
A1 = 10 * d1 + 2 * f1 + 3 * h1 + 2
print("P =", P1, "counted on meta:", sum(p.numel() for p in published.parameters()))
print("16 P =", memory_format(16 * P1))
print("left behind by 8192 tokens:", memory_format(4 * 8192 * (L1 * A1 + d1 + 1)))

# %% [markdown]
# The activations: they are several times as much, they grow with every token, and they can be made again. Parameters,
# gradients and the optimizer's state are what the training is for.

# %% [markdown]
# :::{admonition} Exercise 2: another optimizer
# :class: note
# Replace AdamW by plain SGD, without momentum. Which bytes of the step vanish, and by how much does the peak fall?
# Predict both before you measure.
# :::

# %% tags=["solution"]
switched_off = ackpt.remove_activation_checkpointing(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
sgd = measure(step, resident=[model, optimizer, x], repeats=0)
print("predicted: 8 P + 196 =", 8 * P + 196, "bytes, AdamW's averages and step counts")
print("measured:             ", measured.peak_bytes - sgd.peak_bytes, "bytes")

# %% [markdown]
# :::{admonition} Exercise 3: a cheaper nonlinearity
# :class: note
# The backward of ReLU needs to know only where its *output* is positive. How many numbers per token does an MLP with ReLU
# keep, against the $d + 2 f$ of one with GELU? Check it on `torch.nn.Sequential` with two linear layers.
# :::


# %% tags=["solution"]
def kept_per_token(nonlinearity):
    up, down = torch.nn.Linear(d, f, bias=False), torch.nn.Linear(f, d, bias=False)
    mlp = torch.nn.Sequential(up, nonlinearity, down)
    run = measure(lambda: mlp(x).backward(x), resident=[mlp, x], repeats=0)
    return run.timeline.at(run.timeline.boundary)["activations"] // (4 * T)


print("GELU:", kept_per_token(torch.nn.GELU()), "= d + 2 f =", d + 2 * f)
print("ReLU:", kept_per_token(torch.nn.ReLU()), "= d + f   =", d + f)

# %% [markdown]
# ReLU's output is also the input of the down-projection: one storage serves both. (The $d$ is the output of the MLP this
# time; its input is resident.)

# %% [markdown]
# ## What we have seen
#
# - A training step holds 16 bytes per parameter (fp32, AdamW) and $4 A$ bytes per token and block, with
#   $A = 10 d + 2 f + 3 h + 2$; both were derived on paper and measured to the byte.
# - Activations rise until backward begins and fall while the gradients rise. The peak lies where backward begins.
# - From $\tfrac{8}{3} d$ tokens on, activations outweigh everything else. They are kept only to be read once more, and
#   they can be computed again: that is the subject of the next chapters.
# - A byte count that does not add up has a reason that can be found; here it was a loss in a storage as large as its input.
#
# ## Sources
#
# - {cite:t}`korthikanti2022` count what a block keeps in the same way.
# - {cite:t}`zhang2019`: the norm of the blocks.
