"""Coverage classes of Hopper's kernels: the choices that select the code of each part."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.coverage import OF_PAIRS, Anatomy, volume
from fastconv.kernels.family import GEOMETRY, Constant
from fastconv.kernels.hopper.block import OUTPUTS


def _vector(c: Mapping[str, Any]) -> int:
    """Elements in 16 bytes."""
    return 4 if c["Scalar"] == "float" else 8


def _taps(c: Mapping[str, Any]) -> int:
    taps: int = c.get("kernel_depth", 1) * c["kernel_height"] * c["kernel_width"]
    return taps


def _axis(c: Mapping[str, Any], side: str) -> tuple[int, int]:
    """The number of residues of taps, and the distance of outputs that read the same input."""
    stride, dilation = c[f"stride_{side}"], c[f"dilation_{side}"]
    common = gcd(stride, dilation)
    return stride // common, dilation // common


def _halo(c: Mapping[str, Any]) -> dict[str, Constant]:
    vector = _vector(c)
    channels = 2 * c["k_steps"] * (8 if c["scaled_fp16"] else vector)  # of a chunk
    strips = ceil_div(c["out_width"] + max(c["lead"] - 1, 0), c["tile_columns"])
    stored = c["out_width"] if c["interleave"] == 1 else c["image_width"]
    depth_to_space = c["d2s_height"] * c["d2s_width"] > 1
    whole = strips == 1 or c["interleave"] * c["tile_columns"] % vector == 0
    gap = (c["kernel_width"] - 1) * c["dilation_width"]
    residues, row_step = _axis(c, "height")
    return {
        "16 bits": vector == 8,
        "stacked": c["stack"] > 1,
        "space-to-depth": c["s2d_height"] * c["s2d_width"] > 1,
        "grouped": c["groups"] > 1,
        "residues": residues * _axis(c, "width")[0] > 1,
        "row step": row_step > 1,
        "rows": c["tile_rows"] > 1,
        "several strips": strips > 1,
        "several chunks": c["group_in"] > channels,
        "lead": c["lead"] > 0,
        "passes": min(ceil_div(c["pixels"], c["pass_pixels"]), 2),
        "raw residues": c["staged"] and _raw_residues(c),
        "two producers": c["loader_warps"] > 3,
        "raw aligned": c["staged"]
        and strips == 1
        and c["padding_left"] >= 0
        and c["in_width"] % vector == 0,
        "rows aligned": c["bulk_stores"]
        and c["lead"] == 0
        and stored % vector == 0
        and whole
        and not depth_to_space,
        "even rows": c["out_width"] % 2 == 0 and gap % 2 == 0,
        "output step": c["out_step_height"] > 1 or c["out_step_width"] > 1,
        "interleave": "residues" if depth_to_space else c["interleave"],
        **(_residue_channels(c) if depth_to_space else dict.fromkeys(RESIDUE_CHANNELS, False)),
        "stores": 1
        if depth_to_space
        else min((c["row_end"] - c["row_begin"]) * (c["column_end"] - c["column_begin"]), 2),
        "many stages": c["input_stages"] > 2,
        **_half_copy(c),
        **volume(c),
    }


def _half_copy(c: Mapping[str, Any]) -> dict[str, Constant]:
    """Choices of a kernel that reads a float16 copy, or repairs what one did; others have none."""
    if "copied_planes" not in c:
        return {}
    if "copy_vectors" not in c:
        return {"half copy": "repaired"}
    across = c["group_in"] * c["groups"] // c.get("kernel_depth", 1) // (8 * c["copy_vectors"])
    return {"half copy": "several tiles of channels" if across > 1 else "whole pixels"}


def _raw_residues(c: Mapping[str, Any]) -> str:
    """Which columns of a raw line pixels read: neighbours, some, or those of several residues."""
    slots = min(c["kernel_width"], _axis(c, "width")[0])
    return "several" if slots > 1 else "some" if c["stride_width"] > 1 else "neighbours"


RESIDUE_CHANNELS = ("pairs", "early", "idle rows", "lines", "empty residues", "dilated residues")


def _residue_channels(c: Mapping[str, Any]) -> dict[str, Constant]:
    """Choices of how residues that are channels are packed and stored."""
    residues = c["d2s_height"] * c["d2s_width"]
    column = c["group_out"] // residues if c["out_channels_last"] else 1
    rows = OUTPUTS // c["stack"]
    even = column * c["image_width"] % 2 == column * c["column_begin"] % 2 == 0
    return {
        "pairs": c["interleave"] % 2 == 0 and (even or not c["bulk_stores"]),
        "early": c["row_begin"] < 0 or c["column_begin"] < 0,
        "idle rows": rows % c["interleave"] > 0,
        "lines": min(rows // c["interleave"], 2),
        "empty residues": any(_has_empty_residues(c, side) for side in ("height", "width")),
        "dilated residues": c["tap_dilation_height"] * c["tap_dilation_width"] > 1,
    }


def _has_empty_residues(c: Mapping[str, Any], side: str) -> bool:
    """Whether there are residues along an axis that no tap reaches."""
    residues, dilation = c[f"d2s_{side}"], c[f"tap_dilation_{side}"]
    return bool(c[f"weight_{side}"] < residues or gcd(residues, dilation) > 1)


HALO = Anatomy(
    sizes=GEOMETRY
    | {
        "interleave", "d2s_height", "d2s_width", "s2d_height", "s2d_width",
        "weight_height", "weight_width", "last_tap_row",
        "last_tap_column", "tap_step_height", "tap_step_width", "tap_dilation_height",
        "tap_dilation_width", "image_height", "image_width",
        "out_step_height", "out_step_width", "row_at", "row_begin", "row_end", "column_at",
        "column_begin", "column_end", "stack", "pixels", "tile_rows", "block_rows",
        "register_tile_m", "loaders", "loader_warps", "piece_vectors", "threads", "unit_vectors",
        "smaller_part", "watches", "tile_columns", "pitch",
        "lead", "plane_padding", "segment_tiles", "k_steps", "stage_taps", "input_stages",
        "weight_stages", "pass_pixels", "buffers", "raw_slots", "batch", "batches_ahead",
        "producer_registers", "consumer_registers", "shared_bytes", "packed_at", "tables_at",
        "table_channels", "table_columns", "copied_planes", "copy_vectors", "copy_pixels",
    },
    chosen=_halo,
    parts={
        "load": (
            "16 bits", "parts", "scaled_fp16", "ties_to_even", "in_channels_last", "vector_loads",
            "staged", "bulk_loads", "box_loads", "wraps", "rolling", "space-to-depth", "residues",
            "raw residues", "raw aligned", "two producers", "repairs",
        ),
        "multiply": (
            "Scalar", "parts", "scaled_fp16", "low_low_mma", "compensated", "rolling", "resident",
            "turns", "channel_groups", "stacked", "several chunks", "residues",
        ),
        "store": (
            "16 bits", "scaled_fp16", "out_channels_last", "vector_stores", "bulk_stores",
            "joint_stores", "wraps", "interleave", "stacked_columns", "stacked", "lead",
            "rows aligned", "even rows", "passes", "output step", "stores", *RESIDUE_CHANNELS,
        ),
        "pack": (
            "Scalar", "parts", "scaled_fp16", "transposed", "space-to-depth", "stacked",
            "stacked_columns", "repairs", "grouped", "ties_to_even", "interleave",
            "out_channels_last", "idle rows", "dilated residues",
        ),
    },
)  # fmt: skip


def _few_outputs(c: Mapping[str, Any]) -> dict[str, Constant]:
    return {
        "16 bits": _vector(c) == 8,
        "lead": c["lead"] > 0,
        "row step": c["dilation_height"] > 1,
        "one row": c["kernel_height"] == 1,
        "one unit": c["group_in"] <= 2 * _vector(c) * c["unit_steps"],
    }


FEW_OUTPUTS = Anatomy(
    sizes=GEOMETRY | {"lead", "strip_columns", "band_rows", "unit_steps", "shared_bytes"},
    chosen=_few_outputs,
    parts={
        "load": ("Scalar", "parts", "ties_to_even", "in_channels_last", "vector_loads",
                 "pair_loads", "one unit"),
        "multiply": ("Scalar", "parts", "low_low_mma", "compensated", "one row", "one unit"),
        "store": ("16 bits", "out_channels_last", "lead", "row step", "warpgroups"),
        "weights": ("Scalar", "parts", "ties_to_even", "transposed", "vector_loads"),
    },
)  # fmt: skip


def _wgrad_few_inputs(c: Mapping[str, Any]) -> dict[str, Constant]:
    residues, row_step = _axis(c, "height")
    return {
        "row step": row_step > 1,
        "old rows": residues < c["kernel_height"],
        "several channels": c["group_in"] > 1,
    }


WGRAD_FEW_INPUTS = Anatomy(
    sizes=GEOMETRY | {"unit_steps", "band_rows", "flush_steps", "shared_bytes"},
    chosen=_wgrad_few_inputs,
    parts={
        "load": ("Scalar", "parts", "in_channels_last", "old rows", "several channels"),
        "multiply": ("Scalar", "parts", "bias", "grad_channels_last", "pair_loads", "warpgroups"),
    },
)


def _wgrad_halo(c: Mapping[str, Any]) -> dict[str, Constant]:
    vector, last = _vector(c), c["grad_channels_last"]
    residues, row_step = _axis(c, "height")
    next_tap = c["mma_octets"] == 1 and c["mma_taps"] > 1
    return {
        "16 bits": vector == 8,
        "grouped": c["groups"] > 1,
        "lead": c["lead"] > 0,
        "shifted": not last and c["grad_vector"] < vector,
        "copied": 0
        if c["grad_boxes"]
        else gcd(c["grad_vector"], vector if last else c["out_width"]),
        "row step": row_step > 1,
        "old rows": residues < c["kernel_rows"],
        "whole pixels": last
        and c["groups"] == 1
        and c["group_out"] == c["channel_groups"] * OUTPUTS,
        "across": "taps" if next_tap else "octets" if c["mma_octets"] > 1 else "one",
        "whole planes": c["segments"] % c["kernel_rows"] == 0,
        "several segments": c["segments"] > 1,
        "interleaved": "both"
        if c["interleaved_images"] > 1 < c["interleaved_strips"]
        else "images"
        if c["interleaved_images"] > 1
        else "strips",
        "whole stages": c["out_width"] % c["stage_columns"] == 0,
        **volume(c),
    }


WGRAD_HALO = Anatomy(
    sizes=GEOMETRY
    | {
        "grad_vector", "lead", "kernel_rows", "mma_taps", "mma_octets", "segments",
        "interleaved_images", "interleaved_strips", "steps", "stage_columns", "strip_stages",
        "strip_weight", "last_strip_weight", "input_stages", "grad_stages", "flush_steps", "batch",
        "producer_registers", "consumer_registers", "shared_bytes", "slots_at",
    },
    chosen=_wgrad_halo,
    parts={
        "load": ("16 bits", "parts", "scaled_fp16", "ties_to_even", "in_channels_last",
                 "vector_input", "old rows", "interleaved", "across", "grad_boxes"),
        "copy": ("16 bits", "grad_channels_last", "grad_bulk", "grad_boxes", "plane_classes",
                 "lead", "shifted", "copied", "whole pixels", "interleaved"),
        "multiply": ("Scalar", "parts", "scaled_fp16", "ties_to_even", "bias", "grad_channels_last",
                     "channel_groups", "whole planes", "several segments", "across", "lead",
                     "shifted", "whole stages", "grad_boxes", "plane_classes"),
        "reduce": ("Scalar", "parts", "scaled_fp16", "repairs", "bias", "grouped", "channel_groups",
                   "plane_classes", "across"),
    },
)  # fmt: skip


PADDING = {"depth": "padding_front", "height": "padding_top", "width": "padding_left"}


def _reaches(c: Mapping[str, Any], side: str) -> list[int]:
    """The distance from a position to what each tap of an axis reads."""
    padding = c[PADDING[side]]
    return [tap * c[f"dilation_{side}"] - padding for tap in range(c[f"kernel_{side}"])]


def _residues(c: Mapping[str, Any], side: str) -> tuple[int, int]:
    """Along an axis: the residues of a gradient's stride, and how many of them have taps."""
    stride = c[f"stride_{side}"] if c["transposed"] else 1
    return stride, len({reach % stride for reach in _reaches(c, side)})


