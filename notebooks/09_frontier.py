# %% [markdown]
# # The frontier
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
# After this chapter you can measure how far each method is from the optimum, choose a method for a given budget, and fit
# a BERT into the memory that you have.
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
# The *frontier* consists of the plans that no other plan beats in both peak and cost. The *cost* of a plan is its added
# time as a fraction of the baseline step, modeled from FLOPs and moved bytes: an operation without FLOPs still reads and
# writes memory. Peaks and budgets are fractions of the baseline's dynamic peak.

# %%
import copy
import statistics
import tempfile
import textwrap
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ackpt
from ackpt.metering import plots
from experiments import bert, models, optimum
from experiments.frontier import PLANNED, FrontierConfig, run_frontier
from experiments.graph_profile import orders_plot
from experiments.reports import bert as bert_report
from experiments.reports import frontier as frontier_report
from experiments.reports import frontier_methods, frontier_times
from experiments.reports.figures import curves_plot
from experiments.reports.gpu_records import gpu_records
from experiments.results import Record, environment, load_reference, markdown_table, write_text_atomic
from experiments.steps.frontier_models import workload
from experiments.widgets import explorer

# torch.compile imports modules that use deprecated torch functions.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20
SOURCE = "notebooks/09_frontier.py"

# %% [markdown]
# ## A lower bound
#
# The cheapest plan of a graph is the solution of an integer program, which can be solved for a few layers only. A linear
# program bounds the cost from below for any graph: no plan of this package costs less. {doc}`13_rotor` derives both.
# Each plan with a budget carries this lower bound, and its *optimality gap*, which says how much more the step costs than
# the lower bound requires:
#
# $$ \texttt{plan.lower\_bound} \;\le\; \text{optimum} \;\le\; \texttt{plan.cost} , \qquad
# \texttt{plan.gap} = \frac{1 + \texttt{plan.cost}}{1 + \texttt{plan.lower\_bound}} - 1 . $$
#
# The first model of this chapter is a language model of three layers, written as a user would write it, with 4
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
def percent(row, names):
    return {name: "infeasible" if row[name] is None else f"{100 * row[name]:.2f}" for name in names}


