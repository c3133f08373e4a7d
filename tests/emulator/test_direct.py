"""The portable kernels on the CPU: every pass, type and layout on small odd shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emulator import precompile, run_both_orders
from emulator.pass_cases import (
    BATCH,
    SCALARS,
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_correct,
    check,
    float64,
    in_batch,
    new_output,
    run,
    some,
)
from fastconv.kernels import direct
from fastconv.kernels.direct import limits
from fastconv.kernels.family import Constant, Gpu, Kernel
from fastconv.kernels.gpus import GPUS

# One SM: any problem has more blocks than run at once, so weights are packed and pixels are not
# split.
TINY = replace(GPUS["sm_75"], sm_count=1)

CONVS = (
    Conv("asymmetric", (2, 3, 9, 20), (5, 3, 5, 9), padding=(2, 2, 4, 4), dilation=(1, 1)),
    Conv("dilated", (1, 5, 15, 16), (9, 5, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
    Conv("strided", (1, 4, 11, 14), (6, 4, 3, 3), stride=(2, 3), padding=(1, 1, 0, 2)),
    Conv("stride and dilation share a factor", (1, 2, 13, 17), (3, 2, 3, 3), (4, 2), (3, 0, 1, 2),
         (2, 4)),
    Conv("pointwise", (2, 17, 5, 7), (20, 17, 1, 1)),
    Conv("strided pointwise", (1, 6, 7, 9), (4, 6, 1, 1), stride=(2, 2)),
    Conv("depthwise", (1, 6, 8, 12), (6, 1, 3, 5), padding=(1, 1, 2, 2), groups=6),
    Conv("multiplier", (2, 3, 7, 7), (6, 1, 2, 2), groups=3),
    Conv("grouped", (1, 8, 6, 10), (12, 4, 3, 3), padding=(1, 0, 0, 1), groups=2),
    Conv("long row", (1, 2, 4, 40), (2, 2, 1, 21), padding=(0, 0, 10, 10)),
    Conv("many channels", (1, 20, 6, 8), (40, 20, 3, 3), padding=(1, 1, 1, 1)),
    Conv("one pixel", (1, 3, 3, 3), (2, 3, 3, 3)),
)  # fmt: skip
FAR_APART = (  # more pixels between taps than shared memory or registers hold
    Conv("far apart", (1, 1, 2, 9100), (2, 1, 1, 3), stride=(1, 500), dilation=(1, 4000)),
    Conv("apart", (1, 3, 3, 230), (4, 3, 2, 3), stride=(1, 2), dilation=(1, 100)),
)
SPARSE = (  # some input gradients have no tap, or only taps of padding
    Conv("stride beyond the kernel", (2, 3, 9, 14), (4, 3, 2, 3), (4, 5), (1, 0, 2, 1)),
    Conv("stride beyond the image", (2, 4, 4, 6), (3, 4, 3, 3), (1000, 10**7), (1, 1, 1, 1)),
    Conv("stride of rows alone", (1, 4, 9, 16), (4, 4, 1, 3), (3, 1), (1, 0, 1, 1)),
    Conv("columns far before the image", (1, 2, 9, 11), (3, 2, 1, 2), (2, 7), (0, 1, 13, 9)),
    Conv("taps in padding alone", (1, 2, 5, 5), (3, 2, 1, 1), (10, 10), (3, 3, 3, 3)),
    Conv("dilated by more than the stride", (1, 4, 17, 20), (6, 2, 3, 4), (6, 4), (2, 5, 0, 3),
         (9, 6), groups=2),
    Conv("dilated by the stride", (1, 3, 11, 16), (8, 3, 3, 3), (2, 2), (3, 2, 2, 3), (2, 2)),
    Conv("depthwise", (2, 5, 8, 12), (10, 1, 1, 2), (3, 4), (0, 0, 0, 1), groups=5),
)  # fmt: skip
# Convolutions whose plans depend on the GPU's amount of shared memory.
TIGHT = (
    Conv("128 of 16", (1, 16, 5, 34), (128, 16, 3, 3), padding=(1, 1, 1, 1)),
    Conv("column of taps", (1, 64, 12, 20), (4, 64, 9, 1), padding=(4, 4, 0, 0)),
    Conv("stem", (1, 3, 12, 40), (96, 3, 7, 7), stride=(2, 2), padding=(3, 3, 3, 3)),
)
PASSES = (direct.forward, direct.input_grad, direct.weight_grad)


def _by_memory() -> list[Gpu]:
    """GPUs, one for each amount of shared memory."""
    distinct = {gpu.shared_bytes_per_block: gpu for gpu in GPUS.values()}
    return list(distinct.values())


def _cases() -> list[PassCase]:
    cases = [PassCase(conv, planner) for conv in (*CONVS, *FAR_APART) for planner in PASSES]
    for i, conv in enumerate(CONVS):
        for planner in PASSES:
            dtype = list(SCALARS)[i % len(SCALARS)]
            bias = planner is direct.weight_grad
            cases.append(PassCase(conv, planner, dtype, channels_last=True, bias_grad=bias))
            cases.append(PassCase(conv, planner, list(SCALARS)[(i + 1) % len(SCALARS)], gpu=TINY))
    for planner in PASSES:
        bias = planner is direct.weight_grad
        cases += [PassCase(CONVS[0], planner, dtype, bias_grad=bias) for dtype in SCALARS]
        cases.append(PassCase(CONVS[0], planner, aligned=False))
        cases.append(PassCase(CONVS[1], planner, torch.float16, aligned=False))
        cases.append(PassCase(CONVS[10], planner, gpu=GPUS["sm_75"]))
    for i, conv in enumerate(SPARSE):
        dtype = list(SCALARS)[i % len(SCALARS)]
        cases.append(PassCase(conv, direct.input_grad, aligned=i % 3 != 2))
        cases.append(PassCase(conv, direct.input_grad, dtype, i % 2 == 1, gpu=TINY))
        cases.append(PassCase(conv, PASSES[i % 2 * 2], dtype, i % 2 == 0))
    for i, gpu in enumerate(_by_memory()):
        cases += [PassCase(conv, direct.weight_grad, gpu=gpu, bias_grad=True) for conv in TIGHT]
        cases.append(
            PassCase(TIGHT[2], direct.input_grad, list(SCALARS)[i % 4], i % 2 == 0, gpu=gpu)
        )
    return list(dict.fromkeys(cases))


CASES = _cases()
RUN = some(CASES, one_in=9)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("planner", [direct.forward, direct.weight_grad])
def test_infinity_stays_where_it_is(planner: Planner) -> None:
    """Padding, zero weights of tiles and pixels beyond the image do not meet the infinity."""
    case = PassCase(Conv("infinite", (1, 2, 5, 11), (2, 2, 2, 3), stride=(2, 2)), planner)
    tensors = Tensors.random(case)
    tensors.input[0, 0, 4, 10] = torch.inf  # only the last output pixel reads it
    actual, expected = run(case, tensors), float64(case, tensors)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


# --- Offsets beyond 32 bits -----------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("planner", PASSES)
def test_strides_that_lead_far_beyond_the_image(planner: Planner, channels_last: bool) -> None:
    """Only the first output reads the image; positions after the last one exceed 2^31."""
    near, far = (
        Conv(name, (2, 2, 3, 4), (3, 2, 2, 1), stride, padding)
        for name, stride, padding in (
            ("near", (8, 8), (0, 9, 0, 9)),
            ("far", (2**30, 2**30), (0, 2**30 + 7, 0, 2**30 + 7)),
        )
    )
    assert near.problem.output_shape == far.problem.output_shape == (2, 3, 2, 2)
    case = PassCase(far, planner, channels_last=channels_last)
    tensors = Tensors.random(case)
    assert_correct(replace(case, conv=near), tensors, run(case, tensors))


def test_units_beyond_32_bits() -> None:
    """So many units take a CPU too long, so only the constant for them is set."""
    case = PassCase(CONVS[0], direct.weight_grad)
    tensors = Tensors.random(case)
    expected = run(case, tensors)
    actual, plan = new_output(case), case.plan
    launches = [
        replace(launch, kernel=replace(launch.kernel, constants=_wide(launch.kernel)))
        for launch in plan.launches
    ]
    scratch = torch.full((plan.scratch_bytes,), 255, dtype=torch.uint8)
    read = {"grad_output": tensors.grad_output, "input": tensors.input}
    run_both_orders(launches, {**read, "output": actual, "scratch": scratch})
    assert actual.equal(expected)


def _wide(kernel: Kernel) -> tuple[tuple[str, Constant], ...]:
    constants = dict(kernel.constants)
    assert constants["wide_units"] is False
    return tuple({**constants, "wide_units": True}.items())


@pytest.mark.parametrize("planner", [direct.forward, direct.input_grad])
def test_images_that_several_launches_share_out(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = in_batch(PassCase(CONVS[2], planner))
    whole = case.plan.launches[-1].grid[0]
    monkeypatch.setattr(limits, "MOST_BLOCKS", whole * 2 // BATCH)
    launches = [launch for launch in case.plan.launches if launch.kernel.entry == "convolve"]
    assert [launch.arguments[-2:] for launch in launches] == [(0, 2), (2, 2), (4, 1)]
    check(case)
