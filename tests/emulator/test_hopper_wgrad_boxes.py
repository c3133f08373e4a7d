"""Weight gradients whose taps share TMA boxes, on the CPU: every branch, on small odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from emulator import isolated, precompile
from emulator.pass_cases import ALL, Conv, PassCase, Planner, Tensors, run, some
from emulator.test_hopper_wgrad_halo import GPU, MODES, assert_gradients
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper.wgrad_implicit_gemm import halo
from fastconv.kernels.hopper.wgrad_implicit_gemm import plan as wgrad_implicit_gemm
from fastconv.problem import Problem

boxed_layer_of = wgrad_implicit_gemm.boxed_layer_of


def mirrored_layer_of(problem: Problem, operands: Operands, gpu: Gpu) -> wgrad_implicit_gemm.Layer:
    return wgrad_implicit_gemm.mirrored_layer_of(problem, operands, gpu, boxed_layer_of)


def with_tile(
    accept: Callable[[halo.HaloTile], bool] = lambda tile: True,
    grid: int = 0,
    layer_of: Callable[..., wgrad_implicit_gemm.Layer] = boxed_layer_of,
) -> Planner:
    """A planner for the first tile that is accepted; on ``grid`` blocks, unless that is 0."""

    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        tiles = wgrad_implicit_gemm.tiles_of(layer_of(problem, operands, gpu), gpu)
        halos = (tile for tile in tiles if isinstance(tile, halo.HaloTile))
        tile = next(filter(accept, halos))
        return wgrad_implicit_gemm.plan(replace(tile, grid=grid or tile.grid), gpu)

    return weight_grad


SQUARE = Conv("3x3", (2, 40, 9, 21), (72, 40, 3, 3), padding=(1, 1, 1, 1))
WIDE = Conv("wide kernel", (2, 24, 7, 33), (40, 24, 2, 9), padding=(0, 1, 5, 3))
DILATED = Conv("dilated", (2, 64, 12, 27), (24, 64, 3, 2), padding=(2, 3, 1, 0), dilation=(2, 5))
ROWS = Conv("strided rows", (2, 16, 14, 19), (136, 16, 3, 3), (2, 1), (1, 0, 1, 1))
COLUMNS = Conv("strided columns", (2, 136, 5, 50), (24, 136, 2, 5), (1, 2), (0, 1, 2, 2), (1, 1))
RESIDUES = Conv("some residues", (1, 40, 5, 43), (16, 40, 2, 3), (2, 4), (1, 1, 1, 0), (1, 2))
HIGH = Conv("one column", (2, 72, 11, 10), (16, 72, 5, 1), padding=(2, 2, 0, 0))
SMALL = Conv("small images", (5, 96, 3, 3), (96, 96, 2, 3), padding=(1, 0, 1, 1))
CUBE = Conv("3x3x3", (2, 40, 3, 5, 9), (72, 40, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3)
MIXED = Conv(
    "mixed volumes", (1, 96, 6, 7, 18), (24, 96, 3, 2, 3), (2, 2, 1), (2, 1, 0, 1, 1, 2), (2, 1, 2)
)
PATCHES = Conv("patches", (3, 3, 32, 48), (72, 3, 16, 16), (16, 16), (0, 0, 0, 0))
ROWS_OF_PATCHES = Conv("dilated patches", (2, 4, 23, 12), (8, 4, 4, 4), (3, 4), (0,) * 4, (2, 1))


def _case(
    conv: Conv, mode: str, bias: bool, planner: Planner, plain_weight: bool = False
) -> PassCase:
    dtype, precision, _ = MODES[mode]
    case = PassCase(conv, planner, dtype, True, True, GPU, precision, bias_grad=bias)
    return replace(case, plain_weight=plain_weight)


def _channels(count: int) -> Callable[[halo.HaloTile], bool]:
    return lambda tile: tile.box_channels == count


CASES = [
    *(_case(SQUARE, "bfloat16", True, with_tile(_channels(count))) for count in halo.CHANNELS),
    _case(SQUARE, "float16", False, with_tile(lambda tile: tile.units > 1, grid=5)),
    _case(SQUARE, "bfloat16", False, with_tile(lambda tile: tile.row_groups == 2), True),
    _case(SQUARE, "float16", True, with_tile(lambda tile: tile.patch[1] % 16 > 0, grid=2)),
    _case(SQUARE, "bfloat16", True, with_tile(lambda tile: tile.is_whole)),
    _case(WIDE, "bfloat16", True, with_tile(lambda tile: tile.pieces > 1)),
    _case(WIDE, "float16", False, with_tile(lambda tile: tile.chunks > 1, grid=3)),
    _case(DILATED, "bfloat16", False, with_tile()),
    _case(DILATED, "float16", True, with_tile(layer_of=mirrored_layer_of)),
    _case(ROWS, "bfloat16", True, with_tile()),
    _case(ROWS, "float16", False, with_tile(lambda tile: tile.kernel_rows == 3), True),
    _case(COLUMNS, "bfloat16", True, with_tile()),
    _case(COLUMNS, "float16", False, with_tile(lambda tile: tile.mma_chunks > 1, grid=3)),
    _case(RESIDUES, "bfloat16", False, with_tile()),
    _case(HIGH, "bfloat16", True, with_tile()),
    _case(HIGH, "float16", False, with_tile(lambda tile: tile.mma_taps < 5 and tile.units > 1)),
    _case(SMALL, "bfloat16", True, with_tile()),
    _case(SMALL, "float16", False, with_tile(lambda tile: tile.gives_registers)),
    _case(CUBE, "bfloat16", True, with_tile()),
    _case(CUBE, "float16", False, with_tile(lambda tile: tile.kernel_planes == 3, grid=4), True),
    _case(MIXED, "bfloat16", True, with_tile()),
    _case(MIXED, "float16", False, with_tile(lambda tile: tile.gives_registers)),
    _case(PATCHES, "bfloat16", True, with_tile(lambda tile: tile.split_rows)),
    _case(ROWS_OF_PATCHES, "float16", False, with_tile(lambda tile: tile.split_rows)),
]
RUN = some(CASES, one_in=3)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    assert_gradients(case)


@pytest.mark.parametrize("case", RUN[::4], ids=str)
def test_isolation(case: PassCase) -> None:
    isolated.check(case)


def _drawn(draw: Random) -> PassCase:
    """A layer with a random tile of those that fit."""
    axes = draw.choice((2, 3))
    kernel = [*(draw.randint(1, 3) for _ in range(axes - 1)), draw.randint(2, 6)]
    dilation = tuple(draw.randint(1, 2) for _ in kernel)
    stride = tuple(draw.randint(1, 2) for _ in kernel)
    extents = (1 + (taps - 1) * step for taps, step in zip(kernel, dilation, strict=True))
    size = [extent + draw.randint(0, 12) for extent in extents]
    channels = [draw.choice((8, 16, 24, 40, 64, 72, 96, 136)) for _ in range(2)]
    conv = Conv(
        "drawn",
        (draw.randint(1, 3), channels[0], *size),
        (channels[1], channels[0], *kernel),
        stride,
        tuple(draw.randint(0, 2) for _ in range(2 * axes)),
        dilation,
    )
    place, blocks = draw.random(), draw.random()

    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        tiles = halo.tiles_of(boxed_layer_of(problem, operands, gpu), gpu)
        tile = tiles[int(place * len(tiles))]
        return wgrad_implicit_gemm.plan(replace(tile, grid=1 + int(blocks * tile.grid)), gpu)

    mode = draw.choice(("float16", "bfloat16"))
    return _case(conv, mode, draw.random() < 0.5, weight_grad, draw.random() < 0.3)


def test_drawn_tiles() -> None:
    draw = Random(0)
    cases = [_drawn(draw) for _ in range(40 if ALL else 3)]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})
    for case in cases:
        assert_gradients(case)


def test_channels_keep_to_themselves() -> None:
    """Other channels of an MMA do not change a channel's results, not even as NaN."""
    case = _case(SQUARE, "bfloat16", False, with_tile())
    tensors = Tensors.random(case)
    expected = run(case, tensors)
    tensors.grad_output[:, [5, 71]] = torch.nan
    tensors.input[:, 3] = torch.nan
    actual = run(case, tensors)
    assert actual[[5, 71]].isnan().all()
    assert actual[:, 3].isnan().all()
    rows = [i for i in range(72) if i not in (5, 71)]
    columns = [i for i in range(40) if i != 3]
    assert torch.equal(actual[rows][:, columns], expected[rows][:, columns])


@pytest.mark.parametrize(
    ("conv", "mode", "reason"),
    [
        (SQUARE, "tf32", "boxes of float"),
        (replace(SQUARE, stride=(1, 9)), "bfloat16", "strides"),
        (replace(SQUARE, weight=(72, 20, 3, 3), groups=2), "bfloat16", "2 groups"),
        (Conv("pointwise", (1, 16, 8, 8), (16, 16, 1, 1)), "bfloat16", "a single tap"),
        (Conv("odd", (1, 12, 8, 8), (16, 12, 3, 3)), "bfloat16", "12, 16"),
    ],
)
def test_declines(conv: Conv, mode: str, reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        _ = _case(conv, mode, False, with_tile()).plan
