"""Hopper's weight gradient with float32 as scaled fp16: scales, counts of lost bits, and repair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from emulator import precompile, test_hopper_wgrad_halo
from emulator.driver import run_both_orders
from emulator.pass_cases import (
    Conv,
    PassCase,
    Tensors,
    assert_correct,
    check,
    check_special_values,
    new_output,
    run,
    some,
    tensors_read,
)
from emulator.test_hopper_wgrad_halo import (
    CONVS,
    GPU,
    IN_BOXES,
    MODES,
    SHIFTED,
    put_special_values,
)
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.hopper.wgrad_halo import plan as by_tiles
from fastconv.kernels.hopper.wgrad_halo import tiles
from fastconv.problem import Problem

PRECISIONS = ("tf32", "ieee")


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans with scaled fp16, even where it is not the fastest."""
    return by_tiles.plan(by_tiles.choose_tile(problem, operands, gpu, scaled_fp16=True), gpu)


def _case(conv: Conv, precision: str, aligned: bool = True, bias: bool = False) -> PassCase:
    return PassCase(
        conv, weight_grad, aligned=aligned, gpu=GPU, precision=precision, bias_grad=bias
    )


CASES = [
    *(_case(conv, PRECISIONS[i % 2], bias=i % 3 == 0) for i, conv in enumerate(CONVS)),
    *(_case(conv, PRECISIONS[(i + 1) % 2], bias=i % 3 == 1) for i, conv in enumerate(CONVS)),
    *(_case(CONVS[0], precision, aligned=False) for precision in PRECISIONS),
    *(_case(replace(CONVS[8], input=(17, *CONVS[8].input[1:])), one) for one in PRECISIONS),
]  # fmt: skip
RUN = some(CASES, one_in=9)

# One TMA box is a stage: of whole rows, or of pixels of consecutive rows; with 64 or 128 bytes in a
# row, with batches that stages do not divide, and with two groups.
BOXES = (
    (Conv("boxes", (8, 12, 5, 44), (70, 12, 2, 3), padding=(1, 0, 1, 1)), 16),
    (Conv("boxes of groups", (10, 18, 5, 41), (80, 9, 3, 2), groups=2), 32),
    (Conv("boxes of many outputs", (8, 8, 3, 38), (130, 8, 1, 3)), 16),
    (Conv("boxes that are cleared", (10, 9, 6, 40), (70, 9, 3, 3)), 32),
    (Conv("boxes of odd rows", (8, 9, 8, 37), (20, 9, 1, 1)), 16),
)


BOX_CASES = [
    replace(_case(conv, precision, bias=i % 2 == 0), planner=IN_BOXES[columns, True])
    for i, ((conv, columns), precision) in enumerate(product(BOXES, PRECISIONS))
]
CASES += BOX_CASES
RUN += some(BOX_CASES, one_in=5)

NO_POWER = 2.0**113  # marks channels whose sample is all zeros

