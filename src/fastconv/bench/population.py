"""Draws random convolutions of every kind, for verification and for tests of planners and kernels.

Many sizes are arbitrary rather than round, since round sizes take other paths through planners and
kernels. The number of operations is drawn before the sizes, since small problems take other kernels
than real layers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from fastconv.problem import Pair, Problem
from fastconv.workloads import SUITES, Workload, unique
from fastconv.workloads import workload_of as workload_of

LEAST_FLOPS = 1e4  # The smallest problems that are drawn have about this many operations.
KNOWN = unique(one for suite in SUITES.values() for one in suite if one.function == "conv2d")
_KNOWN_SHARE = 0.1  # The share of convolutions that are drawn from KNOWN.
_SIZES = (7, 8, 14, 16, 17, 28, 32, 33, 56, 64, 65, 112, 128, 224, 256, 512)
_CHANNELS = (3, 4, 8, 16, 24, 32, 48, 64, 72, 96, 128, 192, 256, 320, 512, 1024, 2048)
_KERNELS = ((1, 1), (1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (7, 7), (2, 2), (4, 4), (5, 9))


def workload(
    draw: Random,
    most_flops: float,
    most_elements: float = math.inf,
    least_flops: float = LEAST_FLOPS,
) -> Workload:
    """Draws any convolution, with limits on operations in a pass and elements of all tensors.

    With ``least_flops``, convolutions have fewer operations only if they would have too many
    elements otherwise.
    """
    flops = least_flops * (most_flops / least_flops) ** draw.random()
    while True:
        is_known = draw.random() < _KNOWN_SHARE
        drawn = _known(draw) if is_known else _drawn(draw, _kernel, _channels)
        try:
            if least_flops > LEAST_FLOPS and drawn.problem.flops < flops:
                continue
            problem = _shrunk(draw, drawn.problem, flops, most_elements)
        except RuntimeError:
            continue  # The kernel exceeds the image, or the problem its limits.
        return workload_of(problem)


def narrow(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a convolution with groups of few channels, often of one; kernels may be large."""
    flops = LEAST_FLOPS * (most_flops / LEAST_FLOPS) ** draw.random()
    while True:
        drawn = _drawn(draw, _narrow_kernel, _narrow_channels)
        with suppress(RuntimeError):  # The kernel exceeds the image, or the problem its limits.
            problem = _shrunk(draw, drawn.problem, flops, most_elements)
            if problem.groups > 1:
                return workload_of(problem)


