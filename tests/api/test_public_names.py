"""The names that users import: complete, documented by examples that run, and on a page."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fastconv

ROOT = Path(__file__).parents[2]
PACKAGE = Path(fastconv.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

NAMES = sorted(fastconv.__all__)
# Types for annotations: they are no classes, and the source has their documentation.
ALIASES = {
    "Activation": "geometry.py",
    "CausalActivation": "causal.py",
    "LayerPadding": "geometry.py",
    "PaddingLike": "geometry.py",
    "Precision": "_precision.py",
}
# References in Sphinx's form, which Markdown would show as they are.
ROLE = re.compile(r":[a-z]+:`")
DOCUMENTED = [name for name in NAMES if name not in ALIASES]
ERRORS = [
    name
    for name in DOCUMENTED
    if inspect.isclass(getattr(fastconv, name)) and issubclass(getattr(fastconv, name), Exception)
]


def _run(code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Which names ----------------------------------------------------------------------------------


def test_all_names_are_listed_in_order() -> None:
    assert list(fastconv.__all__) == NAMES
    public = {
        name
        for name, value in vars(fastconv).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(NAMES)


def test_import_warns_of_nothing() -> None:
    assert _run("import fastconv", "-W", "error") == ""


def test_import_does_not_load_what_few_users_need() -> None:
    # Planners of the exporter, and the benchmark with its plots and tables.
    needless = ("fastconv.exporter.file", "fastconv.bench", "fastconv.cli", "matplotlib", "rich")
    loaded = _run("import fastconv, sys; print(*sys.modules)").split()
    assert not set(needless) & set(loaded)


# --- Docstrings -----------------------------------------------------------------------------------


def _sections(docstring: str) -> dict[str, str]:
    """The Google-style sections of a docstring: titles, and their indented text."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Examples):\n", docstring, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _described(section: str) -> list[str]:
    """The names that a section describes: those of its lines that are indented least."""
    return [name.lstrip("*") for name in re.findall(r"^    ([\w.*]+): ", section, flags=re.M)]


def _callables() -> Iterator[Any]:
    """All public functions and classes, and the public methods that fastconv's classes define."""
    for name in DOCUMENTED:
        value = getattr(fastconv, name)
        yield pytest.param(value, id=name)
        if not inspect.isclass(value):
            continue
        for own, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if not own.startswith("_") and inspect.isfunction(function) and own != "extra_repr":
                yield pytest.param(function, id=f"{name}.{own}")


@pytest.mark.parametrize("value", list(_callables()))
def test_docstrings_name_every_argument(value: Any) -> None:
    docstring = inspect.getdoc(value) or ""
    assert len(docstring.split("\n")[0]) > 8
    assert not ROLE.search(docstring)
    sections = _sections(docstring)
    if inspect.isclass(value):
        if not set(vars(value)) & {"__init__"} or issubclass(value, tuple):
            return
        if "Attributes" in sections:  # a dataclass
            assert _described(sections["Attributes"]) == list(value.__annotations__)
            return
        value = value.__init__
    parameters = [
        name for name in inspect.signature(value).parameters if name not in ("self", "cls")
    ]
    assert _described(sections.get("Args", "")) == parameters
    if inspect.signature(value).return_annotation not in ("None", None):
        assert "Returns" in sections or "Yields" in sections


@pytest.mark.parametrize("name", ["MeasuredLayer", "PreparedPass"])
def test_rows_of_reports_describe_their_fields(name: str) -> None:
    row = getattr(fastconv, name)
    assert tuple(_described(_sections(inspect.getdoc(row) or "")["Attributes"])) == row._fields


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    # Only what this class defines itself: PyTorch's docstrings have other examples.
    value = getattr(fastconv, name)
    tests = finder.find(value, name, globs={"torch": torch, "fastconv": fastconv})
    examples = [one for one in tests if one.examples and one.filename is not None]
    own = [one for one in examples if Path(one.filename or "").is_relative_to(PACKAGE)]
    assert own, "it has no example"
    output: list[str] = []
    for one in own:
        runner.run(one, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


@pytest.mark.parametrize(("name", "file"), ALIASES.items())
def test_types_are_documented_where_they_are_defined(name: str, file: str) -> None:
    body = ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
    (place,) = (
        i
        for i, node in enumerate(body)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    text = body[place + 1]
    assert isinstance(text, ast.Expr)
    assert isinstance(text.value, ast.Constant)
    assert isinstance(text.value.value, str)
    assert not ROLE.search(text.value.value)


# --- Errors ---------------------------------------------------------------------------------------


def test_errors_have_one_base_and_the_usual_ones() -> None:
    bases = {name: getattr(fastconv, name).__mro__[1:3] for name in ERRORS}
    base = fastconv.FastconvError
    assert bases.pop("FastconvError") == (Exception, BaseException)
    assert bases == {
        "CompilationError": (base, RuntimeError),
        "ExportError": (base, ValueError),
        "GpuUnavailable": (base, RuntimeError),
        "LaunchError": (base, RuntimeError),
    }


# --- Pages ----------------------------------------------------------------------------------------


def test_the_reference_has_every_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: fastconv\.(\w+)$", page, flags=re.M)) == NAMES


# The package's names in code. What follows another name is something else: torch.ops.fastconv.
_NAMED = re.compile(r"(?<![\w./-])fastconv\.([A-Za-z_]\w*)")
_CODE = re.compile(r"^```.*?^```|`[^`]+`", flags=re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_what_exists(page: Path) -> None:
    code = " ".join(_CODE.findall(page.read_text(encoding="utf-8")))
    # fastconv.h is a header.
    known = {"__all__", "__version__", "h", *NAMES, *(path.stem for path in PACKAGE.iterdir())}
    assert not set(_NAMED.findall(code)) - known


def test_names_in_pages_are_seen() -> None:
    text = "`fastconv.convert(model)` torch.ops.fastconv.forward `fastconv.nothing`\n```\n" + (
        "fastconv.other\n```\n"
    )
    assert _NAMED.findall(" ".join(_CODE.findall(text))) == ["convert", "nothing", "other"]
