# %% [markdown]
# # Offload
#
# After this chapter you can move activations out of the way while the model computes, name the ways in which such
# copies go wrong, say to the byte what is gained, and from which sequence length on it costs no time.

# %% [markdown]
# ## Goals
#
# - Write offload in ten lines, and see what is wrong with them: time, and bytes that nobody wanted copied.
# - Put the copies beside the computing, break that in every classic way, and mend it.
# - Derive what offload takes off the peak of a checkpointed model, and check it to the byte.
# - Follow what is copied, what stays, and in which order things come back.
# - Say when the copies are hidden, and check that, too.
#
# ## Notation
#
# | symbol | meaning |
# |:--:|---|
# | $n$ | checkpointed regions, one after the other |
# | $S$ | bytes of one region's input |
# | $h$ | regions' inputs that somebody else holds anyway |
# | $T$ | tokens in the sequence; $S = s \, T$ with $s$ bytes per token |
# | $\rho$, $\lambda$ | FLOPs that the device does in a second, bytes that the link to the store carries in one, each way |
# | $F(T)$, $R(T)$ | seconds of a block's forward, and of its backward without the recompute |
#
# The *device* is where the model computes, the *store* is where activations wait: host memory, or a disk.

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
# Here the CPU plays the device. What torch allocates is device memory: that is what the meter counts. The store takes
# its memory from the operating system directly, so its bytes are counted apart. Worker threads play the streams of a
# GPU. What is copied when, and what is freed when, is decided by the code that runs on a GPU.
# :::
#
# ## Ten lines
#
# A checkpoint forgets what it can compute again. The other way to make room is to move it: nothing is computed twice,
# but every byte travels out and back. PyTorch has one seam for it: a pair of functions, *pack* and *unpack*, that are
# called with each tensor autograd saves.


# %%
def pack(tensor):
    host = host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


def unpack(host):
    return host.clone()  # a clone lies on the device again


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
plain = train()
[torch.equal(a, b) for a, b in zip(plain, train(pack, unpack))]

# %%
S = rows.nbytes
for hooks in ((), (pack, unpack)):
    step = measure(lambda: train(*hooks), resident=(mlp, rows), repeats=0)
    peak = step.dynamic_peak_bytes
    print(f"dynamic peak {peak:,} bytes = {peak / S:.1f} S")

# %% [markdown]
# The gradients are right, and the peak is down to what one layer needs at a time. This is, in essence, PyTorch's
# `save_on_cpu`. Three things are wrong with it:
#
# 1. **It waits.** Every copy stands between two operations; computing stops for all of them.
# 2. **It copies what nobody wants moved.** A linear layer saves its weight, too, as the view `w.t()`.
# 3. **It allocates for each tensor.** Memory that a GPU can copy to by itself must be page-locked, *pinned*, and
#    pinning can take longer than the copy.
#
# The second is easy to count:

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
# The weights are on the device before, during and after the step. Their copies free nothing.
#
# ## Beside the computing
#
# A GPU has copy engines that work while it computes. They are reached by a second *stream*: a queue of work that runs
# in its own order. The program only submits, and goes on. Two streams know nothing of each other but *events*: an event
# is reached when a piece of work has ended, and work can be told to start after events. `ackpt.offloading.cpu_streams.Stream` is the
# same on a CPU, with a worker thread for the queue:

# %%
compute, copies = Stream("compute"), Stream("copies")
order, passed = [], threading.Event()
copied = copies.submit(lambda: (passed.wait(), order.append("a long copy")))
compute.submit(lambda: (order.append("computing"), passed.set()))
compute.submit(order.append, "computing behind the copy", after=[copied]).wait()
order

# %% [markdown]
# From here on nothing happens in the order of the lines, and that is what makes offload hard. The bugs below are those
# that implementations in use have had. Each is a *race*: most of the time it goes well. To make it fail every time we
# slow down one side until the other one has passed, or 0.2 seconds are over.
#
# The scene: a `block` of device memory full of ones, a `host` buffer, and a copy between them that is late. The next
# tensor of the computation will get the block, and writes twos.


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
    both_done()
    print(f"host {host.tolist()}, wrong bytes: {host.tolist() != [1] * 4}")