POLICIES = "auto", "mu-two", "rotor", "full"
rows = optimum.distances(graph, profile, (0.8, 0.6, 0.5, 0.4, 0.3, 0.24), POLICIES)
columns = {"bound": "lower bound"} | {policy: f"`{policy}`" for policy in POLICIES}
table = markdown_table(
    [{"budget": row["budget"]} | percent(row, columns) for row in rows],
    {"budget": "budget"} | columns,
    "A Transformer of three layers, by budget: lower bound and cost of each policy, in % of the baseline's cost.",
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
# ## Plans and other methods
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
# The line is the whole frontier of `auto`: all plans that it chooses from ({doc}`13_rotor` describes its search). Its
# dots and all other marks are measured. The dashed line is the lower bound with FLOPs as the cost. Is any point below
# the line of `auto`? For every measured point we look for a plan of `auto` with no higher peak and no more FLOPs:

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
figure = orders_plot(three, "", metrics["baseline"]["resident_bytes"])
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

# %% [markdown]
# ## BERT
#
# What does a planner gain over per-block checkpointing on BERT-large? We begin with a small BERT with dropout.
#
# ### Two ways to save memory
#
# BERT reads a sequence in which some words are masked, and predicts these words (Devlin et al. 2018,
# [arXiv:1810.04805](https://arxiv.org/abs/1810.04805)). BERT-large has 24 blocks of width 1024 and trains on 512
# tokens. Ours has four blocks, an eighth of the width, and sequences a quarter as long. With eight heads and a
# vocabulary of 640 words, the attention matrices and the logits take about the same share of memory as in BERT-large.

# %%
torch.manual_seed(0)
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
# ### The same memory at a lower cost
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
path = write_text_atomic("results/tables/09_bert.md", markdown_table(rows, columns, caption, "tab-bert"))

# %% [markdown]
# ```{include} ../../results/tables/09_bert.md
# ```

# %% tags=["hide-input"] alt="Live memory of three training steps side by side. Baseline: a ramp up to the peak where backward begins, and down again. Per-block checkpointing: a low staircase with spikes in the forward, then four tall teeth in backward. Plan: a ramp a third as high as the baseline, with small teeth on its way down; its peak is as high as the teeth of per-block checkpointing."
figure = orders_plot({name: run.timeline for name, run in runs.items()}, "", base.resident_bytes)
path = plots.save(figure, "results/figures/09_timelines.png")
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
# ### What a block saves
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
# ### What a plan saves
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
path = write_text_atomic("results/tables/09_block.md", markdown_table(rows, columns, caption, "tab-bert-block"))

# %% [markdown]
# ```{include} ../../results/tables/09_block.md
# ```
#
# The dropout mask of the attention weights and the output of GELU are the first to be recomputed, and the weights after
# dropout are next: all three are large and need no matrix product. The attention weights follow: to recompute them, $q$
# and $k$ are multiplied again. The outputs of projections, such as the up-projection, come last.
#
# In numbers, with the lower bound of each plan:


# %%
def more_flops(plan):
    return plan.recompute_flops / (plan.flops - plan.recompute_flops)


for percent in shown:
    plan = plans[percent]
    costs = f"cost {plan.cost:6.2%}, lower bound {plan.lower_bound:6.2%}"
    print(f"budget {percent} %: {more_flops(plan):6.2%} of the FLOPs recomputed, {costs}")

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
path = plots.save(figure, "results/figures/09_line.png")
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
# ### Batches of different lengths
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
path = plots.save(figure, "results/figures/09_lengths.png")
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
# ### BERT-large
#
# Now we predict BERT-large for 8 sequences of 512 tokens, from shapes alone: nothing below was run. On the *CPU*
# no kernel fuses attention with dropout, so the attention matrices are materialized, as above. On a *GPU*, in bf16, a
# fused kernel saves neither weights nor dropout masks (Dao et al. 2022,
# [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)). Its backward recomputes both from $q$, $k$ and one sum per row:
# the kernel is a checkpoint inside an operation.

# %% tags=["hide-input"]
on_gpu = replace(bert.GPU, methods=("plain", "per-block", "auto@0.5", "auto@0.3"))
large = bert.predicted(on_gpu, SOURCE)
for record in large:
    path = record.save(f"results/cpu/09_{bert_report.file_name(record)}")

# %%
D, FF, H = 1024, 4096, 16
A_large = 10 * D + 2 * FF + 3 * H * 512 + 4
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
path = write_text_atomic("results/tables/09_published.md", markdown_table(rows, columns, caption, "tab-bert-published"))

# %% [markdown]
# ```{include} ../../results/tables/09_published.md
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
# :::{admonition} Exercise 1: monotone plans
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
# :::{admonition} Exercise 2: a ResNet
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
# :::{admonition} Exercise 3: without dropout
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
# :::{admonition} Exercise 4: when attention dominates
# :class: note
# From which length on do materialized attention matrices need more memory than everything else in a block, for BERT-large
# and for our model?
# :::

# %% tags=["solution"]
for name, (d_, f_, h_) in {"BERT-large": (D, FF, H), "ours": (d, f, h)}.items():
    print(f"{name}: T > {(10 * d_ + 2 * f_ + 4) / (3 * h_):.0f}")

# %% [markdown]
# The condition is $3 h T > 10 d + 2 f + 4$. With heads of width 64, $d = 64 h$ and $f = 4 d$, this means $T > 384$ at
# any width.
#
# :::{admonition} Exercise 5: the price of a MiB
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
# - Every plan with a budget carries a lower bound of its cost and its gap. On the Transformer, `auto` is within two
#   percent of the lower bound down to 40 percent of the peak; at the smallest budgets the gap is large.
# - We measured policies and PyTorch's tools on one model: no point is below the frontier of `auto`. PyTorch's memory
#   budget bounds the saved bytes, and its peak can rise as its setting falls.
# - The frontier shows which method to use when: *selective* or nothing while the model nearly fits, a plan below that.
# - A block of BERT saves $10 d + 2 f + 3 h T + 4$ elements per token where attention is materialized. More than half of
#   them can be recomputed without a matrix product.
# - On BERT-large with fused attention, most cheap activations are gone before planning starts, so a plan for half of
#   the dynamic peak already recomputes matrix products.
# - The published increase of a third in time matches one extra forward of the blocks.
#
# ## Sources
#
# - {cite:t}`purandare2023`: the evictions of `mu-two`.
# - {cite:t}`devlin2018`: model and task.
# - {cite:t}`chen2016`: per-block checkpointing.
# - {cite:t}`dao2022`, {cite:t}`dao2023`: recomputation inside attention.
# - {cite:t}`korthikanti2022`: manual recomputation of attention's core; the same way of counting what a block saves.
