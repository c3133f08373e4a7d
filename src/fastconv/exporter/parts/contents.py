"""What the exporter fills in: device code, host code, and the plans of what is exported."""

from fastconv.exporter.parts.portable import Geometry, Plan

SOURCES: dict[str, str] = {}
LAUNCHER = ""
BINDINGS = ""
TUNED: dict[tuple[str, Geometry, str, str], Plan] = {}
