# %% [markdown]
# # BERT: per-block checkpointing and plans
#
# **What does a planner gain over per-block checkpointing on BERT-large?**

# %% [markdown]
# ```{figure} ../../results/figures/10_timelines.png
# :alt: Live memory of three training steps side by side. Baseline: a ramp up to the peak where backward begins, and down again. Per-block checkpointing: a low staircase with spikes in the forward, then four tall teeth in backward. Plan: a ramp a third as high as the baseline, with small teeth on its way down; its peak is as high as the teeth of per-block checkpointing.
# :class: dark-light
#
# Live memory of one step of a small BERT with three methods: per-block checkpointing and a plan at the same peak.
# ```
#
# After this chapter you can fit a BERT into the memory that you have, with per-block checkpointing or with a plan for a
# budget. You can say what each of the two recomputes and why, and judge a published saving.
#
# :::{admonition} Symbols of this chapter
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $B$, $T$ | sequences in a batch, tokens per sequence |
# | $d$, $f$, $h$, $L$ | width of the model, width inside the MLP, heads, blocks |
# | $A$ | elements that one block saves per token for its backward |
# | $F_\text{block}$ | FLOPs of one block's forward |
# :::
#
# *Per-block checkpointing* ({doc}`02_reentrant_checkpoint`) makes each block a region, which saves its input and is
# recomputed in backward. A *plan* ({doc}`06_graph_profiler`) is a schedule of operations, made for a *budget*, an upper
# bound on the peak. The *dynamic peak* is the largest number of bytes that are live at one time during the step, without
# parameters, optimizer states and inputs, which are allocated before it.

# %%
import copy
import tempfile
import textwrap
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

import ackpt
from ackpt.metering import plots
from experiments import bert, models
from experiments.graph_profile import orders_plot
from experiments.reports import bert as bert_report
from experiments.reports.figures import curves_plot
from experiments.reports.gpu_records import gpu_records
from experiments.results import environment, load_reference, markdown_table, write_text_atomic

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## Two ways to save memory
#
# BERT reads a sequence in which some words are masked, and predicts these words (Devlin et al. 2018,
# [arXiv:1810.04805](https://arxiv.org/abs/1810.04805)). BERT-large has 24 blocks of width 1024 and trains on 512
# tokens. Ours has four blocks, an eighth of the width, and sequences a quarter as long. With eight heads and a
# vocabulary of 640 words, the attention matrices and the logits take about the same share of memory as in BERT-large.

# %%
sizes = models.BertConfig(dim=128, ff_dim=512, layers=4, heads=8, vocab_size=640)
B, T, d, f, h, L = 8, 128, sizes.dim, sizes.ff_dim, sizes.heads, sizes.layers
model = models.BertForMaskedLM(sizes)
ids = torch.randint(sizes.vocab_size, (B, T))
masked = torch.rand(B, T) < 0.15
batch = {"input_ids": ids, "labels": ids.where(masked, -100)}

names = "baseline", "torch", "per-block", "plan"
copies = {name: copy.deepcopy(model) for name in names}
optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for name, m in copies.items()}
calls = dict(copies)  # what a step calls: the model, or below the planned model

# %% [markdown]
# **Per-block checkpointing** in plain PyTorch replaces the forward of each block:

# %%
for block in copies["torch"].bert.blocks:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)

# %% [markdown]
# `ackpt` does the same for all modules of a class, and returns their names:

# %%
ackpt.apply_activation_checkpointing(copies["per-block"], models.BertBlock)

# %% [markdown]
# **A plan** takes a budget. A fair comparison gives it as much memory as per-block checkpointing needs, so we measure
# that first: the peak of one step in bytes, and its FLOPs.


# %%
def step(name):
    calls[name](**batch).backward()
    optimizers[name].step()
    optimizers[name].zero_grad()


def measured(name):
    resident = (copies[name], optimizers[name], *batch.values())
    return ackpt.measure(partial(step, name), resident=resident, repeats=0)


runs = {name: measured(name) for name in ("baseline", "per-block")}
budget = runs["per-block"].peak_bytes
print(f"baseline {runs['baseline'].peak_bytes:,} bytes, per-block {budget:,} bytes")

# %% [markdown]
# A budget in bytes bounds the whole peak, including parameters, optimizer states and inputs. The measured peak of the
# plan equals the predicted one to the byte, and keeps the budget:

