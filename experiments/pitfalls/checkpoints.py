"""Pitfalls of checkpointing: training steps of a few lines, each with the call of a checkpoint as its argument.

``step(plain)`` calls the function without a checkpoint; its result is the correct one. `verdicts` compares any number
of checkpoints with it.
"""

# The code is shown in the book, without checks that a gradient or a result is there.
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def plain(function, *args, **kwargs):
    """Call `function` without a checkpoint."""
    return function(*args, **kwargs)


def _ones(*shape):
    return torch.ones(*shape, requires_grad=True)


def parameters(checkpoint):
    """The gradient of a weight."""
    linear = nn.Linear(2, 1)
    checkpoint(linear, _ones(1, 2)).sum().backward()
    return None if linear.weight.grad is None else linear.weight.grad.tolist()


def no_input_requires_grad(checkpoint):
    """The parameters without a gradient, if the region's input is data."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1](checkpoint(model[0], torch.ones(1, 2))).sum().backward()
    return [name for name, weight in model.named_parameters() if weight.grad is None]


def hook_of_a_shared_parameter(checkpoint):
    """A gradient of 2 that a hook clips to 1; two regions use the weight."""
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    linear.weight.register_hook(lambda grad: grad.clamp(max=1))
    checkpoint(linear, checkpoint(linear, _ones(1))).backward()
    return None if linear.weight.grad is None else linear.weight.grad.item()


def gradient_penalty(checkpoint):
    """The derivative of (dy/dx)^2 for y = (x^2)^3 at x = 2."""
    x = torch.tensor([2.0], requires_grad=True)
    checkpoint(lambda h: h**3, x**2).backward(create_graph=True)
    gradient, x.grad = x.grad, None
    (gradient**2).backward()
    return x.grad.item()


def changed_parameter(checkpoint):
    """The gradient of the input, if the weight is multiplied by 10 between forward and backward."""
    linear, x = nn.Linear(1, 1, bias=False), _ones(1, 1)
    y = checkpoint(linear, x)
    with torch.no_grad():
        linear.weight.mul_(10)
    y.sum().backward()
    return x.grad.item()


def dropout(checkpoint):
    """Whether the gradient is zero exactly where dropout zeroed the output."""
    x = _ones(8)
    y = checkpoint(F.dropout, x)
    y.sum().backward()
    return torch.equal(x.grad, y.detach())


def other_generators(checkpoint):
    """Whether output and gradient have the same random factor, for three sources of random numbers."""
    own = torch.Generator().manual_seed(0)
    draws = {"Python": random.random, "NumPy": np.random.rand}
    draws["own"] = lambda: torch.rand(1, generator=own).item()
    return {name: _same_factor(checkpoint, draw) for name, draw in draws.items()}


def _same_factor(checkpoint, draw):
    x = _ones(1)
    y = checkpoint(lambda t: torch.tensor(draw()) * t, x)
    y.backward()
    return torch.equal(x.grad, y.detach())


def batch_norm(checkpoint):
    """Updates of BatchNorm's statistics in one step."""
    norm, x = nn.BatchNorm1d(1, momentum=0.5), torch.tensor([[1.0], [3.0]], requires_grad=True)
    checkpoint(norm, x).sum().backward()
    return norm.num_batches_tracked.item(), norm.running_mean.item()


def autocast(checkpoint):
    """The dtypes in which a matrix product runs, if backward is called outside of autocast."""
    linear, seen = nn.Linear(4, 4), set()

    def product(t):
        y = linear(t)
        seen.add(str(y.dtype))
        return y.float()

    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(product, _ones(1, 4))
    y.sum().backward()
    return sorted(seen)


