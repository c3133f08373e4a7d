"""Depthwise forward convolution and input gradient with mma.sync, for kernels with long rows.

Each kernel row is multiplied as a banded Toeplitz matrix, by 16 rows of 8 neighbouring outputs at a
time. It takes layers without stride or dilation from sm_80 on (not float64), where it is estimated
to be faster than ``fma``.
"""
