"""Numbers below 2^-113 in ``"ieee"`` precision on tensor cores: the claims of docs/numerics.md.

3xTF32 splits a number into two TF32 parts, which are multiples of 2^-136.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emulator import (
    precompile,
    test_ampere_halo,
    test_ampere_wgrad_halo,
    test_hopper_halo,
    test_hopper_wgrad_halo,
)
from emulator.pass_cases import ROUNDINGS, Conv, PassCase, Tensors, float64, run

UNIT = 2.0**-136  # spacing of TF32's subnormal numbers
EXACT_FROM = 2.0**-113  # from here on, all float32 numbers are multiples of UNIT
EPSILON = torch.finfo(torch.float32).eps
CONV = Conv("small numbers", (2, 16, 5, 12), (24, 16, 3, 3), padding=(1, 1, 1, 1))

CASES = {
    "hopper": PassCase(CONV, test_hopper_halo.forward, gpu=test_hopper_halo.FEW, bias=False),
    "hopper weights": PassCase(
        CONV, test_hopper_wgrad_halo.weight_grad, gpu=test_hopper_wgrad_halo.GPU
    ),
    "ampere": PassCase(
        CONV,
        test_ampere_halo.planner_of("forward"),
        gpu=test_ampere_halo.FEW,
        bias=False,
    ),
    "ampere weights": PassCase(
        CONV, test_ampere_wgrad_halo.weight_grad, gpu=test_ampere_wgrad_halo.GPU
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for case in CASES.values():
        assert any(("parts", 2) in launch.kernel.constants for launch in case.plan.launches)
    precompile(launch.kernel for case in CASES.values() for launch in case.plan.launches)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> PassCase:
    return CASES[request.param]


Made = Callable[[Tensor], Tensor]
"""A function that makes small numbers from normally distributed ones."""


def _with_small(case: PassCase, make: Made, second: bool) -> tuple[Tensors, Tensors]:
    """Tensors with one small factor; and with that factor 1 where it is small, and 0 elsewhere."""
    factors = ("input", "weight") if case.direction == "forward" else ("input", "grad_output")
    tensors, name = Tensors.random(case), factors[second]
    small = make(getattr(tensors, name))
    is_small = ((small.abs() < EXACT_FROM) & (small != 0)).float()
    return replace(tensors, **{name: small}), replace(tensors, **{name: is_small})


def _error_and_bound(
    case: PassCase, tensors: Tensors, where: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """The error, the bound of rounding errors, and the bound of what small numbers lose."""
    error = (run(case, tensors).double() - float64(case, tensors)).abs()
    magnitudes, others = (
        float64(case, Tensors(*(tensor.abs() for tensor in vars(some).values())))
        for some in (tensors, where)
    )
    return error, ROUNDINGS * EPSILON * magnitudes, UNIT / 2 * others


@pytest.mark.parametrize("second", [False, True], ids=["input", "other factor"])
@pytest.mark.parametrize("exponent", [-112, -120, -126, -130])
def test_bound(case: PassCase, exponent: int, second: bool) -> None:
    tensors, where = _with_small(case, lambda some: some * 2.0**exponent, second)
    error, rounding, lost = _error_and_bound(case, tensors, where)
    assert (error <= rounding + lost).all()
    if exponent <= -126:
        assert (error > rounding).any(), "docs/numerics.md says that bits are lost here"


def test_numbers_that_lose_nothing(case: PassCase) -> None:
    def from_there_on(some: Tensor) -> Tensor:
        return (some.sign() + some / some.abs().max()) * EXACT_FROM

    error, rounding, lost = _error_and_bound(case, *_with_small(case, from_there_on, False))
    assert not lost.any()
    assert (error <= rounding).all()


def test_the_bound_is_no_larger_than_it_has_to_be(case: PassCase) -> None:
    """All terms lose nearly UNIT / 2, in the same direction."""
    number = 2.0**-130 + UNIT / 2 - 2.0**-149
    tensors, where = _with_small(case, lambda some: torch.full_like(some, number), False)
    other = "weight" if case.direction == "forward" else "grad_output"
    ones = {other: torch.ones_like(getattr(tensors, other))}
    tensors, where = replace(tensors, **ones), replace(where, **ones)
    error, rounding, lost = _error_and_bound(case, tensors, where)
    assert (error <= rounding + lost).all()
    assert (error > 0.99 * lost).all()


def test_what_counts_as_zero(case: PassCase) -> None:
    tensors, _ = _with_small(case, lambda some: some.sign() * UNIT / 4, False)
    assert not run(case, tensors).any()
