"""Trials: one pass of one convolution on given data, for verification; some are drawn at random.

A trial determines everything about a call: on the same kind of device, it always has the same data.

A trial's case names a pass of a layer, but its direction, roles and tensors are those of the
layer's problem, a convolution of images or volumes (:mod:`.kernel_passes`). So the checks know no
other layers, and only calls of fastconv's and PyTorch's functions have the layer's own tensors.
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

from _fastconv_command.choices import AXES as AXES
from _fastconv_command.choices import DATA as DATA
from _fastconv_command.choices import FAR as FAR
from _fastconv_command.choices import NORMAL as NORMAL
from _fastconv_command.choices import PLACED as PLACED
from _fastconv_command.choices import TENSORS
from fastconv import ops
from fastconv.backends import cuda
from fastconv.bench import contestants, environment, kernel_passes, population
from fastconv.bench.cases import (
    DTYPES,
    FORMAT_TRIPLES,
    PASSES,
    PRECISIONS,
    Case,
    check_memory,
    format_of,
    laid_out,
    modes,
)
from fastconv.kernels import planner
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem
from fastconv.workloads import Workload

_NORMAL_SHARE, _ALIGNED_SHARE = 0.75, 0.85  # Gaussian data, tensors aligned to 16 bytes
# Shares of drawn trials: layers as networks have them, groups of few channels, convolutions of
# sequences, transposed ones, and convolutions of volumes. The others are 2-D ones of all kinds.
_PRACTICAL_SHARE, _NARROW_SHARE, _SEQUENCE_SHARE, _TRANSPOSED_SHARE = 0.25, 0.1, 0.1, 0.15
_VOLUME_SHARE, _GROUPED_SHARE = 0.15, 0.05
# The share of several groups of channels in channels-last 16-bit tensors, for which they have
# kernels of their own. Modes and formats come in turn, so that these are few.
_NATIVE_GROUPED_SHARE = 0.2
# Small problems take other plans than real layers do. So this share of the general problems has at
# least 1/500 of the most operations that are allowed.
_REAL_SHARE, _REAL_RANGE = 0.4, 500.0
# The second operand is divided by up to this power of two, the longer the sums are, so that float16
# results stay in range.
_MOST_HALVINGS = 6
_LEAKY_SLOPE = 0.01
# In float16 data, smaller numbers are replaced by zero, so that numbers stay normal, and exact, if
# a relation divides them by up to 8.
_LEAST_FLOAT16 = 2.0**-11


class Kinds(NamedTuple):
    """The passes, modes and memory formats that drawn trials take in turn.

    Layers convolve along one of the numbers of ``axes``.
    """

    passes: Sequence[str]
    modes: Sequence[tuple[str, str | None]]
    formats: Sequence[str]
    axes: Sequence[int] = AXES


EVERY_KIND = Kinds(PASSES, modes(list(DTYPES), PRECISIONS), FORMAT_TRIPLES)


class Limits(NamedTuple):
    """Upper limits for a trial."""

    flops: float  # of its pass
    elements: float  # of all of its tensors


LARGE = {"cpu": Limits(1e8, 2**22), "cuda": Limits(2e11, 2**25)}
"""Trials above either limit take long, so that fewer relations are checked."""


def drawn_limits(device: torch.device) -> Limits:
    """Limits for drawn trials: they take milliseconds, and a part of the device's memory."""
    if device.type != "cuda":
        return Limits(2e7, 2**22)
    # Data, results and their copies in float64 fit in half of the free memory. The limit is a power
    # of two, so that a small change of free memory does not change what is drawn.
    elements = environment.free_bytes(device) // 64
    return Limits(5e11, 2.0 ** min(30, int(math.log2(max(elements, 1)))))


class Roles(NamedTuple):
    """The tensors of a layer that a pass multiplies, and the one whose shape its result has.

    Axes are ``n``, images, ``c``, input channels, and ``k``, output channels.
    """

    first: str
    second: str
    result: str
    summed: str  # the axis that the pass sums over
    rows: str  # the axis of the result's channels, which ``second`` has as well


ROLES = {
    "forward": Roles("input", "weight", "grad_output", "c", "k"),
    "input_grad": Roles("grad_output", "weight", "input", "k", "c"),
    "weight_grad": Roles("input", "grad_output", "weight", "n", "k"),
}


class Data(NamedTuple):
    """The operands of a pass; the first two are multiplied, the others belong to the epilogue."""

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
    """The result of a pass, and for weight gradients the bias gradient, if requested."""

    main: Tensor
    bias_grad: Tensor | None


