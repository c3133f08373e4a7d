"""What ``optimize`` fuses in inference, and that it computes the same."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from network.helpers import (
    EXAMPLE,
    KINDS,
    Clock,
    Followed,
    ResNet,
    activations,
    fused,
    norm_for,
    ours,
    report,
    times,
)

pytestmark = pytest.mark.usefixtures("clock")


def test_a_residual_network(model: ResNet, clock: Clock) -> None:
    expected = model.eval()(EXAMPLE)
    optimized = fused(model, EXAMPLE)
    assert isinstance(optimized, torch.fx.GraphModule)
    assert type(optimized.get_submodule("layers.1.downsample.0")) is fastconv.Conv2d
    assert not any(isinstance(one, nn.BatchNorm2d) for one in optimized.modules())
    assert activations(optimized) == {
        "stem": "silu",
        "layers.0.conv1": "relu",
        "layers.0.conv2": "relu",
        "layers.1.conv1": "relu",
        "layers.1.conv2": "relu",
        "layers.2.conv1": "relu",
        "layers.2.conv2": "relu",
    }
    added = {n for n, one in optimized.named_modules() if getattr(one, "takes_residual", False)}
    assert added == {"layers.0.conv2", "layers.1.conv2", "layers.2.conv2"}
    targets = {str(node.target) for node in optimized.graph.nodes}
    assert not {"layers.0.relu", "<built-in function iadd>"} & targets
    residuals = [call for call in clock.seen if call.residual is not None]
    assert {call.activation for call in residuals} == {"relu"}
    found = report(optimized)
    assert found.fused
    assert found.folded == 7
    assert "BatchNorm, addition, relu" in str(found)
    assert "7 BatchNorms folded into weights" in str(found)
    torch.testing.assert_close(model(EXAMPLE), expected)  # the model is as it was
    assert ours(model) == []
    assert not optimized.training
    # It works with other sizes, and as a copy.
    other = torch.randn(5, 3, 12, 12)
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        torch.testing.assert_close(one(other), model(other), rtol=1e-4, atol=1e-4)
    for one in (optimized, copy.deepcopy(optimized)):
        with pytest.raises(ValueError, match="cannot take a fused model apart"):
            fastconv.restore(one)
    with torch.no_grad():
        again = fastconv.optimize(optimized, EXAMPLE)
    assert report(again) is found
    assert str(again.graph) == str(optimized.graph)


class Segmentation(nn.Module):
    """Gives results by name, as torchvision's models do, of the input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        features = OrderedDict(low=F.relu(self.norm(self.conv(x))))
        out = F.interpolate(self.head(features["low"]), size=x.shape[-2:])
        return OrderedDict(out=out, low=features["low"])


def test_results_by_name() -> None:
    model = Segmentation().eval()
    optimized = fused(model, EXAMPLE)
    assert report(optimized).fused, report(optimized)
    assert activations(optimized) == {"conv": "relu"}
    other = torch.randn(5, 3, 14, 10)
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        found, expected = one(other), model(other)
        assert type(found) is OrderedDict
        assert [*found] == [*expected]
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)


def test_layers_that_are_slower_fused(model: ResNet, clock: Clock) -> None:
    """They stay PyTorch's; their BatchNorms are folded nevertheless."""
    clock.gains = lambda call: times(1, 2) if call.residual else times(2, 1)
    optimized = fused(model, EXAMPLE)
    assert activations(optimized).keys() == {
        "stem", "layers.0.conv1", "layers.1.conv1", "layers.2.conv1"
    }  # fmt: skip
    assert {*ours(optimized)} == {*activations(optimized), "layers.1.downsample.0"}
    assert type(optimized.get_submodule("layers.0.conv2")) is nn.Conv2d
    assert not any(isinstance(one, nn.BatchNorm2d) for one in optimized.modules())


def test_folding_alone_may_gain(model: ResNet, clock: Clock) -> None:
    clock.gains = lambda call: times(1, 2)
    optimized = fused(model, EXAMPLE)
    assert isinstance(optimized, torch.fx.GraphModule)
    assert ours(optimized) == []
    assert (report(optimized).exchanged, report(optimized).folded) == ((), 7)


def test_a_fused_model_that_is_not_faster(model: ResNet, clock: Clock) -> None:
    clock.whole = times(10, 11)
    optimized = fused(model, EXAMPLE)
    assert type(optimized) is ResNet
    assert ours(optimized) == []
    assert not report(optimized).fused


