"""The statistics that a block's convolution leaves for its normalization, where Python computes it.

There convolution and normalization are calls of their own, and the statistics of the first wait
here for the second. On the native host path, ``native/block.h`` hands them on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = (torch.bfloat16, torch.float16)
"""The types whose convolutions may leave statistics: ``may_leave_statistics`` of block.h."""


class Left(NamedTuple):
    """The statistics of an output: of ``[share][mean, squared deviations, count][channel]``."""

    statistics: Tensor
    output: tuple[int, int]  # its address and its elements

    @property
    def shares(self) -> int:
        return self.statistics.shape[0]

    @property
    def channels(self) -> int:
        return self.statistics.shape[2]


class _Block(threading.local):
    """What the block that this thread computes has asked for and been left."""

    asks = False
    left: Left | None = None


_block = _Block()


@contextmanager
def asked() -> Iterator[None]:
    """The context of a block in training, whose convolution is asked for statistics."""
    before, _block.asks = _block.asks, True
    try:
        yield
    finally:
        _block.asks, _block.left = before, None


def are_asked(dtype: torch.dtype) -> bool:
    """Whether a convolution of this type should leave statistics, if its kernel can."""
    return _block.asks and dtype in TYPES


def new(shares: int, output: Tensor, channels: int) -> Tensor | None:
    """A tensor for the statistics of a convolution's output, which are kept; None of no shares."""
    if not shares:
        return None
    made = torch.empty((shares, 3, channels), dtype=torch.float32, device=output.device)
    _block.left = Left(made, (output.data_ptr(), output.numel()))
    return made


def take(x: Tensor) -> Left | None:
    """The statistics that have been left of this very tensor, if any. They are given once.

    ``vmap`` may make channels of images: then a tensor at the same address has others.
    """
    left, _block.left = _block.left, None
    if left is None or left.output != (x.data_ptr(), x.numel()) or left.channels != x.shape[1]:
        return None
    return left
