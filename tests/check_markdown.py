"""Checks the project's Markdown files: line width, relative links and anchors.

    python tests/check_markdown.py

Prose is at most 100 columns wide; tables, code blocks, headings, comments and lines that are
nothing but a link may be wider. Relative links lead to existing files, and anchors to existing
headings. Pages below docs/results are written by the benchmark, so only their links are checked.
The exit status is 1 if anything was found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
# Searched for Markdown files, beside ROOT itself.
FOLDERS = (".github", "docs", "examples", "src", "tests")
GENERATED = ROOT / "docs" / "results"
WIDTH = 100  # columns

FENCE = re.compile(r"\s*(```|~~~)")
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]*)\)")
TARGET = re.compile(r"\]\((?P<target>[^()\s]+)\)")  # the end of a link, whose text may be broken
LINK_ALONE = re.compile(rf"\s*(?:[-*+] )?!?{LINK.pattern}[.,;]?\s*")
HEADING = re.compile(r"#{1,6}\s+(?P<title>.*?)\s*#*\s*")
CODE_SPAN = re.compile(r"`+[^`]*`+")


def lines_of_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines outside of fenced code blocks, with their numbers."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchor(title: str) -> str:
    """The anchor that GitHub gives a heading, before it numbers repeated ones."""
    shown = LINK.sub(lambda link: link["text"], title)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """The anchors of all headings of a page."""
    found: set[str] = set()
    for _, line in lines_of_prose(path):
        heading = HEADING.fullmatch(line)
        if heading:
            name = plain = anchor(heading["title"])
            repeated = 0
            while name in found:
                repeated += 1
                name = f"{plain}-{repeated}"
            found.add(name)
    return found


def wrong_width(line: str) -> str | None:
    """What is wrong with the width of a line of prose, if anything is."""
    may_be_wide = line.lstrip().startswith(("|", "#", "<!-- ")) or LINK_ALONE.fullmatch(line)
    if len(line) <= WIDTH or may_be_wide:
        return None
    return f"{len(line)} columns, more than {WIDTH}"


def wrong_links(path: Path, line: str) -> Iterator[str]:
    """What is wrong with the relative links of a line."""
    for link in TARGET.finditer(CODE_SPAN.sub("", line)):
        target = link["target"]
        if re.match(r"[a-z][a-z+.-]*:", target):  # an address of another site
            continue
        name, _, fragment = unquote(target).partition("#")
        page = (path.parent / name).resolve() if name else path
        if not page.exists():
            yield f"{target}: there is no such file"
        elif fragment and (page.suffix != ".md" or fragment not in anchors(page)):
            yield f"{target}: there is no such heading"


def problems(path: Path) -> Iterator[tuple[int, str]]:
    """All that is wrong with a page, with the numbers of the lines."""
    for number, line in lines_of_prose(path):
        width = None if path.is_relative_to(GENERATED) else wrong_width(line)
        yield from ((number, message) for message in (width, *wrong_links(path, line)) if message)


def pages() -> list[Path]:
    """The project's Markdown files."""
    below = (page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *below])


def main() -> int:
    """Prints everything that is wrong; returns the exit status."""
    found = 0
    for page in pages():
        for number, message in problems(page):
            print(f"{page.relative_to(ROOT)}:{number}: {message}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
