"""The published experiments: one module each, with a function from a configuration to records.

``steps`` holds the training steps that the experiments compare, ``reports`` turns records into tables and figures,
``suite`` runs all experiments on a GPU, ``widgets`` writes the data of the book's interactive figures. Only the command
line and the notebooks import this package.
"""
