"""Weights that do not change, so that what is made of them can be kept."""

from __future__ import annotations

import threading

from fastconv import native

_lock = threading.Lock()
_depth = 0


class frozen_weights:
    """Context manager for inference with weights that stay what they are.

    Tensor cores read weights in an order of their own, in which every call puts them first: a
    launch, and a third of the GPU's time where there is one image. Within this context it is done
    once for each weight, unless autograd records the call, or a CUDA graph is captured.

    You vouch for the weights. A change that PyTorch's version counters tell is seen (``copy_``,
    ``load_state_dict``, an optimizer's step), but they do not tell of all: not of writing to
    ``weight.data``, nor of replayed CUDA graphs, FSDP's all-gathers or other libraries' kernels.

    Holds for the whole process, for all of its threads; what is kept (2 GiB at most) is
    dropped at the end. Without the native host path it has no effect.

        >>> with torch.inference_mode(), fastconv.frozen_weights():
        ...     for batch in requests:
        ...         answers = model(batch)
    """

    def __enter__(self) -> None:
        self._change(1)

    def __exit__(self, *_: object) -> None:
        self._change(-1)

    @staticmethod
    def _change(by: int) -> None:
        global _depth
        with _lock:  # several threads may be in their own
            outermost = min(_depth, _depth + by) == 0
            _depth += by
            if outermost:
                native.freeze(_depth > 0)


def active() -> bool:
    """Whether some thread is within such a context."""
    return _depth > 0
