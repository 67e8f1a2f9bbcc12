"""The published experiments: configuration in, records out. One module per experiment.

``steps`` holds the training steps that they compare, ``reports`` turns records into tables and figures, ``suite`` runs
all of them on a GPU, ``widgets`` writes the data of the book's interactive figures. Only the command line and the
notebooks import this package.
"""
