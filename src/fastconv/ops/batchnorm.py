"""The operators of batch normalization with a residual and an activation.

``batch_norm_forward`` returns the output and the statistics that it has normalized with; in
training it updates running statistics in place. Its derivative is ``batch_norm_backward``. Where
that is to be differentiated again, it is computed by PyTorch's operations
(``backends/batchnorm/formulas.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from fastconv import native
from fastconv.backends import left_statistics
from fastconv.backends.batchnorm import formulas, launches
from fastconv.backends.batchnorm.formulas import Inputs
from fastconv.backends.batchnorm.launches import alignment_of
from fastconv.backends.cuda import Ready
from fastconv.kernels.batchnorm.plan import beside as needs_beside
from fastconv.ops.autograd import SingleLevelFunction, recorded, wait_at_exit
from fastconv.ops.batchnorm_schema import (
    Arguments,
    GradArguments,
    OutputArguments,
    backward,
    backward_need,
    check,
    check_gradients,
    contiguous,
    dense,
    dense_gradients,
    forward,
    forward_need,
    known,
    known_gradients,
    new_backward,
    new_forward,
    output_need,
)
from fastconv.ops.devices import loading
from fastconv.ops.schema import library

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


def fill_output_cpu(args: tuple[Any, ...], y: Tensor) -> None:
    """Fills the output of ``batch_norm_forward``, with the bits that it had at first."""
    y.copy_(formulas.output(OutputArguments(*args).inputs))


def fill_backward_cpu(args: tuple[Any, ...], results: Sequence[Tensor | None]) -> None:
    """Fills the results of ``batch_norm_backward`` that are not None."""
    given = GradArguments(*args)
    found = formulas.gradients(given.inputs, given.grad, given.beside, given.of_batch)
    for result, gradient in zip(results, found, strict=True):
        if result is not None:
            result.copy_(gradient)


def _forward_cpu(*args: Any) -> tuple[Tensor, ...]:
    results = new_forward(known, *args)
    fill_forward_cpu(dense(Arguments(*args), results[0]), results)
    return results


def _backward_cpu(*args: Any) -> tuple[Tensor, ...]:
    results = new_backward(known_gradients, *args)
    grads = _wanted(results)
    fill_backward_cpu(dense_gradients(GradArguments(*args), grads[0]), grads)
    return results


def _wanted(results: tuple[Tensor, ...]) -> list[Tensor | None]:
    return [one if one.numel() else None for one in results]


# --- On a GPU -------------------------------------------------------------------------------------


def ready_forward(given: Arguments, shares: int = 0) -> Ready:
    """Returns the launches of a call whose tensors lie as kernels take them.

    Those of x's size have its layout, and all others are contiguous. With ``shares``, that many of
    the statistics of x are given in place of the workspace (``Plan.shares``).
    """
    return launches.ready(forward_need(given, alignment_of(given.x, given.residual), shares))


def ready_output(given: OutputArguments) -> Ready:
    """Returns the launch of the output alone, for tensors as :func:`ready_forward` takes them."""
    return launches.ready(output_need(given, alignment_of(given.x)))


def ready_backward(given: GradArguments) -> Ready:
    """Returns the launches of a call as :func:`ready_forward` does; some gradient is written."""
    need = backward_need(given, alignment_of(given.x, given.grad, given.beside))
    assert need is not None
    return launches.ready(need)


def _forward_cuda(*args: Any) -> tuple[Tensor, ...]:
    if args[0].numel() == 0:
        return _forward_cpu(*args)
    y, mean, invstd = new_forward(known, *args)
    given = dense(Arguments(*args), y)
    left = left_statistics.take(given.x) if given.training else None
    with _dense_running(given.running_mean, given.running_var) as running:
        given = given._replace(running_mean=running[0], running_var=running[1])
        tensors = (*given[:7], None, mean, invstd, y)
        if left is None:
            ready_forward(given).run(*tensors)
        else:
            ready_forward(given, left.shares).run(*tensors, scratch=left.statistics)
    return y, mean, invstd


class _dense_running:
    """Gives running statistics as kernels write them: copies, which are copied back, of views."""

    def __init__(self, *statistics: Tensor | None) -> None:
        self.statistics = statistics

    def __enter__(self) -> list[Tensor | None]:
        self.dense = [contiguous(one) for one in self.statistics]
        return self.dense

    def __exit__(self, *_: Any) -> None:
        for one, copy in zip(self.statistics, self.dense, strict=True):
            if one is not None and copy is not None and copy is not one:
                one.copy_(copy)


def _backward_cuda(*args: Any) -> tuple[Tensor, ...]:
    if args[0].numel() == 0:
        return _backward_cpu(*args)
    results = new_backward(known_gradients, *args)
    grads = _wanted(results)
    if any(one is not None for one in grads):
        given = dense_gradients(GradArguments(*args), grads[0])
        ready_backward(given).run(*given[:7], *grads)
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


def norm_output(*args: Any) -> Tensor:
    """Returns the output of a normalization again, by PyTorch's operations."""
    return formulas.output(OutputArguments(*args).inputs)


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


KERNELS: dict[str, tuple[Callable[..., Any], ...]] = {
    "batch_norm_forward": (_forward_cpu, _forward_cuda, _autograd),
    "batch_norm_backward": (_backward_cpu, _backward_cuda),
}
"""The operators' kernels for CPU, CUDA and autograd."""


def register() -> None:
    """Registers the operators' kernels, meta functions and derivatives with PyTorch."""
    for name, fake in (
        ("batch_norm_forward", partial(new_forward, check)),
        ("batch_norm_backward", partial(new_backward, check_gradients)),
    ):
        torch.library.register_fake(f"fastconv::{name}", fake, lib=library)
        on_cpu, on_gpu, *_ = KERNELS[name]
        library.impl(name, loading(on_cpu), "CPU")
        library.impl(name, loading(on_gpu), "CUDA")
    library.impl("batch_norm_forward", _autograd, "Autograd")
    _register_autocast("AutocastCPU")
    _register_autocast("AutocastCUDA")
    torch.library.register_vmap("fastconv::batch_norm_forward", _vmap_forward, lib=library)
    torch.library.register_vmap("fastconv::batch_norm_backward", _vmap_backward, lib=library)
