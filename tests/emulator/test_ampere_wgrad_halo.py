"""Ampere's halo kernel for weight gradients on the CPU: every mode on small odd shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from emulator import precompile
from emulator import run as run_launches
from emulator.pass_cases import (
    LARGE,
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
from fastconv.kernels.ampere.coverage import ANATOMIES
from fastconv.kernels.ampere.wgrad_halo import plan as wgrad
from fastconv.kernels.ampere.wgrad_halo import tiles
from fastconv.kernels.family import GEOMETRY, Declined, Gpu, Kernel, Launch, Operands, Plan
from fastconv.kernels.gpus import GPUS
from fastconv.problem import Problem

# Few SMs, so that a block has several walks down an image.
GPU = replace(GPUS["sm_80"], sm_count=3)


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans with this kernel, even where it is not the fastest."""
    plan: Plan = wgrad.plan(wgrad.choose_tile(problem, operands, gpu), gpu)
    return plan


def _with(**wanted: object) -> Planner:
    """A planner with a tile that has these attributes, even where others are faster."""

    def has_all(tile: Any) -> bool:
        return all(getattr(tile, name) == value for name, value in wanted.items())

    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        weight_tiles = wgrad._weight_tiles(problem, operands)
        tiles = (tile for each in weight_tiles for tile in wgrad._with_steps(each))
        fitting = (tile for tile in tiles if has_all(tile) and tile.fits(gpu))
        plan: Plan = wgrad.plan(min(fitting, key=lambda tile: tile.cycles(gpu)), gpu)
        return plan

    return weight_grad


MODES = {
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
}

