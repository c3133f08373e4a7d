"""Batch normalization on a GPU: plan, compile, launch.

What follows from shapes, types and alignment is decided once and cached.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
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
    "x", "residual", "weight", "bias", "running_mean", "running_var", "batches", "counted", "mean",
    "invstd", "y", "scratch",
)  # fmt: skip
OUTPUT = ("x", "residual", "weight", "bias", "mean", "invstd", "y")
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


def alignment_of(*tensors: Tensor | None) -> int:
    """The bytes that divide the addresses of all these tensors: a call's alignment."""
    return gcd(ALIGNMENT, *(one.data_ptr() for one in tensors if one is not None))


class Running(NamedTuple):
    """Which statistics a forward pass normalizes with: see ``plan.Statistics``."""

    eps: float
    momentum: float | None
    dtype: torch.dtype
    shares: int = 0

    @property
    def planned_for(self) -> Statistics:
        scalar = cuda.SCALARS[self.dtype][0]
        return Statistics(self.eps, self.momentum, scalar, self.shares)


class Gradients(NamedTuple):
    """Which gradients a pass computes; ``of_batch``: the statistics are those of the batch."""

    of_batch: bool
    x: bool
    parameters: bool
    residual: bool


class Need(NamedTuple):
    """All that the plan and the launches of a pass depend on.

    ``of`` is a ``Running`` for a forward pass, ``Gradients`` for a backward pass, and None for the
    output alone.
    """

    call: Call
    of: Running | Gradients | None

    @property
    def device(self) -> int:
        """The GPU's index."""
        return self.call.gpu


def planned(need: Need) -> Plan:
    """Returns the plan of a pass."""
    call, of = need
    if of is None:
        return plan.output(call.planned_for, cuda.gpu(call.gpu))
    if isinstance(of, Gradients):
        return plan.backward(call.planned_for, *of, cuda.gpu(call.gpu))
    return plan.forward(call.planned_for, of.planned_for, cuda.gpu(call.gpu))


MOST_READY = 2048
"""The most passes whose launches are cached."""


@lru_cache(MOST_READY)
def ready(need: Need) -> Ready:
    """Makes the launches of a pass."""
    names = {Running: FORWARD, Gradients: BACKWARD, type(None): OUTPUT}[type(need.of)]
    return _loaded(planned(need), names, need.call.gpu)


def _loaded(made: Plan, names: tuple[str, ...], index: int) -> Ready:
    native.start_build()
    loaded = launch.load_launches(made.launches, torch.device("cuda", index), names)
    return Ready(loaded, made.scratch_bytes, made.family, made.packs)
