"""Kernels of causal depthwise convolutions with states, on every GPU since Volta.

The family is not one of ``kernels/planner.py``: a causal convolution has tensors and options that
no other convolution has, so ``backends/causal/launches.py`` asks its planners itself.
"""
