"""``convert`` and ``restore``: all convolutions of a network made fastconv's, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fastconv.fused import Fused
from fastconv.layers import COUNTERPARTS
from fastconv.network.exchange import (
    Model,
    copied,
    exchange_for_good,
    exchange_marked_back,
    kind_of,
    reason_to_leave,
)
from fastconv.network.fusion import FOLDED
from fastconv.network.report import REPORT, attached, left_lines
from fastconv.network.training_graph import detach, has_other_class
from fastconv.ops.devices import BACKENDS
from fastconv.ops.schema import DTYPES

# The attribute of a converted model that has its report.
_REPORT = "fastconv_conversion"

# Layers on the meta device have no data yet. They will have it on another device.
_DEVICES = {*BACKENDS, "meta"}


@dataclass(frozen=True)
class Conversion:
    """What ``fastconv.convert`` has done. Printed, it is a summary.

    Attributes:
        exchanged: names of the layers that are fastconv's now. A layer that the model has under
            several names is there once, by the first.
        left: names of the convolutions that were left as they are, each with the reason.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.LazyConv2d(4, 3))
        >>> report = fastconv.Conversion.of(fastconv.convert(model))
        >>> report.exchanged
        ('0',)
        >>> report.left
        {'1': 'without sizes until the model is called'}
        >>> print(report)
        1 of 2 layers exchanged for fastconv's
        left as they are, without sizes until the model is called: 1
    """

    exchanged: tuple[str, ...]
    left: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> Conversion:
        """The report of a model that ``fastconv.convert`` has returned.

        It is ``model.fastconv_conversion``, with a type that type checkers know.

        Args:
            model: what ``fastconv.convert`` has returned.

        Returns:
            The report.

        Raises:
            ValueError: the model has none.
        """
        return attached(model, _REPORT, cls)

    def __str__(self) -> str:
        total = len(self.exchanged) + len(self.left)
        if not total:
            return "the model has no convolutions that fastconv computes: it was left as it was"
        head = f"{len(self.exchanged)} of {total} layers exchanged for fastconv's"
        return "\n".join((head, *left_lines(self.left)))


def convert(model: Model, *, inplace: bool = False) -> Model:
    """The model with all convolutions of fastconv's kinds computed by it, whatever their speed.

    These are ``torch.nn.Conv1d``, ``Conv2d``, ``Conv3d``, ``ConvTranspose1d``, ``ConvTranspose2d``
    and ``ConvTranspose3d``.

    Nothing is measured or called, so that it takes no example, and no GPU. ``fastconv.optimize``
    exchanges only the layers that gain by it.

    A layer that is exchanged stays the same object, with its parameters, buffers, hooks,
    parametrizations (weight norm, for example) and mode: only its class becomes
    ``fastconv.Conv2d``, or that of its kind. So the state dict, parameters that are tied and layers
    that the model has under several names stay what they are, and an optimizer of the model's
    parameters keeps working with ``inplace=True``.

    These are left as they are, and the report says so:

    - layers of classes that are derived from PyTorch's and change something of it, such as
      ``forward``, and layers whose ``forward`` was replaced. Those of a class that only adds to
      PyTorch's, such as a constructor, are exchanged, and stay instances of their class;
    - lazy layers such as ``torch.nn.LazyConv2d``, until the model has been called once;
    - layers on devices, or with types of weights, that fastconv does not have;
    - layers that TorchScript has compiled.

    Args:
        model: any module, also a single layer, and also one that is wrapped (``torch.compile``,
            DDP, FSDP): its layers are found in the wrapper.
        inplace: change the model itself instead of a copy. Other models that share layers with it
            change as well.

    Returns:
        The model, or the copy, with a ``fastconv.Conversion`` as ``fastconv_conversion``.
        ``fastconv.restore`` makes its layers PyTorch's again.

    Raises:
        TypeError: it is no ``torch.nn.Module``.
        ValueError: the whole model is compiled by TorchScript.
        RuntimeError: the model cannot be copied.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> ours = fastconv.convert(model)
        >>> print(ours)
        Sequential(
          (0): fastconv.Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
        )
        >>> print(ours.fastconv_conversion)
        1 of 1 layers exchanged for fastconv's
        >>> images = torch.randn(2, 3, 9, 9)
        >>> torch.testing.assert_close(ours(images), model(images))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert() takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "convert() takes a model before torch.jit compiles it: in a "
            f"{type(model).__name__}, layers have no class that could be exchanged"
        )
    target: Model = model if inplace else copied(model, "convert")
    layers: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in target.named_modules():
        if not _is_convolution(module):
            continue
        reason = reason_to_leave(module) or _reason_unsupported(module)
        if reason is None:
            layers[name] = module
        else:
            left[name] = reason
    exchange_for_good(layers.values())
    setattr(target, _REPORT, Conversion(tuple(layers), left))
    return target


def _is_convolution(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        names = {pytorchs.__name__ for pytorchs in COUNTERPARTS.values()}
        return str(getattr(module, "original_name", "")) in names
    return kind_of(module) is not None


def _reason_unsupported(module: nn.Module) -> str | None:
    """Why fastconv cannot compute a layer of PyTorch's, if it cannot."""
    for tensor in module.parameters():
        if tensor.device.type not in _DEVICES:
            return f"on {tensor.device}"
        if tensor.dtype not in DTYPES:
            return f"with weights of {tensor.dtype}"
    return None


def restore(model: Model) -> Model:
    """Undoes ``fastconv.optimize`` and ``fastconv.convert``, in place.

    Layers that they have exchanged become PyTorch's again, and no others: a ``fastconv.Conv2d``
    that the model was built with stays. Reports are removed from the model.

    Args:
        model: what ``fastconv.optimize`` or ``fastconv.convert`` has returned, or a copy of it.
            Any other model stays as it is.

    Returns:
        The same model.

    Raises:
        ValueError: the model was fused. It is a copy; the model that it was made of is as it was.
            Or the class of a layer has changed since, by a wrapper. No layer changes then.

    Examples:
        >>> model = fastconv.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)))
        >>> fastconv.restore(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
        )
    """
    fused = [name for name, module in model.named_modules() if _is_fused(module)]
    if fused:
        named = ", ".join(filter(None, fused[:4])) or "it"
        raise ValueError(
            "restore() cannot take a fused model apart: BatchNorms, additions or activations have "
            f"become part of {named}{' ...' if len(fused) > 4 else ''}. It is a copy, and the "
            "model that it was made of is as it was"
        )
    wrapped = [name for name, module in model.named_modules() if has_other_class(module)]
    if wrapped:
        raise ValueError(
            f"restore() cannot give {wrapped[0] or 'the model'} its own class back: since it was "
            "optimized, another one was derived from it. Restore the model before it is wrapped"
        )
    exchange_marked_back(model)
    for module in model.modules():
        detach(module)
    for module in model.modules():
        for report in (REPORT, _REPORT):
            vars(module).pop(report, None)
    return model


def _is_fused(module: nn.Module) -> bool:
    return isinstance(module, Fused) or FOLDED in vars(module)
