"""What calling a model changes beside its result: put back by who calls it to look or to measure.

Parameters, buffers and plain tensors, attributes of modules, lists and dicts in them, and random
numbers.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

_CONTAINERS = (dict, list, set, deque)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
# What has attributes that are no state of a model.
_NO_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Generator)


class Snapshot:
    """The state of modules at one time.

    Reached are the attributes of modules, what is in lists, dicts, sets and tuples, and the
    attributes of other objects that modules have, but not of objects in those: a trainer may be
    among them, with all of its data.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._put_back: list[Callable[[], None]] = []
        self._tensors: dict[int, _Values] = {}
        self._met: dict[int, object] = {}  # which keeps them alive, so that each has its own id
        waiting = [(root, True) for root in roots]
        while waiting:
            waiting.extend(self._note(*waiting.pop()))

    def restore(self) -> None:
        """Has all of it be as it was. What cannot be put back does not keep the rest from it."""
        errors = []
        for put_back in (*self._put_back, *(one.put_back for one in self._tensors.values())):
            try:
                put_back()
            except Exception as error:
                errors.append(error)
        if errors:
            raise RuntimeError(f"a model's state could not be put back: {errors[0]}") from errors[0]

    def changed(self) -> set[int]:
        """The ids of tensors whose values are not what they were."""
        return {key for key, one in self._tensors.items() if one.changed()}

    def _note(self, value: object, deep: bool) -> list[tuple[object, bool]]:
        """What there is to be noted in a value, and whether objects in it are looked into."""
        if id(value) in self._met:
            return []
        self._met[id(value)] = value
        if isinstance(value, Tensor):
            return [(part, False) for part in self._note_tensor(value)]
        if isinstance(value, torch.jit.ScriptModule):
            return [(one, False) for one in (*value.parameters(), *value.buffers())]
        if isinstance(value, nn.Module):
            self._put_back.append(_contents(vars(value)))
            return [(one, True) for one in vars(value).values()]
        if isinstance(value, _CONTAINERS):
            self._put_back.append(_contents(value))
            return [(one, deep) for one in (value.values() if isinstance(value, dict) else value)]
        if isinstance(value, tuple):
            return [(one, deep) for one in value]
        if deep and hasattr(value, "__dict__") and not isinstance(value, _NO_STATE):
            self._put_back.append(_contents(vars(value)))
            return [(one, False) for one in vars(value).values()]
        return []

    def _note_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Notes its values; of one that is made of others, those others are returned."""
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return []  # there are none
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            return [getattr(tensor, name) for name in names]
        if tensor.layout in _SPARSE:
            self._tensors[id(tensor)] = _SparseValues(tensor)
        elif tensor.layout is torch.strided:
            self._tensors[id(tensor)] = _Values(tensor)
        return []


def _contents(container: Any) -> Callable[[], None]:
    """Puts back what a container has; the same objects, in the same order."""
    ordered = list(container.items() if isinstance(container, dict) else container)
    ids = _ids(ordered)

    def put_back() -> None:
        if _ids(container.items() if isinstance(container, dict) else container) == ids:
            return
        container.clear()
        add = container.extend if isinstance(container, list | deque) else container.update
        add(ordered)

    return put_back


def _ids(members: Iterable[Any]) -> list[Any]:
    return [tuple(map(id, one)) if type(one) is tuple else id(one) for one in members]


class _Values:
    """Those of a tensor, bit for bit, and where it has them."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        with torch.inference_mode(False), torch.no_grad():
            self._same = tensor.detach()  # in the same memory, as long as it is not given another
            self._kept = tensor.detach().clone()

    def changed(self) -> bool:
        tensor = self._tensor
        moved = (tensor.data_ptr(), tensor.shape, tensor.stride()) != (
            self._same.data_ptr(), self._same.shape, self._same.stride()
        )  # fmt: skip
        return moved or not is_same(self._same, self._kept)

    def put_back(self) -> None:
        if not self.changed():
            return
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
            if not is_same(self._same, self._kept):
                _each_once(self._same).copy_(_each_once(self._kept, like=self._same))
            if self.changed():  # it has other memory
                self._tensor.data = self._same
            if not self._tensor.is_inference():  # which has no version
                torch.autograd.graph.increment_version(self._tensor)


def _each_once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Without what repeats it: elements that have one address cannot be written at once."""
    for dimension, step in enumerate((tensor if like is None else like).stride()):
        if step == 0 and tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class _SparseValues(_Values):
    def changed(self) -> bool:
        now, then = self._tensor.detach(), self._kept
        return now.shape != then.shape or not all(
            is_same(one, other) for one, other in zip(_parts(now), _parts(then), strict=True)
        )

    def put_back(self) -> None:
        if self.changed():
            with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
                self._tensor.copy_(self._kept)


def _parts(sparse: Tensor) -> tuple[Tensor, ...]:
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two strided tensors have the same bits, NaN and the sign of zero included."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.dtype.itemsize])


# --- Random numbers -------------------------------------------------------------------------------


@contextmanager
def same_random_numbers(gpus: Iterable[int], seed: int | None = None) -> Iterator[None]:
    """Puts back the states of all generators; within, they may start from a seed."""
    python, devices = random.getstate(), sorted(gpus)
    numpy: Any = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                random.seed(seed)
                if numpy is not None:
                    numpy.random.seed(seed)
                torch.default_generator.manual_seed(seed)
                for index in devices:
                    torch.cuda.default_generators[index].manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpys)
