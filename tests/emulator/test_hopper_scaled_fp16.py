"""Hopper's halo kernel with float32 as scaled fp16: scales, and repair of images and channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import precompile
from emulator.driver import run_both_orders
from emulator.pass_cases import (
    Conv,
    PassCase,
    Tensors,
    assert_alone_as_in_batch,
    assert_correct,
    check,
    in_batch,
    new_output,
    run,
    some,
)
from emulator.test_hopper_halo import (
    DEEP,
    EVERYWHERE,
    FEW,
    NARROW,
    ONE,
    ROLLING,
    SMALL,
    STRIPS,
    WIDE,
    Choice,
    named,
    planner_of,
)
from fastconv.kernels.planning import launches
from workspaces import workspace

MODES = ("tf32", "ieee")


def _case(
    conv: Conv,
    mode: str,
    direction: str = "forward",
    choose: Choice | None = None,
    half_copy: bool = False,
    **options: Any,
) -> PassCase:
    options.setdefault("gpu", FEW)
    planner = planner_of(direction, choose, scaled_fp16=True, half_copy=half_copy)
    return PassCase(conv, planner, precision=mode, **options)


CASES = [
    *(_case(EVERYWHERE, mode) for mode in MODES),
    _case(EVERYWHERE, "ieee", other_format=True, aligned=False),
    *(_case(ROLLING, mode) for mode in MODES),
    *(_case(WIDE, mode, choose=named(f"{slots} staged"), gpu=ONE)
      for mode, slots in zip(MODES, (1, 2), strict=True)),
    *(_case(NARROW, mode, choose=named("2 copied"), gpu=ONE) for mode in MODES),
    *(_case(WIDE, "tf32", choose=named(f"{kind} by 7")) for kind in ("1 staged", "2 copied")),
    _case(STRIPS, "tf32", gpu=SMALL),
    _case(NARROW, "ieee", gpu=ONE),
    _case(Conv("stack 2", (1, 24, 7, 20), (32, 24, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    _case(Conv("space-to-depth", (2, 5, 23, 26), (64, 5, 7, 6), (2, 2), (3, 3, 3, 3)), "tf32"),
    _case(Conv("pointwise", (2, 40, 9, 20), (40, 40, 1, 1)), "tf32"),
    _case(Conv("groups", (2, 40, 6, 9), (144, 20, 3, 3), groups=2), "ieee"),
    _case(Conv("whole lines", (2, 16, 5, 301), (128, 16, 3, 3)), "tf32", choose=named("+32"),
          gpu=ONE),
    _case(DEEP, "tf32", gpu=SMALL),
    _case(Conv("strips", (1, 16, 6, 301), (128, 16, 3, 3)), "ieee", gpu=ONE),
    _case(Conv("turns", (1, 16, 5, 322), (128, 16, 3, 3)), "ieee", gpu=ONE),
    _case(Conv("dilated", (1, 40, 15, 16), (72, 40, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
          "ieee", "input_grad"),
]  # fmt: skip
VOLUME = Conv("volume", (2, 16, 5, 6, 7), (24, 16, 3, 3, 3), (1, 1, 1), (1,) * 6, (1, 1, 1))
COPIED = [
    _case(Conv("groups", (2, 48, 6, 9), (144, 24, 3, 3), groups=2), "tf32", half_copy=True),
    _case(Conv("wide", (1, 64, 4, 70), (128, 64, 3, 2), padding=(1, 0, 2, 1)), "tf32",
          half_copy=True, gpu=ONE),
    _case(Conv("dilated", (1, 40, 15, 16), (72, 40, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
          "tf32", "input_grad", half_copy=True),
    _case(Conv("strided", (2, 16, 13, 12), (24, 16, 2, 3), (3, 2), (1, 1, 1, 1), (2, 3)), "tf32",
          half_copy=True, other_format=True),
    _case(Conv("pointwise", (2, 112, 9, 20), (40, 112, 1, 1)), "tf32", half_copy=True),
    _case(VOLUME, "tf32", half_copy=True),
    _case(Conv("deep", (2, 24, 6, 5, 9), (16, 24, 3, 2, 3), (1, 1, 1), (2, 0, 1, 0, 1, 2),
               (2, 1, 1)), "tf32", "input_grad", half_copy=True),
    _case(Conv("strided planes", (1, 16, 7, 6, 8), (32, 16, 3, 3, 3), (2, 1, 1), (1,) * 6,
               (1, 1, 1)), "tf32", half_copy=True),
]  # fmt: skip
RUN = [*some(CASES, one_in=10), *some(COPIED, one_in=4)]

THREE_IMAGES = Conv("three images", (3, 24, 5, 6), (40, 24, 3, 3), padding=(1, 1, 1, 1))
THREE = [
    *(_case(THREE_IMAGES, mode) for mode in MODES),
    _case(THREE_IMAGES, "tf32", half_copy=True),
]
LONE = [
    _case(Conv("alone", (1, 16, 9, 140), (72, 16, 3, 3), padding=(1, 1, 1, 1)), "ieee"),
    _case(VOLUME, "tf32", half_copy=True),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [*RUN, *THREE, *(one for case in LONE for one in (case, in_batch(case)))]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


def test_blocks_that_pack_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block packs several output channels, or finds the scales of several images."""
    monkeypatch.setattr(launches, "MOST_PACK_BLOCKS", 5)
    assert [one.grid for one in THREE[0].plan.launches[:2]] == [(5, 1, 1)] * 2
    check(THREE[0])


