"""Weight gradients of layers with few input channels, such as a network's first.

One wgmma has all input channels and the taps of a kernel row as its N, and a block accumulates all
kernel rows at once, so each element of grad_output is loaded once. It takes layers without groups
whose taps and input channels fit a warpgroup's registers, where its estimated time is the least of
the three weight-gradient kernels'.
"""
