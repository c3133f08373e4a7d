"""``conv1d``, ``conv_transpose1d`` and ``conv_transpose2d`` against float64 and PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import fastconv
import oracle
from strategies import Sequences, channels_last, sequences

pytestmark = pytest.mark.usefixtures("_poisoned_memory", "host_path")

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGER = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
ERRORS = (RuntimeError, TypeError, ValueError)


class Function(NamedTuple):
    """A function of fastconv, PyTorch's, and one that also takes a padding for each side."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    axes: int
    transposed: bool

    @property
    def cases(self) -> Any:
        return sequences(self.axes, self.transposed)

    def tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """An input of 4 channels, a weight and a bias for 6 output channels."""
        pair = (4, 6) if self.transposed else (6, 4)
        shapes = {"input": (2, 4, 9, 8), "weight": (*pair, 3, 2), "bias": (6,)}
        return {
            name: oracle.random(shape[: 2 + self.axes], dtype) for name, shape in shapes.items()
        }


FUNCTIONS = {
    "conv1d": Function(fastconv.conv1d, F.conv1d, oracle.conv1d, 1, False),
    "conv_transpose1d": Function(
        fastconv.conv_transpose1d, F.conv_transpose1d, oracle.conv_transpose, 1, True
    ),
    "conv_transpose2d": Function(
        fastconv.conv_transpose2d, F.conv_transpose2d, oracle.conv_transpose, 2, True
    ),
}
OPINFOS = {
    name: next(op for op in op_db if op.name == f"nn.functional.{name}") for name in FUNCTIONS
}
names = pytest.mark.parametrize("name", FUNCTIONS)


