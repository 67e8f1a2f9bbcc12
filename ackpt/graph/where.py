"""Where in the model's code an operation or an error comes from."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import traceback
import warnings
import weakref

import torch
import torch.fx.traceback
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from ..errors import CheckpointError
from .joint import TraceError

_LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_GRADIENT = torch.Tensor.grad.__get__  # pyright: ignore
_CALL = nn.Module._call_impl.__code__
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions") + os.sep
_LAYERS = os.path.join(_TORCH, "nn") + os.sep, _DISTRIBUTIONS
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = os.path.join(_OWN, "models") + os.sep  # which are as any user's
_GRAPH = os.path.dirname(os.path.abspath(__file__)) + os.sep
_CAPTURE = os.path.join(_GRAPH, "capture.py")  # calls the model; what called it is no part of the model
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _is_users(path: str) -> bool:
    return not path.startswith((_TORCH, _OWN)) or path.startswith(_MODELS)


def in_model() -> bool:
    """Whether torch was called by the model's code, not by ackpt's within it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _GRAPH)):
        frame = frame.f_back
    return frame is not None and _is_users(frame.f_code.co_filename)


class Where(TorchFunctionMode):
    """Notes with every operation the module that calls it and the line of the model's code."""

    def __init__(self, model):
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._made: list[tuple[weakref.ref, str]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        module = source = None
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _CAPTURE and (module is None or source is None):
            if source is None and _is_users(frame.f_code.co_filename):
                source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if module is None and frame.f_code is _CALL:
                module = self._names.get(id(frame.f_locals["self"]))
            frame = frame.f_back
        if module is None:  # what is done to tensors outside of the model's code
            if func == _GRADIENT and not args[0].is_leaf:
                return None  # torch asks for all arguments, and warns of some
            return func(*args, **(kwargs or {}))
        with torch.fx.traceback.annotate({"module": module, "source": source or ""}):
            result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, FunctionalTensor):
                self._made.append((weakref.ref(tensor), f"at {source}" if source else f"in module {module!r}"))
        return result

    def require_none_kept(self) -> None:
        """To be called after the capture, which holds none of the tensors that the model's code has computed.

        Raises:
            TraceError: if something else does, such as a hook's list: a captured step would not renew it.
        """
        if any(tensor() is not None for tensor, _ in self._made):
            gc.collect()  # a model may make cycles
        for tensor, place in self._made:
            if tensor() is not None:
                raise _kept(place)


def line() -> str:
    """The innermost line of the model's code that runs now, as " at file:line (code)"."""
    return _of(traceback.extract_stack())


def _of(frames) -> str:
    found = [frame for frame in _after_capture(frames) if _is_users(frame.filename)]
    if not found:
        return ""
    return _said(found[-1])


def _after_capture(frames):
    """The calls that capture.py's call of the model led to."""
    calls = [place for place, frame in enumerate(frames) if frame.filename == _CAPTURE]
    return frames[calls[-1] if calls else 0 :]


def _said(frame) -> str:
    code = frame.line or ""
    # What a line raises is the message that follows.
    return f" at {frame.filename}:{frame.lineno}" + (f" ({code})" if not code.startswith("raise ") else "")


def _in_torch(frames) -> str:
    """The innermost line of torch.nn that runs for the model's code; nothing where that runs an operation itself."""
    found = [frame for frame in _after_capture(frames) if _is_users(frame.filename) or _is_of_layers(frame)]
    return f", in torch's own code{_said(found[-1])}" if found and _is_of_layers(found[-1]) else ""


def _is_of_layers(frame) -> bool:
    return frame.filename.startswith(_LAYERS) and frame.name not in ("_call_impl", "_wrapped_call_impl")


@contextlib.contextmanager
def explained():
    """Errors of the model's code and of torch's capture leave as one TraceError; torch logs nothing beside it."""
    was, _LOG.disabled = _LOG.disabled, True
    try:
        with warnings.catch_warnings():  # torch captures in its anomaly mode, which warns of what is raised
            warnings.filterwarnings("ignore", "Error detected in")
            yield
    except TraceError:
        raise
    except Exception as error:  # whatever the model's code raises
        raise _explained(error) from error
    finally:
        _LOG.disabled = was


def _kept(how: str) -> TraceError:
    return TraceError(
        f"the model's code keeps a tensor that it computes {how}: in a hook, a global or another object. A captured "
        "step would not renew it. Return what is needed as an output of the model, or take the hook off, by the "
        "remove() of what registered it; if it is kept only once, as in a cache, call the model once before it is "
        "captured."
    )


def _explained(error) -> TraceError:
    frames = traceback.extract_tb(error.__traceback__)
    where = _of(frames)
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, _LOOKS_AT_VALUES):
        inside = _in_torch(frames)
        checks = " torch.distributions look at their arguments unless validate_args=False."
        return TraceError(
            f"the model cannot be captured as one graph: it looks at the values of a tensor{where}"
            f"{inside}, by {reason}.{checks if _DISTRIBUTIONS in inside else ''} "
            "Control flow and shapes must not depend on values: move such code out of the model, or use "
            "ackpt.checkpoint on its blocks."
        )
    if isinstance(error, CheckpointError) or "use_reentrant=True" in reason:
        return TraceError(
            "blocks of the model are checkpointed already, in a way that cannot be captured, and the plan decides "
            "what is recomputed: take it off, by ackpt.remove_activation_checkpointing(model), "
            "model.gradient_checkpointing_disable() in transformers, or by calling the function without checkpoint()."
        )
    if "Mixing fake modes" in reason:  # torch calls the model several times
        return _kept(f"and reads again{where}")
    if "backprop through mirrored meta" in reason:
        return TraceError(
            f"the model calls backward() in its forward{where}: return the loss, and call backward() on it"
        )
    if isinstance(error, LookupError):  # these say no more than what was looked up
        reason = f"{type(error).__name__}: {reason}"
    return TraceError(f"the model fails when it is called like this{where}: {reason}")
