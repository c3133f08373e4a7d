"""The roofline: the machine's ceilings, measured in the same run, and which of them binds a case.

Ceilings that change during a run also show that the machine is busy with other work
(:func:`doubts`).
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from fastconv import jit, native
from fastconv.bench import mma_rate
from fastconv.bench.cases import DTYPES, STEP, Case
from fastconv.bench.contestants import settings
from fastconv.kernels.family import Plan
from fastconv.timing import synchronize

SAMPLES = 5  # A ceiling is the fastest of this many runs.
MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}
CPU_SECONDS = 0.5  # A ceiling of a CPU takes no further samples after this long.
CPU_SIDE = 256  # The first matrix on a CPU; larger ones follow while they take little time.
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
# Each thread hashes data for this long to measure its share of processor time: many times the time
# slice of a scheduler, and many ticks of systems that count a thread's time in steps of 10 ms.
SHARE_SECONDS = 0.25
HASHED_BYTES = 4 << 20  # A few milliseconds of work, during which the interpreter's lock is free.
BUSY = 0.8  # If threads get less than this share of processor time, the machine is busy.
CHANGED = 0.3  # If a ceiling changes by more than this share during a run, the machine is busy.
MMA_FAMILY = "ampere"  # The family of kernels that use the mma.sync instruction.
MATRIX_PRODUCTS = "matrix products"  # large ones by PyTorch
MULTIPLY_ADDS = "multiply-adds"  # of a CPU's registers, by the native library
RATE_SECONDS = 0.2  # A rate of multiply-adds is measured for this long.
COMPUTE = "compute"  # The name of the limit that a case's mode has.
WGMMA_FAMILY = "hopper"  # Its kernels use wgmma, as PyTorch's matrix products do on such GPUs.


@dataclass(frozen=True)
class Ceilings:
    """The highest measured rates of the machine: arithmetic, copies, ``mma.sync``."""

    tflops: dict[str, float]  # of what ``arithmetic`` says, by mode
    copy_tb_s: float  # of a large copy, bytes read and written
    processor_share: float | None = None  # the share of time that busy threads get; None on GPUs
    mma_tflops: dict[str, float] = field(default_factory=dict)  # by "tf32", "float16", "bfloat16"
    arithmetic: str = MATRIX_PRODUCTS  # what ``tflops`` were measured with


@dataclass(frozen=True)
class Limit:
    """The ceiling that binds a case, and the least time that it allows."""

    # "compute", "memory", or the MMAs of kernels that multiply otherwise than the mode says:
    # "mma.sync", "scaled fp16", "scaled fp16 x3", "TF32 x3"; "MMAs" if passes of a step differ.
    name: str
    ms: float
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations for each byte moved."""
        return self.flops / self.bytes


def measure(cases: Iterable[Case], device: torch.device) -> Ceilings:
    """Measures the machine's ceilings, in all modes that the cases have.

    On a GPU, float32 may also be multiplied as TF32 or float16: then these rates are measured, too.
    """
    modes = {case.mode: (case.torch_dtype, case.precision) for case in cases}
    if device.type == "cuda" and any(dtype is torch.float32 for dtype, _ in modes.values()):
        modes |= {"float32 tf32": (torch.float32, "tf32"), "float16": (torch.float16, None)}
    share = _processor_share() if device.type == "cpu" else None
    tflops = _multiply_add_tflops(modes) if device.type == "cpu" else None
    arithmetic = MATRIX_PRODUCTS if tflops is None else MULTIPLY_ADDS
    if tflops is None:
        tflops = {mode: _matrix_tflops(*how, device) for mode, how in modes.items()}
    return Ceilings(tflops, _copy_tb_s(device), share, _mma_tflops(device), arithmetic)


def doubts(before: Ceilings | None, after: Ceilings | None) -> list[str]:
    """Sentences that say why a run's figures mean little: the machine was busy.

    Ceilings are measured before the first row and after the last. On a CPU, the share of processor
    time that threads get shows directly whether other programs run. On GPUs, and where the
    operating system does not account for other programs' time, differing ceilings show it.
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
            if abs(new - old) > CHANGED * max(old, new)
        ]
    return found


def _pairs(before: Ceilings, after: Ceilings) -> list[tuple[str, float, float]]:
    """The ceilings that both measurements have: name, rate before and rate after."""
    found = [
        (f"{prefix}{mode} TFLOP/s", old[mode], new[mode])
        for prefix, old, new in (
            ("", before.tflops, after.tflops),
            ("mma.sync ", before.mma_tflops, after.mma_tflops),
        )
        for mode in old
        if mode in new and before.arithmetic == after.arithmetic
    ]
    return [*found, ("copy TB/s", before.copy_tb_s, after.copy_tb_s)]


def limit(case: Case, ceilings: Ceilings) -> Limit:
    """The case's roofline limit, if every operand is moved once and nothing is recomputed."""
    flops, _ = flops_and_bytes(case)
    return _binding(COMPUTE, flops / ceilings.tflops[case.mode] * 1e-9, case, ceilings)


def own_limit(case: Case, ceilings: Ceilings, plans: Sequence[Plan]) -> Limit | None:
    """The case's roofline limit if its ``plans`` multiply otherwise than the case's mode says.

    ``mma.sync`` has a ceiling of its own, float32 multiplied as scaled fp16 has float16's, and
    float32 in three MMAs a third of theirs. None if no plan does that, or if the ceilings that it
    takes were not measured.
    """
    flops, _ = flops_and_bytes(case)
    found = [_plan_ceiling(case, plan, ceilings) for plan in plans]
    names = {name for name, _ in found if name != COMPUTE}
    if not names:
        return None
    compute_ms = sum(flops / len(plans) / tflops for _, tflops in found) * 1e-9
    return _binding(names.pop() if len(names) == 1 else "MMAs", compute_ms, case, ceilings)


