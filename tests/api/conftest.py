"""Fixtures of the tests of exported files."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastconv
from exports import NARROW, SMALL


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
