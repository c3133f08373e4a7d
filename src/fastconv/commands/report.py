"""``fastconv report``: makes tables, plots and a page from files of results."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastconv import files
from fastconv.bench import page, plots, report, results
from fastconv.bench.console import extra, show
from fastconv.bench.results import AnyResults, HostResults
from fastconv.commands.common import UsageError


def run(arguments: Namespace) -> int:
    """Makes what the arguments ask for from one or several files of results."""
    found = {path: results.read_any(path) for path in arguments.results}
    if not (arguments.json or arguments.quiet):
        extra("rich")
    _check_possible(arguments, found)
    drawable = {path: one for path, one in found.items() if not isinstance(one, HostResults)}
    if arguments.plots or arguments.html:
        extra("matplotlib")
    folders = _plot_folders(arguments.plots, list(drawable)) if arguments.plots else {}
    for folder in folders.values():
        files.make_folder(folder)
    drawn = [
        output
        for path, folder in folders.items()
        for output in plots.outputs(drawable[path], folder)
    ]
    files.check_outputs([arguments.markdown, arguments.html, *drawn], list(found))
    for path, folder in folders.items():
        plots.write(drawable[path], folder)
    if arguments.html:
        files.write(arguments.html, page.html(found))
    _tabulate(arguments, found)
    return 0


def _check_possible(arguments: Namespace, found: Mapping[Path, AnyResults]) -> None:
    """Raises a UsageError if plots are requested of results that have none."""
    for path, one in found.items():
        if arguments.plots and isinstance(one, HostResults):
            raise UsageError(
                f"{path} holds host times, of which there are no plots: --html, --markdown and "
                "--json show them"
            )


def _plot_folders(folder: Path, paths: Sequence[Path]) -> dict[Path, Path]:
    """The folder for each file's plots: ``folder`` for one file, subfolders of it for several."""
    if len(paths) == 1:
        return {paths[0]: folder}
    by_name: dict[str, Path] = {}
    for path in paths:
        other = by_name.setdefault(path.stem, path)
        if other != path:
            raise UsageError(
                f"the plots of {other} and of {path} would both go to {folder / path.stem}"
            )
    return {path: folder / name for name, path in by_name.items()}


def _tabulate(arguments: Namespace, found: Mapping[Path, AnyResults]) -> None:
    """Writes and prints the tables; each has its file's name above it if there are several."""
    several = len(found) > 1
    if arguments.markdown:
        sections = [
            f"## {path}\n\n{report.markdown(one)}" if several else report.markdown(one)
            for path, one in found.items()
        ]
        files.write(arguments.markdown, "\n".join(sections))
    if arguments.json:
        listed = [one.json() for one in found.values()]
        print(f"[\n{','.join(listed)}]\n" if several else listed[0], end="")
    elif not arguments.quiet:
        for path, one in found.items():
            if several:
                print(f"\n{path}")
            show(report.table(one))
