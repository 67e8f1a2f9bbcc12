"""The published experiments: one module each, with a function from a configuration to records.

``models`` holds ResNet, BERT and a U-Net, ``steps`` the training steps that the experiments compare, ``reports`` turns
records into tables and figures, ``suite`` runs all experiments on a GPU, ``widgets`` writes the data of the book's
interactive figures, ``cli`` is ``python -m experiments``. `results` holds records, `data` the texts. The notebooks,
tools and tests import this package from a checkout; `ackpt`, which is what is installed, never does.
"""

from . import models as models  # adds its models to those that the planner knows by name
from . import torchtitan_llama as torchtitan_llama  # as well
