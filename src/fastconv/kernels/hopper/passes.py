"""Plans each pass with one of Hopper's kernels: the one with the fewest estimated cycles.

Kernels add up sums in different orders, and the bits of an image must not depend on its batch. So
for forward passes and input gradients, the estimates are of one image of a large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.few_outputs import plan as few_outputs
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.kernels.hopper.implicit_gemm_nchw import plan as implicit_gemm_nchw
from fastconv.kernels.hopper.implicit_gemm_nhwc import plan as implicit_gemm_nhwc
from fastconv.kernels.hopper.layers import Layer, forward_ways, input_grad_ways, relaid_ways
from fastconv.kernels.hopper.patches import plan as patches
from fastconv.kernels.hopper.relayout import plan as relayout
from fastconv.kernels.hopper.wgrad_few_inputs import plan as wgrad_few_inputs
from fastconv.kernels.hopper.wgrad_halo import plan as wgrad_halo
from fastconv.kernels.hopper.wgrad_implicit_gemm import plan as wgrad_implicit_gemm
from fastconv.kernels.planning import limits, portable
from fastconv.kernels.planning.copies import LAUNCH_CYCLES, SM_BYTES, relayout_cycles
from fastconv.kernels.planning.layers import MOST_RESIDUES
from fastconv.kernels.planning.slabs import (
    Part,
    copies_bytes,
    most_of_gradient,
    problems_in_slabs,
)
from fastconv.problem import Problem

# Estimates serve to choose among a kernel's tiles. To compare kernels, they are multiplied by what
# measured times on an H200 were of them.
#
# The halo kernel takes 0.7 to 0.8 of its estimate for large images, and about all of it for small
# ones; for layers with residues as channels, 0.8 (ResNet-50's first layer) to 1.9 (AlexNet's first,
# in TF32).
HALO_SHARE = 0.92
D2S_SHARE = 1.2
# The same for volumes: channels-last in 16 bits (0.5 to 0.9), contiguous in 16 bits with vectors of
# channels (1.0 to 1.8), and all others.
VOLUME_SHARES = (0.74, 1.15, 1.0)
VOLUME_D2S_SHARES = (0.8, 1.0, 1.0)
# The same on float16 copies of float32, with the copies: images, volumes (0.6 to 1), and volumes
# with strides; of several groups, whose channels are fewer, it takes this much longer.
HALF_COPY_SHARES = (0.97, 0.87, 0.75)
HALF_COPY_OF_GROUPS_SHARE = 1.5
# Volumes in 16 bits on channels-last copies of slabs, beside what is counted for the copies. Five
# layers that would take 0.94 to 1.23 of their time on such copies are computed without.
RELAID_LOSS = 1.1
# Implicit GEMMs of strided input gradients of volumes, whose stores are far apart.
STRIDED_VOLUME_SHARE = 1.4
# Contiguous implicit GEMMs of groups' input gradients that store every third column or fewer.
SPARSE_COLUMNS, SPARSE_COLUMNS_SHARE = 3, 2.4
# Few outputs of images of one row in TF32, which take 1.7 of their estimates, against halo tiles
# that take 0.6 of theirs there.
FEW_OUTPUTS_ROW_SHARE = 2.75
# As many outputs as this in channels-last tensors, which take 1.4 to 1.8 times as long as in
# contiguous ones, against implicit GEMMs that take 0.8 of their estimates there.
MANY_OUTPUTS, MANY_OUTPUTS_SHARE = 32, 2.4
# Weight gradients of one tap, of contiguous float32, by halo tiles.
WGRAD_HALO_OF_ONE_TAP_SHARE = 1.7
# Contiguous weight gradients in 16 bits: halo tiles of images, of images with many taps and of
# volumes, implicit GEMMs that gather, and those that gather few channels.
WGRAD_HALO_SHARE = 1.3
WGRAD_HALO_OF_MANY_TAPS_SHARE = 1.0
WGRAD_HALO_OF_VOLUMES_SHARE = 1.35
MANY_TAPS = 25
GATHER_SHARE = 0.75
# Boxes in weight gradients of so much work with so many channels on both sides take all of their
# estimates, where other tiles of these layers take 0.8 of theirs, if there is no dilation.
LONG_FLOPS, LONG_CHANNELS, LONG_BOXES_SHARE = 4e10, 256, 1.13
FEW_SHARE = 1.5
# Layers with as many input channels as output channels read the same if these exchange roles. They
# store otherwise, which counts for so many weights.
MANY_WEIGHTS = 2**20
# What copies of the next slab take of an SM's whole rate while a tile's block multiplies: none, one
# or two blocks that copy. Two blocks have room in shared memory, and in registers with some tiles.
COPIES_BESIDE_SHARES = (0.0, 0.3, 0.55)
BESIDE_LOSS = 1.17  # what weight gradients take of such estimates, beside those without
# What it counts that partial sums and copies together exceed the limit of copies alone.
SUMS_BEYOND_LOSS = 1.15
MOST_COPIES_BESIDE = len(COPIES_BESIDE_SHARES) - 1
LEAST_VECTOR = 8  # channels that channels-last kernels load at once in 16 bits
LEAST_COPIED_CHANNELS = 16  # copies of fewer channels take longer than estimated
COPIES_OF_FEW_SHARE = 1.5
HALO_ON_COPIES_SHARE = 1.2  # weight gradients by halo tiles on copies
# The portable kernels: weight gradients that are channels-last, strided, or in 16 bits, and other
# passes of volumes, contiguous and channels-last.
PORTABLE_WGRAD_LOSSES = (2.5, 1.4, 1.3)
PORTABLE_VOLUME_LOSSES = (1.5, 3.5)

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
    most = _portable_wgrad_cycles(problem, operands, gpu) + wgrad_halo.BLOCK_CYCLES
    ways: list[_Way] = []
    for way in _WEIGHT_GRADS if problem.depth is None else _WEIGHT_GRADS_OF_VOLUMES:
        try:
            ways.append(way(problem, operands, gpu, most))
        except Declined as reason:
            reasons.append(str(reason))
    if problem.depth is None:
        # The other ways' least cycles spare most of the search.
        least = min([most, *(cycles for cycles, _ in ways)])
        with suppress(Declined):
            ways.append(_halo_tiles_on_copies(problem, operands, gpu, least))
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
    share = _wgrad_halo_share(problem, operands)
    return tile.cycles(gpu) * share, partial(wgrad_halo.plan, tile, gpu)


def _wgrad_halo_share(problem: Problem, operands: Operands) -> float:
    """What times of halo tiles are of their estimates, in weight gradients."""
    if not _is_contiguous(operands):
        return 1.0
    if operands.scalar_bytes == 4:
        has_one_tap = prod(problem.weight_shape[2:]) == 1
        return WGRAD_HALO_OF_ONE_TAP_SHARE if has_one_tap else 1.0
    if problem.depth is not None:
        return WGRAD_HALO_OF_VOLUMES_SHARE
    many = prod(problem.kernel_size) >= MANY_TAPS
    return WGRAD_HALO_OF_MANY_TAPS_SHARE if many else WGRAD_HALO_SHARE


def _few_inputs(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    layer = wgrad_few_inputs.layer_of(problem, operands, gpu)
    return layer.cycles(gpu), partial(wgrad_few_inputs.plan, layer, gpu)


def _implicit_gemm(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    layer = wgrad_implicit_gemm.layer_of(problem.without_idle_dilation, operands, gpu)
    return _gemm_way(layer, gpu)


def _mirrored(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    layer = wgrad_implicit_gemm.mirrored_layer_of(problem.without_idle_dilation, operands, gpu)
    return _gemm_way(layer, gpu)


def _boxes(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    layer = wgrad_implicit_gemm.boxed_layer_of(problem.without_idle_dilation, operands, gpu)
    return _boxed_way(layer, gpu)


def _mirrored_boxes(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    _check_mirrored_boxes(problem)
    layer = wgrad_implicit_gemm.mirrored_layer_of(
        problem.without_idle_dilation, operands, gpu, wgrad_implicit_gemm.boxed_layer_of
    )
    return _boxed_way(layer, gpu)


def _boxed_way(layer: wgrad_implicit_gemm.Layer, gpu: Gpu) -> _Way:
    cycles, planned = _gemm_way(layer, gpu)
    problem = layer.problem
    many = min(problem.in_channels, problem.out_channels) >= LONG_CHANNELS
    long = problem.depth is None and many and problem.flops >= LONG_FLOPS
    long = long and problem.dilation == (1, 1)
    return cycles * (LONG_BOXES_SHARE if long else 1.0), planned


def _check_mirrored_boxes(problem: Problem) -> None:
    few = prod(problem.weight_shape) < MANY_WEIGHTS
    if few and problem.in_channels == problem.out_channels:
        raise Declined("few weights of as many input channels as output channels, mirrored")


def _on_copies(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    last, copies = _wgrad_copies(problem, operands, gpu)
    cycles, plan = _implicit_gemm(problem, last, gpu, most)
    few = problem.in_channels // problem.groups < LEAST_COPIED_CHANNELS
    cycles = (cycles + copies) * (COPIES_OF_FEW_SHARE if few else 1.0)
    return cycles, lambda: relayout.weight_gradient(plan(), problem, operands)


def _boxes_on_copies(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    last, copies = _wgrad_copies(problem, operands, gpu)
    cycles, plan = _boxes(problem, last, gpu, most)
    with suppress(Declined):
        mirrored, plan_mirrored = _mirrored_boxes(problem, last, gpu, most)
        if mirrored < cycles:
            cycles, plan = mirrored, plan_mirrored
    return cycles + copies, lambda: relayout.weight_gradient(plan(), problem, operands)


def _halo_tiles_on_copies(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    last, copies = _wgrad_copies(problem, operands, gpu)
    if min(problem.in_channels, problem.out_channels) < LEAST_COPIED_CHANNELS:
        raise Declined("channels-last copies of few channels")
    cycles, plan = _halo_tiles(problem, last, gpu, most / HALO_ON_COPIES_SHARE - copies)
    cycles = (cycles + copies) * HALO_ON_COPIES_SHARE
    return cycles, lambda: relayout.weight_gradient(plan(), problem, operands)


def _on_slabs(problem: Problem, operands: Operands, gpu: Gpu, most: float) -> _Way:
    """Implicit GEMMs of contiguous volumes in 16 bits, on copies of slabs of both tensors."""
    if operands.scalar_bytes != 2:
        raise Declined(f"channels-last copies of {operands.scalar} for a weight gradient")
    problem, last = problem.without_idle_dilation, relayout.channels_last(operands)
    found = []
    for parts in problems_in_slabs(problem, operands):
        for layer_of in (wgrad_implicit_gemm.layer_of, *_BOXED):
            with suppress(Declined):
                found.append(_way_on_slabs(layer_of, problem, parts, last, gpu))
    if not found:
        raise Declined("slabs of volumes")
    return min(found, key=lambda way: way[0])


def _mirrored_boxed_layer_of(
    problem: Problem, operands: Operands, gpu: Gpu
) -> wgrad_implicit_gemm.Layer:
    _check_mirrored_boxes(problem)
    boxed = wgrad_implicit_gemm.boxed_layer_of
    return wgrad_implicit_gemm.mirrored_layer_of(problem, operands, gpu, boxed)


_BOXED = (wgrad_implicit_gemm.boxed_layer_of, _mirrored_boxed_layer_of)


def _way_on_slabs(
    layer_of: Callable[[Problem, Operands, Gpu], wgrad_implicit_gemm.Layer],
    problem: Problem,
    parts: list[Part],
    last: Operands,
    gpu: Gpu,
) -> _Way:
    layers = [layer_of(part.problem, last, gpu) for part in parts]
    first = parts[0].problem
    share = prod(problem.output_shape) / prod(first.output_shape)
    copies, alternate = relayout.pair_cycles(first, last, gpu), any(part.image for part in parts)
    if alternate and not layers[0].boxed:
        raise Declined("positions of two slabs, one behind the other")
    few = problem.in_channels // problem.groups < LEAST_COPIED_CHANNELS and not layers[0].boxed

    def all_cycles(tile: wgrad_implicit_gemm.Tile) -> float:
        end = tile.end_cycles(gpu)
        multiplied = tile.cycles(gpu) - end + LAUNCH_CYCLES
        beside = COPIES_BESIDE_SHARES[_copies_beside(tile)] if alternate else 0.0
        hidden = min(copies, beside * multiplied) * (share - 1)
        of_slabs = ((multiplied + copies) * share - hidden) * (COPIES_OF_FEW_SHARE if few else 1.0)
        return (of_slabs + end) * (BESIDE_LOSS if alternate else 1.0)

    def weighed(tile: wgrad_implicit_gemm.Tile) -> float:
        return all_cycles(tile) * (1.0 if tile.workspace_bytes <= left else SUMS_BEYOND_LOSS)

    left = most_of_gradient(problem, last) - sum(copies_bytes(parts, last))
    room = relayout.room_for(MOST_COPIES_BESIDE, gpu) if alternate else gpu
    tile = min(_tiles_of_slabs(layers, room), key=weighed)
    cycles = all_cycles(tile)

    def planned() -> Plan:
        size = (problem.out_channels, problem.output_shape[2:], False)
        bias, bias_bytes = wgrad_implicit_gemm.bias_of(layers[0], size, problem.batch)
        beside = _copies_beside(tile) if alternate else 0
        most_registers = relayout.registers_beside(tile.threads, beside) if beside else 0
        plans = [
            wgrad_implicit_gemm.plan(replace(tile, layer=layer), gpu, True, most_registers)
            for layer in layers
        ]
        made = relayout.weight_gradient_of_slabs(plans, bias, bias_bytes, problem, parts, last)
        return replace(made, cycles=cycles)

    return weighed(tile), planned


def _tiles_of_slabs(
    layers: list[wgrad_implicit_gemm.Layer], gpu: Gpu
) -> list[wgrad_implicit_gemm.Tile]:
    """The tiles that slabs can have, whose accumulators are all reduced at the end.

    Raises:
        Declined: there are none.
    """
    first, last = layers[0], layers[-1]
    # A slab of other size has the accumulators of a tile where others have them only if blocks do
    # not go from one tile to the next.
    found = [
        tile
        for tile in wgrad_implicit_gemm.tiles_of(first, gpu)
        if tile.is_reduced
        and (first == last or (tile.is_even and replace(tile, layer=last).is_reduced))
    ]
    if not found:
        raise Declined("slabs so small that no tile's accumulators are reduced")
    return found


def _copies_beside(tile: wgrad_implicit_gemm.Tile) -> int:
    """Blocks that copy the next slab on an SM while a tile's block multiplies."""
    counts = range(MOST_COPIES_BESIDE, 0, -1)
    needed = tile.compiled_registers
    fitting = (n for n in counts if needed <= relayout.registers_beside(tile.threads, n))
    return next(fitting, 0)


