"""A model's state: noted before a call that must leave no trace, and put back after it.

To call a model is to run the user's own code, which counts its calls, fills caches, makes layers on
first use and has hooks. :class:`State` notes whatever that code can reach from the model:
attributes, containers, variables that functions have from outside, attributes of classes, and what
autograd knows of tensors. For a dry run (:mod:`fastconv.network.preparation`), which writes no
numbers, it notes references alone: a container as a copy of itself, a tensor as the tensor that it
is. For real calls (:mod:`fastconv.network.optimization`) it notes the values of the model's tensors
as well.

What belongs to other threads as well is noted, too, but put back only where it holds something that
must not stay (:meth:`State.put_back`): to undo what another thread did meanwhile would be wrong.
"""

from __future__ import annotations

import functools
import gc
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

LIMIT = 100_000
"""How many objects are noted at most, a model's modules first, then what is nearest to them; and a
quarter as many that it shares with others."""

# How many objects are looked at for something that must not stay: in all, and in one cache.
_REACH, _REACH_OF_CACHES = 20_000, 1000

# Code and classes of these are no model's: what they keep for themselves is not looked at.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "fastconv", "numpy", "sympy", "triton"})

# Instances of these packages describe code, and are many.
_OF_COMPILERS = ("torch.fx.", "torch._dynamo", "torch._inductor", "torch._subclasses", "torch._ops")

Segment = tuple[str, Any]
"""A step of a path: how it is written, and by which name, key or index."""

_ATTRIBUTE, _ITEM, _VARIABLE = ".{}", "[{!r}]", "'s variable {}"
_Child = tuple[Segment, Any]


# --- What is noted of an object -------------------------------------------------------------------


class _Note:
    """Something that can change about an object, as it was."""

    def children(self) -> Iterable[_Child]:
        """What was there."""
        return ()

    def now(self) -> Iterable[Any]:
        """What is there."""
        return ()

    def changed(self) -> bool:
        raise NotImplementedError

    def put_back(self) -> None:
        """May be called again if it was interrupted."""
        raise NotImplementedError


class _Contents(_Note):
    """What is in a dictionary (which may be an object's attributes), a list, a deque or a set."""

    def __init__(self, of: Any, base: Any, style: str = _ITEM) -> None:
        # The methods are the base's: those of a class of somebody's may do more.
        self._of, self._base, self._style = of, base, style
        self._saved = self._read()

    def _read(self) -> list[tuple[Any, Any]]:
        if issubclass(self._base, dict):
            return [*self._base.items(self._of)]
        return [*enumerate(self._base.__iter__(self._of))]

    def children(self) -> Iterable[_Child]:
        return (((self._style, key), value) for key, value in self._saved)

    def now(self) -> Iterable[Any]:
        return [value for _, value in self._read()]

    def changed(self) -> bool:
        now = self._read()
        return _keys(now) != _keys(self._saved) or any(
            one is not other for (_, one), (_, other) in zip(now, self._saved, strict=True)
        )

    def put_back(self) -> None:
        if issubclass(self._base, dict):
            if _keys(self._read()) != _keys(self._saved):
                self._base.clear(self._of)
            for key, value in self._saved:
                self._base.__setitem__(self._of, key, value)
        else:
            self._base.clear(self._of)
            add = self._base.update if self._base is set else self._base.extend
            add(self._of, [value for _, value in self._saved])


