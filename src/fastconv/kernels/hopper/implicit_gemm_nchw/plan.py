"""Plans contiguous float32 layers in TF32 with the NCHW implicit GEMM.

The order in which a sum is added up (chunks of channels, and taps in a chunk) depends on the layer
alone, so the choice of a tile does not change the bits of the result.
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
from fastconv.kernels.hopper.implicit_gemm_nchw.tiles import MOST_COLUMNS, Tile, tiles_of
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.launches import MOST_PACK_BLOCKS, PACK_THREADS
from fastconv.problem import Problem

SOURCE = "hopper/implicit_gemm_nchw/kernel.cuh"
MOST_TAPS = 32
MOST_RESIDUE_UNITS = 9  # units of a layer with several residues: each has code of its own
MOST_RESIDUES = 16  # the epilogue of each has code of its own
LEAST_CHANNELS = 8  # K of a TF32 wgmma
PRODUCER_REGISTERS = 40  # of a thread
EXPLAINED = 5  # tiles that an explanation lists


def layer_of(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool) -> Layer:
    """The layer of a forward pass, or of an input gradient.

    Raises:
        Declined: the kernel cannot compute it.
    """
    layer = Layer(problem, operands, transposed)
    _check(layer, gpu)
    _tiles(layer, gpu)
    return layer


def image_cycles(layer: Layer, gpu: Gpu) -> float:
    """Cycles of one SM for an image of a large batch, with the best tile for that."""
    return min(tile.image_cycles for tile in _tiles(layer, gpu))


def plans(layer: Layer, gpu: Gpu, most: int) -> list[Plan]:
    """The ``most`` plans with the fewest estimated cycles. All give the same bits."""
    tiles = _tiles(layer, gpu)
    return [_plan(tile, tiles, gpu) for tile in tiles[:most]]


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    return tuple(tiles_of(layer, gpu))


def _check(layer: Layer, gpu: Gpu) -> None:
    problem, operands = layer.problem, layer.operands
    block.check(gpu)
    channels = (layer.group_in, layer.group_out)
    if problem.depth is not None:
        raise Declined("volumes")
    limits.check(operands, problem.groups, channels, layer.in_size, layer.image_size)
    if operands.scalar != "float" or operands.precision != "tf32":
        raise Declined(f"{operands.scalar} in {operands.precision}: planes are multiplied in TF32")
    if operands.input_channels_last or operands.output_channels_last:
        raise Declined("channels-last tensors, which have no planes")
    if not operands.aligned:
        raise Declined("tensors that are not aligned to 16 bytes")
    if layer.group_in < LEAST_CHANNELS:
        raise Declined(f"{layer.group_in} channels, fewer than {LEAST_CHANNELS}")
    if problem.groups > 1 and layer.group_in % LEAST_CHANNELS:
        raise Declined(f"groups of {layer.group_in} channels, no multiple of {LEAST_CHANNELS}")
    if layer.taps > MOST_TAPS:
        raise Declined(f"{layer.taps} taps, more than {MOST_TAPS}")
    residues = layer.axes[0].residues * layer.axes[1].residues
    if residues > MOST_RESIDUES:
        raise Declined(f"{residues} residues, more than {MOST_RESIDUES}")
    reached = layer.reached_residues
    if reached > MOST_COLUMNS // LEAST_CHANNELS:
        raise Declined(f"{reached} residues with taps")
    if reached > 1 and layer.units > MOST_RESIDUE_UNITS:
        raise Declined(f"taps of {reached} residues with {layer.units} different offsets")


def _plan(tile: Tile, tiles: tuple[Tile, ...], gpu: Gpu) -> Plan:
    layer = tile.layer
    batch = layer.problem.batch
    count = tile.tiles(batch)
    positions = batch * tile.shape.image_pixels + tile.shape.tile_pixels
    # A block's tile numbers, with the one beyond its last tile, have to fit 32 bits.
    if max(count + gpu.sm_count, positions, tile.packed_bytes) >= 2**31:
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
        Kernel(SOURCE, "implicit_gemm_nchw", constants),
        (min(count, gpu.sm_count), 1, 1),
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
        "as an implicit GEMM"
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
    rounds = ceil_div(tile.tiles(tile.layer.problem.batch), gpu.sm_count)
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
        "groups": layer.groups,
        "group_in": layer.group_in,
        "group_out": layer.group_out,
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
