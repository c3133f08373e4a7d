"""Makes the entries of the native host path's table, one for each form of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, contiguous_format

from fastconv.backends import cuda
from fastconv.backends.cpu.plans import CpuPlan, Pass, plan
from fastconv.kernels import planner
from fastconv.kernels.batchnorm.plan import beside
from fastconv.ops import autograd, batchnorm, batchnorm_schema, devices, hooks
from fastconv.ops.arguments import Arguments, TransposedArguments, WeightGradArguments
from fastconv.ops.schema import OPERATORS, Operator, Result


class Entry(NamedTuple):
    """How calls of one form are computed; ``native/entry.h`` has a struct of the same name.

    ``launches`` compute them (see ``LoadedLaunches.description``), or the CPU kernels do as
    ``cpu_plan`` says, or ``fill`` does: also calls whose numbers the kernels do not take. ``fill``
    takes the operator's two tensors, the bias or its gradient (or None), the residual (or None),
    the result and the precision.
    """

    shape: tuple[int, ...]  # the result's
    channels_last: bool
    bias_elements: int  # elements of the bias's gradient, 0 for none
    copied: tuple[bool, bool] = (False, False)  # which of the two tensors to make contiguous first
    scratch_bytes: int = 0
    regions: tuple[int, int] = (0, 0)  # where regions of the workspace begin
    launches: Sequence[Any] = ()
    packs: int = 0  # how many of the launches only pack the weight: see Plan.packs
    shares: int = 0  # how many shares of statistics the launches leave: see Plan.shares
    fill: Callable[..., None] | None = None
    cpu_plan: CpuPlan | None = None
    trouble: Callable[[int, int, int, int, bool], None] | None = None  # handles a failed launch


class NormEntry(NamedTuple):
    """How calls of one form of a batch normalization, or of its gradients, are computed.

    As in :class:`Entry`, launches compute them, or ``fill`` does. It takes the operator's arguments
    in a tuple, and its results in another one, with None for those that are not wanted. ``beside``
    says what gradients need beside x (``kernels/batchnorm/plan.py``).
    """

    scratch_bytes: int = 0
    launches: Sequence[Any] = ()
    fill: Callable[..., None] | None = None
    trouble: Callable[[int, int, int, int, bool], None] | None = None
    beside: str | None = None


WITH_STATISTICS = "forward_with_statistics"
"""A call of ``forward`` that also leaves statistics for batch normalization, where it can."""


def make_entry(name: str, *args: Any) -> Entry | NormEntry:
    """Makes the entry for an operator's arguments, and for all arguments of the same form.

    Raises whatever the operator would.
    """
    if name == "batch_norm_forward":
        count = len(batchnorm_schema.Arguments._fields)
        return _norm_entry(batchnorm_schema.Arguments(*args[:count]), *args[count:])
    if name == "batch_norm_backward":
        return _norm_grad_entry(batchnorm_schema.GradArguments(*args))
    if name == "batch_norm_output":
        return _norm_output_entry(batchnorm_schema.OutputArguments(*args))
    if name == WITH_STATISTICS:
        return _make_conv_entry("forward", args, statistics=True)
    return _make_conv_entry(name, args)


def _norm_entry(given: batchnorm_schema.Arguments, shares: int = 0) -> NormEntry:
    """Makes an entry for tensors that lie as ``batchnorm.ready_forward`` takes them."""
    batchnorm_schema.check_forward(given)
    if any(map(_wants_gradient, given[:4])):
        autograd.wait_at_exit(given.x.device.index)
    entry = NormEntry(fill=batchnorm.fill_forward_cpu)
    if given.x.is_cuda and given.x.numel():
        entry = _launched(batchnorm.ready_forward(given, shares))
    return entry._replace(beside=beside(given.activation, given.slope, given.residual is not None))


def _norm_grad_entry(given: batchnorm_schema.GradArguments) -> NormEntry:
    batchnorm_schema.check_backward(given)
    autograd.wait_at_exit(given.x.device.index)
    if given.x.is_cuda and given.x.numel():
        return _launched(batchnorm.ready_backward(given))
    return NormEntry(fill=batchnorm.fill_backward_cpu)


def _norm_output_entry(given: batchnorm_schema.OutputArguments) -> NormEntry:
    """Makes an entry for the output of a normalization that was computed before."""
    autograd.wait_at_exit(given.x.device.index)
    if given.x.is_cuda:
        return _launched(batchnorm.ready_output(given))
    return NormEntry(fill=batchnorm.fill_output_cpu)


def _launched(ready: cuda.Ready) -> NormEntry:
    launches = ready.launches
    return NormEntry(ready.scratch_bytes, launches.description, None, launches.trouble)


def _make_conv_entry(name: str, args: tuple[Any, ...], statistics: bool = False) -> Entry:
    operator = OPERATORS[name]
    given = operator.arguments(*args)
    result = operator.describe(operator.known, *given)
    if operator.plan is not planner.forward or any(map(_wants_gradient, given[:3])):
        autograd.wait_at_exit(result.device.index)
    if _is_empty(operator, result):
        entry = _empty(result)
    else:
        entry = _entry(operator, result, given, statistics)
    if name in ("forward", "transposed") and entry.launches and torch.is_grad_enabled():
        wanted = [_wants_gradient(tensor) for tensor in given[:3]]
        hooks.layer_prepared(name, given, result, wanted, planner.of_process())
    return entry


def _wants_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


class Outline(NamedTuple):
    """What follows from a form by itself, before it is planned for a GPU.

    ``need`` says what its launches depend on. It is None where launches alone do not compute it,
    and where nothing is computed, since the result is empty.
    """

    entry: Entry  # without launches
    need: cuda.Need | None
    is_empty: bool


def outline(name: str, *args: Any) -> Outline:
    """Outlines the entry for an operator's arguments; raises whatever the operator would."""
    operator = OPERATORS[name]
    given = operator.arguments(*args)
    result = operator.describe(operator.known, *given)
    if _is_empty(operator, result):
        return Outline(_empty(result), None, is_empty=True)
    need = _need(operator, result, given)
    return Outline(_without_launches(result, given), need, is_empty=False)


