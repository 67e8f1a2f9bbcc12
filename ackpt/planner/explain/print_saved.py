"""`ackpt.print_saved`: print the tensors that autograd saves, in eager mode without a capture.

Hooks on saved tensors see every tensor when it is saved. To find the operation that saved it, this module then
walks autograd's graph from the outputs, and every node unpacks its saved tensors once.
"""

import contextlib
import functools
import gc
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing.reachable import bound, global_names, tensors_in
from ackpt.checkpointing.recorder import is_users
from ackpt.metering.meter import memory_format
from ackpt.metering.resident import storages_of
from ackpt.planner.capture.inspection.calls import call_arguments
from ackpt.planner.capture.short_names import short_source

_BACKWARD = re.compile(r"Backward\d*$")
_NUMBER = re.compile(r"(?<=['.])\d+(?=['.])")  # of a module in a list


def print_saved(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Print the tensors that ``function(*args, **kwargs)`` saves for backward, the largest first.

    A line has dtype and shape, bytes, the operation and the argument or result that it saves, the module, and the line
    of code; equal layers share a line. Parameters, buffers and inputs are marked, and so are tensors whose memory
    another line counts. Views have the bytes of their storage. The last line is the sum of the rest, each storage
    counted once. The function runs once. It may branch on values, because nothing is captured.

    Args:
        function: a module, a method of one, or any other function.
        args, kwargs: its arguments, with real or meta tensors. One argument alone may be a batch, as for
            `ackpt.explain`: a dict of keyword arguments, or a tuple or list of positional ones.

    Raises:
        TypeError: if `function` cannot be called.

    Source: ``jax.ad_checkpoint.print_saved_residuals``.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> ackpt.print_saved(model, torch.ones(4, 8))
        float32[4,8]  128 B  Tanh.result of '1'
        float32[4,8]  128 B  Addmm.mat1 of '0' [input]
        saved: 128 B in 1 tensor, in addition to 0 B of parameters and 128 B of inputs
    """
    if not callable(function):
        raise TypeError(f"function must be a module or a function, got {type(function).__name__}")
    if len(args) == 1 and not kwargs:
        args, kwargs = call_arguments(args[0])
    recorder = _Recorder(function, args, kwargs)
    saving = torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack)
    with calls_seen_by(recorder.enter_module, recorder.leave_module), saving:
        outputs = function(*args, **kwargs)
    recorder.name_operations(outputs)
    for line in recorder.lines():
        print(line)


@contextlib.contextmanager
def calls_seen_by(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Inside, all modules have these hooks, `enter` before their forward and `leave` after it, even if it fails."""
    register = nn.modules.module
    entering = register.register_module_forward_pre_hook(enter)
    leaving = register.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        entering.remove()
        leaving.remove()


class _Saved:
    """The facts about one saved tensor; it exists as long as autograd needs the tensor."""

    def __init__(self, tensor: torch.Tensor, module: str | None, source: str):
        self.tensor = tensor.detach()  # autograd's graph and a result that it saves would keep each other
        self.is_parameter = isinstance(tensor, nn.Parameter)
        self.module, self.source = module, source
        self.operation = ""


class _Recorder:
    """Hooks that record every saved tensor of a call, with the module and the line of code that saves it."""

    def __init__(self, function, args, kwargs):
        self.records: list[weakref.ref[_Saved]] = []
        self.unpacked: list[_Saved] = []
        self.stack: list[str] = []
        values = [function] if isinstance(function, nn.Module) else [value for _, value in referred(function)]
        roots = [value for value in values if isinstance(value, nn.Module)]
        self.names = {id(m): name for root in reversed(roots) for name, m in root.named_modules()}
        self.parameters = {_storage(p) for root in roots for p in root.parameters()}
        self.buffers = {_storage(b) for root in roots for b in root.buffers()}
        self.inputs = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}

    def enter_module(self, module, args):
        name = self.names.get(id(module))
        self.stack.append(f"a {type(module).__name__}" if name is None else repr(name) if name else "the model itself")

    def leave_module(self, module, args, output):
        self.stack.pop()

    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor, self.stack[-1] if self.stack else None, source_line())
        self.records.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: _Saved) -> torch.Tensor:
        self.unpacked.append(saved)
        return saved.tensor

    def name_operations(self, outputs) -> None:
        """Ask every node of autograd's graph which of the tensors it saved."""
        todo = [t.grad_fn for t in tensors_in([outputs]).values() if t.grad_fn is not None]
        seen: set[Any] = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            operation = _BACKWARD.sub("", type(node).__name__)
            names = [name for name in dir(node) if name.startswith("_saved_")]
            for name in names or ["saved_tensors"]:
                self.unpacked.clear()
                with contextlib.suppress(RuntimeError):  # a backward inside the function has freed them
                    getattr(node, name, None)
                for saved in self.unpacked:
                    saved.operation = operation + ("" if name == "saved_tensors" else f".{name[7:]}")
        self.unpacked.clear()

    def lines(self) -> Iterator[str]:
        gc.collect()  # a tensor that autograd has freed is not saved
        counted: set[tuple[int, ...]] = set()
        sizes = {"parameter": 0, "buffer": 0, "input": 0, "": 0}
        groups: dict[_Line, list[str]] = {}
        count = 0
        for saved in filter(None, (record() for record in self.records)):
            tensor, storage = saved.tensor, _storage(saved.tensor)
            size, held = tensor.numel() * tensor.element_size(), sum(s.nbytes() for s in storages_of(tensor))
            mark = "parameter" if saved.is_parameter or storage in self.parameters else ""
            mark = mark or ("buffer" if storage in self.buffers else "input" if storage in self.inputs else "")
            if storage not in counted:
                sizes[mark] += held
            note = mark or ("shares the memory of another line" if storage in counted else "")
            counted.add(storage)
            count += not note
            shape = f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
            module = "" if saved.module is None else f" of {saved.module}"
            operation = saved.operation or "a function"
            source = f", {short_source(saved.source)}" if saved.source else ""
            if not note and size < held:
                size, source = held, f"{source} [view of a larger storage]"
            line = _Line(note, size, shape, operation, _NUMBER.sub("*", module), source)
            groups.setdefault(line, []).append(module)
        rows = []
        order = sorted(groups, key=lambda line: (bool(line.note), -line.bytes * len(groups[line])))
        for line, modules in ((line, groups[line]) for line in order):
            many = len(modules) > 1
            size = f"{memory_format(line.bytes)}{' each' * many}"
            saved_by = f"{f'{len(modules)} x ' * many}{line.operation}{line.modules if many else modules[0]}"
            rows.append((line.shape, size, f"{saved_by}{line.source}{f' [{line.note}]' * bool(line.note)}"))
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        for shape, size, saved_by in rows:
            yield f"{shape:<{widths[0]}}  {size:>{widths[1]}}  {saved_by}"
        buffers = f", {memory_format(sizes['buffer'])} of buffers" if sizes["buffer"] else ""
        yield (
            f"saved: {memory_format(sizes[''])} in {count} tensor{'' if count == 1 else 's'}, in addition to "
            f"{memory_format(sizes['parameter'])} of parameters{buffers} and {memory_format(sizes['input'])} of inputs"
        )


