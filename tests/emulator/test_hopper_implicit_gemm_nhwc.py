"""Hopper's implicit GEMM for channels-last tensors on the CPU: every branch, small odd shapes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    ALL,
    BATCH,
    SPECIAL_VALUES,
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    at_corners,
    check,
    check_special_values,
    in_batch,
    some,
)
from emulator.test_hopper_halo import FEW, ONE
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper.implicit_gemm_nhwc import plan as implicit_gemm_nhwc
from fastconv.kernels.hopper.implicit_gemm_nhwc.tiles import tiles_of
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

TYPES = (torch.bfloat16, torch.float16)


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    layer = implicit_gemm_nhwc.layer_of(problem, operands, gpu, transposed=False)
    return implicit_gemm_nhwc.plans(layer, gpu, most=1)[0]


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    layer = implicit_gemm_nhwc.layer_of(problem, operands, gpu, transposed=True)
    return implicit_gemm_nhwc.plans(layer, gpu, most=1)[0]


def with_tile(direction: Planner, consumers: int, columns: int, blocks: int = 1) -> Planner:
    """A planner with a given tile, even where the rules prefer another."""

    def planner(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        layer = implicit_gemm_nhwc.layer_of(problem, operands, gpu, direction is input_grad)
        wanted = (consumers, columns, blocks)
        tile = next(
            tile
            for tile in tiles_of(layer, gpu)
            if (tile.consumers, tile.columns, tile.blocks) == wanted
        )
        return implicit_gemm_nhwc.plan(tile, gpu)

    planner.__name__ = direction.__name__
    return planner


def _case(
    planner: Planner,
    conv: Conv,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    gpu: Gpu = FEW,
    plain_weight: bool = False,
    epilogue: Epilogue = NO_EPILOGUE,
) -> PassCase:
    return PassCase(
        conv,
        planner,
        dtype=dtype,
        precision="tf32" if dtype is torch.float32 else "ieee",
        epilogue=epilogue,
        channels_last=True,
        gpu=gpu,
        bias=bias,
        plain_weight=plain_weight,
    )


# Tiles span several images of 35 pixels; channels are no multiple of 64 or 16.
POINTWISE = Conv("pointwise", (5, 72, 5, 7), (88, 72, 1, 1))
WIDE = Conv("wide", (2, 40, 9, 7), (264, 40, 1, 1))
STRIDED = Conv("strided pointwise", (3, 72, 7, 9), (72, 72, 1, 1), stride=(2, 2))
THREE = Conv("3x3", (2, 72, 6, 7), (72, 72, 3, 3), padding=(1, 1, 1, 1))
DOWN = Conv("3x3 down", (3, 24, 9, 8), (72, 24, 3, 3), stride=(2, 2), padding=(1, 1, 1, 1))
PATCHES = Conv("patches", (2, 16, 8, 6), (24, 16, 2, 2), stride=(2, 2))
UNEVEN = Conv(
    "uneven", (2, 16, 11, 10), (24, 16, 2, 3), stride=(2, 3), padding=(0, 2, 3, 1), dilation=(3, 2)
)
DILATED = Conv("dilated", (2, 72, 9, 9), (16, 72, 3, 3), padding=(4, 4, 4, 4), dilation=(4, 4))
SLIM = Conv("slim", (2, 20, 7, 6), (12, 20, 3, 2), padding=(1, 1, 1, 0))
AWAY = Conv("beyond the padding", (1, 16, 3, 2), (8, 16, 1, 1), stride=(4, 3), padding=(4, 4, 3, 3))
CONVS = (POINTWISE, WIDE, STRIDED, THREE, DOWN, PATCHES, UNEVEN, DILATED, AWAY)
# Volumes: tiles span planes and images, and each axis has its own stride, dilation and padding.
CUBE = Conv("3x3x3", (2, 72, 3, 4, 5), (72, 72, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3)
CAUSAL = Conv("causal", (2, 24, 5, 3, 4), (40, 24, 3, 1, 2), (1,) * 3, (2, 0, 0, 0, 1, 0), (1,) * 3)
HALVED = Conv("3x3x3 down", (2, 16, 5, 7, 6), (24, 16, 3, 3, 3), (2,) * 3, (1,) * 6, (1,) * 3)
MIXED = Conv("mixed", (2, 16, 9, 5, 8), (24, 16, 3, 2, 3), (2, 1, 3), (3, 2, 0, 1, 1, 2), (3, 2, 1))
APART = Conv("gaps in depth", (3, 8, 9, 3, 4), (16, 8, 2, 1, 2), (4, 2, 1), (1, 0) * 3, (1,) * 3)
# One residue of planes has a tap, which reads beyond its position.
BEYOND = Conv(
    "beyond", (2, 24, 4, 3, 4), (16, 24, 1, 3, 1), (3, 1, 2), (1, 0, 1, 1, 0, 1), (1,) * 3
)
EVERY_OTHER = Conv("pointwise planes", (2, 40, 5, 3, 5), (24, 40, 1, 1, 1), (2, 1, 2), (0,) * 6,
                   (1,) * 3)  # fmt: skip
VOXELS = Conv("pointwise volumes", (3, 24, 3, 5, 2), (40, 24, 1, 1, 1), (1,) * 3, (0,) * 6,
              (1,) * 3)  # fmt: skip
VOLUMES = (CUBE, CAUSAL, HALVED, MIXED, APART, BEYOND, EVERY_OTHER, VOXELS)
TILES = ((1, 64, 3), (2, 64, 1), (2, 128, 2), (2, 256, 1), (3, 192, 1), (4, 64, 1), (4, 128, 1))

CASES = [
    *(_case(planner, conv, dtype) for (number, conv), planner in
      product(enumerate(CONVS), (forward, input_grad)) for dtype in TYPES[number % 2 :][:1]),
    *(_case(with_tile(planner, *tile), WIDE, bias=False) for tile in TILES
      for planner in (forward,)),
    *(_case(with_tile(input_grad, *tile), Conv("wide", (2, 264, 9, 7), (40, 264, 1, 1)))
      for tile in TILES),
    _case(with_tile(input_grad, 2, 128), Conv("down", (2, 136, 8, 9), (24, 136, 3, 3),
                                              stride=(2, 2), padding=(1, 1, 1, 1))),
    # Tiles end with the layer's channels, in the first TMA box or a later one.
    *(_case(planner, Conv(f"{channels} channels", (2, channels, 6, 6), (channels, channels, 3, 3),
                          padding=(1, 1, 1, 1)))
      for channels in (24, 96, 152) for planner in (forward, input_grad)),
    _case(input_grad, Conv("96 channels", (2, 96, 7, 6), (24, 96, 2, 2), stride=(2, 2))),
    # Patches of few channels: one MMA has all channels and taps of a patch.
    *(_case(input_grad, conv, dtype) for dtype, conv in zip(TYPES, (
        Conv("patches of 3", (3, 3, 12, 20), (24, 3, 4, 4), stride=(4, 4)),
        Conv("uneven patches", (5, 6, 8, 9), (80, 6, 4, 3), stride=(4, 3)),
    ), strict=True)),
    # A block has several tiles, each with an odd number of boxes to store.
    _case(with_tile(forward, 1, 192), Conv("more tiles", (20, 16, 8, 8), (192, 16, 1, 1))),
    _case(forward, Conv("one pixel", (70, 64, 1, 1), (64, 64, 1, 1)), torch.float16),
    # A block stores several tiles, through as many buffers as a tile has boxes or fewer.
    *(_case(with_tile(forward, 1, columns), WIDE, gpu=ONE) for columns in (64, 128, 192, 256)),
    # Contiguous weights are packed first.
    *(_case(planner, THREE, plain_weight=True) for planner in (forward, input_grad)),
    # TF32: all layers, and boxes of 32 channels of which one, two or eight make a tile.
    *(_case(planner, conv, torch.float32) for conv in (*CONVS, SLIM)
      for planner in (forward, input_grad)),
    *(_case(with_tile(forward, *tile), WIDE, torch.float32, gpu=ONE)
      for tile in ((1, 64, 3), (2, 128, 2), (1, 192, 1), (2, 256, 1), (4, 64, 1))),
    *(_case(planner, conv, torch.float32, plain_weight=True) for conv in (THREE, UNEVEN)
      for planner in (forward, input_grad)),
    _case(input_grad, Conv("patches of 3", (3, 3, 12, 20), (24, 3, 4, 4), stride=(4, 4)),
          torch.float32),
    *(_case(forward, conv, torch.float32, epilogue=Epilogue("silu", residual=True))
      for conv in (POINTWISE, WIDE, DOWN)),
    *(_case(planner, conv, dtype, plain_weight=conv in (HALVED, EVERY_OTHER)) for
      conv, planner, dtype in
      product(VOLUMES, (forward, input_grad), (torch.float16, torch.float32))),
    _case(with_tile(forward, 2, 64), CUBE, gpu=ONE, epilogue=Epilogue("silu", residual=True)),
]  # fmt: skip


def _tile_drawn(draw: Random, direction: Planner) -> Planner:
    """A planner with a random tile."""
    place = draw.random()

    def planner(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        layer = implicit_gemm_nhwc.layer_of(problem, operands, gpu, direction is input_grad)
        tiles = implicit_gemm_nhwc.tiles_of(layer, gpu)
        return implicit_gemm_nhwc.plan(tiles[int(place * len(tiles))], gpu)

    planner.__name__ = direction.__name__
    return planner


def _drawn_conv(draw: Random, name: str) -> Conv:
    kernel = draw.choice(((1, 1), (1, 1), (3, 3), (2, 3), (draw.randint(1, 4), draw.randint(1, 4))))
    dilation = draw.choice(((1, 1), (1, 1), (draw.randint(1, 3), draw.randint(1, 3))))
    extents = [step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True)]
    size = tuple(extent + draw.randint(1, 12) for extent in extents)
    rows, columns = (extent // 2 + draw.randint(0, 1) for extent in extents)
    channels = [8 * draw.randint(1, 18) for _ in range(2)]
    return Conv(
        name,
        (draw.randint(1, 7), channels[0], size[0], size[1]),
        (channels[1], channels[0], *kernel),
        draw.choice(((1, 1), (1, 1), (2, 2), (draw.randint(1, 4), draw.randint(1, 4)))),
        draw.choice(((0, 0, 0, 0), (rows, rows, columns, columns), (rows, 0, 0, columns))),
        dilation,
    )


def _drawn_volume(draw: Random, name: str) -> Conv:
    kernel = draw.choice(((3, 3, 3), (1, 3, 2), tuple(draw.randint(1, 3) for _ in range(3))))
    dilation = draw.choice(((1, 1, 1), tuple(draw.randint(1, 3) for _ in kernel)))
    extents = [step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True)]
    channels = [8 * draw.randint(1, 10) for _ in range(2)]
    return Conv(
        name,
        (draw.randint(1, 4), channels[0], *(extent + draw.randint(1, 6) for extent in extents)),
        (channels[1], channels[0], *kernel),
        draw.choice(((1, 1, 1), (2, 2, 2), tuple(draw.randint(1, 4) for _ in kernel))),
        tuple(draw.randint(0, extent + 1) for extent in extents for _ in range(2)),
        dilation,
    )


def _random(seed: int) -> PassCase:
    """A random test case that the kernel takes."""
    draw = Random(seed)
    drawn = _drawn_volume if seed % 3 == 2 else _drawn_conv
    while True:
        case = _case(
            _tile_drawn(draw, draw.choice((forward, input_grad))),
            drawn(draw, f"random {seed}"),
            draw.choice((*TYPES, torch.float32)),
            bias=draw.random() < 0.7,
            gpu=draw.choice((ONE, FEW)),
            plain_weight=draw.random() < 0.2,
        )
        with suppress(Declined):
            case.plan  # noqa: B018
            return case


RUN = [*some(CASES, one_in=3), *map(_random, range(60 if ALL else 4))]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [*RUN, *(in_batch(case, batch) for case in ALONE for batch in (1, BATCH))]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_correct(case: PassCase) -> None:
    check(case)


ALONE = [
    _case(forward, THREE),
    _case(input_grad, DOWN),
    _case(forward, DOWN, torch.float32),
    _case(input_grad, THREE, torch.float32),
    _case(forward, CUBE, torch.float32),
    _case(input_grad, MIXED),
]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_infinity_stays_where_it_is(case: PassCase) -> None:
    """TF32 also makes the last numbers before infinity infinite."""
    tensors = Tensors.random(case)
    values = SPECIAL_VALUES if case.dtype == torch.float32 else SPECIAL_VALUES[:3]
    at_corners(tensors.input, values)
    at_corners(tensors.grad_output, values)
    check_special_values(case, tensors)


def test_images_of_one_pixel_have_either_format() -> None:
    conv = Conv("one pixel", (70, 72, 1, 1), (40, 72, 1, 1))
    for planner in (forward, input_grad):
        check(PassCase(conv, planner, torch.bfloat16, channels_last=False, gpu=FEW))


def test_an_image_of_one_patch_has_its_own_format() -> None:
    """A gradient of one pixel has both memory formats, but the patch that it belongs to has one."""
    problem = Problem.of((2, 3, 4, 4), (24, 3, 4, 4), (4, 4), (0, 0, 0, 0), (1, 1), 1)
    strides = (48, 1, 12, 3)
    last = Operands("fastconv::bfloat16", 2, False, True, strides, True)
    assert implicit_gemm_nhwc.layer_of(problem, last, FEW, transposed=True).patches
    contiguous = Operands("fastconv::bfloat16", 2, False, False, strides, True)
    with pytest.raises(Declined):
        implicit_gemm_nhwc.layer_of(problem, contiguous, FEW, transposed=True)


def test_declines() -> None:
    def declined(
        conv: Conv,
        dtype: torch.dtype = torch.bfloat16,
        channels_last: bool = True,
        aligned: bool = True,
    ) -> str:
        with pytest.raises(Declined) as reason:
            _ = PassCase(conv, forward, dtype, channels_last, aligned).plan
        return str(reason.value)

    assert "float in ieee" in declined(THREE, dtype=torch.float32)
    assert "double in ieee" in declined(THREE, dtype=torch.float64)
    assert "contiguous" in declined(THREE, channels_last=False)
    assert "aligned" in declined(THREE, aligned=False)
    assert "9 channels" in declined(Conv("odd", (1, 9, 4, 4), (8, 9, 1, 1)))
    assert "2 groups" in declined(Conv("groups", (1, 32, 4, 4), (32, 16, 1, 1), groups=2))
    far = Conv("far", (1, 8, 40, 300), (8, 8, 1, 2), dilation=(1, 260))
    assert "-260 beyond their ends" in declined(far)
    deep = Conv("deep", (1, 8, 40, 3, 3), (8, 8, 3, 1, 1), (1,) * 3, (0,) * 6, (16, 1, 1))
    assert "-32 beyond their ends" in declined(deep)
    spread = replace(deep, padding=(16, 16, 0, 0, 0, 0))
    assert "taps that are 32 pixels apart" in declined(spread)
