"""Fused epilogues: results of activation(convolution + bias + residual), launches and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
import oracle
from epilogues import (
    ALL,
    BIAS,
    FORMATS,
    FUNCTIONS,
    GEOMETRY,
    INPUT,
    OPTIONS,
    RESIDUAL,
    WEIGHT,
    assert_close,
    by_python,
    conv2d,
    every_activation,
    random_tensors,
    reference,
)
from fastconv.backends import cpu, cuda
from fastconv.kernels import planner
from fastconv.ops.schema import OPERATORS
from fastconv.problem import ACTIVATIONS, Epilogue

pytestmark = pytest.mark.usefixtures("host_path")


def test_all_names_are_here() -> None:
    assert {a if isinstance(a, str) else a[0] for a in FUNCTIONS if a} == set(ACTIVATIONS)


# --- Results --------------------------------------------------------------------------------------


@every_activation
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_activation(
    activation: Any, residual: bool, memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    tensors: list[Any] = random_tensors(*ALL, dtype=dtype)
    tensors[0] = tensors[0].to(memory_format=memory_format)
    if not residual:
        tensors[3] = None
    output = conv2d(*tensors, activation=activation)
    assert output.is_contiguous(memory_format=memory_format)
    assert not output.requires_grad
    assert_close(output, tensors, activation)


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 6, 7), (5, 3, 3, 3), {"stride": 1}),
    "strided": ((1, 4, 9, 8), (6, 4, 3, 3), {"stride": (2, 3), "padding": 1}),
    "pointwise": ((2, 8, 4, 4), (3, 8, 1, 1), {"stride": 1}),
    "uneven padding": ((1, 2, 5, 5), (4, 1, 2, 3), {"padding": ((2, 0), (1, 3)), "groups": 2}),
    "tap by tap": ((2, 8, 20, 20), (8, 1, 3, 3), {"padding": 1, "groups": 8}),
    "tap by tap, two each": ((1, 8, 20, 20), (16, 1, 3, 3), {"padding": 1, "groups": 8}),
    "one pixel": ((3, 4, 3, 3), (5, 4, 3, 3), {"stride": 1}),
}


@pytest.mark.parametrize(("input", "weight", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layers(
    input: Any, weight: Any, options: Any, memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    some = [
        tensor.to(memory_format=memory_format)
        for tensor in random_tensors(input, weight, dtype=dtype)
    ]
    bias = oracle.random(weight[:1], dtype)
    shape = oracle.conv2d(*some, bias, **options).shape
    residual = oracle.random(shape, dtype)
    places = {  # layouts of the residual in memory
        "contiguous": residual,
        "channels last": residual.to(memory_format=torch.channels_last),
        "misaligned": torch.empty(residual.numel() + 1, dtype=dtype)[1:].view_as(residual),
        "sliced": residual.repeat_interleave(2, 3)[..., ::2],
        "expanded": residual[:1, :, :1].expand(shape),
    }
    places["misaligned"].copy_(residual)
    for (place, added), activation in zip(places.items(), ("silu", *ACTIVATIONS), strict=False):
        output = conv2d(*some, bias, added, activation, **options)
        assert output.stride() == fastconv.conv2d(*some, bias, **options).stride(), place
        assert_close(output, [*some, bias, added], activation, **options)


@by_python
def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes block by block, with blocks cut along every dimension."""
    monkeypatch.setattr(cpu.scratch, "BLOCK_BYTES", 1 << 11)
    monkeypatch.setattr(cpu.scratch, "PACKED_BYTES", 1 << 11)
    for input, weight, options in CASES.values():
        some = random_tensors(input, weight)
        residual = torch.randn_like(oracle.conv2d(*some, **options))
        assert_close(
            conv2d(*some, None, residual, "silu", **options),
            [*some, None, residual],
            "silu",
            **options,
        )


def test_a_residual_is_not_written() -> None:
    tensors = random_tensors(*ALL)
    before = tensors[3].clone()
    conv2d(*tensors, activation="relu")
    assert tensors[3].equal(before)


def test_unbatched() -> None:
    input, weight, bias, residual = random_tensors(*ALL)
    for added in (None, residual[0]):
        output = conv2d(input[0], weight, bias, added)
        torch.testing.assert_close(output, reference(input[0], weight, bias, added))
    with pytest.raises(RuntimeError, match=r"3D \(unbatched\) residual .* size: \[2, 6, 2, 7\]"):
        conv2d(input[0], weight, bias, residual)


