"""Kernels of a few lines, which the tests of the emulator itself run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastconv.kernels.family import Kernel, Launch

THREADS = 64


@dataclass(frozen=True)
class Snippet(Kernel):
    """A kernel whose ``source`` is the body of its function."""

    @property
    def text(self) -> str:
        return f"""#include "device/scalar.cuh"
#include "device/wgmma.cuh"
using namespace fastconv;
extern "C" __global__ void __launch_bounds__(1024) {self.entry}(
    const float* in, float* out, int n) {{
  float* tile = reinterpret_cast<float*>(shared_memory());
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  {self.source}
}}
"""


def launch(name: str, body: str, blocks: int = 1, shared_bytes: int = 4 * THREADS) -> Launch:
    arguments = ("in", "out", blocks * THREADS)
    return Launch(Snippet(body, name, ()), (blocks, 1, 1), THREADS, shared_bytes, arguments)


def tensors(blocks: int = 1) -> dict[str, Tensor]:
    values = torch.arange(1.0, 1.0 + blocks * THREADS)
    return {"in": values, "out": torch.full_like(values, torch.inf)}


VALUES = tensors()["in"]


def change(body: str, old: str, new: str) -> str:
    assert old in body
    return body.replace(old, new, 1)
