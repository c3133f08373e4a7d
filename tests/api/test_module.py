"""``fastconv.Conv2d`` is a ``torch.nn.Conv2d`` in every way but its arithmetic."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import fastconv
import oracle

pytestmark = pytest.mark.usefixtures("host_path")

# Constructor arguments after (in_channels=4, out_channels=6, kernel_size=(3, 2)).
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 3)},
    {"groups": 2},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": (2, 1), "padding_mode": "circular"},
    {"padding": "same", "padding_mode": "replicate"},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"dtype": torch.complex64},
]
configurations = pytest.mark.parametrize("arguments", CONFIGURATIONS, ids=str)


def _make(cls: type[nn.Conv2d], **arguments: Any) -> nn.Conv2d:
    torch.manual_seed(1)
    return cls(**{"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), **arguments})


def _assert_same_function(first: nn.Conv2d, second: nn.Conv2d) -> None:
    """Checks that two modules have the same output and gradients for a new input."""
    input = oracle.random((2, 4, 9, 8), first.weight.dtype)
    grad_output = torch.randn_like(second(input))

    def results(module: nn.Conv2d) -> tuple[torch.Tensor, ...]:
        names, parameters = zip(*module.named_parameters(), strict=True)
        return oracle.with_gradients(
            lambda input, *parameters: torch.func.functional_call(
                module, dict(zip(names, parameters, strict=True)), (input,)
            ),
            (input, *parameters),
            grad_output,
        )

    # How exact PyTorch's sums of 16-bit numbers are depends on the machine's instructions.
    tolerance = 0.05 if first.weight.dtype.itemsize == 2 else None
    torch.testing.assert_close(results(first), results(second), rtol=tolerance, atol=tolerance)


@configurations
def test_same_module_as_pytorchs(arguments: dict[str, Any]) -> None:
    ours, theirs = _make(fastconv.Conv2d, **arguments), _make(nn.Conv2d, **arguments)
    assert isinstance(ours, nn.Conv2d)
    assert repr(ours) == f"fastconv.{theirs!r}"
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert ours.state_dict()[name].equal(tensor), name
    _assert_same_function(ours, theirs)


@configurations
@pytest.mark.parametrize(
    ("source", "target"),
    [(fastconv.Conv2d, nn.Conv2d), (nn.Conv2d, fastconv.Conv2d)],
    ids=["to PyTorch", "from PyTorch"],
)
def test_state_dict_crosses_over(
    source: type[nn.Conv2d], target: type[nn.Conv2d], arguments: dict[str, Any]
) -> None:
    saved = _make(source, **arguments)
    loaded = target(4, 6, (3, 2), **arguments)
    assert not loaded.weight.equal(saved.weight)
    loaded.load_state_dict(saved.state_dict(), strict=True)
    _assert_same_function(loaded, saved)


def _become(module: nn.Conv2d, cls: type[nn.Conv2d]) -> nn.Conv2d:
    module.__class__ = cls
    return module


def _with_state_of(module: nn.Conv2d, cls: type[nn.Conv2d]) -> nn.Conv2d:
    crossed = cls.__new__(cls)
    crossed.__setstate__(copy.deepcopy(module.__dict__))
    return crossed


@configurations
@pytest.mark.parametrize("cross", [_become, _with_state_of])
def test_classes_cross_over(cross: Callable[..., nn.Conv2d], arguments: dict[str, Any]) -> None:
    theirs = _make(nn.Conv2d, **arguments)
    ours = cross(_make(nn.Conv2d, **arguments), fastconv.Conv2d)
    assert type(ours) is fastconv.Conv2d
    _assert_same_function(ours, theirs)
    back = cross(ours, nn.Conv2d)
    assert type(back) is nn.Conv2d
    _assert_same_function(back, theirs)


def _saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved_and_loaded,
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("padding", [1, "same", ((1, 0), (2, 1))], ids=str)
def test_copies(duplicate: Callable[[nn.Module], nn.Module], padding: Any) -> None:
    module = _make(fastconv.Conv2d, padding=padding, precision="ieee")
    twin = duplicate(module)
    assert type(twin) is fastconv.Conv2d
    assert repr(twin) == repr(module)
    assert twin.precision == "ieee"
    input = torch.randn(2, 4, 9, 8)
    assert twin(input).equal(module(input))
    with torch.no_grad():
        twin.weight.add_(1)
    assert not twin(input).equal(module(input))


def test_representation_names_what_is_beyond_pytorch() -> None:
    module = fastconv.Conv2d(4, 6, 3, padding=((1, 0), (2, 1)), precision="ieee")
    assert repr(module) == (
        "fastconv.Conv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), "
        "padding=((1, 0), (2, 1)), precision='ieee')"
    )  # fmt: skip


def test_representation_tells_our_layers_from_others() -> None:
    class Own(fastconv.Conv2d):
        pass

    model = nn.Sequential(
        fastconv.Conv2d(4, 6, 3),
        nn.Conv2d(4, 6, 3),
        Own(4, 6, 3),
        parametrizations.weight_norm(fastconv.Conv2d(4, 6, 3)),
    )
    names = [line.split("(")[1].split(": ")[1] for line in repr(model).split("\n")[1:5]]
    assert names == ["fastconv.Conv2d", "Conv2d", "Own", "fastconv.ParametrizedConv2d"]


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [((1, 0), (2, 3)), [[0, 2], [1, 1]]], ids=str)
def test_four_sided_padding(mode: str, padding: Any) -> None:
    module = _make(fastconv.Conv2d, padding=padding, padding_mode=mode, groups=2)
    input = torch.randn(2, 4, 9, 8)
    (top, bottom), (left, right) = padding
    padded = F.pad(input, (left, right, top, bottom), "constant" if mode == "zeros" else mode)
    torch.testing.assert_close(
        module(input), F.conv2d(padded, module.weight, module.bias, groups=2)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_to_dtype(dtype: torch.dtype) -> None:
    ours, theirs = (_make(cls, padding=1).to(dtype) for cls in (fastconv.Conv2d, nn.Conv2d))
    assert ours(oracle.random((1, 4, 5, 5), dtype)).dtype == dtype
    _assert_same_function(ours, theirs)


def test_to_channels_last() -> None:
    ours, theirs = (
        _make(cls, padding=1).to(memory_format=torch.channels_last)
        for cls in (fastconv.Conv2d, nn.Conv2d)
    )
    assert ours.weight.is_contiguous(memory_format=torch.channels_last)
    output = ours(torch.randn(2, 4, 9, 8))
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.sum().backward()
    assert ours.weight.grad.stride() == ours.weight.stride()
    _assert_same_function(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (4, 9, 8)], ids=str)
def test_meta_device(shape: tuple[int, ...]) -> None:
    module = fastconv.Conv2d(4, 6, 3, padding=((1, 0), (2, 1)), stride=2, device="meta")
    output = module(torch.empty(shape, device="meta"))
    assert (output.device.type, output.shape) == ("meta", (*shape[:-3], 6, 4, 5))
    module.to_empty(device="cpu").reset_parameters()
    assert module(torch.randn(shape)).shape == output.shape


def test_weight_norm() -> None:
    ours, theirs = (
        parametrizations.weight_norm(_make(cls, padding=1, dtype=torch.float64))
        for cls in (fastconv.Conv2d, nn.Conv2d)
    )
    input = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    losses = [module(input).square().sum() for module in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs_by_name[name].grad)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("padding", [1, "same", "valid", ((1, 0), (2, 1))], ids=str)
def test_jit_trace(padding: Any) -> None:
    module = fastconv.Conv2d(4, 6, (3, 2), padding=padding, dilation=(1, 3))
    traced = torch.jit.trace(module, torch.randn(2, 4, 9, 8))
    input = torch.randn(3, 4, 12, 7)  # A trace works for all sizes of images.
    assert traced(input).equal(module(input))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_jit_trace_warns_that_it_keeps_the_size_of_a_kernel() -> None:
    def same(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fastconv.conv2d(input, weight, padding="same")

    tensors = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    with pytest.warns(torch.jit.TracerWarning, match="constant"):
        traced = torch.jit.trace(same, tensors)
    assert traced(*tensors).equal(same(*tensors))


def _network(convolution: Callable[..., nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        convolution(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        convolution(8, 12, 3, stride=2, padding=1, groups=4),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        convolution(12, 12, 5, padding="same", dilation=2, groups=12),
        convolution(12, 16, 1),
        nn.ReLU(),
        convolution(16, 5, (5, 6)),
        nn.Flatten(),
    )


def test_training_follows_pytorch() -> None:
    def losses(convolution: Callable[..., nn.Module]) -> list[float]:
        network = _network(convolution)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
        images, labels = torch.randn(8, 3, 10, 12), torch.randint(5, (8,))
        history = []
        for _ in range(50):
            loss = F.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    ours, theirs = losses(fastconv.Conv2d), losses(nn.Conv2d)
    assert theirs[-1] < theirs[0] / 2
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
