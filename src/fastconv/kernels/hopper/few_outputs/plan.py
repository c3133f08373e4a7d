"""Plans layers with few output channels, whose N has a column for every tap and channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Plan,
    epilogue_constants,
    geometry_constants,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.layers import Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.layers import LONG_SUM, SHORT_SUM_MMAS

PIXELS = 64  # M of a wgmma
# N, by parts: 256 is wgmma's limit; in two parts, accumulators and totals have to fit the
# registers.
MOST_COLUMNS = {1: 256, 2: 168}
LEAST_STRIP = 16  # output columns: narrower strips would discard most of what they multiply
# MMA steps along K that a thread loads at once, by parts; fewer if N is so large that accumulators
# take most of its registers. With 3xTF32, accumulators are added to totals after each such unit,
# because the error of the tensor core's accumulation grows with its length.
MOST_UNIT_STEPS = {1: 8, 2: 4}
FEW_UNIT_STEPS = {1: 4, 2: 2}
MANY_COLUMNS = {1: 192, 2: 144}
MOST_RAW_WORDS = 32  # registers of a thread for elements that are being loaded
# Registers of a thread beside accumulators and operands, about; and all that it has if a block has
# three warpgroups.
OTHER_REGISTERS = 28
SHARED_REGISTERS = 168

# Estimates of one SM.
LOAD_BYTES = 14.0  # per cycle
STORED_ELEMENTS = 2.6  # per cycle
STEP_CYCLES = 150.0  # of an input row of a strip, beside loads, MMAs and stores
SPLIT_LOSS = 1.5  # factor of 3xTF32: only two warpgroups, which add up totals between MMAs
# Cycles that a unit and an input row take a warpgroup that never waits for another.
UNIT_LATENCY = 700.0
STEP_LATENCY = 600.0
BAND_ROWS = 64  # output rows of a walk, about


@dataclass(frozen=True)
class Walks:
    """How warpgroups walk down the strips of a layer's images."""

    layer: Layer

    @property
    def slot_columns(self) -> int:
        """Columns of N for an output row: taps of a kernel row by output channels."""
        return round_up(self.layer.kernel[1] * self.layer.group_out, 8)

    @property
    def columns(self) -> int:
        """N of a wgmma."""
        return self.layer.kernel[0] * self.slot_columns

    @property
    def vector_loads(self) -> bool:
        return self.layer.vector_loads

    @property
    def pair_loads(self) -> bool:
        """Whether two neighbouring pixels are loaded at once."""
        operands = self.layer.operands
        width = self.layer.in_size[1]
        return not operands.input_channels_last and operands.widest_vector(width) > 1

    @property
    def lead(self) -> int:
        """Pixels loaded before the first needed one, so that a strip begins with a pair."""
        return self.layer.padding[1] % 2 if self.pair_loads else 0

    @property
    def strip_columns(self) -> int:
        """Output columns of a strip."""
        reach = (self.layer.kernel[1] - 1) * self.layer.dilation[1]
        columns = PIXELS - reach - self.lead
        return columns // 2 * 2 if self.pair_loads else columns

    @property
    def compensated(self) -> bool:
        """Whether the rounding errors of totals are kept, by the same rule as in ``Layer``."""
        layer = self.layer
        mmas = layer.steps * layer.kernel[0] * layer.kernel[1]
        return layer.parts == 2 and mmas > LONG_SUM

    @property
    def unit_steps(self) -> int:
        """MMA steps along K whose channels are loaded together."""
        parts, size = self.layer.parts, self.layer.operands.scalar_bytes
        singles = not (self.vector_loads or self.pair_loads)
        most = (FEW_UNIT_STEPS if self.columns > MANY_COLUMNS[parts] else MOST_UNIT_STEPS)[parts]
        most = min(most, MOST_RAW_WORDS // (8 if singles and size == 2 else 4))
        most = SHORT_SUM_MMAS if self.layer.low_low_mma else most
        steps = ceil_div(self.layer.steps, ceil_div(self.layer.steps, most))
        return round_up(steps, 2) if self.vector_loads else steps

    @property
    def units(self) -> int:
        return ceil_div(self.layer.steps, self.unit_steps)

    @property
    def warpgroups(self) -> int:
        accumulators = self.layer.parts * self.columns // 2
        operands = (1 + self.layer.parts) * 4 * self.unit_steps
        return 3 if accumulators + operands + OTHER_REGISTERS <= SHARED_REGISTERS else 2

    @property
    def shared_bytes(self) -> int:
        weights = self.layer.parts * self.units * self.unit_steps * 2 * self.columns * 16
        return weights + self.warpgroups * self.slot_columns * (PIXELS + 4) * 4

    @property
    def strips(self) -> int:
        return ceil_div(self.layer.out_size[1], self.strip_columns)

    @property
    def walk_rows(self) -> int:
        """Output rows of an image with the same residue modulo the dilation: those of a strip."""
        return ceil_div(self.layer.out_size[0], self.layer.dilation[0])

    @lazy
    def step_cycles(self) -> float:
        """Cycles of an SM for an input row of a strip, with all warpgroups at work."""
        layer = self.layer
        mma = self.units * self.unit_steps * layer.mmas_per_step * self.columns / 2
        cycles = STEP_CYCLES + limits.together(
            mma,
            PIXELS * layer.group_in * layer.operands.scalar_bytes / LOAD_BYTES,
            self.strip_columns * layer.group_out / STORED_ELEMENTS,
        )
        latency = self.units * UNIT_LATENCY + STEP_LATENCY
        return max(cycles * (SPLIT_LOSS if layer.parts == 2 else 1), latency / self.warpgroups)

    @property
    def image_cycles(self) -> float:
        """The estimated cycles of one SM for an image."""
        layer = self.layer
        again = 1 + (layer.kernel[0] - 1) / min(BAND_ROWS, self.walk_rows)
        return self.strips * self.walk_rows * layer.dilation[0] * again * self.step_cycles

    def band_rows(self, gpu: Gpu) -> int:
        """Output rows of a walk, chosen so that all warpgroups have about the same work."""
        layer = self.layer
        count = layer.batch * layer.dilation[0] * self.strips
        workers = gpu.sm_count * self.warpgroups
        return limits.band_rows(count, self.walk_rows, workers, layer.kernel[0])


def walks_of(layer: Layer, gpu: Gpu) -> Walks:
    """The walks that compute a layer.

    Raises:
        Declined: the kernel cannot compute the layer.
    """
    rows, columns = layer.placing
    channels = (layer.group_in, layer.group_out)
    block.check(gpu)
    limits.check(layer.operands, layer.groups, channels, layer.in_size, layer.out_size)
    if layer.groups > 1:
        raise Declined(f"{layer.groups} groups")
    whole = rows.step == columns.step == 1 and layer.s2d_factors == (1, 1)
    if layer.stride != (1, 1) or not whole:
        raise Declined("strides")
    walks = Walks(_lines(layer))
    if walks.columns > MOST_COLUMNS[layer.parts]:
        raise Declined(f"{walks.columns} columns of taps and output channels")
    if walks.strip_columns < LEAST_STRIP:
        raise Declined("taps that reach too far")
    if walks.shared_bytes > gpu.shared_bytes_per_block:
        raise Declined("weights that do not fit shared memory")
    return walks


def _lines(layer: Layer) -> Layer:
    """The layer; a pointwise one reshaped to rows of 64 pixels, if it has a multiple of 64."""
    pixels = layer.in_size[0] * layer.in_size[1]
    same = layer.in_size == layer.out_size and layer.padding == (0, 0)
    whole = layer.in_size[1] % PIXELS == 0
    if layer.kernel != (1, 1) or not same or whole or pixels % PIXELS:
        return layer
    size = (pixels // PIXELS, PIXELS)
    return replace(layer, in_size=size, out_size=size, image_size=size)


def plan(walks: Walks, gpu: Gpu) -> Plan:
    """The launch that computes the layer."""
    layer = walks.layer
    band_rows = walks.band_rows(gpu)
    bands = ceil_div(walks.walk_rows, band_rows)
    items = layer.batch * layer.dilation[0] * bands * walks.strips
    if items >= 2**30:
        raise Declined("more than 2^30 strips")
    launch = Launch(
        Kernel(
            "hopper/few_outputs/kernel.cuh",
            "few_outputs",
            tuple(_constants(walks, band_rows).items()),
        ),
        (min(ceil_div(items, walks.warpgroups), gpu.sm_count), 1, 1),
        128 * walks.warpgroups,
        walks.shared_bytes,
        ("input", "weight", "bias", "output", layer.batch, *layer.operands.residuals),
    )
    why = (
        f"tensor cores: all taps of {PIXELS} pixels in one MMA with N = {walks.columns}, "
        f"{walks.strip_columns} by {band_rows} pixels a warpgroup"
    )
    return Plan((launch,), 0, "hopper", why)


def _constants(walks: Walks, band_rows: int) -> dict[str, Constant]:
    layer, operands = walks.layer, walks.layer.operands
    return {
        "Scalar": operands.scalar,
        "parts": layer.parts,
        "low_low_mma": layer.low_low_mma,
        "compensated": walks.compensated,
        "ties_to_even": layer.ties_to_even,
        "transposed": layer.transposed,
        "group_in": layer.group_in,
        "group_out": layer.group_out,
        "in_height": layer.in_size[0],
        "in_width": layer.in_size[1],
        "out_height": layer.out_size[0],
        "out_width": layer.out_size[1],
        **geometry_constants(layer.kernel, layer.stride, layer.dilation, layer.padding, operands),
        "in_channels_last": operands.input_channels_last,
        "out_channels_last": operands.output_channels_last,
        "vector_loads": walks.vector_loads,
        "pair_loads": walks.pair_loads,
        "lead": walks.lead,
        "strip_columns": walks.strip_columns,
        "band_rows": band_rows,
        "unit_steps": walks.unit_steps,
        "warpgroups": walks.warpgroups,
        "shared_bytes": walks.shared_bytes,
        **epilogue_constants(operands.epilogue),
    }
