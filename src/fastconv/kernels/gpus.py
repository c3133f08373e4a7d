"""One GPU of each architecture, so that plans can be made for GPUs that are not there.

Also the throughput of each architecture, from which families estimate the time of their plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fastconv.kernels.family import Gpu

_KIB = 1024


@dataclass(frozen=True)
class Rates:
    """The throughput of one SM per cycle.

    ``mma`` are the multiply-adds that ``mma.sync`` reaches with float32 accumulators, by the
    type of the operands: "tf32", "float16" or "bfloat16"; 0 if the type is not supported.
    ``float32`` are the multiply-adds of CUDA cores. ``l2_bytes`` and ``memory_bytes`` are an SM's
    share of the bandwidth of the L2 cache and of the GPU's memory.
    """

    mma: dict[str, float]
    float32: int
    l2_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class Board:
    """A GPU with the figures that its manufacturer publishes."""

    name: str
    gpu: Gpu
    clock_ghz: float  # boost clock
    memory_gb_s: float
    tf32: float
    float16: float
    bfloat16: float
    float32: int
    l2_bytes: float = 32.0  # per SM and cycle; a guess for GPUs whose figure is not published

    @property
    def rates(self) -> Rates:
        mma = {"tf32": self.tf32, "float16": self.float16, "bfloat16": self.bfloat16}
        cycles = self.clock_ghz * self.gpu.sm_count
        return Rates(mma, self.float32, self.l2_bytes, self.memory_gb_s / cycles)


def _gpu(architecture: str, sm_count: int, block_kib: int, sm_kib: int) -> Gpu:
    return Gpu(architecture, sm_count, block_kib * _KIB, sm_kib * _KIB)


# Shared memory, and plain float32: the CUDA C++ Programming Guide's tables "Technical
# Specifications per Compute Capability" and "Throughput of Native Arithmetic Instructions".
# SMs, clocks, memory and tensor cores: NVIDIA's whitepapers of V100, Turing, A100, GA102, Ada, H100
# and RTX Blackwell, the technical brief of Jetson AGX Orin, and the data sheets of T4, H200, HGX
# B200 and B300 and DGX Spark. They give operations per second; a multiply-add is two operations.
# The published rate is not always what mma.sync reaches:
#
# - GeForce boards multiply 16-bit types at half their rate with float32 accumulators, and TF32 at
#   half of that. Professional boards of sm_86, sm_89 and sm_120 have twice the rates given here,
#   which are those of the slower boards: a Gpu does not tell them apart.
# - Hopper reaches its full rate, 2048 for 16-bit types, only with wgmma. On an H200, mma.sync
#   reaches 321 to 325 TFLOP/s of TF32 and 634 to 650 of 16-bit types, as measured by
#   bench/mma_rate.py (287 and 575 with one warp per scheduler). That is two thirds of the full
#   rate, 680 and 1360, if the clock, which was not read, is 1.79 GHz under that load.
#   "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (Luo and others, 2024) finds
#   62 % on average.
# - The rate of mma.sync on sm_100 and sm_103, whose full rate is that of tcgen05, is not published.
#   ESTIMATE: as on sm_80.
# - The type of the accumulators is not published for Orin, and only FP4 is published for GB10.
#   ESTIMATE: Orin's full rate, and as on a GeForce board of sm_120.
# - Volta and Turing multiply float16 only, and in other shapes than those in device/mma.cuh.
#
# The L2 cache's bandwidth is published for V100 and A100: 2048 and 5120 bytes per cycle.
_BOARDS = (
    Board("V100", _gpu("sm_70", 80, 96, 96), 1.530, 900, 0, 512, 0, 64, 25.6),
    Board("T4", _gpu("sm_75", 40, 64, 64), 1.590, 320, 0, 512, 0, 64),
    Board("A100", _gpu("sm_80", 108, 163, 164), 1.410, 1555, 512, 1024, 1024, 64, 47.4),
    Board("RTX 3090", _gpu("sm_86", 82, 99, 100), 1.695, 936, 128, 256, 256, 128),
    Board("Jetson AGX Orin", _gpu("sm_87", 16, 163, 164), 1.300, 204.8, 512, 1024, 1024, 128),
    Board("RTX 4090", _gpu("sm_89", 128, 99, 100), 2.520, 1008, 128, 256, 256, 128),
    Board("H200", _gpu("sm_90a", 132, 227, 228), 1.830, 4800, 680, 1360, 1360, 128),
    Board("B200", _gpu("sm_100a", 148, 227, 228), 1.850, 8000, 512, 1024, 1024, 128),
    # HGX B300 boards use as many of the chip's 160 SMs as B200: float32 is as fast on both.
    Board("B300", _gpu("sm_103a", 148, 227, 228), 1.850, 8000, 512, 1024, 1024, 128),
    Board("RTX 5090", _gpu("sm_120a", 170, 99, 100), 2.407, 1792, 128, 256, 256, 128),
    Board("GB10", _gpu("sm_121a", 48, 99, 100), 2.418, 273, 128, 256, 256, 128),
)

BOARDS: dict[str, Board] = {board.gpu.architecture: board for board in _BOARDS}
GPUS: dict[str, Gpu] = {architecture: board.gpu for architecture, board in BOARDS.items()}
"""The GPUs by the architecture that their kernels are compiled for."""

H200 = GPUS["sm_90a"]


def named(architecture: str) -> Gpu:
    """Returns the GPU of an architecture, whose "a" may be left out: "sm_90" for "sm_90a".

    Raises:
        ValueError: the architecture is unknown; the message lists those that are known.
    """
    for gpu in GPUS.values():
        if architecture in (gpu.architecture, gpu.architecture.rstrip("a")):
            return gpu
    known = ", ".join(f"{name} ({board.name})" for name, board in BOARDS.items())
    raise ValueError(f"no GPU {architecture!r}: known are {known}")


@cache
def rates(gpu: Gpu) -> Rates:
    """Returns the rates of this GPU's architecture, or of the next older one in the table.

    So sm_88 has the rates of sm_87. An architecture newer than the table has the rates of its last
    entry, and an older one those of its first. The share of the memory's bandwidth follows from the
    number of SMs and the clock in the table: a GPU with fewer SMs has a larger share than this.
    """
    older = [board for board in _BOARDS if number(board.gpu) <= number(gpu)]
    return older[-1].rates if older else _BOARDS[0].rates


def number(gpu: Gpu) -> int:
    """Returns the number of a GPU's architecture: 90 for "sm_90a"."""
    return int(gpu.architecture.removeprefix("sm_").rstrip("af"))


def begins_early(gpu: Gpu) -> bool:
    """Whether launches of kernels that begin as ``device/begin.cuh`` has it are early."""
    return number(gpu) >= 90
