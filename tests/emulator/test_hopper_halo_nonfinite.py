"""Infinities, NaNs and overflow in the halo kernel of Hopper, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    LARGE,
    ODD_NUMBERS,
    Conv,
    PassCase,
    Tensors,
    assert_plain,
    at_corners,
    run,
)
from emulator.test_hopper_halo import CASES, FEW, MODES, constants_of, forward, named, planner_of


def _forward(conv: Conv, mode: str) -> PassCase:
    dtype, precision = MODES[mode]
    return PassCase(conv, forward, dtype=dtype, precision=precision, gpu=FEW)


# One infinity in the input, and whether output rows share a product.
INFINITE = {
    False: Conv("infinite", (1, 8, 9, 11), (64, 8, 3, 3)),
    True: Conv("infinite, stacked", (1, 8, 9, 11), (32, 8, 3, 3)),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    infinite = (_forward(conv, mode) for conv, mode in product(INFINITE.values(), MODES))
    cases = [*infinite, FOLDED, *SPLIT]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stacked", [False, True], ids=["", "stacked"])
def test_infinity_stays_where_it_is(
    mode: str, stacked: bool, request: pytest.FixtureRequest
) -> None:
    """Padding, zero weights of tiles and pixels beyond the image are not multiplied with it."""
    case = _forward(INFINITE[stacked], mode)
    assert (constants_of(case)["stack"] > 1) == stacked
    if stacked:
        reason = "zero weights above and below the kernel are multiplied with it"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    tensors = Tensors.random(case)
    tensors.input[0, 0, 4, 5] = torch.inf
    assert_plain(case, tensors)


FOLDED = _forward(Conv("folded", (2, 3, 23, 26), (64, 3, 7, 6), (2, 2), (3, 3, 3, 3)), "tf32")


@pytest.mark.xfail(reason="zero weights that folding adds are multiplied with it", strict=True)
def test_infinity_in_folded_strides() -> None:
    assert FOLDED in CASES
    tensors = Tensors.random(FOLDED)
    tensors.input[0, 0, 10, 11] = torch.inf
    assert_plain(FOLDED, tensors)


SHORT = _forward(INFINITE[False], "ieee")
MIDDLE = _forward(Conv("of ordinary length", (1, 24, 9, 11), (64, 24, 3, 3)), "ieee")
LONG = _forward(Conv("long sums", (1, 280, 5, 7), (64, 280, 3, 3), padding=(1, 1, 1, 1)), "ieee")
SHORT_ROLLING = replace(
    _forward(Conv("short, rolling", (1, 8, 7, 101), (64, 8, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    planner=planner_of("forward", named(" 2 staged")),
)
# The kinds of sums that numbers in two parts have: with products of low parts, without, and
# compensated; and what a tile of several stages looks like.
SPLIT = [SHORT, MIDDLE, LONG, SHORT_ROLLING]


def test_split_cases_are_all_kinds() -> None:
    kinds = [(of["low_products"], of["compensated"]) for of in map(constants_of, SPLIT)]
    assert kinds == [(True, False), (False, False), (False, True), (True, False)]
    assert [constants_of(case)["rolling"] for case in SPLIT] == [False, False, False, True]


def odd_input(case: PassCase) -> Tensors:
    """What is no number, times weights without a low part, zeros, and large ones."""
    tensors = Tensors.random(case)
    at_corners(
        tensors.input, ODD_NUMBERS[: 3 if case == LONG else 4]
    )  # its totals must not overflow
    tensors.weight[::2].round_(decimals=0)
    tensors.weight[1::4] *= 1e5  # low parts times the largest number overflow
    return tensors


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_odd_numbers_in_two_parts(case: PassCase) -> None:
    """As in plain float32: infinities are so, with their sign, and what is not finite is NaN."""
    assert_plain(case, odd_input(case))


@pytest.mark.xfail(reason="what a total loses as it overflows is no number", strict=True)
def test_long_sums_that_overflow() -> None:
    tensors = Tensors.random(LONG)
    tensors.input[0, 0, 2, 3] = LARGE
    assert_plain(LONG, tensors)


def odd_weights(case: PassCase) -> Tensors:
    tensors = Tensors.random(case)
    for channel, number in enumerate(ODD_NUMBERS[:3]):
        tensors.weight[channel, 3, 1, 1] = number
    tensors.input[0, 3, 2, 2] = torch.inf  # times infinity, too
    tensors.weight[3, 4, 1, 1] = LARGE
    tensors.input[:, 4] /= 8  # its products are finite
    return tensors


@pytest.mark.parametrize("case", [SHORT, MIDDLE, LONG], ids=str)
def test_odd_weights_in_two_parts(case: PassCase, request: pytest.FixtureRequest) -> None:
    if case != MIDDLE:
        reason = "consumers are not told of infinite weights"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    assert_plain(case, odd_weights(case))


def test_an_infinity_changes_no_other_bit() -> None:
    """What consumers are careful with are the outputs that see it."""
    for case in (SHORT, LONG):
        tensors = Tensors.random(case)
        expected = run(case, tensors)
        tensors.input[0, 0, 0, 0] = torch.inf
        actual = run(case, tensors)
        finite = actual.isfinite()
        assert 0 < (~finite).sum() < finite.numel() // 4
        assert actual[finite].equal(expected[finite])
