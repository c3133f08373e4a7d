"""``conv3d``, ``conv_transpose3d`` and their layers, beside PyTorch's; on a CPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from effort import ALL
from emulator import driver
from fastconv.backends import cuda
from fastconv.kernels import gpus
from fastconv.network.conversion import convert
from fastconv.ops import devices
from fastconv.ops.schema import OPERATORS
from fastconv.problem import Problem

DRAWN = 200 if ALL else 30
SPECIAL = [(1, 3, 3), (3, 1, 1), (1, 1, 3), (1, 1, 1), (3, 2, 1), (2, 1, 3)]
"""Kernels of convolutions that are computed as those of images."""


def _drawn(seed: int) -> tuple[bool, dict[str, Any], list[Tensor]]:
    """Whether a convolution is transposed, its arguments, and input, weight and bias."""
    r, transposed = Random(seed), seed % 2 == 1
    generator = torch.Generator().manual_seed(seed)
    kernel = r.choice(SPECIAL) if seed % 3 else [r.randint(1, 3) for _ in range(3)]
    groups, padded = r.choice((1, 1, 2, 3)), r.random() < 0.5
    stride = [r.choice((1, 1, 2, 3)) if taps > 1 or padded else 1 for taps in kernel]
    dilation = [r.choice((1, 1, 2)) for _ in kernel]
    padding = [r.randint(0, 2) if padded else (taps - 1) // 2 for taps in kernel]
    extent = [step * (taps - 1) + 1 for taps, step in zip(kernel, dilation, strict=True)]
    size = [max(r.randint(4, 7), one) for one in extent]
    inputs, outputs = groups * r.randint(1, 3), groups * r.randint(1, 3)
    arguments: dict[str, Any] = {
        "stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation),
        "groups": groups,
    }  # fmt: skip
    channels = (outputs, inputs // groups)
    if transposed:
        channels = (inputs, outputs // groups)
        both = zip(stride, dilation, strict=True)
        arguments["output_padding"] = tuple(r.randrange(max(one)) for one in both)
    shapes = [(r.randint(1, 2), inputs, *size), (*channels, *kernel), (outputs,)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return transposed, arguments, tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(DRAWN))
def test_against_pytorch(seed: int, dtype: torch.dtype) -> None:
    transposed, arguments, wide = _drawn(seed)
    tensors = [one.to(dtype) for one in wide]
    if seed % 4 < 2:
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last_3d)
    name = "conv_transpose3d" if transposed else "conv3d"
    ours, theirs = getattr(fastconv, name), getattr(F, name)
    mine = [one.clone().requires_grad_() for one in tensors]
    others = [one.clone().requires_grad_() for one in tensors]
    try:
        expected = theirs(*others, **arguments)
    except RuntimeError:  # an output of no size
        with pytest.raises(RuntimeError, match="Output size is too small"):
            ours(*mine, **arguments)
        return
    actual = ours(*mine, **arguments)
    gradient = torch.randn_like(expected)
    found = (actual, *torch.autograd.grad(actual, mine, gradient))
    wanted = (expected, *torch.autograd.grad(expected, others, gradient))
    rounding = 1e-10 if dtype == torch.float64 else 2e-5
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=20 * rounding)
        # PyTorch computes dilated convolutions by other functions, not all of them channels-last.
        assert one.stride() == other.stride() or 1 in one.shape or max(arguments["dilation"]) > 1


SAMPLES = [info for info in op_db if info.name in ("nn.functional.conv3d",
                                                   "nn.functional.conv_transpose3d")]  # fmt: skip


@pytest.mark.parametrize("info", SAMPLES, ids=[info.name for info in SAMPLES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_pytorchs_own_samples(info: Any, dtype: torch.dtype) -> None:
    function = getattr(fastconv, info.name.rpartition(".")[2])
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
        actual = function(sample.input, *sample.args, **sample.kwargs)
        exact = sample.transform(lambda one: one.to(wide) if isinstance(one, Tensor) else one)
        expected = info.op(exact.input, *exact.args, **exact.kwargs).to(dtype)
        absolute = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=absolute)


def test_pytorchs_own_errors() -> None:
    """PyTorch has none for transposed convolutions of volumes."""
    (info,) = (one for one in SAMPLES if one.error_inputs_func is not None)
    errors = [*info.error_inputs("cpu")]
    assert errors
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            fastconv.conv3d(sample.input, *sample.args, **sample.kwargs)


def test_padding_on_six_sides() -> None:
    video, weight = torch.randn(2, 3, 5, 6, 7), torch.randn(4, 3, 3, 3, 3)
    causal = fastconv.conv3d(video, weight, padding=((2, 0), (1, 1), (0, 2)))
    torch.testing.assert_close(causal, F.conv3d(F.pad(video, (0, 2, 1, 1, 2, 0)), weight))
    later = video.clone()
    later[:, :, 3:] = torch.nan
    changed = fastconv.conv3d(later, weight, padding=((2, 0), (1, 1), (0, 2)))
    torch.testing.assert_close(changed[:, :, :3], causal[:, :, :3])
    down = fastconv.conv_transpose3d(causal, weight, padding=((2, 0), (1, 1), (0, 2)))
    whole = F.conv_transpose3d(causal, weight)
    torch.testing.assert_close(down, whole[:, :, 2:, 1:-1, :-2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w: fastconv.conv3d(x[0, 0], w), r"Expected 4D \(unbatched\) or 5D"),
        (lambda x, w: fastconv.conv3d(x, w[0]), "conv3d takes a 5-dimensional weight"),
        (lambda x, w: fastconv.conv3d(x, w, padding=-1), r"\(front, back, top, bottom"),
        (lambda x, w: fastconv.conv3d(x[:, :1], w), "to have 3 channels, but got 1"),
        (lambda x, w: fastconv.conv3d(x, w, stride=(1, 1)), "a list of 3 values"),
        (lambda x, w: fastconv.conv3d(x[..., :2], w), "Kernel size can't be greater"),
        (lambda x, w: fastconv.conv_transpose3d(x, w), "to have 4 channels"),
        (lambda x, w: torch.ops.fastconv.forward(x, w, None, [1] * 3, [0] * 4, [1] * 3, 1, None),
         "expected 6 values of padding"),
    ],
)  # fmt: skip
def test_errors(call: Callable[..., Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(torch.randn(1, 3, 4, 5, 6), torch.randn(4, 3, 3, 3, 3))


def test_higher_derivatives_forward_mode_and_batched_gradients() -> None:
    def one(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def forward(*tensors: Tensor) -> Tensor:
        return fastconv.conv3d(*tensors, padding=((1, 0), (1, 2), (0, 0)), stride=(1, 2, 1))

    def transposed(*tensors: Tensor) -> Tensor:
        return fastconv.conv_transpose3d(*tensors, stride=(2, 1, 1), output_padding=(1, 0, 0))

    for function, weight, bias in (
        (forward, one(2, 2, 2, 2, 1), one(2)),
        (transposed, one(2, 1, 2, 1, 2), one(1)),
    ):
        tensors = (one(1, 2, 3, 3, 2), weight, bias)
        assert torch.autograd.gradcheck(
            function, tensors, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("name", ["Conv3d", "ConvTranspose3d"])
def test_layers(name: str) -> None:
    torch.manual_seed(3)
    theirs = getattr(nn, name)(4, 6, (3, 2, 3), stride=(1, 2, 1), padding=1, groups=2)
    torch.manual_seed(3)
    ours = getattr(fastconv, name)(4, 6, (3, 2, 3), stride=(1, 2, 1), padding=1, groups=2)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == f"fastconv.{theirs!r}"
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.equal(other)
    x = torch.randn(2, 4, 5, 6, 7)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x[0]), theirs(x[0]))
    again = pickle.loads(pickle.dumps(ours))
    torch.testing.assert_close(again(x), theirs(x))
    if name == "ConvTranspose3d":
        size = [5, 11, 7]
        torch.testing.assert_close(ours(x, size), theirs(x, size))
        with pytest.raises(ValueError, match="requested an output size"):
            ours(x, [50, 11, 7])


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes(mode: Any) -> None:
    arguments: dict[str, Any] = {"padding": (1, 2, 1), "padding_mode": mode}
    theirs = nn.Conv3d(2, 3, 3, **arguments)
    ours = fastconv.Conv3d(2, 3, 3, **arguments)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 2, 4, 5, 6)
    torch.testing.assert_close(ours(x), theirs(x))


def test_activation_and_residual() -> None:
    x, weight = torch.randn(2, 3, 4, 5, 6), torch.randn(3, 3, 3, 3, 3)
    expected = torch.relu(F.conv3d(x, weight, padding=1) + x)
    with torch.no_grad():
        actual = fastconv.conv3d(x, weight, padding=1, activation="relu", residual=x)
        torch.testing.assert_close(actual, expected)
        up = fastconv.conv_transpose3d(x, weight, padding=1, activation="relu", residual=x)
        torch.testing.assert_close(up, torch.relu(F.conv_transpose3d(x, weight, padding=1) + x))
    weight.requires_grad_()
    fastconv.conv3d(x, weight, padding=1, activation="relu", residual=x).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("name", list(OPERATORS))
def test_operators_pass_pytorchs_checks(name: str) -> None:
    x, w = torch.randn(1, 2, 3, 4, 3), torch.randn(2, 2, 2, 1, 2)
    geometry = ([1, 2, 1], [1, 0, 0, 0, 0, 1], [1, 1, 1], 1, None)
    y = fastconv.conv3d(x, w, stride=(1, 2, 1), padding=((1, 0), (0, 0), (0, 1)))
    arguments: dict[str, tuple[Any, ...]] = {
        "forward": (x, w, None, *geometry),
        "input_grad": (y, w, [3, 4, 3], *geometry),
        "weight_grad": (y, x, [2, 1, 2], *geometry, True),
        "fused": (x, w, None, y.clone(), *geometry, "relu", 0.0),
        "transposed": (y, w, None, None, [0, 1, 0], *geometry, "identity", 0.0),
    }
    tensors = [
        one.clone().requires_grad_() if isinstance(one, Tensor) else one for one in arguments[name]
    ]
    torch.library.opcheck(OPERATORS[name].call, tensors)


def test_vmap_autocast_compile_and_flops() -> None:
    layer, x = fastconv.Conv3d(2, 3, 2), torch.randn(4, 2, 3, 4, 5)
    weights = {name: torch.stack([one, -one]) for name, one in layer.named_parameters()}
    both = vmap(lambda given: functional_call(layer, given, (x,)))(weights)
    torch.testing.assert_close(both, torch.stack([layer(x), -layer(x)]))
    up, shifts = torch.randn(2, 3, 2, 2, 2), torch.randn(4, 3)
    mapped = vmap(lambda bias: fastconv.conv_transpose3d(x, up, bias))(shifts)
    each = [fastconv.conv_transpose3d(x, up, one) for one in shifts]
    torch.testing.assert_close(mapped, torch.stack(each))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))
    counts = []
    for module in (layer, nn.Conv3d(2, 3, 2)):
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_decompositions_for_exported_programs() -> None:
    sides = ((2, 0), (1, 1), (0, 1))
    model = nn.Sequential(
        fastconv.Conv3d(2, 4, 3, padding=sides), fastconv.ConvTranspose3d(4, 2, 2, 2, padding=sides)
    )
    x = torch.randn(1, 2, 4, 5, 6)
    table = torch._decomp.get_decompositions([operator.call for operator in OPERATORS.values()])
    program = torch.export.export(model, (x,)).run_decompositions(table)
    assert "fastconv" not in program.graph_module.code
    torch.testing.assert_close(program.module()(x), model(x))


def test_onnx(tmp_path: Path) -> None:
    model = nn.Sequential(
        fastconv.Conv3d(2, 4, 3, padding=((2, 0), (1, 1), (0, 1)), stride=(1, 2, 1)),
        fastconv.ConvTranspose3d(4, 2, 2, (1, 2, 2)),
    ).eval()
    x, path = torch.randn(1, 2, 4, 5, 6), tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (argument,) = session.get_inputs()
    (found,) = session.run(None, {argument.name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-4)


def test_convert_exchanges_them() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ConvTranspose3d(4, 2, 2)).eval()
    x = torch.randn(1, 2, 4, 5, 6)
    expected = model(x)
    converted = convert(model)
    assert type(converted[0]) is fastconv.Conv3d
    assert type(converted[2]) is fastconv.ConvTranspose3d
    torch.testing.assert_close(converted(x), expected)


# --- What a GPU would be given --------------------------------------------------------------------


FLAT = {
    # kernel, stride, channels-last, and the sizes of the image that it is computed as
    "along depth": ((3, 1, 1), (2, 1, 1), False, (2, 4, 5, 6 * 7)),
    "along depth, last": ((3, 1, 1), (1, 1, 1), True, (2, 4, 5, 6 * 7)),
    "along rows": ((1, 1, 3), (1, 1, 2), False, (2, 4, 5 * 6, 7)),
    "without columns": ((3, 3, 1), (2, 1, 1), False, (2, 4, 5, 6 * 7)),
    "without rows": ((3, 1, 3), (1, 1, 2), True, (2, 4, 5 * 6, 7)),
    "planes are images": ((1, 3, 3), (1, 2, 1), True, (2 * 5, 4, 6, 7)),
    "planes are channels": ((5, 3, 2), (1, 1, 2), False, (2, 4 * 5, 6, 7)),
    "not planes": ((1, 3, 3), (1, 1, 1), False, None),
    "far apart": ((2, 2, 2), (2, 2, 2), True, None),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", list(FLAT))
def test_kernels_see_volumes_as_images_where_they_can(name: str, transposed: bool) -> None:
    kernel, stride, last, seen = FLAT[name]
    layout = torch.channels_last_3d if last else torch.contiguous_format
    x = torch.randn(2, 4, 5, 6, 7).contiguous(memory_format=layout)
    w = torch.randn(3, 4, *kernel).contiguous(memory_format=layout)
    padding = [0, 0, *(side for taps in kernel[1:] for side in ((taps - 1) // 2,) * 2)]
    geometry = (list(stride), padding, [1, 1, 1], 1, "ieee")
    problem = Problem.of(x.shape, w.shape, stride, tuple(padding), (1, 1, 1), 1)
    y = F.conv3d(x, w, None, stride, padding[::2])
    args: tuple[Any, ...] = (x, w, None, *geometry)
    operator, read, expected = OPERATORS["forward"], x, y
    if transposed:
        args, operator, read = (y, w, [5, 6, 7], *geometry), OPERATORS["input_grad"], y
        least = F.conv_transpose3d(y, w, None, stride, padding[::2]).shape[2:]
        more = [size - one for size, one in zip(x.shape[2:], least, strict=True)]
        expected = F.conv_transpose3d(y, w, None, stride, padding[::2], more)
    result = operator.describe(operator.known, *args)
    need = devices.need(operator, result, args)
    assert need is not None
    if transposed and name == "planes are channels":
        seen = None  # the channels may have a bias, which the planes have in common
    assert need.problem.depth is None if seen else need.problem == problem
    if seen:
        assert need.problem.input_shape == seen
    # The kernels of that plan compute the volumes, at the same addresses.
    output = result.new().fill_(torch.nan)
    plan = cuda.planned(need, gpus.named("sm_70"))
    assert plan.family == "direct"
    scratch = torch.zeros(plan.scratch_bytes, dtype=torch.uint8)
    tensors = {"input": read, "weight": w, "output": output, "scratch": scratch}
    driver.run(plan.launches, tensors)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_a_kernel_as_deep_as_the_volume_has_a_bias_for_each_channel() -> None:
    """Planes may be computed as channels, which have no bias of their own."""
    w, b = torch.randn(8, 4, 3, 3, 3), torch.randn(8)
    cases = (
        (fastconv.conv3d, F.conv3d, torch.randn(2, 4, 3, 5, 6), b),
        (fastconv.conv_transpose3d, F.conv_transpose3d, torch.randn(2, 8, 1, 5, 6), b[:4]),
    )
    for function, reference, x, bias in cases:
        expected = reference(x.double(), w.double(), bias.double())
        torch.testing.assert_close(function(x, w, bias).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_bias_is_read_by_channel_where_a_kernel_spans_the_depth() -> None:
    """The same by the kernels for GPUs, with a bias that memory behind it would show."""
    x, w, b = torch.randn(2, 8, 1, 5, 6), torch.randn(8, 4, 3, 3, 3), torch.randn(4)
    beside = torch.cat([b, torch.full((64,), torch.nan)])
    geometry = ([1] * 3, [0] * 6, [1] * 3, 1)
    args = (x, w, b, None, [0, 0, 0], *geometry, "ieee", "identity", 0.0)
    operator = OPERATORS["transposed"]
    result = operator.describe(operator.known, *args)
    need = devices.need(operator, result, args)
    assert need is not None
    plan, output = cuda.planned(need, gpus.named("sm_70")), result.new().fill_(torch.nan)
    scratch = torch.zeros(plan.scratch_bytes, dtype=torch.uint8)
    tensors = {"input": x, "weight": w, "bias": beside, "output": output, "scratch": scratch}
    driver.run(plan.launches, tensors)
    expected = F.conv_transpose3d(x, w, b)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_volumes_have_plans_on_every_gpu() -> None:
    x, w = torch.empty(2, 16, 5, 16, 32, device="meta"), torch.empty(32, 16, 3, 3, 3, device="meta")
    args = (x, w, None, [1] * 3, [1] * 6, [1] * 3, 1, "tf32")
    operator = OPERATORS["forward"]
    need = devices.need(operator, operator.describe(operator.known, *args), args)
    assert need is not None
    families = {gpu.architecture: cuda.planned(need, gpu).family for gpu in gpus.GPUS.values()}
    assert families.pop("sm_90a") == "hopper"
    older = [families.pop(arch) for arch in list(families) if arch in ("sm_70", "sm_75")]
    assert set(older) == {"direct"}
    assert set(families.values()) == {"ampere"}
