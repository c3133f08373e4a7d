"""The values that a kernel family's plans are made of: kernels with constants, and launches."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path

from fastconv.kernels.arithmetic import ceil_div
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

FOLDER = Path(__file__).parent
"""The folder of the families' device code; ``#include`` paths are relative to it."""

Constant = int | bool | str

PARAMETERS = {
    "residual": "#define FASTCONV_RESIDUAL\n",
    "statistics": "#define FASTCONV_STATISTICS\n",
    "slabs": "#define FASTCONV_SLABS\n",
    "most_registers": "#define FASTCONV_MOST_REGISTERS\n",
    "beside": "#define FASTCONV_BESIDE\n",
}
"""The constants that are also parameters or bounds of a function, or say which functions there are,
and the macros that say so."""

MOST_ROUNDS = 32
"""The most rounds in which a weight gradient's tiles pass through the workspace.

Each round is two launches.
"""


@dataclass(frozen=True)
class Kernel:
    """A ``__global__`` function and the constants it is compiled with.

    ``source`` is a file below :data:`FOLDER`, ``entry`` an ``extern "C" __global__`` function in
    it. The file reads its constants from a struct ``Config``: ints and bools are static constexpr
    members of it, strings are member types. A ``residual`` is also a parameter of the function, and
    so are ``statistics`` and the first row of ``slabs``: there are preprocessor macros for them
    (``device/epilogue.cuh``, ``hopper/implicit_gemm_nhwc/statistics.cuh``,
    ``device/tensor/half_copy.cuh``).
    """

    source: str
    entry: str
    constants: tuple[tuple[str, Constant], ...]

    @property
    def text(self) -> str:
        """The source of the translation unit: the constants, then the file that uses them."""
        members = "\n".join(f"  {_member(name, value)}" for name, value in self.constants)
        names = {name for name, _ in self.constants}
        types = "epilogue" if "activation" in names else "scalar"
        macros = "".join(macro for name, macro in PARAMETERS.items() if name in names)
        return (
            f"{macros}"
            f'#include "device/{types}.cuh"\n'
            f"struct Config {{\n{members}\n}};\n"
            f'#include "{self.source}"\n'
        )


MAPPED_SCALARS = {
    "float": 4,
    "tf32": 4,
    "double": 8,
    "fastconv::float16": 2,
    "fastconv::bfloat16": 2,
}
"""The element types that a tensor map can have, by their names in device code, and their bytes.

``tf32`` is float32 that TMA loads round to TF32's mantissa, to nearest with ties to even.
"""


@dataclass(frozen=True)
class TensorMap:
    """A tensor map (tiled mode): with it, TMA loads and stores boxes of a tensor.

    Dimensions come innermost first. ``strides`` are the bytes between neighbours along each
    dimension but the innermost, which is contiguous. ``box`` is the number of elements that a TMA
    box spans along each dimension; with ``element_strides`` n, TMA copies only every n-th of them,
    from the first on. TMA reads elements outside of the tensor as zeros, and does not write them.
    ``swizzle`` is the span of the swizzle pattern in shared memory, 32, 64 or 128 bytes;
    ``promotion`` is the size of the L2 cache's fetches, 64, 128 or 256 bytes; 0 means none.

    Raises:
        ValueError: the CUDA driver would refuse the tensor map.
    """

    tensor: str
    scalar: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    promotion: int = 0

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.sizes))
        _check_layout(self, range(1, 6))
        _check_number(self, "box", len(self.sizes))
        _check_each(self, "box", self.box, range(1, 257))
        _check_row(self, self.box[0])

    @property
    def box_bytes(self) -> int:
        """Bytes of a TMA box in shared memory, which an mbarrier counts, in or out of bounds."""
        counts = map(ceil_div, self.box, self.element_strides)
        return prod(counts) * MAPPED_SCALARS[self.scalar]


