"""Hand-written convolution kernels behind ``torch.nn.Conv2d`` and ``F.conv2d``."""

from fastconv import ops as ops  # registers torch.ops.fastconv
from fastconv._frozen import frozen_weights
from fastconv._precision import precision
from fastconv._version import __version__ as __version__
from fastconv.exporter import export
from fastconv.functional import conv2d
from fastconv.modules import Conv2d
from fastconv.network import lookahead
from fastconv.network.optimization import optimize, restore
from fastconv.network.preparation import prepare, preparing

__all__ = [
    "Conv2d",
    "conv2d",
    "export",
    "frozen_weights",
    "optimize",
    "precision",
    "prepare",
    "preparing",
    "restore",
]

lookahead.register()
