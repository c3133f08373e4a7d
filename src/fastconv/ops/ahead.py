"""Has kernels compiled in the background that a network will ask for, before it does.

Those of gradients: when a forward pass is planned whose gradients are recorded, a backward pass
will come. What it will need is known but for the form of the output's gradient: that is taken to be
the output's. And those of the next layers of a network, as far as they can be guessed. Where that
is wrong, a pass is planned and compiled when it is asked for, as without this.
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

LAYERS = 4  # how far to look
MOST_MISSES = 4  # after which nothing more of a network is guessed


def begin_if_new(args: Sequence[Any], wanted: Sequence[bool]) -> None:
    """:func:`begin`, if a forward pass with these arguments has just been planned, by this thread.

    For each call: where none has, it costs a look.
    """
    need = cuda.take_latest()
    if need is None or torch._C._are_functorch_transforms_active():
        return
    operator = OPERATORS["forward"]
    result = operator.describe(operator.known, *args)
    if need.problem == result.problem:
        begin(args, result, wanted, need.switch)


def begin(args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch) -> None:
    """Begins to plan and compile what gives the gradients of ``forward(*args)``.

    ``wanted`` says for input, weight and bias whether theirs are recorded. Does nothing where work
    in the background would be in the way (:func:`native.in_the_way`), and raises nothing: the
    backward pass would meet the same trouble, and tells of it.
    """
    if not native.in_the_way():
        with suppress(Exception):
            for need in _needs(args, result, wanted, switch):
                cuda.begin(need)


def _needs(
    args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch
) -> Iterator[cuda.Need]:
    input, weight = args[:2]
    needs_input, needs_weight, needs_bias = wanted
    problem, format = result.problem, gradient_format(input, weight)
    without_data = partial(torch.empty, dtype=result.dtype, device="meta")
    grad_output = without_data(result.shape, memory_format=result.memory_format)

    def need(plan: Pass, other: Tensor, out: Tensor, bias: bool = False) -> Iterator[cuda.Need]:
        # Copies would be made of what is not dense; as these, they are aligned.
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
    cuda.before_forward = begin_layers
    hooks.forward_recorded = begin_if_new
    hooks.forward_prepared = begin


def begin_layers(need: cuda.Need) -> None:
    """Begins to plan and compile the forward passes that may come after this one.

    If a layer of a network asks for it, that is being called now: the network says which layers it
    has after this one. Raises nothing, as :func:`begin`.
    """
    if native.in_the_way() or torch._C._are_functorch_transforms_active():
        return
    with suppress(Exception):
        running = _running()
        if running and _is_plain(running[-1]):
            guesses = _guesses.setdefault(running[0], _Guesses())
            guesses.check(running[-1], need)
            if guesses.misses < MOST_MISSES:
                following = _following(running[0].modules(), running[-1])
                guesses.begin([*islice(_of_next_layers(following, need), LAYERS)])


class _Guesses:
    """What a network's layers were taken to need when they are called, and how often wrongly."""

    def __init__(self) -> None:
        self.misses = 0
        self._needs: WeakKeyDictionary[nn.Module, cuda.Need] = WeakKeyDictionary()

    def check(self, layer: nn.Module, need: cuda.Need) -> None:
        """Is told what a layer does need.

        Where it was taken to need something else, so were those behind it: what nobody has got to
        of that is left.
        """
        if self._needs.pop(layer, need) != need:
            self.misses += 1
            for other in self._needs.values():
                cuda.drop(other)
            self._needs.clear()

    def begin(self, found: list[tuple[nn.Module, cuda.Need]]) -> None:
        for layer, need in reversed(found):  # what is begun last is done first
            self._needs[layer] = need
            cuda.begin(need)


_guesses: WeakKeyDictionary[nn.Module, _Guesses] = WeakKeyDictionary()  # by network


def _of_next_layers(
    modules: Iterator[Any], need: cuda.Need
) -> Iterator[tuple[nn.Module, cuda.Need]]:
    """What layers need that is not there yet, if they are called in this order after that one.

    The input of a layer is taken to be the latest tensor of as many channels.
    """
    problem = need.problem
    latest = problem.out_channels
    sizes = {problem.in_channels: problem.input_size, latest: problem.output_size}
    found = set[cuda.Need]()
    for module in modules:
        if type(module) in _POOLS:
            sizes[latest] = _pooled(module, sizes[latest])
        elif _is_plain(module) and module.in_channels in sizes:
            one = _of_layer(module, sizes[module.in_channels], need)
            latest = module.out_channels
            sizes[latest] = one.problem.output_size
            if one not in found and not cuda.is_ready(one):
                found.add(one)
                yield module, one


def _following(modules: Iterator[nn.Module], layer: nn.Module) -> Iterator[nn.Module]:
    """Those that are defined after a layer."""
    for module in modules:
        if module is layer:
            break
    return modules


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a layer whose call is known: of this class itself, with a plain parameter.

    Not those whose weights are computed or elsewhere, or whose input is padded by a copy.
    """
    plain = type(module) is Conv2d and module.padding_mode == "zeros"
    return plain and type(module._parameters.get("weight")) is nn.Parameter


def _pooled(pool: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    # By its class: what somebody may have put in place of its forward is to see no such tensor.
    pooled = type(pool).forward(pool, torch.empty(1, 1, *size, device="meta"))
    return pooled.shape[2], pooled.shape[3]


def _of_layer(layer: Any, size: tuple[int, int], like: cuda.Need) -> cuda.Need:
    """What a layer needs for images of this size, if they are as another one has left them."""
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
    assert found is not None  # a network's layers have channels
    return found._replace(device=like.device)


def _running() -> list[nn.Module]:
    """The modules that this thread is calling just now, the outermost first."""
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


_CALL = nn.Module._call_impl.__code__
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)