def so_far(stream):
    """The event of all that a stream was given until now."""
    return stream.submit(lambda: None)


def both_done():
    for stream in (compute, copies):
        so_far(stream).wait()


# %% [markdown]
# ### Bug 1: the source is freed early
#
# Pack submits the copy and returns. The last reference to the activation goes, its block is free, and the allocator
# hands it to the next tensor: the program is ahead of the copy.


# %%
def freed_early(late_copy, next_tensor):
    copies.submit(late_copy)
    compute.submit(next_tensor)


race(freed_early)

# %% [markdown]
# The mending: keep the source until the computing stream has been made to wait for the copy.


# %%
def freed_behind_the_copy(late_copy, next_tensor):
    copied = copies.submit(late_copy)
    compute.submit(next_tensor, after=[copied])


race(freed_behind_the_copy)

# %% [markdown]
# ### Bug 2: the event is recorded before the copy
#
# On a GPU an event is recorded *in* a stream, by a line of its own. Two lines in the wrong order, or the event recorded
# on the computing stream, and what is waited for is over before the copy has begun.


# %%
def recorded_before(late_copy, next_tensor):
    recorded = so_far(copies)
    copies.submit(late_copy)
    compute.submit(next_tensor, after=[recorded])


race(recorded_before)


# %%
def recorded_behind(late_copy, next_tensor):
    copies.submit(late_copy)
    recorded = so_far(copies)
    compute.submit(next_tensor, after=[recorded])


race(recorded_behind)

# %% [markdown]
# ### Bug 3: the cached stream
#
# The copy must start after the activation has been computed. Which stream computes it? Whoever asks once and keeps the
# answer waits for the wrong one as soon as a part of the model runs on another. Now it is the computing that is late:


# %%
def race_with_current(ask):
    block, host = torch.zeros(4), torch.zeros(4)
    passed, side = threading.Event(), Stream("side")

    def late_computing():
        passed.wait(0.2)
        block.fill_(1)

    def copy():
        host.copy_(block)
        passed.set()

    side.submit(late_computing)
    copies.submit(copy, after=[so_far(ask(side))]).wait()
    so_far(side).wait()
    print(f"host {host.tolist()}, wrong bytes: {host.tolist() != [1] * 4}")


# %%
cached = compute
race_with_current(lambda current: cached)

# %%
race_with_current(lambda current: current)

# %% [markdown]
# ### Bug 4: a buffer is used again early
#
# To allocate once, buffers go back to a pool when backward has used them. But "used" means that the copy back has been
# *submitted*. The next step takes the buffer and writes into it what it has to save:


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
    both_done()
    print(f"same buffer: {again is buffer}, wrong bytes: {device.tolist() != [1] * 4}")


# %%
race_for_a_buffer(events_kept=False)

# %%
race_for_a_buffer(events_kept=True)

# %% [markdown]
# In the pool of `ackpt` a buffer carries the events of its last copies, and whoever takes it starts behind them.
#
# ### Bug 5: memory is pinned for each tensor
#
# This one gives right bytes, slowly. Count the allocations of 6 steps that save 8 tensors each, first without giving
# anything back:


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
# Four rules make an asynchronous copy right: it starts behind the stream that is computing *now*; its event is recorded
# behind it; its source, its target and its buffer are free only behind that event. A fifth makes it fast: allocate
# once.
# :::

# %% [markdown]
# ## The engine
#
# `ackpt.offload_saved_tensors` is the pair of hooks again, with an engine behind it that keeps these rules. (They stand
# at the top of `ackpt/offloading/cuda_transport.py`, which is what a GPU uses.)


# %%
def train_offloaded(mode, **options):
    mlp.zero_grad(set_to_none=False)
    with ackpt.offload_saved_tensors(mode, **options) as engine:
        loss = mlp(rows).square().mean()
    loss.backward()
    return engine


