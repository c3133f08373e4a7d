"""Pages that are made from the files of figures: tables, an index, blocks of other pages, plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastconv.bench import plots, report, results
from fastconv.bench.campaign import Group, Summary
from fastconv.bench.network_results import NetworkResults
from fastconv.bench.results import Results
from results import blocks, catalogue, figures, overview
from results.catalogue import File
from results.kernelbench import SEEDS, TOLERANCE, TRIALS
from results.layers import sections

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERVIEW = "overview.svg"


def write() -> list[Path]:
    """Writes all plots, and pages that have changed; returns their paths.

    Plots need matplotlib; without it, a MissingExtra is raised when all else is written.
    """
    texts, changed = made(), stale()
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    drawn = [plot for folder in catalogue.folders() for plot in _plots(folder)]
    for plot in drawn:
        plots.save(plot.draw(), plot.path)
    return [*changed, *(plot.path for plot in drawn)]


def stale() -> list[Path]:
    """The files whose texts do not follow from the files of figures."""
    texts = made().items()
    return [p for p, text in texts if not p.exists() or p.read_text(encoding="utf-8") != text]


def made() -> dict[Path, str]:
    """The texts that follow from the files of figures, by the files that should have them."""
    found = {page: blocks.filled(page) for page in figures.pages() if blocks.blocks(page)}
    for folder in catalogue.folders():
        for file in _files(folder):
            found[folder / f"{file.name}.md"] = _page(file, folder)
        if (folder / "networks.json").exists():
            layers, networks = results.read(folder / "layers.json"), _networks(folder)
            found[folder / OVERVIEW] = overview.svg(layers, networks)
    if catalogue.folders():
        found[catalogue.RESULTS / "README.md"] = _index()
    return found


def _files(folder: Path) -> Iterator[File]:
    """The files of figures that a folder has."""
    for file in (file for job in catalogue.jobs(folder) for file in job.files):
        if (folder / f"{file.name}.json").exists():
            yield file


def _networks(folder: Path) -> NetworkResults:
    found = results.read_any(folder / "networks.json")
    assert isinstance(found, NetworkResults)
    return found


class Plot(NamedTuple):
    """A plot of a folder, and the file of figures whose page has it."""

    file: str
    path: Path
    draw: Callable[[], Figure]


def _plots(folder: Path) -> Iterator[Plot]:
    """The plots of a folder's founding workloads and networks."""
    device = "cpu" if folder.name == catalogue.CPU else "cuda"
    found = results.read(folder / "layers.json")
    count = 1 if device == "cpu" else 2
    parts = [one.part_of(found) for one in sections("layers", device)[:count]]
    rows = [row for part in parts for row in part.rows]
    founding = Results(found.environment, found.ceilings, rows, found.build_s, found.ceilings_after)
    for name, draw in plots.PLOTS.items():
        yield Plot("layers", folder / f"founding-{name}.svg", partial(draw, founding))
    if (folder / "networks.json").exists():
        draw_networks = partial(plots.network_speedups, _networks(folder))
        yield Plot("networks", folder / "networks-speedups.svg", draw_networks)


# --- A page for each file -------------------------------------------------------------------------


def _page(file: File, folder: Path) -> str:
    """The page of a file of figures."""
    path = folder / f"{file.name}.json"
    contents = catalogue.read(path)
    assert contents is not None
    about = contents["environment"]
    left = int(about["rows"]) - len(contents["rows"])
    missing = f" **{left} of {about['rows']} rows have not been measured.**" if left else ""
    head = f"# {_title(file)}\n\nMeasured by `make results`: {about['effort']}.{missing}\n"
    makers = {"first-steps": _first_steps, "verify": _verify, "kernelbench": _kernelbench}
    if file.name in makers:
        return f"{head}{makers[file.name](contents['rows'], about)}"
    drawn = [plot.path for plot in _plots(folder) if plot.file == file.name]
    head += "".join(f"\n![{one.stem}]({one.name})\n" for one in drawn)
    found = results.read_any(path)
    if isinstance(found, NetworkResults):
        return f"{head}\n{_networks_tables(found)}"
    if not isinstance(found, Results):
        return f"{head}\n{report.markdown(found)}"
    device = "cpu" if folder.name == catalogue.CPU else "cuda"
    parts = [(one.title, one.part_of(found)) for one in sections(file.name, device)]
    tables = [f"\n## {title}\n{report.section(part)}" for title, part in parts if part.rows]
    return f"{head}\n{report.legend(found)}\n{''.join(tables)}"


def _networks_tables(found: NetworkResults) -> str:
    """A table of eager networks, and another of those that were also compiled."""
    eager = [replace(row, compiled=()) for row in found.rows]
    text = report.markdown(NetworkResults(found.environment, eager))
    if not any(row.compiled for row in found.measured):
        return text
    table, rows = blocks.compiled_table(found)
    lost = "".join(f"\n{line}\n" for line in report.slower(rows))
    return (
        f"{text}\n## After `torch.compile`\n\nBoth networks eagerly, compiled in the default mode, "
        "and compiled in the mode `reduce-overhead`, which replays CUDA graphs. The first step "
        "compiles, with empty caches; it is fastconv's / PyTorch's, and fastconv's comes after "
        f"`optimize`.\n\n{table}{lost}"
    )


def _title(file: File) -> str:
    return file.what[0].upper() + file.what[1:]


def _versions(about: dict[str, str]) -> str:
    names = ("fastconv", "commit", "torch", "gpu")
    ours, commit, torch, gpu = (about[name] for name in names)
    return f"fastconv {ours} ({commit}), PyTorch {torch}, {gpu}."


