"""Channels-last copies of contiguous tensors: what they cost, and how float32 is copied to float16.

``hopper/relayout`` transposes tensors, ``device/tensor/copy.cuh`` scales float32 for scaled fp16 as
it does so.
"""

from __future__ import annotations

from math import gcd, prod
from typing import NamedTuple

from fastconv.kernels.arithmetic import ceil_div, divisors
from fastconv.kernels.family import Constant
from fastconv.kernels.planning.layers import Layer, Slabs

# Estimates: bytes that an SM moves per cycle, of reads and writes together, and the cycles of a
# launch. An image's choice of kernels must not depend on its batch, so each image of a forward pass
# has the launches' cycles of all SMs, as if there were 16 images.
SM_BYTES = 15.5
LAUNCH_CYCLES = 4000.0
IMAGE_LAUNCH_CYCLES = 30000.0
# An image's share of all that scaled fp16 launches around a copy: about 9 us for 16 images.
HALF_COPY_CYCLES = 120000.0

COPY_THREADS = 256
SLAB_CONSTANTS = ("slabs", "source_height")  # that kernels for the whole input do not have
MOST_VECTORS = 8  # of 8 channels, in a tile
LEAST_ITEMS = 16  # vectors at 32 pixels each that a tile has at least: two for each warp
COPIED_BYTES = 6  # that each element moves: it is read as float32, and written as float16


def volume_copy_bytes(layer: Layer) -> int:
    """Bytes of the copy of an image or a volume, of one slab if there are slabs."""
    pixels = prod(layer.volume_sizes[0])
    return layer.loaded_bytes * layer.groups * layer.in_channels * pixels


def copied_bytes(layer: Layer) -> int:
    """The same of all images or volumes that a copy has."""
    return layer.batch // layer.planes * volume_copy_bytes(layer)


def relayout_cycles(layer: Layer) -> float:
    """Estimated cycles of one SM to copy an image's input, or a volume's, slab by slab."""
    moved = 2 * volume_copy_bytes(layer) * layer.in_whole_slabs
    return moved / SM_BYTES + (2 * layer.slab_count - 1) * IMAGE_LAUNCH_CYCLES


class HalfCopy(NamedTuple):
    """The copy of a layer's input for scaled fp16: tiles of vectors of 8 channels by pixels."""

    images: int  # or volumes
    channels: int
    image_pixels: int  # of all planes of a volume
    planes: int  # that are written, and read the same copy
    slabs: Slabs | None = None
    in_whole_slabs: float = 1.0

    @classmethod
    def of(cls, layer: Layer) -> HalfCopy:
        channels, pixels = layer.groups * layer.in_channels, prod(layer.volume_sizes[0])
        images = layer.batch // layer.planes
        return cls(images, channels, pixels, layer.planes, layer.slabs, layer.in_whole_slabs)

    @property
    def vectors(self) -> int:
        """Vectors of channels of a tile."""
        return max(n for n in divisors(self.channels // 8) if n <= MOST_VECTORS)

    @property
    def pixels(self) -> int:
        """Pixels of a tile, so many that the eight warps have equal shares."""
        groups = 8 // gcd(8, self.vectors)
        return 32 * groups * ceil_div(LEAST_ITEMS, groups * self.vectors)

    @property
    def image_blocks(self) -> int:
        across = self.channels // (8 * self.vectors)
        return across * ceil_div(self.image_pixels, self.pixels)

    @property
    def blocks(self) -> int:
        return self.images * self.image_blocks

    @property
    def shared_bytes(self) -> int:
        return 16 * self.pixels * (self.vectors | 1)

    @property
    def bytes(self) -> int:
        """Bytes of the copy."""
        return 2 * self.images * self.channels * self.image_pixels

    @property
    def constants(self) -> dict[str, Constant]:
        return {
            "copied_planes": self.planes,
            "copy_vectors": self.vectors,
            "copy_pixels": self.pixels,
            **({} if self.slabs is None else {"source_height": self.slabs.in_rows}),
        }

    @property
    def image_cycles(self) -> float:
        """Estimated cycles of one SM for an image or a volume, of all slabs."""
        more = 0 if self.slabs is None else len(self.slabs.firsts) - 1
        copied = COPIED_BYTES * self.channels * self.image_pixels * self.in_whole_slabs
        return copied / SM_BYTES + more * 2 * IMAGE_LAUNCH_CYCLES + HALF_COPY_CYCLES

    def cycles(self, sms: int) -> float:
        """Estimated cycles of the whole batch, of one slab."""
        elements = self.images * self.channels * self.image_pixels
        return COPIED_BYTES * elements / SM_BYTES / sms + LAUNCH_CYCLES
