"""Contiguous layers by channels-last kernels, in TF32 and 16 bits: copies of the other format.

Implicit GEMMs load channels-last tensors with TMA, and contiguous ones with threads that transpose
what they load, once for each block of output channels. For layers of many channels it takes less
time to transpose the tensors once. ``plan`` makes such plans, of a channels-last plan and launches
of ``kernel.cuh`` before and after it.
"""
