"""Made-up files of figures, in the layout that the results have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastconv.bench.cases import PASSES, STEP, Case
from fastconv.bench.limits import Ceilings, Limit
from fastconv.bench.network_results import CompiledPair, NetworkResults, NetworkRow, Optimized
from fastconv.bench.networks import CONFIGURATIONS, MODES
from fastconv.bench.results import HostResults, HostRow, HostTiming, Results, Row
from fastconv.bench.row_timing import Timing
from fastconv.workloads import FOUNDING, Workload
from results import catalogue
from results.keeping import Plain
from results.sources import hash_now

LAYER = Workload(
    "resnet50_03", "layer1.0.conv2", (64, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1),
    model="resnet50", count=3,
)  # fmt: skip


def environment(name: str, rows: int) -> dict[str, str]:
    files = {file.name: file for job in catalogue.JOBS for file in job.files}
    return {
        "fastconv": "0", "commit": "0123456789", "torch": "2", "gpu": "NVIDIA H200",
        "time": "2026-01-02T03:04:05+00:00", "threads": "16", "host_path": "native",
        "effort": "3 samples", "rows": f"{rows}", "sources": hash_now(files[name].sources),
    }  # fmt: skip


def timing(ms: float, spread: float = 0.01) -> Timing:
    return Timing(ms, spread, 7, 100.0)


def row(workload: Workload, direction: str, mode: str, format: str, speedup: float) -> Row:
    dtype, _, precision = mode.partition(" ")
    case = Case(workload, direction, dtype, precision or None, format)
    limit = Limit("memory", 0.25, 1000, 1000)
    return Row(case, "fastconv bench", timing(0.5), timing(0.5 * speedup), "PyTorch", limit)


def layers() -> Results:
    """The founding workloads, each pass a little slower than the one before, and a layer."""
    modes = (("float32 tf32", "nchw"), ("float32 ieee", "nchw"), ("bfloat16", "nhwc"))
    cases = [(w, d, *m) for w in FOUNDING for m in modes for d in (*PASSES, STEP)]
    rows = [row(*case, 4.0 - 0.1 * at) for at, case in enumerate(cases)]
    rows.append(row(LAYER, "forward", "bfloat16", "nhwc", 1.25))
    ceilings = Ceilings({"float32 tf32": 400.0, "float32 ieee": 50.0, "bfloat16": 700.0}, 4.0)
    return Results(environment("layers", len(rows)), ceilings, rows)


def networks() -> NetworkResults:
    """Two networks in all modes, of which one loses once; the first is also compiled once."""
    done = Optimized(53, 50, 0, False, 23, 2.0, 20.0, 10.0, "")
    rows = [
        NetworkRow(
            name, mode, configuration.name, "64x3x224x224", timing(10.0), timing(10.0 * speedup),
            optimized=done,
        )
        for name, speedups in (("resnet50", (1.21, 2.39, 1.15, 3.04)), ("unet", (0.95, 1.5, 2, 1)))
        for (configuration, mode), speedup in zip(
            ((c, m) for c in CONFIGURATIONS.values() for m in MODES), speedups, strict=True
        )
    ]  # fmt: skip
    compiled = (
        CompiledPair("default", timing(8.0), timing(6.0)),
        CompiledPair("reduce-overhead", None, timing(5.0), "failed: no memory"),
    )
    rows[2] = replace(rows[2], compiled=compiled)
    return NetworkResults(environment("networks", len(rows)), rows)


def write(folder: Path) -> None:
    """Writes all files of figures of a GPU."""
    folder.mkdir(parents=True)
    layers().write(folder / "layers.json")
    networks().write(folder / "networks.json")
    host = HostRow("small_forward", "a call", *(HostTiming(us, us, us, 9) for us in (8.0, 4.0)))
    HostResults(environment("host", 1), [host]).write(folder / "host.json")
    ways = {"pytorch": 17.1, "cold": 9.0, "prepared": 5.6, "warm": 0.6}
    steps = [
        {"model": "resnet50", "batch": 64, "way": way, "first_s": s, "later_s": 0.03,
         "processors": 16}
        for way, s in ways.items()
    ]  # fmt: skip
    Plain(environment("first-steps", 4), steps).write(folder / "first-steps.json")
    group = {"kind": "family", "name": "hopper", "trials": 9, "wrong": 1, "share": 1.5}
    summary = {
        "asked": 10, "tried": 9, "wrong": 1, "flops": 1e9, "seconds": 3.0, "groups": [group]
    }  # fmt: skip
    failed = {"command": "fastconv verify --shape x", "complaints": {"scales": "off"}}
    checked = {"name": "float64", "command": "fastconv verify --random 10", "seed": 0}
    verified = [{**checked, "summary": summary, "failed": [failed]}]
    Plain(environment("verify", 2), verified).write(folder / "verify.json")
    problems = [
        {"problem": 62, "name": "a", "correct": 5, "seeds": 5, "reference_ms": 2.0,
         "exported_ms": 1.0, "speedup": 2.0, "precision": "ieee"},
        {"problem": 87, "name": "b", "correct": 4, "seeds": 5, "reference_ms": 1.0,
         "exported_ms": 2.0, "speedup": 0.5},
        {"problem": 50, "name": "c", "error": "no nvcc"},
    ]  # fmt: skip
    Plain(environment("kernelbench", 3), problems).write(folder / "kernelbench.json")
