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
# After this chapter you can copy activations to host memory while the model computes, and you know the rules that make
# such copies correct. You can predict the saved memory to the byte, and say when offload adds no time.
#
# :::{admonition} Symbols of this chapter
# :class: dropdown
#
# | symbol | meaning |
# |:--:|---|
# | $n$ | checkpointed regions, one after another |
# | $S$ | bytes of one region's input |
# | $h$ | inputs of regions that stay live anyway, because they have another owner |
# | $T$ | tokens in the sequence; $S = s \, T$ with $s$ bytes per token |
# | $\rho$, $\lambda$ | FLOPs per second of the device, bytes per second of the link to the store in each direction |
# | $F(T)$, $R(T)$ | seconds of a block's forward, and of its backward without recomputation |
# :::
#
# The model computes on the *device*. Offloaded activations are copied to the *store*: host memory, or a disk.

# %%
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
import functools
import math
import threading
import time

from ackpt.metering import plots
from ackpt.metering.meter import measure
from ackpt.models import Block, TransformerConfig
from ackpt.offloading import transport
from ackpt.planner.costs.devices import device
from experiments import offload
from experiments.pitfalls import copies as pitfalls
from experiments.predicted_curves import Timelines
from experiments.published import Predictions, time_ratios
from experiments.published import rows as published_peaks
from experiments.reports import offload as offload_report
from experiments.reports.gpu_records import gpu_records
from experiments.results import Record, environment, load_reference, markdown_table, write_text_atomic

SOURCE = "notebooks/05_offload.py"

# %% [markdown]
# :::{admonition} Without a GPU
# :class: note
# On this page the CPU simulates the device. Memory that torch allocates counts as device memory. The store gets its
# memory directly from the operating system, so its bytes are counted separately. Worker threads simulate the streams of
# a GPU. The code that decides when to copy and when to free is the code that runs on a GPU.
# :::
#
# ## Saved tensors on the host
#
# Checkpointing frees the activations that it can recompute. Offload *moves* them to other memory: nothing is computed
# twice, but every byte is copied out and back. In PyTorch, one context around the forward is enough:

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
# `save_on_cpu` installs a pair of functions, *pack* and *unpack*. Autograd calls pack for each tensor that it saves, and
# unpack when backward reads the tensor. Tensors that are on the CPU already are not copied, so here the context changes
# nothing. Our own pair copies them. (On a GPU, `host` would be `torch.empty(tensor.shape, dtype=tensor.dtype,
# pin_memory=True)`.)


# %%
def pack(tensor):
    host = host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


def unpack(host):
    return host.clone()  # the clone is device memory


S = rows.nbytes
for context in (contextlib.nullcontext(), saved_tensors_hooks(pack, unpack)):
    step = measure(lambda: train(context), resident=(mlp, rows), warmup=0, repeats=0)  # noqa: B023
    peak = step.dynamic_peak_bytes
    print(f"dynamic peak {peak:,} bytes = {peak / S:.1f} S")

# %% [markdown]
# The peak drops to what one layer needs at a time. Three flaws remain, and `save_on_cpu` has them as well:
#
# 1. **It waits.** Every copy runs between two operations, and compute stops for it.
# 2. **It copies weights.** A linear layer also saves its weight, as the view `w.t()`. Copying it frees nothing.
# 3. **It allocates memory for each tensor.** A GPU can copy while it computes only if the host memory is page-locked,
#    or *pinned*, and pinning can take longer than the copy.
#
# ## Overlapping copies with compute
#
# A GPU has copy engines that work while it computes. A program uses them through a second *stream*, a queue whose work
# runs in order. The program only submits work to the queue and continues. Only *events* synchronize two streams: an
# event marks the end of a piece of work, and work in another stream can be told to start after it.
# `ackpt.offloading.cpu_streams.Stream` does the same on a CPU, with a worker thread for each queue:

