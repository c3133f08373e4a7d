"""Exported files of sequences and transposed convolutions."""

from __future__ import annotations

import inspect
import re
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import exported_file
import exported_layers as layer_checks
import fastconv
import nvrtc as other_nvrtc
from exported_launches import compare, compile_by_nvcc, compile_by_nvrtc, emulate, kernels_of
from exports import REFERENCE, all_layers, exported, exported_layers
from fastconv import cli
from fastconv.exporter import ExportError, plans
from fastconv.kernels.hopper import passes
from fastconv.kernels.hopper.passes import _on_slabs
from fastconv.kernels.hopper.wgrad_implicit_gemm.plan import HALO_SOURCE
from fastconv.problem import Padding, Problem
from fastconv.workloads import parse_shape

# Layers that are small enough to emulate, as Python, with the shape of their input.
SMALL = {
    "sequence": ("nn.Conv1d(8, 16, 5, padding=2)", (2, 8, 96)),
    "transposed sequence": ("nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1)", (2, 16, 48)),
    "transposed": ("nn.ConvTranspose2d(8, 16, (3, 5), padding=(1, 2))", (2, 8, 12, 40)),
    "depthwise sequence": ("nn.Conv1d(6, 6, 4, padding=3, groups=6)", (2, 6, 40)),
    "volume": ("nn.Conv3d(4, 8, 3, padding=1)", (1, 4, 3, 6, 12)),
    "along time": ("nn.Conv3d(8, 16, (3, 1, 1), padding=(1, 0, 0))", (2, 8, 6, 5, 20)),
    "upsampled volume": ("nn.ConvTranspose3d(8, 4, 2, stride=2)", (1, 8, 3, 4, 10)),
    "depthwise, transposed": ("nn.ConvTranspose1d(6, 6, 4, 2, 1, groups=6)", (2, 6, 40)),
}  # fmt: skip


# --- The text and the Python code of a file -------------------------------------------------------


@pytest.mark.parametrize("check", layer_checks.CHECKS, ids=lambda check: check.__name__)
def test_python_code(check: Any) -> None:
    check(exported_file.load(all_layers()))


def test_files_have_other_layers_only_where_models_do() -> None:
    assert "ConvTranspose" not in exported("dilated5x9").read_text(encoding="utf-8")
    text = all_layers().read_text(encoding="utf-8")
    assert text.count("def pytorch_twin") == 1
    assert "\n\n\n\n" not in text
    assert "Convolutions in one file" in text
    one = exported_layers(*SMALL["transposed"]).read_text(encoding="utf-8")
    assert "A transposed convolution in one file" in one


