# %% [markdown]
# # Offload
#
# **What does offloading activations save, and when does it cost no time?**

# %% [markdown]
# ```{figure} ../../results/figures/05_timelines.png
# :alt: Three memory timelines, one above the other: checkpointing without offload, with sync and with async offload. Without offload, the boundaries rise like a ramp through the forward and step down in backward; the other two have no ramp. Thin bars below the last two are copies: with sync each ends at once, with async they overlap with compute.
# :class: dark-light
#
# Live memory and copies of one checkpointed step on a CPU: without offload, with sync and with async offload.
# ```
#
# If regions offload their inputs, the peak no longer grows with the depth of the model. The copies add no time if a
# region's compute takes longer than the copy of its input, as in wide models or with long sequences. The model computes
# on the *device*; offloaded activations are copied to the *store*: host memory, or a disk.

# %% tags=["hide-input"]
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import ackpt
from ackpt.offloading.cpu_streams import Stream
from ackpt.offloading.store import host_memory

torch.set_num_threads(2)
generator = torch.manual_seed(0)

# %% tags=["hide-input"]
import contextlib
import dataclasses
import math
import textwrap
import threading
import time

from ackpt.metering.meter import measure
from ackpt.models import Block, TransformerConfig
from ackpt.offloading import transport
from ackpt.planner.costs import devices
from experiments import offload
from experiments.pitfalls import copies as pitfalls
from experiments.reports import offload as offload_report
from experiments.reports import plots
from experiments.results import Record, environment, load_reference, markdown_table, write_text_atomic
from experiments.suite.chapters import measure_here

SOURCE = "notebooks/05_offload.py"

# %% [markdown]
# On a GPU, the next two cells also run the published experiment, for at most `minutes`; {doc}`14_published` shows it.

# %% tags=["parameters", "hide-input"]
device, tier, dataset, minutes = "auto", "auto", "embedded", 10

# %% tags=["hide-input", "measured-time", "nbval-ignore-output"]
measure_here(
    "offload", device=device, tier=tier, dataset=dataset, minutes=minutes
)

# %% [markdown]
# :::{admonition} Without a GPU
# :class: note
# On this page the CPU simulates the device, and worker threads the streams of a GPU. The store gets its memory directly
# from the operating system, so its bytes are counted separately. The code that decides when to copy and free is the
# same on a GPU.
# :::
#
# ## Saved tensors on the host
#
# Checkpointing frees what it can recompute. Offload recomputes nothing, but copies every byte out and back. In PyTorch,
# one context around the forward is enough:

# %%
pairs = ((nn.Linear(128, 128, bias=False), nn.GELU()) for _ in range(8))
mlp = nn.Sequential(*(layer for pair in pairs for layer in pair))
rows = torch.randn(1024, 128)


def train(context):
    mlp.zero_grad(set_to_none=False)
    with context:
        loss = mlp(rows).square().mean()
    loss.backward()
    return [weight.grad.clone() for weight in mlp.parameters()]


expected = train(contextlib.nullcontext())
all(map(torch.equal, expected, train(save_on_cpu())))

# %% [markdown]
# ```{margin}
# On a GPU, `host` would be `torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)`.
# ```
#
# `save_on_cpu` installs two functions. Autograd calls *pack* for each tensor that it saves, and *unpack* when backward
# reads the tensor. `save_on_cpu` does not copy tensors on a CPU, so we write a pair that does. Here, the input of a
# layer has $S$ bytes:

# %%
def pack(tensor):
    host = host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


def unpack(host):
    return host.clone()  # the clone is device memory


S = rows.nbytes
for context in (
    contextlib.nullcontext(),
    saved_tensors_hooks(pack, unpack),
):
    step = measure(
        lambda: train(context), resident=(mlp, rows), warmup=0, repeats=0
    )
    peak = step.dynamic_peak_bytes
    print(f"dynamic peak {peak:,} bytes = {peak / S:.1f} S")

