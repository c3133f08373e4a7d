"""The Python state of a model: noted before a call that must leave no trace, and put back after it.

A dry run (:mod:`fastconv.preparation`) calls the user's own code, which counts its calls, fills
caches, makes layers on first use and has hooks. :class:`State` notes whatever that code can reach
from the model: attributes, containers, variables that functions have from outside, attributes of
classes, and what autograd knows of tensors. It notes references, no data: a container is noted as a
copy of itself, a tensor as the tensor that it is.

What belongs to other threads as well is noted, too, but put back only where it holds something that
must not stay (:meth:`State.put_back`): to undo what another thread did meanwhile would be wrong.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

LIMIT = 100_000
"""How many objects are noted at most, a model's modules first, then what is nearest to them."""

# How many objects are looked at for something that must not stay; in each of many caches.
_REACH, _REACH_OF_CACHES = 20_000, 1000

# Code and classes of these are no model's: what they keep for themselves is not looked at.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "fastconv", "numpy", "sympy", "triton"})

# Instances of these packages describe code, and are many.
_OF_COMPILERS = ("torch.fx.", "torch._dynamo", "torch._inductor", "torch._subclasses", "torch._ops")

_NOTHING = object()  # stands for what is not there
_LRU_CACHE = functools._lru_cache_wrapper
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)

Segment = tuple[str, Any]
"""A step of a path: how it is written, and by which name, key or index."""

_ATTRIBUTE, _ITEM, _VARIABLE, _TYPE = ".{}", "[{!r}]", "'s variable {}", "'s class {}"
_Child = tuple[Segment, Any]


# --- What is noted of an object -------------------------------------------------------------------


class _Note:
    """Something that can change about an object, as it was."""

    def children(self) -> Iterable[_Child]:
        """What was there."""
        return ()

    def changed(self) -> bool:
        raise NotImplementedError

    def put_back(self) -> None:
        """May be called again if it was interrupted."""
        raise NotImplementedError

    def now(self) -> Iterable[Any]:
        """What is there."""
        return ()


class _Items(_Note):
    """The contents of a dictionary, which may be an object's attributes."""

    def __init__(self, of: dict[Any, Any], style: str = _ITEM) -> None:
        self._of, self._style = of, style
        # Not by methods of a class of somebody's, which may do more.
        self._base: Any = OrderedDict if isinstance(of, OrderedDict) else dict
        self._keys, self._values = [*self._base.keys(of)], [*self._base.values(of)]

    def children(self) -> Iterable[_Child]:
        return (((self._style, k), v) for k, v in zip(self._keys, self._values, strict=True))

    def changed(self) -> bool:
        return not (
            _same(self._keys, self._base.keys(self._of))
            and _same(self._values, self._base.values(self._of))
        )

    def put_back(self) -> None:
        if not _same(self._keys, self._base.keys(self._of)):
            self._base.clear(self._of)
        for key, value in zip(self._keys, self._values, strict=True):
            self._base.__setitem__(self._of, key, value)

    def now(self) -> Iterable[Any]:
        return self._base.values(self._of)


class _Elements(_Note):
    """The contents of a list, a deque or a set."""

    def __init__(self, of: Any, base: Any) -> None:
        self._of, self._base = of, base
        self._saved = [*base.__iter__(of)]

    def children(self) -> Iterable[_Child]:
        return (((_ITEM, index), value) for index, value in enumerate(self._saved))

    def changed(self) -> bool:
        return not _same(self._saved, self._base.__iter__(self._of))

    def put_back(self) -> None:
        self._base.clear(self._of)
        add = self._base.update if self._base is set else self._base.extend
        add(self._of, self._saved)

    def now(self) -> Iterable[Any]:
        return self._base.__iter__(self._of)


class _Names(_Note):
    """Some names of an object: slots, attributes of a class, a function's global variables."""

    def __init__(
        self,
        names: Iterable[str],
        get: Callable[[str], Any],  # gives _NOTHING where there is nothing
        put: Callable[[str, Any], None],
        delete: Callable[[str], None],
        style: str = _ATTRIBUTE,
    ) -> None:
        self._get, self._put, self._delete, self._style = get, put, delete, style
        self._saved = {name: get(name) for name in names}

    def children(self) -> Iterable[_Child]:
        return (((self._style, k), v) for k, v in self._saved.items() if v is not _NOTHING)

    def changed(self) -> bool:
        return any(self._get(name) is not value for name, value in self._saved.items())

    def put_back(self) -> None:
        for name, value in self._saved.items():
            current = self._get(name)
            if current is value:
                continue
            if value is _NOTHING:
                self._delete(name)
            else:
                self._put(name, value)

    def now(self) -> Iterable[Any]:
        return (self._get(name) for name in self._saved)


