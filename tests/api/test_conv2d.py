"""``fastconv.conv2d`` and its gradients against the float64 reference, and PyTorch's layouts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import fastconv
import oracle
from strategies import Convolution, convolutions

pytestmark = pytest.mark.usefixtures("_poisoned_memory", "host_path")

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGER = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# PyTorch's layouts in the other dtypes depend on its backend.
LAYOUT_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OPINFO = next(op for op in op_db if op.name == "nn.functional.conv2d")


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
@given(case=convolutions())
def test_forward_and_gradients(dtype: torch.dtype, device: torch.device, case: Convolution) -> None:
    note(str(case))
    oracle.assert_matches(case.tensors(dtype, device), **case.geometry)


@pytest.mark.parametrize("dtype", INTEGER, ids=str)
@given(case=convolutions())
def test_integers_are_exact(dtype: torch.dtype, device: torch.device, case: Convolution) -> None:
    tensors = case.tensors(dtype, device)
    expected = oracle.conv2d(*(tensor.cpu().long() for tensor in tensors), **case.geometry)
    output = fastconv.conv2d(*tensors, **case.geometry)
    assert output.dtype == dtype
    assert output.cpu().equal(expected.to(dtype))  # Both wrap around on overflow.


@pytest.mark.parametrize("dtype", INTEGER, ids=str)
def test_integers_as_pytorch(dtype: torch.dtype) -> None:
    tensors = [oracle.random(shape, dtype) for shape in ((2, 4, 9, 8), (6, 2, 3, 2), (6,))]
    geometry = {"stride": (2, 1), "padding": (1, 2), "groups": 2}
    assert fastconv.conv2d(*tensors, **geometry).equal(F.conv2d(*tensors, **geometry))


def _sliced(tensor: Tensor) -> Tensor:
    """A copy in every second element of a larger tensor, with NaN in between."""
    apart = tensor.new_full([2 * side + 1 for side in tensor.shape], float("nan"))
    inside = apart[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return inside.copy_(tensor)


# Layouts of a tensor in memory.
LAYOUTS = {
    "sliced": _sliced,
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "batch innermost": lambda tensor: tensor.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded image": lambda tensor: tensor[:1].expand_as(tensor),
    "expanded channel": lambda tensor: tensor[:, :1].expand_as(tensor),
    "expanded column": lambda tensor: tensor[..., :1].expand_as(tensor),
    "one value": lambda tensor: tensor.flatten()[0].expand_as(tensor),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("which", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides(layout: Any, which: str, dtype: torch.dtype, device: torch.device) -> None:
    input, weight, bias = (
        oracle.random(shape, dtype, device) for shape in ((3, 4, 7, 8), (6, 2, 3, 2), (6,))
    )
    input = layout(input) if which == "input" else input
    weight = layout(weight) if which == "weight" else weight
    oracle.assert_matches(
        (input, weight, _sliced(bias)),
        layout=layout if which == "grad_output" else torch.clone,
        stride=(1, 2), padding=(1, 0), groups=2,
    )  # fmt: skip


def _conjugated(tensor: Tensor) -> Tensor:
    """The same values as a lazy conjugate."""
    return tensor.conj().resolve_conj().conj()


@pytest.mark.parametrize("which", ["input", "weight", "bias", "grad_output"])
def test_lazy_conjugates(which: str, device: torch.device) -> None:
    shapes = {"input": (2, 3, 6, 5), "weight": (4, 3, 3, 3), "bias": (4,)}
    tensors = {
        name: oracle.random(shape, torch.complex64, device) for name, shape in shapes.items()
    }
    oracle.assert_matches(
        [_conjugated(tensor) if name == which else tensor for name, tensor in tensors.items()],
        layout=_conjugated if which == "grad_output" else torch.clone,
        padding=1,
    )


def test_lazy_negatives(device: torch.device) -> None:
    def negated(tensor: Tensor) -> Tensor:
        return _conjugated(torch.complex(tensor, tensor)).imag

    tensors = [
        negated(torch.randn(shape, device=device)) for shape in ((2, 3, 6, 5), (4, 3, 3, 3), (4,))
    ]
    assert all(tensor.is_neg() for tensor in tensors)
    oracle.assert_matches(tensors, layout=negated, padding=1)
    oracle.assert_matches([*(tensor.resolve_neg() for tensor in tensors[:2]), tensors[2]])


@pytest.mark.parametrize("needed", [(2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_gradients_of_complex32(needed: tuple[int, ...], device: torch.device) -> None:
    tensors = [
        oracle.random(shape, torch.complex32, device)
        for shape in ((2, 3, 6, 5), (4, 3, 3, 3), (4,))
    ]

    def gradients(function: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_(i in needed) for i, tensor in enumerate(tensors)]
        output = function(*leaves, padding=1)
        above = torch.ones(output.shape, dtype=dtype, device=device)
        return torch.autograd.grad(output, [leaves[i] for i in needed], above)

    expected = gradients(F.conv2d, torch.complex64)
    for ours, theirs in zip(gradients(fastconv.conv2d, torch.complex32), expected, strict=True):
        assert ours.dtype == torch.complex32
        torch.testing.assert_close(ours.to(torch.complex64), theirs, rtol=2e-3, atol=2e-2)


ONE_OR_TWO = [2, (2,), [2], (2, 1), [1, 3], np.int64(2), torch.tensor(2), torch.Size((1, 2))]


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", ONE_OR_TWO, ids=repr)
def test_forms_of_pairs(name: str, value: Any, device: torch.device) -> None:
    input, weight = (torch.randn(shape, device=device) for shape in ((2, 3, 9, 8), (4, 3, 3, 2)))
    torch.testing.assert_close(
        fastconv.conv2d(input, weight, **{name: value}), F.conv2d(input, weight, **{name: value})
    )


# Weights and geometries in which all strides or dilations from 9 on have the same result.
ANY_NUMBER = [
    ((4, 2, 3, 3), {"stride": 9}),
    ((4, 2, 3, 3), {"stride": (1, 9)}),
    ((4, 1, 3, 3), {"stride": (9, 2), "groups": 2}),
    ((4, 2, 1, 3), {"dilation": (9, 1)}),
    ((4, 2, 1, 1), {"dilation": 9, "stride": (2, 9)}),
]


@pytest.mark.parametrize("number", [2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize(("weight_shape", "geometry"), ANY_NUMBER, ids=str)
def test_steps_that_are_never_taken(
    weight_shape: tuple[int, ...], geometry: dict[str, Any], number: int
) -> None:
    def larger(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(larger, value))
        return number if value == 9 else value

    input, weight = torch.randn(2, 2, 8, 8), torch.randn(weight_shape)
    above = torch.randn_like(F.conv2d(input, weight, **geometry))
    expected = oracle.with_gradients(F.conv2d, (input, weight), above, **geometry)
    geometry = {name: larger(value) for name, value in geometry.items()}
    actual = oracle.with_gradients(fastconv.conv2d, (input, weight), above, **geometry)
    torch.testing.assert_close(actual, expected)


def test_outputs_far_apart() -> None:
    far = {"padding": 2**61, "stride": 2**61}
    output = fastconv.conv2d(torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3), **far)
    assert output.shape == (1, 1, 3, 3)
    assert output.count_nonzero() == 1


@pytest.mark.parametrize("padding", [((1, 0), (2, 3)), [[1, 0], [2, 3]], ([1, 0], (2, 3))], ids=str)
def test_forms_of_four_sided_padding(padding: Any, device: torch.device) -> None:
    tensors = [torch.randn(shape, device=device) for shape in ((2, 3, 5, 6), (4, 3, 3, 2))]
    assert fastconv.conv2d(*tensors, padding=padding).shape == (2, 4, 4, 10)
    oracle.assert_matches(tensors, padding=padding)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("dilation", [1, (2, 3)], ids=str)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (4, 2), (2, 5), (1, 4)], ids=str)
def test_named_padding(
    padding: str, dilation: Any, kernel: tuple[int, int], device: torch.device
) -> None:
    tensors = [torch.randn(shape, device=device) for shape in ((2, 3, 13, 14), (4, 3, *kernel))]
    oracle.assert_matches(tensors, padding=padding, dilation=dilation)


# Sizes with sides of 1, for which PyTorch's layout depends on more than the sizes.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 6, 5), (6, 4, 3, 3), {}),
    ((2, 4, 6, 5), (6, 4, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 4, 6, 5), (6, 4, 3, 3), {"dilation": 2}),
    ((2, 4, 6, 5), (6, 4, 2, 2), {"padding": "same"}),
    ((2, 4, 6, 5), (6, 2, 3, 3), {"groups": 2}),
    ((2, 4, 6, 5), (8, 1, 3, 3), {"groups": 4}),
    ((1, 4, 6, 5), (6, 4, 3, 3), {}),
    ((2, 4, 6, 5), (6, 4, 1, 1), {}),
    ((2, 4, 6, 5), (1, 4, 3, 3), {}),
    ((2, 1, 6, 5), (6, 1, 3, 3), {}),
    ((2, 4, 1, 1), (6, 4, 1, 1), {}),
    ((2, 4, 3, 3), (6, 4, 3, 3), {}),
    ((2, 4, 6, 1), (6, 4, 3, 1), {}),
    ((2, 4, 1, 5), (6, 4, 1, 3), {}),
    ((2, 1, 1, 1), (3, 1, 1, 1), {}),
    ((1, 1, 1, 1), (1, 1, 1, 1), {}),
]


@pytest.mark.parametrize("dtype", LAYOUT_DTYPES, ids=str)
@pytest.mark.parametrize("formats", list(product(FORMATS, FORMATS)), ids="-".join)
@pytest.mark.parametrize(("input_shape", "weight_shape", "geometry"), SHAPES, ids=str)
def test_memory_format_is_pytorchs(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    geometry: dict[str, Any],
    formats: tuple[str, str],
    dtype: torch.dtype,
) -> None:
    tensors = [
        oracle.random(shape, dtype).to(memory_format=FORMATS[name])
        for shape, name in zip((input_shape, weight_shape), formats, strict=True)
    ]
    grad_output = torch.randn_like(F.conv2d(*tensors, **geometry))
    expected = oracle.with_gradients(F.conv2d, tensors, grad_output, **geometry)
    actual = oracle.with_gradients(fastconv.conv2d, tensors, grad_output, **geometry)
    assert actual[0].stride() == expected[0].stride()
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.dtype, _meaningful_strides(ours)) == (dtype, _meaningful_strides(theirs))


# Every layout that PyTorch may tell apart.
ARRANGEMENTS = {
    **{name: partial(Tensor.contiguous, memory_format=form) for name, form in FORMATS.items()},
    **LAYOUTS,
    "sliced, channels last": lambda tensor: _sliced(tensor.movedim(1, -1)).movedim(-1, 1),
}
arrangements = st.sampled_from(sorted(ARRANGEMENTS))


def _without_onednn(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Turns oneDNN off for complex numbers, some of which crash it on x86-64."""
    return torch.backends.mkldnn.flags(enabled=False) if dtype.is_complex else nullcontext()


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
@given(case=convolutions(), names=st.tuples(arrangements, arrangements, arrangements))
def test_strides_are_pytorchs(
    dtype: torch.dtype, case: Convolution, names: tuple[str, str, str]
) -> None:
    assume(case.batched and case.input_shape[0] > 0)
    input, weight, grad_output = (ARRANGEMENTS[name] for name in names)
    sides = case.geometry["padding"]
    geometry = {**case.geometry, "padding": tuple(max(side) for side in sides)}
    tensors = case.tensors(dtype, torch.device("cpu"))
    leaves = [input(tensors[0]), weight(tensors[1]), *tensors[2:]]
    with _without_onednn(dtype):
        above = grad_output(torch.randn_like(F.conv2d(*leaves, **geometry)))
        expected = oracle.with_gradients(F.conv2d, leaves, above, **geometry)
    actual = oracle.with_gradients(fastconv.conv2d, leaves, above, **geometry)
    for ours, theirs in zip(actual, expected, strict=True):
        assert _meaningful_strides(ours) == _meaningful_strides(theirs)


