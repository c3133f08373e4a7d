"""``fastconv.conv2d``: turns the user's arguments into those of the operators."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from fastconv import _precision, native
from fastconv._precision import Precision
from fastconv.ops import autograd
from fastconv.ops.schema import check_dense, unknown_activation
from fastconv.problem import ActivationName, Padding

IntOrPair = int | Sequence[int]

LayerPadding = (
    int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]] | Literal["valid", "same"]
)
"""The type of ``padding`` for ``fastconv.Conv2d``.

One number, ``(vertical, horizontal)``, ``((top, bottom), (left, right))``, ``"valid"`` (none) or
``"same"`` (an output as large as the input).
"""

PaddingLike = LayerPadding | str | Sequence[int] | Sequence[Sequence[int]]
"""The type of ``padding`` for ``fastconv.conv2d``.

That of ``fastconv.Conv2d``, also in lists, or a layer's attribute ``padding``, whose type in
PyTorch is ``str | tuple[int, ...]``.
"""

Activation = ActivationName | tuple[Literal["leaky_relu"], float]
"""The type of ``activation``: a name, or ``("leaky_relu", slope)``.

The names are ``"identity"``, ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``,
``"gelu_tanh"``, ``"hardswish"``, ``"sigmoid"`` and ``"tanh"``: functions of
``torch.nn.functional``, where ``"gelu_tanh"`` is the approximation of GELU by tanh.
"""

_LEAKY_SLOPE = 0.01  # the default of torch.nn.functional.leaky_relu


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrPair = 1,
    padding: PaddingLike = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    *,
    precision: Precision | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Applies a 2-D convolution, as ``torch.nn.functional.conv2d`` does.

    With ``activation`` or ``residual``, it computes activation(convolution + bias + residual) in
    one kernel, which rounds to the tensors' type once. If autograd records the call, convolution,
    addition and activation are three steps, and each of them rounds.

    Args:
        input: ``(batch, in_channels, height, width)``, or without ``batch``.
        weight: ``(out_channels, in_channels / groups, kernel height, kernel width)``.
        bias: ``(out_channels)``, or None.
        stride: one number, or ``(vertical, horizontal)``.
        padding: zeros around the input: one number, ``(vertical, horizontal)``, ``'valid'`` (none),
            ``'same'`` (output as large as the input; stride 1 only), or, which PyTorch does not
            take, one number per side: ``((top, bottom), (left, right))``. The input is never copied
            to pad it.
        dilation: one number, or ``(vertical, horizontal)``.
        groups: number of groups the channels are split into.
        precision: ``"ieee"`` or ``"tf32"`` for float32 on a GPU; None takes the choice of
            ``fastconv.precision`` and, outside of it, PyTorch's setting.
        activation: ``"relu"``, ``"relu6"``, ``"leaky_relu"`` (with slope 0.01;
            ``("leaky_relu", slope)`` for another one), ``"silu"``, ``"gelu"``, ``"gelu_tanh"``
            (gelu's approximation by tanh), ``"hardswish"``, ``"sigmoid"``, ``"tanh"``;
            ``"identity"`` or None for none. Integer tensors take only relu and relu6, complex ones
            take none.
        residual: a tensor that is added before the activation. It has the result's size and the
            input's type and device.

    Returns:
        ``(batch, out_channels, out_height, out_width)``, or without ``batch``, in the memory format
        PyTorch would choose. With all four sides of padding, ``out_height`` is
        ``(height + top + bottom - dilation * (kernel_height - 1) - 1) // stride + 1``, and
        ``out_width`` likewise.

    Raises:
        TypeError: an argument has a type that PyTorch would not take either.
        RuntimeError: sizes, types or devices do not fit together, as in PyTorch.
        ValueError: ``precision`` or ``activation`` is none of those above.
        fastconv.GpuUnavailable: the tensors are on a GPU, and this machine lacks what the kernels
            need beside it.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> images, weight = torch.randn(8, 3, 32, 32), torch.randn(16, 3, 5, 9)
        >>> fastconv.conv2d(images, weight, padding=(2, 4), stride=2).shape
        torch.Size([8, 16, 16, 16])
        >>> fastconv.conv2d(images, weight, padding=((4, 0), (8, 0))).shape  # above and to the left
        torch.Size([8, 16, 32, 32])
        >>> fused = fastconv.conv2d(images, weight, padding="same", activation="relu")
        >>> bool((fused >= 0).all())
        True
    """
    if not torch.compiler.is_compiling() and (host := native.conv2d) is not None:
        mode = _precision.override_untraced() if precision is None else precision
        output = host(
            input, weight, bias, stride, padding, dilation, groups, mode, activation, residual
        )
        if output is not NotImplemented:
            return output
    tensors = (input, weight) if bias is None else (input, weight, bias)
    epilogue: dict[str, Any] = {}
    if activation is not None or residual is not None:
        epilogue = {"activation": activation, "residual": residual}
        tensors = tensors if residual is None else (*tensors, residual)
    if has_torch_function(tensors):
        return handle_torch_function(
            conv2d, tensors, input, weight, bias, stride, padding, dilation, groups,
            precision=precision, **epilogue,
        )  # fmt: skip
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            names = ("input", "weight", *(["bias"] if bias is not None else []), "residual")
            raise TypeError(f"conv2d(): {names[i]} must be a Tensor, not {type(tensor).__name__}")
    if input.dim() not in (3, 4):
        raise RuntimeError(
            "Expected 3D (unbatched) or 4D (batched) input to conv2d, "
            f"but got input of size: {list(input.shape)}"
        )
    stride, dilation = _pair("stride", stride), _pair("dilation", dilation)
    sides = _sides(padding, weight, stride, dilation)
    groups = _int("groups", groups)
    mode = _precision.override() if precision is None else _precision.checked(precision)
    if input.dim() == 3:
        check_dense("input", input)
        if residual is not None:
            epilogue["residual"] = _batch_of_one(residual)
        output = conv2d(
            input.unsqueeze(0), weight, bias, stride, (sides[:2], sides[2:]), dilation, groups,
            precision=mode, **epilogue,
        )  # fmt: skip
        return output.squeeze(0)
    if not epilogue:
        return autograd.forward_here(input, weight, bias, (stride, sides, dilation, groups, mode))
    return autograd.fused_here(
        _convolution, input, weight, bias, residual, (stride, sides, dilation, groups, mode),
        *activation_of(activation),
    )  # fmt: skip


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    sides: Padding,
    dilation: tuple[int, int],
    groups: int,
    mode: Precision | None,
) -> Tensor:
    """Computes the operator ``forward``, by the native host path if it serves calls."""
    padding = (sides[:2], sides[2:])
    return conv2d(input, weight, bias, stride, padding, dilation, groups, precision=mode)


