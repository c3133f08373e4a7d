"""The machine's own ceilings, measured in the same run, and which of them binds a row.

They also tell whether the machine has other work to do: :func:`doubts`.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from fastconv import jit
from fastconv.bench import products
from fastconv.bench.cases import DTYPES, STEP, Case
from fastconv.bench.contestants import settings
from fastconv.kernels.family import Plan
from fastconv.timing import synchronize

SAMPLES = 5
MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
HASHED_BYTES = 32 << 20  # by each thread: tens of milliseconds, many times a scheduler's turn
BUSY = 0.8  # threads that get less of the time that they want share their processors
UNSTEADY = 0.3  # a ceiling that changes by more from a run's beginning to its end is not one
MMA_FAMILY = "ampere"  # whose kernels multiply by mma.sync


@dataclass(frozen=True)
class Ceilings:
    """Measured: a large matrix product in each mode, and a copy (reading and writing).

    Beside them what ``mma.sync`` reaches, by what is multiplied: "tf32", "float16", "bfloat16".
    """

    tflops: dict[str, float]  # by mode
    copy_tb_s: float
    processor_share: float | None = None  # of the time that a CPU's threads want, what they get
    mma_tflops: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """What binds a case, and the least time that it leaves."""

    name: str  # "compute" or "memory", or "mma.sync" where that is slower than what others have
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
    share = _processor_share() if device.type == "cpu" else None
    return Ceilings(tflops, _copy(device), share, _mma_products(device))


def doubts(before: Ceilings | None, after: Ceilings | None) -> list[str]:
    """Sentences that say why a run's figures mean little, if they do: the machine was busy.

    Ceilings are measured before the first row and after the last. On a CPU, threads that compute
    at once tell directly whether they have the processors for themselves. On GPUs, and where the
    system's accounts do not show what others take, two measurements that differ tell of it.
    """
    measured = [ceilings for ceilings in (before, after) if ceilings is not None]
    shares = [c.processor_share for c in measured if c.processor_share is not None]
    found = []
    if shares and min(shares) < BUSY:
        found.append(
            f"this machine is busy: threads got {min(shares):.0%} of the processor time that they "
            "could use; times and speed-ups say little"
        )
    if before is not None and after is not None:
        found += [
            f"this machine's speed changed while it was measured: {what} {old:.3g} before, "
            f"{new:.3g} after; times and speed-ups say little"
            for what, old, new in _pairs(before, after)
            if abs(new - old) > UNSTEADY * max(old, new)
        ]
    return found


def _pairs(before: Ceilings, after: Ceilings) -> list[tuple[str, float, float]]:
    found = [
        (f"{prefix}{mode} TFLOP/s", old[mode], new[mode])
        for prefix, old, new in (
            ("", before.tflops, after.tflops),
            ("mma.sync ", before.mma_tflops, after.mma_tflops),
        )
        for mode in old
        if mode in new
    ]
    return [*found, ("copy TB/s", before.copy_tb_s, after.copy_tb_s)]


def limit(case: Case, ceilings: Ceilings) -> Limit:
    """Whether arithmetic or memory binds the case: every operand moved once, none recomputed."""
    flops, _ = work(case)
    return _binding("compute", flops / ceilings.tflops[case.mode] * 1e-9, case, ceilings)


def mma_limit(case: Case, ceilings: Ceilings, plans: Sequence[Plan]) -> Limit | None:
    """The same for kernels of ours that multiply by ``mma.sync``; ``plans`` are those of the case.

    None where no plan does, or where it was not measured what that reaches.
    """
    if not ceilings.mma_tflops or all(plan.family != MMA_FAMILY for plan in plans):
        return None
    flops, _ = work(case)
    rates = [_tflops(case, plan, ceilings) for plan in plans]
    compute_ms = sum(flops / len(plans) / rate for rate in rates) * 1e-9
    return _binding("mma.sync", compute_ms, case, ceilings)


def multiplied(plan: Plan, dtype: str) -> tuple[str, int]:
    """What tensor cores multiply in a plan, and how many such products make one of the layer's.

    Kernels that split float32 in two parts have three. Those that multiply it as float16 may have
    others beside them, for numbers that do not fit: these count for nothing.
    """
    constants = [dict(launch.kernel.constants) for launch in plan.launches]
    halves = [one for one in constants if one.get("halves")]
    parts = max(int(one.get("parts", 1)) for one in halves or constants)
    kind = "float16" if halves else {"float32": "tf32"}.get(dtype, dtype)
    return kind, 3 if parts > 1 else 1


def _tflops(case: Case, plan: Plan, ceilings: Ceilings) -> float:
    """Of the layer's own operations."""
    if plan.family != MMA_FAMILY:
        return ceilings.tflops[case.mode]
    kind, count = multiplied(plan, case.dtype)
    return ceilings.mma_tflops[kind] / count


def _binding(name: str, compute_ms: float, case: Case, ceilings: Ceilings) -> Limit:
    flops, moved = work(case)
    memory_ms = moved / ceilings.copy_tb_s * 1e-9
    return Limit(
        name if compute_ms >= memory_ms else "memory", max(compute_ms, memory_ms), flops, moved
    )


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


def _mma_products(device: torch.device) -> dict[str, float]:
    try:
        return products.measure(device, lambda run: _best(run, device))
    except (jit.CompilationError, jit.GpuUnavailable, jit.LaunchError):
        return {}  # rows will say what is wrong


def _copy(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source), device) * 1e-12


def _processor_share() -> float:
    """How much of the time a thread has a processor while as many as PyTorch's are at work."""
    data, count = bytes(HASHED_BYTES), torch.get_num_threads()
    ready = threading.Barrier(count)

    def work(_: int) -> tuple[float, float]:
        ready.wait()
        wall, used = time.perf_counter(), time.thread_time()
        hashlib.sha256(data)  # without the interpreter's lock, and each by itself
        return time.perf_counter() - wall, time.thread_time() - used

    with ThreadPoolExecutor(count) as threads:
        walls, uses = zip(*threads.map(work, range(count)), strict=True)
    return sum(uses) / sum(walls)


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
