"""``fastconv.conv_transpose1d``, ``2d`` and ``3d``, by the operator ``transposed``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import handle_torch_function, has_torch_function

from fastconv import _precision, native
from fastconv._precision import Precision
from fastconv.backends.epilogue import applied, per_channel
from fastconv.geometry import (
    Activation,
    IntOrPair,
    SidesLike,
    activation_of,
    check_residual,
    check_tensors,
    epilogue_arguments,
    integer,
    numbers,
    only_row,
    sides_without_names,
)
from fastconv.ops import autograd
from fastconv.ops.arguments import Geometry
from fastconv.ops.schema import check_dense
from fastconv.problem import (
    Epilogue,
    check_bias,
    check_output_padding,
    check_transposed,
)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrPair = 1,
    padding: SidesLike = 0,
    output_padding: IntOrPair = 0,
    groups: int = 1,
    dilation: IntOrPair = 1,
    *,
    precision: Precision | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Applies a 2-D transposed convolution, as ``torch.nn.functional.conv_transpose2d`` does.

    With ``activation`` or ``residual``, it computes activation(transposed convolution + bias +
    residual): in one kernel where every position of the output has a tap and, with a residual, the
    stride is 1. Otherwise, and if autograd records the call, these are several steps, each of which
    rounds.

    Args:
        input: ``(batch, in_channels, height, width)``, or without ``batch``.
        weight: ``(in_channels, out_channels / groups, kernel height, kernel width)``.
        bias: ``(out_channels)``, or None.
        stride: one number, or ``(vertical, horizontal)``.
        padding: rows and columns that are left out at the output's sides: one number,
            ``(vertical, horizontal)``, or, which PyTorch does not take, one number per side:
            ``((top, bottom), (left, right))``.
        output_padding: rows and columns that the output has in addition, at the bottom and to the
            right: one number, or ``(vertical, horizontal)``, below the stride or the dilation.
        groups: number of groups the channels are split into.
        dilation: one number, or ``(vertical, horizontal)``.
        precision: ``"ieee"`` or ``"tf32"``, as for ``fastconv.conv2d``.
        activation: as for ``fastconv.conv2d``.
        residual: a tensor that is added before the activation. It has the result's size and the
            input's type and device.

    Returns:
        ``(batch, out_channels, out_height, out_width)``, or without ``batch``, in the memory format
        PyTorch would choose. With all four sides of padding, ``out_height`` is
        ``(height - 1) * stride - top - bottom + dilation * (kernel_height - 1) + output_padding
        + 1``, and ``out_width`` likewise.

    Raises:
        TypeError: an argument has a type that PyTorch would not take either.
        RuntimeError: sizes, types or devices do not fit together, as in PyTorch.
        ValueError: ``precision`` or ``activation`` is none of those above.
        fastconv.GpuUnavailable: the tensors are on a GPU, and this machine lacks what the kernels
            need beside it.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> images, weight = torch.randn(8, 16, 12, 12), torch.randn(16, 8, 4, 4)
        >>> fastconv.conv_transpose2d(images, weight, stride=2, padding=1).shape
        torch.Size([8, 8, 24, 24])
        >>> fastconv.conv_transpose2d(images, weight, padding=((3, 0), (2, 1))).shape
        torch.Size([8, 8, 12, 12])
    """
    return _conv_transpose(
        conv_transpose2d, 2, input, weight, bias, stride, padding, output_padding, groups, dilation,
        precision, activation, residual,
    )  # fmt: skip


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrPair = 1,
    padding: SidesLike = 0,
    output_padding: IntOrPair = 0,
    groups: int = 1,
    dilation: IntOrPair = 1,
    *,
    precision: Precision | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Applies a 1-D transposed convolution, as ``torch.nn.functional.conv_transpose1d`` does.

    It is a 2-D transposed convolution of images with one row: nothing is copied. With
    ``activation`` or ``residual``, it computes activation(transposed convolution + bias +
    residual), as ``fastconv.conv_transpose2d`` does.

    Args:
        input: ``(batch, in_channels, length)``, or without ``batch``. It is read as it lies in
            memory, also as the transposed view of ``(batch, length, channels)``.
        weight: ``(in_channels, out_channels / groups, kernel length)``.
        bias: ``(out_channels)``, or None.
        stride: one number, alone or in a tuple.
        padding: what is left out at both ends of the output: one number, alone or in a tuple, or,
            which PyTorch does not take, one number per side: ``((before, after),)``.
        output_padding: what the output has in addition at its end: one number, alone or in a tuple,
            below the stride or the dilation.
        groups: number of groups the channels are split into.
        dilation: one number, alone or in a tuple.
        precision: ``"ieee"`` or ``"tf32"``, as for ``fastconv.conv2d``.
        activation: as for ``fastconv.conv2d``.
        residual: a tensor that is added before the activation. It has the result's size and the
            input's type and device.

    Returns:
        ``(batch, out_channels, out_length)``, or without ``batch``, with strides as
        ``fastconv.conv1d`` returns them. ``out_length`` is
        ``(length - 1) * stride - before - after + dilation * (kernel_length - 1) + output_padding
        + 1``.

    Raises:
        TypeError: an argument has a type that PyTorch would not take either.
        RuntimeError: sizes, types or devices do not fit together, as in PyTorch.
        ValueError: ``precision`` or ``activation`` is none of those above.
        fastconv.GpuUnavailable: the tensors are on a GPU, and this machine lacks what the kernels
            need beside it.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> frames, weight = torch.randn(8, 32, 50), torch.randn(32, 16, 16)
        >>> fastconv.conv_transpose1d(frames, weight, stride=8, padding=4).shape
        torch.Size([8, 16, 400])
    """
    return _conv_transpose(
        conv_transpose1d, 1, input, weight, bias, stride, padding, output_padding, groups, dilation,
        precision, activation, residual,
    )  # fmt: skip


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrPair = 1,
    padding: SidesLike = 0,
    output_padding: IntOrPair = 0,
    groups: int = 1,
    dilation: IntOrPair = 1,
    *,
    precision: Precision | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Applies a 3-D transposed convolution, as ``torch.nn.functional.conv_transpose3d`` does.

    With ``activation`` or ``residual``, it computes activation(transposed convolution + bias +
    residual), as ``fastconv.conv_transpose2d`` does.

    Args:
        input: ``(batch, in_channels, depth, height, width)``, or without ``batch``.
        weight: ``(in_channels, out_channels / groups, kernel depth, kernel height, kernel width)``.
        bias: ``(out_channels)``, or None.
        stride: one number, or ``(depth, vertical, horizontal)``.
        padding: what is left out at the output's sides: one number, ``(depth, vertical,
            horizontal)``, or, which PyTorch does not take, one number per side:
            ``((front, back), (top, bottom), (left, right))``.
        output_padding: planes, rows and columns that the output has in addition, at the back, at
            the bottom and to the right: one number, or ``(depth, vertical, horizontal)``, below the
            stride or the dilation.
        groups: number of groups the channels are split into.
        dilation: one number, or ``(depth, vertical, horizontal)``.
        precision: ``"ieee"`` or ``"tf32"``, as for ``fastconv.conv2d``.
        activation: as for ``fastconv.conv2d``.
        residual: a tensor that is added before the activation. It has the result's size and the
            input's type and device.

    Returns:
        ``(batch, out_channels, out_depth, out_height, out_width)``, or without ``batch``, in the
        memory format PyTorch would choose. Sizes are those of ``fastconv.conv_transpose2d``.

    Raises:
        TypeError: an argument has a type that PyTorch would not take either.
        RuntimeError: sizes, types or devices do not fit together, as in PyTorch.
        ValueError: ``precision`` or ``activation`` is none of those above.
        fastconv.GpuUnavailable: the tensors are on a GPU, and this machine lacks what the kernels
            need beside it.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> volumes, weight = torch.randn(2, 16, 6, 6, 6), torch.randn(16, 8, 2, 2, 2)
        >>> fastconv.conv_transpose3d(volumes, weight, stride=2).shape
        torch.Size([2, 8, 12, 12, 12])
    """
    return _conv_transpose(
        conv_transpose3d, 3, input, weight, bias, stride, padding, output_padding, groups, dilation,
        precision, activation, residual,
    )  # fmt: skip


