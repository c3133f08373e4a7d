"""Which family computes what, and in which order it sums."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from effort import calls
from fastconv.kernels import hopper, planner, tuned
from fastconv.kernels.family import Gpu, Plan
from fastconv.kernels.gpus import H200, rates
from fastconv.kernels.hopper.wgrad_implicit_gemm.halo import HaloTile
from fastconv.kernels.hopper.wgrad_implicit_gemm.halo import tiles_of as tiles_of_boxes
from fastconv.kernels.hopper.wgrad_implicit_gemm.plan import boxed_layer_of, tiles_of
from fastconv.kernels.planner import Pass, Planner
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING, ODD, REAL, VIDEO, VOLUME, Workload
from planner_cases import (
    A100,
    PASSES,
    T4,
    TENSOR_CORE_MODES,
    WORKLOADS,
    gemm_of,
    is_few_outputs,
    make_operands,
    make_problem,
    packed_layers,
    planned_once,
    without_copies,
)

# --- The choice of a family -----------------------------------------------------------------------

DENSE = make_problem((8, 32, 64, 64), (64, 32, 3, 3))


@pytest.mark.parametrize("plan", PASSES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
def test_founding_workloads_run_on_tensor_cores(
    workload: Workload, mode: str, channels_last: bool, plan: Planner
) -> None:
    problem = workload.problem
    planned = plan(problem, make_operands(problem, mode, channels_last), H200)
    assert planned.family == "hopper"
    assert planned.why.startswith("tensor cores")


DECLINED: dict[str, tuple[Planner, Problem, str, Gpu, str]] = {
    "older": (planner.forward, DENSE, "tf32", T4, "tensor-core kernels for sm_75"),
    "float64": (planner.forward, DENSE, "float64", H200, "float64"),
    "depthwise": (
        planner.input_grad,
        make_problem((8, 32, 64, 64), (32, 1, 3, 3), groups=32, stride=(2, 2), dilation=(3, 3)),
        "bfloat16", H200,
        "groups of 1 to 1 channels, fewer than 8; depthwise does not take strides and dilations",
    ),
    "tiny groups": (
        planner.input_grad, make_problem((8, 32, 64, 64), (64, 4, 3, 3), groups=8),
        "bfloat16", H200,
        "groups of 8 to 4 channels",
    ),
    "many residues": (
        planner.input_grad, make_problem((8, 48, 64, 330), (64, 48, 5, 5), stride=(4, 65)),
        "tf32", H200,
        "input gradients of 20 residues, more than 16",
    ),
    "vast image": (
        planner.forward, make_problem((1, 16, 8192, 8192), (64, 16, 3, 3)), "bfloat16", H200,
        r"images of 2\^30 elements",
    ),
    "few channels in": (
        planner.forward, make_problem((8, 1, 64, 64), (24, 1, 1, 1)), "bfloat16", H200,
        "so few channels that 2% of the MMA work",
    ),
    "few channels out": (
        planner.forward, make_problem((8, 64, 64, 99), (1, 64, 1, 9), dilation=(1, 8)),
        "tf32", H200,
        "so few channels that 2% of the MMA work",
    ),
    "few channels for three products": (
        planner.forward, make_problem((8, 32, 64, 99), (4, 32, 1, 9), dilation=(1, 8)),
        "ieee", H200,
        "so few channels that 6% of the MMA work",
    ),
    "far apart": (
        planner.forward,
        make_problem((1, 32, 8, 40000), (64, 32, 3, 3), dilation=(1, 19000), padding=(1, 1, 0, 0)),
        "tf32", H200, "a halo tile that does not fit",
    ),
    "padding beyond 32 bits": (
        planner.weight_grad,
        make_problem((1, 64, 8, 64), (64, 64, 1, 1), stride=(2**26, 1), padding=(2**30, 0, 0, 0)),
        "tf32", H200, r"[0-9]+ rows of padded images and tiles beyond them, 2\^30 and more",
    ),
    "tiles beyond 32 bits": (
        planner.forward,
        make_problem((1, 64, 1, 2**22), (64, 64, 1, 3), dilation=(1, 2**20)),
        "tf32", H200, r"[0-9]+ columns of padded images and tiles beyond them, 2\^30 and more",
    ),
    "batch beyond 32 bits": (
        planner.weight_grad, make_problem((2**30, 64, 1, 1), (64, 64, 1, 1)), "tf32", H200,
        r"1073741824 images, 2\^30 and more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DECLINED.values(), ids=DECLINED)
def test_the_portable_kernels_take_the_rest(case: tuple[Planner, Problem, str, Gpu, str]) -> None:
    plan, problem, mode, gpu, reason = case
    planned = plan(problem, make_operands(problem, mode), gpu)
    assert planned.family == "direct"
    # The plan says why this family was chosen, and why not the one before it.
    assert re.match(rf"plain CUDA cores.*; hopper does not take {reason}", planned.why)


FEW_OUTPUTS: dict[str, tuple[Planner, str, str, bool]] = {
    "square3x3": (planner.input_grad, "square3x3", "tf32", True),
    "one input channel": (planner.input_grad, "srcnn9x9", "ieee", True),
    "pointwise gradient": (planner.input_grad, "pointwise", "tf32", True),
    # The kernel stores slowly.
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
    assert is_few_outputs(plan(problem, make_operands(problem, mode), H200)) == expected


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
    plan = planner.weight_grad(problem, make_operands(problem, mode), H200)
    assert (plan.launches[0].kernel.entry == "wgrad_few_inputs") == expected
    assert plan.scratch_bytes <= 64 << 20


def test_few_input_channels_of_an_odd_batch() -> None:
    """TMA boxes have pairs of images."""
    (problem,) = (workload.problem for workload in FOUNDING if workload.name == "square3x3")
    plan = planner.weight_grad(replace(problem, batch=15), make_operands(problem, "bfloat16"), H200)
    assert plan.launches[0].kernel.entry == "wgrad_few_inputs"


@pytest.mark.parametrize(("gpu", "family"), [(H200, "hopper"), (A100, "ampere"), (T4, "direct")])
def test_weight_gradient_with_that_of_the_bias(gpu: Gpu, family: str) -> None:
    """The weight gradient's pass computes the bias's too, within the same workspace."""
    operands = replace(make_operands(DENSE), bias_grad=True)
    plan = planner.weight_grad(DENSE, operands, gpu)
    weights_alone = planner.weight_grad(DENSE, make_operands(DENSE), gpu)
    assert plan.family == family
    assert any("bias_grad" in launch.arguments for launch in plan.launches)
    assert weights_alone.scratch_bytes < plan.scratch_bytes <= 64 << 20


def test_weight_gradients() -> None:
    assert planner.weight_grad(DENSE, make_operands(DENSE), H200).family == "hopper"
    assert planner.weight_grad(DENSE, make_operands(DENSE), A100).family == "ampere"
    portable = planner.weight_grad(DENSE, make_operands(DENSE), T4)
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
    """The first call of a shape waits for its plan: a quarter of a second at most."""
    pad = kernel // 2
    problem = make_problem((4, 64, *size), (outputs, 64, kernel, kernel), padding=(pad,) * 4)
    operands = make_operands(problem, mode, channels_last)
    assert calls(lambda: planner.forward(problem, operands, H200)) < 500_000


def test_planning_many_taps_takes_no_time() -> None:
    """There are 4000 ways to tile this weight gradient."""
    problem = make_problem((4, 11, 405, 822), (84, 11, 23, 150))
    operands = make_operands(problem, "bfloat16")
    assert calls(lambda: planner.weight_grad(problem, operands, H200)) < 500_000


def test_planning_boxes_of_volumes_takes_no_time() -> None:
    """There are 2500 tiles for 27 taps of so many channels, and as many with exchanged roles."""
    problem = Problem.of(
        (2, 512, 16, 32, 32), (512, 512, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3, 1
    )  # fmt: skip
    operands = replace(
        make_operands(DENSE, "bfloat16", True), weight_strides=_weight_strides(problem, True)
    )
    tiles_of_boxes.cache_clear()
    assert calls(lambda: planner.weight_grad(problem, operands, H200)) < 1_000_000


@pytest.mark.parametrize(("gpu", "family"), [(H200, "hopper"), (A100, "ampere"), (T4, "direct")])
def test_large_weights_take_few_launches(gpu: Gpu, family: str) -> None:
    """The workspace grows with a weight that is larger than ordinary ones."""
    problem = make_problem((2, 4096, 8, 8), (2**18, 4096, 1, 1))
    plan = planner.weight_grad(problem, make_operands(problem), gpu)
    assert plan.family == family
    assert len(plan.launches) <= 64
    assert plan.scratch_bytes <= 4 * prod(problem.weight_shape) // 16


@pytest.mark.parametrize("gpu", [H200, A100, T4], ids=["hopper", "ampere", "direct"])
@pytest.mark.parametrize("plan", [*PASSES, planner.weight_grad])
def test_the_dilation_of_one_tap_makes_no_difference(plan: Planner, gpu: Gpu) -> None:
    problem = make_problem((4, 32, 40, 40), (64, 32, 1, 3), dilation=(5000, 2))
    plain = replace(problem, dilation=(1, 2))
    assert plan(problem, make_operands(problem), gpu) == plan(plain, make_operands(plain), gpu)


# --- The same bits in any batch -------------------------------------------------------------------

# Constants that decide in which order the terms of a sum are added.
ORDER = (
    *("scaled_fp16", "k_steps", "stage_taps", "stack", "rolling", "parts", "transposed"),
    *("stacked_columns", "compensated"),
)
FEW_OUTPUTS_ORDER = (
    "unit_steps",
    "parts",
    "transposed",
    "low_low_mma",
    "compensated",
    "vector_loads",
)
GEMM_ORDER = {"implicit_gemm_nhwc": ("transposed",), "implicit_gemm_nchw": ("transposed", "chunk")}


def _order(plan: Plan) -> tuple[Any, ...]:
    if plan.family != "hopper":
        return (plan.family,)
    if is_few_outputs(plan):
        constants = dict(plan.launches[0].kernel.constants)
        return ("few_outputs", *(constants[name] for name in FEW_OUTPUTS_ORDER))
    if gemm_of(plan):
        constants = dict(without_copies(plan).launches[-1].kernel.constants)
        return (gemm_of(plan), *(constants[name] for name in GEMM_ORDER[gemm_of(plan)]))
    return tuple(constants[name] for _, _, constants in packed_layers(plan) for name in ORDER)


@pytest.mark.parametrize("plan", PASSES)
@pytest.mark.parametrize(("third", "mode"), enumerate(["tf32", "ieee", "bfloat16"]))
def test_sums_do_not_depend_on_the_batch(third: int, mode: str, plan: Planner) -> None:
    """Nor on the number of SMs. Each mode has a third of the layers."""
    taken = 0
    for workload, channels_last in product(WORKLOADS[third::3], (False, True)):
        operands = make_operands(workload.problem, mode, channels_last)
        orders = set()
        for batch, gpu in ((1, H200), (5, replace(H200, sm_count=78)), (300, H200)):
            planned = plan(workload.with_batch(batch).problem, operands, gpu)
            orders.add(_order(planned))
        assert len(orders) == 1, workload.name
        taken += planned.family == "hopper"
    assert taken > 7


# --- What planning leaves behind ------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*PASSES, planner.weight_grad], ids=lambda plan: plan.__name__)
def test_no_frame_is_left_to_the_garbage_collector(plan: Pass) -> None:
    """A frame holds its callers' frames: their tensors, and these tensors' graphs, would stay."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for workload, mode, last, gpu in product(
            (*FOUNDING, *ODD), ("ieee", "bfloat16"), (False, True), (H200, A100)
        ):
            plan(workload.problem, make_operands(workload.problem, mode, last), gpu)
        gc.collect()
        left = {one.f_code.co_name for one in gc.garbage if isinstance(one, FrameType)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


# --- Volumes --------------------------------------------------------------------------------------


def _volume_plan(name: str, mode: str, plan: Planner, channels_last: bool = False) -> Plan:
    layers = {layer.name: layer for layer in (*VIDEO, *VOLUME)}
    problem = layers[name].problem
    operands = replace(
        make_operands(DENSE, mode, channels_last),
        weight_strides=_weight_strides(problem, channels_last),
    )
    return plan(problem, operands, H200)


def _weight_strides(problem: Problem, channels_last: bool) -> tuple[int, ...]:
    weight = torch.empty(problem.weight_shape, device="meta")
    if channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last_3d)
    return weight.stride()


