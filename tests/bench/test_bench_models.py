"""``fastconv bench --model``: the layers of a named network, and sums over them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fastconv import cli
from fastconv.bench import models, report, results
from fastconv.bench.cases import PASSES, Case
from fastconv.bench.limits import Limit
from fastconv.bench.results import Results, Row
from fastconv.bench.row_timing import Timing
from fastconv.workloads import Workload, WorkloadError, from_dict, to_dict

FAST = ["--device", "cpu", "--repeats", "1", "--row-seconds", "0"]

pytestmark = pytest.mark.usefixtures("_small_ceilings")


class Network(nn.Module):
    """Two equal first layers, three equal layers behind them, and a head only for training."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.right = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.body = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Any:
        features = self.body(self.left(images) + self.right(images))
        return (features, self.head(self.norm(features))) if self.training else features


# --- Layers ---------------------------------------------------------------------------------------


def test_distinct_layers_are_counted() -> None:
    stem, body, head = models.layers(Network().eval(), "network", (2, 3, 8, 10))
    assert stem == Workload(
        "network_01", "left", (2, 3, 8, 10), (4, 3, 3, 3), (2, 2), (1, 1),
        model="network", count=2, first=2,
    )  # fmt: skip
    assert body == Workload(
        "network_02", "body.0", (2, 4, 4, 5), (4, 4, 3, 3), padding=(1, 1), model="network", count=3
    )
    assert (head.name, head.about, head.count) == ("network_03", "head", 1)
    counts = [Case(stem, direction, "bfloat16", None, "nhwc").count for direction in PASSES]
    assert counts == [2, 0, 2]


