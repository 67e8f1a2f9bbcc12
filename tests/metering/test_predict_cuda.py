"""``cuda_choices`` on fake CPU tensors against fake CUDA tensors, in forward."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import model_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ackpt
from ackpt.metering.cuda_choices import cuda_choices
from ackpt.metering.prediction import predict


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [(tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if made:
            self.calls.append((str(func), made))
        return result


CALLS = {
    "layer_norm": lambda x, w, t: F.layer_norm(x, (8,), w, w),
    "group_norm": lambda x, w, t: F.group_norm(x, 2, w, w),
    "dropout": lambda x, w, t: F.dropout(x, 0.5),
    "cross_entropy": lambda x, w, t: F.cross_entropy(x, t),
    "cross_entropy sum": lambda x, w, t: F.cross_entropy(x, t, reduction="sum", ignore_index=-1),
    "mse_loss": lambda x, w, t: F.mse_loss(x, x),
    "l1_loss": lambda x, w, t: F.l1_loss(x, x),
    "nll_loss": lambda x, w, t: F.nll_loss(x, t),
    "bce": lambda x, w, t: F.binary_cross_entropy_with_logits(x, x),
    "gelu": lambda x, w, t: F.gelu(x),
    "silu": lambda x, w, t: F.silu(x),
    "softplus": lambda x, w, t: F.softplus(x),
    "linear": lambda x, w, t: F.linear(x, torch.empty(4, 8, device=x.device)),
    "matmul": lambda x, w, t: x @ x.t(),
    "pow": lambda x, w, t: x.pow(2),
    "** 2": lambda x, w, t: x**2,
    "rsqrt": lambda x, w, t: torch.rsqrt(x.mean(-1)),
    "exp": lambda x, w, t: x.exp(),
    "logsumexp": lambda x, w, t: x.logsumexp(-1),
    "softmax": lambda x, w, t: F.softmax(x, -1),
    "x.softmax": lambda x, w, t: x.softmax(-1),
    "log_softmax": lambda x, w, t: torch.log_softmax(x, dim=-1),
    "sum": lambda x, w, t: x.sum(-1),
    "cumsum": lambda x, w, t: x.cumsum(0),
    "norm": lambda x, w, t: x.norm(),
    "vector_norm": lambda x, w, t: torch.linalg.vector_norm(x),
    "mean": lambda x, w, t: x.mean(),
    "cat": lambda x, w, t: torch.cat([x, x.float()]),
    "stack": lambda x, w, t: torch.stack([x, x.float()]),
    "add": lambda x, w, t: x + w,
    "embedding": lambda x, w, t: F.embedding(t, x),
}


def run_forward(device, dtype, call, choices):
    with FakeTensorMode(), torch.no_grad():
        x, w = torch.empty(6, 8, device=device, dtype=dtype), torch.empty(8, device=device)
        t = torch.empty(6, device=device, dtype=torch.int64)
        # torch.autocast("cuda") turns itself off where there is no GPU.
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.set_autocast_enabled(device, True)
        torch.autocast_increment_nesting()
        try:
            with choices, Log() as log:
                call(x, w, t)
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled(device, False)
    return log.calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_cuda_choices_under_autocast(name, dtype):
    """In forward without gradients, fake CUDA tensors run the operations that autocast chooses on a GPU."""
    on_cuda = run_forward("cuda", dtype, CALLS[name], contextlib.nullcontext())
    imitated = run_forward("cpu", dtype, CALLS[name], cuda_choices())
    assert imitated == on_cuda


FAKE_CUDA = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.empty(4, 4, device="cuda", requires_grad=True).sin()
"""


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="with CUDA, fake CUDA tensors can require grad")
def test_fake_cuda_tensors_end_the_process():
    """The reason for `cuda_choices`. If this fails, predict on fake CUDA tensors instead."""
    finished = subprocess.run([sys.executable, "-c", FAKE_CUDA], capture_output=True, text=True, check=False)
    assert finished.returncode != 0 and "not linked with support for cuda devices" in finished.stderr


