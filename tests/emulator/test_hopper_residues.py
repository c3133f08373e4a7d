"""Hopper's halo kernel on the CPU, with all residues of a strided input gradient as MMA rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    Conv,
    PassCase,
    Tensors,
    assert_alone_as_in_batch,
    assert_correct,
    check,
    check_special_values,
    float64,
    in_batch,
    run,
    some,
)
from emulator.test_hopper_halo import FEW, MODES, ONE, SMALL, Choice, named, planner_of
from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Gpu, Plan
from fastconv.kernels.hopper import coverage

SMALLER = Gpu("sm_90a", 4, 60000, 61024)


def _case(conv: Conv, mode: str, choose: Choice | None = None, **options: Any) -> PassCase:
    dtype, precision = MODES[mode]
    options.setdefault("gpu", FEW)
    planner = planner_of("input_grad", choose, depth_to_space=True)
    return PassCase(conv, planner, dtype=dtype, precision=precision, **options)


def _rows(plans: list[Plan]) -> Plan:
    """Chooses the first plan with several rows in a line of pixels."""
    return next(plan for plan in plans if dict(_of(plan))["tile_rows"] > 1)


def _passes(plans: list[Plan]) -> Plan:
    """Chooses the first plan whose accumulators leave in several passes."""
    several = (plan for plan in plans if _passes_of(**dict(_of(plan))) > 1)
    return next(several)


def _passes_of(pixels: int, pass_pixels: int, **_: Any) -> int:
    return ceil_div(pixels, pass_pixels)


def _of(plan: Plan) -> tuple[tuple[str, Any], ...]:
    return plan.launches[-1].kernel.constants


# This one runs in every mode and layout. Strides begin before the image, and are whole vectors.
ALEXNET = Conv("alexnet", (2, 3, 31, 40), (20, 3, 11, 11), (4, 4), (2, 2, 2, 2))
# Stacked rows of any length.
RESNET = Conv("resnet", (1, 3, 37, 27), (24, 3, 7, 7), (2, 2), (3, 3, 3, 3))
PATCHES = Conv("patches", (1, 3, 12, 24), (40, 3, 4, 4), (4, 4))
WIDE_PATCHES = Conv("wide patches", (1, 3, 8, 259), (40, 3, 2, 2), (2, 2))
TALL = Conv("tall", (1, 1, 31, 44), (32, 1, 21, 5), (2, 2), (10, 10, 2, 2))
WIDE = Conv("wide", (1, 3, 9, 260), (24, 3, 5, 7), (2, 2), (2, 1, 3, 3))
DILATED = Conv("dilated", (2, 66, 23, 28), (24, 66, 3, 3), (5, 5), (1, 1, 1, 1), (2, 2))
EMPTY = Conv("kernel below stride", (1, 3, 15, 18), (24, 3, 2, 1), (4, 3), (1, 0, 2, 0))

CASES = [
    *(_case(ALEXNET, mode, channels_last=last, other_format=other)
      for mode, last, other in product(MODES, (False, True), (False, True))),
    *(_case(RESNET, mode, channels_last=mode in ("ieee", "bfloat16")) for mode in MODES),
    *(_case(RESNET, mode, other_format=True, aligned=False) for mode in ("tf32", "float16")),
    _case(RESNET, "bfloat16", aligned=False, gpu=ONE),
    # A line of pixels has several rows: all aligned alike, or not, so that lanes store them.
    _case(PATCHES, "ieee", _rows),
    _case(replace(PATCHES, input=(1, 3, 12, 23)), "tf32", _rows),
    _case(replace(ALEXNET, input=(1, 3, 31, 37)), "bfloat16", _rows, channels_last=True),
    # Strips of rows, also in several passes, without resident weights.
    _case(WIDE, "tf32", named("x32+0")),
    _case(WIDE, "bfloat16", named("x32+0"), channels_last=True, gpu=ONE),
    _case(replace(WIDE, input=(1, 3, 9, 257)), "float16", named("x32+0")),
    _case(WIDE, "tf32", named("x32+0"), aligned=False),
    _case(WIDE, "tf32", _passes, gpu=SMALL),
    _case(WIDE_PATCHES, "float16", _passes, channels_last=True, gpu=SMALLER),
    _case(WIDE_PATCHES, "bfloat16", _passes, aligned=False, gpu=SMALLER),
    _case(ALEXNET, "tf32", _passes, gpu=SMALL),
    # Bulk copies load lines, or lanes copy them.
    *(_case(WIDE, mode, named(f"2 {kind}")) for mode, kind in
      product(("tf32", "ieee", "bfloat16"), ("staged", "copied"))),
    # One channel, of which an MMA has eight rows; sums so long that they are compensated.
    *(_case(TALL, mode) for mode in ("tf32", "bfloat16")),
    _case(replace(TALL, weight=(128, 1, 21, 5)), "ieee", gpu=ONE),
    _case(replace(TALL, input=(1, 2, 31, 43), weight=(32, 2, 21, 5)), "float16",
          channels_last=True),
    # Sums are so short that products of two low parts count.
    _case(Conv("short", (1, 3, 13, 22), (24, 3, 6, 6), (4, 4), (1, 1, 1, 1)), "ieee"),
    _case(Conv("short", (1, 3, 13, 22), (24, 3, 6, 6), (4, 4), (1, 1, 1, 1)), "ieee",
          channels_last=True),
    # More outputs than an MMA has rows, in lines with some idle rows.
    *(_case(Conv("many residues", (1, 3, 21, 32), (24, 3, 9, 9), (9, 9), (3, 0, 2, 4)), mode,
            channels_last=last) for mode, last in (("tf32", False), ("bfloat16", True))),
    _case(Conv("patches of 16", (2, 3, 32, 35), (24, 3, 16, 16), (16, 16)), "tf32"),
    _case(Conv("patches of 16", (2, 3, 32, 32), (24, 3, 16, 16), (16, 16)), "float16",
          channels_last=True),
    _case(Conv("many channels", (1, 30, 9, 13), (24, 30, 3, 3), (2, 2), (1, 1, 1, 1)), "tf32"),
    _case(Conv("many channels", (1, 30, 9, 13), (24, 30, 3, 3), (2, 2), (1, 1, 1, 1)), "bfloat16",
          channels_last=True),
    _case(Conv("groups", (1, 24, 9, 14), (32, 12, 3, 4), (2, 2), (1, 0, 2, 1), groups=2), "tf32"),
    # A stride along one axis with dilation along the other; different strides along both.
    _case(Conv("stride 2, 1", (1, 3, 12, 21), (40, 3, 7, 4), (2, 1), (3, 2, 1, 2)), "tf32"),
    _case(Conv("stride 2, 1", (1, 3, 12, 21), (40, 3, 7, 4), (2, 1), (3, 2, 1, 2), (1, 3)),
          "bfloat16", channels_last=True),
    _case(Conv("stride 1, 4", (1, 3, 9, 37), (40, 3, 4, 9), (1, 4), (1, 2, 3, 0)), "tf32"),
    _case(Conv("stride 1, 4", (1, 3, 15, 37), (40, 3, 4, 9), (1, 4), (1, 2, 3, 0), (3, 1)),
          "float16", gpu=ONE),
    _case(Conv("stride 3, 5", (1, 2, 19, 24), (24, 2, 8, 7), (3, 5), (2, 1, 4, 0)), "tf32"),
    _case(Conv("stride 3, 5", (1, 2, 19, 24), (24, 2, 8, 7), (3, 5), (2, 1, 4, 0)), "bfloat16",
          channels_last=True, other_format=True),
    _case(Conv("stride 3, 5", (1, 2, 19, 24), (24, 2, 8, 7), (3, 5), (2, 1, 4, 0)), "float16",
          aligned=False),
    _case(Conv("stride 5, 3", (1, 1, 23, 22), (48, 1, 9, 8), (5, 3), (3, 0, 1, 2)), "float16",
          channels_last=True),
    # Residues that no tap reaches, and rows and columns that no window covers.
    *(_case(EMPTY, mode, channels_last=last)
      for mode, last in (("tf32", False), ("bfloat16", True))),
    _case(Conv("pointwise", (1, 3, 9, 14), (72, 3, 1, 1), (2, 2)), "float16"),
    _case(Conv("no window at the end", (1, 3, 16, 19), (24, 3, 4, 4), (3, 3)), "tf32"),
    _case(Conv("padding beyond the kernel", (1, 3, 9, 10), (24, 3, 3, 4), (2, 2), (5, 4, 6, 3)),
          "tf32"),
    _case(Conv("padding beyond the kernel", (1, 3, 9, 10), (24, 3, 3, 4), (2, 2), (5, 4, 6, 3)),
          "float16", channels_last=True),
    _case(Conv("one pixel", (2, 3, 1, 1), (24, 3, 4, 4), (4, 4), (3, 0, 3, 0)), "tf32"),
    # More channels than an MMA has rows, at every residue.
    *(_case(Conv("upsampling", (2, 70, 1, 133), (24, 70, 1, 16), (1, 8), (0, 0, 4, 4)), mode)
      for mode in ("tf32", "bfloat16")),
    _case(Conv("upsampling by 10", (1, 72, 1, 67), (40, 72, 1, 20), (1, 10), (0, 0, 5, 5)), "ieee"),
    _case(Conv("2x2", (1, 66, 10, 14), (24, 66, 2, 2), (2, 2)), "float16"),
    # Dilated kernels: taps that reach all residues, some, or one; that read every position, or
    # every second one; fewer taps than positions that they read.
    *(_case(DILATED, mode) for mode in MODES),
    _case(DILATED, "bfloat16", aligned=False),
    _case(Conv("dilated, grouped", (1, 24, 17, 37), (16, 12, 3, 5), (2, 3), (1, 1, 2, 2), (2, 1),
               groups=2), "tf32"),
    _case(Conv("dilated, grouped", (1, 24, 17, 37), (16, 12, 3, 5), (2, 3), (1, 1, 2, 2), (2, 1),
               groups=2), "bfloat16"),
    _case(Conv("dilation 4, stride 3", (1, 9, 2, 101), (24, 9, 1, 3), (1, 3), (0, 0, 0, 0), (1, 4)),
          "tf32"),
    _case(Conv("dilation 4, stride 2", (1, 9, 2, 75), (24, 9, 1, 4), (1, 2), (0, 0, 3, 1), (1, 4)),
          "bfloat16"),
    _case(Conv("dilation 7, stride 2", (1, 40, 9, 41), (24, 40, 1, 3), (1, 2), (0, 0, 3, 5),
               (1, 7)),
          "tf32"),
    _case(Conv("dilation 3, stride 2", (1, 3, 19, 22), (24, 3, 4, 2), (2, 2), (3, 3, 1, 2), (3, 3)),
          "bfloat16", channels_last=True),
    # Depthwise upsampling: a group's only channel has rows for all of its residues.
    *(_case(Conv("depthwise", (2, 5, 24, 31), (5, 1, 16, 16), (8, 8), (4, 4, 4, 4), groups=5), mode)
      for mode in ("tf32", "bfloat16")),
    _case(Conv("groups of 2", (1, 6, 15, 34), (9, 2, 6, 8), (3, 4), (1, 2, 3, 0), groups=3),
          "float16"),
]  # fmt: skip

RUN = some(CASES, one_in=7)

# Images alone and in a batch, which has other tiles.
ALONE = [
    _case(replace(ALEXNET, input=(1, 3, 31, 40)), "tf32"),
    _case(replace(WIDE, input=(1, 3, 9, 60)), "bfloat16", channels_last=True),
]
# Convolutions that run with several tiles.
TILES = [_case(ALEXNET, "tf32"), _case(WIDE, "bfloat16", channels_last=True)]


def _with_other_tiles(case: PassCase) -> list[PassCase]:
    """The test case with three other tiles, up to the last in the order of the rules."""

    def choice(number: int) -> Callable[[list[Plan]], Plan]:
        return lambda plans: plans[number * (len(plans) - 1) // 3]

    planners = (
        planner_of("input_grad", choice(number), depth_to_space=True) for number in (1, 2, 3)
    )
    return [replace(case, planner=planner) for planner in planners]


OTHER_TILES = [_with_other_tiles(case) for case in TILES]
INFINITE = [
    *(_case(conv, "tf32") for conv in (EMPTY, replace(DILATED, input=(1, 66, 23, 28)))),
    _case(EMPTY, "bfloat16", channels_last=True),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    others = (other for others in OTHER_TILES for other in others)
    cases = [*RUN, *ALONE, *map(in_batch, ALONE), *TILES, *others, *INFINITE]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


def test_cases_cover_all_branches() -> None:
    chosen = [coverage.HALO.choices(case.plan.launches[-1].kernel) for case in CASES]

    def pairs(*names: str) -> set[tuple[Any, ...]]:
        return {tuple(choices[name] for name in names) for choices in chosen}

    both = {*product((False, True), repeat=2)}
    assert pairs("interleave") == {("residues",)}
    for name in ("pairs", "early", "idle rows", "empty residues", "dilated residues", "stacked",
                 "rows", "grouped",
                 "several strips", "16 bits", "staged", "bulk_loads", "low_low_mma",
                 "compensated", "resident", "row step"):  # fmt: skip
        assert pairs(name) == {(False,), (True,)}, name
    assert pairs("lines") == pairs("passes") == {(1,), (2,)}
    # Bulk and other stores, for every kind of output.
    for name in ("16 bits", "out_channels_last", "pairs", "rows", "early", "several strips"):
        assert pairs(name, "bulk_stores") == both, name
    for name in ("pairs", "idle rows", "early", "stacked", "rows"):
        assert pairs(name, "out_channels_last") == both, name
    assert pairs("channel_groups") == {(1,), (2,)}
    stacks = {dict(_of(case.plan))["stack"] for case in CASES}
    assert stacks == {1, 2, 4, 8}


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


@pytest.mark.parametrize(("case", "others"), [*zip(TILES, OTHER_TILES, strict=True)])
def test_all_tiles_give_the_same_bits(case: PassCase, others: list[PassCase]) -> None:
    tensors = Tensors.random(case)
    expected = run(case, tensors)
    assert_correct(case, tensors, expected)
    for other in others:
        assert run(other, tensors).equal(expected)


def _with_infinity(case: PassCase) -> Tensors:
    tensors = Tensors.random(case)
    tensors.grad_output[0, 0, 1, 2] = torch.inf
    return tensors


@pytest.mark.parametrize("case", INFINITE, ids=str)
def test_what_no_tap_reaches_is_zero(case: PassCase) -> None:
    """Even where the kernel multiplies zero weights by an infinity, and drops the results."""
    tensors = _with_infinity(case)
    actual = run(case, tensors)
    ones = Tensors(*(torch.ones_like(tensor) for tensor in vars(tensors).values()))
    empty = float64(case, ones) == 0
    assert 0 < empty.sum() < empty.numel()
    assert (actual[empty] == 0).all()
    assert (~actual.isfinite()).any()


@pytest.mark.xfail(
    reason="space-to-depth adds zero weights, and infinity times zero is NaN", strict=True
)
def test_infinity_in_residues() -> None:
    assert ALEXNET_TF32 in CASES
    check_special_values(ALEXNET_TF32, _with_infinity(ALEXNET_TF32))


ALEXNET_TF32 = CASES[0]
