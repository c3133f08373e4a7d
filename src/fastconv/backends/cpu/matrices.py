"""Passes of layers with many channels, by matrix products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastconv.backends.cpu.axes import Axis, axes, residues
from fastconv.backends.cpu.scratch import Scratch, staged
from fastconv.backends.cpu.tiling import (
    EFFICIENT_DEPTH,
    lowered_tiling,
    shares_rows,
    spread_tiling,
)
from fastconv.backends.cpu.views import by_group, by_position, matrices_of
from fastconv.backends.epilogue import applied_in_place
from fastconv.problem import Epilogue, Problem


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
    groups, (row_axis, column_axis) = problem.groups, axes(problem)
    source, target = by_position(input, groups), by_position(out, groups)
    added = None if residual is None else by_position(residual, groups)
    kernel, copies = scratch.packed(by_group(weight, 0, groups).permute(0, 3, 4, 2, 1), last=3)
    tiling = lowered_tiling(problem, scratch, copies)
    for g, o, n, r, c in tiling.spans("groups", "channels", "images", "rows", "columns"):
        piece = target[r, n, c, g, o]
        total = scratch.take("total", *piece.shape)
        if bias is None:
            total.zero_()
        else:
            total.copy_(by_group(bias, 0, groups)[g, o])
        for i, p, q in tiling.spans("depth", "tap_rows", "tap_columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = staged(source[:, n, :, g, i], rows, columns, scratch)
            taps = scratch.plain(kernel[g, p, q, i, o])
            _add_outputs(total, stage, taps, rows, columns, scratch)
        piece.copy_(
            applied_in_place(total, None if added is None else added[r, n, c, g, o], epilogue)
        )


def weight_grad(problem: Problem, grad_output: Tensor, input: Tensor, out: Tensor) -> None:
    """Fills ``out`` with the weight gradient."""
    groups, (row_axis, column_axis) = problem.groups, axes(problem)
    # With channels last, the right matrix is not transposed, which is fastest with BLAS.
    channels_last = problem.in_channels > groups or input.stride(1) == 1
    scratch = Scratch(out.dtype, channels_last)
    source, grad = by_position(input, groups), by_position(grad_output, groups)
    target = by_group(out, 0, groups).permute(0, 1, 3, 4, 2)
    tiling = lowered_tiling(problem, scratch, kernel_copies=1)
    for g, o, i, p, q in tiling.spans("groups", "channels", "depth", "tap_rows", "tap_columns"):
        piece = target[g, o, p, q, i]
        total = torch.zeros(piece.shape, dtype=scratch.dtype)
        for n, r, c in tiling.spans("images", "rows", "columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = staged(source[:, n, :, g, i], rows, columns, scratch)
            held = scratch.held(grad[r, n, c, g, o])
            _add_weights(total, stage, held, rows, columns, scratch)
        piece.copy_(total)


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
    """Fills ``out`` with activation(input gradient + bias + residual)."""
    groups, (rows, columns) = problem.groups, axes(problem)
    grad = by_position(grad_output, groups)
    weights = by_group(weight, 0, groups).permute(0, 3, 1, 4, 2)
    for residue in residues(rows):
        target = by_position(out[:, :, residue.positions], groups)
        added = None
        if residual is not None:
            added = by_position(residual[:, :, residue.positions], groups)
        kernel, copies = scratch.packed(weights[:, residue.taps], last=4)
        tiling = spread_tiling(problem, residue.axis, scratch, copies)
        for g, i, n, r, c in tiling.spans("groups", "depth", "images", "rows", "columns"):
            piece = target[r, n, c, g, i]
            total = scratch.take("total", *piece.shape)
            if bias is None:
                total.zero_()
            else:
                total.copy_(by_group(bias, 0, groups)[g, i])
            for o, p, q in tiling.spans("channels", "tap_rows", "tap_columns"):
                readers = columns.readers(c, q)
                taps = scratch.plain(kernel[g, p, o, q, i])
                parts = residue.axis.part(r, p), columns.part(readers, q).window(c)
                _add_inputs(total, grad[:, n, readers, g, o], taps, *parts, scratch)
            piece.copy_(
                applied_in_place(total, None if added is None else added[r, n, c, g, i], epilogue)
            )


def _add_outputs(
    total: Tensor, stage: Tensor, taps: Tensor, rows: Axis, columns: Axis, scratch: Scratch
) -> None:
    """Adds a stage times ``taps``, which are ``(groups, tap rows, tap columns, i, o)``."""
    for some, lowered in _lowered(stage, rows, columns, scratch):
        matrices_of(total).baddbmm_(lowered, taps[:, some].flatten(1, 3))


def _add_weights(
    total: Tensor, stage: Tensor, grad: Tensor, rows: Axis, columns: Axis, scratch: Scratch
) -> None:
    """Adds a stage times ``grad`` to ``total``: ``(groups, o, tap rows, tap columns, i)``."""
    left = matrices_of(grad).transpose(1, 2)
    for some, lowered in _lowered(stage, rows, columns, scratch):
        total[:, :, some].flatten(2).baddbmm_(left, lowered)


def _add_inputs(
    total: Tensor, grad: Tensor, taps: Tensor, rows: Axis, columns: Axis, scratch: Scratch
) -> None:
    """Adds ``grad`` times ``taps``, which are ``(groups, tap rows, o, tap columns, i)``."""
    shape = (*total.shape[:2], *grad.shape[2:4], *taps.shape[3:])
    spread = scratch.take("spread", *shape).zero_()
    for some, read, gathered in _gathered(grad, rows, scratch):
        right = taps[:, some].flatten(3).flatten(1, 2)
        matrices_of(spread[read].flatten(4)).baddbmm_(matrices_of(gathered), right)
    for tap in range(columns.taps):
        readers = columns.readers(slice(0, columns.size), slice(tap, tap + 1))
        if readers.start < readers.stop:
            first = readers.start * columns.step + tap * columns.reach - columns.before
            brought = spread[:, :, readers, :, tap]
            total[:, :, first :: columns.step][:, :, : brought.shape[2]] += brought


def _lowered(
    stage: Tensor, rows: Axis, columns: Axis, scratch: Scratch
) -> Iterator[tuple[slice, Tensor]]:
    """Yields matrices ``(groups, positions, taps * i)``, each with the kernel rows it is for."""
    _, images, _, groups, depth = stage.shape
    row, image, column, group, channel = stage.stride()
    shape, stride = (images, columns.outputs, groups), (image, columns.step * column, group)
    tail_shape, tail_stride = (columns.taps, depth), (columns.reach * column, channel)
    if shares_rows(rows, columns, depth):
        lowered = stage.as_strided((rows.span, *shape, *tail_shape), (row, *stride, *tail_stride))
        if columns.span > columns.outputs:
            lowered = scratch.take("lowered", *lowered.shape).copy_(lowered)
        for tap in range(rows.taps):
            first = tap * rows.reach
            yield slice(tap, tap + 1), matrices_of(lowered[first : first + rows.outputs].flatten(4))
    else:
        lowered = stage.as_strided(
            (rows.outputs, *shape, rows.taps, *tail_shape),
            (rows.step * row, *stride, rows.reach * row, *tail_stride),
        )
        lowered = scratch.take("lowered", *lowered.shape).copy_(lowered)
        yield slice(None), matrices_of(lowered.flatten(4))


def _gathered(grad: Tensor, rows: Axis, scratch: Scratch) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields kernel rows, the rows that they read, and the gradient at these rows.

    The gradient is ``(rows, images, columns, groups, tap rows * o)``.
    """
    _, images, columns, groups, channels = grad.shape
    overlaps = [
        rows.part(slice(0, rows.outputs), slice(tap, tap + 1)).overlap() for tap in range(rows.taps)
    ]
    zeros = rows.outputs * rows.taps - sum(held.stop - held.start for _, held in overlaps)
    if rows.taps == 1 or channels >= EFFICIENT_DEPTH or 2 * zeros > rows.outputs * rows.taps:
        for tap, (read, held) in enumerate(overlaps):
            if held.start < held.stop:
                yield slice(tap, tap + 1), held, scratch.held(grad[read])
    else:
        gathered = scratch.take("held", rows.outputs, images, columns, groups, rows.taps, channels)
        for tap, (read, held) in enumerate(overlaps):
            gathered[: held.start, ..., tap, :].zero_()
            gathered[held, ..., tap, :].copy_(grad[read])
            gathered[held.stop :, ..., tap, :].zero_()
        yield slice(None), slice(None), gathered.flatten(4)
