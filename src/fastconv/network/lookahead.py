"""Compiles kernels in the background that a network will need soon.

Gradients: when a layer's pass is planned while autograd records, a backward pass will follow. Its
problems are known except for the form of the output's gradient, which is assumed to be the
output's. Next layers: the passes of the layers behind the one that is being called, as far
as they can be guessed. Where a guess is wrong, the pass is planned and compiled at its call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastconv import native
from fastconv.backends import cuda
from fastconv.geometry import sides_without_names
from fastconv.kernels import planner
from fastconv.kernels.planner import Switch
from fastconv.modules import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from fastconv.ops import devices, hooks
from fastconv.ops.schema import OPERATORS, Operator, Result, gradient_format

LAYERS = 4
"""How many of the next layers are compiled at a time."""

MOST_MISSES = 4
"""After this many wrong guesses about a network, nothing more is guessed about it."""


def compile_gradients_if_planned(name: str, args: Sequence[Any], wanted: Sequence[bool]) -> None:
    """:func:`compile_gradients`, if this thread has just planned a layer with these arguments.

    It runs at each call, and costs next to nothing where no pass has been planned. A compiler's
    tensors have no data, and may have symbolic sizes: the planned pass was an earlier call's.
    """
    need = cuda.take_latest()
    if need is None or torch._C._are_functorch_transforms_active() or not _have_data(args[:2]):
        return
    operator = OPERATORS[name]
    result = operator.describe(operator.known, *args)
    if need.plan is operator.plan and need.problem == result.problem:
        compile_gradients(name, args, result, wanted, need.switch)


def _have_data(tensors: Sequence[Tensor]) -> bool:
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


def compile_gradients(
    name: str, args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch
) -> None:
    """Begins to plan and compile the gradients of a layer in the background.

    The layer is the call of an operator, ``"forward"`` or ``"transposed"``, with ``args``, which
    gives ``result``. ``wanted`` says for input, weight and bias whether autograd records their
    gradients. Does nothing where background work would disturb (:func:`native.in_the_way`), and
    raises nothing: the backward pass itself will raise the same error.
    """
    if not native.in_the_way():
        with suppress(Exception):
            for need in _gradient_needs(name, args, result, wanted, switch):
                cuda.compile_ahead(need)


def _gradient_needs(
    name: str, args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch
) -> Iterator[cuda.Need]:
    given: Any = OPERATORS[name].arguments(*args)
    input, weight = given.input, given.weight
    needs_input, needs_weight, needs_bias = wanted
    layout = gradient_format(input, weight)
    geometry = given.stride, given.padding, given.dilation, given.groups, given.precision
    is_transposed = name == "transposed"
    # The output's gradient of a transposed layer is given this memory format.
    above = torch.empty(
        result.shape, dtype=result.dtype, device="meta",
        memory_format=layout if is_transposed else result.memory_format,
    )  # fmt: skip
    gradient: tuple[Any, ...]
    if needs_weight:
        first, second = above, _without_data(input)
        if is_transposed:  # an input gradient, whose input is the gradient of an output
            first, second = second, first
        sums_bias = needs_bias and not is_transposed
        gradient = (first, second, weight.shape[2:], *geometry, sums_bias, layout)
        yield from _gradient_need("weight_grad", gradient, input, result, switch)
    if needs_input and is_transposed:
        gradient = (above, _without_data(weight), None, *geometry)
        yield from _gradient_need("forward", gradient, weight, result, switch)
    elif needs_input:
        gradient = (above, _without_data(weight), input.shape[2:], *geometry, layout)
        yield from _gradient_need("input_grad", gradient, weight, result, switch)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _gradient_need(
    name: str, args: tuple[Any, ...], other: Tensor, result: Result, switch: Switch
) -> Iterator[cuda.Need]:
    """What an operator needs for tensors without data, one of which stands for ``other``."""
    operator = OPERATORS[name]
    found = devices.need(operator, operator.describe(operator.check, *args), args, switch)
    if found is not None:
        # An operand that is not dense is copied before the launch, and a copy is aligned.
        aligned = other.data_ptr() % 16 == 0 or not cuda.is_dense(other)
        yield found._replace(aligned=aligned, device=result.device.index)


# --- The next layers ------------------------------------------------------------------------------


def register() -> None:
    cuda.before_layer = compile_next_layers
    hooks.layer_recorded = compile_gradients_if_planned
    hooks.layer_prepared = compile_gradients


def compile_next_layers(need: cuda.Need) -> None:
    """Begins to plan and compile the layers that may follow the one that needs this pass.

    If a layer of a network is being called, the layers defined after it in the network are assumed
    to be called next. Raises nothing, as :func:`compile_gradients`.
    """
    if native.in_the_way() or torch._C._are_functorch_transforms_active():
        return
    with suppress(Exception):
        running = _running_modules()
        if running and _is_plain(running[-1]) and need.plan is _operator_of(running[-1]).plan:
            guesses = _guesses.setdefault(running[0], _Guesses())
            guesses.check(running[-1], need)
            if guesses.misses < MOST_MISSES:
                found = _next_needs(running[0].modules(), running[-1], need)
                guesses.compile([*islice(found, LAYERS)])


class _Guesses:
    """What the layers of a network are assumed to need, and how often that was wrong."""

    def __init__(self) -> None:
        self.misses = 0
        self._needs: WeakKeyDictionary[nn.Module, cuda.Need] = WeakKeyDictionary()

    def check(self, layer: nn.Module, need: cuda.Need) -> None:
        """Compares a guess with what a layer does need.

        If it was wrong, so are those for layers behind it: work on them that has not begun is
        dropped.
        """
        if self._needs.pop(layer, need) != need:
            self.misses += 1
            for other in self._needs.values():
                cuda.drop(other)
            self._needs.clear()

    def compile(self, found: list[tuple[nn.Module, cuda.Need]]) -> None:
        for layer, need in reversed(found):  # the pass that is queued last is compiled first
            self._needs[layer] = need
            cuda.compile_ahead(need)


_guesses: WeakKeyDictionary[nn.Module, _Guesses] = WeakKeyDictionary()  # by network


def _next_needs(
    modules: Iterator[Any], layer: Any, need: cuda.Need
) -> Iterator[tuple[nn.Module, cuda.Need]]:
    """What layers need that is not compiled, if they are called in this order after ``layer``.

    ``need`` is that of ``layer``. The input of a layer is assumed to be the latest tensor with as
    many channels. Layers and pools along another number of axes are assumed not to be called.
    """
    axes, latest = len(layer.kernel_size), layer.out_channels
    if len(need.problem.axes) != max(axes, 2):
        return  # Images stand for the layer's volumes, whose sizes they do not tell.
    sizes = {layer.in_channels: _size_read(need), latest: _size_written(need)}
    found = set[cuda.Need]()
    module: Any
    for module in _following(modules, layer):
        if type(module) in _POOLS[axes]:
            sizes[latest] = _pooled(module, axes, sizes[latest])
        elif _is_plain(module) and len(module.kernel_size) == axes and module.in_channels in sizes:
            one, written = _layer_need(module, sizes[module.in_channels], need)
            latest = module.out_channels
            sizes[latest] = written
            if one not in found and not cuda.is_ready(one):
                found.add(one)
                yield module, one


def _size_read(need: cuda.Need) -> tuple[int, ...]:
    """The size of a layer's input, as images or volumes."""
    problem = need.problem
    read = problem.input_shape if need.plan is planner.forward else problem.output_shape
    return read[2:]


