"""Which records an object takes, which other objects it leads to, and whose those are."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastconv.network import records
from fastconv.network.records import ATTRIBUTE, ITEM, VARIABLE, Child, Contents, Record
from fastconv.network.tensor_record import TensorRecord, has_memory

# Code and classes of these packages belong to no model: what they keep for themselves is skipped.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "fastconv", "numpy", "sympy", "triton"})

# Instances of these packages' classes describe code, and there are very many of them.
_COMPILERS = ("torch.fx.", "torch._dynamo", "torch._inductor", "torch._subclasses", "torch._ops")

ATOMS: frozenset[type] = frozenset({
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), slice,
    range, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    torch.Generator, types.CodeType, types.BuiltinFunctionType, types.ModuleType, types.FrameType,
    types.GeneratorType, types.MethodWrapperType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
})  # fmt: skip
"""Types of which nothing is recorded, as instances cannot change or lead out of the model."""

_CONTAINERS = (OrderedDict, dict, list, deque, set, tuple, frozenset)

# The attributes by which objects of built-in types lead to others.
_LEADS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
}


# --- Records of an object -------------------------------------------------------------------------


def records_of(of: Any, is_dry: bool, has_values: bool) -> tuple[list[Record], list[Child]]:
    """Records of what can change about an object, and further objects that it leads to.

    ``is_dry`` and ``has_values`` are those of :class:`TensorRecord`.
    """
    kind = type(of)
    if kind in _LEADS:
        return [], [((ATTRIBUTE, name), getattr(of, name)) for name in _LEADS[kind]]
    if issubclass(kind, type):
        if is_library(of):
            return [], []
        return [records.of_class(of)], [((ATTRIBUTE, "__bases__"), base) for base in of.__bases__]
    if kind is types.FunctionType:
        return _of_function(of)
    if kind is types.CellType:
        return [records.of_descriptors(of, records.CELL, "")], []
    found: list[Record] = []
    leads: list[Child] = []
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base in (tuple, frozenset):
        leads += (((ITEM, index), value) for index, value in enumerate(of))
    elif base is not None:
        found.append(Contents(of, base))
    if kind is base:
        return found, leads
    if issubclass(kind, Tensor):
        if has_memory(of):
            found.append(TensorRecord(of, is_dry, has_values))
        if has_values and hasattr(of, "__tensor_flatten__"):  # a wrapper of other tensors
            inner, _ = of.__tensor_flatten__()
            leads += (((ATTRIBUTE, name), getattr(of, name)) for name in inner)
    elif issubclass(kind, nn.Module):
        # Some modules, such as lazy ones, change their class when they are called.
        found.append(records.of_descriptors(of, records.CLASS))
        # A dry run exchanges parameters and buffers, so these are recorded with their module,
        # even where the limit of objects is reached.
        exchanged = (vars(of).get("_parameters"), vars(of).get("_buffers"))
        found += (Contents(one, dict) for one in exchanged if isinstance(one, dict))
        if isinstance(vars(of).get("_c"), torch._C.ScriptModule):
            found.append(records.of_script(of._c))
            leads += (((ATTRIBUTE, name), child) for name, child in of.named_children())
    elif kind.__module__.startswith(_COMPILERS):
        return [], []
    found += _attributes(of, kind)
    if not is_library(kind):
        leads.append(((ATTRIBUTE, "__class__"), kind))
    return found, leads


def _dictionary(of: Any) -> dict[str, Any] | None:
    """An object's attributes, if it has a dictionary of them that can be read."""
    try:
        found = object.__getattribute__(of, "__dict__") if type(of).__dictoffset__ else None
    except Exception:  # raised by the class's own code
        return None
    return found if type(found) is dict else None


def _attributes(of: Any, kind: type) -> Iterator[Record]:
    attributes = _dictionary(of)
    if attributes is not None:
        yield Contents(attributes, dict, ATTRIBUTE)
    slots = {
        name: slot
        for base in kind.__mro__
        if not is_library(base)
        for name, slot in vars(base).items()
        if type(slot) is types.MemberDescriptorType
    }
    if slots:
        yield records.of_descriptors(of, slots)