# %%
calls["plan"] = ackpt.compile(copies["plan"], budget=budget, optimizer=optimizers["plan"], **batch)
runs["plan"] = measured("plan")
assert runs["plan"].peak_bytes == calls["plan"].plan.peak_bytes <= budget
print(f"plan {runs['plan'].peak_bytes:,} bytes")

# %% [markdown]
# Do all of them train the same model? We run three steps from the same weights, with dropout. We compare every loss,
# every gradient of every step, and all parameters after the third step, bit for bit.


# %%
def train(name, steps=3):
    call, module, optimizer = calls[name], copies[name], optimizers[name]
    module.load_state_dict(model.state_dict())
    optimizer.state.clear()
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        loss = call(**batch)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in module.parameters())]


base_run = train("baseline")
for name in names[1:]:
    same = [torch.equal(a, b) for a, b in zip(base_run, train(name), strict=True)]
    print(f"{name:9}  {sum(same)} of {len(same)} tensors equal, bit for bit")

# %% [markdown]
# Dropout is the difficult part: a recomputation must draw the same dropout mask. All three restore the RNG state for
# that.
#
# ## The same memory at a lower cost
#
# One step of each method in numbers, and its live memory:

# %% tags=["hide-input"]
base = runs["baseline"]
rows = [
    {
        "method": name,
        "peak": round(run.peak_bytes / MIB, 1),
        "dynamic": round(run.dynamic_peak_bytes / MIB, 1),
        "share": round(100 * run.dynamic_peak_bytes / base.dynamic_peak_bytes),
        "flops": round(100 * (run.flops / base.flops - 1), 1),
    }
    for name, run in runs.items()
]
columns = {"method": "method", "peak": "peak, MiB", "dynamic": "dynamic peak, MiB"}
columns |= {"share": "dynamic, % of baseline", "flops": "recomputed FLOPs, %"}
caption = "One step of the small BERT, measured on the CPU. The plan has the peak of per-block as its budget."
path = write_text_atomic("results/tables/10_bert.md", markdown_table(rows, columns, caption, "tab-bert"))

# %% [markdown]
# ```{include} ../../results/tables/10_bert.md
# ```

# %% tags=["hide-input"] alt="Live memory of three training steps side by side. Baseline: a ramp up to the peak where backward begins, and down again. Per-block checkpointing: a low staircase with spikes in the forward, then four tall teeth in backward. Plan: a ramp a third as high as the baseline, with small teeth on its way down; its peak is as high as the teeth of per-block checkpointing."
figure = orders_plot({name: run.timeline for name, run in runs.items()}, "", base.resident_bytes)
path = plots.save(figure, "results/figures/10_timelines.png")
figure

# %% [markdown]
# *One step with three methods. Within the same peak, the plan recomputes less than half as many FLOPs as per-block
# checkpointing.*
#
# At the per-block peak you see recomputed tensors, those of the block that backward has reached; at the plan's, saved
# ones.
#
# FLOPs are not time. On a CPU, operations without FLOPs, above all the generation of dropout masks, take a considerable
# part of a step. Guess both ratios to the baseline's time before you look. The methods take turns in one process; we
# print the median, the lowest and the highest ratio.

# %% tags=["measured-time", "nbval-ignore-output"]
times = ackpt.compare_seconds({name: partial(step, name) for name in runs}, repeats=3)
for name, ratio in times.ratios.items():
    print(f"{name:9}  x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")

# %% [markdown]
# ## What a block saves
#
# Why are the activations so large? We count the elements per token that a block's backward reads:
#
# - A linear layer needs its input for the gradient of its weight.
# - Attention needs queries, keys and values, its weights before and after dropout, and the dropout mask. The last three
#   are matrices with $T$ elements for each head and token.
# - A norm needs its input and two statistics, dropout its mask, and GELU its input.
#
# $$ A = \underbrace{3 d + 3 h T}_\text{attention} + \underbrace{d}_\text{its output} +
#    \underbrace{2 \, (3 d + 2)}_\text{masks, sums, norms} + \underbrace{2 f}_\text{GELU} = 10 d + 2 f + 3 h T + 4 . $$
#
# Policy `"none"` recomputes nothing: its plan lists everything that the baseline saves, and `of_blocks`
# groups the list by block. Does it agree?

