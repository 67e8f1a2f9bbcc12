# %% [markdown]
# # Swap or recompute?
#
# **Which activations should be swapped and which recomputed, and how does that depend on the device?**

# %% [markdown]
# ```{figure} ../../results/figures/08_swapped.png
# :alt: Two pairs of panels over time. Recomputed: the compute lane has brown recomputations between the parts of backward, and the lane of copies is empty. Swapped: the lane of copies has copies out during forward and copies back during backward, and compute is shorter. In both, device memory stays below half of the dotted line, the peak of the baseline; with swaps, host memory rises in forward and falls in backward.
# :class: dark-light
# :name: fig-swapped
#
# One step of a language model on a T4, simulated: half of the dynamic peak, once by recomputation and once by copies to
# the host. The copies overlap with compute, so the swapped step is faster.
# ```
#
# Swap activations that stay inactive long enough for their copies to overlap with compute, and recompute those that
# free many bytes per second of recomputation. A slow device or a wide model favors copies, a fast device and narrow
# layers favor recomputation.
#
# {doc}`06_sublinear_memory` chose *which blocks* to recompute. mu-TWO (Purandare, Wasay, Idreos and Jain, [MLSys
# 2023](https://mlsys.org/virtual/2023/poster/2467)) looks at every activation individually, and may also *swap* it:
# offload it to host memory during forward, and copy it back for backward.

# %% tags=["hide-input"]
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ackpt
from ackpt import models
from ackpt.graph import simulate
from ackpt.planner.costs import devices
from ackpt.planner.policies.mu_two import Link, drop, schedules_of, states
from ackpt.planner.policies.search.frontier import costs
from ackpt.planner.schedule.schedule import everything
from experiments import models as experiment_models
from experiments import mu_two
from experiments.graph_profile import orders_plot
from experiments.policies import ilp
from experiments.predicted_curves import BatchCurves
from experiments.published import Predictions
from experiments.published import rows as published_peaks
from experiments.reports import batch_size as batch_report
from experiments.reports import plots, schematics
from experiments.reports.figures import bar_plot, ratio_plot
from experiments.reports.gpu_records import gpu_records
from experiments.results import environment, load_reference, markdown_table, write_text_atomic
from experiments.suite.chapters import measure_here
from experiments.widgets.offload_lanes import shown

torch.set_num_threads(2)
generator = torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# On a GPU, the next two cells also run the published experiments, for at most `minutes` ({doc}`12_your_gpu`).

# %% tags=["parameters", "hide-input"]
device, tier, dataset, minutes = "auto", "auto", "embedded", 10

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
measure_here(
    "batch-size", device=device, tier=tier, dataset=dataset, minutes=minutes
)

# %% [markdown]
# ## Three fates and their times
#
# A part of a model can save its activations, recompute them, or copy them to the host. The fate does not change the
# gradients:

# %%
class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


widths = (64, 256, 64, 256, 32, 128)
layers = [
    layer
    for pair in zip(widths, widths[1:])
    for layer in (nn.Linear(*pair), nn.Tanh())
]
net, x = Net(*layers, nn.Linear(128, 1)), torch.randn(512, 64)

saved = torch.autograd.grad(net(x), net.parameters())
recomputed = torch.autograd.grad(
    checkpoint(net, x, use_reentrant=False), net.parameters()
)
with torch.autograd.graph.save_on_cpu():
    loss = net(x)
swapped = torch.autograd.grad(loss, net.parameters())
all(
    torch.equal(a, b) and torch.equal(a, c)
    for a, b, c in zip(saved, recomputed, swapped)
)

# %% [markdown]
# The times of the last two fates follow from a data sheet, here that of a T4. An operation takes as long as its FLOPs or
# its memory traffic, whichever is longer. The network has five layers with tanh, alternately wide and narrow, and each
# saves the output of its tanh:

