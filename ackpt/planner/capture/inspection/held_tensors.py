"""Turn tensors that the model's code refers to (attributes, closures, globals) into inputs of the capture."""

from __future__ import annotations

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ackpt.core.errors import TraceError

from .outside_values import Reads
from .source_lines import in_model, line
from .tensors import require_plain

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Held(TorchFunctionMode):
    """Inside, operations on a tensor of the model's code use the traced tensor that replaces it.

    ``traced``: ``{id of a tensor: its replacement}``. ``found``: ``{id: (tensor, line)}`` of tensors without one;
    a second capture takes them as inputs. ``reads``: watches the model's code; paused while torch's own code runs.
    """

    def __init__(self, traced: dict[int, torch.Tensor], reads: Reads):
        super().__init__()
        self.reads = reads
        self.traced = traced
        self.found: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(map(self._replaced, args))
        kwargs = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
        with self.reads.paused():
            return func(*args, **kwargs)

    def is_same(self, tensor, other) -> bool:
        """Whether `other` represents `tensor`."""
        return self.traced.get(id(tensor)) is other

    def _replaced(self, value):
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if isinstance(value, _PLAIN):  # most arguments; a look into them takes longer than the operation's dispatch
            return value
        return tree_map_only(torch.Tensor, self._stand_in, value)

    def _stand_in(self, tensor):
        if id(tensor) in self.traced:
            return self.traced[id(tensor)]
        is_traced = torch._is_functional_tensor(tensor) or is_functorch_wrapped_tensor(tensor)
        if isinstance(tensor, FunctionalTensor) or is_traced or not in_model():
            return tensor
        require_plain(f"a tensor used{line()}", tensor)
        if tensor.requires_grad:
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} that requires grad is used{line()} but is not a parameter "
                "of the model. Register it: self.name = nn.Parameter(...), or nn.ParameterList for several."
            )
        self.found[id(tensor)] = tensor, line()
        self.traced[id(tensor)] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return self.traced[id(tensor)]
