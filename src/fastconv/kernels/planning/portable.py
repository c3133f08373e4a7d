"""What the portable kernels cost, estimated: tensor-core families decline what these do sooner.

Rates are those of one SM, in multiply-adds or bytes per cycle.
"""

from __future__ import annotations

from math import prod

from fastconv.kernels import gpus
from fastconv.kernels.family import Gpu, Operands
from fastconv.kernels.planning.layers import Layer
from fastconv.problem import Problem

HOPPER_RATE = 70.0  # multiply-adds that weight gradients reach on an H200
PEAK_SHARE = 0.5  # share of the CUDA cores' peak rate, on GPUs where nothing was measured

# Forward passes and input gradients with few output channels, on an H200.
FEW_OUTPUTS_RATE = 57.0
FEW_OUTPUTS_BYTES = 7.0
STRIDED_OUTPUTS_BYTES = 0.8  # elements that a stride keeps apart: 64x64 taps of stride 32

# Weight gradients of few channels take longer below the first of these limits, and far longer
# below both.
LEAST_CHANNELS = 8
LEAST_TAPS = 64
FEW_CHANNELS_LOSS = (1.6, 5.0)  # below the first limit, below both
ONE_TAP_LOSS = 4.0  # of kernels of one tap, which read a number for few products


def rate(gpu: Gpu) -> float:
    """The multiply-adds of an SM in a cycle."""
    if gpu.architecture == gpus.H200.architecture:
        return HOPPER_RATE
    return PEAK_SHARE * gpus.rates(gpu).float32


def wgrad_cycles(problem: Problem, gpu: Gpu) -> float:
    """The cycles of a weight gradient."""
    has_one_tap = prod(problem.weight_shape[2:]) == 1
    loss = max(_few_channels_loss(problem), ONE_TAP_LOSS if has_one_tap else 1.0)
    return loss * problem.flops / 2 / (rate(gpu) * gpu.sm_count)


def image_cycles(layer: Layer) -> float:
    """The cycles that one SM of an H200 takes for an image, with few output channels."""
    outputs = layer.groups * layer.group_out * layer.out_size[0] * layer.out_size[1]
    inputs = layer.groups * layer.group_in * layer.in_size[0] * layer.in_size[1]
    bytes_ = (inputs + outputs) * layer.operands.scalar_bytes
    apart = any(axis.step > 1 for axis in layer.placing)
    rate = STRIDED_OUTPUTS_BYTES if apart else FEW_OUTPUTS_BYTES
    return max(outputs * layer.terms / FEW_OUTPUTS_RATE, bytes_ / rate)


def volume_cycles(problem: Problem, operands: Operands, is_reversed: bool) -> float:
    """The cycles that one SM of an H200 takes for a volume in a forward pass or input gradient."""
    elements = prod(problem.input_shape) + prod(problem.output_shape)
    strided = is_reversed and any(axis.stride > 1 for axis in problem.axes)
    rate = STRIDED_OUTPUTS_BYTES if strided else FEW_OUTPUTS_BYTES
    computed = problem.flops / 2 / FEW_OUTPUTS_RATE
    return max(computed, elements * operands.scalar_bytes / rate) / problem.batch


def _few_channels_loss(problem: Problem) -> float:
    """How many times longer a weight gradient of so few channels takes."""
    if problem.in_channels // problem.groups >= LEAST_CHANNELS:
        return 1.0
    return FEW_CHANNELS_LOSS[prod(problem.weight_shape[2:]) < LEAST_TAPS]
