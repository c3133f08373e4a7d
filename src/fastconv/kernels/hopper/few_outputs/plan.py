"""Plans layers of few output channels with ``spread.cuh``."""

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
from fastconv.kernels.planning.layers import LONG_SUM, SHORT_SUM_PRODUCTS

PIXELS = 64  # of a product
MOST_COLUMNS = {1: 256, 2: 168}  # of a product, by parts: a thread's sums have to fit registers
LEAST_STRIP = 16  # columns: below, most products would be thrown away
# Steps of a unit, by parts: what a thread has under way; and if sums take most of its registers.
# Split numbers' sums are added up after each, since the error of the tensor core's accumulation
# grows with its length.
MOST_UNIT_STEPS = {1: 8, 2: 4}
FEW_UNIT_STEPS = {1: 4, 2: 2}
MANY_COLUMNS = {1: 192, 2: 144}
MOST_RAW_WORDS = 32
# A thread's registers beside its sums and operands, about; and what three warpgroups leave it.
OTHER_REGISTERS = 28
SHARED_REGISTERS = 168

# Estimated cycles of one processor.
LOAD_BYTES = 14.0  # a cycle
STORED_ELEMENTS = 2.6  # a cycle
STEP_CYCLES = 150.0
SPLIT_LOSS = 1.5  # of split numbers: two warpgroups only, and they add up between products
UNIT_LATENCY = 700.0  # of a warpgroup that never waits for another
STEP_LATENCY = 600.0
BAND_ROWS = 64  # about
PORTABLE_PRODUCTS = 57.0  # multiply-adds of the portable kernels, if output channels are few
PORTABLE_BYTES = 7.0


