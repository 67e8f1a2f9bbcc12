"""Random models built of parts that are written as libraries write them, and their comparison with the package.

``norms``, ``state``, ``settings``, ``scripts``, ``draws``, ``layers``, ``lengths``, ``images`` and ``containers`` hold
the parts; ``part`` says what a part is. ``model`` draws a `Spec` from a seed and builds its model. ``training`` trains
it and records what every step leaves behind. ``variants`` are the ways of the package to run it, ``compare`` tells
their outcomes apart, and ``reduce`` removes parts from a model as long as a finding persists. Start
reading at ``model``.
"""

from .compare import Outcome, check
from .model import Spec, build, draw_spec
from .reduce import reduced

__all__ = ["Outcome", "Spec", "build", "check", "draw_spec", "reduced"]
