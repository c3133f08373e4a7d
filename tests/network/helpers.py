"""Models, a clock and reports for the tests of ``optimize``. A CPU stands in for the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastconv
from fastconv.fused import Fused
from fastconv.jit import cache, compile
from fastconv.network import calls
from fastconv.network.block_calls import BlockCall, BlockTrial
from fastconv.network.calls import Call, Times
from fastconv.network.norm_calls import NormCall, NormTrial
from fastconv.network.report import Optimization
from fastconv.ops import batchnorm_schema

EXAMPLE = torch.randn(2, 3, 10, 10)
SEQUENCES = torch.randn(2, 3, 10)
VOLUMES = torch.randn(2, 3, 10, 10, 10)

KINDS = {
    "Conv1d": SEQUENCES,
    "Conv2d": EXAMPLE,
    "ConvTranspose1d": SEQUENCES,
    "ConvTranspose2d": EXAMPLE,
    "Conv3d": VOLUMES,
    "ConvTranspose3d": VOLUMES,
}
"""The layers that fastconv computes, by their names in PyTorch and in fastconv; and examples."""

NORMS = {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}
LAYERS = tuple(getattr(fastconv, kind) for kind in KINDS)


def layer_of(kind: str, *args: Any, **named: Any) -> Any:
    """A layer of PyTorch's, of any of these kinds."""
    return getattr(nn, kind)(*args, **named)


def norm_for(kind: str, channels: int, **named: Any) -> Any:
    """A BatchNorm that may follow a layer."""
    return NORMS[kind[-2:]](channels, **named)


def times(theirs: float, ours: float, error: float = 0.0) -> Times:
    return Times(theirs, ours, error * theirs, error * ours)


class Clock(calls.Clock):
    """Gives the times that a test sets, records calls, and compares the results of both ways."""

    def __init__(self) -> None:
        self.gains: Callable[[Call], Times] = lambda call: times(2.0, 1.0)
        self.of_blocks: Callable[[NormCall], Times] = lambda call: times(2.0, 1.0)
        self.together: Callable[[BlockCall], Times] = lambda call: times(1.0, 2.0)
        self.blocks: list[NormCall] = []
        self.pairs: list[BlockCall] = []
        self.whole = times(10.0, 8.0)
        self.wholes: list[Times] = []  # given before `whole`, one for each measurement
        self.seen: list[Call] = []
        self.models = 0
        self.with_host = True
        self.watch: Callable[[], Any] = lambda: None
        self.watched: list[Any] = []

    def call(self, trial: Any) -> Times:
        record, found = {
            NormTrial: (self.blocks, self.of_blocks),
            BlockTrial: (self.pairs, self.together),
        }.get(type(trial), (self.seen, self.gains))
        record.append(trial.call)
        half = trial.call.dtype.itemsize == 2
        torch.testing.assert_close(
            trial.ours(), trial.pytorchs(), rtol=1e-4, atol=0.5 if half else 1e-3
        )
        return found(trial.call)

    def model(
        self, runs: Sequence[Any], before: Sequence[Any], device: torch.device, with_host: bool
    ) -> Times:
        self.models += 1
        self.with_host = with_host
        for run, prepare in zip(runs, before, strict=True):
            prepare()
            run()
            self.watched.append(self.watch())
        return self.wholes.pop(0) if self.wholes else self.whole


def stand_in(folder: Path, setattr: Callable[[Any, str, Any], None]) -> None:
    """Makes the CPU stand in for a GPU, whose times are stored in this folder."""
    setattr(cache, "folder", lambda: folder)
    setattr(compile, "nvrtc_version", lambda: (13, 0))
    setattr(calls, "gpu_name", lambda device: "a GPU")
    setattr(calls, "plans", planned_once)


_plans, _planned = calls.plans, dict[Call, Any]()


def planned_once(call: Call, *rest: Any) -> Any:
    """Plans each call once for all tests: planning would take most of their time."""
    if call not in _planned:
        _planned[call] = _plans(call, *rest)
    return _planned[call]


class Block(nn.Module):
    """A residual block: one ReLU used twice, and ``out += identity``."""

    def __init__(self, channels: int, width: int, stride: int = 1, inplace: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or channels != width:
            shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A small residual network, with a Dropout and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(Block(8, 8), Block(8, 12, 2), Block(12, 12))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(F.silu(self.stem(x)))
        return self.head(self.drop(out.mean((2, 3))))


class Vocoder(nn.Module):
    """Sequences go down and up again, and become images: every kind of layer is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 5, stride=2, padding=2, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.along = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.up = nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1, groups=2)
        self.up_norm = nn.BatchNorm1d(4)
        self.smooth = nn.ConvTranspose1d(4, 4, 3, padding=1)
        self.look = nn.Conv2d(4, 6, 3, padding=1)
        self.widen = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2, bias=False)
        self.widen_norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.along(x) + x)
        x = F.leaky_relu(self.up_norm(self.up(x)), 0.2)
        x = torch.tanh(self.smooth(x) + x)
        x = torch.relu(self.look(x.unflatten(-1, (5, -1))))
        return torch.sigmoid(self.widen_norm(self.widen(x)))


def norm_calls(run: Callable[[], Any]) -> Counter[str]:
    """How often our operators of batch normalization are called, by name."""
    found: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in (batchnorm_schema.forward, batchnorm_schema.backward):
                found[function._schema.name.removeprefix("fastconv::batch_norm_")] += 1
            return function(*args, **(kwargs or {}))

    with Watch():
        run()
    return found


DISTINCT = 5  # how many distinct calls its layers have
NAMES = [name for name, one in ResNet().named_modules() if type(one) is nn.Conv2d]


def report(model: nn.Module) -> Optimization:
    found = model.fastconv_optimization
    assert isinstance(found, Optimization)
    return found


def ours(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(one, LAYERS)]


def fused(model: nn.Module, *example: Any, **named: Any) -> nn.Module:
    """The optimized model, which has to compute the same."""
    model.eval()
    expected = model(*example, **named)
    with torch.no_grad():
        optimized = fastconv.optimize(model, *example, **named)
        torch.testing.assert_close(optimized(*example, **named), expected, rtol=1e-4, atol=1e-4)
    return optimized


def activations(model: nn.Module) -> dict[str, Any]:
    return {n: one.activation for n, one in model.named_modules() if isinstance(one, Fused)}


class Followed(nn.Module):
    """A layer, a BatchNorm if asked for, and a function of their result."""

    def __init__(
        self, follower: Callable[..., Tensor], norm: bool = False, kind: str = "Conv2d"
    ) -> None:
        super().__init__()
        mode = "reflect" if norm and "Transpose" not in kind else "zeros"
        self.layer = layer_of(kind, 3, 3, 3, padding=1, padding_mode=mode)
        self.norm = norm_for(kind, 3) if norm else nn.Identity()
        self.with_norm, self.follower = norm, follower

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        out = self.norm(out) if self.with_norm else out
        return self.follower(out)


def not_fused(model: nn.Module, *example: Any) -> str:
    """Why a model is not fused; optimized, it computes the same."""
    model.eval()
    with torch.no_grad():
        expected = model(*example)
        optimized = fastconv.optimize(model, *example)
        torch.testing.assert_close(optimized(*example), expected, equal_nan=True)
    assert type(optimized) is type(model)
    assert not report(optimized).fused
    (reason,) = (note for note in report(optimized).notes if note.startswith("not fused: "))
    return reason.removeprefix("not fused: ")