def multiplied(plan: Plan, dtype: str) -> tuple[str, int]:
    """The number format of a plan's MMAs, and how many of them it takes for one multiplication.

    Kernels that split float32 into two parts take three MMAs. A plan with scaled fp16 also has
    repair launches, for numbers out of float16's range; these are not counted.
    """
    constants = [dict(launch.kernel.constants) for launch in plan.launches]
    scaled_fp16 = [one for one in constants if one.get("scaled_fp16")]
    parts = max(int(one.get("parts", 1)) for one in scaled_fp16 or constants)
    kind = "float16" if scaled_fp16 else {"float32": "tf32"}.get(dtype, dtype)
    return kind, 3 if parts > 1 else 1


def _plan_ceiling(case: Case, plan: Plan, ceilings: Ceilings) -> tuple[str, float]:
    """The name and rate of the ceiling of a plan, counting the convolution's own operations."""
    by_mode = COMPUTE, ceilings.tflops[case.mode]
    kind, count = multiplied(plan, case.dtype)
    if plan.family == MMA_FAMILY and ceilings.mma_tflops:
        return "mma.sync", ceilings.mma_tflops[kind] / count
    if plan.family != WGMMA_FAMILY or case.dtype != "float32":
        return by_mode
    mode, name = ("float16", "scaled fp16") if kind == "float16" else ("float32 tf32", "TF32")
    if mode not in ceilings.tflops or (mode == case.mode and count == 1):
        return by_mode
    return name if count == 1 else f"{name} x{count}", ceilings.tflops[mode] / count


def _binding(name: str, compute_ms: float, case: Case, ceilings: Ceilings) -> Limit:
    """The limit of compute or of memory, whichever takes longer; ``name`` is that of compute."""
    flops, moved = flops_and_bytes(case)
    memory_ms = moved / ceilings.copy_tb_s * 1e-9
    return Limit(
        name if compute_ms >= memory_ms else "memory", max(compute_ms, memory_ms), flops, moved
    )


def flops_and_bytes(case: Case) -> tuple[int, int]:
    """The case's operations, and the bytes that it has to move.

    Each pass reads two tensors and writes the third. A training step is all three passes.
    """
    problem, passes = case.workload.problem, 3 if case.direction == STEP else 1
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    return passes * problem.flops, passes * elements * DTYPES[case.dtype].itemsize


def _matrix_tflops(dtype: torch.dtype, precision: str | None, device: torch.device) -> float:
    if device.type == "cpu":
        return _cpu_tflops(multiplied_in(dtype))
    side = MATRIX_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    with settings(precision):
        seconds = _best(lambda: left @ right, device)
    return 2 * side**3 / seconds * 1e-12


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """The type that a CPU's passes multiply numbers in: 16-bit ones in float32.

    A product of float16 matrices would take minutes where PyTorch has no kernel for it, and be no
    ceiling.
    """
    return torch.float32 if dtype.itemsize == 2 else dtype


def _multiply_add_tflops(
    modes: Mapping[str, tuple[torch.dtype, str | None]],
) -> dict[str, float] | None:
    """The rates of a CPU's multiply-adds; None without the native library, or for complex modes."""
    types = {mode: multiplied_in(dtype) for mode, (dtype, _) in modes.items()}
    if not all(dtype.is_floating_point for dtype in types.values()):
        return None
    rates = {one: native.multiply_add_rate(one, RATE_SECONDS) for one in {*types.values()}}
    found = {mode: rates[dtype] for mode, dtype in types.items()}
    return {mode: rate * 1e-12 for mode, rate in found.items() if rate is not None} or None


def _cpu_tflops(dtype: torch.dtype) -> float:
    """The rate of the largest matrix product that a slow CPU, too, computes in a short time."""
    device, side = torch.device("cpu"), min(CPU_SIDE, MATRIX_SIDE["cpu"])
    end = time.perf_counter() + CPU_SECONDS
    while True:
        left, right = (torch.randn(side, side, dtype=dtype) for _ in range(2))
        seconds = _best(partial(torch.matmul, left, right), device, end)
        # A product of twice the side takes eight times as long, and there are two runs at least.
        if side >= MATRIX_SIDE["cpu"] or time.perf_counter() + 16 * seconds > end:
            return 2 * side**3 / seconds * 1e-12
        side *= 2


def _mma_tflops(device: torch.device) -> dict[str, float]:
    try:
        return mma_rate.measure(device, lambda run: _best(run, device))
    except (jit.CompilationError, jit.GpuUnavailable, jit.LaunchError):
        return {}  # The rows will report what is wrong.


def _copy_tb_s(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source), device) * 1e-12


def _processor_share() -> float:
    """The share of time that a thread has a processor, while as many threads run as PyTorch's.

    It is at most 1: a system that counts threads' time in coarse steps may report more than passed.
    """
    data, count = bytes(HASHED_BYTES), torch.get_num_threads()
    ready = threading.Barrier(count)

    def hash_data(_: int) -> tuple[float, float]:
        ready.wait()
        wall, used = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < SHARE_SECONDS:
            hashlib.sha256(data)  # Releases the interpreter's lock: all threads run at once.
        return time.perf_counter() - wall, time.thread_time() - used

    with ThreadPoolExecutor(count) as threads:
        walls, uses = zip(*threads.map(hash_data, range(count)), strict=True)
    return min(sum(uses) / sum(walls), 1.0)


def _best(run: Callable[[], object], device: torch.device, end: float = math.inf) -> float:
    """Seconds of the fastest of :data:`SAMPLES` runs, after one to warm up.

    After the time ``end`` there are no further samples than the first.
    """
    run()
    times = []
    for _ in range(SAMPLES):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return min(times)
