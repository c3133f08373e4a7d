"""``Conv1d``, ``ConvTranspose1d`` and ``ConvTranspose2d`` beside PyTorch's layers."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import fastconv
import oracle

pytestmark = pytest.mark.usefixtures("host_path")

SHAPES = {"Conv1d": (2, 4, 9), "ConvTranspose1d": (2, 4, 9), "ConvTranspose2d": (2, 4, 9, 8)}
names = pytest.mark.parametrize("name", SHAPES)
transposed = pytest.mark.parametrize("name", ["ConvTranspose1d", "ConvTranspose2d"])

# Constructor arguments after (in_channels=4, out_channels=6, kernel_size=3).
COMMON: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "groups": 2},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"dtype": torch.complex64},
]
ALONG: list[dict[str, Any]] = [
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "circular"},
    {"padding": "same", "padding_mode": "replicate"},
]
TRANSPOSED: list[dict[str, Any]] = [
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"dilation": 3, "output_padding": 2},
]


def _configurations() -> Iterator[Any]:
    for name in SHAPES:
        for arguments in COMMON + (TRANSPOSED if "Transpose" in name else ALONG):
            yield pytest.param(name, arguments, id=f"{name}-{arguments}")


configurations = pytest.mark.parametrize(("name", "arguments"), list(_configurations()))


def _make(cls: Any, **arguments: Any) -> Any:
    torch.manual_seed(1)
    return cls(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **arguments})


def _both(name: str, **arguments: Any) -> tuple[Any, Any]:
    return _make(getattr(fastconv, name), **arguments), _make(getattr(nn, name), **arguments)


def _assert_same_function(name: str, first: nn.Module, second: nn.Module) -> None:
    """Checks that two modules have the same output and gradients for a new input."""
    dtype = next(first.parameters()).dtype
    input = oracle.random(SHAPES[name], dtype)
    grad_output = torch.randn_like(second(input))

    def results(module: nn.Module) -> tuple[Tensor, ...]:
        keys, parameters = zip(*module.named_parameters(), strict=True)
        return oracle.with_gradients(
            lambda input, *parameters: torch.func.functional_call(
                module, dict(zip(keys, parameters, strict=True)), (input,)
            ),
            (input, *parameters),
            grad_output,
        )

    # How exact PyTorch's sums of 16-bit numbers are depends on the machine's instructions.
    tolerance = 0.05 if dtype.itemsize == 2 else 1e-4
    torch.testing.assert_close(results(first), results(second), rtol=tolerance, atol=tolerance)


# --- As PyTorch's ---------------------------------------------------------------------------------


@configurations
def test_same_module_as_pytorchs(name: str, arguments: dict[str, Any]) -> None:
    ours, theirs = _both(name, **arguments)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == f"fastconv.{theirs!r}"
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        assert ours.state_dict()[key].equal(tensor), key
    _assert_same_function(name, ours, theirs)


@configurations
def test_classes_and_states_cross_over(name: str, arguments: dict[str, Any]) -> None:
    ours, theirs = _both(name, **arguments)
    torch.manual_seed(2)
    loaded = type(theirs)(4, 6, 3, **arguments)
    loaded.load_state_dict(ours.state_dict(), strict=True)
    _assert_same_function(name, loaded, ours)
    loaded.__class__ = type(ours)
    assert type(loaded) is getattr(fastconv, name)
    _assert_same_function(name, loaded, theirs)


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


@names
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies(name: str, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    module = _make(getattr(fastconv, name), padding=1, precision="ieee")
    twin = duplicate(module)
    assert type(twin) is type(module)
    assert repr(twin) == repr(module)
    assert repr(twin).endswith("padding=(1,), precision='ieee')" if "1d" in name else "'ieee')")
    input = torch.randn(SHAPES[name])
    assert twin(input).equal(module(input))


@names
@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.int64},
        {"groups": 3},
        {"groups": 0},
        {"out_channels": 5, "groups": 2},
        {"in_channels": -1},
        {"kernel_size": 2.5},
        {"padding_mode": "mirror"},
    ],
    ids=str,
)
def test_modules_cannot_be_made(name: str, changed: dict[str, Any]) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
        _make(getattr(nn, name), **changed)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))) as ours:
        _make(getattr(fastconv, name), **changed)
    assert ours.type is theirs.type


@transposed
def test_transposed_layers_pad_with_zeros(name: str) -> None:
    ours, theirs = _both(name)
    with pytest.raises(ValueError, match=f'Only "zeros" padding mode is supported for {name}'):
        _make(getattr(fastconv, name), padding_mode="reflect")
    input = torch.randn(SHAPES[name])
    for module in (ours, theirs):
        module.padding_mode = "reflect"
        with pytest.raises(ValueError, match=f"Only `zeros` padding mode is supported for {name}"):
            module(input)


# --- Sizes ----------------------------------------------------------------------------------------


@transposed
@pytest.mark.parametrize("batched", [True, False], ids=["", "unbatched"])
@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_output_size(name: str, batched: bool, more: int, whole: bool) -> None:
    ours, theirs = _both(name, stride=3, padding=1)
    input = torch.randn(SHAPES[name][0 if batched else 1 :])
    wanted = [size + more for size in ours(input).shape[1 + batched :]]
    if whole:
        wanted = [*ours(input).shape[: 1 + batched], *wanted]
    torch.testing.assert_close(ours(input, wanted), theirs(input, wanted))
    assert (
        list(ours(input, output_size=wanted).shape)[-len(ours.kernel_size) :]
        == (wanted[-len(ours.kernel_size) :])
    )


@transposed
@pytest.mark.parametrize("wanted", [[3], [3, 3], [1, 2, 3, 4, 5], [100], [100, 100]], ids=str)
def test_output_sizes_that_are_impossible(name: str, wanted: list[int]) -> None:
    ours, theirs = _both(name, stride=2)
    input = torch.randn(SHAPES[name])
    with pytest.raises(ValueError, match=r"output.size") as expected:
        theirs(input, wanted)
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        ours(input, wanted)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [((2, 0),), [[1, 3]]], ids=str)
def test_padding_for_each_side(mode: str, padding: Any) -> None:
    module = _make(fastconv.Conv1d, padding=padding, padding_mode=mode, groups=2)
    input = torch.randn(SHAPES["Conv1d"])
    padded = F.pad(input, tuple(padding[0]), "constant" if mode == "zeros" else mode)
    expected = F.conv1d(padded, module.weight, module.bias, groups=2)
    torch.testing.assert_close(module(input), expected)


@transposed
def test_cut_for_each_side(name: str) -> None:
    padding = ((2, 1), (0, 3))[: len(SHAPES[name]) - 2]
    module = _make(getattr(fastconv, name), padding=padding, stride=2)
    input = torch.randn(SHAPES[name])
    expected = oracle.conv_transpose(input, module.weight, module.bias, 2, padding)
    torch.testing.assert_close(module(input), expected)
    wanted = [size + 1 for size in expected.shape[2:]]
    assert list(module(input, wanted).shape[2:]) == wanted


@names
def test_meta_device(name: str) -> None:
    module = _make(getattr(fastconv, name), stride=2, device="meta")
    output = module(torch.empty(SHAPES[name], device="meta"))
    module.to_empty(device="cpu").reset_parameters()
    assert module(torch.randn(SHAPES[name])).shape == output.shape


# --- Tools ----------------------------------------------------------------------------------------


@names
def test_weight_norm(name: str) -> None:
    ours, theirs = map(parametrizations.weight_norm, _both(name, dtype=torch.float64))
    assert repr(ours).startswith(f"fastconv.Parametrized{name}")
    input = torch.randn(SHAPES[name], dtype=torch.float64)
    losses = [module(input).square().sum() for module in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    theirs_by_name = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs_by_name[key].grad)


@names
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_jit_trace(name: str) -> None:
    module = _make(getattr(fastconv, name), padding=1, stride=2)
    traced = torch.jit.trace(module, torch.randn(SHAPES[name]))
    batch, channels, *sizes = SHAPES[name]
    input = torch.randn(batch + 1, channels, *(size + 3 for size in sizes))
    assert traced(input).equal(module(input))  # A trace works for all sizes.


@names
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_jit_script(name: str) -> None:
    module = _make(getattr(fastconv, name))
    with pytest.raises(NotImplementedError, match=f"module.__class__ = torch.nn.{name}"):
        torch.jit.script(module)


@names
def test_symbolic_trace_calls_modules(name: str) -> None:
    network = nn.Sequential(_make(getattr(fastconv, name), padding=1), nn.ReLU())
    traced = torch.fx.symbolic_trace(network)
    assert [node.op for node in traced.graph.nodes][1:3] == ["call_module", "call_module"]
    input = torch.randn(SHAPES[name])
    torch.testing.assert_close(pickle.loads(pickle.dumps(traced))(input), network(input))


@names
@pytest.mark.parametrize("arguments", [{}, {"stride": 2, "padding": 1}, {"bias": False}], ids=str)
def test_operations_are_counted_as_pytorchs(name: str, arguments: dict[str, Any]) -> None:
    counts = []
    for module in _both(name, **arguments):
        with FlopCounterMode(display=False) as counter:
            module(torch.randn(SHAPES[name], requires_grad=True)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


EXPORTED: dict[str, list[dict[str, Any]]] = {
    "Conv1d": [{}, {"stride": 2, "padding": 1}, {"padding": ((2, 0),), "groups": 2}],
    "ConvTranspose1d": [
        {},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"stride": 3, "padding": ((2, 0),), "output_padding": 2},
    ],
    "ConvTranspose2d": [
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
        {"stride": 2, "padding": ((2, 1), (0, 3)), "output_padding": (1, 0)},
    ],
}


class _Exported(nn.Module):
    """Several layers of one class, because an export takes seconds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        cls = getattr(fastconv, name)
        self.layers = nn.ModuleList(_make(cls, **arguments) for arguments in EXPORTED[name])

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(input).relu() for layer in self.layers)


