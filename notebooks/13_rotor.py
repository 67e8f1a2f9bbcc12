# %% [markdown]
# # Rotor and searches
#
# **Which plan of a chain, and of any graph, costs least within a budget, and how can it be found?**

# %% [markdown]
# ```{figure} ../../results/figures/13_pyramid.png
# :alt: Cost over the dynamic peak, both in percent of the baseline. Three lines fall to the right and end at no cost at 100 percent. The line of rotor is nowhere above the others and extends furthest to the left.
# :class: dark-light
#
# Cost and dynamic peak of the plans of three policies, for a chain of unequal blocks.
# ```
#
# This appendix finds the best plan of a chain (*rotor*) and of a graph (an integer program), bounds the cost of every
# plan from below, and describes the search of the policy `auto`. It belongs to {doc}`06_sublinear_memory` and
# {doc}`09_frontier`.
#
# :::{admonition} Symbols of this appendix
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $\bar a$ | bytes that the forward of a stage saves, including its output |
# | $B$ | the budget: bytes live at one time on top of the resident memory |
# | $b_s$ | bytes of the storage $s$ |
# | $c_i$ | cost of the operation $i$: its FLOPs, plus ten FLOPs for each byte that it reads or writes |
# | $R_{t,i}$, $S_{t,i}$ | 1 if stage $t$ computes $i$; 1 if the result of $i$ is still saved when stage $t$ starts |
# | $p(s)$ | the operation that computes the storage $s$ |
# | $u_s$, $v_i$ | the fraction of $s$ saved from forward to backward, and of $i$ recomputed, between 0 and 1 |
# | $a$ | bytes that are live at an instant, no matter what is saved |
# :::
#
# Costs are fractions of the baseline's cost. Peaks and, in the tables, $B$ are fractions of its dynamic peak.

# %%
import warnings

import torch
from torch import nn

import ackpt
from ackpt.metering import plots
from ackpt.policies import ilp, revolve, rotor
from experiments import optimum, sublinear
from experiments.reports import figures
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
# 2019, [arXiv:1911.13214](https://arxiv.org/abs/1911.13214)) describes each stage by four numbers: the times of its
# forward and backward, the bytes of its output, and the bytes $\bar a$ of everything that its forward saves, including
# the output. The forward of a stage runs in one of three ways. It saves everything (`all`), only its input as a
# checkpoint (`ckpt`), or nothing (`none`).
#
# A dynamic program finds the fastest schedule within a budget among all *persistent* schedules, in which a saved tensor
# stays live until it is used.

# %%
stages = rotor.Chain(
    forward=(2, 1, 4, 3),
    backward=(4, 2, 8, 6),
    output_bytes=(1, 2, 1, 2),
    saved_bytes=(2, 5, 3, 4),
)
short = {rotor.FORWARD_ALL: "all", rotor.FORWARD_CHECKPOINT: "ckpt", rotor.FORWARD_NONE: "none"}
for budget in (16, 13, 11, 9, 8):
    best = rotor.solve(stages, budget)
    ways = [f"{short[kind]} {stage}" for kind, stage in best.operations if kind in short]
    print(f"{budget:2} bytes, time {best.time}: {', '.join(ways)}")

# %% [markdown]
# A stage runs forward as often as it is listed. The baseline takes 30, and no schedule fits into 7 bytes. Smaller budgets
# repeat forwards, the cheap ones first: stage 1, which saves 5 bytes and takes 1, before stage 0, which saves 2 bytes and
# takes 2.
#
# A realistic chain of this kind narrows from front to back, like a convolutional network. Ours has four stages of eight
# blocks. From one stage to the next the activations halve, while the FLOPs of a block stay the same. We run rotor's plan
# for a budget of 60 percent of the baseline's dynamic peak:

# %%
pyramid, pyramid_x = sublinear.pyramid(4, 8, 8), torch.randn(4096, 8)
step = ackpt.compile(pyramid, pyramid_x, budget=0.6, policy="rotor")


def train_pyramid():
    pyramid.zero_grad()
    step(pyramid_x).backward()


