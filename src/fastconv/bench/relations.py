"""Relations that must hold between the results of several calls, whatever the data.

The operands of each call are derived from the trial's without rounding: elements are replaced by
zeros or multiplied by powers of two. So only the kernels round, and the bounds are those of the
results themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

import torch
from torch import Tensor

from fastconv.bench import contestants, isolation, kernel_passes, trials
from fastconv.bench.cases import PASSES, Tensors
from fastconv.bench.judging import CHUNK_ELEMENTS, Part, Reference, size_of, tolerance
from fastconv.bench.trials import FAR, Data, Results, Trial

ADJOINT_EVERY = 8  # One in so many trials checks `adjoint`, which compiles all three passes.
LARGE_EVERY = 2  # On a GPU, one in so many large trials checks one of the expensive relations.
_SPLIT_SLACK = 2.0  # The errors of both parts of a split sum allow √2 times the bound; a bit more.
_ADJOINT_SLACK = 2.0  # With few weights, few independent rounding errors average out less.


@dataclass(frozen=True)
class Subject:
    """A trial with its data, results and reference."""

    trial: Trial
    data: Data
    results: Results
    reference: Reference


Relation = Callable[[Subject], str | None]
"""Returns what is wrong, or None."""


def repetition(subject: Subject) -> str | None:
    """The same call gives the same bits."""
    again = trials.compute(subject.trial, subject.data)
    return _differences(again.main, subject.results.main) or (
        None
        if again.bias_grad is None or subject.results.bias_grad is None
        else _differences(again.bias_grad, subject.results.bias_grad)
    )


def alone(subject: Subject) -> str | None:
    """An image gives the same bits alone as in its batch.

    On a CPU, matrix products of other sizes may round differently, so that the results only have
    to keep to their bounds.
    """
    trial, data = subject.trial, subject.data
    index = Random(trial.seed).randrange(trial.problem.batch)
    image = slice(index, index + 1)
    first = trial.placed(trial.roles.first, data.first[image].clone())
    found, together = trials.compute(trial, data._replace(first=first)).main, subject.results.main
    if found.device.type == "cpu":
        together = together.clone()
        together[image] = found
        return subject.reference.judge(Part(Results(together, None))).complaint
    differences = _differences(found, together[image])
    return differences and f"image {index}: {differences}"


def linearity(subject: Subject) -> str | None:
    """f(u + v) = ½ f(2u) - f(-v) for each operand, if no element is nonzero in both u and v."""
    trial, data = subject.trial, subject.data
    for name, role in zip(("first", "second"), trial.roles[:2], strict=True):
        tensor: Tensor = getattr(data, name)
        mask = _random(trial, tensor) < 0.5
        parts = []
        for factor, share in ((0.5, tensor * mask), (-1.0, tensor * ~mask)):
            bias = None if data.bias is None else data.bias * (2.0 if factor == 0.5 else 0.0)
            changed: dict[str, Any] = {name: trial.placed(role, share / factor), "bias": bias}
            split = data._replace(**changed)
            # The bias gradient depends only on the second operand.
            bias_factor = factor if name == "second" else float(factor == 0.5)
            parts.append(Part(trials.compute(trial, split), factor, bias_factor))
        complaint = subject.reference.judge(*parts, slack=_SPLIT_SLACK).complaint
        if complaint:
            return f"in {role}: {complaint}"
    return None


def scales(subject: Subject) -> str | None:
    """Images and channels multiplied by powers of two multiply the result by these.

    The channels (or images) that are summed over are multiplied by a power in one operand and
    divided by it in the other, which must not change the result.
    """
    trial, data, roles = subject.trial, subject.data, subject.trial.roles
    powers = _powers(trial, data.first.device)
    summed = powers[roles.summed]

    def scaled(role: str, tensor: Tensor, sign: int) -> Tensor:
        exponents = _along(trial, role, powers | {roles.summed: sign * summed})
        return trial.placed(role, torch.ldexp(tensor, exponents).to(tensor.dtype))

    bias = data.bias
    if bias is not None:
        bias = torch.ldexp(bias, powers[roles.rows]).to(bias.dtype)
    at = Data(scaled(roles.first, data.first, 1), scaled(roles.second, data.second, -1), bias)
    back = -_along(trial, roles.result, powers | {roles.summed: 0 * summed})
    part = Part(
        trials.compute(trial, at), torch.exp2(back.double()), torch.exp2(-powers["k"].double())
    )
    return subject.reference.judge(part).complaint


def adjoint(subject: Subject) -> str | None:
    """<y, layer(x, w)> = <input_grad(y, w), x> = <weight_grad(y, x), w>."""
    trial, device = subject.trial, subject.data.first.device
    at = {role: trial.tensor(role, device) for role in Tensors._fields}
    terms = _all_terms(trial, Tensors(**at))
    products = []
    for direction in PASSES:
        one = trials.with_direction(trial, direction)
        data = Data(at[one.roles.first], at[one.roles.second], None)
        result, other = trials.compute(one, data).main, at[one.roles.result]
        product, rounded = _inner(trial, result, other)
        bound = _ADJOINT_SLACK * tolerance(one) * terms + rounded
        products.append((direction, product, bound))
    for (name, product, bound), (other_name, other_product, other_bound) in combinations(
        products, 2
    ):
        if not abs(product - other_product) <= bound + other_bound:
            return (
                f"{name} gives {product:.9g} and {other_name} {other_product:.9g}, "
                f"bound {bound + other_bound:.2g}"
            )
    return None


def isolated(subject: Subject) -> str | None:
    """A result does not depend on elements that its formula does not read."""
    return isolation.check(subject.trial, subject.data.first.device).complaint


RELATIONS: dict[str, Relation] = {
    relation.__name__: relation
    for relation in (repetition, isolated, alone, linearity, scales, adjoint)
}


def chosen(trial: Trial, device: torch.device) -> Sequence[str]:
    """The names of the relations to check: all that apply to a small trial, a few for a large one.

    ``adjoint`` is checked for only some of the small trials.
    """
    has_images = trial.case.direction != "weight_grad" and trial.problem.batch > 1
    names = ["repetition", "isolated", *["alone"] * has_images]
    if trial.data == FAR:  # Further powers of two would leave the range of the type.
        return names
    rest = ["linearity", "scales", "adjoint"]
    if trial.is_large(device):
        most = device.type == "cuda" and trial.seed % LARGE_EVERY == 0
        return [*names, *[Random(trial.seed).choice(rest)] * most]
    return [*names, *(rest if trial.seed % ADJOINT_EVERY == 0 else rest[:2])]


def _differences(found: Tensor, expected: Tensor) -> str | None:
    if found.equal(expected):
        return None
    differ = ~(found == expected)  # NaN counts as different.
    at = differ.nonzero()[0].tolist()
    return (
        f"{int(differ.sum())} of {differ.numel()} elements differ, first at {at}: "
        f"{found[tuple(at)]:.9g} and {expected[tuple(at)]:.9g}"
    )


def _random(trial: Trial, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(trial.seed)
    return torch.rand(like.shape, generator=generator, device=like.device)


def _powers(trial: Trial, device: torch.device) -> dict[str, Tensor]:
    """Draws an exponent for every image (n), input channel (c) and output channel (k)."""
    problem, roles, draw = trial.problem, trial.roles, Random(trial.seed)
    most_summed, most = (2, 1) if trial.case.dtype == "float16" else (25, 15)
    counts = {"n": problem.batch, "c": problem.in_channels, "k": problem.out_channels}
    powers = {}
    for axis, count in counts.items():
        # A bias and its gradient belong to no image, so that images cannot have powers then.
        alike = axis == "n" and (trial.has_bias or trial.has_bias_grad)
        within = 0 if alike else most_summed if axis == roles.summed else most
        exponents = [draw.randint(-within, within) for _ in range(count)]
        powers[axis] = torch.tensor(exponents, device=device)
    return powers


def _along(trial: Trial, role: str, powers: dict[str, Tensor]) -> Tensor:
    """The exponents of a tensor's planes, as a tensor that broadcasts over positions."""
    problem = trial.problem
    if role == "weight":
        of_group = powers["c"].view(problem.groups, -1)
        columns = of_group.repeat_interleave(problem.out_channels // problem.groups, 0)
        planes = powers["k"][:, None] + columns
    else:
        planes = powers["n"][:, None] + powers["c" if role == "input" else "k"]
    return planes.view(*planes.shape, *[1] * len(problem.axes))


def _all_terms(trial: Trial, at: Tensors) -> float:
    """The size, by :func:`size_of`, of all terms x·w·y of the inner products."""
    size = size_of(trial)
    case = trials.with_direction(trial, "forward").case
    wide = torch.float64 if trial.case.dtype == "float64" else torch.float32
    sizes = kernel_passes.of_layer(
        case.workload, Tensors(*(size.term(tensor.to(wide), 0.0) for tensor in at))
    )
    with contestants.settings("tf32", benchmark=False):  # A few digits are enough.
        total = (contestants.pytorch(case)(sizes) * sizes.grad_output).sum(dtype=torch.float64)
    return float(size.root(total))


def _inner(trial: Trial, result: Tensor, other: Tensor) -> tuple[float, float]:
    """The inner product, and the error that rounding the result to its type may add to it."""
    size, info = size_of(trial), torch.finfo(result.dtype)
    step = max(1, CHUNK_ELEMENTS * len(result) // result.numel())
    figures = torch.zeros(3, dtype=torch.float64, device=result.device)
    for one, beside in zip(result.split(step), other.split(step), strict=True):
        terms = one.double() * beside.double()
        figures += torch.stack(
            (terms.sum(), size.term(terms, 0.0).sum(), beside.abs().sum(dtype=torch.float64))
        )
    product, rounded, smallest = figures.tolist()
    spread = math.sqrt(rounded * size.deviations) if size.deviations > 1 else rounded
    return product, spread * info.eps / 2 + smallest * info.tiny * info.eps
