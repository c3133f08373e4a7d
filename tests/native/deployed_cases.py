"""A program that compares the operators of libfastconv.so on a CPU with PyTorch's in float64.

It gets the library's path and a seed, does not import fastconv, and prints the number of
comparisons.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CASES = 60
# The largest error of a result, in units of the sum of the absolute values of its products.
BOUNDS = {
    torch.float64: 1e-14,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.complex64: 1e-5,
    torch.complex128: 1e-14,
    torch.int32: 0.0,
    torch.int8: 0.0,
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu6": lambda x: x.clamp(0, 6),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.25),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Case:
    """A random convolution, with the gradients that PyTorch computes in float64."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.dtype = draw.choice(list(BOUNDS))
        self.wide = torch.complex128 if self.dtype.is_complex else torch.float64
        self.groups = draw.choice((1, 1, 2, 3))
        channels = [self.groups * draw.randint(1, 4) for _ in range(2)]
        self.axes = draw.choice((2, 2, 3))
        kernel = [draw.randint(1, 4 if self.axes == 2 else 3) for _ in range(self.axes)]
        self.dilation = [draw.randint(1, 3) for _ in kernel]
        self.stride = [draw.randint(1, 3) for _ in kernel]
        self.padding = [draw.randint(0, 4) for _ in 2 * kernel]
        extent = [d * (k - 1) + 1 for d, k in zip(self.dilation, kernel, strict=True)]
        size = [draw.randint(1, 9 if self.axes == 2 else 5) for _ in kernel]
        for axis in range(self.axes):
            padded = sum(self.padding[2 * axis : 2 * axis + 2])
            size[axis] = max(size[axis], extent[axis] - padded)
        self.input = self._tensor(draw.randint(0, 3), channels[0], *size)
        self.weight = self._tensor(channels[1], channels[0] // self.groups, *kernel)
        self.bias = self._tensor(channels[1]) if draw.random() < 0.5 else None
        self.geometry = (self.stride, self.padding, self.dilation, self.groups, "ieee")

    def _tensor(self, *shape: int) -> Tensor:
        values = torch.randint(-8, 9, shape) if self._is_integer else torch.randn(shape)
        if self.dtype.is_complex:
            values = torch.complex(values, torch.randn(shape))
        tensor = values.to(self.dtype)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if len(shape) in formats and self.draw.random() < 0.5:
            tensor = tensor.to(memory_format=formats[len(shape)])
        return tensor

    @property
    def _is_integer(self) -> bool:
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    def reference(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        before, after = self.padding[::2], self.padding[1::2]
        both = zip(before[::-1], after[::-1], strict=True)  # pad takes the last axis first
        padded = F.pad(x, [side for one in both for side in one])
        convolve = F.conv2d if self.axes == 2 else F.conv3d
        return convolve(padded, w, bias, self.stride, 0, self.dilation, self.groups)

    def compare(self, found: Tensor, expected: Tensor, scale: Tensor) -> None:
        assert found.dtype == self.dtype
        assert found.shape == expected.shape
        if self._is_integer:  # sums wrap around
            assert torch.equal(found, expected.round().to(torch.int64).to(self.dtype))
            return
        error = (found.to(self.wide) - expected).abs() / (scale.abs() + 1)
        assert error.numel() == 0 or error.max().item() <= BOUNDS[self.dtype], self.__dict__

    def forward(self) -> None:
        found = torch.ops.fastconv.forward(self.input, self.weight, self.bias, *self.geometry)
        self.compare(found, *self._expected())

    def _expected(self) -> tuple[Tensor, Tensor]:
        wide = [
            None if t is None else t.to(self.wide) for t in (self.input, self.weight, self.bias)
        ]
        sizes = [None if t is None else t.abs() for t in wide]
        return self.reference(*wide), self.reference(*sizes)  # type: ignore[arg-type]

    def fused(self, activation: str) -> None:
        if self._is_integer or self.dtype.is_complex:
            activation = "identity"
        expected, scale = self._expected()
        residual = self._tensor(*expected.shape) if self.draw.random() < 0.5 else None
        if residual is not None:
            expected, scale = expected + residual, scale + residual.to(self.wide).abs()
        slope = 0.25 if activation == "leaky_relu" else 0.0
        found = torch.ops.fastconv.fused(
            self.input, self.weight, self.bias, residual, *self.geometry, activation, slope
        )
        self.compare(found, ACTIVATIONS[activation](expected), scale)

    def gradients(self) -> None:
        x, w = (t.to(self.wide, copy=True).requires_grad_() for t in (self.input, self.weight))
        output = self.reference(x, w, None)
        grad = self._tensor(*output.shape)
        gradients = lambda *of: torch.autograd.grad(*of)  # noqa: E731
        # The operators do not conjugate, and PyTorch's formulas do.
        expected = [g.conj() for g in gradients(output, (x, w), grad.to(self.wide).conj())]
        sizes = [t.detach().abs().requires_grad_() for t in (x, w)]
        scales = gradients(self.reference(*sizes, None), sizes, grad.to(self.wide).abs())
        of_input = torch.ops.fastconv.input_grad(
            grad, self.weight, self.input.shape[2:], *self.geometry
        )
        self.compare(of_input, expected[0], scales[0])
        of_weight, of_bias = torch.ops.fastconv.weight_grad(
            grad, self.input, self.weight.shape[2:], *self.geometry, self.bias is not None
        )
        self.compare(of_weight, expected[1], scales[1])
        together = torch.ops.fastconv.backward(
            grad, self.input, self.weight, *self.geometry, False, self.bias is not None
        )
        self.compare(together[0], expected[0], scales[0])
        self.compare(together[1], expected[1], scales[1])
        assert torch.equal(together[2], of_bias)
        if self.bias is None:
            assert of_bias.shape == (0,)
        else:
            wide, dims = grad.to(self.wide), (0, *range(2, 2 + self.axes))
            self.compare(of_bias, wide.sum(dims), wide.abs().sum(dims))

    def transposed(self, activation: str) -> None:
        """The input gradient, with a bias, a residual and an activation."""
        if self._is_integer or self.dtype.is_complex:
            activation = "identity"
        x, w = (t.to(self.wide, copy=True).requires_grad_() for t in (self.input, self.weight))
        output = self.reference(x, w, None)
        given = self._tensor(*output.shape)
        (expected,) = torch.autograd.grad(output, x, given.to(self.wide).conj())
        sizes = [t.detach().abs().requires_grad_() for t in (x, w)]
        (scale,) = torch.autograd.grad(
            self.reference(*sizes, None), sizes[0], given.to(self.wide).abs()
        )
        bias = self._tensor(x.shape[1]) if self.draw.random() < 0.5 else None
        residual = self._tensor(*x.shape) if self.draw.random() < 0.5 else None
        total = expected.conj()
        everywhere = None if bias is None else bias.view(-1, *[1] * self.axes)
        for added in (everywhere, residual):
            if added is not None:
                total, scale = total + added, scale + added.to(self.wide).abs()
        more = [self._rest(axis, output.shape[2 + axis]) for axis in range(self.axes)]
        slope = 0.25 if activation == "leaky_relu" else 0.0
        found = torch.ops.fastconv.transposed(
            given, self.weight, bias, residual, more, *self.geometry, activation, slope
        )
        self.compare(found, ACTIVATIONS[activation](total), scale)

    def _rest(self, axis: int, outputs: int) -> int:
        """Positions of the input after the last that a kernel begins at, and its extent."""
        padded = self.input.shape[2 + axis] + sum(self.padding[2 * axis : 2 * axis + 2])
        extent = self.dilation[axis] * (self.weight.shape[2 + axis] - 1) + 1
        return padded - (outputs - 1) * self.stride[axis] - extent


def check_autograd() -> None:
    """The gradients that autograd records are PyTorch's; what needs Python is an error."""
    x, w, b = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in _SHAPES)
    geometry: Any = ([2, 1], [1, 0, 2, 1], [1, 2], 2, None)
    output = torch.ops.fastconv.forward(x, w, b, *geometry)
    found = torch.autograd.grad(output.sin().sum(), (x, w, b))
    padded = F.pad(x, (2, 1, 1, 0))
    expected = F.conv2d(padded, w, b, [2, 1], 0, [1, 2], 2)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sin().sum(), (x, w, b)))
    above, of_images = output.detach().requires_grad_(), torch.randn(4, dtype=torch.float64)
    leaves = (above, w, of_images.requires_grad_())
    images = torch.ops.fastconv.transposed(*leaves, None, [1, 0], *geometry, "identity", 0.0)
    whole = F.conv_transpose2d(*leaves, [2, 1], 0, [1, 0], 2, [1, 2])
    expected = whole[:, :, 1:, 2:-1]
    torch.testing.assert_close(images, expected)
    found = torch.autograd.grad(images.sin().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sin().sum(), leaves))
    try:
        torch.ops.fastconv.fused(x, w, b, None, *geometry, "relu", 0.0)
    except NotImplementedError as error:
        assert "without Python" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the fused operator was recorded")