def test_cuda_step():
    """RMSNorm saves its input and one element per row, dropout a byte mask; the same in a recomputation."""
    rows, dim = 512, 64

    def step_bytes(device, checkpointed):
        with FakeTensorMode():
            model = torch.nn.Sequential(torch.nn.RMSNorm(dim, 1e-6), torch.nn.Dropout(0.5))
            x = torch.empty(rows, dim)
        run = (lambda: ackpt.checkpoint(model, x)) if checkpointed else (lambda: model(x))
        predicted = predict(lambda: run().sum().backward(), resident=(model, x), device=device, warmup=0, round_to=1)
        return predicted.timeline.live[predicted.timeline.boundary], predicted.peak_bytes - predicted.resident_bytes

    saved = {
        "output of the norm and of dropout": 0,
        "scale of the norm": rows * 4,
        "mask of dropout": rows * dim,
        "sum and its gradient": 2 * 4,
    }
    assert step_bytes("cuda", False)[0] == sum(saved.values())
    assert step_bytes("cpu", False)[0] > 2 * sum(saved.values())  # composed operations, and a mask of floats
    assert step_bytes("cuda", True)[0] == 2 * 4
    assert step_bytes("cuda", True)[1] < step_bytes("cpu", True)[1]


BATCH, LENGTH, HEADS, WIDTH = 2, 100, 4, 16
OUTPUT = BATCH * LENGTH * HEADS * WIDTH  # elements
ROWS = BATCH * HEADS * LENGTH
HALF = torch.float16
FLASH_STATE, EFFICIENT_STATE = 16 + 8, 8 + 8  # of the random generator: flash_api.cpp; seed and offset


def attention_saves(dtype, masked=False, context=contextlib.nullcontext, **options):
    """Bytes at the end of forward, without queries, keys and values."""

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options)

    with FakeTensorMode():
        qkv = torch.nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH, bias=False, dtype=dtype)
        model = model_of(forward, heads=HEADS, options=options, qkv=qkv)
        x = torch.empty(BATCH, LENGTH, HEADS * WIDTH, dtype=dtype)
        mask = torch.empty(LENGTH, LENGTH, dtype=torch.bool) if masked else None

    def step():
        with context():
            model(x, mask).sum().backward()

    resident = (model, x) if mask is None else (model, x, mask)
    found = predict(step, resident=resident, device="cuda", warmup=0, round_to=1)
    boundary = found.timeline.live[found.timeline.boundary]
    inputs = 3 * OUTPUT * dtype.itemsize
    return boundary - inputs - 2 * dtype.itemsize  # the loss and its gradient


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_saves_output_and_sums_of_rows(dropout):
    saved = OUTPUT * 2 + ROWS * 4 + FLASH_STATE
    assert attention_saves(torch.bfloat16, dropout_p=dropout, is_causal=True) == saved


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_efficient_attention_pads_the_sums_of_rows_and_the_mask(dropout):
    padded_rows = BATCH * HEADS * 128 * 4
    saved = OUTPUT * 4 + padded_rows + EFFICIENT_STATE
    assert attention_saves(torch.float32, dropout_p=dropout) == saved
    mask = LENGTH * 104 * 4  # numbers instead of bools, in rows of a multiple of 8
    assert attention_saves(torch.float32, masked=True, dropout_p=dropout) == saved + mask


def test_attention_that_no_kernel_fuses_saves_weights_and_a_mask_of_bytes():
    def math():
        return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)

    # Scaled queries and keys and a copy of the values replace the three; the softmax, its dropout and mask are added.
    weights = ROWS * LENGTH
    assert attention_saves(torch.float32, dropout_p=0.1, context=math) == 2 * weights * 4 + weights


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_of_multi_head_attention(autocast):
    """torch calls attention from its own Python code, in which function modes are disabled."""
    with FakeTensorMode():
        layer = torch.nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
        x = torch.empty(2, 1024, 64)

    def step():
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            out = layer(x, x, x, need_weights=False)[0]
        out.sum().backward()

    matrix = 2 * 4 * 1024 * 1024
    found = predict(step, resident=(layer, x), device="cuda", round_to=1)
    assert found.dynamic_peak_bytes < matrix
    assert predict(step, resident=(layer, x), round_to=1).dynamic_peak_bytes > 4 * matrix


def test_attention_on_meta_tensors():
    x = torch.empty(2, 4, 100, 16, device="meta", requires_grad=True)
    found = predict(lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum().backward(), device="cuda")
    assert found.dynamic_peak_bytes < 2 * 4 * 100 * 100 * 4


def predicted(step, *resident, device="cuda", **options):
    return predict(step, resident=resident, device=device, **options)


