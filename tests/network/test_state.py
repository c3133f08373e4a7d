"""What a model's calls change is put back."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastconv.network import state
from fastconv.network.state import State


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _noted(model: nn.Module) -> State:
    """The model's state, its tensors' values included."""
    noted = State(values=True)
    noted.take({"model": model})
    return noted


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.quint8)


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


def _in_inference_mode(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.add_(1)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: torch.zeros(3), lambda one: one.add_(1)),
        (lambda: torch.zeros(4)[::2], lambda one: one.add_(1)),
        (lambda: torch.full((2,), float("nan")), lambda one: one.zero_()),
        (lambda: torch.zeros(2), lambda one: one.neg_()),  # the sign of zero
        (lambda: torch.zeros(2, dtype=torch.complex64), lambda one: one.add_(1j)),
        (lambda: torch.zeros(1).expand(4), lambda one: one[:1].add_(1)),
        (lambda: torch.zeros(3), lambda one: one.resize_(5).fill_(1)),
        (lambda: nn.Parameter(torch.zeros(3)), lambda one: one.data.add_(1)),
        (lambda: nn.Parameter(torch.zeros(3)), lambda one: setattr(one, "data", torch.ones(4))),
        (lambda: torch.eye(3).to_sparse(), lambda one: one.mul_(2)),
        (lambda: torch.eye(3).to_sparse_csr(), lambda one: one.mul_(2)),
        (_quantized, lambda one: one.copy_(torch.ones(3))),
        (_inference_tensor, _in_inference_mode),
        (lambda: [torch.zeros(2)], lambda one: one[0].add_(1)),
        (lambda: ({"a": torch.zeros(2)},), lambda one: one[0]["a"].add_(1)),
    ],
)
def test_tensors(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    model = Holder(make())
    expected = repr(make())
    noted = _noted(model)
    assert not noted.changed()
    with torch.no_grad():
        change(model.value)
    assert noted.changed()
    same = model.value
    noted.put_back()
    assert model.value is same
    assert repr(model.value) == expected
    assert not noted.changed()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], lambda one: one.append(3)),
        (lambda: [1, 2], lambda one: one.reverse()),
        (lambda: {"a": 1}, lambda one: one.update(a=2, b=3)),
        (lambda: OrderedDict(a=1, b=2), lambda one: one.move_to_end("a")),
        (lambda: defaultdict(list, a=[1]), lambda one: (one["b"], one["a"].append(2))),
        (lambda: {1, 2}, lambda one: one.pop()),
        (lambda: deque([1, 2], 2), lambda one: one.append(3)),
        (lambda: ([1], 2), lambda one: one[0].clear()),
    ],
)
def test_containers(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    model = Holder(make())
    noted, same = _noted(model), model.value
    change(model.value)
    assert model.value != make()
    noted.put_back()
    assert model.value is same
    assert model.value == make()
    assert list(model.value) == list(make())


def test_attributes_layers_and_objects() -> None:
    class Meter:
        def __init__(self) -> None:
            self.count, self.seen = 0, []

    model = nn.Sequential(Holder(Meter()), nn.BatchNorm2d(3))
    noted = _noted(model)
    model[0].value.count += 1
    model[0].value.seen.append(3)
    model[0].other = 3
    model.add_module("more", nn.Linear(2, 2))
    model[1].running_mean = torch.ones(3)
    model.eval()
    model[1].train()(torch.randn(2, 3, 4, 4))
    del model[1].affine
    noted.put_back()
    assert (model[0].value.count, model[0].value.seen) == (0, [])
    assert not hasattr(model[0], "other")
    assert [name for name, _ in model.named_children()] == ["0", "1"]
    assert model[1].running_mean.equal(torch.zeros(3))
    assert model.training
    assert model[1].affine


def test_what_objects_have_is_not_followed_for_ever() -> None:
    """A trainer, say, which has all the data."""

    class Data:
        def __init__(self) -> None:
            self.images = torch.zeros(3)

    class Trainer:
        def __init__(self) -> None:
            self.data = Data()

    model = Holder(Trainer())
    noted = _noted(model)
    model.value.data.images.add_(1)
    assert not noted.changed()
    noted.put_back()
    assert model.value.data.images.equal(torch.ones(3))


def test_what_did_not_change_is_not_written() -> None:
    """Who has saved a tensor for a backward pass would be told that it has changed."""
    model = nn.BatchNorm2d(3)
    versions = [one._version for one in (*model.parameters(), *model.buffers())]
    noted = _noted(model)
    noted.put_back()
    assert [one._version for one in (*model.parameters(), *model.buffers())] == versions
    model.running_mean.data.add_(1)
    noted.put_back()
    assert model.running_mean._version > versions[2]  # and what did is told


def test_methods_of_a_container_s_class_are_not_called() -> None:
    class Stubborn(dict[str, int]):
        def clear(self) -> None:
            raise ValueError("not this one")

    model = Holder(Stubborn(a=1))
    noted = _noted(model)
    model.value["b"] = 2
    noted.put_back()
    assert model.value == {"a": 1}


def test_what_cannot_be_put_back_does_not_keep_the_rest_from_it() -> None:
    class Slotted:
        __slots__ = ("kept",)

    model = nn.Sequential(Holder(Slotted()), Holder([1]))
    noted = _noted(model)
    # Descriptors of the class that it had do not take it.
    model[0].value.__class__ = type("Other", (), {"__slots__": ("kept",)})
    model[1].value.append(2)
    with pytest.raises(RuntimeError, match="the model is not as it was: "):
        noted.put_back()
    assert model[1].value == [1]


def test_what_autograd_knows_of_a_tensor() -> None:
    """A leaf that was written to with gradients is one again, with its numbers."""
    model, weight = Holder(torch.zeros(3)), torch.ones(3, requires_grad=True)
    noted = _noted(model)
    model.value.add_(weight)
    assert model.value.requires_grad
    noted.put_back()
    assert not model.value.requires_grad
    assert model.value.grad_fn is None
    assert model.value.equal(torch.zeros(3))


def test_a_view_of_what_was_written_to() -> None:
    """Autograd gives it another node, which is no change of its own."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, 2))
    model.row = model.weight[0]
    noted = _noted(model)
    with torch.no_grad():
        model.weight.add_(1)
    noted.put_back()
    assert model.row.equal(torch.zeros(2))


class _Shared:
    def __init__(self) -> None:
        self.lock, self.found = threading.Lock(), dict[str, Any]()


def test_what_is_shared_has_room_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much else a model leads to."""
    monkeypatch.setattr(state, "LIMIT", 200)
    model: Any = nn.Module()
    model.objects = [_Shared()]
    many = [[number] for number in range(1000)]
    model.keep = lambda: many
    noted, kept = State(), object()
    noted.take({"model": model})
    model.objects[0].found["x"] = kept
    noted.put_back(lambda one: one is kept)
    assert model.objects[0].found == {}


def test_random_numbers() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with state.same_random_numbers():
        first = draw()
    assert draw() == first
    seeded = []
    for _ in range(2):
        with state.same_random_numbers(seed=3):
            seeded.append(draw())
    assert seeded[0] == seeded[1] != first