def _wgrad_copies(problem: Problem, operands: Operands, gpu: Gpu) -> tuple[Operands, float]:
    """The operands of a weight gradient on channels-last copies, and the copies' cycles."""
    if operands.scalar_bytes != 2:
        raise Declined(f"channels-last copies of {operands.scalar} for a weight gradient")
    last = relayout.channels_last(operands)
    return last, relayout.cycles(problem, last, gpu)


def _gemm_way(layer: wgrad_implicit_gemm.Layer, gpu: Gpu) -> _Way:
    tile = wgrad_implicit_gemm.tiles_of(layer, gpu)[0]
    share = 1.0
    if _gathers_16_bits(layer.operands):
        share = FEW_SHARE if layer.few else GATHER_SHARE
    return tile.cycles(gpu) * share, partial(wgrad_implicit_gemm.plan, tile, gpu)


def _gathers_16_bits(operands: Operands) -> bool:
    """Whether a weight gradient reads contiguous tensors of a 16-bit type."""
    return operands.scalar_bytes == 2 and _is_contiguous(operands)


def _is_contiguous(operands: Operands) -> bool:
    """Whether no tensor that a pass reads or writes has its channels last."""
    return not (operands.input_channels_last or operands.output_channels_last)


def _portable_wgrad_cycles(problem: Problem, operands: Operands, gpu: Gpu) -> float:
    """The estimated cycles of a weight gradient by the portable kernels."""
    last, strided, narrow = PORTABLE_WGRAD_LOSSES
    cycles = portable.wgrad_cycles(problem, gpu)
    if not _is_contiguous(operands):
        return cycles * last
    cycles *= strided if any(axis.stride > 1 for axis in problem.axes) else 1.0
    return cycles * (narrow if operands.scalar_bytes == 2 else 1.0)


