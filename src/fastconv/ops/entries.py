"""What the native host path asks of Python, once for calls of the same form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, channels_last

from fastconv.backends import cuda
from fastconv.kernels import planner
from fastconv.kernels.planner import Pass
from fastconv.ops import ahead, autograd, devices
from fastconv.ops.schema import (
    BIAS,
    PRECISION,
    Result,
    describe_forward,
    describe_input_grad,
    describe_weight_grad,
)


class Entry(NamedTuple):
    """How calls of one form are computed; ``host.cc`` has a struct of that name.

    They are done by ``launches`` (see ``Prepared.description``), or by ``fill``, which is called
    with the operator's two tensors, the bias or its gradient (or None), the result and the
    precision.
    """

    shape: tuple[int, ...]
    channels_last: bool
    bias_elements: int
    copied: tuple[bool, bool] = (False, False)
    scratch_bytes: int = 0
    launches: Sequence[Any] = ()
    packs: int = 0  # as a Plan's
    fill: Callable[..., None] | None = None
    trouble: Callable[[int, int, int, int, bool], None] | None = None


def prepare(operator: str, *args: Any) -> Entry:
    """What to do for the operator's arguments, and for all that lie in memory as they do.

    Raises whatever the operator would.
    """
    return _PREPARE[operator](*args)


def _forward(*args: Any) -> Entry:
    result = describe_forward(devices.forward_check, *args)
    if any(tensor is not None and tensor.requires_grad for tensor in args[:3]):
        autograd.wait_at_exit(result.device.index)
    if 0 in result.shape:
        return _nothing(result)
    backend = devices.BACKENDS[result.device.type]

    def fill(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, mode: str) -> None:
        backend.forward(result.problem, input, weight, bias, out, mode)

    entry = _entry(planner.forward, result, args, fill)
    if entry.launches and torch.is_grad_enabled():
        wanted = [tensor is not None and tensor.requires_grad for tensor in args[:3]]
        ahead.begin(args, result, wanted, planner.of_process())
    return entry


def _input_grad(*args: Any) -> Entry:
    result = describe_input_grad(devices.input_grad_check, *args)
    autograd.wait_at_exit(result.device.index)
    if 0 in result.shape:
        return _nothing(result)
    backend = devices.BACKENDS[result.device.type]

    def fill(grad_output: Tensor, weight: Tensor, _: None, out: Tensor, mode: str) -> None:
        backend.input_grad(result.problem, grad_output, weight, out, mode)

    return _entry(planner.input_grad, result, args, fill)


def _weight_grad(*args: Any) -> Entry:
    result = describe_weight_grad(devices.weight_grad_check, *args)
    autograd.wait_at_exit(result.device.index)
    backend = devices.BACKENDS[result.device.type]

    def fill(
        grad_output: Tensor, input: Tensor, bias: Tensor | None, out: Tensor, mode: str
    ) -> None:
        backend.weight_grad(result.problem, grad_output, input, out, bias, mode)

    return _entry(planner.weight_grad, result, args, fill, bias_grad=args[BIAS])


_PREPARE = {"forward": _forward, "input_grad": _input_grad, "weight_grad": _weight_grad}


def _nothing(result: Result) -> Entry:
    return Entry(result.shape, result.memory_format == channels_last, 0)


def _entry(
    plan: Pass,
    result: Result,
    args: tuple[Any, ...],
    fill: Callable[..., None],
    bias_grad: bool = False,
) -> Entry:
    entry = _nothing(result)._replace(
        bias_elements=result.problem.out_channels if bias_grad else 0, fill=fill
    )
    if result.device.type != "cuda":
        return entry
    first, second, out = args[0], args[1], result.new()
    # The table outlives a time in which another switch is set, as by another thread just now.
    switch = planner.of_process()
    need = cuda.need(plan, result.problem, first, second, out, args[PRECISION], bias_grad, switch)
    if need is None:
        return entry
    ready = cuda.ready(need)
    return entry._replace(
        copied=(not cuda.is_dense(first), not cuda.is_dense(second)),
        scratch_bytes=ready.scratch_bytes,
        launches=ready.launches.description,
        packs=ready.packs,
        fill=None,
        trouble=ready.launches.trouble,
    )