def test_cases_cover_all_branches() -> None:
    planned = [case.plan.launches for case in CASES]
    assert all([launch.kernel.entry for launch in one] == ["scale", *["pack", "convolve"] * 2]
               for one in planned)  # fmt: skip
    first = [dict(one[2].kernel.constants) for one in planned]
    second = [dict(one[4].kernel.constants) for one in planned]
    assert all(one["scaled_fp16"] and not one["repairs"] for one in first)
    assert all(one["repairs"] and not one["scaled_fp16"] for one in second)
    loads = ("staged", "bulk_loads", "rolling", "resident")
    for name in (*loads, "turns", "wraps", "transposed", "out_channels_last"):
        assert {one[name] for one in first} == {False, True}, name
    assert {one["raw_slots"] for one in first} == {0, 1, 2}
    assert {one["lead"] for one in first} == {0, 8, 32}
    assert {(one["turns"], one["parts"]) for one in first} == {*product((False, True), (1, 2))}


def _before_repair(case: PassCase, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result before the repair, with factors of channels, scales of images, and their marks."""
    plan, output = case.plan, new_output(case)
    read = {"input": tensors.input, "weight": tensors.weight, "bias": tensors.bias}
    tensors_of = {**read, "output": output, **workspace(plan)}
    scratch = tensors_of["scratch"]
    run_both_orders(plan.launches[:-2], tensors_of)
    constants = dict(plan.launches[2].kernel.constants)
    channels, columns = constants["table_channels"], constants["table_columns"]
    batch = case.conv.input[0]  # images, or volumes that are copied
    tables = scratch[constants["tables_at"] :]
    sizes = [4 * channels, 4 * columns * (1 + batch), 4 * batch, 4 * batch]
    factors, _, scales, marks = tables[: sum(sizes)].split(sizes)
    return output, factors.view(torch.float), scales.view(torch.float), marks.view(torch.int)


@pytest.mark.parametrize(
    ("size", "case"), some(product([1.0, 1e-6, 3e4, 1e-12, 1e14], THREE), one_in=3), ids=str
)
def test_numbers_of_any_size_need_no_repair(case: PassCase, size: float) -> None:
    tensors = Tensors.random(case)
    tensors = replace(
        tensors, input=tensors.input * size, weight=tensors.weight * 3e-3, bias=tensors.bias * size
    )
    tensors.input[:, :, :3] = 0  # as after a ReLU
    output, factors, scales, marks = _before_repair(case, tensors)
    assert factors.ne(0).all()
    assert scales.ne(0).all()
    assert not marks.any()
    assert_correct(case, tensors, output)


# Changes to the middle one of three images, after which it needs a repair.
BEYOND = {
    "small rows": lambda image: image[:, 2:6].mul_(1e-12),
    "one small vector": lambda image: image[:8, 3, 5].mul_(1e-20),
    "too large for any scale": lambda image: image.mul_(1e30),
    "too small for any scale": lambda image: image.mul_(1e-30),
}


@pytest.mark.parametrize(("beyond", "case"), some(product(BEYOND, THREE), one_in=3), ids=str)
def test_images_that_do_not_fit_are_repaired(case: PassCase, beyond: str) -> None:
    tensors = Tensors.random(case)
    tensors.bias.zero_()
    unchanged = run(case, tensors)
    BEYOND[beyond](tensors.input[1])
    output, factors, scales, marks = _before_repair(case, tensors)
    assert factors.ne(0).all()
    assert (marks.ne(0) | scales.eq(0)).tolist() == [False, True, False]
    if beyond == "small rows":
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_correct(case, tensors, output)
    actual = run(case, tensors)
    assert_correct(case, tensors, actual)
    assert actual[::2].equal(unchanged[::2])
    assert not actual[1].equal(unchanged[1])


def _all_but_one(factor: float, one: float) -> Callable[[Tensor], None]:
    """Multiplies a channel by ``factor``, and sets one of its numbers to ``one``."""

    def change(channel: Tensor) -> None:
        channel.mul_(factor)
        channel[3, 4] = one

    return change


# Changes to one channel. Other channels of the same vector are large.
HIDDEN = {
    "a small channel": _all_but_one(2.0**-28, 2.0**-28),
    "small but for one number": _all_but_one(2.0**-32, 2.0**-22),
    "nothing but a small number": _all_but_one(0, 2.0**-30),
}


@pytest.mark.parametrize(("hidden", "case"), some(product(HIDDEN, THREE), one_in=3), ids=str)
def test_channels_are_judged_by_themselves(case: PassCase, hidden: str) -> None:
    """An output that reads only one channel is exact, whatever the size of the others."""
    tensors = Tensors.random(case)
    tensors.bias.zero_()
    tensors.weight[3] = 0
    tensors.weight[3, 5] = torch.randn(3, 3)
    HIDDEN[hidden](tensors.input[1, 5])
    _, factors, scales, marks = _before_repair(case, tensors)
    assert factors.ne(0).all()
    assert scales.ne(0).all()
    assert marks.ne(0).tolist() == [False, True, False]
    assert_correct(case, tensors, run(case, tensors))


def test_channels_of_zeros_fit() -> None:
    """A ReLU can zero whole channels, or leave a few numbers that float16 represents."""
    case = THREE[0]
    tensors = Tensors.random(case)
    tensors.input[:, 3] = 0
    tensors.input[:, 9] = 0
    tensors.input[:, 9, 4, 4] = 1e-3
    output, _, _, marks = _before_repair(case, tensors)
    assert not marks.any()
    assert_correct(case, tensors, output)


def _powers(count: int) -> Tensor:
    """Random powers of two from 2^-40 to 2^40, both ends included."""
    exponents = torch.randint(-40, 41, (count,))
    exponents[0], exponents[-1] = -40, 40
    return torch.exp2(exponents.float())


@pytest.mark.parametrize("case", THREE, ids=str)
def test_units_do_not_matter(case: PassCase) -> None:
    """Powers of two on input channels (inverse on weights), outputs and images scale exactly."""
    tensors = Tensors.random(case)
    tensors.bias.zero_()
    images, channels, outputs, _ = *case.conv.input[:2], *case.conv.weight[:2]
    image, channel, output = (_powers(count) for count in (images, channels, outputs))
    scaled = replace(
        tensors,
        input=tensors.input * channel[:, None, None] * image[:, None, None, None],
        weight=tensors.weight / channel[:, None, None] * output[:, None, None, None],
    )
    _, _, _, marks = _before_repair(case, scaled)
    assert not marks.any()
    expected = run(case, tensors) * output[:, None, None] * image[:, None, None, None]
    assert run(case, scaled).equal(expected)


@pytest.mark.parametrize("case", THREE, ids=str)
@pytest.mark.parametrize("small", [(3, slice(8), 1, 1), (3, 5)], ids=["vector", "filter"])
def test_weights_that_do_not_fit_are_repaired(case: PassCase, small: tuple[Any, ...]) -> None:
    tensors = Tensors.random(case)
    tensors.weight[small] *= 1e-12
    output, factors, _, _ = _before_repair(case, tensors)
    assert factors[: len(tensors.weight)].eq(0).nonzero().tolist() == [[3]]
    assert output.isnan().all()  # the first pass stores nothing, as the repair computes all
    assert_correct(case, tensors, run(case, tensors))


@pytest.mark.parametrize("number", [torch.inf, torch.nan], ids=["infinity", "NaN"])
def test_infinities_and_nans_are_repaired(number: float) -> None:
    case = THREE[0]
    tensors = Tensors.random(case)
    tensors.input[1, 4, 3, 3] = number
    expected = run(replace(case, planner=planner_of("forward")), tensors)
    actual = run(case, tensors)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0, equal_nan=True)
    assert not actual[1].isfinite().all()
    assert actual[::2].isfinite().all()


@pytest.mark.parametrize("case", LONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


@pytest.mark.parametrize("plane", [0, 4])
def test_volumes_that_do_not_fit_are_repaired(plane: int) -> None:
    """All planes of a volume share a copy, and with it the scale and the repair."""
    case = LONE[-1]
    tensors = Tensors.random(case)
    unchanged = run(case, tensors)
    tensors.input[1, :, plane, 2:4] *= 1e-12
    _, factors, scales, marks = _before_repair(case, tensors)
    assert factors.ne(0).all()
    assert scales.ne(0).all()
    assert marks.ne(0).tolist() == [False, True]
    actual = run(case, tensors)
    assert_correct(case, tensors, actual)
    assert actual[0].equal(unchanged[0])
