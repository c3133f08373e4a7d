"""The CPU backend: every pass is a series of matrix products on blocks of bounded size.

A block's positions are ordered by row, image and column, so that a shift by rows is a shift in
memory; of each group it has ``i`` input channels and ``o`` output channels. The forward pass

1. *stages* a block of the input: ``(rows, images, columns, groups, i)``, zeros for the padding;
2. *lowers* it: ``(rows, images, output columns, groups, tap columns, i)``, where each output
   column has all that the kernel's columns read. That is the left matrix of every kernel row,
   which only begins at another row of it, so the input grows by the kernel's width and not by its
   area (Cho and Brand, "MEC", ICML 2017). Where sharing rows does not pay, they are lowered too;
3. *multiplies* it, ``(positions, taps * i) @ (taps * i, o)``, and sums over the kernel's rows.

The weight gradient multiplies the same lowered matrix, ``(o, positions) @ (positions, taps * i)``.
The input gradient *gathers* the output's gradient that each kernel row brings to rows of the
input, multiplies it, ``(positions, tap rows * o) @ (tap rows * o, tap columns * i)``, and adds
each tap column to the input columns that it reads.

Depthwise kernels, and others of one input channel and few output channels in a group, have no
matrices worth the name. There, what a tap reads of a staged block is multiplied by it and added or,
for the weight gradient, multiplied by the output's gradient and summed: long operations on tensors,
few for each tap. A depthwise input gradient is computed like the forward pass, from the output's
gradient, in phases: every stride-th row and column of it sees the same taps.

Sums are kept in a block, in a wider type where the tensors' own is narrow, and rounded once.
Channels may come first or last in memory; a block follows the tensor it is copied from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv.backends.epilogue import applied
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

SCRATCH_BYTES = 48 << 20
"""Bound on the extra memory of a pass: one half for a block, one half for a rearranged weight."""

# The type sums are kept in, where it is not the tensors' own.
_SUM_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}

# A product at least this deep is efficient; shallower ones take all kernel rows at once.
_EFFICIENT_DEPTH = 128

# Smaller images share a block; larger ones are read in place, one by one.
_EFFICIENT_POSITIONS = 2048

# The matrices of one input channel and at most so many output channels are thin.
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
    """Fill ``out`` with activation(convolution of ``input`` + bias + residual).

    It is computed in full precision, whatever ``precision``.
    """
    scratch = _Scratch(out.dtype, channels_last=input.stride(1) == 1)
    if _is_thin(problem):
        _forward_by_tap(problem, input, weight, bias, out, scratch, residual, epilogue)
        return
    groups, (row_axis, column_axis) = problem.groups, _axes(problem)
    source, target = _by_position(input, groups), _by_position(out, groups)
    added = None if residual is None else _by_position(residual, groups)
    kernel, copies = scratch.packed(_by_group(weight, 0, groups).permute(0, 3, 4, 2, 1), last=3)
    tiling = _lowered_tiling(problem, scratch, copies)
    for g, o, n, r, c in tiling.spans("groups", "channels", "images", "rows", "columns"):
        piece = target[r, n, c, g, o]
        total = scratch.take("total", *piece.shape)
        if bias is None:
            total.zero_()
        else:
            total.copy_(_by_group(bias, 0, groups)[g, o])
        for i, p, q in tiling.spans("depth", "tap_rows", "tap_columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = _staged(source[:, n, :, g, i], rows, columns, scratch)
            taps = scratch.plain(kernel[g, p, q, i, o])
            _add_outputs(total, stage, taps, rows, columns, scratch)
        piece.copy_(_finished(total, None if added is None else added[r, n, c, g, o], epilogue))


def weight_grad(
    problem: Problem,
    grad_output: Tensor,
    input: Tensor,
    out: Tensor,
    bias_out: Tensor | None,
    precision: str | None = None,
) -> None:
    """Fill ``out`` with the gradient of the weight, and ``bias_out`` with that of the bias."""
    if bias_out is not None:
        _sum_positions(grad_output, bias_out)
    if _is_thin(problem):
        _weight_grad_by_tap(problem, grad_output, input, out)
        return
    groups, (row_axis, column_axis) = problem.groups, _axes(problem)
    # Lowered with channels last, the right matrix needs no transposition, which BLAS likes best.
    channels_last = problem.in_channels > groups or input.stride(1) == 1
    scratch = _Scratch(out.dtype, channels_last)
    source, grad = _by_position(input, groups), _by_position(grad_output, groups)
    target = _by_group(out, 0, groups).permute(0, 1, 3, 4, 2)
    tiling = _lowered_tiling(problem, scratch, kernel_copies=1)
    for g, o, i, p, q in tiling.spans("groups", "channels", "depth", "tap_rows", "tap_columns"):
        piece = target[g, o, p, q, i]
        total = torch.zeros(piece.shape, dtype=scratch.dtype)
        for n, r, c in tiling.spans("images", "rows", "columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = _staged(source[:, n, :, g, i], rows, columns, scratch)
            held = scratch.held(grad[r, n, c, g, o])
            _add_weights(total, stage, held, rows, columns, scratch)
        piece.copy_(total)


def input_grad(
    problem: Problem,
    grad_output: Tensor,
    weight: Tensor,
    out: Tensor,
    precision: str | None = None,
) -> None:
    """Fill ``out`` with the gradient of the input."""
    scratch = _Scratch(out.dtype, channels_last=grad_output.stride(1) == 1)
    # Several output channels are too many operations, each of them on too little. Zeros beyond the
    # gradient's borders are multiplied, tap by tap: NaN, if a weight is infinite.
    depthwise = problem.out_channels == problem.groups
    if depthwise and _is_thin(problem) and _has_finite_sum(weight, scratch.dtype):
        _input_grad_by_tap(problem, grad_output, weight, out, scratch)
        return
    groups, (rows, columns) = problem.groups, _axes(problem)
    grad = _by_position(grad_output, groups)
    weights = _by_group(weight, 0, groups).permute(0, 3, 1, 4, 2)
    for phase in _phases(rows):
        target = _by_position(out[:, :, phase.positions], groups)
        kernel, copies = scratch.packed(weights[:, phase.taps], last=4)
        tiling = _spread_tiling(problem, phase.axis, scratch, copies)
        for g, i, n, r, c in tiling.spans("groups", "depth", "images", "rows", "columns"):
            piece = target[r, n, c, g, i]
            total = scratch.take("total", *piece.shape).zero_()
            for o, p, q in tiling.spans("channels", "tap_rows", "tap_columns"):
                readers = columns.readers(c, q)
                taps = scratch.plain(kernel[g, p, o, q, i])
                parts = phase.axis.part(r, p), columns.part(readers, q).window(c)
                _add_inputs(total, grad[:, n, readers, g, o], taps, *parts, scratch)
            piece.copy_(total)


def _finished(total: Tensor, residual: Tensor | None, epilogue: Epilogue) -> Tensor:
    """The sums of a block as they are to be stored, but for their type."""
    if residual is not None:
        total += residual
    return applied(total, None, epilogue)


def _add_outputs(
    total: Tensor, stage: Tensor, taps: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch
) -> None:
    """Add the products of a stage and ``taps``: ``(groups, tap rows, tap columns, i, o)``."""
    for some, lowered in _lowered(stage, rows, columns, scratch):
        _matrices(total).baddbmm_(lowered, taps[:, some].flatten(1, 3))


def _add_weights(
    total: Tensor, stage: Tensor, grad: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch
) -> None:
    """Add the products of a stage and ``grad``, to ``(groups, o, tap rows, tap columns, i)``."""
    left = _matrices(grad).transpose(1, 2)
    for some, lowered in _lowered(stage, rows, columns, scratch):
        total[:, :, some].flatten(2).baddbmm_(left, lowered)


def _add_inputs(
    total: Tensor, grad: Tensor, taps: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch
) -> None:
    """Add the products of ``grad`` and ``taps``: ``(groups, tap rows, o, tap columns, i)``."""
    shape = (*total.shape[:2], *grad.shape[2:4], *taps.shape[3:])
    spread = scratch.take("spread", *shape).zero_()
    for some, read, gathered in _gathered(grad, rows, scratch):
        right = taps[:, some].flatten(3).flatten(1, 2)
        _matrices(spread[read].flatten(4)).baddbmm_(_matrices(gathered), right)
    for tap in range(columns.taps):
        readers = columns.readers(slice(0, columns.size), slice(tap, tap + 1))
        if readers.start < readers.stop:
            first = readers.start * columns.step + tap * columns.reach - columns.before
            brought = spread[:, :, readers, :, tap]
            total[:, :, first :: columns.step][:, :, : brought.shape[2]] += brought


def _staged(source: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch) -> Tensor:
    """All of ``source`` from the first element read to the last, zeros where it has none."""
    read_rows, held_rows = rows.overlap()
    read_columns, held_columns = columns.overlap()
    read = source[read_rows, :, read_columns]
    shape = (rows.span, source.shape[1], columns.span, *source.shape[3:])
    inside = read.shape == shape
    pointwise = rows.span == rows.outputs and columns.span == columns.outputs
    if inside and scratch.is_plain(read) and (pointwise or scratch.has_layout_of(read)):
        return read
    stage = scratch.take("stage", *shape)
    if not inside:
        stage.zero_()
    stage[held_rows, :, held_columns].copy_(read)
    return stage


def _lowered(
    stage: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch
) -> Iterator[tuple[slice, Tensor]]:
    """The matrices ``(groups, positions, taps * i)``, each with its kernel rows."""
    _, images, _, groups, depth = stage.shape
    row, image, column, group, channel = stage.stride()
    shape, stride = (images, columns.outputs, groups), (image, columns.step * column, group)
    tail_shape, tail_stride = (columns.taps, depth), (columns.reach * column, channel)
    if _shares_rows(rows, columns, depth):
        lowered = stage.as_strided((rows.span, *shape, *tail_shape), (row, *stride, *tail_stride))
        if columns.span > columns.outputs:
            lowered = scratch.take("lowered", *lowered.shape).copy_(lowered)
        for tap in range(rows.taps):
            first = tap * rows.reach
            yield slice(tap, tap + 1), _matrices(lowered[first : first + rows.outputs].flatten(4))
    else:
        lowered = stage.as_strided(
            (rows.outputs, *shape, rows.taps, *tail_shape),
            (rows.step * row, *stride, rows.reach * row, *tail_stride),
        )
        lowered = scratch.take("lowered", *lowered.shape).copy_(lowered)
        yield slice(None), _matrices(lowered.flatten(4))


def _shares_rows(rows: _Axis, columns: _Axis, depth: int) -> bool:
    """Whether kernel rows read one lowered matrix, or have the input lowered for each."""
    if rows.step > 1:
        return False
    deep = columns.taps * depth >= _EFFICIENT_DEPTH
    return rows.taps == 1 or (deep and rows.span < rows.outputs * rows.taps)


def _gathered(
    grad: Tensor, rows: _Axis, scratch: _Scratch
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Kernel rows, rows that they read, and the gradient there: ``(..., groups, tap rows * o)``."""
    _, images, columns, groups, channels = grad.shape
    overlaps = [
        rows.part(slice(0, rows.outputs), slice(tap, tap + 1)).overlap() for tap in range(rows.taps)
    ]
    zeros = rows.outputs * rows.taps - sum(held.stop - held.start for _, held in overlaps)
    if rows.taps == 1 or channels >= _EFFICIENT_DEPTH or 2 * zeros > rows.outputs * rows.taps:
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


