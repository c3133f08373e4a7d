"""The results of ``fastconv bench``: their classes, their JSON, and comparison of two runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from fastconv import files
from fastconv.bench import limits, row_timing
from fastconv.bench.cases import Case, case_from, complaint
from fastconv.bench.json_values import expect, object_from
from fastconv.bench.limits import Ceilings, Limit
from fastconv.bench.network_results import NETWORKS_FORMAT, NetworkResults, NetworkRow
from fastconv.bench.row_timing import Timing
from fastconv.workloads import from_dict, to_dict

FORMAT = "fastconv bench 1"
HOST_FORMAT = "fastconv bench --host 1"
Kind = TypeVar("Kind")
LEAST_CHANGE = 0.03  # Smaller changes are noise: clocks and temperature differ between runs.


class ResultsError(ValueError):
    """A file does not hold results; the message says why."""


@dataclass(frozen=True)
class Row:
    """The outcome of one case: timings and the limit that binds it, or an error."""

    case: Case
    command: str
    ours: Timing | None = None
    peer: Timing | None = None
    peer_name: str = ""
    limit: Limit | None = None
    compile_s: float | None = None  # sum over our kernels; near 0 if they were in the disk cache
    error: str | None = None
    skipped: str | None = None  # why it was not measured, which is no failure
    own_limit: Limit | None = None  # of our kernels, if they multiply otherwise than the mode says

    @property
    def speedup(self) -> float | None:
        return self.peer.ms / self.ours.ms if self.peer and self.ours else None

    @property
    def unsteady(self) -> bool:
        """Whether the samples of either contestant spread so much that the speed-up says little."""
        return any(timing.unsteady for timing in (self.ours, self.peer) if timing)

    @property
    def complaint(self) -> str | None:
        """Why there are no times, if there are none."""
        return complaint(self.skipped, self.error)

    def share(self, timing: Timing | None) -> float | None:
        """The time of the contestant's limit, over its measured time."""
        limit = self.binding if timing is self.ours else self.limit
        return limit.ms / timing.ms if limit and timing else None

    @property
    def binding(self) -> Limit | None:
        """The limit of our kernels."""
        return self.own_limit or self.limit

    def to_dict(self) -> dict[str, Any]:
        """The row as values for JSON, with figures derived from its own."""
        case = {**vars(self.case), "workload": to_dict(self.case.workload)}
        found = {name: value for name, value in asdict(self).items() if name != "case"}
        derived = {
            "speedup": self.speedup,
            "ours_share": self.share(self.ours),
            "peer_share": self.share(self.peer),
        }
        return case | found | derived

    @classmethod
    def from_dict(cls, entry: Any) -> Row:
        """Reads what :meth:`to_dict` gives; raises a ValueError or KeyError if it is malformed."""
        expect(entry, dict[str, Any], "a row")
        case = case_from(entry, from_dict(entry["workload"]))
        ours, peer = (object_from(Timing, entry[name], name) for name in ("ours", "peer"))
        limit = object_from(Limit, entry["limit"], "limit")
        own_limit = object_from(
            Limit, entry.get("own_limit"), "own_limit"
        )  # Older files have no key.
        for name, kind in (("command", str), ("peer_name", str), ("error", str | None)):
            expect(entry[name], kind, name)
        expect(entry["compile_s"], float | None, "compile_s")
        skipped = entry.get("skipped")  # Older files have no key.
        expect(skipped, str | None, "skipped")
        rest = (entry["peer_name"], limit, entry["compile_s"], entry["error"], skipped, own_limit)
        made = cls(case, entry["command"], ours, peer, *rest)
        measured = ours and peer and limit and ours.ms and peer.ms and limit.bytes
        if made.complaint is None and not measured:
            raise ValueError(f"{case.label} has neither times and a limit nor a reason why not")
        return made


