"""Scaled fp16: results do not depend on the units that channels are measured in.

Powers of two change nothing but exponents, so that operands scaled by them must give the unscaled
result, scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

import oracle
from fastconv import ops
from fastconv.backends import cuda as backend
from fastconv.kernels import planner
from fastconv.kernels.hopper.halo import plan as halo
from fastconv.problem import Padding, Problem
from gpu.helpers import CUDA, arguments_of, is_hopper

pytestmark = [
    pytest.mark.usefixtures("_poisoned_memory"),
    pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0"),
]

SIDE = Padding(1, 1, 1, 1)
PROBLEMS = {
    "dilated": Problem(2, 32, 64, (90, 301), (5, 9), (1, 1), Padding(0, 0, 0, 0), (2, 3), 1),
    "deep": Problem(2, 256, 128, (28, 28), (3, 3), (1, 1), SIDE, (1, 1), 1),
    "groups": Problem(2, 96, 128, (40, 70), (3, 3), (1, 1), SIDE, (1, 1), 2),
    "space_to_depth": Problem(2, 20, 64, (65, 67), (5, 5), (2, 2), Padding(2, 2, 2, 2), (1, 1), 1),
}
PASSES = [
    *((name, "forward") for name in PROBLEMS),
    *((name, "input_grad") for name in PROBLEMS if name != "space_to_depth"),
]
MODES = ("tf32", "ieee")


@pytest.fixture(autouse=True, scope="module")
def _float16_for_all() -> Iterator[None]:
    """Lets the planner choose scaled fp16 wherever it is possible, not only where it is faster."""
    faster = {1: -0.9, 2: -0.9}
    with mock.patch.multiple(halo, SCALED_FP16_CYCLES=0.0, SCALED_FP16_COST=faster):
        backend._ready.cache_clear()
        yield
    backend._ready.cache_clear()


@contextmanager
def _without_float16() -> Iterator[None]:
    with mock.patch.object(halo, "SCALED_FP16_CYCLES", math.inf):
        backend._ready.cache_clear()
        yield
    backend._ready.cache_clear()


@dataclass
class Operands:
    """What a pass reads: images (the input, or the gradient of the output), and the weight.

    The weight's axes are (outputs, inputs of the group, height, width) of the pass.
    """

    problem: Problem
    direction: str
    images: Tensor
    weight: Tensor

    @classmethod
    def random(cls, name: str, direction: str) -> Operands:
        problem = PROBLEMS[name]
        shape = problem.input_shape if direction == "forward" else problem.output_shape
        images = oracle.random(shape, torch.float32, CUDA)
        weight = oracle.random(problem.weight_shape, torch.float32, CUDA)
        return cls(problem, direction, images, weight)

    def filters(self) -> Tensor:
        """A view of the weight with axes for group, output channel and input channel."""
        grouped = self.weight.unflatten(0, (self.problem.groups, -1))
        return grouped if self.direction == "forward" else grouped.transpose(1, 2)

    def channels(self) -> Tensor:
        """A view of the images with axes for image, group and channel."""
        return self.images.unflatten(1, (self.problem.groups, -1))

    def run(self, mode: str) -> Tensor:
        last = arguments_of(self.problem, mode)
        if self.direction == "forward":
            return ops.forward(self.images, self.weight, None, *last)
        return ops.input_grad(self.images, self.weight, self.problem.input_size, *last)

    def exact(self, images: Tensor, weight: Tensor) -> Tensor:
        problem = self.problem
        if self.direction == "forward":
            pad = (problem.padding.left, problem.padding.right, problem.padding.top,
                   problem.padding.bottom)  # fmt: skip
            padded = torch.nn.functional.pad(images, pad)
            geometry = (problem.stride, 0, problem.dilation, problem.groups)
            return torch.nn.functional.conv2d(padded, weight, None, *geometry)
        padding = (problem.padding.top, problem.padding.left)
        return torch.nn.grad.conv2d_input(
            problem.input_shape, weight, images, problem.stride, padding, problem.dilation,
            problem.groups,
        )  # fmt: skip

    def float64(self) -> Tensor:
        return self.exact(self.images.double(), self.weight.double())

    def assert_float16(self, mode: str) -> None:
        plan = getattr(planner, self.direction)
        kind = (torch.float32, False, False, self.weight.stride(), True, mode)
        planned = plan(self.problem, backend.operands_of(*kind), backend.gpu(0))
        assert "scaled fp16" in planned.why


def _powers(*shape: int, most: int = 40) -> Tensor:
    return torch.exp2(torch.randint(-most, most + 1, shape, device=CUDA).float())


def _scale_channels(operands: Operands, powers: Tensor) -> None:
    """Multiplies channels by powers for (group, channel), and divides the weights by them."""
    operands.channels().mul_(powers[..., None, None])
    operands.filters().div_(powers[:, None, :, None, None])


def _some_channels(exponent: int) -> Callable[[Operands], None]:
    def scale(operands: Operands) -> None:
        powers = torch.ones(operands.channels().shape[1:3], device=CUDA)
        powers[:, ::8] *= 2.0**exponent
        _scale_channels(operands, powers)

    return scale


def _every_channel(operands: Operands) -> None:
    _scale_channels(operands, _powers(*operands.channels().shape[1:3]))


def _outputs(operands: Operands) -> None:
    operands.filters().mul_(_powers(*operands.filters().shape[:2])[..., None, None, None])


def _images(operands: Operands) -> None:
    powers = torch.tensor([2.0**-40, 2.0**40], device=CUDA)
    operands.images.mul_(powers[:, None, None, None])


def _all(operands: Operands) -> None:
    for scale in (_every_channel, _outputs, _images):
        scale(operands)


SCALINGS: dict[str, Callable[[Operands], None]] = {
    **{f"channels by 2^{n}": _some_channels(n) for n in (20, 24, 30, 40, -20, -30, -40)},
    "every channel": _every_channel,
    "outputs": _outputs,
    "images": _images,
    "all": _all,
}


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """The error of each channel of each image, relative to the channel's norm."""
    planes = (actual.double() - expected).flatten(2).norm(dim=2)
    return planes / expected.flatten(2).norm(dim=2)


