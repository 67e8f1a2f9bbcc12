# %% [markdown]
# # The optimum and the frontier
#
# **How far is each method from the optimum, and which one should you use when?**

# %% [markdown]
# ```{figure} ../../results/figures/09_time.png
# :alt: Added time over the measured dynamic peak, as fractions of the baseline, for a BERT with dropout. The plans of auto form two curves that rise slowly from a peak of 0.8 down to 0.4, and steeply below. PyTorch's tools lie far above both curves.
# :class: dark-light
#
# Added time over the peak of a BERT with dropout, measured on two CPU cores.
# ```
#
# After this chapter you can bound the cost of a budget from below, measure how far each method is from the optimum, and
# choose a method for a given budget.
#
# :::{admonition} Symbols of this chapter
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $B$ | the budget: bytes live at one time on top of the resident memory |
# | $b_s$ | bytes of the storage $s$ |
# | $c_i$ | cost of the operation $i$: its FLOPs, plus ten FLOPs for each byte that it reads or writes |
# | $R_{t,i}$, $S_{t,i}$ | 1 if stage $t$ computes $i$; 1 if the result of $i$ is still saved when stage $t$ starts |
# | $p(s)$ | the operation that computes the storage $s$ |
# | $u_s$, $v_i$ | the fraction of $s$ saved from forward to backward, and of $i$ recomputed, between 0 and 1 |
# | $a$ | bytes that are live at an instant, no matter what is saved |
# :::
#
# The *frontier* consists of the plans that no other plan beats in both peak and cost. Costs are fractions of the
# baseline's cost. Peaks and, in the tables, $B$ are fractions of its dynamic peak.

# %%
import statistics
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ackpt
from ackpt.metering import plots
from ackpt.policies import ilp
from experiments import graph_profile, models, optimum, sublinear
from experiments.frontier import PLANNED, FrontierConfig, run_frontier
from experiments.reports import frontier as frontier_report
from experiments.reports import frontier_methods, frontier_times
from experiments.results import Record, markdown_table, write_text_atomic
from experiments.steps.frontier_models import workload
from experiments.widgets import explorer

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
# We repeat this at other budgets and on two more graphs: a chain of four blocks as in chapter 7, and a small U-Net,
# whose skip connections span its middle.

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
path = write_text_atomic("results/tables/09_exact.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_exact.md
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
# ## The lower bound of a Transformer
#
# The rest of this chapter uses one model: a language model of three layers, written as a user would write it, with 4
# sequences of 256 tokens. Its graph is too large for the integer program, so we compare with the lower bound.

# %%
SIZES = {"layers": 3, "dim": 64, "heads": 4, "ff_dim": 256, "vocab_size": 256}
SIZES |= {"batch_size": 4, "seq_len": 256}
work = workload("transformer", SIZES, seed=0)
model, (tokens, targets) = work.model, work.args
graph = ackpt.trace(model, tokens, targets)
profile = ackpt.profile(graph, workspace="measured")
print(f"{len(graph.nodes)} operations")

# %% tags=["hide-input"]
POLICIES = "auto", "mu-two", "rotor", "full"
rows = optimum.distances(graph, profile, (0.8, 0.6, 0.5, 0.4, 0.3, 0.24), POLICIES)
columns = {"bound": "lower bound"} | {policy: f"`{policy}`" for policy in POLICIES}
table = markdown_table(
    [{"budget": row["budget"]} | percent(row, columns) for row in rows],
    {"budget": "$B$"} | columns,
    "A Transformer of three layers: lower bound and cost of each policy, in % of the baseline's cost.",
    "tab-frontier-bound",
)
path = write_text_atomic("results/tables/09_bound.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_bound.md
# ```

# %%
gaps = {row["budget"]: (1 + row["auto"]) / (1 + row["bound"]) - 1 for row in rows}
for row in rows:
    others = [row[policy] for policy in POLICIES[1:] if row[policy] is not None]
    assert row["bound"] <= row["auto"] <= min(others)
assert max(gap for budget, gap in gaps.items() if budget >= 0.4) < 0.02
print("gap of auto:", {budget: f"{gap:.1%}" for budget, gap in gaps.items()})

# %% [markdown]
# Down to 40 percent of the peak, no algorithm for such plans can beat `auto` by more than two percent. At small
# budgets, its cost rises steeply and the lower bound does not. Part of this gap comes from the lower bound: it assigns
# no bytes to recomputed results, and at such budgets they need most of the memory. We do not know how large that part is.

# %% [markdown]
# ## The frontier
#
# Now we compare with the tools that come with PyTorch. The first two wrap every layer in a checkpoint: *checkpoint* saves
# only the layer's input, *selective* also the results of matrix products and attention.

# %%
aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
selected = partial(create_selective_checkpoint_contexts, PRODUCTS)
TOOLS = {
    "baseline": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=selected),
}


def loss(call):
    x = model.embedding(tokens)
    for block in model.blocks:
        x = call(block, x)
    return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())


