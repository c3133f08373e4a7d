"""Measures whole networks, host times, first steps and random problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastconv.bench import contestants, host, networks
from fastconv.bench.host import HostCase
from fastconv.bench.network_results import NetworkResults, NetworkRow
from fastconv.bench.networks import NetworkCase
from fastconv.bench.results import HostResults, HostRow, read_any
from fastconv.timing import Effort
from results.catalogue import Job
from results.keeping import Keeper, Plain, attempt, read_plain
from results.sources import ROOT

NETWORKS = tuple(dict.fromkeys(("resnet50", "r3d_18", "unet3d", *networks.NETWORKS)))
TRAINED = ("resnet18", "resnext50_32x4d", "mobilenet_v2", "vgg16_bn")  # measured in training alone
NETWORK_EFFORT = Effort(3, 1.0)
NETWORK_SECONDS = 50.0  # The slowest: DeepLabV3's training in TF32, mostly cuDNN's search.
COMPILED = ("resnet50",)  # networks that are also measured after torch.compile, in bfloat16
COMPILED_EFFORT = Effort(3, 3.0)  # They have three times as many contestants.
COMPILED_SECONDS = 240.0  # Four contestants, each of which takes about 40 s to compile in training.
HOST_EFFORT_SECONDS = 2.0
HOST_SECONDS = 15.0
FIRST_STEPS = {"resnet50": 64, "convnext_tiny": 64}  # and their batches
FIRST_STEPS_SECONDS = 90.0  # four processes
VERIFIED = {
    # name: further arguments, number of trials, seconds after which no further one begins
    "float64": ((), 1500, 100),
    "isolation": (("--isolation",), 1000, 50),
}
VERIFY_START_SECONDS = 30.0  # to start the processes, and to end the last trials


def measure_networks(job: Job, folder: Path, device: torch.device, deadline: float) -> None:
    """Measures whole networks, training before inference."""
    contestants.settle(device)
    every = [*networks.cases(TRAINED, [networks.TRAINING]), *networks.cases(NETWORKS)]
    every.sort(key=lambda case: case.mode != networks.TRAINING)
    words = (
        f"{NETWORK_EFFORT.repeats} samples a round, at most {NETWORK_EFFORT.seconds} s a row "
        f"({COMPILED_EFFORT.seconds} s with compiled networks)"
    )
    keeper = Keeper(
        job.files[0], folder, _read_networks, NetworkResults, device, deadline, len(every), words
    )

    def row(case: NetworkCase) -> list[NetworkRow]:
        effort = COMPILED_EFFORT if is_compiled(case) else NETWORK_EFFORT
        measure = partial(networks.row, case, device, effort, is_compiled(case))
        return attempt(measure, lambda why: case.outcome(error=why))

    with keeper:
        done = {row.label for row in keeper.found.rows}
        for case in every:
            if case.label not in done:
                seconds = COMPILED_SECONDS if is_compiled(case) else NETWORK_SECONDS
                keeper.add(case.label, seconds, partial(row, case))


def is_compiled(case: NetworkCase) -> bool:
    """Whether a row also has compiled networks."""
    return case.network in COMPILED and case.configuration == networks.CONFIGURATIONS["bfloat16"]


def measure_host(job: Job, folder: Path, device: torch.device, deadline: float) -> None:
    """Measures host times, by the host path that the process has."""
    contestants.settle(device)
    every = host.cases(device)
    words = f"at most {HOST_EFFORT_SECONDS} s a row"
    keeper = Keeper(
        job.files[0], folder, _read_host, HostResults, device, deadline, len(every), words
    )

    def row(case: HostCase) -> list[HostRow]:
        measure = partial(host.row, case, device, HOST_EFFORT_SECONDS)
        return attempt(measure, lambda why: HostRow(case.name, case.about, error=why))

    with keeper:
        done = {row.name for row in keeper.found.rows}
        for case in every:
            if case.name not in done:
                keeper.add(case.name, HOST_SECONDS, partial(row, case))


def measure_first_steps(job: Job, folder: Path, device: torch.device, deadline: float) -> None:
    """Measures first training steps; each network's processes are one unit."""
    words = "each step in a new process, in TF32"
    ways = 4  # of cold_start.py
    keeper = Keeper(
        job.files[0], folder, read_plain, Plain, device, deadline, ways * len(FIRST_STEPS), words
    )
    with keeper:
        done = {row["model"] for row in keeper.found.rows}
        for name, batch in FIRST_STEPS.items():
            if name not in done:
                keeper.add(name, FIRST_STEPS_SECONDS, partial(_first_steps, name, batch))


def _first_steps(name: str, batch: int) -> list[dict[str, Any]]:
    script = ROOT / "tests" / "gpu" / "cold_start.py"
    lines = _output([str(script), name, "--batch", str(batch)]).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def measure_verify(job: Job, folder: Path, device: torch.device, deadline: float) -> None:
    """Checks random problems against float64, and for isolation."""
    words = ", ".join(f"{name} at most {seconds} s" for name, (_, _, seconds) in VERIFIED.items())
    keeper = Keeper(job.files[0], folder, read_plain, Plain, device, deadline, len(VERIFIED), words)
    with keeper:
        done = {row["name"] for row in keeper.found.rows}
        for name, (arguments, trials, seconds) in VERIFIED.items():
            if name not in done:
                run = partial(_verified, name, arguments, trials, seconds, device)
                keeper.add(name, seconds + VERIFY_START_SECONDS, run)


def _verified(
    name: str, arguments: tuple[str, ...], trials: int, seconds: int, device: torch.device
) -> list[dict[str, Any]]:
    command = ["verify", "--random", str(trials), "--time-limit", str(seconds), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.json"
        where = ["--device", device.type, "--output", str(path), "--json", "--quiet"]
        _output(["-m", "fastconv", *command, *where], allowed=(0, 1))  # 1: one is wrong
        found = json.loads(path.read_text(encoding="utf-8"))
    row = {key: found[key] for key in ("seed", "summary", "failed")}
    return [{"name": name, "command": " ".join(["fastconv", *command]), **row}]


def _output(arguments: list[str], allowed: tuple[int, ...] = (0,)) -> str:
    """What a Python process prints to stdout; raises if its exit status is not an allowed one."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    found = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    if found.returncode not in allowed:
        raise subprocess.CalledProcessError(found.returncode, arguments, found.stdout)
    return found.stdout


def _read_networks(path: Path) -> NetworkResults:
    found = read_any(path)
    assert isinstance(found, NetworkResults)
    return found


def _read_host(path: Path) -> HostResults:
    found = read_any(path)
    assert isinstance(found, HostResults)
    return found