def _keys(of: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Keys in a form in which to compare them calls no code of somebody's."""
    return [key if type(key) in (str, int) else (id(key),) for key, _ in of]


class _Names(_Note):
    """Some names of an object: slots, attributes of a class, a function's global variables."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        put: Callable[[str, Any], None],
        delete: Callable[[str], None],
        style: str = _ATTRIBUTE,
        same: Callable[[Any, Any], bool] = operator.is_,
    ) -> None:
        self._read, self._put, self._delete, self._same = read, put, delete, same
        self._saved, self._style = read(), style

    def children(self) -> Iterable[_Child]:
        return (((self._style, name), value) for name, value in self._saved.items())

    def now(self) -> Iterable[Any]:
        return self._read().values()

    def changed(self) -> bool:
        now = self._read()
        return now.keys() != self._saved.keys() or not all(
            self._same(now[name], value) for name, value in self._saved.items()
        )

    def put_back(self) -> None:
        now = self._read()
        for name in now.keys() - self._saved.keys():
            self._delete(name)
        for name, value in self._saved.items():
            if name not in now or not self._same(now[name], value):
                self._put(name, value)


def _of_class(of: type) -> _Note:
    return _Names(
        lambda: {name: value for name, value in vars(of).items() if not name.startswith("__")},
        functools.partial(type.__setattr__, of),
        functools.partial(type.__delattr__, of),
    )


def _described(of: Any, by: Mapping[str, Any], style: str = _ATTRIBUTE) -> _Note:
    """What descriptors tell of an object: its slots, its class, the contents of a cell."""

    def read() -> dict[str, Any]:
        found = {}
        for name, one in by.items():
            with suppress(AttributeError, ValueError):  # there is nothing
                found[name] = one.__get__(of)
        return found

    return _Names(
        read,
        lambda name, value: by[name].__set__(of, value),
        lambda name: by[name].__delete__(of),
        style,
    )


_CLASS = {"__class__": vars(object)["__class__"]}
_CELL = {"cell_contents": vars(types.CellType)["cell_contents"]}


def _global_variables(used: Collection[str], names: dict[str, Any]) -> _Note:
    def delete(name: str) -> None:
        if type(names[name]) is not types.ModuleType:  # what was imported meanwhile stays
            del names[name]

    return _Names(
        lambda: {name: names[name] for name in used if name in names},
        names.__setitem__,
        delete,
        _VARIABLE,
    )


def _of_script(of: Any) -> _Note:
    """Attributes of a ``ScriptModule``, which are C++'s."""
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(of._type())
    names = kind.get_attributes()

    def equal(one: Any, other: Any) -> bool:
        """C++ makes containers anew whenever they are read; tensors in them are the same."""
        try:
            return one is other or (not isinstance(one, Tensor) and bool(one == other))
        except Exception:  # of tensors that are not the same
            return False

    return _Names(
        lambda: {name: of.getattr(name) for name in names if of.hasattr(name)},
        of.setattr,
        lambda name: None,
        same=equal,
    )


class _Tensor(_Note):
    """Of a tensor with data: its memory, what autograd knows of it and, if asked for, its values.

    If no tensor's values are noted, then none is written to, and versions are put back: to who has
    saved a tensor for a backward pass it is as if nobody had written to it. Else values that differ
    are written, which its version tells.
    """

    def __init__(self, of: Tensor, is_dry: bool, has_values: bool) -> None:
        self._of, self._is_dry = of, is_dry
        self._is_leaf, self._wants, self._node = of.is_leaf, of.requires_grad, of.grad_fn
        self._has_grad = self._is_leaf or of.retains_grad
        self._grad = of.grad if self._has_grad else None
        self._version = of._version if is_dry and not of.is_inference() else None
        is_plain = type(of).__torch_dispatch__ is Tensor.__torch_dispatch__
        is_strided = of.layout == torch.strided and not of.is_nested
        self._data = of.data if is_plain and is_strided else None
        self._values: Tensor | None = None
        if has_values and not of.is_meta and is_plain and (is_strided or of.layout in _SPARSE):
            with torch.inference_mode(False), torch.no_grad():
                self._values = of.detach().clone()

    def changed(self) -> bool:
        of = self._of
        return (
            of.requires_grad != self._wants
            or self._has_other_node()
            or (self._has_grad and of.grad is not self._grad)
            or (self._version is not None and of._version != self._version)
            or self.has_other_values()
        )

    def has_other_values(self) -> bool:
        """Whether it has other memory, or other numbers in the memory that it had."""
        return self._has_other_memory() or not self._has_its_numbers()

    def _has_other_node(self) -> bool:
        # Autograd makes another node for a view of a tensor that was written to; in real calls,
        # that is no change of the view's own.
        return (self._is_dry or self._is_leaf) and self._of.grad_fn is not self._node

    def _has_other_memory(self) -> bool:
        of, data = self._of, self._data
        return data is not None and (
            (of.device, of.dtype, of.shape, of.stride(), of.storage_offset())
            != (data.device, data.dtype, data.shape, data.stride(), data.storage_offset())
            or of.untyped_storage()._cdata != data.untyped_storage()._cdata
        )

    def _has_its_numbers(self) -> bool:
        if self._values is None:
            return True
        now = self._of.detach() if self._data is None else self._data
        parts = zip(_parts(now), _parts(self._values), strict=True)
        return now.shape == self._values.shape and all(is_same(*pair) for pair in parts)

    def put_back(self) -> None:
        of = self._of
        has_other_values = self.has_other_values()
        if self._has_other_memory():
            assert self._data is not None
            of.data = self._data
        if self._has_other_node():
            if not self._is_leaf:
                raise RuntimeError(
                    f"a tensor of size {list(of.shape)} that belongs to a graph of autograd's was "
                    "changed in place, which cannot be undone"
                )
            of.detach_()
        if self._is_leaf and of.requires_grad != self._wants:
            of.requires_grad_(self._wants)
        if self._has_grad and of.grad is not self._grad:
            of.grad = self._grad
        if not self._has_its_numbers():
            self._write()
        if self._version is not None:
            torch._C._autograd._unsafe_set_version_counter((of,), (self._version,))
        elif has_other_values and not of.is_inference():  # which has no version
            torch.autograd.graph.increment_version(of)

    def _write(self) -> None:
        values, to = self._values, self._of if self._data is None else self._data
        assert values is not None
        with torch.inference_mode(self._of.is_inference()), torch.no_grad():
            if self._data is not None:  # elements that have one address cannot be written at once
                for dimension, step in enumerate(to.stride()):
                    if step == 0 and to.shape[dimension]:
                        to, values = (one.narrow(dimension, 0, 1) for one in (to, values))
            to.copy_(values)


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


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


@contextmanager
def _plainly() -> Iterator[None]:
    """Within, tensors are looked at as they are, whatever classes and modes would make of it."""
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        yield


# --- Which notes an object takes ------------------------------------------------------------------

_ATOMS: frozenset[type] = frozenset({
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), slice,
    range, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    torch.Generator, types.CodeType, types.BuiltinFunctionType, types.ModuleType, types.FrameType,
    types.GeneratorType, types.MethodWrapperType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
})  # fmt: skip

