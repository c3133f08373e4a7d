"""``fastconv bench``: measures convolutions, or lists what it would measure."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from _fastconv_command.streams import INTERRUPTED
from fastconv import files
from fastconv.bench import configurations, environment, limits, report
from fastconv.bench.cases import Case
from fastconv.bench.console import extra, work_through
from fastconv.bench.measure import Bench
from fastconv.bench.results import Results
from fastconv.commands import common, rows
from fastconv.commands.bench_host import bench_host
from fastconv.commands.bench_networks import bench_networks
from fastconv.commands.common import UsageError, print_json, say, suite_files
from fastconv.commands.compare import compare
from fastconv.kernels.family import Gpu, Kernel
from fastconv.kernels.gpus import H200


def run(arguments: Namespace) -> int:
    """Runs the kind of benchmark that the arguments select; its exit status."""
    if arguments.output and (arguments.compare or arguments.dry_run):
        which = "--compare" if arguments.compare else "--dry-run"
        raise UsageError(f"{which} measures nothing: there is nothing to write to --output")
    for name in ("mode", "compile"):
        if getattr(arguments, name) and arguments.networks is None:
            raise UsageError(f"--{name} applies to --networks, which is not given")
    if arguments.networks is not None:
        return bench_networks(arguments)
    if arguments.compare:
        return compare(arguments)
    if arguments.host:
        return bench_host(arguments)
    device = common.select_device(arguments.device)
    selected = common.select_cases(arguments, device)
    if arguments.dry_run:
        return _dry_run(arguments, selected, device)
    if not arguments.json:
        extra("rich")  # a missing package is reported before the work, not after it
    files.check_outputs([arguments.output], suite_files(arguments))
    common.advise(arguments, selected, device)
    found = Results(environment.describe(device))
    try:
        finished = _measure(arguments, selected, device, found)
    finally:
        rows.hand_over(arguments, found)  # after an error or Ctrl-C, too
    if not finished:
        return INTERRUPTED
    return 1 if any(row.error for row in found.rows) else 0


def _measure(
    arguments: Namespace, selected: Sequence[Case], device: torch.device, found: Results
) -> bool:
    """Fills in the results row by row; False if Ctrl-C ended it early."""
    deadline = rows.deadline(arguments)
    gpu = configurations.device_gpu(device)
    compile_s = {} if gpu is None else _compile(arguments, selected, gpu, found)
    say(arguments, "measuring the machine's ceilings")
    found.ceilings = limits.measure(selected, device)
    for doubt in found.doubts:
        say(arguments, doubt)
    effort, peer = rows.effort(arguments), arguments.peer or "pytorch"
    advice = common.memory_advice(arguments, device)
    measuring = Bench(device, peer, effort, found.ceilings, gpu, compile_s, advice)

    def work(case: Case) -> str:
        if time.perf_counter() >= deadline:
            found.rows.append(measuring.skipped(case, rows.TOO_LATE))
        else:
            found.rows.append(measuring.row(case))
        rows.write_so_far(arguments, found)
        return report.brief(found.rows[-1])

    finished = work_through(selected, lambda case: case.label, work, arguments.quiet)
    if finished:
        found.ceilings_after = limits.measure(selected, device)
    return finished


def _compile(
    arguments: Namespace, selected: Sequence[Case], gpu: Gpu, found: Results
) -> dict[Kernel, float]:
    """Compiles the kernels of all cases, a thread for each core; the seconds each took."""
    start, seconds = time.perf_counter(), dict[Kernel, float]()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        building = {
            kernel: threads.submit(configurations.build_s, kernel, gpu)
            for kernel in configurations.kernels(selected, gpu)
        }
        say(arguments, f"compiling {len(building)} kernels")

        def label(kernel: Kernel) -> str:
            return f"compiling {kernel.entry}"

        def work(kernel: Kernel) -> None:
            seconds[kernel] = building[kernel].result()

        if not work_through(list(building), label, work, arguments.quiet):
            threads.shutdown(cancel_futures=True)
            raise KeyboardInterrupt
    found.build_s = time.perf_counter() - start
    say(arguments, f"compiled in {found.build_s:.1f} s")
    return seconds


def _dry_run(arguments: Namespace, selected: Sequence[Case], device: torch.device) -> int:
    """Lists each case with the kernels that it would run; 1 if one cannot be planned."""
    gpu = configurations.device_gpu(device)
    planned = {case: configurations.attempt(case, gpu or H200) for case in selected}
    status = 1 if any(failure for _, failure in planned.values()) else 0
    if arguments.json:
        print_json(
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
    of = "this GPU" if gpu else "an H200, since this machine has no GPU"
    print(f"{len(selected)} rows, with the kernels of {of}")
    for case, (legal, failure) in planned.items():
        print(f"{case.label}: {case.workload.shape}")
        for configuration in legal:
            print("\n".join(f"  {line}" for line in configuration.lines()))
        if failure is not None:
            print(f"  failed: {failure}")
        if arguments.commands:
            print(f"  {case.command()}")
    return status
