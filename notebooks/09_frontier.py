# %% [markdown]
# # The optimum and the frontier
#
# After this chapter you can say what a budget must cost at least, how far every method is from that, and which method
# to take for which budget.

# %% [markdown]
# ## Goals
#
# - Write rematerialisation as an integer program, and relax it to a bound that holds for graphs of any size.
# - Measure how far each policy is from the optimum where the optimum is known, and from the bound where it is not.
# - Draw the front of all policies and of PyTorch's own tools on one model: measured peaks against FLOPs that ran again.
# - Turn the budget of a plan, and watch its memory, its cost and the fate of every activation.
# - Read from the front which method to use when, and from a plan why it decided as it did.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $B$ | the budget: bytes that may live at once beside what is resident |
# | $b_s$ | bytes of the storage $s$ |
# | $c_i$ | cost of the operation $i$: its FLOPs and its traffic, weighed against each other |
# | $R_{t,i}$, $S_{t,i}$ | 1 if stage $t$ computes $i$, if the result of $i$ is kept into it; else 0. It ends with the first computation of $t$ |
# | $p(s)$ | the operation that makes the storage $s$ |
# | $u_s$, $v_i$ | how much of $s$ is kept from forward to backward, and of $i$ runs again, between 0 and 1 |
# | $a$ | bytes that live at an instant whatever is kept |
# | *front* | the plans that no other plan beats both in peak and in cost |
#
# Costs are shares of the baseline's cost, peaks are shares of its dynamic peak.

# %%
import warnings
from collections import Counter

import torch
from torch import nn

import ackpt
from ackpt import models, plots
from ackpt.experiments import graph_profile, optimum, sublinear
from ackpt.experiments.frontier import PLANNED, FrontierConfig, run_frontier
from ackpt.experiments.reports import frontier as frontier_report
from ackpt.experiments.reports import frontier_methods
from ackpt.experiments.steps.frontier_models import workload
from ackpt.experiments.widgets import explorer
from ackpt.policies import ilp
from ackpt.results import markdown_table, write_text_atomic

# What torch.compile imports uses what torch has deprecated.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20
SOURCE = "notebooks/09_frontier.py"

# %% [markdown]
# ## The optimum
#
# Chapter 7 found the best plans for chains. A graph that is no chain has an optimum, too. Checkmate (Jain et al. 2020,
# [arXiv:1910.02653](https://arxiv.org/abs/1910.02653)) writes it down as an integer program. Put the operations in one
# order. Stage $t$ may compute anything that came before, and ends with the first computation of operation $t$. For
# every stage and operation there are two unknowns: is $i$ computed in stage $t$, $R_{t,i}$, and is its result kept from
# before, $S_{t,i}$?
#
# $$ \min \sum_t \sum_i c_i R_{t,i} \quad \text{where} \quad R_{t,j} \le R_{t,i} + S_{t,i} \;\; (j \text{ reads } i) ,
# \qquad S_{t,i} \le R_{t-1,i} + S_{t-1,i} , $$
#
# and where the bytes that live beside each computation are at most $B$. Six layers, each of which a backward operation
# reads, every result of one byte; a forward costs 1, a backward 2:

# %%
n = 6
edges = [(i, i + 1) for i in range(n)]  # forward, then into the last layer's backward
for layer in range(n):
    backward = 2 * n - 1 - layer
    reads = [layer, layer - 1, backward - 1]  # its result, its input, the gradient
    edges += [(i, backward) for i in reads if i >= 0]
dag = ilp.Dag([1] * n + [2] * n, [1] * (2 * n), sorted(set(edges)))
for budget in (7, 6, 5, 4, 3):
    try:
        found = ilp.solve(dag, budget)
        print(f"{budget} bytes: cost {found.cost}, proved {found.optimal}")
    except ackpt.BudgetError as error:
        print(error)

