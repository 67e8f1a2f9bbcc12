# %% [markdown]
# # The graph profiler
#
# After this chapter you can split a training step into operations and storages, say when each byte is allocated and
# freed, and predict the peak of a step before it runs. You can also tell which tools will attribute a measurement to
# the wrong operation.

# %% [markdown]
# ## Goals
#
# - Capture one layer, then a whole training step, as one graph of forward and backward.
# - Profile it: the FLOPs, bytes moved and workspace of each operation, and the origin of each figure.
# - Follow the live bytes of ResNet-50 and of a language model, and find what their peaks consist of.
# - See why names, positions and shapes do not identify an operation, and what does.
# - Predict the peaks of rewritten steps, and check the predictions to the byte.
# - Change the peak of a plan by changing only its order.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $i$ | the *id* of an operation: its position in the order of execution |
# | $b_i$ | bytes that $i$ allocates for its results |
# | $w_i$ | bytes that $i$ allocates only while it runs, its *workspace* |
# | $r_i$ | bytes freed after $i$, because no later operation needs them |
# | $m_i$ | dynamic bytes that are live after $i$ |
# | $S$, $n$, $k$ | bytes of one activation of a chain; number of its activations; every $k$-th is saved |
# | $T$, $V$ | tokens; size of the vocabulary |
# | $d$, $f$, $h$, $L$ | width of the model; width inside the MLP; heads; blocks |
#
# Part I measured steps from outside and chose by hand what to recompute. Part II looks inside: a planner must know
# every operation before it can decide about any of them.

# %%
import collections
import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils.checkpoint import checkpoint

import ackpt
from ackpt import models, plots
from ackpt.experiments import graph_profile
from ackpt.graph import PlannedStep, RewriteError, ScheduleError, lower, rewrite, scheduled, simulate
from ackpt.metering.timeline import Timeline
from ackpt.results import Record, environment, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20
SOURCE = "notebooks/06_graph_profiler.py"

# %% [markdown]
# ## One layer
#
# `ackpt.trace` runs a model on fake tensors, and autograd records forward and backward in one graph. PyTorch calls it a
# *joint graph*. No values are computed, and the parameters receive no gradients.

# %%
layer, x = nn.Linear(8, 2), torch.ones(4, 8)
graph = ackpt.trace(layer, x)
graph


# %%
def show(nodes):
    for node in nodes:
        target = node.target.removeprefix("aten.")[:36]
        where = f"reads nodes {list(node.inputs)}, uses storages {list(node.storages)}"
        print(f"{node.id:2}  {node.phase:8}  {node.name:10} {target:36}  {where}")


show(graph.nodes)

# %% [markdown]
# A node is an operation or an input of the graph. Its *id* is its position in the order of execution, counted through
# forward and backward. The inputs of the graph are the parameters, the input of the model, and the *tangent*: the
# gradient of the output, with which backward begins.
#
# The twelve nodes use only seven storages. `t`, the transposed weight, computes nothing: it is a *view* and shares the
# storage of the weight. Memory is allocated, saved and freed per *storage*, not per node:

# %%
for s in graph.storages:
    uses = s.last_fw_access, s.first_bw_access, s.last_bw_access
    print(f"{s.id}  {s.bytes:3} B  {s.category:10}  nodes {s.nodes!s:11} accesses {uses}")

# %% [markdown]
# The sizes are easy to check: the weight has $2 \cdot 8$ elements and 64 bytes, the bias 8 bytes, the input of
# $4 \cdot 8$ elements 128 bytes, and the output 32 bytes. The tangent and the two gradients have the sizes of the
# output, the weight and the bias.
#
# The last column lists the nodes that access a storage: the last one in forward, the first and the last one in
# backward. They show which storages must stay live until backward. Here that is only the input, the one storage with
# accesses in both passes. It belongs to the caller, so a single linear layer saves no memory of its own.
#
# ## Two layers and a loss
#
# A small model that does save activations:


# %%
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x, labels):
        return F.cross_entropy(self.down(F.relu(self.up(x))), labels)


tiny, labels = Tiny(), torch.tensor([0, 1, 1, 0])
tiny_graph = ackpt.trace(tiny, x, labels)

# %% [markdown]
# A storage must be saved if a forward operation allocates it and backward accesses it. Parameters and inputs do not
# count, because they belong to the caller:

# %%
nodes, boundary = tiny_graph.nodes, tiny_graph.boundary
for s in tiny_graph.storages:
    if s.category in ("activation", "temporary") and s.producer < boundary:
        fate = "needed" if s.first_bw_access else "not needed"
        names = ", ".join(nodes[i].name for i in s.nodes)
        print(f"{s.bytes:4} B  {fate:10} by backward: {names}")

# %% [markdown]
# The output of the first layer, `addmm`, is read only by ReLU and then freed. The output of ReLU is needed twice, by
# the backward of ReLU and by the weight gradient of the second layer, but it is saved only once:
# $4 \cdot 16 \cdot 4 = 256$ bytes. The loss saves the log-probabilities, $4 \cdot 2 \cdot 4 = 32$ bytes, and a count, 4
# bytes. The allocator reports 8 bytes more: the loss and its gradient.


# %%
def run(step, model, *args, **kwargs):
    model.zero_grad()
    step(*args, **kwargs).backward()


def measured(step, model, *args, **kwargs):
    owned = (model, *filter(torch.is_tensor, (*args, *kwargs.values())))
    once = partial(run, step, model, *args, **kwargs)
    return ackpt.measure(once, "cpu", resident=owned, repeats=0)


tiny_step = measured(tiny, tiny, x, labels)
saved = ackpt.plan(tiny_graph, policy="none").saved_bytes
live = tiny_step.timeline.live[tiny_step.timeline.boundary]
print(f"saved {saved} bytes, live when backward begins {live}")

