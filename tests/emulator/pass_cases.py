"""Small convolutions and checks of their passes, for the tests of all kernel families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

import oracle
from effort import ALL
from emulator import driver
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem
from workspaces import workspace

SCALARS = {
    torch.float16: ("fastconv::float16", 2),
    torch.bfloat16: ("fastconv::bfloat16", 2),
    torch.float32: ("float", 4),
    torch.float64: ("double", 8),
}
ROUNDINGS = 4
"""Error allowed of a sum, in epsilons of the accumulation type times the sum of its magnitudes."""
TENSOR_CORES = ("hopper", "ampere")


Item = TypeVar("Item")


@dataclass(frozen=True)
class Conv:
    """A small convolution with a name, of images or of volumes."""

    name: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    @property
    def problem(self) -> Problem:
        return Problem.of(
            self.input, self.weight, self.stride, self.padding, self.dilation, self.groups
        )


Planner = Callable[[Problem, Operands, Gpu], Plan]


@dataclass(frozen=True)
class PassCase:
    """A test case: one pass of a small convolution on given kinds of tensors.

    ``channels_last`` is the memory format of the activation that the pass reads. What it writes has
    the same format, or the other one if ``other_format``. Weights have the format of what the pass
    writes, or are contiguous if ``plain_weight``.
    """

    conv: Conv
    planner: Planner
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    aligned: bool = True
    gpu: Gpu = H200
    precision: str = "ieee"
    other_format: bool = False
    bias: bool = True
    bias_grad: bool = False
    plain_weight: bool = False
    epilogue: Epilogue = NO_EPILOGUE

    @property
    def direction(self) -> str:
        return self.planner.__name__

    @property
    def output_channels_last(self) -> bool:
        return self.channels_last != self.other_format

    @property
    def plan(self) -> Plan:
        weight = torch.empty(self.conv.weight, device="meta").contiguous(
            memory_format=self.weight_format
        )
        operands = Operands(
            *SCALARS[self.dtype],
            self.channels_last,
            self.output_channels_last,
            weight.stride(),
            self.aligned,
            self.precision,
            self.bias_grad,
            self.epilogue,
        )
        return self.planner(self.conv.problem, operands, self.gpu)

    @property
    def ties_to_even(self) -> bool:
        """Whether the planned kernel rounds ties to even in TF32, rather than away from zero."""
        return any(
            dict(launch.kernel.constants).get("ties_to_even") for launch in self.plan.launches
        )

    @property
    def input_format(self) -> torch.memory_format:
        return memory_format(self.channels_last, len(self.conv.input))

    @property
    def output_format(self) -> torch.memory_format:
        return memory_format(self.output_channels_last, len(self.conv.input))

    @property
    def weight_format(self) -> torch.memory_format:
        channels_last = self.output_channels_last and not self.plain_weight
        return memory_format(channels_last, len(self.conv.input))

    def __str__(self) -> str:
        words = [self.conv.name, self.direction, str(self.dtype).removeprefix("torch.")]
        if self.precision != "ieee":
            words.append(self.precision)
        words.append("channels-last" if self.channels_last else "contiguous")
        if self.other_format:
            words.append("to-channels-last" if self.output_channels_last else "to-contiguous")
        if not self.aligned:
            words.append("unaligned")
        if self.bias_grad:
            words.append("bias")
        if self.plain_weight:
            words.append("plain")
        if self.epilogue.residual:
            words.append("residual")
        if self.epilogue.activation != "identity":
            words.append(self.epilogue.activation)
        return "-".join([*words, self.gpu.architecture])


def some(items: Iterable[Item], one_in: int) -> list[Item]:
    """One item in ``one_in``, and test cases of kinds that these lack; all items if :data:`ALL`."""
    every = list(items)
    chosen = every[:: 1 if ALL else one_in]
    seen = {kind for item in chosen for kind in _kinds(item)}
    for item in every:
        if new := _kinds(item) - seen:
            chosen.append(item)
            seen |= new
    return chosen


def _kinds(item: object) -> set[tuple[str, object]]:
    """What a test case is one of: each kind has code of its own in some kernels."""
    if not isinstance(item, PassCase):
        return set()
    kinds = {
        "pass": (item.direction, item.channels_last),
        "type": (item.dtype, item.precision),
        "other format": item.other_format,
        "aligned": item.aligned,
        "bias": item.bias_grad,
        "weights": item.plain_weight,
        "residual": item.epilogue.residual,
    }
    return set(kinds.items())


@dataclass(frozen=True)
class Tensors:
    """The tensors that the three passes read."""

    input: Tensor
    weight: Tensor
    bias: Tensor
    grad_output: Tensor
    residual: Tensor  # a zero if the epilogue has no residual

    @classmethod
    def random(cls, case: PassCase) -> Tensors:
        problem = case.conv.problem
        # Formats of the input and of the gradient of the output. A weight gradient reads both.
        first, second = case.input_format, case.output_format
        if case.direction == "input_grad":
            first, second = second, first
        return cls(
            _random(problem.input_shape, first, case),
            _random(problem.weight_shape, case.weight_format, case),
            torch.randn(problem.out_channels).to(case.dtype),
            _random(problem.output_shape, second, case),
            _random(problem.output_shape, case.output_format, case)
            if case.epilogue.residual
            else torch.zeros((), dtype=case.dtype),
        )


def new_output(case: PassCase) -> Tensor:
    """A tensor for the result of the pass, filled with NaN."""
    problem = case.conv.problem
    shape = {
        "forward": problem.output_shape,
        "input_grad": problem.input_shape,
        "weight_grad": problem.weight_shape,
    }[case.direction]
    nan = torch.full(shape, torch.nan, dtype=case.dtype)
    is_weight = case.direction == "weight_grad"
    return placed(nan, case.weight_format if is_weight else case.output_format, case.aligned)


def tensors_read(case: PassCase, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors that the pass reads, by their names in launches."""
    read = {
        "forward": {"input": tensors.input, "weight": tensors.weight, "bias": tensors.bias},
        "input_grad": {"input": tensors.grad_output, "weight": tensors.weight},
        "weight_grad": {"grad_output": tensors.grad_output, "input": tensors.input},
    }[case.direction]
    if not case.bias:
        read.pop("bias", None)
    if case.epilogue.residual:
        read["residual"] = tensors.residual
    return read


