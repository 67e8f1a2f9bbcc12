"""Activation checkpointing: regions that save their inputs and recompute the rest in backward.

Read `reentrant` first: it has the call and its autograd node. `region` runs a region's function in the forward and
again in backward. `reachable` and `guards` find the tensors that a region reads and check that they have not changed,
`recorder` compares the two runs, `rng` replays random numbers. `wrapping` applies checkpointing to the modules of a
model.
"""
