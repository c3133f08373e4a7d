"""The operators' schemas, argument checks and meta functions.

A ``*_result`` function checks an operator's arguments and returns the form of its result. An
operator and its meta function share it, so a tensor has the strides that its meta tensor promised.
The function sees no data, only shapes, strides, types and devices, so that its results can be
cached: see :func:`remembered`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastconv.kernels import planner
from fastconv.kernels.planner import Pass
from fastconv.native.schemas import SCHEMAS
from fastconv.ops.arguments import (
    Arguments,
    ForwardArguments,
    FusedArguments,
    InputGradArguments,
    TransposedArguments,
    WeightGradArguments,
)
from fastconv.problem import (
    ACTIVATIONS,
    NO_EPILOGUE,
    Epilogue,
    Problem,
    check_bias,
    is_channels_last,
)

DTYPES = frozenset((
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
))  # fmt: skip

# The layout of a result depends on that of the operands, so compilers must not change the latter.
TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),)

if torch._C._dispatch_has_kernel("fastconv::forward"):
    raise ImportError(
        "libfastconv.so, fastconv's library for programs without Python, has been loaded into this "
        "process: import fastconv before, or do not load the library"
    )
library = torch.library.Library("fastconv", "DEF")
for _schema in SCHEMAS:
    library.define(_schema, tags=TAGS)

# forward(input, weight, bias, stride, padding, dilation, groups, precision) -> output
#   Of images, stride and dilation are (vertical, horizontal) and padding is (top, bottom, left,
#   right). Of volumes, each list begins with depth: padding with (front, back). With precision
#   None, the operator follows PyTorch's setting at the time when it runs.
forward = torch.ops.fastconv.forward.default
# input_grad(grad_output, weight, input_size, stride, padding, dilation, groups, precision,
#            memory_format) -> gradient
#   input_size is (height, width), or (depth, height, width), which does not follow from the
#   output's size when strides are above 1; memory_format is the gradient's, and None means
#   channels-last if either tensor is.
input_grad = torch.ops.fastconv.input_grad.default
# weight_grad(grad_output, input, kernel_size, stride, padding, dilation, groups, precision, bias,
#             memory_format) -> gradients of weight and bias
#   With bias=False the second gradient is an empty tensor.
weight_grad = torch.ops.fastconv.weight_grad.default
# fused(input, weight, bias, residual, stride, padding, dilation, groups, precision, activation,
#       slope) -> output
#   The output is activation(convolution + bias + residual), rounded once; slope is that of
#   leaky_relu, and 0 for all other activations.
fused = torch.ops.fastconv.fused.default
# transposed(input, weight, bias, residual, output_padding, stride, padding, dilation, groups,
#            precision, activation, slope) -> output
#   The output is activation(transposed convolution + bias + residual). The transposed convolution
#   is the input gradient of a convolution whose output's gradient is ``input``; ``padding`` is cut
#   off its sides, and ``output_padding``, which is below the stride, is added at the back, at the
#   bottom and to the right.
transposed = torch.ops.fastconv.transposed.default
# backward(grad_output, input, weight, stride, padding, dilation, groups, precision, transposed,
#          bias) -> gradients of input, weight and bias
#   All gradients of a convolution, or of a transposed one, in one call. They have the memory format
#   that gradient_format says. With bias=False the third gradient is an empty tensor.
backward = torch.ops.fastconv.backward.default

PRECISION = 7
"""The index of ``precision`` among the arguments of ``forward`` and both gradients."""


class Form(NamedTuple):
    """A tensor's shape, strides, type and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Form:
        if tensor.layout is not torch.strided:
            check_dense(name, tensor)
        try:
            return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        except RuntimeError:
            check_dense(name, tensor)
            raise


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises if the tensor is nested (it has no shape) or has a layout other than strided."""
    if tensor.is_nested:
        raise NotImplementedError(f"fastconv takes dense tensors, but {name} is a nested one")
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f"fastconv takes dense (torch.strided) tensors, but {name} has {tensor.layout}"
        )


class Result(NamedTuple):
    """The convolution that an operator computes, and the form of the tensor that it returns."""

    problem: Problem
    shape: tuple[int, ...]
    memory_format: torch.memory_format
    dtype: torch.dtype
    device: torch.device
    epilogue: Epilogue = NO_EPILOGUE

    def new(self) -> Tensor:
        return torch.empty(
            self.shape, dtype=self.dtype, device=self.device, memory_format=self.memory_format
        )


def forward_result(
    input: Form,
    weight: Form,
    bias: Form | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Result:
    _check_alike(Input=input, weight=weight, bias=bias)
    problem = Problem.of(input.shape, weight.shape, stride, padding, dilation, groups)
    if bias is not None:
        check_bias(bias.shape, weight.shape, problem.out_channels, transposed=False)
    return _result(problem, problem.output_shape, input, joint_format(input, weight))


def fused_result(
    input: Form,
    weight: Form,
    bias: Form | None,
    residual: Form | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    activation: str,
    slope: float,
) -> Result:
    result = forward_result(input, weight, bias, stride, padding, dilation, groups)
    return _with_epilogue(result, input, residual, activation, slope)


def transposed_result(
    input: Form,
    weight: Form,
    bias: Form | None,
    residual: Form | None,
    output_padding: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    activation: str,
    slope: float,
) -> Result:
    _check_alike(Input=input, weight=weight, bias=bias)
    problem = Problem.of_transposed(
        input.shape, weight.shape, output_padding, stride, padding, dilation, groups
    )
    if any(more >= step for more, step in zip(output_padding, stride, strict=True)):
        raise RuntimeError(
            f"the operator takes output_padding below the stride, but got "
            f"output_padding={list(output_padding)} and stride={list(stride)}"
        )
    if bias is not None:
        check_bias(bias.shape, weight.shape, problem.in_channels, transposed=True)
    result = _result(problem, problem.input_shape, input, joint_format(input, weight))
    return _with_epilogue(result, input, residual, activation, slope)


def _with_epilogue(
    result: Result, input: Form, residual: Form | None, activation: str, slope: float
) -> Result:
    check_activation(activation, slope, input.dtype)
    _check_alike(Input=input, residual=residual)
    if residual is not None and tuple(residual.shape) != result.shape:
        raise RuntimeError(
            f"Expected residual of the output's size {list(result.shape)}, "
            f"but got residual of size {list(residual.shape)}"
        )
    return result._replace(epilogue=Epilogue(activation, slope, residual is not None))


def check_activation(activation: str, slope: float, dtype: torch.dtype) -> None:
    if activation not in ACTIVATIONS:
        raise unknown_activation(activation)
    if not isfinite(slope) or (slope != 0 and activation != "leaky_relu"):
        raise ValueError(
            f"only leaky_relu has a slope, which should be finite, but got {slope} for {activation}"
        )
    taken = ACTIVATIONS if dtype.is_floating_point else _OTHERS_ACTIVATIONS[dtype.is_complex]
    if activation not in taken:
        raise NotImplementedError(
            f"the activation {activation} is not implemented for {dtype}; implemented are "
            f"{', '.join(taken)}"
        )


def unknown_activation(value: Any) -> ValueError:
    return ValueError(
        f"activation should be None, one of {', '.join(ACTIVATIONS)}, or ('leaky_relu', slope), "
        f"but got {value!r}"
    )


# The activations of integer types, which have no fractions, and of complex types, which have no
# order.
_OTHERS_ACTIVATIONS = (("identity", "relu", "relu6"), ("identity",))


def input_grad_result(
    grad_output: Form,
    weight: Form,
    input_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    memory_format: torch.memory_format | None,
) -> Result:
    _check_alike(grad_output=grad_output, weight=weight)
    _check_rank(len(stride), grad_output=grad_output, weight=weight)
    input_shape = (grad_output.shape[0], weight.shape[1] * groups, *input_size)
    problem = Problem.of(input_shape, weight.shape, stride, padding, dilation, groups)
    _check_grad_output(problem, grad_output)
    memory_format = memory_format or joint_format(grad_output, weight)
    return _result(problem, problem.input_shape, grad_output, memory_format)


def weight_grad_result(
    grad_output: Form,
    input: Form,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    memory_format: torch.memory_format | None,
) -> Result:
    _check_alike(grad_output=grad_output, input=input)
    _check_rank(len(stride), grad_output=grad_output, input=input)
    if groups > 0 and input.shape[1] % groups != 0:
        raise RuntimeError(
            f"Given groups={groups}, expected input to be divisible by {groups} at dimension 1, "
            f"but got input of size {list(input.shape)} instead"
        )
    weight_shape = (grad_output.shape[1], input.shape[1] // max(groups, 1), *kernel_size)
    problem = Problem.of(input.shape, weight_shape, stride, padding, dilation, groups)
    _check_grad_output(problem, grad_output)
    memory_format = memory_format or joint_format(grad_output, input)
    return _result(problem, problem.weight_shape, grad_output, memory_format)


def _result(
    problem: Problem, shape: tuple[int, ...], like: Form, memory_format: torch.memory_format
) -> Result:
    formats = (torch.contiguous_format, _channels_last(len(shape)))
    if memory_format not in formats:
        raise RuntimeError(
            f"fastconv writes {formats[0]} and {formats[1]}, but got memory_format={memory_format}"
        )
    return Result(problem, shape, memory_format, like.dtype, like.device)


def joint_format(first: Form, second: Form) -> torch.memory_format:
    """Returns channels-last if either operand has it, which is PyTorch's rule."""
    channels_last = not _is_always_contiguous(first.dtype, first.device, len(first.shape)) and (
        is_channels_last(first.shape, first.stride) or is_channels_last(second.shape, second.stride)
    )
    return _channels_last(len(first.shape)) if channels_last else torch.contiguous_format