# %%
t4 = devices.device("t4")
rate, memory, link = (
    t4.flops_per_second["float32"],
    t4.memory_bytes_per_second,
    t4.link_bytes_per_second,
)
hidden, ratios = x, []
for linear, tanh in zip(net[0:10:2], net[1:10:2]):
    out = tanh(linear(hidden))
    moved = (
        hidden.nbytes
        + linear.weight.nbytes
        + linear.bias.nbytes
        + out.nbytes
    )
    product = max(2 * hidden.numel() * out.shape[1] / rate, moved / memory)
    seconds = product + 2 * out.nbytes / memory
    ratios.append(out.nbytes / seconds)
    times = (
        f"copy {1e6 * out.nbytes / link:4.1f} µs "
        f"each way, recompute {1e6 * seconds:.1f} µs"
    )
    print(
        f"{out.nbytes // 1024} KiB: {times}, ratio "
        f"{out.nbytes / seconds / 1e9:.1f} GB/s"
    )
    hidden = out

# %% [markdown]
# The *recompute ratio* of an activation is its bytes divided by $t$, the seconds that its recomputation takes: the bytes
# that a second of recomputation frees. The higher it is, the earlier we recompute. Swapping frees 8 GB/s, since the link
# has 16 GB/s in one direction and every byte moves twice. So all five recomputations are faster than the copies.
#
# But copies that overlap with compute add no time. The *inactive time* of an activation is the run time of the operations
# between its last use in forward and its first use in backward.

# %% alt="Bars over time. The top lane shows the operations of forward and, from 21 to 62 microseconds, of backward. Each row below is an activation: a short dark bar while forward uses it, a pale bar while it is inactive, and a dark bar while backward uses it. Below each row are the copies out and back, and the recomputation. Both copies of tanh_1 fit into its inactive interval; those of tanh, tanh_2 and tanh_4 end long after it. All recomputations are much shorter than the copies."
graph = ackpt.trace(net, x)
profile = ackpt.profile(graph, t4)
figure = schematics.inactive_figure(
    mu_two.inactive_intervals(graph, profile)
)
path = plots.save(figure, "results/figures/08_inactive.png")
figure

# %% [markdown]
# *When the activations of the small network are inactive, at the rates of a T4. If the copy out overlaps with forward and
# the copy back with backward, as for `tanh_1`, a swap is free. If a copy ends too late, compute waits. `addmm_5` is the
# output of the network.*
#
# `ackpt` computes both quantities for every activation of a graph ({doc}`07_graph_profiler`; `rank` is the paper's word
# for the position of an operation). The copy out can overlap with all of forward after the activation is computed; the
# copy back with all of backward before its first use:

# %%
intermediates = mu_two.intermediates_of(graph, profile)
for i in intermediates:
    out, back = (
        slice(i.rank + 1, graph.boundary),
        slice(graph.boundary, i.first_bw_access),
    )
    overlap = " + ".join(
        f"{1e6 * sum(profile.seconds[part]):4.1f}" for part in (out, back)
    )
    idle = (
        f"inactive {1e6 * i.inactive_time:4.1f} "
        f"µs, copies overlap {overlap} µs"
    )
    print(
        f"{graph.nodes[i.rank].name:8} {i.memory_size // 1024:3} "
        f"KiB, {idle}, {i.recompute_ratio / 1e9:4.1f} GB/s"
    )
assert all(
    abs(i.recompute_ratio / by_hand - 1) < 1e-6
    for i, by_hand in zip(intermediates, ratios)
)

# %% [markdown]
# The first five ratios equal those computed by hand. For a language model of three blocks:

# %%
sizes = {"dim": 64, "ff_dim": 256, "head_dim": 16, "vocab_size": 256}
lm = models.LanguageModel(models.TransformerConfig(**sizes, layers=3))
tokens = torch.randint(256, (512,))
arguments = (
    tokens,
    torch.tensor([0, 512], dtype=torch.int32),
    512,
    tokens.roll(-1),
)

