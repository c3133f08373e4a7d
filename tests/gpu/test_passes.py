"""Every pass against the float64 reference, with NaN around the tensors."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import fastconv
import oracle
from gpu.helpers import CUDA, FORMATS, PLACES, all_passes, large_convolutions, precompile
from strategies import Convolution

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

places = st.sampled_from(list(PLACES))


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(case=large_convolutions(), place=places, grad_place=places)
def test_geometries(dtype: torch.dtype, case: Convolution, place: str, grad_place: str) -> None:
    note(str(case))
    tensors = [PLACES[place](tensor) for tensor in case.tensors(dtype, CUDA)]
    precompile([lambda: all_passes(tensors, PLACES[grad_place], **case.geometry)])
    oracle.assert_matches(tensors, PLACES[grad_place], **case.geometry)


# Input, weight and geometry of rare cases.
CORNERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "no images": ((0, 3, 5, 5), (4, 3, 3, 3), {}),
    "one of everything": ((1, 1, 1, 1), (1, 1, 1, 1), {}),
    "pointwise": ((2, 33, 9, 11), (70, 33, 1, 1), {}),
    "one output pixel": ((2, 5, 7, 6), (3, 5, 7, 6), {}),
    "one column": ((2, 3, 50, 1), (4, 3, 5, 1), {"padding": (2, 0)}),
    "one row": ((2, 3, 1, 50), (4, 3, 1, 5), {"padding": (0, 2)}),
    "rows longer than threads": ((2, 6, 1, 1500), (6, 1, 1, 4), {"padding": (0, 3), "groups": 6}),
    "one column of each": ((2, 6, 1500, 1), (6, 1, 4, 3), {"padding": (3, 1), "groups": 6}),
    "stride beyond the image": ((2, 3, 9, 9), (2, 3, 1, 1), {"stride": (500, 4000)}),
    "stride beyond the kernel": ((2, 3, 20, 21), (4, 3, 2, 2), {"stride": (7, 5)}),
    "far apart": ((1, 2, 2, 9100), (2, 2, 1, 3), {"stride": (1, 500), "dilation": (1, 4000)}),
    "rows far apart": ((1, 2, 9100, 2), (2, 2, 3, 1), {"stride": (500, 1), "dilation": (4000, 1)}),
    "common factors": ((1, 4, 30, 33), (5, 4, 3, 3), {"stride": (4, 6), "dilation": (2, 3)}),
    "kernel as large as the padded input": ((2, 3, 5, 4), (4, 3, 9, 8), {"padding": 2}),
    "padding beyond the kernel": ((1, 2, 4, 5), (3, 2, 2, 3), {"padding": (7, 9)}),
    "outputs that see only padding": ((1, 2, 3, 3), (2, 2, 2, 2), {"stride": 5, "padding": 6}),
    "four sides": ((2, 3, 6, 7), (4, 3, 3, 2), {"padding": ((0, 3), (5, 1))}),
    "many channels": ((1, 300, 3, 4), (260, 300, 3, 3), {"padding": 1}),
    "many groups": ((1, 500, 4, 5), (1000, 1, 3, 3), {"groups": 500}),
    "many images": ((300, 2, 5, 5), (3, 2, 3, 3), {}),
    "wide kernel": ((1, 2, 3, 100), (2, 2, 1, 63), {}),
    "high kernel": ((1, 2, 100, 3), (2, 2, 63, 1), {}),
}  # fmt: skip


def _corner(name: str, dtype: torch.dtype, layout: str) -> tuple[list[torch.Tensor], Any]:
    input_shape, weight_shape, geometry = CORNERS[name]
    formats = (FORMATS[layout], FORMATS[layout])
    case = Convolution(input_shape, weight_shape, True, True, geometry, formats)
    return [PLACES["aligned"](tensor) for tensor in case.tensors(dtype, CUDA)], geometry


def _grad_place(layout: str) -> Any:
    return PLACES["channels last" if layout == "nhwc" else "aligned"]


@pytest.fixture(scope="module")
def _corners_compiled() -> None:
    def call(name: str, dtype: torch.dtype, layout: str) -> None:
        tensors, geometry = _corner(name, dtype, layout)
        all_passes(tensors, _grad_place(layout), **geometry)

    precompile((lambda corner=corner: call(*corner)) for corner in product(CORNERS, REAL, FORMATS))


@pytest.mark.usefixtures("_corners_compiled")
@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_corners(name: str, dtype: torch.dtype, layout: str) -> None:
    tensors, geometry = _corner(name, dtype, layout)
    oracle.assert_matches(tensors, _grad_place(layout), **geometry)


def test_weight_gradient_beyond_the_workspace() -> None:
    """A weight gradient larger than the workspace takes several launches."""
    tensors = [
        oracle.random(shape, torch.float32, CUDA) for shape in ((1, 1536, 3, 3), (2048, 1536, 3, 3))
    ]
    oracle.assert_matches(tensors, padding=1)


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_no_input_channels(dtype: torch.dtype, bias: bool) -> None:
    input, weight, added = (
        oracle.random(shape, dtype, CUDA).requires_grad_()
        for shape in ((2, 0, 5, 6), (4, 0, 3, 3), (4,))
    )
    output = fastconv.conv2d(input, weight, added if bias else None)
    expected = added[:, None, None] if bias else torch.zeros((), dtype=dtype, device=CUDA)
    assert output.equal(expected.expand(2, 4, 3, 4))
    output.backward(torch.ones_like(output))
    assert (input.grad.shape, weight.grad.shape) == (input.shape, weight.shape)
    assert not bias or added.grad.equal(torch.full_like(added, 24))


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("where", ["input", "grad_output"])
def test_infinity_stays_where_it_is(where: str, layout: str, dtype: torch.dtype) -> None:
    """Zeros that stand for padding, pixels beyond the image or taps never meet an infinity."""
    input, weight, grad_output = (
        oracle.random(shape, dtype).to(memory_format=FORMATS[layout])
        for shape in ((1, 2, 5, 11), (2, 2, 2, 3), (1, 2, 2, 5))
    )
    changed = {"input": input, "grad_output": grad_output}[where]
    changed[0, 0, -1, -1] = torch.inf
    expected = oracle.with_gradients(
        oracle.conv2d, (input.double(), weight.double()), grad_output.double(), stride=2
    )
    actual = oracle.with_gradients(
        fastconv.conv2d, (input.to(CUDA), weight.to(CUDA)), grad_output.to(CUDA), stride=2
    )
    for name, ours, theirs in zip(("output", "input", "weight"), actual, expected, strict=True):
        finite = theirs.isfinite()
        assert ours.cpu()[~finite].double().equal(theirs[~finite]), name
        torch.testing.assert_close(
            ours.cpu()[finite], theirs[finite].to(dtype), msg=lambda text, n=name: f"{n}: {text}"
        )