# %% [markdown]
# Both peaks are in the backward of the square. The baseline adds the 16 activations that autograd saved besides `rows`;
# the pair adds one, the square's input. Three flaws remain, also in `save_on_cpu`:
#
# 1. **It waits.** Compute stops for every copy.
# 2. **It copies weights.** A linear layer also saves its weight, as the view `w.t()`. Copying it frees nothing.
# 3. **It allocates memory for each tensor.** A GPU can copy while it computes only if the host memory is page-locked,
#    or *pinned*, and pinning can take longer than the copy.
#
# ## Overlapping copies with compute
#
# A GPU has copy engines that work while it computes.

# %% tags=["hide-input"]
from experiments.reports import schematics
from experiments.reports.figures import line_plot
from experiments.widgets.offload_lanes import offload_lanes

schematics.publish(offload_lanes(), "05_lanes")

# %% [markdown]
# ```{schematic-explorer} ../../results/explorer/05_lanes.json
# :image: ../../results/figures/05_lanes.png
# :alt: Two lanes over the time of one training step, compute above copies, with live memory below, for three schedules. If the inputs of the blocks are copied out during the forward and back ahead of their use, compute has no gaps. If they are copied back only when they are needed, compute pauses for each copy. If all activations are copied, the lane of copies is full and the step takes more than twice as long.
# ```
#
# *A step of 12 blocks, checkpointed in the first two schedules, with times predicted for an H200.*
#
# A program uses these engines through a second *stream*, a queue whose work runs in order. *Events* synchronize two
# streams: an event marks the end of a piece of work, and work in another stream can wait for it. On a CPU, one worker
# thread per queue does the same:

# %%
compute, copies = Stream("compute"), Stream("copies")
order, passed = [], threading.Event()
copied = copies.submit(lambda: (passed.wait(), order.append("a long copy")))
compute.submit(lambda: (order.append("computing"), passed.set()))
compute.submit(
    order.append, "computing after the copy", after=[copied]
).wait()
order

# %% [markdown]
# An asynchronous pair submits the copy and continues. Unpack waits for the event of the copy:

# %%
@torch.no_grad()
def copy(target, source):
    target.copy_(source)


def pack_async(tensor):
    host = host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return host, copies.submit(copy, host, tensor)


def unpack_async(packed):
    host, copied = packed
    copied.wait()
    return host.clone()


all(
    map(
        torch.equal,
        expected,
        train(saved_tensors_hooks(pack_async, unpack_async)),
    )
)

# %% [markdown]
# On a GPU, the same lines are
#
# ```python
# copies = torch.cuda.Stream()
# copies.wait_stream(torch.cuda.current_stream())  # the tensor must be complete
# with torch.cuda.stream(copies):
#     host.copy_(tensor, non_blocking=True)  # host memory is pinned; keep `tensor` until `copied`
# copied = copies.record_event()
# torch.cuda.current_stream().wait_event(copied)  # before backward reads a copy back
# ```
#
# ## Five rules for copies
#
# In `pack_async`, the submitted work refers to `tensor` until the copy has run. Without this reference, the allocator
# could give the memory to the next tensor before it is copied. Here this *race* always corrupts the copy:

# %%
def race(wait_for_copy):
    block, host, passed = torch.ones(4), torch.zeros(4), threading.Event()
    copied = copies.submit(lambda: (passed.wait(0.2), host.copy_(block)))
    after = [copied] if wait_for_copy else []
    # the next tensor
    reused = compute.submit(
        lambda: (block.fill_(2), passed.set()), after=after
    )
    copied.wait(), reused.wait()
    return host.tolist()


race(wait_for_copy=False), race(wait_for_copy=True)

# %% [markdown]
# Implementations in use have had this bug and four more. Each runs here without and with its fix:

# %% tags=["hide-input"]
columns = {name: name for name in ("bug", "with the bug", "fix", "with the fix")}
caption = (
    "Five bugs of asynchronous copies. The last one only costs time; its row counts the buffers that 6 steps with 8 "
    "tensors each allocate."
)
table = markdown_table(pitfalls.outcomes(), columns, caption, "tab-copies")
path = write_text_atomic("results/tables/05_copies.md", table)

