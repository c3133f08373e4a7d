"""PyTorch's convolution in float64 as the reference, and how far from it a result may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv

# The rounding errors allowed, in units of the dtype's epsilon. 16-bit results are summed in float32
# and rounded once.
_ROUNDINGS = {torch.float16: 1, torch.bfloat16: 1}
_OTHER_ROUNDINGS = 4


# PyTorch's activations by their names in fastconv; leaky_relu has its default slope.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def _padded(input: Tensor, padding: Any) -> tuple[Tensor, Any]:
    """Pads the input by pairs of sides, which PyTorch does not take; returns what is left to it."""
    if isinstance(padding, (int, str)) or isinstance(padding[0], int):
        return input, padding
    return F.pad(input, _last_axis_first(padding)), 0


def _last_axis_first(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Returns pairs of sides in the order of ``F.pad``."""
    return [side for pair in reversed(pairs) for side in pair]


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """PyTorch's convolution, which also takes padding as ``((top, bottom), (left, right))``."""
    input, padding = _padded(input, padding)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """PyTorch's convolution, which also takes padding as ``((before, after),)``."""
    input, padding = _padded(input, padding)
    return F.conv1d(input, weight, bias, stride, padding, dilation, groups)


def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """PyTorch's transposed convolution along one axis or two; padding may have pairs of sides."""
    function = F.conv_transpose1d if weight.dim() == 3 else F.conv_transpose2d
    if isinstance(padding, int) or isinstance(padding[0], int):
        return function(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )  # fmt: skip
    axes = weight.dim() - 2
    more = (output_padding,) * axes if isinstance(output_padding, int) else output_padding
    whole = function(input, weight, None, stride, 0, 0, groups, dilation)
    amounts = [(-before, end - after) for (before, after), end in zip(padding, more, strict=True)]
    output = F.pad(whole, _last_axis_first(amounts))
    return output if bias is None else output + bias.view(-1, *(1,) * axes)


def random(shape: Sequence[int], dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    """Values that are the same for every device; small integers for an integer dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide).to(dtype).to(device)
    return torch.randint(-100, 100, shape).to(dtype).to(device)


def exact(tensor: Tensor) -> Tensor:
    """The same values on the CPU, in the widest dtype of their kind, contiguous.

    PyTorch 2.13 gets the weight gradient of complex128 wrong where an unbatched input in groups
    is not contiguous.
    """
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", wide).contiguous()


def with_gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], grad_output: Tensor, **kwargs: Any
) -> tuple[Tensor, ...]:
    """The output of ``function`` and the gradients of all ``tensors``, in this order."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves, **kwargs)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


def assert_matches(
    tensors: Sequence[Tensor],
    layout: Callable[[Tensor], Tensor] = torch.clone,
    function: Callable[..., Tensor] = fastconv.conv2d,
    reference: Callable[..., Tensor] = conv2d,
    **geometry: Any,
) -> None:
    """Compares ``function(*tensors, **geometry)`` and its gradients with the reference.

    ``tensors`` are input, weight and, if there is one, bias; the gradient of the output is random,
    laid out by ``layout``.
    """
    references = [exact(tensor) for tensor in tensors]
    shape = reference(*references, **geometry).shape
    grad_output = layout(random(shape, tensors[0].dtype, tensors[0].device))
    actual = with_gradients(function, tensors, grad_output, **geometry)
    expected = with_gradients(reference, references, exact(grad_output), **geometry)
    # Rounding errors are relative to the sums of the terms' magnitudes.
    sizes = with_gradients(
        reference, [tensor.abs() for tensor in references], exact(grad_output).abs(), **geometry
    )
    names = ("output", "input.grad", "weight.grad", "bias.grad")
    for name, *results in zip(names, actual, expected, sizes, strict=False):
        assert results[0].dtype == tensors[0].dtype, name
        assert_within_rounding(name, *results)


def assert_within_rounding(
    name: str, actual: Tensor, expected: Tensor, size: Tensor, more: int = 1
) -> None:
    """Checks every element; the error allowed is relative to ``size``, the sum of its |terms|.

    ``more`` multiplies the usual error.
    """
    assert actual.shape == expected.shape, name
    info = torch.finfo(actual.dtype)
    bound = more * _ROUNDINGS.get(actual.dtype, _OTHER_ROUNDINGS) * info.eps * size
    error = (exact(actual) - expected).abs()
    wrong = ~(error <= bound + info.tiny * info.eps)  # The last term is the smallest subnormal.
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, "
        f"first at {wrong.nonzero()[0].tolist()}; largest error {error.max():.3g}"
    )
