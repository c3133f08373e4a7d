"""Settings of the tests that need a GPU. Without one, they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and PyTorch for it"))


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Iterator[None]:
    """Turns TF32 off, and lets the CPU compute references on all of its cores."""
    cudnn, threads, tf32 = torch.backends.cudnn, torch.get_num_threads(), None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # PyTorch's testing utilities, once imported, forbid any other way to change settings.
    with torch.backends.__allow_nonbracketed_mutation():
        tf32, cudnn.allow_tf32 = cudnn.allow_tf32, False
    yield
    with torch.backends.__allow_nonbracketed_mutation():
        cudnn.allow_tf32 = tf32
    torch.set_num_threads(threads)
