"""Isolation: a result depends on what its formula reads, and on nothing else.

A pass runs twice, the second time with some elements of what it reads made *loud*: a large factor
times what they were, or NaN. Whatever does not read a loud element has to keep all of its bits,
and whatever reads one has to change. No reference is needed, so problems may have any size. The
strongest pattern makes everything loud but what some results read, with the memory around the
tensors.

Numbers are positive, so that nothing cancels. A loud number is finite where a kernel may multiply
it by a zero that stands for padding; NaN are whole planes alone, which no kernel multiplies by
zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv.backends import cuda
from fastconv.bench import judging, trials
from fastconv.bench.trials import Data, Results, Trial
from fastconv.kernels.family import Plan
from fastconv.problem import ACTIVATIONS, Problem

LOUD = {torch.float16: 2.0**14}
"""What a loud number is multiplied by: float16 has no range for more."""
_LOUDEST = 2.0**20

_AXES = ("input", "grad_output", "weight")
"""The tensors that have rows and columns; a row of each meets in every product of a sum."""
RESULTS = {"forward": "grad_output", "input_grad": "input", "weight_grad": "weight"}
"""The tensor that the result of each pass has the shape of."""
_ROWS, _COLUMNS = 2, 3  # dimensions of the result


class Region(NamedTuple):
    """Elements of a 4-D tensor: those of some planes, rows and columns."""

    planes: Tensor  # of the first two dimensions
    rows: Tensor
    columns: Tensor

    def mask(self, device: torch.device) -> Tensor:
        planes, rows, columns = (one.to(device) for one in self)
        return planes[:, :, None, None] & rows[:, None] & columns


@dataclass(frozen=True)
class Pattern:
    """Which elements are loud, and what follows for the results."""

    quiet: Mapping[str, Region]
    """What stays as it is of the tensors that the pass reads, by role; all else is loud."""

    unchanged: Region
    """The results that read nothing loud."""

    reading: tuple[Tensor, Tensor]
    """Rows and columns of the result that read anything at all: others see padding alone."""

    quiet_bias: Tensor | None
    """Output channels whose bias is quiet, in a forward pass."""

    unchanged_bias_grad: Tensor
    """Output channels whose bias gradient may not change."""

    @property
    def whole_planes(self) -> bool:
        """Whether planes are loud as a whole, or not at all."""
        return all(bool(one.rows.all() and one.columns.all()) for one in self.quiet.values())

    @property
    def other_images(self) -> bool:
        """Whether nothing is loud but other images than those that may not change."""
        first = next(iter(self.quiet.values()))
        images = first.planes.any(1)
        return (
            self.whole_planes
            and bool(first.planes[images].all())
            and all(bool(one.planes.all()) for one in list(self.quiet.values())[1:])
        )

    def describe(self) -> str:
        """How much of each tensor is quiet, in words."""
        words = []
        for role, (planes, rows, columns) in self.quiet.items():
            shares = (f"{int(one.sum())}/{one.numel()}" for one in (planes, rows, columns))
            words.append(f"{role} {'x'.join(shares)}")
        return "quiet planes x rows x columns: " + ", ".join(words)


def patterns(problem: Problem, direction: str, draw: Random) -> Iterator[tuple[Pattern, bool]]:
    """The patterns of a check, drawn by chance, and whether what is loud is NaN.

    In each, all is loud but what some results read. A faulty result is most often at the end of
    rows or columns, so that there is a pattern for each of these, and one more; NaN are whole
    planes.
    """
    for choose in (_last, _some):
        for dim in (_COLUMNS, _ROWS):
            yield drawn(problem, direction, draw, {dim: choose}), False
    yield drawn(problem, direction, draw, whole_planes=True), True


Choose = Callable[[Random, int], Tensor]
"""Some of several positions."""


def drawn(
    problem: Problem,
    direction: str,
    draw: Random,
    choose: Mapping[int, Choose] = MappingProxyType({}),
    whole_planes: bool = False,
) -> Pattern:
    """A pattern whose results that may not change are drawn by chance.

    ``choose`` has dimensions of the result along which they must not be all. ``whole_planes``
    leaves all rows and columns of a plane alike.
    """
    shape = _result_shape(problem, direction)
    wanted = _wanted(shape, draw, choose, _PLANES_ALONE if whole_planes else _CHANCES)
    images, ins, outs = _planes(problem, direction, *wanted[:2])
    sides = [_side(problem, axis, direction, wanted[2 + axis], whole_planes) for axis in (0, 1)]
    regions = {
        role: Region(planes, *(side.quiet[role] for side in sides))
        for role, planes in _meeting(problem, direction, images, ins, outs).items()
    }
    unchanged = regions.pop(RESULTS[direction])
    grad_rows = [side.quiet["grad_output"] for side in sides]
    whole = direction == "weight_grad" and all(bool(one.all()) for one in grad_rows)
    return Pattern(
        regions,
        unchanged,
        (sides[0].reading, sides[1].reading),
        outs if direction == "forward" else None,
        outs & whole,
    )


def _result_shape(problem: Problem, direction: str) -> tuple[int, ...]:
    shapes = {
        "grad_output": problem.output_shape,
        "input": problem.input_shape,
        "weight": problem.weight_shape,
    }
    return shapes[RESULTS[direction]]


# That of a dimension of the result not all positions are wanted.
_CHANCES = (0.6, 0.6, 0.2, 0.2)
_PLANES_ALONE = (0.85, 0.85, 0.0, 0.0)


def _wanted(
    shape: Sequence[int], draw: Random, choose: Mapping[int, Choose], chances: Sequence[float]
) -> list[Tensor]:
    """Of each dimension of the result, the positions of those results that may not change.

    Along most of them these are all: what a faulty result reads is most often far away along one
    dimension, and the result may be any along the others.
    """
    several = [dim for dim, chance in enumerate(chances) if shape[dim] > 1 and chance > 0]
    chosen: dict[int, Choose] = {
        dim: _some_planes if dim < _ROWS else _some
        for dim in several
        if draw.random() < chances[dim]
    }
    chosen.update((dim, one) for dim, one in choose.items() if dim in several)
    if several and not chosen:
        chosen[draw.choice(several)] = _some_planes
    wanted = [torch.ones(size, dtype=torch.bool) for size in shape]
    for dim, one in chosen.items():
        wanted[dim] = one(draw, shape[dim])
    return wanted


def _last(draw: Random, count: int) -> Tensor:
    """The last of several positions, or sometimes some of the last."""
    first = count - 1 if draw.random() < 0.75 else draw.randrange(1, count)
    return torch.arange(count) >= first


def _some(draw: Random, count: int) -> Tensor:
    """One of several positions, or those up to one, or about a half."""
    place, at = torch.arange(count), draw.randrange(count)
    up_to = place <= draw.randrange(count - 1)
    one = place == at
    return draw.choice((one, one, one, place == 0, up_to, _half(draw, count)))


def _some_planes(draw: Random, count: int) -> Tensor:
    """The same of images or channels, of which no two read the same."""
    place, at = torch.arange(count), draw.choice((0, count - 1, draw.randrange(count)))
    return draw.choice((place == at, _half(draw, count)))


def _half(draw: Random, count: int) -> Tensor:
    """About a half of several positions."""
    half = torch.tensor([draw.random() < 0.5 for _ in range(count)])
    first, second = draw.sample(range(count), 2)
    half[first], half[second] = True, False
    return half


# --- What a result reads --------------------------------------------------------------------------


class _Side(NamedTuple):
    """Along rows or columns, by role: what is quiet, of the result what may not change."""

    quiet: dict[str, Tensor]
    reading: Tensor  # positions of the result that read anything


def _side(problem: Problem, axis: int, direction: str, wanted: Tensor, whole: bool) -> _Side:
    """Makes quiet what the wanted positions of the result read, or all if it is ``whole``."""
    counts = {
        "input": problem.input_size[axis],
        "grad_output": problem.output_size[axis],
        "weight": problem.kernel_size[axis],
    }
    meeting = _products(problem, axis, counts)
    result = RESULTS[direction]
    at = meeting[result]
    quiet = {}
    heard = torch.zeros(len(at), dtype=torch.bool)
    for role in _AXES:
        if role != result:
            quiet[role] = torch.full((counts[role],), whole)
            quiet[role][meeting[role][wanted[at]]] = True
            heard |= ~quiet[role][meeting[role]]
    quiet[result] = torch.ones(counts[result], dtype=torch.bool)
    quiet[result][at[heard]] = False
    reading = torch.zeros(counts[result], dtype=torch.bool)
    reading[at] = True
    return _Side(quiet, reading)


def _products(problem: Problem, axis: int, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Positions in each tensor that meet in a product, along one axis; padding is left out."""
    output, tap = torch.meshgrid(
        torch.arange(counts["grad_output"]), torch.arange(counts["weight"]), indexing="ij"
    )
    before = problem.padding[2 * axis]
    place = output * problem.stride[axis] + tap * problem.dilation[axis] - before
    inside = (place >= 0) & (place < counts["input"])
    return {"input": place[inside], "grad_output": output[inside], "weight": tap[inside]}


