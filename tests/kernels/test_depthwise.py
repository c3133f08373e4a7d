"""Plans for narrow groups, for every NVIDIA GPU since Volta: they fit it, and compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from random import Random

import pytest
import torch

from effort import ALL, calls
from fastconv import workloads
from fastconv.backends import cuda
from fastconv.bench import population
from fastconv.kernels import depthwise, gpus, planner
from fastconv.kernels.depthwise.fma import plan as fma
from fastconv.kernels.depthwise.layer import Layer
from fastconv.kernels.depthwise.tiles import best
from fastconv.kernels.depthwise.wgrad import plan as weight_grad
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Axis, Problem
from nvrtc import compiled

PASSES = (depthwise.forward, depthwise.input_grad, depthwise.weight_grad)
VOLUMES = [layer for layer in workloads.suite("video") if layer.name == "x3d_dw"]
LAYERS = [*workloads.suite("depthwise"), *VOLUMES]
MOST_CALLS = 100_000  # Bounds the function calls that plan a pass: about 30 ms.
KINDS = tuple(product((torch.float32, torch.bfloat16), (False, True)))


def _operands(problem: Problem, dtype: torch.dtype, channels_last: bool) -> Operands:
    weight = torch.empty(problem.weight_shape, device="meta")
    return cuda.operands_of(dtype, channels_last, channels_last, weight.stride(), True, "ieee")


def _plans(gpu: Gpu) -> Iterator[Plan]:
    """Plans for every fifth combination of layer, type and pass; each GPU has another fifth."""
    turn = list(GPUS.values()).index(gpu) % 5
    for layer, (dtype, channels_last), plan in list(product(LAYERS, KINDS, PASSES))[turn::5]:
        operands = _operands(layer.problem, dtype, channels_last)
        try:
            yield plan(layer.problem, operands, gpu)
        except Declined:
            assert gpu.shared_bytes_per_block < 2**17, "nothing else fits"


def test_there_are_layers() -> None:
    names = {layer.name for layer in LAYERS}
    assert {"dw7x7", "replknet31", "efficientnet_down", "x3d_dw"} <= names


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_plans_fit(gpu: Gpu) -> None:
    for plan in _plans(gpu):
        for launch in plan.launches:
            assert launch.grid[0] in range(1, 2**31)
            assert launch.block in range(32, 1025, 32)
            assert launch.shared_bytes <= gpu.shared_bytes_per_block
            constants = dict(launch.kernel.constants)
            if launch.shared_bytes > 0:
                blocks = int(constants["blocks_per_sm"])
                assert blocks * (launch.shared_bytes + 1024) <= gpu.shared_bytes_per_sm
        assert plan.scratch_bytes <= 64 << 20


def _deep(draw: Random, problem: Problem) -> Problem:
    """The same with a depth."""
    taps, stride, dilation = draw.choice(((3, 1, 1), (3, 2, 1), (2, 1, 3), (5, 1, 1), (1, 3, 1)))
    depth = Axis(draw.randint(taps * dilation, 40), taps, stride, taps // 2, 1, dilation)
    return replace(problem, depth=depth)


def _drawn(channels_last: bool, transposed: bool) -> Iterator[tuple[Layer, Gpu]]:
    """Some of the suite's layers, and random ones, with random types and GPUs."""
    draw = Random(channels_last + 2 * transposed)
    problems = [layer.problem for layer in LAYERS[::6]]
    problems += [population.narrow(draw, 1e11, 1e9).problem for _ in range(24)]
    problems += [_deep(draw, problem) for problem in problems[-8:]]
    for problem in problems:
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
        operands = replace(
            _operands(problem, dtype, channels_last),
            aligned=draw.random() < 0.8,
            bias_grad=draw.random() < 0.5,
        )
        sm_count = draw.choice((1, 3, 40, 132))
        with suppress(Declined):
            layer = Layer.of(problem, operands, transposed)
            yield layer, replace(draw.choice((H200, *GPUS.values())), sm_count=sm_count)


