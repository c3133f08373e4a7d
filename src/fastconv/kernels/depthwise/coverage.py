"""Which constants select code paths of the kernels for narrow groups, for the coverage corpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.coverage import OF_VOLUMES, Anatomy, volume
from fastconv.kernels.depthwise.layer import Axis
from fastconv.kernels.family import GEOMETRY, Constant


def _common(c: Mapping[str, Any]) -> dict[str, Constant]:
    rows, columns = _axis(c, "height", "top"), _axis(c, "width", "left")
    height, width = c["lanes_y"] * c["rows"], c["lanes_x"] * c["columns"]
    is_whole = height >= c["out_height"] and width >= c["out_width"]
    return {
        "rows read": _steps(rows),
        "columns read": _steps(columns),
        "copied in vectors": c["vector"] > 1,
        "image": "inside" if c["inside"] else "whole" if is_whole else "in tiles",
        "several inputs": c["group_in"] > 1,
        **_depth(c),
    }


def _depth(c: Mapping[str, Any]) -> dict[str, Constant]:
    """The choices of volumes; images have none."""
    if not volume(c):
        return {}
    planes = Axis(
        c["transposed"], c["kernel_depth"], c["stride_depth"], c["dilation_depth"],
        c["padding_front"], c["out_depth"],
    )  # fmt: skip
    alone = planes.step >= planes.kernel and not planes.fractional
    return {
        **volume(c),
        "planes read": "by one output" if alone else _steps(planes),
        "one plane": c.get("walk") == 1,
    }


def _axis(c: Mapping[str, Any], side: str, before: str) -> Axis:
    return Axis(
        c["transposed"], c[f"kernel_{side}"], c[f"stride_{side}"], c[f"dilation_{side}"],
        c[f"padding_{before}"], c[f"out_{side}"],
    )  # fmt: skip


def _steps(axis: Axis) -> str:
    """How far apart the inputs are that a thread's outputs read."""
    if axis.fractional:
        return "fractional"
    if axis.dilation > 1:
        return "apart"
    return "strided" if axis.times > 1 else "neighbours"


def _window(c: Mapping[str, Any]) -> str:
    """How a thread reads a row of its window, with contiguous tensors."""
    if c["piece"] == 1:
        return "elements"
    shift = _axis(c, "width", "left").origin % c["vector"]
    return "pieces" if shift % c["piece"] == 0 else "from within a piece"


def _copied(c: Mapping[str, Any], threads: int, grads: int = 0) -> str:
    """Whether rows are copied in parts: they are if they have more vectors than a block threads."""
    columns, vector = _axis(c, "width", "left"), c["vector"]
    first, end = 0, columns.halo(c["lanes_x"] * c["columns"])
    if c["inside"]:
        first, end = max(0, -columns.origin), min(end, c["in_width"] - columns.origin)
    shift = columns.origin % vector
    vectors = ceil_div(shift + end, vector) - (shift + first if c["inside"] else 0) // vector
    return "in parts" if max(vectors, grads) > threads else "at once"


_TILE = OF_VOLUMES | {"rows", "columns", "lanes_y", "lanes_x", "vector", "inside", "shared_bytes",
         "blocks_per_sm"}  # fmt: skip
_ROWS = {"piece", "pitch", "plane_padding"}  # for contiguous tensors
_LANES = {"lanes_c", "lane_channels"}  # for channels-last tensors


def _planes(c: Mapping[str, Any]) -> dict[str, Constant]:
    outputs, of_thread = c["group_out"], c["channels"]
    threads = round_up(c["slots"] * c["lanes_y"] * c["lanes_x"], 32)
    return _common(c) | {
        "window": _window(c),
        "rows copied": _copied(c, threads),
        "several planes": c["slots"] > 1,
        "outputs": "one" if outputs == 1 else "all" if outputs == of_thread else "in parts",
        "stored in vectors": c["store_vector"] > 1,
    }


PLANES = Anatomy(
    sizes=GEOMETRY
    | _TILE
    | _ROWS
    | {"flush_rows", "channels", "slots", "weight_padding", "store_vector"},
    chosen=_planes,
    parts={
        "load": ("copied in vectors", "rows copied", "image", "several planes", "several inputs"),
        "weights": ("Scalar", "transposed", "outputs"),
        "multiply": ("transposed", "rows read", "columns read", "window"),
        "accumulate": ("outputs", "several inputs", "two_level"),
        "store": ("Scalar", "stored in vectors", "outputs"),
    },
)


