"""Volumes in slabs, so that copies stay small: of rows, of whole tiles, and of few volumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch

from effort import ALL
from emulator.driver import EmulatorError, precompile
from emulator.forced_plans import HalfCopies, HaloCopies
from emulator.pass_cases import (
    Conv,
    PassCase,
    Tensors,
    assert_correct,
    check,
    is_taken,
    run,
)
from emulator.test_hopper_halo import FEW
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper import passes
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.relayout import plan as relayout
from fastconv.kernels.hopper.wgrad_implicit_gemm import plan as wgrad_implicit_gemm
from fastconv.kernels.planning import slabs
from fastconv.problem import Epilogue, Problem

ONE = (1, 1, 1)
CONVS = (
    Conv("same", (2, 16, 3, 13, 9), (16, 16, 3, 3, 3), ONE, (1,) * 6, ONE),
    Conv("shrinking", (3, 16, 4, 20, 8), (16, 16, 3, 3, 3), ONE, (0,) * 6, ONE),
    Conv("causal", (1, 24, 5, 17, 16), (16, 24, 3, 3, 3), ONE, (2, 0, 2, 0, 1, 1), ONE),
    Conv("dilated", (2, 16, 3, 23, 11), (24, 16, 2, 3, 3), ONE, (1, 0, 3, 3, 2, 2), (1, 3, 2)),
    Conv("strided", (2, 16, 5, 26, 12), (64, 16, 3, 3, 3), (2, 2, 2), (1,) * 6, ONE),
    Conv("groups", (2, 32, 3, 12, 10), (32, 16, 1, 3, 5), ONE, (0, 0, 1, 1, 2, 2), ONE, 2),
    Conv("wide", (1, 16, 2, 14, 150), (16, 16, 2, 3, 3), ONE, (0, 1, 1, 1, 1, 1), ONE),
    Conv("wraps", (1, 32, 2, 9, 68), (24, 32, 3, 3, 3), ONE, (1, 1, 0, 0, 0, 0), ONE),
    Conv("many", (9, 16, 2, 8, 7), (16, 16, 2, 3, 1), ONE, (1, 0, 1, 1, 0, 0), ONE),
    Conv("residues", (2, 24, 4, 12, 14), (48, 24, 3, 4, 4), (1, 2, 2), (1,) * 6, ONE),
    Conv("expanding", (2, 8, 3, 12, 10), (64, 8, 2, 2, 3), (1, 2, 1), (1, 0, 0, 0, 1, 1), ONE),
)
# Weight gradients whose slabs can be copied beside the multiplication of those before.
TALL = (
    Conv("tall", (1, 16, 3, 30, 9), (24, 16, 2, 3, 3), ONE, (1, 0, 1, 1, 1, 1), ONE),
    Conv("ragged", (3, 40, 4, 23, 8), (16, 40, 3, 3, 3), ONE, (0,) * 6, ONE),
    Conv("strides", (5, 16, 4, 27, 17), (64, 16, 2, 2, 3), (1, 1, 2), (0, 0, 1, 0, 1, 1), ONE),
)
KINDS = ("rows", "tiles", "volumes")


class LimitedHalo(HaloCopies):
    limited = True


class LimitedHalf(HalfCopies):
    limited = True


@dataclass(frozen=True)
class InSlabs:
    """Plans a pass in slabs of one kind."""

    planner: Any
    kind: str

    @property
    def __name__(self) -> str:
        return str(self.planner.__name__)

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        with _only(self.kind):
            plan: Plan = self.planner(problem, operands, gpu)
            return plan


@contextmanager
def _only(kind: str) -> Iterator[None]:
    """Makes the planner choose slabs of one kind, as if all others took far longer."""

    def cycles(tile: Any, gpu: Gpu) -> float:
        layer = tile.layer
        whole = slabs.whole(layer)
        few = layer.batch < whole.batch
        rows = few or layer.out_size[0] == slabs.in_slabs([whole])[0].out_size[0]
        return 0.0 if kind == ("volumes" if few else "rows" if rows else "tiles") else 1e9

    with mock.patch.object(halo, "_slabs_cycles", cycles):
        yield


def _cases() -> list[PassCase]:
    found = []
    passes = ("forward", "input_grad")
    for number, (conv, direction, kind) in enumerate(product(CONVS, passes, KINDS)):
        named = replace(conv, name=f"{conv.name}-{kind}")
        copies = InSlabs(LimitedHalo(direction), kind)
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        found.append(PassCase(named, copies, dtype, gpu=FEW))
        half = InSlabs(LimitedHalf(direction), kind)
        found.append(PassCase(named, half, gpu=FEW, precision="tf32"))
    found = [case for case in found if is_taken(case)]
    added = Epilogue("gelu", residual=True)
    half = [case for case in found if case.precision == "tf32" and case.direction == "forward"]
    return [*found, *(replace(case, epilogue=added) for case in half[:3])]


@dataclass(frozen=True)
class Gradient:
    """Plans a weight gradient in the number-th way of cutting it into slabs."""

    number: int
    layer_of: Any = wgrad_implicit_gemm.layer_of

    __name__ = "weight_grad"

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        last = relayout.channels_last(operands)
        ways = slabs.problems_in_slabs(problem, operands)
        if self.number >= len(ways):
            raise Declined("one way alone")
        parts = ways[self.number]
        _, planned = passes._way_on_slabs(self.layer_of, problem, parts, last, gpu)
        return planned()


def _gradients() -> list[PassCase]:
    kinds = (wgrad_implicit_gemm.layer_of, *passes._BOXED)
    found = [
        PassCase(conv, Gradient(number, kind), dtype, gpu=gpu, bias_grad=dtype.itemsize == 2)
        for (conv, number, kind), dtype, gpu in zip(
            product((*CONVS, *TALL), range(8), kinds),
            cycle((torch.bfloat16, torch.float16, torch.bfloat16, torch.float16, torch.float16)),
            cycle((FEW, FEW, replace(FEW, sm_count=3))),
            strict=False,
        )
    ]
    return [case for case in found if is_taken(case)]


CASES = [case for case in _cases() if "slabs" in case.plan.why]
GRADIENTS = _gradients()
BESIDE = [
    case
    for case in GRADIENTS
    if case.plan.launches[-3].kernel.entry == "transpose_pair"
    and dict(case.plan.launches[-3].kernel.constants)["beside"]
]


# CI runs one case in five: each kernel is compiled for the emulator.
SOME = CASES + GRADIENTS if ALL else [*CASES[::7], *GRADIENTS[::12], *BESIDE[::4]]
MARKED = [case for case in SOME if case.precision == "tf32"]
ALONE = [case for case in SOME if case.conv.input[0] > 1 and case.direction != "weight_grad"]
ALONE = ALONE if ALL else ALONE[:3]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in SOME for launch in case.plan.launches})


@pytest.mark.parametrize("case", SOME, ids=str)
def test_pass(case: PassCase) -> None:
    check(case)


def test_overlapping_copies() -> None:
    """Copies that lie partly where those of the slab before do, which may still be read."""
    case = BESIDE[-2]
    apart = slabs._alternating

    def overlapping(parts: list[slabs.Part]) -> list[slabs.Part]:
        return [part._replace(image=max(part.image - 1, 0)) for part in apart(parts)]

    with mock.patch.object(slabs, "_alternating", overlapping):
        case = replace(case, conv=replace(case.conv, name="overlapping"), bias_grad=False)
        with pytest.raises(EmulatorError, match="depends on the order"):
            run(case, Tensors.random(case))


@pytest.mark.parametrize("case", MARKED if ALL else MARKED[:2], ids=str)
def test_repairs(case: PassCase) -> None:
    """A number that float16 does not have, in one slab, has all of its volume computed again."""
    tensors = Tensors.random(case)
    read = tensors.input if case.direction == "forward" else tensors.grad_output
    read[-1, 0, 0, -1, 0] = 1e9
    assert_correct(case, tensors, run(case, tensors))


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_volume_alone(case: PassCase) -> None:
    """Its slabs are others than those of a batch, its bits the same."""
    free = replace(case, planner=case.planner.planner)  # type: ignore[attr-defined]
    tensors = Tensors.random(case)
    together = run(case, tensors)
    alone = replace(free, conv=replace(case.conv, input=(1, *case.conv.input[1:])))
    of_one = replace(
        tensors, input=tensors.input[-1:].clone(), grad_output=tensors.grad_output[-1:].clone()
    )
    assert run(alone, of_one).equal(together[-1:])


def test_kinds() -> None:
    """The cases have slabs of each kind, with and without fewer rows in the last one."""
    found = {case.conv.name.rpartition("-")[2] for case in CASES}
    assert found == set(KINDS)
    kernels = [
        {launch.kernel for launch in case.plan.launches if launch.kernel.entry == "convolve"}
        for case in CASES
        if len(case.conv.stride) == 3
    ]
    assert {len(one) for one in kernels} >= {1, 2}
    assert {case.conv.name.rpartition("-")[0] for case in CASES} == {one.name for one in CONVS}