def test_references_keep_their_parameters(tmp_path: Path) -> None:
    path = exported_layers(*SMALL["transposed sequence"])
    reference = exported_file.load(path.parent / "reference.py")
    models = []
    for make in (exported_file.load(path).ModelNew, reference.Model):
        torch.manual_seed(2)
        models.append(make())
    ours, theirs = (model.state_dict() for model in models)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("layer", "input", "expected"),
    [
        (
            "nn.Conv1d(6, 9, 3, 2, 1, 2, 3)", (2, 6, 31),
            Problem.of((2, 6, 1, 31), (9, 2, 1, 3), (1, 2), Padding(0, 0, 1, 1), (1, 2), 3),
        ),
        (
            "nn.ConvTranspose1d(4, 6, 3, 2, 1, 1)", (2, 4, 10),
            Problem.of((2, 6, 1, 20), (4, 6, 1, 3), (1, 2), Padding(0, 0, 1, 1), (1, 1), 1),
        ),
        (
            "nn.ConvTranspose2d(4, 6, (3, 5), groups=2)", (2, 4, 7, 8),
            Problem.of((2, 6, 9, 12), (4, 3, 3, 5), (1, 1), Padding(0, 0, 0, 0), (1, 1), 2),
        ),
        # The output goes beyond what the weight reaches: the file computes that without padding.
        (
            "nn.ConvTranspose1d(4, 6, 3, padding=1, output_padding=2, dilation=3)", (2, 4, 9),
            Problem.of((2, 6, 1, 15), (4, 6, 1, 3), (1, 1), Padding(0, 0, 0, 0), (1, 3), 1),
        ),
        (
            "nn.Conv3d(4, 6, (3, 2, 1), (1, 2, 1), (1, 0, 0))", (2, 4, 5, 6, 7),
            Problem.of(
                (2, 4, 5, 6, 7), (6, 4, 3, 2, 1), (1, 2, 1), (1, 1, 0, 0, 0, 0), (1, 1, 1), 1
            ),
        ),
        (
            "nn.ConvTranspose3d(4, 6, 3, 2, 1, 1)", (2, 4, 3, 4, 5),
            Problem.of(
                (2, 6, 6, 8, 10), (4, 6, 3, 3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1
            ),
        ),
    ],
    ids=["sequence", "output padding", "groups", "beyond", "volume", "transposed volume"],
)  # fmt: skip
def test_what_files_are_tuned_for(layer: str, input: tuple[int, ...], expected: Problem) -> None:
    module = exported_file.load(exported_layers(layer, input))
    ran = exported_file.on_cpu(module, "sm_90a")
    module.ModelNew()(torch.randn(input))
    geometry = module.EXPORTED
    assert geometry.input == expected.input_shape
    assert geometry.weight == expected.weight_shape
    stride, sides, dilation, _ = expected.geometry
    assert (geometry.stride, geometry.dilation) == (stride, dilation)
    assert geometry.padding == sides[::2]
    # The model's call runs the tuned plan.
    ((which, plan),) = ran
    precision = module.float32_precision()
    assert plan == module.TUNED["sm_90a", which, geometry, "float", precision](
        lambda blocks: blocks
    )


def test_called_with_an_output_size(tmp_path: Path) -> None:
    path, output = tmp_path / "reference.py", tmp_path / "exported.py"
    layers, call = (
        "nn.ConvTranspose2d(4, 2, 3, stride=2)",
        "self.layers[0](x, output_size=[10, 12])",
    )
    text = REFERENCE.format(layers=layers, input=(2, 4, 4, 5)).replace("self.layers(x)", call)
    path.write_text(text, encoding="utf-8")
    fastconv.export(reference=path, output=output)
    assert exported_file.load(output).EXPORTED.input == (2, 2, 10, 12)


def test_sequences_of_portable_kernels_have_plans_of_the_package() -> None:
    """The file's own plan for them is for images of several rows."""
    problem = Problem.of((1, 4, 1, 50), (4, 4, 1, 3), (1, 2), Padding(0, 0, 0, 0), (1, 1), 1)
    found = {(one.target, one.which) for one in plans.tuned([problem], ["float32"])}
    assert len(found) == 9


