"""Registrations with parts of PyTorch that ``import torch`` does not import."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, register: Callable[[], None]) -> None:
    """Calls ``register`` as soon as the module of that name has been imported: now, or later.

    So ``import fastconv`` does not wait for modules that the user may not need. If ``register``
    fails, because a version of PyTorch has changed the module, the user gets the module and a
    warning.
    """

    def attempt() -> None:
        try:
            register()
        except Exception as error:
            warnings.warn(
                f"fastconv's operators could not be registered with {name} in this version of "
                f"PyTorch: {error!r}",
                stacklevel=2,
            )

    if name in sys.modules:
        attempt()
    else:
        sys.meta_path.insert(0, _Listener(name, attempt))


class _Listener(MetaPathFinder):
    """Has the other finders find a module, and calls a function once it has been executed."""

    def __init__(self, name: str, register: Callable[[], None]) -> None:
        self._name, self._register = name, register

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        found = (
            finder.find_spec(name, path, target)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._attach(spec.loader)
        return spec

    def _attach(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # it is removed the first time that the module is loaded
                sys.meta_path.remove(self)
                self._register()

        # A loader belongs to one module, so no other module is affected.
        loader.exec_module = exec_module  # type: ignore[method-assign]
