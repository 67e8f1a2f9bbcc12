"""Convert torch's joint graph to a `JointGraph`: assign ids, phases, storages, accesses and source lines.

The storages of gradients are corrected. The gradient that a caller passes for an output has a storage of its own, but
torch's tangents, which represent these gradients in the graph, share the storages of the outputs. Of returned
gradients, a leaf without a gradient keeps the tensor that backward returns for it if nothing else references this
tensor and its strides are the leaf's; otherwise autograd clones it, and this clone becomes an operation of the graph
(the gradient layout contract in ``torch/csrc/autograd/functions/accumulate_grad.h``).
"""

import operator
from typing import Any, Literal

import torch
from torch import fx
from torch._higher_order_ops.effects import with_effects

from ackpt.core.errors import TraceError
from ackpt.core.progress import shown

from .aot import CAPTURING, Capture, capture
from .dynamic_sizes import is_size, without_full_slices
from .inspection.calls import CHECKPOINTS
from .inspection.model_checks import check_keywords, check_model
from .joint_graph import BACKWARD, FORWARD, JointGraph, Node
from .operations import may_draw, memory_order, storage_keys, tensors_of, with_accesses
from .optimizer_state import Loop, check_optimizer, with_loop
from .patches.kernels import keep_for_backward

aten = torch.ops.aten


def trace(
    model: torch.nn.Module,
    *args: Any,
    differentiate: Literal["loss", "all"] = "loss",
    outputs: Literal["drop", "keep"] = "drop",
    optimizer: torch.optim.Optimizer | str | None = None,
    accumulation: bool = False,
    **kwargs: Any,
) -> JointGraph:
    """Return the graph of one training step: ``model(*args, **kwargs)`` and its backward.

    Args:
        model: an ``nn.Module`` with real, fake or meta parameters; it is not changed, and nothing of it is computed. If
            it has no data and reads values, it is captured as ``torch.compile`` runs it, which may differ, and a
            ``UserWarning`` names the module and the line.
        args, kwargs: the arguments of the model; tensors may be real, fake or meta, and nested in containers.
        differentiate: the outputs whose gradients are planned. ``"all"``: all outputs that require grad. ``"loss"``: if
            exactly one of these is a scalar, that one alone, as in ``model(**batch).loss.backward()``; otherwise all.
        outputs: the outputs that stay live during backward. ``"drop"``: the caller drops outputs that get no gradient
            before backward, as in ``loss = model(**batch).loss``. ``"keep"``: the caller keeps all outputs, which then
            count until the step ends.
        optimizer: the optimizer of the model's parameters, or the name of one in ``torch.optim`` with its default
            options, such as ``"adamw"``. Its state counts as resident, and the temporary memory of its step is part of
            the peak.
        accumulation: whether gradients of earlier steps exist when the step runs; they then count as resident.

    Returns:
        A `JointGraph` from parameters and inputs to outputs and the gradients of parameters. The gradients of the
        differentiated outputs are inputs of its backward part.

    Raises:
        TypeError: if `model` is not an ``nn.Module``, or is already compiled, scripted, parallel or planned; for a
            keyword that looks like a misspelled keyword of `trace` and that the model's forward does not have.
        ValueError: if `optimizer` has none of the model's parameters.
        TraceError: if no parameter or no output requires grad, or if the model branches on the values of tensors
            (``if x.sum() > 0``, ``.item()``, ``nonzero``); names the line. A truth value that depends on integer
            arguments alone, such as ``mask.all()``, is allowed: the graph has the branch that their values select.

    Source: AOTAutograd's joint graph, ``torch._functorch.aot_autograd``.

    Example:
        >>> import torch, ackpt
        >>> graph = ackpt.trace(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> [node.target for node in graph.nodes if node.phase == "forward" and node.inputs]
        ['aten.t.default', 'aten.addmm.default']
    """
    check_model(model)
    check_keywords(model, kwargs, ("differentiate", "outputs", "optimizer", "accumulation"), "ackpt.trace")
    check_optimizer(model, optimizer)
    with shown(), CAPTURING, capture(model, args, kwargs, differentiate, outputs) as captured:
        return captured_graph(captured, model, Loop(optimizer, accumulation))


