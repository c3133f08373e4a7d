"""The version of fastconv."""

__version__ = "0.1.0"