_GEMMS = (_implicit_gemm, _mirrored, _boxes, _mirrored_boxes)
_WEIGHT_GRADS = (_halo_tiles, _few_inputs, *_GEMMS, _on_copies, _boxes_on_copies)
_WEIGHT_GRADS_OF_VOLUMES = (_halo_tiles, *_GEMMS, _on_slabs)


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
    """The kernel with the fewest estimated cycles for an image, on the tensors or on copies.

    Raises:
        Declined: no kernel can compute the pass, or the portable kernels take fewer cycles.
    """
    limits.check_reach(problem, operands)
    problem = problem.without_idle_dilation
    chosen = _one_of(direction, problem, operands, gpu)
    if problem.depth is not None:
        return chosen
    # Halo tiles of images rarely gain on copies, so the others' least cycles spare most searches.
    return _least([chosen, *_halo_on_copies(direction, problem, operands, gpu, chosen.cycles)])


def _one_of(direction: str, problem: Problem, operands: Operands, gpu: Gpu) -> _Choice:
    """The kernel with the fewest cycles, but for halo tiles of images on copies."""
    ways = _WAYS[direction](problem, operands)
    choices = list(_special(direction, problem, operands, gpu, ways))
    most = _portable_cycles(direction, problem, operands, ways[0])
    better = [one for one in choices if one.cycles < most]
    plain = [way for way in ways if not (way[0].depth_to_space or way[0].half_copy)]
    if better:
        plain = _that_might_win(plain, _least(better))
    try:
        if plain or not better:
            better = [*choices, _halo(plain, gpu)]
    except Declined:
        if not better:
            raise
    chosen = _on_half_copies([way for way in ways if way[0].half_copy], _least(better), gpu)
    if problem.depth is not None and chosen.cycles > most:
        raise Declined("volumes of so few channels")
    return chosen


