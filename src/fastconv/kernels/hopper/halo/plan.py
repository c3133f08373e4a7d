"""Plans passes with the halo kernel.

Of all tiles that fit shared memory, the plan takes the one with the fewest estimated cycles, which
its slowest part (MMAs, loads or stores) dominates; unless measurements have shown another tile to
be faster (see ``tuned``). ``layers`` describes what is computed, ``shapes`` and ``tiles`` the
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, islice

from fastconv.kernels import tuned
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Operands,
    Plan,
    TensorMap,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.block import CONSUMERS, OUTPUTS, WARPGROUP
from fastconv.kernels.hopper.halo.shapes import least_cycles, shapes_of
from fastconv.kernels.hopper.halo.tiles import (
    Tile,
    item_count,
    segment_tiles,
    tiles_of,
)
from fastconv.kernels.hopper.layers import Layer
from fastconv.kernels.hopper.relayout.plan import copies_of_slabs
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.copies import SM_BYTES, copied_bytes
from fastconv.kernels.planning.launches import (
    TiledLayer,
    best_way,
    launches,
    layer_constants,
)
from fastconv.kernels.planning.layers import views
from fastconv.kernels.planning.limits import ROUNDING
from fastconv.kernels.planning.slabs import (
    in_slabs,
    last_rows,
    of_few_volumes,
    slabs_of,
    whole,
)

EXPLAINED = 5  # tiles that an explanation lists
# Multiply-adds per cycle of an SM's tensor cores, by channels in 16 bytes; and the fewest that have
# to be useful for the tensor cores to be worth it.
TENSOR_MADS = {4: 1024.0, 8: 2048.0}
LEAST_MADS = 64.0
# Shares that are added to an image's cycles: for each layer's launches, and for the launches that
# find out whether scaled fp16 will do, by parts. A small batch pays a larger share, but the choice
# must not depend on the batch. The share is negative in two parts, because three float16 MMAs are
# faster than estimated, and in one part for layers of several taps without a copy, which took 0.7
# to 0.9 of what TF32 with the same estimate took, but 1.3 with strides and dilations.
LAYER_COST = 0.05
SCALED_FP16_COST = {1: 0.05, 2: -0.25}
TAPS_SCALED_FP16_COST = -0.03
SCALED_FP16_CYCLES = (
    2.5e5  # the least cycles of an image in scaled fp16: its share of those launches
)
LAUNCH_CYCLES = 5000.0  # of the launches of a pass


def plan(ways: list[list[Layer]], gpu: Gpu) -> Plan:
    """Plans a pass; each of ``ways`` is a list of layers that together compute it.

    The plan's tensors are ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: the kernel cannot compute the pass, or other kernels do it better.
    """
    return _chosen(_plans(ways, gpu))


def alternatives(ways: list[list[Layer]], gpu: Gpu, most: int) -> list[Plan]:
    """The ``most`` plans of a pass with the fewest estimated cycles. All give the same bits.

    Raises:
        Declined: there are none.
    """
    return list(islice(_plans(ways, gpu), most))


def image_cycles(ways: list[list[Layer]], gpu: Gpu) -> float:
    """The estimated cycles of one SM for an image or a volume.

    Raises:
        Declined: the kernel cannot compute the pass.
    """
    return _cost(*best_way(ways, partial(_checked_tiles, gpu=gpu), _cost, may_take_less))


def may_take_less(layers: list[Layer], cycles: float) -> bool:
    """Whether these layers might take fewer than ``cycles`` cycles for an image.

    False is certain, because it follows from bounds that hold for any tile. The bounds need no tile
    to be fitted to shared memory, which is the slow part of planning.
    """
    cycles *= 1 + ROUNDING
    if _way_cycles(layers, 0.0) >= cycles:
        return False
    *others, last = layers
    of_others = sum(layer.planes * least_cycles(views(layer)) for layer in others)
    # From large to small, because large shapes usually take the fewest cycles.
    shapes = reversed(list(shapes_of(views(last))))
    least = (of_others + last.planes * one.least_cycles for one in shapes)
    return any(_way_cycles(layers, of_shape) < cycles for of_shape in least)


def _check(layers: list[Layer], gpu: Gpu) -> None:
    layer = layers[0]
    channels = (layer.in_channels, layer.out_channels)
    operands = layer.operands
    block.check(gpu)
    # Residues that are channels fill an MMA's rows, however few channels a group has, and estimates
    # tell whether the portable kernels are faster.
    least_group = 1 if layer.depth_to_space else limits.LEAST_GROUP
    limits.check(operands, layer.groups, channels, *layer.volume_sizes, least_group)
    if layer.depth_to_space:
        return
    terms = sum(layer.terms for layer in layers)
    multiplied = sum(layer.terms / layer.tensor_share * layer.mmas_per_step for layer in layers)
    if TENSOR_MADS[layer.vector_channels] * terms / multiplied < LEAST_MADS:
        share = _tensor_share(layers)
        raise Declined(f"so few channels that {share:.0%} of the MMA work would count")


def _tensor_share(layers: list[Layer]) -> float:
    """The share of multiply-adds that count, of layers with about equally many outputs."""
    terms = sum(layer.terms for layer in layers)
    return terms / sum(layer.terms / layer.tensor_share for layer in layers)


def _plans(ways: list[list[Layer]], gpu: Gpu) -> Iterator[Plan]:
    """Plans with every tile that fits, the best first; several layers advance together."""
    layers, tiles = best_way(ways, partial(_checked_tiles, gpu=gpu), _cost, may_take_less)
    if layers[0].slabs is not None:
        layers, tiles = _best_slabs(layers, tiles, gpu)
    explanation = tuple(line for of_layer in tiles for line in _explanation(of_layer, gpu))
    key = _key(layers, gpu)
    repairs = None
    if layers[0].scaled_fp16:
        repairing = _repairs(layers[0], gpu)
        repairs = _tiled_layer(repairing, gpu, repairs=True)
        explanation += (f"beyond float16's range, in TF32: {_explain(repairing, gpu)}",)
    copies = copies_of_slabs(layers[0]) if layers[0].relaid else ()
    copy_cycles = _copy_cycles(layers[0], gpu)
    for rank in range(max(map(len, tiles))):
        chosen = [of_layer[min(rank, len(of_layer) - 1)] for of_layer in tiles]
        made = launches([_tiled_layer(tile, gpu) for tile in chosen], repairs, copies)
        yield Plan(
            made.launches,
            made.scratch_bytes,
            "hopper",
            _why(chosen),
            explanation,
            key,
            " + ".join(tile.name for tile in chosen),
            # Weights can stay packed unless the workspace also holds tables of images (scaled
            # fp16) or copies, or several layers use it in turn.
            packs=int(len(chosen) == 1 and repairs is None and not copies),
            cycles=LAUNCH_CYCLES
            + len(slabs_of(layers[0])) * copy_cycles
            + sum(_slabs_cycles(tile, gpu) for tile in chosen),
            regions=made.regions,
        )


def _best_slabs(
    layers: list[Layer], tiles: list[tuple[Tile, ...]], gpu: Gpu
) -> tuple[list[Layer], list[tuple[Tile, ...]]]:
    """The slabs with which the batch takes the fewest cycles: of whole tiles, planes, or any."""
    most = layers[0].out_size[0]
    heights = dict.fromkeys(_tile_rows(tile) for of_layer in tiles for tile in of_layer[:EXPLAINED])
    wholes = [whole(layer) for layer in layers]
    found = [(layers, tiles)]
    for height in heights:
        rows = most // height * height
        if 0 < rows < most:
            with suppress(Declined):
                fewer = in_slabs(wholes, rows)
                found.append((fewer, _checked_tiles(fewer, gpu)))

    with suppress(Declined):
        fewer = of_few_volumes(wholes)
        found.append((fewer, _checked_tiles(fewer, gpu)))

    def cycles(way: tuple[list[Layer], list[tuple[Tile, ...]]]) -> float:
        layers, tiles = way
        copies = len(slabs_of(layers[0])) * _copy_cycles(layers[0], gpu)
        return copies + sum(_slabs_cycles(of_layer[0], gpu) for of_layer in tiles)

    return min(found, key=cycles)


def _tile_rows(tile: Tile) -> int:
    return tile.shape.tile_rows * tile.layer.row_step


def _slabs_cycles(tile: Tile, gpu: Gpu) -> float:
    """The cycles of all slabs of a tile's layer, the last of which may have fewer rows."""
    of_image, planes = tile.shape.image_tiles, tile.layer.planes
    last_of_image = of_image // tile.shape.row_tiles * _last_row_tiles(tile)
    counts = (
        slab.volumes * planes * (last_of_image if slab.is_last else of_image)
        for slab in slabs_of(tile.layer)
    )
    return sum(ceil_div(count, gpu.sm_count) for count in counts) * tile.tile_cycles


