"""``fastconv bench --networks``: measures whole networks before and after ``optimize``."""

from __future__ import annotations

import time
from argparse import Namespace

from _fastconv_command.streams import INTERRUPTED
from fastconv import files
from fastconv.bench import contestants, environment, networks, report
from fastconv.bench.console import extra, work_through
from fastconv.bench.network_results import NetworkResults
from fastconv.bench.networks import NetworkCase
from fastconv.commands import common, rows
from fastconv.commands.common import UsageError
from fastconv.network.preparation import is_gpu

# The arguments of `fastconv bench` that have no meaning with --networks.
EXCLUDED = (
    "shape", "suite", "model", "divisor", "passes", "precision", "format", "commands", "peer"
)  # fmt: skip


def bench_networks(arguments: Namespace) -> int:
    """Measures every selected network; the exit status."""
    accepted = (
        "they take --mode, --dtype, --batch, --image, --compile, --device, --repeats, "
        "--row-seconds, --time-limit, --output, --json and --quiet"
    )
    rows.refuse_options(arguments, "--networks have rows of their own", EXCLUDED, accepted)
    selected, device = _select_networks(arguments), common.select_device(arguments.device)
    if not is_gpu(device):
        raise UsageError(f"--networks measures fastconv.optimize on a GPU, and {device} is none")
    if not arguments.json:
        extra("rich")
    files.check_outputs([arguments.output])
    contestants.settle(device)
    found = NetworkResults(environment.describe(device))
    deadline, effort = rows.deadline(arguments), rows.effort(arguments)

    def work(case: NetworkCase) -> str:
        if time.perf_counter() >= deadline:
            found.rows.append(case.outcome(skipped=rows.TOO_LATE))
        else:
            found.rows.append(networks.row(case, device, effort, arguments.compile))
        rows.write_so_far(arguments, found)
        return report.network_brief(found.rows[-1])

    try:
        finished = work_through(selected, lambda case: case.label, work, arguments.quiet)
    finally:
        rows.hand_over(arguments, found)  # after an error or Ctrl-C, too
    if not finished:
        return INTERRUPTED
    return 1 if any(row.failed for row in found.rows) else 0


def _select_networks(arguments: Namespace) -> list[NetworkCase]:
    """The networks that the arguments select, in every mode and configuration."""
    for name in arguments.dtype or ():
        if name not in networks.CONFIGURATIONS:
            known = " and ".join(networks.CONFIGURATIONS)
            raise UsageError(f"--networks are measured in {known}, not in {name}")
    return networks.cases(
        arguments.networks or networks.NETWORKS,
        arguments.mode or networks.MODES,
        arguments.dtype or list(networks.CONFIGURATIONS),
        arguments.batch,
        arguments.image,
    )