def _on_half_copies(ways: list[list[Layer]], rival: _Choice, gpu: Gpu) -> _Choice:
    """The halo kernel on a float16 copy of the input, or its rival if that takes less."""
    might_win = _that_might_win(ways, rival)
    if might_win:
        with suppress(Declined):
            return _least([_halo(might_win, gpu), rival])
    return rival


def _that_might_win(ways: list[list[Layer]], rival: _Choice) -> list[list[Layer]]:
    """Ways that might take less than a rival: planning halo tiles is by far the slowest."""
    return [way for way in ways if halo.may_take_less(way, rival.cycles / _halo_share(way[0]))]


def _portable_cycles(
    direction: str, problem: Problem, operands: Operands, way: list[Layer]
) -> float:
    """The estimated cycles of one SM for an image by the portable kernels."""
    if problem.depth is None:
        return sum(map(portable.image_cycles, way))
    loss = PORTABLE_VOLUME_LOSSES[operands.input_channels_last or operands.output_channels_last]
    return loss * portable.volume_cycles(problem, operands, direction == "input_grad")


def _least(choices: list[_Choice]) -> _Choice:
    return min(choices, key=lambda one: one.cycles)


def _halo(ways: list[list[Layer]], gpu: Gpu) -> _Choice:
    if not ways:
        raise Declined(f"input gradients of more than {MOST_RESIDUES} residues, except as channels")
    share = _halo_share(ways[0][0])
    return _Choice(
        halo.image_cycles(ways, gpu) * share,
        partial(halo.plan, ways, gpu),
        partial(halo.alternatives, ways, gpu),
    )


