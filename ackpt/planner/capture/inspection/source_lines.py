"""Errors of captures that fail, as for models that are not one graph, with the line and module of the operation."""

import contextlib
import dis
import logging
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ackpt.checkpointing.recorder import code_location, is_users
from ackpt.checkpointing.standing_in import call_own
from ackpt.core.errors import CheckpointError, TraceError

_LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_GRADIENT = torch.Tensor.grad.__get__  # pyright: ignore
_SET_GRADIENT = torch.Tensor.grad.__set__  # pyright: ignore
_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore
_CALL = nn.Module._call_impl.__code__
_CALLS = _CALL, call_own.__code__  # both name the module `self`
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions") + os.sep
_UTILITIES = os.path.join(_TORCH, "nn", "utils") + os.sep
_LAYERS = os.path.join(_TORCH, "nn") + os.sep, _DISTRIBUTIONS
_PLANNER = Path(__file__).parents[2]
_STAGES = tuple(
    str(folder) + os.sep
    for folder in (*(_PLANNER / stage for stage in ("capture", "costs", "schedule")), _PLANNER.with_name("metering"))
)
_CAPTURE = str(_PLANNER / "capture" / "aot.py")  # calls the model; its callers are not part of the model
# Where torch checks the arguments of its operations; an operation itself raises in _ops.py or where it is called.
_CHECKS = tuple(
    os.path.join(_TORCH, name)
    for name in (
        *("__init__.py", "_ops.py", "functional.py", "_meta_registrations.py", "_prims", "_refs", "_decomp", "nn"),
        os.path.join("_subclasses", "fake_impls.py"),
    )
)
_OF_SHAPES = tuple(os.path.join(_TORCH, name) for name in ("_refs", "_prims", "_meta_registrations.py"))
_RAISE = dis.opmap["RAISE_VARARGS"]
_CLASSES = re.compile("FakeTensor|FunctionalTensor|SymInt|SymFloat|SymBool")
_OF_CAPTURE = re.compile(
    f"{_CLASSES.pattern}|subclass|data pointer|storage|meta|symbolic|deepcopy|fake|FX|version_counter"
)
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def in_model() -> bool:
    """Whether the model's code called torch, rather than ackpt code that the model calls."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *_STAGES)):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def set_at(module: nn.Module, name: str) -> str:
    """The line outside of ``__init__`` where the module's class sets attribute `name`, as " at ..."; "" if unknown."""
    methods = {key: value for cls in reversed(type(module).__mro__) for key, value in vars(cls).items()}
    for method, function in methods.items():
        code = getattr(function, "__code__", None)
        if method == "__init__" or code is None or not is_users(code.co_filename):
            continue
        line = code.co_firstlineno
        for each in dis.get_instructions(code):
            line = getattr(each, "line_number", each.starts_line) or line  # starts_line is a bool from Python 3.13 on
            registers = each.argval == name and "register_buffer" in code.co_names
            if each.argval == name and (each.opname == "STORE_ATTR" or registers):
                return f" at {code_location(code.co_filename, line)}"
    return ""


def not_repeated(message: str) -> TraceError:
    """The error for code that a captured step would not run as the model does, but regions do."""
    return TraceError(
        f"{message}, or plan with regions=True, which runs the model's own code.",
        reason=message.partition(", which a captured step")[0],
        can_split=True,
    )


