# %% [markdown]
# # One rank of a sharded model
#
# **How much memory does each GPU need for a sharded model, and at what cost does the model fit?**

# %% [markdown]
# ```{figure} ../../results/figures/10_at_the_peak.png
# :alt: Stacked bars of the memory at the peak of one rank of Llama 3 70B on 64 GPUs. The baseline is far above 200 GiB, nearly all of it activations. Per-block checkpointing needs half of the budget, a dashed line at 80 GiB; the plan is just below it. All other layers are equal.
# :class: dark-light
# :name: fig-llama-peak
#
# Simulated, not measured: memory at the peak of one rank of Llama 3 70B on 64 GPUs, with three methods.
# ```
#
# More GPUs divide parameters, gradients and optimizer state, but not the activations of a rank's own batch: those need
# a plan. A *rank* is a process with its GPU; each has its own batch, so activations are not sharded here.

# %% tags=["hide-input"]
import warnings

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ackpt.planner.sharding.planner import CAPTURED
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import GroupBytes, Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest
from experiments import sharded_llama
from experiments.reports import plots, schematics
from experiments.reports.figures import stacked_plot
from experiments.results import markdown_table, write_text_atomic
from experiments.sharded_check import check
from experiments.widgets.gather_lanes import gather_lanes

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that transformers does not show
torch.set_num_threads(2)
GIB = 2**30

# %% [markdown]
# ## What a rank stores
#
# In mixed precision with AdamW, a step needs 16 bytes per parameter. But a rank needs a parameter only while its block
# runs. Fully sharded training ({cite}`rajbhandari2020`; {cite}`zhao2023fsdp`) stores $1/N$ of each tensor on each of
# $N$ ranks. For $P$ parameters with $e_\text{shard} = 4$ bytes per element, a rank stores
#
# $$ \underbrace{e_\text{shard} P / N}_\text{parameters} + \underbrace{e_\text{shard} P / N}_\text{gradients} +
#    \underbrace{2 e_\text{shard} P / N}_\text{AdamW} \;=\; 16 P / N \text{ bytes.} $$
#
# In PyTorch this is FSDP2. Every process runs the same lines; here a single process is the only rank, so its shards are
# whole tensors:

# %%
distributed.init_process_group(
    "gloo", store=distributed.HashStore(), rank=0, world_size=1
)
options = {"dim_feedforward": 128, "dropout": 0.0, "batch_first": True}
model = nn.Sequential(
    *(nn.TransformerEncoderLayer(64, 4, **options) for _ in range(3)),
    nn.LayerNorm(64),
)

mixed = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
for block in model[:3]:  # one group of parameters per block
    fully_shard(block, mp_policy=mixed)
# the root: all parameters outside the blocks
fully_shard(
    model, mp_policy=mixed
)
optimizer = torch.optim.AdamW(model.parameters())

loss = model(torch.randn(4, 16, 64)).float().square().mean()
loss.backward()
optimizer.step()
parameter = next(model.parameters())
print(type(parameter).__name__, parameter.to_local().shape, parameter.dtype)
distributed.destroy_process_group()

# %% [markdown]
# `fully_shard` divides the parameters into groups: one for each block, and one, the *root*, for the embedding, the last
# norm and the head. Our models are Llama 3 in its published sizes ({cite}`grattafiori2024`), on the meta device, where
# tensors have shapes but no data:

# %%
large = {size: sharded_llama.llama(size) for size in ("8B", "70B")}
for size, model in large.items():
    root, block = (
        sum(torch.Size(w.shape).numel() for w in group.weights)
        for group in model.groups[:2]
    )
    print(
        f"{size:>3}: {model.step.parameters:,} = "
        f"{model.stands_for} x {block:,} + {root:,}"
    )

# %% [markdown]
# ## What a rank allocates temporarily
#
# A rank cannot compute with $1/N$ of a block. So FSDP2 gathers the parameters of each block when it runs, and reduces
# its gradients afterwards. When does a rank have the parameters of two blocks at once?

