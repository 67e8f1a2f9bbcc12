"""A model's step as its plan says: captured at the first call with new shapes, rewritten, run by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch.utils._pytree import tree_flatten

from .capture import Capture, capture, is_tensor
from .joint import JointGraph, TraceError
from .rewrite import boxed, rewrite
from .trace import joint_graph


class PlannedStep(nn.Module):
    """A model that runs as planned; it has the model's parameters, buffers, submodules and state_dict.

    ``plan``: the plan of the last call that was captured. Called with other shapes, dtypes or switches (``train`` and
    ``eval``, autocast, flags among the arguments), it captures and plans anew under the same budget. Without grad the
    model itself runs.
    """

    def __init__(self, model: nn.Module, planner, differentiate: str = "loss"):
        super().__init__()
        self.__dict__.update(
            _parameters=model._parameters, _buffers=model._buffers, _modules=model._modules, training=model.training
        )
        self.__dict__.update(model=model, planner=planner, differentiate=differentiate, captured={}, plan=None)

    def prepare(self, *args, **kwargs):
        """Capture and plan for these arguments without running anything; the plan."""
        self._captured(args, kwargs)
        return self.plan

    def train(self, mode: bool = True):
        super().train(mode)
        self.__dict__["model"].training = mode
        return self

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.__dict__["model"](*args, **kwargs)
        run, call = self._captured(args, kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        return call.outputs(run(*self._named(call.names), *filter(is_tensor, leaves)))

    def _named(self, names):
        """Parameters and buffers as they are now, in the order of capture."""
        found = []
        for name in names:
            path, _, attribute = name.rpartition(".")
            found.append(getattr(self.get_submodule(path) if path else self, attribute))
        return found

    def _captured(self, args, kwargs):
        key = self._key(args, kwargs)
        found = self.__dict__["captured"].get(key)
        if found is None:
            found = self.__dict__["captured"][key] = self._capture(args, kwargs)
        run, call, plan = found
        self.__dict__["plan"] = plan
        return run, call

    def _key(self, args, kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        return (
            spec,
            tuple(_meta(leaf) if is_tensor(leaf) else (type(leaf), leaf) for leaf in leaves),
            tuple(map(_meta, (*self.parameters(), *self.buffers()))),
            tuple(module.training for module in self.__dict__["model"].modules()),
            *_autocast(),
        )

    def _capture(self, args, kwargs) -> tuple[Any, Capture, Any]:
        model = self.__dict__["model"]
        with capture(model, args, kwargs, self.__dict__["differentiate"]) as captured:
            graph = joint_graph(captured.joint.graph_module)
            plan = self.__dict__["planner"](graph)
            captured.joint._aot_state.fw_metadata.bw_donated_idxs = []  # backward may run again (retain_graph)
            run = aot_compile_joint_with_descriptors(
                captured.joint, partition_fn=partitioner(graph, plan.schedule), fw_compiler=_run, bw_compiler=_run
            )
        return run, captured, plan


def partitioner(graph: JointGraph, schedule):
    """AOTAutograd's ``partition_fn`` that splits `graph` as `schedule` says."""

    def partition(joint, inputs, *, num_fwd_outputs, **_):
        rewritten = rewrite(graph, schedule)
        if num_fwd_outputs != rewritten.num_outputs:
            raise TraceError(f"the graph returns {rewritten.num_outputs} values, but torch expects {num_fwd_outputs}")
        return rewritten.forward, rewritten.backward

    return partition


def _run(module, inputs):
    return boxed(module)


def _meta(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _autocast():
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
