"""Which constants select code paths of the dense kernel, for the coverage corpus."""

from __future__ import annotations

from fastconv.kernels.coverage import Anatomy

ANATOMIES = {
    "dense/kernel.cuh": Anatomy(
        sizes=frozenset({"left_pitch", "right_pitch", "shared_bytes", "stages"}),
        chosen=lambda constants: {"one stage ahead": constants["stages"] == 2},
        parts={
            "copy": ("Scalar", "left_along_k", "right_along_k", "left_vector", "right_vector"),
            "multiply": ("Scalar", "left_along_k", "right_along_k", "tile_rows", "slices"),
            "store": ("Scalar", "gives_weight", "sums_bias", "tile_rows"),
        },
    )
}
