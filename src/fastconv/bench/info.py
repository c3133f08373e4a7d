"""``fastconv info``, for bug reports: machine, versions, kernel cache, and plans of cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastconv import _precision, jit
from fastconv.bench import configurations, environment, settings
from fastconv.bench.cases import Case
from fastconv.jit import cache, trust
from fastconv.kernels.family import Gpu
from fastconv.kernels.gpus import H200


def gather(
    device: torch.device, cases: Sequence[Case], explain: bool = False, other: Gpu | None = None
) -> dict[str, Any]:
    """Everything that the command shows, as values for JSON.

    Cases are planned for the GPU ``other`` if it is given, else for this machine's, else for an
    H200.
    """
    here = configurations.device_gpu(device)
    gpu = other or here or H200
    return {
        "environment": environment.describe(device),
        "nvrtc": _nvrtc(),
        "float32_convolutions": _precision.pytorch_setting(),
        "cache": cache_state(),
        "settings": settings.in_force(),
        "planned_for": _planned_for(here, other),
        "cases": [_case(case, gpu, explain) for case in cases],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The findings of :func:`gather` as lines of text."""
    width = max(map(len, found["environment"]))
    text = [f"{name:{width}}  {value}" for name, value in found["environment"].items()]
    text += [
        f"{'nvrtc':{width}}  {found['nvrtc']}",
        f"{'float32':{width}}  {found['float32_convolutions']} (PyTorch's setting, on GPUs)",
    ]
    for name, shown in (("cache", cache_lines(found["cache"])), ("settings", found["settings"])):
        names = (name, *[""] * (len(shown) - 1))
        text += [f"{label:{width}}  {line}" for label, line in zip(names, shown, strict=False)]
    if found["cases"]:
        text += ["", f"planned for {found['planned_for']}; on a CPU, the CPU backend runs instead"]
    for case in found["cases"]:
        text += [case["label"], *(f"  {line}" for line in case["lines"])]
    return text


def cache_state() -> dict[str, Any]:
    """The state of the kernel cache, as values for JSON."""
    size, limit = cache.size(), cache.limit()
    return {
        "folder": str(cache.folder()),
        "entries": size.entries,
        "plans": size.plans,
        "times": size.times,
        "bytes": size.bytes,
        "limit": limit.bytes,
        "limit_trouble": limit.trouble,
        "unwritable": cache.unwritable(),
        "distrusted": trust.distrusted_folder(cache.folder()),
    }


def cache_lines(state: dict[str, Any]) -> list[str]:
    """The state of the kernel cache as text: a line, and one more for each problem with it."""
    kernels = state["entries"] - state["plans"] - state["times"]
    size = cache.Size(state["bytes"], kernels, state["plans"], state["times"])
    room = f"{cache.in_units(size.bytes)} of at most {cache.in_units(state['limit'])}"
    text = [f"{state['folder']}: {size}, {room}"]
    if state["limit_trouble"]:
        text.append(state["limit_trouble"])
    if state["unwritable"]:
        text.append(f"keeps nothing new, so each process compiles: {state['unwritable']}")
    if state["distrusted"]:
        text.append(f"not used, as others could plant code: {state['distrusted']}")
    return text


def _planned_for(here: Gpu | None, other: Gpu | None) -> str:
    if other is not None:
        return f"{other.architecture}, {other.sm_count} SMs"
    return "this GPU" if here else "an H200, since this machine has no GPU"


def _case(case: Case, gpu: Gpu, explain: bool) -> dict[str, Any]:
    planned, failure = configurations.attempt(case, gpu)
    lines = [line for configuration in planned for line in configuration.lines(explain)]
    if explain:
        lines += configurations.on_cpu(case)
    return {
        "label": case.label,
        "configurations": [configuration.to_dict() for configuration in planned],
        "lines": lines if failure is None else [f"failed: {failure}"],
        "error": failure,
    }


def _nvrtc() -> str:
    try:
        return ".".join(map(str, jit.nvrtc_version()))
    except (jit.GpuUnavailable, jit.CompilationError) as error:
        return f"unavailable: {error}"