run, plan = ackpt.measure(train_pyramid, resident=[pyramid, pyramid_x], repeats=0), step.plan
assert run.dynamic_peak_bytes == plan.dynamic_peak_bytes <= plan.limit_bytes
print(f"planned {plan.dynamic_peak_bytes:,} bytes, measured {run.dynamic_peak_bytes:,}")

# %% [markdown]
# The next figure shows the plans of three policies within several budgets. The *cost* of a plan is its added time as a
# fraction of the baseline step, modeled from FLOPs and moved bytes.

# %% tags=["hide-input"] alt="Cost over the dynamic peak, both in percent of the baseline. Three lines fall to the right and end at no cost at 100 percent. The line of rotor is nowhere above the others and extends furthest to the left."
graph = ackpt.trace(pyramid, pyramid_x)
profile = ackpt.profile(graph, workspace="measured")
rows = sublinear.within(graph, profile, [budget / 100 for budget in range(100, 40, -6)], ("rotor", "revolve", "chen-sqrt"))
lines, by_budget = {}, {}
for row in rows:
    if row["cost"] is not None:
        lines.setdefault(row["policy"], {})[100 * row["peak"]] = 100 * row["cost"]
        by_budget.setdefault(row["budget"], {})[row["policy"]] = row["cost"]
assert all(costs["rotor"] == min(costs.values()) for costs in by_budget.values())
figure = figures.curves_plot(
    {},
    lines,
    "",
    xlabel="dynamic peak, % of the baseline's",
    ylabel="cost, % of the baseline step",
    logs=(),
)
path = plots.save(figure, "results/figures/13_pyramid.png")
figure

# %% [markdown]
# *On unequal blocks, no policy is cheaper than `rotor`, which also reaches the lowest peak.*
#
# This holds by construction: the candidates of our policy `rotor` include the schedules of the other policies, and the
# simulator picks the cheapest one that fits. The other policies count blocks. They ignore that a boundary in the first
# stage needs eight times as much memory as a boundary in the last.

# %% [markdown]
# ## The optimum of a graph
#
# Rotor finds the best plans of chains. Other graphs have an optimum, too. Checkmate (Jain et al. 2020,
# [arXiv:1910.02653](https://arxiv.org/abs/1910.02653)) writes it as an integer program. Fix an order of the operations.
# Stage $t$ may compute any earlier operation, and ends with the first computation of operation $t$. Every pair of stage
# and operation has two unknowns: $R_{t,i}$ says whether stage $t$ computes $i$, and $S_{t,i}$ whether the result of $i$
# is saved from the previous stage.
#
# $$ \min \sum_t \sum_i c_i R_{t,i} \quad \text{where} \quad R_{t,j} \le R_{t,i} + S_{t,i} \;\; (j \text{ reads } i) ,
# \qquad S_{t,i} \le R_{t-1,i} + S_{t-1,i} , $$
#
# and where at most $B$ bytes are live during each computation. As an example, take six layers whose results are all
# read in backward. Every result has one byte; a forward costs 1, a backward 2:


# %%
def line(n):
    edges = {(i, i + 1) for i in range(n)}  # forward, then into the last layer's backward
    for layer in range(n):
        backward = 2 * n - 1 - layer
        reads = [layer, layer - 1, backward - 1]  # its result, its input, the gradient
        edges |= {(i, backward) for i in reads if i >= 0}
    return ilp.Dag([1] * n + [2] * n, [1] * (2 * n), sorted(edges))


for budget in (7, 6, 5, 4, 3):
    try:
        best = ilp.solve(line(6), budget)
        print(f"{budget} bytes: cost {best.cost}, proved {best.optimal}")
    except ackpt.BudgetError as error:
        print(error)