# %% [markdown]
# ```{include} ../../results/tables/05_copies.md
# ```
#
# {doc}`../pitfalls` has the code of each.
#
# :::{admonition} Takeaway
# :class: tip
# Four rules make an asynchronous copy correct. It starts after the work in the *current* compute stream. Its event is
# recorded after the copy. The device memory that it reads or writes is freed only after that event. Its buffer is
# reused only after that event. A fifth rule makes copies fast: allocate buffers once.
# :::
#
# ## Offload in `ackpt`
#
# `ackpt.offload_saved_tensors` follows these rules. Its mode `sync` waits for every copy. The default, `async`,
# overlaps the copies and prefetches for backward:

# %%
{
    mode: all(
        map(torch.equal, expected, train(ackpt.offload_saved_tensors(mode)))
    )
    for mode in ("sync", "async")
}

# %% [markdown]
# It copies *storages*, not tensors. Queries, keys and values are often views of one matrix product's output, whose
# memory is freed only with the last view. Below, autograd saves the three views and the product of the first two: four
# tensors in two storages.

# %%
x = torch.randn(256, 768, requires_grad=True)
with ackpt.offload_saved_tensors(keep_last=0) as engine:
    engine.reset_stats()
    queries, keys, values = (2 * x).chunk(3, dim=1)
    loss = (queries * keys * values).sum()
counts = engine.stats()
del loss  # and with its graph, the bytes in the store
(
    {name: counts[name] for name in ("copies_out", "shared", "bytes_out")},
    (3 + 1) * 256 * 256 * 4,
)

# %% [markdown]
# It does not copy:
#
# - **Parameters and buffers**, and views of them, which it recognizes by their storage.
# - **Small tensors**, below `min_bytes`: every copy has a fixed overhead.
# - **The last `keep_last` storages**: backward reads them before their copies could have ended.
#
# The multilayer perceptron above saves 17 activations of $S$ bytes: the inputs of 8 linear layers and of 8 GELUs, and
# the last output.

# %%
for options in (
    {"keep_last": 0},
    {"keep_last": 1},
    {"keep_last": 4},
    {"min_bytes": S + 1},
):
    engine.reset_stats()
    train(ackpt.offload_saved_tensors(**options))
    counts = engine.stats()
    print(
        f"{options!s:20} {counts['copies_out']:2} "
        f"copies, {counts['bytes_out'] / S:.0f} S"
    )

# %% [markdown]
# ## How much offload lowers the peak
#
# Usually it is best to recompute most activations and offload only the inputs of regions. The argument `offload=` of
# `checkpoint`, `checkpoint_sequential` and `apply_activation_checkpointing` does this.
#
# Take $k$ equal regions with inputs of $S$ bytes. Without offload, memory rises like a ramp to $k \, S$ when backward
# begins, as in the figure at the top. The recomputation of the last region then adds its activations: this is the peak.
# With offload, the inputs live at the peak are
#
# - the last region's, which backward needs first;
# - the $k_0$ inputs that something else also references, usually only the batch.
#
# The copy back of region $i$'s input starts halfway through region $i + 1$'s backward, when half of the recomputed
# activations are freed. So the peak falls:
#
# $$ \text{peak}_\text{checkpoint} - \text{peak}_\text{offload} = (k - 1 - k_0) \, S $$
#
# (If backward allocates gradients, the peak may be elsewhere: {doc}`04_experiments`.) We check regions of four SiLU
# functions with $k_0 = 1$. Zeros mean that the formula holds, in both modes:

# %%
x = torch.randn(2**16, requires_grad=True)
S = x.nbytes  # of a region's input


def region(a):
    for _ in range(4):
        a = F.silu(a)
    return a


def chain(k, mode, a=x):
    for _ in range(k):
        # it draws no random numbers
        a = ackpt.checkpoint(
            region, a, offload=mode, preserve_rng_state=False
        )
    return a


def peak_of(forward):
    def step():
        x.grad.zero_()
        y = forward()
        y.square().sum().backward()

    x.grad = torch.zeros_like(x)
    return measure(
        step, resident=[x], warmup=0, repeats=0
    ).dynamic_peak_bytes


