"""``fastconv.batch_norm_act``, ``conv_bn_act`` and its layers against PyTorch's layers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from batchnorm_cases import ACTIVATIONS, EPS, Case, Tensors, check_close, random_cases, reference
from causal_cases import ROUNDINGS

pytestmark = pytest.mark.usefixtures("host_path")


def _activation(case: Case) -> Any:
    return ("leaky_relu", 0.1) if case.activation == "leaky_relu" else case.activation


def _call(case: Case, tensors: Tensors, training: bool = True, **options: Any) -> Tensor:
    return fastconv.batch_norm_act(
        tensors.x, tensors.running_mean, tensors.running_var, tensors.weight, tensors.bias,
        training, activation=_activation(case), residual=tensors.residual, **options,
    )  # fmt: skip


@pytest.mark.parametrize("case", random_cases(32, 1), ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_results_are_those_of_float64(case: Case, training: bool) -> None:
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    leaves = [leaf.requires_grad_() for leaf in tensors.leaves]
    output = _call(case, tensors, training)
    expected = reference(exact, case.activation, training)
    assert output.stride() == torch.empty_like(tensors.x).stride()
    check_close(output, expected, case.dtype, "output")
    check_close(tensors.running_mean, exact.running_mean, case.dtype, "running mean")
    check_close(tensors.running_var, exact.running_var, case.dtype, "running variance")
    found = torch.autograd.grad(output, leaves, tensors.grad)
    gradients = torch.autograd.grad(expected, exact.leaves, exact.grad)
    # The gradient of sigmoid and tanh is computed from the output, which is rounded.
    curved = case.residual and case.activation in ("sigmoid", "tanh")
    bound = 256 + (8 * ROUNDINGS[case.dtype] / ROUNDINGS[torch.float32] if curved else 0)
    for one, gradient in zip(found, gradients, strict=True):
        check_close(one, gradient, case.dtype, "gradient", bound)


SMOOTH = ("identity", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh")


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("activation", SMOOTH)
def test_derivatives_of_both_orders(activation: str, training: bool, residual: bool) -> None:
    case = Case(3, 2, (2, 2), torch.float64, activation=activation, residual=residual)
    tensors = Tensors.random(case)
    inputs = [leaf.requires_grad_() for leaf in tensors.leaves]
    mean, var = (None, None) if training else (tensors.running_mean, tensors.running_var)

    def function(*given: Tensor) -> Tensor:
        x, *added, weight, bias = given
        return fastconv.batch_norm_act(
            x, mean, var, weight, bias, training, activation=_activation(case),
            residual=added[0] if added else None,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu", "hardswish"])
def test_second_derivatives_of_bent_activations(activation: str) -> None:
    case = Case(4, 3, (3, 3), torch.float64, activation=activation, residual=True)
    results = []
    for by in (_call, lambda case, tensors: reference(tensors, case.activation)):
        tensors = Tensors.random(case)
        leaves = [leaf.requires_grad_() for leaf in tensors.leaves]
        first = torch.autograd.grad(by(case, tensors), leaves, tensors.grad, create_graph=True)
        total = sum(one.square().sum() for one in first)
        assert isinstance(total, Tensor)
        results.append(torch.autograd.grad(total, leaves, materialize_grads=True))
    torch.testing.assert_close(*results)


def test_leaky_relu_that_falls() -> None:
    """Outputs of a negative slope do not tell the sign of the input."""
    case = Case(4, 3, (3, 3), torch.float64, residual=True)
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    leaves = [leaf.requires_grad_() for leaf in tensors.leaves]
    output = fastconv.batch_norm_act(
        tensors.x, None, None, tensors.weight, tensors.bias, True,
        activation=("leaky_relu", -0.5), residual=tensors.residual,
    )  # fmt: skip
    expected = F.leaky_relu(reference(exact, "identity"), -0.5)
    found = torch.autograd.grad(output, leaves, tensors.grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, exact.leaves, exact.grad))


def test_only_wanted_gradients() -> None:
    case = Case(4, 3, (3, 3), residual=True)
    tensors = Tensors.random(case)
    for chosen in tensors.leaves:
        whole = [leaf.requires_grad_() for leaf in tensors.leaves]
        number = next(i for i, one in enumerate(whole) if one is chosen)
        expected = torch.autograd.grad(_call(case, tensors), whole, tensors.grad)[number]
        for leaf in whole:
            leaf.requires_grad_(leaf is chosen)
        (found,) = torch.autograd.grad(_call(case, tensors), [chosen], tensors.grad)
        assert torch.equal(found, expected)


def test_averages_of_all_batches() -> None:
    mean, var, norm = torch.zeros(3), torch.ones(3), nn.BatchNorm1d(3, momentum=None)
    for number in range(1, 4):
        x = torch.randn(5, 3)
        norm(x)
        batches = torch.tensor(number)
        fastconv.batch_norm_act(
            x, mean, var, training=True, momentum=None, num_batches_tracked=batches
        )
    torch.testing.assert_close(mean, norm.running_mean)
    torch.testing.assert_close(var, norm.running_var)


def test_no_images() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    x = torch.randn(0, 3, 4, 4, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    output = fastconv.batch_norm_act(x, mean, var, weight, training=True, activation="relu")
    assert output.shape == x.shape
    output.sum().backward()
    assert torch.equal(mean, torch.zeros(3))
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.randn(2, 3, 4, 4), None, None),
        (torch.randn(2, 3, 4, 4), torch.zeros(3), None),
        (torch.randn(2, 3, 4, 4), torch.zeros(4), torch.ones(3)),
        (torch.randn(2, 3, 4, 4), torch.zeros(3), torch.ones(3), torch.ones(4)),
        (torch.randn(2, 3, 4, 4), torch.zeros(3), torch.ones(3), None, torch.ones(5)),
        (torch.randn(1, 3, 1, 1), None, None, None, None, True),
        (torch.randn(1, 3), torch.zeros(3), torch.ones(3), None, None, True),
    ],
)
def test_errors_are_those_of_pytorch(arguments: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        F.batch_norm(*arguments)
    with pytest.raises(theirs.type) as ours:
        fastconv.batch_norm_act(*arguments)
    assert str(ours.value) == str(theirs.value)


def test_what_is_not_supported_is_named() -> None:
    x, mean, var = torch.randn(2, 3, 4, 4), torch.zeros(3), torch.ones(3)
    with pytest.raises(ValueError, match="momentum is None"):
        fastconv.batch_norm_act(x, mean, var, training=True, momentum=None)
    with pytest.raises(NotImplementedError, match=r"float64, but got torch\.int32"):
        fastconv.batch_norm_act(x.int(), mean, var)
    with pytest.raises(ValueError, match=r"weight has torch\.float64"):
        fastconv.batch_norm_act(x, mean, var, torch.ones(3).double())
    with pytest.raises(ValueError, match="activation should be None"):
        fastconv.batch_norm_act(x, mean, var, activation="elu")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="residual of the input's size"):
        fastconv.batch_norm_act(x, mean, var, residual=x[:1])
    with pytest.raises(ValueError, match="given together"):
        fastconv.batch_norm_act(x, mean, None, training=True)
    with pytest.raises(ValueError, match="at least 2D"):
        fastconv.batch_norm_act(torch.randn(3), mean, var)


# --- Behind a convolution -------------------------------------------------------------------------


LAYERS: dict[int, tuple[Any, Any, Any]] = {
    1: (fastconv.ConvBNAct1d, nn.Conv1d, nn.BatchNorm1d),
    2: (fastconv.ConvBNAct2d, nn.Conv2d, nn.BatchNorm2d),
    3: (fastconv.ConvBNAct3d, nn.Conv3d, nn.BatchNorm3d),
}
"""The layers of so many axes, and PyTorch's layers that they consist of."""