# %% [markdown]
# Nothing runs twice if seven bytes are there. Below four there is no way at all, and that is proved, too. This is what
# an exact answer is worth: not a better plan, but the end of the search.
#
# It does not scale. The unknowns grow with the square of the operations, and the time with a high power of them. The
# policy `ilp` takes graphs of at most 160 operations, a few layers. For everything else there is
#
# ## The bound
#
# Leave out what makes the program hard. Do not ask in which order things run, nor where a recomputation has its own
# bytes, and allow fractions: of the storage $s$ the share $u_s$ is kept, of the operation $i$ the share $v_i$ runs
# again. What remains is a *linear* program with two unknowns per operation:
#
# $$ \begin{aligned}
# \min \; & \sum_i c_i v_i \quad \text{where} \\
# & u_s + v_{p(s)} \ge 1 && \text{if backward reads } s , \\
# & u_s + v_{p(s)} \ge v_i && \text{if } i \text{ reads } s \text{ when it runs again,} \\
# & \textstyle\sum b_s u_s \le B - a && \text{at every instant of backward.}
# \end{aligned} $$
#
# $p(s)$ is the operation that makes $s$. The sum runs over all storages that backward reads later, and $a$ are the bytes
# that live at that instant whatever is kept: gradients, and what the operation at hand reads and makes.
#
# Every plan that runs the operations of backward once and in the graph's order, as all of this package do, satisfies
# these conditions with its zeros and ones. So no such plan costs less than the optimum of this program. For the graphs
# of this book it is solved in a moment, and each plan with a budget carries it:
#
# $$ \texttt{plan.lower\_bound} \;\le\; \text{optimum} \;\le\; \texttt{plan.cost} , $$
#
# $$ \texttt{plan.gap} = \frac{1 + \texttt{plan.cost}}{1 + \texttt{plan.lower\_bound}} - 1 . $$
#
# The gap says how much longer the step takes than the bound says it must.
#
# ## How far from the optimum
#
# Three graphs that are small enough for the integer program: a chain of four blocks as in chapter 7; three residual
# MLP blocks, in which one tensor is four times as large as another; and a small U-Net, whose skips span its middle.

# %%
chain = sublinear.Chain(*(sublinear.Block(4) for _ in range(4)))
mlps = nn.Sequential(*(optimum.MLPBlock(16) for _ in range(3)))
cases = {
    "4 equal blocks": (chain, torch.randn(4096, 4), (0.9, 0.8, 0.7)),
    "3 MLP blocks": (mlps, torch.randn(1024, 16), (0.8, 0.7, 0.6, 0.5)),
    "U-Net": (optimum.SmallUNet(), torch.randn(2, 3, 32, 32), (0.8,)),
}
POLICIES = "auto", "mu-two", "rotor", "chen-sqrt", "full"
exact = []
for name, (model, x, budgets) in cases.items():
    graph = ackpt.trace(model, x)
    profile = ackpt.profile(graph, workspace="measured")
    rows = optimum.distances(graph, profile, budgets, POLICIES, exact=True)
    exact += [{"model": name, **row} for row in rows]


# %% tags=["hide-input"]
def shown(row, names):
    """Costs in per cent of the baseline's."""
    row = {"budget": row["budget"], "model": row.get("model")} | {
        name: "refused" if row[name] is None else f"{100 * row[name]:.2f}" for name in names
    }
    return row


