"""Measures cases, each to a row; a failing case gives a row that says why."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fastconv.bench import configurations, contestants, limits, row_timing
from fastconv.bench.cases import Case, Tensors, reason
from fastconv.bench.contestants import PEERS, Pass
from fastconv.bench.limits import Ceilings, Limit
from fastconv.bench.results import Row
from fastconv.bench.row_timing import Timing
from fastconv.kernels.family import Gpu, Kernel
from fastconv.timing import Effort, spread


@dataclass(frozen=True)
class Bench:
    """Measures cases; its fields are what all rows have in common."""

    device: torch.device
    peer: str
    effort: Effort
    ceilings: Ceilings
    gpu: Gpu | None
    compiled: dict[Kernel, float]  # seconds that each kernel took to compile
    advice: str = ""  # what the user may do if a case does not fit into memory

    def row(self, case: Case) -> Row:
        """Measures a case; the row of a case that fails says why."""
        try:
            return self._measured(case)
        except Exception as error:  # One row must not stop the others, whatever is wrong.
            return self.failed(case, reason(error, self.advice))
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def failed(self, case: Case, why: str) -> Row:
        """The row of a case that could not be measured."""
        return Row(case, self._command(case), error=why)

    def skipped(self, case: Case, why: str) -> Row:
        """The row of a case that is not measured, which is no failure."""
        return Row(case, self._command(case), skipped=why)

    def _measured(self, case: Case) -> Row:
        passes = {"fastconv": contestants.ours(case)}
        passes |= {name: make(case) for name, make in PEERS[self.peer].items()}
        with contestants.settings(case.precision):
            found = _timings(list(passes.values()), self._sets(case), self.effort)
        by_name = dict(zip(passes, found, strict=True))
        ours = by_name.pop("fastconv")
        peer_name = min(by_name, key=lambda name: by_name[name].ms)
        return Row(
            case,
            self._command(case),
            ours,
            by_name[peer_name],
            peer_name,
            limits.limit(case, self.ceilings),
            self._compile_s(case),
            own_limit=self._own_limit(case),
        )

    def _command(self, case: Case) -> str:
        return case.command("--peer", self.peer, "--device", self.device.type)

    def _sets(self, case: Case) -> list[Tensors]:
        """Sets of inputs to rotate through, so that no call finds its inputs in the cache."""
        first = case.tensors(self.device)
        count = row_timing.set_count(first, self.device)
        return [first, *(case.tensors(self.device, seed) for seed in range(1, count))]

    def _own_limit(self, case: Case) -> Limit | None:
        if self.gpu is None:
            return None
        plans = [configuration.plan for configuration in configurations.planned(case, self.gpu)]
        return limits.own_limit(case, self.ceilings, plans)

    def _compile_s(self, case: Case) -> float | None:
        if self.gpu is None:
            return None
        return configurations.compile_seconds(case, self.gpu, self.compiled)


def _timings(passes: Sequence[Pass], sets: Sequence[Tensors], effort: Effort) -> list[Timing]:
    device = sets[0].input.device
    first_calls = [row_timing.first_call_ms(partial(run, sets[0]), device) for run in passes]
    samples = row_timing.take_turns(passes, sets, effort)
    return [
        Timing(
            statistics.median(taken),
            spread(taken),
            len(taken),
            first,
            row_timing.host_us(compute, sets, statistics.median(taken)),
            row_timing.extra_mib(partial(compute, sets[0]), device),
        )
        for compute, taken, first in zip(passes, samples, first_calls, strict=True)
    ]
