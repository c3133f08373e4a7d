"""Isolation: a result depends on the elements that its formula reads, and on nothing else.

A pass runs twice. For the second run, some elements of its operands are made *loud*: they are
multiplied by a large factor, or replaced by NaN; the others stay *quiet*. Results that read no loud
element must keep all of their bits, and results that read one must change. Since no reference is
needed, problems may have any size. A pattern chooses some results, keeps what these read quiet,
and makes everything else loud, including the memory around the tensors.

All numbers are positive, so that nothing cancels. Loud numbers are finite unless whole planes are
loud: within a plane, a kernel may multiply an element by a zero that stands for padding, and NaN
times zero is NaN.
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
from fastconv.bench.cases import laid_out
from fastconv.bench.trials import Data, Results, Trial
from fastconv.kernels.family import Plan
from fastconv.problem import ACTIVATIONS, Axis, Problem

LOUD = {torch.float16: 2.0**14}
"""The factors of types whose range does not allow ``_LOUDEST``."""
_LOUDEST = 2.0**20

_SPATIAL = ("input", "grad_output", "weight")
"""The tensors that have axes; each multiplication involves a position in each."""
RESULTS = {"forward": "grad_output", "input_grad": "input", "weight_grad": "weight"}
"""For each pass, the tensor whose shape the result has."""
_FIRST_AXIS = 2  # the first dimension of a result along which it has positions


class Region(NamedTuple):
    """The elements of a tensor in some planes, at some positions along each axis, as masks."""

    planes: Tensor  # a matrix: the first two dimensions
    sides: tuple[Tensor, ...]  # for each axis

    def mask(self, device: torch.device) -> Tensor:
        """The region as a mask of all elements."""
        planes = self.planes.to(device)
        return planes.view(*planes.shape, *[1] * len(self.sides)) & _product(self.sides, device)


def _product(sides: Sequence[Tensor], device: torch.device) -> Tensor:
    """The positions that all axes' masks select, as a mask of all positions."""
    found = sides[0].to(device)
    for side in sides[1:]:
        found = found[..., None] & side.to(device)
    return found


@dataclass(frozen=True)
class Pattern:
    """Which elements are loud, and which results must therefore change or stay."""

    quiet: Mapping[str, Region]
    """For each operand, the elements that stay as they are; all others are loud."""

    unchanged: Region
    """The results that read nothing loud."""

    reading: tuple[Tensor, ...]
    """Positions along each axis of the result that read any element; others read only padding."""

    quiet_bias: Tensor | None
    """The result's channels whose bias is quiet: forward passes and input gradients may add one."""

    unchanged_bias_grad: Tensor
    """Output channels whose bias gradient may not change."""

    @property
    def whole_planes(self) -> bool:
        """Whether every plane is either loud as a whole or quiet as a whole."""
        return all(bool(side.all()) for one in self.quiet.values() for side in one.sides)

    @property
    def other_images(self) -> bool:
        """Whether whole images are loud, and nothing else is."""
        first = next(iter(self.quiet.values()))
        images = first.planes.any(1)
        return (
            self.whole_planes
            and bool(first.planes[images].all())
            and all(bool(one.planes.all()) for one in list(self.quiet.values())[1:])
        )

    def describe(self) -> str:
        """How much of each operand is quiet, for messages."""
        words = []
        for role, (planes, sides) in self.quiet.items():
            shares = (f"{int(one.sum())}/{one.numel()}" for one in (planes, *sides))
            words.append(f"{role} {'x'.join(shares)}")
        axes = ("depths", "rows", "columns")[-len(self.reading) :]
        return f"quiet {' x '.join(('planes', *axes))}: {', '.join(words)}"


def patterns(problem: Problem, direction: str, draw: Random) -> Iterator[tuple[Pattern, bool]]:
    """Draws the patterns of a check, each with whether its loud elements are NaN.

    Faults are most frequent at the end of an axis. Therefore the results that may not change are,
    in one pattern for each axis, at its last positions, and in one more for each, at any. In a last
    one, whole planes are loud, with NaN.
    """
    axes = range(_FIRST_AXIS, _FIRST_AXIS + len(problem.axes))
    for choose in (_last, _some):
        for dim in reversed(axes):
            yield drawn(problem, direction, draw, {dim: choose}), False
    yield drawn(problem, direction, draw, whole_planes=True), True


Choose = Callable[[Random, int], Tensor]
"""Draws some of so many positions, as a mask."""


