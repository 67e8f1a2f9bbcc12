# %% [markdown]
# # BERT: per-block checkpointing and plans
#
# After this chapter you can fit a BERT into the memory that you have, with per-block checkpointing or with a plan for a
# budget. You can say what each of the two recomputes and why, and judge a published saving.

# %% [markdown]
# ## Goals
#
# - Checkpoint every block of a BERT, plan the same step within budgets, and compare bytes, FLOPs and time.
# - See that neither changes a loss or a gradient over three optimizer steps with dropout.
# - Derive what a block of BERT saves, and find which of these activations a plan saves at each budget.
# - Give a budget in three ways, check it against the measured peak, then save the plan and run it again.
# - Find the largest batch within a fixed memory.
# - Train on batches of several lengths within one budget.
# - Predict BERT-large at the published size, and compare with the published figures.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $B$, $T$ | sequences in a batch, tokens per sequence |
# | $d$, $f$, $h$, $L$, $V$ | width of the model, width inside the MLP, heads, blocks, vocabulary |
# | $A$ | elements that one block saves per token for its backward |
# | $F_\text{block}$ | FLOPs of one block's forward |
#
# *Per-block checkpointing* ({doc}`02_reentrant_checkpoint`) makes each block a region, which saves its input and is
# recomputed in backward. A *plan* ({doc}`06_graph_profiler`) is a schedule of operations, made for a budget. The
# savings and the costs of per-block checkpointing were published for BERT-large, so BERT is where we compare the two.

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

import ackpt
from ackpt import models, plots
from ackpt.experiments import batch_size, bert
from ackpt.experiments.graph_profile import orders_plot
from ackpt.experiments.reports import batch_size as batch_report
from ackpt.experiments.reports import bert as bert_report
from ackpt.experiments.reports.figures import curves_plot, stacked_plot
from ackpt.experiments.reports.gpu_records import gpu_records
from ackpt.experiments.steps.named_steps import RunStep, one_step
from ackpt.experiments.steps.training import adamw
from ackpt.results import load_reference, markdown_table, write_text_atomic

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20
SOURCE = "notebooks/10_bert.py"

# %% [markdown]
# ## Two ways to save memory
#
# BERT reads a sequence in which some words are masked, and predicts these words (Devlin et al. 2018,
# [arXiv:1810.04805](https://arxiv.org/abs/1810.04805)). BERT-large has 24 blocks of width 1024 and trains on 512
# tokens. Ours has four blocks, an eighth of the width, and sequences a quarter as long. With eight heads and a
# vocabulary of 640 words, the attention matrices and the logits take about the same share of memory as in BERT-large.