# %% alt="Scatter plot of the activations of the language model. Horizontal axis: inactive time in milliseconds. Vertical axis, logarithmic: gigabytes freed per second of recomputation. Outputs of products and elementwise operations are between 15 and 220, above the dashed line of the link at eight gigabytes per second. The small outputs of norms and sums are below it, the loss lowest."
lm_graph = ackpt.trace(lm, *arguments)
lm_profile = ackpt.profile(lm_graph, t4)
kinds = {
    "products and attention": [],
    "sums and norms": [],
    "other elementwise": [],
}
for i in mu_two.intermediates_of(lm_graph, lm_profile):
    target = lm_graph.nodes[i.rank].target
    kind = (
        "products and attention"
        if any(lm_profile.flops[n] for n in i.recomp_nodes)
        else "other elementwise"
    )
    if kind != "products and attention" and any(
        part in target
        for part in ("mean", "rsqrt", "sum", "softmax", "loss")
    ):
        kind = "sums and norms"
    kinds[kind].append((1e3 * i.inactive_time, i.recompute_ratio / 1e9))
figure = ratio_plot(
    {kind: pairs for kind, pairs in kinds.items() if pairs},
    link / 2 / 1e9,
    "",
)
path = plots.save(figure, "results/figures/08_ratios.png")
figure

# %% [markdown]
# *Inactive time and recompute ratio of the activations of a language model, with the rates of a T4. The device recomputes
# those above the dashed line faster than the link moves them out and back.*
#
# ## The algorithm
#
# mu-TWO compares two candidates: the activation that stays inactive longest, for swapping, and the one with the highest
# ratio, for recomputation. It takes the one with less overhead, and repeats. The overhead of a swap is the part of its
# copies that does not overlap with compute, for `tanh` $(32.8 - 15.5) + (32.8 - 28.2) = 21.9$ µs. The link carries one
# copy at a time: `Link` records how much of each operation's time (`costs`) can still overlap with a copy. `drop` marks
# an activation for recomputation and updates the ratios and times of the others.

# %%
link_time, retained, dropped, swaps = (
    Link(costs(graph, profile), graph.boundary),
    list(intermediates),
    [],
    [],
)
while candidates := [i for i in retained if i not in swaps]:
    swap = max(candidates, key=lambda i: i.inactive_time)
    recompute = max(candidates, key=lambda i: i.recompute_ratio)
    waits, seconds = link_time.overhead(swap), recompute.total_recomp_time
    names = graph.nodes[swap.rank].name, graph.nodes[recompute.rank].name
    print(
        f"swap {names[0]:7} for {1e6 * waits:4.1f} µs or "
        f"recompute {names[1]:7} for {1e6 * seconds:4.1f} µs? ",
        end="",
    )
    if seconds < waits:
        drop(recompute, dropped, retained)
    else:
        link_time.overhead(swap, spend=True)
        swaps.append(swap)
    print("recompute" if seconds < waits else "swap")

# %% [markdown]
# Swapping wins where the copies add little time, for `tanh_1` none.
#
# The paper stops as soon as its estimate of the peak fits (as printed, the estimate never falls: see the appendix).
# `ackpt.plan(graph, budget, policy="mu-two")` continues to the end, because an estimate may be wrong: it simulates the
# schedule after every choice, and takes the cheapest that fits.
#
# ## Each choice changes the other ratios
#
# Without a link to the host, mu-TWO, run to its end, recomputes everything. The ratio of each activation after every
# choice, in GB/s:

# %%
no_link = replace(profile, swap_seconds=None)
names = [graph.nodes[i.rank].name for i in intermediates]
print(f"{'dropped':9}" + "".join(f"{name:>9}" for name in names))
for state in states(graph, no_link):
    now = {
        graph.nodes[i.rank].name: f"{i.recompute_ratio / 1e9:.1f}"
        for i in state.kept
    }
    chosen = graph.nodes[state.chosen.rank].name if state.chosen else ""
    print(
        f"{chosen:9}"
        + "".join(f"{now.get(name, '-'):>9}" for name in names)
    )

