"""The convolutions of torchvision's, timm's and the bench's own networks, as workloads.

A network is built without trained weights and run once on tensors without data. Every call of
one of PyTorch's six convolutions is recorded, whichever module or function makes it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from _fastconv_command.choices import BATCH as BATCH
from fastconv.bench import written_networks
from fastconv.bench.console import MissingExtra
from fastconv.workloads import Workload, WorkloadError

IMAGE = (3, 224, 224)  # channels, height and width for networks that do not state them
# Channels, frames, height and width for torchvision's networks for videos: 3-D residual networks,
# and all others.
_RESNETS_VIDEO, _VIDEO = (3, 16, 112, 112), (3, 16, 224, 224)


def workloads(name: str, batch: int = BATCH, side: int | None = None) -> list[Workload]:
    """The distinct convolutions of the model ``name`` (:func:`build`).

    Images have the model's own size, or height and width ``side``; sequences, the length ``side``;
    volumes keep their depth. Raises a WorkloadError if there is no such model, or if it cannot be
    run on a batch of images.
    """
    network, (channels, *size) = build(name)
    return layers(network, name, (batch, channels, *sized(size, side)))


def sized(size: Sequence[int], side: int | None) -> list[int]:
    """The sizes with another ``side``, unless it is None; volumes keep their depth."""
    depth, plane = list(size[:-2]), size[-2:]
    return [*depth, *(plane if side is None else [side] * len(plane))]


def layers(network: nn.Module, name: str, images: Sequence[int]) -> list[Workload]:
    """The distinct convolutions of a training step of the network, in the order of their calls."""
    recorder = _Recorder(network)
    network = network.to("meta").train()  # Some networks have heads that only training uses.
    try:
        with torch.enable_grad(), recorder:
            network(torch.empty(*images, device="meta"))
    except WorkloadError:
        raise
    except Exception as error:  # A network may raise anything for unsuitable images.
        words = (str(error).splitlines() or [type(error).__name__])[0]
        shape = "x".join(map(str, images))
        raise WorkloadError(f"{name} cannot be run on images of {shape}: {words}") from error
    if not recorder.calls:
        raise WorkloadError(f"{name} has no convolution")
    return [
        replace(
            layer, name=f"{name}_{number:02}", about=recorder.paths[layer], model=name,
            count=count, first=recorder.first[layer],
        )
        for number, (layer, count) in enumerate(recorder.calls.items(), start=1)
    ]  # fmt: skip


class _Recorder(TorchFunctionMode):
    """Records calls of :data:`_FUNCTIONS` as workloads without names."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.calls: Counter[Workload] = Counter()
        self.first: Counter[Workload] = Counter()  # calls whose input needs no gradient
        self.paths: dict[Workload, str] = {}  # the path of the first module of each workload
        self._network = network

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            given = dict(zip(_FUNCTIONS[func], args, strict=False)) | kwargs
            self._record(func in _TRANSPOSED, **given)
        return func(*args, **kwargs)

    def _record(
        self,
        transposed: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        output_padding: Any = 0,
    ) -> None:
        kernel = tuple(weight.shape[2:])
        axes = len(kernel)
        dilation = _each(dilation, axes)
        # The input may be a single image, sequence or volume.
        shape = (1,) * (axes + 2 - input.dim()) + tuple(input.shape)
        layer = Workload(
            "", "", shape, tuple(weight.shape), _each(stride, axes),
            _padding(padding, kernel, dilation), dilation, groups,
            transposed=transposed, output_padding=_each(output_padding, axes),
        )  # fmt: skip
        try:
            layer.check()
        except ValueError as error:
            raise WorkloadError(f"{self._path(weight) or 'a layer'}: {error}") from error
        self.calls[layer] += 1
        self.first[layer] += not input.requires_grad
        self.paths.setdefault(layer, self._path(weight))

    def _path(self, weight: Tensor) -> str:
        """The path of the module that has the weight; "" if the weight is computed, not stored."""
        named = self._network.named_parameters()
        return next((path.rpartition(".")[0] for path, one in named if one is weight), "")


# The functions that are recorded, also those of nn.functional, which are the same, and the names of
# their arguments.
_TENSORS = ("input", "weight", "bias", "stride", "padding")
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_PLAIN = (torch.conv1d, torch.conv2d, torch.conv3d)
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(_PLAIN, (*_TENSORS, "dilation", "groups")),
    **dict.fromkeys(_TRANSPOSED, (*_TENSORS, "output_padding", "groups", "dilation")),
}


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """One number for each axis of a value that may be a single number, also in a list."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * axes if len(given) == 1 else given


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """Converts any form of PyTorch's padding argument to a workload's."""
    if padding == "valid":
        return (0,) * len(kernel)
    if padding != "same":
        return _each(padding, len(kernel))
    extents = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    if all(extent % 2 == 0 for extent in extents):
        return tuple(extent // 2 for extent in extents)
    return tuple(side for extent in extents for side in (extent // 2, extent - extent // 2))


def build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Builds one of the bench's own networks, or a model of torchvision, or else of timm.

    Also returns the shape of its input: channels and length, channels, height and width, or
    channels, depth or frames, height and width. The model is built on the CPU, for constructors may
    need values of tensors. Raises a WorkloadError if there is no such model, and a MissingExtra if
    neither library is installed.
    """
    if (written := written_networks.NETWORKS.get(name)) is not None:
        return written.build(), written.input
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # It concerns initial weights.
        return _build(name)


def _build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torchvision = _library("torchvision.models")
    if torchvision is not None and name in torchvision.list_models():
        return _build_torchvision(torchvision, name)
    timm = _library("timm")
    if timm is not None and timm.is_model(name):
        network = timm.create_model(name, pretrained=False)
        return network, tuple(network.default_cfg.get("input_size", IMAGE))
    if torchvision is None and timm is None:
        raise MissingExtra(f"{name} needs torchvision or timm: pip install torchvision")
    known = {one for library in (torchvision, timm) if library for one in library.list_models()}
    raise WorkloadError(
        _unknown_model(
            name, sorted(known | written_networks.NETWORKS.keys()), torchvision is not None,
            timm is not None,
        )
    )  # fmt: skip


def _library(module: str) -> Any:
    """The module, or None if its package is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # RuntimeError: it is built for another PyTorch.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing in (package, module):
            return None
        raise MissingExtra(f"{package} is installed, but cannot be imported: {error}") from error


def _build_torchvision(models: Any, name: str) -> tuple[nn.Module, tuple[int, ...]]:
    untrained = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        untrained["weights_backbone"] = None  # The default would be downloaded.
    return models.get_model(name, **untrained), _input_of(models, name)


def _input_of(models: Any, name: str) -> tuple[int, ...]:
    """The shape of an image or a video that a network of torchvision takes."""
    module = models.get_model_builder(name).__module__
    if module.startswith("torchvision.models.video."):
        return _RESNETS_VIDEO if module.endswith(".resnet") else _VIDEO
    side = 299 if name.endswith("inception_v3") else IMAGE[1]
    return IMAGE[0], side, side


def _unknown_model(name: str, known: Sequence[str], torchvision: bool, timm: bool) -> str:
    """The error message for an unknown name, with the closest known ones."""
    have = {"torchvision": torchvision, "timm": timm}
    where = " or ".join(library for library, there in have.items() if there)
    absent = "".join(f" ({library} is not installed)" for library in have if not have[library])
    close = difflib.get_close_matches(name, known, n=5)
    hint = f"the closest are {', '.join(close)}" if close else "no similar name is known"
    return f"no model {name!r} in {where}{absent}: {hint}"
