"""Tensor maps refuse what the CUDA driver would refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fastconv.kernels.family import Im2colMap, Kernel, Launch, TensorMap

TILED: dict[str, Any] = {
    "tensor": "input",
    "scalar": "float",
    "sizes": (40, 30, 5),
    "strides": (160, 4800),
    "box": (32, 7, 1),
}
PIXELS: dict[str, Any] = {
    "tensor": "input",
    "scalar": "fastconv::float16",
    "sizes": (16, 7, 6, 5),
    "strides": (32, 224, 1344),
    "lower": (-1, -2),
    "upper": (1, 2),
    "channels": 16,
    "pixels": 100,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scalar": "int"}, "int is none of float, tf32, double,"),
        ({"sizes": ()}, "0 sizes, not 1 to 5"),
        ({"sizes": (1,) * 6}, "6 sizes, not 1 to 5"),
        ({"sizes": (40, 0, 5)}, "sizes has 0, which is not from 1 to 4294967296"),
        ({"sizes": (40, 2**32 + 1, 5)}, "sizes has 4294967297"),
        ({"strides": (160,)}, "strides (160,): 2 are needed for sizes (40, 30, 5)"),
        ({"strides": (168, 4800)}, "strides has 168, which is not from 0 to 1099511627760 in"),
        ({"strides": (160, 2**40)}, "strides has 1099511627776"),
        ({"box": (32, 7)}, "box (32, 7): 3 are needed"),
        ({"box": (32, 257, 1)}, "box has 257, which is not from 1 to 256"),
        ({"box": (32, 7, 0)}, "box has 0"),
        ({"box": (30, 7, 1)}, "rows of 120 bytes, not a multiple of 16"),
        ({"element_strides": (1, 9, 1)}, "element_strides has 9, which is not from 1 to 8"),
        ({"element_strides": (1, 1)}, "element_strides (1, 1): 3 are needed"),
        ({"element_strides": (2, 1, 1)}, "(2, 1, 1) skip elements"),
        ({"swizzle": 64}, "rows of 128 bytes, more than a swizzle of 64"),
        ({"swizzle": 16}, "swizzle has 16, which is not one of (0, 32, 64, 128)"),
        ({"promotion": 32}, "promotion has 32, which is not one of (0, 64, 128, 256)"),
    ],
    ids=str,
)
def test_refused_boxes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"no map of input: .*{re.escape(message)}"):
        TensorMap(**TILED | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (16, 7), "strides": (32,)}, "2 sizes, not 3 to 5"),
        ({"lower": (-1,)}, "lower (-1,): 2 are needed"),
        ({"lower": (-129, 0)}, "lower has -129, which is not from -128 to 127"),
        ({"upper": (0, 128)}, "upper has 128, which is not from -128 to 127"),
        ({"upper": (-8, 0)}, "no pixels from corner (-1, -2) to (-8, 0), of sizes (16, 7, 6, 5)"),
        ({"channels": 257}, "channels has 257, which is not from 1 to 256"),
        ({"channels": 12}, "rows of 24 bytes"),
        ({"pixels": 1025}, "pixels has 1025, which is not from 1 to 1024"),
        ({"element_strides": (1, 1, 1, 2)}, "(1, 1, 1, 2) skip images"),
    ],
    ids=str,
)
def test_refused_pixels(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"no map of input: .*{re.escape(message)}"):
        Im2colMap(**PIXELS | change)


def test_bytes_of_a_box() -> None:
    assert TensorMap(**TILED).box_bytes == 32 * 7 * 4
    assert TensorMap(**TILED, element_strides=(1, 3, 1)).box_bytes == 32 * 3 * 4
    assert Im2colMap(**PIXELS).box_bytes == 16 * 100 * 2


def test_ranks_of_pixels() -> None:
    """The more dimensions a map has, the fewer bits its corners have."""
    sizes, strides = (16, 7, 6, 5, 4), (32, 224, 1344, 6720)
    for rank, corner in ((3, -(2**15)), (4, -(2**7)), (5, -(2**4))):
        change = {
            "sizes": sizes[:rank],
            "strides": strides[: rank - 1],
            "lower": (corner,) * (rank - 2),
            "upper": (0,) * (rank - 2),
        }
        Im2colMap(**PIXELS | change)


def test_tensors_of_a_launch() -> None:
    arguments = ("weight", 3, TensorMap(**TILED), "output", "weight", Im2colMap(**PIXELS))
    launch = Launch(Kernel("any.cuh", "any", ()), (1, 1, 1), 32, 0, arguments)
    assert launch.tensors == ("weight", "input", "output")
    assert hash(launch) == hash(launch)