engine = train_offloaded("async")
[torch.equal(a, weight.grad) for a, weight in zip(plain, mlp.parameters())]

# %% [markdown]
# Does that hold when the copies are slow, and the memory of what has left is soon used again? We make every copy late
# by two milliseconds, and run six steps. The first one shows how much the pool had to allocate.

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
    pairs = zip(plain, mlp.parameters())
    equal = all(torch.equal(a, weight.grad) for a, weight in pairs)
    counts = engine.stats()
    new, old = counts["pool_misses"], counts["pool_hits"]
    print(f"step {step}: equal {equal}, allocated {new}, reused {old}")
transport._move = real_move

# %% [markdown]
# Bit for bit the plain gradients, and not one allocation after the first step. What the copies cost here, in time, each
# way in turn within a round:

# %% tags=["measured-time", "nbval-ignore-output"]
timed = {
    "plain": train,
    "ten lines": lambda: train(pack, unpack),
    "sync": lambda: train_offloaded("sync"),
    "async": lambda: train_offloaded("async"),
}
for name, ratio in compare_seconds(timed, repeats=9).ratios.items():
    print(f"{name:9} x {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")

# %% [markdown]
# On two cores that compute both, a copy beside the computing has nowhere to run; on a GPU it has an engine of its own.
#
# ### Storages, not tensors
#
# Several saved tensors may be views of one piece of memory, a *storage*. Queries, keys and values often are: thirds of
# one product. The memory is free when the last of them is gone, so the storage is what must be copied, and only once.

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
# Autograd saved four tensors: $q$, $k$, $v$ and the product $q k$. There are two storages, so there are two copies; two
# tensors *share* one that was there. Backward needs both. The product was still on its way out, its memory not yet
# freed, so only the other one has to come back. Then the store is empty:

# %%
del q, k, v  # while they are here, nothing is freed and nothing has to come back
loss.backward()
counts = engine.stats()
{name: counts[name] for name in ("copies_in", "bytes_in", "stored", "store_bytes")}

# %% [markdown]
# ### What stays
#
# - **Parameters and buffers**, and views of them such as `w.t()`. They are known by their storage.
# - **Small tensors**, below `min_bytes`: a copy has a fixed price, and nothing is gained.
# - **The tail.** What was saved last is asked for first: it would come back before it has left. `keep_last` storages
#   stay.
#
# The multilayer perceptron once more. Its 8 linear layers save their inputs, of which the first is `rows`; its 8 GELUs
# save theirs; the loss saves the last output. That makes 17 activations of $S$ bytes.

# %%
engine.reset_stats()
choices = {"keep_last": 0}, {"keep_last": 1}, {"keep_last": 4}, {"min_bytes": S + 1}
for options in choices:
    engine.reset_stats()
    train_offloaded("async", **options)
    counts = engine.stats()
    print(f"{options!s:23} {counts['copies_out']:2} copies, {counts['bytes_out'] / S:.0f} S")

# %% [markdown]
# ## What it takes off the peak
#
# Offload without recompute moves everything. It is usually better to forget most and move the little that a checkpoint
# keeps: the regions' inputs. `offload=` of `checkpoint`, `checkpoint_sequential` and `apply_activation_checkpointing`
# does that.
#
# Take $n$ equal regions. The *classic* checkpoint keeps an input per region, so memory climbs a ramp through the
# forward: $n \, S$ bytes when backward begins. And there, at the first turn of backward, when a whole region is
# recomputed on top of all $n$ inputs, lies the peak. (As long as gradients do not decide:
# {doc}`03_synthetic_experiment`. Here they exist before the step, as under `zero_grad(set_to_none=False)`.)
#
# With offload, in that moment, there are
#
# - the input of the last region, which has stayed, since it is needed now;
# - inputs that somebody else holds anyway, $h$ of them. The first region's is usually the batch, or the caller's $x$;
# - everything else as before.
#
# At later turns the input of the turn has been brought back, and no other: the next one starts on its way half-way
# through a region's backward, when half of what was recomputed has been freed. So every turn has one input, not $i$:
#
# $$ \text{peak}_\text{classic} - \text{peak}_\text{offload} = (n - 1 - h) \, S , $$
#
# and it does not matter whether copies wait or overlap. To check it, regions of four SiLU functions, with $h = 1$:

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
modes = {"classic": None, "sync": "sync", "async": "async"}
ns = [4, 8, 12, 16, 24, 32]
peaks = {
    name: [measure(lambda: chain(n, mode), resident=[x], repeats=0).dynamic_peak_bytes for n in ns]
    for name, mode in modes.items()
}
for n, classic, sync, overlapped in zip(ns, *peaks.values()):
    rest, apart = classic - sync - (n - 2) * S, sync - overlapped
    print(f"n = {n:2}: classic - sync - (n - 2) S = {rest}, sync - async = {apart}")

