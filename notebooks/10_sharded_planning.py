# %% [markdown]
# # Beyond one machine
#
# **How much memory does each GPU need for a sharded model, and at what cost does the model fit?**

# %% [markdown]
# ```{figure} ../../results/figures/10_at_the_peak.png
# :alt: Stacked bars of the memory at the peak of one rank of Llama 3 70B on 64 GPUs. The baseline is far above 200 GiB, nearly all of it activations. With per-block checkpointing, the activations are a small part of that and still the largest layer, and the peak is half of the budget. The plan is in between, just below a dashed line, the budget of 80 GiB. The layers of shards, optimizer state, gathered parameters and temporaries are equal in all three.
# :class: dark-light
#
# Simulated memory at the peak of one rank of Llama 3 70B on 64 GPUs, with three methods.
# ```
#
# After this appendix you can say how much memory one GPU of many needs for a step of a Llama with 70 billion
# parameters, which plan fits and at what cost, and which of these figures were measured and which were simulated.
#
# :::{admonition} Symbols of this appendix
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $N$ | ranks: processes, each with one GPU, over which a model is sharded |
# | $P$, $P_b$, $P_0$ | parameters of the model, of one block, and of the *root*: all parameters outside the blocks |
# | $L$ | blocks |
# | $c$, $s$, $r$ | bytes per element in computation and all-gathers, in the shards, and in reductions |
# :::
#
# Each rank has its own batch. This appendix does not shard activations.

# %%
import warnings

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ackpt.metering import plots
from ackpt.planner.sharding.planner import CAPTURED, ShardedModel
from ackpt.planner.sharding.sharding import GroupBytes, Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest
from experiments import sharded_llama
from experiments.graph_profile import orders_plot
from experiments.reports import schematics
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
# In the chapters, one machine held all parameters, gradients and optimizer state. In mixed precision with AdamW
# these need 16 bytes per parameter, so those of more than about five billion parameters do not fit on one GPU of 80
# GiB. But a rank needs a parameter only while its block runs. Fully sharded training (Rajbhandari et al. 2020,
# {cite}`rajbhandari2020`; Zhao et al. 2023, {cite}`zhao2023fsdp`) stores $1/N$ of each tensor on each rank:
#
# $$ \underbrace{s P / N}_\text{parameters} + \underbrace{s P / N}_\text{gradients} + \underbrace{2 s P / N}_\text{AdamW}
#    \;=\; 16 P / N \text{ bytes for } s = 4 . $$
#
# In PyTorch this is FSDP2. Every process runs the same lines; here a single process is the only rank, so its shards are
# whole tensors:

# %%
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
options = {"dim_feedforward": 128, "dropout": 0.0, "batch_first": True}
model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, **options) for _ in range(3)), nn.LayerNorm(64))

mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model[:3]:  # one group of parameters per block
    fully_shard(block, mp_policy=mixed)
fully_shard(model, mp_policy=mixed)  # the root: all parameters outside the blocks
optimizer = torch.optim.AdamW(model.parameters())

loss = model(torch.randn(4, 16, 64)).float().square().mean()
loss.backward()
optimizer.step()
parameter = next(model.parameters())
print(type(parameter).__name__, parameter.to_local().shape, parameter.dtype)
distributed.destroy_process_group()

# %% [markdown]
# `fully_shard` on each block and then on the model divides the parameters into groups: one for each block, and one, the
# *root*, for the embedding, the last norm and the head. For per-block checkpointing, every block is wrapped in
# `checkpoint_wrapper` before it is sharded.
#
# Our models are Llama 3 in its published sizes (Grattafiori et al. 2024, {cite}`grattafiori2024`), on the meta device,
# where tensors have shapes but no data.

# %%
large = {size: sharded_llama.llama(size) for size in ("8B", "70B")}
for size, model in large.items():
    root, block = (sum(torch.Size(w.shape).numel() for w in group.weights) for group in model.groups[:2])
    print(f"{size:>3}: {model.step.parameters:,} = {model.stands_for} x {block:,} + {root:,}")