def test_a_model_that_is_faster_unfused(model: ResNet, clock: Clock) -> None:
    clock.wholes = [times(10, 11)]
    optimized = fused(model, EXAMPLE)
    assert type(optimized) is ResNet
    assert len(ours(optimized)) == 8
    found = report(optimized)
    assert (found.fused, found.folded, found.after_ms) == (False, 0, 8.0)
    assert found.notes == ("not fused: the model as a whole is not faster when fused",)


@pytest.mark.parametrize(
    ("follower", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU6(), "relu6"),
        (nn.LeakyReLU(0.2), ("leaky_relu", 0.2)),
        (nn.SiLU(inplace=True), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.Hardswish(), "hardswish"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Tanh(), "tanh"),
        (F.relu, "relu"),
        (lambda x: F.relu(x, inplace=True), "relu"),
        (torch.relu, "relu"),
        (F.relu6, "relu6"),
        (F.leaky_relu, ("leaky_relu", 0.01)),
        (lambda x: F.leaky_relu(x, 0.3, True), ("leaky_relu", 0.3)),
        (lambda x: F.leaky_relu(x, negative_slope=0.3), ("leaky_relu", 0.3)),
        (F.silu, "silu"),
        (F.gelu, "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (F.hardswish, "hardswish"),
        (torch.sigmoid, "sigmoid"),
        (torch.tanh, "tanh"),
        (lambda x: x.relu(), "relu"),
        (lambda x: x.relu_(), "relu"),
        (lambda x: x.sigmoid(), "sigmoid"),
        (lambda x: x.tanh(), "tanh"),
        (nn.Identity(), None),
        (nn.PReLU(), None),
        (F.softplus, None),
        (lambda x: x.abs(), None),
    ],
)
def test_activations(follower: Callable[[Tensor], Tensor], name: Any) -> None:
    optimized = fused(Followed(follower), EXAMPLE)
    assert activations(optimized) == ({} if name is None else {"layer": name})


@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_every_kind(kind: str) -> None:
    for follower, name in (
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.LeakyReLU(0.2), ("leaky_relu", 0.2)),
    ):
        optimized = fused(Followed(follower, norm=True, kind=kind), KINDS[kind])
        assert activations(optimized) == {"layer": name}
        assert type(optimized.layer) is getattr(fastconv, f"Fused{kind}")
        assert report(optimized).folded == 1
        assert f"{kind} " in str(report(optimized))


class Added(Followed):
    def forward(self, x: Tensor) -> Tensor:
        return self.follower(self.layer(x), x)


