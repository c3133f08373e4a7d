"""The results of ``fastconv bench --networks``: their classes and their JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastconv import files
from fastconv.bench.cases import complaint
from fastconv.bench.json_values import expect, object_from
from fastconv.bench.row_timing import Timing

NETWORKS_FORMAT = "fastconv bench --networks 2"
COMPILE_MODES = {"default": "compiled", "reduce-overhead": "compiled + CUDA graphs"}
"""The modes of torch.compile that networks are measured in, and their names in tables."""


@dataclass(frozen=True)
class Optimized:
    """What ``fastconv.optimize`` did to a network, and how long it took."""

    layers: int  # 2-D convolutions of the network
    exchanged: int  # convolutions that optimize replaced by ours
    folded: int  # BatchNorms that optimize folded into weights
    fused: bool
    measured: int  # layers that were timed in this run; other times were stored by earlier ones
    seconds: float
    before_ms: float  # sum over all calls of convolutions, timed one by one, by PyTorch
    after_ms: float  # the same sum with the chosen implementations
    notes: str


@dataclass(frozen=True)
class CompiledPair:
    """Times of both networks after ``torch.compile`` in one mode."""

    mode: str  # a key of COMPILE_MODES
    ours: Timing | None = None
    peer: Timing | None = None
    ours_remark: str | None = None  # why there is no time, or what else the time is of
    peer_remark: str | None = None

    @property
    def name(self) -> str:
        return COMPILE_MODES[self.mode]

    @property
    def speedup(self) -> float | None:
        return self.peer.ms / self.ours.ms if self.peer and self.ours else None

    @property
    def unsteady(self) -> bool:
        """Whether samples spread so much that the speed-up says little."""
        return any(one.unsteady for one in (self.ours, self.peer) if one)

    @property
    def remarks(self) -> list[str]:
        """What is to be said about the contestants, each with its name."""
        found = {"fastconv": self.ours_remark, "PyTorch": self.peer_remark}
        return [f"{one} {self.name}: {remark}" for one, remark in found.items() if remark]

    @classmethod
    def from_dict(cls, entry: Any) -> CompiledPair:
        """Reads a pair; raises a ValueError or KeyError if it is malformed."""
        expect(entry, dict[str, Any], "a compiled pair")
        expect(entry["mode"], str, "mode")
        if entry["mode"] not in COMPILE_MODES:
            raise ValueError(f"{entry['mode']!r} is none of {', '.join(COMPILE_MODES)}")
        ours, peer = (object_from(Timing, entry[name], name) for name in ("ours", "peer"))
        remarks = entry["ours_remark"], entry["peer_remark"]
        for remark in remarks:
            expect(remark, str | None, "a remark")
        contestants = zip((ours, peer), remarks, strict=True)
        if not all(time.ms if time else remark for time, remark in contestants):
            raise ValueError("a compiled contestant has neither a time nor a reason why not")
        return cls(entry["mode"], ours, peer, *remarks)


@dataclass(frozen=True)
class NetworkRow:
    """The times of a step of one network before and after optimize, or why there are none."""

    network: str
    mode: str  # "training", "inference"
    configuration: str
    images: str = ""
    ours: Timing | None = None
    peer: Timing | None = None  # PyTorch, eager
    compiled: tuple[CompiledPair, ...] = ()  # by the modes of torch.compile, if requested
    optimized: Optimized | None = None
    difference: float | None = None  # ‖ours - PyTorch's‖ / ‖PyTorch's‖ of the outputs, in inference
    skipped: str | None = None  # why it cannot be measured on this machine
    error: str | None = None

    @property
    def label(self) -> str:
        return f"{self.network} {self.mode} {self.configuration}"

    @property
    def speedup(self) -> float | None:
        return self.peer.ms / self.ours.ms if self.peer and self.ours else None

    @property
    def unsteady(self) -> bool:
        """Whether samples spread so much that the speed-up says little."""
        return any(one.unsteady for one in (self.ours, self.peer) if one)

    @property
    def complaint(self) -> str | None:
        """Why there are no times, if there are none."""
        return complaint(self.skipped, self.error)

    @property
    def compiled_rows(self) -> list[NetworkRow]:
        """A row for each mode of torch.compile; its network's name says which mode it is."""
        rows = []
        for one in self.compiled:
            name = f"{self.network} {one.name}"
            rows.append(replace(self, network=name, ours=one.ours, peer=one.peer, compiled=()))
        return rows

    @property
    def failed(self) -> bool:
        """Whether the row has an error, or a compiled contestant has no time."""
        times = [time for one in self.compiled for time in (one.ours, one.peer)]
        return self.error is not None or None in times

    def to_dict(self) -> dict[str, Any]:
        compiled = [asdict(one) | {"speedup": one.speedup} for one in self.compiled]
        return asdict(self) | {"compiled": compiled, "speedup": self.speedup}

    @classmethod
    def from_dict(cls, entry: Any) -> NetworkRow:
        """Reads what :meth:`to_dict` gives; raises a ValueError or KeyError if it is malformed."""
        expect(entry, dict[str, Any], "a row")
        for name in ("network", "mode", "configuration", "images"):
            expect(entry[name], str, name)
        for name in ("skipped", "error"):
            expect(entry[name], str | None, name)
        expect(entry["difference"], float | None, "difference")
        expect(entry["compiled"], list, "compiled")
        ours, peer = (object_from(Timing, entry[name], name) for name in ("ours", "peer"))
        made = cls(
            entry["network"], entry["mode"], entry["configuration"], entry["images"],
            ours, peer, tuple(map(CompiledPair.from_dict, entry["compiled"])),
            object_from(Optimized, entry["optimized"], "optimized"),
            entry["difference"], entry["skipped"], entry["error"],
        )  # fmt: skip
        measured = ours and peer and made.optimized and ours.ms and peer.ms
        if not (made.complaint or measured):
            raise ValueError(f"{made.label} has neither times nor a reason why not")
        return made


