# %% [markdown]
# # Sublinear memory
#
# After this chapter you can say how little memory a chain of $n$ blocks can use and how much recomputation that takes.
# You also know where these formulas, which are right for equal blocks, go wrong.

# %% [markdown]
# ## Goals
#
# - Derive the saved activations and the recomputation of $\sqrt n$ segments and of recursive halving, and measure both
#   on chains of real layers.
# - Trade snapshots for recomputation with Revolve, the optimum for equal steps, and read its table.
# - Run a chain of a thousand blocks in the memory of a few dozen.
# - Plan chains of unequal blocks with rotor.
# - Compare what the formulas promise for a Transformer and a ResNet with what these models really need.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $n$ | blocks of a chain |
# | $k$, $\ell$ | segments, and blocks in a segment |
# | $S$ | bytes of a block's output; in the unit chain below, also of what its backward reads |
# | $c$ | bytes that a block saves for its backward, relative to those of its output |
# | $s$, $r$ | snapshots; the number of times a step runs forward before its reversal |
# | $P(n, s)$ | fewest advances that reverse $n$ steps with $s$ snapshots |
# | $\beta(s, r)$ | the largest number of steps that $s$ snapshots and $r$ runs can reverse |
#
# {doc}`02_reentrant_checkpoint` cut chains of functions, and {doc}`06_graph_profiler` planned whole graphs. This
# chapter answers the question in between: *where* to cut.

# %%
from functools import partial
from math import isqrt

import torch

import ackpt
from ackpt import models, plots
from ackpt.experiments import graph_profile, sublinear
from ackpt.experiments.reports import figures
from ackpt.experiments.sublinear import ChainConfig, measured
from ackpt.graph import PlannedStep
from ackpt.metering.timeline import Timeline
from ackpt.policies import chen, revolve, rotor
from ackpt.policies.chains.blocks import fine_chain
from ackpt.results import load_reference, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20
SOURCE = "notebooks/07_sublinear_memory.py"

# %% tags=["hide-input"]
from ackpt.experiments.reports import schematics
from ackpt.experiments.widgets.chain_steps import chain_steps

schematics.publish(chain_steps(), "07_chain")

# %% [markdown]
# The animation runs a chain of 12 layers under the schedules of this chapter, and under a plan of `ackpt` within the
# same peak as $\sqrt n$ segments.
#
# ```{schematic-explorer} ../../results/explorer/07_chain.json
# :image: ../../results/figures/07_chain.png
# :alt: The forward of a chain as a row of circles and its backward as a row of squares below, with live memory over the operations of one step, for five schedules. The baseline's memory is a triangle. Per-block checkpointing, sqrt(n) segments, Revolve and a plan save fewer circles, and recompute the others before backward reads them. Sqrt(n) and the plan have the same peak, and the plan recomputes less. Revolve has the lowest peak and recomputes most.
# :start: sqrt
# ```

# %% [markdown]
# ## A chain of equal blocks
#
# A block of the chain is an activation function followed by a linear layer, with a residual connection around both, as
# in deep networks: $x_i = x_{i-1} + W_i \tanh(x_{i-1})$. What does it save for its backward?

# %%
chain = sublinear.Chain(*(sublinear.Block(4) for _ in range(16)))
x = torch.randn(4096, 4)
graph = ackpt.trace(chain, x)
kept = ackpt.plan(graph, policy="none").activations
S = x.nbytes
names = f"{kept[0].name}, {kept[1].name}, ..."
print(f"{len(kept)} activations of S = {kept[0].bytes} bytes: {names}")
print(f"{len(fine_chain(graph).blocks)} blocks between cuts at single tensors")