# %%
graph = ackpt.trace(copies["baseline"], optimizer=optimizers["baseline"], **batch)
profile = ackpt.profile(graph, workspace="measured")
none = ackpt.plan(graph, policy="none", profile=profile)
A = 10 * d + 2 * f + 3 * h * T + 4
saved = {sum(a.bytes for a in activations) for activations in bert.of_blocks(none).values()}
print(f"by hand {4 * B * T * A}, in each block of the graph {saved}")
print(f"attention's matrices are {3 * h * T / A:.0%} of it")

# %% [markdown]
# Per-block checkpointing saves one of these tensors per block, the block's input, with $d$ elements per token. It
# recomputes everything else, including the matrix products:
#
# $$ F_\text{block} = 2 \, B T \, (4 d^2 + 2 d f) + 4 \, B T^2 d . $$

# %%
F_block = 2 * B * T * (4 * d**2 + 2 * d * f) + 4 * B * T**2 * d
runs["per-block"].flops - base.flops, L * F_block

# %% [markdown]
# ## What a plan saves
#
# A planner looks at single operations, and an operation with a large output need not be expensive.
# Dropout masks can be drawn again. The weights after dropout are an elementwise product of the weights and the mask.
# The outputs of GELU and of the norms follow from their inputs. None of these needs a matrix product, and together they
# are $2 h T + f + 4 d$ elements per token:

# %%
print(f"{(2 * h * T + f + 4 * d) / A:.0%} of what a block saves")

# %% [markdown]
# A budget can also be a fraction of the baseline's dynamic peak, or a string such as `"50MiB"`. We plan for every
# feasible budget, in steps of five percent. An infeasible budget is refused, and the error names the smallest feasible
# one:

# %%
plans = {}
for percent in range(100, 0, -5):
    try:
        plans[percent] = ackpt.plan(graph, percent / 100, profile=profile)
    except ackpt.BudgetError as error:
        print(textwrap.fill(str(error), 88))
        lowest = ackpt.plan(graph, error.least_bytes, profile=profile)
        break

# %% [markdown]
# For each activation of a block, we count in how many of the four blocks it is saved. (The input of a block counts as
# an activation of the block before it. The smallest activations, the norms' statistics, are not shown.)

# %% tags=["hide-input"]
shown = (80, 60, 40, 30)
places = bert.saved_in({"baseline": none} | {str(percent): plans[percent] for percent in shown})
kinds = "q", "k", "attention weights", "dropout mask of weights", "weights after dropout", "v"
kinds += "attention output", "dropout mask, first branch", "first sum", "first norm", "", ""
kinds += "up-projection output", "GELU output"
kinds += "dropout mask, second branch", "second sum", "second norm", "", ""
rows = []
for name, place in zip(kinds, places, strict=True):
    elements = place["bytes"] // (4 * B * T)
    size = {d: "$d$", f: "$f$", h * T: "$h T$", 1: "1"}[elements]
    if elements > 1:
        rows.append({"activation": name, "size": size} | {str(percent): place[str(percent)] for percent in shown})
columns = {"activation": "activation", "size": "elements per token"}
columns |= {str(percent): f"budget {percent} %" for percent in shown}
caption = f"The number of blocks, out of {L}, that save each activation, by budget; the other blocks recompute it."
path = write_text_atomic("results/tables/10_block.md", markdown_table(rows, columns, caption, "tab-bert-block"))

# %% [markdown]
# ```{include} ../../results/tables/10_block.md
# ```
#
# The dropout mask of the attention weights and the output of GELU are the first to be recomputed, and the weights after
# dropout are next: all three are large and need no matrix product. The attention weights follow: to recompute them, $q$
# and $k$ are multiplied again. The outputs of projections, such as the up-projection, come last.
#
# The *cost* of a plan is the added time as a fraction of the baseline step, as modeled from FLOPs and moved bytes: an
# operation without FLOPs still reads and writes memory. A plan also reports a lower bound: no schedule within the
# budget costs less.


# %%
def more_flops(plan):
    return plan.recompute_flops / (plan.flops - plan.recompute_flops)