def check_lazy_conjugates() -> None:
    """A tensor with PyTorch's conjugate bit is resolved, and not read as it lies in memory."""
    x, w = torch.randn(2, 4, 7, 6).cfloat() * 1j, torch.randn(6, 4, 3, 2).cfloat() + 1j
    geometry: Any = ([1, 1], [0] * 4, [1, 1], 1, None)
    found = torch.ops.fastconv.forward(x.conj(), w, None, *geometry)
    torch.testing.assert_close(found, F.conv2d(x.conj(), w), rtol=1e-4, atol=1e-4)


_SHAPES: tuple[tuple[int, ...], ...] = ((2, 4, 7, 6), (6, 2, 3, 2), (6,))

_WRONG: dict[str, tuple[Any, ...]] = {
    "stride from 1": ([0, 1], [0] * 4, [1, 1], 1),
    "padding from 0": ([1, 1], [0, 0, 0, -1], [1, 1], 1),
    "dilation from 1": ([1, 1], [0] * 4, [1, 0], 1),
    "groups from 1": ([1, 1], [0] * 4, [1, 1], 0),
    "expected input of 2 channels": ([1, 1], [0] * 4, [1, 1], 1),
    "does not fit into a padded input": ([1, 1], [0] * 4, [1, 6], 2),
}