_CONTAINERS = (OrderedDict, dict, list, deque, set, tuple, frozenset)

# Attributes by which objects of Python's lead to others.
_LEADS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
}


def _notes(of: Any, is_dry: bool, has_values: bool) -> tuple[list[_Note], list[_Child]]:
    """What can change about an object, and what else it leads to."""
    kind = type(of)
    if kind in _LEADS:
        return [], [((_ATTRIBUTE, name), getattr(of, name)) for name in _LEADS[kind]]
    if issubclass(kind, type):
        if _is_library(of):
            return [], []
        return [_of_class(of)], [((_ATTRIBUTE, "__bases__"), base) for base in of.__bases__]
    if kind is types.FunctionType:
        return _of_function(of)
    if kind is types.CellType:
        return [_described(of, _CELL, "")], []
    notes: list[_Note] = []
    leads: list[_Child] = []
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base in (tuple, frozenset):
        leads += (((_ITEM, index), value) for index, value in enumerate(of))
    elif base is not None:
        notes.append(_Contents(of, base))
    if kind is base:
        return notes, leads
    if issubclass(kind, Tensor):
        if _has_memory(of):
            notes.append(_Tensor(of, is_dry, has_values))
        if has_values and hasattr(of, "__tensor_flatten__"):  # it is made of others
            inner, _ = of.__tensor_flatten__()
            leads += (((_ATTRIBUTE, name), getattr(of, name)) for name in inner)
    elif issubclass(kind, nn.Module):
        notes.append(_described(of, _CLASS))  # some change theirs when they are called
        # Noted with the module, whatever the limit is: these are exchanged.
        exchanged = (vars(of).get("_parameters"), vars(of).get("_buffers"))
        notes += (_Contents(one, dict) for one in exchanged if isinstance(one, dict))
        if isinstance(vars(of).get("_c"), torch._C.ScriptModule):
            notes.append(_of_script(of._c))
            leads += (((_ATTRIBUTE, name), child) for name, child in of.named_children())
    elif kind.__module__.startswith(_OF_COMPILERS):
        return [], []
    notes += _attributes(of, kind)
    if not _is_library(kind):
        leads.append(((_ATTRIBUTE, "__class__"), kind))
    return notes, leads


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is a tensor with data: not one without sizes, nor what torch.func makes of one."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (isinstance(tensor, FakeTensor) or is_lazy(tensor) or wrapped)


