"""Random TMA copies and their results, for the emulator and for GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastconv.kernels.arithmetic import round_up
from fastconv.kernels.family import MAPPED_SCALARS, AnyMap, Im2colMap, Kernel, Launch, TensorMap

SOURCE = Path(__file__).parent / "tensor_maps.cuh"
SWIZZLES = (0, 32, 64, 128)
BOXES = 12  # boxes of a case, each copied by one block
NUMBERS = 8  # numbers that describe a box: coordinates, then the offsets of an im2col copy

_DTYPES = {
    "float": torch.float32,
    "tf32": torch.float32,
    "double": torch.float64,
    "fastconv::float16": torch.float16,
    "fastconv::bfloat16": torch.bfloat16,
}
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}  # numpy's types for the bits of elements


@dataclass(frozen=True)
class Case:
    """A tensor map, the memory of its tensor, and the boxes to be copied."""

    map: AnyMap
    memory: Tensor
    coordinates: Tensor  # int32: BOXES by NUMBERS

    @property
    def launch(self) -> Launch:
        """Loads all boxes into a tensor ``boxes``."""
        return _launch("load_boxes", self)

    @property
    def storing_launch(self) -> Launch:
        """Stores all boxes from a tensor ``boxes``."""
        return _launch("store_boxes", self)

    @property
    def boxes_shape(self) -> tuple[int, int]:
        """The shape of ``boxes``, a tensor of int32."""
        return len(self.coordinates), self.map.box_bytes // 4

    def loaded(self) -> Tensor:
        """What the loads leave in shared memory, swizzled."""
        boxes = [self._at(positions) for positions in self._positions()]
        return torch.from_numpy(np.stack([_swizzled(box, self.map.swizzle) for box in boxes]))

    def stored(self, boxes: Tensor) -> Tensor:
        """The tensor's memory after all boxes have been stored."""
        words = _words(self.memory).copy()
        for box, positions in zip(boxes.numpy(), self._positions(), strict=True):
            values = _swizzled(box, self.map.swizzle).view(words.dtype)
            inside = positions >= 0
            words[positions[inside]] = values[inside]
        return torch.from_numpy(words.view(np.int16)).view(self.memory.dtype)

    def _at(self, positions: np.ndarray) -> np.ndarray:
        words = _words(self.memory)
        if self.map.scalar == "tf32":
            words = _rounded(words)
        return np.where(positions >= 0, words[positions], 0).astype(words.dtype).view(np.int32)

    def _positions(self) -> Iterator[np.ndarray]:
        """The positions in memory of each box's elements, -1 for those outside of the tensor."""
        of = self.map
        for numbers in self.coordinates.tolist():
            at, offset = numbers[: len(of.sizes)], numbers[len(of.sizes) :]
            axes = _tile(of, at) if isinstance(of, TensorMap) else _pixels(of, at, offset)
            yield _positions(of, axes)


