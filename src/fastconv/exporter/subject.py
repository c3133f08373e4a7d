"""Finds out what is exported: the text of ``ModelNew``, and the convolutions that it computes."""

from __future__ import annotations

import ast
import builtins
import keyword
import runpy
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fastconv import files
from fastconv.errors import ExportError
from fastconv.problem import SIDES, Problem
from fastconv.workloads import SUITES, Workload, WorkloadError, parse_shape

LAYERS: dict[type[nn.Module], str] = {
    layer: layer.__name__
    for layer in (
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    )
}  # fmt: skip
"""PyTorch's layers that files replace, with the names of the classes that do."""


@dataclass(frozen=True)
class Subject:
    """The model that a file is exported for.

    ``model`` is the text of the class ``ModelNew``, and ``imports`` are the statements that it
    needs. ``example`` is an expression that constructs it, and ``input_shapes`` are the shapes of
    the tensors that it is then called with. ``layers`` are the names of the layers that it
    constructs, of :data:`LAYERS`. ``problems`` are its convolutions: a transposed one is there as
    the convolution whose input gradient it is, and a sequence as an image of one row.
    """

    title: str
    command: str
    imports: tuple[str, ...]
    model: str
    example: str
    input_shapes: tuple[tuple[int, ...], ...]
    layers: frozenset[str]
    problems: tuple[Problem, ...]


def choose(
    workload: str | None, shape: str | None, reference: str | Path | None, attribute: str | None
) -> Subject:
    """The subject that the arguments of :func:`fastconv.export` select."""
    given = [name for name, value in (("workload", workload), ("shape", shape),
                                      ("reference", reference)) if value is not None]  # fmt: skip
    if len(given) != 1:
        raise ExportError(
            "exactly one of a workload, a shape and a reference can be exported, but got "
            + (" and ".join(given) or "none of them")
        )
    if attribute:
        _check_attribute(attribute)
    if reference is not None:
        return _from_reference(Path(reference))
    if workload is not None:
        return _from_workload(_named(workload), f"--workload {workload}", attribute)
    assert shape is not None
    try:
        return _from_workload(parse_shape(shape), f'--shape "{shape}"', attribute)
    except WorkloadError as error:
        raise ExportError(str(error)) from error


