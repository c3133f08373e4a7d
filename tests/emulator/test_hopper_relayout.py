"""Contiguous layers on channels-last copies: all three passes, and the copies alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from emulator import precompile, run_both_orders
from emulator.forced_plans import Copies, HaloCopies
from emulator.pass_cases import Conv, PassCase, check
from emulator.test_hopper_halo import FEW
from fastconv.kernels import planner
from fastconv.kernels.family import MAPPED_SCALARS, Declined, Operands
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.relayout import plan as relayout

TYPES = (torch.bfloat16, torch.float16)


FORWARD, INPUT_GRAD, WEIGHT_GRAD = map(Copies, ("forward", "input_grad", "weight_grad"))
PLANNERS = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
# Planes of odd and of even sizes, of whole vectors, more than a tile, and of one row; channels that
# do and do not fill tiles; strides that leave pixels without a tap.
CONVS = (
    Conv("odd-plane", (2, 8, 5, 7), (16, 8, 3, 3), padding=(1, 1, 1, 1)),
    Conv("pointwise", (1, 72, 9, 8), (8, 72, 1, 1)),
    Conv("row", (3, 16, 1, 75), (40, 16, 1, 4), stride=(1, 2), padding=(0, 0, 2, 2)),
    Conv("gaps", (2, 24, 4, 6), (8, 24, 2, 2), stride=(3, 3)),
    Conv("dilated", (1, 8, 11, 13), (64, 8, 3, 5), padding=(1, 1, 2, 2), dilation=(2, 1)),
    Conv("volumes", (2, 16, 3, 5, 4), (24, 16, 3, 1, 2), (1, 2, 1), (1, 1, 0, 0, 0, 1), (1,) * 3),
)
CASES = [
    PassCase(conv, plan, dtype, gpu=FEW)
    for (conv, plan), dtype in zip(product(CONVS, PLANNERS), TYPES * 8, strict=False)
]
CASES += [
    PassCase(conv, plan, torch.float32, gpu=FEW, precision="tf32")
    for conv, plan in product(CONVS, (FORWARD, INPUT_GRAD))
]
# Halo tiles of images: of whole vectors, and in residues of a stride with odd planes.
CASES += [
    PassCase(CONVS[4], HaloCopies("forward"), torch.bfloat16, gpu=FEW),
    PassCase(CONVS[4], HaloCopies("weight_grad"), torch.bfloat16, gpu=FEW, bias_grad=True),
    PassCase(
        Conv("residues", (2, 16, 9, 7), (24, 16, 3, 2), (2, 1), (1, 1, 0, 1)),
        HaloCopies("input_grad"),
        torch.float16,
        gpu=FEW,
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in CASES for launch in case.plan.launches})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pass(case: PassCase) -> None:
    assert case.plan.regions
    check(case)


@pytest.mark.parametrize(("channels_last", "copies"), [(False, 2), (True, 0)])
def test_halo_tiles_of_images_on_copies(channels_last: bool, copies: int) -> None:
    """Wide kernels with a stride load contiguous channels so slowly that copies gain."""
    conv = Conv("wide", (16, 48, 101, 101), (2048, 48, 5, 5), (2, 1), (2, 2, 2, 2))
    case = PassCase(conv, planner.input_grad, torch.bfloat16, channels_last, gpu=H200)
    sources = [launch.kernel.source for launch in case.plan.launches]
    assert sources.count(relayout.SOURCE) == copies
    assert "hopper/halo/kernel.cuh" in sources


@pytest.mark.parametrize(("channels_last", "copies"), [(False, 2), (True, 0)])
def test_halo_tiles_of_weight_gradients_on_copies(channels_last: bool, copies: int) -> None:
    """A contiguous layer takes no longer than both copies and the channels-last layer."""
    size = ((8, 64, 100, 421), (256, 32, 7, 7))
    conv = Conv("groups", *size, (1, 2), (3, 3, 3, 3), groups=2)  # which boxes do not take
    case = PassCase(conv, planner.weight_grad, torch.bfloat16, channels_last, gpu=H200)
    sources = [launch.kernel.source for launch in case.plan.launches]
    assert sources.count(relayout.SOURCE) == copies
    assert "hopper/wgrad_halo/kernel.cuh" in sources


@pytest.mark.parametrize(
    ("images", "rows", "columns"), [(1, 8, 8), (2, 72, 33), (3, 31, 136), (1, 64, 1), (2, 129, 64)]
)
@pytest.mark.parametrize("scalar", ["fastconv::bfloat16", "float"])
def test_transpose(images: int, rows: int, columns: int, scalar: str) -> None:
    """Each image is transposed, and nothing beyond it is written."""
    bytes_ = MAPPED_SCALARS[scalar]
    operands = Operands(scalar, bytes_, False, False, (1, 1, 1, 1), True)
    launch = relayout._transpose("source", "target", images, rows, columns, operands)
    integer = torch.int16 if bytes_ == 2 else torch.int32
    limits = torch.iinfo(integer)
    source = torch.randint(limits.min, limits.max, (images, rows, columns), dtype=integer)
    target = torch.full_like(source, -1)
    run_both_orders([launch], {"source": source, "target": target})
    assert target.view(images, columns, rows).equal(source.transpose(1, 2))


def test_classes() -> None:
    """The cases have copies of whole vectors, and of single elements, in both directions."""
    found = {
        (case.dtype.itemsize, constants["vector_loads"], constants["vector_stores"])
        for case in CASES
        for launch in case.plan.launches
        if launch.kernel.entry == "transpose"
        for constants in [dict(launch.kernel.constants)]
    }
    kinds = ((True, True), (True, False), (False, True))
    assert found == {(bytes_, *kind) for bytes_ in (2, 4) for kind in kinds}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": torch.float32}, "float in ieee"),
        ({"channels_last": True}, "contiguous"),
        ({"aligned": False}, "aligned"),
    ],
)
def test_declined(changed: dict[str, Tensor], words: str) -> None:
    given = {"dtype": torch.bfloat16, **changed}
    case = PassCase(CONVS[0], FORWARD, gpu=H200, **given)
    with pytest.raises(Declined, match=words):
        _ = case.plan
