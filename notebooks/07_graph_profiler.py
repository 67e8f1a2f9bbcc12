# %% [markdown]
# # Knowing the peak before the step runs
#
# **Which operations does a step consist of, and how can its peak be predicted before it runs?**

# %% [markdown]
# ```{figure} ../../results/figures/07_orders.png
# :alt: Live memory of three training steps side by side. Early: memory rises in four steps through the forward, rises steeply to the peak when backward begins, and falls slowly. Late: four low teeth in backward, each lower than the one before. On demand: more and still lower teeth.
# :class: dark-light
# :name: fig-orders
#
# Measured live memory of one step, which recomputes the same activations in three orders. The order determines the
# peak. The weight, 1 MiB, is resident.
# ```
#
# Capture the step as a list of operations, and add up the bytes that each allocates and frees: the largest sum is the
# peak, to the byte. The same saved tensors have different peaks in different orders, so a plan must fix the order.
#

# %% tags=["hide-input"]
import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import ackpt
from ackpt import models
from ackpt.graph import PlannedStep, lower, scheduled, simulate
from experiments import graph_profile
from experiments.models import ResNet, ResNetConfig
from experiments.reports import plots, schematics
from experiments.reports.figures import nodes_plot
from experiments.results import environment, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## Capturing a step
#
# `make_fx` calls a function and records every operation, including those of `torch.autograd.grad`. With
# `tracing_mode="fake"`, tensors have shapes but no data, so nothing is computed. The result is a *joint graph* of
# forward and backward, here for a network of two layers:

# %%
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x, labels):
        return F.cross_entropy(self.down(F.relu(self.up(x))), labels)


tiny, x, labels = Tiny(), torch.ones(4, 8), torch.tensor([0, 1, 1, 0])


def step(parameters, x, labels):
    loss = functional_call(tiny, parameters, (x, labels))
    start = torch.ones_like(loss)  # the gradient with which backward begins
    return (
        loss,
        start,
        torch.autograd.grad(loss, list(parameters.values()), start),
    )


joint = make_fx(step, tracing_mode="fake")(
    dict(tiny.named_parameters()), x, labels
).graph

# %% alt="Boxes of operations in three rows with arrows. Forward, from left to right: addmm, relu, addmm_1, log_softmax and nll_loss_forward. Below it backward, from right to left, begins with ones_like and ends with threshold_backward. In the lowest row are the gradients of the parameters. Thick arrows lead from relu, log_softmax and nll_loss_forward down to the operations of backward that read them."
figure = schematics.joint_figure(
    graph_profile.operations(joint, "ones_like")
)
path = plots.save(figure, "results/figures/07_graph.png")
figure

# %% [markdown]
# *The operations of one step and the bytes that each allocates. Backward runs from right to left and reads what forward
# saved (thick arrows). Parameters, inputs and views are left out.*
#
# Each layer has one product in forward (`addmm`). The second layer has two in backward: `mm` is the gradient of its
# input and `mm_1` that of its weight. The first layer needs only `mm_2`, because the input of the model needs no
# gradient. The graph also has nodes that compute nothing, such as transposes:

# %% tags=["hide-cell"]
for node in joint.nodes:
    if node.op == "call_function" and torch.is_tensor(node.meta["val"]):
        shape = tuple(node.meta["val"].shape)
        print(f"{node.name:27} {shape!s:8} reads {', '.join(source.name for source in node.all_input_nodes)}")

# %% [markdown]
# ## Live bytes and the peak
#
# Memory is allocated and freed per *storage*, not per node. Transposes such as `t` are *views*: tensors that share the
# storage of another tensor. A storage is allocated by its first node and freed after the last node that reads it or a
# view of it.
#
# Let $m_{i-1}$ be the bytes that are live before operation $i$. The operation allocates $b_i$ bytes for its outputs and
# $w_i$ bytes of *workspace*, which it needs only while it runs. After it, the $b_i^-$ bytes that no later operation
# reads are freed:
#
# $$ m_i = m_{i-1} + b_i - b_i^- , \qquad \text{peak} = \max_i \, (m_{i-1} + b_i + w_i) . $$
#
# Parameters and inputs belong to the caller and do not count. The outputs of the graph are live until its end. This is
# enough for a simulator:

# %%
def storages(node):
    """The bytes of the storages of a node, by storage."""
    tensors = [
        t
        for t in torch.utils._pytree.tree_leaves(node.meta.get("val"))
        if torch.is_tensor(t)
    ]
    return {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
    }


