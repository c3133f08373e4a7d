"""What the subcommands of ``fastconv`` do, from parsed arguments to exit status."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastconv
from fastconv import files, native, tables
from fastconv.bench import (
    campaign,
    configurations,
    contestants,
    environment,
    host,
    limits,
    models,
    networks,
    report,
    results,
    trials,
    tune,
    verify,
)
from fastconv.bench import info as information
from fastconv.bench.campaign import Summary
from fastconv.bench.cases import (
    DTYPES,
    FORMAT_TRIPLES,
    PASSES,
    PRECISIONS,
    Case,
    cases,
    modes,
    reason,
)
from fastconv.bench.console import extra, follow, show, stopwatch, work_through
from fastconv.bench.host import HostCase
from fastconv.bench.measure import Bench
from fastconv.bench.networks import NetworkCase
from fastconv.bench.results import AnyResults, HostResults, NetworkResults, Results
from fastconv.bench.trials import NORMAL, Kinds, Trial
from fastconv.bench.verify import Check
from fastconv.exporter import export
from fastconv.jit import archive, cache, compile, trust
from fastconv.kernels import tuned
from fastconv.kernels.family import Gpu, Kernel
from fastconv.kernels.gpus import H200
from fastconv.network.preparation import is_gpu
from fastconv.timing import Effort
from fastconv.workloads import SUITES, Workload, parse_shape, suite, unique

# On a CPU the suites take minutes at full size: 1/4 of each side is 1/16 of the work.
CPU_DIVISOR = 4
INTERRUPTED = 130

# Options of `bench` that select or shape its rows; `--host` and `--networks` have others.
_NOT_WITH_NETWORKS = (
    "shape", "suite", "model", "divisor", "passes", "precision", "format", "commands"
)  # fmt: skip
_NOT_WITH_HOST = (
    *_NOT_WITH_NETWORKS, "batch", "image", "dtype", "peer", "repeats", "time_limit"
)  # fmt: skip
_LATE = "not measured: the time limit was reached"


class UsageError(ValueError):
    """Arguments that cannot be honoured; says why."""


def bench(arguments: Namespace) -> int:
    """``fastconv bench``: measures, or lists what it would measure, or compares two results."""
    if arguments.output and (arguments.compare or arguments.dry_run):
        which = "--compare" if arguments.compare else "--dry-run"
        raise UsageError(f"{which} measures nothing: there is nothing to write to --output")
    if arguments.mode and arguments.networks is None:
        raise UsageError("--mode is that of --networks, which are not asked for")
    if arguments.networks is not None:
        return _bench_networks(arguments)
    if arguments.compare:
        return _compare(arguments)
    if arguments.host:
        return _bench_host(arguments)
    device = _device(arguments.device)
    selected = _select(arguments, device)
    if arguments.dry_run:
        return _dry_run(arguments, selected, device)
    if not arguments.json:
        extra("rich")  # before the work, not after it
    files.check_outputs([arguments.output], _suite_files(arguments))
    found = Results(environment.describe(device))
    try:
        finished = _measure(arguments, selected, device, found)
    finally:
        _hand_over(arguments, found)  # whatever ended it
    if not finished:
        return INTERRUPTED
    return 1 if len(found.measured) < len(found.rows) else 0


def report_results(arguments: Namespace) -> int:
    """``fastconv report``: tables, plots and a page from results, of one file or several."""
    found = {path: results.read_any(path) for path in arguments.results}
    if not (arguments.json or arguments.quiet):
        extra("rich")
    _check_makeable(arguments, found)
    drawable = {path: one for path, one in found.items() if not isinstance(one, HostResults)}
    plots: Any = _plots() if arguments.plots or arguments.html else None
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
        from fastconv.bench import page

        timings = {path: one for path, one in found.items() if isinstance(one, Results)}
        files.write(arguments.html, page.html(timings))
    _tabulate(arguments, found)
    return 0


def _check_makeable(arguments: Namespace, found: Mapping[Path, AnyResults]) -> None:
    """Raises a UsageError if a plot or a page is asked for of results that have none."""
    of_hosts = ("host times", ["plots", "html"], "--markdown and --json")
    of_networks = ("times of networks", ["html"], "--plots, --markdown and --json")
    for path, one in found.items():
        if isinstance(one, Results):
            continue
        kind, lacking, made = of_hosts if isinstance(one, HostResults) else of_networks
        for option in lacking:
            if getattr(arguments, option):
                raise UsageError(
                    f"{path} holds {kind}, of which --{option} makes nothing: only {made}"
                )


def _plot_folders(folder: Path, paths: Sequence[Path]) -> dict[Path, Path]:
    """Where each file's plots go: to the folder or, of several, to one in it by the file's name."""
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


def verify_results(arguments: Namespace) -> int:
    """``fastconv verify``: every element against float64; status 1 if anything is wrong."""
    device = _device(arguments.device)
    if not arguments.json:
        extra("rich")
    files.check_outputs([arguments.output, arguments.markdown], _suite_files(arguments))
    selected = _trials(arguments, device)
    jobs = arguments.jobs or (campaign.default_jobs(device) if arguments.random else 1)
    check: Callable[[Trial], Check] = (
        partial(verify.check_isolation, device=device)
        if arguments.isolation
        else partial(verify.check, device=device, with_peer=not arguments.random)
    )
    limit_s = math.inf if arguments.time_limit is None else arguments.time_limit
    checks: list[Check] = []
    brief = report.Brief(every_s=10.0 if arguments.random else 0.0)

    def outcomes() -> Iterator[tuple[str, str | None]]:
        for found in campaign.run(selected, check, device, jobs, limit_s):
            checks.append(found)
            yield found.trial.label, brief(checks)

    start = time.perf_counter()
    finished = follow(outcomes(), len(selected), arguments.quiet)
    summary = campaign.summarise(checks, len(selected), time.perf_counter() - start)
    _hand_over_checks(arguments, checks, summary, device)
    if not finished:
        return INTERRUPTED
    return 1 if summary.wrong else 0


def info(arguments: Namespace) -> int:
    """``fastconv info``: the machine, and what the given shapes would run."""
    device = _device(arguments.device)
    cases = _select(arguments, device) if arguments.shape else []
    found = information.gather(device, cases, arguments.explain, arguments.gpu)
    if arguments.json:
        _print_json(found)
    else:
        print("\n".join(information.lines(found)))
    return 1 if any(case["error"] for case in found["cases"]) else 0


def tune_plans(arguments: Namespace) -> int:
    """``fastconv tune``: measures which plans are fastest, and keeps what betters the rules."""
    device = _device(arguments.device)
    if device.type != "cuda":
        raise UsageError(f"only GPU kernels are tuned, and {device} is no GPU")
    selected = _select(arguments, device)
    table = _table(arguments)
    found: dict[str, str] = {}
    failed: list[Case] = []
    tune.build(selected, device)

    def work(case: Case) -> str:
        try:
            result = tune.tune(case, device, Effort(arguments.repeats, arguments.row_seconds))
        except Exception as error:  # whatever it is, the other rows are worth having
            failed.append(case)
            return f"failed: {reason(error)}"
        if result.choices:
            found.update(result.choices)
            tuned.add(table, result.choices)
        return result.brief

    finished = work_through(selected, lambda case: case.label, work, arguments.quiet)
    if arguments.json:
        _print_json(found)
    else:
        where = f"; written to {table}" if found else ""
        print(f"{len(found)} of {len(selected)} rows bettered, {len(failed)} failed{where}")
    if not finished:
        return INTERRUPTED
    return 1 if failed else 0


def export_file(arguments: Namespace) -> int:
    """``fastconv export``: writes a file, or prints it."""
    text = export(
        arguments.workload,
        shape=arguments.shape,
        reference=arguments.reference,
        output=arguments.output,
        attribute=arguments.attribute,
        dtypes=arguments.dtype,
    )
    if arguments.output is None:
        print(text, end="")
    return 0


def build_native(arguments: Namespace) -> int:
    """``fastconv build``: makes the native host path's library, and says what it did."""
    start = time.perf_counter()
    with stopwatch(arguments.quiet) as show:
        path, made = native.make(arguments.again, show)
    seconds = round(time.perf_counter() - start, 1)
    if arguments.json:
        print(json.dumps({"library": str(path), "built": made, "seconds": seconds}))
    else:
        print(f"built {path} in {seconds} s" if made else f"{path} is there already")
    return 0


