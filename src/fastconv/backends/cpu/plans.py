"""Which passes the CPU kernels of the native library compute, and in which tiles.

The kernels are in C++ (``native/cpu``); the matrix products of this package compute what they do
not take, and everything where the library is not built.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from fastconv.backends.cpu.axes import Axis, reading
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

Pass = Literal["forward", "input_grad", "weight_grad"]
Kernel = Literal["direct", "depthwise", "pointwise", "narrow"]

# The types that the kernels multiply, and that they multiply them in.
_BYTES = {torch.float32: 4, torch.float64: 8, torch.bfloat16: 4, torch.float16: 4}
# Activations that they apply. The others are PyTorch's, which compute exponentials in vectors.
_ACTIVATIONS = ("identity", "relu", "relu6", "leaky_relu", "hardswish")

# Read channels that are staged together: the pitches of ``native/cpu/multiply.h``.
_PITCHES = (16, 32, 48, 64)
MOST_DEPTH = max(_PITCHES)
# The widest vectors that there are. Narrower ones have panels of a block that are narrower.
VECTOR_BYTES = 64
# The most sums of a pointwise block whose rows are channels: beside what is packed in the L2 cache.
_SUMS = 1 << 16
# The most bytes of a thread's buffers.
_SCRATCH_BYTES = 8 << 20
# The L2 cache where the operating system does not say: no CPU of the last ten years has less.
_USUAL_L2_BYTES = 256 << 10
# Passes that write up to so many channels of a group have vectors of columns. With 16, vectors of
# channels are full, and as fast or faster.
_FEW_WRITTEN = 12
# What a tile of a depthwise weight gradient stages: meanwhile, the next one's numbers arrive in the
# L2 cache.
_TILE_BYTES = 128 << 10
# Weight gradients of groups of up to so many channels, read and written ones, have vectors of
# several groups. With 8, measured on a Xeon with AVX-512, staging takes more than that gains.
_NARROW = 4
# The input channels of a weight gradient's task: five register tiles of the widest vectors.
_MOST_INPUTS = 70
# The positions of a pass for which it pays to pack weights that are channels-last: measured with
# 512 channels, on a Xeon with AVX-512.
_FEWEST_POSITIONS = 48
# Images are taken together up to so many positions: then their weights, which come from beyond the
# L2 cache, are multiplied often enough to pay for the way.
_POSITIONS = 400
# The longest and the shortest chains of additions of a tap column, where padding is skipped.
_LONGEST_CHAIN, _SHORTEST_CHAIN = 160, 96
# The share of padding from which it pays to skip it. Contiguous images pay for little: their pixels
# are staged then, and multiplied faster than rows. All measured on a Xeon with AVX-512.
_LEAST_PADDING = {"contiguous": 0.02, "channels-last": 0.06}
# Lines of fewer columns are multiplied two at a time, which skips no padding.
_FEWEST_COLUMNS = 8
# The residues of a strided input gradient are passes of their own; with more, they are too small.
_MOST_RESIDUES = 16


class CpuPlan(NamedTuple):
    """How the kernels compute a pass; ``native/compute_cpu.h`` has a struct of the same name."""

    kernel: Kernel
    rows: int  # output rows and columns of a tile; a block's of the matrix of a pointwise kernel
    columns: int
    depth: int  # read channels that are staged together
    channels: int  # written channels of a task
    images: int = 1  # images of a tile, which is then one of whole images
    skips: bool = False  # whether products with padding are left out

    def __str__(self) -> str:
        if self.kernel == "depthwise":
            return f"depthwise kernel: tiles of {self.rows} rows by {self.columns} columns"
        if self.kernel == "narrow":
            return f"kernel of few channels: tiles of {self.rows} rows by {self.columns} columns"
        if self.kernel == "pointwise":
            return f"pointwise kernel: blocks of {self.rows} by {self.columns} of a matrix product"
        images = "" if self.images == 1 else f"{self.images} images by "
        return (
            f"direct kernel: tiles of {images}{self.rows} rows by {self.columns} columns, "
            f"{self.depth} read channels at a time, {self.channels} written ones"
            f"{', without products of padding' if self.skips else ''}"
        )


def plan(
    problem: Problem,
    which: Pass,
    dtype: torch.dtype,
    epilogue: Epilogue = NO_EPILOGUE,
    channels_last: bool = False,
) -> CpuPlan | str:
    """Returns a plan, or why matrix products compute the pass, as the end of a sentence.

    ``channels_last`` is the memory format of the result.
    """
    if dtype not in _BYTES:
        return f"the kernels do not multiply {dtype}"
    if epilogue.activation not in _ACTIVATIONS:
        return f"the kernels do not apply {epilogue.activation}"
    if 0 in (*problem.input_shape, *problem.weight_shape, *problem.output_shape):
        return "there is nothing to multiply"
    axes, residues = [reading(axis) for axis in problem.axes], 1
    if which == "input_grad":
        residues = math.prod(min(axis.step, axis.size) for axis in axes)
        if residues > _MOST_RESIDUES:
            return "its strides have too many residues"
        axes = [_gathering(axis) for axis in axes]
    *depth, rows, columns = axes
    read, _ = of_group = _channels(problem, which)
    is_narrow = which == "weight_grad" and problem.groups > 1 and max(of_group) <= _NARROW
    if max(of_group) == 1 or is_narrow:
        # Wider groups have a stage for each channel, and one from which these are filled.
        stages = math.prod(axis.taps for axis in depth) * read + (max(of_group) > 1)
        is_grad = which == "weight_grad"
        return _depthwise_plan(rows, columns, stages, residues, _BYTES[dtype], is_grad)
    if all(one.kernel_size == 1 and not one.before and not one.after for one in problem.axes):
        return _pointwise_plan(problem, which, channels_last, _BYTES[dtype])
    if which != "weight_grad" and of_group[1] <= _FEW_WRITTEN:
        found = _narrow_plan(problem, which, depth, rows, columns, _BYTES[dtype])
        if found is not None:
            return found
    positions = problem.batch * math.prod(axis.outputs for axis in axes)
    if channels_last and which != "weight_grad" and positions < _FEWEST_POSITIONS:
        return f"{positions} positions do not repay the packing of weights"
    if which == "weight_grad":
        return _weight_grad_plan(problem, rows, columns, _BYTES[dtype])
    is_copied = channels_last or (columns.step == 1 and dtype.itemsize == _BYTES[dtype])
    least = _LEAST_PADDING["channels-last" if channels_last else "contiguous"]
    skips = (
        residues == 1
        and is_copied
        and columns.outputs >= _FEWEST_COLUMNS
        and _padding(problem, which) >= least
    )
    return _gather_plan(problem, which, rows, columns, _BYTES[dtype], skips)


def _gathering(axis: Axis) -> Axis:
    """Bounds the residues of an axis: what an input gradient gathers for every step-th element."""
    return Axis(
        size=axis.outputs,
        outputs=-(-axis.size // axis.step),
        taps=-(-axis.taps // axis.step) if axis.reach == 1 else axis.taps,
        step=1,
        reach=axis.reach,
        before=0,
    )


def _depthwise_plan(
    rows: Axis, columns: Axis, stages: int, residues: int, itemsize: int, is_grad: bool
) -> CpuPlan | str:
    """The largest tile that fits the cache; of weight gradients a small one of whole rows."""
    lanes, found = VECTOR_BYTES // itemsize, None

    def read(axis: Axis, outputs: int) -> int:
        return (outputs - 1) * axis.step + (axis.taps - 1) * axis.reach + 1

    for high, wide in _tiles(rows, columns):
        staged = stages * read(rows, high) * read(columns, wide)
        sums = high * wide * (residues - 1)
        size = (staged + sums) * lanes * itemsize
        if found is None and 4 * size <= l2_bytes():
            found = CpuPlan("depthwise", high, wide, 1, lanes)
        if is_grad and size <= _TILE_BYTES:
            if wide == columns.outputs and 4 * read(rows, high) <= 5 * high * rows.step:
                return CpuPlan("depthwise", high, wide, 1, lanes)
            break
    if found is not None:
        return found
    return "its taps are so far apart that a tile exceeds the cache"


def _padding(problem: Problem, which: Pass) -> float:
    """The share of a pass' products along rows and columns that read outside of the image."""
    share = 1.0
    for axis in (reading(one) for one in problem.axes[-2:]):
        readers = [
            axis.readers(slice(0, axis.size), slice(tap, tap + 1)) for tap in range(axis.taps)
        ]
        read = sum(max(0, one.stop - one.start) for one in readers)
        share *= read / (axis.taps * (axis.size if which == "input_grad" else axis.outputs))
    return 1 - share


