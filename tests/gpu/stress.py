"""Runs many processes that compile ResNet-50's layers side by side, and ends some of them early.

The processes are short and long, have one thread or several, and end in every way that processes
can; some are killed. Meanwhile, entries of the cache folders that they share are removed or
damaged, and folders are full, or read-only half of the time. The exit status is 1 if a process ends
in another way than its task says, a result is wrong, or an entry is corrupt that this program did
not damage; the command that runs such a process alone is printed.

    PYTHONPATH=src:tests python tests/gpu/stress.py --processes 300 --at-once 12 -o summary.json

Without a GPU, kernels are only built. It runs on Linux alone, where limits on the size of another
process's files imitate full disks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1]))

import fastconv
import oracle
from fastconv import jit
from fastconv.backends import cuda
from fastconv.jit import cache
from fastconv.kernels import planner
from fastconv.kernels.family import Kernel
from fastconv.kernels.gpus import H200
from fastconv.problem import Problem

# ResNet-50's convolutions: input size, input and output channels, kernel size, stride.
LAYERS = (
    (224, 3, 64, 7, 2),
    (56, 64, 64, 1, 1), (56, 64, 64, 3, 1), (56, 64, 256, 1, 1), (56, 256, 64, 1, 1),
    (56, 256, 128, 1, 1), (56, 128, 128, 3, 2), (28, 128, 512, 1, 1), (56, 256, 512, 1, 2),
    (28, 512, 128, 1, 1), (28, 128, 128, 3, 1),
    (28, 512, 256, 1, 1), (28, 256, 256, 3, 2), (14, 256, 1024, 1, 1), (28, 512, 1024, 1, 2),
    (14, 1024, 256, 1, 1), (14, 256, 256, 3, 1),
    (14, 1024, 512, 1, 1), (14, 512, 512, 3, 2), (7, 512, 2048, 1, 1), (14, 1024, 2048, 1, 2),
    (7, 2048, 512, 1, 1), (7, 512, 512, 3, 1),
)  # fmt: skip
DTYPES = ("float32", "tf32", "float16", "bfloat16")
PASSES = (planner.forward, planner.input_grad, planner.weight_grad)

# Ways to end, and the exit status of each. Tests of Watch use the last one.
ENDS = {"return": 0, "exception": 1, "_exit": 3, "daemon threads": 0, "abort": 0}
SIGNALS = ("", "", "", "SIGKILL", "SIGTERM", "SIGINT")
LATEST_SIGNAL_S = 8.0  # seconds after a process has begun

SHARED = ("shared", "read-only", "full", "damaged")
FOLDERS = (*SHARED, "own")
# The longest file that a process with a "full" folder can write. Kernels have 5 KB to more than
# 100 KB.
FULL_BYTES = (0, 4 << 10, 32 << 10, 100 << 10)
TICK_S, SHARE = 0.25, 0.01  # Every tick, this share of a folder's entries meets with an accident.

# What libraries write before they abort. A process that survives this is broken all the same.
LAST_WORDS = (
    "Fatal Python error", "terminate called", "LLVM ERROR", "free(): ", "malloc(): ", "corrupted",
    "double free",
)  # fmt: skip
TAIL = 4000  # The summary has this many characters of the end of a process's messages.


@dataclass(frozen=True)
class Task:
    """What one process computes, in which cache folder, and how it ends."""

    seed: int
    layers: int
    batch: int = 1
    dtype: str = "float32"
    channels_last: bool = False
    gradients: bool = True
    threads: int = 1
    end: str = "return"
    signal: str = ""
    signal_s: float = 0.0
    folder: str = "own"
    full_bytes: int = 0

    @classmethod
    def draw(cls, seed: int) -> Task:
        draw = random.Random(seed)
        return cls(
            seed=seed,
            layers=draw.choice((1, 1, 1, draw.randint(2, 6), draw.randint(2, 6), len(LAYERS))),
            batch=draw.randint(1, 4),
            dtype=draw.choice(DTYPES),
            channels_last=draw.random() < 0.5,
            gradients=draw.random() < 0.7,
            threads=draw.choice((1, 1, 2, 4, 8)),
            end=draw.choice([end for end in ENDS if end != "abort"]),
            signal=draw.choice(SIGNALS),
            signal_s=draw.uniform(0, LATEST_SIGNAL_S),
            folder=draw.choice(FOLDERS),
            full_bytes=draw.choice(FULL_BYTES),
        )


# --- In a process of its own ----------------------------------------------------------------------


class Deliberate(Exception):
    """Ends a process whose task ends by an exception."""


def work(task: Task) -> None:
    """Computes and checks the task's layers, prints OK, and ends in the task's way."""
    gpu = cuda.gpu(0) if torch.cuda.is_available() else H200
    # The reference does without cuDNN, which would be one more library that can fail.
    torch.backends.cudnn.enabled = False
    chosen = random.Random(task.seed).sample(LAYERS, task.layers)
    check = partial(_compute if torch.cuda.is_available() else _build, task)
    with fastconv.precision("tf32" if task.dtype == "tf32" else "ieee"):
        if task.threads > 1:
            with ThreadPoolExecutor(task.threads) as threads:
                list(threads.map(check, chosen))
        else:
            for layer in chosen:
                check(layer)
    if task.end == "daemon threads":
        # The threads only compile: PyTorch may abort if a thread is in one of its calls at exit.
        kernels = _kernels(task, LAYERS[task.seed % len(LAYERS)], gpu)
        for call in (_compile_for_ever, _build_for_ever):
            threading.Thread(target=call, args=(kernels, gpu.architecture), daemon=True).start()
        time.sleep(task.seed % 100 / 100)
    print("OK", flush=True)
    if task.end == "_exit":
        os._exit(ENDS["_exit"])
    if task.end == "exception":
        raise Deliberate
    if task.end == "abort":
        os.abort()


def _problem(task: Task, layer: tuple[int, ...]) -> Problem:
    size, in_channels, out_channels, kernel, stride = layer
    shapes = (task.batch, in_channels, size, size), (out_channels, in_channels, kernel, kernel)
    return Problem.of(*shapes, (stride, stride), (kernel // 2,) * 4, (1, 1), 1)


def _dtype(task: Task) -> torch.dtype:
    return torch.float32 if task.dtype == "tf32" else getattr(torch, task.dtype)


def _kernels(task: Task, layer: tuple[int, ...], gpu: Any) -> list[Kernel]:
    problem, last = _problem(task, layer), task.channels_last
    precision = "tf32" if task.dtype == "tf32" else "ieee"
    memory_format = torch.channels_last if last else torch.contiguous_format
    weight = torch.empty(problem.weight_shape, device="meta", memory_format=memory_format)
    layout = (last, last, weight.stride(), True, precision, False)
    operands = cuda.operands_of(_dtype(task), *layout)
    plans = [plan(problem, operands, gpu) for plan in PASSES[: 3 if task.gradients else 1]]
    return [launch.kernel for plan in plans for launch in plan.launches]


def _build(task: Task, layer: tuple[int, ...]) -> None:
    kernels = _kernels(task, layer, H200)
    cubins = jit.build_all(kernels, H200.architecture)
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins), layer
    assert jit.build(kernels[-1], H200.architecture) == cubins[-1], layer


def _compute(task: Task, layer: tuple[int, ...]) -> None:
    problem = _problem(task, layer)
    order = torch.channels_last if task.channels_last else torch.contiguous_format

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, device="cuda").to(_dtype(task), memory_format=order)
        if task.dtype == "tf32":  # Clear the bits that TF32 would round away.
            values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
        return values

    input, weight, grad_output = map(
        tensor, (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    geometry: Any = {"stride": problem.stride, "padding": problem.padding[::2]}
    wide = [each.double() for each in (input, weight, grad_output)]
    if task.gradients:
        run: Any = oracle.with_gradients
        actual = run(fastconv.conv2d, (input, weight), grad_output, **geometry)
        expected = run(F.conv2d, wide[:2], wide[2], **geometry)
        sizes = run(F.conv2d, [each.abs() for each in wide[:2]], wide[2].abs(), **geometry)
    else:
        actual = (fastconv.conv2d(input, weight, **geometry),)
        expected = (F.conv2d(*wide[:2], **geometry),)
        sizes = (F.conv2d(*(each.abs() for each in wide[:2]), **geometry),)
    if task.dtype == "tf32":  # In long chains of MMAs, tensor cores truncate.
        sizes = [16 * size for size in sizes]
    for name, *values in zip(("output", "input", "weight"), actual, expected, sizes, strict=False):
        oracle.assert_within_rounding(f"{layer}: {name}", *(value.cpu() for value in values))


def _compile_for_ever(kernels: list[Kernel], arch: str) -> None:
    while True:
        for kernel in kernels:
            jit.compile_kernel(kernel, arch)


def _build_for_ever(kernels: list[Kernel], arch: str) -> None:
    while True:
        jit.build_all(kernels, arch)


# --- What watches over them -----------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a process ended. ``signalled``: it got its signal before it had ended."""

    task: Task
    status: int
    output: str
    errors: str
    signalled: bool = False
    hung: bool = False

    @property
    def trouble(self) -> str:
        """What is wrong, in a few words; empty if the process ended in its task's way."""
        if self.hung:
            return "did not end"
        if words := [words for words in LAST_WORDS if words in self.errors]:
            return f"status {self.status}, wrote {words[0]!r}"
        if self.signalled and self._by_signal:
            return ""
        if self.status != ENDS[self.task.end]:
            return f"status {self.status} instead of {ENDS[self.task.end]}"
        if not self.output.endswith("OK\n"):
            return "ended before all was done"
        if self.task.end == "exception" and Deliberate.__name__ not in self.errors:
            return "ended by another exception"
        return ""

    @property
    def _by_signal(self) -> bool:
        interrupted = self.task.signal == "SIGINT" and "KeyboardInterrupt" in self.errors
        return self.status == -signal.Signals[self.task.signal] or (
            interrupted and self.status == 1  # Other code turned it into another error.
        )

    @property
    def how(self) -> str:
        if self.trouble:
            return "trouble"
        if self.signalled and self.status != ENDS[self.task.end]:
            return self.task.signal
        return self.task.end


