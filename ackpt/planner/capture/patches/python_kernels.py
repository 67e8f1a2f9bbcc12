"""Replace the Python implementation that torch uses for an operation during capture.

Torch: ``OpOverload.py_kernels`` in ``torch/_ops.py``, which ``py_impl`` fills. `casts`, `composite_operations` and
`random_draws` use this; it can go with them.
"""

from __future__ import annotations

import contextlib


@contextlib.contextmanager
def put(kernels):
    """Inside, capturing computes operations by other functions: ``{(operation, dispatch key): function}``.

    None means torch's C++, as in eager.
    """
    were = {(operation, key): operation.py_kernels.get(key) for operation, key in kernels}
    _put(kernels)
    try:
        yield
    finally:
        _put(were)


def _put(kernels) -> None:
    for (operation, key), kernel in kernels.items():
        operation.py_kernels.pop(key, None)
        if kernel is not None:
            operation.py_kernels[key] = kernel
        operation._dispatch_cache.clear()