@dataclass(frozen=True)
class Spread:
    """How warpgroups walk through a layer."""

    layer: Layer

    @property
    def slot_columns(self) -> int:
        return round_up(self.layer.kernel[1] * self.layer.group_out, 8)

    @property
    def columns(self) -> int:
        """Of a product."""
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
        """Pixels before the first that a strip needs, so that it begins with a pair."""
        return self.layer.padding[1] % 2 if self.pair_loads else 0

    @property
    def strip_columns(self) -> int:
        reach = (self.layer.kernel[1] - 1) * self.layer.dilation[1]
        columns = PIXELS - reach - self.lead
        return columns // 2 * 2 if self.pair_loads else columns

    @property
    def compensated(self) -> bool:
        """Whether totals keep what rounding loses, by the same rule as in ``Layer``."""
        layer = self.layer
        products = layer.steps * layer.kernel[0] * layer.kernel[1]
        return layer.parts == 2 and products > LONG_SUM

    @property
    def unit_steps(self) -> int:
        """Products' channels that are loaded together."""
        parts, size = self.layer.parts, self.layer.operands.scalar_bytes
        singles = not (self.vector_loads or self.pair_loads)
        most = (FEW_UNIT_STEPS if self.columns > MANY_COLUMNS[parts] else MOST_UNIT_STEPS)[parts]
        most = min(most, MOST_RAW_WORDS // (8 if singles and size == 2 else 4))
        most = SHORT_SUM_PRODUCTS if self.layer.low_products else most
        steps = ceil_div(self.layer.steps, ceil_div(self.layer.steps, most))
        return round_up(steps, 2) if self.vector_loads else steps

    @property
    def units(self) -> int:
        return ceil_div(self.layer.steps, self.unit_steps)

    @property
    def warpgroups(self) -> int:
        sums = self.layer.parts * self.columns // 2
        operands = (1 + self.layer.parts) * 4 * self.unit_steps
        return 3 if sums + operands + OTHER_REGISTERS <= SHARED_REGISTERS else 2

    @property
    def shared_bytes(self) -> int:
        weights = self.layer.parts * self.units * self.unit_steps * 2 * self.columns * 16
        return weights + self.warpgroups * self.slot_columns * (PIXELS + 4) * 4

    @property
    def strips(self) -> int:
        return ceil_div(self.layer.out_size[1], self.strip_columns)

    @property
    def walk_rows(self) -> int:
        """Output rows that are walked down one after the other."""
        return ceil_div(self.layer.out_size[0], self.layer.dilation[0])

    @lazy
    def step_cycles(self) -> float:
        """What a processor takes for an input row of a strip, of all warpgroups' that it has."""
        layer = self.layer
        products = self.units * self.unit_steps * layer.products * self.columns / 2
        cycles = STEP_CYCLES + limits.together(
            products,
            PIXELS * layer.group_in * layer.operands.scalar_bytes / LOAD_BYTES,
            self.strip_columns * layer.group_out / STORED_ELEMENTS,
        )
        latency = self.units * UNIT_LATENCY + STEP_LATENCY
        return max(cycles * (SPLIT_LOSS if layer.parts == 2 else 1), latency / self.warpgroups)

    @property
    def image_cycles(self) -> float:
        """What an image takes, in cycles of one processor."""
        layer = self.layer
        again = 1 + (layer.kernel[0] - 1) / min(BAND_ROWS, self.walk_rows)
        return self.strips * self.walk_rows * layer.dilation[0] * again * self.step_cycles

    def band_rows(self, gpu: Gpu) -> int:
        """Output rows of a walk: so many that all warpgroups have equally much to do."""
        layer = self.layer
        walks = layer.batch * layer.dilation[0] * self.strips
        workers = gpu.processors * self.warpgroups
        return limits.band_rows(walks, self.walk_rows, workers, layer.kernel[0])


def spread_of(layer: Layer, gpu: Gpu) -> Spread:
    """How the layer is computed so.

    Raises:
        Declined: it cannot be.
    """
    rows, columns = layer.placing
    channels = (layer.group_in, layer.group_out)
    block.check(gpu)
    limits.check(layer.operands, layer.groups, channels, layer.in_size, layer.out_size)
    if layer.groups > 1:
        raise Declined(f"{layer.groups} groups")
    whole = rows.step == columns.step == 1 and layer.folding == (1, 1)
    if layer.stride != (1, 1) or not whole:
        raise Declined("strides")
    spread = Spread(_lines(layer))
    if spread.columns > MOST_COLUMNS[layer.parts]:
        raise Declined(f"{spread.columns} columns of taps and output channels")
    if spread.strip_columns < LEAST_STRIP:
        raise Declined("taps that reach too far")
    if spread.shared_bytes > gpu.shared_bytes_per_block:
        raise Declined("weights that do not fit shared memory")
    return spread


def portable_cycles(layer: Layer) -> float:
    """What an image takes the portable kernels, in cycles of one processor."""
    outputs = layer.group_out * layer.out_size[0] * layer.out_size[1]
    inputs = layer.group_in * layer.in_size[0] * layer.in_size[1]
    bytes_ = (inputs + outputs) * layer.operands.scalar_bytes
    return max(outputs * layer.terms / PORTABLE_PRODUCTS, bytes_ / PORTABLE_BYTES)


def _lines(layer: Layer) -> Layer:
    """The layer, with rows of a product's pixels if it has no others to respect."""
    pixels = layer.in_size[0] * layer.in_size[1]
    same = layer.in_size == layer.out_size and layer.padding == (0, 0)
    whole = layer.in_size[1] % PIXELS == 0
    if layer.kernel != (1, 1) or not same or whole or pixels % PIXELS:
        return layer
    size = (pixels // PIXELS, PIXELS)
    return replace(layer, in_size=size, out_size=size, image_size=size)


def plan(spread: Spread, gpu: Gpu) -> Plan:
    """The launch that computes the layer."""
    layer = spread.layer
    band_rows = spread.band_rows(gpu)
    bands = ceil_div(spread.walk_rows, band_rows)
    items = layer.batch * layer.dilation[0] * bands * spread.strips
    if items >= 2**30:
        raise Declined("more than 2^30 strips")
    launch = Launch(
        Kernel(
            "hopper/few_outputs/kernel.cuh", "spread", tuple(_constants(spread, band_rows).items())
        ),
        (min(ceil_div(items, spread.warpgroups), gpu.processors), 1, 1),
        128 * spread.warpgroups,
        spread.shared_bytes,
        ("input", "weight", "bias", "output", layer.batch, *layer.operands.residuals),
    )
    why = (
        f"tensor cores: all taps of {PIXELS} pixels in products of {spread.columns} columns, "
        f"{spread.strip_columns} by {band_rows} pixels a warpgroup"
    )
    return Plan((launch,), 0, "hopper", why)


def _constants(spread: Spread, band_rows: int) -> dict[str, Constant]:
    layer, operands = spread.layer, spread.layer.operands
    return {
        "Scalar": operands.scalar,
        "parts": layer.parts,
        "low_products": layer.low_products,
        "compensated": spread.compensated,
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
        "vector_loads": spread.vector_loads,
        "pair_loads": spread.pair_loads,
        "lead": spread.lead,
        "strip_columns": spread.strip_columns,
        "band_rows": band_rows,
        "unit_steps": spread.unit_steps,
        "warpgroups": spread.warpgroups,
        "shared_bytes": spread.shared_bytes,
        **epilogue_constants(operands.epilogue),
    }
