"""Plans weight gradients with the wgrad_implicit_gemm kernel."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import (
    Constant,
    Gpu,
    Im2colMap,
    Kernel,
    Launch,
    Plan,
    TensorMap,
    depth_constants,
    problem_constants,
)
from fastconv.kernels.hopper.im2col import input_map
from fastconv.kernels.hopper.wgrad_implicit_gemm import halo, tiles
from fastconv.kernels.hopper.wgrad_implicit_gemm.halo import HaloTile
from fastconv.kernels.hopper.wgrad_implicit_gemm.layer import (
    Layer,
    boxed_layer_of,
    layer_of,
    mirrored_layer_of,
)
from fastconv.kernels.hopper.wgrad_implicit_gemm.tiles import ROWS, Tile
from fastconv.kernels.planning.limits import REDUCE_THREADS

__all__ = [
    "Layer",
    "Tile",
    "bias_of",
    "boxed_layer_of",
    "layer_of",
    "mirrored_layer_of",
    "plan",
    "tiles_of",
]

SOURCE = "hopper/wgrad_implicit_gemm/kernel.cuh"
HALO_SOURCE = "hopper/wgrad_implicit_gemm/halo_kernel.cuh"
BIAS_SOURCE = "direct/bias_grad.cuh"
BIAS_BLOCKS = 1024


def tiles_of(layer: Layer, gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the fastest first.

    Raises:
        Declined: there are none.
    """
    found = halo.tiles_of(layer, gpu) if layer.boxed else tiles.tiles_of(layer, gpu)
    return sorted(found, key=lambda tile: tile.cycles(gpu))


def plan(tile: Tile, gpu: Gpu, in_slabs: bool = False, most_registers: int = 0) -> Plan:
    """The launches that compute a layer with a tile, but for the bias's gradient if ``in_slabs``.

    Then the layer is one slab of a gradient, and the first launch's last arguments are the number
    of the slab and where its copies' images begin: all slabs are added up in the workspace. The
    tile's accumulators have to be reduced. If ``most_registers`` are given, threads have no more.
    """
    layer = tile.layer
    share = (tile.group_tiles, tile.group_blocks, tile.most_runs, layer.problem.batch)
    of_slabs: dict[str, Constant] = {"slabs": True} if in_slabs else {}
    if most_registers:
        of_slabs["most_registers"] = most_registers
    constants = tuple((_constants(tile) | of_slabs).items())
    source = HALO_SOURCE if layer.boxed else SOURCE
    multiply = Launch(
        Kernel(source, "wgrad_implicit_gemm", constants),
        (tile.grid, 1, 1),
        tile.threads,
        tile.shared_bytes,
        (_grad_source(tile), _input_source(tile), "scratch", "output", "bias_grad", *share)
        + ((0, 0) if in_slabs else ()),
        early=True,
    )
    slots = tile.count * tile.run_bytes // 16
    reduce = Launch(
        Kernel(source, "reduce", constants),
        (ceil_div(slots * tile.reduce_parts, REDUCE_THREADS), 1, 1),
        REDUCE_THREADS,
        REDUCE_THREADS * 16 if tile.reduce_parts > 1 else 0,
        ("scratch", "output", "bias_grad", *share),
        early=True,
    )
    bias, bias_bytes = ((), 0) if in_slabs else bias_of(tile.layer, tile.layer.grad_output)
    why = (
        f"tensor cores: {tile.rows} by {tile.columns} channels a block, "
        f"as an implicit GEMM over {layer.steps(1)} pixels"
    )
    return Plan(
        (*bias, multiply, *([reduce] if tile.is_reduced else [])),
        max(tile.workspace_bytes, bias_bytes),
        "hopper",
        why,
        choice=tile.name,
        cycles=tile.cycles(gpu),
    )


