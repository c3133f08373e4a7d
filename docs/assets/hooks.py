"""Hooks of MkDocs: pages from outside of docs/, and links to files that are not pages.

Pages link as GitHub wants it: relative to the file, also to sources and to pages above docs/. On
the site, a link to another page stays relative, and one to any other file of the repository leads
to GitHub. ``tests/check_markdown.py`` checks that all of these files exist.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages above docs/, and where the site has them. In docs/ itself, CONTRIBUTING.html and
# contributing.html would be one file on some systems.
ABOVE = {
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}

FENCE = re.compile(r"\s*(```|~~~)")
CODE_OR_LINK = re.compile(r"`+[^`]*`+|\]\((?P<target>[^()\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages above docs/."""
    for source, page in ABOVE.items():
        file = File.generated(config, page, abs_src_path=str(ROOT / source))
        file.edit_uri = f"../{source}"
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the page's links, except those in code; tables of results get the whole width."""
    if re.match(r"results/.*(?<!README)\.md", page.file.src_uri):
        page.meta["hide"] = ["navigation", "toc"]

    def rewritten(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or target.startswith("#") or re.match(r"[a-z][a-z+.-]*:", target):
            return found[0]
        return f"]({_link(target, page.file.src_uri, config, files)})"

    fenced, lines = False, []
    for line in markdown.split("\n"):
        fenced ^= FENCE.match(line) is not None
        lines.append(line if fenced else CODE_OR_LINK.sub(rewritten, line))
    return "\n".join(lines)


def _link(target: str, uri: str, config: MkDocsConfig, files: Files) -> str:
    """A link of the page at ``uri``, as the site has it."""
    name, hash_sign, heading = target.partition("#")
    source = next((above for above, page in ABOVE.items() if page == uri), f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    to = ABOVE.get(path, path.removeprefix("docs/"))
    if path in ABOVE or (path.startswith("docs/") and _is_on_site(to, files)):
        return posixpath.relpath(to, posixpath.dirname(uri)) + hash_sign + heading
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config.repo_url}/{kind}/main/{path}{hash_sign}{heading}"


def _is_on_site(uri: str, files: Files) -> bool:
    file: Any = files.get_file_from_path(uri)
    return file is not None and not file.inclusion.is_excluded()
