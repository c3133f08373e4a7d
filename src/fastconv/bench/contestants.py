"""The contestants of a comparison: fastconv's passes and PyTorch's, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import fastconv
from fastconv import native, ops
from fastconv.bench import kernel_passes
from fastconv.bench.cases import FORMATS, GRADIENTS, STEP, Case, Tensors, laid_out
from fastconv.workloads import Workload

Pass = Callable[[Tensors], Any]
"""Computes a pass and returns its result, or the results of a training step."""

Wrap = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""Transforms a function of tensors, as ``torch.compile`` does."""


def ours(case: Case) -> Pass:
    """The case's pass through fastconv."""
    if case.direction in GRADIENTS:
        return _our_gradient(case)
    layer = _our_layer(case)
    return _step(layer) if case.direction == STEP else lambda at: layer(at.input, at.weight)


def _our_layer(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """The case's layer: the operator for images, fastconv's function for all others."""
    workload = case.workload
    geometry = (workload.stride, workload.sides, workload.dilation, workload.groups)
    if workload.function == "conv2d":
        return lambda input, weight: ops.forward(input, weight, None, *geometry, case.precision)
    return partial(our_function(workload), precision=case.precision)


def our_function(workload: Workload) -> Callable[..., Tensor]:
    """The function of fastconv for the layer, with the layer's geometry: it takes the tensors."""
    sides = workload.sides
    given: dict[str, Any] = {
        "stride": workload.stride,
        "padding": tuple(zip(sides[::2], sides[1::2], strict=True)),
        "dilation": workload.dilation,
        "groups": workload.groups,
    }
    if workload.transposed:
        given["output_padding"] = workload.output_padding
    function: Callable[..., Tensor] = getattr(fastconv, workload.function)
    return partial(function, **given)


def _our_gradient(case: Case) -> Pass:
    """A gradient by the operator that computes it for the layer's problem."""
    workload, problem = case.workload, case.workload.problem
    which = kernel_passes.kernel_pass(workload, case.direction)
    geometry = (*problem.geometry, case.precision)

    def forward(at: Tensors) -> Tensor:
        return ops.forward(at.input, at.weight, None, *geometry)

    def input_grad(at: Tensors) -> Tensor:
        return ops.input_grad(at.grad_output, at.weight, at.input.shape[2:], *geometry)

    def weight_grad(at: Tensors) -> Tensor:
        size = at.weight.shape[2:]
        return ops.weight_grad(at.grad_output, at.input, size, *geometry, False)[0]

    compute = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad}[which]
    if workload.function == "conv2d":
        return compute
    images = kernel_passes.of_problem
    return lambda at: kernel_passes.as_given(workload, compute(images(workload, at)))


def pytorch(case: Case, wrap: Wrap = lambda function: function) -> Pass:
    """The case's pass through PyTorch's own operators, in the tensors' memory format.

    ``wrap`` is applied to the function that calls them, whose arguments are all tensors.
    """
    if case.direction in GRADIENTS:
        return _torch_gradient(case.workload, case.direction, wrap)
    layer = wrap(_torch_layer(case.workload))
    return _step(layer) if case.direction == STEP else lambda at: layer(at.input, at.weight)


def other_format(case: Case) -> Pass:
    """PyTorch's pass in the other memory format; operands are converted once, before timing."""
    compute = pytorch(case)
    (format,) = (value for name, value in FORMATS.items() if name != case.format)
    converted: dict[int, Tensors] = {}

    def run(at: Tensors) -> Any:
        if id(at) not in converted:
            converted[id(at)] = Tensors(*(laid_out(tensor, format) for tensor in at))
        return compute(converted[id(at)])

    return run


def compiled(case: Case) -> Pass:
    """PyTorch's pass through ``torch.compile`` with max-autotune.

    CUDA graphs are off: they would copy each of the rotating sets of inputs to fixed addresses.
    """
    torch._dynamo.reset()
    compile = partial(torch.compile, mode="max-autotune-no-cudagraphs", dynamic=False)
    return pytorch(case, compile)


