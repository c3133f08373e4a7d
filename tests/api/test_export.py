"""Exported files: their text, that they compile, and that they compute the right results."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import exported_file
import fastconv
import nvrtc as other_nvrtc
from exported_launches import compile_by_nvcc, compile_by_nvrtc, kernels_of, launches
from exports import SMALL, all_layers, exported, narrow, small
from fastconv.exporter import file, plans
from fastconv.exporter.file import PARTS
from fastconv.kernels import ampere, depthwise, family, gpus, hopper
from fastconv.kernels.gpus import GPUS
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING, Workload, parse_shape

__all__ = ["narrow", "small"]  # Tests below use these fixtures by their names.

ROOT = Path(__file__).parents[2]
NAMES = [workload.name for workload in FOUNDING]
PATHS = {**{name: partial(exported, name) for name in NAMES}, "layers": all_layers}
PASSES = ("forward", "input_grad", "weight_grad")


# --- The text of files ---------------------------------------------------------------------------


def test_the_example_is_what_export_writes() -> None:
    example = ROOT / "examples/dilated5x9.py"
    text = exported(example.stem).read_text(encoding="utf-8")
    assert example.read_text(encoding="utf-8") == text, "make examples writes it again"


@pytest.mark.parametrize("name", PATHS)
def test_files_import_only_torch_and_the_standard_library(name: str) -> None:
    tree = ast.parse(PATHS[name]().read_text(encoding="utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    others = {str(module).split(".")[0] for module in modules} - {"torch"}
    assert others <= sys.stdlib_module_names


# Programs that judge generated kernels search files for these words, docstrings included.
SUSPICIOUS = {
    "hidden errors": r"\btry\s*:|\bexcept\b|\bpass\b",
    "threads": r"import\s+threading|concurrent\.futures|multiprocessing",
    "streams of its own": r"cuda\.Stream\(|with\s+torch\.cuda\.stream|_stream\(\w",
    "layers of PyTorch": r"torch\.nn\.(?!Module\b|Parameter\b|init\b)|\bF\.|nn\.functional",
    "statements before others": r"from __future__",
    "waiting": r"torch\.cuda\.synchronize|cudaDeviceSynchronize|cudaStreamSynchronize",
}


@pytest.mark.parametrize("what", SUSPICIOUS)
@pytest.mark.parametrize("name", PATHS)
def test_files_have_nothing_suspicious(name: str, what: str) -> None:
    text = PATHS[name]().read_text(encoding="utf-8")
    code = "\n".join(re.split("#|//", line)[0] for line in text.splitlines())
    assert re.findall(SUSPICIOUS[what], code) == []


@pytest.mark.parametrize("name", PATHS)
def test_files_can_be_executed_among_other_names(name: str) -> None:
    """Some programs execute a file after other code, in a namespace with a reference's names."""
    others = {"batch_size": 1, "in_channels": 2, "stride": 3, "height": 4, "Model": 5, "x": 6}
    names: dict[str, Any] = dict(others)
    exec("import os\n" + PATHS[name]().read_text(encoding="utf-8"), names)
    assert {key: names[key] for key in others} == others
    weights = [name for name in names["ModelNew"]().state_dict() if name.endswith("weight")]
    assert len(weights) == (5 if name == "layers" else 1)


def test_a_source_that_another_one_includes_is_there_once() -> None:
    kernels = [f"hopper/wgrad_implicit_gemm/{name}.cuh" for name in ("kernel", "halo_kernel")]
    names = re.findall(r'^SOURCES\["(.*)"\] = ', file._device_code(kernels), re.MULTILINE)
    assert len(names) == len(set(names)) > len(kernels)
    assert names[:2] == kernels