def live_bytes(graph):
    """For each node, its name, b_i, b_i^- and m_i, without workspaces."""
    first, last, size = {}, {}, {}
    for i, node in enumerate(graph.nodes):
        for reads in (node, *node.all_input_nodes):
            for storage, nbytes in storages(reads).items():
                first.setdefault(
                    storage, None if node.op == "placeholder" else i
                )
                last[storage], size[storage] = i, nbytes
    live = 0
    for i, node in enumerate(graph.nodes):
        born = sum(size[s] for s in size if first[s] == i)
        freed = sum(
            size[s] for s in size if last[s] == i and first[s] is not None
        )
        live += born - freed
        yield node.name, born, freed, live


rows = list(live_bytes(joint))
print("node                       b_i b_i^-  m_i")
for name, born, freed, live in rows:
    if name != "output" and (born or freed):
        print(f"{name:26} {born:3} {freed:5} {live:4}")

# %% [markdown]
# The peak is the largest $m_{i-1} + b_i = m_i + b_i^-$. We compare it with the peak of the real step, measured at the
# allocator:

# %%
def measured(forward, model, *args, **kwargs):
    """Memory and FLOPs of one step, measured."""

    def once():
        model.zero_grad()
        forward(*args, **kwargs).backward()

    owned = (model, *filter(torch.is_tensor, (*args, *kwargs.values())))
    return ackpt.measure(once, "cpu", resident=owned, repeats=0)


predicted = max(live + freed for _, _, freed, live in rows)
tiny_step = measured(tiny, tiny, x, labels)
print(
    f"predicted {predicted} bytes, measured {tiny_step.dynamic_peak_bytes}"
)

# %% [markdown]
# ```{margin}
# In this model the peak comes late, because the gradients are larger than the activations.
# ```
#
# The prediction is exact to the byte. `ackpt.trace` captures such a graph, even of a model that is too large for this
# machine, and `ackpt.graph.simulate` simulates any schedule.
#
# The saved storages are those that forward writes and backward reads. `boundary` is the position of the first node of
# backward:

# %%
tiny_graph = ackpt.trace(tiny, x, labels)
for s in tiny_graph.storages:
    if (
        s.category in ("activation", "temporary")
        and s.producer < tiny_graph.boundary
    ):
        names = ", ".join(tiny_graph.nodes[i].name for i in s.nodes)
        fate = (
            f"saved until node {s.last_bw_access}"
            if s.first_bw_access
            else "not needed by backward"
        )
        print(f"{s.bytes:4} B  {fate:22}  {names}")
ackpt.plan(tiny_graph, policy="none").saved_bytes

# %% [markdown]
# The output of `addmm` is read only by ReLU and then freed. The output of ReLU is needed twice, by the backward of ReLU
# and by the weight gradient of the second layer, but it is saved only once: $4 \cdot 16 \cdot 4 = 256$ bytes. The loss
# saves the log-probabilities, $4 \cdot 2 \cdot 4 = 32$ bytes, and a count, 4 bytes.
#
# ## The cost of each operation
#
# `ackpt.profile` finds the FLOPs, the bytes moved, the seconds and the workspace of every node. FLOPs and bytes follow
# from shapes: a matrix product takes 2 × rows × columns × summed elements FLOPs. Seconds follow from the rates of a
# device by the *roofline* model ({cite:t}`williams2009`): an operation takes as long as its FLOPs or its memory
# traffic, whichever is longer.
#
# Workspaces do not follow from shapes and do not appear in the graph. On the CPU, `workspace="measured"` runs each
# different operation once and measures its workspace. We try it on a small language model:

# %%
sizes = {"dim": 64, "ff_dim": 256, "head_dim": 16, "vocab_size": 256}
lm = models.LanguageModel(models.TransformerConfig(**sizes, layers=2))
tokens, offsets = (
    torch.randint(256, (512,)),
    torch.tensor([0, 512], dtype=torch.int32),
)
call, targets = (tokens, offsets, 512), {"targets": tokens.roll(-1)}
lm_graph = ackpt.trace(lm, *call, **targets)
lm_profile = ackpt.profile(lm_graph, workspace="measured")
for size, node in sorted(
    zip(lm_profile.workspace_bytes, lm_graph.nodes),
    key=lambda pair: -pair[0],
)[:4]:
    print(f"{size:7,} B in {node.target.removeprefix('aten.')}")
