"""The CPU backend against PyTorch in float64, in every type, layout and block size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fastconv.backends import cpu
from fastconv.problem import Problem

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEXES = (torch.complex64, torch.complex128, torch.complex32)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# The error allowed for sums, relative to the largest one; the result may then be rounded once.
SUM_ERRORS = {torch.float64: 1e-12, torch.complex128: 1e-12}
NARROW_SUM_ERROR = 1e-5


@dataclass(frozen=True)
class Layout:
    """How a tensor of given values lies in memory."""

    name: str
    of: Callable[[Tensor], Tensor]


LAYOUTS = (
    Layout("contiguous", torch.Tensor.contiguous),
    Layout("channels_last", lambda t: t.contiguous(memory_format=torch.channels_last)),
    Layout("sliced", lambda t: F.pad(t, (1, 2, 2, 1, 1, 1))[:, 1:-1, 2:-1, 1:-2]),
    Layout("every_other", lambda t: t.repeat_interleave(2, 3)[..., ::2]),
    Layout("transposed", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)),
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    def pair(least: int, most: int) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    groups = draw(st.sampled_from((1, 1, 2, 3)))
    depth, channels = draw(
        st.sampled_from(((1, 1), (1, 2), (1, 6), (2, 3), (5, 1), (3, 4), (0, 2)))
    )
    kernel, stride, dilation, extra = pair(1, 9), pair(1, 3), pair(1, 3), pair(0, 9)
    top, bottom, left, right = (draw(st.integers(0, 4)) for _ in range(4))
    padding = (top + bottom, left + right)
    height, width = (
        max(1, dilation[i] * (kernel[i] - 1) + 1 - padding[i]) + extra[i] for i in range(2)
    )
    batch = draw(st.integers(0, 3))
    return Problem.of(
        (batch, groups * depth, height, width),
        (groups * channels, depth, *kernel),
        stride,
        (top, bottom, left, right),
        dilation,
        groups,
    )


@dataclass(frozen=True)
class Tensors:
    input: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor


def tensors(problem: Problem, dtype: torch.dtype, layout: Layout = LAYOUTS[0]) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        if dtype in INTEGERS:
            return torch.randint(0, 100, shape, generator=generator).to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)

    return Tensors(
        layout.of(values(*problem.input_shape)),
        layout.of(values(*problem.weight_shape)),
        values(problem.out_channels),
        layout.of(values(*problem.output_shape)),
    )


def oracle(problem: Problem, given: Tensors, dtype: torch.dtype) -> list[Tensor]:
    """Output, input gradient, weight gradient and bias gradient, not conjugated, by PyTorch."""
    pad = problem.padding
    x, w, b = (
        t.to(dtype).contiguous().requires_grad_() for t in (given.input, given.weight, given.bias)
    )
    padded = F.pad(x, (pad.left, pad.right, pad.top, pad.bottom))
    if problem.in_channels:
        y = F.conv2d(padded, w, b, problem.stride, 0, problem.dilation, problem.groups)
    else:
        y = b[:, None, None].expand(problem.output_shape) + 0 * x.sum() + 0 * w.sum()
    grads = torch.autograd.grad(y, (x, w, b), given.grad.to(dtype).conj().resolve_conj())
    return [y.detach(), *(g.conj().resolve_conj() for g in grads)]


def poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format
) -> Tensor:
    out = torch.empty(shape, dtype=dtype).contiguous(memory_format=memory_format)
    return out.fill_(77 if dtype in INTEGERS else float("nan"))


def run(
    problem: Problem, given: Tensors, memory_format: torch.memory_format = torch.contiguous_format
) -> list[Tensor]:
    """Output, input gradient, weight gradient and bias gradient, by the backend."""
    dtype = given.input.dtype
    out, input_out, weight_out = (
        poisoned(shape, dtype, memory_format)
        for shape in (problem.output_shape, problem.input_shape, problem.weight_shape)
    )
    bias_out = torch.full_like(given.bias, 77)
    cpu.forward(problem, given.input, given.weight, given.bias, out)
    cpu.input_grad(problem, given.grad, given.weight, input_out)
    cpu.weight_grad(problem, given.grad, given.input, weight_out, bias_out)
    return [out, input_out, weight_out, bias_out]


def check(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, exact in zip(results, expected, strict=True):
        assert result.shape == exact.shape
        if result.dtype in INTEGERS:
            assert torch.equal(result, exact.to(result.dtype))
        elif result.numel():
            rounding = torch.finfo(result.dtype).eps / 2 * exact.abs()
            summing = SUM_ERRORS.get(result.dtype, NARROW_SUM_ERROR) * exact.abs().max().clamp(
                min=1
            )
            assert ((result.to(exact.dtype) - exact).abs() <= rounding + summing).all()


def wide_type(dtype: torch.dtype) -> torch.dtype:
    if dtype in INTEGERS:
        return torch.float64  # It is exact for the values used here.
    return torch.complex128 if dtype.is_complex else torch.float64


def exact_results(problem: Problem, given: Tensors) -> list[Tensor]:
    """What ``check`` compares with: exact integers, or float64 of the values as rounded."""
    dtype = given.input.dtype
    results = oracle(problem, given, wide_type(dtype))
    return [r.round().to(torch.int64) for r in results] if dtype in INTEGERS else results


@settings(max_examples=100)
@given(
    problem=problems(),
    dtype=st.sampled_from((torch.float64, *FLOATS, *COMPLEXES, *INTEGERS)),
    layout=st.sampled_from(LAYOUTS),
    memory_format=st.sampled_from((torch.contiguous_format, torch.channels_last)),
    scratch=st.sampled_from((cpu.scratch.BLOCK_BYTES, 50_000, 5_000, 500)),
    efficient_positions=st.sampled_from((cpu.tiling.EFFICIENT_POSITIONS, 0)),
)
def test_any_geometry(
    problem: Problem,
    dtype: torch.dtype,
    layout: Layout,
    memory_format: torch.memory_format,
    scratch: int,
    efficient_positions: int,
) -> None:
    given = tensors(problem, dtype, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.scratch, "BLOCK_BYTES", scratch)
        patch.setattr(cpu.scratch, "PACKED_BYTES", scratch)
        # With 0, thin layers are computed tap by tap.
        patch.setattr(cpu.tiling, "EFFICIENT_POSITIONS", efficient_positions)
        results = run(problem, given, memory_format)
    check(results, exact_results(problem, given))


BASE = Problem.of((3, 6, 11, 13), (8, 3, 3, 5), (1, 2), (2, 1, 0, 3), (2, 1), 2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEXES, *INTEGERS], ids=str)
def test_any_type_and_layout(dtype: torch.dtype, layout: Layout) -> None:
    given = tensors(BASE, dtype, layout)
    check(run(BASE, given), exact_results(BASE, given))


@pytest.mark.parametrize(
    ("input_shape", "weight_shape", "groups"),
    [
        ((2, 24, 30, 31), (40, 24, 5, 7), 1),  # rows share a lowered matrix
        ((2, 8, 30, 31), (140, 8, 3, 3), 1),  # gradients deep enough for one kernel row
        ((5, 40, 7, 7), (30, 40, 3, 3), 1),  # images share a block
        ((2, 40, 17, 19), (30, 40, 1, 1), 1),  # nothing to lower
        ((3, 12, 17, 19), (24, 1, 5, 3), 12),  # depthwise, two output channels each
    ],
)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_every_path(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    groups: int,
    stride: int,
    padding: int,
    memory_format: torch.memory_format,
) -> None:
    problem = Problem.of(
        input_shape, weight_shape, (stride, stride), (padding,) * 4, (1, 1), groups
    )
    layout = LAYOUTS[memory_format == torch.channels_last]
    given = tensors(problem, torch.float32, layout)
    check(run(problem, given, memory_format), exact_results(problem, given))


class _Operators(TorchDispatchMode):
    """Collects the names of PyTorch's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._opname)
        return func(*args, **(kwargs or {}))