def _parts(layer: Any) -> nn.Sequential:
    """PyTorch's layers with the same parameters and statistics."""
    conv, bn = layer.conv, layer.bn
    _, convolution, norm = LAYERS[len(conv.kernel_size)]
    parts = nn.Sequential(
        convolution(
            conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding,
            conv.dilation, conv.groups, conv.bias is not None, conv.padding_mode,
        ),
        norm(bn.num_features, bn.eps, bn.momentum, bn.affine, bn.track_running_stats),
    ).double()  # fmt: skip
    state = {
        name.replace("conv.", "0.").replace("bn.", "1."): value.clone()
        for name, value in layer.state_dict().items()
    }
    parts.load_state_dict(state)
    return parts.train(layer.training)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None, "track_running_stats": False, "bias": True},
    {"padding_mode": "reflect", "bias": True, "activation": ("leaky_relu", 0.2)},
    {"groups": 2, "activation": None, "eps": 1e-3, "momentum": 0.3},
]


@pytest.mark.parametrize("axes", LAYERS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_layers_are_those_of_pytorch(axes: int, options: dict[str, Any], residual: bool) -> None:
    layer = LAYERS[axes][0](4, 6, 3, padding=1, **options).double()
    size = (7, 5, 4)[:axes]
    if layer.bn.affine:
        nn.init.normal_(layer.bn.weight)
        nn.init.normal_(layer.bn.bias)
    parts, slope = _parts(layer), 0.2 if options.get("padding_mode") else 0.0
    for training in (True, True, False, True):
        layer.train(training)
        parts.train(training)
        images = torch.randn(3, 4, *size, dtype=torch.float64)
        added = torch.randn(3, 6, *size, dtype=torch.float64) if residual else None
        output = layer(images, added)
        expected = parts(images) if added is None else parts(images) + added
        if layer.activation is not None:
            expected = F.leaky_relu(expected, slope)
        torch.testing.assert_close(output, expected)
        grad = torch.randn_like(output)
        found = torch.autograd.grad(output, list(layer.parameters()), grad)
        gradients = torch.autograd.grad(expected, list(parts.parameters()), grad)
        torch.testing.assert_close(found, gradients)
        state = zip(layer.state_dict().values(), parts.state_dict().values(), strict=True)
        for one, other in state:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("axes", LAYERS)
def test_initial_values_are_those_of_pytorch(axes: int) -> None:
    ours, convolution, norm = LAYERS[axes]
    torch.manual_seed(3)
    layer = ours(4, 6, 3)
    torch.manual_seed(3)
    conv, bn = convolution(4, 6, 3, bias=False), norm(6)
    assert torch.equal(layer.conv.weight, conv.weight)
    names = [f"conv.{name}" for name in conv.state_dict()]
    assert list(layer.state_dict()) == names + [f"bn.{name}" for name in bn.state_dict()]


def test_frozen_statistics_in_training() -> None:
    """As in fine-tuning: ``bn.eval()`` in a model that trains."""
    layer = fastconv.ConvBNAct2d(4, 6, 3).train()
    layer.bn.eval()
    before = layer.bn.running_mean.clone()
    layer(torch.randn(2, 4, 7, 7)).sum().backward()
    assert torch.equal(layer.bn.running_mean, before)
    assert int(layer.bn.num_batches_tracked) == 0
    assert layer.conv.weight.grad is not None


def test_layers_of_other_classes_are_called() -> None:
    """What ``convert_sync_batchnorm`` and hooks do to a block's layers."""
    layer = fastconv.ConvBNAct2d(4, 4, 3, padding=1)
    images, seen = torch.randn(2, 4, 7, 7), []
    expected = layer(images, images)
    for name in ("conv", "bn"):
        with getattr(layer, name).register_forward_hook(lambda *_: seen.append(1)):
            torch.testing.assert_close(layer(images, images), expected)
    assert len(seen) == 2

    class Norm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return input * 0

    norm = Norm(4)
    norm, layer.bn = layer.bn, norm
    assert torch.equal(layer(images, images), torch.relu(images))
    layer.bn = norm
    layer.conv.__class__ = nn.Conv2d
    torch.testing.assert_close(layer(images, images), expected)


def test_hooks_of_all_modules_are_called_for_its_layers() -> None:
    layer, images, seen = fastconv.ConvBNAct2d(4, 4, 1), torch.randn(2, 4, 7, 7), []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module))
    )
    try:
        layer(images)
    finally:
        handle.remove()
    assert seen == [fastconv.Conv2d, nn.BatchNorm2d, fastconv.ConvBNAct2d]


