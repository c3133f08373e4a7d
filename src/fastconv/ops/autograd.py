"""Derivatives of the operators, in backward and forward mode, in terms of the operators.

``fused`` has no derivative of its own: where autograd records it, it is computed as ``forward``, an
addition and an activation, each of which has one. So is ``transposed`` with an epilogue.

The functions here run in every eager call that the native host path does not serve. They pass an
operator's arguments as plain tuples, in the order of its schema: to make a value of
``ops/arguments.py`` for each call would cost host time.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled

# An autograd.Function for use below functorch's own dispatch. An operator's autograd kernel runs
# once for each level of torch.func.grad, jvp and vmap, and must record for that level alone, as
# PyTorch's own operators do; torch.autograd.Function would start over with all the levels.
from torch.autograd.function import _SingleLevelFunction

from fastconv import native
from fastconv.backends.epilogue import applied, per_channel
from fastconv.ops import devices, gradients, hooks
from fastconv.ops.arguments import Geometry
from fastconv.ops.gradients import Gradients, sum_of_positions
from fastconv.ops.schema import (
    OPERATORS,
    Check,
    backward,
    check_dense,
    describe_fused,
    describe_transposed,
    forward,
    fused,
    fused_result,
    gradient_format,
    input_grad,
    library,
    transposed,
    transposed_result,
    weight_grad,
)
from fastconv.problem import check_words

# The dispatch key of torch.autograd.grad(is_grads_batched=True), whose vmap is not functorch's.
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")

# Functions that tell what the current backward pass computes. They are internal to PyTorch, and
# None in a version that lacks them.
_everything_is_wanted: Any = getattr(torch.autograd, "_is_checkpoint_valid", None)
_current_node: Any = getattr(torch._C, "_current_autograd_node", None)
_will_execute: Any = getattr(torch._C, "_will_engine_execute_node", None)

WORTH_ASKING_FLOPS = (10**7, 10**10)
"""The FLOPs of the smallest gradient for which :func:`_wanted` queries the engine: (CPU, GPU).

