"""Fused epilogues: activation(convolution + bias + residual), under everything PyTorch does."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import fastconv
import oracle
from fastconv import ops
from fastconv.backends import cpu, cuda
from fastconv.kernels import planner
from fastconv.ops.schema import OPERATORS
from fastconv.problem import ACTIVATIONS, Epilogue
from recorder import Recorder

pytestmark = pytest.mark.usefixtures("host_path")
# Where the dispatcher has to see the operators, both paths are the same.
by_python = pytest.mark.parametrize("host_path", ["python"], indirect=True)

FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    **oracle.ACTIVATIONS,
    ("leaky_relu", 0.2): lambda x: F.leaky_relu(x, 0.2),
    ("leaky_relu", -1): lambda x: F.leaky_relu(x, -1),
}
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
INPUT, WEIGHT, BIAS = (2, 4, 5, 6), (6, 2, 3, 2), (6,)
RESIDUAL = (2, 6, 2, 7)
OPTIONS = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}
GEOMETRY = ((2, 1), (1, 0, 2, 1), (1, 2), 2, None)
ALL = (INPUT, WEIGHT, BIAS, RESIDUAL)
every_activation = pytest.mark.parametrize("activation", FUNCTIONS, ids=str)


def test_all_names_are_here() -> None:
    assert {a if isinstance(a, str) else a[0] for a in FUNCTIONS if a} == set(ACTIVATIONS)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Any = "gelu",
    **options: Any,
) -> Tensor:
    options = options or OPTIONS
    return fastconv.conv2d(input, weight, bias, **options, activation=activation, residual=residual)


def reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Any = "gelu",
    **options: Any,
) -> Tensor:
    sums = oracle.conv2d(input, weight, bias, **(options or OPTIONS))
    return FUNCTIONS[activation](sums if residual is None else sums + residual)


def _tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [oracle.random(shape, dtype) for shape in shapes]


def _assert_close(actual: Tensor, tensors: list[Any], activation: Any, **options: Any) -> None:
    """Compares with float64, rounded once."""
    exact = [None if tensor is None else oracle.exact(tensor) for tensor in tensors]
    expected = reference(*exact, activation=activation, **options)
    magnitudes = [None if tensor is None else tensor.abs() for tensor in exact]
    sizes = reference(*magnitudes, activation=None, **options) + expected.abs()
    assert actual.dtype == tensors[0].dtype
    # No activation has a slope above 1.13.
    oracle.assert_within_rounding("output", actual, expected, 1.2 * sizes)


# --- Results --------------------------------------------------------------------------------------


@every_activation
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_activation(
    activation: Any, residual: bool, memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    tensors: list[Any] = _tensors(*ALL, dtype=dtype)
    tensors[0] = tensors[0].to(memory_format=memory_format)
    if not residual:
        tensors[3] = None
    output = conv2d(*tensors, activation=activation)
    assert output.is_contiguous(memory_format=memory_format)
    assert not output.requires_grad
    _assert_close(output, tensors, activation)


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
        tensor.to(memory_format=memory_format) for tensor in _tensors(input, weight, dtype=dtype)
    ]
    bias = oracle.random(weight[:1], dtype)
    shape = oracle.conv2d(*some, bias, **options).shape
    residual = oracle.random(shape, dtype)
    places = {  # wherever it lies, it is read as what it is
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
        _assert_close(output, [*some, bias, added], activation, **options)


@by_python
def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the CPU computes one after the other, cut along every dimension."""
    monkeypatch.setattr(cpu.scratch, "SCRATCH_BYTES", 1 << 12)
    for input, weight, options in CASES.values():
        some = _tensors(input, weight)
        residual = torch.randn_like(oracle.conv2d(*some, **options))
        _assert_close(
            conv2d(*some, None, residual, "silu", **options),
            [*some, None, residual],
            "silu",
            **options,
        )


def test_a_residual_is_not_written() -> None:
    tensors = _tensors(*ALL)
    before = tensors[3].clone()
    conv2d(*tensors, activation="relu")
    assert tensors[3].equal(before)


