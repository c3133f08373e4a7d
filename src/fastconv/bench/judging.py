"""References in float64, and bounds on the error of each element of a result.

References are PyTorch's convolutions in float64, which are slow on GPUs. Where a full reference
would take too long, only some channels are compared, always the first and the last among them, and
in addition the sum of all channels with random signs. So a reference of a few channels still
depends on every element of the result.

The bounds follow from how kernels round. An element is a sum of products x·w.

* Rounding both operands by up to ε changes the sum by at most 2ε Σ|xw|. In Gaussian data, the
  changes are independent, each with a standard deviation of at most 0.6ε|xw|. Then 5ε √Σ(xw)² is 8
  standard deviations of the sum, which none of 10¹⁰ elements should reach.
* A chain of n additions in float32 has a standard deviation of 0.4u√n √Σ(xw)², with u = 2⁻²⁴, and
  several times that where the sum is large. Long sums are sums of such chains.
* Tensor cores truncate rather than round: each MMA, of up to 8 or 16 terms, loses 0.3u of the sum.
* Finally, the result is rounded to its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv.bench import contestants, kernel_passes
from fastconv.bench.cases import Tensors
from fastconv.bench.trials import NORMAL, Data, Results, Trial

# A reference computes two convolutions, of the values and of their sizes. Channels are left out
# until both together take at most this many operations.
MOST_FLOPS = {"cpu": 2e9, "cuda": 2e10}
MOST_ELEMENTS = 2**25  # Channels are left out until a float64 reference has at most this many.
CHUNK_ELEMENTS = 2**24  # Images are converted to float64 in chunks of about this many elements.

# The relative error of an operand: TF32 has 11 bits, and 3xTF32 keeps 22 bits of float32.
_OPERANDS = {"float32 tf32": 2.0**-11, "float32 ieee": 2.0**-22}
# With scaled fp16, small numbers lose more: this share of their channel's root mean square, in
# units of _OPERANDS (docs/numerics.md, "What holds").
_CHANNEL = {"float32 tf32": 2.0**-9, "float32 ieee": 2.0**-3}
_DEVIATIONS = 5  # The bound on a sum of independent roundings, in units of one rounding's maximum.
_ENDLESS = 1e300  # This stands for infinities and NaN, which JSON does not have.
_CHAIN = 512  # Kernels add at most this many terms in a chain, and then add the chains' sums.
_TRUNCATED_CHAIN = 8192  # The longest chain of weight gradients on tensor cores, in terms.


def tolerance(trial: Trial) -> float:
    """The error that a trial's sums may have, relative to the size of their terms.

    The size is that of :func:`size_of`.
    """
    n, mode = trial.terms, trial.case.mode
    unit = 2.0**-53 if mode == "float64" else 2.0**-24
    added = 12 + 6 * (math.sqrt(min(n, _CHAIN)) + math.sqrt(n / _CHAIN))
    if mode == "float64":
        added += 12 + 6 * math.sqrt(n)  # The reference itself may be a single chain in float64.
    elif mode != "float32 ieee":
        added += _chained_mmas(trial) / 2
    times = _DEVIATIONS if trial.data == NORMAL else 2.01
    return times * _OPERANDS.get(mode, 0.0) + added * unit


def _chained_mmas(trial: Trial) -> float:
    """How many MMAs may add to the same accumulators: each is of 8 channels or fewer of a tap."""
    problem = trial.problem
    if trial.direction == "weight_grad":
        return min(trial.terms, _TRUNCATED_CHAIN) / 8
    forward = trial.direction == "forward"
    channels = problem.in_channels if forward else problem.out_channels
    return math.prod(problem.weight_shape[2:]) * math.ceil(channels / problem.groups / 8)


@dataclass(frozen=True)
class Error:
    """The error of a result, over all compared elements."""

    relative: float  # ‖result - float64‖ / ‖float64‖
    maximum: float  # max |result - float64| / max |float64|


@dataclass(frozen=True)
class Verdict:
    """How a result compares with the reference."""

    error: Error
    share: float  # the largest error of an element, relative to its bound
    wrong: int  # elements whose error exceeds their bound
    compared: int
    worst: str  # the place and the values of the element of ``share``

    @property
    def complaint(self) -> str | None:
        """What is wrong, or None."""
        if not self.wrong:
            return None
        return f"{self.wrong} of {self.compared} elements are wrong: {self.worst}"


class Part(NamedTuple):
    """Results and their factors in a sum that is compared with the reference."""

    results: Results
    factor: float | Tensor = 1.0
    bias_factor: float | Tensor = 1.0


class Selection(NamedTuple):
    """The groups, and the channels of each of them, that a reference covers.

    The channels of a group are the rows of the reference. If not all are covered, one more row
    follows: the sum of all channels of the group, with random signs.
    """

    groups: Tensor  # indices of groups
    rows: Tensor  # indices of channels in their group
    signs: Tensor | None  # of each channel in the sum; None if all channels are covered
    of_groups: int  # how many groups the convolution has
    of_rows: int  # how many channels a group has

    @property
    def part(self) -> str:
        """What is compared, in words."""
        words = ["all channels"]
        if self.signs is not None:
            words = [f"{len(self.rows)} of {self.of_rows} channels", "and the sum of all"]
        if len(self.groups) < self.of_groups:
            words.append(f"{len(self.groups)} of {self.of_groups} groups")
        return ", ".join(words)

    def of_group(self, role: str, tensor: Tensor) -> Tensor:
        """The selected groups of a tensor."""
        dim = _channel_dim(role)
        if len(self.groups) == self.of_groups:
            return tensor
        apart = tensor.unflatten(dim, (self.of_groups, -1))
        return apart.index_select(dim, self.groups).flatten(dim, dim + 1)

    def of_row(self, role: str, axis: str, tensor: Tensor, factors: Tensor | None) -> Tensor:
        """The selected channels of each selected group; last, the sum of all times ``factors``.

        ``axis`` is the axis of the rows (:class:`~fastconv.bench.trials.Roles`).
        """
        tensor = self.of_group(role, tensor)
        if self.signs is None or factors is None:
            return tensor
        if role == "weight" and axis == "c":
            # A weight's second dimension has the channels of one group.
            return self._rows(tensor, 1, factors)
        dim = _channel_dim(role)
        apart = tensor.unflatten(dim, (len(self.groups), -1))
        return self._rows(apart, dim + 1, factors).flatten(dim, dim + 1)

    def _rows(self, tensor: Tensor, dim: int, factors: Tensor) -> Tensor:
        along = factors.view(-1, *[1] * (tensor.dim() - dim - 1))
        total = (tensor * along).sum(dim, keepdim=True)
        return torch.cat([tensor.index_select(dim, self.rows), total], dim)

    def channel(self, row: int) -> str:
        """The name of a row of the reference: its channel's index, or the range of the sum."""
        group, at = divmod(row, len(self.rows) + (self.signs is not None))
        first = int(self.groups[group]) * self.of_rows
        if at == len(self.rows):
            return f"sum from {first} to {first + self.of_rows - 1}"
        return str(first + int(self.rows[at]))