baseline = ackpt.plan(lm_graph, policy="none", profile=lm_profile).schedule
predicted = simulate(lm_graph, lm_profile, baseline).peak_bytes
lm_step = measured(lm, lm, *call, **targets)
print(
    f"predicted peak {predicted:,} B, "
    f"measured {lm_step.dynamic_peak_bytes:,} B"
)
assert predicted == lm_step.dynamic_peak_bytes

# %% [markdown]
# For each node, we write its time at the rates of a T4, the live bytes while it runs, and the bytes freed per second of
# recomputation:

# %% tags=["hide-input"] alt="Two panels over the nodes of the step. Above, the time of each node: a few bars of matrix products and attention stand out, the highest near the middle. Below, the live memory while the node runs: it rises in forward, peaks where backward begins, at a dashed line, and falls."
table = graph_profile.node_rows(lm_graph, ackpt.profile(lm_graph, "t4", workspace="measured"))
shown = ("id", "name", "seconds", "live_bytes", "last_fw_access", "first_bw_access", "recompute_ratio")
lines = [",".join(shown), *(",".join(str(row[name]) for name in shown) for row in table)]
path = write_text_atomic("results/tables/07_nodes.csv", "\n".join(lines) + "\n")
print("\n".join(lines[:1] + [line for line, row in zip(lines[1:], table) if "gelu" in row["name"]][:2]))
ran = [row for row in table if row["live_bytes"] != ""]
times, live = [float(row["seconds"]) for row in ran], [row["live_bytes"] for row in ran]
assert max(live) == predicted
figure = nodes_plot(times, live, sum(row["phase"] == "forward" for row in ran))
path = plots.save(figure, "results/figures/07_nodes.png")
figure

# %% [markdown]
# *Time and live memory of every node; backward begins at the dashed line.*
#
# :::{admonition} Takeaway
# :class: tip
# A step is a list of operations on storages. A storage is live from its first to its last access, and it is saved if
# forward writes it and backward reads it. Bytes and FLOPs follow from shapes; workspaces must be measured.
# :::
#
# ## Schedules
#
# A *schedule* is the ordered list of steps that a plan runs: compute this node, free that storage. The baseline computes
# every node once. `lower` takes the storages to save and recomputes every other storage once, when it is first read. We
# use a chain of tanh operations, because the backward of a tanh reads only its output, and recompute the second of four:

# %%
class Chain(nn.Module):
    def __init__(self, n, elements):
        super().__init__()
        self.n, self.weight = n, nn.Parameter(torch.randn(elements))

    def forward(self):
        x = self.weight
        for _ in range(self.n):
            x = x.tanh()
        return x.sum()


def activations(graph):
    """The storages of the tanh outputs of a chain, in order."""
    producers = (
        (s.id, graph.nodes[s.producer].target) for s in graph.storages
    )
    return [s for s, target in producers if target == "aten.tanh.default"]


short = ackpt.trace(Chain(4, 2**18))
x1, x2, x3, x4 = activations(short)
for one in lower(short, [x1, x3, x4]).backward:
    if one.kind == "compute" and "tanh" in short.nodes[one.id].target:
        print("compute", short.nodes[one.id].name)
    elif one.kind == "free" and one.id in (x1, x2, x3, x4):
        print("free   ", short.nodes[short.storages[one.id].producer].name)
for saved in ([x1, x2, x3, x4], [x1, x3, x4]):
    peak = simulate(
        short,
        ackpt.profile(short, workspace="measured"),
        lower(short, saved),
    ).peak_bytes
    print(
        f"{len(saved)} activations saved: "
        f"peak {peak / 2**20:.1f} activations"
    )

# %% [markdown]
# Recomputing one activation adds one line to backward, `compute tanh_1`, right before its only reader.
#
# ## A plan is an order, not a set
#
# "Save these, recompute the others" does not say *when* to recompute. Take a chain of $n = 16$ activations of $S$ bytes,
# in segments of length $\ell = 4$. Save the last activation of every segment, and recompute the others in three orders:
#
# - **Early**: recompute all missing activations when backward begins. Then all $n$ are live, and the last tanh's backward
#   adds one gradient. The gradient that it reads is that of the sum: a single element, broadcast.
# - **Late**: recompute the $\ell - 1$ activations of a segment when backward reaches it. The peak is in the segment
#   nearest the loss: its own saved activation is already freed, and the other $n / \ell - 1$ are live. Two gradients are
#   also live: the one that a tanh's backward reads and the one that it computes.
# - **On demand**: recompute each activation from the nearest saved one just before backward needs it, then free it. Next
#   to the two gradients, only one recomputed activation is live, in place of $\ell - 1$.
#
# In units of $S$, and without the loss and its gradient, the peaks are
#
# $$ \begin{aligned}
#    \text{peak}_\text{early} &= n + 1 &&= 17 \\
#    \text{peak}_\text{late} &= (n / \ell - 1) + (\ell - 1) + 2 &&= 8 \\
#    \text{peak}_\text{on demand} &= (n / \ell - 1) + 1 + 2 &&= 6
#    \end{aligned} $$
#
# {doc}`06_sublinear_memory` derives the best $\ell$ for the late order. Here we check the three peaks. `scheduled` takes
# the order of the backward operations and inserts the frees:

