"""Results as values and as JSON; two of them compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastconv.bench.cases import Case, case_from
from fastconv.bench.limits import Ceilings, Limit
from fastconv.bench.timing import Timing
from fastconv.bench.workloads import from_dict, to_dict

FORMAT = "fastconv bench 1"
LEAST_CHANGE = 0.03  # what clocks and temperature do to the same code from run to run


class ResultsError(ValueError):
    """A file that does not hold results."""


@dataclass(frozen=True)
class Row:
    """What was found for one case: timings and the limit, or else why there are none."""

    case: Case
    command: str
    ours: Timing | None = None
    peer: Timing | None = None
    peer_name: str = ""
    limit: Limit | None = None
    compile_s: float | None = None  # our kernels, one after the other; 0 from the disk cache
    error: str | None = None

    @property
    def speedup(self) -> float | None:
        return self.peer.ms / self.ours.ms if self.peer and self.ours else None

    def share(self, timing: Timing | None) -> float | None:
        """What part of the limit that binds the case a contestant reaches."""
        return self.limit.ms / timing.ms if self.limit and timing else None

    def to_dict(self) -> dict[str, Any]:
        case = {**vars(self.case), "workload": to_dict(self.case.workload)}
        found = {name: value for name, value in asdict(self).items() if name != "case"}
        derived = {
            "speedup": self.speedup,
            "ours_share": self.share(self.ours),
            "peer_share": self.share(self.peer),
        }
        return case | found | derived

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Row:
        case = case_from(entry, from_dict(entry["workload"]))
        ours, peer = (Timing(**entry[k]) if entry[k] else None for k in ("ours", "peer"))
        limit = Limit(**entry["limit"]) if entry["limit"] else None
        rest = (entry["peer_name"], limit, entry["compile_s"], entry["error"])
        return cls(case, entry["command"], ours, peer, *rest)


@dataclass
class Results:
    """The rows of a run, and where they come from."""

    environment: dict[str, str]
    ceilings: Ceilings | None = None
    rows: list[Row] = field(default_factory=list)
    build_s: float = 0.0  # all kernels, compiled side by side before the first row

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.error is None]

    def json(self) -> str:
        contents = {
            "format": FORMAT,
            "environment": self.environment,
            "ceilings": asdict(self.ceilings) if self.ceilings else None,
            "build_s": self.build_s,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(contents, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Replaces the file at once, so that an interruption leaves the old one or the new one."""
        temporary = path.with_name(f"{path.name}.part")
        temporary.write_text(self.json(), encoding="utf-8")
        os.replace(temporary, path)


def read(path: Path) -> Results:
    """The results that a file holds."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if contents["format"] != FORMAT:
            raise ValueError(f"its format is {contents['format']!r}, not {FORMAT!r}")
        ceilings = Ceilings(**contents["ceilings"]) if contents["ceilings"] else None
        rows = [Row.from_dict(entry) for entry in contents["rows"]]
        return Results(contents["environment"], ceilings, rows, contents["build_s"])
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} does not hold results of fastconv bench: {error!r}") from error


@dataclass(frozen=True)
class Change:
    """One case in two results."""

    case: Case
    old: Timing
    new: Timing
    peer_ratio: float  # new over old, of the peer: how much the machine itself changed

    @property
    def ratio(self) -> float:
        """New time over old time."""
        return self.new.ms / self.old.ms

    @property
    def noise(self) -> float:
        """What the ratio may differ from 1 by without meaning anything."""
        return max(LEAST_CHANGE, 2 * math.hypot(self.old.spread, self.new.spread))

    @property
    def verdict(self) -> str:
        if abs(self.ratio - 1) <= self.noise:
            return "same"
        return "faster" if self.ratio < 1 else "slower"

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case.label,
            "old_ms": self.old.ms,
            "new_ms": self.new.ms,
            "ratio": self.ratio,
            "noise": self.noise,
            "peer_ratio": self.peer_ratio,
            "verdict": self.verdict,
        }


def changes(old: Results, new: Results) -> Iterator[Change]:
    """The cases that both results have, in the order of the new."""
    before = {row.case: row for row in old.measured}
    for row in new.measured:
        past = before.get(row.case)
        if past and past.ours and past.peer and row.ours and row.peer:
            yield Change(row.case, past.ours, row.ours, row.peer.ms / past.peer.ms)


def unmatched(old: Results, new: Results) -> tuple[Sequence[Case], Sequence[Case]]:
    """Cases of the old results alone, and of the new alone."""
    before, after = ({row.case: None for row in r.measured} for r in (old, new))
    return [c for c in before if c not in after], [c for c in after if c not in before]
