"""Modules that run fused blocks in training: ``optimize`` gives them a class and a graph.

The class is derived from the module's own. Its ``forward`` runs the graph where the module is in
training mode and all that the graph depends on is as it was traced; otherwise it runs the
``forward`` of the module's own class. Parameters, buffers, children, hooks and state dicts are the
module's own.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fastconv.layers import has_hooks_of_all
from fastconv.network.forward_code import MISSING, Code, Unwatchable, is_constant, variable

_GRAPH = "_fastconv_training_graph"
"""The attribute of a module that has its :class:`TrainingGraph`."""

COMPILED = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile can trace the comparisons that decide if a graph runs.

In older versions of PyTorch, compiled models run their own code.
"""


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


# --- What a graph depends on ----------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """A module of which a graph has constants: it must be as it was traced.

    Attributes:
        path: how it is reached from the module that has the graph.
        kind: its class; None if that does not matter, and hooks do not.
        options: values of its attributes.
        children: names of its modules, where code in the graph may go through them.
        variables: variables outside of classes that methods read, by class, method and name.
    """

    path: tuple[str, ...]
    kind: type[nn.Module] | None
    options: Mapping[str, Any]
    children: tuple[str, ...] | None = None
    variables: tuple[tuple[type, str, str, Any], ...] = ()

    @classmethod
    def of_part(cls, path: str, module: nn.Module, options: Iterable[str]) -> Watched:
        """A layer that a block computes; its other attributes are read in each call."""
        values = {name: getattr(module, name) for name in options}
        return cls(_split(path), type(module), values)

    @classmethod
    def of_container(cls, path: str, module: nn.Module, code: Code) -> Watched:
        """A module whose ``forward`` is part of the graph.

        Raises:
            Unwatchable: the ``forward`` reads something that may change unseen.
        """
        options = {name: value for name, value in vars(module).items() if is_constant(value)}
        options |= code.attributes(module)
        return cls(_split(path), type(module), options, _children(module), code.variables())

    def holds(self, root: nn.Module) -> bool:
        """Whether the module is as it was traced."""
        module: Any = root
        for name in self.path:
            module = module._modules.get(name)
            if module is None:
                return False
        if self.path and self.kind is not None and not self._is_called_alike(module):
            return False
        for name, value in self.options.items():
            found = getattr(module, name, MISSING)
            if isinstance(found, types.MethodType):  # which is made anew each time
                found = found.__func__
            if found is not value and not (type(found) is type(value) and found == value):
                return False
        if self.children is not None and _children(module) != self.children:
            return False
        return all(
            variable(getattr(owner, method).__globals__, name) == value
            for owner, method, name, value in self.variables
        )

    def _is_called_alike(self, module: nn.Module) -> bool:
        same_code = type(module) is self.kind and "forward" not in vars(module)
        return same_code and not has_own_hooks(module)


def watched_modules(
    root: nn.Module, inlined: Iterable[str], called: Collection[str]
) -> tuple[Watched, ...]:
    """The modules that a graph depends on, but for the layers that blocks compute.

    Args:
        root: the module that has the graph.
        inlined: names of modules in it whose ``forward`` is part of the graph.
        called: names of modules that the graph calls.

    Raises:
        Unwatchable: one of them reads something that may change unseen.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    codes = {path: Code.of(type(modules[path])) for path in ("", *sorted(inlined))}
    found = []
    for path, code in codes.items():
        found.append(Watched.of_container(path, modules[path], code))
        found += _watched_inside(path, modules[path], code, codes, called)
    return tuple(found)


def _watched_inside(
    path: str, module: nn.Module, code: Code, inlined: Collection[str], called: Collection[str]
) -> Iterator[Watched]:
    """What code may read of the modules in a module, but for those that are ``inlined``."""
    for name, child in module._modules.items():
        below = f"{path}.{name}" if path else name
        if child is None or below in inlined or not code.reaches(module, name):
            continue
        is_called = any(f"{below}.".startswith(f"{one}.") for one in called)
        try:
            inner = code.inside(type(child))
            variables = inner.variables()
        except Unwatchable:
            if not is_called:
                raise
            inner, variables = code, ()  # its methods are hardly those that the code names
        options = inner.attributes(child, lenient=is_called)
        children = None if is_called else _children(child)
        if options or variables or children is not None:
            yield Watched(_split(below), None, options, children, variables)
        yield from _watched_inside(below, child, inner, inlined, called)


def _children(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, child in module._modules.items() if child is not None)


