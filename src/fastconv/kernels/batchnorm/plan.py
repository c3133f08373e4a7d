"""Plans the kernels of batch normalization: how tensors are walked over, constants, and launches.

Constants are what chooses code: types, activation, options, vectors, and whether planes are wide.
All sizes are arguments, so that a network's layers run the same few kernels.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import gcd

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    ALIGNMENT,
    Argument,
    Constant,
    Gpu,
    Kernel,
    Launch,
    Plan,
    epilogue_constants,
)
from fastconv.problem import Epilogue

FAMILY = "batchnorm"
MOST_THREADS = 256  # kMostThreads in walk.cuh
FINISHING_THREADS = 512
FINISHED_AT_ONCE = 8  # kChannels in finish.cuh

MOST_LANES = 32
"""The most threads side by side in a row of a channels-last tensor.

They read 512 consecutive bytes. With more, blocks would have more channels and fewer rows, and
there would be more partial sums.
"""

WIDE_VECTORS = 8
"""Planes of fewer vectors than this are never wide: their first and last vectors are not whole."""

FORWARD_BLOCKS, BACKWARD_BLOCKS = 4, 3
"""The blocks that an SM has at the same time, for which kernels have few enough registers.

Activations of :data:`CURVED` need more registers, and leave room for one block less. So do outputs
of channels-last tensors in 16-bit types, whose threads have eight channels.
"""

CURVED = frozenset(("silu", "gelu", "gelu_tanh"))

IDLE = 1.1
"""How much longer a pass may take because its last blocks leave SMs idle.

More blocks are more even, but each of them leaves partial sums.
"""

MOST_COUNTED = 1 << 16
"""The most elements of a channel that a block adds up, unless a single row has more.

Numbers that a block adds up are differences from one element. If that one is the only one of its
kind, it is up to the square root of this many deviations away, and the variance loses as many bits
as this number has.
"""

UNROLL = 2  # the least kUnroll

END = (1 << 31) - (1 << 16)
"""Sizes are below this, so that numbers of rows and columns beyond a tile are 32-bit ints."""

FROM_OUTPUT = frozenset(("relu", "relu6", "leaky_relu", "sigmoid", "tanh"))
"""Activations whose gradient follows from their output; leaky_relu's if its slope is not below 0.

All others, of which one output has several inputs, are computed again from their input.
"""


@dataclass(frozen=True)
class Normalization:
    """A batch normalization, as far as plans depend on it.

    ``plane`` is the number of elements that a channel has in each image. ``alignment`` is the
    largest power of two, up to 16 bytes, that divides the addresses of all tensors of x's shape.
    """

    scalar: str  # name of the element type of x in device code
    scalar_bytes: int
    parameter: str  # that of weight and bias
    images: int
    channels: int
    plane: int
    channels_last: bool
    activation: str = "identity"
    slope: float = 0.0
    residual: bool = False
    alignment: int = ALIGNMENT

    @property
    def sum_scalar(self) -> str:
        return "double" if self.scalar == "double" else "float"

    @property
    def sum_bytes(self) -> int:
        return max(4, self.scalar_bytes)

    @property
    def count(self) -> int:
        """The number of elements of a channel."""
        return self.images * self.plane


def beside(activation: str, slope: float, residual: bool) -> str | None:
    """Returns which tensor an activation's gradient needs beside x: "output" or "residual"."""
    if not residual or activation == "identity":
        return None
    return "output" if activation in FROM_OUTPUT and slope >= 0 else "residual"


@dataclass(frozen=True)
class Statistics:
    """Which statistics a forward pass normalizes with.

    They are those of the batch, towards which the running ones move by ``momentum``. Without a
    momentum, they are the running ones. Where the convolution before has left so many ``shares`` of
    those of the batch in the workspace, x is not read for them.
    """

    eps: float
    momentum: float | None
    running: str  # name of the element type of the running statistics
    shares: int = 0


@dataclass(frozen=True)
class Tile:
    """How blocks walk over a tensor; see ``walk.cuh``."""

    wide: bool
    vector: int
    plane: int
    segments: int
    group: int
    lanes: int
    at_once: int
    rows: int
    tiles: int

    @property
    def threads(self) -> int:
        return round_up(self.lanes * self.at_once, 32)