# %%
compute, copies = Stream("compute"), Stream("copies")
order, passed = [], threading.Event()
copied = copies.submit(lambda: (passed.wait(), order.append("a long copy")))
compute.submit(lambda: (order.append("computing"), passed.set()))
compute.submit(order.append, "computing after the copy", after=[copied]).wait()
order

# %% tags=["hide-input"]
from experiments.reports import schematics
from experiments.reports.figures import line_plot
from experiments.widgets.offload_lanes import offload_lanes

schematics.publish(offload_lanes(), "05_lanes")

# %% [markdown]
# The animation shows both lanes for a Transformer of 12 checkpointed blocks, with the times that the profiler of
# {doc}`07_graph_profiler` computes for an H200: copies of block inputs overlap completely with compute, copies of all
# activations only in part.
#
# ```{schematic-explorer} ../../results/explorer/05_lanes.json
# :image: ../../results/figures/05_lanes.png
# :alt: Two lanes over the time of one training step, compute above copies, with live memory below, for three schedules. If the inputs of the blocks are copied out during the forward and back ahead of their use, compute has no gaps. If they are copied back only when they are needed, compute pauses for each copy. If all activations are copied, the lane of copies is full and the step takes more than twice as long.
# ```

# %% [markdown]
# With `torch.cuda`, `copies.submit(f, after=[event])` is `copies.wait_event(event)`, then `f()` in the context
# `torch.cuda.stream(copies)`, then `copies.record_event()`, which returns the new event. An asynchronous pair submits
# the copy and continues. Unpack waits for the event of the copy:


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


all(map(torch.equal, expected, train(saved_tensors_hooks(pack_async, unpack_async))))

# %% [markdown]
# ## Five rules for copies
#
# Work no longer runs in the order of the lines, and that makes offload hard. In `pack_async`, the submitted work refers
# to `tensor` until the copy has run, which keeps the memory of the tensor allocated. Without this reference, the
# allocator could give the memory to the next tensor before it is copied. The next cell shows that *race*. To make it
# fail every time, the copy is delayed until the next tensor has been written.


# %%
def race(wait_for_copy):
    block, host, passed = torch.ones(4), torch.zeros(4), threading.Event()
    copied = copies.submit(lambda: (passed.wait(0.2), host.copy_(block)))
    after = [copied] if wait_for_copy else []
    reused = compute.submit(lambda: (block.fill_(2), passed.set()), after=after)  # the next tensor
    copied.wait(), reused.wait()
    return host.tolist()


race(wait_for_copy=False), race(wait_for_copy=True)

# %% [markdown]
# Implementations in use have had this bug and four more. The next cell runs each without and with its fix:

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

# %% [markdown]
# ## The engine
#
# `ackpt.offload_saved_tensors` installs such a pair of hooks, with an engine that keeps these rules. The mode `sync`
# waits for every copy. The mode `async`, the default, overlaps the copies and prefetches for backward:

# %%
{mode: all(map(torch.equal, expected, train(ackpt.offload_saved_tensors(mode)))) for mode in ("sync", "async")}

# %% [markdown]
# ### Storages, not tensors
#
# Several saved tensors may be views of one *storage*. Queries, keys and values often are: each is a third of the output
# of one matrix product. The memory is freed only with the last view, so the engine copies the storage, and only once.
# Below, autograd saves $q$, $k$, $v$ and the product $q k$: four tensors in two storages.

# %%
x = torch.randn(256, 768, requires_grad=True)
with ackpt.offload_saved_tensors(keep_last=0) as engine:
    engine.reset_stats()
    q, k, v = (2 * x).chunk(3, dim=1)
    loss = (q * k * v).sum()
counts = engine.stats()
del loss  # and with its graph, the bytes in the store
{name: counts[name] for name in ("copies_out", "shared", "bytes_out")}, (3 + 1) * 256 * 256 * 4

