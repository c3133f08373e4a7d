"""Cases of ``mma.sync`` and their results, for the emulator and for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastconv.bench import mma_rate
from fastconv.kernels.family import Kernel, Launch

SOURCE = Path(__file__).with_suffix(".cuh")
KINDS = {
    "Tf32": torch.float32,
    "Float16": torch.float16,
    "Bfloat16": torch.bfloat16,
}
GAPS = (0, 16)  # bytes between rows in shared memory


@dataclass(frozen=True)
class Case:
    """Several warps each multiply 16 rows by 8 rows, of 32 bytes each, of small integers."""

    kind: str
    gap: int
    transposed: bool
    warps: int = 3

    def __str__(self) -> str:
        return f"{self.kind}-{self.gap}" + ("-transposed" if self.transposed else "")

    @property
    def launch(self) -> Launch:
        constants = (("Kind", f"fastconv::{self.kind}"), ("gap", self.gap))
        kernel = Kernel(str(SOURCE), "small_mmas", (*constants, ("transposed", self.transposed)))
        shared_bytes = self.warps * 40 * (32 + self.gap)
        return Launch(kernel, (1, 1, 1), 32 * self.warps, shared_bytes, ("left", "right", "sums"))

    def tensors(self) -> dict[str, Tensor]:
        dtype, generator = KINDS[self.kind], torch.Generator().manual_seed(self.warps)
        length = 32 // dtype.itemsize
        left, right = (
            torch.randint(-9, 10, (self.warps, rows, length), generator=generator).to(dtype)
            for rows in (16, 8)
        )
        if self.transposed:
            right = right.transpose(1, 2).contiguous()
        return {"left": left, "right": right, "sums": torch.full((self.warps, 16, 8), torch.nan)}

    def expected(self, tensors: dict[str, Tensor]) -> Tensor:
        right = tensors["right"] if self.transposed else tensors["right"].transpose(1, 2)
        return tensors["left"].float() @ right.float()


@dataclass(frozen=True)
class Rounds:
    """The MMAs of the benchmark's kernel, several rounds of them, of small integers."""

    kind: str
    blocks: int = 2
    warps: int = 3
    rounds: int = 5  # one more than the kernel's loop is unrolled

    def __str__(self) -> str:
        return f"{self.kind}-rounds"

    @property
    def launch(self) -> Launch:
        return mma_rate.launch_of(self.kind, self.warps, self.blocks, self.rounds)

    def tensors(self) -> dict[str, Tensor]:
        like = mma_rate.matrices(self.kind, torch.device("cpu"))
        generator = torch.Generator().manual_seed(self.warps)
        matrices = torch.randint(-9, 10, like.shape, generator=generator).to(like)
        totals = mma_rate.totals(self.launch, torch.device("cpu")).fill_(torch.nan)
        return {"matrices": matrices, "totals": totals}

    def expected(self, tensors: dict[str, Tensor]) -> Tensor:
        rows = tensors["matrices"].float()
        left, right = rows.split((16 * mma_rate.LEFT, 8 * mma_rate.RIGHT))
        total = left.unflatten(0, (-1, 16)).sum(0) @ right.unflatten(0, (-1, 8)).sum(0).T
        return (self.rounds * total).expand_as(tensors["totals"])


ROUNDS = [Rounds(kind) for kind in mma_rate.KINDS]
CASES = [
    Case(kind, gap, transposed)
    for kind in KINDS
    for gap in GAPS
    for transposed in (False, True)
    if not (transposed and kind == "Tf32")  # Only 16-bit elements can be transposed.
]