def _of_function(of: types.FunctionType) -> tuple[list[Record], list[Child]]:
    """The variables of a function that outlive its calls: closure, globals, defaults."""
    if is_library(of):
        return [], []
    outside = zip(of.__code__.co_freevars, of.__closure__ or (), strict=True)
    leads: list[Child] = [((VARIABLE, name), cell) for name, cell in outside]
    for name in ("__defaults__", "__kwdefaults__", "__dict__"):
        leads.append(((ATTRIBUTE, name), getattr(of, name)))
    return [*_global_variables(of.__code__, of.__globals__)], leads


def _global_variables(code: types.CodeType, names: dict[str, Any]) -> Iterator[Record]:
    """Global variables that code names, and those of other files: ``name``, ``file.name``."""
    used = [*names_in(code)]
    yield records.of_globals(used, names)
    for name in used:
        value = names.get(name)
        if type(value) is types.ModuleType and not is_library(value):
            yield records.of_globals([one for one in used if one in vars(value)], vars(value))


def named_globals(code: types.CodeType, names: dict[str, Any]) -> dict[str, Any]:
    """The values of the global variables that code names."""
    found = _global_variables(code, names)
    return {name: value for record in found for (_, name), value in record.children()}


def names_in(code: types.CodeType) -> Iterator[str]:
    """All global names and attributes in code, those of functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def is_library(of: Any) -> bool:
    """Whether a class, a function or a file belongs to one of :data:`_LIBRARIES`."""
    name = of.__name__ if isinstance(of, types.ModuleType) else getattr(of, "__module__", None)
    return not isinstance(name, str) or name.partition(".")[0] in _LIBRARIES


# --- Distances ------------------------------------------------------------------------------------

_OWN = (nn.Module, type, *_CONTAINERS)
_PLAIN = frozenset({types.FunctionType, types.CellType, types.SimpleNamespace, *_LEADS})


def is_shared(of: Any) -> bool:
    """Whether other threads may be using an object: it has a lock, or is of the standard library.

    Containers, functions and the like are of the standard library, and the model's own.
    """
    kind = type(of)
    if issubclass(kind, _OWN) or kind in _PLAIN:
        return False
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return True
    values = [*(_dictionary(of) or {}).values()]
    return any(type(value).__module__ in ("_thread", "threading") for value in values)


# The distance of an object from the model. MODULES: the model's modules and the contents of their
# containers. OBJECTS: attributes of objects that these hold. FAR: all else that belongs to the
# model. SHARED: what it shares with others. Numbers of tensors are recorded at the first two
# distances alone: farther away there may be a trainer, with all of its data.
MODULES, OBJECTS, FAR, SHARED = range(4)


def distance(of: Any, parent: int) -> int:
    """The distance of the objects that an object at distance ``parent`` leads to."""
    if parent == SHARED or issubclass(type(of), (*_CONTAINERS, Tensor, types.CellType)):
        return parent
    if isinstance(of, nn.Module) and parent < FAR:
        return MODULES
    return min(parent + 1, FAR)


# --- What hangs on an object ----------------------------------------------------------------------

_ENDS = (Tensor, type, types.FunctionType, types.ModuleType)


def leads_to(
    values: Iterable[Any], must_go: Callable[[Any], bool], most: int, known: Collection[int] = ()
) -> bool:
    """Whether values lead to an object that must go.

    Args:
        values: where the search begins.
        must_go: says whether an object must go.
        most: how many objects are looked at.
        known: ids of objects beyond which the search does not go.
    """
    left, seen = deque(values), set[int]()
    while left and len(seen) < most:
        of = left.popleft()
        if must_go(of):
            return True
        if id(of) not in seen and id(of) not in known and not isinstance(of, _ENDS):
            seen.add(id(of))
            left += gc.get_referents(of)
    return False
