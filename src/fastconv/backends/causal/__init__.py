"""Causal depthwise convolutions: ``taps`` computes them on a CPU, ``launches`` on a GPU."""
