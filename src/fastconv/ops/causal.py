"""The operators of causal depthwise convolutions, with their checks and derivatives.

``causal_forward`` returns the output and, if asked, the final states. Its derivative is
``causal_backward``, whose own derivatives are those of PyTorch's elementwise operations
(``backends/causal/taps.py``). ``causal_update`` writes to the states and has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fastconv.backends.causal import launches, taps
from fastconv.backends.causal.taps import Inputs
from fastconv.ops.schema import TAGS, Form, library

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
# As in ops/schema.py, checks see the tensors' forms and no data, so that eager calls can cache
# them.


def _check_inputs(
    x: Form, weight: Form, bias: Form | None, seq_idx: Form | None, states: Form | None
) -> bool:
    """Raises unless a causal convolution is defined and supported; says if it is channels-last."""
    _check_dtypes(x, weight)
    _check_rank("x", x, 3, "(batch, dim, length)")
    _check_weight(x, weight, bias)
    batch, dim, length = x.shape
    if seq_idx is not None:
        _check_integers("seq_idx", seq_idx, x, (batch, length))
        if states is not None:
            raise ValueError("initial_states should be None where seq_idx is given: got both")
    if states is not None:
        _check_like("initial_states", states, x, (batch, dim, weight.shape[1] - 1), "x")
    return is_channels_last(x)


def is_channels_last(x: Form) -> bool:
    """Whether x is the transposed view of a tensor (batch, length, dim), perhaps with gaps."""
    return bool(x.stride[1] == 1 and x.stride[2] > 1)


def _check_gradients(
    grad: Form,
    grad_final: Form | None,
    x: Form,
    weight: Form,
    bias: Form | None,
    seq_idx: Form | None,
    states: Form | None,
) -> bool:
    """Raises unless the gradients fit a causal convolution; says if it is channels-last."""
    channels_last = _check_inputs(x, weight, bias, seq_idx, states)
    _check_like("grad", grad, x, tuple(x.shape), "x")
    if grad_final is not None:
        shape = (x.shape[0], x.shape[1], weight.shape[1] - 1)
        _check_like("grad_final", grad_final, x, shape, "x")
    return channels_last


def _check_update(
    x: Form,
    conv_state: Form,
    weight: Form,
    bias: Form | None,
    cache_seqlens: Form | None,
    indices: Form | None,
) -> bool:
    _check_dtypes(x, weight)
    _check_rank("x", x, 3, "(batch, dim) or (batch, dim, length)")
    _check_weight(x, weight, bias)
    _check_rank("conv_state", conv_state, 3, "(batch, dim, state_len)")
    batch, dim, _ = x.shape
    entries, _, states = conv_state.shape
    shape = (batch if indices is None else entries, dim, states)
    _check_like("conv_state", conv_state, x, shape, "x")
    if states < max(1, weight.shape[1] - 1):
        raise ValueError(
            f"conv_state should have at least width - 1 = {weight.shape[1] - 1} positions, and at "
            f"least one, but got shape {tuple(conv_state.shape)}"
        )
    for name, form in (("cache_seqlens", cache_seqlens), ("conv_state_indices", indices)):
        if form is not None:
            _check_integers(name, form, x, (batch,))
    return False


def _check_weight(x: Form, weight: Form, bias: Form | None) -> None:
    _check_rank("weight", weight, 2, "(dim, width)")
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


def _check_dtypes(x: Form, weight: Form) -> None:
    for name, form in (("x", x), ("weight", weight)):
        if form.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise NotImplementedError(
                f"causal convolutions take {names}, but {name} has {form.dtype}"
            )
    if (x.dtype == torch.float64) != (weight.dtype == torch.float64):
        raise ValueError(
            "x and weight may have different types, except that float64 goes with float64 alone, "
            f"but got x with {x.dtype} and weight with {weight.dtype}"
        )


def _check_rank(name: str, form: Form, rank: int, meaning: str) -> None:
    if len(form.shape) != rank:
        raise ValueError(
            f"{name} should have the shape {meaning}, but got one of shape {tuple(form.shape)}"
        )


def _check_like(
    name: str, form: Form, other: Form, shape: tuple[int, ...], other_name: str
) -> None:
    _check_shape(name, form, shape)
    if form.dtype != other.dtype:
        raise ValueError(
            f"{name} should have the type of {other_name}, {other.dtype}, but got {form.dtype}"
        )
    _check_device(name, form, other)


def _check_integers(name: str, form: Form, x: Form, shape: tuple[int, ...]) -> None:
    if form.dtype != torch.int32:
        raise ValueError(f"{name} should have the type torch.int32, but got {form.dtype}")
    _check_shape(name, form, shape)
    _check_device(name, form, x)


def _check_shape(name: str, form: Form, shape: tuple[int, ...]) -> None:
    if tuple(form.shape) != shape:
        raise ValueError(f"{name} should have shape {shape}, but got {tuple(form.shape)}")


def _check_device(name: str, form: Form, x: Form) -> None:
    if form.device != x.device:
        raise ValueError(f"{name} is on {form.device}, but x is on {x.device}")


# --- Results --------------------------------------------------------------------------------------

_NAMES = ("x", "weight", "bias", "seq_idx", "initial_states")
_GRADIENT_NAMES = ("grad", "grad_final", *_NAMES)
_UPDATE_NAMES = ("x", "conv_state", "weight", "bias", "cache_seqlens", "conv_state_indices")

Check = Callable[..., bool]


def _forms(names: Sequence[str], tensors: Sequence[Tensor | None]) -> list[Form | None]:
    pairs = zip(names, tensors, strict=True)
    return [None if tensor is None else Form.of(name, tensor) for name, tensor in pairs]


def new_like(x: Tensor, channels_last: bool) -> Tensor:
    """Returns a new tensor of x's shape, without gaps."""
    batch, dim, length = x.shape
    if channels_last:
        return x.new_empty((batch, length, dim)).transpose(1, 2)
    return x.new_empty((batch, dim, length))


