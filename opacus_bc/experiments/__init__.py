"""Experiments: the paper's models, the data sets and everything that is run on them.

Nothing in here is needed to train privately. The submodules import torchvision, scikit-learn and the like
only when they are used; ``pip install "opacus-bc[experiments]"`` brings them.
"""
