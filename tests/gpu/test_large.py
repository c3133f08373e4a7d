"""Tensors of more than 2**31 elements, in many images or in one, and taps that far apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from fastconv import ops
from fastconv.problem import Problem
from gpu.helpers import CUDA, FORMATS, arguments_of, format_of, free_memory

NEEDED_BYTES = 60 << 30
layouts = pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield from free_memory(NEEDED_BYTES)


def _problem(batch: int, channels: int, height: int, width: int) -> Problem:
    """A padded 3x3 layer with as many channels out as in, so that input and output are as large."""
    shapes = (batch, channels, height, width), (channels, channels, 3, 3)
    return Problem.of(*shapes, (1, 1), (1, 1, 1, 1), (1, 1), 1)


def _random(shape: tuple[int, ...], memory_format: Any) -> Tensor:
    return torch.empty(shape, device=CUDA, memory_format=memory_format).normal_()


def _exact(input: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
    """The output and both gradients, in float64 on the CPU."""
    tensors = (oracle.exact(input), oracle.exact(weight))
    convolve = torch.nn.functional.conv3d if input.dim() == 5 else oracle.conv2d
    return oracle.with_gradients(convolve, tensors, oracle.exact(grad_output), padding=1)


def _assert_close(actual: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@layouts
def test_many_images(memory_format: Any) -> None:
    problem = _problem(2**31 // (4 * 64 * 64) + 5, 4, 64, 64)
    assert prod(problem.input_shape) > 2**31
    input, weight, grad_output = (
        _random(shape, memory_format)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    last = arguments_of(problem)
    output = ops.forward(input, weight, None, *last)
    input_grad = ops.input_grad(grad_output, weight, problem.input_size, *last)
    for image in (0, problem.batch // 2, problem.batch - 6, problem.batch - 1):
        at = slice(image, image + 1)
        exact = _exact(input[at], weight, grad_output[at])
        _assert_close(output[at], exact[0])
        _assert_close(input_grad[at], exact[1])

    def weight_grad(images: slice) -> Tensor:
        tensors = (grad_output[images], input[images])
        return ops.weight_grad(*tensors, problem.kernel_size, *last, False)[0]

    middle = problem.batch // 2  # Each half has fewer than 2**31 elements.
    halves = [weight_grad(half).double() for half in (slice(middle), slice(middle, None))]
    expected = halves[0] + halves[1]
    error = (weight_grad(slice(None)).double() - expected).norm() / expected.norm()
    assert error < 1e-5


CORNER = 40  # rows and columns


@layouts
def test_single_image(memory_format: Any) -> None:
    """Compares the image's last rows and columns, which have the largest offsets."""
    problem = _problem(1, 2, 32800, 32800)
    assert prod(problem.input_shape) > 2**31
    input, weight = (
        _random(shape, memory_format) for shape in (problem.input_shape, problem.weight_shape)
    )
    # Only the last pixels are not zero, so that the corner alone makes up the weight gradient.
    grad_output = torch.empty_like(input).zero_()
    grad_output[..., 2 - CORNER :, 2 - CORNER :].normal_()
    last = arguments_of(problem)
    exact = _exact(_corner(input), weight, _corner(grad_output))
    # The corner's first row and column lack neighbours.
    inner = (..., slice(1, None), slice(1, None))
    output = ops.forward(input, weight, None, *last)
    _assert_close(_corner(output)[inner], exact[0][inner])
    input_grad = ops.input_grad(grad_output, weight, problem.input_size, *last)
    _assert_close(_corner(input_grad)[inner], exact[1][inner])
    weight_grad, _ = ops.weight_grad(grad_output, input, problem.kernel_size, *last, False)
    _assert_close(weight_grad, exact[2])


