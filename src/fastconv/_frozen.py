"""``frozen_weights``: packed weights are cached while the weights do not change."""

from __future__ import annotations

import threading

from fastconv import native

_lock = threading.Lock()
_depth = 0


class frozen_weights:
    """Context manager for inference with weights that do not change.

    Kernels for tensor cores read weights in an order of their own, into which every call first
    packs them: that is one launch, and a third of the GPU's time with a batch of one image. Within
    this context each weight is packed once, unless autograd records the call, or a CUDA graph is
    captured. In compiled graphs this holds for weights with ``requires_grad``, as parameters have
    it: others may be buffers that the graph uses again for another weight.

    The caller guarantees that weights do not change. A change that PyTorch's version counters
    record is noticed (``copy_``, ``load_state_dict``, an optimizer's step), but they do not record
    all changes: not writes to ``weight.data``, nor those by replayed CUDA graphs, FSDP's
    all-gathers or other libraries' kernels.

    The context holds for all threads of the process. Packed weights, at most 2 GiB, are freed at
    its end. Without the native host path it has no effect, nor has it on a CPU.

    Examples:
        >>> model = fastconv.Conv2d(3, 8, 3)
        >>> requests = [torch.randn(1, 3, 9, 9) for _ in range(3)]
        >>> with torch.inference_mode(), fastconv.frozen_weights():
        ...     answers = [model(images) for images in requests]
    """

    def __enter__(self) -> None:
        self._change(1)

    def __exit__(self, *_: object) -> None:
        self._change(-1)

    @staticmethod
    def _change(by: int) -> None:
        global _depth
        with _lock:  # several threads may enter and leave contexts at once
            outermost = min(_depth, _depth + by) == 0
            _depth += by
            if outermost:
                native.freeze(_depth > 0)


def active() -> bool:
    """Whether any thread is within such a context."""
    return _depth > 0
