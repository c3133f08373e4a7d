"""Hand-written convolution kernels behind PyTorch's 1-D, 2-D, 3-D and transposed convolutions."""

from fastconv import ops as ops  # registers torch.ops.fastconv
from fastconv._frozen import frozen_weights
from fastconv._precision import Precision, precision
from fastconv._version import __version__ as __version__
from fastconv.batchnorm import (
    ConvBNAct1d,
    ConvBNAct2d,
    ConvBNAct3d,
    batch_norm_act,
    conv_bn_act,
)
from fastconv.causal import CausalActivation, causal_conv1d_fn, causal_conv1d_update
from fastconv.errors import (
    CompilationError,
    ExportError,
    FastconvError,
    GpuUnavailable,
    LaunchError,
)
from fastconv.exporter import bundle, export
from fastconv.functional import conv1d, conv2d, conv3d
from fastconv.fused import (
    FusedConv1d,
    FusedConv2d,
    FusedConv3d,
    FusedConvTranspose1d,
    FusedConvTranspose2d,
    FusedConvTranspose3d,
)
from fastconv.geometry import Activation, LayerPadding, PaddingLike
from fastconv.modules import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
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
from fastconv.network.report import MeasuredBlock, MeasuredLayer, Optimization
from fastconv.transposed import conv_transpose1d, conv_transpose2d, conv_transpose3d

__all__ = [
    "Activation",
    "CausalActivation",
    "CompilationError",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvBNAct1d",
    "ConvBNAct2d",
    "ConvBNAct3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Conversion",
    "ExportError",
    "FastconvError",
    "FusedConv1d",
    "FusedConv2d",
    "FusedConv3d",
    "FusedConvTranspose1d",
    "FusedConvTranspose2d",
    "FusedConvTranspose3d",
    "GpuUnavailable",
    "LaunchError",
    "LayerPadding",
    "MeasuredBlock",
    "MeasuredLayer",
    "Optimization",
    "PaddingLike",
    "Precision",
    "Preparation",
    "PreparedPass",
    "Preparing",
    "batch_norm_act",
    "bundle",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_bn_act",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
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
