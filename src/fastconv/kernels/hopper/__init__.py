"""Kernels for Hopper's tensor cores (sm_90a, wgmma and TMA), each in a folder with its planner.

Forward passes and input gradients:

- ``halo``: from halo tiles, for all layers.
- ``few_outputs``: all taps in the N of one MMA, for few output channels.
- ``implicit_gemm_nhwc``: channels-last tensors in TF32 or 16 bits, loaded by TMA.
- ``implicit_gemm_nchw``: contiguous float32 tensors in TF32.
- ``patches``: patch embeddings of contiguous volumes, whose kernel is their stride.

Weight gradients:

- ``wgrad_halo``: from halo tiles, for all layers.
- ``wgrad_few_inputs``: the taps of a kernel row in the N of one MMA, for few input channels.
- ``wgrad_implicit_gemm``: a GEMM over the positions of all images.

``passes`` chooses the kernel of a pass. The other files of this folder are shared by several
kernels.
"""

from fastconv.kernels.hopper.passes import alternatives, forward, input_grad, weight_grad

__all__ = ["alternatives", "forward", "input_grad", "weight_grad"]