def train(call):
    model.zero_grad()
    loss(call).backward()


tools = {}
for name, call in TOOLS.items():
    run = tools[name] = ackpt.measure(partial(train, call), resident=[model, tokens, targets], repeats=0)
    print(f"{name:10}  dynamic peak {run.dynamic_peak_bytes / MIB:4.1f} MiB, {run.flops / 1e9:.2f} GFLOP")

# %% [markdown]
# The third tool is a setting of `torch.compile` between 0 and 1, the *memory budget*:
#
# ```python
# with torch._functorch.config.patch(activation_memory_budget=0.6):
#     compiled = torch.compile(model, backend="aot_eager_decomp_partition")  # runs operations one by one
# ```
#
# We run these tools and seven policies, each policy at three budgets, where they are feasible, and at its smallest
# feasible one. Every step starts from the same parameters and the same batch. Bytes are measured by the allocator, and
# FLOPs are counted during execution. In a terminal, `python -m experiments frontier` does the same.

# %% tags=["hide-input"]
config = FrontierConfig(
    sizes=SIZES,
    policies=tuple(policy for policy in PLANNED if policy not in ("ilp", "chen-log")),
    budgets=(0.6, 0.4, 0.3),
    settings=(1.0, 0.6, 0.4, 0.0),
)
record = run_frontier(config, SOURCE)
path = record.save("results/cpu/09_frontier-transformer.json")
metrics, points = record.metrics, frontier_report.measured(record)
for row in metrics["peers"]:  # the same as in the cell above
    if row["peer"] in tools:
        assert row["measured_peak_bytes"] == tools[row["peer"]].dynamic_peak_bytes

# %% [markdown]
# We check every planned step: its peak is the predicted one, to the byte, and within its budget; its FLOPs are the
# predicted ones; its gradients equal those of the baseline, bit for bit.

# %%
assert frontier_report.broken_promises(record) == []
for point in points:
    peak = point["measured_peak_bytes"]
    assert peak == point["predicted_peak_bytes"] <= point["limit_bytes"]
    assert point["recompute_flops"] == point["predicted_recompute_flops"]
    assert frontier_report.is_equal(point)
different = {point["measured_peak_bytes"] for point in points}
print(f"{len(points)} plans with {len(different)} different peaks match their predictions")

# %% tags=["hide-input"] alt="Recomputed FLOPs over the measured dynamic peak, as fractions of the baseline. A blue staircase, policy auto, runs along the bottom from a peak of 1 to 0.6, rises slowly to 0.3, and then steeply. All other policies and PyTorch's tools are on it or above it, to the right. As its setting falls, the point of PyTorch's memory budget moves left from 0.9 to 0.64, and then right, beyond 1. A dashed line, the lower bound, runs below the staircase."
figure = frontier_report.frontier_plot(record, "")
path = plots.save(figure, "results/figures/09_frontier.png")
figure

