"""Refuse models, calls and tensors before they are captured, and warn of hooks; for later errors see `source_lines`."""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping

import numpy
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from ackpt.checkpointing.reachable import HOOKS
from ackpt.checkpointing.standing_in import in_place_of, require_call_of_forward
from ackpt.core.errors import TraceError, add_note, check_misspelt, did_you_mean, warn
from ackpt.metering.resident import is_wrapper, state_name, state_values

from .attributes import derived
from .calls import named_leaves
from .source_lines import not_repeated
from .value_walk import is_installed, is_of_model, module_label, said

_INDUCTOR = "or use torch.compile(model, backend='ackpt', options={'compiler': 'inductor'}), which plans and compiles"
_DDP = "DistributedDataParallel(ackpt.compile(model, ...))"
_GATHERS = "FSDP gathers parameters while a step runs, which cannot be captured."

_PARALLEL = (
    "Use ackpt.apply_activation_checkpointing(model), with the same modules on every rank, which changes no tensor."
)

_OUTSIDE = ". Hooks of the model run outside the plan: pass the arguments that forward gets after forward pre-hooks."
_LEFT_OUT = (
    "As a part of a larger model, it can stay outside the plan: ackpt.compile and ackpt.apply_budget plan the rest "
    "with policy 'auto', 'none' or 'full', unless regions=False."
)

# kind -> what is wrong with it, and what to do
_WRAPPERS: dict[type, str] = {
    OptimizedModule: f"torch.compile has compiled it. Give the original module, its _orig_mod, {_INDUCTOR}.",
    torch.jit.ScriptModule: "TorchScript cannot be captured. Give the nn.Module it was made from.",
    DataParallel: f"it runs copies of a module. Give that module itself; for several GPUs use {_DDP}.",
    DistributedDataParallel: (
        "a planned step cannot contain it. Call ackpt.apply_budget(model, ...) before DistributedDataParallel(model), "
        f"or wrap the planned step in it: {_DDP}."
    ),
}
if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    _WRAPPERS[FullyShardedDataParallel] = (
        f"{_GATHERS} Call ackpt.apply_activation_checkpointing before FullyShardedDataParallel, or use fully_shard."
    )
    _WRAPPERS[FSDPModule] = (
        f"{_GATHERS} Call ackpt.apply_budget(model, batch, budget=...), which plans every rank of a model after "
        "fully_shard, or plan the model before you shard it."
    )


def is_sharded(model) -> bool:
    """Whether ``fully_shard`` was applied to a module of `model`."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return torch.distributed.is_available() and any(isinstance(module, FSDPModule) for module in modules)


def check_keywords(model, given, keywords, owner: str) -> None:
    """Refuse keywords for the model that are nearly one of `keywords`, of `owner`, unless its forward names them."""
    unnamed = sorted(set(given) - forward_names(model))
    check_misspelt(unnamed, keywords, f"{owner}, nor a parameter of the model's forward")


def check_call(model, args, kwargs, keywords: Collection[str] = ()) -> None:
    """Refuse arguments that the forward does not take; `keywords`: those of `ackpt.compile`, if it got all others."""
    if any(isinstance(given, DataLoader) for given in (*args, *kwargs.values())):
        raise TypeError("the model got a DataLoader: give the inputs of one batch, such as *next(iter(loader))")
    signature = _signature(model)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = list(signature.parameters)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = None if takes_all else next((name for name in kwargs if name not in names), None)
        reason = str(error) if unknown is None else f"got an unexpected keyword argument {unknown!r}"
        hint = "" if unknown is None else did_you_mean(unknown, [*names, *keywords])
        advice = f". The model is called with all keywords but those of ackpt.compile: {', '.join(keywords)}."
        raise TypeError(
            f"{type(model).__name__}.forward() {reason}{hint}; its parameters are {', '.join(names)}"
            f"{advice if keywords and unknown is not None else ''}{_OUTSIDE if model._forward_pre_hooks else ''}"
        ) from None


def _signature(model) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (AttributeError, TypeError, ValueError):  # it has none, or is no module
        return None


@contextlib.contextmanager
def call_named(model, args, kwargs) -> Iterator[None]:
    """Inside, an error of the model's code names the arguments, or says how to pass a dict of all of them."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        name, given = type(model).__name__, args[0] if len(args) == 1 and not kwargs else None
        is_batch = isinstance(given, Mapping) and given and set(given) <= forward_names(model)
        if is_batch and isinstance(error, (TypeError, AttributeError)):
            raise TypeError(
                f"{name} got its arguments as one dict, and fails: {error}. Unpack it, as in "
                "ackpt.compile(model, **batch), or give it itself, as in ackpt.apply_budget(model, batch, budget=...)"
            ) from error
        names = [*positional_names(model, args), *map(str, range(len(args)))][: len(args)]
        said = ", ".join(f"{each}: {_kind(value)}" for each, value in {**dict(zip(names, args)), **kwargs}.items())
        add_note(error, f"ackpt: raised by {name}.forward with {said}")
        raise


