"""Tensor maps and programmatic dependent launches in exported files."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import exported_file
import tensor_maps
from emulator.driver import COMPILER
from exported_launches import compile_by_nvcc, launches
from exports import exported, small
from fastconv.exporter import plans
from fastconv.exporter.file import PARTS
from fastconv.exporter.parts import portable
from fastconv.kernels import family, gpus

__all__ = ["small"]  # Tests below use these fixtures by their names.

ROOT = Path(__file__).parents[2]


TILED = family.TensorMap(
    "input", "fastconv::bfloat16", (40, 30), (80,), (32, 7), (1, 2), 64, 256
)  # fmt: skip
PIXELS = family.Im2colMap(
    "output", "float", (8, 7, 6, 5), (32, 224, 1344), (-1, -2), (1, 2), 8, 100, (1, 3, 4, 1), 0, 128
)
MAPPED = family.Launch(
    family.Kernel("any.cuh", "any", ()), (3, 1, 1), 32, 64, (TILED, "bias", 7, PIXELS), early=True
)
TILED_NUMBERS = [1, 9, 2, 3, 2, 40, 30, 80, 1, 2, 32, 7]
PIXELS_NUMBERS = [
    *(0, 7, 0, 2, 4, 8, 7, 6, 5, 32, 224, 1344, 1, 3, 4, 1),
    *(-1, -2, 1, 2, 8, 100),
]  # fmt: skip


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("arguments", [MAPPED.arguments, ("bias", 7)], ids=["maps", "no maps"])
def test_launches_as_text(arguments: tuple[family.Argument, ...], early: bool) -> None:
    expected = replace(MAPPED, arguments=arguments, early=early)
    text = plans._launch(expected, "CONSTANTS", gpus.H200)
    assert ("early" in text) == early
    assert max(map(len, text.splitlines())) <= 100
    (launch,) = eval(f"({text})", {**vars(portable), "CONSTANTS": ()})
    assert launch.early is early
    assert launches(portable.Plan((launch,), 0)) == [expected]


def test_maps_as_numbers(small: Path) -> None:
    module = exported_file.load(small)
    tiled, pixels = (
        getattr(module, type(of).__name__)(**vars(of)) for of in (TILED, PIXELS)
    )  # fmt: skip
    addresses = {"input": 0x1000, "output": 0x2000}
    assert module.as_numbers(tiled, addresses) == [0x1000, *TILED_NUMBERS]
    assert module.as_numbers(pixels, addresses) == [0x2000, *PIXELS_NUMBERS]
    assert module.as_numbers("bias", addresses) == [0]
    assert module.as_numbers(7, addresses) == [7]


@pytest.mark.parametrize("version", [11080, 13000])
def test_launcher_makes_maps_and_launches_early(tmp_path: Path, version: int) -> None:
    """Records the calls that the driver and the runtime get; there is no CUDA."""
    stub, program = ROOT / "tests/data/cuda_stub", tmp_path / "calls"
    defined = {
        "CUDART_VERSION": str(version),
        "TILED": ",".join(map(str, TILED_NUMBERS)),
        "PIXELS": ",".join(map(str, PIXELS_NUMBERS)),
    }
    options = ["-std=c++17", "-Wall", "-Werror", f"-I{stub}", f"-I{PARTS}"]
    options += [f"-D{name}={value}" for name, value in defined.items()]
    command = [COMPILER, *options, stub / "calls.cc", "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    encoded = sorted([[0x1000, *TILED_NUMBERS], [0x2000, *PIXELS_NUMBERS]])
    lines = printed.splitlines()
    assert lines[0] == " allow 64"
    assert sorted([int(number) for number in line.split()] for line in lines[1:3]) == encoded
    assert lines[3:8] == [
        f" launch 3 32 64 1 {0x57} 1 0 7 2",
        " launch 3 32 49152 0 0 5",
        " allow 49153",
        " launch 3 32 49153 0 0 5",
        " allow 64",
    ]
    assert lines[-1] == "CUDA error at the launch of any: cudaErrorInvalidValue: invalid argument"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_nvcc_compiles_maps(tmp_path: Path) -> None:
    module = exported_file.load(exported("dilated5x9"))
    cases = (
        tensor_maps.cases(0)[name]
        for name in ("2d swizzle 0", "im2col 2d swizzle 128", "im2col 3d swizzle 64")
    )
    launches = [tensor_maps.exported_launch(module, case) for case in cases]
    kernels = tuple(map(module.kernel_of, launches))
    compile_by_nvcc(module, kernels, ["compute_90,code=sm_90", "compute_90a,code=sm_90a"], tmp_path)
