"""Let calls of a model with a plan in place run as planned in functions that ``torch.compile`` compiles.

Dynamo would trace into what stands in for the model's ``forward``. Here it breaks the graph at the call, or raises with
``fullgraph=True``.

Torch: ``UnspecializedNNModuleVariable.call_function`` in ``torch/_dynamo/variables/nn_module.py`` inlines every module,
and does not look at ``_compiled_call_impl``. Versions: 2.11 to 2.13.
Tests: ``TestInCompiledFunctions`` and ``test_compile_keeps_the_budget`` in ``tests/planner/step/test_apply_budget.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


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