@pytest.mark.parametrize("transposed", [None, False, True], ids=["weight", "forward", "input"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_no_tile_takes_less_than_its_bound(transposed: bool | None, channels_last: bool) -> None:
    """Otherwise the planner might skip the best tile, the first of those that take least."""
    kind = weight_grad if transposed is None else fma
    tiles = vars(kind)[("_" if kind is weight_grad else "") + ("planes", "pixels")[channels_last]]
    count = 0
    for layer, gpu in _drawn(channels_last, bool(transposed)):
        takes = {}
        for candidate in tiles(layer):
            for tile in candidate.variants(gpu, inf):
                if tile.fits(gpu):
                    takes[tile] = cycles = tile.cycles(gpu)
                    assert 0 < candidate.least_cycles(gpu) <= cycles
                    assert tile in candidate.variants(gpu, cycles)
        if takes:
            assert best(tiles(layer), gpu) == min(takes, key=lambda tile: takes[tile])
            count += 1
    assert count >= 15


@pytest.mark.parametrize("plan", PASSES)
def test_planning_takes_no_time(plan: planner.Planner) -> None:
    """The planner evaluates few of more than a thousand tiles."""
    for layer, (dtype, channels_last) in product([*LAYERS[::2], *VOLUMES], KINDS):
        operands = _operands(layer.problem, dtype, channels_last)
        assert calls(partial(plan, layer.problem, operands, H200)) < MOST_CALLS


@pytest.mark.sampled
@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_kernels_do_not_spill(gpu: Gpu) -> None:
    """Each GPU compiles some of the kernels, and all GPUs together all, or in CI a third."""
    at = list(GPUS.values()).index(gpu)
    launches = (launch for plan in _plans(gpu) for launch in plan.launches)
    kernels = dict.fromkeys(launch.kernel for launch in launches if launch.shared_bytes > 0)
    for kernel in list(kernels)[at :: len(GPUS) * (1 if ALL else 3)]:
        assert compiled(kernel, gpu.architecture).spill_bytes == 0


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("plan", [planner.forward, planner.input_grad, planner.weight_grad])
def test_they_plan_on_every_gpu(plan: planner.Pass, channels_last: bool) -> None:
    """The plan says why the tensor-core families before it declined."""
    problem = LAYERS[0].problem
    for gpu in GPUS.values():
        planned = plan(problem, _operands(problem, torch.bfloat16, channels_last), gpu)
        assert planned.family == "depthwise"
        assert "; hopper does not take " in planned.why


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("plan", [depthwise.forward, depthwise.input_grad])
def test_large_kernels_take_tensor_cores(plan: planner.Planner, channels_last: bool) -> None:
    """Tensor cores are used from sm_80 on; where they are slow, only for 16-bit types."""
    problem = next(layer.problem for layer in LAYERS if layer.name == "replknet31")
    for dtype, gpu in product((torch.float32, torch.bfloat16, torch.float64), GPUS.values()):
        planned = plan(problem, _operands(problem, dtype, channels_last), gpu)
        on_tensor_cores = planned.launches[-1].kernel.source.startswith("depthwise/toeplitz/")
        if dtype == torch.float64 or gpus.number(gpu) < 80:
            assert not on_tensor_cores
        elif dtype == torch.bfloat16 or gpu is H200:
            assert on_tensor_cores


@pytest.mark.parametrize("plan", [depthwise.forward, depthwise.input_grad])
def test_packed_weights_can_be_kept(plan: planner.Planner) -> None:
    """Only the launch that packs reads the weight; contiguous weights are not packed."""
    problem = LAYERS[0].problem
    packed = plan(problem, _operands(problem, torch.float32, channels_last=True), H200)
    assert packed.packs == 1
    assert packed.launches[0].tensors == ("weight", "scratch")
    assert all("weight" not in launch.tensors for launch in packed.launches[1:])
    contiguous = plan(problem, _operands(problem, torch.float32, channels_last=False), H200)
    assert (contiguous.packs, contiguous.scratch_bytes) == (0, 0)


def test_planes_are_counted_in_32_bits() -> None:
    """Several launches share the images, also where a block has many images."""
    problem = workloads.parse_shape(f"{2**20 + 5}x2048x1x1 2048x1x1x1 groups=2048").problem
    operands = _operands(problem, torch.float32, channels_last=False)
    for plan in (depthwise.forward, depthwise.input_grad):
        images = 0
        for launch in plan(problem, operands, H200).launches:
            first, count = launch.arguments[-2:]
            assert first == images
            assert isinstance(count, int)
            assert count * 2048 < 2**31
            images += count
        assert images == problem.batch


def test_weights_beyond_32_bits_are_left_to_the_portable_kernels() -> None:
    problem = workloads.parse_shape(f"1x{2**20}x64x64 {2**20}x1x64x64 groups={2**20}").problem
    operands = _operands(problem, torch.float32, channels_last=True)
    for plan in (planner.forward, planner.input_grad, planner.weight_grad):
        planned = plan(problem, operands, H200)
        assert planned.family == "direct"
        assert "; depthwise does not take 429" in planned.why


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("2x32x9x9 32x32x3x3", "a single group"),
        ("2x32x9x9 32x16x3x3 groups=2", "groups of more than 7 channels"),
        ("2x32x9x99 32x1x1x65 groups=32", "kernels of more than 64 columns"),
    ],
)
def test_declines(shape: str, reason: str) -> None:
    problem = workloads.parse_shape(shape).problem
    for plan in PASSES:
        with pytest.raises(Declined, match=reason):
            plan(problem, _operands(problem, torch.float32, channels_last=False), H200)
