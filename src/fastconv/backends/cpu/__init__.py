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

Volumes are computed plane by plane (``volumes.py``): the planes that an output plane reads are
further channels of an image.

Sums are kept in a block, in a wider type where the tensors' own is narrow, and rounded once.
Channels may come first or last in memory; a block has the order of the tensor it is copied from.
"""

from __future__ import annotations

from torch import Tensor

from fastconv.backends.cpu import images, volumes
from fastconv.native import before_cpu_pass
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem


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
    of = images if problem.depth is None else volumes
    of.forward(problem, input, weight, bias, out, residual, epilogue)


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
    of = images if problem.depth is None else volumes
    of.weight_grad(problem, grad_output, input, out, bias_out)


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
    of = images if problem.depth is None else volumes
    of.input_grad(problem, grad_output, weight, out, bias, residual, epilogue)