A query takes 0.1 ms, about as long as such a gradient.
"""


class SingleLevelFunction(_SingleLevelFunction):
    # Compiled autograd reads this attribute, which only torch.autograd.Function has.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


# PyTorch names the nodes of a user's graph after these classes, with "Backward" added.


class FastconvConv2d(SingleLevelFunction):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _below_autograd(forward, devices.forward_kernels, args, args[2])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        input, weight, _, *ctx.geometry = inputs
        ctx.output_shape = output.shape
        _save(ctx, input, weight)
        hooks.layer_recorded("forward", inputs, ctx.needs_input_grad[:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        input_, weight_, bias_, needs_bias, others = None, None, None, False, ctx.geometry
        if grad is not None:
            wait_at_exit(grad.device.index)
            input, weight = ctx.saved_tensors
            needs_input, needs_weight, needs_bias, *_ = _wanted(ctx, grad, weight)
            args = (grad, input.conj(), weight.conj(), *ctx.geometry, False, needs_bias)
            input_, weight_, bias_ = gradients_here(args, needs_input, needs_weight)
            if needs_bias and not needs_weight:
                bias_ = sum_of_positions(grad)
        return (input_, weight_, bias_ if needs_bias else None, *(None for _ in others))

    @staticmethod
    def jvp(ctx: Any, input_t: Any, weight_t: Any, bias_t: Any, *_: Any) -> Any:
        input, weight = ctx.saved_tensors
        tangent = None if input_t is None else forward(input_t, weight, None, *ctx.geometry)
        if weight_t is not None:
            tangent = _sum(tangent, forward(input, weight_t, None, *ctx.geometry))
        if bias_t is not None:
            tangent = _sum(tangent, _everywhere(bias_t, ctx.output_shape))
        return tangent


class FastconvInputGrad(SingleLevelFunction):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _below_autograd(input_grad, devices.input_grad_kernels, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        grad_output, weight, *ctx.arguments = inputs
        ctx.geometry = ctx.arguments[1:6]
        _save(ctx, grad_output, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        grad_output_, weight_, others = None, None, ctx.arguments
        if grad is not None:
            grad_output, weight = ctx.saved_tensors
            needs_grad_output, needs_weight, *_ = _wanted(ctx, grad_output, weight)
            if needs_grad_output:
                grad_output_ = forward(grad, weight.conj(), None, *ctx.geometry)
            if needs_weight:
                weight_, _ = weight_grad(
                    grad_output.conj(), grad, weight.shape[2:], *ctx.geometry, False
                )
        return (grad_output_, weight_, *(None for _ in others))

    @staticmethod
    def jvp(ctx: Any, grad_output_t: Any, weight_t: Any, *_: Any) -> Any:
        grad_output, weight = ctx.saved_tensors
        tangent = None
        if grad_output_t is not None:
            tangent = input_grad(grad_output_t, weight, *ctx.arguments)
        if weight_t is not None:
            tangent = _sum(tangent, input_grad(grad_output, weight_t, *ctx.arguments))
        return tangent


class FastconvWeightGrad(SingleLevelFunction):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _below_autograd(weight_grad, devices.weight_grad_kernels, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        grad_output, input, *ctx.arguments = inputs
        ctx.geometry, ctx.bias = ctx.arguments[1:6], ctx.arguments[6]
        _save(ctx, grad_output, input)
        if not ctx.bias:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, bias_grad: Tensor | None) -> Any:
        needs_grad_output, needs_input, *others = ctx.needs_input_grad
        grad_output_, input_ = None, None
        grad_output, input = ctx.saved_tensors
        if grad is not None:
            needs_grad_output, needs_input, *_ = _wanted(ctx, grad_output, grad)
            if needs_grad_output:
                bias = bias_grad if ctx.bias else None
                grad_output_ = forward(input.conj(), grad, bias, *ctx.geometry)
            if needs_input:
                input_ = input_grad(grad_output.conj(), grad, input.shape[2:], *ctx.geometry)
        elif ctx.bias and bias_grad is not None and needs_grad_output:
            grad_output_ = _everywhere(bias_grad, grad_output.shape)
        return (grad_output_, input_, *(None for _ in others))

    @staticmethod
    def jvp(ctx: Any, grad_output_t: Any, input_t: Any, *_: Any) -> Any:
        grad_output, input = ctx.saved_tensors
        tangent, bias_tangent = None, None
        if grad_output_t is not None:
            tangent, bias_tangent = weight_grad(grad_output_t, input, *ctx.arguments)
        if input_t is not None:
            without_bias = (*ctx.arguments[:6], False, *ctx.arguments[7:])
            tangent = _sum(tangent, weight_grad(grad_output, input_t, *without_bias)[0])
        if ctx.bias and bias_tangent is None:
            bias_tangent = grad_output.new_zeros(grad_output.shape[1])
        return tangent, bias_tangent if ctx.bias else None


class FastconvConvTranspose(SingleLevelFunction):
    """A transposed convolution without an epilogue: the arguments have none."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _below_autograd(transposed, devices.transposed_kernels, args, args[2])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        input, weight, _, _, *ctx.arguments = inputs
        ctx.geometry, ctx.output_shape = ctx.arguments[1:6], output.shape
        _save(ctx, input, weight)
        hooks.layer_recorded("transposed", inputs, ctx.needs_input_grad[:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        input_, weight_, bias_, others = None, None, None, ctx.arguments
        if grad is not None:
            wait_at_exit(grad.device.index)
            input, weight = ctx.saved_tensors
            needs_input, needs_weight, needs_bias, *_ = _wanted(ctx, input, weight)
            if needs_input or needs_weight:
                # In nearly all cases the output's gradient has this format already. If not, a
                # compiler should see the copy.
                above = grad.contiguous(memory_format=gradient_format(input, weight))
                args = (above, input.conj(), weight.conj(), *ctx.geometry, True, False)
                input_, weight_, _ = gradients_here(args, needs_input, needs_weight)
            if needs_bias:
                bias_ = sum_of_positions(grad)
        return (input_, weight_, bias_, None, *(None for _ in others))

    @staticmethod
    def jvp(ctx: Any, input_t: Any, weight_t: Any, bias_t: Any, *_: Any) -> Any:
        input, weight = ctx.saved_tensors
        tangent = None
        if input_t is not None:
            tangent = transposed(input_t, weight, None, None, *ctx.arguments)
        if weight_t is not None:
            tangent = _sum(tangent, transposed(input, weight_t, None, None, *ctx.arguments))
        if bias_t is not None:
            tangent = _sum(tangent, _everywhere(bias_t, ctx.output_shape))
        return tangent


def _wanted(ctx: Any, grad_output: Tensor, weight: Tensor) -> Any:
    """Returns ``ctx.needs_input_grad``, less the gradients that the engine is certain to drop.

    More may have been recorded than is wanted: ``torch.autograd.grad(output, input)`` and
    ``backward(inputs=[input])`` do not use the weight gradient. PyTorch's own nodes see that
    (``task_should_compute_output``); a Python function has to query the engine. A gradient is
    computed if in doubt, or if the query would take as long, for tensors of these sizes.
    """
    recorded = ctx.needs_input_grad
    if not _is_worth_asking(grad_output, weight) or _has_to_compute_all(ctx):
        return recorded
    edges = ctx.next_functions  # one for each tensor argument, all of which come first
    asked = [need and _is_used_by(node) for need, (node, _) in zip(recorded, edges, strict=False)]
    return (*asked, *recorded[len(edges) :])


def _is_worth_asking(grad_output: Tensor, weight: Tensor) -> bool:
    least = WORTH_ASKING_FLOPS[grad_output.is_cuda]
    return 2 * grad_output.numel() * weight.numel() >= least * weight.size(0)


def _has_to_compute_all(ctx: Any) -> bool:
    """Whether all of a node's gradients are wanted, or the engine cannot be queried."""
    if torch.compiler.is_compiling() or None in (
        _everything_is_wanted,
        _current_node,
        _will_execute,
    ):
        return True
    # The engine's answer holds for the nodes of the current pass, but a hook may call a node of
    # any other graph.
    return _everything_is_wanted() or _current_node() is not ctx


def _is_used_by(node: Any) -> bool:
    """Whether the current backward pass uses a gradient that is passed to this node."""
    try:
        return _will_execute(node)
    except RuntimeError:  # "a leaf node was passed ...": torch.autograd.grad returns its gradient
        return True


_waited_for: set[int] = set()  # the devices whose autograd threads the process waits for


def wait_at_exit(device: int | None) -> None:
    """Delays the end of the process until autograd's thread for the device has freed its tensors.

    PyTorch's thread frees the last tensors a moment after the caller has its gradients, and needs
    the interpreter for that. If the interpreter ends in this moment, Python (before 3.14) ends the
    thread within C++ functions that must not be left this way, and the process aborts: "terminate
    called without an active exception". PyTorch's own convolution has the same fault: on an
    overloaded machine, one in ten processes that end right after a gradient aborts.
    """
    if device is not None and device not in _waited_for:  # on a CPU, the caller's thread runs nodes
        _waited_for.add(device)
        atexit.register(_pass_through_autograd, device)


def _pass_through_autograd(device: int) -> None:
    with suppress(Exception):  # a GPU that has failed has raised its error before
        one = torch.ones((), device=device, requires_grad=True)
        torch.autograd.grad(one * 1, one)
    time.sleep(0.01)  # until the thread has freed the tensors of this gradient too


def _save(ctx: Any, first: Tensor, second: Tensor) -> None:
    ctx.save_for_backward(first, second)
    ctx.save_for_forward(first, second)
    ctx.set_materialize_grads(False)


def _sum(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


def _everywhere(bias: Tensor, shape: torch.Size) -> Tensor:
    """Returns a bias at all positions of an output of this shape."""
    return per_channel(bias, len(shape) - 2).expand(shape)


def _below_autograd(
    op: Callable[..., Any], kernels: devices.Kernels, args: Any, bias: Tensor | None = None
) -> Any:
    """Calls the operator's next kernel below autograd: the device's, or functorch's next level."""
    if not torch._C._are_functorch_transforms_active():
        kernel = devices.direct(kernels, args[0], args[1], bias)
        with torch._C._AutoDispatchBelowAutograd():
            return (op if kernel is None else kernel)(*args)
    # A Function's forward runs with recording off, but the outer levels have to record.
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), _set_fwd_grad_enabled(True):
        return op(*args)


kernels: dict[str, Callable[..., Any]] = {}
"""The operators' autograd kernels, by the operators' names."""


def register() -> None:
    kernels.update(
        forward=_kernel(FastconvConv2d),
        input_grad=_kernel(FastconvInputGrad),
        weight_grad=_kernel(FastconvWeightGrad),
        fused=_fused,
        transposed=_transposed,
        backward=_backward,
    )
    for name, kernel in kernels.items():
        library.impl(name, kernel, "Autograd")


def forward_here(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Computes the operator ``forward``, in eager mode without a call through the dispatcher.

    It calls the dispatcher if anything but autograd lies between the caller and the device.
    """
    if not _watched():
        kernel = devices.direct(devices.forward_kernels, input, weight, bias)
        if kernel is not None and not torch.is_autocast_enabled(input.device.type):
            if recorded(input, weight, bias):
                return FastconvConv2d.apply(input, weight, bias, *geometry)  # type: ignore[attr-defined]
            return kernel(input, weight, bias, *geometry)
    check_dense("input", input)
    check_dense("weight", weight)
    if bias is not None:
        check_dense("bias", bias)
    check_words(*geometry[:4])
    return forward(input, weight, bias, *geometry)


def fused_here(
    convolve: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: str,
    slope: float,
) -> Tensor:
    """Computes the operator ``fused``, in eager mode without a call through the dispatcher.

    ``convolve`` computes the operator ``forward``, where autograd has to record the call.
    """
    args = (input, weight, bias, residual, *geometry, activation, slope)
    if not _watched() and devices.is_plain(residual):
        kernel = devices.direct(devices.fused_kernels, input, weight, bias)
        if kernel is not None and not torch.is_autocast_enabled(input.device.type):
            if recorded(*args[:4]):
                return _composed(convolve, OPERATORS["fused"].known, *args)
            return kernel(*args)
    for name, tensor in zip(("input", "weight", "bias", "residual"), args[:4], strict=True):
        if tensor is not None:
            check_dense(name, tensor)
    check_words(*geometry[:4])
    return fused(*args)


def transposed_here(
    convolve: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    output_padding: tuple[int, ...],
    geometry: Geometry,
    activation: str,
    slope: float,
) -> Tensor:
    """Computes the operator ``transposed``, in eager mode without a call through the dispatcher.

    ``convolve`` computes the operator without an epilogue, where autograd has to record the call
    and there is one.
    """
    args = (input, weight, bias, residual, output_padding, *geometry, activation, slope)
    if not _watched() and devices.is_plain(residual):
        kernel = devices.direct(devices.transposed_kernels, input, weight, bias)
        if kernel is not None and not torch.is_autocast_enabled(input.device.type):
            if recorded(*args[:4]):
                return _recorded_transposed(convolve, OPERATORS["transposed"].known, *args)
            return kernel(*args)
    for name, tensor in zip(("input", "weight", "bias", "residual"), args[:4], strict=True):
        if tensor is not None:
            check_dense(name, tensor)
    check_words(*geometry[:4])
    return transposed(*args)


def _recorded_transposed(convolve: Callable[..., Tensor], check: Check, *args: Any) -> Tensor:
    """Computes ``transposed`` by functions that can be differentiated."""
    input, weight, bias, residual, *geometry, activation, _ = args
    if residual is None and activation == "identity":
        return FastconvConvTranspose.apply(*args)  # type: ignore[attr-defined]
    epilogue = describe_transposed(check, *args).epilogue
    return applied(convolve(input, weight, bias, *geometry), residual, epilogue)


def _bare_transposed(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Computes ``transposed`` without an epilogue, and records it."""
    args = (input, weight, bias, None, *geometry, "identity", 0.0)
    return FastconvConvTranspose.apply(*args)  # type: ignore[attr-defined]


def _transposed(*args: Any) -> Tensor:
    """The operator's autograd kernel."""
    native.load_if_built()
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return _recorded_transposed(_bare_transposed, transposed_result, *args)
    if recorded(*args[:4]):
        return _recorded_transposed(_bare_transposed, transposed_result, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return transposed(*args)


def _composed(convolve: Callable[..., Tensor], check: Check, *args: Any) -> Tensor:
    """Computes ``fused`` by operators that can be differentiated."""
    input, weight, bias, residual, *rest = args
    epilogue = describe_fused(check, *args).epilogue
    return applied(convolve(input, weight, bias, *rest[:5]), residual, epilogue)


def _fused(*args: Any) -> Tensor:
    """The operator's autograd kernel."""
    native.load_if_built()
    if torch._C._are_functorch_transforms_active() or recorded(*args[:4]):
        return _composed(forward, fused_result, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return fused(*args)


def _backward(*args: Any) -> Gradients:
    """The operator's autograd kernel."""
    native.load_if_built()
    if torch._C._are_functorch_transforms_active() or recorded(*args[:3]):
        return gradients.by_operators(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return backward(*args)


def _gradient_here(name: str, args: tuple[Any, ...]) -> Any:
    """Computes an operator of a gradient, in eager mode without a call through the dispatcher.

    Autocast has no rule for gradient operators, but ``is_grads_batched`` may map them.
    """
    kernels, tensors = devices.KERNELS[name], args[:2]
    kernel = None if _is_mapped_or_watched() else devices.direct(kernels, *tensors)
    if kernel is None:
        return OPERATORS[name].call(*args)
    return _FUNCTIONS[name].apply(*args) if recorded(*tensors) else kernel(*args)


def gradients_here(
    args: tuple[Any, ...], needs_input: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Computes the operator ``backward``, or only the part of it that is needed."""
    if needs_input and needs_weight:
        return _backward_here(args)
    of_input, of_weight = gradients.parts(*args)
    input = _gradient_here(*of_input) if needs_input else None
    weight, bias = _gradient_here(*of_weight) if needs_weight else (None, None)
    return input, weight, bias


def _backward_here(args: tuple[Any, ...]) -> Gradients:
    """Computes the operator ``backward``, in eager mode without a call through the dispatcher."""
    if torch.compiler.is_dynamo_compiling():
        # Compiled autograd traces a node for all of its gradients. Of two operators, it drops the
        # one whose result is not wanted.
        return gradients.by_operators(*args)
    tensors = args[:3]
    kernel = None if _is_mapped_or_watched() else devices.direct(devices.backward_kernels, *tensors)
    if kernel is None:
        return backward(*args)
    return gradients.by_parts(_gradient_here, args) if recorded(*tensors) else kernel(*args)


# The functions that record the operators of gradients.
_FUNCTIONS: dict[str, Any] = {
    "forward": FastconvConv2d,
    "input_grad": FastconvInputGrad,
    "weight_grad": FastconvWeightGrad,
}


def _is_mapped_or_watched() -> bool:
    return _watched() or torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)


def _watched() -> bool:
    """Whether a compiler, transform, tracer or profiler has to see the operators' calls."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    )


def recorded(*tensors: Any) -> bool:
    """Whether autograd, in either mode, has to record an operation on these tensors."""
    return forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
    )


def _kernel(function: Any) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        native.load_if_built()
        if torch._C._are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                return function.apply(*args)
        # Without anything to record, Function.apply would only cost time.
        return function.apply(*args) if recorded(*args[:3]) else function.forward(*args)

    return kernel
