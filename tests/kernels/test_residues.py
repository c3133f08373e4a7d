"""Strided input gradients: by residues of the stride, or with depth-to-space."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastconv.kernels import planner
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.layers import input_grad_ways
from fastconv.kernels.planning import layers
from planner_cases import (
    TENSOR_CORE_MODES,
    make_operands,
    make_problem,
    packed_layers,
)


def test_residues_of_far_strides() -> None:
    """There are as many residues as taps reach, whatever the stride, and no more time is taken."""
    problem = make_problem((1, 1, 1, 20), (1, 1, 1, 3), stride=(1, 10**9), padding=(0, 0, 1, 0))
    placings = [residue.placing for residue in layers.residues(problem, 1)]
    assert [placing[:4] for placing in placings] == [
        (10**9, 0, 0, 1),
        (10**9, 1, 1, 2),
        (10**9, 10**9 - 1, 2, 10**9),
    ]


@settings(max_examples=300)
@given(
    size=st.integers(1, 12),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 6),
    dilation=st.integers(1, 4),
    padding=st.integers(0, 5),
)
def test_positions_without_a_tap(
    size: int, kernel: int, stride: int, dilation: int, padding: int
) -> None:
    """Residues together reach every position, or the problem says that they do not."""
    size += dilation * (kernel - 1)  # the kernel fits
    problem = make_problem(
        (1, 1, 1, size), (1, 1, 1, kernel), stride=(1, stride), padding=(0, 0, padding, padding),
        dilation=(1, dilation),
    )  # fmt: skip
    reached = {
        place
        for place, tap in product(range(size), range(kernel))
        if (place + padding - tap * dilation) % stride == 0
    }
    assert problem.reaches_every_input == (reached == set(range(size)))
    placings = [residue.placing for residue in layers.residues(problem, 1)]
    cleared = any(placing.end - placing.begin > 1 for placing in placings)
    assert problem.reaches_every_input or cleared


@settings(max_examples=200)
@given(
    size=st.integers(1, 40),
    kernel=st.integers(1, 9),
    stride=st.integers(1, 8),
    dilation=st.integers(1, 9),
    padding=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_residues_are_the_gradient(
    size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int]
) -> None:
    """Along one axis, every term is added once, and every position is written once."""
    shape = (1, 1, 1, size + dilation * (kernel - 1))  # the kernel fits
    problem = make_problem(
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
        for residue in way:
            to = residue.placing
            for q in range(residue.size):
                written += range(to.step * q + to.begin, to.step * q + to.end)
                for column, tap in product(range(to.outputs), range(residue.taps)):
                    at = to.step * q + to.at + column
                    out = q - residue.padding + tap * residue.dilation
                    place = to.last_tap - tap * to.tap_step + column
                    weight, between = divmod(place, to.tap_dilation)
                    inside = 0 <= at < width and 0 <= out < out_width
                    if inside and 0 <= weight < kernel and not between:
                        terms.append((at, weight, out))
        assert sorted(terms) == expected
        assert sorted(at for at in written if 0 <= at < width) == [*range(width)]


def test_depth_to_space_begins_where_taps_are_fewest() -> None:
    """AlexNet's padding makes it 3 taps instead of 4, for 57 positions instead of 56."""
    early = layers.depth_to_space(ALEXNET, 0)
    assert (early.placing.begin, early.taps, early.size) == (-2, 3, 57)
    # With ResNet's padding, steps that begin with the image have as few taps.
    problem = make_problem((1, 3, 224, 224), (64, 3, 7, 7), stride=(2, 2), padding=(3, 3, 3, 3))
    late = layers.depth_to_space(problem, 0)
    assert (late.placing.begin, late.taps, late.size) == (0, 4, 112)
    # Each of three taps reaches a residue of its own. If the first begins a step, all read alike.
    problem = make_problem((1, 3, 318, 318), (64, 3, 3, 3), stride=(5, 5), padding=(1, 1, 1, 1),
                           dilation=(2, 2))  # fmt: skip
    dilated = layers.depth_to_space(problem, 0)
    assert (dilated.placing.begin, dilated.taps, dilated.size) == (-1, 1, 64)


ALEXNET = make_problem((256, 3, 224, 224), (96, 3, 11, 11), stride=(4, 4), padding=(2, 2, 2, 2))


@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_few_channels_take_depth_to_space(mode: str, channels_last: bool) -> None:
    """There is one pair of launches instead of 16, and rows of the image are stored whole."""
    plan = planner.input_grad(ALEXNET, make_operands(ALEXNET, mode, channels_last), H200)
    ((_, _, constants),) = packed_layers(plan)
    assert (constants["d2s_height"], constants["d2s_width"]) == (4, 4)
    assert constants["interleave"] == (12 if channels_last else 4)
    assert constants["bulk_stores"]
    assert plan.packs == 1


NO_DEPTH_TO_SPACE = {
    "more channels of neighbours": ((4, 48, 40, 40), (64, 48, 3, 3), {}),
    "more neighbours than an MMA has rows": ((4, 3, 40, 40), (64, 3, 3, 3), {"stride": (2, 33)}),
    "groups of a pixel": ((4, 32, 40, 40), (64, 16, 3, 3), {"groups": 2}),
}


@pytest.mark.parametrize(
    ("shape", "weight", "options"), NO_DEPTH_TO_SPACE.values(), ids=NO_DEPTH_TO_SPACE
)
def test_what_takes_no_depth_to_space(
    shape: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]
) -> None:
    problem = make_problem(shape, weight, **{"stride": (2, 2), **options})
    ways = input_grad_ways(problem, make_operands(problem, "tf32", channels_last=True))
    assert not any(way[0].depth_to_space for way in ways)


def test_portable_kernels_instead_of_depth_to_space() -> None:
    """Residues alone are declined, and the halo is so tall that tiles are narrow."""
    problem = make_problem(
        (32, 1, 161, 400), (32, 1, 41, 11), stride=(2, 2), padding=(20, 20, 5, 5)
    )  # fmt: skip
    operands = make_operands(problem, "ieee")
    assert any(way[0].depth_to_space for way in input_grad_ways(problem, operands))
    assert planner.input_grad(problem, operands, H200).family != "hopper"


def test_so_many_residues_take_depth_to_space_or_nothing() -> None:
    patches = make_problem((4, 3, 224, 224), (768, 3, 16, 16), stride=(16, 16))
    plan = planner.input_grad(patches, make_operands(patches, "tf32"), H200)
    assert plan.family == "hopper"
    assert len(packed_layers(plan)) == 1


DOWNSAMPLING = {
    "3x3": make_problem((32, 128, 56, 56), (128, 128, 3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
    "1x1": make_problem((32, 256, 56, 56), (512, 256, 1, 1), stride=(2, 2)),
}


@pytest.mark.parametrize("mode", TENSOR_CORE_MODES)
def test_strided_gradients_run_by_residues(mode: str) -> None:
    for channels_last, counts in ((False, {"3x3": 2, "1x1": 1}), (True, {"3x3": 4, "1x1": 1})):
        for name, problem in DOWNSAMPLING.items():
            ways = input_grad_ways(problem, make_operands(problem, mode, channels_last))
            plan, *others = halo.alternatives(ways, H200, 4)
            assert len(packed_layers(plan)) == counts[name]
            assert len(packed_layers(others[-1])) == counts[name]
            assert {other.key for other in others} == {plan.key}
            assert len({other.choice for other in (plan, *others)}) == 4
            # Bulk copies store contiguous rows whole.
            for _, _, constants in packed_layers(plan):
                assert constants["bulk_stores"] != channels_last
