"""Explaining: what a step saves, where its peak occurs, and what would reduce it.

Read `explanation` first: `explain` captures and plans a step, and makes an `Explanation` of the plan. `saved` finds the
saved activations and the cost of recomputing them, and writes the result as text, `page` as an HTML page; `suggestions`
simulates the changes that would reduce the peak. `print_saved` needs no capture. `audit` runs a step, and
checks the checkpointing that it has.
"""