def _last_row_tiles(tile: Tile) -> int:
    """Tiles, one below the other, of a layer's last slab, or of the whole layer."""
    rows = ceil_div(last_rows(tile.layer), tile.layer.row_step)
    return ceil_div(rows, tile.shape.tile_rows)


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    """All tiles that fit, the best first; cached, because planning needs them repeatedly."""
    return tuple(tiles_of(views(layer), gpu))


def _checked_tiles(layers: list[Layer], gpu: Gpu) -> list[tuple[Tile, ...]]:
    _check(layers, gpu)
    return [_tiles(layer, gpu) for layer in layers]


def _cost(layers: list[Layer], tiles: list[tuple[Tile, ...]]) -> float:
    fastest = (
        layer.planes * min(one.shape.image_tiles * one.tile_cycles for one in each)
        for layer, each in zip(layers, tiles, strict=True)
    )
    return _way_cycles(layers, sum(fastest))


def _way_cycles(layers: list[Layer], cycles: float) -> float:
    """The cycles of an image or volume whose tiles take ``cycles``, with its share of launches."""
    more = LAYER_COST * len(layers)
    cycles *= layers[0].in_whole_slabs
    if not layers[0].scaled_fp16:
        return cycles * (1 + more)
    copy = layers[0].input_copy.image_cycles if layers[0].half_copy else 0.0
    cycles *= 1 + more + _scaled_fp16_cost(layers[0])
    return max(cycles + copy, SCALED_FP16_CYCLES)


