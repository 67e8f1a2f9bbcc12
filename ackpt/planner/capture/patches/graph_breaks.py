"""Let calls of a model with a plan in place run as planned in functions that ``torch.compile`` compiles.

Dynamo would trace the model's ``forward`` instead, so that the step would run without its plan. Here it breaks the
graph at the call, or raises with ``fullgraph=True``.

Torch: ``UnspecializedNNModuleVariable.call_function`` in ``torch/_dynamo/variables/nn_module.py`` does not look at
``_compiled_call_impl``, which ``Module.__call__`` runs in eager. Versions: 2.11 to 2.13.
``Module.compile`` assigns to the same attribute, so it would drop the plan.
Tests: ``TestInCompiledFunctions`` and ``test_compile_keeps_the_budget`` in ``tests/planner/step/test_apply_budget.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ackpt.core.errors import warn


@functools.cache
def keep_at_compile(has_plan: Callable[[nn.Module], bool]) -> None:
    """From now on, ``Module.compile`` has no effect, and warns, for modules for which ``has_plan(module)`` is true."""
    original = nn.Module.compile

    @functools.wraps(original)
    def compile(self, *args, **kwargs) -> None:
        if not has_plan(self) or kwargs.get("backend") == "ackpt":  # which has a budget of its own
            return original(self, *args, **kwargs)
        warn(
            f"{type(self).__name__}.compile() had no effect: the model has a budget, and compiled code would run "
            "without its plan. To compile the planned step, call ackpt.remove_budget(model), then "
            'torch.compile(model, backend="ackpt", options={"budget": ...}).'
        )

    nn.Module.compile = compile


@functools.cache
def break_graphs_at(has_plan: Callable[[nn.Module], bool]) -> None:
    """From here on, Dynamo does not trace into modules for which ``has_plan(module)`` is true."""
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    traced = UnspecializedNNModuleVariable.call_function

    @functools.wraps(traced)
    def call_function(self, tx, args, kwargs) -> Any:
        if has_plan(self.value):
            unimplemented(
                gb_type="Call of a model with a plan of ackpt",
                context=type(self.value).__name__,
                explanation="Dynamo cannot trace a planned step: it runs as planned, outside the compiled graph.",
                hints=["Without fullgraph=True, the code before and after the call is compiled."],
            )
        return traced(self, tx, args, kwargs)

    UnspecializedNNModuleVariable.call_function = call_function