def list_cache(arguments: Namespace) -> int:
    """``fastconv cache list``: what is kept, what was used last first."""
    _check_cache_folder()
    kept, entries = information.kept(), cache.entries()
    described = [(entry, cache.about(entry)) for entry in entries]
    if arguments.json:
        _print_json({"cache": kept, "entries": [_entry(*one) for one in described]})
        return 0
    print("\n".join(information.kept_lines(kept)))
    rows = [_cells(*one) for one in described if one[0].kind != cache.PLAN]
    if rows:
        rows.insert(0, ("source", "architecture", "size", "last used"))
        print("", *tables.lines(rows, right={2}), sep="\n")
    return 0


def export_cache(arguments: Namespace) -> int:
    """``fastconv cache export``: writes the kernels that this installation uses to one file."""
    files.check_outputs([arguments.file])
    _check_cache_folder()
    made_by = _versions()
    if words := trust.distrusted_folder(cache.folder()):
        raise UsageError(f"nothing in {cache.folder()} is used, or exported: {words}")
    packed, left_out = _usable(arguments.architecture)
    others = f"; {left_out} damaged or of other versions are left out" if left_out else ""
    if not packed:
        of = f" for {arguments.architecture}" if arguments.architecture else ""
        raise UsageError(f"no kernels{of} in {cache.folder()} can be exported{others}")
    contents = archive.encode(made_by, packed)
    files.write(arguments.file, contents)
    size = cache.in_units(len(contents))
    # Not to where the kernels may be going, /dev/stdout.
    print(f"exported {len(packed)} kernels, {size}, to {arguments.file}{others}", file=sys.stderr)
    return 0