# %% [markdown]
# ### What is not offloaded
#
# - **Parameters and buffers**, and views of them such as `w.t()`. The engine recognizes them by their storage.
# - **Small tensors**, below `min_bytes`. Every copy has a fixed overhead, and a small tensor frees almost nothing.
# - **The last `keep_last` storages.** Backward reads them first, before their copies out could have ended.
#
# In the multilayer perceptron above, 8 linear layers save their inputs, the first of which is `rows`. The 8 GELUs also
# save their inputs, and the loss saves the last output. That makes 17 activations of $S$ bytes.

# %%
for options in {"keep_last": 0}, {"keep_last": 1}, {"keep_last": 4}, {"min_bytes": S + 1}:
    engine.reset_stats()
    train(ackpt.offload_saved_tensors(**options))
    counts = engine.stats()
    print(f"{options!s:20} {counts['copies_out']:2} copies, {counts['bytes_out'] / S:.0f} S")

# %% [markdown]
# ## How much offload lowers the peak
#
# Without recomputation, offload copies every activation. Usually it is better to recompute most activations and to
# offload the few that a checkpoint saves: the inputs of regions. The argument `offload=` of `checkpoint`,
# `checkpoint_sequential` and `apply_activation_checkpointing` does this.
#
# Take $n$ equal regions. Without offload, a checkpoint saves one input per region, so memory rises like a ramp through
# the forward, to $n \, S$ bytes when backward begins. Backward first recomputes the last region, with all $n$ inputs
# live: this is the peak. (It is elsewhere if gradients dominate, see {doc}`04_experiments`. Here the gradients
# exist before the step, as with `zero_grad(set_to_none=False)`.) With offload, these tensors are live at that moment:
#
# - the input of the last region, which stays on the device because backward needs it first;
# - the $h$ inputs that something else also holds, usually only the batch, which is the first region's input;
# - everything else, as without offload.
#
# In the backward of an earlier region, that region's input has been copied back. The prefetch of the next input starts
# halfway through, when half of the recomputed activations have been freed. The backward of region $i$ needs its own
# input on the device, not those of the regions 1 to $i$:
#
# $$ \text{peak}_\text{checkpoint} - \text{peak}_\text{offload} = (n - 1 - h) \, S $$
#
# We check the formula with regions of four SiLU functions and $h = 1$, for both modes:

# %%
x = torch.randn(2**16, requires_grad=True)
S = x.nbytes


def region(a):
    for _ in range(4):
        a = F.silu(a)
    return a


def chain(n, mode, a=x):
    for _ in range(n):
        a = ackpt.checkpoint(region, a, offload=mode)
    return a


def peak_of(forward):
    def step():
        x.grad.zero_()
        y = forward()
        y.square().sum().backward()

    x.grad = torch.zeros_like(x)
    return measure(step, resident=[x], warmup=0, repeats=0).dynamic_peak_bytes


ns = [4, 8, 16, 32]
peaks = {str(mode): [peak_of(lambda: chain(n, mode)) for n in ns] for mode in (None, "sync", "async")}  # noqa: B023
[(without - sync - (n - 2) * S, sync - overlapped) for n, without, sync, overlapped in zip(ns, *peaks.values())]

# %% alt="Dynamic peak against the number of regions: without offload it rises by one input per region along the predicted line; with offload it is the same horizontal line in both modes."
constant = [peaks["sync"][0]] * len(ns)
ramp = [constant[0] + (n - 2) * S for n in ns]
shown = {"no offload": peaks["None"], "sync": peaks["sync"], "async": peaks["async"]}
lines = {"no offload": ramp, "sync": constant}
figure = line_plot(ns, shown, lines, "", xlabel="regions", ylabel="dynamic peak (MiB)")
path = plots.save(figure, "results/figures/05_regions.png")
figure

# %% [markdown]
# *Without offload, each region adds one input to the peak. With offload, the peak does not depend on the number of
# regions.*
#
# ### Prefetching in backward
#
# `sync` copies an input back when backward needs it, and waits. `async` records the order of the forward, and
# prefetches the inputs in the reverse order. `lookahead_bytes` bounds the bytes that are prefetched, by default to one
# input, which fits into memory that the region has just freed. Prefetching everything at once would only move the ramp
# from the forward to the beginning of backward.
#
# :::{admonition} Takeaway
# :class: tip
# With offloaded inputs, the device needs memory for one region at a time, however deep the model is. The peak falls by
# $(n - 1 - h) \, S$.
# :::

