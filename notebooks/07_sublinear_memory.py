# %% [markdown]
# # Sublinear memory
#
# After this chapter you can say how much memory a chain of $n$ blocks needs at least, how often its blocks must run
# for that, and where these formulas, which are right for equal blocks, go wrong.

# %% [markdown]
# ## Goals
#
# - Derive what $\sqrt n$ segments and halves of halves keep and run again, and measure it on chains of real layers.
# - Trade snapshots for runs with Revolve, the best that equal steps allow, and read its table.
# - Run a chain a thousand blocks deep in the memory of a few.
# - Plan chains whose blocks differ, with rotor.
# - See what the formulas promise for a Transformer and a ResNet, and what these models really need.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $n$ | blocks of a chain |
# | $k$, $\ell$ | segments, and blocks in a segment |
# | $S$ | bytes of what one block hands to the next; here also of what its backward reads |
# | $c$ | outputs' worth that a block keeps for its backward |
# | $s$, $r$ | snapshots; how often a step runs forward before its reversal |
# | $P(n, s)$ | least advances that reverse $n$ steps with $s$ snapshots |
# | $\beta(s, r)$ | the most steps for which $s$ snapshots and $r$ runs are enough |
#
# {doc}`02_reentrant_checkpoint` has cut chains of functions, {doc}`06_graph_profiler` whole graphs. This chapter is
# about the question between the two: *which* cuts.

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

# %% [markdown]
# ## A chain
#
# A block of the chain is a linear layer behind an activation, with the residual around both, as deep networks have
# them: $x_i = x_{i-1} + W_i \tanh(x_{i-1})$. What does it keep for its backward?

# %%
chain = sublinear.Chain(*(sublinear.Block(4) for _ in range(16)))
x = torch.randn(4096, 4)
graph = ackpt.trace(chain, x)
kept = ackpt.plan(graph, policy="none").activations
S = x.nbytes
names = f"{kept[0].name}, {kept[1].name}, ..."
print(f"{len(kept)} activations of {kept[0].bytes} = S bytes, by {names}")
print(f"{len(fine_chain(graph).blocks)} blocks between single tensors")

# %% [markdown]
# One activation each, $\tanh(x_{i-1})$: the derivative of tanh is taken from its result, and the gradient of $W_i$
# needs the same. The sum $x_i$ is read by nobody's backward. So a baseline step keeps $n$ activations, and each block can
# be run again from $x_{i-1}$, which is as large. This is the unit chain of the theory: everything has size $S$, every
# block costs the same, one matrix product of $2 \cdot 4096 \cdot 4 \cdot 4$ FLOPs. (The layers are narrow to keep
# their gradients small.)
#
# ## The square root
#
# Chen et al. 2016 ([arXiv:1604.06174](https://arxiv.org/abs/1604.06174)) cut the chain into $k$ segments and keep the
# $k - 1$ tensors between them, the *boundaries*. Backward runs segment after segment again, the last one first, which
# is still there. The most that is kept at one time is all boundaries and one segment,
#
# $$ k - 1 + \frac{n}{k} \;\ge\; 2 \sqrt n - 1 , \qquad \text{with equality at } k = \sqrt n . $$
#
# How much runs again? All blocks but those of the last segment, $n - n / k$, if segments run as a whole, as they do in
# a checkpoint. But the last block of a segment only makes the boundary, which was kept. Without these,
# $n - n / k - (k - 1) = (\sqrt n - 1)^2$: less than one more forward, for any $n$. Where $k$ does not divide $n$, the
# longer segments stand in front: when they run again a boundary less is kept, so their block more costs no memory.

# %%
[chen.sqrt_counts(n) for n in (16, 64, 256, 1024)]

# %% [markdown]
# ## The logarithm
#
# Why stop there? A segment is a chain, and can be cut again. In the extreme: keep the one tensor in the middle, treat
# the right half in the same way, then the left one. The memory $g$ of $n$ blocks is one kept tensor and the memory of a
# half. Every level runs half of all blocks once more, but again not those that only make what was kept, $n - 1$ in all:
#
# $$ g(n) = 1 + g\Bigl(\frac{n - 1}{2}\Bigr) \approx \log_2 n , \qquad
# \text{extra forwards} \approx \frac{n}{2} \log_2 n - (n - 1) . $$

