"""Measures exported files on the problems of KernelBench's level 1, without KernelBench.

KernelBench is another project's; this repository has neither its problems nor its evaluation. Here
are the sizes of its convolutions of all dimensions, transposed ones among them, a model for each in
the form that it uses, and a measurement by its rules: float32 in PyTorch's default precision,
without ``cudnn.benchmark``; results within 1e-4 for five seeds; the mean time of single calls
between two CUDA events, with a cold L2 cache. ``tests/gpu/run_kernelbench.py`` runs its own
evaluation, for those who have it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import fastconv
from results.catalogue import Job
from results.keeping import Keeper, Plain, read_plain

SEEDS = range(5)
TOLERANCE = 1e-4  # absolute and relative, of each element
WARM_UPS = 3
TRIALS = 20
L2_BYTES = {"cuda": 1 << 28, "cpu": 1}  # Writing so many replaces all that an L2 cache holds.
COMPILE_SECONDS = 240.0  # nvcc takes a minute or so for the largest file, alone on its core.
SECONDS = 30.0  # A problem takes less.


class Problem(NamedTuple):
    """One of KernelBench's problems: its number, its input, its layers."""

    number: int
    name: str
    input: tuple[int, ...]
    layers: tuple[str, ...]  # the arguments of each layer
    kind: str = "Conv2d"  # the layers' class in torch.nn
    # What the file is exported with. cuDNN computes some problems in full float32 although TF32 is
    # allowed, and TF32's rounding exceeds the tolerance.
    precision: Literal["ieee"] | None = None


