"""A graph as a chain of blocks: the code that the policies for chains share.

Read `blocks` first. `cut_points` finds where a graph can be cut, `block_options` what may be saved of a block,
`chain_table` the cheapest way through the chain for every amount of memory, and `chain_walk` its schedule.
`substitutes` saves smaller activations in place of larger ones.
"""
