"""Which family computes what, and that its plans keep to what the kernels and the GPU allow."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effort import calls
from fastconv.backends import cuda
from fastconv.kernels import gpus, hopper, planner, tuned
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu, Launch, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.implicit_gemm_nhwc import plan as implicit_gemm_nhwc
from fastconv.kernels.hopper.layers import Layer, forward_ways, input_grad_ways
from fastconv.kernels.planner import Planner
from fastconv.kernels.planning import launches, layers
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING, ODD, REAL, Workload

T4, A100 = gpus.GPUS["sm_75"], gpus.GPUS["sm_80"]

# Scalar, its bytes, precision.
MODES = {
    "tf32": ("float", 4, "tf32"),
    "ieee": ("float", 4, "ieee"),
    "float16": ("fastconv::float16", 2, "ieee"),
    "bfloat16": ("fastconv::bfloat16", 2, "ieee"),
    "float64": ("double", 8, "ieee"),
}
TENSOR_CORE_MODES = [mode for mode in MODES if mode != "float64"]
PASSES = (planner.forward, planner.input_grad)
WORKLOADS = [
    workload.scaled(4) if workload.name == "pointwise" else workload
    for workload in (*FOUNDING, *REAL, *ODD)
    if workload.groups != workload.input[1]
]


def _operands(
    problem: Problem,
    mode: str = "tf32",
    channels_last: bool = False,
    output_channels_last: bool | None = None,
    aligned: bool = True,
) -> Operands:
    if output_channels_last is None:
        output_channels_last = channels_last
    scalar, scalar_bytes, precision = MODES[mode]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    weight = torch.empty(problem.weight_shape, device="meta", memory_format=layout)
    return Operands(
        scalar,
        scalar_bytes,
        channels_last,
        output_channels_last,
        weight.stride(),
        aligned,
        precision,
    )


def _problem(input: tuple[int, ...], weight: tuple[int, ...], **more: Any) -> Problem:
    geometry = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1, **more}
    return Problem.of(input, weight, *geometry.values())


def _is_few_outputs(plan: Plan) -> bool:
    return plan.launches[0].kernel.entry == "few_outputs"


def _gemm(plan: Plan) -> str:
    """Which of the kernels for matrix products it is, or none."""
    entry = plan.launches[-1].kernel.entry
    return entry if entry.startswith("implicit_gemm") else ""


def _layers(plan: Plan) -> list[tuple[Launch, Launch, dict[str, Any]]]:
    """Of tensor cores: what packs a layer's weights, what computes it, and the constants of both.

    A strided input gradient is several layers; what repairs a layer is one more. What finds its
    scales comes before all.
    """
    launches = [launch for launch in plan.launches if launch.kernel.entry != "scale"]
    packs, correlates = launches[::2], launches[1::2]
    return [
        (pack, halo, dict(halo.kernel.constants))
        for pack, halo in zip(packs, correlates, strict=True)
    ]


# --- Who takes what -------------------------------------------------------------------------------

DENSE = _problem((8, 32, 64, 64), (64, 32, 3, 3))


@pytest.mark.parametrize("plan", PASSES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
def test_founding_workloads_run_on_tensor_cores(
    workload: Workload, mode: str, channels_last: bool, plan: Planner
) -> None:
    problem = workload.problem
    planned = plan(problem, _operands(problem, mode, channels_last), H200)
    assert planned.family == "hopper"
    assert planned.why.startswith("tensor cores")


DECLINED: dict[str, tuple[Planner, Problem, str, Gpu, str]] = {
    "older": (planner.forward, DENSE, "tf32", T4, "tensor-core kernels for sm_75"),
    "float64": (planner.forward, DENSE, "float64", H200, "float64"),
    "depthwise": (
        planner.input_grad,
        _problem((8, 32, 64, 64), (32, 1, 3, 3), groups=32, stride=(2, 2), dilation=(3, 3)),
        "bfloat16", H200,
        "groups of 1 to 1 channels, fewer than 8; depthwise does not take strides and dilations",
    ),
    "tiny groups": (
        planner.input_grad, _problem((8, 32, 64, 64), (64, 4, 3, 3), groups=8), "bfloat16", H200,
        "groups of 8 to 4 channels",
    ),
    "many phases": (
        planner.input_grad, _problem((8, 48, 64, 64), (64, 48, 5, 5), stride=(4, 5)), "tf32", H200,
        "input gradients of 20 residues, more than 16",
    ),
    "vast image": (
        planner.forward, _problem((1, 16, 8192, 8192), (64, 16, 3, 3)), "bfloat16", H200,
        r"images of 2\^30 elements",
    ),
    "few channels in": (
        planner.forward, _problem((8, 1, 64, 64), (24, 1, 1, 1)), "bfloat16", H200,
        "so few channels that 2% of the products",
    ),
    "few channels out": (
        planner.forward, _problem((8, 64, 64, 99), (1, 64, 1, 9), dilation=(1, 8)), "tf32", H200,
        "so few channels that 2% of the products",
    ),
    "few channels for three products": (
        planner.forward, _problem((8, 32, 64, 99), (4, 32, 1, 9), dilation=(1, 8)), "ieee", H200,
        "so few channels that 6% of the products",
    ),
    "far apart": (
        planner.forward,
        _problem((1, 32, 8, 40000), (64, 32, 3, 3), dilation=(1, 19000), padding=(1, 1, 0, 0)),
        "tf32", H200, "a halo tile that does not fit",
    ),
    "padding beyond 32 bits": (
        planner.weight_grad,
        _problem((1, 64, 8, 64), (64, 64, 1, 1), stride=(2**26, 1), padding=(2**30, 0, 0, 0)),
        "tf32", H200, r"[0-9]+ rows of padded images and tiles beyond them, 2\^30 and more",
    ),
    "tiles beyond 32 bits": (
        planner.forward,
        _problem((1, 64, 1, 2**22), (64, 64, 1, 3), dilation=(1, 2**20)),
        "tf32", H200, r"[0-9]+ columns of padded images and tiles beyond them, 2\^30 and more",
    ),
    "batch beyond 32 bits": (
        planner.weight_grad, _problem((2**30, 64, 1, 1), (64, 64, 1, 1)), "tf32", H200,
        r"1073741824 images, 2\^30 and more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DECLINED.values(), ids=DECLINED)
def test_the_portable_kernels_take_the_rest(case: tuple[Planner, Problem, str, Gpu, str]) -> None:
    plan, problem, mode, gpu, reason = case
    planned = plan(problem, _operands(problem, mode), gpu)
    assert planned.family == "direct"
    # Why this family, and why not the one before it.
    assert re.match(rf"plain CUDA cores.*; hopper does not take {reason}", planned.why)


FEW_OUTPUTS: dict[str, tuple[Planner, str, str, bool]] = {
    "square3x3": (planner.input_grad, "square3x3", "tf32", True),
    "one input channel": (planner.input_grad, "srcnn9x9", "ieee", True),
    "pointwise gradient": (planner.input_grad, "pointwise", "bfloat16", True),
    # What it stores, it stores slowly.
    "pointwise": (planner.forward, "pointwise", "bfloat16", False),
    "many channels": (planner.input_grad, "dilated5x9", "tf32", False),
}


@pytest.mark.parametrize("case", FEW_OUTPUTS.values(), ids=FEW_OUTPUTS)
def test_few_output_channels_have_a_kernel_of_their_own(
    case: tuple[Planner, str, str, bool],
) -> None:
    plan, name, mode, expected = case
    (problem,) = {
        workload.problem for workload in (*FOUNDING, *REAL, *ODD) if workload.name == name
    }
    assert _is_few_outputs(plan(problem, _operands(problem, mode), H200)) == expected


COLLECTED = {
    "one input channel, which is gathered": ("srcnn9x9", "ieee", False),
    "a network's first layer, which is gathered": ("resnet50_stem", "tf32", False),
    "rows that bulk copies cannot fetch whole, but boxes": ("square3x3", "bfloat16", False),
    "rows that they can": ("square3x3", "tf32", False),
}


@pytest.mark.parametrize("case", COLLECTED.values(), ids=COLLECTED)
def test_few_input_channels_have_a_kernel_of_their_own(case: tuple[str, str, bool]) -> None:
    name, mode, expected = case
    (problem,) = {
        workload.problem for workload in (*FOUNDING, *REAL, *ODD) if workload.name == name
    }
    plan = planner.weight_grad(problem, _operands(problem, mode), H200)
    assert (plan.launches[0].kernel.entry == "wgrad_few_inputs") == expected
    assert plan.scratch_bytes <= 64 << 20


def test_few_input_channels_of_an_odd_batch() -> None:
    """Boxes have pairs of images."""
    (problem,) = (workload.problem for workload in FOUNDING if workload.name == "square3x3")
    plan = planner.weight_grad(replace(problem, batch=15), _operands(problem, "bfloat16"), H200)
    assert plan.launches[0].kernel.entry == "wgrad_few_inputs"


@pytest.mark.parametrize(("gpu", "family"), [(H200, "hopper"), (A100, "ampere"), (T4, "direct")])
def test_weight_gradient_with_that_of_the_bias(gpu: Gpu, family: str) -> None:
    """In the same pass, within the same workspace."""
    operands = replace(_operands(DENSE), bias_grad=True)
    plan = planner.weight_grad(DENSE, operands, gpu)
    weights_alone = planner.weight_grad(DENSE, _operands(DENSE), gpu)
    assert plan.family == family
    assert any("bias_grad" in launch.arguments for launch in plan.launches)
    assert weights_alone.scratch_bytes < plan.scratch_bytes <= 64 << 20


def test_weight_gradients() -> None:
    assert planner.weight_grad(DENSE, _operands(DENSE), H200).family == "hopper"
    assert planner.weight_grad(DENSE, _operands(DENSE), A100).family == "ampere"
    portable = planner.weight_grad(DENSE, _operands(DENSE), T4)
    assert portable.family == "direct"
    assert "; hopper does not take " in portable.why
    assert "; ampere does not take " in portable.why


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("size", [(512, 512), (1, 10**5), (10**5, 64)], ids=str)
@pytest.mark.parametrize("outputs", [128, 4])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("mode", ["tf32", "bfloat16"])
def test_planning_takes_no_time(
    mode: str, kernel: int, outputs: int, size: tuple[int, int], channels_last: bool
) -> None:
    """The first call of a shape waits for it: a quarter of a second at most."""
    pad = kernel // 2
    problem = _problem((4, 64, *size), (outputs, 64, kernel, kernel), padding=(pad,) * 4)
    operands = _operands(problem, mode, channels_last)
    assert calls(lambda: planner.forward(problem, operands, H200)) < 500_000


def test_planning_many_taps_takes_no_time() -> None:
    """There are 4000 ways to cut this weight's gradient into products."""
    problem = _problem((4, 11, 405, 822), (84, 11, 23, 150))
    operands = _operands(problem, "bfloat16")
    assert calls(lambda: planner.weight_grad(problem, operands, H200)) < 500_000


