"""Exchanges PyTorch's layers for fastconv's, and back.

A layer stays the same object, with its parameters, hooks and state: only its class changes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from fastconv.modules import PYTORCHS, Conv2d

Model = TypeVar("Model", bound=nn.Module)

# The attribute that marks layers which were PyTorch's before.
_MARK = "_fastconv_exchanged"

# What each class has of its own: a class with the same contents gets new ones.
_OWN = {"__dict__", "__weakref__"}


def reason_to_leave(module: nn.Module) -> str | None:
    """Why a layer cannot be exchanged, if it cannot."""
    if isinstance(module, Conv2d):
        return "fastconv's already"
    if isinstance(module, LazyModuleMixin):
        return "without sizes until the model is called"
    if type_before_parametrizations(module) is not PYTORCHS:
        return f"of another class, {_name(type(module))}"
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return "with a forward of their own"
    return None


def _name(cls: type[nn.Module]) -> str:
    """The name of a class; its module's too, if PyTorch's class is called the same."""
    same = cls.__name__ == PYTORCHS.__name__
    return f"{cls.__module__}.{cls.__name__}" if same else cls.__name__


def exchange(layers: Iterable[nn.Module], back: bool = False) -> None:
    """Makes PyTorch's layers fastconv's, or back."""
    for layer in layers:
        layer.__class__ = _rebased(layer, PYTORCHS if back else Conv2d)


def _rebased(layer: nn.Module, base: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer that is to be of the class ``base``.

    A layer with parametrizations has a class of its own, which PyTorch derives from the layer's and
    gives a property for each parameter that is computed. It is derived anew.
    """
    cls = type(layer)
    if not is_parametrized(layer):
        return base
    contents = {name: value for name, value in vars(cls).items() if name not in _OWN}
    return type(cls.__name__, (base,), contents)


@contextmanager
def exchanged_back(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Makes layers PyTorch's at its end, whatever the block does."""
    try:
        yield
    finally:
        exchange(layers, back=True)


def exchange_for_good(layers: Collection[nn.Module]) -> None:
    """Makes PyTorch's layers fastconv's, until :func:`exchange_marked_back`."""
    exchange(layers)
    for layer in layers:
        vars(layer)[_MARK] = True


def exchange_marked_back(model: nn.Module) -> None:
    """Makes all layers PyTorch's that were exchanged for good.

    Raises:
        ValueError: another class was derived from that of a layer since. No layer changes then.
    """
    marked = {name: one for name, one in model.named_modules() if _MARK in vars(one)}
    ours = {name: one for name, one in marked.items() if isinstance(one, Conv2d)}
    for name, layer in ours.items():
        if type_before_parametrizations(layer) is not Conv2d:
            raise ValueError(
                f"restore() cannot make {name or 'the model'} PyTorch's again: since it was "
                f"exchanged, its class has become {type(layer).__name__}. Restore the model before "
                "it is wrapped"
            )
    exchange(ours.values(), back=True)
    for layer in marked.values():
        del vars(layer)[_MARK]


def copied(model: Any, function: str) -> Any:
    """A copy of the model, for a function of this name.

    Raises:
        RuntimeError: PyTorch cannot copy the model.
    """
    try:
        with torch.inference_mode(False):  # inference tensors could not be written to later
            return copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"{function}() cannot copy the model: {error}. With inplace=True it need not"
        ) from error
