"""The kernels that a case runs and how they are launched, found by planning, not by running."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastconv import jit
from fastconv.backends import cuda
from fastconv.backends.cpu import plans as cpu_plans
from fastconv.bench import contestants, kernel_passes
from fastconv.bench.cases import PASSES, STEP, Case, reason
from fastconv.kernels import planner
from fastconv.kernels.family import Gpu, Kernel, Launch, Operands, Plan
from fastconv.problem import Problem
from fastconv.workloads import workload_of

# Only these constants of a kernel are shown: they are choices of the planner, such as tile sizes,
# whereas the others follow from the problem.
_CHOSEN = (
    "channels_per_thread", "inputs_per_thread", "lanes_y", "lanes_x", "lanes_m", "lanes_n",
    "warps", "warps_m", "warps_n", "warps_k", "stage_channels", "stage_taps", "part_taps",
    "block_taps", "stage_rows", "stage_columns", "vector", "vector_input", "vector_grad",
    "two_level", "flush_channels", "flush_stages", "flush_rows", "flush_units", "packed",
    "blocks_per_sm", "parts", "channel_groups", "stack", "pixels", "tile_rows", "tile_columns",
    "pitch", "lead", "staged", "raw_slots", "bulk_loads", "rolling", "segment_tiles", "k_steps",
    "input_stages", "weight_stages", "resident", "pass_pixels", "bulk_stores", "vector_loads",
    "vector_stores", "joint_stores", "wraps", "turns", "row_at", "column_at", "stacked_columns",
    "interleave", "d2s_height", "d2s_width", "rows", "columns", "channels", "slots",
    "lanes_c", "tap_rows", "tap_blocks", "splits", "inside",
)  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """The plan of one pass on one GPU.

    It is the plan of the pass ``kernel_pass`` of the convolution ``problem``, a shape as text. It
    is the layer's own only if this is the layer (:mod:`.kernel_passes`).
    """

    direction: str
    plan: Plan
    kernel_pass: str
    problem: str
    is_own: bool

    def lines(self, explain: bool = False) -> list[str]:
        """The plan as text: a line for each launch and, with ``explain``, why it was chosen."""
        workspace = f"{self.plan.scratch_bytes / 2**20:.1f} MiB of workspace"
        launches = dict.fromkeys(map(_describe, self.plan.launches))
        explanation = [f"    {line}" for line in self.plan.explanation] if explain else []
        means = "" if self.is_own else f", computed as {self.kernel_pass} of {self.problem}"
        head = f"{self.direction}{means}: {self.plan.family}, {workspace} ({self.plan.why})"
        return [head, *launches, *explanation]

    def to_dict(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "kernel_pass": self.kernel_pass,
            "problem": self.problem,
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


def planned(case: Case, gpu: Gpu) -> list[Configuration]:
    """The configuration of each pass of the case: three for a training step, otherwise one."""
    directions = PASSES if case.direction == STEP else (case.direction,)
    return [_plan_pass(case, direction, gpu) for direction in directions]


def attempt(case: Case, gpu: Gpu) -> tuple[list[Configuration], str | None]:
    """The configurations of :func:`planned` and None; if planning fails, none and the reason."""
    try:
        return planned(case, gpu), None
    except Exception as error:  # One case must not stop the others, whatever is wrong.
        return [], reason(error)


def on_cpu(case: Case) -> list[str]:
    """How a CPU computes each pass of the case: a line for each."""
    directions = PASSES if case.direction == STEP else (case.direction,)
    is_last = any(one != torch.contiguous_format for one in case.memory_formats)
    found = []
    for direction in directions:
        which = kernel_passes.kernel_pass(case.workload, direction)
        plan = cpu_plans.plan(case.workload.problem, which, case.torch_dtype, channels_last=is_last)
        means = str(plan) if isinstance(plan, cpu_plans.CpuPlan) else f"matrix products ({plan})"
        found.append(f"{direction} on a CPU: {means}")
    return found


def device_gpu(device: torch.device) -> Gpu | None:
    """The device's properties that planning depends on; None if it is not a GPU."""
    if device.type != "cuda":
        return None
    return cuda.gpu(torch.cuda.current_device() if device.index is None else device.index)


