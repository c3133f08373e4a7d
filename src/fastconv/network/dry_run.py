"""Dry runs: a model is called with fake tensors, and nothing that it does then stays."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
import torch.nn.modules.module as _hooks
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastconv.layers import OF_DRY_RUNS
from fastconv.network.holders import clear_caches, holders, take_out
from fastconv.network.reachable import named_globals
from fastconv.network.snapshot import Snapshot, same_random_numbers


class NeedsData(Exception):
    """A model cannot be called with fake tensors; says why."""


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in whatever a model takes or returns."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def call_without_data(
    model: Callable[..., Any],
    example: Any,
    named: Any,
    watch: AbstractContextManager[Any],
    backward: bool = False,
    guard: bool | None = None,
) -> None:
    """Calls the model with fake tensors within the context ``watch``.

    Nothing is computed and no tensor changes.

    Args:
        model: a module, or any function of tensors.
        example: its arguments by position.
        named: its arguments by name.
        watch: a context within which it is called.
        backward: whether to run a backward pass as well.
        guard: whether parameters and buffers are replaced by fake ones, and changes that the model
            makes to its Python state are undone. By default it is on for modules alone: functions
            of this package keep nothing, or keep it on purpose.

    Raises:
        NeedsData: the model does something that takes data.
        RuntimeError: with ``guard``, the model keeps fake tensors where they cannot be taken away.
    """
    module = isinstance(model, torch.nn.Module)
    given = [*tensors_of((example, named))]
    if isinstance(model, torch.nn.Module):
        given += (*model.parameters(), *model.buffers())
    known = detect_fake_mode(given)
    # Not every tensor that the model uses is replaced by a fake one beforehand.
    fake = known or FakeTensorMode(allow_non_fake_inputs=True)
    roots = {"model": model, "example": example, "named": named}
    run = DryRun(fake, watch)
    with run.guarded(roots, known is not None) if guard or (module and guard is None) else run:
        _call(fake, model, example, named, backward)


def _call(
    fake: FakeTensorMode, model: Callable[..., Any], example: Any, named: Any, backward: bool
) -> None:
    """Calls the model in a function of its own, whose end releases all results."""
    try:
        example, named = tree_map_only(Tensor, fake.from_tensor, (example, named))
        outputs = [one for one in tensors_of(model(*example, **named)) if one.requires_grad]
        if backward and outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    except NeedsData:
        raise
    except Exception as error:
        raise NeedsData(
            f"cannot be called with tensors that have no data (FakeTensorMode): {error}"
        ) from error


class DryRun:
    """A context in which nothing is computed, and tensors from outside and their grads stay."""

    def __init__(self, fake: FakeTensorMode, watch: AbstractContextManager[Any]) -> None:
        self._fake, self._watch = fake, watch
        self._snapshot = Snapshot()
        self._others: set[int] = set()  # ids of fake tensors of this mode that were there before
        self._stack = ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        with self._stack:  # undoes what has been done if something fails here
            # Autocast would keep fake weights that it has cast, and use them in later calls.
            self._stack.callback(torch.clear_autocast_cache)
            self._stack.callback(self._snapshot.put_back, self._is_new)
            for mode in (self._fake, self._watch, _FakeOperands(self._fake, self._snapshot)):
                self._stack.enter_context(mode)
            self._stack = self._stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _is_new(self, one: Any) -> bool:
        """Whether an object is a fake tensor that was made during the dry run."""
        is_ours = isinstance(one, FakeTensor) and one.fake_mode is self._fake
        return is_ours and id(one) not in self._others

    # --- Guarded ---

    @contextmanager
    def guarded(
        self, roots: Mapping[str, Any], is_known: bool, caller: FrameType | None = None
    ) -> Iterator[None]:
        """The dry run, which also keeps Python state as it is.

        That is all state that can be reached from the roots, and from modules that are called,
        whatever they are reached from.

        Args:
            roots: objects by name.
            is_known: fake tensors of this mode may have been there before.
            caller: the frame that has a ``with`` block for this context. Code in the block may keep
                fake tensors in its own variables, but not in what these held before.
        """
        before = self._left() if is_known else []
        self._others = {id(one) for one in before}
        for one in before:
            self._snapshot.record_tensor(one)
        if caller is not None:
            self._snapshot.record(_variables(caller), shared=True)
        # Recorded before `watch` is entered, which may add hooks of its own to modules.
        modules = self._snapshot.record({**roots, **_PYTORCH_STATE})
        try:
            with same_random_numbers(), self:
                self._fake_parameters(modules)
                handle = _hooks.register_module_forward_pre_hook(self._before_forward)
                OF_DRY_RUNS.add(handle.id)
                try:
                    yield
                finally:
                    handle.remove()
                    OF_DRY_RUNS.discard(handle.id)
        except BaseException as error:
            if caller is not None:
                clear_caches(self._is_new)
                raise
            _clear_frames(error)  # their variables would hold fake tensors
            with nullcontext() if isinstance(error, Exception) else suppress(RuntimeError):
                self._check(named_only=True)
            raise
        else:
            self._check(caller is not None, caller and caller.f_globals)
        finally:
            self._snapshot.clear()

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Runs before each call of a module, in whichever thread: records unknown modules."""
        if threading.get_ident() == self._thread and not self._snapshot.has(module):
            modules = self._snapshot.record({type(module).__name__: module}, late=True)
            self._fake_parameters(modules)

    def _fake_parameters(self, modules: Iterable[torch.nn.Module]) -> None:
        """Puts fake tensors in place of the modules' parameters and buffers, which are recorded."""
        for module in modules:
            for of in (vars(module).get("_parameters"), vars(module).get("_buffers")):
                if not isinstance(of, dict):  # a ScriptModule's are in C++: see _FakeOperands
                    continue
                for name, tensor in of.items():
                    if is_lazy(tensor):
                        raise NeedsData(
                            "has parameters that have no sizes yet "
                            f"({type(module).__name__}.{name}): call it once before"
                        )
                    if tensor is not None:
                        # A tensor that has no fake form stays; operators that use it raise.
                        with suppress(Exception):
                            of[name] = self._fake.from_tensor(tensor)

    def _check(self, named_only: bool, allowed: Any = None) -> None:
        """Raises if something still holds fake tensors that were made during the dry run.

        With ``named_only``, holders that have no name are ignored: a function's variable may hold
        them. ``allowed`` is an object that may hold such tensors.
        """
        self._snapshot.keep_paths_only()
        if not self._left():
            return
        gc.collect()
        if not self._left():
            return
        clear_caches(self._is_new)
        left = self._left()
        found = holders(left, self._snapshot, named_only, allowed) if left else {}
        for holder in found.values():
            take_out(holder, self._is_new)
        if found:
            raise RuntimeError(
                "the model was called with tensors that have no data, and keeps some of them in "
                f"{', '.join(found)}, where fastconv cannot put back what was there before. "
                "Clear that before the next call, and call the model once with data instead"
            )

    def _left(self) -> list[Any]:
        """All fake tensors that were made during the dry run and still exist."""
        return [one for one in gc.get_objects() if type(one) is FakeTensor and self._is_new(one)]


