"""The operators of batch normalization: their schemas, arguments, checks, results and needs.

``ops/batchnorm.py`` computes and differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastconv.backends.batchnorm import formulas
from fastconv.backends.batchnorm.formulas import Inputs
from fastconv.backends.batchnorm.launches import Call, Gradients, Need, Running
from fastconv.native.schemas import NORM_SCHEMAS
from fastconv.ops.schema import TAGS, Form, check_activation, library

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

for _schema in NORM_SCHEMAS:
    library.define(_schema, tags=TAGS)

# batch_norm_forward(x, ...) -> output, mean, 1 / sqrt(variance + eps)
#   With `training`, statistics are those of the batch, and running statistics, if there are any,
#   are moved by `momentum` towards them, or by 1 / batches. Otherwise they are the running ones.
forward = torch.ops.fastconv.batch_norm_forward.default
# batch_norm_backward(grad, x, beside, ...) -> gradients of x, residual, weight, bias
#   Those that are not wanted are empty. `of_batch` says that mean and invstd are those of the
#   batch, `residual` that there was one. Without an activation, the gradient of the residual is
#   `grad`. `beside` is the output or the residual, where the activation's gradient needs it.
backward = torch.ops.fastconv.batch_norm_backward.default


class Arguments(NamedTuple):
    """The arguments of ``batch_norm_forward``."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None
    training: bool
    momentum: float
    eps: float
    activation: str
    slope: float

    def inputs(self, mean: Tensor, invstd: Tensor) -> Inputs:
        return Inputs(*self[:4], mean, invstd, self.activation, self.slope)


class OutputArguments(NamedTuple):
    """What the output of ``batch_norm_forward`` is computed again from; there is no residual."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    invstd: Tensor
    activation: str
    slope: float

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.x, None, *self[1:])


class GradArguments(NamedTuple):
    """The arguments of ``batch_norm_backward``."""

    grad: Tensor
    x: Tensor
    beside: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    invstd: Tensor
    of_batch: bool
    residual: bool
    activation: str
    slope: float
    wants_x: bool
    wants_parameters: bool
    wants_residual: bool

    @property
    def inputs(self) -> Inputs:
        return Inputs(
            self.x, None, self.weight, self.bias, self.mean, self.invstd,
            self.activation, self.slope,
        )  # fmt: skip


# --- Checks ---------------------------------------------------------------------------------------
# As in ops/schema.py, checks see the tensors' forms and no data, so that eager calls can cache
# them. Errors that PyTorch has as well have its words.

_NAMES = ("x", "residual", "weight", "bias", "running_mean", "running_var", "batches")
_GRAD_NAMES = ("grad", "x", "beside", "weight", "bias", "mean", "invstd")


def check(*args: Any) -> None:
    """Raises unless a batch normalization is defined and supported."""
    x, residual, weight, bias, running_mean, running_var, batches, training, *rest = args
    _check_x(x)
    for name, form in (("running_mean", running_mean), ("running_var", running_var)):
        if form is None and not training:
            raise RuntimeError(f"{name} must be defined in evaluation mode")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var should be given together or not at all")
    _check_parameters(x, ("weight", weight), ("bias", bias))
    _check_parameters(x, ("running_mean", running_mean), ("running_var", running_var))
    if residual is not None:
        _check_like("residual", residual, x)
    if batches is not None and (batches.dtype != torch.int64 or tuple(batches.shape) != ()):
        raise ValueError(
            "num_batches_tracked should be a torch.int64 of shape (), "
            f"but got {batches.dtype} of shape {tuple(batches.shape)}"
        )
    if batches is not None:
        _check_device("num_batches_tracked", batches, x)
    activation, slope = rest[-2:]
    check_activation(activation, slope, x.dtype)
    if training and _elements(x) == x.shape[1]:
        raise ValueError(
            "Expected more than 1 value per channel when training, "
            f"got input size {torch.Size(x.shape)}"
        )


def _check_x(x: Form) -> None:
    if len(x.shape) < 2:
        raise ValueError(f"expected at least 2D input (got {len(x.shape)}D input)")
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(f"batch normalization takes {names}, but got {x.dtype}")


def _check_parameters(x: Form, *named: tuple[str, Form | None]) -> None:
    """Raises unless all that are given have one number for each channel, and one type."""
    given = [(name, form) for name, form in named if form is not None]
    for name, form in given:
        if tuple(form.shape) != (x.shape[1],):
            raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {_elements(form)}")
        if (
            form.dtype not in (x.dtype, formulas.sum_type(x.dtype))
            or form.dtype != given[0][1].dtype
        ):
            allowed = " or ".join(dict.fromkeys(map(str, (x.dtype, formulas.sum_type(x.dtype)))))
            raise ValueError(
                f"{' and '.join(one for one, _ in given)} should both have {allowed} for an input "
                f"of {x.dtype}, but {name} has {form.dtype}"
            )
        _check_device(name, form, x)


def _check_like(name: str, form: Form, x: Form) -> None:
    if tuple(form.shape) != tuple(x.shape) or form.dtype != x.dtype:
        raise RuntimeError(
            f"Expected {name} of the input's size {list(x.shape)} and type {x.dtype}, "
            f"but got {name} of size {list(form.shape)} and type {form.dtype}"
        )
    _check_device(name, form, x)


def _check_device(name: str, form: Form, x: Form) -> None:
    if form.device != x.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} is on {form.device} and "
            f"the input on {x.device}"
        )


def _elements(form: Form) -> int:
    total = 1
    for size in form.shape:
        total *= size
    return total


def check_gradients(*args: Any) -> None:
    grad, x, beside, weight, bias, mean, invstd, activation, slope = args
    _check_x(x)
    _check_like("grad", grad, x)
    if beside is not None:
        _check_like("beside", beside, x)
    _check_parameters(x, ("weight", weight), ("bias", bias))
    for name, form in (("mean", mean), ("invstd", invstd)):
        if tuple(form.shape) != (x.shape[1],) or form.dtype != formulas.sum_type(x.dtype):
            raise ValueError(
                f"{name} should have shape ({x.shape[1]},) and {formulas.sum_type(x.dtype)}, "
                f"but has {tuple(form.shape)} and {form.dtype}"
            )
        _check_device(name, form, x)
    check_activation(activation, slope, x.dtype)


# Eager calls cache checks; meta functions do not, because symbolic sizes have no hash.
known: Callable[..., None] = lru_cache(4096)(check)
known_gradients: Callable[..., None] = lru_cache(4096)(check_gradients)


def check_forward(given: Arguments) -> None:
    """Raises unless a call of ``batch_norm_forward`` is defined and supported."""
    known(*map(_form, _NAMES, given[:7]), *given[7:])


def check_backward(given: GradArguments) -> None:
    """Raises unless a call of ``batch_norm_backward`` is defined and supported."""
    known_gradients(*map(_form, _GRAD_NAMES, given[:7]), given.activation, given.slope)


def _form(name: str, tensor: Tensor | None) -> Form | None:
    return None if tensor is None else Form.of(name, tensor)


# --- Results --------------------------------------------------------------------------------------


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of x are neighbours in memory, and x is dense otherwise."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def new_like(x: Tensor) -> Tensor:
    """Returns a new tensor with the strides of x, or a contiguous one if x is in no format."""
    if x.is_contiguous() or is_channels_last(x):
        return torch.empty_like(x)
    return x.new_empty(x.shape)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor, or a copy, with the strides of a new one."""
    if tensor.stride() == like.stride():
        return tensor
    same = is_channels_last(tensor) if is_channels_last(like) else tensor.is_contiguous()
    return tensor if same else torch.empty_like(like).copy_(tensor)


