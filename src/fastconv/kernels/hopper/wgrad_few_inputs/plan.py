"""Plans weight gradients of few input channels with the wgrad_few_inputs kernel."""

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
    FLUSH_MMAS,
    MOST_REDUCE_BLOCKS,
    REDUCE_THREADS,
    WORKSPACE_BYTES,
)
from fastconv.problem import Problem

PIXELS = 64  # pixels of a strip
# The N of all kernel rows, by parts: a thread's accumulators must fit registers.
MOST_MMA_COLUMNS = {1: 256, 2: 144}
MOST_NEW_WORDS = 24  # registers of a thread for the input's next rows
# MMAs that are accumulated before 3xTF32 adds them to totals, by parts; without 3xTF32, MMAs that
# are issued at once.
UNIT_STEPS = {1: 8, 2: 4}

# Estimated cycles of one SM.
LOAD_BYTES = 7.0  # bytes of grad_output a cycle: 32 bytes of each channel at a time
INPUT_CYCLES = 3.0  # loading a vector of the input
STEP_CYCLES = 300.0
ITEM_CYCLES = 4000.0
NARROW_CYCLES = 8.0  # extra cycles of a wgmma of small N


@dataclass(frozen=True)
class Layer:
    """A weight gradient of few input channels, and how blocks walk through grad_output."""

    problem: Problem
    operands: Operands

    @property
    def parts(self) -> int:
        return limits.parts(self.operands)

    @property
    def mma_columns(self) -> int:
        return round_up(self.problem.kernel_size[1] * self.problem.in_channels, 8)

    @property
    def columns(self) -> int:
        """The N of all kernel rows."""
        return self.problem.kernel_size[0] * self.mma_columns

    @property
    def warpgroups(self) -> int:
        return min(2, ceil_div(self.problem.out_channels, OUTPUTS))

    @property
    def output_blocks(self) -> int:
        return ceil_div(self.problem.out_channels, self.warpgroups * OUTPUTS)

    @property
    def steps(self) -> int:
        """MMAs of a strip's row, for one kernel row."""
        return PIXELS // (2 * self.operands.vector)

    @property
    def unit_steps(self) -> int:
        return min(UNIT_STEPS[self.parts], self.steps)

    @property
    def pair_loads(self) -> bool:
        """Whether two neighbouring pixels of grad_output are loaded at once."""
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
        return ceil_div(2 * self.steps * self.mma_columns, 128 * self.warpgroups)

    @property
    def shared_bytes(self) -> int:
        rows = self.problem.kernel_size[0] + self.new_rows
        return rows * self.parts * 2 * self.steps * (self.mma_columns | 1) * 16

    @property
    def strips(self) -> int:
        return ceil_div(self.problem.output_size[1], PIXELS)

    @property
    def walk_rows(self) -> int:
        return ceil_div(self.problem.output_size[0], self.row_step)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's accumulators in the workspace."""
        channels = self.warpgroups * OUTPUTS
        return 4 * channels * (self.columns + self.operands.bias_grad)

    def workers(self, gpu: Gpu) -> int:
        """Blocks that share the pixels: all that run at once."""
        most = WORKSPACE_BYTES // (self.block_bytes * self.output_blocks)
        room = gpu.sm_count * (2 // self.warpgroups) // self.output_blocks
        return max(min(most, room), 1)

    def band_rows(self, gpu: Gpu) -> int:
        """Output rows of a walk: so many that all blocks have about equally much to do."""
        walks = self.problem.batch * self.row_step * self.strips
        start = ITEM_CYCLES / self.step_cycles
        return limits.band_rows(walks, self.walk_rows, self.workers(gpu), start)

    @property
    def step_cycles(self) -> float:
        """Cycles of a strip's row, if a block has an SM to itself."""
        height = self.problem.kernel_size[0]
        mma = self.mma_columns / 2 + (NARROW_CYCLES if self.mma_columns < 48 else 0)
        mmas = self.steps * height * (3 if self.parts == 2 else 1) * mma
        channels = min(self.problem.out_channels, self.warpgroups * OUTPUTS)
        inputs = 2 * self.steps * self.mma_columns * self.new_rows * self.operands.vector / 4
        return STEP_CYCLES + limits.together(
            self.warpgroups * mmas,
            PIXELS * channels * self.operands.scalar_bytes / LOAD_BYTES,
            inputs * INPUT_CYCLES,
        )

    def cycles(self, gpu: Gpu) -> float:
        """Estimated cycles of the whole gradient."""
        walks = self.problem.batch * self.row_step * self.strips
        rows = self.band_rows(gpu)
        rounds = ceil_div(walks * ceil_div(self.walk_rows, rows), self.workers(gpu))
        blocks = ceil_div(self.workers(gpu) * self.output_blocks, gpu.sm_count)
        return rounds * blocks * (rows * self.step_cycles + ITEM_CYCLES)


def layer_of(problem: Problem, operands: Operands, gpu: Gpu) -> Layer:
    """The layer of a weight gradient.

    Raises:
        Declined: this kernel cannot compute it.
    """
    if problem.groups > 1:
        raise Declined(f"{problem.groups} groups")
    layer = Layer(problem, operands)
    if layer.columns > MOST_MMA_COLUMNS[layer.parts]:
        raise Declined(f"{layer.columns} columns of taps and input channels")
    if operands.scalar_bytes == 2 and not layer.pair_loads:
        raise Declined("single 16-bit elements of the output's gradient")
    if layer.row_tasks * layer.new_rows * operands.vector > MOST_NEW_WORDS:
        raise Declined("input rows of too many elements")
    if layer.shared_bytes * (2 // layer.warpgroups) > gpu.shared_bytes_per_block - 1024:
        raise Declined("input rows that do not fit shared memory")
    if layer.output_blocks * layer.block_bytes > WORKSPACE_BYTES:
        raise Declined("accumulators that do not fit the workspace")
    return layer


def plan(layer: Layer, gpu: Gpu) -> Plan:
    """The launches that compute the gradient."""
    problem = layer.problem
    workers, band_rows = layer.workers(gpu), layer.band_rows(gpu)
    constants = tuple(_constants(layer, band_rows).items())
    items = problem.batch * layer.row_step * ceil_div(layer.walk_rows, band_rows)
    if items * layer.strips >= 2**30:
        raise Declined("more than 2^30 strips")
    slots = layer.output_blocks * layer.block_bytes // 16
    launches = (
        Launch(
            Kernel("hopper/wgrad_few_inputs/kernel.cuh", "wgrad_few_inputs", constants),
            (workers * layer.output_blocks, 1, 1),
            128 * layer.warpgroups,
            layer.shared_bytes,
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
        f"tensor cores: {problem.kernel_size[0]} MMAs of {layer.mma_columns} columns, "
        f"all taps and input channels; {band_rows} rows of {PIXELS} pixels at a time"
    )
    scratch = workers * layer.output_blocks * layer.block_bytes
    return Plan(launches, scratch, "hopper", why)


def _constants(layer: Layer, band_rows: int) -> dict[str, Constant]:
    units = layer.steps // layer.unit_steps
    split = layer.parts == 2
    return {
        **weight_grad_constants(layer.problem, layer.operands),
        "parts": layer.parts,
        "warpgroups": layer.warpgroups,
        "pair_loads": layer.pair_loads,
        "unit_steps": layer.unit_steps,
        "band_rows": band_rows,
        "flush_steps": max(1, FLUSH_ADDITIONS // units if split else FLUSH_MMAS // layer.steps),
        "shared_bytes": layer.shared_bytes,
    }
