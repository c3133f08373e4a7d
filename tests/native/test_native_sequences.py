"""1-D convolutions on the native host path: which calls it serves, and what they leave behind."""

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

INPUT, WEIGHT = (2, 4, 9), (6, 4, 3)
SIDES = ((2, 1),)

# Options of calls that C++ serves.
SERVED: dict[str, dict[str, Any]] = {
    "none": {},
    "numbers": {"stride": 2, "padding": 1, "dilation": 2},
    "tuples": {"stride": (2,), "padding": (1,), "dilation": (2,)},
    "valid": {"padding": "valid"},
    "same": {"padding": "same", "dilation": 2},
    "sides": {"padding": SIDES},
    "lists": {"stride": [2], "padding": [1], "dilation": [2]},
    "sides in lists": {"padding": [[1, 1]]},
    "activation": {"activation": "relu"},
}


def _theirs(some: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    options = dict(options)
    act = options.pop("activation", None)
    padding = options.get("padding", 0)
    if not isinstance(padding, str) and padding not in (0, 1, (1,), [1]):
        options["padding"], some = 0, [F.pad(some[0], tuple(padding[0])), *some[1:]]
    output = F.conv1d(*some, **options)
    return output if act is None else output.relu()


@pytest.mark.parametrize("batched", [True, False], ids=["", "unbatched"])
@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_calls_that_are_served(host: Host, options: dict[str, Any], batched: bool) -> None:
    some = tensors(INPUT if batched else INPUT[1:], WEIGHT, BIAS)
    close(fastconv.conv1d(*some, **options), _theirs(some, options))
    assert len(host.filled) == 1
    fastconv.conv1d(*some, **options)
    assert len(host.operators) == 1, "the table has the form of the call"


# Python serves these, or raises their errors.
OTHERS: dict[str, Any] = {
    "two numbers": {"padding": (1, 2)},
    "a name in a tuple": {"padding": ("same",)},
    "a pair in a pair": {"padding": ((1,),)},
    "an array": {"stride": torch.ones(1, dtype=torch.int64).numpy()},
    "three pairs": {"padding": ((1, 0), (1, 0), (1, 0))},
    "unknown name": {"padding": "full"},
    "same, strided": {"padding": "same", "stride": 2},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_calls_that_are_not_served(host: Host, options: dict[str, Any]) -> None:
    some = tensors(INPUT, WEIGHT, BIAS)
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}
    assert native.conv2d is not None
    rest = (None, None, None, 1)  # precision, activation, residual, axes
    assert native.conv2d(*some, *given.values(), *rest) is NotImplemented
    for dimensions in (some[0][0, 0], some[0][None]):
        assert native.conv2d(dimensions, *some[1:], 1, 0, 1, 1, *rest) is NotImplemented
    assert host.filled == []


def test_gradients(host: Host) -> None:
    def gradients(function: Any) -> Any:
        torch.manual_seed(0)
        some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
        output = function(*some, stride=2, padding=1)
        return [output, *torch.autograd.grad(output.square().sum(), some)]

    ours, theirs = gradients(fastconv.conv1d), gradients(F.conv1d)
    close(ours, theirs)
    assert [one.stride() for one in ours] == [one.stride() for one in theirs]
    assert ours[0].grad_fn.name() == "FastconvConv2dBackward"
    assert not ours[0]._is_view()
    assert host.filled == ["forward", "input_grad", "weight_grad"]


def test_second_derivatives(host: Host) -> None:
    some = [
        tensor.double().detach().requires_grad_() for tensor in tensors((1, 2, 5), (2, 2, 3), (2,))
    ]
    assert torch.autograd.gradgradcheck(lambda *x: fastconv.conv1d(*x, padding=1), some)


def test_only_input_and_weight_are_saved(host: Host) -> None:
    some = tensors(INPUT, WEIGHT, BIAS, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        fastconv.conv1d(*some)
    assert [tuple(tensor.shape) for tensor in saved] == [INPUT, WEIGHT]


def test_errors_name_the_sizes_of_sequences(host: Host) -> None:
    input, weight, bias = tensors((2, 3, 9), WEIGHT, BIAS)
    with pytest.raises(RuntimeError) as theirs:
        F.conv1d(input, weight, bias)
    with pytest.raises(RuntimeError) as ours:
        fastconv.conv1d(input, weight, bias)
    assert str(ours.value) == str(theirs.value)
