"""Statistics that a convolution's kernel leaves of its outputs, for batch normalization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from batchnorm_cases import EPS
from effort import ALL
from emulator import driver, precompile
from emulator.faults import Fault, with_fault
from emulator.pass_cases import Conv, PassCase, Planner, Tensors, new_output, some, tensors_read
from emulator.test_hopper_halo import FEW, ONE
from emulator.test_hopper_implicit_gemm_nhwc import CUBE, TYPES, forward, with_tile
from fastconv.kernels import planner
from fastconv.kernels.batchnorm import plan as batchnorm
from fastconv.kernels.batchnorm.plan import Normalization, Statistics
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.im2col import layer_of
from fastconv.kernels.hopper.implicit_gemm_nhwc.tiles import WARP_BYTES, tiles_of
from fastconv.problem import Epilogue, Problem
from workspaces import workspace


@dataclass(frozen=True)
class Giving:
    """A planner of the same plans, which also leave statistics."""

    planner: Planner

    @property
    def __name__(self) -> str:
        return self.planner.__name__

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        return self.planner(problem, replace(operands, statistics=True), gpu)


@dataclass(frozen=True)
class Left:
    """What a pass has left: its output and the statistics of each share."""

    output: Tensor
    statistics: Tensor | None  # (share, (mean, squared deviations, count), channel)

    @property
    def merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and count of each channel, in float64."""
        assert self.statistics is not None
        mean, squares, count = self.statistics.double().unbind(1)
        total = count.sum(0)
        whole = (mean * count).sum(0) / total
        squares = squares + count * (mean - whole) ** 2
        return whole, squares.sum(0) / total, total


def left_by(case: PassCase, tensors: Tensors, plan: Plan | None = None) -> Left:
    """Runs a pass with outputs, workspace and statistics that hold NaN before."""
    plan = plan or case.plan
    output = new_output(case)
    named = {**tensors_read(case, tensors), "output": output, **workspace(plan)}
    statistics = None
    if plan.shares:
        statistics = torch.full((plan.shares, 3, output.shape[1]), torch.nan)
        named["statistics"] = statistics
    driver.run_both_orders(plan.launches, named)
    return Left(output, statistics)


def by_channel(output: Tensor) -> Tensor:
    return output.double().movedim(1, 0).flatten(1)


def check(case: PassCase, tensors: Tensors, plan: Plan | None = None, loss: float = 1.0) -> Left:
    """Compares statistics with those of the stored outputs.

    ``loss`` is how far the first output of a warp is from the mean, in deviations or more.
    """
    given = left_by(case, tensors, plan)
    outputs = by_channel(given.output)
    mean, variance, count = given.merged
    assert (count == outputs.shape[1]).all()
    exact_mean, exact = outputs.mean(1), outputs.var(1, correction=0)
    rounding = torch.finfo(torch.float32).eps
    # Of each share, the mean is rounded to float32, and the sums of its deviations are.
    shifts = exact_mean.abs() + loss * exact.sqrt()
    assert ((mean - exact_mean).abs() <= 2 * rounding * shifts).all()
    # A share's mean that is off by its rounding also counts with its distance from that of all.
    rounded = rounding * exact_mean.abs()
    bound = 64 * rounding * loss**2 * exact + 2 * rounded * exact.sqrt() + 4 * rounded**2
    assert ((variance - exact).abs() <= bound).all()
    return given


def case_of(planner: Planner, conv: Conv, dtype: torch.dtype, gpu: Gpu = FEW) -> PassCase:
    return PassCase(conv, Giving(planner), dtype=dtype, channels_last=True, gpu=gpu)