def _halo_share(layer: Layer) -> float:
    """What times of the halo kernel are of its estimates."""
    if layer.half_copy:
        image, volume, strided = HALF_COPY_SHARES
        share = image if layer.depth is None else volume if layer.stride == (1, 1) else strided
        return share * (HALF_COPY_OF_GROUPS_SHARE if layer.groups > 1 else 1.0)
    if layer.depth is None:
        return D2S_SHARE if layer.depth_to_space else HALO_SHARE
    last, narrow, other = VOLUME_D2S_SHARES if layer.depth_to_space else VOLUME_SHARES
    operands = layer.operands
    if operands.scalar_bytes > 2 or layer.in_channels < LEAST_VECTOR:
        return other
    if not operands.input_channels_last:
        return narrow
    return last if layer.stride == (1, 1) else other


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
            cycles = few.image_cycles * _few_outputs_share(ways[0][0])
            yield _Choice(cycles, one, lambda most: [one()])
    is_reversed = direction == "input_grad"
    for gemm in (implicit_gemm_nhwc, implicit_gemm_nchw):
        with suppress(Declined):
            yield _gemm(gemm, problem, operands, gpu, is_reversed)
    with suppress(Declined):
        layer = patches.layer_of(problem, operands, gpu, is_reversed)
        whole = partial(patches.plan, layer, gpu)
        yield _Choice(layer.image_cycles(gpu), whole, lambda most: [whole()])
    with suppress(Declined):
        yield from _on_channels_last_copies(direction, problem, operands, gpu)