# Tests change the values of these. They have several blocks, and several planes of each channel.
PLAIN = [
    _case(Conv("plain", (3, 11, 9, 20), (20, 11, 3, 3), padding=(1, 1, 1, 1)), precision)
    for precision in PRECISIONS
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in [*RUN, *PLAIN] for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


def test_cases_cover_all_branches() -> None:
    planned = [case.plan.launches for case in CASES]
    entries = ["scale", "weight_grad", "reduce", "weight_grad", "reduce"]
    assert all([launch.kernel.entry for launch in one] == entries for one in planned)
    first = [dict(one[1].kernel.constants) for one in planned]
    second = [dict(one[3].kernel.constants) for one in planned]
    assert all(one["scaled_fp16"] and not one["repairs"] for one in first)
    assert all(one["repairs"] and not one["scaled_fp16"] and not one["bias"] for one in second)
    for name, parts in product(("bias", "grad_bulk", "vector_input"), (1, 2)):
        assert {one[name] for one in first if one["parts"] == parts} == {False, True}, name
    assert {one["interleaved_images"] for one in first} == {1, 8}
    assert {one["channel_groups"] for one in first} == {1, 2}
    assert {one["lead"] for one in first} >= {0, 2}
    boxes = {(one["stage_columns"], one["lead"] > 0) for one in first if one["grad_boxes"]}
    assert boxes == {*product((16, 32), (False, True))}


@dataclass
class BeforeRepair:
    """The result of the scaled fp16 pass before the repair, and its tables."""

    grad: Tensor
    powers: Tensor  # scales of input channels, then of output channels
    lossy: Tensor
    marks: Tensor  # whether to repair, by output and input channel

    @classmethod
    def of(cls, case: PassCase, tensors: Tensors) -> BeforeRepair:
        plan, output = case.plan, new_output(case)
        scratch = torch.full((plan.scratch_bytes,), 255, dtype=torch.uint8)
        read = tensors_read(case, tensors)
        run_both_orders(plan.launches[:3], {**read, "output": output, "scratch": scratch})
        outputs, inputs = case.conv.weight[:2]
        channels = inputs * case.conv.groups + outputs
        powers, lossy, marks, _ = scratch.split(
            [4 * channels, 4 * channels, 4 * outputs * inputs,
             len(scratch) - 4 * (2 * channels + outputs * inputs)]
        )  # fmt: skip
        return cls(
            output,
            powers.view(torch.float),
            lossy.view(torch.int),
            marks.view(torch.int).view(outputs, inputs).ne(0),
        )


@pytest.mark.parametrize(
    ("size", "case"), some(product([1.0, 1e-6, 3e4, 1e-12, 1e14], PLAIN), one_in=3), ids=str
)
def test_numbers_of_any_size_need_no_repair(case: PassCase, size: float) -> None:
    tensors = Tensors.random(case)
    tensors = replace(tensors, input=tensors.input * size, grad_output=tensors.grad_output * 3e-5)
    tensors.input[:, :, :3] = 0  # as after a ReLU
    tensors.grad_output[:, :, 2:4] = 0
    first = BeforeRepair.of(case, tensors)
    assert first.powers.ne(NO_POWER).all()
    assert not first.lossy.any()
    assert not first.marks.any()
    assert_correct(case, tensors, first.grad)


def _with_outlier(number: float) -> Callable[[Tensor], None]:
    """Sets one number of a channel."""

    def change(channel: Tensor) -> None:
        channel[1, 4, 7] = number

    return change


def _wide(channel: Tensor) -> None:
    """Multiplies by powers of two from 2^-38 to 2^38, uniformly distributed."""
    channel.mul_(torch.exp2(torch.randint(-38, 39, channel.shape).float()))


def _all_but_one(factor: float) -> Callable[[Tensor], None]:
    """Makes all numbers small except one, which the sample includes."""

    def change(channel: Tensor) -> None:
        channel.mul_(factor)
        channel[1, 4, 7] = 1.0

    return change


# Changes to one channel of either tensor, in all images, after which scaled fp16 is not exact.
BEYOND = {
    "a huge number": _with_outlier(1e12),
    "near the largest number": _with_outlier(3e38),
    "small but for one": _all_but_one(2.0**-30),
    "tiny but for one": _all_but_one(2.0**-90),
    "denormal but for one": _all_but_one(2.0**-130),
    "many magnitudes": _wide,
    "one small image": lambda channel: channel[1].mul_(2.0**-40),
    "too large for any power": lambda channel: channel.mul_(1e30),
    "too small for any power": lambda channel: channel.mul_(1e-30),
}


@pytest.mark.parametrize(
    ("beyond", "which", "case"),
    some(product(BEYOND, ("input", "grad_output"), PLAIN), one_in=3),
    ids=str,
)
def test_channels_that_do_not_fit_are_repaired(case: PassCase, which: str, beyond: str) -> None:
    """Other channels keep their bits."""
    tensors = Tensors.random(case)
    unchanged = run(case, tensors)
    BEYOND[beyond](getattr(tensors, which)[:, 5])
    other = _hide_outlier(tensors, which)
    if beyond in ("near the largest number", "too large for any power"):
        other.mul_(1e-20)
    unchanged_with = replace(tensors, **{which: getattr(tensors, which).clone()})
    getattr(unchanged_with, which)[:, 5] = 0
    expected = run(case, unchanged_with)
    actual = run(case, tensors)
    of_channel, others = _of_channel(which, 5)
    if beyond == "denormal but for one" and case.precision == "ieee":
        # TF32 cannot represent the low parts of such numbers.
        in_tf32 = run(replace(case, planner=test_hopper_wgrad_halo.weight_grad), tensors)
        assert actual[of_channel].equal(in_tf32[of_channel])
    else:
        assert_correct(case, tensors, actual)
    assert actual[others].equal(expected[others])
    assert not actual[of_channel].equal(unchanged[of_channel])


def _hide_outlier(tensors: Tensors, which: str) -> Tensor:
    """Zeroes the other tensor around the outlier, which then only sets the scale; returns it."""
    other = tensors.grad_output if which == "input" else tensors.input
    other[1, :, 2:7, 4:11] = 0
    return other


def _of_channel(which: str, channel: int) -> tuple[Any, Any]:
    """Indices of the weights of a channel, and of all others."""
    outputs, inputs = PLAIN[0].conv.weight[:2]
    if which == "input":
        return (slice(None), channel), (slice(None), [i for i in range(inputs) if i != channel])
    return (channel,), ([i for i in range(outputs) if i != channel],)


LOSSY = ("small but for one", "tiny but for one", "denormal but for one")


@pytest.mark.parametrize(
    ("beyond", "which", "case"),
    some(product(LOSSY, ("input", "grad_output"), PLAIN), one_in=3),
    ids=str,
)
def test_float16_alone_would_be_wrong(case: PassCase, which: str, beyond: str) -> None:
    """Without marks, the result would be finite and wrong."""
    tensors = Tensors.random(case)
    BEYOND[beyond](getattr(tensors, which)[:, 5])
    _hide_outlier(tensors, which)
    first = BeforeRepair.of(case, tensors)
    of_channel, others = _of_channel(which, 5)
    assert first.grad.isfinite().all()
    assert first.marks[of_channel].all()
    assert not first.marks[others].any()
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_correct(case, tensors, first.grad)


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("which", ["input", "grad_output"])
def test_terms_that_are_all_of_a_weight(case: PassCase, which: str) -> None:
    """Some weights are sums of only one small number, in a channel of large ones."""
    tensors = Tensors.random(case)
    first = getattr(tensors, which)
    other = tensors.grad_output if which == "input" else tensors.input
    first[0, 4, 5, 9] = 1.234567 * 2.0**-30
    other[:, 6] = 0
    other[0, 6, 5, 9] = 1.0
    first = BeforeRepair.of(case, tensors)
    pair = (6, 4) if which == "input" else (4, 6)
    assert first.marks[pair]
    # Other weights need no repair.
    first.marks[pair] = False
    assert not first.marks.any()
    assert_correct(case, tensors, run(case, tensors))


def test_a_few_small_numbers_do_no_harm() -> None:
    """One in 10^7 normal numbers is too small, and contributes little to most weights."""
    for case in PLAIN:
        tensors = Tensors.random(case)
        tensors.input[0, 4, 5, 9] *= 2.0**-30
        tensors.grad_output[2, 7, 1, 1] *= 2.0**-30
        first = BeforeRepair.of(case, tensors)
        assert first.lossy.nonzero().flatten().tolist() == [4, 11 + 7]
        assert not first.marks.any()
        assert_correct(case, tensors, first.grad)


def test_channels_of_zeros_fit() -> None:
    """A ReLU can zero whole channels, also next to numbers that lose bits."""
    case = PLAIN[0]
    tensors = Tensors.random(case)
    tensors.input[:, 3] = 0
    tensors.grad_output[:, 9] = -0.0
    tensors.grad_output[2, 7, 1, 1] *= 2.0**-30
    first = BeforeRepair.of(case, tensors)
    assert not first.marks.any()
    assert first.grad[:, 3].eq(0).all()
    assert first.grad[9].eq(0).all()
    assert_correct(case, tensors, first.grad)


def test_a_number_that_no_sample_has() -> None:
    """A channel is zero except for one number, and its image too large to be sampled whole."""
    conv = Conv("sampled", (1, 8, 260, 300), (8, 8, 1, 1))
    case = _case(conv, "tf32")
    tensors = Tensors.random(case)
    tensors.input[:, 3] = 0
    tensors.input[0, 3, 130, 35] = 1e-3  # between two pieces of the sample
    first = BeforeRepair.of(case, tensors)
    assert first.powers[3] == NO_POWER
    assert first.marks[:, 3].all()
    assert first.marks.sum() == 8
    assert_correct(case, tensors, run(case, tensors))


def _powers(count: int) -> Tensor:
    """Random powers of two from 2^-40 to 2^40, both ends included."""
    exponents = torch.randint(-40, 41, (count,))
    exponents[0], exponents[-1] = -40, 40
    return torch.exp2(exponents.float())


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_units_do_not_matter(case: PassCase) -> None:
    """Scaling a channel by a power of two scales results exactly, with a repair or without."""
    tensors = Tensors.random(case)
    BEYOND["small but for one"](tensors.input[:, 2])
    _hide_outlier(tensors, "input")
    outputs, inputs = case.conv.weight[:2]
    of_inputs, of_outputs = _powers(inputs), _powers(outputs)
    scaled = replace(
        tensors,
        input=tensors.input * of_inputs[:, None, None],
        grad_output=tensors.grad_output * of_outputs[:, None, None],
    )
    marks = BeforeRepair.of(case, scaled).marks
    assert marks[:, 2].all()
    assert marks.sum() == outputs
    both = of_outputs[:, None] * of_inputs
    assert run(case, scaled).equal(run(case, tensors) * both[..., None, None])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_infinity_stays_where_it_is(precision: str) -> None:
    case = _case(SHIFTED, precision)
    tensors = Tensors.random(case)
    put_special_values(tensors.input)
    tensors.grad_output[0, 7, 1, 65] = -torch.inf  # meets an infinity of the input
    tensors.grad_output[0, 8, 2, 60] = torch.nan
    check_special_values(case, tensors)


def test_blocks_that_scale_several_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_tiles, "MOST_PACK_BLOCKS", 3)
    assert PLAIN[0].plan.launches[0].grid == (3, 1, 1)
    check(PLAIN[0])