THIN = {
    "3x3": Problem.of((2, 24, 17, 19), (24, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 24),
    "stride": Problem.of((2, 24, 17, 19), (24, 1, 5, 3), (2, 3), (2, 1, 0, 3), (1, 1), 24),
    "stride beyond the kernel": Problem.of(
        (2, 96, 17, 19), (96, 1, 1, 2), (3, 3), (0,) * 4, (1, 1), 96
    ),
    "dilation": Problem.of((2, 24, 17, 19), (24, 1, 3, 4), (1, 1), (4, 0, 3, 1), (4, 2), 24),
    "stride and dilation": Problem.of(
        (2, 48, 17, 19), (48, 1, 3, 4), (2, 2), (4, 0, 3, 1), (4, 3), 48
    ),
    "multiplier": Problem.of((2, 12, 17, 19), (36, 1, 3, 5), (1, 2), (1, 1, 2, 2), (1, 1), 12),
    "one channel": Problem.of((2, 1, 40, 41), (4, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "strip": Problem.of((2, 24, 17, 19), (24, 1, 1, 15), (1, 1), (0, 0, 7, 7), (1, 1), 24),
    "column": Problem.of((2, 24, 17, 19), (24, 1, 15, 1), (1, 1), (7, 7, 0, 0), (1, 1), 24),
    "kernel as large as the image": Problem.of(
        (2, 24, 17, 19), (24, 1, 17, 19), (1, 1), (8, 8, 9, 9), (1, 1), 24
    ),
}
FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("scratch", [cpu.scratch.BLOCK_BYTES, 200_000])
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("case", THIN)
def test_thin_layers(
    case: str,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    scratch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu.scratch, "BLOCK_BYTES", scratch)
    given = tensors(THIN[case], dtype, LAYOUTS[memory_format == torch.channels_last])
    with _Operators() as operators:
        results = run(THIN[case], given, memory_format)
    assert "addcmul_" in operators.seen
    depthwise = THIN[case].out_channels == THIN[case].groups
    assert ("baddbmm_" in operators.seen) != depthwise  # Other layers use it in input gradients.
    check(results, exact_results(THIN[case], given))


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("case", THIN)
def test_thin_layers_give_the_same_bits_again(
    case: str, memory_format: torch.memory_format
) -> None:
    given = tensors(THIN[case], torch.float32, LAYOUTS[memory_format == torch.channels_last])
    once, again = (run(THIN[case], given, memory_format) for _ in range(2))
    assert all(map(torch.equal, once, again))


def plain_sums(problem: Problem, given: Tensors) -> list[Tensor]:
    """The results of ``run`` for a depthwise layer, from products with pixels and padding alone."""
    (height, width), pad = problem.input_size, problem.padding
    padded = F.pad(given.input, (pad.left, pad.right, pad.top, pad.bottom))
    padded_grad, weight_grad = torch.zeros_like(padded), torch.zeros_like(given.weight)
    out = given.bias[:, None, None].expand(problem.output_shape).clone()
    for row, column in product(*map(range, problem.kernel_size)):
        place = (
            ...,
            *(
                slice(tap * dilation, tap * dilation + (outputs - 1) * stride + 1, stride)
                for tap, dilation, outputs, stride in zip(
                    (row, column),
                    problem.dilation,
                    problem.output_size,
                    problem.stride,
                    strict=True,
                )
            ),
        )
        factor = given.weight[:, :, row, column, None]
        out += padded[place] * factor
        padded_grad[place] += given.grad * factor
        weight_grad[:, 0, row, column] = (padded[place] * given.grad).sum((0, 2, 3))
    inside = padded_grad[..., pad.top : pad.top + height, pad.left : pad.left + width]
    return [out, inside, weight_grad, given.grad.sum((0, 2, 3))]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["input", "grad"])
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("case", ["3x3", "stride", "dilation", "strip"])
def test_what_is_not_finite_stays_where_it_belongs(
    case: str, memory_format: torch.memory_format, where: str, value: float
) -> None:
    problem = THIN[case]
    given = tensors(problem, torch.float32, LAYOUTS[memory_format == torch.channels_last])
    getattr(given, where)[0, 0, 0, 0] = getattr(given, where)[1, 2, -1, -1] = value
    given.weight[2] = 0
    expected = plain_sums(problem, given)
    for result, exact in zip(run(problem, given, memory_format), expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("case", ["strip"])
def test_infinite_weights_meet_no_zeros_beyond_the_borders(
    case: str, memory_format: torch.memory_format
) -> None:
    """Zeros beyond the output's gradient do not count; those of the input's padding do."""
    problem = THIN[case]
    given = tensors(problem, torch.float32, LAYOUTS[memory_format == torch.channels_last])
    given.weight[0, 0, 0, 0] = float("inf")
    (out, input_out, *_), expected = run(problem, given, memory_format), plain_sums(problem, given)
    for result, exact in zip((out, input_out), expected[:2], strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_without_bias() -> None:
    given = tensors(BASE, torch.float64)
    out = poisoned(BASE.output_shape, torch.float64, torch.contiguous_format)
    weight_out = poisoned(BASE.weight_shape, torch.float64, torch.contiguous_format)
    cpu.forward(BASE, given.input, given.weight, None, out)
    cpu.weight_grad(BASE, given.grad, given.input, weight_out, None)
    expected, _, weight_grad, _ = exact_results(BASE, given)
    check([out, weight_out], [expected - given.bias[:, None, None], weight_grad])


@pytest.mark.parametrize("kernel", [1, 3])
def test_expanded_tensors(kernel: int) -> None:
    problem = Problem.of((2, 6, 9, 9), (4, 6, kernel, kernel), (1, 1), (0,) * 4, (1, 1), 1)
    given = tensors(problem, torch.float32)
    given = Tensors(
        given.input[:1, :, :1].expand(problem.input_shape),
        given.weight[:, :1].expand(problem.weight_shape),
        given.bias[:1].expand(problem.out_channels),
        given.grad[:1, :1, :1, :1].expand(problem.output_shape),
    )
    check(run(problem, given), exact_results(problem, given))


@pytest.mark.parametrize("kernel", [1, 3])
def test_lazy_conjugate_and_negative(kernel: int) -> None:
    problem = Problem.of((1, 6, 9, 9), (4, 6, kernel, kernel), (1, 1), (0,) * 4, (1, 1), 1)
    given = tensors(problem, torch.complex64)
    lazy = Tensors(given.input.conj(), given.weight.conj(), given.bias, given.grad.conj())
    assert lazy.input.is_conj()
    check(run(problem, lazy), exact_results(problem, lazy))
    parts = [t.conj().imag for t in (given.input, given.weight, given.bias, given.grad)]
    assert parts[0].is_neg()
    check(run(problem, Tensors(*parts)), exact_results(problem, Tensors(*parts)))


def test_narrow_types_are_rounded_once() -> None:
    """Every sum is 1 plus many terms of half bfloat16's spacing, which would vanish one by one."""
    problem = Problem.of((1, 257, 1, 1), (1, 257, 1, 1), (1, 1), (0,) * 4, (1, 1), 1)
    values = torch.full((1, 257, 1, 1), 2.0**-9, dtype=torch.bfloat16)
    ones, out = torch.ones_like(values), torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    cpu.forward(problem, values, ones, torch.ones(1, dtype=torch.bfloat16), out)
    assert out.item() == torch.tensor(1 + 257 * 2.0**-9).bfloat16().item()


def peak_memory(function: Callable[[], None]) -> int:
    """The most bytes that ``function`` holds at once, in PyTorch's own operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_peak_memory_is_measured() -> None:
    def twice_8_bytes_then_16() -> None:
        first = torch.empty(8, dtype=torch.uint8)
        second = torch.empty_like(first)
        del first, second
        torch.empty(16, dtype=torch.uint8)

    assert peak_memory(twice_8_bytes_then_16) >= 16


LARGE = {
    "usual": ((2, 32, 128, 128), (64, 32, 5, 9), (1, 1), (2, 3)),
    "wide": ((1, 2, 3, 1_000_000), (3, 2, 3, 9), (1, 1), (1, 1)),
    "many channels": ((1, 3000, 3, 4), (900, 3000, 3, 3), (1, 1), (1, 1)),
    "large kernel": ((1, 1, 1200, 1300), (4, 1, 1199, 1299), (1, 1), (1, 1)),
    "large dilation": ((1, 2, 2600, 2600), (3, 2, 2, 2), (1, 1), (2590, 2595)),
    "large stride": ((1, 4, 2600, 2600), (4, 4, 3, 3), (1000, 1000), (1, 1)),
    "pointwise": ((1, 256, 128, 512), (64, 256, 1, 1), (1, 1), (1, 1)),
    "depthwise": ((1, 64, 512, 512), (64, 1, 3, 3), (1, 1), (1, 1)),
    "depthwise, wide": ((1, 2, 3, 1_000_000), (4, 1, 3, 9), (1, 1), (1, 1)),
    "depthwise, large dilation": ((1, 4, 2600, 2600), (8, 1, 2, 2), (1, 1), (2000, 2000)),
    "depthwise, large stride": ((1, 8, 2000, 2000), (8, 1, 3, 3), (100, 100), (1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE)
def test_memory_is_bounded(case: str, dtype: torch.dtype) -> None:
    input_shape, weight_shape, stride, dilation = LARGE[case]
    groups = input_shape[1] // weight_shape[1]
    problem = Problem.of(input_shape, weight_shape, stride, (1, 1, 1, 1), dilation, groups)
    every_other = torch.ones(*input_shape[:3], 2 * input_shape[3], dtype=dtype)[..., ::2]
    weight, out, grad = (
        torch.ones(shape, dtype=dtype)
        for shape in (weight_shape, problem.output_shape, problem.output_shape)
    )
    input_out, weight_out = torch.ones(input_shape, dtype=dtype), torch.ones_like(weight)
    bias = torch.ones(problem.out_channels, dtype=dtype)
    for function in (
        lambda: cpu.forward(problem, every_other, weight, bias, out),
        lambda: cpu.input_grad(problem, grad, weight, input_out),
        lambda: cpu.weight_grad(problem, grad, every_other, weight_out, bias),
    ):
        assert peak_memory(function) < 64 << 20


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_memory_beside_a_first_layer(memory_format: torch.memory_format) -> None:
    """Buffers are bounded however large the tensors are: here 98 MiB of gradients."""
    problem = Problem.of((8, 3, 224, 224), (64, 3, 7, 7), (2, 2), (3,) * 4, (1, 1), 1)
    input, weight, grad = (
        torch.ones(shape).contiguous(memory_format=memory_format)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    for function in (
        lambda: cpu.forward(problem, input, weight, None, grad),
        lambda: cpu.input_grad(problem, grad, weight, input),
        lambda: cpu.weight_grad(problem, grad, input, weight, None),
    ):
        assert 1 << 20 < peak_memory(function) < 8 << 20
