"""The layers beside Conv2d, by the same kernels.

A sequence is an image of one row. A transposed convolution is the input gradient of a convolution,
with a bias.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastconv.exporter.parts.portable import Axis, Geometry
from fastconv.exporter.parts.runtime import Conv2d, Convolution, compute, joint_format


class TransposedConvolution(torch.autograd.Function):
    """The transposed convolution and its gradients, for autograd.

    ``geometry`` is that of the convolution whose input gradient it is: the geometry's input is what
    the transposed convolution writes.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.format = joint_format(input, weight)
        ctx.geometry = geometry
        input, weight = input.contiguous(memory_format=ctx.format), weight.contiguous()
        ctx.save_for_backward(input, weight)
        output = torch.empty(
            geometry.input, dtype=input.dtype, device=input.device, memory_format=ctx.format
        )
        tensors = {"input": input, "weight": weight, "output": output}
        # At positions without a tap kernels store zeros, to which they would not add the bias.
        in_kernel = all(
            Axis.of(True, geometry, axis).reaches_all for axis in range(input.dim() - 2)
        )
        if bias is not None and in_kernel:
            tensors["bias"] = bias.contiguous()
        compute(ctx, {"input_grad": tensors})
        if bias is not None and not in_kernel:
            output += everywhere(bias, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous(memory_format=ctx.format)
        passes, outputs, bias_grad = {}, {}, None
        if ctx.needs_input_grad[0]:
            outputs["forward"] = torch.empty_like(input, memory_format=ctx.format)
            passes["forward"] = {"input": grad_output, "weight": weight}
        if ctx.needs_input_grad[1]:
            outputs["weight_grad"] = torch.empty_like(weight)
            passes["weight_grad"] = {"grad_output": input, "input": grad_output}
        if ctx.needs_input_grad[2]:
            bias_grad = grad_output.sum((0, *range(2, grad_output.dim())))
        for which, output in outputs.items():
            passes[which]["output"] = output
        compute(ctx, passes)
        return outputs.get("forward"), outputs.get("weight_grad"), bias_grad, None


class Conv3d(Conv2d):
    """A 3-D convolution with the arguments, parameters and initial values of ``nn.Conv3d``."""

    axes = 3


class Conv1d(Conv2d):
    """A 1-D convolution with the arguments, parameters and initial values of ``nn.Conv1d``.

    Its numbers are kept as those of images with one row: ``kernel_size`` is (1, taps).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, row("kernel_size", kernel_size, least=1),
            row("stride", stride, least=1), row("padding", padding, least=0),
            row("dilation", dilation, least=1), groups, bias, padding_mode, device, dtype,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Draws the parameters; at the first call, by the constructor, it shapes the weight."""
        shape_weight(self, self.out_channels, self.in_channels, self.kernel_size[1])
        super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        images, weight = x.unsqueeze(2), self.weight.unsqueeze(2)
        geometry = Geometry(
            tuple(images.shape),
            tuple(weight.shape),
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        if geometry.output[3] < 1:
            raise ValueError(
                f"the kernel is longer than the padded input: input of shape {tuple(x.shape)}, "
                f"kernel_size={self.kernel_size[1]}, padding={self.padding[1]}, "
                f"dilation={self.dilation[1]}"
            )
        return Convolution.apply(images, weight, self.bias, geometry).squeeze(2)

    def check(self, x: Tensor) -> None:
        super().check(sequence_as_image(x, self.in_channels))


class ConvTranspose2d(Conv2d):
    """A transposed convolution with the arguments, parameters and initial values of PyTorch's."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip
        self.output_padding = self.each("output_padding", output_padding, least=0)

    def reset_parameters(self) -> None:
        """Draws the parameters; at the first call, by the constructor, it shapes the weight."""
        shape_weight(self, self.in_channels, self.out_channels, *self.kernel_size)
        super().reset_parameters()

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        self.check(x)
        return self.transpose(x, self.weight, output_size)

    def transpose(self, x: Tensor, weight: Tensor, output_size: list[int] | None) -> Tensor:
        """The transposed convolution; ``output_size`` ends with the sizes along its axes."""
        axes = range(self.axes)
        whole = tuple(
            (x.shape[2 + i] - 1) * self.stride[i] + self.dilation[i] * (weight.shape[2 + i] - 1) + 1
            for i in axes
        )
        least = [whole[i] - 2 * self.padding[i] for i in axes]
        more = self.output_padding
        if output_size is not None:
            more = tuple(output_size[i - self.axes] - least[i] for i in axes)
        if not all(0 <= more[i] < max(self.stride[i], self.dilation[i]) for i in axes):
            raise ValueError(
                "output_padding should be at least 0, and below the stride or the dilation, but "
                f"got {more}, with stride={self.stride}, dilation={self.dilation}"
            )
        size = tuple(least[i] + more[i] for i in axes)
        if min(size) < 1:
            raise ValueError(
                f"the output would be of size {'x'.join(map(str, size))}: input of shape "
                f"{tuple(x.shape)}, kernel_size={self.kernel_size}, padding={self.padding}"
            )
        if all(more[i] < self.stride[i] for i in axes):
            return self.written(x, weight, self.bias, size, self.padding)
        # The output goes beyond all that the weight reaches.
        reached = self.written(x, weight, None, whole, (0,) * self.axes)
        output = reached.new_zeros(reached.shape[0], reached.shape[1], *size)
        output = output.contiguous(memory_format=joint_format(reached))
        ends = [max(0, min(size[i], whole[i] - self.padding[i])) for i in axes]
        every = (slice(None), slice(None))
        inside = tuple(slice(end) for end in ends)
        within = tuple(slice(self.padding[i], self.padding[i] + ends[i]) for i in axes)
        output[every + inside] = reached[every + within]
        return output if self.bias is None else output + everywhere(self.bias, output)

    def written(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        size: tuple[int, ...],
        padding: tuple[int, ...],
    ) -> Tensor:
        """The output of this size, which the input's does not fully determine."""
        geometry = Geometry(
            (x.shape[0], self.out_channels, *size),
            tuple(weight.shape),
            self.stride,
            padding,
            self.dilation,
            self.groups,
        )
        return TransposedConvolution.apply(x, weight, bias, geometry)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, output_padding={self.output_padding}"


class ConvTranspose3d(ConvTranspose2d):
    """A 3-D transposed convolution with the arguments, parameters and values of PyTorch's."""

    axes = 3


class ConvTranspose1d(ConvTranspose2d):
    """A 1-D transposed convolution with the arguments, parameters and values of PyTorch's.

    Its numbers are kept as those of images with one row: ``kernel_size`` is (1, taps).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] = 0,
        output_padding: int | tuple[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int] = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, row("kernel_size", kernel_size, least=1),
            row("stride", stride, least=1), row("padding", padding, least=0),
            row("output_padding", output_padding, least=0), groups, bias,
            row("dilation", dilation, least=1), padding_mode, device, dtype,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Draws the parameters; at the first call, by the constructor, it shapes the weight."""
        shape_weight(self, self.in_channels, self.out_channels, self.kernel_size[1])
        super(ConvTranspose2d, self).reset_parameters()

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        self.check(x)
        size = None if output_size is None else [1, output_size[-1]]
        return self.transpose(x.unsqueeze(2), self.weight.unsqueeze(2), size).squeeze(2)

    def check(self, x: Tensor) -> None:
        super().check(sequence_as_image(x, self.in_channels))


def everywhere(bias: Tensor, output: Tensor) -> Tensor:
    """A bias in the shape that adds it at all positions of an output."""
    return bias.view(-1, *[1] * (output.dim() - 2))


def shape_weight(layer: Conv2d, first: int, second: int, *kernel_size: int) -> None:
    """Gives a layer's weight PyTorch's shape, unless it has it already.

    The constructor of Conv2d makes a weight with as many elements. ``second`` are the channels that
    groups divide.
    """
    shape = (first, second // layer.groups, *kernel_size)
    if tuple(layer.weight.shape) != shape:
        layer.weight = nn.Parameter(layer.weight.detach().reshape(shape))


def sequence_as_image(x: Tensor, channels: int) -> Tensor:
    """The sequence as an image of one row; raises an error if it is no such sequence."""
    if x.dim() != 3 or x.shape[1] != channels or x.shape[2] == 0:
        raise ValueError(
            f"expected input of shape (batch, {channels}, length), but got {tuple(x.shape)}"
        )
    return x.unsqueeze(2)


def row(name: str, value: int | tuple[int], least: int) -> tuple[int, int]:
    """A pair for images of one row, from one int, alone or in a tuple.

    Across the row, a number is the least that it can be.
    """
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) != 1 or not isinstance(values[0], int) or values[0] < least:
        raise ValueError(f"{name} should be an int of at least {least}, but got {value!r}")
    return least, values[0]
