"""Compute symbolic sizes as Python does: arithmetic with floats is recorded, and repeated at other sizes.

sympy folds floats (``n * 0.1 * 3`` becomes ``n * 0.3``), so that results may round to other integers. Here, every
result of an operation with a float, or of a division by a size that may be negative, is a new symbol, whose value
Python computes.

Torch: ``_make_node_magic`` in ``torch/fx/experimental/sym_node.py``, ``FloorDiv`` in
``torch/utils/_sympy/functions.py``, and in ``torch/__init__.py`` ``//`` of sizes with floats and ``SymInt.__round__``.
Versions: 2.11 to 2.13. Test: ``tests/planner/capture/test_dynamic_sizes.py``.
"""

import contextlib
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import sympy
import torch
from torch.fx.experimental import sym_node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, handle_sym_dispatch
from torch.fx.experimental.sym_node import SymNode, wrap_node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from ackpt.planner.capture.inspection.source_lines import line, running_class

_DIVISIONS = "int_floordiv", "mod"
_COMPARISONS = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge


class SizeEnv(ShapeEnv):
    """The sizes of one capture.

    ``derived``: (function, arguments) of every symbol that Python computes, in order; an argument is a number or an
    expression. ``assumed``: the values of those that the capture relies on. ``constants``: the line of the model's code
    by which a symbol became a number, and the module that runs it.
    """

    def __init__(self):
        super().__init__()
        self.derived: dict[Any, tuple[Callable, tuple]] = {}
        self.assumed: dict[Any, Any] = {}
        self.constants: dict[Any, str] = {}
        self._symbols: dict[str, sympy.Symbol] = {}
        self._converted: dict[Any, Any] = {}

    def derive(self, function: Callable, *operands) -> SymNode:
        """The result of `function` for numbers and `SymNode`s: a symbol for a number, or a truth value."""
        if function in _COMPARISONS:  # Python compares integers with floats exactly; torch converts the integers first
            operands = tuple(self._converted.get(getattr(each, "expr", None), each) for each in operands)
        hints = [getattr(each, "hint", each) for each in operands]
        exprs = (getattr(each, "expr", None) for each in operands)
        args = tuple(expr if getattr(expr, "free_symbols", ()) else hint for expr, hint in zip(exprs, hints))
        value, key = function(*hints), repr((function, args))
        if key not in self._symbols:
            is_int = type(value) is int
            symbol = self._symbols[key] = sympy.Symbol(f"derived{len(self.derived)}", integer=is_int, real=True)
            self.derived[symbol] = function, args
            self.backed_var_to_val[symbol] = sympy.sympify(value)
            if is_int:
                self._update_var_to_range(symbol, ValueRanges.unknown_int())
        symbol = self._symbols[key]
        if function is float:
            self._converted[symbol] = operands[0]
        if isinstance(value, bool):
            self.assumed[symbol] = value
            return next(each for each in operands if isinstance(each, SymNode)).wrap_bool(value)
        return SymNode(symbol, self, type(value), value)

    def evaluate_sym_node(self, sym_node, size_oblivious=False, fallback_value=None):
        expr = sym_node.expr
        if expr not in self.derived or not sym_node.is_float():
            return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        self.assumed[expr] = sym_node.hint
        self.constants.setdefault(expr, line() + running_class())
        return sym_node.hint

    def _set_replacement(self, a, tgt, msg):
        if sympy.sympify(tgt).is_number:
            self.constants.setdefault(a, line() + running_class())
        return super()._set_replacement(a, tgt, msg)


@contextlib.contextmanager
def python_arithmetic():
    """Inside, sizes of a `SizeEnv` are computed as Python computes them."""
    with contextlib.ExitStack() as stack:

        def put(owner, name: str, computing: Callable, what):
            function = computing(what, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))

        for method in sym_node.magic_methods:
            put(SymNode, f"_{method}{'_' if method in ('and', 'or') else ''}", _of_nodes, method)
        for kind in (torch.SymInt, torch.SymFloat):
            put(kind, "__floordiv__", _of_sizes, operator.floordiv)
            put(kind, "__rfloordiv__", _of_sizes, lambda size, other: other // size)
        put(torch.SymInt, "__round__", _of_sizes, round)
        yield


def _of_nodes(method: str, original: Callable) -> Callable:
    function = float if method == "sym_float" else sym_node.method_to_operator(method)

    def compute(*operands):
        nodes: list[Any] = [each for each in operands if isinstance(each, SymNode)]
        env = nodes[0].shape_env
        if not isinstance(env, SizeEnv) or get_proxy_mode() or not all(each.has_hint() for each in nodes):
            return original(*operands)
        has_floats = method in sym_node.always_float_magic_methods or any(each.is_float() for each in nodes)
        if has_floats or (method in _DIVISIONS and not env.bound_sympy(nodes[-1].expr).lower > 0):
            return env.derive(function, *(each for each in operands if each is not None))
        return original(*operands)

    return compute


def _of_sizes(function: Callable, original: Callable) -> Callable:
    def compute(size, other=None):
        is_number = isinstance(other, (int, float, torch.SymInt, torch.SymFloat))
        has_floats = any(isinstance(each, (float, torch.SymFloat)) for each in (size, other)) or function is round
        if not is_number or not has_floats or not isinstance(size.node.shape_env, SizeEnv):
            return original(size) if other is None else original(size, other)
        if get_proxy_mode():
            return handle_sym_dispatch(function, (size, other), {})
        return wrap_node(size.node.shape_env.derive(function, size.node, getattr(other, "node", other)))

    return compute
