"""The documentation's snippets that need a GPU, each after those of its page that need none."""

from __future__ import annotations

from pathlib import Path

import pytest

from snippets import (
    EVERY,
    _alone,  # noqa: F401  a fixture
    name_of,
    run_page,
)

GPU = [page for page, found in EVERY.items() if any("gpu" in one.needs for one in found)]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("page", GPU, ids=name_of)
def test_snippets_run(page: Path) -> None:
    if any("torchvision" in snippet.needs for snippet in EVERY[page]):
        pytest.importorskip("torchvision")
    run_page(page, needs=("", "gpu", "gpu torchvision"))
