"""Which constants select code paths of the portable kernels, for the coverage corpus."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.coverage import Anatomy, volume
from fastconv.kernels.direct.forward.plan import PIXELS
from fastconv.kernels.family import GEOMETRY, Constant

_BYTES = {"double": 8, "float": 4}  # all other scalars have 2


def _taps(c: Mapping[str, Any], side: str) -> tuple[int, int]:
    """The most taps that a residue of the stride has along a side, and the number of residues."""
    if not c["transposed"]:
        return c[f"kernel_{side}"], 1
    residues = c[f"stride_{side}"] // gcd(c[f"stride_{side}"], c[f"dilation_{side}"])
    return ceil_div(c[f"kernel_{side}"], residues), residues


def _forward(c: Mapping[str, Any]) -> dict[str, Constant]:
    transposed, stride = c["transposed"], (c["stride_height"], c["stride_width"])
    (rows, row_residues), (columns, column_residues) = _taps(c, "height"), _taps(c, "width")
    channels = min(c["channels_per_thread"], 4)
    if not c["aligned"]:
        stored = 1
    elif c["out_channels_last"]:
        stored = gcd(c["group_out"], channels)
    else:
        stored = 1 if transposed and stride[1] > 1 else gcd(c["out_width"], PIXELS)
    return {
        "bytes": _BYTES.get(c["Scalar"], 2),
        "grouped": c["groups"] > 1,
        "strided": max(stride) > 1 and not transposed,
        "one row": c["stage_taps"] == 1,
        "one column": c["part_taps"] == 1,
        "residues": row_residues * column_residues > 1,
        "output step": transposed and max(stride) > 1,
        "several parts": columns > c["part_taps"],
        "several rows": rows > c["stage_taps"],
        "taps differ": c["kernel_height"] % row_residues + c["kernel_width"] % column_residues > 0,
        "stages flushed together": c["two_level"] and c["flush_stages"] > 1,
        "rows flushed": c["flush_rows"] < c["stage_taps"],
        "unrolled": c["stage_taps"] * c["part_taps"] <= c["unrolled_taps"],
        "stored": stored,
        **volume(c),
    }


FORWARD = Anatomy(
    sizes=GEOMETRY
    | {
        "lanes_y", "lanes_x", "warps", "stage_channels", "stage_taps", "part_taps",
        "unrolled_taps", "pitch_padding", "flush_channels", "flush_stages", "flush_rows",
        "shared_bytes", "blocks_per_sm",
    },
    chosen=_forward,
    parts={
        "load": ("bytes", "in_channels_last", "vector", "strided", "one row", "one column",
                 "residues"),
        "multiply": ("bytes", "channels_per_thread", "two_level", "several parts", "several rows",
                     "taps differ", "unrolled", "stages flushed together", "rows flushed"),
        "weights": ("Scalar", "transposed", "packed", "residues", "several parts", "several rows"),
        "store": ("Scalar", "out_channels_last", "stored", "output step"),
    },
)  # fmt: skip


def _weight_grad(c: Mapping[str, Any]) -> dict[str, Constant]:
    return {
        "bytes": _BYTES.get(c["Scalar"], 2),
        "grouped": c["groups"] > 1,
        "strided": c["stride_width"] > 1,
        "one column": c["part_taps"] == 1,
        "several parts": c["kernel_width"] > c["part_taps"],
        "several rows": c["kernel_height"] > c["block_taps"],
        "one image row": c["stage_rows"] == 1,
        "shared pixels": c["warps_k"] > 1,
        **volume(c),
    }


WEIGHT_GRAD = Anatomy(
    sizes=GEOMETRY
    | {
        "channels_per_thread", "inputs_per_thread", "lanes_m", "lanes_n", "warps_m", "warps_n",
        "warps_k", "part_taps", "block_taps", "stage_rows", "stage_columns",
        "input_pitch_padding", "grad_pitch_padding", "flush_units", "shared_bytes",
        "blocks_per_sm",
    },
    chosen=_weight_grad,
    parts={
        "load": ("bytes", "in_channels_last", "vector_input", "strided", "one column",
                 "several parts", "several rows"),
        "copy": ("bytes", "grad_channels_last", "vector_grad", "one image row"),
        "multiply": ("Scalar", "bias", "one image row", "shared pixels", "several rows"),
    },
)  # fmt: skip

BIAS_GRAD = Anatomy(
    sizes=frozenset({"channels", "height", "width"}),
    chosen=lambda c: {},
    parts={"add": ("Scalar", "channels_last")},
)

ANATOMIES = {
    "direct/forward/kernel.cuh": FORWARD,
    "direct/wgrad/kernel.cuh": WEIGHT_GRAD,
    "direct/bias_grad.cuh": BIAS_GRAD,
}
