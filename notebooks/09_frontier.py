# %% [markdown]
# # The frontier
#
# **How far is each method from the optimum, and which one should you use when?**

# %% [markdown]
# ```{figure} ../../results/figures/09_time.png
# :alt: Added time over the measured dynamic peak, as fractions of the baseline. Two curves of plans rise slowly from a peak of 0.8 to 0.4, and steeply below; plan (FLOPs) lies above plan. Three dots lie above the lower curve: per-block, PyTorch's per-block at a peak of 0.52, and PyTorch's selective at 0.67. An arrow leads from PyTorch's per-block, 44 percent, down to the plan within the same peak, 5 percent.
# :class: dark-light
#
# Added time and peak of one training step, measured: three layers of BERT with dropout, two CPU cores, eager. A *plan*
# minimizes seconds at the rates of this CPU, *plan (FLOPs)* minimizes FLOPs and moved bytes. Marks are medians, bars
# quartiles. *per-block* is a plan of `ackpt` for whole blocks; *PyTorch: per-block* calls PyTorch's checkpoint around
# each.
# ```
#
# On a Transformer, down to 40 % of the peak, no other plan is more than two percent faster than `ackpt`'s. If the step
# fits, recompute nothing; otherwise, a chart below asks five questions.
#
# A plan is on the (Pareto) *frontier* if no other plan is at least as good in both peak and cost, and better in one.
# The *cost* of a plan is its added time as a fraction of the baseline's step. Unless rates of a device are named, time
# is modeled as FLOPs plus ten FLOPs for each moved byte. Peaks and budgets are fractions of the baseline's dynamic
# peak.

# %% tags=["hide-input"]
import textwrap
import warnings
from dataclasses import replace
from functools import partial

import torch

import ackpt
from experiments import bert, models, optimum
from experiments.frontier import FrontierConfig, run_frontier
from experiments.graph_profile import orders_plot
from experiments.reports import bert as bert_report
from experiments.reports import frontier as frontier_report
from experiments.reports import frontier_times, plots
from experiments.reports.gpu_records import gpu_records
from experiments.results import Record, environment, load_reference, markdown_table, write_text_atomic
from experiments.steps.frontier_models import workload
from experiments.suite.chapters import measure_here
from experiments.widgets import explorer

# torch.compile imports modules that use deprecated torch functions.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20
SOURCE = "notebooks/09_frontier.py"

# %% [markdown]
# On a GPU, the next two cells also run the published experiments, for at most `minutes` ({doc}`12_your_gpu`).

# %% tags=["parameters", "hide-input"]
device, tier, dataset, minutes = "auto", "auto", "embedded", 10

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
measure_here(
    "bert",
    "frontier",
    device=device,
    tier=tier,
    dataset=dataset,
    minutes=minutes,
)

# %% [markdown]
# ## How far from the optimum?
#
# The cheapest plan of a graph is the solution of an integer program, which can be solved for a few layers only. A
# linear program bounds the cost from below for any graph: no plan of `ackpt` costs less. {doc}`13_rotor` derives both.
# Each plan with a budget carries this *lower bound* and its *optimality gap*: how much longer its step takes than the
# lower bound requires.
#
# $$ \begin{gathered} \texttt{plan.lower\_bound} \;\le\; \text{optimum} \;\le\; \texttt{plan.cost} , \\
# \texttt{plan.gap} = \frac{1 + \texttt{plan.cost}}{1 + \texttt{plan.lower\_bound}} - 1 . \end{gathered} $$
#
# The first model is a language model of three layers of width 64, with 4 sequences of 256 tokens:

# %%
SIZES = {
    "layers": 3,
    "dim": 64,
    "heads": 4,
    "ff_dim": 256,
    "vocab_size": 256,
}
SIZES |= {"batch_size": 4, "seq_len": 256}
work = workload("transformer", SIZES, seed=0)
graph = ackpt.trace(work.model, *work.args)
profile = ackpt.profile(graph, workspace="measured")
print(f"{len(graph.nodes)} operations")


# %% tags=["hide-input"]
def percent(row, names):
    return {name: "infeasible" if row[name] is None else f"{100 * row[name]:.1f}" for name in names}


