"""1-D and transposed layers of real networks: all passes against float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
import oracle
from fastconv import native
from gpu.helpers import CUDA, precompile
from strategies import channels_last


class Layer(NamedTuple):
    """A layer's function, the shapes of its input and weight, and its geometry."""

    function: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: dict[str, Any]

    @property
    def channels(self) -> int:
        """The output's channels."""
        if self.function == "conv1d":
            return self.weight[0]
        return self.weight[1] * int(self.geometry.get("groups", 1))


# Sizes are those of the networks, and batches such that references in float64 take little memory.
LAYERS = {
    "short convolution": Layer(
        "conv1d", (1, 2048, 16384), (2048, 1, 4), {"padding": 3, "groups": 2048}
    ),
    "mamba": Layer("conv1d", (2, 4096, 2048), (4096, 1, 4), {"padding": 3, "groups": 4096}),
    "wav2vec positions": Layer(
        "conv1d", (2, 768, 499), (768, 48, 128), {"padding": 64, "groups": 16}
    ),
    "wav2vec stride 2": Layer("conv1d", (2, 512, 15999), (512, 512, 3), {"stride": 2}),
    "whisper 2": Layer("conv1d", (2, 512, 3000), (512, 512, 3), {"stride": 2, "padding": 1}),
    "hifigan k11": Layer("conv1d", (2, 128, 8192), (128, 128, 11), {"dilation": 5, "padding": 25}),
    "hifigan k3": Layer("conv1d", (2, 32, 65536), (32, 32, 3), {"dilation": 3, "padding": 3}),
    "kernelbench 67": Layer("conv1d", (1, 64, 131072), (128, 64, 3), {}),
    "kernelbench 76": Layer("conv1d", (1, 64, 524280), (128, 64, 3), {"stride": 3, "dilation": 4}),
    "hifigan up 16": Layer(
        "conv_transpose1d", (4, 512, 128), (512, 256, 16), {"stride": 8, "padding": 4}
    ),
    "hifigan up 4": Layer(
        "conv_transpose1d", (2, 64, 32768), (64, 32, 4), {"stride": 2, "padding": 1}
    ),
    "oobleck up 20": Layer(
        "conv_transpose1d", (1, 2048, 215), (2048, 1024, 20), {"stride": 10, "padding": 5}
    ),
    "kernelbench 74": Layer("conv_transpose1d", (2, 32, 131072), (32, 64, 5), {"dilation": 3}),
    "kernelbench 79": Layer(
        "conv_transpose1d",
        (2, 32, 131072),
        (32, 64, 3),
        {"stride": 2, "dilation": 2, "padding": 1},
    ),
    "depthwise up": Layer(
        "conv_transpose1d", (2, 512, 1000), (512, 1, 4), {"stride": 2, "padding": 1, "groups": 512}
    ),
    "unet up 2": Layer("conv_transpose2d", (2, 256, 64, 64), (256, 128, 2, 2), {"stride": 2}),
    "dcgan up 4": Layer(
        "conv_transpose2d", (8, 256, 32, 32), (256, 128, 4, 4), {"stride": 2, "padding": 1}
    ),
    "odd up": Layer(
        "conv_transpose2d",
        (2, 32, 64, 128),
        (32, 64, 3, 3),
        {"stride": 5, "padding": 1, "dilation": 2, "output_padding": 3},
    ),
    "fcn": Layer(
        "conv_transpose2d",
        (2, 21, 16, 16),
        (21, 1, 64, 64),
        {"stride": 32, "padding": 16, "groups": 21},
    ),
    "kernelbench 75": Layer(
        "conv_transpose2d",
        (2, 32, 128, 256),
        (32, 16, 3, 5),
        {"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1), "groups": 4},
    ),
    "kernelbench 78": Layer(
        "conv_transpose2d", (1, 32, 512, 1024), (32, 32, 3, 7), {"padding": (1, 3)}
    ),
}

MODES = {
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bfloat16": (torch.bfloat16, "ieee"),
}
# Largest error of an element, relative to the sum of its terms' magnitudes. Both operands of TF32
# are rounded to 11 significant bits; 16-bit results are rounded once, or once more after the bias.
BOUNDS = {"ieee": 2.0**-20, "tf32": 2.0**-9, "bfloat16": 2.0**-7}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "channels last": channels_last,
}


def _tensors(layer: Layer, mode: str, layout: str) -> list[Tensor]:
    torch.manual_seed(0)
    dtype, arrange = MODES[mode][0], LAYOUTS[layout]
    shapes = (layer.input, layer.weight, (layer.channels,))
    tensors = [torch.randn(shape, device=CUDA).to(dtype) for shape in shapes]
    return [arrange(tensors[0]), *tensors[1:]]