def _batch_of_one(residual: Tensor) -> Tensor:
    check_dense("residual", residual)
    if residual.dim() != 3:
        raise RuntimeError(
            "Expected 3D (unbatched) residual for an unbatched input, "
            f"but got residual of size: {list(residual.shape)}"
        )
    return residual.unsqueeze(0)


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


def _int(name: str, value: int) -> int:
    """Returns ``value`` as an int, or as it is if symbolic; refuses bools and other types."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"conv2d(): {name} must be made of ints, but got {name}={value!r}")


def _pair(name: str, value: IntOrPair) -> tuple[int, int]:
    if type(value) is int:  # the most frequent form, decided first to save host time
        return value, value
    if not isinstance(value, Sequence) or isinstance(value, str):
        both = _int(name, value)
        return both, both
    if len(value) == 1:
        both = _int(name, value[0])
        return both, both
    if len(value) != 2:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 2 values to match the "
            f"convolution dimensions, but got {name}={list(value)}"
        )
    return _int(name, value[0]), _int(name, value[1])


def _sides(
    padding: PaddingLike, weight: Tensor, stride: tuple[int, int], dilation: tuple[int, int]
) -> Padding:
    """Returns any form of ``padding`` as the number of zeros on each of the four sides."""
    if type(padding) is int:
        return Padding(padding, padding, padding, padding)
    if isinstance(padding, str):
        return _named_padding(padding, weight, stride, dilation)
    if is_four_sided(padding):
        return four_sides(padding)
    vertical, horizontal = _pair("padding", padding)  # type: ignore[arg-type]
    return Padding(vertical, vertical, horizontal, horizontal)


def is_four_sided(padding: PaddingLike) -> bool:
    """Whether ``padding`` has the form ``((top, bottom), (left, right))``."""
    return (
        isinstance(padding, Sequence)
        and len(padding) == 2
        and all(isinstance(side, Sequence) and len(side) == 2 for side in padding)
    )


def four_sides(padding: PaddingLike) -> Padding:
    """Returns ``((top, bottom), (left, right))`` as the number of zeros on each side."""
    vertical, horizontal = cast("Sequence[Sequence[int]]", padding)
    return Padding(*_pair("padding", vertical), *_pair("padding", horizontal))


def _named_padding(
    padding: str, weight: Tensor, stride: tuple[int, int], dilation: tuple[int, int]
) -> Padding:
    if padding == "valid":
        return Padding(0, 0, 0, 0)
    if padding != "same":
        raise RuntimeError(f"Invalid padding string: {padding!r}; it should be 'same' or 'valid'")
    if stride != (1, 1):
        raise RuntimeError(
            f"padding='same' is not supported for strided convolutions, but got stride={stride}"
        )
    # A weight of another rank gets a better error message later on.
    kernel_size = (*_kernel_size(weight), 1, 1)
    vertical, horizontal = (
        step * (size - 1) for step, size in zip(dilation, kernel_size, strict=False)
    )
    top, left = vertical // 2, horizontal // 2
    return Padding(top, vertical - top, left, horizontal - left)


def _kernel_size(weight: Tensor) -> tuple[int, ...]:
    """Returns the height and width of the weight, as ints.

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
