"""Measures single layers, section by section; a section is a table of the page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from fastconv.bench import configurations, contestants, limits, models, results
from fastconv.bench.cases import PASSES, STEP, Case, cases
from fastconv.bench.measure import Bench
from fastconv.bench.results import Results, Row
from fastconv.jit.compile import cached_cubin
from fastconv.kernels import planner
from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Gpu, Kernel
from fastconv.timing import Effort
from fastconv.workloads import SUITES, Workload
from results.catalogue import Job
from results.keeping import Keeper, attempt

EFFORT = {"cuda": Effort(3, 0.25), "cpu": Effort(7, 3.0)}
CPU_DIVISOR = 4  # as of `fastconv bench` on a CPU
COMPILE_SECONDS = 6.0  # A kernel that no disk cache has may take so long, alone on its core.
ROW_SECONDS = 10.0  # The longest rows: cuDNN tries its algorithms.
AMPERE = ("ampere", "sm_80")  # the family, and the GPU whose shared memory it has


@dataclass(frozen=True)
class Section:
    """Layers in the same modes and memory formats."""

    title: str
    suites: tuple[str, ...]
    models: tuple[str, ...]
    passes: tuple[str, ...]
    modes: tuple[str, ...]  # of a Case: "float32 tf32", "bfloat16"
    formats: tuple[str, ...]
    switch: tuple[str, str] | None = None  # plans with this family alone
    only: tuple[str, ...] = ()  # the suites' layers of these names alone; () for all

    def cases(self, device: torch.device) -> list[Case]:
        """All rows of the section; on a CPU, suites for GPUs are scaled down."""
        divisor = CPU_DIVISOR if device.type == "cpu" and self.suites != ("cpu",) else 1
        named = [one.scaled(divisor) for one in self._named()]
        workloads = [*named, *(one for name in self.models for one in _layers_of(name))]
        return [case for mode in self.modes for case in self._in_mode(workloads, mode)]

    def _named(self) -> list[Workload]:
        """The layers of the section's suites."""
        every = [one for name in self.suites for one in SUITES[name]]
        return [one for one in every if not self.only or one.name in self.only]

    def _in_mode(self, workloads: Sequence[Workload], mode: str) -> list[Case]:
        dtype, _, precision = mode.partition(" ")
        return cases(workloads, self.passes, [dtype], [precision], self.formats)

    def part_of(self, found: Results) -> Results:
        """The section's rows of a file, with their environment."""
        rows = [row for row in found.rows if self._has(row.case)]
        return Results(
            found.environment, found.ceilings, rows, found.build_s, found.ceilings_after
        )  # fmt: skip

    def _has(self, case: Case) -> bool:
        named = {one.name for one in self._named()}
        model = case.workload.model
        chosen = model in self.models if model else case.workload.name in named
        of_kind = case.mode in self.modes and case.format in self.formats
        return chosen and of_kind and case.direction in self.passes

    def planned(self) -> AbstractContextManager[None]:
        """The context in which the section's layers are planned."""
        return planner.only(*self.switch) if self.switch else nullcontext()


@cache
def _layers_of(model: str) -> list[Workload]:
    return models.workloads(model)


_TF32, _IEEE, _BFLOAT16 = ("float32 tf32",), ("float32 ieee",), ("bfloat16",)
_ALL = (*PASSES, STEP)

_FOUNDING = (
    Section("Founding workloads, float32 NCHW", ("founding",), (), _ALL, _TF32 + _IEEE, ("nchw",)),
    Section("Founding workloads, bfloat16", ("founding",), (), _ALL, _BFLOAT16, ("nchw", "nhwc")),
)
_AMPERE = tuple(
    Section(one.title, one.suites, (), PASSES, one.modes, one.formats, AMPERE) for one in _FOUNDING
)
_OTHERS = (
    Section("ResNet-50, bfloat16 NHWC", (), ("resnet50",), PASSES, _BFLOAT16, ("nhwc",)),
    Section("ResNet-50, TF32 NCHW", (), ("resnet50",), PASSES, _TF32, ("nchw",)),
    Section("Layers of many networks, TF32 NCHW", ("real",), (), PASSES, _TF32, ("nchw",)),
    Section("Layers of many networks, bfloat16 NHWC", ("real",), (), PASSES, _BFLOAT16, ("nhwc",)),
    Section("Odd layers, TF32 NCHW", ("odd",), (), PASSES, _TF32, ("nchw",)),
    Section("Odd layers, bfloat16 NHWC", ("odd",), (), PASSES, _BFLOAT16, ("nhwc",)),
    Section("Depthwise layers, float32 NCHW", ("depthwise",), (), PASSES, _IEEE, ("nchw",)),
    Section("Depthwise layers, bfloat16", ("depthwise",), (), PASSES, _BFLOAT16, ("nchw", "nhwc")),
    Section("ConvNeXt-T, bfloat16 NHWC", (), ("convnext_tiny",), PASSES, _BFLOAT16, ("nhwc",)),
)  # fmt: skip
_SEQUENCES = (
    Section("Sequences, TF32 NCHW", ("sequence",), (), _ALL, _TF32, ("nchw",)),
    Section("Sequences, bfloat16 NCHW", ("sequence",), (), PASSES, _BFLOAT16, ("nchw",)),
    Section("Sequences of channels-last, bfloat16", ("sequence",), (), PASSES, _BFLOAT16, ("nhwc",),
            only=("shortconv4", "mamba4")),
    Section("Transposed layers, TF32 NCHW", ("transposed",), (), _ALL, _TF32, ("nchw",)),
    Section("Transposed layers, bfloat16 NCHW", ("transposed",), (), PASSES, _BFLOAT16, ("nchw",)),
    Section("Transposed layers, bfloat16 NHWC", ("transposed",), (), PASSES, _BFLOAT16, ("nhwc",),
            only=("unet_up2", "dcgan_up4")),
)  # fmt: skip
_VOLUMES = (
    Section("Videos, TF32 NCDHW", ("video",), (), _ALL, _TF32, ("nchw",)),
    Section("Volumes, TF32 NCDHW", ("volume",), (), _ALL, _TF32, ("nchw",)),
    Section("Videos, bfloat16", ("video",), (), PASSES, _BFLOAT16, ("nchw", "nhwc")),
    Section("Volumes of channels-last, bfloat16", ("volume",), (), PASSES, _BFLOAT16, ("nhwc",),
            only=("unet3d_32", "unet3d_up2")),
    Section("Volumes, bfloat16 NCDHW", ("volume",), (), PASSES, _BFLOAT16, ("nchw",)),
    Section("Videos, float32 ieee NCDHW", ("video",), (), PASSES, _IEEE, ("nchw",)),
    Section("Volumes, float32 ieee NCDHW", ("volume",), (), ("forward",), _IEEE, ("nchw",)),
)  # fmt: skip
_OF_FILES = {
    "layers": _FOUNDING + _OTHERS, "layers-ampere": _AMPERE, "sequences": _SEQUENCES,
    "volumes": _VOLUMES,
}  # fmt: skip
_ON_CPU = (
    Section("Founding workloads", ("founding",), (), PASSES, _IEEE, ("nchw",)),
    Section("Layers of networks", ("cpu",), (), PASSES, _IEEE, ("nchw", "nhwc")),
)


