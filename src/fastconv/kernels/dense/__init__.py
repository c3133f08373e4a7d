"""Layers with one output position, as matrix products on plain CUDA cores, on every GPU."""

from fastconv.kernels.dense.plan import SHAPES, forward, input_grad, weight_grad

__all__ = ["SHAPES", "forward", "input_grad", "weight_grad"]