# %% [markdown]
# ## With and without recomputation
#
# We train 12 Transformer blocks in five ways: the baseline, offload of all activations, checkpointing, and
# checkpointing with offload of the inputs in both modes. Which way has the lowest peak, and which needs the most host
# memory? Decide before you look at the table:

# %%
config = TransformerConfig(dim=64, ff_dim=256, layers=12, head_dim=16)
blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
tokens = torch.randn(512, 64)
offsets = torch.tensor([0, 512], dtype=torch.int32)


def train_blocks(checkpointed, offload_inputs=None, offload_all=None):
    blocks.zero_grad(set_to_none=False)
    a = tokens
    with ackpt.offload_saved_tensors(offload_all) if offload_all else contextlib.nullcontext():
        for block in blocks:
            if checkpointed:
                a = ackpt.checkpoint(block, a, offsets, 512, offload=offload_inputs)
            else:
                a = block(a, offsets, 512)
        loss = (a - tokens).square().mean()
    loss.backward()
    return [weight.grad.clone() for weight in blocks.parameters()]


ways = {"baseline": (False,), "offload": (False, None, "async"), "checkpoint": (True,)}
ways |= {"checkpoint, sync offload": (True, "sync"), "checkpoint, async offload": (True, "async")}
expected = train_blocks(False)
{way: all(map(torch.equal, expected, train_blocks(*arguments))) for way, arguments in ways.items()}

# %% tags=["hide-input"]
way_rows, records = [], []
resident, where = (blocks, tokens, offsets), environment("cpu", SOURCE)
for way, arguments in ways.items():
    step = measure(lambda: train_blocks(*arguments), resident=resident, warmup=0, repeats=0)  # noqa: B023
    row = {"way": way, "peak": round(step.dynamic_peak_bytes / 2**20, 2)}
    way_rows.append(row | {"store": round(step.store_peak_bytes / 2**20, 2)})
    metrics = {"peak_bytes": step.peak_bytes, "resident_bytes": step.resident_bytes}
    metrics["timeline"] = step.timeline.thinned(600).to_json()
    records.append(Record("offload-ways", {"method": way}, metrics, where))
without, sync, overlapped = (record.metrics["peak_bytes"] for record in records[2:])
assert without - sync == without - overlapped == (len(blocks) - 1 - 1) * tokens.nbytes
columns = {"way": "method", "peak": "dynamic peak, MiB", "store": "peak of the store, MiB"}
caption = "A step of 12 Transformer blocks, 512 tokens of width 64, fp32."
path = write_text_atomic("results/tables/05_ways.md", markdown_table(way_rows, columns, caption, "tab-ways"))

# %% [markdown]
# ```{include} ../../results/tables/05_ways.md
# ```
#
# All gradients are bit-identical. Offloading the inputs lowers the checkpointed peak by $(n - 1 - h) \, S$, here by ten
# inputs. (The store holds eleven: the batch is also copied, although that frees nothing.) Offloading all activations
# gives the lowest peak: one *operation* at a time needs its tensors on the device, not one region. The price is the last
# column: many times the bytes of the inputs must be copied out and back.

# %% alt="Three memory timelines, one above the other: checkpointing without offload, with sync and with async offload. Without offload, the boundaries rise like a ramp through the forward and step down in backward; the other two have no ramp. Thin bars below the last two are copies: with sync each ends at once, with async they overlap with compute."
figure = offload_report.timelines_plot(records, "", [*ways][2:])
path = plots.save(figure, "results/figures/05_timelines.png")
figure

