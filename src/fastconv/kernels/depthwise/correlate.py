"""Plans forward convolutions and input gradients of narrow groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.depthwise import tiles
from fastconv.kernels.depthwise.layer import Layer
from fastconv.kernels.depthwise.tiles import FAMILY, WHY, Pixels, Planes
from fastconv.kernels.direct import limits
from fastconv.kernels.family import Constant, Declined, Gpu, Kernel, Launch, Operands, Plan
from fastconv.problem import Problem

PACK_THREADS = 256
MOST_PACK_BLOCKS = 4096

_Tile = TypeVar("_Tile", Planes, Pixels)


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: the portable kernels have to do it.
    """
    return _plan(Layer.of(problem, operands, transposed=False), gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: ``input`` is the output's gradient, ``output`` the input's.

    Raises:
        Declined: the portable kernels have to do it.
    """
    return _plan(Layer.of(problem, operands, transposed=True), gpu)


def _plan(layer: Layer, gpu: Gpu) -> Plan:
    tile: Planes | Pixels
    channels_last = layer.operands.input_channels_last
    if channels_last:
        source, tile = "depthwise/pixels.cuh", _best(tiles.pixels(layer), gpu)
    else:
        source, tile = "depthwise/planes.cuh", _best(tiles.planes(layer), gpu)
        tile = tile.spread_over_banks(gpu)
    constants: dict[str, Constant] = {
        **layer.constants(),
        **tile.constants(),
        "shared_bytes": tile.shared_bytes,
        "blocks_per_sm": tile.blocks_per_processor(gpu),
    }
    named = tuple(constants.items())
    launches, packed = [], 0
    if channels_last:
        packed = layer.terms * layer.problem.groups * layer.group_out
        limits.require("a weight's elements", packed)
        blocks = min(ceil_div(packed, PACK_THREADS), MOST_PACK_BLOCKS)
        pack = Kernel(source, "pack", named)
        launches.append(Launch(pack, (blocks, 1, 1), PACK_THREADS, 0, ("weight", "scratch")))
    weights = "scratch" if channels_last else "weight"
    limits.require("blocks of one image", tile.blocks(1))
    at_once = min(layer.problem.batch, limits.MOST_BLOCKS // tile.blocks(1))
    for first in range(0, layer.problem.batch, at_once):
        images = min(at_once, layer.problem.batch - first)
        launches.append(
            Launch(
                Kernel(source, "correlate", named),
                (tile.blocks(images), 1, 1),
                tile.threads,
                tile.shared_bytes,
                ("input", weights, "bias", "output", first, images),
            )
        )
    scratch = packed * layer.operands.scalar_bytes
    return Plan(tuple(launches), scratch, FAMILY, WHY, packs=int(channels_last))


def _best(candidates: Iterable[_Tile], gpu: Gpu) -> _Tile:
    fitting = [tile for tile in candidates if tile.blocks_per_processor(gpu) > 0]
    if not fitting:
        raise Declined("a halo tile that does not fit shared memory")
    return min(fitting, key=lambda tile: tile.cycles(gpu))