class Where(TorchFunctionMode):
    """Annotates operations with module and line of the model's code; ``note`` gets their results and these words."""

    def __init__(self, model, note: Callable[[Any, str], None]):
        super().__init__()
        self._error: Exception | None = None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._note = note

    def __torch_function__(self, func, types, args=(), kwargs=None):
        module = source = None
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _CAPTURE and (module is None or source is None):
            if source is None and is_users(frame.f_code.co_filename):
                source = code_location(frame.f_code.co_filename, frame.f_lineno)
            if module is None and frame.f_code in _CALLS:
                module = self._names.get(id(frame.f_locals["self"]))
            frame = frame.f_back
        try:
            if module is None:  # outside of the model's code
                if func == _GRADIENT and not args[0].is_leaf:
                    return None  # torch reads .grad of all arguments, which warns for non-leaves
                return func(*args, **(kwargs or {}))
            _refuse(func, args, source or f"module {module!r}")
            with torch.fx.traceback.annotate({"module": module, "source": source or ""}):
                result = func(*args, **(kwargs or {}))
        except Exception as error:
            error = _as_in_eager(error)
            if source is not None:
                self.note_error(error)
            raise error
        self._note(result, f"at {source}" if source else f"in module {module!r}")
        return result

    def note_error(self, error: Exception) -> None:
        """Note an error that only a capture raises: the model's code may catch it, and then go on as eager does not."""
        if self._error is None and (isinstance(error, TraceError) or not _is_own(error)):
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != _CAPTURE:
                added = types.TracebackType(error.__traceback__, frame, frame.f_lasti, frame.f_lineno)
                error, frame = error.with_traceback(added), frame.f_back
            self._error = error

    def __exit__(self, kind, error, where):
        super().__exit__(kind, error, where)
        if self._error not in (None, error):
            raise self._error


def _refuse(func, args, place: str) -> None:
    """Raise a TraceError for a call of the model's code at `place` that a captured step would not do as eager does."""
    if func == _SET_DATA:
        raise not_repeated(
            f"the model's code replaces the data of a tensor at {place}, which a captured step would not do. Write the "
            "new values instead, as in: with torch.no_grad(): tensor.copy_(values)"
        )
    if func in (_GRADIENT, _SET_GRADIENT) and args[0].requires_grad and not _is_of_torch(sys._getframe(2)):
        raise TraceError(
            f"the model's code reads or sets the gradient of a tensor at {place}. A plan does not see gradients "
            "of earlier steps. Compute what depends on them outside of the model, and pass it as a tensor argument."
        )
    name = getattr(func, "__name__", "")
    index = tree_leaves(args[1]) if name == "__getitem__" else ()
    if name.startswith(_RAISES_BY_VALUES) or any(isinstance(each, torch.Tensor) for each in index):
        if _is_caught(sys._getframe(2)):
            raise not_repeated(
                f"the model's code catches errors of {name} at {place}, which depend on values, and which a captured "
                "step would raise. Check the values outside of the model"
            )


# Functions of torch that raise for some values of tensors.
_RAISES_BY_VALUES = "linalg_", "cholesky", "inverse", "multinomial", "embedding", "gather", "index_select", "take"
_RAISES_BY_VALUES += "nll_loss", "cross_entropy"


def _is_caught(frame) -> bool:
    """Whether code that runs in `frame` or around it is in a ``try`` with ``except``; False before Python 3.11."""
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        code, at = frame.f_code, frame.f_lasti
        # Python: the exception table of a code object has no public reader (``Lib/dis.py``).
        parse: Any = getattr(dis, "_parse_exception_table", lambda code: ())
        entries = parse(code) if is_users(code.co_filename) else ()
        for handler in {entry.target for entry in entries if entry.start <= at < entry.end}:
            names = [each.opname for each in dis.get_instructions(code) if each.offset >= handler]
            names = [*takewhile(lambda name: name != "RERAISE", (name for name in names if name != "NOP"))]
            suppresses = "WITH_EXCEPT_START" in names and "suppress" in code.co_names
            if suppresses or names[1:2] == ["POP_TOP"] or not {"CHECK_EXC_MATCH", "CHECK_EG_MATCH"}.isdisjoint(names):
                return True
        frame = frame.f_back
    return False


def _as_in_eager(error: Exception) -> Exception:
    """`error` with the class that torch's C++ gives it: the checks of fake tensors raise some as a ValueError."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if type(error) is not ValueError or last is None or not last.tb_frame.f_code.co_filename.startswith(_OF_SHAPES):
        return error
    return RuntimeError(*error.args).with_traceback(error.__traceback__)


def _is_of_torch(frame) -> bool:
    """Whether torch's own code called torch here, except for what it offers to users, such as ``clip_grad_norm_``."""
    while frame.f_code.co_filename.startswith(_STAGES):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH) and not frame.f_code.co_filename.startswith(_UTILITIES)