def _first_steps(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """Seconds of first steps, a line for each network."""
    ways = {
        "pytorch": "PyTorch", "cold": "fastconv, nothing compiled",
        "prepared": "the same after `prepare`", "warm": "fastconv, in the next process",
    }  # fmt: skip
    lines = [f"| network | images | {' | '.join(ways.values())} | later steps |"]
    lines.append("| --- | --- |" + " ---: |" * (len(ways) + 1))
    for model in dict.fromkeys(row["model"] for row in rows):
        its = {row["way"]: row for row in rows if row["model"] == model}
        name = blocks.NETWORK_NAMES.get(model, model)
        seconds = [f"{its[way]['first_s']:.1f} s" if way in its else "" for way in ways]
        later = " / ".join(f"{its[way]['later_s'] * 1e3:.0f}" for way in ("warm", "pytorch"))
        lines.append(f"| {name} | {its['warm']['batch']} | {' | '.join(seconds)} | {later} ms |")
    return (
        f"\n{_versions(about)} Seconds from a network on the GPU to the end of its first training "
        f"step in TF32, NCHW, in a new process on {rows[0]['processors']} processors, the caches "
        "of CUDA and fastconv empty but for the last; the time of `prepare` counts. PyTorch's with "
        "`cudnn.benchmark=True`. Later steps: fastconv's / PyTorch's.\n\n" + "\n".join(lines) + "\n"
    )


def _verify(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The counts of random problems, and the worst error as a share of its bound, by kinds."""
    parts = []
    for row in rows:
        groups = [Group(**group) for group in row["summary"]["groups"]]
        summary = Summary(**{**row["summary"], "groups": groups})
        table = report.summary_markdown(summary, about)
        failed = [
            f"- `{one['command']}`: {'; '.join(one['complaints'].values()) or one['failure']}\n"
            for one in row["failed"]
        ]
        wrong = "".join(["\n", *failed] if failed else [])
        parts.append(f"\n## {row['name']}\n\n`{row['command']}`: {table}{wrong}")
    return "".join(parts)


def _kernelbench(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """Speed-ups of exported files, and whether they are correct."""
    lines = ["| problem | | correct | PyTorch ms | exported ms | speed-up |"]
    lines.append("| ---: | --- | --- | ---: | ---: | ---: |")
    for row in rows:
        name = row["name"]
        if "precision" in row:
            name += f" (`--precision {row['precision']}`)"
        if "error" in row:
            lines.append(f"| {row['problem']} | {name} | failed: {row['error']} | | | |")
            continue
        times = f"{row['reference_ms']:.3f} | {row['exported_ms']:.3f} | {row['speedup']:.2f}x"
        correct = f"{row['correct']} of {row['seeds']}"
        lines.append(f"| {row['problem']} | {name} | {correct} | {times} |")
    faster = [row["speedup"] for row in rows if "speedup" in row]
    mean = statistics.geometric_mean(faster)
    slower = [
        f"{row['problem']} {row['speedup']:.2f}x" for row in rows if row.get("speedup", 1) < 1
    ]
    return (
        f"\n{_versions(about)} Files of `fastconv export --reference`, on models with the sizes of "
        "convolutions of KernelBench's level 1, beside PyTorch without `cudnn.benchmark`, float32 "
        "in PyTorch's default precision. This is not KernelBench's own evaluation, which "
        "`tests/gpu/run_kernelbench.py` runs, but follows its rules: "
        f"all elements within {TOLERANCE:g}, for {len(SEEDS)} seeds; the mean of {TRIALS} single "
        "calls, each between two CUDA events, with a cold cache.\n\n" + "\n".join(lines) + "\n"
        f"\nGeometric mean: {mean:.2f}x. Slower than PyTorch: {', '.join(slower) or 'none'}.\n"
    )


# --- The index ------------------------------------------------------------------------------------


def _index() -> str:
    """The page that lists all files of figures."""
    parts = [
        "# Results, as measured\n\n`make results` measures and writes all files here, this one "
        "too: [how](../benchmarks.md#how-results-are-made). Each file is of one clean commit, and "
        "is measured again when the sources that it depends on have changed.\n"
    ]
    for folder in catalogue.folders():
        layers = catalogue.read(folder / "layers.json")
        assert layers is not None
        about = layers["environment"]
        device = about.get("gpu") or f"CPU, {about['threads']} threads"
        command = "make results" if "gpu" in about else "make results-cpu"
        lines = ["| file | what | commit | measured | rows |", "| --- | --- | --- | --- | ---: |"]
        lines += [_line(file, folder) for file in _files(folder)]
        names = [plot.path.name for plot in _plots(folder)]
        names += [OVERVIEW] if (folder / "networks.json").exists() else []
        pictures = [f"[{name.removesuffix('.svg')}]({folder.name}/{name})" for name in names]
        drawn = f"\nFigures: {', '.join(pictures)}.\n"
        parts.append(f"\n## {device}\n\n`{command}`\n\n" + "\n".join(lines) + f"\n{drawn}")
    return "".join(parts)


def _line(file: File, folder: Path) -> str:
    contents = catalogue.read(folder / f"{file.name}.json")
    assert contents is not None
    about, at = contents["environment"], f"{folder.name}/{file.name}"
    links = f"[{file.name}]({at}.md) ([JSON]({at}.json))"
    when = about["time"][:16].replace("T", " ")
    count = len(contents["rows"])
    of = "" if count == int(about["rows"]) else f" of {about['rows']}"
    return f"| {links} | {file.what} | {about['commit']} | {when} | {count}{of} |"