# %% [markdown]
# *`auto` reaches lower peaks than PyTorch's own tools, and recomputes no more FLOPs at any peak that they reach.*
#
# The line is the whole frontier of `auto`: all plans that it chooses from. Its dots and all other marks are measured.
# The dashed line is the lower bound with FLOPs as the cost. Is any point below the line of `auto`? For every measured
# point we look for a plan of `auto` with no higher peak and no more FLOPs:

# %% tags=["hide-input"]
standings = frontier_methods.standings(record)
comparison = frontier_report.comparison(record)
assert [row["method"] for row in standings if row["ahead"]] == comparison["ahead"] == []
print(f"points below the line of auto: {len(comparison['ahead'])}")
print(f"smallest peak of auto: {comparison['least']:.3f}")
print(f"smallest peak of PyTorch's tools: {comparison['peer_least']:.3f}")
print(f"at the peak of checkpoint, auto recomputes {comparison['at_checkpoint']:.2f} of its FLOPs")
baseline = metrics["baseline"]
for row in metrics["peers"]:
    name = row["peer"] if row["setting"] is None else f"{row['peer']} {row['setting']}"
    peak = row["measured_peak_bytes"] / baseline["measured_peak_bytes"]
    print(f"{name:17} peak {peak:.2f}, recomputed {row['recompute_flops'] / baseline['flops']:6.1%}")

# %% [markdown]
# The frontier of `auto` dominates. Against the other policies, this is nearly by construction: on graphs of this size
# the plans of `full`, `rotor` and `mu-two` are among its candidates. Against PyTorch's tools, it is not.
#
# Look at the red squares, the memory budget. Along the dotted line its setting falls from 1 to 0, and each step should
# trade more FLOPs for less memory. Below 0.6 the peak rises instead, because the setting bounds the *saved* bytes, not
# the live bytes. If backward recomputes everything at its start, fewer bytes are saved, but more are live at one time.
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
# minimizes the cost used so far. With *rates*, the default of `ackpt.compile`, it minimizes seconds at the calibrated
# rates of this CPU, where drawing a dropout mask is expensive. This takes minutes, so the page reads the record of the
# command `python -m experiments frontier`, which names the machine. The last line below is the noise:

# %% tags=["hide-input"]
def record_of(name: str) -> Record:
    """The record of measured times in `results/frontiers`; prints how it was made."""
    found = Record.load(f"results/frontiers/frontier-{name}.json")
    where = found.environment
    print(f"{where['date']}, {where['device_name']}, {where['threads']} threads, torch {where['torch']}:")
    command = where["command"].replace("ackpt frontier", "python -m experiments frontier")  # its name today
    print("   ", command.replace(" --setting", " \\\n        --setting"))
    if found.config["compiler"] == "eager":
        print(f"    the baseline, timed against itself: {frontier_times.added_time(found.metrics['eager']):+.1%}")
    assert frontier_report.broken_promises(found) == []
    return found


timed = record_of("bert")

# %% tags=["hide-input"] alt="Added time over the measured dynamic peak, as fractions of the baseline, for a BERT with dropout. The plans of auto form two curves that rise slowly from a peak of 0.8 down to 0.4, and steeply below. PyTorch's tools lie far above both curves."
figure = frontier_times.time_plot(timed, "")
path = plots.save(figure, "results/figures/09_time.png")
figure

# %% [markdown]
# *Added time, measured on the CPU. Marks are medians, bars are quartiles.*
#
# The practical question is: at the peak of per-block checkpointing, how much time does a plan add?

# %% tags=["hide-input"]
blocks, planned = frontier_times.at_the_peak_of_blocks(timed)
print(f"torch's checkpoint around every block: {blocks:+.0%}")
print(f"a plan within the same peak: {planned:+.0%}")