columns = {"model": "model", "budget": "$B$", "bound": "bound", "ilp": "`ilp`"}
columns |= {policy: f"`{policy}`" for policy in POLICIES}
caption = "What runs again, in per cent of the baseline's cost: the bound, the proved optimum, and what policies pay."
table = markdown_table([shown(row, [*columns][2:]) for row in exact], columns, caption, "tab-frontier-exact")
path = write_text_atomic("results/tables/09_exact.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_exact.md
# ```
#
# Each of these optima was proved, for the graph's own order of operations, and lies where it must: not below the bound,
# not above any policy.

# %%
for row in exact:
    assert row["ilp"] == row["ilp_bound"]
    assert row["bound"] <= row["ilp"] + 1e-9
    paid = [row[policy] for policy in POLICIES if row[policy] is not None]
    assert row["ilp"] <= min(paid) + 1e-9
met = [row for row in exact if abs(row["auto"] - row["ilp"]) < 1e-9]
assert {row["model"] for row in exact if row not in met} <= {"U-Net"}
print(f"auto pays the optimum in {len(met)} of {len(exact)} cases")
for row in exact:
    if row not in met:
        longer = (1 + row["auto"]) / (1 + row["ilp"]) - 1
        print(f"{row['model']} at {row['budget']}: a step {longer:.1%} longer than that")

# %% [markdown]
# The plan of the integer program is a plan like any other. Where `auto` pays most in excess, it is run: is its peak as
# promised, and are the gradients those of the plain model?

# %%
worst = max(exact, key=lambda row: row["auto"] - row["ilp"])
model, x, _ = cases[worst["model"]]
step = ackpt.compile(model, x, budget=worst["budget"], policy="ilp")


def gradients(run):
    model.zero_grad()
    run(x).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


equal = all(a.equal(b) for a, b in zip(gradients(model), gradients(step), strict=True))
found = sublinear.measured(model, step, (x,))
assert equal and found.dynamic_peak_bytes == step.plan.dynamic_peak_bytes
plan = step.plan
print(f"{worst['model']} at {worst['budget']}, by ilp: cost {plan.cost:.1%}")
print(f"gradients bit-equal: {equal}")
print(f"measured {found.dynamic_peak_bytes} bytes, predicted {plan.dynamic_peak_bytes}")

# %% [markdown]
# The bound is honest, but on the smallest graphs it is far away: with four blocks everything hangs on one tensor more
# or less, and a program that may keep half a tensor need not choose. The more tensors there are, the less a fraction
# of one matters, and the closer bound and optimum come; the MLP blocks show it.
#
# :::{admonition} Takeaway
# :class: tip
# The optimum is known for a few layers only. For every other graph there is a bound, and a plan that carries its own
# gap: trust the gap, not the name of the algorithm.
# :::
#
# ## On a Transformer
#
# A language model of three layers, written as a user would write it, with 4 sequences of 256 tokens. That is the model
# for the rest of this chapter. Its graph is beyond the integer program, so what is left is the bound.

# %%
SIZES = {"layers": 3, "dim": 64, "heads": 4, "ff_dim": 256, "vocab_size": 256}
SIZES |= {"batch_size": 4, "seq_len": 256}
config = FrontierConfig(
    sizes=SIZES,
    policies=tuple(policy for policy in PLANNED if policy != "ilp"),
    budgets=(0.6, 0.4, 0.3),
    settings=(1.0, 0.6, 0.4, 0.2, 0.0),
)
work = workload(config.model, config.sizes, config.seed)
graph = ackpt.trace(work.model, *work.args)
profile = ackpt.profile(graph, workspace="measured")
BUDGETS = 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.27, 0.24
rows = optimum.distances(graph, profile, BUDGETS, POLICIES)
len(graph.nodes)

# %% tags=["hide-input"]
gaps = [(1 + row["auto"]) / (1 + row["bound"]) - 1 for row in rows]
columns = {"budget": "$B$", "bound": "bound", "auto": "`auto`", "gap": "gap of `auto`"}
columns |= {policy: f"`{policy}`" for policy in POLICIES[1:]}
names = [name for name in columns if name not in ("budget", "gap")]
table_rows = [shown(row, names) | {"gap": f"{100 * gap:.2f}"} for row, gap in zip(rows, gaps, strict=True)]
caption = "A Transformer of three layers: the bound and what policies pay, in per cent of the baseline's cost."
table = markdown_table(table_rows, columns, caption, "tab-frontier-bound")
path = write_text_atomic("results/tables/09_bound.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_bound.md
# ```

# %%
for row in rows:
    assert row["bound"] <= row["auto"]
    others = [row[policy] for policy in POLICIES[1:]]
    assert all(row["auto"] <= other for other in others if other is not None)
near = [row["budget"] for row, gap in zip(rows, gaps, strict=True) if gap <= 0.02]
furthest = rows[gaps.index(max(gaps))]
print(f"auto is within 2 % of the bound at {near}")
print(f"worst gap: {max(gaps):.0%}, at {furthest['budget']}")

# %% [markdown]
# Down to about a third of the peak `auto` is proved to be within two per cent of any other algorithm for such plans.
# Below, its cost rises steeply and the bound does not. Some of that is the fault of the bound: it gives recomputations
# no bytes of their own, and at such budgets they need most of what there is. How much is whose fault is not known.

# %% [markdown]
# ## The frontier
#
# Now everything is run. Eight policies at several budgets, each also at the smallest that it keeps, and three tools
# that come with PyTorch:
#
# - **checkpoint**: `torch.utils.checkpoint` around every layer;
# - **selective**: the same, keeping the results of matrix products and attention;
# - **memory budget**: `activation_memory_budget` of `torch._functorch.config`, under `torch.compile`, at five settings.
#
# Every step starts from the same parameters and the same batch. Its bytes come from the allocator, its FLOPs are
# counted as they run. The command `ackpt frontier` does the same; without options its model has six layers of four
# times the width.

# %%
record = run_frontier(config, SOURCE)
path = record.save("results/cpu/09_frontier-transformer.json")
metrics = record.metrics

# %% [markdown]
# Was every promise kept? For every planned step: peak as predicted, to the byte, and within its budget; FLOPs as
# predicted; gradients those of the unplanned step, to the last bit.

# %%
points = frontier_report.measured(record)
assert frontier_report.broken_promises(record) == []
for point in points:
    peak = point["measured_peak_bytes"]
    assert peak == point["predicted_peak_bytes"] <= point["limit_bytes"]
    assert point["recompute_flops"] == point["predicted_recompute_flops"]
    assert frontier_report.is_equal(point)
refused = [point for point in metrics["points"] if "least_bytes" in point]
different = {point["measured_peak_bytes"] for point in points}
print(f"{len(points)} plans with {len(different)} different peaks kept every promise")
print(f"refused: {Counter(point['policy'] for point in refused)}")

# %% alt="FLOPs that run again over the measured dynamic peak, as shares of the baseline. A blue staircase, policy auto, runs along the bottom from a peak of 1 to 0.6, rises slowly to 0.3, and then steeply. All other policies and PyTorch's tools lie on it or above it, to the right. The points of PyTorch's memory budget wander to the right as its setting falls, beyond 1. A broken line, the lower bound, lies close below the staircase."
figure = frontier_report.frontier_plot(record)
path = plots.save(figure, "results/figures/09_frontier.png")
figure

# %% [markdown]
# The line is the whole front of `auto`: all plans that it chooses from. Its dots were run, and so was every other
# mark. The broken line is the bound of above with FLOPs for the cost. Operations without FLOPs are free in it, so it lies
# lower than the bound of the table. Does anything lie below the line of `auto`? For every measured point: is there a plan of `auto` with no higher peak and no
# more FLOPs?

# %%
standings = frontier_methods.standings(record)
ahead = [row["method"] for row in standings if row["ahead"]]
comparison = frontier_report.comparison(record)
assert ahead == comparison["ahead"] == []
print(f"points below the line of auto: {len(ahead)}")
print(f"smallest peak of auto: {comparison['least']:.3f}")
print(f"smallest peak of PyTorch's tools: {comparison['peer_least']:.3f}")
share = comparison["at_checkpoint"]
print(f"at the peak of checkpoint, auto runs {share:.2f} of its FLOPs again")
print(f"with wrong gradients: {comparison['wrong'] or 'none'}")

# %% [markdown]
# The front of `auto` dominates. Against the other policies that is nearly by construction: on graphs of this size the
# plans of `full`, `rotor` and `mu-two` are among its candidates. Against PyTorch's tools it is not.
#
# Look at the red squares. From one to the next the setting falls, from 1 to 0, and it is meant to buy less memory for
# more FLOPs:

# %%
baseline = metrics["baseline"]
for row in metrics["peers"]:
    name = row["peer"] if row["setting"] is None else f"{row['peer']} {row['setting']}"
    peak = row["measured_peak_bytes"] / baseline["measured_peak_bytes"]
    again = row["recompute_flops"] / baseline["flops"]
    print(f"{name:17} peak {peak:.2f}, again {again:6.1%}")

# %% [markdown]
# The setting bounds what is *saved*, not what lives. When backward runs everything again at its beginning, saved bytes
# go down and the peak goes up; chapter 6 has taken such an order apart.
#
# :::{admonition} Takeaway
# :class: tip
# On this model no policy and no tool of PyTorch has a point below the front of `auto`. Every planned peak was measured
# as predicted, to the byte.
# :::
#
# ## The frontier, explored
#
# Choose a budget. The page holds the plan that `ackpt.plan(graph, budget)` gives for it: its live memory, where it lies
# on the front, what it costs, what it must cost, and what becomes of every activation. With the slider in focus, the
# arrow keys move it.

# %%
data = explorer.explorer(graph, profile, record)
path = explorer.save(data, "results/explorer/09_frontier.json")
kept = [row for row in data["budgets"] if row["plan"] is not None]
print(f"{len(kept)} budgets, {len(data['plans'])} different plans")

# %% tags=["hide-input"]
three = {
    f"{budget:.0%}": ackpt.plan(graph, budget, profile=profile).timeline.thinned(400) for budget in (0.8, 0.5, 0.3)
}
figure = graph_profile.orders_plot(
    three,
    "Three budgets: the lower the ceiling, the longer the backward under it",
    record.metrics["baseline"]["resident_bytes"],
)
path = plots.save(figure, "results/figures/09_explorer.png")

# %% [markdown]
# ```{frontier-explorer} ../../results/explorer/09_frontier.json
# :image: ../../results/figures/09_explorer.png
# :alt: Live memory of the planned step for budgets of 80, 50 and 30 per cent of the plain peak. A rising forward and a falling backward lie under a lower and lower ceiling, and the backward gets longer.
# ```
#
# Things to try. From 100 % down to 60 %: which activations go first? They are those that cost little but traffic. At
# 40 %: what is the last layer spared, and why? Below 30 %: how the backward grows, as parts run several times.

# %% [markdown]
# ## Which method when
#
# From the measured points, and the front of `auto`: for every range of budgets the methods that run least again.

# %% tags=["hide-input"]
choices = []
for row in frontier_methods.by_budget(record):
    low, high = f"{row['low']:.3f}", "" if row["high"] is None else f" to {row['high']:.3f}"
    again = sorted({f"{100 * share:.1f}" for share in row["again"]}, key=float)
    choices.append(
        {
            "budget": f"from {low}{high}",
            "best": ", ".join(row["best"]),
            "again": " to ".join(again),
            "torch": ", ".join(name.removeprefix("torch: ") for name in row["torch"]) or "nothing fits",
            "torch_again": "" if row["torch_again"] is None else f"{100 * row['torch_again']:.1f}",
        }
    )
columns = {"budget": "budget, share of the plain peak", "best": "runs least again", "again": "again, % of FLOPs"}
columns |= {"torch": "of PyTorch's tools", "torch_again": "again, % of FLOPs"}
caption = "Which method when: for each range of budgets the methods that fit and run least again."
table = markdown_table(choices, columns, caption, "tab-frontier-which-method")
path = write_text_atomic("results/tables/09_which_method.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_which_method.md
# ```
#
# And every method for itself: its smallest peak, what it runs again there and what `auto` would within the same peak,
# and how its points compare with the front of `auto`.

# %% tags=["hide-input"]
columns = {"method": "method", "peak": "least peak", "again": "again there, %", "auto": "`auto` within it, %"}
columns |= {"points": "points", "level": "level with `auto`", "ahead": "ahead"}
table_rows = [
    row | {"peak": f"{row['peak']:.3f}"} | {name: f"{100 * row[name]:.1f}" for name in ("again", "auto")}
    for row in standings
]
caption = "What each method reaches on this model, and where it runs as little again as `auto` does, or less."
table = markdown_table(table_rows, columns, caption, "tab-frontier-standings")
path = write_text_atomic("results/tables/09_standings.md", table)
for row in standings:
    if not row["level"] and not row["ahead"]:
        print(f"never best on this model: {row['method']}")

# %% [markdown]
# ```{include} ../../results/tables/09_standings.md
# ```
#
# Why are some never best, and others only where nothing needs to run again?
#
# - **full**, **chen-sqrt**, **chen-log** keep a tensor between blocks or run whole blocks again, with their matrix
#   products. Much of a block costs next to nothing to make again: norms, activations, sums. They pay for all of it.
# - **revolve** keeps states only; with memory to spare it does not know what to do with it.
# - **rotor** keeps a block as a whole, or not at all.
# - **mu-two** gives up one value at a time. That is level with `auto` at one of its points, between 0.58 and 0.60. The more
#   is given up, the more of it is made again for something else that was given up, each time anew.
# - **checkpoint** is *full* without a planner: one point, whatever the budget.
# - **min-cut** and the **memory budget** choose well what to save, but count saved bytes: from some budget on they
#   cannot go down, and the latter goes up.
#
# None of this makes them bad. *checkpoint* and *selective* need no graph and no budget, and run where a model cannot be
# captured. If the model fits with *selective*, which runs no matrix product again, take it. The formulas of Chen and of
# Revolve need no profile. `auto` is for the rest: when a number of bytes must be met.

# %% [markdown]
# ## What auto does
#
# The policy looks for its front once for a graph; a budget then picks from it. The search has six parts. What does
# each add? The least cost within some budgets, with the parts up to and including it:

# %%
parts = optimum.parts_of_auto(graph, profile)
within = (0.7, 0.6, 0.5, 0.4, 0.3, 0.24)
costs = {}
for name, front in parts.items():
    costs[name] = optimum.least_costs(graph, profile, front, within)

# %% tags=["hide-input"]
WHAT = {
    "segments": "segments, run again as a whole or value by value",
    "blocks": "each block by the best of its own options, combined over the chain",
    "levels": "blocks of which a part stays when they are run for a later one",
    "instead": "smaller values kept instead: a product for a sum, nothing for a dropout's mask",
    "policies": "the plans of `rotor` and `mu-two`",
    "refined": "between two neighbours, what can be saved after all",
}
table_rows = []
for name, front in parts.items():
    row = {"part": WHAT[name], "plans": len(front)}
    for budget, cost in costs[name].items():
        row[str(budget)] = "none" if cost is None else f"{100 * cost:.2f}"
    table_rows.append(row)
columns = {"part": "added", "plans": "plans on the front"} | {str(budget): f"$B = {budget}$" for budget in within}
caption = "The search of `auto`: least cost within a budget, in per cent of the baseline's, part by part."
table = markdown_table(table_rows, columns, caption, "tab-frontier-parts")
path = write_text_atomic("results/tables/09_parts.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_parts.md
# ```
#
# Most comes from looking *into* the blocks. Cut the graph where a single tensor separates what was from what comes. For
# each block, find the sets of its tensors that are worth keeping: no other set keeps less, peaks lower and costs less.
# Equal blocks are solved once. Then the recursion of rotor (chapter 7) combines them over the chain for every amount of
# memory, with one difference: a block that runs only to reach a later one may leave a *part* of its insides behind, at
# several levels, so that it need not run a second time for its own backward. Each solution becomes a schedule and is
# simulated; what is beaten in both peak and cost is dropped.
#
# The recursion keeps what blocks hand on. Of a wide model in mixed precision that is too much: a residual sum is float32,
# the product that it adds bfloat16, and to add again costs little. Here everything is float32, and keeping one instead of
# the other gains nothing. Where the profile has a link to the host, there is a seventh part: what the link can copy
# while the forward computes is offloaded, beginning with what waits longest (chapter 8).
#
# A plan can be asked why. At 0.4:

# %%
plan = ackpt.plan(graph, 0.4, profile=profile)
print(plan.table())

# %% [markdown]
# For each of the dearest decisions the plan says what it costs, and what the peak were had the result been kept. Is that
# so? The policy `manual` takes fates by name: those of this plan, but for one.

# %%
for decision in plan.decisions[:4]:
    fates = {**plan.fates, decision.name: "saved"}
    other = ackpt.plan(graph, policy="manual", fates=fates, profile=profile)
    assert other.dynamic_peak_bytes == decision.peak_if_kept_bytes
    over = decision.peak_if_kept_bytes - plan.limit_bytes
    print(f"keep {decision.name} of {decision.module}: {over / MIB:+.2f} MiB")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Keep or run again is a question for each tensor, not for each block. A plan answers it with a price and a reason, and
# both can be checked.
# :::

# %% [markdown]
# Where the numbers of this page were made:

# %% tags=["measured-time", "nbval-ignore-output"]
record.environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: by hand
# :class: note
# Four layers instead of six, everything else as at the beginning of this chapter. The baseline has five results alive
# at once. What does the optimum cost with four bytes, and why is it impossible with three?
# :::


# %% tags=["solution"]
def line(n):
    edges = {(i, i + 1) for i in range(n)}
    for layer in range(n):
        backward = 2 * n - 1 - layer
        edges |= {(i, backward) for i in (layer, layer - 1, backward - 1) if i >= 0}
    return ilp.Dag([1] * n + [2] * n, [1] * (2 * n), sorted(edges))


for budget in (5, 4, 3):
    try:
        found = ilp.solve(line(4), budget)
        runs = Counter(i for kind, i in found.schedule if kind == "compute")
        again = [i for i, times in runs.items() if times > 1]
        print(f"{budget} bytes: cost {found.cost}, again: {again}")
    except ackpt.BudgetError as error:
        print(error)

# %% [markdown]
# The backward of a layer reads three results and makes one: that is four, whatever else is forgotten. With four bytes
# one forward has to run twice.
#
# :::{admonition} Exercise 2: never the wrong way
# :class: note
# A lower budget should never give a higher peak, nor cost less. Check it with the plans of the explorer, `data`. Why is
# it so for `auto`, whatever its search finds?
# :::

# %% tags=["solution"]
from_small = [data["plans"][row["plan"]] for row in kept]
pairs = list(zip(from_small, from_small[1:], strict=False))
peaks = all(a["peak_bytes"] <= b["peak_bytes"] for a, b in pairs)
costs = all(a["cost"] >= b["cost"] for a, b in pairs)
print(f"peaks in order: {peaks}, costs in order: {costs}")
flops = [row["recompute_flops"] for row in metrics["front"]]
falls = sum(a > b for a, b in zip(flops, flops[1:], strict=False))
print(f"on the whole front FLOPs fall with the peak {falls} times")

# %% [markdown]
# All plans come from one front, which does not depend on the budget, and on a front the peak falls as the cost rises.
# A search that started anew for every budget could not promise that. What is in order is the *cost*, FLOPs and traffic
# together; FLOPs alone need not be.
#
# :::{admonition} Exercise 3: whose fault is the gap?
# :class: note
# For the small graphs the optimum is known. Split each gap of `auto` into two: from the bound to the optimum, and from
# the optimum to `auto`. Which is the larger?
# :::

# %% tags=["solution"]
for row in exact:
    of_bound = (1 + row["ilp"]) / (1 + row["bound"]) - 1
    of_auto = (1 + row["auto"]) / (1 + row["ilp"]) - 1
    print(f"{row['model']:14} {row['budget']}: bound {of_bound:6.1%}, auto {of_auto:6.1%}")

# %% [markdown]
# Where the blocks form a chain, all of the gap is the bound's: it keeps fractions, and of four tensors a fraction is much.
# The U-Net is no chain, its skips span the middle, and there `auto` leaves something, too.
#
# :::{admonition} Exercise 4: another kind of model
# :class: note
# A small ResNet. At 0.8 and 0.6 of its peak: what do the bound, `auto`, `full` and `rotor` say? What is its smallest
# budget, and why is less to be had than from the Transformer?
# :::

# %% tags=["solution"]
config = models.ResNetConfig("bottleneck", (1, 1, 1, 1), width=8, num_classes=10)
resnet = models.ResNet(config)
pictures, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
resnet_graph = ackpt.trace(resnet, pictures, labels)
resnet_profile = ackpt.profile(resnet_graph, workspace="measured")
names = "auto", "full", "rotor"
for row in optimum.distances(resnet_graph, resnet_profile, (0.8, 0.6), names):
    print({name: value and round(value, 4) for name, value in row.items()})
try:
    ackpt.plan(resnet_graph, 0.01, profile=resnet_profile)
except ackpt.BudgetError as error:
    print(error)

# %% [markdown]
# The first blocks of a ResNet hold most of its bytes, and one of them must be there in full when its backward runs: no
# plan goes below that. Whole blocks do not even get near it. (None: the policy refuses the budget.)
#
# ## What we have seen
#
# - The cheapest plan is an integer program, solved for a few layers. A linear program bounds it for any graph, and every
#   plan with a budget carries that bound and its gap.
# - Where the optimum is known, `auto` pays exactly that on chains, and on a U-Net a little more. On the
#   Transformer it is within two per cent of the bound until the budget gets very small; there the bound is far away.
# - All policies and PyTorch's tools on one model, measured: no point lies below the front of `auto`. PyTorch's memory
#   budget bounds what is saved, and its peak goes up where its setting goes down.
# - Which method when is read from the front: *selective* or nothing while the model nearly fits, a plan from then on.
# - A plan says what each decision costs and what it prevents, and both can be checked.
#
# ## Sources
#
# - {cite:t}`jain2020`: the integer program.
# - {cite:t}`beaumont2019`: the recursion over a chain, with whole blocks; {cite:t}`zhao2023`: several ways to run each.
# - {cite:t}`kirisame2021`: the greedy eviction from which the integer program starts.
# - {cite:t}`purandare2023`: the evictions of `mu-two`.
