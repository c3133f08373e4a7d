"""The bench's own definitions of some networks, in plain ``torch.nn``, without trained weights.

They have what torchvision's networks lack: transposed convolutions, and convolutions of sequences
and of volumes other than videos.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, leaky_relu, silu


class _Layers(NamedTuple):
    """The classes of the layers of a U-Net."""

    convolution: type[nn.Conv2d | nn.Conv3d]
    transposed: type[nn.ConvTranspose2d | nn.ConvTranspose3d]
    norm: type[nn.BatchNorm2d | nn.BatchNorm3d]
    pool: type[nn.MaxPool2d | nn.MaxPool3d]


_OF_IMAGES = _Layers(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d)
_OF_VOLUMES = _Layers(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.MaxPool3d)


class UNet(nn.Module):
    """The usual U-Net: each level has twice the channels of the one above, the top ``width``."""

    def __init__(
        self,
        width: int = 64,
        levels: int = 5,
        classes: int = 2,
        channels: int = 3,
        layers: _Layers = _OF_IMAGES,
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        steps = list(pairwise(widths))
        self.top = _double_convolution(channels, width, layers)
        self.down = nn.ModuleList(
            _double_convolution(narrow, wide, layers) for narrow, wide in steps
        )
        self.pool = layers.pool(2)
        self.widen = nn.ModuleList(
            layers.transposed(wide, narrow, 2, stride=2) for narrow, wide in reversed(steps)
        )
        self.up = nn.ModuleList(
            _double_convolution(wide, narrow, layers) for narrow, wide in reversed(steps)
        )
        self.classify = layers.convolution(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        passed = [self.top(images)]
        for level in self.down:
            passed.append(level(self.pool(passed[-1])))
        found = passed.pop()
        for widen, level in zip(self.widen, self.up, strict=True):
            found = level(torch.cat([passed.pop(), widen(found)], dim=1))
        classified: Tensor = self.classify(found)
        return classified


def _double_convolution(channels: int, width: int, layers: _Layers) -> nn.Sequential:
    """Two convolutions with three taps along each axis, each with BatchNorm and ReLU."""
    return nn.Sequential(
        *(
            layer
            for inputs in (channels, width)
            for layer in (
                layers.convolution(inputs, width, 3, padding=1, bias=False),
                layers.norm(width),
                nn.ReLU(inplace=True),
            )
        )
    )


class Wav2Vec2(nn.Module):
    """The convolutions of wav2vec 2.0 (base): the feature encoder and the positional convolution.

    It reads samples of sound and returns what the transformer reads. The positional convolution has
    no weight normalization.
    """

    def __init__(self, channels: int = 512, width: int = 768) -> None:
        super().__init__()
        layers = [(10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2]
        widths = [1, *[channels] * len(layers)]
        self.features = nn.ModuleList(
            nn.Conv1d(inputs, channels, kernel, stride, bias=False)
            for inputs, (kernel, stride) in zip(widths[:-1], layers, strict=True)
        )
        self.norm = nn.GroupNorm(channels, channels)
        self.project = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, width))
        self.position = nn.Conv1d(width, width, 128, padding=64, groups=16)
        self.last_norm = nn.LayerNorm(width)

    def forward(self, sound: Tensor) -> Tensor:
        first, *others = self.features
        found = gelu(self.norm(first(sound)))
        for layer in others:
            found = gelu(layer(found))
        frames: Tensor = self.project(found.mT)
        # The kernel has an even number of taps: the last position is one too many.
        position = gelu(self.position(frames.mT)[..., :-1]).mT
        normalized: Tensor = self.last_norm(frames + position)
        return normalized


class HiFiGan(nn.Module):
    """HiFi-GAN's generator V1, which turns mel spectrograms into sound; no weight normalization."""

    def __init__(self, bands: int = 80, width: int = 512) -> None:
        super().__init__()
        rates = (8, 8, 2, 2)
        widths = [width >> level for level in range(len(rates) + 1)]
        self.first = nn.Conv1d(bands, width, 7, padding=3)
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(wide, narrow, 2 * rate, stride=rate, padding=rate // 2)
            for rate, (wide, narrow) in zip(rates, pairwise(widths), strict=True)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(_ResidualBlock(narrow, taps) for taps in (3, 7, 11))
            for narrow in widths[1:]
        )
        self.last = nn.Conv1d(widths[-1], 1, 7, padding=3)

    def forward(self, spectrogram: Tensor) -> Tensor:
        found: Tensor = self.first(spectrogram)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            found = up(leaky_relu(found, 0.1))
            assert isinstance(blocks, nn.ModuleList)
            found = torch.stack([block(found) for block in blocks]).mean(0)
        sound: Tensor = self.last(leaky_relu(found))
        return sound.tanh()


