# %% [markdown]
# # BERT: the switch and the plan
#
# After this chapter you can fit a BERT into the memory that you have, with a switch or with a budget, say what each of
# the two runs again and why, and judge a published saving.

# %% [markdown]
# ## Goals
#
# - Turn on checkpointing by the module, and plan the same step within budgets; compare bytes, FLOPs and time.
# - See that neither changes a loss or a gradient, over three optimizer steps with dropout.
# - Derive what a block of BERT keeps, and find what of it a plan keeps, budget by budget.
# - Give a budget in three ways, measure that it is kept, save the plan and run it again.
# - Find the largest batch within a fixed memory.
# - Train on batches of several lengths within one budget.
# - Predict BERT-large at the published size, and read the published figures beside it.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $B$, $T$ | sequences in a batch, tokens of each |
# | $d$, $f$, $h$, $L$, $V$ | width of the model, of the MLP; heads; blocks; vocabulary |
# | $A$ | numbers that one block keeps per token for its backward |
# | $F_\text{block}$ | FLOPs of one block's forward |
#
# The *switch* is {doc}`02_reentrant_checkpoint`: chosen modules keep their input and run again in backward. The *plan* is
# {doc}`06_graph_profiler`: an order of operations, made for a budget. What the switch gains and costs was published for
# BERT-large, so there we weigh the two.

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
# ## Two ways
#
# BERT reads a sequence in which some words are masked, and guesses them (Devlin et al. 2018,
# [arXiv:1810.04805](https://arxiv.org/abs/1810.04805)). BERT-large has 24 blocks of width 1024 and trains on 512 tokens;
# ours is an eighth as wide, four blocks deep, on sequences a quarter as long. Eight heads and 640 words keep the
# proportions: attention's matrices, and the logits, weigh as much beside the rest as they do in the large one.

