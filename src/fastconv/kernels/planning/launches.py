"""Launches of tensor-core kernels.

A forward pass or input gradient launches kernels that find scales, pack weights, compute, and
repair what scaled fp16 could not. A weight gradient launches kernels that accumulate, and that
reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, TypeVar

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    REGION_ALIGNMENT,
    Argument,
    Constant,
    Declined,
    Kernel,
    Launch,
    Region,
    epilogue_constants,
    geometry_constants,
)
from fastconv.kernels.planning.copies import (
    COPY_THREADS,
    SLAB_CONSTANTS,
    HalfCopy,
    copied_bytes,
)
from fastconv.kernels.planning.layers import AnyLayer, Layer
from fastconv.kernels.planning.limits import MOST_REDUCE_BLOCKS, REDUCE_THREADS
from fastconv.kernels.planning.slabs import Slab, last_rows, slabs_of, whole, whole_constants

PACK_THREADS = 256
SCALE_THREADS = 1024
CLEAR_THREADS = 256
MOST_PACK_BLOCKS = 4096
CONVOLVE_ARGUMENTS = 5  # before the first row of a slab, and the residual

AnyTile = TypeVar("AnyTile")


@dataclass(frozen=True)
class TiledLayer:
    """A layer with its tile: the kernel that computes it, except for its offsets in the workspace.

    ``channels`` are the output channels of all MMAs, those that do not exist included; ``columns``
    likewise the input channels.
    """

    layer: Layer
    source: str
    constants: Mapping[str, Constant]
    grid: int
    threads: int
    shared_bytes: int
    packed_bytes: int
    channels: int
    columns: int
    input: Argument = "input"  # as the kernel that computes takes it
    last_grid: int = 0  # of a volume's last slab, which may have fewer rows


class _Place(NamedTuple):
    """Byte offsets in the workspace, and whether a kernel repairs what is there."""

    packed_at: int = 0
    tables_at: int = 0
    table_channels: int = 0  # output channels, and below input channels
    table_columns: int = 0
    repairs: bool = False


def best_way(
    ways: list[list[AnyLayer]],
    tiles_of: Callable[[list[AnyLayer]], list[tuple[AnyTile, ...]]],
    cost: Callable[[list[AnyLayer], list[tuple[AnyTile, ...]]], float],
    may_cost_less: Callable[[list[AnyLayer], float], bool] = lambda layers, than: True,
) -> tuple[list[AnyLayer], list[tuple[AnyTile, ...]]]:
    """The way that costs an image the least, with each layer's tiles, the best first.

    Ways accumulate in different orders, so the batch must not decide. ``tiles_of`` is not called
    for ways for which ``may_cost_less`` says that they do not cost less than another one.

    Raises:
        Declined: ``tiles_of`` has raised it for all of them.
    """
    best, least = None, math.inf
    reasons: list[str] = []  # not the exceptions: see Declined
    for layers in ways:
        if best is not None and not may_cost_less(layers, least):
            continue
        try:
            tiles = tiles_of(layers)
        except Declined as reason:
            reasons.append(str(reason))
            continue
        cycles = cost(layers, tiles)
        if best is None or cycles < least:
            best, least = (layers, tiles), cycles
    if best is None:
        raise Declined(reasons[0])
    return best


class Launches(NamedTuple):
    """The launches of a pass in order, and their workspace in bytes, with its regions."""

    launches: tuple[Launch, ...]
    scratch_bytes: int
    regions: tuple[Region, ...] = ()


def launches(
    layers: Sequence[TiledLayer], repairs: TiledLayer | None, copies: Sequence[Launch] = ()
) -> Launches:
    """The launches of a pass's layers and their repairs.

    ``copies`` make the channels-last copy of the input that the layers read, one for each slab.
    """
    if repairs is not None:
        [layer] = layers
        return _repaired(layer, repairs)
    pairs = [_pair(one, _Place()) for one in layers]
    cleared = _idle_planes([one.layer for one in layers])
    # A layer's launches have finished with the workspace when the next layer's begin.
    packed_bytes = max(one.packed_bytes for one in layers)
    if not copies:
        return Launches((*chain.from_iterable(pairs), *cleared), packed_bytes)
    region = Region("input_copy", round_up(packed_bytes, REGION_ALIGNMENT))
    found: list[Launch] = []
    for number, (copy, slab) in enumerate(zip(copies, slabs_of(layers[0].layer), strict=True)):
        found.append(copy)
        for one, (pack, convolve) in zip(layers, pairs, strict=True):
            if number == 0 or len(pairs) > 1:
                found.append(pack)
            found.append(_of_slab(convolve, one, slab, region))
    size = region.offset + copied_bytes(layers[0].layer)
    return Launches((*found, *cleared), size, (region,))


def _of_slab(convolve: Launch, one: TiledLayer, slab: Slab, copy: Region) -> Launch:
    """The launch that computes a slab from a copy of what it reads."""
    _, *arguments = convolve.arguments[:CONVOLVE_ARGUMENTS]
    residuals = convolve.arguments[CONVOLVE_ARGUMENTS:]
    arguments += (slab.row, slab.first_volume, slab.volumes) if one.layer.slabs else ()
    found = replace(convolve, arguments=(copy.name, *arguments, *residuals))
    rows = last_rows(one.layer)
    if not slab.is_last or rows == one.layer.out_size[0]:
        return found
    constants = {**dict(convolve.kernel.constants), "out_height": rows}
    kernel = replace(convolve.kernel, constants=tuple(constants.items()))
    return replace(found, kernel=kernel, grid=(one.last_grid, 1, 1))


def _idle_planes(layers: list[Layer]) -> Iterator[Launch]:
    """The launches that clear the planes of volumes which none of the layers write."""
    layer, depth = layers[0], layers[0].depth
    if depth is None:
        return
    written = {one.depth.at for one in layers if one.depth is not None}
    channels = layer.groups * layer.out_channels
    last = layer.operands.output_channels_last
    rows, columns = layer.image_size
    volumes = whole(layer).batch // layer.planes
    planes = volumes * (1 if last else channels) * ceil_div(depth.image_size, depth.step)
    for first in sorted(set(range(min(depth.step, depth.image_size))) - written):
        constants: dict[str, Constant] = {
            "Scalar": layer.operands.scalar,
            "rows": 1 if last else channels,
            "depth": depth.image_size,
            "first": first,
            "step": depth.step,
            "plane": rows * columns * (channels if last else 1),
        }
        yield Launch(
            Kernel("device/tensor/clear_planes.cuh", "clear_planes", tuple(constants.items())),
            (min(planes, MOST_PACK_BLOCKS), 1, 1),
            CLEAR_THREADS,
            0,
            ("output", volumes),
        )


def _repaired(one: TiledLayer, repairs: TiledLayer) -> Launches:
    """The launches of a layer in scaled fp16, and those that repair what does not fit it."""
    layer = one.layer
    first = repairs.packed_bytes
    tables = first + one.packed_bytes
    place = _Place(first, tables, one.channels, one.columns)
    again = place._replace(packed_at=0, repairs=True)
    images = whole(layer).batch // layer.copied_planes * (one.columns + 2)
    scratch = tables + 4 * (one.channels + one.columns + images)
    if layer.half_copy:
        return _repaired_copy(one, repairs, place, again, scratch)
    pack, convolve = _pair(one, place)
    found = (_scale(layer, pack.kernel), pack, convolve, *_pair(repairs, again))
    return Launches((*found, *_idle_planes([layer])), scratch)


def _repaired_copy(
    one: TiledLayer, repairs: TiledLayer, place: _Place, again: _Place, scratch: int
) -> Launches:
    """The same with a float16 copy of the input, a region behind ``scratch`` bytes."""
    layer, copy = one.layer, HalfCopy.of(one.layer)
    pack, convolve = _pair(one, place, copy.constants)
    if layer.slabs is not None:
        pack = replace(pack, kernel=_of_whole(pack.kernel, layer))
    region = Region("input_copy", round_up(scratch, REGION_ALIGNMENT))
    found = [_scale(layer, pack.kernel), pack]
    for slab in slabs_of(layer):
        found += [_copy(layer, convolve, slab), _of_slab(convolve, one, slab, region)]
    # The kernel that repairs finds marks by the planes that share a copy.
    found += _pair(repairs, again, {"copied_planes": copy.planes})
    return Launches((*found, *_idle_planes([layer])), region.offset + copy.bytes, (region,))


def _of_whole(kernel: Kernel, layer: Layer) -> Kernel:
    """The kernel that samples the whole input, of a layer that computes slabs."""
    constants = {**dict(kernel.constants), **whole_constants(layer)}
    for name in SLAB_CONSTANTS:
        del constants[name]
    return replace(kernel, constants=tuple(constants.items()))


def _copy(layer: Layer, convolve: Launch, slab: Slab) -> Launch:
    """The launch that copies a slab of the input, after that which finds the scales."""
    copy = HalfCopy.of(layer)
    place = (slab.source, slab.first_volume, slab.volumes) if layer.slabs else ()
    return Launch(
        replace(convolve.kernel, entry="copy"),
        (slab.volumes * copy.image_blocks, 1, 1),
        COPY_THREADS,
        copy.shared_bytes,
        ("input", "input_copy", "scratch", whole(layer).batch, *place),
    )


def reduction_bytes(threads: int) -> int:
    """Bytes of shared memory for a block-wide reduction of one number of each thread."""
    return 4 * (threads // 32)


def _scale(layer: Layer, pack: Kernel) -> Launch:
    """The launch that finds the scales of input channels, before ``pack``."""
    residues = layer.s2d_factors[0] * layer.s2d_factors[1]
    channels = layer.in_channels if layer.half_copy else layer.group_in // residues
    return Launch(
        replace(pack, entry="scale"),
        (min(layer.groups * channels, MOST_PACK_BLOCKS), 1, 1),
        SCALE_THREADS,
        reduction_bytes(SCALE_THREADS),
        ("weight", "scratch", whole(layer).batch),
    )


def _pair(
    one: TiledLayer, place: _Place, more: Mapping[str, Constant] | None = None
) -> tuple[Launch, Launch]:
    """The launches that pack a layer's weights, and that compute it."""
    layer = one.layer
    # A thread's index grows by the number of threads beyond its last vector.
    vectors = one.packed_bytes // 16 + MOST_PACK_BLOCKS * PACK_THREADS
    if vectors >= 2**31 or place.tables_at >= 2**31:
        raise Declined(f"{max(one.packed_bytes, place.tables_at)} bytes of packed weights")
    constants = tuple({**one.constants, **place._asdict(), **(more or {})}.items())
    blocks = ceil_div(one.packed_bytes // 16, PACK_THREADS)
    batch = whole(layer).batch
    if layer.scaled_fp16:
        blocks = place.table_channels + batch // layer.copied_planes
    pack = Launch(
        Kernel(one.source, "pack", constants),
        (min(blocks, MOST_PACK_BLOCKS), 1, 1),
        PACK_THREADS,
        reduction_bytes(PACK_THREADS) if layer.scaled_fp16 else 0,
        ("weight", "input", "scratch", batch),
    )
    convolve = Launch(
        Kernel(one.source, "convolve", constants),
        (one.grid, 1, 1),
        one.threads,
        one.shared_bytes,
        (one.input, "scratch", "bias", "output", batch, *layer.operands.residuals),
    )
    return pack, convolve


def layer_constants(layer: Layer) -> dict[str, Constant]:
    """The constants of a layer that do not depend on its tile."""
    operands = layer.operands
    rows, columns = layer.placing
    return {
        "Scalar": operands.scalar,
        "parts": layer.parts,
        "scaled_fp16": layer.scaled_fp16,
        "low_low_mma": layer.low_low_mma,
        "ties_to_even": layer.ties_to_even,
        "compensated": layer.compensated,
        "transposed": layer.transposed,
        "groups": layer.groups,
        "group_in": layer.group_in,
        "group_out": layer.group_out,
        "in_height": layer.in_size[0],
        "in_width": layer.in_size[1],
        "out_height": layer.out_size[0],
        "out_width": layer.out_size[1],
        **geometry_constants(layer.kernel, layer.stride, layer.dilation, layer.padding, operands),
        "s2d_height": layer.s2d_factors[0],
        "s2d_width": layer.s2d_factors[1],
        "d2s_height": layer.d2s_factors[0],
        "d2s_width": layer.d2s_factors[1],
        "weight_height": layer.weight_kernel[0],
        "weight_width": layer.weight_kernel[1],
        "last_tap_row": rows.last_tap,
        "last_tap_column": columns.last_tap,
        "tap_step_height": rows.tap_step,
        "tap_step_width": columns.tap_step,
        "tap_dilation_height": rows.tap_dilation,
        "tap_dilation_width": columns.tap_dilation,
        "image_height": layer.image_size[0],
        "image_width": layer.image_size[1],
        "out_step_height": rows.step,
        "out_step_width": columns.step,
        "row_at": rows.at,
        "row_begin": rows.begin,
        "row_end": rows.end,
        "column_at": columns.at,
        "column_begin": columns.begin,
        "column_end": columns.end,
        "stacked_columns": layer.stacked_columns,
        "interleave": layer.interleave,
        "in_channels_last": operands.input_channels_last,
        "out_channels_last": operands.output_channels_last,
        "vector_loads": layer.vector_loads,
        **({} if layer.slabs is None else {"slabs": True}),
        **({} if layer.depth is None else layer.depth.constants(operands.weight_strides[2])),
        **epilogue_constants(operands.epilogue),
    }


def weight_grad_launches(
    source: str,
    constants: tuple[tuple[str, Constant], ...],
    count: int,
    tiles_at_once: int,
    workers: int,
    threads: int,
    shared_bytes: int,
    slots: int,
    batch: int,
    grad_output: Argument = "grad_output",
) -> tuple[Launch, ...]:
    """The launches that compute ``count`` tiles of a weight gradient, and reduce them.

    Each tile is accumulated by ``workers`` blocks, each with ``slots`` of 16 bytes. Tiles come in
    rounds, for which the workspace has room.
    """
    found: list[Launch] = []
    for first in range(0, count, tiles_at_once):
        tiles = min(tiles_at_once, count - first)
        found += (
            Launch(
                Kernel(source, "weight_grad", constants),
                (tiles * workers, 1, 1),
                threads,
                shared_bytes,
                (grad_output, "input", "scratch", first, tiles, workers, batch),
            ),
            Launch(
                Kernel(source, "reduce", constants),
                (min(ceil_div(tiles * slots, REDUCE_THREADS), MOST_REDUCE_BLOCKS), 1, 1),
                REDUCE_THREADS,
                0,
                ("scratch", "output", "bias_grad", first, tiles, workers),
            ),
        )
    return tuple(found)