PEERS: dict[str, dict[str, Callable[[Case], Pass]]] = {
    "pytorch": {"PyTorch": pytorch},
    "best": {"PyTorch": pytorch, "PyTorch, other format": other_format},
    "compile": {"torch.compile": compiled},
}
"""The choices of ``--peer``: fastconv is compared with the fastest of these contestants."""


@contextmanager
def settings(precision: str | None, benchmark: bool = True) -> Iterator[None]:
    """PyTorch's fastest settings: cuDNN's autotuning, and TF32 where ``precision`` allows it."""
    tf32 = precision == "tf32"
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=benchmark, deterministic=False, allow_tf32=tf32
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)


def settle(device: torch.device) -> None:
    """Waits until the native host path is built or unavailable, so that all calls take one path."""
    if device.type == "cuda":
        native.settle()


def _step(layer: Callable[[Tensor, Tensor], Tensor]) -> Pass:
    def step(at: Tensors) -> tuple[Tensor, ...]:
        input, weight = (tensor.detach().requires_grad_() for tensor in (at.input, at.weight))
        output = layer(input, weight)
        return output, *torch.autograd.grad(output, (input, weight), at.grad_output)

    return step


def _torch_layer(workload: Workload) -> Callable[[Tensor, Tensor], Tensor]:
    symmetric, apart = _split_padding(workload)
    function: Callable[..., Tensor] = getattr(torch.nn.functional, workload.function)
    compute = partial(
        function, stride=workload.stride, padding=symmetric, dilation=workload.dilation,
        groups=workload.groups,
    )  # fmt: skip

    def layer(input: Tensor, weight: Tensor) -> Tensor:
        return compute(input if apart is None else pad(input, apart), weight)

    def transposed_layer(input: Tensor, weight: Tensor) -> Tensor:
        output = compute(input, weight, output_padding=workload.output_padding)
        return output if apart is None else pad(output, [-amount for amount in apart])

    return transposed_layer if workload.transposed else layer


def _torch_gradient(workload: Workload, direction: str, wrap: Wrap) -> Pass:
    symmetric, apart = _split_padding(workload)
    wanted = (direction == "input_grad", direction == "weight_grad", False)

    def compute(grad_output: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        if apart is not None and workload.transposed:
            grad_output = pad(grad_output, apart)
        grads = torch.ops.aten.convolution_backward(
            grad_output, input, weight, None, workload.stride, symmetric, workload.dilation,
            workload.transposed, workload.output_padding, workload.groups, wanted,
        )  # fmt: skip
        grad: Tensor = grads[wanted.index(True)]
        if apart is not None and wanted[0] and not workload.transposed:
            grad = pad(grad, [-amount for amount in apart])
        return grad

    gradient = wrap(compute)
    if apart is None or workload.transposed:
        return lambda at: gradient(at.grad_output, at.input, at.weight)
    # In training, autograd keeps the padded input of the forward pass: padding it is not timed.
    padded: dict[int, Tensor] = {}

    def run(at: Tensors) -> Tensor:
        if id(at) not in padded:
            padded[id(at)] = pad(at.input, apart)
        return gradient(at.grad_output, padded[id(at)], at.weight)

    return run


def _split_padding(workload: Workload) -> tuple[tuple[int, ...], list[int] | None]:
    """The padding argument of PyTorch's convolution, and that of a ``pad``, if one is needed.

    PyTorch's convolution pads opposite sides alike; if they differ, ``pad`` does it all: it pads
    the input, or cuts the output of a transposed convolution. It takes the last axis first.
    """
    before, after = workload.sides[::2], workload.sides[1::2]
    if before == after:
        return before, None
    axes = zip(reversed(before), reversed(after), strict=True)
    return (0,) * workload.axes, [amount for both in axes for amount in both]