def kernels(cases: Iterable[Case], gpu: Gpu) -> list[Kernel]:
    """All kernels that the cases run, each once.

    A case that cannot be planned is left out here: its row will report the error.
    """
    needed: dict[Kernel, None] = {}
    for case in cases:
        with suppress(Exception):
            plans = [configuration.plan for configuration in planned(case, gpu)]
            needed |= {launch.kernel: None for plan in plans for launch in plan.launches}
    return list(needed)


def build_s(kernel: Kernel, gpu: Gpu) -> float:
    """Compiles a kernel unless it is in the disk cache; returns the seconds that this took.

    A compilation error is not raised here: the kernel's row will report it.
    """
    start = time.perf_counter()
    with suppress(jit.CompilationError, jit.GpuUnavailable):
        jit.build(kernel, gpu.architecture)
    return time.perf_counter() - start


def compile_seconds(case: Case, gpu: Gpu, seconds: dict[Kernel, float]) -> float:
    """The sum of the compilation times of the case's kernels."""
    return sum(seconds.get(kernel, 0.0) for kernel in kernels([case], gpu))


def operands(case: Case, tensors: Sequence[Tensor]) -> Operands:
    """The memory layouts of the tensors of :func:`what_to_plan`, as planners take them."""
    return cuda.operands_of(
        case.torch_dtype,
        not tensors[0].is_contiguous(),
        not tensors[1].is_contiguous(),
        tensors[2].stride(),
        True,
        case.precision or "ieee",
    )


class Planned(NamedTuple):
    """What is planned for a pass: it may be a convolution of images where a layer has volumes."""

    plan: planner.Planner
    problem: Problem
    tensors: Sequence[Tensor]  # without data, in the roles of ``Operands``


def what_to_plan(case: Case, direction: str) -> Planned:
    """The planner of a pass, its problem, and tensors with the layouts of its operands.

    They are those of the layer's problem (:mod:`.kernel_passes`), as kernels see it.
    """
    layer = case.tensors(torch.device("meta"))
    one = Case(case.workload, direction, case.dtype, case.precision, case.format)
    result: Tensor = kernel_passes.as_images(contestants.ours(one)(layer))
    at = kernel_passes.of_problem(case.workload, layer)
    which, problem = kernel_passes.kernel_pass(case.workload, direction), case.workload.problem
    if which == "forward":
        seen = cuda.seen_by_kernels(problem, at.input, at.weight, result)
        return Planned(planner.forward, seen.problem, (seen.input, seen.output, seen.weight))
    if which == "input_grad":
        seen = cuda.seen_by_kernels(problem, result, at.weight, at.grad_output, transposed=True)
        return Planned(planner.input_grad, seen.problem, (seen.output, seen.input, seen.weight))
    seen = cuda.seen_by_kernels(problem, at.input, result, at.grad_output)
    return Planned(planner.weight_grad, seen.problem, (seen.input, seen.output, seen.weight))


def _plan_pass(case: Case, direction: str, gpu: Gpu) -> Configuration:
    plan, problem, tensors = what_to_plan(case, direction)
    workload = case.workload
    return Configuration(
        direction,
        plan(problem, operands(case, tensors), gpu),
        kernel_passes.kernel_pass(workload, direction),
        workload_of(problem).shape,
        workload_of(problem) == replace(workload, name=workload.shape),
    )


def _describe(launch: Launch) -> str:
    constants = dict(launch.kernel.constants)
    chosen = " ".join(f"{name}={constants[name]}" for name in _CHOSEN if name in constants)
    folder = launch.kernel.source.rpartition("/")[0]  # where docs/kernels has a page about it
    return (
        f"  {launch.kernel.entry} of {folder}: grid {'x'.join(map(str, launch.grid))}, "
        f"block {launch.block}, {launch.shared_bytes} bytes shared; {chosen}"
    )
