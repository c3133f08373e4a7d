"""Deploys a model on a GPU: a trace, a package, bundles, and a C++ program without Python.

    PYTHONPATH=src:tests python tests/gpu/deploy.py

It builds the library and a program; it traces the model, and compiles it with AOTInductor; for
each, it bundles what the convolutions need, and compares the program's output with Python's, bit by
bit. It needs a C++ compiler and CUDA's headers. With ``--device cpu`` it does the same without a
bundle. ``--only trace`` leaves AOTInductor out.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME

import fastconv
from fastconv import cli
from native.deployment import Deployed, Model, compile_program, run_model

KINDS = ("trace", "run")  # of a saved model, by the program's words for them


class MixedModel(Model):
    """A model with layers of float32, and of float16 in channels-last for Hopper's TMA."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = fastconv.Conv2d(5, 64, 3, padding=1)
        self.narrow = fastconv.Conv2d(64, 64, 3, padding=1).half()
        self.narrow.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        wide = torch.relu(self.wide(super().forward(images)))
        half = wide.half().contiguous(memory_format=torch.channels_last)
        return torch.sigmoid(self.narrow(half)).float().contiguous()


def make_package(model: torch.nn.Module, images: Tensor, path: Path) -> None:
    with torch.no_grad():
        program = torch.export.export(model, (images,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def command(*arguments: str | Path) -> None:
    status = cli.main([str(argument) for argument in arguments])
    assert status == 0, f"fastconv {arguments[0]}: status {status}"


def help_compilers(folder: Path) -> None:
    """Lets AOTInductor's compiler find the driver, and CUDA's headers where pip has put them."""
    if CUDA_HOME is None or not (Path(CUDA_HOME) / "include/cuda.h").is_file():
        packages = Path(torch.__file__).parents[1]
        headers = [*packages.glob("nvidia/*/include"), packages / "triton/backends/nvidia/include"]
        _extend("CPATH", (path for path in headers if path.is_dir()))
    mapped = Path("/proc/self/maps").read_text()
    if found := re.search(r"(/\S*libcuda\.so\.1\S*|/\S*libcuda\.so\.[0-9.]+)", mapped):
        (folder / "libcuda.so").symlink_to(found[1])
        _extend("LIBRARY_PATH", [folder])


def _extend(variable: str, folders: Iterable[Path]) -> None:
    before = os.environ.get(variable)
    parts = [*([before] if before else []), *map(str, folders)]
    os.environ[variable] = os.pathsep.join(parts)


def check_missing_bundle(deployed: Deployed, kind: str, saved: Path, images: Tensor) -> None:
    """Without a bundle, the program ends with an error that names the form."""
    given = saved.with_name("input")
    ended = deployed.run(kind, saved, "cuda", given, given.with_name("none"), *images.shape)
    assert ended.returncode != 0
    assert "no bundle has the form fastconv::" in ended.stdout + ended.stderr, ended.stderr


def traced(model: torch.nn.Module, images: Tensor, folder: Path) -> tuple[Path, Callable[..., Any]]:
    """A file of torch.jit.trace, and what it computes in Python."""
    path = folder / "model.pt"
    with torch.no_grad():
        torch.jit.trace(model, images).save(path)
    return path, torch.jit.load(path)


def packaged(
    model: torch.nn.Module, images: Tensor, folder: Path
) -> tuple[Path, Callable[..., Any]]:
    """A package of AOTInductor, and what it computes in Python."""
    path = folder / "model.pt2"
    make_package(model, images, path)
    print("made the package", flush=True)
    return path, torch._inductor.aoti_load_package(str(path))


def deploy(kind: str, device: str, folder: Path, deployed: Deployed) -> None:
    """Compares what the program computes with what Python does."""
    torch.manual_seed(0)
    model = MixedModel().eval().to(device)
    images = torch.randn(4, 3, 33, 30, device=device)
    saved, loaded = (traced if kind == "trace" else packaged)(model, images, folder)
    with torch.no_grad():
        loaded(images)
        expected = loaded(images)
        torch.testing.assert_close(expected, model(images), rtol=1e-2, atol=1e-2)
    environment = {}
    if device == "cuda":
        environment["FASTCONV_BUNDLE"] = str(bundle_of(saved, kind, loaded, images))
    output = run_model(deployed, kind, saved, images, **environment).view_as(expected)
    difference = (output - expected.cpu()).abs().max().item()
    print(f"{kind}: the largest difference from Python is {difference}", flush=True)
    # On a CPU, the library adds the products of taps in another order than Python does.
    assert difference == 0 if device == "cuda" else difference < 1e-2
    if device == "cuda":
        check_missing_bundle(deployed, kind, saved, images)


def bundle_of(saved: Path, kind: str, loaded: Callable[..., Any], images: Tensor) -> Path:
    """The bundle: of a package by the command, of a trace by the function."""
    bundle = saved.with_suffix(".fastconv")
    if kind == "trace":
        with torch.no_grad():
            return fastconv.bundle(loaded, images, output=bundle)
    example = saved.with_name("example.pt")
    torch.save((images,), example)
    command("bundle", saved, "--inputs", example, "-o", bundle)
    return bundle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=KINDS, action="append", help="of both, this one")
    arguments = parser.parse_args()
    device = arguments.device
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if device == "cuda":
            torch.zeros(1, device="cuda")  # loads the driver
            (drivers := folder / "driver").mkdir()
            help_compilers(drivers)
        command("build", "--deploy", folder, "--quiet")
        program = compile_program(folder, with_cuda=device == "cuda")
        print("compiled the program", flush=True)
        for kind in arguments.only or KINDS:
            deploy(kind, device, folder, Deployed(folder / "libfastconv.so", program))
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
