"""Buffers that a pass needs beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fastconv.backends.cpu.axes import Axis

BLOCK_BYTES = 6 << 20
"""Bound on a pass's buffers, whatever the number of threads, so that no result depends on it. A
matrix product has some of its own, so that one thread's are 8 MiB together."""

PACKED_BYTES = 24 << 20
"""The largest weight that is rearranged at once, in memory of its own."""

SUM_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""The types that sums are kept in, where they are not the tensors' own."""


class Scratch:
    """Buffers that a pass allocates once, of the type that sums are kept in.

    The first three dimensions of a buffer are positions, and the others channels, which come first
    or last in memory.
    """

    def __init__(self, dtype: torch.dtype, channels_last: bool) -> None:
        self.dtype = SUM_DTYPES.get(dtype, dtype)
        self.limit = BLOCK_BYTES // self.dtype.itemsize
        self.channels_last = channels_last
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns the buffer of this name, uninitialised."""
        size = prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers.pop(name, None)  # freed before the larger one is allocated
            self._buffers[name] = torch.empty(size, dtype=self.dtype)
        buffer = self._buffers[name][:size]
        if self.channels_last:
            return buffer.view(shape)
        return buffer.view(*shape[3:], *shape[:3]).permute(-3, -2, -1, *range(len(shape) - 3))

    def take_channels(self, name: str, shape: Sequence[int]) -> Tensor:
        """Returns the buffer of this name, with channels of a group as its first dimension."""
        channels, rows, *others = shape
        return self.take(name, channels * rows, *others).unflatten(0, (channels, rows))

    def can_sum_in(self, block: Tensor) -> bool:
        """Whether ``block`` of a result can hold sums, read and written in long runs of memory."""
        # If channels come first, the rows of several images alternate in buffers, but not in a
        # result.
        alike = self.channels_last or block.shape[2] == 1
        return alike and self.is_plain(block) and self.has_layout_of(block[0])

    def held(self, block: Tensor) -> Tensor:
        """Returns ``block``, or a copy where its positions cannot be read in place."""
        if self.is_plain(block) and block.shape[1] == 1:
            return block
        return self.take("held", *block.shape).copy_(block)

    def packed(self, kernel: Tensor, last: int) -> tuple[Tensor, int]:
        """Returns ``kernel`` with dimensions 1 to ``last`` in their order in memory, if it fits.

        Also returns how many copies a pass makes of the part that it uses.
        """
        copies = 1 if self.is_plain(kernel) else 2
        if copies * kernel.numel() * self.dtype.itemsize > PACKED_BYTES:
            return kernel, 2
        joined = self.plain(kernel).flatten(1, last)
        return joined.view(kernel.shape), 0

    def has_layout_of(self, block: Tensor) -> bool:
        """Whether channels (columns, if channels come first) are contiguous in ``block``."""
        return block.stride(-1 if self.channels_last else 2) == 1

    def is_plain(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` holds its values, in the type of the buffers."""
        return tensor.dtype == self.dtype and not tensor.is_conj() and not tensor.is_neg()

    def plain(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, or a plain copy."""
        return tensor.to(self.dtype).resolve_conj().resolve_neg()


def staged(source: Tensor, rows: Axis, columns: Axis, scratch: Scratch) -> Tensor:
    """Returns ``source`` from the first element read to the last, with zeros for the padding."""
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
