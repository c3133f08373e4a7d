"""``fastconv.conv1d``, ``conv2d`` and ``conv3d``: the user's arguments, for the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastconv import _precision, native
from fastconv._precision import Precision
from fastconv.geometry import (
    Activation,
    IntOrPair,
    PaddingLike,
    activation_of,
    check_residual,
    check_tensors,
    epilogue_arguments,
    integer,
    numbers,
    only_row,
    sides,
)
from fastconv.ops import autograd
from fastconv.ops.arguments import Geometry
from fastconv.ops.schema import check_dense
from fastconv.problem import Padding, check_bias, check_shapes


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
            input, weight, bias, stride, padding, dilation, groups, mode, activation, residual, 2
        )  # fmt: skip
        if output is not NotImplemented:
            return output
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if residual is not None:
        tensors = (*tensors, residual)
    epilogue = epilogue_arguments(activation, residual)
    if has_torch_function(tensors):
        return handle_torch_function(
            conv2d, tensors, input, weight, bias, stride, padding, dilation, groups,
            precision=precision, **epilogue,
        )  # fmt: skip
    check_tensors("conv2d()", input, weight, bias, residual)
    if input.dim() not in (3, 4):
        raise RuntimeError(
            "Expected 3D (unbatched) or 4D (batched) input to conv2d, "
            f"but got input of size: {list(input.shape)}"
        )
    stride = numbers("conv2d()", "stride", stride, 2)
    dilation = numbers("conv2d()", "dilation", dilation, 2)
    around = Padding(*sides("conv2d()", padding, weight, stride, dilation))
    groups = integer("conv2d()", "groups", groups)
    mode = _precision.override() if precision is None else _precision.checked(precision)
    if input.dim() == 3:
        check_dense("input", input)
        if residual is not None:
            epilogue["residual"] = _batch_of_one(residual)
        output = conv2d(
            input.unsqueeze(0), weight, bias, stride, (around[:2], around[2:]), dilation, groups,
            precision=mode, **epilogue,
        )  # fmt: skip
        return output.squeeze(0)
    if not epilogue:
        return autograd.forward_here(input, weight, bias, (stride, around, dilation, groups, mode))
    return autograd.fused_here(
        _convolution, input, weight, bias, residual, (stride, around, dilation, groups, mode),
        *activation_of(activation),
    )  # fmt: skip


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    around: Padding,
    dilation: tuple[int, int],
    groups: int,
    mode: Precision | None,
) -> Tensor:
    """Computes the operator ``forward``, by the native host path if it serves calls."""
    padding = (around[:2], around[2:])
    return conv2d(input, weight, bias, stride, padding, dilation, groups, precision=mode)


def _batch_of_one(residual: Tensor) -> Tensor:
    check_dense("residual", residual)
    if residual.dim() != 3:
        raise RuntimeError(
            "Expected 3D (unbatched) residual for an unbatched input, "
            f"but got residual of size: {list(residual.shape)}"
        )
    return residual.unsqueeze(0)


def conv1d(
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
    """Applies a 1-D convolution, as ``torch.nn.functional.conv1d`` does.

    It is a 2-D convolution of images with one row: nothing is copied. With ``activation`` or
    ``residual``, it computes activation(convolution + bias + residual), as ``fastconv.conv2d``
    does.

    Args:
        input: ``(batch, in_channels, length)``, or without ``batch``. It is read as it lies in
            memory, also as the transposed view of ``(batch, length, channels)``.
        weight: ``(out_channels, in_channels / groups, kernel length)``.
        bias: ``(out_channels)``, or None.
        stride: one number, alone or in a tuple.
        padding: zeros before and after the input: one number, alone or in a tuple, ``'valid'``
            (none), ``'same'`` (output as long as the input; stride 1 only), or, which PyTorch does
            not take, one number per side: ``((before, after),)``. With ``((k - 1, 0),)`` the
            convolution is causal. The input is never copied to pad it.
        dilation: one number, alone or in a tuple.
        groups: number of groups the channels are split into.
        precision: ``"ieee"`` or ``"tf32"``, as for ``fastconv.conv2d``.
        activation: as for ``fastconv.conv2d``.
        residual: a tensor that is added before the activation. It has the result's size and the
            input's type and device.

    Returns:
        ``(batch, out_channels, out_length)``, or without ``batch``. If the input is contiguous, its
        strides are PyTorch's. If the input is a transposed view of ``(batch, length, channels)``,
        so is the output, where PyTorch copies the input and returns a contiguous output.

    Raises:
        TypeError: an argument has a type that PyTorch would not take either.
        RuntimeError: sizes, types or devices do not fit together, as in PyTorch.
        ValueError: ``precision`` or ``activation`` is none of those above.
        fastconv.GpuUnavailable: the tensors are on a GPU, and this machine lacks what the kernels
            need beside it.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> audio, weight = torch.randn(8, 16, 100), torch.randn(32, 16, 5)
        >>> fastconv.conv1d(audio, weight, padding=2, stride=2).shape
        torch.Size([8, 32, 50])
        >>> causal = fastconv.conv1d(audio, weight, padding=((4, 0),))
        >>> causal.shape
        torch.Size([8, 32, 100])
        >>> tokens = torch.randn(8, 100, 16)  # batch, length, channels
        >>> fastconv.conv1d(tokens.mT, weight, padding="same").mT.is_contiguous()
        True
    """
    if not torch.compiler.is_compiling() and (host := native.conv2d) is not None:
        mode = _precision.override_untraced() if precision is None else precision
        try:
            output = host(
                input, weight, bias, stride, padding, dilation, groups, mode, activation, residual,
                1,
            )  # fmt: skip
        except RuntimeError:
            raise_unfit(input, weight, bias, residual, stride, padding, dilation, groups)
            raise
        if output is not NotImplemented:
            return output
    tensors = tuple(one for one in (input, weight, bias, residual) if one is not None)
    if has_torch_function(tensors):
        return handle_torch_function(
            conv1d, tensors, input, weight, bias, stride, padding, dilation, groups,
            precision=precision, **epilogue_arguments(activation, residual),
        )  # fmt: skip
    check_tensors("conv1d()", input, weight, bias, residual)
    rank = input.dim()
    if rank not in (2, 3):
        raise RuntimeError(
            "Expected 2D (unbatched) or 3D (batched) input to conv1d, "
            f"but got input of size: {list(input.shape)}"
        )
    check_dense("input", input)
    check_dense("weight", weight)
    (step,), around, (reach,), groups = _along(weight, stride, padding, dilation, groups)
    if weight.dim() != 3 or (residual is not None and residual.dim() != rank):
        raise_unfit(input, weight, bias, residual, stride, padding, dilation, groups)
    try:
        output = conv2d(
            input.unsqueeze(-2), weight.unsqueeze(-2), bias,
            (1, step), ((0, 0), around), (1, reach), groups,
            precision=precision, activation=activation,
            residual=None if residual is None else residual.unsqueeze(-2),
        )  # fmt: skip
    except RuntimeError:
        raise_unfit(input, weight, bias, residual, stride, padding, dilation, groups)
        raise
    return only_row(output)


def conv3d(
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
    """Applies a 3-D convolution, as ``torch.nn.functional.conv3d`` does.

    With ``activation`` or ``residual``, it computes activation(convolution + bias + residual), as
    ``fastconv.conv2d`` does.

    Args:
        input: ``(batch, in_channels, depth, height, width)``, or without ``batch``.
        weight: ``(out_channels, in_channels / groups, kernel depth, kernel height, kernel width)``.
        bias: ``(out_channels)``, or None.
        stride: one number, or ``(depth, vertical, horizontal)``.
        padding: zeros around the input: one number, ``(depth, vertical, horizontal)``, ``'valid'``
            (none), ``'same'`` (output as large as the input; stride 1 only), or, which PyTorch does
            not take, one number per side: ``((front, back), (top, bottom), (left, right))``. With
            ``((k - 1, 0), ...)`` the convolution is causal in time. The input is never copied to
            pad it.
        dilation: one number, or ``(depth, vertical, horizontal)``.
        groups: number of groups the channels are split into.
        precision: ``"ieee"`` or ``"tf32"``, as for ``fastconv.conv2d``.
        activation: as for ``fastconv.conv2d``.
        residual: a tensor that is added before the activation. It has the result's size and the
            input's type and device.

    Returns:
        ``(batch, out_channels, out_depth, out_height, out_width)``, or without ``batch``, in the
        memory format PyTorch would choose: contiguous or ``torch.channels_last_3d``.

    Raises:
        TypeError: an argument has a type that PyTorch would not take either.
        RuntimeError: sizes, types or devices do not fit together, as in PyTorch.
        ValueError: ``precision`` or ``activation`` is none of those above.
        fastconv.GpuUnavailable: the tensors are on a GPU, and this machine lacks what the kernels
            need beside it.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> video, weight = torch.randn(2, 3, 8, 16, 16), torch.randn(16, 3, 3, 3, 3)
        >>> fastconv.conv3d(video, weight, padding=1, stride=(1, 2, 2)).shape
        torch.Size([2, 16, 8, 8, 8])
        >>> fastconv.conv3d(video, weight, padding=((2, 0), (1, 1), (1, 1))).shape  # causal in time
        torch.Size([2, 16, 8, 16, 16])
    """
    if not torch.compiler.is_compiling() and (host := native.conv2d) is not None:
        mode = _precision.override_untraced() if precision is None else precision
        output = host(
            input, weight, bias, stride, padding, dilation, groups, mode, activation, residual, 3
        )  # fmt: skip
        if output is not NotImplemented:
            return output
    tensors = tuple(one for one in (input, weight, bias, residual) if one is not None)
    if has_torch_function(tensors):
        return handle_torch_function(
            conv3d, tensors, input, weight, bias, stride, padding, dilation, groups,
            precision=precision, **epilogue_arguments(activation, residual),
        )  # fmt: skip
    check_tensors("conv3d()", input, weight, bias, residual)
    check_dense("input", input)
    if input.dim() not in (4, 5):
        raise RuntimeError(
            "Expected 4D (unbatched) or 5D (batched) input to conv3d, "
            f"but got input of size: {list(input.shape)}"
        )
    steps = numbers("conv3d()", "stride", stride, 3)
    reaches = numbers("conv3d()", "dilation", dilation, 3)
    groups = integer("conv3d()", "groups", groups)
    if weight.dim() != 5:  # the sides of 'same' follow from the weight's sizes
        check_shapes(input.shape, weight.shape, steps, (0,) * 6, reaches, groups, axes=3)
    around = sides("conv3d()", padding, weight, steps, reaches)
    mode = _precision.override() if precision is None else _precision.checked(precision)
    if residual is not None:
        check_dense("residual", residual)
        check_residual(input, residual)
    geometry = (steps, around, reaches, groups, mode)
    if input.dim() == 5:
        return _of_volumes(input, weight, bias, residual, geometry, activation)
    beside = None if residual is None else residual.unsqueeze(0)
    return _of_volumes(input.unsqueeze(0), weight, bias, beside, geometry, activation).squeeze(0)


def _of_volumes(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    activation: Activation | None,
) -> Tensor:
    """Computes a 3-D convolution of a batch."""
    if activation is None and residual is None:
        return autograd.forward_here(input, weight, bias, geometry)
    return autograd.fused_here(
        _convolution_of_volumes, input, weight, bias, residual, geometry, *activation_of(activation)
    )


def _convolution_of_volumes(
    input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
) -> Tensor:
    """Computes the operator ``forward``, by the native host path if it serves calls."""
    steps, around, reaches, groups, mode = geometry
    padding = list(zip(around[::2], around[1::2], strict=True))
    return conv3d(input, weight, bias, steps, padding, reaches, groups, precision=mode)


def _along(
    weight: Tensor, stride: IntOrPair, padding: PaddingLike, dilation: IntOrPair, groups: int
) -> tuple[tuple[int], tuple[int, ...], tuple[int], int]:
    """Returns the geometry of a 1-D convolution as numbers; the padding before and after."""
    step = numbers("conv1d()", "stride", stride, 1)
    reach = numbers("conv1d()", "dilation", dilation, 1)
    around = sides("conv1d()", padding, weight, step, reach)
    return step, around, reach, integer("conv1d()", "groups", groups)


def raise_unfit(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: IntOrPair,
    padding: PaddingLike,
    dilation: IntOrPair,
    groups: int,
) -> None:
    """Raises if the sizes of a 1-D convolution do not fit together, in terms of these sizes.

    The 2-D convolution that computes it would name the sizes of images.
    """
    shape = input.shape if input.dim() == 3 else (1, *input.shape)
    geometry = _along(weight, stride, padding, dilation, groups)
    check_shapes(shape, weight.shape, *geometry, axes=1)
    if bias is not None:
        check_bias(bias.shape, weight.shape, weight.shape[0], transposed=False)
    if residual is not None:
        check_residual(input, residual)
