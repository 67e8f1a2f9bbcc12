"""Search: the Pareto frontier of schedules, the costs that policies compare, and the lower bound.

Read `frontier` first. `refinement` and `offload_variants` extend a frontier, and `decisions` explains a plan.
The policies `ilp` and `mu_two` use `ilp_program` and `intermediates`.
"""