def _check_attribute(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ExportError(f"attribute should be a name, or None, but got {name!r}")
    if hasattr(nn.Module(), name):
        raise ExportError(f"attribute should not be {name!r}: every nn.Module has one already")
    if name.startswith("__"):
        raise ExportError(
            f"attribute should not be {name!r}: Python changes names that begin with two "
            "underscores, or has a use of its own for them"
        )


# --- A workload ----------------------------------------------------------------------------------


def _named(name: str) -> Workload:
    known = {workload.name: workload for suite in SUITES.values() for workload in suite}
    if name not in known:
        raise ExportError(f"no workload {name!r}: it should be one of {', '.join(known)}")
    return known[name]


def _from_workload(workload: Workload, option: str, attribute: str | None) -> Subject:
    layer = f"Conv{'Transpose' if workload.transposed else ''}{workload.axes}d"
    before, after = workload.sides[::2], workload.sides[1::2]
    if before != after:
        raise ExportError(
            f"nn.{layer} pads both sides alike, but got padding={tuple(workload.sides)} "
            f"{SIDES[workload.axes]}"
        )
    if attribute is None:
        option += " --bare"
    elif attribute not in ("", workload.function):
        option += f" --attribute {attribute}"
    if attribute == "":
        attribute = workload.function
    return Subject(
        title=workload.name if workload.name == workload.shape else
        f"{workload.name}, {workload.about}: {workload.shape}",
        command=f"fastconv export {option}",
        imports=(),
        model=_model(layer, _defaults(workload), attribute),
        example="ModelNew()",
        input_shapes=(workload.input,),
        layers=frozenset({layer}),
        problems=(workload.problem,),
    )  # fmt: skip


def _defaults(workload: Workload) -> dict[str, Any]:
    """The arguments of a workload's layer, in the order of PyTorch's."""
    first, second = workload.weight[0], workload.weight[1] * workload.groups
    sizes = {
        "kernel_size": _short(workload.weight[2:]),
        "stride": _short(workload.stride),
        "padding": _short(workload.sides[::2]),
    }
    dilation = {"dilation": _short(workload.dilation)}
    others = {"groups": workload.groups, "bias": False}
    if not workload.transposed:
        return {"in_channels": second, "out_channels": first, **sizes, **dilation, **others}
    sizes["output_padding"] = _short(workload.output_padding)
    return {"in_channels": first, "out_channels": second, **sizes, **others, **dilation}


def _short(sizes: tuple[int, ...]) -> int | tuple[int, ...]:
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _model(layer: str, defaults: dict[str, Any], attribute: str | None) -> str:
    parameters = "".join(f"        {name}={value!r},\n" for name, value in defaults.items())
    indent = " " * 12
    names = textwrap.fill(", ".join(defaults), 100, initial_indent=indent, subsequent_indent=indent)
    if attribute is None:
        return (
            f"class ModelNew({layer}):\n"
            '    """The convolution itself, by default the one that this file is tuned for."""\n'
            "\n"
            f"    def __init__(\n        self,\n{parameters}    ):\n"
            f"        super().__init__(\n{names}\n        )\n"
        )
    return (
        "class ModelNew(nn.Module):\n"
        '    """A model of one convolution, by default the one that this file is tuned for."""\n'
        "\n"
        f"    def __init__(\n        self,\n{parameters}    ):\n"
        "        super().__init__()\n"
        f"        self.{attribute} = {layer}(\n{names}\n        )\n"
        "\n"
        "    def forward(self, x):\n"
        f"        return self.{attribute}(x)\n"
    )


# --- A reference ---------------------------------------------------------------------------------


def _from_reference(path: Path) -> Subject:
    text = files.read_text(path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:  # older Pythons raise ValueError for null bytes
        raise ExportError(f"cannot read {path}: {error}") from error
    with _running(path):
        names = runpy.run_path(str(path))
    for name in ("Model", "get_init_inputs", "get_inputs"):
        if name not in names:
            raise ExportError(f"{path} should define {name}, as a reference has to, but does not")
    model = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"),
        None,
    )
    if model is None:
        raise ExportError(f"{path} should define its class Model itself")
    imports = _imports(tree, model, names, path)
    with _running(path):
        arguments = _listed(names, "get_init_inputs", path)
        problems, input_shapes = _convolutions(names, arguments, path)
    rewritten, layers = _rewritten(text, model, names, path)
    literals = ", ".join(_literal(argument, path) for argument in arguments)
    return Subject(
        title=f"The model of {path.name}",
        command=f"fastconv export --reference {path.name}",
        imports=imports,
        model=rewritten,
        example=f"ModelNew({literals})",
        input_shapes=input_shapes,
        layers=layers,
        problems=problems,
    )


@contextmanager
def _running(path: Path) -> Iterator[None]:
    """A context for running the reference's code, which may raise and print anything.

    What it prints goes to stderr, because the exported file may be printed to stdout.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except ExportError:
        raise
    except SystemExit as error:
        raise ExportError(f"{path} cannot be run: it calls sys.exit({error.code!r})") from error
    except Exception as error:
        why = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise ExportError(f"{path} cannot be run: {why}") from error


def _listed(names: dict[str, Any], function: str, path: Path) -> list[Any]:
    """The list that one of the reference's functions returns."""
    found = names[function]()
    if not isinstance(found, (list, tuple)):
        raise ExportError(f"{path}: {function} should return a list, but returns {found!r}")
    return list(found)


def _literal(argument: Any, path: Path) -> str:
    try:
        ast.literal_eval(repr(argument))
    except (ValueError, SyntaxError):
        raise ExportError(
            f"{path}: arguments of Model should be numbers, strings and tuples or lists of them, "
            f"but got {argument!r}"
        ) from None
    return repr(argument)


def _rewritten(
    text: str, model: ast.ClassDef, names: dict[str, Any], path: Path
) -> tuple[str, frozenset[str]]:
    """The text of the class, renamed ModelNew, with our convolutions, and their names."""
    changes: list[tuple[ast.expr, str]] = []
    for node in _references(model):
        value = _value(node, names)
        if _is_layer(value):
            changes.append((node, LAYERS[value]))
        elif value is names["Model"]:
            changes.append((node, "ModelNew"))
    layers = frozenset(replacement for _, replacement in changes) - {"ModelNew"}
    if not layers:
        raise _nothing_to_replace(path)
    lines = [line.encode() for line in text.splitlines()]
    # From the last column of a line to the first, so that earlier columns stay valid.
    for place, replacement in sorted(changes, key=lambda c: (c[0].lineno, -c[0].col_offset)):
        assert place.lineno == place.end_lineno, "a dotted name is on one line"
        line = lines[place.lineno - 1]
        lines[place.lineno - 1] = (
            line[: place.col_offset] + replacement.encode() + line[place.end_col_offset :]
        )
    rewritten = [line.decode().rstrip() for line in lines[model.lineno - 1 : model.end_lineno]]
    rewritten[0] = rewritten[0].replace("class Model", "class ModelNew", 1)
    return "\n".join(rewritten) + "\n", layers


def _is_layer(value: Any) -> bool:
    """Whether a value of the reference is a class that files replace."""
    return isinstance(value, type) and value in LAYERS


def _nothing_to_replace(path: Path) -> ExportError:
    return ExportError(
        f"Model of {path} constructs no {_listing('or')}: there is nothing to replace"
    )


def _listing(conjunction: str) -> str:
    """The layers that files replace, for an error."""
    *most, last = (f"nn.{name}" for name in LAYERS.values())
    return f"{', '.join(most)} {conjunction} {last}"


Dotted = ast.Name | ast.Attribute


def _references(model: ast.ClassDef) -> Iterator[Dotted]:
    """The names and whole dotted names that the class reads."""
    nodes: list[ast.AST] = [model]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Dotted) and _root(node) is not None:
            if isinstance(node.ctx, ast.Load):
                yield node
        else:
            nodes += ast.iter_child_nodes(node)


