"""Plans for every NVIDIA GPU since Volta fit it, are made quickly, and compile.

No GPU is needed. ``make test-corpus`` plans many more problems.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import gcd, prod
from random import Random
from typing import Any

import pytest

import nvrtc as other_nvrtc
from effort import ALL, calls
from emulator import corpus
from emulator.pass_cases import PassCase
from fastconv.jit import compile
from fastconv.kernels import direct, gpus, planner
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.direct import limits
from fastconv.kernels.family import MOST_ROUNDS, Gpu, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Problem

Planner = Callable[[Problem, Operands, Gpu], Plan]
PASSES: dict[str, tuple[Planner, Planner]] = {
    "forward": (direct.forward, planner.forward),
    "input_grad": (direct.input_grad, planner.input_grad),
    "weight_grad": (direct.weight_grad, planner.weight_grad),
}
REGISTERS = 65536  # per SM
WORKSPACE = 64 << 20  # bytes, the most that an ordinary weight gradient takes


def _problem(input: tuple[int, ...], weight: tuple[int, ...], **more: Any) -> Problem:
    geometry = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1, **more}
    return Problem.of(input, weight, *geometry.values())


def _operands(problem: Problem, scalar: str = "float", scalar_bytes: int = 4) -> Operands:
    _, depth, height, width = problem.weight_shape
    strides = (depth * height * width, height * width, width, 1)
    return Operands(scalar, scalar_bytes, False, False, strides, True)


# --- Plans ----------------------------------------------------------------------------------------


DRAWN = int(os.environ.get("FASTCONV_PLANS", "80"))
MOST_CALLS = 1_000_000  # Bounds the function calls that plan a pass: about half a second.


@cache
def _drawn() -> list[PassCase]:
    draw = Random(os.environ.get("FASTCONV_CORPUS", "0"))
    return [corpus.drawn(draw) for _ in range(DRAWN)]


def _assert_fits(work: PassCase) -> None:
    """Grids, blocks, shared memory and workspace are what the GPU has and the layer is worth."""
    plan, gpu = work.plan, work.gpu
    assert len(plan.launches) <= 2 * MOST_ROUNDS
    for launch in plan.launches:
        constants = dict(launch.kernel.constants)
        assert launch.grid[1:] == (1, 1)
        assert launch.grid[0] in range(1, 2**31)
        assert launch.block in range(32, 1025, 32)
        assert launch.shared_bytes <= gpu.shared_bytes_per_block
        values = (*constants.values(), *launch.arguments)
        assert all(abs(value) < 2**31 for value in values if isinstance(value, int))
        if "blocks_per_sm" in constants and launch.shared_bytes > 0:
            blocks = constants["blocks_per_sm"]
            assert blocks in range(1, 9)
            assert int(blocks) * (launch.shared_bytes + 1024) <= gpu.shared_bytes_per_sm
    assert plan.scratch_bytes <= _most_workspace(work)


def _most_workspace(work: PassCase) -> float:
    """Twice the pass's tensors; or the partial sums of a split weight gradient; or packed weights.

    Weights are padded to MMAs of 64 channels, and to the taps of the longest residue.
    """
    problem = work.conv.problem
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    tensors = sum(map(prod, shapes)) * work.dtype.itemsize
    groups, (height, width) = problem.groups, problem.kernel_size
    channels = (round_up(problem.in_channels // groups, 64),
                round_up(problem.out_channels // groups, 64))  # fmt: skip
    parts = 5  # TF32 and scaled fp16 both pack two parts or more.
    packed = groups * channels[0] * channels[1] * 4 * (height + 8) * (width + 8) * parts
    return max(2 * tensors, WORKSPACE, packed)


def test_all_problems_are_planned() -> None:
    """Every problem is planned for every GPU, and no plan takes long."""
    slow = {}
    for number, drawn in enumerate(_drawn()):
        # Of two GPUs that are neighbours in the table, CI plans a problem for one.
        for gpu in list(GPUS.values()) if ALL else list(GPUS.values())[number % 2 :: 2]:
            sm_count = min(gpu.sm_count, drawn.gpu.sm_count)
            work = replace(drawn, gpu=replace(gpu, sm_count=sm_count))
            if (made := calls(lambda work=work: work.plan)) > MOST_CALLS:
                slow[corpus.line_of(work)] = made
            _assert_fits(work)
    assert slow == {}


def test_portable_sums_have_short_levels() -> None:
    """Each level of a sum loses digits with the square root of its length, or faster."""
    for drawn in _drawn():
        if drawn.direction == "weight_grad":
            continue
        for gpu in GPUS.values():
            work = replace(drawn, gpu=gpu, planner=PASSES[drawn.direction][0])
            c: dict[str, Any] = dict(work.plan.launches[-1].kernel.constants)
            terms = c["group_in"] * _residue_taps(c, "height") * _residue_taps(c, "width")
            first = terms
            if c["two_level"]:
                products = c["flush_channels"] * c["flush_rows"] * c["part_taps"]
                first = min(terms, products * c["flush_stages"])
            longest = max(first, terms / first)
            assert longest <= max(600, 1.5 * terms**0.5), (str(drawn), str(gpu), longest)


def _residue_taps(c: dict[str, Any], axis: str) -> int:
    """The most taps along an axis that an output has."""
    stride, dilation = c[f"stride_{axis}"], c[f"dilation_{axis}"]
    step = stride // gcd(stride, dilation) if c["transposed"] else 1
    return ceil_div(c[f"kernel_{axis}"], step)


def test_families_plan_for_their_gpus() -> None:
    """GPUs before Ampere have no tensor-core family, and only the H200 has Hopper's."""
    families = {gpu: Counter(replace(work, gpu=gpu).plan.family for work in _drawn()[:72])
                for gpu in GPUS.values()}  # fmt: skip
    for gpu, found in families.items():
        number = gpus.number(gpu)
        own = set() if number < 80 else {"hopper" if gpu is H200 else "ampere"}
        grouped = {"grouped"} if own else set()
        assert found.keys() <= {"depthwise", "direct"} | own | grouped, gpu
        assert all(found[family] >= 10 for family in own), (gpu, found)
        assert found["depthwise"] >= 1, (gpu, found)


