"""Forward convolution and input gradient of narrow groups with multiply-adds on plain CUDA cores.

A thread computes a rectangle of outputs and walks down the rows of its window in shared memory.
``planes.cuh`` is for contiguous tensors, ``pixels.cuh`` for channels-last ones. It is taken unless
``toeplitz`` is estimated to be faster.
"""