PROBLEMS = (
    Problem(62, "asymmetric kernel", (8, 32, 512, 512), ("32, 64, (5, 9), bias=False",)),
    Problem(63, "square kernel", (16, 16, 1024, 1024), ("16, 128, 3, bias=False",)),
    Problem(
        80, "asymmetric kernel, dilated, padded", (8, 32, 512, 512),
        ("32, 64, (5, 9), padding=(2, 4), dilation=(2, 3), bias=False",),
    ),
    Problem(56, "asymmetric input and kernel", (8, 64, 512, 256), ("64, 128, (5, 7), bias=False",)),
    Problem(50, "AlexNet's first layer", (256, 3, 224, 224), ("3, 96, 11, stride=4, padding=2",)),
    Problem(82, "depthwise", (16, 64, 512, 512), ("64, 64, 3, groups=64, bias=False",)),
    Problem(
        83, "depthwise, asymmetric kernel", (64, 8, 512, 512),
        ("8, 8, (3, 1), groups=8, bias=False",),
    ),
    Problem(
        84, "depthwise, asymmetric input", (64, 128, 256, 512),
        ("128, 128, 3, groups=128, bias=False",),
    ),
    Problem(
        85, "depthwise, asymmetric input and kernel", (32, 128, 128, 256),
        ("128, 128, (3, 7), groups=128, bias=False",),
    ),
    Problem(
        86, "depthwise separable", (16, 64, 512, 512),
        ("64, 64, 3, padding=1, groups=64, bias=False", "64, 128, 1, bias=False"),
    ),
    Problem(87, "pointwise", (16, 64, 1024, 1024), ("64, 128, 1, bias=False",)),
    Problem(67, "sequence", (32, 64, 131072), ("64, 128, 3, bias=False",), "Conv1d"),
    Problem(
        76, "sequence, strided, dilated", (64, 64, 524280),
        ("64, 128, 3, stride=3, dilation=4, bias=False",), "Conv1d",
    ),
    Problem(
        64, "transposed, sequence", (64, 128, 65536), ("128, 128, 3, bias=False",),
        "ConvTranspose1d",
    ),
    Problem(
        74, "transposed, sequence, dilated", (32, 32, 131072),
        ("32, 64, 5, dilation=3, bias=False",), "ConvTranspose1d",
    ),
    Problem(
        79, "transposed, sequence, strided, padded, dilated", (16, 32, 131072),
        ("32, 64, 3, stride=2, padding=1, dilation=2, bias=False",), "ConvTranspose1d",
    ),
    Problem(
        57, "transposed, square kernel", (8, 64, 1024, 1024), ("64, 64, 3, bias=False",),
        "ConvTranspose2d",
    ),
    Problem(
        65, "transposed, asymmetric kernel", (8, 64, 512, 512), ("64, 64, (3, 7), bias=False",),
        "ConvTranspose2d",
    ),
    Problem(
        69, "transposed, asymmetric input and kernel", (64, 64, 128, 256),
        ("64, 128, (3, 5), bias=False",), "ConvTranspose2d",
    ),
    Problem(
        71, "transposed, asymmetric input", (8, 32, 512, 1024), ("32, 32, 3, bias=False",),
        "ConvTranspose2d",
    ),
    Problem(
        75, "transposed, strided, grouped, padded, dilated", (16, 32, 128, 256),
        ("32, 64, (3, 5), stride=(2, 3), padding=(1, 2), groups=4, dilation=(2, 1), bias=False",),
        "ConvTranspose2d", "ieee",
    ),
    Problem(
        78, "transposed, asymmetric input and kernel, padded", (8, 32, 512, 1024),
        ("32, 32, (3, 7), padding=(1, 3), bias=False",), "ConvTranspose2d",
    ),
    Problem(
        81, "transposed, strided, padded, dilated", (16, 32, 64, 128),
        ("32, 64, 3, stride=5, padding=1, dilation=2, bias=False",), "ConvTranspose2d",
    ),
    Problem(54, "volume", (16, 3, 64, 64, 64), ("3, 64, 3, bias=False",), "Conv3d", "ieee"),
    Problem(
        59, "volume, asymmetric input and kernel", (16, 3, 256, 256, 10),
        ("3, 64, (3, 3, 1), bias=False",), "Conv3d", "ieee",
    ),
    Problem(
        60, "volume, asymmetric kernel", (16, 3, 64, 64, 64), ("3, 64, (3, 5, 7), bias=False",),
        "Conv3d", "ieee",
    ),
    Problem(
        66, "volume, asymmetric input and kernel", (8, 3, 16, 128, 128),
        ("3, 64, (3, 5, 7), bias=False",), "Conv3d", "ieee",
    ),
    Problem(
        58, "transposed, volume, asymmetric input and kernel", (16, 32, 16, 32, 64),
        ("32, 16, (3, 5, 7), bias=False",), "ConvTranspose3d",
    ),
    Problem(
        61, "transposed, volume", (8, 48, 64, 64, 64), ("48, 48, 3, bias=False",),
        "ConvTranspose3d",
    ),
    Problem(
        68, "transposed, volume, asymmetric kernel", (16, 32, 64, 64, 64),
        ("32, 64, (3, 5, 5), bias=False",), "ConvTranspose3d",
    ),
    Problem(
        70, "transposed, volume", (8, 48, 96, 96, 96), ("48, 24, 3, bias=False",),
        "ConvTranspose3d",
    ),
    Problem(
        72, "transposed, volume, strided, grouped, padded", (8, 32, 12, 24, 48),
        ("32, 32, (3, 5, 7), stride=2, padding=(1, 2, 3), output_padding=1, groups=4, bias=False",),
        "ConvTranspose3d", "ieee",
    ),
    Problem(
        73, "transposed, volume, strided, padded", (4, 32, 32, 64, 128),
        ("32, 32, 3, stride=2, padding=1, bias=False",), "ConvTranspose3d",
    ),
    Problem(
        77, "transposed, volume, strided, padded, dilated", (16, 32, 16, 32, 32),
        ("32, 64, 3, stride=2, padding=1, dilation=2, bias=False",), "ConvTranspose3d",
    ),
)  # fmt: skip

_MODEL = '''"""KernelBench's problem {number}, {name}, as fastconv's results have it."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential({layers})

    def forward(self, x):
        return self.layers(x)


def get_init_inputs():
    return []


def get_inputs():
    return [torch.rand{input}]
'''

_COMPILE = "import sys; from results import kernelbench; kernelbench.call(*sys.argv[1:])"