def test_unbatched() -> None:
    input, weight, bias, residual = _tensors(*ALL)
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
    tensors = _tensors(input, weight, BIAS, (*input[:1], *RESIDUAL[1:]))
    tensors = [tensor.requires_grad_(requires_grad) for tensor in tensors]
    _, _, bias, residual = tensors
    for activation in ("sigmoid", "relu", None):
        output = conv2d(*tensors, activation=activation)
        assert output.requires_grad == requires_grad
        torch.testing.assert_close(output, FUNCTIONS[activation](bias[:, None, None] + residual))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    input, weight, residual = _tensors(INPUT, WEIGHT, RESIDUAL, dtype=dtype)
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
    tensors = _tensors(*ALL, dtype=dtype)
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
    tensors = _tensors(*ALL)
    negative = torch._neg_view(tensors[3])
    expected = reference(*tensors[:3], -tensors[3])
    torch.testing.assert_close(conv2d(*tensors[:3], negative), expected)


# --- What the CUDA backend hands to launches ------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[cuda.Need, tuple[Any, ...]]]:
    """What would be launched, and with which tensors; these are a CPU's."""
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
    *some, residual = _tensors(*ALL, dtype=torch.float32)
    out = _on_cuda(*some, residual, activation="silu")
    _on_cuda(*some, None, activation="silu")
    (need, given), (without, nothing) = launched
    assert (need.epilogue, without.epilogue) == (Epilogue("silu", 0.0, True), Epilogue("silu"))
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in (*some, residual, out)]
    assert nothing[3] is None
    assert len(given) + 1 == len(cuda.CORRELATION_TENSORS)


@by_python
def test_launches_wherever_the_residual_lies(launched: list[Any]) -> None:
    *some, residual = _tensors(*ALL, dtype=torch.float32)
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
    """Kernels read it in pairs of 16 bits, where plans may assume that these are aligned."""
    input, weight, bias, _ = _tensors(*ALL, dtype=torch.bfloat16)
    around = torch.empty(2 * bias.numel() + 2, dtype=bias.dtype)
    for given, is_aligned in (
        (bias, True),
        (around[1 : 1 + bias.numel()], False),
        (around[2 : 2 + bias.numel()], True),
        (around[1 : 1 + 2 * bias.numel() : 2], True),  # which is copied
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
    _, _, bias, residual = _tensors(*ALL, dtype=torch.float32)
    nothing = torch.empty(2, 0, 5, 6), torch.empty(6, 0, 3, 2)
    out = _on_cuda(*nothing, bias, residual, activation="tanh")
    torch.testing.assert_close(out, torch.tanh(bias[:, None, None] + residual))
    assert launched == []
    numbers = _tensors(*ALL, dtype=torch.complex64)
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
        conv2d(*_tensors(INPUT, WEIGHT), activation=activation)


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
    input, weight = _tensors(INPUT, WEIGHT, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=words):
        conv2d(input, weight.requires_grad_(requires_grad), None, residual)


def test_a_residual_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="residual must be a Tensor, not float"):
        conv2d(*_tensors(INPUT, WEIGHT), None, 1.0)  # type: ignore[arg-type]


# --- What PyTorch does to operators ---------------------------------------------------------------


def _operator_arguments(dtype: torch.dtype = torch.float32) -> Any:
    input, weight, bias, residual = _tensors(*ALL, dtype=dtype)
    for with_bias, with_residual, formats in product((0, 1), (0, 1), product(FORMATS, FORMATS)):
        some = [
            tensor.to(memory_format=FORMATS[name])
            for tensor, name in zip((input, weight), formats, strict=True)
        ]
        others = (bias if with_bias else None, residual if with_residual else None)
        yield *some, *others, *GEOMETRY, "silu", 0.0


@by_python
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
def test_opcheck(requires_grad: bool) -> None:
    for arguments in (*_operator_arguments(),)[::13]:  # one without bias and residual, one with
        prepared = [
            argument.requires_grad_(requires_grad) if isinstance(argument, Tensor) else argument
            for argument in arguments
        ]
        torch.library.opcheck(ops.fused, tuple(prepared))