KEPT = "damaged for good"


class Watch:
    """Starts processes, causes accidents in their folders, and records how they ended."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.root, self._timeout_s = root, timeout_s
        self._writers: set[int] = set()  # IDs of processes that use the folder "read-only"
        for name in (*FOLDERS, "began"):
            (root / name).mkdir(0o755)  # The cache uses no folder that other users can write to.

    def run(self, task: Task) -> Outcome:
        """Runs the task in a process of its own, and sends it its signal."""
        began = self.root / "began" / str(task.seed)
        folder = self.root / task.folder
        folder = folder / str(task.seed) if task.folder == "own" else folder
        process = subprocess.Popen(
            [*command(task), "--began", str(began)],
            env={**os.environ, "FASTCONV_CACHE_DIR": str(folder), "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        if task.folder == "read-only":
            self._writers.add(process.pid)
        signalled, hung = threading.Event(), False
        if task.signal:
            threading.Thread(target=_send, args=(process, task, began, signalled)).start()
        try:
            output, errors = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            hung = True
            process.send_signal(signal.SIGABRT)  # Has faulthandler print where it hangs.
            output, errors = process.communicate()
        self._writers.discard(process.pid)
        return Outcome(task, process.returncode, output, errors, signalled.is_set(), hung)

    @contextlib.contextmanager
    def accidents(self, seed: int) -> Iterator[None]:
        """A context in which entries vanish or are damaged, and a folder is read-only at times."""
        over, draw = threading.Event(), random.Random(seed)

        def happen() -> None:
            while not over.wait(TICK_S):
                self._set_writable(draw.random() < 0.5)
                for name in SHARED:  # Otherwise there would soon be nothing left to compile.
                    for path in _some(self.root / name, draw):
                        path.unlink(missing_ok=True)
                for path in _some(self.root / "damaged", draw):
                    with contextlib.suppress(FileNotFoundError):
                        path.write_bytes(_damaged(path.read_bytes(), draw))

        thread = threading.Thread(target=happen)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._set_writable(True)

    def _set_writable(self, writable: bool) -> None:
        (self.root / "read-only").chmod(0o755 if writable else 0o555)
        # Modes do not keep the superuser from writing, but this limit does.
        limit = resource.RLIM_INFINITY if writable else 0
        for pid in list(self._writers):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def entries(self) -> dict[str, dict[str, int]]:
        """Counts entries, unfinished files and damaged entries of each kind of folder.

        ``KEPT`` counts the damaged entries that are still there after they were read.
        """
        found = {}
        for name in FOLDERS:
            folders = [*(self.root / name).iterdir()] if name == "own" else [self.root / name]
            counts = Counter({"entries": 0, "unfinished": 0, "damaged": 0, KEPT: 0})
            for folder in folders:
                os.environ["FASTCONV_CACHE_DIR"] = str(folder)
                for path in folder.iterdir():
                    counts["unfinished" if path.suffix == ".tmp" else "entries"] += 1
                    if path.suffix != ".tmp" and cache.load(path.suffix[1:], path.stem) is None:
                        counts["damaged"] += 1
                        counts[KEPT] += path.exists()
            found[name] = dict(counts)
        return found


def _send(process: Any, task: Task, began: Path, signalled: threading.Event) -> None:
    """Sends the process its signal, some time after it has begun."""
    while process.poll() is None and not began.exists():
        time.sleep(0.02)
    time.sleep(task.signal_s)
    if process.poll() is None:
        signalled.set()
        process.send_signal(signal.Signals[task.signal])


def _some(folder: Path, draw: random.Random) -> list[Path]:
    entries = (path for path in folder.iterdir() if cache.is_name(path.name))
    return [path for path in entries if draw.random() < SHARE]


def _damaged(entry: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(entry) + 1)
    middle = draw.choice((b"", b"\0", b"damaged"))
    return entry[:place] + middle + draw.choice((b"", entry[place + len(middle) :]))


def command(task: Task) -> list[str]:
    """The command that runs the task alone."""
    changed = {name: value for name, value in asdict(task).items() if value != ""}
    return [sys.executable, "-X", "faulthandler", __file__, "--task", json.dumps(changed)]


def begin(began: Path | None, task: Task) -> None:
    """Prepares the process, and reports to the watching process that signals may come."""
    # A shell's background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if task.folder == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (task.full_bytes, resource.RLIM_INFINITY))
    if began:
        began.touch()


def main() -> int:
    arguments = _arguments()
    if arguments.task:
        task = Task(**json.loads(arguments.task))
        begin(arguments.began, task)
        work(task)
        return 0
    os.umask(0o022)  # The cache reads no files that other users can write to.
    root, start, outcomes = Path(tempfile.mkdtemp(prefix="stress-")), time.monotonic(), []
    watch = Watch(root, arguments.timeout)

    def run(number: int) -> None:
        if time.monotonic() - start < arguments.seconds:
            outcome = watch.run(Task.draw(1_000_000 * arguments.seed + number))
            outcomes.append(outcome)
            if outcome.trouble:
                print(f"{outcome.trouble}: {shlex.join(command(outcome.task))}")
                print(outcome.errors[-TAIL:], flush=True)

    with watch.accidents(arguments.seed), ThreadPoolExecutor(arguments.at_once) as threads:
        list(threads.map(run, range(arguments.processes)))
    entries = watch.entries()
    shutil.rmtree(root)
    summary = {
        "processes": len(outcomes),
        "seconds": round(time.monotonic() - start, 1),
        "at once": arguments.at_once,
        "seed": arguments.seed,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "endings": dict(Counter(outcome.how for outcome in outcomes).most_common()),
        "layers": sum(outcome.task.layers for outcome in outcomes if "OK" in outcome.output),
        "folders": entries,
        "troubles": [
            {
                "trouble": outcome.trouble,
                "command": shlex.join(command(outcome.task)),
                "errors": outcome.errors[-TAIL:],
            }
            for outcome in outcomes
            if outcome.trouble
        ],
    }
    print(json.dumps({name: summary[name] for name in summary if name != "troubles"}, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(summary, indent=2) + "\n")
    corrupt = sum(
        counts[KEPT if name == "damaged" else "damaged"] for name, counts in entries.items()
    )
    print(
        f"{len(summary['troubles'])} ended otherwise than they were to; {corrupt} corrupt entries"
    )
    return 1 if summary["troubles"] or corrupt or not outcomes else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument(
        "--seconds", type=float, default=300, help="no process starts after this time"
    )
    parser.add_argument(
        "--timeout", type=float, default=240, help="seconds after which a process counts as hung"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help="a JSON file")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
