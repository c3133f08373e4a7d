"""A user's script that has every public name, for mypy alone: nothing runs it.

``tests/api/test_types.py`` checks it as strictly as mypy can. A comment ``type: ignore`` marks what
mypy has to refuse: one that is not needed is an error.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fastconv


class Net(nn.Module):
    """A network with an attribute of its own, to see that its type is kept."""

    def __init__(self, padding: fastconv.LayerPadding, activation: fastconv.Activation) -> None:
        super().__init__()
        self.conv = fastconv.Conv2d(3, 8, (5, 9), padding=padding, precision="tf32")
        self.activation: fastconv.Activation = activation
        self.classes = 10

    def forward(self, images: Tensor) -> Tensor:
        return fastconv.conv2d(
            images,
            self.conv.weight,
            self.conv.bias,
            self.conv.stride,
            self.conv.padding,  # PyTorch's type of it is str | tuple[int, ...]
            self.conv.dilation,
            self.conv.groups,
            precision=self.conv.precision,
            activation=self.activation,
        )


class Standardized(nn.Conv2d):
    """A layer that computes its weight: the usual way to call the function."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return fastconv.conv2d(
            input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


def causal(x: Tensor, state: Tensor, weight: Tensor, final: bool) -> None:
    activation: fastconv.CausalActivation = "silu"
    assert_type(fastconv.causal_conv1d_fn(x, weight, activation=activation), Tensor)
    pair = fastconv.causal_conv1d_fn(x, weight, initial_states=state, return_final_states=True)
    assert_type(pair, tuple[Tensor, Tensor])
    either = fastconv.causal_conv1d_fn(x, weight, None, None, state, final)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert_type(fastconv.causal_conv1d_update(x, state, weight, None, "swish"), Tensor)
    fastconv.causal_conv1d_fn(x, weight, activation="gelu")  # type: ignore[call-overload]


def normalization(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor) -> None:
    activation: fastconv.Activation = ("leaky_relu", 0.1)
    assert_type(fastconv.batch_norm_act(x, mean, var, training=True, activation=activation), Tensor)
    fastconv.batch_norm_act(x, None, None, training=True, momentum=None, residual=x)
    assert_type(fastconv.conv_bn_act(x, weight, None, mean, var, stride=2), Tensor)
    layer = fastconv.ConvBNAct2d(3, 4, 3, padding="same", activation=None, precision="ieee")
    assert_type(layer.conv, fastconv.Conv2d)
    assert_type(fastconv.ConvBNAct1d(3, 4, (3,), padding=((2, 0),)).conv, fastconv.Conv1d)
    assert_type(fastconv.ConvBNAct3d(3, 4, (1, 3, 3), padding="same").bn, nn.BatchNorm3d)
    fastconv.ConvBNAct1d(3, 4, (3, 3))  # type: ignore[arg-type]
    fastconv.batch_norm_act(x, mean, var, activation="elu")  # type: ignore[arg-type]
    fastconv.conv_bn_act(x, weight, mean, var)  # type: ignore[call-arg]
    fastconv.ConvBNAct2d(3, 4, 3, momentum="0.1")  # type: ignore[arg-type]


def layers(images: Tensor) -> None:
    layer = fastconv.Conv2d(3, 8, 3, 1, ((1, 0), (2, 1)), bias=False, dtype=torch.float16)
    assert_type(layer.forward(images), Tensor)
    plain: nn.Conv2d = layer
    fastconv.conv2d(images, plain.weight, padding=[1, 2], stride=[2, 2])
    fastconv.conv2d(images, plain.weight, padding=[[1, 0], [2, 1]])
    fastconv.conv2d(images, plain.weight, activation=("leaky_relu", 0.2), residual=images)
    fused = fastconv.FusedConv2d(3, 3, 1)
    fused.activation = "gelu_tanh"
    assert_type(fused.takes_residual, bool)
    assert_type(fused.forward(images, images), Tensor)
    padding: fastconv.PaddingLike = "same"
    fastconv.conv2d(images, plain.weight, padding=padding)

    fastconv.Conv2d(3, 8, 3, padding="sane")  # type: ignore[arg-type]
    fastconv.Conv2d(3, 8, 3, padding=(1, 2, 3))  # type: ignore[arg-type]
    fastconv.Conv2d(3, 8, 3, padding=((1, 2), (3,)))  # type: ignore[arg-type]
    fastconv.Conv2d(3, 8, 3, padding_mode="mirror")  # type: ignore[arg-type]
    fastconv.Conv2d(3, 8, 3, precision="fp32")  # type: ignore[arg-type]
    fastconv.conv2d(images, plain.weight, activation="rleu")  # type: ignore[arg-type]
    fastconv.conv2d(images, plain.weight, activation=("relu", 0.2))  # type: ignore[arg-type]
    fastconv.conv2d(images, plain.weight, None, 1, 0, 1, 1, "tf32")  # type: ignore[call-arg]
    fastconv.conv2d(images, plain.weight, padding=0.5)  # type: ignore[arg-type]
    fused.activation = "rleu"  # type: ignore[assignment]
    fastconv.conv2d(images)  # type: ignore[call-arg]