# %% [markdown]
# ## What an operation costs
#
# `ackpt.profile` finds the cost of every node. The product of an $a \times b$ and a $b \times c$ matrix takes
# $2 \, a b c$ FLOPs, and reads or writes each element once. A view costs nothing.

# %%
profile = ackpt.profile(tiny_graph)
for node in nodes:
    if flops := profile.flops[node.id]:
        moved = profile.bytes_in[node.id], profile.bytes_out[node.id]
        print(f"{node.phase:8}  {node.name:8} {flops:5} FLOPs, bytes in and out {moved}")

# %%
2 * 4 * 8 * 16, 4 * (16 + 4 * 8 + 8 * 16), 4 * 4 * 16

# %%
sum(profile.flops), ackpt.count_flops(partial(run, tiny, tiny, x, labels))

# %% [markdown]
# Each matrix product of the forward has two in backward: one for the gradient of the weight and one for the gradient of
# its input. The first layer needs only one, because the input of the model needs no gradient.
#
# A profile records the origin of its figures. *Analytic* figures follow from shapes: FLOPs from PyTorch's formulas,
# bytes from sizes, and seconds from the rates in a device's data sheet. These seconds are the longer of the time to
# compute and the time to move the bytes, as if every operation reached these rates. *Measured* figures come from
# running each operation alone. *Given* figures are assumptions, such as workspaces of 0. (`profile.save` and
# `profile.to_csv` write all figures and their origins.)

# %%
profiles = {
    'profile(graph, "h200")': ackpt.profile(tiny_graph, "h200"),
    'profile(graph, mode="measured")': ackpt.profile(tiny_graph, mode="measured"),
}
for call, found in profiles.items():
    print(call)
    for origin, figures in sorted((v, k) for k, v in found.origin.items()):
        print(f"    {origin:9} {figures}")

# %% [markdown]
# A measured profile runs the graph node by node. (On a GPU, only the arguments of the running node are on the device,
# so the graph may exceed the memory of the device. The time of copies to the host is measured, too.) The most expensive
# operations of a small language model, summed over its blocks, on this machine:

# %%
lm_sizes = {"dim": 64, "ff_dim": 256, "head_dim": 16, "vocab_size": 256}
lm = models.LanguageModel(models.TransformerConfig(**lm_sizes, layers=2))
tokens, offsets = torch.randint(256, (512,)), torch.tensor([0, 512], dtype=torch.int32)
lm_call = (tokens, offsets, 512), {"targets": tokens.roll(-1)}
lm_graph = ackpt.trace(lm, *lm_call[0], **lm_call[1])
lm_profile = ackpt.profile(lm_graph, mode="measured")

# %% tags=["measured-time", "nbval-ignore-output"]
seconds = collections.Counter()
for node in lm_graph.nodes:
    seconds[node.target] += lm_profile.seconds[node.id]
for target, total in seconds.most_common(5):
    print(f"{total / sum(lm_profile.seconds):4.0%}  {target}")

# %% [markdown]
# **Workspaces** do not follow from shapes. An operation may allocate memory and free it before it returns. No tensor
# ever refers to this memory, but it counts while the operation runs.

# %%
workspaces = collections.Counter()
for node in lm_graph.nodes:
    if size := lm_profile.workspace_bytes[node.id]:
        workspaces[node.target, size] += 1
for (target, size), count in sorted(workspaces.items(), key=lambda item: -item[0][1]):
    print(f"{count:2} x {size:7,} B  {target}")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A step is a list of operations on storages. Three accesses of a storage determine whether it must be saved for
# backward and how long it is live. Bytes and FLOPs follow from shapes; workspaces and seconds must be measured.
# :::

# %% [markdown]
# ## Live bytes and the peak
#
# Before operation $i$, $m_{i-1}$ bytes are live. The operation allocates $b_i$ bytes for its results, and $w_i$ bytes
# of workspace while it runs. After it, $r_i$ bytes are freed:
#
# $$ m_i = m_{i-1} + b_i - r_i , \qquad \text{peak} = \max_i \, (m_{i-1} + b_i + w_i) . $$
#
# These formulas define a simulator. For the baseline, in which every storage is live until its last access, it takes a
# page of Python. Outputs, tangents and gradients of parameters are live until the end of the step.


# %%
def peak_by_hand(graph, workspace_bytes):
    nodes = graph.nodes
    to_the_end = {*graph.outputs, *graph.gradients.values()}
    to_the_end |= {node.id for node in nodes if node.target.startswith("Tangent")}
    held = {s for i in to_the_end for s in nodes[i].storages}
    born, released = collections.Counter(), collections.Counter()
    for s in graph.storages:
        if s.category not in ("parameter", "buffer", "input"):
            born[s.producer] += s.bytes
            accesses = s.producer, s.last_fw_access, s.last_bw_access
            if s.id not in held:
                released[max(i for i in accesses if i is not None)] += s.bytes
    live = peak = 0
    for i in range(len(nodes)):
        peak = max(peak, live + born[i] + workspace_bytes[i])
        live += born[i] - released[i]
    return peak


# %%
lm_step = measured(lm, lm, *lm_call[0], **lm_call[1])
for g, w, found in (
    (tiny_graph, profile.workspace_bytes, tiny_step),
    (lm_graph, lm_profile.workspace_bytes, lm_step),
):
    print(f"by hand {peak_by_hand(g, w):,}, measured {found.dynamic_peak_bytes:,}")

# %% [markdown]
# The prediction is exact to the byte. `ackpt.graph.simulate` does the same for any order of operations and frees, also
# with recomputation. Planners predict the bytes of their plans with it.

