"""The operators of causal depthwise convolutions, with their checks and derivatives.

``causal_forward`` returns the output and, if asked, the final states. Its derivative is
``causal_backward``, whose own derivatives are those of PyTorch's elementwise operations
(``backends/causal/taps.py``). ``causal_update`` writes to the states and has no derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastconv.backends.causal import launches, taps
from fastconv.backends.causal.taps import Inputs
from fastconv.ops.schema import TAGS, check_dense, library

MOST_TAPS = 64
"""The largest width: kernels have a channel's taps in registers."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states"

SCHEMAS = (
    f"causal_forward({_INPUTS}, bool silu, bool final_states) -> (Tensor, Tensor)",
    f"causal_backward(Tensor grad, Tensor? grad_final, {_INPUTS}, bool silu, bool parameters, "
    "bool states) -> (Tensor, Tensor, Tensor, Tensor)",
    "causal_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, "
    "Tensor? cache_seqlens, Tensor? conv_state_indices, bool silu) -> Tensor",
)
for _schema in SCHEMAS:
    library.define(_schema, tags=TAGS)

# causal_forward(..., final_states) -> output, final states
#   The second is an empty tensor unless it is asked for.
forward = torch.ops.fastconv.causal_forward.default
# causal_backward(grad, grad_final, ..., parameters, states) -> gradients of x, weight, bias, states
#   Those of weight and bias are empty unless `parameters`, that of the initial states unless
#   `states`.
backward = torch.ops.fastconv.causal_backward.default
# causal_update(...) -> output
#   x is (batch, dim, length); conv_state is written in place.
update = torch.ops.fastconv.causal_update.default


# --- Checks ---------------------------------------------------------------------------------------


def _check_inputs(inputs: Inputs) -> None:
    """Raises unless a causal convolution of these tensors is defined and supported."""
    x, weight, bias, seq_idx, states, _ = inputs
    _check_dtypes(x, weight)
    _check_shape("x", x, 3, "(batch, dim, length)")
    _check_weight(x, weight, bias)
    batch, dim, length = x.shape
    if seq_idx is not None:
        _check_integers("seq_idx", seq_idx, x, (batch, length))
        if states is not None:
            raise ValueError("initial_states should be None where seq_idx is given: got both")
    if states is not None:
        _check_like("initial_states", states, x, (batch, dim, weight.shape[1] - 1), "x")


def _check_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_shape("weight", weight, 2, "(dim, width)")
    dim, width = weight.shape
    if dim != x.shape[1]:
        raise ValueError(
            f"weight should have a row for each of the {x.shape[1]} channels of x, "
            f"but got weight of shape {tuple(weight.shape)}"
        )
    if not 1 <= width <= MOST_TAPS:
        raise ValueError(
            f"causal convolutions have a width from 1 to {MOST_TAPS}, but got {width}, "
            f"of weight of shape {tuple(weight.shape)}"
        )
    if bias is not None:
        _check_like("bias", bias, weight, (dim,), "weight")
    _check_device("weight", weight, x)


def _check_dtypes(x: Tensor, weight: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        check_dense(name, tensor)
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise NotImplementedError(
                f"causal convolutions take {names}, but {name} has {tensor.dtype}"
            )
    if (x.dtype == torch.float64) != (weight.dtype == torch.float64):
        raise ValueError(
            "x and weight may have different types, except that float64 goes with float64 alone, "
            f"but got x with {x.dtype} and weight with {weight.dtype}"
        )


def _check_shape(name: str, tensor: Tensor, rank: int, meaning: str) -> None:
    if tensor.dim() != rank:
        raise ValueError(
            f"{name} should have the shape {meaning}, but got one of shape {tuple(tensor.shape)}"
        )


def _check_like(
    name: str, tensor: Tensor, other: Tensor, shape: tuple[int, ...], other_name: str
) -> None:
    check_dense(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} should have shape {shape}, but got {tuple(tensor.shape)}")
    if tensor.dtype != other.dtype:
        raise ValueError(
            f"{name} should have the type of {other_name}, {other.dtype}, but got {tensor.dtype}"
        )
    _check_device(name, tensor, other)


def _check_integers(name: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    check_dense(name, tensor)
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} should have the type torch.int32, but got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} should have shape {shape}, but got {tuple(tensor.shape)}")
    _check_device(name, tensor, x)


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")


def _check_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    indices: Tensor | None,
) -> None:
    _check_dtypes(x, weight)
    _check_shape("x", x, 3, "(batch, dim) or (batch, dim, length)")
    _check_weight(x, weight, bias)
    _check_shape("conv_state", conv_state, 3, "(batch, dim, state_len)")
    batch, dim, _ = x.shape
    entries, _, states = conv_state.shape
    _check_like(
        "conv_state", conv_state, x, (batch if indices is None else entries, dim, states), "x"
    )
    if states < max(1, weight.shape[1] - 1):
        raise ValueError(
            f"conv_state should have at least width - 1 = {weight.shape[1] - 1} positions, and at "
            f"least one, but got shape {tuple(conv_state.shape)}"
        )
    for name, tensor in (("cache_seqlens", cache_seqlens), ("conv_state_indices", indices)):
        if tensor is not None:
            _check_integers(name, tensor, x, (batch,))


# --- Results --------------------------------------------------------------------------------------


def is_channels_last(x: Tensor) -> bool:
    """Whether x is the transposed view of a tensor (batch, length, dim), perhaps with gaps."""
    return bool(x.stride(1) == 1 and x.stride(2) > 1)


