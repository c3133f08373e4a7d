"""Results have the same bits every time, and an image's do not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fastconv import ops
from fastconv.problem import Problem
from gpu.helpers import CUDA, FORMATS, arguments_of, format_of, precompile

BATCH = 300
# Input without its batch, weight, stride, padding, dilation, groups. A whole batch has more blocks
# than any GPU runs at once; a single image has fewer, and gets another plan.
GEOMETRIES: dict[str, tuple[Any, ...]] = {
    "square": ((16, 32, 32), (32, 16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "odd": ((5, 13, 15), (7, 5, 5, 9), (1, 1), (2, 2, 4, 4), (1, 1), 1),
    "strided": ((8, 29, 31), (12, 8, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    "dilated": ((8, 24, 24), (16, 8, 5, 9), (1, 1), (4, 4, 12, 12), (2, 3), 1),
    "deep": ((150, 7, 7), (40, 150, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "pointwise": ((70, 11, 13), (33, 70, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "depthwise": ((32, 28, 28), (32, 1, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 32),
    "wide kernel": ((3, 9, 70), (4, 3, 3, 31), (1, 1), (1, 1, 15, 15), (1, 1), 1),
    "volume": ((16, 4, 12, 16), (32, 16, 3, 3, 3), (1, 1, 1), (1,) * 6, (1, 1, 1), 1),
    "strided volume": ((8, 7, 12, 15), (16, 8, 3, 3, 3), (2, 2, 2), (1,) * 6, (1, 1, 1), 1),
    "causal volume": ((3, 5, 9, 12), (24, 3, 3, 5, 5), (1, 2, 2), (2, 0, 2, 2, 2, 2), (1,) * 3, 1),
    "patches": ((3, 4, 16, 32), (40, 3, 2, 4, 4), (2, 4, 4), (0,) * 6, (1, 1, 1), 1),
    "depthwise volume": ((24, 4, 12, 14), (24, 1, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3, 24),
}


def _problem(geometry: tuple[Any, ...], batch: int) -> Problem:
    image, *others = geometry
    return Problem.of((batch, *image), *others)


def _tensors(problem: Problem, dtype: torch.dtype, memory_format: Any) -> list[Tensor]:
    """Input, weight and the gradient of the output."""
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    return [
        torch.randn(shape, dtype=dtype, device=CUDA).to(
            memory_format=format_of(len(shape), memory_format)
        )
        for shape in shapes
    ]


def _forward(problem: Problem, input: Tensor, weight: Tensor, grad_output: Tensor) -> Tensor:
    return ops.forward(input, weight, None, *arguments_of(problem))


def _input_grad(problem: Problem, input: Tensor, weight: Tensor, grad_output: Tensor) -> Tensor:
    return ops.input_grad(grad_output, weight, problem.input_shape[2:], *arguments_of(problem))


def _weight_grad(problem: Problem, input: Tensor, weight: Tensor, grad_output: Tensor) -> Tensor:
    last = arguments_of(problem)
    return ops.weight_grad(grad_output, input, problem.weight_shape[2:], *last, False)[0]


def _image_by_image(
    geometry: tuple[Any, ...], memory_format: Any, dtype: torch.dtype, run: Callable[..., Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the results of single images, each with the same image's part of the batch's."""
    problem, alone = _problem(geometry, BATCH), _problem(geometry, 1)
    input, weight, grad_output = _tensors(problem, dtype, memory_format)
    together = run(problem, input, weight, grad_output)
    for index in (0, BATCH // 2 + 1, BATCH - 1):
        image = slice(index, index + 1)
        # Both a copy, which is aligned, and a view of the batch, which may not be.
        for copied in (torch.clone, lambda tensor: tensor):
            one = run(alone, copied(input[image]), weight, copied(grad_output[image]))
            yield one, together[image]


BY_IMAGE = (_forward, _input_grad)
DTYPES = (torch.float32, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    def passes(geometry: tuple[Any, ...], memory_format: Any) -> None:
        for dtype, run in product(DTYPES, BY_IMAGE):
            list(_image_by_image(geometry, memory_format, dtype, run))
        problem = _problem(geometry, BATCH)
        _weight_grad(problem, *_tensors(problem, torch.float32, memory_format))

    precompile(
        partial(passes, *arguments) for arguments in product(GEOMETRIES.values(), FORMATS.values())
    )


geometries = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
layouts = pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)


@pytest.mark.parametrize("run", [*BY_IMAGE, _weight_grad])
@layouts
@geometries
def test_runs_agree(
    geometry: tuple[Any, ...], memory_format: Any, run: Callable[..., Tensor]
) -> None:
    problem = _problem(geometry, BATCH)
    tensors = _tensors(problem, torch.float32, memory_format)
    first = run(problem, *tensors)
    for _ in range(9):
        assert run(problem, *tensors).equal(first)


@pytest.mark.parametrize("run", BY_IMAGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@layouts
@geometries
def test_an_image_does_not_depend_on_its_batch(
    geometry: tuple[Any, ...], memory_format: Any, dtype: torch.dtype, run: Callable[..., Tensor]
) -> None:
    for alone, together in _image_by_image(geometry, memory_format, dtype, run):
        assert alone.equal(together)
