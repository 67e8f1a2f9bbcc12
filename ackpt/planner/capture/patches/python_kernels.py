"""Replace the Python code that torch runs for an operation during capture, where eager runs C++ or rounds differently.

Five groups: casts of weights, operations that stay whole, matrix products, random draws, and derivative formulas.
Torch: ``OpOverload.py_kernels`` in ``torch/_ops.py``, which ``py_impl`` fills. Tests: ``test_python_kernels.py``.
"""

import contextlib
import threading
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._decomp import decompositions
from torch._decomp.decompositions import upsample_compute_output_size
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .kernels import replaced

aten = torch.ops.aten
_KEYS = _KEY, _AUTOGRAD = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd


@contextlib.contextmanager
def put(kernels):
    """Inside, captures compute ``{(operation, dispatch key): function}`` by the function; None: by C++, as in eager."""
    try:
        with replaced([(operation.py_kernels, key, kernel) for (operation, key), kernel in kernels.items()]):
            for operation, _ in kernels:
                operation._dispatch_cache.clear()
            yield
    finally:
        for operation, _ in kernels:
            operation._dispatch_cache.clear()


# Weights are cast once per autocast region, as in eager mode; torch's capture casts them at every use. The gradients of
# several uses then add up in half precision, as they do in eager, instead of in float32.
#
# Torch: ``disable_autocast_cache`` in ``torch/fx/experimental/proxy_tensor.py`` switches the cache of casts off while
# it captures; in eager, ``cached_cast`` in ``aten/src/ATen/autocast_mode.cpp`` keeps them. Test:
# ``test_autocast_casts_a_weight_once_as_eager_does`` in ``tests/planner/backend/test_backend.py``.
_TO = torch.ops.aten.to.dtype
_weights: dict[int, torch.Tensor] = {}  # traced, by their ids
_made: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def is_weight(tensor) -> bool:
    """Whether autocast keeps what it casts this tensor to."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
    )


def cast_once(*traced: torch.Tensor) -> None:
    """From here to the next call, autocast casts once each of the traced tensors that represent weights."""
    _weights.clear()
    _made.clear()
    _weights.update({id(tensor): tensor for tensor in traced})


@contextlib.contextmanager
def casting_once(traced):
    cast_once(*traced)
    try:
        yield
    finally:
        cast_once()


def _to(x, dtype, *args, **kwargs):
    if id(x) not in _weights or not _autocast_asks(x.device.type):
        return _TO._op_dk(_KEY, x, dtype, *args, **kwargs)
    if (id(x), dtype) not in _made:
        _made[id(x), dtype] = _TO._op_dk(_KEY, x, dtype, *args, **kwargs)
    return _made[id(x), dtype]


def _autocast_asks(device: str) -> bool:
    """Only autocast's own kernels switch autocast off while they cast."""
    if torch.is_autocast_enabled(device):
        return False
    with enable_reentrant_dispatch():  # in the state of the call
        return torch.is_autocast_enabled(device)


# Operations that torch's capture would decompose in Python with different rounding keep their C++. Some decompositions
# also return gradients with other strides, drop the dropout between recurrent layers, or read values.
#
# Torch: functions registered with ``py_impl(DispatchKey.CompositeImplicitAutograd)`` or ``DispatchKey.Autograd`` in
# ``torch/_decomp/decompositions.py`` and ``torch/_refs`` (``lstm_impl``, ``upsample_bilinear2d``, ``hardshrink``, ...).
# The C++ of ``upsample_*.vec`` (``aten/src/ATen/native/UpSample*.cpp``) and of ``max_pool1d`` (``Pooling.cpp``) takes
# no symbolic sizes: it has Python code here. An operation can leave the list when the tests pass without.
_RESIZED = (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d)
_RESIZED += (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa)
# Taken apart into indexing, these have contiguous gradients; eager's keep the order of the incoming ones.
_RESIZED += (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d)
_RESIZED += (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d)
_WHOLE = [
    *(packet.default for packet in _RESIZED),
    *(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input),
    aten.hardshrink.default,
    aten.softshrink.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.istft.default,  # reads the values of its window, so that no model with it can be captured
]


def _resizing(packet):
    """The computation of the C++ of ``packet.vec``, for sizes that may be symbols."""

    def vec(x, output_size, *rest):
        *options, factors = rest
        size: Any = upsample_compute_output_size(x.shape, output_size, factors)
        return packet.default(x, size, *options, *(factors or [None] * len(size)))

    return vec


