"""The CUDA backend: plan, compile, launch.

All that follows from shapes is decided once and cached; a call looks it up, allocates its workspace
and launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fastconv import _precision, native
from fastconv.backends import left_statistics
from fastconv.backends.epilogue import add_epilogue, applied_to_bias
from fastconv.backends.flat import Flat, flattened
from fastconv.jit import launch, loading, pool
from fastconv.kernels import planner, plans
from fastconv.kernels.family import ALIGNMENT, BIAS_ALIGNMENT, Gpu, Operands, Plan
from fastconv.kernels.planner import Pass, Switch
from fastconv.problem import NO_EPILOGUE, SIDES, Epilogue, Problem

SCALARS = {
    torch.float16: ("fastconv::float16", 2),
    torch.bfloat16: ("fastconv::bfloat16", 2),
    torch.float32: ("float", 4),
    torch.float64: ("double", 8),
}


def forward(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    precision: str | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fills ``out`` with activation(convolution of ``input`` + bias + residual).

    In all three passes, ``precision`` is the arithmetic of float32, and None follows PyTorch's
    setting.
    """
    if problem.in_channels == 0:
        applied_to_bias(out, bias, residual, epilogue)
    elif out.is_complex():
        real = torch.empty(_planes(out).shape, dtype=out.real.dtype, device=out.device)
        planes = None if bias is None else torch.view_as_real(bias).flatten()
        forward(
            _real(problem), _planes(input), _real_weight(weight), planes, real, precision,
            None if residual is None else _planes(residual), epilogue,
        )  # fmt: skip
        _set_planes(out, real)
    else:
        input, weight = _dense(input), _dense(weight)
        residual = None if residual is None else _laid_out_as(out, residual)
        bias = None if bias is None else bias.contiguous()
        problem, input, weight, out, residual = seen_by_kernels(
            problem, input, weight, out, residual
        )
        asked = _need(
            planner.forward, problem, input, out, weight, precision,
            residual=residual, epilogue=epilogue, bias=bias,
        )  # fmt: skip
        given = (input, weight, bias, residual, out)
        if left_statistics.are_asked(asked.dtype):
            made = ready(asked._replace(statistics=True))
            left = left_statistics.new(made.shares, out, problem.out_channels)
            made.run(*given, behind=(0 if left is None else left.data_ptr(),))
        else:
            ready(asked).run(*given)


