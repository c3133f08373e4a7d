"""Cases of ``wgmma`` with matrices that begin anywhere in a swizzled box, as taps do in a halo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastconv.kernels.family import Kernel, Launch
from small_mmas import KINDS

SOURCE = Path(__file__).with_suffix(".cuh")
ROWS, PLACES = 64, 48
BOX_BYTES = 24576


@dataclass(frozen=True)
class BoxCase:
    """An MN-major matrix of 64 rows times one of ``columns`` rows in a box, of small integers.

    The box has a place along K every ``span`` bytes, as many as its swizzle spans. The matrix
    begins at the place ``first``; ``leading`` places lie between as many of its rows as the span
    has, and ``stride`` places between eight neighbours along K and the next.
    """

    kind: str
    columns: int
    span: int
    first: int
    leading: int
    stride: int = 8

    def __str__(self) -> str:
        at = f"{self.first}-{self.leading}-{self.stride}"
        return f"{self.kind}-{self.columns}-span{self.span}-{at}"

    @property
    def launch(self) -> Launch:
        bytes_ = ROWS * PLACES * 2 + BOX_BYTES
        constants = (
            ("Kind", f"fastconv::{self.kind}"),
            ("columns", self.columns),
            ("span", self.span),
            ("first", self.first),
            ("leading", self.leading),
            ("stride", self.stride),
        )
        kernel = Kernel(str(SOURCE), "box_mma", constants)
        return Launch(kernel, (1, 1, 1), 128, bytes_ + 8, ("matrices", "results", bytes_))

    def memory(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.columns)
        count = ROWS * PLACES + BOX_BYTES // 2
        return torch.randint(-9, 10, (count,), generator=generator).to(KINDS[self.kind])

    def tensors(self) -> dict[str, Tensor]:
        results = torch.full((ROWS, self.columns), torch.nan)
        return {"matrices": self.memory(), "results": results}

    def expected(self) -> Tensor:
        left = _matrix(self.memory(), ROWS, 128, 0, 0, 1024)
        start = ROWS * PLACES * 2 + self.first * self.span
        sides = (self.leading * self.span, self.stride * self.span)
        return left @ _matrix(self.memory(), self.columns, self.span, start, *sides).T


def _matrix(memory: Tensor, rows: int, span: int, start: int, leading: int, stride: int) -> Tensor:
    """The matrix that begins at byte ``start`` of memory, where the swizzle permutes chunks."""
    row, place = torch.arange(rows)[:, None], torch.arange(PLACES)
    of_span = span // 2
    at = start + row // of_span * leading + row % of_span * 2
    at = at + place // 16 * (16 * span) + place // 8 % 2 * stride + place % 8 * span
    at = at ^ (at >> 7 & span // 16 - 1) << 4
    return memory[at // 2].float()


CASES = [
    BoxCase("Bfloat16", 64, span=128, first=1, leading=64),
    BoxCase("Bfloat16", 192, span=128, first=3, leading=1),
    BoxCase("Float16", 192, span=128, first=5, leading=3, stride=34),
    BoxCase("Float16", 96, span=128, first=2, leading=96),
    BoxCase("Bfloat16", 96, span=64, first=1, leading=1),
    BoxCase("Float16", 256, span=64, first=3, leading=2, stride=34),
    BoxCase("Bfloat16", 48, span=32, first=1, leading=1),
    BoxCase("Float16", 144, span=32, first=7, leading=5, stride=41),
]