@pytest.mark.parametrize(("gpu", "family"), [(H200, "hopper"), (A100, "ampere"), (T4, "direct")])
def test_large_weights_take_few_launches(gpu: Gpu, family: str) -> None:
    """The workspace grows with the weight, beyond what ordinary ones need."""
    problem = _problem((2, 4096, 8, 8), (2**18, 4096, 1, 1))
    plan = planner.weight_grad(problem, _operands(problem), gpu)
    assert plan.family == family
    assert len(plan.launches) <= 64
    assert plan.scratch_bytes <= 4 * prod(problem.weight_shape) // 16


@pytest.mark.parametrize("gpu", [H200, A100, T4], ids=["hopper", "ampere", "direct"])
@pytest.mark.parametrize("plan", [*PASSES, planner.weight_grad])
def test_the_dilation_of_one_tap_makes_no_difference(plan: Planner, gpu: Gpu) -> None:
    problem = _problem((4, 32, 40, 40), (64, 32, 1, 3), dilation=(5000, 2))
    plain = replace(problem, dilation=(1, 2))
    assert plan(problem, _operands(problem), gpu) == plan(plain, _operands(plain), gpu)


# --- The same bits in any batch -------------------------------------------------------------------

# What decides in which order a sum's terms are added.
ORDER = (
    *("halves", "k_steps", "stage_taps", "stack", "rolling", "parts", "transposed"),
    *("column_sums", "compensated"),
)
FEW_OUTPUTS_ORDER = (
    "unit_steps",
    "parts",
    "transposed",
    "low_products",
    "compensated",
    "vector_loads",
)