@names
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_onnx(name: str, tmp_path: Path) -> None:
    model, path, input = _Exported(name).eval(), tmp_path / "model.onnx", torch.randn(SHAPES[name])
    torch.onnx.export(model, (input,), path, dynamo=True, dynamic_shapes=({0: Dim("batch")},))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (argument,) = session.get_inputs()
    input = torch.randn(5, *SHAPES[name][1:])
    results = session.run(None, {argument.name: input.numpy()})
    with torch.no_grad():
        expected = list(model(input))
    torch.testing.assert_close([torch.from_numpy(result) for result in results], expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("padding", [(1, 1, 2, 2), (1, 0, 2, 3), (0, 0, 0, 0)], ids=str)
def test_decomposition_computes_the_same(
    padding: tuple[int, ...], bias: bool, memory_format: torch.memory_format
) -> None:
    operator = torch.ops.fastconv.transposed
    table = torch._decomp.get_decompositions([operator])
    input = torch.randn(2, 4, 9, 8).to(memory_format=memory_format)
    weight, bias_tensor = torch.randn(4, 3, 3, 2), torch.randn(6) if bias else None
    geometry = ((2, 3), padding, (1, 2), 2, None)
    for more in ((0, 0), (1, 2)):
        plain = (input, weight, bias_tensor, None, more, *geometry, "identity", 0.0)
        expected = operator.default(*plain)
        for arguments in (plain, (*plain[:3], expected.sin(), *plain[4:-2], "silu", 0.0)):
            actual = table[operator.default](*arguments)
            torch.testing.assert_close(actual, operator.default(*arguments), check_stride=True)


def _upsampler(conv: Any, up: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        conv(3, 8, 5, padding=2),
        nn.LeakyReLU(0.1),
        up(8, 6, 4, stride=2, padding=1),
        nn.LeakyReLU(0.1),
        conv(6, 6, 3, padding=2, dilation=2, groups=6),
        up(6, 1, 3, stride=3),
        nn.Tanh(),
    )


def test_training_follows_pytorch() -> None:
    def losses(conv: Any, up: Any) -> list[float]:
        network = _upsampler(conv, up)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
        frames, audio = torch.randn(4, 3, 10), torch.randn(4, 1, 60).tanh()
        history = []
        for _ in range(40):
            loss = F.mse_loss(network(frames), audio)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    theirs = losses(nn.Conv1d, nn.ConvTranspose1d)
    assert theirs[-1] < 0.9 * theirs[0]
    ours = losses(fastconv.Conv1d, fastconv.ConvTranspose1d)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
