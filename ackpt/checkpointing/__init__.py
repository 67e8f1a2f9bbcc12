"""Activation checkpointing: regions that save their inputs and recompute the rest in backward.

Read `reentrant` first: it is the whole method in one file. `region` holds the two runs of a region's function,
`reachable` and `guards` what a region reads and must not change, `recorder` the comparison of the two runs, `rng` and
`autocast` the state that the recomputation restores. `wrapping` switches checkpointing on for modules of a model.
"""