ks = [4, 8, 16, 32]
peaks = {
    str(mode): [peak_of(lambda: chain(k, mode)) for k in ks]
    for mode in (None, "sync", "async")
}
[
    (without - sync - (k - 2) * S, sync - overlapped)
    for k, without, sync, overlapped in zip(ks, *peaks.values())
]

# %% alt="Dynamic peak against the number of regions: without offload it rises by one input per region along the predicted line; with offload it is the same horizontal line in both modes."
constant = [peaks["sync"][0]] * len(ks)
ramp = [constant[0] + (k - 2) * S for k in ks]
shown = {
    "no offload": peaks["None"],
    "sync": peaks["sync"],
    "async": peaks["async"],
}
lines = {"no offload": ramp, "sync": constant}
figure = line_plot(
    ks, shown, lines, "", xlabel="regions", ylabel="dynamic peak (MiB)"
)
path = plots.save(figure, "results/figures/05_regions.png")
figure

# %% [markdown]
# *Without offload, each region adds one input to the peak. With offload, the peak is constant.*
#
# `async` prefetches the inputs in the reverse order of the forward. `lookahead_bytes` bounds what is prefetched, by
# default to one input. Prefetching everything at once would move the ramp to the beginning of backward.
#
# :::{admonition} Takeaway
# :class: tip
# With offloaded inputs, the device needs memory for one region at a time, however deep the model is.
# :::
#
# :::{admonition} Exercise 1: no input has another owner
# :class: note
# The first region's input is $x$, which belongs to the caller. Change the chain so that $k_0 = 0$. By how much does
# offload then lower the peak?
# :::

# %% tags=["solution"]
# Multiplying by a constant saves nothing, and only the first region needs the product.
pair = [peak_of(lambda: chain(8, mode, x * 2)) for mode in (None, "async")]
print(f"{(pair[0] - pair[1]) / S:.0f} S; k - 1 = {8 - 1}")

# %% [markdown]
# ## With and without recomputation
#
# We train 12 Transformer blocks in five ways. Which has the lowest peak, and which needs the most host memory?

# %%
config = TransformerConfig(dim=64, ff_dim=256, layers=12, head_dim=16)
blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
tokens = torch.randn(512, 64)
offsets = torch.tensor([0, 512], dtype=torch.int32)


def train_blocks(checkpointed, offload_inputs=None, offload_all=None):
    blocks.zero_grad(set_to_none=False)
    a = tokens
    with (
        ackpt.offload_saved_tensors(offload_all)
        if offload_all
        else contextlib.nullcontext()
    ):
        for block in blocks:
            if checkpointed:
                a = ackpt.checkpoint(
                    block, a, offsets, 512, offload=offload_inputs
                )
            else:
                a = block(a, offsets, 512)
        loss = (a - tokens).square().mean()
    loss.backward()
    return [weight.grad.clone() for weight in blocks.parameters()]


ways = {
    "baseline": (False,),
    "offload": (False, None, "async"),
    "checkpoint": (True,),
}
ways |= {
    "checkpoint, sync offload": (True, "sync"),
    "checkpoint, async offload": (True, "async"),
}
expected = train_blocks(False)
{
    way: all(map(torch.equal, expected, train_blocks(*arguments)))
    for way, arguments in ways.items()
}

# %% tags=["hide-input"]
way_rows, records = [], []
resident, where = (blocks, tokens, offsets), environment("cpu", SOURCE)
for way, arguments in ways.items():
    step = measure(lambda: train_blocks(*arguments), resident=resident, warmup=0, repeats=0)
    row = {"way": way, "peak": round(step.dynamic_peak_bytes / 2**20, 2)}
    way_rows.append(row | {"store": round(step.store_peak_bytes / 2**20, 2)})
    metrics = {"peak_bytes": step.peak_bytes, "resident_bytes": step.resident_bytes}
    metrics["timeline"] = step.timeline.thinned(600).to_json()
    records.append(Record("offload-ways", {"method": way}, metrics, where))
