# %% [markdown]
# # Beyond one machine
#
# After this chapter you can say what one GPU of many needs for a step of a Llama with 70 billion parameters, which plan
# fits it at which cost, and which of these figures were measured and which were simulated.

# %% [markdown]
# ## Goals
#
# - Count what FSDP2 keeps on a rank, what it gathers for a while, and what its collectives work in.
# - Measure a real sharded step in two processes, and find the prediction equal to the byte.
# - See why four blocks are enough to know eighty.
# - Plan Llama 3 8B and 70B for 8 to 512 GPUs with 80 GiB each, and read off what fits at which cost.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $N$ | ranks: processes, each with one GPU, over which a model is sharded |
# | $P$, $P_b$, $P_0$ | parameters of the model, of one block, and of the root: what is in no block |
# | $L$ | blocks |
# | $c$, $s$, $r$ | bytes of a number: computed and gathered in, sharded in, reduced in |
# | $A$ | activations of one rank's own batch |
#
# One rank's batch is its own; nothing below divides activations among ranks.

# %%
import warnings

import torch

from ackpt import plots
from ackpt.experiments import sharded_llama
from ackpt.experiments.graph_profile import orders_plot
from ackpt.experiments.reports.figures import stacked_plot
from ackpt.experiments.sharded_check import check
from ackpt.results import markdown_table, write_text_atomic
from ackpt.sharded.blocks import CAPTURED
from ackpt.sharded.planner import ShardedModel
from ackpt.sharded.sharding import GroupBytes, Sharding
from ackpt.workloads.planned_shapes import PlanConfig
from ackpt.workloads.step_request import StepRequest

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
warnings.filterwarnings("ignore", message="IProgress not found")  # a progress bar that transformers does not draw
torch.set_num_threads(2)
GIB = 2**30

# %% [markdown]
# ## What a rank keeps
#
# Every chapter so far had one machine, on which parameters, gradients and the optimizer's state were simply there. In
# mixed precision with AdamW that is 16 bytes for each parameter, too much for one GPU from five billion on. But a rank
# needs a parameter only while its block runs. Fully sharded training (Rajbhandari et al. 2020, {cite}`rajbhandari2020`;
# Zhao et al. 2023, {cite}`zhao2023fsdp`) keeps $1/N$ of each tensor on each rank:
#
# $$ \underbrace{s P / N}_\text{parameters} + \underbrace{s P / N}_\text{gradients} + \underbrace{2 s P / N}_\text{AdamW}
#    \;=\; 16 P / N \text{ bytes for } s = 4 . $$
#
# `fully_shard` on each block and then on the model makes groups, one for each block and one, the *root*, for the rest:
# embedding, last norm and head. We take Llama 3 in its published sizes (Grattafiori et al. 2024,
# {cite}`grattafiori2024`), on the meta device: there are no numbers in it, only shapes.

# %%
large = {size: sharded_llama.llama(size) for size in ("8B", "70B")}
for size, model in large.items():
    root, block = (sum(torch.Size(w.shape).numel() for w in group.weights) for group in model.groups[:2])
    print(f"{size:>3}: {model.step.parameters:,} = {model.stands_for} x {block:,} + {root:,}")

# %% [markdown]
# A tensor is cut along its first dimension and padded, so that all shards are alike. Where $N$ divides nothing, that
# costs a little:

# %%
for ranks in (8, 64, 512):
    shards = sum(GroupBytes(group, sharded_llama.mixed(ranks)).shards for group in large["8B"].groups)
    exact = 4 * large["8B"].step.parameters / ranks
    print(f"{ranks:>3} ranks: {shards:,} bytes of parameters, {shards / exact - 1:.2%} more than s P / N")

# %% [markdown]
# ## What is there for a while
#
# With $1/N$ of a block nobody can compute. So FSDP2 puts four things between a step's own allocations; the code is in
# torch, in `_fully_shard/_fsdp_param_group.py`:
#
# 1. *Before a block's forward* an all-gather fills a buffer of $c P_b$ bytes, from which the parameters are copied out,
#    another $c P_b$. The buffer stays until the next block's gather is done. Behind the block its parameters are freed.
# 2. *Before its backward* they are gathered again. The block that was run before has started that already, so two blocks
#    are there at a time: one as parameters, the next as a buffer.
# 3. *Behind its backward* the parameters are freed, and the gradients, $c P_b$, copied into a buffer of $r P_b$ for the
#    reduce-scatter, which returns a shard. That buffer stays until the next reduction.
# 4. *The root* is gathered first, stays all the time, and is reduced last. Its gradients wait for that unreduced.
#
# None of it depends on the batch, and hardly on $N$. For Llama 3, in GiB:

# %%
for size, model in large.items():
    root, block = (GroupBytes(group, sharded_llama.mixed(64)) for group in model.groups[:2])
    in_backward = block.unsharded + block.gather + block.reduce
    parts = {"root": root.unsharded, "block": block.unsharded, "next": block.gather, "reduction": block.reduce}
    print(size, {name: round(part / GIB, 2) for name, part in parts.items()}, f"{in_backward / GIB:.2f} with a block")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Sharding divides what is resident by $N$. What is gathered it does not divide: the root, a block, the next one's buffer,
# and a reduction's, here in float32 and so twice a block in bf16: four blocks' worth. That is the floor, below which no number of GPUs takes a rank.
# :::
#
# ## Measured
#
# Is that how FSDP2 behaves? We run it: two processes on this machine, which talk over gloo, and a Llama of three small
# blocks, plain and with each block in torch's `checkpoint_wrapper`. Each process measures its own step with
# `ackpt.measure`. The same step is predicted from shapes: the captured
# graph, as in chapter 6, with the events above between its own.

# %%
tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
tiny |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64}
request = StepRequest("hf:LlamaConfig", 4, 64, None, tiny)
checked = check(request, Sharding(2, gloo=True))

# %% tags=["hide-input"]
rows = [
    {
        "method": {"none": "plain", "full": "each block checkpointed"}[found.method],
        "resident": found.resident_bytes[0],
        "predicted_resident": found.predicted_resident_bytes,
        "first": found.measured_bytes[0],
        "second": found.measured_bytes[1],
        "predicted": found.predicted_bytes,
    }
    for found in checked
]
columns = {"method": "step", "resident": "resident, measured", "predicted_resident": "resident, predicted"}
columns |= {"first": "dynamic peak, rank 0", "second": "dynamic peak, rank 1", "predicted": "dynamic peak, predicted"}
caption = "A small Llama sharded over two processes on the CPU: bytes measured on each rank, and predicted."
table = markdown_table(rows, columns, caption, "tab-sharded-check")
path = write_text_atomic("results/tables/11_check.md", table)

# %% [markdown]
# ```{include} ../../results/tables/11_check.md
# ```

# %%
for found in checked:
    assert set(found.measured_bytes) == {found.predicted_bytes}
    assert set(found.resident_bytes) == {found.predicted_resident_bytes}

# %% [markdown]
# Equal to the byte, on both ranks. Three things had to be known for that:
#
# - *gloo copies.* It gathers into memory of its own and reduces a copy, as large as the buffer each; NCCL does neither.
#   The prediction counts them here (`gloo=True`) and nowhere below. Some of these copies die in gloo's own threads, whenever
#   those are done, so each process takes the lowest of three steps.
# - *Autograd frees by the function.* What one backward function reads is freed when all of it is done, not operation by
#   operation. Eager blocks are predicted so.
# - *A checkpointed block holds its arguments*, among them `position_ids`, 8 bytes for each position, which it never reads.
#
# Here is the step, with the same events, for a deeper model. *Buffers* are what is gathered and what collectives work in:

# %%
deep = ShardedModel(PlanConfig(StepRequest("hf:LlamaConfig", 4, 64, None, tiny | {"num_hidden_layers": 8})))
plans = {policy: deep.plan(Sharding(4), policy=policy) for policy in ("none", "full")}
plans["auto"] = deep.plan(Sharding(4), budget=plans["full"].peak_bytes)

# %% alt="Live memory of one rank in three steps side by side. Plain: a ramp of activations in the forward and down in backward. Per block: a nearly flat forward and eight equal teeth in backward. Auto: within the same height, a low ramp with smaller teeth. In all three what is gathered is a band of equal height that dips between blocks."
figure = orders_plot(
    {name: sharded_llama.drawn(plan.timeline) for name, plan in plans.items()},
    f"Within the peak of checkpointed blocks a plan runs {sharded_llama.again(plans['auto']):.0f} % of the FLOPs again, "
    f"checkpointed blocks {sharded_llama.again(plans['full']):.0f} %",
    plans["none"].resident_bytes,
)
path = plots.save(figure, "results/figures/11_timelines.png")
figure

# %% [markdown]
# ## A plan per block
#
# A plan for a sharded model must not run a block again when its parameters are gone: that would take a third gather. So
# each block decides for itself, and what it runs again it runs in its own backward, where FSDP2 has gathered it anyway.
# The step is then a row of *windows*: root, block after block, and back. A window's events depend on what its own block
# keeps and on nothing else, and blocks that are alike have the same windows. So `ackpt` captures four: the first, the
# last, and two between, whose windows must agree event by event. Is what follows for eight true? We capture all eight:

# %%
whole = ShardedModel(deep.config, whole=True)
for policy, plan in plans.items():
    budget = plans["full"].peak_bytes if policy == "auto" else None
    found = whole.plan(Sharding(4), budget, policy)
    same = found.timeline == plan.timeline and found.runs == plan.runs
    print(
        f"{policy:4}  {CAPTURED} blocks for 8: {plan.peak_bytes:,}   all 8: {found.peak_bytes:,}   every event: {same}"
    )

# %% [markdown]
# The choices of one block are those of chapter 9: from keeping all to keeping nothing, each step giving up what frees
# most for its cost. The first blocks take one choice and the rest another: what backward reads first is kept. Of all
# such mixes the cheapest within the budget is the plan. It is the best of these, not of all that could be thought of.
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
# No GPU took part in the rest of this chapter. The same prediction that was equal above is made for the kernels of an
# H100, with blocks of its allocator. Not in it: the CUDA context, what NCCL takes for itself, workspaces of operations,
# and fragmentation. So leave room: 80 GiB is a round budget, and more than a GPU of 80 GB has left.
# :::
#
# One sequence of 8192 tokens a rank, AdamW, shards and reductions in float32, computed in bf16. *Resident* is what a rank
# keeps: shards and the optimizer's. The last columns: within 80 GiB, which share of the FLOPs runs again.

# %%
BUDGET = "80GiB"
rows = {
    size: [sharded_llama.rank_row(large[size], ranks, BUDGET) for ranks in numbers]
    for size, numbers in {"8B": (8, 64), "70B": (16, 32, 64, 512)}.items()
}

# %% tags=["hide-input"]
columns = {"size": "Llama 3", "ranks": "ranks", "resident": "resident, GiB", "plain": "peak, plain, GiB"}
columns |= {"full": "peak, each block again, GiB", "full_flops": "FLOPs again, %"}
columns |= {"auto": "peak, planned, GiB", "auto_flops": "FLOPs again, % "}
table = markdown_table(
    [{"size": size, **row} for size, own in rows.items() for row in own],
    columns,
    f"One rank's step with 8192 tokens, sharded over so many ranks; planned within {BUDGET}. Simulated, not measured.",
    "tab-sharded-llama",
)
path = write_text_atomic("results/tables/11_llama.md", table)

# %% [markdown]
# ```{include} ../../results/tables/11_llama.md
# ```
#
# For 8B with one sequence there is nothing to plan: the baseline keeps the budget from 8 GPUs on, there only just. For
# 70B no number of GPUs makes it fit, since its
# activations are not sharded. Checkpointing every block fits from 32 GPUs on, and pays a third of the FLOPs whatever is
# left over. The plan pays for what is missing:

# %%
plan = large["70B"].plan(sharded_llama.mixed(64), BUDGET)
for run in plan.runs:
    print(f"{run.count} blocks keep {run.kept_bytes / GIB:.2f} GiB each: {', '.join(dict.fromkeys(run.names))}")

