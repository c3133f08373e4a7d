"""Which results count as equal, and by how much rounding may make a fused layer differ."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastconv.network import agreement
from fastconv.network.agreement import Rounding, difference

NAN, INF = float("nan"), float("inf")


@dataclass
class Result:
    """A result as some models return it."""

    logits: Tensor
    name: str = ""


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN])),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, -INF])),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1.0 + 1j * NAN]), torch.tensor([1.0 + 1j])),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.ones(2), 1.0),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ([1, 2], [1]),
        ((1, "one"), (1, "two")),
        (Result(torch.ones(1), "one"), Result(torch.ones(1), "two")),
        (Result(torch.tensor([1])), Result(torch.tensor([2]))),
        (None, 0),
    ],
)
def test_different_results(expected: Any, found: Any) -> None:
    words, _ = difference(expected, found)
    assert words
    assert difference(expected, expected) == (None, 0.0)
    assert difference(found, found) == (None, 0.0)


@pytest.mark.parametrize("scale", [1 + 1e-6, 1 - 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_how_much_numbers_differ(scale: float, dtype: torch.dtype) -> None:
    one = torch.randn(100, dtype=dtype)
    other = one * scale
    one[3] = other[3] = INF
    words, share = difference({"a": [one]}, {"a": [other]})
    assert words is None
    assert share == pytest.approx(1e-6, rel=0.2)
    assert difference(torch.zeros(2), torch.ones(2)) == (None, INF)


LAYERS = [
    nn.Conv2d(16, 24, 3, padding=1),
    nn.Conv2d(64, 8, 1),
    nn.Conv2d(8, 8, 5, stride=2, groups=8),
    nn.Conv2d(4, 6, 3, padding=2, dilation=2, padding_mode="reflect"),
    nn.Conv1d(16, 24, 5, padding=2),
    nn.ConvTranspose1d(8, 4, 4, stride=2, groups=4, output_padding=1),
    nn.ConvTranspose2d(8, 6, 3, stride=2, dilation=2, groups=2),  # some positions have no tap
]
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rounded(layer: nn.Module, input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The results of a layer in a type, and in double precision with the same numbers."""
    made = layer.to(dtype)
    narrow = made(input.to(dtype))
    return narrow, made.double()(input.to(dtype).double()).to(dtype)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "positive", "small", "one large"])
@torch.no_grad()
def test_roundings_pass_and_errors_do_not(layer: Any, dtype: torch.dtype, kind: str) -> None:
    axes = len(layer.kernel_size)
    input = torch.randn(3, layer.in_channels, *(13,) * axes)
    input = {
        "normal": input,
        "positive": input.abs(),
        "small": input * 1e-3,
        "one large": torch.where(torch.arange(13) == 4, input * 100, input),
    }[kind]
    found, expected = rounded(layer, input, dtype)
    layer.to(dtype)
    rounding = Rounding(layer, layer.bias.abs(), dtype, 1.0)
    given = input.to(dtype), None
    assert rounding.disagreement(expected, found, *given) is None
    off = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}
    assert rounding.disagreement(expected, found * (1 + off[dtype]), *given) is not None
    wrong, place = found.clone(), (1, 2, *(3,) * axes)
    wrong[place] = wrong.abs().max() * 1.5 + 1
    assert rounding.disagreement(expected, wrong, *given) is not None
    wrong[place] = NAN
    assert "NaN" in (rounding.disagreement(expected, wrong, *given) or "")
    nothing = torch.zeros_like(found)
    assert rounding.disagreement(expected, nothing, *given) is not None


@torch.no_grad()
def test_terms_that_cancel() -> None:
    """The bias nearly cancels the sum, whose rounding then is large beside the result."""
    layer = nn.Conv2d(8, 4, 1)
    input = torch.ones(1, 8, 4, 4)
    sums = layer(input)
    layer.bias.sub_(sums[0, :, 0, 0] - 1e-9)
    found, expected = layer(input), torch.full((1, 4, 4, 4), 1e-9)
    assert Rounding(layer, layer.bias.abs(), torch.float32, 1.0).disagreement(
        expected, found, input, None
    ) is None  # fmt: skip


@torch.no_grad()
def test_many_images_are_compared_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, input = nn.Conv2d(3, 4, 1), torch.randn(7, 3, 6, 6)
    monkeypatch.setattr(agreement, "_CHUNK", 4 * 6 * 6 * 2)
    rounding, expected = Rounding(layer, None, torch.float32, 1.0), layer(input)
    residual = torch.randn_like(expected)
    for other in (None, residual):
        assert rounding.disagreement(expected, expected, input, other) is None
        for image in range(7):
            wrong = expected.clone()
            wrong[image] *= 1.01
            assert rounding.disagreement(expected, wrong, input, other)
    assert rounding.disagreement(expected[:0], expected[:0], input[:0], None) is None


@pytest.mark.parametrize(
    ("layer", "terms"),
    [
        (nn.Conv2d(8, 4, 3, groups=2), 4 * 9),
        (nn.ConvTranspose2d(8, 4, 3, groups=2), 4 * 9),
        (nn.ConvTranspose2d(8, 4, 3, stride=2), 8 * 2 * 2),
        (nn.ConvTranspose1d(8, 4, 8, stride=4, dilation=3), 8 * 2),
        (nn.ConvTranspose1d(8, 4, 8, stride=4, dilation=2), 8 * 4),
        (nn.ConvTranspose1d(8, 4, 2, stride=4), 8),
    ],
    ids=str,
)
@torch.no_grad()
def test_how_many_terms_there_are(layer: Any, terms: int) -> None:
    """As many as an output has where all inputs and weights are one."""
    nn.init.ones_(layer.weight)
    layer.bias = None
    assert agreement._terms(layer) == terms
    input = torch.ones(1, layer.in_channels, *(13,) * len(layer.kernel_size))
    assert int(layer(input).max()) == terms


def test_tf32_counts_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = Rounding(nn.Conv2d(3, 4, 1), None, torch.float32, 1.0)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(agreement._precision, "pytorch_setting", lambda: "tf32")
    assert rounding._unit(gpu) == pytest.approx(2**-11, rel=1e-3)
    assert rounding._unit(cpu) == pytest.approx((1 + math.sqrt(3)) * 2**-24)
    monkeypatch.setattr(agreement._precision, "pytorch_setting", lambda: "ieee")
    assert rounding._unit(gpu) == rounding._unit(cpu)
