"""The check of the built site finds broken links and what comes from other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_site import HOME, REPOSITORY, problems


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text('<h1 id="top">A page</h1>', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        '<a href="folder/index.html#top">',
        '<a href="folder/#top">',
        '<h2 id="here"><a href="#here">',
        f'<a href="{HOME}folder/index.html#top">',
        '<a href="/fastconv/folder/">',
        f'<a href="{REPOSITORY}blob/main/README.md"><a href="{REPOSITORY}tree/main/docs#no">',
        '<a href="https://example.com/"><img src="data:image/png;base64,">',
        '<link rel="canonical" href="https://example.com/">',
    ],
)
def test_what_is_right(site: Path, text: str) -> None:
    (site / "page.html").write_text(text, encoding="utf-8")
    assert not list(problems(site))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<a href="nowhere.html">', "nowhere.html: there is no such file in the site"),
        ('<a href="../">', "../: there is no such file in the site"),
        ('<a href="folder/#no">', "folder/#no: there is no such anchor"),
        ('<img src="//cdn.example/a.png">', "//cdn.example/a.png: is loaded from another host"),
        (
            '<link rel="stylesheet" href="https://cdn.example/a.css">',
            "https://cdn.example/a.css: is loaded from another host",
        ),
        (
            f'<a href="{REPOSITORY}blob/main/nowhere.md">',
            f"{REPOSITORY}blob/main/nowhere.md: there is no such file in the repository",
        ),
    ],
)
def test_what_is_wrong(site: Path, text: str, message: str) -> None:
    (site / "page.html").write_text(text, encoding="utf-8")
    assert list(problems(site)) == [f"page.html: {message}"]


def test_an_empty_site_is_wrong(tmp_path: Path) -> None:
    assert list(problems(tmp_path)) == [f"{tmp_path} has no pages"]