# %% alt="Dynamic peak over the number of regions: classic rises by one input per region along the predicted line, sync and async offload lie on one horizontal line."
figure = plots.line_plot(
    ns,
    measured=peaks,
    predicted={
        "classic": [peaks["sync"][0] + (n - 2) * S for n in ns],
        "sync": [peaks["sync"][0]] * len(ns),
    },
    title="Classic needs one more input for every region; offloaded, any number of regions has the same peak",
    xlabel="regions",
    ylabel="dynamic peak (MiB)",
)
path = plots.save(figure, "results/figures/05_regions.png")
figure

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# With offloaded inputs the device holds one region at a time, however deep the model is: the ramp of the forward is
# gone. What it takes off is $(n - 1 - h) \, S$, to the byte.
# :::

# %% [markdown]
# ## The way back
#
# `sync` fetches an input when it is asked for, and waits. `async` has noted the order of the forward, and backward goes
# through it from the end. An observer can watch. The regions get inputs of different sizes here, so that the log shows
# which is which.

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
# A bar is where backward begins; the backward of region 5, behind its recompute, goes from `(5` to `5)`. Of five
# regions the first one's input is the caller's and the last one's stays. That leaves 2, 3 and 4 to travel. (Here the
# caller's input requires grad, so it stays as a parameter does. Of one that does not, a batch, nobody can say who holds
# it: it is copied out, too, and not copied back if it is still there. So $n - 1$ copies leave and $n - 2$ return.)

# %%
for mode in ("sync", "async"):
    print(f"{mode:5}: {watch(mode)}")

# %% [markdown]
# The order is the same; but in `async` an input is on its way when the region behind it is half done. The engine counts
# those that were there or on their way when they were asked for (`found`), and those that had to begin then
# (`just_in_time`):

# %%
for mode in ("sync", "async"):
    engine.reset_stats()
    watch(mode)
    counts = engine.stats()
    print(f"{mode:5}: found {counts['found']}, just in time {counts['just_in_time']}")

# %% [markdown]
# How much may come back ahead of need is bounded: `lookahead_bytes`, by default one storage, the largest. Without the
# bound the ramp would only have moved from the forward to the beginning of backward. One input takes the place of what
# a region has just freed, and is not seen in the peak; each further one is:

# %%
for ahead in (0, 1, 2, 4, 8):
    wide = ackpt.offload_saved_tensors("async", lookahead_bytes=ahead * S)
    step = measure(lambda: chain(16, wide), resident=[x], repeats=0)
    peak = step.dynamic_peak_bytes
    print(f"lookahead {ahead} S: peak {(peak - peaks['sync'][0]) / S:+.0f} S")

# %% [markdown]
# ## A disk as the store
#
# With `store="disk"` the buffers are memory-mapped files. They lose their names before the first byte is written, so
# the folder looks empty all the time, and the system takes the space back when the process ends, even when it crashes.

# %%
with tempfile.TemporaryDirectory() as folder:
    on_disk = ackpt.offload_saved_tensors(store="disk", folder=folder)
    chain(8, None)
    classic = x.grad.clone()
    chain(8, on_disk)
    listing = os.listdir(folder)
    counts = on_disk.engine.stats()
    on_disk.engine.release_buffers()
