"""`opacus-bc reproduce`: every figure and table of the paper, ours next to theirs.

``specs`` says what a figure is, ``registry`` and ``sheets`` hold them all, ``runs`` trains what is missing,
``results`` puts kept numbers next to the paper's, ``drawings``, ``page`` and ``command`` show them.
"""