def _copy(operands: Operands) -> Operands:
    return Operands(
        operands.problem, operands.direction, operands.images.clone(), operands.weight.clone()
    )


def _error(actual: Tensor, expected: Tensor) -> float:
    """The root mean square of all planes' relative errors."""
    return float(_errors(actual, expected).square().mean().sqrt())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "direction"), PASSES)
def test_units_do_not_matter(name: str, direction: str, mode: str) -> None:
    """Scaled operands give the unscaled result, scaled, to within 1e-6 of each plane's norm."""
    operands = Operands.random(name, direction)
    operands.assert_float16(mode)
    unscaled, exact = operands.run(mode).double(), operands.float64()
    with _without_float16():
        plain = _error(operands.run(mode), exact)
    for scaling, scale in SCALINGS.items():
        scaled = _copy(operands)
        scale(scaled)
        actual, expected = scaled.run(mode).double(), scaled.float64()
        back = expected.abs().amax((2, 3), keepdim=True) / exact.abs().amax((2, 3), keepdim=True)
        assert float(_errors(actual / back, unscaled).max()) <= 1e-6, scaling
        if mode == "ieee":
            assert _error(actual, expected) <= 1.5 * plain, scaling


def _identity(operands: Operands) -> None:
    """Has each output read one channel alone; channels have very different magnitudes."""
    filters = operands.filters()
    keep = torch.zeros(filters.shape[1:3], device=CUDA)
    outputs, inputs = keep.shape
    keep[torch.arange(outputs), torch.arange(outputs) % inputs] = 1
    filters.mul_(keep[..., None, None])
    _every_channel(operands)


def _pruned(operands: Operands) -> None:
    """Sets nine of ten filters to zero."""
    filters = operands.filters()
    filters.mul_((torch.rand(filters.shape[:3], device=CUDA) < 0.1)[..., None, None])
    filters[:, :, 0] += 1e-3  # No output is zero.
    _every_channel(operands)
    _outputs(operands)


def _spikes(operands: Operands) -> None:
    """Makes all but one number of some channels small; their weights are as much larger."""
    channels = operands.channels()
    channels[:, :, 1::8] *= 2.0**-20
    channels[:, :, 1::8, 7, 7] = 1.0
    operands.filters()[:, :, 1::8] *= 2.0**20


def _dead_but_for_one(operands: Operands) -> None:
    """Sets all but one number of some channels to zero; that number is small itself."""
    channels = operands.channels()
    channels[:, :, 3::8] = 0
    channels[:, :, 3::8, 9, 9] = 2.0**-27
    operands.filters()[:, :, 3::8] *= 2.0**27


def _unlike_outputs(operands: Operands) -> None:
    """Has half of the outputs read large channels, and half of them small ones."""
    filters, channels = operands.filters(), operands.channels()
    middle = filters.shape[1] // 2
    filters[:, :middle, ::2] = 0
    filters[:, middle:, 1::2] = 0
    channels[:, :, ::2] *= 2.0**-26


ADVERSE = {
    "identity": _identity,
    "pruned": _pruned,
    "spikes": _spikes,
    "dead but for one": _dead_but_for_one,
    "unlike outputs": _unlike_outputs,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "direction"), PASSES)
def test_what_breaks_other_arguments(name: str, direction: str, mode: str) -> None:
    """Outputs that depend on an image's small channels alone are as exact as without float16."""
    for adverse, change in ADVERSE.items():
        operands = Operands.random(name, direction)
        change(operands)
        expected = operands.float64()
        error = _error(operands.run(mode), expected)
        with _without_float16():
            plain = _error(operands.run(mode), expected)
        assert error <= (1.5 if mode == "ieee" else 1.05) * plain, adverse


@pytest.mark.parametrize(("name", "direction"), PASSES)
def test_as_exact_as_cudnn(name: str, direction: str) -> None:
    operands = Operands.random(name, direction)
    for scale in (lambda operands: None, _some_channels(24), _every_channel):
        scaled = _copy(operands)
        scale(scaled)
        expected = scaled.float64()
        peer = scaled.exact(scaled.images, scaled.weight)
        assert _error(scaled.run("ieee"), expected) <= _error(peer, expected)
