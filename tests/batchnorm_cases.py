"""Batch normalizations for tests: random tensors, and a reference in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from causal_cases import ROUNDINGS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACTIVATIONS: dict[str, Any] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A batch normalization: sizes, types, layout, and which optional tensors it has."""

    images: int
    channels: int
    plane: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    mixed: bool = False  # parameters and running statistics are float32
    channels_last: bool = False
    activation: str = "relu"
    residual: bool = False
    affine: bool = True
    mean: float = 0.5  # that of all channels, beside deviations of about 1
    offset: int = 0  # elements before the first one of x

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        flags = ("mixed", "channels_last", "residual")
        words = [name for name in flags if getattr(self, name)]
        words += [] if self.affine else ["not affine"]
        words += [f"mean {self.mean}"] if self.mean != 0.5 else []
        words += [f"offset {self.offset}"] if self.offset else []
        return " ".join((sizes, str(self.dtype).removeprefix("torch."), self.activation, *words))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.images, self.channels, *self.plane)

    @property
    def slope(self) -> float:
        return 0.1 if self.activation == "leaky_relu" else 0.0

    @property
    def count(self) -> int:
        return self.images * int(torch.Size(self.plane).numel())

    @property
    def parameter(self) -> torch.dtype:
        return torch.float32 if self.mixed else self.dtype


@dataclass(frozen=True)
class Tensors:
    """The operands of a batch normalization, and the gradient of its output."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    grad: Tensor

    @classmethod
    def random(cls, case: Case, device: str = "cpu", seed: int = 0) -> Tensors:
        draw = torch.Generator().manual_seed(seed)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=draw, dtype=torch.float64)

        def placed(values: Tensor) -> Tensor:
            return _placed(values.to(device, case.dtype), case)

        def parameter(values: Tensor) -> Tensor:
            return values.to(device, case.parameter)

        channels = case.channels
        means = case.mean * (1 + 0.1 * numbers(channels)).view(-1, *(1 for _ in case.plane))
        return cls(
            placed(numbers(*case.shape) + means),
            placed(numbers(*case.shape)) if case.residual else None,
            parameter(1 + 0.5 * numbers(channels)) if case.affine else None,
            parameter(numbers(channels)) if case.affine else None,
            parameter(numbers(channels)),
            parameter(1 + numbers(channels).abs()),
            placed(numbers(*case.shape)),
        )

    @property
    def leaves(self) -> list[Tensor]:
        """What has a gradient: x, and those of residual, weight and bias that exist."""
        given = (self.x, self.residual, self.weight, self.bias)
        return [one for one in given if one is not None]

    def double(self) -> Tensors:
        """The same values in float64, as leaves that require gradients."""

        def leaf(tensor: Tensor | None) -> Tensor | None:
            return (
                None if tensor is None else tensor.detach().cpu().double().clone().requires_grad_()
            )

        return Tensors(
            *(leaf(one) for one in (self.x, self.residual, self.weight, self.bias)),
            self.running_mean.cpu().double().clone(),
            self.running_var.cpu().double().clone(),
            self.grad.cpu().double(),
        )


def _placed(values: Tensor, case: Case) -> Tensor:
    """The values in the case's layout, at its offset, between NaNs."""
    memory = values.new_full((case.offset + values.numel() + 8,), torch.nan)
    ordered = values.movedim(1, -1) if case.channels_last else values
    view = memory[case.offset : case.offset + values.numel()].view(ordered.shape)
    view = view.movedim(-1, 1) if case.channels_last else view
    return view.copy_(values)


def reference(
    tensors: Tensors, activation: str, training: bool = True, momentum: float = 0.1
) -> Tensor:
    """The output, with derivatives; running statistics are updated."""
    output = F.batch_norm(
        tensors.x, tensors.running_mean, tensors.running_var, tensors.weight, tensors.bias,
        training, momentum, EPS,
    )  # fmt: skip
    if tensors.residual is not None:
        output = output + tensors.residual
    return ACTIVATIONS[activation](output)


def check_close(
    found: Tensor, expected: Tensor, dtype: torch.dtype, name: str, bound: float = 64.0
) -> None:
    """Raises if a result is further from float64 than rounding, of sums and of the result."""
    found, expected = found.detach().cpu(), expected.detach()
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    largest = float(expected.abs().max().clamp(min=1.0))
    allowed = 2 * ROUNDINGS[found.dtype] * expected.abs() + bound * ROUNDINGS[sums] * largest
    error = (found.double() - expected).abs()
    assert not found.isnan().any(), f"{name} has NaN"
    assert (error <= allowed).all(), f"{name} is off by {error.max()} of {largest}"


PLANES: tuple[tuple[int, ...], ...] = ((), (1, 1), (7, 7), (5,), (4, 4), (3, 8), (2, 3, 3), (1, 13))


def random_cases(count: int, seed: int, most: int = 40) -> list[Case]:
    """Random small cases with all types, layouts, activations and options."""
    draw = torch.Generator().manual_seed(seed)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=draw))]

    kinds = list(product(DTYPES, (False, True)))
    cases = []
    for number in range(count):
        dtype, channels_last = kinds[number % len(kinds)]
        cases.append(
            Case(
                one_of(2, 3, 5, 9),
                one_of(1, 3, 4, 8, 16, 17, most),
                one_of(*PLANES),
                dtype,
                dtype != torch.float64 and one_of(True, False),
                channels_last,
                one_of("identity", "relu", "relu", *ACTIVATIONS),
                one_of(True, False),
                one_of(True, True, False),
                0.5,
                one_of(0, 0, 1, 4),
            )
        )
    return cases