@dataclass(frozen=True)
class Im2colMap:
    """A tensor map in im2col mode: TMA loads ``channels`` of ``pixels`` consecutive pixels.

    Dimensions come innermost first: channels, columns, rows (and slices), images. The pixels lie in
    a bounding region, which begins ``lower`` after an image's first pixel and ends ``upper`` after
    its last, along columns, then rows. A load traverses the region in the order of memory, from one
    image to the next, in steps of ``element_strides``. The other fields are those of
    :class:`TensorMap`.

    Raises:
        ValueError: the CUDA driver would refuse the tensor map.
    """

    tensor: str
    scalar: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    promotion: int = 0

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.sizes))
        _check_layout(self, range(3, 6))
        if self.element_strides[-1] != 1:
            raise _refused(self, f"element_strides {self.element_strides} skip images")
        self._check_corners()
        _check_each(self, "channels", [self.channels], range(1, 257))
        _check_each(self, "pixels", [self.pixels], range(1, 1025))
        _check_row(self, self.channels)

    def _check_corners(self) -> None:
        limit = {1: 2**15, 2: 2**7, 3: 2**4}[len(self.sizes) - 2]
        for name, corner in (("lower", self.lower), ("upper", self.upper)):
            _check_number(self, name, len(self.sizes) - 2)
            _check_each(self, name, corner, range(-limit, limit))
        for size, lower, upper in zip(self.sizes[1:-1], self.lower, self.upper, strict=True):
            if size + upper <= lower:
                corners = f"{self.lower} to {self.upper}"
                raise _refused(self, f"no pixels from corner {corners}, of sizes {self.sizes}")

    @property
    def box_bytes(self) -> int:
        """Bytes of a TMA box in shared memory, which an mbarrier counts, in or out of bounds."""
        return self.pixels * self.channels * MAPPED_SCALARS[self.scalar]


AnyMap = TensorMap | Im2colMap
Argument = str | int | TensorMap | Im2colMap


def _check_layout(of: AnyMap, ranks: range) -> None:
    """Checks the fields that both kinds of tensor maps have."""
    if of.scalar not in MAPPED_SCALARS:
        raise _refused(of, f"{of.scalar} is none of {', '.join(MAPPED_SCALARS)}")
    if len(of.sizes) not in ranks:
        raise _refused(of, f"{len(of.sizes)} sizes, not {ranks[0]} to {ranks[-1]}")
    _check_number(of, "strides", len(of.sizes) - 1)
    _check_number(of, "element_strides", len(of.sizes))
    _check_each(of, "sizes", of.sizes, range(1, 2**32 + 1))
    _check_each(of, "strides", of.strides, range(0, 2**40, 16))
    _check_each(of, "element_strides", of.element_strides, range(1, 9))
    if of.element_strides[0] != 1:  # the driver would ignore such a stride
        raise _refused(
            of, f"element_strides {of.element_strides} skip elements that are neighbours"
        )
    _check_each(of, "swizzle", [of.swizzle], (0, 32, 64, 128))
    _check_each(of, "promotion", [of.promotion], (0, 64, 128, 256))


def _check_row(of: AnyMap, elements: int) -> None:
    """Checks the innermost elements of a TMA box, which are contiguous in shared memory."""
    row = elements * MAPPED_SCALARS[of.scalar]
    if row % 16:
        raise _refused(of, f"a box has rows of {row} bytes, not a multiple of 16")
    if of.swizzle and row > of.swizzle:
        raise _refused(of, f"a box has rows of {row} bytes, more than a swizzle of {of.swizzle}")


def _check_number(of: AnyMap, name: str, number: int) -> None:
    if len(getattr(of, name)) != number:
        given = f"{name} {getattr(of, name)}"
        raise _refused(of, f"{given}: {number} are needed for sizes {of.sizes}")


def _check_each(of: AnyMap, name: str, values: Iterable[int], allowed: Sequence[int]) -> None:
    for value in values:
        if value not in allowed:
            if isinstance(allowed, range):
                step = f" in steps of {allowed.step}" if allowed.step > 1 else ""
                valid = f"from {allowed[0]} to {allowed[-1]}{step}"
            else:
                valid = f"one of {allowed}"
            raise _refused(of, f"{name} has {value}, which is not {valid}")


def _refused(of: AnyMap, why: str) -> ValueError:
    return ValueError(f"no map of {of.tensor}: {why}")


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the addresses of its tensors.

    ``arguments`` are the kernel's, in order: a string names a tensor (its address is passed, 0 for
    an absent one), an int is passed as a 32-bit int, a tensor map as a descriptor of the tensor it
    names (``const __grid_constant__ fastconv::TensorMap``). The name ``scratch`` is the workspace.

    An ``early`` launch uses programmatic dependent launch (PDL): its blocks may begin while the
    launch before it, of any library, is still running. So the kernel calls
    ``wait_for_earlier_launch`` before it reads or writes any tensor, or
    ``go_beside_earlier_launch`` if that one is the plan's and has nothing to do with its tensors.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    early: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors, mapped or not, in the order of their first use."""
        used = (a for a in self.arguments if not isinstance(a, int))
        return tuple(dict.fromkeys(a if isinstance(a, str) else a.tensor for a in used))


