"""Whether results are right: every element against float64, and what must hold between results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from fastconv.bench import contestants, isolation, relations, trials
from fastconv.bench.cases import Tensors, reason
from fastconv.bench.judging import Error, Part, Reference
from fastconv.bench.relations import RELATIONS, Subject
from fastconv.bench.trials import Data, Results, Trial
from fastconv.workloads import to_dict

ELEMENTS = "elements"
"""The check of every element; the others are the relations'."""


@dataclass(frozen=True)
class Check:
    """What was found for one trial, or why nothing was."""

    trial: Trial
    part: str = ""  # of the result that was compared
    family: str = ""  # of kernels
    share: float | None = None  # the largest error of an element, relative to its bound
    ours: Error | None = None
    peer: Error | None = None
    checked: tuple[str, ...] = ()
    complaints: tuple[tuple[str, str], ...] = ()  # what does not hold, and how it shows
    failure: str | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.complaints

    @property
    def complaint(self) -> str:
        """What is wrong, in a line."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        return "; ".join(f"{name}: {text}" for name, text in self.complaints)

    def to_dict(self, device: str | None = None) -> dict[str, Any]:
        case = {**vars(self.trial.case), "workload": to_dict(self.trial.case.workload)}
        trial = {name: value for name, value in vars(self.trial).items() if name != "case"}
        found = {name: value for name, value in asdict(self).items() if name != "trial"}
        found["complaints"] = dict(self.complaints)
        return case | trial | found | {
            "passed": self.passed, "command": self.trial.command(device)
        }  # fmt: skip


def check(trial: Trial, device: torch.device, with_peer: bool = False) -> Check:
    """The trial checked, PyTorch's error beside ours if asked; a failure is part of the answer."""
    return _timed(trial, partial(_check, trial, device, with_peer))


def check_isolation(trial: Trial, device: torch.device) -> Check:
    """The trial checked for what its results must not depend on, and for nothing else."""
    return _timed(trial, partial(_check_isolation, trial, device))


def _timed(trial: Trial, checked: Callable[[], dict[str, Any]]) -> Check:
    start = time.perf_counter()
    try:
        found = checked()
    except Exception as error:  # whatever it is, the other trials are worth having
        found = {"failure": reason(error)}
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
    """PyTorch's, on the same data."""
    given = {trial.roles.first: data.first, trial.roles.second: data.second}
    absent = data.first.new_zeros(1)  # in the place of what is computed
    tensors = Tensors(
        *(given.get(role, absent.expand(trial.shape(role))) for role in Tensors._fields)
    )
    with contestants.settings(trial.case.precision):
        result = contestants.pytorch(trial.case)(tensors)
    if data.bias is not None:
        result += data.bias[:, None, None]
    bias_grad = None
    if trial.bias and trial.case.direction == "weight_grad":
        bias_grad = data.second.sum((0, 2, 3))
    return reference.judge(Part(Results(result, bias_grad))).error
