"""Batch normalization with what follows it, alone and behind a convolution."""

# This file does not postpone the evaluation of annotations: torch.fx keeps those of forward, and
# cannot pickle them as strings.

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.overrides import handle_torch_function, has_torch_function

from fastconv import _precision, native
from fastconv._precision import Precision
from fastconv.backends import left_statistics
from fastconv.backends.batchnorm.formulas import scale_and_shift, sum_type
from fastconv.backends.epilogue import applied
from fastconv.functional import conv1d, conv2d, conv3d, raise_unfit
from fastconv.geometry import Activation, IntOrPair, LayerPadding, PaddingLike, activation_of
from fastconv.layers import PaddingMode, has_hooks_of_all
from fastconv.modules import Conv1d, Conv2d, Conv3d
from fastconv.ops import batchnorm_schema, hooks
from fastconv.problem import Epilogue


def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    r"""Applies batch normalization as ``torch.nn.functional.batch_norm`` does, and what follows.

    $$
    y = \operatorname{activation}\Bigl(\frac{x - \text{mean}}{\sqrt{\text{var} + \text{eps}}}
    \cdot \text{weight} + \text{bias} + \text{residual}\Bigr)
    $$

    On a GPU, that is one pass over memory for the statistics and one for the output; gradients are
    one for their sums and one for that of the input. No mask is kept for the activation: its
    gradient follows from the output, or is computed from the input again. The output is rounded
    once. Sums are in float32 (float64 for float64), and the same call gives the same bits.

    Args:
        input: ``(batch, channels, ...)`` in float32, float16, bfloat16 or float64, contiguous or
            channels-last; other layouts are copied.
        running_mean: ``(channels)``, the mean that ``training`` updates, and that is used
            otherwise. It may be None in training.
        running_var: the same for the variance.
        weight: ``(channels)``, in the input's type or in float32, or None.
        bias: the same.
        training: whether to normalize with the mean and variance of this batch.
        momentum: the share by which running statistics move towards those of the batch. None takes
            ``1 / num_batches_tracked``, which makes them averages of all batches.
        eps: what is added to the variance.
        activation: as for ``fastconv.conv2d``.
        residual: a tensor of the input's size and type that is added before the activation.
        num_batches_tracked: the number of batches, this one included, a tensor of one int64. It is
            read only where ``momentum`` is None, without waiting for the GPU.

    Returns:
        A tensor of the input's size, type and memory format.

    Raises:
        RuntimeError: sizes or devices do not fit together, or statistics are missing, as in
            PyTorch.
        ValueError: a channel has only one value in training, as in PyTorch; types do not fit
            together, or ``activation`` is none of those above.
        NotImplementedError: the input has a type that is not supported.

    Examples:
        >>> images, mean, var = torch.randn(8, 16, 9, 9), torch.zeros(16), torch.ones(16)
        >>> output = fastconv.batch_norm_act(images, mean, var, training=True, activation="relu")
        >>> expected = torch.nn.functional.batch_norm(images, None, None, training=True)
        >>> torch.testing.assert_close(output, torch.relu(expected))
    """
    if not torch.compiler.is_compiling() and (host := native.batch_norm_act) is not None:
        computed = host(
            input, residual, weight, bias, running_mean, running_var, num_batches_tracked, training,
            momentum, eps, activation, False,
        )  # fmt: skip
        if computed is not NotImplemented:
            return computed
    tensors = (input, running_mean, running_var, weight, bias, residual, num_batches_tracked)
    given = tuple(one for one in tensors if one is not None)
    if has_torch_function(given):
        return handle_torch_function(
            batch_norm_act, given, input, running_mean, running_var, weight, bias, training,
            momentum, eps, activation=activation, residual=residual,
            num_batches_tracked=num_batches_tracked,
        )  # fmt: skip
    name, slope = activation_of(activation)
    batches = None
    if momentum is None:
        momentum = 0.0
        if training and running_mean is not None:
            if num_batches_tracked is None:
                raise ValueError("num_batches_tracked should be given where momentum is None")
            batches = num_batches_tracked
    output: Tensor = batchnorm_schema.forward(
        input, residual, weight, bias, running_mean, running_var, batches, training, momentum, eps,
        name, slope,
    )[0]  # fmt: skip
    return output


