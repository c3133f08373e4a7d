"""The portable kernels, on plain CUDA cores: any geometry, any real dtype, every GPU since Volta.

They are taken where no other family has a kernel for a problem, or where that is estimated slower.
"""

from fastconv.kernels.direct.forward.plan import forward, input_grad
from fastconv.kernels.direct.wgrad.plan import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
