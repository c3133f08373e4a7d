"""The passes of images, by matrix products or tap by tap, whichever suits a layer."""

from __future__ import annotations

from math import prod

from torch import Tensor

from fastconv.backends.cpu import matrices, taps, tiling
from fastconv.backends.cpu.scratch import Scratch
from fastconv.backends.cpu.views import sum_positions
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

# Layers with one input channel and at most this many output channels in a group are thin.
_THIN_CHANNELS = 4


def forward(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fills ``out`` with activation(convolution of ``input`` + bias + residual)."""
    compute = taps.forward if _is_thin(problem) else matrices.forward
    scratch = Scratch(out.dtype, channels_last=input.stride(1) == 1)
    compute(problem, input, weight, bias, out, scratch, residual, epilogue)


def weight_grad(
    problem: Problem,
    grad_output: Tensor,
    input: Tensor,
    out: Tensor,
    bias_out: Tensor | None,
) -> None:
    """Fills ``out`` with the weight gradient, and ``bias_out`` with the gradient of the bias."""
    if bias_out is not None:
        sum_positions(grad_output, bias_out)
    compute = taps.weight_grad if _is_thin(problem) else matrices.weight_grad
    compute(problem, grad_output, input, out)


def input_grad(
    problem: Problem,
    grad_output: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fills ``out`` with activation(input gradient + bias + residual).

    Only transposed convolutions, which are input gradients, have a bias and an epilogue.
    """
    scratch = Scratch(out.dtype, channels_last=grad_output.stride(1) == 1)
    # With several output channels, tap by tap would be too many operations on too few elements.
    # An infinite weight excludes it too: taps multiply zeros beyond the gradient's borders, which
    # would give NaN.
    depthwise = problem.out_channels == problem.groups
    by_tap = depthwise and _is_thin(problem) and taps.has_finite_sum(weight, scratch.dtype)
    compute = taps.input_grad if by_tap else matrices.input_grad
    compute(problem, grad_output, weight, bias, out, scratch, residual, epilogue)


def _is_thin(problem: Problem) -> bool:
    """Whether matrices would be so thin, and outputs so many, that tap by tap is faster."""
    thin = problem.in_channels == problem.groups
    thin = thin and problem.out_channels <= _THIN_CHANNELS * problem.groups
    return thin and prod(problem.output_shape) >= tiling.EFFICIENT_POSITIONS
