"""Layers of planes as products of matrices, in TF32: pixels through registers, taps as offsets.

``layer`` is what is multiplied, ``tiles`` how much of it at once and what that takes.
"""
