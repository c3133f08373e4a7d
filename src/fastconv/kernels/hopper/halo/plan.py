"""Plans layers with ``correlate.cuh``.

The rules: of all tiles that fit shared memory, the one whose slowest part (products, loads or
stores) is estimated to take least; unless measurements have shown another to be faster (see
``tuned``). What a layer is, is in ``layers``; what a tile takes, in ``tiles``.
"""

from __future__ import annotations

from collections.abc import Iterator
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
)
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.block import OUTPUTS, THREADS
from fastconv.kernels.hopper.halo.tiles import (
    LOADER_WARPS,
    Tile,
    item_count,
    least_cycles,
    segment_tiles,
    shapes_of,
    tiles_of,
)
from fastconv.kernels.hopper.layers import Layer
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.launches import (
    Correlation,
    best_way,
    launches,
    layer_constants,
)
from fastconv.kernels.planning.layers import views
from fastconv.kernels.planning.limits import ROUNDING

EXPLAINED = 5  # tiles
# Multiply-adds a cycle, by channels in 16 bytes: of the tensor cores, and how many must count for
# them to be worth it.
TENSOR_PRODUCTS = {4: 1024.0, 8: 2048.0}
LEAST_PRODUCTS = 64.0
# Of a pass: for each layer's launches, and for those that find out whether float16 will do. It is
# more of a small batch, which must not decide. Three products of float16 are better than estimated.
LAYER_COST = 0.05
LAUNCH_CYCLES = 5000.0  # of the launches of a pass
HALVES_COST = {1: 0.05, 2: -0.25}  # by parts
HALVES_CYCLES = 2.5e5  # of an image, at least: what those launches take is its share of a batch


def plan(ways: list[list[Layer]], gpu: Gpu) -> Plan:
    """Plans a pass, of which each of ``ways`` is one to compute it: layers that together write it.

    Its tensors are ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    return _chosen(_plans(ways, gpu))


def alternatives(ways: list[list[Layer]], gpu: Gpu, most: int) -> list[Plan]:
    """The plans for a pass that the rules like best. All give the same bits.

    Raises:
        Declined: there are none.
    """
    return list(islice(_plans(ways, gpu), most))


def image_cycles(ways: list[list[Layer]], gpu: Gpu) -> float:
    """What an image takes, in cycles of one processor.

    Raises:
        Declined: it cannot be computed so.
    """
    return _cost(*best_way(ways, partial(_checked_tiles, gpu=gpu), _cost, may_take_less))


def may_take_less(layers: list[Layer], cycles: float) -> bool:
    """Whether an image might take less than so many, computed by these layers.

    False is certain: what layers are said to take at least holds for any tile. No tile is fitted to
    shared memory for it, which is what takes long.
    """
    cycles *= 1 + ROUNDING
    if _way_cycles(layers, 0.0) >= cycles:
        return False
    *others, last = layers
    of_others = sum(least_cycles(views(layer)) for layer in others)
    # From large to small: if any might, then mostly large ones.
    shapes = reversed(list(shapes_of(views(last))))
    return any(_way_cycles(layers, of_others + one.least_cycles) < cycles for one in shapes)


def _check(layers: list[Layer], gpu: Gpu) -> None:
    layer = layers[0]
    channels = (layer.group_in // (layer.folding[0] * layer.folding[1]), layer.out_channels)
    operands = layer.operands
    block.check(gpu)
    limits.check(operands, layer.groups, channels, layer.in_size, layer.image_size)
    terms = sum(layer.terms for layer in layers)
    multiplied = sum(layer.terms / layer.tensor_share * layer.products for layer in layers)
    if TENSOR_PRODUCTS[layer.vector_channels] * terms / multiplied < LEAST_PRODUCTS:
        share = _tensor_share(layers)
        raise Declined(f"so few channels that {share:.0%} of the products would count")


def _tensor_share(layers: list[Layer]) -> float:
    """Of layers that have about equally many outputs."""
    terms = sum(layer.terms for layer in layers)
    return terms / sum(layer.terms / layer.tensor_share for layer in layers)


def _plans(ways: list[list[Layer]], gpu: Gpu) -> Iterator[Plan]:
    """For every tile that fits, the best first; of several layers, each one's next best at once."""
    layers, tiles = best_way(ways, partial(_checked_tiles, gpu=gpu), _cost, may_take_less)
    explanation = tuple(line for of_layer in tiles for line in _explanation(of_layer, gpu))
    key = _key(layers, gpu)
    repairs = None
    if layers[0].halves:
        repairing = _repairs(layers[0], gpu)
        repairs = _correlation(repairing, gpu, repairs=True)
        explanation += (f"beyond float16's range, in TF32: {_explain(repairing, gpu)}",)
    for rank in range(max(map(len, tiles))):
        chosen = [of_layer[min(rank, len(of_layer) - 1)] for of_layer in tiles]
        yield Plan(
            *launches([_correlation(tile, gpu) for tile in chosen], repairs),
            "hopper",
            _why(chosen),
            explanation,
            key,
            " + ".join(tile.name for tile in chosen),
            # In halves, images have their part in it; layers share the workspace in turn.
            packs=int(len(chosen) == 1 and repairs is None),
            cycles=LAUNCH_CYCLES + sum(tile.cycles(gpu.processors) for tile in chosen),
        )


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    """All tiles that fit, the best first; kept, for a plan asks for them more than once."""
    return tuple(tiles_of(views(layer), gpu))


