"""Files that ``fastconv.export`` writes: for the founding workloads, and for two small layers."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
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


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fastconv-exports-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
