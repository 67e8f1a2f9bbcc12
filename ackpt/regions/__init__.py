"""Planned regions: a model that cannot become one graph trains within a budget, module by module.

A model that branches on values, or that contains a scripted module, runs in eager mode. Its modules run in one of three
ways: as they are, as a region (`ackpt.checkpoint`), or as a planned step of their own, if they can be captured alone.
`PlannedRegions` chooses among measured combinations; read it first. `step_profile` finds the modules, and the savings
and cost of each way, `ladder` orders the combinations, `measured_step` runs and undoes real steps, and `saved_bytes`
checks every training step against the bound that follows from the measurement.
"""
