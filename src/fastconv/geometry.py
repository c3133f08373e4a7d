"""The forms in which users write strides, paddings, dilations and activations.

Functions here turn them into numbers, for a convolution of one to three axes. ``function`` is the
user's function, ``"conv2d()"`` for example, which errors of type name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from fastconv.ops.schema import check_dense, unknown_activation
from fastconv.problem import ActivationName

IntOrPair = int | Sequence[int]

LayerPadding = (
    int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]] | Literal["valid", "same"]
)
"""The type of ``padding`` for ``fastconv.Conv2d``.

One number, ``(vertical, horizontal)``, ``((top, bottom), (left, right))``, ``"valid"`` (none) or
``"same"`` (an output as large as the input).
"""

PaddingLike = LayerPadding | str | Sequence[int] | Sequence[Sequence[int]]
"""The type of ``padding`` for ``fastconv.conv1d``, ``fastconv.conv2d`` and ``fastconv.conv3d``.

That of ``fastconv.Conv2d``, also in lists, or a layer's attribute ``padding``, whose type in
PyTorch is ``str | tuple[int, ...]``. Lists have as many elements as there are axes.
"""

# The type of ``padding`` for transposed convolutions: numbers or pairs of them, not names.
SidesLike = int | tuple[int, ...] | list[int] | Sequence[Sequence[int]]

Activation = ActivationName | tuple[Literal["leaky_relu"], float]
"""The type of ``activation``: a name, or ``("leaky_relu", slope)``.

The names are ``"identity"``, ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``,
``"gelu_tanh"``, ``"hardswish"``, ``"sigmoid"`` and ``"tanh"``: functions of
``torch.nn.functional``, where ``"gelu_tanh"`` is the approximation of GELU by tanh.
"""

_LEAKY_SLOPE = 0.01  # the default of torch.nn.functional.leaky_relu


def epilogue_arguments(activation: Activation | None, residual: Tensor | None) -> dict[str, Any]:
    """Returns the arguments of an epilogue by name, none of them if there is no epilogue."""
    if activation is None and residual is None:
        return {}
    return {"activation": activation, "residual": residual}


def activation_of(value: Activation | None) -> tuple[str, float]:
    """Returns the activation's name and slope; the operator checks the name."""
    if value is None:
        return "identity", 0.0
    if isinstance(value, str):
        return value, _LEAKY_SLOPE if value == "leaky_relu" else 0.0
    if isinstance(value, tuple) and len(value) == 2:
        name, slope = value
        if isinstance(name, str) and isinstance(slope, (int, float)):
            return name, float(slope)
    raise unknown_activation(value)


def check_tensors(
    function: str, input: Any, weight: Any, bias: Any = None, residual: Any = None
) -> None:
    """Raises if an argument is no tensor; ``bias`` and ``residual`` may be None."""
    if not isinstance(input, Tensor):
        raise _no_tensor(function, "input", input)
    if not isinstance(weight, Tensor):
        raise _no_tensor(function, "weight", weight)
    if bias is not None and not isinstance(bias, Tensor):
        raise _no_tensor(function, "bias", bias)
    if residual is not None and not isinstance(residual, Tensor):
        raise _no_tensor(function, "residual", residual)


def _no_tensor(function: str, name: str, value: Any) -> TypeError:
    return TypeError(f"{function}: {name} must be a Tensor, not {type(value).__name__}")


def check_residual(input: Tensor, residual: Tensor) -> None:
    """Raises if a residual has not as many dimensions as the input."""
    if residual.dim() != input.dim():
        raise RuntimeError(
            f"Expected {input.dim()}D residual for an input of size {list(input.shape)}, "
            f"but got residual of size: {list(residual.shape)}"
        )