def test_parts_have_no_names_in_common() -> None:
    """But for the self-check's twin, in whose place a file with other layers has another."""
    names: list[str] = []
    for part in ("contents", "portable", "runtime", "self_check", "layers", "layer_twins"):
        tree = ast.parse((PARTS / f"{part}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.append(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    assert len(names) > 50
    names.remove("pytorch_twin")
    assert len(names) == len(set(names))


# --- The Python code of a file --------------------------------------------------------------------


@pytest.mark.parametrize("check", exported_file.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_python_code(name: str, check: Any) -> None:
    check(exported_file.load(exported(name)))


@pytest.mark.skipif(
    "FASTCONV_OLDEST_TORCH" not in os.environ,
    reason="FASTCONV_OLDEST_TORCH names no Python with torch 2.0.1: make test-oldest-torch",
)
def test_python_code_with_the_oldest_torch() -> None:
    python = os.environ["FASTCONV_OLDEST_TORCH"]
    scripts = {"exported_file.py": map(exported, NAMES), "exported_layers.py": [all_layers()]}
    for name, paths in scripts.items():
        command = [python, ROOT / "tests/api" / name, *paths]
        subprocess.run(command, check=True, env={"PYTHONPATH": ""})


def test_bare_models_are_the_convolution_itself(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    fastconv.export("square3x3", attribute=None, output=path)
    torch.manual_seed(1)
    model = exported_file.load(path).ModelNew()
    torch.manual_seed(1)
    expected = nn.Conv2d(16, 128, 3, bias=False).state_dict()
    assert list(model.state_dict()) == ["weight"]
    assert torch.equal(model.weight, expected["weight"])


def test_the_attribute_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "named.py"
    fastconv.export("square3x3", attribute="layer", output=path)
    assert list(exported_file.load(path).ModelNew().state_dict()) == ["layer.weight"]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_arithmetic_can_be_fixed(precision: Any, tmp_path: Path) -> None:
    """Whatever PyTorch's setting, with plans for that arithmetic alone."""
    output = tmp_path / "fixed.py"
    fastconv.export(shape="2x32x16x16 32x32x3x3", output=output, precision=precision)
    module = runpy.run_path(str(output))
    assert {key[-1] for key in module["TUNED"]} == {precision}
    for allowed in (False, True):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            assert module["float32_precision"]() == precision
    with pytest.raises(fastconv.ExportError, match="'ieee' or 'tf32', but got 'bf16'"):
        fastconv.export(shape="2x8x8x8 8x8x3x3", precision="bf16")  # type: ignore[arg-type]


def test_launches_get_addresses_sizes_and_the_current_stream(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = exported_file.load(small)
    calls: list[tuple[Any, ...]] = []

    class Compiled:
        def launch(self, *arguments: Any) -> None:
            calls.append(arguments)

    class Device:
        def __init__(self, device: torch.device) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    class Stream:
        cuda_stream = 77

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    plan = module.TUNED["sm_90a", "forward", module.EXPORTED, "float", "tf32"](_same)
    kernels = tuple(module.kernel_of(launch) for launch in plan.launches)
    tensors = {name: torch.empty(4) for name in ("input", "weight", "output")}
    module.run(module.BuiltPlans({"forward": plan}, Compiled(), kernels), "forward", tensors)
    (spread,) = calls
    assert spread[:2] == (0, [plan.launches[0].grid, 384, plan.launches[0].shared_bytes, 0])
    # An absent bias is a null pointer.
    addresses = [tensors["input"], tensors["weight"], None, tensors["output"]]
    numbers = [0 if one is None else one.data_ptr() for one in addresses] + [2]
    assert spread[2] == [[number] for number in numbers]
    assert spread[3] == 77


@pytest.mark.parametrize(
    ("capability", "cuda", "architecture"),
    [
        ((7, 0), "11.8", "sm_70"),
        ((9, 0), "11.8", "sm_90"),
        ((9, 0), "12.1", "sm_90a"),
        ((12, 0), "13.0", "sm_120"),
    ],
)
def test_architectures(
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    cuda: str,
    architecture: str,
) -> None:
    module = exported_file.load(small)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert module.gpu_architecture(0) == architecture


def _same(blocks: int) -> int:
    """The ``share`` of a GPU with as many SMs as the one that a plan was made for."""
    return blocks


@pytest.mark.parametrize(
    ("gpu", "made_for"),
    [
        *((gpu, "") for gpu in ("sm_70", "sm_75")),
        *((gpu, "sm_80") for gpu in ("sm_80", "sm_87", "sm_100a", "sm_103a")),
        *((gpu, "sm_86") for gpu in ("sm_86", "sm_89", "sm_120a", "sm_121a")),
        ("sm_90a", "sm_90a"),
    ],
)
def test_gpus_have_plans_that_fit_them(
    small: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, made_for: str
) -> None:
    module, device = exported_file.load(small), GPUS[gpu]
    capability = divmod(gpus.number(device), 10)
    shared = device.shared_bytes_per_block
    _pretend(monkeypatch, module, capability, device.sm_count, shared)
    operands = module.Operands("float", 4, False, True)
    for precision in ("tf32", "ieee"):
        found = module.plan_and_build(PASSES, module.EXPORTED, operands, precision, 0).plans
        for which, plan in found.items():
            expected = _expected(parse_shape(SMALL).problem, which, precision, made_for)
            folders = {launch.source.split("/")[0] for launch in plan.launches}
            assert folders == {"direct" if expected is None else expected.family}
            assert all(launch.shared_bytes <= shared for launch in plan.launches)


FAMILIES = {
    "sm_90a": (hopper, depthwise),
    "sm_80": (ampere, depthwise),
    "sm_86": (ampere, depthwise),
    "": (),
}


def _expected(problem: Problem, which: str, precision: str, made_for: str) -> family.Plan | None:
    """The plan of the first family that takes the problem; None for the portable kernels."""
    operands = plans._operands(plans._seen(problem, which), "float32", precision)
    for one in FAMILIES[made_for]:
        with suppress(family.Declined):
            return getattr(one, which)(problem, operands, GPUS[made_for])
    return None


def _pretend(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    capability: tuple[int, int],
    sm_count: int,
    shared_bytes: int,
) -> None:
    """Has the module find the given GPU, and compile nothing."""
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sm_count,
        shared_memory_per_block_optin=shared_bytes,
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(module, "build", lambda kernels, architecture: None)


@pytest.mark.parametrize(
    ("architecture", "kib", "made_for"),
    [
        ("sm_90", 227, "sm_80"),  # CUDA 11 compiles for sm_90, without the "a".
        ("sm_88", 99, "sm_86"),  # This package does not list sm_88.
        ("sm_130", 300, "sm_80"),
        ("sm_130", 162, "sm_86"),
        ("sm_130", 98, ""),
    ],
)
def test_other_gpus(small: Path, architecture: str, kib: int, made_for: str) -> None:
    assert exported_file.load(small).target(architecture, kib * 1024) == made_for


@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
def test_plans_are_the_packages(workload: Workload) -> None:
    module = exported_file.load(exported(workload.name))
    for target, which, precision in product(plans.TARGETS, PASSES, ("tf32", "ieee")):
        tuned = module.TUNED.get((target, which, module.EXPORTED, "float", precision))
        expected = _expected(workload.problem, which, precision, target)
        assert (tuned is None) == (expected is None)
        if tuned is not None and expected is not None:
            found = tuned(_same)
            # Unlike ==, repr distinguishes True from 1.
            assert repr(launches(found)) == repr([*expected.launches])
            assert found.scratch_bytes == expected.scratch_bytes


@pytest.mark.parametrize("sm_count", [16, 82, 148])
@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_blocks_are_as_many_as_the_gpu_has_room_for(target: str, sm_count: int) -> None:
    module = exported_file.load(exported("square3x3"))
    operands = module.Operands("float", 4, False, True)

    def planned(which: str, count: int) -> Any:
        return module.plan_of(which, module.EXPORTED, operands, "tf32", target, count)

    others = GPUS[target].sm_count
    both = (planned("forward", count).launches for count in (sm_count, others))
    for ours, theirs in zip(*both, strict=True):
        assert ours.grid * others == theirs.grid * (
            sm_count if ours.entry == "convolve" else others
        )
    plan, other = (planned("weight_grad", count) for count in (sm_count, others))
    (sums, added), (other_sums, _) = plan.launches, other.launches
    tiles, workers = sums.arguments[-3:-1]
    assert sums.grid == tiles * workers
    assert added.arguments[-2:] == (tiles, workers)
    assert plan.scratch_bytes * other_sums.grid == other.scratch_bytes * sums.grid
    assert 0 <= other_sums.grid * sm_count / others - sums.grid < tiles


def test_gpus_before_volta_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = exported_file.load(small)
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    with pytest.raises(RuntimeError, match=r"GTX 1080 has compute capability 6\.1"):
        module.gpu_architecture(0)


def test_a_missing_gpu_is_told_in_a_sentence(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Using the imported file raises an error; running it exits without a traceback."""
    module = exported_file.load(small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, sentence in (("12.8", "PyTorch finds none here"), (None, "is built without it")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(RuntimeError, match=f"kernels need an NVIDIA GPU.*{sentence}"):
            module.ModelNew()(torch.randn(2, 8, 12, 40))
        with pytest.raises(SystemExit, match=f"kernels need an NVIDIA GPU.*{sentence}"):
            runpy.run_path(str(small), run_name="__main__")


# --- Device code ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scalar"),
    list(zip(NAMES, ["float", "fastconv::float16", "fastconv::bfloat16"], strict=True)),
)
def test_device_code_compiles_for_volta_with_cuda_11(name: str, scalar: str) -> None:
    path = other_nvrtc.find(11)
    if path is None:
        pytest.skip("nvidia-cuda-nvrtc-cu11 is not installed")
    module = exported_file.load(exported(name))
    code = module.device_code(kernels_of(module, "", scalar, "ieee"))
    compiler = other_nvrtc.Nvrtc(path)
    assert compiler.version == (11, 8)
    cubin, _ = compiler.compile(code, {}, ["-std=c++17", "--gpu-architecture=sm_70"])
    assert cubin


def test_device_code_compiles_for_ampere_with_cuda_11() -> None:
    path = other_nvrtc.find(11)
    if path is None:
        pytest.skip("nvidia-cuda-nvrtc-cu11 is not installed")
    module = exported_file.load(exported("square3x3"))
    code = module.device_code(kernels_of(module, "sm_80", "float", "tf32"))
    options = ["-std=c++17", "--gpu-architecture=sm_80"]
    assert other_nvrtc.Nvrtc(path).compile(code, {}, options)[0]


@pytest.mark.parametrize(
    ("name", "precision"), [("dilated5x9", "tf32"), ("asym5x9", "ieee"), ("square3x3", "tf32")]
)
def test_device_code_compiles_for_hopper(name: str, precision: str) -> None:
    module = exported_file.load(exported(name))
    kernels = kernels_of(module, "sm_90a", "float", precision)
    assert {source.split("/")[0] for source, _, _ in kernels} == {"hopper", "direct"}
    log = compile_by_nvrtc(module.device_code(kernels), "sm_90a")
    for number in range(len(module.configurations(kernels))):
        assert f"kernels_{number}" in log  # ptxas reports on the functions of each namespace


@pytest.mark.parametrize(
    ("name", "precision", "architecture", "made_for"),
    [
        ("dilated5x9", "tf32", "sm_80", "sm_80"),
        ("asym5x9", "ieee", "sm_86", "sm_86"),
        ("square3x3", "tf32", "sm_120a", "sm_86"),
    ],
)
def test_device_code_compiles_for_other_tensor_cores(
    name: str, precision: str, architecture: str, made_for: str
) -> None:
    module = exported_file.load(exported(name))
    kernels = kernels_of(module, made_for, "float", precision)
    assert {source.split("/")[0] for source, _, _ in kernels} == {"ampere", "direct"}
    log = compile_by_nvrtc(module.device_code(kernels), architecture)
    for number in range(len(module.configurations(kernels))):
        assert f"kernels_{number}" in log


@pytest.mark.parametrize(
    ("architecture", "made_for"),
    [("sm_80", "sm_80"), ("sm_90a", "sm_90a"), ("sm_100a", "sm_80"), ("sm_120a", "sm_86")],
)
def test_device_code_compiles_for_narrow_groups(
    narrow: Path, architecture: str, made_for: str
) -> None:
    module = exported_file.load(narrow)
    kernels = kernels_of(module, made_for, "float", "tf32")
    assert {source.split("/")[0] for source, _, _ in kernels} == {"depthwise", "direct"}
    log = compile_by_nvrtc(module.device_code(kernels), architecture)
    for number in range(len(module.configurations(kernels))):
        assert f"kernels_{number}" in log


def test_older_architectures_do_without_tensor_cores(tmp_path: Path) -> None:
    """Wide kernels on narrow groups use them, and PyTorch may compile for GPUs without them."""
    path = tmp_path / "wide.py"
    fastconv.export(shape="4x16x32x32 16x1x31x31 padding=15,15 groups=16", output=path)
    module = exported_file.load(path)
    kernels = kernels_of(module, "sm_80", "float", "tf32")
    assert "depthwise/toeplitz/planes.cuh" in {source for source, _, _ in kernels}
    compile_by_nvrtc(module.device_code(kernels), "sm_75")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    ("name", "made_for", "flags"),
    [
        ("dilated5x9", "sm_90a", ["compute_90,code=sm_90", "compute_90a,code=sm_90a"]),
        ("square3x3", "sm_90a", ["compute_90a,code=sm_90a"]),
        ("square3x3", "sm_86", ["compute_75,code=sm_75", "compute_86,code=sm_86"]),
    ],
)
def test_nvcc_compiles_device_and_host_code(
    tmp_path: Path, name: str, made_for: str, flags: list[str]
) -> None:
    """PyTorch may add an architecture that lacks the tensor cores' instructions."""
    module = exported_file.load(exported(name))
    kernels = kernels_of(module, made_for, "float", "tf32")
    compile_by_nvcc(module, kernels, flags, tmp_path)