# %% [markdown]
# *Offload of the inputs removes the ramp of the checkpointed step. The strips below the second and the third timeline
# show the copies: with `sync`, each copy ends before compute goes on; with `async`, the copies overlap with compute.*
#
# The store can also be a disk, with `store="disk"`. Its buffers are memory-mapped files without a name, so the system
# reclaims the space when the process ends, even after a crash.

# %% [markdown]
# ## When copies add no time
#
# A copy adds no time if it ends while the device computes. How much time is available?
#
# - **Out.** In the forward, the copies of two consecutive inputs start one forward apart. A copy must end before the next
#   one starts, so it may take $F$.
# - **In.** The copy back starts halfway through the backward that runs before its region's, so it may take $R / 2$. A
#   backward takes about two forwards, since each matrix product of the forward has two in backward. So $R / 2$ is about
#   $F$ again.
#
# Both copies overlap completely if $S / \lambda \le F$. (Without recomputation, the copies back have all of $R$, but a
# block saves much more.) For a Transformer block of width $d$ with $4 d$ in the MLP and 2 bytes per element, this is
#
# $$ \frac{2 \, d \, T}{\lambda} \le \frac{24 \, d^2 \, T + 4 \, d \, T^2}{\rho}
#    \quad \Longleftrightarrow \quad T \ge T^* = \frac{\rho}{2 \lambda} - 6 d . $$
#
# Wide models and long sequences make complete overlap easier; a fast device with a slow link makes it harder.
# `ackpt.offload_pays` evaluates the condition with measured times: it fits $F$ and $R$, each with a fixed, a linear and
# a quadratic part, and compares them with the copy.
#
# Memory on this machine is fast. To see a crossover, we need a slow link, and compute with a large quadratic part. So
# the regions consist of attention alone, and each copy sleeps to simulate a slow link. We set the bandwidth of that link
# so that a copy at 1024 tokens takes exactly the time available to it. Then we train six such regions. The engine
# measures how long the copies take and how long compute waits for them; the rest of the copies' time overlaps with
# compute.


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
    pays = ackpt.offload_pays(bytes_per_token, forward, backward_seconds=backward, bandwidth=link, tokens=T)
    fits.append(pays)
    print(f"{T:4} tokens: predicted overlap {pays.hidden_share:4.0%}, measured {shares[T][0]:4.0%}")
print(pays)

# %% tags=["measured-time", "nbval-ignore-output"] alt="Milliseconds per region against tokens: the copy is a straight line; forward and half of backward are curves that start below it and cross it between 512 and 1536 tokens. Measured points scatter around the lines."
points = {"copy": [shares[T][1] for T in lengths], "forward": list(forward.values())}
points["half of backward"] = [seconds / 2 for seconds in backward.values()]
curves = {"copy": [fit.copy_seconds for fit in fits], "forward": [fit.forward_seconds for fit in fits]}
curves["half of backward"] = [fit.backward_seconds / 2 for fit in fits]
line_plot(lengths, points, curves, "", xlabel="tokens in the sequence", ylabel="one region (ms)", unit=1e-3)

# %% [markdown]
# *Attention is quadratic in the tokens, the copy linear: beyond some length, compute takes longer than the copies. We set
# the link so that this length is near 1024 tokens.* The fitted crossover and the measured shares vary, because both
# come from times of threads on a busy CPU.
#
# :::{admonition} Takeaway
# :class: tip
# A region's input is small compared with its compute. If one copy is shorter than one forward, offload adds no time. To
# decide, measure these two times.
# :::
#
# ## Which activations to offload
#
# If the link cannot carry all activations, we must choose some. Every activation has an *inactive time*: the compute
# time between its last use in the forward and its first use in the backward. Its *swap time* is the time of its copies
# out and in. A copy can overlap only with the inactive time, and all copies in one direction share the link. So mu-TWO
# (Purandare et al. 2023) swaps the activation with the longest inactive time first, and only while a swap adds less
# time than the recomputation of another activation. In a chain, the inactive time falls from the first activation to the
# last. So the engine, which copies in the order of the forward and keeps the last storages, makes the same choice.
# {doc}`08_mu_two` makes this decision for each activation.

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: no input has another owner
# :class: note
# In the chain of SiLU regions, the first region's input is $x$, which belongs to the caller. Change the chain so that
# $h = 0$. Predict by how much offload then lowers the peak, and measure it.
# :::