def _channels_last(rank: int) -> torch.memory_format:
    """The format of tensors of four or five dimensions that has channels last."""
    return torch.channels_last if rank == 4 else torch.channels_last_3d


def gradient_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """Returns the memory format that both gradients of a convolution have in PyTorch.

    It is that of the output, whatever the format of the output's gradient. Complex gradients are
    always contiguous: PyTorch puts them together from real ones.
    """
    dtype = input.dtype
    contiguous = dtype.is_complex or _is_always_contiguous(dtype, input.device, input.dim())
    channels_last = not contiguous and (
        is_channels_last(input.shape, input.stride())
        or is_channels_last(weight.shape, weight.stride())
    )
    return _channels_last(input.dim()) if channels_last else torch.contiguous_format


def _is_always_contiguous(dtype: torch.dtype, device: torch.device, rank: int) -> bool:
    """Whether PyTorch's results of this type are contiguous, whatever the format of the operands.

    Those of float64 are on GPUs. On CPUs, oneDNN alone computes channels-last volumes.
    """
    if device.type == "cpu":
        return rank == 5 and dtype not in _ONEDNN_DTYPES
    return device.type == "cuda" and dtype in (torch.float64, torch.complex128)


_ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32)


def _check_alike(**forms: Form | None) -> None:
    """Raises unless all tensors have the same device and the same, supported dtype."""
    (first_name, first), *others = ((n, f) for n, f in forms.items() if f is not None)
    if first.dtype not in DTYPES:
        supported = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
        raise NotImplementedError(
            f"fastconv is not implemented for {first.dtype}; it takes {supported}"
        )
    for name, form in others:
        if form.device != first.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {first_name} is on "
                f"{first.device} and {name} is on {form.device}"
            )
        if form.dtype != first.dtype:
            raise RuntimeError(
                f"{first_name} type ({first.dtype}) and {name} type ({form.dtype}) "
                "should be the same"
            )


