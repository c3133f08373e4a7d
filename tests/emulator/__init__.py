"""Runs the CUDA kernels on a CPU; see README.md."""

from .driver import EmulatorError, precompile, run, run_both_orders

__all__ = ["EmulatorError", "precompile", "run", "run_both_orders"]