def _positions(of: AnyMap, coordinates: Iterable[np.ndarray]) -> np.ndarray:
    """The positions in memory of elements with these coordinates, which are broadcast."""
    steps = [1, *(stride // MAPPED_SCALARS[of.scalar] for stride in of.strides)]
    inside, total = np.asarray(True), np.asarray(0)
    for at, size, step in zip(coordinates, of.sizes, steps, strict=True):
        inside = inside & (at >= 0) & (at < size)
        total = total + at * step
    return np.where(inside, total, -1).flatten()


def _tile(of: TensorMap, at: list[int]) -> list[np.ndarray]:
    axes = [
        first + np.arange(0, span, step)
        for first, span, step in zip(at, of.box, of.element_strides, strict=True)
    ]
    return np.meshgrid(*axes[::-1], indexing="ij")[::-1]


def _pixels(of: Im2colMap, at: list[int], offset: list[int]) -> list[np.ndarray]:
    """Coordinates of an im2col box: the bounding box's pixels from ``at`` on, over all images."""
    axes = [
        range(lower, size + upper, step)
        for size, lower, upper, step in zip(
            of.sizes[1:-1], of.lower, of.upper, of.element_strides[1:-1], strict=True
        )
    ]
    images = range(of.sizes[-1] + at[-1] + of.pixels)
    pixels = list(itertools.product(images, *axes[::-1]))
    first = pixels.index(tuple(at[:0:-1]))
    image, *places = np.array(pixels[first : first + of.pixels]).T[:, :, None]
    channels = at[0] + np.arange(of.channels)
    taps = zip(places[::-1], offset, strict=False)
    return [channels, *(place + tap for place, tap in taps), image]


def _swizzled(box: np.ndarray, span: int) -> np.ndarray:
    """The box with its units of 16 bytes swizzled; twice gives back the box."""
    chunks = np.arange(box.nbytes // 16)
    order = chunks ^ (chunks >> 3 & span // 16 - 1) if span else chunks
    return box.reshape(-1, 16 // box.itemsize)[order].flatten()


def _words(memory: Tensor) -> np.ndarray:
    return memory.view(torch.int16).numpy().view(_WORDS[memory.element_size()])


def kernel(entry: str, of: AnyMap) -> Kernel:
    """One of the kernels in :data:`SOURCE`, for maps of this kind."""
    im2col = isinstance(of, Im2colMap)
    return Kernel(str(SOURCE), entry, (("rank", len(of.sizes)), ("im2col", im2col)))


def _launch(entry: str, case: Case) -> Launch:
    box_bytes = case.map.box_bytes
    arguments = (case.map, "coordinates", "boxes", box_bytes)
    shared_bytes = box_bytes + 8  # An mbarrier takes 8 bytes.
    return Launch(
        kernel(entry, case.map), (len(case.coordinates), 1, 1), 128, shared_bytes, arguments
    )


def exported_launch(module: ModuleType, case: Case) -> Any:
    """Adds the kernel to an exported file; returns a case's launch, which writes ``output``."""
    source, launch = "hopper/boxes.cuh", case.launch
    module.SOURCES[source] = SOURCE.read_text(encoding="utf-8").replace('extern "C" ', "")
    of = getattr(module, type(case.map).__name__)(**vars(case.map))
    return module.Launch(
        source,
        launch.kernel.entry,
        launch.kernel.constants,
        launch.grid[0],
        launch.block,
        launch.shared_bytes,
        (of, "coordinates", "output", case.map.box_bytes),
    )


# float32 numbers that TF32 rounds up, down, to even or to infinity; subnormals, infinities, NaN.
_ODD_BITS = (
    0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0xBF803000, 0x7F7FEFFF, 0x7F7FF000, 0x00001001,
    0x00003000, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF,
)  # fmt: skip


def _rounded(words: np.ndarray) -> np.ndarray:
    """The words rounded to TF32 as an H200 does it: ties to even, one NaN for all."""
    wide = words.astype(np.uint64)
    rounded = (wide + 0xFFF + (wide >> 13 & 1) & 0xFFFFE000).astype(np.uint32)
    return np.where(wide & 0x7FFFFFFF > 0x7F800000, np.uint32(0x7FFFE000), rounded)


def _row(
    draw: Random, swizzle: int, scalars: Sequence[str] = tuple(MAPPED_SCALARS)
) -> tuple[str, int]:
    """A type, and the number of elements of a row of a box."""
    scalar = draw.choice(scalars)
    return scalar, (swizzle or 16 * draw.randint(1, 12)) // MAPPED_SCALARS[scalar]


def _strides(draw: Random, scalar: str, sizes: list[int]) -> tuple[int, ...]:
    """The strides of the outer dimensions, in bytes, some with gaps."""
    strides, bytes_ = [], round_up(sizes[0] * MAPPED_SCALARS[scalar], 16)
    for size in sizes[1:]:
        strides.append(bytes_ + 16 * draw.randint(0, 2))
        bytes_ = strides[-1] * size
    return tuple(strides)


def _memory(draw: Random, of: AnyMap) -> Tensor:
    """Random numbers, exactly as many as the map describes."""
    last = sum((size - 1) * stride for size, stride in zip(of.sizes[1:], of.strides, strict=True))
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    length = last // MAPPED_SCALARS[of.scalar] + of.sizes[0]
    memory = torch.randn(length, generator=generator).to(_DTYPES[of.scalar])
    if of.scalar == "tf32":
        bits = memory.view(torch.int32).numpy().view(np.uint32)
        for number in _ODD_BITS:
            bits[draw.randrange(length)] = number
    return memory


def _case(draw: Random, of: AnyMap, coordinates: list[list[int]]) -> Case:
    padded = [numbers + [0] * (NUMBERS - len(numbers)) for numbers in coordinates]
    return Case(of, _memory(draw, of), torch.tensor(padded, dtype=torch.int32))


def _near(draw: Random, box: int, size: int, step: int = 1) -> int:
    """A random coordinate of a box, a multiple of ``step``; most boxes overlap the tensor."""
    near = [draw.randrange(1 - box, size)] * 8
    return draw.choice([0, *near, draw.randint(-box - 1, size + 1)]) // step * step


def _chunk(of: AnyMap) -> int:
    """The number of elements in 16 bytes; rows of boxes begin at multiples of it."""
    return 16 // MAPPED_SCALARS[of.scalar]


def _tiled(
    draw: Random, rank: int, swizzle: int, most_step: int, whole_chunks: bool = False
) -> TensorMap:
    # No kernel stores rounded elements.
    scalars = [one for one in MAPPED_SCALARS if not (whole_chunks and one == "tf32")]
    scalar, row = _row(draw, swizzle, scalars)
    steps = [draw.choice([1, draw.randint(1, most_step)]) for _ in range(rank - 1)]
    box = [draw.randint(1, {2: 32, 3: 8, 4: 4, 5: 3}[rank]) * step for step in steps]
    box = [max(1, span - draw.randrange(step)) for span, step in zip(box, steps, strict=True)]
    sizes = [draw.randint(1, 2 * span + 2) for span in (row, *box)]
    if whole_chunks:
        sizes[0] = round_up(sizes[0], 16 // MAPPED_SCALARS[scalar])
    return TensorMap(
        tensor="tensor",
        scalar=scalar,
        sizes=tuple(sizes),
        strides=_strides(draw, scalar, sizes),
        box=(row, *box),
        element_strides=(1, *steps),
        swizzle=swizzle,
        promotion=draw.choice([0, 64, 128, 256]),
    )


def tiled(draw: Random, rank: int, swizzle: int) -> Case:
    """A case with boxes in a tensor, on its edges and outside of it."""
    of = _tiled(draw, rank, swizzle, most_step=8)
    steps = (_chunk(of), *[1] * (rank - 1))
    around = list(zip(of.box, of.sizes, steps, strict=True))
    return _case(draw, of, [[_near(draw, *one) for one in around] for _ in range(BOXES)])


def disjoint(draw: Random, rank: int, swizzle: int) -> Case:
    """A case for stores: boxes side by side, some of them beyond the end of the tensor."""
    of = _tiled(draw, rank, swizzle, most_step=1, whole_chunks=True)
    steps = (_chunk(of), *[1] * (rank - 1))
    starts = [
        range(draw.randrange(min(box, size)) // step * step, size + draw.choice([0, 0, box]), box)
        for box, size, step in zip(of.box, of.sizes, steps, strict=True)
    ]
    places = [list(at) for at in itertools.product(*starts)]
    return _case(draw, of, draw.sample(places, min(BOXES, len(places))))


def im2col(draw: Random, swizzle: int, axes: int) -> Case:
    """An im2col case: pixels that a convolution with padding, stride and dilation reads."""
    scalar, channels = _row(draw, swizzle)
    sizes = [draw.randint(1, 2 * channels), *(draw.randint(1, 9) for _ in range(axes))]
    sizes.append(draw.randint(1, 4))
    steps = [draw.randint(1, 3) for _ in range(axes)]
    lower = [-draw.randint(-1 if size > 2 else 0, 3) for size in sizes[1:-1]]
    upper = [
        draw.randint(max(low + 1 - size, -4), 3)
        for low, size in zip(lower, sizes[1:-1], strict=True)
    ]
    of = Im2colMap(
        tensor="tensor",
        scalar=scalar,
        sizes=tuple(sizes),
        strides=_strides(draw, scalar, sizes),
        lower=tuple(lower),
        upper=tuple(upper),
        channels=channels,
        pixels=draw.randint(1, 100),
        element_strides=(1, *steps, 1),
        swizzle=swizzle,
        promotion=draw.choice([0, 64, 128, 256]),
    )
    ranges = [
        range(low, size + up, step)
        for low, size, up, step in zip(lower, sizes[1:-1], upper, steps, strict=True)
    ]
    coordinates = [
        [
            _near(draw, channels, sizes[0], _chunk(of)),
            *map(draw.choice, ranges),
            draw.choice([*range(sizes[-1])] * 4 + [sizes[-1]]),
            *(draw.choice([0, 1, 2, 6]) for _ in range(axes)),
        ]
        for _ in range(BOXES)
    ]
    return _case(draw, of, coordinates)


def cases(seed: int) -> dict[str, Case]:
    """Cases of every kind of load, by name."""
    draw = Random(seed)
    made = {
        f"{rank}d swizzle {swizzle}": tiled(draw, rank, swizzle)
        for rank in range(2, 6)
        for swizzle in SWIZZLES
    }
    return made | {
        f"im2col {axes}d swizzle {swizzle}": im2col(draw, swizzle, axes)
        for axes in (2, 3)
        for swizzle in SWIZZLES
    }


def stores(seed: int) -> dict[str, Case]:
    """Cases of every kind of store, by name."""
    draw = Random(seed)
    return {
        f"{rank}d swizzle {swizzle}": disjoint(draw, rank, swizzle)
        for rank in range(2, 6)
        for swizzle in SWIZZLES
    }
