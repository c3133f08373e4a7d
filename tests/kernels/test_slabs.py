"""Copies of volumes are never larger than half an output, whatever the layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from random import Random

import pytest
import torch

from effort import ALL
from fastconv.backends import cuda
from fastconv.bench.kernel_passes import kernel_pass
from fastconv.kernels import planner
from fastconv.kernels.family import REGION_ALIGNMENT, Plan
from fastconv.kernels.gpus import H200
from fastconv.problem import Problem
from fastconv.workloads import VIDEO, VOLUME, Workload

MODES = {
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
}
PASSES = ("forward", "input_grad", "weight_grad")


def _planned(
    problem: Problem, direction: str, mode: str, channels_last: bool = False
) -> tuple[Problem, Plan]:
    """A pass as kernels see it, which may be one of images, and its plan."""
    dtype, precision = MODES[mode]
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    input, weight, output = (
        torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=layout)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    seen = cuda.seen_by_kernels(problem, input, weight, output)
    read, written = seen.input, seen.output
    if direction == "input_grad":
        read, written = written, read
    operands = cuda.operands_of(
        dtype,
        not read.is_contiguous(),
        not written.is_contiguous(),
        seen.weight.stride(),
        True,
        precision,
        direction == "weight_grad",
    )
    return seen.problem, getattr(planner, direction)(seen.problem, operands, H200)


def _copied_bytes(plan: Plan) -> int:
    return plan.scratch_bytes - min((region.offset for region in plan.regions), default=0)


def _most_copied(problem: Problem, direction: str, mode: str) -> float:
    """Half of what a forward pass writes, or of a gradient's layer's output.

    That is what an input gradient writes in a transposed layer, and what it reads in others; where
    that is more than twice as large, they are not told apart.
    """
    read, written = prod(problem.input_shape), prod(problem.output_shape)
    if direction == "forward":
        most = written
    elif direction == "input_grad":
        most = written if written > 2 * read else read
    else:
        most = read if read > 2 * written else written
    return most * MODES[mode][0].itemsize / 2 + REGION_ALIGNMENT


def _assert_small(problem: Problem, direction: str, mode: str, channels_last: bool) -> Plan:
    seen, plan = _planned(problem, direction, mode, channels_last)
    if plan.regions and seen.depth is not None:
        assert _copied_bytes(plan) <= _most_copied(seen, direction, mode), plan.why
    return plan


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workload", [*VIDEO, *VOLUME], ids=lambda one: one.name)
def test_copies_of_the_suites_layers(workload: Workload, mode: str) -> None:
    for direction, channels_last in ((d, last) for d in PASSES for last in (False, True)):
        of_kernels = kernel_pass(workload, direction)
        _assert_small(workload.problem, of_kernels, mode, channels_last)


def _random_problems(count: int) -> Iterator[Problem]:
    draw = Random(0)
    while count:
        kernel = [draw.choice((1, 2, 3, 3, 5)) for _ in range(3)]
        size = [draw.randrange(taps, draw.choice((12, 40, 100)) + taps) for taps in kernel]
        stride = [draw.choice((1, 1, 1, 2)) for _ in range(3)]
        sides = [draw.randrange(taps) for taps in kernel for _ in range(2)]
        dilation = [draw.choice((1, 1, 1, 2)) for _ in range(3)]
        groups = draw.choice((1, 1, 1, 2))
        inputs, outputs = (groups * draw.choice((3, 8, 16, 24, 32, 64, 96, 128)) for _ in range(2))
        batch = draw.choice((1, 2, 8))
        try:
            yield Problem.of(
                (batch, inputs, *size), (outputs, inputs // groups, *kernel), tuple(stride),
                tuple(sides), tuple(dilation), groups,
            )  # fmt: skip
        except RuntimeError:  # a dilated kernel beyond the volume
            continue
        count -= 1


def test_copies_of_random_layers() -> None:
    copying = 0
    for number, problem in enumerate(_random_problems(300 if ALL else 40)):
        mode = list(MODES)[number % len(MODES)]
        for direction in PASSES:
            copying += bool(_assert_small(problem, direction, mode, False).regions)
    assert copying > 10


@pytest.mark.parametrize("mode", ["tf32", "bfloat16"])
@pytest.mark.parametrize("name", ["r3d18_2", "videovae_96", "kb58", "kb70"])
def test_sums_do_not_depend_on_slabs(name: str, mode: str) -> None:
    """A volume alone, in other slabs than in a batch, adds up in the same order."""
    [workload] = (one for one in (*VIDEO, *VOLUME) if one.name == name)
    order = ("k_steps", "stage_taps", "stack", "rolling", "kernel_depth", "scaled_fp16", "parts")
    for direction in ("forward", "input_grad"):
        of_kernels, found = kernel_pass(workload, direction), set()
        for batch in (1, 2, 3, 8, 16):
            problem = replace(workload.problem, batch=batch)
            _, plan = _planned(problem, of_kernels, mode)
            found.add(
                tuple(
                    dict.fromkeys(
                        tuple(dict(launch.kernel.constants).get(name) for name in order)
                        for launch in plan.launches
                        if launch.kernel.entry == "convolve"
                    )
                )
            )
        assert len(found) == 1


def test_an_operand_is_not_copied_as_a_whole() -> None:
    """The layer for which half an output was exceeded first."""
    [workload] = (one for one in VIDEO if one.name == "videovae_96")
    for mode, count in (("tf32", 2), ("bfloat16", 4)):
        _, plan = _planned(workload.problem, "forward", mode)
        copies = [one for one in plan.launches if one.kernel.entry in ("copy", "transpose_slab")]
        assert len(copies) >= count