def import_cache(arguments: Namespace) -> int:
    """``fastconv cache import``: adds the kernels of such a file, all of them or none."""
    _check_cache_folder()
    try:
        found = archive.decode(files.read_bytes(arguments.file))
    except archive.ArchiveError as error:
        raise UsageError(f"cannot import {arguments.file}: {error}") from error
    _check_usable(arguments.file, found)
    needed, limit = sum(map(len, found.packed.values())), cache.limit().bytes
    if needed > limit:
        raise UsageError(
            f"cannot import {arguments.file}: its kernels take {cache.in_units(needed)}, and at "
            f"most {cache.in_units(limit)} are kept; {cache.VARIABLE} may allow more"
        )
    added = cache.add(found.packed)
    known = len(found.packed) - added
    architectures = ", ".join(sorted({about["architecture"] for about in found.about.values()}))
    print(
        f"imported {added} kernels for {architectures} into {cache.folder()}"
        + (f"; {known} were there already" if known else "")
    )
    return 0


def clear_cache(arguments: Namespace) -> int:
    """``fastconv cache clear``: removes entries, and nothing else that is in the folder."""
    _check_cache_folder()
    architecture = arguments.architecture
    removed = cache.remove(
        entry
        for entry in cache.entries()
        if architecture in (None, cache.about(entry).get("architecture"))
    )
    of = f" for {architecture}" if architecture else ""
    size = cache.in_units(removed.bytes)
    print(f"removed {removed}{of}, {size}, from {cache.folder()}")
    return 0


def _check_cache_folder() -> None:
    try:
        cache.folder()
    except RuntimeError as error:
        raise UsageError(f"{error} Set FASTCONV_CACHE_DIR to a folder for kernels.") from error


