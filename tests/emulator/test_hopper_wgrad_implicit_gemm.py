"""Hopper's implicit GEMM for weight gradients on the CPU: every branch, on small odd shapes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    ALL,
    Conv,
    PassCase,
    Planner,
    Tensors,
    check_special_values,
    run,
    some,
)
from emulator.test_hopper_wgrad_halo import GPU, MODES, assert_gradients, put_special_values
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper import passes
from fastconv.kernels.hopper.wgrad_implicit_gemm import plan as wgrad_implicit_gemm
from fastconv.kernels.hopper.wgrad_implicit_gemm import tiles
from fastconv.problem import Problem


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans with this kernel, even where it is not the fastest."""
    layer = wgrad_implicit_gemm.layer_of(problem, operands, gpu)
    return wgrad_implicit_gemm.plan(wgrad_implicit_gemm.tiles_of(layer, gpu)[0], gpu)


def _mirrored() -> Planner:
    """A planner for the GEMM whose rows are input channels."""

    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        layer = wgrad_implicit_gemm.mirrored_layer_of(problem, operands, gpu)
        return wgrad_implicit_gemm.plan(wgrad_implicit_gemm.tiles_of(layer, gpu)[0], gpu)

    return weight_grad


mirrored = _mirrored()


def _flushing_after(mmas: int | None) -> AbstractContextManager[Any]:
    """The context in which accumulators are flushed after so many MMAs; as usual without."""
    given = {} if mmas is None else dict.fromkeys(tiles.FLUSH_MMAS, mmas)
    return mock.patch.dict(tiles.FLUSH_MMAS, given)


def with_tile(
    *wanted: int,
    grid: int,
    mmas: int | None = None,
    teams: tuple[int, int] | None = None,
) -> Planner:
    """A planner for a tile with the ``wanted`` sizes.

    These are row groups, column groups, columns of an MMA and positions of a step. ``grid`` blocks
    share the steps, and flush their accumulators after ``mmas`` MMAs, or as usual. If ``teams`` is
    given, it is the number of producer teams and the warps of each.
    """

    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        tile = _tile(wanted, problem, operands, gpu, teams)
        with _flushing_after(mmas):
            return wgrad_implicit_gemm.plan(replace(tile, grid=grid), gpu)

    return weight_grad


def in_clusters(*wanted: int, cluster: int) -> Planner:
    """A planner with a cluster of blocks for each tile, which reduce it through DSMEM."""

    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        tile = _tile(wanted, problem, operands, gpu).in_clusters(cluster)
        assert tile is not None
        return wgrad_implicit_gemm.plan(tile, gpu)

    return weight_grad


def _tile(
    wanted: tuple[int, ...],
    problem: Problem,
    operands: Operands,
    gpu: Gpu,
    teams: tuple[int, int] | None = None,
) -> tiles.Tile:
    layer = wgrad_implicit_gemm.layer_of(problem, operands, gpu)
    return next(
        tile
        for tile in wgrad_implicit_gemm.tiles_of(layer, gpu)
        if (tile.row_groups, tile.column_groups, tile.mma_columns, tile.depth) == wanted
        and tile.cluster == 1
        and teams in (None, (tile.teams, tile.team_warps))
    )