# 630 positions are tiles of several images, of which the last one ends within a warp's rows.
ROWS = (18, 40, 5, 7)
TILES = (
    (1, 64, 1), (1, 64, 3), (1, 128, 1), (1, 128, 2), (1, 192, 1), (1, 256, 1), (2, 64, 1),
    (2, 128, 1), (3, 64, 1), (3, 128, 1), (4, 64, 1),
)  # fmt: skip
CASES = [
    # Every tile: all channels in one column of tiles, in two, and in two of which one has a part.
    *(
        case_of(
            with_tile(forward, *tile), Conv("tile", ROWS, (columns, 40, 1, 1)), TYPES[number % 2]
        )
        for number, tile in enumerate(TILES)
        for columns in (tile[1], 2 * tile[1], tile[1] + 8)
    ),
    # One column of tiles, of fewer channels than a box, and of boxes that are no whole ones.
    *(
        case_of(forward, Conv("few", (9, 24, 6, 7), (columns, 24, 3, 3), (1, 1), (1,) * 4), dtype)
        for columns, dtype in ((8, TYPES[0]), (24, TYPES[1]), (72, TYPES[0]), (152, TYPES[1]))
    ),
    # A single block has all tiles of its channels; fewer positions than a warp has; one for each
    # image; as many as a tile has.
    case_of(with_tile(forward, 2, 128), Conv("one SM", ROWS, (256, 40, 1, 1)), TYPES[0], ONE),
    case_of(with_tile(forward, 3, 128), Conv("5", (1, 16, 1, 5), (128, 16, 1, 1)), TYPES[0]),
    case_of(with_tile(forward, 1, 64), Conv("70", (70, 16, 1, 1), (64, 16, 1, 1)), TYPES[1]),
    case_of(with_tile(forward, 2, 64), Conv("128", (2, 16, 8, 8), (64, 16, 1, 1)), TYPES[0], ONE),
    # Strides, dilations and volumes.
    case_of(
        with_tile(forward, 3, 128),
        Conv("3x3 down", (7, 24, 15, 14), (136, 24, 3, 3), (2, 2), (1,) * 4), TYPES[0],
    ),
    case_of(with_tile(forward, 2, 64), CUBE, TYPES[0], ONE),
]  # fmt: skip
RUN = some(CASES, one_in=2)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    plain = [replace(case, planner=case.planner.planner) for case in RUN]  # type: ignore[attr-defined]
    precompile({one.kernel for case in (*RUN, *plain) for one in case.plan.launches})


def _name(case: PassCase) -> str:
    return f"{case} {case.conv.weight[0]} channels {case.plan.choice}"


@pytest.mark.parametrize("case", RUN, ids=_name)
def test_statistics_are_those_of_the_outputs(case: PassCase) -> None:
    """Channels differ in size by up to 2^12; outputs have the bits of a pass without statistics."""
    tensors = Tensors.random(case)
    sizes = 2.0 ** (torch.arange(case.conv.weight[0]) % 13 - 6)
    tensors.weight.mul_(sizes.view(-1, *(1,) * (tensors.weight.dim() - 1)))
    given = check(case, tensors)
    plain = replace(case, planner=case.planner.planner)  # type: ignore[attr-defined]
    assert torch.equal(left_by(plain, tensors).output, given.output)


TILED = case_of(with_tile(forward, 2, 128), Conv("tiled", ROWS, (136, 40, 1, 1)), TYPES[0])


def test_means_of_ten_thousand_deviations() -> None:
    """Biases decide on the outputs, of which there are one to a few numbers near each of them."""
    tensors = Tensors.random(TILED)
    tensors.weight.mul_(0.11)
    tensors.bias.copy_(10.0 ** (torch.arange(136) % 6 - 1))
    given = check(TILED, tensors)
    outputs = by_channel(given.output)
    spread = outputs.std(1) / outputs.mean(1).abs()
    assert (spread == 0).any()
    assert ((spread > 0) & (spread < 1e-3)).any()
    equal = spread == 0
    assert given.statistics is not None
    assert (given.statistics[:, 1][:, equal] == 0).all()
    assert (given.statistics[:, 0][:, equal].double() == outputs[equal, 0]).all()


def test_a_first_output_unlike_all_others() -> None:
    """Differences are counted from an output that is far from the mean."""
    tensors = Tensors.random(TILED)
    tensors.input[0, :, 0, 0] *= 256
    check(TILED, tensors, loss=32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["NaN", "infinity"])
def test_channels_depend_on_themselves_alone(value: float) -> None:
    plain = left_by(TILED, tensors := Tensors.random(TILED)).statistics
    tensors.bias[[3, 64, 128]] = value
    tensors.bias[70] *= 2.0**10
    odd = left_by(TILED, tensors).statistics
    assert plain is not None
    assert odd is not None
    others = [channel for channel in range(136) if channel not in (3, 64, 70, 128)]
    assert torch.equal(plain[:, :, others], odd[:, :, others])
    assert odd[:, :2, [3, 64, 128]].isnan().all()


