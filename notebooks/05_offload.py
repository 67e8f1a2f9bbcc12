# %% [markdown]
# # Offload
#
# After this chapter you can offload activations while the model computes, and name the ways in which such copies go
# wrong. You can also predict the saved memory to the byte, and say from which sequence length on offload adds no time.

# %% [markdown]
# ## Goals
#
# - Write offload in ten lines, and see its flaws: waiting, and copies that free nothing.
# - Overlap the copies with compute, reproduce five known bugs, and fix them.
# - Derive by how much offload lowers the peak of a checkpointed model, and check it to the byte.
# - Follow which storages are copied, which stay on the device, and in which order they are copied back.
# - Predict when the copies overlap completely with compute, and check the prediction.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $n$ | checkpointed regions, one after another |
# | $S$ | bytes of one region's input |
# | $h$ | inputs of regions that stay live anyway, because they have another owner |
# | $T$ | tokens in the sequence; $S = s \, T$ with $s$ bytes per token |
# | $\rho$, $\lambda$ | FLOPs per second of the device, bytes per second of the link to the store in each direction |
# | $F(T)$, $R(T)$ | seconds of a block's forward, and of its backward without recomputation |
#
# The model computes on the *device*. Offloaded activations are copied to the *store*: host memory, or a disk.

# %%
import contextlib
import math
import os
import tempfile
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import ackpt
from ackpt import plots
from ackpt.experiments import offload
from ackpt.experiments.reports import offload as offload_report
from ackpt.experiments.reports.gpu_records import gpu_records
from ackpt.metering.meter import compare_seconds, measure
from ackpt.models import Block, TransformerConfig
from ackpt.offloading import engine as offload_engine
from ackpt.offloading import transport
from ackpt.offloading.cpu_streams import Stream
from ackpt.offloading.store import Pool, host_memory
from ackpt.results import load_reference, markdown_table, write_text_atomic

torch.set_num_threads(2)
generator = torch.manual_seed(0)
SOURCE = "notebooks/05_offload.py"

# %% [markdown]
# :::{admonition} Without a GPU
# :class: note
# On this page the CPU simulates the device. Memory that torch allocates counts as device memory, and the meter reports
# it. The store gets its memory directly from the operating system, so its bytes are counted separately. Worker threads
# simulate the streams of a GPU. The code that decides when to copy and when to free is the code that runs on a GPU.
# :::
#
# ## Offload in ten lines
#
# Checkpointing frees the activations that it can recompute. Offload *moves* them to other memory: nothing is computed
# twice, but every byte is copied out and back. PyTorch offers one interface for this, a pair of functions called *pack*
# and *unpack*. Autograd calls pack for each tensor that it saves, and unpack when backward reads the tensor.


# %%
def pack(tensor):
    host = host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


def unpack(host):
    return host.clone()  # the clone is device memory


# %%
pairs = ((nn.Linear(128, 128, bias=False), nn.GELU()) for _ in range(8))
mlp = nn.Sequential(*(layer for pair in pairs for layer in pair))
rows = torch.randn(1024, 128)


def train(*hooks):
    mlp.zero_grad(set_to_none=False)
    with saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
        loss = mlp(rows).square().mean()
    loss.backward()
    return [weight.grad.clone() for weight in mlp.parameters()]


# %%
baseline = train()
[torch.equal(a, b) for a, b in zip(baseline, train(pack, unpack))]

# %%
S = rows.nbytes
for hooks in ((), (pack, unpack)):
    step = measure(lambda: train(*hooks), resident=(mlp, rows), repeats=0)
    peak = step.dynamic_peak_bytes
    print(f"dynamic peak {peak:,} bytes = {peak / S:.1f} S")

# %% [markdown]
# The gradients are equal, and the peak drops to what one layer needs at a time. This is essentially PyTorch's
# `save_on_cpu`. It has three flaws:
#
# 1. **It waits.** Every copy runs between two operations, and compute stops for it.
# 2. **It copies weights.** A linear layer saves not only its input but also its weight, as the view `w.t()`.
# 3. **It allocates memory for each tensor.** A GPU can copy while it computes only if the host memory is page-locked,
#    or *pinned*. Pinning can take longer than the copy.
#
# The second flaw is easy to count:

# %%
weights = {weight.untyped_storage().data_ptr() for weight in mlp.parameters()}
copied = {"weights": 0, "activations": 0}


def counting_pack(tensor):
    is_weight = tensor.untyped_storage().data_ptr() in weights
    copied["weights" if is_weight else "activations"] += 1
    return pack(tensor)


gradients = train(counting_pack, unpack)
copied

# %% [markdown]
# The weights are on the device before, during and after the step, so copying them frees nothing.
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
from ackpt.experiments.reports import schematics
from ackpt.experiments.widgets.offload_lanes import offload_lanes

schematics.publish(offload_lanes(), "05_lanes")

