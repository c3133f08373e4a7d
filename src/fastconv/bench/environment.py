"""Describes the machine that results come from: devices, clocks, versions, free memory."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import fastconv
from fastconv import native
from fastconv.kernels import planner

COMMIT_VARIABLE = "FASTCONV_COMMIT"

_CLOCKS = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "sm_clock_max": "clocks.max.sm",
    "memory_clock": "clocks.mem",
    "power_limit": "power.limit",
}


def describe(device: torch.device) -> dict[str, str]:
    """Everything about this machine and installation that results may depend on."""
    found = {
        "fastconv": fastconv.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "host_path": native.describe(),
        "threads": str(torch.get_num_threads()),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if (switch := planner.current()) != planner.EVERY:
        found["family"] = f"{planner.VARIABLE}={switch}"
    return found | (_gpu(device) if device.type == "cuda" else {})


def free_bytes(device: torch.device) -> int:
    """The device's free memory; on a CPU whose system does not say, all of its memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) << 10
    except (OSError, StopIteration):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize
        return pages * mmap.PAGESIZE


def _commit() -> str:
    """The commit of the sources, with "-dirty" if they have changed since.

    A copy of the sources without their history takes it from the environment variable. An installed
    package may lie in a repository of something else, which does not have this file.
    """
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    if not _output(["git", "ls-files", "--error-unmatch", __file__]):
        return "unknown"
    return _output(["git", "describe", "--always", "--dirty"]) or "unknown"


def _gpu(device: torch.device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    found = {
        "gpu": properties.name,
        "gpu_memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }
    uuid = getattr(properties, "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid else []
    query = f"--query-gpu={','.join(_CLOCKS.values())}"
    line = _output(["nvidia-smi", *which, query, "--format=csv,noheader"])
    values = line.splitlines()[0].split(", ") if line else ["unknown"] * len(_CLOCKS)
    return found | dict(zip(_CLOCKS, values, strict=False))


def _output(command: Sequence[str]) -> str | None:
    """What a command prints, or None if it is missing or fails."""
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
