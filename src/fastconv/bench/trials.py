"""One pass of one convolution on given data, as verification tries it: drawn at random or not.

A trial says everything: its data follows from it, on the same kind of device, to the last bit.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv import ops
from fastconv.backends import cuda
from fastconv.bench import environment, population
from fastconv.bench.cases import (
    DTYPES,
    FORMAT_TRIPLES,
    PASSES,
    PRECISIONS,
    Case,
    check_memory,
    modes,
)
from fastconv.kernels import planner
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

NORMAL = "normal"
FAR = "far"
DATA = {
    NORMAL: "Gaussian",
    "sparse": "zero but for one in 16",
    "spike": "one number is 2^20 times larger",
    "single": "a single 1 in each output channel of what the data is multiplied by",
    "faint": "half of the channels are 2^20 times smaller",
    FAR: "one operand is up to 2^90 times smaller or 2^122 times larger, the other makes up for it",
}
"""What tensors hold. float16 has the range for 2^4 instead of 2^20 and 2^122."""

_NORMAL_SHARE, _ALIGNED_SHARE = 0.75, 0.85
# Of what is drawn: layers as networks have them, and groups of few channels.
_PRACTICAL_SHARE, _NARROW_SHARE = 0.35, 0.1
# Small problems take other plans than real layers do, which have the most work or 1/500 of it.
_REAL_SHARE, _REAL_RANGE = 0.4, 500.0
# Of the number that is multiplied: float16 results of long sums have to stay in range.
_MOST_HALVINGS = 6
_LEAKY_SLOPE = 0.01
# What is smaller is zero in float16, so that an eighth of every number is one, too.
_LEAST_HALF = 2.0**-11


class Kinds(NamedTuple):
    """What drawn trials take in turn: each pass of each mode in each format."""

    passes: Sequence[str]
    modes: Sequence[tuple[str, str | None]]
    formats: Sequence[str]


EVERY_KIND = Kinds(PASSES, modes(list(DTYPES), PRECISIONS), FORMAT_TRIPLES)


class Limits(NamedTuple):
    """The most that a trial may have."""

    flops: float
    elements: float


LARGE = {"cpu": Limits(1e8, 2**22), "cuda": Limits(2e11, 2**25)}
"""What is above either takes long: not everything is checked."""


def drawn_limits(device: torch.device) -> Limits:
    """Of drawn trials: milliseconds of work on the device, and some of its memory."""
    if device.type != "cuda":
        return Limits(2e7, 2**22)
    # Data, results and copies of them in float64 in a half of what is free; as a power of two, so
    # that a little more or less draws the same.
    elements = environment.free_bytes(device) // 64
    return Limits(5e11, 2.0 ** min(30, int(math.log2(max(elements, 1)))))


class Roles(NamedTuple):
    """Which tensors of a layer a pass multiplies, and which one its result has the shape of.

    Axes are ``n``, images, ``c``, input channels, and ``k``, output channels. One of them is summed
    over; ``rows`` is that of the result's channels, which ``second`` has as well.
    """

    first: str
    second: str
    result: str
    summed: str
    rows: str


ROLES = {
    "forward": Roles("input", "weight", "grad_output", "c", "k"),
    "input_grad": Roles("grad_output", "weight", "input", "k", "c"),
    "weight_grad": Roles("input", "grad_output", "weight", "n", "k"),
}
_TENSORS = ("input", "weight", "grad_output")
PLACED = (*_TENSORS, "bias", "residual")
"""The tensors whose place in memory a trial chooses."""


class Data(NamedTuple):
    """What a pass multiplies, and what it adds."""

    first: Tensor
    second: Tensor
    bias: Tensor | None
    residual: Tensor | None = None
    activation: str = "identity"

    @property
    def epilogue(self) -> Epilogue:
        slope = _LEAKY_SLOPE if self.activation == "leaky_relu" else 0.0
        return Epilogue(self.activation, slope, self.residual is not None)


class Results(NamedTuple):
    """What a pass gives; the bias's gradient beside that of the weight, where asked for."""

    main: Tensor
    bias_grad: Tensor | None


