"""Implicit GEMM of channels-last (NHWC) tensors, in TF32 or 16 bits: forward and input gradient.

TMA loads both operands, the input in im2col mode, so the producer is a single thread. It takes
layers without groups whose channels are whole 16 bytes, with aligned tensors, where it is estimated
to be faster than the halo kernel. ``fastconv.kernels.hopper.im2col`` describes the layer as a GEMM,
``tiles`` has the tiles and their costs, ``plan`` the launches.
"""
