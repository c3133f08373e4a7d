"""The documentation's snippets run, and its table of environment variables is complete.

``tests/gpu/test_snippets.py`` runs the snippets that need a GPU.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from _fastconv_command import parser
from snippets import (
    EVERY,
    NEEDS,
    ROOT,
    Snippet,
    _alone,  # noqa: F401  a fixture
    name_of,
    run_page,
)

ALL = [snippet for page in EVERY.values() for snippet in page]
ANYWHERE = [page for page, found in EVERY.items() if any(not snippet.needs for snippet in found)]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("page", ANYWHERE, ids=name_of)
def test_snippets_run(page: Path) -> None:
    run_page(page, needs=("",))


@pytest.mark.parametrize("snippet", ALL, ids=lambda one: f"{one.page}:{one.line}")
def test_snippets_that_do_not_run_here_are_at_least_legal(snippet: Snippet) -> None:
    assert snippet.needs in NEEDS
    if snippet.language == "python":
        ast.parse(snippet.code)
        return
    rules = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = " ".join(rules).split()
    for words in snippet.commands():
        if "fastconv" in words and words[0] != "pip":  # maybe after `ssh node`
            parser.parse(words[words.index("fastconv") + 1 :])
        elif words[0] == "make":
            assert words[1] in targets


def test_the_table_of_variables_is_complete() -> None:
    sources = (path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cc"))
    source = "".join(path.read_text() for path in sources)
    read = set(re.findall(r'"(FASTCONV_[A-Z_]+)"', source))
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `(FASTCONV_[A-Z_]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(read)
