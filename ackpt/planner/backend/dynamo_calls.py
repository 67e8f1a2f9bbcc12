"""Check the options of the backend, and make every call of a compiled model run as planned, or raise an error.

All but `checked` is for the compiler ``"inductor"``; otherwise, the model is not given to Dynamo, see `without_dynamo`.
Dynamo prefers running a model without its backend to failing: after ``config.recompile_limit`` compilations, at a frame
that it skips, and after an error under ``config.suppress_errors``. For this backend only, models therefore compile as
with ``fullgraph=True``; frames without gradients need no plan and do not count as compilations; and every call must run
a graph of this backend, and at most one planned graph.

The only patch is to ``torch._dynamo.optimize``, through which ``torch.compile`` enters Dynamo (2.11 to 2.15). After
Dynamo gives up (``FrameAction.RUN_ONLY`` in ``torch/_dynamo/convert_frame.py``), it never calls the backend, which
therefore cannot raise an error itself. This module can go once a backend can request an error there:
``tests/planner/backend/test_backend_limits.py`` will then pass without it.
"""

import functools
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

from ackpt.core.errors import TraceError, check_misspelt
from ackpt.planner.request import Request

from .without_dynamo import WithoutDynamo

_NOT_OF_INDUCTOR = ("outputs", "optimizer", "accumulation", "scaler", "cache")
_OPTIONS = (
    *("budget", "slowdown", "policy", "differentiate", "compiler", "on_plan", "device_profile", "chunk_head"),
    *_NOT_OF_INDUCTOR,
)
_INSTEAD = "Without the option compiler='inductor', the model is captured without Dynamo"
_threads = threading.local()


def install(backend) -> None:
    """Make every later ``torch.compile`` with this backend raise an error instead of running without a plan."""
    dynamo: Any = torch._dynamo
    optimize = dynamo.optimize

    @functools.wraps(optimize)
    def optimize_or_raise(*args, **kwargs):
        wrapper: Any = kwargs.get("backend", args[0] if args else None)
        if getattr(wrapper, "compiler_fn", None) is not backend:
            return optimize(*args, **kwargs)
        wrapper.backend_ctx_ctor = _Call  # Dynamo enters it around every call of the compiled model
        context: Any = optimize(*args, **{**kwargs, "nopython": True})
        if not isinstance(context, OptimizeContext):  # of torch.compile(disable=True)
            return context
        request = checked(wrapper.kwargs.get("options"), wrapper.kwargs.get("mode"))
        if request.compiler == "eager":
            return WithoutDynamo(replace(request, dynamic=kwargs.get("dynamic")))
        context.fullgraph = False  # if True, torch fails where it compiles no frame, as in evaluation
        context.callback = _Convert(context.callback)
        return functools.partial(_outside_of_graphs, context)

    dynamo.optimize = optimize_or_raise


def checked(options: Any, mode: str | None = None) -> Request:
    """The request that the user's `options`, a dict or None, describe; a TypeError or ValueError names a wrong one."""
    if mode is not None:
        raise ValueError(
            f"mode {mode!r} is one of Inductor's: leave it out; options={{'compiler': 'inductor'}} uses it"
        )
    if not isinstance(options, (Mapping, type(None))):
        raise TypeError(f"options must be a dict such as {{'budget': '6GiB'}}, got {type(options).__name__}")
    rest = dict(options or {})
    if foreign := sorted({"plan", "dynamic"} & set(rest)):
        raise TypeError(
            f"{foreign[0]!r} is not an option of this backend: use ackpt.compile(model, ..., {foreign[0]}=...)"
        )
    check_misspelt(rest, _OPTIONS, "this backend")
    given = {name: rest.pop(name) for name in _OPTIONS if name in rest}
    request = Request.from_keywords(**given, options=rest)
    if request.compiler == "inductor" and (refused := next(filter(given.__contains__, _NOT_OF_INDUCTOR), None)):
        raise TypeError(
            f"{refused!r} is not an option of compiler 'inductor', whose plans count all outputs and no optimizer, and "
            "are not cached"
        )
    return request


class _CompiledModule(OptimizedModule):
    """What ``torch.compile`` returns for a model; Dynamo looks into instances of the base class itself."""

    def _initialize(self) -> None:
        super()._initialize()
        self.forward = _outside(self.forward)


def _outside_of_graphs(context: OptimizeContext, function: Any) -> Any:
    """``context(function)``; other functions that Dynamo compiles call it, where they would inline its operations."""
    compiled: Any = context(function)
    if isinstance(compiled, OptimizedModule):
        return _CompiledModule(compiled._orig_mod, compiled.dynamo_ctx)
    _break_graphs()
    return _outside(compiled)


def _outside(compiled: Any) -> Any:
    @functools.wraps(compiled, updated=())  # with its attributes, torch would take it for the function that it compiles
    def call(*args, **kwargs):
        return compiled(*args, **kwargs)

    outside: Any = torch._dynamo.disable(call)
    outside.ackpt_has_plan = True
    return outside


