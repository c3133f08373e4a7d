"""Passes of layers with few channels in a group, tap by tap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from fastconv.backends.cpu.axes import Axis, axes, residues
from fastconv.backends.cpu.scratch import Scratch, staged
from fastconv.backends.cpu.tiling import tap_tiling
from fastconv.backends.cpu.views import add_positions, by_channel, by_group, by_tap
from fastconv.backends.epilogue import applied_in_place, applied_to_bias
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem


def forward(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scratch: Scratch,
    residual: Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Fills ``out`` with activation(convolution of ``input`` + bias + residual)."""
    groups = problem.groups
    (source,), target = by_channel(input, groups), by_channel(out, groups)
    first = None if bias is None else by_group(bias, 0, groups).t()
    added = None if residual is None else by_channel(residual, groups)
    rows, columns = axes(problem)
    kernel = by_tap(weight, groups)
    _convolve(target, source, kernel, first, rows, columns, scratch, added, epilogue)


def input_grad(
    problem: Problem,
    grad_output: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scratch: Scratch,
    residual: Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Fills ``out`` with activation(input gradient of a depthwise layer + bias + residual).

    Each residue of the strides is computed like a forward pass of stride 1.
    """
    (grad,), weights = by_channel(grad_output, problem.groups), by_tap(weight, problem.groups)
    found = [list(residues(axis)) for axis in axes(problem)]
    read = [[residue for residue in along if residue.axis.taps] for along in found]
    if read != found:
        # In one operation, as there may be very many residues that no tap reads.
        applied_to_bias(out, bias, residual, epilogue)
    first = None if bias is None else by_group(bias, 0, problem.groups).t()
    for rows, columns in product(*read):
        place = (slice(None), slice(None), rows.positions, columns.positions)
        target = by_channel(out[place], problem.groups)
        added = None if residual is None else by_channel(residual[place], problem.groups)
        taps = weights[:, rows.taps, columns.taps]
        _convolve(target, grad, taps, first, rows.axis, columns.axis, scratch, added, epilogue)


def weight_grad(problem: Problem, grad_output: Tensor, input: Tensor, out: Tensor) -> None:
    """Fills ``out`` with the weight gradient, a sum of products for each tap."""
    scratch = Scratch(out.dtype, channels_last=input.stride(1) == 1)
    (source,) = by_channel(input, problem.groups)
    grad, target = by_channel(grad_output, problem.groups), by_tap(out, problem.groups)
    row_axis, column_axis = axes(problem)
    tiling = tap_tiling(grad.shape, row_axis, column_axis, scratch)
    for g, p, q in tiling.spans("groups", "tap_rows", "tap_columns"):
        piece = target[:, p, q, g].permute(2, 1, 0, 3)
        total = torch.zeros(piece.shape, dtype=scratch.dtype)
        for n, r, c in tiling.spans("images", "rows", "columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = staged(source[:, n, :, g], rows, columns, scratch)
            part = grad[:, r, n, c, g]
            held = scratch.take_channels("held", part.shape).copy_(part)
            total += _tap_sums(stage, held, rows, columns, scratch)
        piece.copy_(total)


def has_finite_sum(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the sum of the elements is finite: then all of them are."""
    total = torch.zeros(weight.shape[1], dtype=dtype)
    add_positions(weight, total)
    return bool(total.isfinite().all())


def _tap_sums(stage: Tensor, grad: Tensor, rows: Axis, columns: Axis, scratch: Scratch) -> Tensor:
    """Sums the products of what each tap reads and ``grad``.

    The sums are ``(tap columns, tap rows, channels, groups)``.
    """
    products = scratch.take_channels("products", grad.shape)
    sums = torch.empty(columns.taps, rows.taps, grad.shape[0], grad.shape[-1], dtype=scratch.dtype)
    reads = _tap_reads(stage, rows, columns, scratch)
    for read, tap_sum in zip(reads, sums.flatten(0, 1).unbind(), strict=True):
        torch.mul(read, grad, out=products)
        torch.sum(products, (1, 2, 3), dtype=scratch.dtype, out=tap_sum)
    return sums


def _convolve(
    target: Tensor,
    source: Tensor,
    weights: Tensor,
    first: Tensor | None,
    row_axis: Axis,
    column_axis: Axis,
    scratch: Scratch,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fills ``target``'s channels with what taps read of ``source``, times ``weights``.

    Weights are ``(channels, tap rows, tap columns, groups)``. ``first``, ``(channels, groups)``, is
    added to the sums. ``residual`` has the order of ``target``.
    """
    tiling = tap_tiling(target.shape, row_axis, column_axis, scratch)
    for g, n, r, c in tiling.spans("groups", "images", "rows", "columns"):
        piece = target[:, r, n, c, g]
        total = piece if scratch.can_sum_in(piece) else scratch.take_channels("total", piece.shape)
        if first is None:
            total.zero_()
        else:
            total.copy_(first[:, None, None, None, g])
        for p, q in tiling.spans("tap_rows", "tap_columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = staged(source[:, n, :, g], rows, columns, scratch)
            _add_taps(total, stage, scratch.plain(weights[:, p, q, g]), rows, columns, scratch)
        added = None if residual is None else residual[:, r, n, c, g]
        finished = applied_in_place(total, added, epilogue)
        if finished is not piece:
            piece.copy_(finished)


def _add_taps(
    total: Tensor, stage: Tensor, taps: Tensor, rows: Axis, columns: Axis, scratch: Scratch
) -> None:
    """Adds what taps read, times ``taps``: ``(channels, tap rows, tap columns, groups)``."""
    # Groups are made neighbours in memory, as they are in a block with channels last.
    factors = taps.permute(2, 1, 0, 3).contiguous().flatten(0, 1)[:, :, None, None, None]
    reads = _tap_reads(stage, rows, columns, scratch)
    for read, factor in zip(reads, factors.unbind(), strict=True):
        total.addcmul_(read, factor)


def _tap_reads(stage: Tensor, rows: Axis, columns: Axis, scratch: Scratch) -> Iterator[Tensor]:
    """Yields what each tap reads of a stage, ``(rows, images, columns, groups)``.

    Taps come column after column. If channels come first in memory, all that a column of taps
    reads is copied to a contiguous buffer, which its taps read from different rows on: reading the
    stage itself would be in short runs.
    """
    for column in _axis_reads(stage, 2, columns):
        if columns.span > columns.outputs and not scratch.channels_last:
            column = scratch.take("column", *column.shape).copy_(column)
        yield from _axis_reads(column, 0, rows)


def _axis_reads(block: Tensor, dim: int, axis: Axis) -> Sequence[Tensor]:
    """Returns views of what each tap of an axis reads along ``dim``."""
    shape, stride = list(block.shape), list(block.stride())
    between_taps = abs(axis.reach) * stride[dim]
    shape[dim] = axis.outputs
    stride[dim] *= axis.step
    reads = block.as_strided((axis.taps, *shape), (between_taps, *stride)).unbind()
    return reads if axis.reach > 0 else reads[::-1]
