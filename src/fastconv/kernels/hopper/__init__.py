"""Kernels for Hopper's tensor cores (sm_90a), a folder each, with what plans them.

- ``correlate``: forward passes and input gradients; ``spread``: those of few output channels.
- ``weight_grad``: weight gradients; ``collect``: those of few input channels.

Which of them computes a pass is decided in ``passes``. Files beside it are what they share.
"""

from fastconv.kernels.hopper.passes import alternatives, forward, input_grad, weight_grad

__all__ = ["alternatives", "forward", "input_grad", "weight_grad"]