POLICIES = {"auto": "plan", "mu-two": "mu-TWO", "rotor": "rotor", "full": "per-block"}
rows = optimum.distances(graph, profile, (0.8, 0.6, 0.5, 0.4, 0.3, 0.24), tuple(POLICIES))
columns = {"bound": "lower bound"} | POLICIES
table = markdown_table(
    [{"budget": row["budget"]} | percent(row, columns) for row in rows],
    {"budget": "budget"} | columns,
    "A Transformer (three layers of width 64, 1,024 tokens): lower bound and cost of each policy within a budget, in % of "
    "the baseline's step. Cost is modeled from FLOPs and moved bytes. Plan: the default policy, `auto`.",
    "tab-frontier-bound",
)
path = write_text_atomic("results/tables/09_bound.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_bound.md
# ```

# %%
gaps = {
    row["budget"]: (1 + row["auto"]) / (1 + row["bound"]) - 1
    for row in rows
}
for row in rows:
    others = [
        row[policy]
        for policy in ("mu-two", "rotor", "full")
        if row[policy] is not None
    ]
    assert row["bound"] <= row["auto"] <= min(others)
assert max(gap for budget, gap in gaps.items() if budget >= 0.4) < 0.02
print(
    "gap at:",
    ", ".join(f"{budget} {gap:.1%}" for budget, gap in gaps.items()),
)

# %% [markdown]
# Down to 40 percent of the peak, no other plan's step is more than two percent shorter. At the smallest budget, the gap
# is large. An unknown part of it comes from the lower bound, which ignores the bytes of recomputed tensors.
#
# ## Plans and PyTorch's tools, in FLOPs
#
# Plans and PyTorch's tools ({doc}`03_what_pytorch_offers`) run from the same parameters, on the same batch. FLOPs of
# Inductor's fused code cannot be counted, so PyTorch's memory budget runs here with a backend that executes its graphs
# operation by operation.

# %% tags=["hide-input"]
config = FrontierConfig(
    sizes=SIZES, policies=tuple(POLICIES), budgets=(0.6, 0.4, 0.3), settings=(1.0, 0.6, 0.4, 0.0)
)
record = run_frontier(config, SOURCE)
path = record.save("results/cpu/09_frontier-transformer.json")
points, baseline = frontier_report.measured(record), record.metrics["baseline"]

# %% tags=["hide-input"] alt="Recomputed FLOPs over the measured dynamic peak, as fractions of the baseline. A blue staircase, the plans, runs along the bottom from a peak of 1 to 0.6, rises slowly to 0.3, and then steeply. All other policies and PyTorch's tools are on it or above it. The point of PyTorch's memory budget moves left from 0.9 to 0.64 as its setting falls, and then right, beyond 1. A dashed line, the lower bound, runs below the staircase."
figure = frontier_report.frontier_plot(record, "")
path = plots.save(figure, "results/figures/09_frontier.png")
figure

# %% [markdown]
# *Plans reach lower peaks than PyTorch's tools, and recompute no more FLOPs at any peak that these reach. Line: the
# frontier in cost, predicted; dashed: the lower bound. Marks: measured.*
#
# Each planned step has the predicted peak to the byte, within the budget, the predicted FLOPs, and the baseline's
# gradients, bit for bit:

# %%
for row in (*record.metrics["peers"], *points):
    within = [
        plan
        for plan in record.metrics["front"]
        if plan["peak_bytes"] <= row["measured_peak_bytes"]
    ]
    assert (
        min(plan["recompute_flops"] for plan in within)
        <= row["recompute_flops"]
    )
assert frontier_report.broken_promises(record) == []
peaks = {point["measured_peak_bytes"] for point in points}
print(
    f"{len(points)} plans with {len(peaks)} different "
    "peaks are as predicted; no point is below the line"
)

# %% [markdown]
# - **per-block** recomputes whole blocks, with their matrix products. Much of a block is nearly free to recompute: norms,
#   activation functions, sums.
# - **rotor** saves all activations of a block, its input, or nothing.
# - **mu-TWO** drops one tensor at a time. The more it drops, the more often each is recomputed to obtain others.
#
# :::{admonition} Takeaway
# :class: tip
# On this model no policy and no PyTorch tool is below the frontier of plans.
# :::
#
# ## In measured time
#
# Equal FLOPs can take different times. The figure at the top shows measured time: each step alternates with the
# baseline's, and every round gives their ratio. The page reads the records of `python -m experiments frontier`. The
# second line below is a control:


# %% tags=["hide-input"]
def record_of(name: str) -> Record:
    """The record of measured times in `results/frontiers`; its plans keep their promises."""
    loaded = Record.load(f"results/frontiers/frontier-{name}.json")
    assert frontier_report.broken_promises(loaded) == []
    return loaded


timed = record_of("bert")
where = timed.environment
print(f"{where['date']}, {where['device_name']}, {where['threads']} threads, torch {where['torch']}")
print(f"the baseline, timed against itself: {frontier_times.added_time(timed.metrics['eager']):+.1%}")
figure = frontier_times.time_plot(timed, "")
path = plots.save(figure, "results/figures/09_time.png")
blocks, planned = frontier_times.at_the_peak_of_blocks(timed)
print(f"PyTorch's checkpoint around every block: {blocks:+.0%}")
print(f"a plan within the same peak: {planned:+.0%}")
(theirs,) = (peer for peer in timed.metrics["peers"] if peer["peer"] == "checkpoint")
ours = next(point for point in timed.metrics["points"] if point["policy"] == "full")
for name, each in {"PyTorch: per-block": theirs, "per-block": ours}.items():
    share = each["measured_peak_bytes"] / timed.metrics["baseline"]["measured_peak_bytes"]
    work = each["recompute_flops"] / timed.metrics["baseline"]["flops"]
    print(f"{name:18} {each['seconds_ratio']['median'] - 1:+.0%} at {share:.2f} of the peak, {work:.0%} of the FLOPs")

# %% [markdown]
# Why are the two points of per-block checkpointing so far apart? The plan *per-block* cuts wherever a single tensor
# separates earlier from later operations, here twice in each layer: after attention and after the MLP. So it recomputes
# half a layer at a time, and the last half not at all. PyTorch's call covers a whole layer.
#
# A tool may recompute few FLOPs and still add much time. Selective checkpointing recomputes no matrix product here, but
# it handles every operation in Python, and it draws dropout masks again, which is expensive on a CPU.
#
# Other models, and two that Inductor compiles:

# %% tags=["hide-input"]
names = "transformer", "resnet50", "unet", "transformer-inductor", "bert-inductor"
records = [timed, *map(record_of, names)]
table_rows = frontier_times.times_rows([*records, *frontier_times.largest(gpu_records("frontier"))])
caption = (
    "Added time, measured, in % of the baseline's step: PyTorch's per-block checkpointing at its peak, a plan within the "
    "same peak, and one within half of the baseline's, with its modeled (not measured) cost, lower bound and optimality "
    "gap."
)
table = markdown_table(table_rows, frontier_times.COLUMNS, caption, "tab-frontier-models")
path = write_text_atomic("results/tables/09_models.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_models.md
# ```
#
# Here, plans minimize seconds at the rates of this CPU. The Transformer has six layers, the compiled one two. The timed
# processes keep freed memory, as a GPU's caching allocator does; otherwise, the step with the larger peak causes more
# page faults.
#
# ### With Inductor
#
# PyTorch's memory budget is a setting of `torch.compile`. We time it with Inductor, its production backend, relative to
# Inductor's step without a budget:

# %% tags=["hide-input"] alt="Added time over the measured dynamic peak of a BERT that Inductor compiles. Plans with peaks from 0.56 to 0.69 add at most 3 percent, and one with a peak of 0.82 is faster than the baseline. PyTorch's memory budget adds nothing at a peak of 0.73, and 22 percent at 1.12. Per-block checkpointing adds 19 percent at 0.68; an arrow leads from it to the plan within the same peak, -1 percent."
compiled = records[-1]  # the model of the first figure
figure = frontier_times.time_plot(compiled, "")
path = plots.save(figure, "results/figures/09_inductor.png")
below = {
    point["budget"]: f"{1 - point['measured_peak_bytes'] / point['predicted_peak_bytes']:.0%}"
    for point in frontier_report.measured(compiled)
    if point["policy"] == "auto"
}
print("measured below predicted peak:", ", ".join(f"{share} at {budget}" for budget, share in below.items()))
figure

# %% [markdown]
# *Added time and peak of the same three layers of BERT, compiled by Inductor. The memory budget is set to 0.5 (left) and
# 0 (right).*
#
# Inductor fuses and reorders operations, so a plan guarantees no peak. Some tensors that a plan counts never exist, so
# measured peaks can be lower and the planner rejects feasible budgets. We cannot explain one plan's added time of -10 %.
# Compiled dropout draws other masks in each version, so we compare only the Transformer's gradients: they agree up to
# rounding.
#
# ## Exploring the frontier
#
# Choose a budget to see the plan for the Transformer: live memory, the point on the frontier, cost, lower bound, and
# the fate of every activation.

# %% tags=["hide-input"]
data = explorer.explorer(graph, profile, record)
path = explorer.save(data, "results/explorer/09_frontier.json")
feasible = [row for row in data["budgets"] if row["plan"] is not None]
print(f"{len(feasible)} budgets, {len(data['plans'])} different plans")
three = {
    f"{budget:.0%}": ackpt.plan(graph, budget, profile=profile).timeline.thinned(400) for budget in (0.8, 0.5, 0.3)
}
figure = orders_plot(three, "", baseline["resident_bytes"])
path = plots.save(figure, "results/figures/09_explorer.png")

# %% [markdown]
# ```{frontier-explorer} ../../results/explorer/09_frontier.json
# :image: ../../results/figures/09_explorer.png
# :alt: Live memory of the planned step for budgets of 80, 50 and 30 percent of the baseline's peak. As the budget falls, the rising forward and the falling backward stay lower, and the backward gets longer.
# ```
#
# Which activations do the plans recompute first? How does the backward grow below 30 %, where operations are recomputed
# several times?
#
# A plan also lists its most expensive decisions: what each costs, and how far above the budget the peak would be if the
# tensor were saved.

# %% tags=["hide-output"]
print(ackpt.plan(graph, 0.4, profile=profile).table())

# %% [markdown]
# :::{admonition} Exercise 1: monotone plans
# :class: note
# A lower budget should never give a higher peak or a lower cost. Check this with `ackpt.plan(graph, budget,
# profile=profile)` for budgets from 0.9 down to 0.3. Why does it hold, whatever the search finds?
# :::

# %% tags=["solution"]
falling = [ackpt.plan(graph, budget / 10, profile=profile) for budget in range(9, 2, -1)]
peaks, costs = ([getattr(plan, name) for plan in falling] for name in ("peak_bytes", "cost"))
print(f"peaks in order: {peaks == sorted(peaks, reverse=True)}, costs in order: {costs == sorted(costs)}")

# %% [markdown]
# All plans come from one frontier, and on a frontier the peak falls as the cost rises. A new search for every budget
# could not guarantee that.
#
# ## What a plan saves: BERT
#
# Why does a plan beat per-block checkpointing? We look at a small BERT with dropout: four blocks, an eighth of the width
# of BERT-large, sequences a quarter as long. With eight heads and a vocabulary of 640, attention and logits need about
# the same fraction of memory as in BERT-large (Devlin et al. 2018,
# [arXiv:1810.04805](https://arxiv.org/abs/1810.04805)).

# %%
torch.manual_seed(0)
sizes = models.BertConfig(
    dim=128, ff_dim=512, layers=4, heads=8, vocab_size=640
)
B, T_seq, d, f, h, L = (
    8,
    128,
    sizes.dim,
    sizes.ff_dim,
    sizes.heads,
    sizes.layers,
)
model = models.BertForMaskedLM(sizes)
ids = torch.randint(sizes.vocab_size, (B, T_seq))
batch = {
    "input_ids": ids,
    "labels": ids.where(torch.rand(B, T_seq) < 0.15, -100),
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
resident = (model, optimizer, *batch.values())


def step(call):
    call(**batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def measured(call):
    return ackpt.measure(partial(step, call), resident=resident, repeats=0)


# %% [markdown]
# The plan's budget is the peak of per-block checkpointing:

# %%
step(model)  # creates the states of the optimizer
runs = {"baseline": measured(model)}
ackpt.apply_activation_checkpointing(model, models.BertBlock)
runs["per-block"] = measured(model)
names = ackpt.remove_activation_checkpointing(model)
budget = runs["per-block"].peak_bytes
planned = ackpt.compile(model, budget=budget, optimizer=optimizer, **batch)
runs["plan"] = measured(planned)
assert runs["plan"].peak_bytes == planned.plan.peak_bytes <= budget

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
caption = (
    "One step of the small BERT, measured on the CPU. The plan minimizes seconds at the rates of this CPU; its budget is "
    "the peak of per-block."
)
path = write_text_atomic("results/tables/09_bert.md", markdown_table(rows, columns, caption, "tab-bert"))

# %% [markdown]
# ```{include} ../../results/tables/09_bert.md
# ```

# %% tags=["hide-input"] alt="Live memory of three training steps side by side. Baseline: a ramp up to the peak where backward begins, and down again. Per-block checkpointing: a low staircase with spikes in the forward, then four tall teeth in backward. Plan: a ramp a third as high as the baseline, with small teeth on its way down; its peak is as high as the teeth of per-block checkpointing."
figure = orders_plot({name: run.timeline for name, run in runs.items()}, "", base.resident_bytes)
path = plots.save(figure, "results/figures/09_timelines.png")
figure

# %% [markdown]
# *At the peak of per-block, most dynamic memory is recomputed tensors of the block in backward; at the plan's peak,
# saved activations.*
#
# We count the elements per token that a block's backward reads. A linear layer needs its input. Attention needs queries,
# keys and values, and three matrices with $T_\text{seq}$ elements for each head and token: its weights before and after
# dropout, and the dropout mask. A norm needs its input and two statistics, dropout its mask, GELU its input. In this
# block, with width $d$, hidden width $f$ and $h$ heads, their sum $A$ is
#
# $$ A = \underbrace{3 d + 3 h T_\text{seq}}_\text{attention} + \underbrace{d}_\text{its output} +
#    \underbrace{2 \, (3 d + 2)}_\text{masks, sums, norms} + \underbrace{2 f}_\text{GELU}
#    = 10 d + 2 f + 3 h T_\text{seq} + 4 . $$
#
# The plan of policy `"none"` lists everything that the baseline saves:

# %%
graph = ackpt.trace(model, optimizer=optimizer, **batch)
profile = ackpt.profile(graph, workspace="measured")
none = ackpt.plan(graph, policy="none", profile=profile)
A = 10 * d + 2 * f + 3 * h * T_seq + 4
saved = {
    sum(a.bytes for a in activations)
    for activations in bert.of_blocks(none).values()
}
print(
    f"by hand {4 * B * T_seq * A:,} bytes, "
    f"in each block of the graph {saved}"
)
print(f"attention's matrices are {3 * h * T_seq / A:.0%} of it")
print(
    "recomputed without a matrix product: "
    f"{(2 * h * T_seq + f + 4 * d) / A:.0%} of it"
)

# %% [markdown]
# Per-block checkpointing recomputes everything but the input of a block, including the matrix products. A planner
# decides about single operations: the RNG state reproduces dropout masks, the weights after dropout are weights times
# mask, and the outputs of GELU and of the norms follow from their inputs. None of these $2 h T_\text{seq} + f + 4 d$
# elements per token needs a matrix product.
#
# How many blocks save each activation in plans for four budgets? Time is modeled.

# %% tags=["hide-input"]
shown = (80, 60, 40, 30)
plans = {share: ackpt.plan(graph, share / 100, profile=profile) for share in shown}
counts = bert.saved_in({"baseline": none} | {str(share): plans[share] for share in shown})
kinds = "queries", "keys", "attention weights", "dropout mask of weights", "weights after dropout", "values"
kinds += "attention output", "dropout mask, first branch", "first sum", "first norm", "", ""
kinds += "up-projection output", "GELU output"
kinds += "dropout mask, second branch", "second sum", "second norm", "", ""
rows, always = [], []
for name, count in zip(kinds, counts, strict=True):
    elements = count["bytes"] // (4 * B * T_seq)
    if elements == 1:  # statistics of a norm
        continue
    size = {d: "$d$", f: "$f$", h * T_seq: "$h T_\\text{seq}$"}[elements]
    if all(count[str(share)] == L for share in shown):
        always.append(name)
    else:
        rows.append({"activation": name, "size": size} | {str(share): count[str(share)] for share in shown})
columns = {"activation": "activation", "size": "elements per token"}
columns |= {str(share): f"budget {share} %" for share in shown}
caption = f"The number of blocks, out of {L}, that save each activation, by budget; the other blocks recompute it."
path = write_text_atomic("results/tables/09_block.md", markdown_table(rows, columns, caption, "tab-bert-block"))
print(textwrap.fill(f"saved by all blocks at every budget: {'; '.join(always)}", 76))

# %% [markdown]
# ```{include} ../../results/tables/09_block.md
# ```
#
# The dropout mask of the attention weights and the output of GELU are the first to be recomputed, and the weights after
# dropout are next: all three are large and need no matrix product. The outputs of projections come last.


# %%
def more_flops(plan):
    return plan.recompute_flops / (plan.flops - plan.recompute_flops)


for share, plan in plans.items():
    costs = f"cost {plan.cost:5.1%}, lower bound {plan.lower_bound:5.1%}"
    print(
        f"budget {share} %: {more_flops(plan):5.2%} "
        f"of the FLOPs recomputed, {costs}"
    )

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Per-block checkpointing decides about whole modules. A plan decides about single operations: it first recomputes
# large, cheap activations, and matrix products only for small budgets.
# :::
#
# :::{admonition} Exercise 2: without dropout
# :class: note
# What does a block save when dropout is 0? On the CPU, attention is then a fused kernel. Count first, then ask the
# graph. What does it cost to halve the dynamic peak in this case?
# :::

# %% tags=["solution"]
dry_graph = ackpt.trace(models.BertForMaskedLM(replace(sizes, dropout=0.0, layers=2)), **batch)
dry_none = ackpt.plan(dry_graph, policy="none")
dry_saved = {sum(a.bytes for a in activations) for activations in bert.of_blocks(dry_none).values()}
print(f"by hand {4 * B * T_seq * (8 * d + 2 * f + h + 4):,}, in the graph {dry_saved}")
print(f"half the dynamic peak: {more_flops(ackpt.plan(dry_graph, 0.5)):.1%} more FLOPs")

# %% [markdown]
# Without dropout there are no masks, which removes $2 d + h T_\text{seq}$ elements. The fused kernel saves no matrices,
# only one element per head and token. Here, $A = 8 d + 2 f + h + 4$. Most of the activations that were cheap to
# recompute are gone, so a plan for half the memory must recompute matrix products.
#
# :::{admonition} Exercise 3: when attention dominates
# :class: note
# From which length on do materialized attention matrices need more memory than everything else in a block of BERT-large
# ($d = 1024$, $f = 4096$, $h = 16$)?
# :::

# %% tags=["solution"]
print(f"from {(10 * 1024 + 2 * 4096 + 4) // (3 * 16) + 1} tokens on")

# %% [markdown]
# The condition is $3 h T_\text{seq} > 10 d + 2 f + 4$. With heads of width 64 and $f = 4 d$, this length hardly varies
# with the width.
#
# (bert-large)=
# ## BERT-large with a GPU's kernels
#
# Now we predict BERT-large for 8 sequences of 512 tokens in bf16, from shapes alone. On a GPU, a fused kernel saves
# neither attention weights nor their dropout masks (Dao et al. 2022,
# [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)). Its backward recomputes both from queries, keys, one sum per row
# and the RNG state: a checkpoint inside an operation. How much further do other methods lower the peak?

# %% tags=["hide-input"]
on_gpu = replace(bert.GPU, methods=("baseline", "per-block", "auto@0.5", "auto@0.3"))
large = bert.predicted(on_gpu, SOURCE)
for prediction in large:
    path = prediction.save(f"results/cpu/09_{bert_report.file_name(prediction)}")
reference = load_reference("bert")
rows = bert_report.published_rows(large, gpu_records("bert"))
named = {"auto@0.5": "plan, budget 0.5", "auto@0.3": "plan, budget 0.3"}
rows = [row | {"method": named.get(row["method"], row["method"])} for row in rows]
columns = {"method": "method", "published": "published, MiB", "published_memory": "memory, %"}
columns |= {"minutes": "published, minutes", "published_time": "time, %", "average": "our average, MiB"}
columns |= {"peak": "our peak, MiB", "vs_baseline": "peak, %", "flops": "recomputed FLOPs, %"}
columns |= {"measured": "on a GPU, MiB", "measured_time": "on a GPU, time, %"}
caption = (
    f"BERT-large: published memory and time ({reference['hardware']}; the memory is an average that the source prints as "
    "MB), and predicted peak and recomputed FLOPs of our model with fused attention in bf16. Ours averages over "
    "allocations and frees, not over time. Memory, time and peak in %: change relative to the baseline."
)
path = write_text_atomic("results/tables/09_published.md", markdown_table(rows, columns, caption, "tab-bert-published"))

# %% [markdown]
# ```{include} ../../results/tables/09_published.md
# ```
#
# The fused kernel already recomputes the largest of the activations that need no matrix product. So on a GPU a plan
# gains less: at the peak of per-block checkpointing, it recomputes three fifths as many FLOPs, and for the small BERT
# less than half.
#
# The published memory is a mean, and batch, length and precision are not stated, so we do not predict it. The added work
# can be compared: per-block checkpointing recomputes 30 % of the FLOPs, and the published time grows by 33 %.
#
# :::{admonition} Takeaway
# :class: tip
# A fused kernel, per-block checkpointing and a plan all recompute. None can free memory that another has already freed,
# so compare bytes, not fractions.
# :::
#
# (which-method)=
# ## Which method when
#
# Ask in this order:

# %% tags=["hide-input"] alt="A chart of five questions, one below the other; a yes leads to a method. Weights, gradients and optimizer state exceed the memory: adapters, 8-bit state or FSDP2. Logits larger than the inputs of all blocks: chunk the head. Activations exceed the rest: a budget. The model cannot be planned: regions. Inputs still fill the memory and copies are free: offload."
from experiments.running_model import bars, decisions

figure = decisions()
path = plots.save(figure, "results/figures/09_decisions.png")
figure

# %% [markdown]
# *The thresholds are derived in {doc}`01_where_memory_goes`, {doc}`04_logits` and {doc}`05_offload`.* What the methods
# cost:

# %% tags=["hide-input"]
choices = frontier_times.choices(records)
columns = {"step": "your step", "use": "use", "peak": "peak, % of the baseline's", "time": "added time, %"}
caption = "Which method when. Peaks and times: the lowest and the highest of the models timed on this page."
table = markdown_table(choices, columns, caption, "tab-frontier-which-method")
path = write_text_atomic("results/tables/09_which_method.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_which_method.md
# ```
#
# ## Llama 3 8B with a plan

# %% tags=["hide-input"] alt="Eight stacked bars. With a plan within 65 GiB, the peak is 63.7 GiB, and the time 1.43 seconds."
figure = bars(9)
path = plots.save(figure, "results/figures/09_running_model.png")
figure

# %% [markdown]
# *The step of {doc}`chapter 1 <01_where_memory_goes>`, planned within 65 GiB, with its head in chunks; predicted.*
#
# The plan needs 38 % of the baseline's memory and 9 % more time. Per-block checkpointing takes 25 % more time.
# {doc}`../out_of_memory` suggests this budget for the GPU.
#
# ## Summary
#
# - A block of BERT saves $10 d + 2 f + 3 h T_\text{seq} + 4$ elements per token where attention is materialized. More than
#   half of these can be recomputed without a matrix product. With fused attention, most of these are never saved.
#
# You can now read a plan, and judge how far a method is from the optimum.
#
# The numbers on this page were produced in this environment:

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
environment("cpu", SOURCE)

# %% [markdown]
# ## Sources
#
# - {cite:t}`purandare2023`: mu-TWO. {cite:t}`devlin2018`: model and task. {cite:t}`dao2022`, {cite:t}`dao2023`:
#   recomputation inside attention. {cite:t}`korthikanti2022`: the same way of counting what a block saves.
