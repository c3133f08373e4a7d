"""Plans for the portable kernels, of every geometry: one simple rule, where the package weighs."""

import itertools
import math
from typing import NamedTuple

PIXELS = 4  # of a thread, neighbours in a row
WARPS = 8  # of a correlation's block
UNROLLED_TAPS = 48
MOST_PART_TAPS = 16  # of a kernel row, which is unrolled
MOST_WINDOW = 128  # pixels of a row that a thread holds, also unrolled
STAGE_PRODUCTS = 160  # of each sum: what a stage's two barriers should be worth
MOST_SUMS = 72  # of a thread, in weight gradients
MOST_VALUES = 108  # sums and input pixels together
STAGE_COLUMNS = (96, 64, 32, 16, 8)  # the widest that fits, in weight gradients
FLUSH_PRODUCTS, MOST_PRODUCTS = 60, 512  # summed in one go, at least and at most, in others
FLUSH_PIXELS = 512  # summed in one go, in weight gradients
SHARED_BYTES = 47 * 1024  # of a block: every GPU has that, most of them for two blocks
WORKSPACE_BYTES = 64 << 20
HELPER_THREADS = 256  # of the small kernels that clear, pack and add up
MOST_HELPER_BLOCKS = 4096
MOST_BLOCKS = 2**31 - 1  # of a launch
END = 2**31 - 2**16  # kernels count below it, so that a tile more is still a 32-bit int

Constant = int | bool | str
Constants = tuple[tuple[str, Constant], ...]


def config(like: Constants = (), /, **constants: Constant) -> Constants:
    """The constants of a kernel, or how they differ from another one's."""
    return tuple({**dict(like), **constants}.items())


