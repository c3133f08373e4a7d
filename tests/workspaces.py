"""Workspaces of plans for tests: full of NaN, each region apart from the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastconv.kernels.family import Plan


def workspace(plan: Plan, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensor ``scratch`` of a plan, and those of its regions."""
    begins = {region.name: region.offset for region in plan.regions}
    return split(plan.scratch_bytes, begins, device)


def split(
    scratch_bytes: int, regions: Mapping[str, int], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """A workspace of so many bytes, as tensors that begin at these offsets.

    The tensors have memory of their own, so that what exceeds one is found.
    """
    names = ["scratch", *regions]
    begins = [0, *regions.values(), scratch_bytes]
    assert begins == sorted(begins)
    return {
        name: torch.full((end - begin,), 255, dtype=torch.uint8, device=device)
        for name, begin, end in zip(names, begins[:-1], begins[1:], strict=True)
    }
