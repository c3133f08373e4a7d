"""Snapshots: whatever a call of a model changes is put back."""

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

from fastconv.network.snapshot import Snapshot, same_random_numbers


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _snapshot_of(model: nn.Module) -> Snapshot:
    """A snapshot of the model, the numbers of its tensors included."""
    snapshot = Snapshot(values=True)
    snapshot.record({"model": model})
    return snapshot


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
    snapshot = _snapshot_of(model)
    assert not snapshot.changed_tensors()
    with torch.no_grad():
        change(model.value)
    assert snapshot.changed_tensors()
    same = model.value
    snapshot.put_back()
    assert model.value is same
    assert repr(model.value) == expected
    assert not snapshot.changed_tensors()


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
    snapshot, same = _snapshot_of(model), model.value
    change(model.value)
    assert model.value != make()
    snapshot.put_back()
    assert model.value is same
    assert model.value == make()
    assert list(model.value) == list(make())


def test_attributes_layers_and_objects() -> None:
    class Meter:
        def __init__(self) -> None:
            self.count, self.seen = 0, []

    model = nn.Sequential(Holder(Meter()), nn.BatchNorm2d(3))
    snapshot = _snapshot_of(model)
    model[0].value.count += 1
    model[0].value.seen.append(3)
    model[0].other = 3
    model.add_module("more", nn.Linear(2, 2))
    model[1].running_mean = torch.ones(3)
    model.eval()
    model[1].train()(torch.randn(2, 3, 4, 4))
    del model[1].affine
    snapshot.put_back()
    assert (model[0].value.count, model[0].value.seen) == (0, [])
    assert not hasattr(model[0], "other")
    assert [name for name, _ in model.named_children()] == ["0", "1"]
    assert model[1].running_mean.equal(torch.zeros(3))
    assert model.training
    assert model[1].affine


def test_numbers_of_far_tensors_are_not_recorded() -> None:
    """Such as those of a trainer, which has all the data."""

    class Data:
        def __init__(self) -> None:
            self.images = torch.zeros(3)

    class Trainer:
        def __init__(self) -> None:
            self.data = Data()

    model = Holder(Trainer())
    snapshot = _snapshot_of(model)
    model.value.data.images.add_(1)
    assert not snapshot.changed_tensors()
    snapshot.put_back()
    assert model.value.data.images.equal(torch.ones(3))


def test_unchanged_tensors_are_not_written() -> None:
    """If they were, autograd would refuse to use those that it saved for a backward pass."""
    model = nn.BatchNorm2d(3)
    versions = [one._version for one in (*model.parameters(), *model.buffers())]
    snapshot = _snapshot_of(model)
    snapshot.put_back()
    assert [one._version for one in (*model.parameters(), *model.buffers())] == versions
    model.running_mean.data.add_(1)
    snapshot.put_back()
    assert model.running_mean._version > versions[2]


def test_overridden_methods_of_containers_are_not_called() -> None:
    class Stubborn(dict[str, int]):
        def clear(self) -> None:
            raise ValueError("not this one")

    model = Holder(Stubborn(a=1))
    snapshot = _snapshot_of(model)
    model.value["b"] = 2
    snapshot.put_back()
    assert model.value == {"a": 1}


def test_a_failure_to_put_back_one_object_does_not_stop_others() -> None:
    class Slotted:
        __slots__ = ("kept",)

    model = nn.Sequential(Holder(Slotted()), Holder([1]))
    snapshot = _snapshot_of(model)
    # The slots of its former class do not accept it.
    model[0].value.__class__ = type("Other", (), {"__slots__": ("kept",)})
    model[1].value.append(2)
    with pytest.raises(RuntimeError, match="the model is not as it was: "):
        snapshot.put_back()
    assert model[1].value == [1]


def test_autograd_state_of_a_tensor() -> None:
    """A leaf that was written to under autograd becomes a leaf again, with its numbers."""
    model, weight = Holder(torch.zeros(3)), torch.ones(3, requires_grad=True)
    snapshot = _snapshot_of(model)
    model.value.add_(weight)
    assert model.value.requires_grad
    snapshot.put_back()
    assert not model.value.requires_grad
    assert model.value.grad_fn is None
    assert model.value.equal(torch.zeros(3))


def test_a_view_of_a_tensor_that_was_written_to() -> None:
    """Autograd gives the view another node, which does not count as a change of the view."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, 2))
    model.row = model.weight[0]
    snapshot = _snapshot_of(model)
    with torch.no_grad():
        model.weight.add_(1)
    snapshot.put_back()
    assert model.row.equal(torch.zeros(2))


class _Shared:
    def __init__(self) -> None:
        self.lock, self.found = threading.Lock(), dict[str, Any]()


def test_shared_objects_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded however much else a model leads to."""
    monkeypatch.setattr("fastconv.network.snapshot.LIMIT", 200)
    model: Any = nn.Module()
    model.objects = [_Shared()]
    many = [[number] for number in range(1000)]
    model.keep = lambda: many
    snapshot, kept = Snapshot(), object()
    snapshot.record({"model": model})
    model.objects[0].found["x"] = kept
    snapshot.put_back(lambda one: one is kept)
    assert model.objects[0].found == {}


def test_random_numbers() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with same_random_numbers():
        first = draw()
    assert draw() == first
    seeded = []
    for _ in range(2):
        with same_random_numbers(seed=3):
            seeded.append(draw())
    assert seeded[0] == seeded[1] != first
