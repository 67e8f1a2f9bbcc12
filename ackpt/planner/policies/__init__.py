"""Policies: each turns a graph, its profile and a limit in bytes into one schedule.

``ackpt.plan`` runs a policy, simulates its schedule and refuses one that breaks the budget. This package has one file
per policy, and the algorithms on plain numbers that the book uses (`chen`, `revolve`, `rotor`, `ilp`). ``chains`` has
the code that policies for chains of blocks share; ``search`` has the Pareto frontier and the searches that extend it.
Read `full` first, then `auto`.
"""

#: Policy -> the module in `ackpt.planner.policies` whose `schedule(graph, profile, limit_bytes, **options)` decides
POLICIES = {
    "none": "none",
    "full": "full",
    "manual": "manual",
    "auto": "auto",
    "chen-sqrt": "chen",
    "chen-log": "chen_log",
    "revolve": "revolve",
    "rotor": "rotor",
    "min-cut": "min_cut",
    "ilp": "ilp",
    "mu-two": "mu_two",
    "selective": "selective",
}