def _kind(value) -> str:
    """The dtype and the shape of a tensor, or the class of another argument."""
    return f"{value.dtype} {list(value.shape)}".removeprefix("torch.") if is_tensor(value) else type(value).__name__


def forward_names(model) -> set[str]:
    """Names of the parameters of the model's forward."""
    parameters = () if (signature := _signature(model)) is None else signature.parameters.values()
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def positional_names(model, args) -> list[str]:
    """Names of the parameters of the model's forward that positional arguments fill."""
    signature = _signature(model)
    return [] if signature is None else list(signature.parameters)[: len(args)]


def is_opaque(model: nn.Module, path: str) -> bool:
    """Whether the module at `path`, or one around it inside of `model`, is scripted or compiled."""
    names = path.split(".")
    return any(_is_compiled(model.get_submodule(".".join(names[: end + 1]))) for end in range(len(names)))


def first_opaque(model) -> str | None:
    """The first submodule of `model` that is scripted or compiled, in words; None if no submodule is."""
    if not isinstance(model, nn.Module) or _is_compiled(model):
        return None
    compiled = ((name, module) for name, module in model.named_modules() if name and _is_compiled(module))
    return next(
        (f"module {name!r} ({type(module).__name__}) is scripted or compiled" for name, module in compiled), None
    )


def _is_compiled(module: nn.Module) -> bool:
    if isinstance(module, (OptimizedModule, torch.jit.ScriptModule)):
        return True
    return module._compiled_call_impl is not None