def captured_graph(
    captured: Capture, model, loop: Loop, instance: fx.GraphModule | None = None, replays_random: bool = True
) -> JointGraph:
    """The graph of a captured step; `instance`: its module at the sizes of the call, if it has dynamic dimensions."""
    if instance is None:
        prepared(captured.joint.graph_module)
    graph = described_graph(
        captured.joint.graph_module if instance is None else instance,
        has_data=captured.has_data,
        made_for={**captured.made_for, **({CHECKPOINTS: "left out"} if captured.reads.has_checkpoints else {})},
        as_compiled=captured.reason,
        keeps_outputs=captured.keeps_outputs,
        replays_random=replays_random,
    )
    graph = with_loop(graph, model, loop)
    return graph if loop.loss is None else loop.loss.counted(graph, lambda tensors: captured.outputs(tensors, {}))


def prepared(module) -> None:
    """Give the operations of torch's joint graph `module` their order and ids, and gradients storages of their own."""
    for node in module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7] is True:  # in training it receives the running statistics, but uses those of the batch
            node.args = (*node.args[:3], None, None, *node.args[5:])
    _with_own_defaults(module.graph)
    keep_for_backward(module.graph)
    _require_operations(module.graph)
    _require_dense(module.graph.nodes)
    _require_same_dtypes(module.graph)
    if any(is_size(node) for node in module.graph.nodes):
        without_full_slices(module)
    move_tangents(module)
    own_gradients(module)
    ordered = [node for node in _in_order(module) if not is_size(node)]
    for place, node in enumerate(ordered):
        node.meta["ackpt_id"] = place
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.meta["ackpt_id"] = len(ordered)
    if not any(_phase(node) == BACKWARD for node in ordered):
        raise TraceError(
            "no output of the model that requires grad is computed by an operation, so there is no backward to plan"
        )


def described_graph(module, **fields) -> JointGraph:
    """The `JointGraph` of a joint graph whose operations have their ids; `fields`: those that do not follow from it."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    nodes = (node for node in module.graph.nodes if node.op != "output")
    ordered = sorted(nodes, key=lambda node: node.meta["ackpt_id"])
    returned, gradients = _returned(output)
    keys: dict[int, int] = {}
    lies_in = []
    for node in ordered:
        numbers = [keys.setdefault(key, len(keys)) for key in storage_keys(node)]
        lies_in.append(tuple(dict.fromkeys(numbers)))
    nodes = [
        Node(
            id=place,
            name=node.name,
            target=_target(node),
            phase=_phase(node),
            inputs=tuple(each.meta["ackpt_id"] for each in node.all_input_nodes if not is_size(each)),
            storages=lies_in[place],
            module=_where(node, "module"),
            source=_where(node, "source"),
            is_random=_is_random(node),
        )
        for place, node in enumerate(ordered)
    ]
    sizes = {
        keys[value.untyped_storage()._cdata]: value.untyped_storage().nbytes()
        for node in ordered
        for value in tensors_of(node)
    }
    storages = with_accesses(nodes, sizes, ordered, returned, gradients)
    on_cpu = all(value.device.type == "cpu" for node in ordered for value in tensors_of(node))
    return JointGraph(
        module=module,
        nodes=tuple(nodes),
        storages=tuple(storages),
        outputs=tuple(returned),
        gradients=gradients,
        on_cpu=on_cpu,
        **fields,
    )


def _in_order(module):
    """Nodes as they run: inputs, forward with its writes to buffers at the end, gradients of the outputs, backward."""
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    for node in nodes:  # torch's own passes leave new nodes without a tag
        if any(_phase(source) == BACKWARD for source in node.all_input_nodes):
            node.meta["partitioner_tag"] = "is_backward"
    ordered = sorted(nodes, key=lambda node: (_phase(node) == BACKWARD, node.op != "placeholder"))
    last = next(node for node in reversed(nodes) if node.op == "placeholder")
    for node in ordered:
        if node.op != "placeholder":
            last.append(node)
            last = node
    module.graph.lint()
    module.recompile()
    return ordered


def _with_own_defaults(graph):
    """Make the dtype and device of new tensors explicit if the model's code had set other defaults at that point."""
    defaults = {"dtype": torch.get_default_dtype(), "device": torch.get_default_device()}
    for node in graph.nodes:
        value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
        if schema is None or not isinstance(value, torch.Tensor) or not all(map(is_size, node.all_input_nodes)):
            continue
        has_other = value.dtype.is_floating_point or value.dtype.is_complex
        for name in {"dtype", "device"} & {argument.name for argument in schema.arguments if argument.kwarg_only}:
            given = getattr(value, name)
            if node.kwargs.get(name) is None and given != defaults[name] and (has_other or name == "device"):
                node.kwargs = {**node.kwargs, name: given}