def conv_bn_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    stride: IntOrPair = 1,
    padding: PaddingLike = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    *,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    precision: Precision | None = None,
) -> Tensor:
    """Applies a convolution, batch normalization, an addition and an activation.

    The convolution has as many axes as its weight: it is ``fastconv.conv1d``, ``conv2d`` or
    ``conv3d``. In training, ``fastconv.batch_norm_act`` follows. Otherwise the normalization is
    folded into the convolution's weight and bias, so that all is one kernel; with gradients,
    convolution, addition and activation are three steps, as in ``fastconv.conv2d``.

    Args:
        input: ``(batch, in_channels, height, width)``, or as ``conv1d`` and ``conv3d`` take it,
            but always with ``batch``.
        weight: the convolution's, ``(out_channels, in_channels / groups, height, width)``, or with
            one or three sizes behind the channels.
        bias: the convolution's, ``(out_channels)``, or None.
        running_mean: as for ``fastconv.batch_norm_act``.
        running_var: as for ``fastconv.batch_norm_act``.
        norm_weight: what normalized channels are multiplied by, or None.
        norm_bias: what is added to normalized channels, or None.
        stride: as for ``fastconv.conv2d``, or for the convolution of these axes.
        padding: the same.
        dilation: the same.
        groups: the same.
        training: whether to normalize with the mean and variance of this batch.
        momentum: as for ``fastconv.batch_norm_act``.
        eps: what is added to the variance.
        activation: as for ``fastconv.conv2d``.
        residual: a tensor of the output's size that is added before the activation. Under autocast
            it may have another type than the convolution's output.
        num_batches_tracked: as for ``fastconv.batch_norm_act``.
        precision: as for ``fastconv.conv2d``.

    Returns:
        ``(batch, out_channels, out_height, out_width)``, or that of the convolution of these axes.

    Raises:
        RuntimeError: sizes, types or devices do not fit together, as in PyTorch.
        ValueError: an argument is none of those above, the input is no batch, or a channel has only
            one value in training.

    Examples:
        >>> images, weight = torch.randn(8, 3, 9, 9), torch.randn(16, 3, 3, 3)
        >>> mean, var = torch.zeros(16), torch.ones(16)
        >>> output = fastconv.conv_bn_act(
        ...     images, weight, None, mean, var, training=True, activation="relu"
        ... )
        >>> output.shape
        torch.Size([8, 16, 7, 7])
        >>> bool(mean.any())
        True
    """
    if training and not torch.compiler.is_compiling() and (host := native.conv_bn_act) is not None:
        computed = _by_host(
            host, input, weight, bias, running_mean, running_var, norm_weight, norm_bias, stride,
            padding, dilation, groups, momentum, eps, activation, residual, num_batches_tracked,
            False, precision, False,
        )  # fmt: skip
        if computed is not NotImplemented:
            return computed
    tensors = (
        input, weight, bias, running_mean, running_var, norm_weight, norm_bias, residual,
        num_batches_tracked,
    )  # fmt: skip
    given = tuple(one for one in tensors if one is not None)
    if has_torch_function(given):
        return handle_torch_function(
            conv_bn_act, given, *tensors[:7], stride, padding, dilation, groups, training=training,
            momentum=momentum, eps=eps, activation=activation, residual=residual,
            num_batches_tracked=num_batches_tracked, precision=precision,
        )  # fmt: skip
    convolution = _CONVOLUTIONS.get(weight.dim())
    if convolution is None:
        raise ValueError(f"expected a weight of 3 to 5 dimensions (got {weight.dim()})")
    if input.dim() != weight.dim():
        raise ValueError(f"expected {weight.dim()}D input (got {input.dim()}D input)")
    if training:
        compiling = torch.compiler.is_compiling()
        with nullcontext() if compiling else left_statistics.asked():
            output = convolution(
                input, weight, bias, stride, padding, dilation, groups, precision=precision
            )
            if not compiling:
                hooks.block_convolved()
            return batch_norm_act(
                output, running_mean, running_var, norm_weight, norm_bias, training, momentum, eps,
                activation=activation, residual=residual, num_batches_tracked=num_batches_tracked,
            )  # fmt: skip
    if running_mean is None or running_var is None:
        name = "running_mean" if running_mean is None else "running_var"
        raise RuntimeError(f"{name} must be defined in evaluation mode")
    weight, bias = _folded(weight, bias, running_mean, running_var, norm_weight, norm_bias, eps)
    return convolution(
        input, weight, bias, stride, padding, dilation, groups,
        precision=precision, activation=activation, residual=residual,
    )  # fmt: skip


