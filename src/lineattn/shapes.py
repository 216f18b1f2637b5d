"""The axis letters of the project, as docstrings and comments use them.

======  ==========================================
letter  axis
======  ==========================================
``B``   batch
``C``   channels
``H W`` space (rows, columns)
``N``   positions
``T``   tokens of a sequence
``L``   layers
``M``   memory slots
``h``   heads
``D``   width of a head, ``C = h * D``
======  ==========================================
"""