def _root(node: ast.expr) -> str | None:
    """The first name of a dotted name; None for other expressions, as an attribute of a call."""
    if isinstance(node, ast.Attribute):
        return _root(node.value)
    return node.id if isinstance(node, ast.Name) else None


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a dotted name at the top level of the reference; None if it has none."""
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


# Statements whose names exported files import in any case.
_PROVIDED = {"import torch", "import torch.nn as nn", "from torch import nn"}


def _imports(
    tree: ast.Module, model: ast.ClassDef, names: dict[str, Any], path: Path
) -> tuple[str, ...]:
    """The reference's import statements that the class needs.

    Raises:
        ExportError: the class needs anything else that is defined outside of it.
    """
    imported = dict(_bindings(tree))
    own = {argument.arg for argument in ast.walk(model) if isinstance(argument, ast.arg)}
    own |= {
        node.id
        for node in ast.walk(model)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    needed: dict[str, None] = {}
    for node in _references(model):
        name = _root(node)
        assert name is not None
        if name in own or name == "Model" or _is_layer(_value(node, names)):
            continue
        if name not in imported:
            if hasattr(builtins, name):
                continue
            raise ExportError(
                f"Model of {path} uses {name}, which is neither imported nor defined in the "
                "class: an exported file has nothing but the class"
            )
        module, statement = imported[name]
        if module not in {"torch", *sys.stdlib_module_names}:
            raise ExportError(
                f"Model of {path} uses {name} ({statement}), but an exported file imports only "
                "torch and the standard library"
            )
        if statement not in _PROVIDED:
            needed[statement] = None
    return tuple(needed)


def _bindings(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that the file imports, each with its top-level module and its statement."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, (top, ast.unparse(ast.Import([alias])))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                top = (node.module or "").partition(".")[0] if node.level == 0 else "."
                statement = ast.unparse(ast.ImportFrom(node.module, [alias], node.level))
                yield alias.asname or alias.name, (top, statement)


def _convolutions(
    names: dict[str, Any], arguments: list[Any], path: Path
) -> tuple[tuple[Problem, ...], tuple[tuple[int, ...], ...]]:
    """The convolutions that the model computes of its inputs, and the inputs' shapes.

    The model runs on the meta device: nothing is allocated or computed.
    """
    problems: dict[Problem, None] = {}

    def record(module: Any, inputs: tuple[Tensor, ...], output: Tensor | None = None) -> None:
        problems[_problem(module, inputs[0], output, path)] = None

    with torch.device("meta"), torch.no_grad():
        model, inputs = names["Model"](*arguments), _listed(names, "get_inputs", path)
        for module in _layers(model, path):
            if module.transposed:  # an argument of the call may determine the output's size
                module.register_forward_hook(record)
            else:
                module.register_forward_pre_hook(record)
        if not all(isinstance(input, Tensor) for input in inputs):
            raise ExportError(f"{path}: get_inputs should return tensors and nothing else")
        model(*inputs)
    if not problems:
        raise ExportError(f"{path}: Model computes no convolution of what get_inputs returns")
    return tuple(problems), tuple(tuple(input.shape) for input in inputs)


def _layers(model: nn.Module, path: Path) -> list[_ConvNd]:
    """The model's convolutions, each of which a file replaces."""
    layers = [module for module in model.modules() if isinstance(module, _ConvNd)]
    for layer in layers:
        if type(layer) not in LAYERS:
            raise ExportError(
                f"Model of {path} constructs {type(layer).__name__}, which an exported file cannot "
                f"replace: supported are {_listing('and')}"
            )
    if not layers:
        raise _nothing_to_replace(path)
    return layers