def _entry(entry: cache.Entry, about: Mapping[str, str]) -> dict[str, Any]:
    """An entry as values for JSON; None where it does not say."""
    return {
        "key": entry.path.stem,
        "kind": entry.kind,
        "source": about.get("source"),
        "architecture": about.get("architecture"),
        "bytes": entry.bytes,
        "used": datetime.fromtimestamp(entry.used, timezone.utc).isoformat(timespec="seconds"),
    }


def _cells(entry: cache.Entry, about: Mapping[str, str]) -> tuple[str, str, str, str]:
    """An entry as a row of a table."""
    source, architecture = (_shown(about.get(k, "unknown")) for k in ("source", "architecture"))
    used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
    return source, architecture, cache.in_units(entry.bytes), used


def _shown(text: str) -> str:
    """Words of a file from who knows where, for a terminal."""
    return text if text.isprintable() else ascii(text)


def _versions() -> dict[str, str]:
    """What decides, beside the GPU, which kernels are asked for."""
    nvrtc = ".".join(map(str, compile.nvrtc_version()))
    return {"fastconv": fastconv.__version__, "nvrtc": nvrtc}


def _usable(architecture: str | None) -> tuple[dict[str, bytes], int]:
    """Entries for an architecture, or all, that may be asked for, by name; how many may not."""
    packed, left_out = dict[str, bytes](), 0
    for entry in cache.entries():
        if entry.kind != cache.KERNEL:  # plans and times are this machine's own
            continue
        path = entry.path
        try:
            contents = trust.read(path)
            about, _ = cache.unpack(path.name, contents)
        except (OSError, cache.Damaged):
            left_out += 1
            continue
        if architecture not in (None, about.get("architecture")):
            continue
        if compile.is_current(path.name, about):
            packed[path.name] = contents
        else:
            left_out += 1
    return packed, left_out


def _check_usable(path: Path, found: archive.Archive) -> None:
    """Raises a UsageError if kernels of a file would lie in the cache for nothing."""
    stale = [name for name, about in found.about.items() if not compile.is_current(name, about)]
    if stale:
        theirs, ours = (
            f"fastconv {versions.get('fastconv')} with NVRTC {versions.get('nvrtc')}"
            for versions in (found.made_by, _versions())
        )
        raise UsageError(
            f"cannot import {path}: {len(stale)} of its {len(found.packed)} kernels would never be "
            f"used here. It was made by {_shown(theirs)}, and this is {ours}: kernels are for the "
            "very sources, options and compiler that they were made with"
        )


def _bench_host(arguments: Namespace) -> int:
    """``fastconv bench --host``: measures how long the host takes to queue calls."""
    takes = "it takes --device, --row-seconds, --output, --json and --quiet"
    _check_apart(arguments, "--host has rows of its own", _NOT_WITH_HOST, takes)
    device = _device(arguments.device)
    if not arguments.json:
        extra("rich")
    files.check_outputs([arguments.output])
    contestants.settle(device)
    found = HostResults(environment.describe(device))

    def work(case: HostCase) -> str:
        found.rows.append(host.row(case, device, arguments.row_seconds))
        _write_row(arguments, found)
        return report.host_brief(found.rows[-1])

    try:
        finished = work_through(host.cases(device), lambda case: case.name, work, arguments.quiet)
    finally:
        _hand_over(arguments, found)  # whatever ended it
    if not finished:
        return INTERRUPTED
    return 1 if any(row.error for row in found.rows) else 0


