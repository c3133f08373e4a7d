"""Which constants select code paths of Ampere's kernels, for the coverage corpus."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fastconv.kernels.ampere.halo.plan import ABSENT
from fastconv.kernels.coverage import Anatomy, volume
from fastconv.kernels.family import GEOMETRY, Constant


def _halo(c: Mapping[str, Any]) -> dict[str, Constant]:
    is_16_bit = c["scaled_fp16"] or c["Scalar"] != "float"
    chunk = 2 * c["k_steps"] * (8 if is_16_bit else 4)  # channels
    common = gcd(c["stride_height"], c["dilation_height"])
    row_residues = c["stride_height"] // common
    column_residues = c["stride_width"] // gcd(c["stride_width"], c["dilation_width"])
    slots = min(c["kernel_height"], row_residues) * min(c["kernel_width"], column_residues)
    rows = c["block_rows"] + (c["kernel_height"] - 1) // row_residues
    units = 2 * c["k_steps"] * (slots * rows * c["pitch"] + c["plane_padding"])
    units //= 1 if c["vector_loads"] else c["unit_vectors"]
    batch = c["loaders"] * c["batch"]
    stages = c["kernel_height"] * c["kernel_width"] // c["stage_taps"]
    pixels = c["block_rows"] * c["tile_columns"]
    return {
        "16 bits": c["Scalar"] != "float",
        "space-to-depth": c["s2d_height"] * c["s2d_width"] > 1,
        "grouped": c["groups"] > 1,
        "residues": row_residues * column_residues > 1,
        "row step": c["dilation_height"] > common,
        "rows": c["block_rows"] > 1,
        "several chunks": c["group_in"] > chunk,
        "whole chunks": c["group_in"] % chunk == 0,
        "several stages": stages > 1,
        "several flushes": c["parts"] == 2 and c["period_taps"] > c["flush_taps"],
        "several periods": c["parts"] == 2 and c["stage_taps"] > c["period_taps"],
        "several batches": units > batch,
        "whole batches": units % batch == 0,
        "channels shared": c["channel_groups"] > 1,
        "few rows": c["register_tile_m"] < 32,
        "rows first": c["pixels"] <= c["register_tile_m"],
        "idle pixels": pixels < c["warps"] // c["channel_groups"] * c["pixels"],
        "several passes": c["pixels"] > c["pass_pixels"],
        "output step": c["out_step_height"] > 1 or c["out_step_width"] > 1,
        "stores": min((c["row_end"] - c["row_begin"]) * (c["column_end"] - c["column_begin"]), 2),
        **volume(c),
    }


HALO = Anatomy(
    sizes=GEOMETRY
    | ABSENT.keys()
    | {
        "s2d_height", "s2d_width", "weight_height", "weight_width", "last_tap_row",
        "last_tap_column", "tap_step_height", "tap_step_width", "tap_dilation_height",
        "tap_dilation_width", "image_height", "image_width",
        "out_step_height", "out_step_width", "row_at", "row_begin", "row_end", "column_at",
        "column_begin", "column_end", "stacked_columns", "interleave", "d2s_height",
        "d2s_width", "warps", "register_tile_m",
        "channel_groups", "pixels",
        "block_rows", "tile_columns", "pitch", "plane_padding", "k_steps", "stage_taps",
        "period_taps", "flush_taps", "input_stages", "weight_stages", "loaders", "unit_vectors",
        "batch", "batches_ahead", "pass_pixels", "buffers", "shared_bytes",
        "packed_at", "tables_at", "table_channels", "table_columns",
    },
    chosen=_halo,
    parts={
        "load": (
            "16 bits", "parts", "scaled_fp16", "ties_to_even", "in_channels_last", "vector_loads",
            "space-to-depth", "residues", "repairs", "whole chunks", "whole batches",
            "several batches",
        ),
        "multiply": (
            "Scalar", "parts", "scaled_fp16", "low_low_mma", "compensated", "resident",
            "channels shared", "rows first", "several chunks", "several stages", "residues",
            "several flushes", "several periods",
        ),
        "store": (
            "16 bits", "scaled_fp16", "out_channels_last", "store_vector", "several passes",
            "few rows", "output step", "stores", "idle pixels",
        ),
        "pack": (
            "Scalar", "parts", "scaled_fp16", "transposed", "space-to-depth", "repairs", "grouped",
            "ties_to_even",
        ),
    },
)  # fmt: skip


def _weight_grad(c: Mapping[str, Any]) -> dict[str, Constant]:
    is_16_bit = c["Scalar"] != "float"
    common = gcd(c["stride_height"], c["dilation_height"])
    row_pairs = is_16_bit and c["strip_columns"] % 16 == 8
    one_tap_column = c["tile_columns"] == 1
    unit = c["stride_width"] if one_tap_column else gcd(c["stride_width"], c["dilation_width"])
    tile_weights = c["tile_channels"] * c["tile_rows"] * c["tile_columns"]
    return {
        "16 bits": is_16_bit,
        "grouped": c["groups"] > 1,
        "input through registers": is_16_bit and (not c["in_channels_last"] or c["in_vector"] == 1),
        "gradient through registers": is_16_bit and c["grad_vector"] == 1,
        "row step": c["dilation_height"] > common,
        "skipped rows": c["stride_height"] // common > c["tile_rows"],
        "skipped columns": unit > 1,
        "shifted": c["shift"] > 0,
        "row pairs": row_pairs,
        "several row tiles": c["row_tiles"] > 1,
        "odd units": c["units"] % 2 == 1,
        "mixed units": c["tile_channels"] % 8 > 0,
        "idle units": tile_weights < 8 * c["units"] * c["warps_units"],
        "pixels shared": c["warps_pixels"] > 1,
        "several tiles": tile_weights < c["group_in"] * c["kernel_height"] * c["kernel_width"],
        **volume(c),
    }


WEIGHT_GRAD = Anatomy(
    sizes=GEOMETRY
    | {
        "row_tiles", "units", "warps_out", "warps_units", "warps_pixels", "tile_channels",
        "tile_rows", "tile_columns", "strip_columns", "step_rows", "steps", "slice_mmas",
        "in_lanes", "in_pitch", "in_batch", "shift", "grad_lanes", "grad_pitch", "grad_batch",
        "flush_steps", "shared_bytes",
    },
    chosen=_weight_grad,
    parts={
        "input": ("16 bits", "in_channels_last", "in_vector", "input through registers", "rolling",
                  "skipped rows", "skipped columns", "shifted"),
        "gradient": ("16 bits", "grad_channels_last", "grad_vector", "gradient through registers",
                     "row step"),
        "multiply": ("Scalar", "parts", "bias", "grad_channels_last", "in_channels_last", "rolling",
                     "row pairs", "several row tiles", "odd units", "mixed units", "pixels shared"),
        "reduce": ("Scalar", "bias", "grouped", "several row tiles", "idle units", "pixels shared",
                   "several tiles"),
    },
)  # fmt: skip

ANATOMIES = {
    "ampere/halo/kernel.cuh": HALO,
    "ampere/wgrad_halo/kernel.cuh": WEIGHT_GRAD,
}