def drawn(
    problem: Problem,
    direction: str,
    draw: Random,
    choose: Mapping[int, Choose] = MappingProxyType({}),
    whole_planes: bool = False,
) -> Pattern:
    """Draws a pattern: the results that may not change, and from these, what is loud.

    ``choose`` draws the positions along some dimensions of the result; along the others, all
    positions or some are taken by chance. ``whole_planes`` makes each plane loud or quiet as a
    whole.
    """
    shape = _result_shape(problem, direction)
    wanted = _wanted(shape, draw, choose, _PLANES_ALONE if whole_planes else _CHANCES)
    images, ins, outs = _planes(problem, direction, *wanted[:2])
    sides = [
        _side(axis, direction, positions, whole_planes)
        for axis, positions in zip(problem.axes, wanted[_FIRST_AXIS:], strict=True)
    ]
    regions = {
        role: Region(planes, tuple(side.quiet[role] for side in sides))
        for role, planes in _meeting(problem, direction, images, ins, outs).items()
    }
    unchanged = regions.pop(RESULTS[direction])
    grad_rows = [side.quiet["grad_output"] for side in sides]
    whole = direction == "weight_grad" and all(bool(one.all()) for one in grad_rows)
    return Pattern(
        regions,
        unchanged,
        tuple(side.reading for side in sides),
        {"forward": outs, "input_grad": ins}.get(direction),
        outs & whole,
    )


def _result_shape(problem: Problem, direction: str) -> tuple[int, ...]:
    shapes = {
        "grad_output": problem.output_shape,
        "input": problem.input_shape,
        "weight": problem.weight_shape,
    }
    return shapes[RESULTS[direction]]


# For each dimension of the result, the probability that only some of its positions are wanted.
# Images have no depth, the last but two.
_CHANCES = (0.6, 0.6, 0.2, 0.2, 0.2)
_PLANES_ALONE = (0.85, 0.85, 0.0, 0.0, 0.0)


