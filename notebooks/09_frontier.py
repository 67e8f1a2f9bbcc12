# %% [markdown]
# # The optimum and the frontier
#
# After this chapter you can state the least that a budget must cost, measure how far each method is from that minimum,
# and choose a method for a given budget.

# %% [markdown]
# ## Goals
#
# - Write rematerialization as an integer program, and relax it to a lower bound that holds for graphs of any size.
# - Measure how far each policy is from the optimum where it is known, and from the lower bound elsewhere.
# - Draw the Pareto frontier of all policies and of PyTorch's own tools on one model: measured peak against recomputed
#   FLOPs.
# - Vary the budget of a plan, and watch its memory, its cost and the fate of every activation.
# - Read from the frontier which method to use when, and from a plan the reasons for its decisions.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $B$ | the budget: bytes live at one time on top of the resident memory |
# | $b_s$ | bytes of the storage $s$ |
# | $c_i$ | cost of the operation $i$: its FLOPs plus its weighted traffic |
# | $R_{t,i}$, $S_{t,i}$ | 1 if stage $t$ computes $i$; 1 if $i$ is saved into it; it ends with the first run of $t$ |
# | $p(s)$ | the operation that computes the storage $s$ |
# | $u_s$, $v_i$ | the fraction of $s$ saved from forward to backward, and of $i$ recomputed, between 0 and 1 |
# | $a$ | bytes live at an instant whatever is saved |
# | *frontier* | the plans that no other plan beats in both peak and cost |
#
# Costs are fractions of the baseline's cost, peaks are fractions of its dynamic peak.

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

# torch.compile imports modules that use deprecated torch functions.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20
SOURCE = "notebooks/09_frontier.py"

# %% [markdown]
# ## The optimum
#
# Chapter 7 found the best plans for chains. Other graphs have an optimum, too. Checkmate (Jain et al. 2020,
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
# With seven bytes, nothing is recomputed. Below four bytes no schedule exists, and the solver proves that, too. An
# exact solver rarely finds a better plan than `auto`, but it proves that no better plan exists.
#
# It does not scale. The number of unknowns grows with the square of the number of operations, and the solution time
# with a high power of it. The policy `ilp` accepts graphs of at most 160 operations, which is a few layers. For larger
# graphs we compute a lower bound.
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
# $p(s)$ is the operation that computes $s$. The sum covers all storages that backward reads later. The bytes $a$ are
# live at that instant whatever is saved: gradients, and the inputs and outputs of the current operation.
#
# A plan that runs each backward operation once, in the graph's order, satisfies these conditions with zeros and ones.
# All plans of this package do. So no such plan costs less than the optimum of this program. For the graphs of this book
# it is solved in a moment, and each plan with a budget carries the result:
#
# $$ \texttt{plan.lower\_bound} \;\le\; \text{optimum} \;\le\; \texttt{plan.cost} , $$
#
# $$ \texttt{plan.gap} = \frac{1 + \texttt{plan.cost}}{1 + \texttt{plan.lower\_bound}} - 1 . $$
#
# The optimality gap says how much more the step costs than the lower bound requires.
#
# ## How far policies are from the optimum
#
# Three graphs are small enough for the integer program: a chain of four blocks as in chapter 7; three residual MLP
# blocks, in which one tensor is four times as large as another; and a small U-Net, whose skip connections span its
# middle.

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
        name: "infeasible" if row[name] is None else f"{100 * row[name]:.2f}" for name in names
    }
    return row


