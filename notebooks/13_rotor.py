# %% [markdown]
# # Rotor and searches
#
# **Which plan of a chain, and of any graph, costs least within a budget, and how can it be found?**

# %% [markdown]
# ```{figure} ../../results/figures/13_pyramid.png
# :alt: Cost over the dynamic peak, both in percent of the baseline. Three lines fall to the right and end at no cost at 100 percent. The line of rotor is nowhere above the others and extends furthest to the left.
# :class: dark-light
# :name: fig-pyramid
#
# Cost and dynamic peak of the plans of three policies, for a chain of unequal blocks. No policy is cheaper than rotor,
# which also reaches the lowest peak.
# ```
#
# A dynamic program (*rotor*) finds the best plan of a chain, an integer program that of a small graph. For other
# graphs, `ackpt` searches, and a linear program gives a lower bound on the cost of every plan.
#
# The *cost* $c_i$ of an operation is its FLOPs, plus ten FLOPs for each byte that it reads or writes, as a fraction of
# the baseline's. A plan's cost is the sum over the operations that it recomputes. Peaks and budgets $M$ are fractions
# of the baseline's dynamic peak.

# %% tags=["hide-input"]
import warnings

import torch
from torch import nn

import ackpt
from experiments import optimum, sublinear
from experiments.policies import ilp, revolve, rotor
from experiments.reports import figures, plots
from experiments.results import environment, markdown_table, write_text_atomic
from experiments.steps.frontier_models import workload

# torch.compile imports modules that use deprecated torch functions.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
torch.set_num_threads(2)
generator = torch.manual_seed(0)

# %% [markdown]
# ## Chains of unequal blocks
#
# In real networks, blocks differ in the bytes that they save and in the time that they take. *rotor* (Beaumont et al.
# 2019, [arXiv:1911.13214](https://arxiv.org/abs/1911.13214)) describes each block by four numbers: the times of its
# forward and backward, the bytes of its output, and the bytes of everything that its forward saves, including the
# output. The forward of a block runs in one of three ways. It saves everything (`all`), only its input as a checkpoint
# (`ckpt`), or nothing (`none`). A dynamic program finds the fastest schedule within a budget among all *persistent*
# schedules, in which a saved tensor stays live until it is used.

# %%
blocks = rotor.Chain(
    forward=(2, 1, 4, 3),
    backward=(4, 2, 8, 6),
    output_bytes=(1, 2, 1, 2),
    saved_bytes=(2, 5, 3, 4),
)
short = {
    rotor.FORWARD_ALL: "all",
    rotor.FORWARD_CHECKPOINT: "ckpt",
    rotor.FORWARD_NONE: "none",
}
for budget in (16, 13, 11, 9, 8):
    best = rotor.solve(blocks, budget)
    ways = [
        f"{short[kind]} {block}"
        for kind, block in best.operations
        if kind in short
    ]
    print(f"{budget:2} bytes, time {best.time}: {', '.join(ways)}")

# %% [markdown]
# A block runs forward as often as it is listed. The baseline takes 30, and no schedule fits into 7 bytes. A slightly
# smaller budget recomputes only block 1, whose forward saves 5 bytes and takes 1.
#
# Like a convolutional network, our next chain narrows from front to back: four groups of eight blocks, whose
# activations halve from group to group. We run rotor's plan for a budget of 60 %:

# %%
pyramid, pyramid_x = sublinear.pyramid(4, 8, 8), torch.randn(4096, 8)
step = ackpt.compile(pyramid, pyramid_x, budget=0.6, policy="rotor")


def train_pyramid():
    pyramid.zero_grad()
    step(pyramid_x).backward()


run, plan = (
    ackpt.measure(train_pyramid, resident=[pyramid, pyramid_x], repeats=0),
    step.plan,
)
assert run.dynamic_peak_bytes == plan.dynamic_peak_bytes <= plan.limit_bytes
print(
    f"planned {plan.dynamic_peak_bytes:,} "
    f"bytes, measured {run.dynamic_peak_bytes:,}"
)