def _split(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


# --- The graph ------------------------------------------------------------------------------------


@dataclass
class TrainingGraph:
    """A module's ``forward`` as Python code, with fused blocks, and what it depends on.

    Attributes:
        source: a function ``forward(self, ...)`` as text; ``self`` is the module.
        names: the values of the global names in it. Files are there by their own names.
        arguments: for each argument that the graph was traced with, by position or name, whether
            it was a tensor, and its value if not.
        defaults: the values of the arguments that it was traced without.
        watched: the modules that have to be as they were traced.
    """

    source: str
    names: dict[str, Any]
    arguments: tuple[tuple[int | str, bool, Any], ...]
    defaults: dict[str, Any]
    watched: tuple[Watched, ...]
    function: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made here, because torch.compile cannot trace what makes it.
        names = dict(self.names)
        exec(compile(self.source, "<fastconv training graph>", "exec"), names)
        self.function = names["forward"]

    @classmethod
    def of(
        cls, graph: Graph, arguments: Any, defaults: dict[str, Any], watched: Iterable[Watched]
    ) -> TrainingGraph:
        code = graph.python_code("self")
        names = {name: value for name, value in code.globals.items() if name != "__builtins__"}
        return cls(code.src, names, arguments, defaults, tuple(watched))

    def holds(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the graph computes what the module's own ``forward`` would."""
        if len(args) + len(kwargs) != len(self.arguments) or has_hooks_of_all():
            return False
        for at, is_tensor, value in self.arguments:
            if isinstance(at, int):
                given = args[at] if at < len(args) else MISSING
            else:
                given = kwargs.get(at, MISSING)
            if is_tensor:
                if not isinstance(given, Tensor):
                    return False
            elif type(given) is not type(value) or given != value:
                return False
        return all(one.holds(module) for one in self.watched)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.function(module, *args, **kwargs, **self.defaults)

    def with_names(self, names: Mapping[Any, Any]) -> TrainingGraph:
        """The graph with other functions in the place of some."""
        changed = {
            name: names.get(value, value) if isinstance(value, types.FunctionType) else value
            for name, value in self.names.items()
        }
        return TrainingGraph(self.source, changed, self.arguments, self.defaults, self.watched)

    def __getstate__(self) -> dict[str, Any]:
        names = {name: _Imported.of(value) for name, value in self.names.items()}
        return {**vars(self), "names": names, "function": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = {
            name: value.value() if isinstance(value, _Imported) else value
            for name, value in state["names"].items()
        }
        vars(self).update(state, names=names)
        self.__post_init__()


@dataclass(frozen=True)
class _Imported:
    """A Python file, or something in one, by name: not all of them can be pickled."""

    file: str
    name: str | None

    @classmethod
    def of(cls, value: Any) -> Any:
        """The name of a value, or the value itself if it is found under no name."""
        if isinstance(value, types.ModuleType):
            return cls(value.__name__, None)
        file, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        found = getattr(sys.modules.get(file or ""), name or "", MISSING)
        return cls(str(file), str(name)) if found is value else value

    def value(self) -> Any:
        file = importlib.import_module(self.file)
        return file if self.name is None else getattr(file, self.name)


# --- The class ------------------------------------------------------------------------------------


class _WithBlocks(nn.Module):
    """What classes of modules with a training graph have in common."""

    _own_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so that pickles name the module's own class instead.
        reduced: tuple[Any, ...] = tuple(super().__reduce_ex__(protocol))
        _, args, *rest = reduced
        return (_new, (self._own_class, *args[1:]), *rest)


def _new(own_class: Any, *args: Any) -> nn.Module:
    made: nn.Module = own_class.__new__(_class_with_blocks(own_class), *args)
    return made


def _records_own_code() -> bool:
    """Whether torch.export, torch.jit.trace or the like record the module's own code.

    torch.compile runs the graph: Dynamo traces the comparisons, too, and guards what they read.
    """
    if COMPILED and torch.compiler.is_dynamo_compiling():
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


@cache
def _class_with_blocks(own_class: Any) -> Any:
    """The class derived from a module's own that runs its training graph."""

    @functools.wraps(own_class.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and not _records_own_code():
            graph = vars(self).get(_GRAPH)
            if graph is not None and graph.holds(self, args, kwargs):
                return graph.run(self, args, kwargs)
        return own_class.forward(self, *args, **kwargs)

    names = {
        "forward": forward,
        "_own_class": own_class,
        "__module__": own_class.__module__,
        "__qualname__": own_class.__qualname__,
        "__doc__": own_class.__doc__,
    }
    return type(own_class.__name__, (_WithBlocks, own_class), names)


def reason_to_leave(module: nn.Module) -> str | None:
    """Why a module cannot be given a training graph, if it cannot."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if "forward" in vars(module):
        return "its forward was replaced"
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return "its class pickles itself in a way of its own"
    if kind.__call__ is not nn.Module.__call__:
        return "its class is called in a way of its own"
    if kind.__getattr__ is not nn.Module.__getattr__ or (
        kind.__getattribute__ is not object.__getattribute__
    ):
        return "its class has attributes of its own making"
    if not isinstance(vars(kind).get("forward", kind.forward), types.FunctionType):
        return "its forward is no function"
    return None


def has_blocks(module: nn.Module) -> bool:
    return isinstance(module, _WithBlocks)


def attach(module: nn.Module, graph: TrainingGraph) -> None:
    """Has a module run the graph in training."""
    vars(module)[_GRAPH] = graph
    kind: Any = type(module)
    if not has_blocks(module):
        module.__class__ = _class_with_blocks(kind)


def detach(module: nn.Module) -> None:
    """Gives a module its own class back."""
    vars(module).pop(_GRAPH, None)
    kind: Any = type(module)
    if has_blocks(module):
        module.__class__ = kind._own_class


def has_other_class(module: nn.Module) -> bool:
    """Whether a wrapper has derived a class from that of a module with blocks."""
    return has_blocks(module) and "_own_class" not in vars(type(module))