def loop_variable(checkpoint):
    """The gradients of three layers that a loop calls through a lambda."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    h = _ones(1)
    for layer in layers:
        h = checkpoint(lambda t: layer(t), h)  # noqa: B023
    h.backward()
    return [None if layer.weight.grad is None else round(layer.weight.grad.item(), 4) for layer in layers]


def training_mode(checkpoint):
    """Whether gradient and output agree about dropout, if ``eval()`` is called before backward."""
    drop, x = nn.Dropout(), _ones(8)
    y = checkpoint(drop, x)
    drop.eval()
    y.sum().backward()
    return torch.equal(x.grad, y.detach())


def keyword_argument(checkpoint):
    """The gradient, if one argument is passed by its name."""
    x = _ones(1)
    checkpoint(lambda t, scale: t * scale, x, scale=3.0).backward()
    return x.grad.item()


def tensor_in_a_dict(checkpoint):
    """The derivative of h^2 + h for h = w^3 at w = 2, if the region gets h in a dict."""
    w = torch.tensor([2.0], requires_grad=True)
    h = w**3
    (checkpoint(lambda features: features["h"] ** 2, {"h": h}) + h).backward()
    return w.grad.item()


def grad_mode(checkpoint):
    """Whether a layer that looks at the grad mode has the same output as without a checkpoint."""
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 8, 64, requires_grad=True)
    return torch.equal(checkpoint(encoder, x), encoder(x))


def output_without_grad(checkpoint):
    """Which of two outputs requires a gradient, if one is detached."""
    return [output.requires_grad for output in checkpoint(lambda t: (t * 2, t.detach() * 3), _ones(1))]


def overwritten_input(checkpoint):
    """The gradient of a region that overwrites its input."""
    x = _ones(1)
    checkpoint(lambda t: t.mul_(2) * t, x * 3).backward()
    return x.grad.item()


def another_shape(checkpoint):
    """The gradient of a function that returns one element more in its second run."""
    x, runs = _ones(2), []
    checkpoint(lambda t: runs.append(1) or t.exp()[: len(runs)], x).sum().backward()
    return [round(value, 4) for value in x.grad.tolist()]


def outside_value(checkpoint):
    """The gradient, if an entry of a dict that the region reads changes before backward."""
    x, settings = _ones(1), {"scale": 2.0}
    y = checkpoint(lambda t: (t * settings["scale"]).sin(), x)
    settings["scale"] = 20.0
    y.backward()
    return round(x.grad.item(), 4)


def constant_tensor(checkpoint):
    """The same, if the region makes a tensor of the entry."""
    x, settings = _ones(1), {"scale": 2.0}
    y = checkpoint(lambda t: (t * torch.tensor(settings["scale"])).sin(), x)
    settings["scale"] = 20.0
    y.backward()
    return round(x.grad.item(), 4)


STEPS = {
    "parameters": parameters,
    "no input requires grad": no_input_requires_grad,
    "parameter changed before backward": changed_parameter,
    "dropout": dropout,
    "autocast": autocast,
    "hook of a shared parameter": hook_of_a_shared_parameter,
    "create_graph=True": gradient_penalty,
    "Python, NumPy, own generator": other_generators,
    "BatchNorm statistics": batch_norm,
    "loop variable in a closure": loop_variable,
    "eval() before backward": training_mode,
    "keyword argument": keyword_argument,
    "tensor in a dict": tensor_in_a_dict,
    "code that depends on grad mode": grad_mode,
    "an output without grad": output_without_grad,
    "input overwritten": overwritten_input,
    "recomputation returns another shape": another_shape,
    "plain Python value changed": outside_value,
    "constant tensor from a changed value": constant_tensor,
}


def verdicts(checkpoints: Mapping[str, Callable]) -> list[dict[str, str]]:
    """One row per pitfall: is the result of each checkpoint ``right``, ``wrong``, or an ``error``?

    Args:
        checkpoints: ``{name: checkpoint}``; each is called as ``checkpoint(function, *args, **kwargs)``.

    If the call without a checkpoint raises an error, ``error`` is the correct verdict and any result is ``wrong``.

    Example:
        >>> import ackpt
        >>> from experiments.pitfalls.checkpoints import verdicts
        >>> verdicts({"ackpt": ackpt.checkpoint})[0]
        {'pitfall': 'parameters', 'ackpt': 'right'}
    """
    rows = []
    for name, step in STEPS.items():
        correct = _result(step, plain)
        row = {"pitfall": name}
        for label, checkpoint in checkpoints.items():
            result = _result(step, checkpoint)
            row[label] = "error" if isinstance(result, Exception) else "right" if result == correct else "wrong"
        rows.append(row)
    return rows


def _result(step, checkpoint):
    """The result or the error of a step, with fixed seeds."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        try:
            return step(checkpoint)
        except (RuntimeError, TypeError, ValueError) as error:
            return error
