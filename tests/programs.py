"""Random models for property tests: a few lines of PyTorch, drawn by hypothesis, that eager can run.

A program is text, so that a failure prints the model it failed on. Lines are drawn from templates and run as they are
drawn: what eager refuses is left out, so types and shapes need no rules here.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

ROWS, COLUMNS = 3, 4
_LARGEST = 96  # elements of a value

ELEMENTWISE = (
    *(f"torch.{name}({{a}})" for name in ("relu", "sin", "tanh", "sigmoid", "neg", "abs", "square", "clone")),
    *("F.gelu({a})", "F.silu({a})", "F.leaky_relu({a}, 0.1)", "{a}.clamp(-1, 1)", "{a} * 2", "1 - {a}", "{a} / 3"),
    *("{a} + {b}", "{a} * {b}", "{a} - {b}", "{a} * {a}", "torch.maximum({a}, {b})", "torch.lerp({a}, {b}, 0.3)"),
    *("torch.where({a} > 0, {a}, {b})", "{a} * ({b} > 0)", "torch.addcmul({a}, {b}, {c})", "{a}.masked_fill({m}, 0.5)"),
)
PRODUCTS = (
    *("{a} @ {b}", "{a} @ self.weight", "self.linear({a})", "F.linear({a}, self.weight, self.bias)"),
    *("{a} @ {b}.transpose(-1, -2)", "torch.outer({a}.sum(-1).flatten(), {b}.flatten()[:2])"),
)
VIEWS = (
    *("{a}.view(-1)", "{a}.reshape(-1)", "{a}.flatten()", "{a}.t()", "{a}.transpose(0, -1)", "{a}.unsqueeze({d})"),
    *("{a}.squeeze()", "{a}[1:]", "{a}[:, ::2]", "{a}[..., 0]", "{a}[0]", "{a}[None].expand(2, *{a}.shape)"),
    *("{a}[..., :1].expand_as({a})", "{a}.narrow({d}, 1, 1)", "{a}.diagonal()", "{a}.unfold(-1, 2, 1) + 0"),
    *("{a}.detach()", "{a}.contiguous()", "{a}.view_as({a})", "{a}.movedim(0, -1)", "{a}.permute(1, 0)"),
    "{a}.as_strided((2, 2), (2, 1))",
)
SEVERAL = (
    *("torch.chunk({a}, 2, {d})", "{a}.split([1, {a}.shape[-1] - 1], -1)", "{a}.unbind({d})"),
    *("{a}.max({d})", "{a}.min({d})", "{a}.topk(2)", "{a}.sort({d})", "torch.var_mean({a}, {d})", "{a}.cummax({d})"),
    *("torch.aminmax({a})", "{a}.median({d})", "torch.native_layer_norm({a}, (4,), self.weight[0], None, 1e-5)"),
    *("torch.native_dropout({a}, 0.4, True)", "F.max_pool1d({a}[None], 2, return_indices=True)"),
)
REDUCTIONS = (
    *("{a}.sum()", "{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a}.logsumexp({d})", "{a}.cumsum({d})"),
    *("{a}.softmax({d})", "F.log_softmax({a}, {d})", "{a}.amax({d})", "{a}.norm()", "{a}.prod({d})", "{a}.std()"),
    *("F.cross_entropy({a}, ids)", "F.mse_loss({a}, {b})", "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}])"),
    *("{a}.flip({d})", "{a}.roll(1, {d})", "F.pad({a}, (1, 0))", "{a}.tril()", "{a}.repeat(2, 1)"),
)
MODULES = (
    *("self.norm({a})", "self.norm({a})", "self.layer_norm({a})", "self.embedding({k})", "self.dropout({a})"),
    *("F.dropout({a}, 0.3)", "F.alpha_dropout({a}, 0.3, True)", "F.group_norm({a}[None], 1)", "F.rms_norm({a}, (4,))"),
    "F.batch_norm({a}, None, None, training=True)",
    # Keys and values are the same: where they are not equally many, torch 2.14.1 writes outside of them without a word.
    "F.scaled_dot_product_attention({a}[None], {b}[None], {b}[None])",
)
INTEGERS = (
    *("{a}.argmax({d})", "{k} + 1", "{k}.clamp(0, 2)", "{a} > {b}", "{a}.isnan()", "{k}.float()", "{a}[{k}]"),
    *("{a}.index_select(0, {k})", "{a}.gather(0, {k}[:, None])", "F.one_hot({k}, 6).float()", "{a}.sign().long()"),
)
CONSTANTS = (
    *("torch.arange(4.0)", "torch.arange(3)", "torch.zeros(3, 4)", "torch.ones_like({a})", "torch.zeros_like({a})"),
    *("torch.full((4,), 0.5)", "torch.eye(4)", "torch.tensor([0, 2, 1])", "torch.tensor(1.5)", "{a}.new_zeros(4)"),
)
RANDOM = (
    *("torch.rand_like({a})", "torch.randn(3, 4)", "torch.rand(4)", "torch.bernoulli({a}.sigmoid())"),
    "torch.randperm(3)",
)
IN_PLACE = (
    *("{a}.relu_()", "{a}.add_({b})", "{a}.mul_(0.5)", "{a}.mul_({b})", "{a}.sub_(1)", "{a}.clamp_(-1, 1)"),
    *("{a}.zero_()", "{a}[0] = {b}", "{a}[..., 0] = 0.5", "{a}[:, 1:] *= 2", "{a}[{k}] = {b}", "{a}.t().add_({b})"),
    *("{a}.copy_({b})", "{a}.view(-1)[1:].mul_(2)", "{a}.masked_fill_({m}, 0.25)", "{a}.index_add_(0, {k}, {b})"),
    *("{a}.fill_(0.75)", "F.dropout({a}, 0.3, inplace=True)", "{a}.bernoulli_(0.5)", "{a}.uniform_()"),
    *("self.average.mul_(0.9).add_({a}.detach().mean(), alpha=0.1)", "self.count.add_(1)"),
)
_LOSSES = ("sum()", "mean()", "square().mean()", "sin().sum()")
ALL = (
    *(ELEMENTWISE, ELEMENTWISE, PRODUCTS, VIEWS, VIEWS, SEVERAL, REDUCTIONS, MODULES, INTEGERS, CONSTANTS, RANDOM),
    *(IN_PLACE, IN_PLACE),
)


class Base(nn.Module):
    """The parameters and buffers that a program may use: one tied, one frozen, one never used."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.layer_norm = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.embedding, self.dropout = nn.Embedding(5, 4), nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4))
        self.tied, self.unused = self.weight, nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


