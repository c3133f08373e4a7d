"""What ``optimize`` does with models and examples that it cannot measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastconv
from conftest import Loads
from fastconv.jit import cache
from fastconv.network import calls, preparation
from fastconv.network.calls import Call
from network.helpers import (
    EXAMPLE,
    NAMES,
    Clock,
    Followed,
    ResNet,
    ours,
    planned_once,
    report,
    times,
)

pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize("example", [(), (3,), ((8, 3, 224, 224),)])
def test_no_example(example: Any, model: ResNet) -> None:
    with pytest.raises(ValueError, match=r"takes a model and an example .*, torch\.randn"):
        fastconv.optimize(model, *example)


def test_not_on_a_gpu(model: ResNet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has to have data: it is on meta"):
        fastconv.optimize(model, EXAMPLE.to("meta"))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="but the model is on cpu: there is nothing to gain there"):
        fastconv.optimize(model, EXAMPLE)


@pytest.mark.parametrize("inplace", [True, False])
def test_without_a_gpu(inplace: bool, model: ResNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same script runs on a machine without a GPU."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = model.eval()(EXAMPLE)
    optimized = fastconv.optimize(model, EXAMPLE, inplace=inplace)
    assert (optimized is model) == inplace
    assert type(optimized) is ResNet
    assert ours(optimized) == []
    assert "there is no GPU: nothing was measured, and the model is as it was" in str(
        report(optimized)
    )
    assert optimized(EXAMPLE).equal(expected)
    assert fastconv.restore(optimized) is optimized


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("fuse", [True, False])
def test_images_without_a_batch(fuse: bool) -> None:
    model = Followed(torch.relu, norm=False).eval()
    optimized = fastconv.optimize(model, EXAMPLE[0], fuse=fuse)
    assert "3x10x10" in str(report(optimized))
    assert "float32 chw" in str(report(optimized))
    assert report(optimized).fused == fuse
    torch.testing.assert_close(optimized(EXAMPLE[0]), model(EXAMPLE[0]))


def test_an_argument_that_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not function"):
        fastconv.optimize(lambda x: x, EXAMPLE)  # type: ignore[arg-type]


def test_a_compiled_model(model: ResNet) -> None:
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        fastconv.optimize(torch.compile(model, backend="eager"), EXAMPLE)


def test_a_model_that_cannot_be_copied(model: ResNet) -> None:
    model.odd = model.head.weight * 2
    with pytest.raises(RuntimeError, match=r"cannot copy the model: .* With inplace=True"):
        fastconv.optimize(model, EXAMPLE)


def test_a_lazy_model() -> None:
    with pytest.raises(ValueError, match="has no sizes yet: call the model once before"):
        fastconv.optimize(nn.LazyConv2d(3, 1), EXAMPLE)


def test_no_convolutions(clock: Clock) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(300, 2))
    optimized = fastconv.optimize(model, EXAMPLE, inplace=True)
    assert optimized is model
    assert "no convolutions that fastconv computes: it was left as it was" in str(report(model))


@pytest.mark.parametrize("where", ["plans", "load", "clock"])
def test_a_layer_that_fails(
    where: str, model: ResNet, clock: Clock, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays PyTorch's; the others are exchanged nevertheless."""

    def fails(call: Call) -> None:
        if call.weight.shape[1] == 3:
            raise NotImplementedError("no kernel for three\nmore words")

    if where == "clock":
        clock.gains = lambda call: fails(call) or times(2, 1)
    elif where == "plans":
        monkeypatch.setattr(
            calls, "plans", lambda call, *rest: fails(call) or planned_once(call, *rest)
        )
    else:
        load_kernels = preparation.load_kernels

        def compiles(plans: Any, show: Any = None) -> Any:
            if any(need.problem.in_channels == 3 for need in plans):
                raise NotImplementedError("no kernel for three\nmore words")
            return load_kernels(plans, show)

        monkeypatch.setattr(preparation, "load_kernels", compiles)
    optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == NAMES[1:]
    (row,) = (row for row in report(optimized).layers if row.times is None)
    assert row.why == "NotImplementedError: no kernel for three"
    assert row.why in str(report(optimized))


def test_progress(model: ResNet, capsys: pytest.CaptureFixture[str]) -> None:
    fastconv.optimize(model, EXAMPLE)
    assert capsys.readouterr().err == ""
    cache.remove(cache.entries())
    fastconv.optimize(model, EXAMPLE, progress=True)
    shown = capsys.readouterr().err
    assert "\rfastconv: measured 10 of 10 layers\n" in shown
