"""What the code of a module reads and sets, beside the tensors that it is called with.

A graph of a ``forward`` has constants in the place of what it reads, and sets nothing. So the graph
may run where all of that can be compared with what it was (:mod:`fastconv.network.training_graph`).
"""

from __future__ import annotations

import copy
import dis
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from torch import nn

from fastconv.network.reachable import ATOMS, is_library, names_in

MISSING = object()
"""What there is where nothing has a name."""

_CODE = (type, types.FunctionType, types.BuiltinFunctionType)
_COLLECTIONS = (list, dict, set, tuple, frozenset)
_MOST_ELEMENTS = 100  # of a list or the like that is compared in each call: some microseconds
_OF_ALL = frozenset(vars(nn.Module()))
"""The attributes of every module: its parameters, modules, hooks and so on."""

_SETTERS = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
_BY_NAME = {"getattr", "vars", "__dict__", "children", "modules", "named_children", "named_modules"}
"""Names in code that reads attributes or modules without naming them."""

_SETTINGS = {
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype",
    "is_autocast_cpu_enabled", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype",
    "get_default_dtype", "are_deterministic_algorithms_enabled",
}  # fmt: skip
"""PyTorch's functions that tell under which settings a model is called."""


class Unwatchable(Exception):
    """A module's ``forward`` depends on something that cannot be compared in each call."""


class _Method(NamedTuple):
    owner: type  # the class that has it
    name: str
    function: Any  # a types.FunctionType, which mypy would take for a method

    @property
    def is_plain(self) -> bool:
        """Whether it is the function that its class has under its name."""
        return vars(self.owner).get(self.name) is self.function


@dataclass(frozen=True)
class Code:
    """The code that becomes part of a graph, where it may read a module.

    Attributes:
        methods: those of the module's class.
        names: all names in them, and in the code of the modules around it.
        reads_training: whether these read ``training`` of other objects than their own.
    """

    methods: tuple[_Method, ...]
    names: frozenset[str]
    reads_training: bool

    @classmethod
    def of(cls, kind: type) -> Code:
        """The code of the ``forward`` of a class.

        Raises:
            Unwatchable: it sets something, or depends on what cannot be compared.
        """
        return cls((), frozenset(), False)._with(_methods(kind, ["forward"]))

    def inside(self, kind: type) -> Code:
        """Adds the methods that the code may call of a module in its own.

        Raises:
            Unwatchable: as :meth:`of`.
        """
        return self._with(_methods(kind, self.names - {"forward"}))

    def _with(self, methods: Collection[_Method]) -> Code:
        for method in methods:
            _check(method)
        codes = [method.function.__code__ for method in methods]
        return replace(
            self,
            methods=tuple(methods),
            names=self.names.union(*map(names_in, codes)),
            reads_training=self.reads_training or any(map(_reads_training, codes)),
        )

    def reaches(self, module: nn.Module, child: str) -> bool:
        """Whether the code may read the module of this name in another one."""
        by_index = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        return by_index or child in self.names or self._reads_by_name

    def attributes(self, module: nn.Module, lenient: bool = False) -> dict[str, Any]:
        """The attributes of a module that the code reads, as values to compare with.

        Args:
            module: a module.
            lenient: another object may be the one whose attributes have these names.

        Raises:
            Unwatchable: an attribute cannot be compared.
        """
        found: dict[str, Any] = {}
        for name in sorted(self.names - _OF_ALL - {"forward"}):
            value = _attribute(module, name)
            kept = value if isinstance(value, _CODE) else kept_value(value)
            if kept is not MISSING:
                found[name] = kept
            elif value is not MISSING and not lenient:
                raise Unwatchable(f"its forward reads the attribute {name}, which may change")
        if self._reads_by_name:
            of_all = {name: kept_value(value) for name, value in vars(module).items()}
            found |= {
                n: one for n, one in of_all.items() if n not in _OF_ALL and one is not MISSING
            }
        if self.reads_training:
            found["training"] = module.training
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None and (name in self.names or self._reads_by_name):
                found[name] = None
        return found

    @property
    def _reads_by_name(self) -> bool:
        """Whether the code may read attributes that it does not name."""
        return not self.names.isdisjoint(_BY_NAME)

    def variables(self) -> tuple[tuple[type, str, str, Any], ...]:
        """The variables outside of classes that the code reads: class, method, name and value.

        Raises:
            Unwatchable: one of them cannot be compared.
        """
        found = []
        for method in self.methods:
            for name, value in _variables(method):
                kept = kept_value(value)
                if kept is MISSING or not method.is_plain:
                    raise Unwatchable(f"its {method.name} reads the variable {name}")
                found.append((method.owner, method.name, name, kept))
        return tuple(found)


# --- Values ---------------------------------------------------------------------------------------


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a tuple of those."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return isinstance(value, Enum) or (
        type(value) in ATOMS and not isinstance(value, types.ModuleType)
    )