def _phase(node) -> str:
    return BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else FORWARD


def _target(node) -> str:
    if node.op == "placeholder":
        return str(node.meta["desc"])
    return "getitem" if node.target is operator.getitem else str(node.target)


def _require_operations(graph) -> None:
    """Refuse higher-order operators with effects, whose tokens would be inputs of the step."""
    for node in graph.find_nodes(op="call_function", target=with_effects):
        raise TraceError(
            f"module {_where(node, 'module') or 'the model itself'!r} calls {node.args[1]}, a higher-order operator "
            "with an effect such as printing, which a captured step cannot run: remove the call, or use "
            "ackpt.apply_activation_checkpointing, which runs the model's own code"
        )


def _require_dense(ordered) -> None:
    for node in ordered:
        if any(value.layout is not torch.strided for value in tensors_of(node)):
            module = _where(node, "module")
            raise TraceError(
                f"{node.name} ({_target(node)}) of module {module or 'the model itself'!r} is a sparse "
                "tensor, which cannot be planned. Use dense ones: sparse=False in nn.Embedding, tensor.to_dense().",
                reason=f"{f'module {module!r}' if module else 'the model'} computes a sparse tensor",
                module=module or None,
                can_split=True,
            )


_PRODUCTS = tuple(getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution"))


def _require_same_dtypes(graph) -> None:
    """Refuse products of tensors with different dtypes: torch computes their shapes, but not their values."""
    for node in (node for node in graph.nodes if node.target in _PRODUCTS):
        values = [value for source in node.all_input_nodes for value in tensors_of(source)]
        dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in values})
        if len(dtypes) > 1:
            raise TraceError(
                f"the model fails when it is called like this: {node.name} ({_target(node)}) of module "
                f"{_where(node, 'module') or 'the model itself'!r} multiplies tensors of different dtypes, "
                f"{' and '.join(dtypes)}. Convert the inputs or the model, as in x.to(model.dtype) or model.float(), "
                "or plan and train under torch.autocast."
            )


def _where(node, what: str) -> str:
    return (node.meta.get("custom") or {}).get(what) or ""


def _is_random(node) -> bool:
    """Whether it may draw random numbers; attention without dropout draws none."""
    if not may_draw(node.target, *node.args):
        return False
    schema = getattr(node.target, "_schema", None)  # a wrapper of an operation that writes into an argument has none
    for place, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "dropout_p":
            drops = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return drops != 0
    return True


def _returned(output):
    """Ids of the nodes that the model returns, and of the gradients by the parameters' names."""
    returned, gradients = [], {}
    for node, description in zip(output.args[0], output.meta["desc"]):
        if node is None:
            continue
        if not hasattr(description, "grad_of"):
            returned.append(node.meta["ackpt_id"])
        elif hasattr(description.grad_of, "target"):
            gradients[description.grad_of.target] = node.meta["ackpt_id"]
    return returned, gradients


def move_tangents(module: fx.GraphModule) -> None:
    """Give every tangent of `module`, and the views of it, a storage of their own, which has no other tensors."""
    moved: dict[fx.Node, list[int]] = {}
    for node in module.graph.nodes:
        was = storage_keys(node)
        if node.op == "placeholder" and node.meta.get("partitioner_tag") == "is_backward":
            value = node.meta["val"]
            node.meta["val"] = value.new_empty_strided(value.shape, value.stride())
            moved[node] = was
        elif node.op == "call_function" and any(
            set(was) & set(moved[source]) for source in node.all_input_nodes if source in moved
        ):
            with torch.no_grad():
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
            moved[node] = was