without, sync, overlapped = (record.metrics["peak_bytes"] for record in records[2:])
assert without - sync == without - overlapped == (len(blocks) - 1 - 1) * tokens.nbytes
columns = {"way": "method", "peak": "dynamic peak, MiB", "store": "peak of the store, MiB"}
caption = "Peaks of 12 Transformer blocks with and without checkpointing and offload (512 tokens of width 64, fp32)."
path = write_text_atomic("results/tables/05_ways.md", markdown_table(way_rows, columns, caption, "tab-ways"))

# %% [markdown]
# ```{include} ../../results/tables/05_ways.md
# ```
#
# Offloading the inputs lowers the checkpointed peak by ten inputs, $(k - 1 - k_0) \, S$. Offloading all activations
# gives the lowest peak, but copies twenty times the bytes.

# %% alt="Three memory timelines, one above the other: checkpointing without offload, with sync and with async offload. Without offload, the boundaries rise like a ramp through the forward and step down in backward; the other two have no ramp. Thin bars below the last two are copies: with sync each ends at once, with async they overlap with compute."
figure = offload_report.timelines_plot(records, "", [*ways][2:])
path = plots.save(figure, "results/figures/05_timelines.png")
figure

# %% [markdown]
# *Offloading the inputs removes the ramp. Bars are copies; with `async`, they overlap with compute.*
#
# :::{admonition} Exercise 2: fit your own model within a budget
# :class: note
# Halve the dynamic peak of the 12 blocks, or of your own model, with as little recomputation as possible: `check_fn` of
# `apply_activation_checkpointing` chooses the blocks that become regions. How many? The first blocks or the last?
# :::

# %% tags=["solution"]
# A block saves 10 d + 2 f + 3 h + 2 elements per token, as chapter 1 derives; a region saves d. Let the first blocks
# be regions: the other blocks are done when recomputation begins, so the peak stays at the start of backward. If the
# last blocks are regions, the recomputation of the last one comes on top of all that is saved.
per_token = 10 * config.dim + 2 * config.ff_dim + 3 * config.heads + 2
freed = 4 * len(tokens) * per_token - tokens.nbytes  # by each region


def peak_with(chosen):
    if chosen:
        ackpt.apply_activation_checkpointing(blocks, lambda module: any(module is block for block in chosen))
    peak = measure(lambda: train_blocks(False), resident=resident, warmup=0, repeats=0).dynamic_peak_bytes
    ackpt.remove_activation_checkpointing(blocks)
    return peak


baseline_peak = peak_with([])
count = math.ceil(baseline_peak / 2 / freed)
print(f"{count} blocks must be regions; budget {baseline_peak / 2:,.0f} bytes")
choices = {f"the first {count}": blocks[:count], f"the first {count - 1}": blocks[: count - 1]}
choices[f"the last {count}"] = blocks[-count:]
peaks_by_choice = {name: peak_with(chosen) for name, chosen in choices.items()}
assert [baseline_peak - peak for peak in peaks_by_choice.values()][:2] == [count * freed, (count - 1) * freed]
peaks_by_choice

# %% [markdown]
# ## When copies add no time
#
# A copy adds no time if it ends while the device computes. Let a block's forward take $t_\text{fwd}$ seconds, its
# backward without recomputation $t_\text{bwd}$, and let the link to the store carry $\lambda$ bytes per second in each
# direction.
#
# - **Out.** The copies of two consecutive inputs start one forward apart, so each may take $t_\text{fwd}$.
# - **In.** A copy back starts halfway through the previous backward, so it may take $t_\text{bwd} / 2$. Each matrix
#   product of the forward has two in backward, so this is also about $t_\text{fwd}$.
#
# Both copies overlap completely if $S / \lambda \le t_\text{fwd}$. A block's input, one sequence of $T$ tokens of width
# $d$, has $S = e \, d \, T$ bytes at $e$ bytes per element. On a device with $\rho$ FLOPs per second, a Transformer
# block with $4 d$ in the MLP computes
#
# $$ t_\text{fwd} = \frac{24 \, d^2 \, T + 4 \, d \, T^2}{\rho} , \qquad \frac{S}{\lambda} \le t_\text{fwd}
#    \;\Longleftrightarrow\; T \ge T_\text{overlap} = \frac{e \, \rho}{4 \lambda} - 6 d . $$
#
# If $d \ge e \, \rho / (24 \lambda)$, offload adds no time at any length. The same comparison applies to other
# activations: the output of a single layer must overlap with $2 \, d^2 \, T$ FLOPs, so $d \ge e \, \rho / (2 \lambda)$.
# All activations of a block are about 18 times its input, so $d \ge 18 \, e \, \rho / (24 \lambda)$.

