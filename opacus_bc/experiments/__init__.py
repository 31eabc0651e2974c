"""Experiments: the paper's models, the data sets and everything that is run on them.

``training`` trains one cell; ``compare`` and ``reproduce`` are the two commands that use it. Nothing in here
is needed to train privately. The modules import torchvision, scikit-learn and the like only when they are
used; ``pip install "opacus-bc[experiments]"`` brings them.
"""
