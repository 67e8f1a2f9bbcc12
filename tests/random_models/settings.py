"""Parts that read what is neither argument nor tensor: globals, closures, configurations, the environment, modes."""

import contextvars
import dataclasses
import os
import threading
import types

import numpy as np
import torch
from torch import nn

from .part import WIDTH, Part, at_restart, channels_first, channels_last

SCALE = 1.0
FLAGS = {"sharp": False}
_VARIABLE = "ACKPT_RANDOM_MODELS"
OTHER = 0.5
_CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=0.5)
_LOCAL = threading.local()


@at_restart
def _restart():
    global SCALE
    SCALE = 1.0
    FLAGS["sharp"] = False
    os.environ.pop(_VARIABLE, None)
    Settings.temperature = 1.0
    _CONTEXT.set(0.5)
    vars(_LOCAL).clear()
    scaled_by_attribute.scale = globals()["OTHER"] = 0.5


def scaled_by_attribute(x):
    return x * scaled_by_attribute.scale


class ReadsGlobal(Part):
    def setup(self, draw, inner):
        self.changes = draw.random() < 0.6

    def between(self, step):
        global SCALE
        if self.changes:
            SCALE *= 2

    def forward(self, x):
        return torch.tanh(x * SCALE)


class ReadsFlag(Part):
    def setup(self, draw, inner):
        self.environment = draw.random() < 0.4
        self.changes = draw.random() < 0.6

    def between(self, step):
        if self.changes:
            FLAGS["sharp"] = not FLAGS["sharp"]
            os.environ[_VARIABLE] = str(step % 2)

    def forward(self, x):
        if os.environ.get(_VARIABLE, "0") == "0" if self.environment else FLAGS["sharp"]:
            return torch.tanh(2 * x)
        return torch.tanh(x)


class ReadsClosure(Part):
    def setup(self, draw, inner):
        scale = 1.0

        def change():
            nonlocal scale
            scale += 0.5

        self.scaled, self.change = (lambda x: torch.sin(x * scale)), change
        self.changes = draw.random() < 0.6

    def between(self, step):
        if self.changes:
            self.change()

    def forward(self, x):
        return self.scaled(x)


@dataclasses.dataclass(eq=False)
class Settings:
    scale: float = 1.0
    residual: bool = True
    temperature = 1.0


class ReadsConfiguration(Part):
    def setup(self, draw, inner):
        self.config = draw.choice([Settings, types.SimpleNamespace])(scale=1.0, residual=True)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = draw.choice(["scale", "residual", "class", "none"])

    def between(self, step):
        if self.how == "scale":
            self.config.scale *= 0.5
        elif self.how == "residual":
            self.config.residual = not self.config.residual
        elif self.how == "class":
            Settings.temperature += 1.0

    def forward(self, x):
        found = channels_first(self.linear(channels_last(x))) * self.config.scale
        found = found / getattr(type(self.config), "temperature", 1.0)
        return x + found if self.config.residual else found


class ReadsObjects(Part):
    def __init__(self, draw, inner=()):
        super().__init__(draw)
        self.how = draw.choice(["context", "thread", "function", "list", "globals", "anomaly"])
        self.box = {"all": [Settings(), Settings()]}

    def between(self, step):
        if self.how == "context":
            _CONTEXT.set(step + 1.0)
        elif self.how == "thread":
            _LOCAL.scale = step + 1.0
        elif self.how == "function":
            scaled_by_attribute.scale = step + 1.0
        elif self.how == "list":
            self.box["all"][1].scale = step + 1.0
        elif self.how == "globals":
            globals()["OTHER"] = step + 1.0

    def forward(self, x):
        reads = {
            "context": lambda: _CONTEXT.get(),
            "thread": lambda: getattr(_LOCAL, "scale", 0.5),
            "function": lambda: scaled_by_attribute(1.0),
            "list": lambda: self.box["all"][1].scale,
            "globals": lambda: globals()["OTHER"],
            "anomaly": lambda: 0.5 if torch.is_anomaly_enabled() else 1.5,
        }
        return torch.tanh(x * reads[self.how]())


class ChangingAttributes(Part):
    def setup(self, draw, inner):
        self.dropout = nn.Dropout(0.5)
        self.weights = [0.5, 1.0]
        self.array = np.linspace(0.5, 1.0, WIDTH).astype(np.float32)
        self.vector = torch.linspace(0.5, 1.0, WIDTH)
        self.how = draw.choice(["rate", "list", "array", "tensor", "replaced"])

    def between(self, step):
        if self.how == "rate":
            self.dropout.p *= 0.5
        elif self.how == "list":
            self.weights[0] += 1.0
        elif self.how == "array":
            self.array[0] += 1.0
        elif self.how == "tensor":
            self.vector[0] += 1.0
        else:
            self.vector = self.vector + 1.0

    def forward(self, x):
        last = channels_last(x)
        if self.how == "rate":
            return self.dropout(x)
        if self.how == "list":
            return x * self.weights[0] + self.weights[1]
        if self.how == "array":
            return channels_first(last * torch.from_numpy(self.array))
        return channels_first(last * self.vector)


class AsksIfCompiling(Part):
    """A path of its own where the model is compiled, mathematically equal or with another size in memory."""

    def setup(self, draw, inner):
        self.how = draw.choice(["equal", "larger"])
        self.looks = draw.random() < 0.5

    def forward(self, x):
        if self.looks and not torch.compiler.is_compiling() and bool((x.detach().abs() > 1e4).any()):
            x = x.clamp(-1e4, 1e4)
        if not torch.compiler.is_compiling():
            return torch.tanh(x).pow(2)
        if self.how == "equal":
            return torch.tanh(x) * torch.tanh(x)
        return torch.stack([torch.tanh(x)] * 4).prod(0).sqrt()


class LooksAtValues(Part, planned=False):
    def setup(self, draw, inner):
        self.how = draw.choice(["check", "unless compiled", "path", "item"])

    def forward(self, x):
        if self.how == "check":
            assert torch.isfinite(x).all(), "not finite"
        elif self.how == "unless compiled":
            if not torch.compiler.is_compiling() and torch.isnan(x).any():
                raise ValueError("not a number")
        elif self.how == "path":
            if x.mean() > 0:
                return x.tanh()
        elif self.how == "item":
            return x / max(1.0, x.detach().abs().max().item())
        return x.sin()


class ReplacedForward(Part):
    def setup(self, draw, inner):
        self.linear = nn.Linear(WIDTH, WIDTH)
        forward = self.linear.forward
        self.linear.forward = lambda x: forward(x) * 0.5

    def forward(self, x):
        return channels_first(self.linear(channels_last(x)))
