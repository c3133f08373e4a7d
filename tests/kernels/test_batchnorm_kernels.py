"""Plans of batch normalization: legal for every GPU, and their kernels compile for all of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import nvrtc
from effort import ALL
from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.batchnorm import plan
from fastconv.kernels.batchnorm.plan import CURVED, END, Normalization, Statistics
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.kernels.hopper.block import most_registers
from fastconv.kernels.hopper.implicit_gemm_nhwc import plan as implicit_gemm_nhwc
from fastconv.kernels.hopper.implicit_gemm_nhwc.tiles import tiles_of
from fastconv.problem import Problem

SCALARS = {"float": 4, "double": 8, "fastconv::float16": 2, "fastconv::bfloat16": 2}
STATISTICS = Statistics(1e-5, 0.1, "float")
RUNNING = Statistics(1e-5, None, "float")


def _norm(
    scalar: str,
    images: int,
    channels: int,
    plane: int,
    channels_last: bool,
    activation: str = "relu",
    residual: bool = False,
) -> Normalization:
    return Normalization(
        scalar, SCALARS[scalar], scalar, images, channels, plane, channels_last, activation, 0.0,
        residual,
    )  # fmt: skip


def _plans(norm: Normalization, gpu: Gpu) -> list[Plan]:
    return [
        plan.forward(norm, STATISTICS, gpu),
        plan.forward(norm, RUNNING, gpu),
        plan.output(replace(norm, residual=False), gpu),
        plan.backward(norm, True, True, True, norm.residual, gpu),
        plan.backward(norm, False, True, False, False, gpu),
    ]


def _drawn(draw: Random) -> Normalization:
    def size(most: int) -> int:
        return max(1, int(most ** draw.random()))

    scalar = draw.choice(list(SCALARS))
    norm = _norm(
        scalar, size(300), size(5000), size(300000), draw.random() < 0.5,
        draw.choice(("identity", "relu", "gelu")), draw.random() < 0.5,
    )  # fmt: skip
    return replace(norm, alignment=max(SCALARS[scalar], draw.choice((2, 4, 8, 16))))


@pytest.mark.parametrize("arch", GPUS)
def test_plans_are_legal(arch: str) -> None:
    gpu, draw = GPUS[arch], Random(5)
    for _ in range(200):
        norm = _drawn(draw)
        for made in _plans(norm, gpu):
            for launch in made.launches:
                assert launch.shared_bytes <= gpu.shared_budget(4), norm
                assert launch.block % 32 == 0, norm
                assert launch.block <= 512, norm
                assert 0 < launch.grid[0] < 2**31, norm
                integers = [one for one in launch.arguments if isinstance(one, int)]
                assert all(-(2**31) <= one < 2**31 for one in integers), norm


def test_tiles_cover_tensors() -> None:
    draw = Random(6)
    for _ in range(2000):
        norm = _drawn(draw)
        tile = plan.tile_of(norm)
        assert tile.lanes * tile.at_once <= tile.threads <= plan.MOST_THREADS
        if tile.wide:
            skew = tile.vector - 1 if norm.plane % tile.vector else 0
            assert tile.segments * tile.lanes * tile.vector >= norm.plane + skew, norm
            assert tile.rows == norm.images * tile.segments
        else:
            columns = tile.group * tile.plane
            assert tile.lanes * tile.vector >= min(columns, norm.channels * tile.plane), norm
            assert norm.channels * tile.plane % tile.vector == 0, norm
            assert columns % tile.vector == 0 or tile.tiles == 1, norm
            assert tile.tiles * tile.group >= norm.channels, norm


@pytest.mark.parametrize(
    ("norm", "wide", "vector"),
    [
        (_norm("fastconv::bfloat16", 64, 64, 112 * 112, True), False, 8),
        (_norm("fastconv::bfloat16", 64, 2048, 49, True), False, 8),
        (_norm("fastconv::bfloat16", 64, 3, 49, True), False, 1),
        (_norm("float", 64, 64, 112 * 112, False), True, 4),
        (_norm("float", 64, 2048, 49, False), False, 4),
        (_norm("float", 64, 512, 28 * 28, False), False, 4),
        (_norm("float", 64, 32, 149 * 149, False), True, 4),
        (_norm("float", 64, 3, 49, False), True, 4),
        (_norm("fastconv::bfloat16", 64, 2048, 49, False), False, 8),
        (_norm("double", 64, 2048, 49, False), False, 2),
        (replace(_norm("float", 64, 64, 112 * 112, False), alignment=8), True, 2),
    ],
)
def test_loads_are_wide(norm: Normalization, wide: bool, vector: int) -> None:
    tile = plan.tile_of(norm)
    assert (tile.wide, tile.vector) == (wide, vector)


# ResNet-50's layers; with the plane of the last one, contiguous vectors have several channels.
LAYERS = [(64, 112 * 112), (256, 56 * 56), (512, 28 * 28), (1024, 14 * 14), (2048, 49)]


@pytest.mark.parametrize(("channels", "plane"), LAYERS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_layers_fill_a_gpu(channels: int, plane: int, channels_last: bool) -> None:
    for scalar in ("float", "fastconv::bfloat16"):
        norm = _norm(scalar, 64, channels, plane, channels_last)
        tile = plan.tile_of(norm)
        assert tile.lanes * tile.at_once >= 0.75 * tile.threads
        assert tile.threads >= 192
        for made in (plan.forward(norm, STATISTICS, H200), _plans(norm, H200)[3]):
            for launch in made.launches:
                if "finish" not in launch.kernel.entry:
                    assert launch.grid[0] >= 2.4 * H200.sm_count
            # Partial sums are little beside what is read.
            assert made.scratch_bytes <= 0.12 * 64 * channels * plane * norm.scalar_bytes


def test_blocks_have_few_elements_of_a_channel() -> None:
    """Counts are exact in float32, and differences from one element are accurate."""
    for channels_last in (False, True):
        norm = _norm("float", 4096, 4, 512 * 512, channels_last)
        sizes = plan.forward(norm, STATISTICS, GPUS["sm_75"]).launches[0].arguments[2:]
        plane, rows = int(sizes[1]), int(sizes[7])
        segment = int(sizes[4]) * 4 if not channels_last else plane
        assert rows * segment <= 2 * plan.MOST_COUNTED


def test_sizes_choose_no_code() -> None:
    norm = _norm("fastconv::bfloat16", 64, 256, 56 * 56, True)
    other = replace(norm, images=7, channels=96, plane=31 * 29)
    for one, two in zip(_plans(norm, H200), _plans(other, H200), strict=True):
        assert [a.kernel for a in one.launches] == [b.kernel for b in two.launches]


def test_sizes_beyond_32_bits_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=f"below {END}, .* of 1 elements"):
        plan.forward(_norm("float", 1 << 16, 1 << 16, 1, False), RUNNING, H200)


@pytest.mark.parametrize("arch", GPUS)
def test_launches_are_early_where_gpus_have_that(arch: str) -> None:
    launches = [one for made in _plans(COMPILED[0], GPUS[arch]) for one in made.launches]
    assert {one.early for one in launches} == {gpus.number(GPUS[arch]) >= 90}


def test_a_residual_gradient_is_computed_once() -> None:
    """It is stored on the way to the sums; what follows reads neither output nor residual."""
    made = plan.backward(
        _norm("float", 4, 8, 100, True, "relu", True), True, True, True, True, H200
    )  # fmt: skip
    sums, _, apply = made.launches
    assert dict(sums.kernel.constants)["source"] == 3
    assert dict(apply.kernel.constants)["source"] == 0
    assert apply.arguments[0] == "grad_residual"


# Every type and format, activations of few and many registers, with and without a residual.
COMPILED = [
    _norm("fastconv::bfloat16", 64, 256, 3136, True, "relu", True),
    _norm("fastconv::bfloat16", 64, 256, 3136, True, "gelu", True),
    _norm("fastconv::bfloat16", 64, 256, 3136, True, "relu"),
    _norm("fastconv::float16", 64, 256, 3137, False, "silu"),
    _norm("fastconv::float16", 64, 256, 49, False, "sigmoid", True),
    _norm("float", 64, 256, 3136, False, "relu", True),
    _norm("float", 64, 256, 49, False, "hardswish"),
    _norm("float", 64, 256, 49, True, "tanh"),
    _norm("double", 64, 256, 3137, False, "gelu_tanh", True),
    _norm("double", 64, 256, 49, True, "identity"),
]


@pytest.mark.parametrize("arch", GPUS)
def test_kernels_compile(arch: str) -> None:
    turn, one_in = list(GPUS).index(arch), 5 if ALL else 10  # each architecture takes others
    chosen = [norm for number, norm in enumerate(COMPILED) if (number + turn) % one_in == 0]
    for norm in chosen:
        for made in (_plans(norm, GPUS[arch])[0], _plans(norm, GPUS[arch])[3]):
            for launch in made.launches:
                compiled = nvrtc.compiled(launch.kernel, arch)
                assert compiled.registers in range(1, 129)
                # Numbers that are needed once for a block, not those of the loop over rows.
                curved = norm.activation in CURVED
                assert (compiled.spill_bytes or 0) <= (64 if curved else 48), launch.kernel


@pytest.mark.parametrize(
    "tile", [(3, 128, 1), (1, 128, 3), (3, 64, 2), (2, 192, 1), (1, 256, 1)], ids=str
)
def test_convolutions_that_leave_statistics_do_not_spill(tile: tuple[int, int, int]) -> None:
    """Their sums stay in registers from tile to tile; these tiles have hardly any others."""
    operands = Operands(
        "fastconv::bfloat16", 2, True, True, (1152, 1, 384, 128), True, statistics=True
    )
    problem = Problem.of((64, 128, 28, 28), (512, 128, 3, 3), (1, 1), (1,) * 4, (1, 1), 1)
    layer = implicit_gemm_nhwc.layer_of(problem, operands, H200, transposed=False)
    (chosen,) = (
        one for one in tiles_of(layer, H200) if (one.consumers, one.columns, one.blocks) == tile
    )
    (launch,) = implicit_gemm_nhwc.plan(chosen, H200).launches
    compiled = nvrtc.compiled(launch.kernel, "sm_90a")
    assert compiled.spill_bytes == 0
    assert compiled.registers is not None
    assert compiled.registers <= most_registers(chosen.blocks, chosen.threads)


def test_partial_sums_of_every_share_are_merged() -> None:
    norm = _norm("float", 64, 64, 12544, True)
    sums, finish, _ = plan.forward(norm, STATISTICS, H200).launches
    rows, share = sums.arguments[8], sums.arguments[9]
    assert isinstance(rows, int)
    assert isinstance(share, int)
    shares = finish.arguments[finish.arguments.index(norm.channels) + 1]
    assert shares == ceil_div(rows, share)