def _max_pool1d_with_indices(x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    """The computation of the C++, for sizes that may be symbols."""
    sizes = [
        (least, *each) for least, each in zip((1, 1, 0, 1), (kernel_size, stride or kernel_size, padding, dilation))
    ]
    results = aten.max_pool2d_with_indices.default(x.unsqueeze(-2), *sizes, ceil_mode)
    return tuple(result.squeeze(-2) for result in results)


_RESIZING = {packet.vec: _resizing(packet) for packet in _RESIZED}
_POOLING = {
    aten.max_pool1d_with_indices.default: _max_pool1d_with_indices,
    aten.max_pool1d.default: lambda *args, **kwargs: _max_pool1d_with_indices(*args, **kwargs)[0],
}
_COMPOSITE = {**dict.fromkeys(_WHOLE), **_RESIZING, **_POOLING}


# Products of a batch of matrices and a matrix run ``mm`` or ``bmm`` as in eager; the C++ takes no symbolic sizes.
#
# Torch: ``should_fold`` in ``torch/_decomp/decompositions.py`` asks for a contiguous batch, and that of
# ``LinearAlgebra.cpp`` in ``aten/src/ATen/native`` for one that a view can fold, since torch 2.14 with any strides
# of dimensions of size 1; ``linear`` in ``Linear.cpp`` adds a bias in place, but not for tensor subclasses.
def _folds(a, b, is_out: bool) -> bool:
    batch, other = (a, b) if a.dim() >= b.dim() else (b.mT, a)
    if batch.dim() < 3 or other.dim() > 2:
        return False
    if other.requires_grad and not is_out:
        return True
    folded = [*zip(batch.shape[:-1], batch.stride())]
    if torch.__version__ >= "2.14":
        folded = [(size, stride) for size, stride in folded if size != 1]
    is_view = batch.numel() == 0 or all(outer == inner * n for (_, outer), (n, inner) in zip(folded, folded[1:]))
    return a.dim() != 2 and is_view


_LINEAR = aten.linear.default


def _linear(x, weight, bias=None):
    if bias is None or x.dim() == 2 or x.is_contiguous():
        return _LINEAR._op_dk(_KEY, x, weight, bias)
    return torch.matmul(x, weight.t()) + bias


# Random operations with the arithmetic of eager mode. Captured, torch's dropout becomes ``native_dropout``, which
# multiplies by 1/(1-p) at another place and so rounds differently. Eager multiplies by a mask of 0 and 1/(1-p), which
# one operation draws here. A tensor that is filled in place becomes a new contiguous tensor when captured; eager fills
# it in the order of its memory.
#
# Torch: ``dropout`` in ``torch/_decomp/decompositions.py``; in eager, ``_dropout_impl`` in
# ``aten/src/ATen/native/Dropout.cpp``.
torch.library.define(
    "ackpt_graph::dropout_noise",
    "(Tensor x, float p) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pointwise),
)
torch.library.define(
    "ackpt_graph::filled",
    "(Tensor x, str operation, Scalar[] numbers, Tensor[] tensors, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl("ackpt_graph::dropout_noise", "CompositeExplicitAutograd")
def _noise(x, p: float):
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@torch.library.impl("ackpt_graph::filled", "CompositeExplicitAutograd")
def _filled(x, operation: str, numbers, tensors, generator=None):
    """A tensor like `x` after the in-place `operation`."""
    name, _, overload = operation.partition(".")
    fill = getattr(getattr(aten, name), overload)
    return fill(torch.empty_like(x), *tensors, *numbers, generator=generator)


for _name in ("dropout_noise", "filled"):
    torch.library.register_fake(f"ackpt_graph::{_name}")(lambda x, *_, **__: torch.empty_like(x))


def _dropout(x, p: float, train: bool, multiply=torch.mul):
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return multiply(x, torch.zeros((), dtype=x.dtype, device=x.device))
    if x.device.type != "cpu" and multiply is torch.mul:
        return aten.native_dropout.default(x, p, train)[0]
    return multiply(x, torch.ops.ackpt_graph.dropout_noise(x.detach(), p))


def _in_order_of_memory(operation):
    def fill(x, *args, generator=None):
        if not isinstance(x, FunctionalTensor) or x.is_contiguous():
            return NotImplemented  # torch goes on as it would have
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        numbers = [argument for argument in args if not isinstance(argument, (torch.Tensor, type(None)))]
        name = str(operation).removeprefix("aten.")
        return x.copy_(torch.ops.ackpt_graph.filled(x, name, numbers, tensors, generator=generator))

    return fill


_FILLS = (
    *(aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.uniform_.default, aten.normal_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to, aten.exponential_.default),
    *(aten.cauchy_.default, aten.geometric_.default, aten.log_normal_.default),
)
_DRAWS = {aten.dropout.default: _dropout, aten.dropout_.default: partial(_dropout, multiply=torch.Tensor.mul_)}
_DRAWS |= {operation: _in_order_of_memory(operation) for operation in _FILLS}


# Gradients that torch computes by another formula for tensor subclasses, as all tensors of a capture are. The other
# formulas round differently, and that of ``prod`` needs several times the memory. So each of these gradients is
# captured as one operation, which runs autograd on real tensors.
#
# Torch: ``isTensorSubclassLike`` in ``prod_backward``, ``masked_fill_backward`` and
# ``binary_cross_entropy_with_logits_backward``, ``torch/csrc/autograd/FunctionsManual.cpp``.
_EXTREMES = ("aten.maximum", "aten.minimum")
# What a dispatch mode excludes for the kernels below it, although formulas need it.
_EXCLUDED = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "ADInplaceOrView", "Conjugate", "Negative", "ZeroTensor")
]

