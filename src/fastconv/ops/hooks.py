"""Functions that the operators call when a forward pass is new, set when fastconv is imported.

Whatever compiles a network's next kernels in the background lies above the operators, which do not
import it. It assigns its functions to these names; until then they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastconv.kernels.planner import Switch
from fastconv.ops.arguments import ForwardArguments
from fastconv.ops.schema import Result


def _ignore(*_: Any) -> None:
    pass


forward_recorded: Callable[[Sequence[Any], Sequence[bool]], None] = _ignore
"""Is called after each forward pass that autograd records in Python.

Arguments: those of the operator ``forward``; and for input, weight and bias, whether its gradient
is recorded.
"""

forward_prepared: Callable[[ForwardArguments, Result, Sequence[bool], Switch], None] = _ignore
"""Is called when the native host path is given launches for a forward pass, with gradients enabled.

Arguments: as above, with the checked result between them; and the switch the pass is planned by.
"""
