"""Capture: from a model and example inputs to a `JointGraph`, forward and backward as one list of operations.

Read `joint_graph` first: it is the main type. `aot` runs AOTAutograd, `tracing` turns torch's graph into ours, and
`analysis` derives the properties of a graph that all later stages use (readers, aliases, operations that may be
recomputed). ``inspection`` checks the values that the model's code reads besides its arguments; ``patches`` makes
captured operations bit-equal to eager ones.
"""
