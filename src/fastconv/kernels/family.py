"""What a kernel family hands over: device code with its constants, and how to launch it."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path

from fastconv.kernels.arithmetic import ceil_div
from fastconv.problem import Problem

FOLDER = Path(__file__).parent
"""Where the families' device code lies; ``#include`` paths start here."""

Constant = int | bool | str

MOST_ROUNDS = 32  # of a weight gradient's tiles through the workspace: each is two launches


@dataclass(frozen=True)
class Kernel:
    """A ``__global__`` function and the constants it is compiled with.

    ``source`` is a file below :data:`FOLDER`, ``entry`` an ``extern "C" __global__`` function in
    it. The file reads its constants from a struct ``Config``: ints and bools are static constexpr
    members of it, strings are member types.
    """

    source: str
    entry: str
    constants: tuple[tuple[str, Constant], ...]

    @property
    def text(self) -> str:
        """The translation unit: the constants, then the file that uses them."""
        members = "\n".join(f"  {_member(name, value)}" for name, value in self.constants)
        return (
            '#include "include/scalar.cuh"\n'
            f"struct Config {{\n{members}\n}};\n"
            f'#include "{self.source}"\n'
        )


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the addresses of its tensors.

    ``arguments`` are the kernel's, in order: a string names a tensor (its address is passed, 0 for
    an absent one), an int is passed as a 32-bit int. ``scratch`` is one of the names where the
    launch needs a workspace.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    arguments: tuple[str | int, ...]


def _member(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"static constexpr int {name} = {value};"
    return f"using {name} = {value};"


class Declined(Exception):
    """A family does not take a problem; the message says what it is that it does not take."""


@dataclass(frozen=True)
class Plan:
    """How a pass is computed: launches in order, and bytes of workspace (tensor ``scratch``).

    ``why`` says in a few words why this family, and why in this way; ``explanation`` in lines.
    """

    launches: tuple[Launch, ...]
    scratch_bytes: int
    family: str
    why: str
    explanation: tuple[str, ...] = ()
    key: str = ""  # the problem's, and this plan's name, in tables of measured choices
    choice: str = ""


@dataclass(frozen=True)
class Gpu:
    """What planning needs to know of a device."""

    architecture: str
    processors: int
    shared_bytes_per_block: int
    shared_bytes_per_processor: int


@dataclass(frozen=True)
class Operands:
    """How the tensors of a pass lie in memory.

    The two activations (what the pass reads, or the input and the output's gradient; and what it
    writes) are dense, in either memory format. ``aligned`` says that all addresses are multiples
    of 16 bytes. ``precision`` is that of float32 products, "ieee" or "tf32". ``bias_grad`` asks a
    weight gradient to fill a tensor of that name too, with that of the bias.
    """

    scalar: str  # name of the element type in device code
    scalar_bytes: int
    input_channels_last: bool
    output_channels_last: bool
    weight_strides: tuple[int, int, int, int]
    aligned: bool
    precision: str = "ieee"
    bias_grad: bool = False

    @property
    def sum_bytes(self) -> int:
        """Bytes of the type that this one is summed in."""
        return max(self.scalar_bytes, 4)

    @property
    def vector(self) -> int:
        """Elements of the widest copy, 16 bytes."""
        return 16 // self.scalar_bytes

    def widest_vector(self, *distances: int) -> int:
        """Elements of the widest copy whose addresses, these distances apart, are all aligned."""
        vector = gcd(self.vector, *distances) if self.aligned else 1
        return vector if vector * self.scalar_bytes >= 4 else 1  # no copy is narrower than 4 bytes


GEOMETRY = frozenset(
    f"{name}_{side}"
    for name in ("in", "out", "kernel", "stride", "dilation")
    for side in ("height", "width")
) | {
    "groups", "group_in", "group_out", "padding_top", "padding_left", "weight_stride_out",
    "weight_stride_in", "weight_stride_height", "weight_stride_width",
}  # fmt: skip
"""Constants that every kernel has: what is computed, not how."""


def geometry_constants(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    operands: Operands,
) -> dict[str, Constant]:
    """What every kernel is told of the kernel, and of its weight in memory.

    ``padding`` is that at the top and at the left.
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
        "weight_stride_height": operands.weight_strides[2],
        "weight_stride_width": operands.weight_strides[3],
    }


def problem_constants(problem: Problem, operands: Operands) -> dict[str, Constant]:
    """The same of a problem as it stands."""
    padding = (problem.padding.top, problem.padding.left)
    return geometry_constants(
        problem.kernel_size, problem.stride, problem.dilation, padding, operands
    )


def blocks_at_once(count: int, block_bytes: int, workspace_bytes: int, most_bytes: int) -> int:
    """Of a weight gradient's ``count`` blocks, how many have their sums in the workspace at once.

    It has ``workspace_bytes``, and up to ``most_bytes`` where weights are so large that there would
    be more than :data:`MOST_ROUNDS`.
    """
    blocks = max(workspace_bytes // block_bytes, ceil_div(count, MOST_ROUNDS))
    return min(blocks, most_bytes // block_bytes)


def weight_grad_constants(problem: Problem, operands: Operands) -> dict[str, Constant]:
    """What every kernel for weight gradients is told of its problem and tensors."""
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
