"""Find what a region can read besides its tensor arguments: parameters, buffers, closed-over tensors, generators.

There are two walks, and both are needed. ``ReachableState`` walks the *objects* (modules, closures, defaults, partials,
bound methods, globals that the code names) before the region runs. It finds frozen parameters and buffers, which leave
no trace in the autograd graph. ``graph_of`` walks the *autograd graph* after the region ran. It finds exactly those
tensors whose gradient flows out of the region, however the function got them. For the recomputation, `frozen` fixes the
cells of closures, and `DetachClosedOver` detaches the tensors in them.
"""

import argparse
import dis
import enum
import functools
import inspect
import operator
import os
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from ackpt.core.autograd_state import phase

from .rng import stream_of
from .tree import ATOMS, is_plain

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, tuple, dict, set)
_MUTABLE = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
LONGEST_CONTAINER = 100  # items; longer ones are not searched, since that would take time at every call
_DEPTH = 4  # levels of helper functions and plain objects that are followed


class ReachableState:
    """The tensors and generators reachable from a function and its non-tensor arguments.

    ``tensors``: ``{id: (tensor, name)}``. ``streams``: generator objects. Names that may be assigned another object
    later: ``namespaces``, the dicts of attributes, parameters, buffers and children of modules, and of attributes of
    parameters and data objects (see `is_data`); ``bindings``, ``(namespace, name, value)`` of tensors in containers, of
    rebound cells and of globals; ``suspects``: those of them whose value may have an autograd history. ``containers``:
    lists, dicts, sets and deques in attributes; ``hooks``: the dicts of the modules' hooks. ``sharded``: whether FSDP
    manages a module of the region; its hooks expect gradients to arrive inside the region. ``opaque``: whether the
    calls of a module cannot be recorded, because it is scripted or takes another path while they are recorded.
    ``unread``: ids of buffers that a norm of torch updates in training and does not read. ``walked``: False for the
    empty state, for which no object was walked.
    """

    def __init__(self, function=None, template=()):
        self.tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self.streams: list = []
        self.bindings: list[tuple[Any, Any, object]] = []
        self.namespaces: list[dict[str, Any]] = []
        self.suspects: list[tuple[Any, Any, object]] = []
        self.containers: list = []
        self.hooks: list[dict] = []
        self.sharded = self.opaque = False
        self.unread: set[int] = set()
        self._tensor_namespaces: list[dict[str, Any]] = []
        self.walked = function is not None
        self._seen: set[int] = set()
        if function is None:
            return
        # A bound `forward` runs without the module's own hooks, so only its submodules can be sharded inside.
        if isinstance(function, types.MethodType) and isinstance(function.__self__, nn.Module):
            self._module(function.__self__, "", own_hooks=False)
        else:
            self._visit(function, "", 0)
        for item in template:
            if not is_plain(item):
                self._visit(item, "argument", 0)
        if self.sharded:  # FSDP's own attributes change between forward and backward
            self._tensor_namespaces = []
        self.namespaces += self._tensor_namespaces

    def _visit(self, obj, name, depth, restores=True):
        """Visit what `obj` refers to; ``restores``: attributes of data objects in it are to be restored."""
        if isinstance(obj, torch.Tensor):
            self.tensors.setdefault(id(obj), (obj, name))
        elif isinstance(obj, nn.Module):
            self._module(obj, name)
        elif isinstance(obj, _FUNCTIONS):
            self._function(obj, name, depth)
        elif isinstance(obj, _CONTAINERS):
            if depth < _DEPTH and id(obj) not in self._seen:
                self._seen.add(id(obj))
                namespace = obj if isinstance(obj, dict) else items_of(obj) if isinstance(obj, list) else None
                for key, item in obj.items() if isinstance(obj, dict) else enumerate(obj):
                    if type(item) not in ATOMS:
                        self._visit(item, f"{name}[{key!r}]", depth + 1, restores)
                        if namespace is not None and isinstance(item, torch.Tensor):
                            self._bind(namespace, key, item)
        elif restores and depth < _DEPTH and is_data(type(obj)) and id(obj) not in self._seen:
            self._object(obj, name, depth, follow=True)
        elif not self._generator(obj) and depth < _DEPTH and _is_plain_object(obj):
            if not self._seen.isdisjoint((id(obj), ~id(obj))):
                return
            self._seen.add(~id(obj))  # an argument or an attribute of a module may be the same object
            for key, item in vars(obj).items():
                if type(item) not in ATOMS:
                    self._visit(item, f"{name}.{key}", depth + 1, restores=False)
                    if isinstance(item, torch.Tensor):
                        self._bind(vars(obj), key, item)

    def _generator(self, obj) -> bool:
        stream = stream_of(obj)
        if stream is not None and id(obj) not in self._seen:
            self._seen.add(id(obj))
            self.streams.append(stream)
        return stream is not None

    def _module(self, module, name, own_hooks=True):
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        prefix = f"{name}." if name else ""
        cls, tensors, namespaces = type(module), self.tensors, self.namespaces
        if issubclass(cls, torch.jit.ScriptModule):  # its attributes are in C++ and cannot be rebound
            self.opaque = True
            for key, value in (*module.named_parameters(), *module.named_buffers()):
                tensors.setdefault(id(value), (value, prefix + key))
            return
        code, is_fused, is_sharded = _facts_of(cls, cls.forward)
        attributes = module.__dict__
        parameters, buffers, children, *hooks = _fields_of(attributes)
        namespaces.append(attributes)
        self.hooks += hooks
        if parameters:
            namespaces.append(parameters)
            for key, value in parameters.items():
                if value is not None:
                    tensors.setdefault(id(value), (value, prefix + key))
                    if value.__dict__:
                        self._attributes_of(value, prefix + key)
        if buffers:
            namespaces.append(buffers)
            if module.training and issubclass(cls, _NormBase) and cls.forward.__module__.startswith("torch.nn."):
                self.unread.update(map(id, buffers.values()))
            for key, value in buffers.items():
                if value is not None:
                    tensors.setdefault(id(value), (value, prefix + key))
                    if value.requires_grad:
                        self.suspects.append((buffers, key, value))
        for key in attributes.keys() - MODULE_FIELDS:
            value = attributes[key]
            if type(value) not in PLAIN:
                self._attribute(attributes, key, value, prefix + key, _OBJECT_DEPTH)
        if code is not None:
            self._globals_of(*code)
        if is_fused and not module.training:
            self.opaque = True
        if is_sharded and own_hooks:
            self.sharded = True
        if children:
            namespaces.append(children)
            for key, child in children.items():
                if child is not None:
                    self._module(child, prefix + key)

    def _attributes_of(self, tensor, name):
        """Visit the attributes of a parameter: for example, the quantized weight of bitsandbytes."""
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self._tensor_namespaces.append(tensor.__dict__)
            for key, value in tensor.__dict__.items():
                if type(value) not in PLAIN:
                    self._attribute(tensor.__dict__, key, value, f"{name}.{key}", _OBJECT_DEPTH)

    def _bind(self, namespace, key, value):
        self.bindings.append(binding := (namespace, key, value))
        self.suspects.append(binding)

    def _attribute(self, namespace, key, value, name, depth, follow=False):
        """Visit an attribute of a module or of a data object; `follow`: also modules and functions in data objects."""
        self.suspects.append((namespace, key, value))
        if id(value) in self._seen and is_data(type(value)):  # often a configuration that all modules share
            return
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), (value, name))
        elif isinstance(value, _CONTAINERS):
            self._containers_in(value)
            items = value.values() if isinstance(value, dict) else value
            if len(value) <= LONGEST_CONTAINER and not ATOMS.issuperset(map(type, items)):
                self._visit(value, name, 1)
        elif not self._generator(value):
            self._containers_in(value)
            if depth < _DEPTH and is_data(type(value)) and id(value) not in self._seen:
                self._object(value, name, depth, follow)
            elif depth < _DEPTH and (slots := _slots_of(type(value))) and id(value) not in self._seen:
                self._seen.add(id(value))
                for key in slots:
                    if (content := getattr(value, key, _ABSENT)) is not _ABSENT:
                        self._bind(of_slots := slots_of(value), key, content)
                        self._attribute(of_slots, key, content, f"{name}.{key}", depth + 1, follow)
            elif follow and isinstance(value, (nn.Module, *_FUNCTIONS)):
                self._visit(value, name, depth)

    def _object(self, obj, name, depth, follow):
        self._seen.add(id(obj))
        namespace = vars(obj)
        if len(namespace) <= LONGEST_CONTAINER:
            self.namespaces.append(namespace)
            for key, value in namespace.items():
                if type(value) not in PLAIN:
                    self._attribute(namespace, key, value, f"{name}.{key}", depth + 1, follow)

    def _containers_in(self, value, depth=0) -> None:
        if type(value) in _MUTABLE:
            self.containers.append(value)
        if type(value) in (tuple, *_MUTABLE) and depth < _DEPTH and len(value) <= LONGEST_CONTAINER:
            for item in value.values() if isinstance(value, dict) else value:
                if type(item) not in ATOMS:
                    self._containers_in(item, depth + 1)

    def _globals_of(self, code, namespace) -> None:
        """Visit tensors and generators that a module's forward, or its helper in the same file, reads as globals."""
        if id(code) in self._seen:
            return
        self._seen.add(id(code))
        read, written = global_names(code)
        for key in read:
            value = namespace.get(key, ())
            if type(value) in PLAIN and key not in written:
                self.bindings.append((namespace, key, value))
            elif isinstance(value, torch.Tensor):
                self.tensors.setdefault(id(value), (value, key))
                self._bind(namespace, key, value)
            elif isinstance(value, types.FunctionType):
                if value.__globals__ is namespace and (helper := _code_of(value)) is not None:
                    self._globals_of(*helper)
            else:
                self._generator(value)

    def _function(self, function, name, depth):
        if id(function) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(function))
        if isinstance(function, functools.partial):
            for item in (function.func, *function.args, *function.keywords.values()):
                self._visit(item, name, depth + 1, _is_plain_data(item))
            return
        if isinstance(function, types.MethodType):
            self._visit(function.__self__, name, depth + 1, _is_plain_data(function.__self__))
            function = function.__func__
            if not isinstance(function, types.FunctionType):
                return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if not bound(cell):
                continue
            value = cell.cell_contents
            self._visit(value, key, depth + 1, _is_plain_data(value))
            if isinstance(value, torch.Tensor) and key in rebound_names(function.__code__):
                self._bind(content_of(cell), key, value)
        for item in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(item, name, depth + 1, _is_plain_data(item))
        read, written = global_names(function.__code__)
        for key in read:
            value = function.__globals__.get(key, _ABSENT)
            if value is _ABSENT:  # a builtin
                continue
            if key not in written or isinstance(value, torch.Tensor):
                self._bind(function.__globals__, key, value)
            if isinstance(value, (torch.Tensor, nn.Module, *_CONTAINERS, functools.partial, types.MethodType)):
                self._visit(value, key, depth + 1, restores=False)
            elif isinstance(value, types.FunctionType):
                if value.__module__ == function.__module__:
                    self._function(value, key, depth + 1)
            else:
                self._generator(value)


