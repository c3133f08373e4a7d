"""Ampere's halo kernel on the CPU: every mode, layout and branch, on small odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
import torch

from emulator import corpus, isolated, precompile
from emulator.pass_cases import (
    LARGE,
    SPECIAL_VALUES,
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    assert_correct,
    at_corners,
    check,
    check_special_values,
    in_batch,
    run,
    some,
)
from fastconv.kernels.ampere.halo import plan as halo
from fastconv.kernels.ampere.halo.layer import Layer
from fastconv.kernels.ampere.halo.tiles import TEAMS, Tile
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.gpus import GPUS
from fastconv.kernels.planning.layers import forward_ways, input_grad_ways
from fastconv.problem import Problem

# Few SMs, so that a block takes several tiles.
FEW = replace(GPUS["sm_80"], sm_count=2)
LITTLE = replace(GPUS["sm_86"], sm_count=1)  # also with little shared memory

MODES = {
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
    "float16": (torch.float16, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
}

Choice = Callable[[Tile], bool]


def _ways(direction: str, problem: Problem, operands: Operands) -> list[list[Layer]]:
    layer = Layer.of(problem, operands)
    if direction == "forward":
        return forward_ways(layer)
    return input_grad_ways(layer, problem, most_together=1)


def planner_of(direction: str, choice: Choice | None = None, scaled_fp16: bool = False) -> Planner:
    """A planner with the best tile that ``choice`` accepts, even where other kernels are faster."""

    def planner(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        ways = [
            way for way in _ways(direction, problem, operands) if way[0].scaled_fp16 == scaled_fp16
        ]

        def tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
            found = halo.fitting_tiles(layer, gpu)
            return tuple(one for one in found if choice is None or choice(one)) or found

        return halo.plan(ways, gpu, tiles)

    planner.__name__ = direction
    return planner


def _case(direction: str, conv: Conv, mode: str, **options: Any) -> PassCase:
    dtype, precision = MODES[mode]
    options.setdefault("gpu", FEW)
    choice, scaled_fp16 = options.pop("choice", None), options.pop("scaled_fp16", False)
    planner = planner_of(direction, choice, scaled_fp16)
    return PassCase(conv, planner, dtype=dtype, precision=precision, **options)


def _forward(conv: Conv, mode: str, **options: Any) -> PassCase:
    return _case("forward", conv, mode, **options)


def _input_grad(conv: Conv, mode: str, **options: Any) -> PassCase:
    return _case("input_grad", conv, mode, **options)


def _streamed(tile: Tile) -> bool:
    """Whether weights stream through pipeline stages."""
    return not tile.resident


def _of(warps: int, loaders: int, rows: int, pixels: int, groups: int) -> Choice:
    wanted = (warps, loaders, rows, pixels, groups)
    of_team = attrgetter("warps", "loaders", "register_tile_m", "pixels", "channel_groups")
    return lambda tile: wanted == of_team(tile.team)


EVERYWHERE = Conv(
    "everywhere", (2, 24, 9, 21), (72, 24, 3, 5), padding=(1, 1, 2, 2), dilation=(2, 1)
)
STRIDED = Conv("strided", (2, 24, 11, 16), (24, 24, 3, 3), (2, 2), (1, 1, 1, 1))
POINTWISE = Conv("pointwise", (2, 72, 8, 16), (40, 72, 1, 1))
DEEP = Conv("many channels", (1, 150, 6, 10), (140, 150, 3, 3), padding=(1, 1, 1, 1))
GROUPED = Conv("grouped", (2, 20, 6, 13), (40, 10, 3, 3), padding=(1, 1, 1, 1), groups=2)
FIRST = Conv("first layer", (1, 3, 23, 23), (24, 3, 7, 7), (4, 4), (2, 2, 2, 2))
WIDE = Conv("wide", (1, 20, 5, 101), (64, 20, 3, 3), padding=(1, 1, 1, 1))
ALIGNED = Conv("aligned", (1, 20, 5, 96), (64, 20, 3, 3), padding=(1, 1, 1, 1))
TINY = Conv("one pixel", (1, 1, 1, 1), (1, 1, 1, 1))

# All kinds of 3xTF32 sums: with products of two low parts, without them, and compensated.
SPLIT = [
    _forward(Conv("short sums", (1, 8, 8, 9), (16, 8, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    _forward(Conv("of ordinary length", (1, 24, 7, 11), (16, 24, 3, 3)), "ieee"),
    _forward(Conv("long sums", (1, 240, 5, 7), (16, 240, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
]

CASES = [
    *(_forward(EVERYWHERE, mode, channels_last=last, other_format=other)
      for mode, last, other in product(MODES, (False, True), (False, True))
      if not other or mode == ("tf32" if last else "bfloat16")),
    *(_input_grad(EVERYWHERE, mode, channels_last=mode in ("ieee", "float16")) for mode in MODES),
    *(_forward(EVERYWHERE, mode, aligned=False, channels_last=mode == "float16")
      for mode in ("tf32", "float16")),
    # Weights stream through pipeline stages: little shared memory, many groups of channels.
    *(_forward(DEEP, mode, gpu=LITTLE, choice=_streamed, channels_last=mode == "bfloat16")
      for mode in MODES),
    _input_grad(DEEP, "tf32", gpu=LITTLE),
    # Every tile of a warp and of a block.
    *(_forward(conv, mode, choice=_of(*shape), channels_last=last)
      for conv, mode, shape, last in (
          (WIDE, "tf32", (4, 3, 64, 64, 1), False), (ALIGNED, "tf32", (8, 3, 32, 96, 2), False),
          (WIDE, "tf32", (4, 7, 16, 128, 4), True), (ALIGNED, "tf32", (4, 11, 32, 48, 1), False),
          (ALIGNED, "float16", (8, 3, 64, 48, 1), False),
          (ALIGNED, "float16", (4, 3, 32, 48, 2), False),
          (WIDE, "float16", (8, 3, 64, 48, 1), True),
          (EVERYWHERE, "float16", (8, 3, 16, 64, 8), False),
          (WIDE, "ieee", (4, 3, 32, 32, 2), False), (ALIGNED, "ieee", (8, 3, 16, 48, 1), False),
          (WIDE, "ieee", (4, 11, 16, 32, 1), True), (WIDE, "ieee", (4, 7, 16, 48, 4), False))),
    # Accumulators are flushed several times in a stage; rows of an even width.
    _forward(Conv("even", (1, 16, 5, 66), (32, 16, 5, 5), padding=(2, 2, 2, 2)), "ieee"),
    # Strides: residues of the input or the gradient; space-to-depth; positions without taps.
    *(_forward(STRIDED, mode, channels_last=last)
      for mode, last in (("tf32", False), ("bfloat16", True), ("ieee", True))),
    *(_input_grad(STRIDED, mode, channels_last=last)
      for mode, last in (("tf32", True), ("bfloat16", False))),
    _input_grad(replace(POINTWISE, stride=(2, 2)), "tf32"),
    _input_grad(replace(POINTWISE, stride=(3, 2)), "float16", channels_last=True),
    _forward(FIRST, "tf32"),
    _forward(FIRST, "bfloat16", channels_last=True),
    _forward(Conv("far apart", (1, 16, 9, 30), (16, 16, 3, 3), (2, 3), (0, 1, 4, 0), (3, 2)),
             "float16"),
    # Pointwise: planned as long rows; short sums.
    *(_forward(POINTWISE, mode, channels_last=mode in ("bfloat16", "ieee")) for mode in MODES),
    _input_grad(POINTWISE, "ieee"),
    # Groups, and a single product.
    _forward(GROUPED, "tf32"),
    _forward(GROUPED, "float16", channels_last=True),
    _input_grad(GROUPED, "ieee"),
    *(_forward(TINY, mode) for mode in ("tf32", "ieee")),
    *SPLIT,
    # Float32 as scaled fp16, and its repair.
    *(_forward(EVERYWHERE, mode, scaled_fp16=True) for mode in ("tf32", "ieee")),
    _input_grad(EVERYWHERE, "ieee", scaled_fp16=True),
    _forward(Conv("groups", (2, 40, 6, 9), (48, 20, 3, 3), groups=2), "ieee", scaled_fp16=True),
    _forward(WIDE, "tf32", scaled_fp16=True),
]  # fmt: skip
RUN = some(CASES, one_in=15)
ALONE = [_forward(replace(WIDE, input=(1, 20, 5, 41)), "bfloat16", gpu=LITTLE)]
TILES = [_forward(WIDE, "ieee"), _forward(WIDE, "ieee", choice=_of(4, 3, 16, 64, 2))]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [*RUN, *SPLIT, *ALONE, *map(in_batch, ALONE), *TILES]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


def test_cases_cover_all_branches() -> None:
    of = [dict(case.plan.launches[-1].kernel.constants) for case in CASES]
    flags = (
        *("low_low_mma", "compensated", "transposed", "in_channels_last", "out_channels_last"),
        *("vector_loads", "resident", "ties_to_even", "repairs"),
    )
    for name in flags:
        assert {one[name] for one in of} == {False, True}, name
    assert {one["register_tile_m"] for one in of} == {16, 32, 64}
    assert {one["store_vector"] for one in of} >= {1, 4, 8}
    assert {one["channel_groups"] for one in of} == {1, 2, 4, 8}
    assert {(one["warps"], one["loaders"] // 32) for one in of} == set(TEAMS)
    assert any(one["stage_taps"] > one["flush_taps"] for one in of if one["parts"] == 2)
    assert any(one["period_taps"] % one["flush_taps"] for one in of if one["parts"] == 2)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


def test_all_tiles_give_the_same_bits() -> None:
    first, *others = TILES
    tensors = Tensors.random(first)
    expected = run(first, tensors)
    assert_correct(first, tensors, expected)
    for other in others:
        assert other.plan.choice != first.plan.choice
        assert run(other, tensors).equal(expected)


def test_split_cases_are_all_kinds() -> None:
    of = [dict(case.plan.launches[-1].kernel.constants) for case in SPLIT]
    kinds = [(one["low_low_mma"], one["compensated"]) for one in of]
    assert kinds == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_special_values_in_3xtf32(case: PassCase) -> None:
    """Infinities, their signs and NaNs are those of plain float32 arithmetic."""
    tensors = Tensors.random(case)
    at_corners(tensors.input)
    tensors.weight[::2].round_(decimals=0)
    tensors.weight[1::4] *= 1e5  # low parts times the largest number overflow
    check_special_values(case, tensors)


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_special_weights_in_3xtf32(case: PassCase) -> None:
    tensors = Tensors.random(case)
    for channel, number in enumerate(SPECIAL_VALUES[:3]):
        tensors.weight[channel, 3, 1, 1] = number
    tensors.input[0, 3, 2, 2] = torch.inf  # so that an infinity also meets an infinite weight
    tensors.weight[3, 4, 1, 1] = LARGE
    tensors.input[:, 4] /= 8  # so that products with LARGE are finite
    check_special_values(case, tensors)


def test_long_sums_that_overflow() -> None:
    tensors = Tensors.random(SPLIT[2])
    tensors.input[0, 0, 2, 3] = LARGE
    check_special_values(SPLIT[2], tensors)


def test_an_infinity_changes_no_other_bit() -> None:
    for case in SPLIT:
        tensors = Tensors.random(case)
        expected = run(case, tensors)
        tensors.input[0, 0, 0, 0] = torch.inf
        actual = run(case, tensors)
        finite = actual.isfinite()
        assert 0 < (~finite).sum() < finite.numel() // 4
        assert actual[finite].equal(expected[finite])


# Input gradients of few channels with a stride only along rows, for which Hopper's kernels treat
# the residues of rows as channels.
ROW_STRIDES = [
    corpus.case_of(line)
    for line in (
        "sm_86/5 input_grad* bfloat16 nchw/nchw: 2x22x2x28 22x22x2x1 stride=6,1",
        "sm_80/2 input_grad* tf32 nchw/nchw: 1x8x9x17 16x8x3x3 stride=2,1 padding=1,1",
        "sm_120a/2 input_grad* float32 nchw/nhwc: 1x8x9x17 16x8x3x3 stride=3,1 padding=1,1",
    )
]


@pytest.mark.parametrize("case", ROW_STRIDES, ids=str)
def test_row_strides_of_few_channels(case: PassCase) -> None:
    assert case.plan.family == "ampere"
    check(case)
    isolated.check(case)
