"""Capture: from a model and example inputs to a `JointGraph`, forward and backward as one list of operations.

Read `joint_graph` first: it is the main type. `aot` runs AOTAutograd, `tracing` turns torch's graph into ours, and
`analysis` derives once what every later stage asks (readers, aliases, what may run again). ``inspection`` checks what
the model's code reads besides its arguments; ``patches`` makes captured operations equal to eager ones to the bit.
"""
