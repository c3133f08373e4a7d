"""Plans of any problem keep to what the kernels and the GPU allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastconv.backends import cuda
from fastconv.kernels import planner
from fastconv.kernels.family import Declined, Gpu, Launch, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.implicit_gemm_nhwc import plan as implicit_gemm_nhwc
from fastconv.kernels.hopper.layers import Layer, forward_ways
from fastconv.kernels.planner import Planner
from fastconv.kernels.planning import launches
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING
from legality import assert_legal
from planner_cases import (
    A100,
    MODES,
    PASSES,
    TENSOR_CORE_MODES,
    WORKLOADS,
    make_operands,
    make_problem,
    planned_once,
)


@st.composite
def _problems(draw: st.DrawFn) -> Problem:
    """Problems of any size, as nothing is computed; the tensor-core kernels accept most of them."""

    def pair(values: st.SearchStrategy[Any]) -> tuple[Any, Any]:
        return draw(values), draw(values)

    kernel = pair(st.integers(1, 7) | st.integers(8, 40))
    stride = pair(st.just(1) | st.integers(1, 6))
    dilation = pair(st.just(1) | st.integers(1, 12))
    padding = pair(st.tuples(st.integers(0, 20), st.integers(0, 20)))
    size = tuple(
        max(1, step * (taps - 1) + 1 - sum(sides)) + draw(st.integers(0, 90) | st.integers(0, 600))
        for step, taps, sides in zip(dilation, kernel, padding, strict=True)
    )
    groups = draw(st.sampled_from([1, 1, 1, 2, 5, 32]))
    depth, multiplier = pair(st.integers(8, 130) | st.integers(1, 1500))
    batch = draw(st.integers(1, 4) | st.integers(1, 10**5))
    # Keeps tensors below terabytes.
    batch = min(batch, 2**36 // (groups * multiplier * size[0] * size[1]) + 1)
    return Problem.of(
        (batch, groups * depth, *size),
        (groups * multiplier, depth, *kernel),
        stride,
        (*padding[0], *padding[1]),
        dilation,
        groups,
    )


GPUS = [
    H200,
    replace(H200, sm_count=1),
    replace(H200, sm_count=4, shared_bytes_per_block=90 * 1024),
    A100,
]


def _check(
    plans: tuple[Planner, ...],
    problem: Problem,
    mode: str,
    formats: tuple[bool, bool],
    aligned: bool,
    gpu: Gpu,
) -> None:
    operands = make_operands(problem, mode, *formats, aligned)
    for plan in plans:
        planned = plan(problem, operands, gpu)
        for launch in planned.launches:
            assert launch.shared_bytes <= gpu.shared_bytes_per_block
            assert all(1 <= side < 2**31 for side in launch.grid)
            assert max(launch.grid[1:]) < 2**16
        if planned.family == "hopper" and plan in PASSES:
            assert_legal(planned, gpu)


any_geometry = given(
    problem=_problems(),
    mode=st.sampled_from([*MODES, *TENSOR_CORE_MODES, "tf32"]),
    formats=st.tuples(st.booleans(), st.booleans()),
    aligned=st.booleans(),
    gpu=st.sampled_from(GPUS),
)


@settings(max_examples=120)
@any_geometry
def test_any_geometry_has_a_legal_plan(**case: Any) -> None:
    _check(PASSES, **case)
    with mock.patch.object(halo, "SCALED_FP16_CYCLES", 0.0):  # float16 for small images, too
        _check(PASSES, **case)


@settings(max_examples=100)
@example(
    problem=make_problem((8, 64, 32, 32), (128, 64, 1, 1)),
    mode="ieee",
    formats=(False, False),
    aligned=True,
    gpu=A100,
)
@any_geometry
def test_any_weight_gradient_has_a_legal_plan(**case: Any) -> None:
    _check((planner.weight_grad,), **case)


@pytest.mark.parametrize("plan", PASSES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
def test_plans_of_the_suites_are_legal(mode: str, channels_last: bool, plan: Planner) -> None:
    for workload in WORKLOADS:
        planned = planned_once(plan, workload, mode, channels_last)
        if planned.family == "hopper":
            assert_legal(planned, H200)


# --- 32-bit numbers -------------------------------------------------------------------------------


def test_a_block_counts_on_from_its_last_tile() -> None:
    """A block's next tile is as many tiles on as there are blocks: all must be below 2^31."""
    rows, columns = 113, 127  # as many residues, of which 149640 times is 8 less than 2^31

    def planned(row_tiles: int) -> Plan:
        images = row_tiles * 256
        problem = Problem.of(
            (images, 8, rows, columns), (64, 8, 1, 1), (rows, columns), (0,) * 4, (1, 1), 1
        )
        operands = make_operands(problem, "bfloat16", channels_last=True)
        layer = implicit_gemm_nhwc.layer_of(problem, operands, H200, transposed=True)
        tile = next(
            tile for tile in implicit_gemm_nhwc.tiles_of(layer, H200)
            if tile.rows == 256 and tile.column_tiles == 1
        )  # fmt: skip
        assert tile.tiles(images) == row_tiles * rows * columns
        return implicit_gemm_nhwc.plan(tile, H200)

    assert planned(149639).launches
    with pytest.raises(Declined, match="positions, 2\\^31 and more"):
        planned(149640)


def test_a_thread_counts_on_from_its_last_packed_vector() -> None:
    """A thread's next vector is as many vectors on as there are threads."""

    def packed(vectors: int) -> tuple[Launch, ...]:
        problem = FOUNDING[0].problem
        layer = Layer.of(problem, make_operands(problem))
        one = launches.TiledLayer(
            layer, "hopper/halo/kernel.cuh", {}, 1, 1, 0, 16 * vectors, 64, 64
        )
        return launches.launches([one], None)[0]

    most = 2**31 - launches.MOST_PACK_BLOCKS * launches.PACK_THREADS
    assert packed(most - 1)
    with pytest.raises(Declined, match="bytes of packed weights"):
        packed(most)


def test_exponents_are_added_up_in_32_bits() -> None:
    """Scaled fp16 sums the exponents of an input channel's weights in 32 bits."""
    for taps, fits in ((2056, True), (2057, False)):
        problem = Problem.of((1, 16, taps, 64), (4096, 16, taps, 1), (1, 1), (0,) * 4, (1, 1), 1)
        assert (255 * 4096 * taps < 2**31) == fits
        ways = forward_ways(problem, make_operands(problem, "tf32"))
        assert any(layer.scaled_fp16 for way in ways for layer in way) == fits


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_strides_of_axes_of_one_element(memory_format: torch.memory_format) -> None:
    """PyTorch leaves such strides as they are, even beyond 32 bits."""
    input = torch.empty(2, 8, 5, 6)
    weight = torch.empty(1, 8, 3, 3).contiguous(memory_format=memory_format)
    odd = weight.as_strided(weight.shape, (2**40, *weight.stride()[1:]))
    assert odd.is_contiguous(memory_format=memory_format)
    problem = Problem.of(input.shape, odd.shape, (1, 1), (0,) * 4, (1, 1), 1)
    need = cuda.need(planner.forward, problem, input, odd, torch.empty(problem.output_shape), None)
    assert need is not None
    plan = planner.forward(problem, cuda.operands_for(need), H200)
    for launch in plan.launches:
        for name, value in launch.kernel.constants:
            assert not isinstance(value, int) or -(2**31) <= value < 2**31, name
