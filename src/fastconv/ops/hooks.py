"""Functions that the operators call when the pass of a layer is new, set when fastconv is imported.

Whatever compiles a network's next kernels in the background lies above the operators, which do not
import it. It assigns its functions to these names; until then they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastconv.kernels.planner import Switch
from fastconv.ops.arguments import Arguments
from fastconv.ops.schema import Result


def _ignore(*_: Any) -> None:
    pass


layer_recorded: Callable[[str, Sequence[Any], Sequence[bool]], None] = _ignore
"""Is called after each call of a layer that autograd records in Python.

Arguments: the operator's name, ``"forward"`` or ``"transposed"``; its arguments; and for input,
weight and bias, whether its gradient is recorded.
"""

layer_prepared: Callable[[str, Arguments, Result, Sequence[bool], Switch], None] = _ignore
"""Is called when the native host path is given launches for a layer, with gradients enabled.

Arguments: as above, with the checked result before the last; and the switch that it is planned by.
"""

block_convolved: Callable[[], None] = _ignore
"""Is called by ``conv_bn_act`` in training, between its convolution and its normalization.

That is, where Python computes them, and no compiler traces it.
"""
