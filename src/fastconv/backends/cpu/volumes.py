"""The passes of volumes, plane by plane: the planes that one plane reads are channels of an image.

A copy holds these planes, those outside of the volume as zeros, unless there is only one of them.
Volumes that are images in other strides (``backends/flat.py``) are computed as images, at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fastconv.backends.cpu import images
from fastconv.backends.cpu.axes import Axis, reading
from fastconv.backends.cpu.scratch import SUM_DTYPES
from fastconv.backends.cpu.views import sum_positions
from fastconv.backends.epilogue import applied_to_bias
from fastconv.backends.flat import flattened
from fastconv.problem import Epilogue, Problem


def forward(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Fills ``out`` with activation(convolution of ``input`` + bias + residual)."""
    flat = flattened(problem, input, weight, out)
    if flat is not None:
        added = None if residual is None else flat.output(residual)
        views = flat.input(input), flat.weight(weight), bias, flat.output(out)
        images.forward(flat.problem, *views, added, epilogue)
        return
    depth = reading(problem.axes[0])
    of_plane, taps = _with_channels(problem, depth.taps), weight.flatten(1, 2)
    for plane in range(depth.outputs):
        added = None if residual is None else residual[:, :, plane]
        read = _read_by(plane, input, depth)
        images.forward(of_plane, read, taps, bias, out[:, :, plane], added, epilogue)


def weight_grad(
    problem: Problem, grad_output: Tensor, input: Tensor, out: Tensor, bias_out: Tensor | None
) -> None:
    """Fills ``out`` with the weight gradient, and ``bias_out`` with the gradient of the bias."""
    flat = flattened(problem, input, out, grad_output)
    if flat is not None:
        views = flat.output(grad_output), flat.input(input), flat.weight(out)
        images.weight_grad(flat.problem, *views, bias_out)
        return
    if bias_out is not None:
        sum_positions(grad_output, bias_out)
    depth = reading(problem.axes[0])
    of_plane = _with_channels(problem, depth.taps)
    total = torch.zeros(of_plane.weight_shape, dtype=SUM_DTYPES.get(out.dtype, out.dtype))
    part = torch.empty_like(total)
    for plane in range(depth.outputs):
        read = _read_by(plane, input, depth)
        images.weight_grad(of_plane, grad_output[:, :, plane], read, part, None)
        total += part
    out.copy_(total.view(out.shape))


def input_grad(
    problem: Problem,
    grad_output: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Fills ``out`` with activation(input gradient + bias + residual)."""
    flat = flattened(problem, out, weight, grad_output, transposed=True)
    if flat is not None:
        added = None if residual is None else flat.input(residual)
        views = flat.output(grad_output), flat.weight(weight), flat.input(out)
        images.input_grad(flat.problem, *views, bias, added, epilogue)
        return
    depth = reading(problem.axes[0])

    @cache
    def weight_of(taps: tuple[int, ...]) -> Tensor:
        return torch.stack([weight[:, :, tap] for tap in taps], 1).flatten(0, 1)

    for plane in range(depth.size):
        added = None if residual is None else residual[:, :, plane]
        readers = _readers_of(plane, depth)
        if not readers:
            applied_to_bias(out[:, :, plane], bias, added, epilogue)
            continue
        above = torch.stack([grad_output[:, :, reader] for reader in readers.values()], 2)
        of_plane = replace(problem, out_channels=problem.out_channels * len(readers), depth=None)
        images.input_grad(
            of_plane, _like(grad_output, above.flatten(1, 2)), weight_of(tuple(readers)),
            out[:, :, plane], bias, added, epilogue,
        )  # fmt: skip


def _with_channels(problem: Problem, taps: int) -> Problem:
    """The problem of one output plane, with the planes that it reads as channels."""
    return replace(problem, in_channels=problem.in_channels * taps, depth=None)


def _read_by(plane: int, input: Tensor, depth: Axis) -> Tensor:
    """Returns what an output plane reads, as an image: for each channel, one plane for each tap."""
    first = plane * depth.step - depth.before
    planes = [first + tap * depth.reach for tap in range(depth.taps)]
    if len(planes) == 1 and 0 <= first < depth.size:
        return input[:, :, first]
    zeros = input.new_zeros((input.shape[0], input.shape[1], *input.shape[3:]))
    read = [input[:, :, at] if 0 <= at < depth.size else zeros for at in planes]
    return _like(input, torch.stack(read, 2).flatten(1, 2))


def _readers_of(plane: int, depth: Axis) -> dict[int, int]:
    """Returns the taps that read a plane, and for which output plane each of them does."""
    found = {}
    for tap in range(depth.taps):
        reader, rest = divmod(plane + depth.before - tap * depth.reach, depth.step)
        if rest == 0 and 0 <= reader < depth.outputs:
            found[tap] = reader
    return found


def _like(volume: Tensor, image: Tensor) -> Tensor:
    """Returns an image with channels last in memory if the volume has them last."""
    last = volume.stride(1) == 1
    return image.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
