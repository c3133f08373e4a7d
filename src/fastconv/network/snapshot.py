"""A model's state, recorded before a call that must leave no trace and put back after it.

To call a model is to run the user's own code, which may count its calls, fill caches, make layers
on first use and have hooks. :class:`Snapshot` records whatever that code can reach from the model:
attributes, containers, closure and global variables of functions, attributes of classes, and the
autograd state of tensors. For a dry run (:mod:`fastconv.network.dry_run`), which writes no numbers,
it records references alone: a container as a copy of itself, a tensor as a reference to it. For
real calls (:mod:`fastconv.network.optimization`) it records the numbers of the model's tensors too.

Objects that other threads may use are recorded as well, but put back only where they hold something
that must not stay (:meth:`Snapshot.put_back`): to undo what another thread did meanwhile would be
wrong.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fastconv.network.reachable import (
    ATOMS,
    FAR,
    MODULES,
    SHARED,
    distance,
    is_shared,
    leads_to,
    records_of,
)
from fastconv.network.records import Child, Record, Segment, path_text
from fastconv.network.tensor_record import TensorRecord, has_memory

LIMIT = 100_000
"""How many objects are recorded at most, a model's modules first, then what is nearest to them; and
a quarter as many that it shares with others."""

# How many objects of a changed shared object are searched for something that must go.
_SEARCHED = 20_000


@dataclass(slots=True)
class Visited:
    """An object with its records, and the path by which it was reached."""

    of: Any
    parent: int | None
    segment: Segment
    own: list[Record] | None = None  # these are put back in any case
    shared: list[Record] | None = None  # these are put back where something must go
    late: bool = False  # first seen during the call, in which it may have been made


class Snapshot:
    """The state of all objects that can be reached from some roots, as it was when recorded."""

    def __init__(self, values: bool = False) -> None:
        """``values``: tensors may be written to, so numbers of those near the roots are copied."""
        self._visited: dict[int, Visited] = {}
        self._has_values = values

    def record(
        self, roots: Mapping[str, Any], shared: bool = False, late: bool = False
    ) -> list[nn.Module]:
        """Records objects and all that they lead to.

        Args:
            roots: the objects, by the names that paths begin with.
            shared: they are not the model's own.
            late: the model is being called.

        Returns:
            The model's modules that had not been recorded before.
        """
        queues: list[deque[Any]] = [deque() for _ in range(SHARED + 1)]
        first = queues[SHARED if shared else MODULES]
        for name, root in roots.items():
            if isinstance(root, nn.Module) and not shared:  # modules before all else
                inner = root.named_modules()
                first.extend((one, None, (_module_path(name, of), None)) for of, one in inner)
        first.extend((root, None, (name, None)) for name, root in roots.items())
        found: list[nn.Module] = []
        room = {False: LIMIT, True: LIMIT // 4}  # True: for shared objects
        with _without_modes():
            while True:
                filled = (far for far, queue in enumerate(queues) if queue and room[far == SHARED])
                far = next(filled, None)
                if far is None:
                    break
                of, parent, segment = queues[far].popleft()
                if type(of) in ATOMS or self._is_recorded(of, far == SHARED):
                    continue
                if far != SHARED and is_shared(of):
                    queues[SHARED].append((of, parent, segment))
                    continue
                room[far == SHARED] -= 1
                with suppress(Exception):  # an object whose own code fails is skipped
                    leads = self._visit(of, parent, segment, far, late)
                    queues[distance(of, far)].extend((one, id(of), how) for how, one in leads)
                    if isinstance(of, nn.Module) and far != SHARED:
                        found.append(of)
        return found

    def _is_recorded(self, of: Any, shared: bool) -> bool:
        visited = self._visited.get(id(of))
        return visited is not None and (
            visited.own is not None or (shared and visited.shared is not None)
        )

    def _visit(
        self, of: Any, parent: int | None, segment: Segment, far: int, late: bool
    ) -> list[Child]:
        """Records an object; the result is what it leads to."""
        records, leads = records_of(of, not self._has_values, self._has_values and far < FAR)
        visited = self._visited.setdefault(id(of), Visited(of, parent, segment, late=late))
        if far == SHARED:
            visited.shared = records
        else:
            visited.own = records
        return [*leads, *(child for record in records for child in record.children())]

    def record_tensor(self, tensor: Tensor) -> None:
        """Records the autograd state of a tensor from outside, unless it was recorded before."""
        if has_memory(tensor) and not self._is_recorded(tensor, False):
            path = ("a tensor", None)
            visited = self._visited.setdefault(id(tensor), Visited(tensor, None, path))
            with _without_modes():
                visited.own = [TensorRecord(tensor, is_dry=True, has_values=False)]

    def has(self, of: Any) -> bool:
        """Whether an object is recorded, as the model's own."""
        return self._is_recorded(of, False)

    def changed_tensors(self) -> set[int]:
        """The ids of recorded tensors whose numbers are not what they were."""
        with _without_modes():
            return {
                at
                for at, visited in self._visited.items()
                if any(
                    isinstance(record, TensorRecord) and record.has_other_values()
                    for record in visited.own or ()
                )
            }

    def changed_values(self) -> dict[str, object]:
        """Numbers and texts that are not what they were, and sizes of containers, by path."""
        found: dict[str, object] = {}
        with _without_modes():
            for visited in self._visited.values():
                for record in visited.own or ():
                    before, now = [*record.children()], [*record.now()]
                    if len(before) != len(now):
                        found[self.path(visited.of) or ""] = len(now)
                    for (how, one), other in zip(before, now, strict=False):
                        if type(other) in (bool, int, float, str) and (
                            type(one) is not type(other) or one != other
                        ):
                            found[path_text([(self.path(visited.of) or "", None), how])] = other
        return found

    def put_back(self, must_go: Callable[[Any], bool] = lambda _: False) -> None:
        """Undoes all changes; of shared objects, only those that hold something that must go.

        If the user interrupts it, it begins again, and raises the interrupt when all is done.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._put_back(must_go)
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt

    def _put_back(self, must_go: Callable[[Any], bool]) -> None:
        trouble: Exception | None = None
        with _without_modes():
            for visited in [*self._visited.values()]:
                own, shared = visited.own or (), visited.shared or ()
                for record, is_own in (*((r, True) for r in own), *((r, False) for r in shared)):
                    try:
                        if record.changed() and (
                            is_own or leads_to(record.now(), must_go, _SEARCHED, self._visited)
                        ):
                            record.put_back()
                    except Exception as error:  # all other records are put back nevertheless
                        trouble = error
        if trouble is not None:
            raise RuntimeError(f"the model is not as it was: {trouble}") from trouble

    def keep_paths_only(self) -> None:
        """Drops all records; :meth:`path` still answers for what was there before the call."""
        self._visited = {at: one for at, one in self._visited.items() if not one.late}
        for visited in self._visited.values():
            visited.own, visited.shared = None, None

    def clear(self) -> None:
        """Drops everything, paths included."""
        self._visited.clear()

    def path(self, of: Any) -> str | None:
        """How an object that was recorded is reached: ``model.layers[2].cache``."""
        segments: list[Segment] = []
        at: int | None = id(of)
        while at is not None:
            visited = self._visited.get(at)
            if visited is None:
                return None
            segments.append(visited.segment)
            at = visited.parent
        return path_text(reversed(segments))


def _module_path(name: str, inner: str) -> str:
    """``model.layers[2]`` for the module "layers.2" of "model"."""
    parts = inner.split(".") if inner else []
    return name + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Switches dispatch modes and ``__torch_function__`` off: tensors are read as they are."""
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        yield


# --- Random numbers -------------------------------------------------------------------------------


@contextmanager
def same_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Puts the generators of Python, NumPy and PyTorch back at its end.

    With a ``seed`` they start from it within.
    """
    numpy: Any = sys.modules.get("numpy")
    with _disable_current_modes():
        python, numpys = random.getstate(), numpy and numpy.random.get_state()
        torchs = torch.get_rng_state()
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        if seed is not None:
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            for generator in (torch.default_generator, *torch.cuda.default_generators[: len(gpus)]):
                generator.manual_seed(seed)
        yield
    finally:
        with _disable_current_modes():
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numpys)
            torch.set_rng_state(torchs)
            if gpus:
                torch.cuda.set_rng_state_all(gpus)