@pytest.mark.parametrize("call", [F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax])
def test_a_float32_softmax_of_float16_makes_no_copy_of_its_input(call):
    """``softmax`` in SoftMax.cpp; its backward allocates ``grad * output`` (``softmax_backward_cuda_out``)."""
    with FakeTensorMode():
        x, other = (torch.empty(64, 128, dtype=dtype, requires_grad=True) for dtype in (HALF, torch.bfloat16))
        gradient = torch.empty(64, 128)

    def live_at_the_peak(step):
        return predicted(step, warmup=0, round_to=1).dynamic_peak_bytes

    half, single = 64 * 128 * 2, 64 * 128 * 4
    product = 0 if call is F.log_softmax else single
    assert live_at_the_peak(lambda: call(x, dim=-1, dtype=torch.float32)) == single
    assert live_at_the_peak(lambda: call(x, dim=-1, dtype=torch.float32).backward(gradient)) == single + half + product
    assert live_at_the_peak(lambda: call(other, dim=-1, dtype=torch.float32)) == 2 * single  # only float16 is fused


@pytest.mark.parametrize(
    ("device", "config", "workspace"),
    [
        ("a100-80g", None, 8_519_680),
        ("t4", None, 8_519_680),
        ("cuda", None, 8_519_680),
        ("h100-80g", None, 33_554_432),
        ("rtx5090", None, 33_554_432),
        ("h100-80g", ":4096:8", 33_554_432),
        ("t4", ":16:8:4096:1", 16 * 8 * 1024 + 4096 * 1024),
    ],
)
def test_every_thread_that_multiplies_matrices_has_a_workspace(monkeypatch, device, config, workspace):
    """``parseChosenWorkspaceSize`` in CublasHandlePool.cpp; backward has a thread of its own."""
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    with FakeTensorMode():
        layer, x = torch.nn.Linear(64, 64, bias=False), torch.empty(8, 64)
        gradient = torch.empty(8, 64)
    forward = predicted(lambda: layer(x), layer, x, gradient, device=device)
    both = predicted(lambda: layer(x).backward(gradient), layer, x, gradient, device=device)
    assert (forward.categories["other"], both.categories["other"]) == (workspace, 2 * workspace)
    assert predicted(lambda: x.sin(), x, device=device).categories["other"] == 0


@pytest.mark.parametrize(
    "make", [lambda: torch.nn.RMSNorm(64), lambda: torch.nn.LayerNorm(64), lambda: torch.nn.Linear(64, 32, bias=False)]
)
def test_norms_and_matmuls_copy_expanded_gradients(make):
    """The gradient of a sum is one element for all; ``_fused_rms_norm_backward_cuda``, ``layer_norm_backward_cuda``,
    ``prepare_matrix_for_cublas`` in Blas.cpp."""
    with FakeTensorMode():
        layer, x = make(), torch.empty(256, 64)
        x.requires_grad_(not isinstance(layer, torch.nn.Linear))
        gradient = torch.empty_like(layer(x))

    def peak(backward):
        return predicted(lambda: backward(layer(x)), layer, x, gradient, round_to=1).dynamic_peak_bytes

    contiguous, expanded = peak(lambda y: y.backward(gradient)), peak(lambda y: y.sum().backward())
    assert expanded - contiguous in range(gradient.nbytes, gradient.nbytes + 9)