# %% [markdown]
# ## A whole training step
#
# We now trace two models of realistic size. Neither needs to fit into memory, because all tensors are *fake*: they have
# shapes but no data. ResNet-50 gets 32 images, and a language model of GPT-2's size gets 8 sequences of 512 tokens. The
# graphs include the state of AdamW.

# %%
GPT2 = models.TransformerConfig(
    dim=768,
    ff_dim=3072,
    layers=12,
    head_dim=64,
    vocab_size=50257,
)


def large_graph(model, *args):
    return ackpt.trace(model, *args, optimizer=torch.optim.AdamW(model.parameters()))


with FakeTensorMode():
    images, classes = torch.empty(32, 3, 224, 224), torch.empty(32).long()
    words, starts = torch.empty(4096).long(), torch.empty(9).int()
    vision, language = models.resnet50(), models.LanguageModel(GPT2)
    large = {
        "ResNet-50": large_graph(vision, images, classes),
        "language model": large_graph(language, words, starts, 512, words),
    }
for name, g in large.items():
    print(f"{name:14} {g}")

# %%
costs = {name: ackpt.profile(g, "h200") for name, g in large.items()}
plans, accounts = {}, {}
for name, g in large.items():
    plans[name] = ackpt.plan(g, policy="none", profile=costs[name])
    accounts[name] = graph_profile.breakdown(g, plans[name])
for name, account in accounts.items():
    after, events = account.peak_index - account.boundary, len(account.live) - 1
    print(f"{name:14} {events} allocations and frees; the peak comes {after} events after backward begins")


# %%
def finding(name):
    account, dynamic = accounts[name], plans[name].dynamic_peak_bytes
    peak = f"a peak of {account.peak_bytes / 2**30:.1f} GiB"
    when = f"{account.peak_index - account.boundary} events after backward begins"
    share = account.at(account.peak_index)["activations"] / dynamic
    return f"{peak}, {when}; activations are {share:.0%} of its dynamic bytes"


# %% alt="Stacked area of the live memory of a ResNet-50 training step over its allocations and frees. Parameters, inputs and optimizer state are flat layers. Activations rise until backward begins, steeply at first, and then fall, while gradients grow slowly. The peak is marked right after backward begins."
figure = plots.timeline_plot(accounts["ResNet-50"], f"ResNet-50: {finding('ResNet-50')}")
path = plots.save(figure, "results/figures/06_resnet.png")
figure

# %% alt="The same plot for the language model. Parameters and optimizer state are thick flat layers. Activations rise in twelve equal stretches until backward begins. Then a spike of temporaries, the gradients in the loss, forms the peak. After it, activations fall while gradients grow."
title = f"Language model: {finding('language model')}"
figure = plots.timeline_plot(accounts["language model"], title)
path = plots.save(figure, "results/figures/06_language_model.png")
figure

# %% [markdown]
# Both peaks come at the boundary of the two passes: the forward has saved all activations, and backward has only begun
# to free them. At that moment these bytes are live:

# %% tags=["hide-input"]
rows = []
for kind in ("parameters", "buffers", "inputs", "optimizer", "gradients", "activations", "temporaries"):
    row = {"category": kind}
    for name, account in accounts.items():
        size = account.at(account.peak_index).get(kind, 0)
        row |= {name: round(size / MIB, 1), f"{name}, %": round(100 * size / account.peak_bytes, 1)}
    rows.append(row)
total = {"category": "total"}
for name, account in accounts.items():
    total |= {name: round(account.peak_bytes / MIB, 1), f"{name}, %": 100.0}
rows.append(total)
columns = {"category": "category"}
for name in accounts:
    columns |= {name: f"{name}, MiB", f"{name}, %": "%"}
