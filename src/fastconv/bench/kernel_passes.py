"""What kernels compute for the passes of a layer.

Kernels compute convolutions of images or volumes and their gradients: a layer's *problem*
(:attr:`fastconv.workloads.Workload.problem`). The problem of a 1-D layer convolves images of one
row. That of a transposed layer is the convolution whose input gradient the layer is:

============== ======================== =======================================================
layer's pass   its problem's pass       what it reads, by the layer's names
============== ======================== =======================================================
forward        input_grad, with a bias  ``input`` as the output's gradient, ``weight``
input_grad     forward                  ``grad_output`` as the input, ``weight``
weight_grad    weight_grad              ``input`` and ``grad_output``, with their roles exchanged
============== ======================== =======================================================

The passes of all other layers are the passes of their problems of the same names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from torch import Tensor

from fastconv.backends.cpu.plans import Pass
from fastconv.bench.cases import Tensors
from fastconv.workloads import Workload

_OF: dict[str, Pass] = {name: name for name in get_args(Pass)}
_OF_TRANSPOSED: dict[str, Pass] = {
    "forward": "input_grad",
    "input_grad": "forward",
    "weight_grad": "weight_grad",
}
_EXCHANGED = {"input": "grad_output", "grad_output": "input"}


def kernel_pass(workload: Workload, direction: str) -> Pass:
    """The pass of the layer's problem that computes the layer's pass ``direction``."""
    return (_OF_TRANSPOSED if workload.transposed else _OF)[direction]


def counterpart(workload: Workload, role: str) -> str:
    """The layer's name of a tensor of its problem, and the reverse.

    What a transposed layer reads is the output's gradient in its problem. ``weight`` and other
    names are the same in both.
    """
    return _EXCHANGED.get(role, role) if workload.transposed else role


def as_images(tensor: Tensor) -> Tensor:
    """A layer's tensor as its problem has it: sequences are images of one row."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def as_given(workload: Workload, images: Tensor) -> Tensor:
    """A problem's tensor as its layer has it: the reverse of :func:`as_images`."""
    return images.squeeze(2) if workload.axes == 1 else images


def of_problem(workload: Workload, at: Tensors) -> Tensors:
    """The tensors of a layer, in the roles and shapes of its problem."""
    input, weight, grad_output = map(as_images, at)
    if workload.transposed:
        return Tensors(grad_output, weight, input)
    return Tensors(input, weight, grad_output)


def of_layer(workload: Workload, at: Tensors) -> Tensors:
    """The tensors of a layer's problem, in the roles and shapes of the layer."""
    input, weight, grad_output = (as_given(workload, one) for one in at)
    if workload.transposed:
        return Tensors(grad_output, weight, input)
    return Tensors(input, weight, grad_output)


def with_channels(
    workload: Workload, batch: int, in_channels: int, out_channels: int, groups: int
) -> Workload:
    """The layer with other numbers of images, channels and groups, those of its problem."""
    return replace(
        workload,
        input=(batch, out_channels if workload.transposed else in_channels, *workload.input[2:]),
        weight=(out_channels, in_channels // groups, *workload.weight[2:]),
        groups=groups,
    )