@functools.cache
def _break_graphs() -> None:
    """From here on, Dynamo does not trace into modules that were compiled in place, by ``model.compile``.

    Torch: ``UnspecializedNNModuleVariable.call_function`` in ``torch/_dynamo/variables/nn_module.py`` inlines every
    module, and does not look at ``_compiled_call_impl``. Versions: 2.11 to 2.13.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    traced = UnspecializedNNModuleVariable.call_function

    @functools.wraps(traced)
    def call_function(self, tx, args, kwargs) -> Any:
        if hasattr(self.value._compiled_call_impl, "ackpt_has_plan"):
            unimplemented(
                gb_type="Call of a model with a plan of ackpt",
                context=type(self.value).__name__,
                explanation="Dynamo cannot trace a planned step: it runs as planned, outside the compiled graph.",
                hints=["Without fullgraph=True, the code before and after the call is compiled."],
            )
        return traced(self, tx, args, kwargs)

    UnspecializedNNModuleVariable.call_function = call_function


class _Convert:
    """Dynamo's callback for a frame that has not been compiled for these arguments yet."""

    def __init__(self, convert):
        self._torchdynamo_orig_backend = convert  # Dynamo finds the backend by this name

    def __call__(self, frame, cache_entry, frame_state):
        needs_plan = torch.is_grad_enabled()
        try:
            return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except FailOnRecompileLimitHit as error:
            if needs_plan:
                raise _limit_reached(error) from error
        except Unsupported as error:
            if needs_plan:
                raise _graph_break(error) from error
        # Python runs this frame and what it calls; the next time, Dynamo calls this again.
        return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)


class _Call:
    """One call of a compiled model: with gradients on, it must run a graph of this backend."""

    def __enter__(self):
        self.graphs = self.plans = 0
        self.handled = sys.exc_info()[1]
        self.needs_plan = torch.is_grad_enabled()
        _calls().append(self)

    def __exit__(self, *_):
        _calls().pop()
        fails_already = sys.exc_info()[1] is not self.handled  # Dynamo does not pass the error here
        if self.needs_plan and not self.graphs and not fails_already:
            raise TraceError(
                "the model ran without a plan, since torch.compile captured nothing of it. Before torch 2.14 it "
                "skips modules whose forward is one of torch's own, such as nn.Sequential, when they are compiled in "
                'place: use torch.compile(model, backend="ackpt", ...) instead of model.compile(...). It also skips '
                "code that it has given up for another backend, everything under a TorchDispatchMode, and everything "
                f"where Dynamo is switched off (torch.compiler.set_stance). {_INSTEAD}."
            )


def _calls() -> list[_Call]:
    if not hasattr(_threads, "calls"):
        _threads.calls = []
    return _threads.calls


def check_compiled_here(compiler: str) -> None:
    """Refuse to compile unless this module checks the later calls of the compiled model."""
    if not _calls() or compiler != "inductor":
        raise TraceError(
            'this backend was not called through torch.compile(model, backend="ackpt", options=...), so a step could '
            "run without a plan unnoticed. Call torch.compile with the name of the backend."
        )


def runs_graph(planned: bool) -> None:
    """Record that the current call runs a graph of the backend; a second planned graph of a call is an error."""
    if not _calls():  # compiled code is called directly, without the model
        return
    call = _calls()[-1]
    call.graphs += 1
    call.plans += planned
    if call.plans > 1:
        raise TraceError(
            "torch.compile captured the model as several graphs, each with the budget for itself. This happens "
            "before torch 2.14 where a module whose forward is one of torch's own, such as nn.Sequential, is compiled "
            "in place, and where the model has hooks that compute: a budget holds for a whole step. Use "
            'torch.compile(model, backend="ackpt", ...) instead of model.compile(...), and move what hooks compute '
            f"into forward. {_INSTEAD}."
        )


def _limit_reached(error) -> TraceError:
    name = "accumulated_recompile_limit" if "accumulated" in str(error.__cause__) else "recompile_limit"
    limit = getattr(config, name)
    return TraceError(
        f"this step would run without a plan: Dynamo compiles a model at most {limit} times "
        f"(torch._dynamo.config.{name}), and compiles it again for every new shape, dtype and mode of its inputs. "
        f"Set torch._dynamo.config.{name} = {8 * limit} before the first step, or call the model with fewer shapes: "
        "pad to a few lengths, and leave a smaller last batch out (drop_last=True). Evaluation under torch.no_grad() "
        f"does not count. {_INSTEAD}, and without a limit."
    )


def _graph_break(error) -> TraceError:
    stack = getattr(error, "real_stack", None)
    where = f" at {stack[-1].filename}:{stack[-1].lineno} ({stack[-1].line})" if stack else ""
    return TraceError(
        f"the model cannot be captured as one graph{where}: {str(error).strip().splitlines()[0]}. A budget holds "
        f"for a whole step: remove the graph break. {_INSTEAD}, but cannot look at values either: where the model "
        "branches on a tensor, use torch.where, or ackpt.checkpoint on its blocks."
    )