@pytest.mark.parametrize(
    ("input", "weight"),
    [((0, 4, 5, 6), WEIGHT), ((2, 0, 5, 6), (6, 0, 3, 2))],
    ids=["no images", "no input channels"],
)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
def test_nothing(input: Any, weight: Any, requires_grad: bool) -> None:
    tensors = random_tensors(input, weight, BIAS, (*input[:1], *RESIDUAL[1:]))
    tensors = [tensor.requires_grad_(requires_grad) for tensor in tensors]
    _, _, bias, residual = tensors
    for activation in ("sigmoid", "relu", None):
        output = conv2d(*tensors, activation=activation)
        assert output.requires_grad == requires_grad
        torch.testing.assert_close(output, FUNCTIONS[activation](bias[:, None, None] + residual))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    input, weight, residual = random_tensors(INPUT, WEIGHT, RESIDUAL, dtype=dtype)
    sums = fastconv.conv2d(input, weight, **OPTIONS) + residual
    for activation, expected in (
        (None, sums),
        ("relu", sums.clamp(min=0)),
        ("relu6", sums.clamp(0, 6)),
    ):
        assert conv2d(input, weight, None, residual, activation).equal(expected)
    with pytest.raises(NotImplementedError, match=r"gelu .* torch.u?int\d+; .* identity, relu, r"):
        conv2d(input, weight)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex(dtype: torch.dtype) -> None:
    tensors = random_tensors(*ALL, dtype=dtype)
    for residual in (tensors[3], tensors[3].conj()):
        output = conv2d(*tensors[:3], residual, None)
        wide = [oracle.exact(tensor) for tensor in (*tensors[:3], residual)]
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            output.to(torch.complex128), reference(*wide, activation=None), rtol=tolerance,
            atol=8 * tolerance,
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"relu .* torch.complex\d+; .* are identity$"):
        conv2d(*tensors, activation="relu")


def test_a_lazy_negative() -> None:
    tensors = random_tensors(*ALL)
    negative = torch._neg_view(tensors[3])
    expected = reference(*tensors[:3], -tensors[3])
    torch.testing.assert_close(conv2d(*tensors[:3], negative), expected)


# --- What the CUDA backend hands to launches ------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[cuda.Need, tuple[Any, ...]]]:
    """Records what would be launched, and with which tensors; these are on the CPU."""
    found: list[tuple[cuda.Need, tuple[Any, ...]]] = []

    def ready(need: cuda.Need) -> Any:
        return SimpleNamespace(run=lambda *tensors: found.append((need, tensors)))

    monkeypatch.setattr(cuda, "ready", ready)
    return found


def _on_cuda(*tensors: Any, activation: str, memory_format: Any = None) -> Tensor:
    input, weight, bias, residual = tensors
    arguments = (input, weight, bias, residual, *GEOMETRY, activation, 0.0)
    result = OPERATORS["fused"].result(*arguments)
    out = torch.zeros(result.shape, dtype=input.dtype).to(
        memory_format=memory_format or result.memory_format
    )
    cuda.forward(result.problem, input, weight, bias, out, None, residual, result.epilogue)
    return out


@by_python
def test_launches(launched: list[Any]) -> None:
    *some, residual = random_tensors(*ALL, dtype=torch.float32)
    out = _on_cuda(*some, residual, activation="silu")
    _on_cuda(*some, None, activation="silu")
    (need, given), (without, nothing) = launched
    assert (need.epilogue, without.epilogue) == (Epilogue("silu", 0.0, True), Epilogue("silu"))
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in (*some, residual, out)]
    assert nothing[3] is None
    assert len(given) + 1 + cuda.REGIONS == len(cuda.CONV_TENSORS)


@by_python
def test_launches_wherever_the_residual_lies(launched: list[Any]) -> None:
    *some, residual = random_tensors(*ALL, dtype=torch.float32)
    misaligned = torch.empty(residual.numel() + 1)[1:].view_as(residual).copy_(residual)
    apart = misaligned.repeat_interleave(2, 3)[..., ::2]
    last = residual.to(memory_format=torch.channels_last)
    for given, out_format, is_copied, aligned in (
        (residual, torch.contiguous_format, False, True),
        (last, torch.channels_last, False, True),
        (last, torch.contiguous_format, True, True),
        (residual, torch.channels_last, True, True),
        (misaligned, torch.contiguous_format, False, False),
        (misaligned, torch.channels_last, True, True),
        (apart, torch.contiguous_format, True, True),
    ):
        out = _on_cuda(*some, given, activation="relu", memory_format=out_format)
        need, (*_, read, _) = launched[-1]
        assert read.stride() == out.stride()
        assert read.equal(residual)
        assert (read is not given) == is_copied
        assert need.aligned == aligned
        asked = cuda.need(
            planner.forward, need.problem, *some[:2], out, None,
            residual=given, epilogue=need.epilogue,
        )  # fmt: skip
        assert asked == need


