"""Comparison with PyTorch behind the ``fastconv`` command: verification, timing, tables, plots."""
