"""What these kernels add to a layer: in which order its sums are added up.

Decided from the layer alone, as all that decides the order of a sum.
"""

from __future__ import annotations

from fastconv.kernels.arithmetic import ceil_div, divisors
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import layers
from fastconv.kernels.planning.layers import SHORT_SUM_PRODUCTS

CHUNK_PRODUCTS = 8  # of a chunk, at least: between them, warps wait for each other
MOST_K_STEPS = 4
MOST_WRITTEN = {1: 10, 2: 7}  # products that are written out, by parts
MOST_STAGE_PRODUCTS = 10  # of a stage of weights


class Layer(layers.Layer):
    """A layer whose channels are multiplied in chunks, and its taps in stages."""

    @lazy
    def k_steps(self) -> int:
        """Products of a tap, of one chunk."""
        most = SHORT_SUM_PRODUCTS if self.low_products else MOST_K_STEPS
        return min(self.steps, most, ceil_div(CHUNK_PRODUCTS, self.taps))

    @lazy
    def stages_taps(self) -> list[int]:
        """How many taps a stage of weights may have, the most first: some periods."""
        most = max(MOST_STAGE_PRODUCTS, self.period_taps * self.k_steps)
        choices = [n for n in divisors(self.taps) if n * self.k_steps <= most]
        return [n for n in sorted(choices, reverse=True) if n % self.period_taps == 0]

    def weight_stages(self, taps: int) -> int:
        """All that there are, if each has so many taps."""
        return self.chunks * self.taps // taps

    @lazy
    def period_taps(self) -> int:
        """Taps after which it repeats when the sums of numbers in two parts are flushed.

        So many that few flushes are early.
        """
        if self.parts == 1:
            return 1
        return max(self._few_taps, key=lambda n: n / self._flushes(n))

    @lazy
    def flush_taps(self) -> int:
        """Taps after which they are, in a period."""
        return ceil_div(self.period_taps, self._flushes(self.period_taps))

    @lazy
    def _few_taps(self) -> list[int]:
        most = MOST_WRITTEN[self.parts]
        few = [n for n in divisors(self.taps) if n * self.k_steps <= most]
        return few or [1]

    def _flushes(self, taps: int) -> int:
        return ceil_div(taps, max(1, self.stage_products // self.k_steps))