@pytest.mark.parametrize("mode", ["tf32", "bfloat16"])
@pytest.mark.parametrize("plan", [planner.forward, planner.input_grad])
def test_patches_of_videos_are_matrix_products(plan: Planner, mode: str) -> None:
    """Each byte of both tensors is moved once, which takes about as long as estimated."""
    made = _volume_plan("patch3d", mode, plan)
    assert [launch.kernel.entry for launch in made.launches] == ["multiply_patches"]
    assert made.scratch_bytes == 0
    moved = 2 * 8 * 3 * 32 * 224 * 224 * (4 if mode == "tf32" else 2)
    assert made.cycles < 2.5 * moved / rates(H200).memory_bytes / H200.sm_count


@pytest.mark.parametrize("channels_last", [False, True])
def test_taps_of_volumes_share_boxes(channels_last: bool) -> None:
    """A weight gradient of 27 taps has all of 9 in a box, and is bound by MMAs, not by loads."""
    made = _volume_plan("kb70", "bfloat16", planner.weight_grad, channels_last)
    multiply = without_copies(made).launches[0]
    constants = dict(multiply.kernel.constants)
    assert (constants["group_out"], constants["group_in"]) == (48, 24)
    assert constants["halo_rows"] * constants["mma_columns"] // constants["halo_channels"] == 9
    assert (len(made.launches) > 2) is not channels_last  # launches that copy


