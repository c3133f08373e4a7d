"""Training by blocks of fastconv's follows PyTorch's, for many steps."""

from __future__ import annotations

import pytest
import torch

from training_cases import check_follows

pytestmark = pytest.mark.usefixtures("host_path")


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_losses_follow_pytorchs(last: bool) -> None:
    memory_format = torch.channels_last if last else torch.contiguous_format
    check_follows(width=4, batch=8, size=7, rate=0.02, memory_format=memory_format)