@dataclass(frozen=True)
class Trial:
    """A case, the alignment of its tensors, and their data."""

    case: Case
    misaligned: tuple[str, ...] = ()  # tensors of PLACED, one element past an aligned address
    bias: bool = False  # see has_bias and has_bias_grad
    data: str = NORMAL
    seed: int = 0

    @property
    def direction(self) -> str:
        """The pass of the problem that computes the case's pass."""
        return kernel_passes.kernel_pass(self.case.workload, self.case.direction)

    @property
    def roles(self) -> Roles:
        return ROLES[self.direction]

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias, which the layer's forward pass may do."""
        return self.bias and self.case.direction == "forward"

    @property
    def has_bias_grad(self) -> bool:
        """Whether it computes the bias's gradient, with that of the weight.

        The bias's gradient of a transposed layer is a sum that PyTorch computes.
        """
        return self.bias and self.direction == "weight_grad" and not self.case.workload.transposed

    @property
    def problem(self) -> Problem:
        return self.case.workload.problem

    @property
    def terms(self) -> int:
        """The number of products in a sum, at most."""
        problem = self.problem
        if self.direction == "weight_grad":
            return problem.batch * math.prod(problem.output_shape[2:])
        forward = self.direction == "forward"
        channels = problem.in_channels if forward else problem.out_channels
        return channels // problem.groups * math.prod(problem.weight_shape[2:])

    @property
    def elements(self) -> int:
        return sum(math.prod(self.shape(role)) for role in TENSORS)

    @property
    def bytes(self) -> int:
        """The size of its tensors in float64, the type in which they are compared."""
        return 8 * self.elements

    @property
    def label(self) -> str:
        misaligned = f"misaligned {' '.join(self.misaligned)}" if self.misaligned else ""
        words = [self.case.label, misaligned, "bias" * self.bias]
        return " ".join(filter(None, [*words, self.data if self.data != NORMAL else ""]))

    def is_large(self, device: torch.device) -> bool:
        """Whether the trial exceeds the limits of :data:`LARGE`."""
        most = LARGE[device.type]
        return self.problem.flops > most.flops or self.elements > most.elements

    def command(self, device: str | None = None) -> str:
        """The one-line command that repeats this trial on the same data."""
        words = ["fastconv", "verify", *self.case.arguments()]
        words += ["--misaligned", *self.misaligned] if self.misaligned else []
        words += ["--bias"] * self.bias
        words += ["--data", self.data] if self.data != NORMAL else []
        words += ["--seed", str(self.seed)] if self.seed else []
        words += ["--device", device] if device else []
        return shlex.join(words)

    def shape(self, role: str) -> tuple[int, ...]:
        """The shape of one of the problem's tensors."""
        problem = self.problem
        shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
        return shapes[TENSORS.index(role)]

    def make(self, device: torch.device) -> Data:
        """Makes the operands of the trial's pass."""
        roles, dtype = self.roles, self.case.torch_dtype
        check_memory([self.shape(role) for role in TENSORS], dtype, device)
        bias = None
        if self.has_bias:
            values = _normal(self.shape(roles.result)[1:2], self, 3, device)
            values *= 2.0 ** sum(_far_exponents(self))
            bias = self.placed("bias", _in_range(values.to(dtype)))
        return Data(self.tensor(roles.first, device), self.tensor(roles.second, device), bias)

    def tensor(self, role: str, device: torch.device) -> Tensor:
        """Makes the tensor of a role: its values, memory format and alignment."""
        values = _normal(self.shape(role), self, TENSORS.index(role), device)
        draw = Random(f"{self.seed} {role}")
        values = _adverse(self, role, values, draw)
        if role == self.roles.second and self.data != "single":
            values *= 2.0 ** -min(_MOST_HALVINGS, round(math.log2(self.terms) / 2))
        return self.placed(role, _in_range(values.to(self.case.torch_dtype)))

    def placed(self, role: str, tensor: Tensor) -> Tensor:
        """The tensor with the memory format and the alignment of its role."""
        tensor = laid_out(tensor, self.memory_format(role))
        if not self.is_misaligned(role):
            return tensor
        storage = tensor.new_empty(tensor.numel() + 1)
        return storage.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)

    def is_misaligned(self, role: str) -> bool:
        return kernel_passes.counterpart(self.case.workload, role) in self.misaligned

    def memory_format(self, role: str) -> torch.memory_format:
        """The memory format of a role; a residual has that of the layer's output gradient."""
        if role == "bias":
            return torch.contiguous_format
        name = kernel_passes.counterpart(self.case.workload, role)
        return self.case.memory_formats[
            TENSORS.index("grad_output" if name == "residual" else name)
        ]