def _bench_networks(arguments: Namespace) -> int:
    """``fastconv bench --networks``: measures whole networks before and after ``optimize``."""
    takes = (
        "they take --mode, --dtype, --batch, --image, --peer, --device, --repeats, --row-seconds, "
        "--time-limit, --output, --json and --quiet"
    )
    _check_apart(arguments, "--networks have rows of their own", _NOT_WITH_NETWORKS, takes)
    selected, device = _select_networks(arguments), _device(arguments.device)
    if not is_gpu(device):
        raise UsageError(f"fastconv.optimize measures on a GPU, and {device} is none")
    if not arguments.json:
        extra("rich")
    files.check_outputs([arguments.output])
    contestants.settle(device)
    found = NetworkResults(environment.describe(device))
    deadline, effort = _deadline(arguments), _effort(arguments)
    compile = arguments.peer == "compile"

    def work(case: NetworkCase) -> str:
        if time.perf_counter() >= deadline:
            found.rows.append(case.outcome(error=_LATE))
        else:
            found.rows.append(networks.row(case, device, effort, compile))
        _write_row(arguments, found)
        return report.network_brief(found.rows[-1])

    try:
        finished = work_through(selected, lambda case: case.label, work, arguments.quiet)
    finally:
        _hand_over(arguments, found)  # whatever ended it
    if not finished:
        return INTERRUPTED
    return 1 if any(row.error for row in found.rows) else 0


def _select_networks(arguments: Namespace) -> list[NetworkCase]:
    """The rows of networks that the arguments ask for."""
    for name in arguments.dtype or ():
        if name not in networks.CONFIGURATIONS:
            known = " and ".join(networks.CONFIGURATIONS)
            raise UsageError(f"--networks are measured in {known}, not in {name}")
    if arguments.peer == "best":
        raise UsageError("--networks have the memory format of their row: --peer best has no other")
    return networks.cases(
        arguments.networks or networks.NETWORKS,
        arguments.mode or networks.MODES,
        arguments.dtype or list(networks.CONFIGURATIONS),
        arguments.batch,
        arguments.image,
    )


def _check_apart(arguments: Namespace, what: str, without: Sequence[str], takes: str) -> None:
    """Raises a UsageError for options of other rows than those that are asked for."""
    for name in without:
        given = getattr(arguments, name)
        if given is not None and given is not False:  # a time limit may be 0
            raise UsageError(f"{what}, to which --{_option(name)} does not apply: {takes}")


def _deadline(arguments: Namespace) -> float:
    """When no further row begins."""
    return time.perf_counter() + (
        math.inf if arguments.time_limit is None else arguments.time_limit
    )


def _effort(arguments: Namespace) -> Effort:
    return Effort(arguments.repeats or Effort.repeats, arguments.row_seconds)


def _option(name: str) -> str:
    return "pass" if name == "passes" else name.replace("_", "-")


def _measure(
    arguments: Namespace, selected: Sequence[Case], device: torch.device, found: Results
) -> bool:
    """Fills in the results row by row; whether it got to the end."""
    deadline = _deadline(arguments)
    gpu = configurations.device_gpu(device)
    compiled = {} if gpu is None else _build(arguments, selected, gpu, found)
    _say(arguments, "measuring the machine's ceilings")
    found.ceilings = limits.measure(selected, device)
    for doubt in found.doubts:
        _say(arguments, doubt)
    measuring = Bench(
        device, arguments.peer or "pytorch", _effort(arguments), found.ceilings, gpu, compiled
    )  # fmt: skip

    def work(case: Case) -> str:
        if time.perf_counter() >= deadline:
            found.rows.append(measuring.failed(case, _LATE))
        else:
            found.rows.append(measuring.row(case))
        _write_row(arguments, found)
        return report.brief(found.rows[-1])

    finished = work_through(selected, lambda case: case.label, work, arguments.quiet)
    if finished:
        found.ceilings_after = limits.measure(selected, device)
    return finished


def _write_row(arguments: Namespace, found: AnyResults) -> None:
    """Replaces the output by one that has the latest row; what cannot be replaced waits."""
    if arguments.output and files.replaceable(arguments.output):
        found.write(arguments.output)


def _hand_over(arguments: Namespace, found: AnyResults) -> None:
    """Shows and writes what was measured, if anything was."""
    if not found.rows:
        return
    if arguments.json:
        print(found.json(), end="")
    else:
        show(report.table(found))
        if arguments.commands and isinstance(found, Results):
            print("\n".join(row.command for row in found.rows))
    if arguments.output:
        found.write(arguments.output)