# %% [markdown]
# The animation shows both lanes for a Transformer of 12 checkpointed blocks, with the times that the planner of Part II
# computes for an H200: copies of block inputs overlap with compute, and copies of all activations do not.
#
# ```{schematic-explorer} ../../results/explorer/05_lanes.json
# :image: ../../results/figures/05_lanes.png
# :alt: Two lanes over the time of one training step, compute above copies, with live memory below, for three schedules. If the inputs of the blocks are copied out during the forward and back ahead of their use, compute has no gaps. If they are copied back only when they are needed, compute pauses before every block. If all activations are copied, the lane of copies is full and the step takes more than twice as long.
# ```

# %% [markdown]
# From here on, work no longer runs in the order of the lines, and that makes offload hard. Implementations in use have
# had each of the five bugs below. The first four are *races*: most of the time, the result is correct. To make a race
# fail every time, we delay one side until the other has finished, for at most 0.2 seconds.
#
# The setup is a `block` of device memory full of ones, a `host` buffer, and a delayed copy from the block to the
# buffer. The next tensor of the computation reuses the block and writes twos.


# %%
def race(experiment):
    block, host, passed = torch.ones(4), torch.zeros(4), threading.Event()

    def late_copy():
        passed.wait(0.2)
        host.copy_(block)

    def next_tensor():
        block.fill_(2)
        passed.set()

    experiment(late_copy, next_tensor)
    synchronize()
    print(f"host {host.tolist()}, wrong bytes: {host.tolist() != [1] * 4}")


def record_event(stream):
    """An event that marks the end of all work submitted to the stream so far."""
    return stream.submit(lambda: None)


def synchronize():
    for stream in (compute, copies):
        record_event(stream).wait()


# %% [markdown]
# ### Bug 1: the source is freed early
#
# Pack submits the copy and returns. The last reference to the activation is dropped, so its block becomes free. The
# allocator gives the block to the next tensor before the copy has read it.


# %%
def freed_early(late_copy, next_tensor):
    copies.submit(late_copy)
    compute.submit(next_tensor)


race(freed_early)

# %% [markdown]
# The fix: keep the source allocated until the compute stream waits for the copy.


# %%
def freed_after_the_copy(late_copy, next_tensor):
    copied = copies.submit(late_copy)
    compute.submit(next_tensor, after=[copied])


race(freed_after_the_copy)

# %% [markdown]
# ### Bug 2: the event is recorded before the copy
#
# On a GPU, a separate call records an event *in* a stream. If that call comes before the copy, or names the compute
# stream, then waiting for the event does not wait for the copy.


# %%
def recorded_before(late_copy, next_tensor):
    recorded = record_event(copies)
    copies.submit(late_copy)
    compute.submit(next_tensor, after=[recorded])


race(recorded_before)


# %%
def recorded_after(late_copy, next_tensor):
    copies.submit(late_copy)
    recorded = record_event(copies)
    compute.submit(next_tensor, after=[recorded])


race(recorded_after)

# %% [markdown]
# ### Bug 3: the cached stream
#
# The copy must start after the activation has been computed. Which stream computes it? Code that looks the stream up
# once and caches it waits for the wrong one as soon as part of the model runs in another stream. This time, compute is
# the delayed side:


# %%
def race_with_current(stream_to_wait_for):
    block, host = torch.zeros(4), torch.zeros(4)
    passed, side = threading.Event(), Stream("side")

    def late_compute():
        passed.wait(0.2)
        block.fill_(1)

    def copy():
        host.copy_(block)
        passed.set()

    side.submit(late_compute)
    copies.submit(copy, after=[record_event(stream_to_wait_for(side))]).wait()
    record_event(side).wait()
    print(f"host {host.tolist()}, wrong bytes: {host.tolist() != [1] * 4}")


# %%
cached = compute
race_with_current(lambda current: cached)

# %%
race_with_current(lambda current: current)

# %% [markdown]
# ### Bug 4: a buffer is used again early
#
# To avoid new allocations, a buffer returns to a pool when backward has used it. But at that moment, the copy back may
# only have been *submitted*. The next step takes the buffer and copies its own activations into it:


# %%
def race_for_a_buffer(events_kept):
    pool, device, passed = Pool(host_memory), torch.zeros(4), threading.Event()
    buffer = pool.take(16)
    buffer.bytes[:16].view(torch.float32).fill_(1)

    def late_copy_in():
        passed.wait(0.2)
        device.copy_(buffer.bytes[:16].view(torch.float32))

    def next_copy_out():
        again.bytes[:16].view(torch.float32).fill_(2)
        passed.set()

    loaded = copies.submit(late_copy_in)
    pool.give(buffer, after=[loaded] if events_kept else [])
    again = pool.take(16)
    compute.submit(next_copy_out, after=again.after)
    synchronize()
    print(f"same buffer: {again is buffer}, wrong bytes: {device.tolist() != [1] * 4}")


# %%
race_for_a_buffer(events_kept=False)

# %%
race_for_a_buffer(events_kept=True)

# %% [markdown]
# In the pool of `ackpt`, each buffer has the events of its last copies, and the next copy into it starts after them.
#
# ### Bug 5: memory is pinned for each tensor
#
# This code copies the right bytes, but slowly. We count the allocations of 6 steps that save 8 tensors each, first
# without returning buffers to the pool, then with:


