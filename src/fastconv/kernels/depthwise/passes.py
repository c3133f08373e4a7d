"""Plans forward convolutions and input gradients of narrow groups, by ``fma`` or ``toeplitz``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.depthwise.fma import plan as fma
from fastconv.kernels.depthwise.layer import Layer, require
from fastconv.kernels.depthwise.rows import plan as one_row
from fastconv.kernels.depthwise.tiles import FAMILY, WHY, best
from fastconv.kernels.depthwise.toeplitz import plan as toeplitz
from fastconv.kernels.direct import limits
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    epilogue_constants,
)
from fastconv.problem import Problem

PACK_THREADS = 256
MOST_PACK_BLOCKS = 4096
MANY_IMAGES = 32  # batch for which fma and toeplitz are compared, whatever the layer's is
MOST_NARROW_CHANNELS = 4  # limit on a group's channels, for contiguous tensors of 16-bit types

AnyTile = fma.Planes | fma.Pixels | toeplitz.ToeplitzTile


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: this family does not take the layer.
    """
    return _plan(problem, operands, gpu, transposed=False)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: tensor ``input`` is the output's gradient, ``output`` the result.

    Raises:
        Declined: this family does not take the layer.
    """
    return _plan(problem, operands, gpu, transposed=True)


def _plan(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool) -> Plan:
    layer = Layer.of(problem, operands, transposed)
    if problem.input_size[0] == 1 and one_row.takes(layer):
        return one_row.convolve(layer, gpu)
    _check_width(layer)
    return plan(layer, _tile(layer, gpu), gpu)


def plan(layer: Layer, tile: AnyTile, gpu: Gpu) -> Plan:
    """The launches that compute a layer with a tile."""
    source = tile.source
    constants: dict[str, Constant] = {
        **layer.constants(),
        **tile.constants(),
        "shared_bytes": tile.shared_bytes,
        "blocks_per_sm": tile.blocks_per_sm(gpu),
        **epilogue_constants(layer.operands.epilogue),
    }
    named = tuple(constants.items())
    launches, packed = [], 0
    packs = isinstance(tile, fma.Pixels)
    if packs:
        packed = layer.terms * layer.problem.groups * layer.group_out
        blocks = min(ceil_div(packed, PACK_THREADS), MOST_PACK_BLOCKS)
        require("weights, and threads that pack them", packed + blocks * PACK_THREADS)
        pack = Kernel(source, "pack", named)
        launches.append(Launch(pack, (blocks, 1, 1), PACK_THREADS, 0, ("weight", "scratch")))
    weights = "scratch" if packs else "weight"
    require("blocks of one image", tile.blocks(1))
    # Kernels count blocks and planes, of which a block may compute several, in 32-bit ints.
    counted = max(tile.blocks(1), layer.problem.groups * layer.group_out)
    at_once = min(layer.problem.batch, limits.END // counted)
    for first in range(0, layer.problem.batch, at_once):
        images = min(at_once, layer.problem.batch - first)
        launches.append(
            Launch(
                Kernel(source, "convolve", named),
                (tile.blocks(images), 1, 1),
                tile.threads,
                tile.shared_bytes,
                (
                    *("input", weights, "bias", "output", first, images),
                    *layer.operands.residuals,
                ),
            )
        )
    scratch = packed * layer.operands.scalar_bytes
    return Plan(tuple(launches), scratch, FAMILY, WHY, packs=int(packs), cycles=tile.cycles(gpu))


def _check_width(layer: Layer) -> None:
    """Declines wider groups, for which the portable kernels' larger tiles are faster."""
    operands, widths = layer.operands, (layer.group_in, layer.group_out)
    wide = min(widths) > 1 and max(widths) > MOST_NARROW_CHANNELS
    if wide and operands.scalar_bytes == 2 and not operands.input_channels_last:
        raise Declined(f"contiguous groups of more than {MOST_NARROW_CHANNELS} channels")


def _tile(layer: Layer, gpu: Gpu) -> AnyTile:
    if _takes_toeplitz(layer, gpu):
        return best(toeplitz.tiles(layer, gpu), gpu)
    if layer.operands.input_channels_last:
        return best(fma.pixels(layer), gpu)
    return best(fma.planes(layer), gpu).spread_over_banks(gpu)


def _takes_toeplitz(layer: Layer, gpu: Gpu) -> bool:
    """Whether tensor cores are estimated to be faster.

    The answer does not depend on the batch, so that an image's bits do not depend on it either.
    """
    many = replace(layer, problem=replace(layer.problem, batch=MANY_IMAGES))
    try:
        with_toeplitz = best(toeplitz.tiles(many, gpu), gpu)
    except Declined:
        return False
    try:
        return with_toeplitz.cycles(gpu) < best(_fma_tiles(many), gpu).cycles(gpu)
    except Declined:
        return True


def _fma_tiles(layer: Layer) -> Iterator[fma.Pixels] | Iterator[fma.Planes]:
    return fma.pixels(layer) if layer.operands.input_channels_last else fma.planes(layer)