def compute(trial: Trial, data: Data) -> Results:
    """Computes the trial's pass by fastconv's operators, with new memory filled with NaN.

    Forward passes of other layers than images' are computed by fastconv's functions.
    """
    problem = trial.problem
    geometry = (*problem.geometry, trial.case.precision)
    with _poisoned_memory():
        if trial.case.direction == "forward" and trial.case.workload.function != "conv2d":
            return Results(_by_function(trial, data), None)
        if data.epilogue != NO_EPILOGUE:
            activation, slope, _ = data.epilogue
            return Results(ops.fused(*data[:4], *geometry, activation, slope), None)
        if trial.direction == "forward":
            return Results(ops.forward(*data[:3], *geometry), None)
        format = _gradient_format(trial, data.first.device)
        if trial.direction == "input_grad":
            size = problem.input_shape[2:]
            return Results(ops.input_grad(data.first, data.second, size, *geometry, format), None)
        size = problem.weight_shape[2:]
        weight, bias = ops.weight_grad(
            data.second, data.first, size, *geometry, trial.has_bias_grad, format
        )
        return Results(weight, bias if trial.has_bias_grad else None)


def _by_function(trial: Trial, data: Data) -> Tensor:
    """Computes a layer's forward pass by the function that users call."""
    workload = trial.case.workload
    input, weight = (kernel_passes.as_given(workload, one) for one in data[:2])
    residual = None if data.residual is None else kernel_passes.as_given(workload, data.residual)
    output = contestants.our_function(workload)(
        input, weight, data.bias, precision=trial.case.precision, residual=residual,
        activation=None if data.activation == "identity" else data.activation,
    )  # fmt: skip
    return kernel_passes.as_images(output)


def need(trial: Trial, data: Data, results: Results) -> cuda.Need | None:
    """Everything that the plan of the results depends on; None on a CPU, which plans nothing."""
    if data.first.device.type != "cuda":
        return None
    direction = trial.direction
    first, second = data.first, data.second
    if direction == "weight_grad":
        first, second = second, first
    return cuda.need(
        getattr(planner, direction), trial.problem, first, second, results.main,
        trial.case.precision, results.bias_grad is not None, residual=data.residual,
        epilogue=data.epilogue, bias=data.bias,
    )  # fmt: skip


def family(trial: Trial, data: Data, results: Results) -> str:
    """The family of the kernels that have just computed the results; "cpu" on a CPU."""
    needed = need(trial, data, results)
    return "cpu" if needed is None else cuda.ready(needed).family


def drawn(
    seed: int, number: int, most: Limits, kinds: Kinds = EVERY_KIND, far_share: float = 0.0
) -> Trial:
    """Draws trial ``number``: passes, modes and formats come in turn, the rest is random.

    A share of ``far_share`` has taps so far apart that PyTorch cannot compute a reference.
    """
    draw = Random(f"{seed} {number}")
    turn, at = divmod(number, len(kinds.passes))
    direction = kinds.passes[at]
    turn, at = divmod(turn, len(kinds.modes))
    dtype, precision = kinds.modes[at]
    format = kinds.formats[turn % len(kinds.formats)]
    shares = far_share, _grouped_share(dtype, format)
    workload = _drawn_workload(draw, most, *shares)
    while workload.axes not in kinds.axes:
        workload = _drawn_workload(draw, most, *shares)
    no_bias = direction == "input_grad" or (workload.transposed and direction == "weight_grad")
    return Trial(
        Case(workload, direction, dtype, precision, _read_format(direction, format)),
        misaligned=() if draw.random() < _ALIGNED_SHARE else _some_misaligned(draw),
        bias=not no_bias and draw.random() < 0.5,
        data=NORMAL if draw.random() < _NORMAL_SHARE else draw.choice(list(DATA)[1:]),
        seed=draw.randrange(1, 2**31),
    )


def _grouped_share(dtype: str, format: str) -> float:
    is_native = dtype in ("float16", "bfloat16") and set(format.split("/")) == {"nhwc"}
    return _NATIVE_GROUPED_SHARE if is_native else _GROUPED_SHARE


def _drawn_workload(draw: Random, most: Limits, far_share: float, grouped_share: float) -> Workload:
    least = most.flops / _REAL_RANGE if draw.random() < _REAL_SHARE else population.LEAST_FLOPS
    kind = draw.random()
    if kind >= 1 - far_share:
        return population.far(draw, most.flops, most.elements)
    for share, drawn in (
        (_PRACTICAL_SHARE, population.practical),
        (_NARROW_SHARE, population.narrow),
        (_SEQUENCE_SHARE, population.sequence),
        (_TRANSPOSED_SHARE, population.transposed),
        (_VOLUME_SHARE, population.volume),
        (grouped_share, population.grouped),
    ):
        if kind < share:
            return drawn(draw, most.flops, most.elements)
        kind -= share
    return population.workload(draw, most.flops, most.elements, least)


