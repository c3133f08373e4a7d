"""``fastconv bench --host``: measures how long the host takes to queue eager calls."""

from __future__ import annotations

from argparse import Namespace

from _fastconv_command.streams import INTERRUPTED
from fastconv import files
from fastconv.bench import contestants, environment, host, report
from fastconv.bench.console import extra, work_through
from fastconv.bench.host import HostCase
from fastconv.bench.results import HostResults
from fastconv.commands import common, rows
from fastconv.commands.bench_networks import EXCLUDED as EXCLUDED_WITH_NETWORKS

# The arguments of `fastconv bench` that have no meaning with --host.
EXCLUDED = (
    *EXCLUDED_WITH_NETWORKS, "batch", "image", "dtype", "peer", "repeats", "time_limit"
)  # fmt: skip


def bench_host(arguments: Namespace) -> int:
    """Measures every host case; the exit status."""
    accepted = "it takes --device, --row-seconds, --output, --json and --quiet"
    rows.refuse_options(arguments, "--host has rows of its own", EXCLUDED, accepted)
    device = common.select_device(arguments.device)
    if not arguments.json:
        extra("rich")
    files.check_outputs([arguments.output])
    contestants.settle(device)
    found = HostResults(environment.describe(device))

    def work(case: HostCase) -> str:
        found.rows.append(host.row(case, device, arguments.row_seconds))
        rows.write_so_far(arguments, found)
        return report.host_brief(found.rows[-1])

    try:
        finished = work_through(host.cases(device), lambda case: case.name, work, arguments.quiet)
    finally:
        rows.hand_over(arguments, found)  # after an error or Ctrl-C, too
    if not finished:
        return INTERRUPTED
    return 1 if any(row.error for row in found.rows) else 0