@pytest.mark.parametrize("axes", LAYERS)
def test_evaluation_is_one_operator(axes: int) -> None:
    layer = LAYERS[axes][0](4, 4, 3, padding=1).eval()
    images = torch.randn(2, 4, *(7, 7, 3)[:axes])
    with torch.no_grad(), torch.profiler.profile() as profile:
        layer(images, images)
    names = [event.name for event in profile.events() if event.name.startswith("fastconv::")]
    assert names == ["fastconv::fused"]


@pytest.mark.parametrize("axes", LAYERS)
def test_memory_formats(axes: int) -> None:
    """Channels-last tensors stay so, forward and backward, also those of sequences and volumes."""
    layer = LAYERS[axes][0](4, 6, 3, padding=1, activation="silu")
    images = torch.randn(2, *(7, 5, 3)[:axes], 4).movedim(-1, 1).requires_grad_()
    output = layer(images)
    expected = F.silu(_parts(layer)(images.double())).float()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(output, images, torch.randn_like(output))
    assert output.movedim(1, -1).is_contiguous()
    assert grad.stride() == images.stride()


@pytest.mark.parametrize(("training", "residual"), list(product((True, False), (True, False))))
def test_autocast(training: bool, residual: bool) -> None:
    layer = fastconv.ConvBNAct2d(4, 6, 3, padding=1).train(training)
    images = torch.randn(3, 4, 7, 5)
    added = torch.randn(3, 6, 7, 5) if residual else None
    parts = _parts(layer).float()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(images, added)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    expected = torch.relu(parts(images) + (0 if added is None else added))
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    assert layer.conv.weight.grad is not None
    assert layer.conv.weight.grad.dtype == torch.float32


