"""What tests of programs without Python share: forms that were recorded, and processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import fastconv
from effort import PATIENCE_S
from fastconv import native
from fastconv.exporter import bundles
from fastconv.exporter.bundles import Form
from fastconv.kernels.family import Gpu, Kernel

FOLDER = Path(__file__).parent
TORCH = Path(torch.__file__).parent


class Deployed(NamedTuple):
    """The library for programs without Python, with a program that uses it."""

    library: Path
    program: Path

    def run(self, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the program."""
        return run(self.program, *arguments, **environment)


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )


def run_script(name: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of this folder that does not import fastconv."""
    ended = run(sys.executable, "-W", "error", FOLDER / name, *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended


def compile_program(folder: Path, with_cuda: bool = False) -> Path:
    """Compiles the tests' program against PyTorch and the library in the folder."""
    program = folder / "program"
    compile_source(FOLDER / "deployed_program.cc", folder, *_linking(folder, with_cuda), program)
    return program


def compile_source(source: Path, folder: Path, *options: Any) -> None:
    """Runs the C++ compiler, with PyTorch's headers and that of the library in the folder."""
    subprocess.check_call([
        os.environ.get("CXX", "c++"), "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-isystem{TORCH / 'include'}",
        f"-isystem{TORCH / 'include/torch/csrc/api/include'}",
        f"-I{folder}", str(source), *map(str, options),
    ])  # fmt: skip


def _linking(folder: Path, with_cuda: bool) -> list[str]:
    # Nothing in the program names PyTorch's libraries for CUDA, whose own ones the linker need not
    # find.
    of_cuda = ["-Wl,--no-as-needed,--allow-shlib-undefined", "-ltorch_cuda", "-lc10_cuda"]
    libraries = [folder, TORCH / "lib"]
    return [
        *(f"-L{path}" for path in libraries),
        "-lfastconv", "-ltorch", "-ltorch_cpu", "-lc10", *(of_cuda if with_cuda else []),
        *(f"-Wl,-rpath,{path}" for path in libraries),
        "-o",
    ]  # fmt: skip


class Model(nn.Module):
    """Layers of every kind: plain, grouped, and depthwise, fused with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fastconv.Conv2d(3, 8, (3, 5), stride=2, padding=((1, 2), (0, 3)))
        self.grouped = fastconv.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.depthwise = fastconv.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.last = fastconv.Conv2d(8, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = torch.relu(self.first(images))
        grouped = self.grouped(first)
        fused = fastconv.conv2d(
            grouped, self.depthwise.weight, padding=1, groups=8, activation="silu", residual=first
        )
        return self.last(fused)


def run_model(
    deployed: Deployed, kind: str, model: Path, images: Tensor, **environment: str
) -> Tensor:
    """What a model returns for some images in the program, without its shape.

    ``kind`` is "run" for a package of AOTInductor, "trace" for a file of ``torch.jit.trace``.
    """
    given, taken = model.with_name("input"), model.with_name("output")
    stored = images.cpu().contiguous()
    given.write_bytes(ctypes.string_at(stored.data_ptr(), stored.nbytes))
    where = images.device.type
    ended = deployed.run(kind, model, where, given, taken, *images.shape, **environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "no Python\n"
    return torch.frombuffer(bytearray(taken.read_bytes()), dtype=torch.float32)


@contextmanager
def recording() -> Iterator[None]:
    """Has C++ serve operators, and leaves the host path, which recording sets, as it was."""
    native.serve_operators(True)
    try:
        names = ("conv2d", "batch_norm_act", "conv_bn_act")
        with mock.patch.multiple(native, **{name: getattr(native, name) for name in names}):
            yield
    finally:
        native.serve_operators(False)


def record(model: Callable[..., Any], *examples: Any) -> list[Form]:
    with recording():
        return bundles.record(model, examples)


def compose(forms: Sequence[Form], gpus: Sequence[Gpu]) -> bytes:
    """A bundle with the cubins of ``logging_driver.c``, which nobody has to compile."""
    programs: dict[str, dict[str, str]] = {}  # the kinds of parameters, by program and kernel
    planned = (bundles._planned(form, gpu) for gpu in gpus for form in forms)
    for launch in (launch for one in planned for launch in one.launches):
        kinds = ("p" if isinstance(a, str) else "i" if isinstance(a, int) else "m"
                 for a in launch.arguments)  # fmt: skip
        programs.setdefault(launch.kernel.text, {})[launch.kernel.entry] = "".join(kinds)

    def build_all(kernels: Sequence[Kernel], arch: str) -> list[bytes]:
        return [
            f"{arch} {hash(kernel.text)} ".encode()
            + b"".join(f" {name}:{kinds}".encode() for name, kinds in programs[kernel.text].items())
            + b"\0"
            for kernel in kernels
        ]

    with mock.patch.object(bundles.pool, "build_all", build_all):
        return bundles.compose(forms, gpus)