# %% [markdown]
# With seven bytes, nothing is recomputed. Below four bytes no schedule exists, and the solver proves that, too.
#
# An exact solver does not scale: the number of unknowns grows with the square of the number of operations. The policy
# `ilp` accepts graphs of at most 160 operations, which is a few layers. For larger graphs we compute a lower bound.
#
# ## A lower bound
#
# Drop the parts that make the program hard: the order of operations and the bytes of recomputed results. Also allow
# fractions: a fraction $u_s$ of the storage $s$ is saved, and a fraction $v_i$ of the operation $i$ is recomputed. This
# leaves a *linear* program with two unknowns per operation:
#
# $$ \begin{aligned}
# \min \; & \sum_i c_i v_i \quad \text{where} \\
# & u_s + v_{p(s)} \ge 1 && \text{if backward reads } s , \\
# & u_s + v_{p(s)} \ge v_i && \text{if the recomputed } i \text{ reads } s \text{,} \\
# & \textstyle\sum b_s u_s \le B - a && \text{at every instant of backward.}
# \end{aligned} $$
#
# At each instant of backward, the sum counts the bytes that are still to be read, and $a$ counts what is live
# regardless: gradients, and the inputs and outputs of the current operation.
#
# All plans of this package run each backward operation once, in the graph's order. They satisfy these conditions with
# zeros and ones, so none of them costs less than the optimum of the linear program. Each plan with a budget carries
# this lower bound, and its *optimality gap*, which says how much more the step costs than the lower bound requires:
#
# $$ \texttt{plan.lower\_bound} \;\le\; \text{optimum} \;\le\; \texttt{plan.cost} , \qquad
# \texttt{plan.gap} = \frac{1 + \texttt{plan.cost}}{1 + \texttt{plan.lower\_bound}} - 1 . $$
#
# ## How far policies are from the optimum
#
# Three residual MLP blocks are small enough for the integer program. We capture their step once, and plan it by several
# policies within half of the baseline's dynamic peak:

# %%
mlps = nn.Sequential(*(optimum.MLPBlock(16) for _ in range(3)))
x = torch.randn(1024, 16)
graph = ackpt.trace(mlps, x)
profile = ackpt.profile(graph, workspace="measured")
for policy in ("ilp", "auto", "rotor", "full"):
    plan = ackpt.plan(graph, 0.5, policy, profile=profile)
    print(f"{policy:5}  cost {plan.cost:.2%}, lower bound {plan.lower_bound:.2%}, gap {plan.gap:.2%}")

# %% [markdown]
# We repeat this at other budgets and on two more graphs: a chain of four blocks as in {doc}`06_sublinear_memory`, and a
# small U-Net, whose skip connections span its middle.

# %% tags=["hide-input"]
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


columns = {"bound": "lower bound", "ilp": "`ilp`"} | {policy: f"`{policy}`" for policy in POLICIES}
table = markdown_table(
    [{"case": f"{row['model']}, {row['budget']}"} | percent(row, columns) for row in exact],
    {"case": "model, $B$"} | columns,
    "Cost of recomputation in % of the baseline's cost: lower bound, proved optimum (`ilp`), and policies.",
    "tab-frontier-exact",
)
path = write_text_atomic("results/tables/13_exact.md", table)

# %% [markdown]
# ```{include} ../../results/tables/13_exact.md
# ```
#
# Each of these optima is proved, for the graph's own order of operations. None is below the lower bound, and none is
# above the cost of any policy.

# %%
for row in exact:
    assert row["ilp"] == row["ilp_bound"] and row["bound"] <= row["ilp"] + 1e-9
    assert all(row["ilp"] <= row[policy] + 1e-9 for policy in POLICIES)
missed = [row for row in exact if row["auto"] > row["ilp"] + 1e-9]
assert {row["model"] for row in missed} <= {"U-Net"}
print(f"auto reaches the optimum in {len(exact) - len(missed)} of {len(exact)} cases")
for row in missed:
    longer = (1 + row["auto"]) / (1 + row["ilp"]) - 1
    assert longer < 0.02
    print(f"{row['model']} at {row['budget']}: the step costs less than 2% more than the optimum")

# %% [markdown]
# The solution of the integer program is an ordinary plan. We run it on the U-Net, where `auto` is not optimal, and
# check its gradients and its peak.

# %%
step = ackpt.compile(unet, pictures, budget=0.8, policy="ilp")


def gradients(run):
    unet.zero_grad()
    run(pictures).backward()
    return [parameter.grad for parameter in unet.parameters()]


assert all(a.equal(b) for a, b in zip(gradients(unet), gradients(step), strict=True))
run = ackpt.measure(lambda: gradients(step), resident=[unet, pictures], repeats=0)
print(f"gradients bit-equal; measured minus predicted: {run.dynamic_peak_bytes - step.plan.dynamic_peak_bytes} bytes")