def _few_outputs_share(layer: Layer) -> float:
    """What times of few outputs' kernel are of its estimates, against those of halo tiles."""
    operands = layer.operands
    if layer.in_size[0] == 1 and operands.scalar_bytes == 4 and operands.precision == "tf32":
        return FEW_OUTPUTS_ROW_SHARE
    many = operands.output_channels_last and layer.group_out >= MANY_OUTPUTS
    return MANY_OUTPUTS_SHARE if many and layer.parts == 1 else 1.0


def _gemm(gemm: Any, problem: Problem, operands: Operands, gpu: Gpu, is_reversed: bool) -> _Choice:
    layer = gemm.layer_of(problem, operands, gpu, is_reversed)
    strided = is_reversed and any(axis.stride > 1 for axis in problem.axes)
    share = STRIDED_VOLUME_SHARE if strided and problem.depth is not None else 1.0
    if problem.groups > 1 and is_reversed and problem.stride[1] >= SPARSE_COLUMNS:
        share = SPARSE_COLUMNS_SHARE
    return _Choice(
        gemm.image_cycles(layer, gpu) * share,
        lambda: gemm.plans(layer, gpu, most=1)[0],
        partial(gemm.plans, layer, gpu),
    )


def _on_channels_last_copies(
    direction: str, problem: Problem, operands: Operands, gpu: Gpu
) -> Iterator[_Choice]:
    """The kernels that are much faster on channels-last tensors, on copies of contiguous ones."""
    last, is_reversed = relayout.channels_last(operands), direction == "input_grad"
    if problem.depth is not None:
        yield from _halo_on_slabs(direction, problem, operands, gpu)
        return
    with suppress(Declined):
        choice = _gemm(implicit_gemm_nhwc, problem, last, gpu, is_reversed)
        yield _on_copies_of(choice, problem, last, is_reversed)


def _halo_on_slabs(
    direction: str, problem: Problem, operands: Operands, gpu: Gpu
) -> Iterator[_Choice]:
    """Halo tiles of contiguous 16-bit volumes, on channels-last copies of what they read.

    To store contiguous rows is counted as a copy of the output.
    """
    if operands.scalar_bytes != 2:
        return
    last = replace(operands, input_channels_last=True)
    written = problem.output_shape if direction == "forward" else problem.input_shape
    stored = 2 * operands.scalar_bytes * prod(written[1:]) / SM_BYTES
    with suppress(Declined):
        ways = relaid_ways(_WAYS[direction](problem, last))
        for of_residues in (False, True):
            with suppress(Declined):
                chosen = [way for way in ways if way[0].depth_to_space == of_residues]
                choice = _halo(chosen, gpu)
                beside = relayout_cycles(chosen[0][0]) + stored
                yield choice._replace(cycles=RELAID_LOSS * choice.cycles + beside)


def _halo_on_copies(
    direction: str, problem: Problem, operands: Operands, gpu: Gpu, most: float
) -> Iterator[_Choice]:
    """Halo tiles on copies of contiguous 16-bit images, if they may take less than ``most``."""
    few = min(problem.in_channels, problem.out_channels) < LEAST_COPIED_CHANNELS
    if operands.scalar_bytes != 2 or few:
        return
    with suppress(Declined):
        last = relayout.channels_last(operands)
        room = most - relayout.image_cycles(problem, last)
        ways = [
            way
            for way in _WAYS[direction](problem, last)
            if halo.may_take_less(way, room / _halo_share(way[0]))
        ]
        for of_residues in (False, True):
            with suppress(Declined):
                chosen = [way for way in ways if way[0].depth_to_space == of_residues]
                choice = _halo(chosen, gpu)
                yield _on_copies_of(choice, problem, last, direction == "input_grad")


def _on_copies_of(choice: _Choice, problem: Problem, last: Operands, is_reversed: bool) -> _Choice:
    def on_copies(plan: Plan) -> Plan:
        return relayout.convolution(plan, problem, last, is_reversed)

    return _Choice(
        choice.cycles + relayout.image_cycles(problem, last),
        lambda: on_copies(choice.plan()),
        lambda most: list(map(on_copies, choice.alternatives(most))),
    )