class _Class(_Names):
    """What a class has, and what it gets meanwhile."""

    def __init__(self, of: type) -> None:
        self._of = of
        super().__init__(
            self._current(),
            lambda name: vars(of).get(name, _NOTHING),
            lambda name, value: type.__setattr__(of, name, value),
            lambda name: type.__delattr__(of, name),
        )

    def _current(self) -> list[str]:
        return [name for name in vars(self._of) if not name.startswith("__")]

    def changed(self) -> bool:
        return len(self._current()) != len(self._saved) or super().changed()

    def put_back(self) -> None:
        for name in self._current():
            self._saved.setdefault(name, _NOTHING)
        super().put_back()

    def now(self) -> Iterable[Any]:
        return (vars(self._of)[name] for name in self._current())


class _Script(_Names):
    """Attributes of a ``ScriptModule``, which are C++'s."""

    def __init__(self, of: Any) -> None:
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(of._type())
        names = [name for name in kind.get_attributes() if of.hasattr(name)]
        super().__init__(names, of.getattr, of.setattr, lambda name: None)

    def changed(self) -> bool:
        return any(not _equal(self._get(name), value) for name, value in self._saved.items())

    def put_back(self) -> None:
        for name, value in self._saved.items():
            if not _equal(self._get(name), value):
                self._put(name, value)


class _Autograd(_Note):
    """Of a tensor with data: its memory, version and gradient, and whether it wants one."""

    def __init__(self, of: Tensor) -> None:
        self._of = of
        self._is_leaf, self._wants = of.is_leaf, of.requires_grad
        self._node = of.grad_fn
        self._has_grad = self._is_leaf or of.retains_grad
        self._grad = of.grad if self._has_grad else None
        # In a way that tells whether somebody has assigned to .data.
        self._version = None if of.is_inference() else of._version
        plain = type(of) in _TENSORS and of.layout == torch.strided and not of.is_nested
        self._data = of.data if plain else None

    def changed(self) -> bool:
        of = self._of
        return (
            of.requires_grad != self._wants
            or of.grad_fn is not self._node
            or (self._has_grad and of.grad is not self._grad)
            or (self._version is not None and of._version != self._version)
            or not self._has_its_memory()
        )

    def _has_its_memory(self) -> bool:
        of, data = self._of, self._data
        if data is None:
            return True
        return (
            of.device == data.device
            and of.dtype == data.dtype
            and of.shape == data.shape
            and of.stride() == data.stride()
            and of.storage_offset() == data.storage_offset()
            and of.untyped_storage()._cdata == data.untyped_storage()._cdata
        )

    def put_back(self) -> None:
        of = self._of
        if not self._has_its_memory():
            assert self._data is not None
            of.data = self._data
        if of.grad_fn is not self._node:
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
        if self._version is not None:  # no number was written: who has saved it need not mind
            torch._C._autograd._unsafe_set_version_counter((of,), (self._version,))


class _Type(_Note):
    """The class of a module: some change theirs when they are called."""

    def __init__(self, of: nn.Module) -> None:
        self._of, self._type = of, type(of)

    def changed(self) -> bool:
        return type(self._of) is not self._type

    def put_back(self) -> None:
        self._of.__class__ = self._type


@contextmanager
def _plainly() -> Iterator[None]:
    """Within, tensors are looked at as they are, whatever classes and modes would make of it."""
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        yield


def _same(saved: Iterable[Any], now: Iterable[Any]) -> bool:
    """Whether two sequences consist of the same objects."""
    return [*map(id, saved)] == [*map(id, now)]