def input_grad(
    problem: Problem,
    grad_output: Tensor,
    weight: Tensor,
    out: Tensor,
    precision: str | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Fills ``out`` with activation(input gradient + bias + residual).

    Only transposed convolutions, which are input gradients, have a bias and an epilogue. What
    kernels do not compute of these (:func:`_kernels_tail`) are passes over memory of their own.
    """
    if out.is_complex():
        real = torch.empty(_planes(out).shape, dtype=out.real.dtype, device=out.device)
        # An input gradient multiplies by the weight's transpose. Transposing the real weight also
        # conjugates it, which the operator must not do, so the weight is conjugated before.
        planes = _planes(grad_output)
        input_grad(_real(problem), planes, _real_weight(weight.conj()), real, precision)
        _set_planes(out, real)
        add_epilogue(out, bias, residual, epilogue)
        return
    grad_output, weight = _dense(grad_output), _dense(weight)
    tail = _kernels_tail(problem, bias, residual, epilogue)
    added = None if tail.bias is None else tail.bias.contiguous()
    beside = None if tail.residual is None else _laid_out_as(out, tail.residual)
    seen, written, weight, grad_output, beside = seen_by_kernels(
        problem, out, weight, grad_output, beside, transposed=True
    )
    asked = _need(
        planner.input_grad, seen, grad_output, written, weight, precision,
        residual=beside, epilogue=tail.epilogue, bias=added,
    )  # fmt: skip
    ready(asked).run(grad_output, weight, added, beside, written)
    if tail.epilogue == epilogue:
        residual, epilogue = None, NO_EPILOGUE
    add_epilogue(out, bias if added is None else None, residual, epilogue)


def computes_all(problem: Problem, bias: Tensor | None, epilogue: Epilogue) -> bool:
    """Whether kernels compute a transposed convolution with all that follows it."""
    adds_bias = bias is None or planner.adds_bias(problem)
    return adds_bias and (epilogue == NO_EPILOGUE or planner.applies_epilogue(problem, epilogue))


class _Tail(NamedTuple):
    """What follows an input gradient: it stores activation(gradient + bias + residual)."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    epilogue: Epilogue = NO_EPILOGUE


def _kernels_tail(
    problem: Problem, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
) -> _Tail:
    """Returns the part of the tail that kernels compute, the bias first."""
    if not planner.adds_bias(problem):
        return _Tail()
    if not planner.applies_epilogue(problem, epilogue):
        return _Tail(bias)
    return _Tail(bias, residual, epilogue)


def weight_grad(
    problem: Problem,
    grad_output: Tensor,
    input: Tensor,
    out: Tensor,
    bias_out: Tensor | None,
    precision: str | None = None,
) -> None:
    """Fills ``out`` with the weight gradient, and ``bias_out`` with the gradient of the bias."""
    if problem.batch == 0 or out.numel() == 0:
        out.zero_()
        if bias_out is not None:
            torch.sum(grad_output, (0, *range(2, grad_output.dim())), out=bias_out)
    elif out.is_complex():
        _complex_weight_grad(problem, grad_output, input, out, bias_out, precision)
    else:
        grad_output, input = _dense(grad_output), _dense(input)
        problem, input, out, grad_output, _ = seen_by_kernels(problem, input, out, grad_output)
        asked = _need(
            planner.weight_grad, problem, input, grad_output, out, precision, bias_out is not None
        )
        ready(asked).run(grad_output, input, out, bias_out)


class Need(NamedTuple):
    """All that the plan and the launches of a pass depend on."""

    plan: Pass
    problem: Problem
    dtype: torch.dtype
    input_channels_last: bool
    output_channels_last: bool
    weight_strides: tuple[int, ...]
    aligned: bool
    precision: str
    bias_grad: bool
    epilogue: Epilogue
    aligned_bias: bool
    device: int  # the GPU's index
    switch: Switch
    statistics: bool = False  # see Operands; launches have one more tensor, STATISTICS


def need(
    plan: Pass,
    problem: Problem,
    first: Tensor,
    second: Tensor,
    out: Tensor,
    precision: str | None,
    bias_grad: bool = False,
    switch: Switch | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
    bias: Tensor | None = None,
) -> Need | None:
    """Says what a pass needs, for tensors with the layout of these, which may be fake.

    The pass is planned by ``switch``, or by the switch that is set. Before its launches, tensors
    that are not dense (:func:`is_dense`) and the bias have to be made contiguous, and the residual
    has to be given the result's memory format. Returns None for a pass that is not computed by
    launches alone.
    """
    if out.is_complex() or 0 in (problem.batch, problem.in_channels, problem.out_channels):
        return None
    first, second = _dense(first), _dense(second)
    if plan is planner.input_grad:  # the rest are passes over memory of their own
        bias, residual, epilogue = _kernels_tail(problem, bias, residual, epilogue)
    residual = None if residual is None else _laid_out_as(out, residual)
    bias = None if bias is None else bias.contiguous()
    if plan is planner.forward:
        problem, first, second, out, residual = seen_by_kernels(
            problem, first, second, out, residual
        )
        roles = first, out, second
    elif plan is planner.input_grad:
        problem, out, second, first, residual = seen_by_kernels(
            problem, out, second, first, residual, transposed=True
        )
        roles = first, out, second
    else:
        problem, second, out, first, _ = seen_by_kernels(problem, second, out, first)
        roles = second, first, out
    return _need(plan, problem, *roles, precision, bias_grad, switch, residual, epilogue, bias)


def ready(need: Need, plan: Plan | None = None) -> Ready:
    """Makes the launches, once; by ``plan``, if the caller has made it (:func:`planned`)."""
    if plan is None:
        return _ready(need)
    _given_plans[need] = plan
    try:
        return _ready(need)
    finally:
        _given_plans.pop(need, None)


class Seen(NamedTuple):
    """A problem and its tensors, as kernels see them."""

    problem: Problem
    input: Tensor
    weight: Tensor
    output: Tensor
    residual: Tensor | None


def seen_by_kernels(
    problem: Problem,
    input: Tensor,
    weight: Tensor,
    output: Tensor,
    residual: Tensor | None = None,
    transposed: bool = False,
) -> Seen:
    """Returns volumes as images, where the tensors' strides allow it, and all else as it is.

    Tensors have the shapes of the problem's; a ``transposed`` pass writes the input, and the
    residual has its shape. Dense tensors stay dense.
    """
    flat = None if problem.depth is None else _flat(problem, input, weight, output, transposed)
    if flat is None:
        return Seen(problem, input, weight, output, residual)
    if residual is not None:
        residual = (flat.input if transposed else flat.output)(residual)
    return Seen(flat.problem, flat.input(input), flat.weight(weight), flat.output(output), residual)


def _flat(
    problem: Problem, input: Tensor, weight: Tensor, output: Tensor, transposed: bool
) -> Flat | None:
    flat = flattened(problem, input, weight, output, transposed)
    if flat is not None and is_dense(flat.input(input)) and is_dense(flat.output(output)):
        return flat
    return None


# The names of a pass's tensors in launches: those that Ready.run takes, in its order, then the
# workspace, and the regions of it.
REGIONS = 2
CONV_TENSORS = (
    "input", "weight", "bias", "residual", "output", "scratch", "input_copy", "output_copy"
)  # fmt: skip
STATISTICS = "statistics"
TENSORS: dict[Pass, tuple[str, ...]] = {
    planner.forward: CONV_TENSORS,
    planner.input_grad: CONV_TENSORS,
    planner.weight_grad: (
        "grad_output", "input", "output", "bias_grad", "scratch", "grad_output_copy", "input_copy"
    ),
}  # fmt: skip


class Ready(NamedTuple):
    """A plan whose kernels are loaded on the device."""

    launches: launch.LoadedLaunches
    scratch_bytes: int
    family: str
    packs: int  # see Plan.packs
    # Where regions of the workspace begin; nothing for launches that name none.
    regions: tuple[int, int] | tuple[()] = ()
    shares: int = 0  # see Plan.shares

    def run(
        self,
        *tensors: Tensor | None,
        scratch: Tensor | None = None,
        behind: tuple[int, ...] = (),
    ) -> None:
        """Launches the kernels; tensors are in the order of the pass's names for them.

        The workspace is a new one, unless it is given. Addresses ``behind`` it come last.
        """
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if scratch is None and self.scratch_bytes:
            device = tensors[0].device  # type: ignore[union-attr]  # the first is never absent
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        at = 0 if scratch is None else scratch.data_ptr()
        self.launches.run(*addresses, at, *(at + offset for offset in self.regions), *behind)


def _need(
    plan: Pass,
    problem: Problem,
    input: Tensor,
    output: Tensor,
    weight: Tensor,
    precision: str | None,
    bias_grad: bool = False,
    switch: Switch | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
    bias: Tensor | None = None,
) -> Need:
    """Says what a pass needs; input, output and weight are the roles in ``Operands``."""
    dtype = input.dtype
    if dtype != torch.float32:
        precision = "ieee"
    elif precision is None:
        precision = _precision.pytorch_setting()
    without_data = isinstance(input, FakeTensor)
    return Need(
        plan,
        problem,
        dtype,
        not input.is_contiguous(),
        not output.is_contiguous(),
        _weight_strides(weight),
        # A fake tensor stands for one that PyTorch allocates, which is aligned.
        without_data or _begin_at_multiples(ALIGNMENT, input, output, weight, residual),
        precision,
        bias_grad,
        epilogue,
        without_data or _begin_at_multiples(BIAS_ALIGNMENT, bias),
        output.device.index,
        planner.current() if switch is None else switch,
    )


def _weight_strides(weight: Tensor) -> tuple[int, ...]:
    """Returns the weight's strides, with 0 for those of one-element axes above 32 bits.

    PyTorch keeps any stride that such an axis was given. Kernels never use it, but take strides as
    32-bit ints.
    """
    axes = zip(weight.shape, weight.stride(), strict=True)
    return tuple(stride if size > 1 or stride < 1 << 31 else 0 for size, stride in axes)


def _begin_at_multiples(of_bytes: int, *tensors: Tensor | None) -> bool:
    """Whether the addresses of all tensors but None are multiples of this many bytes."""
    return not any(tensor.data_ptr() % of_bytes for tensor in tensors if tensor is not None)


def family(
    plan: Pass,
    problem: Problem,
    input: Tensor,
    output: Tensor,
    weight: Tensor,
    precision: str | None,
) -> str:
    """Returns the family whose kernels compute a pass; tensors have the roles in ``Operands``."""
    return ready(_need(plan, problem, input, output, weight, precision)).family


MOST_READY = 4096
"""The most passes whose launches are cached; the least recently used ones are dropped."""


@lru_cache(maxsize=MOST_READY)
def _ready(need: Need) -> Ready:
    native.start_build()
    plan = _given_plans.get(need)
    if plan is None:
        if need.plan is not planner.weight_grad and before_layer is not None:
            before_layer(need)
        plan = pool.claim(need) or planned(need)
    device = torch.device("cuda", need.device)
    names = TENSORS[need.plan]
    given = (*names, STATISTICS) if need.statistics else names
    prepared = launch.load_launches(plan.launches, device, given)
    _note_made(need)
    _latest.need = None if need.plan is planner.weight_grad else need
    first, second = plan.offsets(names[-REGIONS:])
    regions = (first, second)
    return Ready(prepared, plan.scratch_bytes, plan.family, plan.packs, regions, plan.shares)


before_layer: Callable[[Need], None] | None = None
"""Is called before a forward pass, or an input gradient, is planned and compiled.

A layer may need it: a transposed one is an input gradient.

``fastconv`` sets it when it is imported, to what compiles the next layers of a network in the
background, which lies above the backends.
"""

_given_plans: dict[Need, Plan] = {}  # the plans that callers of ready() have made
_made: dict[Need, None] = {}  # the latest MOST_READY passes, the oldest first
_latest = threading.local()  # the pass of a layer that a thread has made ready last
_lock = threading.Lock()


def _note_made(need: Need) -> None:
    with _lock:
        _made[need] = None
        while len(_made) > MOST_READY:
            del _made[next(iter(_made))]


def is_ready(need: Need) -> bool:
    """Whether this process has made the launches of a pass."""
    return need in _made


def take_latest() -> Need | None:
    """Returns the pass that this thread has made ready last, if not returned before.

    It is the forward pass of a layer or, of a transposed one, an input gradient.
    """
    need: Need | None = getattr(_latest, "need", None)
    if need is not None:
        _latest.need = None
    return need


def compile_ahead(need: Need) -> None:
    """Plans a pass and compiles its kernels in the background; :func:`ready` uses them."""
    if not is_ready(need):
        gpu(need.device)  # cached here: background threads do not query the device
        pool.run_ahead(need, partial(plan_and_compile, need))


def drop(need: Need) -> None:
    """Cancels what :func:`compile_ahead` has queued for a pass, if it has not started."""
    pool.cancel_ahead(need)


def plan_and_compile(need: Need) -> Plan:
    """Plans a pass and starts to compile its kernels in the background."""
    plan = planned(need)
    kernels = (one.kernel for one in plan.launches)
    loading.compile_ahead(kernels, gpu(need.device).architecture, need.device)
    return plan


def planned(need: Need, on: Gpu | None = None) -> Plan:
    """Returns the plan of a pass, from the disk or made anew; for another GPU, if it is given."""
    operands = operands_for(need)
    _check_sizes(need.problem)
    on = gpu(need.device) if on is None else on
    return plans.find_or_make(need.plan, need.problem, operands, on, need.switch)


def operands_for(need: Need) -> Operands:
    """Returns what the planner of a pass has to know of the tensors."""
    operands = operands_of(
        need.dtype,
        need.input_channels_last,
        need.output_channels_last,
        need.weight_strides,
        need.aligned,
        need.precision,
        need.bias_grad,
        need.epilogue,
        need.aligned_bias,
    )
    return replace(operands, statistics=need.statistics)


def _check_sizes(problem: Problem) -> None:
    """Raises if a number is too large for kernels, which take sizes as 32-bit ints."""
    sides = SIDES[len(problem.axes)]
    for name, values in (
        ("input of size", problem.input_shape),
        ("weight of size", problem.weight_shape),
        ("output of size", problem.output_shape),
        ("stride", [axis.stride for axis in problem.axes]),
        (f"padding {sides}", [size for axis in problem.axes for size in (axis.before, axis.after)]),
        ("dilation", [axis.dilation for axis in problem.axes]),
    ):
        if max(values) >= 1 << 31:
            raise NotImplementedError(
                "fastconv's GPU kernels take sizes, strides, padding and dilation below 2**31, "
                f"but got {name} {list(values)}"
            )


def operands_of(
    dtype: torch.dtype,
    input_channels_last: bool,
    output_channels_last: bool,
    weight_strides: tuple[int, ...],
    aligned: bool,
    precision: str = "ieee",
    bias_grad: bool = False,
    epilogue: Epilogue = NO_EPILOGUE,
    aligned_bias: bool = True,
) -> Operands:
    """Returns operands of this type and layout."""
    if dtype not in SCALARS:
        raise NotImplementedError(
            f"fastconv is not implemented for {dtype} on a GPU; "
            "it takes float16, bfloat16, float32, float64 and the complex types"
        )
    return Operands(
        *SCALARS[dtype],
        input_channels_last,
        output_channels_last,
        weight_strides,
        aligned,
        precision,
        bias_grad,
        epilogue,
        aligned_bias,
    )


@cache
def gpu(index: int) -> Gpu:
    """Returns the properties of a device that planning depends on."""
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        loading.architecture(torch.device("cuda", index)),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        properties.shared_memory_per_multiprocessor,
    )


