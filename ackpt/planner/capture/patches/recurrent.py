"""Capture recurrent layers as single operations, and save the tensors that oneDNN's backward reads.

Torch's Python code for ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` leaves out the dropout between layers, rounds
differently, and runs oneDNN's LSTM as in inference if the input requires no grad; `composite_operations` puts C++ in
its place.
OneDNN's LSTM saves the tensors for its backward only if autograd records. A captured step runs without autograd, so the
layer is an operation of ours that saves it.

Torch: ``lstm_impl`` and ``gru_impl`` in ``torch/_decomp/decompositions.py``; ``mkldnn_rnn_layer`` in
``aten/src/ATen/native/mkldnn/RNN.cpp``. Versions: 2.11 to 2.13. Test: ``tests/planner/capture/test_recurrent.py``.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ackpt.planner.capture.in_place import RECORDS

aten = torch.ops.aten
_ONEDNN = aten.mkldnn_rnn_layer.default

torch.library.define("ackpt_graph::rnn_layer", str(_ONEDNN._schema).partition("mkldnn_rnn_layer")[2])


torch.library.define("ackpt_graph::rnn_layer_inference", str(_ONEDNN._schema).partition("mkldnn_rnn_layer")[2])


def keep_for_backward(graph: torch.fx.Graph) -> None:
    """Make every oneDNN layer in a captured `graph` save the tensors that its backward needs.

    Under ``torch.no_grad()``, oneDNN runs another kernel, which saves nothing and rounds differently.
    """
    for node in graph.find_nodes(op="call_function", target=_ONEDNN):
        if node.meta.get(RECORDS, True):
            node.target = torch.ops.ackpt_graph.rnn_layer.default
        else:
            node.target = torch.ops.ackpt_graph.rnn_layer_inference.default
            *results, workspace = node.meta["val"]
            node.meta["val"] = (*results, workspace.new_empty(0))


def _layer(*args):
    with torch.enable_grad():
        *results, workspace = _ONEDNN(*(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args))
    return *results, args[0].new_empty(0, dtype=torch.uint8) if workspace is None else workspace


def _inference(*args):
    with torch.no_grad():
        *results, _ = _ONEDNN(*args)
    return *results, args[0].new_empty(0, dtype=torch.uint8)


torch.library.impl("ackpt_graph::rnn_layer", "CompositeExplicitAutograd", _layer)
torch.library.impl("ackpt_graph::rnn_layer_inference", "CompositeExplicitAutograd", _inference)


@torch.library.register_fake("ackpt_graph::rnn_layer")
def _shapes(*args):
    return with_workspace(_ONEDNN(*args), *args)


@torch.library.register_fake("ackpt_graph::rnn_layer_inference")
def _inference_shapes(*args):
    return *_ONEDNN(*args)[:-1], args[0].new_empty(0, dtype=torch.uint8)


def with_workspace(results, *args):
    """The fake `results` of oneDNN's layer, with a workspace for backward as large as the real one: runs it once."""
    with _disable_current_modes():
        real = [torch.zeros(arg.shape, dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
        size = _layer(*real)[-1].numel()
    return *results[:-1], args[0].new_empty(size, dtype=torch.uint8)


def with_own_biases(results, *args):
    """The `results` of its backward: the gradients of its two biases are two tensors, and all are float32.

    Before torch 2.13 its shapes said they had the arguments' dtype.
    """
    results = (*results[:4], torch.empty_like(results[4]), *results[5:])
    return tuple(r if r.dtype == torch.float32 else torch.empty_like(r, dtype=torch.float32) for r in results)