@functools.lru_cache(maxsize=4096)
def _code_of(forward) -> tuple[types.CodeType, dict[str, Any]] | None:
    """The code of a function and its globals; None for functions of torch and for objects without code."""
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith(_TORCH):
        return None
    return code, function.__globals__  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(maxsize=4096)
def _facts_of(cls, forward) -> tuple[Any, bool, bool]:
    """Of a class of modules with this forward: its `_code_of`, whether it has a fused kernel, whether it is sharded."""
    is_sharded = any(each.__name__ == "FSDPModule" for each in cls.__mro__)
    return _code_of(forward), issubclass(cls, FUSED), is_sharded


class Namespace:
    """Names and values that `get` reads, `put` sets and `pop` deletes, in a place that is no dict."""

    def __init__(self, get, put, pop):
        self.get, self._put, self.pop = get, put, pop

    def __setitem__(self, name, value) -> None:
        self._put(name, value)


def items_of(items: list) -> Namespace:
    """The items of a list, with the names 0, 1, ...; those that it no longer has are neither set nor removed."""
    return Namespace(
        lambda at, default=None: items[at] if at < len(items) else default,
        lambda at, value: items.__setitem__(slice(at, at + 1), [value] if at < len(items) else []),
        lambda at, default=None: None,
    )