def _member(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"static constexpr int {name} = {value};"
    return f"using {name} = {value};"


class Declined(Exception):
    """A family does not take a problem; the message names the property that it does not take.

    A function that catches it keeps the message at most. An exception in a local variable holds, by
    its traceback, the frame that it is a variable of, and so all callers' frames with their
    tensors, until Python's garbage collector runs. The tensors' graphs would live as long, and a
    CUDA graph cannot be captured while gradients of an earlier step are alive.
    """


@dataclass(frozen=True)
class Region:
    """A part of the workspace that launches take as a tensor: its name, and where it begins.

    ``offset`` is a multiple of :data:`REGION_ALIGNMENT`. Regions follow the rest of the workspace,
    one after the other. A pass has at most two, of the names ``input_copy``, ``output_copy`` and
    ``grad_output_copy``.
    """

    name: str
    offset: int


REGION_ALIGNMENT = 256


@dataclass(frozen=True)
class Plan:
    """How a pass is computed: launches in order, and bytes of workspace (tensor ``scratch``).

    ``why`` says in a few words why this family and this plan were chosen, ``explanation`` in
    several lines.
    """

    launches: tuple[Launch, ...]
    scratch_bytes: int
    family: str
    why: str
    explanation: tuple[str, ...] = ()
    key: str = ""  # the problem's key in tables of measured choices
    choice: str = ""  # this plan's name in such a table
    packs: int = 0  # the first launches, which pack the weight into a workspace that others read
    cycles: float = 0.0  # the estimated time of all launches, 0 where there is no estimate
    regions: tuple[Region, ...] = ()
    shares: int = 0  # how many shares of statistics the launches leave: see Operands.statistics

    def offsets(self, names: Iterable[str]) -> tuple[int, ...]:
        """Where the regions of these names begin in the workspace; 0 for those it does not have."""
        begin = {region.name: region.offset for region in self.regions}
        return tuple(begin.get(name, 0) for name in names)


@dataclass(frozen=True)
class Gpu:
    """The properties of a device that planning depends on."""

    architecture: str
    sm_count: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int

    def shared_budget(self, blocks: int) -> int:
        """Returns the bytes of shared memory for each of ``blocks`` blocks on one SM."""
        own = self.shared_bytes_per_sm // blocks - RESERVED_SHARED_BYTES
        return min(self.shared_bytes_per_block, own)


RESERVED_SHARED_BYTES = 1024
"""The bytes of shared memory that CUDA reserves for each block."""
ALIGNMENT = 16
"""The addresses of a pass's ``aligned`` tensors are multiples of this many bytes."""
BIAS_ALIGNMENT = 4
"""The address of an ``aligned_bias`` is a multiple of this many bytes.

Kernels read at most two 16-bit elements of a bias at once.
"""


@dataclass(frozen=True)
class Operands:
    """The layout of a pass's tensors in memory, and the arithmetic of the pass.

    The pass's activations (input and output, or their gradients) are dense, in either memory
    format.

    Plans may assume the following of addresses, and callers that launch plans have to ensure it.
    Every tensor begins at a multiple of its elements' bytes. If ``aligned``, then input, weight,
    output, the output's gradient and the residual begin at multiples of :data:`ALIGNMENT`; if
    ``aligned_bias``, then the bias, if there is one, begins at a multiple of
    :data:`BIAS_ALIGNMENT`. Kernels write the bias's gradient element by element, so it may begin
    anywhere. A workspace always begins at a multiple of 256 bytes.

    ``precision`` is the arithmetic of float32, "ieee" or "tf32". With ``bias_grad``, a weight
    gradient also fills a tensor of that name with the gradient of the bias. ``epilogue`` is what a
    forward pass, or an input gradient that is a transposed convolution, does to its accumulators
    before it stores them; a residual is a tensor of that name, which has the output's layout and
    shares no memory with it.

    With ``statistics``, a forward pass also leaves what batch normalization needs of its output, if
    its kernel can: see ``Plan.shares``. Then there is a tensor ``statistics`` of float32, of
    ``[share][mean, squared deviations, count][channel]``, for the shares of the output's positions
    that blocks have. The output has the same bits.
    """

    scalar: str  # name of the element type in device code
    scalar_bytes: int
    input_channels_last: bool
    output_channels_last: bool
    weight_strides: tuple[int, ...]  # four of images, five of volumes
    aligned: bool
    precision: str = "ieee"
    bias_grad: bool = False
    epilogue: Epilogue = NO_EPILOGUE
    aligned_bias: bool = True
    statistics: bool = False

    @property
    def residuals(self) -> tuple[str, ...]:
        """The last arguments of a launch that stores outputs: the residual, if there is one."""
        return ("residual",) if self.epilogue.residual else ()

    @property
    def sum_bytes(self) -> int:
        """Bytes of the type that elements are summed in."""
        return max(self.scalar_bytes, 4)

    @property
    def vector(self) -> int:
        """Elements of the widest vector access, which has 16 bytes."""
        return ALIGNMENT // self.scalar_bytes

    def widest_vector(self, *distances: int) -> int:
        """Returns the elements of the widest vector that stays aligned at all these distances."""
        vector = gcd(self.vector, *distances) if self.aligned else 1
        return vector if vector * self.scalar_bytes >= 4 else 1  # no vector is below 4 bytes


GEOMETRY = frozenset(
    f"{name}_{side}"
    for name in ("in", "out", "kernel", "stride", "dilation")
    for side in ("depth", "height", "width")
) | {
    "groups", "group_in", "group_out", "padding_front", "padding_top", "padding_left",
    "weight_stride_out", "weight_stride_in", "weight_stride_depth", "weight_stride_height",
    "weight_stride_width", "image_depth", "out_step_depth", "plane_at", "last_tap_plane",
    "tap_step_depth", "slabs", "source_height",
}  # fmt: skip
"""The constants, common to all kernels, that say what is computed and not how."""


def geometry_constants(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    operands: Operands,
) -> dict[str, Constant]:
    """Returns the constants of the convolution's geometry and of the weight's layout.

    ``kernel`` is the size of the convolution's kernel; ``padding`` is that at the top and left.
    """
    return {
        "kernel_height": kernel[0],
        "kernel_width": kernel[1],
        "stride_height": stride[0],
        "stride_width": stride[1],
        "dilation_height": dilation[0],
        "dilation_width": dilation[1],
        "padding_top": padding[0],
        "padding_left": padding[1],
        "weight_stride_out": operands.weight_strides[0],
        "weight_stride_in": operands.weight_strides[1],
        "weight_stride_height": operands.weight_strides[-2],
        "weight_stride_width": operands.weight_strides[-1],
    }


_ACTIVATIONS = {
    "identity": "Identity",
    "relu": "Relu",
    "relu6": "Relu6",
    "leaky_relu": "LeakyRelu",
    "silu": "Silu",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "hardswish": "Hardswish",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


def epilogue_constants(epilogue: Epilogue) -> dict[str, Constant]:
    """Returns the constants of an epilogue; none, if accumulators are stored as they are."""
    if epilogue == NO_EPILOGUE:
        return {}
    activation = f"fastconv::{_ACTIVATIONS[epilogue.activation]}"
    if epilogue.activation == "leaky_relu":
        (bits,) = struct.unpack("<Q", struct.pack("<d", epilogue.slope))
        activation += f"<{bits:#x}ULL>"
    return {"activation": activation, **({"residual": True} if epilogue.residual else {})}


def problem_constants(problem: Problem, operands: Operands) -> dict[str, Constant]:
    """Returns the constants of a problem's geometry and of its weight's layout."""
    padding = (problem.padding.top, problem.padding.left)
    return geometry_constants(
        problem.kernel_size, problem.stride, problem.dilation, padding, operands
    )


def depth_constants(
    problem: Problem, operands: Operands, transposed: bool = False
) -> dict[str, Constant]:
    """Returns the constants of a volume's depth; there are none for images.

    A ``transposed`` pass reads the output's gradient and writes the input's.
    """
    depth = problem.depth
    if depth is None:
        return {}
    sizes = (depth.input_size, depth.output_size)
    return {
        "in_depth": sizes[transposed],
        "out_depth": sizes[not transposed],
        "kernel_depth": depth.kernel_size,
        "stride_depth": depth.stride,
        "dilation_depth": depth.dilation,
        "padding_front": depth.before,
        "weight_stride_depth": operands.weight_strides[2],
    }


def blocks_at_once(count: int, block_bytes: int, workspace_bytes: int, most_bytes: int) -> int:
    """Returns how many of a weight gradient's ``count`` tiles share the workspace in one round.

    The workspace has ``workspace_bytes``, and up to ``most_bytes`` for weights so large that there
    would be more than :data:`MOST_ROUNDS` rounds.
    """
    blocks = max(workspace_bytes // block_bytes, ceil_div(count, MOST_ROUNDS))
    return min(blocks, most_bytes // block_bytes)


def weight_grad_constants(problem: Problem, operands: Operands) -> dict[str, Constant]:
    """Returns the constants that all kernels for weight gradients have."""
    return {
        "Scalar": operands.scalar,
        "bias": operands.bias_grad,
        "groups": problem.groups,
        "group_in": problem.in_channels // problem.groups,
        "group_out": problem.out_channels // problem.groups,
        "in_height": problem.input_size[0],
        "in_width": problem.input_size[1],
        "out_height": problem.output_size[0],
        "out_width": problem.output_size[1],
        **problem_constants(problem, operands),
        "in_channels_last": operands.input_channels_last,
        "grad_channels_last": operands.output_channels_last,
    }
