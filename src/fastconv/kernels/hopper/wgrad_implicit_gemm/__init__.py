"""Weight gradients as an implicit GEMM over pixels.

M is output channels, N is input channels at taps, and K is the output pixels of all images, which
stream-K or clusters divide among the blocks. TMA copies the operands, or warps gather them. The
kernel takes contiguous tensors and channels-last 16-bit ones, where its estimated time is the least
of the three weight-gradient kernels'. ``layer`` is the GEMM of a problem, ``tiles`` the candidates
with their estimates, ``plan`` the launches.
"""
