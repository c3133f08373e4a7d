"""Errors of ours and of PyTorch's results against float64, and the bounds ours must keep.

References are computed by PyTorch in float64, which GPUs are slow at, on a part of the case: the
first and the last image of what the forward pass and the input gradient give for the whole batch;
for the weight gradient, which sums over images, a smaller batch throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastconv.bench import contestants
from fastconv.bench.cases import Case, Tensors, reason
from fastconv.bench.workloads import to_dict

WEIGHT_GRAD_IMAGES = 2

# On ‖ours - float64‖ / ‖float64‖. Strict float32 lands near 3e-7; TF32, whose operands have 10
# bits of mantissa, near 3e-4; results rounded to float16 near 2e-4, to bfloat16 near 2e-3.
BOUNDS = {
    "float64": 1e-14,
    "float32 ieee": 2e-6,
    "float32 tf32": 1e-3,
    "float16": 1e-3,
    "bfloat16": 8e-3,
}


@dataclass(frozen=True)
class Error:
    """How far a result is from float64's."""

    relative: float  # ‖result - float64‖ / ‖float64‖
    maximum: float  # max |result - float64| / max |float64|


@dataclass(frozen=True)
class Check:
    """What was found for one case, or why nothing was."""

    case: Case
    part: str  # of the case that was compared
    bound: float
    ours: Error | None = None
    peer: Error | None = None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.ours is not None and self.ours.relative <= self.bound  # false for NaN too

    def to_dict(self) -> dict[str, Any]:
        case = {**vars(self.case), "workload": to_dict(self.case.workload)}
        found = {name: value for name, value in asdict(self).items() if name != "case"}
        return case | found | {"passed": self.passed}


def check(case: Case, device: torch.device) -> Check:
    """The case compared with float64; a failure is part of the answer."""
    part, bound = _part(case), BOUNDS[case.mode]
    try:
        ours, peer = _errors(case, device)
    except Exception as error:  # whatever it is, the other cases are worth checking
        return Check(case, part, bound, failure=reason(error))
    return Check(case, part, bound, ours, peer)


def _part(case: Case) -> str:
    images = case.workload.input[0]
    if case.direction == "weight_grad":
        return f"batch of {min(images, WEIGHT_GRAD_IMAGES)}"
    return "all images" if images <= 2 else f"images 1 and {images} of {images}"


def _errors(case: Case, device: torch.device) -> tuple[Error, Error]:
    if case.direction == "weight_grad":
        images = min(case.workload.input[0], WEIGHT_GRAD_IMAGES)
        case = replace(case, workload=case.workload.with_batch(images))
    at = case.tensors(device)
    some = [0, -1] if case.workload.input[0] > 1 else [0]
    exact = _reference(case, at, some)
    ours, peer = (
        _error(_computed(make, case, at, some), exact)
        for make in (contestants.ours, contestants.pytorch)
    )
    return ours, peer


def _computed(
    make: Callable[[Case], contestants.Pass], case: Case, at: Tensors, some: list[int]
) -> Tensor:
    with contestants.settings(case.precision):
        result: Tensor = make(case)(at)
    return result if case.direction == "weight_grad" else result[some]


def _reference(case: Case, at: Tensors, some: list[int]) -> Tensor:
    workload = case.workload.with_batch(len(some))
    exact_case = replace(case, workload=workload, dtype="float64", precision=None)
    input, weight, grad_output = at.input[some], at.weight, at.grad_output[some]
    tensors = Tensors(input.double(), weight.double(), grad_output.double())
    with contestants.settings(None, benchmark=False):  # trying out float64 takes long
        result: Tensor = contestants.pytorch(exact_case)(tensors)
    return result


def _error(result: Tensor, exact: Tensor) -> Error:
    difference = result.double() - exact
    relative = torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(exact)
    return Error(float(relative), float(difference.abs().max() / exact.abs().max()))