def _equal(one: Any, other: Any) -> bool:
    """Of what comes out of C++, where containers are made anew: the same tensors, equal others."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


# --- Which notes an object takes ------------------------------------------------------------------

_ATOMS: frozenset[type] = frozenset({
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), slice,
    range, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    torch.Generator, types.CodeType, types.BuiltinFunctionType, types.ModuleType, types.FrameType,
    types.GeneratorType, types.MethodWrapperType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
})  # fmt: skip


def _notes(of: Any) -> tuple[list[_Note], list[_Child]]:
    """What can change about an object, and what else it leads to."""
    kind = type(of)
    if kind in (dict, OrderedDict):  # which most are
        return [_Items(of)], []
    if issubclass(kind, type):
        if _is_library(of):
            return [], []
        return [_Class(of)], [((_TYPE, base.__name__), base) for base in of.__bases__]
    if kind is types.FunctionType:
        return _of_function(of)
    if kind is types.MethodType:
        return [], [((_ATTRIBUTE, "__self__"), of.__self__), ((_VARIABLE, ""), of.__func__)]
    if kind is functools.partial:
        return [], [*((((_ATTRIBUTE, k), getattr(of, k))) for k in ("func", "args", "keywords"))]
    if kind in (staticmethod, classmethod):
        return [], [((_ATTRIBUTE, "__func__"), of.__func__)]
    if kind is property:
        return [], [((_ATTRIBUTE, k), getattr(of, k)) for k in ("fget", "fset") if getattr(of, k)]
    if kind is types.CellType:
        return [_cell(of)], []
    notes: list[_Note] = []
    leads: list[_Child] = []
    if issubclass(kind, dict):
        notes.append(_Items(of))
    elif issubclass(kind, tuple | frozenset):
        leads += (((_ITEM, index), value) for index, value in enumerate(of))
    else:
        notes += (_Elements(of, base) for base in (list, deque, set) if issubclass(kind, base))
    if kind in _CONTAINERS:
        return notes, leads
    if issubclass(kind, Tensor):
        if _has_memory(of):
            notes.append(_Autograd(of))
    elif any(kind.__module__.startswith(name) for name in _OF_COMPILERS) and not issubclass(
        kind, nn.Module
    ):
        return [], []
    if issubclass(kind, nn.Module):
        notes.append(_Type(of))
        # Noted with the module, whatever the limit is: these are exchanged.
        exchanged = (vars(of).get("_parameters"), vars(of).get("_buffers"))
        notes += (_Items(one) for one in exchanged if isinstance(one, dict))
        leads += _of_script(of, notes)
    notes += _attributes(of, kind)
    if not _is_library(kind):
        leads.append(((_TYPE, kind.__name__), kind))
    return notes, leads


_CONTAINERS = frozenset({dict, OrderedDict, list, deque, set, tuple, frozenset})


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
        yield _Items(attributes, _ATTRIBUTE)
    slots = {
        name: slot
        for base in kind.__mro__
        if not _is_library(base)
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType
    }
    if slots:

        def get(name: str) -> Any:
            try:
                return slots[name].__get__(of)
            except AttributeError:
                return _NOTHING

        yield _Names(
            slots,
            get,
            lambda name, value: slots[name].__set__(of, value),
            lambda name: slots[name].__delete__(of),
        )


def _of_script(module: nn.Module, notes: list[_Note]) -> list[_Child]:
    """What is C++'s of a module; its children are in no dictionary."""
    script = vars(module).get("_c")
    if not isinstance(script, torch._C.ScriptModule):
        return []
    notes.append(_Script(script))
    return [((_ATTRIBUTE, name), child) for name, child in module.named_children()]


def _cell(of: types.CellType) -> _Note:
    def get(_: str) -> Any:
        try:
            return of.cell_contents
        except ValueError:
            return _NOTHING

    def put(_: str, value: Any) -> None:
        of.cell_contents = value

    def delete(_: str) -> None:
        del of.cell_contents

    return _Names([""], get, put, delete, "{}")


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


def _global_variables(used: Iterable[str], names: dict[str, Any]) -> _Note:
    def delete(name: str) -> None:
        if type(names[name]) is not types.ModuleType:  # what was imported meanwhile stays
            del names[name]

    return _Names(
        used,
        lambda name: names.get(name, _NOTHING),
        lambda name, value: names.__setitem__(name, value),
        delete,
        _VARIABLE,
    )


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_library(of: Any) -> bool:
    """Whether a class, a function or a file is Python's, PyTorch's or ours."""
    name = of.__name__ if isinstance(of, types.ModuleType) else getattr(of, "__module__", None)
    return not isinstance(name, str) or name.partition(".")[0] in _LIBRARIES


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


_OWN = (nn.Module, type, dict, list, deque, set, tuple, frozenset)
_PLAIN = frozenset({
    types.FunctionType, types.MethodType, types.CellType, types.SimpleNamespace, functools.partial,
    staticmethod, classmethod, property,
})  # fmt: skip


# --- All of it ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Met:
    """An object of which there are notes, and how it was come to."""

    of: Any
    parent: int | None
    segment: Segment
    own: list[_Note] | None = None  # what is put back in any case
    shared: list[_Note] | None = None  # what is only where something must go
    late: bool = False  # it was met in the middle of things, and may have been made there


