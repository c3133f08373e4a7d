"""Models that ``optimize`` must not fuse: their graphs would compute something else."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from fastconv.fused import FusedConv2d
from network.helpers import (
    EXAMPLE,
    KINDS,
    NAMES,
    Followed,
    ResNet,
    activations,
    fused,
    not_fused,
    ours,
    report,
)

pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_called_twice_is_not_fused(kind: str) -> None:
    class Twice(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).relu()).relu()

    optimized = fused(Twice(torch.relu, kind=kind), KINDS[kind])
    assert activations(optimized) == {}
    assert ours(optimized) == ["layer"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_whose_weight_is_read_is_not_fused(kind: str) -> None:
    class Reads(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.layer.weight.sum()

    assert activations(fused(Reads(torch.relu, norm=True, kind=kind), KINDS[kind])) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_hooks_are_not_fused(kind: str) -> None:
    ran: list[str] = []
    example = KINDS[kind]
    model = nn.Sequential(*(Followed(torch.relu, norm, kind) for norm in (False, True, False)))
    model[0].layer.register_forward_hook(lambda *_: ran.append("layer"))
    model[1].norm.register_forward_hook(lambda *_: ran.append("norm"))
    model[2].register_forward_hook(lambda *_: ran.append("container"))
    optimized = fused(model, example)
    assert activations(optimized) == {}
    model[2]._forward_hooks.clear()
    optimized = fused(model, example)
    assert activations(optimized) == {"2.layer": "relu"}
    assert ours(optimized) == ["0.layer", "1.layer", "2.layer"]
    ran.clear()
    optimized(example)
    assert ran == ["layer", "norm"]


def test_layers_of_an_untraceable_model_are_exchanged() -> None:
    class Branches(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[0] > 0 and bool(x.shape[1] > 2) else x

    optimized = fused(Branches(torch.relu), EXAMPLE)
    assert type(optimized) is Branches
    assert ours(optimized) == ["layer"]
    assert "not fused: torch.fx cannot trace the model: " in str(report(optimized))


class _First(Followed):
    """Subtracts the input of its first call."""

    first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.clone()
        return super().forward(x - self.first)


class _Average(Followed):
    """Takes the mean of its input and the one before: with one example, that is the example."""

    def __init__(self, follower: Callable[..., Tensor]) -> None:
        super().__init__(follower)
        self.given: deque[Tensor] = deque(maxlen=1)
        self.given.append(EXAMPLE)

    def forward(self, x: Tensor) -> Tensor:
        mean = (self.given[0] + x) / 2
        self.given.append(x.clone())
        return super().forward(mean)


class _Counts(Followed):
    """Gives other results from its hundredth call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 100 else 2.0)


class _Grows(Followed):
    def __init__(self, follower: Callable[..., Tensor]) -> None:
        super().__init__(follower)
        self.sizes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(x.shape)
        return super().forward(x) * (1.0 if len(self.sizes) < 100 else 2.0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_First, "called once more, with other numbers, its graph's results are"),
        (_Average, "the model's results differ from call to call"),
        (_Counts, r"each call of the model changes model\.calls"),
        (_Grows, r"each call of the model changes model\.sizes"),
    ],
)
@pytest.mark.parametrize("images", [EXAMPLE, EXAMPLE[:1], torch.zeros_like(EXAMPLE)])
def test_a_model_that_depends_on_earlier_calls_is_not_fused(
    kind: type[Followed], why: str, images: Tensor
) -> None:
    model = kind(torch.relu).eval()
    if isinstance(model, _Average):
        model.given.append(images)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        optimized = fastconv.optimize(model, images)
        assert type(optimized) is kind
        assert re.search(why, str(report(optimized)))
        for one in (images, images * 2 + 1):
            torch.testing.assert_close(optimized(one), twin(one), rtol=1e-4, atol=1e-4)


