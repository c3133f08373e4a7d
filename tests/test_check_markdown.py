"""The check of Markdown files finds what it is for, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_markdown import anchors, problems

LONG = "word " * 30


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "other.md").write_text("# A `title`, twice\n\n# A title twice\n", encoding="utf-8")
    return tmp_path / "page.md"


def test_anchors_are_those_of_github(page: Path) -> None:
    assert anchors(page.with_name("other.md")) == {"a-title-twice", "a-title-twice-1"}


@pytest.mark.parametrize(
    "text",
    [
        f"| {LONG}|",
        f"```\n{LONG}\n[nothing](nowhere.md)\n```",
        f"## {LONG}",
        f"- [{LONG}](other.md)",
        "`[nothing](nowhere.md)`",
        "[title](other.md#a-title-twice-1), [page](page.md), [elsewhere](https://example.com/#no)",
        "# Here\n\n[above](#here)",
    ],
)
def test_what_is_right(page: Path, text: str) -> None:
    page.write_text(text, encoding="utf-8")
    assert not list(problems(page))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (f"short\n{LONG}", 2, "150 columns, more than 100"),
        ("[broken\ntext](nowhere.md)", 2, "nowhere.md: there is no such file"),
        ("[a](other.md#b)", 1, "other.md#b: there is no such heading"),
        ("[a](#b)", 1, "#b: there is no such heading"),
    ],
)
def test_what_is_wrong(page: Path, text: str, line: int, message: str) -> None:
    page.write_text(text, encoding="utf-8")
    assert list(problems(page)) == [(line, message)]