def integer(function: str, name: str, value: Any) -> int:
    """Returns ``value`` as an int, or as it is if symbolic; refuses bools and other types."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{function}: {name} must be made of ints, but got {name}={value!r}")


@overload
def numbers(function: str, name: str, value: Any, axes: Literal[1]) -> tuple[int]: ...
@overload
def numbers(function: str, name: str, value: Any, axes: Literal[2]) -> tuple[int, int]: ...
@overload
def numbers(function: str, name: str, value: Any, axes: int) -> tuple[int, ...]: ...


def numbers(function: str, name: str, value: Any, axes: int) -> tuple[int, ...]:
    """Returns one number for each axis of a value that may be a single number."""
    if type(value) is int:  # the most frequent form, decided first to save host time
        return (value,) * axes
    if not isinstance(value, Sequence) or isinstance(value, str):
        return (integer(function, name, value),) * axes
    if len(value) == 1:
        return (integer(function, name, value[0]),) * axes
    if len(value) != axes:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of {axes} values to match the "
            f"convolution dimensions, but got {name}={list(value)}"
        )
    return tuple([integer(function, name, one) for one in value])


def sides(
    function: str,
    padding: Any,
    weight: Tensor,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[int, ...]:
    """Returns any form of ``padding`` as numbers of zeros: before and after, for each axis."""
    axes = len(stride)
    if type(padding) is int:
        return (padding,) * (2 * axes)
    if isinstance(padding, str):
        return _named_padding(padding, weight, stride, dilation)
    return sides_without_names(function, padding, axes)


def sides_without_names(function: str, padding: Any, axes: int) -> tuple[int, ...]:
    """Returns ``padding``, which is none of PyTorch's words for it, as :func:`sides` does."""
    if is_by_side(padding, axes):
        return by_side(function, padding)
    both = numbers(function, "padding", padding, axes)
    return tuple([side for one in both for side in (one, one)])


def is_by_side(padding: Any, axes: int) -> bool:
    """Whether ``padding`` has a pair for each axis: ``((top, bottom), (left, right))`` for two."""
    return (
        isinstance(padding, Sequence)
        and len(padding) == axes
        and all(isinstance(side, Sequence) and len(side) == 2 for side in padding)
    )


def by_side(function: str, padding: Any) -> tuple[int, ...]:
    """Returns pairs of numbers, one pair for each axis, in a row."""
    pairs = cast("Sequence[Sequence[int]]", padding)
    return tuple([side for pair in pairs for side in numbers(function, "padding", pair, 2)])


def _named_padding(
    padding: str, weight: Tensor, stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    axes = len(stride)
    if padding == "valid":
        return (0, 0) * axes
    if padding != "same":
        raise RuntimeError(f"Invalid padding string: {padding!r}; it should be 'same' or 'valid'")
    if any(step != 1 for step in stride):
        raise RuntimeError(
            f"padding='same' is not supported for strided convolutions, but got stride={stride}"
        )
    # A weight of another rank gets a better error message later on.
    kernel_size = (*_kernel_size(weight), *(1 for _ in stride))
    found: list[int] = []
    for step, size in zip(dilation, kernel_size, strict=False):
        whole = step * (size - 1)
        found += (whole // 2, whole - whole // 2)
    return tuple(found)


def _kernel_size(weight: Tensor) -> tuple[int, ...]:
    """Returns the sizes of the weight's taps, as ints.

    In a trace (``torch.jit.trace``) sizes are tensors, which only PyTorch's own operators accept as
    arguments. So the trace records the numbers themselves, as it does for the stride. A parameter's
    sizes do not change; for any other tensor PyTorch warns.
    """
    check_dense("weight", weight)
    if not torch.jit.is_tracing():  # type: ignore[attr-defined]
        return weight.shape[2:]
    if not isinstance(weight, Parameter):
        return tuple(int(size) for size in weight.shape[2:])
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return weight.shape[2:]
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def only_row(images: Tensor) -> Tensor:
    """Returns images of one row as sequences: the tensor without its dimension of rows.

    In PyTorch, the output of a 1-D convolution is no view. Autograd does not let users write to a
    view that was made while gradients were disabled, once they are enabled again. So it is not told
    of this one.
    """
    told = torch.is_grad_enabled() or torch.compiler.is_compiling()
    with nullcontext() if told else torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return images.squeeze(-2)
