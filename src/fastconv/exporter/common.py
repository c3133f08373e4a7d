"""What all files of the exporter share."""

from __future__ import annotations

from _fastconv_command.choices import EXPORTED_DTYPES

DTYPES = EXPORTED_DTYPES
"""The types that exported files compute in."""


class ExportError(ValueError):
    """Something cannot be exported; the message says what, and what can be."""