# %% [markdown]
# - `tanh_4` has the highest ratio and is dropped first. It is computed from `tanh_3`. If `tanh_3` were dropped, too, it
#   would be recomputed twice: once for itself and once on the way to `tanh_4`. So the ratio of `tanh_3` halves. `addmm_5`
#   has lost its source: recomputing it would now take two layers.
# - `tanh_1` loses its source when `tanh` is dropped, and its ratio halves when `tanh_2` is.
#
# A chain of dropped activations can be recomputed *once*, with each member live until its last use, or for *each* of
# its members, as in the paper. With everything dropped:

# %%
for name, schedule in zip(
    ("once", "each"), schedules_of(graph, no_link, state)
):
    simulated = simulate(graph, no_link, schedule)
    added = simulated.recompute_flops / (
        simulated.flops - simulated.recompute_flops
    )
    print(
        f"{name}: peak {simulated.peak_bytes / 1024:.0f} "
        f"KiB, {added:.0%} more FLOPs"
    )
peak = simulate(graph, no_link, everything(graph)).peak_bytes
print(f"baseline: peak {peak / 1024:.0f} KiB")

# %% [markdown]
# Recomputing once is cheaper, but here it needs as much memory as the baseline. `ackpt` tries both orders after every
# choice.
#
# :::{admonition} Takeaway
# :class: tip
# An activation that was cheap to recompute becomes expensive once its sources are dropped, so all ratios are updated
# after every choice. A set of choices becomes a plan only when its order is fixed.
# :::
#
# ## The exact optimum
#
# The network is small enough for an exact answer. The policy `ilp` solves an integer program: no plan for this order of
# operations adds less time. `auto`, *plan* in the tables, is the default policy; {doc}`13_rotor` describes both. The
# budget is 80 % of the baseline's dynamic peak:

# %%
policies = {"mu-two": "mu-two", "auto": "auto", "ilp": ilp.ilp}
plans = {
    name: ackpt.plan(graph, 0.8, policy, profile=no_link)
    for name, policy in policies.items()
}
for policy, plan in plans.items():
    names = ", ".join(
        name for name, fate in plan.fates.items() if fate == "recomputed"
    )
    peak = plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
    print(
        f"{policy:6} recomputes {names:12} peak "
        f"{peak:.0%}, added time {plan.cost:.1%}"
    )
assert plans["ilp"].cost <= plans["mu-two"].cost

# %% [markdown]
# The optimum recomputes only `tanh`. mu-TWO also recomputes `tanh_4`, which it dropped first for its high ratio. This
# gains nothing: `tanh_4` is already freed at the peak. The ratio takes into account bytes and time, but not *when* the
# bytes are live, and a greedy algorithm never takes back a choice.
#
# ## When a copy is free
#
# Whether copies overlap with compute depends on the device, too. Take a language model of two blocks with 4,096 tokens,
# and halve its dynamic peak. The plans are **simulated** on three streams: compute, copies out, copies in.

# %% tags=["hide-input"]
def wide_graph(width):
    sizes = {"dim": width, "ff_dim": 4 * width, "head_dim": 64, "vocab_size": 1024}
    with FakeTensorMode():
        ids, starts = torch.empty(4096).long(), torch.empty(9).int()
        return ackpt.trace(models.LanguageModel(models.TransformerConfig(**sizes, layers=2)), ids, starts, 512, ids)


