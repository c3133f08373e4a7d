"""Kernels of batch normalization with activation and residual, on every GPU since Volta.

The family is not one of ``kernels/planner.py``: it does not convolve, so
``backends/batchnorm/launches.py`` asks its planners itself.
"""
