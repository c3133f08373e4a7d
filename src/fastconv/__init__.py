"""Hand-written convolution kernels behind ``torch.nn.Conv2d`` and ``F.conv2d``."""

from fastconv import ops as ops  # registers torch.ops.fastconv
from fastconv._frozen import frozen_weights
from fastconv._precision import Precision, precision
from fastconv._version import __version__ as __version__
from fastconv.errors import (
    CompilationError,
    ExportError,
    FastconvError,
    GpuUnavailable,
    LaunchError,
)
from fastconv.exporter import bundle, export
from fastconv.functional import Activation, LayerPadding, PaddingLike, conv2d
from fastconv.modules import Conv2d, FusedConv2d
from fastconv.network import lookahead
from fastconv.network.conversion import Conversion, convert, restore
from fastconv.network.optimization import optimize
from fastconv.network.preparation import (
    Preparation,
    PreparedPass,
    Preparing,
    prepare,
    preparing,
)
from fastconv.network.report import MeasuredLayer, Optimization

__all__ = [
    "Activation",
    "CompilationError",
    "Conv2d",
    "Conversion",
    "ExportError",
    "FastconvError",
    "FusedConv2d",
    "GpuUnavailable",
    "LaunchError",
    "LayerPadding",
    "MeasuredLayer",
    "Optimization",
    "PaddingLike",
    "Precision",
    "Preparation",
    "PreparedPass",
    "Preparing",
    "bundle",
    "conv2d",
    "convert",
    "export",
    "frozen_weights",
    "optimize",
    "precision",
    "prepare",
    "preparing",
    "restore",
]

lookahead.register()
