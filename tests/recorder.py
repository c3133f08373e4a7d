"""Records the operators of fastconv that run below autograd."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Records each of fastconv's operators that runs, and its precision."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastconv":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func._opname, args[names.index("precision")]))
        return func(*args, **(kwargs or {}))