class _ResidualBlock(nn.Module):
    """Three pairs of a dilated convolution and one that is not, each with a skip connection."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(
            nn.Conv1d(width, width, taps, dilation=rate, padding=rate * (taps // 2))
            for rate in (1, 3, 5)
        )
        self.plain = nn.ModuleList(
            nn.Conv1d(width, width, taps, padding=taps // 2) for _ in self.dilated
        )

    def forward(self, found: Tensor) -> Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            found = found + plain(leaky_relu(dilated(leaky_relu(found, 0.1)), 0.1))
        return found


class Dcgan(nn.Module):
    """DCGAN's generator: images of 64x64 pixels from latent vectors of 100 numbers."""

    def __init__(self, latent: int = 100, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in reversed(range(4))]
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent, widths[0], 4, bias=False)]
        for wide, narrow in pairwise(widths):
            layers += [nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
            layers.append(nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(widths[-1]), nn.ReLU(inplace=True)]
        layers.append(nn.ConvTranspose2d(widths[-1], 3, 4, stride=2, padding=1, bias=False))
        self.layers = nn.Sequential(*layers, nn.Tanh())

    def forward(self, latent: Tensor) -> Tensor:
        images: Tensor = self.layers(latent)
        return images


class VideoDecoder(nn.Module):
    """The decoder of a causal video autoencoder: a frame depends on no latent of a later one.

    Each level but the last makes frames twice as high and wide, and the first two of them, videos
    of twice as many frames.
    """

    def __init__(self, latent: int = 16, width: int = 96) -> None:
        super().__init__()
        widths = [4 * width, 4 * width, 2 * width, width]
        self.first = _CausalConvolution(latent, widths[0])
        self.levels = nn.ModuleList(
            nn.Sequential(_VideoBlock(inputs, outputs), _VideoBlock(outputs, outputs))
            for inputs, outputs in pairwise([widths[0], *widths])
        )
        self.widen = nn.ModuleList(
            nn.Sequential(
                nn.Upsample(scale_factor=(2.0 if level < 2 else 1.0, 2.0, 2.0)),
                nn.Conv3d(outputs, outputs, (1, 3, 3), padding=(0, 1, 1)),
            )
            for level, outputs in enumerate(widths[:-1])
        )
        self.norm = nn.GroupNorm(32, width)
        self.last = _CausalConvolution(width, 3)

    def forward(self, latents: Tensor) -> Tensor:
        found: Tensor = self.first(latents)
        for level, widen in zip(self.levels, (*self.widen, nn.Identity()), strict=True):
            found = widen(level(found))
        video: Tensor = self.last(silu(self.norm(found)))
        return video


class _CausalConvolution(nn.Sequential):
    """A 3x3x3 convolution that reads a frame and the two before it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        past = nn.ConstantPad3d((0, 0, 0, 0, 2, 0), 0.0)
        super().__init__(past, nn.Conv3d(inputs, outputs, 3, padding=(0, 1, 1)))


class _VideoBlock(nn.Module):
    """Two causal convolutions with normalization and SiLU before each, and a skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                layer
                for width in (inputs, outputs)
                for layer in (
                    nn.GroupNorm(32, width),
                    nn.SiLU(),
                    _CausalConvolution(width, outputs),
                )
            )
        )
        same = inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv3d(inputs, outputs, 1)

    def forward(self, found: Tensor) -> Tensor:
        sums: Tensor = self.skip(found) + self.layers(found)
        return sums


class Written(NamedTuple):
    """How a network is made, and the shape of one of its inputs.

    The shape is (channels, length), (channels, height, width) or (channels, depth, height, width).
    """

    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    batch: int | None = None  # for whole networks, if it is not the usual one


_TEN_SECONDS = 10 * 16_000  # samples of sound, as wav2vec 2.0 reads it

NETWORKS = {
    "unet": Written(UNet, (3, 256, 256), 16),
    "wav2vec2": Written(Wav2Vec2, (1, _TEN_SECONDS), 16),
    "hifigan": Written(HiFiGan, (80, 128), 16),
    "dcgan": Written(Dcgan, (100, 1, 1)),
    "unet3d": Written(
        partial(UNet, 32, classes=4, channels=4, layers=_OF_VOLUMES), (4, 128, 128, 128), 2
    ),
    "video_decoder": Written(VideoDecoder, (16, 2, 60, 104), 1),
}
"""The networks by their names for ``--model`` and ``--networks``."""