torch.library.define("ackpt_graph::gradient", "(Tensor gradient, str call, Tensor[] tensors, int place) -> Tensor")


@torch.library.impl("ackpt_graph::gradient", "CompositeExplicitAutograd")
def _gradient(gradient, call: str, tensors, place: int):
    """The gradient of ``tensors[place]`` in `call`, an expression of the list `tensors` as ``t``."""
    with _autograd():
        leaf = tensors[place].detach().requires_grad_()
        given = [leaf if at == place else tensor.detach() for at, tensor in enumerate(tensors)]
        with torch.enable_grad():
            result = get_gradient_edge(eval(call, {"torch": torch, "aten": aten, "t": given}))  # noqa: S307
        made = torch.autograd.grad(result, leaf, gradient)[0]  # while, as in eager, no more of the result is live
    is_laid_out = call.startswith(_EXTREMES) or made.stride() == leaf.stride()
    return made if is_laid_out else torch.empty_like(leaf).copy_(made)


@contextlib.contextmanager
def _autograd():
    """Records for autograd, also in a kernel that runs below a dispatch mode."""
    with contextlib.ExitStack() as guards:
        for key in _EXCLUDED:
            guards.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


@torch.library.register_fake("ackpt_graph::gradient")
def _shape(gradient, call: str, tensors, place: int):
    if not call.startswith(_EXTREMES):
        return torch.empty_like(tensors[place])
    like = torch.where(tensors[0] == tensors[1], gradient / 2, gradient)
    return like if like.shape == tensors[place].shape else gradient.new_empty(tensors[place].shape)


class _Tensor:
    def __init__(self, place: int):
        self.place = place

    def __repr__(self):
        return f"t[{self.place}]"


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation, spec, *leaves):
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        names = [_Tensor(places.index(at)) if at in places else leaf for at, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(names, spec)
        named = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        ctx.call, ctx.places = f"{operation}({named})", places
        ctx.save_for_backward(*(leaves[at] for at in places))
        args, kwargs = tree_unflatten(leaves, spec)
        return operation(*args, **kwargs)

    @staticmethod
    def backward(ctx, gradient):
        gradients = [None] * len(ctx.needs_input_grad)
        for number, at in enumerate(ctx.places):
            if ctx.needs_input_grad[at + 2]:
                given = [*ctx.saved_tensors]
                gradients[at + 2] = torch.ops.ackpt_graph.gradient(gradient, ctx.call, given, number)
        return tuple(gradients)


def _whole(operation, differs):
    """`operation` as one node of autograd, if its gradient `differs`."""

    def kernel(*args, **kwargs):
        if not torch.is_grad_enabled() or not differs(*args, **kwargs):
            with put({(operation, _AUTOGRAD): None}):
                return operation(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        return _Whole.apply(operation, spec, *leaves)

    return kernel


def _mixes_dtypes(x, target, weight=None, pos_weight=None, reduction=1):
    return x.requires_grad and any(each is not None and each.dtype != x.dtype for each in (target, weight, pos_weight))


def _are_permuted(*tensors):
    """The formula writes in place, in a memory order that a capture loses, and later sums depend on this order."""
    return any(each.requires_grad for each in tensors) and not all(each.is_contiguous() for each in tensors)


_DIFFERS = {
    aten.maximum.default: _are_permuted,
    aten.minimum.default: _are_permuted,
    aten.prod.default: lambda x, **kwargs: x.requires_grad,
    aten.prod.dim_int: lambda x, *args, **kwargs: x.requires_grad,
    aten.masked_fill.Tensor: lambda x, mask, value: value.requires_grad,
    aten.binary_cross_entropy_with_logits.default: _mixes_dtypes,
}


@contextlib.contextmanager
def eager_kernels():
    """Inside, a capture computes all these operations as eager does, and drops cached casts where autocast does."""
    kernels = {(operation, key): kernel for operation, kernel in _COMPOSITE.items() for key in _KEYS}
    kernels |= {(operation, _KEY): kernel for operation, kernel in {_TO: _to, _LINEAR: _linear, **_DRAWS}.items()}
    kernels |= {(operation, _AUTOGRAD): _whole(operation, differs) for operation, differs in _DIFFERS.items()}
    clear = torch.clear_autocast_cache
    capturing_thread = threading.get_ident()

    def noting_clear():
        if threading.get_ident() == capturing_thread:
            _made.clear()
        clear()

    torch.clear_autocast_cache = noting_clear
    try:
        with put(kernels), mock.patch.object(decompositions, "should_fold", _folds):
            yield
    finally:
        torch.clear_autocast_cache = clear
        cast_once()