def line() -> str:
    """The innermost line of the model's code that is running, as " at file:line (code)"."""
    return _of(traceback.extract_stack())


def running_class() -> str:
    """The class of the innermost module that is running, as ", in GRU"; "" outside of modules."""
    return next((f", in {type(module).__name__}" for module in running_modules()), "")


def running_modules() -> Iterator[nn.Module]:
    """The modules whose calls are running, the innermost first."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in _CALLS:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _of(frames) -> str:
    of_users = [frame for frame in _after_capture(frames) if is_users(frame.filename)]
    if not of_users:
        return ""
    return _said(of_users[-1])


def _module_of(error, model) -> str:
    """The path of the innermost module of `model` in which `error` was raised; "" for the model itself."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code in _CALLS]
    entered = [names[id(frame.f_locals["self"])] for frame in frames if id(frame.f_locals["self"]) in names]
    return entered[-1] if entered else ""


def _after_capture(frames):
    """The frames from capture.py's call of the model inwards; all frames if there is no such call."""
    calls = [index for index, frame in enumerate(frames) if frame.filename == _CAPTURE]
    return frames[calls[-1] if calls else 0 :]


def _said(frame) -> str:
    # A raise statement would only repeat the message that follows.
    code = "" if (frame.line or "").startswith("raise ") else f" ({frame.line or ''})"
    return f" at {code_location(frame.filename, frame.lineno)}{code}"


def _in_torch(frames) -> str:
    """The innermost torch.nn line that the model's code called; empty if that code called the operation itself."""
    shown = [frame for frame in _after_capture(frames) if is_users(frame.filename) or _is_of_layers(frame)]
    return f", in torch's own code{_said(shown[-1])}" if shown and _is_of_layers(shown[-1]) else ""


def _hook(error, frames, module: str) -> str | None:
    """The hook in which `error` was raised, in words; None if it was raised somewhere else."""
    if any(each.filename == _CALL.co_filename and "hook(" in (each.line or "") for each in frames):
        return f"a hook of {module}"
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    engine = max((at for at, code in enumerate(codes) if code is _ENGINE), default=None)
    if engine is None or any(code is _FUNCTION for code in codes[engine:]):  # a backward of the user's own
        return None
    return "a hook that runs in backward" if any(is_users(code.co_filename) for code in codes[engine:]) else None


def _is_of_layers(frame) -> bool:
    return frame.filename.startswith(_LAYERS) and frame.name not in ("_call_impl", "_wrapped_call_impl")


@contextlib.contextmanager
def saving_hooks_refused():
    """Inside, hooks of the model on saved tensors raise an error: a plan would not call them, and they may be lossy."""
    enter = saved_tensors_hooks.__enter__

    def refuse(self):
        is_lossless = type(self) is not saved_tensors_hooks and type(self).__module__.startswith("torch.")
        if not is_lossless and in_model():
            raise not_repeated(
                f"the model's code changes how autograd saves tensors, by saved_tensors_hooks{line()}, which a "
                "captured step would not do. Remove these hooks"
            )
        return enter(self)

    with mock.patch.object(saved_tensors_hooks, "__enter__", refuse):
        yield


@contextlib.contextmanager
def explained(model: nn.Module, raises_own: bool):
    """Raise errors of torch's capture as a TraceError; silence torch's own logging.

    `raises_own`: whether errors of the model's own code, which its own call would raise too, stay as they are.
    """
    was, _LOG.disabled = _LOG.disabled, True
    try:
        with warnings.catch_warnings():  # torch captures in anomaly mode, which warns of every error
            warnings.filterwarnings("ignore", "Error detected in")
            yield
    except TraceError:
        raise
    except Exception as error:  # the model's code may raise anything
        if raises_own and _is_own(error):
            raise
        raise _explained(error, model) from error
    finally:
        _LOG.disabled = was


