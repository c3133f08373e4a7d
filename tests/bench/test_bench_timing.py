"""How ``fastconv bench`` measures: samples, contestants, and host times (``--host``)."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastconv
from effort import PATIENCE_S
from fastconv import cli, native, timing
from fastconv.bench import contestants, host, results, row_timing
from fastconv.bench.cases import PASSES, STEP, Case
from fastconv.timing import Effort
from fastconv.workloads import parse_shape

SHAPE = "2x4x9x11 6x2x3x5 padding=1,2 dilation=1,2 stride=2 groups=2"
CAUSAL = "2x3x8x9 4x3x2x3 padding=1,0,2,0"
SEQUENCES = ("2x4x19 6x2x5 padding=2 dilation=2 stride=3 groups=2", "2x3x9 4x3x4 padding=3,0")
TRANSPOSED = (
    "2x4x9 4x3x5 transposed stride=3 padding=1 dilation=2 output_padding=1 groups=2",
    "2x3x9 3x4x4 transposed stride=2 padding=3,1",
    "2x4x5x6 4x3x3x2 transposed stride=2,3 padding=1,0 output_padding=1,2 groups=2",
    "2x3x5x6 3x2x3x4 transposed padding=2,0,1,2 dilation=2,1",
)

pytestmark = pytest.mark.usefixtures("_small_ceilings")


def case(direction: str = "forward", shape: str = SHAPE, format: str = "nchw") -> Case:
    return Case(parse_shape(shape), direction, "float32", "ieee", format)


# --- Timing ---------------------------------------------------------------------------------------


def test_contestants_take_turns_on_rotating_inputs() -> None:
    seen: list[tuple[str, int]] = []
    sets = [case().tensors(torch.device("cpu"), seed) for seed in range(3)]
    places = {id(at): number for number, at in enumerate(sets)}

    def contestant(name: str) -> contestants.Pass:
        return lambda at: seen.append((name, places[id(at)]))

    samples = row_timing.take_turns([contestant("a"), contestant("b")], sets, Effort(7, 0.0))
    assert [len(taken) for taken in samples] == [timing.LEAST_SAMPLES] * 2
    assert {place for _, place in seen} == {0, 1, 2}
    last = [name for name, _ in seen[-2 * timing.MOST_CALLS :]]
    assert set(last) == {"a", "b"}


def test_samples_are_repeated_while_they_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    at = case().tensors(torch.device("cpu"))
    for spread, rounds in ((1.0, timing.MOST_ROUNDS), (0.0, 1)):
        monkeypatch.setattr(timing, "spread", lambda taken, spread=spread: spread)
        (taken,) = row_timing.take_turns([lambda _: None], [at], Effort(3, PATIENCE_S))
        assert len(taken) == 3 * rounds


def test_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    at = case().tensors(torch.device("cpu"))
    monkeypatch.setattr(row_timing, "CPU_CACHE_BYTES", 10 * at.bytes)
    assert row_timing.set_count(at, torch.device("cpu")) == row_timing.CACHES * 10 + 1


# --- Contestants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, CAUSAL, *SEQUENCES, *TRANSPOSED])
@pytest.mark.parametrize("direction", [*PASSES, STEP])
@pytest.mark.parametrize("format", ["nchw", "nhwc"])
def test_contestants_compute_the_same(shape: str, direction: str, format: str) -> None:
    one = case(direction, shape, format)
    at = one.tensors(torch.device("cpu"))
    expected = contestants.ours(one)(at)
    for make in contestants.PEERS["best"].values():
        torch.testing.assert_close(make(one)(at), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SEQUENCES[:1] + TRANSPOSED[:1])
def test_sequences_with_channels_last_are_transposed_views(shape: str) -> None:
    at = case(shape=shape, format="nhwc").tensors(torch.device("cpu"))
    for tensor in at:
        assert tensor.dim() == 3
        assert tensor.mT.is_contiguous()


def test_other_format_is_converted_once() -> None:
    one, seen = case(format="nhwc"), []
    at = one.tensors(torch.device("cpu"))
    assert at.input.is_contiguous(memory_format=torch.channels_last)

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    compute = contestants.other_format(one)
    compute(at)
    with Spy():
        compute(at)
    assert seen == ["convolution"]


# --- fastconv bench --host ------------------------------------------------------------------------

HOST = ["bench", "--host", "--device", "cpu", "--row-seconds", "0"]
HOST_ROWS = [
    "small_forward", "small_forward_recorded", "small_backward", "small_input_grad",
    "small_conv1d", "small_conv1d_recorded", "small_transposed", "small_transposed_recorded",
    "small_conv3d", "small_conv3d_recorded", "small_operator", "layers20_step",
    "layers20_compiled_step", "layers20_compiled_inference",
    "resnet50_step", "resnet50_inference",
]  # fmt: skip


@pytest.fixture
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short bursts on one thread: several threads wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    monkeypatch.setitem(host.CALLS, "cpu", 1)
    monkeypatch.setattr(host, "WARM_UPS", 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_network(weights: None) -> torch.nn.Module:
    """Stands in for ResNet-50."""
    layers = (torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4))
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


@pytest.mark.usefixtures("_one_thread")
def test_host_times_of_every_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = SimpleNamespace(resnet50=small_network)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    path = tmp_path / "host.json"
    assert cli.main([*HOST, "--output", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["format"] == results.HOST_FORMAT
    assert found["environment"]["host_path"] == native.describe()
    assert [row["name"] for row in found["rows"]] == HOST_ROWS
    for row in found["rows"]:
        assert bool(row["skipped"]) == ("compiled" in row["name"])
        if row["skipped"]:
            continue
        assert row["ratio"] == row["ours"]["us"] / row["peer"]["us"]
        for timed in (row["ours"], row["peer"]):
            assert 0 < timed["low_us"] <= timed["us"] <= timed["high_us"]
            assert timed["samples"] == timing.LEAST_SAMPLES
    captured = capsys.readouterr()
    assert "small_backward" in captured.out
    assert "[16/16" in captured.err


@pytest.mark.usefixtures("_one_thread")
def test_networks_are_skipped_without_torchvision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    assert cli.main([*HOST, "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = json.loads(captured.out)["rows"]
    skipped = {row["name"]: row["skipped"] for row in rows if row["skipped"]}
    compiled = [name for name in HOST_ROWS if "compiled" in name]
    of_torchvision = [name for name in HOST_ROWS if name.startswith("resnet")]
    assert skipped == {
        **dict.fromkeys(compiled, "networks are compiled on GPUs alone"),
        **dict.fromkeys(of_torchvision, "torchvision is not installed: pip install torchvision"),
    }


def test_one_failing_host_row_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def run() -> None:
        sum(range(1000))  # long enough for a clock of microseconds

    def succeeds() -> tuple[host.Contestant, host.Contestant]:
        return (lambda: run), (lambda: run)

    cases = [host.HostCase("a", "", 1, fails), host.HostCase("b", "", 1, succeeds)]
    monkeypatch.setattr(host, "cases", lambda device: cases)
    assert cli.main([*HOST, "--json"]) == 1
    failed, measured = json.loads(capsys.readouterr().out)["rows"]
    assert failed["error"] == "out of memory: the other rows need less"
    assert measured["ours"]["samples"] == timing.LEAST_SAMPLES


def test_host_samples_are_bursts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock shows which part of a sample is timed."""
    clock, seen = SimpleNamespace(now=0), []

    def contestant(name: str, ns: int) -> host.Contestant:
        def run() -> None:
            assert not gc.isenabled()
            seen.append(name)
            clock.now += ns

        def prepare() -> host.Run:
            clock.now += 10**9  # Preparation is not timed.
            return run

        return prepare

    fake = SimpleNamespace(perf_counter_ns=lambda: clock.now, perf_counter=lambda: clock.now / 1e9)
    monkeypatch.setattr(host, "time", fake)
    monkeypatch.setattr(host, "WARM_UPS", 1)
    turns = [contestant("ours", 6000), contestant("peer", 9000)]
    samples = host.take_turns(turns, 3, torch.device("cpu"), 9.5)
    assert samples == [[2.0] * 5, [3.0] * 5]  # A round of both takes 2 seconds.
    assert seen == ["ours", "peer"] * 6
    assert gc.isenabled()


def test_host_ratio_is_of_medians() -> None:
    ours = results.HostTiming.of([9.0, 10.0, 10.0, 11.0, 100.0])
    peer = results.HostTiming.of([20.0, 20.0, 20.0])
    assert (ours.us, ours.low_us, ours.samples) == (10.0, 9.5, 5)
    row = results.HostRow("small_forward", "", ours, peer)
    assert row.ratio == 0.5
    assert row.unsteady
    assert not results.HostRow("small_forward", "", peer, peer).unsteady


def test_networks_with_fastconv_share_their_parameters() -> None:
    torch.manual_seed(0)
    peer = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Sequential(small_network(None)))
    peer[1][0][0] = torch.nn.Conv2d(4, 4, 3, padding=1)
    ours = host.with_fastconv(peer)
    convolutions = [m for m in ours.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [type(module) for module in convolutions] == [fastconv.Conv2d] * 2
    assert not any(isinstance(module, fastconv.Conv2d) for module in peer.modules())
    for one, other in zip(ours.parameters(), peer.parameters(), strict=True):
        assert one is other
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(ours(images), peer(images))