def _problem(module: _ConvNd, read: Tensor, written: Tensor | None, path: Path) -> Problem:
    """The convolution that a layer computes, or whose input gradient it computes."""
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise ExportError(
            f"{path}: padding should be numbers of zeros, but got {module.padding!r} in mode "
            f"{module.padding_mode!r}"
        )
    if read.dim() != module.weight.dim():
        raise ExportError(
            f"{path}: exported layers take inputs of {module.weight.dim()} dimensions, the first "
            f"of which is the batch, but {type(module).__name__} got one of shape "
            f"{tuple(read.shape)}"
        )
    input, weight = _image_shape(read), _image_shape(module.weight)
    stride, dilation = _of_image(module.stride, 1), _of_image(module.dilation, 1)
    sides = tuple(side for both in _of_image(module.padding, 0) for side in (both, both))
    if written is None:
        return Problem.of(input, weight, stride, sides, dilation, module.groups)
    problem = Problem.of(_image_shape(written), weight, stride, sides, dilation, module.groups)
    if problem.output_shape == input:
        return problem
    # The output goes beyond all that the weight reaches: files compute what it reaches.
    more, without = (0,) * len(stride), (0,) * len(sides)
    return Problem.of_transposed(input, weight, more, stride, without, dilation, module.groups)


def _image_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor of images or volumes, or of a sequence as an image of one row."""
    return (*tensor.shape[:2], *_of_image(tensor.shape[2:], 1))


def _of_image(sizes: tuple[int, ...], across: int) -> tuple[int, ...]:
    """The numbers along all axes, given that across a sequence's one row."""
    return (across, *sizes) if len(sizes) == 1 else tuple(sizes)
