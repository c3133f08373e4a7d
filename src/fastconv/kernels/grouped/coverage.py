"""Which constants select code paths of the kernels for grouped convolutions, for the corpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastconv.kernels.coverage import Anatomy
from fastconv.kernels.family import GEOMETRY, Constant
from fastconv.kernels.grouped.layer import BUNDLE, Axis


def _common(c: Mapping[str, Any]) -> dict[str, Constant]:
    rows, columns = _axis(c, "height", "top"), _axis(c, "width", "left")
    return {
        "width": c["group_in"],
        "several images": c["slots"] > 1,
        "strided": columns.times > 1,
        "window": "new" if rows.times > rows.reach else "kept",
        "shared channels": c["chunk"] < BUNDLE * c["warps"],
    }


def _axis(c: Mapping[str, Any], side: str, before: str) -> Axis:
    return Axis(
        c["transposed"], c[f"kernel_{side}"], c[f"stride_{side}"], c[f"dilation_{side}"],
        c[f"padding_{before}"], c[f"out_{side}"],
    )  # fmt: skip


def _convolve(c: Mapping[str, Any]) -> dict[str, Constant]:
    rows, columns = _axis(c, "height", "top"), _axis(c, "width", "left")
    taps = [rows.taps(row) * columns.taps(column) for row, column in _residues(rows, columns)]
    across = max(columns.taps(column) for column in range(columns.over))
    return _common(c) | {
        "residues": len(taps) > 1,
        "residues without taps": min(taps) == 0,
        "several fours": c["group_in"] == 4 and across > 4,
        "odd octets": c["group_in"] == 8 and any(n % 2 for n in taps),
    }


def _residues(rows: Axis, columns: Axis) -> list[tuple[int, int]]:
    return [(row, column) for row in range(rows.over) for column in range(columns.over)]


_SIZES = GEOMETRY | {
    "chunk", "slots", "tile_rows", "tile_columns", "warps", "blocks_per_sm", "shared_bytes",
}  # fmt: skip

CONVOLVE = Anatomy(
    sizes=_SIZES,
    chosen=_convolve,
    parts={
        "load": ("several images", "strided"),
        "pack": ("transposed", "width", "residues"),
        "multiply": ("Scalar", "width", "window", "ahead", "several fours", "odd octets", "strided",
                     "residues without taps"),
        "walk": ("shared channels", "several images", "residues"),
        "store": ("Scalar", "width", "residues"),
    },
)  # fmt: skip

WEIGHT_GRAD = Anatomy(
    sizes=_SIZES | {"transposed", "in_channels_last", "grad_channels_last", "reduce_threads"},
    chosen=_common,
    parts={
        "load": ("several images", "strided"),
        "multiply": ("Scalar", "bias", "window", "strided"),
        "reduce": ("Scalar", "bias", "width", "shared channels"),
        "walk": ("shared channels", "several images"),
    },
)

ANATOMIES = {
    "grouped/convolve/kernel.cuh": CONVOLVE,
    "grouped/wgrad/kernel.cuh": WEIGHT_GRAD,
}