def _channels(problem: Problem, which: Pass) -> tuple[int, int]:
    """The channels of a group that a pass reads, and writes; a weight gradient has both."""
    inputs, outputs = (
        count // problem.groups for count in (problem.in_channels, problem.out_channels)
    )
    return (outputs, inputs) if which == "input_grad" else (inputs, outputs)


def _narrow_plan(
    problem: Problem, which: Pass, depth: list[Axis], rows: Axis, columns: Axis, itemsize: int
) -> CpuPlan | None:
    """Tiles of which all read channels fit a quarter of the L2 cache, and the sums, too."""
    read, written = _channels(problem, which)
    groups = min(problem.groups, max(1, VECTOR_BYTES // itemsize // max(read, written)))
    planes = math.prod(axis.taps for axis in depth)
    for high, wide in _tiles(rows, columns):
        staged = _staged(rows, columns, high, wide)
        size = groups * (planes * read + written) * staged * itemsize
        if 4 * size <= l2_bytes():
            return CpuPlan("narrow", high, wide, read, written)
    return None


def _gather_plan(
    problem: Problem, which: Pass, rows: Axis, columns: Axis, itemsize: int, skips: bool
) -> CpuPlan | str:
    """The blocks that stage and add up the least for a read channel of an output.

    Where taps are far apart, few channels of a large tile are less than many of a small one.
    """
    read, written = _channels(problem, which)
    depths = _depths_of_slices(read, rows.taps) if skips else []
    skips = bool(depths)
    taps, best, least = rows.taps * columns.taps, None, math.inf
    for depth in depths or [min(read, most) for most in (MOST_DEPTH, 32, 16)]:
        held = next(pitch for pitch in _PITCHES if pitch >= depth) if skips else depth
        if skips:
            chains = columns.taps * -(-rows.taps * depth // _LONGEST_CHAIN)
        else:
            chains = -(-taps * depth // 128)
        for high, wide in _tiles(rows, columns):
            staged, sums = _staged(rows, columns, high, wide), high * wide * written
            size = (held * staged + sums) * itemsize
            if 4 * held * staged * itemsize > l2_bytes() or size > _SCRATCH_BYTES:
                continue
            # In cycles of a CPU that multiplies and adds two vectors of 16 numbers in one: a chain
            # costs the way of its sum to the cache and back, or further.
            is_far = not skips or 2 * size > l2_bytes()
            cost = (3 / 8 * chains + is_far / 2) * written / depth + staged / (high * wide) / 2
            if cost >= least:
                continue
            images = 1
            if (high, wide) == (rows.outputs, columns.outputs):
                most = _SCRATCH_BYTES // size
                images = max(1, min(problem.batch, most, _POSITIONS // (high * wide)))
            best, least = CpuPlan("direct", high, wide, depth, written, images, skips), cost
    return best or "its taps are so far apart that a tile exceeds the cache"


def _depths_of_slices(read: int, tap_rows: int) -> list[int]:
    """Equal parts of the read channels, with which a tap column has chains of a good length."""
    longest = max(1, _LONGEST_CHAIN // tap_rows)
    depths = [_share(read, min(most, longest), 1) for most in (48, 32, 16)]
    return [depth for depth in depths if tap_rows * depth >= _SHORTEST_CHAIN]


def _pointwise_plan(problem: Problem, which: Pass, channels_last: bool, itemsize: int) -> CpuPlan:
    """Blocks of a matrix product: large enough that its operands' packing takes little time.

    Rows of a block that are apart in memory are long enough that they arrive at memory's rate, and
    what a task packs and adds up fits the L2 cache.
    """
    read, written = (
        count // problem.groups for count in (problem.in_channels, problem.out_channels)
    )
    pixels = problem.batch * math.prod(axis.output_size for axis in problem.axes)
    panel = 2 * VECTOR_BYTES // itemsize
    depth = 256
    if which == "weight_grad":
        rows, columns = _share(written, 256, 14), _share(read, 256, panel)
    else:
        channels = read if which == "input_grad" else written
        if channels_last:
            rows, columns = _share(pixels, 112, 14), _share(channels, 512, panel)
        elif pixels > 8 * panel:
            depth = 128
            rows = _share(channels, 512, 14)
            most = min(512, max(4 * panel, _SUMS // rows))
            columns = _share(pixels, most, panel)
        else:  # there are so few pixels that each task takes all of them
            rows, columns = _share(channels, 112, 14), _up(pixels, panel)
    return CpuPlan("pointwise", rows, columns, depth, 0)


def _share(count: int, most: int, unit: int) -> int:
    """The size of as few equal blocks as there can be, in units."""
    blocks = -(-count // most)
    return _up(-(-count // blocks), unit)


def _weight_grad_plan(problem: Problem, rows: Axis, columns: Axis, itemsize: int) -> CpuPlan | str:
    depth, channels = _channels(problem, "weight_grad")
    taps = rows.taps * columns.taps
    some, most = min(depth, _MOST_INPUTS), min(channels, 128)
    while taps * some * _up(most, 32) * itemsize > _SCRATCH_BYTES // 4 and most > 32:
        most = _up(most // 2, 32)
    if taps * some * _up(most, 32) * itemsize > _SCRATCH_BYTES // 2:
        return "its kernel is too large"
    for high, wide in _tiles(rows, columns):
        staged = some * _staged(rows, columns, high, wide) + high * wide * _up(most, 32)
        if 2 * staged * itemsize <= l2_bytes():
            return CpuPlan("direct", high, wide, some, most)
    return "its taps are so far apart that a tile exceeds the cache"


def _up(count: int, to: int) -> int:
    return -(-count // to) * to


def _staged(rows: Axis, columns: Axis, high: int, wide: int) -> int:
    """Elements of a channel that a tile of so many output rows and columns stages."""

    def along(axis: Axis, outputs: int) -> int:
        phases = min(axis.step, axis.taps)
        return phases * (outputs + (axis.taps - 1) * axis.reach // axis.step)

    return along(rows, high) * along(columns, wide)


def _tiles(rows: Axis, columns: Axis) -> Iterator[tuple[int, int]]:
    """Yields numbers of rows and columns, from whole images down to a single output."""
    high, wide = rows.outputs, columns.outputs
    yield high, wide
    while high > 1:
        high = -(-high // 2)
        yield high, wide
    while wide > 1:
        wide = -(-wide // 2)
        yield high, wide


@functools.cache
def l2_bytes() -> int:
    """Returns the size of a core's L2 cache, by what Linux says of the first core."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError, ValueError):
            if (folder / "level").read_text().strip() == "2":
                return int((folder / "size").read_text().strip().removesuffix("K")) << 10
    return _USUAL_L2_BYTES