def _pixels(c: Mapping[str, Any]) -> dict[str, Constant]:
    threads = c["slots"] * c["lanes_y"] * c["lanes_x"] * c["lanes_c"]
    return _common(c) | {
        "channels": _channels(c),
        "several images": c["slots"] > 1,
        "weights in vectors": c["weight_vector"] > 1,
        "idle threads": threads % 32 > 0,
    }


def _channels(c: Mapping[str, Any]) -> str:
    """Which channels a tile and a lane compute."""
    if c["lane_channels"] > 1:
        return "pairs"
    if c["group_out"] > c["lanes_c"]:
        return "of a part"
    return "of groups" if c["group_out"] > 1 else "one by one"


PIXELS = Anatomy(
    # An unaligned bias is no coverage class of its own: tests/emulator/test_alignment.py has some.
    sizes=GEOMETRY | _TILE | _LANES | {"flush_rows", "slots", "weight_vector", "aligned_bias"},
    chosen=_pixels,
    parts={
        "load": ("copied in vectors", "image", "several images"),
        "weights": ("transposed", "channels", "several inputs", "weights in vectors"),
        "multiply": ("transposed", "rows read", "columns read"),
        "accumulate": ("channels", "several inputs", "two_level"),
        "store": ("Scalar", "channels", "idle threads"),
    },
)


def _wgrad(c: Mapping[str, Any], patches: int) -> dict[str, Constant]:
    """What both layouts share; ``patches`` are those that a tap group's threads take at once."""
    of_unit = c["slots"] * c["lanes_y"] * c["lanes_x"]
    is_whole = c["out_width"] % c["columns"] == 0 and _axis(c, "width", "left").out_step == 1
    return _common(c) | {
        "several images": c["slots"] > 1,
        "taps": _taps(c),
        "several rounds": of_unit > patches,
        "whole columns": is_whole,
        "many splits": c["reduce_rows"] > 1,
    }


def _taps(c: Mapping[str, Any]) -> str:
    """How threads divide a kernel's rows among themselves."""
    groups = _tap_groups(c)
    if groups == 1:
        return "one thread's"
    if volume(c):
        unevenly = c["kernel_depth"] % c["tap_planes"] or c["kernel_height"] % c["tap_rows"]
        return "shared unevenly" if unevenly else "shared"
    rows = ceil_div(groups, c["tap_blocks"]) * c["tap_blocks"] * c["tap_rows"]
    return "shared" if rows == c["kernel_height"] else "shared unevenly"


def _tap_groups(c: Mapping[str, Any]) -> int:
    planes = ceil_div(c["kernel_depth"], c["tap_planes"]) if volume(c) else 1
    return planes * ceil_div(int(c["kernel_height"]), int(c["tap_rows"]))


_WGRAD = GEOMETRY | _TILE | {
    "transposed", "in_channels_last", "grad_channels_last", "channels_last", "slots", "tap_rows",
    "tap_blocks", "grad_vector", "splits", "reduce_threads", "reduce_rows",
}  # fmt: skip


def _wgrad_planes(c: Mapping[str, Any]) -> dict[str, Constant]:
    threads = 32 * c["group_warps"] * ceil_div(_tap_groups(c), c["tap_blocks"])
    grads = ceil_div(c["lanes_x"] * c["columns"], c["grad_vector"])
    return _wgrad(c, 32 * c["group_warps"]) | {
        "window": _window(c),
        "rows copied": _copied(c, threads, grads),
    }


WEIGHT_GRAD_PLANES = Anatomy(
    sizes=_WGRAD | _ROWS | {"group_warps", "grad_piece", "grad_pitch"},
    chosen=_wgrad_planes,
    parts={
        "load": ("copied in vectors", "rows copied", "image", "several images"),
        "multiply": ("rows read", "columns read", "window", "whole columns"),
        "accumulate": ("taps", "several rounds", "bias"),
        "reduce": ("Scalar", "bias", "many splits", "several inputs"),
    },
)


def _wgrad_pixels(c: Mapping[str, Any]) -> dict[str, Constant]:
    return _wgrad(c, c["group_patches"]) | {
        "channels": _channels(c),
    }


WEIGHT_GRAD_PIXELS = Anatomy(
    sizes=_WGRAD | _LANES | {"group_patches"},
    chosen=_wgrad_pixels,
    parts={
        "load": ("copied in vectors", "image", "several images"),
        "multiply": ("rows read", "columns read", "channels", "whole columns"),
        "accumulate": ("taps", "several rounds", "channels", "bias"),
        "reduce": ("Scalar", "bias", "many splits", "several inputs"),
    },
)


