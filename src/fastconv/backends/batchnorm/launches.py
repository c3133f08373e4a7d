"""Batch normalization on a GPU: plan, compile, launch.

What follows from shapes, types and alignment is decided once and cached.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv import native
from fastconv.backends import cuda
from fastconv.backends.cuda import Ready
from fastconv.jit import launch
from fastconv.kernels.batchnorm import plan
from fastconv.kernels.batchnorm.plan import Normalization, Statistics
from fastconv.kernels.family import ALIGNMENT, Plan

FORWARD = (
    "x", "residual", "weight", "bias", "running_mean", "running_var", "batches", "mean", "invstd",
    "y", "scratch",
)  # fmt: skip
BACKWARD = (
    "grad", "x", "beside", "weight", "bias", "mean", "invstd", "grad_x", "grad_residual",
    "grad_weight", "grad_bias", "scratch",
)  # fmt: skip
"""The names of each pass's tensors in launches, in the order in which they are passed."""


class Call(NamedTuple):
    """All that the launches of a pass depend on, beside its options."""

    images: int
    channels: int
    plane: int
    channels_last: bool
    dtype: torch.dtype
    parameter: torch.dtype
    activation: str
    slope: float
    residual: bool
    alignment: int
    gpu: int  # its index

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor | None,
        activation: str,
        slope: float,
        residual: bool,
        *others: Tensor | None,
    ) -> Call:
        """Describes a normalization of x; ``others`` are all other tensors of its shape."""
        addresses = (one.data_ptr() for one in (x, *others) if one is not None)
        return cls(
            x.shape[0],
            x.shape[1],
            prod(x.shape[2:]),
            not x.is_contiguous(),
            x.dtype,
            x.dtype if weight is None else weight.dtype,
            activation,
            slope,
            residual,
            gcd(ALIGNMENT, *addresses),
            x.device.index,
        )

    @property
    def planned_for(self) -> Normalization:
        """The call in the planner's terms."""
        return Normalization(
            *cuda.SCALARS[self.dtype],
            cuda.SCALARS[self.parameter][0],
            self.images,
            self.channels,
            self.plane,
            self.channels_last,
            self.activation,
            self.slope,
            self.residual,
            self.alignment,
        )


class Running(NamedTuple):
    """Which statistics a forward pass normalizes with: see ``plan.Statistics``."""

    eps: float
    momentum: float | None
    dtype: torch.dtype

    @property
    def planned_for(self) -> Statistics:
        return Statistics(self.eps, self.momentum, cuda.SCALARS[self.dtype][0])


class Gradients(NamedTuple):
    """Which gradients a pass computes; ``of_batch``: the statistics are those of the batch."""

    of_batch: bool
    x: bool
    parameters: bool
    residual: bool


def ready_forward(call: Call, running: Running) -> Ready:
    return _ready_forward(call, running)


def ready_backward(call: Call, wanted: Gradients) -> Ready:
    return _ready_backward(call, wanted)


MOST_READY = 1024
"""The most passes of each kind whose launches are cached."""


@lru_cache(MOST_READY)
def _ready_forward(call: Call, running: Running) -> Ready:
    made = plan.forward(call.planned_for, running.planned_for, cuda.gpu(call.gpu))
    return _loaded(made, FORWARD, call.gpu)


@lru_cache(MOST_READY)
def _ready_backward(call: Call, wanted: Gradients) -> Ready:
    made = plan.backward(call.planned_for, *wanted, cuda.gpu(call.gpu))
    return _loaded(made, BACKWARD, call.gpu)


def _loaded(made: Plan, names: tuple[str, ...], index: int) -> Ready:
    native.start_build()
    loaded = launch.load_launches(made.launches, torch.device("cuda", index), names)
    return Ready(loaded, made.scratch_bytes, made.family, made.packs)
