"""Inspect the values that a model's code reads apart from its arguments, and refuse models that cannot be captured.

A captured step is valid for one set of shapes, modes, attributes and plain values. `attributes` compares those of
modules, `outside_values` (read it first) those that code finds elsewhere by the names of `value_walk`, `branches` what
follows from integer arguments; `kept_tensors` are tensors that code refers to or stores. `model_checks` refuses models
and tensors, `source_lines` words the errors of captures that fail, `calls` describes calls in words.
"""