def _check_rank(axes: int, **forms: Form) -> None:
    rank = 5 if axes == 3 else 4
    for name, form in forms.items():
        if len(form.shape) != rank:
            raise RuntimeError(
                f"Expected {rank}D {name}, but got {name} of size: {list(form.shape)}"
            )


def _check_grad_output(problem: Problem, grad_output: Form) -> None:
    if tuple(grad_output.shape) != problem.output_shape:
        raise RuntimeError(
            f"Expected grad_output of size {list(problem.output_shape)}, "
            f"but got grad_output of size {list(grad_output.shape)}"
        )


# --- From an operator's arguments to its result ---------------------------------------------------

Check = Callable[..., Result]
_Function = TypeVar("_Function", bound=Check)


def remembered(check: _Function) -> _Function:
    """Caches the check's results by its arguments: a check takes longer than a kernel launch."""
    return lru_cache(maxsize=4096)(check)  # type: ignore[return-value]


def describe_forward(
    check: Check,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    precision: str | None,
) -> Result:
    return check(
        Form.of("input", input),
        Form.of("weight", weight),
        None if bias is None else Form.of("bias", bias),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
    )


def describe_fused(
    check: Check,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    precision: str | None,
    activation: str,
    slope: float,
) -> Result:
    return check(
        Form.of("input", input),
        Form.of("weight", weight),
        None if bias is None else Form.of("bias", bias),
        None if residual is None else Form.of("residual", residual),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        activation,
        slope,
    )


