# %% [markdown]
# # Sublinear memory
#
# **How little memory can a chain of blocks use, and how much recomputation does that take?**

# %% [markdown]
# ```{figure} ../../results/figures/06_timelines.png
# :alt: Live memory of three training steps side by side. The baseline is a tall triangle. With equal segments the memory stays below a third of its height: a low ramp in the forward, then one tooth of saved activations for the last segment and seven of recomputed activations for the others. With recursive halving it is lower still, with many small teeth.
# :class: dark-light
#
# Live memory of one step of a chain of 64 blocks: with everything saved, with eight segments, and with recursive
# halving. Brown is recomputed.
# ```
#
# A chain of $n$ equal blocks needs about $2 \sqrt n$ activations for less than one extra forward, and about $\log_2 n$
# for half an extra forward per doubling of $n$. Blocks of real models save more than their output, so these numbers
# mislead: count bytes instead.

# %% tags=["hide-input"]
from functools import partial
from math import isqrt

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ackpt
from ackpt import models
from ackpt.checkpointing.sequential import segment_lengths
from ackpt.graph import PlannedStep
from ackpt.planner.policies.chains.blocks import fine_chain
from experiments import graph_profile, sublinear
from experiments.models import ResNet, ResNetConfig
from experiments.policies import chen, revolve
from experiments.reports import figures, plots
from experiments.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20

# %% tags=["hide-input"]
from experiments.reports import schematics
from experiments.widgets.chain_steps import chain_steps

schematics.publish(chain_steps(), "06_chain")

# %% [markdown]
# A *schedule* is the ordered list of what a training step computes, frees and recomputes. The animation runs a chain of
# $n = 12$ layers under schedules of this chapter, and under a plan of `ackpt` with the peak of $\sqrt n$ segments.
#
# ```{schematic-explorer} ../../results/explorer/06_chain.json
# :image: ../../results/figures/06_chain.png
# :alt: The forward of a chain as a row of circles and its backward as a row of squares below, with live memory over the operations of one step, for five schedules. The baseline's memory is a triangle. Per-block checkpointing, sqrt(n) segments, Revolve and a plan save fewer circles, and recompute the others before backward reads them. Sqrt(n) and the plan have the same peak, and the plan recomputes less. Revolve has the lowest peak and recomputes most.
# :start: sqrt
# ```
#
# $\sqrt n$ segments need less memory than per-block checkpointing *and* recompute less: they save few outputs, and the
# last segment is not recomputed.

# %% [markdown]
# ## A chain of equal blocks
#
# A block of the chain is $x_i = x_{i-1} + W_i \tanh(x_{i-1})$, for $i$ from 1 to $n$. What does it save for its
# backward?

# %%
class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.linear(x.tanh())


x = torch.randn(4096, 4)
S = x.nbytes
saved = {}


def pack(tensor):  # called for every tensor that autograd saves
    saved[tensor.untyped_storage().data_ptr()] = list(tensor.shape)
    return tensor


with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    output = Block()(x.clone().requires_grad_())
print("saved:", *saved.values())

# %% [markdown]
# Apart from the parameter, a block saves one tensor, $\tanh(x_{i-1})$: the derivative of tanh is computed from its
# output, and the gradient of $W_i$ needs the same tensor. This is the unit chain of the theory: every activation has
# $S$ bytes, and every block costs one matrix product.
#
# ## Segments: the square root
#
# Chen et al. 2016 ([arXiv:1604.06174](https://arxiv.org/abs/1604.06174)) cut the chain into $k$ segments and save the
# $k - 1$ tensors between them, the *boundaries*. Backward recomputes one segment after another, starting from the end.
# Only the last segment is not recomputed: its activations are still live.

# %%
# The blocks draw no random numbers, so there is no RNG state to save.
save_input = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False
)


def in_segments(blocks, lengths, x):
    start = 0
    for length in lengths[:-1]:
        x = save_input(blocks[start : start + length], x)
        start += length
    return blocks[start:](x)