# %% [markdown]
# A tool may recompute few FLOPs and still add much time. Selective checkpointing recomputes no matrix product here, but
# it handles every operation in Python, which costs more than the operations of a model of this size. The memory budget
# decomposes dropout and draws other masks than the baseline, so its gradients cannot be compared.
#
# ### More models, and Inductor
#
# Four more steps: a Transformer without dropout, a ResNet-50 with a quarter of its channels, a U-Net, and a Transformer
# with Inductor, which compiles the baseline, PyTorch's tools and the plans.

# %% tags=["hide-input"]
more = [record_of(name) for name in ("transformer", "resnet50", "unet", "transformer-inductor")]

# %% tags=["hide-input"] alt="Added time over the measured dynamic peak in four panels: Transformer, ResNet-50, U-Net, and Transformer with Inductor. In each, the curve of auto with rates rises as the peak falls, most steeply at its end. PyTorch's checkpoint and memory budget lie above it. Selective checkpointing does, too, on the Transformer and ResNet-50, and is close to it in the other two panels."
figure = frontier_times.times_plot(more, highest=0.8)
path = plots.save(figure, "results/figures/09_models.png")
figure

# %% [markdown]
# *Added time and peak of four steps. Marks are medians, bars are quartiles; marks at the upper edge are above it.
# `auto` minimizes counted costs, `auto, rates` seconds at the calibrated rates; `full` is per-block checkpointing as a
# plan. For the memory budget, a setting of 1 is the default of `torch.compile`.*
#
# The table adds the BERT. The gap says how much of the step a better plan could save at most, in the modeled time.

# %% tags=["hide-input"]
records = [timed, *more]
table_rows = frontier_times.times_rows(records)
caption = (
    "Added time, measured, in % of the baseline's step: per-block checkpointing at its peak, `auto` with rates "
    "within the same peak, and within half of the baseline's peak; and the optimality gap of the last one."
)
table = markdown_table(table_rows, frontier_times.COLUMNS, caption, "tab-frontier-models")
path = write_text_atomic("results/tables/09_models.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_models.md
# ```

# %%
pairs = [frontier_times.at_the_peak_of_blocks(each) for each in records]
halves = [frontier_times.added_time(point) for point in map(frontier_times.at_half, records) if point]
print(f"at half of the peak: {statistics.median(halves):+.1%}, the median of {len(halves)} models")
bounds = {frontier_times.name_of(each): half["lower_bound"] for each in records if (half := frontier_times.at_half(each))}
print("lower bounds there, in modeled time:", ", ".join(f"{name} {bound:.1%}" for name, bound in bounds.items()))
shares = [ours / blocks for blocks, ours in pairs]
print(f"at the peak of per-block checkpointing: {statistics.median(shares):.2f} of its added time, the median")
below = {
    point["budget"]: f"{1 - point['measured_peak_bytes'] / point['predicted_peak_bytes']:.0%}"
    for point in frontier_report.measured(records[-1])
    if point["policy"] == "auto, rates"
}
print(f"Inductor: measured below predicted peak, by budget: {below}")

# %% [markdown]
# At half of the peak, no plan of the two convolutional networks can add less than 4 %: even the lower bounds there are
# higher.
#
# While these steps were timed, the process kept the memory that it freed, as the allocator of a GPU does. By default,
# glibc returns large blocks to the operating system, and the next step pays a page fault for each page that it gets
# again. The larger the peak, the more of them: with page faults, plans for the U-Net are faster than its baseline.
#
# Inductor fuses operations, so some tensors that the simulation counts never exist. Measured peaks are lower than
# predicted ones, and `auto` refuses budgets that its plans would keep.
#
# ## Exploring the frontier
#
# Choose a budget. The page shows the plan that `ackpt.plan(graph, budget)` returns for it: its live memory, its point
# on the frontier, its cost, the lower bound, and the fate of every activation. With the slider in focus, the arrow keys
# move it.

# %% tags=["hide-input"]
data = explorer.explorer(graph, profile, record)
path = explorer.save(data, "results/explorer/09_frontier.json")
kept = [row for row in data["budgets"] if row["plan"] is not None]
print(f"{len(kept)} budgets, {len(data['plans'])} different plans")
three = {
    f"{budget:.0%}": ackpt.plan(graph, budget, profile=profile).timeline.thinned(400) for budget in (0.8, 0.5, 0.3)
}
figure = graph_profile.orders_plot(three, "", metrics["baseline"]["resident_bytes"])
path = plots.save(figure, "results/figures/09_explorer.png")

# %% [markdown]
# ```{frontier-explorer} ../../results/explorer/09_frontier.json
# :image: ../../results/figures/09_explorer.png
# :alt: Live memory of the planned step for budgets of 80, 50 and 30 percent of the baseline's peak. As the budget falls, the rising forward and the falling backward stay lower, and the backward gets longer.
# ```
#
# Move the slider and answer three questions. From 100 % down to 60 %, the plans first recompute activations that cost
# memory traffic but almost no FLOPs: which ones? At 40 %: what does the last layer still save, and why? Below 30 %: how
# does the backward grow as operations are recomputed several times?

# %% [markdown]
# ## Which method when
#
# From the measured points and the frontier of `auto`, we find the methods with the fewest recomputed FLOPs at each
# budget. A second table lists each method's smallest peak, and the FLOPs that it and `auto` recompute within that peak.

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
            "torch_again": "–" if row["torch_again"] is None else f"{100 * row['torch_again']:.1f}",
        }
    )