# State of PyTorch itself that a model's call may change.
_PYTORCH_STATE = {
    "hooks of all modules": (_hooks._global_forward_hooks, _hooks._global_forward_pre_hooks),
    "parametrize.cached()": parametrize._cache,
}


def _variables(caller: FrameType) -> dict[str, Any]:
    """The values of a function's variables, and of global variables that it names."""
    code = caller.f_code
    found = named_globals(code, caller.f_globals)
    if code.co_flags & inspect.CO_OPTIMIZED:  # else local variables are the file's global ones
        variables = caller.f_locals
        found |= variables
        if sys.version_info < (3, 13):
            variables.clear()  # a copy, which the frame keeps with all that it holds
    return found


def calling_frame() -> FrameType:
    """The frame of the code whose ``with`` statement enters a context of this package."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "contextlib" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _clear_frames(error: BaseException | None) -> None:
    """Empties the variables of functions that an error has ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _FakeOperands(TorchDispatchMode):
    """Gives operators fake tensors instead of those with data; each of these has one fake."""

    def __init__(self, fake: FakeTensorMode, snapshot: Snapshot) -> None:
        super().__init__()
        self._fake, self._snapshot = fake, snapshot

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _NEW_CONSTANTS:
            args, kwargs = tree_map_only(Tensor, self._fake_of, (args, kwargs))
        return function(*args, **kwargs)

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        self._snapshot.record_tensor(tensor)
        return self._fake.from_tensor(tensor)


# torch.tensor(2.0) ends with one of these operators, and its fake tensor has the value, which
# models may read.
_NEW_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