columns = {"model": "model", "budget": "$B$", "bound": "lower bound", "ilp": "`ilp`"}
columns |= {policy: f"`{policy}`" for policy in POLICIES}
caption = "Cost of recomputation in % of the baseline's cost: lower bound, proved optimum (`ilp`), and policies."
table = markdown_table([shown(row, [*columns][2:]) for row in exact], columns, caption, "tab-frontier-exact")
path = write_text_atomic("results/tables/09_exact.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_exact.md
# ```
#
# Each of these optima is proved, for the graph's own order of operations. None is below the lower bound, and none is
# above the cost of any policy.

# %%
for row in exact:
    assert row["ilp"] == row["ilp_bound"]
    assert row["bound"] <= row["ilp"] + 1e-9
    paid = [row[policy] for policy in POLICIES if row[policy] is not None]
    assert row["ilp"] <= min(paid) + 1e-9
met = [row for row in exact if abs(row["auto"] - row["ilp"]) < 1e-9]
assert {row["model"] for row in exact if row not in met} <= {"U-Net"}
print(f"auto reaches the optimum in {len(met)} of {len(exact)} cases")
for row in exact:
    if row not in met:
        longer = (1 + row["auto"]) / (1 + row["ilp"]) - 1
        print(f"{row['model']} at {row['budget']}: the step costs {longer:.1%} more than the optimum")

# %% [markdown]
# The solution of the integer program is an ordinary plan. We run it where `auto` is furthest from the optimum, and
# check its peak and its gradients. Without `profile=`, the plan's cost is calibrated time.

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
# On the smallest graphs the lower bound is far from the optimum. With four blocks, one tensor more or less decides
# everything, but the linear program may save half a tensor. The more tensors there are, the less a fraction of one
# matters, and the closer the lower bound is to the optimum, as the MLP blocks show.
#
# :::{admonition} Takeaway
# :class: tip
# The optimum is known for a few layers only. For every other graph there is a lower bound, and each plan carries its
# gap: trust the gap, not the name of the algorithm.
# :::
#
# ## The lower bound of a Transformer
#
# The rest of this chapter uses one model: a language model of three layers, written as a user would write it, with 4
# sequences of 256 tokens. Its graph is too large for the integer program, so we compare with the lower bound.
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
columns = {"budget": "$B$", "bound": "lower bound", "auto": "`auto`", "gap": "gap of `auto`"}
columns |= {policy: f"`{policy}`" for policy in POLICIES[1:]}
names = [name for name in columns if name not in ("budget", "gap")]
table_rows = [shown(row, names) | {"gap": f"{100 * gap:.2f}"} for row, gap in zip(rows, gaps, strict=True)]
caption = "A Transformer of three layers: lower bound and cost of each policy, in % of the baseline's cost."
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
print(f"auto is within 2 % of the lower bound at {near}")
print(f"worst gap: {max(gaps):.0%}, at {furthest['budget']}")

# %% [markdown]
# Down to about a third of the peak, no other algorithm for such plans can beat `auto` by more than two per cent. Below,
# its cost rises steeply and the lower bound does not. Part of this gap comes from the lower bound: it assigns no bytes
# to recomputed results, and at such budgets they need most of the memory. We cannot separate the two effects.

# %% [markdown]
# ## The frontier
#
# Now we run everything: eight policies at several budgets, and at their smallest feasible budgets, and three tools that
# come with PyTorch:
#
# - **checkpoint**: `torch.utils.checkpoint` around every layer;
# - **selective**: the same, saving the results of matrix products and attention;
# - **memory budget**: `activation_memory_budget` of `torch._functorch.config`, under `torch.compile`, at five settings.
#
# Every step starts from the same parameters and the same batch. Bytes are measured by the allocator, and FLOPs are
# counted during execution. The command `ackpt frontier` does the same; without options its model has six layers of four
# times the width.

# %%
record = run_frontier(config, SOURCE)
path = record.save("results/cpu/09_frontier-transformer.json")
metrics = record.metrics

# %% [markdown]
# We check every planned step: its peak is the predicted one, to the byte, and within its budget; its FLOPs are the
# predicted ones; its gradients equal those of the baseline, bit for bit.

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
print(f"{len(points)} plans with {len(different)} different peaks match their predictions")
print(f"infeasible: {Counter(point['policy'] for point in refused)}")

# %% alt="Recomputed FLOPs over the measured dynamic peak, as fractions of the baseline. A blue staircase, policy auto, runs along the bottom from a peak of 1 to 0.6, rises slowly to 0.3, and then steeply. All other policies and PyTorch's tools are on it or above it, to the right. The points of PyTorch's memory budget move to the right as its setting falls, beyond 1. A dashed line, the lower bound, runs close below the staircase."
figure = frontier_report.frontier_plot(record)
path = plots.save(figure, "results/figures/09_frontier.png")
figure

# %% [markdown]
# The line is the whole frontier of `auto`: all plans that it chooses from. Its dots and all other marks are measured.
# The dashed line is the lower bound with FLOPs as the cost. Operations without FLOPs are free in it, so it is lower
# than the lower bound of the table. Is any point below the line of `auto`? For every measured point we look for a plan
# of `auto` with no higher peak and no more FLOPs:

# %%
standings = frontier_methods.standings(record)
ahead = [row["method"] for row in standings if row["ahead"]]
comparison = frontier_report.comparison(record)
assert ahead == comparison["ahead"] == []
print(f"points below the line of auto: {len(ahead)}")
print(f"smallest peak of auto: {comparison['least']:.3f}")
print(f"smallest peak of PyTorch's tools: {comparison['peer_least']:.3f}")
share = comparison["at_checkpoint"]
print(f"at the peak of checkpoint, auto recomputes {share:.2f} of its FLOPs")
print(f"with wrong gradients: {comparison['wrong'] or 'none'}")

# %% [markdown]
# The frontier of `auto` dominates. Against the other policies, this is nearly by construction: on graphs of this size
# the plans of `full`, `rotor` and `mu-two` are among its candidates. Against PyTorch's tools, it is not.
#
# Look at the red squares, the memory budget. From one to the next the setting falls, from 1 to 0, which should trade
# more FLOPs for less memory:

# %%
baseline = metrics["baseline"]
for row in metrics["peers"]:
    name = row["peer"] if row["setting"] is None else f"{row['peer']} {row['setting']}"
    peak = row["measured_peak_bytes"] / baseline["measured_peak_bytes"]
    again = row["recompute_flops"] / baseline["flops"]
    print(f"{name:17} peak {peak:.2f}, recomputed {again:6.1%}")

# %% [markdown]
# The setting bounds the *saved* bytes, not the live bytes. When backward recomputes everything at its start, fewer
# bytes are saved and the peak rises; chapter 6 analyzes such a schedule.
#
# :::{admonition} Takeaway
# :class: tip
# On this model no policy and no PyTorch tool has a point below the frontier of `auto`. Every planned peak was measured
# as predicted, to the byte.
# :::
#
# ## The frontier in measured time
#
# FLOPs are exact, but they are not time. The next experiment measures the time of every step, in turns with the
# baseline's step and as a ratio to it. The model is a BERT with dropout. `auto` plans it twice. With *counted* costs it
# minimizes FLOPs plus ten FLOPs for each byte of traffic, as above. With *rates*, the default of `ackpt.compile`, it
# minimizes seconds at the calibrated rates of this CPU, where drawing a dropout mask is expensive. In a terminal:
#
# ```bash
# ackpt frontier --model bert --layers 4 --policy auto full --budget 0.8 0.6 0.5 0.4 \
#     --setting 1 0.5 --costs counted rates --times 9 --out results
# ```

# %%
timed = run_frontier(
    FrontierConfig(
        "bert",
        {"layers": 4},
        policies=("auto", "full"),
        budgets=(0.8, 0.6, 0.5, 0.4),
        settings=(1.0, 0.5),
        costs=("counted", "rates"),
    ),
    SOURCE,
    timed_rounds=9,
)
assert frontier_report.broken_promises(timed) == []
path = timed.save("results/cpu/09_frontier-bert.json")

# %% tags=["measured-time", "nbval-ignore-output"] alt="Added time over the measured dynamic peak, as fractions of the baseline, for a BERT with dropout. The plans of auto form two curves that rise slowly from a peak of 0.8 down to 0.4, and steeply below. PyTorch's tools lie far above both curves."
figure = frontier_report.time_plot(timed)
path = plots.save(figure, "results/figures/09_time.png")
figure

# %% [markdown]
# Marks are medians, bars are quartiles. The practical question is: at the peak of per-block checkpointing, how much
# time does a plan add?

# %% tags=["measured-time", "nbval-ignore-output"]
blocks, planned = frontier_report.at_the_peak_of_blocks(timed)
print(f"torch's checkpoint around every block: {blocks:+.0%}")
print(f"a plan within the same peak: {planned:+.0%}")

# %% [markdown]
# A tool may recompute few FLOPs and still add much time. Selective checkpointing recomputes no matrix product here, but
# it handles every operation in Python, which costs more than the operations of a model of this size. The memory budget
# runs under `torch.compile`, with a backend that runs operations one by one. It decomposes dropout and draws other
# masks than the baseline, so its gradients cannot be compared.
#
# ## Exploring the frontier
#
# Choose a budget. The page shows the plan that `ackpt.plan(graph, budget)` returns for it: its live memory, its point
# on the frontier, its cost, the lower bound, and the fate of every activation. With the slider in focus, the arrow keys
# move it.

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
    "The lower the budget, the longer the backward",
    record.metrics["baseline"]["resident_bytes"],
)
path = plots.save(figure, "results/figures/09_explorer.png")

