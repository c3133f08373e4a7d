"""The layers that ``halo`` and ``few_outputs`` compute, and how ``halo`` makes them of MMAs.

All of it depends on the layer alone and never on the batch, because it decides the order in which
sums are added up, and an image must give the same bits in any batch.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from fastconv.kernels.arithmetic import ceil_div, divisors
from fastconv.kernels.family import Declined, Operands
from fastconv.kernels.hopper.block import A_OPERAND_BYTES, OUTPUTS
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import layers
from fastconv.kernels.planning.copies import HalfCopy
from fastconv.kernels.planning.layers import SHORT_SUM_MMAS
from fastconv.kernels.planning.slabs import in_slabs
from fastconv.problem import Problem

CHUNK_MMAS = 8  # MMAs that a chunk of channels should have for each pair of mbarrier waits
MOST_K_STEPS = 4  # MMAs along K for each tap of a chunk
MOST_RESIDENT_BYTES = 110 * 1024  # of weights that stay in shared memory
# N, by parts: 256 is wgmma's limit; in two parts, accumulators and totals have to fit the
# registers.
MOST_PIXELS = {1: 256, 2: 168}
MOST_STAGE_MMAS = 8  # MMAs for each stage of weights


class Layer(layers.Layer):
    """A layer whose output channels are the 64 rows of M."""

    @lazy
    def most_pixels(self) -> int:
        """The largest N: accumulators and totals have to fit a thread's registers."""
        return 128 if self.compensated else MOST_PIXELS[self.parts]

    @lazy
    def stack(self) -> int:
        """Output rows that share the 64 rows of M."""
        if self.row_residues > 1:
            return 1
        height = self.kernel[0]
        rows = self.group_out * self.stacked_columns
        choices = [n for n in (1, 2, 4, 8) if n * rows <= OUTPUTS and n * self.stacked_columns <= 8]
        return max(choices or [1], key=lambda n: n * height / (height + n - 1))

    @lazy
    def mma_channels(self) -> int:
        """Output channels of an MMA; residues that are neighbours in memory stay together."""
        rows = OUTPUTS // (self.stack * self.stacked_columns)
        return rows // self.interleave * self.interleave if self.depth_to_space else rows

    @lazy
    def mma_outputs(self) -> int:
        """The most rows of M that are stored: all, unless the layer has fewer residues."""
        if not self.depth_to_space:
            return OUTPUTS
        return self.stack * min(self.mma_channels, self.group_out)

    @lazy
    def tap_rows(self) -> int:
        """Rows of taps, with the zero weights of stacked rows."""
        return self.kernel[0] + self.stack - 1

    @lazy
    def taps(self) -> int:
        """Taps that are multiplied, with the zero weights of stacked rows."""
        return self.tap_rows * self.kernel[1]

    @lazy
    def rolling(self) -> bool:
        """Whether blocks walk down the image, with all channels of a few rows in shared memory."""
        return (
            self.kernel[0] > 1
            and self.row_residues == 1
            and self.steps <= 2
            and 2 * (self.out_size[1] + self.column_halo) > MOST_PIXELS[self.parts]
        )

    @lazy
    def k_steps(self) -> int:
        """MMAs along K for each tap of a chunk of channels."""
        if self.rolling:
            return self.steps
        # Vectors of channels are better loaded as two whole sectors than as one. But layers with
        # residues as channels stack rows, with so tall a halo that twice as many channels, in two
        # parts, leave room for few columns.
        fewest = 2 if self.vector_loads and not (self.depth_to_space and self.parts == 2) else 1
        most = SHORT_SUM_MMAS if self.low_low_mma else MOST_K_STEPS
        return min(self.steps, most, max(fewest, ceil_div(CHUNK_MMAS, self.taps)))

    @lazy
    def stays(self) -> bool:
        """Whether all weights of 128 channels fit beside the rest, so that none are waited for."""
        tap = self.k_steps * self.weight_parts * 2 * A_OPERAND_BYTES
        return self.scaled_fp16 and self.taps * tap <= MOST_RESIDENT_BYTES

    @lazy
    def stage_taps(self) -> int:
        """Taps of a stage of weights."""
        wanted = self.stage_mmas / self.k_steps
        if self.parts == 2 and self.rolling and not self.stays:
            # One consumer should multiply while the other stores. They can drift apart by at most
            # the number of stages, so stages are small.
            wanted = 1
        choices = [n for n in divisors(self.taps) if n * self.k_steps <= MOST_STAGE_MMAS]
        return min(choices or [1], key=lambda taps: abs(math.log(taps / wanted)))

    @lazy
    def weight_stages(self) -> int:
        """Stages of all weights of one group of output channels."""
        return self.chunks * self.taps // self.stage_taps

    @lazy
    def input_copy(self) -> HalfCopy:
        """The float16 copy of the input that the layer reads with ``half_copy``."""
        return HalfCopy.of(self)

    @lazy
    def tensor_share(self) -> float:
        """The share of multiply-adds that count, apart from the ends of tiles."""
        rows = OUTPUTS // (self.stack * self.stacked_columns)
        outputs = self.group_out / (ceil_div(self.group_out, self.mma_channels) * rows)
        return outputs * self.terms / (self.steps * 2 * self.vector_channels * self.taps)


def forward_ways(problem: Problem, operands: Operands) -> list[list[Layer]]:
    """Ways to compute a forward pass, each a list of one layer."""
    return _and_on_copies(layers.forward_ways(Layer.of(problem, operands)))


def input_grad_ways(problem: Problem, operands: Operands) -> list[list[Layer]]:
    """Ways to compute an input gradient, each a list of layers that together write it."""
    layer = Layer.of(problem, operands)
    return _and_on_copies(layers.input_grad_ways(layer, problem, most_together=OUTPUTS))


def relaid_ways(ways: list[list[Layer]]) -> list[list[Layer]]:
    """Ways of layers that read channels-last tensors, reading copies of contiguous ones instead."""
    return _in_slabs([[replace(layer, relaid=True) for layer in way] for way in ways])


def _and_on_copies(ways: list[list[Layer]]) -> list[list[Layer]]:
    """These ways, and those that multiply scaled fp16 with the input read from a float16 copy."""
    scaled = (way[0] for way in ways if way[0].scaled_fp16)
    return ways + _in_slabs(
        [[replace(one, half_copy=True)] for one in scaled if _fits_half_copy(one)]
    )


def _in_slabs(ways: list[list[Layer]]) -> list[list[Layer]]:
    """The ways whose copies are small enough, in slabs if they have to be."""
    found = []
    for way in ways:
        with suppress(Declined):
            found.append(in_slabs(way))
    return found


def _fits_half_copy(layer: Layer) -> bool:
    """Whether float16 copies have whole vectors of 8 channels, and can be made (``copy.cuh``)."""
    taps = 1 if layer.depth is None else layer.depth.taps
    rows, columns = layer.weight_kernel
    return (
        layer.parts == 1
        and layer.operands.aligned
        and layer.s2d_factors == (1, 1)
        and layer.in_channels % 8 == 0
        and layer.group_out * rows * columns * taps < layers.MOST_EXPONENTS
        and layer.input_copy.blocks < 2**31
    )
