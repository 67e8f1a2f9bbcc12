"""A model that adds a mask to its scores, and places in which its code keeps the mask between calls."""

import functools

import torch
from torch import nn


def mask(length: int) -> torch.Tensor:
    return torch.full((length, length), -1e4).triu(1)


class Attends(nn.Module):
    """Adds ``mask_of(model, x)`` to its scores."""

    def __init__(self, mask_of):
        super().__init__()
        self.mask_of, self.linear = mask_of, nn.Linear(8, 8)
        self.attribute, self.known = None, {}
        self.register_buffer("slope", torch.tensor([0.5]))

    def forward(self, x):
        q = self.linear(x)
        return ((q @ q.transpose(1, 2) + self.mask_of(self, x)).softmax(-1) @ q).square().mean()


def in_dict(dict_of, put=lambda table: table, get=lambda value: value):
    def mask_of(model, x):
        known, length = dict_of(model), x.shape[1]
        if length not in known:
            known[length] = put(mask(length))
        return get(known[length])

    return mask_of


def in_function_of(maxsize):
    cached = functools.lru_cache(maxsize=maxsize)(mask)
    return lambda model, x: cached(x.shape[1])


def in_closure():
    table = None

    def mask_of(model, x):
        nonlocal table
        if table is None or table.shape[0] < x.shape[1]:
            table = mask(x.shape[1])
        return table[: x.shape[1], : x.shape[1]]

    return mask_of


def in_list(tables):
    def mask_of(model, x):
        for table in tables:
            if table.shape[0] == x.shape[1]:
                return table
        tables.append(mask(x.shape[1]))
        return tables[-1]

    return mask_of


def in_default(model, x, known={}):  # noqa: B006
    return in_dict(lambda model: known)(model, x)
