"""What a predicted step stores in caches is gone afterwards, so that a step on data does not find tensors without."""

import contextlib
import functools
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt


def mask(length: int) -> torch.Tensor:
    return torch.full((length, length), -1e4).triu(1)


class Attends(nn.Module):
    """Adds ``mask_of(model, length)`` to its scores."""

    of_class = None
    known: dict = {}

    def __init__(self, mask_of):
        super().__init__()
        self.mask_of, self.linear = mask_of, nn.Linear(8, 8)

    def forward(self, x):
        q = self.linear(x)
        return ((q @ q.transpose(1, 2) + self.mask_of(self, x.shape[1])).softmax(-1) @ q).square().mean()


GLOBAL: dict = {}
NESTED: dict = {"masks": {}}
LIST: list = []
NAME = None


class Table:
    def __init__(self):
        self.mask = None


TABLE = Table()


@functools.lru_cache
def cached(length):
    return mask(length)


def in_cache(model, length):
    return cached(length)


def in_dict(model, length):
    return GLOBAL.setdefault(length, mask(2 * length)[:length, :length])


def in_tuple(model, length):
    return GLOBAL.setdefault(length, (mask(length),))[0]


def in_nested_dict(model, length):
    entry = {"mask": types.SimpleNamespace(both=[mask(length)])}
    return NESTED["masks"].setdefault(length, entry)["mask"].both[0]


def in_list(model, length):
    if not LIST:
        LIST.append(mask(length))
    return LIST[0]


def in_global(model, length):
    global NAME
    if NAME is None:
        NAME = mask(length)
    return NAME


def in_class(model, length):
    if Attends.of_class is None:
        Attends.of_class = mask(length)
    return Attends.of_class


def in_new_attribute_of_the_class(model, length):
    if not hasattr(Attends, "new"):
        Attends.new = mask(length)
    return Attends.new


def in_dict_of_the_class(model, length):
    return model.known.setdefault(length, mask(length))


def in_object(model, length):
    if TABLE.mask is None:
        TABLE.mask = mask(length)
    return TABLE.mask


def in_default(model, length, known={}):  # noqa: B006
    return known.setdefault(length, mask(length))


def in_function(model, length):
    if not hasattr(in_function, "mask"):
        in_function.mask = mask(length)
    return in_function.mask


def in_closure():
    table = None

    def mask_of(model, length):
        nonlocal table
        table = mask(length) if table is None else table
        return table

    return mask_of


def logs_activations(model, length):
    LIST.append(model.linear.weight * 2)
    return mask(length)


PLACES = [
    *(in_cache, in_dict, in_tuple, in_nested_dict, in_list, in_global, in_class, in_new_attribute_of_the_class),
    *(in_object, in_dict_of_the_class, in_default, in_function, in_closure, logs_activations),
]


def predicted(model, x, context=contextlib.nullcontext):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with context():
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return [ackpt.predict(step, resident=(model, x, *kept)) for kept in ((), (optimizer,))]


@pytest.mark.parametrize(
    ("kind", "mask_of"),
    [*(("fake", place) for place in PLACES), *(("meta", place) for place in (in_cache, in_nested_dict, in_closure))],
)
def test_a_prediction_leaves_no_cached_tensors(kind, mask_of):
    mask_of = in_closure() if mask_of is in_closure else mask_of
    context = FakeTensorMode() if kind == "fake" else torch.device("meta")
    with context:
        model, x = Attends(mask_of), torch.empty(2, 6, 8)
    predicted(model, x, contextlib.nullcontext if kind == "fake" else lambda: context)
    assert NESTED == {"masks": {}} and not GLOBAL and not LIST and not Attends.known and TABLE.mask is NAME is None
    real = Attends(mask_of)
    loss = real(torch.randn(2, 6, 8))
    loss.backward()
    assert type(loss) is torch.Tensor and torch.isfinite(loss)
    GLOBAL.clear(), NESTED["masks"].clear(), LIST.clear(), Attends.known.clear(), cached.cache_clear()
    in_default.__defaults__[0].clear()
    globals().update(NAME=None)
    Attends.of_class = TABLE.mask = None
    for owner, name in ((Attends, "new"), (in_function, "mask")):
        if name in vars(owner):
            delattr(owner, name)


def test_a_failed_prediction_leaves_no_cached_tensors():
    with FakeTensorMode():
        model, x = Attends(in_dict), torch.empty(2, 6, 8)
    with pytest.raises(ackpt.MeterError, match="needs the values of a tensor"):
        ackpt.predict(lambda: model(x).item(), resident=(model, x))
    assert not GLOBAL


def test_earlier_caches_and_state_of_the_step_are_kept():
    four = cached(4)
    GLOBAL[4] = four
    with FakeTensorMode():
        model, x, counter = Attends(in_dict), torch.empty(2, 6, 8), {"steps": torch.zeros(())}
        scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        counter["steps"].add_(1)
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(2):
        ackpt.predict(step, resident=(model, x), warmup=0)
    assert GLOBAL == {4: four} and cached(4) is four and "steps" in counter and scaler._scale is not None
    assert all("exp_avg" in optimizer.state[each] and each.grad is not None for each in model.parameters())
    GLOBAL.clear()
    cached.cache_clear()