def check_errors() -> None:
    """Arguments that the library cannot compute with are errors that say so."""
    x, w, b = (torch.randn(shape) for shape in _SHAPES)
    calls = {words: (x, w, b, *geometry) for words, geometry in _WRONG.items()}
    fine = (*_WRONG["expected input of 2 channels"][:3], 2)
    calls["bias of 6 elements"] = (x, w, b[:5], *fine)
    calls["one type and one device"] = (x, w.double(), b, *fine)
    calls["4-D tensors and a 1-D bias"] = (x[0], w, b, *fine)
    _expect_errors(torch.ops.fastconv.forward, {w: (*some, None) for w, some in calls.items()})
    fused: Any = (x, w, b, None, *fine, None)
    words = "an argument that is none of its values"
    _expect_errors(torch.ops.fastconv.fused, {words: (*fused, "swish", 0.0)})
    residual = (x, w, b, x, *fine, None, "relu", 0.0)
    _expect_errors(torch.ops.fastconv.fused, {"a residual of size [2, 6, 5, 5]": residual})
    gradient: Any = (x, w, [7, 6], *fine, None)
    _expect_errors(torch.ops.fastconv.input_grad, {"grad_output of size": gradient})
    above = torch.randn(2, 6, 5, 5)
    geometry: Any = ([0, 0], *fine, None, "relu", 0.0)
    _expect_errors(
        torch.ops.fastconv.transposed,
        {
            "a bias of 4 elements": (above, w, b, None, *geometry),
            "a residual of size [2, 4, 7, 6]": (above, w, None, above, *geometry),
            "an input of size [2, 6, 5, 5]": (above[:, :4], w, None, None, *geometry),
            "would have -": (above, w, None, None, [0, 0], [1, 1], [9] * 4, *geometry[3:]),
        },
    )


def _expect_errors(operator: Any, calls: dict[str, tuple[Any, ...]]) -> None:
    for words, arguments in calls.items():
        try:
            operator(*arguments)
        except RuntimeError as error:
            assert words in str(error), (words, error)  # noqa: PT017
        else:
            raise AssertionError(words)


def main(library: str, seed: int) -> None:
    torch.ops.load_library(library)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for number in range(CASES):
        case = Case(draw)
        case.forward()
        for with_epilogue in (case.fused, case.transposed):
            with_epilogue(list(ACTIVATIONS)[number % len(ACTIVATIONS)])
        case.gradients()
    check_autograd()
    check_lazy_conjugates()
    check_errors()
    assert "fastconv" not in sys.modules
    print(CASES)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
