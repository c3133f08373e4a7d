"""Infinities, NaNs and overflow in Hopper's halo kernel, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    LARGE,
    SPECIAL_VALUES,
    Conv,
    PassCase,
    Tensors,
    at_corners,
    check_special_values,
    run,
)
from emulator.test_hopper_halo import CASES, FEW, MODES, constants_of, forward, named, planner_of


def _forward(conv: Conv, mode: str) -> PassCase:
    dtype, precision = MODES[mode]
    return PassCase(conv, forward, dtype=dtype, precision=precision, gpu=FEW)


# Convolutions with an infinity in the input, by whether output rows share an MMA.
INFINITE = {
    False: Conv("infinite", (1, 8, 9, 11), (64, 8, 3, 3)),
    True: Conv("infinite, stacked", (1, 8, 9, 11), (32, 8, 3, 3)),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    infinite = (_forward(conv, mode) for conv, mode in product(INFINITE.values(), MODES))
    cases = [*infinite, SPACE_TO_DEPTH, *SPLIT]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stacked", [False, True], ids=["", "stacked"])
def test_infinity_stays_where_it_is(
    mode: str, stacked: bool, request: pytest.FixtureRequest
) -> None:
    """Padding, zero weights of tiles and pixels beyond the image do not meet the infinity."""
    case = _forward(INFINITE[stacked], mode)
    assert (constants_of(case)["stack"] > 1) == stacked
    if stacked:
        reason = "stacking adds zero weights, and infinity times zero is NaN"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    tensors = Tensors.random(case)
    tensors.input[0, 0, 4, 5] = torch.inf
    check_special_values(case, tensors)


SPACE_TO_DEPTH = _forward(
    Conv("space-to-depth", (2, 3, 23, 26), (64, 3, 7, 6), (2, 2), (3, 3, 3, 3)), "tf32"
)


@pytest.mark.xfail(
    reason="space-to-depth adds zero weights, and infinity times zero is NaN", strict=True
)
def test_infinity_with_space_to_depth() -> None:
    assert SPACE_TO_DEPTH in CASES
    tensors = Tensors.random(SPACE_TO_DEPTH)
    tensors.input[0, 0, 10, 11] = torch.inf
    check_special_values(SPACE_TO_DEPTH, tensors)


SHORT = _forward(INFINITE[False], "ieee")
MIDDLE = _forward(Conv("of ordinary length", (1, 24, 9, 11), (64, 24, 3, 3)), "ieee")
LONG = _forward(Conv("long sums", (1, 280, 5, 7), (64, 280, 3, 3), padding=(1, 1, 1, 1)), "ieee")
SHORT_ROLLING = replace(
    _forward(Conv("short, rolling", (1, 8, 7, 101), (64, 8, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    planner=planner_of("forward", named(" 2 staged")),
)
# All kinds of 3xTF32 sums: with products of two low parts, without them, and compensated; and one
# with blocks that walk down the image.
SPLIT = [SHORT, MIDDLE, LONG, SHORT_ROLLING]


def test_split_cases_are_all_kinds() -> None:
    kinds = [(of["low_low_mma"], of["compensated"]) for of in map(constants_of, SPLIT)]
    assert kinds == [(True, False), (False, False), (False, True), (True, False)]
    assert [constants_of(case)["rolling"] for case in SPLIT] == [False, False, False, True]


def special_inputs(case: PassCase) -> Tensors:
    """Special inputs, and weights that have no low part, are zero, or are large."""
    tensors = Tensors.random(case)
    count = 3 if case == LONG else 4  # compensated sums must not overflow
    at_corners(tensors.input, SPECIAL_VALUES[:count])
    tensors.weight[::2].round_(decimals=0)
    tensors.weight[1::4] *= 1e5  # low parts times the largest number overflow
    return tensors


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_special_values_in_3xtf32(case: PassCase) -> None:
    """Infinities, their signs and NaNs are those of plain float32 arithmetic."""
    check_special_values(case, special_inputs(case))


@pytest.mark.xfail(reason="compensation makes NaN of a sum that overflows", strict=True)
def test_long_sums_that_overflow() -> None:
    tensors = Tensors.random(LONG)
    tensors.input[0, 0, 2, 3] = LARGE
    check_special_values(LONG, tensors)


def special_weights(case: PassCase) -> Tensors:
    tensors = Tensors.random(case)
    for channel, number in enumerate(SPECIAL_VALUES[:3]):
        tensors.weight[channel, 3, 1, 1] = number
    tensors.input[0, 3, 2, 2] = torch.inf  # so that an infinity also meets an infinite weight
    tensors.weight[3, 4, 1, 1] = LARGE
    tensors.input[:, 4] /= 8  # so that products with LARGE are finite
    return tensors


@pytest.mark.parametrize("case", [SHORT, MIDDLE, LONG], ids=str)
def test_special_weights_in_3xtf32(case: PassCase, request: pytest.FixtureRequest) -> None:
    if case != MIDDLE:
        reason = "consumer warps do not check weights for infinities"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    check_special_values(case, special_weights(case))


def test_an_infinity_changes_no_other_bit() -> None:
    """Only outputs whose window has the infinity are computed another way."""
    for case in (SHORT, LONG):
        tensors = Tensors.random(case)
        expected = run(case, tensors)
        tensors.input[0, 0, 0, 0] = torch.inf
        actual = run(case, tensors)
        finite = actual.isfinite()
        assert 0 < (~finite).sum() < finite.numel() // 4
        assert actual[finite].equal(expected[finite])