# --- A shape or a workload ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            "2x6x31 9x2x3 stride=2 padding=1 dilation=2 groups=3",
            nn.Conv1d(6, 9, 3, 2, 1, 2, 3, bias=False),
        ),
        (
            "2x4x10 4x6x3 transposed stride=2 padding=1 output_padding=1",
            nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, bias=False),
        ),
        (
            "2x4x7x8 4x3x3x5 transposed stride=2,3 padding=1,2 output_padding=0,2 groups=2",
            nn.ConvTranspose2d(4, 6, (3, 5), (2, 3), (1, 2), (0, 2), 2, bias=False),
        ),
        (
            "2x3x4x7x8 6x3x3x3x3 stride=1,2,2 padding=1",
            nn.Conv3d(3, 6, 3, (1, 2, 2), 1, bias=False),
        ),
        (
            "2x4x3x4x5 4x2x2x2x2 transposed stride=2",
            nn.ConvTranspose3d(4, 2, 2, 2, bias=False),
        ),
    ],
    ids=["conv1d", "conv_transpose1d", "conv_transpose2d", "conv3d", "conv_transpose3d"],
)
def test_shapes(
    tmp_path: Path, shape: str, expected: nn.Module, request: pytest.FixtureRequest
) -> None:
    path, name = tmp_path / "model.py", request.node.callspec.id
    text = fastconv.export(shape=shape, output=path)
    assert f'fastconv export --shape "{shape}"\n' in text
    module = exported_file.load(path)
    ran = exported_file.on_cpu(module, "sm_90a")
    model = module.ModelNew()
    model.load_state_dict({f"{name}.weight": expected.weight})
    workload = parse_shape(shape)
    x = torch.randn(workload.input)
    torch.testing.assert_close(model(x), expected(x))
    assert f"self_check(ModelNew(), {workload.input})" in text
    ((which, plan),) = ran
    key = ("sm_90a", which, module.EXPORTED, "float", module.float32_precision())
    assert plan == module.TUNED[key](lambda blocks: blocks)
    # The arguments have PyTorch's names, in PyTorch's order.
    theirs = [*inspect.signature(type(expected)).parameters]
    ours = [*inspect.signature(module.ModelNew).parameters]
    assert ours == theirs[: len(ours)]


def test_attributes(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "2x4x10 4x6x3 transposed"
    assert cli.main(["export", "--shape", shape, "--attribute", "up"]) == 0
    printed = capsys.readouterr().out
    assert "self.up = ConvTranspose1d(" in printed
    assert f'--shape "{shape}" --attribute up' in printed
    assert cli.main(["export", "--shape", shape, "--bare"]) == 0
    assert "class ModelNew(ConvTranspose1d):" in capsys.readouterr().out


def test_padding_of_each_side_is_refused() -> None:
    with pytest.raises(ExportError, match=re.escape("nn.Conv1d pads both sides alike, but got")):
        fastconv.export(shape="2x4x10 6x4x3 padding=2,0")


# --- Results, whose kernels run in the emulator ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "architecture", "shared_kib", "family"),
    [
        ("sequence", "sm_90a", 227, "hopper"),
        ("sequence", "sm_100", 227, "ampere"),
        ("transposed sequence", "sm_90a", 227, "hopper"),
        ("transposed sequence", "sm_89", 99, "ampere"),
        ("transposed", "sm_90a", 227, "hopper"),
        ("transposed", "sm_80", 163, "ampere"),
        ("depthwise sequence", "sm_120", 99, "depthwise"),
        ("depthwise, transposed", "sm_90a", 227, "depthwise"),
        ("volume", "sm_90a", 227, None),
        ("volume", "sm_80", 163, None),
        ("along time", "sm_90a", 227, "hopper"),
        ("along time", "sm_80", 163, "ampere"),
        ("upsampled volume", "sm_90a", 227, None),
    ],
)
def test_tuned_results(name: str, architecture: str, shared_kib: int, family: str | None) -> None:
    """``family`` is one that computes a pass; None where the portable one may compute all."""
    layer, shape = SMALL[name]
    module = exported_file.load(exported_layers(layer, shape))
    sources = emulate(module, architecture, shared_kib)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        compare(module, module.ModelNew(), torch.randn(shape), 1e-3)
    assert family in {None, *(source.split("/")[0] for source in sources)}


TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(
    ("name", "dtype", "channels_last"),
    list(zip(layer_checks.LAYERS, cycle(TOLERANCE), cycle([False, True]), strict=False)),
)
def test_portable_results(name: str, dtype: torch.dtype, channels_last: bool) -> None:
    module = exported_file.load(all_layers())
    sources = emulate(module, "sm_75")
    layer, _, x = layer_checks.pair(module, name)
    x = layer_checks.formats(x.to(dtype))[channels_last]
    compare(module, layer.to(dtype), x, TOLERANCE[dtype])
    assert all(source.startswith("direct/") for source in sources)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tuned_results_in_16_bits(dtype: str) -> None:
    layer, shape = SMALL["transposed sequence"]
    module = exported_file.load(exported_layers(layer, shape, "float16", "bfloat16"))
    sources = emulate(module, "sm_90a", 227)
    kind = getattr(torch, dtype)
    compare(module, module.ModelNew().to(kind), torch.randn(shape).to(kind), 1e-2)
    assert "hopper" in {source.split("/")[0] for source in sources}


