"""``fastconv bench --networks``: whole networks, with a CPU in place of a GPU."""

from __future__ import annotations

import json
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Loads
from fastconv import cli, timing
from fastconv.bench import models, networks, report, results
from fastconv.bench.console import MissingExtra
from fastconv.bench.network_results import (
    COMPILE_MODES,
    NETWORKS_FORMAT,
    NetworkResults,
)
from fastconv.bench.networks import INFERENCE, MODES, TRAINING
from fastconv.bench.written_networks import (
    _OF_VOLUMES,
    NETWORKS,
    Dcgan,
    HiFiGan,
    UNet,
    VideoDecoder,
    Wav2Vec2,
    Written,
)
from fastconv.network import calls, preparation
from network.helpers import Clock, ResNet, stand_in

FLOAT32, BFLOAT16 = (one.name for one in networks.CONFIGURATIONS.values())
FAST = ["--device", "cpu", "--repeats", "1", "--row-seconds", "0", "--batch", "2"]


class Heads(nn.Module):
    """In training it has two heads, as networks for segmentation do; it also returns a count."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.out, self.aux = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Any:
        features = self.body(images)
        found = OrderedDict(out=self.out(features))
        if self.training:
            found |= {"aux": self.aux(features), "count": torch.tensor(len(images))}
        return found


class Watched(nn.Module):
    """Records how it is called: mode, types, memory formats, and settings of PyTorch."""

    seen: set[Any]

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        assert all(parameter.grad is None for parameter in self.parameters())
        found: Tensor = self.conv(images)
        if type(images) is Tensor:  # Only calls with data are recorded.
            self.seen.add(
                (
                    self.training,
                    found.requires_grad,
                    found.dtype,
                    images.dtype,
                    self.conv.weight.dtype,
                    images.is_contiguous(memory_format=torch.channels_last),
                    self.conv.weight.is_contiguous(memory_format=torch.channels_last),
                    torch.backends.cudnn.allow_tf32,
                    torch.backends.cudnn.benchmark,
                )
            )
        return found


class Fails(nn.Module):
    """Runs out of memory, and has a reference to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.itself = nn.Conv2d(3, 4, 3), [self]

    def forward(self, images: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture(autouse=True)
def clock(loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in(tmp_path / "cache", monkeypatch.setattr)
    found = Clock()
    monkeypatch.setattr(calls, "clock", found)
    monkeypatch.setattr(timing, "WARM_UPS", 1)
    return found


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Returns a function that replaces all models by those given by name."""

    def install(**made: Callable[[], nn.Module]) -> None:
        def build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
            if name not in made:
                raise MissingExtra(f"{name} needs torchvision")
            return made[name](), (3, 8, 10)

        monkeypatch.setattr(models, "build", build)

    return install


def measured(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[Any]:
    assert cli.main(["bench", *FAST, "--json", "--quiet", "--networks", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    found: list[Any] = json.loads(captured.out)["rows"]
    return found


# --- Rows -----------------------------------------------------------------------------------------


def test_rows_network_by_network() -> None:
    found = networks.cases(networks.NETWORKS)
    assert len(found) == 7 * 2 * 2
    assert [case.label for case in found[:5]] == [
        f"resnet50 training {FLOAT32}",
        f"resnet50 inference {FLOAT32}",
        f"resnet50 training {BFLOAT16}",
        f"resnet50 inference {BFLOAT16}",
        f"convnext_tiny training {FLOAT32}",
    ]
    batches = {case.network: case.batch for case in found}
    assert {name for name, batch in batches.items() if batch != 64} == {
        "unet",
        "deeplabv3_resnet50",
    }
    assert batches["unet"] == batches["deeplabv3_resnet50"] == 16
    (one,) = networks.cases(["unet", "unet"], [INFERENCE], ["bfloat16"], 3, 32)
    assert (one.label, one.batch, one.side) == (f"unet inference {BFLOAT16}", 3, 32)


def test_every_row_of_two_networks(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(resnet=ResNet, heads=Heads)
    path = tmp_path / "networks.json"
    command = ["bench", "--networks", "resnet", "heads", *FAST, "--output", str(path)]
    assert cli.main(command) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["format"] == NETWORKS_FORMAT
    assert [(row["network"], row["configuration"], row["mode"]) for row in found["rows"]] == [
        (name, configuration, mode)
        for name in ("resnet", "heads")
        for configuration in (FLOAT32, BFLOAT16)
        for mode in MODES
    ]
    for row in found["rows"]:
        assert row["images"] == "2x3x8x10"
        assert row["speedup"] == row["peer"]["ms"] / row["ours"]["ms"]
        assert row["compiled"] == []
        assert row["error"] is row["skipped"] is None
        for timed in (row["ours"], row["peer"]):
            assert timed["samples"] == 1
            assert timed["ms"] > 0
            assert timed["first_call_ms"] > 0
        optimized, training = row["optimized"], row["mode"] == TRAINING
        layers, called = {"resnet": (8, 8), "heads": (3, 3 if training else 2)}[row["network"]]
        assert (optimized["layers"], optimized["exchanged"]) == (layers, called)
        assert optimized["fused"] == (row["network"] == "resnet" and not training)
        assert optimized["folded"] == (7 if optimized["fused"] else 0)
        assert optimized["measured"] > 0
        assert optimized["seconds"] > 0
        # The fake clock says that PyTorch takes twice as long.
        assert optimized["before_ms"] == 2 * optimized["after_ms"] == 2 * called
        if training:
            assert row["difference"] is None
        else:
            assert row["difference"] < (1e-5 if row["configuration"] == FLOAT32 else 0.05)
    read = results.read_any(path)
    assert isinstance(read, NetworkResults)
    assert json.loads(read.json()) == found
    captured = capsys.readouterr()
    assert "8 of 8, fused" in captured.out
    assert "training, 4 rows: speed-up" in captured.out
    assert "[8/8" in captured.err


def test_a_row_is_called_as_it_says(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(watched=Watched)
    for mode in MODES:
        for dtype, computed in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            Watched.seen = set()
            (row,) = measured(capsys, "watched", "--mode", mode, "--dtype", dtype)
            assert row["error"] is None
            training, tf32 = mode == TRAINING, dtype == "float32"
            assert Watched.seen == {
                (
                    training, training, computed, torch.float32, torch.float32,
                    not tf32, not tf32, tf32, True,
                )
            }  # fmt: skip


def test_a_training_step_is_of_all_float_outputs() -> None:
    (case,) = networks.cases(["heads"], [TRAINING], ["float32"], 2)
    network = Heads()
    contestant = networks._Contestant(case, network, torch.randn(2, 3, 8, 8))
    assert contestant.first_call_ms > 0
    assert network.out.bias.grad is None
    assert contestant.run() == []
    for head in (network.out, network.aux):
        torch.testing.assert_close(head.bias.grad, torch.tensor([0.5, 0.5]))
    contestant.clear()
    assert all(parameter.grad is None for parameter in network.parameters())


def test_gradients_are_cleared_before_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = networks.cases(["heads"], [TRAINING], ["float32"], 2)
    made = [Heads(), Heads()]
    runs = [networks._Contestant(case, one, torch.randn(2, 3, 8, 8)) for one in made]

    def take_wall_turns(steps: Any, device: Any, effort: Any, before: Any) -> list[list[float]]:
        for step, prepare in zip(steps, before, strict=True):
            step()
            prepare()
            assert all(p.grad is None for one in made for p in one.parameters())
        return [[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]]

    monkeypatch.setattr(timing, "take_wall_turns", take_wall_turns)
    first, second = networks._timings(runs, torch.device("cpu"), timing.Effort())
    assert (first.ms, first.spread, first.samples) == (2.0, 0.5, 3)
    assert (second.ms, second.spread, second.first_call_ms) == (4.0, 0.0, runs[1].first_call_ms)


# --- Compiled networks ----------------------------------------------------------------------------


class Compiler:
    """Stands for ``torch.compile``: Dynamo traces for real, and nothing is generated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._compile = torch.compile
        self.asked: list[Any] = []
        self.fails = lambda network, mode: False
        monkeypatch.setattr(torch, "compile", self)

    def __call__(self, network: nn.Module, mode: str | None = None) -> Any:
        ours = any(type(one) is not nn.Conv2d for one in convolutions(network))
        if mode is not None:  # Contestants have one; what starts the compiler has none.
            self.asked.append((ours, network.training, mode))
        if self.fails(ours, mode):
            return self._failing
        return self._compile(network, backend="aot_eager")

    @staticmethod
    def _failing(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")


def convolutions(network: nn.Module) -> list[nn.Module]:
    return [one for one in network.modules() if isinstance(one, nn.Conv2d)]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps that were marked for CUDA graphs, which a CPU is made to measure too."""
    marked: list[str] = []
    monkeypatch.setattr(networks, "compile_modes", lambda device: list(COMPILE_MODES))
    mark = partial(marked.append, "step")
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    return marked


def test_compiled_networks_on_a_cpu(
    install: Install, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    install(heads=Heads)
    rows = measured(capsys, "heads", "--dtype", "float32", "--compile")
    assert compiler.asked == [
        (ours, mode == TRAINING, "default") for mode in MODES for ours in (False, True)
    ]
    for row in rows:
        (pair,) = row["compiled"]
        assert pair["mode"] == "default"
        assert pair["ours_remark"] is pair["peer_remark"] is None
        assert pair["speedup"] == pair["peer"]["ms"] / pair["ours"]["ms"]
        for timed in (pair["ours"], pair["peer"]):
            assert timed["samples"] == row["ours"]["samples"] == 1
            assert timed["ms"] > 0
            assert timed["first_call_ms"] > 0


def test_compiled_networks_with_cuda_graphs(
    install: Install, compiler: Compiler, marks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    install(heads=Heads)
    rows = measured(capsys, "heads", "--dtype", "bfloat16", "--compile")
    expected = [(ours, mode) for mode in ("default", "reduce-overhead") for ours in (False, True)]
    assert [(ours, mode) for ours, _, mode in compiler.asked] == 2 * expected
    for row in rows:
        assert [pair["mode"] for pair in row["compiled"]] == ["default", "reduce-overhead"]
        assert all(pair["speedup"] > 0 for pair in row["compiled"])
    # Two contestants of two rows: first steps, one dropped sample and one that counts.
    assert len(marks) == 2 * 2 * (networks.COMPILED_STEPS + 1 + 1)


def test_a_compiled_contestant_that_fails_loses_no_other(
    install: Install, compiler: Compiler, marks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.fails = lambda ours, mode: ours and mode == "reduce-overhead"
    install(heads=Heads)
    options = ("--mode", "training", "--dtype", "float32", "--compile")
    (row,) = measured(capsys, "heads", *options, status=1)
    why = "failed: out of memory: a smaller --batch than 2 may fit"
    assert row["error"] is None
    assert row["speedup"] > 0
    default, graphs = row["compiled"]
    assert default["speedup"] > 0
    assert graphs["peer"]["ms"] > 0
    assert (graphs["ours"], graphs["ours_remark"], graphs["speedup"]) == (None, why, None)
    assert graphs["peer_remark"] is None
    assert cli.main(["bench", *FAST, "--networks", "heads", *options]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"heads training {FLOAT32}, fastconv compiled + CUDA graphs: {why}" in said


def test_skipped_cuda_graphs_are_told(
    install: Install, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, marks: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    install(heads=Heads)
    counts = iter((0, 0, 0, 0, 3, 5, 5, 5))  # before and after each contestant
    monkeypatch.setattr(networks, "_skipped_graphs", lambda: next(counts))
    (row,) = measured(capsys, "heads", "--mode", "training", "--dtype", "float32", "--compile")
    remarks = [(pair["peer_remark"], pair["ours_remark"]) for pair in row["compiled"]]
    assert remarks == [(None, None), ("torch.compile skipped CUDA graphs (2)", None)]
    assert all(pair["speedup"] for pair in row["compiled"])


def test_cuda_graphs_need_a_gpu() -> None:
    assert networks.compile_modes(torch.device("cpu")) == ["default"]
    assert networks.compile_modes(torch.device("cuda")) == [*COMPILE_MODES]
    assert [*report.COMPILED_RIGHT] == [*COMPILE_MODES]
    assert networks._skipped_graphs() >= 0


# --- What is compared -----------------------------------------------------------------------------


def test_results_that_cannot_be_compared_are_a_failure() -> None:
    one = torch.tensor([3.0, 4.0])
    assert networks._difference([one, one], [one, one + torch.tensor([0.0, 0.5])]) == 0.1
    for wrong in (torch.tensor([0.0, 0.0]), torch.tensor([torch.nan, 1.0])):
        with pytest.raises(ValueError, match="outputs cannot be compared"):
            networks._difference([wrong], [wrong])


# --- What does not go well ------------------------------------------------------------------------


def test_one_failing_network_loses_no_other(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(fails=Fails, heads=Heads)
    arguments = ("fails", "absent", "heads", "--mode", "inference", "--dtype", "float32")
    fails, absent, heads = measured(capsys, *arguments, status=1)
    assert fails["error"] == "out of memory: a smaller --batch than 2 may fit"
    assert absent["skipped"] == "absent needs torchvision"
    assert heads["speedup"] > 0
    assert measured(capsys, "absent", "--dtype", "bfloat16")  # A skipped row is no failure.


@pytest.mark.parametrize("options", [[], ["--compile"]])
def test_networks_are_freed_before_the_next(
    install: Install, compiler: Compiler, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    made: list[weakref.ref[nn.Module]] = []

    def build(kind: type[nn.Module]) -> nn.Module:
        assert not any(one() for one in made)
        network = kind()
        made.append(weakref.ref(network))
        return network

    install(heads=partial(build, Heads), fails=partial(build, Fails))
    rows = measured(capsys, "fails", "heads", "--dtype", "float32", *options, status=1)
    assert [row["error"] is None for row in rows] == [False, False, True, True]
    assert len(rows[2]["compiled"]) == len(options)
    assert len(made) == 4


def test_no_row_begins_after_the_time_limit(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(heads=lambda: pytest.fail("begun"))
    rows = measured(capsys, "heads", "--time-limit", "0", status=0)
    assert {row["skipped"] for row in rows} == {"the time limit was reached"}
    assert len(rows) == 4


def test_a_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparation, "_GPU", "cuda")
    assert cli.main(["bench", "--networks", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said == "fastconv: --networks measures fastconv.optimize on a GPU, and cpu is none\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(
            (
                ["--networks", *option],
                "--networks have rows of their own, to which "
                f"{option[0]} does not apply: they take --mode",
            )
            for option in (
                ["--shape", "1x1x8x8 1x1x3x3"],
                ["--suite", "real"],
                ["--model", "resnet50"],
                ["--divisor", "2"],
                ["--pass", "forward"],
                ["--precision", "tf32"],
                ["--format", "nhwc"],
                ["--commands"],
                ["--peer", "pytorch"],
            )
        ),
        (["--networks", "--dtype", "float16"], "measured in float32 and bfloat16, not in float16"),
        (["--networks", "--mode", "step"], "invalid choice: 'step'"),
        (["--networks", "--host"], "not allowed with"),
        (["--networks", "--dry-run"], "not allowed with"),
        (["--networks", "--compare", "a.json", "b.json"], "not allowed with"),
        (["--mode", "training"], "--mode applies to --networks, which is not given"),
        (["--host", "--mode", "training"], "--mode applies to --networks"),
        (["--compile"], "--compile applies to --networks, which is not given"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = cli.main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


# --- U-Net ----------------------------------------------------------------------------------------


def test_the_unet_is_the_usual_one() -> None:
    with torch.device("meta"):
        network = UNet()
        assert network(torch.empty(1, 3, 256, 256)).shape == (1, 2, 256, 256)
    layers = [one for one in network.modules() if type(one) is nn.Conv2d]
    assert sum(one.kernel_size == (3, 3) for one in layers) == len(layers) - 1 == 18
    assert {one.out_channels for one in layers} == {64, 128, 256, 512, 1024, 2}
    assert sum(parameter.numel() for parameter in network.parameters()) == 31_037_698


def test_the_unet_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(NETWORKS, "unet", Written(partial(UNet, 4), (3, 256, 256), 16))
    rows = measured(capsys, "unet", "--image", "32", "--dtype", "float32")
    assert [row["optimized"]["fused"] for row in rows] == [False, True]
    for row in rows:
        assert row["images"] == "2x3x32x32"
        assert row["optimized"]["layers"] == row["optimized"]["exchanged"] == 23
    (row,) = measured(capsys, "unet", "--image", "20", "--mode", "training", "--dtype", "float32",
                      status=1)  # fmt: skip
    assert row["error"].startswith("RuntimeError: Sizes of tensors must match")


# --- The other networks that the bench has written down -------------------------------------------


@pytest.mark.parametrize(
    ("name", "output", "parameters"),
    [
        ("wav2vec2", (1, 499, 768), 4_200_448 + 1_024 + 393_984 + 4_719_360 + 1_536),
        ("hifigan", (1, 1, 128 * 256), 13_926_017),
        ("dcgan", (1, 3, 64, 64), 3_576_704),
        ("unet3d", (1, 4, 128, 128, 128), 22_580_964),
        ("video_decoder", (1, 3, 8, 480, 832), 41_338_179),
    ],
)
def test_written_networks_have_their_papers_sizes(
    name: str, output: tuple[int, ...], parameters: int
) -> None:
    with torch.device("meta"):
        network = NETWORKS[name].build()
        assert network(torch.empty(1, *NETWORKS[name].input)).shape == output
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_written_networks_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "wav2vec2": Written(partial(Wav2Vec2, 4, 16), (1, 800)),
        "hifigan": Written(partial(HiFiGan, 4, 16), (4, 3)),
        "dcgan": Written(partial(Dcgan, 4, 2), (4, 1, 1)),
    }
    for name, one in small.items():
        monkeypatch.setitem(NETWORKS, name, one)
    rows = measured(capsys, *small)
    assert [row["images"] for row in rows[::4]] == ["2x1x800", "2x4x3", "2x4x1x1"]
    assert all(row["ours"]["ms"] > 0 < row["peer"]["ms"] for row in rows)


def test_networks_of_volumes_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "unet3d": Written(partial(UNet, 2, 2, 3, 1, _OF_VOLUMES), (1, 4, 4, 4)),
        "video_decoder": Written(partial(VideoDecoder, 2, 32), (2, 1, 1, 2)),
    }
    for name, one in small.items():
        monkeypatch.setitem(NETWORKS, name, one)
    rows = measured(capsys, *small, "--dtype", "float32", "--mode", INFERENCE)
    assert [row["images"] for row in rows] == ["2x1x4x4x4", "2x2x1x1x2"]
    assert rows[0]["optimized"]["fused"]
    assert [row["optimized"]["layers"] for row in rows] == [8, 23]
    assert all(row["ours"]["ms"] > 0 < row["peer"]["ms"] for row in rows)