def content_of(cell) -> Namespace:
    """The content of a closure's cell."""
    return Namespace(
        lambda name, default=None: cell.cell_contents if bound(cell) else default,
        lambda name, value: setattr(cell, "cell_contents", value),
        lambda name, default=None: delattr(cell, "cell_contents"),
    )


def slots_of(owner) -> Namespace:
    """The ``__slots__`` of an object, which may be a frozen dataclass."""
    return Namespace(
        functools.partial(attribute_of, owner),
        functools.partial(object.__setattr__, owner),
        lambda name, default=None: object.__delattr__(owner, name),
    )


def attribute_of(owner, name, default=None):
    return getattr(owner, name, default)


def tensors_in(items) -> dict[int, torch.Tensor]:
    """The tensors in containers and plain objects among `items`, ``{id: tensor}``, without modules and functions."""
    tensors: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    level = list(items)
    for _ in range(_DEPTH + 1):
        next_level: list = []
        for item in level:
            if isinstance(item, torch.Tensor):
                tensors[id(item)] = item
            elif type(item) not in ATOMS and id(item) not in seen and not isinstance(item, (nn.Module, *_FUNCTIONS)):
                seen.add(id(item))
                if isinstance(item, dict):
                    next_level += item.values()
                elif isinstance(item, _CONTAINERS):
                    next_level += item
                elif _is_plain_object(item):
                    next_level += vars(item).values()
        level = next_level
    return tensors