def run(
    case: PassCase, tensors: Tensors, bias_grad: Tensor | None = None, both_orders: bool = True
) -> Tensor:
    """Runs the pass in the emulator, with outputs and workspace that hold NaN before.

    A weight gradient that also computes the gradient of the bias writes it to ``bias_grad``.
    """
    read = tensors_read(case, tensors)
    if bias_grad is not None:
        read["bias_grad"] = bias_grad
    plan, output = case.plan, new_output(case)
    execute = driver.run_both_orders if both_orders else driver.run
    execute(plan.launches, {**read, "output": output, **workspace(plan)})
    return output


def float64(case: PassCase, tensors: Tensors) -> Tensor:
    """The result in float64. In TF32, operands are rounded first, as tensor cores read them."""
    problem = case.conv.problem
    operands = (tensors.input, tensors.weight, tensors.grad_output)
    # Portable kernels compute TF32 in float32.
    if case.precision == "tf32" and case.plan.family in TENSOR_CORES:
        operands = tuple(rounded_to_tf32(one, case.ties_to_even) for one in operands)
    input, weight, grad_output = (tensor.double() for tensor in operands)
    input.requires_grad_(), weight.requires_grad_()
    padding = [side for axis in problem.axes[::-1] for side in (axis.before, axis.after)]
    padded = torch.nn.functional.pad(input, padding)
    bias = tensors.bias.double() if case.bias else None
    convolve = torch.nn.functional.conv2d if problem.depth is None else torch.nn.functional.conv3d
    output = convolve(padded, weight, bias, case.conv.stride, 0, case.conv.dilation, problem.groups)
    if case.direction == "forward":
        return activated(output.detach() + tensors.residual.double(), case.epilogue)
    wanted = input if case.direction == "input_grad" else weight
    (grad,) = torch.autograd.grad(output, wanted, grad_output)
    return grad