def test_columns_of_patches_become_channels() -> None:
    """Patches of 16 by 16 pixels are a layer of 48 channels and 16 rows of taps."""
    problem = make_problem((64, 3, 224, 224), (768, 3, 16, 16), stride=(16, 16))
    made = planner.weight_grad(problem, make_operands(problem, "bfloat16", True), H200)
    constants = dict(made.launches[0].kernel.constants)
    assert (constants["group_in"], constants["kernel_width"]) == (48, 1)
    assert constants["split_rows"]
    # Half a patch more on a side is no patch.
    odd = make_problem((64, 3, 224, 232), (768, 3, 16, 16), stride=(16, 16))
    made = planner.weight_grad(odd, make_operands(odd, "bfloat16", True), H200)
    assert "halo_units" not in dict(made.launches[0].kernel.constants)


def test_a_stride_beyond_the_image_fits_a_tensor_map() -> None:
    """Patches of one row have no next one, whose distance might be no stride of a tensor map."""
    problem = make_problem((64, 8, 16, 2**18), (64, 8, 16, 16), stride=(2**19, 16))
    layer = boxed_layer_of(problem, make_operands(problem, "bfloat16", True), H200)
    split = [
        tile for tile in tiles_of(layer, H200) if isinstance(tile, HaloTile) and tile.split_rows
    ]
    assert split
    assert all(max(tile.box_map.strides) < 2**40 for tile in split)