def _conv_transpose(
    function: Any,
    axes: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrPair,
    padding: SidesLike,
    output_padding: IntOrPair,
    groups: int,
    dilation: IntOrPair,
    precision: Precision | None,
    activation: Activation | None,
    residual: Tensor | None,
) -> Tensor:
    """Computes a transposed convolution along some axes, for the user's ``function``."""
    if not torch.compiler.is_compiling() and (host := native.conv2d) is not None:
        mode = _precision.override_untraced() if precision is None else precision
        try:
            output = host(
                input, weight, bias, stride, padding, dilation, groups, mode, activation, residual,
                axes, output_padding,
            )  # fmt: skip
        except RuntimeError:
            sizes = _sizes(function, axes, stride, padding, output_padding, groups, dilation)
            _raise_unfit(input, weight, bias, sizes)
            raise
        if output is not NotImplemented:
            return output
    tensors = tuple(one for one in (input, weight, bias, residual) if one is not None)
    if has_torch_function(tensors):
        return handle_torch_function(
            function, tensors, input, weight, bias, stride, padding, output_padding, groups,
            dilation, precision=precision, **epilogue_arguments(activation, residual),
        )  # fmt: skip
    check_tensors(_name(function), input, weight, bias, residual)
    _check_ranks(input, residual, axes)
    check_dense("weight", weight)
    sizes = _sizes(function, axes, stride, padding, output_padding, groups, dilation)
    mode = _precision.override() if precision is None else _precision.checked(precision)
    return _of_any_batch(input, weight, bias, residual, sizes, mode, activation_of(activation))


_Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Output padding, stride, padding, dilation and groups; of one axis, two or three."""


def _name(function: Any) -> str:
    """The function's name in errors."""
    return f"{function.__name__}()"


def _sizes(
    function: Any,
    axes: int,
    stride: IntOrPair,
    padding: SidesLike,
    output_padding: IntOrPair,
    groups: int,
    dilation: IntOrPair,
) -> _Sizes:
    name = _name(function)
    return (
        numbers(name, "output_padding", output_padding, axes),
        numbers(name, "stride", stride, axes),
        sides_without_names(name, padding, axes),
        numbers(name, "dilation", dilation, axes),
        integer(name, "groups", groups),
    )


def _check_ranks(input: Tensor, residual: Tensor | None, axes: int) -> None:
    """Raises if the input has too few or too many dimensions, or the residual others than it."""
    check_dense("input", input)
    if input.dim() not in (axes + 1, axes + 2):
        raise RuntimeError(
            f"Expected {axes + 1}D (unbatched) or {axes + 2}D (batched) input to "
            f"conv_transpose{axes}d, but got input of size: {list(input.shape)}"
        )
    if residual is not None:
        check_dense("residual", residual)
        check_residual(input, residual)


def _raise_unfit(input: Tensor, weight: Tensor, bias: Tensor | None, sizes: _Sizes) -> None:
    """Raises if tensors do not fit together, and names sizes as the user gave them."""
    axes = len(sizes[0])
    shape = input.shape if input.dim() == axes + 2 else (1, *input.shape)
    check_transposed(shape, weight.shape, *sizes, axes=axes)
    if bias is not None:
        check_bias(bias.shape, weight.shape, weight.shape[1] * sizes[-1], transposed=True)


def _of_any_batch(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    sizes: _Sizes,
    mode: Precision | None,
    after: tuple[str, float],
) -> Tensor:
    """Computes a batch, or one image or sequence, which is a batch of one."""
    axes = len(sizes[0])
    is_batched = input.dim() == axes + 2
    if not is_batched:
        input = input.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    check_output_padding(sizes[0], sizes[1], sizes[3])
    if weight.dim() != axes + 2:
        _raise_unfit(input, weight, bias, sizes)
    try:
        output = _of_images(input, weight, bias, residual, sizes, mode, after)
    except RuntimeError:
        _raise_unfit(input, weight, bias, sizes)
        raise
    return output if is_batched else output.squeeze(0)


def _of_images(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    sizes: _Sizes,
    mode: Precision | None,
    after: tuple[str, float],
) -> Tensor:
    """Computes a batch; along one axis, by images with one row."""
    more, stride, around, dilation, groups = sizes
    if len(stride) > 1:
        geometry = (stride, around, dilation, groups, mode)
        return _reached(input, weight, bias, residual, more, geometry, after)
    geometry = ((1, *stride), (0, 0, *around), (1, *dilation), groups, mode)
    output = _reached(
        input.unsqueeze(2), weight.unsqueeze(2), bias,
        None if residual is None else residual.unsqueeze(2), (0, *more), geometry, after,
    )  # fmt: skip
    return only_row(output)


def _reached(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    output_padding: tuple[int, ...],
    geometry: Geometry,
    after: tuple[str, float],
) -> Tensor:
    """Computes a batch, also where the output padding is not below the stride.

    Then the output may go beyond all that the weight reaches: it is computed without bias, and
    zeros are added to it.
    """
    stride, around, dilation, groups, mode = geometry
    late = [max(0, more - step + 1) for more, step in zip(output_padding, stride, strict=True)]
    if not any(late):
        return autograd.transposed_here(
            _convolution, input, weight, bias, residual, output_padding, geometry, *after
        )
    check_transposed(
        input.shape, weight.shape, output_padding, stride, around, dilation, groups, len(stride)
    )
    plain = (stride, (0,) * len(around), dilation, groups, mode)
    whole = _convolution(input, weight, None, (0,) * len(stride), *plain)
    behind = [more - after for more, after in zip(output_padding, around[1::2], strict=True)]
    sides = list(zip(around[::2], behind, strict=True))[::-1]  # pad takes the last axis first
    # Zeros come first: what is cut off at the front may be all that the weight reaches.
    longer = pad(whole, [side for _, after in sides for side in (0, max(0, after))])
    output = pad(longer, [side for before, after in sides for side in (-before, min(0, after))])
    if bias is not None:
        output = output + per_channel(bias, len(stride))
    return applied(output, residual, Epilogue(*after))


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_padding: tuple[int, ...],
    stride: tuple[int, ...],
    around: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    mode: Precision | None,
) -> Tensor:
    """Computes the operator without an epilogue, by the native host path if it serves calls."""
    function = conv_transpose2d if len(stride) == 2 else conv_transpose3d
    sides = list(zip(around[::2], around[1::2], strict=True))
    return function(
        input, weight, bias, stride, sides, output_padding, groups, dilation, precision=mode
    )
