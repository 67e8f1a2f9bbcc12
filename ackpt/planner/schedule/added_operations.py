"""The operations that a planned step adds: offload to pinned host memory and back, and replays of random operations.

A copy moves a whole storage; views of it are recomputed afterwards. On a GPU each direction has its own stream, by the
rules of `ackpt.offloading.transport`. On the CPU a copy is complete when it returns, and the "host" is the same memory.
These are plain Python functions since operations registered with torch can return tensors only.

A random operation is replayed by saving and restoring the generator's state. Torch has higher-order operators for this,
but they cannot run under dispatch modes such as a FLOP counter's.
"""

import functools
import types
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing.reachable import ReachableState
from ackpt.checkpointing.recorder import is_users
from ackpt.checkpointing.rng import TorchStream, drawn_from, snapshot
from ackpt.core.errors import CheckpointError, warn
from ackpt.offloading.transport import CudaTransport
from ackpt.planner.capture.in_place import run_under
from ackpt.planner.capture.inspection.outside_values import on_every_call
from ackpt.planner.capture.operations import is_tagged


def offload(source: torch.Tensor):
    """``(host, ended)``: a copy of the storage of `source` in host memory, uint8[bytes], complete after `wait`.

    ``ended()`` lets the compute stream wait for it; None if it is complete already.
    """
    transport = _transport(source)
    if transport is None:
        size = source.untyped_storage().nbytes()
        host = torch.empty(size, dtype=torch.uint8)
        if not isinstance(source, FakeTensor):
            host.copy_(_bytes(source))
        return host, None
    storage = source.untyped_storage()
    host = _pinned(storage.nbytes())
    return host, partial(transport.wait_event, transport.copy_out(storage, 0, host, storage.nbytes(), ()))


def prefetch(host: torch.Tensor, device: torch.device, dtype: torch.dtype, shape, strides, offset: int):
    """``(tensor, ended)``: a tensor on `device` in a new storage, which has the bytes of `host` after `wait`.

    ``shape``, ``strides`` and ``offset`` count elements of `dtype`.
    """
    transport = None if isinstance(host, FakeTensor) else _transport(host, device)
    ended = None
    if transport is None:
        on_device = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        if not isinstance(host, FakeTensor):
            on_device.copy_(host)
    else:
        storage = transport.allocate(host.numel())
        ended = partial(transport.wait_event, transport.copy_in(host, storage, host.numel(), ()), storage)
        on_device = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    whole = on_device[: host.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, strides, offset), ended


def wait(moved, source):
    """The result of `offload` or `prefetch` of `source`, once the copy is complete; `source` may then be freed."""
    value, ended = moved
    if ended is not None:
        ended()
    return value


def _transport(tensor: torch.Tensor, device: torch.device | None = None):
    """The transport between host and `device`, by default the tensor's; None on the CPU and for fake tensors."""
    device = device or tensor.device
    return None if device.type == "cpu" or isinstance(tensor, FakeTensor) else _cuda_transport(device)


@functools.cache
def _cuda_transport(device: torch.device) -> CudaTransport:
    return CudaTransport(device)


def _pinned(size: int) -> torch.Tensor:
    """Page-locked memory, uint8[size]; torch reuses it once the copies from or to it are complete."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        _warn(str(error).splitlines()[0])
        return torch.empty(size, dtype=torch.uint8)


@functools.cache
def _warn(cause: str) -> None:
    warn(
        f"offload: pinning host memory failed ({cause}); copies go through pageable memory, correct but without "
        "overlap. Raise the limit of locked memory (ulimit -l), or plan with a larger budget."
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor, uint8[bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def run_and_save(operation, *args, **kwargs):
    """``(state of the generator before, operation(*args, **kwargs))``; the state is a uint8 tensor in host memory.

    A custom operation that draws from another generator, whose state `run_again` does not restore, is an error.
    """
    generator = _generator(args, kwargs)
    state = generator.get_state()
    if isinstance(state, FakeTensor) or any(isinstance(each, FakeTensor) for each in (*args, *kwargs.values())):
        return state, operation(*args, **kwargs)
    if is_tagged(operation):
        return state, operation(*args, **kwargs)
    before, entered = snapshot(), set()

    def called(frame, event, _):
        code = frame.f_code
        if event == "call" and is_users(code.co_filename) and code not in entered:
            entered.add(code)
            cells = tuple(types.CellType(frame.f_locals.get(name)) for name in code.co_freevars)
            function = types.FunctionType(code, frame.f_globals, closure=cells)
            streams = ReachableState(function, tuple(frame.f_locals.values())).streams
            before.extend((stream, stream.get()) for stream in streams)

    with on_every_call(called):
        result = operation(*args, **kwargs)
    for stream, _ in drawn_from(before):
        if not isinstance(stream, TorchStream) or stream.generator is not generator:
            raise CheckpointError(
                f"{operation if not args or not callable(args[0]) else args[0]} draws random numbers, but not from the "
                f"default generator of {generator.device}: its recomputation in this planned step would draw other "
                "numbers. Plan with regions=True, or use ackpt.apply_activation_checkpointing, which replay all "
                "generators."
            )
    return state, result


def run_again(state, operation, *args, **kwargs):
    """``operation(*args, **kwargs)`` with the generator in `state`; afterwards its own state is restored."""
    if isinstance(state, FakeTensor):
        return operation(*args, **kwargs)
    generator = _generator(args, kwargs)
    now = generator.get_state()
    try:
        generator.set_state(state)
        return operation(*args, **kwargs)
    finally:
        generator.set_state(now)


def run_as_called(operation, module, autocast, dtypes, *args, **kwargs):
    """``operation(*args, **kwargs)``, an operation of others, under the autocast under which `module` calls it.

    Results of other `dtypes` than the plan's, those of its fake implementation, are an error.
    """
    result = run_under(operation, autocast, *args, **kwargs)
    if (actual := [each.dtype for each in tree_leaves(result) if isinstance(each, torch.Tensor)]) != [*dtypes]:
        name = args[0] if callable(args[0]) else operation
        raise CheckpointError(
            f"under autocast, {name} of module {module!r} returns {', '.join(map(str, actual))}, but its fake "
            f"implementation {', '.join(map(str, dtypes))}, as this step is planned. Let it compute in the dtype of "
            "autocast, return the same dtype from both implementations, or plan with regions=True."
        )
    return result


def _generator(args, kwargs) -> torch.Generator:
    """The default generator of the device that the operation draws on."""
    device = kwargs.get("device")
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    device = torch.device(device) if device is not None else tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
