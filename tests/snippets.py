"""The Python and shell snippets of the documentation, as tests run them.

A comment before a code block, which neither GitHub nor the site shows, says what the block needs:

    <!-- gpu -->                a GPU
    <!-- gpu torchvision -->    a GPU, and torchvision
    <!-- not run -->            something that no test has: hours, a network, another machine

All other blocks run on any machine. The Python blocks of a page share their variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fastconv import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "sh")
NEEDS = ("", "gpu", "gpu torchvision", "not run")

BLOCK = re.compile(
    r"^(?:<!--(?P<needs>[^\n]*)-->\n)?```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Snippet:
    """A code block of a page."""

    page: str
    line: int  # of the code's first line
    language: str
    needs: str
    code: str

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a shell snippet; a pipe separates commands."""
        assert self.language == "sh"
        for line in self.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while "|" in words:
                pipe = words.index("|")
                yield words[:pipe]
                words = words[pipe + 1 :]
            if words:
                yield words

    def run(self, variables: dict[str, Any]) -> None:
        """Runs a Python snippet with the page's variables, or a shell snippet's commands."""
        if self.language == "python":
            lines_before = "\n" * (self.line - 1)  # so that tracebacks have the page's line numbers
            exec(compile(lines_before + self.code, self.page, "exec"), variables)
            return
        for name, *arguments in self.commands():
            if name == "make":
                continue  # takes long; a test checks that there is such a target
            assert name == "fastconv", f"{self.page}:{self.line}: {name} is not run: mark it"
            assert cli.main(arguments) == 0, f"{self.page}:{self.line}: fastconv {arguments}"


def run_page(page: Path, needs: tuple[str, ...]) -> None:
    """Runs the snippets of a page that need nothing else than this."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    # PyTorch's testing utilities, once imported, forbid any other way to change settings.
    with torch.backends.__allow_nonbracketed_mutation():
        for snippet in EVERY[page]:
            if snippet.needs in needs:
                snippet.run(variables)


@pytest.fixture
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to write to, and the environment of the only process that torchrun started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "cache"))
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in rendezvous.items():
        monkeypatch.setenv(name, value)


def name_of(page: Path) -> str:
    """The page's path, as tests are named by it."""
    return page.relative_to(ROOT).as_posix()


def snippets_of(page: Path) -> list[Snippet]:
    """All Python and shell snippets of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(
            page=name_of(page),
            line=text.count("\n", 0, block.start("code")) + 1,
            language=block["language"],
            needs=(block["needs"] or "").strip(),
            code=block["code"],
        )
        for block in BLOCK.finditer(text)
        if block["language"] in LANGUAGES
    ]


EVERY = {page: found for page in PAGES if (found := snippets_of(page))}
"""The snippets of all pages that have some."""