def test_flash_attention_accumulates_gradients_of_queries_in_float32():
    """``mha_bwd`` in flash_api.cpp, with gradients of keys for every head of the queries."""
    from ackpt.metering.kernel_memory import cuda_temporaries

    with FakeTensorMode():
        query, key = torch.empty(2, 8, 100, 48, dtype=HALF), torch.empty(2, 2, 100, 48, dtype=HALF)
        gradient = torch.empty(2, 100, 8, 48, dtype=HALF).transpose(1, 2)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    per_head = 2 * 100 * 8 * 48 * 2
    rows = 2 * 8 * 128
    assert cuda_temporaries(backward, (gradient, query, key, key)) == [rows * 4, rows * 64 * 4, per_head, per_head]
    assert cuda_temporaries(backward, (gradient, query, query, query)) == [rows * 4, rows * 64 * 4]
    assert cuda_temporaries(backward, (query.contiguous(), query, query, query))[0] == per_head


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_decoders_of_transformers_attend_without_a_mask(device):
    """transformers reads the values of position ids, which fake tensors do not have (`found_packed`)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4
    )
    config.vocab_size, length = 16, 512

    def peak(implementation, **given):
        config._attn_implementation = implementation
        with FakeTensorMode():
            model = transformers.LlamaForCausalLM(config)
            tokens = torch.empty(1, length, dtype=torch.int64)
            given = {name: make() for name, make in given.items()}

        def step():
            model(tokens, labels=tokens, use_cache=False, **given).loss.backward()

        return predicted(step, model, tokens, *given.values(), device=device).dynamic_peak_bytes

    matrix = length * length
    without = peak("sdpa")
    assert without < 8 * matrix < peak("eager")
    # Positions from outside may be those of several sequences: then the mask is a tensor.
    assert peak("sdpa", position_ids=lambda: torch.empty(1, length, dtype=torch.int64)) >= without + matrix


def test_adafactor_reads_values():
    with FakeTensorMode():
        layer, x = torch.nn.Linear(64, 32), torch.empty(8, 64)
        optimizer = torch.optim.Adafactor(layer.parameters())

    def step():
        layer(x).sum().backward()
        optimizer.step()

    found = predicted(step, layer, optimizer, x)
    assert 0 < found.categories["optimizer"] < found.categories["parameters"]
    assert found.allocator["optimizer_peak_bytes"] <= found.peak_bytes


def test_gradient_scalers_read_values():
    with FakeTensorMode():
        layer, x = torch.nn.Linear(64, 32), torch.empty(8, 64)
        optimizer, scaler = torch.optim.AdamW(layer.parameters()), torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(layer(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert predicted(step, layer, optimizer, x).categories["optimizer"] == 4 * 2 * (64 * 32 + 128)  # rounded to 512


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.nonzero()])
def test_a_step_that_reads_values_is_refused(read):
    with FakeTensorMode():
        x = torch.empty(8)
    for device in ("cpu", "cuda"):
        with pytest.raises(ackpt.MeterError, match=r"the step needs the values of a tensor .*test_predict_cuda.py:\d+"):
            predict(lambda: read(x), resident=(x,), device=device)


def test_optimizers_choose_foreach_as_for_parameters_on_a_gpu():
    with FakeTensorMode():
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(8))
        x = torch.empty(8, 64)

    def peak(device, **options):
        with FakeTensorMode():
            optimizer = torch.optim.AdamW(layers.parameters(), **options)

        def step():
            for layer in layers:
                layer(x).sum().backward()
            optimizer.step()

        return predicted(step, layers, optimizer, x, device=device, round_to=1).dynamic_peak_bytes

    assert peak("cuda") == peak("cuda", foreach=True) > peak("cuda", foreach=False)
    assert peak("cuda", foreach=False) == peak("cpu") - 12  # the CPU makes a tensor of the number that it divides by


def test_a_gpu_has_peaks_of_its_allocator_and_of_phases():
    with FakeTensorMode():
        layer, x = torch.nn.Linear(1024, 1024), torch.empty(512, 1024)
        optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)

    def step():
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    found = predicted(step, layer, optimizer, x, device="t4")
    peaks = found.allocator
    phases = [peaks[f"{phase}_peak_bytes"] for phase in ("forward", "backward", "optimizer")]
    assert max(phases) == found.peak_bytes <= peaks["reserved_peak_bytes"]
    assert peaks["reserved_peak_bytes"] % 2**21 == 0 and peaks["largest_free_block_bytes"] > 0
    assert sum(found.categories.values()) == found.peak_bytes and found.device == "t4 (predicted)"
    assert found.to_json()["reserved_peak_bytes"] == peaks["reserved_peak_bytes"]


def test_every_device_with_rates_has_a_compute_capability():
    from ackpt.metering.gpus import CAPABILITIES, gpu
    from ackpt.planner.costs.devices import DEVICES

    assert set(DEVICES) == set(CAPABILITIES) - {"cuda"}
    for name, device in DEVICES.items():
        if device.source.startswith("AMD"):
            continue
        assert ("bfloat16" in device.flops_per_second) == (gpu(name).capability >= (8, 0))
        assert 100 * 2**20 < gpu(name).context_bytes < 2**30


def test_gradients_that_exist_before_are_allocated():
    with FakeTensorMode():
        layer, x = torch.nn.Linear(512, 512), torch.empty(8, 512)

    def step():
        layer(x).sum().backward()

    first = predict(step, resident=(layer, x), device="a100-80g")
    again = predict(step, resident=(layer, x), device="a100-80g")  # with the gradients of the first
    assert layer.weight.grad is not None and again.peak_bytes == first.peak_bytes
    assert again.allocator["start_peak_bytes"] - first.allocator["start_peak_bytes"] == 4 * (512 * 512 + 512)
    assert min(again.categories.values()) >= 0