def _dictionary(of: Any) -> dict[str, Any] | None:
    """An object's attributes, if it has such and lets itself be looked at."""
    try:
        found = object.__getattribute__(of, "__dict__") if type(of).__dictoffset__ else None
    except Exception:  # by code of somebody's
        return None
    return found if type(found) is dict else None


def _attributes(of: Any, kind: type) -> Iterator[_Note]:
    attributes = _dictionary(of)
    if attributes is not None:
        yield _Contents(attributes, dict, _ATTRIBUTE)
    slots = {
        name: slot
        for base in kind.__mro__
        if not _is_library(base)
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType
    }
    if slots:
        yield _described(of, slots)


def _of_function(of: types.FunctionType) -> tuple[list[_Note], list[_Child]]:
    """Variables that a function has from outside."""
    if _is_library(of):
        return [], []
    outside = zip(of.__code__.co_freevars, of.__closure__ or (), strict=True)
    leads: list[_Child] = [((_VARIABLE, name), cell) for name, cell in outside]
    for name in ("__defaults__", "__kwdefaults__", "__dict__"):
        leads.append(((_ATTRIBUTE, name), getattr(of, name)))
    return [*_variables(of.__code__, of.__globals__)], leads


def _variables(code: types.CodeType, names: dict[str, Any]) -> Iterator[_Note]:
    """Global variables that code names, and those of other files: ``name``, ``file.name``."""
    used = [*_names(code)]
    yield _global_variables(used, names)
    for name in used:
        value = names.get(name)
        if type(value) is types.ModuleType and not _is_library(value):
            yield _global_variables([one for one in used if one in vars(value)], vars(value))


def named_variables(code: types.CodeType, names: dict[str, Any]) -> dict[str, Any]:
    """What global variables have that code names."""
    return {name: value for note in _variables(code, names) for (_, name), value in note.children()}


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_library(of: Any) -> bool:
    """Whether a class, a function or a file is Python's, PyTorch's or ours."""
    name = of.__name__ if isinstance(of, types.ModuleType) else getattr(of, "__module__", None)
    return not isinstance(name, str) or name.partition(".")[0] in _LIBRARIES


_OWN = (nn.Module, type, *_CONTAINERS)
_PLAIN = frozenset({types.FunctionType, types.CellType, types.SimpleNamespace, *_LEADS})


def _is_shared(of: Any) -> bool:
    """Whether other threads may use an object just now: it has a lock, or is of Python's library.

    Of the latter, containers and the like are the model's own.
    """
    kind = type(of)
    if issubclass(kind, _OWN) or kind in _PLAIN:
        return False
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return True
    values = [*(_dictionary(of) or {}).values()]
    return any(type(value).__module__ in ("_thread", "threading") for value in values)


# How far away something is: a model's modules with what is in their containers; attributes of their
# objects; all else of the model's; and what it shares with others. Values of tensors are noted in
# the first two alone: farther away there may be a trainer, with all of its data.
_MODULES, _OBJECTS, _FAR, _SHARED = range(4)