# %% tags=["hide-input"]
width_rows = []
for name, half in (("t4", "float16"), ("a100-80g", "bfloat16"), ("h100-80g", "bfloat16")):
    for dtype, size in ((half, 2), ("float32", 4)):
        rates = devices.device(name)
        rate, bandwidth = rates.flops_per_second[dtype], rates.link_bytes_per_second
        row = {"device": name.split("-")[0].upper(), "dtype": dtype, "rate": f"{rate / 1e12:.4g}"}
        per_width = size * rate / bandwidth
        least = {"inputs": per_width / 24, "length": max(0, per_width / 4 - 6 * 512)}
        least |= {"outputs": per_width / 2, "all": 18 * per_width / 24}
        rounded_up = {name: f"{math.ceil(round(value, 6)):,}" for name, value in least.items()}
        width_rows.append(row | {"link": f"{bandwidth / 1e9:.0f}"} | rounded_up)
columns = {"device": "device", "dtype": "dtype", "rate": "$\\rho$, TFLOP/s", "link": "$\\lambda$, GB/s"}
columns |= {"inputs": "inputs of blocks, $d \\ge$", "length": "at $d = 512$, $T \\ge$"}
columns |= {"outputs": "outputs of layers, $d \\ge$", "all": "all activations, $d \\ge$"}
caption = (
    "When offload adds no time, from the rates of data sheets: the smallest width that suffices at any length, and for "
    "inputs of blocks, the smallest length at width 512."
)
path = write_text_atomic("results/tables/05_pays.md", markdown_table(width_rows, columns, caption, "tab-offload-pays"))

# %% [markdown]
# ```{include} ../../results/tables/05_pays.md
# ```
#
# In 16 bits, copies of block inputs add no time at width 4,096 on any of these GPUs, and at width 512 on a T4. A real
# GPU is slower than its data sheet: at half the rate, half the width is enough.
#
# With measured times, `ackpt.offload_pays` evaluates the condition. To see a crossover on this machine, we use
# attention alone, and copies that sleep to simulate a slow link:

# %%
def attend(a):
    return F.scaled_dot_product_attention(a, a, a)


def attend_six_times(a, offload):
    for _ in range(6):
        a = ackpt.checkpoint(attend, a, offload=offload)
    a.sum().backward()


# %% tags=["hide-input"]
lengths, bytes_per_token = [256, 512, 1024, 1536], 4 * 32 * 4
slow = ackpt.offload_saved_tensors("async", min_bytes=1024)
real_move = transport._move


def sequence(T):
    return torch.randn(1, 4, T, 32, requires_grad=True)


def block_seconds(T):
    """Seconds of one region's forward and backward: medians of five runs."""
    runs = []
    for _ in range(6):
        a, times = sequence(T), [time.perf_counter()]
        y = attend(a)
        times.append(time.perf_counter())
        y.sum().backward()
        runs.append((times[1] - times[0], time.perf_counter() - times[1]))
    return [sorted(column)[2] for column in zip(*runs[1:])]


def overlapped_share(T):
    for _ in range(2):
        slow.engine.reset_stats()
        attend_six_times(sequence(T), slow)
    counts = slow.engine.stats()
    share = 1 - counts["seconds_stalled"] / counts["seconds_copying"]
    return max(0.0, share), counts["seconds_copying"] / (counts["copies_out"] + counts["copies_in"])


def slow_move(buffer, target, source, size):
    time.sleep(size / link)
    real_move(buffer, target, source, size)


