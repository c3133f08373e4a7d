"""Plans weight gradients of few input channels with ``collect.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    weight_grad_constants,
)
from fastconv.kernels.hopper.block import OUTPUTS
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.limits import (
    FLUSH_ADDITIONS,
    FLUSH_PRODUCTS,
    MOST_REDUCE_BLOCKS,
    REDUCE_THREADS,
    WORKSPACE_BYTES,
)
from fastconv.problem import Problem

PIXELS = 64  # of a strip
MOST_COLUMNS = {1: 256, 2: 144}  # of all products, by parts: a thread's sums have to fit registers
MOST_NEW_WORDS = 24  # registers of a thread for the input's next rows
# Split numbers' sums are added up after so many products: see ``weight_grad``.
UNIT_STEPS = {1: 8, 2: 4}

# Estimated cycles of one processor.
LOAD_BYTES = 7.0  # of the output's gradient, a cycle: 32 bytes of each channel at a time
INPUT_CYCLES = 3.0  # to load a vector of the input
STEP_CYCLES = 300.0
ITEM_CYCLES = 4000.0
NARROW_CYCLES = 8.0  # of a product


@dataclass(frozen=True)
class Collect:
    """How blocks walk through the output's gradient."""

    problem: Problem
    operands: Operands

    @property
    def parts(self) -> int:
        return limits.parts(self.operands)

    @property
    def product_columns(self) -> int:
        return round_up(self.problem.kernel_size[1] * self.problem.in_channels, 8)

    @property
    def columns(self) -> int:
        """Of all kernel rows."""
        return self.problem.kernel_size[0] * self.product_columns

    @property
    def warpgroups(self) -> int:
        return min(2, ceil_div(self.problem.out_channels, OUTPUTS))

    @property
    def output_blocks(self) -> int:
        return ceil_div(self.problem.out_channels, self.warpgroups * OUTPUTS)

    @property
    def steps(self) -> int:
        """Products of a strip's row."""
        return PIXELS // (2 * self.operands.vector)

    @property
    def unit_steps(self) -> int:
        return min(UNIT_STEPS[self.parts], self.steps)

    @property
    def pair_loads(self) -> bool:
        """Whether two neighbouring pixels of the output's gradient are loaded at once."""
        operands = self.operands
        width = self.problem.output_size[1]
        return not operands.output_channels_last and operands.widest_vector(width) > 1

    @property
    def row_step(self) -> int:
        return limits.row_step(self.problem)

    @property
    def new_rows(self) -> int:
        return min(limits.row_advance(self.problem), self.problem.kernel_size[0])

    @property
    def row_tasks(self) -> int:
        """Vectors of an input row that a thread loads."""
        return ceil_div(2 * self.steps * self.product_columns, 128 * self.warpgroups)

    @property
    def shared_bytes(self) -> int:
        rows = self.problem.kernel_size[0] + self.new_rows
        return rows * self.parts * 2 * self.steps * (self.product_columns | 1) * 16

    @property
    def strips(self) -> int:
        return ceil_div(self.problem.output_size[1], PIXELS)

    @property
    def walk_rows(self) -> int:
        return ceil_div(self.problem.output_size[0], self.row_step)

    @property
    def block_bytes(self) -> int:
        """Of the workspace."""
        channels = self.warpgroups * OUTPUTS
        return 4 * channels * (self.columns + self.operands.bias_grad)

    def workers(self, gpu: Gpu) -> int:
        """Blocks that share the pixels: all that there is room for at once."""
        most = WORKSPACE_BYTES // (self.block_bytes * self.output_blocks)
        room = gpu.processors * (2 // self.warpgroups) // self.output_blocks
        return max(min(most, room), 1)

    def band_rows(self, gpu: Gpu) -> int:
        """Output rows of a walk: so many that all blocks have equally much to do."""
        walks = self.problem.batch * self.row_step * self.strips
        start = ITEM_CYCLES / self.step_cycles
        return limits.band_rows(walks, self.walk_rows, self.workers(gpu), start)

    @property
    def step_cycles(self) -> float:
        """What a block takes for a row of a strip if it has a processor to itself."""
        height = self.problem.kernel_size[0]
        product = self.product_columns / 2 + (NARROW_CYCLES if self.product_columns < 48 else 0)
        products = self.steps * height * (3 if self.parts == 2 else 1) * product
        channels = min(self.problem.out_channels, self.warpgroups * OUTPUTS)
        inputs = 2 * self.steps * self.product_columns * self.new_rows * self.operands.vector / 4
        return STEP_CYCLES + limits.together(
            self.warpgroups * products,
            PIXELS * channels * self.operands.scalar_bytes / LOAD_BYTES,
            inputs * INPUT_CYCLES,
        )

    def cycles(self, gpu: Gpu) -> float:
        """What all of it takes, about."""
        walks = self.problem.batch * self.row_step * self.strips
        rows = self.band_rows(gpu)
        rounds = ceil_div(walks * ceil_div(self.walk_rows, rows), self.workers(gpu))
        blocks = ceil_div(self.workers(gpu) * self.output_blocks, gpu.processors)
        return rounds * blocks * (rows * self.step_cycles + ITEM_CYCLES)


def collect_of(problem: Problem, operands: Operands, gpu: Gpu) -> Collect:
    """How the gradient is computed so.

    Raises:
        Declined: it cannot be.
    """
    if problem.groups > 1:
        raise Declined(f"{problem.groups} groups")
    collect = Collect(problem, operands)
    if collect.columns > MOST_COLUMNS[collect.parts]:
        raise Declined(f"{collect.columns} columns of taps and input channels")
    if operands.scalar_bytes == 2 and not collect.pair_loads:
        raise Declined("single 16-bit elements of the output's gradient")
    if collect.row_tasks * collect.new_rows * operands.vector > MOST_NEW_WORDS:
        raise Declined("input rows of too many elements")
    if collect.shared_bytes * (2 // collect.warpgroups) > gpu.shared_bytes_per_block - 1024:
        raise Declined("input rows that do not fit shared memory")
    if collect.output_blocks * collect.block_bytes > WORKSPACE_BYTES:
        raise Declined("sums that do not fit the workspace")
    return collect


def plan(collect: Collect, gpu: Gpu) -> Plan:
    """The launches that compute the gradient."""
    problem = collect.problem
    workers, band_rows = collect.workers(gpu), collect.band_rows(gpu)
    constants = tuple(_constants(collect, band_rows).items())
    items = problem.batch * collect.row_step * ceil_div(collect.walk_rows, band_rows)
    if items * collect.strips >= 2**30:
        raise Declined("more than 2^30 strips")
    slots = collect.output_blocks * collect.block_bytes // 16
    launches = (
        Launch(
            Kernel("hopper/wgrad_few_inputs/kernel.cuh", "collect", constants),
            (workers * collect.output_blocks, 1, 1),
            128 * collect.warpgroups,
            collect.shared_bytes,
            ("grad_output", "input", "scratch", workers, problem.batch),
        ),
        Launch(
            Kernel("hopper/wgrad_few_inputs/kernel.cuh", "reduce", constants),
            (min(ceil_div(slots, REDUCE_THREADS), MOST_REDUCE_BLOCKS), 1, 1),
            REDUCE_THREADS,
            0,
            ("scratch", "output", "bias_grad", workers),
        ),
    )
    why = (
        f"tensor cores: {problem.kernel_size[0]} products of {collect.product_columns} columns, "
        f"all taps and input channels; {band_rows} rows of {PIXELS} pixels at a time"
    )
    scratch = workers * collect.output_blocks * collect.block_bytes
    return Plan(launches, scratch, "hopper", why)


def _constants(collect: Collect, band_rows: int) -> dict[str, Constant]:
    units = collect.steps // collect.unit_steps
    split = collect.parts == 2
    return {
        **weight_grad_constants(collect.problem, collect.operands),
        "parts": collect.parts,
        "warpgroups": collect.warpgroups,
        "pair_loads": collect.pair_loads,
        "unit_steps": collect.unit_steps,
        "band_rows": band_rows,
        "flush_steps": max(
            1, FLUSH_ADDITIONS // units if split else FLUSH_PRODUCTS // collect.steps
        ),
        "shared_bytes": collect.shared_bytes,
    }