# %%
def allocations(give_back):
    pool = Pool(host_memory)
    for _ in range(6):
        taken = [pool.take(S) for _ in range(8)]
        for buffer in taken if give_back else ():
            pool.give(buffer)
    return pool.misses


allocations(give_back=False), allocations(give_back=True)

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Four rules make an asynchronous copy correct. It starts after the work of the stream that computes *now*. Its event is
# recorded after the copy. The device memory that it reads or writes is freed only after that event. Its buffer is
# reused only after that event. A fifth rule makes copies fast: allocate buffers once.
# :::

# %% [markdown]
# ## The engine
#
# `ackpt.offload_saved_tensors` installs the same pair of hooks, with an engine that keeps these rules. (For GPUs,
# `ackpt/offloading/cuda_transport.py` states them at its top.)


# %%
def train_offloaded(mode, **options):
    mlp.zero_grad(set_to_none=False)
    with ackpt.offload_saved_tensors(mode, **options) as engine:
        loss = mlp(rows).square().mean()
    loss.backward()
    return engine


engine = train_offloaded("async")
[torch.equal(a, weight.grad) for a, weight in zip(baseline, mlp.parameters())]

# %% [markdown]
# Do the gradients stay equal if copies are slow and freed memory is soon reused? We delay every copy by two
# milliseconds and run six steps. The first step shows how many buffers the pool allocates.

# %%
real_move = transport._move


def late_move(*arguments):
    time.sleep(0.002)
    real_move(*arguments)


# %%
engine.release_buffers()
transport._move = late_move
for step in range(6):
    engine.reset_stats()
    train_offloaded("async")
    pairs = zip(baseline, mlp.parameters())
    equal = all(torch.equal(a, weight.grad) for a, weight in pairs)
    counts = engine.stats()
    new, old = counts["pool_misses"], counts["pool_hits"]
    print(f"step {step}: equal {equal}, allocated {new}, reused {old}")
transport._move = real_move

# %% [markdown]
# The gradients equal the baseline's bit for bit, and the pool allocates nothing after the first step. The next cell
# measures the time that the copies add here, as a ratio to the baseline:

# %% tags=["measured-time", "nbval-ignore-output"]
timed = {
    "baseline": train,
    "ten lines": lambda: train(pack, unpack),
    "sync": lambda: train_offloaded("sync"),
    "async": lambda: train_offloaded("async"),
}
for name, ratio in compare_seconds(timed, repeats=9).ratios.items():
    print(f"{name:9} x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")

# %% [markdown]
# Here, copies and compute share two cores, so overlap gains little. A GPU has separate copy engines.
#
# ### Storages, not tensors
#
# Several saved tensors may be views of one *storage*. Queries, keys and values often are: each is a third of one matrix
# product. The memory is freed only with the last view, so the engine copies the storage, and only once.

# %%
x = torch.randn(256, 768, requires_grad=True)
with ackpt.offload_saved_tensors(keep_last=0) as engine:
    engine.reset_stats()
    q, k, v = (2 * x).chunk(3, dim=1)
    loss = (q * k * v).sum()
counts = engine.stats()
{name: counts[name] for name in ("copies_out", "shared", "bytes_out", "stored")}

# %%
(3 + 1) * 256 * 256 * 4

# %% [markdown]
# Autograd saved four tensors: $q$, $k$, $v$ and the product $q k$. They occupy two storages, so the engine made two
# copies; the other two tensors *share* a storage that the engine had already. Backward reads both storages. The product
# was still being copied out and its memory was not yet freed, so only the other storage is copied back. Then the store
# is empty:

# %%
del q, k, v  # these references would keep the storage on the device, and nothing would be copied back
loss.backward()
counts = engine.stats()
{name: counts[name] for name in ("copies_in", "bytes_in", "stored", "store_bytes")}

# %% [markdown]
# ### What stays
#
# - **Parameters and buffers**, and views of them such as `w.t()`. The engine recognizes them by their storage.
# - **Small tensors**, below `min_bytes`. Every copy has a fixed overhead, and a small tensor frees almost nothing.
# - **The last storages.** Backward first reads what was saved last, so it would need these storages before their copies
#   out have ended. The last `keep_last` storages stay.
#
# In the multilayer perceptron above, 8 linear layers save their inputs, the first of which is `rows`. The 8 GELUs save
# their inputs, too, and the loss saves the last output. That makes 17 activations of $S$ bytes.

# %%
engine.reset_stats()
choices = {"keep_last": 0}, {"keep_last": 1}, {"keep_last": 4}, {"min_bytes": S + 1}
for options in choices:
    engine.reset_stats()
    train_offloaded("async", **options)
    counts = engine.stats()
    print(f"{options!s:23} {counts['copies_out']:2} copies, {counts['bytes_out'] / S:.0f} S")