def _checked_tiles(layers: list[Layer], gpu: Gpu) -> list[tuple[Tile, ...]]:
    _check(layers, gpu)
    return [_tiles(layer, gpu) for layer in layers]


def _cost(layers: list[Layer], tiles: list[tuple[Tile, ...]]) -> float:
    fastest = (min(one.shape.image_tiles * one.tile_cycles for one in each) for each in tiles)
    return _way_cycles(layers, sum(fastest))


def _way_cycles(layers: list[Layer], cycles: float) -> float:
    """What an image takes, with launches' share, if it takes the layers' tiles so many cycles."""
    more = LAYER_COST * len(layers)
    if not layers[0].halves:
        return cycles * (1 + more)
    return max(cycles * (1 + more + HALVES_COST[layers[0].parts]), HALVES_CYCLES)


def _why(tiles: list[Tile]) -> str:
    shapes = dict.fromkeys(
        f"{one.rows} rows of {one.columns} pixels a warpgroup, in products of {one.pixels}"
        for one in (tile.shape for tile in tiles)
    )
    phases = f" in {len(tiles)} phases" if len(tiles) > 1 else _folded_phases(tiles[0].layer)
    share = _tensor_share([tile.layer for tile in tiles])
    halves = " in float16, where the range allows it" if tiles[0].layer.halves else ""
    return f"tensor cores{halves}{phases}: {', '.join(shapes)}; {share:.0%} of the products count"


def _folded_phases(layer: Layer) -> str:
    rows, columns = layer.out_folding
    return f" with {rows * columns} phases as channels" if layer.unfolds else ""


def _chosen(plans: Iterator[Plan]) -> Plan:
    """The plan that was measured to be best, if this layer was measured; else the rules' first."""
    first = next(plans)
    measured = tuned.choice(first.key)
    for plan in chain([first], plans) if measured else ():
        if plan.choice == measured:
            return replace(plan, why=f"{plan.why}; measured")
    return first


def _repairs(layer: Layer, gpu: Gpu) -> Tile:
    """For images whose numbers do not fit float16: the same layer in TF32.

    Registers are needed to find the images: where sums are kept twice, those of the largest tiles,
    or of pieces under way.
    """
    layer = replace(layer, halves=False)
    tiles = _tiles(layer, gpu)
    if layer.parts == 1:
        return tiles[0]
    fits = (one for one in tiles if one.shape.pixels < layer.most_pixels and not one.staged)
    return next(fits, tiles[0])