def forward(norm: Normalization, statistics: Statistics, gpu: Gpu) -> Plan:
    """Plans the output, and the statistics that it is normalized with.

    Tensors are x, residual, weight, bias, running_mean, running_var, batches, counted, mean, invstd
    and y. Statistics that a convolution has left are the tensor ``scratch``. One is added to
    ``counted``, the number of batches, if it is given; ``batches`` is not given then.
    """
    _check(norm)
    tile = tile_of(norm)
    apply, why = _apply(norm, tile, gpu), _why(norm, tile)
    if statistics.momentum is None:
        return Plan((_finish_running(norm, statistics, gpu), apply), 0, FAMILY, why)
    if statistics.shares:
        given = _finish_statistics(norm, statistics, statistics.momentum, statistics.shares, gpu)
        return Plan((given, apply), 0, FAMILY, why)
    sums = _walk(norm, tile, gpu, FORWARD_BLOCKS, "statistics", {}, ("x", "scratch"))
    shares = sums.grid[0] // tile.tiles
    finish = _finish_statistics(norm, statistics, statistics.momentum, shares, gpu)
    scratch = 3 * shares * norm.channels * norm.sum_bytes
    return Plan((sums, finish, apply), scratch, FAMILY, why)


def output(norm: Normalization, gpu: Gpu) -> Plan:
    """Plans the output alone, as :func:`forward` computes it, where the statistics are known.

    Tensors are x, residual, weight, bias, mean, invstd and y.
    """
    _check(norm)
    tile = tile_of(norm)
    return Plan((_apply(norm, tile, gpu),), 0, FAMILY, _why(norm, tile))


def backward(
    norm: Normalization, of_batch: bool, x: bool, parameters: bool, residual: bool, gpu: Gpu
) -> Plan:
    """Plans gradients: those of ``x``, of weight and bias (``parameters``), of the ``residual``.

    ``of_batch`` says that the statistics are those of the batch. Tensors are grad, x, beside
    (:func:`beside`), weight, bias, mean, invstd, grad_x, grad_residual, grad_weight and grad_bias.
    Without an activation, the gradient of the residual is that of the output, and is not written.
    """
    _check(norm)
    tile = tile_of(norm)
    stores = residual and norm.activation != "identity"
    launches: list[Launch] = []
    scratch = 0
    if parameters or stores or of_batch:
        sums = _grad_sums(norm, tile, gpu, stores)
        shares = sums.grid[0] // tile.tiles
        scratch = 2 * (shares + 1) * norm.channels * norm.sum_bytes
        launches += [sums, _finish_grads(norm, shares, gpu)]
    if x:
        launches.append(_grad_apply(norm, tile, gpu, stores, of_batch))
    return Plan(tuple(launches), scratch, FAMILY, _why(norm, tile))


# --- Tiles ----------------------------------------------------------------------------------------


def tile_of(norm: Normalization) -> Tile:
    """Returns the tile of a block: several channels with narrow rows, or one with wide planes."""
    widest = gcd(ALIGNMENT, norm.alignment) // norm.scalar_bytes
    plane = 1 if norm.channels_last else norm.plane
    rows = norm.count if norm.channels_last else norm.images
    vector = gcd(widest, norm.channels * plane)
    if plane == 1:
        vectors = norm.channels // vector
        lanes = ceil_div(vectors, ceil_div(vectors, MOST_LANES))
        return _narrow(norm, vector, 1, lanes * vector, lanes, rows)
    unit = vector // gcd(vector, plane)  # channels whose elements are whole vectors
    fits = unit * plane <= MOST_THREADS * vector
    if not fits or (vector < widest and plane >= WIDE_VECTORS * widest):
        return _wide(norm, widest)
    most = MOST_THREADS * vector // (unit * plane) * unit
    tiles = ceil_div(norm.channels, most)
    group = min(most, round_up(ceil_div(norm.channels, tiles), unit))
    return _narrow(norm, vector, plane, group, ceil_div(group * plane, vector), rows)