def measure(job: Job, folder: Path, device: torch.device, deadline: float) -> None:
    """Measures all problems; their files are compiled before, side by side."""
    keeper = Keeper(
        job.files[0], folder, read_plain, Plain, device, deadline, len(PROBLEMS),
        f"{len(SEEDS)} seeds, {TRIALS} samples",
    )  # fmt: skip
    with keeper, tempfile.TemporaryDirectory() as name:
        done = {row["problem"] for row in keeper.found.rows}
        left = [problem for problem in PROBLEMS if problem.number not in done]
        keeper.check(COMPILE_SECONDS)
        written = {problem: write(problem, Path(name)) for problem in left}
        _compile(list(written.values()))
        for problem, paths in written.items():
            keeper.add(problem.name, SECONDS, partial(_row, problem, *paths, device))


def write(problem: Problem, folder: Path) -> tuple[Path, Path]:
    """Writes a problem's model and the file that is exported from it."""
    reference = folder / f"reference_{problem.number}.py"
    layers = ", ".join(f"nn.{problem.kind}({arguments})" for arguments in problem.layers)
    text = _MODEL.format(
        number=problem.number, name=problem.name, layers=layers, input=problem.input
    )
    reference.write_text(text, encoding="utf-8")
    exported = folder / f"exported_{problem.number}.py"
    fastconv.export(reference=reference, output=exported, precision=problem.precision)
    return reference, exported


def _compile(written: list[tuple[Path, Path]]) -> None:
    """Compiles exported files, each in a process of its own."""
    command = [sys.executable, "-c", _COMPILE]
    processes = [subprocess.Popen([*command, *map(str, paths)]) for paths in written]
    for process in processes:
        process.wait()  # A file that does not compile fails again in its row.


def call(reference: str, exported: str) -> None:
    """Calls an exported file's model, which compiles it."""
    with torch.no_grad(), torch.device("cuda"):
        inputs = _names(Path(reference))["get_inputs"]()
        _names(Path(exported))["ModelNew"]()(*inputs)


def _row(problem: Problem, reference: Path, exported: Path, device: torch.device) -> list[Any]:
    row: dict[str, Any] = {"problem": problem.number, "name": problem.name}
    if problem.precision is not None:
        row["precision"] = problem.precision
    try:
        row |= judge(reference, exported, device)
    except Exception as error:  # One problem must not stop the others, whatever is wrong.
        row |= {"error": f"{type(error).__name__}: {error}"}
    return [row]


def judge(reference: Path, exported: Path, device: torch.device) -> dict[str, Any]:
    """Compares an exported file with its reference, and times both."""
    theirs, ours = _names(reference), _names(exported)
    right, largest = 0, 0.0
    settings = torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=True)
    with settings, torch.no_grad(), torch.device(device):
        for seed in SEEDS:
            models = [_seeded(make, seed) for make in (theirs["Model"], ours["ModelNew"])]
            inputs = theirs["get_inputs"]()
            expected, found = (model(*inputs) for model in models)
            right += torch.allclose(expected, found, atol=TOLERANCE, rtol=TOLERANCE)
            largest = max(largest, float((expected - found).abs().max()))
        reference_ms, exported_ms = (_mean_ms(partial(one, *inputs), device) for one in models)
    return {
        "correct": right, "seeds": len(SEEDS), "largest_difference": largest,
        "reference_ms": reference_ms, "exported_ms": exported_ms,
        "speedup": reference_ms / exported_ms,
    }  # fmt: skip


def _seeded(make: Callable[[], Any], seed: int) -> Any:
    """A model with the initial weights that follow from the seed."""
    torch.manual_seed(seed)
    return make()


def _names(path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    return names


def _mean_ms(run: Callable[[], Tensor], device: torch.device) -> float:
    for _ in range(WARM_UPS):
        run()
    flush = torch.empty(L2_BYTES[device.type], dtype=torch.uint8, device=device)
    times = []
    for _ in range(TRIALS):
        flush.zero_()
        times.append(_ms(run, device))
    return statistics.mean(times)


def _ms(run: Callable[[], Tensor], device: torch.device) -> float:
    """The time of one call; on a CPU, where only tests come to, by the clock."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