def _empty_residues(c: Mapping[str, Any]) -> bool:
    """Whether some residue has no taps, and zeros are stored for it."""
    residues = (_residues(c, side) for side in PADDING if f"kernel_{side}" in c)
    return any(all_ > some for all_, some in residues)


def _plane_step(c: Mapping[str, Any]) -> int:
    step: int = 1 if c["transposed"] else c.get("stride_depth", 1)
    return step


def _implicit_gemm_nhwc(c: Mapping[str, Any]) -> dict[str, Constant]:
    vector = _vector(c)
    depth, mma_depth = 8 * vector, 2 * vector
    last = c["in_channels"] % depth or depth
    strides = [
        c[f"weight_stride_{side}"]
        for side in ("depth", "height", "width")
        if c.get(f"kernel_{side}", 1) > 1
    ]
    k_major_gradient = c["transposed"] and vector == 4
    inner, outer = ("out", "in") if k_major_gradient else ("in", "out")
    strides.append(c[f"weight_stride_{outer}"])
    return {
        "16 bits": vector == 8,
        "several consumers": c["consumers"] > 1,
        "boxes": min(ceil_div(c["tile_columns"], depth), 3),
        "part of a box": c["tile_columns"] % depth > 0,
        "several taps": _taps(c) > 1,
        "input step": c["input_step_height"] * c["input_step_width"] * _plane_step(c) > 1,
        "empty residues": _empty_residues(c),
        "patches": c["patch_rows"] > 0,
        "several chunks": c["in_channels"] > depth,
        "whole chunks": ceil_div(last, mma_depth) == depth // mma_depth,
        "several column tiles": c["out_channels"] > c["tile_columns"],
        "whole columns": c["out_channels"] % c["tile_columns"] == 0,
        "packed": c[f"weight_stride_{inner}"] != 1 or any(stride % vector for stride in strides),
        "pack order": "outer"
        if k_major_gradient and c["weight_stride_in"] == 1
        else "inner gradient"
        if k_major_gradient
        else "inner",
        **volume(c),
    }


