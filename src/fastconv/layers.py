"""What the layers of ``modules.py`` have in common."""

# This file does not postpone the evaluation of annotations: torch.fx keeps those of forward, and
# cannot pickle them as strings.

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.nn.modules.module as _hooks
from torch import Tensor
from torch.fx import Proxy, Tracer
from torch.nn.functional import pad
from torch.nn.utils.parametrize import type_before_parametrizations

from fastconv import _precision
from fastconv._precision import Precision
from fastconv.geometry import (
    PaddingLike,
    by_side,
    is_by_side,
    sides_without_names,
)
from fastconv.problem import transposed_size

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


COUNTERPARTS: dict[type[torch.nn.Module], Any] = {}
"""PyTorch's classes of the layers that can be exchanged, by fastconv's: ``modules.py`` fills it."""

EXCHANGED = "_fastconv_exchanged_class"
"""The attribute of a class that was made for an exchanged layer: the layer's own class before."""

OF_DRY_RUNS: set[int] = set()
"""Ids of the hooks of all modules that dry runs have registered."""


def has_hooks_of_all() -> bool:
    """Whether hooks are registered for all modules, which have to see the calls of each of them.

    A dry run's are not counted: the kernels that it finds are to be those of other calls.
    """
    if not _hooks._has_any_global_hook():
        return False
    if not OF_DRY_RUNS:
        return True
    others = (
        _hooks._global_backward_pre_hooks, _hooks._global_backward_hooks,
        _hooks._global_forward_hooks,
    )  # fmt: skip
    return any(others) or not OF_DRY_RUNS.issuperset(_hooks._global_forward_pre_hooks)


class Layer(torch.nn.Module):
    """What layers of fastconv have in common: a precision, a name, and how tracers see them."""

    # A class attribute: modules that were pickled as PyTorch's have none of their own.
    precision: Precision | None = None

    def _set_precision(self, precision: Precision | None) -> None:
        if precision is not None:
            self.precision = _precision.checked(precision)

    def _recorded(self, *arguments: Any) -> Any:
        """Records the call if ``torch.fx`` traces it and keeps this layer whole, or else None."""
        input = arguments[0]
        # The first comparison, the cheapest, is false in almost all calls.
        if type(input) is not Tensor and isinstance(input, Proxy) and self._is_leaf(input.tracer):
            tracer: Any = input.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), arguments, {})
        return None

    def _is_leaf(self, tracer: Any) -> bool:
        """Whether ``torch.fx`` would record a call of PyTorch's layer, and not its contents.

        ``torch.fx`` decides by the name of a class's module, and so traces into this one. When
        forward is called, hooks have run: a module with hooks is traced into, so that its hooks do
        not run a second time.
        """
        pytorchs = vars(type(self)).get(EXCHANGED) or COUNTERPARTS.get(type(self))
        if (
            pytorchs is None
            or not isinstance(tracer, Tracer)
            or tracer.root is self
            or self._forward_hooks
            or self._forward_pre_hooks
        ):
            return False
        twin = object.__new__(pytorchs)
        twin.__dict__ = self.__dict__
        return tracer.is_leaf_module(twin, tracer.path_of_module(self))

    def __prepare_scriptable__(self) -> NoReturn:
        own = type_before_parametrizations(self)
        name, before = own.__name__, vars(own).get(EXCHANGED)
        pytorchs = f"{before.__module__}.{name}" if before else f"torch.nn.{name}"
        raise NotImplementedError(
            f"torch.jit.script does not take a fastconv.{name}: use torch.jit.trace or "
            f"torch.export, or turn it into PyTorch's first: module.__class__ = {pytorchs}"
        )

    def _get_name(self) -> str:
        """The name in ``print(model)``, which tells fastconv's layers from PyTorch's.

        Layers with parametrizations have a class of their own, which PyTorch derives. Classes that
        users derive have their own name.
        """
        name = super()._get_name()
        module = type_before_parametrizations(self).__module__
        ours = module.partition(".")[0] == __name__.partition(".")[0]
        return f"fastconv.{name}" if ours else name

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.precision is None else f"{shown}, precision={self.precision!r}"


class Convolution(Layer):
    """A layer whose padding may have a mode, and differ from side to side."""

    # PyTorch's layers, from which the classes below are derived too, have these.
    padding: Any
    padding_mode: PaddingMode
    weight: Tensor
    bias: Tensor | None
    _reversed_padding_repeated_twice: list[int]

    def _set_sides(self, padding: Any, axes: int) -> None:
        """Takes the padding of each side, if it is written so: PyTorch's constructor does not."""
        if is_by_side(padding, axes):
            flat = by_side(type(self).__name__, padding)
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            self._reversed_padding_repeated_twice = [side for pair in pairs[::-1] for side in pair]

    def forward(self, input: Tensor) -> Tensor:
        """Convolves.

        Args:
            input: ``(batch, in_channels, ...)``, or without ``batch``.

        Returns:
            ``(batch, out_channels, ...)``, or without ``batch``.
        """
        recorded = self._recorded(input)
        if recorded is not None:
            return recorded
        return self._conv_forward(input, self.weight, self.bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _padded(self, input: Tensor) -> tuple[Tensor, PaddingLike]:
        """Returns the input and the padding by zeros that is left to the convolution."""
        if self.padding_mode == "zeros":
            return input, self.padding
        # As in PyTorch, the convolution itself pads only with zeros; other modes pad a copy.
        return pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0


class Transposed(Layer):
    """A transposed layer: ``output_size`` chooses among the sizes that one input may belong to."""

    # PyTorch's layers, from which the classes below are derived too, have these.
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]
    padding_mode: PaddingMode
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Convolves.

        Args:
            input: ``(batch, in_channels, ...)``, or without ``batch``.
            output_size: the output's sizes, with or without those of batch and channels; None for
                those that ``output_padding`` gives.

        Returns:
            ``(batch, out_channels, ...)``, or without ``batch``.

        Raises:
            ValueError: the output cannot have this size, as in PyTorch.
        """
        recorded = self._recorded(input, *(() if output_size is None else (output_size,)))
        if recorded is not None:
            return recorded
        if self.padding_mode != "zeros":
            name = type_before_parametrizations(self).__name__
            raise ValueError(f"Only `zeros` padding mode is supported for {name}")
        more = self.output_padding
        if output_size is not None:
            more = self._padding_for(input, output_size)
        return self._convolved(input, more)

    def _convolved(self, input: Tensor, output_padding: tuple[int, ...]) -> Tensor:
        raise NotImplementedError

    def _padding_for(self, input: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        """Returns the output padding for an output of this size."""
        axes = len(self.kernel_size)
        others = input.dim() - axes
        wanted = list(output_size[others:] if len(output_size) == others + axes else output_size)
        if len(wanted) != axes:
            raise ValueError(
                f"ConvTranspose{axes}D: for {input.dim()}D input, output_size must have {axes} "
                f"or {others + axes} elements (got {len(wanted)})"
            )
        around = sides_without_names(type(self).__name__, self.padding, axes)
        sizes = (input.shape[others:], self.kernel_size)
        least = list(transposed_size(*sizes, (0,) * axes, self.stride, around, self.dilation))
        most = [size + step - 1 for size, step in zip(least, self.stride, strict=True)]
        if not all(map(_is_between, least, wanted, most)):
            raise ValueError(
                f"requested an output size of {wanted}, but valid sizes range "
                f"from {least} to {most} (for an input of {input.size()[2:]})"
            )
        return tuple(size - low for size, low in zip(wanted, least, strict=True))


def _is_between(least: int, value: int, most: int) -> bool:
    return least <= value <= most
