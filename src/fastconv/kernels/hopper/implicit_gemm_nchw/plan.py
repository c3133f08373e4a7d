"""Plans layers of planes, float32 in TF32, with ``gemm_planes.cuh``.

What decides the order of a sum (chunks of channels, taps in them) is the layer's alone; a tile
changes no bits.
"""

from __future__ import annotations

from functools import lru_cache

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    epilogue_constants,
    geometry_constants,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.implicit_gemm_nchw.layer import Layer
from fastconv.kernels.hopper.implicit_gemm_nchw.tiles import MOST_SUMS, Tile, tiles_of
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.launches import MOST_PACK_BLOCKS, PACK_THREADS
from fastconv.problem import Problem

SOURCE = "hopper/implicit_gemm_nchw/kernel.cuh"
MOST_TAPS = 32
MOST_PHASE_UNITS = 9  # each of which is compiled
MOST_PHASES = 16  # likewise
LEAST_CHANNELS = 8  # of a product
PRODUCER_REGISTERS = 40
EXPLAINED = 5  # tiles


def layer_of(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool) -> Layer:
    """The layer of a forward pass, or of an input gradient.

    Raises:
        Declined: it cannot be computed so.
    """
    layer = Layer(problem, operands, transposed)
    _check(layer, gpu)
    _tiles(layer, gpu)
    return layer


def image_cycles(layer: Layer, gpu: Gpu) -> float:
    """What an image takes, of many, in cycles of one processor."""
    return min(tile.image_cycles for tile in _tiles(layer, gpu))


def plans(layer: Layer, gpu: Gpu, most: int) -> list[Plan]:
    """The plans that the rules like best. All give the same bits."""
    tiles = _tiles(layer, gpu)
    return [_plan(tile, tiles, gpu) for tile in tiles[:most]]


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    return tuple(tiles_of(layer, gpu))


def _check(layer: Layer, gpu: Gpu) -> None:
    problem, operands = layer.problem, layer.operands
    block.check(gpu)
    channels = (layer.in_channels, layer.out_channels)
    limits.check(operands, problem.groups, channels, layer.in_size, layer.image_size)
    if operands.scalar != "float" or operands.precision != "tf32":
        raise Declined(f"{operands.scalar} in {operands.precision}: planes are multiplied in TF32")
    if operands.input_channels_last or operands.output_channels_last:
        raise Declined("channels-last tensors, which have no planes")
    if not operands.aligned:
        raise Declined("tensors that are not aligned to 16 bytes")
    if problem.groups > 1:
        raise Declined(f"{problem.groups} groups")
    if layer.in_channels < LEAST_CHANNELS:
        raise Declined(f"{layer.in_channels} channels, fewer than {LEAST_CHANNELS}")
    if layer.taps > MOST_TAPS:
        raise Declined(f"{layer.taps} taps, more than {MOST_TAPS}")
    phases = layer.axes[0].phases * layer.axes[1].phases
    if phases > MOST_PHASES:
        raise Declined(f"{phases} phases, more than {MOST_PHASES}")
    if layer.phase_sums > MOST_SUMS // LEAST_CHANNELS:
        raise Declined(f"{layer.phase_sums} phases with taps")
    if layer.phase_sums > 1 and layer.units > MOST_PHASE_UNITS:
        raise Declined(f"{layer.units} different offsets of {layer.phase_sums} phases' taps")


def _plan(tile: Tile, tiles: tuple[Tile, ...], gpu: Gpu) -> Plan:
    layer = tile.layer
    batch = layer.problem.batch
    count = tile.tiles(batch)
    positions = batch * tile.shape.image_pixels + tile.shape.tile_pixels
    # A block counts on from its last tile by as many as there are blocks.
    if max(count + gpu.processors, positions, tile.packed_bytes) >= 2**31:
        raise Declined(f"{positions} positions, or {tile.packed_bytes} bytes of packed weights")
    constants = tuple(_constants(tile).items())
    vectors = tile.packed_bytes // 16
    pack = Launch(
        Kernel(SOURCE, "pack", constants),
        (min(ceil_div(vectors, PACK_THREADS), MOST_PACK_BLOCKS), 1, 1),
        PACK_THREADS,
        0,
        ("weight", "scratch"),
    )
    multiply = Launch(
        Kernel(SOURCE, "gemm_planes", constants),
        (min(count, gpu.processors), 1, 1),
        block.THREADS,
        tile.shared_bytes,
        (
            *("input" if tile.cut.bulk else tile.map, "scratch", "bias", "output", batch),
            *layer.operands.residuals,
        ),
        early=True,
    )
    why = (
        f"tensor cores: {tile.shape.tile_pixels} pixels by {tile.columns} channels a block, "
        f"straight from planes"
    )
    explanation = (
        f"{len(tiles)} tiles fit; the cheapest, in cycles:",
        *(_explain(one, gpu) for one in tiles[:EXPLAINED]),
    )
    return Plan(
        (pack, multiply),
        tile.packed_bytes,
        "hopper",
        why,
        explanation,
        choice=tile.name,
        packs=1,
        cycles=tile.cycles(gpu),
    )


def _explain(tile: Tile, gpu: Gpu) -> str:
    work = ", ".join(f"{name} {cycles:.0f}" for name, cycles in tile.work.items())
    rounds = ceil_div(tile.tiles(tile.layer.problem.batch), gpu.processors)
    return (
        f"{tile.cycles(gpu):.3g}: {tile.name}, {rounds} rounds, each {work}; "
        f"{tile.input_stages} and {tile.weight_stages} stages, {tile.shared_bytes // 1024} KiB"
    )


def _constants(tile: Tile) -> dict[str, Constant]:
    layer, cut, operands = tile.layer, tile.cut, tile.layer.operands
    problem = layer.problem
    rows, columns = layer.axes
    height, width = layer.in_size
    in_size = (1, height * width) if cut.flat else (ceil_div(height, cut.row_step), width)
    padding = (problem.padding.top, problem.padding.left)
    return {
        "Scalar": operands.scalar,
        "transposed": layer.transposed,
        "ties_to_even": layer.ties_to_even,
        "group_in": layer.in_channels,
        "group_out": layer.out_channels,
        "in_height": in_size[0],
        "in_width": in_size[1],
        "out_height": layer.image_size[0],
        "out_width": layer.image_size[1],
        **geometry_constants(
            problem.kernel_size, problem.stride, problem.dilation, padding, operands
        ),
        "grid_height": layer.grid[0],
        "grid_width": layer.grid[1],
        "step_height": rows.step // cut.row_step,
        "step_width": columns.step,
        "row_tiles": tile.row_tiles,
        "columns": tile.columns,
        "tile_pixels": tile.shape.tile_pixels,
        "image_pixels": tile.shape.image_pixels,
        "flat": cut.flat,
        "whole": cut.whole,
        "bulk": cut.bulk,
        "piece": cut.piece,
        "row_pixels": cut.row_pixels,
        "pitch": cut.pitch,
        "pieces": tile.pieces[0],
        "chunk": layer.chunk,
        "input_stages": tile.input_stages,
        "weight_stages": tile.weight_stages,
        "resident": tile.resident,
        "vector": tile.vector,
        "pairs": tile.pairs,
        "producer_registers": PRODUCER_REGISTERS,
        "consumer_registers": block.consumer_registers(PRODUCER_REGISTERS),
        "shared_bytes": tile.shared_bytes,
        **epilogue_constants(operands.epilogue),
    }
