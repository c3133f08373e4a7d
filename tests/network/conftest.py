"""Fixtures of the tests of whole networks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import Loads
from fastconv.network import calls
from network import dry_runs
from network.helpers import Clock, ResNet, stand_in


@pytest.fixture
def clock(loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in(tmp_path / "cache", monkeypatch.setattr)
    found = Clock()
    monkeypatch.setattr(calls, "clock", found)
    return found


@pytest.fixture
def model() -> ResNet:
    made = ResNet()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):  # statistics as training leaves them
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.normal_(1)
                module.bias.normal_()
    return made


@pytest.fixture
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def fakes_of_others() -> Iterator[None]:
    """Records fake tensors that other tests have left, for :func:`network.dry_runs.no_fakes`."""
    dry_runs.of_others[:] = dry_runs.fakes()
    yield
    dry_runs.of_others.clear()