class Called(nn.Module):
    """A network that calls the given function."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.zeros(4, 2, 3, 2)), call

    def forward(self, images: Tensor) -> Tensor:
        return self.call(images, self.weight)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, w: functional.conv2d(x, w, groups=2), {"groups": 2}),
        (lambda x, w: torch.conv2d(input=x, weight=w * 2, stride=[2], groups=2),
         {"about": "", "stride": (2, 2), "groups": 2}),
        (lambda x, w: torch.conv2d(x, w, None, 1, "valid", (2, 1), 2),
         {"dilation": (2, 1), "groups": 2}),
        (lambda x, w: torch.conv2d(x, w, padding="same", dilation=(2, 3), groups=2),
         {"padding": (2, 2, 1, 2), "dilation": (2, 3), "groups": 2}),
        (lambda x, w: functional.conv2d(x[0], w, padding=(1, 0), groups=2),
         {"input": (1, 4, 9, 9), "padding": (1, 0), "groups": 2}),
    ],
)  # fmt: skip
def test_every_way_to_call_is_seen(call: Any, expected: dict[str, Any]) -> None:
    (layer,) = models.layers(Called(call), "called", (2, 4, 9, 9))
    sizes = {"input": (2, 4, 9, 9), "weight": (4, 2, 3, 2), "about": ""} | expected
    assert layer == Workload(name="called_01", model="called", first=1, **sizes)
    assert layer.problem.flops > 0


@pytest.mark.parametrize(
    ("module", "sound", "expected"),
    [
        (nn.Conv1d(4, 6, 5, stride=2, padding=3, dilation=2, groups=2), (4, 20),
         {"input": (2, 4, 20), "weight": (6, 2, 5), "stride": (2,), "padding": (3,),
          "dilation": (2,), "groups": 2}),
        (nn.Conv1d(4, 4, 4, padding="same"), (4, 20),
         {"input": (2, 4, 20), "weight": (4, 4, 4), "padding": (1, 2)}),
        (nn.ConvTranspose1d(4, 6, 5, 3, 2, 1, groups=2, dilation=2), (4, 20),
         {"input": (2, 4, 20), "weight": (4, 3, 5), "stride": (3,), "padding": (2,),
          "dilation": (2,), "groups": 2, "transposed": True, "output_padding": (1,)}),
        (nn.ConvTranspose2d(4, 6, (5, 3), 2, 1), (4, 8, 9),
         {"input": (2, 4, 8, 9), "weight": (4, 6, 5, 3), "stride": (2, 2), "padding": (1, 1),
          "transposed": True}),
        (nn.Conv3d(4, 6, (3, 1, 2), (1, 2, 2), (1, 0, 1), groups=2), (4, 3, 8, 9),
         {"input": (2, 4, 3, 8, 9), "weight": (6, 2, 3, 1, 2), "stride": (1, 2, 2),
          "padding": (1, 0, 1), "groups": 2}),
        (nn.ConvTranspose3d(4, 6, 2, (1, 2, 2), output_padding=(0, 1, 0)), (4, 3, 8, 9),
         {"input": (2, 4, 3, 8, 9), "weight": (4, 6, 2, 2, 2), "stride": (1, 2, 2),
          "transposed": True, "output_padding": (0, 1, 0)}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_layers_of_all_kinds_are_seen(
    module: nn.Module, sound: tuple[int, ...], expected: dict[str, Any]
) -> None:
    (layer,) = models.layers(nn.Sequential(module), "net", (2, *sound))
    assert layer == Workload("net_01", "0", model="net", first=1, **expected)
    with torch.device("meta"):
        output = module.to("meta")(torch.empty(2, *sound))
    assert layer.output == output.shape


def test_layers_that_no_workload_has_are_named() -> None:
    beyond = nn.Sequential(nn.ConvTranspose1d(1, 1, 3, stride=2, dilation=4, output_padding=3))
    with pytest.raises(WorkloadError, match="0: output_padding should be below the stride"):
        models.layers(beyond, "beyond", (1, 1, 8))


def test_a_layer_may_be_first_once_of_several() -> None:
    alike = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3)))
    (layer,) = models.layers(alike, "alike", (1, 3, 8, 8))
    assert (layer.count, layer.first) == (3, 1)


@pytest.mark.parametrize(
    ("network", "named"),
    [
        (nn.Linear(8, 8), "this has no convolution"),
        (nn.Conv2d(4, 4, 3), "this cannot be run on images of 1x3x8x8: ."),
        (Called(lambda x, w: x[x.sum().item() > 0]), "cannot be run on images of 1x3x8x8: "),
    ],
)
def test_networks_without_layers_are_explained(network: nn.Module, named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        models.layers(network, "this", (1, 3, 8, 8))


# --- Libraries ------------------------------------------------------------------------------------


def _video(*, weights: Any = "trained") -> nn.Module:
    assert weights is None
    return nn.Conv3d(3, 4, 3)


def _other_video(*, weights: Any = "trained") -> nn.Module:
    return _video(weights=weights)


_video.__module__ = "torchvision.models.video.resnet"
_other_video.__module__ = "torchvision.models.video.s3d"


class FakeTorchvision(SimpleNamespace):
    """The part of torchvision.models that is used; arguments that would download fail."""

    @staticmethod
    def _resnet(*, weights: Any = "trained") -> nn.Module:
        assert weights is None
        return Network()

    @staticmethod
    def _segmentation(*, weights: Any = None, weights_backbone: Any = "trained") -> nn.Module:
        assert weights is weights_backbone is None
        return nn.Conv2d(3, 4, 3, dilation=2)

    def get_model_builder(self, name: str) -> Any:
        known = {"deeplabv3_resnet50": self._segmentation, "r3d_18": _video, "s3d": _other_video}
        return known.get(name, self._resnet)

    def get_model(self, name: str, **options: Any) -> nn.Module:
        return self.get_model_builder(name)(**options)

    def list_models(self) -> list[str]:
        return ["deeplabv3_resnet50", "inception_v3", "r3d_18", "resnet50", "s3d"]


def create_model(name: str, *, pretrained: bool) -> nn.Module:
    assert not pretrained
    network = nn.Conv2d(1, 4, 3)
    network.default_cfg = {"input_size": (1, 20, 24)} if name == "own_size" else {}
    return network if name == "own_size" else Network()


TORCHVISION = FakeTorchvision()
TIMM = SimpleNamespace(
    is_model=lambda name: name in ("own_size", "resnet50"),
    list_models=lambda: ["own_size", "resnet50"],
    create_model=create_model,
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs the given fake libraries, and hides the real ones."""

    def put(torchvision: Any = None, timm: Any = None) -> None:
        monkeypatch.setitem(sys.modules, "torchvision", torchvision)
        monkeypatch.setitem(sys.modules, "torchvision.models", torchvision)
        monkeypatch.setitem(sys.modules, "timm", timm)

    return put