IMPLICIT_GEMM_NHWC = Anatomy(
    sizes=GEOMETRY
    | {
        "in_channels", "out_channels", "weight_in", "weight_out", "image_height", "image_width",
        "position_rows", "position_columns", "lower_height", "lower_width", "input_step_height",
        "input_step_width", "consumers", "tile_columns", "blocks", "stages", "patch_rows",
        "patch_width", "patch_pitch",
        # An unaligned bias is not a coverage class; tests/emulator/test_alignment.py has some.
        "aligned_bias", "ties_to_even",
    },
    chosen=_implicit_gemm_nhwc,
    parts={
        "load": ("16 bits", "transposed", "flat", "dense", "boxes", "several taps",
                 "several chunks", "packed", "resident"),
        "multiply": ("Scalar", "transposed", "several consumers", "boxes", "part of a box",
                     "several chunks", "whole chunks", "resident"),
        "store": ("Scalar", "dense", "patches", "boxes", "part of a box", "buffers", "joined",
                  "several column tiles", "whole columns"),
        "pack": ("Scalar", "packed", "several taps", "pack order"),
    },
)  # fmt: skip


def _implicit_gemm_nchw(c: Mapping[str, Any]) -> dict[str, Constant]:
    row_residues, reached_rows = _residues(c, "height")
    column_residues, reached_columns = _residues(c, "width")
    positions, pixels = 128 * c["row_tiles"], c["grid_height"] * c["grid_width"]
    several = reached_rows * reached_columns > 1
    chunks = ceil_div(c["group_in"], c["chunk"])
    units = _offsets(c, "height") * _offsets(c, "width")
    return {
        "step": c["step_height"] * c["step_width"] > 1,
        "rows left out": not c["transposed"] and c["step_height"] < c["stride_height"],
        "long rows": not c["flat"] and c["row_pixels"] > c["in_width"],
        "several pieces": c["pieces"] > 1,
        "several images": c["image_pixels"] % c["tile_pixels"] > 0,
        "beyond the image": c["image_pixels"] > pixels,
        "beyond the tile": c["tile_pixels"] < positions,
        "several taps": c["kernel_height"] * c["kernel_width"] > 1,
        "several residues": several,
        "left over": (units if several else chunks * units) % 2 == 1,
        "row residues": min(row_residues, 3),
        "column residues": min(column_residues, 3),
        "empty residues": _empty_residues(c),
        "several chunks": chunks > 1,
        "whole chunks": c["group_in"] % c["chunk"] == 0,
        "grouped": c["groups"] > 1,
        "several column tiles": c["group_out"] > c["columns"],
        "whole columns": c["group_out"] % c["columns"] == 0,
        "biases": "some" if c["columns"] > 64 else "all",
    }


