"""Search: the Pareto frontier of schedules, the cost they are compared by, its lower bound, and solvers.

Read `frontier` first. `refinement` and `offload_variants` improve a frontier; `ilp_program`, `rotor_table` and
`intermediates` belong to the solvers `ilp`, `rotor` and `mu_two`.
"""
