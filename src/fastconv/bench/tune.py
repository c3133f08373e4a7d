"""``fastconv tune``: measures which of several plans for a case is fastest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastconv import jit
from fastconv.backends import cuda
from fastconv.bench import configurations, contestants, kernel_passes, row_timing
from fastconv.bench.cases import Case, Tensors
from fastconv.jit import launch
from fastconv.kernels import hopper
from fastconv.kernels.family import Declined, Plan
from fastconv.timing import Effort

MOST_PLANS = 8  # At most this many plans of a case are timed.
GAIN = 0.98  # A plan must take less than this share of the default plan's time to be stored.


@dataclass(frozen=True)
class Tuned:
    """The outcome for one case: plans and their milliseconds, the planner's own choice first."""

    case: Case
    plans: Sequence[Plan]
    ms: Sequence[float]

    @property
    def best(self) -> int:
        """The index of the fastest plan."""
        return min(range(len(self.ms)), key=lambda i: self.ms[i])

    @property
    def choices(self) -> dict[str, str]:
        """The entry for the table of tuned plans; empty if the planner's own choice is as good.

        It is also empty if the plan's kind has no key in the table.
        """
        best = self.best
        if best == 0 or self.ms[best] > GAIN * self.ms[0] or not self.plans[best].key:
            return {}
        return {self.plans[best].key: self.plans[best].choice}

    @property
    def brief(self) -> str:
        """The outcome in a few words."""
        if not self.plans:
            return f"{self.case.label}: one plan"
        best = self.best
        return (
            f"{self.case.label}: default {self.ms[0]:.4g} ms ({self.plans[0].choice}), best of "
            f"{len(self.ms)} {self.ms[best]:.4g} ms ({self.plans[best].choice})"
        )


def tune(case: Case, device: torch.device, effort: Effort) -> Tuned:
    """Times the plans that the planner estimates to be fastest, in turn, on the same data.

    Raises:
        AssertionError: two plans give different bits, which they must not.
    """
    plans = _plans(case, device)
    if not plans:
        return Tuned(case, [], [])
    one = case.tensors(device)
    sets = [
        one,
        *(case.tensors(device, seed) for seed in range(1, row_timing.set_count(one, device))),
    ]
    runs = [_Run(case, plan, one) for plan in plans]
    expected = runs[0](one).clone()
    for run, plan in zip(runs, plans, strict=True):
        assert run(one).equal(expected), f"{case.label}: {plan.choice} gives different bits"
    samples = row_timing.take_turns(runs, sets, effort)
    return Tuned(case, plans, [statistics.median(of_one) for of_one in samples])


def build(cases: Sequence[Case], device: torch.device) -> None:
    """Compiles the kernels of all plans of the cases, in parallel."""
    kernels = {
        launch.kernel.text: launch.kernel
        for case in cases
        for plan in _plans(case, device)
        for launch in plan.launches
    }
    jit.build_all(list(kernels.values()), jit.architecture(device))


def _plans(case: Case, device: torch.device) -> list[Plan]:
    gpu = configurations.device_gpu(device)
    assert gpu is not None, "plans are for GPUs"
    plan, problem, tensors = configurations.what_to_plan(case, case.direction)
    operands = configurations.operands(case, tensors)
    if plan(problem, operands, gpu).family != hopper.__name__.rpartition(".")[2]:
        return []  # The other families have one plan each.
    which = kernel_passes.kernel_pass(case.workload, case.direction)
    try:
        return hopper.alternatives(which, problem, operands, gpu, MOST_PLANS)
    except Declined:
        return []


class _Run:
    """Computes a case's pass by one plan, into its own result tensor."""

    def __init__(self, case: Case, plan: Plan, tensors: Tensors) -> None:
        # Forward passes read the input, whether of a layer or of its problem.
        self._read: Callable[[Tensors], Tensor] = (
            (lambda these: these.input)
            if case.direction == "forward"
            else (lambda these: these.grad_output)
        )
        self._output = torch.empty_like(contestants.ours(case)(tensors))
        device = tensors.input.device
        self._workspace = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
        at = self._workspace.data_ptr()
        self._working = [
            at,
            *(at + one for one in plan.offsets(cuda.CONV_TENSORS[-cuda.REGIONS :])),
        ]
        self._launches = launch.load_launches(plan.launches, device, cuda.CONV_TENSORS)

    def __call__(self, tensors: Tensors) -> Tensor:
        read, weight = self._read(tensors).data_ptr(), tensors.weight.data_ptr()
        self._launches.run(read, weight, 0, 0, self._output.data_ptr(), *self._working)
        return self._output
