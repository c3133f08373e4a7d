"""Views of tensors in the orders that passes compute in, and sums over positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastconv.backends.cpu import scratch
from fastconv.backends.cpu.scratch import SUM_DTYPES


def by_group(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Views the channels in ``dim`` as two dimensions: groups and channels of a group."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


def by_position(tensor: Tensor, groups: int) -> Tensor:
    """Views ``(N, C, H, W)`` as ``(rows, images, columns, groups, channels of a group)``."""
    return by_group(tensor, 1, groups).permute(3, 0, 4, 1, 2)


def matrices_of(block: Tensor) -> Tensor:
    """Views ``(rows, images, columns, groups, channels)`` as ``(groups, positions, channels)``."""
    return block.flatten(0, 2).transpose(0, 1)


def by_channel(tensor: Tensor, groups: int) -> Tensor:
    """Views ``(N, C, H, W)`` as ``(channels of a group, rows, images, columns, groups)``."""
    return by_group(tensor, 1, groups).permute(2, 3, 0, 4, 1)


def by_tap(weight: Tensor, groups: int) -> Tensor:
    """Views a thin layer's weight as ``(channels of a group, tap rows, tap columns, groups)``."""
    return by_group(weight, 0, groups)[:, :, 0].permute(1, 2, 3, 0)


def sum_positions(grad_output: Tensor, out: Tensor) -> None:
    """Fills ``out`` with the sums over all dimensions but channels."""
    if out.dtype in SUM_DTYPES:
        total = out.new_zeros(out.shape, dtype=SUM_DTYPES[out.dtype])
        add_positions(grad_output, total)
        out.copy_(total)
    else:
        torch.sum(grad_output, _all_but_channels(grad_output), dtype=out.dtype, out=out)


def _all_but_channels(tensor: Tensor) -> tuple[int, ...]:
    return (0, *range(2, tensor.dim()))


def add_positions(tensor: Tensor, total: Tensor) -> None:
    """Adds the sums over all dimensions but channels to ``total``, which has a wider type.

    PyTorch converts the whole tensor before it sums, so a large one is summed in halves.
    """
    if tensor.numel() * total.element_size() <= scratch.BLOCK_BYTES:
        total += tensor.sum(_all_but_channels(tensor), dtype=total.dtype)
        return
    longest = tensor.shape.index(max(tensor.shape))
    totals = total.chunk(2) if longest == 1 else (total, total)
    for half, half_total in zip(tensor.chunk(2, longest), totals, strict=True):
        add_positions(half, half_total)