rows, lanes = [], {}
for width in (256, 1024):
    wide = wide_graph(width)
    for name in ("t4", "h200"):
        rates = ackpt.profile(wide, name)
        recomputed = ackpt.plan(wide, 0.5, "mu-two", profile=replace(rates, swap_seconds=None))
        both = ackpt.plan(wide, 0.5, "mu-two", profile=rates)
        row = {"width": width, "device": name.upper(), "without": round(100 * recomputed.cost, 1)}
        rows.append(row | {"with": round(100 * both.cost, 1), "host": round(both.host_bytes / MIB)})
        if (width, name) == (1024, "t4"):
            baseline = ackpt.plan(wide, policy="none", profile=rates)
            lanes = {"height": 2.1, "dotted": "device peak of the baseline"}
            lanes["without"] = {"peak_bytes": baseline.dynamic_peak_bytes}
            halved = {"recomputed": recomputed, "swapped": both}
            lanes["variants"] = [{"label": name} | shown(wide, rates, plan.schedule) for name, plan in halved.items()]
            lanes["seconds"] = max(each["seconds"] for each in lanes["variants"])
path = plots.save(schematics.lanes_figure(lanes), "results/figures/08_swapped.png")
columns = {"width": "width", "device": "rates of", "without": "no link: added time, %"}
columns |= {"with": "link: added time, %", "host": "link: in host memory, MiB"}
caption = "mu-TWO plans for half of the dynamic peak, without and with a link; fp32, simulated from data sheets."
table = markdown_table(rows, columns, caption, "tab-link")
path = write_text_atomic("results/tables/08_link.md", table)

# %% [markdown]
# ```{include} ../../results/tables/08_link.md
# ```
#
# {ref}`The figure at the top <fig-swapped>` shows the plans for width 1,024 and a T4. The T4 is slow, so all copies
# overlap with the products of this width, and halving the peak is free. The H200 computes narrow layers faster than the
# link copies their outputs: at width 256, mu-TWO even costs more with the link than without. mu-TWO follows one greedy
# path; the plan without swaps is not on it.
#
# {doc}`05_offload` derives from which width on all copies overlap. In fp32, the outputs of a layer of width $d$ do if
# $d \ge 2 \rho / \lambda$, where $\rho$ is the device's rate in FLOPs per second, and $\lambda$ the link's in bytes per
# second ({ref}`a table <tab-offload-pays>` for three devices). For *inputs of blocks*, $d$ may be smaller: a block computes
# twelve times as much.
#
# :::{admonition} Takeaway
# :class: tip
# Swap the outputs of all layers if $d \ge 2 \rho / \lambda$. In narrower models only some copies overlap: compare each
# swap with its recomputation.
# :::
#
# ## The largest batch
#
# The peak of a step is nearly linear in the batch size $B$: $C_0 + C_1 B$. Parameters, gradients and optimizer state are
# in $C_0$; the activations are in $C_1 B$, and only they can be recomputed. A budget of $M$ bytes therefore allows
#
# $$ B = \left\lfloor \frac{M - C_0}{C_1} \right\rfloor . $$
#
# We predict $B$ for a Transformer with sequences of 32 tokens, then run it on this CPU. The budget is the peak of the
# baseline with 16 sequences.

# %%
def inputs(batch):
    ids = torch.randint(256, (32 * batch,))
    return (
        ids,
        torch.arange(0, 32 * batch + 1, 32, dtype=torch.int32),
        32,
        ids.roll(-1),
    )