print(f"equal {torch.equal(classic, x.grad)}, files seen {listing}")
highest, left = counts["store_peak_bytes"] / S, counts["store_bytes"]
print(f"highest in the store {highest:.0f} S, left {left}")

# %% [markdown]
# A folder that does not exist, or is full, is an error that says so; the model can go on without.

# %%
try:
    ackpt.offload_saved_tensors(store="disk", folder="no/such/folder")
except ackpt.OffloadError as error:
    print(str(error).split(" in folder ")[0], "...")

# %% [markdown]
# ## Without recompute
#
# The same engine under a plain model: nothing is recomputed, everything travels. Four ways to run a model of eight
# blocks:

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
ways = ["plain", "offload", "checkpoint", "checkpoint, offload"]
way_rows = []
run("plain")
wanted = [weight.grad.clone() for weight in blocks.parameters()]
for way in ways:
    run(way)
    pairs = zip(wanted, blocks.parameters())
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
columns = {"way": "way", "peak": "dynamic peak, MiB", "moved": "out to the store, MiB"}
columns |= {"flops": "FLOPs of a step, 1e9", "equal": "gradients bit-equal"}
gradients = sum(weight.nbytes for weight in blocks.parameters()) / 2**20
caption = f"Eight Transformer blocks, 512 tokens of width 64, fp32, gradients of {gradients:.1f} MiB included."
table = markdown_table(way_rows, columns, caption, "tab-ways")
path = write_text_atomic("results/tables/05_ways.md", table)

# %% [markdown]
# ```{include} ../../results/tables/05_ways.md
# ```
#
# Without recompute nothing is computed twice, and the peak is even lower: one *operation* at a time needs its tensors,
# not one region. The price is in the third column. All that the plain model saves must travel out and back, twenty
# times as much as the inputs alone. Whether there is time for it is the next question.

# %% [markdown]
# ## Does it pay?
#
# A copy costs nothing if it ends while the device computes something anyway. How much time does it have?
#
# - **Out.** The input of a region leaves when the region's forward begins, and until the next region's leaves, there is
#   one forward: $F$.
# - **In.** It comes back half-way through the backward of the region behind it: $R / 2$, where backward is about two
#   forwards, as each matrix product of the forward has two in backward. That is $F$ again.
#
# Both copies are hidden if $S / \lambda \le F$. (Without recompute, what a block saves has $R$ to come back, but is much
# more.) For a Transformer block with $f = 4 d$ in 2 bytes a number, on a device that does $\rho$ FLOPs a second:
#
# $$ \frac{2 \, d \, T}{\lambda} \le \frac{24 \, d^2 \, T + 4 \, d \, T^2}{\rho}
#    \quad \Longleftrightarrow \quad T \ge T^* = \frac{\rho}{2 \lambda} - 6 d . $$
#
# The wider the model and the longer the sequence, the easier it is; fast devices behind slow links have it hardest. The
# first term of $F$ grows like the copy, so only attention, which grows faster, can catch up with a link that is too
# slow. `ackpt.offload_pays` does this with measured times: it fits $F$ and $R$, each with a fixed, a linear and a
# quadratic part, and compares.
#
# To see a crossover on this machine, whose memory is fast, we need a slow link and computing with a large quadratic
# part. The regions are attention and nothing else, and copies sleep.


# %%
def attend(a):
    return F.scaled_dot_product_attention(a, a, a)


def sequence(T):
    return torch.randn(1, 4, T, 32, requires_grad=True)


def block_seconds(T):
    """Forward and backward of one region, medians of seven."""
    found = []
    for _ in range(8):
        a, times = sequence(T), [time.perf_counter()]
        y = attend(a)
        times.append(time.perf_counter())
        y.sum().backward()
        found.append((times[1] - times[0], time.perf_counter() - times[1]))
    return [sorted(column)[3] for column in zip(*found[1:])]


# %%
lengths = [256, 512, 768, 1024, 1536, 2048]
bytes_per_token = 4 * 32 * 4
seconds = {T: block_seconds(T) for T in lengths}
forward, backward = ({T: pair[way] for T, pair in seconds.items()} for way in (0, 1))