def _is_thin(problem: Problem) -> bool:
    """Whether matrices would be so thin, and outputs so many, that tap by tap is faster."""
    thin = problem.in_channels == problem.groups
    thin = thin and problem.out_channels <= _THIN_CHANNELS * problem.groups
    return thin and prod(problem.output_shape) >= _EFFICIENT_POSITIONS


def _has_finite_sum(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether all elements are finite; not if their sum overflows, which does not matter here."""
    total = torch.zeros(weight.shape[1], dtype=dtype)
    _add_positions(weight, total)
    return bool(total.isfinite().all())


def _forward_by_tap(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scratch: _Scratch,
    residual: Tensor | None,
    epilogue: Epilogue,
) -> None:
    """The forward pass of a thin layer."""
    groups = problem.groups
    (source,), target = _by_channel(input, groups), _by_channel(out, groups)
    first = None if bias is None else _by_group(bias, 0, groups).t()
    added = None if residual is None else _by_channel(residual, groups)
    axes = _axes(problem)
    _correlate(target, source, _by_tap(weight, groups), first, *axes, scratch, added, epilogue)


def _input_grad_by_tap(
    problem: Problem, grad_output: Tensor, weight: Tensor, out: Tensor, scratch: _Scratch
) -> None:
    """The input gradient of a depthwise layer: phases of it, each of which reads step by step."""
    (grad,), weights = _by_channel(grad_output, problem.groups), _by_tap(weight, problem.groups)
    phases = [list(_phases(axis)) for axis in _axes(problem)]
    read = [[phase for phase in along if phase.axis.taps] for along in phases]
    if read != phases:
        out.zero_()  # at once, for there may be many more that no tap reads
    for rows, columns in product(*read):
        target = _by_channel(out[:, :, rows.positions, columns.positions], problem.groups)
        taps = weights[:, rows.taps, columns.taps]
        _correlate(target, grad, taps, None, rows.axis, columns.axis, scratch)


def _weight_grad_by_tap(problem: Problem, grad_output: Tensor, input: Tensor, out: Tensor) -> None:
    """The weight gradient of a thin layer: a sum of products for each tap."""
    scratch = _Scratch(out.dtype, channels_last=input.stride(1) == 1)
    (source,) = _by_channel(input, problem.groups)
    grad, target = _by_channel(grad_output, problem.groups), _by_tap(out, problem.groups)
    row_axis, column_axis = _axes(problem)
    tiling = _tap_tiling(grad.shape, row_axis, column_axis, scratch)
    for g, p, q in tiling.spans("groups", "tap_rows", "tap_columns"):
        piece = target[:, p, q, g].permute(2, 1, 0, 3)
        total = torch.zeros(piece.shape, dtype=scratch.dtype)
        for n, r, c in tiling.spans("images", "rows", "columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = _staged(source[:, n, :, g], rows, columns, scratch)
            part = grad[:, r, n, c, g]
            held = scratch.take_channels("held", part.shape).copy_(part)
            total += _tap_sums(stage, held, rows, columns, scratch)
        piece.copy_(total)


def _tap_sums(
    stage: Tensor, grad: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch
) -> Tensor:
    """Sums of what taps read times ``grad``: ``(tap columns, tap rows, channels, groups)``."""
    products = scratch.take_channels("products", grad.shape)
    sums = torch.empty(columns.taps, rows.taps, grad.shape[0], grad.shape[-1], dtype=scratch.dtype)
    reads = _tap_reads(stage, rows, columns, scratch)
    for read, tap_sum in zip(reads, sums.flatten(0, 1).unbind(), strict=True):
        torch.mul(read, grad, out=products)
        torch.sum(products, (1, 2, 3), dtype=scratch.dtype, out=tap_sum)
    return sums


def _correlate(
    target: Tensor,
    source: Tensor,
    weights: Tensor,
    first: Tensor | None,
    row_axis: _Axis,
    column_axis: _Axis,
    scratch: _Scratch,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fill ``target``'s channels with what taps read of ``source``, times ``weights``.

    These are ``(channels, tap rows, tap columns, groups)``; ``first`` is added, by the outer two.
    ``residual`` is in the order of ``target``.
    """
    tiling = _tap_tiling(target.shape, row_axis, column_axis, scratch)
    for g, n, r, c in tiling.spans("groups", "images", "rows", "columns"):
        piece = target[:, r, n, c, g]
        total = piece if scratch.can_sum_in(piece) else scratch.take_channels("total", piece.shape)
        if first is None:
            total.zero_()
        else:
            total.copy_(first[:, None, None, None, g])
        for p, q in tiling.spans("tap_rows", "tap_columns"):
            rows, columns = row_axis.part(r, p), column_axis.part(c, q)
            stage = _staged(source[:, n, :, g], rows, columns, scratch)
            _add_taps(total, stage, scratch.plain(weights[:, p, q, g]), rows, columns, scratch)
        added = None if residual is None else residual[:, r, n, c, g]
        finished = _finished(total, added, epilogue)
        if finished is not piece:
            piece.copy_(finished)


def _add_taps(
    total: Tensor, stage: Tensor, taps: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch
) -> None:
    """Add what ``taps``, ``(channels, tap rows, tap columns, groups)``, read, times them."""
    # Groups side by side, as in a block of channels last.
    factors = taps.permute(2, 1, 0, 3).contiguous().flatten(0, 1)[:, :, None, None, None]
    reads = _tap_reads(stage, rows, columns, scratch)
    for read, factor in zip(reads, factors.unbind(), strict=True):
        total.addcmul_(read, factor)


def _tap_reads(stage: Tensor, rows: _Axis, columns: _Axis, scratch: _Scratch) -> Iterator[Tensor]:
    """What each tap reads of a stage, ``(rows, images, columns, groups)``, column after column.

    If channels come first, what a column of taps reads is moved together, not to be read in short
    runs; its taps then begin at another row of that.
    """
    for column in _axis_reads(stage, 2, columns):
        if columns.span > columns.outputs and not scratch.channels_last:
            column = scratch.take("column", *column.shape).copy_(column)
        yield from _axis_reads(column, 0, rows)


def _axis_reads(block: Tensor, dim: int, axis: _Axis) -> Sequence[Tensor]:
    """What each tap of an axis reads along ``dim``: views, which cost the least made together."""
    shape, stride = list(block.shape), list(block.stride())
    between_taps = abs(axis.reach) * stride[dim]
    shape[dim] = axis.outputs
    stride[dim] *= axis.step
    reads = block.as_strided((axis.taps, *shape), (between_taps, *stride)).unbind()
    return reads if axis.reach > 0 else reads[::-1]


def _by_channel(tensor: Tensor, groups: int) -> Tensor:
    """``(N, C, H, W)`` as ``(channels of a group, rows, images, columns, groups)``."""
    return _by_group(tensor, 1, groups).permute(2, 3, 0, 4, 1)


def _by_tap(weight: Tensor, groups: int) -> Tensor:
    """A thin layer's weight as ``(channels of a group, tap rows, tap columns, groups)``."""
    return _by_group(weight, 0, groups)[:, :, 0].permute(1, 2, 3, 0)


def _sum_positions(grad_output: Tensor, out: Tensor) -> None:
    """Fill ``out`` with the sums over images, rows and columns."""
    if out.dtype in _SUM_DTYPES:
        total = out.new_zeros(out.shape, dtype=_SUM_DTYPES[out.dtype])
        _add_positions(grad_output, total)
        out.copy_(total)
    else:
        torch.sum(grad_output, (0, 2, 3), dtype=out.dtype, out=out)


def _add_positions(tensor: Tensor, total: Tensor) -> None:
    """Add the sums to ``total``, of a wider type: PyTorch converts all it is given to sum."""
    if tensor.numel() * total.element_size() <= _block_bytes():
        total += tensor.sum((0, 2, 3), dtype=total.dtype)
        return
    longest = tensor.shape.index(max(tensor.shape))
    totals = total.chunk(2) if longest == 1 else (total, total)
    for half, half_total in zip(tensor.chunk(2, longest), totals, strict=True):
        _add_positions(half, half_total)


def _by_group(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """The channels in ``dim`` as two dimensions: groups and channels of a group."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


def _by_position(tensor: Tensor, groups: int) -> Tensor:
    """``(N, C, H, W)`` as ``(rows, images, columns, groups, channels of a group)``."""
    return _by_group(tensor, 1, groups).permute(3, 0, 4, 1, 2)


def _matrices(block: Tensor) -> Tensor:
    """``(rows, images, columns, groups, channels)`` as ``(groups, positions, channels)``."""
    return block.flatten(0, 2).transpose(0, 1)


class _Axis(NamedTuple):
    """Rows or columns: output ``o`` and tap ``t`` read element ``o * step + t * reach - before``.

    Elements outside ``range(size)`` are zeros.
    """

    size: int
    outputs: int
    taps: int
    step: int
    reach: int
    before: int

    @property
    def span(self) -> int:
        """Elements from the first one read to the last."""
        return (self.outputs - 1) * self.step + (self.taps - 1) * abs(self.reach) + 1

    def part(self, outputs: slice, taps: slice) -> _Axis:
        """These outputs and taps only."""
        count = outputs.stop - outputs.start
        return self._replace(
            outputs=count,
            taps=taps.stop - taps.start,
            step=self.step if count > 1 else 1,  # in bytes, a step that is not taken may overflow
            before=self.before - outputs.start * self.step - taps.start * self.reach,
        )

    def window(self, elements: slice) -> _Axis:
        """These elements only, counted from the first of them."""
        return self._replace(
            size=elements.stop - elements.start, before=self.before + elements.start
        )

    def overlap(self) -> tuple[slice, slice]:
        """The elements read that exist, by their place among all and by that in the span."""
        before = self.before - min(0, (self.taps - 1) * self.reach)
        start = min(max(0, -before), self.size)
        stop = max(start, min(self.size, self.span - before))
        held_start = min(max(0, before), self.span)
        return slice(start, stop), slice(held_start, held_start + stop - start)

    def readers(self, elements: slice, taps: slice) -> slice:
        """The outputs from the first to the last that read these elements with these taps."""
        least = elements.start + self.before - (taps.stop - 1) * self.reach
        most = elements.stop - 1 + self.before - taps.start * self.reach
        start = min(max(0, -(-least // self.step)), self.outputs)
        return slice(start, max(start, min(self.outputs, most // self.step + 1)))


def _axes(problem: Problem) -> tuple[_Axis, _Axis]:
    """The axes along which the forward pass reads its input."""
    before = (problem.padding.top, problem.padding.left)
    rows, columns = zip(
        problem.input_size,
        problem.output_size,
        problem.kernel_size,
        # Of a single output or tap the distance to the next means nothing, and may be any number.
        map(min, problem.stride, problem.padded_size),
        map(min, problem.dilation, problem.padded_size),
        before,
        strict=True,
    )
    return _Axis(*rows), _Axis(*columns)


class _Phase(NamedTuple):
    """Every stride-th element of the input, the taps that read it, and for which outputs."""

    positions: slice
    taps: slice
    axis: _Axis


def _phases(axis: _Axis) -> Iterator[_Phase]:
    """How the elements of an axis gather from its outputs.

    Tap ``t`` reads element ``e`` for output ``(e + before - t * reach) / step``, if that is a
    whole number: the same taps for every step-th element.
    """
    size, outputs, taps, step, reach, before = axis
    common = gcd(step, reach)
    for first in range(min(step, size)):
        readers = [tap for tap in range(taps) if (first + before - tap * reach) % step == 0]
        start = readers[0] if readers else taps
        gathering = _Axis(
            size=outputs,
            outputs=len(range(first, size, step)),
            taps=len(readers),
            step=1,
            reach=-(reach // common),
            before=(start * reach - first - before) // step,
        )
        yield _Phase(slice(first, None, step), slice(start, None, step // common), gathering)


class _Extent(NamedTuple):
    """How much of each dimension; channels are output channels and depth input channels."""

    images: int
    rows: int
    columns: int
    groups: int
    channels: int
    depth: int
    tap_rows: int
    tap_columns: int

    @property
    def weights(self) -> int:
        return self.groups * self.channels * self.depth * self.tap_rows * self.tap_columns


# In what order a block is cut, each dimension down to the given size: first what leaves the
# products efficient, then whatever is needed.
_Cuts = tuple[tuple[str, int], ...]
_KERNEL_CUTS: _Cuts = (
    ("groups", 1),
    ("channels", 128),
    ("depth", 64),
    ("tap_rows", 1),
    ("tap_columns", 1),
    ("depth", 1),
    ("channels", 1),
)
_CUTS: _Cuts = (
    ("images", 1),
    ("rows", 8),
    ("groups", 1),
    ("columns", 512),
    *_KERNEL_CUTS[1:3],
    ("rows", 1),
    ("columns", 64),
    *_KERNEL_CUTS[3:],
    ("columns", 1),
)
_TAP_CUTS: _Cuts = (
    ("images", 1),
    ("rows", 64),
    ("groups", 32),
    ("columns", 512),
    *_KERNEL_CUTS[3:5],  # far apart, taps are better read one by one, with little in between
    ("groups", 1),
    ("rows", 1),
    ("columns", 1),
)


class _Tiling(NamedTuple):
    """How a convolution is cut in blocks."""

    whole: _Extent
    block: _Extent

    @classmethod
    def fitting(
        cls, whole: _Extent, elements: Callable[[_Extent], int], kernel_copies: int, limit: int
    ) -> _Tiling:
        """The largest blocks of at most ``limit`` elements, up to half of them for the kernel."""

        def kernel(block: _Extent) -> int:
            return kernel_copies * block.weights

        together = _EFFICIENT_POSITIONS // max(1, whole.rows * whole.columns)
        block = whole._replace(images=min(whole.images, max(1, together)))
        block = _cut(block, _KERNEL_CUTS, kernel, limit // 2)
        block = _cut(block, _CUTS, lambda block: elements(block) + kernel(block), limit)
        return cls(whole, block)

    def spans(self, *names: str) -> Iterator[tuple[slice, ...]]:
        """The parts along these dimensions, in all combinations."""
        return product(*(_spans(getattr(self.whole, n), getattr(self.block, n)) for n in names))


def _cut(block: _Extent, cuts: _Cuts, elements: Callable[[_Extent], int], limit: int) -> _Extent:
    """``block`` with its dimensions halved until ``elements`` are within ``limit``."""
    for name, least in cuts:
        while getattr(block, name) > least and elements(block) > limit:
            block = block._replace(**{name: (getattr(block, name) + 1) // 2})
    return block


def _spans(size: int, length: int) -> list[slice]:
    return [slice(start, min(start + length, size)) for start in range(0, size, max(1, length))]


def _lowered_tiling(problem: Problem, scratch: _Scratch, kernel_copies: int) -> _Tiling:
    """The blocks of the forward pass and of the weight gradient."""
    axes = _axes(problem)

    def elements(block: _Extent) -> int:
        rows = axes[0]._replace(outputs=block.rows, taps=block.tap_rows)
        columns = axes[1]._replace(outputs=block.columns, taps=block.tap_columns)
        shared = _shares_rows(rows, columns, block.depth)
        lowered_rows = rows.span if shared else rows.outputs * rows.taps
        inputs = rows.span * columns.span + lowered_rows * columns.outputs * columns.taps
        outputs = 2 * rows.outputs * columns.outputs
        positions = inputs * block.depth + outputs * block.channels
        return block.images * block.groups * positions

    whole = _whole(problem, problem.output_size, problem.kernel_size)
    return _Tiling.fitting(whole, elements, kernel_copies, scratch.limit)


def _tap_tiling(shape: Sequence[int], rows: _Axis, columns: _Axis, scratch: _Scratch) -> _Tiling:
    """The blocks of sums tap by tap, of ``(channels, rows, images, columns, groups)``."""

    def elements(block: _Extent) -> int:
        row = rows._replace(outputs=block.rows, taps=block.tap_rows)
        column = columns._replace(outputs=block.columns, taps=block.tap_columns)
        read = row.span * (column.span + column.outputs)
        written = row.outputs * column.outputs * block.channels
        return block.images * block.groups * (read + 2 * written) + 2 * block.weights

    channels, row_count, images, column_count, groups = shape
    whole = _Extent(images, row_count, column_count, groups, channels, 1, rows.taps, columns.taps)
    return _Tiling(whole, _cut(whole, _TAP_CUTS, elements, scratch.limit))


def _spread_tiling(problem: Problem, rows: _Axis, scratch: _Scratch, kernel_copies: int) -> _Tiling:
    """The blocks of the input gradient, for one phase of its rows."""
    columns = _axes(problem)[1]

    def elements(block: _Extent) -> int:
        span = block.columns + columns.reach * (block.tap_columns - 1)
        readers = min(columns.outputs, span // columns.step + 1)
        spread = block.columns + readers * block.tap_columns
        gathered = readers * block.tap_rows
        positions = block.rows * (spread * block.depth + gathered * block.channels)
        return block.images * block.groups * positions

    whole = _whole(problem, (rows.outputs, columns.size), (rows.taps, columns.taps))
    return _Tiling.fitting(whole, elements, kernel_copies, scratch.limit)


def _whole(problem: Problem, size: tuple[int, int], taps: tuple[int, int]) -> _Extent:
    groups = problem.groups
    channels, depth = problem.out_channels // groups, problem.in_channels // groups
    return _Extent(problem.batch, *size, groups, channels, depth, *taps)


def _block_bytes() -> int:
    return SCRATCH_BYTES // 2


class _Scratch:
    """Buffers that are allocated once in a pass, of the type that sums are kept in.

    Their first three dimensions are positions and the others channels, which come first or last
    in memory.
    """

    def __init__(self, dtype: torch.dtype, channels_last: bool) -> None:
        self.dtype = _SUM_DTYPES.get(dtype, dtype)
        self.limit = _block_bytes() // self.dtype.itemsize
        self.channels_last = channels_last
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """The buffer of this name, uninitialised."""
        size = prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers.pop(name, None)  # not to hold both
            self._buffers[name] = torch.empty(size, dtype=self.dtype)
        buffer = self._buffers[name][:size]
        if self.channels_last:
            return buffer.view(shape)
        return buffer.view(*shape[3:], *shape[:3]).permute(-3, -2, -1, *range(len(shape) - 3))

    def take_channels(self, name: str, shape: Sequence[int]) -> Tensor:
        """The buffer of this name, with a dimension for channels of a group before all others."""
        channels, rows, *others = shape
        return self.take(name, channels * rows, *others).unflatten(0, (channels, rows))

    def can_sum_in(self, block: Tensor) -> bool:
        """Whether sums can be kept in ``block`` of a result, read and written in long runs."""
        # If channels come first, the rows of several images alternate in the buffers alone.
        alike = self.channels_last or block.shape[2] == 1
        return alike and self.is_plain(block) and self.has_layout_of(block[0])

    def held(self, block: Tensor) -> Tensor:
        """``block``, or a copy where its positions cannot be read in place."""
        if self.is_plain(block) and block.shape[1] == 1:
            return block
        return self.take("held", *block.shape).copy_(block)

    def packed(self, kernel: Tensor, last: int) -> tuple[Tensor, int]:
        """``kernel`` with dimensions 1 to ``last`` in their order in memory, if that fits.

        Also how many copies of a part are made when it is used.
        """
        copies = 1 if self.is_plain(kernel) else 2
        if copies * kernel.numel() * self.dtype.itemsize > SCRATCH_BYTES - _block_bytes():
            return kernel, 2
        joined = self.plain(kernel).flatten(1, last)
        return joined.view(kernel.shape), 0

    def has_layout_of(self, block: Tensor) -> bool:
        """Whether channels, or else columns, lie side by side in ``block`` as in the buffers."""
        return block.stride(-1 if self.channels_last else 2) == 1

    def is_plain(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` holds its values, in the type of the buffers."""
        return tensor.dtype == self.dtype and not tensor.is_conj() and not tensor.is_neg()

    def plain(self, tensor: Tensor) -> Tensor:
        """``tensor``, or a plain copy."""
        return tensor.to(self.dtype).resolve_conj().resolve_neg()