# %%
n, length = 16, 4
chain = Chain(n, 2**18)
graph = ackpt.trace(chain)
ends = activations(graph)[length - 1 :: length]
late = lower(graph, ends)
order = [one.id for one in late.backward if one.kind == "compute"]
recomputed = [i for i in order if i < graph.boundary]
backward = [i for i in order if i >= graph.boundary]
early = scheduled(graph, None, recomputed + backward)

# %% [markdown]
# The on-demand order inserts before each backward operation all nodes that it needs and that are not live:

# %% tags=["hide-input"]
def missing(i, available):
    """The nodes that must run before `i`, in order, if only the nodes `available` are live."""
    needed = []
    for source in graph.nodes[i].inputs:
        if source not in {*available, *needed}:
            needed += [*missing(source, {*available, *needed}), source]
    return needed


available = {graph.storages[s].producer for s in ends}
available |= {node.id for node in graph.nodes if not node.inputs}
order = []
for i in backward:
    order += [*missing(i, available), i]
    available.add(i)
on_demand = scheduled(graph, None, order)
assert early.saved == late.saved == on_demand.saved

# %% [markdown]
# `PlannedStep(model, policy)` runs a model with our own schedule: it captures the graph, calls the function `policy` with
# it, and executes the `schedule` of the result.

# %%
S, profile = chain.weight.nbytes, ackpt.profile(graph, workspace="measured")
timelines = {}
for name, schedule in {
    "early": early,
    "late": late,
    "on demand": on_demand,
}.items():
    forward = PlannedStep(
        chain, lambda graph: SimpleNamespace(schedule=schedule)
    )
    real = measured(forward, chain)
    timelines[name] = real.timeline
    computed = [
        graph.nodes[one.id].target
        for one in schedule.backward
        if one.kind == "compute"
    ]
    runs = computed.count("aten.tanh.default")
    peak = simulate(graph, profile, schedule).peak_bytes
    nbytes = f"simulated {peak:,}, measured {real.dynamic_peak_bytes:,}"
    print(f"{name:9} {nbytes} = {peak / S:.1f} S, {runs} recomputed")
    assert peak == real.dynamic_peak_bytes

# %%
figure = graph_profile.orders_plot(timelines, "", S)
path = plots.save(figure, "results/figures/07_orders.png")

# %% [markdown]
# {ref}`The figure at the top <fig-orders>` shows the three timelines. The early order recomputes twelve activations for
# nothing: its peak is the baseline's. The on-demand order recomputes twice as many and has the lowest peak.
#
# :::{admonition} Takeaway
# :class: tip
# The saved set alone does not determine the peak: the order also matters. Recompute late and free at once. If that is
# not enough, recompute more than once.
# :::
#
# ## Dropout and BatchNorm in recomputation
#
# Two kinds of operations must not simply run a second time. Dropout would draw another mask, and BatchNorm in training
# updates its running statistics, which must happen once per step. A planned step *replays* dropout: forward saves the
# RNG state, and recomputation restores it. It recomputes BatchNorm with an operation that does not update the
# statistics. We train for three steps and compare all parameters and statistics bit for bit with the baseline's:

# %%
net = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)
)