def new_forward(check: Callable[..., None], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the arguments of ``batch_norm_forward``, and allocates what it returns."""
    check(*map(_form, _NAMES, args[:7]), *args[7:])
    x = args[0]
    channels, dtype = (x.shape[1],), formulas.sum_type(x.dtype)
    return new_like(x), x.new_empty(channels, dtype=dtype), x.new_empty(channels, dtype=dtype)


def new_backward(check: Callable[..., None], *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checks the arguments of ``batch_norm_backward``, and allocates what it returns."""
    given = GradArguments(*args)
    check(*map(_form, _GRAD_NAMES, args[:7]), given.activation, given.slope)
    x, weight = given.x, given.weight
    dtype = x.dtype if weight is None else weight.dtype
    stores = given.wants_residual and given.activation != "identity"
    channels = (x.shape[1],) if given.wants_parameters else (0,)
    return (
        new_like(x) if given.wants_x else x.new_empty((0,)),
        new_like(x) if stores else x.new_empty((0,)),
        x.new_empty(channels, dtype=dtype),
        x.new_empty(channels, dtype=dtype),
    )


def dense(given: Arguments, y: Tensor) -> Arguments:
    """Returns the arguments with tensors that lie as kernels take them, but running statistics."""
    return given._replace(
        x=_laid_out(given.x, y),
        residual=None if given.residual is None else _laid_out(given.residual, y),
        weight=contiguous(given.weight),
        bias=contiguous(given.bias),
    )


def dense_gradients(given: GradArguments, grad_x: Tensor | None) -> GradArguments:
    """Returns the arguments with tensors that lie as kernels take them."""
    like = new_like(given.x) if grad_x is None else grad_x
    return given._replace(
        grad=_laid_out(given.grad, like),
        x=_laid_out(given.x, like),
        beside=None if given.beside is None else _laid_out(given.beside, like),
        weight=contiguous(given.weight),
        bias=contiguous(given.bias),
        mean=given.mean.contiguous(),
        invstd=given.invstd.contiguous(),
    )


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# --- What a GPU has to compute --------------------------------------------------------------------


def forward_need(given: Arguments, alignment: int, shares: int = 0) -> Need:
    """What ``batch_norm_forward`` has to compute, given what divides its tensors' addresses.

    Tensors may be fake. ``shares`` is how many of the statistics of x are there already.
    """
    mean = given.running_mean
    dtype = formulas.sum_type(given.x.dtype) if mean is None else mean.dtype
    momentum = given.momentum if given.batches is None else 0.0
    running = Running(given.eps, momentum if given.training else None, dtype, shares)
    return Need(_call(given, given.residual is not None, alignment), running)


def output_need(given: OutputArguments, alignment: int) -> Need:
    """What a GPU has to compute for the output alone."""
    return Need(_call(given, False, alignment), None)


def backward_need(given: GradArguments, alignment: int) -> Need | None:
    """What ``batch_norm_backward`` has to compute; None if no gradient is written."""
    stores = given.wants_residual and given.activation != "identity"
    wanted = Gradients(given.of_batch, given.wants_x, given.wants_parameters, stores)
    if not any(wanted[1:]):
        return None
    return Need(_call(given, given.residual, alignment), wanted)


def _call(
    given: Arguments | OutputArguments | GradArguments, residual: bool, alignment: int
) -> Call:
    x = given.x
    parameter = next((one.dtype for one in (given.weight, given.bias) if one is not None), x.dtype)
    return Call(
        x.shape[0], x.shape[1], prod(x.shape[2:]), is_channels_last(x), x.dtype, parameter,
        given.activation, given.slope, residual, alignment, x.device.index or 0,
    )  # fmt: skip