def select(trial: Trial, device: torch.device) -> Selection:
    """Selects as many channels as :data:`MOST_FLOPS` and :data:`MOST_ELEMENTS` allow."""
    problem, draw = trial.problem, Random(trial.seed)
    channels = problem.out_channels if trial.roles.rows == "k" else problem.in_channels
    groups, rows = problem.groups, channels // problem.groups
    elements = math.prod(trial.shape(trial.roles.result))
    cost = max(2 * problem.flops / MOST_FLOPS[device.type], elements / MOST_ELEMENTS)
    room = int(channels / max(cost, 1))
    some_rows = min(rows, max(3, room // groups))
    some_groups = min(groups, max(2, room // some_rows))
    signs = None
    if some_rows < rows:
        some_rows -= 1  # The sum of all channels takes the place of one.
        signs = torch.tensor([draw.choice((-1.0, 1.0)) for _ in range(rows)], device=device)
        signs = signs.double()
    indices = partial(torch.tensor, device=device)
    return Selection(
        indices(_some(draw, some_groups, groups)),
        indices(_some(draw, some_rows, rows)),
        signs, groups, rows,
    )  # fmt: skip


class Reference:
    """The results that a trial should give for its data, and the bounds on their errors."""

    def __init__(self, trial: Trial, data: Data) -> None:
        self._trial = trial
        self._size = size_of(trial)
        self.selection = select(trial, data.first.device)
        self._chunks = self._compute(data)
        self._bias_grad = self._compute_bias_grad(data.second) if trial.has_bias_grad else None

    def judge(self, *parts: Part, slack: float = 1.0) -> Verdict:
        """Compares the sum of the parts with the reference.

        ``slack`` multiplies the bounds, for the errors of several parts add up.
        """
        tally = _Tally(torch.finfo(self._trial.case.torch_dtype))
        for images, expected, bound in self._chunks:
            rows, spreads = zip(*(self._rows(part, images) for part in parts), strict=True)
            where = partial(self._where, images)
            tally.add(_total(rows), expected, slack * bound, _total(spreads), where)
        if self._bias_grad is not None:
            expected, bound = self._bias_grad
            grads = [
                part.results.bias_grad.double() * part.bias_factor
                for part in parts
                if part.results.bias_grad is not None
            ]
            rounded = _total([grad.abs() for grad in grads])
            tally.add(_total(grads), expected, slack * bound, rounded, lambda at: f"bias {at}")
        return tally.verdict()

    def _compute(self, data: Data) -> list[tuple[slice, Tensor, Tensor]]:
        """Chunks of images with their expected results and bounds.

        Weight gradients sum over all images, so that they have a single chunk.
        """
        chunks: Iterator[tuple[slice, Tensor, Tensor]] = (
            (images, *self._chunk(data, images)) for images in self._images(data)
        )
        if self._trial.roles.summed == "n":
            _, expected, sizes = next(chunks)
            for _, more, more_sizes in chunks:
                expected += more
                sizes += more_sizes
            chunks = iter([(slice(None), expected, sizes)])
        within, root = tolerance(self._trial), self._size.root
        return [(images, expected, root(sizes) * within) for images, expected, sizes in chunks]

    def _chunk(self, data: Data, images: slice) -> tuple[Tensor, Tensor]:
        """The expected results of some images, and the added sizes of their terms."""
        trial, roles, selection, size = self._trial, self._trial.roles, self.selection, self._size
        channel = _CHANNEL.get(trial.case.mode, 0.0)
        first = selection.of_group(roles.first, data.first[images]).double()
        second = data.second[images] if roles.second == "grad_output" else data.second
        second = second.double()
        signs = selection.signs
        ones = None if signs is None else torch.ones_like(signs)
        rows = selection.of_row(roles.second, roles.rows, second, signs)
        expected = self._convolved(first, rows)
        rows = selection.of_row(roles.second, roles.rows, size.term(second, channel), ones)
        sizes = self._convolved(size.term(first, channel), rows)
        if data.bias is not None:
            bias = data.bias.double().view(-1, *[1] * (data.first.dim() - 2))[None]
            expected += selection.of_row(roles.result, roles.rows, bias, signs)
            sizes += selection.of_row(roles.result, roles.rows, size.term(bias, 0.0), ones)
        return expected, sizes

    def _convolved(self, first: Tensor, second: Tensor) -> Tensor:
        """The pass of the given channels in float64, by PyTorch's function of the layer."""
        trial, case, groups = self._trial, self._trial.case, len(self.selection.groups)
        given = {trial.roles.first: first, trial.roles.second: second}
        in_channels, out_channels = {
            "forward": (first.shape[1], second.shape[0]),
            "input_grad": (second.shape[1] * groups, first.shape[1]),
            "weight_grad": (first.shape[1], second.shape[1]),
        }[trial.direction]
        workload = kernel_passes.with_channels(
            case.workload, first.shape[0], in_channels, out_channels, groups
        )
        problem = workload.problem
        shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
        nothing = first.new_zeros(1)  # stands for the tensor that the pass does not read
        named = zip(Tensors._fields, shapes, strict=True)
        tensors = Tensors(*(given.get(role, nothing.expand(shape)) for role, shape in named))
        exact = replace(case, workload=workload, dtype="float64", precision=None)
        layers = kernel_passes.of_layer(workload, tensors)
        with contestants.settings(None, benchmark=False):  # Trying float64 algorithms takes long.
            found = _without_cudnn_gaps(contestants.pytorch(exact), layers)
        return kernel_passes.as_images(found)

    def _compute_bias_grad(self, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        size, pixels = self._size, tuple(range(1, grad_output.dim() - 1))
        by_image = [
            (image.double().sum(pixels), size.term(image.double(), 0.0).sum(pixels))
            for image in grad_output
        ]
        expected, terms = (torch.stack(one).sum(0) for one in zip(*by_image, strict=True))
        return expected, size.root(terms) * tolerance(self._trial)

    def _images(self, data: Data) -> list[slice]:
        """Chunks of images, small enough to be converted to float64 at once."""
        images, each = data.first.shape[0], self._trial.elements // data.first.shape[0]
        step = max(1, CHUNK_ELEMENTS // each)
        return [slice(at, at + step) for at in range(0, images, step)]

    def _rows(self, part: Part, images: slice) -> tuple[Tensor, Tensor]:
        """The part's rows, as the reference has them, and the sizes of their rounded results."""
        roles, selection, size = self._trial.roles, self.selection, self._size
        factor = part.factor
        if isinstance(factor, Tensor) and factor.shape[0] > 1:
            factor = factor[images]
        result = part.results.main[images].double()
        if isinstance(factor, Tensor) or factor != 1.0:
            result = result * factor
        signs = selection.signs
        rows = selection.of_row(roles.result, roles.rows, result, signs)
        spread = None if signs is None else torch.full_like(signs, size.deviations)
        terms = selection.of_row(roles.result, roles.rows, size.term(result, 0.0), spread)
        return rows, size.root(terms)

    def _where(self, images: slice, at: list[int]) -> str:
        if self._trial.case.direction == "weight_grad":
            return f"output channel {self.selection.channel(at[0])}, {at[1:]}"
        image = at[0] + (images.start or 0)
        return f"image {image}, channel {self.selection.channel(at[1])}, {at[2:]}"


def _without_cudnn_gaps(compute: contestants.Pass, tensors: Tensors) -> Tensor:
    """PyTorch's result; without cuDNN if that cannot compute this float64 convolution."""
    try:
        result: Tensor = compute(tensors)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if not tensors.input.is_cuda:
            raise
        with torch.backends.cudnn.flags(enabled=False):
            result = compute(tensors)
    return result


class _Size(NamedTuple):
    """A rule for the size of a sum of terms: ``root`` of the sum of ``term`` of each.

    The second argument of ``term`` is the share of its channel's root mean square that is added to
    the size of a number.
    """

    term: Callable[[Tensor, float], Tensor]
    root: Callable[[Tensor], Tensor]
    deviations: float  # factor of each ``term`` where independently rounded results are added up


def _square(tensor: Tensor, channel: float) -> Tensor:
    squares = tensor.square()
    return squares + channel**2 * _mean(squares) if channel else squares


def _magnitude(tensor: Tensor, channel: float) -> Tensor:
    if not channel:
        return tensor.abs()
    return tensor.abs() + channel * _mean(tensor.square()).sqrt()


def _mean(tensor: Tensor) -> Tensor:
    """The mean of each channel of each image."""
    return tensor.mean(tuple(range(2, tensor.dim())), keepdim=True)


_EUCLIDEAN = _Size(_square, torch.sqrt, _DEVIATIONS**2)
_ABSOLUTE = _Size(_magnitude, torch.Tensor.clone, 1.0)


def size_of(trial: Trial) -> _Size:
    """How errors add up: those of Gaussian data are independent, others may all have one sign."""
    return _EUCLIDEAN if trial.data == NORMAL else _ABSOLUTE


class _Tally:
    """Compares results chunk by chunk, and adds up the verdict."""

    def __init__(self, info: torch.finfo) -> None:
        # Results are rounded by half an epsilon; denormal ones by half of the smallest number,
        # which counts up to 4 times if results are multiplied by a factor.
        self._half, self._least = info.eps / 2, 2 * info.tiny * info.eps
        self._squares = [0.0, 0.0]
        self._largest = [0.0, 0.0]
        self._wrong, self._compared = 0, 0
        self._share, self._worst = 0.0, "nothing"

    def add(
        self,
        actual: Tensor,
        expected: Tensor,
        bound: Tensor,
        rounded: Tensor,
        where: Callable[[list[int]], str],
    ) -> None:
        """Compares elements; ``rounded`` is the size of the results that rounding applies to."""
        error = (actual - expected).abs_()
        bound = bound + (rounded + bound) * self._half + self._least
        # NaN and infinities, also infinity over infinity, count as endlessly wrong.
        share = (error / bound).nan_to_num_(_ENDLESS, _ENDLESS)
        figures = (
            error.square().sum(), expected.square().sum(), error.max(), expected.abs().max(),
            (share > 1).sum().double(), share.max(),
        )  # fmt: skip
        # All figures are copied at once: waiting for a GPU that other processes share takes long.
        *squares, worst_error, largest, wrong, worst = torch.stack(figures).tolist()
        self._squares = [sum(pair) for pair in zip(self._squares, squares, strict=True)]
        self._largest = list(map(max, self._largest, (worst_error, largest)))
        self._wrong += int(wrong)
        self._compared += share.numel()
        if worst > self._share:
            self._share = worst
            index = torch.unravel_index(share.argmax(), share.shape)
            found, right, most = (float(tensor[index]) for tensor in (actual, expected, bound))
            place = where([int(one) for one in index])
            self._worst = f"{place}: {found:.9g} instead of {right:.9g}, bound {most:.2g}"

    def verdict(self) -> Verdict:
        norms = list(map(math.sqrt, self._squares))
        error = Error(*(_ratio(*pair) for pair in (norms, self._largest)))
        return Verdict(error, self._share, self._wrong, self._compared, self._worst)


def _ratio(error: float, right: float) -> float:
    if error == 0:
        return 0.0
    return error / right if right and error < _ENDLESS else _ENDLESS


def _total(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _channel_dim(role: str) -> int:
    """The dimension along which a tensor's groups lie one after another."""
    return 0 if role == "weight" else 1


def _some(draw: Random, count: int, of: int) -> list[int]:
    """Sorted indices below ``of``: the first, the last, and others at random, ``count`` in all."""
    if count >= of:
        return list(range(of))
    return sorted([0, of - 1, *draw.sample(range(1, of - 1), count - 2)])
