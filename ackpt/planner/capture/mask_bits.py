"""Pack a dropout mask into one bit per element, and unpack it again; a plan may save the bits instead of the mask.

A mask has two values: 0 and one other, which is True or, as eager's dropout draws it, 1/(1-p) in the dtype of the
activations. So the bits, the layout and that value determine the mask, bit for bit. Elements are packed in memory
order. Both operations allocate only their result from torch: on the CPU, numpy works on `_CHUNK` elements at a time; on
a GPU, each bit is set or extracted in place.
"""

import functools

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_CHUNK = 2**17  # elements; a multiple of 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

torch.library.define("ackpt_graph::pack_bits", "(Tensor mask) -> Tensor")
torch.library.define(
    "ackpt_graph::unpack_bits", "(Tensor bits, SymInt[] size, SymInt[] stride, ScalarType dtype, int one) -> Tensor"
)


def packed_bytes(elements: int) -> int:
    """The bytes of a packed mask with so many `elements`."""
    return -(-elements // 8)


@functools.cache
def one_of(dtype: torch.dtype, p: float) -> int:
    """The bits of the nonzero element of a mask of dropout with the probability `p`, as an integer."""
    if dtype == torch.bool:
        return 1
    with unset_fake_temporarily():
        return int(torch.ones(1, dtype=dtype).div_(1 - p).view(_INTEGERS[dtype.itemsize]).item())


@torch.library.impl("ackpt_graph::pack_bits", "CompositeExplicitAutograd")
def _pack(mask):
    bits = _pack_shape(mask)
    (pack_by_numpy if mask.device.type == "cpu" else pack_in_place)(in_memory(mask), bits)
    return bits


@torch.library.impl("ackpt_graph::unpack_bits", "CompositeExplicitAutograd")
def _unpack(bits, size, stride, dtype, one: int):
    mask = _unpack_shape(bits, size, stride, dtype, one)
    if mask.device.type == "cpu":
        unpack_by_numpy(bits, in_memory(mask), one)
    else:
        unpack_in_place(bits, in_memory(mask))
    return mask


@torch.library.register_fake("ackpt_graph::pack_bits")
def _pack_shape(mask):
    return mask.new_empty(packed_bytes(mask.numel()), dtype=torch.uint8)


@torch.library.register_fake("ackpt_graph::unpack_bits")
def _unpack_shape(bits, size, stride, dtype, one: int):
    return torch.empty_strided(size, stride, dtype=dtype, device=bits.device)


def in_memory(mask: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as integers, in the order of memory."""
    return mask.detach().as_strided((mask.numel(),), (1,)).view(_INTEGERS[mask.element_size()])


def pack_by_numpy(elements: torch.Tensor, bits: torch.Tensor) -> None:
    """Pack `elements`, of which each is 0 or another value, into `bits`, on the CPU."""
    source, target = elements.numpy(), bits.numpy()
    for start in range(0, len(source), _CHUNK):
        is_kept = source[start : start + _CHUNK] != 0
        target[start // 8 : (start + _CHUNK) // 8] = np.packbits(is_kept, bitorder="little")


def unpack_by_numpy(bits: torch.Tensor, elements: torch.Tensor, one: int) -> None:
    """Unpack `bits` into `elements` that are 0 or `one`, on the CPU."""
    source, target, rows = bits.numpy(), elements.numpy(), _rows(one, elements.element_size())
    whole = len(target) // 8 * 8
    for start in range(0, whole, _CHUNK):
        end = min(start + _CHUNK, whole)
        # With another mode than "raise", numpy writes to `out` directly.
        np.take(rows, source[start // 8 : end // 8], axis=0, out=target[start:end].reshape(-1, 8), mode="wrap")
    if whole < len(target):
        target[whole:] = rows[source[-1]][: len(target) - whole]


def pack_in_place(elements: torch.Tensor, bits: torch.Tensor) -> None:
    """Pack `elements` that are 0 or 1 into `bits`, on a GPU."""
    bits.copy_(elements[::8])
    for bit in range(1, 8):
        each = elements[bit::8]
        bits[: len(each)].add_(each, alpha=1 << bit)


def unpack_in_place(bits: torch.Tensor, elements: torch.Tensor) -> None:
    """Unpack `bits` into `elements` that are 0 or 1, on a GPU."""
    for bit in range(8):
        each = elements[bit::8]
        torch.bitwise_and(bits[: len(each)], 1 << bit, out=each)
    elements.ne_(0)


@functools.cache
def _rows(one: int, itemsize: int) -> np.ndarray:
    """The eight elements of every byte, int[256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, one, 0).astype("u1" if itemsize == 1 else f"i{itemsize}")
