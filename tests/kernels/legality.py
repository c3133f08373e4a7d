"""Asserts that a plan of Hopper's kernels keeps to what the kernels and the GPU allow."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import REGION_ALIGNMENT, Gpu, Launch, Plan, TensorMap
from fastconv.kernels.hopper.relayout.plan import TILE
from fastconv.kernels.planning import launches
from planner_cases import gemm_of, is_few_outputs, packed_layers, without_copies

REGISTERS = 168  # per thread, with which a block of 384 threads is launched


def assert_legal(plan: Plan, gpu: Gpu) -> None:
    if is_few_outputs(plan):
        _assert_legal_few_outputs(plan, gpu)
        return
    if gemm_of(plan):
        check = {"implicit_gemm_nhwc": _assert_legal_nhwc, "implicit_gemm_nchw": _assert_legal_nchw}
        check[gemm_of(plan)](plan, gpu)
        return
    layers = packed_layers(plan)
    packed = [_legal_packed_bytes(*layer, gpu) for layer in layers]
    if not layers[0][2]["scaled_fp16"]:
        assert plan.scratch_bytes == max(packed)
        return
    # The workspace holds the weights of the repair, the other weights, a number for each output and
    # input channel, and for each image two numbers and one for each of its channels.
    (pack, _, first), (_, _, second) = layers
    assert (first["repairs"], second["repairs"], second["scaled_fp16"]) == (False, True, False)
    assert (second["packed_at"], first["packed_at"], first["tables_at"]) == (
        0, packed[1], sum(packed)
    )  # fmt: skip
    channels = first["table_channels"]
    batch = pack.arguments[-1] // first.get("copied_planes", 1)
    columns = first["table_columns"]
    for name in ("tables_at", "table_channels", "table_columns"):
        assert first[name] == second[name]
    assert channels >= first["groups"] * first["group_out"]
    copied = "copy_vectors" in first
    s2d = first["s2d_height"] * first["s2d_width"]
    planes = first.get("kernel_depth", 1) if copied else 1
    inputs = first["groups"] * first["group_in"] // s2d // planes
    assert columns == inputs if copied else columns >= first["groups"] * first["group_in"]
    whole = 8 if copied else 16
    assert columns // first["groups"] % whole == first["tables_at"] % 16 == 4 * channels % 16 == 0
    scale = plan.launches[0]
    assert scale.kernel.entry == "scale"
    assert scale.grid == (min(inputs, launches.MOST_PACK_BLOCKS), 1, 1)
    assert pack.grid[0] == min(channels + batch, launches.MOST_PACK_BLOCKS)
    scratch = sum(packed) + 4 * (channels + columns + batch * (columns + 2))
    if copied:
        scratch = _legal_copy(plan, first, scratch, batch * inputs)
    assert plan.scratch_bytes == scratch


def _legal_copy(plan: Plan, c: dict[str, Any], scratch: int, channels: int) -> int:
    """Checks the launch that copies the input of scaled fp16; returns the bytes of workspace.

    ``channels`` are those of all images or volumes.
    """
    [region], copy = plan.regions, plan.launches[2]
    assert (copy.kernel.entry, copy.block) == ("copy", 256)
    assert copy.arguments[:3] == ("input", region.name, "scratch")
    assert plan.launches[3].arguments[0] == region.name == "input_copy"
    assert region.offset == round_up(scratch, REGION_ALIGNMENT)
    vectors, tile = c["copy_vectors"], c["copy_pixels"]
    pixels = c.get("in_depth", 1) * c["in_height"] * c["in_width"]
    assert tile % 32 == vectors * (tile // 32) % 8 == 0
    assert copy.grid[0] == channels // (8 * vectors) * ceil_div(pixels, tile) < 2**31
    assert copy.shared_bytes == 16 * tile * (vectors | 1) <= 48 * 1024
    return region.offset + 2 * channels * pixels


def _legal_packed_bytes(pack: Launch, main: Launch, c: dict[str, Any], gpu: Gpu) -> int:
    """Checks what the halo-tile kernel asserts, and what it relies on without an assertion.

    Returns the bytes of workspace that the layer needs.
    """
    assert pack.kernel.constants == main.kernel.constants
    assert pack.grid[0] in range(1, 2**16)
    assert main.grid[0] in range(1, gpu.sm_count + 1)
    assert pack.grid[1:] == main.grid[1:] == (1, 1)
    assert main.shared_bytes == c["shared_bytes"] <= gpu.shared_bytes_per_block

    scalar_bytes = 4 if c["Scalar"] == "float" else 2
    vector = 16 // scalar_bytes
    copied = "copy_vectors" in c  # and so channels-last
    loaded_bytes = 2 if copied else scalar_bytes
    channels_of_vector = 8 if c["scaled_fp16"] else vector
    weight_parts = 3 if c["scaled_fp16"] and c["parts"] == 2 else c["parts"]
    assert not c["scaled_fp16"] or (c["Scalar"] == "float" and not c["in_channels_last"])
    chunks = ceil_div(c["group_in"], 2 * c["k_steps"] * channels_of_vector)
    if c["turns"]:
        assert c["resident"]
        assert c["rolling"] or chunks <= c["input_stages"]
        assert c["rolling"] or loaded_bytes == 4 or not c["vector_loads"]
    row_unit = gcd(c["stride_height"], c["dilation_height"])
    row_residues, row_step = c["stride_height"] // row_unit, c["dilation_height"] // row_unit
    column_unit = gcd(c["stride_width"], c["dilation_width"])
    column_residues = c["stride_width"] // column_unit
    column_step = c["dilation_width"] // column_unit
    slots = min(c["kernel_height"], row_residues) * min(c["kernel_width"], column_residues)

    taps = (c["kernel_height"] + c["stack"] - 1) * c["kernel_width"]
    assert taps % c["stage_taps"] == 0
    assert c["stack"] in (1, 2, 4, 8)
    assert c["stack"] == 1 or (c["tile_rows"] == 1 and row_residues == 1)
    halo = (c["kernel_width"] - 1) * column_step // column_residues
    assert c["lead"] + c["tile_columns"] + halo <= c["pitch"]
    assert c["lead"] == 0 or (c["tile_rows"] == 1 and c["bulk_stores"])
    d2s = c["d2s_height"] * c["d2s_width"]
    out_channels = c["group_out"] // d2s
    assert d2s > 1 or c["interleave"] in (1, 2)
    assert c["stack"] * c["stacked_columns"] <= 8
    assert c["stacked_columns"] == 1 or c["interleave"] == 2
    passes = ceil_div(c["pixels"], c["pass_pixels"])
    assert 2 // c["stacked_columns"] * passes % c["buffers"] == 0
    if d2s > 1:
        neighbours = out_channels if c["out_channels_last"] else 1
        assert c["interleave"] == c["d2s_width"] * neighbours <= 64 // c["stack"]
        assert c["stack"] * c["group_out"] <= 64 or c["stack"] == 1
        assert c["groups"] == 1 or not c["out_channels_last"]
        assert c["lead"] == c["scaled_fp16"] == c["joint_stores"] == c["vector_stores"] == 0
        assert (c["stacked_columns"], c["buffers"]) == (1, 1)
        for axis, size in (("row", "height"), ("column", "width")):
            assert c[f"{axis}_begin"] <= 0 < c[f"{axis}_end"]
            assert c[f"{axis}_end"] - c[f"{axis}_begin"] == c[f"d2s_{size}"]
    elif c["interleave"] == 2:
        assert c["out_step_width"] == 2
        assert c["lead"] == c["out_channels_last"] == 0
    rows = 2 // c["channel_groups"] * c["tile_rows"] * c["stack"]
    halo_rows = rows + (c["kernel_height"] - 1) // row_residues
    assert c["pixels"] in range(8, 257, 8)
    assert c["pass_pixels"] % 16 == 0
    assert c["lead"] + c["tile_columns"] + (c["tile_rows"] - 1) * c["pitch"] <= c["pixels"]
    slack = max(0, c["pixels"] + halo - c["tile_rows"] * c["pitch"])

    strips = ceil_div(c["out_width"] + max(c["lead"] - 1, 0), c["tile_columns"])

    # A row that wraps continues with the next row, which follows it in memory, in the last strip.
    if c["wraps"]:
        last = c["out_width"] - (strips - 1) * c["tile_columns"]
        assert last > 0
        assert last + halo + 2 * c["lead"] - 1 <= c["pixels"] <= c["pass_pixels"]
        steps = ("stride_height", "stride_width", "s2d_height", "s2d_width")
        assert {c[name] for name in (*steps, "out_step_height", "out_step_width")} == {1}
        assert loaded_bytes == 4 or not c["vector_loads"]
        if c["staged"]:
            assert c["padding_left"] == 0
            assert c["in_width"] == c["out_width"] + halo

    if c["joint_stores"]:
        assert c["out_channels_last"]
        assert c["channel_groups"] == 2
        assert c["stack"] == c["stacked_columns"] == 1
        assert not c["turns"]

    # Pipeline stages: no warp waits for a stage that is released only after the wait.
    per_tile = chunks * taps // c["stage_taps"]
    assert not c["resident"] or c["weight_stages"] == per_tile
    assert not c["resident"] or c["groups"] == 1
    assert c["weight_stages"] >= min(2, per_tile)
    if c["rolling"]:
        assert chunks == row_residues == c["tile_rows"] == 1
        assert c["input_stages"] >= halo_rows
    else:
        assert c["input_stages"] >= min(2, chunks)

    # Shared memory.
    stage_rows = 1 if c["rolling"] else halo_rows
    plane = slots * stage_rows * c["pitch"] + c["plane_padding"]
    input_bytes = 16 * (c["parts"] * 2 * c["k_steps"] * plane + slack)
    tap_bytes = c["k_steps"] * weight_parts * c["channel_groups"] * 64 * 32
    row = c["interleave"] * c["pass_pixels"]
    if d2s > 1:
        channels = min(64 // c["stack"] // c["interleave"] * c["interleave"], c["group_out"])
        lines = c["stack"] * channels // c["interleave"]
        staged = lines * (round_up(row + vector - 1, 2 * vector) + vector)
    elif c["out_channels_last"]:
        staged = c["pass_pixels"] * (64 + vector)
    else:
        staged = 4 * c["buffers"] * 8 * (round_up(row + vector - 8, 16) + 8)
    assert staged * scalar_bytes % 16 == 0
    rows_aligned = strips == 1 and c["padding_left"] >= 0 and c["in_width"] % vector == 0
    beyond = 0 if rows_aligned else vector - 1
    # A line ends with the last pixel of the last residue of its columns.
    columns = (c["pitch"] - 1) * c["stride_width"] + c["stride_width"] - column_unit + 1
    line = ceil_div((columns if c["wraps"] else min(columns, c["in_width"])) + beyond, vector) * 16
    if c["box_loads"]:
        line = ceil_div(columns + vector - 1, vector) * 16
    used = 16 + (
        c["input_stages"] * (input_bytes + 16)
        + c["weight_stages"] * (c["stage_taps"] * tap_bytes + 16)
        + 2 * staged * scalar_bytes
        + c["loader_warps"] * c["raw_slots"] * (c["piece_vectors"] * channels_of_vector * line + 8)
    )
    assert used <= c["shared_bytes"]
    mma_channels = 64 // (c["stack"] * c["stacked_columns"])
    if d2s > 1:
        mma_channels -= mma_channels % c["interleave"]
    outputs = ceil_div(c["group_out"], c["channel_groups"] * mma_channels)
    packed_bytes: int = c["groups"] * outputs * chunks * taps * tap_bytes

    # Registers of the producer warpgroup and of two consumer warpgroups.
    producer, consumer = c["producer_registers"], c["consumer_registers"]
    assert producer % 8 == consumer % 8 == 0
    assert 24 <= producer <= REGISTERS <= consumer <= 232
    assert 128 * producer + 256 * consumer <= 384 * REGISTERS
    accumulators = c["pixels"] // 2 * c["parts"]  # 3xTF32 has a second set of them.
    assert accumulators < consumer

    # Work items, and elements of an image, are counted in 32 bits.
    tiles = ceil_div(ceil_div(c["out_height"], row_step), rows)
    segments = ceil_div(tiles, c["segment_tiles"])
    items = outputs * strips * segments * row_step * c["groups"] * main.arguments[-1]
    assert main.grid[0] <= items < 2**31
    assert packed_bytes // 16 < 2**31
    s2d = c["s2d_height"] * c["s2d_width"]
    for size, channels in (("in", c["group_in"] // s2d), ("image", out_channels)):
        assert c["groups"] * channels * c[f"{size}_height"] * c[f"{size}_width"] < 2**30

    # Copies of 16 bytes need aligned rows.
    whole = c["group_in"] * loaded_bytes % 16 == 0
    assert not c["vector_loads"] or ((copied or c["in_channels_last"]) and whole)
    assert c["staged"] == (c["raw_slots"] > 0)
    assert c["staged"] or not c["bulk_loads"]
    assert c["bulk_loads"] or not c["box_loads"]
    if c["box_loads"]:
        _assert_legal_boxes(main, c, vector)
    if c["staged"]:
        assert not c["in_channels_last"]
        assert s2d == 1
    assert not c["vector_stores"] or (c["out_channels_last"] and c["group_out"] % vector == 0)
    assert d2s > 1 or not (c["bulk_stores"] and c["out_channels_last"])
    if c["bulk_stores"]:
        assert d2s > 1 or c["out_step_width"] == c["interleave"]
        stored = c["image_width"] * (out_channels if c["out_channels_last"] else 1)
        if c["tile_rows"] > 1:
            assert stored % vector == c["interleave"] * c["pitch"] % vector == 0
        if strips > 1:
            assert c["interleave"] * c["tile_columns"] % vector == 0
    return packed_bytes


def _assert_legal_boxes(main: Launch, c: dict[str, Any], vector: int) -> None:
    """Checks the tensor map of lines of the input."""
    pieces = main.arguments[0]
    assert isinstance(pieces, TensorMap)
    planes = c.get("in_depth", 1)
    pixels = c["in_height"] * c["in_width"]
    lines = c["piece_vectors"] * (8 if c["scaled_fp16"] else vector)
    channels = c["group_in"] // c.get("kernel_depth", 1)
    assert channels % lines == 0 or "kernel_depth" not in c
    assert pixels % vector == 0
    of_planes = (planes,) * ("kernel_depth" in c)
    assert pieces.sizes[:-1] == (pixels, *of_planes, c["groups"] * channels)
    reach = c["pitch"] * c["stride_width"] - gcd(c["stride_width"], c["dilation_width"]) + 1
    assert pieces.box[0] == round_up(reach + vector - 1, vector) <= 256
    assert pieces.box[1:] == (*(1 for _ in of_planes), lines, 1)


def _assert_legal_few_outputs(plan: Plan, gpu: Gpu) -> None:
    """Checks what the ``few_outputs`` kernel relies on."""
    (launch,) = plan.launches
    c: dict[str, Any] = dict(launch.kernel.constants)
    assert plan.scratch_bytes == 0
    assert launch.grid[0] in range(1, gpu.sm_count + 1)
    assert launch.grid[1:] == (1, 1)
    assert launch.block == 128 * c["warpgroups"] <= 384
    assert launch.shared_bytes == c["shared_bytes"] <= gpu.shared_bytes_per_block

    vector = 4 if c["Scalar"] == "float" else 8
    slot = round_up(c["kernel_width"] * c["group_out"], 8)
    columns = c["kernel_height"] * slot
    assert columns <= 256
    units = ceil_div(c["group_in"], 2 * vector * c["unit_steps"])
    weights = c["parts"] * units * c["unit_steps"] * 2 * columns * 16
    assert weights + c["warpgroups"] * slot * 68 * 4 <= c["shared_bytes"]

    # Every output of a strip has the pixels of all its taps among the MMA's 64.
    reach = (c["kernel_width"] - 1) * c["dilation_width"]
    assert 0 < c["lead"] + c["strip_columns"] + reach <= 64
    assert c["stride_height"] == c["stride_width"] == 1
    if c["vector_loads"]:
        assert c["in_channels_last"]
        assert c["group_in"] % vector == c["unit_steps"] % 2 == 0
    if c["pair_loads"]:
        assert not c["in_channels_last"]
        assert c["in_width"] % 2 == c["strip_columns"] % 2 == 0
        assert (c["padding_left"] + c["lead"]) % 2 == 0

    # A thread's registers hold accumulators, operands, and loads in flight.
    wide = vector == 8 and not (c["vector_loads"] or c["pair_loads"])
    used = c["parts"] * columns // 2 + 4 * c["unit_steps"] * (c["parts"] + 1 + wide)
    assert used < {2: 255, 3: 168}[c["warpgroups"]] - 16

    strips = ceil_div(c["out_width"], c["strip_columns"])
    bands = ceil_div(ceil_div(c["out_height"], c["dilation_height"]), c["band_rows"])
    items = strips * bands * c["dilation_height"] * launch.arguments[-1]
    assert launch.grid[0] * c["warpgroups"] < items + c["warpgroups"]
    assert items + gpu.sm_count * 3 < 2**31
    for size, channels in (("in", c["group_in"]), ("out", c["group_out"])):
        assert channels * c[f"{size}_height"] * c[f"{size}_width"] < 2**30


def _assert_legal_nhwc(plan: Plan, gpu: Gpu) -> None:
    """Checks what ``implicit_gemm_nhwc`` relies on; its tensor maps check themselves."""
    *packs, launch = without_copies(plan).launches
    c: dict[str, Any] = dict(launch.kernel.constants)
    input_map, weight_map, output_map, *_, batch = launch.arguments
    assert len(packs) <= 1
    weights = c["weight_out"] * c["weight_in"] * c["kernel_height"] * c["kernel_width"]
    vector = 4 if c["Scalar"] == "float" else 8
    depth, n_major = 8 * vector, c["transposed"] and vector == 8
    packed_bytes = len(packs) * 16 // vector * weights
    if plan.regions:
        _assert_legal_copies(plan, packed_bytes)
    else:
        assert (plan.packs, plan.scratch_bytes) == (len(packs), packed_bytes)
    assert weight_map.tensor == ("scratch" if packs else "weight")
    assert (input_map.scalar == weight_map.scalar == "tf32") == (vector == 4)
    assert output_map.scalar == c["Scalar"]
    assert c["in_channels"] % vector == c["out_channels"] % vector == 0

    # A stage has the size that the copies fill, and begins where their swizzle pattern begins.
    rows, columns = 64 * c["consumers"], c["tile_columns"]
    boxes = ceil_div(columns, depth)
    weight_bytes = (boxes if n_major else 1) * weight_map.box_bytes
    weight_columns = depth * boxes if n_major else columns
    assert (input_map.box_bytes, weight_bytes) == (128 * rows, 128 * weight_columns)
    stage = input_map.box_bytes + (0 if c["resident"] else weight_bytes)
    taps = c.get("kernel_depth", 1) * c["kernel_height"] * c["kernel_width"]
    stay = taps * ceil_div(c["in_channels"], depth) * weight_bytes if c["resident"] else 0
    if c["resident"]:
        assert c["dense"]
        assert c["out_channels"] <= columns
    assert columns in (64, 128, 192, 256) or 0 <= columns - c["out_channels"] < 16
    assert output_map.box_bytes == c["joined"] * 16 * 128
    assert boxes % (c["buffers"] * c["joined"]) == 0
    if c["joined"] > 1:  # Joined TMA boxes all lie side by side in memory.
        assert c["dense"]
        assert c["out_channels"] % depth == columns % depth == 0
    assert c["stages"] >= 2
    staged = 4 * c["consumers"] * c["buffers"] * c["joined"] * 16 * 128
    used = stay + c["stages"] * (stage + 16) + staged + 16
    assert used == launch.shared_bytes <= gpu.shared_bytes_per_block
    assert c["blocks"] * (launch.shared_bytes + 1024) <= gpu.shared_bytes_per_sm

    assert launch.block == 128 * c["consumers"] + 32
    assert columns // 2 + 30 <= 65536 // (c["blocks"] * launch.block)

    # Positions, also those beyond the last one, and tiles are counted in 32 bits.
    sides = ("depth", "height", "width")
    strides = prod(c.get(f"stride_{side}", 1) for side in sides) if c["transposed"] else 1
    planes = c.get("out_depth", 1)
    planes = ceil_div(planes, c["stride_depth"]) if c["transposed"] and planes > 1 else planes
    positions = batch * planes * c["position_rows"] * c["position_columns"]
    tiles = strides * ceil_div(positions, rows) * ceil_div(c["out_channels"], columns)
    assert positions + rows < 2**31
    assert launch.grid[0] <= tiles < 2**31
    assert launch.grid[0] <= c["blocks"] * gpu.sm_count


def _assert_legal_copies(plan: Plan, packed_bytes: int) -> None:
    """Checks the copies of tensors, which lie in the workspace after ``packed_bytes``."""
    begins = [region.offset for region in plan.regions]
    assert begins[0] == round_up(packed_bytes, REGION_ALIGNMENT)
    assert all(offset % REGION_ALIGNMENT == 0 for offset in begins)
    ends = [*begins[1:], plan.scratch_bytes]
    place = {
        region.name: (region.offset, end) for region, end in zip(plan.regions, ends, strict=True)
    }
    copies = [launch for launch in plan.launches if launch.kernel.entry == "transpose"]
    assert len(copies) == len(place)
    for launch in copies:
        source, target, rows, columns = launch.arguments
        (region,) = {source, target} & set(place)
        begin, end = place[region]
        images, rest = divmod(launch.grid[0], ceil_div(rows, TILE) * ceil_div(columns, TILE))
        assert rest == 0
        c: dict[str, Any] = dict(launch.kernel.constants)
        vector = 4 if c["Scalar"] == "float" else 8
        moved = 16 // vector * images * rows * columns
        assert 0 <= end - begin - moved < REGION_ALIGNMENT
        assert c["vector_loads"] == (columns % vector == 0)
        assert c["vector_stores"] == (rows % vector == 0)


def _assert_legal_nchw(plan: Plan, gpu: Gpu) -> None:
    """Checks what the ``implicit_gemm_nchw`` kernel relies on."""
    pack, launch = plan.launches
    c: dict[str, Any] = dict(launch.kernel.constants)
    batch = launch.arguments[-1]
    assert plan.packs == 1
    assert pack.kernel.constants == launch.kernel.constants
    assert launch.block == 384
    assert launch.grid[0] in range(1, gpu.sm_count + 1)

    axes = [_planes_axis(c, side) for side in ("height", "width")]
    residues, reached, units, unit_taps = (prod(of) for of in zip(*axes, strict=True))
    assert residues <= 16
    assert c["columns"] % 8 == 0
    assert reached * c["row_tiles"] * c["columns"] <= 256
    assert c["tile_pixels"] <= 128 * c["row_tiles"]
    assert c["vector"] in (1, 2 * c["row_tiles"])
    if c["vector"] > 1:
        assert c["flat"]
        assert c["tile_pixels"] % 4 == c["image_pixels"] % 4 == 0
    assert not c["pairs"] or (
        c["transposed"] and c["stride_width"] == 2 and c["out_width"] % 2 == 0
    )

    # Stages, which begin at multiples of 128 bytes, or of 16 for bulk copies.
    assert c["groups"] == 1 or c["group_in"] % c["chunk"] == 0
    piece = 4 * c["chunk"] * c["pitch"]
    weights = unit_taps * 4 * c["chunk"] * c["columns"]
    assert piece % (16 if c["bulk"] else 128) == weights % 128 == 0
    if c["bulk"]:
        assert c["groups"] * c["group_in"] * c["in_height"] * c["in_width"] % 4 == 0
    else:
        assert launch.arguments[0].box_bytes == piece
    used = c["input_stages"] * (c["pieces"] * piece + 16) + c["weight_stages"] * (weights + 16)
    assert used <= launch.shared_bytes == c["shared_bytes"] <= gpu.shared_bytes_per_block
    chunks = ceil_div(c["group_in"], c["chunk"])
    tiles_across = c["groups"] * ceil_div(c["group_out"], c["columns"])
    if c["resident"]:
        assert (tiles_across, c["weight_stages"]) == (1, chunks * units)
    assert c["input_stages"] >= 2
    assert c["weight_stages"] >= min(2, chunks * units)

    assert 128 * c["producer_registers"] + 256 * c["consumer_registers"] <= 384 * REGISTERS
    taps = c["kernel_height"] * c["kernel_width"]
    assert plan.scratch_bytes == tiles_across * chunks * taps * 4 * c["chunk"] * c["columns"]
    positions = batch * c["image_pixels"]
    assert positions + c["tile_pixels"] < 2**31
    assert launch.grid[0] <= ceil_div(positions, c["tile_pixels"]) * tiles_across < 2**31


def _planes_axis(c: dict[str, Any], side: str) -> tuple[int, int, int, int]:
    """The number of residues, of those with taps, of offsets, and the most taps of an offset."""
    stride = c[f"stride_{side}"] if c["transposed"] else 1
    padding = c["padding_top" if side == "height" else "padding_left"]
    reaches = [tap * c[f"dilation_{side}"] - padding for tap in range(c[f"kernel_{side}"])]
    offsets = [reach // stride for reach in reaches]
    return (
        stride,
        len({reach % stride for reach in reaches}),
        len(set(offsets)),
        max(map(offsets.count, offsets)),
    )
