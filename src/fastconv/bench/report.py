"""Results as a terminal table, as Markdown and as JSON."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fastconv
from fastconv.bench.measure import Row

if TYPE_CHECKING:
    from rich.table import Table

_LEFT = ("workload", "pass")
_RIGHT = ("fastconv ms", "PyTorch ms", "speed-up", "TFLOP/s", "error", "PyTorch's", "check")
_NOTE = (
    "median of interleaved runs ± half the interquartile range; "
    "error: ‖result - float64‖ / ‖float64‖"
)


@dataclass(frozen=True)
class Report:
    """Rows and where they come from."""

    rows: Sequence[Row]
    environment: dict[str, str]
    title: str

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device, divisor: int) -> Report:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        scale = "" if divisor == 1 else f", 1/{divisor} of the height and width"
        title = f"fastconv and PyTorch {torch.__version__}, strict float32, NCHW, {where}{scale}"
        return cls(rows, _environment(device), title)

    def table(self) -> Table:
        from rich.table import Table

        table = Table(title=self.title, caption=_NOTE)
        for heading in _LEFT:
            table.add_column(heading, no_wrap=True)
        for heading in _RIGHT:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            *cells, check = _cells(row)
            table.add_row(*cells, f"[{'green' if row.passed else 'red'}]{check}")
        return table

    def markdown(self) -> str:
        lines = [
            f"{self.title}; {_NOTE}.",
            "",
            f"| {' | '.join(_LEFT + _RIGHT)} |",
            f"|{' --- |' * len(_LEFT)}{' ---: |' * len(_RIGHT)}",
            *(f"| {' | '.join(_cells(row))} |" for row in self.rows),
        ]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        rows = [{**asdict(row), "speedup": row.speedup} for row in self.rows]
        return json.dumps({"environment": self.environment, "rows": rows}, indent=1) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.workload.name,
        row.direction,
        f"{row.ours_ms:.3f} ±{row.ours_spread:.0%}",
        f"{row.peer_ms:.3f} ±{row.peer_spread:.0%}",
        f"{row.speedup:.2f}x",
        f"{row.workload.problem.flops / row.ours_ms * 1e-9:.2f}",
        f"{row.ours_error:.1e}",
        f"{row.peer_error:.1e}",
        "ok" if row.passed else "FAIL",
    )


def _environment(device: torch.device) -> dict[str, str]:
    environment = {
        "fastconv": fastconv.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        environment["gpu"] = torch.cuda.get_device_name(device)
        environment["cuda"] = str(torch.version.cuda)
        environment["cudnn"] = str(torch.backends.cudnn.version())
    return environment


def _commit() -> str:
    """The commit of a checkout that fastconv runs from, or "unknown"."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
