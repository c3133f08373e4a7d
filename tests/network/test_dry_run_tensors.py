"""A dry run changes no parameter, no buffer and no other tensor. A CPU stands in for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations

import fastconv
from fastconv.network.records import Contents
from network.dry_runs import EXAMPLE, Backbone, check_entries, make_layer, no_fakes, prepare_twice

pytestmark = pytest.mark.usefixtures("loads", "fakes_of_others")


def _scripted() -> nn.Module:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.register_buffer("latest", torch.zeros(2))
            self.count = 0
            self.sizes = [1]

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.sizes.append(x.size(0))
            x = self.norm(self.layer(x))
            self.latest = x
            return x

    return torch.jit.script(Scripted())


def _recurrent() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.cell = make_layer(), nn.LSTM(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(self.layer(x).flatten(0, 2))[0]

    return Recurrent()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "aliased": Backbone,
    "registered twice": lambda: nn.Sequential(*([make_layer()] + 2 * [nn.Conv2d(4, 4, 3)])),
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(make_layer())),
    "spectral": lambda: nn.Sequential(parametrizations.spectral_norm(make_layer())),
    "weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(make_layer())),
    "old spectral": lambda: nn.Sequential(nn.utils.spectral_norm(make_layer())),
    "scripted": lambda: nn.Sequential(make_layer(), _scripted()),
    "traced": lambda: nn.Sequential(
        make_layer(), torch.jit.trace(nn.Sequential(nn.BatchNorm2d(4)), torch.ones(2, 4, 8, 8))
    ),
    "recurrent": _recurrent,
    "parameter list": lambda: _OfList(),
}


class _OfList(nn.Module):
    """Has parameters in a list of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 3, 3, 3)) for _ in range(2)])
        self.plain = [*self.weights]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.plain
        return fastconv.conv2d(x, first) + fastconv.conv2d(x, self.weights[1]) * second.sum()


@pytest.mark.filterwarnings("ignore")  # deprecations, and notes of torch.jit.trace
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by", ["prepare", "function", "preparing"])
def test_weights_are_what_they_were(name: str, by: str) -> None:
    model = MODELS[name]()

    def call() -> None:
        if by == "prepare":
            prepare_twice(model)
        elif by == "function":
            prepare_twice(lambda x: model(x))
        else:
            with fastconv.preparing():
                model(EXAMPLE).sum().backward()

    check_entries(model, call)
    with torch.no_grad():
        assert type(model(EXAMPLE)) is Tensor


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "of 4 bits": lambda: torch.empty(3, dtype=torch.uint4),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_another_kind(name: str) -> None:
    """Some have no fake form: they stay as they are, and the model does not use them."""
    model = nn.Sequential(make_layer())
    buffer = BUFFERS[name]()
    model.register_buffer("other", buffer)
    prepare_twice(model)
    assert model.other is buffer
    no_fakes()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_an_example_without_a_fake_form() -> None:
    example = torch.quantize_per_tensor(EXAMPLE, 0.1, 0, torch.qint8)
    model = make_layer()
    with pytest.raises(RuntimeError, match="cannot prepare the model, as it cannot be called with"):
        fastconv.prepare(lambda x: model(x.dequantize()), example)


def test_wrapped_models() -> None:
    """``DataParallel`` calls a model in its own way, and ``torch.func`` wraps its tensors."""
    model = nn.Sequential(make_layer())
    check_entries(model, lambda: prepare_twice(nn.DataParallel(model)))

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: model(x).sum())(x)

    check_entries(model, lambda: prepare_twice(gradient))