# %% [markdown]
# At the peak, all boundaries and one segment of $n / k$ blocks are live. The product of $k$ and $n / k$ is always $n$,
# so their sum is smallest if they are equal:
#
# $$ k - 1 + \frac{n}{k} \;\ge\; 2 \sqrt n - 1 , \qquad \text{with equality at } k = \sqrt n . $$
#
# How much is recomputed? All blocks outside the last segment, $n - n / k$. But a segment's last product only computes
# the boundary, which is saved, and PyTorch stops a recomputation as soon as it has all tensors that backward reads.
# This leaves $n - n / k - (k - 1)$ products, or $(\sqrt n - 1)^2$ at $k = \sqrt n$: less than one extra forward.
#
# ```{margin}
# Other chapters count other tensors: $k + n / k$ in {doc}`02_reentrant_checkpoint` includes one gradient, the sum in
# {doc}`07_graph_profiler` two. The measurement below adds three tensors of the last block.
# ```
#
# While backward processes the segments nearest the input, few boundaries are live, so these segments may be longer.
# With decreasing lengths $\ell_1 > \ell_2 > \dots$, about $\sqrt{2 n}$ activations are enough
# ({doc}`02_reentrant_checkpoint`).
#
# ## Recursive halving: the logarithm
#
# A segment is itself a chain and can be cut again. In the extreme case, save only the tensor in the middle, treat the
# right half in the same way, then the left half:

# %%
def halves(blocks, x):
    if len(blocks) == 1:
        return blocks[0](x)
    middle = (len(blocks) + 1) // 2
    return halves(blocks[middle:], save_input(halves, blocks[:middle], x))


# %% [markdown]
# The memory $g$ of $n$ blocks is one saved tensor plus the memory of half of the other blocks. Every level of the
# recursion recomputes half of all blocks once. In total, $n - 1$ of these are skipped, because they only compute a saved
# tensor:
#
# $$ g(n) = 1 + g\Bigl(\frac{n - 1}{2}\Bigr) \approx \log_2 n , \qquad
# \text{recomputed blocks} \approx \frac{n}{2} \log_2 n - (n - 1) . $$
#
# ## Measured peaks and recomputation
#
# We run a chain of 64 blocks with each method. Apart from the gradients of parameters, the loss and its gradient, the
# peak should be a whole number of $S$. The FLOPs above the baseline's should be those of a whole number of products.

# %%
# FLOPs of a block's forward; its backward takes twice as many, that of the
# first block only as many
PRODUCT = 2 * 4096 * 4 * 4