# %% tags=["hide-input"] alt="Bars over the allocations and frees of one step. The top row shows the forward, and after a dashed line the backward of the loss, then three times a recomputation and a backward. The parameters of the root are gathered for the whole step. Those of blocks 1, 2 and 3 are gathered one after another in the forward, and in reverse order in backward, each for the recomputation and the backward of its block. The buffer of a block's gather is allocated just before its forward, but one block early in backward. The buffer of a block's reduction follows its backward and stays until the next reduction. Below, live memory: gathered parameters have the same height in forward and backward, and the buffers of reductions, in backward only, are the largest."
figure = schematics.gathers_figure(gather_lanes())
path = plots.save(figure, "results/figures/10_gathers.png")
figure

# %% [markdown]
# *One step of a Llama with three checkpointed blocks, as predicted for one rank. During a block's backward, the block
# that follows in backward is already being gathered, and the gradients of the previous one are being reduced.*
#
# 1. *Before a block's forward*, an all-gather fills a buffer of $e_\text{compute} P_\text{block}$ bytes. The parameters
#    are copied out of it, into as many bytes again. The buffer stays allocated until the next gather completes.
# 2. *Before its backward*, the parameters are gathered again. Each gather starts one block early.
# 3. *After its backward*, the gradients are copied into a buffer of $e_\text{reduce} P_\text{block}$ bytes for the
#    reduce-scatter, which returns one shard. That buffer stays allocated until the next reduction.
# 4. *The root* is gathered first, stays gathered for the whole step, and is reduced last.
#
# None of these sizes depends on the batch, and they hardly depend on $N$. Their sum is a floor that no number of GPUs
# lowers:

# %% alt="Two stacked bars, for Llama 3 8B and 70B. The parts are the root, one block, the buffer of the next block's gather, and the buffer of a reduction, which is twice as high as a block. The root is more than half of the bar for 8B, and more than a third for 70B."
groups = {
    size: [
        GroupBytes(group, sharded_llama.mixed(64))
        for group in model.groups[:2]
    ]
    for size, model in large.items()
}
floor = {
    "root, gathered": [root.unsharded for root, _ in groups.values()],
    "one block, gathered": [
        block.unsharded for _, block in groups.values()
    ],
    "gather of the next block": [
        block.gather for _, block in groups.values()
    ],
    "reduction of the previous block": [
        block.reduce for _, block in groups.values()
    ],
}
colors = {
    name: plots.COLORS[color]
    for name, color in zip(
        floor, ("optimizer", "parameters", "buffers", "temporaries")
    )
}
figure = stacked_plot(
    [*groups], floor, "", ylabel="temporary memory of a rank", colors=colors
)
path = plots.save(figure, "results/figures/10_floor.png")
figure

# %% [markdown]
# *The floor of a rank of Llama 3: the root plus four times the bytes of a block in bf16. Reductions are in float32 here,
# so their buffer is as large as two blocks.*
#
# ## A real sharded step, measured
#
# We run FSDP2 in two processes on this machine, which communicate over gloo: a Llama of three small blocks, as the
# baseline, with every block in torch's `checkpoint_wrapper`, and with `ackpt.apply_budget` after `fully_shard`, for two
# budgets. Each process measures its own step. The prediction takes the captured graph, as in
# {doc}`07_graph_profiler`, and inserts the events listed above.

# %% tags=["hide-input"]
tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
tiny |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64}
request = StepRequest("hf:LlamaConfig", 4, 64, None, tiny)
checked = check(request, Sharding(2, gloo=True), ("none", "full", 0.8, 0.65))
for found in checked:
    assert set(found.measured_bytes) == {found.predicted_bytes}
    assert set(found.resident_bytes) == {found.predicted_resident_bytes}
