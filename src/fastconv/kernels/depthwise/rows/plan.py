"""Plans depthwise layers of one row and stride 1: which of them, their tiles, and launches.

Constants are what chooses code: types, taps, layout, vectors and tiles. Lengths and paddings are
arguments, so that sequences of most lengths run the same few kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.causal.plan import (
    CHANNELS_LAST_RUN,
    WIDEST_PAIR,
    Convolution,
    Layout,
    Tile,
    channels_last_tile,
    reduction,
    sums_bytes,
)
from fastconv.kernels.depthwise.layer import CHAIN, Layer
from fastconv.kernels.depthwise.tiles import (
    FAMILY,
    RESERVED_BYTES,
    THREADS_PER_SM,
    lane_channels,
)
from fastconv.kernels.direct import limits
from fastconv.kernels.family import (
    ALIGNMENT,
    Constant,
    Gpu,
    Kernel,
    Launch,
    Plan,
    epilogue_constants,
)

WHY = "a depthwise layer of one row"

LEAST_ROW_BYTES = 1024
"""Shorter rows of contiguous tensors go to kernels whose blocks have several of them."""
LEAST_POSITIONS = 64
"""Shorter sequences in channels-last go to kernels whose blocks have several images."""

MOST_RUNS = 288  # of a contiguous tile, which has one run to three for each thread
MOST_THREADS = 128
# Positions of a channels-last tile with 32 lanes; fewer in a weight gradient, which has two stages
# of two tensors, and half of those in float64. Twice as many with more taps than WIDEST_PAIR.
POSITIONS, GRAD_POSITIONS = 128, 64
BLOCK_UNITS = 1.0  # a block of a weight gradient takes so long besides its units: to begin and end
START = 3000  # cycles until a first block has its tile


def takes(layer: Layer) -> bool:
    """Whether these kernels compute a layer, of which family ``depthwise`` takes all sizes."""
    problem, operands = layer.problem, layer.operands
    one_row = problem.input_size[0] == problem.output_size[0] == problem.kernel_size[0] == 1
    one_row = one_row and problem.padding.top == 0  # or a large stride keeps the padding alone
    one_row = one_row and not layer.is_volume
    multiplier = problem.out_channels // problem.in_channels
    if not one_row or layer.group_in != 1 or multiplier != 1:
        return False
    if problem.stride[1] != 1 or problem.dilation[1] != 1:
        return False
    shortest = min(layer.in_size[1], layer.out_size[1])
    if operands.input_channels_last:
        long_enough = shortest >= LEAST_POSITIONS
    else:
        long_enough = shortest * operands.scalar_bytes >= LEAST_ROW_BYTES
    # A block has a run of eight positions at least, or a row of more.
    positions = problem.batch * problem.groups * max(layer.in_size[1], layer.out_size[1])
    return long_enough and positions // CHANNELS_LAST_RUN < limits.END


def convolve(layer: Layer, gpu: Gpu) -> Plan:
    """Plans a forward convolution or an input gradient."""
    operands, conv = layer.operands, _convolution(layer)
    rows = _Rows.of(layer, gpu, backward=False)
    kernel = Kernel(
        "depthwise/rows/convolve.cuh",
        "convolve",
        tuple((_constants(layer, rows) | {"transposed": layer.transposed}).items())
        + tuple(epilogue_constants(operands.epilogue).items()),
    )
    launch = Launch(
        kernel,
        (rows.blocks, 1, 1),
        rows.tile.threads,
        _forward_bytes(conv, rows.tile, rows.more, rows.whole_words),
        (
            *("input", "weight", "bias", "output", conv.dim),
            *(layer.in_size[1], conv.length, layer.columns.origin, rows.tiles, rows.runs),
            *operands.residuals,
        ),
    )
    tensors = 2 + operands.epilogue.residual
    return Plan((launch,), 0, FAMILY, WHY, cycles=_cycles(layer, tensors, gpu))


def weight_grad(layer: Layer, gpu: Gpu) -> Plan:
    """Plans a weight gradient."""
    operands, conv = layer.operands, _convolution(layer)
    rows = _Rows.of(layer, gpu, backward=True)
    units = conv.batch * rows.tiles
    across = ceil_div(conv.dim, rows.tile.channels)
    shared_bytes = _backward_bytes(conv, rows.tile, rows.more, rows.whole_words)
    per_block = _units_of_block(conv, rows.tile, units, across, shared_bytes, gpu)
    shares = ceil_div(units, per_block)
    launch = Launch(
        Kernel(
            "depthwise/rows/weight_grad.cuh",
            "weight_grad",
            tuple(_constants(layer, rows).items()),
        ),
        (across * shares, 1, 1),
        rows.tile.threads,
        shared_bytes,
        (
            *("grad_output", "input", "scratch", conv.dim),
            *(layer.in_size[1], conv.length, layer.columns.origin, rows.tiles, rows.runs),
            *(units, per_block, shares),
        ),
    )
    reduce = reduction(conv, shares, operands.bias_grad, operands.weight_strides[::3])
    reduce = replace(reduce, arguments=("scratch", "output", "bias_grad", conv.dim, shares))
    scratch = shares * (conv.width + 1) * conv.dim * conv.sum_bytes
    return Plan((launch, reduce), scratch, FAMILY, WHY, cycles=_cycles(layer, 2, gpu))


@dataclass(frozen=True)
class _Rows:
    """How a layer's rows are divided into tiles."""

    tile: Tile
    runs: int  # of a tile, the most
    tiles: int  # of a row
    blocks: int  # for all rows
    shift: int  # kShift in causal/tile.cuh
    more: int  # positions that are staged beyond the tile
    whole_words: bool  # whether all rows of contiguous tensors consist of words of 16 bytes

    @staticmethod
    def of(layer: Layer, gpu: Gpu, backward: bool) -> _Rows:
        if layer.operands.input_channels_last:
            return _Rows._of_positions(layer, gpu, backward)
        return _Rows._of_words(layer)

    @staticmethod
    def _of_words(layer: Layer) -> _Rows:
        conv = _convolution(layer)
        lengths = (layer.in_size[1], conv.length)
        whole = layer.operands.aligned and not any(length % conv.run for length in lengths)
        # A row that begins within a word has up to one word more.
        runs = ceil_div(conv.length + (0 if whole else conv.run - 1), conv.run)
        tiles = ceil_div(runs, MOST_RUNS)
        of_tile = ceil_div(runs, tiles)
        of_thread = ceil_div(round_up(of_tile, 32), MOST_THREADS)
        threads = round_up(ceil_div(of_tile, of_thread), 32)
        shift = layer.columns.origin % conv.run if whole else 0
        chunks = ceil_div(shift + conv.width - 1, conv.run)
        return _Rows(
            Tile(threads, 1, 1, threads * of_thread * conv.run),
            of_tile,
            tiles,
            conv.batch * conv.dim * tiles,
            shift,
            chunks * conv.run,
            whole,
        )

    @staticmethod
    def _of_positions(layer: Layer, gpu: Gpu, backward: bool) -> _Rows:
        conv, more = _convolution(layer), layer.columns.kernel - 1

        def needed(conv: Convolution, tile: Tile) -> int:
            return (
                _backward_bytes(conv, tile, more, True)
                if backward
                else _forward_bytes(conv, tile, more, True)
            )

        group = lane_channels(layer) if conv.width <= WIDEST_PAIR else 1
        positions = POSITIONS
        if backward:
            positions = GRAD_POSITIONS * 4 // conv.sum_bytes
        tile = channels_last_tile(conv, gpu, group, positions, needed)
        tiles = ceil_div(conv.length, tile.positions)
        blocks = conv.batch * tiles * ceil_div(conv.dim, tile.channels)
        return _Rows(tile, tile.positions // conv.run, tiles, blocks, 0, more, True)


def _convolution(layer: Layer) -> Convolution:
    """The layer in the terms of causal convolutions, which have the same tiles."""
    problem, operands = layer.problem, layer.operands
    return Convolution(
        operands.scalar,
        operands.scalar_bytes,
        operands.scalar,
        problem.batch,
        problem.groups,
        layer.out_size[1],
        problem.kernel_size[1],
        operands.input_channels_last,
        silu=False,
        sequences=False,
        x=Layout(0, 0),
    )


def _constants(layer: Layer, rows: _Rows) -> dict[str, Constant]:
    operands, conv, tile = layer.operands, _convolution(layer), rows.tile
    if conv.channels_last:
        load = operands.widest_vector(conv.dim, tile.channels)
        store = tile.group
    else:
        load, store = conv.run, conv.run if rows.whole_words else 1
    return {
        "Scalar": operands.scalar,
        "WeightScalar": operands.scalar,
        "width": conv.width,
        "weight_stride_out": operands.weight_strides[0],
        "weight_stride_width": operands.weight_strides[3],
        "channels_last": conv.channels_last,
        "sequences": False,
        "whole_words": rows.whole_words,
        "threads": tile.threads,
        "lanes": tile.lanes,
        "group": tile.group,
        "tile": tile.positions,
        "shift": rows.shift,
        "load_vector": load,
        "store_vector": store,
    }


def _units_of_block(
    conv: Convolution, tile: Tile, units: int, across: int, shared_bytes: int, gpu: Gpu
) -> int:
    """Units of a block of ``weight_grad.cuh``: those that take the fewest rounds of blocks.

    No thread chains more than CHAIN additions.
    """
    segments = tile.threads // tile.lanes
    of_thread = ceil_div(tile.positions // conv.run, segments) * conv.run
    resident = gpu.sm_count * min(
        gpu.shared_bytes_per_sm // (shared_bytes + RESERVED_BYTES), THREADS_PER_SM // tile.threads
    )

    # Sums that are written and read again, in units, which have two tensors.
    sums = (conv.width + 1) * conv.sum_bytes / (tile.positions * conv.scalar_bytes)

    def cost(per_block: int) -> tuple[float, int]:
        blocks = across * ceil_div(units, per_block)
        return ceil_div(blocks, resident) * (per_block + BLOCK_UNITS + sums), per_block

    return min(range(1, max(1, min(units, CHAIN // of_thread)) + 1), key=cost)


def _forward_bytes(conv: Convolution, tile: Tile, more: int, whole_words: bool) -> int:
    """Shared memory of a block of ``convolve.cuh``."""
    staged = round_up((tile.positions + more) * tile.channels * conv.scalar_bytes, ALIGNMENT)
    # Results that are shifted, and a word more, which is read but not used.
    return staged + (0 if whole_words else tile.positions * conv.scalar_bytes + ALIGNMENT)


def _backward_bytes(conv: Convolution, tile: Tile, more: int, whole_words: bool) -> int:
    """Shared memory of a block of ``weight_grad.cuh``."""
    channel_bytes = tile.channels * conv.scalar_bytes
    inputs = round_up((tile.positions + more) * channel_bytes, ALIGNMENT)
    grads = round_up(tile.positions * channel_bytes, ALIGNMENT)
    grads += 0 if whole_words else ALIGNMENT  # gradients that are shifted as they are read
    return max(2 * (inputs + grads), sums_bytes(conv, tile))


def _cycles(layer: Layer, tensors: int, gpu: Gpu) -> float:
    """The time that memory takes, and that of the products."""
    problem, rates = layer.problem, gpus.rates(gpu)
    elements = problem.batch * problem.groups * max(layer.in_size[1], layer.out_size[1])
    of_sm = elements / gpu.sm_count
    moved = tensors * of_sm * layer.operands.scalar_bytes / rates.memory_bytes
    return START + max(moved, of_sm * problem.kernel_size[1] / rates.float32)