# %% tags=["solution"]
# Multiplying by a constant saves nothing, and only the first region needs the product.
pair = [peak_of(lambda: chain(8, mode, x * 2)) for mode in (None, "async")]  # noqa: B023
print(f"{(pair[0] - pair[1]) / S:.0f} S; n - 1 = {8 - 1}")

# %% [markdown]
# :::{admonition} Exercise 2: how wide must a model be?
# :class: note
# A GPU computes $4 \cdot 10^{14}$ FLOPs per second in bf16, and its link carries 25 GB/s. Above which width $d$
# do the copies of block inputs overlap completely at any length? And at $d = 1024$, above which length? Derive both from
# $T^*$, then ask `offload_pays`.
# :::

# %% tags=["solution"]
rate, bandwidth, d = 4e14, 25e9, 1024
print(f"d >= {rate / (12 * bandwidth):.0f} for any T; T* = {math.ceil(rate / (2 * bandwidth) - 6 * d)}")
seconds = {T: (24 * d**2 * T + 4 * d * T**2) / rate for T in (1024, 2048, 4096)}
print(ackpt.offload_pays(2 * d, seconds, bandwidth=bandwidth))

# %% [markdown]
# For $d \ge \rho / (12 \lambda)$, the matrix products alone take at least as long as the copies. These are peak
# rates. A real GPU computes more slowly, which makes complete overlap easier. {doc}`08_mu_two` asks the same about the
# outputs of single layers, which must be 24 times as wide.
#
# :::{admonition} Exercise 3: fix a script that exceeds its budget
# :class: note
# This step of the 12 blocks above also computes a validation loss on a second batch of the same size, `others`. Predict
# its dynamic peak from the table, then measure it. First fit it into 32 MiB without recomputing or copying anything. Then
# fit it into 6 MiB.
#
# ```python
# def loss_of(a):
#     for block in blocks:
#         a = block(a, offsets, 512)
#     return a.square().mean()
#
# loss = loss_of(tokens)
# validation = loss_of(others)
# loss.backward()
# ```
# :::

# %% tags=["solution"]
# Autograd saves the activations of both forwards: about twice the baseline. A validation needs no graph. Within 6 MiB,
# the blocks are checkpointed and their inputs offloaded.
others = torch.randn(512, 64)
offloaded = functools.partial(ackpt.checkpoint, offload="async")


def script(validating, call=nn.Module.__call__):
    def loss_of(a):
        for block in blocks:
            a = call(block, a, offsets, 512)
        return a.square().mean()

    loss = loss_of(tokens)
    with validating:
        validation = loss_of(others)  # noqa: F841
    loss.backward()


def peak_in_mib(step):
    return measure(step, resident=(*resident, others), warmup=1, repeats=0).dynamic_peak_bytes / 2**20


variants = {"script": (contextlib.nullcontext(),), "no_grad": (torch.no_grad(),)}
variants["no_grad, checkpoint, offload"] = torch.no_grad(), offloaded
script_peaks = {name: peak_in_mib(functools.partial(script, *arguments)) for name, arguments in variants.items()}
for peak, budget in zip(script_peaks.values(), (64, 32, 6), strict=True):
    assert budget / 2 < peak <= budget
{name: round(peak, 1) for name, peak in script_peaks.items()}

# %% [markdown]
# :::{admonition} Exercise 4: fit your own model within a budget
# :class: note
# Take a model and a batch of your own, or the 12 blocks. Halve its dynamic peak with as little recomputation as
# possible: the argument `check_fn` of `apply_activation_checkpointing` chooses the blocks that become regions. How many
# must it choose? Predict the number from the bytes that one block saves, then measure. Should they be the first blocks
# or the last?
# :::