def test_tuned_results_of_boxes() -> None:
    """A weight gradient on channels-last copies has tensor maps of regions of the workspace."""

    def free(*asked: Any) -> Any:
        return 0.0, _on_slabs(*asked)[1]

    layer, shape = "nn.Conv3d(8, 16, (3, 2, 3), stride=(1, 1, 2), padding=1)", (2, 8, 4, 21, 19)
    with mock.patch.object(passes, "_WEIGHT_GRADS_OF_VOLUMES", (free,)):
        module = exported_file.load(exported_layers(layer, shape, "float16"))
    sources = emulate(module, "sm_90a", 227)
    compare(module, module.ModelNew().half(), torch.randn(shape).half(), 1e-2)
    assert {"hopper/relayout/kernel.cuh", HALO_SOURCE} <= set(sources)


# --- Device code ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "architecture", "made_for"),
    [
        ("sequence", "sm_90a", "sm_90a"),
        ("transposed sequence", "sm_80", "sm_80"),
        ("transposed", "sm_120a", "sm_86"),
        ("depthwise sequence", "sm_90a", "sm_90a"),
    ],
)
def test_device_code_compiles(name: str, architecture: str, made_for: str) -> None:
    module = exported_file.load(exported_layers(*SMALL[name]))
    kernels = kernels_of(module, made_for, "float", "tf32")
    log = compile_by_nvrtc(module.device_code(kernels), architecture)
    for number in range(len(module.configurations(kernels))):
        assert f"kernels_{number}" in log  # ptxas reports on the functions of each namespace


@pytest.mark.parametrize("name", ["sequence", "transposed"])
def test_device_code_compiles_for_volta_with_cuda_11(name: str) -> None:
    path = other_nvrtc.find(11)
    if path is None:
        pytest.skip("nvidia-cuda-nvrtc-cu11 is not installed")
    module = exported_file.load(exported_layers(*SMALL[name]))
    code = module.device_code(kernels_of(module, "", "float", "ieee"))
    options = ["-std=c++17", "--gpu-architecture=sm_70"]
    assert other_nvrtc.Nvrtc(path).compile(code, {}, options)[0]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_nvcc_compiles_device_and_host_code(tmp_path: Path) -> None:
    module = exported_file.load(exported_layers(*SMALL["transposed"]))
    kernels = kernels_of(module, "sm_90a", "float", "tf32")
    compile_by_nvcc(module, kernels, ["compute_90a,code=sm_90a"], tmp_path)


# --- What cannot be exported ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "input", "message"),
    [
        (
            "nn.Conv1d(2, 3, 3), nn.LazyConv1d(2, 3)", (1, 2, 9),
            "constructs LazyConv1d, which an exported file cannot replace: supported are "
            "nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d and "
            "nn.ConvTranspose3d",
        ),
        ("nn.Linear(4, 4)", (1, 4), "constructs no nn.Conv1d, nn.Conv2d, nn.Conv3d,"),
        (
            "nn.Conv1d(2, 3, 3, padding=1, padding_mode='circular')", (1, 2, 9),
            "padding should be numbers of zeros, but got (1,) in mode 'circular'",
        ),
        (
            "nn.ConvTranspose1d(2, 3, 3)", (2, 9),
            "take inputs of 3 dimensions, the first of which is the batch, but ConvTranspose1d got "
            "one of shape (2, 9)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_exported(layers: str, input: tuple[int, ...], message: str) -> None:
    with pytest.raises(ExportError, match=re.escape(message)):
        exported_layers(layers, input)