POINTWISE = Conv("pointwise", (3, 72, 10, 12), (136, 72, 1, 1))
TAPS = Conv("taps", (2, 72, 9, 11), (72, 72, 3, 3), padding=(1, 1, 1, 1))
STRIDED = Conv("strided", (3, 64, 13, 14), (64, 64, 3, 2), (2, 3), (1, 0, 2, 1), (2, 1))
SMALL = Conv("small images", (9, 40, 3, 3), (24, 40, 2, 2), padding=(0, 1, 1, 0))
ONE_PIXEL = Conv("one pixel", (70, 48, 1, 1), (16, 48, 1, 1))
SINGLE = Conv("a single position", (1, 8, 1, 1), (8, 8, 1, 1))
PLANES = Conv("planes", (3, 75, 14, 14), (133, 75, 1, 1))
SHORT = Conv("short planes", (5, 20, 2, 4), (9, 20, 1, 1))
FEW = Conv("few steps", (1, 8, 6, 4), (8, 8, 1, 1))
# TMA cannot load these planes.
ODD_PLANES = Conv("odd planes", (3, 75, 7, 7), (133, 75, 1, 1))
STRIDED_PLANES = Conv("strided planes", (3, 24, 9, 10), (40, 24, 1, 1), (2, 3))
PADDED = Conv("padded", (2, 33, 9, 11), (70, 33, 3, 3), padding=(1, 2, 0, 1), dilation=(2, 1))
RAGGED = Conv("ragged octets", (2, 11, 4, 44), (24, 11, 2, 35), padding=(0, 1, 2, 1))
FIRST = Conv("first layer", (2, 3, 23, 21), (40, 3, 7, 5), (2, 3), (3, 2, 1, 4))
ONE_CHANNEL = Conv("one channel", (2, 1, 30, 24), (16, 1, 11, 7), (1, 2), (5, 5, 3, 3), (2, 1))
WIDE_GROUPS = Conv("wide groups", (2, 144, 7, 6), (160, 72, 2, 3), groups=2)
NARROW_GROUPS = Conv("narrow groups", (2, 96, 9, 8), (48, 16, 3, 2), (1, 2), (1, 1, 0, 1), groups=6)
# Wide strides and long kernels, gathered by taps: lines that end within a step, and between images.
WIDE_STRIDE = Conv("wide stride", (2, 16, 1, 530), (70, 16, 1, 20), (1, 10), (0, 0, 5, 5))
LINES = Conv("lines", (2, 48, 5, 130), (42, 16, 2, 7), (2, 4), (1, 0, 3, 4), (2, 1), 3)
WIDE_STEM = Conv("wide stem", (3, 3, 35, 41), (40, 3, 11, 11), (4, 4), (2, 2, 2, 2))
STEMS = Conv("stems", (2, 18, 8, 44), (20, 9, 3, 7), (2, 5), (1, 1, 3, 0), (2, 1), 2)
# Sides that are multiples of the stride.
WHOLE_STEPS = Conv("whole steps", (3, 72, 16, 16), (72, 72, 4, 3), (2, 2), (1, 1, 1, 0), (1, 1))
LONG_STEPS = Conv("long steps", (2, 64, 1, 512), (48, 32, 1, 16), (1, 8), (0, 0, 4, 4), groups=2)
POINTWISE_GROUPS = Conv("pointwise groups", (3, 64, 8, 8), (64, 16, 1, 1), groups=4)


def _case(
    conv: Conv, mode: str, channels_last: bool, bias: bool, planner: Planner = weight_grad
) -> PassCase:
    dtype, precision, _ = MODES[mode]
    return PassCase(conv, planner, dtype, channels_last, True, GPU, precision, bias_grad=bias)