# %% tags=["solution"]
# A block saves 10 d + 2 f + 3 h + 2 elements per token, as chapter 1 derives; a region saves d. Let the first k blocks
# be regions: the other blocks are done when recomputation begins, so the peak stays at the start of backward. If the
# last blocks are regions, the recomputation of the last one comes on top of all that is saved.
S, per_token = tokens.nbytes, 10 * config.dim + 2 * config.ff_dim + 3 * config.heads + 2
freed = 4 * len(tokens) * per_token - S  # by each region


def peak_with(chosen):
    if chosen:
        ackpt.apply_activation_checkpointing(blocks, lambda module: any(module is block for block in chosen))
    peak = measure(lambda: train_blocks(False), resident=resident, warmup=0, repeats=0).dynamic_peak_bytes
    ackpt.remove_activation_checkpointing(blocks)
    return peak


before = peak_with([])
k = math.ceil(before / 2 / freed)
print(f"{k} blocks must be regions; budget {before / 2:,.0f} bytes")
choices = {f"the first {k}": blocks[:k], f"the first {k - 1}": blocks[: k - 1], f"the last {k}": blocks[-k:]}
own_peaks = {name: peak_with(chosen) for name, chosen in choices.items()}
assert [before - peak for peak in own_peaks.values()][:2] == [k * freed, (k - 1) * freed]
own_peaks

# %% [markdown]
# ## What we have seen
#
# - Offload is a pair of hooks and a copy. If copies overlap with compute, four rules about order make them correct, and
#   a pool of buffers makes them fast.
# - The engine copies each storage once, however many views of it are saved.
# - Offloading inputs lowers the peak of a checkpointed model by $(n - 1 - h) \, S$, to the byte, with `sync` and
#   `async`.
# - Copies overlap completely with compute if $S / \lambda \le F$. Attention's quadratic part makes that true for every
#   sequence that is long enough.
#
# ## Sources
#
# - {cite:t}`rhu2016`: copies to the host that overlap with compute, and when they overlap completely.
# - {cite:t}`purandare2023`: which activations to swap.

# %% [markdown]
# ## Appendix: the published experiment on a T4
#
# The public repository `polkadot21/activation-ckpt-offload` trains 12 Transformer blocks in fp16 on a T4, with 12,000
# tokens in 48 sequences: the baseline, per-block checkpointing (`ckpt_classic`), and per-block checkpointing with the
# inputs offloaded. We wrote its model and step from its source, and predict its peaks ({doc}`11_predictions` discusses
# the errors) and those of our model from shapes alone. `python -m experiments offload` runs our experiment in a
# terminal, and also measures the offload of other tools.

# %% tags=["hide-input"]
reference = load_reference("offload")
modes = tuple(row["method"] for row in reference["rows"])
predicted = offload.predict_offload(dataclasses.replace(offload.GPU, methods=modes), SOURCE)
for record in predicted:
    path = record.save(f"results/cpu/05_{offload_report.file_name(record)}")
peaks = [Predictions().of(row) for row in published_peaks() if row["step"] == "reference-offload"]
ratios = load_reference(time_ratios.REFERENCE)["rows"]
times = [time_ratios.compared(row, time_ratios.Times()) for row in ratios if row["url"].endswith("/offload.json")]
gpu = gpu_records("offload", total_tokens=offload.GPU.total_tokens)
rows = offload_report.published_rows(reference, peaks, times, predicted, gpu)
columns = {"method": "method", "peak": "published, MiB", "peak_change": "vs baseline, %"}
columns |= {"classic_change": "vs classic, %", "predicted": "predicted, MiB", "error": "error, %"}
columns |= {"ours": "ours, MiB", "gpu_peak": "on a GPU, MiB"}
caption = (
    "Peaks of the offload experiment: published by others for a T4, predicted from shapes for the published "
    "configuration, and predicted for our model (ours). The source prints MiB as MB."
)
path = write_text_atomic("results/tables/05_published.md", markdown_table(rows, columns, caption, "tab-offload-peaks"))
columns = {"method": "method", "ms": "published, ms", "ms_change": "vs baseline, %"}
columns |= {"predicted_change": "predicted vs baseline, %", "gpu_ms": "ours on a GPU, ms"}
caption = "Times of the same steps, published and predicted with the T4's rates relative to the baseline."
path = write_text_atomic("results/tables/05_times.md", markdown_table(rows, columns, caption, "tab-offload-times"))