GEMM_ORDER = {"implicit_gemm_nhwc": ("transposed",), "implicit_gemm_nchw": ("transposed", "chunk")}


def _order(plan: Plan) -> tuple[Any, ...]:
    if plan.family != "hopper":
        return (plan.family,)
    if _is_few_outputs(plan):
        constants = dict(plan.launches[0].kernel.constants)
        return ("few_outputs", *(constants[name] for name in FEW_OUTPUTS_ORDER))
    if _gemm(plan):
        constants = dict(plan.launches[-1].kernel.constants)
        return (_gemm(plan), *(constants[name] for name in GEMM_ORDER[_gemm(plan)]))
    return tuple(constants[name] for _, _, constants in _layers(plan) for name in ORDER)


@pytest.mark.parametrize("plan", PASSES)
@pytest.mark.parametrize(("third", "mode"), enumerate(["tf32", "ieee", "bfloat16"]))
def test_sums_do_not_depend_on_the_batch(third: int, mode: str, plan: Planner) -> None:
    """Nor on the number of processors. Each mode has a third of the layers."""
    taken = 0
    for workload, channels_last in product(WORKLOADS[third::3], (False, True)):
        operands = _operands(workload.problem, mode, channels_last)
        orders = set()
        for batch, gpu in ((1, H200), (5, replace(H200, processors=78)), (300, H200)):
            planned = plan(workload.with_batch(batch).problem, operands, gpu)
            orders.add(_order(planned))
        assert len(orders) == 1, workload.name
        taken += planned.family == "hopper"
    assert taken > 7


# --- What kernels and GPUs allow ------------------------------------------------------------------

REGISTERS = 168  # of each thread that a block of 384 is launched with


def _assert_legal(plan: Plan, gpu: Gpu) -> None:
    if _is_few_outputs(plan):
        _assert_legal_few_outputs(plan, gpu)
        return
    if _gemm(plan):
        check = {"implicit_gemm_nhwc": _assert_legal_nhwc, "implicit_gemm_nchw": _assert_legal_nchw}
        check[_gemm(plan)](plan, gpu)
        return
    layers = _layers(plan)
    packed = [_legal_packed_bytes(*layer, gpu) for layer in layers]
    if not layers[0][2]["halves"]:
        assert plan.scratch_bytes == max(packed)
        return
    # In the workspace: the repair's weights, the others, a number for each output and input channel
    # of the products, and for each image two, and one for each of its channels.
    (pack, _, first), (_, _, second) = layers
    assert (first["repairs"], second["repairs"], second["halves"]) == (False, True, False)
    assert (second["packed_at"], first["packed_at"], first["tables_at"]) == (
        0, packed[1], sum(packed)
    )  # fmt: skip
    channels, batch = first["table_channels"], pack.arguments[-1]
    columns = first["table_columns"]
    for name in ("tables_at", "table_channels", "table_columns"):
        assert first[name] == second[name]
    assert channels >= first["groups"] * first["group_out"]
    assert columns >= first["groups"] * first["group_in"]
    assert columns // first["groups"] % 16 == first["tables_at"] % 16 == 4 * channels % 16 == 0
    scale = plan.launches[0]
    assert scale.kernel.entry == "scale"
    folded = first["fold_height"] * first["fold_width"]
    inputs = first["groups"] * first["group_in"] // folded
    assert scale.grid == (min(inputs, launches.MOST_PACK_BLOCKS), 1, 1)
    assert pack.grid[0] == min(channels + batch, launches.MOST_PACK_BLOCKS)
    assert plan.scratch_bytes == sum(packed) + 4 * (channels + columns + batch * (columns + 2))