# %% [markdown]
# ## How much offload lowers the peak
#
# Without recomputation, offload copies every activation. Usually it is better to recompute most activations and to
# offload the few that a checkpoint saves: the inputs of regions. The argument `offload=` of `checkpoint`,
# `checkpoint_sequential` and `apply_activation_checkpointing` does this.
#
# Take $n$ equal regions. Without offload, a checkpoint saves one input per region, so memory rises like a ramp through
# the forward, to $n \, S$ bytes when backward begins. Backward first recomputes the last region, with all $n$ inputs
# live: this is the peak. (It is elsewhere if gradients dominate, see {doc}`03_synthetic_experiment`. Here the gradients
# exist before the step, as with `zero_grad(set_to_none=False)`.)
#
# With offload, these tensors are live at that moment:
#
# - the input of the last region, which stays on the device because backward needs it first;
# - the $h$ inputs that have another owner. The first region's input is usually the batch, or the caller's $x$;
# - everything else, as without offload.
#
# In the backward of an earlier region, that region's input has been copied back. The prefetch of the next input starts
# halfway through, when half of the recomputed activations have been freed. So the backward of region $i$ reaches its
# highest memory with one input on the device, instead of $i$ inputs:
#
# $$ \text{peak}_\text{checkpoint} - \text{peak}_\text{offload} = (n - 1 - h) \, S $$
#
# The formula holds whether compute waits for the copies or overlaps with them. We check it with regions of four SiLU
# functions and $h = 1$:

# %%
x = torch.randn(2**16, requires_grad=True)
S = x.nbytes


def region(a):
    for _ in range(4):
        a = F.silu(a)
    return a


def chain(n, mode):
    if x.grad is not None:
        x.grad.zero_()
    a = x
    for _ in range(n):
        a = ackpt.checkpoint(region, a, offload=mode)
    a.square().sum().backward()


# %%
modes = {"no offload": None, "sync": "sync", "async": "async"}
ns = [4, 8, 12, 16, 24, 32]
peaks = {
    name: [measure(lambda: chain(n, mode), resident=[x], repeats=0).dynamic_peak_bytes for n in ns]
    for name, mode in modes.items()
}
for n, no_offload, sync, overlapped in zip(ns, *peaks.values()):
    rest, difference = no_offload - sync - (n - 2) * S, sync - overlapped
    print(f"n = {n:2}: no offload - sync - (n - 2) S = {rest}, sync - async = {difference}")