# %% [markdown]
# The link is made just so slow that a copy at 1024 tokens takes as long as there is time.

# %%
link = bytes_per_token * 1024 / min(forward[1024], backward[1024] / 2)


def slow_move(buffer, target, source, size):
    time.sleep(size / link)
    real_move(buffer, target, source, size)


def pays_at(T):
    return ackpt.offload_pays(bytes_per_token, forward, backward_seconds=backward, bandwidth=link, tokens=T)


# %% [markdown]
# Then eight such regions are trained over that link. The engine counts how long copies took and how long computing
# stood still for them; what is left of the copies was hidden. (`min_bytes` is lowered so that short sequences travel,
# too.)

# %%
slow = ackpt.offload_saved_tensors("async", min_bytes=1024)


def attend_eight_times(T):
    a = sequence(T)
    for _ in range(8):
        a = ackpt.checkpoint(attend, a, offload=slow)
    a.sum().backward()


def hidden_share(T):
    attend_eight_times(T)
    slow.engine.reset_stats()
    attend_eight_times(T)
    counts = slow.engine.stats()
    copies = counts["copies_out"] + counts["copies_in"]
    share = 1 - counts["seconds_stalled"] / counts["seconds_copying"]
    return max(0.0, share), counts["seconds_copying"] / copies


# %%
transport._move = slow_move
shares = {T: hidden_share(T) for T in lengths}
transport._move = real_move

# %% tags=["measured-time", "nbval-ignore-output"] alt="Seconds per region over tokens: the copy is a straight line, forward and half of backward are curves that start below it and cross it near 1024 tokens. Measured points lie near the lines."
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
    title=f"From {pays_at(1024).hidden_from} tokens on computing takes longer than the copies",
    xlabel="tokens in the sequence",
    ylabel="one region (ms)",
    unit=1e-3,
)

# %% tags=["measured-time", "nbval-ignore-output"]
for T, pays in fitted.items():
    print(f"{T:4} tokens: predicted {pays.hidden_share:4.0%} hidden, measured {shares[T][0]:4.0%}")

# %% [markdown]
# The measured shares follow the predicted ones, roughly: they are times of threads on a busy CPU. Above the crossover a
# few per cent stay visible, because a worker that sleeps must wake up. In words:

# %% tags=["measured-time", "nbval-ignore-output"]
print(pays_at(512))

# %% [markdown]
# :::{admonition} Takeaway
# :class: tip
# Inputs of regions are few bytes for much computing: $S / \lambda \le F$ is easily met, and then offload costs memory
# traffic, not time. Whether it is met is a matter of two measured numbers, and not of the size of the model.
# :::

# %% [markdown]
# ## The experiment
#
# The published experiment compares four ways to train 12 Transformer blocks: plain, with the classic checkpoint, and
# with its inputs offloaded, synchronously and asynchronously. Ours adds offload without recompute and the tools that
# others offer. On the CPU it runs with fewer blocks, tokens and channels. Gradients of every method are compared with
# the plain ones first, to the last bit. In a terminal this is `ackpt offload`.

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
print(f"classic - async = {gain / S} S; n - 1 - h = {config.layers - 1 - 1}")
print("async - sync =", runs["ckpt_async_offload"]["peak_bytes"] - runs["ckpt_sync_offload"]["peak_bytes"])

# %% tags=["hide-input"]
rows = offload_report.rows(records)
for row in rows:
    row["store"] = "–" if row["store"] is None and "not_run" not in row else row["store"]
    for name in ("vs_baseline", "vs_classic"):
        row[name] = "–" if row[name] is None and "not_run" not in row else row[name]
columns = {
    "method": "method",
    "peak": "peak, MiB",
    "vs_baseline": "to baseline, %",
    "vs_classic": "to ckpt_classic, %",
    "store": "store, MiB",
}
caption = (
    f"Measured peaks of a step on the CPU: {config.layers} blocks, {config.total_tokens} tokens of width {config.dim}, "
    "fp32, gradients included. Methods without figures need a CUDA GPU."
)
table = markdown_table(rows, columns, caption, "tab-offload")
path = write_text_atomic("results/tables/05_offload.md", table)

