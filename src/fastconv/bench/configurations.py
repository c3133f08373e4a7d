"""Which kernels a case would run, and how they would be launched: known without running them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastconv import jit
from fastconv.backends import cuda
from fastconv.bench import contestants
from fastconv.bench.cases import PASSES, STEP, Case, reason
from fastconv.kernels import planner
from fastconv.kernels.family import Gpu, Kernel, Launch, Operands, Plan

# Constants that say how a kernel works, rather than what on.
_CHOSEN = (
    "channels_per_thread", "inputs_per_thread", "lanes_y", "lanes_x", "lanes_m", "lanes_n",
    "warps", "warps_m", "warps_n", "warps_k", "stage_channels", "stage_taps", "part_taps",
    "block_taps", "stage_rows", "stage_columns", "vector", "vector_input", "vector_grad",
    "two_level", "flush_channels", "flush_stages", "flush_rows", "flush_units", "packed",
    "blocks_per_sm", "parts", "channel_groups", "stack", "pixels", "tile_rows", "tile_columns",
    "pitch", "lead", "staged", "raw_slots", "bulk_loads", "rolling", "segment_tiles", "k_steps",
    "input_stages", "weight_stages", "resident", "pass_pixels", "bulk_stores", "vector_loads",
    "vector_stores", "joint_stores", "wraps", "turns", "row_at", "column_at", "column_sums",
    "interleave", "out_fold_height", "out_fold_width", "rows", "columns", "channels", "slots",
    "lanes_c", "tap_rows", "tap_blocks", "splits", "inside",
)  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One way to compute one pass on one GPU."""

    direction: str
    plan: Plan

    def lines(self, explain: bool = False) -> list[str]:
        """For reading: a line for each launch; and for what the choice was made from."""
        scratch = f"{self.plan.scratch_bytes / 2**20:.1f} MiB of workspace"
        launches = dict.fromkeys(map(_describe, self.plan.launches))
        explanation = [f"    {line}" for line in self.plan.explanation] if explain else []
        head = f"{self.direction}: {self.plan.family}, {scratch} ({self.plan.why})"
        return [head, *launches, *explanation]

    def to_dict(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "family": self.plan.family,
            "why": self.plan.why,
            "explanation": self.plan.explanation,
            "scratch_bytes": self.plan.scratch_bytes,
            "launches": [
                {
                    "kernel": launch.kernel.entry,
                    "grid": launch.grid,
                    "block": launch.block,
                    "shared_bytes": launch.shared_bytes,
                    "constants": dict(launch.kernel.constants),
                }
                for launch in self.plan.launches
            ],
        }


def legal(case: Case, gpu: Gpu) -> list[Configuration]:
    """Every configuration that may compute the case, the one that would first of its pass."""
    directions = PASSES if case.direction == STEP else (case.direction,)
    return [_planned(case, direction, gpu) for direction in directions]


def attempt(case: Case, gpu: Gpu) -> tuple[list[Configuration], str | None]:
    """What :func:`legal` gives; or nothing, and why."""
    try:
        return legal(case, gpu), None
    except Exception as error:  # whatever it is, the other cases are worth having
        return [], reason(error)


def device_gpu(device: torch.device) -> Gpu | None:
    """What planning needs to know of the device; None if it is not a GPU."""
    if device.type != "cuda":
        return None
    return cuda.gpu(torch.cuda.current_device() if device.index is None else device.index)


def kernels(cases: Iterable[Case], gpu: Gpu) -> list[Kernel]:
    """All kernels that the cases need, each once; a case without a plan is left to its row."""
    needed: dict[Kernel, None] = {}
    for case in cases:
        with suppress(Exception):
            plans = [configuration.plan for configuration in legal(case, gpu)]
            needed |= {launch.kernel: None for plan in plans for launch in plan.launches}
    return list(needed)


def build_s(kernel: Kernel, gpu: Gpu) -> float:
    """Compiles a kernel unless it is on disk; seconds that took.

    One that does not compile is left for its row to report.
    """
    start = time.perf_counter()
    with suppress(jit.CompilationError, jit.GpuUnavailable):
        jit.build(kernel, gpu.architecture)
    return time.perf_counter() - start


def compile_seconds(case: Case, gpu: Gpu, seconds: dict[Kernel, float]) -> float:
    """What compiling the case's kernels took, one after the other."""
    return sum(seconds.get(kernel, 0.0) for kernel in kernels([case], gpu))


def operands(case: Case, tensors: Sequence[Tensor]) -> Operands:
    """How the tensors of :func:`roles` lie in memory."""
    return cuda.operands_of(
        case.torch_dtype,
        not tensors[0].is_contiguous(),
        not tensors[1].is_contiguous(),
        tensors[2].stride(),
        True,
        case.precision or "ieee",
    )


def roles(case: Case, direction: str) -> tuple[planner.Planner, Sequence[Tensor]]:
    """The planner of a pass, and the tensors whose layouts it asks for, without data."""
    at = case.tensors(torch.device("meta"))
    one = Case(case.workload, direction, case.dtype, case.precision, case.format)
    result: Tensor = contestants.ours(one)(at)
    if direction == "forward":
        return planner.forward, (at.input, result, at.weight)
    if direction == "input_grad":
        return planner.input_grad, (at.grad_output, result, at.weight)
    return planner.weight_grad, (at.input, at.grad_output, result)


def _planned(case: Case, direction: str, gpu: Gpu) -> Configuration:
    plan, tensors = roles(case, direction)
    return Configuration(direction, plan(case.workload.problem, operands(case, tensors), gpu))


def _describe(launch: Launch) -> str:
    constants = dict(launch.kernel.constants)
    chosen = " ".join(f"{name}={constants[name]}" for name in _CHOSEN if name in constants)
    return (
        f"  {launch.kernel.entry}: grid {'x'.join(map(str, launch.grid))}, block {launch.block}, "
        f"{launch.shared_bytes} bytes shared; {chosen}"
    )