def test_tied_parameters_are_tied() -> None:
    """They stay the same tensor while the model is called, so they have one gradient."""

    class Tied(Backbone):
        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.again.weight, FakeTensor)
            assert isinstance(self.again.weight, nn.Parameter)
            assert self.again.weight is self.backbone[2].weight
            assert self.mean is self.norm.running_mean
            return super().forward(x)

    prepare_twice(Tied())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_errors_in_a_dry_run(error: type[BaseException]) -> None:
    class Fails(Backbone):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            if self.fails:
                raise error
            return self.kept

    model = Fails()

    def call() -> None:
        with pytest.raises(RuntimeError if error is ValueError else error):
            fastconv.prepare(model, EXAMPLE)

    check_entries(model, call)
    assert "kept" not in vars(model)


def test_an_interrupt_while_state_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised when all is put back."""
    interrupts = [KeyboardInterrupt, KeyboardInterrupt]
    put_back = Contents.put_back

    def interrupted(note: Any) -> None:
        if interrupts:
            note._base.clear(note._of)
            raise interrupts.pop()
        put_back(note)

    monkeypatch.setattr(Contents, "put_back", interrupted)
    model = Backbone()

    def call() -> None:
        with pytest.raises(KeyboardInterrupt):
            fastconv.prepare(model, EXAMPLE)

    check_entries(model, call)
    assert not interrupts


def test_parameters_without_sizes() -> None:
    model = nn.Sequential(make_layer(), nn.LazyConv2d(4, 3))
    for of in (model, lambda x: model(x)):
        with pytest.raises(RuntimeError, match=r"no sizes yet \(LazyConv2d.weight\): call it once"):
            fastconv.prepare(of, EXAMPLE)
    assert type(model[1]) is nn.LazyConv2d
    assert model[1].has_uninitialized_params()
    assert model(EXAMPLE).shape == (2, 4, 6, 6)


def test_gradients_and_hooks_of_parameters() -> None:
    model, calls = Backbone(), []
    model(EXAMPLE).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    copies = [grad.clone() for grad in grads if grad is not None]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    fastconv.prepare(model, EXAMPLE)
    assert not calls  # an optimizer in such a hook would have made a step
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(map(torch.equal, copies, (grad for grad in grads if grad is not None)))


def test_tensors_from_outside() -> None:
    """What a function does to them in place, or to their autograd state, is undone."""
    weight, memory = torch.randn(4, 3, 3, 3, requires_grad=True), torch.zeros(2, 4, 8, 8)
    moved, kept = torch.ones(3), (weight * 2)
    kept.retain_grad()
    versions = memory.clone(), moved.clone()

    def function(x: Tensor) -> Tensor:
        memory.add_(fastconv.conv2d(x, weight))  # which makes it require a gradient
        moved.data = torch.zeros(7)
        moved.requires_grad_()
        return memory * 2 + kept.sum()

    fastconv.prepare(function, EXAMPLE)
    assert not memory.requires_grad
    assert memory.grad_fn is None
    assert not moved.requires_grad
    assert torch.equal(memory, versions[0])
    assert torch.equal(moved, versions[1])
    assert kept.grad is None
    assert weight.grad is None
    no_fakes()


def test_tensors_saved_for_a_backward_pass_stay_valid() -> None:
    """Nothing was written to them, and their version counters say so."""
    layer, scale = make_layer(), torch.ones(())
    weight = torch.ones((), requires_grad=True)
    output = weight * scale
    prepare_twice(lambda x: layer(x) * scale.add_(1))
    output.backward()
    assert weight.grad == 1


def test_a_change_of_an_autograd_graph_is_an_error() -> None:
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    features = weight * 1
    with pytest.raises(RuntimeError, match=r"\[4, 3, 3, 3\].*changed in place"):
        fastconv.prepare(lambda x: fastconv.conv2d(x, features.mul_(2)), EXAMPLE)


def test_another_mode() -> None:
    """Fake tensors of the user's own mode do not count as left behind."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        example = torch.empty(2, 3, 10, 10)
        model = Backbone()
        fastconv.prepare(model, example)
    fastconv.prepare(model, example)
    assert all(isinstance(one, FakeTensor) for one in model.parameters())
    assert all(one.grad is None for one in model.parameters())
