"""Comparison of a method's gradients with those of the baseline."""

from __future__ import annotations

import torch

TOLERANCE = 1e-2  # of a parameter's largest gradient; a GPU's kernels may add in any order
NEGLIGIBLE = 1e-2  # of the largest gradient of all


class GradientsDiffer(RuntimeError):
    """A method's gradients are not those of the baseline."""


def require_equal(
    name: str,
    gradients: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    exact: bool,
    negligible: float = NEGLIGIBLE,
    tolerance: float | None = TOLERANCE,
) -> float:
    """The largest difference of a gradient, relative to its parameter's largest; 0.0 if all are bit-equal.

    Args:
        name: of the method, for the message.
        gradients, wanted: by the names of the parameters, on the CPU.
        exact: whether they must be bit-equal.
        negligible: unless `exact`, gradients below this fraction of the largest of all are compared with that fraction:
            some are zero except for rounding, such as those of a bias before a softmax.
        tolerance: of gradients that need not be bit-equal; None compares without requiring anything.

    Raises:
        GradientsDiffer: if a gradient differs by more, or is missing.
    """
    if gradients.keys() != wanted.keys():
        raise GradientsDiffer(f"{name}: other parameters have gradients than in the baseline")
    worst = 0.0
    least = 0.0 if exact or not negligible else negligible * max(float(each.abs().max()) for each in wanted.values())
    for parameter, mine in gradients.items():
        other = wanted[parameter]
        if torch.equal(mine, other):
            continue
        scale = max(float(other.abs().max()), least, torch.finfo(other.dtype).tiny)
        difference = float((mine - other).abs().max()) / scale
        if exact or (tolerance is not None and not difference <= tolerance):
            how = "must be equal to the last bit" if exact else f"may differ by {tolerance:g}"
            raise GradientsDiffer(
                f"{name}: the gradient of {parameter} differs from the baseline's by {difference:.3g} of its "
                f"largest entry; it {how}"
            )
        worst = max(worst, difference)
    return worst
