"""Policies: each turns a graph, its profile and a limit in bytes into one schedule.

``ackpt.plan`` runs a policy, simulates its schedule and refuses what breaks the budget. One file per policy lies here,
beside the algorithms on plain numbers that the book uses (`chen`, `revolve`, `rotor`, `ilp`). ``chains`` holds what
policies for chains of blocks share, ``search`` the Pareto frontier. Read `full` first, then `auto`.
"""

#: Policy -> the module in `ackpt.policies` whose `schedule(graph, profile, limit_bytes, **options)` decides
POLICIES = {
    "none": "none",
    "full": "full",
    "manual": "manual",
    "auto": "auto",
    "chen-sqrt": "chen_sqrt",
    "chen-log": "chen_log",
    "revolve": "revolve_chain",
    "rotor": "rotor_chain",
    "min-cut": "min_cut",
    "ilp": "ilp_graph",
    "mu-two": "mu_two",
}