def test_batches_of_images_alone() -> None:
    layer = fastconv.ConvBNAct2d(4, 6, 3)
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D input\)"):
        layer(torch.randn(4, 7, 7))
    with pytest.raises(RuntimeError, match="running_mean should contain 6 elements not 5"):
        fastconv.conv_bn_act(
            torch.randn(1, 4, 7, 7), layer.conv.weight, None, torch.zeros(5), torch.ones(6)
        )
    with pytest.raises(RuntimeError, match="running_var must be defined in evaluation mode"):
        fastconv.conv_bn_act(torch.randn(1, 4, 7, 7), layer.conv.weight, None, torch.zeros(6), None)
    with pytest.raises(ValueError, match=r"weight of 3 to 5 dimensions \(got 2\)"):
        fastconv.conv_bn_act(torch.randn(1, 4), torch.randn(6, 4), None, None, None, training=True)
    sequences = fastconv.ConvBNAct1d(4, 6, 3)
    with pytest.raises(ValueError, match=r"expected 3D input \(got 2D input\)"):
        sequences(torch.randn(4, 7))
    with pytest.raises(RuntimeError) as theirs:
        F.conv1d(torch.randn(2, 5, 7), sequences.conv.weight)
    with pytest.raises(RuntimeError) as ours:
        sequences(torch.randn(2, 5, 7))
    assert str(ours.value) == str(theirs.value)


def test_printed_layers_show_their_activation() -> None:
    shown = repr(fastconv.ConvBNAct2d(4, 6, 3, activation="silu"))
    assert shown.startswith("fastconv.ConvBNAct2d(")
    assert "activation='silu'" in shown

    class Derived(fastconv.ConvBNAct1d):
        pass

    assert repr(Derived(4, 6, 3)).startswith("Derived(")


def test_traced_by_fx() -> None:
    model = nn.Sequential(fastconv.ConvBNAct2d(4, 6, 3), fastconv.ConvBNAct2d(6, 4, 1))
    graph = torch.fx.symbolic_trace(model)
    images = torch.randn(2, 4, 7, 7)
    torch.testing.assert_close(graph(images), model(images))


def test_checkpoints_recompute_the_same() -> None:
    layer = fastconv.ConvBNAct2d(4, 6, 3)
    images = torch.randn(2, 4, 7, 7, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(images).square().sum(), images)
    output = torch.utils.checkpoint.checkpoint(layer, images, use_reentrant=False)
    (found,) = torch.autograd.grad(output.square().sum(), images)
    assert torch.equal(found, expected)


def test_activations_are_all_tested() -> None:
    assert set(ACTIVATIONS) == set(fastconv.problem.ACTIVATIONS)
    assert nn.BatchNorm2d(1).eps == EPS
