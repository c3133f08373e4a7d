"""Plans weight gradients with ``ampere/wgrad_halo/kernel.cuh``.

There are many ways to cut the weights into tiles and the pixels into steps that fit registers and
shared memory. The plan takes the one that is estimated to be fastest.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from fastconv.kernels.ampere import block
from fastconv.kernels.ampere.wgrad_halo.tiles import (
    BLOCK_CYCLES,
    OCTET,
    THREADS,
    WARPS,
    Tile,
    most_units,
)
from fastconv.kernels.arithmetic import ceil_div, divisors, round_up, shares
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Operands,
    Plan,
    depth_constants,
    weight_grad_constants,
)
from fastconv.kernels.planning import limits, portable
from fastconv.kernels.planning.depth import of_planes
from fastconv.kernels.planning.launches import weight_grad_launches
from fastconv.kernels.planning.limits import FLUSH_ADDITIONS, FLUSH_MMAS
from fastconv.problem import Problem

SOURCE = "ampere/wgrad_halo/kernel.cuh"
MOST_STRIP_COLUMNS = 128
STEP_PIXELS = (32, 64, 128, 256, 512)
# MMAs along a slice: the most, and the most that are preferred with 16-bit types.
MOST_SLICE_MMAS = 8
GOOD_SLICE_MMAS = 4
MOST_STEPS = 2**30  # steps of all images, which kernels count in 32 bits
# How many candidates are estimated: weight tiles that fit, and widths of strips for each. Widths
# are sorted by the columns that they waste, in units of 1 / WASTE_STEPS of a row.
MOST_WEIGHT_TILES = 12
MOST_STRIPS = 5
WASTE_STEPS = 24
FEW = "so few channels or pixels that most of the MMA work would not count"


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output`` (the gradient).

    With ``operands.bias_grad``, tensor ``bias_grad`` is filled in the same pass.
    ``operands.input_channels_last`` is the input's format, ``output_channels_last`` that of the
    output's gradient, ``weight_strides`` the result's.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    channels = (problem.in_channels // problem.groups, problem.out_channels // problem.groups)
    block.check(gpu)
    limits.check(operands, problem.groups, channels, *limits.volume_sizes(problem))
    limits.check_reach(problem, operands)
    most = portable.wgrad_cycles(problem, gpu) + 2 * BLOCK_CYCLES
    return plan(choose_tile(problem, operands, gpu, most), gpu)


def plan(tile: Tile, gpu: Gpu) -> Plan:
    """The launches that compute the gradient with a tile."""
    tiles_at_once = min(tile.count, tile.most_blocks)
    workers = tile.workers(gpu)
    launches = weight_grad_launches(
        SOURCE,
        tuple(_constants(tile).items()),
        tile.count,
        tiles_at_once,
        workers,
        THREADS,
        tile.shared_bytes,
        tile.slots * THREADS // tile.warps_pixels,
        tile.problem.batch,
    )
    scratch = tiles_at_once * workers * tile.block_bytes
    return Plan(launches, scratch, "ampere", _why(tile), cycles=tile.cycles(gpu))


def choose_tile(
    problem: Problem, operands: Operands, gpu: Gpu, most_cycles: float = math.inf
) -> Tile:
    """The tile that is estimated to take least, and no more than ``most_cycles``.

    Raises:
        Declined: no tile fits and takes so little.
    """
    volumes = None if problem.depth is None else problem
    if volumes and (operands.input_channels_last or operands.output_channels_last):
        raise Declined("weight gradients of channels-last volumes")
    images = as_one_row(of_planes(problem))
    tiles = [replace(tile, volumes=volumes) for tile in _weight_tiles(images, operands)]
    # Small tiles are for input that would not fit shared memory otherwise.
    large = [tile for tile in tiles if tile.is_large]
    best = _best(large, gpu, most_cycles) or _best(tiles, gpu, most_cycles)
    if best is None:
        fits = most_cycles < math.inf
        raise Declined(FEW if fits else "input rows that do not fit shared memory")
    if best.all_steps >= MOST_STEPS:
        raise Declined(f"{best.all_steps} steps through all images, 2^30 and more")
    return best


def as_one_row(problem: Problem) -> Problem:
    """A pointwise layer with all pixels of an image in one row, which wastes less of strips.

    Other layers stay as they are.
    """
    if problem.kernel_size == problem.stride == (1, 1) and not any(problem.padding):
        height, width = problem.input_size
        return replace(problem, input_size=(1, height * width))
    return problem


def _best(weight_tiles: list[Tile], gpu: Gpu, most_cycles: float) -> Tile | None:
    """The cheapest of the first few weight tiles that fit, with any steps."""
    best, least, tried = None, most_cycles, 0
    bounds = [(each.least_cycles(gpu), i, each) for i, each in enumerate(weight_tiles)]
    for bound, _, weight_tile in sorted(bounds):
        if tried == MOST_WEIGHT_TILES or bound > least:
            break
        fitting = [tile for tile in _with_steps(weight_tile) if tile.fits(gpu)]
        tried += bool(fitting)
        for tile in fitting:
            cycles = tile.cycles(gpu)
            if cycles < least or (cycles == least and best is None):
                best, least = tile, cycles
    return best


def _weight_tiles(problem: Problem, operands: Operands) -> Iterator[Tile]:
    """All ways to cut the weights into tiles whose accumulators fit a block's registers."""
    group_in = problem.in_channels // problem.groups
    octets = shares(ceil_div(group_in, OCTET))
    # With float32, an MMA's columns may be any channels and taps, so channels need not be octets.
    channels = [
        min(OCTET * n, group_in if operands.scalar_bytes == 4 else OCTET * n) for n in octets
    ]
    group_out = problem.out_channels // problem.groups
    taps = [*product(*map(shares, problem.kernel_size))]
    for row_tiles, warps_out, warps_pixels in product((1, 2, 4), (1, 2), (1, 2, 4, 8)):
        outputs = 16 * row_tiles * warps_out
        warps_units = WARPS // (warps_out * warps_pixels)
        if warps_units == 0 or (outputs > 16 and outputs >= 2 * group_out):
            continue
        most = most_units(operands, row_tiles) * warps_units
        for (rows, columns), tile_channels in product(taps, channels):
            units = ceil_div(rows * columns * tile_channels, OCTET)
            whole = (rows, columns) == problem.kernel_size and tile_channels == channels[-1]
            # Warps divide the pixels, or are idle, only if all weights together are too few.
            if units <= most and (
                whole if warps_pixels > 1 or units < warps_units else units >= warps_units
            ):
                yield Tile(
                    problem, operands, row_tiles, warps_out, warps_units, warps_pixels,
                    tile_channels, rows, columns,
                )  # fmt: skip


