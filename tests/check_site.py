"""Checks the built documentation site without a network.

    python tests/check_site.py site

Links within the site lead to existing files, and anchors to existing elements. Links to files of
the repository on GitHub lead to files that exist here. No page loads anything from another host:
the site works offline. The exit status is 1 if anything was found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
HOME = "https://fastconv.github.io/fastconv/"
REPOSITORY = "https://github.com/fastconv/fastconv/"
# Elements whose address the browser loads by itself; a link is followed by its reader.
LOADED = {"img", "script", "iframe", "source", "video", "audio"}
LOADED_RELATIONS = {"stylesheet", "icon", "preconnect", "preload", "prefetch", "modulepreload"}


class Contents(HTMLParser):
    """The addresses of a page, whether the browser loads them by itself, and the page's anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[tuple[str, bool]] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records what a tag refers to and the anchor that it is."""
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        loaded = tag in LOADED or bool(LOADED_RELATIONS & set(found.get("rel", "").split()))
        self.addresses += [(found[name], loaded) for name in ("href", "src") if name in found]


@cache
def contents(page: Path) -> Contents:
    """What a page contains."""
    parser = Contents()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def wrong_address(site: Path, page: Path, address: str, loaded: bool) -> str | None:
    """What is wrong with an address of a page, if anything is."""
    for home in (HOME, urlsplit(HOME).path):  # the page of errors has absolute paths
        if address.startswith(home):
            page, address = site / "index.html", address.removeprefix(home)
    parts = urlsplit(address)
    if parts.scheme in ("data", "mailto"):
        return None
    if parts.scheme or parts.netloc:
        return "is loaded from another host" if loaded else wrong_source(address)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.is_file() or not target.is_relative_to(site):
        return "there is no such file in the site"
    anchor = unquote(parts.fragment)
    if anchor and target.suffix == ".html" and anchor not in contents(target).anchors:
        return "there is no such anchor"
    return None


def wrong_source(address: str) -> str | None:
    """What is wrong with a link to a file of the repository on GitHub, if it is one."""
    kind, _, path = urlsplit(address.removeprefix(REPOSITORY)).path.partition("/main/")
    if not address.startswith(REPOSITORY) or kind not in ("blob", "tree", "edit", "raw"):
        return None
    return None if (ROOT / unquote(path)).exists() else "there is no such file in the repository"


def problems(site: Path) -> Iterator[str]:
    """All that is wrong with the site."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        yield f"{site} has no pages"
    for page in pages:
        for address, loaded in dict.fromkeys(contents(page).addresses):
            if message := wrong_address(site, page, address, loaded):
                yield f"{page.relative_to(site)}: {address}: {message}"


def main() -> int:
    """Prints everything that is wrong; returns the exit status."""
    found = list(problems(Path(sys.argv[1]).resolve()))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
