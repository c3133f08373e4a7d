"""How the halo kernel divides a layer's channels into chunks and its taps into stages.

This fixes the order in which products are added up. It follows from the layer alone, so that bits
do not depend on the GPU or the tile.
"""

from __future__ import annotations

from fastconv.kernels.arithmetic import ceil_div, divisors
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import layers
from fastconv.kernels.planning.layers import SHORT_SUM_MMAS

CHUNK_MMAS = 8  # fewest MMAs along K of a chunk: warps wait for each other between chunks
MOST_K_STEPS = 4
MOST_UNROLLED = {1: 10, 2: 7}  # MMAs along K that the code unrolls, by parts
MOST_STAGE_MMAS = 10  # MMAs along K of a stage of weights


class Layer(layers.Layer):
    """A layer whose channels are multiplied in chunks, and its taps in stages."""

    @lazy
    def k_steps(self) -> int:
        """MMAs along K of a tap in one chunk of channels."""
        most = SHORT_SUM_MMAS if self.low_low_mma else MOST_K_STEPS
        return min(self.steps, most, ceil_div(CHUNK_MMAS, self.taps))

    @lazy
    def stages_taps(self) -> list[int]:
        """Numbers of taps that a stage of weights may have, most first: multiples of a period."""
        most = max(MOST_STAGE_MMAS, self.period_taps * self.k_steps)
        choices = [n for n in divisors(self.taps) if n * self.k_steps <= most]
        return [n for n in sorted(choices, reverse=True) if n % self.period_taps == 0]

    def weight_stages(self, taps: int) -> int:
        """Stages of weights that a tile takes if each has ``taps`` taps."""
        return self.chunks * self.taps // taps

    @lazy
    def period_taps(self) -> int:
        """Taps after which the pattern of flushes repeats, for numbers in two parts.

        The period is chosen for the most taps between flushes, on average.
        """
        if self.parts == 1:
            return 1
        return max(self._few_taps, key=lambda n: n / self._flushes(n))

    @lazy
    def flush_taps(self) -> int:
        """Taps after which accumulators are flushed within a period."""
        return ceil_div(self.period_taps, self._flushes(self.period_taps))

    @lazy
    def _few_taps(self) -> list[int]:
        most = MOST_UNROLLED[self.parts]
        few = [n for n in divisors(self.taps) if n * self.k_steps <= most]
        return few or [1]

    def _flushes(self, taps: int) -> int:
        return ceil_div(taps, max(1, self.stage_mmas // self.k_steps))