def _is_empty(operator: Operator, result: Result) -> bool:
    # A weight gradient without elements may still come with a bias's gradient that has some.
    return 0 in result.shape and operator.plan is not planner.weight_grad


def _empty(result: Result) -> Entry:
    """An entry that allocates the result and computes nothing."""
    return Entry(result.shape, result.memory_format != contiguous_format, 0)


def _without_launches(result: Result, given: Arguments) -> Entry:
    bias_grad = isinstance(given, WeightGradArguments) and given.bias
    return _empty(result)._replace(
        bias_elements=result.problem.out_channels if bias_grad else 0,
        copied=(not cuda.is_dense(given[0]), not cuda.is_dense(given[1])),
    )


def _need(operator: Operator, result: Result, given: Arguments) -> cuda.Need | None:
    if isinstance(given, TransposedArguments) and not cuda.computes_all(
        result.problem, given.bias, result.epilogue
    ):
        return None
    # The entry stays in the table, so it is planned by the process's own switch: one that
    # planner.only has set, perhaps in another thread, ends before.
    return devices.need(operator, result, given, planner.of_process())


def _entry(operator: Operator, result: Result, given: Arguments, statistics: bool = False) -> Entry:
    entry = _without_launches(result, given)
    need = _need(operator, result, given) if result.device.type == "cuda" else None
    if need is None:
        return entry._replace(fill=_fill(operator, result), cpu_plan=_cpu_plan(operator, result))
    ready = cuda.ready(need._replace(statistics=statistics))
    return entry._replace(
        scratch_bytes=ready.scratch_bytes,
        regions=ready.regions or (0, 0),
        launches=ready.launches.description,
        packs=ready.packs,
        shares=ready.shares,
        trouble=ready.launches.trouble,
    )


_PASSES: dict[Any, Pass] = {
    planner.forward: "forward",
    planner.input_grad: "input_grad",
    planner.weight_grad: "weight_grad",
}


def _cpu_plan(operator: Operator, result: Result) -> CpuPlan | None:
    """Plans the CPU kernels for a pass on a CPU; None where the CPU backend computes it."""
    if result.device.type != "cpu":
        return None
    found = plan(
        result.problem,
        _PASSES[operator.plan],
        result.dtype,
        result.epilogue,
        result.memory_format != contiguous_format,
    )
    return None if isinstance(found, str) else found


def _fill(operator: Operator, result: Result) -> Callable[..., None]:
    """Makes the function ``fill`` of an entry: it computes the operator by the device's backend."""
    backend, problem = devices.BACKENDS[result.device.type], result.problem

    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
        out: Tensor, mode: str,
    ) -> None:  # fmt: skip
        backend.forward(problem, input, weight, bias, out, mode, residual, result.epilogue)

    def input_grad(
        grad_output: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
        out: Tensor, mode: str,
    ) -> None:  # fmt: skip
        backend.input_grad(problem, grad_output, weight, out, mode, bias, residual, result.epilogue)

    def weight_grad(
        grad_output: Tensor, input: Tensor, bias: Tensor | None, _: None, out: Tensor, mode: str
    ) -> None:
        backend.weight_grad(problem, grad_output, input, out, bias, mode)

    fills: dict[Any, Callable[..., None]] = {
        planner.forward: forward,
        planner.input_grad: input_grad,
        planner.weight_grad: weight_grad,
    }
    return fills[operator.plan]