def train(batch, *, regions=False, budget=None):
    """The measured peak of a step in bytes, and its plan, if it has one."""
    model, args = (
        models.LanguageModel(models.TransformerConfig(**sizes, layers=2)),
        inputs(batch),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    forward = model
    if regions:
        ackpt.apply_activation_checkpointing(model)  # one region per block
    if budget:
        forward = ackpt.compile(
            model,
            *args,
            budget=budget,
            policy="mu-two",
            optimizer=optimizer,
        )

    def step():
        optimizer.zero_grad()
        forward(*args).backward()
        optimizer.step()

    resident = model, optimizer, args[0], args[1], args[3]
    return ackpt.measure(
        step, resident=resident, repeats=0
    ).peak_bytes, getattr(forward, "plan", None)

# %%
budget, _ = train(16)
options = {
    "baseline": {},
    "per-block": {"regions": True},
    "mu-two": {"budget": 0.4},
}
largest = {}
for method, how in options.items():
    small, large = (train(batch, **how)[0] for batch in (16, 32))
    slope = (large - small) / 16
    largest[method] = int((budget - (small - 16 * slope)) / slope)
    print(
        f"{method:9} {slope / 1024:5.1f} KiB per sequence: "
        f"{largest[method]} sequences in {budget / MIB:.2f} MiB"
    )

# %%
size, _ = train(largest["per-block"], regions=True)
planned_size, plan = train(largest["mu-two"], budget=budget)
assert max(size, planned_size) <= budget
print(
    f"per-block {size / MIB:.2f} MiB, mu-two "
    f"{planned_size / MIB:.2f} MiB for {plan.cost:.0%} added time"
)

# %% [markdown]
# Both peaks are within the budget.
#
# ## A ResNet-152
#
# A published reproduction of mu-TWO reports memory and time of a ResNet-152. Its pipeline did not run mu-TWO, and its two
# columns measured different things ({doc}`14_published` shows why). So we predict the same network, from shapes:

# %% tags=["hide-input"]
reference = load_reference("mu-two-resnet")
curves = BatchCurves().curves("h100-80g")
peaks = [Predictions().of(row) for row in published_peaks() if row["step"] == "reference-resnet"]
measured = gpu_records("batch-size", model="resnet152", trains=False)
rows = batch_report.published_rows(reference, peaks, curves["resnet152"], measured)
columns = {"batch": "batch", "without peak": "baseline, MiB", "per-block peak": "per-block, MiB"}
columns |= {"per-block time": "per-block: added time, %", "mu-two peak": "mu-TWO, MiB", "mu-two time": "mu-TWO: added time, %"}
columns |= {"auto peak": "plan, MiB", "auto time": "plan: added time, %", **batch_report.ON_GPU}
caption = (
    "Our ResNet-152 with per-block checkpointing, and with plans of mu-TWO and of `ackpt` within the same peak. Predicted "
    "from shapes and an H100's data sheet: forward and backward in fp32, no copies to the host."
)
path = write_text_atomic("results/tables/08_resnet.md", markdown_table(rows, columns, caption, "tab-resnet"))

# %% [markdown]
# ```{include} ../../results/tables/08_resnet.md
# ```
#
# Per-block checkpointing costs 30 % of the step; mu-TWO costs 10 % to 13 % for the same peak.

# %% tags=["hide-input"] alt="Bars in four groups, in percent of the baseline, for per-block checkpointing, mu-TWO and a plan: the peak and the time of a ResNet-152, and of a Transformer. All peaks are alike within a group. Per-block checkpointing takes longest for the ResNet, mu-TWO for the Transformer; the plan is never slower than either."
NAMES = {"without": "baseline", "per-block": "per-block", "mu-two": "mu-TWO", "auto": "plan"}
largest = {"ResNet-152": curves["resnet152"][64], "Transformer": curves["lm"][256]}
groups = [f"{model}\n{what}" for model in largest for what in ("peak", "time")]
shares = {
    NAMES[method]: [
        100 * at[method][key] / at["without"][key] for at in largest.values() for key in ("peak_bytes", "seconds")
    ]
    for method in ("per-block", "mu-two", "auto")
}
figure = bar_plot(groups, shares, "", ylabel="% of the baseline's", unit=1)
path = plots.save(figure, "results/figures/08_batches.png")
figure

# %% [markdown]
# *Peak and time of a step, predicted for an H100: 64 images with a ResNet-152, and a batch of 256 with a Transformer of
# the sizes of the course for which the pipeline was written (6 blocks of width 512, 8 heads, 128 tokens, a vocabulary
# of 30,000).*
#
# mu-TWO's greedy choices add 26 % to the Transformer's step, per-block checkpointing and the plan 14 %. Recomputation
# cannot free the logits, so the Transformer's peak falls by at most 36 %. The last column is the batch that fits into
# 11.4 GiB, the largest memory in the published table:

# %%
memory = max(row["peak"] for row in reference["rows"]) * MIB
points = curves["lm"].items()
batches = [*curves["lm"]]
for method, name in NAMES.items():
    at, base = (
        largest["Transformer"][each] for each in (method, "without")
    )
    peak = 1 - at["peak_bytes"] / base["peak_bytes"]
    time = at["seconds"] / base["seconds"] - 1
    peaks = [each[method]["peak_bytes"] for _, each in points]
    batch = int(np.interp(memory, peaks, batches))
    print(f"{name:9} peak -{peak:.0%}, time +{time:.0%}, batch {batch}")

# %% [markdown]
# So the batch of the Transformer grows by about half. What a plan changes in the step of a ResNet-50:

# %% tags=["hide-input"] alt="Live memory of a step of a ResNet-50, without and with a plan, side by side. Baseline: a ramp up to the peak where backward begins, and a ramp down. Plan: a ramp half as high, and many small teeth on the way down, none higher than the budget."
with FakeTensorMode():
    resnet50 = experiment_models.ResNet(experiment_models.ResNetConfig("bottleneck", (3, 4, 6, 3)))
    images = torch.empty(16, 3, 224, 224)
    resnet_graph = ackpt.trace(resnet50, images, labels=torch.empty(16).long())
resnet_profile = replace(ackpt.profile(resnet_graph, "h100-80g"), swap_seconds=None)
before, after = (ackpt.plan(resnet_graph, profile=resnet_profile, **how) for how in ({"policy": "none"}, {"budget": 0.5}))
both = {"baseline": before.timeline.thinned(800), "plan": after.timeline.thinned(800)}
figure = orders_plot(both, "", before.resident_bytes)
path = plots.save(figure, "results/figures/08_resnet_profile.png")
figure

# %% [markdown]
# *Simulated live memory of a step of ResNet-50 with 16 images: the baseline, and a plan with half of its dynamic peak
# as the budget.*
#
# :::{admonition} Takeaway
# :class: tip
# A peak is nearly linear in the batch size. With ample memory, the ratio of the slopes is the factor by which a plan
# enlarges the batch.
# :::
#
# The numbers on this page were produced in this environment:

# %% tags=["measured-time", "nbval-ignore-output"]
environment("cpu", "notebooks/08_mu_two.py")

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: two readers
# :class: note
# Let $x_1 = \tanh(\ldots)$ be read by $x_2 = \sin x_1$ and $x_3 = \exp x_1$, and let both $x_2$ and $x_3$ be dropped. If
# $x_1$ were dropped, too, how often would backward compute it?
# :::

# %% tags=["solution"]
class Fork(nn.Linear):
    def forward(self, x):
        x1 = super().forward(x).tanh()
        x2, x3 = x1.sin(), x1.exp()
        return ((x2 * x3) * (x2 + x3)).sigmoid()


fork = ackpt.trace(Fork(4, 4), torch.ones(2, 4))
retained = mu_two.intermediates_of(fork, ackpt.profile(fork))
by_name, dropped = {mu_two.name_of(fork, i): i for i in retained}, []
for name in ("sin", "exp"):
    drop(by_name[name], dropped, retained)
    print(f"without {name}: tanh would be computed {by_name['tanh'].recomp_cnt} times")

# %% [markdown]
# Three times: for itself, for $x_2$ and for $x_3$.
#
# :::{admonition} Exercise 2: the largest batch, on paper
# :class: note
# By the table, the ResNet's baseline needs 5,677.7 MiB for 32 images and 11,116.7 MiB for 64; the plan within the peak of
# per-block checkpointing needs 2,210.7 and 4,158.4 MiB. How many images fit into 24 GiB with each, and which factor do
# they approach as memory grows?
# :::

# %% tags=["solution"]
for name, small, large in ("baseline", 5677.7, 11116.7), ("plan", 2210.7, 4158.4):
    slope = (large - small) / 32
    constant = small - 32 * slope
    print(f"{name:8} {constant:5.0f} MiB + {slope:.1f} MiB per image: {int((24 * 1024 - constant) / slope)} images")
print(f"ratio of the slopes: {(11116.7 - 5677.7) / (4158.4 - 2210.7):.2f}")

# %% [markdown]
# The factor approaches the ratio of the slopes, because the constants matter less and less.
#
# ## Llama 3 8B with mu-TWO

# %% tags=["hide-input"] alt="Seven stacked bars. With mu-TWO within 65 GiB, the peak is 64.8 GiB, and the time 1.71 seconds."
from experiments.running_model import bars

figure = bars(8)
path = plots.save(figure, "results/figures/08_running_model.png")
figure

# %% [markdown]
# *The step of {doc}`chapter 1 <01_where_memory_goes>`, planned by mu-TWO within 65 GiB, with its head in chunks;
# predicted.*
#
# mu-TWO keeps the budget, but the step takes 30 % longer than the baseline. It recomputes only 7 % of the FLOPs; most of
# the added time is waiting for copies.
#
# ## Summary
#
# - mu-TWO's choices are greedy, and its ratio ignores when the bytes are live.
# - A copy is free if it overlaps with compute, as on slow devices and in wide models.
#
# You can now compare a swap with a recomputation, and say why the best choice depends on the device.
#
# ## Sources
#
# - {cite:t}`purandare2023`: algorithms A to H.
# - {cite:t}`he2015residual`: ResNets.
#
# ## Appendix: errors in the printed pseudocode
#
# As printed, the paper's algorithms B to G have errors, which `ackpt` corrects:
#
# | algorithm | printed | consequence | here |
# |:--:|---|---|---|
# | B | drops, then asks whether the peak fits | a step that fits loses an activation | asks first |
# | B | recomputes the candidate for swapping | expensive activations are recomputed | the one with the best ratio |
# | C | may return a negative overhead | such swaps always win | at least 0 |
# | E | leaves the total recomputation time stale | chains look cheaper than they are | updated after every choice |
# | F | the second case overwrites the first | recomputations are not counted | recounted |
# | D, E, F | lists of sources | shared ancestors count twice | sets of operations |
# | G | starts with all activations and adds recomputed ones | no choice lowers the estimate | simulated |
#
# Three of these errors in numbers: C for the language model; D for repeated applications of
# $x \leftarrow \sin x \cdot \exp x$, each of which doubles the number of paths; G for the small network.

# %% tags=["hide-input"]
class Tower(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        for _ in range(6):
            x = x.sin() * x.exp()
        return x.sigmoid()


every, run_time = mu_two.intermediates_of(lm_graph, lm_profile), costs(lm_graph, lm_profile)
overheads = [mu_two.printed_overhead(i, run_time, lm_graph.boundary) for i in every]
print(f"C: {sum(seconds < 0 for seconds in overheads)} of {len(overheads)} overheads below zero")
tower = ackpt.trace(Tower(8, 8), torch.ones(64, 8))
tower_profile = replace(ackpt.profile(tower, t4), swap_seconds=None)
every = mu_two.intermediates_of(tower, tower_profile)
*_, end = mu_two.choices(tower, tower_profile)
last = next(i for i in every if mu_two.name_of(tower, i) == "exp_5")
paths, as_set = mu_two.along_paths(every, last), end.recomp_time["exp_5"]
print(f"D: the last exp takes {1e9 * paths:.0f} ns along all paths, {1e9 * as_set:.0f} ns as a set")
first, *_, end = mu_two.choices(graph, no_link)
print(
    f"G: if all are dropped, the estimate goes from {first.printed_bytes:,} to {end.printed_bytes:,} bytes"
)
print(f"   the simulated peak goes from {first.each_bytes:,} to {end.each_bytes:,} bytes")