def own_gradients(module: fx.GraphModule) -> None:
    """Make every gradient of a leaf that `module` returns a tensor of its own, as autograd does by cloning."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    placeholders = module.graph.find_nodes(op="placeholder")
    takers = {node.meta["desc"]: node for node in placeholders}
    gradients = list(output.args[0])
    uncopied: set[fx.Node] = set()
    copied: list[tuple[int, fx.Node]] = []
    # Of several leaves with the same gradient, the last one keeps it, since it drops the last reference.
    for index in reversed(range(len(gradients))):
        described, gradient = output.meta["desc"][index], gradients[index]
        leaf = takers.get(getattr(described, "grad_of", None))
        if gradient is None or leaf is None or not leaf.meta.get("is_leaf", True):
            continue
        if gradient in uncopied or not _is_backwards_own(gradient) or not _can_be_kept(gradient, leaf):
            copied.append((index, leaf))
        else:
            uncopied.add(gradient)
    if not copied:
        return
    nodes = (*uncopied, *(node for node in module.graph.nodes if not _is_backwards_own(node)))
    held = {storage for node in nodes for storage in storage_keys(node)}
    # Copy first where the copy is the last use of the original.
    for index, leaf in sorted(copied, key=lambda copy: (storage_keys(gradients[copy[0]])[0] in held, copy[0])):
        with module.graph.inserting_before(output):
            gradients[index] = _copied(module.graph, gradients[index], leaf)
    output.args = (type(output.args[0])(gradients),)


def summed(module: fx.GraphModule) -> dict[str, torch.dtype]:
    """The tensors that the step uses several times, in words, with the dtype in which `module` sums their gradients."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    dtypes = {}
    for gradient, description in zip(output.args[0], output.meta["desc"]):
        if gradient is None or not hasattr(description, "grad_of"):
            continue
        while gradient.target is aten.clone.default or getattr(gradient.target, "is_view", False):
            gradient = gradient.args[0]
        if gradient.target is aten.add.Tensor and all(map(_is_backwards_own, gradient.all_input_nodes)):
            dtypes[getattr(description.grad_of, "target", "an argument")] = gradient.meta["val"].dtype
    return dtypes


def _is_backwards_own(gradient: fx.Node) -> bool:
    """Whether the backward computed it: tangents, parameters and results of the forward are referenced elsewhere."""
    return gradient.op == "call_function" and gradient.meta.get("partitioner_tag") == "is_backward"


def _can_be_kept(gradient: fx.Node, leaf: fx.Node) -> bool:
    """Whether the gradient has the strides that autograd requires."""
    value, wanted = gradient.meta["val"], leaf.meta["val"]
    if not wanted.numel():
        return True
    if memory_order(wanted) is None:
        return value.is_contiguous()
    strides = zip(wanted.shape, value.stride(), wanted.stride())
    return all(mine == its if size > 1 else mine != 0 for size, mine, its in strides)


def _copied(graph: fx.Graph, gradient: fx.Node, leaf: fx.Node) -> fx.Node:
    """A copy of `gradient` with the strides of `leaf`, or contiguous if those leave gaps."""
    order = memory_order(leaf.meta["val"])
    along = list(range(leaf.meta["val"].dim()))
    order = along if order is None or leaf.meta["val"].is_contiguous() else order

    def call(operation, source, *args, **kwargs):
        node = graph.call_function(operation, (source, *args), kwargs)
        where = {key: source.meta[key] for key in ("custom", "stack_trace") if key in source.meta}
        with torch.no_grad():
            value = operation(source.meta["val"], *args, **kwargs)
        node.meta.update(where, val=value, partitioner_tag="is_backward")
        return node

    if order != along:
        gradient = call(aten.permute.default, gradient, order)
    gradient = call(aten.clone.default, gradient, memory_format=torch.contiguous_format)
    if order != along:
        gradient = call(aten.permute.default, gradient, [order.index(dim) for dim in along])
    return gradient