caption = (
    "Live bytes at the peak of a baseline training step with AdamW in fp32, from shapes alone: ResNet-50 with 32 "
    "images of 224 x 224, and a language model of GPT-2's size with 8 x 512 tokens. Workspaces are not counted."
)
table = markdown_table(rows, columns, caption, "tab-breakdown")
path = write_text_atomic("results/tables/06_breakdown.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_breakdown.md
# ```
#
# The temporaries of the language model are two gradients of $T V$ elements, one with respect to the log-probabilities
# and one with respect to the logits. {doc}`04_language_model` measures them and shows how to reduce them.

# %%
account = accounts["language model"]
account.at(account.peak_index)["temporaries"], 2 * 4 * 4096 * GPT2.vocab_size + 4

# %% [markdown]
# (The 4 bytes are the tangent.) In a terminal, `ackpt plan resnet50 --batch-size 32` prints the same breakdown.
#
# Which parts of a model do the activations come from? Every node records the module that called it and the line of
# code. The three largest activations of each model:

# %%
for found in plans.values():
    for a in sorted(found.activations, key=lambda a: -a.bytes)[:3]:
        where = a.module or "the model itself"
        print(f"{a.bytes / MIB:3.0f} MiB  {a.name:13} {where:17} {Path(a.source).name}")

# %% tags=["hide-input"]
STEM = ("conv1", "bn1", "relu", "maxpool")


def part(module):
    first = module.split(".")[0]
    if first.startswith("layer") or first == "embedding":
        return first
    return "stem" if first in STEM else "12 blocks" if first == "blocks" else "head and loss"


rows = []
for name, g in large.items():
    found = graph_profile.by_part(g, costs[name], plans[name], part)
    kept, computed = (sum(row[what] for row in found.values()) for what in ("bytes", "flops"))
    for label, row in found.items():
        shares = {"kept": round(100 * row["bytes"] / kept, 1), "flops": round(100 * row["flops"] / computed, 1)}
        rows.append({"model": name, "part": label, "bytes": round(row["bytes"] / MIB, 1), **shares})
columns = {"model": "model", "part": "part", "bytes": "saved for backward, MiB"}
columns |= {"kept": "share of saved bytes, %", "flops": "share of forward FLOPs, %"}
caption = "Bytes that each part of the two models saves for backward, and its share of the FLOPs of the forward."
table = markdown_table(rows, columns, caption, "tab-parts")
path = write_text_atomic("results/tables/06_parts.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_parts.md
# ```
#
# ResNet-50 computes most in its third stage but saves most in its first, where the images are still large. The blocks
# of the language model are alike: each saves $T \, (10 d + 2 f + 3 h + 2)$ elements, the $A$ per token of
# {doc}`01_where_memory_goes`. The loss saves log-probabilities, which are as large as the logits.

# %%
d, f, h = GPT2.dim, GPT2.ff_dim, GPT2.heads
name = "language model"
found = graph_profile.by_part(
    large[name],
    costs[name],
    plans[name],
    lambda module: ".".join(module.split(".")[:2]),
)
kept = {row["bytes"] for label, row in found.items() if label.startswith("blocks.")}
4 * 4096 * (10 * d + 2 * f + 3 * h + 2), kept

# %% [markdown]
# Grouping by operation gives a different picture. FLOPs come from matrix products, convolutions and attention, but many
# of the saved bytes come from other operations:

# %%
for name, g in large.items():
    kept = collections.Counter()
    for s in plans[name].schedule.saved:
        i = g.storages[s].producer
        kind = "operations with FLOPs" if costs[name].flops[i] else g.nodes[i].target
        kept[kind] += g.storages[s].bytes
    print(name)
    for target, size in kept.most_common(5):
        print(f"    {size / plans[name].saved_bytes:4.0%} of the saved bytes: {target}")

# %% [markdown]
# All activations but those of the first line could be recomputed without a FLOP, if their sources are saved. Their
# recomputation still takes time, because it moves bytes. If every operation reached the rates of the data sheet,
# operations without FLOPs would take this share of the step:

# %%
for name, found in costs.items():
    moving = sum(t for t, flops in zip(found.seconds, found.flops) if not flops)
    share = moving / sum(found.seconds)
    print(f"{name}: {share:.0%} of the modelled time on an {found.device}, fp32")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Without checkpointing, the peak of both models comes where backward begins, and most of its dynamic bytes are
# activations. Saved bytes and running time are distributed differently over the operations, so a plan has to weigh
# both.
# :::

# %% [markdown]
# ## Names, places, shapes
#
# A planning tool has three parts: one profiles, one decides, one rewrites. If each part captures the model in its own
# form, each has to look up what the others found. What can serve as the key?
#
# **Names?** There are two common ways to capture the convolutional part of ResNet-18: `torch.fx.symbolic_trace`, which
# is convenient for rewriting, and AOTAutograd, which also captures backward.

# %%
resnet = models.resnet18()
trunk = nn.Sequential(collections.OrderedDict(list(resnet.named_children())[:-1]))
photos = torch.randn(2, 3, 32, 32)
symbolic, joint = symbolic_trace(trunk), ackpt.trace(trunk, photos)
by_symbol = {node.name: node for node in symbolic.graph.nodes if node.op != "output"}
by_joint = {node.name: node for node in joint.nodes}
shared = sorted(set(by_symbol) & set(by_joint))
print(f"{len(by_symbol)} and {len(by_joint)} names, shared: {', '.join(shared)}")

# %% [markdown]
# Most lookups by name find nothing. Those that succeed mostly find another operation. For each shared name, the left
# side shows the node of `symbolic_trace` and the node it reads; the right side shows the node of AOTAutograd and its
# module:


# %%
def values_of(graph):
    """The result of every node of a graph, without data, by its id."""
    nodes = graph.module.graph.nodes
    return {node.meta["ackpt_id"]: node.meta.get("val") for node in nodes}


_ = ShapeProp(symbolic).propagate(photos)
values = values_of(joint)
for name in shared:
    one, other = by_symbol[name], by_joint[name]
    left = f"{list(one.meta['tensor_meta'].shape)!s:15} of {one.args[0]!s:15}"
    print(f"{name:6} {left} and {list(values[other.id].shape)!s:15} of {other.module}")

# %% [markdown]
# In one graph `add` is the sum at the end of the first block; in the other it is the batch counter of a BatchNorm, 8
# bytes. Only one name of nine means the same in both. A program that falls back to 0, `by_name.get(name, 0)`, raises no
# error and plans with these bytes:

# %%
by_name = {name: values[by_joint[name].id].nbytes for name in shared}
true = sum(4 * node.meta["tensor_meta"].shape.numel() for node in by_symbol.values())
found = sum(by_name.get(name, 0) for name in by_symbol)
print(f"activations: {true:,} bytes, by name: {found:,} bytes")

# %% [markdown]
# **Positions?** The joint graph begins with the parameters and splits each BatchNorm into several operations. The first
# two convolutions are at these positions:

# %%
convolutions = [n.id for n in joint.nodes if n.target == "aten.convolution.default"]
[list(by_symbol).index(name) for name in ("conv1", "layer1_0_conv1")], convolutions[:2]

# %% [markdown]
# A rewrite also shifts all positions, because recomputed operations appear a second time.
#
# **Operations and shapes?** In a model of equal blocks they are rarely unique:

# %%
values, kinds = values_of(lm_graph), collections.Counter()
for node in lm_graph.nodes[: lm_graph.boundary]:
    if node.inputs and torch.is_tensor(values[node.id]):
        kinds[node.target, tuple(values[node.id].shape)] += 1
alone = sum(count == 1 for count in kinds.values())
print(f"{alone} of {sum(kinds.values())} results in the forward have a unique operation and shape")

# %% [markdown]
# **Addresses?** The allocator reuses freed memory, so several tensors have the same address during a step.
#
# **Tensors or storages?** Queries, keys and values are often views of one product. A plan that decides about each view
# separately, saves $k$ and frees $v$, counts the wrong bytes: saving one view keeps the whole storage live.

# %%
q, k, v = (2 * torch.randn(256, 768)).chunk(3, dim=1)
k.nbytes, k.untyped_storage().nbytes()

# %% [markdown]
# The storage with the most nodes in the graph of the language model:

# %%
widest = max(lm_graph.storages, key=lambda s: len(s.nodes))
print(f"storage {widest.id}, {widest.bytes:,} bytes")
for i in widest.nodes:
    shape = list(values[i].shape) if torch.is_tensor(values[i]) else "three tensors"
    print(f"    {i:3}  {lm_graph.nodes[i].name:12} {shape}")

# %% [markdown]
# These eight nodes have one fate. `ackpt` saves or frees storages; it does not save views, but rebuilds them from saved
# storages. A plan refers to a storage by the operation that allocates it, and a fate for a view is an error:

# %%
view = lm_graph.nodes[widest.nodes[-1]].name
try:
    ackpt.plan(lm_graph, policy="manual", fates={view: "recomputed"})
except ValueError as error:
    print(error)

# %% [markdown]
# ## One identity
#
# `ackpt` gives each operation an id once, when it captures the graph, and every copy of the node carries this id. Names
# are only for people. `lower` turns a set of saved storages into a *schedule*, an ordered list of steps: compute this
# node, free that storage. `rewrite` turns the schedule into two modules, forward and backward. If nothing is saved, the
# backward module recomputes all that it needs, under the original ids:

# %%
nothing_saved = lower(tiny_graph, ())
rewritten = rewrite(tiny_graph, nothing_saved)
for node in rewritten.backward.graph.nodes:
    i = node.meta.get("ackpt_id", boundary)
    if node.op == "call_function" and i < boundary:
        print(f"{i:2}  {node.name:18} was {nodes[i].name}")

# %% [markdown]
# Applying a plan to another graph must raise an error. Each graph therefore has a *hash* of its operations and their
# arguments, with all shapes, dtypes and devices. Other weights do not change the hash; another number of rows does:

# %%
plan = ackpt.plan(tiny_graph, policy="none")
weights, rows = ackpt.trace(Tiny(), x, labels), ackpt.trace(tiny, x[:2], labels[:2])
weights.hash == tiny_graph.hash, rows.hash == tiny_graph.hash

# %% [markdown]
# `ackpt.compile` can run a plan with another number of rows, but first simulates the schedule for that number. It
# refuses another dtype, and the simulator refuses any other graph:


# %%
def first_words(error):
    print(f"{type(error).__name__}: {str(error).split(' (')[0]} ...")


try:
    ackpt.compile(copy.deepcopy(tiny).double(), x.double(), labels, plan=plan)
except ackpt.graph.PlanError as error:
    first_words(error)
try:
    simulate(rows, ackpt.profile(rows), plan.schedule)
except ScheduleError as error:
    first_words(error)

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A planner needs one graph, one id for each operation and one fate for each storage. Lookups by name, position, shape
# or address can fail, and usually do so without an error.
# :::

# %% [markdown]
# ## Predicted peaks equal measured peaks
#
# All planning rests on one claim: the simulated peak is the measured peak. We check it for four cases and three
# policies. `none` is the baseline and saves all that backward needs. `full` is per-block checkpointing and saves single
# tensors between blocks. `manual` takes the fate of each operation from the caller, here from random choices. Each
# model is captured once. Each step is planned, rewritten, run and measured, and its gradients are compared with the
# baseline's.

# %%
ids = torch.randint(200, (4, 64))
bert_sizes = {"dim": 64, "ff_dim": 256, "heads": 4, "vocab_size": 200, "positions": 64}
bert = models.BertForMaskedLM(models.BertConfig(**bert_sizes, layers=1))
small = models.ResNetConfig("basic", (1, 1, 1, 1), width=8, num_classes=10)
pictures = (torch.randn(4, 3, 64, 64),), {"labels": torch.randint(10, (4,))}
cases = {
    "language model": (lm, *lm_call, torch.float32),
    "language model, autocast": (lm, *lm_call, torch.bfloat16),
    "BERT with dropout": (bert, (ids,), {"labels": ids}, torch.float32),
    "ResNet": (models.ResNet(small), *pictures, torch.float32),
}
policies = ("none", "full", "manual")
found = {
    (name, policy): row
    for name, (model, args, kwargs, dtype) in cases.items()
    for policy, row in graph_profile.compare(model, args, kwargs, policies, dtype=dtype).items()
}

# %% tags=["hide-input"]
rows = []
for (name, policy), row in found.items():
    sizes = {what: round(row[f"{what}_bytes"] / MIB, 2) for what in ("saved", "peak")}
    rows.append(
        {
            "model": name,
            "policy": policy,
            **sizes,
            "again": round(100 * row["recompute_ratio"], 1),
            "off": row["off_bytes"],
            "equal": "yes" if row["is_equal"] else "no",
        }
    )
columns = {"model": "model", "policy": "policy", "saved": "saved, MiB", "peak": "dynamic peak, MiB"}
columns |= {"again": "recomputed FLOPs, %", "off": "simulated - measured, bytes", "equal": "gradients bitwise equal"}
caption = (
    "Planned steps on the CPU. The dynamic peak follows from shapes and omits workspaces. The difference compares the "
    "allocator's peak with a simulation that includes measured workspaces."
)
table = markdown_table(rows, columns, caption, "tab-exact")
path = write_text_atomic("results/tables/06_exact.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_exact.md
# ```
#
# (The peaks in the table omit workspaces because those of convolutions depend on the processor. The difference includes
# the workspaces of this machine on both sides.)
#
# ## A plan is an order, not a set
#
# "Save these, recompute the others" sounds like a plan, but it does not say when to recompute. Take a chain of tanh
# operations: every activation has $S$ bytes, and the backward of a tanh reads its output. We save every $k$-th of $n$
# activations, with $n = 16$ and $k = 4$, and recompute the others in three orders:
#
# - **Early**: recompute all missing activations when backward begins. Then all $n$ are live, together with the first
#   gradient.
# - **Late**: recompute a segment of $k - 1$ activations when backward reaches it. At the first segment, $n / k - 1$
#   saved activations are still live, because the last one has already been used. Two gradients are live as well, the
#   one that a tanh's backward reads and the one that it computes.
# - **Again**: recompute one activation at a time, starting from the nearest saved one before it, and free the
#   intermediate ones. While backward uses a recomputed activation, no other one is live.
#
# In units of $S$, and without the loss and its gradient, the peaks are
#
# $$ \begin{aligned}
#    \text{peak}_\text{early} &= n + 1 \\
#    \text{peak}_\text{late} &= (n / k - 1) + (k - 1) + 2 \\
#    \text{peak}_\text{again} &= (n / k - 1) + 1 + 2
#    \end{aligned} $$
#
# For $n = 16$ and $k = 4$ these are 17, $n / k + k = 8$ and $n / k + 2 = 6$.
#
# `scheduled` takes the order of the backward operations and inserts the frees:


# %%
class Chain(nn.Module):
    def __init__(self, n, numbers):
        super().__init__()
        self.n, self.weight = n, nn.Parameter(torch.randn(numbers))

    def forward(self):
        a = self.weight
        for _ in range(self.n):
            a = a.tanh()
        return a.sum()


def activations(graph):
    """The storages of the tanh outputs of a chain, in order."""
    producers = ((s.id, graph.nodes[s.producer].target) for s in graph.storages)
    return [s for s, target in producers if target == "aten.tanh.default"]


# %%
n, k = 16, 4
chain = Chain(n, 2**18)
chain_graph = ackpt.trace(chain)
every_kth = activations(chain_graph)[k - 1 :: k]
late = lower(chain_graph, every_kth)


def computed(schedule, phase):
    ids = (step.id for step in schedule.backward if step.kind == "compute")
    return [i for i in ids if chain_graph.nodes[i].phase == phase]


first = computed(late, "forward")
early = scheduled(chain_graph, None, first + computed(late, "backward"))


# %%
def before(i, available):
    """The nodes that must run before `i`, in order, if only the nodes `available` are live."""
    found = []
    for source in chain_graph.nodes[i].inputs:
        if source not in {*available, *found}:
            found += [*before(source, {*available, *found}), source]
    return found


available = {chain_graph.storages[s].producer for s in every_kth}
available |= {node.id for node in chain_graph.nodes if not node.inputs}
order = []
for i in computed(late, "backward"):
    order += [*before(i, available), i]
    available.add(i)
again = scheduled(chain_graph, None, order)
early.saved, late.saved, again.saved

# %% [markdown]
# All three schedules save the same set. We simulate and run each of them:

# %%
S = chain.weight.nbytes
where = environment("cpu", SOURCE)
chain_profile = ackpt.profile(chain_graph, workspace="measured")
records = []
for name, schedule in {"early": early, "late": late, "again": again}.items():
    simulated = simulate(chain_graph, chain_profile, schedule).peak_bytes
    step = PlannedStep(chain, lambda graph: SimpleNamespace(schedule=schedule))
    real = measured(step, chain)
    again_ids = computed(schedule, "forward")
    runs = sum(chain_graph.nodes[i].target == "aten.tanh.default" for i in again_ids)
    metrics = real.to_json() | {"simulated_peak_bytes": simulated, "runs_again": runs}
    metrics["timeline"] = real.timeline.to_json()
    records.append(Record("orders", {"method": name, "n": n, "k": k}, metrics, where))
    path = records[-1].save(f"results/cpu/06_order_{name}.json")
    off = simulated - real.dynamic_peak_bytes
    print(f"{name:5}  {simulated / S:4.1f} S, off by {off} bytes, {runs} tanh recomputed")

# %% alt="Live memory of three training steps side by side. Early: memory rises in four steps through the forward, rises steeply to the peak when backward begins, and falls slowly. Late: four low teeth in backward, each lower than the one before. Again: more and still lower teeth."
figure = graph_profile.orders_plot(
    {record.config["method"]: Timeline.from_json(record.metrics["timeline"]) for record in records},
    f"The same saved activations in three orders: dynamic peaks of {n + 1}, {n // k + k} and {n // k + 2} MiB, plus 1 MiB",
    chain.weight.nbytes,
)
path = plots.save(figure, "results/figures/06_orders.png")
figure

# %% [markdown]
# The early order pays for all recomputation and gains nothing: its peak is the baseline's. The third order recomputes
# twice as much and has the lowest peak. It also shows why a rewriter cannot use names as keys. One operation runs three
# times, and each run needs its own name in the module:

# %%
names = collections.defaultdict(list)
for node in rewrite(chain_graph, again).backward.graph.nodes:
    if node.op == "call_function":
        names[node.meta["ackpt_id"]].append(node.name)
often = max(names, key=lambda i: len(names[i]))
in_the_trace = [node.name for node in chain_graph.nodes]
print(f"node {often}, {in_the_trace[often]} in the trace, runs as {names[often]}")
[name in in_the_trace for name in names[often]]

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# The saved set alone does not determine the peak: the order matters, too. Recompute late and free at once. If that is
# not enough, recompute more than once. A planner that chooses only sets leaves the peak to chance.
# :::

# %% [markdown]
# ## How a rewrite is proved
#
# A program writes the modules that run, and programs have bugs. Every rewrite is therefore proved before it runs: both
# modules run once on fake tensors. The proof derives shared storages and lifetimes from the modules, not from the
# schedule. After every operation, the live bytes must equal the simulated ones.
#
# To see the proof at work, we change an operation in the graph after planning. `t` is a view; `t_copy` computes the
# same values in a storage of its own. `relu_` computes the values of `relu` in place:


# %%
def tamper(operation, other):
    graph = ackpt.trace(tiny, x, labels)
    schedule = lower(graph, ())
    node = next(n for n in graph.module.graph.nodes if n.target is operation)
    node.target = other
    try:
        rewrite(graph, schedule)
        print(f"{operation} -> {other}: no objection")
    except RewriteError as error:
        print(f"{operation} -> {other}:\n    {str(error).split('. This')[0]}")


aten = torch.ops.aten
tamper(aten.t.default, aten.t_copy.default)
tamper(aten.relu.default, aten.relu_.default)

# %% [markdown]
# The proof covers only bytes. Wrong values in storages of the right size pass:

# %%
tamper(aten.relu.default, aten.sigmoid.default)

# %% [markdown]
# The values are tested, not proved: the last column of the table above compares gradients, and the package's tests run
# random programs with random fates.
#
# ## Random numbers, and what must not happen twice
#
# Two kinds of operations must not simply run a second time. Dropout would draw another mask, and BatchNorm in training
# updates its running statistics, which must happen once per step. The following model has both. Nothing is saved, and
# its backward recomputes these operations:

# %%
layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)
net = nn.Sequential(*layers)
net_graph = ackpt.trace(net, x)
schedule = lower(net_graph, ())
for node in rewrite(net_graph, schedule).backward.graph.nodes:
    if node.op == "call_function" and node.meta["ackpt_id"] < net_graph.boundary:
        i = node.meta["ackpt_id"]
        print(f"{i:2}  {net_graph.nodes[i].target:46} as {node.target.__name__}")

# %% [markdown]
# - A **random** operation is *replayed*: the forward saves the RNG state, and `run_again` restores it while the
#   operation runs. The saved state counts as memory:

# %%
print(f"replayed {schedule.replayed}, with {torch.get_rng_state().nbytes} bytes of state")

# %% [markdown]
# - **BatchNorm** is recomputed by `no_stats`, an operation that neither reads nor updates running statistics.
#
# We train for three steps with the plan and with PyTorch's checkpoint, and compare parameters and statistics bit for
# bit with the baseline's:


# %%
def train(way):
    model = copy.deepcopy(net)
    step, optimizer = way(model), torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        step(x).sum().backward()
        optimizer.step()
    return model.state_dict()


def as_planned(model):
    return PlannedStep(model, lambda graph: SimpleNamespace(schedule=lower(graph, ())))


# %%
def as_checkpointed(model):
    return partial(checkpoint, model, use_reentrant=False)


plain = train(lambda model: model)
for way in (as_planned, as_checkpointed):
    state = train(way)
    wrong = [name for name in plain if not torch.equal(plain[name], state[name])]
    batches = state["1.num_batches_tracked"]
    print(f"{way.__name__:15} {batches} batches, wrong: {', '.join(wrong) or 'nothing'}")

# %% [markdown]
# Some operations cannot be recomputed at all: those that change their arguments, and collectives, which all ranks must
# run equally often. `ackpt` refuses to recompute them with an error that names the operation. It never redraws random
# numbers, and it has no silent fallback.
#
# ## `full` compared with checkpoints around given blocks
#
# The simplest policy is the one of Part I, per-block checkpointing. `full` finds the blocks itself, at the points where
# a single tensor connects everything before with everything after. It should not need more memory than wrappers that
# are given the blocks.


# %%
def is_block(module):
    return isinstance(module, (models.Block, models.BertBlock))


def by_torch(model, *_, **how):
    for block in filter(is_block, model.modules()):
        block.forward = partial(checkpoint, block.forward, **how)
    return model


def by_blocks(model, *_):
    ackpt.apply_activation_checkpointing(model, is_block)
    return model


def by_full(model, args, kwargs):
    return ackpt.compile(model, *args, policy="full", **kwargs)


# %%
deep = models.TransformerConfig(**lm_sizes, layers=3)
deep_bert = models.BertConfig(**bert_sizes, layers=3)
deep_cases = {
    "language model": (models.LanguageModel(deep), *lm_call),
    "BERT": (models.BertForMaskedLM(deep_bert), (ids,), {"labels": ids}),
}
ways = {
    "baseline": lambda model, *_: model,
    "torch, use_reentrant=True": partial(by_torch, use_reentrant=True),
    "torch, use_reentrant=False": partial(by_torch, use_reentrant=False),
    "ackpt.checkpoint": by_blocks,
    "ackpt.compile, full": by_full,
}
steps = {}
for name, (model, args, kwargs) in deep_cases.items():
    for way, wrap in ways.items():
        module = copy.deepcopy(model)
        steps[name, way] = measured(wrap(module, args, kwargs), module, *args, **kwargs)

# %% tags=["hide-input"]
rows = []
for way in ways:
    row = {"method": way}
    for name in deep_cases:
        step, base = steps[name, way], steps[name, "baseline"]
        row[name] = round(step.dynamic_peak_bytes / MIB, 2)
        row[f"{name} again"] = round(100 * (step.flops / base.flops - 1), 1)
    rows.append(row)
columns = {"method": "method"}
for name in deep_cases:
    columns |= {name: f"{name}: dynamic peak, MiB", f"{name} again": "recomputed FLOPs, %"}
caption = "Measured peaks and recomputed FLOPs of models with three blocks, checkpointed in four ways, on the CPU."
table = markdown_table(rows, columns, caption, "tab-full")
path = write_text_atomic("results/tables/06_full.md", table)

# %% [markdown]
# ```{include} ../../results/tables/06_full.md
# ```
#
# Why do the methods recompute different numbers of FLOPs? The backward of a block does not read the block's output, so
# the last product need not be recomputed: in the language model this is the down-projection, $2 \, T d f$ FLOPs per
# block. (BERT's blocks end in a norm, whose backward does read it.) PyTorch's non-reentrant checkpoint also stops
# before this product. The reentrant ones recompute whole blocks, including attention:
# $2 \, T \, (4 d^2 + 2 d f) + 4 \, T^2 d$ FLOPs each.

# %%
T, d, f, L = len(tokens), deep.dim, deep.ff_dim, deep.layers
block = 2 * T * (4 * d * d + 2 * d * f) + 4 * T * T * d
base = steps["language model", "baseline"].flops
for way, by_hand in {
    "torch, use_reentrant=True": L * block,
    "torch, use_reentrant=False": L * (block - 2 * T * d * f),
}.items():
    print(f"{way}: {steps['language model', way].flops - base - by_hand} FLOPs off")

# %% [markdown]
# `full` goes further. It also saves the activations that backward reads first, as long as that does not raise the peak.
# And it cuts inside blocks, because a single tensor also connects attention and MLP. BERT gains more from this cut: its
# attention saves whole matrices of weights and dropout masks, which then need not be live together with the activations
# of the MLP.
#
# :::{admonition} Takeaway
# :class: tip
# A planner that sees operations can free what a module wrapper must save, save what a wrapper must free, and predict
# the memory in either case.
# :::

# %% [markdown]
# The environment of the measurements on this page:

# %% tags=["measured-time", "nbval-ignore-output"]
where

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
# next weight. With ReLU, one storage serves both purposes.
#
# :::{admonition} Exercise 2: the best distance
# :class: note
# Which $k$ gives the lowest peak in the late order for $n = 64$, and what is this peak? Derive both, then simulate the
# divisors of 64.
# :::

# %% tags=["solution"]
long_graph = ackpt.trace(Chain(64, 2**10))
long_profile = ackpt.profile(long_graph, workspace="measured")
for distance in (2, 4, 8, 16, 32):
    schedule = lower(long_graph, activations(long_graph)[distance - 1 :: distance])
    peak = simulate(long_graph, long_profile, schedule).peak_bytes // 2**12
    print(f"k = {distance:2}: {peak} S, n / k + k = {64 // distance + distance}")

# %% [markdown]
# $n / k + k$ is lowest at $k = \sqrt n$, where it is $2 \sqrt n$: the square root of Chen et al. 2016. Here the peak is
# 16 activations; the baseline's is 65.
#
# :::{admonition} Exercise 3: a policy of your own
# :class: note
# Write a policy that recomputes no FLOPs: save the outputs of matrix products and attention, and recompute the rest. By
# how much does it lower the dynamic peak of the two-block language model, and what does it recompute?
# :::


# %% tags=["solution"]
def save_products(graph):
    flops = ackpt.profile(graph).flops[: graph.boundary]
    products = {i for i, computed in enumerate(flops) if computed}
    saved = [s.id for s in graph.storages if s.producer in products]
    return SimpleNamespace(schedule=lower(graph, saved))


step = PlannedStep(lm, save_products)
step.prepare(*lm_call[0], **lm_call[1])
frugal = measured(step, lm, *lm_call[0], **lm_call[1])
share = frugal.dynamic_peak_bytes / lm_step.dynamic_peak_bytes
print(f"{share:.2f} of the baseline's peak, {frugal.flops - lm_step.flops} recomputed FLOPs")
again = collections.Counter()
for again_id in [one.id for one in save_products(lm_graph).schedule.backward if one.kind == "compute"]:
    node = lm_graph.nodes[again_id]
    allocates = any(lm_graph.storages[key].producer == node.id for key in node.storages)
    if node.phase == "forward" and allocates:  # views allocate nothing
        again[node.target.split(".")[1]] += 1
print(", ".join(f"{count} {name}" for name, count in again.most_common()))

# %% [markdown]
# The policy saves more than a third of the peak without recomputing a FLOP. It still costs time, because the recomputed
# operations move bytes. This is *selective* checkpointing.
#
# ## What we have seen
#
# - A training step is one graph. Memory is saved and freed per storage, and three accesses determine how long each
#   storage is live.
# - $m_i = m_{i-1} + b_i - r_i$ gives the peak of a step. The allocator agrees to the byte, for the baseline and for
#   rewritten steps.
# - The baseline's peak comes where backward begins. ResNet-50 saves most in its first stages, a language model in its
#   equal blocks and in the loss.
# - Names, positions, shapes and addresses do not identify an operation. An id on the node and a hash of the graph do.
# - A plan is an order: one set of saved activations has three peaks in three orders.
# - Every rewrite is proved on fake tensors before it runs. Random operations are replayed, and statistics are updated
#   once.
#
# ## Sources
#
# - {cite:t}`williams2009`: the roofline model, an operation's time from the rates of a device.
# - {cite:t}`he2015residual`: ResNet-50.