def describe_transposed(
    check: Check,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    output_padding: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    precision: str | None,
    activation: str,
    slope: float,
) -> Result:
    return check(
        Form.of("input", input),
        Form.of("weight", weight),
        None if bias is None else Form.of("bias", bias),
        None if residual is None else Form.of("residual", residual),
        tuple(output_padding),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        activation,
        slope,
    )


def describe_input_grad(
    check: Check,
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    precision: str | None,
    memory_format: torch.memory_format | None = None,
) -> Result:
    return check(
        Form.of("grad_output", grad_output),
        Form.of("weight", weight),
        tuple(input_size),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        memory_format,
    )


def describe_weight_grad(
    check: Check,
    grad_output: Tensor,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    precision: str | None,
    bias: bool,
    memory_format: torch.memory_format | None = None,
) -> Result:
    return check(
        Form.of("grad_output", grad_output),
        Form.of("input", input),
        tuple(kernel_size),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        memory_format,
    )


def new_bias_grad(result: Result, bias: bool) -> Tensor:
    size = result.problem.out_channels if bias else 0
    return torch.empty(size, dtype=result.dtype, device=result.device)


# --- The operators in one table -------------------------------------------------------------------


class Operator(NamedTuple):
    """One of the operators: which pass it is, and how its arguments are checked."""

    call: Any  # the operator itself
    plan: Pass
    arguments: Callable[..., Any]  # makes a value of the operator's arguments
    describe: Callable[..., Result]  # calls a check with the forms of the operator's arguments
    check: Check
    known: Check  # the check, with its results cached
    new: Callable[[Result, Any], Any]  # allocates what the operator returns

    def result(self, *args: Any) -> Result:
        """Checks the operator's arguments, without the cache: symbolic sizes have no hash."""
        return self.describe(self.check, *args)

    def fake(self, *args: Any) -> Any:
        """The operator's meta function."""
        return self.new(self.result(*args), self.arguments(*args))


def _new(result: Result, arguments: Arguments) -> Tensor:
    return result.new()


def _new_gradients(result: Result, arguments: WeightGradArguments) -> tuple[Tensor, Tensor]:
    return result.new(), new_bias_grad(result, arguments.bias)


OPERATORS = {
    name: Operator(call, plan, arguments, describe, check, remembered(check), new)
    for name, call, plan, arguments, describe, check, new in (
        ("forward", forward, planner.forward, ForwardArguments,
         describe_forward, forward_result, _new),
        ("input_grad", input_grad, planner.input_grad, InputGradArguments,
         describe_input_grad, input_grad_result, _new),
        ("weight_grad", weight_grad, planner.weight_grad, WeightGradArguments,
         describe_weight_grad, weight_grad_result, _new_gradients),
        ("fused", fused, planner.forward, FusedArguments, describe_fused, fused_result, _new),
        ("transposed", transposed, planner.input_grad, TransposedArguments,
         describe_transposed, transposed_result, _new),
    )
}  # fmt: skip
"""The operators by their names in ``torch.ops.fastconv``."""

for _name, _operator in OPERATORS.items():
    torch.library.register_fake(f"fastconv::{_name}", _operator.fake, lib=library)