@dataclass(frozen=True)
class Trial:
    """A case, how its tensors lie in memory, and what they hold."""

    case: Case
    misaligned: tuple[str, ...] = ()  # those of PLACED one element past a multiple of 16 bytes
    bias: bool = False  # added by the forward pass; its gradient given by the weight's
    data: str = NORMAL
    seed: int = 0

    @property
    def roles(self) -> Roles:
        return ROLES[self.case.direction]

    @property
    def problem(self) -> Problem:
        return self.case.workload.problem

    @property
    def terms(self) -> int:
        """The most products in a sum."""
        problem, (height, width) = self.problem, self.problem.kernel_size
        if self.case.direction == "weight_grad":
            return problem.batch * math.prod(problem.output_size)
        forward = self.case.direction == "forward"
        channels = problem.in_channels if forward else problem.out_channels
        return channels // problem.groups * height * width

    @property
    def elements(self) -> int:
        return sum(math.prod(self.shape(role)) for role in _TENSORS)

    @property
    def bytes(self) -> int:
        """Of its tensors in float64, as they are compared."""
        return 8 * self.elements

    @property
    def label(self) -> str:
        misaligned = f"misaligned {' '.join(self.misaligned)}" if self.misaligned else ""
        words = [self.case.label, misaligned, "bias" * self.bias]
        return " ".join(filter(None, [*words, self.data if self.data != NORMAL else ""]))

    def is_large(self, device: torch.device) -> bool:
        most = LARGE[device.type]
        return self.problem.flops > most.flops or self.elements > most.elements

    def command(self, device: str | None = None) -> str:
        """The one-line command that tries this again, on the same data."""
        words = ["fastconv", "verify", *self.case.arguments()]
        words += ["--misaligned", *self.misaligned] if self.misaligned else []
        words += ["--bias"] * self.bias
        words += ["--data", self.data] if self.data != NORMAL else []
        words += ["--seed", str(self.seed)] if self.seed else []
        words += ["--device", device] if device else []
        return shlex.join(words)

    def shape(self, role: str) -> tuple[int, ...]:
        problem = self.problem
        shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
        return shapes[_TENSORS.index(role)]

    def make(self, device: torch.device) -> Data:
        """The data that the trial's pass works on."""
        roles, dtype = self.roles, self.case.torch_dtype
        check_memory([self.shape(role) for role in _TENSORS], dtype, device)
        bias = None
        if self.bias and self.case.direction == "forward":
            values = _normal((self.problem.out_channels,), self, 3, device)
            values *= 2.0 ** sum(_far(self))
            bias = self.placed("bias", _in_range(values.to(dtype)))
        return Data(self.tensor(roles.first, device), self.tensor(roles.second, device), bias)

    def tensor(self, role: str, device: torch.device) -> Tensor:
        """The tensor that plays a role in the layer, as it lies in memory."""
        values = _normal(self.shape(role), self, _TENSORS.index(role), device)
        draw = Random(f"{self.seed} {role}")
        values = _adverse(self, role, values, draw)
        if role == self.roles.second and self.data != "single":
            values *= 2.0 ** -min(_MOST_HALVINGS, round(math.log2(self.terms) / 2))
        return self.placed(role, _in_range(values.to(self.case.torch_dtype)))

    def placed(self, role: str, tensor: Tensor) -> Tensor:
        """The tensor in the memory format of the role, and at such an address as the trial's."""
        tensor = tensor.contiguous(memory_format=self.memory_format(role))
        if role not in self.misaligned:
            return tensor
        storage = tensor.new_empty(tensor.numel() + 1)
        return storage.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)

    def memory_format(self, role: str) -> torch.memory_format:
        """That of a tensor; a residual lies as the gradient of the output does."""
        if role == "bias":
            return torch.contiguous_format
        return self.case.memory_formats[
            _TENSORS.index("grad_output" if role == "residual" else role)
        ]


def compute(trial: Trial, data: Data) -> Results:
    """The trial's pass through fastconv's operators, into memory that held NaN."""
    case, problem = trial.case, trial.problem
    geometry = (
        problem.stride, problem.padding, problem.dilation, problem.groups, case.precision
    )  # fmt: skip
    with _poisoned_memory():
        if data.epilogue != NO_EPILOGUE:
            activation, slope, _ = data.epilogue
            return Results(ops.fused(*data[:4], *geometry, activation, slope), None)
        if case.direction == "forward":
            return Results(ops.forward(*data[:3], *geometry), None)
        format = _gradient_format(trial, data.first.device)
        if case.direction == "input_grad":
            size = problem.input_size
            return Results(ops.input_grad(data.first, data.second, size, *geometry, format), None)
        weight, bias = ops.weight_grad(
            data.second, data.first, problem.kernel_size, *geometry, trial.bias, format
        )
        return Results(weight, bias if trial.bias else None)


def need(trial: Trial, data: Data, results: Results) -> cuda.Need | None:
    """What the GPU kernels that computed the results were asked for; None on a CPU."""
    if data.first.device.type != "cuda":
        return None
    direction = trial.case.direction
    first, second = data.first, data.second
    if direction == "weight_grad":
        first, second = second, first
    return cuda.need(
        getattr(planner, direction), trial.problem, first, second, results.main,
        trial.case.precision, results.bias_grad is not None, residual=data.residual,
        epilogue=data.epilogue, bias=data.bias,
    )  # fmt: skip


def family(trial: Trial, data: Data, results: Results) -> str:
    """Whose kernels have just computed the results."""
    asked = need(trial, data, results)
    return "cpu" if asked is None else cuda.ready(asked).family


