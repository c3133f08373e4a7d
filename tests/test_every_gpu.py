"""The portable kernels on every NVIDIA GPU since Volta: what is planned fits, and compiles.

No GPU is needed. ``make test-plans`` plans seventy times as many layers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest

import nvrtc as other_nvrtc
from fastconv import jit
from fastconv.jit import compile
from fastconv.kernels import direct, planner
from fastconv.kernels.direct import limits
from fastconv.kernels.family import Gpu, Kernel, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Problem
from layers import ordinary, weight_strides

Planner = Callable[[Problem, Operands, Gpu], Plan]
PASSES: dict[str, tuple[Planner, Planner]] = {
    "forward": (direct.forward, planner.forward),
    "input_grad": (direct.input_grad, planner.input_grad),
    "weight_grad": (direct.weight_grad, planner.weight_grad),
}
REGISTERS = 65536  # of a processor
WORKSPACE = 64 << 20  # of a weight gradient


def _problem(input: tuple[int, ...], weight: tuple[int, ...], **more: Any) -> Problem:
    geometry = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1, **more}
    return Problem.of(input, weight, *geometry.values())


def _operands(problem: Problem, scalar: str = "float", scalar_bytes: int = 4) -> Operands:
    return Operands(scalar, scalar_bytes, False, False, weight_strides(problem, False), True)


# --- Plans ----------------------------------------------------------------------------------------


def _assert_fits(plan: Plan, problem: Problem, operands: Operands, gpu: Gpu) -> None:
    """Grids, blocks, shared memory and workspace are what the GPU has and the layer is worth."""
    for launch in plan.launches:
        assert launch.grid[1:] == (1, 1)
        assert launch.grid[0] in range(1, 2**31)
        assert launch.block in range(32, 1025, 32)
        assert launch.shared_bytes <= gpu.shared_bytes_per_block
        if launch.kernel.entry in ("correlate", "weight_grad"):
            blocks = dict(launch.kernel.constants)["blocks_per_sm"]
            assert isinstance(blocks, int)
            assert blocks in range(1, 9)
            assert blocks * (launch.shared_bytes + 1024) <= gpu.shared_bytes_per_processor
    # Weights as they are read: padded to tiles, and each axis' taps to those of the longest phase.
    weights = problem.out_channels * problem.in_channels // problem.groups
    weights *= problem.kernel_size[0] * problem.kernel_size[1]
    packed = 64 * (weights + 64 * problem.groups) * operands.sum_bytes
    assert plan.scratch_bytes <= max(packed, WORKSPACE)


@pytest.mark.parametrize("which", PASSES)
def test_ordinary_layers_are_planned(which: str) -> None:
    portable, _ = PASSES[which]
    planned = 0
    for problem, operands in ordinary(every=3001):
        for gpu in GPUS.values():
            _assert_fits(portable(problem, operands, gpu), problem, operands, gpu)
            planned += 1
    assert planned > 1000


def test_other_gpus_than_hopper_get_these_plans() -> None:
    for problem, operands in islice(ordinary(every=3001), 50):
        for portable, any_family in PASSES.values():
            for gpu in GPUS.values():
                if gpu is not H200:
                    plan = any_family(problem, operands, gpu)
                    assert plan.launches == portable(problem, operands, gpu).launches


# --- Input gradients cost what their taps do ------------------------------------------------------

FEW_TAPS = {
    "pointwise": _problem((8, 2048, 56, 56), (512, 2048, 1, 1), stride=(8, 8)),
    "one output": _problem((8, 512, 4, 4), (512, 512, 3, 3), stride=(1000, 1000)),
    "one row of taps": _problem((8, 64, 64, 64), (64, 64, 1, 3), stride=(7, 11)),
    "a stride of millions": _problem((8, 64, 8, 8), (64, 64, 3, 3), stride=(10**7, 10**7)),
    "dilated": _problem((2, 64, 40, 90), (64, 64, 3, 3), stride=(6, 30), dilation=(4, 9)),
}


@pytest.mark.parametrize("problem", FEW_TAPS.values(), ids=FEW_TAPS)
def test_input_gradients_cost_what_their_taps_do(problem: Problem) -> None:
    for gpu in GPUS.values():
        start = time.thread_time()
        plan = direct.input_grad(problem, _operands(problem, "fastconv::bfloat16", 2), gpu)
        assert time.thread_time() - start < 0.1
        out_channels, depth, height, width = problem.weight_shape
        # Channels fill whole tiles here; of taps, a phase may have one more than another has.
        assert plan.scratch_bytes <= out_channels * depth * (height + 1) * (width + 1) * 4
        dense = direct.input_grad(replace(problem, stride=(1, 1)), _operands(problem), gpu)
        taps = height * width
        assert plan.launches[-1].grid[0] <= taps * dense.launches[-1].grid[0]
        cleared = [launch for launch in plan.launches if launch.kernel.entry == "clear"]
        assert [launch.arguments for launch in cleared] == [("output", problem.batch)]


# --- What is too large ----------------------------------------------------------------------------


def test_more_blocks_than_a_grid_has() -> None:
    """Several launches share out the images."""
    problem = _problem((2**20 + 5, 2048, 1, 1), (2048, 1, 1, 1), groups=2048)
    for plan_pass in (direct.forward, direct.input_grad):
        plan = plan_pass(problem, _operands(problem), GPUS["sm_80"])
        launches = [launch for launch in plan.launches if launch.kernel.entry == "correlate"]
        images = 0
        for launch in launches:
            first, count = launch.arguments[-2:]
            assert first == images
            assert launch.grid[0] == count * 2048 < 2**31
            images += count
        assert images == problem.batch
        assert len(launches) == 2


TOO_LARGE = {
    "batch": (_problem((2**31, 1, 1, 1), (1, 1, 1, 1)), "a batch below .*but got 2147483648"),
    "channels": (
        _problem((1, 2**31, 1, 1), (2**31, 1, 1, 1), groups=2**31), "input channels below .*",
    ),
    "padding": (
        _problem((1, 1, 4, 4), (1, 1, 1, 1), padding=(0, 0, 2**30, 2**30)),
        "a padded input width below 2147418112 .*but got 2147483652",
    ),
    "weight": (
        _problem((1, 1024, 2**11, 2**11), (1, 1024, 2**11, 2**11)),
        "a group's channels times taps below .*but got 4294967296",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "message"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_sizes_that_kernels_cannot_count_are_named(problem: Problem, message: str) -> None:
    for plan_pass in (direct.forward, direct.input_grad, direct.weight_grad):
        with pytest.raises(NotImplementedError, match=message):
            plan_pass(problem, _operands(problem), GPUS["sm_80"])


def test_more_blocks_in_an_image_than_a_grid_has() -> None:
    problem = _problem((1, 2**21, 2**13, 2**13), (2**21, 1, 1, 1), groups=2**21)
    with pytest.raises(NotImplementedError, match="blocks of one image below 2147418112"):
        direct.forward(problem, _operands(problem), GPUS["sm_80"])


MOST = limits.END - 1
LARGEST = {  # that are taken
    "batch": _problem((MOST, 1, 2, 2), (1, 1, 1, 1), stride=(10**12, 2**40), dilation=(2**40, 9)),
    "channels": _problem((1, MOST, 1, 1), (MOST, 1, 1, 1), groups=MOST),
    "height": _problem((1, 1, MOST, 1), (1, 1, 2, 1), dilation=(MOST // 2, 1), stride=(2**30, 1)),
    "padding": _problem((1, 1, 1, 1), (1, 1, 1, 3), padding=(0, 0, 0, MOST - 1), stride=(1, 2**30)),
    "width": _problem((1, 1, 1, MOST), (1, 1, 1, 3), dilation=(1, MOST // 3)),
    "weight": _problem((1, 2**15, 256, 255), (64, 2**15, 256, 255)),
}


@pytest.mark.parametrize("plan_pass", [portable for portable, _ in PASSES.values()])
@pytest.mark.parametrize("problem", LARGEST.values(), ids=LARGEST)
def test_kernels_can_hold_the_largest_sizes(problem: Problem, plan_pass: Planner) -> None:
    """All they are told are 32-bit ints; compilers refuse constants that overflow."""
    plan = plan_pass(problem, _operands(problem), H200)
    for launch in plan.launches:
        values = (*dict(launch.kernel.constants).values(), *launch.arguments)
        assert all(abs(value) < 2**31 for value in values if isinstance(value, int))
    log = _compiled(plan.launches[0].kernel, H200.architecture).log
    assert not re.search("overflow|out of range|truncat", log)


# --- Compiled -------------------------------------------------------------------------------------


@cache
def _volta() -> other_nvrtc.Nvrtc | None:
    path = other_nvrtc.find(12)
    return None if path is None else other_nvrtc.Nvrtc(path)


def _compiled(kernel: Kernel, arch: str) -> jit.Compiled:
    """With the last compiler that knows the architecture."""
    if arch != "sm_70":
        try:
            jit.nvrtc_version()
        except jit.GpuUnavailable as error:
            pytest.skip(str(error))
        return jit.compile_kernel(kernel, arch)
    nvrtc = _volta()
    if nvrtc is None:
        pytest.skip("needs NVRTC 12: pip install nvidia-cuda-nvrtc-cu12")
    headers, options = compile.included(kernel.text), compile._options(arch)
    return jit.Compiled(kernel.entry, *nvrtc.compile(kernel.text, headers, options))


COMPILED = 2  # of each pass and architecture
MOST_SPILLED = 64  # bytes of a thread


@pytest.mark.parametrize("arch", GPUS)
def test_plans_compile_within_registers(arch: str) -> None:
    gpu, turn = GPUS[arch], list(GPUS).index(arch)
    layers = list(ordinary(every=100_003))
    faults = {}
    for number, portable in enumerate(portable for portable, _ in PASSES.values()):
        for i in range(COMPILED):
            problem, operands = layers[(number * 8 + turn + 24 * i) % len(layers)]
            launch = portable(problem, operands, gpu).launches[-1 if number < 2 else 0]
            compiled = _compiled(launch.kernel, arch)
            constants = dict(launch.kernel.constants)
            registers = compiled.registers
            assert registers is not None
            threads = launch.block * int(constants["blocks_per_sm"])
            print(f"{arch:8} {registers:4} registers {compiled.spill_bytes:5} spilled {problem}")
            if registers * threads > REGISTERS or (compiled.spill_bytes or 0) > MOST_SPILLED:
                faults[compile.describe(launch.kernel)] = (registers, compiled.spill_bytes)
    assert faults == {}
