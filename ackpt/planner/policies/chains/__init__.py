"""A graph as a chain of blocks: the code that the policies for chains share.

Read `blocks` first: it cuts a graph into blocks and makes schedules block by block. `block_options` lists the sets of
activations that may be saved in a block. `chain_table` computes the cheapest options for every amount of memory.
`substitutes` saves smaller activations in place of larger ones.
"""
