"""Search: the Pareto frontier of schedules, the costs that policies compare, and the lower bound.

Read `frontier` first. `refinement`, `evictions` and `variants` extend a frontier. `schedule_cache` stores the schedules
of a search in a folder.
"""
