"""The files of figures: what each has, what it depends on, and which process measures it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import sources
from results.sources import ROOT

RESULTS = ROOT / "docs" / "results"
CPU = "cpu"  # the folder of figures that were measured on a CPU

_PACKAGE = "src/fastconv"
_KERNELS = tuple(
    f"{_PACKAGE}/{name}"
    for name in ("kernels", "backends", "jit", "problem.py", "_precision.py", "timing.py")
)
_OPERATORS = f"{_PACKAGE}/ops"
# What calls pass through before they reach a kernel: host time depends on it, GPU time does not.
_CALLS = (
    _OPERATORS,
    *(
        f"{_PACKAGE}/{name}"
        for name in ("native", "functional.py", "modules.py", "_frozen.py", "bypass.py")
    ),
)


def _bench(*names: str) -> tuple[str, ...]:
    return tuple(f"{_PACKAGE}/bench/{name}.py" for name in names)


@dataclass(frozen=True)
class File:
    """A file of figures, ``NAME.json``, with its page ``NAME.md``."""

    name: str
    what: str
    sources: tuple[str, ...]  # files and folders that the figures depend on

    def state(self, folder: Path) -> str:
        """Why the file has to be measured, in a few words; "" if it is up to date."""
        contents = read(folder / f"{self.name}.json")
        if contents is None:
            return "not measured"
        about = contents["environment"]
        if about.get("sources") != sources.hash_now(self.sources):
            return f"its sources have changed since {about['commit']}"
        missing = int(about["rows"]) - len(contents["rows"])
        return f"{missing} of {about['rows']} rows are left" if missing else ""

    def complaint(self, folder: Path) -> str:
        """What is wrong with the file's stamp, in a few words; "" if it is right, or unknown."""
        contents = read(folder / f"{self.name}.json")
        if contents is None:
            return ""
        commit = contents["environment"]["commit"]
        if "dirty" in commit or commit == "unknown":
            return f"its commit is {commit!r}"
        found = sources.hash_at(commit, self.sources)
        if found not in (None, contents["environment"]["sources"]):
            return f"commit {commit} does not have the sources that were measured"
        return ""


@dataclass(frozen=True)
class Job:
    """A process that measures one or more files."""

    name: str
    files: tuple[File, ...]
    variables: Mapping[str, str] = field(default_factory=dict)  # of the process's environment
    on_cpu: bool = False  # whether it also measures on a machine without a GPU


_LAYER_SOURCES = (
    *_KERNELS,
    *_bench("cases", "configurations", "contestants", "limits", "measure", "mma_rate", "models"),
    *_bench("row_timing", "kernel_passes", "written_networks"),
    f"{_PACKAGE}/workloads.py",
    "tools/results/layers.py",
)
_LAYERS = File(
    "layers", "single 2-D layers: the suites, and every layer of networks", _LAYER_SOURCES
)  # fmt: skip
_SEQUENCES = File("sequences", "layers of sequences, and transposed layers", _LAYER_SOURCES)
_VOLUMES = File("volumes", "layers of videos and of other volumes", _LAYER_SOURCES)
_AMPERE = File(
    "layers-ampere",
    "the founding workloads by the kernels for all GPUs since Ampere, with the shared memory of an "
    "A100, on this GPU",
    _LAYER_SOURCES,
)

_NETWORK_SOURCES = (
    *_KERNELS, *_CALLS, f"{_PACKAGE}/network", *_bench("models", "written_networks")
)  # fmt: skip
_NETWORKS = File(
    "networks",
    "whole networks before and after `fastconv.optimize`",
    (*_NETWORK_SOURCES, *_bench("networks", "contestants")),
)
_FIRST_STEPS = File(
    "first-steps",
    "the first training step of networks, in new processes",
    (*_NETWORK_SOURCES, *_bench("host"), "tests/gpu/cold_start.py"),
)

_HOST_SOURCES = (*_KERNELS, *_CALLS, *_bench("host", "contestants"))
_HOST = File("host", "host time to queue eager calls", _HOST_SOURCES)
_HOST_PYTHON = File(
    "host-python", "host time to queue eager calls without the native host path", _HOST_SOURCES
)

_VERIFY = File(
    "verify",
    "random problems against float64, and whether results depend on what they must not",
    (
        *_KERNELS,
        _OPERATORS,
        *_bench("campaign", "isolation", "judging", "population", "relations", "trials", "verify"),
        *_bench("kernel_passes"),
    ),
)
_KERNELBENCH = File(
    "kernelbench",
    "exported files on the problems of KernelBench's level 1",
    (*_KERNELS, f"{_PACKAGE}/exporter", "tools/results/kernelbench.py"),
)

JOBS = (
    Job("layers", (_LAYERS, _AMPERE), on_cpu=True),
    Job("sequences", (_SEQUENCES,)),
    Job("volumes", (_VOLUMES,)),
    Job("networks", (_NETWORKS,)),
    Job("host", (_HOST,)),
    Job("host-python", (_HOST_PYTHON,), {"FASTCONV_NATIVE": "0"}),
    Job("first-steps", (_FIRST_STEPS,)),
    Job("verify", (_VERIFY,)),
    Job("kernelbench", (_KERNELBENCH,)),
)


def jobs(folder: Path) -> list[Job]:
    """The jobs whose files a folder has: on a CPU, single layers alone."""
    if folder.name != CPU:
        return list(JOBS)
    return [Job(job.name, job.files[:1], on_cpu=True) for job in JOBS if job.on_cpu]


def folders() -> list[Path]:
    """The folders of figures that there are, one for each kind of device."""
    return sorted(path.parent for path in RESULTS.glob("*/layers.json"))


def folder_of(gpu: str | None) -> Path:
    """The folder of a GPU's figures, by the name that the driver gives it; None is the CPU."""
    if gpu is None:
        return RESULTS / CPU
    words = [word for word in re.findall("[a-z0-9]+", gpu.lower()) if word not in _MAKERS]
    return RESULTS / "-".join(words)


_MAKERS = ("nvidia", "geforce", "tesla", "quadro")


def read(path: Path) -> dict[str, Any] | None:
    """The contents of a file of figures; None if there is no such file."""
    if not path.exists():
        return None
    contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return contents