def _with_steps(weight_tile: Tile) -> Iterator[Tile]:
    """A weight tile with steps of all shapes."""
    advance = limits.row_advance(weight_tile.problem)
    for columns in _strip_columns(weight_tile.problem.output_size[1]):
        strip = replace(weight_tile, strip_columns=columns)
        for rows in _step_rows(strip):
            step = replace(strip, step_rows=rows)
            mmas = _slice_mmas(step)
            if mmas == 0:
                continue
            for rolling in (False, True)[: 1 + (weight_tile.tile_rows > advance)]:
                yield replace(step, slice_mmas=mmas, rolling=rolling)


@cache
def _strip_columns(width: int) -> tuple[int, ...]:
    """Widths of about equal strips: those that waste the fewest columns, the widest first."""
    columns = {round_up(share, 8) for share in shares(width) if share <= MOST_STRIP_COLUMNS}

    def waste(columns: int) -> int:
        return round(WASTE_STEPS * round_up(width, columns) / width)

    best = sorted(columns, key=lambda n: (waste(n), -n))[:MOST_STRIPS]
    return tuple(dict.fromkeys((*best, 8)))


def _step_rows(strip: Tile) -> list[int]:
    """Rows of a step that give it about as many pixels as ``STEP_PIXELS`` lists."""
    unit = 2 if strip.row_pairs else 1
    rows = _shares(strip.walk_rows)
    most = (max(pixels // strip.strip_columns, 1) for pixels in STEP_PIXELS)
    return sorted({round_up(rows[bisect(rows, n) - 1], unit) for n in most})


@cache
def _shares(size: int) -> list[int]:
    return shares(size)


def _slice_mmas(step: Tile) -> int:
    """MMAs along a slice: as many as the code may unroll, a divisor of a row's; or 0."""
    of_row = step.strip_columns // step.mma_columns
    rows = step.step_rows // (2 if step.row_pairs else 1)
    fits = [n for n in divisors(of_row) if rows * of_row // n % step.warps_pixels == 0]
    # With two slices or more, warps alternate between MMAs and other work.
    several = 2 * step.warps_pixels
    good = MOST_SLICE_MMAS if not step.is_16_bit else GOOD_SLICE_MMAS
    few = max((n for n in fits if n <= good and rows * of_row // n >= several), default=0)
    # Rows of five or seven MMAs are better multiplied whole than one MMA at a time.
    return few if few > 2 else max((n for n in fits if n <= MOST_SLICE_MMAS), default=0)


def _constants(tile: Tile) -> dict[str, Constant]:
    split = tile.parts == 2
    chained = tile.step_mmas // tile.warps_pixels
    grad_batch, in_batch = tile.batches
    return {
        **weight_grad_constants(tile.problem, tile.operands),
        **({} if tile.volumes is None else depth_constants(tile.volumes, tile.operands)),
        "parts": tile.parts,
        "row_tiles": tile.row_tiles,
        "units": tile.units,
        "warps_out": tile.warps_out,
        "warps_units": tile.warps_units,
        "warps_pixels": tile.warps_pixels,
        "tile_channels": tile.tile_channels,
        "tile_rows": tile.tile_rows,
        "tile_columns": tile.tile_columns,
        "strip_columns": tile.strip_columns,
        "step_rows": tile.step_rows,
        "steps": tile.steps,
        "slice_mmas": tile.slice_mmas,
        "rolling": tile.rolling,
        "in_vector": tile.in_vector,
        "in_lanes": tile.in_lanes,
        "in_pitch": tile.in_pitch,
        "in_batch": in_batch,
        "shift": tile.shift,
        "grad_vector": tile.grad_vector,
        "grad_lanes": tile.grad_lanes,
        "grad_pitch": tile.grad_pitch,
        "grad_batch": grad_batch,
        "flush_steps": max(1, FLUSH_ADDITIONS // tile.slices if split else FLUSH_MMAS // chained),
        "shared_bytes": tile.shared_bytes,
    }


def _why(tile: Tile) -> str:
    channels = min(tile.tile_channels, tile.group_in)
    return (
        f"tensor cores: tiles of {tile.block_outputs} output channels, {channels} input channels "
        f"and {tile.tile_rows}x{tile.tile_columns} taps, "
        f"{tile.step_rows} rows of {tile.strip_columns} pixels at a time"
    )
