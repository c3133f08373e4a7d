"""Plans layers with ``correlate.cuh``.

The rules: of all tiles that fit shared memory, the one whose slowest part (products, loads or
stores) is estimated to take least; unless measurements have shown another to be faster (see
``tuned``). What a layer is, is in ``layers``; what a tile takes, in ``tiles``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    geometry_constants,
)
from fastconv.kernels.hopper import limits, tuned
from fastconv.kernels.hopper.layers import Layer, views
from fastconv.kernels.hopper.limits import OUTPUTS, THREADS
from fastconv.kernels.hopper.tiles import LOADER_WARPS, Tile, item_count, segment_tiles, tiles_of

PACK_THREADS = 256
MOST_PACK_BLOCKS = 4096
EXPLAINED = 5  # tiles
# Multiply-adds a cycle: of the tensor cores, and how many must count for them to be worth it.
TENSOR_PRODUCTS = {4: 1024.0, 2: 2048.0}
LEAST_PRODUCTS = 64.0
# Of a pass, for each of its layers' launches. It is more of a small batch, which must not decide.
LAYER_COST = 0.05


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
    return _cost(_best_way(ways, gpu))


def _check(layers: list[Layer], gpu: Gpu) -> None:
    layer = layers[0]
    channels = (layer.group_in // (layer.folding[0] * layer.folding[1]), layer.group_out)
    operands = layer.operands
    limits.check(operands, gpu, layer.groups, channels, layer.in_size, layer.image_size)
    terms = sum(layer.terms for layer in layers)
    multiplied = sum(layer.terms / layer.tensor_share * layer.products for layer in layers)
    if TENSOR_PRODUCTS[operands.scalar_bytes] * terms / multiplied < LEAST_PRODUCTS:
        share = _tensor_share(layers)
        raise Declined(f"so few channels that {share:.0%} of the products would count")


def _tensor_share(layers: list[Layer]) -> float:
    """Of layers that have about equally many outputs."""
    terms = sum(layer.terms for layer in layers)
    return terms / sum(layer.terms / layer.tensor_share for layer in layers)


def _plans(ways: list[list[Layer]], gpu: Gpu) -> Iterator[Plan]:
    """For every tile that fits, the best first; of several layers, each one's next best at once."""
    layers, tiles = _best_way(ways, gpu)
    explanation = tuple(line for of_layer in tiles for line in _explanation(of_layer, gpu))
    key = _key(layers, gpu)
    for rank in range(max(map(len, tiles))):
        chosen = [of_layer[min(rank, len(of_layer) - 1)] for of_layer in tiles]
        pairs, packed = zip(*(_launches(tile, gpu) for tile in chosen), strict=True)
        yield Plan(
            tuple(chain.from_iterable(pairs)),
            max(packed),  # a layer's launches are done with it when the next one's begin
            "hopper",
            _why(chosen),
            explanation,
            key,
            " + ".join(tile.name for tile in chosen),
        )


def _best_way(ways: list[list[Layer]], gpu: Gpu) -> tuple[list[Layer], list[list[Tile]]]:
    """The layers of the way that takes an image the least, and each one's tiles, the best first.

    Sums differ between ways, so the batch must not decide.
    """
    possible, reasons = [], []
    for layers in ways:
        try:
            _check(layers, gpu)
            possible.append((layers, [tiles_of(views(layer), gpu) for layer in layers]))
        except Declined as reason:
            reasons.append(reason)
    if not possible:
        raise reasons[0]

    return min(possible, key=_cost)


def _cost(way: tuple[list[Layer], list[list[Tile]]]) -> float:
    layers, tiles = way
    fastest = (min(one.image_tiles * one.tile_cycles for one in each) for each in tiles)
    return sum(fastest) * (1 + LAYER_COST * len(layers))


def _why(tiles: list[Tile]) -> str:
    shapes = dict.fromkeys(
        f"{tile.rows} rows of {tile.columns} pixels a warpgroup, in products of {tile.pixels}"
        for tile in tiles
    )
    phases = f" in {len(tiles)} phases" if len(tiles) > 1 else ""
    share = _tensor_share([tile.layer for tile in tiles])
    return f"tensor cores{phases}: {', '.join(shapes)}; {share:.0%} of the products count"


def _chosen(plans: Iterator[Plan]) -> Plan:
    """The plan that was measured to be best, if this layer was measured; else the rules' first."""
    first = next(plans)
    measured = tuned.choice(first.key)
    for plan in chain([first], plans) if measured else ():
        if plan.choice == measured:
            return replace(plan, why=f"{plan.why}; measured")
    return first


