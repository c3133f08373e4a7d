"""What chooses the code of Ampere's weight gradient."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fastconv.kernels.classes import Anatomy
from fastconv.kernels.family import GEOMETRY, Constant


def _weight_grad(c: Mapping[str, Any]) -> dict[str, Constant]:
    halves = c["Scalar"] != "float"
    common = gcd(c["stride_height"], c["dilation_height"])
    row_pairs = halves and c["strip_columns"] % 16 == 8
    one_column = c["box_columns"] == 1
    unit = c["stride_width"] if one_column else gcd(c["stride_width"], c["dilation_width"])
    box_size = c["box_channels"] * c["box_rows"] * c["box_columns"]
    return {
        "16 bits": halves,
        "grouped": c["groups"] > 1,
        "input through registers": halves and (not c["in_channels_last"] or c["in_vector"] == 1),
        "gradient through registers": halves and c["grad_vector"] == 1,
        "row step": c["dilation_height"] > common,
        "skipped rows": c["stride_height"] // common > c["box_rows"],
        "skipped columns": unit > 1,
        "shifted": c["shift"] > 0,
        "row pairs": row_pairs,
        "several tiles": c["row_tiles"] > 1,
        "odd units": c["units"] % 2 == 1,
        "mixed units": c["box_channels"] % 8 > 0,
        "idle units": box_size < 8 * c["units"] * c["warps_units"],
        "pixels shared": c["warps_pixels"] > 1,
        "several boxes": box_size < c["group_in"] * c["kernel_height"] * c["kernel_width"],
    }


WEIGHT_GRAD = Anatomy(
    sizes=GEOMETRY
    | {
        "row_tiles", "units", "warps_out", "warps_units", "warps_pixels", "box_channels",
        "box_rows", "box_columns", "strip_columns", "step_rows", "steps", "slice_products",
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
                     "row pairs", "several tiles", "odd units", "mixed units", "pixels shared"),
        "reduce": ("Scalar", "bias", "grouped", "several tiles", "idle units", "pixels shared",
                   "several boxes"),
    },
)  # fmt: skip

ANATOMIES = {"ampere/weight_grad.cuh": WEIGHT_GRAD}
