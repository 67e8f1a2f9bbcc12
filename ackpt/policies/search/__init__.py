"""Search: the Pareto frontier of schedules, the costs that are compared, and the lower bound.

Read `frontier` first. `refinement` and `offload_variants` extend a frontier, and `decisions` explains a plan.
`ilp_program` and `intermediates` belong to the policies `ilp` and `mu_two`.
"""
