"""The memory calculator of the book: peaks of training steps as exact formulas, from plans of a few sizes.

`presets` are its models. `windows` cuts the plan of a step with a few blocks into what root and blocks allocate;
`polynomials` turns the plans of several sizes into formulas in batch size and length, and refuses what is not exact.
`grid` puts both together for all presets and is what ``nox -s calculator`` runs. `settings` evaluates the formulas, as
the page does, and asks `ackpt.plan` for the same setting. Read `settings` first.
"""