@pytest.mark.parametrize(
    ("name", "options", "image"),
    [
        ("resnet50", (), (64, 3, 224, 224)),
        ("resnet50", (8, 64), (8, 3, 64, 64)),
        ("inception_v3", (), (64, 3, 299, 299)),
        ("deeplabv3_resnet50", (2,), (2, 3, 224, 224)),
        ("own_size", (2,), (2, 1, 20, 24)),
        ("r3d_18", (2,), (2, 3, 16, 112, 112)),
        ("s3d", (2, 64), (2, 3, 16, 64, 64)),
        ("own_size", (2, 32), (2, 1, 32, 32)),
    ],
)
def test_models_are_built_untrained_at_their_size(
    install: Callable[..., None], name: str, options: Any, image: tuple[int, ...]
) -> None:
    install(TORCHVISION, TIMM)
    first = models.workloads(name, *options)[0]
    assert (first.name, first.input) == (f"{name}_01", image)


BENCH = ["bench", *FAST, "--model"]


def test_a_broken_library_is_reported(
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(TORCHVISION)
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.syspath_prepend(tmp_path)
    for line, named in (
        ("import missing_package", "No module named 'missing_package'"),
        ("raise RuntimeError('no operator nms')", "no operator nms"),
    ):
        (tmp_path / "timm.py").write_text(f"{line}\n")
        assert cli.main([*BENCH, "own_size"]) == 2
        said = capsys.readouterr().err
        assert said == f"fastconv: timm is installed, but cannot be imported: {named}\n"
    assert models.workloads("resnet50", 1, 8)  # It needs no timm.


@pytest.mark.parametrize(
    ("libraries", "arguments", "named"),
    [
        ((), ["resnet50"], "resnet50 needs torchvision or timm: pip install torchvision"),
        ((TORCHVISION, None), ["resnet5"],
         "no model 'resnet5' in torchvision (timm is not installed): the closest are resnet50"),
        ((None, TIMM), ["zzz"],
         "no model 'zzz' in timm (torchvision is not installed): no similar name is known"),
        ((TORCHVISION, TIMM), ["own-size"],
         "no model 'own-size' in torchvision or timm: the closest are own_size"),
        ((TORCHVISION, TIMM), ["deeplabv3_resnet50", "--image", "4"],
         "deeplabv3_resnet50 cannot be run on images of 64x3x4x4: "),
        ((TORCHVISION, TIMM), ["resnet50", "--batch", "0"], "--batch: should be a whole number"),
    ],
)  # fmt: skip
def test_bad_models_are_named(
    install: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    libraries: Any,
    arguments: list[str],
    named: str,
) -> None:
    install(*libraries)
    try:
        status = cli.main([*BENCH, *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


# --- Sums -----------------------------------------------------------------------------------------


def test_models_are_measured_and_summed(
    install: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(TORCHVISION, TIMM)
    path, table = tmp_path / "results.json", tmp_path / "table.md"
    arguments = ["resnet50", "--model", "own_size", "--batch", "2", "--image", "16"]
    arguments += ["--pass", "all", "--dtype", "bfloat16", "--format", "nhwc"]
    assert cli.main([*BENCH, *arguments, "--output", str(path)]) == 0
    shown = capsys.readouterr().out
    found = results.read(path)
    assert len(found.rows) == 4 * 3
    assert {row.case.workload.input[0] for row in found.rows} == {2}  # Models are not scaled down.
    contents = json.loads(path.read_text())
    assert contents["rows"][0]["workload"]["count"] == 2
    sums = {(one.model, one.direction): one for one in found.sums}
    assert {key: one.layers for key, one in sums.items()} == {
        ("resnet50", "forward"): 6, ("resnet50", "input_grad"): 4, ("resnet50", "weight_grad"): 6,
        ("own_size", "forward"): 1, ("own_size", "weight_grad"): 1,
    }  # fmt: skip
    grads = [row for row in found.rows if row.case.direction == "input_grad"]
    expected = sum(row.ours.ms * n for row, n in zip(grads, (0, 3, 1, 0), strict=True))
    assert sums["resnet50", "input_grad"].ours.ms == pytest.approx(expected)
    assert [one["speedup"] for one in contents["sums"]] == [one.speedup for one in found.sums]
    assert cli.main(["report", str(path), "--quiet", "--markdown", str(table)]) == 0
    for text in (shown, table.read_text(encoding="utf-8")):
        assert text.count("resnet50: sum") == 3
        assert "count: how many such layers the model has" in " ".join(text.split())


def _row(layer: Workload, ours: float, peer: float, spread: float = 0.01) -> Row:
    times = Timing(ours, spread, 7, 5.0), Timing(peer, 0.01, 7, 5.0)
    case = Case(layer, "forward", "bfloat16", None, "nhwc")
    return Row(case, "", *times, "PyTorch", Limit("memory", 0.1, 10, 10))


def test_sums_say_what_they_are_of() -> None:
    stem, body, head = models.layers(Network(), "network", (2, 3, 8, 8))
    rows = [_row(stem, 1.0, 3.0), _row(body, 2.0, 2.0, 0.1), _row(head, 0.01, 0.01, 0.9)]
    (found,) = Results({}, None, rows).sums
    assert report.sum_cells(found)[:8] == (
        "network: sum", "forward", "bfloat16", "nhwc", "6", "8.01 ±8%", "12.01 ±1%", "1.50x",
    )  # fmt: skip
    rows[0] = Row(rows[0].case, "", error="out of memory")
    (found,) = Results({}, None, rows).sums
    assert report.sum_cells(found)[4:8] == ("4 of 6", "6.01 ±10%", "6.01 ±1%", "1.00x?")
    assert report.row_cells(rows[0])[4:6] == ("2", "failed")
    assert not Results({}, None, rows[:1]).sums
    plain = Workload("plain", "", (1, 1, 8, 8), (1, 1, 3, 3))
    alone = Results({}, None, [_row(plain, 1.0, 1.0)])
    assert not alone.sums
    assert report.NOTES["count"] not in report.note(alone)
    assert "| count |" not in report.markdown(alone)


def test_pages_have_sums_below_what_is_sorted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stem, *_ = models.layers(Network(), "network", (2, 3, 8, 8))
    path, page = tmp_path / "results.json", tmp_path / "page.html"
    Results({}, None, [_row(stem, 1.0, 2.0)]).write(path)
    assert cli.main(["report", str(path), "--quiet", "--html", str(page)]) == 0
    foot = page.read_text(encoding="utf-8").partition("<tfoot>")[2].partition("</tfoot>")[0]
    assert "network: sum" in foot
    assert "2.00x" in foot


def test_counts_are_kept_and_checked() -> None:
    stem, *_ = models.layers(Network(), "network", (2, 3, 8, 8))
    entry = json.loads(json.dumps(to_dict(stem)))
    assert from_dict(entry) == stem
    plain = to_dict(Workload("plain", "", (1, 1, 8, 8), (1, 1, 3, 3)))
    assert not plain.keys() & {"model", "count", "first"}  # Older versions do not read these keys.
    for wrong, named in (
        ({"count": 0}, "count takes whole numbers from 1"),
        ({"first": -1}, "first takes whole numbers from 0"),
        ({"first": 3}, "first should be at most count, 2: it is 3"),
        ({"model": None}, "model should be text, but got None"),
    ):
        with pytest.raises(ValueError, match=named):
            from_dict(entry | wrong)