# %% [markdown]
# ```{frontier-explorer} ../../results/explorer/09_frontier.json
# :image: ../../results/figures/09_explorer.png
# :alt: Live memory of the planned step for budgets of 80, 50 and 30 per cent of the baseline's peak. As the budget falls, the rising forward and the falling backward stay lower, and the backward gets longer.
# ```
#
# Things to try. From 100 % down to 60 %: which activations are recomputed first? They are those that cost little but
# traffic. At 40 %: what does the last layer still save, and why? Below 30 %: how does the backward grow as operations
# are recomputed several times?

# %% [markdown]
# ## Which method when
#
# From the measured points and the frontier of `auto`, we find the methods with the fewest recomputed FLOPs at each
# budget.

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
columns = {"budget": "budget, fraction of the baseline's peak", "best": "best method", "again": "recomputed FLOPs, %"}
columns |= {"torch": "best PyTorch tool", "torch_again": "its recomputed FLOPs, %"}
caption = "Which method when: the methods that fit and recompute the fewest FLOPs, by range of budgets."
table = markdown_table(choices, columns, caption, "tab-frontier-which-method")
path = write_text_atomic("results/tables/09_which_method.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_which_method.md
# ```
#
# The next table lists each method's smallest peak, the FLOPs that it and `auto` recompute within that peak, and how its
# points compare with the frontier of `auto`.

# %% tags=["hide-input"]
columns = {"method": "method", "peak": "smallest peak", "again": "recomputed FLOPs there, %", "auto": "`auto` there, %"}
columns |= {"points": "points", "level": "equal to `auto`", "ahead": "better"}
table_rows = [
    row | {"peak": f"{row['peak']:.3f}"} | {name: f"{100 * row[name]:.1f}" for name in ("again", "auto")}
    for row in standings
]
caption = "Smallest peak of each method on this model, and how many of its points equal or beat the frontier of `auto`."
table = markdown_table(table_rows, columns, caption, "tab-frontier-standings")
path = write_text_atomic("results/tables/09_standings.md", table)
for row in standings:
    if not row["level"] and not row["ahead"]:
        print(f"never best on this model: {row['method']}")

# %% [markdown]
# ```{include} ../../results/tables/09_standings.md
# ```
#
# Why are some methods never best, and others only where nothing needs to be recomputed?
#
# - **full**, **chen-sqrt**, **chen-log** save a tensor between blocks and recompute whole blocks, with their matrix
#   products. Much of a block is nearly free to recompute: norms, activation functions, sums. These policies recompute
#   all of it.
# - **revolve** saves states only; it makes no use of spare memory.
# - **rotor** saves a block as a whole, or not at all.
# - **mu-two** evicts one tensor at a time. It equals `auto` at one of its points, between 0.58 and 0.60. The more
#   tensors it evicts, the more often each is recomputed again for other evicted tensors.
# - **checkpoint** is *full* without a planner: one point, whatever the budget.
# - **min-cut** and the **memory budget** choose well what to save, but they count saved bytes. Below some budget
#   neither lowers the peak, and the memory budget raises it.
#
# None of this makes them bad. *checkpoint* and *selective* need no graph and no budget, and work where a model cannot
# be captured. If the model fits with *selective*, which recomputes no matrix product, use it. The formulas of Chen and
# of Revolve need no profile. Use `auto` when the peak must stay within a given number of bytes.

# %% [markdown]
# ## How auto searches
#
# The policy computes its frontier once per graph; a budget then selects a plan from it. The search has six parts. To
# see what each adds, we list the lowest cost within some budgets, with all parts up to and including it:

# %%
parts = optimum.parts_of_auto(graph, profile)
within = (0.7, 0.6, 0.5, 0.4, 0.3, 0.24)
costs = {}
for name, front in parts.items():
    costs[name] = optimum.least_costs(graph, profile, front, within)

# %% tags=["hide-input"]
WHAT = {
    "segments": "segments, recomputed as a whole or tensor by tensor",
    "blocks": "the best options of each block, combined over the chain",
    "levels": "blocks that save a part when they are recomputed for a later block",
    "instead": "smaller tensors saved instead: a product for a sum, nothing for a dropout mask",
    "policies": "the plans of `rotor` and `mu-two`",
    "refined": "plans between two neighbors, with more activations saved",
}
table_rows = []
for name, front in parts.items():
    row = {"part": WHAT[name], "plans": len(front)}
    for budget, cost in costs[name].items():
        row[str(budget)] = "none" if cost is None else f"{100 * cost:.2f}"
    table_rows.append(row)
columns = {"part": "added", "plans": "plans on the frontier"} | {str(budget): f"$B = {budget}$" for budget in within}
caption = "The search of `auto`, part by part: lowest cost within a budget, in % of the baseline's cost."
table = markdown_table(table_rows, columns, caption, "tab-frontier-parts")
path = write_text_atomic("results/tables/09_parts.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_parts.md
# ```
#
# Looking *into* the blocks gains most. The search cuts the graph where a single tensor separates earlier from later
# operations. For each block, it finds the useful sets of tensors to save: no other set saves fewer bytes, peaks lower
# and costs less. Equal blocks are solved once. Then the recursion of rotor (chapter 7) combines them over the chain for
# every amount of memory, with one difference. A block that is recomputed only to reach a later one may save a *part* of
# its activations, at several levels, so that it need not be recomputed again for its own backward. Each solution
# becomes a schedule and is simulated; schedules that are beaten in both peak and cost are dropped.
#
# The recursion saves the tensors between blocks. For a wide model in mixed precision, these are too large: a residual
# sum is float32, the product that it adds is bfloat16, and the addition is cheap to recompute. Here everything is
# float32, so saving the product instead of the sum gains nothing. Where the profile has a link to the host, the search
# has a seventh part: it offloads what the link can copy while the forward computes, beginning with the tensors that
# stay unused longest (chapter 8).
#
# A plan explains its decisions. At 0.4:

# %%
plan = ackpt.plan(graph, 0.4, profile=profile)
print(plan.table())

# %% [markdown]
# For each of its most expensive decisions, the plan lists the cost, and the peak if the tensor were saved. To check
# that peak, the policy `manual` accepts fates by name: we pass those of this plan, with one changed.

# %%
for decision in plan.decisions[:4]:
    fates = {**plan.fates, decision.name: "saved"}
    other = ackpt.plan(graph, policy="manual", fates=fates, profile=profile)
    assert other.dynamic_peak_bytes == decision.peak_if_kept_bytes
    over = decision.peak_if_kept_bytes - plan.limit_bytes
    print(f"saving {decision.name} of {decision.module}: {over / MIB:+.2f} MiB relative to the budget")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Choose between saving and recomputing for each tensor, not for each block. A plan gives a cost and a reason for each
# choice, and both can be checked.
# :::

# %% [markdown]
# The numbers of this page were measured here:

# %% tags=["measured-time", "nbval-ignore-output"]
record.environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: by hand
# :class: note
# Four layers instead of six, everything else as at the beginning of this chapter. The baseline has five live results at
# its peak. What does the optimum cost with four bytes, and why is it impossible with three?
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
        print(f"{budget} bytes: cost {found.cost}, recomputed: {again}")
    except ackpt.BudgetError as error:
        print(error)

# %% [markdown]
# The backward of a layer reads three results and computes one, so four results are live whatever else is freed. With
# four bytes one forward is recomputed.
#
# :::{admonition} Exercise 2: monotone plans
# :class: note
# A lower budget should never give a higher peak or a lower cost. Check this with the plans of the explorer, `data`. Why
# does it hold for `auto`, whatever its search finds?
# :::

# %% tags=["solution"]
from_small = [data["plans"][row["plan"]] for row in kept]
pairs = list(zip(from_small, from_small[1:], strict=False))
peaks = all(a["peak_bytes"] <= b["peak_bytes"] for a, b in pairs)
costs = all(a["cost"] >= b["cost"] for a, b in pairs)
print(f"peaks in order: {peaks}, costs in order: {costs}")
flops = [row["recompute_flops"] for row in metrics["front"]]
falls = sum(a > b for a, b in zip(flops, flops[1:], strict=False))
print(f"on the whole frontier FLOPs fall with the peak {falls} times")

# %% [markdown]
# All plans come from one frontier, which does not depend on the budget, and on a frontier the peak falls as the cost
# rises. A new search for every budget could not guarantee that. The *cost*, FLOPs plus weighted traffic, is monotone;
# FLOPs alone need not be.
#
# :::{admonition} Exercise 3: splitting the gap
# :class: note
# For the small graphs the optimum is known. Split each gap of `auto` into two: from the lower bound to the optimum, and
# from the optimum to `auto`. Which is larger?
# :::

# %% tags=["solution"]
for row in exact:
    of_bound = (1 + row["ilp"]) / (1 + row["bound"]) - 1
    of_auto = (1 + row["auto"]) / (1 + row["ilp"]) - 1
    print(f"{row['model']:14} {row['budget']}: lower bound {of_bound:6.1%}, auto {of_auto:6.1%}")

# %% [markdown]
# Where the blocks form a chain, the whole gap comes from the lower bound: it saves fractions of tensors, which matters
# when there are only four. The U-Net is no chain, its skip connections span the middle, and there `auto` is also above
# the optimum.
#
# :::{admonition} Exercise 4: a ResNet
# :class: note
# Take a small ResNet. What are the lower bound and the costs of `auto`, `full` and `rotor` at 0.8 and 0.6 of its peak?
# What is its smallest feasible budget, and why does it save less memory than the Transformer?
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
# The first blocks of a ResNet hold most of its bytes, and each must be completely live when its backward runs: no plan
# goes below that. Policies that recompute whole blocks do not get close to it. (None: infeasible for this policy.)
#
# ## What we have seen
#
# - The cheapest plan is the solution of an integer program, feasible for a few layers. A linear program bounds its cost
#   from below for any graph, and every plan with a budget carries that lower bound and its gap.
# - Where the optimum is known, `auto` reaches it on chains, and costs a little more on a U-Net. On the Transformer it
#   is within two per cent of the lower bound until the budget gets very small, where the gap is large.
# - We measured all policies and PyTorch's tools on one model: no point is below the frontier of `auto`. PyTorch's
#   memory budget bounds the saved bytes, and its peak can rise as its setting falls.
# - The frontier shows which method to use when: *selective* or nothing while the model nearly fits, a plan below that.
# - A plan states the cost of each decision and the peak that it avoids, and both can be checked.
#
# ## Sources
#
# - {cite:t}`jain2020`: the integer program.
# - {cite:t}`beaumont2019`: the recursion over a chain, with whole blocks; {cite:t}`zhao2023`: several options per
#   block.
# - {cite:t}`kirisame2021`: the greedy eviction from which the integer program starts.
# - {cite:t}`purandare2023`: the evictions of `mu-two`.
