"""Plans channels-last layers with the NHWC implicit GEMM, in TF32 or 16-bit types."""

from __future__ import annotations

from math import prod

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Plan,
    TensorMap,
    depth_constants,
    epilogue_constants,
    problem_constants,
)
from fastconv.kernels.hopper.im2col import SPAN, Layer, input_map, layer_of
from fastconv.kernels.hopper.implicit_gemm_nhwc.tiles import (
    ROWS,
    Tile,
    image_cycles,
    tiles_of,
    without_statistics,
)
from fastconv.kernels.planning.launches import MOST_PACK_BLOCKS, PACK_THREADS

__all__ = ["image_cycles", "layer_of", "plan", "plans"]

SOURCE = "hopper/implicit_gemm_nhwc/kernel.cuh"


def plans(layer: Layer, gpu: Gpu, most: int) -> list[Plan]:
    """The ``most`` plans with the fewest estimated cycles. All give the same bits.

    They leave no statistics if no tile has registers for them.
    """
    found = tiles_of(layer, gpu) or tiles_of(without_statistics(layer), gpu)
    return [plan(tile, gpu) for tile in found[:most]]


def plan(tile: Tile, gpu: Gpu) -> Plan:
    """The launches that compute a layer with a tile."""
    layer, batch = tile.layer, tile.layer.problem.batch
    tiles = tile.tiles(batch)
    blocks = min(tiles, gpu.sm_count * tile.blocks)
    shares = 0
    if tile.gives_statistics:  # a block's tiles have the same channels
        shares = tile.shares(batch, at_once=blocks)
        blocks = shares * tile.column_tiles
    # A block's tile numbers, with the one beyond its last tile, have to fit 32 bits.
    if max(tiles + blocks, batch * prod(layer.positions) + tile.rows) >= 2**31:
        size = " by ".join(map(str, layer.positions))
        raise Declined(f"{batch} images of {size} positions, 2^31 and more")
    constants = tuple(_constants(tile).items())
    launch = Launch(
        Kernel(SOURCE, "implicit_gemm_nhwc", constants),
        (blocks, 1, 1),
        tile.threads,
        tile.shared_bytes,
        (
            input_map(layer, tile.rows, promotion=256),
            _weight_map(tile),
            _output_map(tile),
            "bias",
            "output",
            batch,
            *layer.operands.residuals,
            *(("statistics",) if tile.gives_statistics else ()),
        ),
        early=True,
    )
    weights, vector = layer.weights, layer.operands.vector
    pack = Launch(
        Kernel(SOURCE, "pack", constants),
        (min(ceil_div(weights // vector, PACK_THREADS), MOST_PACK_BLOCKS), 1, 1),
        PACK_THREADS,
        0,
        ("weight", "scratch"),
    )
    why = (
        f"tensor cores: {tile.rows} pixels by {tile.columns} channels a block, as an implicit GEMM"
    )
    return Plan(
        (pack, launch) if layer.packs else (launch,),
        layer.operands.scalar_bytes * weights if layer.packs else 0,
        "hopper",
        why,
        choice=tile.name,
        packs=int(layer.packs),
        cycles=tile.cycles(gpu.sm_count),
        shares=shares,
    )


def _weight_map(tile: Tile) -> TensorMap:
    layer, inner = tile.layer, tile.layer.inner
    shape, strides = layer.problem.weight_shape, layer.weight_strides
    outer, taps = 1 - inner, range(len(shape) - 1, 1, -1)
    along = ROWS if layer.n_major else tile.columns
    return TensorMap(
        "scratch" if layer.packs else "weight",
        layer.loaded_scalar,
        (shape[inner], *(shape[axis] for axis in taps), shape[outer]),
        tuple(layer.operands.scalar_bytes * strides[axis] for axis in (*taps, outer)),
        (layer.depth, *(1 for _ in taps), along),
        swizzle=128,
    )


def _output_map(tile: Tile) -> TensorMap:
    """The tensor map of the output, from which a warp stores 16 positions.

    Used only if positions are pixels. Otherwise there are more pixels than positions, maybe more
    than a tensor map can describe, and the kernel stores without it.
    """
    layer = tile.layer
    pixels = layer.problem.batch * prod(layer.positions)
    pitch = layer.operands.scalar_bytes * layer.out_channels
    sizes: tuple[int, ...] = (layer.out_channels, pixels)
    strides: tuple[int, ...] = (pitch,)
    box: tuple[int, ...] = (layer.depth, 16)
    if tile.joined > 1:
        sizes = (layer.depth, layer.out_channels // layer.depth, pixels)
        strides, box = (SPAN, pitch), (layer.depth, tile.joined, 16)
    return TensorMap("output", layer.operands.scalar, sizes, strides, box, swizzle=128)


def _constants(tile: Tile) -> dict[str, Constant]:
    layer, problem = tile.layer, tile.layer.problem
    return {
        "Scalar": layer.operands.scalar,
        "transposed": layer.transposed,
        "flat": layer.flat,
        "dense": layer.dense,
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "weight_in": problem.in_channels,
        "weight_out": problem.out_channels,
        "image_height": layer.image_size[-2],
        "image_width": layer.image_size[-1],
        "position_rows": layer.positions[-2],
        "position_columns": layer.positions[-1],
        "lower_height": layer.lower[-2],
        "lower_width": layer.lower[-1],
        "input_step_height": layer.steps[-2],
        "input_step_width": layer.steps[-1],
        **problem_constants(problem, layer.operands),
        **depth_constants(problem, layer.operands, layer.transposed),
        "patch_rows": layer.patches.rows if layer.patches else 0,
        "patch_width": layer.patches.width if layer.patches else 0,
        "patch_pitch": layer.patches.pitch if layer.patches else 0,
        "last_residue_first": any(len(axis[0]) < len(axis[-1]) for axis in layer.reads),
        "consumers": tile.consumers,
        "tile_columns": tile.columns,
        "blocks": tile.blocks,
        "stages": tile.stages,
        "buffers": tile.buffers,
        "joined": tile.joined,
        "resident": tile.resident,
        "wide_places": problem.batch * prod(layer.image_size) >= 2**31,
        "aligned_bias": layer.operands.aligned_bias,
        "ties_to_even": layer.operands.scalar == "float",
        **epilogue_constants(layer.operands.epilogue),
        **({"statistics": True} if tile.gives_statistics else {}),
    }