def dense(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a convolution with one group of many channels, mostly multiples of 8, and few taps."""
    flops = LEAST_FLOPS * (most_flops / LEAST_FLOPS) ** draw.random()
    while True:
        is_known = draw.random() < _KNOWN_SHARE
        drawn = _known(draw) if is_known else _drawn(draw, _dense_kernel, _dense_channels)
        if drawn.groups > 1:
            continue
        with suppress(RuntimeError):  # The kernel exceeds the image, or the problem its limits.
            problem = _shrunk(draw, drawn.problem, flops, most_elements)
            octets = draw.random() < 0.8
            return workload_of(_in_octets(problem) if octets else problem)


def residual(draw: Random) -> Workload:
    """Draws a layer of a residual network, where all sizes are round.

    The other functions cut problems down to their limits, which rarely leaves all sizes round.
    """
    width, side = draw.choice((64, 128, 256, 512)), draw.choice((7, 14, 28, 56))
    factors = ((1, 1), (1, 1), (4, 1), (1, 4), (2, 1), (2, 4))
    in_channels, out_channels = (width * factor for factor in draw.choice(factors))
    kernel, stride = draw.choice(((1, 1), (3, 1), (3, 2), (1, 2)))
    made = Workload(
        "",
        "",
        (2 ** draw.randrange(9), in_channels, side * stride, side * stride),
        (out_channels, in_channels, kernel, kernel),
        (stride, stride),
        (kernel // 2, kernel // 2),
    )
    return workload_of(made.problem)


def practical(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a layer as networks have them: their sides, dilations, strides, batches of images.

    To stay within the limits, it gets fewer images and channels; sides and kernel stay.
    """
    while True:
        kernel, stride, dilation = draw.choice(_LAYERS)(draw)
        height = draw.choice(_NETWORK_SIDES)
        size = (1, 16 * height) if kernel[0] == 1 and draw.random() < 0.5 else (height, height)
        ins, outs, groups = _practical_channels(draw)
        made = Workload(
            "", "", (2 ** draw.randrange(7), ins, *size), (outs, ins // groups, *kernel), stride,
            _practical_padding(draw, kernel, dilation), dilation, groups,
        )  # fmt: skip
        with suppress(RuntimeError):  # The kernel exceeds the image, or the problem its limits.
            return workload_of(_with_fewer(draw, made.problem, most_flops, most_elements))


def grouped(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a layer with several groups of 4, 8, 16 or 32 channels, as many outputs as inputs.

    To stay within the limits, it gets fewer images and groups; sides and kernel stay.
    """
    while True:
        kernel = draw.choice(((3, 3), (3, 3), (3, 3), (1, 3), (2, 3), (3, 5), (3, 1), (2, 6)))
        stride = draw.choice(((1, 1), (1, 1), (2, 2), (2, 2), (1, 2), (3, 2), (4, 1)))
        dilation = draw.choice(((1, 1), (1, 1), (1, 1), (2, 2), (1, 3)))
        height = draw.choice((*_NETWORK_SIDES[:8], _small(draw, 24)))
        size = (height, draw.choice((height, height, _small(draw, 60))))
        width = draw.choice(_GROUP_WIDTHS)
        groups = 2 ** draw.randint(0, 5) * max(2, 16 // width) * draw.choice((1, 1, 1, 3))
        channels = width * groups
        made = Workload(
            "", "", (2 ** draw.randrange(7), channels, *size), (channels, width, *kernel), stride,
            _practical_padding(draw, kernel, dilation), dilation, groups,
        )  # fmt: skip
        with suppress(RuntimeError):  # The kernel exceeds the image, or the problem its limits.
            problem = made.problem
            while problem.flops > most_flops or _elements(problem) > most_elements:
                problem = _half(problem)
            return workload_of(problem)


_GROUP_WIDTHS = (4, 8, 16, 32)


def _half(problem: Problem) -> Problem:
    """The problem with half of the images, or if it has just one, of the groups."""
    if problem.batch > 1:
        return replace(problem, batch=problem.batch // 2)
    groups, width = problem.groups // 2, problem.in_channels // problem.groups
    if groups < 2:
        raise RuntimeError("two groups of a single image exceed the limits")
    return replace(problem, in_channels=width * groups, out_channels=width * groups, groups=groups)


def sequence(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a convolution of sequences: long ones, causal ones, with strides or with many taps.

    To stay within the limits, half of them get fewer sequences and channels and keep their length.
    """
    while True:
        is_known = draw.random() < _KNOWN_SHARE
        drawn = draw.choice(SUITES["sequence"]) if is_known else _drawn_sequence(draw)
        smaller = draw.choice((_with_fewer, _shrunk))
        with suppress(RuntimeError):  # The kernel exceeds the sequence, or the problem its limits.
            return workload_of(smaller(draw, drawn.problem, most_flops, most_elements), axes=1)


def _drawn_sequence(draw: Random) -> Workload:
    taps = draw.choice((1, 2, 3, 3, 4, 4, 5, 7, 11, _small(draw, 32), _small(draw, 160)))
    stride = draw.choice((1, 1, 1, 2, 2, taps, (taps + 1) // 2, _small(draw, 12)))
    dilation = draw.choice((1, 1, 1, 1, _small(draw, 12), 2 ** draw.randrange(8)))
    ins, outs, groups = draw.choice((_practical_channels, _channels, _narrow_channels))(draw)
    length = draw.choice((_small(draw, 200), _small(draw, 40_000), 2 ** draw.randint(5, 17)))
    extent = dilation * (taps - 1)
    padding = draw.choice(
        ((0,), (extent // 2,), (extent // 2,), (extent, 0), (extent,),
         (draw.randint(0, extent + 2), draw.randint(0, extent + 2)))
    )  # fmt: skip
    batch = draw.choice((1, 2, _small(draw, 64)))
    return Workload(
        "", "", (batch, ins, length), (outs, ins // groups, taps), (stride,), padding, (dilation,),
        groups,
    )  # fmt: skip


def volume(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a convolution of volumes: of videos, causal ones, of boxes, with kernels of all kinds.

    To stay within the limits, half of them get fewer volumes and channels and keep their sizes.
    """
    while True:
        is_known = draw.random() < _KNOWN_SHARE
        known = (*SUITES["video"], *SUITES["volume"])
        drawn = draw.choice(known) if is_known else _drawn_volume(draw)
        fewer = draw.choice((_with_fewer, _shrunk))
        with suppress(RuntimeError):  # The kernel exceeds the volume, or the problem its limits.
            return workload_of(fewer(draw, drawn.problem, most_flops, most_elements))


def _drawn_volume(draw: Random) -> Workload:
    kernel = draw.choice(_BOXES) if draw.random() < 0.7 else _each(lambda: _small(draw, 7))
    stride = draw.choice(
        ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 2), kernel,
         _each(lambda: _small(draw, 4)))
    )  # fmt: skip
    far = _each(lambda: _small(draw, 5))
    dilation = draw.choice(((1, 1, 1), (1, 1, 1), (1, 1, 1), (2, 2, 2), far))
    extent = tuple(step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True))
    deep, high, wide = extent
    same = tuple(side // 2 for side in extent)
    padding = draw.choice(
        (
            same,
            same,
            (0, 0, 0),
            (deep, 0, high // 2, high - high // 2, wide // 2, wide - wide // 2),
            tuple(draw.randint(0, side + 1) for side in extent for _ in range(2)),
        )
    )
    ins, outs, groups = draw.choice((_practical_channels, _channels, _narrow_channels))(draw)
    size = (_small(draw, 64), _side(draw) // 2 + 1, _side(draw) // 2 + 1)
    if draw.random() < 0.3:
        size = (size[1],) * 3
    batch = draw.choice((1, 1, 2, _small(draw, 16)))
    return Workload(
        "", "", (batch, ins, *size), (outs, ins // groups, *kernel), stride, padding, dilation,
        groups,
    )  # fmt: skip


_BOXES = (
    (3, 3, 3), (3, 3, 3), (3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1), (3, 7, 7), (2, 2, 2),
    (2, 4, 4), (3, 5, 7), (3, 3, 1), (5, 1, 1), (1, 1, 3),
)  # fmt: skip
"""Kernels of volumes: cubes, those along time or within frames, and patches."""


def _each(one: Callable[[], int]) -> tuple[int, ...]:
    """One drawn number for each axis of a volume."""
    return one(), one(), one()


def transposed(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a transposed convolution along one axis, two or three, often with a stride.

    Every convolution is the problem of one, whose output padding follows from its sizes.
    """
    kind = draw.choice((workload, practical, narrow, sequence, sequence, volume))
    has_stride = draw.random() < 0.7
    while True:
        drawn = kind(draw, most_flops, most_elements)
        if not has_stride or max(drawn.stride) > 1:
            return workload_of(drawn.problem, drawn.axes, transposed=True)


def far(draw: Random, most_flops: float, most_elements: float = math.inf) -> Workload:
    """Draws a layer whose taps are so far apart that few of them meet the image.

    Offsets to the elements of the other taps, which lie in the padding, may not fit 32 bits.
    """
    while True:
        taps, apart = draw.randint(2, 4), 2 ** draw.randint(8, 20)
        before = apart * draw.randrange(taps) - draw.randint(0, 3)
        behind = apart * (taps - 1) - before + draw.randint(0, 3)
        if min(before, behind) < 0:
            continue
        size = draw.choice(((4, 8192), (3, 513), (7, 65)))
        ins, outs, groups = _practical_channels(draw)
        across = draw.random() < 0.5
        made = Workload(
            "", "", (draw.choice((1, 2, 4)), ins, *(size[::-1] if across else size)),
            (outs, ins // groups, *((1, taps) if across else (taps, 1))), (1, 1),
            (0, 0, before, behind) if across else (before, behind, 0, 0),
            (1, apart) if across else (apart, 1), groups,
        )  # fmt: skip
        with suppress(RuntimeError):  # The kernel exceeds the image, or the problem its limits.
            return workload_of(_with_fewer(draw, made.problem, most_flops, most_elements))


_NETWORK_SIDES = (7, 14, 28, 33, 49, 56, 65, 65, 97, 101, 112, 129, 224, 257, 299, 513)


# Each of the next four functions draws the kernel size, stride and dilation of a layer.


def _dilated(draw: Random) -> tuple[Pair, Pair, Pair]:
    kernel = draw.choice(((3, 3), (3, 3), (5, 5), (3, 5), (7, 3), (5, 9)))
    rate = draw.randint(2, 12)
    return (
        kernel,
        draw.choice(((1, 1), (1, 1), (1, 1), (2, 2), (2, 1))),
        _pair(draw, rate, draw.randint(1, 12)),
    )


def _causal(draw: Random) -> tuple[Pair, Pair, Pair]:
    """A layer for sound, whose images are one row: few taps, far apart."""
    return (1, draw.randint(2, 4)), (1, 1), (1, 2 ** draw.randrange(8))


def _strided(draw: Random) -> tuple[Pair, Pair, Pair]:
    side = draw.choice((1, 3, 3, 5, 7, 11))
    return (side, side), draw.choice(((2, 2), (2, 2), (3, 3), (4, 4), (1, 2), (2, 1))), (1, 1)


def _plain(draw: Random) -> tuple[Pair, Pair, Pair]:
    return draw.choice(_KERNELS), (1, 1), (1, 1)


_LAYERS = (_dilated, _dilated, _causal, _strided, _plain)


def _practical_channels(draw: Random) -> tuple[int, int, int]:
    """Input channels, output channels and groups: mostly one group, sometimes depthwise."""
    ins, outs = draw.choice(_CHANNELS), draw.choice(_CHANNELS)
    which = draw.random()
    if which < 0.15:
        return ins, ins, ins
    if which < 0.25:
        groups = draw.choice((2, 4, 8, 32))
        return groups * math.ceil(ins / groups), groups * math.ceil(outs / groups), groups
    return ins, outs, 1


def _practical_padding(draw: Random, kernel: Pair, dilation: Pair) -> tuple[int, ...]:
    """Mostly the padding that keeps the size; else none, or all of it on one side."""
    rows, columns = (step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True))
    same = (rows // 2, columns // 2)
    return draw.choice((same, same, same, (0, 0), (rows, 0, columns, 0)))


def _with_fewer(draw: Random, problem: Problem, flops: float, elements: float) -> Problem:
    """The problem with so few images, channels or groups that it keeps to the limits."""
    while problem.flops > flops or _elements(problem) > elements:
        fewer: list[dict[str, Any]] = [{"batch": max(1, problem.batch // 2)}]
        depth, multiplier = (
            count // problem.groups for count in (problem.in_channels, problem.out_channels)
        )
        fewer.append({"in_channels": max(1, depth // 2) * problem.groups})
        fewer.append({"out_channels": max(1, multiplier // 2) * problem.groups})
        groups = max(1, problem.groups // 2)
        fewer.append(
            {"groups": groups, "in_channels": depth * groups, "out_channels": multiplier * groups}
        )
        changed = list(_changed(problem, fewer))
        if not changed:
            raise RuntimeError("a single channel of a single image exceeds the limits")
        problem = draw.choice(changed)
    return problem


def _known(draw: Random) -> Workload:
    return replace(draw.choice(KNOWN), name="")


def _drawn(
    draw: Random,
    kernels: Callable[[Random], Pair],
    channels: Callable[[Random], tuple[int, int, int]],
) -> Workload:
    kernel = kernels(draw)
    stride = _stride(draw, kernel)
    dilation = (1, 1) if draw.random() < 0.65 else _pair(draw, _small(draw, 12), _small(draw, 12))
    extent = tuple(step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True))
    in_channels, out_channels, groups = channels(draw)
    size = _pair(draw, _side(draw), _side(draw))
    batch = draw.choice((1, 2, _small(draw, 9), _small(draw, 64), 2 ** draw.randrange(8)))
    return Workload(
        "",
        "",
        (batch, in_channels, *size),
        (out_channels, in_channels // groups, *kernel),
        stride,
        _padding(draw, extent),
        dilation,
        groups,
    )


def _small(draw: Random, most: int) -> int:
    """A number from 1 to ``most``, small ones more often."""
    return int(math.exp(draw.uniform(0.0, math.log(most + 1))))


def _pair(draw: Random, first: int, second: int) -> Pair:
    """Both numbers, or the first one twice, with equal probability."""
    return (first, first) if draw.random() < 0.5 else (first, second)


def _kernel(draw: Random) -> Pair:
    which = draw.random()
    if which < 0.55:
        return draw.choice(_KERNELS)
    if which < 0.75:
        return _small(draw, 11), _small(draw, 11)
    if which < 0.9:
        taps = _small(draw, 31)
        return draw.choice(((1, taps), (taps, 1), (taps, taps)))
    return draw.randint(1, 15), draw.randint(1, 40)


def _narrow_kernel(draw: Random) -> Pair:
    return _kernel(draw) if draw.random() < 0.6 else (_small(draw, 40), draw.randint(1, 63))


def _dense_kernel(draw: Random) -> Pair:
    few = (_small(draw, 5), _small(draw, 5))
    return draw.choice(((1, 1), (1, 1), (3, 3), (3, 3), few))


def _stride(draw: Random, kernel: Pair) -> Pair:
    which = draw.random()
    if which < 0.6:
        return 1, 1
    if which < 0.75:
        return 2, 2
    return kernel if which < 0.82 else _pair(draw, _small(draw, 6), _small(draw, 6))


def _padding(draw: Random, extent: Sequence[int]) -> tuple[int, ...]:
    """Padding (0, 0), or such as keeps the size, or random amounts, or all of it on one side."""
    rows, columns = extent
    return draw.choice(
        (
            (0, 0),
            (rows // 2, columns // 2),
            (rows // 2, rows - rows // 2, columns // 2, columns - columns // 2),
            tuple(draw.randint(0, 3) for _ in range(4)),
            tuple(draw.randint(0, side + 2) for side in (rows, rows, columns, columns)),
            (rows, 0, columns, 0),
        )
    )


def _side(draw: Random) -> int:
    return draw.choice((draw.choice(_SIZES), _small(draw, 40), _small(draw, 1200)))


def _channels(draw: Random) -> tuple[int, int, int]:
    """Input channels, output channels and groups."""

    def some() -> int:
        return draw.choice((draw.choice(_CHANNELS), _small(draw, 20), _small(draw, 600)))

    which = draw.random()
    if which < 0.65:
        return some(), some(), 1
    if which < 0.75:  # First and last layers of networks have few channels on one side.
        few, many = draw.randint(1, 5), some()
        return (few, many, 1) if draw.random() < 0.5 else (many, few, 1)
    if which < 0.85:
        channels = some()
        return channels, channels * draw.choice((1, 1, 1, 2, 3)), channels
    groups = draw.choice((2, 3, 4, 8, 32))
    return groups * _small(draw, 80), groups * _small(draw, 80), groups


def _narrow_channels(draw: Random) -> tuple[int, int, int]:
    groups = draw.choice((draw.choice(_CHANNELS), 1 + _small(draw, 40), 1 + _small(draw, 600)))
    if draw.random() < 0.6:
        return groups, groups * draw.choice((1, 1, 1, 2, _small(draw, 80))), groups
    return groups * draw.randint(1, 7), groups * draw.randint(1, 7), groups


def _dense_channels(draw: Random) -> tuple[int, int, int]:
    def some() -> int:
        return draw.choice(
            (draw.choice(_CHANNELS[2:]), 8 * _small(draw, 40), 7 + _small(draw, 300))
        )

    return some(), some(), 1


def _in_octets(problem: Problem) -> Problem:
    """The problem with its channels rounded up to multiples of 8."""
    return replace(
        problem,
        in_channels=8 * math.ceil(problem.in_channels / 8),
        out_channels=8 * math.ceil(problem.out_channels / 8),
    )


def _shrunk(draw: Random, problem: Problem, flops: float, elements: float) -> Problem:
    """The problem, cut down dimension by dimension, at random, until it keeps to the limits."""
    while problem.flops > flops or _elements(problem) > elements:
        fewer = list(_smaller(problem)) or list(_with_smaller_kernel(problem))
        if not fewer:
            raise RuntimeError("a single output of a single channel exceeds the limits")
        problem = draw.choice(fewer)
    return problem


def smaller(problem: Problem) -> Iterator[Problem]:
    """Smaller variants of a problem, each with one dimension reduced, to shrink test cases."""
    yield from _smaller(problem)
    yield from _with_same_parity(problem)
    yield from _with_fewer_octets(problem)
    yield from _with_smaller_kernel(problem)


def _elements(problem: Problem) -> int:
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    return sum(map(math.prod, shapes))


def _smaller(problem: Problem) -> Iterator[Problem]:
    """Variants with about two thirds of a dimension of images, sizes or channels."""
    height, width = problem.input_size
    depth = problem.in_channels // problem.groups
    multiplier = problem.out_channels // problem.groups
    groups = _less(problem.groups)
    changes: tuple[dict[str, Any], ...] = (
        {"batch": _less(problem.batch)},
        {"input_size": (_less(height), width)},
        {"input_size": (height, _less(width))},
        *_shallower(problem, "input_size"),
        {"in_channels": _less(depth) * problem.groups},
        {"out_channels": _less(multiplier) * problem.groups},
        {"groups": groups, "in_channels": depth * groups, "out_channels": multiplier * groups},
    )
    return _changed(problem, changes)


def _with_same_parity(problem: Problem) -> Iterator[Problem]:
    """Variants with half of an even batch, or with a smaller odd side.

    Two thirds of an even batch may be odd, and two thirds of an odd side even, and kernels may
    depend on this.
    """
    height, width = problem.input_size
    halves = [{"batch": problem.batch // 2}] if problem.batch % 2 == 0 else []
    sides = ((_less(height) | 1, width), (height, _less(width) | 1))
    odd = [{"input_size": size} for size in sides if size < problem.input_size]
    return _changed(problem, [*halves, *odd])


def _with_smaller_kernel(problem: Problem) -> Iterator[Problem]:
    height, width = problem.kernel_size
    sizes = ((_less(height), width), (height, _less(width)))
    changes: list[dict[str, Any]] = [{"kernel_size": size} for size in sizes]
    return _changed(problem, [*changes, *_shallower(problem, "kernel_size")])


def _shallower(problem: Problem, name: str) -> list[dict[str, Any]]:
    """The changes that reduce a size along the depth, if there is one."""
    depth = problem.depth
    if depth is None:
        return []
    return [{"depth": depth._replace(**{name: _less(getattr(depth, name))})}]


def _with_fewer_octets(problem: Problem) -> Iterator[Problem]:
    """Variants with fewer channels that stay multiples of 8, which some kernels need.

    Some kernels need multiples of more than 8, so half of an even number of octets is also tried.
    """
    counts = {"in_channels": problem.in_channels, "out_channels": problem.out_channels}
    if problem.groups > 1 or any(count % 8 for count in counts.values()):
        return iter(())
    fewer = [{name: 8 * _less(count // 8)} for name, count in counts.items()]
    halves = [{name: count // 2} for name, count in counts.items() if count % 16 == 0]
    return _changed(problem, [*fewer, *halves])


def _less(size: int) -> int:
    return max(1, size * 2 // 3)


def _changed(problem: Problem, changes: Iterable[dict[str, Any]]) -> Iterator[Problem]:
    """The changed problems, without those that are the same or whose kernel exceeds the image."""
    for change in changes:
        one = replace(problem, **change)
        fits = all(axis.padded_size >= axis.kernel_extent for axis in one.axes)
        if fits and one != problem:
            yield one