# %% tags=["hide-input"]
graph = ackpt.trace(pyramid, pyramid_x)
profile = ackpt.profile(graph, workspace="measured")
rows = sublinear.within(graph, profile, [budget / 100 for budget in range(100, 40, -6)], ("rotor", "revolve", "chen-sqrt"))
lines, by_budget = {}, {}
for row in rows:
    if row["cost"] is not None:
        lines.setdefault(row["policy"], {})[100 * row["peak"]] = 100 * row["cost"]
        by_budget.setdefault(row["budget"], {})[row["policy"]] = row["cost"]
assert all(costs["rotor"] == min(costs.values()) for costs in by_budget.values())
axes = {"xlabel": "dynamic peak, % of the baseline's", "ylabel": "cost, % of the baseline step"}
path = plots.save(figures.curves_plot({}, lines, "", **axes, logs=()), "results/figures/13_pyramid.png")

# %% [markdown]
# In {ref}`the figure at the top <fig-pyramid>`, the other policies only count blocks: they ignore that activations in
# the first group are eight times as large as those in the last.
#
# ## The optimum of a graph
#
# For other graphs, Checkmate (Jain et al. 2020, [arXiv:1910.02653](https://arxiv.org/abs/1910.02653)) writes the optimum
# as an integer program. Fix an order of the operations. *Stage* $q$ may compute any earlier operation, and ends with
# the first computation of operation $q$. Every pair of stage and operation has two unknowns: $v_{q,i}$ is 1 if stage $q$
# computes $i$, and $u_{q,i}$ is 1 if the output of $i$ is still saved when stage $q$ starts.
#
# $$ \min \sum_q \sum_i c_i v_{q,i} \quad \text{where} \quad v_{q,j} \le v_{q,i} + u_{q,i} \;\; (j \text{ reads } i) ,
# \qquad u_{q,i} \le v_{q-1,i} + u_{q-1,i} , $$
#
# and where at most $M$ bytes are live during each computation. As an example, take six layers whose results are all
# read in backward. Every result has one byte; a forward costs 1, a backward 2, so the baseline 18:

# %%
def line(n):
    # forward, then into the last layer's backward
    edges = {
        (i, i + 1) for i in range(n)
    }
    for layer in range(n):
        backward = 2 * n - 1 - layer
        # its result, its input, the gradient
        reads = [
            layer,
            layer - 1,
            backward - 1,
        ]
        edges |= {(i, backward) for i in reads if i >= 0}
    return ilp.Dag([1] * n + [2] * n, [1] * (2 * n), sorted(edges))


for budget in (7, 6, 5, 4, 3):
    try:
        best = ilp.solve(line(6), budget)
        print(f"{budget} bytes: cost {best.cost}, proved {best.optimal}")
    except ackpt.BudgetError as error:
        print(str(error).replace("; ", ";\n"))

# %% [markdown]
# An exact solver does not scale: the number of unknowns grows with the square of the number of operations. The policy
# `ilp` accepts at most 160 operations, a few layers.
#
# ## A lower bound
#
# For larger graphs, drop the parts that make the program hard: the order of operations and the bytes of recomputed
# results. Also allow fractions: $u_\sigma$ of the storage $\sigma$ is saved, and $v_i$ of the operation $i$ is recomputed.
# The operation $i(\sigma)$ computes $\sigma$, which has $b_\sigma$ bytes. This leaves a *linear* program:
#
# $$ \begin{aligned}
# \min \; & \sum_i c_i v_i \quad \text{where} \\
# & u_\sigma + v_{i(\sigma)} \ge 1 && \text{if backward reads } \sigma , \\
# & u_\sigma + v_{i(\sigma)} \ge v_i && \text{if the recomputed } i \text{ reads } \sigma \text{,} \\
# & \textstyle\sum b_\sigma u_\sigma \le M - a && \text{at every instant of backward.}
# \end{aligned} $$
#
# At each instant, the sum counts the saved bytes that are still to be read, and $a$ counts what is live regardless:
# gradients, and the inputs and outputs of the current operation.
#
# All plans of this package run each backward operation once, in the graph's order. They satisfy these conditions with
# zeros and ones, so none of them costs less than the linear program's optimum. This is `plan.lower_bound`; `plan.gap`
# is the optimality gap of {doc}`09_frontier`.
#
# ## How far policies are from the optimum
#
# Three graphs are small enough for the integer program: a chain of four blocks as in {doc}`06_sublinear_memory`, three
# residual MLP blocks, and a small U-Net, whose skip connections span its middle. *Plan* is the default policy, `auto`:

# %% tags=["hide-input"]
mlps, x = nn.Sequential(*(optimum.MLPBlock(16) for _ in range(3))), torch.randn(1024, 16)
chain = sublinear.Chain(*(sublinear.Block(4) for _ in range(4)))
unet, pictures = optimum.SmallUNet(), torch.randn(2, 3, 32, 32)
cases = {
    "4 equal blocks": (chain, torch.randn(4096, 4), (0.9, 0.8)),
    "3 MLP blocks": (mlps, x, (0.7, 0.6, 0.5)),
    "U-Net": (unet, pictures, (0.8,)),
}
POLICIES = "auto", "mu-two", "rotor"
exact = []
for name, (model, example, budgets) in cases.items():
    graph = ackpt.trace(model, example)
    profile = ackpt.profile(graph, workspace="measured")
    rows = optimum.distances(graph, profile, budgets, POLICIES, exact=True)
    exact += [{"model": name, **row} for row in rows]


def percent(row, names):
    return {name: "infeasible" if row[name] is None else f"{100 * row[name]:.2f}" for name in names}


columns = {"bound": "lower bound", "ilp": "optimum", "auto": "plan", "mu-two": "mu-TWO", "rotor": "rotor"}
table = markdown_table(
    [{"case": f"{row['model']}, {row['budget']}"} | percent(row, columns) for row in exact],
    {"case": "model, $M$"} | columns,
    "Cost in % of the baseline's step, for three small models and budgets $M$: lower bound, proved optimum for the graph's "
    "own order of operations (`ilp`), and three policies.",
    "tab-frontier-exact",
)
path = write_text_atomic("results/tables/13_exact.md", table)

# %% [markdown]
# ```{include} ../../results/tables/13_exact.md
# ```

# %%
for row in exact:
    assert (
        row["ilp"] == row["ilp_bound"] and row["bound"] <= row["ilp"] + 1e-9
    )
    assert all(row["ilp"] <= row[policy] + 1e-9 for policy in POLICIES)
missed = [row for row in exact if row["auto"] > row["ilp"] + 1e-9]
assert {row["model"] for row in missed} <= {"U-Net"}
print(
    "the plan has the optimum in "
    f"{len(exact) - len(missed)} of {len(exact)} cases"
)
for row in missed:
    longer = (1 + row["auto"]) / (1 + row["ilp"]) - 1
    assert longer < 0.02
    print(
        f"{row['model']} at {row['budget']}: the step "
        "costs less than 2% more than the optimum"
    )

# %% [markdown]
# The optimum is an ordinary plan. We run it on the U-Net:

# %%
step = ackpt.compile(unet, pictures, budget=0.8, policy=ilp.ilp)


def gradients(run):
    unet.zero_grad()
    run(pictures).backward()
    return [parameter.grad for parameter in unet.parameters()]


assert all(
    a.equal(b)
    for a, b in zip(gradients(unet), gradients(step), strict=True)
)
run = ackpt.measure(
    lambda: gradients(step), resident=[unet, pictures], repeats=0
)
print(
    "gradients bit-equal; measured minus predicted: "
    f"{run.dynamic_peak_bytes - step.plan.dynamic_peak_bytes} bytes"
)

# %% [markdown]
# On the smallest graphs the lower bound is far from the optimum, because the linear program may save half a tensor.
#
# :::{admonition} Takeaway
# :class: tip
# The optimum is known for a few layers only, a lower bound for every graph. A small gap proves a plan good; a large gap
# proves nothing.
# :::
#
# ## How auto searches
#
# The table shows what each part of the search adds on the Transformer of {doc}`09_frontier`: the lowest cost with all
# parts up to and including it.