# %% [markdown]
# FSDP2 splits a tensor along its first dimension and pads it, so that all shards have the same size. If $N$ does not
# divide that dimension, the padding costs a few bytes.
#
# ## What a rank allocates temporarily
#
# A rank cannot compute with $1/N$ of a block. So FSDP2 adds allocations of its own to those of the step; the code is in
# torch, in `_fully_shard/_fsdp_param_group.py`:
#
# 1. *Before a block's forward*, an all-gather fills a buffer of $c P_b$ bytes. The parameters are copied out of it,
#    which takes another $c P_b$ bytes. The buffer stays allocated until the next block's gather completes. After the
#    block's forward, its parameters are freed.
# 2. *Before its backward*, the parameters are gathered again. Each gather starts one block early, so two blocks are in
#    memory at a time: one as parameters, the next as a buffer.
# 3. *After its backward*, the parameters are freed. The gradients, $c P_b$ bytes, are copied into a buffer of $r P_b$
#    bytes for the reduce-scatter, which returns one shard. That buffer stays allocated until the next reduction.
# 4. *The root* is gathered first, stays gathered for the whole step, and is reduced last. Until then its gradients stay
#    unreduced.
#
# The figure shows these events for a Llama with three checkpointed blocks, as predicted for one rank. When does a rank
# have the parameters of two blocks at once?

# %% tags=["hide-input"] alt="Bars over the allocations and frees of one step. The top row shows the forward, and after a dashed line the backward of the loss, then three times a recomputation and a backward. The parameters of the root are gathered for the whole step. Those of blocks 1, 2 and 3 are gathered one after another in the forward, and in reverse order in backward, each for the recomputation and the backward of its block. The buffer of a block's gather is allocated just before its forward, but one block early in backward. Below, live memory: gathered parameters have the same height in forward and backward, and buffers of collectives are largest in backward."
figure = schematics.gathers_figure(gather_lanes())
path = plots.save(figure, "results/figures/10_gathers.png")
figure

# %% [markdown]
# *A block's parameters are gathered for its forward, and again for its recomputation and backward. During a block's
# backward, the next block is already being gathered, so two blocks occupy memory: one as parameters, one as a buffer.*
#
# None of these sizes depends on the batch, and they hardly depend on $N$. For Llama 3, in GiB:

# %%
for size, model in large.items():
    root, block = (GroupBytes(group, sharded_llama.mixed(64)) for group in model.groups[:2])
    in_backward = block.unsharded + block.gather + block.reduce
    parts = {"root": root.unsharded, "block": block.unsharded, "next": block.gather, "reduction": block.reduce}
    print(size, {name: round(part / GIB, 2) for name, part in parts.items()}, f"{in_backward / GIB:.2f} without root")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Sharding divides the resident memory by $N$, but not the temporary memory: the root, one block, the gather buffer of
# the next block, and a reduction buffer. The reduction is in float32 here, so its buffer is as large as two blocks in
# bf16. The floor is therefore the root plus four times the bytes of a block, and no number of GPUs lowers it.
# :::
#
# ## A real sharded step, measured
#
# Does FSDP2 behave like this? We run it in two processes on this machine, which communicate over gloo. The model is a
# Llama of three small blocks, once as the baseline and once with every block in torch's `checkpoint_wrapper`. Each
# process measures its own step with `ackpt.measure`. The prediction needs only shapes: it takes the captured graph, as
# in {doc}`07_graph_profiler`, and inserts the events listed above.

# %% tags=["hide-input"]
tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
tiny |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64}
request = StepRequest("hf:LlamaConfig", 4, 64, None, tiny)
checked = check(request, Sharding(2, gloo=True))
for found in checked:
    assert set(found.measured_bytes) == {found.predicted_bytes}
    assert set(found.resident_bytes) == {found.predicted_resident_bytes}
