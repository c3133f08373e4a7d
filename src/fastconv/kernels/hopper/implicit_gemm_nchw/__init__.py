"""Implicit GEMM of contiguous (NCHW) float32 tensors in TF32: forward passes and input gradients.

TMA copies planes to shared memory as they are; consumers read A fragments from there, so that a tap
is an offset, and round them to TF32. It takes layers with at least 8 input channels, or groups of
a multiple of 8, few taps and aligned tensors, where it is estimated to be faster than the halo
kernel.
``layer`` describes the pass as a GEMM, ``tiles`` has the tiles and their costs, ``plan`` the
launches.
"""
