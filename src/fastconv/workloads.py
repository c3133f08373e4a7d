"""Named convolutions to measure or to export: built-in suites, JSON files, or a shape as text.

:mod:`fastconv.bench.models` makes workloads of the layers of torchvision's and timm's networks.
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
from fastconv.problem import Padding, Problem

MOST_ELEMENTS = 2**59  # A larger tensor could have more bytes than a signed 64-bit integer counts.


class WorkloadError(ValueError):
    """A suite, file, shape or model cannot be read; the message says which and why."""


@dataclass(frozen=True)
class Workload:
    """One named convolution; ``padding`` is (top, bottom, left, right), or (rows, columns).

    If it is a layer of a network, ``model`` is the network's name and ``count`` is how many such
    layers the network has; ``first`` of them read the image, which needs no gradient.
    """

    name: str
    about: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    model: str = ""
    count: int = 1
    first: int = 0

    @property
    def sides(self) -> Padding:
        """The padding of each of the four sides."""
        if len(self.padding) == 2:
            rows, columns = self.padding
            return Padding(rows, rows, columns, columns)
        return Padding(*self.padding)

    @property
    def problem(self) -> Problem:
        return Problem.of(
            self.input, self.weight, self.stride, self.sides, self.dilation, self.groups
        )

    @property
    def shape(self) -> str:
        """The workload as text that :func:`parse_shape` reads."""
        parts = ["x".join(map(str, sizes)) for sizes in (self.input, self.weight)]
        for name in ("stride", "padding", "dilation"):
            values, default = getattr(self, name), (0, 0) if name == "padding" else (1, 1)
            if values != default:
                parts.append(f"{name}={','.join(map(str, values))}")
        if self.groups != 1:
            parts.append(f"groups={self.groups}")
        return " ".join(parts)

    def scaled(self, divisor: int) -> Workload:
        """The workload with its input's height and width divided by ``divisor``.

        Both stay large enough for one output element.
        """
        batch, channels, height, width = self.input
        problem, sides = self.problem, self.sides
        least = (
            problem.kernel_extent[0] - sides.top - sides.bottom,
            problem.kernel_extent[1] - sides.left - sides.right,
        )
        size = (max(height // divisor, least[0], 1), max(width // divisor, least[1], 1))
        return replace(self, input=(batch, channels, *size))

    def with_batch(self, batch: int) -> Workload:
        return replace(self, input=(batch, *self.input[1:]))


def _dense(
    name: str, about: str, input: tuple[int, ...], out: int, kernel: tuple[int, int], **more: Any
) -> Workload:
    """A convolution with one group."""
    return Workload(name, about, input, (out, input[1], *kernel), **more)


def _depthwise(
    name: str, about: str, input: tuple[int, ...], kernel: tuple[int, int], stride: int = 1
) -> Workload:
    """A depthwise convolution, padded so that odd kernels keep the size at stride 1."""
    channels, padding = input[1], (kernel[0] // 2, kernel[1] // 2)
    weight = (channels, 1, *kernel)
    return Workload(
        name, about, input, weight, (stride, stride), padding, groups=channels
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

SUITES = {"founding": FOUNDING, "real": REAL, "odd": ODD, "depthwise": DEPTHWISE}


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
    """The workload as values for JSON; only a layer of a model has the keys that concern models."""
    omitted = () if workload.model else ("model", "count", "first")
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
        if name not in (*_LENGTHS, "groups") or name in ("input", "weight"):
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


# How many numbers each key takes. A single number stands for all, except for `input` and `weight`.
_LENGTHS = {"input": (4,), "weight": (4,), "stride": (2,), "padding": (2, 4), "dilation": (2,)}


def _validated(texts: dict[str, Any], sizes: dict[str, Any]) -> Workload:
    """Makes a workload, named by its shape if it has no name.

    Raises a ValueError unless the values describe a convolution.
    """
    values: dict[str, Any] = {
        key: _sizes(key, value) if key in _LENGTHS else _size(key, value)
        for key, value in sizes.items()
    }
    workload = Workload(**texts, **values)
    if workload.first > workload.count:
        raise ValueError(f"first should be at most count, {workload.count}: it is {workload.first}")
    try:
        problem = workload.problem
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    for shape in (problem.input_shape, problem.weight_shape, problem.output_shape):
        if math.prod(shape) > MOST_ELEMENTS:
            raise ValueError(f"a tensor of {'x'.join(map(str, shape))} is too large")
    return workload if workload.name else replace(workload, name=workload.shape)


def _sizes(key: str, value: Any) -> tuple[int, ...]:
    lengths = _LENGTHS[key]
    if lengths != (4,) and not isinstance(value, (list, tuple)):
        value = [value, value]
    if not isinstance(value, (list, tuple)) or len(value) not in lengths:
        allowed = " or ".join(map(str, lengths))
        raise ValueError(f"{key} should be {allowed} whole numbers, but got {value!r}")
    return tuple(_size(key, number) for number in value)


def _size(key: str, value: Any) -> int:
    least = 0 if key in ("padding", "first") else 1
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
