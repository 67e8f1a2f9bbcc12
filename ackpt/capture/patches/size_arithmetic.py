"""Compute sizes as Python does: arithmetic with floats on symbolic sizes is recorded, and repeated at other sizes.

sympy reorders and folds floats (``n * 0.1 * 3`` becomes ``n * 0.3``), so that they give other integers than the model.
Here, every result of a float becomes a symbol of its own, whose definition Python evaluates; sympy sees integers alone.

Torch: ``_make_node_magic`` in ``torch/fx/experimental/sym_node.py``; in ``torch/__init__.py``, ``//`` of sizes with
floats (the floor of a quotient, which is rounded) and ``SymInt.__round__``, which takes no digits into account.
Versions: 2.11 to 2.13. Test: ``tests/capture/test_dynamic_sizes.py``.
"""

from __future__ import annotations

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

from ackpt.capture.inspection.source_lines import line, running_class

_SIZES = torch.SymInt, torch.SymFloat
_DIVISIONS = "int_floordiv", "mod"  # torch's rules for nested ones hold for positive divisors alone
_COMPARISONS = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge


class SizeEnv(ShapeEnv):
    """The sizes of one capture.

    ``derived``: (function, arguments) of every symbol that stands for a result of floats, in the order of computation;
    an argument is a number or an expression. ``known``: the values of those that the capture relies on. ``constants``:
    the line of the model's code by which a symbol became a number, and the module that runs it.
    """

    def __init__(self):
        super().__init__()
        self.derived: dict[Any, tuple[Callable, tuple]] = {}
        self.known: dict[Any, Any] = {}
        self.constants: dict[Any, str] = {}
        self._symbols: dict[str, sympy.Symbol] = {}
        self._converted: dict[Any, Any] = {}

    def derive(self, function: Callable, *operands) -> SymNode:
        """The result of `function` of numbers and `SymNode`s: a truth value, or a symbol for a number."""
        if function in _COMPARISONS:  # Python compares integers with floats exactly; torch converts them before
            operands = tuple(self._converted.get(_argument(each), each) for each in operands)
        args = tuple(map(_argument, operands))
        value = function(*map(_hint, operands))
        if type(value) is int and all(isinstance(each, (int, float)) for each in args):
            return SymNode(sympy.Integer(value), self, int, value)
        symbol = self._symbol(function, args, value)
        if function is float:
            self._converted[symbol] = operands[0]
        if isinstance(value, bool):
            self.known[symbol] = value
            return next(each for each in operands if isinstance(each, SymNode)).wrap_bool(value)
        return SymNode(symbol, self, type(value), value)

    def _symbol(self, function: Callable, args: tuple, value) -> sympy.Symbol:
        key = repr((function, args))
        if key not in self._symbols:
            is_int = type(value) is int
            symbol = self._symbols[key] = sympy.Symbol(f"derived{len(self.derived)}", integer=is_int, real=True)
            self.derived[symbol] = function, args
            self.backed_var_to_val[symbol] = sympy.sympify(value)
            if is_int:
                self._update_var_to_range(symbol, ValueRanges.unknown_int())
        return self._symbols[key]

    def evaluate_sym_node(self, sym_node, size_oblivious=False, fallback_value=None):
        expr = sym_node.expr
        if expr in self.derived and sym_node.is_float():
            self.known[expr] = sym_node.hint
            self.constants.setdefault(expr, line() + running_class())
            return sym_node.hint
        return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)

    def _set_replacement(self, a, tgt, msg):
        if sympy.sympify(tgt).is_number:
            self.constants.setdefault(a, line() + running_class())
        return super()._set_replacement(a, tgt, msg)


def _hint(operand):
    return operand.hint if isinstance(operand, SymNode) else operand


def _argument(operand) -> Any:
    """A number, or an expression of a size."""
    is_symbolic = isinstance(operand, SymNode) and bool(sympy.sympify(operand.expr).free_symbols)
    return operand.expr if is_symbolic else _hint(operand)


@contextlib.contextmanager
def python_arithmetic():
    """Inside, sizes of a `SizeEnv` are computed as Python computes them."""
    with contextlib.ExitStack() as stack:

        def put(owner, name, replaced):
            stack.enter_context(mock.patch.object(owner, name, replaced(getattr(owner, name))))

        for method in sym_node.magic_methods:
            put(SymNode, f"_{method}{'_' if method in ('and', 'or') else ''}", _of_nodes(method))
        for kind in _SIZES:
            put(kind, "__floordiv__", _of_sizes(operator.floordiv))
            put(kind, "__rfloordiv__", _of_sizes(lambda size, other: operator.floordiv(other, size)))
        put(torch.SymInt, "__round__", _of_sizes(round))
        yield


def _of_nodes(method: str):
    function = float if method == "sym_float" else sym_node.method_to_operator(method)

    def replaced(original):
        def compute(*operands):
            nodes: list[Any] = [each for each in operands if isinstance(each, SymNode)]
            env = nodes[0].shape_env
            if not isinstance(env, SizeEnv) or get_proxy_mode() or not all(each.has_hint() for each in nodes):
                return original(*operands)
            has_floats = method in sym_node.always_float_magic_methods or any(each.is_float() for each in nodes)
            if not has_floats and (method not in _DIVISIONS or env.bound_sympy(nodes[-1].expr).lower > 0):
                return original(*operands)
            return env.derive(function, *(each for each in operands if each is not None))

        return compute

    return replaced


def _of_sizes(function: Callable):
    def replaced(original):
        def compute(size, other=None):
            is_number = isinstance(other, (int, float, *_SIZES))
            has_floats = any(isinstance(each, (float, torch.SymFloat)) for each in (size, other)) or function is round
            if not is_number or not has_floats or not isinstance(size.node.shape_env, SizeEnv):
                return original(size) if other is None else original(size, other)
            if get_proxy_mode():
                return handle_sym_dispatch(function, (size, other), {})
            nodes = (each.node if isinstance(each, _SIZES) else each for each in (size, other))
            return wrap_node(size.node.shape_env.derive(function, *nodes))

        return compute

    return replaced