rows = [
    {
        "method": {"none": "baseline", "full": "per-block"}.get(found.method, found.method),
        "resident": f"{found.resident_bytes[0]:,}",
        "predicted_resident": f"{found.predicted_resident_bytes:,}",
        "first": f"{found.measured_bytes[0]:,}",
        "second": f"{found.measured_bytes[1]:,}",
        "predicted": f"{found.predicted_bytes:,}",
    }
    for found in checked
]
columns = {"method": "step", "resident": "resident, measured", "predicted_resident": "resident, predicted"}
columns |= {"first": "dynamic peak, rank 0", "second": "dynamic peak, rank 1", "predicted": "dynamic peak, predicted"}
caption = "A small Llama sharded over two processes on the CPU: bytes measured on each rank, and predicted bytes."
table = markdown_table(rows, columns, caption, "tab-sharded-check")
path = write_text_atomic("results/tables/10_check.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_check.md
# ```
#
# Prediction and measurement agree to the byte, on both ranks, also for plans. gloo makes copies that NCCL does not make; the prediction
# counts them here (`gloo=True`) and nowhere below.
#
# ## A plan per block
#
# A plan must not recompute an operation while the parameters of its block are sharded: that would need a third gather.
# So each block recomputes only in its own backward. Equal blocks have equal steps, so `ackpt` captures only four of
# them. To check that four blocks predict six, we capture all six:

# %%
names = {"none": "baseline", "full": "per-block", "auto": "plan"}
deep = ShardedModel(
    PlanConfig(
        StepRequest(
            "hf:LlamaConfig", 4, 64, None, tiny | {"num_hidden_layers": 6}
        )
    )
)
plans = {
    policy: deep.plan(Sharding(4), policy=policy)
    for policy in ("none", "full")
}
plans["auto"] = deep.plan(Sharding(4), budget=plans["full"].peak_bytes)

# %%
whole = ShardedModel(deep.config, whole=True)
for policy, plan in plans.items():
    budget = plans["full"].peak_bytes if policy == "auto" else None
    found = whole.plan(Sharding(4), budget, policy)
    same = found.timeline == plan.timeline and found.runs == plan.runs
    peaks = (
        f"from {CAPTURED} blocks: {plan.peak_bytes:,}, "
        f"from 6: {found.peak_bytes:,}"
    )
    print(f"{names[policy]:9}  {peaks}, same events: {same}")

# %% [markdown]
# The choices for one block are those of {doc}`13_rotor`: useful sets of activations to save. The first blocks get one
# choice and the rest another; the plan is the cheapest such combination within the budget. On the command line, for
# Llama 3 70B on 64 GPUs:
#
# ```bash
# ackpt plan hf:LlamaConfig --set hidden_size=8192 intermediate_size=28672 num_hidden_layers=80 \
#   num_attention_heads=64 num_key_value_heads=8 vocab_size=128256 max_position_embeddings=8192 \
#   --seq-len 8192 --dtype bfloat16 --shard-dtype float32 --reduce-dtype float32 \
#   --device-profile h100-80g --fsdp 64 --budget 80GiB
# ```
#
# ## Llama 3, simulated
#
# :::{admonition} Simulated, not measured
# :class: warning
# Nothing in this appendix ran on a GPU. The prediction assumes the kernels of an H100. It leaves out the CUDA context,
# NCCL's own memory, workspaces and fragmentation. Leave room for these: a GPU of 80 GB has less than 80 GiB.
# :::
#
# Each rank trains on one sequence of 8,192 tokens with AdamW, with shards and reductions in float32 and computation in
# bf16.

# %% tags=["hide-input"]
BUDGET = "80GiB"
rows = {
    size: [sharded_llama.rank_row(large[size], ranks, BUDGET) for ranks in numbers]
    for size, numbers in {"8B": (8,), "70B": (16, 32, 512)}.items()
}
columns = {"size": "model, ranks", "resident": "12 P / N, GiB", "baseline": "baseline: peak, GiB"}
columns |= {"full": "per-block: peak, GiB", "auto": "plan: peak, GiB", "auto_flops": "plan: recomputed FLOPs, %"}
table = markdown_table(
    [row | {"size": f"{size}, {row['ranks']}"} for size, own in rows.items() for row in own],
    columns,
    "Llama 3: the step of one rank with 8,192 tokens; plans within 80 GiB. Simulated, not measured.",
    "tab-sharded-llama",
)
path = write_text_atomic("results/tables/10_llama.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_llama.md
# ```
#
# On 8 GPUs, the baseline of 8B is within 80 GiB. That of 70B fits on no number of GPUs: activations are not sharded.
# With per-block checkpointing, 70B fits on 32 GPUs, but a quarter of the FLOPs are recomputed however much memory
# remains unused. A plan recomputes only as much as the budget requires, here on 64 GPUs:

# %%
plan = large["70B"].plan(sharded_llama.mixed(64), BUDGET)
for run in plan.runs:
    print(f"{run.count} blocks save {run.kept_bytes / GIB:.2f} GiB each:")
    print(*(f"  {name}" for name in dict.fromkeys(run.names)), sep="\n")

# %%
at_64 = {"baseline": "none", "per-block": "full"}
chosen = {
    name: large["70B"].plan(sharded_llama.mixed(64), policy=policy)
    for name, policy in at_64.items()
}
chosen["plan"] = plan
parts = [sharded_llama.layers(each) for each in chosen.values()]
shown = {name: [part[name] for part in parts] for name in parts[0]}
path = plots.save(
    stacked_plot([*chosen], shown, "", limit=80 * GIB),
    "results/figures/10_at_the_peak.png",
)
for name in ("per-block", "plan"):
    print(
        f"{name:9} recomputes "
        f"{sharded_llama.again(chosen[name]):4.1f} % of the FLOPs"
    )

# %% [markdown]
# {ref}`The figure at the top <fig-llama-peak>` shows the memory at the peak.
#
# :::{admonition} Takeaway
# :class: tip
# Sharding and checkpointing reduce different parts of the memory. More GPUs divide the resident memory; a plan reduces
# the activations of a rank's own batch.
# :::
#
# ## Communication volume
#
# Every block is gathered twice and the root once, and all gradients are reduced once. Each rank has $1/N$ of every
# tensor already, so with $L$ blocks
#
# $$ \text{received} = \frac{N - 1}{N} \, e_\text{compute} \, (2 L P_\text{block} + P_\text{root}), \qquad
#    \text{sent} = \frac{N - 1}{N} \, e_\text{reduce} \, P . $$

# %%
ranks, model = 64, large["70B"]
root, block = (
    sum(torch.Size(w.shape).numel() for w in group.weights)
    for group in model.groups[:2]
)
by_hand = (ranks - 1) * 2 * (2 * model.stands_for * block + root) // ranks
links = plan.communication
print(
    f"{links.gathers} gathers receive "
    f"{links.gathered_bytes:,} bytes, by hand {by_hand:,}"
)
print(f"{links.reduces} reductions send {links.reduced_bytes:,} bytes")

# %% [markdown]
# Recomputation adds no communication, because it runs while the block is gathered.
#
# ## Running it
#
# {doc}`../guides/fsdp2` has the lines to write: `ackpt.apply_budget` after `fully_shard` plans every rank, as in the table
# above. {doc}`11_predictions` compares predictions of a rank with published peaks of GPUs.
#
# ## Exercises
#
# :::{admonition} Exercise 1: the floor
# :class: note
# How much memory does a rank of Llama 3 8B need in the limit of many GPUs, with per-block checkpointing? What is
# largest? `large["8B"].plan(sharded_llama.mixed(8192), policy="full")` plans for 8,192 ranks, and
# `sharded_llama.layers` lists the parts of a plan's peak; both come with `from experiments import sharded_llama`.
# :::

# %% tags=["solution"]
many = large["8B"].plan(sharded_llama.mixed(8192), policy="full")
for name, part in sharded_llama.layers(many).items():
    print(f"{name:22} {part / GIB:5.2f} GiB")
print(f"{'total':22} {many.peak_bytes / GIB:5.2f} GiB")
logits = 8192 * 128256 / GIB
print(f"{'logits in bf16':22} {2 * logits:5.2f} GiB, in float32 {4 * logits:.2f} GiB")

# %% [markdown]
# Most of it is the loss: three tensors with one float32 element per logit are live. A loss in chunks avoids them
# ({doc}`04_logits`).
#
# :::{admonition} Exercise 2: reduction in bf16
# :class: note
# On paper: reduce the gradients of 70B in bf16 instead of float32. How much smaller is a rank's reduction buffer of one
# block (855,654,400 parameters), and how many fewer bytes does a rank of 64 send?
# :::

# %% tags=["solution"]
for reduction in (torch.float32, torch.bfloat16):
    sizes = GroupBytes(large["70B"].groups[1], Sharding(64, torch.float32, reduction))
    sent = large["70B"].plan(Sharding(64, torch.float32, reduction)).communication.reduced_bytes
    print(f"{reduction}: buffer {sizes.reduce / GIB:.2f} GiB, sent {sent / GIB:.0f} GiB")

# %% [markdown]
# Both halve, but the sum over $N$ ranks is less precise.
#
# ## Summary
#
# You can now say what a rank stores, what it gathers, and which part of it a plan can reduce.
