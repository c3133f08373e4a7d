"""The operators ``torch.ops.fastconv.*``, and their registrations with PyTorch.

``forward``, ``input_grad`` and ``weight_grad`` are each linear in both of their tensors, and closed
under differentiation: the gradients and tangents of each are calls of the same three. So double
backward, and any higher one, needs no further code.

The three are bilinear, not sesquilinear: none of them conjugates complex tensors; the autograd
formulas do.

``fused`` is ``forward`` with an epilogue in the same kernel. Where autograd records it, it is
computed by ``forward`` and PyTorch's elementwise operators, which have derivatives.

``transposed`` is ``input_grad`` with a bias and an epilogue, in the terms of a transposed
convolution. Its gradients are ``forward`` and ``weight_grad``.

``backward`` computes both gradients of a convolution, transposed or not, in one call: see
``ops/gradients.py``.

One-dimensional convolutions are those of images with one row: they have no operators of their own.

Causal depthwise convolutions with states are three operators apart: see ``ops/causal.py``. So are
two for batch normalization with a residual and an activation: see ``ops/batchnorm.py``.
"""

from fastconv import native
from fastconv.ops import (
    autocast,
    autograd,
    batching,
    batchnorm,
    blocks,
    causal,
    decomposition,
    devices,
    entries,
    flops,
    gradients,
    inductor,
    sharding,
)
from fastconv.ops.schema import (
    backward,
    forward,
    fused,
    input_grad,
    transposed,
    weight_grad,
)

__all__ = ["backward", "forward", "fused", "input_grad", "transposed", "weight_grad"]

devices.register()
autograd.register()
native.register(
    entries.make_entry,
    {
        **{name: (*devices.kernels(name), kernel) for name, kernel in autograd.kernels.items()},
        **batchnorm.KERNELS,
    },
    (batchnorm.norm_gradients, blocks.block_gradients, batchnorm.norm_output),
)
autocast.register("cpu", "AutocastCPU")
autocast.register("cuda", "AutocastCUDA")
batching.register()
batchnorm.register()
causal.register()
decomposition.register()
flops.register()
gradients.register()
inductor.register()
sharding.register()