def _copy_cycles(layer: Layer, gpu: Gpu) -> float:
    """The cycles of the copy that a layer reads of all images, or of one slab of them."""
    if layer.half_copy:
        return layer.input_copy.cycles(gpu.sm_count)
    return 2 * copied_bytes(layer) / SM_BYTES / gpu.sm_count if layer.relaid else 0.0


def _scaled_fp16_cost(layer: Layer) -> float:
    whole = layer.stride == (1, 1) or layer.dilation == (1, 1)
    if layer.parts == 1 and layer.kernel != (1, 1) and whole and not layer.half_copy:
        return TAPS_SCALED_FP16_COST
    return SCALED_FP16_COST[layer.parts]


def _why(tiles: list[Tile]) -> str:
    shapes = dict.fromkeys(
        f"{one.rows} rows of {one.columns} pixels a warpgroup, N = {one.pixels}"
        for one in (tile.shape for tile in tiles)
    )
    residues = (
        f" in {len(tiles)} residues" if len(tiles) > 1 else _residues_as_channels(tiles[0].layer)
    )
    share = _tensor_share([tile.layer for tile in tiles])
    scaled = " in scaled fp16, where the range allows it" if tiles[0].layer.scaled_fp16 else ""
    scaled += _from_a_copy(tiles[0].layer)
    return (
        f"tensor cores{scaled}{residues}: {', '.join(shapes)}; {share:.0%} of the MMA work counts"
    )


def _from_a_copy(layer: Layer) -> str:
    if not (layer.half_copy or layer.relaid):
        return ""
    slabs = f" in {len(slabs_of(layer))} slabs" if layer.slabs is not None else ""
    return f", from a channels-last copy{slabs}"


def _residues_as_channels(layer: Layer) -> str:
    rows, columns = layer.d2s_factors
    return f" with {rows * columns} residues as channels" if layer.depth_to_space else ""


def _chosen(plans: Iterator[Plan]) -> Plan:
    """The plan that was measured to be fastest, if the layer was measured; else the first."""
    first = next(plans)
    measured = tuned.choice(first.key)
    for plan in chain([first], plans) if measured else ():
        if plan.choice == measured:
            return replace(plan, why=f"{plan.why}; measured")
    return first


def _repairs(layer: Layer, gpu: Gpu) -> Tile:
    """A tile of the same layer in TF32, for images whose numbers do not fit scaled fp16.

    Finding these images takes registers. With 3xTF32, where accumulators take twice as many, the
    largest tiles and staged input leave too few.
    """
    layer = replace(whole(layer), scaled_fp16=False, half_copy=False)
    tiles = _tiles(layer, gpu)
    if layer.parts == 1:
        return tiles[0]
    fits = (one for one in tiles if one.shape.pixels < layer.most_pixels and not one.staged)
    return next(fits, tiles[0])


