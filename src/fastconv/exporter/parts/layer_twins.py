"""PyTorch's twin of a model with any layers, in place of the self-check's, which knows Conv2d."""

import copy

from torch import nn

from fastconv.exporter.parts.layers import (
    Conv1d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from fastconv.exporter.parts.runtime import Conv2d

# PyTorch's classes by ours; a class comes before those that it is derived from.
TWINS = {
    ConvTranspose1d: nn.ConvTranspose1d,
    ConvTranspose3d: nn.ConvTranspose3d,
    ConvTranspose2d: nn.ConvTranspose2d,
    Conv1d: nn.Conv1d,
    Conv3d: nn.Conv3d,
    Conv2d: nn.Conv2d,
}


def pytorch_twin(module: nn.Module) -> nn.Module:
    """A copy of the module with PyTorch's convolutions and the same parameters."""
    if isinstance(module, Conv2d):
        twin_class = next(theirs for ours, theirs in TWINS.items() if isinstance(module, ours))
        sizes = {
            name: getattr(module, name)[2 - module.weight.dim() :]
            for name in ("kernel_size", "stride", "padding", "dilation", "output_padding")
            if hasattr(module, name)
        }
        layer = twin_class(
            module.in_channels, module.out_channels, groups=module.groups,
            bias=module.bias is not None, **sizes,
        )  # fmt: skip
        layer.load_state_dict(module.state_dict())
        return layer.to(module.weight)
    twin = copy.deepcopy(module)
    for name, child in module.named_children():
        setattr(twin, name, pytorch_twin(child))
    return twin