def _correlation(tile: Tile, gpu: Gpu, repairs: bool = False) -> Correlation:
    layer = tile.layer
    items = item_count(tile, gpu)
    # A block counts on from its last item by as many as there are blocks.
    if max(items, tile.shape.tiles) + gpu.processors >= 2**31:
        raise Declined("more than 2^31 tiles")
    blocks = layer.groups * tile.shape.output_groups
    return Correlation(
        layer,
        "hopper/halo/kernel.cuh",
        _constants(tile, gpu, repairs),
        min(items, gpu.processors),
        THREADS,
        tile.shared_bytes,
        blocks * layer.chunks * layer.taps * tile.shape.tap_bytes,
        blocks * tile.shape.channel_groups * layer.product_channels,
        layer.groups * layer.chunks * layer.k_steps * 2 * layer.vector_channels,
    )


def _key(layers: list[Layer], gpu: Gpu) -> str:
    """What a measured choice holds for: a layer or its phases, its tensors, and a GPU."""
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
            f"fold={size(layer.folding)}",
        )
        return " ".join(words)

    words = (
        f"{gpu.architecture}/{gpu.processors}",
        "input_grad" if layer.transposed else "forward",
        operands.scalar.removeprefix("fastconv::"),
        operands.precision if operands.scalar == "float" else "-",
        *(("halves",) if layer.halves else ()),
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
    whole = rows.step == columns.step == 1 or layer.unfolds
    phase = "" if whole else f"phase {rows.at}, {columns.at}: "
    yield f"{phase}{len(tiles)} tiles fit; the cheapest, in cycles:"
    for tile in tiles[:EXPLAINED]:
        yield _explain(tile, gpu)


def _explain(tile: Tile, gpu: Gpu) -> str:
    shape = tile.shape
    work = ", ".join(f"{name} {cycles:.0f}" for name, cycles in tile.work.items())
    return (
        f"{tile.cycles(gpu.processors):.3g}: {shape.channel_groups * OUTPUTS} channels x "
        f"{shape.rows} rows x {shape.columns} pixels ({shape.pixels}), "
        f"{f'{tile.loads} pieces, ' if tile.staged else ''}"
        f"{ceil_div(shape.tiles, gpu.processors)} rounds of: "
        f"{work}; {tile.shared_bytes // 1024} KiB shared"
    )


def _most_at_once(tile: Tile, repairs: bool) -> int:
    """Units that a loading thread has registers for."""
    layer, split = tile.layer, tile.layer.parts == 2
    folded, floats = layer.folding != (1, 1), layer.operands.scalar_bytes == 4
    if layer.halves:
        most = 1 if layer.compensated else 2
    elif layer.vector_loads:
        most = 4 if split else 6
    elif folded:
        most = 3 if floats and not split else 2
    elif split:
        most = 2 if tile.staged else 4
    else:
        most = 5 if floats else 3
    return most - 1 if split and repairs else most  # to find the images takes some


def _batch(tile: Tile, repairs: bool) -> int:
    """Units that a thread loads at once, so that few are left over for the last batch."""
    most = _most_at_once(tile, repairs)
    if tile.staged:
        warps = ceil_div(tile.shape.pitch, 32)
        return ceil_div(warps, ceil_div(warps, most))
    units = tile.shape.units
    return min(range(most, 0, -1), key=lambda n: round_up(units, 32 * LOADER_WARPS * n))


def _producer_registers(layer: Layer) -> int:
    if layer.parts == 2:  # consumers keep sums twice
        return 88 if layer.halves and not layer.compensated else 72
    return 104 if layer.vector_loads else 136


def _constants(tile: Tile, gpu: Gpu, repairs: bool) -> dict[str, Constant]:
    shape, layer, operands = tile.shape, tile.layer, tile.layer.operands
    producer = _producer_registers(layer)
    return {
        **layer_constants(layer),
        "staged": tile.staged,
        "raw_slots": tile.raw_slots,
        "bulk_loads": tile.bulk_loads,
        "vector_stores": operands.output_channels_last
        and operands.aligned
        and layer.group_out % layer.vector == 0
        and not layer.unfolds,
        "bulk_stores": shape.bulk_stores,
        "channel_groups": shape.channel_groups,
        "stack": layer.stack,
        "pixels": shape.pixels,
        "tile_rows": shape.rows,
        "block_rows": shape.tile_rows,
        "product_rows": OUTPUTS,
        "loaders": 32 * LOADER_WARPS,
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
        "consumer_registers": block.consumer_registers(producer),
        "shared_bytes": tile.shared_bytes,
    }
