"""Hopper's implicit GEMM for contiguous tensors on the CPU: every branch, small odd shapes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    ALL,
    BATCH,
    SPECIAL_VALUES,
    Conv,
    PassCase,
    Tensors,
    assert_alone_as_in_batch,
    at_corners,
    check,
    check_special_values,
    in_batch,
    run,
    some,
)
from emulator.test_hopper_halo import FEW, ONE
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper.implicit_gemm_nchw import plan as implicit_gemm_nchw
from fastconv.problem import Problem


def _plans(direction: str, problem: Problem, operands: Operands, gpu: Gpu, most: int) -> list[Plan]:
    problem = problem.without_idle_dilation
    layer = implicit_gemm_nchw.layer_of(problem, operands, gpu, direction == "input_grad")
    return implicit_gemm_nchw.plans(layer, gpu, most)


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return _plans("forward", problem, operands, gpu, most=1)[0]


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return _plans("input_grad", problem, operands, gpu, most=1)[0]


class Chosen:
    """Plans with the first tile that has the ``wanted`` constants."""

    def __init__(self, direction: str, **wanted: Any) -> None:
        self.__name__ = direction
        self._wanted = wanted

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        found = _plans(self.__name__, problem, operands, gpu, most=1000)
        return next(plan for plan in found if self._wanted.items() <= _constants(plan).items())


def _constants(plan: Plan) -> dict[str, Any]:
    return dict(plan.launches[-1].kernel.constants)


def _case(planner: Any, conv: Conv, **options: Any) -> PassCase:
    options.setdefault("gpu", ONE)
    return PassCase(conv, planner, dtype=torch.float32, precision="tf32", **options)


def _conv(name: str, batch: int, channels: tuple[int, int], size: tuple[int, int],
          kernel: tuple[int, int] = (1, 1), stride: int | tuple[int, int] = 1,
          padding: int | tuple[int, int, int, int] = 0, groups: int = 1,
          **more: Any) -> Conv:  # fmt: skip
    return Conv(
        name,
        (batch, channels[0], *size),
        (channels[1], channels[0] // groups, *kernel),
        (stride, stride) if isinstance(stride, int) else stride,
        (padding,) * 4 if isinstance(padding, int) else padding,
        groups=groups,
        **more,
    )


POINTWISE = _conv("pointwise", 3, (40, 72), (10, 12))
SMALL = _conv("7x7", 4, (36, 40), (7, 7))
TAPS = _conv("7x7 taps", 3, (36, 24), (7, 7), (3, 3), padding=1)
STRIDED = _conv("strided", 2, (40, 24), (12, 12), (1, 1), 2)
STRIDED_TAPS = _conv("strided taps", 2, (40, 24), (14, 14), (3, 3), 2, 1)
GROUPS = _conv("groups", 3, (48, 64), (7, 7), (3, 3), padding=1, groups=2)
STRIDED_GROUPS = _conv("strided groups", 2, (32, 48), (14, 14), (3, 3), 2, 1, groups=2)
POINTWISE_GROUPS = _conv("pointwise groups", 3, (96, 120), (6, 10), groups=3)
WIDE_STRIDED_TAPS = _conv("wide strided taps", 2, (24, 16), (17, 20), (3, 3), 2, 1)

CASES = [
    # Flat planes: vectors of 2 and of 4 pixels; tiles of one image, or across images.
    _case(forward, POINTWISE),
    _case(input_grad, POINTWISE),
    _case(Chosen("forward", row_tiles=2), POINTWISE),
    _case(Chosen("input_grad", row_tiles=1, tile_pixels=128, image_pixels=128), POINTWISE),
    _case(Chosen("forward", row_tiles=1, piece=72, tile_pixels=128, image_pixels=120), POINTWISE),
    _case(forward, _conv("one image", 1, (64, 48), (20, 14)), bias=False),
    _case(forward, _conv("several column tiles", 2, (32, 264), (8, 8)), gpu=FEW),
    _case(Chosen("forward", columns=88), _conv("last columns", 2, (20, 264), (6, 6))),
    _case(forward, _conv("resident", 9, (70, 30), (6, 10)), gpu=FEW),
    _case(Chosen("forward", resident=False), _conv("chunks", 5, (130, 40), (6, 10))),
    # Whole planes: the last channels do not fill a chunk, or no plane is aligned.
    _case(forward, SMALL),
    _case(input_grad, SMALL),
    _case(Chosen("forward", row_tiles=2), replace(SMALL, input=(9, 36, 7, 7))),
    _case(Chosen("forward", whole=True), _conv("14x14", 2, (32, 16), (14, 14))),
    _case(forward, TAPS),
    _case(input_grad, TAPS),
    _case(Chosen("input_grad", row_tiles=2), TAPS),
    _case(forward, _conv("even taps", 3, (24, 16), (8, 6), (2, 4), padding=(1, 0, 2, 1))),
    _case(input_grad, _conv("dilated", 2, (24, 32), (9, 8), (3, 2), padding=2, dilation=(2, 3))),
    # Pieces of rows: of every row, or of those that the stride keeps.
    *(_case(Chosen("forward", flat=False, whole=False, piece=piece, step_height=step), STRIDED)
      for piece, step in ((2, 1), (3, 2), (6, 1))),
    _case(Chosen("forward", flat=False, whole=False), _conv(
        "rows across images", 3, (24, 16), (14, 14), (1, 1), 2)),
    _case(Chosen("forward", flat=False, whole=False, piece=2), _conv(
        "rows of taps", 2, (16, 16), (20, 16), (3, 3), padding=1)),
    _case(Chosen("input_grad", flat=False, whole=False, piece=3), _conv(
        "rows of taps", 2, (16, 16), (20, 16), (3, 3), padding=1)),
    _case(forward, STRIDED_TAPS),
    _case(forward, WIDE_STRIDED_TAPS),
    _case(Chosen("forward", row_tiles=2), WIDE_STRIDED_TAPS),
    _case(forward, _conv("padded far", 1, (16, 8), (18, 20), (3, 3), 2, (9, 4, 3, 8))),
    _case(forward, _conv("large strided taps", 1, (20, 8), (30, 40), (3, 3), 2, 1)),
    _case(forward, _conv("strided and dilated", 1, (20, 8), (29, 136), (3, 3), 2, 3,
                         dilation=(3, 3))),
    # Residues: some have no taps; pairs of them are stored together or not.
    _case(input_grad, STRIDED),
    _case(input_grad, _conv("odd strided", 3, (16, 32), (7, 9), (1, 1), 2)),
    _case(input_grad, STRIDED_TAPS),
    _case(Chosen("input_grad", row_tiles=2), STRIDED_TAPS),
    _case(input_grad, WIDE_STRIDED_TAPS),
    _case(input_grad, _conv("odd strided taps", 3, (16, 36), (13, 13), (3, 3), 2, 1)),
    _case(input_grad, _conv("2x2", 2, (16, 32), (12, 12), (2, 2), 2)),
    _case(input_grad, _conv("5x5", 1, (8, 16), (11, 12), (5, 5), 2, 2)),
    _case(input_grad, _conv("stride 2, 1", 2, (16, 16), (12, 12), (3, 3), (2, 1), 1)),
    _case(input_grad, _conv("patches of three channels", 2, (3, 24), (16, 12), (4, 4), 4)),
    _case(forward, _conv("17x17", 3, (20, 24), (17, 17), (1, 3), padding=(0, 0, 1, 1))),
    _case(input_grad, _conv("stride 3", 1, (16, 16), (12, 12), (1, 1), 3)),
    _case(input_grad, _conv("dilated strided", 1, (16, 16), (16, 16), (2, 2), 2, 1,
                            dilation=(2, 2))),
    # Groups: chunks of 8, 16 and 32 channels, copied by TMA or not; one column tile or several.
    _case(forward, GROUPS),
    _case(input_grad, GROUPS),
    _case(forward, STRIDED_GROUPS),
    _case(input_grad, STRIDED_GROUPS),
    _case(forward, POINTWISE_GROUPS),
    _case(Chosen("input_grad", row_tiles=1), POINTWISE_GROUPS, gpu=FEW),
    _case(forward, _conv("groups of 16", 5, (64, 64), (7, 7), (3, 3), padding=1, groups=4)),
    _case(Chosen("forward", columns=72), _conv("several tiles of a group", 2, (64, 272), (6, 6),
                                               groups=2), gpu=FEW),
    _case(Chosen("input_grad", columns=48), _conv("several chunks of groups", 3, (144, 96), (9, 8),
                                                  (3, 3), padding=1, groups=3)),
    _case(forward, _conv("odd outputs of groups", 2, (48, 45), (11, 12), (2, 3), 1, (1, 0, 2, 1),
                         groups=3)),
    _case(input_grad, _conv("odd inputs of groups", 2, (45, 48), (11, 13), (3, 2), (1, 2),
                            (1, 2, 0, 1), dilation=(2, 1), groups=3)),
]  # fmt: skip


def _random(seed: int) -> PassCase:
    """A random test case that the kernel takes."""
    draw = Random(seed)
    while True:
        kernel = draw.choice(((1, 1), (1, 1), (3, 3), (2, 3), (5, 5), (1, 4)))
        size = draw.choice(((7, 7), (14, 14), (draw.randint(4, 18), draw.randint(4, 18))))
        dilation = draw.choice(((1, 1), (1, 1), (1, 2)))
        if any(
            (side - 1) * step >= along
            for side, step, along in zip(kernel, dilation, size, strict=True)
        ):
            continue
        groups = draw.choice((1, 1, 2, 3))
        channels = (groups * draw.randint(8, 80 // groups), groups * draw.randint(8, 80 // groups))
        conv = _conv(
            f"random {seed}", draw.randint(1, 9), channels, size,
            kernel, draw.choice((1, 2)), tuple(draw.randint(0, side // 2) for side in
                                               (kernel[0], kernel[0], kernel[1], kernel[1])),
            groups, dilation=dilation,
        )  # fmt: skip
        case = _case(draw.choice((forward, input_grad)), conv, bias=draw.random() < 0.7,
                     gpu=draw.choice((ONE, FEW)))  # fmt: skip
        try:
            case.plan  # noqa: B018
        except Declined:
            continue
        return case


RUN = [*some(CASES, one_in=7), *map(_random, range(40 if ALL else 4))]
ALONE = [
    _case(forward, SMALL),
    _case(forward, POINTWISE),
    _case(input_grad, STRIDED_TAPS),
    _case(forward, GROUPS),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [*RUN, *(in_batch(case, batch) for case in ALONE for batch in (1, BATCH))]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_correct(case: PassCase) -> None:
    check(case)


def test_all_branches_are_taken() -> None:
    taken = [_constants(case.plan) for case in CASES]
    cuts = {(of["flat"], of["whole"], of["bulk"]) for of in taken}
    assert cuts == {(True, False, False), (False, True, False), (False, True, True),
                    (False, False, False)}  # fmt: skip
    assert {of["vector"] for of in taken} == {1, 2, 4}
    assert {(of["pairs"], of["transposed"]) for of in taken} >= {(True, True), (False, True)}
    assert {of["resident"] for of in taken} == {False, True}
    assert {of["chunk"] for of in taken} == {8, 16, 32}
    assert any(of["row_pixels"] > of["in_width"] for of in taken)
    grouped = [of for of in taken if of["groups"] > 1]
    assert {of["chunk"] for of in grouped} == {8, 16, 32}
    assert {of["bulk"] for of in grouped} == {of["transposed"] for of in grouped} == {False, True}
    assert any(of["group_out"] > of["columns"] for of in grouped)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


@pytest.mark.parametrize(
    "conv", [POINTWISE, STRIDED_TAPS, TAPS, STRIDED_GROUPS], ids=lambda conv: conv.name
)
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_all_tiles_give_the_same_bits(direction: str, conv: Conv) -> None:
    """A few different tiles: of one and two row tiles, and of each way to cut planes."""
    first = _case(Chosen(direction), conv)
    tensors = Tensors.random(first)
    expected = run(first, tensors)
    wanted: list[dict[str, Any]] = [{"row_tiles": 1}, {"row_tiles": 2}, {"columns": 40}]
    wanted += [{"whole": True}, {"flat": False, "whole": False}]
    cases = [_case(Chosen(direction, **one), conv) for one in wanted]
    names = set()
    for case in cases:
        try:
            names.add(case.plan.choice)
        except StopIteration:
            continue  # the layer has no such tile
        assert torch.equal(run(case, tensors), expected), case.plan.choice
    assert len(names) >= 2


def test_infinity_stays_where_it_is() -> None:
    case = _case(forward, SMALL)
    tensors = Tensors.random(case)
    at_corners(tensors.input, SPECIAL_VALUES[:3])
    check_special_values(case, tensors)


@pytest.mark.parametrize(
    "conv", [GROUPS, STRIDED_GROUPS, POINTWISE_GROUPS], ids=lambda conv: conv.name
)
@pytest.mark.parametrize("planned", [forward, input_grad])
def test_a_group_does_not_see_another_ones_numbers(planned: Any, conv: Conv) -> None:
    case = _case(planned, conv)
    tensors = Tensors.random(case)
    expected = run(case, tensors)
    read = tensors.input if case.direction == "forward" else tensors.grad_output
    for group, taken in enumerate(read.chunk(conv.groups, dim=1)):
        kept = taken.clone()
        taken.fill_(float("nan"))
        found = run(case, tensors)
        taken.copy_(kept)
        for other, results in enumerate(found.chunk(conv.groups, dim=1)):
            if other != group:
                assert torch.equal(results, expected.chunk(conv.groups, dim=1)[other])
            else:
                assert results.isnan().any()


def test_declines() -> None:
    def declined(conv: Conv, **options: Any) -> str:
        with pytest.raises(Declined) as reason:
            _ = _case(input_grad, conv, **options).plan
        return str(reason.value)

    assert "no planes" in declined(POINTWISE, channels_last=True)
    assert "aligned" in declined(POINTWISE, aligned=False)
    assert "4 channels" in declined(_conv("few", 1, (8, 4), (6, 6)))
    # A chunk of 8 channels would have some of the next group, whose NaNs zero weights keep.
    of_12 = _conv("groups of 12", 1, (16, 24), (6, 6), groups=2)
    assert "groups of 12 channels" in declined(of_12)
    # Each residue is stored by code of its own.
    assert "10000 residues" in declined(_conv("far", 1, (8, 8), (200, 200), stride=100))
