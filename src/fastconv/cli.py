"""The ``fastconv`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastconv.bench import measure
from fastconv.bench.report import Report
from fastconv.bench.workloads import SUITES

# On a CPU the founding workloads take minutes at full size: 1/4 of each side is 1/16 of the work.
CPU_DIVISOR = 4
PLAIN_WIDTH = 120  # of tables that do not go to a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 1 when a check failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="fastconv", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    bench = commands.add_parser(
        "bench", help="check fastconv against PyTorch and compare their speed"
    )
    bench.add_argument("--suite", choices=sorted(SUITES), default="founding")
    bench.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    bench.add_argument(
        "--divisor", type=_positive, metavar="N",
        help=f"divide height and width by N (default: 1 on a GPU, {CPU_DIVISOR} on a CPU)",
    )  # fmt: skip
    bench.add_argument("--repeats", type=_positive, default=7, help="timings of each (default: 7)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    bench.add_argument("--markdown", type=Path, metavar="FILE", help="also write a table there")
    bench.set_defaults(run=_bench)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1, but got {value}")
    return value


def _bench(arguments: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        print("fastconv bench needs rich: pip install 'fastconv[bench]'", file=sys.stderr)
        return 2
    try:
        device = torch.device(arguments.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        print(f"fastconv bench: no device {arguments.device!r} here: {reason}", file=sys.stderr)
        return 2
    divisor = arguments.divisor or (1 if device.type == "cuda" else CPU_DIVISOR)
    workloads = [workload.scaled(divisor) for workload in SUITES[arguments.suite]]
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=True, deterministic=False, allow_tf32=False
    ):
        rows = list(
            track(
                measure.measure(workloads, device, arguments.repeats, "ieee"),
                description="measuring",
                total=len(workloads) * len(measure.PASSES),
                console=console,
            )
        )
    report = Report.of(rows, device, divisor)
    console.print(report.table())
    if arguments.json:
        arguments.json.write_text(report.json(), encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(), encoding="utf-8")
    failed = [row for row in rows if not row.passed]
    for row in failed:
        console.print(
            f"[red]{row.workload.name} {row.direction}: error {row.ours_error:.1e} is above the "
            f"bound {row.bound:.0e}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