def _legal_packed_bytes(pack: Launch, main: Launch, c: dict[str, Any], gpu: Gpu) -> int:
    """What ``correlate.cuh`` asserts, and what it relies on without a word.

    Returns the bytes of workspace that the layer needs.
    """
    assert pack.kernel.constants == main.kernel.constants
    assert pack.grid[0] in range(1, 2**16)
    assert main.grid[0] in range(1, gpu.processors + 1)
    assert pack.grid[1:] == main.grid[1:] == (1, 1)
    assert main.shared_bytes == c["shared_bytes"] <= gpu.shared_bytes_per_block

    scalar_bytes = 4 if c["Scalar"] == "float" else 2
    vector = 16 // scalar_bytes
    channels_of_vector = 8 if c["halves"] else vector
    weight_parts = 3 if c["halves"] and c["parts"] == 2 else c["parts"]
    assert not c["halves"] or (c["Scalar"] == "float" and not c["in_channels_last"])
    chunks = ceil_div(c["group_in"], 2 * c["k_steps"] * channels_of_vector)
    if c["turns"]:
        assert c["resident"]
        assert c["rolling"] or chunks <= c["input_stages"]
    row_unit = gcd(c["stride_height"], c["dilation_height"])
    row_phases, row_step = c["stride_height"] // row_unit, c["dilation_height"] // row_unit
    column_unit = gcd(c["stride_width"], c["dilation_width"])
    column_phases = c["stride_width"] // column_unit
    column_step = c["dilation_width"] // column_unit
    slots = min(c["kernel_height"], row_phases) * min(c["kernel_width"], column_phases)

    taps = (c["kernel_height"] + c["stack"] - 1) * c["kernel_width"]
    assert taps % c["stage_taps"] == 0
    assert c["stack"] in (1, 2, 4, 8)
    assert c["stack"] == 1 or (c["tile_rows"] == 1 and row_phases == 1)
    halo = (c["kernel_width"] - 1) * column_step // column_phases
    assert c["lead"] + c["tile_columns"] + halo <= c["pitch"]
    assert c["lead"] == 0 or (c["tile_rows"] == 1 and c["bulk_stores"])
    fold = c["out_fold_height"] * c["out_fold_width"]
    out_channels = c["group_out"] // fold
    assert fold > 1 or c["interleave"] in (1, 2)
    assert c["stack"] * c["column_sums"] <= 8
    assert c["column_sums"] == 1 or c["interleave"] == 2
    passes = ceil_div(c["pixels"], c["pass_pixels"])
    assert 2 // c["column_sums"] * passes % c["buffers"] == 0
    if fold > 1:
        neighbours = out_channels if c["out_channels_last"] else 1
        assert c["interleave"] == c["out_fold_width"] * neighbours <= 64 // c["stack"]
        assert c["stack"] * c["group_out"] <= 64 or c["stack"] == 1
        assert c["groups"] == 1 or not c["out_channels_last"]
        assert c["lead"] == c["halves"] == c["joint_stores"] == c["vector_stores"] == 0
        assert (c["column_sums"], c["buffers"]) == (1, 1)
        for axis, size in (("row", "height"), ("column", "width")):
            assert c[f"{axis}_begin"] <= 0 < c[f"{axis}_end"]
            assert c[f"{axis}_end"] - c[f"{axis}_begin"] == c[f"out_fold_{size}"]
    elif c["interleave"] == 2:
        assert c["out_step_width"] == 2
        assert c["lead"] == c["out_channels_last"] == 0
    rows = 2 // c["channel_groups"] * c["tile_rows"] * c["stack"]
    halo_rows = rows + (c["kernel_height"] - 1) // row_phases
    assert c["pixels"] in range(8, 257, 8)
    assert c["pass_pixels"] % 16 == 0
    assert c["lead"] + c["tile_columns"] + (c["tile_rows"] - 1) * c["pitch"] <= c["pixels"]
    slack = max(0, c["pixels"] + halo - c["tile_rows"] * c["pitch"])

    strips = ceil_div(c["out_width"] + max(c["lead"] - 1, 0), c["tile_columns"])

    # Rows that go on with the next one, which lies behind them, in memory and in the last strip.
    if c["wraps"]:
        last = c["out_width"] - (strips - 1) * c["tile_columns"]
        assert last > 0
        assert last + halo + 2 * c["lead"] - 1 <= c["pixels"] <= c["pass_pixels"]
        steps = ("stride_height", "stride_width", "fold_height", "fold_width")
        assert {c[name] for name in (*steps, "out_step_height", "out_step_width")} == {1}
        assert scalar_bytes == 4 or not c["vector_loads"]
        if c["staged"]:
            assert c["padding_left"] == 0
            assert c["in_width"] == c["out_width"] + halo

    if c["joint_stores"]:
        assert c["out_channels_last"]
        assert c["channel_groups"] == 2
        assert c["stack"] == c["column_sums"] == 1
        assert not c["turns"]

    # Rings: nobody waits for a stage that is given back only after the wait.
    per_tile = chunks * taps // c["stage_taps"]
    assert not c["resident"] or c["weight_stages"] == per_tile
    assert not c["resident"] or c["groups"] == 1
    assert c["weight_stages"] >= min(2, per_tile)
    if c["rolling"]:
        assert chunks == row_phases == c["tile_rows"] == 1
        assert c["input_stages"] >= halo_rows
    else:
        assert c["input_stages"] >= min(2, chunks)

    # Shared memory.
    stage_rows = 1 if c["rolling"] else halo_rows
    plane = slots * stage_rows * c["pitch"] + c["plane_padding"]
    input_bytes = 16 * (c["parts"] * 2 * c["k_steps"] * plane + slack)
    tap_bytes = c["k_steps"] * weight_parts * c["channel_groups"] * 64 * 32
    row = c["interleave"] * c["pass_pixels"]
    if fold > 1:
        channels = min(64 // c["stack"] // c["interleave"] * c["interleave"], c["group_out"])
        lines = c["stack"] * channels // c["interleave"]
        staged = lines * (round_up(row + vector - 1, 2 * vector) + vector)
    elif c["out_channels_last"]:
        staged = c["pass_pixels"] * (64 + vector)
    else:
        staged = 4 * c["buffers"] * 8 * (round_up(row + vector - 8, 16) + 8)
    assert staged * scalar_bytes % 16 == 0
    rows_aligned = strips == 1 and c["padding_left"] >= 0 and c["in_width"] % vector == 0
    beyond = 0 if rows_aligned else vector - 1
    pixels = c["pitch"] if c["wraps"] else min(c["pitch"], c["in_width"])
    line = ceil_div(pixels + beyond, vector) * 16
    used = 16 + (
        c["input_stages"] * (input_bytes + 16)
        + c["weight_stages"] * (c["stage_taps"] * tap_bytes + 16)
        + 2 * staged * scalar_bytes
        + 3 * c["raw_slots"] * (2 * channels_of_vector * line + 8)
    )
    assert used <= c["shared_bytes"]
    product_channels = 64 // (c["stack"] * c["column_sums"])
    if fold > 1:
        product_channels -= product_channels % c["interleave"]
    outputs = ceil_div(c["group_out"], c["channel_groups"] * product_channels)
    packed_bytes: int = c["groups"] * outputs * chunks * taps * tap_bytes

    # Registers, of the producer's warpgroup and of two consumers.
    producer, consumer = c["producer_registers"], c["consumer_registers"]
    assert producer % 8 == consumer % 8 == 0
    assert 24 <= producer <= REGISTERS <= consumer <= 232
    assert 128 * producer + 256 * consumer <= 384 * REGISTERS
    sums = c["pixels"] // 2 * c["parts"]  # those of split numbers have totals beside them
    assert sums < consumer

    # 32-bit numbers: of work items, and of elements within an image.
    tiles = ceil_div(ceil_div(c["out_height"], row_step), rows)
    segments = ceil_div(tiles, c["segment_tiles"])
    items = outputs * strips * segments * row_step * c["groups"] * main.arguments[-1]
    assert main.grid[0] <= items < 2**31
    assert packed_bytes // 16 < 2**31
    folded = c["fold_height"] * c["fold_width"]
    for size, channels in (("in", c["group_in"] // folded), ("image", out_channels)):
        assert c["groups"] * channels * c[f"{size}_height"] * c[f"{size}_width"] < 2**30

    # What is copied 16 bytes at a time.
    assert not c["vector_loads"] or (c["in_channels_last"] and c["group_in"] % vector == 0)
    assert c["staged"] == (c["raw_slots"] > 0)
    assert c["staged"] or not c["bulk_loads"]
    if c["staged"]:
        assert not c["in_channels_last"]
        assert c["stride_width"] == folded == 1
    assert not c["vector_stores"] or (c["out_channels_last"] and c["group_out"] % vector == 0)
    assert fold > 1 or not (c["bulk_stores"] and c["out_channels_last"])
    if c["bulk_stores"]:
        assert fold > 1 or c["out_step_width"] == c["interleave"]
        stored = c["image_width"] * (out_channels if c["out_channels_last"] else 1)
        if c["tile_rows"] > 1:
            assert stored % vector == c["interleave"] * c["pitch"] % vector == 0
        if strips > 1:
            assert c["interleave"] * c["tile_columns"] % vector == 0
    return packed_bytes


def _assert_legal_few_outputs(plan: Plan, gpu: Gpu) -> None:
    """The same of the ``few_outputs`` kernel."""
    (launch,) = plan.launches
    c: dict[str, Any] = dict(launch.kernel.constants)
    assert plan.scratch_bytes == 0
    assert launch.grid[0] in range(1, gpu.processors + 1)
    assert launch.grid[1:] == (1, 1)
    assert launch.block == 128 * c["warpgroups"] <= 384
    assert launch.shared_bytes == c["shared_bytes"] <= gpu.shared_bytes_per_block

    vector = 4 if c["Scalar"] == "float" else 8
    slot = round_up(c["kernel_width"] * c["group_out"], 8)
    columns = c["kernel_height"] * slot
    assert columns <= 256
    units = ceil_div(c["group_in"], 2 * vector * c["unit_steps"])
    weights = c["parts"] * units * c["unit_steps"] * 2 * columns * 16
    assert weights + c["warpgroups"] * slot * 68 * 4 <= c["shared_bytes"]

    # Every output of a strip has all its taps' pixels among the product's 64.
    reach = (c["kernel_width"] - 1) * c["dilation_width"]
    assert 0 < c["lead"] + c["strip_columns"] + reach <= 64
    assert c["stride_height"] == c["stride_width"] == 1
    if c["vector_loads"]:
        assert c["in_channels_last"]
        assert c["group_in"] % vector == c["unit_steps"] % 2 == 0
    if c["pair_loads"]:
        assert not c["in_channels_last"]
        assert c["in_width"] % 2 == c["strip_columns"] % 2 == 0
        assert (c["padding_left"] + c["lead"]) % 2 == 0

    # A thread's registers: sums, what is multiplied, and what is on its way.
    wide = vector == 8 and not (c["vector_loads"] or c["pair_loads"])
    used = c["parts"] * columns // 2 + 4 * c["unit_steps"] * (c["parts"] + 1 + wide)
    assert used < {2: 255, 3: 168}[c["warpgroups"]] - 16

    strips = ceil_div(c["out_width"], c["strip_columns"])
    bands = ceil_div(ceil_div(c["out_height"], c["dilation_height"]), c["band_rows"])
    items = strips * bands * c["dilation_height"] * launch.arguments[-1]
    assert launch.grid[0] * c["warpgroups"] < items + c["warpgroups"]
    assert items + gpu.processors * 3 < 2**31
    for size, channels in (("in", c["group_in"]), ("out", c["group_out"])):
        assert channels * c[f"{size}_height"] * c[f"{size}_width"] < 2**30


def _assert_legal_nhwc(plan: Plan, gpu: Gpu) -> None:
    """The same of the ``implicit_gemm_nhwc`` kernel, whose maps have checked themselves."""
    *packs, launch = plan.launches
    c: dict[str, Any] = dict(launch.kernel.constants)
    input_map, weight_map, output_map, *_, batch = launch.arguments
    assert plan.packs == len(packs) <= 1
    weights = c["weight_out"] * c["weight_in"] * c["kernel_height"] * c["kernel_width"]
    assert plan.scratch_bytes == len(packs) * 2 * weights
    assert weight_map.tensor == ("scratch" if packs else "weight")
    assert c["in_channels"] % 8 == c["out_channels"] % 8 == 0

    # A stage is what the copies fill, and begins where their swizzle does.
    rows, columns = 64 * c["consumers"], c["tile_columns"]
    boxes = ceil_div(columns, 64)
    weight_bytes = (boxes if c["transposed"] else 1) * weight_map.box_bytes
    weight_columns = 64 * boxes if c["transposed"] else columns
    assert (input_map.box_bytes, weight_bytes) == (128 * rows, 128 * weight_columns)
    stage = input_map.box_bytes + (0 if c["resident"] else weight_bytes)
    taps = c["kernel_height"] * c["kernel_width"]
    stay = taps * ceil_div(c["in_channels"], 64) * weight_bytes if c["resident"] else 0
    if c["resident"]:
        assert c["dense"]
        assert c["out_channels"] <= columns
    assert columns in (64, 128, 192, 256) or 0 <= columns - c["out_channels"] < 16
    assert output_map.box_bytes == c["joined"] * 16 * 128
    assert boxes % (c["buffers"] * c["joined"]) == 0
    if c["joined"] > 1:  # boxes that lie side by side in memory, all of them
        assert c["dense"]
        assert c["out_channels"] % 64 == columns % 64 == 0
    assert c["stages"] >= 2
    staged = 4 * c["consumers"] * c["buffers"] * c["joined"] * 16 * 128
    used = stay + c["stages"] * (stage + 16) + staged + 16
    assert used == launch.shared_bytes <= gpu.shared_bytes_per_block
    assert c["blocks"] * (launch.shared_bytes + 1024) <= gpu.shared_bytes_per_processor

    assert launch.block == 128 * c["consumers"] + 32
    assert columns // 2 + 30 <= 65536 // (c["blocks"] * launch.block)

    # 32-bit numbers: of positions, beyond the last one too, and of tiles.
    strides = c["stride_height"] * c["stride_width"] if c["transposed"] else 1
    positions = batch * c["position_rows"] * c["position_columns"]
    tiles = strides * ceil_div(positions, rows) * ceil_div(c["out_channels"], columns)
    assert positions + rows < 2**31
    assert launch.grid[0] <= tiles < 2**31
    assert launch.grid[0] <= c["blocks"] * gpu.processors


def _assert_legal_nchw(plan: Plan, gpu: Gpu) -> None:
    """The same of the ``implicit_gemm_nchw`` kernel."""
    pack, launch = plan.launches
    c: dict[str, Any] = dict(launch.kernel.constants)
    batch = launch.arguments[-1]
    assert plan.packs == 1
    assert pack.kernel.constants == launch.kernel.constants
    assert launch.block == 384
    assert launch.grid[0] in range(1, gpu.processors + 1)

    axes = [_planes_axis(c, side) for side in ("height", "width")]
    phases, sums, units, unit_taps = (prod(of) for of in zip(*axes, strict=True))
    assert phases <= 16
    assert c["columns"] % 8 == 0
    assert sums * c["row_tiles"] * c["columns"] <= 256
    assert c["tile_pixels"] <= 128 * c["row_tiles"]
    assert c["vector"] in (1, 2 * c["row_tiles"])
    if c["vector"] > 1:
        assert c["flat"]
        assert c["tile_pixels"] % 4 == c["image_pixels"] % 4 == 0
    assert not c["pairs"] or (
        c["transposed"] and c["stride_width"] == 2 and c["out_width"] % 2 == 0
    )

    # Stages, which begin at multiples of 128 bytes.
    piece = 4 * c["chunk"] * c["pitch"]
    weights = unit_taps * 4 * c["chunk"] * c["columns"]
    assert piece % 128 == weights % 128 == 0
    if c["bulk"]:
        assert c["group_in"] * c["in_height"] * c["in_width"] % 4 == 0
    else:
        assert launch.arguments[0].box_bytes == piece
    used = c["input_stages"] * (c["pieces"] * piece + 16) + c["weight_stages"] * (weights + 16)
    assert used <= launch.shared_bytes == c["shared_bytes"] <= gpu.shared_bytes_per_block
    chunks = ceil_div(c["group_in"], c["chunk"])
    tiles_across = ceil_div(c["group_out"], c["columns"])
    if c["resident"]:
        assert (tiles_across, c["weight_stages"]) == (1, chunks * units)
    assert c["input_stages"] >= 2
    assert c["weight_stages"] >= min(2, chunks * units)

    assert 128 * c["producer_registers"] + 256 * c["consumer_registers"] <= 384 * REGISTERS
    taps = c["kernel_height"] * c["kernel_width"]
    assert plan.scratch_bytes == tiles_across * chunks * taps * 4 * c["chunk"] * c["columns"]
    positions = batch * c["image_pixels"]
    assert positions + c["tile_pixels"] < 2**31
    assert launch.grid[0] <= ceil_div(positions, c["tile_pixels"]) * tiles_across < 2**31


def _planes_axis(c: dict[str, Any], side: str) -> tuple[int, int, int, int]:
    """Phases, those with taps, different offsets of taps, and the most taps of an offset."""
    stride = c[f"stride_{side}"] if c["transposed"] else 1
    padding = c["padding_top" if side == "height" else "padding_left"]
    reaches = [tap * c[f"dilation_{side}"] - padding for tap in range(c[f"kernel_{side}"])]
    offsets = [reach // stride for reach in reaches]
    return (
        stride,
        len({reach % stride for reach in reaches}),
        len(set(offsets)),
        max(map(offsets.count, offsets)),
    )


@st.composite
def _problems(draw: st.DrawFn) -> Problem:
    """Nothing is computed, so they may be large; most are what tensor cores take."""

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
    batch = min(batch, 2**36 // (groups * multiplier * size[0] * size[1]) + 1)  # no terabytes
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
    replace(H200, processors=1),
    replace(H200, processors=4, shared_bytes_per_block=90 * 1024),
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
    operands = _operands(problem, mode, *formats, aligned)
    for plan in plans:
        planned = plan(problem, operands, gpu)
        for launch in planned.launches:
            assert launch.shared_bytes <= gpu.shared_bytes_per_block
            assert all(1 <= side < 2**31 for side in launch.grid)
            assert max(launch.grid[1:]) < 2**16
        if planned.family == "hopper" and plan in PASSES:
            _assert_legal(planned, gpu)


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
    with mock.patch.object(halo, "HALVES_CYCLES", 0.0):  # float16 for small images, too
        _check(PASSES, **case)


@settings(max_examples=100)
@example(
    problem=_problem((8, 64, 32, 32), (128, 64, 1, 1)),
    mode="ieee",
    formats=(False, False),
    aligned=True,
    gpu=A100,
)
@any_geometry
def test_any_weight_gradient_has_a_legal_plan(**case: Any) -> None:
    _check((planner.weight_grad,), **case)


def test_phases_of_far_strides() -> None:
    """As many as taps reach, whatever the stride; the time it takes is that of the taps."""
    problem = _problem((1, 1, 1, 20), (1, 1, 1, 3), stride=(1, 10**9), padding=(0, 0, 1, 0))
    placings = [residue.placing for residue in layers.residues(problem, 1)]
    assert [placing[:4] for placing in placings] == [
        (10**9, 0, 0, 1),
        (10**9, 1, 1, 2),
        (10**9, 10**9 - 1, 2, 10**9),
    ]


@settings(max_examples=200)
@given(
    size=st.integers(1, 40),
    kernel=st.integers(1, 9),
    stride=st.integers(1, 8),
    dilation=st.integers(1, 9),
    padding=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_phases_are_the_gradient(
    size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int]
) -> None:
    """Along one axis: every term of every sum once, every position written once."""
    shape = (1, 1, 1, size + dilation * (kernel - 1))  # the kernel fits
    problem = _problem(
        shape, (1, 1, 1, kernel), stride=(1, stride), padding=(0, 0, *padding),
        dilation=(1, dilation),
    )  # fmt: skip
    width, out_width = problem.input_size[1], problem.output_size[1]
    expected = sorted(
        (at, tap, out)
        for out, tap in product(range(out_width), range(kernel))
        if 0 <= (at := out * stride + tap * dilation - padding[0]) < width
    )
    residues = layers.residues(problem, 1)
    wholes = (layers.interleaved(residues), layers.depth_to_space(problem, 1))
    for way in (residues, *([whole] for whole in wholes if whole is not None)):
        terms, written = [], []
        for phase in way:
            to = phase.placing
            for q in range(phase.size):
                written += range(to.step * q + to.begin, to.step * q + to.end)
                for column, tap in product(range(to.sums), range(phase.taps)):
                    at = to.step * q + to.at + column
                    out = q - phase.padding + tap * phase.dilation
                    weight = to.last_tap - tap * to.tap_step + column
                    if 0 <= at < width and 0 <= out < out_width and 0 <= weight < kernel:
                        terms.append((at, weight, out))
        assert sorted(terms) == expected
        assert sorted(at for at in written if 0 <= at < width) == [*range(width)]


def test_folded_steps_begin_where_taps_are_fewest() -> None:
    """With AlexNet's padding: 3 taps instead of 4, for 57 positions instead of 56."""
    early = layers.depth_to_space(ALEXNET, 0)
    assert early is not None
    assert (early.placing.begin, early.taps, early.size) == (-2, 3, 57)
    # ResNet's are as few where the image begins.
    problem = _problem((1, 3, 224, 224), (64, 3, 7, 7), stride=(2, 2), padding=(3, 3, 3, 3))
    late = layers.depth_to_space(problem, 0)
    assert late is not None
    assert (late.placing.begin, late.taps, late.size) == (0, 4, 112)


ALEXNET = _problem((256, 3, 224, 224), (96, 3, 11, 11), stride=(4, 4), padding=(2, 2, 2, 2))


@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_few_channels_fold_all_phases(mode: str, channels_last: bool) -> None:
    """One pair of launches instead of 16, and rows of the image leave whole."""
    plan = planner.input_grad(ALEXNET, _operands(ALEXNET, mode, channels_last), H200)
    ((_, _, constants),) = _layers(plan)
    assert (constants["out_fold_height"], constants["out_fold_width"]) == (4, 4)
    assert constants["interleave"] == (12 if channels_last else 4)
    assert constants["bulk_stores"]
    assert plan.packs == 1


UNFOLDED = {
    "dilation": ((4, 3, 40, 40), (64, 3, 3, 3), {"dilation": (1, 2)}),
    "many channels": ((4, 48, 40, 40), (64, 48, 3, 3), {}),
    "more neighbours than a product has": ((4, 3, 40, 40), (64, 3, 3, 3), {"stride": (2, 33)}),
    "groups of a pixel": ((4, 32, 40, 40), (64, 16, 3, 3), {"groups": 2}),
}


@pytest.mark.parametrize(("shape", "weight", "options"), UNFOLDED.values(), ids=UNFOLDED)
def test_what_does_not_fold(
    shape: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]
) -> None:
    problem = _problem(shape, weight, **{"stride": (2, 2), **options})
    ways = input_grad_ways(problem, _operands(problem, "tf32", channels_last=True))
    assert not any(way[0].unfolds for way in ways)


def test_portable_kernels_are_an_alternative_to_folding() -> None:
    """Where phases alone are declined, and halos so tall that products are narrow."""
    problem = _problem(
        (32, 1, 161, 400), (32, 1, 41, 11), stride=(2, 2), padding=(20, 20, 5, 5)
    )  # fmt: skip
    operands = _operands(problem, "ieee")
    assert any(way[0].unfolds for way in input_grad_ways(problem, operands))
    assert planner.input_grad(problem, operands, H200).family != "hopper"


def test_so_many_phases_are_folded_or_nothing() -> None:
    patches = _problem((4, 3, 224, 224), (768, 3, 16, 16), stride=(16, 16))
    plan = planner.input_grad(patches, _operands(patches, "tf32"), H200)
    assert plan.family == "hopper"
    assert len(_layers(plan)) == 1


@pytest.mark.parametrize("plan", PASSES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
def test_plans_of_the_suites_are_legal(mode: str, channels_last: bool, plan: Planner) -> None:
    for workload in WORKLOADS:
        planned = _planned(plan, workload, mode, channels_last)
        if planned.family == "hopper":
            _assert_legal(planned, H200)


@cache
def _planned(plan: Planner, workload: Workload, mode: str, channels_last: bool) -> Plan:
    """On an H200, once for all tests."""
    operands = _operands(workload.problem, mode, channels_last)
    return plan(workload.problem, operands, H200)


DOWNSAMPLING = {
    "3x3": _problem((32, 128, 56, 56), (128, 128, 3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
    "1x1": _problem((32, 256, 56, 56), (512, 256, 1, 1), stride=(2, 2)),
}


@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
def test_strided_gradients_run_in_phases(mode: str) -> None:
    for channels_last, counts in ((False, {"3x3": 2, "1x1": 1}), (True, {"3x3": 4, "1x1": 1})):
        for name, problem in DOWNSAMPLING.items():
            ways = input_grad_ways(problem, _operands(problem, mode, channels_last))
            plan, *others = halo.alternatives(ways, H200, 4)
            assert len(_layers(plan)) == counts[name]
            assert len(_layers(others[-1])) == counts[name]
            assert {other.key for other in others} == {plan.key}
            assert len({other.choice for other in (plan, *others)}) == 4
            # Contiguous rows are stored whole, by bulk copies.
            for _, _, constants in _layers(plan):
                assert constants["bulk_stores"] != channels_last


def test_measured_choices_are_found() -> None:
    """Every entry of the shipped table is a plan of some layer of the suites, and is taken."""
    table = tuned.read(tuned.SHIPPED)
    taken = {}
    for workload, mode, last in product((*FOUNDING, *REAL, *ODD), TENSOR_CORE_MODES, (False, True)):
        plan = _planned(planner.forward, workload, mode, last)
        taken[plan.key] = plan.choice
    assert table, "there is a table"
    assert {key: taken.get(key) for key in table} == table


def test_a_table_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path))
    problem = _problem((4, 32, 100, 300), (64, 32, 5, 9))
    first, second = hopper.alternatives("forward", problem, _operands(problem), H200, 2)
    assert first.key == second.key
    assert first.choice != second.choice
    tuned.add(tuned.own(), {"other": "kept"})
    tuned.add(tuned.own(), {second.key: second.choice})
    try:
        plan = planner.forward(problem, _operands(problem), H200)
        assert (plan.choice, plan.launches) == (second.choice, second.launches)
        assert plan.why.endswith("measured")
        assert tuned.read(tuned.own())["other"] == "kept"
        tuned.own().write_text("not JSON", encoding="utf-8")
        assert tuned.read(tuned.own()) == {}
    finally:
        tuned.table.cache_clear()


# --- 32-bit numbers -------------------------------------------------------------------------------


def test_a_block_counts_on_from_its_last_tile() -> None:
    """By as many as there are blocks: together, that has to be less than 2^31."""
    rows, columns = 113, 127  # of as many phases, of which 149640 times is 8 less than 2^31

    def planned(row_tiles: int) -> Plan:
        images = row_tiles * 256
        problem = Problem.of(
            (images, 8, rows, columns), (64, 8, 1, 1), (rows, columns), (0,) * 4, (1, 1), 1
        )
        operands = _operands(problem, "bfloat16", channels_last=True)
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
    """By as many as there are threads."""

    def packed(vectors: int) -> tuple[Launch, ...]:
        problem = FOUNDING[0].problem
        layer = Layer.of(problem, _operands(problem))
        one = launches.Correlation(
            layer, "hopper/halo/kernel.cuh", {}, 1, 1, 0, 16 * vectors, 64, 64
        )
        return launches.launches([one], None)[0]

    most = 2**31 - launches.MOST_PACK_BLOCKS * launches.PACK_THREADS
    assert packed(most - 1)
    with pytest.raises(Declined, match="bytes of packed weights"):
        packed(most)


def test_exponents_are_added_up_in_32_bits() -> None:
    """Those of an input channel's weights, where float32 is multiplied as float16."""
    for taps, fits in ((2056, True), (2057, False)):
        problem = Problem.of((1, 16, taps, 64), (4096, 16, taps, 1), (1, 1), (0,) * 4, (1, 1), 1)
        assert (255 * 4096 * taps < 2**31) == fits
        ways = forward_ways(problem, _operands(problem, "tf32"))
        assert any(layer.halves for way in ways for layer in way) == fits


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_strides_of_axes_of_one_element(memory_format: torch.memory_format) -> None:
    """PyTorch leaves them as they are given, also if they are beyond 32 bits."""
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