def _distance(of: Any, parent: int) -> int:
    """How far away what an object leads to is, given how far away it is itself."""
    if parent == _SHARED or issubclass(type(of), (*_CONTAINERS, Tensor, types.CellType)):
        return parent
    if isinstance(of, nn.Module) and parent < _FAR:
        return _MODULES
    return min(parent + 1, _FAR)


# --- All of it ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Met:
    """An object of which there are notes, and how it was come to."""

    of: Any
    parent: int | None
    segment: Segment
    own: list[_Note] | None = None  # notes that are put back in any case
    shared: list[_Note] | None = None  # notes that are put back where something must go
    late: bool = False  # it was met in the middle of things, and may have been made there


class State:
    """What can be reached from some objects, as it was when they were taken."""

    def __init__(self, values: bool = False) -> None:
        """``values`` says that tensors may be written to: those near the roots keep theirs."""
        self._met: dict[int, _Met] = {}
        self._has_values = values

    def take(
        self, roots: Mapping[str, Any], shared: bool = False, late: bool = False
    ) -> list[nn.Module]:
        """Notes objects and all that they lead to; the model's modules that are new.

        ``shared`` says that they are not the model's own; ``late``, that it is being called.
        """
        queues: list[deque[Any]] = [deque() for _ in range(_SHARED + 1)]
        first = queues[_SHARED if shared else _MODULES]
        for name, root in roots.items():
            if isinstance(root, nn.Module) and not shared:  # modules before all else
                inner = root.named_modules()
                first.extend((one, None, (_of_module(name, of), None)) for of, one in inner)
        first.extend((root, None, (name, None)) for name, root in roots.items())
        found: list[nn.Module] = []
        room = {False: LIMIT, True: LIMIT // 4}  # the latter for what others share
        with _plainly():
            while True:
                filled = (far for far, queue in enumerate(queues) if queue and room[far == _SHARED])
                far = next(filled, None)
                if far is None:
                    break
                of, parent, segment = queues[far].popleft()
                if type(of) in _ATOMS or self._is_noted(of, far == _SHARED):
                    continue
                if far != _SHARED and _is_shared(of):
                    queues[_SHARED].append((of, parent, segment))
                    continue
                room[far == _SHARED] -= 1
                with suppress(Exception):  # what does not let itself be looked at is let be
                    leads = self._note(of, parent, segment, far, late)
                    queues[_distance(of, far)].extend((one, id(of), how) for how, one in leads)
                    if isinstance(of, nn.Module) and far != _SHARED:
                        found.append(of)
        return found

    def _is_noted(self, of: Any, shared: bool) -> bool:
        met = self._met.get(id(of))
        return met is not None and (met.own is not None or (shared and met.shared is not None))

    def _note(
        self, of: Any, parent: int | None, segment: Segment, far: int, late: bool
    ) -> list[_Child]:
        """What it leads to, and how."""
        notes, leads = _notes(of, not self._has_values, self._has_values and far < _FAR)
        met = self._met.setdefault(id(of), _Met(of, parent, segment, late=late))
        if far == _SHARED:
            met.shared = notes
        else:
            met.own = notes
        return [*leads, *(child for note in notes for child in note.children())]

    def take_tensor(self, tensor: Tensor) -> None:
        """Notes what autograd knows of a tensor from outside, unless it was noted before."""
        if _has_memory(tensor) and not self._is_noted(tensor, False):
            met = self._met.setdefault(id(tensor), _Met(tensor, None, ("a tensor", None)))
            with _plainly():
                met.own = [_Tensor(tensor, is_dry=True, has_values=False)]

    def has(self, of: Any) -> bool:
        """Whether it was taken, as the model's own."""
        return self._is_noted(of, False)

    def changed(self) -> set[int]:
        """The ids of tensors whose values are not what they were, of those that are noted."""
        with _plainly():
            return {
                at
                for at, met in self._met.items()
                if any(isinstance(n, _Tensor) and n.has_other_values() for n in met.own or ())
            }

    def counts(self) -> dict[str, object]:
        """Numbers and texts that are not what they were, and sizes of containers, by place."""
        found: dict[str, object] = {}
        with _plainly():
            for met in self._met.values():
                for note in met.own or ():
                    before, now = [*note.children()], [*note.now()]
                    if len(before) != len(now):
                        found[self.path(met.of) or ""] = len(now)
                    for (how, one), other in zip(before, now, strict=False):
                        if type(other) in (bool, int, float, str) and (
                            type(one) is not type(other) or one != other
                        ):
                            found[written([(self.path(met.of) or "", None), how])] = other
        return found

    def put_back(self, must_go: Callable[[Any], bool] = lambda _: False) -> None:
        """Undoes all changes; of what is shared, only those that hold something that must go.

        If it is interrupted by the user it begins again, and is interrupted when all is done.
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
        with _plainly():
            for met in [*self._met.values()]:
                own, shared = met.own or (), met.shared or ()
                for note, is_own in (*((n, True) for n in own), *((n, False) for n in shared)):
                    try:
                        if note.changed() and (
                            is_own or _leads_to(note.now(), must_go, _REACH, self._met)
                        ):
                            note.put_back()
                    except Exception as error:  # the others are to be put back all the same
                        trouble = error
        if trouble is not None:
            raise RuntimeError(f"the model is not as it was: {trouble}") from trouble

    def close(self) -> None:
        """Forgets what was noted, but for where it was."""
        self._met = {at: met for at, met in self._met.items() if not met.late}
        for met in self._met.values():
            met.own, met.shared = None, None

    def forget(self) -> None:
        """Forgets also where things were."""
        self._met.clear()

    def path(self, of: Any) -> str | None:
        """How an object that was noted is come to: ``model.layers[2].cache``."""
        segments: list[Segment] = []
        at: int | None = id(of)
        while at is not None:
            met = self._met.get(at)
            if met is None:
                return None
            segments.append(met.segment)
            at = met.parent
        return written(reversed(segments))


def _of_module(name: str, inner: str) -> str:
    """``model.layers[2]`` for the module "layers.2" of "model"."""
    parts = inner.split(".") if inner else []
    return name + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def written(segments: Iterable[Segment]) -> str:
    """A path as Python would write it, as far as it would."""
    found = ""
    for style, name in segments:
        if found.endswith(("._modules", "._parameters", "._buffers")) and style == _ITEM:
            found = found.rpartition(".")[0]
            style, name = (_ITEM, int(name)) if str(name).isdecimal() else (_ATTRIBUTE, name)
        found += style.format(name)
    return found


# --- Random numbers -------------------------------------------------------------------------------


@contextmanager
def same_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Puts back the generators of Python, NumPy and PyTorch; within, they may start from a seed."""
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


# --- What holds an object -------------------------------------------------------------------------

_ENDS = (Tensor, type, types.FunctionType, types.ModuleType)


def _leads_to(
    values: Iterable[Any], must_go: Callable[[Any], bool], most: int, known: Collection[int] = ()
) -> bool:
    """Whether something of the kind hangs on these values, by at most so many unknown objects."""
    left, seen = deque(values), set[int]()
    while left and len(seen) < most:
        of = left.popleft()
        if must_go(of):
            return True
        if id(of) not in seen and id(of) not in known and not isinstance(of, _ENDS):
            seen.add(id(of))
            left += gc.get_referents(of)
    return False


def clear_caches(must_go: Callable[[Any], bool]) -> None:
    """Clears each ``functools.lru_cache`` that has noted something of the kind.

    Which of its entries are new cannot be told, and what is not in a cache is made again.
    """
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper and _leads_to(
            gc.get_referents(one), must_go, _REACH_OF_CACHES
        ):
            one.cache_clear()


def holders(of: list[Any], state: State, named_only: bool, allowed: Any = None) -> dict[str, Any]:
    """What holds these objects, by its name; not frames, which hold variables, nor what is allowed.

    It is looked for from each object upwards, to something that has a name: what is in ``state``,
    a file's variable, a class, a function. What else it is has the name of its type, or is left out
    if there should be ``named_only``.
    """
    wanted = {id(one) for one in of}
    direct = [
        one
        for one in gc.get_objects()
        if type(one) not in _NO_HOLDERS
        and one is not of
        and one is not allowed
        and id(one) not in wanted
        and not wanted.isdisjoint(map(id, gc.get_referents(one)))
    ]
    found: dict[str, Any] = {}
    for one in direct[:_MOST_NAMES]:
        child = next(ref for ref in gc.get_referents(one) if id(ref) in wanted)
        name = _name(one, child, state, {id(of), id(direct), id(found), id(allowed)})
        if name is not None or not named_only:
            found[name or written([(f"a {type(one).__name__}", None), *_steps(one, child)])] = one
    return found


def take_out(holder: Any, must_go: Callable[[Any], bool]) -> None:
    """Removes the objects from a dictionary, a list or an object's attributes."""
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), [one for one in holder if not must_go(one)])
        return
    names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    if isinstance(names, dict):
        for key in [key for key, value in names.items() if must_go(value)]:
            del names[key]