def activated(sums: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue's activation of sums that have the residual in them."""
    if epilogue.activation == "leaky_relu":
        return torch.nn.functional.leaky_relu(sums, epilogue.slope)
    return oracle.ACTIVATIONS[epilogue.activation](sums)


LARGE = 3.4022e38
"""A finite float32 that TF32 rounds to infinity."""
SPECIAL_VALUES = (torch.inf, -torch.inf, torch.nan, LARGE)


def at_corners(tensor: Tensor, numbers: Sequence[float] = SPECIAL_VALUES) -> None:
    """Writes values to a plane's corners, so far apart that no window has two of them."""
    for number, (row, column) in zip(numbers, product((0, -1), repeat=2), strict=False):
        tensor[0, 0, ..., row, column].flatten()[0] = number


def check_special_values(case: PassCase, tensors: Tensors) -> None:
    """Runs a case, and calls :func:`assert_special_values` on its result."""
    assert_special_values(case, tensors, run(case, tensors, new_bias_grad(case)))


def assert_special_values(
    case: PassCase, tensors: Tensors, actual: Tensor, roundings: float = ROUNDINGS
) -> None:
    """Checks that infinities, their signs and NaNs are as in float64, and the rest is correct."""
    expected = float64(case, tensors).to(actual.dtype)
    odd = ~expected.isfinite()
    torch.testing.assert_close(actual[odd], expected[odd], rtol=0, atol=0, equal_nan=True)
    assert_correct(case, tensors, actual, roundings, among=~odd)


def new_bias_grad(case: PassCase) -> Tensor | None:
    """A tensor of NaN for the gradient of the bias, if the case computes it."""
    if not case.bias_grad:
        return None
    return torch.full(case.conv.weight[:1], torch.nan, dtype=case.dtype)


BATCH = 5


def in_batch(case: PassCase, batch: int = BATCH) -> PassCase:
    """The test case with ``batch`` images."""
    return replace(case, conv=replace(case.conv, input=(batch, *case.conv.input[1:])))


def assert_alone_as_in_batch(case: PassCase) -> None:
    """Checks that an image gives the same bits alone and in a batch."""
    batch, single = in_batch(case), in_batch(case, 1)
    tensors = Tensors.random(batch)
    together = run(batch, tensors)
    for index in (0, BATCH - 1):
        image = slice(index, index + 1)
        alone = replace(
            tensors,
            input=tensors.input[image].clone(),
            grad_output=tensors.grad_output[image].clone(),
        )
        assert run(single, alone).equal(together[image])


def check(case: PassCase) -> None:
    """Runs the pass on random tensors and compares every element with float64."""
    tensors = Tensors.random(case)
    bias_grad = new_bias_grad(case)
    assert_correct(case, tensors, run(case, tensors, bias_grad))
    if bias_grad is not None:
        grad = tensors.grad_output.double()
        over = (0, *range(2, grad.dim()))
        assert_close(bias_grad, grad.sum(over), grad.abs().sum(over), ROUNDINGS)


def assert_correct(
    case: PassCase,
    tensors: Tensors,
    actual: Tensor,
    roundings: float = ROUNDINGS,
    among: Tensor | None = None,
) -> None:
    """Compares every element, or those where ``among`` is true, with float64."""
    # The sum of the magnitudes of each sum's terms.
    plain = replace(case, epilogue=case.epilogue._replace(activation="identity"))
    size = float64(plain, Tensors(*(tensor.abs() for tensor in vars(tensors).values())))
    if case.epilogue.activation != "identity":
        # An activation grows errors by half at most, and has rounding errors of its own.
        size, roundings = size + 1, 2 * roundings
    assert_close(actual, float64(case, tensors), size, roundings, among)


def assert_close(
    actual: Tensor, expected: Tensor, size: Tensor, roundings: float, among: Tensor | None = None
) -> None:
    """Compares every element with its error bound.

    The bound is that of a sum in float32 or float64, whose terms have magnitudes that add up to
    ``size``, and of one rounding to the result's type.
    """
    dtype = actual.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bound = roundings * torch.finfo(wide).eps * size
    # Half a unit in the last place, which is constant below the smallest normal number.
    info = torch.finfo(dtype)
    bound += info.eps / 2 * (expected.abs() + bound).clamp(min=info.smallest_normal)
    error = (actual.double() - expected).abs()
    wrong = ~(error <= bound)
    if among is not None:
        wrong &= among
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, first at "
        f"{wrong.nonzero()[0].tolist()}; largest error {error.max():.3g}"
    )


def is_taken(case: PassCase) -> bool:
    """Whether the case's planner takes it."""
    try:
        case.plan  # noqa: B018
    except Declined:
        return False
    return True


def placed(tensor: Tensor, memory_format: torch.memory_format, aligned: bool) -> Tensor:
    """A copy in this format, one element past an aligned address unless ``aligned``."""
    tensor = tensor.contiguous(memory_format=memory_format)
    if aligned:
        return tensor
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def _random(shape: tuple[int, ...], memory_format: torch.memory_format, case: PassCase) -> Tensor:
    return placed(torch.randn(shape).to(case.dtype), memory_format, case.aligned)


def rounded_to_tf32(tensor: Tensor, ties_to_even: bool = False) -> Tensor:
    """Rounds to the 10 mantissa bits of TF32, to nearest, ties away from zero or to even."""
    bits = tensor.contiguous().view(torch.int32)
    half = 0xFFF + (bits >> 13 & 1) if ties_to_even else 0x1000
    return ((bits + half) & ~0x1FFF).view(torch.float32)


def memory_format(channels_last: bool, rank: int) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if rank == 4 else torch.channels_last_3d