def test_global_hooks_and_forwards_of_instances() -> None:
    """They run for each module, so no module may become part of another."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    try:
        assert "global hooks of modules are registered" in not_fused(model, EXAMPLE)
    finally:
        handle.remove()
    forward = model[2].forward
    model[2].forward = lambda x: forward(x)  # type: ignore[method-assign]
    optimized = fused(model, EXAMPLE)
    assert report(optimized).folded == 1
    assert not activations(optimized)


def test_not_fused_where_gradients_are_recorded(model: ResNet) -> None:
    optimized = fastconv.optimize(model.eval(), EXAMPLE)
    assert activations(optimized) == {}
    assert "gradients are recorded; for inference, optimize within torch.no_grad()" in str(
        report(optimized)
    )


def test_not_fused_where_only_gradients_of_a_norm_are_recorded() -> None:
    """Folded into weights, its parameters would get no gradients."""
    model = Followed(torch.relu, norm=True).eval()
    model.layer.requires_grad_(False)
    optimized = fastconv.optimize(model, EXAMPLE)
    assert report(optimized).folded == 0
    optimized(EXAMPLE).sum().backward()
    assert optimized.norm.weight.grad is not None


@pytest.mark.usefixtures("_inference")
def test_not_fused_where_it_is_not_wanted(model: ResNet) -> None:
    model.eval()
    assert activations(fastconv.optimize(model, EXAMPLE, fuse=False)) == {}
    assert activations(fastconv.optimize(model, EXAMPLE, inplace=True)) == {}
    assert ours(model) == NAMES


class Within(Followed):
    """A layer, and another one behind it that is called within a context."""

    def __init__(self, context: Callable[[], Any], all_of_it: bool = False) -> None:
        super().__init__(torch.relu)
        self.last = nn.Conv2d(3, 3, 1)
        self.context, self.all_of_it = context, all_of_it

    def forward(self, x: Tensor) -> Tensor:
        if self.all_of_it:
            with self.context():
                return self.last(super().forward(x).float()).float()
        x = super().forward(x).float()
        with self.context():
            return self.last(x).float()


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize(
    ("context", "name"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
        (lambda: fastconv.precision("ieee"), "fastconv.precision"),
        (torch.enable_grad, "whether gradients are recorded"),
        (torch.inference_mode, "inference mode"),
        (lambda: torch.backends.cudnn.flags(enabled=False), "torch.backends.cudnn"),
        (lambda: torch.backends.mkldnn.flags(enabled=False), "torch.backends.mkldnn"),
        (fastconv.frozen_weights, "fastconv.frozen_weights"),
        (lambda: torch.device("cpu"), "a function mode"),
    ],
)
@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_model_that_sets_a_context_itself_is_not_fused(
    context: Callable[[], Any], name: str, all_of_it: bool
) -> None:
    model = Within(context, all_of_it).eval()
    optimized = fastconv.optimize(model, EXAMPLE)
    assert f"not fused: the model sets {name} itself" in str(report(optimized))
    assert ours(optimized) == ["layer", "last"]
    assert optimized(EXAMPLE).dtype == model(EXAMPLE).dtype


@pytest.mark.usefixtures("_inference")
def test_a_linear_without_autocast_is_not_fused_with_it() -> None:
    """No convolution is within the context, so their calls do not show it."""

    class Head(Followed):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.linear = nn.Linear(10, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())

    model = Head().eval()
    with torch.autocast("cpu", torch.bfloat16):
        optimized = fastconv.optimize(model, EXAMPLE)
        assert optimized(EXAMPLE).dtype == model(EXAMPLE).dtype == torch.float32
    assert "not fused: the model sets autocast itself" in str(report(optimized))


@pytest.mark.usefixtures("_inference")
def test_a_context_that_changes_nothing_does_not_prevent_fusion() -> None:
    optimized = fastconv.optimize(Within(torch.no_grad, all_of_it=True).eval(), EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}


@torch.library.custom_op("fastconv_tests::grow", mutates_args={"x"})
def grow(x: Tensor) -> None:
    x.mul_(1.001)


@grow.register_fake
def _(x: Tensor) -> None:
    return None


@torch.fx.wrap
def grown(x: Tensor) -> Tensor:
    """A function that torch.fx records as one node."""
    x.mul_(1.001)
    return x


@torch.fx.wrap
def grown_elsewhere(x: Tensor) -> Tensor:
    made = x.clone()
    made.mul_(1.001)
    return made


class Writes(Followed):
    """The layer reads ``x`` before something writes to it; their results are added."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        out = self.layer(x)
        return out + self.follower(x)


@pytest.mark.parametrize(
    ("writer", "fuses"),
    [
        (lambda x: (torch.ops.fastconv_tests.grow(x), x)[1], False),
        (lambda x: torch.ops.aten.mul_.Tensor(x, 1.001), False),
        (lambda x: grown(x), False),
        (lambda x: torch.mul(x, 1.001, out=x), False),
        (lambda x: x.detach().mul_(1.001), False),
        (lambda x: F.hardtanh(x, -2.5, 2.5, inplace=True), False),
        (nn.ReLU(inplace=True), False),
        (lambda x: grown_elsewhere(x), True),
        (lambda x: F.interpolate(x, size=(10, 10)), True),
        (lambda x: F.pad(x, (0, 0)), True),
        (lambda x: x.amax((2, 3), True).expand(2, 3, 10, 10), True),
    ],
)
def test_a_layer_does_not_move_past_a_writer(
    writer: Callable[[Tensor], Tensor], fuses: bool
) -> None:
    """The writers change so little that a comparison of results might not show it."""
    optimized = fused(Writes(writer), EXAMPLE)
    assert any(isinstance(one, FusedConv2d) for one in optimized.modules()) == fuses
    reason = "not fused: no convolution is followed by anything that can be fused with it"
    assert (reason in report(optimized).notes) != fuses  # not a comparison


class OwnStatistics(Followed):
    """Writes to the statistics of its BatchNorm."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(torch.relu, norm=True)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.norm, x)
        return super().forward(x)


def _replace(norm: Any, x: Tensor) -> None:
    norm.running_mean = norm.running_mean.clone()


def _train(norm: Any, x: Tensor) -> None:
    F.batch_norm(x.detach(), norm.running_mean, norm.running_var, training=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda norm, x: norm.running_mean.mul_(1.0),  # the numbers stay the same
        lambda norm, x: norm.running_mean.data.copy_(norm.running_mean),
        lambda norm, x: norm.running_mean.lerp_(x.mean((0, 2, 3)), 0.0),
        lambda norm, x: norm.running_var[:1].fill_(1.0),
        _replace,
        _train,
    ],
)
def test_a_norm_that_the_model_writes_to_is_not_folded(write: Callable[..., Any]) -> None:
    model = OwnStatistics(write).eval()
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE)
        assert report(optimized).folded == 0
        for _ in range(2):
            torch.testing.assert_close(optimized(EXAMPLE), model(EXAMPLE))


def test_a_buffer_that_a_graph_would_not_write() -> None:
    class Counted(Followed):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x)

    assert "its graph gives the keys" in not_fused(Counted(), EXAMPLE)
