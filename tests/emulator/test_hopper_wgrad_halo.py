"""Hopper's halo kernel for weight gradients on the CPU: every mode on small odd shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import corpus, isolated, precompile
from emulator import run as run_launches
from emulator.pass_cases import (
    SPECIAL_VALUES,
    Conv,
    PassCase,
    Planner,
    Tensors,
    check,
    check_special_values,
    float64,
    run,
    some,
)
from fastconv.kernels import hopper
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu, Kernel, Launch, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.wgrad_halo import plan as by_tiles
from fastconv.problem import Problem

# Few SMs, so that a block has several runs of steps.
GPU = replace(H200, sm_count=3)


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans with this kernel, even where it is not the fastest, and with float32 in TF32."""
    return by_tiles.plan(by_tiles.choose_tile(problem, operands, gpu, scaled_fp16=False), gpu)


def _in_stages_of(columns: int, scaled_fp16: bool = False, boxes: bool = False) -> Planner:
    """A planner with stages of ``columns`` columns, even where others are faster.

    With ``boxes``, each stage is one TMA box.
    """

    def accept(tile: by_tiles.Tile) -> bool:
        return tile.stage_columns == columns and (tile.grad_boxes or not boxes)

    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        tile = by_tiles.choose_tile(problem, operands, gpu, scaled_fp16=scaled_fp16, accept=accept)
        return by_tiles.plan(tile, gpu)

    return weight_grad


# Stages of so few columns that lanes copy them, and of enough columns for bulk copies.
BY_LANES, IN_BULK = _in_stages_of(16), _in_stages_of(32)
IN_BOXES = {
    (columns, scaled_fp16): _in_stages_of(columns, scaled_fp16, boxes=True)
    for columns, scaled_fp16 in product((16, 32, 64), (False, True))
}


# Data type, precision, and the largest relative error.
MODES = {
    "tf32": (torch.float32, "tf32", 5e-7),
    "ieee": (torch.float32, "ieee", 3e-7),
    "bfloat16": (torch.bfloat16, "ieee", 4e-3),
    "float16": (torch.float16, "ieee", 5e-4),
}
TOLERANCES = {(dtype, precision): tolerance for dtype, precision, tolerance in MODES.values()}