def test_normalization_by_statistics_of_the_convolution() -> None:
    """The output, statistics and running statistics are those of float64."""
    case, channels = TILED, 136
    given = left_by(case, Tensors.random(case))
    images, _, *plane = given.output.shape
    norm = Normalization(
        "fastconv::bfloat16", 2, "float", images, channels, plane[0] * plane[1], True, "relu"
    )
    assert given.statistics is not None
    made = batchnorm.forward(
        norm, Statistics(EPS, 0.1, "float", given.statistics.shape[0]), case.gpu
    )
    assert [one.kernel.entry for one in made.launches] == [
        "batchnorm_finish_statistics", "batchnorm_apply"
    ]  # fmt: skip
    assert made.scratch_bytes == 0
    tensors = {
        "x": given.output, "scratch": given.statistics,
        "weight": torch.rand(channels) + 0.5, "bias": torch.randn(channels),
        "running_mean": torch.randn(channels), "running_var": torch.rand(channels) + 1,
        "mean": torch.full((channels,), torch.nan), "invstd": torch.full((channels,), torch.nan),
        "y": torch.full_like(given.output, torch.nan),
    }  # fmt: skip
    of_running = [tensors[name].double() for name in ("running_mean", "running_var")]
    expected = torch.nn.functional.batch_norm(
        given.output.double(), *of_running, tensors["weight"].double(), tensors["bias"].double(),
        True, 0.1, EPS,
    ).relu()  # fmt: skip
    driver.run_both_orders(made.launches, tensors)
    torch.testing.assert_close(tensors["y"].double(), expected, rtol=2**-8, atol=1e-5)
    for name, exact in zip(("running_mean", "running_var"), of_running, strict=True):
        torch.testing.assert_close(tensors[name].double(), exact, rtol=1e-6, atol=1e-6)


# --- Plans ----------------------------------------------------------------------------------------


def _planned(conv: Conv, direction: str = "forward", gpu: Gpu = H200, **fields: object) -> Plan:
    strides = torch.empty(conv.weight, device="meta").to(memory_format=torch.channels_last).stride()
    operands = Operands("fastconv::bfloat16", 2, True, True, strides, True, statistics=True)
    made: Plan = getattr(planner, direction)(conv.problem, replace(operands, **fields), gpu)
    return made


LARGE = Conv("large", (64, 256, 14, 14), (2048, 256, 1, 1))
# On channels-last copies where tensors are contiguous.
COPIED = Conv("copied", (64, 1024, 14, 14), (2048, 1024, 1, 1), (2, 2))