# --- Tuned plans ----------------------------------------------------------------------------------


def test_measured_choices_are_found() -> None:
    """Every entry of the shipped table is a plan of some layer of the suites, and is taken."""
    table = tuned.read(tuned.SHIPPED)
    taken = {}
    for workload, mode, last in product((*FOUNDING, *REAL, *ODD), TENSOR_CORE_MODES, (False, True)):
        plan = planned_once(planner.forward, workload, mode, last)
        taken[plan.key] = plan.choice
    assert table, "there is a table"
    assert {key: taken.get(key) for key in table} == table


def test_a_table_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path))
    problem = make_problem((4, 32, 100, 300), (64, 32, 5, 9))
    first, second = hopper.alternatives("forward", problem, make_operands(problem), H200, 2)
    assert first.key == second.key
    assert first.choice != second.choice
    tuned.add(tuned.own(), {"other": "kept"})
    tuned.add(tuned.own(), {second.key: second.choice})
    try:
        plan = planner.forward(problem, make_operands(problem), H200)
        assert (plan.choice, plan.launches) == (second.choice, second.launches)
        assert plan.why.endswith("measured")
        assert tuned.read(tuned.own())["other"] == "kept"
        tuned.own().write_text("not JSON", encoding="utf-8")
        assert tuned.read(tuned.own()) == {}
    finally:
        tuned.table.cache_clear()
