"""Layers with an epilogue: they compute what the layer, an addition and an activation do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fastconv
from fastconv.fused import FUSED

SHAPES = {
    fastconv.Conv1d: (2, 4, 9),
    fastconv.Conv2d: (2, 4, 9, 8),
    fastconv.Conv3d: (2, 4, 4, 5, 6),
    fastconv.ConvTranspose1d: (2, 4, 9),
    fastconv.ConvTranspose2d: (2, 4, 9, 8),
    fastconv.ConvTranspose3d: (2, 4, 4, 5, 6),
}


def _pair(plain: Any, **options: Any) -> tuple[Any, Any]:
    """A layer and its fused twin, which has the same parameters."""
    layer, twin = plain(4, 6, 3, **options), FUSED[plain](4, 6, 3, **options)
    twin.load_state_dict(layer.state_dict())
    return layer, twin


def test_every_layer_has_a_fused_one() -> None:
    assert FUSED.keys() == SHAPES.keys()
    for plain, fused in FUSED.items():
        assert issubclass(fused, plain)
        assert fused is getattr(fastconv, f"Fused{plain.__name__}")


@pytest.mark.parametrize("plain", SHAPES)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_epilogues(plain: Any, recorded: bool, stride: int) -> None:
    layer, twin = _pair(plain, stride=stride, padding=1, groups=2)
    input = torch.randn(SHAPES[plain], requires_grad=recorded)
    with torch.set_grad_enabled(recorded):
        expected = layer(input)
        torch.testing.assert_close(twin(input), expected)
        twin.activation = ("leaky_relu", 0.2)
        residual = torch.randn_like(expected)
        found = twin(input, residual=residual)
        expected = nn.functional.leaky_relu(expected + residual, 0.2)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(twin(input[0], residual=residual[0]), expected[0])
    if recorded:
        gradients = [torch.autograd.grad(one.square().sum(), input)[0] for one in (found, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("plain", [fastconv.Conv1d, fastconv.Conv2d, fastconv.Conv3d])
def test_padding_modes(plain: Any) -> None:
    layer, twin = _pair(plain, padding=1, padding_mode="reflect")
    twin.activation = "relu"
    input = torch.randn(SHAPES[plain])
    torch.testing.assert_close(twin(input), layer(input).relu())


@pytest.mark.parametrize("plain", [one for one in SHAPES if "Transpose" in one.__name__])
def test_output_sizes(plain: Any) -> None:
    layer, twin = _pair(plain, stride=2, padding=1)
    twin.activation = "relu"
    input = torch.randn(SHAPES[plain])
    size = [2 * one for one in input.shape[2:]]
    expected = layer(input, size).relu()
    assert list(expected.shape[2:]) == size
    torch.testing.assert_close(twin(input, size), expected)
    torch.testing.assert_close(twin(input, output_size=expected.size()), expected)
    with pytest.raises(ValueError, match="requested an output size of"):
        twin(input, [100 for _ in size])


@pytest.mark.parametrize("plain", SHAPES)
def test_copies(plain: Any) -> None:
    _, twin = _pair(plain)
    twin.activation = "tanh"
    input = torch.randn(SHAPES[plain])
    for one in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert type(one) is type(twin)
        torch.testing.assert_close(one(input), twin(input))


def test_representation() -> None:
    layer = fastconv.FusedConv2d(4, 6, 1, bias=False)
    layer.activation, layer.takes_residual = ("leaky_relu", 0.2), True
    assert repr(layer) == (
        "fastconv.FusedConv2d(4, 6, kernel_size=(1, 1), stride=(1, 1), bias=False, "
        "activation=('leaky_relu', 0.2), takes_residual=True)"
    )
    assert repr(fastconv.FusedConvTranspose1d(4, 6, 2, precision="tf32")) == (
        "fastconv.FusedConvTranspose1d(4, 6, kernel_size=(2,), stride=(1,), precision='tf32', "
        "activation=None)"
    )