def check_model(model, except_opaque: bool = False) -> None:
    """Refuse a model that is not a module or cannot be captured; `except_opaque`: submodules may be compiled."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    defines = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    if "forward" not in vars(model) and (defines is nn.Module or defines.__name__ == "LightningModule"):
        children = ", ".join(f"model.{name}" for name, _ in model.named_children())
        raise TypeError(
            f"{type(model).__name__} has no forward of its own to plan. Give the module that the training step calls"
            f"{f', such as {children}' if children else ''}."
        )
    require_call_of_forward(model, "the model")
    for name, module in model.named_modules():
        if name and except_opaque and is_opaque(model, name):
            continue
        reason = next((reason for kind, reason in _WRAPPERS.items() if isinstance(module, kind)), None)
        if "_ackpt_variants" in vars(module):
            reason = "it is already planned. Plan the whole model once, built from modules that are not planned."
        elif reason is None and in_place_of(module) is not None:
            reason = "it has a budget of its own. Call ackpt.remove_budget on it, and plan the whole model once."
        elif reason is None and module._compiled_call_impl is not None:
            reason = f"its compile() was called. Do not call it, {_INDUCTOR}."
        elif reason is None and any(is_lazy(p) for p in module.parameters(recurse=False)):
            reason = "its parameters have no shape yet. Call the model once on a batch to initialize them."
        elif reason is None and any(type(p).__name__ == "DTensor" for p in module._parameters.values()):
            reason = (
                f"it has parameters of tensor parallelism, whose ranks must choose alike, or they deadlock. {_PARALLEL}"
            )
        if reason is not None:
            if name and _is_compiled(module):
                reason = f"{reason} {_LEFT_OUT}"
            raise TypeError(f"{module_label(name)} ({type(module).__name__}) cannot be planned: {reason}")


def warn_of_evaluation(model: nn.Module) -> None:
    """Warn if a step is planned while no module of `model` is in training mode."""
    if not any(module.training for module in model.modules()):
        warn(
            f"the model is in evaluation mode, as from_pretrained returns it: {type(model).__name__} is planned "
            "without dropout, and captured again in training mode. Call model.train() before you plan."
        )


def warn_of_hooks(model: nn.Module) -> None:
    """Warn of hooks of the user's own on submodules, which a planned step does not call; those of the model run.

    Hooks of installed libraries are left out: what they do to tensors is part of the captured step.
    """
    for name, module in [*model.named_modules()][1:]:
        for hook in (hook for hooks in HOOKS for hook in getattr(module, hooks).values()):
            code = getattr(hook, "__code__", None)
            if code is not None and is_of_model(code.co_filename) and not is_installed(code.co_filename):
                warn(
                    f"{module_label(name)} has a hook, {said(code)}. A planned step repeats what the hook does to "
                    "tensors, but does not call it. If it prints, counts or collects, remove it, or use "
                    "ackpt.apply_activation_checkpointing, which runs all hooks."
                )


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def tensor_facts(tensor: torch.Tensor) -> tuple:
    """The properties of a tensor of the model that a capture depends on; they compare and hash."""
    facts = type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    plain = [(path, value) for path, value in state_values(tensor) if not is_tensor(value)]
    return (*facts, *((path, tuple(value) if isinstance(value, list) else value) for path, value in plain))


def public_attributes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The names of a plain tensor's own Python attributes, without marks of libraries, which begin with ``_``."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return ()
    return tuple(sorted(name for name in vars(tensor) if name[:1] != "_"))


def has_data(model: nn.Module, leaves) -> bool:
    """Whether no tensor of the model or of the call is fake or on the meta device."""
    tensors = filter(is_tensor, (*model.parameters(), *model.buffers(), *leaves))
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def require_traceable(model: nn.Module, args, kwargs) -> None:
    """Refuse what no capture follows: iterators, NumPy arrays, nested tensors, tensor subclasses, an absent device.

    Also refuse weights of the model itself that hooks of torch compute, because its hooks run outside the plan.
    """
    if computed := sorted(derived(model) - model._parameters.keys()):
        raise not_repeated(
            f"{computed[0]!r} of the model itself is computed by a forward pre-hook, as by torch.nn.utils.weight_norm, "
            "which a captured step would not run. Use torch.nn.utils.parametrizations, pass nn.Sequential(model)"
        )
    require_no_arrays(args, kwargs)
    leaves = [(f"argument {name}", leaf) for name, leaf in named_leaves(args, kwargs)]
    for name, leaf in leaves:
        if isinstance(leaf, Iterator):
            raise not_repeated(
                f"{name} is a {type(leaf).__name__}, whose items a capture would take, which a captured step would not "
                "do again. Pass a list of them"
            )
    arguments = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    for name, tensor in arguments:
        if attributes := public_attributes(tensor):
            raise not_repeated(
                f"{name} is a tensor with a Python attribute {attributes[0]!r}, which a captured step would not see. "
                "Pass its value as an argument of its own"
            )
    parameters = [(f"parameter {name!r}", tensor) for name, tensor in model.named_parameters()]
    buffers = [(f"buffer {name!r}", tensor) for name, tensor in model.named_buffers()]
    types = set()
    for name, tensor in (*parameters, *buffers, *arguments):
        if tensor.is_nested:
            raise TraceError(
                f"a nested tensor cannot be planned: give a padded one for {name}, by tensor.to_padded_tensor(0.0)"
            )
        require_plain(name, tensor)
        types.add(tensor.device.type)
    if "cuda" in types and not torch.cuda.is_available():  # torch would crash on fake ones
        raise TraceError(
            "the model or its inputs are on a CUDA device, but torch sees no CUDA GPU. To plan for a GPU without one, "
            "put them on the meta device."
        )


def require_no_arrays(args, kwargs) -> None:
    """Refuse NumPy arrays among the arguments of a call."""
    for name, leaf in named_leaves(args, kwargs):
        if isinstance(leaf, numpy.ndarray):
            raise TypeError(
                f"argument {name} is a NumPy array, whose values no capture follows: give torch.from_numpy(array)"
            )


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor subclass: it changes what operations do or return, which a captured step would not do again.

    Subclasses of ``nn.Parameter`` and fake tensors change nothing, and pass; so do frozen weights with a state.
    """
    kind = type(tensor)
    if kind is torch.Tensor or isinstance(tensor, FakeTensor):
        return
    has_torch_function = kind.__torch_function__ is not torch._C._disabled_torch_function_impl
    dispatch = getattr(kind, "__torch_dispatch__")  # noqa: B009 (pyright cannot bind torch's own)
    if not has_torch_function and dispatch is torch._C._disabled_torch_dispatch_impl:
        return
    if state_name(tensor) is not None and not tensor.requires_grad:  # it is a subclass for loading and sharding alone
        return
    fix = "Give a plain tensor: tensor.as_subclass(torch.Tensor), or tensor.as_tensor() of a MONAI MetaTensor."
    if kind.__name__ == "DTensor":
        fix = f"{_PARALLEL} For an argument use tensor.to_local()."
    elif isinstance(tensor, nn.Parameter) or not has_torch_function:  # the class may need what it is made of
        fix = "Freeze it." if state_name(tensor) is not None else "" if is_wrapper(tensor) else fix
        fix = f"{fix} To plan the model in regions, use ackpt.apply_budget(model, batch, regions=True, ...).".lstrip()
    raise TraceError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor, whose type and attributes a "
        f"captured step would lose. {fix}"
    )
