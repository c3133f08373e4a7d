"""What chooses the code of Ampere's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fastconv.kernels.ampere.correlate import ABSENT
from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.classes import Anatomy
from fastconv.kernels.family import GEOMETRY, Constant


def _correlate(c: Mapping[str, Any]) -> dict[str, Constant]:
    halves = c["halves"] or c["Scalar"] != "float"
    chunk = 2 * c["k_steps"] * (8 if halves else 4)  # channels
    common = gcd(c["stride_height"], c["dilation_height"])
    row_phases = c["stride_height"] // common
    column_phases = c["stride_width"] // gcd(c["stride_width"], c["dilation_width"])
    slots = min(c["kernel_height"], row_phases) * min(c["kernel_width"], column_phases)
    rows = c["block_rows"] + (c["kernel_height"] - 1) // row_phases
    units = 2 * c["k_steps"] * (slots * rows * c["pitch"] + c["plane_padding"])
    batch = c["loaders"] * c["batch"]
    stages = c["kernel_height"] * c["kernel_width"] // c["stage_taps"]
    pixels = c["block_rows"] * c["tile_columns"]
    return {
        "16 bits": c["Scalar"] != "float",
        "folded": c["fold_height"] * c["fold_width"] > 1,
        "grouped": c["groups"] > 1,
        "phases": row_phases * column_phases > 1,
        "row step": c["dilation_height"] > common,
        "rows": c["block_rows"] > 1,
        "several chunks": c["group_in"] > chunk,
        "whole chunks": c["group_in"] % chunk == 0,
        "several stages": stages > 1,
        "batches beyond stages": ceil_div(units, batch) > stages,
        "whole batches": units % batch == 0,
        "idle pixels": pixels < c["warps"] // c["channel_groups"] * c["pixels"],
        "several passes": c["pixels"] > c["pass_pixels"],
        "output step": c["out_step_height"] > 1 or c["out_step_width"] > 1,
        "stores": min((c["row_end"] - c["row_begin"]) * (c["column_end"] - c["column_begin"]), 2),
    }


CORRELATE = Anatomy(
    sizes=GEOMETRY
    | ABSENT.keys()
    | {
        "fold_height", "fold_width", "weight_height", "weight_width", "last_tap_row",
        "last_tap_column", "tap_step_height", "tap_step_width", "image_height", "image_width",
        "out_step_height", "out_step_width", "row_at", "row_begin", "row_end", "column_at",
        "column_begin", "column_end", "column_sums", "interleave", "warps", "blocks", "pixels",
        "block_rows", "tile_columns", "pitch", "plane_padding", "k_steps", "stage_taps",
        "weight_stages", "loaders", "unit_vectors", "batch", "pass_pixels", "shared_bytes",
        "packed_at", "tables_at", "table_channels", "table_columns",
    },
    chosen=_correlate,
    parts={
        "load": (
            "16 bits", "parts", "halves", "ties_to_even", "in_channels_last", "vector_loads",
            "folded", "phases", "repairs", "whole chunks", "whole batches",
            "batches beyond stages",
        ),
        "multiply": (
            "Scalar", "parts", "halves", "low_products", "compensated", "resident",
            "product_rows", "channel_groups", "several chunks", "several stages", "phases",
        ),
        "store": (
            "16 bits", "halves", "out_channels_last", "store_vector", "several passes",
            "product_rows", "output step", "stores", "idle pixels",
        ),
        "pack": (
            "Scalar", "parts", "halves", "transposed", "folded", "repairs", "grouped",
            "ties_to_even",
        ),
    },
)  # fmt: skip

ANATOMIES = {"ampere/correlate.cuh": CORRELATE}
