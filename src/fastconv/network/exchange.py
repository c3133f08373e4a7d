"""Exchanges PyTorch's layers for fastconv's, and back.

A layer stays the same object, with its parameters, hooks and state: only its class changes.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import get_annotations, getmro
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from fastconv.layers import COUNTERPARTS, EXCHANGED

Model = TypeVar("Model", bound=nn.Module)

# The attribute that marks layers which were PyTorch's before.
_MARK = "_fastconv_exchanged"

# What each class has of its own: a class with the same contents gets new ones.
_OWN = {"__dict__", "__weakref__"}

# What a class derived from PyTorch's may have in place of that one's: a call does not depend on it.
_HARMLESS = {
    "__module__", "__qualname__", "__doc__", "__init__", "__annotations__", "__annotate__",
    "__annotate_func__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__",
    "__parameters__", "__orig_bases__", "__constants__", "extra_repr", "__repr__", "_get_name",
    "reset_parameters",
}  # fmt: skip


class Kind(NamedTuple):
    """The two classes that a layer may have."""

    ours: type[nn.Module]
    pytorchs: type[nn.Module]


_KINDS = [Kind(*classes) for classes in COUNTERPARTS.items()]


def kind_of(module: nn.Module) -> Kind | None:
    """Which of PyTorch's convolutions a module is, if it is one that fastconv computes."""
    return next((kind for kind in _KINDS if isinstance(module, kind.pytorchs)), None)


def known_kind(layer: nn.Module) -> Kind:
    """Which of PyTorch's convolutions a layer is.

    Raises:
        TypeError: it is none.
    """
    kind = kind_of(layer)
    if kind is None:
        raise TypeError(f"{type(layer).__name__} is none of the convolutions that can be exchanged")
    return kind


def reason_to_leave(module: nn.Module) -> str | None:
    """Why a convolution cannot be exchanged, if it cannot."""
    kind = kind_of(module)
    if kind is None:
        return f"of another class, {type(module).__name__}"
    if isinstance(module, kind.ours):
        return "fastconv's already"
    if isinstance(module, LazyModuleMixin):
        return "without sizes until the model is called"
    if type_before_parametrizations(module) is not kind.pytorchs and not is_exact(module):
        return f"of another class, {_name(type(module), kind)}"
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return "with a forward of their own"
    return None


def is_exact(module: nn.Module) -> bool:
    """Whether the class of a convolution computes just what PyTorch's or fastconv's does.

    It is one of these, or derived from one, and only adds to it: a constructor of its own, say.
    """
    kind, own = known_kind(module), type(module)
    if own in kind or EXCHANGED in vars(own):
        return True
    plain = getmro(kind.pytorchs)
    added = [cls for cls in getmro(own) if cls not in plain]
    known = {name for cls in getmro(kind.ours) for name in vars(cls)}
    known |= {name for cls in plain for name in get_annotations(cls)}
    known |= vars(module).keys() | module._parameters.keys() | module._buffers.keys()
    defined = {name for cls in added for name in vars(cls)} - _HARMLESS
    return type(own) is type and "__slots__" not in defined and known.isdisjoint(defined)


def _name(cls: type[nn.Module], kind: Kind) -> str:
    """The name of a class; its module's too, if PyTorch's class is called the same."""
    same = cls.__name__ == kind.pytorchs.__name__
    return f"{cls.__module__}.{cls.__name__}" if same else cls.__name__


def exchange(layers: Iterable[nn.Module], back: bool = False) -> None:
    """Makes PyTorch's layers fastconv's, or back."""
    for layer in layers:
        layer.__class__ = _rebased(layer, _pytorchs(layer) if back else _ours(layer))


def _ours(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer, without parametrizations, when it is fastconv's."""
    kind, own = known_kind(layer), type_before_parametrizations(layer)
    if own is kind.pytorchs:
        return kind.ours
    return own if isinstance(layer, kind.ours) else _derived(own)


def _pytorchs(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer, without parametrizations, when it is PyTorch's."""
    kind, own = known_kind(layer), type_before_parametrizations(layer)
    before: type[nn.Module] | None = vars(own).get(EXCHANGED)
    return before or (kind.pytorchs if isinstance(layer, kind.ours) else own)


class _Made(type):
    """The class of classes that are made at run time: pickles name what they were made from."""


@cache
def _derived(own: Any) -> Any:
    """The class of layers of the class ``own``, derived from PyTorch's, that computes as ours."""
    ours = next(kind.ours for kind in _KINDS if issubclass(own, kind.pytorchs))
    names = {
        EXCHANGED: own,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
    }
    return _Made(own.__name__, (own, ours), names)


def _parts(made: Any) -> Any:
    """How a class is pickled that :func:`_derived` has made; one derived from it, by its name."""
    own = vars(made).get(EXCHANGED)
    return made.__qualname__ if own is None else (_derived, (own,))


copyreg.pickle(_Made, _parts)


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


def _is_ours(module: nn.Module) -> bool:
    kind = kind_of(module)
    return kind is not None and isinstance(module, kind.ours)


def exchange_marked_back(model: nn.Module) -> None:
    """Makes all layers PyTorch's that were exchanged for good.

    Raises:
        ValueError: another class was derived from that of a layer since. No layer changes then.
    """
    marked = {name: one for name, one in model.named_modules() if _MARK in vars(one)}
    ours = {name: one for name, one in marked.items() if _is_ours(one)}
    for name, layer in ours.items():
        own = type_before_parametrizations(layer)
        if own is not known_kind(layer).ours and EXCHANGED not in vars(own):
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