def _tiled_layer(tile: Tile, gpu: Gpu, repairs: bool = False) -> TiledLayer:
    layer = tile.layer
    items = item_count(tile, gpu)
    # A block's item numbers, with the one beyond its last item, have to fit 32 bits.
    if max(items, tile.shape.tiles) + gpu.sm_count >= 2**31:
        raise Declined("more than 2^31 tiles")
    blocks = layer.groups * tile.shape.output_groups
    columns = tile.shape.tiles // tile.shape.row_tiles
    last_items = columns * ceil_div(_last_row_tiles(tile), segment_tiles(tile, gpu))
    return TiledLayer(
        layer,
        "hopper/halo/kernel.cuh",
        _constants(tile, gpu, repairs),
        min(items, gpu.sm_count),
        (tile.producers + CONSUMERS) * WARPGROUP,
        tile.shared_bytes,
        blocks * layer.chunks * layer.taps * tile.shape.tap_bytes,
        blocks * tile.shape.channel_groups * layer.mma_channels,
        layer.groups * _table_columns(layer),
        _pieces(tile) if tile.method.boxes else "input",
        min(last_items, gpu.sm_count),
    )


def _pieces(tile: Tile) -> TensorMap:
    """The input as TMA boxes load it: lines of a piece's channels, of planes without rows."""
    layer, shape, operands = tile.layer, tile.shape, tile.layer.operands
    planes = 1 if layer.depth is None else layer.depth.in_size
    pixels, channels = layer.in_size[0] * layer.in_size[1], layer.groups * layer.in_channels
    sizes = [pixels, planes, channels, layer.batch // layer.planes]
    strides = [operands.scalar_bytes * n for n in (pixels, planes * pixels)]
    strides.append(strides[-1] * channels)
    lines = tile.method.piece_vectors * layer.vector_channels
    box = [shape.box_columns, 1, lines, 1]
    if layer.depth is None:
        del sizes[1], strides[0], box[1]
    return TensorMap("input", operands.scalar, tuple(sizes), tuple(strides), tuple(box))


def _table_columns(layer: Layer) -> int:
    """Columns of a group in the tables of scaled fp16: channels of whole chunks, or of a copy."""
    if layer.half_copy:
        return layer.in_channels
    return layer.chunks * layer.k_steps * 2 * layer.vector_channels


def _key(layers: list[Layer], gpu: Gpu) -> str:
    """What a measured choice holds for: a layer or its residues, its tensors, and a GPU."""
    layer, operands = layers[0], layers[0].operands

    def size(values: tuple[int, int]) -> str:
        return "x".join(map(str, values))

    def written(layer: Layer) -> str:
        steps = (layer.placing[0].step, layer.placing[1].step)
        words = (
            f"{layer.group_out}x{size(layer.out_size)}",
            *((f"step={size(steps)}",) if steps != (1, 1) else ()),
            f"kernel={size(layer.weight_kernel)} stride={size(layer.stride)}",
            f"dilation={size(layer.dilation)} padding={size(layer.padding)}",
            f"s2d={size(layer.s2d_factors)}",
            *((layer.depth.words,) if layer.depth is not None else ()),
        )
        return " ".join(words)

    words = (
        f"{gpu.architecture}/{gpu.sm_count}",
        "input_grad" if layer.transposed else "forward",
        operands.scalar.removeprefix("fastconv::"),
        operands.precision if operands.scalar == "float" else "-",
        *(("scaled_fp16",) if layer.scaled_fp16 else ()),
        *(("half_copy",) if layer.half_copy else ()),
        *(("relaid",) if layer.relaid else ()),
        *((f"slabs={len(slabs_of(layer))}",) if layer.slabs is not None else ()),
        "".join("NHWC" if last else "NCHW" for last in _channels_last(operands)),
        f"{layer.batch}x{layer.groups}x{layer.group_in}x{size(layer.in_size)}",
        " + ".join(map(written, layers)),
        "aligned" if operands.aligned else "unaligned",
    )
    return " ".join(words)


def _channels_last(operands: Operands) -> tuple[bool, bool]:
    return operands.input_channels_last, operands.output_channels_last


def _explanation(tiles: tuple[Tile, ...], gpu: Gpu) -> Iterator[str]:
    layer = tiles[0].layer
    rows, columns = layer.placing
    whole = rows.step == columns.step == 1 or layer.depth_to_space
    residue = "" if whole else f"residue {rows.at}, {columns.at}: "
    yield f"{residue}{len(tiles)} tiles fit; the cheapest, in cycles:"
    for tile in tiles[:EXPLAINED]:
        yield _explain(tile, gpu)


def _explain(tile: Tile, gpu: Gpu) -> str:
    shape = tile.shape
    work = ", ".join(f"{name} {cycles:.0f}" for name, cycles in tile.work.items())
    return (
        f"{tile.cycles(gpu.sm_count):.3g}: {shape.channel_groups * OUTPUTS} channels x "
        f"{shape.rows} rows x {shape.columns} pixels ({shape.pixels}), "
        f"{f'{tile.loads} pieces, ' if tile.staged else ''}"
        f"{ceil_div(shape.tiles, gpu.sm_count)} rounds of: "
        f"{work}; {tile.shared_bytes // 1024} KiB shared"
    )


def _most_at_once(tile: Tile, repairs: bool) -> int:
    """Units that a loading thread has registers to load at once."""
    layer, split = tile.layer, tile.layer.parts == 2
    space_to_depth, floats = layer.s2d_factors != (1, 1), layer.operands.scalar_bytes == 4
    if layer.scaled_fp16:
        most = 1 if layer.compensated else 2
    elif layer.vector_loads:
        most = 4 if split else 6
    elif space_to_depth:
        most = 3 if floats and not split else 2
    elif split:
        most = 2 if tile.staged else 4
    else:
        most = 5 if floats else 3
    return most - 1 if split and repairs else most  # finding the images takes some


def _batch(tile: Tile, repairs: bool) -> int:
    """Units that a thread loads at once, chosen so that the last batch is nearly full."""
    most = _most_at_once(tile, repairs)
    if tile.staged:
        warps = ceil_div(tile.shape.pitch, 32)
        return ceil_div(warps, ceil_div(warps, most))
    units = tile.shape.units
    return min(range(most, 0, -1), key=lambda n: round_up(units, 32 * tile.method.warps * n))


def _producer_registers(tile: Tile) -> int:
    layer = tile.layer
    if tile.producers == 2:
        return 72
    if layer.parts == 2:  # consumers hold accumulators and totals
        return 88 if layer.scaled_fp16 and not layer.compensated else 72
    return 104 if layer.vector_loads else 136


def _constants(tile: Tile, gpu: Gpu, repairs: bool) -> dict[str, Constant]:
    shape, layer, operands = tile.shape, tile.layer, tile.layer.operands
    producer = _producer_registers(tile)
    return {
        **layer_constants(layer),
        "staged": tile.staged,
        "raw_slots": tile.method.raw_slots,
        "bulk_loads": tile.method.bulk,
        "box_loads": tile.method.boxes,
        "vector_stores": operands.output_channels_last
        and operands.aligned
        and layer.group_out % layer.vector == 0
        and not layer.depth_to_space,
        "bulk_stores": shape.bulk_stores,
        "channel_groups": shape.channel_groups,
        "stack": layer.stack,
        "pixels": shape.pixels,
        "tile_rows": shape.rows,
        "block_rows": shape.tile_rows,
        "register_tile_m": OUTPUTS,
        "loaders": 32 * tile.method.warps,
        "loader_warps": tile.method.warps,
        "piece_vectors": tile.method.piece_vectors,
        "threads": (tile.producers + CONSUMERS) * WARPGROUP,
        "unit_vectors": 2,
        "smaller_part": True,
        "watches": layer.watched,
        "tile_columns": shape.columns,
        "pitch": shape.pitch,
        "lead": shape.lead,
        "joint_stores": tile.joint_stores,
        "wraps": tile.wraps,
        "turns": tile.turns,
        "plane_padding": shape.plane_padding,
        "rolling": layer.rolling,
        "segment_tiles": segment_tiles(tile, gpu),
        "k_steps": layer.k_steps,
        "stage_taps": layer.stage_taps,
        "input_stages": tile.input_stages,
        "weight_stages": tile.weight_stages,
        "resident": tile.resident,
        "pass_pixels": tile.pass_pixels,
        "buffers": tile.buffers,
        "batch": _batch(tile, repairs),
        "batches_ahead": 1 if layer.parts == 2 else 2,
        "producer_registers": producer,
        "consumer_registers": block.consumer_registers(producer, tile.producers),
        "shared_bytes": tile.shared_bytes,
    }
