"""``fastconv demo``: verifies and measures the founding layers, and sums up what it saw."""

from __future__ import annotations

import shlex
import statistics
from argparse import Namespace
from pathlib import Path

import torch

from _fastconv_command import parser
from _fastconv_command.streams import INTERRUPTED
from fastconv import files
from fastconv.bench import page, plots, results
from fastconv.bench.console import extra
from fastconv.bench.results import Results
from fastconv.commands import bench, common, verify

# Layers of 1/32 of their height and width, so that two busy cores need a minute or two.
CPU_DIVISOR = 32
CPU_ROW_SECONDS, GPU_ROW_SECONDS = 1, 3

_ON_A_CPU = "The layers are tiny here, and these times say nothing about a GPU."


def run(arguments: Namespace) -> int:
    """Runs ``verify`` and ``bench``, and shows the outcome; 1 if a check or a row failed."""
    for package in ("rich", "matplotlib"):
        extra(package)  # a missing package is reported before the work, not after it
    device = common.select_device(arguments.device)
    folder: Path = arguments.folder
    files.make_folder(folder)
    checks, times, shown = (folder / name for name in ("verify.json", "bench.json", "page.html"))
    files.check_outputs([checks, times, shown])
    options = ["--suite", "founding", "--device", str(device)]
    row_seconds = GPU_ROW_SECONDS
    if device.type == "cpu":
        options += ["--divisor", str(CPU_DIVISOR)]
        row_seconds = CPU_ROW_SECONDS
    statuses = []
    for command in (
        ["verify", *options, "--output", str(checks)],
        ["bench", *options, "--row-seconds", str(row_seconds), "--output", str(times)],
    ):
        print(f"$ fastconv {shlex.join(command)}", flush=True)
        work = verify.run if command[0] == "verify" else bench.run
        statuses.append(work(parser.parse(command)))
        if statuses[-1] == INTERRUPTED:
            return INTERRUPTED
    found = results.read(times)
    sentence = f"{_checked(files.read_json(checks)['summary'])}; {_measured(found, device)}."
    if device.type == "cpu":
        sentence += f" {_ON_A_CPU}"
    plots.write(found, folder)
    files.write(shown, page.html({times: found}, sentence))
    print(f"{sentence} The page {shown} shows it, with plots ({folder / 'speedups.svg'}).")
    return max(statuses)


def _checked(summary: dict[str, int]) -> str:
    passed = summary["tried"] - summary["wrong"]
    return f"{passed} of {summary['asked']} results agree with float64"


def _measured(found: Results, device: torch.device) -> str:
    """The speed-ups in a clause, with what it takes to judge them."""
    speedups = [row.speedup for row in found.measured if row.speedup]
    if not speedups:
        return "no row could be measured"
    where = found.environment.get("gpu", f"a CPU with {found.environment.get('threads')} threads")
    size = "" if device.type == "cuda" else f", at 1/{CPU_DIVISOR} of the layers' height and width"
    doubts = " (the machine was busy, so this says little)" if found.doubts else ""
    return (
        f"on {where}{size}, fastconv computes {len(speedups)} passes at {min(speedups):.2f} to "
        f"{max(speedups):.2f} times the speed of PyTorch, "
        f"{statistics.geometric_mean(speedups):.2f} times in the geometric mean{doubts}"
    )