def test_tiles_in_rounds() -> None:
    """A tile's channels are marked when the tile is complete, by its own counts."""
    conv = Conv("many outputs", (1, 16, 5, 9), (200, 16, 3, 3))
    case = _case(conv, "tf32")
    tile = by_tiles.choose_tile(conv.problem, _operands(conv), GPU, scaled_fp16=True)
    assert tile.count > 1
    with mock.patch.object(tiles, "WORKSPACE_BYTES", tile.block_bytes):
        planned = case.plan
        assert len(planned.launches) == 1 + 2 * 2 * tile.count
        tensors = Tensors.random(case)
        tensors.grad_output[:, 150] *= 2.0**-30
        tensors.grad_output[0, 150, 1, 3] = 1.0
        assert_correct(case, tensors, run(case, tensors))


def test_numbers_are_counted_once() -> None:
    """Blocks of a launch with the same output channels divide the counting among themselves."""
    conv = Conv("many inputs", (3, 80, 7, 20), (16, 80, 3, 3))
    case = _case(conv, "tf32")
    tile = by_tiles.choose_tile(conv.problem, _operands(conv), GPU, scaled_fp16=True)
    assert tile.count > 2
    tensors = Tensors.random(case)
    tensors.grad_output[:, 4, :, ::5] *= 2.0**-30
    counts = []
    for count in (1, 2, tile.count):
        with mock.patch.object(tiles, "WORKSPACE_BYTES", count * tile.block_bytes):
            counts.append(BeforeRepair.of(case, tensors).lossy[80:])
    assert all(count.equal(counts[0]) for count in counts)
    assert counts[0].nonzero().tolist() == [[4]]


def _operands(conv: Conv) -> Operands:
    strides = torch.empty(conv.weight, device="meta").stride()
    return Operands("float", 4, False, False, strides, True, MODES["tf32"][1])


def test_only_where_it_is_faster() -> None:
    """Planned for large layers that are bound by MMAs, and only for contiguous float32."""
    large = Conv("large", (8, 32, 512, 512), (64, 32, 5, 9))
    small = Conv("small", (8, 32, 16, 16), (64, 32, 5, 9))
    h200 = replace(GPU, sm_count=132)

    def scaled_fp16(conv: Conv, **changes: Any) -> bool:
        operands = replace(_operands(conv), **changes)
        return by_tiles.choose_tile(conv.problem, operands, h200).layer.scaled_fp16

    assert scaled_fp16(large)
    assert scaled_fp16(large, precision="ieee")
    assert not scaled_fp16(small)
    assert not scaled_fp16(large, input_channels_last=True)
    assert not scaled_fp16(large, output_channels_last=True)
    assert not scaled_fp16(large, scalar="fastconv::bfloat16", scalar_bytes=2)