# %% [markdown]
# Each block saves one activation, $\tanh(x_{i-1})$: the derivative of tanh is computed from its output, and the
# gradient of $W_i$ needs the same tensor. No backward reads the sum $x_i$. So a baseline step saves $n$ activations,
# and each block can be recomputed from $x_{i-1}$, which has the same size. This is the unit chain of the theory:
# everything has size $S$, and every block costs one matrix product of $2 \cdot 4096 \cdot 4 \cdot 4$ FLOPs. (The layers
# are narrow to keep their gradients small.)
#
# ## Segments: the square root
#
# Chen et al. 2016 ([arXiv:1604.06174](https://arxiv.org/abs/1604.06174)) cut the chain into $k$ segments and save the
# $k - 1$ tensors between them, the *boundaries*. Backward recomputes one segment after another, starting from the end.
# Only the last segment is not recomputed: its activations are still live. At most all boundaries and one segment are
# live at the same time,
#
# $$ k - 1 + \frac{n}{k} \;\ge\; 2 \sqrt n - 1 , \qquad \text{with equality at } k = \sqrt n . $$
#
# How much is recomputed? All blocks but those of the last segment, $n - n / k$, if segments are recomputed as a whole,
# as in a checkpoint. But the last block of a segment only computes the boundary, which is saved. Without these blocks,
# $n - n / k - (k - 1)$ remain, which is $(\sqrt n - 1)^2$ at $k = \sqrt n$: less than one extra forward for any $n$. If
# $k$ does not divide $n$, the longer segments come first: when they are recomputed, fewer boundaries are live, so their
# additional block does not raise the peak.

# %%
[chen.sqrt_counts(n) for n in (16, 64, 256, 1024)]

# %% [markdown]
# ## Recursive halving: the logarithm
#
# A segment is itself a chain and can be cut again. In the extreme case, save only the tensor in the middle, treat the
# right half in the same way, then the left half. The memory $g$ of $n$ blocks is one saved tensor plus the memory of a
# half. Every level of the recursion recomputes half of all blocks once. As before, the blocks that only compute a saved
# tensor need no recomputation, $n - 1$ in all:
#
# $$ g(n) = 1 + g\Bigl(\frac{n - 1}{2}\Bigr) \approx \log_2 n , \qquad
# \text{extra forwards} \approx \frac{n}{2} \log_2 n - (n - 1) . $$

# %%
for n in (16, 64, 256, 1024):
    extra = chen.recursive_extra_forwards(n)
    peak = chen.recursive_peak(n)
    print(f"n = {n:4}: peak {peak:2}, {extra:4} extra forwards, {extra / n:.2f} n")

# %% [markdown]
# ## Measuring both
#
# We compare six ways to run a step. Four need no graph and call the blocks directly:
#
# - *plain*: the baseline;
# - *sqrt*: checkpoints of $\sqrt n$ equal segments (`ackpt.checkpoint_sequential`);
# - *falling*: checkpoints of segments of decreasing length, which need about $\sqrt{2 n}$ activations
#   ({doc}`02_reentrant_checkpoint`);
# - *halves*: nested checkpoints, which halve the chain recursively.
#
# The other two are policies on the graph of the step: `ackpt.plan(graph, policy="chen-sqrt")` and `policy="chen-log"`.
#
# Each runs once while we record its allocations and count its FLOPs. At the peak, the bytes without the gradients of
# parameters should be a whole number of $S$. The FLOPs in excess of the baseline's should be a whole number of matrix
# products.

# %%
LENGTHS = {
    "plain": (16, 64, 256, 1024),
    "sqrt": (16, 64, 256),
    "falling": (16, 64, 256, 1024),
    "halves": (16, 64, 256),
    "chen-sqrt": (16, 64),
    "chen-log": (16, 64),
}
DRAWN = [("plain", 64), ("sqrt", 64), ("chen-log", 64)]
records = {}
for method, lengths in LENGTHS.items():
    for n in lengths:
        points = 300 if (method, n) in DRAWN else 0
        record = sublinear.run(ChainConfig(n, method), SOURCE, points)
        path = record.save(f"results/cpu/07_chain-{method}-{n}.json")
        records[method, n] = record.metrics

# %% tags=["hide-input"]
rows = []
for (method, n), found in records.items():
    theory = found["predicted"]
    row = {"method": method, "n": n, "live": theory["live"], "beside": theory["beside"]}
    row |= {"found": found["live"], "bytes": f"{found['dynamic_peak_bytes']:,}"}
    row |= {"again": theory["runs_again"], "counted": found["runs_again"]}
    rows.append(row)