# %% tags=["hide-input"]
SIZES = {"layers": 3, "dim": 64, "heads": 4, "ff_dim": 256, "vocab_size": 256}
SIZES |= {"batch_size": 4, "seq_len": 256}
work = workload("transformer", SIZES, seed=0)
graph = ackpt.trace(work.model, *work.args)
profile = ackpt.profile(graph, workspace="measured")
WHAT = {
    "segments": "segments, recomputed as a whole or tensor by tensor",
    "blocks": "the best options of each block, combined over the chain",
    "levels": "blocks that save a part when they are recomputed for a later block",
    "instead": "a smaller tensor saved in place of a larger one that follows from it without a matrix product",
    "policies": "the plans of `rotor` and `mu-two`",
    "refined": "plans between two neighbors, with more activations saved",
    "evicted": "plans that drop activations which nothing reads at the peak, and recompute them afterwards",
}
within = (0.6, 0.4, 0.3, 0.24)
table_rows = []
for name, found in optimum.parts_of_auto(graph, profile).items():
    row = {"part": WHAT[name], "plans": len(found)}
    for budget, cost in optimum.least_costs(graph, profile, found, within).items():
        row[str(budget)] = "none" if cost is None else f"{100 * cost:.2f}"
    table_rows.append(row)
columns = {"part": "added", "plans": "plans"} | {str(budget): f"$M = {budget}$" for budget in within}
caption = (
    "The search of `auto`, part by part: number of plans on the frontier, and lowest cost, in % of the baseline's step, "
    "within four budgets $M$."
)
table = markdown_table(table_rows, columns, caption, "tab-frontier-parts")
path = write_text_atomic("results/tables/13_parts.md", table)

# %% [markdown]
# ```{include} ../../results/tables/13_parts.md
# ```
#
# The search cuts the graph where a single tensor separates earlier from later operations. For each block, it finds the
# useful sets of tensors to save: no other set is better in saved bytes, peak and cost at once. Then the recursion of
# rotor combines them over the chain, with one difference: a block that is recomputed only to reach a later one may save
# a *part* of its activations for its own backward.
#
# The numbers of this page were measured here:

# %% tags=["measured-time", "nbval-ignore-output"]
environment("cpu", "notebooks/13_rotor.py")

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: save or recompute
# :class: note
# Take eight equal blocks, with all sizes and times equal to 1. How long do rotor's schedules take for budgets from 3 to
# 10, and Revolve's for 1 to 8 snapshots? Count every forward and every backward, with `rotor.solve` and
# `revolve.advances`. Why is rotor faster?
# :::

# %% tags=["solution"]
unit = rotor.Chain([1] * 8, [1] * 8, [1] * 8, [1] * 8)
print([rotor.solve(unit, budget).time for budget in range(3, 11)])
print([revolve.advances(8, s) + 8 + 8 for s in range(1, 9)])

# %% [markdown]
# Revolve runs every block once more to reverse it, even with a snapshot of each state. rotor may save all activations
# of a block, whose backward then needs no recomputation.
#
# :::{admonition} Exercise 2: by hand
# :class: note
# Take four layers instead of six, and leave everything else as in the first example of the integer program. The
# baseline has five live results at its peak. What does the optimum cost with four bytes, and why are three infeasible?
# :::

# %% tags=["solution"]
for budget in (5, 4, 3):
    try:
        print(f"{budget} bytes: cost {ilp.solve(line(4), budget).cost}")
    except ackpt.BudgetError as error:
        print(str(error).replace("; ", ";\n"))

# %% [markdown]
# With four bytes, one forward is recomputed. The backward of a layer reads three results and computes one, so four
# results are live even if everything else is freed.
#
# ## Summary
#
# You can now say for which graphs the cheapest plan is known, and bound it for the others.
#
# ## Sources
#
# - {cite:t}`kirisame2021`: a greedy heuristic that drops tensors, a start for our solver. {cite:t}`zhao2023`: several
#   options per block.