columns = {"budget": "budget, fraction of the baseline's peak", "best": "best method", "again": "recomputed FLOPs, %"}
columns |= {"torch": "best PyTorch tool", "torch_again": "its recomputed FLOPs, %"}
caption = "Which method when: the methods that fit and recompute the fewest FLOPs, by range of budgets."
table = markdown_table(choices, columns, caption, "tab-frontier-which-method")
path = write_text_atomic("results/tables/09_which_method.md", table)
columns = {"method": "method", "peak": "smallest peak", "again": "recomputed FLOPs there, %", "auto": "`auto` there, %"}
table_rows = [
    {"method": row["method"], "peak": f"{row['peak']:.2f}"}
    | {name: f"{100 * row[name]:.1f}" for name in ("again", "auto")}
    for row in standings
]
caption = "Smallest peak of each method on this model, and the FLOPs recomputed within it, by the method and by `auto`."
table = markdown_table(table_rows, columns, caption, "tab-frontier-standings")
path = write_text_atomic("results/tables/09_standings.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_which_method.md
# ```
#
# ```{include} ../../results/tables/09_standings.md
# ```
#
# Why are most methods never best on this model, or only where nothing needs to be recomputed?
#
# - **full** and **chen-sqrt** save a tensor between blocks and recompute whole blocks, with their matrix products. Much
#   of a block is nearly free to recompute: norms, activation functions, sums.
# - **revolve** saves states only; it makes no use of spare memory. **rotor** saves a block as a whole, or not at all.
# - **mu-two** evicts one tensor at a time. The more tensors it evicts, the more often each of them is recomputed on the
#   way to others.
# - **checkpoint** is *full* without a planner: one point, whatever the budget.
# - **min-cut**, the algorithm of `torch.compile`, and the **memory budget** choose well what to save, but they count
#   saved bytes, not live bytes. At small budgets, neither lowers the peak further.
#
# None of this makes them bad. *checkpoint* and *selective* need no graph and no budget, and work where a model cannot
# be captured. If a large model fits with *selective*, which recomputes no matrix product, use it. Use `auto` when the
# peak must stay within a given number of bytes.
#
# A plan explains its decisions. This is the plan for a budget of 0.4:

# %%
plan = ackpt.plan(graph, 0.4, profile=profile)
print(plan.table())

# %% [markdown]
# For each of its most expensive decisions, the plan lists the cost, and how far the peak would be above the budget if the
# tensor were saved. To check that peak, we use the policy `manual`, which accepts fates by name: we pass the fates of
# this plan and change one.

# %%
for decision in plan.decisions[:2]:
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
#
# ## Exercises
#
# :::{admonition} Exercise 1: by hand
# :class: note
# Take four layers instead of six, and leave everything else as at the beginning of this chapter. The baseline has five
# live results at its peak. What does the optimum cost with four bytes, and why are three bytes infeasible?
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

# %% [markdown]
# All plans come from one frontier, which does not depend on the budget, and on a frontier the peak falls as the cost
# rises. A new search for every budget could not guarantee that. The *cost*, FLOPs plus weighted traffic, is monotone;
# FLOPs alone need not be.
#
# :::{admonition} Exercise 3: a ResNet
# :class: note
# Take a small ResNet. What are the lower bound and the costs of `auto` and `full` at 0.8 and 0.6 of its peak? What is
# its smallest feasible budget, and why can a plan save less memory than on the Transformer?
# :::

# %% tags=["solution"]
resnet = models.ResNet(models.ResNetConfig("bottleneck", (1, 1, 1, 1), width=8, num_classes=10))
images, labels = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
resnet_graph = ackpt.trace(resnet, images, labels)
resnet_profile = ackpt.profile(resnet_graph)
for row in optimum.distances(resnet_graph, resnet_profile, (0.8, 0.6), ("auto", "full")):
    print({name: value and round(value, 4) for name, value in row.items()})
try:
    ackpt.plan(resnet_graph, 0.01, profile=resnet_profile)
except ackpt.BudgetError as error:
    print(error)

# %% [markdown]
# At the smallest peak, half of the dynamic memory is gradients, which no plan reduces. The largest activations of a
# ResNet are in its first layers, and backward reaches these last, when nearly all gradients are live. Policies that
# recompute whole blocks do not get close to this peak. (None: infeasible for this policy.)
#
# ## What we have seen
#
# - The cheapest plan is the solution of an integer program, feasible for a few layers. A linear program bounds its cost
#   from below for any graph, and every plan with a budget carries that lower bound and its gap.
# - Where the optimum is known, `auto` reaches it on chains, and costs a little more on a U-Net. On the Transformer it
#   is within two percent of the lower bound down to 40 percent of the peak; at the smallest budgets the gap is large.
# - We measured policies and PyTorch's tools on one model: no point is below the frontier of `auto`. PyTorch's memory
#   budget bounds the saved bytes, and its peak can rise as its setting falls.
# - The frontier shows which method to use when: *selective* or nothing while the model nearly fits, a plan below that.
#
# ## Appendix: how auto searches
#
# The policy computes its frontier once per graph; a budget then selects a plan from it. The table shows what each part
# of the search adds on the Transformer: the lowest cost with all parts up to and including it.

# %% tags=["hide-input"]
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
path = write_text_atomic("results/tables/09_parts.md", table)

# %% [markdown]
# ```{include} ../../results/tables/09_parts.md
# ```
#
# Looking *into* the blocks gains most. The search cuts the graph where a single tensor separates earlier from later
# operations. For each block, it finds the useful sets of tensors to save: no other set saves fewer bytes, has a lower
# peak and costs less. Then the recursion of rotor (chapter 7) combines them over the chain, with one difference. A block
# that is recomputed only to reach a later one may save a *part* of its activations, so that it need not be recomputed
# again for its own backward. Each solution becomes a schedule and is simulated.
#
# Saving a product instead of a sum pays in mixed precision, where the sum is float32 and the product is bfloat16. Where
# the profile has a link to the host, the search also offloads what the link can copy while the forward computes
# (chapter 8).
#
# The numbers of this page were measured here:

# %% tags=["measured-time", "nbval-ignore-output"]
record.environment

# %% [markdown]
# ## Sources
#
# - {cite:t}`jain2020`: the integer program.
# - {cite:t}`beaumont2019`: the recursion over a chain, with whole blocks; {cite:t}`zhao2023`: several options per
#   block.
# - {cite:t}`kirisame2021`: the greedy eviction from which the integer program starts.
# - {cite:t}`purandare2023`: the evictions of `mu-two`.
