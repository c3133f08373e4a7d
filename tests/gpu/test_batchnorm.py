"""Batch normalization on a GPU: networks' layers in both formats, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fastconv
from batchnorm_cases import Case, Tensors, check_close, random_cases, reference
from causal_cases import ROUNDINGS
from fastconv import native
from fastconv.backends import cuda
from fastconv.batchnorm import conv_of_bn_act
from fastconv.kernels import planner
from fastconv.problem import Problem
from gpu.helpers import CUDA

LAYERS = [
    Case(16, channels, (side, side), dtype, dtype != torch.float32, last, activation, residual)
    for channels, side in ((64, 112), (256, 56), (1024, 14), (2048, 7), (80, 73), (32, 149))
    for dtype, last in ((torch.bfloat16, True), (torch.float32, False), (torch.float16, False))
    for activation, residual in (("relu", True), ("silu", False))
]


def _activation(case: Case) -> fastconv.Activation:
    return ("leaky_relu", 0.1) if case.activation == "leaky_relu" else case.activation  # type: ignore[return-value]


def _call(case: Case, tensors: Tensors, training: bool = True) -> Tensor:
    return fastconv.batch_norm_act(
        tensors.x, tensors.running_mean, tensors.running_var, tensors.weight, tensors.bias,
        training, activation=_activation(case), residual=tensors.residual,
    )  # fmt: skip


# Where derivatives jump: rounding decides which one an input nearby has.
KINKS = {"relu": (0.0,), "leaky_relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}
NEARBY = 0.02  # two roundings of bfloat16 at 6


def _clear_at_kinks(case: Case, training: bool, *grads: Tensor) -> None:
    """Clears gradients of outputs whose derivative rounding decides."""
    with torch.no_grad():
        before = reference(Tensors.random(case).double(), "identity", training)
    for kink in KINKS.get(case.activation, ()):
        nearby = (before - kink).abs() < NEARBY
        for grad in grads:
            grad[nearby.to(grad.device)] = 0


def _check_all(case: Case, training: bool = True) -> None:
    tensors, exact = Tensors.random(case, "cuda"), Tensors.random(case).double()
    _clear_at_kinks(case, training, tensors.grad, exact.grad)
    leaves = [leaf.requires_grad_() for leaf in tensors.leaves]
    output = _call(case, tensors, training)
    expected = reference(exact, case.activation, training)
    check_close(output, expected, case.dtype, "output", 256)
    check_close(tensors.running_mean, exact.running_mean, case.dtype, "running mean")
    check_close(tensors.running_var, exact.running_var, case.dtype, "running variance", 256)
    found = torch.autograd.grad(output, leaves, tensors.grad, retain_graph=True)
    again = torch.autograd.grad(output, leaves, tensors.grad)
    assert all(map(torch.equal, found, again)), "the same call gave other bits"
    gradients = torch.autograd.grad(expected, exact.leaves, exact.grad)
    # Gradients before curved activations are rounded twice. Sums have one rounding for each
    # element, of random signs.
    bound = 256 + 8 * ROUNDINGS[case.dtype] / ROUNDINGS[torch.float32] * case.residual
    if case.dtype == torch.float64:
        bound = 4096
    for one, gradient in zip(found, gradients, strict=True):
        share = 1.0 if one.dim() > 1 else max(1.0, float(case.count) ** 0.5 / 64)
        check_close(one, gradient, case.dtype, "gradient", bound * share)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_layers_of_networks(case: Case) -> None:
    _check_all(case)


@pytest.mark.parametrize("case", random_cases(64, 11), ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_small_and_odd_ones(case: Case, training: bool) -> None:
    _check_all(case, training)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_means_of_ten_thousand_deviations(channels_last: bool) -> None:
    case = Case(
        16, 64, (56, 56), channels_last=channels_last, activation="identity", mean=1e4,
    )  # fmt: skip
    tensors, exact = Tensors.random(case, "cuda"), Tensors.random(case).double()
    output = _call(case, tensors)
    check_close(output, reference(exact, "identity"), case.dtype, "output", 4096)
    check_close(tensors.running_var, exact.running_var, case.dtype, "running variance", 256)


def test_second_derivatives() -> None:
    case = Case(3, 4, (3, 3), torch.float64, activation="silu", residual=True)
    tensors = Tensors.random(case, "cuda")
    inputs = [leaf.requires_grad_() for leaf in tensors.leaves]

    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fastconv.batch_norm_act(
            x, None, None, weight, bias, True, activation="silu", residual=residual
        )

    # The same call gives the same bits, so that gradcheck tolerates no difference.
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_captured_in_a_graph() -> None:
    """Averages of all batches count the replays, since the kernel reads their number."""
    layer = fastconv.ConvBNAct2d(8, 16, 3, padding=1, momentum=None, device=CUDA)
    twin = fastconv.ConvBNAct2d(8, 16, 3, padding=1, momentum=None, device=CUDA)
    images = torch.randn(4, 8, 20, 20, device=CUDA)
    layer(images)
    twin.load_state_dict(layer.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(images)
    for _ in range(3):
        images.copy_(torch.randn_like(images))
        graph.replay()
        expected = twin(images)
    assert torch.equal(captured, expected)
    for name, one in layer.state_dict().items():
        assert torch.equal(one, twin.state_dict()[name]), name


def _trained(dtype: torch.dtype, autocast: bool, last: bool) -> list[Tensor]:
    """What two steps of training leave: outputs, gradients, statistics."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        fastconv.ConvBNAct2d(16, 32, 3, padding=1),
        fastconv.ConvBNAct2d(32, 32, 1, activation="silu"),
        fastconv.ConvBNAct2d(32, 16, 3, stride=2, momentum=None, bias=True, activation=None),
    ).to(CUDA, dtype)
    memory_format = torch.channels_last if last else torch.contiguous_format
    images = torch.randn(4, 16, 20, 20).to(CUDA, dtype, memory_format=memory_format)
    images.requires_grad_()
    outputs = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            outputs.append(net[2](net[1](net[0](images), net[0](images))))
        outputs[-1].float().square().sum().backward()
    net.eval()
    outputs.append(fastconv.batch_norm_act(
        images, torch.zeros_like(images[0, :, 0, 0]), torch.ones_like(images[0, :, 0, 0])
    ))  # fmt: skip
    gradients = [one.grad for one in (images, *net.parameters())]
    return [one.detach().clone() for one in (*outputs, *gradients, *net.buffers())]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_both_host_paths_give_the_same_bits(
    dtype: torch.dtype, autocast: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.settle()
    if native.conv_bn_act is None:
        pytest.skip(f"the host path is {native.describe()}")
    found = _trained(dtype, autocast, last)
    for name in ("conv2d", "batch_norm_act", "conv_bn_act"):
        monkeypatch.setattr(native, name, None)
    for one, other in zip(found, _trained(dtype, autocast, last), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("images", "weight", "stride"),
    [
        ((64, 64, 56, 56), (256, 64, 1, 1), 1),
        ((37, 64, 55, 57), (128, 64, 3, 3), 1),
        ((64, 1024, 14, 14), (2048, 1024, 1, 1), 2),
        ((3, 40, 5, 7), (72, 40, 3, 3), 1),
        ((70, 128, 1, 1), (64, 128, 1, 1), 1),
    ],
    ids=str,
)
def test_statistics_that_convolutions_leave(
    images: tuple[int, ...], weight: tuple[int, ...], stride: int, dtype: torch.dtype
) -> None:
    """They are those of the stored outputs, whose channels differ in size by up to 2^12."""
    native.settle()
    if native.conv_bn_act is None:
        pytest.skip(f"the host path is {native.describe()}")
    torch.manual_seed(0)
    last, channels = torch.channels_last, weight[0]
    x = torch.randn(images, device=CUDA).to(dtype, memory_format=last)
    sizes = 2.0 ** (torch.arange(channels, device=CUDA) % 13 - 6) / math.prod(weight[1:]) ** 0.5
    kernel = torch.randn(weight, device=CUDA) * sizes.view(-1, 1, 1, 1)
    kernel, bias = kernel.to(dtype, memory_format=last), torch.randn(channels).to(CUDA, dtype)
    padding = weight[-1] // 2
    stored = fastconv.conv2d(x, kernel, bias, stride, padding)
    problem = Problem.of(images, weight, (stride,) * 2, (padding,) * 4, (1, 1), 1)
    need = cuda.need(planner.forward, problem, x, kernel, stored, None, bias=bias)
    assert need is not None
    assert cuda.planned(need._replace(statistics=True)).shares > 0
    exact = stored.double().movedim(1, 0).flatten(1)
    deviation = exact.std(1)
    results = []
    for _ in range(2):
        mean, var = torch.zeros(2, channels, device=CUDA)
        y = fastconv.conv_bn_act(
            x, kernel, bias, mean, var, None, None, stride, padding, training=True, momentum=1.0
        )
        assert ((mean - exact.mean(1)).abs() <= 1e-6 * (exact.mean(1).abs() + deviation)).all()
        torch.testing.assert_close(var.double(), deviation**2, rtol=1e-4, atol=0)
        results.append([y, mean, var])
    assert all(map(torch.equal, *results))


def test_graphed_callables() -> None:
    """Forward and backward are captured, on the streams of PyTorch."""
    torch.manual_seed(0)
    layer = fastconv.ConvBNAct2d(8, 8, 3, padding=1, device=CUDA)
    twin = fastconv.ConvBNAct2d(8, 8, 3, padding=1, device=CUDA)
    twin.load_state_dict(layer.state_dict())
    sample = torch.randn(4, 8, 20, 20, device=CUDA, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    twin.load_state_dict(layer.state_dict())  # warming up has moved the statistics
    for _ in range(3):
        images = torch.randn_like(sample).requires_grad_()
        results = []
        for net in (graphed, twin):
            output = net(images)
            found = torch.autograd.grad(output.square().sum(), [images, *net.parameters()])
            results.append([output.detach().clone(), *(one.clone() for one in found)])
        assert all(map(torch.equal, *results))
    for name, one in layer.state_dict().items():
        assert torch.equal(one, twin.state_dict()[name]), name


def test_streams_of_the_user() -> None:
    """Kernels run on the current stream, in backward on that of the forward pass."""
    layer = fastconv.ConvBNAct2d(64, 64, 3, padding=1, device=CUDA)
    images = torch.zeros(16, 64, 56, 56, device=CUDA)
    values = torch.randn_like(images)
    (expected,) = torch.autograd.grad(layer(values).square().sum(), layer.conv.weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        images.copy_(values)
        (found,) = torch.autograd.grad(layer(images).square().sum(), layer.conv.weight)
    stream.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_computed_again_have_the_same_bits(
    dtype: torch.dtype, last: bool, axes: int
) -> None:
    """They are not kept: the second block's node has what the first one's has."""
    native.settle()
    if native.conv_bn_act is None:
        pytest.skip(f"the host path is {native.describe()}")
    torch.manual_seed(0)
    kind = getattr(fastconv, f"ConvBNAct{axes}d")
    layers = [kind(24, 24, 3, padding=1, device=CUDA, dtype=dtype) for _ in range(2)]
    images = torch.randn(4, 24, *(28, 20, 12)[:axes], device=CUDA, dtype=dtype)
    if last:
        images = images.movedim(1, -1).contiguous().movedim(-1, 1)
    leaves = [images.requires_grad_(), *(one for each in layers for one in each.parameters())]
    results = []
    for recomputes in (False, True):
        between = conv_of_bn_act(layers[0].conv, layers[0].bn, images, None, "gelu")
        output = conv_of_bn_act(
            layers[1].conv, layers[1].bn, between, None, "relu", recomputes=recomputes
        )
        storage = StorageWeakRef(between.untyped_storage())
        del between
        assert storage.expired() == recomputes
        results.append(torch.autograd.grad(output.square().sum(), leaves))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("momentum", [0.1, None], ids=str)
def test_batches_are_counted(momentum: float | None) -> None:
    """Also by launches that a CUDA graph replays."""
    native.settle()
    layer = fastconv.ConvBNAct2d(8, 24, 3, device=CUDA)
    layer.bn.momentum = momentum
    images, replayed = torch.randn(4, 8, 9, 9, device=CUDA), torch.cuda.CUDAGraph()
    for _ in range(3):
        layer(images).sum().backward()
    with torch.cuda.graph(replayed):
        layer(images)
    for _ in range(4):
        replayed.replay()
    assert int(layer.bn.num_batches_tracked) == 7


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_a_block_trains_as_pytorchs(channels_last: bool, axes: int) -> None:
    options = {"device": CUDA, "dtype": torch.float64}
    layer = getattr(fastconv, f"ConvBNAct{axes}d")(16, 16, 3, padding=1, **options)
    parts = torch.nn.Sequential(
        getattr(torch.nn, f"Conv{axes}d")(16, 16, 3, padding=1, bias=False, **options),
        getattr(torch.nn, f"BatchNorm{axes}d")(16, **options),
    )
    parts[0].weight.data.copy_(layer.conv.weight)
    images = torch.randn(8, 16, *(20, 20, 6)[:axes], **options)
    if channels_last:
        images = images.movedim(1, -1).contiguous().movedim(-1, 1)
    for _ in range(3):
        output = layer(images, images)
        expected = torch.relu(parts(images) + images)
        torch.testing.assert_close(output, expected)
        grad = torch.randn_like(output)
        found = torch.autograd.grad(output, list(layer.parameters()), grad)
        gradients = torch.autograd.grad(expected, list(parts.parameters()), grad)
        torch.testing.assert_close(found, gradients)
    torch.testing.assert_close(layer.bn.running_var, parts[1].running_var)
