"""A graph as a chain of blocks: what the policies for chains share.

Read `blocks` first. `cut_points` finds where a graph can be cut, `block_options` what may be saved of a block,
`chain_table` the best way through the chain for every amount of memory, `chain_walk` the schedule that follows from it.
"""