# --- Values ---------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
@given(data=st.data())
def test_values_and_gradients(
    name: str, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    function = FUNCTIONS[name]
    case: Sequences = data.draw(function.cases)
    note(str(case))
    oracle.assert_matches(
        case.tensors(dtype, device), function=function.ours, reference=function.reference,
        **case.geometry,
    )  # fmt: skip


@names
@pytest.mark.parametrize("dtype", INTEGER, ids=str)
@given(data=st.data())
def test_integers_are_exact(
    name: str, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    function = FUNCTIONS[name]
    case: Sequences = data.draw(function.cases)
    tensors = case.tensors(dtype, device)
    exact = [tensor.cpu().double() for tensor in tensors]
    expected = function.reference(*exact, **case.geometry).long()
    output = function.ours(*tensors, **case.geometry)
    assert output.dtype == dtype
    assert output.cpu().equal(expected.to(dtype))  # Both wrap around on overflow.


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_opinfo_samples(name: str, dtype: torch.dtype, device: torch.device) -> None:
    function = FUNCTIONS[name]
    for sample in OPINFOS[name].sample_inputs(device, dtype):
        tensors = [tensor for tensor in (sample.input, *sample.args) if tensor is not None]
        if dtype in INTEGER:
            output = function.ours(*tensors, **sample.kwargs)
            assert output.equal(function.theirs(*tensors, **sample.kwargs))
        else:
            oracle.assert_matches(
                tensors, function=function.ours, reference=function.theirs, **sample.kwargs
            )


def test_opinfo_errors() -> None:
    errors = [*OPINFOS["conv1d"].error_inputs("cpu")]
    assert len(errors) >= 10
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            fastconv.conv1d(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("kernel", [1, 2, 5])
@pytest.mark.parametrize("dilation", [1, 3])
def test_causal(kernel: int, dilation: int, device: torch.device) -> None:
    input = torch.randn(2, 3, 12, device=device, requires_grad=True)
    weight = torch.randn(4, 3, kernel, device=device)
    before = dilation * (kernel - 1)
    output = fastconv.conv1d(input, weight, padding=((before, 0),), dilation=dilation)
    assert output.shape == (2, 4, 12)
    (gradient,) = torch.autograd.grad(output[:, :, 5].sum(), input)
    assert not gradient[:, :, 6:].any()
    assert gradient[:, :, 5].all()


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_named_padding(padding: str, kernel: int, device: torch.device) -> None:
    tensors = [torch.randn(shape, device=device) for shape in ((2, 3, 13), (4, 3, kernel))]
    oracle.assert_matches(
        tensors, function=fastconv.conv1d, reference=oracle.conv1d, padding=padding, dilation=2
    )


# An output padding from the stride on reaches positions without a tap, or even all of them.
BEYOND: list[dict[str, Any]] = [
    {"dilation": 3, "output_padding": 2},
    {"dilation": 3, "output_padding": 2, "padding": 1},
    {"dilation": 4, "output_padding": 3, "padding": 2, "stride": 2},
    {"dilation": 4, "output_padding": 3, "padding": ((2, 0),)},
]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("geometry", BEYOND, ids=str)
def test_output_padding_beyond_the_stride(geometry: dict[str, Any], bias: bool) -> None:
    tensors = FUNCTIONS["conv_transpose1d"].tensors(torch.float64)
    if not bias:
        del tensors["bias"]
    oracle.assert_matches(
        list(tensors.values()), function=fastconv.conv_transpose1d,
        reference=oracle.conv_transpose, **geometry,
    )  # fmt: skip


def test_nothing_but_the_bias() -> None:
    weight, bias = torch.randn(1, 2, 1), torch.randn(2)
    output = fastconv.conv_transpose1d(
        torch.randn(1, 1, 1), weight, bias, padding=((2, 0),), output_padding=2, dilation=3
    )
    assert output.equal(bias.view(1, 2, 1))


@names
def test_epilogues(name: str, device: torch.device) -> None:
    function = FUNCTIONS[name]
    tensors = [tensor.to(device) for tensor in function.tensors().values()]
    plain = function.ours(*tensors, stride=2)
    residual = torch.randn_like(plain)
    for activation, act in oracle.ACTIVATIONS.items():
        expected = act(plain + residual)
        actual = function.ours(*tensors, stride=2, activation=activation, residual=residual)
        torch.testing.assert_close(actual, expected)
    # Unbatched, and where gradients are recorded.
    leaves = [tensors[0][0], *(tensor.requires_grad_() for tensor in tensors[1:])]
    actual = function.ours(*leaves, stride=2, activation=("leaky_relu", 0.3), residual=residual[0])
    torch.testing.assert_close(actual, F.leaky_relu(plain[0] + residual[0], 0.3))
    gradients = torch.autograd.grad(actual.sum(), leaves[1:])
    assert all(gradient.any() for gradient in gradients)


# --- Layouts --------------------------------------------------------------------------------------


def _meaningful_strides(tensor: Tensor) -> dict[int, int]:
    """Strides of the sides above 1; PyTorch's other strides vary with its number of threads."""
    return {dim: tensor.stride(dim) for dim in range(tensor.dim()) if tensor.shape[dim] > 1}


@names
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@given(data=st.data())
def test_strides_are_pytorchs_for_contiguous_tensors(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    function = FUNCTIONS[name]
    case: Sequences = data.draw(function.cases)
    assume(case.batched and case.input_shape[0] > 0)
    tensors = [tensor.contiguous() for tensor in case.tensors(dtype, torch.device("cpu"))]
    if function.axes == 2 and case.channels_last[0]:
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    # PyTorch pads both sides alike: by what leaves an output.
    chosen = min if function.transposed else max
    sides = tuple(chosen(pair) for pair in case.geometry["padding"])
    geometry = {**case.geometry, "padding": sides}
    expected, actual = (
        oracle.with_gradients(
            of, tensors, torch.ones_like(function.theirs(*tensors, **geometry)), **geometry
        )
        for of in (function.theirs, function.ours)
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert _meaningful_strides(ours) == _meaningful_strides(theirs)


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d"])
@pytest.mark.parametrize("formats", list(product((False, True), repeat=2)), ids=str)
def test_sequences_of_channels(name: str, formats: tuple[bool, bool], device: torch.device) -> None:
    function = FUNCTIONS[name]
    tensors = [
        (channels_last if last else Tensor.contiguous)(tensor.to(device))
        for tensor, last in zip(function.tensors().values(), (*formats, False), strict=True)
    ]
    output = function.ours(*tensors, padding=1)
    assert output.mT.is_contiguous() == any(formats)
    assert output.is_contiguous() == (not any(formats))
    above = torch.randn_like(output)  # it has the output's layout
    results = oracle.with_gradients(function.ours, tensors, above, padding=1)
    assert results[1].mT.is_contiguous() == any(formats)
    expected = oracle.with_gradients(function.theirs, tensors, above, padding=1)
    torch.testing.assert_close(results, expected)


@names
def test_nothing_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, seen = FUNCTIONS[name], []
    input, weight = [*function.tensors().values()][:2]
    input = channels_last(input)
    backend = fastconv.ops.devices.BACKENDS["cpu"]
    pass_name = "input_grad" if function.transposed else "forward"
    compute = getattr(backend, pass_name)

    def spy(problem: Any, *tensors: Any) -> None:
        seen.extend(tensors[:2])
        compute(problem, *tensors)

    monkeypatch.setattr(backend, pass_name, spy)
    # The native library's kernels would compute the pass without Python.
    monkeypatch.setattr("fastconv.ops.entries.plan", lambda *arguments: "passes are watched")
    function.ours(input, weight)
    assert [one.data_ptr() for one in seen] == [input.data_ptr(), weight.data_ptr()]
    assert seen[0].stride()[:2] == input.stride()[:2]


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d"])
def test_outputs_can_be_written_to(name: str) -> None:
    function = FUNCTIONS[name]
    tensors = [*function.tensors().values()]
    with torch.no_grad():
        output = function.ours(*tensors)
    assert not output._is_view()
    factor = torch.ones(6, 1, requires_grad=True)
    output.mul_(factor).sum().backward()
    assert factor.grad is not None
    leaves = [tensor.requires_grad_() for tensor in tensors]
    function.ours(*leaves).relu_().sum().backward()
    ours = [leaf.grad for leaf in leaves]
    theirs = torch.autograd.grad(function.theirs(*leaves).relu_().sum(), leaves)
    torch.testing.assert_close(ours, list(theirs))


# --- Errors ---------------------------------------------------------------------------------------

# Arguments that replace valid ones, for all functions; those of one number are for each axis.
REJECTED: dict[str, dict[str, Any]] = {
    "no stride": {"stride": 0},
    "negative padding": {"padding": -1},
    "no dilation": {"dilation": 0},
    "negative dilation": {"dilation": -1},
    "no groups": {"groups": 0},
    "groups do not divide": {"groups": 5},
    "three strides": {"stride": (1, 2, 3)},
    "three paddings": {"padding": (1, 2, 3)},
    "three dilations": {"dilation": (1, 2, 3)},
    "stride of a float": {"stride": 1.5},
    "stride of a bool": {"stride": True},
    "dilation of a string": {"dilation": "1"},
    "groups of a float": {"groups": 1.5},
    "stride beyond 64 bits": {"stride": 2**63},
    "bias of another length": {"bias": torch.randn(5)},
    "bias of another rank": {"bias": torch.randn(6, 1)},
    "bias of another type": {"bias": torch.randn(6).double()},
    "input that is no tensor": {"input": [1.0]},
    "no weight": {"weight": None},
}
TRANSPOSED: dict[str, dict[str, Any]] = {
    "output padding of the stride": {"stride": 2, "output_padding": 2},
    "negative output padding": {"stride": 2, "output_padding": -1},
    "three output paddings": {"output_padding": (1, 2, 3)},
    "padding by name": {"padding": "same"},
    "output padding of a float": {"output_padding": 0.5},
}
ALONG: dict[str, dict[str, Any]] = {
    "padding unknown": {"padding": "full"},
    "same, strided": {"padding": "same", "stride": 2},
    "kernel too long": {"dilation": 20},
}
CASES = [
    pytest.param(name, changed, id=f"{name}, {what}")
    for name, function in FUNCTIONS.items()
    for what, changed in (REJECTED | (TRANSPOSED if function.transposed else ALONG)).items()
]


@pytest.mark.parametrize(("name", "changed"), CASES)
def test_same_exception_as_pytorch(name: str, changed: dict[str, Any]) -> None:
    function = FUNCTIONS[name]
    arguments = {**function.tensors(), **changed}
    # oneDNN has errors of its own for geometries; PyTorch's own kernel does not check the bias.
    onednn = torch.backends.mkldnn.flags(enabled="bias" in changed)
    with onednn, pytest.raises(ERRORS) as theirs:
        function.theirs(**arguments)
    with pytest.raises(theirs.type):
        function.ours(**arguments)


@names
@pytest.mark.parametrize("change", ["ranks of the input", "rank of the weight", "channels"])
def test_sizes_are_named_as_given(name: str, change: str) -> None:
    function = FUNCTIONS[name]
    arguments: dict[str, Any] = function.tensors()
    if change == "ranks of the input":
        arguments["input"] = torch.randn(4)
    elif change == "rank of the weight":
        arguments["weight"] = torch.randn(6, 4, 3, 2, 2)
    else:
        arguments["input"] = arguments["input"][:, :3]
    with pytest.raises(RuntimeError) as theirs:
        function.theirs(**arguments)
    which = "weight" if change == "rank of the weight" else "input"
    with pytest.raises(RuntimeError, match=re.escape(str(list(arguments[which].shape)))) as ours:
        function.ours(**arguments)
    if change != "rank of the weight":
        assert str(ours.value) == str(theirs.value)


@names
def test_bias_error_is_pytorchs(name: str) -> None:
    function = FUNCTIONS[name]
    arguments = {**function.tensors(), "bias": torch.randn(5)}
    with pytest.raises(RuntimeError) as theirs:
        function.theirs(**arguments)
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        function.ours(**arguments)


@pytest.mark.parametrize("name", ["conv_transpose1d", "conv_transpose2d"])
def test_output_too_small(name: str) -> None:
    function = FUNCTIONS[name]
    arguments = {**function.tensors(), "padding": 20}
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(RuntimeError):
        function.theirs(**arguments)
    sizes = r"\(9\).*\(-29\)" if function.axes == 1 else r"\(9 x 8\).*\(-29 x -31\)"
    with pytest.raises(RuntimeError, match=f"per channel: {sizes}. Output size is too small"):
        function.ours(**arguments)


@names
@pytest.mark.parametrize("role", ["input", "weight", "bias"])
def test_tensors_that_are_not_dense(name: str, role: str) -> None:
    function = FUNCTIONS[name]
    arguments = function.tensors()
    with pytest.raises(RuntimeError, match=r"(?i)sparse"):
        function.ours(**{**arguments, role: arguments[role].to_sparse()})


@names
def test_residual_of_another_size(name: str) -> None:
    function = FUNCTIONS[name]
    arguments = function.tensors()
    with pytest.raises(RuntimeError, match="residual"):
        function.ours(**arguments, residual=torch.randn(2, 6))
    with pytest.raises(RuntimeError, match="residual"):
        function.ours(**arguments, residual=torch.randn_like(arguments["input"]))
    with pytest.raises(ValueError, match="activation should be"):
        function.ours(**arguments, activation="rleu")
