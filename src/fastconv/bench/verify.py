"""Checks trials: every element against float64, and relations between results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from fastconv.bench import contestants, isolation, kernel_passes, relations, trials
from fastconv.bench.cases import Tensors, reason
from fastconv.bench.judging import Error, Part, Reference
from fastconv.bench.relations import RELATIONS, Subject
from fastconv.bench.trials import Data, Results, Trial
from fastconv.native import decide
from fastconv.workloads import to_dict

ELEMENTS = "elements"
"""The name of the check of every element; other checks have the names of their relations."""


@dataclass(frozen=True)
class Check:
    """The outcome of one trial: errors and complaints, or the failure that prevented them."""

    trial: Trial
    part: str = ""  # which part of the result was compared
    family: str = ""  # of the kernels that ran
    share: float | None = None  # the largest error of an element, relative to its bound
    ours: Error | None = None
    peer: Error | None = None  # PyTorch's error
    checked: tuple[str, ...] = ()  # names of all checks that were made
    complaints: tuple[tuple[str, str], ...] = ()  # names of failed checks, and what is wrong
    failure: str | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.complaints

    @property
    def complaint(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        return "; ".join(f"{name}: {text}" for name, text in self.complaints)

    def to_dict(self, device: str | None = None) -> dict[str, Any]:
        """The outcome as values for JSON; ``device`` is that of the command to repeat it."""
        case = {**vars(self.trial.case), "workload": to_dict(self.trial.case.workload)}
        trial = {name: value for name, value in vars(self.trial).items() if name != "case"}
        found = {name: value for name, value in asdict(self).items() if name != "trial"}
        found["complaints"] = dict(self.complaints)
        return case | trial | found | {
            "passed": self.passed, "command": self.trial.command(device)
        }  # fmt: skip


def check(trial: Trial, device: torch.device, with_peer: bool = False, advice: str = "") -> Check:
    """Makes all checks that apply to a trial, and with ``with_peer`` measures PyTorch's error.

    Exceptions are caught and reported in the outcome, those for want of memory with ``advice``.
    """
    return _timed(trial, partial(_check, trial, device, with_peer), device, advice)


def check_isolation(trial: Trial, device: torch.device, advice: str = "") -> Check:
    """Checks only the isolation of a trial (:mod:`fastconv.bench.isolation`)."""
    return _timed(trial, partial(_check_isolation, trial, device), device, advice)


def _timed(
    trial: Trial, checked: Callable[[], dict[str, Any]], device: torch.device, advice: str
) -> Check:
    if device.type == "cpu":
        decide()
    start = time.perf_counter()
    try:
        found = checked()
    except Exception as error:  # One trial must not stop the others, whatever is wrong.
        found = {"failure": reason(error, advice)}
    return Check(trial, **found, seconds=time.perf_counter() - start)


def _check_isolation(trial: Trial, device: torch.device) -> dict[str, Any]:
    name = relations.isolated.__name__
    text, family = isolation.check(trial, device)
    complaints = () if text is None else ((name, text),)
    return {"family": family, "checked": (name,), "complaints": complaints}


def _check(trial: Trial, device: torch.device, with_peer: bool) -> dict[str, Any]:
    data = trial.make(device)
    results = trials.compute(trial, data)
    reference = Reference(trial, data)
    verdict = reference.judge(Part(results))
    complaints = {ELEMENTS: verdict.complaint}
    subject = Subject(trial, data, results, reference)
    for name in relations.chosen(trial, device):
        complaints[name] = RELATIONS[name](subject)
    return {
        "part": reference.selection.part,
        "family": trials.family(trial, data, results),
        "share": verdict.share,
        "ours": verdict.error,
        "peer": _peer_error(trial, data, reference) if with_peer else None,
        "checked": tuple(complaints),
        "complaints": tuple((name, text) for name, text in complaints.items() if text),
    }


def _peer_error(trial: Trial, data: Data, reference: Reference) -> Error:
    """PyTorch's error on the same data."""
    given = {trial.roles.first: data.first, trial.roles.second: data.second}
    absent = data.first.new_zeros(1)  # stands for the tensor that the pass does not read
    tensors = Tensors(
        *(given.get(role, absent.expand(trial.shape(role))) for role in Tensors._fields)
    )
    layers = kernel_passes.of_layer(trial.case.workload, tensors)
    with contestants.settings(trial.case.precision):
        result = kernel_passes.as_images(contestants.pytorch(trial.case)(layers))
    if data.bias is not None:
        result += data.bias.view(-1, *[1] * (result.dim() - 2))
    bias_grad = None
    if trial.has_bias_grad:
        bias_grad = data.second.sum((0, *range(2, data.second.dim())))
    return reference.judge(Part(Results(result, bias_grad))).error