@by_python
def test_launches_wherever_the_bias_lies(launched: list[Any]) -> None:
    """Where plans may assume that a bias is aligned, kernels read it in pairs of 16 bits."""
    input, weight, bias, _ = random_tensors(*ALL, dtype=torch.bfloat16)
    around = torch.empty(2 * bias.numel() + 2, dtype=bias.dtype)
    for given, is_aligned in (
        (bias, True),
        (around[1 : 1 + bias.numel()], False),
        (around[2 : 2 + bias.numel()], True),
        (around[1 : 1 + 2 * bias.numel() : 2], True),  # A bias with gaps is copied.
        (None, True),
    ):
        if given is not None:
            given.copy_(bias)
        out = _on_cuda(input, weight, given, None, activation="relu")
        need, (*_, read, _, _) = launched[-1]
        assert need.aligned
        assert need.aligned_bias == is_aligned
        assert read is None or (read.is_contiguous() and read.equal(bias))
        asked = cuda.need(
            planner.forward, need.problem, input, weight, out, None,
            epilogue=need.epilogue, bias=given,
        )  # fmt: skip
        assert asked == need


@by_python
def test_what_is_more_than_launches(launched: list[Any]) -> None:
    _, _, bias, residual = random_tensors(*ALL, dtype=torch.float32)
    nothing = torch.empty(2, 0, 5, 6), torch.empty(6, 0, 3, 2)
    out = _on_cuda(*nothing, bias, residual, activation="tanh")
    torch.testing.assert_close(out, torch.tanh(bias[:, None, None] + residual))
    assert launched == []
    numbers = random_tensors(*ALL, dtype=torch.complex64)
    _on_cuda(*numbers, activation="identity")
    ((need, (*_, planes, _)),) = launched
    assert need.epilogue == Epilogue(residual=True)
    assert planes[:, 0::2].equal(numbers[3].real)
    assert planes[:, 1::2].equal(numbers[3].imag)


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        ("swish", "one of identity, relu, relu6, .* tanh, .* but got 'swish'"),
        (("swish", 0.1), "but got 'swish'"),
        (F.relu, "but got <function relu"),
        (("leaky_relu",), r"but got \('leaky_relu',\)"),
        (("leaky_relu", "steep"), r"but got \('leaky_relu', 'steep'\)"),
        ((3, 0.5), r"but got \(3, 0.5\)"),
        (["relu"], r"but got \['relu'\]"),
        (("relu", 0.5), "which should be finite, but got 0.5 for relu"),
        (("leaky_relu", float("inf")), "but got inf for leaky_relu"),
        (("leaky_relu", float("nan")), "but got nan for leaky_relu"),
    ],
    ids=str,
)
def test_activations_that_are_none(activation: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        conv2d(*random_tensors(INPUT, WEIGHT), activation=activation)


@pytest.mark.parametrize(
    ("residual", "words"),
    [
        (torch.zeros(2, 6, 2, 8), r"size \[2, 6, 2, 7\], but got residual of size \[2, 6, 2, 8\]"),
        (torch.zeros(1, 6, 2, 7), r"\[2, 6, 2, 7\], but got residual of size \[1, 6, 2, 7\]"),
        (torch.zeros(6, 1, 1), r"\[2, 6, 2, 7\], but got residual of size \[6, 1, 1\]"),
        (torch.zeros(()), r"\[2, 6, 2, 7\], but got residual of size \[\]"),
        (torch.zeros(RESIDUAL).double(), r"type \(torch.float32\) and residual type \(torch.float"),
        (torch.zeros(RESIDUAL, device="meta"), "Input is on cpu and residual is on meta"),
        (torch.zeros(RESIDUAL).to_sparse(), "residual has torch.sparse"),
    ],
    ids=["columns", "one image", "a bias", "a number", "type", "device", "sparse"],
)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
def test_residuals_of_another_form(residual: Tensor, words: str, requires_grad: bool) -> None:
    input, weight = random_tensors(INPUT, WEIGHT, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=words):
        conv2d(input, weight.requires_grad_(requires_grad), None, residual)


def test_a_residual_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="residual must be a Tensor, not float"):
        conv2d(*random_tensors(INPUT, WEIGHT), None, 1.0)  # type: ignore[arg-type]
