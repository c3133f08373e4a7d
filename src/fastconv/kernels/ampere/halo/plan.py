"""Plans forward convolutions and input gradients with ``ampere/halo/kernel.cuh``.

The plan takes the tile that fits with the fewest estimated cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from fastconv.kernels import gpus
from fastconv.kernels.ampere import block
from fastconv.kernels.ampere.halo.layer import Layer
from fastconv.kernels.ampere.halo.tiles import INPUT_STAGES, Tile, tiles_of
from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Constant, Declined, Gpu, Operands, Plan
from fastconv.kernels.planning import limits, portable
from fastconv.kernels.planning.launches import (
    TiledLayer,
    best_way,
    launches,
    layer_constants,
)
from fastconv.kernels.planning.layers import forward_ways, input_grad_ways, views
from fastconv.problem import Problem

TilesOf = Callable[[Layer, Gpu], tuple[Tile, ...]]

EXPLAINED = 5  # tiles that a plan's explanation lists
# Shares of a pass's time that launches add to it: those of each layer (a residue of a stride is a
# layer of its own), and the additional ones of scaled fp16.
LAYER_COST = 0.05
SCALED_FP16_COST = 0.05
# Fewest cycles that an image takes with scaled fp16: its share of these launches.
SCALED_FP16_CYCLES = 2.5e5

# Constants that device code shared with Hopper's halo kernel reads, for options that only that has.
ABSENT: dict[str, Constant] = {
    "stack": 1,
    "lead": 0,
    "segment_tiles": 1,
    "wraps": False,
    "rolling": False,
    "watches": False,
    "smaller_part": False,
}


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    limits.check_reach(problem, operands)
    return plan(forward_ways(Layer.of(problem, operands)), gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: tensor ``input`` is the output's gradient, ``output`` the result.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    limits.check_reach(problem, operands)
    return plan(input_grad_ways(Layer.of(problem, operands), problem, most_together=1), gpu)


def plan(ways: list[list[Layer]], gpu: Gpu, tiles: TilesOf | None = None) -> Plan:
    """Plans a pass; each of ``ways`` is a list of layers that together compute it.

    ``tiles`` gives the tiles of a layer, the best first: they are used even where the portable
    kernels are as fast. By default they are :func:`fitting_tiles`.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    tiles_of_layer = tiles or fitting_tiles

    def candidates(layers: list[Layer]) -> list[tuple[Tile, ...]]:
        _check(layers, gpu)
        if tiles is None:
            _check_rate(layers, gpu)
        return [tiles_of_layer(layer, gpu) for layer in layers]

    layers, found = best_way(ways, candidates, _cost)
    repairing = None
    if layers[0].scaled_fp16:
        repairing = tiles_of_layer(replace(layers[0], scaled_fp16=False), gpu)[0]
    return _plan_of(layers, found, repairing)


@lru_cache(maxsize=64)
def fitting_tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    """All tiles that fit, the best first; cached, because a plan uses them more than once."""
    return tuple(tiles_of(views(layer), gpu))


def _check(layers: list[Layer], gpu: Gpu) -> None:
    layer, operands = layers[0], layers[0].operands
    block.check(gpu)
    channels = (layer.in_channels, layer.group_out)
    limits.check(operands, layer.groups, channels, *layer.volume_sizes)


def _check_rate(layers: list[Layer], gpu: Gpu) -> None:
    """Declines layers for which the portable kernels are as fast."""
    counted = _tensor_share(layers) / layers[0].mmas_per_step
    if gpus.rates(gpu).mma[layers[0].multiplied] * counted < portable.rate(gpu):
        raise Declined(f"what plain cores are as fast at: {counted:.0%} of the MMA work counts")


def _tensor_share(layers: list[Layer]) -> float:
    """The share of the MMAs' products that count, for layers of like sizes.

    Idle products at the ends of tiles are not taken into account.
    """
    terms = sum(layer.terms for layer in layers)
    multiplied = sum(layer.steps * 2 * layer.vector_channels * layer.taps for layer in layers)
    rows = layers[0].group_out
    return terms / multiplied * rows / (16 * ceil_div(rows, 16))


def _cost(layers: list[Layer], tiles: list[tuple[Tile, ...]]) -> float:
    fastest = sum(min(one.image_tiles * one.tile_cycles for one in each) for each in tiles)
    more = LAYER_COST * len(layers)
    if not layers[0].scaled_fp16:
        return fastest * (1 + more)
    least = SCALED_FP16_CYCLES / layers[0].planes
    return max(fastest * (1 + more + SCALED_FP16_COST), least)


