"""Measures results, says which are out of date, and writes pages from them.

PYTHONPATH=src:tools python -m results measure --seconds 440   # on a GPU; again, until it is done
PYTHONPATH=src:tools python -m results status                  # anywhere
PYTHONPATH=src:tools python -m results pages                   # tables, figures, blocks of pages
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fastconv.bench.console import MissingExtra
from fastconv.bench.environment import COMMIT_VARIABLE
from results import catalogue, kernelbench, layers, others, pages, sources
from results.catalogue import Job
from results.keeping import Late, Poisoned, end_when_asked

LEFT = 1  # the exit status if something is left to measure, or out of date
REFUSED = 2
LATE = 75  # the exit status of a job that goes on in the next call
LEAST_SECONDS = 20.0  # A process that has less time would only start and end.

MEASURE: dict[str, Callable[[Job, Path, torch.device, float], None]] = {
    "layers": layers.measure,
    "sequences": layers.measure,
    "volumes": layers.measure,
    "networks": others.measure_networks,
    "host": others.measure_host,
    "host-python": others.measure_host,
    "first-steps": others.measure_first_steps,
    "verify": others.measure_verify,
    "kernelbench": kernelbench.measure,
}


def main(words: list[str] | None = None) -> int:
    """Runs the command; its exit status."""
    arguments = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, end_when_asked)  # so that rows are kept
    try:
        return int(arguments.run(arguments))
    except sources.DirtyError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="results", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("measure", help="measures what is out of date, or not there")
    command.add_argument(
        "--seconds", type=float, default=440.0, help="begin nothing that ends later"
    )
    command.add_argument("--jobs", nargs="+", choices=list(MEASURE), default=list(MEASURE))
    command.add_argument("--again", action="store_true", help="also what is up to date")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.set_defaults(run=_measure)
    command = commands.add_parser("job", help="one process of measure")
    command.add_argument("name", choices=list(MEASURE))
    command.add_argument("seconds", type=float)
    command.add_argument("device", choices=("cuda", "cpu"))
    command.set_defaults(run=_job)
    command = commands.add_parser("status", help="says what is out of date, and why")
    command.set_defaults(run=_status)
    command = commands.add_parser("pages", help="writes all that is made from the files of figures")
    command.set_defaults(run=_pages)
    return parser


def _measure(arguments: argparse.Namespace) -> int:
    """Starts a process for each job that has something to measure, as long as there is time."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("not measured: there is no GPU here", file=sys.stderr)
        return REFUSED
    os.environ[COMMIT_VARIABLE] = sources.clean_commit()
    deadline = time.monotonic() + arguments.seconds
    folder = _folder(arguments.device)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [job for job in catalogue.jobs(folder) if job.name in arguments.jobs]
    if arguments.again:
        for file in (file for job in chosen for file in job.files):
            (folder / f"{file.name}.json").unlink(missing_ok=True)
    for job in chosen:
        left = deadline - time.monotonic()
        if any(file.state(folder) for file in job.files) and left > LEAST_SECONDS:
            print(f"measuring {job.name}", flush=True)
            _start(job, left, arguments.device)
    _pages(arguments)
    return _status(arguments)


def _start(job: Job, seconds: float, device: str) -> None:
    """Runs a job in a process of its own, which ends with this one."""
    command = [sys.executable, "-m", "results", "job", job.name, f"{seconds:.0f}", device]
    with subprocess.Popen(command, env={**os.environ, **job.variables}) as process:
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
    if status not in (0, LATE):
        print(f"{job.name} failed: exit status {status}", file=sys.stderr, flush=True)


def _job(arguments: argparse.Namespace) -> int:
    device, folder = torch.device(arguments.device), _folder(arguments.device)
    deadline = time.monotonic() + arguments.seconds
    (job,) = (one for one in catalogue.jobs(folder) if one.name == arguments.name)
    try:
        MEASURE[job.name](job, folder, device, deadline)
    except Late:
        print(f"{job.name}: the time is over, and what was measured is kept", flush=True)
        return LATE
    except Poisoned as error:
        print(f"{job.name} goes on in the next call, without this row: {error}", file=sys.stderr)
        return LATE
    return 0


def _folder(device: str) -> Path:
    return catalogue.folder_of(torch.cuda.get_device_name() if device == "cuda" else None)


def _status(_: argparse.Namespace) -> int:
    """Says for each file of each folder whether it is up to date."""
    status, found = 0, catalogue.folders()
    for folder in found:
        for file in (file for job in catalogue.jobs(folder) for file in job.files):
            why = "; ".join(filter(None, (file.state(folder), file.complaint(folder))))
            print(f"{folder.name}/{file.name}: {why or 'up to date'}")
            status = LEFT if why else status
    if not found:
        print("nothing is measured yet: `make results` on a machine with a GPU")
    return status if found else LEFT


def _pages(_: argparse.Namespace) -> int:
    try:
        written = pages.write()
    except MissingExtra as missing:
        print(f"plots are not drawn: {missing}", file=sys.stderr)
        return LEFT
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
