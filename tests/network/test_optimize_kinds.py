"""``optimize`` of 1-D and transposed layers: calls, epilogues and BatchNorms that others lack."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastconv
from fastconv.network import calls, fusion
from fastconv.network.calls import Call
from fastconv.network.fusion import _scaled
from fastconv.problem import Epilogue
from network.helpers import (
    EXAMPLE,
    KINDS,
    NORMS,
    SEQUENCES,
    Clock,
    Followed,
    Vocoder,
    activations,
    fused,
    layer_of,
    norm_for,
    not_fused,
    ours,
    report,
    times,
)

pytestmark = pytest.mark.usefixtures("clock")

TRANSPOSED = [kind for kind in KINDS if "Transpose" in kind]


VOCODER = ["first", "along", "up", "smooth", "look", "widen"]


@pytest.fixture
def vocoder() -> Vocoder:
    model = Vocoder()
    with torch.no_grad():
        for norm in (one for one in model.modules() if isinstance(one, tuple(NORMS.values()))):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.normal_(1)
            norm.bias.normal_()
    return model


def test_every_kind_is_fused(vocoder: Vocoder) -> None:
    example = torch.randn(2, 3, 20)
    optimized = fused(vocoder, example)
    assert activations(optimized) == {
        "first": "relu",
        "along": "relu",
        "up": ("leaky_relu", 0.2),
        "smooth": "tanh",
        "look": "relu",
        "widen": "sigmoid",
    }
    added = {n for n, one in optimized.named_modules() if getattr(one, "takes_residual", False)}
    assert added == {"along", "smooth"}
    assert report(optimized).folded == 3
    assert [str(node.target) for node in optimized.graph.nodes][1:-1] == [
        *VOCODER[:4], "unflatten", *VOCODER[4:]
    ]  # fmt: skip
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        torch.testing.assert_close(one(example), vocoder(example), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="cannot take a fused model apart"):
        fastconv.restore(optimized)


def test_volumes_are_fused() -> None:
    model = nn.Sequential(
        nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(),
        nn.ConvTranspose3d(4, 2, 2, 2), nn.Sigmoid(),
    ).eval()  # fmt: skip
    with torch.no_grad():
        norm: Any = model[1]
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    example = torch.randn(2, 3, 4, 5, 6)
    optimized = fused(model, example)
    assert activations(optimized) == {"0": "relu", "3": "sigmoid"}
    assert report(optimized).folded == 1
    torch.testing.assert_close(optimized(example), model(example), rtol=1e-4, atol=1e-4)


class VideoBlock(nn.Module):
    """A block of R(2+1)D: convolutions within frames and along time, and a strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.within = nn.Conv3d(3, 6, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)
        self.first_norm = nn.BatchNorm3d(6)
        self.along = nn.Conv3d(6, 4, (3, 1, 1), (2, 1, 1), (1, 0, 0), bias=False)
        self.last_norm = nn.BatchNorm3d(4)
        self.shortcut = nn.Sequential(nn.Conv3d(3, 4, 1, 2, bias=False), nn.BatchNorm3d(4))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.relu(self.first_norm(self.within(x)))
        found = self.last_norm(self.along(found))
        found += self.shortcut(x)
        return torch.relu(found)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_a_block_of_a_video_network_is_fused(last: bool) -> None:
    format = torch.channels_last_3d if last else torch.contiguous_format
    model = VideoBlock().eval().to(memory_format=format)
    with torch.no_grad():
        for norm in (one for one in model.modules() if isinstance(one, nn.BatchNorm3d)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    example = torch.randn(2, 3, 5, 8, 9).contiguous(memory_format=format)
    optimized = fused(model, example)
    assert activations(optimized) == {"within": "relu", "along": "relu"}
    added = {n for n, one in optimized.named_modules() if getattr(one, "takes_residual", False)}
    assert added == {"along"}
    assert report(optimized).folded == 3
    torch.testing.assert_close(optimized(example), model(example), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_inference")
def test_a_fused_model_is_compiled(vocoder: Vocoder) -> None:
    example = torch.randn(2, 3, 20)
    optimized = fastconv.optimize(vocoder.eval(), example)
    compiled = torch.compile(optimized, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(example), vocoder(example), rtol=1e-4, atol=1e-4)


def test_every_kind_is_exchanged_in_training(vocoder: Vocoder, clock: Clock) -> None:
    state = copy.deepcopy(vocoder.state_dict())
    parameters = dict(vocoder.named_parameters())
    assert fastconv.optimize(vocoder, torch.randn(2, 3, 20), inplace=True) is vocoder
    assert ours(vocoder) == VOCODER
    kinds = {name: type(vocoder.get_submodule(name)) for name in VOCODER}
    assert kinds["up"] is fastconv.ConvTranspose1d
    assert kinds["widen"] is fastconv.ConvTranspose2d
    assert all(parameters[name] is value for name, value in vocoder.named_parameters())
    assert all(value.equal(state[name]) for name, value in vocoder.state_dict().items())
    gradients = {(call.kind, call.gradients) for call in clock.seen}
    assert gradients == {
        ("Conv1d", ("weight",)),
        ("Conv1d", ("input", "weight", "bias")),
        ("ConvTranspose1d", ("input", "weight", "bias")),
        ("Conv2d", ("input", "weight", "bias")),
        ("ConvTranspose2d", ("input", "weight")),
    }
    assert ours(fastconv.restore(vocoder)) == []
    assert type(vocoder.up) is nn.ConvTranspose1d


def test_layers_that_differ_in_kind_alone(clock: Clock) -> None:
    """Their tensors and options are the same; each has its own times, and its own row."""
    model = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.ConvTranspose1d(3, 3, 3, padding=1))
    model[1].requires_grad_(False)
    model[0].requires_grad_(False)
    clock.gains = lambda call: times(2, 1) if call.kind == "Conv1d" else times(1, 2)
    optimized = fastconv.optimize(model, SEQUENCES)
    assert ours(optimized) == ["0"]
    lines = str(report(optimized)).split("\n")[:3]
    assert [line.split()[0] for line in lines] == ["layer", "Conv1d", "ConvTranspose1d"]
    assert lines[1].split()[1:6] == ["2x3x10", "3x3x3", "padding=1", "float32", "ncl"]
    again = fastconv.optimize(model, SEQUENCES)
    assert report(again).measured == 0
    assert ours(again) == ["0"]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_formats_in_the_report(kind: str) -> None:
    layer, example = layer_of(kind, 3, 4, 1), KINDS[kind]
    dense = torch.stack([*example.unbind(1)], -1).movedim(-1, 1)
    axes = {"1d": "l", "2d": "hw", "3d": "dhw"}[kind[-2:]]
    names = (f"nc{axes}", f"n{axes}c", f"c{axes}")
    for input, name in zip((example, dense, example[0]), names, strict=True):
        assert f"float32 {name} " in str(report(fastconv.optimize(layer, input)))


# --- Output sizes ---------------------------------------------------------------------------------


class Skips(nn.Module):
    """Its output is as large as the input: the layer is told how large that is."""

    def __init__(self, kind: str, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.down = layer_of(kind.replace("Transpose", ""), 3, 4, 3, stride=2, padding=1)
        self.up = layer_of(kind, 4, 3, 3, stride=2, padding=1, bias=False)
        self.norm, self.call, self.axes = norm_for(kind, 3), call, int(kind[-2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.call(self.up, self.down(x), x, self.axes)))


SIZES: dict[str, Callable[..., Tensor]] = {
    "all sizes": lambda up, low, x, axes: up(low, x.size()),
    "by name": lambda up, low, x, axes: up(low, output_size=x.shape[2:]),
    "a list": lambda up, low, x, axes: up(low, [x.size(2 + axis) for axis in range(axes)]),
    "constants": lambda up, low, x, axes: up(low, output_size=(10,) * axes),
}


@pytest.mark.parametrize("kind", TRANSPOSED)
@pytest.mark.parametrize("call", SIZES.values(), ids=SIZES)
def test_an_output_size_at_the_call(kind: str, call: Callable[..., Tensor], clock: Clock) -> None:
    """Without it, the output would be smaller by one."""
    model, example = Skips(kind, call).eval(), KINDS[kind]
    assert model(example).shape == example.shape
    optimized = fused(model, example)
    assert activations(optimized) == {"up": "relu"}
    assert report(optimized).folded == 1
    (measured,) = (one for one in clock.seen if one.kind == kind)
    assert measured.output_padding == (1,) * model.axes
    assert "output_padding=1" in str(report(optimized))
    if call is not SIZES["constants"]:  # other sizes, for which there is no output padding
        other = example[..., :9].clone()
        torch.testing.assert_close(optimized(other), model(other), rtol=1e-4, atol=1e-4)
    trained = fastconv.optimize(model.train(), example, inplace=True)
    assert ours(trained) == ["down", "up"]
    assert trained(example).shape == example.shape


def test_calls_with_several_output_sizes(clock: Clock) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose1d(3, 3, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)[..., :20].relu() + self.up(x, [21])[..., :20].relu()

    clock.gains = lambda call: times(1, 1.2) if call.output_padding == (1,) else times(1, 0.5)
    with torch.no_grad():
        optimized = fastconv.optimize(Several().eval(), SEQUENCES)
    assert ours(optimized) == ["up"]  # its calls together are faster
    assert activations(optimized) == {}
    assert {row.call.output_padding for row in report(optimized).layers} == {(0,), (1,)}


def test_an_output_size_that_is_impossible() -> None:
    model = Skips("ConvTranspose1d", lambda up, low, *_: up(low, [100]))
    with pytest.raises(ValueError, match=r"requested an output size of \[100\]"):
        fastconv.optimize(model, SEQUENCES)
    assert ours(model) == []


# --- What one kernel computes ---------------------------------------------------------------------


class Up(nn.Module):
    def __init__(self, kind: str, added: bool, **options: Any) -> None:
        super().__init__()
        self.layer, self.norm = layer_of(kind, 3, 6, **options), norm_for(kind, 6)
        self.added = added

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        out = self.norm(self.layer(x))
        return torch.relu(out + beside if self.added else out)


@pytest.mark.parametrize("kind", TRANSPOSED)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("options", "activation", "residual"),
    [
        ({"kernel_size": 3}, True, True),
        ({"kernel_size": 3, "padding": 1, "dilation": 2}, True, True),
        ({"kernel_size": 4, "stride": 2, "groups": 3}, True, False),
        ({"kernel_size": 2, "stride": 3}, False, False),  # positions without a tap
        ({"kernel_size": 4, "stride": 2, "dilation": 2}, False, False),  # every other one
        ({"kernel_size": 2, "dilation": 2, "output_padding": 1}, False, False),  # beyond the taps
    ],
    ids=str,
)
def test_what_becomes_part_of_a_transposed_layer(
    kind: str, added: bool, options: dict[str, Any], activation: bool, residual: bool, clock: Clock
) -> None:
    """What would be a pass of its own stays an operation of the graph; BatchNorms are folded."""
    model, example = Up(kind, added, **options).eval(), KINDS[kind]
    beside = torch.randn_like(model(example, torch.zeros(())))
    optimized = fused(model, example, beside)
    fuses = residual if added else activation
    assert activations(optimized) == ({"layer": "relu"} if fuses else {})
    assert report(optimized).folded == 1
    assert ours(optimized) == ["layer"]
    assert any(call.residual for call in clock.seen) == (added and fuses)


def test_what_one_kernel_computes() -> None:
    """A residual of a transposed layer, only if the stride is 1."""
    layer = nn.ConvTranspose2d(8, 4, 2, stride=2)
    call = Call.of(layer, torch.randn(2, 8, 6, 6))
    assert calls.is_one_kernel(call, Epilogue("relu"))
    assert not calls.is_one_kernel(call, Epilogue("relu", residual=True))
    assert calls.is_one_kernel(Call.of(nn.Conv2d(8, 4, 2, 2), torch.randn(2, 8, 6, 6)),
                               Epilogue("relu", residual=True))  # fmt: skip
    unbatched = Call.of(nn.ConvTranspose1d(8, 4, 3), torch.randn(8, 6))
    assert calls.is_one_kernel(unbatched, Epilogue("relu", residual=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_layer_that_is_wrong_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = getattr(fastconv, f"Fused{kind}")
    fuse, forward = fusion.fuse, cls.forward

    def breaking(*args: Any) -> Any:
        found = fuse(*args)
        monkeypatch.setattr(cls, "forward", lambda *args, **named: forward(*args, **named) * 1.01)
        return found

    monkeypatch.setattr(fusion, "fuse", breaking)
    reason = not_fused(Followed(torch.relu, norm=True, kind=kind), KINDS[kind])
    assert reason.startswith("layer with BatchNorm, relu gives ")
    assert "times what rounding can do" in reason


# --- BatchNorms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_folding_with_groups(kind: str, groups: int) -> None:
    """Output channels of a transposed layer are its weight's second dimension, for each group."""
    layer = layer_of(kind, 4, 8, 3, stride=2, groups=groups, dtype=torch.float64)
    scale = torch.randn(8, dtype=torch.float64)
    input = torch.randn((2, 4, *KINDS[kind].shape[2:]), dtype=torch.float64)
    taps = (1,) * (input.dim() - 2)
    expected = (layer(input) - layer.bias.view(-1, *taps)) * scale.view(-1, *taps)
    layer.weight = nn.Parameter(_scaled(layer.weight, scale, layer))
    torch.testing.assert_close(layer(input) - layer.bias.view(-1, *taps), expected)
    model = nn.Sequential(layer_of(kind, 4, 8, 3, stride=2, groups=groups), norm_for(kind, 8))
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.1, 4)
        model[1].weight.normal_()
    optimized = fused(model, input.float())
    assert report(optimized).folded == 1
    assert ours(optimized) == ["0"]


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize(
    ("layer", "norm", "example"),
    [
        (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(8), SEQUENCES[0]),
        (nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(12), SEQUENCES[0]),
        (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), SEQUENCES[0]),  # as many channels as positions
        (nn.Conv2d(3, 4, 3), nn.BatchNorm1d(8), EXAMPLE[0]),
        (nn.ConvTranspose2d(3, 12, 3), nn.BatchNorm1d(12), EXAMPLE[0]),
    ],
    ids=str,
)
def test_a_norm_that_takes_channels_for_a_batch_is_not_folded(
    layer: nn.Module, norm: nn.Module, example: Tensor
) -> None:
    """To a BatchNorm, a result without a batch has as many samples as channels."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    model = nn.Sequential(layer, norm, nn.ReLU()).eval()
    optimized = fastconv.optimize(model, example)
    assert report(optimized).folded == 0
    assert ours(optimized) == ["0"]
    torch.testing.assert_close(optimized(example), model(example), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_batch(kind: str, clock: Clock) -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of(kind, 3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.layer(x) + x)

    model, example = Added().eval(), KINDS[kind][0]
    optimized = fastconv.optimize(model, example)
    assert activations(optimized) == {"layer": "relu"}
    assert clock.seen[0].residual is not None
    torch.testing.assert_close(optimized(example), model(example))
    torch.testing.assert_close(optimized(KINDS[kind]), model(KINDS[kind]), rtol=1e-4, atol=1e-4)


# --- Layers that are left, and settings -----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_left(kind: str) -> None:
    plain = getattr(nn, kind)
    own = type("Own", (plain,), {"forward": lambda self, x: plain.forward(self, x)})
    replaced = layer_of(kind, 3, 3, 1)
    replaced.forward = lambda x: x
    model = nn.Sequential(
        own(3, 3, 1),
        nn.utils.parametrizations.weight_norm(layer_of(kind, 3, 3, 1)),
        nn.utils.spectral_norm(layer_of(kind, 3, 3, 1)),
        getattr(fastconv, kind)(3, 3, 1),
        replaced,
        layer_of(kind, 3, 3, 1),
    )
    found = report(fastconv.optimize(model, KINDS[kind], inplace=True))
    assert found.exchanged == ("5",)
    assert found.left == {
        "0": "of another class, Own",
        "1": f"of another class, Parametrized{kind}",
        "2": "with a weight that is computed",
        "3": "fastconv's already",
        "4": "with a forward of their own",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_several_names_and_shared_weights(kind: str, clock: Clock) -> None:
    one, tied = layer_of(kind, 3, 3, 3, padding=1), layer_of(kind, 3, 3, 3, padding=1)
    tied.weight = one.weight
    model = nn.Sequential(one, nn.ReLU(), one, tied, norm_for(kind, 3))
    optimized = fastconv.optimize(model, KINDS[kind])
    assert optimized[0] is optimized[2]
    assert optimized[3].weight is optimized[0].weight
    assert ours(optimized) == ["0", "3"]
    assert report(optimized).layers[0].calls == 1  # the first call has no gradient of the input
    with torch.no_grad():
        folded = fused(model, KINDS[kind])
    assert report(folded).folded == 1
    assert not folded.get_submodule("3").weight.equal(folded.get_submodule("0").weight)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_layers_autocast_and_precision(kind: str, clock: Clock) -> None:
    model = nn.Sequential(layer_of(kind, 3, 3, 3, padding=1), layer_of(kind, 3, 4, 3))
    model[0].requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16), fastconv.precision("ieee"):
        optimized = fastconv.optimize(model, KINDS[kind])
        assert optimized(KINDS[kind]).dtype == torch.bfloat16
    assert {call.gradients for call in clock.seen} == {(), ("weight", "bias")}
    assert {(call.autocast, call.precision) for call in clock.seen} == {(torch.bfloat16, "ieee")}
    assert ours(optimized) == ["0", "1"]


@pytest.mark.parametrize("kind", KINDS)
def test_lazy_layers(kind: str) -> None:
    model = nn.Sequential(getattr(nn, f"Lazy{kind}")(4, 3))
    with pytest.raises(ValueError, match="has no sizes yet: call the model once before"):
        fastconv.optimize(model, KINDS[kind])
    model(KINDS[kind])
    assert ours(fastconv.optimize(model, KINDS[kind])) == ["0"]