class _Line(NamedTuple):
    """What saved tensors of equal layers have in common; ``bytes``: of each."""

    note: str
    bytes: int
    shape: str
    operation: str
    modules: str
    source: str


def referred(function, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function's code refers to: closure, globals, the object that a method belongs to."""
    if not isinstance(function, (functools.partial, types.FunctionType, types.MethodType, nn.Module)):
        function = getattr(function, "__call__", None)  # noqa: B004
    if isinstance(function, functools.partial):
        for name, value in (("function", function.func), *enumerate(function.args), *function.keywords.items()):
            yield f"argument {name}", value
            yield from referred(value, depth)
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        is_object = hasattr(function.__self__, "__dict__") and not isinstance(function.__self__, nn.Module)
        yield from vars(function.__self__).items() if is_object else ()
        function = function.__func__
    if isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        values = {name: cell.cell_contents for name, cell in cells if bound(cell)}
        names = global_names(function.__code__)[0]
        values |= {name: function.__globals__[name] for name in names if name in function.__globals__}
        for name, value in values.items():
            yield name, value
            if depth and isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                yield from referred(value, depth - 1)


def _storage(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(storage._cdata for storage in storages_of(tensor))


def source_line() -> str:
    """File and line of the innermost frame of the user's code."""
    frame = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith("<"):  # typed at a prompt
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
