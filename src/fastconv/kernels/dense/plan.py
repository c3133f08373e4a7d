"""Plans layers whose kernel covers the whole image: matrix products of few numbers.

A result has the same bits in every batch: what decides how its products are added up, the tile and
the slices of k, depends on the layer, and not on the number of images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.direct import limits
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
from fastconv.problem import Problem

FAMILY = "dense"
SOURCE = "dense/kernel.cuh"

# The most numbers of a weight. Plain CUDA cores multiply large batches of larger ones more slowly
# than tensor cores do: of one pixel in 16 bits, of one pixel, and of larger images, whose other
# kernels copy them, or compute one output of a tile.
MOST_NARROW, MOST_OF_A_PIXEL, MOST_OF_AN_IMAGE = 2**17, 2**19, 2**22
MOST_IMAGES = 1024  # of a weight gradient, which has one block for a tile and all images
USUAL_IMAGES = 64  # for which tiles of forward passes and input gradients are chosen

# Hopper's implicit GEMM multiplies so few k in one step, and so many columns in fewer blocks, where
# it needs no launch before: in 16 bits, and in forward passes in TF32.
ONE_STEP, MANY_COLUMNS, TENSOR_VECTOR = 64, 1024, 8

OWN = 4  # rows, columns and k of a thread
MOST_STEPS = 4  # times four k of a thread, in a stage
SHAPES = ((8, 8), (8, 16), (16, 16), (16, 32), (32, 32))  # rows and columns of tiles
MOST_THREADS = 256
MOST_SLICES = 32
MOST_STAGES = 6
STAGES_BYTES = 104 * 1024  # of many blocks, so that two have room on an SM of Hopper

# Estimates, fitted to 780 measured tiles on an H200, in cycles of 1.755 GHz.
START_CYCLES = 2800.0  # a launch, and the first access to memory
BLOCK_CYCLES = 250.0
# Cycles for each that the multiply-adds alone take: shared memory binds, for which the shapes have
# 2, 3, 4, 6 and 8 products for each number that is read.
LOSSES = dict(zip(SHAPES, (5.2, 4.3, 3.6, 3.3, 3.1), strict=True))


@dataclass(frozen=True)
class Matrix:
    """A factor of the product: its tensor, its rows or columns, and where neighbours lie."""

    tensor: str
    size: int
    along_k: bool  # whether neighbouring numbers have neighbouring k


@dataclass(frozen=True)
class Product:
    """``result[row][column]``: the sum over k of ``left(row, k) * right(column, k)``."""

    left: Matrix
    right: Matrix
    ks: int
    operands: Operands
    bias: str
    bias_count: int  # numbers of the bias, over and over
    bias_run: int = 1  # neighbouring columns that have the same of these
    gives_weight: bool = False

    @property
    def usual(self) -> Product:
        """The product of the batch that tiles are chosen for."""
        if self.gives_weight:
            return self
        return replace(self, left=replace(self.left, size=USUAL_IMAGES))


@dataclass(frozen=True)
class Tile:
    """What a block computes, ``rows`` by ``columns``, and the slices of its threads."""

    product: Product
    rows: int
    columns: int
    slices: int

    @property
    def threads(self) -> int:
        return self.rows * self.columns // OWN**2 * self.slices

    @property
    def steps(self) -> int:
        """How often a thread takes four k of a stage."""
        return min(MOST_STEPS, ceil_div(self.product.ks, 4 * self.slices))

    @property
    def stage_k(self) -> int:
        return 4 * self.slices * self.steps

    @property
    def left_pitch(self) -> int:
        """Elements from a line of the left matrix in shared memory to the next."""
        return self._pitch(self.product.left, self.rows)

    @property
    def right_pitch(self) -> int:
        return self._pitch(self.product.right, self.columns)

    def _pitch(self, matrix: Matrix, size: int) -> int:
        """The pitch of lines, which keeps lanes that read at the same time in different banks.

        These are up to eight lines of k, with the four k of one slice or more, or four k of two
        slices, in lines of rows.
        """
        length = self.stage_k if matrix.along_k else size
        bytes_ = self.product.operands.scalar_bytes
        several_slices = matrix.along_k and size < SHAPES[-1][0]
        return round_up(length, 8) + (8 if bytes_ == 2 or (bytes_ == 4 and several_slices) else 4)

    @property
    def stage_bytes(self) -> int:
        left, right = self.product.left, self.product.right
        elements = (self.rows if left.along_k else self.stage_k) * self.left_pitch
        elements += (self.columns if right.along_k else self.stage_k) * self.right_pitch
        return elements * self.product.operands.scalar_bytes

    @property
    def slices_bytes(self) -> int:
        """Shared memory for what all slices leave."""
        operands = self.product.operands
        return self.slices * self.rows * (self.columns + operands.bias_grad) * operands.sum_bytes

    def stages(self, gpu: Gpu) -> int:
        """Stages that fit, of which one is free; fewer than two are none."""
        few = self.blocks <= gpu.sm_count
        room = gpu.shared_bytes_per_block if few else min(STAGES_BYTES, gpu.shared_bytes_per_block)
        needed = ceil_div(self.product.ks, self.stage_k) + 1
        return min(room // self.stage_bytes, MOST_STAGES, needed)

    def fits(self, gpu: Gpu) -> bool:
        """Whether a block has room, however many there are: the batch must not decide."""
        room = min(STAGES_BYTES, gpu.shared_bytes_per_block)
        return max(2 * self.stage_bytes, self.slices_bytes) <= room

    @property
    def blocks(self) -> int:
        rows = ceil_div(self.product.left.size, self.rows)
        return rows * ceil_div(self.product.right.size, self.columns)

    def cycles(self, gpu: Gpu) -> float:
        """The estimated cycles, with blocks that fill all SMs evenly."""
        multiplied = self.rows * self.columns * self.product.ks / gpus.rates(gpu).float32
        of_sm = max(1.0, self.blocks / gpu.sm_count)
        return START_CYCLES + of_sm * (BLOCK_CYCLES + LOSSES[self.rows, self.columns] * multiplied)


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: this family does not take the layer.
    """
    numbers = _numbers(problem, operands, operands.input_channels_last)
    left = Matrix("input", problem.batch, along_k=True)
    right = Matrix("weight", problem.out_channels, along_k=True)
    return _plan(Product(left, right, numbers, operands, "bias", problem.out_channels), gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: tensor ``input`` is the output's gradient, ``output`` the result.

    Raises:
        Declined: this family does not take the layer.
    """
    last, is_image = operands.output_channels_last, prod(problem.input_size) > 1
    # Other kernels compute these from the one pixel of each tile that is not padding.
    narrow = MOST_OF_AN_IMAGE if is_image else MOST_NARROW
    numbers = _numbers(problem, operands, last, narrow)
    left = Matrix("input", problem.batch, along_k=True)
    right = Matrix("weight", numbers, along_k=False)
    run = 1 if last else numbers // problem.in_channels
    biases = ("bias", problem.in_channels, run)
    return _plan(Product(left, right, problem.out_channels, operands, *biases), gpu)


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output``, the gradient.

    With ``operands.bias_grad``, tensor ``bias_grad`` is filled in the same launch.

    Raises:
        Declined: this family does not take the layer.
    """
    numbers = _numbers(problem, operands, operands.input_channels_last)
    if problem.batch > MOST_IMAGES:
        raise Declined(f"weight gradients of {problem.batch} images with one output position")
    left = Matrix("grad_output", problem.out_channels, along_k=False)
    right = Matrix("input", numbers, along_k=False)
    biases = ("bias_grad", problem.out_channels)
    product = Product(left, right, problem.batch, operands, *biases, gives_weight=True)
    return _plan(product, gpu)


def _numbers(
    problem: Problem, operands: Operands, channels_last: bool, most_narrow: int = MOST_NARROW
) -> int:
    """The numbers of an image, which lie in the order of those of a weight's output channel.

    A weight of 16 bits has at most ``most_narrow``.

    Raises:
        Declined: there are several output positions or groups, the orders differ, or the weight is
            too large.
    """
    problem = limits.checked(problem)
    if problem.depth is not None or problem.groups > 1:
        raise Declined("volumes or several groups")
    whole = (problem.input_size, (1, 1), (0, 0, 0, 0))
    if (problem.kernel_size, problem.dilation, tuple(problem.padding)) != whole:
        raise Declined("several output positions, or padding")
    sizes, strides = problem.weight_shape, operands.weight_strides
    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    step = 1
    for dim in reversed(order):
        if sizes[dim] > 1 and strides[dim] != step:
            raise Declined("weights and images whose numbers have different orders")
        step *= sizes[dim]
    pixels = prod(problem.input_size)
    most = MOST_OF_AN_IMAGE if pixels > 1 else MOST_OF_A_PIXEL
    if operands.scalar_bytes == 2:
        most = min(most, most_narrow)
    if step > most:
        raise Declined(f"one output position and {step} weights")
    return step // problem.out_channels


def _tensor_cores_win(product: Product, gpu: Gpu) -> bool:
    """Whether Hopper's tensor cores are faster, as measured."""
    operands, columns = product.operands, product.right.size
    one_launch = operands.scalar_bytes == 2 or (
        operands.precision == "tf32" and product.right.along_k
    )
    return (
        gpus.number(gpu) == gpus.number(gpus.H200)
        and not product.gives_weight
        and operands.aligned
        and one_launch
        and product.ks <= ONE_STEP
        and columns >= MANY_COLUMNS
        and product.ks % TENSOR_VECTOR == columns % TENSOR_VECTOR == 0
    )


def _plan(product: Product, gpu: Gpu) -> Plan:
    if _tensor_cores_win(product, gpu):
        raise Declined(f"{product.ks} times {product.right.size} numbers, for tensor cores")
    tile = min(tiles_of(product.usual, gpu), key=lambda one: one.cycles(gpu))
    return plan(replace(tile, product=product), gpu)


def plan(tile: Tile, gpu: Gpu) -> Plan:
    """The launch that computes a tile's product.

    Raises:
        Declined: a grid has no room for its blocks.
    """
    if tile.blocks > limits.MOST_BLOCKS:
        raise Declined(f"{tile.blocks} blocks")
    product = tile.product
    stages, operands = tile.stages(gpu), product.operands
    shared_bytes = max(stages * tile.stage_bytes, tile.slices_bytes)
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "Bias": operands.scalar if product.gives_weight else f"const {operands.scalar}",
        "gives_weight": product.gives_weight,
        "sums_bias": operands.bias_grad,
        "left_along_k": product.left.along_k,
        "right_along_k": product.right.along_k,
        "left_vector": _vector(product.left, product),
        "right_vector": _vector(product.right, product),
        "left_pitch": tile.left_pitch,
        "right_pitch": tile.right_pitch,
        "tile_rows": tile.rows,
        "tile_columns": tile.columns,
        "slices": tile.slices,
        "steps": tile.steps,
        "stages": stages,
        "shared_bytes": shared_bytes,
        **epilogue_constants(operands.epilogue),
    }
    launch = Launch(
        Kernel(SOURCE, "dense", tuple(constants.items())),
        (tile.blocks, 1, 1),
        tile.threads,
        shared_bytes,
        (
            *(product.left.tensor, product.right.tensor, product.bias, "output"),
            *(product.left.size, product.right.size, product.ks),
            *(product.bias_run, product.bias_count),
            *operands.residuals,
        ),
        early=gpus.begins_early(gpu),
    )
    why = f"one output position: {product.left.size} by {product.right.size} sums of {product.ks}"
    return Plan((launch,), 0, FAMILY, why, cycles=tile.cycles(gpu))


def tiles_of(product: Product, gpu: Gpu) -> Iterator[Tile]:
    """Tiles of all shapes, with a slice for each four k as far as threads and memory suffice."""
    for rows, columns in SHAPES:
        lanes = rows * columns // OWN**2
        slices, least = min(MOST_THREADS // lanes, MOST_SLICES), max(1, 32 // lanes)
        while slices > least and (
            slices // 2 * 4 >= product.ks or not Tile(product, rows, columns, slices).fits(gpu)
        ):
            slices //= 2
        yield Tile(product, rows, columns, slices)


def _vector(matrix: Matrix, product: Product) -> int:
    """Neighbouring elements that are copied at once."""
    return product.operands.widest_vector(product.ks if matrix.along_k else matrix.size)
