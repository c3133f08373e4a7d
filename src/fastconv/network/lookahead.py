"""Compiles kernels in the background that a network will need soon.

Gradients: when a forward pass is planned while autograd records, a backward pass will follow. Its
problems are known except for the form of the output's gradient, which is assumed to be the
output's. Next layers: the forward passes of the layers behind the one that is being called, as far
as they can be guessed. Where a guess is wrong, the pass is planned and compiled at its call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastconv import native
from fastconv.backends import cuda
from fastconv.kernels import planner
from fastconv.kernels.planner import Pass, Switch
from fastconv.modules import Conv2d
from fastconv.ops import devices, hooks
from fastconv.ops.schema import OPERATORS, PRECISION, Result, gradient_format

LAYERS = 4
"""How many of the next layers are compiled at a time."""

MOST_MISSES = 4
"""After this many wrong guesses about a network, nothing more is guessed about it."""


def compile_gradients_if_planned(args: Sequence[Any], wanted: Sequence[bool]) -> None:
    """:func:`compile_gradients`, if this thread has just planned a forward pass of these arguments.

    It runs at each call, and costs next to nothing where no pass has been planned. A compiler's
    tensors have no data, and may have symbolic sizes: the planned pass was an earlier call's.
    """
    need = cuda.take_latest()
    if need is None or torch._C._are_functorch_transforms_active() or not _have_data(args[:2]):
        return
    operator = OPERATORS["forward"]
    result = operator.describe(operator.known, *args)
    if need.problem == result.problem:
        compile_gradients(args, result, wanted, need.switch)


def _have_data(tensors: Sequence[Tensor]) -> bool:
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


def compile_gradients(
    args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch
) -> None:
    """Begins to plan and compile the gradients of ``forward(*args)`` in the background.

    ``wanted`` says for input, weight and bias whether autograd records their gradients. Does
    nothing where background work would disturb (:func:`native.in_the_way`), and raises nothing: the
    backward pass itself will raise the same error.
    """
    if not native.in_the_way():
        with suppress(Exception):
            for need in _gradient_needs(args, result, wanted, switch):
                cuda.compile_ahead(need)


def _gradient_needs(
    args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch
) -> Iterator[cuda.Need]:
    input, weight = args[:2]
    needs_input, needs_weight, needs_bias = wanted
    problem, format = result.problem, gradient_format(input, weight)
    without_data = partial(torch.empty, dtype=result.dtype, device="meta")
    grad_output = without_data(result.shape, memory_format=result.memory_format)

    def need(plan: Pass, other: Tensor, out: Tensor, bias: bool = False) -> Iterator[cuda.Need]:
        # An operand that is not dense is copied before the launch, and a copy is aligned.
        aligned = other.data_ptr() % 16 == 0 or not cuda.is_dense(other)
        other = torch.empty_strided(other.shape, other.stride(), dtype=other.dtype, device="meta")
        found = cuda.need(plan, problem, grad_output, other, out, args[PRECISION], bias, switch)
        if found is not None:
            yield found._replace(aligned=aligned, device=result.device.index)

    if needs_weight:
        out = without_data(problem.weight_shape, memory_format=format)
        yield from need(planner.weight_grad, input, out, needs_bias)
    if needs_input:
        out = without_data(problem.input_shape, memory_format=format)
        yield from need(planner.input_grad, weight, out)


# --- The next layers ------------------------------------------------------------------------------


def register() -> None:
    cuda.before_forward = compile_next_layers
    hooks.forward_recorded = compile_gradients_if_planned
    hooks.forward_prepared = compile_gradients


def compile_next_layers(need: cuda.Need) -> None:
    """Begins to plan and compile the forward passes that may follow this one.

    If a layer of a network is being called, the layers defined after it in the network are assumed
    to be called next. Raises nothing, as :func:`compile_gradients`.
    """
    if native.in_the_way() or torch._C._are_functorch_transforms_active():
        return
    with suppress(Exception):
        running = _running_modules()
        if running and _is_plain(running[-1]):
            guesses = _guesses.setdefault(running[0], _Guesses())
            guesses.check(running[-1], need)
            if guesses.misses < MOST_MISSES:
                following = _following(running[0].modules(), running[-1])
                guesses.compile([*islice(_next_needs(following, need), LAYERS)])


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


def _next_needs(modules: Iterator[Any], need: cuda.Need) -> Iterator[tuple[nn.Module, cuda.Need]]:
    """What layers need that is not compiled, if they are called in this order after ``need``.

    The input of a layer is assumed to be the latest tensor with as many channels.
    """
    problem = need.problem
    latest = problem.out_channels
    sizes = {problem.in_channels: problem.input_size, latest: problem.output_size}
    found = set[cuda.Need]()
    for module in modules:
        if type(module) in _POOLS:
            sizes[latest] = _pooled(module, sizes[latest])
        elif _is_plain(module) and module.in_channels in sizes:
            one = _layer_need(module, sizes[module.in_channels], need)
            latest = module.out_channels
            sizes[latest] = one.problem.output_size
            if one not in found and not cuda.is_ready(one):
                found.add(one)
                yield module, one


def _following(modules: Iterator[nn.Module], layer: nn.Module) -> Iterator[nn.Module]:
    """The modules that are defined after a layer."""
    for module in modules:
        if module is layer:
            break
    return modules


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's calls can be guessed: exactly ``fastconv.Conv2d``, with a plain weight.

    Weights of other layers are computed or elsewhere, or a copy pads their input.
    """
    plain = type(module) is Conv2d and module.padding_mode == "zeros"
    return plain and type(module._parameters.get("weight")) is nn.Parameter


def _pooled(pool: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    # The forward of its class is called: one of the instance's own must not see a meta tensor.
    pooled = type(pool).forward(pool, torch.empty(1, 1, *size, device="meta"))
    return pooled.shape[2], pooled.shape[3]


def _layer_need(layer: Any, size: tuple[int, int], like: cuda.Need) -> cuda.Need:
    """What a layer needs for images of this size whose type and format are those of ``like``."""
    format = torch.channels_last if like.output_channels_last else torch.contiguous_format
    shape = (like.problem.batch, layer.in_channels, *size)
    input = torch.empty(shape, dtype=like.dtype, device="meta", memory_format=format)
    weight = layer._parameters["weight"].detach().to("meta", like.dtype)
    left, right, top, bottom = layer._reversed_padding_repeated_twice
    args = (
        input, weight, None, layer.stride, (top, bottom, left, right), layer.dilation,
        layer.groups, layer.precision or like.precision,
    )  # fmt: skip
    operator = OPERATORS["forward"]
    result = operator.describe(operator.check, *args)
    found = devices.need(operator, result, args, like.switch)
    assert found is not None  # it is None only for complex or empty tensors
    return found._replace(device=like.device)


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
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)
