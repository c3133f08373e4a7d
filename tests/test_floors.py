"""The package is built in floors (docs/architecture.md): whoever is below knows nobody above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastconv

PACKAGE = Path(fastconv.__file__).parent
FLOORS = (
    {"problem", "_precision", "tables", "timing"},
    {"kernels", "jit", "native", "files"},
    {
        "backends",
        "ops",
        "functional",
        "modules",
        "network",
        "_frozen",
        "__init__",
    },
    {"workloads"},
    {"exporter", "bench"},
    {"commands", "cli"},
)
APART = {"exporter", "bench"}  # neighbours that know nothing of each other either
# Asked at the first call of a form; and the name by which users find it.
UPWARDS = {("native", "ops"), ("__init__", "exporter")}


def _rooms() -> list[str]:
    """Folders and modules of the package."""
    modules = [path.stem for path in PACKAGE.glob("*.py")]
    return sorted(modules + [path.parent.name for path in PACKAGE.glob("*/__init__.py")])


def _files(room: str) -> list[Path]:
    return [*PACKAGE.glob(f"{room}.py"), *PACKAGE.glob(f"{room}/**/*.py")]


def _imported(path: Path) -> Iterator[str]:
    """The rooms that a file imports from, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for top, *rest in (name.split(".") for name in names):
            if top == "fastconv":
                yield rest[0] if rest and rest[0] in _rooms() else "__init__"


def _allowed(importer: str, imported: str) -> bool:
    from_floor, to_floor = (
        next(height for height, floor in enumerate(FLOORS) if room in floor)
        for room in (importer, imported)
    )
    if from_floor == to_floor:
        return importer == imported or importer not in APART
    return to_floor < from_floor or (importer, imported) in UPWARDS


def test_every_room_is_on_a_floor() -> None:
    assert _rooms() == sorted(room for floor in FLOORS for room in floor)


@pytest.mark.parametrize("room", _rooms())
def test_imports_lead_down(room: str) -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {imported}"
        for path in _files(room)
        for imported in _imported(path)
        if not _allowed(room, imported)
    }
    assert not wrong


def test_an_arrow_upwards_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("def f():\n    from fastconv.bench.cases import Case\nimport fastconv\n")
    assert set(_imported(path)) == {"bench", "__init__"}
    assert not _allowed("kernels", "bench")
    assert not _allowed("exporter", "bench")
    assert not _allowed("bench", "exporter")
    assert _allowed("bench", "workloads")
