"""Search: the Pareto frontier of schedules, the costs that policies compare, and the lower bound.

Read `frontier` first. `refinement` extends a frontier. `schedule_cache` stores the schedules of a search in a folder.
"""