FAR_SHARE = 0.05
"""Of random trials of isolation, which needs no reference: layers whose taps are far apart."""


def _misaligned(arguments: Namespace) -> tuple[str, ...]:
    """The tensors that lie at odd addresses: those that are named, or all if none is."""
    if arguments.misaligned is None:
        return ()
    return tuple(arguments.misaligned) or trials.PLACED


def _trials(arguments: Namespace, device: torch.device) -> list[Trial]:
    """What is to be verified: drawn at random, or what the arguments select."""
    seed = arguments.seed or 0
    if not arguments.random:
        return [
            Trial(case, _misaligned(arguments), arguments.bias, arguments.data or NORMAL, seed)
            for case in _select(arguments, device)
        ]
    for name in (
        "shape", "suite", "model", "batch", "image", "divisor", "misaligned", "bias", "data"
    ):  # fmt: skip
        if getattr(arguments, name) not in (None, False):
            raise UsageError(f"--random draws what --{name} would say: they exclude each other")
    kinds = Kinds(
        arguments.passes or PASSES,
        modes(arguments.dtype or list(DTYPES), arguments.precision or PRECISIONS),
        arguments.format or FORMAT_TRIPLES,
    )
    most = trials.drawn_limits(device)
    far = FAR_SHARE if arguments.isolation else 0.0
    return [trials.drawn(seed, number, most, kinds, far) for number in range(arguments.random)]


def _hand_over_checks(
    arguments: Namespace, checks: Sequence[Check], summary: Summary, device: torch.device
) -> None:
    """Shows and writes what was found."""
    where = environment.describe(device)
    failed = [check for check in checks if not check.passed]
    contents = {
        "format": campaign.FORMAT,
        "environment": where,
        "seed": arguments.seed or 0,
        "summary": summary.to_dict(),
        "failed": [check.to_dict(arguments.device) for check in failed],
    }
    if arguments.json:
        every = [check.to_dict(arguments.device) for check in checks]
        _print_json({**contents, "checks": every})
    elif arguments.random:
        show(report.summary_table(summary))
    else:
        show(report.checks_table(checks))
    for check in failed:
        print(f"{check.trial.label}: {check.complaint}", file=sys.stderr)
        print(f"  {check.trial.command(arguments.device)}", file=sys.stderr)
    if summary.tried < summary.asked:
        _say(arguments, f"only {summary.tried} of {summary.asked} trials were begun in time")
    if arguments.output:
        files.write(arguments.output, json.dumps(contents, indent=1) + "\n")
    if arguments.markdown:
        files.write(arguments.markdown, report.summary_markdown(summary, where))


def _build(
    arguments: Namespace, selected: Sequence[Case], gpu: Gpu, found: Results
) -> dict[Kernel, float]:
    """Compiles what all cases need, side by side; seconds that each kernel took."""
    start, seconds = time.perf_counter(), dict[Kernel, float]()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        building = {
            kernel: threads.submit(configurations.build_s, kernel, gpu)
            for kernel in configurations.kernels(selected, gpu)
        }
        _say(arguments, f"compiling {len(building)} kernels")

        def label(kernel: Kernel) -> str:
            return f"compiling {kernel.entry}"

        def work(kernel: Kernel) -> None:
            seconds[kernel] = building[kernel].result()

        if not work_through(list(building), label, work, arguments.quiet):
            threads.shutdown(cancel_futures=True)
            raise KeyboardInterrupt
    found.build_s = time.perf_counter() - start
    _say(arguments, f"compiled in {found.build_s:.1f} s")
    return seconds