def train(way):
    model = copy.deepcopy(net)
    forward, optimizer = (
        way(model),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        forward(x).sum().backward()
        optimizer.step()
    return model.state_dict()


ways = {
    "baseline": lambda model: model,
    "planned": lambda model: PlannedStep(
        model, lambda graph: SimpleNamespace(schedule=lower(graph, ()))
    ),
    "checkpoint": lambda model: (
        lambda x: checkpoint(model, x, use_reentrant=False)
    ),
}
states = {name: train(way) for name, way in ways.items()}
for name, state in states.items():
    wrong = [
        key
        for key, value in states["baseline"].items()
        if not torch.equal(value, state[key])
    ]
    wrong = ", ".join(key.removeprefix("1.") for key in wrong)
    print(
        f"{name:10} {state['1.num_batches_tracked']} "
        f"batches, wrong: {wrong or 'nothing'}"
    )

# %% [markdown]
# PyTorch's checkpoint updates the statistics twice per step. Operations that change their arguments, and collectives,
# cannot be recomputed: a schedule that recomputes one raises an error that names it.
#
# ## Predicted peaks equal measured peaks
#
# All planning relies on one claim: the simulated peak is the measured peak. We check it for two models: without
# recomputation, with per-block checkpointing, and with a randomly chosen saved set.

# %% tags=["hide-input"]
config = ResNetConfig("basic", (1, 1, 1, 1), width=8, num_classes=10)
resnet = (ResNet(config), (torch.randn(4, 3, 64, 64),), {"labels": torch.randint(10, (4,))})
shown = {"none": "baseline", "full": "per-block", "manual": "random saved set"}
rows = []
for name, case in {"language model": (lm, call, targets), "ResNet": resnet}.items():
    for policy, row in graph_profile.compare(*case, tuple(shown)).items():
        assert row["is_equal"]
        sizes = {kind: round(row[f"{kind}_bytes"] / MIB, 2) for kind in ("saved", "peak")}
        recomputed = round(100 * row["recompute_ratio"], 1)
        rows.append({"model": name, "plan": shown[policy], **sizes, "recomputed": recomputed, "off": row["off_bytes"]})
columns = {"model": "model", "plan": "plan", "saved": "saved, MiB", "peak": "dynamic peak, MiB"}
columns |= {"recomputed": "recomputed FLOPs, %", "off": "simulated - measured, bytes"}
caption = (
    "Planned steps on the CPU; all gradients are bitwise equal to the baseline's. The dynamic peak omits workspaces; "
    "the peaks in the last column include those of this machine."
)
table = markdown_table(rows, columns, caption, "tab-exact")
path = write_text_atomic("results/tables/07_exact.md", table)

# %% [markdown]
# ```{include} ../../results/tables/07_exact.md
# ```
#
# The environment of the measurements on this page:

# %% tags=["measured-time", "nbval-ignore-output"]
environment("cpu", "notebooks/07_graph_profiler.py")

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: another nonlinearity
# :class: note
# How many bytes does `Tiny` save for backward with GELU in place of ReLU? GELU's derivative is computed from its input.
# :::

# %% tags=["solution"]
class TinyGelu(Tiny):
    def forward(self, x, labels):
        return F.cross_entropy(self.down(F.gelu(self.up(x))), labels)


gelu_plan = ackpt.plan(ackpt.trace(TinyGelu(), x, labels), policy="none")
print({a.name: a.bytes for a in gelu_plan.activations}, gelu_plan.saved_bytes)

# %% [markdown]
# GELU saves 256 bytes more: backward needs the input of GELU for its derivative, and the output for the gradient of the
# next weight. With ReLU, one storage is enough for both.
#
# :::{admonition} Exercise 2: a policy of your own
# :class: note
# Write a policy that recomputes no FLOPs: save the outputs of matrix products and attention, and recompute the rest. By
# how much does it lower the dynamic peak of the two-block language model? Hint: `ackpt.profile(graph).flops` lists the
# FLOPs by node.
# :::

# %% tags=["solution"]
def save_products(graph):
    flops = ackpt.profile(graph).flops[: graph.boundary]
    products = {i for i, computed in enumerate(flops) if computed}
    return SimpleNamespace(schedule=lower(graph, [s.id for s in graph.storages if s.producer in products]))


frugal = measured(PlannedStep(lm, save_products), lm, *call, **targets)
print(f"{frugal.dynamic_peak_bytes / lm_step.dynamic_peak_bytes:.2f} of the baseline's peak, {frugal.flops - lm_step.flops} recomputed FLOPs")

# %% [markdown]
# This *selective* checkpointing lowers the peak by more than a third without recomputing a FLOP. It still costs time,
# because the recomputed elementwise operations move bytes.
#
# ## Summary
#
# You can now predict the peak of a step, and of a step that recomputes, from its list of operations.
# {doc}`../architecture` shows how `ackpt` runs such a list: ids, hashes, and the check of a rewritten step.
