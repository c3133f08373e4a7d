"""Checks that a tag may be released, and prints the release's notes.

    python tests/check_release.py v1.2.3

The tag is that of the package's version; CHANGELOG.md has a section for it, with a date and text,
and nothing is left under Unreleased; CITATION.cff has the version and the date. Needs nothing but
Python. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)
REFERENCE = re.compile(r"^\[[^\]]+\]: \S+$", re.MULTILINE)  # the address of a heading, at the end


class Section(NamedTuple):
    """What CHANGELOG.md says of a version."""

    name: str  # the version, or Unreleased
    date: str | None  # as it is written
    text: str


def version(root: Path = ROOT) -> str:
    """The package's version."""
    found = VERSION.search((root / "src/fastconv/_version.py").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def sections(root: Path = ROOT) -> list[Section]:
    """The sections of CHANGELOG.md, in their order."""
    text = REFERENCE.sub("", (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    headings = list(HEADING.finditer(text))
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    return [
        Section(heading[1], heading[2], text[heading.end() : end].strip())
        for heading, end in zip(headings, ends, strict=True)
    ]


def cited(root: Path = ROOT) -> dict[str, str]:
    """The fields of CITATION.cff that are one word."""
    text = (root / "CITATION.cff").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z-]+): \"?([^\s\"]+)\"?$", text, re.MULTILINE))


def problems(tag: str, root: Path = ROOT) -> Iterator[str]:
    """All that keeps a tag from being released, in sentences."""
    ours = version(root)
    if tag != f"v{ours}":
        yield f"The tag is {tag}, but the package's version is {ours}: the tag should be v{ours}."
    by_name = {section.name: section for section in sections(root)}
    if unreleased := by_name.get("Unreleased"):
        if unreleased.text:
            yield f"CHANGELOG.md has text under Unreleased: move it to the section of {ours}."
    else:
        yield "CHANGELOG.md has no section Unreleased."
    yield from _section_problems(ours, by_name.get(ours))
    fields = cited(root)
    if fields.get("version") != ours:
        yield f"CITATION.cff has version {fields.get('version')}, not {ours}."
    if ours in by_name and fields.get("date-released") != by_name[ours].date:
        yield (
            f"CITATION.cff has date-released {fields.get('date-released')}, but CHANGELOG.md has "
            f"{by_name[ours].date}."
        )


def _section_problems(ours: str, section: Section | None) -> Iterator[str]:
    if section is None:
        yield f"CHANGELOG.md has no section ## [{ours}] - YYYY-MM-DD."
        return
    if not section.text:
        yield f"CHANGELOG.md says nothing about {ours}."
    try:
        date.fromisoformat(section.date or "")
    except ValueError:
        yield f"CHANGELOG.md gives {ours} the date {section.date}, not one of the form YYYY-MM-DD."


def main(arguments: list[str]) -> int:
    """Prints the notes of a tag's release, or what is wrong; returns the exit status."""
    if len(arguments) != 1:
        print("usage: check_release.py TAG", file=sys.stderr)
        return 2
    found = list(problems(arguments[0]))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(next(section.text for section in sections() if section.name == version()))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