for percent in shown:
    plan = plans[percent]
    costs = f"cost {plan.cost:6.2%}, lower bound {plan.lower_bound:6.2%}"
    print(f"budget {percent} %: {more_flops(plan):6.2%} of the FLOPs recomputed, {costs}")

# %% [markdown]
# Why does a plan recompute a certain activation? Each of its decisions names the peak that the plan would have if the
# activation were saved instead. These are the most expensive decisions of the plan with the smallest of these budgets:

# %%
tight = plans[30]
for decision in tight.decisions[:4]:
    over = (decision.peak_if_kept_bytes - tight.limit_bytes) / MIB
    place = f"{decision.module}: {decision.name}"
    print(f"{decision.cost:6.2%}  {place:28} if saved: peak {over:.1f} MiB above the budget")

# %% tags=["hide-input"] alt="Recomputed FLOPs over the dynamic peak, both in percent of the baseline. The line of the plans is at zero from a hundred down to little more than fifty percent of the peak, rises slowly until forty and steeply below thirty. The measured plan is close to the line. Per-block checkpointing is a single point far above it."
line = {}
for plan in (*plans.values(), lowest):
    line[100 * plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes] = 100 * more_flops(plan)
points = {
    name: (100 * run.dynamic_peak_bytes / base.dynamic_peak_bytes, 100 * (run.flops / base.flops - 1))
    for name, run in runs.items()
}
figure = curves_plot(
    {"plan": dict([points["plan"]]), "per-block": dict([points["per-block"]])},
    {"plan": line},
    "",
    xlabel="dynamic peak, % of the baseline's",
    ylabel="recomputed FLOPs, % of the baseline's",
    logs=(),
)
path = plots.save(figure, "results/figures/10_line.png")
figure

# %% [markdown]
# *Plans (line: simulated) halve the dynamic peak with hardly any recomputed FLOPs. The line is simulated and minimizes
# FLOPs and moved bytes; the measured plan minimizes seconds at calibrated rates, so it is above the line, as per-block
# checkpointing is.*
#
# A plan can be saved and loaded. `ackpt.compile(model, plan=loaded, ...)` then runs it without a search, and raises an
# error for any other model.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = lowest.save(f"{folder}/bert.json")
    loaded = ackpt.Plan.load(file)
print(f"the same schedule: {loaded.schedule == lowest.schedule}")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Per-block checkpointing decides about whole modules: it saves one tensor per block and recomputes all matrix products.
# A plan decides about single operations: it first recomputes large, cheap activations, and matrix products only when
# nothing else is left.
# :::

# %% [markdown]
# ## Batches of different lengths
#
# Each batch is padded to its longest sequence, so the length changes from step to step, and the baseline's peak changes
# with it. We run forward and backward on batches of four lengths within 30 MiB. Two blocks are enough to show this.
# `ackpt.compile` is called once, with the first batch.

# %%
lengths = (64, 112, 32, 128)
batches = {length: {name: tensor[:, :length].contiguous() for name, tensor in batch.items()} for length in lengths}
short = models.BertForMaskedLM(replace(sizes, layers=2))
blocks = copy.deepcopy(short)
ackpt.apply_activation_checkpointing(blocks, models.BertBlock)
planned = ackpt.compile(short, budget="30MiB", **batches[64])
ways = {"baseline": (short, short), "per-block": (blocks, blocks), "plan": (planned, short)}


def forward_backward(name, inputs):
    call, module = ways[name]
    torch.manual_seed(0)  # the same dropout masks for all
    module.zero_grad()
    call(**inputs).backward()


# %%
peaks = {name: {} for name in ways}
simulated = {}
for length, inputs in batches.items():
    gradients = {}
    for name, (_, module) in ways.items():
        run = ackpt.measure(partial(forward_backward, name, inputs), resident=(module, *inputs.values()), repeats=0)
        peaks[name][length] = run.peak_bytes
        gradients[name] = [p.grad for p in module.parameters()]
        module.zero_grad()
    assert all(map(torch.equal, gradients["baseline"], gradients["plan"]))
    simulated[length] = planned.plan.peak_bytes
    assert peaks["plan"][length] == simulated[length] <= 30 * MIB

# %% [markdown]
# At every length, the gradients equal the baseline's bit for bit, and the peak equals the simulated one and stays
# within the budget. The history of the planned step lists its captures and plans. We count them:

