"""Depthwise layers whose images are one row, as 1-D layers are, at memory's rate: all passes.

The tiles of these kernels are those of causal convolutions (``causal/tile.cuh``).
"""
