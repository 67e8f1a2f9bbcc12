"""Read what ``fully_shard`` made of a model, refuse what no plan covers, and view the model as if it were not sharded.

Reads the private state of FSDP2, which has no public form: ``torch/distributed/fsdp/_fully_shard`` of torch 2.11 to
2.14; tests/planner/sharding/test_sharded_step.py shows when a version differs.
"""

import copy
import functools
import math
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors

from ackpt.checkpointing.reachable import HOOKS
from ackpt.checkpointing.wrapping import repeated_blocks
from ackpt.metering.gpus import BLOCK
from ackpt.planner.capture.inspection.value_walk import module_label

from .sharding import Group, Sharding, ShardingError, Weight

_HOOKS = (*HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def states_of(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(name, module, state) of every module that ``fully_shard`` was applied to, each state once, the root first."""
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and id(state := module._get_fsdp_state()) not in seen:
            seen.add(id(state))
            yield name, module, state


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before ``fully_shard``."""
    cls: Any = type(module)
    # Torch: fully_shard makes a class of FSDPModule and the module's own one, and stores the place of the latter.
    return cls.__mro__[getattr(cls, "_orig_cls_mro_index", 2)] if isinstance(module, FSDPModule) else cls


def param_groups(state) -> list[Any]:
    """FSDP's groups of parameters of one state; in older versions of torch, one or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (state._fsdp_param_group,) if group] if groups is None else groups


def params_of(state) -> list[Any]:
    """FSDP's parameters of one state."""
    return [each for group in param_groups(state) for each in group.fsdp_params]


def groups_of_sharded(model: nn.Module) -> tuple[Group, ...]:
    """The root's group and then one for each sharded block; raises a ShardingError for what no plan covers.

    Parameters that are gathered neither with the root nor with a block count as the root's, an upper bound.
    """
    states = list(states_of(model))
    if not states or states[0][0]:
        raise ShardingError("fully_shard was not applied to the model itself: call fully_shard(model) after its blocks")
    repeated, blocks, others = repeated_blocks(model), {}, []
    for name, module, state in states:
        _require_planned(name, module, state)
        if name in repeated:
            blocks[name] = state
        elif outer := [
            each for each, block in repeated.items() if name.startswith(f"{each}.") or block in state._modules
        ]:
            raise ShardingError(
                f"{module_label(name)} is sharded with or inside of block {outer[0]}: call fully_shard on each block "
                "alone, and on no module inside of it"
            )
        else:
            others.append(state)
    if not blocks:
        raise ShardingError(
            f"{own_class(model).__name__} has no block that is sharded by itself, so nothing can be recomputed without "
            "another all-gather: call fully_shard on every block, then on the model"
        )
    numbers = {id(state): number for number, state in enumerate(blocks.values(), 1)}
    paths = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    managed = {name for _, _, state in states for each in params_of(state) for name in _names_of(each, paths)}
    if ignored := [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in managed]:
        raise ShardingError(
            f"parameter {ignored[0]} is not sharded (ignored_params), so its gradient is not reduced: shard it"
        )

    def group(name: str, of: list[Any], kept: bool) -> Group:
        weights = tuple(_weight(_names_of(each, paths)[0], state, each) for state in of for each in params_of(state))
        ahead = (numbers.get(id(other)) for state in of for other in state._states_to_forward_prefetch)
        return Group(name, weights, kept, tuple(number for number in ahead if number is not None))

    root = group("", others, _is_kept(states[0][2], is_root=True))
    return (root, *(group(name, [state], _is_kept(state)) for name, state in blocks.items()))


def sharding_of(model: nn.Module) -> Sharding:
    """The ranks and dtypes of a sharded model; raises a ShardingError if its groups differ in them."""
    states = [state for _, _, state in states_of(model) if params_of(state)]
    kinds = {
        "numbers of ranks": {group.mesh_info.shard_mesh_size for s in states for group in param_groups(s)},
        "dtypes of shards": {each.sharded_param.dtype for s in states for each in params_of(s)},
        "dtypes of reduction": {s._mp_policy.reduce_dtype or s._mp_policy.param_dtype for s in states},
    }
    for words, values in kinds.items():
        if len(values) > 1:
            raise ShardingError(f"the model is sharded with several {words}: {', '.join(sorted(map(str, values)))}")
    (ranks,), (dtype,), (reduction,) = kinds.values()
    device = states[0]._device.type
    replicas = max(getattr(group.mesh_info, "replicate_mesh_size", 1) for s in states for group in param_groups(s))
    is_cpu = device == "cpu"
    return Sharding(ranks, dtype, reduction or dtype, 1 if is_cpu else BLOCK, is_cpu, replicas)


def settings_of(model: nn.Module) -> tuple:
    """What may change between two steps without a new call of ``fully_shard``; it compares and hashes."""
    states = [
        (_is_kept(state, not name), tuple(map(id, state._states_to_forward_prefetch)))
        for name, _, state in states_of(model)
    ]
    return has_unreduced(model), *states


def sharded_gradient_bytes(model: nn.Module) -> int:
    """Bytes of the sharded gradients that exist."""
    gradients = [each.sharded_param.grad for _, _, state in states_of(model) for each in params_of(state)]
    return sum(each._local_tensor.nbytes for each in gradients if each is not None)


def has_unreduced(model: nn.Module) -> bool:
    """Whether a rank has gradients that are not reduced, or will have after the next backward."""
    groups = [group for _, _, state in states_of(model) for group in param_groups(state)]
    params = [each for group in groups for each in group.fsdp_params]
    gradients = [getattr(getattr(each, "_unsharded_param", None), "grad", None) for each in params]
    exist = any(each is not None for each in (*gradients, *(each.unsharded_accumulated_grad for each in params)))
    return exist or not all(group.reduce_grads for group in groups)


def unreduced_bytes(groups: tuple[Group, ...], reduction: torch.dtype | None) -> int:
    """Bytes of all gradients before they are reduced, which ``set_requires_gradient_sync(False)`` leaves on a rank."""
    weights = [weight for group in groups for weight in group.weights if weight.trained]
    return sum((reduction or weight.dtype).itemsize * math.prod(weight.shape) for weight in weights)


def _names_of(param, paths) -> list[str]:
    """The names of a parameter in the model, several if it is tied."""
    info = param._module_info
    modules, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
    return [f"{paths[id(module)]}{name}" for module, name in zip(modules, names)]


def _weight(name: str, state, param) -> Weight:
    dtype = state._mp_policy.param_dtype or param.sharded_param.dtype
    return Weight(name, tuple(param._orig_size), dtype, param.sharded_param.requires_grad)


def _is_kept(state, is_root: bool = False) -> bool:
    """Whether the parameters of a state stay gathered after the forward, as those of the root do by default."""
    if is_root and getattr(state, "_auto_reshard_after_forward", True):
        return True
    return not all(group._reshard_after_forward for group in param_groups(state))


# Settings of FSDP2 that must have their default: (attribute of a group, the value that is planned for, what sets it).
_DEFAULTS = (
    ("reshard_after_backward", True, "set_reshard_after_backward(False)"),
    ("unshard_in_backward", True, "set_unshard_in_backward(False)"),
    ("unshard_async_op", False, "unshard_async_op"),
    ("_all_reduce_hook", None, "set_all_reduce_hook"),
    ("reduce_scatter_max_input_buffers", 1, "set_reduce_scatter_max_input_buffers"),
)


def _require_planned(name: str, module: nn.Module, state) -> None:
    """Refuse settings of FSDP2 whose memory or order is not simulated."""
    for group in param_groups(state):
        params = group.fsdp_params
        reasons = {
            "holds DTensor parameters of tensor parallelism": any(each.is_dtensor for each in params),
            "has set_requires_all_reduce(False)": group.reduce_grads and not group.all_reduce_grads,
            "offloads its shards to the host (CPUOffloadPolicy)": isinstance(group.offload_policy, CPUOffloadPolicy),
            "has an integer reshard_after_forward: give True or False": group._use_post_forward_mesh,
            "shards along another dimension than the first (shard_placement_fn)": any(
                getattr(each.fsdp_placement, "dim", 0) for each in params
            ),
        }
        reasons |= {f"has {words}": getattr(group, each, value) != value for each, value, words in _DEFAULTS}
        for reason in (reason for reason, applies in reasons.items() if applies):
            raise ShardingError(f"{module_label(name)} {reason}")
    if len(param_groups(state)) > 1:
        raise ShardingError(f"{module_label(name)} has several groups of parameters (shard_placement_fn)")
    if state._states_to_backward_prefetch:
        raise ShardingError(f"{module_label(name)} has a list of modules to prefetch in backward: leave it out")
    for path, each in module.named_modules():
        if each._compiled_call_impl is not None or hasattr(each, "_orig_mod"):
            label = module_label(".".join(filter(None, (name, path))))
            raise ShardingError(f"{label} is compiled, so its forward cannot be planned: do not compile it")


def unsharded_view(model: nn.Module, fake_mode: FakeTensorMode) -> nn.Module:
    """`model` as if it had not been sharded: other modules with its attributes, and whole parameters without data.

    Nothing of the model is changed. Inputs are cast as FSDP2 casts them.
    """
    states, device = list(states_of(model)), next(state._device for *_, state in states_of(model))
    view_of: dict[int, Any] = {}
    for module in model.modules():
        view_of[id(module)] = _empty(module)
    for module in model.modules():
        own = {name: _viewed(value, view_of) for name, value in vars(module).items() if name != "_modules"}
        own |= {name: copy.copy(getattr(module, name)) for name in ("_parameters", "_buffers", *_HOOKS)}
        own["_modules"] = {name: child and view_of[id(child)] for name, child in module._modules.items()}
        vars(view_of[id(module)]).update(own)
    with fake_mode:
        for view in view_of.values():
            for name, buffer in view._buffers.items():
                if buffer is not None and buffer.is_meta:
                    view._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        for _, _, state in states:
            for param in params_of(state):
                info, of = param._module_info, _weight("", state, param)
                whole = nn.Parameter(torch.empty(of.shape, dtype=of.dtype, device=device), of.trained)
                names = (info.param_name, *info.shared_param_names)
                for module, name in zip((info.module, *info.shared_modules), names):
                    view_of[id(module)]._parameters[name] = whole
    for _, _, state in states:
        for module in state._modules:
            _cast_instead(view_of[id(module)], state)
    return view_of[id(model)]


def _empty(module: nn.Module) -> Any:
    """An object of the module's own class, without attributes."""
    cls: Any = own_class(module)
    return cls.__new__(cls)


def _viewed(value: Any, view_of: dict[int, Any]) -> Any:
    """The value of an attribute, in which views replace the modules, also in containers and as owners of methods."""
    if id(value) in view_of:
        return view_of[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in view_of:
        return types.MethodType(value.__func__, view_of[id(value.__self__)])
    if (
        isinstance(value, (list, tuple))
        and any(id(each) in view_of for each in value)
        and not hasattr(value, "_fields")
    ):
        return type(value)(_viewed(each, view_of) for each in value)
    if type(value) is dict and any(id(each) in view_of for each in value.values()):
        return {key: _viewed(each, view_of) for key, each in value.items()}
    return value


def _cast_instead(view: nn.Module, state) -> None:
    """Replace FSDP's hooks of a module by the casts that they make."""
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    ids = {each.id for handle in handles for each in getattr(handle, "handles", (handle,))}
    for hooks in (getattr(view, name) for name in _HOOKS):
        for number in ids & set(hooks):
            del hooks[number]

    def cast(dtype, values):
        return _apply_to_tensors(functools.partial(_cast_fp_tensor, dtype), values)

    policy = state._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype:
        hook = lambda _, *given: cast(policy.param_dtype, given)  # noqa: E731
        view.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        view.register_forward_hook(lambda _, args, output: cast(policy.output_dtype, output))


def body_of(block: nn.Module) -> nn.Module:
    """A sharded block without FSDP's class and hooks; it shares parameters, buffers and submodules."""
    body = _empty(block)
    vars(body).update({name: OrderedDict() for name in _HOOKS})
    update_body(body, block)
    return body


def update_body(body: nn.Module, block: nn.Module) -> None:
    """Give the body the attributes that the block has now."""
    vars(body).update({name: value for name, value in vars(block).items() if name not in (*_HOOKS, "forward")})