# %%
for kind, events in Counter(event.kind for event in planned.history).items():
    print(f"{kind}: {events}")

# %% [markdown]
# The first batch was captured for its length only. The second differed in one dimension, so the length became a
# variable. This capture and one search for schedules serve all other lengths: at each of them, the known schedules are
# simulated and the cheapest one within the budget runs. Where the baseline fits, nothing is recomputed.

# %% tags=["hide-input"] alt="Peak at four lengths for three ways. The baseline is below 30 MiB at 32 and 64 tokens and far above it at 112 and 128. The plan has the peak of the baseline at the two short lengths, and stays just below 30 MiB at the others. Per-block checkpointing is lowest at every length, and close to the plan at 128 tokens."
figure = curves_plot(
    {name: {length: points[length] / MIB for length in sorted(lengths)} for name, points in peaks.items()},
    {"plan": {length: simulated[length] / MIB for length in sorted(lengths)}},
    "",
    xlabel="tokens of the longest sequence",
    ylabel="peak, MiB",
    logs=(),
)
path = plots.save(figure, "results/figures/10_lengths.png")
figure

# %% [markdown]
# *The plan stays within 30 MiB at every length, and recomputes nothing where the baseline fits. Per-block checkpointing
# recomputes every block at every length.*
#
# {doc}`../guides/variable_lengths` shows how to use this in your own script.
#
# :::{admonition} Takeaway
# :class: tip
# A budget in bytes bounds the peak of every batch. Batches that fit anyway recompute nothing.
# :::

# %% [markdown]
# ## BERT-large
#
# Now we predict BERT-large for 8 sequences of 512 tokens, from shapes alone: nothing below was run. On the *CPU*
# no kernel fuses attention with dropout, so the attention matrices are materialized, as above. On a *GPU*, in bf16, a
# fused kernel saves neither weights nor dropout masks (Dao et al. 2022,
# [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)). Its backward recomputes both from $q$, $k$ and one sum per row:
# the kernel is a checkpoint inside an operation.

# %% tags=["hide-input"]
on_gpu = replace(bert.GPU, methods=("plain", "per-block", "auto@0.5", "auto@0.3"))
SOURCE = "notebooks/10_bert.py"
large = bert.predicted(on_gpu, SOURCE)
for record in large:
    path = record.save(f"results/cpu/10_{bert_report.file_name(record)}")

# %%
D, F, H = 1024, 4096, 16
A_large = 10 * D + 2 * F + 3 * H * 512 + 4
print(f"24 blocks, materialized, fp32: activations {24 * 4 * 8 * 512 * A_large / MIB:,.0f} MiB, by hand")
print(f"fused, bf16: activations {large[0].metrics['categories']['activations'] / MIB:,.0f} MiB, predicted")

# %% [markdown]
# The fused kernel and bf16 reduce the activations to about a third. What do the methods save beyond that? The published
# figures come from a per-module checkpoint like our per-block checkpointing:

# %% tags=["hide-input"]
reference = load_reference("bert")
rows = bert_report.published_rows(large, gpu_records("bert"))
columns = {"method": "method", "published": "published, MiB", "published_memory": "vs plain, %"}
columns |= {"minutes": "published, min", "published_time": "vs plain, %", "peak": "ours, MiB", "vs_plain": "vs plain, %"}
columns |= {"flops": "FLOPs, %", "measured": "on a GPU, MiB", "measured_time": "on a GPU, time, %"}
caption = (
    f"BERT-large: published memory and time ({reference['hardware']}; the memory is an average that the source prints as "
    "MB), and predicted peak and recomputed FLOPs of our model with fused attention in bf16. `plain` is the baseline, "
    "`auto@f` a plan for the budget $f$."
)
path = write_text_atomic("results/tables/10_published.md", markdown_table(rows, columns, caption, "tab-bert-published"))