def kept_value(value: Any) -> Any:
    """A constant, or a copy of a small collection of constants and functions; else MISSING."""
    if is_constant(value):
        return value
    return copy.deepcopy(value) if _is_small(value) else MISSING


def _is_small(value: Any) -> bool:
    elements = list(_elements(value))
    return len(elements) <= _MOST_ELEMENTS and all(
        # Functions without a name ("<lambda>") cannot be pickled with the graph.
        is_constant(one) or (isinstance(one, _CODE) and "<" not in one.__qualname__)
        for one in elements
    )


def _elements(value: Any) -> Iterator[Any]:
    """What is in a collection and in collections in it, or the value itself."""
    if not isinstance(value, _COLLECTIONS):
        yield value
        return
    for one in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
        yield from _elements(one)


def variable(names: Mapping[str, Any], name: str) -> Any:
    """The value of a global variable, or of one of another file: ``name``, ``file.name``."""
    if "." not in name:
        return names.get(name, MISSING)
    file, _, inner = name.partition(".")
    return getattr(names.get(file), inner, MISSING)


# --- Code -----------------------------------------------------------------------------------------


def _methods(kind: type, names: Iterable[str]) -> list[_Method]:
    """Methods of a class of these names, and those that they may call."""
    found: list[_Method] = []
    left, seen = [*names], set[str]()
    order = kind.__mro__
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for owner in (one for one in order if name in vars(one)):
            if _is_torchs(owner) and name != "forward":
                break
            functions = list(_functions(vars(owner)[name]))
            found += (_Method(owner, name, function) for function in functions)
            called = {one for function in functions for one in names_in(function.__code__)}
            left += called
            # A method may call the one that it replaces.
            if "super" not in called and called.isdisjoint(one.__name__ for one in order):
                break
    return found


def _functions(of: Any) -> Iterator[types.FunctionType]:
    """The functions of an attribute of a class, and those that decorators have wrapped."""
    for one in (of.fget, of.fset) if isinstance(of, property) else (getattr(of, "__func__", of),):
        while isinstance(one, types.FunctionType):
            yield one
            one = getattr(one, "__wrapped__", None)


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("torch.")


def _attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module or of its class, but no module and no code that is followed."""
    value = vars(module).get(name, MISSING)
    if value is not MISSING:
        return MISSING if isinstance(value, nn.Module) else value
    owner = next((one for one in type(module).__mro__ if name in vars(one)), None)
    if owner is None or _is_torchs(owner):
        return MISSING
    value = vars(owner)[name]
    followed = (property, classmethod, staticmethod, nn.Module)
    return MISSING if isinstance(value, followed) else value


def _variables(method: _Method) -> Iterator[tuple[str, Any]]:
    """The global variables that a method names, and those of other files, but no code."""
    function = method.function
    names = sorted({*names_in(function.__code__)})
    for name in names:
        value = function.__globals__.get(name, MISSING)
        if not isinstance(value, types.ModuleType):
            if _may_change(value):
                yield name, value
        elif not is_library(value):
            of_file = ((inner, vars(value)[inner]) for inner in names if inner in vars(value))
            yield from ((f"{name}.{inner}", one) for inner, one in of_file if _may_change(one))


def _may_change(value: Any) -> bool:
    """Whether a variable is no code, and no object of a library."""
    if value is MISSING or isinstance(value, (*_CODE, types.ModuleType)):
        return False
    own = (*_COLLECTIONS, deque, types.SimpleNamespace)
    if is_constant(value) or isinstance(value, own):
        return True
    return not callable(value) and not is_library(type(value))


def _check(method: _Method) -> None:
    """Raises if a graph cannot do what a method does, or cannot tell when that changes."""
    name, function = method.name, method.function
    names = {*names_in(function.__code__)}
    if asked := sorted(names & _SETTINGS):
        raise Unwatchable(f"its {name} asks for a setting, {asked[0]}")
    for setter in sorted(names & {"setattr", "delattr"}):
        raise Unwatchable(f"its {name} calls {setter}")
    for instruction in _instructions(function.__code__):
        if instruction.opname in _SETTERS:
            raise Unwatchable(f"its {name} sets {instruction.argval}")
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            value = None
        if not isinstance(value, (*_CODE, types.ModuleType)):
            raise Unwatchable(f"its {name} reads the variable {free} of a function around it")


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _instructions(one)


def _reads_training(code: types.CodeType) -> bool:
    """Whether code reads ``training`` of another object than its first argument."""
    before = None
    for instruction in _instructions(code):
        if instruction.opname.startswith("LOAD_ATTR") and instruction.argval == "training":
            own = code.co_varnames[:1]
            if (
                before is None
                or not before.opname.startswith("LOAD_FAST")
                or ((before.argval,) != own)
            ):
                return True
        before = instruction
    return False