def drawn(
    seed: int, number: int, most: Limits, kinds: Kinds = EVERY_KIND, far_share: float = 0.0
) -> Trial:
    """The trial of that number: passes, modes and formats in turn, the rest at random.

    Of all layers, ``far_share`` have taps so far apart that PyTorch has no reference for them.
    """
    draw = Random(f"{seed} {number}")
    turn, at = divmod(number, len(kinds.passes))
    direction = kinds.passes[at]
    turn, at = divmod(turn, len(kinds.modes))
    dtype, precision = kinds.modes[at]
    format = kinds.formats[turn % len(kinds.formats)]
    least = most.flops / _REAL_RANGE if draw.random() < _REAL_SHARE else population.LEAST_FLOPS
    kind = draw.random()
    if kind >= 1 - far_share:
        workload = population.far(draw, most.flops, most.elements)
    elif kind < _PRACTICAL_SHARE:
        workload = population.practical(draw, most.flops, most.elements)
    elif kind < _PRACTICAL_SHARE + _NARROW_SHARE:
        workload = population.narrow(draw, most.flops, most.elements)
    else:
        workload = population.workload(draw, most.flops, most.elements, least)
    return Trial(
        Case(workload, direction, dtype, precision, _read_format(direction, format)),
        misaligned=() if draw.random() < _ALIGNED_SHARE else _some_misaligned(draw),
        bias=direction != "input_grad" and draw.random() < 0.5,
        data=NORMAL if draw.random() < _NORMAL_SHARE else draw.choice(list(DATA)[1:]),
        seed=draw.randrange(1, 2**31),
    )


def _some_misaligned(draw: Random) -> tuple[str, ...]:
    """All tensors, or one of them: what is aligned beside it must not vouch for it."""
    return draw.choice((PLACED, *((one,) for one in PLACED)))


def _read_format(direction: str, format: str) -> str:
    """The format, without what makes no difference: the forward pass reads no gradient."""
    names = format.split("/")
    if direction == "forward":
        names[2:] = names[:1]
    return "/".join(names) if len(set(names)) > 1 else names[0]


def with_direction(trial: Trial, direction: str) -> Trial:
    """Another pass of the same layer, without the bias."""
    return replace(trial, case=replace(trial.case, direction=direction), bias=False)


def _gradient_format(trial: Trial, device: torch.device) -> torch.memory_format:
    """Of both gradients, as autograd has it: that of input and weight."""
    if trial.case.dtype == "float64" and device.type == "cuda":
        return torch.contiguous_format
    last = torch.channels_last
    return last if last in trial.case.memory_formats[:2] else torch.contiguous_format


def _normal(shape: tuple[int, ...], trial: Trial, stream: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(8 * trial.seed + stream)
    wide = torch.float64 if trial.case.dtype == "float64" else torch.float32
    return torch.randn(shape, dtype=wide, generator=generator, device=device)


def _adverse(trial: Trial, role: str, values: Tensor, draw: Random) -> Tensor:
    """The same numbers as the trial's kind of data has them."""
    half = trial.case.dtype == "float16"
    rows = 0 if role == "weight" else 1  # the dimension of channels
    if trial.data == "sparse":
        chance = _normal(tuple(values.shape), trial, 4 + _TENSORS.index(role), values.device)
        return torch.where(chance.abs() > 1.863, values, 0)  # 1 in 16
    if trial.data == "spike":
        values.view(-1)[draw.randrange(values.numel())] *= 2.0 ** (4 if half else 20)
    if trial.data == "faint":
        faint = [at for at in range(values.shape[rows]) if draw.random() < 0.5]
        values.movedim(rows, 0)[faint] *= 2.0 ** (-4 if half else -20)
    if trial.data == FAR:
        values *= 2.0 ** _far(trial)[role == trial.roles.second]
    if trial.data == "single" and role == trial.roles.second:
        values = torch.zeros_like(values)
        for row in values.movedim(rows, 0):
            row[tuple(draw.randrange(size) for size in row.shape)] = 1
    return values


def _far(trial: Trial) -> tuple[int, int]:
    """Exponents of both operands: a result is in range, whatever each of them is alone."""
    if trial.data != FAR:
        return 0, 0
    draw = Random(f"{trial.seed} {FAR}")
    if trial.case.dtype == "float16":
        first = draw.randint(-4, 4)
        return first, -first
    # Below 2^-113, tensor cores lose bits of float32 (docs/numerics.md).
    total = draw.randint(-60, 72)
    second = draw.choice((-90, 122, draw.randint(-90, 90)))
    return max(-90, min(122, total - second)), second


def _in_range(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float16:
        tensor[tensor.abs() < _LEAST_HALF] = 0
    return tensor


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN: whatever is not written, or read too early, shows."""
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
