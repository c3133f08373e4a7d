"""Plans for the portable kernels, for every geometry.

The package compares candidates by an estimate of their time; exported files use one simple rule.
"""

import itertools
import math
from typing import NamedTuple

# A thread computes this many neighbouring pixels of a row, for each of its channels.
PIXELS = 4
# The warps of a block, in forward convolutions and input gradients.
WARPS = 8
# A stage's loop over kernel rows is unrolled if the stage has at most this many taps.
UNROLLED_TAPS = 48
# A stage covers at most this many columns of the kernel: their loop is unrolled.
MOST_PART_TAPS = 16
# A thread holds at most this many input pixels of a row: their loop is unrolled as well.
MOST_WINDOW = 128
# A stage should add this many products to each accumulator, to be worth its two barriers.
STAGE_PRODUCTS = 160
# In weight gradients, the accumulators of a thread, and these together with its input pixels: two
# blocks of 256 threads then have enough registers on an SM.
MOST_ACCUMULATORS = 72
MOST_VALUES = 108
# In weight gradients, the columns of a stage: the widest that fits is taken.
STAGE_COLUMNS = (96, 64, 32, 16, 8)
# Partial sums are flushed to a second level of summation, which bounds rounding errors: after at
# least and at most so many products, and in weight gradients after so many pixels.
FLUSH_PRODUCTS, MOST_PRODUCTS = 60, 512
FLUSH_PIXELS = 512
# The most shared memory of a block: every GPU has it, and most have it for two blocks on an SM.
SHARED_BYTES = 47 * 1024
# The most workspace of a weight gradient.
WORKSPACE_BYTES = 64 << 20
# The block and the largest grid of the small kernels that clear, pack and reduce.
HELPER_THREADS = 256
MOST_HELPER_BLOCKS = 4096
# CUDA's limit on the blocks of a one-dimensional grid.
MOST_BLOCKS = 2**31 - 1
# Kernels count in 32-bit ints. Counts stay below this, so that a further tile does not overflow.
END = 2**31 - 2**16

Constant = int | bool | str
Constants = tuple[tuple[str, Constant], ...]


def config(like: Constants = (), /, **constants: Constant) -> Constants:
    """The constants that a kernel is compiled with, or those of ``like`` with changes."""
    return tuple({**dict(like), **constants}.items())


class TensorMap(NamedTuple):
    """A tensor map for TMA loads and stores of boxes; dimensions come innermost first.

    ``strides`` are in bytes, for all dimensions but the innermost.
    """

    tensor: str
    scalar: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    promotion: int


class Im2colMap(NamedTuple):
    """A tensor map for TMA loads in im2col mode, within the corners of a bounding box."""

    tensor: str
    scalar: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    element_strides: tuple[int, ...]
    swizzle: int
    promotion: int


Argument = str | int | TensorMap | Im2colMap


class Launch(NamedTuple):
    """One kernel launch, complete but for the addresses of its tensors.

    ``arguments`` are the kernel's, in order: the name of a tensor, an int, or a tensor map. If
    ``early``, it is a programmatic dependent launch: it may begin while the launch before it still
    runs, and the kernel waits for that before it touches any tensor.
    """

    source: str
    entry: str
    constants: Constants
    grid: int
    block: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    early: bool = False


class Plan(NamedTuple):
    """The launches in order, and the bytes of their workspace (the tensor ``scratch``).

    ``regions`` are tensors that lie in the workspace, and the bytes before them.
    """

    launches: tuple[Launch, ...]
    scratch_bytes: int
    regions: dict[str, int] = {}  # noqa: RUF012  # nothing changes it


class Target(NamedTuple):
    """A GPU that plans were made for: its SMs, and the shared memory that a block may use."""

    sms: int
    shared_bytes: int