# %% [markdown]
# ```{include} ../../results/tables/10_published.md
# ```
#
# The plan for our small BERT halved its dynamic peak with hardly any recomputed FLOPs, because most activations were
# cheap attention matrices. The fused kernel already recomputes these, and matrix products compute a larger part of the
# remaining activations. So the same fraction costs more, but it is relative to a smaller peak.
#
# The published memory is the mean of what `nvidia-smi` showed during the run, not a peak. Batch, length and precision
# are not stated, so we do not predict it: the similar figures in the first row may be a coincidence. The times can be
# compared: an extra forward of the blocks adds 30 % of the FLOPs, and the published time grows by 33 %.
#
# No plans are published. Ours for a budget of 0.3 comes close to the peak of per-block checkpointing, with three fifths of
# its recomputation.
#
# :::{admonition} Takeaway
# :class: tip
# A fused kernel, per-block checkpointing and a plan do the same thing at three scales: inside one operation, for whole
# modules, and for each operation. None can save memory that another has already saved, so compare bytes, not fractions.
# :::

# %% [markdown]
# The numbers on this page were produced in this environment:

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
environment("cpu", SOURCE)

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: without dropout
# :class: note
# What does a block save when dropout is 0? On the CPU, attention is then a fused kernel. Count first, then ask the
# graph. What does it cost to halve the dynamic peak in this case?
# :::

# %% tags=["solution"]
dry_graph = ackpt.trace(models.BertForMaskedLM(replace(sizes, dropout=0.0, layers=2)), **batch)
dry_none = ackpt.plan(dry_graph, policy="none")
dry_saved = {sum(a.bytes for a in activations) for activations in bert.of_blocks(dry_none).values()}
print(f"by hand {4 * B * T * (8 * d + 2 * f + h + 4)}, in the graph {dry_saved}")
print(f"half the dynamic peak: {more_flops(ackpt.plan(dry_graph, 0.5)):.1%} more FLOPs")

# %% [markdown]
# Without dropout there are no masks, which removes $2 d + h T$ elements. The fused kernel saves no matrices, only one
# element per head and token. That gives $A = 8 d + 2 f + h + 4$. Most of the activations that were cheap to recompute are
# gone, so a plan for half the memory must recompute matrix products.
#
# :::{admonition} Exercise 2: when attention dominates
# :class: note
# From which length on do materialized attention matrices need more memory than everything else in a block, for BERT-large
# and for our model?
# :::

# %% tags=["solution"]
for name, (d_, f_, h_) in {"BERT-large": (D, F, H), "ours": (d, f, h)}.items():
    print(f"{name}: T > {(10 * d_ + 2 * f_ + 4) / (3 * h_):.0f}")

# %% [markdown]
# The condition is $3 h T > 10 d + 2 f + 4$. With heads of width 64, $d = 64 h$ and $f = 4 d$, this means $T > 384$ at
# any width.
#
# :::{admonition} Exercise 3: the price of a MiB
# :class: note
# How many FLOPs are recomputed per MiB saved between two neighboring budgets? Where is a MiB most expensive?
# :::

# %% tags=["solution"]
pairs = [(plan.dynamic_peak_bytes / MIB, 100 * more_flops(plan)) for plan in (*list(plans.values())[::2], lowest)]
for (a, cost_a), (b, cost_b) in zip(pairs, pairs[1:]):
    print(f"{a:5.1f} -> {b:5.1f} MiB: {(cost_b - cost_a) / (a - b):5.2f} % of the step's FLOPs per MiB")

# %% [markdown]
# The lower the budget, the more expensive the next MiB, because the cheap activations are already recomputed. So choose
# the largest budget that fits.
#
# ## What we have seen
#
# - Per-block checkpointing saves a block's input and recomputes its whole forward. A plan first recomputes what needs
#   no matrix product, and matrix products only when the budget leaves no other way.
# - A block of BERT saves $10 d + 2 f + 3 h T + 4$ elements per token where attention is materialized. More than half of
#   them can be recomputed without a matrix product.
# - Losses, gradients and parameters are equal to the last bit over three steps, with dropout.
# - The measured peak stays within the budget, at every length of a batch. An infeasible budget is refused.
# - On BERT-large with fused attention, most cheap activations are gone before planning starts, so a plan for half of
#   the dynamic peak already recomputes matrix products.
# - The published increase of a third in time matches one extra forward of the blocks.
#
# ## Sources
#
# - {cite:t}`devlin2018`: model and task.
# - {cite:t}`chen2016`: per-block checkpointing.
# - {cite:t}`dao2022`, {cite:t}`dao2023`: recomputation inside attention.
# - {cite:t}`korthikanti2022`: manual recomputation of attention's core; the same way of counting what a block saves.
