"""The package is built in layers (docs/architecture.md): no file imports a file above it.

The tests read every ``import`` statement of the package, at module level and inside functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fastconv

PACKAGE = Path(fastconv.__file__).parent
FLOORS = (
    {"problem", "_precision", "_version", "bypass", "errors", "tables", "timing"},
    {"kernels", "jit", "native", "files"},
    {
        "backends",
        "ops",
        "functional",
        "batchnorm",
        "causal",
        "fused",
        "geometry",
        "transposed",
        "layers",
        "modules",
        "network",
        "_frozen",
        "__init__",
    },
    {"workloads"},
    {"exporter", "bench"},
    {"commands", "cli", "__main__"},
)
APART = {"exporter", "bench"}  # they are on one floor, and neither imports the other
UPWARDS = {("__init__", "exporter")}  # fastconv.export is public API

LATE = {
    ("exporter/__init__.py", "exporter/file.py"): "`import fastconv` does not wait for it",
    ("exporter/__init__.py", "exporter/subject.py"): "`import fastconv` does not wait for it",
}
"""All imports inside functions of fastconv's own files, each with its reason."""


class Import(NamedTuple):
    importer: str  # a file's path below the package
    imported: str
    is_late: bool  # inside a function


def _files() -> dict[str, str]:
    """The paths of the package's files, by the names of their modules."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return {_module(path): path.as_posix() for path in paths}


def _module(path: Path) -> str:
    parts = ("fastconv", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, is_late: bool = False) -> Iterator[tuple[str, bool]]:
    """The full names that a syntax tree imports, and whether that is inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} imports relatively"
            yield from ((f"{node.module}.{alias.name}", is_late) for alias in node.names)
        else:
            in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(node, is_late or in_function)


def _own_imports(path: str, text: str, files: Mapping[str, str]) -> Iterator[Import]:
    """The imports of the package's own files by one of them."""
    for name, is_late in _imports(ast.parse(text)):
        if name.split(".")[0] == "fastconv":
            module = name if name in files else name.rpartition(".")[0]  # or a name in a module
            yield Import(path, files[module], is_late)


@cache
def _graph() -> set[Import]:
    files = _files()
    texts = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in files.values()}
    return {one for path, text in texts.items() for one in _own_imports(path, text, files)}


def _cycle(imports: set[Import]) -> list[str]:
    """A chain of files, each of which imports the next and the last the first; [] for none."""
    below: dict[str, list[str]] = {}
    for one in sorted(imports):
        below.setdefault(one.importer, []).append(one.imported)
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for imported in below.get(path[-1], []):
            if imported in path:
                return path[path.index(imported) :]
            if imported not in done and (found := search([*path, imported])):
                return found
        done.add(path[-1])
        return []

    return next((found for start in below if (found := search([start]))), [])


def _room(path: str) -> str:
    """The folder or the module at the top of the package that a file belongs to."""
    return path.split("/")[0].removesuffix(".py")


def _allowed(importer: str, imported: str) -> bool:
    from_floor, to_floor = (
        next(height for height, floor in enumerate(FLOORS) if room in floor)
        for room in (importer, imported)
    )
    if from_floor == to_floor:
        return importer == imported or importer not in APART
    return to_floor < from_floor or (importer, imported) in UPWARDS


def test_every_room_is_on_a_floor() -> None:
    assert {_room(path) for path in _files().values()} == {room for one in FLOORS for room in one}


@pytest.mark.parametrize("room", sorted(room for floor in FLOORS for room in floor))
def test_imports_lead_down(room: str) -> None:
    wrong = {
        f"{one.importer} imports {one.imported}"
        for one in _graph()
        if _room(one.importer) == room and not _allowed(room, _room(one.imported))
    }
    assert not wrong


def test_no_file_imports_itself_through_others() -> None:
    assert not _cycle(_graph())


def test_late_imports_have_a_reason() -> None:
    assert {(one.importer, one.imported) for one in _graph() if one.is_late} == set(LATE)


def test_upward_and_late_imports_are_seen() -> None:
    files = {"fastconv": "__init__.py", "fastconv.bench.cases": "bench/cases.py"}
    text = "def f():\n    from fastconv.bench.cases import Case\nimport torch, fastconv\n"
    assert set(_own_imports("one.py", text, files)) == {
        Import("one.py", "bench/cases.py", True),
        Import("one.py", "__init__.py", False),
    }
    assert not _allowed("kernels", "bench")
    assert not _allowed("exporter", "bench")
    assert not _allowed("bench", "exporter")
    assert _allowed("bench", "workloads")


def test_cycles_are_seen() -> None:
    chain = {Import("a", "b", False), Import("b", "c", True), Import("a", "c", False)}
    assert not _cycle(chain)
    assert _cycle(chain | {Import("c", "b", False)}) == ["b", "c"]
    assert _cycle({Import("a", "a", True)}) == ["a"]