CASES = [
    _case(POINTWISE, "bfloat16", True, True),
    _case(POINTWISE, "float16", True, False, with_tile(2, 1, 128, 64, grid=5)),
    _case(POINTWISE, "bfloat16", True, True, with_tile(1, 2, 64, 32, grid=4, mmas=4)),
    _case(TAPS, "bfloat16", True, False, with_tile(1, 3, 192, 32, grid=3)),
    _case(TAPS, "float16", True, True, with_tile(2, 1, 256, 64, grid=7)),
    _case(TAPS, "bfloat16", True, True, with_tile(1, 1, 64, 64, grid=50, mmas=4)),
    # A block has one or several whole tiles.
    _case(TAPS, "bfloat16", True, True, with_tile(1, 1, 64, 64, grid=42)),
    _case(POINTWISE, "float16", True, True, with_tile(1, 1, 64, 64, grid=3)),
    _case(PLANES, "tf32", False, False, with_tile(3, 1, 80, 32, grid=1)),
    _case(STRIDED, "float16", True, True),
    _case(STRIDED, "bfloat16", True, False, with_tile(1, 2, 192, 32, grid=3)),
    replace(_case(STRIDED, "bfloat16", True, False), plain_weight=True),
    _case(SMALL, "bfloat16", True, True),
    _case(SMALL, "float16", True, False, with_tile(1, 1, 128, 32, grid=2)),
    _case(ONE_PIXEL, "float16", True, True),
    _case(ONE_PIXEL, "bfloat16", False, False),
    _case(SINGLE, "bfloat16", True, True),
    _case(PLANES, "tf32", False, True),
    _case(PLANES, "tf32", False, False, with_tile(3, 1, 80, 32, grid=4, mmas=8)),
    _case(PLANES, "tf32", False, False, with_tile(2, 2, 40, 32, grid=40)),
    _case(POINTWISE, "bfloat16", False, True),
    _case(POINTWISE, "float16", False, False, with_tile(1, 1, 64, 64, grid=7)),
    _case(SHORT, "tf32", False, True),
    _case(SHORT, "bfloat16", False, True),
    _case(FEW, "tf32", False, False),
    _case(ODD_PLANES, "tf32", False, True),
    _case(ODD_PLANES, "bfloat16", False, True, with_tile(1, 1, 64, 64, grid=7)),
    _case(STRIDED_PLANES, "tf32", False, False),
    _case(STRIDED_PLANES, "float16", False, True),
    _case(PADDED, "tf32", False, True),
    _case(PADDED, "tf32", False, False, with_tile(2, 1, 192, 32, grid=3, teams=(2, 4))),
    _case(TAPS, "tf32", False, False, with_tile(1, 2, 64, 32, grid=5, mmas=4, teams=(1, 8))),
    _case(RAGGED, "tf32", False, False),
    _case(RAGGED, "bfloat16", False, True),
    _case(PADDED, "bfloat16", False, True),
    _case(STRIDED, "tf32", False, True),
    _case(STRIDED, "tf32", False, False, with_tile(1, 1, 256, 32, grid=2)),
    _case(SMALL, "float16", False, True),
    _case(FIRST, "tf32", False, True),
    _case(FIRST, "tf32", False, False, with_tile(1, 1, 64, 32, grid=3)),
    _case(FIRST, "bfloat16", False, True),
    _case(FIRST, "bfloat16", True, True, with_tile(1, 1, 128, 64, grid=5, teams=(2, 4))),
    _case(FIRST, "float16", True, False, with_tile(1, 2, 64, 64, grid=2, mmas=8)),
    _case(ONE_CHANNEL, "tf32", False, False),
    _case(ONE_CHANNEL, "float16", True, True),
    _case(WIDE_GROUPS, "tf32", False, True),
    _case(WIDE_GROUPS, "bfloat16", True, True),
    _case(NARROW_GROUPS, "tf32", False, True),
    _case(NARROW_GROUPS, "bfloat16", True, True),
    _case(NARROW_GROUPS, "float16", False, False),
    _case(WIDE_STRIDE, "tf32", False, True),
    _case(WIDE_STRIDE, "bfloat16", False, True, with_tile(1, 1, 128, 64, grid=5, mmas=4)),
    _case(WIDE_STRIDE, "float16", False, False, with_tile(1, 2, 64, 64, grid=3)),
    _case(LINES, "tf32", False, False),
    _case(LINES, "bfloat16", False, True),
    _case(WIDE_STEM, "bfloat16", False, True),
    _case(WIDE_STEM, "float16", False, False, with_tile(1, 1, 128, 64, grid=5, mmas=4)),
    _case(STEMS, "bfloat16", False, True),
    _case(WHOLE_STEPS, "bfloat16", True, True, with_tile(2, 1, 128, 32, grid=7)),
    _case(LONG_STEPS, "float16", True, False),
    _case(POINTWISE_GROUPS, "tf32", False, False),
    _case(POINTWISE_GROUPS, "float16", True, True),
]
CLUSTERS = [
    _case(POINTWISE, "bfloat16", True, True, in_clusters(2, 1, 128, 64, cluster=2)),
    _case(POINTWISE, "float16", True, True, in_clusters(1, 2, 64, 32, cluster=8)),
    _case(POINTWISE, "bfloat16", False, True, in_clusters(1, 1, 72, 64, cluster=4)),
    _case(TAPS, "bfloat16", True, True, in_clusters(1, 3, 128, 32, cluster=2)),
    _case(TAPS, "float16", True, False, in_clusters(2, 1, 256, 64, cluster=4)),
    replace(
        _case(STRIDED, "bfloat16", True, True, in_clusters(1, 1, 128, 32, cluster=2)),
        plain_weight=True,
    ),
    _case(SMALL, "float16", True, True, in_clusters(1, 1, 64, 32, cluster=2)),
    # There are as many steps as blocks.
    _case(ONE_PIXEL, "bfloat16", True, True, in_clusters(1, 1, 64, 32, cluster=2)),
    _case(PLANES, "tf32", False, True, in_clusters(2, 1, 80, 32, cluster=8)),
    _case(PLANES, "tf32", False, False, in_clusters(2, 2, 40, 32, cluster=4)),
    _case(SHORT, "tf32", False, True, in_clusters(1, 1, 24, 32, cluster=4)),
    _case(PADDED, "tf32", False, False, in_clusters(2, 1, 192, 32, cluster=4)),
    _case(FIRST, "bfloat16", True, True, in_clusters(1, 1, 128, 64, cluster=2)),
    _case(NARROW_GROUPS, "bfloat16", True, True, in_clusters(1, 1, 128, 64, cluster=2)),
    _case(POINTWISE_GROUPS, "tf32", False, False, in_clusters(1, 1, 64, 32, cluster=2)),
]
CASES += CLUSTERS
PARTS = [
    _case(POINTWISE, "ieee", False, True),
    _case(PADDED, "ieee", False, False, with_tile(2, 1, 64, 32, grid=3, teams=(2, 4))),
    _case(TAPS, "ieee", False, True, with_tile(1, 2, 64, 32, grid=5, mmas=4, teams=(1, 8))),
    _case(FIRST, "ieee", False, True),
    _case(NARROW_GROUPS, "ieee", False, True),
    _case(WIDE_STRIDE, "ieee", False, True, with_tile(1, 1, 64, 32, grid=7)),
    _case(PADDED, "ieee", False, False, in_clusters(2, 1, 128, 32, cluster=4)),
]
CASES += PARTS
FEW_OUTPUTS = Conv(
    "few outputs", (2, 40, 12, 17), (3, 40, 3, 5), padding=(1, 0, 2, 4), dilation=(2, 1)
)
MIRRORED = [
    _case(FEW_OUTPUTS, "bfloat16", True, True, mirrored),
    _case(FEW_OUTPUTS, "tf32", False, False, mirrored),
    _case(FEW_OUTPUTS, "ieee", False, False, mirrored),
    _case(FEW_OUTPUTS, "float16", False, True, mirrored),
    replace(_case(TAPS, "bfloat16", True, False, mirrored), plain_weight=True),
    _case(TAPS, "tf32", False, True, mirrored),
    _case(POINTWISE, "bfloat16", True, True, mirrored),
    _case(PLANES, "tf32", False, True, mirrored),
]
CASES += MIRRORED
# Volumes: each axis has its own stride, dilation and padding; positions are those of all planes.
CUBE = Conv("3x3x3", (2, 40, 3, 5, 6), (72, 40, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3)
MIXED = Conv(
    "mixed volumes", (2, 16, 9, 5, 8), (24, 16, 3, 2, 3), (2, 1, 3), (3, 2, 0, 1, 1, 2), (3, 2, 1)
)
STEM = Conv("first volumes", (2, 3, 7, 9, 8), (24, 3, 3, 5, 4), (1, 2, 2), (1, 1, 2, 2, 0, 3),
            (2, 1, 1))  # fmt: skip
FEW_OF_VOLUMES = Conv("few outputs of volumes", (2, 40, 4, 5, 7), (3, 40, 3, 1, 3), (1,) * 3,
                      (2, 0, 0, 0, 1, 1), (1,) * 3)  # fmt: skip
VOLUME_GROUPS = Conv("groups of volumes", (2, 32, 4, 5, 6), (48, 16, 2, 3, 1), (1, 1, 2),
                     (1, 0, 1, 1, 0, 0), (1,) * 3, 2)  # fmt: skip
VOXELS = Conv("voxels", (3, 24, 2, 5, 8), (40, 24, 1, 1, 1), (1,) * 3, (0,) * 6, (1,) * 3)
VOLUMES = [
    _case(CUBE, "bfloat16", True, True),
    _case(MIXED, "float16", True, False),
    _case(CUBE, "tf32", False, True),
    _case(MIXED, "bfloat16", False, True),
    _case(MIXED, "ieee", False, True),
    _case(STEM, "tf32", False, True),
    _case(STEM, "bfloat16", True, False),
    _case(VOLUME_GROUPS, "bfloat16", True, True),
    _case(VOLUME_GROUPS, "tf32", False, False),
    _case(VOXELS, "tf32", False, True),
    replace(_case(CUBE, "float16", True, True), plain_weight=True),
    _case(CUBE, "bfloat16", True, True, in_clusters(2, 1, 128, 32, cluster=2)),
    _case(MIXED, "tf32", False, False, in_clusters(1, 1, 64, 32, cluster=2)),
    _case(FEW_OF_VOLUMES, "bfloat16", True, True, mirrored),
    _case(FEW_OF_VOLUMES, "tf32", False, True, mirrored),
]
CASES += VOLUMES


RUN = some(CASES, one_in=6)
RUN += [case for case in some([*PARTS, *MIRRORED, *VOLUMES], one_in=3) if case not in RUN]
PLANE_CASE = next(case for case in CASES if case.conv == PLANES)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    assert_gradients(case)


def test_few_outputs_are_mirrored() -> None:
    """Padding beyond the kernel, strides and groups are not mirrored."""
    few = replace(FEW_OUTPUTS, input=(64, 64, 96, 96), weight=(3, 64, 3, 5))
    first = replace(few, input=(64, 3, 96, 96), weight=(64, 3, 3, 5))
    for conv, changed in ((few, True), (first, False)):
        case = _case(conv, "bfloat16", True, False, passes.weight_grad)
        plan = replace(case, gpu=H200).plan
        start = [dict(launch.kernel.constants)["weight_start"] for launch in plan.launches]
        assert {value > 0 for value in start} == {changed}
    for change in ({"padding": (5, 0, 0, 0)}, {"stride": (1, 2)}, {"groups": 3}):
        channels = {"input": (2, 120, 12, 17)} if "groups" in change else {}
        with pytest.raises(Declined, match="mirrored"):
            _ = _case(
                replace(FEW_OUTPUTS, **change, **channels), "tf32", False, False, mirrored
            ).plan


def test_every_tile() -> None:
    """Random tiles of some convolutions, with as many blocks as the tile has or fewer."""
    draw = Random(0)
    cases = []
    for conv, mode, channels_last in (
        (TAPS, "bfloat16", True),
        (POINTWISE, "float16", True),
        (PLANES, "tf32", False),
        (PADDED, "tf32", False),
        (FIRST, "bfloat16", True),
        (NARROW_GROUPS, "bfloat16", True),
    ):
        case = _case(conv, mode, channels_last, bias=False)
        layer = wgrad_implicit_gemm.layer_of(conv.problem, _operands(case), GPU)
        plain = [tile for tile in wgrad_implicit_gemm.tiles_of(layer, GPU) if tile.cluster == 1]
        for tile in draw.sample(plain, 4 if ALL else 1):
            planner = with_tile(*_groups(tile), grid=draw.randint(1, tile.grid))
            cases.append(replace(case, planner=planner))
        clusters = [tile for tile in wgrad_implicit_gemm.tiles_of(layer, H200) if tile.cluster > 1]
        for tile in draw.sample(clusters, 2 if ALL else 1):
            planner = in_clusters(*_groups(tile), cluster=tile.cluster)
            cases.append(replace(case, planner=planner))
    precompile({launch.kernel for case in cases for launch in case.plan.launches})
    for case in cases:
        assert_gradients(case)


def _groups(tile: tiles.Tile) -> tuple[int, int, int, int]:
    return tile.row_groups, tile.column_groups, tile.mma_columns, tile.depth


@pytest.mark.parametrize("case", CLUSTERS, ids=str)
def test_clusters_need_no_second_launch(case: PassCase) -> None:
    *bias, launch = case.plan.launches
    cluster = dict(launch.kernel.constants)["cluster"]
    assert cluster > 1
    assert launch.grid[0] % cluster == 0
    assert launch.kernel.entry == "wgrad_implicit_gemm"
    assert all(one.kernel.source == wgrad_implicit_gemm.BIAS_SOURCE for one in bias)
    assert bias or case.plan.scratch_bytes == 0
    assert f"clusters of {cluster}" in case.plan.choice


def test_clusters_that_cannot_be() -> None:
    """Too few steps, too many steps before a flush, accumulators that do not fit, two waves."""

    def tile(conv: Conv, groups: tuple[int, int], columns: int, depth: int) -> tiles.Tile:
        layer = wgrad_implicit_gemm.layer_of(
            conv.problem, _operands(_case(conv, "bfloat16", True, False)), GPU
        )
        fitted = tiles.Tile(layer, *groups, columns, depth, blocks=1).fitted(GPU)
        assert fitted is not None
        return fitted

    few = tile(ONE_PIXEL, (1, 1), 64, 32)  # 3 steps
    assert few.in_clusters(2) is not None
    assert few.in_clusters(4) is None
    with _flushing_after(2):
        assert few.in_clusters(2) is None
    wide = tile(Conv("large", (8, 256, 16, 16), (256, 256, 1, 1)), (2, 1), 256, 64)
    assert wide.in_clusters(2) is not None
    assert (
        replace(wide, stages=2).in_clusters(2) is None
    )  # 132 KiB of accumulators, 96 KiB of stages
    for gpu, has_room in (
        (H200, True),
        (GPU, False),
    ):  # whether two blocks of each tile run at once
        found = wgrad_implicit_gemm.tiles_of(wide.layer, gpu)
        assert any(one.cluster > 1 for one in found) == has_room


def _operands(case: PassCase) -> Operands:
    found: list[Operands] = []

    def remember(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        found.append(operands)
        return weight_grad(problem, operands, gpu)

    _ = replace(case, planner=remember).plan
    return found[0]


def test_channels_keep_to_themselves() -> None:
    """Other channels of an MMA do not change a channel's results, not even as NaN."""
    case = CASES[0]
    tensors = Tensors.random(case)
    bias = torch.zeros(case.conv.weight[0], dtype=case.dtype)
    expected = run(case, tensors, bias)
    poisoned = [5, 71]
    tensors.grad_output[:, poisoned] = torch.nan
    actual = run(case, tensors, bias)
    assert actual[poisoned].isnan().all()
    others = [i for i in range(case.conv.weight[0]) if i not in poisoned]
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("case", [CASES[4], PLANE_CASE], ids=str)
def test_infinity_stays_where_it_is(case: PassCase) -> None:
    tensors = Tensors.random(case)
    put_special_values(tensors.input)
    check_special_values(case, tensors)


@pytest.mark.parametrize(
    ("conv", "mode", "channels_last", "reason"),
    [
        (POINTWISE, "ieee", True, "float"),
        (POINTWISE, "tf32", True, "float"),
        (Conv("odd", (1, 16, 8, 8), (12, 16, 1, 1)), "bfloat16", True, "12 channels"),
    ],
)
def test_declines(conv: Conv, mode: str, channels_last: bool, reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        _ = _case(conv, mode, channels_last, bias=False).plan


@pytest.mark.parametrize(
    "case",
    [
        _case(WIDE_STRIDE, "tf32", False, False),
        _case(LINES, "bfloat16", False, False),
    ],
    ids=str,
)
def test_lines_keep_to_themselves(case: PassCase) -> None:
    """Steps beyond a line's last position multiply nothing, not even infinity by zero."""
    constants = dict(case.plan.launches[0].kernel.constants)
    assert constants["by_taps"]
    tensors = Tensors.random(case)
    tensors.input[..., 0] = torch.inf
    tensors.input[..., -1] = torch.inf
    problem = case.conv.problem
    step, width, before = problem.stride[1], problem.output_size[1], problem.padding.left
    reads = [
        {place * step + tap - before for place in range(width)}
        for tap in range(problem.kernel_size[1])
    ]
    finite = [tap for tap, read in enumerate(reads) if not read & {0, problem.input_size[1] - 1}]
    assert finite
    assert run(case, tensors)[..., finite].isfinite().all()