def _by_host(
    host: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    stride: IntOrPair,
    padding: PaddingLike,
    dilation: IntOrPair,
    groups: int,
    momentum: float | None,
    eps: float,
    activation: Activation | None,
    residual: Tensor | None,
    num_batches_tracked: Tensor | None,
    counts: bool,
    precision: Precision | None,
    recomputes: bool,
) -> Any:
    """What the native host path computes in training, or NotImplemented."""
    mode = _precision.override_untraced() if precision is None else precision
    try:
        return host(
            input, weight, bias, stride, padding, dilation, groups, mode, residual, norm_weight,
            norm_bias, running_mean, running_var, num_batches_tracked, True, momentum, eps,
            activation, counts, recomputes,
        )  # fmt: skip
    except RuntimeError:
        if weight.dim() == 3:
            raise_unfit(input, weight, bias, None, stride, padding, dilation, groups)
        raise


_CONVOLUTIONS = {3: conv1d, 4: conv2d, 5: conv3d}
"""The convolutions, by the dimensions of their weights."""


def _folded(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns the weight and the bias of the convolution that normalizes as well."""
    channels = weight.shape[0]
    named = (
        ("running_mean", mean), ("running_var", variance), ("weight", norm_weight),
        ("bias", norm_bias),
    )  # fmt: skip
    for name, one in named:
        if one is not None and one.numel() != channels:
            raise RuntimeError(f"{name} should contain {channels} elements not {one.numel()}")
    wide = sum_type(weight.dtype)
    scale, shift = scale_and_shift(mean.to(wide), variance.to(wide), norm_weight, norm_bias, eps)
    if bias is not None:
        shift = shift + bias * scale
    scaled = weight.to(wide) * scale.view(-1, *(1,) * (weight.dim() - 1))
    return scaled.to(weight.dtype), shift.to(weight.dtype)


def _computes(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of this layer does what its class does, and nothing else."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    return (
        (type(layer) is kind or type_before_parametrizations(layer) is kind)
        and not hooks
        and not layer._backward_pre_hooks
        and "forward" not in vars(layer)
    )


def _tensor(layer: nn.Module, of: Mapping[str, Tensor | None], name: str) -> Any:
    """Returns a layer's parameter or buffer, from the dictionary that usually has it.

    ``nn.Module`` looks for attributes in three dictionaries, after all else. For the tensors of a
    small block, that takes as long as the rest of a call.
    """
    return of[name] if name in of else getattr(layer, name)


class _Statistics(NamedTuple):
    """What a call of a BatchNorm layer normalizes with, and what it updates."""

    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float | None
    num_batches_tracked: Tensor | None
    counts: bool  # whether the call counts its batch in num_batches_tracked

    @classmethod
    def of(cls, bn: Any) -> "_Statistics":
        """Those of the layer's next call."""
        buffers = bn._buffers
        mean, var = _tensor(bn, buffers, "running_mean"), _tensor(bn, buffers, "running_var")
        batches = _tensor(bn, buffers, "num_batches_tracked")
        counts = bool(bn.training and bn.track_running_stats and batches is not None)
        training = bn.training or (mean is None and var is None)
        if bn.training and not bn.track_running_stats:
            mean = var = None
        # Without a count, PyTorch takes a momentum of None to be zero.
        momentum = 0.0 if bn.momentum is None and batches is None else bn.momentum
        return cls(mean, var, training, momentum, batches, counts)

    def count_batch(self) -> None:
        """Counts the batch, for functions that do not."""
        if self.counts and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)


