"""What Hopper's kernels add to a layer: how its sums are made of products of 64 rows.

Decided from the layer alone, as all that decides the order of a sum.
"""

from __future__ import annotations

import math

from fastconv.kernels.arithmetic import ceil_div, divisors
from fastconv.kernels.family import Operands
from fastconv.kernels.hopper.block import OUTPUTS, PRODUCT_BYTES
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import layers
from fastconv.kernels.planning.layers import SHORT_SUM_PRODUCTS
from fastconv.problem import Problem

# A chunk should hold this many products for each pair of barriers.
CHUNK_PRODUCTS = 8
MOST_K_STEPS = 4
MOST_RESIDENT_BYTES = 110 * 1024  # of weights that stay in shared memory
MOST_PIXELS = {1: 256, 2: 168}  # by parts
MOST_STAGE_PRODUCTS = 8


class Layer(layers.Layer):
    """A layer of products with 64 rows of output channels."""

    @lazy
    def most_pixels(self) -> int:
        """Of a product: sums, and their totals, have to fit a thread's registers."""
        return 128 if self.compensated else MOST_PIXELS[self.parts]

    @lazy
    def stack(self) -> int:
        """Output rows in a product's 64 rows."""
        if self.row_phases > 1:
            return 1
        height = self.kernel[0]
        rows = self.group_out * self.column_sums
        choices = [n for n in (1, 2, 4, 8) if n * rows <= OUTPUTS and n * self.column_sums <= 8]
        return max(choices or [1], key=lambda n: n * height / (height + n - 1))

    @lazy
    def product_channels(self) -> int:
        """Output channels of a product; of phases, pixels that are neighbours in memory."""
        rows = OUTPUTS // (self.stack * self.column_sums)
        return rows // self.interleave * self.interleave if self.unfolds else rows

    @lazy
    def product_outputs(self) -> int:
        """Rows of a product that are stored, at most: all, unless the layer has fewer phases."""
        if not self.unfolds:
            return OUTPUTS
        return self.stack * min(self.product_channels, self.group_out)

    @lazy
    def tap_rows(self) -> int:
        return self.kernel[0] + self.stack - 1

    @lazy
    def taps(self) -> int:
        return self.tap_rows * self.kernel[1]

    @lazy
    def rolling(self) -> bool:
        """Whether blocks walk down the image: all channels of a few rows have to fit."""
        return (
            self.kernel[0] > 1
            and self.row_phases == 1
            and self.steps <= 2
            and 2 * (self.out_size[1] + self.column_halo) > MOST_PIXELS[self.parts]
        )

    @lazy
    def k_steps(self) -> int:
        if self.rolling:
            return self.steps
        # Neighbouring channels are loaded in whole sectors, better in two. But stacked rows have so
        # tall a halo that twice as many channels, in two parts, leave room for few columns.
        fewest = 2 if self.vector_loads and not (self.unfolds and self.parts == 2) else 1
        most = SHORT_SUM_PRODUCTS if self.low_products else MOST_K_STEPS
        return min(self.steps, most, max(fewest, ceil_div(CHUNK_PRODUCTS, self.taps)))

    @lazy
    def stays(self) -> bool:
        """Whether all weights of 128 channels fit beside the rest: no stage is waited for."""
        tap = self.k_steps * self.weight_parts * 2 * PRODUCT_BYTES
        return self.halves and self.taps * tap <= MOST_RESIDENT_BYTES

    @lazy
    def stage_taps(self) -> int:
        wanted = self.stage_products / self.k_steps
        if self.parts == 2 and self.rolling and not self.stays:
            # One consumer should multiply while the other stores, and they can drift apart by no
            # more than the stages there are.
            wanted = 1
        choices = [n for n in divisors(self.taps) if n * self.k_steps <= MOST_STAGE_PRODUCTS]
        return min(choices or [1], key=lambda taps: abs(math.log(taps / wanted)))

    @lazy
    def weight_stages(self) -> int:
        """All that there are, of one group of output channels."""
        return self.chunks * self.taps // self.stage_taps

    @lazy
    def tensor_share(self) -> float:
        """The share of the tensor cores' products that count, but for the ends of tiles."""
        rows = OUTPUTS // (self.stack * self.column_sums)
        outputs = self.group_out / (ceil_div(self.group_out, self.product_channels) * rows)
        return outputs * self.terms / (self.steps * 2 * self.vector_channels * self.taps)


def forward_ways(problem: Problem, operands: Operands) -> list[list[Layer]]:
    return layers.forward_ways(Layer.of(problem, operands))


def input_grad_ways(problem: Problem, operands: Operands) -> list[list[Layer]]:
    return layers.input_grad_ways(Layer.of(problem, operands), problem, most_together=OUTPUTS)