def _launches(tile: Tile, gpu: Gpu) -> tuple[tuple[Launch, Launch], int]:
    layer = tile.layer
    items = item_count(tile, gpu)
    if max(items, tile.tiles) >= 2**31:
        raise Declined("more than 2^31 tiles")
    packed = layer.groups * tile.output_groups * layer.chunks * layer.taps * tile.tap_bytes
    if packed // 16 >= 2**31:
        raise Declined(f"{packed} bytes of packed weights")
    constants = tuple(_constants(tile, gpu).items())
    pack = Launch(
        Kernel("hopper/correlate.cuh", "pack", constants),
        (min(ceil_div(packed // 16, PACK_THREADS), MOST_PACK_BLOCKS), 1, 1),
        PACK_THREADS,
        0,
        ("weight", "scratch"),
    )
    correlate = Launch(
        Kernel("hopper/correlate.cuh", "correlate", constants),
        (min(items, gpu.processors), 1, 1),
        THREADS,
        tile.shared_bytes,
        ("input", "scratch", "bias", "output", layer.batch),
    )
    return (pack, correlate), packed


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
        "".join("NHWC" if last else "NCHW" for last in _channels_last(operands)),
        f"{layer.batch}x{layer.groups}x{layer.group_in}x{size(layer.in_size)}",
        " + ".join(map(written, layers)),
        "aligned" if operands.aligned else "unaligned",
    )
    return " ".join(words)


def _channels_last(operands: Operands) -> tuple[bool, bool]:
    return operands.input_channels_last, operands.output_channels_last


def _explanation(tiles: list[Tile], gpu: Gpu) -> Iterator[str]:
    rows, columns = tiles[0].layer.placing
    phase = "" if rows.step == columns.step == 1 else f"phase {rows.at}, {columns.at}: "
    yield f"{phase}{len(tiles)} tiles fit; the cheapest, in cycles:"
    for tile in tiles[:EXPLAINED]:
        yield _explain(tile, gpu)


def _explain(tile: Tile, gpu: Gpu) -> str:
    work = ", ".join(f"{name} {cycles:.0f}" for name, cycles in tile.work.items())
    return (
        f"{tile.cycles(gpu.processors):.3g}: {tile.channel_groups * OUTPUTS} channels x "
        f"{tile.rows} rows x {tile.columns} pixels ({tile.pixels}), "
        f"{f'{tile.raw_slots} staged pieces, ' if tile.staged else ''}"
        f"{ceil_div(tile.tiles, gpu.processors)} rounds of: "
        f"{work}; {tile.shared_bytes // 1024} KiB shared"
    )


def _constants(tile: Tile, gpu: Gpu) -> dict[str, Constant]:
    layer, operands = tile.layer, tile.layer.operands
    rows, columns = layer.placing
    split = layer.parts == 2
    if layer.vector_loads:
        most = 4 if split else 6
    elif layer.folding != (1, 1):
        most = 2 if split or operands.scalar_bytes == 2 else 3
    elif split and tile.staged:
        most = 2
    else:
        most = 4 if split else 5 if operands.scalar_bytes == 4 else 3
    if tile.staged:
        warps = ceil_div(tile.pitch, 32)
        batch = ceil_div(warps, ceil_div(warps, most))
    else:
        batch = min(range(most, 0, -1), key=lambda n: round_up(tile.units, 32 * LOADER_WARPS * n))
    producer = 72 if split else 104 if layer.vector_loads else 136
    return {
        "Scalar": operands.scalar,
        "parts": layer.parts,
        "low_products": layer.low_products,
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
        "fold_height": layer.folding[0],
        "fold_width": layer.folding[1],
        "weight_height": layer.weight_kernel[0],
        "weight_width": layer.weight_kernel[1],
        "last_tap_row": rows.last_tap,
        "last_tap_column": columns.last_tap,
        "tap_step_height": rows.tap_step,
        "tap_step_width": columns.tap_step,
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
        "column_sums": columns.sums,
        "interleave": layer.interleave,
        "in_channels_last": operands.input_channels_last,
        "out_channels_last": operands.output_channels_last,
        "vector_loads": layer.vector_loads,
        "staged": tile.staged,
        "raw_slots": tile.raw_slots,
        "vector_stores": operands.output_channels_last
        and operands.aligned
        and layer.group_out % layer.vector == 0,
        "bulk_stores": tile.bulk_stores,
        "channel_groups": tile.channel_groups,
        "stack": layer.stack,
        "pixels": tile.pixels,
        "tile_rows": tile.rows,
        "tile_columns": tile.columns,
        "pitch": tile.pitch,
        "lead": tile.lead,
        "plane_padding": tile.plane_padding,
        "rolling": layer.rolling,
        "segment_tiles": segment_tiles(tile, gpu),
        "k_steps": layer.k_steps,
        "stage_taps": layer.stage_taps,
        "input_stages": tile.input_stages,
        "weight_stages": tile.weight_stages,
        "resident": tile.resident,
        "pass_pixels": tile.pass_pixels,
        "buffers": tile.buffers,
        "batch": batch,
        "batches_ahead": 1 if split else 2,
        "producer_registers": producer,
        "consumer_registers": limits.consumer_registers(producer),
        "shared_bytes": tile.shared_bytes,
    }
