"""``optimize`` on a GPU: a network's results stay the same, and it is measured once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastconv
from fastconv import cli, native
from fastconv.bench.written_networks import NETWORKS, UNet, Written
from fastconv.network import calls
from fastconv.network.report import Optimization
from network.helpers import Vocoder

pytestmark = pytest.mark.gpu
models = pytest.importorskip("torchvision.models")

# How far outputs may be apart, in norm: roundings in another order, through eighteen layers.
BOUNDS = {"tf32": 0.02, "bfloat16": 0.1}


class Gains(calls.Clock):
    """Calls layers and models both ways, and says that all of them gain."""

    def call(self, trial: calls.Trial) -> calls.Times:
        trial.pytorchs()
        trial.ours()
        return calls.Times(2.0, 1.0, 0.0, 0.0)

    def model(self, runs: Sequence[Any], before: Sequence[Any], *_: Any) -> calls.Times:
        for run, prepare in zip(runs, before, strict=True):
            prepare()
            run()
        return calls.Times(2.0, 1.0, 0.0, 0.0)


class NoClock(calls.Clock):
    """Fails if anything is measured."""

    def call(self, *_: Any) -> Any:
        raise AssertionError("measured again")

    model = call


@contextmanager
def mode(name: str, training: bool) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    with ExitStack() as stack:
        stack.enter_context(cudnn.flags(enabled=True, benchmark=False, allow_tf32=True))
        stack.enter_context(torch.autocast("cuda", torch.bfloat16, enabled=name == "bfloat16"))
        stack.enter_context(torch.set_grad_enabled(training))
        yield


def network(name: str, training: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, example = models.resnet18().cuda().train(training), torch.randn(8, 3, 224, 224).cuda()
    if name == "bfloat16":
        model.to(memory_format=torch.channels_last)
        example = example.to(memory_format=torch.channels_last)
    return model, example


def results(model: nn.Module, example: Tensor, training: bool) -> list[Tensor]:
    output = model(example)
    if not training:
        return [output]
    first = next(model.parameters())
    return [output.detach(), *torch.autograd.grad(output.square().mean(), [first])]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", BOUNDS)
def test_resnet18(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = network(name, training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with mode(name, training):
        optimized = fastconv.optimize(model, example)
        found: Optimization = optimized.fastconv_optimization
        assert not any(isinstance(one, fastconv.Conv2d) for one in model.modules())
        for key, value in model.state_dict().items():
            assert value.equal(before[key]), key
        pairs = zip(*(results(m, example, training) for m in (optimized, model)), strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
            # The first layer's gradient depends on all other layers in both directions.
            assert error < BOUNDS[name] * (5 if number else 1)
        monkeypatch.setattr(calls, "clock", NoClock())
        again = fastconv.optimize(model, example).fastconv_optimization
    assert sum(row.layers for row in found.layers) == 20
    assert all(row.times is not None for row in found.layers), str(found)
    assert found.left == {}
    assert again.exchanged == found.exchanged
    assert again.measured == 0
    if found.exchanged or found.folded:
        assert found.before_ms is not None
        assert found.after_ms is not None
        assert found.after_ms < found.before_ms
    if training:
        kinds = {n for n, one in optimized.named_modules() if isinstance(one, fastconv.Conv2d)}
        assert kinds == set(found.exchanged)
    elif found.fused:
        assert found.folded == 20
        assert not any(isinstance(one, nn.BatchNorm2d) for one in optimized.modules())


@pytest.mark.parametrize("name", BOUNDS)
def test_a_network_after_some_training_is_fused(name: str) -> None:
    """Two computations of the whole network differ by more than 2 %, but no layer's do."""
    torch.manual_seed(0)
    model, example = models.resnet50().cuda(), torch.randn(16, 3, 224, 224).cuda()
    if name == "bfloat16":
        model.to(memory_format=torch.channels_last)
        example = example.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with mode(name, training=True):
        for _ in range(8):
            targets = torch.randint(1000, (16,), device="cuda")
            nn.functional.cross_entropy(
                model(torch.randn_like(example)).float(), targets
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    with mode(name, training=False):
        found: Optimization = fastconv.optimize(model.eval(), example).fastconv_optimization
    said = [note for note in found.notes if note.startswith("not fused")]
    assert all("the model as a whole is not faster" in note for note in said), str(found)
    assert found.fused or said


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("by", ["a clock that prefers fastconv", "the GPU's times"])
def test_every_kind_of_layer(
    name: str, training: bool, by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """1-D and transposed layers, with a BatchNorm, an activation or an addition behind each."""
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, example = Vocoder().cuda().train(training), torch.randn(8, 3, 4000, device="cuda")
    if by != "the GPU's times":
        monkeypatch.setattr(calls, "clock", Gains())
    with mode(name, training):
        optimized = fastconv.optimize(model, example)
        pairs = zip(*(results(m, example, training) for m in (optimized, model)), strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
            assert error < BOUNDS[name] * (5 if number else 1)
    found: Optimization = optimized.fastconv_optimization
    assert {row.call.kind for row in found.layers} == {
        "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d"
    }  # fmt: skip
    assert all(row.times is not None for row in found.layers), str(found)
    if by != "the GPU's times":
        assert found.exchanged == ("first", "along", "up", "smooth", "look", "widen")
        assert (found.fused, found.folded) == ((False, 0) if training else (True, 3)), str(found)


ANOTHER = """
import sys
sys.path[:0] = {path!r}
import fastconv
from fastconv.network import calls
from gpu.test_optimization import NoClock, mode, network
calls.clock = NoClock()
with mode("bfloat16", True):
    model, example = network("bfloat16", True)
    print(*fastconv.optimize(model, example).fastconv_optimization.exchanged)
"""


def test_another_process_takes_what_was_measured() -> None:
    native.settle()  # Otherwise the choice here rests on the GPU's time, and there on wall time.
    with mode("bfloat16", True):
        model, example = network("bfloat16", True)
        found = fastconv.optimize(model, example).fastconv_optimization
    program = ANOTHER.format(path=sys.path)
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == [*found.exchanged]


def test_bench_of_networks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Written(partial(UNet, 16, 3), (3, 256, 256), 16)
    monkeypatch.setitem(NETWORKS, "unet", small)
    sizes = ["--batch", "4", "--image", "64", "--repeats", "3", "--row-seconds", "1"]
    assert cli.main(["bench", "--networks", "unet", *sizes, "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["optimized"]["layers"] == 13
        assert min(row[which]["extra_mib"] for which in ("ours", "peer")) > 0
        assert row["mode"] == "training" or row["difference"] < BOUNDS["bfloat16"]
