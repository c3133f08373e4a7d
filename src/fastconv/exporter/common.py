"""What all files of the exporter share."""

from __future__ import annotations

from _fastconv_command.choices import EXPORTED_DTYPES

DTYPES = EXPORTED_DTYPES
"""The types that exported files compute in."""
