"""Causal convolutions for tests: random tensors, and a reference in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ROUNDINGS = {  # half of the distance between 1 and the next number of a type
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True)
class Case:
    """A causal convolution: sizes, types, layout, and which optional tensors it has."""

    batch: int
    dim: int
    length: int
    width: int
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None  # that of x, unless it is given
    channels_last: bool = False
    bias: bool = True
    silu: bool = True
    sequences: bool = False
    states: bool = False
    gap: int = 0  # elements between rows, which belong to no tensor
    offset: int = 0  # elements before the first one

    def __str__(self) -> str:
        sizes = f"{self.batch}x{self.dim}x{self.length} width {self.width}"
        flags = ("channels_last", "bias", "silu", "sequences", "states")
        words = [name for name in flags if getattr(self, name)]
        types = [str(one).removeprefix("torch.") for one in (self.dtype, self.weight_dtype) if one]
        numbers = (("gap", self.gap), ("offset", self.offset))
        memory = [f"{name} {number}" for name, number in numbers if number]
        return " ".join((sizes, *types, *words, *memory))

    @property
    def activation(self) -> str | None:
        return "silu" if self.silu else None


@dataclass(frozen=True)
class Tensors:
    """The operands of a causal convolution."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    seq_idx: Tensor | None
    initial_states: Tensor | None

    @classmethod
    def random(cls, case: Case, device: str = "cpu", seed: int = 0) -> Tensors:
        """Random operands of a case, with NaN in gaps and before and behind x."""
        draw = torch.Generator().manual_seed(seed)
        shape = (case.batch, case.dim, case.length)
        weight_dtype = case.weight_dtype or case.dtype

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=draw, dtype=torch.float64)

        states = numbers(case.batch, case.dim, case.width - 1) if case.states else None
        steps = torch.rand(case.batch, case.length, generator=draw) < 0.3
        seq_idx = steps.cumsum(1).int() - (torch.rand(case.batch, 1, generator=draw) < 0.5).int()
        return cls(
            placed(numbers(*shape).to(device, case.dtype), case),
            (numbers(case.dim, case.width) / case.width**0.5).to(weight_dtype).to(device),
            numbers(case.dim).to(weight_dtype).to(device) if case.bias else None,
            seq_idx.to(device) if case.sequences else None,
            None if states is None else states.to(case.dtype).to(device),
        )

    @property
    def arguments(
        self,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.x, self.weight, self.bias, self.seq_idx, self.initial_states

    def double(self) -> Tensors:
        """The same values in float64, as leaves that require gradients."""

        def leaf(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().double().requires_grad_()

        return replace(
            self,
            x=leaf(self.x),
            weight=leaf(self.weight),
            bias=leaf(self.bias),
            initial_states=leaf(self.initial_states),
        )


def placed(values: Tensor, case: Case) -> Tensor:
    """The values in the case's layout, between NaNs."""
    batch, dim, length = values.shape
    rows, columns = (length, dim) if case.channels_last else (dim, length)
    pitch = columns + case.gap
    memory = values.new_full((case.offset + batch * rows * pitch + 8,), torch.nan)
    view = memory[case.offset :].as_strided((batch, rows, columns), (rows * pitch, pitch, 1))
    view = view.transpose(1, 2) if case.channels_last else view
    return view.copy_(values)


def reference(tensors: Tensors, silu: bool) -> Tensor:
    """The output, position by position and tap by tap, with derivatives."""
    x, (_, width) = tensors.x, tensors.weight.shape
    outputs = []
    for t in range(x.shape[2]):
        total = torch.zeros_like(x[:, :, 0])
        if tensors.bias is not None:
            total = total + tensors.bias
        for j in range(width):
            total = total + _product(tensors, t, t - (width - 1) + j, j)
        total = total * torch.sigmoid(total) if silu else total
        if tensors.seq_idx is not None:
            total = torch.where((tensors.seq_idx[:, t] >= 0)[:, None], total, 0.0)
        outputs.append(total)
    return torch.stack(outputs, 2)


def _product(tensors: Tensors, t: int, position: int, tap: int) -> Tensor | float:
    """What the input at a position adds to the output at t."""
    taps, ids = tensors.weight[:, tap], tensors.seq_idx
    if position < 0:
        if tensors.initial_states is None:
            return 0.0
        return tensors.initial_states[:, :, position] * taps
    product = tensors.x[:, :, position] * taps
    if ids is None:
        return product
    return torch.where((ids[:, position] == ids[:, t])[:, None], product, 0.0)


def final_states(tensors: Tensors) -> Tensor:
    """The last ``width - 1`` inputs."""
    width, length = tensors.weight.shape[1], tensors.x.shape[2]
    columns = []
    for position in range(length - (width - 1), length):
        if position >= 0:
            columns.append(tensors.x[:, :, position])
        elif tensors.initial_states is not None:
            columns.append(tensors.initial_states[:, :, position])
        else:
            columns.append(torch.zeros_like(tensors.x[:, :, 0]))
    return torch.stack(columns, 2) if columns else tensors.x.new_empty(*tensors.x.shape[:2], 0)


def check_close(found: Tensor, expected: Tensor, terms: int, name: str = "result") -> None:
    """Raises if a result is further from float64 than a sum of so many terms, rounded, can be."""
    if not expected.numel():
        return
    found, expected = found.detach(), expected.detach().to(found.device)
    sums = torch.float64 if found.dtype == torch.float64 else torch.float32
    largest = float(expected.abs().max().clamp(min=1.0))
    allowed = 2 * ROUNDINGS[found.dtype] * expected.abs()
    allowed += (terms + 16) * ROUNDINGS[sums] * largest
    error = (found.double() - expected).abs()
    assert not found.isnan().any(), f"{name} has NaN"
    assert (error <= allowed).all(), f"{name} is off by {error.max()} of {largest}"


def random_cases(count: int, seed: int, widths: Sequence[int], most: int) -> list[Case]:
    """Random cases with all types, layouts and options, of lengths up to ``most``."""
    draw = torch.Generator().manual_seed(seed)

    def one_of(*values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=draw))]

    kinds = list(product(DTYPES, (False, True)))
    cases = []
    for number in range(count):
        dtype, channels_last = kinds[number % len(kinds)]
        sequences = one_of(0, 0, 1) == 1
        mixed = dtype != torch.float64 and one_of(0, 0, 1) == 1
        cases.append(
            Case(
                one_of(1, 2, 3),
                one_of(1, 2, 5, 8, 24),
                one_of(1, 2, 3, 7, 8, 16, 33, most // 2, most - 3, most),
                widths[number // len(kinds) % len(widths)],
                dtype,
                torch.float32 if mixed else None,
                channels_last,
                one_of(0, 1) == 1,
                one_of(0, 1, 1) == 1,
                sequences,
                not sequences and one_of(0, 1) == 1,
                one_of(0, 0, 1, 8),
                one_of(0, 0, 1, 4),
            )
        )
    return cases