# %% alt="Dynamic peak against the number of regions: without offload it rises by one input per region along the predicted line; with sync and async offload it is the same horizontal line."
figure = plots.line_plot(
    ns,
    measured=peaks,
    predicted={
        "no offload": [peaks["sync"][0] + (n - 2) * S for n in ns],
        "sync": [peaks["sync"][0]] * len(ns),
    },
    title="Without offload, each region adds one input to the peak; with offload, the peak is constant",
    xlabel="regions",
    ylabel="dynamic peak (MiB)",
)
path = plots.save(figure, "results/figures/05_regions.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# With offloaded inputs, the device needs memory for one region at a time, however deep the model is: the ramp of the
# forward disappears. The peak falls by $(n - 1 - h) \, S$, to the byte.
# :::

# %% [markdown]
# ## Prefetching inputs in backward
#
# `sync` copies an input back when backward needs it, and waits. `async` records the order of the forward, and
# prefetches the inputs in the reverse order. An observer can log the copies. Here the regions have inputs of different
# sizes, so that the log can tell them apart.

# %%
log, sizes = [], {}


def observer(what, event, size):
    if what in ("out", "in"):
        log.append(f"{what} {sizes[size]}")


def shrink(a):
    number, shorter = sizes[a.nbytes], a[: a.numel() - 2**15]
    b = shorter.sin().sin()
    if ackpt.is_recomputing():
        b.register_hook(lambda _: log.append(f"({number}"))
        shorter.register_hook(lambda _: log.append(f"{number})"))
    return b


# %%
def watch(mode):
    log.clear()
    a = torch.randn(2**18, requires_grad=True)
    offload_engine.observers.append(observer)
    for i in range(1, 6):
        sizes[a.nbytes] = i
        a = ackpt.checkpoint(shrink, a, offload=mode)
    log.append("|")
    a.sum().backward()
    offload_engine.observers.remove(observer)
    return ", ".join(log)


# %% [markdown]
# In the log, a bar marks the beginning of backward. The backward of region 5, after its recomputation, goes from `(5`
# to `5)`. The first of the five inputs belongs to the caller, and the last one stays on the device. The engine offloads
# inputs 2, 3 and 4.
#
# (The caller's input requires grad here, so it stays, like a parameter. An input without grad, such as a batch, may
# have no other owner. The engine therefore copies it out, too, and does not copy it back if it is still on the device.
# Then there are $n - 1$ copies out and $n - 2$ copies in.)

# %%
for mode in ("sync", "async"):
    print(f"{mode:5}: {watch(mode)}")

# %% [markdown]
# The order is the same, but with `async` the copy of an input starts when the backward of the following region is half
# done. The engine counts the inputs that are on the device or already being copied when backward needs them (`found`),
# and those whose copy starts only then (`just_in_time`):

# %%
for mode in ("sync", "async"):
    engine.reset_stats()
    watch(mode)
    counts = engine.stats()
    print(f"{mode:5}: found {counts['found']}, just in time {counts['just_in_time']}")

# %% [markdown]
# `lookahead_bytes` bounds the bytes that are prefetched. By default it is the size of the largest storage, or of what
# one region saved. Without the bound, the ramp would only move from the forward to the beginning of backward. One
# prefetched input fits into memory that the region has just freed, and does not raise the peak. Each further one does:

# %%
for ahead in (0, 1, 2, 4, 8):
    wide = ackpt.offload_saved_tensors("async", lookahead_bytes=ahead * S)
    step = measure(lambda: chain(16, wide), resident=[x], repeats=0)
    peak = step.dynamic_peak_bytes
    print(f"lookahead {ahead} S: peak {(peak - peaks['sync'][0]) / S:+.0f} S")

# %% [markdown]
# ## A disk as the store
#
# With `store="disk"`, the buffers are memory-mapped files. Each file is unlinked before its first byte is written. So
# the folder always looks empty, and the system reclaims the space when the process ends, even after a crash.

# %%
with tempfile.TemporaryDirectory() as folder:
    on_disk = ackpt.offload_saved_tensors(store="disk", folder=folder)
    chain(8, None)
    no_offload = x.grad.clone()
    chain(8, on_disk)
    listing = os.listdir(folder)
    counts = on_disk.engine.stats()
    on_disk.engine.release_buffers()
print(f"equal {torch.equal(no_offload, x.grad)}, files seen {listing}")
highest, left = counts["store_peak_bytes"] / S, counts["store_bytes"]
print(f"peak of the store {highest:.0f} S, bytes left {left}")

# %% [markdown]
# If the folder does not exist or is full, an error says so. Training can go on without the store.

# %%
try:
    ackpt.offload_saved_tensors(store="disk", folder="no/such/folder")
except ackpt.OffloadError as error:
    print(str(error).split(" in folder ")[0], "...")

# %% [markdown]
# ## Offload without recomputation
#
# The same engine also works without checkpointing. Nothing is recomputed, and every activation is offloaded. We compare
# four ways to train a model of eight blocks:

# %%
config = TransformerConfig(dim=64, ff_dim=256, layers=8, head_dim=16)
blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
tokens = torch.randn(512, 64)
offsets = torch.tensor([0, 512], dtype=torch.int32)


def run(way):
    blocks.zero_grad(set_to_none=False)
    a = tokens
    where = "async" if way == "checkpoint, offload" else None
    with ackpt.offload_saved_tensors() if way == "offload" else contextlib.nullcontext():
        for block in blocks:
            if "checkpoint" in way:
                a = ackpt.checkpoint(block, a, offsets, 512, offload=where)
            else:
                a = block(a, offsets, 512)
        loss = (a - tokens).square().mean()
    loss.backward()


# %%
ways = ["baseline", "offload", "checkpoint", "checkpoint, offload"]
way_rows = []
run("baseline")
expected = [weight.grad.clone() for weight in blocks.parameters()]
for way in ways:
    run(way)
    pairs = zip(expected, blocks.parameters())
    equal = all(torch.equal(a, weight.grad) for a, weight in pairs)
    engine.reset_stats()
    run(way)
    moved = engine.stats()["bytes_out"]
    resident = (blocks, tokens, offsets)
    peak = measure(lambda: run(way), resident=resident, repeats=0).dynamic_peak_bytes
    flops = ackpt.count_flops(lambda: run(way)) / 1e9
    row = {"way": way, "peak": round(peak / 2**20, 2), "moved": round(moved / 2**20, 2)}
    way_rows.append(row | {"flops": round(flops, 3), "equal": "yes" if equal else "no"})

# %%
columns = {"way": "method", "peak": "dynamic peak, MiB", "moved": "copied to the store, MiB"}
columns |= {"flops": "FLOPs of a step, 1e9", "equal": "gradients bit-equal"}
gradients = sum(weight.nbytes for weight in blocks.parameters()) / 2**20
caption = (
    f"A step of eight Transformer blocks, 512 tokens of width 64, fp32. Peaks include {gradients:.1f} MiB of gradients."
)
table = markdown_table(way_rows, columns, caption, "tab-ways")
path = write_text_atomic("results/tables/05_ways.md", table)

# %% [markdown]
# ```{include} ../../results/tables/05_ways.md
# ```
#
# Without recomputation, nothing is computed twice, and the peak is even lower: one *operation* at a time needs its
# tensors on the device, not one region. The third column shows the price. All activations that the baseline saves must
# be copied out and back, twenty times as many bytes as the inputs alone. The next question is whether there is time for
# these copies.

# %% [markdown]
# ## Does it pay?
#
# A copy adds no time if it ends while the device computes. How much time is there?
#
# - **Out.** The copy of a region's input starts when the region's forward begins. It must end before the copy of the
#   next region's input starts, one forward later: it has $F$.
# - **In.** The copy back starts halfway through the backward of the following region: it has $R / 2$. A backward takes
#   about two forwards, since each matrix product of the forward has two in backward. So this is $F$ again.
#
# Both copies overlap completely if $S / \lambda \le F$. (Without recomputation, the copies back have all of $R$, but a
# block saves much more.) For a Transformer block of width $d$ with $4 d$ in the MLP and 2 bytes per element, this is
#
# $$ \frac{2 \, d \, T}{\lambda} \le \frac{24 \, d^2 \, T + 4 \, d \, T^2}{\rho}
#    \quad \Longleftrightarrow \quad T \ge T^* = \frac{\rho}{2 \lambda} - 6 d . $$
#
# Wide models and long sequences make complete overlap easier; a fast device with a slow link makes it harder. The first
# term of $F$ is proportional to the copy. If it is too small for the link, only attention, whose term grows faster, can
# make up for it. `ackpt.offload_pays` evaluates the condition with measured times: it fits $F$ and $R$, each with a
# fixed, a linear and a quadratic part, and compares them with the copy.
#
# Memory on this machine is fast. To see a crossover, we need a slow link, and compute with a large quadratic part. So
# the regions consist of attention alone, and copies sleep.


# %%
def attend(a):
    return F.scaled_dot_product_attention(a, a, a)


def sequence(T):
    return torch.randn(1, 4, T, 32, requires_grad=True)


def block_seconds(T):
    """Seconds of one region's forward and backward: medians of seven runs."""
    runs = []
    for _ in range(8):
        a, times = sequence(T), [time.perf_counter()]
        y = attend(a)
        times.append(time.perf_counter())
        y.sum().backward()
        runs.append((times[1] - times[0], time.perf_counter() - times[1]))
    return [sorted(column)[3] for column in zip(*runs[1:])]


# %%
lengths = [256, 512, 768, 1024, 1536, 2048]
bytes_per_token = 4 * 32 * 4
seconds = {T: block_seconds(T) for T in lengths}
forward, backward = ({T: pair[way] for T, pair in seconds.items()} for way in (0, 1))

# %% [markdown]
# We set the link's bandwidth so that a copy at 1024 tokens takes exactly the time that it has.

# %%
link = bytes_per_token * 1024 / min(forward[1024], backward[1024] / 2)


def slow_move(buffer, target, source, size):
    time.sleep(size / link)
    real_move(buffer, target, source, size)


def pays_at(T):
    return ackpt.offload_pays(bytes_per_token, forward, backward_seconds=backward, bandwidth=link, tokens=T)


# %% [markdown]
# Then we train eight such regions over that link. The engine measures how long the copies take and how long compute
# waits for them; the rest of the copies' time overlaps with compute. (A lower `min_bytes` makes the engine offload
# short sequences, too.)

# %%
slow = ackpt.offload_saved_tensors("async", min_bytes=1024)


def attend_eight_times(T):
    a = sequence(T)
    for _ in range(8):
        a = ackpt.checkpoint(attend, a, offload=slow)
    a.sum().backward()


def overlapped_share(T):
    attend_eight_times(T)
    slow.engine.reset_stats()
    attend_eight_times(T)
    counts = slow.engine.stats()
    copies = counts["copies_out"] + counts["copies_in"]
    share = 1 - counts["seconds_stalled"] / counts["seconds_copying"]
    return max(0.0, share), counts["seconds_copying"] / copies


# %%
transport._move = slow_move
shares = {T: overlapped_share(T) for T in lengths}
transport._move = real_move

# %% tags=["measured-time", "nbval-ignore-output"] alt="Milliseconds per region against tokens: the copy is a straight line; forward and half of backward are curves that start below it and cross it near 1024 tokens. Measured points are near the lines."
fitted = {T: pays_at(T) for T in lengths}
plots.line_plot(
    lengths,
    measured={
        "copy": [shares[T][1] for T in lengths],
        "forward": list(forward.values()),
        "half of backward": [seconds / 2 for seconds in backward.values()],
    },
    predicted={
        "copy": [pays.copy_seconds for pays in fitted.values()],
        "forward": [pays.forward_seconds for pays in fitted.values()],
        "half of backward": [pays.backward_seconds / 2 for pays in fitted.values()],
    },
    title=f"From {pays_at(1024).hidden_from} tokens on, compute takes longer than the copies",
    xlabel="tokens in the sequence",
    ylabel="one region (ms)",
    unit=1e-3,
)

# %% tags=["measured-time", "nbval-ignore-output"]
for T, pays in fitted.items():
    print(f"{T:4} tokens: predicted overlap {pays.hidden_share:4.0%}, measured {shares[T][0]:4.0%}")

# %% [markdown]
# The measured shares follow the predicted ones only roughly, because they are times of threads on a busy CPU. Above the
# crossover, a few per cent remain exposed, because a worker that sleeps must wake up. `print` shows the prediction for
# one length as a sentence:

# %% tags=["measured-time", "nbval-ignore-output"]
print(pays_at(512))

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Inputs of regions are few bytes for a lot of compute. So $S / \lambda \le F$ is easily met, and then offload costs
# memory traffic but no time. Two measured numbers decide whether it is met, not the size of the model.
# :::

# %% [markdown]
# ## The experiment
#
# The published experiment trains 12 Transformer blocks in four ways: the baseline, per-block checkpointing
# (`ckpt_classic`), and per-block checkpointing with the inputs offloaded, synchronously or asynchronously. Ours adds
# offload without recomputation, and the offload of other tools. On the CPU it runs with fewer blocks, tokens and
# channels. It first compares every method's gradients with the baseline's, to the last bit. In a terminal, the command
# is `ackpt offload`.

# %%
config = offload.CPU
records = offload.run_offload(config, SOURCE, timed_rounds=3)
for record in records:
    path = record.save(f"results/cpu/05_{offload_report.file_name(record)}")
runs = {record.config["method"]: record.metrics for record in records}

# %%
ours = [name for name in runs if runs[name].get("gradients_difference") == 0]
print("gradients equal to the last bit:", ", ".join(ours))

# %%
S = config.total_tokens * config.dim * 4
gain = runs["ckpt_classic"]["peak_bytes"] - runs["ckpt_async_offload"]["peak_bytes"]
print(f"ckpt_classic - ckpt_async_offload = {gain / S} S; n - 1 - h = {config.layers - 1 - 1}")
print("async - sync =", runs["ckpt_async_offload"]["peak_bytes"] - runs["ckpt_sync_offload"]["peak_bytes"])

# %% tags=["hide-input"]
rows = [row for row in offload_report.rows(records) if row["peak"] is not None]
for row in rows:
    row |= {name: "–" if row[name] is None else row[name] for name in ("store", "vs_baseline", "vs_classic")}
columns = {
    "method": "method",
    "peak": "peak, MiB",
    "vs_baseline": "vs. baseline, %",
    "vs_classic": "vs. ckpt_classic, %",
    "store": "store, MiB",
}
caption = (
    f"Measured peaks of a step on the CPU: {config.layers} blocks, {config.total_tokens} tokens of width {config.dim}, "
    "fp32, gradients included."
)
table = markdown_table(rows, columns, caption, "tab-offload")
path = write_text_atomic("results/tables/05_offload.md", table)

# %% [markdown]
# ```{include} ../../results/tables/05_offload.md
# ```
#
# The offload of `trl` and `transformers` needs a CUDA GPU and is left out. Two methods of other tools have about the
# peak of `ckpt_classic` here. `save_on_cpu` copies nothing that is already on a CPU, and the bytes that
# `offload_wrapper` stores count as device memory. On a GPU, both offload the inputs of blocks. `offload_async` has a
# higher peak than `offload_sync`, because the sources of unfinished copies stay allocated.

# %% alt="Three memory timelines, one above the other: checkpointing without offload, with sync and with async offload. Without offload, the boundaries rise like a ramp through the forward and step down in backward; the other two have no ramp. Thin bars below each timeline are copies: with sync each ends at once, with async they overlap with compute."
drawn = offload_report.figures(records)
path = plots.save(drawn["timelines"], "results/figures/05_timelines.png")
drawn["timelines"]

# %% [markdown]
# The time of a step, with all methods interleaved, and the share of the copies' time that overlaps with compute:

# %% tags=["measured-time", "nbval-ignore-output"]
for row in rows:
    if row["ms"] is not None:
        overlap = "" if row["hidden"] is None else f", {row['hidden']:.0f} % of the copies overlap"
        print(f"{row['method']:19} {row['ms']:6.1f} ms ({row['spread']}){overlap}")

# %% [markdown]
# ## The published sizes
#
# The table compares the published figures with the peaks of our model, predicted from shapes alone at the same sizes:

# %%
predicted = offload.predict_offload(offload.GPU, SOURCE)
for record in predicted:
    path = record.save(f"results/cpu/05_{offload_report.file_name(record)}")

# %% tags=["hide-input"]
reference = load_reference("offload")
printed = {row["method"]: row for row in reference["rows"]}
gpu = gpu_records("offload", total_tokens=offload.GPU.total_tokens)
on_gpu = {row["method"]: row for row in offload_report.rows(gpu)} if gpu else {}
from_shapes = {row["method"]: row for row in offload_report.rows(predicted)}
rows = [
    {
        "method": method,
        "printed_ms": printed[method]["milliseconds"],
        "printed": printed[method]["peak"],
        "predicted": from_shapes[method]["peak"],
        "ms": on_gpu.get(method, {}).get("ms"),
        "peak": on_gpu.get(method, {}).get("peak"),
    }
    for method in printed
]
columns = {
    "method": "method",
    "printed_ms": "published by others, ms",
    "printed": "published by others, MB",
    "predicted": "ours, predicted, MiB",
    "ms": "ours on a GPU, ms",
    "peak": "ours on a GPU, MiB",
}
caption = (
    "Offload at the published size (12 blocks, 12 000 tokens, fp16): published by others for a T4, and for our model. "
    "Predictions are from shapes alone: nothing was run."
)
table = markdown_table(rows, columns, caption, "tab-offload-published")
path = write_text_atomic("results/tables/05_published.md", table)

# %% [markdown]
# ```{include} ../../results/tables/05_published.md
# ```
#
# ### What the published figures imply
#
# We can also apply $(n - 1 - h) \, S$ in reverse: by how many inputs, at 4 bytes per element, did offload lower the
# published peak? (The source does not say whether its MB is $10^6$ or $2^{20}$ bytes.)

# %%
S = 12_000 * 1024 * 4
taken = printed["ckpt_classic"]["peak"] - printed["ckpt_sync_offload"]["peak"]
for name, unit in {"10^6": 10**6, "2^20": 2**20}.items():
    print(f"MB = {name} bytes: {taken * unit / S:.1f} S, expected {12 - 1 - 1}")

# %% [markdown]
# The peak fell by slightly more than ten inputs, if boundaries are in fp32. With that, the published times tell more.
# The time that `ckpt_sync_offload` adds to `ckpt_classic` is that of some 20 copies, ten in each direction. The time
# that `ckpt_async_offload` adds is the exposed part of it.

# %%
ms = {method: row["milliseconds"] for method, row in printed.items()}
copying = ms["ckpt_sync_offload"] - ms["ckpt_classic"]
exposed = ms["ckpt_async_offload"] - ms["ckpt_classic"]
bandwidth = 20 * S / (copying / 1e3)
print(f"a copy took {copying / 20:.1f} ms, {bandwidth / 1e9:.1f} GB/s; overlapped {1 - exposed / copying:.0%}")

# %% [markdown]
# Could all of it have overlapped? A step with per-block checkpointing takes about as long as four forwards, so the
# forward of one of 12 blocks takes a 48th of it:

# %%
print(ackpt.offload_pays(1024 * 4, {12_000: ms["ckpt_classic"] / 48e3}, bandwidth=bandwidth))

# %% [markdown]
# Yes: there was time for copies of several times that size. The published figures do not show why a part was exposed.
#
# The measured numbers of this page come from this machine and these versions:

# %% tags=["measured-time", "nbval-ignore-output"]
records[0].environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: no input has another owner
# :class: note
# In the chain above, the first region's input is $x$, which belongs to the caller. Change the chain so that $h = 0$,
# and check by how much offload then lowers the peak.
# :::

# %% tags=["solution"]
S = x.nbytes


def longer_chain(n, mode):
    x.grad.zero_()
    a = x * 2  # multiplying by a constant saves nothing, and only the first region needs the product
    for _ in range(n):
        a = ackpt.checkpoint(region, a, offload=mode)
    a.square().sum().backward()


pair = [measure(lambda: longer_chain(8, mode), resident=[x], repeats=0).dynamic_peak_bytes for mode in (None, "async")]
print(f"{(pair[0] - pair[1]) / S:.0f} S; n - 1 = {8 - 1}")

# %% [markdown]
# :::{admonition} Exercise 2: how wide must a model be?
# :class: note
# A GPU computes $4 \cdot 10^{14}$ FLOPs per second in bf16, and its link carries 25 GB/s. From which width $d$ on do
# the copies of block inputs overlap completely at any length? And at $d = 1024$, from which length on? Derive both from
# $T^*$, then ask `offload_pays`.
# :::

# %% tags=["solution"]
rate, link, d = 4e14, 25e9, 1024
print(f"d >= {rate / (12 * link):.0f} for any T; T* = {math.ceil(rate / (2 * link) - 6 * d)}")
seconds = {T: (24 * d**2 * T + 4 * d * T**2) / rate for T in (1024, 2048, 4096)}
print(ackpt.offload_pays(2 * d, seconds, bandwidth=link))

# %% [markdown]
# From $d = \rho / (12 \lambda)$ on, the matrix products alone take at least as long as the copies. These are peak
# rates. A real GPU computes more slowly, which makes complete overlap easier.
#
# :::{admonition} Exercise 3: another fix for bug 1
# :class: note
# Instead of keeping the source until the copy is done, we can copy a *clone* of it. In which stream must the clone be
# made? Try both streams, and delay the copy stream. What does the clone cost?
# :::


# %% tags=["solution"]
def race_with_clone(stream):
    block, host, passed, spare = torch.ones(4), torch.zeros(4), threading.Event(), []

    def clone():
        if stream is copies:  # the delayed side
            passed.wait(0.2)
        spare.append(block.clone())

    cloned = stream.submit(clone)
    copies.submit(lambda: host.copy_(spare[0]), after=[cloned])
    compute.submit(lambda: (block.fill_(2), passed.set()))
    synchronize()
    print(f"wrong bytes: {host.tolist() != [1] * 4}")


race_with_clone(copies)
race_with_clone(compute)

# %% [markdown]
# In the compute stream. There the clone runs after the operation that wrote the block and before the next one that
# writes it, without any event. The clone takes a second block of device memory until the copy ends, which is the memory
# that offload was meant to save.
#
# ## What we have seen
#
# - Offload is a pair of hooks and a copy. If copies overlap with compute, four rules about order make them correct, and
#   a pool makes them fast. Code that breaks a rule can be made to fail every time.
# - The engine copies storages, each one once, however many views of it are saved. Parameters, small tensors and the
#   last storages stay.
# - Offloading inputs lowers the peak of a checkpointed model by $(n - 1 - h) \, S$, to the byte, with `sync` and
#   `async`.
# - Backward prefetches the inputs in the reverse order of the forward, one input ahead.
# - Copies overlap completely with compute if $S / \lambda \le F$. Attention's quadratic part makes that true for every
#   sequence that is long enough.
#
# ## Sources
#
# - {cite:t}`rhu2016`: copies to the host that overlap with compute, and when they overlap completely.
