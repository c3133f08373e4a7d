"""A case is what one row measures: a workload, a pass, a number format and a memory format."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from _fastconv_command import choices
from _fastconv_command.choices import FORMAT_TRIPLES as FORMAT_TRIPLES
from _fastconv_command.choices import GRADIENTS as GRADIENTS
from _fastconv_command.choices import PASSES as PASSES
from _fastconv_command.choices import PRECISIONS as PRECISIONS
from _fastconv_command.choices import STEP as STEP
from fastconv import tables
from fastconv.bench import environment
from fastconv.workloads import Workload

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in choices.DTYPES}
FORMATS = dict(
    zip(choices.FORMATS, (torch.contiguous_format, torch.channels_last), strict=True)
)  # fmt: skip


class Tensors(NamedTuple):
    """The tensors that the passes of a layer read; each pass reads two of them."""

    input: Tensor
    weight: Tensor
    grad_output: Tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self)


@dataclass(frozen=True)
class Case:
    """What one row measures; ``precision`` is None unless the dtype is float32.

    ``format`` is the memory format of all tensors, or one of :data:`FORMAT_TRIPLES`.
    """

    workload: Workload
    direction: str
    dtype: str
    precision: str | None
    format: str

    @property
    def mode(self) -> str:
        """Number format and arithmetic: "float32 ieee", "bfloat16"."""
        return self.dtype if self.precision is None else f"{self.dtype} {self.precision}"

    @property
    def label(self) -> str:
        return f"{self.workload.name} {self.direction} {self.mode} {self.format}"

    @property
    def count(self) -> int:
        """How often a training step of the workload's model makes this pass.

        Layers that read the image have no input gradient.
        """
        first = self.workload.first if self.direction == "input_grad" else 0
        return self.workload.count - first

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def memory_formats(self) -> tuple[torch.memory_format, ...]:
        """The memory formats of input, weight and output gradient."""
        names = self.format.split("/")
        return tuple(FORMATS[name] for name in (names if len(names) > 1 else names * 3))

    def arguments(self) -> list[str]:
        """The command-line arguments that select this case alone."""
        words = ["--shape", self.workload.shape, "--pass", self.direction, "--dtype", self.dtype]
        if self.precision is not None:
            words += ["--precision", self.precision]
        return [*words, "--format", self.format]

    def command(self, *more: str) -> str:
        """The one-line command that measures this case alone."""
        return shlex.join(["fastconv", "bench", *self.arguments(), *more])

    def tensors(self, device: torch.device, seed: int = 0) -> Tensors:
        """Random tensors, the same for the same seed; on the device "meta", without data."""
        shapes = (self.workload.input, self.workload.weight, self.workload.output)
        if device.type == "meta":
            made = [torch.empty(shape, dtype=self.torch_dtype, device="meta") for shape in shapes]
        else:
            check_memory(shapes, self.torch_dtype, device)
            generator = torch.Generator(device).manual_seed(seed)
            made = [
                torch.randn(shape, generator=generator, device=device).to(self.torch_dtype)
                for shape in shapes
            ]
        formats = zip(made, self.memory_formats, strict=True)
        return Tensors(*(laid_out(tensor, format) for tensor, format in formats))


def laid_out(tensor: Tensor, format: torch.memory_format) -> Tensor:
    """The tensor of sequences, images or volumes in a memory format.

    Sequences with channels last are the transposed view of (batch, length, channels). Tensors of
    one dimension have no other format than theirs.
    """
    if tensor.dim() == 3:
        return tensor.unsqueeze(2).contiguous(memory_format=format).squeeze(2)
    return tensor.contiguous(memory_format=format_of(tensor.dim(), format))


def format_of(rank: int, format: torch.memory_format) -> torch.memory_format:
    """PyTorch's name of a memory format of :data:`FORMATS` for tensors of a rank."""
    if format == torch.channels_last and rank == 5:
        return torch.channels_last_3d
    return format if rank == 4 else torch.contiguous_format


def check_memory(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises a MemoryError if tensors would exceed a CPU's free memory.

    Allocating them anyway might make the operating system kill the process.
    """
    needed = sum(map(math.prod, shapes)) * dtype.itemsize
    if device.type == "cpu" and needed > environment.free_bytes(device):
        raise MemoryError(f"not enough memory for {needed / 2**30:.0f} GiB")


def modes(dtypes: Sequence[str], precisions: Sequence[str]) -> list[tuple[str, str | None]]:
    """Pairs of a dtype and a precision; the precision is None for all but float32."""
    return [
        (dtype, precision)
        for dtype in dtypes
        for precision in (precisions if dtype == "float32" else (None,))
    ]


def cases(
    workloads: Sequence[Workload],
    passes: Sequence[str],
    dtypes: Sequence[str],
    precisions: Sequence[str],
    formats: Sequence[str],
) -> list[Case]:
    """Every combination of the given values, without repetitions."""
    made = (
        Case(workload, direction, dtype, precision, format)
        for workload, (dtype, precision), format, direction in product(
            workloads, modes(dtypes, precisions), formats, passes
        )
    )
    return list(dict.fromkeys(made))


def case_from(entry: dict[str, Any], workload: Workload) -> Case:
    """The case that a row of a results file describes; raises a ValueError if there is none."""
    precisions = PRECISIONS if entry["dtype"] == "float32" else (None,)
    choices = {
        "direction": (*PASSES, STEP), "dtype": tuple(DTYPES), "precision": precisions,
        "format": tuple(FORMATS),
    }  # fmt: skip
    for name, allowed in choices.items():
        if entry[name] not in allowed:
            raise ValueError(f"{name} should be one of {allowed}, but got {entry[name]!r}")
    return Case(workload, *(entry[name] for name in choices))


def reason(error: Exception, advice: str = "") -> str:
    """Why a case failed, in one line; after an out-of-memory error, ``advice`` follows."""
    line = tables.error_line(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in line:
        return ": ".join(filter(None, ("out of memory", advice)))
    return line


def complaint(skipped: str | None, error: str | None) -> str | None:
    """Why a row has no times, if it has none."""
    if skipped is not None:
        return f"skipped: {skipped}"
    return None if error is None else f"failed: {error}"