seconds = {T: block_seconds(T) for T in lengths}
forward, backward = ({T: pair[way] for T, pair in seconds.items()} for way in (0, 1))
link = bytes_per_token * 1024 / min(forward[1024], backward[1024] / 2)
transport._move = slow_move
shares = {T: overlapped_share(T) for T in lengths}
transport._move = real_move

# %% tags=["measured-time", "nbval-ignore-output"]
fits = []
for T in lengths:
    pays = ackpt.offload_pays(
        bytes_per_token,
        forward,
        backward_seconds=backward,
        bandwidth=link,
        tokens=T,
    )
    fits.append(pays)
    print(
        f"{T:4} tokens: predicted overlap "
        f"{pays.overlapped_share:4.0%}, measured {shares[T][0]:4.0%}"
    )
print(textwrap.fill(str(pays), 76))

# %% tags=["measured-time", "nbval-ignore-output"] alt="Milliseconds per region against tokens: the copy is a straight line; forward and half of backward are curves that start below it and cross it between 512 and 1536 tokens. Measured points scatter around the lines."
points = {
    "copy": [shares[T][1] for T in lengths],
    "forward": list(forward.values()),
}
points["half of backward"] = [seconds / 2 for seconds in backward.values()]
curves = {
    "copy": [fit.copy_seconds for fit in fits],
    "forward": [fit.forward_seconds for fit in fits],
}
curves["half of backward"] = [fit.backward_seconds / 2 for fit in fits]
line_plot(
    lengths,
    points,
    curves,
    "",
    xlabel="tokens in the sequence",
    ylabel="one region (ms)",
    unit=1e-3,
)

# %% [markdown]
# *Attention is quadratic in the tokens, the copy linear: beyond some length, compute takes longer.* Measured overlap
# stays below 100 %: the model ignores latencies, and times of threads on a busy CPU vary widely.
#
# :::{admonition} Exercise 3: how wide must a model be?
# :class: note
# A GPU computes $4 \cdot 10^{14}$ FLOPs per second in bf16, and its link carries 25 GB/s. Above which width do the
# copies of block inputs overlap completely at any length? And at $d = 1024$, above which length? Then ask
# `offload_pays`.
# :::

# %% tags=["solution"]
rate, bandwidth, d = 4e14, 25e9, 1024
print(f"d >= {math.ceil(rate / (12 * bandwidth))} for any T; T_overlap = {math.ceil(rate / (2 * bandwidth) - 6 * d)}")
seconds = {T: (24 * d**2 * T + 4 * d * T**2) / rate for T in (1024, 2048, 4096)}
print(textwrap.fill(str(ackpt.offload_pays(2 * d, seconds, bandwidth=bandwidth)), 76))

# %% [markdown]
# ## Which activations to offload
#
# If the link cannot carry all activations, offload those with the longest *inactive time*, between the last use in the
# forward and the first use in backward: in a chain, the first ones. {doc}`08_mu_two` decides between copying and
# recomputing for each activation. {doc}`14_published` predicts a published experiment on a T4, peaks and times.

# %% tags=["hide-input"]
modes = tuple(row["method"] for row in load_reference("offload")["rows"])
published = dataclasses.replace(offload.GPU, methods=modes)
for record in offload.predict_offload(published, SOURCE):  # for the tables of later pages
    path = record.save(f"results/cpu/05_{offload_report.file_name(record)}")

# %% [markdown]
# ## Llama 3 8B with offload

# %% tags=["hide-input"] alt="Five stacked bars. With the inputs of blocks offloaded, the peak is 68.9 GiB, and the time 1.64 seconds."
from experiments.running_model import bars

figure = bars(5)
path = plots.save(figure, "results/figures/05_running_model.png")
figure

# %% [markdown]
# *The step of {doc}`chapter 1 <01_where_memory_goes>` with per-block checkpointing, and the inputs of blocks offloaded;
# predicted.*
#
# Offload lowers the peak from 72.9 to 68.9 GiB and adds no time: each copy ends before the forward of its block does.
# The head in chunks, without offload, lowers it more: to 62.2 GiB ({doc}`04_logits`).
#
# You can now say from width, bandwidth and compute rate whether a copy is free.
