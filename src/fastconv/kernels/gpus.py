"""GPUs that plans can be made for though they are not there, one of each architecture.

And what each architecture does in a cycle, by which a family estimates what its plans would take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fastconv.kernels.family import Gpu

_KIB = 1024


@dataclass(frozen=True)
class Rates:
    """What a processor does in a cycle.

    ``products`` are multiply-adds of dense matrices that ``mma.sync`` reaches, with sums in
    float32, by what is multiplied: "tf32", "float16" or "bfloat16"; 0 where there are none.
    ``float32`` are those of plain cores. Bytes are a processor's share of what all of them get from
    the L2 cache, and from the GPU's memory.
    """

    products: dict[str, float]
    float32: int
    l2_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class Board:
    """A GPU with the figures that its maker publishes."""

    name: str
    gpu: Gpu
    clock_ghz: float  # boost
    memory_gb_s: float
    tf32: float
    float16: float
    bfloat16: float
    float32: int
    l2_bytes: float = 32.0  # of a processor and cycle: not published of most, and a guess then

    @property
    def rates(self) -> Rates:
        products = {"tf32": self.tf32, "float16": self.float16, "bfloat16": self.bfloat16}
        cycles = self.clock_ghz * self.gpu.processors
        return Rates(products, self.float32, self.l2_bytes, self.memory_gb_s / cycles)


def _gpu(architecture: str, processors: int, block_kib: int, processor_kib: int) -> Gpu:
    return Gpu(architecture, processors, block_kib * _KIB, processor_kib * _KIB)


# Shared memory, and plain float32: the CUDA C++ Programming Guide's tables "Technical
# Specifications per Compute Capability" and "Throughput of Native Arithmetic Instructions".
# Processors, clocks, memory and tensor cores: NVIDIA's whitepapers of V100, Turing, A100, GA102,
# Ada, H100 and RTX Blackwell, the technical brief of Jetson AGX Orin, and the data sheets of T4,
# H200, HGX B200 and B300 and DGX Spark. They give operations in a second; a multiply-add is two.
# What they publish is not always what mma.sync reaches:
#
# - GeForce boards multiply 16-bit types at half their rate where sums are float32, and TF32 at half
#   of that. Professional boards of sm_86, sm_89 and sm_120 have twice the rates that are given
#   here, which are those of the slower boards: from a Gpu they cannot be told apart.
# - Hopper has its full rate, 2048 for 16-bit types, with wgmma alone. mma.sync reaches 321 to 325
#   TFLOP/s of TF32 and 634 to 650 of 16-bit types on an H200, as bench/mma_rate.py measures it (287
#   and 575 with one warp for each scheduler): two thirds of it, 680 and 1360 if the clock, which
#   was not read, is 1.79 GHz under that load.
#   "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (Luo and others, 2024) finds
#   62 % on average.
# - Of mma.sync on sm_100 and sm_103, whose full rate is tcgen05's, nothing is published. ESTIMATE:
#   as on sm_80.
# - Of Orin nothing is said of what sums are in, of GB10 only FP4 is published. ESTIMATE: all that
#   Orin has, and as on a GeForce board of sm_120.
# - Volta and Turing multiply float16 alone, and in other shapes than device/mma.cuh has.
#
# The L2 cache's rate is published for V100 and A100: 2048 and 5120 bytes in a cycle.
_BOARDS = (
    Board("V100", _gpu("sm_70", 80, 96, 96), 1.530, 900, 0, 512, 0, 64, 25.6),
    Board("T4", _gpu("sm_75", 40, 64, 64), 1.590, 320, 0, 512, 0, 64),
    Board("A100", _gpu("sm_80", 108, 163, 164), 1.410, 1555, 512, 1024, 1024, 64, 47.4),
    Board("RTX 3090", _gpu("sm_86", 82, 99, 100), 1.695, 936, 128, 256, 256, 128),
    Board("Jetson AGX Orin", _gpu("sm_87", 16, 163, 164), 1.300, 204.8, 512, 1024, 1024, 128),
    Board("RTX 4090", _gpu("sm_89", 128, 99, 100), 2.520, 1008, 128, 256, 256, 128),
    Board("H200", _gpu("sm_90a", 132, 227, 228), 1.830, 4800, 680, 1360, 1360, 128),
    Board("B200", _gpu("sm_100a", 148, 227, 228), 1.850, 8000, 512, 1024, 1024, 128),
    # Of its chip's 160 processors, HGX boards have as many as B200's: float32 is as fast on both.
    Board("B300", _gpu("sm_103a", 148, 227, 228), 1.850, 8000, 512, 1024, 1024, 128),
    Board("RTX 5090", _gpu("sm_120a", 170, 99, 100), 2.407, 1792, 128, 256, 256, 128),
    Board("GB10", _gpu("sm_121a", 48, 99, 100), 2.418, 273, 128, 256, 256, 128),
)

BOARDS: dict[str, Board] = {board.gpu.architecture: board for board in _BOARDS}
GPUS: dict[str, Gpu] = {architecture: board.gpu for architecture, board in BOARDS.items()}
"""By what their kernels are compiled for."""

H200 = GPUS["sm_90a"]


def named(architecture: str) -> Gpu:
    """The GPU of an architecture, which may be given without its "a": "sm_90" as "sm_90a".

    Raises:
        ValueError: there is none; names those that there are.
    """
    for gpu in GPUS.values():
        if architecture in (gpu.architecture, gpu.architecture.rstrip("a")):
            return gpu
    raise ValueError(f"no GPU {architecture!r}: known are {', '.join(GPUS)}")


@cache
def rates(gpu: Gpu) -> Rates:
    """What a processor of this GPU does in a cycle, or one of the next older architecture's.

    So sm_88 has the rates of sm_87, and whatever is newer than the table those of its last entry;
    what is older than the table has those of its first. Processors and clock are the board's in the
    table: one with fewer has a larger share of the memory than this says.
    """
    older = [board for board in _BOARDS if number(board.gpu) <= number(gpu)]
    return older[-1].rates if older else _BOARDS[0].rates


def number(gpu: Gpu) -> int:
    """Of an architecture: 90 for "sm_90a"."""
    return int(gpu.architecture.removeprefix("sm_").rstrip("af"))
