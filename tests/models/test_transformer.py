"""Models: what attention computes and allocates, what shapes predict, sizes, initial weights, bad input."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import raises, threads
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ackpt.models import PUBLISHED, LanguageModel, RMSNorm, Transformer, TransformerConfig, attention, transformer

TINY = TransformerConfig(dim=32, ff_dim=64, layers=2, head_dim=16, vocab_size=50)


def offsets(*lengths, device="cpu"):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32).to(device)


def equal_offsets(sequences, length, device):
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * length


def naive_attention(q, k, v, lengths, causal):
    pieces = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        pieces.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
    return torch.cat(pieces)


def qkv(tokens, heads=2, head_dim=16, **kwargs):
    generator = torch.Generator().manual_seed(tokens)
    make = {"dtype": torch.float32, "requires_grad": True, **kwargs}
    return [torch.randn(tokens, heads, head_dim, generator=generator, **make) for _ in range(3)]


class Ops(TorchDispatchMode):
    """Every op that reached a kernel, and the largest tensor that any of them gave back."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.name().split("::")[1])
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(7, 7, 7), (5, 1, 9), (4, 0, 6), (12,), (3, 3, 0)])
def test_attention_is_softmax_attention_within_each_sequence(lengths, causal):
    q, k, v = qkv(sum(lengths), dtype=torch.float64)
    out = attention(q, k, v, offsets(*lengths), max(lengths), causal)
    expected = naive_attention(q, k, v, lengths, causal)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), weights)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (q, k, v), weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_in_lower_precision_is_close_to_float64(dtype):
    q, k, v = qkv(300, dtype=torch.float64)
    low = attention(q.to(dtype), k.to(dtype), v.to(dtype), offsets(100, 200), 200, causal=True)
    assert low.dtype == dtype
    expected = attention(q, k, v, offsets(100, 200), 200, causal=True)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(low.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("lengths", [(6, 6), (5, 7)])
def test_heads_that_are_not_one_run_of_memory_give_the_same_bits(lengths):
    q, k, v = (x.detach() for x in qkv(12))
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    cu_seqlens = offsets(*lengths)
    expected = attention(q, k, v, cu_seqlens, max(lengths))
    assert torch.equal(attention(*strided, cu_seqlens, max(lengths)), expected)


def test_max_seqlen_may_be_an_upper_bound():
    q, k, v = qkv(12)
    exact = attention(q, k, v, offsets(4, 8), 8)
    assert torch.equal(attention(q, k, v, offsets(4, 8), 100), exact)


def allocations(step):
    """Bytes of every allocation (and, negative, every release) while `step` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    return [event.nbytes() for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 1048)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_attention_matrix_is_allocated(dtype, lengths, causal):
    q, k, v = qkv(2048, dtype=dtype)
    matrix = 1024 * 1024 * 2 * q.itemsize
    with threads(2):  # the CPU kernel's scratch grows with the threads, not with the length
        sizes = allocations(lambda: attention(q, k, v, offsets(*lengths), max(lengths), causal).sum().backward())
        control = allocations(lambda: naive_attention(q, k, v, (1024, 1024), causal).sum().backward())
    assert len(sizes) > 10 and max(sizes) < matrix <= max(control)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, "_scaled_dot_product_flash_attention_for_cpu"),
        (torch.float64, "_scaled_dot_product_flash_attention_for_cpu"),
        (torch.bfloat16, "_varlen_attn"),
        (torch.float16, "_varlen_attn"),
    ],
)
def test_meta_tensors_take_a_flash_op_forward_and_backward(dtype, op):
    q, k, v = (torch.empty(4096, 2, 16, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    with Ops() as ops:
        out = attention(q, k, v, equal_offsets(4, 1024, "meta"), 1024, causal=True)
        out.sum().backward()
    assert out.shape == q.shape and q.grad is not None and q.grad.shape == q.shape
    assert {op, op + "_backward"} <= ops.names
    assert ops.largest == q.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_cpu_tensors_take_the_ops_of_the_real_ones(dtype):
    def run():
        q, k, v = (torch.zeros(256, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3))
        with Ops() as ops:
            attention(q, k, v, equal_offsets(2, 128, "cpu"), 128).sum().backward()
        return q.grad.shape, {name for name in ops.names if "attention" in name}

    real = run()
    with FakeTensorMode():
        assert run() == real
    assert real[1] == {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_cuda_tensors_take_a_memory_efficient_op(dtype):
    # Autograd asks the driver about a fake CUDA tensor, and aborts in builds without CUDA: without a GPU, forward only.
    backward, cudnn = torch.cuda.is_available(), torch.backends.cuda.cudnn_sdp_enabled()
    with FakeTensorMode():
        q, k, v = (torch.zeros(2048, 2, 16, device="cuda", dtype=dtype) for _ in range(3))
        q.requires_grad_(backward)
        with Ops() as ops:
            out = attention(q, k, v, equal_offsets(2, 1024, "cuda"), 1024, causal=True)
            if backward:
                out.sum().backward()
    assert out.device.type == "cuda" and out.shape == q.shape
    expected = "_varlen_attn" if dtype == torch.bfloat16 else "_scaled_dot_product_efficient_attention"
    assert expected in ops.names and ops.largest == q.numel()
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_unequal_lengths_that_cannot_be_read_are_refused(device):
    with FakeTensorMode() if device == "cpu" else torch.device("meta"):
        q = torch.zeros(10, 2, 16, device=device)
        cu_seqlens = torch.zeros(3, dtype=torch.int32, device=device)
        raises(ValueError, r"10 tokens must be 2 sequences x max_seqlen 6", lambda: attention(q, q, q, cu_seqlens, 6))


def test_meta_tensors_with_readable_offsets_may_be_unequal():
    q = torch.empty(10, 2, 16, device="meta")
    assert attention(q, q, q, offsets(4, 6), 6).shape == q.shape


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 8)])
def test_rms_norm_equals_torch(shape):
    norm = RMSNorm(8, 1e-6).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = F.rms_norm(x, (8,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), expected)
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad(norm(x), (x, norm.weight), weights)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, norm.weight), weights))
    assert torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_saves_its_input_and_one_number_per_row(dtype):
    norm = RMSNorm(64, 1e-6)
    x = torch.randn(100, 64, dtype=dtype, requires_grad=True)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
        out = norm(x)
    assert out.dtype == dtype
    assert sorted(t.nbytes for t in saved) == sorted([x.nbytes, 64 * 4, 100 * 4])


def test_rms_norm_refuses_a_second_derivative():
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(RMSNorm(8, 1e-6)(x).square().sum(), x, create_graph=True)
    raises(RuntimeError, "once_differentiable", lambda: grad.sum().backward())


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_published_sizes_are_exact():
    assert PUBLISHED == TransformerConfig(1024, 4096, 12, 128, 50257)
    assert PUBLISHED.heads == 8 and not PUBLISHED.causal
    with torch.device("meta"):
        transformer, language_model = Transformer(PUBLISHED), LanguageModel(PUBLISHED)
    block = 3 * 1024**2 + 1024**2 + 2 * 1024 * 4096 + 2 * 1024 + 2 * 128
    assert count(transformer) == 12 * block + 1024 == 151_023_616
    assert count(language_model) == 151_023_616 + 2 * 50257 * 1024 == 253_949_952
    assert {p.device.type for p in language_model.parameters()} == {"meta"}
    assert language_model.head.weight is not language_model.embedding.weight
    assert not any(name.endswith("bias") for name, _ in language_model.named_parameters())


def test_initial_weights_have_their_scales():
    model = LanguageModel(dataclasses.replace(TINY, dim=256, ff_dim=512, layers=8, vocab_size=1000))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            assert abs(parameter.std().item() / (0.005 if residual else 0.02) - 1) < 0.02
            assert abs(parameter.mean().item()) < 0.001


def test_sequences_of_a_pack_do_not_see_each_other():
    model = Transformer(TINY)
    x = torch.randn(12, 32)
    out = model(x, offsets(5, 7), 7)
    x[5:] += 1
    changed = model(x, offsets(5, 7), 7)
    assert torch.equal(out[:5], changed[:5]) and not torch.equal(out[5:], changed[5:])


def test_only_the_language_model_is_causal():
    ids = torch.arange(10)
    model, trunk = LanguageModel(TINY), Transformer(TINY)
    later = ids.clone()
    later[6] = 49
    logits, changed = (model(t, offsets(10), 10) for t in (ids, later))
    assert logits.shape == (10, 50)
    assert torch.equal(logits[:6], changed[:6]) and not torch.equal(logits[6:], changed[6:])
    x = torch.randn(10, 32)
    other = torch.cat([x[:6], torch.randn(4, 32)])
    assert not torch.equal(trunk(x, offsets(10), 10)[:6], trunk(other, offsets(10), 10)[:6])


def test_the_loss_is_the_mean_cross_entropy_in_chunks_too():
    model = LanguageModel(TINY)
    tokens, targets = torch.randint(50, (2, 24))
    targets[3] = -100
    logits = model(tokens, offsets(10, 14), 14)
    assert torch.equal(logits, model.head(model.hidden(tokens, offsets(10, 14), 14)))
    expected = F.cross_entropy(logits, targets)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    for chunks in (None, 1, 5):
        loss = model(tokens, offsets(10, 14), 14, targets=targets, loss_chunks=chunks)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), grads)


@pytest.mark.parametrize("name", ["dim", "ff_dim", "layers", "head_dim", "vocab_size"])
@pytest.mark.parametrize("value", [0, -4, 1.5, True])
def test_a_size_must_be_a_positive_integer(name, value):
    raises(ValueError, f"{name} must be a positive integer, got {value}", lambda: TransformerConfig(**{name: value}))


Q = torch.zeros(6, 2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(Q[0], Q[0], Q[0], offsets(6), 6), r"must have one shape \[tokens, heads"),
        (lambda: attention(Q, Q[:3], Q, offsets(6), 6), r"got \[6, 2, 8\], \[3, 2, 8\], \[6, 2, 8\]"),
        (lambda: attention(Q, Q.double(), Q, offsets(6), 6), "must have one floating dtype"),
        (lambda: attention(Q.int(), Q.int(), Q.int(), offsets(6), 6), "must have one floating dtype"),
        (lambda: attention(Q, Q, Q, offsets(6).long(), 6), r"cu_seqlens must be int32 .* torch.int64"),
        (lambda: attention(Q, Q, Q, torch.zeros(1, dtype=torch.int32), 6), r"of shape \[1\]"),
        (lambda: attention(Q, Q, Q, offsets(2, 3), 3), "number of tokens, 6; it goes from 0 to 5"),
        (lambda: attention(Q, Q, Q, offsets(6) + 1, 6), "it goes from 1 to 7"),
        (lambda: attention(Q, Q, Q, offsets(8, -2), 8), "and falls between"),
        (lambda: attention(Q, Q, Q, offsets(2, 4), 3), "max_seqlen 3 is less than the longest sequence, 4"),
        (lambda: attention(Q, Q, Q, offsets(6), 0), "max_seqlen must be at least 1"),
        (lambda: Transformer(TINY)(torch.zeros(6, 31), offsets(6), 6), r"floats \[tokens, 32\], got"),
        (lambda: Transformer(TINY)(torch.zeros(6, 32).int(), offsets(6), 6), r"got torch.int32 \[6, 32\]"),
        (lambda: LanguageModel(TINY)(torch.zeros(6), offsets(6), 6), "tokens must be int64"),
        (lambda: LanguageModel(TINY)(torch.arange(6)[None], offsets(6), 6), r"of shape \[tokens\]"),
        (lambda: LanguageModel(TINY)(torch.arange(45, 51), offsets(6), 6), "ids from 45 to 50, outside"),
        (lambda: LanguageModel(TINY)(torch.arange(-1, 5), offsets(6), 6), "vocab_size is 50"),
    ],
)
def test_bad_arguments_are_named(call, message):
    raises(ValueError, message, call)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": torch.zeros(5, dtype=torch.int64)}, r"targets \[5\] and tokens \[6\] differ in shape"),
        ({"targets": torch.tensor([0, 1, 50, 3, -100, 5])}, "targets holds ids from 0 to 50, outside"),
        ({"targets": torch.tensor([0, 1, -5, 3, -100, 5])}, "targets holds ids from -5 to 5, outside"),
        ({"targets": torch.zeros(6)}, "targets must be int64"),
        ({"loss_chunks": 2}, "loss_chunks splits the loss: it needs targets"),
        ({"targets": torch.arange(6), "loss_chunks": 0}, "chunks"),
    ],
)
def test_bad_targets_are_named(arguments, message):
    raises(ValueError, message, lambda: LanguageModel(TINY)(torch.arange(6), offsets(6), 6, **arguments))


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float16, "EFFICIENT_ATTENTION"), (torch.bfloat16, "MATH")])
def test_a_gpu_before_capability_8_has_attention_in_float16_only(dtype, kernel, monkeypatch):
    """A T4: no `varlen_attn`, and no fused kernel in bfloat16."""
    wanted = attention(q := torch.randn(8, 2, 16).to(dtype), q, q, offsets(4, 4), 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    choice = getattr(torch.nn.attention.SDPBackend, kernel).value
    monkeypatch.setattr(transformer, "_choice", lambda *_, **__: choice)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    if kernel == "MATH":
        with pytest.raises(ValueError, match=r"use float32 or float16 \(bfloat16 needs compute capability 8.0\)"):
            attention(q, q, q, offsets(4, 4), 4)
    else:
        assert torch.allclose(attention(q, q, q, offsets(4, 4), 4), wanted, atol=2e-3)