def _wanted(
    shape: Sequence[int], draw: Random, choose: Mapping[int, Choose], chances: Sequence[float]
) -> list[Tensor]:
    """Draws the results that may not change, as a mask of positions along each dimension.

    Along most dimensions these are all positions. What a result wrongly reads is usually far away
    along one dimension only, and the result may be anywhere along the others.
    """
    several = [dim for dim, size in enumerate(shape) if size > 1 and chances[dim] > 0]
    chosen: dict[int, Choose] = {
        dim: _some_planes if dim < _FIRST_AXIS else _some
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
    """The last position, or sometimes several at the end."""
    first = count - 1 if draw.random() < 0.75 else draw.randrange(1, count)
    return torch.arange(count) >= first


def _some(draw: Random, count: int) -> Tensor:
    """One position (more often than not), or all up to one, or about half of them."""
    place, at = torch.arange(count), draw.randrange(count)
    up_to = place <= draw.randrange(count - 1)
    one = place == at
    return draw.choice((one, one, one, place == 0, up_to, _half(draw, count)))


def _some_planes(draw: Random, count: int) -> Tensor:
    """One image or channel, the first and the last more often than others, or about half."""
    place, at = torch.arange(count), draw.choice((0, count - 1, draw.randrange(count)))
    return draw.choice((place == at, _half(draw, count)))


def _half(draw: Random, count: int) -> Tensor:
    """About half of the positions: at least one, and not all."""
    half = torch.tensor([draw.random() < 0.5 for _ in range(count)])
    first, second = draw.sample(range(count), 2)
    half[first], half[second] = True, False
    return half


# --- What a result reads --------------------------------------------------------------------------


class _Side(NamedTuple):
    """A pattern along one axis, as masks of positions."""

    quiet: dict[str, Tensor]  # by tensor; for the result, the positions that may not change
    reading: Tensor  # positions of the result that read any element


def _side(axis: Axis, direction: str, wanted: Tensor, whole: bool) -> _Side:
    """Keeps quiet what the wanted positions of the result read, or everything if ``whole``."""
    counts = {
        "input": axis.input_size,
        "grad_output": axis.output_size,
        "weight": axis.kernel_size,
    }
    meeting = _multiplied_positions(axis)
    result = RESULTS[direction]
    at = meeting[result]
    quiet = {}
    heard = torch.zeros(len(at), dtype=torch.bool)
    for role in _SPATIAL:
        if role != result:
            quiet[role] = torch.full((counts[role],), whole)
            quiet[role][meeting[role][wanted[at]]] = True
            heard |= ~quiet[role][meeting[role]]
    quiet[result] = torch.ones(counts[result], dtype=torch.bool)
    quiet[result][at[heard]] = False
    reading = torch.zeros(counts[result], dtype=torch.bool)
    reading[at] = True
    return _Side(quiet, reading)


def _multiplied_positions(axis: Axis) -> dict[str, Tensor]:
    """All multiplications along one axis, as their positions in each tensor, without padding."""
    output, tap = torch.meshgrid(
        torch.arange(axis.output_size), torch.arange(axis.kernel_size), indexing="ij"
    )
    place = output * axis.stride + tap * axis.dilation - axis.before
    inside = (place >= 0) & (place < axis.input_size)
    return {"input": place[inside], "grad_output": output[inside], "weight": tap[inside]}


def _planes(
    problem: Problem, direction: str, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the images, input channels and output channels that are quiet.

    ``first`` and ``second`` mask the result's first two dimensions: what may not change.
    """
    ins, outs = problem.in_channels, problem.out_channels
    if direction == "input_grad":
        return first, second, _same_groups(second, problem.groups, outs)
    if direction == "forward":
        return first, _same_groups(second, problem.groups, ins), second
    images = torch.ones(problem.batch, dtype=torch.bool)  # Weight gradients sum over all images.
    quiet_ins = _same_groups(first, problem.groups, ins) & second.repeat(problem.groups)
    return images, quiet_ins, first


def _same_groups(channels: Tensor, groups: int, count: int) -> Tensor:
    """Masks those of ``count`` channels whose group has any of the given channels.

    For output channels these are the input channels that they read, and the reverse.
    """
    return channels.view(groups, -1).any(1).repeat_interleave(count // groups)


def _meeting(
    problem: Problem, direction: str, images: Tensor, ins: Tensor, outs: Tensor
) -> dict[str, Tensor]:
    """For each tensor, a mask of its quiet planes; for the result, those that may not change."""
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
    """The factor that makes numbers of a type loud."""
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
    """Exponents for :func:`positive` such that a sum of ``terms`` products is about 1."""
    total = -math.ceil(math.log2(terms))
    return total // 2, total - total // 2


def made_loud(tensor: Tensor, quiet: Tensor, factor: float) -> Tensor:
    """Multiplies the tensor by the factor, which may be NaN, wherever it is not quiet."""
    return torch.where(quiet, tensor, tensor * factor)


# --- Verdict --------------------------------------------------------------------------------------

Within = Callable[[], float | None]
"""Called where bits differ. Returns the relative difference that is allowed where documented rules
let the data decide the arithmetic, and None where no such rule applies."""


def complaint(
    pattern: Pattern, before: Tensor, after: Tensor, within: Within, must_change: bool = True
) -> str | None:
    """What is wrong with the results of the two runs, or None.

    ``must_change`` requires that every result that reads a loud element changes.
    """
    unchanged = pattern.unchanged.mask(before.device)
    found = _difference(before, after, unchanged, within)
    if found is None and must_change:
        deaf = ~unchanged & _product(pattern.reading, before.device) & (before == after)
        found = _first("results that read loud elements have not changed", deaf, before, after)
    return found and f"{found} ({pattern.describe()})"


def bias_grad_complaint(
    pattern: Pattern, before: Tensor, after: Tensor, within: Within
) -> str | None:
    """What is wrong with the bias gradients of the two runs, or None."""
    unchanged = pattern.unchanged_bias_grad.to(before.device)
    found = _difference(before, after, unchanged, within)
    return found and f"bias gradient: {found} ({pattern.describe()})"


def _difference(before: Tensor, after: Tensor, unchanged: Tensor, within: Within) -> str | None:
    changed = unchanged & ~(before == after)  # NaN counts as changed: no quiet result is NaN.
    if not changed.any():
        return None
    most = within()
    if most is not None:
        changed &= ~((before - after).abs() <= most * before.abs())
    return _first("results that read no loud element have changed", changed, before, after)


def _first(what: str, wrong: Tensor, before: Tensor, after: Tensor) -> str | None:
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} {what}, first at {list(at)}: {before[at]:.9g} before and "
        f"{after[at]:.9g} after"
    )


# --- Trials ---------------------------------------------------------------------------------------

_MARGIN = 512  # loud elements before and behind a tensor in memory
_GAP = 3  # loud columns between the rows of a tensor that is not dense
_EXACT_ACTIVATIONS = ("identity", "relu", "relu6", "leaky_relu", "hardswish")
"""On a CPU, PyTorch's rounding of the other activations may depend on neighbouring elements."""


class Outcome(NamedTuple):
    """What is wrong, if anything, and the family of kernels that computed it."""

    complaint: str | None
    family: str


def check(trial: Trial, device: torch.device) -> Outcome:
    """Checks by several patterns whether a trial's pass is isolated.

    The trial's shapes, types and memory layouts are used, but not its data.
    """
    draw = Random(f"{trial.seed} isolation")
    given = _given(trial, device, draw)
    data = _data(trial, given, {}, 1.0)
    before = trials.compute(trial, data)
    return Outcome(_check_patterns(trial, given, before, draw), trials.family(trial, data, before))


def _check_patterns(trial: Trial, given: _Given, before: Results, draw: Random) -> str | None:
    device = before.main.device
    for pattern, is_nan in patterns(trial.problem, trial.direction, draw):
        factor = math.nan if is_nan else loudness(trial.case.torch_dtype)
        loud = _data(trial, given, _masks(pattern, device), factor)
        found = _judged(trial, pattern, loud, before, trials.compute(trial, loud))
        if found is not None:
            return f"with {'NaN' if is_nan else 'loud numbers'}: {found}"
    return None


class _Given(NamedTuple):
    """The quiet operands, the same for all runs of a check."""

    tensors: dict[str, Tensor]  # by role
    activation: str
    with_gaps: str  # the role of the tensor whose rows have gaps between them; "" for none


def _given(trial: Trial, device: torch.device, draw: Random) -> _Given:
    roles = trial.roles
    shapes = {role: trial.shape(role) for role in roles[:2]}
    powers = dict(zip(roles[:2], exponents(trial.terms), strict=True))
    activation = "identity"
    if trial.case.direction == "forward":
        if trial.bias:
            shapes["bias"] = trial.shape(roles.result)[1:2]
        if draw.random() < 0.5:
            activation = draw.choice(ACTIVATIONS)
            if draw.random() < 0.7:
                shapes["residual"] = trial.shape(roles.result)
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
    """The operands of a run: elements outside the masks are loud, and so is the memory around."""
    made = {}
    for role, tensor in given.tensors.items():
        loud = made_loud(tensor, masks[role], factor) if masks else tensor
        place = _with_gaps if role == given.with_gaps else _surrounded
        made[role] = place(trial, role, loud, factor)
    first, second = (made[role] for role in trial.roles[:2])
    return Data(first, second, made.get("bias"), made.get("residual"), given.activation)


def _surrounded(trial: Trial, role: str, tensor: Tensor, around: float) -> Tensor:
    """The tensor with the trial's layout and alignment, between margins filled with ``around``."""
    dense = laid_out(tensor, trial.memory_format(role))
    storage = tensor.new_full((2 * _MARGIN + tensor.numel(),), around)
    at = _MARGIN + trial.is_misaligned(role)
    return storage.as_strided(dense.shape, dense.stride(), at).copy_(dense)


def _with_gaps(trial: Trial, role: str, tensor: Tensor, around: float) -> Tensor:
    """The tensor as a slice of a wider one, which is filled with ``around`` elsewhere."""
    *sizes, width = tensor.shape
    wide = tensor.new_full((*sizes, width + _GAP), around)
    wide = laid_out(wide, trial.memory_format(role))
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
            changes = may_change_arithmetic(cuda.planned(need), trial.direction, pattern)
        return 2 * judging.tolerance(trial) if changes else None

    # In the longest sums of 16-bit types, a single loud number may be lost in rounding.
    eps = torch.finfo(trial.case.torch_dtype).eps
    is_heard = loudness(trial.case.torch_dtype) / trial.terms > 16 * eps
    found = complaint(pattern, before.main, after.main, within, must_change=is_heard)
    if found is None and before.bias_grad is not None and after.bias_grad is not None:
        found = bias_grad_complaint(pattern, before.bias_grad, after.bias_grad, within)
    return found


def _may_change_on_cpu(trial: Trial, data: Data) -> bool:
    """Whether the CPU backend may round quiet results differently (docs/numerics.md).

    It sums in another order where a weight is not finite, and PyTorch computes activations in
    vectors, so that an element's rounding may depend on its neighbours.
    """
    if data.activation not in _EXACT_ACTIVATIONS:
        return True
    return trial.roles.second == "weight" and not bool(data.second.isfinite().all())


def may_change_arithmetic(plan: Plan, direction: str, pattern: Pattern) -> bool:
    """Whether loud numbers may change the arithmetic of quiet results (docs/numerics.md).

    Kernels with scaled fp16 fall back to TF32 where the range of an image or of the weights, or in
    weight gradients that of a channel, does not fit float16.
    """
    constants = (dict(launch.kernel.constants) for launch in plan.launches)
    if not any(one.get("scaled_fp16") for one in constants):
        return False
    return not (pattern.whole_planes if direction == "weight_grad" else pattern.other_images)
