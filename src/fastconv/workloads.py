"""Named convolutions to measure or to export: built-in suites, JSON files, or a shape as text.

:mod:`fastconv.bench.models` makes workloads of the layers of whole networks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from _fastconv_command.choices import SHAPE_SYNTAX
from fastconv import files
from fastconv.problem import Problem, check_shapes, check_transposed

MOST_ELEMENTS = 2**59  # A larger tensor could have more bytes than a signed 64-bit integer counts.


class WorkloadError(ValueError):
    """A suite, file, shape or model cannot be read; the message says which and why."""


@dataclass(frozen=True)
class Workload:
    """One named convolution of sequences, images or volumes, in the user's sizes.

    ``input`` is (batch, channels, length), (batch, channels, height, width), or with a depth before
    the height; ``weight`` is as PyTorch has it: of a transposed convolution, the input's channels
    come first. ``padding`` has one number for each axis, or two: (before, after), (top, bottom,
    left, right), or (front, back, top, bottom, left, right). Without numbers, strides and dilations
    are 1, paddings 0.

    If it is a layer of a network, ``model`` is the network's name and ``count`` is how many such
    layers the network has; ``first`` of them read the image, which needs no gradient.
    """

    name: str
    about: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    model: str = ""
    count: int = 1
    first: int = 0
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in _DEFAULTS.items():
            if not getattr(self, name):
                object.__setattr__(self, name, (value,) * self.axes)

    @property
    def axes(self) -> int:
        """How many axes it convolves along: 1 for sequences, 2 for images, 3 for volumes."""
        return len(self.input) - 2

    @property
    def function(self) -> str:
        """The name of the function that computes it, in fastconv and torch.nn.functional."""
        return f"conv{'_transpose' if self.transposed else ''}{self.axes}d"

    @property
    def sides(self) -> tuple[int, ...]:
        """The padding before and after each axis."""
        if len(self.padding) == 2 * self.axes:
            return self.padding
        return tuple(side for both in self.padding for side in (both, both))

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the output."""
        problem = self.problem
        shape = problem.input_shape if self.transposed else problem.output_shape
        return (*shape[:2], *shape[-self.axes :])

    @property
    def problem(self) -> Problem:
        """The convolution of images or volumes that kernels compute it by.

        Sequences are images of one row. A transposed convolution is the problem's input gradient.
        """
        input, weight = _as_images(self.input), _as_images(self.weight)
        axes = max(self.axes, 2)
        stride, dilation = ((1, *one)[-axes:] for one in (self.stride, self.dilation))
        sides = (0, 0, *self.sides)[-2 * axes :]
        if not self.transposed:
            return Problem.of(input, weight, stride, sides, dilation, self.groups)
        more = (0, *self.output_padding)[-axes:]
        return Problem.of_transposed(input, weight, more, stride, sides, dilation, self.groups)

    @property
    def shape(self) -> str:
        """The workload as text that :func:`parse_shape` reads."""
        parts = ["x".join(map(str, sizes)) for sizes in (self.input, self.weight)]
        parts += ["transposed"] * self.transposed
        for name, default in _DEFAULTS.items():
            values = getattr(self, name)
            if values != (default,) * self.axes:
                parts.append(f"{name}={','.join(map(str, values))}")
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
        return " ".join(parts)

    def scaled(self, divisor: int) -> Workload:
        """The workload with its input's sizes along all axes divided by ``divisor``.

        They stay large enough for one output element.
        """
        batch, channels, *sizes = self.input
        least = (self._least_size(axis) for axis in range(self.axes))
        size = (max(size // divisor, one) for size, one in zip(sizes, least, strict=True))
        return replace(self, input=(batch, channels, *size))

    def _least_size(self, axis: int) -> int:
        """The input's least size along an axis that gives an output element."""
        padding = sum(self.sides[2 * axis : 2 * axis + 2])
        extent = self.dilation[axis] * (self.weight[2 + axis] - 1) + 1
        if not self.transposed:
            return max(extent - padding, 1)
        missing = padding + 1 - extent - self.output_padding[axis]
        return 1 + max(0, -(-missing // self.stride[axis]))

    def with_batch(self, batch: int) -> Workload:
        return replace(self, input=(batch, *self.input[1:]))

    def check(self) -> None:
        """Raises PyTorch's error if the sizes do not fit together, or says what is not taken."""
        if not self.transposed:
            if any(self.output_padding):
                raise ValueError("output_padding applies only to a transposed convolution")
            check_shapes(
                self.input, self.weight, self.stride, self.sides, self.dilation, self.groups,
                axes=self.axes,
            )  # fmt: skip
            return
        check_transposed(
            self.input, self.weight, self.output_padding, self.stride, self.sides, self.dilation,
            self.groups, axes=self.axes,
        )  # fmt: skip
        if any(more >= step for more, step in zip(self.output_padding, self.stride, strict=True)):
            raise ValueError(
                "output_padding should be below the stride, but got "
                f"output_padding={self.output_padding} and stride={self.stride}"
            )


# The numbers that have one value for each axis, and their defaults, in the order of a shape's text.
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


def _as_images(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor of sequences as one of images with one row."""
    return shape if len(shape) > 3 else (*shape[:2], 1, *shape[2:])


def workload_of(problem: Problem, axes: int | None = None, transposed: bool = False) -> Workload:
    """The layer whose problem this is, named by its shape; by default of the problem's own axes.

    With one axis, the problem should have images and kernels of one row.
    """
    along = problem.axes if axes is None else problem.axes[-axes:]
    before, after = (tuple(one.before for one in along), tuple(one.after for one in along))
    sides = tuple(side for one in along for side in (one.before, one.after))
    more = tuple((one.padded_size - one.kernel_extent) % one.stride for one in along)
    batch, channels, *size = problem.output_shape if transposed else problem.input_shape
    made = Workload(
        "", "", (batch, channels, *size[-len(along) :]),
        (*problem.weight_shape[:2], *problem.weight_shape[-len(along) :]),
        tuple(one.stride for one in along), before if before == after else sides,
        tuple(one.dilation for one in along), problem.groups,
        transposed=transposed, output_padding=more if transposed else (),
    )  # fmt: skip
    return replace(made, name=made.shape)


def _dense(
    name: str, about: str, input: tuple[int, ...], out: int, kernel: tuple[int, ...], **more: Any
) -> Workload:
    """A convolution with one group."""
    return Workload(name, about, input, (out, input[1], *kernel), **more)


def _transposed(
    name: str, about: str, input: tuple[int, ...], out: int, kernel: tuple[int, ...], **more: Any
) -> Workload:
    """A transposed convolution."""
    weight = (input[1], out // more.get("groups", 1), *kernel)
    return Workload(name, about, input, weight, transposed=True, **more)


def _depthwise(
    name: str, about: str, input: tuple[int, ...], kernel: tuple[int, ...], stride: int = 1
) -> Workload:
    """A depthwise convolution, padded so that odd kernels keep the size at stride 1."""
    channels, padding = input[1], tuple(taps // 2 for taps in kernel)
    weight = (channels, 1, *kernel)
    return Workload(
        name, about, input, weight, (stride,) * len(kernel), padding, groups=channels
    )  # fmt: skip


FOUNDING = (
    _dense("dilated5x9", "asymmetric, dilated kernel", (8, 32, 512, 512), 64, (5, 9),
           padding=(2, 4), dilation=(2, 3)),
    _dense("asym5x9", "asymmetric kernel", (8, 32, 512, 512), 64, (5, 9)),
    _dense("square3x3", "large image, few channels", (16, 16, 1024, 1024), 128, (3, 3)),
)  # fmt: skip

_ASPP = "DeepLabV3 ASPP branch, rate"
_STRIP = "SegNeXt-B strip convolution"

REAL = (
    _dense("alexnet11x11", "AlexNet's first layer", (256, 3, 224, 224), 96, (11, 11),
           stride=(4, 4), padding=(2, 2)),
    _dense("resnet50_stem", "ResNet-50's first layer", (64, 3, 224, 224), 64, (7, 7),
           stride=(2, 2), padding=(3, 3)),
    _dense("resnet3x3", "ResNet-50 stage 2", (64, 128, 56, 56), 128, (3, 3), padding=(1, 1)),
    _dense("resnet50_down", "ResNet-50 stage 2, first block", (64, 128, 56, 56), 128, (3, 3),
           stride=(2, 2), padding=(1, 1)),
    _dense("resnet50_last", "ResNet-50 stage 4", (64, 512, 7, 7), 512, (3, 3), padding=(1, 1)),
    _dense("resnet50_expand", "ResNet-50 stage 1, 1x1", (64, 64, 56, 56), 256, (1, 1)),
    _dense("pointwise", "1x1 at full resolution", (16, 64, 512, 512), 128, (1, 1)),
    _dense("convnext_stem", "ConvNeXt's patches", (64, 3, 224, 224), 96, (4, 4), stride=(4, 4)),
    _depthwise("dw7x7", "ConvNeXt block", (32, 384, 56, 56), (7, 7)),
    _depthwise("convnext_stage1", "ConvNeXt-T stage 1", (64, 96, 56, 56), (7, 7)),
    _depthwise("convnext_stage2", "ConvNeXt-T stage 2", (64, 192, 28, 28), (7, 7)),
    _depthwise("convnext_stage3", "ConvNeXt-T stage 3", (64, 384, 14, 14), (7, 7)),
    _depthwise("convnext_stage4", "ConvNeXt-T stage 4", (64, 768, 7, 7), (7, 7)),
    _depthwise("replknet31", "RepLKNet-31B stage 1", (16, 128, 56, 56), (31, 31)),
    _depthwise("replknet29", "RepLKNet-31B stage 2", (16, 256, 28, 28), (29, 29)),
    _depthwise("replknet13", "RepLKNet-31B stage 4", (32, 1024, 7, 7), (13, 13)),
    _depthwise("efficientnet5x5", "EfficientNet-B0 stage 3", (64, 240, 28, 28), (5, 5)),
    _depthwise("efficientnet_down", "EfficientNet-B0 stage 6", (64, 672, 14, 14), (5, 5), 2),
    _depthwise("efficientnet3x3", "EfficientNet-B0 stage 1", (64, 32, 112, 112), (3, 3)),
    _dense("inception1x7", "Inception-v3 at 17x17", (64, 192, 17, 17), 192, (1, 7),
           padding=(0, 3)),
    _dense("inception7x1", "Inception-v3 at 17x17", (64, 192, 17, 17), 192, (7, 1),
           padding=(3, 0)),
    _dense("inception1x3", "Inception-v3 at 8x8", (64, 384, 8, 8), 384, (1, 3), padding=(0, 1)),
    _dense("aspp3x3d6", f"{_ASPP} 6", (8, 256, 64, 64), 256, (3, 3),
           padding=(6, 6), dilation=(6, 6)),
    _dense("aspp3x3d12", f"{_ASPP} 12", (8, 256, 64, 64), 256, (3, 3),
           padding=(12, 12), dilation=(12, 12)),
    _dense("aspp3x3d18", f"{_ASPP} 18", (8, 256, 64, 64), 256, (3, 3),
           padding=(18, 18), dilation=(18, 18)),
    _dense("aspp2048", f"{_ASPP} 12, of ResNet's 2048 channels", (4, 2048, 33, 33), 256, (3, 3),
           padding=(12, 12), dilation=(12, 12)),
    _dense("unet_first", "U-Net's first layer", (4, 1, 572, 572), 64, (3, 3)),
    _dense("unet_down", "U-Net, second layer", (4, 64, 570, 570), 64, (3, 3)),
    _dense("unet_up", "U-Net, after the last skip connection", (4, 128, 392, 392), 64, (3, 3)),
    _depthwise("strip1x7dw", _STRIP, (8, 128, 64, 64), (1, 7)),
    _depthwise("strip7x1dw", _STRIP, (8, 128, 64, 64), (7, 1)),
    _depthwise("strip1x11dw", _STRIP, (8, 128, 64, 64), (1, 11)),
    _depthwise("strip11x1dw", _STRIP, (8, 128, 64, 64), (11, 1)),
    _depthwise("strip1x21dw", "SegNeXt strip convolution", (8, 256, 128, 128), (1, 21)),
    _depthwise("strip21x1dw", "SegNeXt strip convolution", (8, 256, 128, 128), (21, 1)),
    _dense("edsr_body", "EDSR, full-HD to 4K by 2", (1, 64, 1080, 1920), 64, (3, 3),
           padding=(1, 1)),
    _dense("srcnn9x9", "SRCNN's first layer", (4, 1, 512, 512), 64, (9, 9), padding=(4, 4)),
    _dense("srresnet9x9", "SRResNet's last layer", (4, 64, 384, 384), 3, (9, 9), padding=(4, 4)),
    _dense("flownet7x7", "FlowNet's first layer", (8, 6, 384, 512), 64, (7, 7),
           stride=(2, 2), padding=(3, 3)),
    _dense("raft1x5", "RAFT's recurrent unit", (8, 384, 55, 128), 128, (1, 5), padding=(0, 2)),
    _dense("raft5x1", "RAFT's recurrent unit", (8, 384, 55, 128), 128, (5, 1), padding=(2, 0)),
    _dense("pwcnet_d4", "PWC-Net's context network", (8, 128, 112, 256), 128, (3, 3),
           padding=(4, 4), dilation=(4, 4)),
    _dense("psmnet_d2", "PSMNet's features, stereo", (8, 128, 64, 128), 128, (3, 3),
           padding=(2, 2), dilation=(2, 2)),
    _dense("deepspeech_first", "Deep Speech 2, spectrogram", (32, 1, 161, 400), 32, (41, 11),
           stride=(2, 2), padding=(20, 5)),
    _dense("deepspeech_second", "Deep Speech 2, spectrogram", (32, 32, 81, 200), 32, (21, 11),
           stride=(2, 1), padding=(10, 5)),
    _dense("keyword20x8", "keyword spotting, spectrogram", (128, 1, 98, 40), 64, (20, 8)),
)  # fmt: skip

ODD = (
    _dense("asym5x7", "asymmetric input and kernel", (8, 64, 512, 256), 128, (5, 7)),
    _dense("spectrogram3x9", "wide kernel, wide image", (16, 32, 128, 1024), 64, (3, 9),
           padding=(1, 4)),
    _dense("spectrogram9x3", "its transpose", (16, 32, 1024, 128), 64, (9, 3), padding=(4, 1)),
    _dense("spectrogram3x9s", "with a stride in time", (16, 32, 128, 1024), 64, (3, 9),
           stride=(1, 2), padding=(1, 4)),
    _dense("causal3x9", "padded on the past's side only", (16, 32, 128, 512), 64, (3, 9),
           padding=(1, 1, 8, 0)),
    _dense("anisotropic_d1x8", "dilated along one axis", (8, 64, 256, 256), 64, (3, 3),
           padding=(1, 8), dilation=(1, 8)),
    _dense("strided_dilated", "stride and dilation at once", (8, 64, 256, 256), 64, (3, 3),
           stride=(2, 2), padding=(3, 3), dilation=(3, 3)),
    _dense("odd_sizes", "prime sizes, nothing aligned", (7, 31, 251, 241), 61, (3, 5),
           padding=(1, 2)),
    _dense("few_channels", "three channels to three", (16, 3, 512, 512), 3, (7, 7),
           padding=(3, 3)),
    _dense("even4x6", "even kernel", (8, 48, 256, 256), 48, (4, 6)),
    Workload("grouped3x5", "groups of 8 channels", (16, 128, 128, 128), (128, 8, 3, 5),
             padding=(1, 2), groups=16),
    _depthwise("dw3x15", "asymmetric depthwise", (16, 192, 96, 96), (3, 15)),
)  # fmt: skip

DEPTHWISE = tuple(one for one in REAL if one.groups == one.input[1] > 1)

_KERNELBENCH = "KernelBench level 1, problem"

SEQUENCE = (
    _dense("kb67", f"{_KERNELBENCH} 67", (32, 64, 131072), 128, (3,)),
    _dense("kb76", f"{_KERNELBENCH} 76: stride and dilation", (64, 64, 524280), 128, (3,),
           stride=(3,), dilation=(4,)),
    Workload("shortconv4", "short convolution of a language model", (1, 12288, 16384),
             (12288, 1, 4), padding=(3,), groups=12288),
    Workload("mamba4", "Mamba's convolution", (8, 4096, 2048), (4096, 1, 4),
             padding=(3,), groups=4096),
    Workload("wav2vec_pos", "wav2vec 2.0's positional convolution", (16, 768, 499),
             (768, 48, 128), padding=(64,), groups=16),
    _dense("wav2vec_s2", "wav2vec 2.0's third layer", (16, 512, 15999), 512, (3,), stride=(2,)),
    _dense("whisper_conv1", "Whisper's first layer, of the size base", (16, 80, 3000), 512, (3,),
           padding=(1,)),
    _dense("whisper_conv2", "Whisper's second layer, of the size base", (16, 512, 3000), 512, (3,),
           stride=(2,), padding=(1,)),
    _dense("hifigan_k11", "HiFi-GAN's widest kernel", (16, 128, 8192), 128, (11,),
           padding=(25,), dilation=(5,)),
    _dense("hifigan_k3_32", "HiFi-GAN's last stage", (16, 32, 65536), 32, (3,),
           padding=(3,), dilation=(3,)),
)  # fmt: skip

TRANSPOSED = (
    _transposed("kb64", f"{_KERNELBENCH} 64", (64, 128, 65536), 128, (3,)),
    _transposed("kb74", f"{_KERNELBENCH} 74: dilation", (32, 32, 131072), 64, (5,),
                dilation=(3,)),
    _transposed("kb79", f"{_KERNELBENCH} 79: stride and dilation", (16, 32, 131072), 64, (3,),
                stride=(2,), padding=(1,), dilation=(2,)),
    _transposed("kb57", f"{_KERNELBENCH} 57", (8, 64, 1024, 1024), 64, (3, 3)),
    _transposed("kb65", f"{_KERNELBENCH} 65: asymmetric kernel", (8, 64, 512, 512), 64, (3, 7)),
    _transposed("kb69", f"{_KERNELBENCH} 69: asymmetric kernel and image", (64, 64, 128, 256), 128,
                (3, 5)),
    _transposed("kb71", f"{_KERNELBENCH} 71: asymmetric image", (8, 32, 512, 1024), 32, (3, 3)),
    _transposed("kb75", f"{_KERNELBENCH} 75: everything, with groups", (16, 32, 128, 256), 64,
                (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=4),
    _transposed("kb78", f"{_KERNELBENCH} 78: asymmetric padding", (8, 32, 512, 1024), 32, (3, 7),
                padding=(1, 3)),
    _transposed("kb81", f"{_KERNELBENCH} 81: stride and dilation", (16, 32, 64, 128), 64, (3, 3),
                stride=(5, 5), padding=(1, 1), dilation=(2, 2)),
    _transposed("hifigan_up16", "HiFi-GAN's first upsampling", (16, 512, 128), 256, (16,),
                stride=(8,), padding=(4,)),
    _transposed("hifigan_up4", "HiFi-GAN's last upsampling", (16, 64, 32768), 32, (4,),
                stride=(2,), padding=(1,)),
    _transposed("oobleck_up20", "decoder of Stable Audio's autoencoder", (1, 2048, 215), 1024,
                (20,), stride=(10,), padding=(5,)),
    _transposed("unet_up2", "U-Net's upsampling", (16, 256, 64, 64), 128, (2, 2), stride=(2, 2)),
    _transposed("dcgan_up4", "upsampling of DCGAN", (64, 256, 32, 32), 128, (4, 4),
                stride=(2, 2), padding=(1, 1)),
    _transposed("fcn_up_dw", "FCN's upsampling, depthwise", (8, 21, 32, 32), 21, (64, 64),
                stride=(32, 32), padding=(16, 16), groups=21),
)  # fmt: skip

VIDEO = (
    _dense("kb66", f"{_KERNELBENCH} 66: asymmetric kernel and volume", (8, 3, 16, 128, 128), 64,
           (3, 5, 7)),
    _dense("r3d18_stem", "R3D-18's first layer", (8, 3, 16, 112, 112), 64, (3, 7, 7),
           stride=(1, 2, 2), padding=(1, 3, 3)),
    _dense("r3d18_2", "R3D-18's first stage", (8, 64, 16, 56, 56), 64, (3, 3, 3),
           padding=(1, 1, 1)),
    _dense("r2plus1d_t", "R(2+1)D-18's first stage, along time", (8, 144, 16, 56, 56), 64,
           (3, 1, 1), padding=(1, 0, 0)),
    _dense("videovae_96", "causal decoder of a video autoencoder, its past given",
           (1, 96, 6, 480, 832), 96, (3, 3, 3), padding=(0, 1, 1)),
    _dense("patch3d", "Video Swin's patches", (8, 3, 32, 224, 224), 96, (2, 4, 4),
           stride=(2, 4, 4)),
    _depthwise("x3d_dw", "X3D-M's third stage", (8, 108, 16, 40, 40), (3, 3, 3)),
)  # fmt: skip

VOLUME = (
    _dense("kb54", f"{_KERNELBENCH} 54", (16, 3, 64, 64, 64), 64, (3, 3, 3)),
    _dense("kb59", f"{_KERNELBENCH} 59: a kernel without depth, along the last axis",
           (16, 3, 256, 256, 10), 64, (3, 3, 1)),
    _dense("kb60", f"{_KERNELBENCH} 60: asymmetric kernel", (16, 3, 64, 64, 64), 64, (3, 5, 7)),
    _transposed("kb58", f"{_KERNELBENCH} 58: asymmetric kernel and volume", (16, 32, 16, 32, 64),
                16, (3, 5, 7)),
    _transposed("kb61", f"{_KERNELBENCH} 61", (8, 48, 64, 64, 64), 48, (3, 3, 3)),
    _transposed("kb68", f"{_KERNELBENCH} 68: asymmetric kernel", (16, 32, 64, 64, 64), 64,
                (3, 5, 5)),
    _transposed("kb70", f"{_KERNELBENCH} 70", (8, 48, 96, 96, 96), 24, (3, 3, 3)),
    _transposed("kb72", f"{_KERNELBENCH} 72: everything, with groups", (8, 32, 12, 24, 48), 32,
                (3, 5, 7), stride=(2, 2, 2), padding=(1, 2, 3), output_padding=(1, 1, 1),
                groups=4),
    _transposed("kb73", f"{_KERNELBENCH} 73: stride", (4, 32, 32, 64, 128), 32, (3, 3, 3),
                stride=(2, 2, 2), padding=(1, 1, 1)),
    _transposed("kb77", f"{_KERNELBENCH} 77: stride and dilation", (16, 32, 16, 32, 32), 64,
                (3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), dilation=(2, 2, 2)),
    _dense("unet3d_32", "3-D U-Net's top level", (2, 32, 128, 128, 128), 32, (3, 3, 3),
           padding=(1, 1, 1)),
    _transposed("unet3d_up2", "3-D U-Net's upsampling", (2, 64, 64, 64, 64), 32, (2, 2, 2),
                stride=(2, 2, 2)),
)  # fmt: skip

CPU = (
    _dense("cpu_tiny", "so small that the call itself takes long", (1, 16, 16, 16), 16, (3, 3),
           padding=(1, 1)),
    _dense("cpu_asym5x9", "asymmetric kernel", (2, 32, 128, 128), 64, (5, 9)),
    _dense("cpu_stem", "ResNet's first layer", (1, 3, 224, 224), 64, (7, 7), stride=(2, 2),
           padding=(3, 3)),
    _dense("cpu_56", "ResNet-18's first stage", (1, 64, 56, 56), 64, (3, 3), padding=(1, 1)),
    _dense("cpu_28", "ResNet-18's second stage, batch 8", (8, 128, 28, 28), 128, (3, 3),
           padding=(1, 1)),
    _dense("cpu_14_s2", "ResNet-18, between its stages", (1, 256, 14, 14), 512, (3, 3),
           stride=(2, 2), padding=(1, 1)),
    _dense("cpu_7", "ResNet-18's last stage, batch 8", (8, 512, 7, 7), 512, (3, 3),
           padding=(1, 1)),
    _dense("cpu_wider", "ResNet-50, 1x1", (1, 64, 56, 56), 256, (1, 1)),
    _dense("cpu_narrower", "ResNet-50, 1x1, batch 8", (8, 512, 28, 28), 128, (1, 1)),
    _dense("cpu_1x1_s2", "ResNet-50's shortcut", (1, 256, 56, 56), 512, (1, 1), stride=(2, 2)),
    _dense("cpu_mobile", "MobileNet-v2, 1x1", (1, 144, 56, 56), 24, (1, 1)),
    _depthwise("cpu_dw3", "MobileNet-v2's first planes", (1, 144, 56, 56), (3, 3)),
    _depthwise("cpu_dw3_7", "MobileNet-v2's last planes, batch 8", (8, 960, 7, 7), (3, 3)),
    _depthwise("cpu_dw3_s2", "MobileNet-v2, with stride", (1, 96, 112, 112), (3, 3), 2),
    _depthwise("cpu_dw5", "EfficientNet-B0", (1, 480, 14, 14), (5, 5)),
    _depthwise("cpu_dw7", "ConvNeXt-T", (1, 384, 14, 14), (7, 7)),
    _depthwise("cpu_dw21x1", "SegNeXt's strip", (1, 64, 64, 64), (21, 1)),
    _dense("cpu_13x13", "large kernel", (2, 32, 56, 56), 32, (13, 13), padding=(6, 6)),
    _dense("cpu_dilated", "DeepLabV3's dilation", (1, 128, 28, 28), 128, (3, 3),
           padding=(4, 4), dilation=(4, 4)),
)  # fmt: skip

SUITES = {
    "founding": FOUNDING,
    "real": REAL,
    "odd": ODD,
    "depthwise": DEPTHWISE,
    "sequence": SEQUENCE,
    "transposed": TRANSPOSED,
    "video": VIDEO,
    "volume": VOLUME,
    "cpu": CPU,
}


def suite(name: str) -> Sequence[Workload]:
    """The workloads of a built-in suite, or of the JSON file at the path ``name``."""
    if name in SUITES:
        return SUITES[name]
    try:
        entries = files.read_json(Path(name))
    except files.FileError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise WorkloadError(
            f"no suite {name!r}: it should be one of {', '.join(SUITES)}, or a JSON file"
        ) from error
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f"{name} should hold a JSON list of at least one workload")
    return [_entry(entry, f"{name}, workload {at}") for at, entry in enumerate(entries, start=1)]


def _entry(entry: Any, where: str) -> Workload:
    try:
        return from_dict(entry)
    except ValueError as error:
        raise WorkloadError(f"{where}: {error}") from error


def from_dict(entry: Any) -> Workload:
    """Makes a workload of its JSON, where all keys but ``input`` and ``weight`` are optional.

    Raises a ValueError that says what is wrong with the entry.
    """
    known = [field.name for field in fields(Workload)]
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object with input and weight, but got {entry!r}")
    if unknown := entry.keys() - set(known):
        raise ValueError(f"unknown keys {sorted(unknown)}; a workload has {', '.join(known)}")
    if missing := {"input", "weight"} - entry.keys():
        raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
    texts = {name: entry.get(name, "") for name in ("name", "about", "model")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} should be text, but got {text!r}")
    return _validated(texts, {name: entry[name] for name in entry if name not in texts})


def to_dict(workload: Workload) -> dict[str, Any]:
    """The workload as values for JSON.

    Only a layer of a model has the keys that concern models, and only a transposed convolution
    those that concern it.
    """
    omitted: tuple[str, ...] = () if workload.model else ("model", "count", "first")
    omitted += () if workload.transposed else ("transposed", "output_padding")
    return {name: value for name, value in asdict(workload).items() if name not in omitted}


def parse_shape(text: str) -> Workload:
    """The workload that :data:`SHAPE_SYNTAX` describes."""
    try:
        return _validated({"name": "", "about": ""}, _read_shape(text))
    except ValueError as error:
        raise WorkloadError(
            f"malformed shape {text!r} ({error}): expected {SHAPE_SYNTAX}"
        ) from error


def _read_shape(text: str) -> dict[str, Any]:
    words = text.split()
    if len(words) < 2:
        raise ValueError("the sizes of an input and of a weight are needed")
    values: dict[str, Any] = {"input": _numbers(words[0], "x"), "weight": _numbers(words[1], "x")}
    for option in words[2:]:
        name, _, value = option.partition("=")
        if option == "transposed":
            values["transposed"] = True
            continue
        if name == "transposed":
            raise ValueError(f"transposed takes no value, but got {option!r}")
        if name not in (*_DEFAULTS, "groups"):
            raise ValueError(f"unknown option {name!r}")
        if not value:
            raise ValueError(f"{name} has no value")
        if name in values:
            raise ValueError(f"{name} is given twice")
        numbers = _numbers(value, ",")
        values[name] = numbers[0] if len(numbers) == 1 else numbers
    return values


def _numbers(text: str, separator: str) -> list[int]:
    parts = text.split(separator)
    for part in parts:
        if not re.fullmatch("-?[0-9]{1,30}", part):
            where = "" if part == text else f" in {text!r}"
            raise ValueError(f"{part!r}{where} is not a whole number")
    return [int(part) for part in parts]


def _validated(texts: dict[str, Any], sizes: dict[str, Any]) -> Workload:
    """Makes a workload, named by its shape if it has no name.

    Raises a ValueError unless the values describe a convolution.
    """
    input = _sizes("input", sizes["input"], (3, 4, 5))
    axes = len(input) - 2
    transposed = sizes.get("transposed", False)
    if not isinstance(transposed, bool):
        raise ValueError(f"transposed should be true or false, but got {transposed!r}")
    values: dict[str, Any] = {"input": input, "transposed": transposed}
    values["weight"] = _sizes("weight", sizes["weight"], (axes + 2,))
    for key in sizes.keys() - values.keys():
        if key in _DEFAULTS:
            lengths = (axes, 2 * axes) if key == "padding" else (axes,)
            values[key] = _sizes(key, sizes[key], lengths, axes)
        else:
            values[key] = _size(key, sizes[key])
    workload = Workload(**texts, **values)
    if workload.first > workload.count:
        raise ValueError(f"first should be at most count, {workload.count}: it is {workload.first}")
    try:
        workload.check()
        output = workload.output
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    for shape in (workload.input, workload.weight, output):
        if math.prod(shape) > MOST_ELEMENTS:
            raise ValueError(f"a tensor of {'x'.join(map(str, shape))} is too large")
    return workload if workload.name else replace(workload, name=workload.shape)


def _sizes(key: str, value: Any, lengths: tuple[int, ...], repeat: int = 0) -> tuple[int, ...]:
    """One of ``lengths`` numbers; with ``repeat``, a single number stands for so many."""
    if repeat and not isinstance(value, (list, tuple)):
        value = [value] * repeat
    if not isinstance(value, (list, tuple)) or len(value) not in lengths:
        allowed = " or ".join(map(str, lengths))
        plural = "" if lengths == (1,) else "s"
        raise ValueError(f"{key} should be {allowed} whole number{plural}, but got {value!r}")
    return tuple(_size(key, number) for number in value)


def _size(key: str, value: Any) -> int:
    least = 0 if key in ("padding", "output_padding", "first") else 1
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{key} takes whole numbers from {least} to 2**63 - 1, but got {value!r}")
    return value


def unique(workloads: Iterable[Workload]) -> list[Workload]:
    """Removes repeated workloads, keeping the order.

    Raises a WorkloadError if two different workloads have the same name.
    """
    found = list(dict.fromkeys(workloads))
    named: dict[str, Workload] = {}
    for workload in found:
        if (other := named.setdefault(workload.name, workload)) is not workload:
            raise WorkloadError(
                f"two workloads are called {workload.name!r}: {other.shape} and {workload.shape}"
            )
    return found
