"""Whether two computations of the same thing agree: bit for bit, or as closely as types round."""

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
from fastconv.network.state import is_same

# Units of rounding (half the distance between numbers from 1 to 2), by what products are made of.
_ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_TF32 = 2.0**-11
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32}

# How many times its rounding a convolution may differ from another way to compute it: as a whole,
# by the norm; and a single element. Both ways round (twice), in several steps (twice more).
_OF_NORM, _OF_ELEMENT = 4.0, 16.0
# The largest slope of an activation, hardswish's, but for LeakyReLU's, which is the user's.
_SLOPE = 1.5
_AT_ONCE = 1 << 23  # elements that are compared at a time


# --- Results of models ----------------------------------------------------------------------------


def difference(expected: Any, found: Any) -> tuple[str | None, float]:
    """How two results of a model differ, in words, if in more than roundings; or by how much.

    The number is the largest difference of two tensors, as a share of their norm. NaN, infinities,
    integers and whatever is no tensor have to be the same.
    """
    if isinstance(expected, Tensor):
        return _of_tensors(expected, found)
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


def _of_tensors(expected: Tensor, found: Any) -> tuple[str | None, float]:
    form, other = _form(expected), _form(found)
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
    if (words := _unlike_in_kind(expected, found)) is not None:
        return words, 0.0
    theirs, ours = (_finite(one) for one in (expected, found))
    gap, norm = float((theirs - ours).norm()), float(theirs.norm())
    return None, gap / norm if norm else (math.inf if gap else 0.0)


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.layout is torch.strided else f" {value.layout}"
    return f"{list(value.shape)} of {value.dtype} on {value.device}{layout}"


def _unlike_in_kind(expected: Tensor, found: Tensor) -> str | None:
    """Says if numbers that are NaN or infinite are not the same in both."""
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
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0)


def rounding_of(values: Any) -> float:
    """The rounding of one operation, of that type among the values that has the fewest bits."""
    types = [leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    units = (_ROUNDING.get(_REAL.get(dtype, dtype), 0.0) for dtype in types)
    return 2 * max(units, default=0.0)


# --- A convolution, and what was fused with it ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rounding:
    """By how much a convolution with what follows it may differ from its parts.

    In a sum, roundings of the terms add up as their squares do if they are independent of one
    another, and to their share of the sum itself if they are not. So an element's scale is the root
    of the sum of its terms' squares, and the magnitudes of the sum, of what BatchNorm and bias add
    to it (which may cancel), of the residual and of the result.
    """

    layer: Any  # its geometry, and the weights that BatchNorm is part of
    shift: Tensor | None  # magnitudes of what is added to a channel's sum
    dtype: torch.dtype  # of the products
    slope: float  # of the activation

    def disagreement(
        self, expected: Tensor, found: Tensor, input: Tensor, residual: Tensor | None
    ) -> str | None:
        """Says how the results differ, if they do by more than rounding explains."""
        if _form(expected) != _form(found):
            return f"{_form(found)} instead of {_form(expected)}"
        if not expected.numel():
            return None
        tensors = expected, found, input, residual
        if input.dim() == 4:  # few images at a time, as double precision takes memory
            images = max(1, _AT_ONCE * len(expected) // expected.numel())
            parts = [(None,) * len(expected) if one is None else one.split(images)
                     for one in tensors]  # fmt: skip
            said = (self._of(*each) for each in zip(*parts, strict=False))
        else:
            said = (self._of(*each) for each in (tensors,))
        return next((words for words in said if words is not None), None)

    def _of(
        self, expected: Tensor, found: Tensor, input: Tensor, residual: Tensor | None
    ) -> str | None:
        if not (expected.is_floating_point() or expected.is_complex()):
            return None if torch.equal(expected, found) else f"other numbers of {expected.dtype}"
        if (words := _unlike_in_kind(expected, found)) is not None:
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
        excess = float((error / ((scale + overall) * unit + least)).max()) / _OF_ELEMENT
        share = float(error.norm() / (scale.norm() * unit + least)) / _OF_NORM
        if max(excess, share) <= 1:
            return None
        how = "as a whole" if share > 1 else "in an element"
        return f"{max(excess, share):.2g} times what rounding can do, {how}"

    def _unit(self, device: torch.device) -> float:
        """The rounding of an element: of its products, and of the sum of them all."""
        terms = math.prod(self.layer.weight.shape[1:])
        dtype = _REAL.get(self.dtype, self.dtype)
        of_sums = _ROUNDING[torch.promote_types(dtype, torch.float32)]
        tf32 = device.type != "cpu" and "tf32" in (
            _precision.pytorch_setting(), _precision.override()
        )  # fmt: skip
        of_products = _TF32 if dtype == torch.float32 and tf32 else _ROUNDING[dtype]
        return of_products + math.sqrt(terms) * of_sums

    def _scale(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        input = torch.where(input.isfinite(), input, 0).to(wide)
        weight = self.layer.weight.detach().to(wide)
        # Numbers are scaled to lie between -1 and 1: squares of others may be too large.
        largest = [one.abs().max().clamp(min=1e-30) for one in (input, weight)]
        units = [one / most for one, most in zip((input, weight), largest, strict=True)]
        squares = calls.sums(self.layer, *(one.abs().square() for one in units))
        scale = calls.sums(self.layer, *units).abs().double() + squares.abs().double().sqrt()
        scale = scale * (largest[0].double() * largest[1].double())
        return scale if self.shift is None else scale + self.shift.double()[:, None, None]
