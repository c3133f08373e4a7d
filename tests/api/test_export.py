"""Exported files: their text, that they compile, and that they compute the right results."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import exported_file
import fastconv
import nvrtc as other_nvrtc
import tensor_maps
from emulator import corpus, run_both_orders
from emulator.driver import COMPILER
from emulator.pass_cases import SCALARS
from exports import exported
from fastconv import cli, jit
from fastconv.exporter import ExportError, plans
from fastconv.exporter.file import PARTS
from fastconv.exporter.parts import portable
from fastconv.jit import compile, nvrtc
from fastconv.kernels import ampere, depthwise, family, gpus, hopper
from fastconv.kernels.gpus import GPUS
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING, Workload, parse_shape

ROOT = Path(__file__).parents[2]
NAMES = [workload.name for workload in FOUNDING]
SMALL = "2x8x12x40 16x8x3x5 padding=1,2"
NARROW = "2x6x12x20 12x1x5x3 padding=2,1 groups=6"
PASSES = ("forward", "input_grad", "weight_grad")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file exported for a convolution that is small enough to emulate."""
    path = tmp_path_factory.mktemp("export") / "small.py"
    fastconv.export(shape=SMALL, output=path)
    return path


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file exported for a convolution that the tensor-core families decline."""
    path = tmp_path_factory.mktemp("export") / "narrow.py"
    fastconv.export(shape=NARROW, output=path)
    return path


# --- The text of files ---------------------------------------------------------------------------


def test_the_example_is_what_export_writes() -> None:
    example = ROOT / "examples/dilated5x9.py"
    text = exported(example.stem).read_text(encoding="utf-8")
    assert example.read_text(encoding="utf-8") == text, "make examples writes it again"


@pytest.mark.parametrize("name", NAMES)
def test_files_import_only_torch_and_the_standard_library(name: str) -> None:
    tree = ast.parse(exported(name).read_text(encoding="utf-8"))
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
@pytest.mark.parametrize("name", NAMES)
def test_files_have_nothing_suspicious(name: str, what: str) -> None:
    text = exported(name).read_text(encoding="utf-8")
    code = "\n".join(re.split("#|//", line)[0] for line in text.splitlines())
    assert re.findall(SUSPICIOUS[what], code) == []


@pytest.mark.parametrize("name", NAMES)
def test_files_can_be_executed_among_other_names(name: str) -> None:
    """Some programs execute a file after other code, in a namespace with a reference's names."""
    others = {"batch_size": 1, "in_channels": 2, "stride": 3, "height": 4, "Model": 5, "x": 6}
    names: dict[str, Any] = dict(others)
    exec("import os\n" + exported(name).read_text(encoding="utf-8"), names)
    assert {key: names[key] for key in others} == others
    assert names["ModelNew"]().conv2d.weight.dim() == 4


