"""The CPU backend: every pass is a series of matrix products on blocks of bounded size.

The native library has kernels of its own for many passes (``plans.py`` says for which), and serves
them without Python once it is built. This package computes the others, and all passes where there
is no library.

A block's positions are ordered by row, image and column, so that a shift by rows is a shift in
memory. A block has ``i`` input channels and ``o`` output channels of each group. The forward pass

1. *stages* a block of the input: ``(rows, images, columns, groups, i)``, with zeros for the
   padding;
2. *lowers* it, an im2col along columns: ``(rows, images, output columns, groups, tap columns, i)``
   holds for each output column all that the kernel's columns read. The result is the left matrix of
   every kernel row, which only begins at another row of it, so the input grows by the kernel's
   width and not by its area (Cho and Brand, "MEC", ICML 2017). Where sharing rows does not pay,
   kernel rows are lowered too, as in a full im2col;
3. *multiplies* it, ``(positions, taps * i) @ (taps * i, o)``, and sums over the kernel's rows.

The weight gradient multiplies the same lowered matrix, ``(o, positions) @ (positions, taps * i)``.
The input gradient *gathers* the part of the output's gradient that each kernel row brings to rows
of the input, multiplies it, ``(positions, tap rows * o) @ (tap rows * o, tap columns * i)``, and
adds each tap column to the input columns that it reads. ``matrices.py`` has these passes.

Depthwise layers, and others with one input channel and few output channels in a group, have
matrices too thin to be efficient. ``taps.py`` computes them tap by tap: it multiplies what a tap
reads of a staged block by the tap and adds it up or, for the weight gradient, multiplies it by the
output's gradient and sums the products. These are few, long operations for each tap. The input
gradient of a depthwise layer is computed like the forward pass, from the output's gradient, one
residue of the stride after the other: every stride-th row and column reads the same taps.

Sums are kept in a block, in a wider type where the tensors' own is narrow, and rounded once.
Channels may come first or last in memory; a block has the order of the tensor it is copied from.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from fastconv.backends.cpu import matrices, taps, tiling
from fastconv.backends.cpu.scratch import Scratch
from fastconv.backends.cpu.views import sum_positions
from fastconv.native import before_cpu_pass
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

# Layers with one input channel and at most this many output channels in a group are thin.
_THIN_CHANNELS = 4


def forward(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    precision: str | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fills ``out`` with activation(convolution of ``input`` + bias + residual).

    All passes are computed in full precision, whatever ``precision``.
    """
    before_cpu_pass()
    compute = taps.forward if _is_thin(problem) else matrices.forward
    scratch = Scratch(out.dtype, channels_last=input.stride(1) == 1)
    compute(problem, input, weight, bias, out, scratch, residual, epilogue)


def weight_grad(
    problem: Problem,
    grad_output: Tensor,
    input: Tensor,
    out: Tensor,
    bias_out: Tensor | None,
    precision: str | None = None,
) -> None:
    """Fills ``out`` with the weight gradient, and ``bias_out`` with the gradient of the bias."""
    before_cpu_pass()
    if bias_out is not None:
        sum_positions(grad_output, bias_out)
    compute = taps.weight_grad if _is_thin(problem) else matrices.weight_grad
    compute(problem, grad_output, input, out)


def input_grad(
    problem: Problem,
    grad_output: Tensor,
    weight: Tensor,
    out: Tensor,
    precision: str | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fills ``out`` with activation(input gradient + bias + residual).

    Only transposed convolutions, which are input gradients, have a bias and an epilogue.
    """
    before_cpu_pass()
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