# %% [markdown]
# ```{include} ../../results/tables/05_offload.md
# ```
#
# `save_on_cpu` does not copy what is on a CPU already, and what `offload_wrapper` has stored is counted as device
# memory here, so the peaks of these two are those of a checkpoint; on a GPU both move their inputs. `offload_async`
# keeps copies on their way that `offload_sync` has waited for, and pays for it in bytes.

# %% alt="Horizontal bars of the peak for eight methods: baseline far longer than all others, checkpointed methods a third of it, offloaded ones below those."
drawn = offload_report.figures(records)
path = plots.save(drawn["peak"], "results/figures/05_peaks.png")
drawn["peak"]

# %% alt="Three memory timelines, one above the other, for the classic checkpoint, sync and async offload. Classic climbs a ramp of boundaries through the forward and steps down in backward; the other two have none. Copies are drawn as thin bars below: in sync each ends at once, in async they reach into the computing."
path = plots.save(drawn["timelines"], "results/figures/05_timelines.png")
drawn["timelines"]

# %% [markdown]
# Time, with all methods taking turns, and the share of the copies' time that was hidden:

# %% tags=["measured-time", "nbval-ignore-output"]
for row in rows:
    if row["ms"] is not None:
        hidden = "" if row["hidden"] is None else f", {row['hidden']:.0f} % of the copies hidden"
        print(f"{row['method']:19} {row['ms']:6.1f} ms ({row['spread']}){hidden}")

# %% [markdown]
# ## The published sizes
#
# From shapes alone, the peaks of our model at the published sizes, beside the published figures:

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
    "Offload at the published size (12 blocks, 12 000 tokens, fp16): as printed by others for a T4, predicted for our "
    "model from shapes alone (nothing was run), and measured with our model on a GPU."
)
table = markdown_table(rows, columns, caption, "tab-offload-published")
path = write_text_atomic("results/tables/05_published.md", table)

# %% [markdown]
# ```{include} ../../results/tables/05_published.md
# ```
#
# :::{admonition} With a GPU
# :class: note
# Two commands fill the last columns:
#
# ```bash
# ackpt offload --total-tokens 12000 --num-layers 12 --hidden-dim 1024 --head-dim 64 --ff-dim 4096 \
#   --batch-size 48 --steps 3 --device cuda --out results/gpu
# nox -s reproduce -- --only 05
# ```
#
# On Colab's free GPU, `ackpt.colab.run_demo()` runs the experiment in one cell and shows table and pictures.
# :::
#
# ### What the published figures say
#
# $(n - 1 - h) \, S$ can be read backwards. How many inputs, in 4 bytes a number, has offload taken off their peak?
# (Whether an MB of theirs is $10^6$ or $2^{20}$ bytes they do not say.)

# %%
S = 12_000 * 1024 * 4
taken = printed["ckpt_classic"]["peak"] - printed["ckpt_sync_offload"]["peak"]
for name, unit in {"10^6": 10**6, "2^20": 2**20}.items():
    print(f"MB = {name} bytes: {taken * unit / S:.1f} S, expected {12 - 1 - 1}")

# %% [markdown]
# Ten and a little, with boundaries in fp32. Then their times tell more: what `sync` takes longer than `classic` is the
# time of some 20 copies, ten each way, and what `async` takes longer is the part of it that was not hidden.

# %%
ms = {method: row["milliseconds"] for method, row in printed.items()}
copying = ms["ckpt_sync_offload"] - ms["ckpt_classic"]
seen = ms["ckpt_async_offload"] - ms["ckpt_classic"]
bandwidth = 20 * S / (copying / 1e3)
print(f"a copy took {copying / 20:.1f} ms, {bandwidth / 1e9:.1f} GB/s; hidden {1 - seen / copying:.0%}")

