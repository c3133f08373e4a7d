"""Registrations with parts of PyTorch that ``import torch`` leaves out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, register: Callable[[], None]) -> None:
    """Calls ``register`` as soon as the module of that name has been imported: now, or later.

    Whoever has no use for it does not wait for its import, which may take longer than ours. Whoever
    imports it gets it, even if it has changed so much that ``register`` fails: with a warning.
    """

    def attempt() -> None:
        try:
            register()
        except Exception as error:
            warnings.warn(
                f"fastconv's operators are unknown to {name}, in this PyTorch: {error!r}",
                stacklevel=2,
            )

    if name in sys.modules:
        attempt()
    else:
        sys.meta_path.insert(0, _Listener(name, attempt))


class _Listener(MetaPathFinder):
    """Leaves finding a module to the others, and calls a function when it has been executed."""

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
            if self in sys.meta_path:  # not so if the module is loaded once more
                sys.meta_path.remove(self)
                self._register()

        # Of this one loader, which is the module's own: who asks it for anything else finds that.
        loader.exec_module = exec_module  # type: ignore[method-assign]
