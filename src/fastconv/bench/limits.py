"""The machine's own ceilings, measured in the same run, and which of them binds a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fastconv.bench.cases import DTYPES, STEP, Case
from fastconv.bench.contestants import settings
from fastconv.bench.timing import synchronize

SAMPLES = 5
MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}


@dataclass(frozen=True)
class Ceilings:
    """Measured: a large matrix product in each mode, and a copy (reading and writing)."""

    tflops: dict[str, float]  # by mode
    copy_tb_s: float


@dataclass(frozen=True)
class Limit:
    """What binds a case, and the least time that it leaves."""

    name: str  # "compute" or "memory"
    ms: float
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Operations for each byte moved."""
        return self.flops / self.bytes


def measure(cases: Iterable[Case], device: torch.device) -> Ceilings:
    """The ceilings of all modes that the cases have."""
    modes = {case.mode: case for case in cases}
    tflops = {mode: _matrix_product(case, device) for mode, case in modes.items()}
    return Ceilings(tflops, _copy(device))


def limit(case: Case, ceilings: Ceilings) -> Limit:
    """Whether arithmetic or memory binds the case: every operand moved once, none recomputed."""
    flops, moved = work(case)
    compute_ms = flops / ceilings.tflops[case.mode] * 1e-9
    memory_ms = moved / ceilings.copy_tb_s * 1e-9
    name = "compute" if compute_ms >= memory_ms else "memory"
    return Limit(name, max(compute_ms, memory_ms), flops, moved)


def work(case: Case) -> tuple[int, int]:
    """Operations of the case, and the bytes that it cannot avoid to move.

    Each pass reads two tensors and writes the third. A training step is all three passes.
    """
    problem, passes = case.workload.problem, 3 if case.direction == STEP else 1
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    return passes * problem.flops, passes * elements * DTYPES[case.dtype].itemsize


def _matrix_product(case: Case, device: torch.device) -> float:
    side = MATRIX_SIDE[device.type]
    left, right = (
        torch.randn(side, side, device=device).to(case.torch_dtype) for _ in range(2)
    )  # fmt: skip
    with settings(case.precision):
        seconds = _best(lambda: left @ right, device)
    return 2 * side**3 / seconds * 1e-12


def _copy(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source), device) * 1e-12


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs."""
    run()
    times = []
    for _ in range(SAMPLES):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