@layouts
def test_many_volumes(memory_format: Any) -> None:
    """Compares volumes at both ends of a batch of more than 2^31 elements."""
    shape = (2**31 // (4 * 16 * 32 * 32) + 5, 4, 16, 32, 32)
    problem = Problem.of(shape, (4, 4, 3, 3, 3), (1, 1, 1), (1,) * 6, (1, 1, 1), 1)
    assert prod(problem.input_shape) > 2**31
    last, of_volumes = arguments_of(problem), format_of(5, memory_format)
    input, weight, grad_output = (
        _random(shape, of_volumes)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    output = ops.forward(input, weight, None, *last)
    input_grad = ops.input_grad(grad_output, weight, problem.input_shape[2:], *last)
    for volume in (0, problem.batch // 2, problem.batch - 1):
        at = slice(volume, volume + 1)
        exact = _exact(input[at], weight, grad_output[at])
        _assert_close(output[at], exact[0])
        _assert_close(input_grad[at], exact[1])
    # Only the last volume makes up the weight gradient.
    grad_output[:-1] = 0
    found, _ = ops.weight_grad(grad_output, input, problem.weight_shape[2:], *last, False)
    expected = _exact(input[-1:], weight, grad_output[-1:])[2]
    assert (found.cpu().double() - expected).norm() < 1e-5 * expected.norm()


def test_many_patches() -> None:
    """Patches at both ends of a batch of more than 2^31 elements, forward and back."""
    shape, kernel = (2**31 // (3 * 8 * 64 * 64) + 5, 3, 8, 64, 64), (2, 4, 4)
    problem = Problem.of(shape, (8, 3, *kernel), kernel, (0,) * 6, (1, 1, 1), 1)
    assert prod(problem.input_shape) > 2**31
    input = _random(problem.input_shape, torch.contiguous_format).bfloat16()
    weight = _random(problem.weight_shape, torch.contiguous_format).bfloat16()
    last = arguments_of(problem)
    output = ops.forward(input, weight, None, *last)
    restored = ops.input_grad(output, weight, problem.input_shape[2:], *last)
    for volume in (0, problem.batch // 2, problem.batch - 1):
        at = slice(volume, volume + 1)
        tensors = (oracle.exact(input[at]), oracle.exact(weight))
        grad = oracle.exact(output[at])
        patches = partial(torch.nn.functional.conv3d, stride=kernel)
        exact = oracle.with_gradients(patches, tensors, grad)
        close = partial(torch.testing.assert_close, rtol=1e-2, atol=1e-2)
        close(output[at].cpu().double(), exact[0])
        close(restored[at].cpu().double(), exact[1])


# The second case has more pixels than a tensor map can describe.
@pytest.mark.parametrize(("batch", "channels"), [(33000, 64), (65600, 32)])
def test_pixels_of_a_strided_gradient(batch: int, channels: int) -> None:
    """More than 2^31 pixels are stored, though each residue of the stride has fewer."""
    shapes = (batch, 8, 256, 256), (channels, 8, 1, 1)
    problem = Problem.of(*shapes, (2, 2), (0, 0, 0, 0), (1, 1), 1)
    assert batch * 256 * 256 > 2**31
    needed = 2 * (prod(problem.input_shape) + prod(problem.output_shape)) + (1 << 30)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    like = {"device": CUDA, "dtype": torch.bfloat16, "memory_format": torch.channels_last}
    grad_output = torch.empty(problem.output_shape, **like).normal_()
    weight = torch.randn(problem.weight_shape, device=CUDA, dtype=torch.bfloat16)
    weight = weight.contiguous(memory_format=torch.channels_last)
    grad = ops.input_grad(grad_output, weight, problem.input_size, *arguments_of(problem))
    for image in (0, 32767, 32768, batch // 2, batch - 1):
        at = slice(image, image + 1)
        of_pixels = torch.einsum(
            "nkhw,kc->nchw", grad_output[at].cpu().double(), weight[:, :, 0, 0].cpu().double()
        )
        expected = torch.zeros(grad[at].shape, dtype=torch.float64)
        expected[:, :, ::2, ::2] = of_pixels
        torch.testing.assert_close(grad[at].cpu().double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@layouts
def test_taps_far_apart(memory_format: Any, dtype: torch.dtype) -> None:
    """Only the middle one of three rows of taps meets the image; the others are 2^31 away."""
    far = 2**18
    shapes = (1, 64, 4, 8192), (64, 64, 3, 1)
    problem = Problem.of(*shapes, (1, 1), (far - 1, far - 1, 0, 0), (far, 1), 1)
    assert problem.output_size == (2, 8192)
    input, weight, grad_output = (
        _random(shape, memory_format).to(dtype)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    last = arguments_of(problem)
    rows, middle = input[:, :, 1:3].cpu().double(), weight[:, :, 1:2].cpu().double()
    above = grad_output.cpu().double()
    output, of_rows, of_middle = oracle.with_gradients(oracle.conv2d, (rows, middle), above)
    rtol, atol = (3e-2, 0.3) if dtype == torch.bfloat16 else (1e-4, 1e-3)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)

    close(ops.forward(input, weight, None, *last).cpu().double(), output)
    input_grad = ops.input_grad(grad_output, weight, problem.input_size, *last).cpu().double()
    close(input_grad[:, :, 1:3], of_rows)
    assert input_grad[:, :, [0, 3]].eq(0).all()
    found, _ = ops.weight_grad(grad_output, input, problem.kernel_size, *last, False)
    close(found[:, :, 1:2].cpu().double(), of_middle)
    assert found[:, :, ::2].eq(0).all()


def _corner(image: Tensor) -> Tensor:
    return image[..., -CORNER:, -CORNER:]
