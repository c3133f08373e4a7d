"""Depthwise kernels on the CPU: every pass, type and layout on small odd shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from itertools import product
from random import Random

import pytest
import torch

from effort import ALL
from emulator import isolated, precompile
from emulator.pass_cases import (
    SCALARS,
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    assert_correct,
    assert_special_values,
    check,
    float64,
    is_taken,
    run,
    some,
)
from fastconv.kernels import depthwise
from fastconv.kernels.depthwise import passes
from fastconv.kernels.depthwise.layer import Layer
from fastconv.kernels.depthwise.rows.plan import LEAST_POSITIONS, LEAST_ROW_BYTES
from fastconv.kernels.depthwise.tiles import best
from fastconv.kernels.depthwise.toeplitz import plan as toeplitz
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

PASSES: tuple[Planner, ...] = (depthwise.forward, depthwise.input_grad, depthwise.weight_grad)
CONVS = (
    Conv("square", (3, 6, 12, 20), (6, 1, 3, 3), padding=(1, 1, 1, 1), groups=6),
    Conv("many channels", (2, 70, 7, 7), (70, 1, 7, 7), padding=(3, 3, 3, 3), groups=70),
    Conv("row of taps", (1, 4, 5, 40), (4, 1, 1, 21), padding=(0, 0, 10, 10), groups=4),
    Conv("column of taps", (1, 4, 40, 9), (4, 1, 21, 1), padding=(10, 10, 0, 0), groups=4),
    Conv("kernel beyond the image", (2, 8, 7, 7), (8, 1, 13, 13), padding=(6, 6, 6, 6), groups=8),
    Conv("long sums", (1, 2, 9, 11), (2, 1, 25, 27), padding=(12, 12, 13, 13), groups=2),
    Conv("strided", (2, 5, 14, 15), (5, 1, 5, 5), (2, 2), (2, 1, 2, 3), groups=5),
    Conv("strides differ", (1, 6, 13, 17), (6, 1, 3, 4), (4, 3), (1, 0, 2, 1), groups=6),
    Conv("stride beyond the kernel", (1, 4, 9, 10), (4, 1, 1, 2), (3, 4), (0, 0, 0, 1), groups=4),
    Conv("dilated", (1, 6, 14, 18), (6, 1, 3, 5), (1, 1), (2, 3, 6, 5), (2, 3), groups=6),
    Conv("dilated and strided", (1, 4, 15, 16), (4, 1, 3, 3), (2, 3), (1, 2, 3, 0), (4, 2),
         groups=4),
    Conv("multiplier", (2, 5, 9, 8), (15, 1, 3, 3), padding=(1, 1, 1, 1), groups=5),
    Conv("large multiplier", (1, 2, 5, 6), (80, 1, 2, 3), groups=2),
    Conv("narrow groups", (2, 12, 8, 12), (12, 4, 3, 3), padding=(1, 1, 1, 1), groups=3),
    Conv("groups of different widths", (1, 14, 9, 9), (6, 7, 3, 2), (1, 2), groups=2),
    Conv("wide image", (1, 3, 3, 530), (3, 1, 2, 3), padding=(0, 1, 1, 1), groups=3),
    Conv("one pixel", (2, 3, 1, 1), (3, 1, 1, 1), groups=3),
    Conv("rows longer than threads", (2, 3, 1, 787), (3, 1, 1, 4), padding=(0, 0, 3, 3), groups=3),
    Conv("one row of whole words", (2, 3, 1, 1024), (3, 1, 1, 4), padding=(0, 0, 3, 0), groups=3),
    Conv("one row of an odd length", (2, 3, 1, 1027), (3, 1, 1, 7), padding=(0, 0, 6, 6), groups=3),
    Conv("one row, many channels", (2, 66, 1, 75), (66, 1, 1, 5), padding=(0, 0, 9, 0), groups=66),
    Conv("one row of a stride's padding", (1, 3, 1, 1030), (3, 1, 1, 3), (2, 1), (1, 0, 1, 1),
         groups=3),
    Conv("one row, many tiles", (1, 2, 1, 9001), (2, 1, 1, 17), padding=(0, 0, 8, 8), groups=2),
    Conv("long rows in strides", (1, 2, 2, 801), (2, 1, 2, 5), (1, 2), (1, 1, 2, 2), groups=2),
    Conv("one column", (2, 4, 150, 1), (4, 1, 4, 3), (1, 1), (3, 0, 1, 1), groups=4),
    Conv("one column in strides", (1, 6, 83, 1), (6, 2, 5, 1), (3, 2), (2, 1, 0, 1), groups=3),
    Conv("two columns", (3, 5, 9, 2), (5, 1, 3, 3), padding=(1, 1, 1, 1), groups=5),
    Conv("three columns, dilated", (1, 4, 11, 3), (4, 1, 3, 3), (1, 1), (2, 2, 3, 3), (2, 3),
         groups=4),
)  # fmt: skip


def _cases() -> list[PassCase]:
    cases = []
    for i, conv in enumerate(CONVS):
        for j, planner in enumerate(PASSES):
            for channels_last in (False, True):
                bias = planner is depthwise.weight_grad and (i + j) % 2 == 0
                case = PassCase(conv, planner, channels_last=channels_last, bias_grad=bias)
                dtype = list(SCALARS)[(i + j) % len(SCALARS)]
                gpu = replace(GPUS[("sm_70", "sm_86", "sm_100a")[i % 3]], sm_count=1 + i % 2)
                cases.append(case)
                cases.append(replace(case, dtype=dtype, gpu=gpu, aligned=(i + j) % 3 != 0))
    return list(filter(is_taken, dict.fromkeys(cases)))


# Kernels as Toeplitz (banded) matrices, on tensor cores.
TOEPLITZ = (
    Conv("large kernel", (2, 8, 12, 16), (8, 1, 31, 31), padding=(15, 15, 15, 15), groups=8),
    Conv("large kernel, odd image", (3, 8, 9, 19), (8, 1, 17, 27), padding=(8, 7, 13, 12),
         groups=8),
    Conv("strips and products of several tiles", (1, 4, 40, 75), (4, 1, 31, 15),
         padding=(3, 0, 5, 7), groups=4),
)  # fmt: skip


def _with_toeplitz(planner: Planner) -> Planner:
    """A planner with Toeplitz matrices, even where CUDA cores would be faster."""

    @wraps(planner)
    def plan(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        layer = Layer.of(problem, operands, transposed=planner is depthwise.input_grad)
        return passes.plan(layer, best(toeplitz.tiles(layer, gpu), gpu), gpu)

    return plan


def _toeplitz_cases() -> list[PassCase]:
    """All passes and types, in an order in which every other test case still has them all."""
    cases = []
    planners = [_with_toeplitz(planner) for planner in PASSES[:2]]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for channels_last, planner, dtype, conv in product((False, True), planners, dtypes, TOEPLITZ):
        gpu = replace(GPUS["sm_80"], sm_count=2) if dtype == torch.float16 else H200
        cases.append(PassCase(conv, planner, dtype, channels_last, gpu=gpu))
    return cases


CASES = _cases()
TOEPLITZ_CASES = _toeplitz_cases()
RUN = [*some(CASES, one_in=14), *some(TOEPLITZ_CASES, one_in=5)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed: int) -> None:
    check(_drawn(Random(seed)))


@pytest.mark.parametrize("seed", range(80 if ALL else 10))
def test_random_rows(seed: int) -> None:
    case = _drawn_row(Random(seed))
    assert case.plan.launches[0].kernel.source.startswith("depthwise/rows/")
    check(case)
    isolated.check(case)


def _drawn_row(draw: Random) -> PassCase:
    """Draws a pass of a depthwise layer of one row that is long enough for kernels of its own."""
    while True:
        dtype, last = draw.choice(list(SCALARS)), draw.random() < 0.4
        least = LEAST_POSITIONS if last else LEAST_ROW_BYTES // dtype.itemsize
        taps = draw.choice((1, 2, 3, 4, 4, 5, 9, 16, 17, 31, 64))
        length = draw.choice((least + draw.randint(0, 70), 8 * least, draw.randint(least, 2000)))
        sides = (draw.randint(0, taps + 2), draw.randint(0, taps + 2))
        padding = draw.choice(((taps - 1, 0), (taps - 1, taps - 1), (0, 0), sides))
        channels = draw.choice((2, 3, 8, 33, 40, 66, 130)) if last else draw.choice((2, 3, 5))
        if length + sum(padding) - (taps - 1) < least:
            continue
        planner = draw.choice(PASSES)
        has_epilogue = planner is depthwise.forward and draw.random() < 0.5
        return PassCase(
            Conv("drawn", (draw.randint(1, 3), channels, 1, length), (channels, 1, 1, taps),
                 padding=(0, 0, *padding), groups=channels),
            planner,
            dtype,
            channels_last=last,
            aligned=draw.random() < 0.75,
            gpu=replace(GPUS[draw.choice(("sm_70", "sm_86", "sm_90a"))], sm_count=2),
            bias=draw.random() < 0.6,
            bias_grad=planner is depthwise.weight_grad and draw.random() < 0.6,
            epilogue=Epilogue("silu", residual=True) if has_epilogue else NO_EPILOGUE,
        )  # fmt: skip


def _drawn(draw: Random) -> PassCase:
    while True:
        groups, group_in = draw.choice((2, 3, 8, 33, 66)), draw.choice((1, 1, 1, 2, 4, 7))
        group_out = draw.choice((1, 1, 2, 5) if group_in == 1 else (group_in, 1, 3))
        kernel = draw.choice(((1, 1), (3, 3), (5, 4), (7, 7), (1, 9), (11, 2), (13, 13)))
        size = (draw.randint(1, 30), draw.randint(1, 40))
        padding = (*(draw.randint(0, kernel[0]) for _ in "tb"),
                   *(draw.randint(0, kernel[1]) for _ in "lr"))  # fmt: skip
        stride = draw.choice(((1, 1), (1, 1), (2, 2), (3, 1), (2, 4)))
        dilation = draw.choice(((1, 1), (1, 1), (2, 1), (3, 2)))
        conv = Conv(
            "drawn",
            (draw.randint(1, 3), groups * group_in, *size),
            (groups * group_out, group_in, *kernel),
            stride,
            padding,
            dilation,
            groups,
        )
        spans = (dilation[0] * (kernel[0] - 1), dilation[1] * (kernel[1] - 1))
        padded = (size[0] + sum(padding[:2]), size[1] + sum(padding[2:]))
        if padded[0] <= spans[0] or padded[1] <= spans[1]:
            continue
        case = PassCase(
            conv,
            draw.choice(PASSES),
            draw.choice(list(SCALARS)),
            channels_last=draw.random() < 0.5,
            aligned=draw.random() < 0.8,
            gpu=replace(draw.choice((H200, GPUS["sm_75"])), sm_count=draw.choice((1, 132))),
        )
        if conv.problem.flops < 2e6 and is_taken(case):
            return case


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("planner", [depthwise.forward, depthwise.weight_grad])
def test_infinity_stays_where_it_is(planner: Planner, channels_last: bool) -> None:
    """Neither pixels beyond the image nor taps beyond the kernel meet the infinity."""
    conv = Conv("infinite", (1, 2, 5, 11), (2, 1, 2, 3), stride=(2, 2), groups=2)
    case = PassCase(conv, planner, channels_last=channels_last)
    tensors = Tensors.random(case)
    tensors.input[0, 0, 4, 10] = torch.inf  # only the last output pixel reads it
    actual, expected = run(case, tensors), float64(case, tensors)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case", [case for case in TOEPLITZ_CASES if case.conv is TOEPLITZ[0]], ids=str
)
def test_toeplitz_infinity_changes_no_other_bit(case: PassCase) -> None:
    """Even though the zeros of a Toeplitz matrix multiply neighbouring pixels."""
    tensors = Tensors.random(case)
    without = run(case, tensors)
    read = tensors.input if case.direction == "forward" else tensors.grad_output
    read[0, 0, 0, 0], read[1, 3, 11, 15], read[1, 7, 11, 0] = torch.inf, -torch.inf, torch.nan
    actual, expected = run(case, tensors), float64(case, tensors)
    seen = ~expected.isfinite()
    assert 0 < seen.sum() < seen.numel() / 4
    assert torch.equal(actual[~seen], without[~seen])
    torch.testing.assert_close(actual[seen].double(), expected[seen], equal_nan=True)


# Exponents of two, one for each image and each channel. No result mixes two of them.
INPUT_SIZES = (-140, -127, -114, -97, -60, -53, -50, 0, 60, 100)
WEIGHT_SIZES = (-140, -127, -114, -96, -53, 0, 96, 120)


def _long_rows(planner: Planner, channels_last: bool) -> PassCase:
    conv = Conv("3x31", (len(INPUT_SIZES), len(WEIGHT_SIZES), 9, 21), (len(WEIGHT_SIZES), 1, 3, 31),
                padding=(1, 1, 15, 15), groups=len(WEIGHT_SIZES))  # fmt: skip
    return PassCase(conv, _with_toeplitz(planner), channels_last=channels_last, bias=False)


LONG_ROWS = [_long_rows(*kind) for kind in product(PASSES[:2], (False, True))]


def _read(case: PassCase, tensors: Tensors) -> torch.Tensor:
    return tensors.input if case.direction == "forward" else tensors.grad_output


@pytest.mark.parametrize("case", LONG_ROWS, ids=str)
def test_toeplitz_numbers_of_any_size_keep_their_bits(case: PassCase) -> None:
    """Low parts may be below TF32's smallest number, and intermediate results must not overflow."""
    tensors = Tensors.random(case)
    read, weight = _read(case, tensors), tensors.weight
    read.mul_(2.0 ** torch.tensor(INPUT_SIZES).double().reshape(-1, 1, 1, 1))
    weight.mul_(2.0 ** torch.tensor(WEIGHT_SIZES).double().reshape(-1, 1, 1, 1))
    magnitudes = Tensors(*(tensor.abs() for tensor in vars(tensors).values()))
    among = float64(case, magnitudes) < torch.finfo(torch.float32).max
    assert among.sum() > 0.7 * among.numel()
    assert_correct(case, tensors, run(case, tensors), among=among)


