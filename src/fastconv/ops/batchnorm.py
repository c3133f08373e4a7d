"""The operators of batch normalization with a residual and an activation.

``batch_norm_forward`` returns the output and the statistics that it has normalized with; in
training it updates running statistics in place. Its derivative is ``batch_norm_backward``. Where
that is to be differentiated again, it is computed by PyTorch's operations
(``backends/batchnorm/formulas.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from fastconv import native
from fastconv.backends.batchnorm import formulas, launches
from fastconv.backends.batchnorm.formulas import Inputs
from fastconv.backends.batchnorm.launches import Call, Running
from fastconv.backends.cuda import Ready
from fastconv.kernels.batchnorm.plan import beside as needs_beside
from fastconv.ops.autograd import SingleLevelFunction, recorded, wait_at_exit
from fastconv.ops.devices import loading
from fastconv.ops.schema import TAGS, Form, check_activation, library

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

SCHEMAS = (
    "batch_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? batches, bool training, "
    "float momentum, float eps, str activation, float slope) -> (Tensor, Tensor, Tensor)",
    "batch_norm_backward(Tensor grad, Tensor x, Tensor? beside, Tensor? weight, Tensor? bias, "
    "Tensor mean, Tensor invstd, bool of_batch, bool residual, str activation, float slope, "
    "bool wants_x, bool wants_parameters, bool wants_residual) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
for _schema in SCHEMAS:
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


def _check(*args: Any) -> None:
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


def _check_gradients(*args: Any) -> None:
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
_known: Callable[..., None] = lru_cache(4096)(_check)
_known_gradients: Callable[..., None] = lru_cache(4096)(_check_gradients)


def check_forward(given: Arguments) -> None:
    """Raises unless a call of ``batch_norm_forward`` is defined and supported."""
    _known(*map(_form, _NAMES, given[:7]), *given[7:])


def check_backward(given: GradArguments) -> None:
    """Raises unless a call of ``batch_norm_backward`` is defined and supported."""
    _known_gradients(*map(_form, _GRAD_NAMES, given[:7]), given.activation, given.slope)


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


def _new_forward(check: Callable[..., None], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the arguments of ``batch_norm_forward``, and allocates what it returns."""
    check(*map(_form, _NAMES, args[:7]), *args[7:])
    x = args[0]
    channels, dtype = (x.shape[1],), formulas.sum_type(x.dtype)
    return new_like(x), x.new_empty(channels, dtype=dtype), x.new_empty(channels, dtype=dtype)