def _new_states(x: Tensor, weight: Tensor, wanted: bool) -> Tensor:
    batch, dim, _ = x.shape
    return x.new_empty((batch, dim, weight.shape[1] - 1) if wanted else (0,))


def _new_forward(check: Check, *args: Any) -> tuple[Tensor, Tensor]:
    """Checks the arguments of ``causal_forward``, and allocates what it returns."""
    x, weight, _, seq_idx, _, _, final_states = args
    channels_last = check(*_forms(_NAMES, args[:5]))
    if final_states and seq_idx is not None:
        raise ValueError("return_final_states should be False where seq_idx is given")
    return new_like(x, channels_last), _new_states(x, weight, final_states)


def _new_gradients(check: Check, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checks the arguments of ``causal_backward``, and allocates what it returns."""
    _, _, x, weight, *_, parameters, states = args
    channels_last = check(*_forms(_GRADIENT_NAMES, args[:7]))
    return (
        new_like(x, channels_last),
        weight.new_empty(tuple(weight.shape) if parameters else (0,)),
        weight.new_empty((weight.shape[0],) if parameters else (0,)),
        _new_states(x, weight, states),
    )


def _new_update(check: Check, *args: Any) -> Tensor:
    """Checks the arguments of ``causal_update``, and allocates what it returns."""
    check(*_forms(_UPDATE_NAMES, args[:6]))
    return new_like(args[0], False)


# Eager calls cache checks; meta functions do not, because symbolic sizes have no hash.
_known_inputs: Check = lru_cache(4096)(_check_inputs)
_known_gradients: Check = lru_cache(4096)(_check_gradients)
_known_update: Check = lru_cache(4096)(_check_update)


# --- On a CPU -------------------------------------------------------------------------------------


def _forward_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    output, states = _new_forward(_known_inputs, *args)
    inputs = Inputs(*args[:6])
    if output.numel():
        output.copy_(taps.forward(inputs))
    _fill_final_states(states, inputs)
    return output, states


def _fill_final_states(states: Tensor, inputs: Inputs) -> None:
    if states.numel():
        states.copy_(taps.final_states(inputs.x, inputs.initial_states, inputs.width))


def _backward_cpu(grad: Tensor, grad_final: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    results = _new_gradients(_known_gradients, grad, grad_final, *args)
    gradients = taps.backward(Inputs(*args[:6]), grad, grad_final)
    for result, gradient in zip(results, gradients, strict=True):
        if result.numel():
            result.copy_(gradient)
    return results


def _update_cpu(*args: Any) -> Tensor:
    output = _new_update(_known_update, *args)
    if output.numel():
        output.copy_(taps.update(*args))
    return output


# --- On a GPU -------------------------------------------------------------------------------------


def _forward_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    output, states = _new_forward(_known_inputs, *args)
    inputs = Inputs(*args[:6])
    if output.numel():
        launches.forward(inputs, output)
    _fill_final_states(states, inputs)
    return output, states


def _backward_cuda(grad: Tensor, grad_final: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    if grad.numel() == 0:
        return _backward_cpu(grad, grad_final, *args)
    results = _new_gradients(_known_gradients, grad, grad_final, *args)
    launches.backward(Inputs(*args[:6]), grad, grad_final, taps.Gradients(*results))
    return results


def _update_cuda(*args: Any) -> Tensor:
    output = _new_update(_known_update, *args)
    if output.numel():
        launches.update(output, *args)
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
        ("causal_forward", partial(_new_forward, _check_inputs), _forward_cpu, _forward_cuda),
        (
            "causal_backward",
            partial(_new_gradients, _check_gradients),
            _backward_cpu,
            _backward_cuda,
        ),
        ("causal_update", partial(_new_update, _check_update), _update_cpu, _update_cuda),
    ):
        torch.library.register_fake(f"fastconv::{name}", fake, lib=library)
        library.impl(name, on_cpu, "CPU")
        library.impl(name, on_gpu, "CUDA")
    torch.library.register_autograd(
        "fastconv::causal_forward", _derivative, setup_context=_save, lib=library
    )
    library.impl("causal_update", _update_autograd, "Autograd")
