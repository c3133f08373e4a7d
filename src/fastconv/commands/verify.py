"""``fastconv verify``: compares every element of results with a float64 reference."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from _fastconv_command.streams import INTERRUPTED
from fastconv import files
from fastconv.bench import campaign, environment, report, trials, verify
from fastconv.bench.campaign import Summary
from fastconv.bench.cases import DTYPES, FORMAT_TRIPLES, PASSES, PRECISIONS, modes
from fastconv.bench.console import extra, follow, show
from fastconv.bench.trials import AXES, NORMAL, Kinds, Trial
from fastconv.bench.verify import Check
from fastconv.commands import common, rows
from fastconv.commands.common import UsageError, print_json, say, suite_files

FAR_SHARE = 0.05
"""The share of ``--random --isolation`` trials whose layers have taps that are far apart.

PyTorch computes no reference for such layers, and only ``--isolation`` needs none.
"""


def run(arguments: Namespace) -> int:
    """Verifies what the arguments select; exit status 1 if any result is wrong."""
    device = common.select_device(arguments.device)
    if not arguments.json:
        extra("rich")
    files.check_outputs([arguments.output, arguments.markdown], suite_files(arguments))
    selected = _trials(arguments, device)
    jobs = arguments.jobs or (campaign.default_jobs(device) if arguments.random else 1)
    advice = "" if arguments.random else common.memory_advice(arguments, device)
    check: Callable[[Trial], Check] = (
        partial(verify.check_isolation, device=device, advice=advice)
        if arguments.isolation
        else partial(verify.check, device=device, with_peer=not arguments.random, advice=advice)
    )
    if not arguments.random:
        common.advise(arguments, [trial.case for trial in selected], device)
    limit_s = math.inf if arguments.time_limit is None else arguments.time_limit
    checks: list[Check] = []
    brief = report.Brief(every_s=10.0 if arguments.random else 0.0)

    def outcomes() -> Iterator[tuple[str, str | None]]:
        for found in campaign.run(selected, check, device, jobs, limit_s):
            checks.append(found)
            yield found.trial.label, brief(checks)

    start = time.perf_counter()
    finished = follow(outcomes(), len(selected), arguments.quiet)
    summary = campaign.summarise(checks, len(selected), time.perf_counter() - start)
    done = {check.trial for check in checks}
    skipped = [trial for trial in selected if finished and trial not in done]
    _hand_over(arguments, checks, skipped, summary, device)
    if not finished:
        return INTERRUPTED
    return 1 if summary.wrong else 0


def _trials(arguments: Namespace, device: torch.device) -> list[Trial]:
    """The trials to run: drawn at random, or those that the arguments select."""
    seed = arguments.seed or 0
    if not arguments.random:
        if arguments.axes is not None:
            raise UsageError("--axes restricts what --random draws: give both or neither")
        return [
            Trial(case, _misaligned(arguments), arguments.bias, arguments.data or NORMAL, seed)
            for case in common.select_cases(arguments, device)
        ]
    for name in (
        "shape", "suite", "model", "batch", "image", "divisor", "misaligned", "bias", "data"
    ):  # fmt: skip
        if getattr(arguments, name) not in (None, False):
            raise UsageError(f"--random draws what --{name} would say: give only one of the two")
    kinds = Kinds(
        arguments.passes or PASSES,
        modes(arguments.dtype or list(DTYPES), arguments.precision or PRECISIONS),
        arguments.format or FORMAT_TRIPLES,
        arguments.axes or AXES,
    )
    most = trials.drawn_limits(device)
    far = FAR_SHARE if arguments.isolation else 0.0
    return [trials.drawn(seed, number, most, kinds, far) for number in range(arguments.random)]


def _misaligned(arguments: Namespace) -> tuple[str, ...]:
    """The tensors to place at odd addresses: the named ones, or all if none is named."""
    if arguments.misaligned is None:
        return ()
    return tuple(arguments.misaligned) or trials.PLACED


def _hand_over(
    arguments: Namespace,
    checks: Sequence[Check],
    skipped: Sequence[Trial],
    summary: Summary,
    device: torch.device,
) -> None:
    """Shows the outcome of all trials, and writes it where the arguments say."""
    where = environment.describe(device)
    failed = [check for check in checks if not check.passed]
    contents = {
        "format": campaign.FORMAT,
        "environment": where,
        "seed": arguments.seed or 0,
        "summary": summary.to_dict(),
        "failed": [check.to_dict(arguments.device) for check in failed],
        "skipped": [trial.command(arguments.device) for trial in skipped],
    }
    if arguments.json:
        every = [check.to_dict(arguments.device) for check in checks]
        print_json({**contents, "checks": every})
    elif arguments.random:
        show(report.summary_table(summary))
    else:
        show(report.checks_table(checks, skipped))
    for check in failed:
        print(f"{check.trial.label}: {check.complaint}", file=sys.stderr)
        print(f"  {check.trial.command(arguments.device)}", file=sys.stderr)
    if skipped:
        say(arguments, f"skipped {len(skipped)} of {summary.asked} trials: {rows.TOO_LATE}")
    if arguments.output:
        files.write(arguments.output, json.dumps(contents, indent=1) + "\n")
    if arguments.markdown:
        files.write(arguments.markdown, report.summary_markdown(summary, where))
