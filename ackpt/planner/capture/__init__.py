"""Capture: from a model and example inputs to a `JointGraph`, forward and backward as one list of operations.

Read `joint_graph` first: a `JointGraph` of `Node` and `Storage` (`operations`) is what all later stages receive. `aot`
runs AOTAutograd, which gives a `Capture`, and `tracing` turns its graph into a `JointGraph`. `call_facts` describes a
call by all that a capture depends on. A capture whose sizes are symbols needs `dynamic_sizes`; `outputs` and
`optimizer_state` describe what surrounds the step. ``inspection`` checks what the model's code reads besides its
arguments; ``patches`` makes captured operations bit-equal to eager ones.
"""