@dataclass(frozen=True)
class Sum:
    """The time of one pass of all of a model's convolutions: rows times their counts, added up."""

    model: str
    direction: str
    mode: str
    format: str
    wanted: int  # layers that the sum should have
    layers: int  # layers that it has: those that were measured
    ours: Timing
    peer: Timing

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Sum:
        """The sum of rows of the same model, pass, mode and format."""
        case = rows[0].case
        counted = [
            (row.case.count, row.ours, row.peer)
            for row in rows
            if row.error is None and row.ours and row.peer
        ]
        return cls(
            case.workload.model, case.direction, case.mode, case.format,
            sum(row.case.count for row in rows), sum(count for count, _, _ in counted),
            _total([(count, ours) for count, ours, _ in counted]),
            _total([(count, peer) for count, _, peer in counted]),
        )  # fmt: skip

    @property
    def label(self) -> str:
        return f"{self.model} {self.direction} {self.mode} {self.format}"

    @property
    def speedup(self) -> float:
        return self.peer.ms / self.ours.ms

    @property
    def unsteady(self) -> bool:
        return self.ours.unsteady or self.peer.unsteady

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup}


def _total(counted: Sequence[tuple[int, Timing]]) -> Timing:
    """The sum of timings times their counts; its spread is the largest that theirs allow."""
    ms = sum(count * one.ms for count, one in counted)
    spread = sum(count * one.ms * one.spread for count, one in counted)
    samples = min((one.samples for _, one in counted), default=0)
    return Timing(ms, spread / (ms or 1.0), samples, sum(one.first_call_ms for _, one in counted))


@dataclass
class Results:
    """The rows of a run of ``fastconv bench``, with a description of the machine."""

    environment: dict[str, str]
    ceilings: Ceilings | None = None
    rows: list[Row] = field(default_factory=list)
    build_s: float = 0.0  # wall-clock time of compiling all kernels in parallel before the rows
    ceilings_after: Ceilings | None = None  # measured again after the last row

    @property
    def measured(self) -> list[Row]:
        """The rows that have times."""
        return [row for row in self.rows if row.complaint is None]

    @property
    def sums(self) -> list[Sum]:
        """The sums of every model, pass, mode and format with at least one measured layer."""
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            case = row.case
            if case.workload.model:
                key = (case.workload.model, case.mode, case.format, case.direction)
                groups.setdefault(key, []).append(row)
        return [found for found in map(Sum.of, groups.values()) if found.layers]

    @property
    def doubts(self) -> list[str]:
        """Sentences that say why the figures mean little: the machine was busy."""
        return limits.doubts(self.ceilings, self.ceilings_after)

    def json(self) -> str:
        contents = {
            "format": FORMAT,
            "environment": self.environment,
            "ceilings": asdict(self.ceilings) if self.ceilings else None,
            "ceilings_after": asdict(self.ceilings_after) if self.ceilings_after else None,
            "build_s": self.build_s,
            "doubts": self.doubts,
            "sums": [found.to_dict() for found in self.sums],
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(contents, indent=1) + "\n"

    def write(self, path: Path) -> None:
        files.write(path, self.json())


@dataclass(frozen=True)
class HostTiming:
    """The host time of a call of one contestant, in microseconds."""

    us: float  # the median
    low_us: float  # the lower quartile
    high_us: float  # the upper quartile
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> HostTiming:
        """Summarises samples, in microseconds."""
        low, median, high = statistics.quantiles(samples, n=4)
        return cls(median, low, high, len(samples))

    @property
    def unsteady(self) -> bool:
        """Whether the samples spread so much that the median says little."""
        return (self.high_us - self.low_us) / 2 > row_timing.UNSTEADY * self.us


@dataclass(frozen=True)
class HostRow:
    """The host times of one kind of call, or why there are none."""

    name: str
    about: str
    ours: HostTiming | None = None
    peer: HostTiming | None = None
    skipped: str | None = None  # why it cannot be measured on this machine
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over PyTorch's: below 1, ours is shorter."""
        return self.ours.us / self.peer.us if self.ours and self.peer else None

    @property
    def unsteady(self) -> bool:
        """Whether the samples of either contestant spread so much that the ratio says little."""
        return any(timing.unsteady for timing in (self.ours, self.peer) if timing)

    @property
    def complaint(self) -> str | None:
        """Why there are no times, if there are none."""
        return complaint(self.skipped, self.error)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}

    @classmethod
    def from_dict(cls, entry: Any) -> HostRow:
        """Reads what :meth:`to_dict` gives; raises a ValueError or KeyError if it is malformed."""
        expect(entry, dict[str, Any], "a row")
        for name in ("name", "about"):
            expect(entry[name], str, name)
        for name in ("skipped", "error"):
            expect(entry[name], str | None, name)
        ours, peer = (object_from(HostTiming, entry[name], name) for name in ("ours", "peer"))
        made = cls(entry["name"], entry["about"], ours, peer, entry["skipped"], entry["error"])
        if not (made.complaint or (ours and peer and ours.us and peer.us)):
            raise ValueError(f"{made.name} has neither times nor a reason why not")
        return made


