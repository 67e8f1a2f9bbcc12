"""The head's share of the peak, and the added time, with Qwen2-7B's shapes: from shapes alone, for an H200.

    python benchmarks/chunked_head.py --layers 28 --tokens 4096 --budgets 70% 50%

Prints what the chunks of TRL and Liger hold by their documented rules, and the chunks that each budget chooses. The
head's share counts the tensors with an element for each word. Times are modeled ones, as `plan.cost` is.
"""

from __future__ import annotations

import argparse

from experiments.head_chunks import plans, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budgets", nargs="+", default=["70%", "50%"])
    options = parser.parse_args()
    print(table(plans(options.budgets, layers=options.layers, tokens=options.tokens), options.tokens))


if __name__ == "__main__":
    main()
