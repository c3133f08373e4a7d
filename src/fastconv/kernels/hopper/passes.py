"""Plans each pass with one of Hopper's kernels: the one with the fewest estimated cycles.

Kernels add up sums in different orders, and the bits of an image must not depend on its batch. So
for forward passes and input gradients, the estimates are of one image of a large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.few_outputs import plan as few_outputs
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.implicit_gemm_nchw import plan as implicit_gemm_nchw
from fastconv.kernels.hopper.implicit_gemm_nhwc import plan as implicit_gemm_nhwc
from fastconv.kernels.hopper.layers import Layer, forward_ways, input_grad_ways
from fastconv.kernels.hopper.relayout import plan as relayout
from fastconv.kernels.hopper.wgrad_few_inputs import plan as wgrad_few_inputs
from fastconv.kernels.hopper.wgrad_halo import plan as wgrad_halo
from fastconv.kernels.hopper.wgrad_implicit_gemm import plan as wgrad_implicit_gemm
from fastconv.kernels.planning import limits, portable
from fastconv.kernels.planning.layers import MOST_RESIDUES
from fastconv.problem import Problem

# The halo kernel's estimates serve to choose among its tiles. Measured times were 0.7 to 0.8 of
# them for large images, and about equal to them for small ones.
HALO_SHARE = 0.92
# The same for layers with residues as channels: measured 0.8 (ResNet-50's first layer) to 1.9
# (AlexNet's first, in TF32).
D2S_SHARE = 1.2
# The same for 16-bit contiguous weight gradients, against which channels-last copies have to win.
GATHER_SHARE = 0.75

_WAYS = {"forward": forward_ways, "input_grad": input_grad_ways}


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    return _choice("forward", problem, operands, gpu).plan()


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: tensor ``input`` is the output's gradient, ``output`` the input's.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    return _choice("input_grad", problem, operands, gpu).plan()


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output`` (the gradient).

    With ``operands.bias_grad``, tensor ``bias_grad`` is filled in the same pass.
    ``operands.input_channels_last`` is the input's format, ``output_channels_last`` that of the
    output's gradient, ``weight_strides`` the result's.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    channels = (problem.in_channels // problem.groups, problem.out_channels // problem.groups)
    sizes = limits.volume_sizes(problem)
    block.check(gpu)
    limits.check(operands, problem.groups, channels, *sizes)
    limits.check_reach(problem, operands)
    reasons: list[str] = []  # not the exceptions: see Declined
    most = portable.wgrad_cycles(problem, gpu) + wgrad_halo.BLOCK_CYCLES
    ways: list[_Way] = []
    for way in _WEIGHT_GRADS if problem.depth is None else _WEIGHT_GRADS_OF_VOLUMES:
        try:
            ways.append(way(problem, operands, gpu, most))
        except Declined as reason:
            reasons.append(str(reason))
    if not ways:
        raise Declined(reasons[0])
    cycles, chosen = min(ways, key=lambda way: way[0])
    if cycles > most:
        raise Declined(wgrad_halo.FEW)
    return chosen()


_Way = tuple[float, Callable[[], Plan]]
"""A way to compute a weight gradient: its estimated cycles, and a function that plans it."""


def _halo_tiles(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    tile = wgrad_halo.choose_tile(problem, operands, gpu, most)
    return tile.cycles(gpu), partial(wgrad_halo.plan, tile, gpu)


def _few_inputs(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    layer = wgrad_few_inputs.layer_of(problem, operands, gpu)
    return layer.cycles(gpu), partial(wgrad_few_inputs.plan, layer, gpu)


def _implicit_gemm(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    layer = wgrad_implicit_gemm.layer_of(problem.without_idle_dilation, operands, gpu)
    return _gemm_way(layer, gpu)


def _mirrored(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    layer = wgrad_implicit_gemm.mirrored_layer_of(problem.without_idle_dilation, operands, gpu)
    return _gemm_way(layer, gpu)


def _on_copies(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    if operands.scalar_bytes != 2:
        raise Declined(f"channels-last copies of {operands.scalar} for a weight gradient")
    last = relayout.channels_last(operands)
    cycles, plan = _implicit_gemm(problem, last, gpu, most)
    cycles = (cycles + relayout.cycles(problem, last, gpu)) / GATHER_SHARE
    return cycles, lambda: relayout.weight_gradient(plan(), problem, operands)


def _gemm_way(layer: wgrad_implicit_gemm.Layer, gpu: Gpu) -> _Way:
    tile = wgrad_implicit_gemm.tiles_of(layer, gpu)[0]
    return tile.cycles(gpu), partial(wgrad_implicit_gemm.plan, tile, gpu)


_WEIGHT_GRADS = (_halo_tiles, _few_inputs, _implicit_gemm, _mirrored, _on_copies)
_WEIGHT_GRADS_OF_VOLUMES = (_halo_tiles, _implicit_gemm, _mirrored, _on_copies)


def alternatives(
    direction: str, problem: Problem, operands: Operands, gpu: Gpu, most: int
) -> list[Plan]:
    """The ``most`` plans of a pass with the fewest estimated cycles. All give the same bits.

    Raises:
        Declined: there are none.
    """
    if direction not in _WAYS:
        raise Declined(direction)
    return _choice(direction, problem, operands, gpu).alternatives(most)


class _Choice(NamedTuple):
    """A kernel that can compute a pass, and its estimated cycles of one SM for an image."""

    cycles: float
    plan: Callable[[], Plan]
    alternatives: Callable[[int], list[Plan]]


def _choice(direction: str, problem: Problem, operands: Operands, gpu: Gpu) -> _Choice:
    """The kernel with the fewest estimated cycles for an image.

    Raises:
        Declined: no kernel can compute the pass, or the portable kernels take fewer cycles.
    """
    limits.check_reach(problem, operands)
    problem = problem.without_idle_dilation
    ways = _WAYS[direction](problem, operands)
    choices = list(_special(direction, problem, operands, gpu, ways))
    most = _portable_cycles(direction, problem, operands, ways[0])
    better = [one for one in choices if one.cycles < most]
    plain = [way for way in ways if not way[0].depth_to_space]
    if better:
        # Planning halo tiles is by far the slowest, so only ways that might win are considered.
        most = _least(better).cycles / HALO_SHARE
        plain = [way for way in plain if halo.may_take_less(way, most)]
        if not plain:
            return _least(better)
    try:
        choices.append(_halo(plain, gpu))
    except Declined:
        choices = better
        if not choices:
            raise
    return _least(choices)


def _portable_cycles(
    direction: str, problem: Problem, operands: Operands, way: list[Layer]
) -> float:
    """The estimated cycles of one SM for an image by the portable kernels."""
    if problem.depth is None:
        return sum(map(portable.image_cycles, way))
    return portable.volume_cycles(problem, operands, direction == "input_grad")


def _least(choices: list[_Choice]) -> _Choice:
    return min(choices, key=lambda one: one.cycles)


def _halo(ways: list[list[Layer]], gpu: Gpu) -> _Choice:
    if not ways:
        raise Declined(f"input gradients of more than {MOST_RESIDUES} residues, except as channels")
    share = D2S_SHARE if ways[0][0].depth_to_space else HALO_SHARE
    return _Choice(
        halo.image_cycles(ways, gpu) * share,
        partial(halo.plan, ways, gpu),
        partial(halo.alternatives, ways, gpu),
    )


def _special(
    direction: str, problem: Problem, operands: Operands, gpu: Gpu, ways: list[list[Layer]]
) -> Iterator[_Choice]:
    """The kernels that take some layers only, and the halo kernel with residues as channels."""
    with suppress(Declined):
        yield _halo([way for way in ways if way[0].depth_to_space], gpu)
    if len(ways[0]) == 1 and problem.depth is None:
        with suppress(Declined):
            few = few_outputs.walks_of(ways[0][0], gpu)
            one = partial(few_outputs.plan, few, gpu)
            yield _Choice(few.image_cycles, one, lambda most: [one()])
    yield from _gemms(problem, operands, gpu, is_reversed=direction == "input_grad")


def _gemms(problem: Problem, operands: Operands, gpu: Gpu, is_reversed: bool) -> Iterator[_Choice]:
    """The implicit GEMMs, on the tensors or on copies of them."""
    for gemm in (implicit_gemm_nhwc, implicit_gemm_nchw):
        with suppress(Declined):
            yield _gemm(gemm, gemm.layer_of(problem, operands, gpu, is_reversed), gpu)
    with suppress(Declined):
        yield _gemm_on_copies(problem, operands, gpu, is_reversed)


def _gemm(gemm: Any, layer: Any, gpu: Gpu) -> _Choice:
    return _Choice(
        gemm.image_cycles(layer, gpu),
        lambda: gemm.plans(layer, gpu, most=1)[0],
        partial(gemm.plans, layer, gpu),
    )


def _gemm_on_copies(problem: Problem, operands: Operands, gpu: Gpu, is_reversed: bool) -> _Choice:
    last = relayout.channels_last(operands)
    layer = implicit_gemm_nhwc.layer_of(problem, last, gpu, is_reversed)
    gemm = _gemm(implicit_gemm_nhwc, layer, gpu)

    def on_copies(plan: Plan) -> Plan:
        return relayout.convolution(plan, problem, last, is_reversed)

    return _Choice(
        gemm.cycles + relayout.image_cycles(problem, last),
        lambda: on_copies(gemm.plan()),
        lambda most: list(map(on_copies, gemm.alternatives(most))),
    )