def _plan_of(layers: list[Layer], tiles: list[tuple[Tile, ...]], repairing: Tile | None) -> Plan:
    """The plan of a way with its tiles; scaled fp16 also has a tile that repairs."""
    repairs = None
    explanation = tuple(line for of_layer in tiles for line in _explanation(of_layer))
    if repairing is not None:
        repairs = _tiled_layer(repairing)
        explanation += (f"beyond float16's range, in TF32: {_explain(repairing)}",)
    chosen = [of_layer[0] for of_layer in tiles]
    return Plan(
        *launches([_tiled_layer(tile) for tile in chosen], repairs)[:2],
        "ampere",
        _why(chosen),
        explanation,
        choice=" + ".join(tile.name for tile in chosen),
        packs=int(len(chosen) == 1 and repairs is None),
        cycles=(1 + LAYER_COST * len(chosen)) * sum(tile.cycles() for tile in chosen),
    )


def _why(tiles: list[Tile]) -> str:
    shapes = dict.fromkeys(
        f"{team.block_channels} channels by {patch.rows} rows of {patch.columns} pixels a block"
        for team, patch in ((tile.team, tile.patch) for tile in tiles)
    )
    residues = f" in {len(tiles)} residues" if len(tiles) > 1 else ""
    share = _tensor_share([tile.layer for tile in tiles])
    scaled = " in scaled fp16, where the range allows it" if tiles[0].layer.scaled_fp16 else ""
    return (
        f"tensor cores{scaled}{residues}: {', '.join(shapes)}; {share:.0%} of the MMA work counts"
    )


def _explanation(tiles: tuple[Tile, ...]) -> list[str]:
    rows, columns = tiles[0].layer.placing
    residue = "" if rows.step == columns.step == 1 else f"residue {rows.at}, {columns.at}: "
    lines = [f"{residue}{len(tiles)} tiles fit; the cheapest, in cycles:"]
    return lines + [_explain(tile) for tile in tiles[:EXPLAINED]]


def _explain(tile: Tile) -> str:
    work = ", ".join(f"{name} {cycles:.0f}" for name, cycles in tile.work.items())
    team, patch = tile.team, tile.patch
    rounds = ceil_div(tile.tiles, team.gpu.sm_count)
    return (
        f"{tile.cycles():.3g}: {team.block_channels} channels x {patch.rows} rows x "
        f"{patch.columns} pixels by {team.warps} warps of {team.register_tile_m} x {team.pixels}, "
        f"{team.loaders} that load, {rounds} rounds: {work}; {tile.shared_bytes // 1024} KiB shared"
    )


def _tiled_layer(tile: Tile) -> TiledLayer:
    layer = tile.layer
    # A block's next tile is as many tiles on as there are blocks, also after its last one.
    if tile.tiles + tile.team.gpu.sm_count >= 2**31:
        raise Declined("more than 2^31 tiles")
    blocks = layer.groups * tile.team.output_groups
    return TiledLayer(
        layer,
        "ampere/halo/kernel.cuh",
        _constants(tile),
        min(tile.tiles, tile.team.gpu.sm_count),
        32 * tile.team.all_warps,
        tile.shared_bytes,
        blocks * layer.chunks * layer.taps * tile.team.tap_bytes,
        blocks * tile.team.block_channels,
        layer.groups * layer.chunks * layer.k_steps * 2 * layer.vector_channels,
    )


def _constants(tile: Tile) -> dict[str, Constant]:
    layer, team, patch = tile.layer, tile.team, tile.patch
    return {
        **layer_constants(layer),
        **ABSENT,
        "warps": team.warps,
        "register_tile_m": team.register_tile_m,
        "channel_groups": team.channel_groups,
        "pixels": team.pixels,
        "block_rows": patch.rows,
        "tile_columns": patch.columns,
        "pitch": patch.pitch,
        "plane_padding": patch.plane_padding,
        "k_steps": layer.k_steps,
        "stage_taps": tile.stage_taps,
        "period_taps": layer.period_taps,
        "flush_taps": layer.flush_taps,
        "input_stages": INPUT_STAGES,
        "weight_stages": tile.weight_stages,
        "resident": tile.resident,
        "loaders": 32 * team.loaders,
        "unit_vectors": 2,
        "batch": tile.batch,
        "batches_ahead": 1,
        "pass_pixels": team.pass_pixels,
        "buffers": team.buffers,
        "store_vector": tile.store_vector,
        "shared_bytes": tile.shared_bytes,
    }
