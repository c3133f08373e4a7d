"""Deploys a model on a GPU: a package, a bundle, and a C++ program without Python.

    PYTHONPATH=src:tests python tests/gpu/deploy.py

It compiles the model with AOTInductor, bundles what its convolutions need, builds the library and
the program, and compares the program's output with Python's, bit by bit. It needs a C++ compiler
and CUDA's headers. With ``--device cpu`` it does the same without a bundle.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME

import fastconv
from fastconv import cli
from native.deployment import Deployed, Model, compile_program, run_package


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


def check_missing_bundle(deployed: Deployed, package: Path, images: Tensor) -> None:
    """Without a bundle, the program ends with an error that names the form."""
    given = package.with_name("input")
    ended = deployed.run("run", package, "cuda", given, given.with_name("none"), *images.shape)
    assert ended.returncode != 0
    assert "no bundle has the form fastconv::" in ended.stdout + ended.stderr, ended.stderr


def deploy(device: str, folder: Path) -> None:
    package, example, bundle = (
        folder / name for name in ("model.pt2", "example.pt", "model.fastconv")
    )
    torch.manual_seed(0)
    model = MixedModel().eval().to(device)
    images = torch.randn(4, 3, 33, 30, device=device)
    make_package(model, images, package)
    print("made the package", flush=True)
    loaded = torch._inductor.aoti_load_package(str(package))
    expected = loaded(images)
    with torch.no_grad():
        torch.testing.assert_close(expected, model(images), rtol=1e-2, atol=1e-2)
    environment = {}
    if device == "cuda":
        torch.save((images,), example)
        command("bundle", package, "--inputs", example, "-o", bundle)
        environment["FASTCONV_BUNDLE"] = str(bundle)
    command("build", "--deploy", folder, "--quiet")
    program = compile_program(folder, with_cuda=device == "cuda")
    print("compiled the program", flush=True)
    deployed = Deployed(folder / "libfastconv.so", program)
    output = run_package(deployed, package, images, **environment).view_as(expected)
    difference = (output - expected.cpu()).abs().max().item()
    print(f"the largest difference from Python is {difference}", flush=True)
    # On a CPU, the library adds the products of taps in another order than Python does.
    assert difference == 0 if device == "cuda" else difference < 1e-2
    if device == "cuda":
        check_missing_bundle(deployed, package, images)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as name:
        if device == "cuda":
            torch.zeros(1, device="cuda")  # loads the driver
            (drivers := Path(name) / "driver").mkdir()
            help_compilers(drivers)
        deploy(device, Path(name))
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