_NO_HOLDERS = frozenset({types.FrameType, types.TracebackType, types.FunctionType, FakeTensor})
_MOST_NAMES = 20
_CLIMB = 50  # how many objects are looked at for a name


def _name(holder: Any, child: Any, state: State, ignored: set[int]) -> str | None:
    """A path to what a holder has, or None if nothing that has a name leads to it."""
    # By number, so that nothing but this dictionary refers to them.
    kept = {id(holder): holder}
    ways: dict[int, list[Segment]] = {id(holder): _steps(holder, child)}
    left, ignored = deque(kept), ignored | {id(kept)}
    while left and len(kept) < _CLIMB:
        at = left.popleft()
        root = _root(kept[at], state)
        if root is not None:
            return written([(root, None), *ways[at]])
        ups = gc.get_referrers(kept[at])
        ignored.add(id(ups))
        for up in ups:
            is_globals = isinstance(up, types.FunctionType) and up.__globals__ is kept[at]
            if id(up) in ignored or id(up) in kept or type(up) in _NO_NAMES or is_globals:
                continue
            ways[id(up)] = [*_steps(up, kept[at]), *_within(up, kept[at], ways[at])]
            kept[id(up)] = up
            left.append(id(up))
    return None


_NO_NAMES = frozenset({types.FrameType, types.TracebackType, _Met, State})