def volumes(video: Tensor) -> None:
    layer = fastconv.Conv3d(3, 8, 3, padding=((2, 0), (1, 1), (1, 1)), precision="tf32")
    assert_type(layer.forward(video), Tensor)
    up = fastconv.ConvTranspose3d(8, 3, 2, (1, 2, 2), padding=((1, 0), (0, 0), (0, 1)))
    fastconv.conv3d(video, layer.weight, padding=layer.padding, stride=layer.stride)
    fastconv.conv3d(video, layer.weight, padding=[[2, 0], [1, 1], [1, 1]], activation="silu")
    fastconv.conv_transpose3d(video, up.weight, None, 2, 1, 1, residual=video)
    assert_type(fastconv.FusedConv3d(3, 3, 1).forward(video, video), Tensor)
    assert_type(fastconv.FusedConvTranspose3d(3, 3, 1).forward(video, residual=video), Tensor)
    fastconv.Conv3d(3, 8, 3, padding=(1, 2))  # type: ignore[arg-type]
    fastconv.ConvTranspose3d(3, 8, 3, padding="same")  # type: ignore[arg-type]


def sequences(audio: Tensor, images: Tensor) -> None:
    assert_type(fastconv.FusedConv1d(3, 3, 1).forward(audio, audio), Tensor)
    assert_type(fastconv.FusedConvTranspose1d(3, 3, 1).forward(audio, residual=audio), Tensor)
    wider = fastconv.FusedConvTranspose2d(3, 3, 2, stride=2)
    wider.activation = "relu"
    assert_type(wider.forward(images, [9, 9]), Tensor)
    layer = fastconv.Conv1d(3, 8, 4, padding=((3, 0),), precision="tf32")
    assert_type(layer.forward(audio), Tensor)
    up = fastconv.ConvTranspose1d(8, 3, 4, 2, padding=((1, 0),), output_padding=1)
    assert_type(up.forward(audio, output_size=[9]), Tensor)
    plain: nn.ConvTranspose2d = fastconv.ConvTranspose2d(8, 3, 2, stride=(2, 2))
    fastconv.conv1d(audio, layer.weight, padding=layer.padding, stride=layer.stride)
    fastconv.conv1d(audio, layer.weight, padding=[[3, 0]], activation="silu")
    fastconv.conv_transpose1d(audio, up.weight, None, 2, 1, 1, residual=audio)
    fastconv.conv_transpose2d(images, plain.weight, padding=((1, 0), (2, 1)), precision="ieee")

    fastconv.Conv1d(3, 8, 3, padding=(1, 2))  # type: ignore[arg-type]
    fastconv.Conv1d(3, 8, 3, padding_mode="mirror")  # type: ignore[arg-type]
    fastconv.ConvTranspose1d(3, 8, 3, padding="same")  # type: ignore[arg-type]
    fastconv.ConvTranspose2d(3, 8, 3, padding_mode="reflect")  # type: ignore[arg-type]
    fastconv.conv1d(audio, layer.weight, activation="rleu")  # type: ignore[arg-type]
    fastconv.conv_transpose2d(images, plain.weight, padding="same")  # type: ignore[arg-type]
    fastconv.conv_transpose1d(audio, up.weight, precision="fp32")  # type: ignore[arg-type]