def _is_plain_object(obj) -> bool:
    """Whether `obj` has attributes and is neither a class, a Python module nor a builtin function."""
    return hasattr(obj, "__dict__") and not isinstance(obj, (type, types.ModuleType, types.BuiltinFunctionType))


@functools.lru_cache(maxsize=4096)
def is_data(cls) -> bool:
    """Whether the objects of a class are data, such as a configuration, whose attributes a region restores."""
    if issubclass(cls, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if issubclass(cls, (torch.Tensor, nn.Module, type, enum.Enum, BaseException, *_CONTAINERS, *_FUNCTIONS)):
        return False
    return cls.__dictoffset__ != 0 and cls.__module__.partition(".")[0] not in _NOT_DATA


@functools.lru_cache(maxsize=4096)
def _slots_of(cls) -> tuple[str, ...]:
    """The names of the ``__slots__`` of a class of the user's."""
    if cls.__module__.partition(".")[0] in _NOT_DATA or issubclass(cls, (torch.Tensor, nn.Module, *_CONTAINERS)):
        return ()
    return tuple(k for each in cls.__mro__ for k, v in vars(each).items() if isinstance(v, types.MemberDescriptorType))


def _is_plain_data(obj) -> bool:
    """Whether `obj` is a data object, such as a configuration, that has plain values only."""
    return is_data(type(obj)) and PLAIN.issuperset(map(type, vars(obj).values()))


# Classes that dataclasses.make_dataclass and types.new_class make say "types".
_NOT_DATA = frozenset((*sys.stdlib_module_names, "torch", "numpy", "ackpt")) - {"types"}
PLAIN = ATOMS | {torch.layout, torch.memory_format, range, slice, frozenset, type}
_ABSENT = object()
_OBJECT_DEPTH = _DEPTH - 2  # of data objects in attributes of modules, of which two levels are followed
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_fields_of = operator.itemgetter("_parameters", "_buffers", "_modules", *HOOKS)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
IN_PLACE, TRAVELING = "0_ackpt_in_place", "0_ackpt_traveling"  # in `vars` of modules; `dir` omits such names
MODULE_FIELDS = frozenset((*vars(nn.Module()), IN_PLACE, TRAVELING))
# Without gradients in evaluation these use a fused kernel, unless a TorchFunctionMode such as the recorder is active.
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@functools.lru_cache(maxsize=4096)
def global_names(code) -> tuple[tuple[str, ...], frozenset[str]]:
    """The global names that the code, or code nested in it, reads, and those that it assigns to."""
    return tuple(sorted(names_in(code, "LOAD_GLOBAL"))), names_in(code, "STORE_GLOBAL")


_LEAF: Any = torch.zeros(1, requires_grad=True)
ACCUMULATE_GRAD = type(_LEAF.view_as(_LEAF).grad_fn.next_functions[0][0])
CAST = type(_LEAF.to(torch.bfloat16).grad_fn)


class Graph(NamedTuple):
    """The autograd graph of a run, as `graph_of` walks it; equal graphs have equal `links`.

    ``nodes``: ``{node: index}``. ``order``: their sequence numbers, from the start of the run. ``links``: for each edge
    the index of its node, with the number of that node's output if this is not 0, or ``~index`` of a tensor in
    ``ends``, at which the graph ends. ``sources``: the nodes of those that are leaves, and the edges to the others.
    ``users``: for each of ``ends``, the nodes that use it, once for each use. ``older``: a node of before the run that
    is reached otherwise.
    """

    nodes: dict[Any, int]
    order: list[int]
    links: list
    ends: list[torch.Tensor]
    sources: list
    users: list[list]
    older: Any

    def counts(self) -> dict[int, int]:
        """How often the graph uses each of ``ends``, by id; each use of a leaf's cast is one of the leaf."""
        counts = dict(zip(map(id, self.ends), map(len, self.users)))
        if CAST in map(type, self.nodes):
            for node, index in self.nodes.items():
                leaf = node.next_functions[0][0]
                if type(node) is CAST and type(leaf) is ACCUMULATE_GRAD and (count := self.links.count(index)) > 1:
                    counts[id(leaf.variable)] += count - 1
        return counts


def graph_of(outputs, histories=(), started: int = 0) -> Graph:
    """The `Graph` of `outputs`, which ends at leaves and at `histories`, tensors that are older than node `started`."""
    closed_over = {(tensor.grad_fn, tensor.output_nr): tensor for tensor in histories}
    stack = list(dict.fromkeys([output.grad_fn for output in outputs if output.grad_fn is not None]))
    nodes = {node: index for index, node in enumerate(stack)}
    places: dict[Any, int] = {}  # in `ends`, by source
    links, ends, users = [], [], []
    while stack:
        node = stack.pop()
        for edge in node.next_functions:
            target, number = edge
            index = nodes.get(target)
            if index is None and target is not None:
                is_leaf = type(target) is ACCUMULATE_GRAD
                if is_leaf or edge in closed_over:
                    source = target if is_leaf else edge
                    place = places.get(source)
                    if place is None:
                        place = places[source] = len(ends)
                        ends.append(target.variable if is_leaf else closed_over[edge])
                        users.append([])
                    users[place].append(node)
                    links.append(~place)
                    continue
                index = nodes[target] = len(nodes)
                stack.append(target)
            links.append((index, number) if number else index)
    order = [node._sequence_nr() - started for node in nodes]
    older = None
    if min(order, default=0) < 0:
        older = max((pair for pair in zip(order, nodes) if pair[0] < 0), key=operator.itemgetter(0))[1]
    return Graph(nodes, order, links, ends, list(places), users, older)


class DetachClosedOver(TorchFunctionMode):
    """Replaces closed-over tensors that have an autograd history by detached leaves, in every torch call.

    Otherwise the inner backward would run into their history, which belongs to the outer backward, and count it twice.
    ``leaves``: ``{id(tensor): (tensor, leaf)}``.
    """

    def __init__(self, leaves: dict[int, tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.leaves = leaves

    def __enter__(self):
        self._outer, phase.detached = phase.detached, self
        return super().__enter__()

    def __exit__(self, *exception):
        phase.detached = self._outer
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*self.replaced(args), **dict(self.replaced(kwargs or {})))

    def replaced(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            pair = self.leaves.get(id(obj))
            return obj if pair is None else pair[1]
        if type(obj) in (list, tuple):
            return type(obj)(self.replaced(item) for item in obj)
        if type(obj) is dict:
            return {key: self.replaced(item) for key, item in obj.items()}
        return obj


def frozen(function):
    """A copy of the function whose closure keeps its present values, such as a loop variable's."""
    if not isinstance(function, (types.FunctionType, functools.partial)):
        return function
    shared: dict = {}
    seen: dict = {}
    _find_rebound(function, shared, seen)
    return _copied(function, shared, {}) if any(each.__closure__ for each in seen.values()) else function


def _find_rebound(function, shared, seen):
    """Add the cells that `function`, or a function in its closure, rebinds to `shared`, ``{id: cell}``."""
    if isinstance(function, functools.partial):
        for item in (function.func, *function.args, *function.keywords.values()):
            _find_rebound(item, shared, seen)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen[id(function)] = function
    rebound = rebound_names(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if name in rebound or not bound(cell):
            shared[id(cell)] = cell
        else:
            _find_rebound(cell.cell_contents, shared, seen)


def _copied(function, cells, copies):
    """A copy of `function` with copies of its cells. `cells` maps ids to cells to use instead, and is extended."""
    if type(function) is functools.partial:
        items = [_copied(item, cells, copies) for item in (function.func, *function.args)]
        keywords = {key: _copied(item, cells, copies) for key, item in function.keywords.items()}
        return functools.partial(*items, **keywords)
    if not isinstance(function, types.FunctionType) or not function.__closure__ or id(function) in copies:
        return copies.get(id(function), function)
    copies[id(function)] = function  # a recursive function refers to the original, so that the copy forms no cycle
    for cell in function.__closure__:
        if id(cell) not in cells:
            cells[id(cell)] = types.CellType(_copied(cell.cell_contents, cells, copies))
    closure = tuple(cells[id(cell)] for cell in function.__closure__)
    code, defaults = function.__code__, function.__defaults__
    copy = types.FunctionType(code, function.__globals__, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__ = function.__dict__
    copies[id(function)] = copy
    return copy


def bound(cell) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def rebound_names(code) -> frozenset[str]:
    """The names of closure cells that the code, or code nested in it, assigns to."""
    return names_in(code, "STORE_DEREF", "DELETE_DEREF")


@functools.lru_cache(maxsize=4096)
def names_in(code, *operations: str) -> frozenset[str]:
    """The names in these `operations` of the bytecode, and of code nested in it."""
    names = {item.argval for item in dis.get_instructions(code) if item.opname in operations}
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names.union(*(names_in(each, *operations) for each in nested)))


_dynamo: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]


def leave_uncompiled(function) -> None:
    """Tell Dynamo never to compile `function` itself: ``torch._dynamo.eval_frame.skip_code``, without its import."""
    skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    _dynamo.set_code_exec_strategy(function.__code__, skip)