def bn_act(
    bn: Any,
    input: Tensor,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    adds_in_place: bool = False,
) -> Tensor:
    """Computes what a BatchNorm layer does, an addition and an activation, together.

    ``fastconv.optimize`` puts it in the place of these operations. The result is that of PyTorch's,
    for any residual that they take: one of another size or type is added by PyTorch, out of place
    or in place as in the model.

    Args:
        bn: a ``torch.nn.BatchNorm1d`` to ``BatchNorm3d``.
        input: what it is called with.
        residual: what is added to its result.
        activation: as for ``fastconv.conv2d``.
        adds_in_place: whether the model adds in place.

    Returns:
        The result of the activation.
    """
    bn._check_input_dim(input)
    if residual is not None and (residual.dtype, residual.shape) != (input.dtype, input.shape):
        output = bn_act(bn, input)
        output = output.add_(residual) if adds_in_place else output + residual
        return applied(output, None, Epilogue(*activation_of(activation)))
    of = _Statistics.of(bn)
    if not torch.compiler.is_compiling() and (host := native.batch_norm_act) is not None:
        computed = host(
            input, residual, bn.weight, bn.bias, of.running_mean, of.running_var,
            of.num_batches_tracked, of.training, of.momentum, bn.eps, activation, of.counts,
        )  # fmt: skip
        if computed is not NotImplemented:
            return computed
    of.count_batch()
    return batch_norm_act(
        input, of.running_mean, of.running_var, bn.weight, bn.bias, of.training, of.momentum,
        bn.eps, activation=activation, residual=residual,
        num_batches_tracked=of.num_batches_tracked,
    )  # fmt: skip


def conv_of_bn_act(
    conv: Any,
    bn: Any,
    input: Tensor,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    adds_in_place: bool = False,
    recomputes: bool = False,
) -> Tensor:
    """Computes a layer of :data:`CONVOLUTIONS` and then :func:`bn_act`, in one call where it can.

    Running statistics are not folded into the convolution: the result is that of its layers. With
    ``recomputes``, an input that is the result of this function or of :func:`bn_act`, and that
    nothing else reads, is computed again in the backward pass where that is possible: see
    :data:`fastconv.native.conv_bn_act`.
    """
    of_batch = bn.training or bn.running_mean is None
    batched = input.dim() == len(conv.kernel_size) + 2
    if not of_batch or not batched or not _is_added_alike(conv, input, residual):
        return bn_act(bn, conv.forward(input), residual, activation, adds_in_place)
    return _block(conv, bn, input, residual, activation, recomputes)


def _block(
    conv: Any,
    bn: Any,
    input: Tensor,
    residual: Tensor | None,
    activation: Activation | None,
    recomputes: bool = False,
) -> Tensor:
    """Computes the next call of both layers, with what follows, by :func:`conv_bn_act`."""
    of = _Statistics.of(bn)
    input, padding = conv._padded(input)
    ours, theirs = conv._parameters, bn._parameters
    operands = (
        input, _tensor(conv, ours, "weight"), _tensor(conv, ours, "bias"), of.running_mean,
        of.running_var, _tensor(bn, theirs, "weight"), _tensor(bn, theirs, "bias"), conv.stride,
        padding, conv.dilation, conv.groups,
    )  # fmt: skip
    compiling = torch.compiler.is_compiling()
    if of.training and not compiling and (host := native.conv_bn_act) is not None:
        computed = _by_host(
            host, *operands, of.momentum, bn.eps, activation, residual, of.num_batches_tracked,
            of.counts, conv.precision, recomputes,
        )  # fmt: skip
        if computed is not NotImplemented:
            return computed
    of.count_batch()
    return conv_bn_act(
        *operands, training=of.training, momentum=of.momentum, eps=bn.eps, activation=activation,
        residual=residual, num_batches_tracked=of.num_batches_tracked, precision=conv.precision,
    )  # fmt: skip