def networks(images: Tensor) -> None:
    net = Net(padding="same", activation="relu")
    assert_type(fastconv.optimize(net, images, inplace=True, fuse=False, progress=True), Net)
    assert_type(fastconv.optimize(net, images=images).classes, int)
    assert_type(fastconv.convert(net), Net)
    assert_type(fastconv.convert(net, inplace=True).classes, int)
    assert_type(fastconv.restore(net), Net)
    assert_type(fastconv.convert(nn.Conv2d(1, 1, 1)).weight, Tensor)

    fastconv.convert("net")  # type: ignore[type-var]
    fastconv.convert(net, True)  # type: ignore[call-arg]
    fastconv.optimize(net, images, inplace="yes")  # type: ignore[arg-type]
    fastconv.restore(net.forward)  # type: ignore[type-var]
    fastconv.optimize(net, images).no_such_method()  # type: ignore[operator]


def reports(net: Net, images: Tensor) -> None:
    optimization = fastconv.Optimization.of(net)
    assert_type(optimization, fastconv.Optimization)
    rows: tuple[fastconv.MeasuredLayer, ...] = optimization.layers
    for row in rows:
        assert_type(row.layers, int)
        assert_type(row.why, str)
        if row.times is not None:
            assert_type(row.times.ours, float)
            assert_type(row.chosen_ms(row.times), float)
    blocks: tuple[fastconv.MeasuredBlock, ...] = optimization.blocks
    for block in blocks:
        assert_type(block.why, str)
    conversion = fastconv.Conversion.of(net)
    assert_type(conversion.exchanged, tuple[str, ...])
    for name, why in conversion.left.items():
        assert_type(name + why, str)
    preparation = fastconv.prepare(net, images, progress=False)
    assert_type(preparation, fastconv.Preparation)
    passes: tuple[fastconv.PreparedPass, ...] = preparation.passes
    assert_type([one.label for one in passes], list[str])
    with fastconv.preparing(progress=False) as step:
        net(images)
    assert_type(step, fastconv.Preparing)
    assert_type(step.report, fastconv.Preparation | None)

    optimization.exchanged = ()  # type: ignore[misc]
    preparation.no_such_field  # type: ignore[attr-defined] # noqa: B018
    step.report.seconds  # type: ignore[union-attr] # noqa: B018
    fastconv.Conversion.of("net")  # type: ignore[arg-type]


def contexts(mode: fastconv.Precision) -> None:
    with fastconv.precision(mode), fastconv.frozen_weights():
        pass
    assert_type(fastconv.precision("ieee").mode, fastconv.Precision)

    fastconv.precision("fp32")  # type: ignore[arg-type]
    fastconv.frozen_weights(True)  # type: ignore[call-arg]
    text: str = mode
    fastconv.precision(text)  # type: ignore[arg-type]


def exported() -> str:
    fastconv.export("dilated5x9", dtypes=["float32", "bfloat16"])

    fastconv.export("dilated5x9", dtypes=["fp32"])  # type: ignore[list-item]
    fastconv.export(3)  # type: ignore[arg-type]
    return fastconv.export(shape="8x4x9x9 6x4x3x3", attribute=None, output="model.py")


def bundled(images: Tensor) -> Path:
    fastconv.bundle(fastconv.Conv2d(3, 4, 3), images, (images,), output="model.fastconv")

    fastconv.bundle("model.pt2", images)  # type: ignore[call-arg]
    fastconv.bundle("model.pt2", images, output="model.fastconv", gpus=90)  # type: ignore[arg-type]
    return fastconv.bundle("model.pt2", images, output="model.fastconv", gpus=["sm_90"])


def errors() -> None:
    try:
        exported()
    except fastconv.ExportError as error:
        as_value_error: ValueError = error
        print(as_value_error)
    except (fastconv.GpuUnavailable, fastconv.CompilationError, fastconv.LaunchError) as error:
        as_runtime_error: RuntimeError = error
        print(as_runtime_error)
    except fastconv.FastconvError as error:
        as_runtime_error = error  # type: ignore[assignment]
    assert_type(fastconv.__version__, str)
    fastconv.no_such_name  # type: ignore[attr-defined] # noqa: B018