class State:
    """What can be reached from some objects, as it was when they were taken."""

    def __init__(self) -> None:
        self._met: dict[int, _Met] = {}

    def take(
        self, roots: Mapping[str, Any], shared: bool = False, late: bool = False
    ) -> list[nn.Module]:
        """Notes objects and all that they lead to; the model's modules that are new.

        ``shared`` says that they are not the model's own; ``late``, that it is being called.
        """
        queues: tuple[deque[Any], deque[Any]] = deque(), deque()
        for name, root in roots.items():
            if isinstance(root, nn.Module) and not shared:  # modules before all else
                inner = root.named_modules()
                queues[False].extend((one, None, (_of_module(name, of), None)) for of, one in inner)
        queues[shared].extend((root, None, (name, None)) for name, root in roots.items())
        found: list[nn.Module] = []
        room = LIMIT
        with _plainly():
            for is_shared in (False, True):  # what is the model's own is not what it shares
                queue = queues[is_shared]
                while queue and room:
                    of, parent, segment = queue.popleft()
                    if type(of) in _ATOMS or self._is_noted(of, is_shared):
                        continue
                    if not is_shared and _is_shared(of):
                        queues[True].append((of, parent, segment))
                        continue
                    room -= 1
                    with suppress(Exception):  # what does not let itself be looked at is let be
                        queue.extend(self._note(of, parent, segment, is_shared, late))
                        if isinstance(of, nn.Module) and not is_shared:
                            found.append(of)
        return found

    def _is_noted(self, of: Any, shared: bool) -> bool:
        met = self._met.get(id(of))
        return met is not None and (met.own is not None or (shared and met.shared is not None))

    def _note(
        self, of: Any, parent: int | None, segment: Segment, shared: bool, late: bool
    ) -> list[tuple[Any, int, Segment]]:
        """Where it leads to, and how."""
        notes, leads = _notes(of)
        met = self._met.setdefault(id(of), _Met(of, parent, segment, late=late))
        if shared:
            met.shared = notes
        else:
            met.own = notes
        for note in notes:
            leads.extend(note.children())
        return [(child, id(of), how) for how, child in leads]

    def take_tensor(self, tensor: Tensor) -> None:
        """Notes what autograd knows of a tensor from outside, unless it was noted before."""
        if _has_memory(tensor) and not self._is_noted(tensor, False):
            met = self._met.setdefault(id(tensor), _Met(tensor, None, ("a tensor", None)))
            with _plainly():
                met.own = [_Autograd(tensor)]

    def has(self, of: Any) -> bool:
        """Whether it was taken, as the model's own."""
        return self._is_noted(of, False)

    def put_back(self, must_go: Callable[[Any], bool] = lambda _: False) -> None:
        """Undoes all changes; of what is shared, those by which something is held that must go.

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
                        if note.changed() and (is_own or self._leads_to(note.now(), must_go)):
                            note.put_back()
                    except Exception as error:  # the others are to be put back all the same
                        trouble = error
        if trouble is not None:
            raise RuntimeError(f"the model is not as it was: {trouble}") from trouble

    def _leads_to(self, values: Iterable[Any], must_go: Callable[[Any], bool]) -> bool:
        """Whether something of the kind hangs on these values, by objects that are new."""
        left, seen = [*values], set[int]()
        while left and len(seen) < _REACH:
            of = left.pop()
            if must_go(of):
                return True
            if type(of) in _ATOMS or id(of) in seen or id(of) in self._met:
                continue
            seen.add(id(of))
            if not isinstance(of, Tensor | type | types.FunctionType):
                left += gc.get_referents(of)
        return False

    def close(self) -> None:
        """Forgets what was noted, but for where it was."""
        self._met = {at: met for at, met in self._met.items() if not met.late}
        for met in self._met.values():
            met.own, met.shared = None, None

    def forget(self) -> None:
        """All of it."""
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


# --- What holds an object -------------------------------------------------------------------------


def clear_caches(must_go: Callable[[Any], bool]) -> None:
    """Clears each ``functools.lru_cache`` that has noted something of the kind.

    Which of its entries are new cannot be told, and what is not in a cache is made again.
    """
    for one in gc.get_objects():
        if type(one) is _LRU_CACHE and _holds(one, must_go):
            one.cache_clear()


def _holds(cache: Any, must_go: Callable[[Any], bool]) -> bool:
    left, seen = deque(gc.get_referents(cache)), set[int]()
    while left and len(seen) < _REACH_OF_CACHES:
        of = left.popleft()
        if must_go(of):
            return True
        if id(of) in seen or isinstance(of, type | types.ModuleType | types.FunctionType | Tensor):
            continue
        seen.add(id(of))
        left += gc.get_referents(of)
    return False


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
