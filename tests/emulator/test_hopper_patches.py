"""Hopper's kernel for patch embeddings of volumes on the CPU: every mode, layout and branch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from emulator import precompile
from emulator.pass_cases import (
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
    some,
)
from emulator.test_hopper_halo import FEW, MODES, ONE
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.kernels.hopper.patches import plan as patches
from fastconv.problem import Epilogue, Problem

KINDS = [mode for mode in MODES if mode != "ieee"]


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return patches.plan(patches.layer_of(problem, operands, gpu, False), gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return patches.plan(patches.layer_of(problem, operands, gpu, True), gpu)


def _conv(name: str, input: tuple[int, ...], outputs: int, kernel: tuple[int, ...]) -> Conv:
    return Conv(name, input, (outputs, input[1], *kernel), kernel, (0,) * 6, (1,) * 3)


def _case(planner: Any, conv: Conv, mode: str, **options: Any) -> PassCase:
    dtype, precision = MODES[mode]
    options.setdefault("gpu", FEW)
    return PassCase(conv, planner, dtype=dtype, precision=precision, **options)


# Video Swin's patches, of few positions: a partial tile, and pieces copied in pairs.
SWIN = _conv("swin", (2, 3, 4, 12, 32), 96, (2, 4, 4))
# 30 pieces, which MMAs do not divide, and 40 filters, for an odd number of MMAs.
ODD = _conv("odd", (1, 5, 6, 8, 64), 40, (3, 2, 4))
# Several pieces in a row, several tiles of a volume, and so many that blocks walk.
WIDE = _conv("wide", (2, 2, 4, 12, 160), 24, (1, 3, 8))
# An odd number of patches in a row, which rows of tiles cross.
NARROW = _conv("narrow", (1, 1, 16, 16, 20), 17, (2, 2, 4))
# Planes, rows and columns that no patch reads.
LEFT_OVER = Conv(
    "left over", (1, 3, 5, 19, 36), (8, 3, 2, 4, 4), (2, 4, 4), (0,) * 6, (1,) * 3
)  # fmt: skip

CASES = [
    *(_case(planner, conv, mode) for planner, conv, mode in
      product((forward, input_grad), (SWIN, ODD, WIDE, NARROW), KINDS)),
    *(_case(forward, LEFT_OVER, mode) for mode in KINDS),
    *(_case(planner, WIDE, mode, gpu=ONE, bias=False) for planner, mode in
      product((forward, input_grad), ("tf32", "bfloat16"))),
    *(_case(forward, SWIN, mode, epilogue=Epilogue(activation, residual)) for mode, activation,
      residual in (("tf32", "gelu", True), ("bfloat16", "relu", True), ("float16", "silu", False))),
]  # fmt: skip

RUN = some(CASES, one_in=3)
ALONE = [
    _case(forward, SWIN, "tf32"),
    _case(input_grad, ODD, "bfloat16"),
]
NONFINITE = [_case(planner, ODD, mode) for planner in (forward, input_grad)
           for mode in ("tf32", "float16")]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [*RUN, *NONFINITE, *(in_batch(case, batch) for case in ALONE for batch in (1, BATCH))]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_correct(case: PassCase) -> None:
    check(case)


def test_all_branches_are_taken() -> None:
    launches = [launch for case in CASES for launch in case.plan.launches]
    for transposed in (False, True):
        taken = [dict(launch.kernel.constants) for launch in launches]
        taken = [of for of in taken if of["transposed"] == transposed]
        copied = {(of["Scalar"], of["copied_patches"]) for of in taken}
        assert {("float", 1), ("fastconv::float16", 1), ("fastconv::float16", 2)} <= copied
        assert {of["kernel_width"] for of in taken} == {4, 8}


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


@pytest.mark.parametrize("case", NONFINITE, ids=str)
def test_special_values(case: PassCase) -> None:
    """Infinities and NaNs reach what their patch reaches, and nothing else."""
    tensors = Tensors.random(case)
    at_corners(
        tensors.input if case.planner is forward else tensors.grad_output, SPECIAL_VALUES[:3]
    )
    check_special_values(case, tensors)


@pytest.mark.parametrize(
    ("planner", "conv", "options", "why"),
    [
        (forward, Conv("overlap", (1, 3, 4, 8, 32), (8, 3, 2, 4, 4), (2, 2, 4), (0,) * 6,
                       (1,) * 3), {}, "other than patch"),
        (input_grad, LEFT_OVER, {}, "cover"),
        (forward, SWIN, {"aligned": False}, "aligned"),
        (forward, SWIN, {"channels_last": True}, "contiguous"),
        (forward, SWIN, {"gpu": "sm_80"}, "sm_80"),
        (forward, _conv("wide rows", (1, 3, 2, 4, 24), 8, (2, 4, 6)), {}, "pieces"),
        (forward, _conv("few", (1, 3, 2, 4, 12), 8, (2, 4, 4)), {}, "vectors"),
        (input_grad, _conv("large", (1, 9, 4, 16, 32), 8, (2, 4, 4)), {}, "registers"),
    ],
)  # fmt: skip
def test_declines(planner: Any, conv: Conv, options: dict[str, Any], why: str) -> None:
    if "gpu" in options:
        options = {"gpu": GPUS[options["gpu"]]}
    with pytest.raises(Declined, match=why):
        _ = _case(planner, conv, "tf32", **options).plan


def test_full_float32_is_declined() -> None:
    with pytest.raises(Declined, match="full float32"):
        _ = _case(forward, SWIN, "ieee", gpu=H200).plan
