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

    Called with other shapes, dtypes or switches (``train`` and ``eval``, autocast, flags among the arguments) than
    before, it captures and plans anew under the same budget. Without grad the model itself runs.
    """

    def __init__(self, model: nn.Module, planner, differentiate: str = "loss", optimizer=None):
        super().__init__()
        self.__dict__.update(
            _parameters=model._parameters, _buffers=model._buffers, _modules=model._modules, training=model.training
        )
        self.__dict__["_ackpt"] = _Planned(model, planner, differentiate, optimizer)

    @property
    def plan(self):
        """The `Plan` of the last call, or of the last `prepare`."""
        return self.__dict__["_ackpt"].plan

    def prepare(self, *args, **kwargs):
        """Capture and plan for these arguments without running anything; the plan."""
        self.__dict__["_ackpt"].captured_for(args, kwargs)
        return self.plan

    def train(self, mode: bool = True):
        super().train(mode)
        self.__dict__["_ackpt"].model.training = mode
        return self

    def forward(self, *args, **kwargs):
        planned = self.__dict__["_ackpt"]
        return planned(args, kwargs) if torch.is_grad_enabled() else planned.model(*args, **kwargs)


class _Planned:
    """What a `PlannedStep` knows beside its model's own tensors and modules."""

    def __init__(self, model: nn.Module, planner, differentiate: str, optimizer):
        self.model, self.planner, self.differentiate, self.optimizer = model, planner, differentiate, optimizer
        self.captures: dict[Any, tuple[Any, Capture, Any]] = {}
        self.plan: Any = None

    def __call__(self, args, kwargs):
        run, captured = self.captured_for(args, kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        return captured.outputs(run(*self._named(captured.names), *filter(is_tensor, leaves)))

    def captured_for(self, args, kwargs) -> tuple[Any, Capture]:
        key = self._key(args, kwargs)
        if key not in self.captures:
            self.captures[key] = self._capture(args, kwargs)
        run, captured, self.plan = self.captures[key]
        return run, captured

    def _named(self, names):
        """Parameters and buffers as they are now, in the order of capture."""
        found = []
        for name in names:
            path, _, attribute = name.rpartition(".")
            module = self.model.get_submodule(path)
            named = module._parameters if attribute in module._parameters else module._buffers
            found.append(named[attribute])
        return found

    def _key(self, args, kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        return (
            spec,
            tuple(_meta(leaf) if is_tensor(leaf) else (type(leaf), leaf) for leaf in leaves),
            tuple(map(_meta, (*self.model.parameters(), *self.model.buffers()))),
            tuple(module.training for module in self.model.modules()),
            *_autocast(),
        )

    def _capture(self, args, kwargs):
        with capture(self.model, args, kwargs, self.differentiate) as captured:
            graph = joint_graph(captured.joint.graph_module, self.optimizer)
            plan = self.planner(graph)
            captured.joint._aot_state.fw_metadata.bw_donated_idxs = []  # backward may run again (retain_graph)
            run = aot_compile_joint_with_descriptors(
                captured.joint,
                partition_fn=partitioner(graph, plan.schedule),
                fw_compiler=run_boxed,
                bw_compiler=run_boxed,
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


def run_boxed(module, example_inputs):
    """A compiler for AOTAutograd: the module's operations one by one, arguments freed after their last use."""
    return boxed(module)


def _meta(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _autocast():
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
