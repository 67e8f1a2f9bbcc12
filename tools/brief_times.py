"""Startup file of the kernels of `nox -s notebooks`, which compares every output but measured times.

- `compare_seconds` runs each function once: more rounds would only make times steadier.
- `gc.collect` looks only at objects made since its last call, and by itself the collector runs rarely. Every
  measurement collects garbage, and a kernel that has imported torch has millions of objects.

`nox -s reproduce`, which writes the committed notebooks, does not use this file.
"""


def _one_round() -> None:
    import functools

    import ackpt
    from ackpt.metering import meter

    whole = meter.compare_seconds

    @functools.wraps(whole)
    def compare_seconds(functions, repeats=5, *arguments, **options):
        return whole({name: second_call(function) for name, function in functions.items()}, 1, *arguments, **options)

    def second_call(function):
        """`function`, whose first call, which is not timed, does nothing."""
        first = iter([lambda: None])
        return lambda: next(first, function)()

    meter.compare_seconds = ackpt.compare_seconds = compare_seconds


def _collect_new_objects() -> None:
    import functools
    import gc

    whole = gc.collect

    @functools.wraps(whole)
    def collect(*arguments, **options):
        freed = whole(*arguments, **options)
        gc.freeze()
        return freed

    gc.collect = collect
    gc.collect()
    gc.set_threshold(50_000, 20, 100)


_one_round()
_collect_new_objects()
