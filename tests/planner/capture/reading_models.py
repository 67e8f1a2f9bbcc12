"""A model of one layer whose forward calls a function, which reads what a test changes."""

import dataclasses

import torch
from torch import nn

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@dataclasses.dataclass
class Config:
    scale: float = 2.0


class Model(nn.Module):
    factor = 2.0

    def __init__(self, function, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(4, 4), function
        vars(self).update(attributes)

    def forward(self, x, *others):
        return self.function(self, self.linear(x), *others).sum()
