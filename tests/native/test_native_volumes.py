"""3-D convolutions on the native host path: which calls it serves, and what they leave behind."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastconv
from fastconv import native
from native.helpers import BIAS, Host, close, tensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

INPUT, WEIGHT = (2, 4, 3, 6, 5), (6, 4, 2, 3, 3)
SIDES = ((1, 0), (1, 1), (0, 2))

# Options of calls that C++ serves.
SERVED: dict[str, dict[str, Any]] = {
    "none": {},
    "numbers": {"stride": 2, "padding": 1, "dilation": 2},
    "tuples": {"stride": (1, 2, 1), "padding": (1, 0, 1), "dilation": (2, 1, 2)},
    "one for all axes": {"stride": [2], "padding": (1,)},
    "valid": {"padding": "valid"},
    "same": {"padding": "same", "dilation": (1, 2, 1)},
    "sides": {"padding": SIDES},
    "sides in lists": {"padding": [list(one) for one in SIDES]},
    "activation": {"activation": "relu"},
}


def _theirs(some: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    options = dict(options)
    act = options.pop("activation", None)
    padding = options.get("padding", 0)
    if isinstance(padding, list | tuple) and len(padding) == 3 and not isinstance(padding[0], int):
        around = [side for pair in padding[::-1] for side in pair]
        options["padding"], some = 0, [F.pad(some[0], around), *some[1:]]
    output = F.conv3d(*some, **options)
    return output if act is None else output.relu()


@pytest.mark.parametrize("batched", [True, False], ids=["", "unbatched"])
@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_calls_that_are_served(host: Host, options: dict[str, Any], batched: bool) -> None:
    some = tensors(INPUT if batched else INPUT[1:], WEIGHT, BIAS)
    close(fastconv.conv3d(*some, **options), _theirs(some, options))
    assert len(host.filled) == 1
    fastconv.conv3d(*some, **options)
    assert len(host.operators) == 1, "the table has the form of the call"


# Python serves these, or raises their errors.
OTHERS: dict[str, Any] = {
    "two numbers": {"padding": (1, 2)},
    "four pairs": {"padding": ((1, 0), (1, 0), (1, 0), (1, 0))},
    "a triple in a triple": {"padding": ((1, 0, 0), (1, 0), (1, 0))},
    "an array": {"stride": torch.ones(3, dtype=torch.int64).numpy()},
    "unknown name": {"padding": "full"},
    "same, strided": {"padding": "same", "stride": (1, 1, 2)},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_calls_that_are_not_served(host: Host, options: dict[str, Any]) -> None:
    some = tensors(INPUT, WEIGHT, BIAS)
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}
    assert native.conv2d is not None
    rest = (None, None, None, 3)  # precision, activation, residual, axes
    assert native.conv2d(*some, *given.values(), *rest) is NotImplemented
    for dimensions in (some[0][0, 0], some[0][None]):
        assert native.conv2d(dimensions, *some[1:], 1, 0, 1, 1, *rest) is NotImplemented
    assert host.filled == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last_3d])
def test_gradients(host: Host, dtype: torch.dtype, format: torch.memory_format) -> None:
    def gradients(function: Any) -> Any:
        torch.manual_seed(0)
        some = [one.to(dtype) for one in tensors(INPUT, WEIGHT, BIAS)]
        some[0] = some[0].contiguous(memory_format=format)
        leaves = [one.requires_grad_() for one in some]
        output = function(*leaves, stride=(1, 2, 1), padding=(1, 0, 1))
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    ours, theirs = gradients(fastconv.conv3d), gradients(F.conv3d)
    close(ours, theirs)
    assert [one.stride() for one in ours] == [one.stride() for one in theirs]
    assert ours[0].grad_fn.name() == "FastconvConv2dBackward"
    assert host.filled == ["forward", "input_grad", "weight_grad"]


def test_second_derivatives(host: Host) -> None:
    some = [
        tensor.double().detach().requires_grad_()
        for tensor in tensors((1, 2, 2, 3, 2), (2, 2, 1, 2, 2), (2,))
    ]
    assert torch.autograd.gradgradcheck(lambda *x: fastconv.conv3d(*x, padding=(0, 1, 0)), some)


def test_errors_are_pytorchs(host: Host) -> None:
    input, weight, bias = tensors((2, 3, 3, 6, 5), WEIGHT, BIAS)
    with pytest.raises(RuntimeError) as theirs:
        F.conv3d(input, weight, bias)
    with pytest.raises(RuntimeError) as ours:
        fastconv.conv3d(input, weight, bias)
    assert str(ours.value) == str(theirs.value)
