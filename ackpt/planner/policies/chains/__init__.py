"""A graph as a chain of blocks: the code that the policies for chains share.

Read `blocks` first. `cut_points` finds the tensors at which a graph can be cut. `block_options` lists the sets of
activations that may be saved in a block. `chain_table` computes the cheapest options for every amount of memory, and
`chain_walk` turns them into a schedule.
`substitutes` saves smaller activations in place of larger ones.
"""