def run_chain(n, method, **options):
    """A measured step, its peak in activations, and the recomputed products."""
    chain = nn.Sequential(*(Block() for _ in range(n)))
    forward = {
        "baseline": chain,
        "equal segments": partial(
            in_segments, chain, isqrt(n) * [n // isqrt(n)]
        ),
        "decreasing segments": partial(
            in_segments, chain, segment_lengths(n)
        ),
        "recursive halving": partial(halves, chain),
    }[method]

    def train():
        chain.zero_grad()
        forward(x).sum().backward()

    run = ackpt.measure(train, resident=[chain, x], repeats=0, **options)
    gradients = run.timeline.at(run.timeline.peak_index).get("gradients", 0)
    live, rest = divmod(run.dynamic_peak_bytes - gradients, S)
    # 8: the loss and its gradient
    assert rest in (0, 8) and (run.flops or 0) % PRODUCT == 0
    recomputed = (
        None if run.flops is None else run.flops // PRODUCT - (3 * n - 1)
    )
    return run, live, recomputed


METHODS = (
    "baseline",
    "equal segments",
    "decreasing segments",
    "recursive halving",
)
for method in METHODS:
    run, live, recomputed = run_chain(64, method)
    start = run.timeline.boundary  # the index at which backward begins
    forward, backward = (
        max(part) // S
        for part in (run.timeline.live[:start], run.timeline.live[start:])
    )
    print(
        f"{method:19} peak {live:2} S (forward {forward:2}, "
        f"backward {backward:2}), {recomputed:3} recomputed"
    )

# %% [markdown]
# Every method reaches its peak in the last addition of the forward. Three *other* tensors are live there: the last
# block's input, product and output. For recursive halving there are two, because this input is itself a boundary.

# %%
OTHERS = {
    method: 2 if method == "recursive halving" else 3 for method in METHODS
}


def predicted(n, method):
    """The peak in activations, and the recomputed blocks."""
    lengths = {
        "equal segments": isqrt(n) * [n // isqrt(n)],
        "decreasing segments": segment_lengths(n),
    }
    if method == "baseline":
        saved, recomputed = n, 0
    elif method == "recursive halving":
        saved, recomputed = (
            chen.recursive_peak(n),
            chen.recursive_extra_forwards(n),
        )
    else:
        saved = max(
            before + length for before, length in enumerate(lengths[method])
        )
        recomputed = n - lengths[method][-1] - (len(lengths[method]) - 1)
    return saved + OTHERS[method], recomputed


# %% tags=["hide-input"]
LENGTHS = {method: (16, 64) if method == "recursive halving" else (16, 64, 256) for method in METHODS}
runs, rows = {}, []
for method, lengths in LENGTHS.items():
    for n in lengths:
        run, live, recomputed = run_chain(n, method)
        theory_live, theory_recomputed = predicted(n, method)
        assert (live, recomputed) == (theory_live, theory_recomputed)
        runs[method, n] = run
        row = {"method": method, "n": n, "theory": theory_live, "live": live}
        rows.append(row | {"theory_again": theory_recomputed, "again": recomputed})
where = environment("cpu", "notebooks/06_sublinear_memory.py")
chains = rows
path = Record("sublinear", {"rows": 4096, "width": 4}, {"chains": chains}, where).save("results/cpu/06_chains.json")
columns = {"method": "method", "n": "$n$", "theory": "peak in $S$, predicted", "live": "measured"}
columns |= {"theory_again": "recomputed blocks, predicted", "again": "from FLOPs"}
caption = "Chains of equal blocks: predicted and measured peak (in activations of $S$ bytes) and recomputation."
table = markdown_table(rows, columns, caption, "tab-chains")
path = write_text_atomic("results/tables/06_chains.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_chains.md
# ```
#
# All predictions match. The longest chain has 1,024 blocks:

# %%
deep, deep_live, _ = run_chain(1024, "decreasing segments", warmup=0)
assert deep_live == predicted(1024, "decreasing segments")[0]
of_baseline = deep_live / predicted(1024, "baseline")[0]
print(
    f"1,024 blocks: {deep.dynamic_peak_bytes / MIB:.2f} MiB"
    f" in {deep_live} activations, {of_baseline:.1%} of the baseline"
)

# %% tags=["hide-input"] alt="Peak memory in activations over the number of blocks, both axes logarithmic. Measured points are on the predicted lines, which extend to 1,024 blocks. The baseline rises straight to a thousand; equal and decreasing segments rise half as steeply, to 66 and 48; recursive halving rises least, to 13."
peaks = {method: {row["n"]: row["live"] for row in rows if row["method"] == method} for method in METHODS}
peaks["decreasing segments"][1024] = deep_live
figure = figures.curves_plot(
    peaks,
    {method: {n: predicted(n, method)[0] for n in (16, 64, 256, 1024)} for method in METHODS},
    "",
    xlabel="blocks n",
    ylabel="peak, in activations of S bytes",
    logs=("x", "y"),
)
path = plots.save(figure, "results/figures/06_peaks.png")
figure

# %% [markdown]
# *Peak over $n$, both axes logarithmic: it grows as $\sqrt n$ with segments, and as $\log_2 n$ with recursive halving.*

# %% tags=["hide-input"]
drawn = "baseline", "equal segments", "recursive halving"
figure = graph_profile.orders_plot(
    {method: runs[method, 64].timeline.thinned(300) for method in drawn},
    "",
    runs["baseline", 64].resident_bytes,
)
path = plots.save(figure, "results/figures/06_timelines.png")  # the figure at the top of this chapter

# %% [markdown]
# ## Revolve: the optimum for equal blocks
#
# A *state* is the output of a block; the chain's input is state 0. Revolve (Griewank and Walther 2000,
# [doi:10.1145/347837.347846](https://doi.org/10.1145/347837.347846)) saves at most $s$ states, *snapshots*, at any
# time, including state 0. *Reversing* a block means to recompute it, and then to run its backward. Any other run of a
# block is an *advance*, and only advances count. In the zigzag below, a rising line is a run of advances, and a falling
# line is a run of reversals.
#
# **A worked example: 4 blocks, 2 snapshots.** The first snapshot is state 0:

# %%
saved, advances = set(), 0
for kind, state, *to in revolve.actions(4, 2):
    if kind == "save":
        saved.add(state)
    advances += to[0] - state if kind == "advance" else 0
    names = {
        "advance": f"advance to state {to[0] if to else 0}",
        "step": f"reverse block {state}",
    }
    print(
        f"{names.get(kind, f'{kind} state {state}'):18} "
        f" saved: {sorted(saved)}  advances: {advances}"
    )
    if kind == "step":  # the state before this block is not needed again
        saved.discard(state - 1)

# %% [markdown]
# Let $E(n, s)$ be the fewest advances for $n$ blocks with $s$ snapshots. Revolve saves its second snapshot after $j$
# advances. The part after it is reversed with one snapshot fewer, the part before it with all $s$:
#
# $$ \begin{aligned} E(n, s) &= \min_{1 \le j < n} \; j + E(n - j, s - 1) + E(j, s) , \\
# E(n, 1) &= \frac{n (n - 1)}{2} , \quad E(1, s) = 0 . \end{aligned} $$
#
# In the example, $j = 2$ gives the minimum, $2 + E(2, 1) + E(2, 2) = 2 + 1 + 1 = 4$.
#
# The recursion has a closed form. With $s$ snapshots and at most $r$ runs of each block before its reversal, one can
# reverse $\beta(s, r) = \binom{s + r}{s}$ blocks. With the smallest $r$ for which $\beta(s, r) \ge n$,
#
# $$ E(n, s) = r \, n - \beta(s + 1, r - 1) . $$
#
# In the example, $\beta(2, 1) = 3 < 4 \le \beta(2, 2) = 6$, so $r = 2$ and $E(4, 2) = 8 - \beta(3, 1) = 4$.

# %% tags=["hide-input"]
SNAPSHOTS = (1, 2, 4, 10, 40)
rows = []
for n in (64, 256, 1000):
    rows.append({"n": f"{n:,}"} | {str(s): f"{revolve.advances(n, s):,}" for s in SNAPSHOTS})
columns = {"n": "$n$"} | {str(s): f"$s = {s}$" for s in SNAPSHOTS}
caption = "Revolve: the fewest advances $E(n, s)$ that reverse $n$ blocks with $s$ snapshots."
table = markdown_table(rows, columns, caption, "tab-revolve")
path = write_text_atomic("results/tables/06_revolve.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_revolve.md
# ```

# %% tags=["hide-input"] alt="State of the chain over the blocks that were run, a zigzag. A long line rises from state 0 almost to 16; then short rises and falls alternate and descend. Thin horizontal lines show the snapshots: at most three at any time, the one of state 0 from beginning to end."
length, snapshots = 16, 3
figure = figures.schedule_plot(revolve.actions(length, snapshots), length, "")
path = plots.save(figure, "results/figures/06_revolve.png")
most = next(r for r in range(length) if revolve.beta(snapshots, r) >= length)
print(f"{revolve.advances(length, snapshots)} advances; no block runs more than {most} times before its reversal")
figure

# %% [markdown]
# *Revolve reverses 16 blocks with three snapshots and runs none forward more than three times before its reversal.*
#
# A *policy* of `ackpt` chooses the schedule for a model. The first $n - 1$ advances belong to the forward that every
# training step runs, and the run within a reversal skips its product, as above. So the policy `revolve` recomputes
# $E(n, s) - (n - 1)$ products. We compare it with the other methods on the chain of 64 blocks:

# %% tags=["hide-input"] alt="Recomputed blocks over the peak in activations, for 64 blocks. From right to left, as the peak falls, recomputation rises: baseline at 67 and 0, Revolve with 32 snapshots, equal segments at 18 and 49, decreasing segments at 14 and 53, recursive halving at 9 and 129, Revolve with 3 snapshots at 8 and 195."
points = {row["method"]: {row["live"]: row["again"]} for row in chains if row["n"] == 64}
points["Revolve"] = {}
for s in (3, 4, 6, 8, 12, 16, 32):
    run = sublinear.run(64, "revolve", s)
    assert run.recomputed_blocks == revolve.advances(64, s) - 63
    points["Revolve"][run.live] = run.recomputed_blocks
figure = figures.curves_plot(
    points, {}, "", xlabel="peak, in activations of S bytes", ylabel="recomputed blocks, of 64", logs=()
)
path = plots.save(figure, "results/figures/06_cost.png")
figure

# %% [markdown]
# *Measured peak and recomputation of 64 blocks; Revolve with seven numbers of snapshots, 3 to 32.*
#
# Revolve never saves the inside of a block, so it wastes spare memory. The policy *rotor* ({doc}`13_rotor`) decides
# this for each block and handles unequal sizes.
#
# How deep a chain fits into $s$ activations? The depth grows with the square of $s$ for decreasing segments, with its
# $r$-th power for Revolve, and exponentially for recursive halving:

# %% tags=["hide-input"]
rows = []
for s in (5, 10, 20, 40):
    row = {"baseline": s, "decreasing": s * (s + 1) // 2}
    row |= {f"r{r}": revolve.beta(s, r) for r in (3, 4)} | {"halves": 2**s - 1}
    rows.append({"s": s} | {key: f"{value:,}" for key, value in row.items()})
columns = {"s": "$s$", "baseline": "baseline", "decreasing": "decreasing segments"}
columns |= {f"r{r}": f"Revolve, {r} runs" for r in (3, 4)} | {"halves": "recursive halving"}
caption = "The longest chain that saves at most $s$ activations (for Revolve: snapshots) at a time."
table = markdown_table(rows, columns, caption, "tab-depth")
path = write_text_atomic("results/tables/06_depth.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_depth.md
# ```
#
# :::{admonition} Takeaway
# :class: tip
# With $s$ snapshots and $r$ runs, Revolve reverses $\beta(s, r)$ blocks: a thousand with ten snapshots and four runs.
# :::

# %% [markdown]
# ## Where the formulas fail
#
# **A block saves more than its output.** A Transformer block saves $A$ elements per token, and its output has $d$. A
# segment of $\ell$ blocks saves as much as $\ell A / d$ outputs, and the sum to minimize is
#
# $$ k - 1 + \frac{A}{d} \, \frac{n}{k} , \qquad \text{smallest at } k = \sqrt{A n / d} . $$
#
# This $k$ may exceed $n$; then every block should be a segment. For the blocks of this book
# $A / d = 10 + 2 f / d + \dots$, which is 18 or more at $f = 4 d$. We cut sixteen of these blocks into $k$ segments and
# measure:

# %%
config = models.TransformerConfig(
    dim=32, ff_dim=128, layers=16, head_dim=16
)
T, n = 128, config.layers
offsets = torch.tensor([0, T], dtype=torch.int32)
blocks = nn.ModuleList(models.Block(config) for _ in range(n))
calls = [
    partial(block, cu_seqlens=offsets, max_seqlen=T) for block in blocks
]
hidden = torch.randn(T, config.dim)


def train_in(k):
    blocks.zero_grad()
    ackpt.checkpoint_sequential(calls, k, hidden).sum().backward()


segments = (1, 2, 4, 8, 16)
transformer = {
    k: ackpt.measure(
        partial(train_in, k), resident=[blocks, hidden], warmup=0, repeats=0
    )
    for k in segments
}
inside = (
    transformer[1].timeline.live[transformer[1].timeline.boundary] - 8
) / n
ratio = inside / hidden.nbytes
print(
    f"A / d = {ratio:.1f}, sqrt(n) = {isqrt(n)}, "
    f"sqrt(A n / d) = {(ratio * n) ** 0.5:.1f}"
)

# %% [markdown]
# The peak also contains gradients of parameters. When a segment with $j$ boundaries before it is recomputed, the
# gradients of the $k - 1 - j$ later segments are live. The prediction is the maximum over all $j$:

# %% tags=["hide-input"] alt="Peak memory over the number of segments for 16 Transformer blocks. Measured points fall all the way from one segment to sixteen. The predicted line falls in the same way and runs close below them."
measured_mib = {k: run.dynamic_peak_bytes / MIB for k, run in transformer.items()}
weights = sum(parameter.nbytes for parameter in blocks.parameters())
predicted_mib = {
    k: max((j + ratio * n / k) * hidden.nbytes + (k - 1 - j) / k * weights for j in range(k)) / MIB for k in segments
}
assert min(segments, key=lambda k: k - 1 + n / k) == isqrt(n) and min(segments, key=measured_mib.get) == n
figure = figures.curves_plot(
    {"16 Transformer blocks": measured_mib},
    {"16 Transformer blocks": predicted_mib},
    "",
    xlabel="segments k",
    ylabel="dynamic peak (MiB)",
)
path = plots.save(figure, "results/figures/06_transformer.png")
figure

# %% [markdown]
# *Sixteen Transformer blocks: the lowest peak is at 16 segments, not at $\sqrt n = 4$. The measured points are higher
# than the line by the temporaries of one block's backward.*
#
# **Real blocks differ, and a graph has other blocks than its model.** In a graph, a block is the operations between two
# *cut points*, tensors through which the whole gradient passes. A *pyramid* narrows from front to back: ours has four
# groups of eight blocks, and three blocks between groups, which halve the activations. The policy *chen-sqrt* cuts
# equal segments; *rotor* finds the best schedule of a chain:

# %% tags=["hide-input"]
sizes = {"dim": 32, "ff_dim": 128, "head_dim": 16, "vocab_size": 64}
lm = models.LanguageModel(models.TransformerConfig(**sizes, layers=4))
tokens, lm_offsets = torch.randint(64, (256,)), torch.tensor([0, 256], dtype=torch.int32)
resnet = ResNet(ResNetConfig("basic", (2, 2, 2, 2), width=8, num_classes=10))
pictures, labels = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
pyramid, pyramid_x = sublinear.pyramid(4, 8, 8), torch.randn(4096, 8)
cases = {
    "36 equal blocks": (sublinear.Chain(*(sublinear.Block(4) for _ in range(36))), (x,), {}),
    "pyramid": (pyramid, (pyramid_x,), {}),
    "language model": (lm, (tokens, lm_offsets, 256), {"targets": tokens.roll(-1)}),
    "ResNet-18": (resnet, (pictures,), {"labels": labels}),
}
rows = []
for name, (model, args, kwargs) in cases.items():
    graph = ackpt.trace(model, *args, **kwargs)
    profile = ackpt.profile(graph, workspace="measured")
    count = len(fine_chain(graph).blocks)
    row = {"model": name, "blocks": count}
    row |= {"sqrt": chen.sqrt_counts(count).peak / count, "log": chen.recursive_peak(count) / count}
    for policy in ("chen-sqrt", "rotor"):
        plan = sublinear.lowest(graph, profile, policy)
        row[policy] = plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
    rows.append({key: f"{100 * value:.0f}" if isinstance(value, float) else value for key, value in row.items()})
step = PlannedStep(resnet, lambda graph: plan)
assert sublinear.measured(resnet, step, (pictures,), {"labels": labels}).dynamic_peak_bytes == plan.dynamic_peak_bytes
columns = {"model": "model", "blocks": "blocks $n$", "sqrt": "equal segments", "log": "recursive halving"}
columns |= {"chen-sqrt": "`chen-sqrt`", "rotor": "`rotor`"}
caption = (
    "Lowest dynamic peaks in percent of the baseline's: promised by the formulas for $n$ unit blocks "
    "($\\sqrt n$ equal segments, recursive halving), and simulated for two policies."
)
table = markdown_table(rows, columns, caption, "tab-models")
path = write_text_atomic("results/tables/06_models.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_models.md
# ```
#
# - For equal blocks, `rotor` needs $6 \, S$, as predicted, but the baseline $39 \, S$, not 36.
# - The pyramid and ResNet-18 need *more* than the formulas predict. Their first blocks are the largest, and all
#   activations of one must be live at once.
# - The language model needs *less* than $\sqrt n$ predicts: its blocks are halves of layers, and the tensors between
#   them are much smaller than those that each block saves inside.
# - A model with a skip connection from front to end cannot be cut. It needs a planner that works on operations
#   ({doc}`07_graph_profiler`).
#
# :::{admonition} Takeaway
# :class: tip
# The formulas hold for equal blocks that save only as much as they output. For real models, trust only peaks that have
# been simulated.
# :::
#
# The numbers on this page were produced in this environment:

# %% tags=["measured-time", "nbval-ignore-output"]
where

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: another activation function
# :class: note
# With GELU in place of tanh, a block saves two tensors, GELU's input and its output. Into how many equal segments
# should you cut 32 such blocks? Predict with $A / d$, then measure with `in_segments`.
# :::

# %% tags=["solution"]
class Gelu(Block):
    def forward(self, x):
        return x + self.linear(nn.functional.gelu(x))


gelu = nn.Sequential(*(Gelu() for _ in range(32)))


def train_gelu(k):
    gelu.zero_grad()
    in_segments(gelu, k * [32 // k], x).sum().backward()


print(f"sqrt(A n / d) = {(2 * 32) ** 0.5:.0f}")
for k in (2, 4, 8, 16):
    run = ackpt.measure(partial(train_gelu, k), resident=[gelu, x], warmup=0, repeats=0)
    print(f"{k:2} segments: {run.dynamic_peak_bytes / S:4.1f} S, k - 1 + 2 n / k = {k - 1 + 2 * 32 // k}")

# %% [markdown]
# The more a block saves, the shorter its segments should be. The formula omits the last block's product and output, and
# counts one tensor twice: GELU's input in the first block of a segment is the boundary.
#
# :::{admonition} Exercise 2: two runs
# :class: note
# How many snapshots does Revolve need for 1,000 blocks if none may run forward more than twice before its reversal?
# Solve it on paper with $\beta(s, 2)$. Compare with segments of decreasing length.
# :::

# %% tags=["solution"]
fewest = next(s for s in range(1, 1000) if revolve.beta(s, 2) >= 1000)
decreasing = next(p for p in range(1, 1000) if p * (p + 1) // 2 >= 1000)
fewest, decreasing, [revolve.beta(s, 2) == (s + 1) * (s + 2) // 2 for s in (1, 10, 44)]

# %% [markdown]
# $\beta(s, 2) = (s + 1)(s + 2) / 2$. Segments of decreasing length are Revolve with two runs, of which the first is the
# forward itself. They need one more activation, because they save the inside of the segment being reversed.
#
# ## Llama 3 8B in segments

# %% tags=["hide-input"] alt="Six stacked bars. With segments of several blocks and the head in chunks, the peak is 70.2 GiB, and the time 1.68 seconds."
from experiments.running_model import bars

figure = bars(6)
path = plots.save(figure, "results/figures/06_running_model.png")
figure

# %% [markdown]
# *The step of {doc}`chapter 1 <01_where_memory_goes>` in segments of about √32 blocks, with its head in chunks;
# predicted.*
#
# With the head in chunks, segments of several blocks need 70.2 GiB, and segments of one block 62.2 GiB. One block has
# 3 GiB of activations, and the inputs of all 32 blocks together have 4 GiB. Longer segments save fewer inputs, but
# recompute more activations at a time.
#
# ## Summary
#
# - Revolve is optimal if only states are saved.
# - On real models the formulas err in both directions: bytes decide, and the largest block sets a minimum.
#
# You can now bound the memory of a chain, and say when the bound misleads.