# %% [markdown]
# Could it have been all? A checkpointed step is four forwards' worth, so a block's forward takes a 48th of it:

# %%
print(ackpt.offload_pays(1024 * 4, {12_000: ms["ckpt_classic"] / 48e3}, bandwidth=bandwidth))

# %% [markdown]
# Yes, there was time for several times as much. What kept the rest from being hidden the figures do not tell.
#
# Where the numbers of this page were made:

# %% tags=["measured-time", "nbval-ignore-output"]
records[0].environment

# %% [markdown]
# ## Exercises
#
# :::{admonition} Exercise 1: nobody holds the first input
# :class: note
# In the chain above the first region's input was $x$, which the caller holds. Change the chain so that $h = 0$, and
# check what offload takes off the peak then.
# :::

# %% tags=["solution"]
S = x.nbytes


def longer_chain(n, mode):
    x.grad.zero_()
    a = x * 2  # the product by a number saves nothing, and only the first region needs it
    for _ in range(n):
        a = ackpt.checkpoint(region, a, offload=mode)
    a.square().sum().backward()


found = [measure(lambda: longer_chain(8, mode), resident=[x], repeats=0).dynamic_peak_bytes for mode in (None, "async")]
print(f"{(found[0] - found[1]) / S:.0f} S; n - 1 = {8 - 1}")

# %% [markdown]
# :::{admonition} Exercise 2: how wide must a model be?
# :class: note
# A GPU that does $4 \cdot 10^{14}$ operations a second in bf16, behind a link of 25 GB/s. From which width $d$ on are
# the copies of block inputs hidden at any length? And at $d = 1024$, from which length on? Work it out with $T^*$, then
# ask `offload_pays`.
# :::

# %% tags=["solution"]
rate, link, d = 4e14, 25e9, 1024
print(f"d >= {rate / (12 * link):.0f} for any T; T* = {math.ceil(rate / (2 * link) - 6 * d)}")
seconds = {T: (24 * d**2 * T + 4 * d * T**2) / rate for T in (1024, 2048, 4096)}
print(ackpt.offload_pays(2 * d, seconds, bandwidth=link))

# %% [markdown]
# From $\rho / (12 \lambda)$ on, the matrix products alone hide the copies. These are peak rates; a real GPU computes more
# slowly, which makes it easier.
#
# :::{admonition} Exercise 3: another way out of bug 1
# :class: note
# Instead of keeping the source until the copy is done, one may copy a *clone* of it. In which stream must the clone be
# made? Try both, with the late side late. What does it cost?
# :::


# %% tags=["solution"]
def race_with_clone(stream):
    block, host, passed, spare = torch.ones(4), torch.zeros(4), threading.Event(), []

    def clone():
        if stream is copies:  # the side that is late
            passed.wait(0.2)
        spare.append(block.clone())

    cloned = stream.submit(clone)
    copies.submit(lambda: host.copy_(spare[0]), after=[cloned])
    compute.submit(lambda: (block.fill_(2), passed.set()))
    both_done()
    print(f"wrong bytes: {host.tolist() != [1] * 4}")


race_with_clone(copies)
race_with_clone(compute)

# %% [markdown]
# In the computing stream: there it stands between what wrote the block and what writes it next, without any event. It
# costs a second block of device memory for as long as the copy takes, which is what offload was to save.
#
# ## What we have seen
#
# - Offload is a pair of hooks and a copy. Beside the computing, four rules about order make it right, and a pool makes
#   it fast; each can be broken in a test that fails every time.
# - Storages travel, once, whatever views of them are saved. Parameters, small tensors and the tail stay.
# - Offloaded inputs take $(n - 1 - h) \, S$ off the peak of a checkpointed model, to the byte, whether copies wait or
#   not.
# - Backward brings things back in the reverse order of the forward, one ahead.
# - Copies are hidden when $S / \lambda \le F$. Attention's quadratic part makes that true for every sequence that is long
#   enough.
#
# ## Sources
#
# - {cite:t}`rhu2016`: copies to the host beside the computing, and when they are hidden.