columns = {"method": "method", "n": "$n$", "live": "saved, predicted", "beside": "other live tensors"}
columns |= {"found": "measured peak, in $S$", "bytes": "measured dynamic peak, bytes"}
columns |= {"again": "recomputed blocks, predicted", "counted": "recomputed blocks, from FLOPs"}
caption = "Chains of equal blocks: predicted and measured peak (in activations of $S$ bytes) and recomputation."
table = markdown_table(rows, columns, caption, "tab-chains")
path = write_text_atomic("results/tables/07_chains.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_chains.md
# ```
#
# Does every number match its prediction? The remaining bytes of a peak should be 0, or 8 if the peak comes after the
# loss: those of the loss and its gradient.

# %%
for found in records.values():
    theory = found["predicted"]
    assert found["live"] == theory["live"] + theory["beside"]
    assert found["runs_again"] == theory["runs_again"]
    assert found["rest_bytes"] in (0, 8)
    others = found["gradient_bytes"] + found["rest_bytes"]
    in_all = found["live"] * found["activation_bytes"] + others
    assert found["dynamic_peak_bytes"] == in_all
len(records)

# %% [markdown]
# The recomputation matches the theory to the FLOP. For the peak, the theory predicts the saved tensors only. The
# *other* live tensors are not derived, neither by Chen et al. nor here: we read their number off such chains. It is two
# to four at any length: incoming and outgoing gradients, and the output of a recomputed segment. For nested checkpoints
# it is two, plus one per level: each level runs one backward inside another, and holds a tensor until the inner
# backward finishes.
#
# With these tensors included, the peaks are right to the byte at every measured length. The lengths are squares and
# powers of two; at other lengths the formulas can be off by a tensor and by a few recomputed blocks.

# %% alt="Peak memory in activations over the number of blocks, both axes logarithmic. Measured points lie on predicted lines, which extend to 1,024 blocks. Plain rises straight to a thousand; sqrt, falling and chen-sqrt rise half as steeply, to between 49 and 66; halves and chen-log rise least, to 22 and 13."
found_peaks, theory_peaks = {}, {}
for (method, n), found in records.items():
    found_peaks.setdefault(method, {})[n] = found["live"]
for method in LENGTHS:
    for n in (16, 64, 256, 1024):
        theory = sublinear.predicted(ChainConfig(n, method))
        theory_peaks.setdefault(method, {})[n] = theory.live + theory.beside
figure = figures.curves_plot(
    found_peaks,
    theory_peaks,
    f"1,024 blocks fit into {found_peaks['falling'][1024]} activations with one extra forward, "
    f"256 blocks into {found_peaks['halves'][256]} with several",
    xlabel="blocks n",
    ylabel="peak, in activations of S bytes",
    logs=("x", "y"),
)
path = plots.save(figure, "results/figures/07_peaks.png")
figure

# %% [markdown]
# Why does the planned recursion recompute less than the nested checkpoints? For $n = 64$ it recomputes 129 products
# instead of 192, $n - 1$ fewer. A checkpoint of a single block recomputes the whole block, including its product, which
# its backward does not read. A plan skips the product.
#
# The next figure shows live memory over time for 64 blocks. (A checkpoint of this package runs its first forward with
# an autograd graph and then drops the graph, which causes the teeth in the forward of *sqrt*.)

# %% alt="Live memory of three training steps side by side. Plain is a tall triangle. Sqrt stays below a third of its height, with teeth on a low ramp that rises in the forward and falls in backward. Chen-log is lower still, with many small teeth."
figure = graph_profile.orders_plot(
    {method: Timeline.from_json(records[method, n]["timeline"]) for method, n in DRAWN},
    "64 blocks: both methods cut the peak; sqrt has one tooth per segment, chen-log many small ones",
    records["plain", 64]["resident_bytes"],
)
path = plots.save(figure, "results/figures/07_timelines.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# $\sqrt n$ segments need $2 \sqrt n - 1$ activations for less than one extra forward. Recursive halving needs about
# $\log_2 n$ activations and half an extra forward per doubling of $n$. On equal blocks both hold to the byte, once the
# other live tensors are included.
# :::

# %% [markdown]
# ## Revolve: the optimum for equal steps
#
# A whole family of schedules lies between these two, and its optimum is known. Revolve (Griewank and Walther 2000,
# [doi:10.1145/347837.347846](https://doi.org/10.1145/347837.347846)) saves at most $s$ states at any time, including
# the first. Here a block is a *step* and its output a *state*. To reverse a step, it runs the step from the state
# before it, and then its backward immediately. A run that only moves on to a later state is an *advance*. Revolve saves
# its first snapshot after $j$ steps. The part after the snapshot is reversed with one snapshot less; the part before it
# follows with all $s$ snapshots:
#
# $$ P(n, s) = \min_{1 \le j < n} \; j + P(n - j, s - 1) + P(j, s) , \qquad
# P(n, 1) = \frac{n (n - 1)}{2} , \quad P(1, s) = 0 . $$
#
# The recursion has a closed form. With $s$ snapshots and at most $r$ runs of each step, one can reverse
# $\beta(s, r) = \binom{s + r}{s}$ steps. For the smallest $r$ with $\beta(s, r) \ge n$,
# $P(n, s) = r \, n - \beta(s + 1, r - 1)$.

# %% tags=["hide-input"]
SNAPSHOTS = (1, 2, 3, 4, 6, 8, 10, 20, 40)
rows = []
for n in (4, 16, 64, 256, 1000):
    row = {"n": n} | {str(s): revolve.advances(n, s) if s <= n else "" for s in SNAPSHOTS}
    rows.append({key: f"{value:,}" if isinstance(value, int) else value for key, value in row.items()})
columns = {"n": "$n$"} | {str(s): f"$s = {s}$" for s in SNAPSHOTS}
caption = "Revolve: the fewest advances $P(n, s)$ that reverse $n$ steps with $s$ snapshots."
table = markdown_table(rows, columns, caption, "tab-revolve")
path = write_text_atomic("results/tables/07_revolve.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_revolve.md
# ```
#
# Is the closed form the minimum of the recursion? We check all chains of up to 60 steps and up to 8 snapshots:


# %%
def least(n, s, known):
    if n == 1 or s == 1:
        return n * (n - 1) // 2
    if (n, s) not in known:
        splits = (j + least(n - j, s - 1, known) + least(j, s, known) for j in range(1, n))
        known[n, s] = min(splits)
    return known[n, s]


known = {}
pairs = [(n, s) for n in range(1, 61) for s in range(1, 9)]
all(least(n, s, known) == revolve.advances(n, s) for n, s in pairs)

# %% [markdown]
# The figure shows the schedule for 16 steps and 3 snapshots. A rising line is a forward run, a falling line a reversal.
# Snapshots are reused: once the end of the chain is reversed, its snapshots are free for the middle.

# %% alt="State of the chain over the steps that were run, a zigzag. A long line rises from state 0 almost to 16; then short rises and falls alternate and descend. Thin horizontal lines show the snapshots: at most three at any time, the one of state 0 from beginning to end."
steps, snapshots = 16, 3
actions = revolve.schedule(steps, snapshots)
most = next(r for r in range(steps) if revolve.beta(snapshots, r) >= steps)
figure = figures.schedule_plot(
    actions,
    steps,
    f"{steps} steps, {snapshots} snapshots: {revolve.advances(steps, snapshots)} advances, no step more than "
    f"{most} times",
)
path = plots.save(figure, "results/figures/07_revolve.png")
figure

# %% [markdown]
# Now we run the real chain of 16 blocks under the policy `revolve` with 2 and 8 snapshots. The first $n - 1$ of the $P$
# advances belong to the forward that every training step runs. The recomputation is therefore $P - (n - 1)$ products:

# %%
for s in (2, 8):
    record = sublinear.run(ChainConfig(16, "revolve", s), SOURCE)
    path = record.save(f"results/cpu/07_chain-revolve-{s}.json")
    found = record.metrics
    assert found["runs_again"] == revolve.advances(16, s) - 15
    again = found["runs_again"]
    print(f"{s} snapshots: peak {found['live']:2} S, {again:2} products recomputed")

# %% [markdown]
# The first state is the caller's tensor, so $s$ snapshots are $s - 1$ new tensors, in addition to the tensors that a
# reversal needs. For comparison, *chen-log* needs 7 $S$ and 17 products for the same chain, *chen-sqrt* 9 $S$ and 9
# products. Revolve saves states only, never the activations inside a block. When much memory is free, that is not
# optimal.
#
# ## Why a thousand blocks fit
#
# We now ask the opposite question: how deep a chain fits into the memory of $m$ activations?

# %% tags=["hide-input"]
rows = []
for m in (5, 10, 20, 40):
    equal = max(n for n in range(1, m * m) if chen.sqrt_counts(n).peak <= m)
    row = {"m": m, "plain": m, "sqrt": equal, "falling": m * (m + 1) // 2}
    row |= {f"r{r}": revolve.beta(m, r) for r in (2, 3, 4)} | {"halves": 2**m - 1}
    rows.append({key: f"{value:,}" if key != "m" else value for key, value in row.items()})
columns = {"m": "$m$", "plain": "baseline", "sqrt": "equal segments", "falling": "decreasing segments"}
columns |= {f"r{r}": f"Revolve, {r} runs" for r in (2, 3, 4)} | {"halves": "recursive halving"}
caption = "The longest chain that saves at most $m$ activations (for Revolve: snapshots) at a time."
table = markdown_table(rows, columns, caption, "tab-depth")
path = write_text_atomic("results/tables/07_depth.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_depth.md
# ```
#
# The baseline pays for each block with memory. All other methods save the activations of a few blocks and recompute the
# rest. The depth that fits grows with the square of $m$, with its $r$-th power, or exponentially. So depth alone does
# not make a chain too large. We compare two of the long chains measured above with their baselines:

# %%
for method, n in (("falling", 1024), ("halves", 256)):
    found, plain = records[method, n], records["plain", n]
    share = found["dynamic_peak_bytes"] / plain["dynamic_peak_bytes"]
    ratio = found["flops"] / plain["flops"]
    mib = f"{found['dynamic_peak_bytes'] / MIB:.2f} MiB of {plain['dynamic_peak_bytes'] / MIB:.2f}"
    print(f"{n:5,} blocks, {method:7}: {mib}, {share:.1%}, FLOPs x {ratio:.2f}")

# %%
published = load_reference("sublinear")
for row in published["rows"]:
    print(f"{row['layers']} layers: {row['before']} GB -> {row['after']} GB, {row['slower']} % slower")
published["source"]

# %% [markdown]
# Chen et al. report a similar result for a network of 1,000 layers. One extra forward adds a third to the FLOPs, since
# the forward is a third of a step's FLOPs. Their figures are times, measured on different hardware, and their layers
# are not equal.
#
# :::{admonition} Takeaway
# :class: tip
# With $s$ snapshots and $r$ runs, Revolve reverses $\beta(s, r)$ steps: a thousand steps with ten snapshots and four
# runs. No schedule reduces the memory of a single block.
# :::

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
for budget in range(8, 18):
    found = rotor.solve(stages, budget)
    ways = [f"{short[kind]} {stage}" for kind, stage in found.operations if kind in short]
    print(f"{budget:2} bytes, time {found.time}: {', '.join(ways)}")

# %%
try:
    rotor.solve(stages, 7)
except ackpt.BudgetError as error:
    print(error)

# %% [markdown]
# The baseline takes 30. Smaller budgets repeat forwards, the cheap ones first: stage 1, which saves 5 bytes and takes
# 1, before stage 0, which saves 2 bytes and takes 2.
#
# A realistic chain of this kind narrows from front to back, like a convolutional network. Ours has four stages of eight
# blocks. From one stage to the next the activations halve, while the FLOPs of a block stay the same. Four policies plan
# it within the same budgets. The *cost* of a plan is its added time as a fraction of the baseline step. It is modeled
# from FLOPs and moved bytes.

# %%
pyramid, pyramid_x = sublinear.pyramid(4, 8, 8), torch.randn(4096, 8)
pyramid_graph = ackpt.trace(pyramid, pyramid_x)
pyramid_profile = ackpt.profile(pyramid_graph, workspace="measured")
budgets = [budget / 100 for budget in range(100, 40, -4)]
POLICIES = "chen-sqrt", "chen-log", "revolve", "rotor"
rows = sublinear.within(pyramid_graph, pyramid_profile, budgets, POLICIES)

# %% [markdown]
# We run rotor's plan for a budget of 60 per cent of the baseline's dynamic peak, and compare planned and measured peak
# in bytes:

# %%
step = PlannedStep(pyramid, partial(ackpt.plan, budget=0.6, policy="rotor"))
found, plan = measured(pyramid, step, (pyramid_x,)), step.plan
assert found.dynamic_peak_bytes == plan.dynamic_peak_bytes <= plan.limit_bytes
point = {100 * found.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes: 100 * plan.cost}
plan.dynamic_peak_bytes, found.dynamic_peak_bytes

# %% alt="Cost over the dynamic peak, both in per cent of the baseline. Four lines fall to the right and end at no cost at 100 per cent. The line of rotor is nowhere above the others and extends furthest to the left. A measured point lies on rotor's line."
lines = {}
for row in rows:
    if row["peak"] is not None:
        lines.setdefault(row["policy"], {})[100 * row["peak"]] = 100 * row["cost"]
figure = figures.curves_plot(
    {"rotor": point},
    lines,
    "On unequal blocks no policy beats rotor, which also reaches the lowest peak",
    xlabel="dynamic peak, % of the baseline's",
    ylabel="cost, % of the baseline step",
    logs=(),
)
path = plots.save(figure, "results/figures/07_pyramid.png")
figure

# %%
by_budget = {}
for row in rows:
    if row["cost"] is not None:
        by_budget.setdefault(row["budget"], {})[row["policy"]] = row["cost"]
all(costs["rotor"] == min(costs.values()) for costs in by_budget.values())

# %% [markdown]
# This holds by construction: the candidates of our policy `rotor` include the schedules of the other three policies,
# and the simulator picks the cheapest one that fits. The other policies lose because they count blocks. They do not
# know that a boundary in the first stage takes eight times as much memory as one in the last.

# %% [markdown]
# ## Where the formulas go wrong
#
# **A block saves more than its output.** In a Transformer, the activations inside a block are many times larger than
# its output. If a block saves $c$ times the bytes of its output, a segment of $\ell$ blocks saves $c \, \ell$ outputs,
# and the sum to minimize is
#
# $$ k - 1 + \frac{c \, n}{k} , \qquad \text{least at } k = \sqrt{c \, n} . $$
#
# This $k$ may exceed $n$; then every block should be a segment. For the blocks of this book $c = 10 + 2 f / d + \dots$,
# which is 18 or more at $f = 4 d$. We cut sixteen of these blocks into $k$ segments and measure:

# %%
config = models.TransformerConfig(dim=32, ff_dim=128, layers=16, head_dim=16)
T, n = 128, config.layers
offsets = torch.tensor([0, T], dtype=torch.int32)
blocks = torch.nn.ModuleList(models.Block(config) for _ in range(n))
calls = [partial(block, cu_seqlens=offsets, max_seqlen=T) for block in blocks]
h = torch.randn(T, config.dim)


def in_segments(k):
    return measured(blocks, lambda h: ackpt.checkpoint_sequential(calls, k, h).sum(), (h,))


# %%
segments = (1, 2, 4, 8, 16)
transformer = {k: in_segments(k) for k in segments}
inside = (transformer[1].timeline.live[transformer[1].timeline.boundary] - 8) / n
c = inside / h.nbytes
print(f"c = {c:.1f}, sqrt(n) = {isqrt(n)}, sqrt(c n) = {(c * n) ** 0.5:.1f}")

# %% [markdown]
# The measured peak also contains gradients of parameters. When backward recomputes a segment, $j$ boundaries are left,
# and the gradients of the segments after it exist. The prediction is the largest sum over all $j$:

# %% alt="Peak memory over the number of segments for 16 Transformer blocks. Measured points fall all the way from one segment to sixteen. The predicted line falls in the same way and runs close below them."
measured_mib = {k: found.dynamic_peak_bytes / MIB for k, found in transformer.items()}
weights = sum(parameter.nbytes for parameter in blocks.parameters())
with_c = {
    k: max((j + c * n / k) * h.nbytes + (k - 1 - j) / k * weights for j in range(k)) / MIB for k in segments
}
least_unit = min(segments, key=lambda k: k - 1 + n / k)
least_found = min(segments, key=measured_mib.get)
figure = figures.curves_plot(
    {"16 Transformer blocks": measured_mib},
    {"16 Transformer blocks": with_c},
    f"The best number of segments is {least_unit} for unit blocks, but {least_found} for Transformer blocks",
    xlabel="segments k",
    ylabel="dynamic peak (MiB)",
)
path = plots.save(figure, "results/figures/07_transformer.png")
figure

# %% [markdown]
# The measured points lie above the line by a nearly constant amount: the temporaries of one block's backward.
#
# **Blocks differ, and the graph may have more or fewer blocks than the model.** The next table shows four models and
# the number of blocks that the policies find in their graphs. It compares the peaks that the unit formulas promise for
# that number of blocks with the lowest peak that each policy reaches. The policies' peaks are simulated. For the last
# two models we also run the plan of `rotor`, and the measured peak must equal the simulated one.

# %%
sizes = {"dim": 32, "ff_dim": 128, "head_dim": 16, "vocab_size": 64}
lm = models.LanguageModel(models.TransformerConfig(**sizes, layers=4))
tokens, lm_offsets = torch.randint(64, (256,)), torch.tensor([0, 256], dtype=torch.int32)
resnet = models.ResNet(models.ResNetConfig("basic", (2, 2, 2, 2), width=8, num_classes=10))
pictures, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
cases = {
    "36 equal blocks": (sublinear.Chain(*(sublinear.Block(4) for _ in range(36))), (x,), {}),
    "pyramid": (pyramid, (pyramid_x,), {}),
    "language model": (lm, (tokens, lm_offsets, 256), {"targets": tokens.roll(-1)}),
    "ResNet-18": (resnet, (pictures,), {"labels": labels}),
}

# %%
rows = []
for name, (model, args, kwargs) in cases.items():
    graph = ackpt.trace(model, *args, **kwargs)
    profile = ackpt.profile(graph, workspace="measured")
    count = len(fine_chain(graph).blocks)
    row = {"model": name, "blocks": count}
    row |= {"sqrt": chen.sqrt_counts(count).peak / count, "log": chen.recursive_peak(count) / count}
    for policy in POLICIES:
        plan = sublinear.lowest(graph, profile, policy)
        row[policy] = plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
        if policy == "rotor" and name in ("language model", "ResNet-18"):
            step = PlannedStep(model, lambda graph, plan=plan: plan)
            assert measured(model, step, args, kwargs).dynamic_peak_bytes == plan.dynamic_peak_bytes
    rows.append(row)

# %% tags=["hide-input"]
columns = {"model": "model", "blocks": "blocks $n$"}
columns |= {"sqrt": "equal segments", "log": "recursive halving"} | {policy: f"`{policy}`" for policy in POLICIES}
shown = [{key: round(100 * v, 1) if isinstance(v, float) else v for key, v in row.items()} for row in rows]
caption = (
    "Lowest dynamic peaks in per cent of the baseline's: promised by the formulas for $n$ unit blocks "
    "($\\sqrt n$ equal segments, recursive halving), and simulated for the four policies."
)
table = markdown_table(shown, columns, caption, "tab-models")
path = write_text_atomic("results/tables/07_models.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_models.md
# ```
#
# On equal blocks, *chen-sqrt* comes close to the counted peak. *chen-log* stays above it because of the other live
# tensors. *revolve* and *rotor* go below *chen-log* because they may recompute a block more often. With a single
# snapshot any chain fits, but the number of advances, $P(n, 1)$, is quadratic. On the other models the formulas are
# wrong in both directions:
#
# - The pyramid and ResNet-18 need *more* memory. Their first blocks are the largest, and one of them must be live in
#   full, together with its gradients. More blocks do not change that.
# - The language model needs *less* than $\sqrt n$ promises. Its blocks are halves of layers, attention and MLP. The
#   single tensor between two blocks is much smaller than what each saves inside, so boundaries are cheap.
#
# Some models are not chains at all. If a skip connection spans the whole model, no single tensor separates its front
# from its end, and there is nowhere to cut. Such a model needs a planner that works on operations, not on blocks.
#
# :::{admonition} Takeaway
# :class: tip
# The formulas hold for equal blocks that save only as much as they output. For real models, count bytes, not blocks:
# let a planner that knows the sizes choose the cuts, and trust only peaks that have been simulated.
# :::

# %% [markdown]
# The numbers on this page were produced in this environment:

# %% tags=["measured-time", "nbval-ignore-output"]
record.environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: another activation
# :class: note
# With GELU in place of tanh, a block saves two tensors, GELU's input and its output. Into how many equal segments
# should you cut 32 such blocks? Predict with $c$, then measure.
# :::


# %% tags=["solution"]
class Gelu(sublinear.Block):
    def forward(self, x):
        return x + self.linear(torch.nn.functional.gelu(x))


gelu = torch.nn.Sequential(*(Gelu(4) for _ in range(32)))
print(f"sqrt(2 n) = {(2 * 32) ** 0.5:.0f}")
for k in (2, 4, 8, 16):
    found = measured(gelu, lambda x, k=k: ackpt.checkpoint_sequential(gelu, k, x).sum(), (x,))
    print(f"{k:2} segments: {found.dynamic_peak_bytes / S:4.1f} S, k - 1 + 2 n / k = {k - 1 + 2 * 32 // k}")

# %% [markdown]
# The more a block saves, the shorter its segments should be. In the first block of a segment, GELU's input is the
# boundary, which is already live: that is one tensor less. It partly offsets the live tensors that the formula does not
# count.
#
# :::{admonition} Exercise 2: two runs
# :class: note
# How many snapshots does Revolve need for 1,000 steps if no step may run forward more than twice before its reversal?
# Compare with segments of decreasing length.
# :::

# %% tags=["solution"]
fewest = next(s for s in range(1, 1000) if revolve.beta(s, 2) >= 1000)
falling = next(p for p in range(1, 1000) if p * (p + 1) // 2 >= 1000)
fewest, falling, [revolve.beta(s, 2) == (s + 1) * (s + 2) // 2 for s in (1, 10, 44)]

# %% [markdown]
# $\beta(s, 2) = (s + 1)(s + 2) / 2$. Segments of decreasing length are Revolve with two runs, of which the first is the
# forward itself. They need one activation more, because they save the activations inside the segment that is being
# reversed.
#
# :::{admonition} Exercise 3: save or recompute
# :class: note
# Take eight equal stages, with all sizes and times equal to 1. How long do rotor's schedules take for budgets from 3 to
# 10, and Revolve's for 1 to 8 snapshots? Count every forward and every backward. Why is rotor faster?
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
# ## What we have seen
#
# - $\sqrt n$ segments save $2 \sqrt n - 1$ activations for less than one extra forward. Recursive halving saves about
#   $\log_2 n$ for half an extra forward per doubling. Measured chains match both, to the byte and to the FLOP.
# - In addition, the allocator sees a few other live tensors, the same number at every length. Nested checkpoints add
#   one per level.
# - Revolve is optimal if only states are saved: $s$ snapshots and $r$ runs reverse $\beta(s, r)$ steps. A chain of
#   1,024 blocks fits into the memory of a few dozen activations.
# - rotor takes the differences between blocks into account, and may save the activations inside a block.
# - On real models the formulas err in both directions. Bytes decide, not the number of blocks, and the largest block
#   sets a minimum.
#
# ## Sources
#
# - {cite:t}`chen2016`: $\sqrt n$ segments and recursive halving.
# - {cite:t}`griewank2000`: Revolve.
# - {cite:t}`beaumont2019`: rotor.