def sections(file: str, device_type: str) -> tuple[Section, ...]:
    """The sections of a file, in the order of its page."""
    if device_type == "cpu":
        return _ON_CPU
    return _OF_FILES[file]


def _in_order(job: Job, device: torch.device) -> Iterator[tuple[str, Section]]:
    """All files' sections: the founding workloads first, whose algorithms cuDNN then knows."""
    both = {file.name: sections(file.name, device.type) for file in job.files}
    count = len(_FOUNDING)
    yield from ((name, one) for name in both for one in both[name][:count])
    yield from ((name, one) for name in both for one in both[name][count:])


def measure(job: Job, folder: Path, device: torch.device, deadline: float) -> None:
    """Measures what the files do not have yet; raises Late if the time is not enough."""
    contestants.settle(device)
    wanted = {one: one.cases(device) for _, one in _in_order(job, device)}
    effort = EFFORT[device.type]
    words = f"{effort.repeats} samples a round, at most {effort.seconds} s a row"
    keepers = {}
    for file in job.files:
        its = sections(file.name, device.type)
        every = list(dict.fromkeys(case for one in its for case in wanted[one]))
        with its[0].planned():
            keeper = Keeper(
                file, folder, results.read, Results, device, deadline, len(every), words
            )  # fmt: skip
        keeper.found.ceilings = keeper.found.ceilings or limits.measure(every, device)
        keepers[file.name] = keeper
    for name, section in _in_order(job, device):
        with section.planned(), keepers[name] as keeper:
            _add_rows(wanted[section], keeper, device, effort)
    for name, keeper in keepers.items():
        with keeper:
            its = sections(name, device.type)
            every = [case for one in its for case in wanted[one]]
            after = keeper.found.ceilings_after
            keeper.found.ceilings_after = after or limits.measure(every, device)


def _add_rows(
    wanted: Sequence[Case], keeper: Keeper[Results], device: torch.device, effort: Effort
) -> None:
    """Measures the rows of a section that the file does not have yet."""
    done = {row.case for row in keeper.found.rows}
    left = [case for case in wanted if case not in done]
    if not left:
        return
    gpu, compiled = configurations.device_gpu(device), dict[Kernel, float]()
    if gpu is not None:
        needed = configurations.kernels(left, gpu)
        keeper.check(_compile_seconds(needed, gpu))
        start = time.perf_counter()
        compiled = _compiled(needed, gpu)
        keeper.found.build_s += time.perf_counter() - start
    assert keeper.found.ceilings is not None
    bench = Bench(device, "pytorch", effort, keeper.found.ceilings, gpu, compiled)
    for case in left:
        keeper.add(case.label, ROW_SECONDS if gpu else effort.seconds, partial(_rows, bench, case))


def _rows(bench: Bench, case: Case) -> list[Row]:
    return attempt(partial(bench.row, case), partial(bench.failed, case))


def _compile_seconds(needed: Sequence[Kernel], gpu: Gpu) -> float:
    """The longest that compiling the kernels may take, a thread for each core."""
    missing = sum(cached_cubin(kernel, gpu.architecture) is None for kernel in needed)
    return COMPILE_SECONDS * ceil_div(missing, os.cpu_count() or 1)


def _compiled(needed: Sequence[Kernel], gpu: Gpu) -> dict[Kernel, float]:
    """Compiles the kernels, a thread for each core; the seconds each took."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        build = partial(configurations.build_s, gpu=gpu)
        return dict(zip(needed, threads.map(build, needed), strict=True))
