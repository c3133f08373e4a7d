"""Offsets beyond 32 bits: pixels of large batches, and padding far from an image.

The emulator reports signed overflow, also of values that are not used. Functions that compute pixel
offsets are run by themselves, since a CPU cannot convolve that many images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from emulator import forced_plans, precompile, run_both_orders
from emulator.pass_cases import (
    ALL,
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_correct,
    new_output,
    run,
)
from fastconv.kernels import depthwise, direct
from fastconv.kernels.family import Gpu, Kernel, Launch, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.kernels.hopper.wgrad_few_inputs import plan as wgrad_few_inputs
from fastconv.problem import Problem

ONE = replace(H200, sm_count=1)
AMPERE = replace(GPUS["sm_80"], sm_count=1)


# --- Offsets of pixels ----------------------------------------------------------------------------

PLACES = """
#include "hopper/implicit_gemm_nhwc/store.cuh"
extern "C" __global__ void places(const int* flat, long long* place, int batch, int row,
                                  int column) {
  const fastconv::hopper::Tile tile = {0, 0, 0, row, column};
  place[threadIdx.x] = fastconv::hopper::place_of(flat[threadIdx.x], tile, batch);
}
"""


def _strided_gradient(batch: int) -> Plan:
    """The input gradient of a pointwise layer of stride 2: four pixels for each position."""
    problem = Problem.of((batch, 8, 256, 256), (64, 8, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1)
    operands = Operands("fastconv::bfloat16", 2, True, True, (8, 1, 8, 8), True)
    return forced_plans.Gemm("input_grad")(problem, operands, H200)


@pytest.mark.parametrize("batch", [3, 33000, 70000])
@pytest.mark.parametrize("residue", [(0, 0), (1, 1)], ids=str)
def test_places_of_pixels(batch: int, residue: tuple[int, int], tmp_path: Path) -> None:
    kernel = _strided_gradient(batch).launches[-1].kernel
    source = tmp_path / "places.cuh"
    source.write_text(PLACES)
    launch = Launch(
        replace(kernel, source=str(source), entry="places"),
        (1, 1, 1), 64, 0, ("flat", "place", batch, *residue),
    )  # fmt: skip
    of_image = 128 * 128
    last = batch * of_image
    flat = [last - 1, last, *(last * i // 61 + 77 * i for i in range(1, 61)), 0, 129]
    place = torch.zeros(len(flat), dtype=torch.int64)
    run_both_orders([launch], {"flat": torch.tensor(flat, dtype=torch.int32), "place": place})

    def expected(flat: int) -> int:
        image, row, column = flat // of_image, flat // 128 % 128, flat % 128
        pixel = (image * 256 + 2 * row + residue[0]) * 256 + 2 * column + residue[1]
        return pixel if image < batch else -1

    assert place.tolist() == [expected(one) for one in flat]


def test_wide_places_are_for_large_batches() -> None:
    def wide(batch: int) -> bool:
        constants = dict(_strided_gradient(batch).launches[-1].kernel.constants)
        return bool(constants["wide_places"])

    assert [wide(batch) for batch in (1, 32767, 32768, 70000)] == [False, False, True, True]


def test_wide_places_give_the_same_bits() -> None:
    conv = Conv("strided", (3, 24, 9, 7), (72, 24, 3, 3), (2, 2), (1, 1, 1, 1))
    case = PassCase(
        conv, forced_plans.Gemm("input_grad"), torch.bfloat16, channels_last=True, gpu=ONE
    )
    tensors = Tensors.random(case)
    (launch,) = case.plan.launches
    constants = {**dict(launch.kernel.constants), "wide_places": True}
    wide = replace(launch, kernel=replace(launch.kernel, constants=tuple(constants.items())))
    actual, read = new_output(case), {"input": tensors.grad_output, "weight": tensors.weight}
    run_both_orders([wide], {**read, "output": actual})
    assert actual.equal(run(case, tensors))


PACKED = """
#include "direct/forward/kernel.cuh"
extern "C" __global__ void offsets(const int* rows, long long* offset) {
  offset[threadIdx.x] = fastconv::convolve::packed_offset(0, 0, rows[threadIdx.x]);
}
"""


def test_places_of_packed_weights(tmp_path: Path) -> None:
    """Offsets in a kernel of 120 million taps, whose tile has twice the channels."""
    taps = 120_000_000
    problem = Problem.of((1, 1, taps + 17_000, 1), (17, 1, taps, 1), (1, 1), (0,) * 4, (1, 1), 1)
    operands = Operands("fastconv::bfloat16", 2, False, False, (taps, taps, 1, 1), True)
    constants = direct.forward(problem, operands, H200).launches[-1].kernel.constants
    source = tmp_path / "offsets.cuh"
    source.write_text(PACKED)
    kernel = Kernel(str(source), "offsets", constants)
    rows = torch.arange(32, dtype=torch.int32) * (taps // 32)
    offsets = torch.zeros(32, dtype=torch.int64)
    launch = Launch(kernel, (1, 1, 1), 32, 0, ("rows", "offsets"))
    run_both_orders([launch], {"rows": rows, "offsets": offsets})
    assert offsets.tolist() == [32 * row for row in rows.tolist()]
    assert offsets[-1] > 2**31


# --- Far beyond the image -------------------------------------------------------------------------


def _few_inputs(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return wgrad_few_inputs.plan(wgrad_few_inputs.layer_of(problem, operands, gpu), gpu)


_few_inputs.__name__ = "weight_grad"


def _row(channels: int, width: int, outputs: int, groups: int = 1) -> Conv:
    """A convolution of one row, with two output rows before it whose taps lie in the padding."""
    shapes = (1, channels, 1, width), (outputs, channels // groups, 1, 2)
    return Conv("a row", *shapes, (2**17, 8), (2**18, 0, 0, 0), groups=groups)


def _cases() -> Iterator[PassCase]:
    """All test cases, or the first few in CI."""

    def of(
        conv: Conv, planner: Planner, dtype: torch.dtype, last: bool = False, gpu: Gpu = ONE
    ) -> PassCase:
        return PassCase(conv, planner, dtype, last, gpu=gpu)

    gemm, single, half = forced_plans.Gemm("weight_grad"), torch.float32, torch.bfloat16
    yield of(_row(8, 8208, 16), gemm, single)
    yield of(_row(12, 704, 16), gemm, half, last=True)
    yield of(_row(4, 8208, 4, groups=4), depthwise.forward, single)
    if not ALL:
        return
    yield of(_row(3, 8208, 16), gemm, half)
    yield of(_row(1, 8208, 16), _few_inputs, single)
    yield of(_row(1, 8208, 16), _few_inputs, half)
    yield of(_row(64, 256, 16), forced_plans.Forced("forward"), half, last=True, gpu=AMPERE)
    yield of(_row(8, 8208, 16), forced_plans.Forced("forward"), single, gpu=AMPERE)
    yield of(_row(12, 704, 12, groups=12), depthwise.forward, half, last=True)
    for planner in (direct.forward, direct.weight_grad):
        yield of(_row(3, 8208, 4), planner, single)


CASES = [*_cases()]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [*CASES, *map(_taps_apart, DTYPES)]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_far_beyond_the_image(case: PassCase) -> None:
    """The offsets of rows that far in the padding would exceed 32 bits."""
    conv = case.conv
    row = conv.input[3] * (conv.input[1] if case.channels_last else 1)
    assert conv.padding[0] * row > 2**31
    near = replace(case, conv=replace(conv, stride=(1, 8), padding=(0, 0, 0, 0)))
    tensors = Tensors.random(case)
    actual = run(case, tensors)
    if case.direction == "forward":
        assert_correct(near, tensors, actual[:, :, 2:])
        assert actual[:, :, :2].equal(tensors.bias[:, None, None].expand_as(actual[:, :, :2]))
    else:
        alone = replace(tensors, grad_output=tensors.grad_output[:, :, 2:])
        assert_correct(near, alone, actual)


DTYPES = (torch.float32, torch.bfloat16)[: 1 + ALL]


def _taps_apart(dtype: torch.dtype) -> PassCase:
    """A kernel of three rows, of which only the middle one meets the image."""
    far = 1_040_000
    conv = Conv("far taps", (1, 8, 3, 2072), (64, 8, 3, 1), (1, 1), (far - 1, far - 1, 0, 0),
                (far, 1))  # fmt: skip
    return PassCase(conv, forced_plans.Gemm("weight_grad"), dtype, gpu=ONE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_taps_far_apart(dtype: torch.dtype) -> None:
    case = _taps_apart(dtype)
    conv = case.conv
    assert conv.dilation[0] * conv.input[3] > 2**31
    assert conv.problem.output_size == (1, conv.input[3])
    tensors = Tensors.random(case)
    actual = run(case, tensors)
    assert actual[:, :, ::2].eq(0).all()
    near = replace(case, conv=Conv("a row", (1, 8, 1, 2072), (64, 8, 1, 1)))
    alone = replace(tensors, input=tensors.input[:, :, 1:2], weight=tensors.weight[:, :, 1:2])
    assert_correct(near, alone, actual[:, :, 1:2])