# %% alt="Stacked bars of what stands at the peak of one rank of Llama 3 70B on 64 GPUs. Plain is far above 200 GiB, nearly all of it activations. With each block run again activations are a small part of that and still the thickest layer, and the peak is half of the budget. The plan lies between, just below 80 GiB. Shards, optimizer, gathered parameters and temporaries are equally thick layers in all three."
at_64 = {"plain": "none", "each block again": "full"}
chosen = {name: large["70B"].plan(sharded_llama.mixed(64), policy=policy) for name, policy in at_64.items()}
chosen["planned"] = plan
parts = [sharded_llama.layers(each) for each in chosen.values()]
figure = stacked_plot(
    list(chosen),
    {name: [part[name] for part in parts] for name in parts[0]},
    f"Llama 3 70B on 64 GPUs, simulated: within {BUDGET} a plan runs {sharded_llama.again(plan):.0f} % of the FLOPs again, "
    f"every block again {sharded_llama.again(chosen['each block again']):.0f} %",
)
path = plots.save(figure, "results/figures/11_at_the_peak.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Sharding and checkpointing answer different questions. More GPUs divide what is resident, a plan what a rank's own batch
# takes; and the room that the first makes is what the second need not pay for.
# :::
#
# ## What goes over the links
#
# Every block is gathered twice and the root once, and everything is reduced once. Of that a rank has $1/N$ itself:
#
# $$ \text{received} = \frac{N - 1}{N} \, c \, (2 L P_b + P_0), \qquad \text{sent} = \frac{N - 1}{N} \, r \, P . $$
#
# Recomputing adds nothing to it, since it happens while the block is gathered. With padding, exactly:

# %%
for size, ranks in (("8B", 64), ("70B", 64)):
    model, sharding = large[size], sharded_llama.mixed(ranks)
    links = model.plan(sharding).communication
    root, block = (sum(torch.Size(w.shape).numel() for w in group.weights) for group in model.groups[:2])
    by_hand = (ranks - 1) * 2 * (2 * model.stands_for * block + root) // ranks
    print(f"{size:>3}: {links.gathers} gathers receive {links.gathered_bytes:,} bytes, by hand {by_hand:,};")
    print(f"     {links.reduces} reductions send {links.reduced_bytes:,}")

# %% [markdown]
# The volume does not shrink with $N$. It is the price for not having $P$ on each GPU, and it is the same for one sequence
# a rank as for eight: a larger batch makes it relatively cheaper, and a plan that makes room for one may pay twice.
#
# ## Running it
#
# The baseline and checkpointed blocks are what `fully_shard` runs today, after
# `ackpt.apply_activation_checkpointing` on the blocks. A block with a plan of its own is
# `fully_shard(ackpt.compile(block, ...))`, block by block, and the model last. Two things to know: `ackpt plan --fsdp`
# names what each block keeps, but does not write such plans for you; and measured above were the baseline and
# checkpointed blocks. Blocks with a plan of their own are counted as chapter 6 counts plans, where they were equal on one
# machine, and were not measured sharded.
#
# ## Exercises
#
# :::{admonition} Exercise 1: what stays
# :class: note
# How much does a rank of Llama 3 8B need, in all, in the limit of many GPUs, when every block is run again? What is most of it?
# :::

# %% tags=["solution"]
many = large["8B"].plan(sharded_llama.mixed(8192), policy="full")
for name, part in sharded_llama.layers(many).items():
    print(f"{name:22} {part / GIB:5.2f} GiB")
print(f"{'in all':22} {many.peak_bytes / GIB:5.2f} GiB")
logits = 8192 * 128256 / GIB
print(f"{'logits in bf16':22} {2 * logits:5.2f} GiB, in float32 {4 * logits:.2f} GiB")

# %% [markdown]
# The loss: logits in bf16, in float32, and their gradients. Chapter 4 has the cure, a loss in chunks.
#
# :::{admonition} Exercise 2: half the reduction
# :class: note
# Reduce gradients in bf16 instead of float32. What does it save on a rank of 70B, and over the links?
# :::

# %% tags=["solution"]
for reduction in (torch.float32, torch.bfloat16):
    sizes = GroupBytes(large["70B"].groups[1], Sharding(64, torch.float32, reduction))
    sent = large["70B"].plan(Sharding(64, torch.float32, reduction)).communication.reduced_bytes
    print(f"{reduction}: buffer {sizes.reduce / GIB:.2f} GiB, sent {sent / GIB:.0f} GiB")

# %% [markdown]
# Half of the buffer and half of what is sent, paid for with the precision of the sum over $N$ ranks.
#
# :::{admonition} Exercise 3: the price of a smaller GPU
# :class: note
# Llama 3 8B on 64 GPUs with 40 GiB, and with 24 GiB: what fits, and what does it cost?
# :::

# %% tags=["solution"]
for budget in ("40GiB", "24GiB"):
    smaller = large["8B"].plan(sharded_llama.mixed(64), budget)
    print(f"{budget}: {smaller.peak_bytes / GIB:.1f} GiB, {sharded_llama.again(smaller):.1f} % of the FLOPs again")

# %% [markdown]
# ## What we have seen
#
# - A rank keeps $16 P / N$ bytes, and gathers the root and about four blocks' worth beside that, for any $N$.
# - What FSDP2 does between a step's operations can be counted: two processes measured what was predicted, to the byte.
# - Blocks that are alike have the same windows, so four captured blocks say exactly what eighty do.
# - Activations are not sharded. Llama 3 70B does not fit 80 GiB on any number of GPUs without running something again; a
#   plan runs less again the more room sharding leaves it, where checkpointed blocks always pay a third.
# - Recomputing in a block's own backward costs no communication.
#
# ## Sources
#
# - {cite:t}`rajbhandari2020`: sharding of optimizer, gradients and parameters, and its volume.
# - {cite:t}`zhao2023fsdp`: gathering by groups, prefetching, and what it keeps for a while.
# - {cite:t}`grattafiori2024`: the sizes of Llama 3.
# - {cite:t}`korthikanti2022`: what shards activations as well, which is not done here.
