"""Lower bounds by which Hopper's planners skip tiles: no tile takes less than its bound.

Skipping tiles then never changes a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from unittest import mock

import pytest

from fastconv.bench import population
from fastconv.kernels.family import Declined, Operands
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper import passes
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.halo.tiles import tiles_of
from fastconv.kernels.hopper.layers import Layer, forward_ways, input_grad_ways
from fastconv.kernels.hopper.wgrad_halo import plan as wgrad_halo
from fastconv.kernels.planning.layers import views
from fastconv.kernels.planning.limits import ROUNDING
from fastconv.problem import Problem

MODES = (("float", 4, "tf32"), ("float", 4, "ieee"), ("fastconv::bfloat16", 2, "ieee"))
WAYS = {"forward": forward_ways, "input_grad": input_grad_ways}
SEEDS = range(60)
MOST_FLOPS, MOST_ELEMENTS = 1e11, 1e9


def _drawn(draw: Random) -> tuple[Problem, Operands]:
    """A random problem, with operands of any type, layout and alignment."""
    kind = draw.choice((population.workload, population.dense))
    problem = kind(draw, MOST_FLOPS, MOST_ELEMENTS).problem
    scalar, size, precision = draw.choice(MODES)
    _, depth, height, width = problem.weight_shape
    strides = (depth * height * width, height * width, width, 1)
    last, aligned = draw.random() < 0.4, draw.random() < 0.8
    return problem, Operands(scalar, size, last, last, strides, aligned, precision)


def _ways(seed: int) -> Iterator[list[Layer]]:
    for direction in WAYS:
        with suppress(Declined):
            yield from WAYS[direction](*_drawn(Random(f"{seed} {direction}")))


def test_no_halo_tile_takes_less_than_its_shape() -> None:
    layers = (layer for seed in SEEDS for way in _ways(seed) for layer in way)
    count = 0
    for layer in layers:
        with suppress(Declined):
            for tile in tiles_of(views(layer), H200):
                taken = tile.shape.image_tiles * tile.tile_cycles
                assert 0 < tile.shape.least_cycles <= taken * (1 + ROUNDING)
                count += 1
    assert count > 1000


def test_a_convolution_might_take_what_it_takes() -> None:
    count = 0
    for way in (way for seed in SEEDS for way in _ways(seed)):
        with suppress(Declined):
            taken = halo.image_cycles([way], H200)
            assert halo.may_take_less(way, taken * 1.001)
            assert not halo.may_take_less(way, 0.0)
            count += 1
    assert count > len(SEEDS)


@pytest.mark.parametrize("direction", WAYS)
def test_plans_do_not_depend_on_what_is_left_out(direction: str) -> None:
    left_out = 0
    for seed in SEEDS:
        arguments = (*_drawn(Random(f"{seed} {direction}")), H200)
        with suppress(Declined), mock.patch.object(halo, "tiles_of", wraps=tiles_of) as asked:
            planned = getattr(passes, direction)(*arguments)
            few = asked.call_count
            with mock.patch.object(halo, "may_take_less", return_value=True):
                assert getattr(passes, direction)(*arguments) == planned
            left_out += asked.call_count > few  # Tiles from the first plan are cached.
    assert left_out > 0


def _segments(group: wgrad_halo.Tile) -> Iterator[wgrad_halo.Tile]:
    for segments in range(1, group.segments + 1):
        yield replace(group, segments=segments)


def test_no_tile_of_a_weight_gradient_takes_less_than_its_group() -> None:
    layers = (layer for seed in SEEDS for layer in wgrad_halo._layers(*_drawn(Random(seed)), None))
    for layer in layers:
        for group in wgrad_halo._groups(layer, H200):
            for grad_cycles in (0.0, 1e3, 1e6):
                bound = group.least_group_cycles(H200, grad_cycles)
                least = min(one.least_cycles(H200, grad_cycles) for one in _segments(group))
                assert 0 < bound <= least


def test_tiles_of_a_weight_gradient_come_in_order() -> None:
    for seed in SEEDS:
        problem, operands = _drawn(Random(seed))
        found = list(wgrad_halo._by_bounds(problem, operands, H200, None))
        bounds = [bound for bound, _ in found]
        assert bounds == sorted(bounds)
        layers = wgrad_halo._layers(problem, operands, None)
        groups = [group for layer in layers for group in wgrad_halo._groups(layer, H200)]
        every = [one for group in groups for one in _segments(group)]
        assert len(found) == sum(one.least_grad_cycles < math.inf for one in every)
        assert {tile for _, tile in found} <= set(every)
