"""Plans the kernels of causal convolutions: what is a constant of them, tiles, and launches.

Constants are what chooses code: types, width, layout, options, vectors and tiles. Sizes and strides
are arguments, so that sequences of all lengths run the same few kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import ALIGNMENT, Constant, Gpu, Kernel, Launch, Plan

FAMILY = "causal"
MOST_THREADS = 128
CHANNELS_LAST_RUN = 8  # positions that a thread computes at once; kRun in tile.cuh
SUMS_AT_ONCE = 8  # kRound in sums.cuh

WIDEST_PAIR = 16
"""The largest width at which a thread has two 16-bit channels: both have all taps in registers."""

BLOCKS_PER_SM = 64
"""A backward pass has at least this many blocks per SM, if it has so many tiles.

With fewer blocks, each of them has more tiles and there are fewer partial sums, but the last round
of blocks leaves more SMs idle.
"""

MOST_TILES_OF_A_BLOCK = 32

END = (1 << 31) - (1 << 16)
"""Sizes are below this, so that a position in a last tile is a 32-bit int."""


@dataclass(frozen=True)
class Layout:
    """Where a tensor of shape (batch, dim, length) lies.

    ``row`` is the stride of channels in a contiguous tensor, and that of positions in a
    channels-last one, whose other axis has the stride 1. Strides are counted in elements, and are 0
    along axes of one element. ``alignment`` is the largest power of two, up to 16 bytes, that
    divides the address.
    """

    batch: int
    row: int
    alignment: int = ALIGNMENT


@dataclass(frozen=True)
class Convolution:
    """A causal convolution, as far as plans depend on it."""

    scalar: str  # name of the element type of x in device code
    scalar_bytes: int
    weight_scalar: str
    batch: int
    dim: int
    length: int
    width: int
    channels_last: bool
    silu: bool
    sequences: bool
    x: Layout

    @property
    def sum_bytes(self) -> int:
        return max(4, self.scalar_bytes)

    @property
    def run(self) -> int:
        """The positions that a thread computes at once."""
        return CHANNELS_LAST_RUN if self.channels_last else 16 // self.scalar_bytes

    @property
    def halo(self) -> int:
        """The positions that a block stages before its tile."""
        states = self.width - 1
        return states if self.channels_last else round_up(states, self.run)

    def vector(self, layout: Layout) -> int:
        """Returns the elements of the widest vectors that rows of a tensor consist of."""
        along = self.dim if self.channels_last else self.length
        within = gcd(ALIGNMENT, layout.alignment) // self.scalar_bytes
        vector = gcd(within, along, layout.batch, layout.row)
        return vector if vector * self.scalar_bytes >= 4 else 1  # cp.async copies 4 bytes or more


@dataclass(frozen=True)
class Tile:
    """What a block computes at once; see ``tile.cuh``."""

    threads: int
    lanes: int
    group: int  # channels of a thread
    positions: int

    @property
    def channels(self) -> int:
        return self.lanes * self.group


@dataclass(frozen=True)
class Update:
    """Decoding steps, as far as plans depend on them; strides are those of all three axes."""

    scalar: str
    weight_scalar: str
    batch: int
    dim: int
    steps: int
    states: int
    width: int
    silu: bool
    circular: bool
    x: tuple[int, int, int]
    state: tuple[int, int, int]


def forward(conv: Convolution, gpu: Gpu) -> Plan:
    """Plans the output: tensors x, weight, bias, seq_idx, initial_states and y."""
    _check(conv)
    tile = _tile(conv, gpu, backward=False)
    tiles = ceil_div(conv.length, tile.positions)
    kernel = _kernel(conv, tile, "forward", {})
    launch = Launch(
        kernel,
        _grid(conv.batch * tiles * ceil_div(conv.dim, tile.channels)),
        tile.threads,
        _forward_bytes(conv, tile),
        (
            *("x", "weight", "bias", "seq_idx", "initial_states", "y"),
            *(conv.dim, conv.length, tiles, *_wide(conv.x.batch), *_wide(conv.x.row)),
        ),
    )
    return Plan((launch,), 0, FAMILY, _why(conv))


def backward(conv: Convolution, grad: Layout, parameters: bool, gpu: Gpu) -> Plan:
    """Plans the gradients, given the layout of the output's; ``parameters`` are weight and bias.

    Tensors are those of the forward pass but y, and grad, grad_final, grad_x, grad_states,
    grad_weight and grad_bias.
    """
    _check(conv)
    tile = _tile(conv, gpu, backward=True)
    tiles = ceil_div(conv.length, tile.positions)
    units, across = conv.batch * tiles, ceil_div(conv.dim, tile.channels)
    wanted = units * across // (gpu.sm_count * BLOCKS_PER_SM)
    per_block = max(1, min(wanted, units, MOST_TILES_OF_A_BLOCK))
    shares = ceil_div(units, per_block)
    constants: dict[str, Constant] = {
        "grad_vector": _staged_vector(conv, tile, grad),
        "parameters": parameters,
    }
    launch = Launch(
        _kernel(conv, tile, "backward", constants),
        _grid(across * shares),
        tile.threads,
        _backward_bytes(conv, tile),
        (
            *("x", "weight", "bias", "seq_idx", "initial_states", "grad", "grad_final"),
            *("grad_x", "grad_states", "scratch"),
            *(conv.dim, conv.length, tiles, units, per_block, shares),
            *(*_wide(conv.x.batch), *_wide(conv.x.row), *_wide(grad.batch), *_wide(grad.row)),
        ),
    )
    if not parameters:
        return Plan((launch,), 0, FAMILY, _why(conv))
    scratch = shares * (conv.width + 1) * conv.dim * conv.sum_bytes
    reduce = reduction(conv, shares, bias=True, weight_strides=(conv.width, 1))
    return Plan((launch, reduce), scratch, FAMILY, _why(conv))


def update(steps: Update) -> Plan:
    """Plans steps: tensors x, conv_state, weight, bias, cache_seqlens, conv_state_indices, y."""
    constants: dict[str, Constant] = {
        "Scalar": steps.scalar,
        "WeightScalar": steps.weight_scalar,
        "width": steps.width,
        "silu": steps.silu,
        "circular": steps.circular,
        "threads": MOST_THREADS,
    }
    strides = (part for stride in (*steps.x, *steps.state) for part in _wide(stride))
    launch = Launch(
        Kernel("causal/update.cuh", "causal_update", tuple(constants.items())),
        _grid(steps.batch * ceil_div(steps.dim, MOST_THREADS)),
        MOST_THREADS,
        0,
        (
            *("x", "conv_state", "weight", "bias", "cache_seqlens", "conv_state_indices", "y"),
            *(steps.dim, steps.steps, steps.states, *strides),
        ),
    )
    return Plan((launch,), 0, FAMILY, f"steps of a causal convolution, width {steps.width}")


def reduction(
    conv: Convolution, shares: int, bias: bool, weight_strides: tuple[int, ...]
) -> Launch:
    """Adds up the shares' partial sums; the strides are those of a weight's channels and taps."""
    threads = 256
    constants: dict[str, Constant] = {
        "WeightScalar": conv.weight_scalar,
        "width": conv.width,
        "bias": bias,
        "weight_stride_out": weight_strides[0],
        "weight_stride_width": weight_strides[1],
        "threads": threads,
    }
    return Launch(
        Kernel("causal/reduce.cuh", "causal_reduce", tuple(constants.items())),
        _grid((conv.width + bias) * ceil_div(conv.dim, 32)),
        threads,
        threads * conv.sum_bytes,
        ("scratch", "grad_weight", "grad_bias", conv.dim, shares),
    )


def _kernel(conv: Convolution, tile: Tile, name: str, more: dict[str, Constant]) -> Kernel:
    constants: dict[str, Constant] = {
        "Scalar": conv.scalar,
        "WeightScalar": conv.weight_scalar,
        "width": conv.width,
        "channels_last": conv.channels_last,
        "silu": conv.silu,
        "sequences": conv.sequences,
        "threads": tile.threads,
        "lanes": tile.lanes,
        "group": tile.group,
        "tile": tile.positions,
        "shift": conv.halo - (conv.width - 1),
        "load_vector": _staged_vector(conv, tile, conv.x),
        # Results are new tensors without gaps, which PyTorch aligns.
        "store_vector": tile.group if conv.channels_last else conv.vector(Layout(0, 0)),
        **more,
    }
    return Kernel(f"causal/{name}.cuh", f"causal_{name}", tuple(constants.items()))


def _staged_vector(conv: Convolution, tile: Tile, layout: Layout) -> int:
    vector = conv.vector(layout)
    if not conv.channels_last:
        return vector
    within = gcd(vector, tile.channels)
    return within if within * conv.scalar_bytes >= 4 else 1


# --- Tiles ----------------------------------------------------------------------------------------


def _tile(conv: Convolution, gpu: Gpu, backward: bool) -> Tile:
    if not conv.channels_last:
        return _contiguous_tile(conv)
    needed = _backward_bytes if backward else _forward_bytes
    group = 2 if conv.scalar_bytes == 2 and conv.dim % 2 == 0 and conv.width <= WIDEST_PAIR else 1
    # Half as many positions in a backward pass, which stages three tensors.
    return channels_last_tile(conv, gpu, group, 64 if backward else 128, needed)


def channels_last_tile(
    conv: Convolution,
    gpu: Gpu,
    group: int,
    positions: int,
    needed: Callable[[Convolution, Tile], int],
) -> Tile:
    """A tile of so many positions with 32 lanes, or smaller: two fit an SM's shared memory.

    ``needed`` says how many bytes a block with a tile takes. Kernels with many taps get twice the
    positions.
    """
    positions *= 1 if conv.width <= WIDEST_PAIR else 2
    lanes = min(32, _power_of_two(ceil_div(conv.dim, group)))
    while True:
        for shorter in (1, 2, 4):
            tile = _tile_of_lanes(conv, group, lanes, positions // shorter * 32 // lanes)
            if needed(conv, tile) <= gpu.shared_budget(2):
                return tile
        lanes //= 2  # halos of wide kernels in float64, where shared memory is small


def _contiguous_tile(conv: Convolution) -> Tile:
    """One or two runs for each thread, with fewer threads for short sequences."""
    threads = 32
    while threads < MOST_THREADS and threads * conv.run < conv.length:
        threads *= 2
    at_once = threads * conv.run
    return Tile(threads, 1, 1, at_once if at_once >= conv.length else 2 * at_once)


def _tile_of_lanes(conv: Convolution, group: int, lanes: int, most: int) -> Tile:
    positions = max(conv.run, min(most, _power_of_two(conv.length)))
    segments = min(MOST_THREADS // lanes, positions // conv.run)
    return Tile(max(32, lanes * segments), lanes, group, positions)


def _forward_bytes(conv: Convolution, tile: Tile) -> int:
    """Shared memory of a block of ``forward.cuh``."""
    staged = conv.halo + tile.positions
    direct = conv.channels_last or conv.vector(Layout(0, 0)) == conv.run
    return (
        round_up(staged * tile.channels * conv.scalar_bytes, 16)
        + (round_up(4 * staged, 16) if conv.sequences else 0)
        + (0 if direct else tile.positions * conv.scalar_bytes)
    )


def _backward_bytes(conv: Convolution, tile: Tile) -> int:
    """Shared memory of a block of ``backward.cuh``."""
    gradients = tile.positions + round_up(conv.width - 1, conv.run)
    staged = conv.halo + gradients
    in_loop = (
        round_up(staged * tile.channels * conv.scalar_bytes, 16)
        + round_up(gradients * tile.channels * conv.scalar_bytes, 16)
        + gradients * tile.channels * conv.sum_bytes
        + (4 * staged if conv.sequences else 0)
    )
    return max(in_loop, sums_bytes(conv, tile))


def sums_bytes(conv: Convolution, tile: Tile) -> int:
    """Shared memory in which a block adds up its threads' sums, see ``sums.cuh``."""
    if conv.channels_last:
        sums = min(conv.width + 1, SUMS_AT_ONCE) * tile.threads * tile.group
    else:
        sums = (conv.width + 1) * tile.threads // 32
    return sums * conv.sum_bytes


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _wide(number: int) -> tuple[int, int]:
    """Returns a 64-bit number as two arguments, the lower 32 bits first."""
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low, number >> 32


def _grid(blocks: int) -> tuple[int, int, int]:
    """Returns the grid of so many blocks, which are one axis, the only one beyond 65535."""
    if blocks >= 1 << 31:
        raise NotImplementedError(
            f"fastconv's causal kernels have below 2**31 blocks, but these tensors need {blocks}"
        )
    return blocks, 1, 1


def _check(conv: Convolution) -> None:
    """Raises if a number is too large for kernels, which take sizes as 32-bit ints."""
    if max(conv.dim, conv.length, conv.batch * ceil_div(conv.length, conv.run)) >= END:
        raise NotImplementedError(
            f"fastconv's causal kernels take sizes below {END}, but got x of shape "
            f"{(conv.batch, conv.dim, conv.length)}"
        )


def _why(conv: Convolution) -> str:
    layout = "channels-last" if conv.channels_last else "contiguous"
    return f"a causal convolution of width {conv.width}, {layout}"