def _reference(layer: Layer, tensors: list[Tensor], above: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients in float64, on the GPU."""
    function = getattr(F, layer.function)
    doubles = [tensor.double().contiguous() for tensor in tensors]
    return oracle.with_gradients(function, doubles, above.double(), **layer.geometry)


CASES = [
    (name, mode, layout)
    for name, mode, layout in product(LAYERS, MODES, LAYOUTS)
    if (mode, layout) != ("ieee", "channels last")
]


@pytest.fixture(scope="module")
def _compiled() -> None:
    def call(name: str, mode: str, layout: str) -> None:
        layer = LAYERS[name]
        leaves = [tensor.requires_grad_() for tensor in _tensors(layer, mode, layout)]
        function, precision = getattr(fastconv, layer.function), MODES[mode][1]
        output = function(*leaves, **layer.geometry, precision=precision)
        torch.autograd.grad(output, leaves, torch.zeros_like(output))

    precompile((lambda case=case: call(*case)) for case in CASES)


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(("name", "mode", "layout"), CASES)
def test_all_passes(name: str, mode: str, layout: str) -> None:
    layer = LAYERS[name]
    tensors = _tensors(layer, mode, layout)
    function, precision = getattr(fastconv, layer.function), MODES[mode][1]
    output = function(*tensors, **layer.geometry, precision=precision)
    above = torch.randn_like(output)
    results = oracle.with_gradients(function, tensors, above, **layer.geometry, precision=precision)
    assert results[0].equal(output)
    expected = _reference(layer, tensors, above)
    sizes = _reference(layer, [tensor.abs() for tensor in tensors], above.abs())
    for what, ours, exact, size in zip(
        ("output", "input", "weight", "bias"), results, expected, sizes, strict=True
    ):
        error = (ours.double() - exact).abs() / size.clamp(min=torch.finfo(ours.dtype).tiny)
        assert float(error.max()) <= BOUNDS[mode], what


@pytest.mark.parametrize("name", ["hifigan k3", "mamba", "kernelbench 67"])
def test_sequences_of_channels_stay_so(name: str) -> None:
    layer = LAYERS[name]
    tensors = _tensors(layer, "bfloat16", "channels last")
    assert fastconv.conv1d(*tensors, **layer.geometry).mT.is_contiguous()


# Layers whose kernels apply an epilogue or part of it, and those of strides that leave gaps.
EPILOGUES = {
    "stride 1": Layer("conv_transpose2d", (2, 64, 40, 40), (64, 48, 3, 3), {"padding": 1}),
    "stride 2": Layer("conv_transpose2d", (2, 64, 20, 24), (64, 48, 4, 4), {"stride": 2}),
    "gaps": Layer("conv_transpose2d", (2, 64, 20, 24), (64, 48, 2, 1), {"stride": (3, 2)}),
    "gaps of dilation": Layer(
        "conv_transpose1d", (2, 64, 999), (64, 48, 3), {"stride": 2, "dilation": 2}
    ),
    "depthwise": Layer("conv_transpose1d", (2, 64, 999), (64, 1, 4), {"stride": 2, "groups": 64}),
    "sequence": Layer("conv1d", (2, 64, 999), (48, 64, 3), {"padding": ((2, 0),)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ["identity", "relu", "silu"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, activation: str, added: bool, layout: str) -> None:
    layer = EPILOGUES[name]
    reference = oracle.conv1d if layer.function == "conv1d" else oracle.conv_transpose
    function = getattr(fastconv, layer.function)
    tensors = _tensors(layer, "ieee", layout)
    exact = reference(*(tensor.double() for tensor in tensors), **layer.geometry)
    residual = torch.randn_like(exact).float() if added else None
    with torch.no_grad():
        output = function(
            *tensors, **layer.geometry, precision="ieee", activation=activation, residual=residual
        )
    expected = exact if residual is None else exact + residual.double()
    expected = oracle.ACTIVATIONS[activation](expected)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("_native_library")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mamba", "hifigan up 16", "depthwise up", "odd up", "dcgan up 4"])
def test_the_native_host_path_gives_pythons_bits(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS[name]
    tensors = _tensors(layer, "bfloat16", layout)
    function = getattr(fastconv, layer.function)
    above = torch.randn_like(function(*tensors, **layer.geometry))
    results = []
    for path in (None, native.load()):
        monkeypatch.setattr(native, "conv2d", path)
        results.append(oracle.with_gradients(function, tensors, above, **layer.geometry))
    for python, ours in zip(*results, strict=True):
        assert ours.stride() == python.stride()
        assert ours.equal(python)


def test_frozen_weights() -> None:
    layer = LAYERS["hifigan k11"]
    tensors = _tensors(layer, "tf32", "contiguous")
    with torch.no_grad(), fastconv.frozen_weights():
        results = [fastconv.conv1d(*tensors, **layer.geometry) for _ in range(3)]
    assert results[0].equal(results[1])
    assert results[1].equal(results[2])


@pytest.mark.usefixtures("host_path")
def test_a_graph_of_a_whole_step() -> None:
    """CUDA graphs capture training with both kinds of layers, right after a first step."""
    model = torch.nn.Sequential(
        fastconv.Conv1d(16, 32, 5, padding=2),
        torch.nn.LeakyReLU(0.1),
        fastconv.ConvTranspose1d(32, 8, 4, stride=2, padding=1),
    ).to(CUDA)
    input = torch.randn(4, 16, 500, device=CUDA)
    parameters = list(model.parameters())

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(input).square().mean(), parameters))

    gradients()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = gradients()
    input.copy_(torch.randn_like(input))
    graph.replay()
    torch.testing.assert_close(recorded, gradients(), rtol=0, atol=0)