def test_promised_layouts_are_returned() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for arguments in _operator_arguments(dtype):
            output = ops.fused(*arguments)
            on_meta = (a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
            promised = ops.fused(*on_meta)
            assert promised.device.type == "meta"
            assert (promised.shape, promised.stride(), promised.dtype) == (
                output.shape,
                output.stride(),
                output.dtype,
            )


# Those without corners, which differences would be taken across.
SMOOTH = ("identity", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh", ("leaky_relu", 0.9))


@by_python
@pytest.mark.parametrize("activation", SMOOTH, ids=str)
def test_gradcheck(activation: Any) -> None:
    tensors = [tensor.requires_grad_() for tensor in _tensors(*ALL)]
    function = partial(conv2d, activation=activation)
    gradcheck(
        function, tensors, fast_mode=True,
        check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
    )  # fmt: skip
    gradgradcheck(
        function, tensors, fast_mode=True,
        check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True,
    )  # fmt: skip


@every_activation
def test_gradients(activation: Any) -> None:
    tensors = _tensors(*ALL)
    grad_output = torch.randn(RESIDUAL, dtype=torch.float64)
    ours, theirs = (
        oracle.with_gradients(function, tensors, grad_output, activation=activation)
        for function in (conv2d, reference)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", range(4), ids=["input", "weight", "bias", "residual"])
def test_only_what_is_recorded_is_composed(which: int) -> None:
    """Else one operator does it all."""
    tensors = _tensors(*ALL)
    with Recorder() as recorder:
        conv2d(*tensors)
        tensors[which].requires_grad_()
        output = conv2d(*tensors)
        with torch.no_grad():
            conv2d(*tensors)
        with torch.inference_mode():
            conv2d(*tensors)
    assert output.requires_grad
    assert [name for name, _ in recorder.calls] == ["fused", "forward", "fused", "fused"]


def test_rounding() -> None:
    """As the documentation says: once, or where gradients are recorded after each step."""
    input, weight = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.ones(1, 1, 1, 1)
    weight = weight.bfloat16() * (1 + 2**-7)
    input = input * (1 + 2**-7)  # the product has one bit too many: 2^-14
    residual = torch.full_like(input, -1 - 2**-6)
    once = fastconv.conv2d(input, weight, residual=residual)
    assert once.item() == 2**-14
    recorded = fastconv.conv2d(input, weight.requires_grad_(), residual=residual)
    assert recorded.item() == 0


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, *x: grad(lambda *y: f(*y).sin().sum(), (0, 1, 2, 3))(*x),
    "jvp": lambda f, *x: jvp(f, x, tuple(tensor.cos() for tensor in x)),
    "jacrev": lambda f, *x: jacrev(f, (1, 3))(*x),
    "vmap of grad": lambda f, *x: vmap(
        grad(lambda *y: f(*y).sin().sum(), (0, 1, 3)), (None, None, None, 0)
    )(*x[:3], torch.stack([x[3], -x[3]])),
    "grad of vmap": lambda f, *x: grad(
        lambda w: vmap(f, (0, None, None, None))(torch.stack([x[0], -x[0]]), w, *x[2:]).sum()
    )(x[1]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_function_transforms(transform: Callable[..., Any]) -> None:
    tensors = _tensors(*ALL)
    torch.testing.assert_close(transform(conv2d, *tensors), transform(reference, *tensors))


MAPPED = [dims for dims in product((None, 0, 1), repeat=4) if dims.count(None) < 4][::3]


@pytest.mark.parametrize("dims", [*MAPPED, (None, None, None, 0)], ids=str)
def test_vmap(dims: tuple[int | None, ...]) -> None:
    shapes = (
        shape if dim is None else (*shape[:dim], 3, *shape[dim:])
        for shape, dim in zip(ALL, dims, strict=True)
    )
    tensors = _tensors(*shapes)
    expected = [
        reference(*(
            tensor if dim is None else tensor.select(dim, index)
            for tensor, dim in zip(tensors, dims, strict=True)
        ))
        for index in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(vmap(conv2d, dims)(*tensors), torch.stack(expected))
    nothing = [t if d is None else t.narrow(d, 0, 0) for t, d in zip(tensors, dims, strict=True)]
    assert vmap(conv2d, dims)(*nothing).shape == (0, *RESIDUAL)


def test_vmap_without_a_residual() -> None:
    input, weight = _tensors((3, *INPUT), WEIGHT)
    expected = torch.stack([reference(image, weight) for image in input])
    torch.testing.assert_close(vmap(conv2d, (0, None))(input, weight), expected)
    with pytest.raises(RuntimeError, match=r"size \[2, 6, 2, 7\], but got residual of size \[6\]"):
        vmap(lambda x: conv2d(x, weight, None, torch.ones(6).double()))(input)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(to: torch.dtype, requires_grad: bool) -> None:
    input, weight, bias, residual = _tensors(*ALL, dtype=torch.float32)
    mixed = [input.to(to), weight.requires_grad_(requires_grad), bias.double().float(), residual]
    with torch.autocast("cpu", dtype=to):
        output = conv2d(*mixed)
    assert (output.dtype, output.requires_grad) == (to, requires_grad)
    cast = [tensor.detach().to(to) for tensor in mixed]
    if not requires_grad:
        _assert_close(output, cast, "gelu")
    else:
        torch.testing.assert_close(output, reference(*cast), rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="should be the same"):
        conv2d(*mixed)


class _Tagged(Tensor):
    """Sees functions of tensors, ours among them."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is fastconv.conv2d:
            cls.seen.append(kwargs)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("which", range(4), ids=["input", "weight", "bias", "residual"])
def test_torch_function(which: int) -> None:
    tensors = _tensors(*ALL)
    expected = conv2d(*tensors)
    tensors[which] = tensors[which].as_subclass(_Tagged)
    _Tagged.seen = []
    output = conv2d(*tensors)
    assert type(output) is _Tagged
    torch.testing.assert_close(output.as_subclass(Tensor), expected)
    (seen,) = _Tagged.seen
    assert seen["activation"] == "gelu"
    assert seen["residual"] is tensors[3]


def test_flops() -> None:
    def count(requires_grad: bool, **options: Any) -> int:
        tensors = _tensors(*ALL)
        tensors[1].requires_grad_(requires_grad)
        with FlopCounterMode(display=False) as counter:
            fastconv.conv2d(*tensors[:3], **OPTIONS, **options)
        return counter.get_total_flops()

    residual = torch.zeros(RESIDUAL, dtype=torch.float64)
    assert count(False) > 0
    for requires_grad in (False, True):
        assert count(requires_grad, activation="silu", residual=residual) == count(False)


# --- Graphs ---------------------------------------------------------------------------------------


class _Block(nn.Module):
    """One layer for each activation, some with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(fastconv.Conv2d(4, 4, 3, padding=1) for _ in FUNCTIONS)

    def forward(self, input: Tensor) -> Tensor:
        for i, (layer, activation) in enumerate(zip(self.layers, FUNCTIONS, strict=True)):
            input = fastconv.conv2d(
                input, layer.weight, layer.bias, padding=((1, 1), (1, 1)), activation=activation,
                residual=input if activation is None or i % 2 else None,
            )  # fmt: skip
        return input


def _targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


FUSED, FORWARD = "fastconv.fused.default", "fastconv.forward.default"


@by_python
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compile(training: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model, input = _Block(), torch.randn(2, 4, 5, 6)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    with torch.set_grad_enabled(training):
        ours, expected = compiled(input), model(input)
    torch.testing.assert_close(ours, expected)
    targets = _targets(graphs[0].graph)
    counts = targets.count(FUSED), targets.count(FORWARD)
    assert counts == ((0, len(FUNCTIONS)) if training else (len(FUNCTIONS), 0))
    if training:
        ours, theirs = (
            torch.autograd.grad(output.sum(), list(model.parameters()))
            for output in (ours, expected)
        )
        torch.testing.assert_close(ours, theirs)
    else:
        assert set(targets) == {FUSED}


@by_python
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_export_and_decompositions(tmp_path: Path) -> None:
    model, input = _Block().eval(), torch.randn(2, 4, 5, 6)
    program = torch.export.export(model, (input,), dynamic_shapes=({0: Dim("batch")},))
    assert set(_targets(program.graph)) == {FUSED}
    assert set(_targets(program.run_decompositions().graph)) == {FUSED}
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    table = torch.export.default_decompositions()
    table.update(torch._decomp.get_decompositions([torch.ops.fastconv.fused]))
    decomposed = program.run_decompositions(table)
    assert not any("fastconv" in target for target in _targets(decomposed.graph))
    path = tmp_path / "model.onnx"
    torch.onnx.export(program, (), path, dynamo=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (argument,) = session.get_inputs()
    for batch in (1, 3):
        input = torch.randn(batch, 4, 5, 6)
        with torch.no_grad():
            expected = model(input)
        torch.testing.assert_close(torch.export.load(file).module()(input), expected)
        file.seek(0)
        torch.testing.assert_close(decomposed.module()(input), expected)
        (result,) = session.run(None, {argument.name: input.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), expected)