@dataclasses.dataclass(frozen=True)
class Program:
    """A model's forward as text, and whether the input ``x`` requires grad."""

    source: str
    needs_grad: bool

    def __repr__(self):
        return f"Program with x.requires_grad={self.needs_grad}\n{self.source}"

    def model(self) -> nn.Module:
        names = {"torch": torch, "F": F}
        exec(self.source, names)
        torch.manual_seed(0)
        return type("Model", (Base,), {"forward": names["forward"]})()

    def arguments(self):
        """``x``, ``y`` (3, 4) and ``ids`` (3,) in [0, 3)."""
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2))
        return x.requires_grad_(self.needs_grad), y, torch.tensor([1, 0, 2])


def program(random, max_lines: int = 10, leave_out=()) -> Program:
    """What `random`, a ``random.Random``, draws; `leave_out`: texts that no line may contain."""
    needs_grad = random.random() < 0.5
    x, y, ids = Program("", needs_grad).arguments()
    scope = {"torch": torch, "F": F, "self": Base(), "x": x, "y": y, "ids": ids}
    values = ["y", "ids", "self.frozen", "self.scale", "self.tied", "self.bias", "self.weight", "x"]
    lines = []
    for _ in range(random.randint(1, max_lines)):
        line = random.choice(random.choice(ALL)).format_map(_Slots(random, scope, values))
        is_quiet = random.random() < 0.07
        names = None if any(text in line for text in leave_out) else _run(line, scope, is_quiet)
        if names is None:
            continue
        line = f"{', '.join(names)} = {line}" if names else line
        lines.append(f"with torch.no_grad(): {line}" if is_quiet else line)
        values += names
    values += [name] if (name := _product(scope, lines)) else []
    trained = _trained(scope)
    floats = [name for name in values if eval(name, scope).is_floating_point()]
    results = [random.choice(values) for _ in range(random.randint(0, 2))] + [random.choice(trained[-4:])]
    if random.random() < 0.5:
        terms = [random.choice(trained), *random.sample(floats, 2)]
        results.append(" + ".join(f"{name}.{random.choice(_LOSSES)}" for name in terms))
    lines.append(f"return {', '.join(results)}")
    return Program("def forward(self, x, y, ids):\n" + "".join(f"    {line}\n" for line in lines), needs_grad)


def _product(scope, lines) -> str | None:
    """One line that needs a gradient, if there is none yet."""
    if _trained(scope):
        return None
    (name,) = _run("y @ self.weight", scope, False) or []
    lines.append(f"{name} = y @ self.weight")
    return name


def _trained(scope) -> list[str]:
    """Values that need a gradient and are no views of inputs or parameters."""
    given = {
        tensor.untyped_storage()._cdata for tensor in (*scope["self"].state_dict().values(), scope["x"], scope["y"])
    }
    values = {name: value for name, value in scope.items() if name.startswith("v")}
    return [name for name, v in values.items() if v.requires_grad and v.untyped_storage()._cdata not in given]


class _Slots(dict):
    """What fills a template: values of a kind (a, b, c: float, k: integer, m: bool), new ones more often; d: a dim."""

    def __init__(self, random, scope, values):
        super().__init__()
        self.random, self.scope, self.values = random, scope, values

    def __missing__(self, slot):
        if slot == "d":
            return self.random.choice((-1, 0))
        kind = {"k": torch.int64, "m": torch.bool}.get(slot, torch.float32)
        fitting = [name for name in self.values if eval(name, self.scope).dtype == kind]
        newest = self.random.choice((1, 3, len(fitting)))
        self[slot] = self.random.choice(fitting[-newest:]) if fitting else f"({self['a']} > 0)"
        return self[slot]


def _run(line, scope, is_quiet) -> list[str] | None:
    """Run `line`: the names of what it yields, none for a statement; None if it cannot run or its values do not fit."""
    try:
        with torch.set_grad_enabled(not is_quiet):
            if "= " in line:
                exec(line, scope)
                return []
            results = eval(line, scope)
        several = not isinstance(results, torch.Tensor)
        results = tuple(results) if several else (results,)
        fits = all(value.numel() <= _LARGEST and value.float().isfinite().all() for value in results)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    if not fits or (several and not 1 < len(results) < 5):
        return None
    first = sum(name.startswith("v") for name in scope)
    names = [f"v{first + index}" for index in range(len(results))]
    scope.update(zip(names, results))
    return names