rows = [
    {
        "method": {"none": "baseline", "full": "per-block checkpointing"}[found.method],
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
# Prediction and measurement agree to the byte, on both ranks. Three details matter for that:
#
# - *gloo makes copies.* It gathers into memory of its own and reduces a copy; each is as large as the buffer. NCCL does
#   neither, so the prediction counts these copies here (`gloo=True`) and nowhere below. gloo's own threads free some of
#   them at an unpredictable moment, so each process reports the lowest peak of several steps.
# - *Autograd frees saved tensors per function.* What a backward function reads is freed when the whole function is
#   done, not after each of its operations. The prediction treats eager blocks in the same way.
# - *A checkpointed block saves its arguments.* One of them is `position_ids`, 8 bytes per position, which the block
#   never reads.
#
# With the same events, we predict the step of a deeper model. In the figure, *buffers* are the gathered parameters and
# the buffers of the collectives:

# %%
deep = ShardedModel(PlanConfig(StepRequest("hf:LlamaConfig", 4, 64, None, tiny | {"num_hidden_layers": 6})))
plans = {policy: deep.plan(Sharding(4), policy=policy) for policy in ("none", "full")}
plans["auto"] = deep.plan(Sharding(4), budget=plans["full"].peak_bytes)

# %% tags=["hide-input"] alt="Live memory of one rank in three steps side by side. Baseline: activations rise in a steep ramp in the forward and fall in backward. Per block: a nearly flat forward, then six nearly equal teeth in backward. Plan: the same height, with a low ramp in the forward and slightly smaller teeth. In all three, the buffers are a band of equal height that dips between blocks."
names = {"none": "baseline", "full": "per block", "auto": "plan"}
timelines = {names[policy]: sharded_llama.drawn(plan.timeline) for policy, plan in plans.items()}
figure = orders_plot(timelines, "", plans["none"].resident_bytes)
path = plots.save(figure, "results/figures/10_timelines.png")
for policy, plan in plans.items():
    print(f"{names[policy]:9} recomputes {sharded_llama.again(plan):4.1f} % of the FLOPs")
figure

# %% [markdown]
# *Predicted live memory of one rank. The plan has the peak of per-block checkpointing as its budget, and recomputes
# less.*
#
# ## A plan per block
#
# A plan must not recompute an operation while the parameters of its block are sharded: that would need a third gather.
# So each block has its own plan, and recomputes only in its own backward, for which FSDP2 gathers the parameters
# anyway. The step is then a sequence of *windows*: the root, one block after another, and back again. Equal blocks
# behave alike, so `ackpt` captures only four of them: the first, the last, and two in between, whose windows must agree
# event by event. To check that four blocks predict six, we capture all six:

# %%
whole = ShardedModel(deep.config, whole=True)
for policy, plan in plans.items():
    budget = plans["full"].peak_bytes if policy == "auto" else None
    found = whole.plan(Sharding(4), budget, policy)
    same = found.timeline == plan.timeline and found.runs == plan.runs
    peaks = f"from {CAPTURED} blocks: {plan.peak_bytes:,}   from all 6: {found.peak_bytes:,}"
    print(f"{policy:4}  {peaks}   every event equal: {same}")

# %% [markdown]
# The choices for one block are those of {doc}`13_rotor`: useful sets of activations to save, from all to none. The
# first blocks get one choice and the rest another. The last blocks save more, because backward reads them first. The
# plan is the cheapest such combination within the budget.
# It is optimal among these combinations, not among all plans. On the command line, for Llama 3 70B on 64 GPUs:
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
# Nothing in the rest of this appendix ran on a GPU. The predictor is the one that matched the measurement above, here
# with the kernels of an H100 and the block size of its allocator. It does not include the CUDA context, NCCL's own memory, the
# workspaces of operations, or fragmentation. Leave room for these: 80 GiB is a round budget, and more than a GPU of 80 GB
# has available.
# :::
#
# Each rank trains on one sequence of 8192 tokens with AdamW. Shards and reductions are in float32, the computation is
# in bf16. *Resident* memory is the rank's shards and optimizer state. The last two columns are for a plan within
# 80 GiB; its recomputed FLOPs are in percent of the baseline's.

# %% tags=["hide-input"]
BUDGET = "80GiB"
rows = {
    size: [sharded_llama.rank_row(large[size], ranks, BUDGET) for ranks in numbers]
    for size, numbers in {"8B": (8,), "70B": (16, 32, 512)}.items()
}
columns = {"size": "model, ranks", "resident": "resident, GiB", "plain": "baseline: peak, GiB"}
columns |= {"full": "per block: peak, GiB", "auto": "plan: peak, GiB", "auto_flops": "plan: recomputed FLOPs, %"}
table = markdown_table(
    [row | {"size": f"{size}, {row['ranks']}"} for size, own in rows.items() for row in own],
    columns,
    f"Llama 3: the step of one rank with 8192 tokens; plans within {BUDGET}. Simulated, not measured.",
    "tab-sharded-llama",
)
path = write_text_atomic("results/tables/10_llama.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_llama.md
# ```
#
# With one sequence per rank, 8B needs no plan: the baseline fits on 8 GPUs, although only just. The baseline of 70B fits
# on no number of GPUs, because its activations are not sharded. Per-block checkpointing fits on 32 GPUs, but recomputes
# about a third of the FLOPs however much memory remains unused. A plan recomputes only as much as the budget requires,
# here on 64 GPUs:

# %%
plan = large["70B"].plan(sharded_llama.mixed(64), BUDGET)
for run in plan.runs:
    print(f"{run.count} blocks save {run.kept_bytes / GIB:.2f} GiB each: {', '.join(dict.fromkeys(run.names))}")

# %% tags=["hide-input"] alt="Stacked bars of the memory at the peak of one rank of Llama 3 70B on 64 GPUs. The baseline is far above 200 GiB, nearly all of it activations. With per-block checkpointing, the activations are a small part of that and still the largest layer, and the peak is half of the budget. The plan is in between, just below a dashed line, the budget of 80 GiB. The layers of shards, optimizer state, gathered parameters and temporaries are equal in all three."
at_64 = {"baseline": "none", "per block": "full"}
chosen = {name: large["70B"].plan(sharded_llama.mixed(64), policy=policy) for name, policy in at_64.items()}
chosen["planned"] = plan
parts = [sharded_llama.layers(each) for each in chosen.values()]
figure = stacked_plot(
    list(chosen),
    {name: [part[name] for part in parts] for name in parts[0]},
    "",
    limit=int(BUDGET.removesuffix("GiB")) * GIB,
)
path = plots.save(figure, "results/figures/10_at_the_peak.png")
for name in ("per block", "planned"):
    print(f"{name:9} recomputes {sharded_llama.again(chosen[name]):4.1f} % of the FLOPs")
figure

# %% [markdown]
# *Simulated memory at the peak of one rank of Llama 3 70B on 64 GPUs. The plan uses the memory that per-block
# checkpointing leaves free, so it recomputes less.*
#
# :::{admonition} Takeaway
# :class: tip
# Sharding and checkpointing reduce different parts of the memory. More GPUs divide the resident memory; a plan reduces
# the activations of a rank's own batch. Each GiB that sharding frees is a GiB that the plan need not recompute.
# :::
#
# ## Communication volume
#
# Every block is gathered twice and the root once, and all gradients are reduced once. Each rank has $1/N$ of every
# tensor already:
#
# $$ \text{received} = \frac{N - 1}{N} \, c \, (2 L P_b + P_0), \qquad \text{sent} = \frac{N - 1}{N} \, r \, P . $$
#
# Recomputation adds nothing, because it happens while the block is gathered. The counts below include the padding:

# %%
ranks, model = 64, large["70B"]
root, block = (sum(torch.Size(w.shape).numel() for w in group.weights) for group in model.groups[:2])
by_hand = (ranks - 1) * 2 * (2 * model.stands_for * block + root) // ranks
links = plan.communication
print(f"{links.gathers} gathers receive {links.gathered_bytes:,} bytes, by hand {by_hand:,}")
print(f"{links.reduces} reductions send {links.reduced_bytes:,} bytes")

# %% [markdown]
# The volume does not shrink with $N$: it is the price of not storing all $P$ parameters on every GPU. Nor does it
# depend on the batch, so a larger batch makes communication cheaper per sequence. A plan that makes room for a larger
# batch may therefore pay off twice.
#
# ## Running it
#
# The baseline and per-block checkpointing run today. For per-block checkpointing, call
# `ackpt.apply_activation_checkpointing` on the blocks; then call `fully_shard`. To give each block its own plan, use
# `fully_shard(ackpt.compile(block, ...))` on one block after another, and shard the model last. There are two limits:
#
# - `ackpt plan --fsdp` names what each block saves, but does not write these plans for you.
# - The measurements above cover the baseline and per-block checkpointing. The memory of blocks with their own plans is
#   counted as in {doc}`07_graph_profiler`, where the counts were exact on one machine. We did not measure it with sharding.
#
# ## Exercises
#
# :::{admonition} Exercise 1: the floor
# :class: note
# How much memory does a rank of Llama 3 8B need in the limit of many GPUs, with per-block checkpointing? What takes
# most of it? Estimate first; `sharded_llama.layers(plan)` lists the parts of a plan's peak.
# :::

# %% tags=["solution"]
many = large["8B"].plan(sharded_llama.mixed(8192), policy="full")
for name, part in sharded_llama.layers(many).items():
    print(f"{name:22} {part / GIB:5.2f} GiB")
print(f"{'total':22} {many.peak_bytes / GIB:5.2f} GiB")
logits = 8192 * 128256 / GIB
print(f"{'logits in bf16':22} {2 * logits:5.2f} GiB, in float32 {4 * logits:.2f} GiB")

# %% [markdown]
# The loss takes most of it. At the peak, three tensors with one float32 element per logit are live: the log-probabilities
# among the activations, and two gradients among the temporaries. (The logits in bf16 are freed by then.) The remedy is a
# loss in chunks, as in {doc}`04_experiments`.
#
# :::{admonition} Exercise 2: reduction in bf16
# :class: note
# Reduce gradients in bf16 instead of float32. How much smaller is the reduction buffer of a block on a rank of 70B, and
# how many fewer bytes does a rank send?
# :::

# %% tags=["solution"]
for reduction in (torch.float32, torch.bfloat16):
    sizes = GroupBytes(large["70B"].groups[1], Sharding(64, torch.float32, reduction))
    sent = large["70B"].plan(Sharding(64, torch.float32, reduction)).communication.reduced_bytes
    print(f"{reduction}: buffer {sizes.reduce / GIB:.2f} GiB, sent {sent / GIB:.0f} GiB")

# %% [markdown]
# Reduction in bf16 halves the buffer and the bytes sent, but the sum over $N$ ranks is less precise.
#
# :::{admonition} Exercise 3: smaller GPUs
# :class: note
# Does Llama 3 8B fit on 64 GPUs with a budget of 40 GiB, and of 24 GiB? At what cost?
# :::

# %% tags=["solution"]
for budget in ("40GiB", "24GiB"):
    smaller = large["8B"].plan(sharded_llama.mixed(64), budget)
    print(f"{budget}: {smaller.peak_bytes / GIB:.1f} GiB, {sharded_llama.again(smaller):.1f} % of the FLOPs recomputed")

# %% [markdown]
# ## What we have seen
#
# - A rank stores $16 P / N$ bytes. For any $N$, it also needs temporary memory for the root and for about four times the
#   bytes of a block.
# - The allocations that FSDP2 adds to a step can be counted: two processes measured the predicted bytes exactly.
# - Equal blocks have equal windows, so four captured blocks predict eighty.
# - Activations are not sharded, so Llama 3 70B does not fit within 80 GiB on any number of GPUs without recomputation.
#   The more memory sharding frees, the less a plan recomputes; per-block checkpointing always recomputes about a third.
# - Recomputation in a block's own backward costs no communication.
#
# ## Sources
#
# - {cite:t}`rajbhandari2020`: sharding of optimizer state, gradients and parameters, and its communication volume.
# - {cite:t}`zhao2023fsdp`: all-gathers per group, prefetching, and temporary memory.
# - {cite:t}`grattafiori2024`: the sizes of Llama 3.
# - {cite:t}`korthikanti2022`: sharding of activations, which this appendix does not do.