def test_gradient_penalty_of_a_patch_embedding(device: torch.device) -> None:
    input, weight, projection = (
        torch.randn(shape, device=device, requires_grad=True)
        for shape in ((2, 3, 16, 12), (8, 3, 4, 4), (8, 5))
    )
    tokens = fastconv.conv2d(input, weight, stride=4).flatten(2).transpose(1, 2)
    (gradient,) = torch.autograd.grad((tokens @ projection).sum(), input, create_graph=True)
    gradient.view(2, -1).norm(dim=1).sum().backward()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()


def _meaningful_strides(tensor: Tensor) -> dict[int, int]:
    """Strides of the sides above 1; PyTorch's other strides vary with its number of threads."""
    return {dim: tensor.stride(dim) for dim in range(tensor.dim()) if tensor.shape[dim] > 1}


@pytest.mark.parametrize("dtype", sorted(OPINFO.supported_dtypes("cpu"), key=str), ids=str)
def test_opinfo_samples(dtype: torch.dtype, device: torch.device) -> None:
    for sample in OPINFO.sample_inputs(device, dtype):
        tensors = [tensor for tensor in (sample.input, *sample.args) if tensor is not None]
        if dtype in INTEGER:
            output = fastconv.conv2d(*tensors, **sample.kwargs)
            assert output.equal(F.conv2d(*tensors, **sample.kwargs))
        else:
            oracle.assert_matches(tensors, **sample.kwargs)


@pytest.mark.parametrize("error", [*OPINFO.error_inputs("cpu")], ids=lambda e: e.error_regex)
def test_opinfo_errors(error: Any) -> None:
    sample = error.sample_input
    with pytest.raises(error.error_type, match=error.error_regex):
        fastconv.conv2d(sample.input, *sample.args, **sample.kwargs)
