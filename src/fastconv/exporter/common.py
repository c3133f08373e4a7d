"""What all files of the exporter share."""

from __future__ import annotations

DTYPES = ("float32", "float16", "bfloat16")
"""The types that exported files compute in."""