def _dense(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if it is dense, or else a contiguous copy."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def _laid_out_as(output: Tensor, tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy, in the output's memory format and without gaps."""
    contiguous = output.is_contiguous()
    return tensor.contiguous(
        memory_format=torch.contiguous_format if contiguous else _channels_last(output)
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor has one of the two memory formats, without gaps, as kernels require."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=_channels_last(tensor))


def _channels_last(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last


# --- Complex tensors: twice the channels, a real and an imaginary plane for each ------------------


def _real(problem: Problem) -> Problem:
    return replace(
        problem, in_channels=2 * problem.in_channels, out_channels=2 * problem.out_channels
    )


def _planes(tensor: Tensor) -> Tensor:
    """Returns a complex tensor (N, C, ...) as a real one (N, C * 2, ...)."""
    return torch.view_as_real(tensor.resolve_conj()).movedim(-1, 2).flatten(1, 2)


def _set_planes(tensor: Tensor, planes: Tensor) -> None:
    """Undoes :func:`_planes`."""
    torch.view_as_real(tensor).copy_(planes.unflatten(1, (-1, 2)).movedim(2, -1))


def _real_weight(weight: Tensor) -> Tensor:
    """Returns the real weight [[re, -im], [im, re]], which does to planes what ``weight`` does."""
    real, imaginary = torch.view_as_real(weight.resolve_conj()).unbind(-1)
    rows = [torch.stack((real, -imaginary), 2), torch.stack((imaginary, real), 2)]
    return torch.stack(rows, 1).flatten(2, 3).flatten(0, 1)


def _complex_weight_grad(
    problem: Problem,
    grad_output: Tensor,
    input: Tensor,
    out: Tensor,
    bias_out: Tensor | None,
    precision: str | None,
) -> None:
    real = _real(problem)
    blocks = torch.empty(real.weight_shape, dtype=out.real.dtype, device=out.device)
    biases = None if bias_out is None else torch.view_as_real(bias_out).view(-1)
    weight_grad(real, _planes(grad_output), _planes(input), blocks, biases, precision)
    blocks = blocks.unflatten(1, (-1, 2)).unflatten(0, (-1, 2))
    (real_real, real_imaginary), (imaginary_real, imaginary_imaginary) = (
        row.unbind(2) for row in blocks.unbind(1)
    )
    parts = torch.view_as_real(out)
    parts[..., 0] = real_real - imaginary_imaginary
    parts[..., 1] = real_imaginary + imaginary_real