class TensorMap(NamedTuple):
    """Describes a tensor to copies of boxes of it; dimensions come innermost first.

    ``strides`` are bytes, of all dimensions but the innermost.
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
    """The same of images, to copies of pixels in a row within the corners of a bounding box."""

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

    ``arguments`` are the kernel's, in order: a string names a tensor, an int stands for itself, a
    map for a descriptor of its tensor. An ``early`` one may begin while the launch before it is
    still under way: the kernel waits for that before it touches any tensor.
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
    """Launches in order, and the bytes of their workspace (the tensor ``scratch``)."""

    launches: tuple[Launch, ...]
    scratch_bytes: int


class Target(NamedTuple):
    """A GPU that plans were made for; ``shared_bytes`` are what a block may have."""

    processors: int
    shared_bytes: int


class Geometry(NamedTuple):
    """What is to be convolved with what, and how."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def output(self) -> tuple[int, ...]:
        sizes = []
        for axis in (0, 1):
            extent = self.dilation[axis] * (self.weight[2 + axis] - 1) + 1
            padded = self.input[2 + axis] + 2 * self.padding[axis]
            sizes.append((padded - extent) // self.stride[axis] + 1)
        return (self.input[0], self.weight[0], *sizes)


class Operands(NamedTuple):
    """How the tensors lie in memory; ``aligned``: all at multiples of 16 bytes."""

    scalar: str
    scalar_bytes: int
    channels_last: bool
    aligned: bool

    def vector(self, *distances: int) -> int:
        """Elements of the widest copy whose addresses, these distances apart, are all aligned."""
        if self.channels_last or not self.aligned:
            return 1
        vector = math.gcd(16 // self.scalar_bytes, *distances)
        return vector if vector * self.scalar_bytes >= 4 else 1


class Axis(NamedTuple):
    """One axis of a correlation: see the kernel."""

    taps: int
    step: int
    phases: int
    in_stride: int
    origin: int  # input position of the first output's first tap, where there is one phase
    positions: int  # outputs of a phase, at most
    reaches_all: bool  # whether every output has a tap

    @classmethod
    def of(cls, transposed: bool, geometry: Geometry, axis: int) -> "Axis":
        kernel, padding = geometry.weight[2 + axis], geometry.padding[axis]
        stride, dilation = geometry.stride[axis], geometry.dilation[axis]
        if not transposed:
            return cls(kernel, dilation, 1, stride, -padding, geometry.output[2 + axis], True)
        common = math.gcd(stride, dilation)
        taps, step, size = ceil_div(kernel, stride // common), dilation // common, geometry.input
        phases = min(kernel, stride // common)
        positions = ceil_div(size[2 + axis], stride)
        origin = ceil_div(padding, stride) - (taps - 1) * step
        return cls(taps, step, phases, 1, origin, positions, phases == stride)

    def distance(self, taps: int) -> int:
        """From one output's first tap to the next one's, in a tile that serves so many taps."""
        return 1 if taps == 1 else self.in_stride


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def power_of_two_for(count: int, most: int) -> int:
    """The least power of two that covers ``count``, at most ``most``, which is one."""
    return min(1 << (count - 1).bit_length(), most)


def portable_plan(which: str, geometry: Geometry, operands: Operands, processors: int) -> Plan:
    """How the portable kernels do it on a GPU of so many processors.

    ``which`` names what they compute, and with it the launches' tensors:
    "forward" ``input``, ``weight``, ``bias`` and ``output``; "input_grad" the same, where ``input``
    is the output's gradient and ``output`` the input's; "weight_grad" ``grad_output``, ``input``
    and ``output``; "bias_grad" ``grad_output`` and ``output``.
    """
    geometry = countable(geometry)
    if which == "weight_grad":
        return weight_grad_plan(geometry, operands, processors)
    if which == "bias_grad":
        return bias_grad_plan(geometry, operands, processors)
    return correlation_plan(geometry, operands, transposed=which == "input_grad")


def correlation_plan(geometry: Geometry, operands: Operands, transposed: bool) -> Plan:
    """A forward convolution, or its input gradient."""
    batch, groups = geometry.input[0], geometry.groups
    group_in, group_out = geometry.weight[1], geometry.weight[0] // groups
    in_size, out_size = geometry.input[2:], geometry.output[2:]
    if transposed:
        group_in, group_out, in_size, out_size = group_out, group_in, out_size, in_size
    rows, columns = (Axis.of(transposed, geometry, i) for i in (0, 1))
    # Channels first: a thread's own, then lanes. The rest of a warp, and all warps, take pixels.
    channels_per_thread = power_of_two_for(group_out, 8)
    lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
    lanes_x = power_of_two_for(ceil_div(columns.positions, PIXELS), 32 // lanes_m)
    lanes_y = 32 // (lanes_m * lanes_x)
    tile = (channels_per_thread * lanes_m, WARPS * lanes_y, PIXELS * lanes_x)

    for channels, tap_rows, tap_columns in correlation_stages(rows.taps, columns.taps, group_in):
        distance = columns.distance(tap_columns)
        vector = 1
        if columns.phases == 1 and distance == columns.in_stride and tap_columns == columns.taps:
            vector = operands.vector(in_size[1], tile[2] * columns.in_stride)
        window = (
            columns.origin % vector + (PIXELS - 1) * distance + (tap_columns - 1) * columns.step + 1
        )
        quantum = max(vector, 4)
        halo_columns = round_up((tile[2] - PIXELS) * distance + round_up(window, 4), quantum)
        halo_rows = (tile[1] - 1) * rows.distance(tap_rows) + (tap_rows - 1) * rows.step + 1
        pitch_padding = quantum if lanes_y > 1 else 0  # rows in different banks
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
        * groups
        * rows.phases
        * columns.phases
    )
    require("blocks of one image", blocks)
    packed = (
        rows.phases
        * columns.phases
        * groups
        * round_up(group_out, tile[0])
        * round_up(group_in, channels)
        * round_up(rows.taps, tap_rows)
        * round_up(columns.taps, tap_columns)
    )
    code = ("direct/forward/kernel.cuh", tuple(constants.items()))
    launches = [helper_launch(code, "pack", packed, ("weight", "scratch"))]
    if not (rows.reaches_all and columns.reaches_all):
        elements = math.prod(geometry.input)
        launches.append(helper_launch(code, "clear", elements, ("output", batch)))
    at_once = MOST_BLOCKS // blocks
    for first in range(0, batch, at_once):
        images = min(at_once, batch - first)
        arguments = ("input", "weight", "scratch", "bias", "output", first, images)
        launches.append(
            Launch(
                code[0], "correlate", code[1], images * blocks, 32 * WARPS, shared_bytes, arguments
            )
        )
    return Plan(tuple(launches), packed * 4)


def correlation_stages(rows: int, columns: int, group_in: int) -> tuple[tuple[int, int, int], ...]:
    """Channels, kernel rows and kernel columns of a stage, from the best down to a single tap."""
    part = ceil_div(columns, ceil_div(columns, MOST_PART_TAPS))
    most = min(group_in, max(STAGE_PRODUCTS // (rows * part), 1), 16)
    whole = tuple((channels, rows, part) for channels in range(most, 0, -1))
    return (*whole, (1, 1, part), (1, 1, 1))


def weight_grad_plan(geometry: Geometry, operands: Operands, processors: int) -> Plan:
    batch, groups = geometry.input[0], geometry.groups
    group_in, group_out = geometry.weight[1], geometry.weight[0] // groups
    kernel, out_size = geometry.weight[2:], geometry.output[2:]
    stride, dilation = geometry.stride[1], geometry.dilation[1]
    whole = ceil_div(kernel[1], ceil_div(kernel[1], MOST_PART_TAPS))

    # Of a block at most: kernel rows, and input channels of a thread.
    owned = ((kernel[0], 8), (1, 8), (1, 1))
    for part_taps, (tap_rows, most_inputs), most_columns in itertools.product(
        (whole, 1), owned, STAGE_COLUMNS
    ):
        distance = 1 if part_taps == 1 else stride
        vector_input = 1
        if distance == stride and part_taps == kernel[1]:
            vector_input = operands.vector(geometry.input[3])
        vector_grad = operands.vector(out_size[1])
        shift = -geometry.padding[1] % vector_input
        window = round_up(shift + (PIXELS - 1) * distance + (part_taps - 1) * dilation + 1, 4)
        # A thread's sums first, of all kernel rows if they fit; then lanes and warps over channels.
        channels_per_thread = power_of_two_for(group_out, 8)
        while channels_per_thread * part_taps > MOST_SUMS:
            channels_per_thread //= 2
        block_taps = tap_rows
        if block_taps * (channels_per_thread * part_taps + window) > MOST_VALUES:
            block_taps = 1
        inputs_per_thread = power_of_two_for(group_in, most_inputs)
        sums_of_input = channels_per_thread * part_taps * block_taps
        while inputs_per_thread > 1 and inputs_per_thread * sums_of_input > MOST_SUMS:
            inputs_per_thread //= 2
        lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
        lanes_n = power_of_two_for(ceil_div(group_in, inputs_per_thread), 8)
        warps_m = power_of_two_for(ceil_div(group_out, channels_per_thread * lanes_m), 4)
        warps_n = power_of_two_for(ceil_div(group_in, inputs_per_thread * lanes_n), 8 // warps_m)
        warps_k = max(4 // (warps_m * warps_n), 1)
        channels = channels_per_thread * lanes_m * warps_m
        inputs = inputs_per_thread * lanes_n * warps_n
        # The stage: as much of a row as fits, and several rows of narrow images.
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
    units = batch * ceil_div(out_size[0], stage_rows) * ceil_div(out_size[1], stage_columns)
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "bias": False,  # has a kernel of its own
        "group_in": group_in,
        "group_out": group_out,
        "groups": groups,
        "in_height": geometry.input[2],
        "in_width": geometry.input[3],
        "out_height": out_size[0],
        "out_width": out_size[1],
        **kernel_constants(geometry),
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
        * ceil_div(group_in, inputs)
        * ceil_div(kernel[0], block_taps)
        * ceil_div(kernel[1], part_taps)
    )
    require("tiles of a weight", tiles)
    block_sums = channels_per_thread * inputs_per_thread * part_taps * block_taps * threads
    most_blocks = WORKSPACE_BYTES // (block_sums * 4)
    at_once = min(tiles, most_blocks)
    splits = min(
        max(processors * (512 // threads) // at_once, 1), most_blocks // at_once, max(units, 1)
    )
    launches = []
    for first in range(0, tiles, at_once):
        count = min(at_once, tiles - first)
        arguments = ("grad_output", "input", "scratch", first, count, splits, batch)
        launches.append(
            Launch(
                code[0], "weight_grad", code[1], count * splits, threads, shared_bytes, arguments
            )
        )
        add_up = ("scratch", "output", "bias_grad", first, count, splits)
        launches.append(helper_launch(code, "reduce", count * block_sums, add_up))
    return Plan(tuple(launches), at_once * splits * block_sums * 4)


def bias_grad_plan(geometry: Geometry, operands: Operands, processors: int) -> Plan:
    batch, channels, height, width = geometry.output
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "channels": channels,
        "height": height,
        "width": width,
        "channels_last": operands.channels_last,
    }
    code = ("direct/bias_grad.cuh", tuple(constants.items()))
    splits = max(1, min(8 * processors // channels, batch * height * width // HELPER_THREADS))
    arguments = ("grad_output", "scratch", splits, batch)
    sums = Launch(
        code[0], "bias_grad", code[1], channels * splits, HELPER_THREADS, 4 * HELPER_THREADS,
        arguments,
    )  # fmt: skip
    add_up = ("scratch", "output", splits)
    blocks = ceil_div(channels, HELPER_THREADS)
    reduce = Launch(code[0], "bias_reduce", code[1], blocks, HELPER_THREADS, 0, add_up)
    return Plan((sums, reduce), channels * splits * 4)


def helper_launch(
    code: tuple[str, Constants],
    entry: str,
    elements: int,
    arguments: tuple[str | int, ...],
) -> Launch:
    """A launch of enough threads for so many elements, within reason: they loop."""
    blocks = min(ceil_div(elements, HELPER_THREADS), MOST_HELPER_BLOCKS)
    return Launch(code[0], entry, code[1], blocks, HELPER_THREADS, 0, arguments)


def kernel_constants(geometry: Geometry) -> dict[str, Constant]:
    """What every kernel is told of the convolution's kernel, whose weight is contiguous."""
    _, group_in, height, width = geometry.weight
    return {
        "kernel_height": height,
        "kernel_width": width,
        "stride_height": geometry.stride[0],
        "stride_width": geometry.stride[1],
        "dilation_height": geometry.dilation[0],
        "dilation_width": geometry.dilation[1],
        "padding_top": geometry.padding[0],
        "padding_left": geometry.padding[1],
        "weight_stride_out": group_in * height * width,
        "weight_stride_in": height * width,
        "weight_stride_height": width,
        "weight_stride_width": 1,
    }


def countable(geometry: Geometry) -> Geometry:
    """The geometry in numbers that kernels can hold, or an error that names one they cannot.

    Strides that are never taken, and the dilation of a single tap, become as small as they can be.
    """
    out_channels, group_in, *kernel = geometry.weight
    padded = [geometry.input[2 + i] + 2 * geometry.padding[i] for i in (0, 1)]
    sizes = (*geometry.input[:2], out_channels, *padded)
    require("images, channels and padded sides", max(sizes))
    channels = max(out_channels // geometry.groups, group_in)
    require("a group's channels times taps", channels * kernel[0] * kernel[1])
    stride = (min(geometry.stride[0], padded[0]), min(geometry.stride[1], padded[1]))
    dilation = tuple(geometry.dilation[i] if kernel[i] > 1 else 1 for i in (0, 1))
    return geometry._replace(stride=stride, dilation=(dilation[0], dilation[1]))


def require(what: str, value: int) -> None:
    """Raises an error if there is too much of something for 32-bit ints."""
    if value >= END:
        raise ValueError(
            f"the portable kernels take {what} below {END} (2^31 - 2^16), but got {value}"
        )