class Geometry(NamedTuple):
    """The shapes and parameters of a convolution along two axes, or three: depth comes first."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def output(self) -> tuple[int, ...]:
        sizes = []
        for axis in range(len(self.stride)):
            extent = self.dilation[axis] * (self.weight[2 + axis] - 1) + 1
            padded = self.input[2 + axis] + 2 * self.padding[axis]
            sizes.append((padded - extent) // self.stride[axis] + 1)
        return (self.input[0], self.weight[0], *sizes)


class Operands(NamedTuple):
    """The tensors' type and layout; ``aligned``: all addresses are multiples of 16 bytes."""

    scalar: str
    scalar_bytes: int
    channels_last: bool
    aligned: bool

    def vector(self, *distances: int) -> int:
        """Elements of the widest vector that is aligned at all multiples of these distances."""
        if self.channels_last or not self.aligned:
            return 1
        vector = math.gcd(16 // self.scalar_bytes, *distances)
        return vector if vector * self.scalar_bytes >= 4 else 1


class Axis(NamedTuple):
    """One axis of a forward convolution or of an input gradient, as the kernel sees it.

    An input gradient is computed separately for each residue of the stride: input positions that
    are equal modulo the stride see the same taps.
    """

    taps: int  # taps of a residue, at most
    step: int  # input positions from one tap to the next
    residues: int  # residues that any tap reaches; 1 in a forward convolution
    in_stride: int  # input positions from one output to the next
    origin: int  # input position of the first output's first tap, if there is one residue
    positions: int  # outputs of a residue, at most
    reaches_all: bool  # whether every output has a tap

    @classmethod
    def of(cls, transposed: bool, geometry: Geometry, axis: int) -> "Axis":
        kernel, padding = geometry.weight[2 + axis], geometry.padding[axis]
        stride, dilation = geometry.stride[axis], geometry.dilation[axis]
        if not transposed:
            return cls(kernel, dilation, 1, stride, -padding, geometry.output[2 + axis], True)
        common = math.gcd(stride, dilation)
        taps, step, size = ceil_div(kernel, stride // common), dilation // common, geometry.input
        residues = min(kernel, stride // common)
        positions = ceil_div(size[2 + axis], stride)
        origin = ceil_div(padding, stride) - (taps - 1) * step
        return cls(taps, step, residues, 1, origin, positions, residues == stride)

    def distance(self, taps: int) -> int:
        """Pixels of a tile from one output's first tap to the next output's.

        A tile for a single tap holds only the pixels that this tap reads.
        """
        return 1 if taps == 1 else self.in_stride


ONE_PLANE = Axis(1, 1, 1, 1, 0, 1, True)  # the depth of an image


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def power_of_two_for(count: int, most: int) -> int:
    """The least power of two that is at least ``count``, but at most ``most``."""
    return min(1 << (count - 1).bit_length(), most)


def portable_plan(which: str, geometry: Geometry, operands: Operands, sms: int) -> Plan:
    """The plan of the portable kernels for one operation, on a GPU with so many SMs.

    ``which`` names the operation, and with it the launches' tensors: "forward" has ``input``,
    ``weight``, ``bias`` and ``output``. "input_grad" has the same; its ``input`` is the output's
    gradient, and its ``output`` the input's. "weight_grad" has ``grad_output``, ``input`` and
    ``output``, "bias_grad" ``grad_output`` and ``output``.
    """
    geometry = countable(geometry)
    if which == "weight_grad":
        return weight_grad_plan(geometry, operands, sms)
    if which == "bias_grad":
        return bias_grad_plan(geometry, operands, sms)
    return convolution_plan(geometry, operands, transposed=which == "input_grad")


def convolution_plan(geometry: Geometry, operands: Operands, transposed: bool) -> Plan:
    """The plan of a forward convolution, or of an input gradient (``transposed``)."""
    batch, groups = geometry.input[0], geometry.groups
    group_in, group_out = geometry.weight[1], geometry.weight[0] // groups
    in_size, out_size = geometry.input[-2:], geometry.output[-2:]
    if transposed:
        group_in, group_out, in_size, out_size = group_out, group_in, out_size, in_size
    axes = [Axis.of(transposed, geometry, i) for i in range(len(geometry.stride))]
    depth, rows, columns = (ONE_PLANE, *axes)[-3:]
    reads = group_in * depth.taps  # the planes that an output plane reads are further channels
    # Channels go to a thread's registers first, then to lanes. The other lanes, and all warps, take
    # pixels.
    channels_per_thread = power_of_two_for(group_out, 8)
    lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
    lanes_x = power_of_two_for(ceil_div(columns.positions, PIXELS), 32 // lanes_m)
    lanes_y = 32 // (lanes_m * lanes_x)
    tile = (channels_per_thread * lanes_m, WARPS * lanes_y, PIXELS * lanes_x)

    for channels, tap_rows, tap_columns in convolution_stages(rows.taps, columns.taps, reads):
        distance = columns.distance(tap_columns)
        vector = 1
        if columns.residues == 1 and distance == columns.in_stride and tap_columns == columns.taps:
            vector = operands.vector(in_size[1], tile[2] * columns.in_stride)
        window = (
            columns.origin % vector + (PIXELS - 1) * distance + (tap_columns - 1) * columns.step + 1
        )
        quantum = max(vector, 4)
        halo_columns = round_up((tile[2] - PIXELS) * distance + round_up(window, 4), quantum)
        halo_rows = (tile[1] - 1) * rows.distance(tap_rows) + (tap_rows - 1) * rows.step + 1
        pitch_padding = quantum if lanes_y > 1 else 0  # so that rows lie in different banks
        pixels = channels * halo_rows * (halo_columns + pitch_padding)
        weights = channels * tap_rows * tap_columns * tile[0]
        shared_bytes = 2 * (
            round_up(pixels * operands.scalar_bytes, 16) + round_up(weights * 4, 16)
        )
        if shared_bytes <= SHARED_BYTES and window <= MOST_WINDOW:
            break

    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "transposed": transposed,
        "group_in": group_in,
        "group_out": group_out,
        "groups": groups,
        "in_height": in_size[0],
        "in_width": in_size[1],
        "out_height": out_size[0],
        "out_width": out_size[1],
        **kernel_constants(geometry),
        **depth_constants(geometry, transposed),
        "in_channels_last": operands.channels_last,
        "out_channels_last": operands.channels_last,
        "channels_per_thread": channels_per_thread,
        "lanes_y": lanes_y,
        "lanes_x": lanes_x,
        "warps": WARPS,
        "stage_channels": channels,
        "stage_taps": tap_rows,
        "part_taps": tap_columns,
        "unrolled_taps": UNROLLED_TAPS,
        "vector": vector,
        "pitch_padding": pitch_padding,
        "aligned": operands.aligned,
        "two_level": True,
        "flush_channels": channels,
        "flush_stages": ceil_div(FLUSH_PRODUCTS, channels * tap_rows * tap_columns),
        "flush_rows": min(tap_rows, ceil_div(MOST_PRODUCTS, tap_columns)),
        "shared_bytes": shared_bytes,
        "blocks_per_sm": 2,
        "packed": True,
    }
    blocks = (
        ceil_div(group_out, tile[0])
        * ceil_div(rows.positions, tile[1])
        * ceil_div(columns.positions, tile[2])
        * depth.positions
        * groups
        * depth.residues
        * rows.residues
        * columns.residues
    )
    require("blocks of one image", blocks)
    packed = (
        depth.residues
        * rows.residues
        * columns.residues
        * groups
        * round_up(group_out, tile[0])
        * round_up(reads, channels)
        * round_up(rows.taps, tap_rows)
        * round_up(columns.taps, tap_columns)
    )
    code = ("direct/forward/kernel.cuh", tuple(constants.items()))
    launches = [helper_launch(code, "pack", packed, ("weight", "scratch"))]
    if not all(axis.reaches_all for axis in axes):
        elements = math.prod(geometry.input)
        launches.append(helper_launch(code, "clear", elements, ("output", batch)))
    at_once = MOST_BLOCKS // blocks
    for first in range(0, batch, at_once):
        images = min(at_once, batch - first)
        arguments = ("input", "weight", "scratch", "bias", "output", first, images)
        launches.append(
            Launch(
                code[0], "convolve", code[1], images * blocks, 32 * WARPS, shared_bytes, arguments
            )
        )
    return Plan(tuple(launches), packed * 4)


def convolution_stages(rows: int, columns: int, reads: int) -> tuple[tuple[int, int, int], ...]:
    """Candidates for a stage's channels, kernel rows and kernel columns, the best first."""
    part = ceil_div(columns, ceil_div(columns, MOST_PART_TAPS))
    most = min(reads, max(STAGE_PRODUCTS // (rows * part), 1), 16)
    whole = tuple((channels, rows, part) for channels in range(most, 0, -1))
    return (*whole, (1, 1, part), (1, 1, 1))


def weight_grad_plan(geometry: Geometry, operands: Operands, sms: int) -> Plan:
    batch, groups = geometry.input[0], geometry.groups
    group_in, group_out = geometry.weight[1], geometry.weight[0] // groups
    kernel, out_size = geometry.weight[-2:], geometry.output[-2:]
    stride, dilation = geometry.stride[-1], geometry.dilation[-1]
    # Each output plane of a volume is an image, and the planes that it reads are further channels.
    planes, reads = math.prod(geometry.output[2:-2]), group_in * math.prod(geometry.weight[2:-2])
    whole = ceil_div(kernel[1], ceil_div(kernel[1], MOST_PART_TAPS))

    # The kernel rows of a block, and the input channels of a thread, at most.
    owned = ((kernel[0], 8), (1, 8), (1, 1))
    for part_taps, (tap_rows, most_inputs), most_columns in itertools.product(
        (whole, 1), owned, STAGE_COLUMNS
    ):
        distance = 1 if part_taps == 1 else stride
        vector_input = 1
        if distance == stride and part_taps == kernel[1]:
            vector_input = operands.vector(geometry.input[-1])
        vector_grad = operands.vector(out_size[1])
        shift = -geometry.padding[-1] % vector_input
        window = round_up(shift + (PIXELS - 1) * distance + (part_taps - 1) * dilation + 1, 4)
        # A thread has the accumulators of all kernel rows if they fit. Lanes and warps take
        # channels.
        channels_per_thread = power_of_two_for(group_out, 8)
        while channels_per_thread * part_taps > MOST_ACCUMULATORS:
            channels_per_thread //= 2
        block_taps = tap_rows
        if block_taps * (channels_per_thread * part_taps + window) > MOST_VALUES:
            block_taps = 1
        inputs_per_thread = power_of_two_for(reads, most_inputs)
        accumulators_per_input = channels_per_thread * part_taps * block_taps
        while (
            inputs_per_thread > 1 and inputs_per_thread * accumulators_per_input > MOST_ACCUMULATORS
        ):
            inputs_per_thread //= 2
        lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
        lanes_n = power_of_two_for(ceil_div(reads, inputs_per_thread), 8)
        warps_m = power_of_two_for(ceil_div(group_out, channels_per_thread * lanes_m), 4)
        warps_n = power_of_two_for(ceil_div(reads, inputs_per_thread * lanes_n), 8 // warps_m)
        warps_k = max(4 // (warps_m * warps_n), 1)
        channels = channels_per_thread * lanes_m * warps_m
        inputs = inputs_per_thread * lanes_n * warps_n
        # A stage has as much of a row as fits, and several rows of narrow images.
        quantum = max(16 // operands.scalar_bytes, PIXELS)
        stage_columns = min(round_up(out_size[1], quantum), most_columns)
        stage_rows = max(1, min(out_size[0], most_columns // stage_columns))
        while True:
            columns = (stage_columns - PIXELS) * distance + window
            columns = round_up(columns, max(vector_input, 4))
            grads = channels * stage_rows * (stage_columns + max(vector_grad, 4))
            pixels = inputs * stage_rows * block_taps * (columns + max(vector_input, 4))
            shared_bytes = 2 * sum(
                round_up(elements * operands.scalar_bytes, 16) for elements in (grads, pixels)
            )
            if shared_bytes <= SHARED_BYTES or stage_rows == 1:
                break
            stage_rows //= 2
        if shared_bytes <= SHARED_BYTES and window <= MOST_WINDOW:
            break

    threads = 32 * warps_m * warps_n * warps_k
    units = planes * ceil_div(out_size[0], stage_rows) * ceil_div(out_size[1], stage_columns)
    units *= batch
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "bias": False,  # the bias gradient has a kernel of its own
        "group_in": group_in,
        "group_out": group_out,
        "groups": groups,
        "in_height": geometry.input[-2],
        "in_width": geometry.input[-1],
        "out_height": out_size[0],
        "out_width": out_size[1],
        **kernel_constants(geometry),
        **depth_constants(geometry),
        "in_channels_last": operands.channels_last,
        "grad_channels_last": operands.channels_last,
        "wide_units": units >= 2**31,
        "channels_per_thread": channels_per_thread,
        "inputs_per_thread": inputs_per_thread,
        "lanes_m": lanes_m,
        "lanes_n": lanes_n,
        "warps_m": warps_m,
        "warps_n": warps_n,
        "warps_k": warps_k,
        "part_taps": part_taps,
        "block_taps": block_taps,
        "stage_rows": stage_rows,
        "stage_columns": stage_columns,
        "vector_input": vector_input,
        "vector_grad": vector_grad,
        "input_pitch_padding": max(vector_input, 4),
        "grad_pitch_padding": max(vector_grad, 4),
        "flush_units": max(1, FLUSH_PIXELS // (stage_rows * stage_columns)),
        "shared_bytes": shared_bytes,
        "blocks_per_sm": 512 // threads,
    }
    code = ("direct/wgrad/kernel.cuh", tuple(constants.items()))
    tiles = (
        groups
        * ceil_div(group_out, channels)
        * ceil_div(reads, inputs)
        * ceil_div(kernel[0], block_taps)
        * ceil_div(kernel[1], part_taps)
    )
    require("tiles of a weight", tiles)
    block_accumulators = channels_per_thread * inputs_per_thread * part_taps * block_taps * threads
    most_blocks = WORKSPACE_BYTES // (block_accumulators * 4)
    at_once = min(tiles, most_blocks)
    splits = min(max(sms * (512 // threads) // at_once, 1), most_blocks // at_once, max(units, 1))
    launches = []
    for first in range(0, tiles, at_once):
        count = min(at_once, tiles - first)
        arguments = ("grad_output", "input", "scratch", first, count, splits, batch)
        launches.append(
            Launch(
                code[0], "weight_grad", code[1], count * splits, threads, shared_bytes, arguments
            )
        )
        reduced = ("scratch", "output", "bias_grad", first, count, splits)
        launches.append(helper_launch(code, "reduce", count * block_accumulators, reduced))
    return Plan(tuple(launches), at_once * splits * block_accumulators * 4)


def bias_grad_plan(geometry: Geometry, operands: Operands, sms: int) -> Plan:
    batch, channels, *sizes = geometry.output
    height, width = math.prod(sizes[:-1]), sizes[-1]
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "channels": channels,
        "height": height,
        "width": width,
        "channels_last": operands.channels_last,
    }
    code = ("direct/bias_grad.cuh", tuple(constants.items()))
    splits = max(1, min(8 * sms // channels, batch * height * width // HELPER_THREADS))
    arguments = ("grad_output", "scratch", splits, batch)
    partial = Launch(
        code[0], "bias_grad", code[1], channels * splits, HELPER_THREADS, 4 * HELPER_THREADS,
        arguments,
    )  # fmt: skip
    reduced = ("scratch", "output", splits)
    blocks = ceil_div(channels, HELPER_THREADS)
    reduce = Launch(code[0], "bias_reduce", code[1], blocks, HELPER_THREADS, 0, reduced)
    return Plan((partial, reduce), channels * splits * 4)


def helper_launch(
    code: tuple[str, Constants],
    entry: str,
    elements: int,
    arguments: tuple[str | int, ...],
) -> Launch:
    """A launch with a thread for each element, up to a limit; beyond it, threads loop."""
    blocks = min(ceil_div(elements, HELPER_THREADS), MOST_HELPER_BLOCKS)
    return Launch(code[0], entry, code[1], blocks, HELPER_THREADS, 0, arguments)


def kernel_constants(geometry: Geometry) -> dict[str, Constant]:
    """The constants that describe a contiguous weight, and how it is applied."""
    height, width = geometry.weight[-2:]
    return {
        "kernel_height": height,
        "kernel_width": width,
        "stride_height": geometry.stride[-2],
        "stride_width": geometry.stride[-1],
        "dilation_height": geometry.dilation[-2],
        "dilation_width": geometry.dilation[-1],
        "padding_top": geometry.padding[-2],
        "padding_left": geometry.padding[-1],
        "weight_stride_out": math.prod(geometry.weight[1:]),
        "weight_stride_in": math.prod(geometry.weight[2:]),
        "weight_stride_height": width,
        "weight_stride_width": 1,
    }


def depth_constants(geometry: Geometry, transposed: bool = False) -> dict[str, Constant]:
    """The constants of a volume's depth; there are none for images."""
    if len(geometry.stride) == 2:
        return {}
    sizes = (geometry.input[2], geometry.output[2])
    return {
        "in_depth": sizes[transposed],
        "out_depth": sizes[not transposed],
        "kernel_depth": geometry.weight[2],
        "stride_depth": geometry.stride[0],
        "dilation_depth": geometry.dilation[0],
        "padding_front": geometry.padding[0],
        "weight_stride_depth": math.prod(geometry.weight[3:]),
    }


def countable(geometry: Geometry) -> Geometry:
    """The geometry, after checking that kernels can count its elements in 32-bit ints.

    Strides larger than the padded input, and the dilation of a single tap, have no effect: they are
    reduced.
    """
    out_channels, group_in, *kernel = geometry.weight
    axes = range(len(kernel))
    padded = [geometry.input[2 + i] + 2 * geometry.padding[i] for i in axes]
    sizes = (*geometry.input[:2], out_channels, *padded)
    require("images, channels and padded sides", max(sizes))
    channels = max(out_channels // geometry.groups, group_in)
    require("a group's channels times taps", channels * math.prod(kernel))
    stride = tuple(min(geometry.stride[i], padded[i]) for i in axes)
    dilation = tuple(geometry.dilation[i] if kernel[i] > 1 else 1 for i in axes)
    return geometry._replace(stride=stride, dilation=dilation)


def require(what: str, value: int) -> None:
    """Raises a ValueError if a count exceeds what kernels can hold in 32-bit ints."""
    if value >= END:
        raise ValueError(
            f"the portable kernels take {what} below {END} (2^31 - 2^16), but got {value}"
        )