# %%
config = replace(bert.CPU, methods=("plain", "per-block", "auto@0.5", "auto@0.3"))
run = RunStep(config.setting())
model, batch, optimizer = run.model, run.inputs, run.optimizer
sizes = model.config
B, T = batch["input_ids"].shape
print(f"{B} x {T} tokens, {sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# **The switch** names modules. What it returns says which were found:

# %%
switched = copy.deepcopy(model)
ackpt.apply_activation_checkpointing(switched, models.BertBlock)

# %% [markdown]
# **The plan** names a budget, here half the dynamic peak of the baseline:

# %%
planned = ackpt.compile(model, budget=0.5, optimizer=optimizer, **batch)
plan = planned.plan
share = plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
print(f"{share:.3f} of the plain dynamic peak, {plan.cost:.1%} more work, as modelled")

# %% [markdown]
# Both are called like the model. The first question to either is whether it trains the same model. Three steps of AdamW
# from the same weights, dropout on; every loss, every gradient of every step and all parameters after the third are
# compared as they are, bit for bit.


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


def with_switch(module, adam):
    ackpt.apply_activation_checkpointing(module, models.BertBlock)
    return module


def with_plan(module, adam):
    return ackpt.compile(module, plan=planned.plan, optimizer=adam, **batch)


# %%
plain = trained(lambda module, adam: module)
for prepare in (with_switch, with_plan):
    same = [torch.equal(a, b) for a, b in zip(plain, trained(prepare), strict=True)]
    print(f"{prepare.__name__:11}  {sum(same)} of {len(same)} tensors equal, bit for bit")

# %% [markdown]
# Dropout is the hard part of it: what runs again must draw the same noise. Both ways put the generator back for that.
#
# ## Measured
#
# The same as an experiment, in a terminal `ackpt bert`. Every method runs on the same weights and batch. Peaks are the
# allocator's, FLOPs are counted while they run, and gradients are compared with the plain ones once more.

# %%
small = next(bert.run_bert(config, SOURCE))
for record in small:
    path = record.save(f"results/cpu/10_{bert_report.file_name(record)}")
runs = {record.config["method"]: record.metrics for record in small}
assert not any("not_run" in metrics for metrics in runs.values())

# %% tags=["hide-input"]
shown = [{key: "" if value is None else value for key, value in row.items()} for row in bert_report.rows(small)]
columns = {"method": "method", "peak": "peak, MiB", "vs_plain": "against plain, %", "dynamic": "dynamic peak, MiB"}
columns |= {"dynamic_vs_plain": "against plain, % ", "flops": "FLOPs again, %"}
caption = (
    "One step of the small BERT on the CPU, measured: `per-block` is the switch, `auto@f` a plan for the budget f."
)
table = markdown_table(shown, columns, caption.replace(" f.", " $f$."), "tab-bert")
path = write_text_atomic("results/tables/10_bert.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_bert.md
# ```
#
# Every plan has kept its budget, and its peak is the predicted one to the byte:

# %%
for name, metrics in runs.items():
    if name.startswith("auto@"):
        limit = float(name.removeprefix("auto@")) * runs["plain"]["dynamic_peak_bytes"]
        assert metrics["dynamic_peak_bytes"] <= limit
        assert metrics["peak_bytes"] == metrics["predicted_peak_bytes"]
        print(name, metrics["peak_bytes"], metrics["predicted_peak_bytes"])

# %% alt="Stacked bars of what stands at the peak, one bar per method. Plain is by far the highest, nearly all of it activations. The switch has hardly any activations at its peak, but temporaries and gradients; the plans have activations in between, less with each lower budget. Parameters and optimizer are the same thin layers everywhere."
kinds = ("parameters", "optimizer", "gradients", "activations", "temporaries")
figure = stacked_plot(
    list(runs),
    {kind: [metrics["categories"].get(kind, 0) for metrics in runs.values()] for kind in kinds},
    f"Activations are {runs['plain']['categories']['activations'] / runs['plain']['peak_bytes']:.0%} of the plain peak; "
    "a plan gives up as many of them as it must, the switch all",
)
path = plots.save(figure, "results/figures/10_at_the_peak.png")
figure

# %% [markdown]
# The breakdown tells the two apart. At the switch's peak there are next to no activations: it stands in a block that runs
# again, which for the allocator makes temporaries. A plan meets its peak with activations that it was free to keep.
#
# FLOPs are not time. On a CPU the operations without FLOPs, noise above all, take a good part of a step. The methods took
# turns in one process; here are the medians of the ratios to the baseline, the lowest and the highest.

# %% tags=["measured-time", "nbval-ignore-output"]
for name, metrics in runs.items():
    ratio = metrics["seconds_ratio"]
    spread = f"x {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    print(f"{name:9}  {1e3 * metrics['seconds_step']['median']:6.1f} ms  {spread}")

# %% [markdown]
# ## What a block keeps
#
# Why so much? Count the numbers per token that a block's backward will read. A linear layer needs its input for the
# gradient of its weight. Attention needs queries, keys and values, its weights before and behind dropout and the noise
# between, three matrices of $T$ numbers for each head and token. A norm needs its input, and two sums; dropout its noise;
# GELU its input.
#
# $$ A = \underbrace{3 d + 3 h T}_\text{attention} + \underbrace{d}_\text{mixed} +
#    \underbrace{2 \, (3 d + 2)}_\text{noise, sum, norm} + \underbrace{2 f}_\text{GELU} = 10 d + 2 f + 3 h T + 4 . $$
#
# The plain plan lists what the graph keeps. Does it agree?

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
# The switch keeps one of these tensors per block, its input, $d$ numbers per token. Everything else runs again, the
# matrix products included:
#
# $$ F_\text{block} = 2 \, B T \, (4 d^2 + 2 d f) + 4 \, B T^2 d . $$

# %%
F_block = 2 * B * T * (4 * d**2 + 2 * d * f) + 4 * B * T**2 * d
again = runs["per-block"]["flops"] - runs["plain"]["flops"]
again, L * F_block

# %% [markdown]
# ## What a plan keeps
#
# Who looks at single operations sees that what takes room and what takes work are not the same. Noise can be drawn again,
# weights behind dropout are multiplied with it number by number, GELU's result and the norms' follow from their inputs.
# None of these needs a matrix product, and together they are $2 h T + f + 4 d$ numbers per token:

# %%
print(f"{(2 * h * T + f + 4 * d) / A:.0%} of what a block keeps")

# %% [markdown]
# For five budgets: in how many of the four blocks is each of a block's activations saved? (Its input belongs to the block
# before it. The smallest, sums of the norms, are left out.)

# %%
budgets = (0.8, 0.6, 0.5, 0.4, 0.3)
plans = {budget: ackpt.plan(graph, budget, profile=profile) for budget in budgets}
places = bert.saved_in({"plain": none} | {str(b): plans[b] for b in budgets})
names = "q", "k", "weights", "noise on weights", "weights behind dropout", "v"
names += "attention's result", "noise, first branch", "first sum", "first norm", "", ""
names += "up's result", "GELU's result"
names += "noise, second branch", "second sum", "second norm", "", ""

# %% tags=["hide-input"]
rows = []
for name, place in zip(names, places, strict=True):
    numbers = place["bytes"] // (4 * B * T)
    letter = {d: "$d$", f: "$f$", h * T: "$h T$", 1: "1"}[numbers]
    if numbers > 1:
        rows.append({"what": name, "size": letter} | {key: place[key] for key in place if key != "bytes"})
columns = {"what": "activation", "size": "numbers per token", "plain": "plain"}
columns |= {str(budget): f"budget {budget}" for budget in budgets}
caption = f"In how many of the {L} blocks an activation is saved, by budget; the others are made again in backward."
table = markdown_table(rows, columns, caption, "tab-bert-block")
path = write_text_atomic("results/tables/10_block.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_block.md
# ```
#
# The noise on the weights, the weights behind dropout and GELU's result go first: large, and without a product. Only then a block's
# weights follow, for which $q$ and $k$ are multiplied again, and the up-projection at the very end. What they cost:

# %%
for budget, plan in plans.items():
    flops = plan.recompute_flops / (plan.flops - plan.recompute_flops)
    print(f"budget {budget}: {flops:6.2%} of the FLOPs again, cost {plan.cost:6.2%}")
print(f"the switch: {again / runs['plain']['flops']:6.2%} of the FLOPs again")

# %% [markdown]
# The *cost* is modelled: it weighs FLOPs and moved bytes against each other, since an operation without a FLOP still
# reads and writes. Each decision is there to be asked. The dearest of the tightest plan, what each costs, and where the peak would be, had the
# result been kept:

# %%
tight = plans[0.3]
for decision in tight.decisions[:6]:
    over = (decision.peak_if_kept_bytes - tight.limit_bytes) / MIB
    where = f"{decision.module}: {decision.name}"
    print(f"{decision.cost:6.2%}  {where:28} if kept, {over:.1f} MiB above the budget")

# %% [markdown]
# None of them could be kept. And nobody need believe that a plan is good: it says below which cost no other can be.

# %%
for budget, plan in plans.items():
    bound = f"no schedule below {plan.lower_bound:6.2%}"
    print(f"budget {budget}: cost {plan.cost:6.2%}, {bound}")

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# The switch decides about modules, all or nothing: one tensor kept, all products again. A plan decides about operations:
# first whatever is large and cheap, and products only when nothing else is left.
# :::

# %% [markdown]
# ## The switch's memory, for less
#
# The fair question is not what a plan does at half the memory, but what it does at the switch's. A budget may be given in
# bytes, then it means the whole peak: parameters, optimizer and inputs included. We give the switch's measured peak.

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
by_switch = measured(model)
ackpt.remove_activation_checkpointing(model)
by_plan = measured(matched)
assert by_plan.peak_bytes <= same_bytes
for name, found in {"switch": by_switch, "plan": by_plan}.items():
    extra = found.flops / eager.flops - 1
    print(f"{name:6}  peak {found.peak_bytes:,} bytes, {extra:5.1%} of the FLOPs again")

# %% alt="Live memory of three training steps side by side. Plain: a ramp to the peak where backward begins, and down. Switch: a low staircase of spikes in the forward, then four tall teeth in backward. Plan: a ramp of a third of the plain height, with small teeth on its way down; its peak is as high as the teeth of the switch."
figure = orders_plot(
    {"plain": eager.timeline, "switch": by_switch.timeline, "plan": by_plan.timeline},
    f"At the switch's peak a plan runs {by_plan.flops / eager.flops - 1:.0%} of the FLOPs again, "
    f"the switch {by_switch.flops / eager.flops - 1:.0%}",
    eager.resident_bytes,
)
path = plots.save(figure, "results/figures/10_timelines.png")
figure

# %% [markdown]
# And over all budgets, for whatever the graph allows:

# %%
line = {}
for percent in range(100, 0, -2):
    try:
        plan = ackpt.plan(graph, percent / 100, profile=profile)
    except ackpt.BudgetError:
        break
    share = 100 * plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
    line[share] = 100 * plan.recompute_flops / (plan.flops - plan.recompute_flops)

# %% alt="FLOPs that run again over the dynamic peak, both in per cent of the baseline. The line of the plans stays at nothing from a hundred down to little more than fifty per cent, rises slowly to forty and steeply below thirty; measured plans lie on it. The switch is a single point, far above the line."
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
        "switch": dict([points["per-block"]]),
    },
    {"plan": line},
    f"Down to {free:.0f} % of the peak no FLOP runs again; the switch is one point above the line",
    xlabel="dynamic peak, % of the baseline's",
    ylabel="FLOPs that run again, % of the baseline's",
    logs=(),
)
path = plots.save(figure, "results/figures/10_line.png")
figure

# %% [markdown]
# ## Giving a budget
#
# There are three ways, all of which mean bytes in the end:

# %%
text = f"{same_bytes / MIB:.3f} MiB"
for budget in (0.4, "40%", same_bytes, text):
    plan = ackpt.plan(graph, budget, profile=profile)
    limit = f"limit {plan.limit_bytes:,} dynamic bytes"
    print(f"{budget!r:12} {limit}, peak {plan.peak_bytes:,} in all")

# %% [markdown]
# A float is a share of the baseline's *dynamic* peak; bytes, as a number or with a unit, are the *whole* peak, which is
# what a GPU has. The last two differ by what a text with three decimals can say. What cannot be kept is refused, and the
# answer names what can, which is then kept:

# %%
try:
    ackpt.plan(graph, 0.05, profile=profile)
except ackpt.BudgetError as error:
    least = error.least_bytes
    print(textwrap.fill(str(error), 88))
lowest = ackpt.plan(graph, least, profile=profile)

# %% [markdown]
# A plan is made once and can be kept. The same model takes it without planning again: at the plan's own sizes, and at other
# sizes at which it keeps its budget. Any other model, and the same model in another mode, refuses it. We save the lowest
# plan, load it, and run what was loaded.

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
# A budget is a promise about the measured peak: it is kept, or refused with the smallest that can be.
# :::

# %% [markdown]
# ## The largest batch
#
# Memory that is saved is mostly spent on a larger batch. How large can it be within 64 MiB? This time nothing is run, the
# peaks are predicted from shapes; `auto` has the limit as its budget. Two blocks will do. In a terminal:
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
columns = {"method": "method", "largest": "largest batch", "peak": "its predicted peak, MiB", "vs_plain": "times plain"}
caption = (
    "Two blocks of the small BERT: the largest batch whose step stays within 64 MiB, with optimizer and parameters."
)
table = markdown_table(rows, columns, caption, "tab-bert-batch")
path = write_text_atomic("results/tables/10_batch.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_batch.md
# ```
#
# The switch's peak is one whole block, with its gradients, beside a boundary for every block. A plan cuts finer: between
# attention and the MLP there is a single tensor, too, so they need not be there together. (For the published size leave
# out `--set` and add `--tier gpu`; that takes minutes, since each batch that is tried is captured and planned.)

# %% [markdown]
# ## Batches of other lengths
#
# Batches are rarely equally long. They are padded to their longest sequence, so the length changes from step to step, and
# the baseline's peak with it. We train the small BERT on six lengths within 50 MiB and compare four ways. All are set
# up once, with the first batch; then the loop is the usual one.

# %%
lengths = [64, 112, 80, 32, 128, 48]
batches = [{name: tensor[:, :length].contiguous() for name, tensor in batch.items()} for length in lengths]
budget = 50 * MIB

planned = ackpt.compile(model, budget=budget, **batches[0])
compiled_model = copy.deepcopy(model)
compiled = torch.compile(compiled_model, backend="aot_eager_decomp_partition")
steps = {"baseline": model, "per-block": switched, "plan": planned, "memory budget": compiled}
owners = {"baseline": model, "per-block": switched, "plan": model, "memory budget": compiled_model}

# %% [markdown]
# *Memory budget* is PyTorch's own setting, at one half. It has to be in effect when `torch.compile` compiles, which it
# does for the first two lengths; its backend here runs operations one by one, so that bytes can be counted.


# %%
def train(name, inputs):
    torch.manual_seed(0)  # the same noise for all
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
# At every length the gradients are the baseline's, bit for bit, and the peak is the simulated one and within the budget.
# What was done for it, event by event:

# %%
for kind, events in Counter(event.kind for event in planned.history).items():
    print(f"{kind}: {events}")

# %% [markdown]
# The first batch was captured for its length alone. The second differed in one dimension, which was captured as a
# symbol: that capture, and one search for schedules, serve all other lengths. At each, the known schedules are simulated
# and the cheapest one within the budget runs. Where the model's own step fits, it runs itself:

# %%
for length in sorted(added):
    own = "the model itself" if peaks["plan"][length] == peaks["baseline"][length] else f"+{added[length]:.1%} work"
    print(f"{length:4} tokens: {peaks['plan'][length] / MIB:5.1f} MiB, {own}")

# %% alt="Peak over length for four ways. The baseline rises steeply and crosses 50 MiB near 80 tokens. The plan follows it up to there and then stays just below 50 MiB. PyTorch's memory budget rises along a line of about six tenths of the baseline's and ends above 50 MiB. Per-block checkpointing rises slowly to about 30 MiB."
figure = curves_plot(
    {name: {length: points[length] / MIB for length in sorted(lengths)} for name, points in peaks.items()},
    {"plan": {length: simulated[length] / MIB for length in sorted(lengths)}},
    "Within 50 MiB, the plan keeps the budget at every length; the others follow the length",
    xlabel="tokens of the longest sequence",
    ylabel="peak, MiB",
    logs=(),
)
path = plots.save(figure, "results/figures/10_lengths.png")
figure

# %% [markdown]
# The switch recomputes every block at every length, also where nothing need be. PyTorch's setting is a fraction of what
# is saved: short batches are recomputed without need, and the longest ends above 50 MiB. So it is with time, here as a
# ratio to the baseline's, at the shortest and the longest batch. All four took turns:

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
# {doc}`../guides/variable_lengths` tells what to write in a script of your own.
#
# :::{admonition} Takeaway
# :class: tip
# A budget in bytes bounds every batch. Short batches pay nothing for it.
# :::

# %% [markdown]
# ## BERT-large
#
# Now the published size, 8 sequences of 512 tokens, from shapes alone: nothing below was run. Two machines are asked. On
# the *CPU* no kernel fuses attention with dropout, and its matrices are materialised, as above. On a *GPU*, in bf16, a
# fused kernel keeps neither weights nor noise (Dao et al. 2022, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)):
# for its backward it makes both again from $q$, $k$ and one sum per row. It is a checkpoint inside an operation.

# %%
as_on_cpu = replace(bert.GPU, device="cpu", dtype="float32", methods=bert.METHODS[:2])
large, materialised = (bert.predicted(each, SOURCE) for each in (bert.GPU, as_on_cpu))
for prefix, group in {"10": large, "10_as-on-cpu": materialised}.items():
    for record in group:
        path = record.save(f"results/cpu/{prefix}_{bert_report.file_name(record)}")

# %%
D, F, H = 1024, 4096, 16
A_large = 10 * D + 2 * F + 3 * H * 512 + 4
stored = materialised[0].metrics["categories"]["activations"]
by_hand = 24 * 4 * 8 * 512 * A_large
print(f"24 blocks by hand: {by_hand / MIB:,.0f} MiB of {stored / MIB:,.0f} MiB activations")
print(f"attention's matrices are {3 * H * 512 / A_large:.0%} of a block")

# %% tags=["hide-input"]
rows = []
for kernel, group in {"materialised, fp32": materialised, "fused, bf16": large}.items():
    for row in bert_report.rows(group):
        rows.append({"kernel": kernel} | {key: "" if value is None else value for key, value in row.items()})
columns = {"kernel": "attention", "method": "method", "peak": "peak, MiB", "vs_plain": "against plain, %"}
columns |= {"dynamic": "dynamic peak, MiB", "dynamic_vs_plain": "against plain, % ", "flops": "FLOPs again, %"}
caption = "BERT-large, 8 x 512 tokens with AdamW, predicted from shapes; nothing was run."
table = markdown_table(rows, columns, caption, "tab-bert-large")
path = write_text_atomic("results/tables/10_large.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_large.md
# ```
#
# With materialised matrices most of the memory is cheap to make again: our small BERT halved its peak for next to no
# FLOPs. The fused kernel has done this already, and bf16 halves most of what is left. The baseline is less than half as
# high, and its activations are mostly what products return, so the same float costs more: it is a share of less. In bytes
# the plan has lost nothing, it starts where the kernel ends.
#
# The published figures come from a per-module switch as ours. Beside them:

# %% tags=["hide-input"]
on_gpu = gpu_records("bert")
reference = load_reference("bert")
rows = bert_report.published_rows(large, on_gpu)
columns = {"method": "method", "published": "published by others, average MB", "published_memory": "%"}
columns |= {"published_time": "their time, %", "peak": "ours, predicted peak, MiB", "vs_plain": "%"}
columns |= {"flops": "FLOPs again, %", "measured": "ours, measured peak, MiB", "measured_time": "our time, %"}
caption = f"BERT-large: {reference['hardware']} as published, and our model, predicted and measured on a GPU."
table = markdown_table(rows, columns, caption, "tab-bert-published")
path = write_text_atomic("results/tables/10_published.md", table)

# %% [markdown]
# ```{include} ../../results/tables/10_published.md
# ```
#
# What can be compared, and what not:
#
# - *Time.* One more forward of the blocks is a little less than a third of the FLOPs, and their time grew by a third. The
#   two agree about what a switch costs.
# - *Memory.* Theirs is an average over a run, ours the peak of one step, and they print neither a precision with it nor
#   what an MB is. That the first row looks alike may be chance. The second depends on what stands beside the activations.
# - *The method.* The plans have no published counterpart. A budget of 0.3 comes near the switch's peak, for three fifths
#   of what it runs again; whoever needs less room pays a small part of that. The switch has one price.
#
# :::{admonition} With a GPU
# :class: note
# Two commands fill the last columns.
#
# ```bash
# ackpt bert --tier gpu --out results/gpu
# nox -s reproduce -- --only 10
# ```
# :::

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# A fused kernel, a switch and a plan do the same thing at three scales: within an operation, for whole modules, for each
# operation. What the first has taken the others cannot take again; compare bytes, not shares.
# :::

# %% [markdown]
# Where the numbers of this page were made:

# %% tags=["measured-time", "nbval-ignore-output"]
small[0].environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: without dropout
# :class: note
# What does a block keep when dropout is 0? On the CPU attention is then a fused kernel. Count first, then ask the graph.
# What does half the memory cost then?
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
# No noise, $2 d$ and $h T$ less; and no matrices, of which one number per head and token stays. $A = 8 d + 2 f + h + 4$. The
# cheap half of the bytes is gone, and half of what is left costs products.
#
# :::{admonition} Exercise 2: when attention rules
# :class: note
# From which length on do materialised matrices take more than everything else in a block, for BERT-large and for ours?
# :::

# %% tags=["solution"]
for name, (d_, f_, h_) in {"BERT-large": (D, F, H), "ours": (d, f, h)}.items():
    print(f"{name}: T > {(10 * d_ + 2 * f_ + 4) / (3 * h_):.0f}")

# %% [markdown]
# $3 h T > 10 d + 2 f + 4$. With heads 64 wide, $d = 64 h$, and $f = 4 d$ that is $T > 384$ for any width.
#
# :::{admonition} Exercise 3: the last bytes
# :class: note
# What does a MiB cost, in FLOPs that run again, between two neighbouring budgets? Where is it dearest?
# :::

# %% tags=["solution"]
dynamic = none.dynamic_peak_bytes / MIB
pairs = sorted(line.items(), reverse=True)[::5]
for (a, cost_a), (b, cost_b) in zip(pairs, pairs[1:]):
    price = (cost_b - cost_a) / ((a - b) / 100 * dynamic)
    print(f"{a:5.1f} % -> {b:5.1f} %: {price:5.2f} % of the step's FLOPs for a MiB")

# %% [markdown]
# The lower the budget the dearer the MiB, since the cheap ones are gone. So ask for the budget that you need, and no less.
#
# ## What we have seen
#
# - The switch keeps a block's input and runs its whole forward again. A plan keeps the products and makes the rest again,
#   and starts with products only when the budget leaves no other way.
# - A block of BERT keeps $10 d + 2 f + 3 h T + 4$ numbers per token where attention is materialised; more than half of
#   them cost no FLOP.
# - Losses, gradients and parameters are the same to the last bit, dropout included, over three steps.
# - A budget is a float, bytes or a text, and the measured peak keeps it, at every length of a batch.
# - On BERT-large with fused attention the cheap half is gone before anybody plans, and products are left to run again.
# - The published third of the time is what one more forward of the blocks costs.
#
# ## Sources
#
# - {cite:t}`devlin2018`: model and task.
# - {cite:t}`chen2016`: the switch.
# - {cite:t}`dao2022`, {cite:t}`dao2023`: recomputing inside of attention.
# - {cite:t}`korthikanti2022`: recomputing attention's core alone, by hand; they count what a block keeps in the same way.