def _dry_run(arguments: Namespace, selected: Sequence[Case], device: torch.device) -> int:
    gpu = configurations.device_gpu(device)
    planned = {case: configurations.attempt(case, gpu or H200) for case in selected}
    status = 1 if any(failure for _, failure in planned.values()) else 0
    if arguments.json:
        _print_json(
            [
                {
                    "label": case.label,
                    "command": case.command(),
                    "configurations": [configuration.to_dict() for configuration in legal],
                    "error": failure,
                }
                for case, (legal, failure) in planned.items()
            ]
        )
        return status
    print(f"{len(selected)} rows; kernels as on {'this GPU' if gpu else 'an H200: no GPU here'}")
    for case, (legal, failure) in planned.items():
        print(f"{case.label}: {case.workload.shape}")
        for configuration in legal:
            print("\n".join(f"  {line}" for line in configuration.lines()))
        if failure is not None:
            print(f"  failed: {failure}")
        if arguments.commands:
            print(f"  {case.command()}")
    return status


def _compare(arguments: Namespace) -> int:
    old, new = map(results.read, arguments.compare)
    found = list(results.changes(old, new))
    changed = [change for change in found if change.verdict != "same"]
    gone, added = results.unmatched(old, new)
    if arguments.json:
        _print_json([change.to_dict() for change in found])
        return 0
    where = [r.environment.get("gpu", "CPU") for r in (old, new)]
    if where[0] != where[1]:
        print(f"beware: {where[0]} and {where[1]} are different machines")
    for path, one in zip(arguments.compare, (old, new), strict=True):
        for doubt in one.doubts:
            print(f"beware: {path}: {doubt}")
    if changed:
        show(report.changes_table(changed))
    same = len(found) - len(changed)
    print(f"{len(changed)} of {len(found)} rows changed beyond noise, {same} did not")
    if gone or added:
        print(f"{len(gone)} rows are in the old results alone, {len(added)} in the new alone")
    return 0


def _select(arguments: Namespace, device: torch.device) -> list[Case]:
    """The cases that the arguments ask for."""
    given = [*map(parse_shape, arguments.shape or ()), *_layers(arguments)]
    suites = arguments.suite or ([] if given else ["founding"])
    selected = unique([*given, *(workload for name in suites for workload in suite(name))])
    # A suite is scaled down where it would take too long; the rest is taken as it is given.
    divisor = arguments.divisor or (1 if device.type == "cuda" else CPU_DIVISOR)
    as_given = () if arguments.divisor else given
    workloads = [one if one in as_given else one.scaled(divisor) for one in selected]
    return cases(
        workloads,
        arguments.passes or PASSES,
        arguments.dtype or ("float32",),
        arguments.precision or ("ieee",),
        arguments.format or ("nchw",),
    )


def _layers(arguments: Namespace) -> list[Workload]:
    """The layers of the models that the arguments name."""
    for option in ("batch", "image"):
        if getattr(arguments, option) and not arguments.model:
            raise UsageError(f"--{option} is that of a --model, and none is given")
    batch, side = arguments.batch or models.BATCH, arguments.image
    return [one for name in arguments.model or () for one in models.workloads(name, batch, side)]


def _device(name: str | None) -> torch.device:
    """The device asked for, or a GPU if there is one; a UsageError if it is not there."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        raise UsageError(f"no device {name!r}: it should be cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"no device {name!r} here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _suite_files(arguments: Namespace) -> list[Path]:
    return [Path(name) for name in arguments.suite or () if name not in SUITES]


def _table(arguments: Namespace) -> Path:
    """Where choices of plans are added: a table, or no file yet."""
    path: Path = arguments.output or tuned.own()
    if arguments.output is None:
        if words := trust.distrusted(path):
            raise UsageError(
                f"{path} would not be used: {words}; take others' right to write away, set "
                "FASTCONV_CACHE_DIR to a folder that is yours alone, or give --output"
            )
        files.make_folder(path.parent, private=True)
    files.check_outputs([path], _suite_files(arguments))
    if path.is_file() and path.stat().st_size > 0:
        table = files.read_json(path)
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise UsageError(f"cannot add to {path}: it holds no table of fastconv tune")
    return path


def _plots() -> Any:
    extra("matplotlib")
    from fastconv.bench import plots

    return plots


def _say(arguments: Namespace, text: str) -> None:
    if not arguments.quiet:
        print(text, file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))