# %% [markdown]
# ```{include} ../../results/tables/05_published.md
# ```
#
# Our model needs less: it fuses norms and projections, saves no attention matrices, and its step has no optimizer. The
# source also plots the memory of one step in each checkpointed mode. The same step, predicted:

# %% tags=["hide-input"] alt="Three memory timelines of a step of 12 blocks, one above the other. Classic checkpointing: the forward is a ramp of inputs, and backward is a sawtooth that rises with each block. With sync and with async offload, which look the same, the forward is flat, and the sawtooth rises half as steeply to a peak about 500 MiB lower."
shown = ("ckpt_classic", "ckpt_sync_offload", "ckpt_async_offload")
figure = offload_report.timelines_plot(Timelines().records("reference-offload", shown), "", shown)
path = plots.save(figure, "results/figures/05_t4.png")
figure

# %% [markdown]
# *First step of the published experiment, predicted from shapes at the published size: classic with its ramp of saved
# inputs, and offload without it. Async offload allocates the same tensors as sync. Recomputed activations count as
# temporaries.*
#
# The peaks in the table are higher: they are those of two warm-up and three timed steps, with optimizer states and the
# last step's tensors. In backward, the sawtooth rises with each block by the block's gradients, 24 MiB. Classic rises
# twice as fast, because each input stays in an attribute of its autograd node and gets a gradient of its own size. So
# offload lowers this peak by about $2 (n - 1) S$.
#
# ```{include} ../../results/tables/05_times.md
# ```
#
# On a T4, you can expect a faster step, and a higher relative cost of checkpointing. We divide the FLOPs of the baseline
# by its published time:

# %%
(baseline,) = Timelines().records("reference-offload", ["baseline"])
flops, t4 = baseline.metrics["flops"], device("t4")
published_seconds = reference["rows"][0]["milliseconds"] / 1e3
share = flops / published_seconds / t4.flops_per_second["float16"]
qkv = 12_000 * 3 * 1024 * 2  # bytes of the packed queries, keys and values of a block
slices = 12 * 3 * 48 * 4 * qkv / t4.memory_bytes_per_second
copies = 12 * 12_000 * 1024 * 2 / t4.link_bytes_per_second
print(f"{flops / 1e12:.1f} TFLOP in {published_seconds:.2f} s: {share:.1%} of the T4's rate in fp16")
print(f"gradients of slices: {slices:.2f} s; copying all inputs once: {1e3 * copies:.0f} ms")

# %% [markdown]
# Half of the time is spent on gradients of slices. The attention loop slices queries, keys and values of each of the 48
# sequences out of one tensor. The backward of a slice writes a gradient as large as the *whole* tensor. Adding it to
# the other gradients reads two such tensors and writes one: four times its bytes in total, for each of 144 slices per
# block. `torch.split` gives the same slices, and its backward is one concatenation. Checkpointing recomputes the
# forward, but does not repeat this part of backward. Without this part, the published 398 ms of recomputation would be
# 24 % of the step. By FLOPs, recomputation is a third of the baseline.
#
# The other two modes show the rules of this chapter. `ckpt_sync_offload` copies into pageable memory and waits, which
# adds 204 ms to classic, more than the rate of the link predicts. `ckpt_async_offload` has pinned buffers and a second
# stream, and adds 17 ms, the time of one copy of all inputs. Its copies *out* overlap with compute, but its copies back
# run in the compute stream.

# %% tags=["measured-time", "nbval-ignore-output"]
predicted[0].environment