def _toeplitz(c: Mapping[str, Any]) -> dict[str, Constant]:
    strips = c["slots"] * c["lanes_y"]
    columns = _axis(c, "width", "left")
    read = columns.origin % c["vector"] + c["columns"] + columns.kernel - 1
    return _common(c) | {
        "several images": c["slots"] > 1,
        "odd strips": strips % 2 == 1,
        "several turns": c["channels"] * ceil_div(strips, 2) > c["warps"],
        "several MMAs": c["lanes_x"] > 1,
        "several steps": read * (4 if c["Scalar"] == "float" else 2) > 32,
        "multiplied": c["group_out"] > 1,
    }


_TOEPLITZ = GEOMETRY | _TILE | _ROWS | {"flush_rows", "two_level", "slots", "warps", "channels"}


def _toeplitz_planes(c: Mapping[str, Any]) -> dict[str, Constant]:
    return _toeplitz(c) | {
        "begins within a copy": _axis(c, "width", "left").origin % c["vector"] > 0,
        "stored in pairs": c["store_vector"] > 1,
    }


TOEPLITZ_PLANES = Anatomy(
    sizes=_TOEPLITZ | {"store_vector"},
    chosen=_toeplitz_planes,
    parts={
        "load": ("copied in vectors", "image", "several images", "begins within a copy"),
        "weights": ("Scalar", "transposed", "multiplied"),
        "multiply": ("Scalar", "several MMAs", "several steps"),
        "strips": ("odd strips", "several turns", "several images"),
        "store": ("Scalar", "stored in pairs"),
    },
)


def _toeplitz_pixels(c: Mapping[str, Any]) -> dict[str, Constant]:
    size = 4 if c["Scalar"] == "float" else 2
    return _toeplitz(c) | {"bytes of a pixel": c["channels"] * size}


TOEPLITZ_PIXELS = Anatomy(
    sizes=_TOEPLITZ,
    chosen=_toeplitz_pixels,
    parts={
        "load": ("bytes of a pixel", "image", "several images"),
        "weights": ("Scalar", "transposed"),
        "multiply": ("Scalar", "several MMAs", "several steps"),
        "strips": ("odd strips", "several turns", "several images"),
        "store": ("Scalar", "bytes of a pixel"),
    },
)


def _rows(c: Mapping[str, Any]) -> dict[str, Constant]:
    """What the kernels of layers of one row share."""
    last, taps = c["channels_last"], "one tap" if c["width"] == 1 else "several taps"
    return {
        "rows of": "positions" if last else "words" if c["whole_words"] else "parts of words",
        "copied in vectors": c["load_vector"] > 1,
        "channels": "pairs" if c["group"] > 1 else "few" if last and c["lanes"] < 32 else "one",
        "window": "begins within a word" if c["shift"] else taps,
    }


_ROW_SIZES = GEOMETRY | {
    "WeightScalar", "width", "channels_last", "sequences", "whole_words", "threads", "lanes",
    "group", "tile", "shift", "load_vector", "store_vector",
}  # fmt: skip

ROWS = Anatomy(
    sizes=_ROW_SIZES,
    chosen=_rows,
    parts={
        "load": ("Scalar", "rows of", "copied in vectors", "channels"),
        "multiply": ("transposed", "rows of", "window"),
        "store": ("Scalar", "rows of", "channels"),
    },
)

ROWS_WEIGHT_GRAD = Anatomy(
    sizes=_ROW_SIZES,
    chosen=_rows,
    parts={
        "load": ("Scalar", "rows of", "copied in vectors", "channels"),
        "multiply": ("rows of", "window", "channels"),
    },
)

ROWS_REDUCE = Anatomy(
    sizes=GEOMETRY | {"width", "threads"},
    chosen=lambda c: {},
    parts={"reduce": ("WeightScalar", "bias")},
)

ANATOMIES = {
    "causal/reduce.cuh": ROWS_REDUCE,
    "depthwise/rows/convolve.cuh": ROWS,
    "depthwise/rows/weight_grad.cuh": ROWS_WEIGHT_GRAD,
    "depthwise/fma/planes.cuh": PLANES,
    "depthwise/fma/pixels.cuh": PIXELS,
    "depthwise/toeplitz/planes.cuh": TOEPLITZ_PLANES,
    "depthwise/toeplitz/pixels.cuh": TOEPLITZ_PIXELS,
    "depthwise/wgrad/planes.cuh": WEIGHT_GRAD_PLANES,
    "depthwise/wgrad/pixels.cuh": WEIGHT_GRAD_PIXELS,
}