def _offsets(c: Mapping[str, Any], side: str) -> int:
    """The number of different offsets of an axis' taps; a gradient's taps may share one."""
    stride = c[f"stride_{side}"] if c["transposed"] else 1
    return len({reach // stride for reach in _reaches(c, side)})


IMPLICIT_GEMM_NCHW = Anatomy(
    sizes=GEOMETRY
    | {
        "grid_height", "grid_width", "step_height", "step_width", "columns", "tile_pixels",
        "image_pixels", "piece", "row_pixels", "pitch", "pieces", "input_stages",
        "weight_stages", "producer_registers", "consumer_registers", "shared_bytes",
    },
    chosen=_implicit_gemm_nchw,
    parts={
        "load": ("flat", "whole", "bulk", "long rows", "rows left out", "several pieces",
                 "several images", "resident", "grouped"),
        "multiply": ("ties_to_even", "flat", "whole", "bulk", "row_tiles", "chunk", "vector",
                     "resident", "several residues", "left over", "whole chunks"),
        "store": ("row_tiles", "vector", "pairs", "row residues", "column residues",
                  "empty residues", "whole columns", "grouped"),
        "pack": ("transposed", "ties_to_even", "chunk", "several taps", "whole chunks",
                 "whole columns", "grouped"),
    },
)  # fmt: skip


def _wgrad_implicit_gemm(c: Mapping[str, Any]) -> dict[str, Constant]:
    span = 16 * _vector(c) // 2  # elements in 128 bytes
    taps = _taps(c)
    group_in, group_out = (c["joined"] * c[name] for name in ("group_in", "group_out"))
    dense = c["few"] or c["by_taps"]
    unit = 1 if dense else span if c["channels_last"] and c["input_copied"] else 8
    tap_columns = ceil_div(group_in, unit) * unit
    rows, columns = 64 * c["row_groups"], c["column_groups"] * c["mma_columns"]
    of_line = c["by_taps"] or (c["input_copied"] and not c["channels_last"])
    positions = c.get("out_depth", 1) * c["out_height"] * c["out_width"]
    line = c["out_width"] if c["by_taps"] else positions
    mmas = ceil_div(line % span, span // 4) % 4
    return {
        "several rows": c["row_groups"] > 1,
        "several columns": c["column_groups"] > 1,
        "boxes": min(ceil_div(c["mma_columns"], 64), 3),
        "several taps": taps > 1,
        "several tiles": min(ceil_div(group_out, rows), 2)
        * min(ceil_div(taps * tap_columns, columns), 2),
        "several groups": c["groups"] > c["joined"],
        "joined groups": c["joined"] > 1,
        "whole rows": group_out % rows == 0,
        "whole columns": taps * tap_columns % columns == 0 and group_in == tap_columns,
        "whole octets": group_in % 8 == 0,
        "last MMAs": mmas if of_line else 0,
        "neighbours": c["weight_stride_in"] == 1,
        "clusters": c["cluster"] > 1,
        "vectors": _has_vectors(c, taps),
        **volume(c),
    }


def _has_vectors(c: Mapping[str, Any], taps: int) -> bool:
    """Whether four columns of the GEMM are neighbours in the weight, aligned to their bytes."""
    far = ["weight_start", "weight_stride_out"]
    if c["by_taps"]:
        columns = c["group_in"] * taps
        dense = c["weight_stride_in"] == taps
        dense = dense and (c["kernel_width"] == 1 or c["weight_stride_width"] == 1)
        rows = c["kernel_height"] == 1 or c["weight_stride_height"] == c["kernel_width"]
        dense = dense and rows
    else:
        columns = c["group_in"]
        dense = c["weight_stride_in"] == 1
        sides = ("depth", "height", "width") if "kernel_depth" in c else ("height", "width")
        far += [f"weight_stride_{side}" for side in sides] if taps > 1 else []
    return c["aligned"] and dense and columns % 4 == 0 and not any(c[name] % 4 for name in far)


WGRAD_IMPLICIT_GEMM = Anatomy(
    sizes=GEOMETRY
    | {
        "joined", "row_groups", "column_groups", "mma_columns", "blocks", "stages",
        "flush_steps", "cluster", "team_warps", "weight_start", "aligned",
    },
    chosen=_wgrad_implicit_gemm,
    parts={
        "load": ("channels_last", "grad_copied", "input_copied", "flat", "several rows",
                 "several columns", "boxes", "several taps", "several groups", "whole columns",
                 "depth"),
        "gather": ("Scalar", "channels_last", "grad_copied", "input_copied", "parts", "few",
                   "by_taps", "teams", "several taps", "several groups", "whole rows",
                   "whole columns", "whole octets"),
        "multiply": ("Scalar", "channels_last", "grad_copied", "input_copied", "bias", "parts",
                     "several rows", "several columns", "boxes", "last MMAs", "depth"),
        "store": ("Scalar", "whole", "clusters", "bias", "boxes", "few", "by_taps",
                  "several taps", "joined groups", "whole rows", "whole columns", "neighbours",
                  "vectors"),
        "reduce": ("Scalar", "whole", "clusters", "bias", "reduce_parts", "several tiles", "few",
                   "by_taps", "several taps", "several groups", "joined groups", "whole rows",
                   "whole columns"),
    },
)  # fmt: skip


def _wgrad_boxes(c: Mapping[str, Any]) -> dict[str, Constant]:
    """Choices of the same kernel where its boxes have a halo."""
    channels, columns = c["halo_channels"], c["mma_columns"] // c["halo_mma_chunks"]
    upright = c["kernel_width"] == 1 < c["kernel_height"]
    along = c["kernel_height"] if upright else c["kernel_width"]
    tiles = (
        ceil_div(c.get("kernel_depth", 1), c["halo_planes"])
        * (1 if upright else ceil_div(c["kernel_height"], c["halo_rows"]))
        * ceil_div(c["group_in"], c["halo_chunks"] * channels)
    )
    return {
        "several rows": c["row_groups"] > 1,
        "several columns": c["column_groups"] > 1,
        "several units": c["halo_units"] > 1,
        "several chunks": c["halo_chunks"] > 1,
        "several tiles": min(ceil_div(c["group_out"], 64 * c["row_groups"]), 2) * min(tiles, 2),
        "upright": upright,
        "pieces": columns // channels < along,
        "strided": 0 if upright else min(c["stride_width"], 2) - 1,
        "chunks an MMA": c["halo_mma_chunks"] > 1,
        "pairs in rows": c["patch_columns"] % 16 == 0,
        "gives registers": c["consumer_registers"] > 0,
        "whole rows": c["group_out"] % (64 * c["row_groups"]) == 0,
        "whole chunks": c["group_in"] % (c["halo_chunks"] * channels) == 0,
        "neighbours": c["weight_stride_in"] == 1,
        **volume(c),
    }


WGRAD_BOXES = Anatomy(
    sizes=GEOMETRY
    | {
        "channels_last", "grad_copied", "input_copied", "flat", "few", "by_taps", "parts", "joined",
        "row_groups", "column_groups", "mma_columns", "depth", "blocks", "stages", "teams",
        "team_warps", "flush_steps", "cluster", "weight_start", "aligned", "ties_to_even",
        "halo_units", "halo_planes", "halo_rows", "halo_chunks", "patch_rows", "patch_columns",
        "halo_mma_chunks", "consumer_registers", "producer_registers", "most_registers",
    },
    chosen=_wgrad_boxes,
    parts={
        "load": ("halo_channels", "several rows", "several chunks", "split_rows", "upright",
                 "strided", "whole chunks"),
        "multiply": ("Scalar", "bias", "halo_channels", "several rows", "several columns",
                     "several units", "upright", "pieces", "strided", "chunks an MMA",
                     "pairs in rows", "split_rows", "gives registers"),
        "store": ("Scalar", "whole", "bias", "upright", "pieces", "chunks an MMA",
                  "several units", "whole rows", "whole chunks", "neighbours"),
        "reduce": ("Scalar", "whole", "bias", "reduce_parts", "several tiles", "upright",
                   "whole rows", "whole chunks"),
    },
)  # fmt: skip

RELAYOUT = Anatomy(
    sizes=frozenset({"threads", "shared_bytes"}) | OF_PAIRS,
    chosen=lambda constants: {"16 bits": _vector(constants) == 8},
    parts={"load": ("16 bits", "vector_loads"), "store": ("16 bits", "vector_stores")},
)


def _patches(c: Mapping[str, Any]) -> dict[str, Constant]:
    pieces = c["channels"] * _taps(c) // 4
    return {
        "several pieces": c["kernel_width"] > 4,
        "whole pieces": pieces % 4 == 0,
        "even MMAs": ceil_div(*((pieces, 4) if c["transposed"] else (c["filters"], 16))) % 2 == 0,
        "whole filters": c["filters"] % 16 == 0,
    }


PATCHES = Anatomy(
    sizes=GEOMETRY
    | {
        "channels", "filters", "depth", "height", "width", "patches_deep", "patches_down",
        "patches_across", "blocks_per_sm", "shared_bytes",
    },
    chosen=_patches,
    parts={
        "load": ("Scalar", "transposed", "copied_patches", "several pieces", "whole pieces"),
        "multiply": ("Scalar", "transposed", "whole pieces", "whole filters", "even MMAs"),
        "store": ("Scalar", "transposed", "copied_patches", "several pieces", "whole filters"),
    },
)  # fmt: skip

ANATOMIES = {
    "hopper/halo/kernel.cuh": HALO,
    "hopper/few_outputs/kernel.cuh": FEW_OUTPUTS,
    "hopper/implicit_gemm_nhwc/kernel.cuh": IMPLICIT_GEMM_NHWC,
    "hopper/implicit_gemm_nchw/kernel.cuh": IMPLICIT_GEMM_NCHW,
    "hopper/wgrad_implicit_gemm/kernel.cuh": WGRAD_IMPLICIT_GEMM,
    "hopper/wgrad_implicit_gemm/halo_kernel.cuh": WGRAD_BOXES,
    "hopper/wgrad_few_inputs/kernel.cuh": WGRAD_FEW_INPUTS,
    "hopper/wgrad_halo/kernel.cuh": WGRAD_HALO,
    "hopper/relayout/kernel.cuh": RELAYOUT,
    "hopper/patches/kernel.cuh": PATCHES,
}