def new_like(x: Tensor) -> Tensor:
    """Returns a new tensor of x's shape, without gaps, in the layout of x."""
    batch, dim, length = x.shape
    if is_channels_last(x):
        return x.new_empty((batch, length, dim)).transpose(1, 2)
    return x.new_empty((batch, dim, length))


def _new_states(x: Tensor, weight: Tensor, wanted: bool) -> Tensor:
    batch, dim, _ = x.shape
    return x.new_empty((batch, dim, weight.shape[1] - 1) if wanted else (0,))


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    silu: bool,
    final_states: bool,
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(x, weight, bias, seq_idx, initial_states, silu)
    _check_inputs(inputs)
    if final_states and seq_idx is not None:
        raise ValueError("return_final_states should be False where seq_idx is given")
    return new_like(x), _new_states(x, weight, final_states)


def _backward_fake(
    grad: Tensor,
    grad_final: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    silu: bool,
    parameters: bool,
    states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_inputs(Inputs(x, weight, bias, seq_idx, initial_states, silu))
    _check_like("grad", grad, x, tuple(x.shape), "x")
    if grad_final is not None:
        shape = (x.shape[0], x.shape[1], weight.shape[1] - 1)
        _check_like("grad_final", grad_final, x, shape, "x")
    return (
        new_like(x),
        weight.new_empty(tuple(weight.shape) if parameters else (0,)),
        weight.new_empty((weight.shape[0],) if parameters else (0,)),
        _new_states(x, weight, states),
    )


def _update_fake(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    silu: bool,
) -> Tensor:
    _check_update(x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    return x.new_empty(tuple(x.shape))


# --- On a CPU -------------------------------------------------------------------------------------


def _forward_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    output, states = _forward_fake(*args)
    inputs = Inputs(*args[:6])
    if output.numel():
        output.copy_(taps.forward(inputs))
    if states.numel():
        states.copy_(taps.final_states(inputs.x, inputs.initial_states, inputs.width))
    return output, states


def _backward_cpu(grad: Tensor, grad_final: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    results = _backward_fake(grad, grad_final, *args)
    gradients = taps.backward(Inputs(*args[:6]), grad, grad_final)
    for result, gradient in zip(results, gradients, strict=True):
        if result.numel():
            result.copy_(gradient)
    return results


def _update_cpu(*args: Any) -> Tensor:
    output = _update_fake(*args)
    if output.numel():
        output.copy_(taps.update(*args))
    return output


# --- On a GPU -------------------------------------------------------------------------------------


def _forward_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    output, states = _forward_fake(*args)
    inputs = Inputs(*args[:6])
    if output.numel():
        launches.forward(inputs, output)
    if states.numel():
        states.copy_(taps.final_states(inputs.x, inputs.initial_states, inputs.width))
    return output, states


def _backward_cuda(grad: Tensor, grad_final: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    if grad.numel() == 0:
        return _backward_cpu(grad, grad_final, *args)
    results = _backward_fake(grad, grad_final, *args)
    launches.backward(Inputs(*args[:6]), grad, grad_final, taps.Gradients(*results))
    return results


def _update_cuda(x: Tensor, *args: Any) -> Tensor:
    output = _update_fake(x, *args)
    if output.numel():
        launches.update(output, x, *args)
    return output


# --- Derivatives ----------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.silu, ctx.final_states = inputs
    ctx.save_for_backward(*tensors)


def _derivative(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Any, ...]:
    x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
    inputs = Inputs(x, weight, bias, seq_idx, initial_states, ctx.silu)
    final = grad_final if ctx.final_states else None
    needs_x, needs_weight, needs_bias, _, needs_states, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():  # create_graph: the gradients are differentiated again
        found = tuple(taps.backward(inputs, grad, final))
    else:
        found = backward(grad, final, *inputs, needs_weight or needs_bias, needs_states)
    needed = (needs_x, needs_weight, needs_bias, needs_states)
    grad_x, grad_weight, grad_bias, grad_states = (
        gradient if is_needed else None for gradient, is_needed in zip(found, needed, strict=True)
    )
    return grad_x, grad_weight, grad_bias, None, grad_states, None, None


class CausalConv1dUpdate(torch.autograd.Function):
    """Marks the output of an update, so that a backward pass through it raises an error."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor | None) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "causal_conv1d_update has no gradient: call it under torch.no_grad(), or train with "
            "causal_conv1d_fn"
        )


def _update_autograd(x: Tensor, conv_state: Tensor, *args: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        output: Tensor = update(x, conv_state, *args)
    if not conv_state.is_inference():  # tensors of inference mode count no versions
        torch.autograd.graph.increment_version(conv_state)
    sources = (x, conv_state, *args[:2])
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in sources):
        output = CausalConv1dUpdate.apply(output, *sources)
    return output


def register() -> None:
    """Registers the operators' kernels, meta functions and derivatives with PyTorch."""
    for name, fake, on_cpu, on_gpu in (
        ("causal_forward", _forward_fake, _forward_cpu, _forward_cuda),
        ("causal_backward", _backward_fake, _backward_cpu, _backward_cuda),
        ("causal_update", _update_fake, _update_cpu, _update_cuda),
    ):
        torch.library.register_fake(f"fastconv::{name}", fake, lib=library)
        library.impl(name, on_cpu, "CPU")
        library.impl(name, on_gpu, "CUDA")
    torch.library.register_autograd(
        "fastconv::causal_forward", _derivative, setup_context=_save, lib=library
    )
    library.impl("causal_update", _update_autograd, "Autograd")