def test_another_family_takes_nothing_on_hopper_unless_it_is_asked_for() -> None:
    line = "sm_90a/132 forward bfloat16 nchw/nchw: 8x64x64x64 64x64x3x3"
    assert corpus.case_of(line).plan.family == "hopper"
    with planner.only("ampere"):
        assert corpus.case_of(line).plan.family == "ampere"


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
    operands = _operands(problem, "fastconv::bfloat16", 2)
    for gpu in GPUS.values():
        assert calls(lambda gpu=gpu: direct.input_grad(problem, operands, gpu)) < 10_000
        plan = direct.input_grad(problem, operands, gpu)
        out_channels, depth, height, width = problem.weight_shape
        # Channels fill whole tiles here; a residue may have one tap more than another.
        assert plan.scratch_bytes <= out_channels * depth * (height + 1) * (width + 1) * 4
        dense = direct.input_grad(replace(problem, stride=(1, 1)), _operands(problem), gpu)
        taps = height * width
        assert plan.launches[-1].grid[0] <= taps * dense.launches[-1].grid[0]
        cleared = [launch for launch in plan.launches if launch.kernel.entry == "clear"]
        assert [launch.arguments for launch in cleared] == [("output", problem.batch)]


# --- What is too large ----------------------------------------------------------------------------


def test_more_blocks_than_a_grid_has() -> None:
    """Several launches share the images."""
    problem = _problem((2**20 + 5, 2048, 1, 1), (2048, 1, 1, 1), groups=2048)
    for plan_pass in (direct.forward, direct.input_grad):
        plan = plan_pass(problem, _operands(problem), GPUS["sm_80"])
        launches = [launch for launch in plan.launches if launch.kernel.entry == "convolve"]
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
LARGEST = {  # the largest sizes that kernels accept
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
    """Constants and arguments are 32-bit integers; compilers warn of those that overflow."""
    plan = plan_pass(problem, _operands(problem), H200)
    for launch in plan.launches:
        values = (*dict(launch.kernel.constants).values(), *launch.arguments)
        assert all(abs(value) < 2**31 for value in values if isinstance(value, int))
    log = other_nvrtc.compiled(plan.launches[0].kernel, H200.architecture).log
    assert not re.search("overflow|out of range|truncat", log)


# --- Compiled -------------------------------------------------------------------------------------


MOST_SPILLED = 64  # bytes per thread
# In weight gradients of few inputs and kernel rows of four taps, on small images, a thread reads
# all windows at once: these kernels are slower, but correct.
KNOWN_TO_SPILL = {"5x3x17x17 1x3x4x4 padding=1,2,1,2"}


@pytest.mark.parametrize("arch", GPUS)
def test_plans_compile_within_registers(arch: str) -> None:
    gpu, turn = GPUS[arch], list(GPUS).index(arch)
    faults = {}
    for number, (direction, (portable, _)) in enumerate(PASSES.items()):
        works = [work for work in _drawn() if work.direction == direction]
        # Two of one pass and one of each other, to take less time; in CI none of one pass.
        count = (1, 1, 2 if ALL else 0)[(turn + number) % len(PASSES)]
        for work in works[turn :: len(GPUS)][:count]:
            launches = replace(work, planner=portable, gpu=gpu).plan.launches
            launch = launches[0 if direction == "weight_grad" else -1]
            compiled = other_nvrtc.compiled(launch.kernel, arch)
            constants = dict(launch.kernel.constants)
            registers = compiled.registers
            assert registers is not None
            threads = launch.block * int(constants["blocks_per_sm"])
            found = f"{registers:4} registers {compiled.spill_bytes:5} spilled"
            print(f"{arch:8} {found} {work.conv.name}")
            spills = (compiled.spill_bytes or 0) > MOST_SPILLED
            expected = work.conv.name in KNOWN_TO_SPILL
            if registers * threads > REGISTERS or spills != expected:
                faults[compile.describe(launch.kernel)] = (registers, compiled.spill_bytes)
    assert faults == {}