def test_blocks_have_one_column_of_tiles() -> None:
    for sms in (1, 3, 7, 132):
        made = _planned(LARGE, gpu=replace(H200, sm_count=sms))
        columns = dict(made.launches[-1].kernel.constants)["tile_columns"]
        assert isinstance(columns, int)
        assert made.launches[-1].grid[0] == made.shares * (2048 // columns)
        plain = _planned(LARGE, gpu=replace(H200, sm_count=sms), statistics=False)
        assert plain.shares == 0
        assert "statistics" not in plain.launches[-1].tensors


@pytest.mark.parametrize("sms", [1, 3, 132])
def test_warps_add_up_a_bounded_number_of_outputs(sms: int) -> None:
    """There are whole rounds of blocks for that, so that no SM has one more than the others."""
    for images in (1, 2**9, 2**14):
        many = Conv("many", (images, 8, 64, 64), (192, 8, 1, 1))
        made = _planned(many, gpu=replace(H200, sm_count=sms))
        launch, constants = made.launches[-1], dict(made.launches[-1].kernel.constants)
        consumers, columns, blocks = (
            int(constants[name]) for name in ("consumers", "tile_columns", "blocks")
        )
        row_tiles = -(-images * 64 * 64 // (64 * consumers))
        assert made.shares <= row_tiles
        assert 16 * -(-row_tiles // made.shares) <= 2**13
        at_once = min(blocks * sms // -(-192 // columns), row_tiles)
        assert made.shares % at_once == 0
        assert launch.grid[0] == made.shares * -(-192 // columns)
    assert made.shares > at_once


def _drawn(draw: Random) -> Conv:
    channels = [8 * draw.randint(1, 2 ** draw.randint(0, 7)) for _ in range(2)]
    size, kernel = draw.randint(3, 60), draw.choice((1, 1, 3, 5))
    return Conv(
        "drawn", (draw.randint(1, 64), channels[0], size, size),
        (channels[1], channels[0], kernel, kernel), (draw.choice((1, 1, 2)),) * 2,
        (kernel // 2,) * 4,
    )  # fmt: skip


def test_statistics_do_not_decide_on_the_kernel() -> None:
    """Kernels add up in other orders. Tiles of a kernel may differ: they give the same bits."""
    # Halo tiles are estimated to be faster than those of an implicit GEMM that have the registers.
    near = [
        Conv("near", (64, 152, 41, 41), (344, 152, 3, 3), padding=(1,) * 4),
        Conv("near", (64, 96, 57, 57), (192, 96, 7, 7), padding=(3,) * 4),
    ]
    draw = Random(1)
    for conv in (*near, *(_drawn(draw) for _ in range(150 if ALL else 20))):
        given, plain = _planned(conv), _planned(conv, statistics=False)
        kernels = [[one.kernel.source for one in made.launches] for made in (given, plain)]
        assert kernels[0] == kernels[1]
        named = "statistics" in given.launches[-1].tensors
        assert named == (given.shares > 0) == ("implicit_gemm_nhwc" in kernels[0][-1])


def test_warps_have_room_for_what_they_leave() -> None:
    """Where only one staging buffer fits, tiles of 256 channels have none."""
    conv = Conv("narrow", (256, 8, 36, 36), (248, 8, 3, 3), padding=(1,) * 4)
    operands = Operands("fastconv::bfloat16", 2, True, True, (72, 1, 24, 8), True)
    gpu = replace(H200, shared_bytes_per_block=101376)

    def fits(statistics: bool) -> list[bool]:
        asked = replace(operands, statistics=statistics)
        layer = layer_of(conv.problem, asked, gpu, transposed=False)
        found = tiles_of(layer, gpu)
        return [one.left_bytes <= one.buffers * one.joined * WARP_BYTES for one in found]

    assert all(fits(statistics=True))
    assert not all(fits(statistics=False))


@pytest.mark.parametrize(
    ("direction", "fields"),
    [
        ("forward", {"scalar": "float", "scalar_bytes": 4, "precision": "tf32"}),
        ("forward", {"epilogue": Epilogue("relu")}),
        ("forward", {"epilogue": Epilogue(residual=True)}),
        ("forward", {"input_channels_last": False, "output_channels_last": False}),
        ("forward", {"aligned": False}),
        ("input_grad", {}),
    ],
    ids=str,
)
def test_others_leave_none(direction: str, fields: dict[str, object]) -> None:
    for conv in (LARGE, COPIED):
        made = _planned(conv, direction, **fields)
        assert made.shares == 0
        assert all("statistics" not in one.tensors for one in made.launches)
        assert made == _planned(conv, direction, statistics=False, **fields)


# --- Faults ---------------------------------------------------------------------------------------

FILE = "hopper/implicit_gemm_nhwc/statistics.cuh"
FAULTS = {
    "positions behind the last": Fault(FILE, "if (outputs == (1u << kWarpRows) - 1) {", "if (1) {"),
    "the neighbour's channels": Fault(FILE, "lane % 4 * 4)", "lane % 2 * 4)"),
    "the other box's rows": Fault(FILE, "row * C::joined + box % C::joined", "row * C::joined"),
    "each tile's own shift": Fault(FILE, "if (before == 0) first", "first"),
    "the first warps alone": Fault(FILE, "warp < kConsumerWarps; ++warp", "warp < 4; ++warp"),
    "no meeting of warps": Fault(FILE, "warpgroups_sync<kConsumers>(kConsumers);", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    """All accesses are in bounds: results differ from float64, or between orders of warps."""
    tensors = Tensors.random(FAULTY)
    with pytest.raises(AssertionError):
        check(FAULTY, tensors, with_fault(FAULTY.plan, FAULTS[name]))


FAULTY = case_of(
    with_tile(forward, 2, 128), Conv("faulty", (18, 16, 5, 7), (128, 16, 1, 1)), TYPES[0], ONE
)
