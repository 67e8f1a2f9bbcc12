"""Inspect the values that a model's code reads apart from its arguments, and refuse models that cannot be captured.

A captured step is valid for one set of shapes, modes, attributes and plain values. The modules here describe that set,
compare it at every call, and refuse models that no graph can represent, naming the line or the module.
"""