@dataclass(frozen=True)
class CompiledMean:
    """A summary of the speed-ups of compiled networks over compiled networks of PyTorch."""

    mode: str  # of torch.compile
    rows: int
    mean: float  # the geometric mean

    @classmethod
    def of(cls, rows: Sequence[NetworkRow]) -> tuple[CompiledMean, ...]:
        """A summary for each mode of torch.compile that rows have times of."""
        found: dict[str, list[float]] = {}
        for pair in (pair for row in rows for pair in row.compiled):
            if pair.speedup:
                found.setdefault(pair.mode, []).append(pair.speedup)
        return tuple(
            cls(mode, len(speedups), statistics.geometric_mean(speedups))
            for mode, speedups in found.items()
        )


@dataclass(frozen=True)
class Overall:
    """A summary of the networks' speed-ups in one mode."""

    mode: str
    rows: int
    mean: float  # the geometric mean
    of_sums: float  # the sum of PyTorch's times over the sum of ours
    least: float
    least_of: str  # the network and configuration of the least
    compiled: tuple[CompiledMean, ...] = ()  # of compiled networks, if they were measured

    @classmethod
    def of(cls, rows: Sequence[NetworkRow]) -> Overall:
        """The summary of measured rows of the same mode."""
        timed = [(row, row.ours.ms, row.peer.ms) for row in rows if row.ours and row.peer]
        speedups = {row: peer / ours for row, ours, peer in timed}
        least = min(speedups, key=speedups.__getitem__)
        return cls(
            least.mode,
            len(timed),
            statistics.geometric_mean(speedups.values()),
            sum(peer for _, _, peer in timed) / sum(ours for _, ours, _ in timed),
            speedups[least],
            f"{least.network}, {least.configuration}",
            CompiledMean.of(rows),
        )


@dataclass
class NetworkResults:
    """The rows of ``fastconv bench --networks``, with a description of the machine."""

    environment: dict[str, str]
    rows: list[NetworkRow] = field(default_factory=list)

    @property
    def measured(self) -> list[NetworkRow]:
        """The rows that have times."""
        return [row for row in self.rows if row.complaint is None]

    @property
    def overall(self) -> list[Overall]:
        """A summary for each mode that has measured rows."""
        modes = dict.fromkeys(row.mode for row in self.measured)
        return [Overall.of([row for row in self.measured if row.mode == mode]) for mode in modes]

    def json(self) -> str:
        contents = {
            "format": NETWORKS_FORMAT,
            "environment": self.environment,
            "overall": list(map(asdict, self.overall)),
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(contents, indent=1) + "\n"

    def write(self, path: Path) -> None:
        files.write(path, self.json())