def _within(up: Any, of: Any, way: list[Segment]) -> list[Segment]:
    """The way on from an object, as it is written where another one refers to it."""
    if isinstance(up, types.FunctionType) and of is up.__closure__:
        return [(_VARIABLE, up.__code__.co_freevars[way[0][1]]), *way[1:]]
    if getattr(up, "__dict__", None) is of:
        return [(_ATTRIBUTE, way[0][1]), *way[1:]]
    return way


def _steps(holder: Any, child: Any) -> list[Segment]:
    """How a holder leads to something that it refers to."""
    if isinstance(holder, dict):
        return [(_ITEM, key) for key, value in [*holder.items()] if value is child][:1]
    if isinstance(holder, list | tuple | deque):
        return [(_ITEM, index) for index, value in enumerate(holder) if value is child][:1]
    attributes = getattr(holder, "__dict__", None)
    if isinstance(holder, types.CellType | types.FunctionType) or attributes is child:
        return []
    names = [(_ATTRIBUTE, name) for name, value in (attributes or {}).items() if value is child]
    return names[:1] or [(", by a {}", type(child).__name__)]


def _root(of: Any, state: State) -> str | None:
    """What an object is called, if it has a name of its own."""
    path = state.path(of)
    if path is not None:
        return path
    # A function that was made by another one is known by what has it.
    if isinstance(of, type | types.FunctionType) and "<locals>" not in of.__qualname__:
        return f"{of.__module__}.{of.__qualname__}"
    if type(of) is types.ModuleType:
        return of.__name__
    return None
