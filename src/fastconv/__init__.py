"""Hand-written convolution kernels behind ``torch.nn.Conv2d`` and ``F.conv2d``."""

from fastconv import ops as ops  # registers torch.ops.fastconv
from fastconv._precision import precision
from fastconv.exporter import export
from fastconv.functional import conv2d
from fastconv.modules import Conv2d

__all__ = ["Conv2d", "conv2d", "export", "precision"]
__version__ = "0.1.0"