@dataclass
class HostResults:
    """The rows of ``fastconv bench --host``, with a description of the machine."""

    environment: dict[str, str]
    rows: list[HostRow] = field(default_factory=list)

    def json(self) -> str:
        contents = {
            "format": HOST_FORMAT,
            "environment": self.environment,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(contents, indent=1) + "\n"

    def write(self, path: Path) -> None:
        files.write(path, self.json())


AnyResults: TypeAlias = Results | HostResults | NetworkResults


def read(path: Path) -> Results:
    """Reads a file of ``fastconv bench``; raises a ResultsError if it holds something else."""
    return _load(path, _read)


def read_any(path: Path) -> AnyResults:
    """Reads a file of any kind of results; raises a ResultsError if it holds something else."""
    return _load(path, _read_any)


def _load(path: Path, reader: Callable[[Any], Kind]) -> Kind:
    contents = files.read_json(path)
    try:
        return reader(contents)
    except KeyError as error:
        raise ResultsError(f"{path} does not hold results of fastconv bench: no {error}") from error
    except ValueError as error:
        raise ResultsError(f"{path} does not hold results of fastconv bench: {error}") from error


def _read_any(contents: Any) -> AnyResults:
    expect(contents, dict[str, Any], "it")
    format = contents["format"]
    if format not in (HOST_FORMAT, NETWORKS_FORMAT):
        return _read(contents)
    environment, rows = contents["environment"], contents["rows"]
    expect(environment, dict[str, str], "environment")
    expect(rows, list, "rows")
    if format == HOST_FORMAT:
        return HostResults(environment, list(map(HostRow.from_dict, rows)))
    return NetworkResults(environment, list(map(NetworkRow.from_dict, rows)))


def _read(contents: Any) -> Results:
    expect(contents, dict[str, Any], "it")
    if contents["format"] != FORMAT:
        raise ValueError(f"its format is {contents['format']!r}, not {FORMAT!r}")
    expect(contents["environment"], dict[str, str], "environment")
    expect(contents["rows"], list, "rows")
    expect(contents["build_s"], float, "build_s")
    before = object_from(Ceilings, contents["ceilings"], "ceilings")
    after = object_from(Ceilings, contents.get("ceilings_after"), "ceilings_after")
    for ceilings in filter(None, (before, after)):
        rates = (*ceilings.tflops.values(), *ceilings.mma_tflops.values(), ceilings.copy_tb_s)
        if not all(rates):
            raise ValueError("a ceiling is 0")
    rows = [Row.from_dict(entry) for entry in contents["rows"]]
    return Results(contents["environment"], before, rows, contents["build_s"], after)


@dataclass(frozen=True)
class Change:
    """One case in two runs."""

    case: Case
    old: Timing
    new: Timing
    peer_ratio: float  # the peer's new time over its old: how much the machine itself changed

    @property
    def ratio(self) -> float:
        """New time over old time."""
        return self.new.ms / self.old.ms

    @property
    def noise(self) -> float:
        """How much the ratio may differ from 1 by chance."""
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
    """The changes of all cases that both results have, in the order of the new."""
    before = {row.case: row for row in old.measured}
    for row in new.measured:
        past = before.get(row.case)
        if past and past.ours and past.peer and row.ours and row.peer:
            yield Change(row.case, past.ours, row.ours, row.peer.ms / past.peer.ms)


def unmatched(old: Results, new: Results) -> tuple[Sequence[Case], Sequence[Case]]:
    """The cases that only the old results have, and those that only the new have."""
    before, after = ({row.case: None for row in r.measured} for r in (old, new))
    return [c for c in before if c not in after], [c for c in after if c not in before]