CONVS = (
    Conv("asymmetric", (2, 12, 5, 12), (20, 12, 3, 5), padding=(1, 1, 2, 2)),
    Conv("dilated", (1, 9, 11, 16), (16, 9, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
    Conv("strided", (2, 8, 7, 17), (9, 8, 3, 3), stride=(2, 3), padding=(1, 1, 1, 1)),
    Conv("stride beyond the kernel", (1, 9, 15, 19), (8, 9, 2, 3), (5, 2), (3, 4, 0, 9), (1, 4)),
    Conv("stride and dilation share a factor", (1, 8, 13, 24), (9, 8, 3, 3), (4, 2), (3, 0, 1, 2),
         (2, 4)),
    Conv("pointwise", (1, 20, 4, 12), (40, 20, 1, 1)),
    Conv("pointwise strided", (1, 16, 7, 16), (16, 16, 1, 1), stride=(2, 2)),
    Conv("small images", (5, 16, 7, 7), (17, 16, 3, 3), padding=(1, 1, 1, 1)),
    Conv("grouped", (1, 32, 5, 8), (24, 16, 3, 2), padding=(1, 0, 0, 1), groups=2),
    Conv("one row", (3, 8, 1, 40), (8, 8, 1, 9), padding=(0, 0, 4, 4)),
    Conv("one pixel", (3, 11, 2, 2), (5, 11, 2, 2)),
    Conv("few channels", (1, 3, 9, 9), (10, 3, 3, 3)),
    Conv("wide image", (1, 8, 3, 150), (8, 8, 3, 3), padding=(1, 1, 1, 1)),
    Conv("many outputs", (1, 8, 4, 8), (130, 8, 1, 2)),
)  # fmt: skip
ROLLED = Conv("rolled", (1, 9, 13, 24), (16, 9, 5, 3), padding=(2, 2, 1, 1))
DILATED = Conv("rolled dilated", (2, 8, 14, 18), (16, 8, 3, 3), padding=(2, 2, 1, 1),
               dilation=(2, 1))  # fmt: skip
ODD_OUTPUTS = Conv("odd outputs", (1, 8, 4, 12), (9, 8, 1, 3), padding=(0, 0, 1, 1))
DEEP = Conv("deep", (1, 40, 3, 8), (20, 40, 3, 3), padding=(1, 1, 1, 1))


def _case(
    conv: Conv,
    mode: str,
    channels_last: bool = False,
    aligned: bool = True,
    bias: bool = False,
    planner: Planner = weight_grad,
) -> PassCase:
    dtype, precision = MODES[mode]
    return PassCase(conv, planner, dtype, channels_last, aligned, GPU, precision, bias_grad=bias)


# Tiles that the planner would choose only for larger problems.
FORCED = (
    _case(ROLLED, "tf32", bias=True, planner=_with(rolling=True, step_rows=1)),
    _case(ROLLED, "bfloat16", planner=_with(rolling=True, strip_columns=24)),
    _case(ROLLED, "float16", True, planner=_with(rolling=True, step_rows=2)),
    _case(DILATED, "ieee", True, planner=_with(rolling=True)),
    _case(DILATED, "bfloat16", planner=_with(rolling=True, strip_columns=8)),
    _case(DEEP, "tf32", planner=_with(tile_channels=16, tile_rows=2)),
    _case(DEEP, "float16", bias=True, planner=_with(tile_columns=2, warps_out=2)),
    _case(CONVS[5], "bfloat16", True, planner=_with(warps_pixels=2)),
    _case(CONVS[5], "ieee", bias=True, planner=_with(warps_pixels=4)),
    _case(CONVS[13], "float16", True, planner=_with(row_tiles=4)),
    # Both tensors pass through registers.
    replace(_case(ODD_OUTPUTS, "bfloat16"), other_format=True),
)


def _cases() -> list[PassCase]:
    """Every convolution in both formats and in a mix of them; modes alternate."""
    modes = list(MODES)
    cases = []
    for i, conv in enumerate(CONVS):
        mode, other, third = (modes[(i + j) % 4] for j in range(3))
        cases.append(_case(conv, mode, bias=i % 2 == 0))
        cases.append(_case(conv, other, channels_last=True, bias=i % 2 == 1))
        mixed = _case(conv, third, channels_last=i % 4 < 2, aligned=i % 2 == 0, bias=True)
        cases.append(replace(mixed, other_format=True))
    for i, mode in enumerate(modes):
        cases.append(_case(CONVS[0], mode, channels_last=i % 2 == 0, aligned=False, bias=True))
    return cases


CASES = _cases()
RUN = [*some(CASES, one_in=10), *some(FORCED, one_in=3)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("case", [FORCED[0], FORCED[2], FORCED[8]], ids=str)
def test_infinity_stays_where_it_is(case: PassCase) -> None:
    """Special values lie in the middle, where all taps read them, and meet one of the gradient."""
    tensors = Tensors.random(case)
    row, column = (size // 2 for size in case.conv.input[2:])
    for channel, number in enumerate(SPECIAL_VALUES[:3]):
        tensors.input[0, channel, row, column] = number
    tensors.grad_output[0, 7, row, column] = -torch.inf
    check_special_values(case, tensors)


def test_channels_keep_to_themselves() -> None:
    """Neighbouring channels in memory do not change results, not even as NaN."""
    case = FORCED[2]
    tensors = Tensors.random(case)
    expected = run(case, tensors)
    tensors.grad_output[:, 5] = torch.nan
    actual = run(case, tensors)
    assert actual[5].isnan().all()
    others = [i for i in range(case.conv.weight[0]) if i != 5]
    assert torch.equal(actual[others], expected[others])


def test_rounds() -> None:
    """The workspace is too small for the partial sums of all weights at once."""
    case = FORCED[6]
    once = case.plan
    with mock.patch.object(tiles, "WORKSPACE_BYTES", once.scratch_bytes // 4):
        assert len(case.plan.launches) > len(once.launches)
        check(case)


def test_padding_far_beyond_the_image() -> None:
    """The offsets of rows that far in the padding would exceed 32 bits."""
    near = Conv("a row", (1, 64, 1, 256), (8, 64, 1, 1), (1, 8))
    far = replace(near, stride=(2**17, 8), padding=(2**18, 0, 0, 0))
    assert far.padding[0] * 256 * 64 > 2**31
    assert far.problem.output_size == (3, 32)
    case = _case(far, "ieee", channels_last=True)
    tensors = Tensors.random(case)
    alone = replace(tensors, grad_output=tensors.grad_output[:, :, 2:])
    actual, expected = run(case, tensors), float64(replace(case, conv=near), alone)
    assert (actual.double() - expected).norm() <= 3e-7 * expected.norm()


SPLITS = """
#include "device/tensor/operand.cuh"
extern "C" __global__ void splits(const float* numbers, unsigned* parts) {
  const int i = static_cast<int>(threadIdx.x);
  fastconv::tensor::split_away(numbers[i], parts[2 * i], parts[2 * i + 1]);
}
"""


def test_splits_of_older_gpus(tmp_path: Path) -> None:
    """``__CUDA_ARCH__`` is 900 in the emulator, where kernels do not call this function."""
    source = tmp_path / "splits.cuh"
    source.write_text(SPLITS)
    kernel = Kernel(str(source), "splits", (("Scalar", "float"),))
    odd = torch.tensor([0.0, torch.inf, -torch.inf, LARGE, -LARGE, 1e-30, 3.4028234e38])
    numbers = torch.cat([torch.randn(121) * 10.0 ** torch.randint(-20, 20, (121,)), odd])
    parts = torch.zeros(128, 2, dtype=torch.int32)
    launch = Launch(kernel, (1, 1, 1), 128, 0, ("numbers", "parts"))
    run_launches([launch], {"numbers": numbers, "parts": parts})
    high, low = (parts & ~0x1FFF).view(torch.float32).double().unbind(1)
    assert torch.equal(high, high.float().double())
    assert high.isfinite().all()
    finite = numbers.isfinite()
    error = (high + low - numbers.double())[finite].abs()
    assert (error <= 2.0**-22 * numbers[finite].double().abs()).all()
    assert torch.equal(low[~finite], numbers[~finite].double())


@pytest.mark.parametrize(
    ("changes", "gpu", "reason"),
    [
        ({"scalar": "double", "scalar_bytes": 8}, "sm_80", "float64"),
        ({}, "sm_75", "tensor-core kernels for sm_75"),
        ({}, "sm_80", "so few channels"),
    ],
)
def test_declines(changes: dict[str, object], gpu: str, reason: str) -> None:
    kind = {
        "scalar": "float", "scalar_bytes": 4, "input_channels_last": False,
        "output_channels_last": False, "weight_strides": (1, 1, 1, 1), "aligned": True,
    }  # fmt: skip
    conv = Conv("one channel", (64, 1, 64, 64), (1, 1, 3, 3))
    with pytest.raises(Declined, match=reason):
        wgrad.weight_grad(conv.problem, Operands(**{**kind, **changes}), GPUS[gpu])  # type: ignore[arg-type]


def test_parts_name_all_choices() -> None:
    """Each choice is in a part; otherwise only classes of pairs would have it."""
    anatomy = ANATOMIES[wgrad.SOURCE]
    kernel = CASES[0].plan.launches[0].kernel
    assert anatomy.sizes - GEOMETRY <= dict(kernel.constants).keys()
    known = {name for names in anatomy.parts.values() for name in names}
    assert known == anatomy.choices(kernel).keys()
