"""Layers with one output position on the CPU: every pass, type, shape of a tile and copy."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from effort import ALL
from emulator import driver, isolated, precompile
from emulator.pass_cases import (
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    at_corners,
    check,
    check_special_values,
    float64,
    in_batch,
    new_output,
    some,
    tensors_read,
)
from fastconv.kernels import dense, planner
from fastconv.kernels.family import Declined, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Epilogue

PASSES: tuple[Planner, ...] = (dense.forward, dense.input_grad, dense.weight_grad)
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEW = replace(H200, sm_count=2)  # for which larger tiles are estimated to be faster
SMALL = replace(H200, shared_bytes_per_block=48 << 10)

CONVS = (
    Conv("one pixel", (5, 37, 1, 1), (9, 37, 1, 1)),
    Conv("few channels", (33, 4, 1, 1), (96, 4, 1, 1)),
    Conv("pairs", (3, 30, 1, 1), (18, 30, 1, 1)),
    Conv("an image", (3, 6, 5, 4), (7, 6, 5, 4)),
    Conv("a row", (2, 24, 1, 7), (8, 24, 1, 7), (1, 3)),
    Conv("several stages", (20, 700, 1, 1), (40, 700, 1, 1)),
    Conv("many outputs", (70, 96, 1, 1), (300, 96, 1, 1)),
    Conv("one channel", (4, 1, 1, 1), (1, 1, 1, 1)),
)


def _cases() -> list[PassCase]:
    cases = []
    for i, conv in enumerate(CONVS):
        for j, plan in enumerate(PASSES):
            for k, dtype in enumerate(TYPES):
                number = i + j + k
                bias = plan is dense.weight_grad and number % 3 != 0
                gpu = (H200, FEW, SMALL)[number % 3]
                case = PassCase(conv, plan, dtype, number % 2 == 0, gpu=gpu, bias_grad=bias)
                cases.append(replace(case, aligned=number % 5 != 4))
    return cases


CASES = _cases()
RUN = some(CASES, one_in=4)
EPILOGUES = [
    PassCase(CONVS[0], dense.forward, torch.bfloat16, epilogue=Epilogue("gelu", residual=True)),
    PassCase(CONVS[3], dense.forward, epilogue=Epilogue("leaky_relu", 0.3), bias=False),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in (*RUN, *EPILOGUES) for launch in case.plan.launches})


@pytest.mark.parametrize("case", [*RUN, *EPILOGUES], ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("case", [*RUN, *EPILOGUES], ids=str)
def test_isolation(case: PassCase) -> None:
    """Other images, and what lies beyond the tensors, do not reach a result, even as NaN."""
    isolated.check(case)


@pytest.mark.parametrize("shape", dense.SHAPES, ids=str)
@pytest.mark.parametrize("planned", PASSES, ids=lambda one: one.__name__)
def test_tiles_of_every_shape(
    shape: tuple[int, int], planned: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastconv.kernels.dense.plan.SHAPES", (shape,))
    conv = Conv("odd", (37, 45, 1, 1), (43, 45, 1, 1))
    for dtype, channels_last in ((torch.float32, False), (torch.float16, True)):
        bias = planned is dense.weight_grad
        case = PassCase(conv, planned, dtype, channels_last, bias_grad=bias)
        constants = dict(case.plan.launches[0].kernel.constants)
        assert (constants["tile_rows"], constants["tile_columns"]) == shape
        check(case)


@pytest.mark.parametrize("seed", range(60 if ALL else 8))
def test_random_problems(seed: int) -> None:
    draw = Random(seed)
    size = draw.choice([(1, 1), (1, 1), (draw.randint(1, 4), draw.randint(1, 4))])
    channels = draw.choice((1, 3, 8, 20, 64, 130)), draw.choice((1, 2, 8, 24, 65))
    conv = Conv(
        f"drawn {seed}",
        (draw.choice((1, 2, 9, 40)), channels[0], *size),
        (channels[1], channels[0], *size),
        (draw.randint(1, 3), draw.randint(1, 3)),
    )
    planned = draw.choice(PASSES)
    case = PassCase(
        conv, planned, draw.choice(TYPES), draw.random() < 0.5, draw.random() < 0.7,
        gpu=draw.choice(list(GPUS.values())),
        bias_grad=planned is dense.weight_grad and draw.random() < 0.5,
    )  # fmt: skip
    check(case)
    isolated.check(case, seed)


@pytest.mark.parametrize("planned", PASSES[:2], ids=lambda one: one.__name__)
def test_infinity_and_nan(planned: Planner) -> None:
    """They reach the results whose sums have them, as in PyTorch."""
    for conv in (CONVS[3], CONVS[5]):
        case = PassCase(conv, planned)
        tensors = Tensors.random(case)
        at_corners(tensors.grad_output if planned is dense.input_grad else tensors.input)
        check_special_values(case, tensors)


@pytest.mark.parametrize("planned", PASSES[:2], ids=lambda one: one.__name__)
def test_alone_as_in_batch(planned: Planner) -> None:
    for conv in (CONVS[0], CONVS[3], CONVS[5]):
        assert_alone_as_in_batch(PassCase(conv, planned))


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("architecture", ["sm_70", "sm_86", "sm_90a"])
def test_the_batch_decides_neither_the_family_nor_how_sums_are_added(
    direction: str, architecture: str
) -> None:
    def order(plan: Plan) -> tuple[object, ...]:
        constants = dict(plan.launches[0].kernel.constants)
        return (plan.family, constants["slices"], constants["steps"])

    for conv in CONVS:
        for dtype in TYPES:
            case = PassCase(conv, getattr(planner, direction), dtype, gpu=GPUS[architecture])
            assert len({order(in_batch(case, n).plan) for n in (1, 3, 64, 5000)}) == 1, conv


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_bias_of_a_transposed_layer_is_that_of_the_channel(channels_last: bool) -> None:
    """An input gradient's columns are the numbers of an image, several for each channel."""
    case = PassCase(
        Conv("", (3, 5, 2, 3), (4, 5, 2, 3)), dense.input_grad, torch.float32, channels_last
    )
    tensors, bias = Tensors.random(case), torch.randn(5)
    output = new_output(case)
    given = {**tensors_read(case, tensors), "bias": torch.cat([bias, torch.full((64,), torch.nan)])}
    driver.run(case.plan.launches, {**given, "output": output})
    expected = float64(case, tensors) + bias.double().view(5, 1, 1)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (PassCase(Conv("", (1, 8, 4, 4), (8, 8, 3, 3)), dense.forward), "several output"),
        (PassCase(Conv("", (1, 8, 2, 2), (8, 8, 4, 4), padding=(1,) * 4), dense.forward),
         "or padding"),
        (PassCase(Conv("", (1, 8, 1, 1), (8, 2, 1, 1), groups=4), dense.forward), "several groups"),
        (PassCase(Conv("", (1, 8, 2, 2), (8, 8, 2, 2)), dense.forward, channels_last=True,
                  plain_weight=True), "different orders"),
        (PassCase(Conv("", (1, 1024, 1, 1), (1024, 1024, 1, 1)), dense.forward), "1048576 weights"),
        (PassCase(Conv("", (1, 512, 1, 1), (512, 512, 1, 1)), dense.forward, torch.float16),
         "262144 weights"),
        (PassCase(Conv("", (2000, 8, 1, 1), (8, 8, 1, 1)), dense.weight_grad), "2000 images"),
        (PassCase(Conv("", (1, 48, 1, 1), (1152, 48, 1, 1)), dense.forward, torch.bfloat16),
         "48 times 1152 numbers, for tensor cores"),
    ],
)  # fmt: skip
def test_declines(case: PassCase, reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        case.plan  # noqa: B018