def _is_own(error) -> bool:
    """Whether the model's code raised `error`, or torch's checks of the arguments that it gave, rather than a capture.

    Code of the model that checks the class of a tensor names it.
    """
    earlier = error
    while earlier is not None:
        if isinstance(earlier, (*_LOOKS_AT_VALUES, NotImplementedError, CheckpointError)):
            return False
        earlier = earlier.__context__
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code, said = last.tb_frame.f_code, str(error)
    file = code.co_filename
    if is_users(file) and code.co_code[last.tb_lasti] == _RAISE:
        return _CLASSES.search(said) is None
    return (is_users(file) or file == __file__ or file.startswith(_CHECKS)) and _OF_CAPTURE.search(said) is None


def _explained(error, model) -> TraceError:
    frames = traceback.extract_tb(error.__traceback__)
    where, path = _of(frames), _module_of(error, model)
    module = f"module {path!r}" if path else "the model itself"
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    of_module: dict[str, Any] = {"module": path, "can_split": True}
    if isinstance(error, _LOOKS_AT_VALUES):
        inside = _in_torch(frames)
        if hook := _hook(error, frames, module):
            return TraceError(
                f"{hook} looks at the values of a tensor{where}. A plan of one graph runs hooks during its capture "
                "only, on tensors without values. Remove this hook by the remove() of its handle, give a budget, with "
                "which the model is planned in parts that run all hooks, or use ackpt.apply_activation_checkpointing.",
                reason=f"{hook} looks at the values of a tensor{where}",
                can_split=True,
            )
        checks = " torch.distributions look at their arguments unless validate_args=False."
        return TraceError(
            f"the model cannot be captured as one graph: it looks at the values of a tensor{where}"
            f"{inside}, in {module}, by {reason}.{checks if _DISTRIBUTIONS in inside else ''} "
            "Control flow and shapes must not depend on values: move such code out of the model, or use "
            "ackpt.checkpoint on its blocks.",
            reason=f"{module} looks at the values of a tensor{where}{inside}",
            **of_module,
        )
    if isinstance(error, CheckpointError) or "use_reentrant=True" in reason:
        return TraceError(
            "blocks of the model are already checkpointed in a way that cannot be captured, and the plan decides what "
            "is recomputed. Remove that checkpointing: call ackpt.remove_activation_checkpointing(model), "
            "model.gradient_checkpointing_disable() in transformers, or the function without checkpoint()."
        )
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in reason:
        operation = re.search(r"\w+(::|\.)\w+", str(getattr(error, "func", error)))
        return TraceError(
            f"the shapes of what {operation[0] if operation else 'an operation'} returns are not known{where}, in "
            f"{module}: its package has registered no fake kernel. Register one by "
            "torch.library.register_fake, update the package, or use ackpt.apply_activation_checkpointing, which runs "
            "the operation itself.",
            reason=f"{module} runs an operation without a fake kernel{where}",
            **of_module,
        )
    if "version_counter for inference tensor" in reason:
        return not_repeated(
            f"{module} makes a view under torch.inference_mode(){where}, which a captured step cannot do. Use "
            "torch.no_grad() instead"
        )
    if "with symbolic sizes/strides" in reason:
        return TraceError(
            f"{module} runs an operation{where} whose kernel takes no dynamic sizes, such as "
            "that of oneDNN's LSTM: leave these dimensions out of dynamic, and every size has a capture of its own"
        )
    if "higher order operator" in reason or "HigherOrderOperator" in reason:
        called = f"{module} calls a higher-order operator{where}, such as torch.cond"
        return TraceError(
            f"{called}, and a captured step runs operations on tensors only. Write it with such operations, as in "
            "torch.where, give a budget, with which the model is planned in parts, or use "
            "ackpt.apply_activation_checkpointing, which runs the model's own code.",
            reason=called,
            **of_module,
        )
    if "backprop through mirrored meta" in reason:
        return TraceError(
            f"the model calls backward() in its forward{where}: return the loss, and call backward() on it"
        )
    if isinstance(error, LookupError):  # their message is only the missing key
        reason = f"{type(error).__name__}: {reason}"
    return TraceError(
        f"the model fails when it is called like this{where}: {reason}",
        reason=f"{module} cannot be captured as it is{where}: {reason}",
        **of_module,
    )
