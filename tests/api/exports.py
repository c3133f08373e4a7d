"""Files that ``fastconv.export`` writes: for founding workloads, small layers, and references."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fastconv
from fastconv.kernels import tuned

SMALL = "2x8x12x40 16x8x3x5 padding=1,2"
NARROW = "2x6x12x20 12x1x5x3 padding=2,1 groups=6"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file exported for a convolution that is small enough to emulate."""
    path = tmp_path_factory.mktemp("export") / "small.py"
    fastconv.export(shape=SMALL, output=path)
    return path


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file exported for a convolution that the tensor-core families decline."""
    path = tmp_path_factory.mktemp("export") / "narrow.py"
    fastconv.export(shape=NARROW, output=path)
    return path


@cache
def exported(name: str) -> Path:
    """The file of a workload, named after it, with no plans but those tuned by the package."""
    path = _folder() / f"{name}.py"
    with mock.patch.object(tuned, "table", return_value=tuned.read(tuned.SHIPPED)):
        fastconv.export(name, output=path)
    return path


REFERENCE = """
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
"""


@cache
def exported_layers(layers: str, input: tuple[int, ...], *dtypes: Any) -> Path:
    """The file of a model whose layers, written as Python, follow one another."""
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    reference, path = folder / "reference.py", folder / "exported.py"
    reference.write_text(REFERENCE.format(layers=layers, input=input), encoding="utf-8")
    fastconv.export(reference=reference, output=path, dtypes=dtypes or ["float32"])
    return path


def all_layers() -> Path:
    """A file with a layer of each kind but ``Conv2d``."""
    one = "nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1), nn.Conv1d(6, 4, 3)"
    return exported_layers(
        f"{one}, nn.Unflatten(2, (6, 5)), nn.ConvTranspose2d(4, 2, 3), "
        "nn.Unflatten(3, (7, 1)), nn.Conv3d(2, 2, (3, 3, 1)), nn.ConvTranspose3d(2, 3, 2)",
        (2, 4, 16),
    )


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fastconv-exports-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