# %%
for n in (16, 64, 256, 1024):
    extra = chen.recursive_extra_forwards(n)
    peak = chen.recursive_peak(n)
    print(f"n = {n:4}: peak {peak:2}, {extra:4} extra forwards, {extra / n:.2f} n")

# %% [markdown]
# ## Measured
#
# Six ways to run a step. Four need no graph, they call the blocks: *plain*; *sqrt*, $\sqrt n$ equal segments in
# checkpoints (`ackpt.checkpoint_sequential`); *falling*, segments that get shorter towards the end, which need
# $\sqrt{2 n}$ (chapter 2); *halves*, checkpoints within checkpoints. Two are policies on the step's graph:
# `ackpt.plan(graph, policy="chen-sqrt")` and `policy="chen-log"`.
#
# Each runs once under the allocator's eyes, and its FLOPs are counted. The bytes at the peak, less the gradients of the
# parameters that are there by then, should be a whole number of $S$, and the FLOPs beyond the baseline's a whole
# number of products.

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
columns = {"method": "method", "n": "$n$", "live": "kept, by theory", "beside": "beside them"}
columns |= {"found": "measured peak, in $S$", "bytes": "measured dynamic peak, bytes"}
columns |= {"again": "blocks again, by theory", "counted": "blocks again, by FLOPs"}
caption = "Chains of equal blocks: what theory counts, and what the allocator and the count of FLOPs find."
table = markdown_table(rows, columns, caption, "tab-chains")
path = write_text_atomic("results/tables/07_chains.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_chains.md
# ```
#
# Is every number as predicted? What remains of the bytes may be the loss and its gradient, 8 bytes, where the peak
# stands behind the loss.

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
# What runs again is what theory says, to the FLOP. Of the peak theory gives the tensors that are kept. What lives *beside
# them* Chen et al. do not count, and it is not derived here either: it was read off such chains, two to four tensors
# whatever the length (gradients that arrive and are being made, what a recomputed segment returns), and for nested
# checkpoints two and one more a level: they enter the engine within the engine, where each level holds a tensor until it
# is done. With that the peaks are right to the byte, at every length measured. The lengths are squares and
# powers of two; at others the formulas can be off by a tensor and by a few runs.

# %% alt="Peak memory in activations over the number of blocks, both axes logarithmic. Measured points lie on predicted lines, which go on to 1,024 blocks. Plain rises straight to a thousand; sqrt, falling and chen-sqrt rise half as steeply, to between 49 and 66; halves and chen-log rise least, to 22 and 13."
found_peaks, theory_peaks, found_runs, theory_runs = {}, {}, {}, {}
for (method, n), found in records.items():
    found_peaks.setdefault(method, {})[n] = found["live"]
    found_runs.setdefault(method, {})[n] = (n + found["runs_again"]) / n
for method in LENGTHS:
    for n in (16, 64, 256, 1024):
        theory = sublinear.predicted(ChainConfig(n, method))
        theory_peaks.setdefault(method, {})[n] = theory.live + theory.beside
        theory_runs.setdefault(method, {})[n] = (n + theory.runs_again) / n
figure = figures.curves_plot(
    found_peaks,
    theory_peaks,
    f"1,024 blocks in {found_peaks['falling'][1024]} activations with one more forward, "
    f"256 in {found_peaks['halves'][256]} with several",
    xlabel="blocks n",
    ylabel="measured peak, in activations of S bytes",
    logs=("x", "y"),
)
path = plots.save(figure, "results/figures/07_peaks.png")
figure

# %% alt="Forward runs per block over the number of blocks, the latter logarithmic. Plain stays at one; sqrt, falling and chen-sqrt approach two from below; halves and chen-log rise in a straight line, to six and five runs at 1,024 blocks."
figure = figures.curves_plot(
    found_runs,
    theory_runs,
    "The square root never costs a second forward; the logarithm costs half of one at every doubling",
    xlabel="blocks n",
    ylabel="forward runs of a block, on the average",
)
path = plots.save(figure, "results/figures/07_runs.png")
figure

# %% [markdown]
# Why does the planned recursion run less than the wrapped one? For $n = 64$ it runs 129 products again, not 192:
# $n - 1$ fewer. A checkpoint around a single block runs all of it again, its product too, which its backward does not
# read. A plan leaves that out.
#
# What this looks like in time, for 64 blocks. (A checkpoint of this package runs its first forward with a graph, which
# it drops: hence the teeth in the forward of *sqrt*.)

# %% alt="Live memory of three training steps side by side. Plain is a tall triangle. Sqrt stays below a third of it, with teeth on a low ramp up in the forward and down in backward. Chen-log stays lower still, with many small teeth."
figure = graph_profile.orders_plot(
    {method: Timeline.from_json(records[method, n]["timeline"]) for method, n in DRAWN},
    "64 blocks: a triangle, a tooth for each segment, and the teeth of halves of halves",
    records["plain", 64]["resident_bytes"],
)
path = plots.save(figure, "results/figures/07_timelines.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# $\sqrt n$ segments: $2 \sqrt n$ activations for less than one more forward. Halves of halves: $\log_2 n$ for half a
# forward per doubling. On equal blocks both hold to the byte, once what lives beside the activations is counted in.
# :::

# %% [markdown]
# ## Revolve
#
# Between the two there is a whole family, and its optimum is known. Griewank and Walther 2000
# ([doi:10.1145/347837.347846](https://doi.org/10.1145/347837.347846)) may keep $s$ states at any time, the first one
# included. To reverse a step, it is run from the state before it, and then backward at once. The first snapshot is
# placed after $j$ steps; the right part has a snapshot less, the left part comes later and has them all again:
#
# $$ P(n, s) = \min_{1 \le j < n} \; j + P(n - j, s - 1) + P(j, s) , \qquad
# P(n, 1) = \frac{n (n - 1)}{2} , \quad P(1, s) = 0 . $$
#
# Solved: with $s$ snapshots and at most $r$ runs of each step one can reverse $\beta(s, r) = \binom{s + r}{s}$ steps,
# and with the least $r$ for which that is enough, $P(n, s) = r \, n - \beta(s + 1, r - 1)$.

# %% tags=["hide-input"]
SNAPSHOTS = (1, 2, 3, 4, 6, 8, 10, 20, 40)
rows = []
for n in (4, 16, 64, 256, 1000):
    row = {"n": n} | {str(s): revolve.advances(n, s) if s <= n else "" for s in SNAPSHOTS}
    rows.append({key: f"{value:,}" if isinstance(value, int) else value for key, value in row.items()})
columns = {"n": "$n$"} | {str(s): f"$s = {s}$" for s in SNAPSHOTS}
caption = "Revolve: the least forward steps $P(n, s)$ that reverse $n$ steps with $s$ snapshots."
table = markdown_table(rows, columns, caption, "tab-revolve")
path = write_text_atomic("results/tables/07_revolve.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_revolve.md
# ```
#
# Is the closed form the minimum of the recursion? For all chains of up to 60 steps:


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
# The schedule for 16 steps and 3 snapshots. A line that rises is a run forward, a line that falls a reversal. The
# snapshots come back: as soon as the end is reversed, its places are free for the middle.

# %% alt="A zigzag: state over steps run. A long line rises from state 0 to near 16, then short rises and falls alternate downwards; thin horizontal lines show at most three snapshots kept at any time, the one at state 0 from the beginning to the end."
steps, snapshots = 16, 3
actions = revolve.schedule(steps, snapshots)
most = next(r for r in range(steps) if revolve.beta(snapshots, r) >= steps)
figure = figures.schedule_plot(
    actions,
    steps,
    f"{steps} steps, {snapshots} snapshots: {revolve.advances(steps, snapshots)} steps forward, none more than "
    f"{most} times",
)
path = plots.save(figure, "results/figures/07_revolve.png")
figure

# %% [markdown]
# Now the real chain of 16 blocks, by the policy `revolve` with 2 and 8 snapshots. Of the $P$ advances the first
# $n - 1$ are the forward of any step. What runs again is $P - (n - 1)$ products:

# %%
for s in (2, 8):
    record = sublinear.run(ChainConfig(16, "revolve", s), SOURCE)
    path = record.save(f"results/cpu/07_chain-revolve-{s}.json")
    found = record.metrics
    assert found["runs_again"] == revolve.advances(16, s) - 15
    again = found["runs_again"]
    print(f"{s} snapshots: peak {found['live']:2} S, {again:2} products again")

# %% [markdown]
# The start is the caller's tensor, so $s$ snapshots are $s - 1$ new tensors, with what a reversal needs beside them.
# Compare *chen-log*, which needs 7 $S$ and 17 products for the same chain, and *chen-sqrt* with 9 $S$ and 9 products.
# Revolve keeps states only, never the inside of a block; when much memory is free, that is not optimal.
#
# ## Why a thousand blocks fit
#
# Turn the question around: what depth fits into the room of $m$ activations?

# %% tags=["hide-input"]
rows = []
for m in (5, 10, 20, 40):
    equal = max(n for n in range(1, m * m) if chen.sqrt_counts(n).peak <= m)
    row = {"m": m, "plain": m, "sqrt": equal, "falling": m * (m + 1) // 2}
    row |= {f"r{r}": revolve.beta(m, r) for r in (2, 3, 4)} | {"halves": 2**m - 1}
    rows.append({key: f"{value:,}" if key != "m" else value for key, value in row.items()})
columns = {"m": "room $m$", "plain": "plain", "sqrt": "equal segments", "falling": "falling segments"}
columns |= {f"r{r}": f"Revolve, {r} runs" for r in (2, 3, 4)} | {"halves": "halves of halves"}
caption = "The deepest chain of which at most $m$ activations, or snapshots, are kept at a time."
table = markdown_table(rows, columns, caption, "tab-depth")
path = write_text_atomic("results/tables/07_depth.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_depth.md
# ```
#
# Plain training pays for each block with memory. All others pay with memory for the first few and with runs for the
# rest: the depth grows with the square of the room, or with its $r$-th power, or exponentially. Depth is no reason not
# to fit. Two long chains from above, once more:

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
# Chen et al. report the like of a network 1,000 layers deep. Forward is a third of a step's FLOPs, so one more forward
# is a third more; theirs are measured times of other hardware, and their layers are not equal.
#
# :::{admonition} Takeaway
# :class: tip
# $\beta(s, r)$ steps for $s$ snapshots and $r$ runs: with ten snapshots and four runs a thousand steps. What cannot be
# made smaller by any schedule is one block.
# :::

# %% [markdown]
# ## Chains that differ
#
# In real networks one block keeps more than another, and one costs more. *rotor* (Beaumont et al. 2019,
# [arXiv:1911.13214](https://arxiv.org/abs/1911.13214)) takes four numbers for each stage: its times forward and
# backward, the bytes of its output, and the bytes $\bar a$ that it leaves when everything is kept, output included. A
# stage may be run in three ways: keep all; keep the input only, as a checkpoint; keep nothing. By dynamic programming
# it finds the fastest schedule for a budget, of all in which what is kept stays until it is used.

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
# The baseline takes 30. With less memory forwards are repeated, the cheap ones first: stage 0 leaves 2 bytes and
# costs 2, stage 1 leaves 5 and costs 1.
#
# A real chain of this kind narrows as it goes, like a convolutional network: four stages of eight blocks. From one to
# the next the activations halve, and every block computes the same. All four policies plan it within the same budgets.
# *Cost* is what runs again as a share of the baseline, FLOPs and moved bytes weighed against each other as the
# policies do.

# %%
pyramid, pyramid_x = sublinear.pyramid(4, 8, 8), torch.randn(4096, 8)
pyramid_graph = ackpt.trace(pyramid, pyramid_x)
pyramid_profile = ackpt.profile(pyramid_graph, workspace="measured")
budgets = [budget / 100 for budget in range(100, 40, -4)]
POLICIES = "chen-sqrt", "chen-log", "revolve", "rotor"
rows = sublinear.within(pyramid_graph, pyramid_profile, budgets, POLICIES)

# %% [markdown]
# One of them, run: rotor at 60 per cent, planned and measured peaks in bytes.

# %%
step = PlannedStep(pyramid, partial(ackpt.plan, budget=0.6, policy="rotor"))
found, plan = measured(pyramid, step, (pyramid_x,)), step.plan
assert found.dynamic_peak_bytes == plan.dynamic_peak_bytes <= plan.limit_bytes
point = {100 * found.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes: 100 * plan.cost}
plan.dynamic_peak_bytes, found.dynamic_peak_bytes

# %% alt="Recomputed cost over the peak, both in per cent of the baseline. Four lines fall to the right, to no cost at 100 per cent; rotor's lies below the others or on the lowest of them and reaches furthest to the left. A measured point lies on rotor's line."
lines = {}
for row in rows:
    if row["peak"] is not None:
        lines.setdefault(row["policy"], {})[100 * row["peak"]] = 100 * row["cost"]
figure = figures.curves_plot(
    {"rotor": point},
    lines,
    "On blocks that differ rotor is never beaten, and reaches furthest down",
    xlabel="dynamic peak, % of the baseline's",
    ylabel="cost of what runs again, % of the baseline's",
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
# That is by construction: this policy counts the schedules of the other three among its own candidates, and lets the
# simulator choose. The others lose because they count blocks. A boundary in the first stage costs eight times as much
# memory as one in the last, and they do not know.

# %% [markdown]
# ## Where the formulas go wrong
#
# **A block keeps more than it hands on.** In a Transformer the inside of a block is many times its output. If it keeps
# $c$ outputs' worth, a segment of $\ell$ blocks is $c \, \ell$, and the sum to minimise is
#
# $$ k - 1 + \frac{c \, n}{k} , \qquad \text{least at } k = \sqrt{c \, n} , $$
#
# which may be beyond $n$: then every block is a segment. For the blocks of this book $c = 10 + 2 f / d + \dots$, that
# is 18 and more at $f = 4 d$. Sixteen of them, cut into $k$ segments and measured:

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

# %% alt="Peak memory over the number of segments for 16 Transformer blocks. Measured points fall all the way from one segment to sixteen, along the line of the formula with c; the formula for unit blocks has its least value at four."
measured_mib = {k: found.dynamic_peak_bytes / MIB for k, found in transformer.items()}
with_c = {k: (k - 1 + c * n / k) * h.nbytes / MIB for k in segments}
least_unit = min(segments, key=lambda k: k - 1 + n / k)
least_found = min(segments, key=measured_mib.get)
figure = figures.curves_plot(
    {"16 Transformer blocks": measured_mib},
    {"16 Transformer blocks": with_c},
    f"Unit blocks would be cut into {least_unit} segments; Transformer blocks need least memory in {least_found}",
    xlabel="segments k",
    ylabel="dynamic peak (MiB)",
)
path = plots.save(figure, "results/figures/07_transformer.png")
figure

# %% [markdown]
# The line is the formula with $c$, for activations alone. The points lie above it by what lives beside them, gradients
# of parameters among it; that is not broken down here.
#
# **Blocks differ, and the graph has others than you think.** Four models, the blocks that the policies find in their
# graphs, what the unit formulas promise for so many, as a share of the baseline, and the lowest peak that each policy
# can reach. The columns of policies are simulated; the last two plans of `rotor` are run as well,
# and must take the same bytes.

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
columns |= {"sqrt": "equal segments", "log": "halves of halves"} | {policy: f"`{policy}`" for policy in POLICIES}
shown = [{key: round(100 * v, 1) if isinstance(v, float) else v for key, v in row.items()} for row in rows]
caption = (
    "Lowest dynamic peaks in per cent of the baseline's: counted for as many unit blocks in $\\sqrt n$ equal segments "
    "and in halves of halves, and simulated for the policies."
)
table = markdown_table(shown, columns, caption, "tab-models")
path = write_text_atomic("results/tables/07_models.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_models.md
# ```
#
# On equal blocks *chen-sqrt* comes to what is counted, and *chen-log* stays above it by what lives beside the kept
# tensors. *revolve* and *rotor* go below *chen-log*, since they may run a block more often: with a single snapshot
# $P(n, 1)$ is quadratic, and any chain fits. On the others the formulas are wrong in both directions:
#
# - The narrowing chain and ResNet-18 need *more*. Their first blocks are the largest. Whatever is done with the rest,
#   one of them must be there in full, with its gradients: no number of blocks changes that.
# - The language model needs *less* than $\sqrt n$ says. Its blocks are halves of layers, attention and MLP, between
#   which a single tensor is handed on, much smaller than what each keeps inside. Boundaries are cheap there.
#
# And a model need not be a chain at all. Where a skip connection spans the whole of it, no single tensor separates
# front and end, and there is nothing to cut: what helps then looks at operations, not blocks.
#
# :::{admonition} Takeaway
# :class: tip
# The formulas hold for equal blocks that keep what they hand on. On real models count bytes, not blocks: let a planner
# that knows the sizes choose the cuts, and believe no peak that has not been simulated.
# :::

# %% [markdown]
# Where the numbers of this page were made:

# %% tags=["measured-time", "nbval-ignore-output"]
record.environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: another activation
# :class: note
# With GELU in place of tanh a block keeps two tensors, GELU's input and its output. Into how many equal segments should
# 32 such blocks be cut? Predict with $c$, then measure.
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
# The more a block keeps, the shorter its segments. What GELU reads in the first block of a segment is the boundary
# itself, which is there already: one tensor less, against what lives beside.
#
# :::{admonition} Exercise 2: two runs
# :class: note
# How many snapshots does Revolve need for 1,000 steps, if no step may run forward more than twice before its reversal?
# Compare with the segments of falling length.
# :::

# %% tags=["solution"]
fewest = next(s for s in range(1, 1000) if revolve.beta(s, 2) >= 1000)
falling = next(p for p in range(1, 1000) if p * (p + 1) // 2 >= 1000)
fewest, falling, [revolve.beta(s, 2) == (s + 1) * (s + 2) // 2 for s in (1, 10, 44)]

# %% [markdown]
# $\beta(s, 2) = (s + 1)(s + 2) / 2$: the falling segments are Revolve with two runs, the first of which is the forward
# itself. They need one activation more, since they keep the insides of the segment that is reversed.
#
# :::{admonition} Exercise 3: keep or run
# :class: note
# Eight equal stages, everything of size 1 and cost 1. How long do rotor's schedules take for budgets from 3 to 10, and
# Revolve's for 1 to 8 snapshots? Count every forward and every backward. Why is rotor faster?
# :::

# %% tags=["solution"]
unit = rotor.Chain([1] * 8, [1] * 8, [1] * 8, [1] * 8)
print([rotor.solve(unit, budget).time for budget in range(3, 11)])
print([revolve.advances(8, s) + 8 + 8 for s in range(1, 9)])

# %% [markdown]
# Revolve runs every step once more for its reversal, even with a snapshot of each state. rotor may keep all that a
# stage leaves and go back without a run: with enough memory its time is 16, eight forwards and eight backwards.
#
# ## What we have seen
#
# - $\sqrt n$ segments keep $2 \sqrt n - 1$ activations for less than one more forward; halves of halves keep
#   $\log_2 n$ for half a forward per doubling. Measured chains lie on both curves, to the byte and to the FLOP.
# - Beside them the allocator sees a few tensors more, as many at every length; nested checkpoints add one a level.
# - Revolve is the optimum where only states are kept: $\beta(s, r)$ steps for $s$ snapshots and $r$ runs. A chain of
#   1,024 blocks fits into the memory of a few.
# - rotor weighs blocks that differ, and may keep their insides.
# - On real models the formulas err in both directions. Bytes decide, not blocks; the largest block is the floor.
#
# ## Sources
#
# - {cite:t}`chen2016`: $\sqrt n$ segments, and halves of halves.
# - {cite:t}`griewank2000`: Revolve.
# - {cite:t}`beaumont2019`: rotor.