# %%
config = replace(bert.CPU, methods=("plain", "per-block", "auto@0.5", "auto@0.3"))
run = RunStep(config.setting())
model, batch, optimizer = run.model, run.inputs, run.optimizer
sizes = model.config
B, T = batch["input_ids"].shape
print(f"{B} x {T} tokens, {sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# **Per-block checkpointing** takes a module class and returns the names of the modules that it found:

# %%
checkpointed = copy.deepcopy(model)
ackpt.apply_activation_checkpointing(checkpointed, models.BertBlock)

# %% [markdown]
# **A plan** takes a budget, here half the baseline's dynamic peak:

# %%
planned = ackpt.compile(model, budget=0.5, optimizer=optimizer, **batch)
plan = planned.plan
share = plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
print(f"{share:.3f} of the baseline's dynamic peak, {plan.cost:.1%} added time (modeled)")

# %% [markdown]
# You call both like the model. Do they also train the same model? We run three steps of AdamW from the same weights,
# with dropout. We compare every loss, every gradient of every step, and all parameters after the third step, bit for
# bit.


# %%
def trained(prepare):
    module = copy.deepcopy(model)
    adam = adamw(module, 1e-4)
    step = prepare(module, adam)
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        loss = step(**batch)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
        adam.step()
        adam.zero_grad()
    return [*seen, *module.state_dict().values()]


def per_block(module, adam):
    ackpt.apply_activation_checkpointing(module, models.BertBlock)
    return module


def with_plan(module, adam):
    return ackpt.compile(module, plan=planned.plan, optimizer=adam, **batch)


# %%
plain = trained(lambda module, adam: module)
for prepare in (per_block, with_plan):
    same = [torch.equal(a, b) for a, b in zip(plain, trained(prepare), strict=True)]
    print(f"{prepare.__name__:11}  {sum(same)} of {len(same)} tensors equal, bit for bit")

# %% [markdown]
# Dropout is the difficult part: a recomputation must draw the same dropout mask. Both ways restore the RNG state for
# that.
#
# ## Measured memory, FLOPs and time
#
# The experiment `ackpt bert` runs the same comparison in a terminal. Every method uses the same weights and the same
# batch. Peaks come from the allocator, FLOPs are counted while a method runs, and the gradients are compared with the
# baseline's once more.

# %%
small = next(bert.run_bert(config, SOURCE))
for record in small:
    path = record.save(f"results/cpu/10_{bert_report.file_name(record)}")
runs = {record.config["method"]: record.metrics for record in small}
assert not any("not_run" in metrics for metrics in runs.values())

# %% tags=["hide-input"]
shown = [{key: "" if value is None else value for key, value in row.items()} for row in bert_report.rows(small)]
columns = {"method": "method", "peak": "peak, MiB", "vs_plain": "vs. baseline, %", "dynamic": "dynamic peak, MiB"}
columns |= {"dynamic_vs_plain": "vs. baseline, % ", "flops": "recomputed FLOPs, %"}
caption = (
    "One step of the small BERT, measured on the CPU: `plain` is the baseline, `auto@f` is a plan for the budget f."
)
table = markdown_table(shown, columns, caption.replace(" f.", " $f$."), "tab-bert")
path = write_text_atomic("results/tables/10_bert.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_bert.md
# ```
#
# Every plan keeps its budget, and its peak equals the prediction to the byte:

# %%
for name, metrics in runs.items():
    if name.startswith("auto@"):
        limit = float(name.removeprefix("auto@")) * runs["plain"]["dynamic_peak_bytes"]
        assert metrics["dynamic_peak_bytes"] <= limit
        assert metrics["peak_bytes"] == metrics["predicted_peak_bytes"]
        print(name, metrics["peak_bytes"], metrics["predicted_peak_bytes"])

# %% alt="Stacked bars of memory at the peak, one bar per method. The baseline is by far the highest and consists mostly of activations. Per-block checkpointing has hardly any saved activations at its peak, but recomputed ones, temporaries and gradients. The plans have fewer activations than the baseline, fewer at the lower budget. Parameters and optimizer are the same thin layers in all bars."
kinds = ("parameters", "optimizer", "gradients", "activations", "recomputed", "temporaries")
figure = stacked_plot(
    list(runs),
    {kind: [metrics["categories"].get(kind, 0) for metrics in runs.values()] for kind in kinds},
    f"Activations are {runs['plain']['categories']['activations'] / runs['plain']['peak_bytes']:.0%} of the "
    "baseline's peak; plans save part of them, per-block checkpointing hardly any",
)
path = plots.save(figure, "results/figures/10_at_the_peak.png")
figure

# %% [markdown]
# The breakdown shows how the two differ. Per-block checkpointing reaches its peak in the backward of a block that it has
# just recomputed, so recomputed tensors take the place of saved ones. A plan's peak contains the activations that the
# budget left room to save.
#
# FLOPs are not time. On a CPU, operations without FLOPs, above all the generation of dropout masks, take a considerable
# part of a step. The methods took turns in one process. We print the median time, and the ratio to the baseline:
# median, lowest and highest.

# %% tags=["measured-time", "nbval-ignore-output"]
for name, metrics in runs.items():
    ratio = metrics["seconds_ratio"]
    spread = f"x {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    print(f"{name:9}  {1e3 * metrics['seconds_step']['median']:6.1f} ms  {spread}")

# %% [markdown]
# ## What a block saves
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
# The baseline's plan lists the activations that the graph saves. Does it agree?

# %%
d, f, h, L = sizes.dim, sizes.ff_dim, sizes.heads, sizes.layers
graph = ackpt.trace(model, optimizer=optimizer, **batch)
profile = ackpt.profile(graph, workspace="measured")
none = ackpt.plan(graph, policy="none", profile=profile)
A = 10 * d + 2 * f + 3 * h * T + 4
kept = {sum(a.bytes for a in found) for found in bert.of_blocks(none).values()}
print(f"by hand {4 * B * T * A}, in the graph {kept}")
print(f"attention's matrices are {3 * h * T / A:.0%} of it")

# %% [markdown]
# Per-block checkpointing saves one of these tensors per block, the block's input, with $d$ elements per token. It
# recomputes everything else, including the matrix products:
#
# $$ F_\text{block} = 2 \, B T \, (4 d^2 + 2 d f) + 4 \, B T^2 d . $$

# %%
F_block = 2 * B * T * (4 * d**2 + 2 * d * f) + 4 * B * T**2 * d
again = runs["per-block"]["flops"] - runs["plain"]["flops"]
again, L * F_block

# %% [markdown]
# ## What a plan saves
#
# A planner looks at single operations, and an operation with a large output need not be expensive.
# Dropout masks can be drawn again. The weights after dropout are an elementwise product of the weights and the mask.
# The outputs of GELU and of the norms follow from their inputs. None of these takes a matrix product, and together they
# are $2 h T + f + 4 d$ elements per token:

# %%
print(f"{(2 * h * T + f + 4 * d) / A:.0%} of what a block saves")

# %% [markdown]
# We plan for five budgets and count, for each activation of a block, in how many of the four blocks it is saved. (The
# input of a block counts as an activation of the block before it. The smallest activations, the norms' statistics, are
# not shown.)

# %%
budgets = (0.8, 0.6, 0.5, 0.4, 0.3)
plans = {budget: ackpt.plan(graph, budget, profile=profile) for budget in budgets}
places = bert.saved_in({"plain": none} | {str(b): plans[b] for b in budgets})
names = "q", "k", "attention weights", "dropout mask of weights", "weights after dropout", "v"
names += "attention output", "dropout mask, first branch", "first sum", "first norm", "", ""
names += "up-projection output", "GELU output"
names += "dropout mask, second branch", "second sum", "second norm", "", ""

# %% tags=["hide-input"]
rows = []
for name, place in zip(names, places, strict=True):
    numbers = place["bytes"] // (4 * B * T)
    letter = {d: "$d$", f: "$f$", h * T: "$h T$", 1: "1"}[numbers]
    if numbers > 1:
        rows.append({"what": name, "size": letter} | {key: place[key] for key in place if key != "bytes"})
columns = {"what": "activation", "size": "elements per token", "plain": "baseline"}
columns |= {str(budget): f"budget {budget}" for budget in budgets}
caption = f"The number of blocks, out of {L}, that save each activation, by budget; the other blocks recompute it."
table = markdown_table(rows, columns, caption, "tab-bert-block")
path = write_text_atomic("results/tables/10_block.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_block.md
# ```
#
# The dropout mask of the attention weights, the weights after dropout and the output of GELU are the first to be
# recomputed: they are large and take no matrix product. The attention weights follow, whose recomputation multiplies
# $q$ and $k$ again. The outputs of projections, such as the up-projection, come last. The cost of these plans:

# %%
for budget, plan in plans.items():
    flops = plan.recompute_flops / (plan.flops - plan.recompute_flops)
    print(f"budget {budget}: {flops:6.2%} of the FLOPs recomputed, cost {plan.cost:6.2%}")
print(f"per-block:  {again / runs['plain']['flops']:6.2%} of the FLOPs recomputed")

# %% [markdown]
# The *cost* is the added time as a fraction of the baseline step, as modeled from FLOPs and moved bytes: an operation
# without FLOPs still reads and writes memory. A plan lists its recomputations as decisions. Each has a cost, and the
# peak that the plan would have if the result were saved instead. These are the most expensive decisions of the plan
# with the smallest budget:

# %%
tight = plans[0.3]
for decision in tight.decisions[:6]:
    over = (decision.peak_if_kept_bytes - tight.limit_bytes) / MIB
    where = f"{decision.module}: {decision.name}"
    print(f"{decision.cost:6.2%}  {where:28} if saved: peak {over:.1f} MiB above the budget")

# %% [markdown]
# Saving any of these activations would exceed the budget. A plan also reports a lower bound: no schedule within the
# budget costs less. So we can judge how good each plan is:

# %%
for budget, plan in plans.items():
    bound = f"lower bound {plan.lower_bound:6.2%}"
    print(f"budget {budget}: cost {plan.cost:6.2%}, {bound}")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Per-block checkpointing decides about whole modules: it saves one tensor per block and recomputes all matrix products.
# A plan decides about single operations: it first recomputes large, cheap activations, and matrix products only when
# nothing else is left.
# :::

# %% [markdown]
# ## The same memory at a lower cost
#
# A fair comparison gives the plan as much memory as per-block checkpointing needs. A budget in bytes bounds the whole
# peak, including parameters, optimizer state and inputs. We use the measured peak of per-block checkpointing as the
# budget.

# %%
same_bytes = runs["per-block"]["peak_bytes"]
plan = ackpt.plan(graph, budget=same_bytes, profile=profile)
matched = ackpt.compile(model, plan=plan, optimizer=optimizer, **batch)


def measured(call):
    step = partial(one_step, call, batch, run.setting, optimizer)
    return ackpt.measure(step, "cpu", resident=run.resident, repeats=0)


# %%
eager = measured(model)
ackpt.apply_activation_checkpointing(model, models.BertBlock)
by_blocks = measured(model)
ackpt.remove_activation_checkpointing(model)
by_plan = measured(matched)
assert by_plan.peak_bytes <= same_bytes
for name, found in {"per-block": by_blocks, "plan": by_plan}.items():
    extra = found.flops / eager.flops - 1
    print(f"{name:9}  peak {found.peak_bytes:,} bytes, {extra:5.1%} of the FLOPs recomputed")

# %% alt="Live memory of three training steps side by side. Baseline: a ramp up to the peak where backward begins, and down again. Per-block checkpointing: a low staircase with spikes in the forward, then four tall teeth in backward. Plan: a ramp a third as high as the baseline, with small teeth on its way down; its peak is as high as the teeth of per-block checkpointing."
figure = orders_plot(
    {"baseline": eager.timeline, "per-block": by_blocks.timeline, "plan": by_plan.timeline},
    f"At the peak of per-block checkpointing, a plan recomputes {by_plan.flops / eager.flops - 1:.0%} of the FLOPs "
    f"instead of {by_blocks.flops / eager.flops - 1:.0%}",
    eager.resident_bytes,
)
path = plots.save(figure, "results/figures/10_timelines.png")
figure

# %% [markdown]
# We repeat the comparison for all feasible budgets, in steps of two per cent:

# %%
line = {}
for percent in range(100, 0, -2):
    try:
        plan = ackpt.plan(graph, percent / 100, profile=profile)
    except ackpt.BudgetError:
        break
    share = 100 * plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
    line[share] = 100 * plan.recompute_flops / (plan.flops - plan.recompute_flops)

# %% alt="Recomputed FLOPs over the dynamic peak, both in per cent of the baseline. The line of the plans is at zero from a hundred down to little more than fifty per cent of the peak, rises slowly until forty and steeply below thirty. Measured plans lie on it. Per-block checkpointing is a single point far above the line."
base = runs["plain"]
points = {
    name: (
        100 * metrics["dynamic_peak_bytes"] / base["dynamic_peak_bytes"],
        100 * (metrics["flops"] / base["flops"] - 1),
    )
    for name, metrics in runs.items()
}
free = min(share for share, flops in line.items() if flops == 0)
figure = curves_plot(
    {
        "plan": dict(point for name, point in points.items() if name.startswith("auto@")),
        "per-block": dict([points["per-block"]]),
    },
    {"plan": line},
    f"Down to {free:.0f} % of the peak, plans recompute no FLOPs; per-block checkpointing is one point above the line",
    xlabel="dynamic peak, % of the baseline's",
    ylabel="recomputed FLOPs, % of the baseline's",
    logs=(),
)
path = plots.save(figure, "results/figures/10_line.png")
figure

# %% [markdown]
# ## Giving a budget
#
# You can give a budget as a fraction, in bytes, or as a string. All of them become a number of bytes:

# %%
text = f"{same_bytes / MIB:.3f} MiB"
for budget in (0.4, "40%", same_bytes, text):
    plan = ackpt.plan(graph, budget, profile=profile)
    limit = f"limit {plan.limit_bytes:,} dynamic bytes"
    print(f"{budget!r:12} {limit}, peak {plan.peak_bytes:,} in all")

# %% [markdown]
# A fraction, also in per cent, is relative to the baseline's *dynamic* peak. Bytes, as a number or with a unit, bound
# the *whole* peak, which is what must fit into a GPU's memory. The last two limits differ because the string rounds MiB
# to three decimals.
#
# An infeasible budget is refused. The error names the smallest feasible budget, and we plan for that:

# %%
try:
    ackpt.plan(graph, 0.05, profile=profile)
except ackpt.BudgetError as error:
    least = error.least_bytes
    print(textwrap.fill(str(error), 88))
lowest = ackpt.plan(graph, least, profile=profile)

# %% [markdown]
# A plan can be saved. The same model runs a loaded plan without planning again, both at the sizes that it was made for
# and at other sizes at which it keeps its budget. Any other model refuses it, and so does the same model in another
# mode. We save the lowest plan, load it, and run it.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = lowest.save(f"{folder}/bert.json")
    loaded = ackpt.Plan.load(file)
step = ackpt.compile(model, plan=loaded, optimizer=optimizer, **batch)
found = measured(step)
assert found.peak_bytes == lowest.peak_bytes <= least
print(f"the same schedule: {loaded.schedule == lowest.schedule}")
print(f"smallest budget {least:,} bytes, measured peak {found.peak_bytes:,}")

# %%
try:
    ackpt.compile(model.eval(), plan=loaded, optimizer=optimizer, **batch)
except ackpt.PlanError as error:
    print(textwrap.fill(str(error), 88))
_ = model.train()

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A budget bounds the measured peak. It is either kept or refused, and the refusal names the smallest feasible budget.
# :::

# %% [markdown]
# ## The largest batch
#
# Saved memory is mostly spent on a larger batch. How large a batch fits into 64 MiB? We run nothing here: the peaks are
# predicted from shapes, and `auto` takes the limit as its budget. Two blocks are enough to show the difference. The
# same in a terminal:
#
# ```bash
# ackpt batch-size --model bert-large --set layers=2 heads=8 vocab_size=640 \
#     --batches 8,32 --limit 64MiB --methods plain,per-block,auto --predict
# ```

# %%
asked = batch_size.configuration(
    "cpu",
    "bert-large",
    batches=(8, 32),
    limit="64MiB",
    seq_len=T,
    fields={**config.fields, "layers": 2},
    methods=("plain", "per-block", "auto"),
)
answers = [
    record
    for group in batch_size.run_batch_size(asked, SOURCE, predict_only=True)
    for record in group
    if record.experiment.startswith(batch_size.LARGEST)
]
for record in answers:
    path = record.save(f"results/cpu/10_{batch_report.file_name(record)}")

# %% tags=["hide-input"]
rows = batch_report.largest_rows(answers)
columns = {"method": "method", "largest": "largest batch", "peak": "predicted peak, MiB", "vs_plain": "times baseline"}
caption = (
    "Two blocks of the small BERT: the largest batch whose peak, with parameters and optimizer, is at most 64 MiB."
)
table = markdown_table(rows, columns, caption, "tab-bert-batch")
path = write_text_atomic("results/tables/10_batch.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_batch.md
# ```
#
# The peak of per-block checkpointing holds one whole block with its gradients, and one boundary per block. A plan cuts
# finer: a single tensor also connects attention and the MLP, so their activations need not be live at the same time.
# (For the published size, omit `--set` and add `--tier gpu`. This takes minutes, because each batch size that is tried
# is captured and planned.)

# %% [markdown]
# ## Batches of different lengths
#
# Batches rarely have the same length. Each batch is padded to its longest sequence, so the length changes from step to
# step, and the baseline's peak changes with it. We train the small BERT on six lengths within 50 MiB and compare four
# ways. Each is set up once, with the first batch. Then the usual training loop runs.

# %%
lengths = [64, 112, 80, 32, 128, 48]
batches = [{name: tensor[:, :length].contiguous() for name, tensor in batch.items()} for length in lengths]
budget = 50 * MIB

planned = ackpt.compile(model, budget=budget, **batches[0])
compiled_model = copy.deepcopy(model)
compiled = torch.compile(compiled_model, backend="aot_eager_decomp_partition")
steps = {"baseline": model, "per-block": checkpointed, "plan": planned, "memory budget": compiled}
owners = {"baseline": model, "per-block": checkpointed, "plan": model, "memory budget": compiled_model}

# %% [markdown]
# *Memory budget* is PyTorch's own setting, here at one half. It must be set while `torch.compile` compiles, which
# happens at the first two lengths. The backend runs operations one by one, so that we can count their bytes.


# %%
def train(name, inputs):
    torch.manual_seed(0)  # the same dropout masks for all
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        steps[name](**inputs).backward()
    gradients = [parameter.grad for parameter in owners[name].parameters()]
    owners[name].zero_grad()
    return gradients


def peak(name, inputs):
    resident = (owners[name], *inputs.values())
    return ackpt.measure(lambda: train(name, inputs), resident=resident, warmup=0, repeats=0).peak_bytes


peaks = {name: {} for name in steps}
simulated, added = {}, {}
for length, inputs in zip(lengths, batches):
    gradients = {name: train(name, inputs) for name in steps}
    assert all(map(torch.equal, gradients["baseline"], gradients["plan"]))
    simulated[length], added[length] = planned.plan.peak_bytes, planned.plan.cost
    del gradients
    for name in steps:
        peaks[name][length] = peak(name, inputs)
    assert peaks["plan"][length] == simulated[length] <= budget

# %% [markdown]
# At every length, the gradients equal the baseline's bit for bit, and the peak equals the simulated one and stays
# within the budget. The step's history counts its captures and plans:

# %%
for kind, events in Counter(event.kind for event in planned.history).items():
    print(f"{kind}: {events}")

# %% [markdown]
# The first batch was captured for its length only. The second differed in one dimension, so that dimension was captured
# as a symbol. This capture and one search for schedules serve all other lengths: at each of them, the known schedules
# are simulated and the cheapest one within the budget runs. Where the baseline fits, the model itself runs:

# %%
for length in sorted(added):
    own = "the model itself" if peaks["plan"][length] == peaks["baseline"][length] else f"+{added[length]:.1%} time"
    print(f"{length:4} tokens: {peaks['plan'][length] / MIB:5.1f} MiB, {own}")

# %% alt="Peak over length for four ways. The baseline rises steeply and crosses 50 MiB near 80 tokens. The plan follows it until there and then stays just below 50 MiB. PyTorch's memory budget stays at about six tenths of the baseline and ends above 50 MiB. Per-block checkpointing rises slowly to about 30 MiB."
figure = curves_plot(
    {name: {length: points[length] / MIB for length in sorted(lengths)} for name, points in peaks.items()},
    {"plan": {length: simulated[length] / MIB for length in sorted(lengths)}},
    "The plan stays within 50 MiB at every length; the other peaks grow with the length",
    xlabel="tokens of the longest sequence",
    ylabel="peak, MiB",
    logs=(),
)
path = plots.save(figure, "results/figures/10_lengths.png")
figure

# %% [markdown]
# Per-block checkpointing recomputes every block at every length, even where everything would fit. PyTorch's setting is
# a fraction of the saved activations. It recomputes short batches unnecessarily, and the longest exceeds 50 MiB. The
# times show the same pattern. We print ratios to the baseline at the shortest and the longest length; all four
# ways took turns:

# %% tags=["measured-time", "nbval-ignore-output"]
for length in (min(lengths), max(lengths)):
    inputs = batches[lengths.index(length)]
    timed = {name: partial(train, name, inputs) for name in steps}
    ratios = ackpt.compare_seconds(timed, repeats=7).ratios
    print(f"{length:4} tokens: " + ", ".join(f"{name} x {ratio.median:.2f}" for name, ratio in ratios.items()))
new = [event.seconds for event in planned.history]
print(f"capture {new[0]:.1f} s, dynamic capture with the search {new[1]:.1f} s")
print(f"a new length: {1e3 * statistics.median(new[2:]):.0f} ms, at most {1e3 * max(new[2:]):.0f} ms")

# %% [markdown]
# {doc}`../guides/variable_lengths` shows how to use this in your own script.
#
# :::{admonition} Takeaway
# :class: tip
# A budget in bytes bounds the peak of every batch. Batches that fit anyway recompute nothing.
# :::

# %% [markdown]
# ## BERT-large
#
# Now we predict the published size, 8 sequences of 512 tokens, from shapes alone: nothing below was run. We predict for
# two devices. On the *CPU* no kernel fuses attention with dropout, so the attention matrices are materialized, as
# above. On a *GPU*, in bf16, a fused kernel saves neither weights nor dropout masks (Dao et al. 2022,
# [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)). Its backward recomputes both from $q$, $k$ and one sum per row:
# the kernel is a checkpoint inside an operation.

# %%
as_on_cpu = replace(bert.GPU, device="cpu", dtype="float32", methods=bert.METHODS[:2])
large, materialized = (bert.predicted(each, SOURCE) for each in (bert.GPU, as_on_cpu))
for prefix, group in {"10": large, "10_as-on-cpu": materialized}.items():
    for record in group:
        path = record.save(f"results/cpu/{prefix}_{bert_report.file_name(record)}")

# %%
D, F, H = 1024, 4096, 16
A_large = 10 * D + 2 * F + 3 * H * 512 + 4
stored = materialized[0].metrics["categories"]["activations"]
by_hand = 24 * 4 * 8 * 512 * A_large
print(f"24 blocks by hand: {by_hand / MIB:,.0f} MiB of {stored / MIB:,.0f} MiB activations")
print(f"attention's matrices are {3 * H * 512 / A_large:.0%} of a block")

# %% tags=["hide-input"]
rows = []
for kernel, group in {"materialized, fp32": materialized, "fused, bf16": large}.items():
    for row in bert_report.rows(group):
        rows.append({"kernel": kernel} | {key: "" if value is None else value for key, value in row.items()})
columns = {"kernel": "attention", "method": "method", "peak": "peak, MiB", "vs_plain": "vs. baseline, %"}
columns |= {"dynamic": "dynamic peak, MiB", "dynamic_vs_plain": "vs. baseline, % ", "flops": "recomputed FLOPs, %"}
caption = "BERT-large, 8 x 512 tokens with AdamW, predicted from shapes alone."
table = markdown_table(rows, columns, caption, "tab-bert-large")
path = write_text_atomic("results/tables/10_large.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_large.md
# ```
#
# With materialized matrices, most activations are cheap to recompute: the plan for our small BERT halved its dynamic
# peak with hardly any recomputed FLOPs. The fused kernel already recomputes these matrices, and bf16 halves most of the
# other activations. The baseline's peak is therefore less than half as high, and most of the remaining activations are
# outputs of matrix products. So the same fraction costs more: it is relative to a smaller peak. In bytes the plan loses
# nothing: it starts from the memory that the kernel leaves.
#
# The published figures come from a per-module checkpoint like our per-block checkpointing. The next table compares them
# with ours:

# %% tags=["hide-input"]
on_gpu = gpu_records("bert")
reference = load_reference("bert")
rows = bert_report.published_rows(large, on_gpu)
columns = {"method": "method", "published": "published, average MB", "published_memory": "%"}
columns |= {"published_time": "published time, %", "peak": "ours, predicted peak, MiB", "vs_plain": "%"}
columns |= {"flops": "recomputed FLOPs, %", "measured": "ours, measured peak, MiB", "measured_time": "our time, %"}
caption = f"BERT-large: published figures ({reference['hardware']}), and our model."
table = markdown_table(rows, columns, caption, "tab-bert-published")
path = write_text_atomic("results/tables/10_published.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_published.md
# ```
#
# How far are the two comparable?
#
# - *Time.* An extra forward of the blocks adds a little less than a third of the FLOPs, and the published time grows by
#   a third. The two agree on the cost of per-block checkpointing.
# - *Memory.* The published figure is an average over a run, ours is the peak of one step. The source states neither the
#   precision nor the size of its MB. The first row looks similar, which may be chance. The second row depends on the
#   memory that is live in addition to activations.
# - *The method.* There are no published figures for plans. The plan for a budget of 0.3 comes close to the peak of
#   per-block checkpointing, for three fifths of the recomputation. Larger budgets cost much less. Per-block
#   checkpointing has a single cost.

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A fused kernel, per-block checkpointing and a plan do the same thing at three scales: inside one operation, for whole
# modules, and for each operation. None can save memory that another has already saved, so compare bytes, not fractions.
# :::

# %% [markdown]
# The numbers on this page were produced in this environment:

# %% tags=["measured-time", "nbval-ignore-output"]
small[0].environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: without dropout
# :class: note
# What does a block save when dropout is 0? On the CPU, attention is then a fused kernel. Count first, then ask the
# graph. What does half the memory cost in this case?
# :::

# %% tags=["solution"]
dry = models.BertForMaskedLM(replace(sizes, dropout=0.0))
dry_graph = ackpt.trace(dry, **batch)
dry_none = ackpt.plan(dry_graph, policy="none")
dry_kept = {sum(a.bytes for a in found) for found in bert.of_blocks(dry_none).values()}
half = ackpt.plan(dry_graph, 0.5)
dry_flops = half.flops - half.recompute_flops
print(f"by hand {4 * B * T * (8 * d + 2 * f + h + 4)}, in the graph {dry_kept}")
print(f"half the dynamic peak: {half.recompute_flops / dry_flops:.1%} more FLOPs")

# %% [markdown]
# Without dropout there are no masks, which removes $2 d + h T$ elements. The fused kernel saves no matrices, only one
# element per head and token. That gives $A = 8 d + 2 f + h + 4$. The activations that were cheap to recompute are gone,
# so halving the memory now takes recomputed matrix products.
#
# :::{admonition} Exercise 2: when attention dominates
# :class: note
# From which length on do materialized matrices take more than everything else in a block, for BERT-large and for ours?
# :::

# %% tags=["solution"]
for name, (d_, f_, h_) in {"BERT-large": (D, F, H), "ours": (d, f, h)}.items():
    print(f"{name}: T > {(10 * d_ + 2 * f_ + 4) / (3 * h_):.0f}")

# %% [markdown]
# The condition is $3 h T > 10 d + 2 f + 4$. With heads of width 64, $d = 64 h$ and $f = 4 d$, this means $T > 384$ at
# any width.
#
# :::{admonition} Exercise 3: the price of a MiB
# :class: note
# How many FLOPs are recomputed per MiB saved between two neighboring budgets? Where is a MiB most expensive?
# :::

# %% tags=["solution"]
dynamic = none.dynamic_peak_bytes / MIB
pairs = sorted(line.items(), reverse=True)[::5]
for (a, cost_a), (b, cost_b) in zip(pairs, pairs[1:]):
    price = (cost_b - cost_a) / ((a - b) / 100 * dynamic)
    print(f"{a:5.1f} % -> {b:5.1f} %: {price:5.2f} % of the step's FLOPs per MiB")

# %% [markdown]
# The lower the budget, the more expensive the next MiB, because the cheap ones are already saved. So choose the largest
# budget that fits.
#
# ## What we have seen
#
# - Per-block checkpointing saves a block's input and recomputes its whole forward. A plan saves the outputs of matrix
#   products and recomputes the rest. It recomputes products only when the budget leaves no other way.
# - A block of BERT saves $10 d + 2 f + 3 h T + 4$ elements per token where attention is materialized. More than half of
#   them can be recomputed without a matrix product.
# - Losses, gradients and parameters are equal to the last bit over three steps, with dropout.
# - A budget is a fraction, a number of bytes or a string. The measured peak stays within it, at every length of a
#   batch.
# - On BERT-large with fused attention, the cheap activations are gone before planning starts, and matrix products
#   remain.
# - The published increase of a third in time matches one extra forward of the blocks.
#
# ## Sources
#
# - {cite:t}`devlin2018`: model and task.
# - {cite:t}`chen2016`: per-block checkpointing.
# - {cite:t}`dao2022`, {cite:t}`dao2023`: recomputation inside attention.
# - {cite:t}`korthikanti2022`: manual recomputation of attention's core; the same way of counting what a block saves.