@pytest.mark.parametrize(
    ("follower", "fuses"),
    [
        (lambda out, x: out + x, True),
        (lambda out, x: x + out, True),
        (lambda out, x: torch.add(x, out), True),
        (lambda out, x: out.add(x), True),
        (lambda out, x: out.add_(x), True),
        (lambda out, x: torch.add(out, x, alpha=2), False),
        (lambda out, x: out + x.mean(-1, keepdim=True), False),  # broadcast
        (lambda out, x: out + 1, False),
        (lambda out, x: out + out, False),
        (lambda out, x: out + x.double(), False),
        (lambda out, x: out - x, False),
        (lambda out, x: (x * 2).add_(out), False),  # others may read what is written
        (lambda out, x: out + (x * 2).relu_(), False),  # the layer would move behind a writer
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_additions(follower: Callable[..., Tensor], fuses: bool, kind: str, clock: Clock) -> None:
    optimized = fused(Added(follower, kind=kind), KINDS[kind])
    assert (activations(optimized) == {"layer": None}) == fuses
    assert any(call.residual for call in clock.seen) == fuses


def test_two_layers_that_are_added() -> None:
    """The addition is fused with one of them; the BatchNorms are folded into both."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.first(x) + self.second(x))

    assert activations(fused(Both(), EXAMPLE)) == {"first.0": "relu"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_read_twice_is_not_fused(kind: str) -> None:
    optimized = fused(Followed(lambda out: out.relu() + out.sum(), kind=kind), KINDS[kind])
    assert activations(optimized) == {}
    optimized = fused(Followed(lambda out: out.relu() * out, norm=True, kind=kind), KINDS[kind])
    assert activations(optimized) == {}
    assert ours(optimized) == ["layer"]
    assert report(optimized).folded == 1  # the BatchNorm alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_in_training_mode_is_not_folded(kind: str) -> None:
    model = Followed(torch.relu, norm=True, kind=kind).eval()
    model.norm.train()
    before = copy.deepcopy(model.norm.state_dict())
    with torch.no_grad():
        optimized = fastconv.optimize(model, KINDS[kind])
    assert "no convolution is followed by anything that can be fused" in str(report(optimized))
    assert ours(optimized) == ["layer"]
    assert optimized.norm.training
    for name, value in optimized.norm.state_dict().items():
        assert value.equal(before[name])


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_folding(affine: bool, dtype: torch.dtype, kind: str) -> None:
    model = Followed(torch.relu, norm=True, kind=kind).to(dtype).eval()
    model.norm = norm_for(kind, 3, affine=affine, dtype=dtype).eval()
    example = KINDS[kind].to(dtype)
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        optimized = fastconv.optimize(model, example)
        assert activations(optimized) == {"layer": "relu"}
        expected = model(example)
        found = optimized(example)
    assert optimized.layer.weight.dtype == dtype
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]


def test_arguments_by_name_and_default() -> None:
    class Takes(Followed):
        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
            out = super().forward(x)
            return out * scale if mask is None else out * mask

    for named in ({}, {"scale": 3.0}, {"mask": torch.rand(10, 10)}):
        optimized = fused(Takes(torch.relu), EXAMPLE, **named)
        assert activations(optimized) == {"layer": "relu"}
    optimized = fused(Takes(torch.relu), x=EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}


def test_tensors_that_a_model_keeps_are_neither_fake_nor_proxies() -> None:
    class Keeps(Followed):
        grid: Tensor | None = None
        seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.grid is None:
                self.grid = torch.ones(10, 10)
            self.seen = x * self.grid
            return super().forward(self.seen)

    model = Keeps(torch.relu)
    optimized = fused(model, EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}
    assert type(model.seen) is Tensor
    with torch.no_grad():
        again = fastconv.optimize(model, EXAMPLE, fuse=False)
    assert type(again.grid) is type(again.seen) is Tensor


def test_fused_in_inference_mode(model: ResNet) -> None:
    model.eval()
    with torch.inference_mode():
        optimized = fastconv.optimize(model, EXAMPLE)
        expected = model(EXAMPLE)
    assert len(activations(optimized)) == 7
    with torch.no_grad():  # it works outside of inference mode, too
        torch.testing.assert_close(optimized(EXAMPLE), expected, rtol=1e-4, atol=1e-4)
    assert not any(parameter.is_inference() for parameter in optimized.parameters())


@pytest.mark.usefixtures("_inference")
def test_fused_under_autocast(model: ResNet, clock: Clock) -> None:
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        optimized = fastconv.optimize(model, EXAMPLE)
        found, expected = optimized(EXAMPLE), model(EXAMPLE)
    assert activations(optimized)["layers.0.conv2"] == "relu"
    assert {call.residual.dtype for call in clock.seen if call.residual} == {torch.bfloat16}
    assert found.dtype == expected.dtype
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_no_fake_tensor_stays_in_the_cache_of_autocast(model: ResNet, clock: Clock) -> None:
    """Within one context of autocast, PyTorch keeps each weight that it has cast."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(2):  # the second time uses stored times
            assert type(fastconv.optimize(model, EXAMPLE)(EXAMPLE)) is Tensor
            assert type(model(EXAMPLE)) is Tensor


def test_constants_that_are_made_in_forward() -> None:
    class Constants(Followed):
        def forward(self, x: Tensor) -> Tensor:
            shift = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
            return super().forward(x - shift) * torch.arange(10, device=x.device)

    model = Constants(torch.relu)
    optimized = fused(model, EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}
    assert not any("constant" in name for name in vars(model))
    other = torch.randn(4, 3, 10, 10)
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        torch.testing.assert_close(one(other), model(other), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_inference")
def test_a_fused_layer_says_so() -> None:
    optimized = fastconv.optimize(Followed(nn.LeakyReLU(0.2)).eval(), EXAMPLE)
    assert repr(optimized.layer).endswith("padding=(1, 1), activation=('leaky_relu', 0.2))")


class UpAndDown(nn.Module):
    """A network with layers that are fastconv's already."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose3d(4, 4, (1, 2, 2), stride=(1, 2, 2))
        self.ours = fastconv.ConvTranspose2d(4, 3, 2, stride=2)
        self.along = fastconv.Conv1d(3, 2, 3, padding=((2, 0),))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.norm(self.conv(x)))[:, :, None])[:, :, 0]
        return self.along(self.ours(x).relu().flatten(2))


def test_layers_that_nothing_is_fused_into() -> None:
    model = UpAndDown().eval()
    expected = model(EXAMPLE)
    optimized = fused(model, EXAMPLE)
    assert activations(optimized) == {"conv": "relu"}
    assert type(optimized.up) is fastconv.ConvTranspose3d
    assert type(optimized.ours) is fastconv.ConvTranspose2d
    assert type(optimized.along) is fastconv.Conv1d
    torch.testing.assert_close(optimized(EXAMPLE), expected, rtol=1e-4, atol=1e-4)