CONVS = (
    Conv("asymmetric", (2, 12, 9, 20), (70, 12, 5, 9), padding=(2, 2, 4, 4)),
    Conv("dilated", (1, 17, 15, 32), (40, 17, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
    Conv("rows not aligned", (5, 16, 12, 38), (130, 16, 3, 3)),
    Conv("columns not aligned", (1, 20, 9, 21), (64, 20, 3, 5), padding=(1, 1, 2, 2)),
    Conv("strided", (2, 16, 11, 37), (30, 16, 3, 3), stride=(2, 3), padding=(1, 1, 1, 1)),
    Conv("stride beyond the kernel", (1, 9, 20, 19), (16, 9, 2, 3), (5, 2), (3, 4, 0, 9), (1, 4)),
    Conv("stride and dilation share a factor", (1, 8, 21, 24), (9, 8, 3, 3), (4, 2), (3, 0, 1, 2),
         (2, 4)),
    Conv("pointwise", (1, 40, 9, 20), (72, 40, 1, 1)),
    Conv("small images", (9, 24, 7, 7), (40, 24, 3, 3), padding=(1, 1, 1, 1)),
    Conv("grouped", (1, 48, 9, 20), (32, 24, 3, 2), padding=(1, 0, 0, 1), groups=2),
    Conv("high kernel", (1, 9, 30, 16), (16, 9, 17, 1), padding=(3, 2, 0, 0)),
    Conv("wide kernel", (1, 8, 4, 56), (16, 8, 1, 33), padding=(0, 0, 16, 16)),
    Conv("wide image", (1, 8, 5, 300), (8, 8, 3, 3), padding=(1, 1, 1, 1)),
    Conv("rows shifted by pairs", (1, 9, 6, 68), (20, 9, 2, 3)),
    Conv("rows shifted", (1, 9, 4, 133), (20, 9, 2, 3)),
)  # fmt: skip
SHIFTED = CONVS[-1]
# Taps so far apart that an MMA has one, and the next lies beyond the strides of a wgmma matrix.
FAR_TAPS = Conv("taps far apart", (1, 8, 3, 4105), (8, 8, 1, 3), dilation=(1, 2050))


def _rows(width: int, images: int = 1) -> Conv:
    """A convolution with images of a multiple of 16 bytes, but output rows that are not."""
    name = f"rows of {width}" + (f" of {images} images" if images > 1 else "")
    return Conv(name, (images, 9, 7, width), (20, 9, 2, 3), padding=(1, 1, 1, 1))


# Copies of rows begin up to 7, 6 or 3 columns early. Row ends are copied by elements, by pairs or
# in float32, and the rest in whole units.
LEADS = (
    ("bfloat16", _rows(41), BY_LANES, True),
    ("float16", _rows(41), IN_BULK, True),
    ("bfloat16", _rows(37, images=9), IN_BULK, False),
    ("float16", _rows(42), BY_LANES, False),
    ("ieee", _rows(41), IN_BULK, True),
)


# TMA boxes in all types: whole rows, and pixels of consecutive rows. Planes begin at one, two, four
# or eight offsets from a multiple of 16 bytes (the last number), each of which has its own tile.
BOXES = (
    ("tf32", Conv("boxes", (6, 12, 5, 44), (70, 12, 2, 3), padding=(1, 0, 1, 1)), 32, 1),
    ("ieee", Conv("boxes that are cleared", (5, 9, 6, 40), (70, 9, 3, 3)), 16, 1),
    ("bfloat16", Conv("boxes of pairs of images", (10, 9, 4, 66), (24, 9, 1, 3)), 64, 1),
    ("float16", Conv("boxes of two classes", (8, 16, 12, 44), (136, 16, 3, 3)), 32, 2),
    ("bfloat16", Conv("boxes of eight", (8, 9, 7, 41), (24, 9, 1, 1)), 32, 8),
    ("tf32", Conv("boxes of four, of groups", (3, 18, 5, 42), (40, 9, 3, 2), groups=2), 32, 4),
)


def _case(
    conv: Conv,
    mode: str,
    channels_last: bool = False,
    aligned: bool = True,
    bias: bool = False,
) -> PassCase:
    dtype, precision, _ = MODES[mode]
    return PassCase(
        conv, weight_grad, dtype, channels_last, aligned, GPU, precision, bias_grad=bias
    )


def _cases() -> list[PassCase]:
    """Every convolution in every layout; modes and the gradient of the bias alternate."""
    modes = list(MODES)
    cases = []
    for i, conv in enumerate(CONVS):
        cases.append(_case(conv, modes[i % 4], bias=i % 2 == 0))
        cases.append(_case(conv, modes[(i + 1) % 4], channels_last=True, bias=i % 2 == 1))
    for i, mode in enumerate(modes):
        cases += [_case(CONVS[0], mode, aligned=False, bias=i % 2 == 0)]
        cases += [_case(CONVS[2], mode, bias=True), _case(SHIFTED, mode, bias=i % 2 == 1)]
        if mode in (
            "tf32",
            "float16",
        ):  # the other modes differ from these only as contiguous ones do
            cases += [_case(CONVS[2], mode, channels_last=True, bias=True)]
    cases.append(_case(FAR_TAPS, "bfloat16"))
    for mode, conv, planner, bias in LEADS:
        cases.append(replace(_case(conv, mode, bias=bias), planner=planner))
    return list(dict.fromkeys(cases))


CASES = _cases()
RUN = some(CASES, one_in=10)
BOX_CASES = [
    replace(_case(conv, mode, bias=i % 2 == 0), planner=IN_BOXES[columns, False])
    for i, (mode, conv, columns, _) in enumerate(BOXES)
]
CASES += BOX_CASES
RUN += BOX_CASES


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    assert_gradients(case)


def assert_gradients(case: PassCase) -> None:
    """Runs the pass on random tensors and compares its results with float64."""
    tensors = Tensors.random(case)
    bias = torch.full((case.conv.weight[0],), torch.nan, dtype=case.dtype)
    output = run(case, tensors, bias if case.bias_grad else None)
    error = _error(output, float64(case, tensors))
    assert error <= TOLERANCES[case.dtype, case.precision], f"relative error {error:.1e}"
    if case.bias_grad:
        # The gradient of the bias sums unrounded numbers, in TF32 too.
        pixels = tensors.grad_output.double().transpose(0, 1).flatten(1)
        error = _error(bias, pixels.sum(1))
        assert error <= TOLERANCES[case.dtype, "ieee"], f"relative error of the bias {error:.1e}"


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("mode", ["ieee", "bfloat16"])
def test_channels_keep_to_themselves(mode: str) -> None:
    """Neighbours that copies load with a row do not change results, not even as NaN."""
    case = _case(SHIFTED, mode, bias=MODES[mode][0] is torch.float32)
    assert case in CASES
    tensors = Tensors.random(case)
    bias = torch.zeros(case.conv.weight[0], dtype=case.dtype)
    expected = run(case, tensors, bias if case.bias_grad else None)
    poisoned = [5, 11]
    tensors.grad_output[:, poisoned] = torch.nan
    actual = run(case, tensors, bias if case.bias_grad else None)
    assert actual[poisoned].isnan().all()
    others = [i for i in range(case.conv.weight[0]) if i not in poisoned]
    assert torch.equal(actual[others], expected[others])


def put_special_values(tensor: Tensor, numbers: Sequence[float] = SPECIAL_VALUES) -> None:
    """Writes one value to the middle of each of the first channels."""
    row, column = tensor.shape[2] // 2, tensor.shape[3] // 2
    for channel, number in zip(range(tensor.shape[1]), numbers, strict=False):
        tensor[0, channel, row, column] = number


def shifted(mode: str) -> PassCase:
    kind = MODES[mode][:2]
    return next(
        case for case in CASES if case.conv == SHIFTED and (case.dtype, case.precision) == kind
    )


@pytest.mark.parametrize("mode", MODES)
def test_infinity_stays_where_it_is(mode: str) -> None:
    case = shifted(mode)
    tensors = Tensors.random(case)
    put_special_values(tensors.input, SPECIAL_VALUES[:3])
    tensors.grad_output[0, 7, 1, 65] = -torch.inf  # meets an infinity of the input
    check_special_values(case, tensors)


def test_special_values_in_the_gradient() -> None:
    case = shifted("ieee")
    tensors = Tensors.random(case)
    put_special_values(tensors.grad_output)
    check_special_values(case, tensors)


@pytest.mark.xfail(reason="the kernel multiplies columns beyond the output by zero", strict=True)
def test_infinity_at_the_border() -> None:
    """Without padding, only a few taps read the corner."""
    case = shifted("ieee")
    tensors = Tensors.random(case)
    tensors.input[0, 0, -1, -1] = torch.inf
    check_special_values(case, tensors)


def test_padding_far_beyond_the_image() -> None:
    """The offsets of rows that far in the padding would exceed 32 bits."""
    near = Conv("a row", (1, 64, 1, 1024), (8, 64, 1, 1), (1, 8))
    far = replace(near, stride=(2**15, 8), padding=(2**16, 0, 0, 0))
    case = _case(far, "ieee", channels_last=True)
    assert far.padding[0] * 1024 * 64 > 2**31
    assert far.problem.output_size == (3, 128)
    tensors = Tensors.random(case)
    tensors.grad_output[:, :, :2] *= 2.0  # their windows hold only padding
    alone = replace(tensors, grad_output=tensors.grad_output[:, :, 2:])
    assert _error(run(case, tensors), float64(replace(case, conv=near), alone)) <= 3e-7


SHARES = """
#include "hopper/wgrad_halo/tile.cuh"
extern "C" __global__ void shares(int* places, int workers, int batch) {
  for (int worker = 0; worker < workers; ++worker) {
    const fastconv::hopper::Share share(worker, workers, batch);
    places[4 * worker] = share.at.walk;
    places[4 * worker + 1] = share.at.step;
    places[4 * worker + 2] = share.end.walk;
    places[4 * worker + 3] = share.end.step;
  }
}
"""


def test_shares_of_more_than_32_bits(tmp_path: Path) -> None:
    """Each step belongs to one worker, and all workers have about as many steps."""
    conv = Conv("vast", (8, 1, 8_000_000, 130), (16, 1, 5, 10))
    case = replace(_case(conv, "tf32"), gpu=H200)
    launch = case.plan.launches[0]
    c: dict[str, Any] = dict(launch.kernel.constants)
    workers = launch.arguments[5]
    assert isinstance(workers, int)
    assert c["steps"] * c["strip_weight"] >= 2**31
    source = tmp_path / "shares.cuh"
    source.write_text(SHARES)
    shares = Kernel(str(source), "shares", launch.kernel.constants)
    places = torch.zeros(workers, 4, dtype=torch.int32)
    run_launches([Launch(shares, (1, 1, 1), 1, 0, ("places", workers, 8))], {"places": places})
    begins, ends = places.long().view(workers, 2, 2).unbind(1)
    strips = ceil_div(
        round_up(c["out_width"] + c["lead"], 8), c["strip_stages"] * c["stage_columns"]
    )
    assert strips > 1
    walks = ceil_div(8, c["interleaved_images"]) * strips
    assert begins[0].tolist() == [0, 0]
    assert ends[-1].tolist() == [walks, 0]
    assert torch.equal(begins[1:], ends[:-1])
    assert begins.min() >= 0
    assert begins[:, 0].max() < walks
    assert begins[:, 1].max() < c["steps"]
    steps = (ends - begins) @ torch.tensor([c["steps"], 1])
    assert 0 < steps.min() <= steps.max() < 2 * walks * c["steps"] / workers


def test_planes_beyond_32_bits_are_not_boxes() -> None:
    """A TMA box of eight planes addresses eight times the pixels of one plane."""
    operands = Operands("fastconv::bfloat16", 2, False, False, (8, 1, 1, 1), True)
    for height, expected in ((2**15 - 9, True), (2**15 + 1, False)):
        problem = Conv("vast", (8, 8, height, 2**13 + 1), (64, 8, 1, 1)).problem
        (*_, layer) = by_tiles._layers(problem, operands, None)
        assert layer.has_boxes == (layer.plane_classes == 8) == expected


def test_plane_classes() -> None:
    found = [dict(case.plan.launches[0].kernel.constants)["plane_classes"] for case in BOX_CASES]
    assert found == [classes for *_, classes in BOXES]


CLEARED = """
#include "hopper/wgrad_halo/copy.cuh"
extern "C" __global__ void cleared(int* others, int* columns) {
  using namespace fastconv;
  using namespace fastconv::hopper;
  for (int i = 0; i < 3 * kStageBytes; ++i) shared_memory()[i] = 1;
  unsigned char* const stage = shared_memory() + kStageBytes;
  clear_box(stage, {0, 0, 48, 8}, 0);
  *others = *columns = 0;
  for (int i = 0; i < 3 * kStageBytes; ++i) {
    const int row = i % kStageBytes / kRowBytes;
    const int column = (i % kRowBytes ^ swizzle_of(row)) / kScalarBytes;
    const bool of_stage = i / kStageBytes == 1 && column < 8;
    if (shared_memory()[i] == 0) ++(of_stage ? *columns : *others);
  }
}
"""


def test_a_stage_that_begins_beyond_its_row(tmp_path: Path) -> None:
    """The kernel fills it with zeros, and does not write to its neighbours in shared memory."""
    case = replace(_case(Conv("beyond", (4, 9, 4, 47), (20, 9, 1, 1)), "tf32"), gpu=H200)
    launch = replace(case, planner=IN_BOXES[16, False]).plan.launches[0]
    c: dict[str, Any] = dict(launch.kernel.constants)
    assert round_up(c["out_width"] + c["lead"], 8) == 56
    source = tmp_path / "cleared.cuh"
    source.write_text(CLEARED)
    cleared = Kernel(str(source), "cleared", launch.kernel.constants)
    found = {name: torch.zeros(1, dtype=torch.int32) for name in ("others", "columns")}
    stage = 64 * 4 * 64
    run_launches([Launch(cleared, (1, 1, 1), 1, 3 * stage, ("others", "columns"))], found)
    assert found["others"].item() == 0
    assert found["columns"].item() == stage // 32 // 64 * 8 * 4


# An arrival after copies (1) does not publish what the thread has written itself. The emulator's
# memory is not weak enough to show the fault, so this kernel records which arrivals a stage has.
ARRIVALS = """
#include "device/sm90.cuh"
static int arrivals;
#define barrier_arrive_after_copies(barrier) (arrivals = 10 * arrivals + 1)
#define barrier_expect_copies(barrier) (arrivals = 10 * arrivals + 2)
#define barrier_arrive(barrier) (arrivals = 10 * arrivals + 3)
#include "hopper/wgrad_halo/copy.cuh"
extern "C" __global__ void arrival(int* found) {
  fastconv::hopper::arrive_after_copies(nullptr);
  *found = arrivals;
}
"""


@pytest.mark.parametrize(
    ("mode", "width", "aligned", "expected"),
    [
        ("bfloat16", 41, True, 23),
        ("bfloat16", 41, False, 3),
        ("bfloat16", 42, True, 1),
        ("tf32", 41, True, 1),
    ],
    ids=["copies and writes", "writes", "copies of pairs", "copies"],
)
def test_arrival_after_copies_and_writes(
    mode: str, width: int, aligned: bool, expected: int, tmp_path: Path
) -> None:
    case = replace(_case(_rows(width), mode, aligned=aligned), planner=IN_BULK)
    source = tmp_path / "arrivals.cuh"
    source.write_text(ARRIVALS)
    arrival = Kernel(str(source), "arrival", case.plan.launches[0].kernel.constants)
    found = torch.zeros(1, dtype=torch.int32)
    run_launches([Launch(arrival, (1, 1, 1), 1, 0, ("found",))], {"found": found})
    assert found.item() == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scalar": "double", "scalar_bytes": 8}, "float64"),
    ],
)
def test_declines(changes: dict[str, object], reason: str) -> None:
    kind = {
        "scalar": "float", "scalar_bytes": 4, "input_channels_last": False,
        "output_channels_last": False, "weight_strides": (1, 1, 1, 1), "aligned": True,
    }  # fmt: skip
    with pytest.raises(Declined, match=reason):
        hopper.weight_grad(CONVS[0].problem, Operands(**{**kind, **changes}), GPU)  # type: ignore[arg-type]


# Stages of these convolutions are next to gradients of other channels: rows of a walk end beyond an
# image with an odd plane, or all groups together have as many output channels as a stage.
OF_OTHER_CHANNELS = [
    corpus.case_of(f"sm_90a/1 weight_grad*{line}")
    for line in (
        "1,3,3,1,3,4,16,1,4 tf32 nchw/nchw: 4x8x9x9 8x8x3x3 padding=2,2 dilation=2,2",
        "1,3,3,1,3,8,32,1,8 bfloat16 nchw/nchw: 8x8x11x29 16x8x3x3 padding=3,3 dilation=3,3",
        " bfloat16 nhwc/nhwc: 2x16x5x9 64x8x2x2 groups=2",
        "1,5,9,1,5,8,16,3,1 bfloat16 nhwc/nhwc: 1x16x7x20 64x8x5x9 padding=2,4 groups=2",
    )
]


@pytest.mark.parametrize("case", OF_OTHER_CHANNELS, ids=str)
def test_channels_of_others(case: PassCase) -> None:
    check(case)
    isolated.check(case)
