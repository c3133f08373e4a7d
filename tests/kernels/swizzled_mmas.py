"""Cases of ``wgmma`` with swizzled matrices, for the emulator and for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastconv.kernels.arithmetic import round_up
from fastconv.kernels.family import Kernel, Launch
from small_mmas import KINDS

SOURCE = Path(__file__).with_suffix(".cuh")
ROWS = 64
SPAN = 128  # bytes of a swizzled row


@dataclass(frozen=True)
class Case:
    """A matrix of 64 rows times one of ``columns`` rows, of 128 bytes each, of small integers."""

    kind: str
    columns: int
    left_mn_major: bool = False
    right_mn_major: bool = False

    def __str__(self) -> str:
        mn_major = {"left": self.left_mn_major, "right": self.right_mn_major}
        return "-".join([self.kind, str(self.columns), *filter(mn_major.get, mn_major)])

    @property
    def places(self) -> int:
        """The number of terms of a sum."""
        return SPAN // KINDS[self.kind].itemsize

    @property
    def matrix_bytes(self) -> tuple[int, int]:
        """The bytes of the left and the right matrix in shared memory."""
        left, right = (
            round_up(rows, 64 if mn_major else 1) * SPAN
            for rows, mn_major in ((ROWS, self.left_mn_major), (self.columns, self.right_mn_major))
        )
        return left, right

    @property
    def launch(self) -> Launch:
        bytes_ = sum(self.matrix_bytes)
        constants = (
            ("Kind", f"fastconv::{self.kind}"),
            ("columns", self.columns),
            ("places", self.places),
            ("left_bytes", self.matrix_bytes[0]),
            ("left_mn_major", self.left_mn_major),
            ("right_mn_major", self.right_mn_major),
        )
        kernel = Kernel(str(SOURCE), "swizzled_mma", constants)
        return Launch(kernel, (1, 1, 1), 128, bytes_ + 8, ("matrices", "results", bytes_))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The left and the right matrix; the terms of a sum lie along their rows."""
        generator = torch.Generator().manual_seed(self.columns)
        shape = (ROWS + self.columns, self.places)
        numbers = torch.randint(-9, 10, shape, generator=generator).to(KINDS[self.kind])
        left, right = numbers.split([ROWS, self.columns])
        return left, right

    def tensors(self) -> dict[str, Tensor]:
        mn_major = (self.left_mn_major, self.right_mn_major)
        lying = [
            swizzled(in_columns(matrix) if turned else matrix)
            for matrix, turned in zip(self.matrices(), mn_major, strict=True)
        ]
        results = torch.full((ROWS, self.columns), torch.nan)
        return {"matrices": torch.cat(lying), "results": results}

    def expected(self) -> Tensor:
        left, right = self.matrices()
        return left.float() @ right.float().T


def in_columns(matrix: Tensor) -> Tensor:
    """The matrix transposed in blocks of 64 rows: all columns of the first 64, then of others."""
    padded = pad(matrix, (0, 0, 0, -len(matrix) % 64))
    return padded.unflatten(0, (-1, 64)).transpose(1, 2).flatten(0, 1).contiguous()


def swizzled(rows: Tensor) -> Tensor:
    """Rows of 128 bytes as TMA lays them out: units of 16 bytes change places within a row."""
    chunks = rows.unflatten(1, (8, -1))
    order = torch.arange(8) ^ torch.arange(len(rows))[:, None] % 8
    return chunks[torch.arange(len(rows))[:, None], order].flatten()


CASES = [
    *(Case(kind, columns) for kind in KINDS for columns in (8, 72)),
    *(Case("Float16", 136, *mn_major) for mn_major in ((True, False), (False, True), (True, True))),
    *(Case("Bfloat16", 64, *mn_major) for mn_major in ((True, False), (False, True), (True, True))),
]