def _is_added_alike(conv: Any, input: Tensor, residual: Tensor | None) -> bool:
    """Whether a residual, if it can be added at all, has the convolution's size and type."""
    if residual is None:
        return True
    device, dtype = input.device.type, input.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    sizes = (input.shape[0], conv.out_channels)
    # A side of one element would be broadcast.
    dimensions = residual.dim() == input.dim()
    same = residual.shape[:2] == sizes and dimensions and 1 not in residual.shape[2:]
    return same and residual.dtype == dtype


class _ConvBNAct(nn.Module):
    """What the layers below have in common: ``activation(bn(conv(input)) + residual)``."""

    # Their classes, unless they are exchanged for others later.
    _conv: type[nn.Module]
    _bn: type[nn.Module]

    def __init__(self, conv: nn.Module, bn: nn.Module, activation: Activation | None) -> None:
        super().__init__()
        activation_of(activation)
        self.conv = conv
        self.bn = bn
        self.activation = activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolves, normalizes, adds the residual and applies the activation.

        Args:
            input: ``(batch, in_channels, ...)``.
            residual: a tensor of the output's size and type that is added before the activation.

        Returns:
            ``(batch, out_channels, ...)``.
        """
        conv: Any = self._modules["conv"]
        bn: Any = self._modules["bn"]
        alone = has_hooks_of_all()
        if alone or not _computes(conv, self._conv) or not _computes(bn, self._bn):
            return applied(bn(conv(input)), residual, Epilogue(*activation_of(self.activation)))
        return _block(conv, bn, input, residual, self.activation)

    def _get_name(self) -> str:
        name = super()._get_name()
        return f"fastconv.{name}" if type(self).__module__ == __name__ else name

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class ConvBNAct2d(_ConvBNAct):
    """A convolution, batch normalization, an addition where there is one, and an activation.

    It computes ``activation(bn(conv(input)) + residual)`` for its layers ``conv``, a
    ``fastconv.Conv2d``, and ``bn``, a ``torch.nn.BatchNorm2d``: with their parameters, initial
    values and state dict (``conv.weight``, ``bn.weight``, ``bn.running_mean`` ...), by
    ``fastconv.conv_bn_act``. ``bn.eval()`` freezes its statistics, as everywhere. Where one of the
    two has hooks, or has become a layer of another class, as ``torch.nn.SyncBatchNorm``, and where
    hooks are registered for all modules, they are called one after the other.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, or ``(height, width)``.
        stride: as for ``fastconv.Conv2d``.
        padding: as for ``fastconv.Conv2d``.
        dilation: as for ``fastconv.Conv2d``.
        groups: as for ``fastconv.Conv2d``.
        bias: whether the convolution has a bias, which the normalization takes away again.
        padding_mode: as for ``fastconv.Conv2d``.
        eps: as for ``torch.nn.BatchNorm2d``.
        momentum: as for ``torch.nn.BatchNorm2d``; None averages all batches.
        affine: as for ``torch.nn.BatchNorm2d``.
        track_running_stats: as for ``torch.nn.BatchNorm2d``.
        activation: as for ``fastconv.conv2d``; None for none.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: as for ``fastconv.Conv2d``.

    Raises:
        ValueError: an argument is none of those above.

    Examples:
        >>> layer = fastconv.ConvBNAct2d(8, 8, 3, padding=1)
        >>> images = torch.randn(2, 8, 9, 9)
        >>> output = layer(images, residual=images)
        >>> expected = torch.relu(layer.bn(layer.conv(images)) + images)
        >>> torch.testing.assert_close(output, expected)
        >>> sorted(layer.state_dict())[:3]
        ['bn.bias', 'bn.num_batches_tracked', 'bn.running_mean']
    """

    _conv, _bn = Conv2d, nn.BatchNorm2d
    conv: Conv2d
    bn: nn.BatchNorm2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: LayerPadding = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: PaddingMode = "zeros",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: Activation | None = "relu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        conv = Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype, precision=precision,
        )  # fmt: skip
        bn = nn.BatchNorm2d(out_channels, eps, momentum, affine, track_running_stats, device, dtype)
        super().__init__(conv, bn, activation)


class ConvBNAct1d(_ConvBNAct):
    """A 1-D convolution and what follows it, as ``fastconv.ConvBNAct2d``.

    Its layers are ``conv``, a ``fastconv.Conv1d``, and ``bn``, a ``torch.nn.BatchNorm1d``.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, alone or in a tuple.
        stride: as for ``fastconv.Conv1d``.
        padding: as for ``fastconv.Conv1d``.
        dilation: as for ``fastconv.Conv1d``.
        groups: as for ``fastconv.Conv1d``.
        bias: whether the convolution has a bias, which the normalization takes away again.
        padding_mode: as for ``fastconv.Conv1d``.
        eps: as for ``torch.nn.BatchNorm1d``.
        momentum: as for ``torch.nn.BatchNorm1d``; None averages all batches.
        affine: as for ``torch.nn.BatchNorm1d``.
        track_running_stats: as for ``torch.nn.BatchNorm1d``.
        activation: as for ``fastconv.conv2d``; None for none.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: as for ``fastconv.Conv1d``.

    Raises:
        ValueError: an argument is none of those above.

    Examples:
        >>> layer = fastconv.ConvBNAct1d(16, 32, 5, padding="same", activation="gelu")
        >>> layer(torch.randn(8, 16, 100)).shape
        torch.Size([8, 32, 100])
    """

    _conv, _bn = Conv1d, nn.BatchNorm1d
    conv: Conv1d
    bn: nn.BatchNorm1d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] | tuple[tuple[int, int]] | Literal["valid", "same"] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: PaddingMode = "zeros",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: Activation | None = "relu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        conv = Conv1d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype, precision=precision,
        )  # fmt: skip
        bn = nn.BatchNorm1d(out_channels, eps, momentum, affine, track_running_stats, device, dtype)
        super().__init__(conv, bn, activation)


class ConvBNAct3d(_ConvBNAct):
    """A 3-D convolution and what follows it, as ``fastconv.ConvBNAct2d``.

    Its layers are ``conv``, a ``fastconv.Conv3d``, and ``bn``, a ``torch.nn.BatchNorm3d``.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, or ``(depth, height, width)``.
        stride: as for ``fastconv.Conv3d``.
        padding: as for ``fastconv.Conv3d``.
        dilation: as for ``fastconv.Conv3d``.
        groups: as for ``fastconv.Conv3d``.
        bias: whether the convolution has a bias, which the normalization takes away again.
        padding_mode: as for ``fastconv.Conv3d``.
        eps: as for ``torch.nn.BatchNorm3d``.
        momentum: as for ``torch.nn.BatchNorm3d``; None averages all batches.
        affine: as for ``torch.nn.BatchNorm3d``.
        track_running_stats: as for ``torch.nn.BatchNorm3d``.
        activation: as for ``fastconv.conv2d``; None for none.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: as for ``fastconv.Conv3d``.

    Raises:
        ValueError: an argument is none of those above.

    Examples:
        >>> layer = fastconv.ConvBNAct3d(3, 16, 3, padding=1)
        >>> layer(torch.randn(2, 3, 4, 16, 16)).shape
        torch.Size([2, 16, 4, 16, 16])
    """

    _conv, _bn = Conv3d, nn.BatchNorm3d
    conv: Conv3d
    bn: nn.BatchNorm3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int
        | tuple[int, int, int]
        | tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
        | Literal["valid", "same"] = 0,
        dilation: int | tuple[int, int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: PaddingMode = "zeros",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: Activation | None = "relu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        conv = Conv3d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype, precision=precision,
        )  # fmt: skip
        bn = nn.BatchNorm3d(out_channels, eps, momentum, affine, track_running_stats, device, dtype)
        super().__init__(conv, bn, activation)


CONVOLUTIONS: tuple[type[nn.Module], ...] = (Conv1d, Conv2d, Conv3d)
"""The layers that :func:`conv_of_bn_act` takes."""