@pytest.mark.parametrize("case", LONG_ROWS, ids=str)
def test_toeplitz_small_numbers_keep_their_bits_beside_large_ones(case: PassCase) -> None:
    """Large and small numbers share an input tile or a channel's weights, but not a result."""
    tensors = Tensors.random(case)
    read, weight = _read(case, tensors), tensors.weight
    exponents = torch.randint(-140, 20, weight.shape)
    weight.mul_(2.0 ** exponents.double())
    read.zero_()
    for image, (row, column) in enumerate(product((0, 4, 8), (0, 9, 20))):
        read[image, :, row, column] = 1.0
    read[9].normal_().mul_(2.0 ** torch.randint(-140, 20, read[9].shape).double())
    assert_correct(case, tensors, run(case, tensors))


@pytest.mark.parametrize("case", LONG_ROWS, ids=str)
def test_toeplitz_an_infinite_weight_gives_infinities(case: PassCase) -> None:
    """Also where the low part of an input has the opposite sign."""
    tensors = Tensors.random(case)
    read, weight = _read(case, tensors), tensors.weight
    read.mul_(2.0 ** torch.tensor((0, -60)).repeat(len(INPUT_SIZES) // 2).reshape(-1, 1, 1, 1))
    weight[1, 0, 1, 15] = torch.inf
    assert_special_values(case, tensors, run(case, tensors))


def test_kernel_rows_that_blocks_do_not_share_evenly() -> None:
    """Four blocks have room for 28 kernel rows, but there are only 25."""
    conv = Conv("tall", (40, 2, 1, 1), (2, 1, 25, 60), padding=(12, 12, 30, 29), groups=2)
    case = PassCase(conv, depthwise.weight_grad, gpu=replace(H200, sm_count=1))
    constants = dict(case.plan.launches[0].kernel.constants)
    assert (constants["tap_rows"], constants["tap_blocks"]) == (1, 4)
    check(case)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
def test_an_image_alone_gives_the_same_bits(channels_last: bool) -> None:
    for planner in PASSES[:2]:
        assert_alone_as_in_batch(PassCase(CONVS[1], planner, channels_last=channels_last))
    for case in some(TOEPLITZ_CASES, one_in=4):
        if case.conv is TOEPLITZ[1] and case.channels_last == channels_last:
            assert_alone_as_in_batch(case)
