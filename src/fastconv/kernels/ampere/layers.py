"""What these kernels add to a layer: in which order its sums are added up.

Decided from the layer alone, as all that decides the order of a sum.
"""

from __future__ import annotations

from fastconv.kernels.arithmetic import ceil_div, divisors
from fastconv.kernels.lazy import lazy
from fastconv.kernels.tensor import layers
from fastconv.kernels.tensor.layers import (
    SHORT_SUM_PRODUCTS,
)

CHUNK_PRODUCTS = 8  # of a chunk, at least: between them, warps wait for each other
MOST_K_STEPS = 4


class Layer(layers.Layer):
    """A layer whose channels are multiplied in chunks, and its taps in stages."""

    @lazy
    def k_steps(self) -> int:
        """Products of a tap, of one chunk."""
        most = SHORT_SUM_PRODUCTS if self.low_products else MOST_K_STEPS
        return min(self.steps, most, ceil_div(CHUNK_PRODUCTS, self.taps))

    @lazy
    def stage_taps(self) -> int:
        """Taps of a stage of weights; sums of numbers in two parts are flushed after each."""
        choices = [n for n in divisors(self.taps) if n * self.k_steps <= self.stage_products]
        return max(choices or [1])

    @property
    def stages(self) -> int:
        """Of weights, in a chunk."""
        return self.taps // self.stage_taps