def bias_of(
    layer: Layer, grad_output: tuple[int, tuple[int, ...], bool], batch: int = 0
) -> tuple[tuple[Launch, ...], int]:
    """Launches for the bias's gradient where MMAs do not give it, and their workspace in bytes.

    They read ``grad_output`` of ``batch`` images, by default as many as the layer has.
    """
    if not layer.operands.bias_grad or layer.sums_bias:
        return (), 0
    channels, size, channels_last = grad_output
    batch = batch or layer.problem.batch
    splits = max(1, min(BIAS_BLOCKS // channels, ceil_div(batch * prod(size), 4096)))
    constants = (
        ("Scalar", layer.operands.scalar),
        ("channels", channels),
        ("height", prod(size[:-1])),
        ("width", size[-1]),
        ("channels_last", channels_last),
    )
    add = Launch(
        Kernel(BIAS_SOURCE, "bias_grad", constants),
        (channels * splits, 1, 1),
        REDUCE_THREADS,
        REDUCE_THREADS * 4,
        ("grad_output", "scratch", splits, batch),
    )
    reduce = Launch(
        Kernel(BIAS_SOURCE, "bias_reduce", constants),
        (ceil_div(channels, REDUCE_THREADS), 1, 1),
        REDUCE_THREADS,
        0,
        ("scratch", "bias_grad", splits),
    )
    return (add, reduce), 4 * channels * splits


def _scalar(tile: Tile) -> str:
    """The element type of a tensor map: TMA rounds float32 to TF32."""
    scalar = tile.layer.operands.scalar
    return "tf32" if scalar == "float" else scalar


def _grad_source(tile: Tile) -> TensorMap | str:
    problem, bytes_ = tile.layer.problem, tile.layer.operands.scalar_bytes
    channels, positions = problem.out_channels, tile.layer.positions
    name = "input" if tile.layer.mirrored else "grad_output"
    if not tile.layer.grad_copied:
        return name
    if isinstance(tile, HaloTile):
        return tile.patch_map
    if tile.layer.channels_last:
        return TensorMap(
            name,
            _scalar(tile),
            (channels, problem.batch * positions),
            (channels * bytes_,),
            (ROWS, tile.depth),
            swizzle=128,
            promotion=128,
        )
    return _plane_map(name, tile, channels, tile.rows)


def _plane_map(name: str, tile: Tile, channels: int, rows: int) -> TensorMap:
    layer, plane = tile.layer, tile.layer.positions * tile.layer.operands.scalar_bytes
    return TensorMap(
        name,
        _scalar(tile),
        (layer.positions, channels, layer.problem.batch),
        (plane, channels * plane),
        (tile.depth, rows, 1),
        swizzle=128,
        promotion=128,
    )


def _input_source(tile: Tile) -> TensorMap | Im2colMap | str:
    name = "grad_output" if tile.layer.mirrored else "input"
    if tile.layer.gathered:
        return name
    if isinstance(tile, HaloTile):
        return tile.box_map
    if tile.layer.pixels:
        return replace(input_map(tile.layer.pixels, tile.depth, promotion=128), tensor=name)
    return _plane_map(name, tile, tile.layer.problem.in_channels, tile.mma_columns)


def _constants(tile: Tile) -> dict[str, Constant]:
    layer, problem = tile.layer, tile.layer.problem
    return {
        "Scalar": layer.operands.scalar,
        "bias": layer.sums_bias,
        "channels_last": layer.channels_last,
        "grad_copied": layer.grad_copied,
        "input_copied": layer.input_copied,
        "flat": layer.flat,
        "few": layer.few,
        "by_taps": layer.by_taps,
        "parts": layer.parts,
        "joined": layer.joined,
        "groups": problem.groups,
        "group_in": problem.in_channels // problem.groups,
        "group_out": problem.out_channels // problem.groups,
        "in_height": problem.input_size[0],
        "in_width": problem.input_size[1],
        "out_height": problem.output_size[0],
        "out_width": problem.output_size[1],
        **problem_constants(problem, layer.operands),
        **depth_constants(problem, layer.operands),
        "weight_start": layer.weight_start,
        "aligned": layer.operands.aligned,
        "row_groups": tile.row_groups,
        "column_groups": tile.column_groups,
        "mma_columns": tile.mma_columns,
        "depth": tile.depth,
        "blocks": tile.blocks,
        "teams": tile.teams,
        "team_warps": tile.team_warps,
        "stages": tile.stages,
        "flush_steps": tile.flush_steps,
        "whole": tile.is_whole,
        "cluster": tile.cluster,
        "reduce_parts": tile.reduce_parts,
        "ties_to_even": layer.operands.scalar == "float",
        **(_halo_constants(tile) if isinstance(tile, HaloTile) else {}),
    }


def _halo_constants(tile: HaloTile) -> dict[str, Constant]:
    rows, columns = tile.patch
    return {
        "halo_units": tile.units,
        "halo_channels": tile.box_channels,
        "halo_mma_chunks": tile.mma_chunks,
        "halo_planes": tile.kernel_planes,
        "halo_rows": tile.kernel_rows,
        "halo_chunks": tile.chunks,
        "patch_rows": rows,
        "patch_columns": columns,
        "split_rows": tile.split_rows,
        "team_warps": 4 if tile.gives_registers else 1,
        "consumer_registers": tile.consumer_registers if tile.gives_registers else 0,
        "producer_registers": halo.PRODUCER_REGISTERS,
    }