def _some_misaligned(draw: Random) -> tuple[str, ...]:
    """All tensors, or a single one: kernels must check the alignment of each."""
    return draw.choice((PLACED, *((one,) for one in PLACED)))


def _read_format(direction: str, format: str) -> str:
    """The format of the tensors that are read: the forward pass reads no output gradient."""
    names = format.split("/")
    if direction == "forward":
        names[2:] = names[:1]
    return "/".join(names) if len(set(names)) > 1 else names[0]


def with_direction(trial: Trial, direction: str) -> Trial:
    """The trial of another pass of the same layer, without a bias."""
    return replace(trial, case=replace(trial.case, direction=direction), bias=False)


def _gradient_format(trial: Trial, device: torch.device) -> torch.memory_format:
    """The memory format that autograd gives to gradients: that of input and weight."""
    if trial.case.dtype == "float64" and device.type == "cuda":
        return torch.contiguous_format
    last = torch.channels_last
    found = last if last in trial.case.memory_formats[:2] else torch.contiguous_format
    return format_of(len(trial.problem.input_shape), found)


def _normal(shape: tuple[int, ...], trial: Trial, stream: int, device: torch.device) -> Tensor:
    """Gaussian numbers; those of different streams of a trial are independent."""
    generator = torch.Generator(device).manual_seed(8 * trial.seed + stream)
    wide = torch.float64 if trial.case.dtype == "float64" else torch.float32
    return torch.randn(shape, dtype=wide, generator=generator, device=device)


def _adverse(trial: Trial, role: str, values: Tensor, draw: Random) -> Tensor:
    """Changes Gaussian numbers to the trial's kind of data."""
    is_float16 = trial.case.dtype == "float16"
    channels = 0 if role == "weight" else 1  # the dimension of (output) channels
    if trial.data == "sparse":
        chance = _normal(tuple(values.shape), trial, 4 + TENSORS.index(role), values.device)
        return torch.where(chance.abs() > 1.863, values, 0)  # True for 1 in 16 Gaussian numbers.
    if trial.data == "spike":
        values.view(-1)[draw.randrange(values.numel())] *= 2.0 ** (4 if is_float16 else 20)
    if trial.data == "faint":
        faint = [at for at in range(values.shape[channels]) if draw.random() < 0.5]
        values.movedim(channels, 0)[faint] *= 2.0 ** (-4 if is_float16 else -20)
    if trial.data == FAR:
        values *= 2.0 ** _far_exponents(trial)[role == trial.roles.second]
    if trial.data == "single" and role == trial.roles.second:
        values = torch.zeros_like(values)
        for channel in values.movedim(channels, 0):
            channel[tuple(draw.randrange(size) for size in channel.shape)] = 1
    return values


def _far_exponents(trial: Trial) -> tuple[int, int]:
    """Exponents of the two operands, large or small, whose products are in the type's range."""
    if trial.data != FAR:
        return 0, 0
    draw = Random(f"{trial.seed} {FAR}")
    if trial.case.dtype == "float16":
        first = draw.randint(-4, 4)
        return first, -first
    # Exponents stay well above -113, below which tensor cores lose bits (docs/numerics.md).
    total = draw.randint(-60, 72)
    second = draw.choice((-90, _largest_exponent(trial), draw.randint(-90, 90)))
    return max(-90, min(122, total - second)), second


def _largest_exponent(trial: Trial) -> int:
    """The largest exponent of the second operand: a bias gradient, which is a sum of it, is finite.

    Its standard deviation is √n / 2**_MOST_HALVINGS for many numbers n (:meth:`Trial.tensor`), and
    a sum beyond eight deviations does not occur.
    """
    if not trial.has_bias_grad:
        return 122
    images, _, *pixels = trial.problem.output_shape
    return min(
        122, 124 + _MOST_HALVINGS - math.ceil(math.log2(max(1, images * math.prod(pixels))) / 2)
    )


def _in_range(tensor: Tensor) -> Tensor:
    """Replaces float16 numbers below ``_LEAST_FLOAT16`` by zero, in place."""
    if tensor.dtype == torch.float16:
        tensor[tensor.abs() < _LEAST_FLOAT16] = 0
    return tensor


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Makes PyTorch fill uninitialised tensors with NaN.

    So elements that kernels do not write, or read before they are written, show in results.
    """
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