def _planes(
    problem: Problem, direction: str, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, input channels and output channels that are quiet.

    ``first`` and ``second`` are what of the result's first two dimensions may not change.
    """
    ins, outs = problem.in_channels, problem.out_channels
    if direction == "input_grad":
        return first, second, _same_groups(second, problem.groups, outs)
    if direction == "forward":
        return first, _same_groups(second, problem.groups, ins), second
    images = torch.ones(problem.batch, dtype=torch.bool)  # a sum over all of them
    quiet_ins = _same_groups(first, problem.groups, ins) & second.repeat(problem.groups)
    return images, quiet_ins, first


def _same_groups(channels: Tensor, groups: int, count: int) -> Tensor:
    """Of ``count`` other channels, those in groups that have some of these."""
    return channels.view(groups, -1).any(1).repeat_interleave(count // groups)


def _meeting(
    problem: Problem, direction: str, images: Tensor, ins: Tensor, outs: Tensor
) -> dict[str, Tensor]:
    """Planes of each tensor that are quiet; of the result, those that may not change."""
    every = torch.ones_like
    by_filter = ins.view(problem.groups, -1).repeat_interleave(
        problem.out_channels // problem.groups, 0
    )
    weight = {
        "forward": outs[:, None] & every(by_filter),
        "input_grad": by_filter,
        "weight_grad": outs[:, None] & by_filter,
    }[direction]
    return {
        "input": images[:, None] & ins,
        "grad_output": images[:, None] & outs,
        "weight": weight,
    }


# --- Tensors --------------------------------------------------------------------------------------


def loudness(dtype: torch.dtype) -> float:
    return LOUD.get(dtype, _LOUDEST)


def positive(
    shape: Sequence[int],
    dtype: torch.dtype,
    exponent: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Random numbers from 2^(exponent - 1) to 2^exponent."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    uniform = torch.rand(tuple(shape), dtype=wide, generator=generator, device=device)
    return (uniform.add_(1) * 2.0 ** (exponent - 1)).to(dtype)


def exponents(terms: int) -> tuple[int, int]:
    """Of both operands, so that a sum of so many products is about 1."""
    total = -math.ceil(math.log2(terms))
    return total // 2, total - total // 2


def made_loud(tensor: Tensor, quiet: Tensor, factor: float) -> Tensor:
    """The tensor, multiplied by a factor wherever it is not quiet; NaN, if that is the factor."""
    return torch.where(quiet, tensor, tensor * factor)


# --- Verdict --------------------------------------------------------------------------------------

Within = Callable[[], float | None]
"""By how much results may differ, relative to their size, where a documented rule changes the
arithmetic with the data; None where there is no such rule. It is asked for where bits differ."""


def complaint(
    pattern: Pattern, before: Tensor, after: Tensor, within: Within, must_change: bool = True
) -> str | None:
    """What is wrong with results of both runs, or None.

    ``must_change`` asks that every result changes that reads something loud.
    """
    unchanged = pattern.unchanged.mask(before.device)
    found = _difference(before, after, unchanged, within)
    if found is None and must_change:
        rows, columns = (one.to(before.device) for one in pattern.reading)
        deaf = ~unchanged & rows[:, None] & columns & (before == after)
        found = _first("of what reads loud elements are as they were", deaf, before, after)
    return found and f"{found} ({pattern.describe()})"


def bias_grad_complaint(
    pattern: Pattern, before: Tensor, after: Tensor, within: Within
) -> str | None:
    """The same of bias gradients."""
    unchanged = pattern.unchanged_bias_grad.to(before.device)
    found = _difference(before, after, unchanged, within)
    return found and f"bias gradient: {found} ({pattern.describe()})"


def _difference(before: Tensor, after: Tensor, unchanged: Tensor, within: Within) -> str | None:
    changed = unchanged & ~(before == after)  # NaN counts as changed: no quiet result is NaN
    if not changed.any():
        return None
    most = within()
    if most is not None:
        changed &= ~((before - after).abs() <= most * before.abs())
    return _first("of what reads nothing loud have changed", changed, before, after)


def _first(what: str, wrong: Tensor, before: Tensor, after: Tensor) -> str | None:
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} {what}, first at {list(at)}: {before[at]:.9g} before and "
        f"{after[at]:.9g} after"
    )


# --- Trials ---------------------------------------------------------------------------------------

_MARGIN = 512  # elements before and behind a tensor, that count as loud
_EXACT_ACTIVATIONS = ("identity", "relu", "relu6", "leaky_relu", "hardswish")
_APART = 3  # columns between the rows of a tensor that is not dense


class Outcome(NamedTuple):
    """What is wrong, if anything is, and whose kernels computed it."""

    complaint: str | None
    family: str


def check(trial: Trial, device: torch.device) -> Outcome:
    """Whether a trial's pass is isolated, by several patterns.

    The data is not the trial's: only shapes, types and places in memory are.
    """
    draw = Random(f"{trial.seed} isolation")
    given = _given(trial, device, draw)
    data = _data(trial, given, {}, 1.0)
    before = trials.compute(trial, data)
    return Outcome(_found(trial, given, before, draw), trials.family(trial, data, before))


def _found(trial: Trial, given: _Given, before: Results, draw: Random) -> str | None:
    device = before.main.device
    for pattern, is_nan in patterns(trial.problem, trial.case.direction, draw):
        factor = math.nan if is_nan else loudness(trial.case.torch_dtype)
        loud = _data(trial, given, _masks(pattern, device), factor)
        found = _judged(trial, pattern, loud, before, trials.compute(trial, loud))
        if found is not None:
            return f"with {'NaN' if is_nan else 'loud numbers'}: {found}"
    return None


class _Given(NamedTuple):
    """What both runs read, by role; what is loud is multiplied later."""

    tensors: dict[str, Tensor]
    activation: str
    apart: str  # the tensor, if any, whose rows have other numbers between them


def _given(trial: Trial, device: torch.device, draw: Random) -> _Given:
    roles, problem = trial.roles, trial.problem
    shapes = {role: trial.shape(role) for role in roles[:2]}
    powers = dict(zip(roles[:2], exponents(trial.terms), strict=True))
    activation = "identity"
    if trial.case.direction == "forward":
        if trial.bias:
            shapes["bias"] = (problem.out_channels,)
        if draw.random() < 0.5:
            activation = draw.choice(ACTIVATIONS)
            if draw.random() < 0.7:
                shapes["residual"] = problem.output_shape
    dtype = trial.case.torch_dtype
    tensors = {
        role: positive(shape, dtype, powers.get(role, 0), 8 * trial.seed + at, device)
        for at, (role, shape) in enumerate(shapes.items())
    }
    return _Given(tensors, activation, draw.choice(("", "", "", *roles[:2])))


def _masks(pattern: Pattern, device: torch.device) -> dict[str, Tensor]:
    masks = {role: region.mask(device) for role, region in pattern.quiet.items()}
    masks["residual"] = pattern.unchanged.mask(device)
    if pattern.quiet_bias is not None:
        masks["bias"] = pattern.quiet_bias.to(device)
    return masks


def _data(trial: Trial, given: _Given, masks: Mapping[str, Tensor], factor: float) -> Data:
    """What a run reads; what the masks leave out is loud, and so is all around the tensors."""
    made = {}
    for role, tensor in given.tensors.items():
        loud = made_loud(tensor, masks[role], factor) if masks else tensor
        place = _apart if role == given.apart else _surrounded
        made[role] = place(trial, role, loud, factor)
    first, second = (made[role] for role in trial.roles[:2])
    return Data(first, second, made.get("bias"), made.get("residual"), given.activation)


def _surrounded(trial: Trial, role: str, tensor: Tensor, around: float) -> Tensor:
    """The tensor where the trial has it in memory, between numbers that nobody may use."""
    dense = tensor.contiguous(memory_format=trial.memory_format(role))
    storage = tensor.new_full((2 * _MARGIN + tensor.numel(),), around)
    at = _MARGIN + (role in trial.misaligned)
    return storage.as_strided(dense.shape, dense.stride(), at).copy_(dense)


def _apart(trial: Trial, role: str, tensor: Tensor, around: float) -> Tensor:
    """The tensor as part of a wider one, in whose rows other numbers follow."""
    *sizes, width = tensor.shape
    wide = tensor.new_full((*sizes, width + _APART), around)
    wide = wide.contiguous(memory_format=trial.memory_format(role))
    part = wide[..., 1 : width + 1]
    return part.copy_(tensor)


def _judged(
    trial: Trial, pattern: Pattern, data: Data, before: Results, after: Results
) -> str | None:
    def within() -> float | None:
        need = trials.need(trial, data, before)
        if need is None:
            changes = _may_change_on_cpu(trial, data)
        else:
            changes = may_change_arithmetic(cuda.planned(need), trial.case.direction, pattern)
        return 2 * judging.tolerance(trial) if changes else None

    # A single loud number in the longest sums of 16-bit types may be lost in rounding.
    eps = torch.finfo(trial.case.torch_dtype).eps
    is_heard = loudness(trial.case.torch_dtype) / trial.terms > 16 * eps
    found = complaint(pattern, before.main, after.main, within, must_change=is_heard)
    if found is None and before.bias_grad is not None and after.bias_grad is not None:
        found = bias_grad_complaint(pattern, before.bias_grad, after.bias_grad, within)
    return found


def _may_change_on_cpu(trial: Trial, data: Data) -> bool:
    """Whether a CPU backend may round otherwise, as docs/numerics.md has it.

    It sums in another order where a weight is not finite, and PyTorch's activations may round by
    what lies beside a number.
    """
    if data.activation not in _EXACT_ACTIVATIONS:
        return True
    return trial.roles.second == "weight" and not bool(data.second.isfinite().all())


def may_change_arithmetic(plan: Plan, direction: str, pattern: Pattern) -> bool:
    """Whether loud numbers may decide how others are multiplied, as docs/numerics.md has it.

    Kernels that multiply float32 as float16 take TF32 where the range of an image, of the weights,
    or in a weight gradient of a channel does not allow it.
    """
    constants = (dict(launch.kernel.constants) for launch in plan.launches)
    if not any(one.get("halves") for one in constants):
        return False
    return not (pattern.whole_planes if direction == "weight_grad" else pattern.other_images)
