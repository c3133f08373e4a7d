"""The names whose values the exporter writes: device code, host code, and tuned plans."""

from collections.abc import Callable

from fastconv.exporter.parts.portable import Geometry, Plan, Target

SOURCES: dict[str, str] = {}
LAUNCHER = ""
BINDINGS = ""
TARGETS: dict[str, Target] = {}
TUNED: dict[tuple[str, str, Geometry, str, str], Callable[[Callable[[int], int]], Plan]] = {}