def _narrow(
    norm: Normalization, vector: int, plane: int, group: int, lanes: int, rows: int
) -> Tile:
    at_once = min(MOST_THREADS // lanes, rows)
    tiles = ceil_div(norm.channels, group)
    return Tile(False, vector, plane, 1, group, lanes, at_once, rows, tiles)


def _wide(norm: Normalization, vector: int) -> Tile:
    skew = vector - 1 if norm.plane % vector else 0
    vectors = ceil_div(norm.plane + skew, vector)
    segments = ceil_div(vectors, MOST_THREADS)
    lanes = ceil_div(vectors, segments)
    rows = norm.images * segments
    at_once = min(MOST_THREADS // lanes, rows)
    return Tile(True, vector, norm.plane, segments, 1, lanes, at_once, rows, norm.channels)


def _share(tile: Tile, gpu: Gpu, blocks: int) -> int:
    """Returns how many rows a block has, if an SM has so many blocks at the same time."""
    at_once = gpu.sm_count * blocks
    least = tile.at_once * UNROLL
    of_row = tile.lanes * tile.vector if tile.wide else tile.plane
    most = max(least, MOST_COUNTED // of_row)
    shares = range(ceil_div(tile.rows, most), ceil_div(tile.rows, least) + 1)
    ideal = tile.tiles / at_once
    best, best_rounds = shares[0], float("inf")
    for count in shares[: 4 * ceil_div(at_once, tile.tiles)]:
        rounds = ceil_div(tile.tiles * count, at_once) / count  # the time, in shares of one tile
        if rounds < best_rounds:
            best, best_rounds = count, rounds
        if rounds <= IDLE * ideal:
            break
    return round_up(ceil_div(tile.rows, best), tile.at_once)


# --- Launches -------------------------------------------------------------------------------------


def _apply(norm: Normalization, tile: Tile, gpu: Gpu) -> Launch:
    constants: dict[str, Constant] = {
        "Parameter": norm.parameter, "activation": _activation(norm), "adds": norm.residual
    }  # fmt: skip
    tensors = ("x", "residual", "weight", "bias", "mean", "invstd", "y")
    many = norm.activation in CURVED or (not tile.wide and tile.vector == 8)
    return _walk(norm, tile, gpu, FORWARD_BLOCKS - many, "apply", constants, tensors)


def _grad_sums(norm: Normalization, tile: Tile, gpu: Gpu, stores: bool) -> Launch:
    tensors = (
        "grad", "x", "beside", "weight", "bias", "mean", "invstd", "grad_residual", "scratch"
    )  # fmt: skip
    constants = {**_gradient(norm, _source(norm)), "stores": stores}
    blocks = BACKWARD_BLOCKS - (norm.activation in CURVED)
    return _walk(norm, tile, gpu, blocks, "grad_sums", constants, tensors)


def _grad_apply(norm: Normalization, tile: Tile, gpu: Gpu, stored: bool, of_batch: bool) -> Launch:
    """The launch that follows; ``stored`` says that gradients before the activation are stored."""
    source = 0 if stored else _source(norm)
    tensors = (
        "grad_residual" if stored else "grad", "x", "beside", "weight", "bias", "mean", "invstd",
        "scratch", "grad_x",
    )  # fmt: skip
    constants = {**_gradient(norm, source), "centers": of_batch}
    blocks = BACKWARD_BLOCKS - (source > 0 and norm.activation in CURVED)
    return _walk(norm, tile, gpu, blocks, "grad_apply", constants, tensors)


def _source(norm: Normalization) -> int:
    """What the activation's gradient is computed from, as ``grad.cuh`` numbers it."""
    if norm.activation == "identity":
        return 0
    return {None: 1, "residual": 2, "output": 3}[beside(norm.activation, norm.slope, norm.residual)]


def _gradient(norm: Normalization, source: int) -> dict[str, Constant]:
    activation = _activation(norm) if source else "fastconv::Identity"
    return {"Parameter": norm.parameter, "activation": activation, "source": source}


def _activation(norm: Normalization) -> str:
    constants = epilogue_constants(Epilogue(norm.activation, norm.slope))
    return str(constants.get("activation", "fastconv::Identity"))


def _walk(
    norm: Normalization,
    tile: Tile,
    gpu: Gpu,
    blocks: int,
    name: str,
    constants: dict[str, Constant],
    tensors: tuple[str, ...],
) -> Launch:
    """Returns the launch of a kernel that walks over tensors, with so many blocks on an SM."""
    rows = _share(tile, gpu, blocks)
    constants = {
        "Scalar": norm.scalar,
        "vector": tile.vector,
        "wide": tile.wide,
        "edges": tile.wide and tile.plane % tile.vector > 0,
        "blocks": blocks,
        **constants,
    }
    sizes = (
        norm.channels, tile.plane, tile.segments, tile.group, tile.lanes, tile.at_once, tile.rows,
        rows, tile.tiles,
    )  # fmt: skip
    # kPadding in sums.cuh
    sums = tile.threads // 32 if tile.wide else tile.threads * tile.vector + 32
    adds_up = "scratch" in tensors and name != "grad_apply"
    return Launch(
        Kernel(f"batchnorm/{name}.cuh", f"batchnorm_{name}", tuple(constants.items())),
        _grid(tile.tiles * ceil_div(tile.rows, rows)),
        tile.threads,
        2 * sums * norm.sum_bytes if adds_up else 0,
        (*tensors, *sizes),
        early=gpus.begins_early(gpu),
    )


def _finish_running(norm: Normalization, statistics: Statistics, gpu: Gpu) -> Launch:
    tensors = ("running_mean", "running_var", "mean", "invstd")
    arguments: tuple[Argument, ...] = (*tensors, norm.channels, *halves(statistics.eps))
    launch = _finish(norm, "running", norm.parameter, statistics.running, arguments, gpu)
    return replace(launch, grid=_grid(ceil_div(norm.channels, FINISHING_THREADS)), shared_bytes=0)


def _finish_statistics(
    norm: Normalization, statistics: Statistics, momentum: float, shares: int, gpu: Gpu
) -> Launch:
    tensors = ("scratch", "running_mean", "running_var", "batches", "counted", "mean", "invstd")
    numbers = (norm.count, statistics.eps, momentum)
    halved = [half for one in numbers for half in halves(one)]
    arguments: tuple[Argument, ...] = (*tensors, norm.channels, shares, *halved)
    return _finish(norm, "statistics", norm.parameter, statistics.running, arguments, gpu)


def _finish_grads(norm: Normalization, shares: int, gpu: Gpu) -> Launch:
    tensors = ("scratch", "invstd", "grad_weight", "grad_bias")
    arguments: tuple[Argument, ...] = (*tensors, norm.channels, shares, *halves(norm.count))
    return _finish(norm, "grads", norm.parameter, norm.sum_scalar, arguments, gpu)


def _finish(
    norm: Normalization,
    name: str,
    parameter: str,
    running: str,
    arguments: tuple[Argument, ...],
    gpu: Gpu,
) -> Launch:
    constants: dict[str, Constant] = {  # all kernels are in one file, which names both types
        "Acc": norm.sum_scalar,
        "Parameter": parameter,
        "Running": running,
        "threads": FINISHING_THREADS,
    }
    return Launch(
        Kernel("batchnorm/finish.cuh", f"batchnorm_finish_{name}", tuple(constants.items())),
        _grid(ceil_div(norm.channels, FINISHED_AT_ONCE)),
        FINISHING_THREADS,
        FINISHING_THREADS // 32 * FINISHED_AT_ONCE * 2 * norm.sum_bytes,
        arguments,
        early=gpus.begins_early(gpu),
    )


def halves(number: float) -> tuple[int, int]:
    """Returns a double as two 32-bit arguments, the lower half first."""
    low, high = struct.unpack("<ii", struct.pack("<d", number))
    return low, high


def _grid(blocks: int) -> tuple[int, int, int]:
    return blocks, 1, 1


def _check(norm: Normalization) -> None:
    """Raises if a number is too large for kernels, which take sizes as 32-bit ints."""
    plane = 1 if norm.channels_last else norm.plane
    # Rows and blocks are no more than elements of all channels, or segments of all planes.
    rows = norm.count if norm.channels_last else norm.images * ceil_div(norm.plane, MOST_THREADS)
    if max(norm.channels * plane, rows, norm.images * norm.channels) >= END:
        raise NotImplementedError(
            f"fastconv's batch normalization takes sizes below {END}, but got {norm.images} images "
            f"of {norm.channels} channels of {norm.plane} elements"
        )


def _why(norm: Normalization, tile: Tile) -> str:
    layout = "channels-last" if norm.channels_last else "contiguous"
    return f"batch normalization, {layout}, {'wide' if tile.wide else 'narrow'} rows"
