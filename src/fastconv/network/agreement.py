"""Whether two computations of the same results agree: exactly, or but for rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastconv import _precision
from fastconv.network import calls
from fastconv.network.tensor_record import is_same

# The unit roundoff of each type: half the distance of neighbouring numbers between 1 and 2.
_ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_TF32 = 2.0**-11  # unit roundoff
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32}

# How many times the estimated rounding two ways to compute a convolution may differ. For the norm:
# twice, as both ways round, and twice again, as each rounds in several steps. Single elements may
# differ by more.
_NORM_FACTOR, _ELEMENT_FACTOR = 4.0, 16.0
# The largest slope of an activation, which is hardswish's. LeakyReLU's slope is an argument.
_SLOPE = 1.5
# How many elements are compared at a time. It bounds the memory of comparisons.
_CHUNK = 1 << 23


# --- Results of models ----------------------------------------------------------------------------


def difference(expected: Any, found: Any) -> tuple[str | None, float]:
    """How two results of a model differ.

    NaN, infinities, integers and values other than tensors have to be the same.

    Returns:
        A description of a difference that is more than rounding, or None; and the largest
        difference of two tensors, as a share of their norm.
    """
    if isinstance(expected, Tensor):
        return _tensor_difference(expected, found)
    if type(expected) is not type(found):
        return f"a {type(found).__name__} instead of a {type(expected).__name__}", 0.0
    if dataclasses.is_dataclass(expected):
        expected, found = (
            {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
            for one in (expected, found)
        )
    if isinstance(expected, Mapping):
        if list(expected) != list(found):
            return f"the keys {list(found)} instead of {list(expected)}", 0.0
        expected, found = list(expected.values()), list(found.values())
    if isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{len(found)} values instead of {len(expected)}", 0.0
        each = [difference(*pair) for pair in zip(expected, found, strict=True)]
        words = next((words for words, _ in each if words is not None), None)
        return words, max((share for _, share in each), default=0.0)
    try:
        same = expected is found or bool(expected == found) or repr(expected) == repr(found)
    except Exception as error:
        return f"a {type(found).__name__}, which cannot be compared: {error}", 0.0
    return (None if same else f"{found!r} instead of {expected!r}"), 0.0


def _tensor_difference(expected: Tensor, found: Any) -> tuple[str | None, float]:
    form, other = _form_text(expected), _form_text(found)
    if form != other:
        return f"{other} instead of {form}", 0.0
    if expected.is_meta:
        return None, 0.0
    if expected.layout is not torch.strided:
        expected, found = expected.to_dense(), found.to_dense()
    if is_same(expected, found):
        return None, 0.0
    if not (expected.is_floating_point() or expected.is_complex()) or expected.is_quantized:
        return f"other numbers of {expected.dtype}", 0.0
    if (words := _nonfinite_difference(expected, found)) is not None:
        return words, 0.0
    theirs, ours = (_finite(one) for one in (expected, found))
    gap, norm = float((theirs - ours).norm()), float(theirs.norm())
    return None, gap / norm if norm else (math.inf if gap else 0.0)


def _form_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.layout is torch.strided else f" {value.layout}"
    return f"{list(value.shape)} of {value.dtype} on {value.device}{layout}"


def _nonfinite_difference(expected: Tensor, found: Tensor) -> str | None:
    """How NaN and infinities of two tensors differ, if they do."""
    theirs, ours = expected.isnan(), found.isnan()
    if not torch.equal(theirs, ours):
        return f"{int(ours.sum())} NaN instead of {int(theirs.sum())}, or elsewhere"
    theirs, ours = expected.isinf(), found.isinf()
    same = torch.equal(theirs, ours) and bool((expected[theirs] == found[ours]).all())
    if not same:
        return f"{int(ours.sum())} infinities instead of {int(theirs.sum())}, or other ones"
    return None


def _finite(tensor: Tensor) -> Tensor:
    """The tensor in double precision, with zeros for NaN and infinities."""
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0)


def rounding_of(values: Any) -> float:
    """The rounding of one operation, for the type with the fewest bits among the values."""
    types = [leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    units = (_ROUNDING.get(_REAL.get(dtype, dtype), 0.0) for dtype in types)
    return 2 * max(units, default=0.0)


# --- A convolution, and what was fused with it ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A bound of how much a fused convolution may differ from its parts.

    In a sum, the squares of the terms' roundings add up if these are independent of one another;
    otherwise they add up to their share of the sum itself. So an element's scale is the root of the
    sum of its terms' squares, plus the magnitudes of the sum, of what BatchNorm and bias add to it
    (which may cancel), of the residual and of the result.
    """

    layer: Any  # has the geometry, and the weights with BatchNorm folded into them
    shift: Tensor | None  # for each channel, the magnitudes of all that is added to its sums
    dtype: torch.dtype  # the type of the factors
    slope: float  # LeakyReLU's negative slope; 1 for other activations
    # That of a transposed layer's call, if it differs from the layer's own.
    output_padding: tuple[int, ...] | None = None

    def disagreement(
        self, expected: Tensor, found: Tensor, input: Tensor, residual: Tensor | None
    ) -> str | None:
        """How two results differ, if by more than rounding explains."""
        if _form_text(expected) != _form_text(found):
            return f"{_form_text(found)} instead of {_form_text(expected)}"
        if not expected.numel():
            return None
        tensors = expected, found, input, residual
        axes = len(self.layer.kernel_size)
        if input.dim() == axes + 2:  # few images at a time, as double precision takes memory
            images = max(1, _CHUNK * len(expected) // expected.numel())
            parts = [(None,) * len(expected) if one is None else one.split(images)
                     for one in tensors]  # fmt: skip
            said = (self._part_disagreement(*each) for each in zip(*parts, strict=False))
        else:
            said = (self._part_disagreement(*each) for each in (tensors,))
        return next((words for words in said if words is not None), None)

    def _part_disagreement(
        self, expected: Tensor, found: Tensor, input: Tensor, residual: Tensor | None
    ) -> str | None:
        if not (expected.is_floating_point() or expected.is_complex()):
            return None if torch.equal(expected, found) else f"other numbers of {expected.dtype}"
        if (words := _nonfinite_difference(expected, found)) is not None:
            return words
        theirs, ours = (_finite(one) for one in (expected, found))
        error = (theirs - ours).abs()
        scale = self._scale(input) + theirs.abs()
        if residual is not None:
            scale = scale + _finite(residual).abs()
        slope = max(_SLOPE, abs(self.slope))
        unit = self._unit(input.device) * slope
        least = torch.finfo(_REAL.get(expected.dtype, expected.dtype)).smallest_normal * unit
        overall = float(scale.square().mean().sqrt())
        excess = float((error / ((scale + overall) * unit + least)).max()) / _ELEMENT_FACTOR
        share = float(error.norm() / (scale.norm() * unit + least)) / _NORM_FACTOR
        if max(excess, share) <= 1:
            return None
        how = "as a whole" if share > 1 else "in an element"
        return f"{max(excess, share):.2g} times what rounding can do, {how}"

    def _unit(self, device: torch.device) -> float:
        """The relative rounding of an element: of its products, and of their sum."""
        terms = _terms(self.layer)
        dtype = _REAL.get(self.dtype, self.dtype)
        of_sums = _ROUNDING[torch.promote_types(dtype, torch.float32)]
        tf32 = device.type != "cpu" and "tf32" in (
            _precision.pytorch_setting(), _precision.override()
        )  # fmt: skip
        of_products = _TF32 if dtype == torch.float32 and tf32 else _ROUNDING[dtype]
        return of_products + math.sqrt(terms) * of_sums

    def _scale(self, input: Tensor) -> Tensor:
        """For each element, the scale of its terms, their sum and what is added to it."""
        wide = torch.promote_types(input.dtype, torch.float32)
        input = torch.where(input.isfinite(), input, 0).to(wide)
        weight = self.layer.weight.detach().to(wide)
        # Numbers are scaled to lie between -1 and 1: squares of larger ones may overflow.
        largest = [one.abs().max().clamp(min=1e-30) for one in (input, weight)]
        units = [one / most for one, most in zip((input, weight), largest, strict=True)]
        squared = [one.abs().square() for one in units]
        sums, squares = (
            calls.convolved(self.layer, input, weight, self.output_padding).abs().double()
            for input, weight in (units, squared)
        )
        scale = (sums + squares.sqrt()) * (largest[0].double() * largest[1].double())
        if self.shift is None:
            return scale
        return scale + self.shift.double().view(-1, *(1,) * len(self.layer.kernel_size))


def _terms(layer: Any) -> int:
    """How many products an element of a layer's output adds up, at most."""
    taps = layer.kernel_size
    if layer.transposed:
        # Taps that reach one position are as far apart as stride and dilation meet: their least
        # common multiple, in elements of the output.
        axes = zip(taps, layer.stride, layer.dilation, strict=True)
        taps = [math.ceil(size * step / math.lcm(by, step)) for size, by, step in axes]
    return math.prod((layer.in_channels // layer.groups, *taps))


# --- A BatchNorm, and what was fused with it ------------------------------------------------------


def norm_disagreement(
    norm: Any,
    input: Tensor,
    residual: Tensor | None,
    activation: Any,
    expected: Tensor,
    found: Tensor,
    statistics: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> str | None:
    """How a fused BatchNorm differs from its parts, if by more than rounding explains.

    An element's scale is the magnitudes of all that is added up: the input's, times what it is
    multiplied by, the mean's, the bias, the residual and the result.

    Args:
        norm: the BatchNorm, after the call by its parts.
        input: what it was called with.
        residual: what was added.
        activation: as for ``fastconv.conv2d``.
        expected: the result of the parts.
        found: the result of the block.
        statistics: the buffers that the block has left, by name.
        before: those before.
    """
    if _form_text(expected) != _form_text(found):
        return f"{_form_text(found)} instead of {_form_text(expected)}"
    if not expected.numel():
        return None
    if (words := _nonfinite_difference(expected, found)) is not None:
        return words
    axes = (0, *range(2, input.dim()))
    of_batch = norm.training or norm.running_mean is None
    wide = torch.promote_types(input.dtype, torch.float32)
    with torch.no_grad():
        if of_batch:
            variance, mean = torch.var_mean(input.to(wide), axes, correction=0)
        else:
            variance, mean = before["running_var"].to(wide), before["running_mean"].to(wide)
        per_channel = math.sqrt(expected.numel() / expected.shape[1])
        unit = _ROUNDING[expected.dtype] + per_channel * _ROUNDING[wide]
        words = _statistics_disagreement(norm, statistics, mean, variance, unit)
        if words is not None:
            return words
        slope = abs(activation[1]) if isinstance(activation, tuple) else 1.0
        factor = (variance + norm.eps).rsqrt()
        if norm.weight is not None:
            factor = factor * norm.weight.abs()
        shift = mean.abs() * factor
        if norm.bias is not None:
            shift = shift + norm.bias.abs()
        images = max(1, _CHUNK * len(expected) // expected.numel())
        tensors = expected, found, input, residual
        parts = [(None,) * len(expected) if one is None else one.split(images) for one in tensors]
        for theirs, ours, of, more in zip(*parts, strict=False):
            shape = (-1, *(1 for _ in of.shape[2:]))
            scale = _finite(of).abs() * _finite(factor).view(shape) + _finite(shift).view(shape)
            scale = scale + _finite(theirs).abs()
            if more is not None:
                scale = scale + _finite(more).abs()
            words = _beyond(_finite(theirs) - _finite(ours), scale, unit * max(_SLOPE, slope))
            if words is not None:
                return words
    return None


def _beyond(difference: Tensor, scale: Tensor, unit: float) -> str | None:
    """How differences exceed what rounding can do, given their scales."""
    error, tiny = difference.abs(), torch.finfo(torch.float32).smallest_normal
    overall = scale.square().mean().sqrt()
    excess = float((error / ((scale + overall) * unit + tiny)).max()) / _ELEMENT_FACTOR
    share = float(error.norm() / (scale.norm() * unit + tiny)) / _NORM_FACTOR
    if max(excess, share) <= 1:
        return None
    how = "as a whole" if share > 1 else "in an element"
    return f"{max(excess, share):.2g} times what rounding can do, {how}"


def _statistics_disagreement(
    norm: Any, found: Mapping[str, Tensor], mean: Tensor, variance: Tensor, unit: float
) -> str | None:
    """How running statistics differ from those of PyTorch's, if by more than rounding explains."""
    # The mean of a channel's magnitudes is not larger than this.
    size = (mean.square() + variance).sqrt()
    scales = {"running_mean": size, "running_var": size.square()}
    for name, ours in found.items():
        theirs = getattr(norm, name)
        if not ours.is_floating_point():
            words = None if torch.equal(ours, theirs) else f"{ours} instead of {theirs}"
        elif (words := _nonfinite_difference(theirs, ours)) is None:
            scale = _finite(scales[name]) + _finite(theirs).abs()
            of_type = max(unit, _ROUNDING[theirs.dtype])
            words = _beyond(_finite(theirs) - _finite(ours), scale, of_type)
        if words is not None:
            return f"{name}: {words}"
    return None
