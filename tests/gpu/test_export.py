"""Exported files on a GPU: compiled by nvcc, compared with PyTorch."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import exported_layers as layer_checks
import fastconv
import tensor_maps
from emulator.pass_cases import rounded_to_tf32
from exported_file import load
from exports import exported, exported_layers
from fastconv.workloads import FOUNDING, Workload
from gpu.helpers import is_hopper

COMMAND = (
    "import torch; from {name} import ModelNew; model = ModelNew().cuda(); "
    "x = torch.randn({shape}, device='cuda', requires_grad=True); y = model(x); "
    "y.sum().backward(); torch.cuda.synchronize()"
)
GRADIENT_ERROR = 1e-4  # relative to the gradient's norm

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load(exported("dilated5x9"))


@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
def test_one_line_command(workload: Workload, tmp_path: Path) -> None:
    """A first run compiles everything; a second one finds it compiled."""
    shape = ", ".join(map(str, workload.input))
    code = COMMAND.format(name=workload.name, shape=shape)
    folder = exported(workload.name).parent
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    compiled = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=environment)
        compiled.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")})
    assert compiled[0]
    assert compiled[1] == compiled[0]


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
def test_gradients_of_examples(workload: Workload, tf32: bool) -> None:
    """Gradients of the output's sum, as in the one-line command, against exact ones.

    In TF32, cuDNN's weight gradients are off by up to 2e-4 of their norm because of the way they
    are summed (cuDNN rounds the operands as we do), so that they cannot show an error of 1e-4.
    Exact sums of rounded operands can. PyTorch's results may differ from ours by as much as they
    differ from those.
    """
    module = load(exported(workload.name))
    model = module.ModelNew().cuda()
    twin = module.pytorch_twin(model)
    x = torch.randn(workload.input, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        actual, pytorchs = _gradients(model, x), _gradients(twin, x)
    if tf32:
        x = rounded_to_tf32(x)
        for parameter in twin.parameters():
            parameter.data = rounded_to_tf32(parameter.data)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = _gradients(twin, x)
    for ours, theirs, reference in zip(actual, pytorchs, exact, strict=True):
        assert _error(ours, reference) < GRADIENT_ERROR
        assert _error(ours, theirs) < GRADIENT_ERROR + _error(theirs, reference)


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(model(x).sum(), [x, *model.parameters()]))


def _error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("made_for", ["sm_80", "sm_86"])
@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
def test_plans_for_other_gpus(workload: Workload, made_for: str, tf32: bool) -> None:
    """A file's plans for other GPUs, run on this one, against exact sums; all but bias_grad."""
    module = load(exported(workload.name))
    module.target = lambda architecture, shared_bytes: made_for
    sources = _noting(module)
    model = module.ModelNew(bias=True).cuda()
    twin = module.pytorch_twin(model)
    x = torch.randn(workload.input, device="cuda")
    grad = torch.randn(module.EXPORTED.output, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        actual = _results(model, x, grad)
    if tf32:
        x, grad = rounded_to_tf32(x), rounded_to_tf32(grad)
        twin.conv2d.weight.data = rounded_to_tf32(twin.conv2d.weight.data)
    exact = _results(twin.double(), x.double(), grad.double())
    for ours, expected in list(zip(actual, exact, strict=True))[:-1]:
        assert _error(ours, expected) < (GRADIENT_ERROR if tf32 else 1e-5)
    precision = "tf32" if tf32 else "ieee"
    for which, source in sources.items():
        is_tuned = (made_for, which, module.EXPORTED, "float", precision) in module.TUNED
        assert source.split("/")[0] == ("ampere" if is_tuned else "direct")
    assert sources["forward"] == "ampere/halo/kernel.cuh"


def _noting(module: ModuleType) -> dict[str, str]:
    """Sources of the kernels that the module runs after this call, by pass."""
    sources: dict[str, str] = {}
    run = module.run

    def noting(ready: Any, which: str, tensors: dict[str, Tensor]) -> None:
        sources[which] = ready.plans[which].launches[0].source
        run(ready, which, tensors)

    module.run = noting
    return sources


def _results(model: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input, the weight and the bias."""
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], grad)]


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ((32, 64, (5, 9), 1, (2, 4), (2, 3), 1, True), (3, 32, 40, 56)),
        ((6, 12, (3, 2), (2, 3), (1, 2), 1, 3, True), (2, 6, 33, 31)),
        ((16, 16, 3, 1, 1, 1, 16, True), (2, 16, 32, 32)),
    ],
    ids=["other size", "strided", "depthwise"],
)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
    ids=str,
)
def test_other_geometries(
    example: ModuleType,
    arguments: tuple[object, ...],
    shape: tuple[int, ...],
    channels_last: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    model = example.ModelNew(*arguments).cuda().to(dtype)
    twin = example.pytorch_twin(model).double()
    x = torch.randn(shape, device="cuda", dtype=dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    assert _error(model(x), twin(x.double())) < tolerance
    assert model(x).stride() == example.pytorch_twin(model)(x).stride()
    for expected, ours in zip(_gradients(twin, x.double()), _gradients(model, x), strict=True):
        assert _error(ours, expected) < tolerance


LAYERS = {
    "sequence": ("nn.Conv1d(64, 128, 3, padding=1)", (4, 64, 4096)),
    "transposed sequence": ("nn.ConvTranspose1d(64, 32, 4, stride=2, padding=1)", (4, 64, 4096)),
    "transposed": (
        "nn.ConvTranspose2d(64, 32, (3, 4), stride=2, padding=1, output_padding=(1, 0))",
        (4, 64, 32, 48),
    ),
}


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", LAYERS)
def test_other_layers(name: str, channels_last: bool) -> None:
    """Contiguous tensors have tuned plans, others the portable kernels."""
    layer, shape = LAYERS[name]
    module = load(exported_layers(layer, shape))
    model = module.ModelNew().cuda()
    twin = module.pytorch_twin(model).double()
    x = layer_checks.formats(torch.randn(shape, device="cuda"))[channels_last]
    exact = _gradients(twin, x.double())
    for tf32, tolerance in ((False, 1e-5), (True, 1e-3)):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            assert _error(model(x), twin(x.double())) < tolerance
            for ours, expected in zip(_gradients(model, x), exact, strict=True):
                assert _error(ours, expected) < tolerance


def test_self_check_of_other_layers() -> None:
    path = exported_layers(*LAYERS["transposed sequence"])
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tf32  forward and backward: " in done.stdout


def test_streams_and_graphs(example: ModuleType) -> None:
    """A captured call uses no other stream than the current one, and waits for nothing."""
    model = example.ModelNew(8, 8, 3, 1, 1, 1).cuda()
    x = torch.randn(1, 8, 20, 20, device="cuda")
    expected = model(x).detach()  # The first call compiles.
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y, expected)


# Cases of tensor maps. The example's own plans use none, so the tests add kernels that do.
NAMES = ("2d swizzle 0", "4d swizzle 128", "im2col 2d swizzle 64", "im2col 3d swizzle 128")
# Each block reads what another block wrote in the launch before.
SUM = """
#include "device/sm90.cuh"
__global__ void __launch_bounds__(128) sum(const float* in, float* out) {
  fastconv::allow_later_launch();
  fastconv::wait_for_earlier_launch();
  const unsigned all = gridDim.x * blockDim.x;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[(i + blockDim.x) % all] + 1;
}
"""


@pytest.fixture(scope="module")
def hand_made(example: ModuleType) -> Any:
    """Plans by name: TMA copies, and launches that each need the result of the one before."""
    if not is_hopper():
        pytest.skip("needs the GPU that files with maps are for")
    example.SOURCES["hopper/sum.cuh"] = SUM
    orders = [("input", "output"), ("output", "input")]
    sums = [
        example.Launch("hopper/sum.cuh", "sum", (), 2048, 128, 0, order, early=True)
        for order in orders * 20
    ]
    plans = {"sums": example.Plan((*sums, sums[0]), 0)}
    for name in NAMES:
        launch = tensor_maps.exported_launch(example, tensor_maps.cases(0)[name])
        plans[name] = example.Plan((launch,), 0)
    launches = [launch for plan in plans.values() for launch in plan.launches]
    kernels = tuple(dict.fromkeys(map(example.kernel_of, launches)))
    return example.BuiltPlans(plans, example.build(kernels, "sm_90a"), kernels)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_maps(example: ModuleType, hand_made: Any, name: str) -> None:
    """Maps follow tensors to other addresses, also in a thread that has used no GPU before."""
    case = tensor_maps.cases(0)[name]
    for in_thread in (False, True, False):
        tensors = {
            "tensor": case.memory.to("cuda"),
            "coordinates": case.coordinates.to("cuda"),
            "output": torch.full(case.boxes_shape, -1, dtype=torch.int32, device="cuda"),
        }
        run = functools.partial(example.run, hand_made, name, tensors)
        if in_thread:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(run).result()
        else:
            run()
        assert torch.equal(tensors["output"].cpu(), case.loaded())


def test_maps_that_the_driver_refuses(example: ModuleType, hand_made: Any) -> None:
    case = tensor_maps.cases(0)[NAMES[0]]
    memory = torch.zeros(case.memory.numel() + 1, dtype=case.memory.dtype, device="cuda")
    tensors = {
        "tensor": memory[1:],  # A map's tensor must begin at a multiple of 16 bytes.
        "coordinates": case.coordinates.to("cuda"),
        "output": torch.empty(case.boxes_shape, dtype=torch.int32, device="cuda"),
    }
    with pytest.raises(RuntimeError, match="launch of load_boxes: cudaErrorInvalidValue"):
        example.run(hand_made, NAMES[0], tensors)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_early_launches(example: ModuleType, hand_made: Any, captured: bool) -> None:
    first = torch.randint(1000, (2048, 128), device="cuda").float()
    tensors = {"input": first.clone(), "output": torch.zeros_like(first)}
    run = functools.partial(example.run, hand_made, "sums", tensors)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
    else:
        torch.cuda._sleep(10**8)  # Keeps the GPU busy until all launches are queued.
        run()
    assert torch.equal(tensors["output"], first.roll(-41, 0) + 41)


def test_cuda_errors_have_their_text(example: ModuleType) -> None:
    model = example.ModelNew(8, 8, 3, 1, 1, 1).cuda()
    x = torch.randn(1, 8, 20, 20, device="cuda")
    model(x)
    geometry = example.Geometry(tuple(x.shape), (8, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    operands = example.Operands("float", 4, False, True)
    ready = example.plan_and_build(("forward",), geometry, operands, "ieee", x.device.index)
    with pytest.raises(RuntimeError, match=r"launch of pack: cudaErrorInvalid\w+: invalid"):
        ready.module.launch(0, [1, 2048, 0, 0], [[0], [0]], torch.cuda.current_stream().cuda_stream)
    model(x)  # The error does not last.


def test_wrong_devices_and_second_derivatives(example: ModuleType) -> None:
    model = example.ModelNew(8, 8, 3, 1, 1, 1)
    with pytest.raises(ValueError, match="same CUDA device, but are on cuda:0 and cpu"):
        model(torch.randn(1, 8, 20, 20, device="cuda"))
    model.cuda()
    x = torch.randn(1, 8, 20, 20, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_forward_is_as_fast_as_the_package() -> None:
    """The same kernels by nvcc take at most 5 % longer, and 2 % for noise of short measurements."""
    for workload in FOUNDING:
        module = load(exported(workload.name))
        model = module.ModelNew().cuda()
        x = torch.randn(workload.input, device="cuda")
        problem = workload.problem
        layer = fastconv.Conv2d(
            problem.in_channels,
            problem.out_channels,
            problem.kernel_size,
            padding=workload.padding,  # type: ignore[arg-type]
            dilation=problem.dilation,
            bias=False,
        ).cuda()
        for tf32 in (True, False):
            with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
                ours = module.milliseconds(lambda model=model, x=x: model(x))
                package = module.milliseconds(lambda layer=layer, x=x: layer(x))
            print(f"{workload.name} tf32={tf32}: {ours:.3f} ms, package {package:.3f} ms")
            assert ours < 1.07 * package