def test_parts_have_no_names_in_common() -> None:
    names: list[str] = []
    for part in ("contents", "portable", "runtime", "self_check"):
        tree = ast.parse((PARTS / f"{part}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.append(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    assert len(names) > 50
    assert len(names) == len(set(names))


# --- The Python half -----------------------------------------------------------------------------


@pytest.mark.parametrize("check", exported_file.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_python_half(name: str, check: Any) -> None:
    check(exported_file.load(exported(name)))


@pytest.mark.skipif(
    "FASTCONV_OLDEST_TORCH" not in os.environ,
    reason="FASTCONV_OLDEST_TORCH names no Python with torch 2.0.1: make test-oldest-torch",
)
def test_python_half_with_the_oldest_torch() -> None:
    python = os.environ["FASTCONV_OLDEST_TORCH"]
    script = ROOT / "tests/api/exported_file.py"
    subprocess.run([python, script, *map(exported, NAMES)], check=True, env={"PYTHONPATH": ""})


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
    operands = plans._operands(problem, "float32", precision)
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
        ("sm_90", 227, "sm_80"),  # compiled by CUDA 11
        ("sm_88", 99, "sm_86"),  # an architecture that this package does not list
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
            assert repr(_launches(found)) == repr([*expected.launches])  # repr tells True from 1
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
            sm_count if ours.entry == "correlate" else others
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


def _kernels(module: ModuleType, made_for: str, scalar: str, precision: str) -> Any:
    """All kernels of the exported geometry, with a bias."""
    operands = module.Operands(scalar, 4 if scalar == "float" else 2, False, True)
    plans = [
        module.plan_of(which, module.EXPORTED, operands, precision, made_for, 132)
        for which in (*PASSES, "bias_grad")
    ]
    launches = [launch for plan in plans for launch in plan.launches]
    return tuple(dict.fromkeys(module.kernel_of(launch) for launch in launches))


@pytest.mark.parametrize(
    ("name", "scalar"),
    list(zip(NAMES, ["float", "fastconv::float16", "fastconv::bfloat16"], strict=True)),
)
def test_device_code_compiles_for_volta_with_cuda_11(name: str, scalar: str) -> None:
    path = other_nvrtc.find(11)
    if path is None:
        pytest.skip("nvidia-cuda-nvrtc-cu11 is not installed")
    module = exported_file.load(exported(name))
    code = module.device_code(_kernels(module, "", scalar, "ieee"))
    compiler = other_nvrtc.Nvrtc(path)
    assert compiler.version == (11, 8)
    cubin, _ = compiler.compile(code, {}, ["-std=c++17", "--gpu-architecture=sm_70"])
    assert cubin


def test_device_code_compiles_for_ampere_with_cuda_11() -> None:
    path = other_nvrtc.find(11)
    if path is None:
        pytest.skip("nvidia-cuda-nvrtc-cu11 is not installed")
    module = exported_file.load(exported("square3x3"))
    code = module.device_code(_kernels(module, "sm_80", "float", "tf32"))
    options = ["-std=c++17", "--gpu-architecture=sm_80"]
    assert other_nvrtc.Nvrtc(path).compile(code, {}, options)[0]


@pytest.mark.parametrize(
    ("name", "precision"), [("dilated5x9", "tf32"), ("asym5x9", "ieee"), ("square3x3", "tf32")]
)
def test_device_code_compiles_for_hopper(name: str, precision: str) -> None:
    module = exported_file.load(exported(name))
    kernels = _kernels(module, "sm_90a", "float", precision)
    assert {source.split("/")[0] for source, _, _ in kernels} == {"hopper", "direct"}
    log = _compiled(module.device_code(kernels), "sm_90a")
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
    kernels = _kernels(module, made_for, "float", precision)
    assert {source.split("/")[0] for source, _, _ in kernels} == {"ampere", "direct"}
    log = _compiled(module.device_code(kernels), architecture)
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
    kernels = _kernels(module, made_for, "float", "tf32")
    assert {source.split("/")[0] for source, _, _ in kernels} == {"depthwise", "direct"}
    log = _compiled(module.device_code(kernels), architecture)
    for number in range(len(module.configurations(kernels))):
        assert f"kernels_{number}" in log


def test_older_architectures_do_without_tensor_cores(tmp_path: Path) -> None:
    """Wide kernels on narrow groups use them, and PyTorch may compile for GPUs without them."""
    path = tmp_path / "wide.py"
    fastconv.export(shape="4x16x32x32 16x1x31x31 padding=15,15 groups=16", output=path)
    module = exported_file.load(path)
    kernels = _kernels(module, "sm_80", "float", "tf32")
    assert "depthwise/toeplitz/planes.cuh" in {source for source, _, _ in kernels}
    _compiled(module.device_code(kernels), "sm_75")


def _compiled(code: str, architecture: str) -> str:
    """Compiles with the package's NVRTC; the log."""
    try:
        jit.nvrtc_version()
    except jit.GpuUnavailable as error:
        pytest.skip(str(error))
    program = nvrtc.Program(code, "exported.cu", {}, compile._options(architecture))
    outcome = nvrtc.compile_program(program, compile._nvrtc())
    assert not outcome.error, outcome.log
    return outcome.log


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    ("name", "made_for", "flags"),
    [
        ("dilated5x9", "sm_90a", ["compute_90,code=sm_90", "compute_90a,code=sm_90a"]),
        ("square3x3", "sm_90a", ["compute_90a,code=sm_90a"]),
        ("square3x3", "sm_86", ["compute_75,code=sm_75", "compute_86,code=sm_86"]),
    ],
)
def test_nvcc_compiles_both_halves(
    tmp_path: Path, name: str, made_for: str, flags: list[str]
) -> None:
    """PyTorch may add an architecture that lacks the tensor cores' instructions."""
    module = exported_file.load(exported(name))
    kernels = _kernels(module, made_for, "float", "tf32")
    _compile_by_nvcc(module, kernels, flags, tmp_path)


def _compile_by_nvcc(module: ModuleType, kernels: Any, flags: list[str], folder: Path) -> None:
    source = folder / "exported.cu"
    source.write_text(f"{module.device_code(kernels)}\n{module.host_code(kernels)}")
    gencode = [f"-gencode=arch={flag}" for flag in flags]
    command = ["nvcc", "-std=c++17", *gencode, "-c", source, "-o", folder / "exported.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


# --- Results, by emulation -----------------------------------------------------------------------


def _emulate(module: ModuleType, architecture: str, shared_kib: int = 0) -> list[str]:
    """Has the module run its launches in the emulator; returns the sources that it runs."""
    sources: list[str] = []

    def run(ready: Any, which: str, tensors: dict[str, Tensor]) -> None:
        plan = ready.plans[which]
        sources.extend(launch.source for launch in plan.launches)
        scratch = torch.full((plan.scratch_bytes,), 255, dtype=torch.uint8)  # NaNs
        run_both_orders(_launches(plan), {**tensors, "scratch": scratch})

    module.run = run
    module.build = lambda kernels, architecture: None
    module.check_device = lambda x, weight: None
    module.gpu_architecture = lambda device: architecture
    module.sm_count = lambda device: 3
    module.shared_bytes = lambda device: shared_kib * 1024
    return sources


def _launches(plan: Any) -> list[family.Launch]:
    """A file's plan as one of the package's."""
    return [
        family.Launch(
            family.Kernel(launch.source, launch.entry, launch.constants),
            (launch.grid, 1, 1),
            launch.block,
            launch.shared_bytes,
            tuple(map(_argument, launch.arguments)),
            launch.early,
        )
        for launch in plan.launches
    ]


def _argument(argument: Any) -> family.Argument:
    """An argument of a file's launch as one of the package's; tensor maps have the same fields."""
    return (
        argument
        if isinstance(argument, str | int)
        else getattr(family, type(argument).__name__)(*argument)
    )


def _compare(module: ModuleType, model: nn.Module, x: Tensor, tolerance: float) -> None:
    """Compares the output and all gradients with PyTorch's in float64."""
    exact = module.pytorch_twin(model).double()
    exact_x = x.detach().double().requires_grad_()
    x = x.detach().requires_grad_()
    y, expected = model(x), exact(exact_x)
    grad = torch.randn(y.shape).to(y.dtype)
    y.backward(grad)
    expected.backward(grad.double())
    pairs = [(y, expected), (x.grad, exact_x.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < tolerance, f"{tuple(theirs.shape)}: {error:.1e}"


@pytest.mark.parametrize(
    ("architecture", "shared_kib", "tf32", "tolerance", "expected"),
    [
        ("sm_90a", 227, False, 1e-6, {"hopper/few_outputs/kernel.cuh", "direct/wgrad/kernel.cuh"}),
        ("sm_90a", 227, True, 1e-3, {"hopper/few_outputs/kernel.cuh", "direct/wgrad/kernel.cuh"}),
        ("sm_100", 227, False, 1e-6, {"ampere/halo/kernel.cuh", "ampere/wgrad_halo/kernel.cuh"}),
        ("sm_89", 99, True, 1e-3, {"ampere/halo/kernel.cuh", "ampere/wgrad_halo/kernel.cuh"}),
    ],
)
def test_tuned_results(
    small: Path,
    architecture: str,
    shared_kib: int,
    tf32: bool,
    tolerance: float,
    expected: set[str],
) -> None:
    module = exported_file.load(small)
    sources = _emulate(module, architecture, shared_kib)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        _compare(module, module.ModelNew(bias=True), torch.randn(2, 8, 12, 40), tolerance)
    assert expected <= set(sources)


@pytest.mark.parametrize(
    ("architecture", "shared_kib"), [("sm_90a", 227), ("sm_87", 163), ("sm_120", 99)]
)
def test_results_of_narrow_groups(narrow: Path, architecture: str, shared_kib: int) -> None:
    """The result has full precision, whatever PyTorch's setting."""
    module = exported_file.load(narrow)
    sources = _emulate(module, architecture, shared_kib)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        _compare(module, module.ModelNew(bias=True), torch.randn(2, 6, 12, 20), 1e-6)
    assert set(sources) == {
        "depthwise/fma/planes.cuh", "depthwise/wgrad/planes.cuh", "direct/bias_grad.cuh"
    }  # fmt: skip


def test_results_of_a_first_layer(tmp_path: Path) -> None:
    """All residues of the input gradient are channels of one layer."""
    path = tmp_path / "first.py"
    fastconv.export(shape="2x3x19x22 24x3x7x7 stride=2,2 padding=3,3", output=path)
    module = exported_file.load(path)
    sources = _emulate(module, "sm_90a", 227)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        _compare(module, module.ModelNew(bias=True), torch.randn(2, 3, 19, 22), 1e-3)
    # The forward and the backward pass launch a packing kernel and a convolution each.
    assert sources.count("hopper/halo/kernel.cuh") == 4


def test_tuned_plans_take_only_what_they_are_for(small: Path) -> None:
    module = exported_file.load(small)
    sources = _emulate(module, "sm_90a")
    model = module.ModelNew()
    x = torch.randn(2, 8, 12, 40)
    aligned = torch.empty(x.numel() + 1)
    unaligned = aligned[1:].view(x.shape).copy_(x)
    for other in (x[:1], unaligned, x.to(memory_format=torch.channels_last)):
        with torch.no_grad():
            torch.testing.assert_close(model(other), module.pytorch_twin(model)(other))
    assert set(sources) == {"direct/forward/kernel.cuh"}


TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# The arguments of ModelNew, the input's shape, the type, and whether channels come last.
GEOMETRIES = {
    "plain": ((8, 16, 3, 1, 1, 1, 1, True), (2, 8, 12, 16), torch.float32, False),
    "pointwise": ((20, 40, 1), (2, 20, 5, 8), torch.float16, False),
    "strided": ((6, 12, (3, 2), (2, 3), (1, 2), 1, 1, True), (2, 6, 11, 13), torch.float32, False),
    "both": ((2, 3, 3, (4, 2), (3, 1), (2, 4)), (1, 2, 28, 27), torch.bfloat16, True),
    "grouped": ((6, 9, (3, 2), (2, 3), 1, (2, 1), 3, True), (2, 6, 9, 11), torch.float16, True),
    "depthwise": ((8, 8, 5, 1, 2, 1, 8, True), (2, 8, 16, 16), torch.bfloat16, False),
    "wide kernel": ((2, 3, (3, 35), 1, (1, 17)), (1, 2, 5, 40), torch.float32, False),
    "far apart": ((1, 2, (1, 3), (1, 500), 0, (1, 4000)), (1, 1, 2, 9100), torch.float32, False),
    "many channels": ((40, 140, (2, 1)), (1, 40, 4, 4), torch.float32, True),
    "few taps": ((4, 6, (2, 1), (5, 3), (1, 2)), (2, 4, 9, 11), torch.float16, False),
    "stride beyond": ((2, 3, 3, (90, 10**7), 1), (1, 2, 5, 6), torch.float32, True),
    "column of taps": ((64, 4, (9, 1), 1, (4, 0)), (1, 64, 12, 20), torch.float32, False),
}  # fmt: skip


@pytest.mark.parametrize("name", GEOMETRIES)
def test_portable_results(small: Path, name: str) -> None:
    arguments, shape, dtype, channels_last = GEOMETRIES[name]
    module = exported_file.load(small)
    sources = _emulate(module, "sm_75")
    # ModelNew's defaults are those of the exported convolution.
    arguments = (*arguments, *(1, 0, 1, 1, False)[len(arguments) - 3 :])
    x = torch.randn(shape).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    _compare(module, module.ModelNew(*arguments).to(dtype), x, TOLERANCE[dtype])
    assert all(source.startswith("direct/") for source in sources)


def test_portable_plans_fit_every_gpu() -> None:
    for geometry, operands in (*map(_random_geometry, range(300)), *_drawn_geometries()):
        for which in ("forward", "input_grad", "weight_grad", "bias_grad"):
            plan = portable.portable_plan(which, geometry, operands, sms=7)
            for launch in plan.launches:
                assert launch.shared_bytes <= 48 * 1024, (which, geometry)
                assert 0 < launch.grid < 2**31
                assert 0 < launch.block <= 1024


def _drawn_geometries() -> Iterator[tuple[portable.Geometry, portable.Operands]]:
    """Problems with the same padding on both sides, the only ones that exported files take."""
    draw = Random(0)
    for work in (corpus.drawn(draw) for _ in range(600)):
        problem = work.conv.problem
        top, bottom, left, right = problem.padding
        if work.dtype == torch.float64 or (top, left) != (bottom, right):
            continue
        others = (problem.stride, (top, left), problem.dilation, problem.groups)
        yield (
            portable.Geometry(problem.input_shape, problem.weight_shape, *others),
            portable.Operands(*SCALARS[work.dtype], work.channels_last, work.aligned),
        )


def test_portable_sizes_that_kernels_cannot_count_are_named() -> None:
    geometry = portable.Geometry((2**31, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1)
    operands = portable.Operands("float", 4, False, True)
    for which in ("forward", "input_grad", "weight_grad", "bias_grad"):
        with pytest.raises(ValueError, match=r"images.* below 2147418112 .* but got 2147483648"):
            portable.portable_plan(which, geometry, operands, sms=7)


def _random_geometry(seed: int) -> tuple[portable.Geometry, portable.Operands]:
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    groups = one_of(1, 1, 2, 64)
    kernel = (one_of(1, 3, 5, 31), one_of(1, 2, 7, 16, 17, 45))
    dilation = (one_of(1, 2, 7), one_of(1, 2, 30, 5000))
    geometry = portable.Geometry(
        (one_of(1, 16), groups * one_of(1, 3, 64), 300, 500 + dilation[1] * kernel[1]),
        (groups * one_of(1, 7, 256), one_of(1, 3, 64), *kernel),
        (one_of(1, 2, 5), one_of(1, 2, 3, 400)),
        (one_of(0, 2), one_of(0, 1, 8)),
        dilation,
        groups,
    )
    geometry = geometry._replace(
        input=(geometry.input[0], groups * geometry.weight[1], *geometry.input[2:])
    )
    size = one_of(2, 4)
    scalar = "float" if size == 4 else "fastconv::float16"
    return geometry, portable.Operands(scalar, size, one_of(0, 1) == 1, one_of(0, 1, 1) == 1)


# --- References ----------------------------------------------------------------------------------

REFERENCE = '''
import math
import torch
import torch.nn as nn

scale = 3

class Model(nn.Module):
    """Two layers."""

    def __init__(self, channels: int, kernel: int = 3):
        super(Model, self).__init__()
        self.first = nn.Conv2d(channels, channels, kernel, groups=channels, padding=1, bias=True)
        self.second = torch.nn.Conv2d(channels, math.floor(4.5), kernel_size=1)

    def forward(self, x):
        outputs = [self.second(layer(x)) for layer in (self.first,)]
        return outputs[0].relu()

def get_inputs():
    return [torch.rand(2, 8, 10, 12)]

def get_init_inputs():
    return [8]
'''


def _reference(tmp_path: Path, text: str = REFERENCE) -> Path:
    path = tmp_path / "reference.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_references_keep_all_but_their_convolutions(tmp_path: Path) -> None:
    path = tmp_path / "exported.py"
    text = fastconv.export(reference=_reference(tmp_path), output=path)
    assert "class ModelNew(nn.Module):" in text
    assert "self.second = Conv2d(channels, math.floor(4.5), kernel_size=1)" in text
    assert "self_check(ModelNew(8), (2, 8, 10, 12))" in text
    module = exported_file.load(path)
    reference = exported_file.load(tmp_path / "reference.py")
    torch.manual_seed(2)
    model = module.ModelNew(8)
    torch.manual_seed(2)
    expected = reference.Model(8)
    assert list(model.state_dict()) == list(expected.state_dict())
    _emulate(module, "sm_90a")
    x = torch.rand(2, 8, 10, 12)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.testing.assert_close(model(x), expected(x))
    # Both convolutions have tuned plans.
    assert {key[2].weight for key in module.TUNED} == {(8, 1, 3, 3), (4, 8, 1, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("math.floor(4.5)", "scale"), "uses scale, which is neither imported nor defined"),
        (("import math", "import numpy as math"), "imports only torch and the standard library"),
        (("padding=1", "padding='same'"), "padding should be numbers of zeros, but got 'same'"),
        (("nn.Conv2d", "nn.Linear"), "constructs no nn.Conv2d"),
        (("def get_inputs", "def inputs"), "should define get_inputs"),
        (("[torch.rand(2, 8, 10, 12)]", "[1]"), "should return tensors"),
        (("return [8]", "return [torch.tensor(8)]"), "should be numbers, strings"),
        (("class Model", "class Model("), "cannot read"),
        (("2, 8, 10, 12", "2, 7, 10, 12"), "cannot be run: RuntimeError: Given groups=8"),
        (("scale = 3", "import sys; sys.exit(0)"), "cannot be run: it calls sys.exit(0)"),
        (("return [8]", "raise SystemExit('over')"), "cannot be run: it calls sys.exit('over')"),
        (("return [8]", "return None"), "get_init_inputs should return a list, but returns None"),
        (("[self.second(layer(x)) for layer in (self.first,)]", "[x]"), "computes no convolution"),
        (("scale = 3", "raise ValueError"), "cannot be run: ValueError"),
        (("scale = 3", "scale = 3 / 0"), "cannot be run: ZeroDivisionError: division by zero"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_references_that_cannot_be_exported(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    text = REFERENCE.replace(*change)
    if "Linear" in change[1]:
        text = re.sub(r"nn\.Linear\(.*\)", "nn.Identity()", text)
    with pytest.raises(ExportError, match=re.escape(message)):
        fastconv.export(reference=_reference(tmp_path, text))


def test_references_may_print_and_have_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / 'a \\u """ model.py'
    path.write_text(REFERENCE.replace("scale = 3", "print('hello')"), encoding="utf-8")
    assert cli.main(["export", "--reference", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "hello\n"
    assert path.name in (ast.get_docstring(ast.parse(captured.out)) or "")


# --- The command ---------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    assert cli.main(["export", "--workload", "asym5x9", "-o", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == exported("asym5x9").read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""
    options = ["--bare", "--dtype", "float16", "bfloat16"]
    assert cli.main(["export", "--shape", "1x32x64x64 64x32x3x3", *options]) == 0
    printed = capsys.readouterr().out
    assert "class ModelNew(Conv2d):" in printed
    assert 'TUNED["sm_90a", "forward", EXPORTED, "fastconv::bfloat16", "ieee"]' in printed
    assert '"float", "tf32"' not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nothing"], "no workload 'nothing'"),
        (["--shape", "1x2x3"], "malformed shape"),
        (["--shape", "1x4x8x8 4x4x3x3 padding=1,0,1,0"], "nn.Conv2d pads both sides alike"),
        (["--workload", "asym5x9", "--attribute", "2d"], "attribute should be a name"),
        *(
            (["--workload", "asym5x9", "--attribute", name], f"attribute should not be {name!r}")
            for name in ("forward", "train", "training", "_modules", "__class__", "__mine")
        ),
        (["--reference", "missing.py"], "cannot read missing.py"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_one_thing_is_exported() -> None:
    with pytest.raises(ExportError, match="but got workload and shape"):
        fastconv.export("asym5x9", shape=SMALL)
    with pytest.raises(ExportError, match="but got none of them"):
        fastconv.export()
    with pytest.raises(ExportError, match="dtype should be one of"):
        fastconv.export("asym5x9", dtypes=["float64"])


# --- Tensor maps and programmatic dependent launches ---------------------------------------------

TILED = family.TensorMap(
    "input", "fastconv::bfloat16", (40, 30), (80,), (32, 7), (1, 2), 64, 256
)  # fmt: skip
PIXELS = family.Im2colMap(
    "output", "float", (8, 7, 6, 5), (32, 224, 1344), (-1, -2), (1, 2), 8, 100, (1, 3, 4, 1), 0, 128
)
MAPPED = family.Launch(
    family.Kernel("any.cuh", "any", ()), (3, 1, 1), 32, 64, (TILED, "bias", 7, PIXELS), early=True
)
TILED_NUMBERS = [1, 9, 2, 3, 2, 40, 30, 80, 1, 2, 32, 7]
PIXELS_NUMBERS = [
    *(0, 7, 0, 2, 4, 8, 7, 6, 5, 32, 224, 1344, 1, 3, 4, 1),
    *(-1, -2, 1, 2, 8, 100),
]  # fmt: skip


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("arguments", [MAPPED.arguments, ("bias", 7)], ids=["maps", "no maps"])
def test_launches_as_text(arguments: tuple[family.Argument, ...], early: bool) -> None:
    expected = replace(MAPPED, arguments=arguments, early=early)
    text = plans._launch(expected, "CONSTANTS", gpus.H200)
    assert ("early" in text) == early
    assert max(map(len, text.splitlines())) <= 100
    (launch,) = eval(f"({text})", {**vars(portable), "CONSTANTS": ()})
    assert launch.early is early
    assert _launches(portable.Plan((launch,), 0)) == [expected]


def test_maps_as_numbers(small: Path) -> None:
    module = exported_file.load(small)
    tiled, pixels = (
        getattr(module, type(of).__name__)(**vars(of)) for of in (TILED, PIXELS)
    )  # fmt: skip
    addresses = {"input": 0x1000, "output": 0x2000}
    assert module.as_numbers(tiled, addresses) == [0x1000, *TILED_NUMBERS]
    assert module.as_numbers(pixels, addresses) == [0x2000, *PIXELS_NUMBERS]
    assert module.as_numbers("bias", addresses) == [0]
    assert module.as_numbers(7, addresses) == [7]


@pytest.mark.parametrize("version", [11080, 13000])
def test_launcher_makes_maps_and_launches_early(tmp_path: Path, version: int) -> None:
    """Without CUDA: the calls that the driver and the runtime get."""
    stub, program = ROOT / "tests/data/cuda_stub", tmp_path / "calls"
    defined = {
        "CUDART_VERSION": str(version),
        "TILED": ",".join(map(str, TILED_NUMBERS)),
        "PIXELS": ",".join(map(str, PIXELS_NUMBERS)),
    }
    options = ["-std=c++17", "-Wall", "-Werror", f"-I{stub}", f"-I{PARTS}"]
    options += [f"-D{name}={value}" for name, value in defined.items()]
    command = [COMPILER, *options, stub / "calls.cc", "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    encoded = sorted([[0x1000, *TILED_NUMBERS], [0x2000, *PIXELS_NUMBERS]])
    lines = printed.splitlines()
    assert lines[0] == " allow 64"
    assert sorted([int(number) for number in line.split()] for line in lines[1:3]) == encoded
    assert lines[3:8] == [
        f" launch 3 32 64 1 {0x57} 1 0 7 2",
        " launch 3 32 49152 0 0 5",
        " allow 49153",
        " launch 3 32 49153 0 0 5",
        " allow 64",
    ]
    assert lines[-1] == "CUDA error at the launch of any: cudaErrorInvalidValue: invalid argument"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_nvcc_compiles_maps(tmp_path: Path) -> None:
    module = exported_file.load(exported("dilated5x9"))
    cases = (tensor_maps.cases(0)[name] for name in ("2d swizzle 0", "im2col swizzle 128"))
    launches = [tensor_maps.exported_launch(module, case) for case in cases]
    kernels = tuple(map(module.kernel_of, launches))
    _compile_by_nvcc(
        module, kernels, ["compute_90,code=sm_90", "compute_90a,code=sm_90a"], tmp_path
    )