def _new_backward(check: Callable[..., None], *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _dense(given: Arguments, y: Tensor) -> Arguments:
    """Returns the arguments with tensors that lie as kernels take them, but running statistics."""
    return given._replace(
        x=_laid_out(given.x, y),
        residual=None if given.residual is None else _laid_out(given.residual, y),
        weight=_contiguous(given.weight),
        bias=_contiguous(given.bias),
    )


def _dense_gradients(given: GradArguments, grad_x: Tensor | None) -> GradArguments:
    """Returns the arguments with tensors that lie as kernels take them."""
    like = new_like(given.x) if grad_x is None else grad_x
    return given._replace(
        grad=_laid_out(given.grad, like),
        x=_laid_out(given.x, like),
        beside=None if given.beside is None else _laid_out(given.beside, like),
        weight=_contiguous(given.weight),
        bias=_contiguous(given.bias),
        mean=given.mean.contiguous(),
        invstd=given.invstd.contiguous(),
    )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# --- On a CPU -------------------------------------------------------------------------------------


def fill_forward_cpu(args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    """Fills the results of ``batch_norm_forward``, and updates running statistics."""
    given, (y, mean, invstd) = Arguments(*args), results
    if not given.training:
        assert given.running_mean is not None
        assert given.running_var is not None
        mean.copy_(given.running_mean)
        invstd.copy_(torch.rsqrt(given.running_var.to(invstd.dtype) + given.eps))
    elif y.numel():
        found_mean, variance, found_invstd = formulas.statistics(given.x, given.eps)
        mean.copy_(found_mean)
        invstd.copy_(found_invstd)
        if given.running_mean is not None and given.running_var is not None:
            batches = given.batches
            by = given.momentum if batches is None else 1 / float(batches)
            count = y.numel() // y.shape[1]
            running = (given.running_mean, given.running_var)
            formulas.update_running(*running, found_mean, variance, count, by)
    else:  # as in PyTorch, nothing is normalized and running statistics stay
        mean.zero_()
        invstd.zero_()
    y.copy_(formulas.output(given.inputs(mean, invstd)))


def fill_backward_cpu(args: tuple[Any, ...], results: Sequence[Tensor | None]) -> None:
    """Fills the results of ``batch_norm_backward`` that are not None."""
    given = GradArguments(*args)
    found = formulas.gradients(given.inputs, given.grad, given.beside, given.of_batch)
    for result, gradient in zip(results, found, strict=True):
        if result is not None:
            result.copy_(gradient)


def _forward_cpu(*args: Any) -> tuple[Tensor, ...]:
    results = _new_forward(_known, *args)
    fill_forward_cpu(_dense(Arguments(*args), results[0]), results)
    return results


def _backward_cpu(*args: Any) -> tuple[Tensor, ...]:
    results = _new_backward(_known_gradients, *args)
    grads = _wanted(results)
    fill_backward_cpu(_dense_gradients(GradArguments(*args), grads[0]), grads)
    return results


def _wanted(results: tuple[Tensor, ...]) -> list[Tensor | None]:
    return [one if one.numel() else None for one in results]


# --- On a GPU -------------------------------------------------------------------------------------


def ready_forward(given: Arguments) -> Ready:
    """Returns the launches of a call whose tensors lie as kernels take them.

    Those of x's size have its layout, and all others are contiguous.
    """
    call = Call.of(
        given.x, given.weight if given.bias is None else given.bias, given.activation, given.slope,
        given.residual is not None, given.residual,
    )  # fmt: skip
    mean = given.running_mean
    dtype = formulas.sum_type(given.x.dtype) if mean is None else mean.dtype
    momentum = given.momentum if given.batches is None else 0.0
    return launches.ready_forward(
        call, Running(given.eps, momentum if given.training else None, dtype)
    )


def ready_backward(given: GradArguments) -> Ready:
    """Returns the launches of a call as :func:`ready_forward` does; some gradient is written."""
    call = Call.of(
        given.x, given.weight if given.bias is None else given.bias, given.activation, given.slope,
        given.residual, given.grad, given.beside,
    )  # fmt: skip
    stores = given.wants_residual and given.activation != "identity"
    wanted = launches.Gradients(given.of_batch, given.wants_x, given.wants_parameters, stores)
    return launches.ready_backward(call, wanted)


def _forward_cuda(*args: Any) -> tuple[Tensor, ...]:
    if args[0].numel() == 0:
        return _forward_cpu(*args)
    y, mean, invstd = _new_forward(_known, *args)
    given = _dense(Arguments(*args), y)
    with _dense_running(given.running_mean, given.running_var) as running:
        dense = given._replace(running_mean=running[0], running_var=running[1])
        ready_forward(dense).run(*dense[:7], mean, invstd, y)
    return y, mean, invstd


class _dense_running:
    """Gives running statistics as kernels write them: copies, which are copied back, of views."""

    def __init__(self, *statistics: Tensor | None) -> None:
        self.statistics = statistics

    def __enter__(self) -> list[Tensor | None]:
        self.dense = [_contiguous(one) for one in self.statistics]
        return self.dense

    def __exit__(self, *_: Any) -> None:
        for one, dense in zip(self.statistics, self.dense, strict=True):
            if one is not None and dense is not None and dense is not one:
                one.copy_(dense)


def _backward_cuda(*args: Any) -> tuple[Tensor, ...]:
    if args[0].numel() == 0:
        return _backward_cpu(*args)
    results = _new_backward(_known_gradients, *args)
    grads = _wanted(results)
    if any(one is not None for one in grads):
        dense = _dense_gradients(GradArguments(*args), grads[0])
        ready_backward(dense).run(*dense[:7], *grads)
    return results


# --- Derivatives ----------------------------------------------------------------------------------


class FastconvBatchNorm(SingleLevelFunction):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _below_autograd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        given, (y, mean, invstd) = Arguments(*inputs), output
        ctx.mark_non_differentiable(mean, invstd)
        ctx.set_materialize_grads(False)
        ctx.given = given[7:]
        ctx.has_residual = given.residual is not None
        other = needs_beside(given.activation, given.slope, ctx.has_residual)
        beside = {None: None, "output": y, "residual": given.residual}[other]
        ctx.save_for_backward(given.x, beside, given.weight, given.bias, mean, invstd)
        ctx.save_for_forward(given.x, given.residual, given.weight, given.bias, mean, invstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        nothing: tuple[Any, ...] = (None,) * (len(Arguments._fields) - 4)
        if grad is None:
            return (None,) * 4 + nothing
        wait_at_exit(grad.device.index)
        of_batch, _, *rest = ctx.given
        options = (of_batch, *rest, ctx.has_residual)
        found = norm_gradients(grad, ctx.saved_tensors, options, ctx.needs_input_grad[:4])
        return (*found, *nothing)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, residual, weight, bias, mean, invstd = ctx.saved_tensors
        of_batch, _, eps, activation, slope = ctx.given
        if of_batch:
            mean, _, invstd = formulas.statistics(x, eps)
        inputs = Inputs(x, residual, weight, bias, mean, invstd, activation, slope)
        return formulas.tangent(inputs, tangents[:4], of_batch), None, None


def norm_gradients(
    grad: Tensor, saved: Sequence[Any], options: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients of x, residual, weight and bias that are needed, and None for others.

    ``saved`` are x, what the activation's gradient needs beside it, weight, bias, mean and invstd;
    ``options`` are whether mean and invstd are those of the batch, eps, the activation, its slope,
    and whether there is a residual.
    """
    x, beside, weight, bias, mean, invstd = saved
    of_batch, eps, activation, slope, has_residual = options
    if is_differentiated(grad, x, beside, weight, bias):
        if of_batch:
            mean, _variance, invstd = formulas.statistics(x, eps)
        inputs = Inputs(x, None, weight, bias, mean, invstd, activation, slope)
        found: Any = formulas.gradients(inputs, grad, beside, of_batch)
    else:
        needs_x, needs_residual, needs_weight, needs_bias = needed
        found = list(backward(
            grad, x, beside, weight, bias, mean, invstd, of_batch, has_residual,
            activation, slope, needs_x, needs_weight or needs_bias, needs_residual,
        ))  # fmt: skip
        if activation == "identity":
            found[1] = grad
    return [one if needs else None for one, needs in zip(found, needed, strict=True)]


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether what is computed from these tensors in a backward pass is differentiated again."""
    # Outer levels of functorch's transforms may record what this one does not.
    transformed = torch._C._are_functorch_transforms_active()
    return transformed or (torch.is_grad_enabled() and recorded(*tensors))


def _below_autograd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the operator's next kernel below autograd."""
    if torch._C._are_functorch_transforms_active():
        # A Function's forward runs with recording off, but the outer levels have to record.
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.enable_grad(),
            _set_fwd_grad_enabled(True),
        ):
            return forward(*args)
    with torch._C._AutoDispatchBelowAutograd():
        results = forward(*args)
    given = Arguments(*args)
    if given.training:
        for one in (given.running_mean, given.running_var):
            if one is not None and not one.is_inference():  # those of inference mode count none
                torch.autograd.graph.increment_version(one)
    return results


def _autograd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's autograd kernel."""
    native.load_if_built()
    function: Any = FastconvBatchNorm
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return function.apply(*args)
    if recorded(*args[:4]):
        return function.apply(*args)
    return _below_autograd(*args)


# --- Autocast and vmap ----------------------------------------------------------------------------


def _register_autocast(dispatch_key: str) -> None:
    """As in PyTorch, the input's type stays, but a residual is cast to it."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def cast(x: Tensor, residual: Tensor | None, *rest: Any) -> Any:
        if residual is not None and residual.is_floating_point():
            residual = residual.to(x.dtype)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return forward(x, residual, *rest)

    library.impl("batch_norm_forward", cast, dispatch_key)


def _channels_of(tensor: Tensor | None, mapped: int | None, size: int, axis: int) -> Any:
    """Merges the mapped dimension into that of the channels; one that has none is expanded."""
    if tensor is None:
        return None
    whole = tensor.expand(size, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)
    return whole.movedim(0, axis).flatten(axis, axis + 1)


def _split(tensor: Tensor, size: int, axis: int) -> Tensor:
    """Undoes :func:`_channels_of`; the mapped dimension comes first in the result."""
    return tensor.unflatten(axis, (size, -1)).movedim(axis, 0)


def _vmap_forward(info: Any, in_dims: Any, *args: Any) -> Any:
    given, size = Arguments(*args), info.batch_size
    running = [given.running_mean, given.running_var]
    if given.training and running[0] is not None and None in in_dims[4:6]:
        raise RuntimeError(
            "Batch norm got a batched tensor as input while the running_mean or running_var, which "
            "will be updated in place, were not batched."
        )
    merged = [
        _channels_of(one, dim, size, 1 if number < 2 else 0)
        for number, (one, dim) in enumerate(zip(args[:6], in_dims[:6], strict=True))
    ]
    merged[4:] = [None if one is None else one.clone() for one in merged[4:]]
    y, mean, invstd = forward(*merged, *args[6:])
    for one, new, dim in zip(running, merged[4:], in_dims[4:6], strict=True):
        if given.training and one is not None:
            one.movedim(dim, 0).copy_(_split(new, size, 0))
    return (_split(y, size, 1), _split(mean, size, 0), _split(invstd, size, 0)), (0, 0, 0)


def _vmap_backward(info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    merged = [
        _channels_of(one, dim, size, 1 if number < 3 else 0)
        for number, (one, dim) in enumerate(zip(args[:7], in_dims[:7], strict=True))
    ]
    results = backward(*merged, *args[7:])
    axes = (1, 1, 0, 0)
    found = [
        _split(one, size, axis) if one.numel() else one.expand(size, *one.shape)
        for one, axis in zip(results, axes, strict=True)
    ]
    return tuple(found), (0,) * 4


def register() -> None:
    """Registers the operators' kernels, meta functions and derivatives with PyTorch."""
    for name, fake, on_cpu, on_gpu in (
        ("batch_norm_forward", partial(_new_forward, _check), _forward_cpu, _forward_cuda),
        (
            "batch_norm_backward",
            partial(_new_backward, _check_gradients),
            _backward_cpu,
            _backward_cuda,
        ),
    ):
        torch.library.register_fake(f"fastconv::{name}", fake, lib=library)
        library.impl(name, loading(on_cpu), "CPU")
        library.impl(name, loading(on_gpu), "CUDA")
    library.impl("batch_norm_forward", _autograd, "Autograd")
    _register_autocast("AutocastCPU")
    _register_autocast("AutocastCUDA")
    torch.library.register_vmap("fastconv::batch_norm_forward", _vmap_forward, lib=library)
    torch.library.register_vmap("fastconv::batch_norm_backward", _vmap_backward, lib=library)
