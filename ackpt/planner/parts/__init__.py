"""Planned regions: a model that cannot become one graph trains within a budget, block by block.

Every block of the model is either saved (it runs as it is) or checkpointed (`ackpt.checkpoint`). `planned_regions` runs
and checks the steps; read it first. `module_blocks` chooses the blocks and replaces their forward, `live_bytes` counts
live bytes, and `regions_plan` has the plan that the user sees and the record of the first step, from which it follows.
"""