def _size_written(need: cuda.Need) -> tuple[int, ...]:
    """The size of a layer's output. A transposed layer is an input gradient."""
    problem = need.problem
    written = problem.output_shape if need.plan is planner.forward else problem.input_shape
    return written[2:]


def _following(modules: Iterator[nn.Module], layer: nn.Module) -> Iterator[nn.Module]:
    """The modules that are defined after a layer."""
    for module in modules:
        if module is layer:
            break
    return modules


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's calls can be guessed: exactly a layer of fastconv's, with a plain weight.

    Weights of other layers are computed or elsewhere, or a copy pads their input.
    """
    plain = type(module) in _LAYERS and module.padding_mode == "zeros"
    return plain and type(module._parameters.get("weight")) is nn.Parameter


def _operator_of(layer: Any) -> Operator:
    """The operator that computes a layer, where it has no epilogue."""
    return OPERATORS["transposed" if layer.transposed else "forward"]


def _pooled(pool: nn.Module, axes: int, size: tuple[int, ...]) -> tuple[int, ...]:
    # The forward of its class is called: one of the instance's own must not see a meta tensor.
    pooled = type(pool).forward(pool, torch.empty(1, 1, *size[-axes:], device="meta"))
    return (*size[:-axes], *pooled.shape[2:])


def _layer_need(
    layer: Any, size: tuple[int, ...], like: cuda.Need
) -> tuple[cuda.Need, tuple[int, ...]]:
    """What a layer needs for images of this size, and the size of its output.

    Type and format of the images are those of ``like``.
    """
    last = torch.channels_last if len(size) == 2 else torch.channels_last_3d
    format = last if like.output_channels_last else torch.contiguous_format
    shape = (like.problem.batch, layer.in_channels, *size)
    input = torch.empty(shape, dtype=like.dtype, device="meta", memory_format=format)
    weight = layer._parameters["weight"].detach().to("meta", like.dtype)
    axes = len(layer.kernel_size)
    if axes == 1:  # a sequence is an image of one row
        weight = weight.unsqueeze(-2)
    ones, zeros = (1,) * (2 - axes), (0,) * (2 - axes)
    geometry = (
        (*ones, *layer.stride), (*zeros, *zeros, *_sides(layer)), (*ones, *layer.dilation),
        layer.groups, layer.precision or like.precision,
    )  # fmt: skip
    operator = _operator_of(layer)
    args: tuple[Any, ...] = (input, weight, None, *geometry)
    if layer.transposed:
        more = (*zeros, *layer.output_padding)
        args = (input, weight, None, None, more, *geometry, "identity", 0.0)
    result = operator.describe(operator.check, *args)
    found = devices.need(operator, result, args, like.switch)
    assert found is not None  # it is None only for complex or empty tensors
    return found._replace(device=like.device), result.shape[2:]


def _sides(layer: Any) -> tuple[int, ...]:
    """A layer's padding before and after, for each axis."""
    if layer.transposed:
        return sides_without_names(type(layer).__name__, layer.padding, len(layer.kernel_size))
    # PyTorch keeps it for the last axis first.
    pairs = iter(layer._reversed_padding_repeated_twice)
    return tuple(side for pair in [*zip(pairs, pairs, strict=True)][::-1] for side in pair)


def _running_modules() -> list[nn.Module]:
    """The modules whose calls are on this thread's stack, the outermost first."""
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


_CALL = nn.Module._call_impl.__code__
_LAYERS = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
_POOLS = {
    1: (nn.MaxPool1d, nn.AvgPool1d),
    2: (nn.MaxPool2d, nn.AvgPool2d),
    3: (nn.MaxPool3d, nn.AvgPool3d),
}  # by axes