# %% [markdown]
# On the smallest graphs the lower bound is far from the optimum. With four blocks, one tensor more or less decides
# everything, but the linear program may save half a tensor. The more tensors there are, the closer the lower bound is
# to the optimum, as the MLP blocks show.
#
# :::{admonition} Takeaway
# :class: tip
# The optimum is known for a few layers only. For every other graph there is a lower bound, and each plan carries its
# gap: trust the gap, not the name of the algorithm.
# :::
#
# ## How auto searches
#
# The policy computes its frontier once per graph; a budget then selects a plan from it. The table shows what each part
# of the search adds on the Transformer of {doc}`09_frontier`: the lowest cost with all parts up to and including it.

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
    "instead": "smaller tensors saved instead: a product for a sum; dropout masks drawn again",
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
columns = {"part": "added", "plans": "plans"} | {str(budget): f"$B = {budget}$" for budget in within}
caption = "The search of `auto`, part by part: plans on the frontier, and lowest cost in % of the baseline's cost."
table = markdown_table(table_rows, columns, caption, "tab-frontier-parts")
path = write_text_atomic("results/tables/13_parts.md", table)

# %% [markdown]
# ```{include} ../../results/tables/13_parts.md
# ```
#
# Looking *into* the blocks gains most. The search cuts the graph where a single tensor separates earlier from later
# operations. For each block, it finds the useful sets of tensors to save: no other set saves fewer bytes, has a lower
# peak and costs less. Then the recursion of rotor combines them over the chain, with one difference. A block that is
# recomputed only to reach a later one may save a *part* of its activations, so that it need not be recomputed again for
# its own backward. Each solution becomes a schedule and is simulated.
#
# Saving a product instead of a sum pays in mixed precision, where the sum is float32 and the product is bfloat16. Where
# the profile has a link to the host, the search also offloads what the link can copy while the forward computes
# ({doc}`08_mu_two`).
#
# The numbers of this page were measured here:

# %% tags=["measured-time", "nbval-ignore-output"]
environment("cpu", "notebooks/13_rotor.py")

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: save or recompute
# :class: note
# Take eight equal stages, with all sizes and times equal to 1. How long do rotor's schedules take for budgets from 3 to
# 10, and Revolve's for 1 to 8 snapshots? Count every forward and every backward; `rotor.solve` and `revolve.advances`
# do the rest. Why is rotor faster?
# :::

# %% tags=["solution"]
unit = rotor.Chain([1] * 8, [1] * 8, [1] * 8, [1] * 8)
print([rotor.solve(unit, budget).time for budget in range(3, 11)])
print([revolve.advances(8, s) + 8 + 8 for s in range(1, 9)])

# %% [markdown]
# Revolve runs every step once more to reverse it, even with a snapshot of each state. rotor may save all activations of
# a stage, whose backward then needs no recomputation. With enough memory its time is 16: eight forwards and eight
# backwards.
#
# :::{admonition} Exercise 2: by hand
# :class: note
# Take four layers instead of six, and leave everything else as in the first example of the integer program. The
# baseline has five live results at its peak. What does the optimum cost with four bytes, and why are three bytes infeasible?
# :::

# %% tags=["solution"]
for budget in (5, 4, 3):
    try:
        print(f"{budget} bytes: cost {ilp.solve(line(4), budget).cost}")
    except ackpt.BudgetError as error:
        print(error)

# %% [markdown]
# The backward of a layer reads three results and computes one, so four results are live even if everything else is
# freed. With four bytes, one forward is recomputed.
#
# ## What we have seen
#
# - rotor takes the differences between blocks into account, and may save the activations inside a block.
# - The cheapest plan is the solution of an integer program, feasible for a few layers. A linear program bounds its cost
#   from below for any graph, and every plan with a budget carries that lower bound and its gap.
# - Where the optimum is known, `auto` reaches it on chains, and costs a little more on a U-Net.
#
# ## Sources
#
# - {cite:t}`jain2020`: the integer program.
# - {cite:t}`beaumont2019`: rotor, the recursion over a chain, with whole blocks; {cite:t}`zhao2023`: several options per
#   block.
# - {cite:t}`kirisame2021`: the greedy eviction from which the integer program starts.
