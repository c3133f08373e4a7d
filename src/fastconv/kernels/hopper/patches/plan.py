"""Plans patch embeddings of contiguous volumes: layers whose kernel is their stride."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    epilogue_constants,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.problem import Problem

SOURCE = "hopper/patches/kernel.cuh"
PIECE = 4  # columns that are copied and multiplied together
TILE = 64  # positions
WARPS = 4
THREADS = 32 * WARPS
BANKS_BYTES = 128
MOST_FILTERS = 128  # of a forward pass: accumulators have to fit the registers
MOST_PIECES = 32  # of an input gradient, likewise
MOST_BLOCKS_PER_SM = 4  # so that threads have 128 registers

# Estimates of one SM: bytes that it moves per cycle, reads and writes together, and the share of
# the MMAs' rate that four warps reach.
SM_BYTES = 13.0
MMA_SHARE = 0.4
TILE_CYCLES = 300.0  # of a tile, beside its bytes and products
LAUNCH_CYCLES = 6000.0  # with the packing of weights, by each block


@dataclass(frozen=True)
class Layer:
    """A patch embedding; ``transposed``, if it is the input gradient that is computed."""

    problem: Problem
    operands: Operands
    transposed: bool

    @lazy
    def pieces(self) -> int:
        """Pieces of a patch."""
        return self.problem.in_channels * prod(self.problem.weight_shape[2:]) // PIECE

    @lazy
    def all_pieces(self) -> int:
        """Pieces that are multiplied, with those that are zero."""
        return round_up(self.pieces, 4)

    @lazy
    def filters(self) -> int:
        """Filters that are multiplied, with those that are zero."""
        return round_up(self.problem.out_channels, 16)

    @lazy
    def positions(self) -> int:
        """Patches of a volume."""
        return prod(self.problem.output_shape[2:])

    @lazy
    def copied_patches(self) -> int:
        """Patches whose pieces are neighbours in memory and copied together."""
        width, narrow = self.problem.kernel_size[1], self.operands.scalar_bytes == 2
        pairs = width == PIECE and self.problem.output_size[1] % 2 == 0
        return 2 if narrow and pairs and self.problem.input_size[1] % (2 * PIECE) == 0 else 1

    @lazy
    def weight_bytes(self) -> int:
        """Bytes of packed weights in shared memory."""
        return self.all_pieces * PIECE * self.filters * self.operands.scalar_bytes

    @lazy
    def stage_bytes(self) -> int:
        """Bytes of a tile of what is read, whose rows are apart by other banks."""
        size = self.operands.scalar_bytes
        rows, row = (
            (self.filters, TILE * size)
            if self.transposed
            else (self.all_pieces, TILE * PIECE * size)
        )
        apart = 32 if size == 4 else 16
        return rows * (round_up(row - apart, BANKS_BYTES) + apart)

    @lazy
    def shared_bytes(self) -> int:
        return self.weight_bytes + 2 * self.stage_bytes

    def blocks_per_sm(self, gpu: Gpu) -> int:
        fitting = (
            blocks
            for blocks in range(MOST_BLOCKS_PER_SM, 0, -1)
            if self.shared_bytes <= gpu.shared_budget(blocks)
        )
        return next(fitting, 0)

    def image_cycles(self, gpu: Gpu) -> float:
        """The estimated cycles of one SM for an image."""
        return self._computed(gpu) / self.problem.batch

    def cycles(self, gpu: Gpu) -> float:
        """The estimated cycles of all images."""
        return self._computed(gpu) / gpu.sm_count + LAUNCH_CYCLES

    def _computed(self, gpu: Gpu) -> float:
        """The estimated cycles of one SM for all images."""
        problem, operands = self.problem, self.operands
        elements = prod(problem.input_shape) + prod(problem.output_shape)
        tiles = problem.batch * ceil_div(self.positions, TILE)
        products = tiles * TILE * self.filters * self.all_pieces * PIECE
        kind = "tf32" if operands.scalar_bytes == 4 else "bfloat16"
        rate = MMA_SHARE * gpus.rates(gpu).mma[kind]
        bytes_ = elements * operands.scalar_bytes
        return tiles * TILE_CYCLES + limits.together(bytes_ / SM_BYTES, products / rate)


def layer_of(problem: Problem, operands: Operands, gpu: Gpu, is_reversed: bool) -> Layer:
    """The layer of a forward pass or, if ``is_reversed``, of an input gradient.

    Raises:
        Declined: the kernel cannot compute the layer.
    """
    block.check(gpu)
    channels = (problem.in_channels, problem.out_channels)
    limits.check(operands, problem.groups, channels, *limits.volume_sizes(problem))
    if problem.depth is None:
        raise Declined("patches of images")
    if limits.parts(operands) > 1:
        raise Declined("patches in full float32")
    _check_layout(problem, operands)
    if problem.groups > 1 or any(
        axis.stride != axis.kernel_size or axis.dilation > 1 or axis.before or axis.after
        for axis in problem.axes
    ):
        raise Declined("layers other than patch embeddings")
    covered = all(axis.input_size == axis.output_size * axis.stride for axis in problem.axes)
    if is_reversed and not covered:
        raise Declined("patches that do not cover the volume")
    layer = Layer(problem, operands, is_reversed)
    if layer.pieces > MOST_PIECES if is_reversed else problem.out_channels > MOST_FILTERS:
        raise Declined("patches that do not fit registers")
    if layer.blocks_per_sm(gpu) == 0:
        raise Declined("weights of patches that do not fit shared memory")
    return layer


def _check_layout(problem: Problem, operands: Operands) -> None:
    """Raises Declined if pieces or filters do not begin where they can be copied at once."""
    if operands.input_channels_last or operands.output_channels_last or not operands.aligned:
        raise Declined("patches unless tensors are contiguous and aligned")
    if problem.kernel_size[1] % PIECE or problem.input_size[1] % PIECE:
        raise Declined(f"patches whose rows are not whole pieces of {PIECE}")
    if prod(problem.output_shape[2:]) % operands.vector:
        raise Declined("patches whose filters are not whole vectors")


def plan(layer: Layer, gpu: Gpu) -> Plan:
    """The launch that computes the layer."""
    problem, operands = layer.problem, layer.operands
    tiles = problem.batch * ceil_div(layer.positions, TILE)
    if tiles >= limits.MOST_BATCH:
        raise Declined("more than 2^30 tiles of patches")
    blocks = layer.blocks_per_sm(gpu)
    launch = Launch(
        Kernel(SOURCE, "multiply_patches", tuple(_constants(layer, blocks).items())),
        (min(tiles, blocks * gpu.sm_count), 1, 1),
        THREADS,
        layer.shared_bytes,
        ("input", "weight", "bias", "output", problem.batch, *operands.residuals),
    )
    size = "x".join(str(axis.kernel_size) for axis in problem.axes)
    why = f"tensor cores: patches of {size} as a matrix product, {TILE} at a time"
    return Plan((launch,), 0, "hopper", why, cycles=layer.cycles(gpu))


def _constants(layer: Layer, blocks: int) -> dict[str, Constant]:
    problem, operands = layer.problem, layer.operands
    names = ("out", "in", "depth", "height", "width")
    depth, height, width = problem.axes
    return {
        "Scalar": operands.scalar,
        "transposed": layer.transposed,
        "channels": problem.in_channels,
        "filters": problem.out_channels,
        "depth": depth.input_size,
        "height": height.input_size,
        "width": width.input_size,
        "patches_deep": depth.output_size,
        "patches_down": height.output_size,
        "patches_across": width.output_size,
        "kernel_depth": depth.kernel_size,
        "kernel_height": height.kernel_size,
        "kernel_width": width.kernel_size,
        **{
            f"weight_stride_{name}": stride
            for name, stride in zip(names, operands.weight_strides, strict=True)
        },
        "copied_patches": layer.copied_patches,
        "blocks_per_sm": blocks,
        "shared_bytes": layer.shared_bytes,
        **epilogue_constants(operands.epilogue),
    }
